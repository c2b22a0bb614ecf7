//! Tests with a real etcd.

#[path = "../../../tests/support/ports.rs"]
mod ports;
#[path = "../../../tests/support/etcd.rs"]
mod server;

use self::server::Etcd;
use super::*;

pub(in crate::store) fn start() -> Etcd {
    Etcd::start([ports::free_port(), ports::free_port()])
}

/// A store of `job` in it.
pub(in crate::store) fn open(etcd: &Etcd, job: &str) -> EtcdStore {
    EtcdStore::open(&etcd.address, job, soon()).unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

#[test]
#[ignore = "needs etcd: .ci/full runs it"]
fn jobs_do_not_see_each_other_and_nothing_stays() {
    let etcd = start();
    let (one, other) = (open(&etcd, "job"), open(&etcd, "job/key"));
    one.set("key/x", b"1", soon()).unwrap();
    assert!(!other.check(&["x"], soon()).unwrap() && other.num_keys(soon()).unwrap() == 0);
    // The second handle of a job has the first one's lease, and renews it alone.
    let second = open(&etcd, "job");
    assert_eq!(second.lease.id(), one.lease.id());
    drop(one);
    let gateway = Arc::clone(&second.gateway);
    let id = json!({ "ID": second.lease.id() });
    let left = || {
        let answer = gateway.ask("lease/timetolive", &id, true, soon()).unwrap();
        number(&answer["TTL"]).unwrap_or(0)
    };
    // The time left decreases until it is renewed.
    let mut before = left();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = left();
        assert!(now > 0, "nobody has kept the lease alive");
        if now > before {
            break;
        }
        before = now;
    }
    assert_eq!(second.get("key/x", soon()).unwrap(), b"1");
    let key = json!({ "key": second.key("key/x") });
    drop(second);
    let deadline = Deadline::after(lease::TIME_TO_LIVE * 3);
    while gateway.ask("kv/range", &key, true, deadline).unwrap()["kvs"].get(0).is_some() {
        assert!(!deadline.has_passed(), "the key is still there");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "needs etcd: .ci/full runs it"]
fn a_member_that_is_gone_is_passed_over() {
    let etcd = start();
    let store = EtcdStore::open(&format!("127.0.0.1:1,{}", etcd.address), "job", soon()).unwrap();
    assert_eq!(store.add("counter", 1, soon()).unwrap(), 1);
    drop(etcd);
    let error = store.add("counter", 1, Deadline::after(Duration::from_millis(300))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("etcd at 127.0.0.1:1,"), "{error}");
}

#[test]
fn an_answer_that_is_lost_is_a_time_out_that_names_the_cause() {
    let call = Call::new("etcd at a:1", "add", &["counter"], soon()).unwrap();
    let refused = || Refused::Silent { cause: io::Error::other("leader changed"), was_heard: true };
    let error = answer(&call, Err(refused())).unwrap_err();
    let said = error.to_string();
    assert!(error.is_timeout() && said.contains("may have carried this out: leader changed"), "{said}");
    let late = Call::new("etcd at a:1", "add", &["counter"], Deadline::now()).unwrap();
    let error = answer(&late, Err(refused())).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("heard of it: leader changed"), "{error}");
    let full = answer(&call, Err(Refused::Error("database space exceeded".to_owned()))).unwrap_err();
    assert!(!full.is_timeout() && full.to_string().contains("space exceeded"), "{full}");
    let says = |option: &str| full.remedy().is_some_and(|remedy| remedy.contains(option));
    assert!(says("--quota-backend-bytes") && says("--auto-compaction-retention"), "{full}");
}
