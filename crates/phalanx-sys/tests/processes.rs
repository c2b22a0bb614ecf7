//! Real processes: what is started must be ended.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use phalanx_sys::guard::{Guard, Tag};
use phalanx_sys::signal::Catcher;
use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};
#[cfg(target_os = "linux")]
use rustix::process::{Resource, Rlimit, prlimit};

/// No process has this in its environment: most of these tests are of process groups.
const TAG: &Tag = b"phalanx-sys:no-worker-has-this:0";

/// A tag of the test called `test`, in this process: whoever runs these tests at the same time has others.
#[cfg(target_os = "linux")]
fn tag_of(test: char) -> Tag {
    let tag = format!("phalanx-sys:{:019}{test}", std::process::id());
    tag.into_bytes().try_into().unwrap()
}

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

/// Whether it is gone, or a zombie that nobody has reaped yet.
fn is_dead(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    test_kill_process(pid).is_err() || stat.is_ok_and(|stat| stat.contains(") Z "))
}

#[test]
fn a_worker_leads_a_group_of_the_same_session_without_a_terminal_and_has_default_signals() {
    let guard = Guard::start(1, TAG).unwrap();
    let own = std::fs::read_to_string("/proc/self/stat").unwrap();
    let session = own.rsplit(") ").next().unwrap().split_whitespace().nth(3).unwrap();
    // The group, the session, and the controlling terminal.
    let script = "cut -d ' ' -f 5-7 /proc/$$/stat; grep SigIgn /proc/$$/status; kill -PIPE $$";
    let mut child = guard.spawn(shell(script)).unwrap();
    let mut output = String::new();
    child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    let mut lines = output.lines();
    assert_eq!(lines.next().unwrap().trim(), format!("{} {session} 0", child.id()));
    let ignored = u64::from_str_radix(lines.next().unwrap().split_whitespace().last().unwrap(), 16).unwrap();
    assert_eq!(ignored & (1 << (libc::SIGPIPE - 1) | 1 << (libc::SIGINT - 1)), 0);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGPIPE));
}

#[test]
fn a_worker_dies_with_the_thread_that_started_it() {
    let guard = Guard::start(1, TAG).unwrap();
    let mut child = std::thread::scope(|scope| {
        scope.spawn(|| guard.spawn(shell("echo up; exec sleep 60")).unwrap()).join().unwrap()
    });
    let started = Instant::now();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_missing_program_is_an_error() {
    let guard = Guard::start(1, TAG).unwrap();
    let error = guard.spawn(Command::new("/nonexistent/program")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn a_binary_gets_the_environment_and_the_arguments_of_its_command() {
    let guard = Guard::start(1, TAG).unwrap();
    let mut command = shell("echo $0 $1 $SET ${PATH:+path} ${HOME-none}; exit 3");
    command.args(["zero", "one"]).env("SET", "a=b").env_remove("HOME");
    let mut child = guard.spawn_binary(command, Path::new("/bin/sh"), OsStr::new("name")).unwrap();
    let mut output = String::new();
    child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    assert_eq!((output.as_str(), child.wait().unwrap().code()), ("zero one a=b path none\n", Some(3)));
}

/// A shell would execute the first, and do nothing for the second.
#[test]
fn no_shell_takes_what_the_kernel_does_not() {
    let guard = Guard::start(1, TAG).unwrap();
    for (content, name) in [("exit 0\n", "script"), ("", "empty")] {
        let path = std::env::temp_dir().join(format!("phalanx-sys-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let spawned = || guard.spawn_binary(Command::new(&path), &path, path.as_os_str()).unwrap_err();
        let mut error = spawned();
        // A process that another test has just forked has the file open for writing until it executes its program.
        while error.raw_os_error() == Some(libc::ETXTBSY) {
            error = spawned();
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENOEXEC), "{name}");
    }
}

/// A worker of `guard` and its child, which is in its group.
fn watched(guard: &Guard) -> (Child, Pid) {
    let mut child = guard.spawn(shell("sleep 60 & echo $!; wait")).unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, Pid::from_raw(line.trim().parse().unwrap()).unwrap())
}

#[test]
fn the_guard_kills_whole_groups_of_workers_that_put_themselves_on_its_list() {
    let guard = Guard::start(2, TAG).unwrap();
    let mut workers = [watched(&guard), watched(&guard)];
    // As if this process had died.
    drop(guard);
    for (worker, grandchild) in &mut workers {
        assert_eq!(worker.wait().unwrap().signal(), Some(libc::SIGKILL));
        eventually("the grandchild is gone", || is_dead(*grandchild));
    }
}

#[test]
fn a_group_that_was_forgotten_makes_room_and_is_left_alone() {
    let guard = Guard::start(1, TAG).unwrap();
    let (mut old, grandchild) = watched(&guard);
    guard.forget(old.id());
    let (mut new, _) = watched(&guard);
    drop(guard);
    assert_eq!(new.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(old.try_wait().unwrap().is_none() && !is_dead(grandchild));
    rustix::process::kill_process_group(pid(&old), Signal::KILL).unwrap();
    old.wait().unwrap();
}

/// There is room for one: were the number of the process that failed still on the list, the next would not be watched.
#[test]
fn a_program_that_cannot_be_executed_leaves_nothing_on_the_list() {
    let guard = Guard::start(1, TAG).unwrap();
    guard.spawn(Command::new("/nonexistent/program")).unwrap_err();
    let (mut worker, grandchild) = watched(&guard);
    drop(guard);
    eventually("the worker was killed", || is_dead(pid(&worker)));
    worker.wait().unwrap();
    eventually("the grandchild is gone", || is_dead(grandchild));
}

#[cfg(target_os = "linux")]
#[test]
fn what_carries_the_tag_is_killed_in_any_session_and_what_does_not_is_left_alone() {
    let ours = tag_of('0');
    // Wherever it stands among much else: the guard reads some thousand bytes at a time.
    let start = |before: usize, tag: &[u8]| {
        let mut command = Command::new("setsid");
        command.args(["-w", "sleep", "60"]).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.env("A", "x".repeat(before)).env("B", str::from_utf8(tag).unwrap()).spawn().unwrap()
    };
    let guard = Guard::start(1, &ours).unwrap();
    let mut tagged: Vec<Child> = [0, 4030, 4040, 4050, 4060, 9000].map(|before| start(before, &ours)).into();
    let mut other = start(0, &ours[..31]);
    let has_executed = |child: &Child| {
        std::fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(|line| line.starts_with(b"sleep"))
    };
    eventually("all have been started", || tagged.iter().chain([&other]).all(has_executed));
    drop(guard);
    assert!(tagged.iter_mut().all(|child| child.wait().unwrap().signal() == Some(libc::SIGKILL)));
    assert!(other.try_wait().unwrap().is_none());
    other.kill().unwrap();
    other.wait().unwrap();
}

/// What it cannot look at, for want of descriptors, is not taken for nobody: it looks again.
#[cfg(target_os = "linux")]
#[test]
fn a_guard_without_descriptors_looks_again_when_it_has_some() {
    let ours = tag_of('1');
    let mut stray = Command::new("setsid")
        .args(["-w", "sleep", "60"])
        .env("TAG", str::from_utf8(&ours).unwrap())
        .spawn()
        .unwrap();
    let mut guard = Guard::start(1, &ours).unwrap();
    let of_guard = Pid::from_raw(guard.pid().cast_signed());
    let descriptors = |current| {
        let limit = Rlimit { current: Some(current), maximum: Some(1024) };
        prlimit(of_guard, Resource::Nofile, limit).unwrap();
    };
    descriptors(0);
    let killed = std::thread::scope(|scope| {
        let killing = scope.spawn(|| guard.kill());
        // Many times as long as two looks that see nobody take.
        std::thread::sleep(Duration::from_millis(300));
        assert!(stray.try_wait().unwrap().is_none() && !killing.is_finished());
        descriptors(16);
        killing.join().unwrap()
    });
    killed.unwrap();
    assert_eq!(stray.wait().unwrap().signal(), Some(libc::SIGKILL));
}

#[cfg(target_os = "linux")]
#[test]
fn a_guard_that_was_killed_says_that_somebody_may_be_left() {
    let mut guard = Guard::start(1, TAG).unwrap();
    let pid = Pid::from_raw(guard.pid().cast_signed()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    assert!(guard.kill().unwrap_err().to_string().contains("may be left"));
}

#[test]
fn a_guard_that_was_stopped_follows_its_last_order() {
    let mut guard = Guard::start(1, TAG).unwrap();
    let pid = Pid::from_raw(guard.pid().cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let (done, end) = mpsc::channel();
    std::thread::spawn(move || done.send(guard.kill().is_ok()));
    let is_certain = end.recv_timeout(Duration::from_secs(60));
    if is_certain.is_err() {
        kill_process(pid, Signal::CONT).unwrap();
    }
    assert_eq!(is_certain, Ok(true));
}

#[test]
fn a_guard_that_was_dismissed_kills_nobody_and_starts_nobody() {
    let mut guard = Guard::start(1, TAG).unwrap();
    let (mut worker, grandchild) = watched(&guard);
    guard.dismiss();
    assert!(guard.spawn(shell("true")).is_err());
    drop(guard);
    assert!(worker.try_wait().unwrap().is_none() && !is_dead(grandchild));
    rustix::process::kill_process_group(pid(&worker), Signal::KILL).unwrap();
    worker.wait().unwrap();
}

#[test]
fn without_its_guard_no_worker_starts() {
    let guard = Guard::start(1, TAG).unwrap();
    let pid = Pid::from_raw(guard.pid().cast_signed()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    eventually("the guard is dead", || is_dead(pid));
    assert_eq!(guard.spawn(shell("true")).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
}

#[test]
fn the_guard_holds_no_file_and_no_terminal() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let guard = Guard::start(1, TAG).unwrap();
    drop(writer);
    // Would wait for ever if the guard held the writing end.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", guard.pid())).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split_whitespace().nth(3).unwrap();
    assert_eq!(session, guard.pid().to_string());
}

/// In a process of its own, which the signal ends.
#[test]
fn a_signal_that_nobody_reads_for_long_ends_the_process_when_it_comes_again() {
    const CHILD: &str = "PHALANX_TEST_UNREAD_SIGNALS";
    if std::env::var_os(CHILD).is_some() {
        let _catcher = Catcher::install(&[libc::SIGINT]).unwrap().unwrap();
        println!("it is caught");
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let test = "a_signal_that_nobody_reads_for_long_ends_the_process_when_it_comes_again";
    let mut program = Command::new("env");
    // These tests may run in the background, where it is ignored.
    program.arg("--default-signal=INT").arg(std::env::current_exe().unwrap());
    program.args(["--exact", test, "--nocapture"]).env(CHILD, "1").stdout(Stdio::piped());
    let mut child = program.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("it is caught")));
    // The second comes soon after the first.
    for pause in [1, 5] {
        kill_process(pid(&child), Signal::INT).unwrap();
        std::thread::sleep(Duration::from_secs(pause));
        assert!(child.try_wait().unwrap().is_none());
    }
    kill_process(pid(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGINT));
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
