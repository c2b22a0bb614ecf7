//! Real processes: what is started must be ended.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use phalanx_sys::guard::Guard;
use phalanx_sys::signal::Catcher;
use phalanx_sys::worker::prepare;
use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};

/// Only one catcher lives at a time, and tests run in parallel.
static SIGNALS: Mutex<()> = Mutex::new(());

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed()).unwrap()
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 10 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Is it gone, or a zombie that nobody has reaped yet?
fn is_dead(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    test_kill_process(pid).is_err() || stat.is_ok_and(|stat| stat.contains(") Z "))
}

#[test]
fn a_worker_leads_a_group_and_has_default_signals() {
    let mut child =
        prepare(&mut shell("ps -o pgid= -p $$; grep SigIgn /proc/$$/status; kill -PIPE $$")).spawn().unwrap();
    let mut output = String::new();
    child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    let mut lines = output.lines();
    assert_eq!(lines.next().unwrap().trim(), child.id().to_string());
    let ignored = u64::from_str_radix(lines.next().unwrap().split_whitespace().last().unwrap(), 16).unwrap();
    assert_eq!(ignored & (1 << (libc::SIGPIPE - 1) | 1 << (libc::SIGINT - 1)), 0);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGPIPE));
}

#[test]
fn a_worker_dies_with_the_thread_that_started_it() {
    let mut child =
        std::thread::spawn(|| prepare(&mut shell("echo up; exec sleep 60")).spawn().unwrap()).join().unwrap();
    let started = Instant::now();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_missing_program_is_an_error() {
    let error = prepare(&mut Command::new("/nonexistent/program")).spawn().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn the_guard_kills_whole_groups_that_were_not_released() {
    let mut guard = Guard::start(2).unwrap();
    let mut grandchildren = Vec::new();
    let mut workers: Vec<Child> = (0..2)
        .map(|_| {
            let mut child = prepare(&mut shell("sleep 60 & echo $!; wait")).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            grandchildren.push(Pid::from_raw(line.trim().parse().unwrap()).unwrap());
            guard.watch(pid(&child)).unwrap();
            child
        })
        .collect();
    guard.release(pid(&workers[1])).unwrap();

    // As if this process had died: the kernel closes the pipe.
    drop(guard);
    assert_eq!(workers[0].wait().unwrap().signal(), Some(libc::SIGKILL));
    eventually("the grandchild is gone", || is_dead(grandchildren[0]));
    assert!(workers[1].try_wait().unwrap().is_none() && !is_dead(grandchildren[1]));
    rustix::process::kill_process_group(pid(&workers[1]), Signal::KILL).unwrap();
    workers[1].wait().unwrap();
}

#[test]
fn the_guard_holds_no_file_and_no_terminal() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let guard = Guard::start(1).unwrap();
    drop(writer);
    // Would wait for ever if the guard held the writing end.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", guard.pid())).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split_whitespace().nth(3).unwrap();
    assert_eq!(session, guard.pid().to_string());
}

#[test]
fn a_caught_signal_is_read_and_the_disposition_comes_back() {
    let _one_at_a_time = SIGNALS.lock().unwrap();
    let ignored_before = std::fs::read_to_string("/proc/self/status").unwrap();
    let mut catcher = Catcher::install(&[libc::SIGUSR1, libc::SIGHUP]).unwrap().unwrap();
    assert!(Catcher::install(&[libc::SIGUSR2]).unwrap().is_none());
    assert_eq!(catcher.read(), None);
    kill_process(getpid(), Signal::USR1).unwrap();
    let mut seen = None;
    eventually("the signal is read", || {
        seen = catcher.read();
        seen.is_some()
    });
    assert_eq!(seen, Some(libc::SIGUSR1));
    drop(catcher);
    let masks = |status: &str| {
        status.lines().filter(|line| line.starts_with("SigCgt")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(masks(&ignored_before), masks(&std::fs::read_to_string("/proc/self/status").unwrap()));
}
