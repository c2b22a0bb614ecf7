//! Meshes over TLS: which ranks are accepted, and which errors the others get.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::connect::{Address, Mesh, listen, mesh};
use super::*;
use crate::interrupt::interruptible;
use crate::key::JobKey;
use crate::store::MemoryStore;
use crate::tls::Tls;
use crate::tls::tests::certificates::Authority;
use crate::tls::tests::raw_client::{self, RawClient};
use crate::tls::tests::{good, unchecked};
use crate::wire::auth::HANDSHAKE_TIMEOUT;
use crate::wire::tls::is_alert;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn with(tls: Tls) -> Credentials {
    Credentials { tls: Some(tls), ..Credentials::default() }
}

/// The mesh of rank `rank` of `world`, or the error.
fn join(store: &MemoryStore, rank: u32, world: u32, credentials: &Credentials) -> Result<Mesh> {
    let (rank, world) = (Rank::new(rank), WorldSize::new(world)?);
    let interface = Ipv4Addr::LOCALHOST.into();
    let heartbeat = Heartbeat::default();
    mesh(
        &MeshConfig {
            store,
            rank,
            world,
            generation: Generation(0),
            interface,
            credentials,
            heartbeat,
            number: None,
            tells_process: false,
            marks_left: false,
            watch: &|| Ok(()),
        },
        soon(),
    )
}

/// The meshes of two ranks with these credentials.
fn pair(credentials: [&Credentials; 2]) -> [Result<Mesh>; 2] {
    let store = MemoryStore::new();
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let store = &store;
            scope.spawn(move || join(store, rank, 2, credentials[rank as usize]))
        });
        ranks.map(|rank| rank.join().unwrap())
    })
}

/// The address at which rank 0 listens.
fn address(store: &MemoryStore) -> std::net::SocketAddr {
    let address = store.get("mesh/address/0", soon()).unwrap();
    postcard::from_bytes::<Address>(&address).unwrap().socket
}

#[test]
fn what_crosses_a_connection_arrives_whole_and_both_ways_at_once() {
    let credentials = Credentials { key: Some(JobKey::generate().unwrap()), tls: Some(good()) };
    let [lower, upper] = pair([&credentials, &credentials]).map(|mesh| mesh.unwrap().connections);
    let ends = [lower.data[1].get().unwrap(), upper.data[0].get().unwrap()];
    assert!(ends.iter().all(|end| end.is_encrypted()));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i % 249) as u8).collect();
    thread::scope(|scope| {
        for end in ends {
            let bytes = &bytes;
            scope.spawn(move || {
                let (mut sent, mut is_out, mut got) = (0, true, vec![0; bytes.len()]);
                let mut received = 0;
                while received < bytes.len() || sent < bytes.len() || !is_out {
                    let mut moved = false;
                    if sent < bytes.len() || !is_out {
                        let (taken, out) = end.send(&[IoSlice::new(&bytes[sent..])]).unwrap();
                        moved |= taken > 0 || (out && !is_out);
                        (sent, is_out) = (sent + taken, out);
                    }
                    if received < bytes.len() {
                        match end.receive(&mut [IoSliceMut::new(&mut got[received..])]) {
                            Ok(count) => (received, moved) = (received + count, true),
                            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                        }
                    }
                    if !moved {
                        let out = (sent < bytes.len() || !is_out).then_some(end);
                        assert!(wait(out, Some(end).filter(|_| received < bytes.len()), soon()).unwrap());
                    }
                }
                assert!(got == *bytes);
            });
        }
    });
}

#[test]
fn who_waits_in_a_handshake_may_end_the_wait() {
    fn ends() -> Result<()> {
        Err(Error::aborted("enough"))
    }
    let store = MemoryStore::new();
    // Its kernel takes the call.
    let silent = listen(Ipv4Addr::LOCALHOST.into()).unwrap();
    let address = Address { socket: silent.local_addr().unwrap(), host: "node7".into() };
    store.set("mesh/address/0", &postcard::to_stdvec(&address).unwrap(), soon()).unwrap();
    store.set("mesh/job", &[0; 16], soon()).unwrap();
    let error = interruptible(ends, || join(&store, 1, 2, &with(good()))).err().unwrap();
    assert!(error.is_aborted() && error.to_string().contains("enough"), "{error}");
}

#[test]
fn certificates_do_not_replace_the_key() {
    let tls = good();
    let keys =
        [(), ()].map(|()| Credentials { key: Some(JobKey::generate().unwrap()), tls: Some(tls.clone()) });
    for error in pair([&keys[0], &keys[1]]).map(|mesh| mesh.err().unwrap()) {
        assert!(error.to_string().contains("another job key"), "{error}");
    }
}

#[test]
fn both_ranks_are_told_at_once_if_one_has_no_certificate_or_a_bad_one() {
    let (ca, other) = (Authority::new(), Authority::new());
    let good = with(unchecked(&ca, &ca.certificate()));
    let none = Credentials::default();
    let started = Instant::now();
    for (pair_of, why) in [
        ([&good, &none], "it wants TLS, for which this process has no certificates"),
        ([&none, &good], "it speaks no TLS, which this process has certificates for"),
        ([&good, &with(unchecked(&ca, &other.certificate()))], "does not accept this process's certificate"),
        ([&with(unchecked(&ca, &other.certificate())), &good], "it is of another CA"),
        ([&good, &with(unchecked(&ca, &ca.expired()))], "does not accept this process's certificate"),
        ([&with(unchecked(&ca, &ca.expired())), &good], "it has expired"),
    ] {
        for error in pair(pair_of).map(|mesh| mesh.err().unwrap()) {
            assert!(error.full_cause().contains(why), "{error}: {}", error.full_cause());
            assert!(error.remedy().unwrap().contains("PHALANX_TLS_CA"), "{error}");
            assert_eq!(error.rank(), Some(Rank::new(1)), "{error}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

/// A foreign client: silence, half of a ClientHello, random TLS records, and messages of ranks without TLS.
fn stranger(number: usize, address: std::net::SocketAddr, client_hello: &[u8]) -> TcpStream {
    let mut stranger = TcpStream::connect(address).unwrap();
    let _ = match number % 5 {
        0 => Ok(()),
        1 => stranger.write_all(&client_hello[..client_hello.len() / 2]),
        2 => stranger.write_all(client_hello),
        3 => stranger.write_all(&[22, 3, 1, 0, 100, number as u8]),
        _ => stranger.write_all(&[number as u8; 200]),
    };
    stranger
}

/// The first message of a TLS client.
pub(super) fn client_hello() -> Vec<u8> {
    struct Record(Vec<u8>);
    impl Read for Record {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(ErrorKind::WouldBlock.into())
        }
    }
    impl Write for Record {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut record = Record(Vec::new());
    let error = good().client().unwrap().handshake(&mut record).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    record.0
}

#[test]
fn strangers_and_half_handshakes_hold_nobody_up() {
    let (store, credentials, record) = (MemoryStore::new(), with(good()), client_hello());
    thread::scope(|scope| {
        let main = scope.spawn(|| join(&store, 0, 2, &credentials).map(|_| ()));
        let address = address(&store);
        let strangers: Vec<TcpStream> = (0..200).map(|number| stranger(number, address, &record)).collect();
        // One after the other they would take longer than a join may.
        join(&store, 1, 2, &credentials).unwrap();
        main.join().unwrap().unwrap();
        drop(strangers);
    });
}

#[test]
fn more_strangers_than_have_a_turn_hold_nobody_up() {
    let (store, credentials, record) = (MemoryStore::new(), with(good()), client_hello());
    thread::scope(|scope| {
        let main = scope.spawn(|| join(&store, 0, 2, &credentials).map(|_| ()));
        let address = address(&store);
        let strangers: Vec<TcpStream> = (0..150).map(|_| stranger(2, address, &record)).collect();
        let started = Instant::now();
        join(&store, 1, 2, &credentials).unwrap();
        main.join().unwrap().unwrap();
        assert!(started.elapsed() < HANDSHAKE_TIMEOUT * 10, "{:?}", started.elapsed());
        drop(strangers);
    });
}

/// A TLS connection with an authenticated client, and that client's side of it.
fn with_raw_client() -> (Connection, RawClient, TcpStream) {
    let (tls, config) = raw_client::pair();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut connection = Connection::new(listener.accept().unwrap().0);
    connection.encrypt(tls.server().unwrap());
    let raw_client = thread::scope(|scope| {
        let client = scope.spawn(|| RawClient::connect(config, &mut socket));
        while !connection.handshake().unwrap() {}
        client.join().unwrap()
    });
    connection.socket().set_nonblocking(true).unwrap();
    (connection, raw_client, socket)
}

#[test]
fn records_without_content_hold_nobody_in_a_call() {
    let is_unread = |connection: &Connection| {
        let mut fds = [PollFd::new(connection.socket(), PollFlags::IN)];
        poll(&mut fds, Some(Duration::from_secs(10))).unwrap() == 1
    };
    let mut into = [0; 8];
    for looks in [true, false] {
        let (connection, mut raw_client, mut socket) = with_raw_client();
        let mut take = || match looks {
            true => connection.peek(&mut into),
            false => connection.receive(&mut [IoSliceMut::new(&mut into)]),
        };
        // A few may come before content.
        for _ in 0..20 {
            socket.write_all(&raw_client.record(&[])).unwrap();
        }
        socket.write_all(&raw_client.record(b"word")).unwrap();
        let came = loop {
            assert!(is_unread(&connection));
            match take() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                came => break came.unwrap(),
            }
        };
        assert_eq!(came, 4);
        // More reads than one call may do, from a client that is not admitted yet.
        let noise: Vec<u8> = (0..5000).flat_map(|_| raw_client.record(&[])).collect();
        assert!(noise.len() > 100_000);
        socket.write_all(&noise).unwrap();
        if looks {
            // `peek` did not consume it.
            assert_eq!(connection.receive(&mut [IoSliceMut::new(&mut [0; 8])]).unwrap(), 4);
        }
        assert!(connection.receive(&mut [IoSliceMut::new(&mut [0; 8])]).is_err());
        assert!(is_unread(&connection), "all of it was read in one call");
    }
}

#[test]
fn a_slow_handshake_ends_with_the_strangers_time() {
    let (store, credentials, record) = (MemoryStore::new(), with(good()), client_hello());
    thread::scope(|scope| {
        let main = scope.spawn(|| join(&store, 0, 2, &credentials).map(|_| ()));
        let mut slow = TcpStream::connect(address(&store)).unwrap();
        slow.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let started = Instant::now();
        // Byte by byte the record is never complete in time.
        let dropped = record.iter().cycle().any(|byte| {
            slow.write_all(&[*byte]).is_err()
                || match slow.read(&mut [0; 4096]) {
                    Ok(count) => count == 0,
                    Err(error) => error.kind() != ErrorKind::WouldBlock,
                }
        });
        assert!(dropped && started.elapsed() < HANDSHAKE_TIMEOUT * 10, "{:?}", started.elapsed());
        join(&store, 1, 2, &credentials).unwrap();
        main.join().unwrap().unwrap();
    });
}

#[test]
fn who_speaks_no_tls_is_told_so() {
    let (store, credentials) = (MemoryStore::new(), with(good()));
    thread::scope(|scope| {
        let main = scope.spawn(|| join(&store, 0, 2, &credentials).map(|_| ()));
        let mut plain = TcpStream::connect(address(&store)).unwrap();
        plain.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        plain.write_all(b"PHXH and what follows").unwrap();
        let mut answer = Vec::new();
        plain.read_to_end(&mut answer).unwrap();
        assert!(is_alert(&answer), "{answer:?}");
        join(&store, 1, 2, &credentials).unwrap();
        main.join().unwrap().unwrap();
    });
}

#[test]
fn who_floods_instead_of_speaking_tls_is_hung_up_on() {
    let (store, credentials) = (MemoryStore::new(), with(good()));
    thread::scope(|scope| {
        let main = scope.spawn(|| join(&store, 0, 2, &credentials).map(|_| ()));
        let mut plain = TcpStream::connect(address(&store)).unwrap();
        plain.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
        let started = Instant::now();
        let record = vec![b'P'; 1 << 20];
        while plain.write_all(&record).is_ok() {
            assert!(started.elapsed() < Duration::from_secs(20), "it is still heard");
        }
        join(&store, 1, 2, &credentials).unwrap();
        main.join().unwrap().unwrap();
    });
}
