//! Our client with PyTorch's server, and vice versa. PyTorch is not needed to build or test this crate, so these tests
//! are ignored by default. Run them with `PHALANX_TEST_PYTHON=python3 cargo test -p phalanx-core --lib pytorch -- --ignored`
//! and a Python that has torch. `.ci/full` installs one.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::TcpStoreServer;
use crate::key::JobKey;
use crate::store::conformance;

const CLIENT: &str = include_str!("pytorch_client.py");

const SERVER: &str = "
import sys, torch.distributed as dist
store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False, use_libuv=sys.argv[1] == 'libuv')
print(store.port, flush=True)
sys.stdin.read()
";

fn python(script: &str) -> Command {
    let python =
        std::env::var_os("PHALANX_TEST_PYTHON").expect("PHALANX_TEST_PYTHON names a Python with torch");
    let mut command = Command::new(python);
    command.args(["-c", script]);
    command
}

#[test]
#[ignore = "needs PyTorch, in the Python that PHALANX_TEST_PYTHON names: .ci/full runs it"]
fn pytorch_clients_work_with_our_server() {
    let address = "127.0.0.1:0".parse().unwrap();
    // A store with a key admits them because they are this user's.
    let keyed = TcpStoreServer::bind_with_key(address, JobKey::generate().unwrap()).unwrap();
    for server in [TcpStoreServer::bind(address).unwrap(), keyed] {
        let port = server.local_addr().port().to_string();
        let output = python(CLIENT).args(["127.0.0.1", &port]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
#[ignore = "needs PyTorch, in the Python that PHALANX_TEST_PYTHON names: .ci/full runs it"]
fn our_clients_work_with_pytorchs_servers() {
    for kind in ["libuv", "legacy"] {
        let mut server =
            python(SERVER).arg(kind).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let result =
            std::panic::catch_unwind(|| conformance::elsewhere(&format!("127.0.0.1:{}", port.trim())));
        drop(server.stdin.take());
        server.wait().unwrap();
        if let Err(panic) = result {
            eprintln!("with PyTorch's {kind} server:");
            std::panic::resume_unwind(panic);
        }
    }
}
