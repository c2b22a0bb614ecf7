//! Ranks that are processes of this program.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "not every test needs everything")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx::store::TcpStoreServer;

use crate::harness::ROLE;

/// The longest that a test waits for a worker.
pub const LIMIT: Duration = Duration::from_secs(150);

/// Ranks that play `role`, and the store at which they meet.
pub fn start(role: &str, ranks: u32, variables: &[(&str, &str)]) -> (TcpStoreServer, Vec<Worker>) {
    start_each(role, ranks, |_, command| {
        command.envs(variables.iter().copied());
    })
}

/// As [`start`], where `prepare` says what each rank has of its own.
pub fn start_each(
    role: &str,
    ranks: u32,
    prepare: impl Fn(u32, &mut Command),
) -> (TcpStoreServer, Vec<Worker>) {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = server.local_addr().port().to_string();
    let worker = |rank: u32| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ROLE, role).env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        prepare(rank, &mut command);
        Worker::spawn(command)
    };
    let ranks = (0..ranks).map(worker).collect();
    (server, ranks)
}

/// A worker, which ends with this. What it says is read while it runs.
pub struct Worker {
    pub child: Child,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

impl Worker {
    /// Starts `command`.
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
            // Until nobody listens.
            lines.try_for_each(|line| sender.send(line))
        });
        let errors = std::thread::spawn(move || std::io::read_to_string(stderr).unwrap());
        Self { child, lines, errors: Some(errors) }
    }

    pub fn await_line(&mut self, line: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(found) if found == line => return,
                Ok(_) => {}
                Err(error) => panic!("a process has ended, or hangs, before it says `{line}`: {error}"),
            }
        }
    }

    /// Waits for its end; gives whether it has succeeded, and what it has said.
    pub fn outcome(&mut self, what: &str) -> (bool, String) {
        let text = self.end(what);
        (self.child.wait().unwrap().success(), text)
    }

    /// Waits for its end; gives all, but for the lines that were awaited.
    pub fn output(&mut self) -> Output {
        let stderr = self.end("a job").into_bytes();
        let stdout = self.lines.iter().map(|line| line + "\n").collect::<String>().into_bytes();
        Output { status: self.child.wait().unwrap(), stdout, stderr }
    }

    /// Waits for its end; gives what it has said on its standard error.
    pub fn end(&mut self, what: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        while self.child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                self.child.kill().unwrap();
                panic!("{what}: a rank hangs: {}", self.said());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.said()
    }

    fn said(&mut self) -> String {
        self.errors.take().unwrap().join().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may be stopped, or have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
