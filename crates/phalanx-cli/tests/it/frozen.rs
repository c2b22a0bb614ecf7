//! `phalanx run` when a worker is stopped, and others have ended well.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::stand_in::Hosts;
use crate::support::{exit_code, free_port, node, output, phalanx, send, start, text, within};

/// Longer than a worker may be stopped.
const NAMED_LIMIT: Duration = Duration::from_secs(7);
/// All but rank 1 end well.
const FREEZES: &str = "[ $RANK = 1 ] && kill -STOP $$; exit 0";

/// What the launcher says of rank 1, which was frozen.
fn assert_is_named(err: &str) {
    let (_, report) = err.split_once("The first failure").unwrap_or_else(|| panic!("{err}"));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for expected in ["rank    1 of 2", &format!("host    {host}"), "stopped (SIGSTOP)", "kill -CONT"] {
        assert!(report.contains(expected), "{expected} is not in {err}");
    }
}

#[test]
fn a_frozen_worker_does_not_hold_up_the_end() {
    let started = Instant::now();
    let output = output(phalanx(&["--nproc-per-node", "2"], FREEZES));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(137), "{err}");
    assert_is_named(&err);
    assert!(started.elapsed() >= Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn what_a_frozen_worker_has_started_ends_with_it() {
    let script = "[ $RANK = 0 ] && exit 0; sleep 600 & echo pid $!; kill -STOP $$";
    let (mut child, _out, pids) = start(phalanx(&["--nproc-per-node", "2"], script), 1);
    assert_eq!(exit_code(&mut child), Some(137));
    assert!(pids.iter().all(|pid| crate::support::is_gone(pid)), "{pids:?}");
}

#[test]
fn all_start_again_if_restarts_are_left() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $RANK = 1 ] && kill -STOP $$; exit 0";
    let output = output(phalanx(&["--nproc-per-node", "2", "--max-restarts", "1"], script));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("stopped (SIGSTOP)") && err.contains("restart 1 of 1"), "{err}");
}

#[test]
fn an_elastic_job_succeeds_without_it_if_enough_are_left() {
    let options = ["--nproc-per-node", "3", "--min-np", "2", "--max-restarts", "5"];
    let enough = output(phalanx(&options, FREEZES));
    let err = text(&enough.stderr);
    assert_eq!(enough.status.code(), Some(0), "{err}");
    assert!(err.contains("stopped (SIGSTOP)") && err.contains("rank 1 is not replaced"), "{err}");

    let too_few = output(phalanx(&["--nproc-per-node", "2", "--min-np", "2"], FREEZES));
    assert_eq!(too_few.status.code(), Some(137));
    assert_is_named(&text(&too_few.stderr));
}

#[test]
fn who_is_slow_or_stopped_for_a_while_is_waited_for() {
    // Both live longer than they may be stopped. The second is all the time, but for a moment in between.
    let script = "[ $RANK = 1 ] && sleep 8; \
                  [ $RANK = 2 ] && for i in 1 2 3 4; do (sleep 2; kill -CONT $$) & kill -STOP $$; done; exit 0";
    let output = output(phalanx(&["--nproc-per-node", "3"], script));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn while_nobody_has_ended_workers_may_be_stopped_for_long() {
    let script = "(sleep 7; kill -CONT $$) & kill -STOP $$; exit 0";
    let output = output(phalanx(&["--nproc-per-node", "2"], script));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_job_that_ctrl_z_stops_goes_on() {
    // No shell with children: one that is stopped while it starts a child (vfork) waits for that one, and is not seen to be stopped.
    let script = "[ $RANK = 0 ] && exit 0; echo pid $$; exec sleep 12";
    let mut command = phalanx(&["--nproc-per-node", "2"], script);
    // As a shell does. In the group of the tests nobody might be able to continue it, and then the kernel does not stop it.
    command.process_group(0);
    let (mut child, _out, pids) = start(command, 1);
    send(&child, Signal::TSTP);
    let is_stopped = || std::fs::read_to_string(format!("/proc/{}/stat", pids[0])).unwrap().contains(") T ");
    let limit = Instant::now() + crate::support::LIMIT;
    while !is_stopped() {
        assert!(Instant::now() < limit, "the worker was not stopped");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(NAMED_LIMIT);
    assert!(is_stopped());
    send(&child, Signal::CONT);
    assert_eq!(exit_code(&mut child), Some(0));
}

/// As under `ssh -t HOST phalanx run ..`, or as a container's only program.
#[test]
fn ctrl_z_stops_no_job_that_no_shell_could_continue() {
    let alone = phalanx(&[], "echo pid $$; exec sleep 2");
    let (mut child, _out, _) = start(within(Command::new("setsid"), &alone), 1);
    send(&child, Signal::TSTP);
    assert_eq!(exit_code(&mut child), Some(0));
}

#[test]
fn on_another_node_it_is_ended_too() {
    let port = free_port();
    let nodes = ["0", "1"].map(|rank| {
        let child = node(rank, &port, &[], FREEZES).spawn().unwrap();
        crate::support::limit(&child);
        child
    });
    for child in nodes {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(137), "{}", text(&output.stderr));
        assert_is_named(&text(&output.stderr));
    }
}

#[test]
fn on_another_host_of_an_elastic_job_it_is_ended_too() {
    // The late one starts when the other has ended.
    for hosts in ["one:1,two:1", "one:1,late:1"] {
        let output = output(Hosts::new().script(hosts, &["--min-np", "1"], FREEZES));
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{hosts}: {err}");
        assert!(err.contains("stopped (SIGSTOP)") && err.contains("rank 1 is not replaced"), "{err}");
    }
}
