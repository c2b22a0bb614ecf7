//! `phalanx run` on several nodes: launchers as processes of this machine, on the loopback and in network namespaces.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::{SUM, exit_code, free_port, node, phalanx, send, sorted_lines, text};

/// Exit code, standard output and standard error of a launcher that has been started.
fn end(mut child: Child) -> (Option<i32>, String, String) {
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let err = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        err.read_to_end(&mut bytes).unwrap();
        text(&bytes)
    });
    let out = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        out.read_to_end(&mut bytes).unwrap();
        text(&bytes)
    });
    let code = exit_code(&mut child);
    (code, out.join().unwrap(), err.join().unwrap())
}

/// Waits until a worker of this launcher has said something.
fn wait_for_line(child: &mut Child) {
    wait_for(child, "");
}

/// Waits until a worker of this launcher has said `words`.
fn wait_for(child: &mut Child, words: &str) {
    let mut out = BufReader::with_capacity(1, child.stdout.as_mut().unwrap());
    loop {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "no worker has said {words:?}");
        if line.contains(words) {
            return;
        }
    }
}

#[test]
fn two_nodes_make_one_world_with_a_store() {
    let port = free_port();
    // As `phalanx horovodrun` does: across the nodes only those count that have this local rank.
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE \
                  $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE";
    let start = |rank, workers| {
        let mut command = node(rank, &port, &["--nproc-per-node", workers], script);
        command.env("PHALANX_HOROVODRUN", "1").spawn().unwrap()
    };
    let (late, first) = (start("1", "3"), start("0", "2"));
    let (code, out, err) = end(first);
    assert_eq!(
        (code, sorted_lines(out.as_bytes())),
        (Some(0), vec!["[0] 0/5 0/2 0/2 0/2".into(), "[1] 1/5 1/2 0/2 0/2".into()]),
        "{err}"
    );
    let (code, out, err) = end(late);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(
        sorted_lines(out.as_bytes()),
        ["[2] 2/5 0/3 1/2 1/2", "[3] 3/5 1/3 1/2 1/2", "[4] 4/5 2/3 1/2 0/1"]
    );
}

#[test]
fn a_group_spans_the_nodes_and_comes_together_again_after_a_failure() {
    let port = free_port();
    let script = format!("{SUM} && exit $((RANK == 3 && TORCHELASTIC_RESTART_COUNT == 0 ? 7 : 0))");
    let options = ["--nproc-per-node", "2", "--max-restarts", "1"];
    let nodes = ["0", "1"].map(|rank| node(rank, &port, &options, &script).spawn().unwrap());
    for child in nodes {
        let (code, _, err) = end(child);
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("rank 3") && err.contains("restart 1 of 1"), "{err}");
    }
}

#[test]
fn the_first_failure_is_told_on_every_node() {
    let port = free_port();
    let script = "[ $RANK = 0 ] && exec sleep 60; sleep 0.3; echo the reason >&2; exit 9";
    let started = Instant::now();
    for child in ["0", "1"].map(|rank| node(rank, &port, &[], script).spawn().unwrap()) {
        let (code, _, err) = end(child);
        assert_eq!(code, Some(9), "{err}");
        let (_, report) = err.split_once("The first failure").unwrap();
        for expected in ["1 of 2", "(node 1 of 2)", "exit code 9", "the reason"] {
            assert!(report.contains(expected), "{err}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_killed_launcher_is_named_by_the_others() {
    for (killed, survivor, expected) in [("1", "0", "has ended without a word"), ("0", "1", "node 0 (")] {
        let port = free_port();
        let mut nodes =
            [killed, survivor].map(|rank| node(rank, &port, &[], "echo up; exec sleep 60").spawn().unwrap());
        nodes.iter_mut().for_each(wait_for_line);
        let [killed, survivor] = nodes;
        send(&killed, Signal::KILL);
        let started = Instant::now();
        let (code, _, err) = end(survivor);
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains(expected), "{err}");
        assert!(started.elapsed() < Duration::from_secs(30));
        end(killed);
    }
}

#[test]
fn a_signal_to_one_launcher_ends_all() {
    let port = free_port();
    let mut nodes = ["0", "1"].map(|rank| node(rank, &port, &[], "echo up; exec sleep 60").spawn().unwrap());
    nodes.iter_mut().for_each(wait_for_line);
    let [first, second] = nodes;
    send(&first, Signal::TERM);
    assert_eq!(end(first).0, Some(143));
    let (code, _, err) = end(second);
    assert!(code == Some(1) && err.contains("was ended by SIGTERM"), "{err}");
}

#[test]
fn a_launcher_that_was_stopped_finds_itself_given_up() {
    let port = free_port();
    let options = ["--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=25"];
    let mut nodes =
        ["0", "1"].map(|rank| node(rank, &port, &options, "echo up; exec sleep 60").spawn().unwrap());
    nodes.iter_mut().for_each(wait_for_line);
    let [first, second] = nodes;
    send(&second, Signal::STOP);
    let (code, _, err) = end(first);
    assert!(code == Some(1) && err.contains("has not been heard of"), "{err}");
    send(&second, Signal::CONT);
    assert_eq!(end(second).0, Some(1));
}

#[test]
fn nodes_that_do_not_come_or_do_not_fit_are_named() {
    let port = free_port();
    let options = ["--rdzv-conf", "join_timeout=5"];
    let (code, _, err) = end(node("0", &port, &options, "echo never").spawn().unwrap());
    assert!(code == Some(1) && err.contains("1 of at least 2 nodes"), "{err}");

    // Whichever is first: all others must fit the one that serves the store.
    for slow in ["0", "1"] {
        let port = free_port();
        let start = |rank: &str, options: &[&str]| {
            if rank == slow {
                std::thread::sleep(Duration::from_millis(300));
            }
            node(rank, &port, options, "echo never").spawn().unwrap()
        };
        let (first, other) = std::thread::scope(|scope| {
            let first = scope.spawn(|| start("0", &[]));
            let other = scope.spawn(|| start("1", &["--max-restarts", "3"]));
            (first.join().unwrap(), other.join().unwrap())
        });
        let (code, _, err) = end(other);
        assert!(code == Some(1) && err.contains("--max-restarts 0"), "{err}");
        send(&first, Signal::TERM);
        let (code, _, err) = end(first);
        assert_eq!(code, Some(143), "{err}");
    }
}

#[test]
fn a_signal_ends_a_launcher_that_waits_for_others() {
    for rank in ["0", "1"] {
        let mut child = node(rank, &free_port(), &[], "echo never").spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines().map(Result::unwrap);
        // The one that serves the store may know of itself before it says that it connects.
        assert!(lines.any(|line| line.contains("connecting") || line.contains("1 of 2 nodes")));
        send(&child, Signal::INT);
        assert_eq!(exit_code(&mut child), Some(130));
    }
}

#[test]
fn a_lost_node_is_replaced_when_restarts_are_left() {
    let gone: &[&str] =
        &["its launcher was gone, and was started again", "its launcher has ended without a word"];
    for (signal, reasons) in [(Signal::KILL, gone), (Signal::TERM, &["was ended by SIGTERM"])] {
        let port = free_port();
        let options = ["--max-restarts", "1"];
        // If the successor comes in time, a signal costs no restart, so this is not the number of restarts.
        let folder = tempfile::tempdir().unwrap();
        let again = folder.path().join("again");
        let script = &format!("echo up; [ -e {} ] || exec sleep 60", again.display());
        let mut nodes = ["0", "1"].map(|rank| node(rank, &port, &options, script).spawn().unwrap());
        nodes.iter_mut().for_each(wait_for_line);
        let [first, lost] = nodes;
        send(&lost, signal);
        end(lost);
        std::fs::write(again, "").unwrap();
        // It comes back, as a pod does, perhaps before its end is noticed: its process is gone, so its place is free.
        let (code, _, err) = end(node("1", &port, &options, script).spawn().unwrap());
        assert_eq!(code, Some(0), "{err}");
        let (code, _, err) = end(first);
        assert!(code == Some(0) && reasons.iter().any(|reason| err.contains(reason)), "{err}");
    }
}

#[test]
fn nodes_may_come_and_go() {
    let port = free_port();
    let endpoint = format!("127.0.0.1:{port}");
    let options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
    let options = [&options[..], &["--rdzv-conf", "last_call_timeout=0.2"]].concat();
    let script = "echo world $WORLD_SIZE; trap 'exit 0' TERM; while :; do sleep 0.05; done";
    let mut first = phalanx(&options, script).spawn().unwrap();
    wait_for(&mut first, "world 1");
    let mut second = phalanx(&options, script).spawn().unwrap();
    wait_for(&mut second, "world 2");
    wait_for(&mut first, "world 2");
    send(&second, Signal::TERM);
    assert_eq!(end(second).0, Some(143));
    // Alone again, at no restart's cost.
    wait_for(&mut first, "world 1");
    send(&first, Signal::TERM);
    let (code, _, err) = end(first);
    assert_eq!(code, Some(143), "{err}");
    assert!(err.contains("nodes have come") && err.contains("was ended by SIGTERM"), "{err}");
}

/// Two network namespaces that a cable joins.
struct Namespaces(String);

impl Namespaces {
    fn new() -> Self {
        let name = format!("phx{}", std::process::id());
        let (a, b) = (format!("{name}a"), format!("{name}b"));
        let made = Self(name);
        let commands = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add {a} netns {a} type veth peer name {b} netns {b}"),
            format!("-n {a} addr add 10.97.0.1/24 dev {a}"),
            format!("-n {b} addr add 10.97.0.2/24 dev {b}"),
            format!("-n {a} link set {a} up"),
            format!("-n {b} link set {b} up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ];
        for command in commands {
            let done = Command::new("ip").args(command.split(' ')).output().unwrap();
            assert!(done.status.success(), "ip {command}: {}", text(&done.stderr));
        }
        made
    }

    /// `command` inside one of them.
    fn inside(&self, side: &str, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &format!("{}{side}", self.0)]).arg(command.get_program());
        inside.args(command.get_args()).stdin(std::process::Stdio::null());
        inside.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        inside
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for side in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{side}", self.0)]).output();
        }
    }
}

#[test]
#[ignore = "needs root and iproute2: .ci/full runs it"]
fn two_hosts_train_together_and_a_cut_cable_ends_both() {
    let hosts = Namespaces::new();
    let sum = format!("{SUM} && echo up");
    let options = ["--nproc-per-node", "2", "--master-addr", "10.97.0.1"];
    let start = |script: &str| {
        [("0", "a"), ("1", "b")]
            .map(|(rank, side)| hosts.inside(side, &node(rank, "29500", &options, script)).spawn().unwrap())
    };
    for child in start(&sum) {
        let (code, out, err) = end(child);
        assert_eq!((code, out.matches("up").count()), (Some(0), 2), "{err}");
    }

    let mut nodes = start(&format!("{sum}; exec sleep 60"));
    nodes.iter_mut().for_each(wait_for_line);
    let cable = format!("{}a", hosts.0);
    Command::new("ip").args(["-n", &cable, "link", "set", &cable, "down"]).status().unwrap();
    let started = Instant::now();
    let [first, second] = nodes;
    let (code, _, err) = end(first);
    assert!(code == Some(1) && err.contains("its launcher has not been heard of"), "{err}");
    let (code, _, err) = end(second);
    assert!(code == Some(1) && err.contains("node 0 (") && err.contains("the network is silent"), "{err}");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}
