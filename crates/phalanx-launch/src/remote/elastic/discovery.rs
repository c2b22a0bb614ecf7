//! Runs a program repeatedly that prints the available hosts.

use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::HostDiscovery;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::poll::poll_readable;
use crate::reap::{KILL_TIMEOUT, reap};
use crate::remote::hosts::HostList;

/// How often it is asked.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long an answer may be, in bytes.
const MAX_ANSWER: usize = 256 * 1024;
/// How much of what it says on standard error is kept, in bytes.
const MAX_LAST_WORDS: usize = 1024;
/// How often that is read at a time: more than a pipe holds, in pieces of 4 KiB.
const LAST_WORDS_READS: usize = 32;
/// How often to check whether the script has ended where the kernel cannot tell, before 5.3.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Of a script that does not end.
const STUCK: &str = "it was killed and has not ended: does the disk answer on which it works?";

/// The thread that runs the script. When this is dropped, the thread and the script end.
pub(super) struct Discovery {
    answers: Receiver<Result<HostList>>,
    /// A byte in it ends the thread.
    end: PipeWriter,
    thread: Option<JoinHandle<()>>,
}

impl Discovery {
    /// `wake` gets a byte with each answer.
    pub(super) fn start(from: &HostDiscovery, wake: Arc<PipeWriter>) -> Result<Self> {
        // If the answers are not taken, the next run of the script waits.
        let (sender, answers) = sync_channel(1);
        let (ends, end) =
            io::pipe().map_err(|error| Error::io("cannot make a pipe for the discovery of hosts", error))?;
        let from = from.clone();
        let thread = std::thread::Builder::new()
            .name("phalanx-discovery".into())
            .spawn(move || ask(&from, &sender, &wake, &ends))
            .map_err(|error| Error::not_started("cannot start a thread for the discovery of hosts", error))?;
        Ok(Self { answers, end, thread: Some(thread) })
    }

    /// The next answer, in which there may be no host, or an error.
    pub(super) fn next(&self) -> Option<Result<HostList>> {
        self.answers.try_recv().ok()
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        let _ = self.end.write_all(&[0]);
        // The thread may be waiting to hand over an answer.
        let _ = self.answers.try_recv();
        let deadline = Deadline::after(2 * KILL_TIMEOUT);
        // One that looks for the script on a disk that does not answer ends with this process.
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            let _ = thread.join();
        }
    }
}

fn ask(from: &HostDiscovery, answers: &SyncSender<Result<HostList>>, wake: &PipeWriter, ends: &PipeReader) {
    let mut stuck = None;
    while !has_byte(ends) {
        let next = Instant::now() + INTERVAL;
        let answer = without_panic(|| {
            let text = answer(&from.script, ends, &mut stuck)?;
            HostList::discovered(&text, from.slots).map_err(|error| error.to_string())
        });
        let answer = answer.map_err(|why| {
            Error::environment(format!("--host-discovery-script {}: {why}", from.script.display()))
                .with_remedy("it must print a line host:slots for each host, and end with exit code 0")
        });
        if has_byte(ends) || answers.send(answer).is_err() {
            return;
        }
        let _ = (&*wake).write_all(&[0]);
        while Instant::now() < next && !has_byte(ends) {
            let left = next.saturating_duration_since(Instant::now());
            // A wait that fails is followed by the next one.
            if poll_readable([ends.as_fd()].into_iter(), Some(left)).is_err() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

/// A panic is an answer that cannot be used: without a thread that asks, the job would wait for hosts for ever.
fn without_panic(ask: impl FnOnce() -> Result<HostList, String>) -> Result<HostList, String> {
    catch_unwind(AssertUnwindSafe(ask))
        .unwrap_or_else(|_| Err("reading what it printed panicked: see standard error".to_owned()))
}

/// The command that runs the script: by a shell, as Horovod does, so that it may have arguments and needs no first line that names
/// its interpreter.
fn command(script: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    // A file's name is no command line: it may contain blanks. Without a slash the shell would look for it in PATH.
    match script.is_file() {
        true => command.args(["-c", "exec \"$0\""]).arg(Path::new(".").join(script)),
        false => command.arg("-c").arg(script),
    };
    command
}

/// The output of the script, or why it is not known. `stuck` is an earlier one that was killed and has not ended: another would be stuck as
/// well, and each second one more.
fn answer(script: &Path, ends: &PipeReader, stuck: &mut Option<Child>) -> Result<String, String> {
    if let Some(mut earlier) = stuck.take()
        && matches!(earlier.try_wait(), Ok(None))
    {
        *stuck = Some(earlier);
        return Err(STUCK.to_owned());
    }
    let mut command = command(script);
    // Ctrl-C must reach only this command. The processes that the script starts end with it.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("it cannot be started: {error}"))?;
    let mut said =
        LastWords { stderr: child.stderr.take().map(|stderr| OwnedFd::from(stderr).into()), end: Vec::new() };
    let read = child.stdout.take().map_or(Ok(Vec::new()), |stdout| {
        let mut stdout = File::from(OwnedFd::from(stdout));
        read(&mut stdout, &mut said, &mut child, ends)
    });
    // Before it is reaped, its number is valid.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let ended = reap(&mut child, Deadline::after(KILL_TIMEOUT)).map_err(|error| error.to_string())?;
    let Some(status) = ended else {
        *stuck = Some(child);
        return Err(STUCK.to_owned());
    };
    // All that it has started has ended, or left its group.
    said.take();
    let said = said.last_line().map(|line| format!(", and said: {line}")).unwrap_or_default();
    let bytes = read.map_err(|why| format!("{why}{said}"))?;
    if !status.success() {
        return Err(format!("it ended with {status}{said}"));
    }
    String::from_utf8(bytes).map_err(|_| "what it prints is not UTF-8".to_owned())
}

/// The end of what the script says on standard error. What has left its group may keep that open, so nobody waits for its end.
struct LastWords {
    stderr: Option<File>,
    end: Vec<u8>,
}

impl LastWords {
    /// Takes what is there.
    fn take(&mut self) {
        let Some(stderr) = &mut self.stderr else { return };
        let mut buffer = [0; 4096];
        for _ in 0..LAST_WORDS_READS {
            if !is_readable(&*stderr).unwrap_or(false) {
                return;
            }
            match stderr.read(&mut buffer) {
                Ok(count @ 1..) => self.end.extend_from_slice(&buffer[..count]),
                // It is closed.
                Ok(0) | Err(_) => {
                    self.stderr = None;
                    return;
                }
            }
            self.end.drain(..self.end.len().saturating_sub(MAX_LAST_WORDS));
        }
    }

    fn last_line(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.end);
        text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
    }
}

/// Until the script has ended, or closed its output.
fn read(
    stdout: &mut File,
    said: &mut LastWords,
    child: &mut Child,
    ends: &PipeReader,
) -> Result<Vec<u8>, String> {
    let deadline = Instant::now() + TIMEOUT;
    let (mut bytes, mut is_open) = (Vec::new(), true);
    let end_notice = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok();
    loop {
        // Checked before reading its output: if it has ended, all its output is there.
        let is_over = has_ended(child).map_err(|error| error.to_string())?;
        // Else it would wait for room when it says much.
        said.take();
        if is_open && is_readable(&*stdout)? {
            let mut buffer = [0; 4096];
            match stdout.read(&mut buffer) {
                Ok(0) => is_open = false,
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
            if bytes.len() > MAX_ANSWER {
                return Err(format!("it prints more than {MAX_ANSWER} bytes"));
            }
        } else if is_over {
            return Ok(bytes);
        }
        if has_byte(ends) {
            return Err("the job ends".to_owned());
        }
        let mut left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!("it has not ended within {} s", TIMEOUT.as_secs()));
        }
        // What it has left is read at once, and whatever it says next wakes this thread.
        if is_over {
            continue;
        }
        if end_notice.is_none() {
            left = left.min(POLL_INTERVAL);
        }
        let end_notice = end_notice.iter().map(AsFd::as_fd);
        let errors = said.stderr.iter().map(AsFd::as_fd);
        let output = is_open.then_some(stdout.as_fd()).into_iter().chain(errors);
        poll_readable(end_notice.chain([ends.as_fd()]).chain(output), Some(left))
            .map_err(|error| error.to_string())?;
    }
}

/// Whether there is output, or its end.
fn is_readable(pipe: impl AsFd) -> Result<bool, String> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ready = retry_on_intr(|| poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&now)));
    ready.map(|count| count > 0).map_err(|error| error.to_string())
}

/// Whether the job ends.
fn has_byte(ends: &PipeReader) -> bool {
    is_readable(ends).unwrap_or(false)
}

/// Whether it has ended. It stays a zombie, which keeps its number.
fn has_ended(child: &Child) -> io::Result<bool> {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(Pid::from_child(child)), options)?.is_some())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn asked(script: &str) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        answer_of(&path)
    }

    fn answer_of(script: &Path) -> Result<String, String> {
        let (ends, _end) = io::pipe().unwrap();
        // Another test's child may hold the file open for writing for a moment.
        loop {
            match answer(script, &ends, &mut None) {
                Err(why) if why.contains("Text file busy") => std::thread::sleep(POLL_INTERVAL),
                answer => return answer,
            }
        }
    }

    #[test]
    fn what_it_prints_comes_back_and_what_is_wrong_is_said() {
        assert_eq!(asked("echo a:2; echo b").unwrap(), "a:2\nb\n");
        assert!(asked("echo a; exit 3").unwrap_err().contains("exit status: 3"));
        assert!(
            asked("while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done")
                .unwrap_err()
                .contains("more than")
        );
        assert!(asked("printf '\\377'").unwrap_err().contains("UTF-8"));
        let missing = answer_of(Path::new("/does/not/exist")).unwrap_err();
        assert!(missing.contains("exit status: 127") && missing.contains("not found"), "{missing}");
        let said = asked("echo first >&2; echo 'no such cloud' >&2; exit 3").unwrap_err();
        assert!(said.ends_with("exit status: 3, and said: no such cloud"), "{said}");
        // Output beside its answer changes nothing, however long it is.
        assert_eq!(asked("head -c 300000 /dev/zero >&2; echo a").unwrap(), "a\n");
        // Nor does an output that it closes early.
        assert_eq!(asked("exec 2>&-; sleep 0.1; echo a").unwrap(), "a\n");
        assert_eq!(asked("echo a; exec >&-; sleep 0.1; exit 0").unwrap(), "a\n");
    }

    #[test]
    fn none_is_started_beside_one_that_was_killed_and_has_not_ended() {
        let (ends, _end) = io::pipe().unwrap();
        let mut stuck = Some(Command::new("sleep").arg("600").spawn().unwrap());
        assert_eq!(answer(Path::new("echo a"), &ends, &mut stuck), Err(STUCK.to_owned()));
        let earlier = stuck.as_mut().unwrap();
        earlier.kill().unwrap();
        earlier.wait().unwrap();
        assert_eq!(answer(Path::new("echo a"), &ends, &mut stuck).unwrap(), "a\n");
        assert!(stuck.is_none());
    }

    #[test]
    fn a_panic_is_an_answer_that_cannot_be_used() {
        let why = without_panic(|| panic!("as a fault of this program would")).err();
        assert!(why.is_some_and(|why| why.contains("panicked")));
    }

    #[test]
    fn it_may_have_arguments_and_needs_no_first_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all hosts");
        std::fs::write(&path, "for host in \"$@\"; do echo $host:2; done; echo last\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(answer_of(&path).unwrap(), "last\n");
        let with_arguments = format!("'{}' a b", path.display());
        assert_eq!(answer_of(Path::new(&with_arguments)).unwrap(), "a:2\nb:2\nlast\n");
    }

    #[test]
    fn a_file_of_this_folder_is_not_looked_for_elsewhere() {
        let last = |script: &str| command(Path::new(script)).get_args().last().unwrap().to_owned();
        assert_eq!([last("Cargo.toml"), last("src/lib.rs")], ["./Cargo.toml", "./src/lib.rs"]);
        assert_eq!([last("/bin/sh"), last("hosts --all")], ["/bin/sh", "hosts --all"]);
    }

    #[test]
    fn what_it_has_started_holds_nobody_up() {
        let started = Instant::now();
        assert_eq!(asked("sleep 60 & echo a").unwrap(), "a\n");
        assert!(started.elapsed() < TIMEOUT);
    }

    #[test]
    fn what_has_left_its_group_keeps_nothing_of_this_process_open() {
        let folder = tempfile::tempdir().unwrap();
        let [up, gone] = ["up", "gone"].map(|name| folder.path().join(name));
        // It says something as long as somebody may read it. An answer is asked for each second: as many threads and pipes would stay.
        let daemon = format!(
            "setsid sh -c \"trap '' PIPE; touch {0}; until ! echo a >&2; do sleep 0.01; done; touch {1}\" >/dev/null & \
             until [ -e {0} ]; do sleep 0.01; done; echo a",
            up.display(),
            gone.display()
        );
        assert_eq!(asked(&daemon).unwrap(), "a\n");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !gone.exists() {
            assert!(Instant::now() < deadline, "its standard error is still read");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn who_asks_no_more_leaves_nothing_behind() {
        for endless in ["sleep 60", "while :; do echo a; sleep 0.002; done"] {
            ends_with_who_asks(endless);
        }
    }

    fn ends_with_who_asks(endless: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        let pid = folder.path().join("pid");
        std::fs::write(
            &path,
            format!("#!/bin/sh\necho $$ > {0}.new; mv {0}.new {0}; {endless}\n", pid.display()),
        )
        .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (_notice, wake) = io::pipe().unwrap();
        let discovery = Discovery::start(&HostDiscovery::new(&path), Arc::new(wake)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !pid.exists() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(POLL_INTERVAL);
        }
        let started = Instant::now();
        drop(discovery);
        assert!(started.elapsed() < TIMEOUT);
        let pid = std::fs::read_to_string(&pid).unwrap();
        assert!(!Path::new(&format!("/proc/{}", pid.trim())).exists());
    }
}
