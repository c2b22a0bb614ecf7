//! An etcd of one test.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The server, until it is dropped.
pub struct Etcd {
    server: Child,
    pub address: String,
    _folder: TempDir,
}

impl Etcd {
    /// Starts it at these ports, for clients and for peers, and waits until it listens.
    pub fn start([clients, peers]: [u16; 2]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{clients}");
        let (url, peers) = (format!("http://{address}"), format!("http://127.0.0.1:{peers}"));
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
        let etcd = Self { server, address, _folder: folder };
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&etcd.address).is_err() {
            assert!(Instant::now() < deadline, "etcd does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        etcd
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
