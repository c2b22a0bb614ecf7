//! Launchers that meet where none of them serves the log, in etcd and in a file: each may be lost, the first one too.

#[path = "../../../phalanx-core/tests/support/etcd.rs"]
mod server;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command};

use rustix::process::Signal;

use self::server::Etcd;
use crate::support::{SUM, exit_code, phalanx, ports, send};

fn etcd() -> Etcd {
    Etcd::start([ports::free_port(), ports::free_port()])
}

/// A launcher whose lines are read one by one.
struct Node {
    launcher: Child,
    out: BufReader<ChildStdout>,
}

impl Node {
    fn start(mut command: Command) -> Self {
        let mut launcher = command.spawn().unwrap();
        let out = BufReader::new(launcher.stdout.take().unwrap());
        Self { launcher, out }
    }

    /// The next line of its only worker.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn end(mut self) -> (Option<i32>, String) {
        let code = exit_code(&mut self.launcher);
        let mut err = String::new();
        self.launcher.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (code, err)
    }
}

/// The rank, the world and the round; then it ends if there is a file of this name, and waits if there is none.
const WORKER: &str = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR, $TORCHELASTIC_RESTART_COUNT; until [ -e go ]; do sleep 0.05; done";

/// The launchers of two nodes, of which either is lost; the other goes on alone, with a store of its own. Returns what that one has said in
/// the second job.
fn either_node_may_be_lost(options: &[&str], jobs: [&str; 2]) -> String {
    let mut said = String::new();
    for (first_is_lost, job) in [true, false].into_iter().zip(jobs) {
        let folder = tempfile::tempdir().unwrap();
        let common =
            ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-id", job, "--local-addr", "127.0.0.1"];
        let conf = "last_call_timeout=5,join_timeout=30";
        let start = || {
            let mut command = phalanx(&[&common[..], &["--rdzv-conf", conf], options].concat(), WORKER);
            command.current_dir(folder.path());
            Node::start(command)
        };
        let mut nodes = [start(), start()];
        let lines = nodes.each_mut().map(Node::line);
        let mut sorted = lines.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, ["[0] 0 of 2 at 127.0.0.1, 0", "[1] 1 of 2 at 127.0.0.1, 0"]);
        let is_lost = |line: &str| line.starts_with("[0]") == first_is_lost;
        let [a, b] = nodes;
        let (lost, mut left) = if is_lost(&lines[0]) { (a, b) } else { (b, a) };
        send(&lost.launcher, Signal::KILL);
        assert_eq!(left.line(), "[0] 0 of 1 at 127.0.0.1, 1");
        std::fs::write(folder.path().join("go"), "").unwrap();
        let (code, err) = left.end();
        assert!(code == Some(0) && err.contains("has not been heard of"), "{err}");
        lost.end();
        said = err;
    }
    said
}

#[test]
#[ignore = "needs etcd: .ci/full runs it"]
fn in_etcd_either_node_may_be_lost() {
    let etcd = etcd();
    either_node_may_be_lost(&["--rdzv-backend", "etcd", "--rdzv-endpoint", &etcd.address], ["one", "other"]);
}

#[test]
fn in_a_file_either_node_may_be_lost() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    // What the first of the two jobs leaves behind does not keep the second from beginning.
    let said = either_node_may_be_lost(
        &["--rdzv-backend", "file", "--rdzv-endpoint", path.to_str().unwrap()],
        ["job", "job"],
    );
    // And whoever waits for that is told why.
    assert!(said.contains("meeting is there already"), "{said}");
}

#[test]
#[ignore = "needs etcd: .ci/full runs it"]
fn a_group_spans_nodes_that_meet_in_etcd() {
    let etcd = etcd();
    let options = ["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", &etcd.address];
    for node in [(); 2].map(|()| Node::start(phalanx(&options, SUM))) {
        let (code, err) = node.end();
        assert_eq!(code, Some(0), "{err}");
    }
}

#[test]
fn where_nothing_answers_the_end_point_is_named() {
    let options = ["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "127.0.0.1:1"];
    let conf = ["--rdzv-conf", "join_timeout=8"];
    let (code, err) = Node::start(phalanx(&[&options[..], &conf].concat(), "echo never")).end();
    assert!(
        code == Some(1) && err.contains("127.0.0.1:1") && err.contains("does this host reach it?"),
        "{err}"
    );
    // Nobody waits long without a word.
    assert!(err.contains("waits for an answer of etcd at 127.0.0.1:1"), "{err}");
    let (code, err) = Node::start(phalanx(&["--nnodes", "2", "--rdzv-backend", "file"], "echo never")).end();
    assert!(code == Some(2) && err.contains("needs --rdzv-endpoint"), "{err}");
}
