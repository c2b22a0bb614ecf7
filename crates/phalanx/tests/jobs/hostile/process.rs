//! Processes, and what they use of the machine.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that is ended when it is dropped.
pub struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

/// What a process uses.
#[derive(Debug)]
pub struct Use {
    /// The names of its threads.
    pub threads: Vec<String>,
    pub descriptors: usize,
    /// The most memory of its own that it has had at once, in bytes.
    pub peak: u64,
}

impl Process {
    /// This program again, with these variables.
    pub fn start(variables: &[(&str, &OsStr)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.envs(variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// The next line that it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        if line.is_empty() {
            let _ = self.child.kill();
            panic!("a process has ended: {}", self.errors());
        }
        line.trim_end().to_owned()
    }

    fn errors(&mut self) -> String {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        said
    }

    pub fn has_ended_well(&mut self) {
        let deadline = Instant::now() + super::LIMIT;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "a process hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
        let said = crate::support::world::without_reminders(&self.errors());
        assert!(self.child.wait().unwrap().success() && said.is_empty(), "{said}");
    }

    /// What it uses once its threads have begun, each of which has a name and may open something at first.
    pub fn uses_at_rest(&self, deadline: Instant) -> Use {
        loop {
            let before = self.uses();
            std::thread::sleep(Duration::from_millis(50));
            let uses = self.uses();
            let has_begun = uses.threads.iter().skip(1).all(|name| *name != uses.threads[0]);
            if has_begun && (&uses.threads, uses.descriptors) == (&before.threads, before.descriptors) {
                return uses;
            }
            assert!(Instant::now() < deadline, "{uses:?} are not at rest");
        }
    }

    pub fn uses(&self) -> Use {
        let threads = fs::read_dir(self.path("task")).unwrap().flatten();
        // A thread may end between the two looks.
        let threads = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
        let threads = threads.map(|name| name.trim_end().to_owned()).collect();
        let descriptors = fs::read_dir(self.path("fd")).unwrap().count();
        let status = fs::read_to_string(self.path("status")).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let kibibytes: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        Use { threads, descriptors, peak: kibibytes << 10 }
    }

    /// What its descriptors are, for who reads why a test has failed.
    pub fn descriptors(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("fd")).into_iter().flatten().flatten();
        let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
        links.map(|link| link.display().to_string()).collect()
    }

    /// Whether it has a socket that waits for connections.
    pub fn listens(&self) -> bool {
        let sockets = fs::read_dir(self.path("fd")).unwrap().flatten();
        let sockets: HashSet<String> = sockets
            .filter_map(|entry| fs::read_link(entry.path()).ok()?.to_str().map(str::to_owned))
            .collect();
        let connections = fs::read_to_string(self.path("net/tcp")).unwrap();
        connections.lines().skip(1).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields[3] == "0A" && sockets.contains(&format!("socket:[{}]", fields[9]))
        })
    }

    fn path(&self, what: &str) -> String {
        format!("/proc/{}/{what}", self.child.id())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does something when it is dropped.
pub struct OnDrop<F: Fn()>(pub F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
