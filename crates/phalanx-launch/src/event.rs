//! The events of a running job, for an observer that shows or records them.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use super::exit::{Exit, Failure, NodeFailure, Signal};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// A worker's output stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Something that happened.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The workers' output is kept in this folder.
    Logging {
        /// The host with the folder, in a job on several hosts ([`RemoteJob`](super::RemoteJob)); None for this host's.
        host: Option<&'a str>,
        /// The job's own folder.
        folder: &'a Path,
    },
    /// The workers are about to be started, for the first time or again.
    Starting {
        /// How often they have been started before.
        restarts: u32,
        /// How often a failure may start them again.
        max_restarts: u32,
        /// The number of workers on all nodes.
        world_size: WorldSize,
        /// This node's rank among the nodes.
        node: u32,
        /// The number of nodes.
        nodes: u32,
    },
    /// A worker was started.
    Started {
        /// Its rank.
        rank: Rank,
        /// Its number among the workers of its node.
        local_rank: u32,
        /// Its process.
        pid: u32,
    },
    /// A worker wrote a line. A line longer than [`Job::MAX_LINE`](super::Job::MAX_LINE) comes in pieces. A progress
    /// bar, which rewrites its line, comes at most once a second, and with its last state.
    Line {
        /// Its rank.
        rank: Rank,
        /// Where it wrote.
        stream: Stream,
        /// The bytes, without the line's end. They need not be UTF-8.
        text: &'a [u8],
    },
    /// A worker ended.
    Exited {
        /// Its rank.
        rank: Rank,
        /// Its process.
        pid: u32,
        /// How it ended.
        exit: Exit,
    },
    /// A worker of an elastic job has failed, and the others continue.
    Lost {
        /// Its failure.
        failure: &'a Failure,
        /// How long its slot stays empty before a replacement; none if it is not replaced.
        replaced_in: Option<Duration>,
        /// How often workers have been replaced, with this time.
        replacements: u32,
        /// How often workers may be replaced; [`ElasticHosts::NO_LIMIT`](super::ElasticHosts::NO_LIMIT) is no limit.
        max_replacements: u32,
    },
    /// Processes that still run are asked to end.
    Ending {
        /// The signal that they get.
        signal: Signal,
    },
    /// They get SIGKILL: the grace period is over, or a second Ctrl-C came.
    Killing,
    /// A worker has failed, no worker is left, and all will be started again.
    Restarting {
        /// The first failure.
        failure: &'a Failure,
    },
    /// The launcher waits for nodes.
    Gathering {
        /// How many have joined.
        nodes: u32,
        /// How many are needed.
        min_nodes: u32,
        /// How many may take part.
        max_nodes: u32,
    },
    /// Nodes have come or gone, no worker is left, and all will be started again.
    Regrouping {
        /// The node that is gone, if that is the reason.
        left: Option<&'a NodeFailure>,
    },
    /// The job is over, and a signal has come. This launcher goes on until the launchers of other nodes have learned from
    /// it how the job has ended; another signal ends it at once.
    Lingering,
    /// This process serves the launchers' store.
    Serving {
        /// Where it listens.
        address: SocketAddr,
    },
    /// A warning: something that does not end the job.
    Warning {
        /// What it is.
        text: &'a str,
    },
}

/// Receives the events of a job. Every `FnMut(Event<'_>) -> ControlFlow<()>` is an observer.
pub trait Observer {
    /// Handles `event`. Returning `Break` ends the job: its [outcome](super::Outcome) is then `Stopped`.
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()>;

    /// Whether it accepts lines now. While it does not, the workers' output stays in their pipes. Everything else continues,
    /// and the last output of a worker still comes. It is asked again every few milliseconds.
    ///
    /// An observer that would have to wait, for a terminal or a disk, should return false here: while
    /// [`observe`](Self::observe) blocks, signals and failures are not handled.
    fn is_ready(&mut self) -> bool {
        true
    }
}

impl<F: FnMut(Event<'_>) -> ControlFlow<()>> Observer for F {
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
        self(event)
    }
}
