//! Starts the command, and waits for it no longer than it may take.
#![allow(dead_code, reason = "not every test needs everything")]

pub mod network;
#[path = "../../../phalanx-core/tests/support/ports.rs"]
pub mod ports;
pub mod stand_in;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::environment;

/// Nothing takes longer, or it hangs; what the tests start sleeps for longer.
pub const LIMIT: Duration = Duration::from_secs(40);

/// A program for a shell whose ranks check a sum, as `phalanx doctor` does; once or for ever.
pub const SUM: &str = concat!(env!("CARGO_BIN_EXE_phalanx"), " doctor --measure 1 > /dev/null");
pub const SUMS: &str = concat!(env!("CARGO_BIN_EXE_phalanx"), " doctor --measure 1000000000 > /dev/null");

/// `phalanx run` with `options`, and `script` as the program.
pub fn phalanx(options: &[&str], script: &str) -> Command {
    let mut command = bare();
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

/// A port at which nobody listens.
pub fn free_port() -> String {
    ports::free_port().to_string()
}

/// The launcher of one of two nodes.
pub fn node(rank: &str, port: &str, options: &[&str], script: &str) -> Command {
    let place = ["--nnodes", "2", "--node-rank", rank, "--master-port", port];
    phalanx(&[&place[..], options].concat(), script)
}

/// Writes a program or a script with this mode, in a process of its own: a file that this one has written may still be open in a
/// process that another test is starting, and then it cannot be executed ("text file busy").
pub fn write_program(path: &Path, content: impl AsRef<[u8]>, mode: u32) {
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat > \"$0\" && chmod $1 \"$0\""]).arg(path).arg(format!("{mode:o}"));
    let mut writer = writer.stdin(Stdio::piped()).spawn().unwrap();
    writer.stdin.take().unwrap().write_all(content.as_ref()).unwrap();
    assert!(writer.wait().unwrap().success(), "{}", path.display());
}

/// `phalanx run` in an environment without variables that would change it, and with the signals as a terminal has them:
/// the tests may themselves run in the background or behind `nohup`, where some are ignored.
pub fn bare() -> Command {
    command("run")
}

/// Another subcommand, in the same way.
pub fn command(subcommand: &str) -> Command {
    let mut command = environment::command("env");
    command.args(["--default-signal=INT,TERM,HUP,QUIT", env!("CARGO_BIN_EXE_phalanx")]);
    // The launcher sets them for its workers where nobody has.
    command.env_remove("OMP_NUM_THREADS").env_remove("RAYON_NUM_THREADS");
    command.arg(subcommand).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `inner`, in its environment, behind the words of `outer`, which runs it.
pub fn within(mut outer: Command, inner: &Command) -> Command {
    outer.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    outer
}

/// Runs it to its end, or kills it when it takes too long. Calls `then` when it says `words` on its standard error.
pub fn output_with(mut command: Command, words: &str, then: impl FnOnce()) -> Output {
    let mut child = command.spawn().unwrap();
    limit(&child);
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let (mut said, mut then) = (Vec::new(), Some(then));
    while err.read_until(b'\n', &mut said).unwrap() > 0 {
        if text(&said).contains(words)
            && let Some(then) = then.take()
        {
            then();
        }
    }
    Output { stderr: said, ..child.wait_with_output().unwrap() }
}

/// Runs it to its end, or kills it when it takes too long.
pub fn output(mut command: Command) -> Output {
    let child = command.spawn().unwrap();
    limit(&child);
    child.wait_with_output().unwrap()
}

/// Kills it when it takes too long, so that nobody waits for ever for its output.
pub fn limit(child: &Child) {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    std::thread::spawn(move || {
        let limit = Timespec::try_from(LIMIT).unwrap();
        if poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)) == Ok(0) {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        }
    });
}

/// Starts a job whose workers print process numbers, and waits for `count` of them.
pub fn start(mut command: Command, count: usize) -> (Child, BufReader<ChildStdout>, Vec<String>) {
    let mut child = command.spawn().unwrap();
    limit(&child);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut pids = Vec::new();
    for _ in 0..count {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        pids.push(line.split_whitespace().last().unwrap().to_owned());
    }
    assert!(pids.iter().all(|pid| !is_gone(pid)), "{pids:?}");
    (child, out, pids)
}

/// The exit code that a shell sees: Ctrl-C ends the launcher by SIGINT itself.
pub fn code(status: ExitStatus) -> Option<i32> {
    let interrupt = Signal::INT.as_raw();
    if status.signal() == Some(interrupt) { Some(128 + interrupt) } else { status.code() }
}

/// Its exit code, or a panic if it takes too long to end.
pub fn exit_code(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return code(status);
        }
        if Instant::now() >= deadline {
            let _ = child.kill();
            panic!("it did not end within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Whether there is no such process, or only its zombie.
pub fn is_gone(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

pub fn wait_until_gone<'a>(pids: impl IntoIterator<Item = &'a String>) {
    let deadline = Instant::now() + LIMIT;
    for pid in pids {
        while !is_gone(pid) {
            assert!(Instant::now() < deadline, "process {pid} was left behind");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn sorted_lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}
