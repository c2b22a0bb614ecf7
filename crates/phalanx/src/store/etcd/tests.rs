//! On a real etcd, if it is installed.

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
    /// Without etcd the test says that it is skipped, or, if everything was asked for, fails.
    pub(in crate::store) fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (address, peers) = (format!("127.0.0.1:{}", port()), format!("http://127.0.0.1:{}", port()));
        let url = format!("http://{address}");
        let started = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path())
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match started {
            Ok(server) => Some(Self { server, address, _folder: folder }),
            Err(error) => {
                assert!(std::env::var_os("PHALANX_TEST_FULL").is_none(), "etcd was asked for: {error}");
                println!("skipped: etcd cannot be started: {error}");
                None
            }
        }
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
fn jobs_do_not_see_each_other_and_nothing_stays() {
    let Some(etcd) = Etcd::start() else { return };
    let (one, other) = (etcd.store("job"), etcd.store("job/key"));
    one.set("key/x", b"1", soon()).unwrap();
    assert!(!other.check(&["x"], soon()).unwrap() && other.num_keys(soon()).unwrap() == 0);
    // The second of a job has the first one's lease, and keeps it alive alone.
    let second = etcd.store("job");
    assert_eq!(second.lease.id(), one.lease.id());
    drop(one);
    std::thread::sleep(lease::TIME_TO_LIVE + Duration::from_secs(3));
    assert_eq!(second.get("key/x", soon()).unwrap(), b"1");
    let key = json!({ "key": second.key("key/x") });
    let gateway = Arc::clone(&second.gateway);
    drop(second);
    let deadline = Deadline::after(lease::TIME_TO_LIVE * 3);
    while gateway.ask("kv/range", &key, true, deadline).unwrap()["kvs"].get(0).is_some() {
        assert!(!deadline.has_passed(), "the key is still there");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_member_that_is_gone_is_passed_over() {
    let Some(etcd) = Etcd::start() else { return };
    let store = EtcdStore::open(&format!("127.0.0.1:1,{}", etcd.address), "job", soon()).unwrap();
    assert_eq!(store.add("counter", 1, soon()).unwrap(), 1);
    drop(etcd);
    let error = store.add("counter", 1, Deadline::after(Duration::from_millis(300))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("etcd at 127.0.0.1:1,"), "{error}");
}
