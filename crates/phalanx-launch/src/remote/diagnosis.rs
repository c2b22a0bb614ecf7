//! Explains why ssh or srun could not start a launcher, or has lost it: pure.

use crate::error::{Error, Kind};

/// How a connection ended.
pub(super) struct LostConnection<'a> {
    pub(super) host: &'a str,
    /// The program that connects.
    pub(super) shell: &'a str,
    /// Whether that is Slurm's, whose launchers are steps on every node.
    pub(super) is_srun: bool,
    pub(super) is_here: bool,
    /// Whether the launcher had answered.
    pub(super) was_up: bool,
    /// Its exit code; none if a signal has ended it.
    pub(super) code: Option<i32>,
    /// Its standard error.
    pub(super) stderr: &'a str,
    /// The launcher's path on this machine.
    pub(super) launcher: &'a str,
}

/// Messages of ssh, what they mean, and what to do.
const SSH_ERRORS: [(&str, &str, &str); 14] = [
    (
        "could not resolve hostname",
        "there is no host of this name",
        "is it spelt right, in -H and in ~/.ssh/config?",
    ),
    (
        "connect failed: name or service not known",
        "its jump host knows no host of this name",
        "the jump host looks the name up: is it spelt right? HostName in ~/.ssh/config gives an address instead",
    ),
    (
        "connect failed: temporary failure in name resolution",
        "its jump host finds no address for this name",
        "the jump host looks the name up: is it spelt right? HostName in ~/.ssh/config gives an address instead",
    ),
    (
        "administratively prohibited",
        "its jump host connects nobody to other hosts",
        "ProxyJump needs `AllowTcpForwarding yes` in sshd_config there",
    ),
    (
        "connection refused",
        "no ssh server listens there",
        "does sshd run on it, at this port? --ssh-port names another",
    ),
    ("no route to host", "it cannot be reached", "is it up, and in a network that this machine reaches?"),
    ("network is unreachable", "it cannot be reached", "is it in a network that this machine reaches?"),
    ("connection timed out", "it does not answer", "is it up? Does a firewall drop ssh's packets?"),
    ("operation timed out", "it does not answer", "is it up? Does a firewall drop ssh's packets?"),
    (
        "remote host identification has changed",
        "its host key is not the one that is known",
        "if it was set up anew, remove the old key with `ssh-keygen -R HOST`; if not, another machine may be impersonating this host",
    ),
    (
        "host key verification failed",
        "its host key is not known",
        "connect once by hand, `ssh HOST`, or put its key into ~/.ssh/known_hosts",
    ),
    (
        "permission denied",
        "it accepts none of the keys",
        "`ssh -o BatchMode=yes HOST true` must work without a question: ssh-copy-id HOST, or --ssh-identity-file",
    ),
    (
        "too many authentication failures",
        "it accepts none of the first keys that were offered",
        "name the right one with --ssh-identity-file",
    ),
    (
        "is not accessible",
        "the file with the private key cannot be read",
        "is the path behind --ssh-identity-file right?",
    ),
];

/// What ssh says of its connection where another program, for a jump host another ssh, makes it, and that one has failed.
const OF_A_PROXY: &str = "unknown port 65535";
/// What ssh says of a server that closes the connection before it has said what it is. Where another program makes the connection, ssh says it
/// of that program, too.
const CLOSED_EARLY: &str = "_exchange_identification: ";
/// How a line begins that tells what a jump host, which was reached, has met.
const FROM_A_JUMP_HOST: &str = "channel ";

/// Messages of srun, in the same way.
const SRUN_ERRORS: [(&str, &str, &str); 9] = [
    (
        "required node not available",
        "Slurm starts nothing on this node, which is down, drained or reserved",
        "`scontrol show node HOST` says why; submit the job again, with --exclude=HOST if it stays so",
    ),
    (
        "node failure",
        "the node has failed",
        "`scontrol show node HOST` says why; submit the job again, with --exclude=HOST if it stays so",
    ),
    (
        "requested node configuration is not available",
        "the Slurm job does not have this node any more, which is down, or does not have what a step needs of it",
        "`scontrol show node HOST` and `scontrol show job` say why; submit the job again, with --exclude=HOST if the node stays down",
    ),
    (
        "expired or invalid job",
        "the Slurm job has ended",
        "start `phalanx run` within a job that runs, by sbatch or salloc, or unset SLURM_JOB_ID",
    ),
    (
        "already completing or completed",
        "the Slurm job has ended",
        "start `phalanx run` within a job that runs, by sbatch or salloc",
    ),
    (
        "unable to contact",
        "Slurm's controller does not answer",
        "`scontrol ping` must work here; ask who runs the cluster",
    ),
    (
        "communication connection failure",
        "Slurm's daemon on this node does not answer",
        "`scontrol show node HOST` says how it is; submit the job again, with --exclude=HOST if it stays so",
    ),
    (
        "unrecognized option",
        "srun does not know an option",
        "Slurm must be 20.11 or newer; or start one launcher on each node with `srun .. phalanx run --nnodes ..`",
    ),
    (
        "access/permission denied",
        "Slurm permits this user no step in the job",
        "is SLURM_JOB_ID one of this user's jobs?",
    ),
];

impl LostConnection<'_> {
    /// The error for the user.
    pub(super) fn error(&self) -> Error {
        let Self { host, shell, .. } = self;
        let how = match self.code {
            Some(code) => format!("exit code {code}"),
            None => "a signal".to_owned(),
        };
        if self.is_here && !self.is_srun {
            return self
                .error_with_last_line(format!("{host}: the launcher of this machine was ended by {how}"));
        }
        let table = if self.is_srun { &SRUN_ERRORS[..] } else { &SSH_ERRORS[..] };
        let known = table.iter().find_map(|entry| Some((entry, self.line_with(entry.0)?)));
        // With these codes a shell on the host has ended, so ssh has reached it. What else is said there may be like ssh's messages.
        let is_of_shell = matches!(self.code, Some(126 | 127));
        if let Some(((_, meaning, remedy), line)) = known.filter(|_| !self.was_up && !is_of_shell) {
            let is_jump_host = !self.is_srun
                && self.line_with(OF_A_PROXY).is_some()
                && !line.to_lowercase().starts_with(FROM_A_JUMP_HOST);
            return match is_jump_host {
                true => self
                    .error_saying(format!("{host}: its jump host (ProxyJump): {meaning}"), Some(line))
                    .with_remedy(remedy.replace("HOST", "JUMP_HOST")),
                false => self
                    .error_saying(format!("{host}: {meaning}"), Some(line))
                    .with_remedy(remedy.replace("HOST", host)),
            };
        }
        if !self.was_up && !self.is_srun && !is_of_shell && self.is_turned_away() {
            let (who, whose) = match self.line_with(OF_A_PROXY) {
                Some(_) => ("its jump host (ProxyJump) closes", "JUMP_HOST"),
                None => ("it closes", *host),
            };
            let cause = format!("{host}: {who} the connection before ssh begins");
            return self.error_saying(cause, self.line_with(CLOSED_EARLY)).with_remedy(format!(
                "if `ssh {whose} true` works, sshd there turns away some of many connections that begin at the same moment: raise MaxStartups \
                 in its sshd_config"
            ));
        }
        match self.code {
            // The shell's exit codes for a program that does not exist, or cannot be executed.
            Some(code @ (126 | 127)) if !self.was_up => {
                let what = if code == 127 { "there is no phalanx" } else { "phalanx cannot be executed" };
                let launcher = self.launcher;
                self.error_with_last_line(format!("{host}: {what}, neither at {launcher} nor in its PATH")).with_remedy(
                    "install the same version there; a PATH that is set for terminals alone does not count",
                )
            }
            _ if self.was_up => self
                .error_with_last_line(format!(
                    "{host}: the connection to its launcher is lost ({shell} ended with {how})"
                ))
                .with_remedy("is the host up, and its network? Was the launcher killed there?"),
            _ => self
                .error_with_last_line(format!("{host}: {shell} ended with {how} before phalanx answered"))
                .with_remedy(match self.is_srun {
                    true => format!("does `{shell} --overlap --nodes=1 --ntasks=1 --nodelist={host} phalanx --version` work within this job?"),
                    false => format!("does `{shell} {host} phalanx --version` work?"),
                }),
        }
    }

    /// Whether another try may succeed: a server has turned away some of many connections that began at the same moment, and nothing has
    /// begun on the host.
    pub(super) fn may_pass(&self) -> bool {
        let is_of_ssh = !self.was_up && !self.is_srun && !self.is_here && self.code == Some(255);
        is_of_ssh
            && self.is_turned_away()
            && SSH_ERRORS.iter().all(|(said, _, _)| self.line_with(said).is_none())
    }

    /// Whether a server has closed the connection before ssh began.
    fn is_turned_away(&self) -> bool {
        let said = self.lines().filter(|line| line.contains(CLOSED_EARLY)).count();
        said > usize::from(self.line_with(OF_A_PROXY).is_some())
    }

    /// The lines of ssh or srun.
    fn lines(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.stderr.lines().map(str::trim).filter(|line| !line.is_empty())
    }

    /// The first of them with this text, which is in small letters.
    fn line_with(&self, text: &str) -> Option<&str> {
        self.lines().find(|line| line.to_lowercase().contains(text))
    }

    fn last_line(&self) -> Option<&str> {
        self.lines().next_back()
    }

    fn error_with_last_line(&self, cause: String) -> Error {
        self.error_saying(cause, self.last_line())
    }

    fn error_saying(&self, cause: String, line: Option<&str>) -> Error {
        let error = Error::new(Kind::Environment, cause);
        match line {
            Some(line) => error.adding(format!(": {line}")),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken<'a>(code: i32, stderr: &'a str, was_up: bool) -> LostConnection<'a> {
        let (host, shell, launcher) = ("node7", "ssh", "/opt/phalanx");
        LostConnection {
            host,
            shell,
            is_srun: false,
            is_here: false,
            was_up,
            code: Some(code),
            stderr,
            launcher,
        }
    }

    #[test]
    fn each_way_to_fail_has_its_remedy() {
        let cases = [
            (255, "ssh: Could not resolve hostname node7: Name or service not known", "spelt right"),
            (255, "ssh: connect to host node7 port 22: Connection refused", "sshd"),
            (255, "ssh: connect to host node7 port 22: No route to host", "is it up"),
            (255, "ssh: connect to host node7 port 22: Connection timed out", "firewall"),
            (255, "me@node7: Permission denied (publickey).", "ssh-copy-id node7"),
            (255, "Host key verification failed.", "known_hosts"),
            (
                255,
                "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
                "ssh-keygen -R node7",
            ),
            (127, "sh: 1: exec: phalanx: not found", "neither at /opt/phalanx nor in its PATH"),
            (126, "sh: 1: phalanx: Exec format error", "cannot be executed"),
            (126, "sh: 1: exec: phalanx: Permission denied", "cannot be executed"),
            (
                127,
                "bash: /etc/profile.d/site.sh: Permission denied\nsh: 1: exec: phalanx: not found",
                "neither at /opt/phalanx nor in its PATH",
            ),
            (1, "This account is currently not available.", "phalanx --version"),
        ];
        for (code, stderr, remedy) in cases {
            let error = broken(code, stderr, false).error().to_string();
            assert!(error.starts_with("node7: ") && error.contains(remedy), "{error}");
            assert!(stderr.lines().any(|line| error.contains(line)), "{error}");
        }
    }

    #[test]
    fn a_jump_host_is_told_from_the_host_behind_it() {
        // As OpenSSH 9.2 says it.
        let end = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535";
        let cases = [
            (
                "ssh: connect to host 192.0.2.9 port 22: Connection refused",
                "its jump host (ProxyJump): no ssh server",
                "sshd",
            ),
            (
                "me@192.0.2.9: Permission denied (publickey).",
                "its jump host (ProxyJump): it accepts none",
                "ssh-copy-id JUMP_HOST",
            ),
            ("Host key verification failed.", "its jump host (ProxyJump): its host key", "`ssh JUMP_HOST`"),
            (
                "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed",
                "node7: no ssh server",
                "sshd",
            ),
            (
                "channel 0: open failed: connect failed: No route to host\nstdio forwarding failed",
                "node7: it cannot be reached",
                "is it up",
            ),
            (
                "channel 0: open failed: connect failed: Name or service not known\nstdio forwarding failed",
                "node7: its jump host knows no host of this name",
                "HostName",
            ),
            (
                "channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed",
                "node7: its jump host connects nobody",
                "AllowTcpForwarding",
            ),
        ];
        for (said, cause, remedy) in cases {
            let error = broken(255, &format!("{said}\n{end}"), false).error().to_string();
            assert!(
                error.starts_with("node7: ") && error.contains(cause) && error.contains(remedy),
                "{error}"
            );
            assert!(error.contains(said.lines().next().unwrap()) && !error.contains("UNKNOWN"), "{error}");
        }
    }

    #[test]
    fn a_server_that_turns_many_connections_away_is_told_from_a_program_that_is_missing() {
        let closed = "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 192.0.2.9 port 22";
        let end = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535";
        let error = |said: &str| broken(255, said, false).error().to_string();
        let (direct, jump) = (error(closed), error(&format!("{closed}\n{end}")));
        assert!(direct.contains("node7: it closes") && direct.contains("`ssh node7 true` works"), "{direct}");
        assert!(
            jump.contains("jump host (ProxyJump) closes") && jump.contains("ssh JUMP_HOST true"),
            "{jump}"
        );
        assert!([&direct, &jump].iter().all(|error| error.contains("MaxStartups")));
        let missing = error(&format!("/bin/sh: 1: nc: not found\n{end}"));
        assert!(!missing.contains("MaxStartups"), "{missing}");
    }

    #[test]
    fn only_a_server_that_turns_a_connection_away_is_worth_another_try() {
        let closed = "kex_exchange_identification: Connection closed by remote host";
        let behind = format!("{closed}\n{closed}\nConnection closed by UNKNOWN port 65535");
        assert!(broken(255, closed, false).may_pass() && broken(255, &behind, false).may_pass());
        // It may have begun there, or another program has ended.
        assert!(!broken(255, closed, true).may_pass() && !broken(127, closed, false).may_pass());
        let denied = format!("me@192.0.2.9: Permission denied (publickey).\n{behind}");
        let refused = "ssh: connect to host node7 port 22: Connection refused";
        for never in [denied.as_str(), refused, "something else"] {
            assert!(!broken(255, never, false).may_pass(), "{never}");
        }
    }

    #[test]
    fn each_way_of_srun_to_fail_has_its_remedy() {
        // As srun of Slurm 22.05 says it.
        let cases = [
            (
                "srun: error: Unable to create step for job 7: Required node not available (down, drained or reserved)",
                "--exclude=node7",
            ),
            (
                "srun: error: Unable to create step for job 3: Requested node configuration is not available",
                "--exclude=node7",
            ),
            (
                "srun: error: Slurm job 2 has expired\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 2",
                "unset SLURM_JOB_ID",
            ),
            (
                "srun: error: Unable to confirm allocation for job 2: Unable to contact slurm controller (connect failure)",
                "scontrol ping",
            ),
            ("srun: unrecognized option '--overlap'", "20.11"),
            ("srun: error: something else", "--nodelist=node7 phalanx --version"),
        ];
        for (stderr, remedy) in cases {
            let lost =
                LostConnection { is_srun: true, is_here: true, shell: "srun", ..broken(1, stderr, false) };
            let error = lost.error().to_string();
            assert!(error.starts_with("node7: ") && error.contains(remedy), "{error}");
            assert!(error.contains(stderr.lines().last().unwrap()), "{error}");
        }
    }

    #[test]
    fn what_was_up_is_lost_whatever_was_said() {
        // The output of a worker is not ssh's.
        let error = broken(255, "open x: Permission denied", true).error().to_string();
        assert!(
            error.contains("the connection to its launcher is lost (ssh ended with exit code 255)"),
            "{error}"
        );
    }
}
