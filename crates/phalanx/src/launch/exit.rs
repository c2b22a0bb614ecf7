//! How a worker, and a job, ended.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::rank::Rank;
use crate::world_size::WorldSize;

/// The number of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signal(i32);

impl Signal {
    /// The terminal is gone.
    pub const HUP: Self = Self(1);
    /// Ctrl-C.
    pub const INT: Self = Self(2);
    /// Ctrl-\.
    pub const QUIT: Self = Self(3);
    /// A process has aborted itself.
    pub const ABRT: Self = Self(6);
    /// Ends a process that cannot catch it.
    pub const KILL: Self = Self(9);
    /// A write to a pipe without a reader.
    pub const PIPE: Self = Self(13);
    /// Asks a process to end.
    pub const TERM: Self = Self(15);

    /// The signal with this number.
    pub const fn new(number: i32) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// What it usually means, for signals that a program gets because of an error.
    pub fn meaning(self) -> Option<&'static str> {
        Some(match self.name()? {
            "SIGILL" => "illegal instruction",
            "SIGABRT" => "aborted",
            "SIGBUS" => "bus error; is /dev/shm or a mapped file's disk full?",
            "SIGFPE" => "arithmetic error",
            "SIGKILL" => "by a person, a scheduler or the kernel when memory runs out",
            "SIGSEGV" => "invalid memory access",
            "SIGXCPU" => "processor time limit",
            _ => return None,
        })
    }

    fn name(self) -> Option<&'static str> {
        use rustix::process::Signal as Known;
        const NAMES: [(Known, &str); 24] = [
            (Known::HUP, "SIGHUP"),
            (Known::INT, "SIGINT"),
            (Known::QUIT, "SIGQUIT"),
            (Known::ILL, "SIGILL"),
            (Known::TRAP, "SIGTRAP"),
            (Known::ABORT, "SIGABRT"),
            (Known::BUS, "SIGBUS"),
            (Known::FPE, "SIGFPE"),
            (Known::KILL, "SIGKILL"),
            (Known::USR1, "SIGUSR1"),
            (Known::SEGV, "SIGSEGV"),
            (Known::USR2, "SIGUSR2"),
            (Known::PIPE, "SIGPIPE"),
            (Known::ALARM, "SIGALRM"),
            (Known::TERM, "SIGTERM"),
            (Known::STOP, "SIGSTOP"),
            (Known::TSTP, "SIGTSTP"),
            (Known::XCPU, "SIGXCPU"),
            (Known::XFSZ, "SIGXFSZ"),
            (Known::VTALARM, "SIGVTALRM"),
            (Known::PROF, "SIGPROF"),
            (Known::SYS, "SIGSYS"),
            (Known::TTIN, "SIGTTIN"),
            (Known::TTOU, "SIGTTOU"),
        ];
        NAMES.iter().find(|(known, _)| known.as_raw() == self.0).map(|(_, name)| *name)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Exit {
    /// It ended itself with this code.
    Code(i32),
    /// This signal ended it.
    Signal(Signal),
    /// It is gone, but another part of the program has taken its exit status, or it could not be killed.
    Lost,
    /// It was killed, because this signal had stopped it for five seconds after another worker had ended well: it would
    /// have held up the end of the job.
    Frozen(Signal),
    /// It ended itself with code 0, but had left a group whose ranks had made different calls, when no call was left that could return
    /// the error.
    Disagreed,
}

impl Exit {
    /// Whether it was exit code 0, of a worker whose calls were those of the other ranks.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// Whether a program that panics ends like this, by unwinding or abort, also behind a shell. A panic that was caught
    /// does not end a program.
    pub(super) fn may_be_a_panics(self) -> bool {
        const ABORTED: i32 = 128 + Signal::ABRT.number();
        matches!(self, Self::Code(101 | ABORTED) | Self::Signal(Signal::ABRT))
    }

    /// The exit code with which a shell would report it: 128 + n for signal n.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            // The value may come from another host.
            Self::Signal(signal) => signal.number().saturating_add(128),
            Self::Lost | Self::Disagreed => 1,
            Self::Frozen(_) => 128 + Signal::KILL.number(),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => {
                write!(f, "killed by {signal}")?;
                signal.meaning().map_or(Ok(()), |meaning| write!(f, " ({meaning})"))
            }
            Self::Lost => f.write_str("gone without an exit status"),
            Self::Disagreed => f.write_str("exit code 0, but its calls were not those of the other ranks"),
            Self::Frozen(signal) => write!(
                f,
                "stopped ({signal}) for 5 s when another worker had ended well, and killed; \
                 `kill -CONT` would have let it go on"
            ),
        }
    }
}

/// The worker that failed first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// Its rank.
    pub rank: Rank,
    /// The name of its host.
    pub host: String,
    /// Its host's rank among the nodes.
    pub node: u32,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub exit: Exit,
    /// How long it had lived.
    pub after: Duration,
    /// What it wrote to its error file (`TORCHELASTIC_ERROR_FILE`), if anything.
    pub message: Option<String>,
    /// The last lines of its standard error, if that was [captured](super::Output::Lines).
    pub stderr: Vec<Vec<u8>>,
}

impl Failure {
    /// The failure of a worker of which only the rank is known.
    pub(super) fn unknown(rank: u32) -> Self {
        Self {
            rank: Rank::new(rank),
            host: "another host".to_owned(),
            node: 0,
            pid: 0,
            exit: Exit::Lost,
            after: Duration::ZERO,
            message: None,
            stderr: Vec::new(),
        }
    }
}

/// A node that was lost, or whose launcher could not go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeFailure {
    /// Its rank among the nodes, if it had one.
    pub node: Option<u32>,
    /// The name of its host.
    pub host: String,
    /// What happened to it.
    pub why: String,
}

impl fmt::Display for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "node {node} ({}): {}", self.host, self.why),
            None => write!(f, "the node {}: {}", self.host, self.why),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}) failed: {}", self.rank, self.pid, self.exit)?;
        self.message.as_ref().map_or(Ok(()), |message| write!(f, ": {message}"))
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// Every worker ended with exit code 0.
    Succeeded,
    /// A worker failed, here or on another node, and the others were ended.
    Failed(Failure),
    /// A node was lost, and the workers were ended.
    NodeFailed(NodeFailure),
    /// This process got a signal, and the workers were ended.
    Interrupted(Signal),
    /// The [observer](super::Observer) asked for the end.
    Stopped,
}

/// The report of a job, when no process of it is left.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// How the job ended.
    pub outcome: Outcome,
    /// How each worker of this node ended in the last attempt, in the order of their ranks.
    pub exits: Vec<Exit>,
    /// The number of workers on all nodes, if they were started.
    pub world_size: Option<WorldSize>,
    /// The number of nodes that took part.
    pub nodes: u32,
    /// How often a failure has started the workers again.
    pub restarts: u32,
    /// How often a worker of an elastic job was replaced.
    pub replacements: u32,
    /// How long the job took.
    pub elapsed: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_read_well_and_have_a_shells_codes() {
        assert_eq!(Exit::Code(3).to_string(), "exit code 3");
        assert_eq!(Exit::Signal(Signal::TERM).to_string(), "killed by SIGTERM");
        assert_eq!(Exit::Signal(Signal::new(11)).to_string(), "killed by SIGSEGV (invalid memory access)");
        assert_eq!(Exit::Signal(Signal::new(40)).to_string(), "killed by signal 40");
        assert_eq!(Exit::Signal(Signal::KILL).code(), 137);
        assert!(!Exit::Lost.is_success());
        let panics = [Exit::Code(101), Exit::Code(134), Exit::Signal(Signal::ABRT)];
        assert!(panics.into_iter().all(Exit::may_be_a_panics));
        assert!(!Exit::Code(1).may_be_a_panics() && !Exit::Signal(Signal::KILL).may_be_a_panics());
        let frozen = Exit::Frozen(Signal::new(19));
        assert!(frozen.to_string().starts_with("stopped (SIGSTOP) for 5 s"), "{frozen}");
        assert_eq!((frozen.is_success(), frozen.code()), (false, 137));
    }
}
