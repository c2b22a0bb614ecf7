//! The certificates of a process, and its checks of the others'.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    CipherSuite, ClientConfig, ClientConnection, DigitallySignedStruct, PeerIncompatible, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme,
};

use super::Session;
use super::explain;
use crate::error::{Error, Result};
use crate::notice::Aside;
use crate::secret_file::{self, Unfit};

/// The longest file of certificates, or of a key, that is read.
const LONGEST: usize = 1 << 20;
/// After this time, files that could not be used are read again though they have not changed: where clocks differ, a new certificate is valid in a
/// moment.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The certificates by which processes authenticate each other, and with which their connections are encrypted:
/// TLS 1.3, in which each side must show a certificate of the same CA.
///
/// The names in a certificate are not checked: every process with a certificate of that CA may take part. So use a CA
/// of the job's or the cluster's own; `phalanx certgen` makes one.
///
/// Certificates may be renewed while a job runs: files that have changed are read again for the next connection. If they cannot be used, as in
/// the middle of a change, or before the new certificate is valid, those before the change still count.
#[derive(Clone)]
pub struct Tls(Arc<Source>);

/// The settings of this process, and the files that they are from.
struct Source {
    /// The CA's certificates, this process's own, and its key. None of what is in no file.
    files: Option<[PathBuf; 3]>,
    current: Mutex<Current>,
}

struct Current {
    ends: Ends,
    /// What the files were when they were last read, whether they could be used or not.
    seen: Option<Seen>,
    /// If they could not, when they are read again.
    again: Option<Instant>,
}

/// Of each file its place on the disk, the time of the last change of it or of who may read it, and its length.
type Seen = [(u64, u64, i64, i64, u64); 3];

/// The settings of each side of a connection.
#[derive(Clone)]
struct Ends {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(..)")
    }
}

impl Tls {
    /// Reads PEM files: the CA's certificate, or those of several; this process's own certificate, followed by any
    /// intermediate ones; and its private key.
    ///
    /// # Errors
    /// If a file cannot be read or holds something else; if the key belongs to another user or may be used by others,
    /// or is not the certificate's; if the certificate is not of that CA, is out of date, or is not meant for both
    /// sides of a connection.
    pub fn read(ca: &Path, certificate: &Path, key: &Path) -> Result<Self> {
        let paths = [ca, certificate, key];
        // A program that changes its folder still finds them.
        let files = paths.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        let seen = look(&files);
        let ends = Ends::read(paths)?;
        Ok(Self(Arc::new(Source {
            files: Some(files),
            current: Mutex::new(Current { ends, seen, again: None }),
        })))
    }

    /// Without checking the certificate, which is in no file.
    #[cfg(test)]
    pub(super) fn new(
        provider: &Arc<CryptoProvider>,
        roots: Arc<RootCertStore>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, rustls::Error> {
        let ends = Ends::new(provider, roots, chain, key)?;
        Ok(Self(Arc::new(Source {
            files: None,
            current: Mutex::new(Current { ends, seen: None, again: None }),
        })))
    }

    /// Until this is dropped, whoever needs the settings waits, as for a disk that does not answer.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Sized {
        self.0.current.lock()
    }

    /// The settings of the files as they are now, if these can be used.
    fn ends(&self) -> Ends {
        let Source { files, current } = &*self.0;
        let mut current = current.lock();
        if let Some(files) = files
            && let Some(seen) = look(files)
        {
            let has_changed = current.seen != Some(seen);
            if has_changed || current.again.is_some_and(|again| again <= Instant::now()) {
                current.seen = Some(seen);
                match Ends::read(files.each_ref().map(PathBuf::as_path)) {
                    Ok(ends) => (current.ends, current.again) = (ends, None),
                    Err(error) => {
                        current.again = Some(Instant::now() + RETRY_DELAY);
                        if has_changed {
                            // Whoever connects does not wait for standard error.
                            Aside::default().warn(format!(
                                "certificates have changed and cannot be used; those before the change still count: {error}"
                            ));
                        }
                    }
                }
            }
        }
        current.ends.clone()
    }

    /// The connecting side of a connection.
    pub(crate) fn client(&self) -> io::Result<Session> {
        // A name that is neither sent nor checked.
        let name = ServerName::try_from("phalanx.invalid").map_err(io::Error::other)?;
        let connection = ClientConnection::new(self.ends().client, name);
        Ok(Session::new(connection.map_err(io::Error::other)?.into()))
    }

    /// The accepting side of a connection.
    pub(crate) fn server(&self) -> io::Result<Session> {
        let connection = ServerConnection::new(self.ends().server);
        Ok(Session::new(connection.map_err(io::Error::other)?.into()))
    }
}

impl Ends {
    /// From the files with the CA's certificates, this process's own and its key.
    fn read([ca, certificate, key]: [&Path; 3]) -> Result<Self> {
        let provider = Arc::new(provider());
        let roots = Arc::new(roots(ca)?);
        let chain = certificates(certificate)?;
        let private = private_key(key)?;
        check(&roots, &chain, &provider).map_err(|error| {
            unusable(certificate, explain::own(&error)).with_remedy(
                "it must be of the CA in PHALANX_TLS_CA, be valid today by this host's clock, and serve clients and \
                 servers: `phalanx certgen` creates valid certificates",
            )
        })?;
        Self::new(&provider, roots, chain, private).map_err(|error| {
            unusable(key, error.to_string())
                .with_remedy("is it the key of the certificate in PHALANX_TLS_CERT?")
        })
    }

    /// Without checking the certificate.
    fn new(
        provider: &Arc<CryptoProvider>,
        roots: Arc<RootCertStore>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, rustls::Error> {
        let asks_clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
                .clear_root_hint_subjects()
                .build()
                .map_err(|error| rustls::Error::General(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(asks_clients)
            .with_single_cert(chain.clone(), key.clone_key())?;
        // Every connection does a full handshake.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        let asks_servers = AnyOfTheCa { roots, algorithms: provider.signature_verification_algorithms };
        let mut client = ClientConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(asks_servers))
            .with_client_auth_cert(chain, key)?;
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// What these files are now; none if one of them cannot be found, as in the middle of a change.
fn look(files: &[PathBuf; 3]) -> Option<Seen> {
    let [ca, certificate, key] = files.each_ref().map(|path| {
        let about = std::fs::metadata(path).ok()?;
        Some((about.dev(), about.ino(), about.ctime(), about.ctime_nsec(), about.size()))
    });
    Some([ca?, certificate?, key?])
}

/// Accepts a server whose certificate is of the CA, whatever its names.
#[derive(Debug)]
struct AnyOfTheCa {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for AnyOfTheCa {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Checks that others would accept this certificate, on both sides of a connection.
fn check(
    roots: &Arc<RootCertStore>,
    chain: &[CertificateDer<'static>],
    provider: &Arc<CryptoProvider>,
) -> Result<(), rustls::Error> {
    let Some((own, intermediates)) = chain.split_first() else { return Ok(()) };
    let (now, algorithms) = (UnixTime::now(), provider.signature_verification_algorithms.all);
    let parsed = ParsedCertificate::try_from(own)?;
    verify_server_cert_signed_by_trust_anchor(&parsed, roots, intermediates, now, algorithms)?;
    let asks_clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider))
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    asks_clients.verify_client_cert(own, intermediates, now).map(|_| ())
}

/// ring's. Both ends prefer AES with keys of 128 bits, which every implementation of TLS 1.3 must have: AES with 256 bits has 14 rounds a block in
/// place of 10.
pub(super) fn provider() -> CryptoProvider {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
}

fn roots(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| {
            unusable(path, error.to_string()).with_remedy("name the CA's certificate, in PEM")
        })?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let refuse = |why: String| {
        unusable(path, why).with_remedy(
            "name a readable file of certificates in PEM: `phalanx certgen` creates valid certificates",
        )
    };
    // What a longer file holds behind that would be left out without a word: a CA that peers have, or the end of a chain.
    let text = secret_file::read_regular(path, LONGEST as u64).map_err(|error| refuse(error.to_string()))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let certificates = certificates.map_err(|error| refuse(error.to_string()))?;
    match certificates.is_empty() {
        true => Err(refuse("it holds no certificate".to_owned())),
        false => Ok(certificates),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let remedy =
        "name the readable file of a private key in PEM: `phalanx certgen` creates one for each host";
    let text = secret_file::read(path, LONGEST).map_err(|unfit| match unfit {
        Unfit::Unreadable(error) => unusable(path, error.to_string()).with_remedy(remedy),
        Unfit::Unsafe { why, remedy: other } => {
            unusable(path, why).with_remedy(other.unwrap_or_else(|| remedy.to_owned()))
        }
    })?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|_| {
        // Without the parser's error, which might contain a part of the key.
        unusable(path, "it holds no private key that can be read without a password".to_owned())
            .with_remedy(remedy)
    })
}

fn unusable(path: &Path, why: String) -> Error {
    Error::environment(format!("{} cannot be used for TLS: {why}", path.display()))
        .in_operation("reading certificates", None)
}
