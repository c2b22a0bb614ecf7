//! Requests over a slow network, of which each costs a round trip, and requests of many changes.

use super::*;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::store::tcp::Patience;
use crate::wire::store::{MAX_REQUEST, MAX_VALUE};

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
    let patience = Patience { goes_on: &goes_on, connections: 2, ..Patience::WHOLE };
    let address = silent.local_addr().unwrap();
    let error = TcpStore::connect_patiently(address, &Credentials::default(), soon(), &patience).unwrap_err();
    assert!(error.to_string().contains("no longer needed"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
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
