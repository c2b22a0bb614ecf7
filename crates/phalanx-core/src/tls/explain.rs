//! Explains errors of rustls to the user who has to correct them.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

use super::{ALL_OR_NONE, Refusal};

const SAME_CA: &str = "give every process of the job a certificate of the same CA (PHALANX_TLS_CA), valid today, for \
                       clients and servers";
const LOOK_THERE: &str = "its own output says why; give every process of the job a certificate of the same CA \
                          (PHALANX_TLS_CA), valid today, for clients and servers";

/// Why the other side is not accepted, or does not accept this one.
pub(super) fn refusal(error: &Error) -> io::Error {
    match error {
        Error::InvalidCertificate(why) => Refusal::of_certificates(
            format!("its certificate is not accepted: {}", certificate(why)),
            SAME_CA,
        ),
        Error::NoCertificatesPresented => Refusal::error("it shows no certificate", SAME_CA),
        // The answer of a side without TLS to one with it.
        Error::AlertReceived(AlertDescription::ProtocolVersion) => Refusal::plain(),
        Error::AlertReceived(AlertDescription::CertificateRequired) => {
            Refusal::error("it wants a certificate and was shown none", SAME_CA)
        }
        Error::AlertReceived(alert) => {
            let what = format!("it does not accept this process's certificate ({alert:?})");
            match is_of_certificates(*alert) {
                true => Refusal::of_certificates(what, LOOK_THERE),
                false => Refusal::error(what, LOOK_THERE),
            }
        }
        Error::InvalidMessage(_) => Refusal::error(format!("what it says is not TLS ({error})"), ALL_OR_NONE),
        other => Refusal::error(format!("TLS with it failed: {other}"), SAME_CA),
    }
}

/// Whether this alert is about a certificate.
fn is_of_certificates(alert: AlertDescription) -> bool {
    use AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRevoked, CertificateUnknown,
        DecryptError, UnknownCA, UnsupportedCertificate,
    };
    matches!(
        alert,
        AccessDenied
            | BadCertificate
            | CertificateExpired
            | CertificateRevoked
            | CertificateUnknown
            | DecryptError
            | UnknownCA
            | UnsupportedCertificate
    )
}

/// Why this process's own certificate cannot be used.
pub(super) fn own(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(why) => certificate(why),
        other => other.to_string(),
    }
}

fn certificate(why: &CertificateError) -> String {
    match why {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => "it is of another CA".to_owned(),
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has expired".to_owned(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet, by this host's clock".to_owned()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "it is not meant for clients and servers".to_owned()
        }
        other => other.to_string(),
    }
}
