//! Certificates for tests, made when they run.
#![allow(clippy::unwrap_used, dead_code, reason = "helpers of tests are tests, and not every test needs all")]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// A CA of its own.
pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its private key.
pub struct Certificate {
    pub pem: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = params("CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    pub fn certificate(&self) -> Certificate {
        self.certificate_with(|_| {})
    }

    pub fn expired(&self) -> Certificate {
        self.certificate_with(|params| {
            params.not_after = (SystemTime::now() - Duration::from_secs(60)).into()
        })
    }

    pub fn certificate_with(&self, change: impl FnOnce(&mut CertificateParams)) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let mut params = params("host");
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        Certificate { pem: params.signed_by(&key, &self.issuer).unwrap().pem(), key: key.serialize_pem() }
    }

    /// Leaves this CA's certificate, another one and its key in `folder`.
    pub fn write(&self, certificate: &Certificate, folder: &Path) -> [PathBuf; 3] {
        use std::os::unix::fs::PermissionsExt;
        let paths = ["ca.pem", "host.pem", "host.key"].map(|name| folder.join(name));
        for (path, text) in paths.iter().zip([&self.pem, &certificate.pem, &certificate.key]) {
            std::fs::write(path, text).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        paths
    }
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    let (now, day) = (SystemTime::now(), Duration::from_secs(24 * 3600));
    (params.not_before, params.not_after) = ((now - day).into(), (now + day).into());
    params
}
