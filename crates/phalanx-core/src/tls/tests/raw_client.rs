//! An authenticated client that can send records without content, which rustls's own client never does.

use std::io::{Read, Write};
use std::sync::Arc;

use rustls::crypto::cipher::{MessageEncrypter, OutboundChunks, OutboundPlainMessage};
use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    ClientConfig, ClientConnection, ConnectionTrafficSecrets, ContentType, ProtocolVersion, RootCertStore,
};

use super::certificates::Authority;
use super::{Tls, unchecked};

pub(crate) struct RawClient {
    encrypter: Box<dyn MessageEncrypter>,
    next: u64,
}

/// An accepting side, and a client that it accepts.
pub(crate) fn pair() -> (Tls, Arc<ClientConfig>) {
    let ca = Authority::new();
    let certificate = ca.certificate_with(|params| {
        params.subject_alt_names = vec![rcgen::SanType::DnsName("host".try_into().unwrap())];
    });
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap()).unwrap();
    let chain = vec![CertificateDer::from_pem_slice(certificate.pem.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).unwrap();
    let suites = vec![TLS13_AES_128_GCM_SHA256];
    let provider = CryptoProvider { cipher_suites: suites, ..ring::default_provider() };
    let mut client = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    client.enable_secret_extraction = true;
    (unchecked(&ca, &certificate), Arc::new(client))
}

impl RawClient {
    /// Does the handshake on a blocking connection.
    pub(crate) fn connect(config: Arc<ClientConfig>, io: &mut (impl Read + Write)) -> Self {
        let mut client = ClientConnection::new(config, "host".try_into().unwrap()).unwrap();
        while client.is_handshaking() || client.wants_write() {
            client.complete_io(io).unwrap();
        }
        let (next, secrets) = client.dangerous_extract_secrets().unwrap().tx;
        let ConnectionTrafficSecrets::Aes128Gcm { key, iv } = secrets else { panic!("another cipher") };
        let suite = TLS13_AES_128_GCM_SHA256.tls13().unwrap();
        Self { encrypter: suite.aead_alg.encrypter(key, iv), next }
    }

    /// One record.
    pub(crate) fn record(&mut self, content: &[u8]) -> Vec<u8> {
        let message = OutboundPlainMessage {
            typ: ContentType::ApplicationData,
            version: ProtocolVersion::TLSv1_2,
            payload: OutboundChunks::Single(content),
        };
        self.next += 1;
        self.encrypter.encrypt(message, self.next - 1).unwrap().encode()
    }
}
