//! `phalanx run` on several nodes: launchers as processes of this machine, on the loopback and in network namespaces.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use phalanx::Deadline;
use phalanx::store::TcpStore;
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::Signal;

use crate::support::{
    LIMIT, SUM, command, exit_code, free_port, limit, node, phalanx, send, sorted_lines, text, within,
};

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

/// As in a terminal after Ctrl-S, or behind a pager: what a launcher says while it waits for the store stays unread.
#[test]
fn a_launcher_whose_standard_error_nobody_reads_joins_all_the_same() {
    let port = free_port();
    let (mut unread, mut full) = std::io::pipe().unwrap();
    full.write_all(&vec![b'.'; fcntl_getpipe_size(&full).unwrap()]).unwrap();
    let mut command = node("1", &port, &[], "echo joined");
    let mut waiting = command.stderr(full).spawn().unwrap();
    // It holds the pipe.
    drop(command);
    limit(&waiting);
    // Until it has something to say of its wait.
    std::thread::sleep(Duration::from_secs(7));
    let first = end(node("0", &port, &[], "echo joined").spawn().unwrap());
    assert_eq!((first.0, first.1.as_str()), (Some(0), "[0] joined\n"), "{}", first.2);
    // Now somebody reads.
    unread.read_to_end(&mut Vec::new()).unwrap();
    let mut said = String::new();
    waiting.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((exit_code(&mut waiting), said.as_str()), (Some(0), "[1] joined\n"));
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
fn a_role_counts_its_own_workers() {
    let port = free_port();
    let start = |rank, role| {
        let options = ["--nproc-per-node", "2", "--role", role];
        node(rank, &port, &options, "echo $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE").spawn().unwrap()
    };
    let nodes = [start("0", "trainer"), start("1", "reader")];
    let expected = [["[0] trainer 0/2", "[1] trainer 1/2"], ["[2] reader 0/2", "[3] reader 1/2"]];
    for (child, expected) in nodes.into_iter().zip(expected) {
        let (code, out, err) = end(child);
        assert_eq!(
            (code, sorted_lines(out.as_bytes())),
            (Some(0), expected.map(str::to_owned).to_vec()),
            "{err}"
        );
    }
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

/// What two launchers say, of which one stands still for longer than one that is awake may wait for its store: that one, and the other.
fn stood_still(node_that_does: usize) -> [String; 2] {
    let port = free_port();
    let options = ["--rdzv-conf", "keep_alive_interval=0.2,keep_alive_max_attempt=25"];
    let mut nodes =
        ["0", "1"].map(|rank| node(rank, &port, &options, "echo up; exec sleep 60").spawn().unwrap());
    nodes.iter_mut().for_each(wait_for_line);
    let [first, second] = nodes;
    let [stopped, other] = if node_that_does == 0 { [first, second] } else { [second, first] };
    send(&stopped, Signal::STOP);
    let since = Instant::now();
    let (code, _, others) = end(other);
    assert_eq!(code, Some(1), "{others}");
    std::thread::sleep(Duration::from_secs(13).saturating_sub(since.elapsed()));
    send(&stopped, Signal::CONT);
    let (code, _, own) = end(stopped);
    assert_eq!(code, Some(1), "{own}");
    [own, others]
}

#[test]
fn a_launcher_that_was_stopped_finds_itself_given_up() {
    let [own, others] = stood_still(1);
    assert!(others.contains("has not been heard of"), "{others}");
    assert!(own.contains("this launcher stood still for"), "{own}");
}

#[test]
fn a_launcher_that_serves_the_store_and_was_stopped_blames_nobody_who_has_ended_for_that() {
    let [own, others] = stood_still(0);
    assert!(others.contains("node 0 ("), "{others}");
    assert!(own.contains("serves the launchers' store, stood still for"), "{own}");
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
fn a_second_signal_ends_a_launcher_from_which_others_still_learn_the_end() {
    let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
    // The store waits for clients that have not left it for as long as a launcher may be silent.
    let options = ["--rdzv-conf", "keep_alive_max_attempt=3600"];
    let go = folder.path().join("go");
    let script = format!("echo up; until [ -e {} ]; do sleep 0.05; done", go.display());
    let mut nodes = ["0", "1"].map(|rank| node(rank, &port, &options, &script).spawn().unwrap());
    nodes.iter().for_each(limit);
    nodes.iter_mut().for_each(wait_for_line);
    let [mut first, second] = nodes;
    let _stays = TcpStore::connect(format!("127.0.0.1:{port}"), Deadline::after(LIMIT)).unwrap();
    std::fs::write(go, "").unwrap();
    let (code, _, err) = end(second);
    assert_eq!(code, Some(0), "{err}");
    let mut lines = BufReader::new(first.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut says = |words: &str| assert!(lines.any(|line| line.contains(words)), "it has not said {words:?}");
    says("until the launchers of other nodes have read how it has ended");
    send(&first, Signal::TERM);
    says("another signal ends it at once");
    send(&first, Signal::TERM);
    assert_eq!(exit_code(&mut first), Some(0));
}

#[test]
fn nodes_may_come_and_go() {
    let port = free_port();
    let endpoint = format!("127.0.0.1:{port}");
    let options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
    let options =
        [&options[..], &["--local-addr", "localhost", "--rdzv-conf", "last_call_timeout=0.2"]].concat();
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

#[test]
fn a_node_that_was_told_to_end_too_late_does_not_start_again() {
    // Rank 0 fails when the others are ready. They are asked to end, say so, and go on until they may.
    let script = "echo world $WORLD_SIZE; [ $WORLD_SIZE = 3 ] || exit 0; \
                  [ $RANK = 0 ] && { until [ -e ready1 ] && [ -e ready2 ]; do sleep 0.05; done; exit 3; }; \
                  trap 'echo asked' TERM; touch ready$RANK; until [ -e go$RANK ]; do sleep 0.05; done";
    let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
    let start = |rank, workers| {
        let place = ["--nnodes", "1:2", "--node-rank", rank, "--master-port", &port];
        let options = ["--local-addr", "localhost", "--nproc-per-node", workers];
        let mut command = phalanx(&[&place[..], &options].concat(), script);
        command.current_dir(folder.path()).spawn().unwrap()
    };
    let (mut first, mut second) = (start("0", "2"), start("1", "1"));
    wait_for(&mut first, "asked");
    wait_for(&mut second, "asked");
    send(&second, Signal::TERM);
    std::fs::write(folder.path().join("go2"), "").unwrap();
    let (code, _, err) = end(second);
    assert_eq!(code, Some(143), "{err}");
    // The failure costs no restart, because the other node has left. The first one would go on alone.
    send(&first, Signal::INT);
    let (code, out, err) = end(first);
    assert_eq!(code, Some(130), "{out}{err}");
    assert!(!out.contains("world 2"), "{out}{err}");
}

#[test]
fn an_end_point_that_each_node_has_for_itself_is_refused() {
    let port = free_port();
    let conf = "last_call_timeout=0.2,join_timeout=20";
    let told_to_serve = format!("{conf},is_host=true");
    let refused_with = |conf: &str, options: &[&str], expected: &[&str]| {
        let common = ["--nnodes", "1:2", "--rdzv-conf", conf];
        let (code, out, err) = end(phalanx(&[&common[..], options].concat(), "echo alone").spawn().unwrap());
        assert!(code == Some(1) && out.is_empty(), "{options:?}: {out}{err}");
        assert!(expected.iter().all(|expected| err.contains(expected)), "{options:?}: {err}");
    };
    let refused = |options: &[&str], expected: &[&str]| refused_with(conf, options, expected);
    for host in ["localhost", "127.0.0.1", "127.0.1.1", "[::1]", "0.0.0.0"] {
        let endpoint = format!("{host}:{port}");
        let at = ["--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
        refused(&at, &["every node's own host", "--local-addr localhost", "--nnodes N"]);
        refused(&[&at[..], &["--bind", "192.0.2.1"]].concat(), &["every node's own host"]);
        refused_with(&told_to_serve, &at, &["every node's own host"]);
    }
    // The defaults of --node-rank and --master-addr.
    refused(&["--master-port", &port], &["every node's own host"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    refused(
        &["--rdzv-backend", "file", "--rdzv-endpoint", path.to_str().unwrap()],
        &["is on a disk of this host", "--local-addr localhost"],
    );
    assert!(!path.exists());
    // Where all nodes are needed, or are said to be here, an address for each to listen at contradicts the end point.
    let endpoint = format!("localhost:{port}");
    let at = ["--local-addr", "localhost", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
    refused(&[&at[..], &["--bind", "192.0.2.1"]].concat(), &["each would serve a store", "leave out --bind"]);
    refused(&[&at[..], &["--bind", "127.0.0.9"]].concat(), &["each would serve a store"]);
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
        inside.args(["netns", "exec", &format!("{}{side}", self.0)]);
        within(inside, command)
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

/// The sides of the network, and their addresses.
const SIDES: [(&str, &str); 2] = [("a", "10.97.0.1"), ("b", "10.97.0.2")];

/// What the two hosts of a job said, and the sizes of their worlds.
fn outcomes(nodes: [Child; 2]) -> [(Option<i32>, String, String); 2] {
    nodes.map(end)
}

#[test]
#[ignore = "needs root and iproute2: .ci/full runs it"]
fn a_template_that_all_nodes_share_makes_one_world_or_none() {
    let hosts = Namespaces::new();
    let start = |options: &[&str], bind: fn(&'static str) -> Option<&'static str>| {
        SIDES.map(|(side, own)| {
            let common = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf"];
            let bind: Vec<&str> = bind(own).into_iter().flat_map(|bind| ["--bind", bind]).collect();
            let script = "echo world $WORLD_SIZE at $MASTER_ADDR";
            let mut options = [&common[..], options].concat();
            options.extend(bind);
            hosts.inside(side, &phalanx(&options, script)).spawn().unwrap()
        })
    };
    // As a pod's template gives each its own address, or all, to listen at.
    let conf = "last_call_timeout=8,join_timeout=30";
    for bind in [(|_| None) as fn(&'static str) -> Option<&'static str>, Some, |_| Some("0.0.0.0")] {
        for (code, out, err) in outcomes(start(&[conf, "--rdzv-endpoint", "10.97.0.1:29400"], bind)) {
            assert_eq!((code, out.contains("world 2 at 10.97.0.1")), (Some(0), true), "{out}{err}");
        }
        for (code, out, err) in outcomes(start(&[conf, "--rdzv-endpoint", "localhost:29400"], bind)) {
            assert!(code == Some(1) && out.is_empty() && err.contains("every node's own host"), "{out}{err}");
        }
    }
    // Both are told to serve: one has the address.
    let conf = "last_call_timeout=1,join_timeout=30,is_host=true";
    let [first, second] = outcomes(start(&[conf, "--rdzv-endpoint", "10.97.0.1:29400"], Some));
    assert!(first.0 == Some(0) && first.1.contains("world 1"), "{first:?}");
    assert!(second.0 == Some(1) && second.2.contains("no address of this host"), "{second:?}");
}

/// Both hosts have this machine's name, and neither has a default route.
#[test]
#[ignore = "needs root and iproute2: .ci/full runs it"]
fn hosts_of_one_name_without_a_default_route_meet_in_a_file() {
    let hosts = Namespaces::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("launchers");
    let options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "file", "--rdzv-endpoint"];
    let script = format!("echo at $MASTER_ADDR; {SUM} && echo up");
    for (code, out, err) in outcomes(SIDES.map(|(side, _)| {
        let options = [&options[..], &[path.to_str().unwrap()]].concat();
        hosts.inside(side, &phalanx(&options, &script)).spawn().unwrap()
    })) {
        assert_eq!((code, out.matches("up").count()), (Some(0), 2), "{err}");
        assert!(out.contains("at 10.97.0."), "{out}");
    }

    // Ranks that find each other in a file, and where they are by themselves.
    let path = format!("file://{}", folder.path().join("ranks").display());
    let rank = |side: &str, rank: &str, interface: Option<&str>| {
        let mut command = command("doctor");
        command.args(["--measure", "1"]);
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("PHALANX_RENDEZVOUS", &path);
        command.envs(interface.map(|name| ("GLOO_SOCKET_IFNAME", name)));
        hosts.inside(side, &command).spawn().unwrap()
    };
    for (code, _, err) in outcomes([rank("a", "0", None), rank("b", "1", None)]) {
        assert_eq!(code, Some(0), "{err}");
    }
    let cables = SIDES.map(|(side, _)| format!("{}{side}", hosts.0));
    for (code, _, err) in outcomes([rank("a", "0", Some(&cables[0])), rank("b", "1", Some(&cables[1]))]) {
        assert_eq!(code, Some(0), "{err}");
    }
    let (code, _, err) = end(rank("a", "0", Some("nosuch0")));
    assert!(code != Some(0), "{err}");
}

/// Both hosts have this machine's name, and the second cannot see the processes of the first.
#[test]
#[ignore = "needs root and iproute2: .ci/full runs it"]
fn a_live_node_is_not_replaced_by_another_host_of_its_name() {
    let hosts = Namespaces::new();
    let options = ["--max-restarts", "3", "--master-addr", "10.97.0.1"];
    let start = |side: &str, rank: &str| {
        hosts.inside(side, &node(rank, "29500", &options, "echo up; exec sleep 60")).spawn().unwrap()
    };
    let mut nodes = [start("a", "0"), start("a", "1")];
    nodes.iter_mut().for_each(wait_for_line);
    let (code, _, err) = end(start("b", "1"));
    assert!(code == Some(1) && err.contains("two nodes have --node-rank 1"), "{err}");
    let [first, second] = nodes;
    send(&second, Signal::TERM);
    assert_eq!(end(second).0, Some(143));
    let (code, _, err) = end(first);
    assert!(code == Some(1) && err.contains("was ended by SIGTERM"), "{err}");
    assert!(!err.contains("was started again"), "{err}");
}
