//! How a process ended.

use std::fmt;

use serde::{Deserialize, Serialize};

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
        // Compiled there beside phalanx-sys, whose sentence, that Phalanx runs on Linux, is to be the only error.
        #[cfg(not(unix))]
        const NAMES: [(i32, &str); 0] = [];
        #[cfg(unix)]
        const NAMES: [(i32, &str); 24] = [
            (libc::SIGHUP, "SIGHUP"),
            (libc::SIGINT, "SIGINT"),
            (libc::SIGQUIT, "SIGQUIT"),
            (libc::SIGILL, "SIGILL"),
            (libc::SIGTRAP, "SIGTRAP"),
            (libc::SIGABRT, "SIGABRT"),
            (libc::SIGBUS, "SIGBUS"),
            (libc::SIGFPE, "SIGFPE"),
            (libc::SIGKILL, "SIGKILL"),
            (libc::SIGUSR1, "SIGUSR1"),
            (libc::SIGSEGV, "SIGSEGV"),
            (libc::SIGUSR2, "SIGUSR2"),
            (libc::SIGPIPE, "SIGPIPE"),
            (libc::SIGALRM, "SIGALRM"),
            (libc::SIGTERM, "SIGTERM"),
            (libc::SIGSTOP, "SIGSTOP"),
            (libc::SIGTSTP, "SIGTSTP"),
            (libc::SIGXCPU, "SIGXCPU"),
            (libc::SIGXFSZ, "SIGXFSZ"),
            (libc::SIGVTALRM, "SIGVTALRM"),
            (libc::SIGPROF, "SIGPROF"),
            (libc::SIGSYS, "SIGSYS"),
            (libc::SIGTTIN, "SIGTTIN"),
            (libc::SIGTTOU, "SIGTTOU"),
        ];
        NAMES.iter().find(|(known, _)| *known == self.0).map(|(_, name)| *name)
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
    /// It is gone, but another part of the program has taken its exit status, or it could not be killed, or the connection to its host
    /// is lost.
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
    #[doc(hidden)]
    pub fn may_be_a_panics(self) -> bool {
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
