//! The command line that starts a launcher on another host.
//!
//! The program is OpenSSH's own client, because it knows a site's keys, proxies and names; within a job of Slurm it is srun.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::connection::HEARTBEAT_INTERVAL;
use super::environment;
use super::quote::quote;

/// Starts the launcher of this version: at the same path as here, or from `PATH`. Any shell on the host will do; it
/// only needs to understand single quotes.
const START: &str = r#"[ -x "$1" ] && exec "$1" node; exec phalanx node"#;

/// The longest time-out that ssh takes, in seconds.
const MAX_SSH_TIMEOUT: u64 = i32::MAX as u64;

/// ssh's options for a connection that carries messages, whatever its configuration says for people: no questions, because its standard input is
/// the launcher's; no terminal, which would change bytes; and no forwarded ports, which another connection to the host may have.
const SSH: [&str; 3] = ["BatchMode=yes", "RequestTTY=no", "ClearAllForwardings=yes"];

/// srun's options for the step of one launcher, which has all that the job has on its node. Without `--unbuffered` the output would come
/// by lines, and it has none.
const SRUN: [&str; 10] = [
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--overlap",
    "--mem=0",
    "--cpu-bind=none",
    "--mpi=none",
    "--unbuffered",
    "--export=ALL",
    "--job-name=phalanx",
];

/// The program that runs a command on another host: OpenSSH's, or another with the same arguments, or Slurm's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteShell {
    program: Vec<OsString>,
    port: Option<u16>,
    identity: Option<PathBuf>,
    is_srun: bool,
}

impl Default for RemoteShell {
    fn default() -> Self {
        Self { program: vec!["ssh".into()], port: None, identity: None, is_srun: false }
    }
}

impl RemoteShell {
    /// Slurm's `srun`: the hosts are nodes of the Slurm job in which this process runs, under Slurm's names, and each launcher is a
    /// step of that job, also the one on this machine.
    pub fn srun() -> Self {
        Self { program: vec!["srun".into()], is_srun: true, ..Self::default() }
    }

    pub(super) fn is_srun(&self) -> bool {
        self.is_srun
    }

    /// What to do where the program is missing.
    pub(super) fn remedy_if_missing(&self) -> &'static str {
        match self.is_srun {
            true => {
                "this is within a Slurm job of several nodes, on which srun starts the workers: make Slurm's commands available here, also within a container; \
                 --standalone starts workers on this machine alone"
            }
            false => "install OpenSSH's client, or name another program with PHALANX_RSH",
        }
    }

    /// What to try where the launcher on HOST has not answered.
    pub(super) fn remedy_if_silent(&self) -> &'static str {
        match self.is_srun {
            true => "does `srun --overlap --nodes=1 --ntasks=1 --nodelist=HOST true` end within this job?",
            false => "can `ssh HOST true` be run?",
        }
    }

    /// Another program, with arguments before ours, separated by blanks.
    pub fn program(mut self, words: &OsStr) -> Self {
        let words = words.as_bytes().split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let words: Vec<OsString> = words.map(|word| OsStr::from_bytes(word).to_owned()).collect();
        if !words.is_empty() {
            self.program = words;
        }
        self
    }

    /// The port at which the hosts' ssh servers listen, if it is not what ssh's configuration says.
    pub fn port(mut self, port: u16) -> Self {
        self.port = Some(port);
        self
    }

    /// The file of the private key.
    pub fn identity(mut self, file: impl Into<PathBuf>) -> Self {
        self.identity = Some(file.into());
        self
    }

    pub(super) fn name(&self) -> String {
        self.program.first().map_or_else(String::new, |program| program.to_string_lossy().into_owned())
    }

    /// Starts the launcher on `host`. Secrets and long values are not on this command line. A cut connection is noticed after `silence`.
    pub(super) fn command(
        &self,
        host: &str,
        launcher: &Path,
        timeout: Duration,
        silence: Duration,
    ) -> Command {
        let mut program = self.program.iter();
        let mut command = Command::new(program.next().map_or(OsStr::new("ssh"), OsString::as_os_str));
        command.args(program);
        if self.is_srun {
            // The name is one of Slurm's, and no list: commas and brackets are in no name.
            command.args(SRUN).arg(format!("--nodelist={host}"));
            for name in environment::NOT_FOR_SRUN {
                command.env_remove(name);
            }
            command.args(["/bin/sh", "-c", START, "sh"]).arg(launcher);
            return command;
        }
        let timeout = format!("ConnectTimeout={}", timeout.as_secs().clamp(1, MAX_SSH_TIMEOUT));
        let interval = format!("ServerAliveInterval={}", HEARTBEAT_INTERVAL.as_secs());
        let attempts =
            format!("ServerAliveCountMax={}", silence.as_secs().div_ceil(HEARTBEAT_INTERVAL.as_secs()));
        for option in SSH {
            command.args(["-o", option]);
        }
        for option in [timeout, interval, attempts] {
            command.args(["-o", option.as_str()]);
        }
        // The ssh that it starts for a jump host is given none of these, and would put its question to the terminal, again and
        // again because this is no process group of the foreground.
        if ["SSH_ASKPASS_REQUIRE", "SSH_ASKPASS"].iter().all(|name| std::env::var_os(name).is_none()) {
            command.envs([("SSH_ASKPASS_REQUIRE", "force"), ("SSH_ASKPASS", "false")]);
        }
        if let Some(port) = self.port {
            command.args(["-p", &port.to_string()]);
        }
        if let Some(identity) = &self.identity {
            command.arg("-i").arg(identity);
        }
        let mut line = format!("exec sh -c '{START}' sh ").into_bytes();
        line.extend_from_slice(&quote(launcher.as_os_str().as_bytes()));
        command.arg(host).arg(OsStr::from_bytes(&line));
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_slurm_is_one_launcher_whatever_the_job_asks_for() {
        let command = RemoteShell::srun().command(
            "node07",
            Path::new("/opt/a b/phalanx"),
            Duration::from_secs(9),
            Duration::from_secs(21),
        );
        let words: Vec<&OsStr> = command.get_args().collect();
        assert_eq!(command.get_program(), "srun");
        for option in ["--nodelist=node07", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered"] {
            assert!(words.contains(&OsStr::new(option)), "{option}");
        }
        assert_eq!(words[words.len() - 5..], ["/bin/sh", "-c", START, "sh", "/opt/a b/phalanx"]);
        let removed: Vec<&OsStr> =
            command.get_envs().filter_map(|(name, value)| value.is_none().then_some(name)).collect();
        for name in
            ["SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "SLURM_LABELIO", "PHALANX_BIND", "PHALANX_HOST_ID"]
        {
            assert!(removed.contains(&OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn ssh_gets_a_time_out_that_it_takes() {
        for (seconds, option) in [(0, "1"), (30, "30"), (u64::MAX, "2147483647")] {
            let (timeout, silence) = (Duration::from_secs(seconds), Duration::from_secs(21));
            let command = RemoteShell::default().command("node1", Path::new("phalanx"), timeout, silence);
            let option = format!("ConnectTimeout={option}");
            assert!(command.get_args().any(|word| word == OsStr::new(&option)), "{command:?}");
        }
    }

    #[test]
    fn the_launcher_starts_behind_any_path() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = folder.path().join("it's a $(strange) `place`");
        std::os::unix::fs::symlink("/bin/echo", &launcher).unwrap();
        let command = RemoteShell::default()
            .program(OsStr::new(" rsh  -v "))
            .port(7)
            .identity("a key")
            .command("node1", &launcher, Duration::from_secs(9), Duration::from_secs(21));
        let words: Vec<&OsStr> = command.get_args().collect();
        let (line, options) = words.split_last().unwrap();
        assert_eq!(command.get_program(), "rsh");
        assert_eq!(options.first().unwrap(), &"-v");
        assert_eq!(options[options.len() - 5..], ["-p", "7", "-i", "a key", "node1"]);
        assert!(
            ["ServerAliveInterval=5", "ServerAliveCountMax=5", "RequestTTY=no", "ClearAllForwardings=yes"]
                .iter()
                .all(|alive| options.contains(&OsStr::new(alive)))
        );
        // A PATH with a shell and no launcher.
        std::os::unix::fs::symlink("/bin/sh", folder.path().join("sh")).unwrap();
        let run = || Command::new("/bin/sh").arg("-c").arg(line).env("PATH", folder.path()).output().unwrap();
        assert_eq!(run().stdout, b"node\n");
        std::fs::remove_file(&launcher).unwrap();
        assert_eq!(run().status.code(), Some(127));
    }
}
