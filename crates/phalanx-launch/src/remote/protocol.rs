//! The messages between the command that the user has started and the launchers on the hosts.
//!
//! ```text
//! command -> launcher, on its standard input      launcher -> command, on its standard output
//!                                                 Hello
//! Environment
//! Start                                           Serving (node 0 of several)
//! Signal, Elastic, Taken, Alive ..                   Event ..
//!                                                 Ended, or Failed
//! ```
//!
//! All messages to a launcher come over its standard input. So no argument depends on a remote shell's quoting, no
//! secret is on a command line, and when the input closes the launcher ends its part of the job.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::agent::{AgentConfig, Instruction};
use crate::error::{Error, Kind};
use crate::event::{Event, Observer, Stream};
use crate::exit::{Exit, Failure, NodeFailure, Outcome, Report, Signal};
use crate::key::JobKey;
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// How much room a line takes beside its text.
const LINE_ROOM: usize = 64;

/// A message from the command to a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToLauncher {
    /// The working directory and the environment. The launcher changes to them, and executes itself again.
    Environment { folder: Vec<u8>, variables: Vec<(Vec<u8>, Vec<u8>)> },
    /// The user's command line, and this launcher's part of the job.
    Start { arguments: Vec<Vec<u8>>, config: LauncherConfig },
    /// The command has got this signal.
    Signal(i32),
    /// A heartbeat.
    Alive,
    /// An instruction of the driver of an elastic job.
    Elastic(Instruction),
    /// So much of the [window](super::window) is free again.
    Taken(usize),
}

/// The configuration of one launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LauncherConfig {
    pub(super) workers: u32,
    pub(super) node: u32,
    pub(super) nodes: u32,
    /// Where the launchers' store is; for port 0 node 0 takes a free one.
    pub(super) host: String,
    pub(super) port: u16,
    /// How long the launchers may take to find each other.
    pub(super) join_timeout: Duration,
    pub(super) key: SentKey,
    /// In an elastic job, in which the driver takes the place of the launchers' rendezvous.
    pub(super) agent: Option<AgentConfig>,
}

/// A job's key in a message.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SentKey([u8; 32]);

impl SentKey {
    pub(super) fn new(key: &JobKey) -> Self {
        Self(*key.bytes())
    }

    pub(super) fn key(&self) -> JobKey {
        JobKey::from_bytes(self.0)
    }
}

/// Without the key.
impl fmt::Debug for SentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SentKey(..)")
    }
}

/// A message from a launcher to the command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromLauncher {
    Hello {
        version: String,
        route: Option<Route>,
    },
    /// The launchers' store listens at this port.
    Serving {
        port: u16,
    },
    Event(RemoteEvent),
    Ended(RemoteReport),
    Failed(LauncherError),
}

#[cfg(any(test, fuzzing, feature = "fuzzing"))]
impl FromLauncher {
    /// For `phalanx::fuzzing`: what the command does with a message, without printing.
    pub(super) fn fuzz(self) {
        struct Discard;
        impl Observer for Discard {
            fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
                match event {
                    Event::Exited { exit, .. } => drop((exit.code(), exit.to_string())),
                    Event::Restarting { failure } | Event::Lost { failure, .. } => drop(failure.to_string()),
                    Event::Regrouping { left } => drop(left.map(NodeFailure::to_string)),
                    Event::Ending { signal } => drop(signal.to_string()),
                    _ => {}
                }
                ControlFlow::Continue(())
            }
        }
        match self {
            Self::Event(event) => drop(event.tell(&mut Discard)),
            Self::Ended(ending) => ending.exits.iter().for_each(|exit| drop((exit.code(), exit.to_string()))),
            Self::Failed(error) => assert!(error.at("host").to_string().contains("host")),
            Self::Hello { .. } | Self::Serving { .. } => {}
        }
    }
}

/// The two addresses of ssh's connection, as the host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Route {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
}

impl Route {
    /// Of ssh's variable `SSH_CONNECTION`: address and port of the client, address and port of the server.
    pub(super) fn parse(variable: &str) -> Option<Self> {
        let mut words = variable.split_whitespace();
        let (from, _, to) = (words.next()?, words.next()?, words.next()?);
        Some(Self { from: from.parse().ok()?, to: to.parse().ok()? })
    }
}

/// An [`Event`] for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RemoteEvent {
    Line { rank: Rank, is_stderr: bool, text: Vec<u8> },
    Logging { host: Option<String>, folder: Vec<u8> },
    Starting { restarts: u32, max_restarts: u32, world_size: u32, node: u32, nodes: u32 },
    Started { rank: Rank, local_rank: u32, pid: u32 },
    Exited { rank: Rank, pid: u32, exit: Exit },
    Ending { signal: Signal },
    Killing,
    Lost { failure: Failure, replaced_in: Option<Duration>, replacements: u32, max_replacements: u32 },
    Restarting { failure: Failure },
    Gathering { nodes: u32, min_nodes: u32, max_nodes: u32 },
    Regrouping { left: Option<NodeFailure> },
    Warning { text: String },
    Lingering,
}

impl RemoteEvent {
    /// The store's address has its own message.
    pub(super) fn of(event: &Event<'_>) -> Option<Self> {
        Some(match *event {
            Event::Line { rank, stream, text } => {
                Self::Line { rank, is_stderr: stream == Stream::Stderr, text: text.to_vec() }
            }
            Event::Logging { folder, .. } => {
                Self::Logging { host: None, folder: folder.as_os_str().as_bytes().to_vec() }
            }
            Event::Starting { restarts, max_restarts, world_size, node, nodes } => {
                Self::Starting { restarts, max_restarts, world_size: world_size.get(), node, nodes }
            }
            Event::Started { rank, local_rank, pid } => Self::Started { rank, local_rank, pid },
            Event::Exited { rank, pid, exit } => Self::Exited { rank, pid, exit },
            Event::Ending { signal } => Self::Ending { signal },
            Event::Killing => Self::Killing,
            Event::Lost { failure, replaced_in, replacements, max_replacements } => {
                Self::Lost { failure: failure.clone(), replaced_in, replacements, max_replacements }
            }
            Event::Restarting { failure } => Self::Restarting { failure: failure.clone() },
            Event::Gathering { nodes, min_nodes, max_nodes } => {
                Self::Gathering { nodes, min_nodes, max_nodes }
            }
            Event::Regrouping { left } => Self::Regrouping { left: left.cloned() },
            Event::Warning { text } => Self::Warning { text: text.to_owned() },
            Event::Lingering => Self::Lingering,
            Event::Serving { .. } => return None,
        })
    }

    /// How much of the [window](super::window) it takes: lines are held back, and nothing else.
    pub(super) fn room(&self) -> usize {
        match self {
            Self::Line { text, .. } => text.len() + LINE_ROOM,
            _ => 0,
        }
    }

    /// With the name of the host where it happened, by which a launcher does not know itself.
    pub(super) fn at(self, host: &str) -> Self {
        match self {
            Self::Warning { text } => Self::Warning { text: format!("{host}: {text}") },
            Self::Logging { folder, .. } => Self::Logging { host: Some(host.to_owned()), folder },
            event => event,
        }
    }

    /// Tells `observer`.
    pub(super) fn tell(&self, observer: &mut dyn Observer) -> ControlFlow<()> {
        observer.observe(match self {
            Self::Line { rank, is_stderr, text } => {
                let stream = if *is_stderr { Stream::Stderr } else { Stream::Stdout };
                Event::Line { rank: *rank, stream, text }
            }
            Self::Logging { host, folder } => {
                Event::Logging { host: host.as_deref(), folder: Path::new(OsStr::from_bytes(folder)) }
            }
            &Self::Starting { restarts, max_restarts, world_size, node, nodes } => {
                let Ok(world_size) = WorldSize::new(world_size) else { return ControlFlow::Continue(()) };
                Event::Starting { restarts, max_restarts, world_size, node, nodes }
            }
            &Self::Started { rank, local_rank, pid } => Event::Started { rank, local_rank, pid },
            &Self::Exited { rank, pid, exit } => Event::Exited { rank, pid, exit },
            &Self::Ending { signal } => Event::Ending { signal },
            Self::Killing => Event::Killing,
            &Self::Lost { ref failure, replaced_in, replacements, max_replacements } => {
                Event::Lost { failure, replaced_in, replacements, max_replacements }
            }
            Self::Restarting { failure } => Event::Restarting { failure },
            &Self::Gathering { nodes, min_nodes, max_nodes } => {
                Event::Gathering { nodes, min_nodes, max_nodes }
            }
            Self::Regrouping { left } => Event::Regrouping { left: left.as_ref() },
            Self::Warning { text } => Event::Warning { text },
            Self::Lingering => Event::Lingering,
        })
    }
}

/// A [`Report`] for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RemoteReport {
    pub(super) outcome: Outcome,
    pub(super) exits: Vec<Exit>,
    pub(super) world_size: Option<u32>,
    pub(super) nodes: u32,
    pub(super) restarts: u32,
    pub(super) replacements: u32,
}

impl RemoteReport {
    pub(super) fn of(report: &Report) -> Self {
        Self {
            outcome: report.outcome.clone(),
            exits: report.exits.clone(),
            world_size: report.world_size.map(WorldSize::get),
            nodes: report.nodes,
            restarts: report.restarts,
            replacements: report.replacements,
        }
    }
}

/// An [`Error`] for another process: what the user and the exit code need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LauncherError {
    cause: String,
    remedy: Option<String>,
    /// A worker that could not be started.
    rank: Option<Rank>,
    /// The system's error.
    errno: Option<i32>,
}

impl LauncherError {
    pub(super) fn of(error: &Error) -> Self {
        let errno = error.errno();
        let cause = if errno.is_some() { error.cause().to_owned() } else { error.full_cause() };
        Self {
            cause: error.operation().map_or_else(String::new, |operation| format!("{operation}: ")) + &cause,
            remedy: error.remedy().map(str::to_owned),
            rank: error.peer(),
            errno,
        }
    }

    /// Makes an error of it, with the host where it happened.
    pub(super) fn at(self, host: &str) -> Error {
        let error = Error::new(Kind::Environment, format!("{host}: {}", self.cause));
        let error = self.remedy.into_iter().fold(error, Error::with_remedy);
        let error = self.rank.into_iter().fold(error, Error::with_peer);
        self.errno.map(io::Error::from_raw_os_error).into_iter().fold(error, Error::with_source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_what_an_exit_code_needs() {
        let missing = io::Error::from_raw_os_error(2);
        let error =
            Error::io("cannot start ./x as rank 3", missing).with_peer(Rank::new(3)).with_remedy("why?");
        let again = LauncherError::of(&error).at("node1");
        assert_eq!(again.to_string(), format!("node1: {error}"));
        assert_eq!((again.peer(), again.io_kind()), (error.peer(), error.io_kind()));
    }

    #[test]
    fn what_happens_on_a_host_names_it() {
        let text = "the workers' logs cannot be written".to_owned();
        let warning = RemoteEvent::Warning { text }.at("node7");
        assert_eq!(
            warning,
            RemoteEvent::Warning { text: "node7: the workers' logs cannot be written".into() }
        );
        // A program that reads events opens the folder.
        let logging = Event::Logging { host: None, folder: Path::new("/logs/a") };
        let logging = RemoteEvent::of(&logging).unwrap().at("node7");
        assert_eq!(logging, RemoteEvent::Logging { host: Some("node7".into()), folder: "/logs/a".into() });
        assert_eq!(RemoteEvent::Killing.at("node7"), RemoteEvent::Killing);
    }

    #[test]
    fn ssh_says_where_it_comes_from() {
        let route = Route::parse("10.0.0.1 55012 10.0.0.2 22").unwrap();
        assert_eq!((route.from.to_string(), route.to.to_string()), ("10.0.0.1".into(), "10.0.0.2".into()));
        assert!(Route::parse("fe80::1%eth0 1 ::1 22").is_none());
        assert!(Route::parse("10.0.0.1 55012").is_none() && Route::parse("").is_none());
    }
}
