//! The store over TLS: which clients are accepted, and which answer the others get.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::access_tests::bound_to;
use super::{Access, KeylessClients, Refusals, TcpStore, TcpStoreServer};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::key::JobKey;
use crate::store::Store;
use crate::tls::Tls;
use crate::tls::tests::certificates::Authority;
use crate::tls::tests::{good, trusting, unchecked};
use crate::wire::store::{Frame, MAGIC, Op};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn with(tls: Tls) -> Credentials {
    Credentials { tls: Some(tls), ..Credentials::default() }
}

fn serve(credentials: &Credentials, keyless: KeylessClients) -> TcpStoreServer {
    let access = Access::to(credentials.clone(), keyless);
    TcpStoreServer::bind_for(([127, 0, 0, 1], 0).into(), access).unwrap()
}

#[test]
fn a_hundred_clients_share_a_store() {
    for key in [None, Some(JobKey::generate().unwrap())] {
        let credentials = Credentials { key, tls: Some(good()) };
        let server = serve(&credentials, KeylessClients::None);
        let address = server.local_addr();
        thread::scope(|scope| {
            for number in 0..100u32 {
                let credentials = &credentials;
                scope.spawn(move || {
                    let store = TcpStore::connect_with(address, credentials, soon()).unwrap();
                    store.set(&number.to_string(), &number.to_le_bytes(), soon()).unwrap();
                    let next = ((number + 1) % 100).to_string();
                    // Waits until it is set.
                    assert_eq!(store.get(&next, soon()).unwrap(), ((number + 1) % 100).to_le_bytes());
                    store.add("sum", i64::from(number), soon()).unwrap();
                });
            }
        });
        let store = TcpStore::connect_with(address, &credentials, soon()).unwrap();
        assert_eq!(store.get("sum", soon()).unwrap(), b"4950");
        // A value of many records, and a wait that is cancelled.
        let long: Vec<u8> = (0..2_000_000u32).map(|i| (i % 253) as u8).collect();
        store.set("long", &long, soon()).unwrap();
        assert!(store.get("long", soon()).unwrap() == long);
        assert!(store.get("never", Deadline::after(Duration::from_millis(100))).unwrap_err().is_timeout());
        assert_eq!(store.get("sum", soon()).unwrap(), b"4950");
    }
}

#[test]
fn who_is_not_let_in_is_told_why_at_once() {
    let (ca, other) = (Authority::new(), Authority::new());
    let (certified, plain) = (with(unchecked(&ca, &ca.certificate())), Credentials::default());
    let keyed = Credentials::from(JobKey::generate().unwrap());
    let started = Instant::now();
    for (server, client, why) in [
        (&certified, &plain, "it wants TLS"),
        (&certified, &keyed, "it wants TLS"),
        (&plain, &certified, "it speaks no TLS"),
        (&keyed, &certified, "it speaks no TLS"),
        (
            &certified,
            &with(unchecked(&ca, &other.certificate())),
            "does not accept this process's certificate",
        ),
        (&certified, &with(unchecked(&ca, &ca.expired())), "does not accept this process's certificate"),
        (&with(unchecked(&ca, &other.certificate())), &certified, "it is of another CA"),
        (&with(unchecked(&ca, &ca.expired())), &certified, "it has expired"),
    ] {
        let server = serve(server, KeylessClients::None);
        let error = TcpStore::connect_with(server.local_addr(), client, soon()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(error.remedy().unwrap().contains("PHALANX_TLS_CA"), "{error}");
    }
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn certificates_do_not_replace_the_key() {
    let tls = good();
    let server = serve(
        &Credentials { key: Some(JobKey::generate().unwrap()), tls: Some(tls.clone()) },
        KeylessClients::None,
    );
    let other = Credentials { key: Some(JobKey::generate().unwrap()), tls: Some(tls.clone()) };
    let error = TcpStore::connect_with(server.local_addr(), &other, soon()).unwrap_err();
    assert!(error.to_string().contains("does not know this job's key"), "{error}");
    assert!(TcpStore::connect_with(server.local_addr(), &with(tls), soon()).is_err());
}

#[test]
fn programs_without_tls_come_in_from_this_users_processes_alone() {
    let ping = Frame::new(Op::Validate).u32(MAGIC).then(Op::Ping).u32(7).into_bytes();
    for (keyless, answer) in
        [(KeylessClients::OfThisUser, 7u32.to_le_bytes()), (KeylessClients::None, [21, 3, 3, 0])]
    {
        let server = serve(&with(good()), keyless);
        let mut plain = TcpStream::connect(server.local_addr()).unwrap();
        plain.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        plain.write_all(&ping).unwrap();
        let mut heard = [0; 4];
        plain.read_exact(&mut heard).unwrap();
        assert_eq!(heard, answer);
    }
}

#[test]
fn who_floods_instead_of_speaking_tls_is_hung_up_on() {
    let credentials = with(good());
    let server = serve(&credentials, KeylessClients::None);
    let mut plain = TcpStream::connect(server.local_addr()).unwrap();
    plain.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    let started = Instant::now();
    let words = vec![b'P'; 1 << 20];
    while plain.write_all(&words).is_ok() {
        assert!(started.elapsed() < Duration::from_secs(20), "it is still heard");
    }
    TcpStore::connect_with(server.local_addr(), &credentials, soon()).unwrap();
}

/// A connection from another of this host's addresses, which has sent `words`.
fn scanner(server: &TcpStoreServer, words: &[u8]) -> TcpStream {
    let mut stream = bound_to([127, 0, 0, 9], server);
    stream.write_all(words).unwrap();
    stream
}

/// The server closes the connection, perhaps after an alert.
fn is_dropped(mut stream: &TcpStream) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_disk_of_certificates_that_does_not_answer_holds_up_no_client_that_is_connected() {
    let ca = Authority::new();
    let [servers, clients] = [(); 2].map(|()| unchecked(&ca, &ca.certificate()));
    let server = serve(&with(servers.clone()), KeylessClients::None);
    let store = TcpStore::connect_with(server.local_addr(), &with(clients), soon()).unwrap();
    let held = servers.hold();
    let hello: Vec<u8> = [&[22_u8, 3, 1, 0, 100, 1, 0, 0, 96][..], &[7; 100]].concat();
    let newcomer = scanner(&server, &hello);
    // Its first message is there by now, and is read before the last of these.
    for number in 0..100 {
        store.set("number", &[number], soon()).unwrap();
        assert_eq!(store.get("number", soon()).unwrap(), [number]);
    }
    drop(held);
    assert!(is_dropped(&newcomer));
}

/// A TLS client that accepts every certificate and shows none.
fn without_certificate(mut stream: TcpStream) {
    use rustls::{ClientConfig, ClientConnection};
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(trusting())
        .with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(config), "host".try_into().unwrap()).unwrap();
    // Until the server refuses it.
    assert!(rustls::Stream::new(&mut client, &mut stream).read_to_end(&mut Vec::new()).is_err());
}

#[test]
fn what_is_no_client_is_not_told_of_and_a_client_without_credentials_is() {
    let (ca, other) = (Authority::new(), Authority::new());
    let certified = with(unchecked(&ca, &ca.certificate()));
    let keyed = Credentials { key: Some(JobKey::generate().unwrap()), ..certified };
    for refused in [
        with(unchecked(&ca, &other.certificate())),
        with(unchecked(&other, &other.certificate())),
        Credentials::default(),
        JobKey::generate().unwrap().into(),
    ] {
        let (mut heard, pipe) = std::io::pipe().unwrap();
        let access = Access::to(keyed.clone(), KeylessClients::None).telling(&Refusals(Arc::new(pipe)));
        let server = TcpStoreServer::bind_for(([127, 0, 0, 1], 0).into(), access).unwrap();
        for words in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"SSH-2.0-scan\r\n",
            &[22, 3, 1, 0, 100, 1, 0, 0, 96, 7, 7, 7, 7],
            &[[22, 3, 1, 0, 100, 1, 0, 0, 96].as_slice(), &[7; 100]].concat(),
            &[21, 3, 3, 0, 2, 2, 48],
            &[255; 64],
        ] {
            let scanner = scanner(&server, words);
            // The server may have closed the connection before.
            let _ = scanner.shutdown(std::net::Shutdown::Write);
            assert!(is_dropped(&scanner), "{words:?}");
        }
        without_certificate(scanner(&server, b""));
        let until = Deadline::after(Duration::from_secs(3));
        assert!(TcpStore::connect_with(server.local_addr(), &refused, until).is_err());
        let mut line = [0; 10];
        heard.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"127.0.0.1\n", "{refused:?}");
    }
}
