//! The required behaviour of every store, checked on every kind of store.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{FileStore, MAX_KEY, MAX_VALUE, MemoryStore, PrefixStore, SharedStore, TcpStore, TcpStoreServer};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt::interruptible;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn at_once() -> Deadline {
    Deadline::after(Duration::from_millis(40))
}

/// A second handle on the same store, as another rank would have it.
type Another = Box<dyn Fn() -> SharedStore>;

/// Runs all checks on the store to which `another` returns handles.
fn conforms(another: &Another) {
    behaves(another);
    caps_are_kept(another);
}

/// All checks except those of the caps.
fn behaves(another: &Another) {
    let checks: [fn(&Another); 10] = [
        values_are_read_back,
        counters_add_and_refuse_text,
        compare_set_is_pytorchs,
        changes_wait_for_those_of_others,
        keys_are_counted_and_deleted,
        many_at_once,
        waits_end_when_the_key_comes,
        values_are_those_of_keys_that_are_there_together,
        waits_are_ended_by_the_check_of_their_thread,
        deadlines_are_obeyed_and_errors_name_the_key,
    ];
    for check in checks {
        check(another);
    }
    ranks_do_not_lose_updates(another);
}

fn values_are_read_back(another: &Another) {
    let (store, other) = (another(), another());
    let all: Vec<u8> = (0..=255).collect();
    for value in [&b""[..], b"x", &all, &vec![7; 300_000]] {
        store.set("value", value, soon()).unwrap();
        assert_eq!(other.get("value", soon()).unwrap(), value);
    }
    store.append("appended", b"ab", soon()).unwrap();
    other.append("appended", b"", soon()).unwrap();
    other.append("appended", b"cd", soon()).unwrap();
    assert_eq!(store.get("appended", soon()).unwrap(), b"abcd");
    store.set("", b"the empty key", soon()).unwrap();
    assert_eq!(other.get("", soon()).unwrap(), b"the empty key");
}

fn counters_add_and_refuse_text(another: &Another) {
    let (store, other) = (another(), another());
    assert_eq!(store.add("counter", 5, soon()).unwrap(), 5);
    assert_eq!(other.add("counter", -7, soon()).unwrap(), -2);
    assert_eq!(store.get("counter", soon()).unwrap(), b"-2");
    assert_eq!(store.add("untouched", 0, soon()).unwrap(), 0);
    assert!(other.check(&["untouched"], soon()).unwrap());
    store.set("text", b"seven", soon()).unwrap();
    let error = other.add("text", 1, soon()).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("\"seven\" is not a decimal number") && said.contains("add(\""), "{said}");
    // The store still works.
    assert_eq!(other.get("text", soon()).unwrap(), b"seven");
    assert_eq!(store.add("counter", 1, soon()).unwrap(), -1);
}

fn compare_set_is_pytorchs(another: &Another) {
    let (store, other) = (another(), another());
    let compare_set = |expected: &[u8], desired: &[u8]| {
        String::from_utf8(store.compare_set("compared", expected, desired, soon()).unwrap()).unwrap()
    };
    assert_eq!(compare_set(b"x", b"y"), "x");
    assert!(!other.check(&["compared"], soon()).unwrap());
    assert_eq!(compare_set(b"", b"y"), "y");
    assert_eq!(compare_set(b"", b"z"), "y");
    assert_eq!(compare_set(b"x", b"z"), "y");
    assert_eq!(compare_set(b"y", b"z"), "z");
    assert_eq!(other.get("compared", soon()).unwrap(), b"z");
    // In turn, also of one key; the first two change nothing.
    let changes: [(&str, &[u8], &[u8]); 5] = [
        ("compared", b"?", b"?"),
        ("not there", b"?", b"?"),
        ("made", b"", b"1"),
        ("made", b"1", b"2"),
        ("made", b"1", b"3"),
    ];
    let values = store.multi_compare_set(&changes, soon()).unwrap();
    assert_eq!(values, [b"z", b"?", b"1", b"2", b"2"]);
    assert!(!other.check(&["not there"], soon()).unwrap());
    assert_eq!(other.get("made", soon()).unwrap(), b"2");
    assert!(other.delete_key("made", soon()).unwrap());
}

fn changes_wait_for_those_of_others(another: &Another) {
    let (store, other) = (another(), another());
    let change: [(&str, &[u8], &[u8]); 2] = [("line/2", b"", b"second"), ("line/1", b"?", b"?")];
    // Nobody has come before it: nothing is changed, then or later.
    let change_after = |until| store.multi_compare_set_after("line/1", &change, until, soon()).unwrap();
    assert_eq!(change_after(at_once()), None);
    other.set("line/1", b"first", soon()).unwrap();
    assert!(!other.check(&["line/2"], soon()).unwrap());
    // It need not wait, whatever the time is.
    assert_eq!(change_after(soon()).unwrap(), [&b"second"[..], b"first"]);
    assert_eq!(other.get("line/2", soon()).unwrap(), b"second");
    // Each is the one for which the next waits.
    let ends: Vec<Vec<u8>> = thread::scope(|scope| {
        let waiting: Vec<_> = (3..7)
            .map(|place: u8| {
                let store = another();
                scope.spawn(move || {
                    let (before, own) = (format!("line/{place}"), format!("line/{}", place + 1));
                    let value = [place];
                    let change = (&*own, &b""[..], &value[..]);
                    let values = store.multi_compare_set_after(&before, &[change], soon(), soon());
                    values.unwrap().unwrap().remove(0)
                })
            })
            .collect();
        store.set("line/3", b"begin", soon()).unwrap();
        waiting.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(ends, [[3], [4], [5], [6]]);
    assert_eq!(other.get("line/7", soon()).unwrap(), [6]);
    let keys: Vec<String> = (1..=7).map(|place| format!("line/{place}")).collect();
    store.delete_keys(&keys.iter().map(String::as_str).collect::<Vec<_>>(), soon()).unwrap();
}

fn keys_are_counted_and_deleted(another: &Another) {
    let (store, other) = (another(), another());
    let before = store.num_keys(soon()).unwrap();
    store.set("counted", b"", soon()).unwrap();
    store.set("counted", b"again", soon()).unwrap();
    store.add("counted too", 1, soon()).unwrap();
    assert_eq!(other.num_keys(soon()).unwrap(), before + 2);
    assert!(other.delete_key("counted", soon()).unwrap());
    assert!(!store.delete_key("counted", soon()).unwrap());
    assert!(!store.check(&["counted"], soon()).unwrap());
    assert_eq!(store.num_keys(soon()).unwrap(), before + 1);
    // A counter that was deleted starts at 0 again.
    assert_eq!(store.add("counted", 3, soon()).unwrap(), 3);
    store.delete_keys(&["counted", "never there", "counted too"], soon()).unwrap();
    other.delete_keys(&[], soon()).unwrap();
    assert_eq!(other.num_keys(soon()).unwrap(), before);
    // More than fit into one request of some stores.
    let many: Vec<String> = (0..300).map(|i| format!("removed/{i}")).collect();
    let pairs: Vec<(&str, &[u8])> = many.iter().map(|key| (key.as_str(), &b"x"[..])).collect();
    store.multi_set(&pairs, soon()).unwrap();
    assert_eq!(other.num_keys(soon()).unwrap(), before + 300);
    let keys: Vec<&str> = many.iter().map(String::as_str).collect();
    other.delete_keys(&keys, soon()).unwrap();
    other.delete_keys(&keys, soon()).unwrap();
    assert_eq!(store.num_keys(soon()).unwrap(), before);
}

fn many_at_once(another: &Another) {
    let (store, other) = (another(), another());
    store.multi_set(&[("m1", b"1"), ("m2", b""), ("m1", b"2")], soon()).unwrap();
    assert_eq!(other.multi_get(&["m2", "m1", "m1"], soon()).unwrap(), [&b""[..], b"2", b"2"]);
    assert!(other.check(&["m1", "m2"], soon()).unwrap());
    assert!(!other.check(&["m1", "m3"], soon()).unwrap());
    store.multi_set(&[], soon()).unwrap();
    other.wait(&[], soon()).unwrap();
    assert!(other.check(&[], soon()).unwrap());
    assert!(other.multi_get(&[], soon()).unwrap().is_empty());
    let keys: Vec<String> = (0..500).map(|i| format!("many/{i}")).collect();
    let pairs: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), key.as_bytes())).collect();
    store.multi_set(&pairs, soon()).unwrap();
    let refs: Vec<&str> = keys.iter().map(String::as_str).collect();
    let values = other.multi_get(&refs, soon()).unwrap();
    assert!(values.iter().zip(&keys).all(|(value, key)| value == key.as_bytes()));
}

fn waits_end_when_the_key_comes(another: &Another) {
    let writes: [fn(&SharedStore, &str); 5] = [
        |store, key| store.set(key, b"v", soon()).unwrap(),
        |store, key| assert_eq!(store.add(key, 1, soon()).unwrap(), 1),
        |store, key| store.append(key, b"v", soon()).unwrap(),
        |store, key| drop(store.compare_set(key, b"", b"v", soon()).unwrap()),
        |store, key| store.multi_set(&[(key, b"v")], soon()).unwrap(),
    ];
    let store = another();
    thread::scope(|scope| {
        // Several threads wait on one handle while the same handle is used to write.
        for (i, write) in writes.into_iter().enumerate() {
            let key = format!("awaited/{i}");
            let waiting = Arc::clone(&store);
            let name = key.clone();
            scope.spawn(move || waiting.wait(&[&name, "awaited/last"], soon()).unwrap());
            write(&store, &key);
        }
        let other = another();
        let reader = scope.spawn(move || other.get("awaited/last", soon()).unwrap());
        store.set("awaited/last", b"now", soon()).unwrap();
        assert_eq!(reader.join().unwrap(), b"now");
    });
}

fn values_are_those_of_keys_that_are_there_together(another: &Another) {
    let (store, other) = (another(), another());
    let waiting = thread::spawn(move || other.multi_get(&["removed", "later"], soon()).unwrap());
    // The two are never there together, until the first is set again.
    store.set("removed", b"1", soon()).unwrap();
    store.delete_key("removed", soon()).unwrap();
    store.set("later", b"2", soon()).unwrap();
    store.set("removed", b"3", soon()).unwrap();
    assert_eq!(waiting.join().unwrap(), [b"3", b"2"]);
    store.delete_keys(&["removed", "later"], soon()).unwrap();
}

fn waits_are_ended_by_the_check_of_their_thread(another: &Another) {
    fn ends() -> Result<()> {
        Err(Error::aborted("enough"))
    }
    let store = another();
    let waits: [fn(&SharedStore) -> Result<()>; 3] = [
        |store| store.get("set by nobody", soon()).map(drop),
        |store| store.wait(&["set by nobody"], soon()),
        |store| store.set_and_get(&[], &["set by nobody"], soon(), &mut || Ok(())).map(drop),
    ];
    for wait in waits {
        let error = interruptible(ends, || wait(&store)).unwrap_err();
        assert!(error.is_aborted() && error.to_string().contains("enough"), "{error}");
    }
}

fn deadlines_are_obeyed_and_errors_name_the_key(another: &Another) {
    let store = another();
    store.set("there", b"", soon()).unwrap();
    let waits: [fn(&SharedStore) -> Error; 3] = [
        |store| store.get("never", at_once()).unwrap_err(),
        |store| store.wait(&["there", "never"], at_once()).unwrap_err(),
        |store| store.multi_get(&["there", "never"], at_once()).unwrap_err(),
    ];
    for wait in waits {
        let started = Instant::now();
        let error = wait(&store);
        let waited = started.elapsed();
        assert!(waited >= Duration::from_millis(38) && waited < Duration::from_secs(15), "{waited:?}");
        let said = error.to_string();
        assert!(error.is_timeout() && error.remedy().is_some(), "{said}");
        assert!(said.contains("never\"") && said.contains("store") && said.contains(" s "), "{said}");
    }
    // After a cancelled wait the handle is still usable.
    assert_eq!(store.get("there", soon()).unwrap(), b"");
}

fn caps_are_kept(another: &Another) {
    let store = another();
    let error = store.set("long", &vec![0; MAX_VALUE + 1], soon()).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains(&MAX_VALUE.to_string()), "{error}");
    let key = "k".repeat(MAX_KEY + 1);
    let error = store.check(&[&key], soon()).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().len() < 1000, "{error}");
    // What is refused is refused whole.
    let long = vec![0; MAX_VALUE + 1];
    for second in [("long", &long[..]), (&*key, &b""[..])] {
        let error = store.multi_set(&[("before", b""), second], soon()).unwrap_err();
        assert!(error.is_invalid_argument() && !store.check(&["before"], soon()).unwrap(), "{error}");
    }
    store.set("longest", &vec![1; MAX_VALUE], soon()).unwrap();
    let error = store.append("longest", b"1", soon()).unwrap_err();
    assert!(!error.is_timeout(), "{error}");
    assert_eq!(store.get("longest", soon()).unwrap().len(), MAX_VALUE);
    assert!(store.delete_key("longest", soon()).unwrap());
}

fn ranks_do_not_lose_updates(another: &Another) {
    thread::scope(|scope| {
        for _ in 0..4 {
            let store = another();
            scope.spawn(move || {
                for _ in 0..50 {
                    store.add("raced", 1, soon()).unwrap();
                    store.append("raced bytes", b"x", soon()).unwrap();
                }
            });
        }
    });
    let store = another();
    assert_eq!(store.get("raced", soon()).unwrap(), b"200");
    assert_eq!(store.get("raced bytes", soon()).unwrap().len(), 200);
}

/// The same store under two nested prefixes.
fn prefixed(another: Another) -> Another {
    Box::new(move || {
        let outer: SharedStore = Arc::new(PrefixStore::new("job", another()));
        Arc::new(PrefixStore::new("1", outer))
    })
}

#[test]
fn memory() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let another: Another = Box::new(move || Arc::clone(&store));
    conforms(&another);
    conforms(&prefixed(another));
}

#[test]
fn file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let owner = FileStore::create(&path).unwrap();
    let another: Another = Box::new(move || Arc::new(FileStore::open(&path, soon()).unwrap()));
    conforms(&another);
    conforms(&prefixed(another));
    drop(owner);
}

#[test]
fn file_that_is_compacted_again_and_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let owner = FileStore::create(&path).unwrap();
    let another: Another =
        Box::new(move || Arc::new(FileStore::open(&path, soon()).unwrap().compacted_at(1024)));
    conforms(&another);
    conforms(&prefixed(another));
    drop(owner);
}

#[cfg(feature = "etcd")]
#[test]
#[ignore = "needs etcd: .ci/full runs it"]
fn etcd() {
    let server = super::etcd::tests::start();
    // It does not accept values as long as the others do.
    let another: Another = Box::new(move || Arc::new(super::etcd::tests::open(&server, "job")));
    behaves(&another);
}

fn tcp_at(address: &str) {
    let server = TcpStoreServer::bind(address.parse().unwrap()).unwrap();
    let address = server.local_addr();
    let another: Another = Box::new(move || Arc::new(TcpStore::connect(address, soon()).unwrap()));
    conforms(&another);
    conforms(&prefixed(another));
}

#[test]
fn tcp() {
    tcp_at("127.0.0.1:0");
}

#[test]
#[ignore = "needs IPv6: .ci/full runs it"]
fn tcp_over_ipv6() {
    tcp_at("[::1]:0");
}

/// The same checks on the store of another implementation at `address`, which has other caps.
pub(super) fn elsewhere(address: &str) {
    let address = address.to_owned();
    let another: Another = Box::new(move || Arc::new(TcpStore::connect(&address, soon()).unwrap()));
    behaves(&another);
    behaves(&prefixed(another));
}
