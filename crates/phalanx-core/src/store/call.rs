//! One call on a store: its caps and its errors.

use std::fmt::Display;
use std::io;
use std::time::Instant;

use super::table::Refusal;
use super::{MAX_KEY, MAX_VALUE};
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::interrupt;
use crate::network::Network;
use crate::wire::store::{MAX_COUNT, MAX_REQUEST};

/// How many keys an error names.
const NAMED: usize = 4;

/// What is asked of which store, with its start and its deadline.
pub(super) struct Call<'a> {
    store: &'a str,
    operation: &'static str,
    pub keys: &'a [&'a str],
    pub started: Instant,
    pub deadline: Deadline,
}

impl<'a> Call<'a> {
    /// Checks the keys' lengths.
    pub fn new(
        store: &'a str,
        operation: &'static str,
        keys: &'a [&'a str],
        deadline: Deadline,
    ) -> Result<Self> {
        let call = Self { store, operation, keys, started: Instant::now(), deadline };
        match keys.iter().find(|key| key.len() > MAX_KEY) {
            None => Ok(call),
            Some(key) => {
                let cause = format!("a key of {} bytes; the longest is {MAX_KEY}", key.len());
                Err(call.error(Kind::InvalidArgument, cause).with_remedy("use shorter keys"))
            }
        }
    }

    /// Checks a value's length.
    pub fn value(&self, value: &[u8]) -> Result<()> {
        if value.len() <= MAX_VALUE {
            return Ok(());
        }
        Err(self.refused(&Refusal::LongValue(value.len())))
    }

    /// The deadline has passed.
    pub fn timed_out(&self) -> Error {
        let waited = self.started.elapsed().as_secs_f64();
        let (cause, remedy) = match self.operation {
            "get" | "wait" | "multi_get" => (
                format!("not set after {waited:.1} s at {}", self.store),
                "has the rank that sets it started, and does it still run? If it is only slow, raise the time-out",
            ),
            _ => return self.unanswered(Network::Unknown),
        };
        self.error(Kind::Timeout, cause).with_remedy(remedy)
    }

    /// The deadline has passed without an answer, behind this network.
    pub fn unanswered(&self, network: Network) -> Error {
        let waited = self.started.elapsed().as_secs_f64();
        self.error(Kind::Timeout, format!("no answer after {waited:.1} s from {}{network}", self.store)).with_remedy(
            "does the store's host (rank 0, or the launcher) still run? If it is only slow, raise the time-out",
        )
    }

    /// Another process has held the file's lock until the deadline.
    pub fn locked_out(&self) -> Error {
        let waited = self.started.elapsed().as_secs_f64();
        self.error(
            Kind::Timeout,
            format!("another process has held the lock of {} for {waited:.1} s", self.store),
        )
        .with_remedy("is a rank stopped in the middle of a change? On NFS the lock needs its lock service")
    }

    /// The store refuses the call.
    pub fn refused(&self, refusal: &Refusal) -> Error {
        let error = self.error(Kind::InvalidArgument, format!("{refusal}, at {}", self.store));
        error.with_remedy(match refusal {
            Refusal::NotANumber(_) => "use another key for the counter",
            Refusal::Overflow(..) => "begin to count anew, with another key",
            Refusal::LongValue(_) => "divide the value among several keys",
            Refusal::ManyKeys(_) | Refusal::ManyBytes(_) => {
                "remove keys that nobody needs any more (`delete_key`)"
            }
        })
    }

    /// One request has more keys or bytes than a store accepts.
    pub fn too_much(&self, count: usize, bytes: usize) -> Error {
        let cause = format!("{count} keys and {bytes} bytes; a request takes {MAX_COUNT} and {MAX_REQUEST}");
        self.error(Kind::InvalidArgument, cause).with_remedy("make several calls of it")
    }

    /// The store broke the protocol, or its file is damaged.
    pub fn broken(&self, why: impl Display) -> Error {
        self.error(Kind::Protocol, format!("{why}, at {}", self.store))
            .with_remedy("is it a store of the same build, to which no other program and no other job of this name writes?")
    }

    /// The system returned an error, or this thread's check has ended the wait.
    pub fn failed(&self, error: io::Error) -> Error {
        if let Some(cause) = interrupt::cause(&error) {
            return cause;
        }
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.timed_out(),
            io::ErrorKind::InvalidData => self.broken(error),
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::BrokenPipe => {
                self.error(Kind::Io, format!("{} has closed the connection, or is gone", self.store)).with_remedy(
                    "does the store's host (rank 0, or the launcher) still run? A store also closes the connection \
                     of a client whose request it refuses, for instance because it is full; its log says why",
                )
            }
            kind => {
                let error = self.named(Error::io(format!("at {}", self.store), error));
                error.with_remedy_if_none(match kind {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room on its disk",
                    io::ErrorKind::FileTooLarge => "begin a store in another file; does `ulimit -f` limit this one?",
                    io::ErrorKind::NotFound => "start the ranks again, with a file that no other job uses",
                    _ => "can this host reach the store, and is its disk sound?",
                })
            }
        }
    }

    fn error(&self, kind: Kind, cause: String) -> Error {
        self.named(Error::new(kind, cause))
    }

    fn named(&self, error: Error) -> Error {
        let mut keys: Vec<String> =
            self.keys.iter().take(NAMED).map(|key| format!("{}", Short(key))).collect();
        if self.keys.len() > NAMED {
            keys.push(format!("and {} more", self.keys.len() - NAMED));
        }
        error.in_operation(format!("store {}({})", self.operation, keys.join(", ")), None)
    }
}

/// A key as an error shows it.
struct Short<'a>(&'a str);

impl Display for Short<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 80;
        match self.0.char_indices().nth(SHOWN) {
            None => write!(f, "{:?}", self.0),
            Some((end, _)) => write!(f, "{:?}…", &self.0[..end]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_a_call_says_what_to_do() {
        let call = Call::new("the store file://x", "set", &["a"], Deadline::now()).unwrap();
        let refusals = [
            Refusal::NotANumber("x".to_owned()),
            Refusal::Overflow(1, i64::MAX),
            Refusal::LongValue(1 << 40),
            Refusal::ManyKeys(7),
            Refusal::ManyBytes(7),
        ];
        let kinds = [
            io::ErrorKind::TimedOut,
            io::ErrorKind::InvalidData,
            io::ErrorKind::ConnectionReset,
            io::ErrorKind::StorageFull,
            io::ErrorKind::FileTooLarge,
            io::ErrorKind::NotFound,
            io::ErrorKind::Other,
        ];
        let failures = kinds.map(|kind| call.failed(kind.into()));
        let long = "k".repeat(MAX_KEY + 1);
        let long = Call::new("the store file://x", "set", &[long.as_str()], Deadline::now()).err();
        let others = [call.timed_out(), call.locked_out(), call.too_much(1 << 20, 1)];
        for error in
            refusals.iter().map(|refusal| call.refused(refusal)).chain(failures).chain(others).chain(long)
        {
            assert!(error.remedy().is_some() && error.to_string().contains("store set("), "{error}");
        }
    }
}
