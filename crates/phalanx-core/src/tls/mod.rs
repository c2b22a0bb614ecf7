//! Mutual TLS: its files, and its errors. Everything after the handshake is encrypted, and only processes with a
//! certificate of the job's CA complete the handshake. The job key is still proven, inside TLS.
//!
//! The host names in a certificate are not checked: the CA is the job's or the cluster's own, and each rank
//! is client and server, at addresses that are known only when it runs.
//!
//! # Why TLS, and not Noise
//!
//! Noise's pattern NNpsk0 (crate `snow`, looked at as of 0.10) would encrypt with the job key alone, without
//! certificates and with forward secrecy. It was weighed and left:
//!
//! - TLS stays, because sites with certificates ask for it. Noise would be a third mode beside it and the plain one, in
//!   ranks, store and launchers, each with its own tests, fuzz targets and errors. By default it brings a second set of
//!   primitives beside rustls's ring.
//! - It replaces only the proof of the key: hello, generation and welcome stay, inside it.
//! - A Noise message has at most 65,535 bytes. Records, their lengths, partial reads and writes, and pressure back to
//!   the sender would be our code on the data path; rustls has them.
//! - Each byte is encrypted by the same kinds of cipher, so nothing is gained in speed. Neither was measured against
//!   the other.
//! - What certificates cost a user is one command: `phalanx certgen` makes those of a job.
//!
//! If a user needs encryption where no certificate can be distributed, this is to be weighed anew.
//!
//! # Why rustls with ring
//!
//! rustls has no C of its own, and its sessions know nothing of sockets: one `Session` serves the ranks' sockets, which
//! do not block, the store client's, which do, and the server's tasks. A C compiler builds ring in some seconds, on any
//! Debian with Rust; aws-lc-rs is larger, takes minutes, and needs CMake where it has no ready build.

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod config;
#[cfg(feature = "tls")]
mod explain;
#[cfg(feature = "tls")]
mod session;
#[cfg(all(test, feature = "tls"))]
pub(crate) mod tests;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

#[cfg(not(feature = "tls"))]
pub(crate) use self::absent::Session;
#[cfg(not(feature = "tls"))]
pub use self::absent::Tls;
#[cfg(feature = "tls")]
pub use self::config::Tls;
#[cfg(feature = "tls")]
pub(crate) use self::session::Session;
use crate::error::{Error, Result};
pub(crate) use crate::wire::auth::Binding;

/// The variables that name a process's certificates and its private key.
pub const VARIABLES: [&str; 3] = ["PHALANX_TLS_CA", "PHALANX_TLS_CERT", "PHALANX_TLS_KEY"];

const ALL_OR_NONE: &str = "give every process of the job its certificates (PHALANX_TLS_CA, PHALANX_TLS_CERT and \
                           PHALANX_TLS_KEY, or --tls-ca, --tls-cert and --tls-key), or none of them";

impl Tls {
    /// The files that `PHALANX_TLS_CA`, `PHALANX_TLS_CERT` and `PHALANX_TLS_KEY` name, as for [`read`](Self::read).
    /// None if none of them is set.
    ///
    /// # Errors
    /// As those of [`read`](Self::read), and if some of the three are set and others are not.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let paths = VARIABLES.map(|name| variable(name).filter(|path| !path.is_empty()).map(PathBuf::from));
        match paths {
            [None, None, None] => Ok(None),
            [Some(ca), Some(certificate), Some(key)] => Self::read(&ca, &certificate, &key).map(Some),
            some => {
                let missing = VARIABLES.iter().zip(&some).find(|(_, path)| path.is_none());
                let missing = missing.map_or("", |(name, _)| name);
                Err(Error::environment(format!("TLS needs three files, and {missing} names none"))
                    .with_remedy("set PHALANX_TLS_CA, PHALANX_TLS_CERT and PHALANX_TLS_KEY, or none of them"))
            }
        }
    }
}

/// Why TLS made a connection fail.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct Refusal {
    what: String,
    remedy: &'static str,
    /// Both use TLS, and one does not accept the other's certificate.
    is_of_certificates: bool,
}

impl Refusal {
    /// The other side does not use TLS.
    pub(crate) fn plain() -> io::Error {
        Self::error("it speaks no TLS, which this process has certificates for", ALL_OR_NONE)
    }

    /// The other side requires TLS.
    pub(crate) fn wanted() -> io::Error {
        Self::error("it wants TLS, for which this process has no certificates", ALL_OR_NONE)
    }

    fn error(what: impl Into<String>, remedy: &'static str) -> io::Error {
        Self { what: what.into(), remedy, is_of_certificates: false }.into()
    }

    /// One side has no certificate that the other accepts.
    #[cfg(feature = "tls")]
    fn of_certificates(what: impl Into<String>, remedy: &'static str) -> io::Error {
        Self { what: what.into(), remedy, is_of_certificates: true }.into()
    }

    /// Whether `error` is one of these, because one side does not accept the other's certificate.
    pub(crate) fn is_of_certificates(error: &io::Error) -> bool {
        Self::in_error(error).is_some_and(|refusal| refusal.is_of_certificates)
    }

    /// The remedy for `error`, if it is one of these.
    pub(crate) fn remedy(error: &io::Error) -> Option<&'static str> {
        Self::in_error(error).map(|refusal| refusal.remedy)
    }

    fn in_error(error: &io::Error) -> Option<&Self> {
        error.get_ref().and_then(|error| error.downcast_ref())
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(io::ErrorKind::InvalidData, refusal)
    }
}
