//! `phalanx run -H` over the real thing: OpenSSH between two network namespaces of this machine. It needs root,
//! openssh-server and iproute2, and is run by `PHALANX_TEST_FULL=1 cargo test -p phalanx-cli --test sshd`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod support;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use support::{bare, exit_code, is_gone, output, text};

const HERE: &str = "10.98.0.1";
const THERE: &str = "10.98.0.2";

/// Two namespaces that a cable joins, and an ssh server in the second.
struct Network {
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
    fn new() -> Self {
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

    /// `phalanx run` in the first namespace, with an ssh that knows one key and one host.
    fn run(&self, hosts: &str, options: &[&str], script: &str) -> Command {
        self.run_as("user", "known", hosts, options, script)
    }

    fn run_as(&self, key: &str, known: &str, hosts: &str, options: &[&str], script: &str) -> Command {
        let settings = format!(
            "IdentityFile {}\nIdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile {}\n\
             GlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n",
            self.path(key),
            self.path(known)
        );
        let config = self.path(&format!("config-{key}-{known}"));
        std::fs::write(&config, settings).unwrap();
        let run = bare();
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &format!("{}a", self.name)])
            .arg(run.get_program())
            .args(run.get_args());
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("PHALANX_RSH", format!("ssh -F {config}"));
        if !options.contains(&"--ssh-port") {
            command.args(["--ssh-port", "2222"]);
        }
        command.args(["-H", hosts]).args(options).args(["--", "sh", "-c", script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        for side in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{side}", self.name)]).output();
        }
    }
}

fn assert_refused(output: &Output, expected: &str) {
    let err = text(&output.stderr);
    assert!(output.status.code() == Some(1) && err.contains(expected), "no {expected:?} in {err}");
}

#[test]
fn hosts_are_reached_over_ssh() {
    if std::env::var_os("PHALANX_TEST_FULL").is_none() {
        println!("skipped: it starts an ssh server in a network namespace, with PHALANX_TEST_FULL=1 alone");
        return;
    }
    assert!(
        Path::new("/usr/sbin/sshd").exists(),
        "openssh-server is not installed, and this test was asked for"
    );
    let network = Network::new();
    let phalanx = env!("CARGO_BIN_EXE_phalanx");
    let bench = format!("{phalanx} bench all_reduce -e 64 -n 8 --json > /dev/null && echo $MASTER_ADDR");

    // Node 0 is found at the address that ssh uses, whichever side it is on.
    for (hosts, meeting) in [("localhost:1,10.98.0.2:2", HERE), ("10.98.0.2:2,localhost:1", THERE)] {
        let output = output(network.run(hosts, &[], &bench));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout).matches(meeting).count(), 3, "{}", text(&output.stdout));
    }

    let never = |command: Command, expected: &str| assert_refused(&output(command), expected);
    never(network.run("10.98.0.9:1", &["--start-timeout", "10"], "true"), "10.98.0.9: it cannot be reached");
    never(
        network.run("10.98.0.2:1", &["--ssh-port", "2223"], "true"),
        "10.98.0.2: no ssh server listens there",
    );
    never(
        network.run_as("stranger", "known", "10.98.0.2:1", &[], "true"),
        "10.98.0.2: it accepts none of the keys",
    );
    never(
        network.run_as("user", "nobody", "10.98.0.2:1", &[], "true"),
        "10.98.0.2: its host key is not known",
    );

    let start = || {
        let script = "echo up $$; exec sleep 60";
        let mut child = network.run("localhost:1,10.98.0.2:1", &[], script).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let pids = [(); 2].map(|()| {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            line.trim().rsplit_once(' ').unwrap().1.to_owned()
        });
        (child, out, pids)
    };
    let gone = |pids: &[String]| {
        let started = Instant::now();
        while !pids.iter().all(|pid| is_gone(pid)) {
            assert!(started.elapsed() < Duration::from_secs(20), "{pids:?} are still there");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    // The command is killed: nothing stays on either host.
    let (mut child, _out, pids) = start();
    child.kill().unwrap();
    child.wait().unwrap();
    gone(&pids);

    // The cable is cut: both sides notice.
    let (mut child, _out, pids) = start();
    let cable = format!("{}a", network.name);
    done("ip", &["-n", &cable, "link", "set", &cable, "down"]);
    gone(&pids);
    let limit = Instant::now() + Duration::from_secs(20);
    while Instant::now() < limit && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(exit_code(&mut child), Some(1));
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(err.contains("10.98.0.2: the connection to its launcher is lost"), "{err}");
}
