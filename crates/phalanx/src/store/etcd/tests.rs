//! Tests with a real etcd.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::*;

/// A server of its own for one test.
pub(in crate::store) struct Etcd {
    server: Child,
    address: String,
    _folder: TempDir,
}

impl Etcd {
    pub(in crate::store) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (address, peers) = (format!("127.0.0.1:{}", port()), format!("http://127.0.0.1:{}", port()));
        let url = format!("http://{address}");
        let server = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path())
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("etcd cannot be started, is it installed? {error}"));
        Self { server, address, _folder: folder }
    }

    pub(in crate::store) fn store(&self, job: &str) -> EtcdStore {
        EtcdStore::open(&self.address, job, soon()).unwrap()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

#[test]
#[ignore = "needs etcd: .ci/full runs it"]
fn jobs_do_not_see_each_other_and_nothing_stays() {
    let etcd = Etcd::start();
    let (one, other) = (etcd.store("job"), etcd.store("job/key"));
    one.set("key/x", b"1", soon()).unwrap();
    assert!(!other.check(&["x"], soon()).unwrap() && other.num_keys(soon()).unwrap() == 0);
    // The second handle of a job has the first one's lease, and renews it alone.
    let second = etcd.store("job");
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
    let etcd = Etcd::start();
    let store = EtcdStore::open(&format!("127.0.0.1:1,{}", etcd.address), "job", soon()).unwrap();
    assert_eq!(store.add("counter", 1, soon()).unwrap(), 1);
    drop(etcd);
    let error = store.add("counter", 1, Deadline::after(Duration::from_millis(300))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("etcd at 127.0.0.1:1,"), "{error}");
}
