//! The server and the client with foreign peers, garbage, and many clients.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::client_connection::CLOSING_RETRY_LIMIT;
use super::{Access, KeylessClients, Patience, TcpStore, TcpStoreServer, listen};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt::interruptible;
use crate::key::JobKey;
use crate::store::Store;
use crate::testing::descriptors::raise_descriptors;
use crate::wire::auth::TAG;
use crate::wire::greeting::{CALL, Responder, StoreSecret};
use crate::wire::store::{
    CHECK_READY, Decoder, Frame, MAGIC, MAX_COUNT, MAX_REQUEST, MAX_VALUE, Op, WAIT_CANCELLED, WAIT_DONE,
};

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
fn a_foreign_server_is_named_and_its_lengths_are_not_believed() {
    let http = foreign(|mut stream| {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        let _ = stream.read(&mut [0; 64]);
    });
    let error = TcpStore::connect(http, soon()).unwrap_err();
    assert!(error.to_string().contains("is not a store: it answers \"HTTP\""), "{error}");

    let echo = foreign(|mut stream| {
        let mut bytes = [0; 64];
        let n = stream.read(&mut bytes).unwrap_or(0);
        let _ = stream.write_all(&bytes[..n]);
    });
    assert!(TcpStore::connect(echo, soon()).unwrap_err().to_string().contains("is not a store"));

    let rude = foreign(drop);
    let error = TcpStore::connect(rude, soon()).unwrap_err();
    assert!(error.to_string().contains("closes the connection during the greeting"), "{error}");

    let silent = foreign(|stream| {
        let _ = (&stream).read_to_end(&mut Vec::new());
    });
    let started = Instant::now();
    let error = TcpStore::connect(silent, Deadline::after(Duration::from_millis(300))).unwrap_err();
    assert!(
        error.to_string().contains("does not answer") && started.elapsed() < Duration::from_secs(15),
        "{error}"
    );

    // A server that greets like a store, then announces 1.3 TB.
    let liar = foreign(|mut stream| {
        let mut hello = [0; 10];
        let _ = stream.read_exact(&mut hello);
        let _ = stream.write_all(&hello[6..]);
        let _ = stream.read(&mut [0; 64]);
        let _ = stream.write_all(&1_300_000_000_000_u64.to_le_bytes());
        let _ = stream.read(&mut [0; 64]);
    });
    let store = TcpStore::connect(liar, soon()).unwrap();
    let error = store.compare_set("k", b"", b"v", soon()).unwrap_err();
    assert!(error.to_string().contains("an answer of 1300000000000 bytes"), "{error}");
}

#[test]
fn a_store_that_is_silent_at_first_is_asked_again() {
    let server = serve();
    let behind = server.local_addr();
    let mut frozen = None;
    let address = foreign(move |client| {
        if frozen.is_none() {
            // It accepts the first connection, and sends nothing.
            frozen = Some(client);
            return;
        }
        let store = TcpStream::connect(behind).unwrap();
        for (mut from, mut to) in [(client.try_clone().unwrap(), store.try_clone().unwrap()), (store, client)]
        {
            thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
    });
    works(&TcpStore::connect(address, soon()).unwrap());
}

#[test]
fn a_client_waits_for_a_server_that_is_not_up_yet_but_not_past_its_deadline() {
    // At an address of its own, so that no other test is given the port meanwhile.
    let address = TcpStoreServer::bind("127.0.6.1:0".parse().unwrap()).unwrap().local_addr();
    let started = Instant::now();
    let error = TcpStore::connect(address, Deadline::after(Duration::from_millis(200))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains(&address.to_string()), "{error}");
    assert!(error.remedy().is_some() && started.elapsed() < Duration::from_secs(15));
    thread::scope(|scope| {
        let early = scope.spawn(|| works(&TcpStore::connect(address, soon()).unwrap()));
        let server = TcpStoreServer::bind(address).unwrap();
        early.join().unwrap();
        drop(server);
    });
}

#[test]
fn a_port_in_use_is_an_error_that_names_it() {
    let server = serve();
    let error = TcpStoreServer::bind(server.local_addr()).unwrap_err();
    assert!(
        error.is_address_in_use() && error.to_string().contains(&server.local_addr().to_string()),
        "{error}"
    );
}

#[test]
fn all_networks_at_once_are_refused() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let error = TcpStoreServer::bind(address.parse().unwrap()).unwrap_err();
        assert!(error.is_environment() && error.to_string().contains("every network"), "{error}");
    }
}

#[test]
fn a_store_that_was_there_and_is_slow_now_is_not_taken_for_another_program() {
    // It answers the first greeting, as a store does, but no other.
    let mut streams = Vec::new();
    let slow = foreign(move |mut stream| {
        let mut hello = [0; 10];
        if streams.is_empty() && stream.read_exact(&mut hello).is_ok() {
            let _ = stream.write_all(&hello[6..]);
        }
        streams.push(stream);
    });
    let store = TcpStore::connect(slow, soon()).unwrap();
    store.close_idle();
    let error = store.num_keys(Deadline::after(Duration::from_millis(200))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("no answer after"), "{error}");
}

#[test]
fn a_thread_that_waits_for_a_store_without_an_answer_may_end_that() {
    fn pressed() -> Result<()> {
        Err(Error::aborted("somebody pressed Ctrl-C"))
    }
    let mut streams = Vec::new();
    let silent = foreign(move |mut stream| {
        let mut hello = [0; 10];
        if stream.read_exact(&mut hello).is_ok() {
            let _ = stream.write_all(&hello[6..]);
        }
        streams.push(stream);
    });
    let calls: [fn(&TcpStore) -> Result<()>; 4] = [
        |store| store.check(&["key"], soon()).map(drop),
        |store| store.add("key", 1, soon()).map(drop),
        |store| store.compare_set("key", b"", b"value", soon()).map(drop),
        |store| {
            let changes = [("key", &b""[..], &b"value"[..])];
            store.compare_set_and_get(&changes, &["key"], soon(), &mut |_| Ok(()), &mut || Ok(())).map(drop)
        },
    ];
    for call in calls {
        // It has a connection.
        let store = TcpStore::connect(silent, soon()).unwrap();
        let error = interruptible(pressed, || call(&store)).unwrap_err();
        assert!(error.is_aborted() && error.to_string().contains("somebody pressed Ctrl-C"), "{error}");
    }
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

#[test]
fn a_server_that_closes_connections_before_and_after_it_is_started_again_is_waited_for() {
    let listener = listen(([127, 0, 8, 1], 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let close_one = |listener: TcpListener| {
        listener.set_nonblocking(false).unwrap();
        drop(listener.accept().unwrap());
    };
    let attempts = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&attempts);
    let server = thread::spawn(move || {
        close_one(listener);
        // For longer than a server may close one connection after the other, none is there. The first of two attempts may have begun before.
        let (closed, before) = (Instant::now(), counter.load(Ordering::Relaxed));
        while closed.elapsed() <= CLOSING_RETRY_LIMIT || counter.load(Ordering::Relaxed) < before + 2 {
            thread::sleep(Duration::from_millis(5));
        }
        close_one(listen(address).unwrap());
        TcpStoreServer::bind(address).unwrap()
    });
    let goes_on = || attempts.fetch_add(1, Ordering::Relaxed) < usize::MAX;
    let patience = Patience { silence: Duration::MAX, goes_on: &goes_on, connections: 1 };
    let store = TcpStore::connect_patiently(address, &Credentials::default(), soon(), &patience).unwrap();
    store.set("key", b"value", soon()).unwrap();
    drop((store, server.join().unwrap()));
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

/// The round trip is longer than a wait that is given up, and than the time for the answer to that.
const ROUND_TRIP_DELAY: Duration = Duration::from_millis(200);

#[test]
fn waits_that_end_over_a_slow_network_keep_their_connection() {
    for credentials in [Credentials::default(), JobKey::generate().unwrap().into()] {
        let server = TcpStoreServer::bind_with("127.0.0.1:0".parse().unwrap(), credentials.clone()).unwrap();
        let (address, made) = far_away(&server, ROUND_TRIP_DELAY);
        let store = TcpStore::connect_with(address, &credentials, soon()).unwrap();
        for _ in 0..4 {
            let error = store.get("late", Deadline::after(Duration::from_millis(100))).unwrap_err();
            assert!(error.is_timeout(), "{error}");
        }
        store.set("late", b"came", soon()).unwrap();
        // The answers to the waits that ended stand before these.
        assert_eq!(store.add("number", 7, soon()).unwrap(), 7);
        let error = store.get("never", Deadline::after(Duration::from_millis(100))).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert_eq!(store.multi_get(&["late", "number"], soon()).unwrap(), [&b"came"[..], b"7"]);
        // This wait ends when its answer, with two values, is on its way.
        let error = store.multi_get(&["late", "number"], Deadline::after(ROUND_TRIP_DELAY / 2)).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(store.check(&["late"], soon()).unwrap() && !store.check(&["never"], soon()).unwrap());
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn a_wait_over_a_slow_network_is_one_request_however_often_it_is_watched() {
    let server = serve();
    let (near, (address, made)) = (client(&server), far_away(&server, ROUND_TRIP_DELAY));
    let store = TcpStore::connect(address, soon()).unwrap();
    let mut watched = 0;
    let mut go_on = || {
        watched += 1;
        if watched == 2 {
            near.set("theirs", b"2", soon())?;
        }
        Ok(())
    };
    let found = store.set_and_get(&[("ours", b"1")], &["ours", "theirs"], soon(), &mut go_on).unwrap();
    assert_eq!(found, [b"1", b"2"]);
    assert!(watched >= 2, "{watched}");
    // A caller that stops waiting gets the reason, and can use the connection again.
    let stopped = store.set_and_get(&[], &["never"], soon(), &mut || Err(Error::aborted("enough")));
    assert!(stopped.unwrap_err().to_string().contains("enough"));
    let changes = [("rank/0", &b""[..], &b"me"[..]), ("world", b"", b"2"), ("rank/0", b"", b"other")];
    assert_eq!(store.multi_compare_set(&changes, soon()).unwrap(), [&b"me"[..], b"2", b"me"]);
    assert_eq!(made.load(Ordering::Relaxed), 1);
}

#[test]
fn many_keys_are_removed_in_a_few_round_trips() {
    let server = serve();
    let (near, (address, made)) = (client(&server), far_away(&server, ROUND_TRIP_DELAY));
    let keys: Vec<String> = (0..600).map(|number| format!("key {number}")).collect();
    let pairs: Vec<(&str, &[u8])> = keys.iter().map(|key| (&**key, &b"1"[..])).collect();
    near.multi_set(&pairs, soon()).unwrap();
    let before = near.num_keys(soon()).unwrap();
    let store = TcpStore::connect(address, soon()).unwrap();
    // One after the other they would take minutes.
    let keys: Vec<&str> = keys.iter().map(String::as_str).chain(["never"]).collect();
    store.delete_keys(&keys, soon()).unwrap();
    assert_eq!(near.num_keys(soon()).unwrap(), before - 600);
    // The connection is in order.
    assert_eq!(store.add("number", 7, soon()).unwrap(), 7);
    assert_eq!(made.load(Ordering::Relaxed), 1);
}

#[test]
fn a_change_and_a_wait_are_one_request_that_ends_at_what_is_found() {
    let server = serve();
    let (near, (address, made)) = (client(&server), far_away(&server, ROUND_TRIP_DELAY));
    let store = TcpStore::connect(address, soon()).unwrap();
    near.set("verdict", b"ok", soon()).unwrap();
    let changes = [("rank/1", &b""[..], &b"me"[..]), ("world", b"", b"2")];
    let mut found = Vec::new();
    let mut look = |values: &[Vec<u8>]| {
        found = values.to_vec();
        Ok(())
    };
    let came = store.compare_set_and_get(&changes, &["verdict", "rank/1"], soon(), &mut look, &mut || Ok(()));
    assert_eq!(came.unwrap(), [&b"ok"[..], b"me"]);
    assert_eq!(found, [&b"me"[..], b"2"]);
    // Who finds another at its place does not wait, and can use the connection again.
    let taken = [("rank/1", &b""[..], &b"other"[..])];
    let mut refuse = |values: &[Vec<u8>]| match values {
        [there] if there == b"me" => Err(Error::aborted("taken")),
        _ => Ok(()),
    };
    let error =
        store.compare_set_and_get(&taken, &["never"], soon(), &mut refuse, &mut || Ok(())).unwrap_err();
    assert!(error.to_string().contains("taken"), "{error}");
    assert_eq!(store.get("rank/1", soon()).unwrap(), b"me");
    assert_eq!(made.load(Ordering::Relaxed), 1);
    // A store on this host, by the trait's own way.
    let local = crate::store::MemoryStore::new();
    local.set("verdict", b"ok", soon()).unwrap();
    let came = local.compare_set_and_get(&changes, &["verdict"], soon(), &mut |_| Ok(()), &mut || Ok(()));
    assert_eq!(came.unwrap(), [b"ok"]);
}

#[test]
fn the_first_of_several_connections_is_used_and_the_others_come_later() {
    let server = serve();
    // The first one that it accepts never answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let to = server.local_addr();
    thread::spawn(move || {
        let silent = listener.accept();
        for stream in listener.incoming().take(2) {
            let (client, store) = (stream.unwrap(), TcpStream::connect(to).unwrap());
            let (mut from, mut into) = (client.try_clone().unwrap(), store.try_clone().unwrap());
            thread::spawn(move || drop(std::io::copy(&mut from, &mut into)));
            let (mut from, mut into) = (store, client);
            thread::spawn(move || drop(std::io::copy(&mut from, &mut into)));
        }
        drop(silent);
    });
    let patience = Patience { connections: 3, ..Patience::WHOLE };
    let began = Instant::now();
    let store = TcpStore::connect_patiently(address, &Credentials::default(), soon(), &patience).unwrap();
    store.set("key", b"value", soon()).unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // A second call at the same time takes the other one.
    thread::scope(|scope| {
        let waits = scope.spawn(|| store.get("late", soon()));
        assert_eq!(store.get("key", soon()).unwrap(), b"value");
        store.set("late", b"came", soon()).unwrap();
        assert_eq!(waits.join().unwrap().unwrap(), b"came");
    });
    // A store that is no longer needed ends the wait, although none has answered.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let began = Instant::now();
    let goes_on = || false;
    let patience = Patience { silence: Duration::MAX, goes_on: &goes_on, connections: 2 };
    let address = silent.local_addr().unwrap();
    let error = TcpStore::connect_patiently(address, &Credentials::default(), soon(), &patience).unwrap_err();
    assert!(error.to_string().contains("no longer needed"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

#[test]
fn a_server_of_pytorch_gets_no_request_that_it_does_not_know() {
    // It echoes the ping as it is; a wait is asked for by PyTorch's operation, and the values after it.
    let (asked, requests) = std::sync::mpsc::channel();
    let server = foreign(move |mut stream| {
        let mut hello = [0; 10];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello[6..]).unwrap();
        for answer in [&[0][..], &[1, 0, 0, 0, 0, 0, 0, 0, b'v']] {
            let mut request = [0; 64];
            let count = stream.read(&mut request).unwrap();
            asked.send(request[..count].to_vec()).unwrap();
            stream.write_all(answer).unwrap();
        }
    });
    let store = TcpStore::connect(server, soon()).unwrap();
    assert_eq!(store.get("key", soon()).unwrap(), b"v");
    let asked: Vec<Vec<u8>> = requests.iter().take(2).collect();
    assert_eq!(asked, [Op::Wait, Op::MultiGet].map(|op| Frame::new(op).keys(&["key"]).into_bytes()));
}

#[test]
fn changes_are_made_after_a_key_of_which_pytorchs_server_tells_nobody() {
    // Without libuv it wakes nobody for a key that has come by COMPARE_SET. Whoever asks finds it.
    let was_asked = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&was_asked);
    let server = foreign(move |mut stream| {
        let was_asked = Arc::clone(&asked);
        thread::spawn(move || {
            let mut hello = [0; 10];
            stream.read_exact(&mut hello).unwrap();
            stream.write_all(&hello[6..]).unwrap();
            let mut decoder = Decoder::default();
            loop {
                let mut bytes = vec![0; decoder.need()];
                if stream.read_exact(&mut bytes).is_err() {
                    return;
                }
                let Some(request) = decoder.feed(bytes).unwrap() else { continue };
                let answer: &[u8] = match request.op {
                    Op::Wait if was_asked.load(Ordering::Relaxed) => &[WAIT_DONE],
                    Op::Wait => &[],
                    Op::Check => &[CHECK_READY],
                    Op::CancelWait => &[WAIT_CANCELLED],
                    Op::MultiGet | Op::CompareSet => &[1, 0, 0, 0, 0, 0, 0, 0, b'v'],
                    other => panic!("PyTorch's server does not know {other:?}"),
                };
                was_asked.fetch_or(request.op == Op::Check, Ordering::Relaxed);
                stream.write_all(answer).unwrap();
            }
        });
    });
    let store = TcpStore::connect(server, soon()).unwrap();
    let change = [("own", &b""[..], &b"v"[..])];
    let values = store.multi_compare_set_after("key", &change, soon(), soon()).unwrap();
    assert_eq!(values.unwrap(), [b"v"]);
    assert!(was_asked.load(Ordering::Relaxed));
}

#[test]
fn a_server_that_does_not_answer_all_changes_holds_nobody_up() {
    let mut streams = Vec::new();
    let server = foreign(move |mut stream| {
        let mut hello = [0; 10];
        if stream.read_exact(&mut hello).is_ok() {
            // It answers the ping and one change.
            let _ = stream.write_all(&[&hello[6..], &[1, 0, 0, 0, 0, 0, 0, 0, b'v']].concat());
        }
        streams.push(stream);
    });
    let store = TcpStore::connect(server, soon()).unwrap();
    // Also if they are more than one request after the other.
    for length in [1, 1 << 10] {
        let keys: Vec<String> = (0..40).map(|number| format!("{number:0length$}")).collect();
        let changes: Vec<(&str, &[u8], &[u8])> =
            keys.iter().map(|key| (&**key, &b""[..], &b"v"[..])).collect();
        let stopped = store.compare_set_and_get(&changes, &["key"], soon(), &mut |_| Ok(()), &mut || {
            Err(Error::aborted("enough"))
        });
        let error = stopped.unwrap_err();
        assert!(error.to_string().contains("enough"), "{error}");
    }
}

#[test]
fn a_store_of_an_earlier_build_with_the_key_is_refused_by_name() {
    let key = JobKey::generate().unwrap();
    let secret = StoreSecret::new(key.bytes());
    let server = foreign(move |mut stream| {
        let mut call = [0; CALL];
        stream.read_exact(&mut call).unwrap();
        let responder = Responder::new(&secret, call, [7; 32]).unwrap();
        stream.write_all(responder.answer()).unwrap();
        let (mut proof, mut ping) = ([0; TAG], [0; 5]);
        stream.read_exact(&mut proof).unwrap();
        assert!(responder.proven(&secret, &proof));
        stream.read_exact(&mut ping).unwrap();
        // Such a build returns the number of the ping as it was, and closes the connection on a request that it does not know.
        stream.write_all(&ping[1..]).unwrap();
    });
    for ask in [true, false] {
        let store = TcpStore::connect_with_key(server, &key, soon()).unwrap();
        let error = match ask {
            true => store.get("key", soon()).unwrap_err(),
            false => store.add("key", 1, soon()).unwrap_err(),
        };
        let text = error.to_string();
        assert!(text.contains("an earlier build") && text.contains("the same version of Phalanx"), "{text}");
    }
}

#[test]
fn many_changes_are_made_in_order_and_no_request_is_larger_than_the_cap() {
    let server = serve();
    let store = client(&server);
    let large = vec![b'x'; 1 << 20];
    store.set("large", &large, soon()).unwrap();
    // The answers are more than both sides' buffers hold.
    let changes: Vec<(&str, &[u8], &[u8])> = (0..40).map(|_| ("large", &b"no"[..], &large[..])).collect();
    assert_eq!(store.multi_compare_set(&changes, soon()).unwrap(), vec![large; 40]);
    let keys: Vec<String> = (0..3000).map(|number| format!("key {number}")).collect();
    let changes: Vec<(&str, &[u8], &[u8])> =
        keys.iter().map(|key| (&**key, &b""[..], key.as_bytes())).collect();
    assert_eq!(
        store.multi_compare_set(&changes, soon()).unwrap(),
        keys.iter().map(String::as_bytes).collect::<Vec<_>>()
    );
    let longest = vec![0; MAX_VALUE];
    let changes: Vec<(&str, &[u8], &[u8])> = (0..9).map(|_| ("more", &b""[..], &longest[..])).collect();
    let error = store.multi_compare_set(&changes, soon()).unwrap_err();
    assert!(error.to_string().contains("a request takes"), "{error}");
    assert!(!store.check(&["more"], soon()).unwrap());
    assert!(store.multi_compare_set(&[], soon()).unwrap().is_empty());
    // The key that is waited for counts too.
    let rest =
        MAX_REQUEST - changes[..7].iter().map(|(key, _, value)| key.len() + 1 + value.len()).sum::<usize>();
    let last = ("more", &b""[..], &longest[..rest - "/more".len()]);
    let changes: Vec<(&str, &[u8], &[u8])> = changes[..7].iter().copied().chain([last]).collect();
    let error = store.multi_compare_set_after("key", &changes, soon(), soon()).unwrap_err();
    assert!(error.to_string().contains("a request takes"), "{error}");
    assert!(!store.check(&["more"], soon()).unwrap());
}
