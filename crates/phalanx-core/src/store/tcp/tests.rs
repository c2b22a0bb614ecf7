//! The server and the client with foreign peers, garbage, and many clients.

mod servers;
mod slow_network;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::{Access, KeylessClients, TcpStore, TcpStoreServer};
use crate::deadline::Deadline;
use crate::key::JobKey;
use crate::store::Store;
use crate::testing::descriptors::raise_descriptors;
use crate::wire::store::{Frame, MAGIC, MAX_COUNT, Op};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn serve() -> TcpStoreServer {
    TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap()
}

fn client(server: &TcpStoreServer) -> TcpStore {
    TcpStore::connect(server.local_addr(), soon()).unwrap()
}

/// A raw connection that has identified itself as a client.
fn raw(server: &TcpStoreServer) -> TcpStream {
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&Frame::new(Op::Validate).u32(MAGIC).into_bytes()).unwrap();
    stream
}

/// Whether the server closes the connection without another byte.
fn is_dropped(mut stream: TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(0) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        Ok(_) => false,
    }
}

#[test]
fn answers_to_requests_that_come_together_all_come_also_before_one_that_is_refused() {
    let server = serve();
    let adding = |count: usize| Frame::new(Op::Add).key("sum").i64(1).into_bytes().repeat(count);
    let sums = |stream: &mut TcpStream, from: i64, count: i64| {
        for sum in from..from + count {
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(i64::from_le_bytes(answer), sum);
        }
    };
    // The next one has begun, and waits for its answer to the first.
    let mut stream = raw(&server);
    let [whole, mut begun] = [(); 2].map(|()| adding(1));
    let rest = begun.split_off(5);
    stream.write_all(&[whole, begun].concat()).unwrap();
    sums(&mut stream, 1, 1);
    stream.write_all(&rest).unwrap();
    sums(&mut stream, 2, 1);
    // More than a buffer holds, then a wait, and then something that is none of the protocol.
    let mut requests = adding(2000);
    requests.extend(Frame::new(Op::Wait).keys(&["sum"]).into_bytes());
    requests.push(0xff);
    let mut writer = stream.try_clone().unwrap();
    let written = thread::spawn(move || writer.write_all(&requests));
    sums(&mut stream, 3, 2000);
    let mut done = [1];
    stream.read_exact(&mut done).unwrap();
    assert_eq!(done, [0]);
    assert!(is_dropped(stream));
    written.join().unwrap().unwrap();
}

fn works(store: &TcpStore) {
    let sum = store.add("works", 1, soon()).unwrap();
    assert_eq!(store.get("works", soon()).unwrap(), sum.to_string().as_bytes());
}

#[test]
fn strangers_are_dropped_and_disturb_nobody() {
    let server = serve();
    let store = client(&server);
    for hello in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0\0\0\0\0", &[0xff; 64]] {
        let mut stranger = TcpStream::connect(server.local_addr()).unwrap();
        stranger.write_all(hello).unwrap();
        assert!(is_dropped(stranger));
        works(&store);
    }
    // A client that sends nothing, or not enough, has ten seconds.
    let started = Instant::now();
    let silent = TcpStream::connect(server.local_addr()).unwrap();
    let mut half = TcpStream::connect(server.local_addr()).unwrap();
    half.write_all(&[0, 0xce]).unwrap();
    works(&store);
    assert!(is_dropped(silent) && is_dropped(half));
    let waited = started.elapsed();
    assert!((Duration::from_millis(9900)..Duration::from_secs(60)).contains(&waited), "{waited:?}");
    works(&store);
}

#[test]
fn requests_past_the_caps_cost_their_client_the_connection() {
    let server = serve();
    let store = client(&server);
    store.set("text", b"x", soon()).unwrap();
    let requests = [
        Frame::new(Op::Get).u64(u64::MAX),
        Frame::new(Op::Set).key("k").u64(1_300_000_000_000),
        Frame::new(Op::Wait).u64(MAX_COUNT as u64 + 1),
        Frame::new(Op::MultiSet).u64(1 << 63),
        Frame::new(Op::Add).key("text").i64(1),
        Frame::new(Op::Validate).u32(MAGIC),
    ];
    for request in requests {
        let mut stream = raw(&server);
        stream.write_all(&request.into_bytes()).unwrap();
        assert!(is_dropped(stream));
    }
    // While it waits, a client may only cancel.
    let mut stream = raw(&server);
    stream.write_all(&Frame::new(Op::Wait).keys(&["never"]).then(Op::NumKeys).into_bytes()).unwrap();
    assert!(is_dropped(stream));
    works(&store);
    let error = store.add("text", 1, soon()).unwrap_err();
    assert!(
        error.is_invalid_argument() && error.to_string().contains("\"x\" is not a decimal number"),
        "{error}"
    );
}

#[test]
fn garbage_from_clients_disturbs_nobody() {
    let server = serve();
    let address = server.local_addr();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let store = client(&server);
            while !stop.load(Ordering::Relaxed) {
                works(&store);
            }
        });
        let request = Frame::new(Op::CompareSet).key("key").value(b"expected").value(b"desired").into_bytes();
        let garbage = proptest::collection::vec(any::<u8>(), 0..200);
        let case = (any::<bool>(), garbage, 0..=request.len());
        let mut runner =
            TestRunner::new(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() });
        runner
            .run(&case, |(validated, garbage, end)| {
                let mut stream = TcpStream::connect(address).unwrap();
                let mut bytes = Vec::new();
                if validated {
                    bytes = Frame::new(Op::Validate).u32(MAGIC).into_bytes();
                    bytes.extend_from_slice(&request[..end]);
                }
                bytes.extend(garbage);
                // The server may close the connection in the middle of it.
                let _ = stream.write_all(&bytes);
                Ok(())
            })
            .unwrap();
        stop.store(true, Ordering::Relaxed);
    });
    works(&client(&server));
}

#[test]
fn a_waiter_that_goes_away_is_forgotten_and_one_that_cancels_goes_on() {
    let server = serve();
    let store = client(&server);
    let mut leaver = raw(&server);
    leaver.write_all(&Frame::new(Op::Wait).keys(&["late"]).into_bytes()).unwrap();
    drop(leaver);
    let mut stream = raw(&server);
    stream.write_all(&Frame::new(Op::Wait).keys(&["late"]).then(Op::CancelWait).into_bytes()).unwrap();
    let mut answer = [9; 2];
    stream.read_exact(&mut answer[..1]).unwrap();
    assert_eq!(answer[0], 1);
    store.set("late", b"", soon()).unwrap();
    // A wait that is over is answered first, then its cancellation.
    stream.write_all(&Frame::new(Op::Wait).keys(&["late"]).then(Op::CancelWait).into_bytes()).unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [0, 1]);
}

#[test]
fn a_change_whose_client_goes_away_or_cancels_is_never_made() {
    let server = serve();
    let store = client(&server);
    let asks =
        |key: &str| Frame::new(Op::CompareSetAfter).key("before").u64(1).key(key).value(b"").value(b"v");
    let mut leaver = raw(&server);
    leaver.write_all(&asks("gone").into_bytes()).unwrap();
    leaver.shutdown(Shutdown::Write).unwrap();
    assert!(is_dropped(leaver));
    let mut stays = raw(&server);
    stays.write_all(&asks("cancelled").then(Op::CancelWait).into_bytes()).unwrap();
    let mut cancelled = [9];
    stays.read_exact(&mut cancelled).unwrap();
    assert_eq!(cancelled, [1]);
    // It can wait again, after the others.
    stays.write_all(&asks("made").into_bytes()).unwrap();
    store.set("before", b"", soon()).unwrap();
    let mut made = [9; 10];
    stays.read_exact(&mut made).unwrap();
    assert_eq!(made, [0, 1, 0, 0, 0, 0, 0, 0, 0, b'v']);
    assert!(store.check(&["made"], soon()).unwrap());
    for key in ["gone", "cancelled"] {
        assert!(!store.check(&[key], soon()).unwrap(), "{key}");
    }
}

#[test]
fn a_client_that_does_not_read_stops_only_itself() {
    let server = serve();
    let store = client(&server);
    store.set("big", &vec![7; 8 << 20], soon()).unwrap();
    let mut lazy = raw(&server);
    lazy.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let gets = (0..50_000).fold(Frame::new(Op::Get).key("big"), |frame, _| frame.then(Op::Get).key("big"));
    // The server stops reading its requests while their answers are unread.
    assert!(lazy.write_all(&gets.into_bytes().repeat(8)).is_err());
    for _ in 0..10 {
        works(&store);
    }
}

/// A listener that runs `answer` with each connection, until the end of the test.
fn foreign(answer: impl FnMut(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || listener.incoming().flatten().for_each(answer));
    address
}

#[test]
fn the_end_of_a_client_sets_what_it_has_asked_for() {
    let server = serve();
    let (store, other) = (client(&server), client(&server));
    let becomes = |key: &str, value: &[u8]| {
        while other.get(key, soon()).unwrap() != value {
            thread::sleep(Duration::from_millis(1));
        }
    };
    for key in ["beat", "another", "removed"] {
        store.add(key, 1, soon()).unwrap();
    }
    let at_end = store.set_at_end("beat", b"first", soon()).unwrap();
    // Each connection has its own, and no other call does it.
    let at_another_end = store.set_at_end("another", b"second", soon()).unwrap();
    works(&store);
    drop(at_another_end.unwrap());
    becomes("another", b"second");
    assert_eq!(other.get("beat", soon()).unwrap(), b"1");
    drop((store, at_end.unwrap()));
    becomes("beat", b"first");

    let asks = |key: &str| {
        let mut stream = raw(&server);
        stream.write_all(&Frame::new(Op::SetAtEnd).key(key).value(b"third").into_bytes()).unwrap();
        stream
    };
    // The server closes its side when it has seen the end, and does what was asked before it looks at another client.
    let ends = |stream: TcpStream| {
        stream.shutdown(Shutdown::Write).unwrap();
        assert!(is_dropped(stream));
    };
    ends(asks("another"));
    assert_eq!(other.get("another", soon()).unwrap(), b"third");
    // A key that has been removed meanwhile is not made again.
    let asked = asks("removed");
    assert!(other.delete_key("removed", soon()).unwrap());
    ends(asked);
    assert!(!other.check(&["removed"], soon()).unwrap());
}

#[test]
fn dropping_a_server_ends_its_waits_and_draining_lets_clients_finish() {
    let server = serve();
    let store = client(&server);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.get("never", soon()).unwrap_err());
        works(&store);
        drop(server);
        let error = waiting.join().unwrap();
        assert!(!error.is_timeout() && error.to_string().contains("or is gone"), "{error}");
    });
    let started = Instant::now();
    assert!(!store.num_keys(soon()).unwrap_err().is_timeout());
    assert!(started.elapsed() < Duration::from_secs(15));

    let server = serve();
    let store = Arc::new(client(&server));
    thread::scope(|scope| {
        let store = Arc::clone(&store);
        let draining = scope.spawn(move || server.drain(soon()));
        for _ in 0..100 {
            works(&store);
        }
        assert!(!draining.is_finished());
        store.close_idle();
        draining.join().unwrap();
    });
    // A client that stays does not delay it for ever.
    let server = serve();
    let _stays = client(&server);
    server.drain(Deadline::after(Duration::from_millis(50)));
    // Nor, before that, one that is no longer waited for.
    let server = serve();
    let stays = client(&server);
    let mut asked = 0;
    server.drain_while(Deadline::after(Duration::from_secs(3600)), || {
        asked += 1;
        asked < 3
    });
    assert_eq!(asked, 3);
    assert!(!stays.num_keys(soon()).unwrap_err().is_timeout());
}

#[test]
fn a_thousand_strays_and_a_thousand_clients() {
    // Both sides are in this process.
    raise_descriptors(4200);
    let server = serve();
    let strays: Vec<TcpStream> =
        (0..1000).map(|_| TcpStream::connect(server.local_addr()).unwrap()).collect();
    let started = Instant::now();
    let clients: Vec<TcpStore> = (0..1000).map(|_| client(&server)).collect();
    let joined = started.elapsed();
    let started = Instant::now();
    for (i, client) in clients.iter().enumerate() {
        client.set(&i.to_string(), b"x", soon()).unwrap();
    }
    let set = started.elapsed();
    eprintln!("1,000 clients joined in {joined:?} beside 1,000 strays; a set by each took {set:?}");
    assert!(joined < Duration::from_secs(60), "{joined:?}");
    assert_eq!(clients[0].num_keys(soon()).unwrap(), 1000);
    drop(strays);
}

#[test]
fn a_stranger_takes_little_memory() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let key = JobKey::generate().unwrap();
        let admission = super::access::Admission::new(Access::to(key.into(), KeylessClients::OfThisUser));
        let stream = super::server_stream::Stream::new(stream);
        let task = super::server_connection::serve(stream, admission.into(), Default::default(), || {});
        assert!(size_of_val(&task) <= 2048, "{} bytes", size_of_val(&task));
    });
}

/// A network to `server` on which each byte takes `delay` in each direction; counts the connections made through it.
pub(crate) fn far_away(server: &TcpStoreServer, delay: Duration) -> (SocketAddr, Arc<AtomicUsize>) {
    let (listener, made) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::<AtomicUsize>::default());
    let (address, store, counter) = (listener.local_addr().unwrap(), server.local_addr(), made.clone());
    thread::spawn(move || {
        for client in listener.incoming() {
            counter.fetch_add(1, Ordering::Relaxed);
            let (client, store) = (client.unwrap(), TcpStream::connect(store).unwrap());
            for (from, to) in [(&client, &store), (&store, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let (sent, arriving) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
                thread::spawn(move || {
                    for (at, bytes) in arriving {
                        thread::sleep(at.saturating_duration_since(Instant::now()));
                        if to.write_all(&bytes).is_err() {
                            return;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
                thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if sent.send((Instant::now() + delay, bytes[..count].to_vec())).is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    (address, made)
}
