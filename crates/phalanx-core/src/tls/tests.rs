//! Sessions without a network, and refused certificates.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::ffi::OsString;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CipherSuite, DigitallySignedStruct, RootCertStore, SignatureScheme};

use self::certificates::{Authority, Certificate};
use super::config::provider;
use super::*;

#[path = "../../tests/support/certificates.rs"]
pub(crate) mod certificates;
pub(crate) mod raw_client;

/// Accepts any certificate, as a program may that does not check its own.
pub(crate) fn unchecked(ca: &Authority, certificate: &Certificate) -> Tls {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap()).unwrap();
    let chain = vec![CertificateDer::from_pem_slice(certificate.pem.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).unwrap();
    Tls::new(&Arc::new(provider()), Arc::new(roots), chain, key).unwrap()
}

#[test]
fn the_quick_cipher_is_chosen_and_none_is_missing() {
    let suites = |provider: CryptoProvider| -> Vec<CipherSuite> {
        provider.cipher_suites.iter().map(|suite| suite.suite()).collect()
    };
    let (mut own, mut all) = (suites(provider()), suites(ring::default_provider()));
    assert_eq!(own[0], CipherSuite::TLS13_AES_128_GCM_SHA256);
    own.sort_unstable_by_key(|suite| u16::from(*suite));
    all.sort_unstable_by_key(|suite| u16::from(*suite));
    assert_eq!(own, all);
    let tls = good();
    let (_, client, server) = handshake(&tls, &tls, usize::MAX).unwrap();
    assert_eq!([client.cipher(), server.cipher()], [Some(CipherSuite::TLS13_AES_128_GCM_SHA256); 2]);
}

/// A certificate of a CA of its own.
pub(crate) fn good() -> Tls {
    let ca = Authority::new();
    unchecked(&ca, &ca.certificate())
}

/// Accepts every server without a check.
pub(crate) fn trusting() -> Arc<dyn ServerCertVerifier> {
    #[derive(Debug)]
    struct Trusting;
    impl ServerCertVerifier for Trusting {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, rustls::Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            ring::default_provider().signature_verification_algorithms.supported_schemes()
        }
    }
    Arc::new(Trusting)
}

/// The bytes in transit between two sides.
#[derive(Default)]
struct Wire {
    there: Vec<u8>,
    back: Vec<u8>,
    /// How many bytes are sent and received at once.
    step: usize,
}

/// One side of the connection.
struct End<'a> {
    out: &'a mut Vec<u8>,
    into: &'a mut Vec<u8>,
    step: usize,
}

impl Wire {
    fn client(&mut self) -> End<'_> {
        End { out: &mut self.there, into: &mut self.back, step: self.step }
    }

    fn server(&mut self) -> End<'_> {
        End { out: &mut self.back, into: &mut self.there, step: self.step }
    }
}

impl Read for End<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(self.into.len()).min(self.step);
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        buffer[..count].copy_from_slice(&self.into[..count]);
        self.into.drain(..count);
        Ok(count)
    }
}

impl Write for End<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Continues after errors that only mean that nothing is there now.
fn patient<T: Default>(result: io::Result<T>) -> io::Result<T> {
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(T::default())
        }
        result => result,
    }
}

/// Simulates the handshake. Returns why it failed, on each side.
fn handshake(
    client: &Tls,
    server: &Tls,
    step: usize,
) -> Result<(Wire, Session, Session), [Option<io::Error>; 2]> {
    let mut wire = Wire { step, ..Wire::default() };
    let (mut client, mut server) = (client.client().unwrap(), server.server().unwrap());
    let (mut done, mut errors) = ((false, false), [None, None]);
    for _ in 0..100_000 {
        match patient(client.handshake(&mut wire.client())) {
            Ok(is_done) => done.0 |= is_done,
            Err(error) => errors[0] = errors[0].take().or(Some(error)),
        }
        match patient(server.handshake(&mut wire.server())) {
            Ok(is_done) => done.1 |= is_done,
            Err(error) => errors[1] = errors[1].take().or(Some(error)),
        }
        if done == (true, true) {
            return Ok((wire, client, server));
        }
        if errors[1].is_some() && errors[0].is_none() && done.0 {
            // The client learns with the first answer that it is refused.
            let mut byte = [0];
            errors[0] = patient(client.receive(&mut wire.client(), &mut [IoSliceMut::new(&mut byte)])).err();
        }
        if errors.iter().all(Option::is_some) {
            return Err(errors);
        }
    }
    panic!("the handshake has no end: {done:?} {errors:?}");
}

#[test]
fn what_is_sent_arrives_however_it_is_cut_and_is_not_to_be_read_on_the_way() {
    let tls = good();
    for step in [1, 7, 1000, usize::MAX] {
        let (mut wire, mut client, mut server) = handshake(&tls, &tls, step).unwrap();
        let text: Vec<u8> =
            (0..if step == 1 { 40_000 } else { 700_000u32 }).map(|i| (i % 251) as u8).collect();
        let (mut sent, mut got) = (0, vec![0; text.len()]);
        let mut received = 0;
        while received < text.len() {
            let (head, rest) = text[sent..].split_at((text.len() - sent).min(48));
            let parts = [IoSlice::new(head), IoSlice::new(rest)];
            sent += client.send(&mut wire.client(), &parts).unwrap().0;
            assert!(!wire.there.windows(48).any(|window| window == &text[..48]));
            // `peek` does not consume.
            let mut seen = [0; 64];
            let ahead = patient(server.peek(&mut wire.server(), &mut seen)).unwrap();
            assert_eq!(seen[..ahead], text[received..received + ahead]);
            let (first, second) = got[received..].split_at_mut((text.len() - received).min(10));
            let mut into = [IoSliceMut::new(first), IoSliceMut::new(second)];
            received += patient(server.receive(&mut wire.server(), &mut into)).unwrap();
        }
        assert!(got == text && !server.holds_input());
    }
}

#[test]
fn little_is_read_at_once_until_the_other_end_is_admitted() {
    /// Records the largest read.
    struct Asked<'a>(End<'a>, usize);
    impl Read for Asked<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 = self.1.max(buffer.len());
            self.0.read(buffer)
        }
    }
    let tls = good();
    let (mut wire, mut client, mut server) = handshake(&tls, &tls, usize::MAX).unwrap();
    let mut most = |server: &mut Session| {
        let (mut left, mut into, mut most) = (60_000, [0; 4096], 0);
        let sent = client.send(&mut wire.client(), &[IoSlice::new(&vec![7; left])]).unwrap();
        assert_eq!(sent, (left, true));
        while left > 0 {
            let mut asked = Asked(wire.server(), 0);
            left -= patient(server.receive(&mut asked, &mut [IoSliceMut::new(&mut into)])).unwrap();
            most = most.max(asked.1);
        }
        most
    };
    assert_eq!(most(&mut server), 1024);
    server.admit();
    assert!(most(&mut server) > 100_000);
}

#[test]
fn who_sends_a_record_in_pieces_holds_nobody_who_looks() {
    /// Counts the reads.
    struct Counted<'a>(End<'a>, usize);
    impl Read for Counted<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 += 1;
            self.0.read(buffer)
        }
    }
    let tls = good();
    let (mut wire, mut client, mut server) = handshake(&tls, &tls, usize::MAX).unwrap();
    client.send(&mut wire.client(), &[IoSlice::new(&[7; 1000])]).unwrap();
    // Byte by byte, so that there is always something to read.
    wire.step = 1;
    let mut seen = [0; 8];
    for _ in 0..100 {
        let mut counted = Counted(wire.server(), 0);
        let looked = patient(server.peek(&mut counted, &mut seen)).unwrap();
        assert!(counted.1 <= 64, "{} reads", counted.1);
        if looked > 0 {
            return assert_eq!(seen[..looked], [7; 8][..looked]);
        }
    }
    panic!("it never came");
}

#[test]
fn both_ends_of_a_session_have_its_binding_and_no_other_session_has() {
    let tls = good();
    let bindings = [(), ()].map(|()| {
        let (_, client, server) = handshake(&tls, &tls, usize::MAX).unwrap();
        assert_eq!(client.binding().unwrap(), server.binding().unwrap());
        client.binding().unwrap()
    });
    assert_ne!(bindings[0], bindings[1]);
}

#[test]
fn who_has_no_good_certificate_is_refused_by_either_end_and_both_say_why() {
    let (ca, other) = (Authority::new(), Authority::new());
    let good = unchecked(&ca, &ca.certificate());
    let for_servers = ca.certificate_with(|params| {
        params.extended_key_usages.truncate(1);
    });
    for (bad, why) in [
        (unchecked(&ca, &ca.expired()), "it has expired"),
        // It knows the CA, but has a certificate of another.
        (unchecked(&ca, &other.certificate()), "it is of another CA"),
    ] {
        let [client, server] = handshake(&bad, &good, usize::MAX).err().unwrap().map(Option::unwrap);
        assert!(server.to_string().contains(why), "{server}");
        assert!(client.to_string().contains("does not accept this process's certificate"), "{client}");
        assert!(Refusal::remedy(&client).is_some() && Refusal::remedy(&server).is_some());
        let [client, server] = handshake(&good, &bad, usize::MAX).err().unwrap().map(Option::unwrap);
        assert!(client.to_string().contains(why), "{client}");
        assert!(server.to_string().contains("does not accept this process's certificate"), "{server}");
    }
    let [_, server] = handshake(&unchecked(&ca, &for_servers), &good, usize::MAX).err().unwrap();
    assert!(server.unwrap().to_string().contains("not meant for clients"));
}

#[test]
fn who_shows_no_certificate_is_refused() {
    use rustls::{ClientConfig, ClientConnection};
    let ca = Authority::new();
    let mut server = unchecked(&ca, &ca.certificate()).server().unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap()).unwrap();
    let certificate = ca.certificate_with(|params| {
        params.subject_alt_names = vec![rcgen::SanType::DnsName("host".try_into().unwrap())];
    });
    let mut server_of_host = unchecked(&ca, &certificate).server().unwrap();
    std::mem::swap(&mut server, &mut server_of_host);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(config), "host".try_into().unwrap()).unwrap();
    let mut wire = Wire { step: usize::MAX, ..Wire::default() };
    for _ in 0..10 {
        let _ = client.write_tls(&mut wire.client());
        match patient(server.handshake(&mut wire.server())) {
            Ok(done) => assert!(!done),
            Err(error) => {
                assert!(error.to_string().contains("it shows no certificate"), "{error}");
                return;
            }
        }
        if client.read_tls(&mut wire.client()).is_ok() {
            client.process_new_packets().unwrap();
        }
    }
    panic!("it was not refused");
}

#[test]
fn endless_and_foreign_words_end_a_handshake() {
    let tls = good();
    let (words, long) = ([b"PHXS\x01\0\0\0".repeat(20), vec![0; 100], vec![22; 100]], vec![0; 20_000]);
    for words in words {
        let mut server = tls.server().unwrap();
        let mut wire = Wire { there: words.clone(), back: Vec::new(), step: usize::MAX };
        let error = (0..100).find_map(|_| patient(server.handshake(&mut wire.server())).err()).unwrap();
        assert!(Refusal::remedy(&error).is_some(), "{error}");
        // A client without TLS gets an answer that it understands.
        assert!(crate::wire::tls::is_alert(&wire.back), "{:?}", wire.back);
    }
    // A handshake message whose announced length is too large, in valid records.
    let mut server = tls.server().unwrap();
    let start = [22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xf0];
    let record = [&[22, 3, 1, 0x40, 0][..], &long[..0x4000]].concat();
    let there = [&start[..], &long[..0x4000 - 4], &record, &record].concat();
    let mut wire = Wire { there, back: Vec::new(), step: usize::MAX };
    let error = (0..1000).find_map(|_| patient(server.handshake(&mut wire.server())).err()).unwrap();
    assert!(error.to_string().contains("TLS handshake is too long"), "{error}");
}

#[test]
fn files_are_looked_at_before_anybody_connects() {
    let (ca, other) = (Authority::new(), Authority::new());
    let folder = tempfile::tempdir().unwrap();
    let read = |[ca, certificate, key]: &[PathBuf; 3]| Tls::read(ca, certificate, key);
    let paths = ca.write(&ca.certificate(), folder.path());
    read(&paths).unwrap();
    let long = ca.certificate();
    let long = Certificate { pem: format!("{}{}", long.pem, "\n".repeat(1 << 20)), ..long };
    for (certificate, why) in [
        (long, "it is longer than 1048576 bytes"),
        (ca.expired(), "host.pem cannot be used for TLS: it has expired"),
        (other.certificate(), "it is of another CA"),
        (Certificate { key: ca.certificate().key, ..ca.certificate() }, "host.key cannot be used for TLS"),
        (Certificate { key: String::new(), ..ca.certificate() }, "no private key"),
        (Certificate { pem: "text".to_owned(), ..ca.certificate() }, "it holds no certificate"),
    ] {
        let error = read(&ca.write(&certificate, folder.path())).unwrap_err();
        assert!(error.is_environment() && error.to_string().contains(why), "{error}");
        assert!(error.remedy().is_some(), "{error}");
    }
    let [ca_file, certificate, key] = ca.write(&ca.certificate(), folder.path());
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let error = Tls::read(&ca_file, &certificate, &key).unwrap_err();
    assert!(error.to_string().contains("others may use it (mode 640)"), "{error}");
}

#[test]
fn certificates_that_are_renewed_are_those_of_the_next_connection() {
    let (ca, other) = (Authority::new(), Authority::new());
    let (folder, renewed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let paths = ca.write(&ca.certificate(), folder.path());
    let next = other.write(&other.certificate(), renewed.path());
    let [ca_file, certificate, key] = &paths;
    let tls = Tls::read(ca_file, certificate, key).unwrap();
    let peers = [&ca, &other].map(|ca| unchecked(ca, &ca.certificate()));
    let accepts = || {
        let with = |peer: &Tls| {
            let [there, back] = [(&tls, peer), (peer, &tls)]
                .map(|(client, server)| handshake(client, server, usize::MAX).is_ok());
            assert_eq!(there, back);
            there
        };
        [with(&peers[0]), with(&peers[1])]
    };
    assert_eq!(accepts(), [true, false]);
    // In the middle of the change the certificate is of another CA than the file names, and then not that of the key.
    for (place, expected) in [(1, [true, false]), (0, [true, false]), (2, [false, true])] {
        std::fs::rename(&next[place], &paths[place]).unwrap();
        assert_eq!(accepts(), expected, "{}", paths[place].display());
    }
    drop(folder);
    assert_eq!(accepts(), [false, true], "the files are gone");
}

#[test]
fn a_renewed_certificate_that_is_not_valid_yet_is_that_of_a_later_connection() {
    let (ca, other) = (Authority::new(), Authority::new());
    let (folder, renewed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let paths = ca.write(&ca.certificate(), folder.path());
    let [ca_file, certificate, key] = &paths;
    let tls = Tls::read(ca_file, certificate, key).unwrap();
    // As where the clock of the host with the CA is ahead.
    let valid_from = SystemTime::now() + Duration::from_secs(3);
    let next = other.certificate_with(|params| params.not_before = valid_from.into());
    for (next, path) in other.write(&next, renewed.path()).iter().zip(&paths) {
        std::fs::rename(next, path).unwrap();
    }
    let (peer, start) = (unchecked(&other, &other.certificate()), Instant::now());
    while handshake(&tls, &peer, usize::MAX).is_err() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
}

#[test]
fn variables_go_together() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Authority::new();
    let paths = ca.write(&ca.certificate(), folder.path());
    let with = |count: usize| {
        Tls::from_variables(|name| {
            let place = VARIABLES.iter().position(|other| *other == name)?;
            Some(paths.get(place).filter(|_| place < count).map_or_else(OsString::new, OsString::from))
        })
    };
    assert!(with(0).unwrap().is_none() && with(3).unwrap().is_some());
    let error = with(2).unwrap_err();
    assert!(error.to_string().contains("PHALANX_TLS_KEY names none") && error.remedy().is_some(), "{error}");
}
