//! Two network namespaces of this machine, and an ssh server in one of them. It needs root, openssh-server and iproute2.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{LIMIT, bare, text, within};

pub const HERE: &str = "10.98.0.1";
pub const THERE: &str = "10.98.0.2";

/// Two namespaces that a cable joins, and an ssh server in the second.
pub struct Network {
    name: String,
    folder: TempDir,
    server: Option<Child>,
}

fn done(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program} is missing: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

impl Network {
    pub fn new() -> Self {
        let name = format!("phs{}", std::process::id());
        let (a, b) = (format!("{name}a"), format!("{name}b"));
        let mut network = Self { name, folder: tempfile::tempdir().unwrap(), server: None };
        for line in [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add {a} netns {a} type veth peer name {b} netns {b}"),
            format!("-n {a} addr add {HERE}/24 dev {a}"),
            format!("-n {b} addr add {THERE}/24 dev {b}"),
            format!("-n {a} link set {a} up"),
            format!("-n {b} link set {b} up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ] {
            done("ip", &words(&line));
        }
        network.serve(&b);
        network
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn serve(&mut self, namespace: &str) {
        for key in ["host", "user", "stranger"] {
            done("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", &self.path(key)]);
        }
        let read = |name: &str| std::fs::read_to_string(self.path(name)).unwrap();
        std::fs::write(self.path("known"), format!("[{THERE}]:2222 {}", read("host.pub"))).unwrap();
        std::fs::write(self.path("nobody"), "").unwrap();
        let settings = format!(
            "Port 2222\nListenAddress {THERE}\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
             PidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n",
            self.path("host"),
            self.path("user.pub")
        );
        std::fs::write(self.path("sshd_config"), settings).unwrap();
        // Where the server wants to lock itself in; a system that has started one has it.
        std::fs::create_dir_all("/run/sshd").unwrap();
        let mut server = Command::new("ip")
            .args(["netns", "exec", namespace, "/usr/sbin/sshd", "-D", "-e", "-f", &self.path("sshd_config")])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let mut err = BufReader::new(server.stderr.take().unwrap());
        while !said.contains("listening") {
            assert_ne!(err.read_line(&mut said).unwrap(), 0, "the ssh server has ended: {said}");
        }
        std::thread::spawn(move || std::io::copy(&mut err, &mut std::io::sink()));
        self.server = Some(server);
    }

    /// Pulls the cable (`down`), or plugs it in again (`up`).
    pub fn set_cable(&self, state: &str) {
        let cable = format!("{}a", self.name);
        done("ip", &["-n", &cable, "link", "set", &cable, state]);
    }

    /// `phalanx run` in the first namespace, with an ssh that knows one key and one host.
    pub fn run(&self, hosts: &str, options: &[&str], script: &str) -> Command {
        self.run_as("user", "known", hosts, options, script)
    }

    pub fn run_as(&self, key: &str, known: &str, hosts: &str, options: &[&str], script: &str) -> Command {
        let settings = format!(
            "IdentityFile {}\nIdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile {}\n\
             GlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n",
            self.path(key),
            self.path(known)
        );
        let config = self.path(&format!("config-{key}-{known}"));
        std::fs::write(&config, settings).unwrap();
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &format!("{}a", self.name)]);
        let mut command = within(inside, &bare());
        command.env("PHALANX_RSH", format!("ssh -F {config}"));
        if !options.contains(&"--ssh-port") {
            command.args(["--ssh-port", "2222"]);
        }
        command.args(["-H", hosts]).args(options).args(["--", "sh", "-c", script]);
        command
    }
}

/// Ends what still runs in a namespace: the ssh server has a process for each connection, which does not learn that its cable has
/// been cut.
fn end_all_in(namespace: &str) {
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        let Ok(output) = Command::new("ip").args(["netns", "pids", namespace]).output() else { return };
        let processes = text(&output.stdout);
        if processes.is_empty() {
            return;
        }
        for process in processes.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
            let _ = kill_process(process, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    eprintln!("processes in {namespace} cannot be ended");
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        for side in ["a", "b"] {
            let namespace = format!("{}{side}", self.name);
            end_all_in(&namespace);
            let _ = Command::new("ip").args(["netns", "del", &namespace]).output();
        }
    }
}
