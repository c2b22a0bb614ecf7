//! Servers that are late, silent, or another program's: what a client waits for, and what it says.

use super::*;
use crate::credentials::Credentials;
use crate::error::{Error, Result};
use crate::interrupt::interruptible;
use crate::store::tcp::client_connection::CLOSING_RETRY_LIMIT;
use crate::store::tcp::{Patience, listen};
use crate::wire::auth::TAG;
use crate::wire::greeting::{CALL, Responder, StoreSecret};
use crate::wire::store::{CHECK_READY, Decoder, WAIT_CANCELLED, WAIT_DONE};

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
fn a_thread_that_waits_for_a_store_to_come_may_end_that() {
    fn pressed() -> Result<()> {
        Err(Error::aborted("somebody pressed Ctrl-C"))
    }
    // At an address of its own, so that no other test is given the port meanwhile.
    let gone = TcpStoreServer::bind("127.0.6.2:0".parse().unwrap()).unwrap().local_addr();
    let mut streams = Vec::new();
    let silent = foreign(move |stream| streams.push(stream));
    for address in [gone, silent] {
        let error = interruptible(pressed, || TcpStore::connect(address, soon())).unwrap_err();
        assert!(error.is_aborted() && error.to_string().contains("somebody pressed Ctrl-C"), "{error}");
    }
    // Also a further connection of a client that had one.
    let mut streams = Vec::new();
    let silent_then = foreign(move |mut stream| {
        let mut hello = [0; 10];
        if streams.is_empty() && stream.read_exact(&mut hello).is_ok() {
            let _ = stream.write_all(&hello[6..]);
        }
        streams.push(stream);
    });
    let store = TcpStore::connect(silent_then, soon()).unwrap();
    store.close_idle();
    let error = interruptible(pressed, || store.num_keys(soon())).unwrap_err();
    assert!(error.is_aborted() && error.to_string().contains("somebody pressed Ctrl-C"), "{error}");
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
    let patience = Patience { goes_on: &goes_on, ..Patience::WHOLE };
    let store = TcpStore::connect_patiently(address, &Credentials::default(), soon(), &patience).unwrap();
    store.set("key", b"value", soon()).unwrap();
    drop((store, server.join().unwrap()));
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
