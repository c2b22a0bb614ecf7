//! Ranks that are processes of this program.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx::store::TcpStoreServer;
use rustix::process::{Pid, Signal, kill_process};

/// The longest that a test waits for a worker.
const LIMIT: Duration = Duration::from_secs(120);

/// Ranks that play `role`, and the store at which they meet.
pub fn start(role: &str, ranks: u32, variables: &[(&str, &str)]) -> (TcpStoreServer, Vec<Worker>) {
    start_each(role, ranks, variables, |_| Vec::new())
}

/// As [`start`], with variables of each rank's own.
pub fn start_each(
    role: &str,
    ranks: u32,
    variables: &[(&str, &str)],
    own: impl Fn(u32) -> Vec<(&'static str, String)>,
) -> (TcpStoreServer, Vec<Worker>) {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = server.local_addr().port().to_string();
    let worker = |rank: u32| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(crate::harness::ROLE, role).envs(variables.iter().copied());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True").envs(own(rank));
        Worker::spawn(command)
    };
    let ranks = (0..ranks).map(worker).collect();
    (server, ranks)
}

/// A worker, which ends with this. What it says is read while it runs.
pub struct Worker {
    child: Child,
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

    /// Waits for its end; gives what it has said.
    pub fn end(&mut self, what: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "{what}: a rank hangs");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.errors.take().unwrap().join().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may be stopped, or have ended.
        let _ = kill_process(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}
