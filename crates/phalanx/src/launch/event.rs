//! What happens while a job runs, as it is told to whoever shows or records it.

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
    /// The workers' output is kept below this folder.
    Logging {
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
        /// This node's place among the nodes.
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
    /// A worker wrote a line. A line that is longer than [`Job::MAX_LINE`](super::Job::MAX_LINE) comes in pieces; of a
    /// progress bar, which rewrites its line again and again, at most one state a second comes, and the last.
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
    /// A worker of an elastic job has failed, and the others go on.
    Lost {
        /// Its failure.
        failure: &'a Failure,
        /// How long its place stays empty; for good, if none.
        replaced_in: Option<Duration>,
        /// How often a worker has been replaced, with this time.
        replacements: u32,
        /// How often one may be.
        max_replacements: u32,
    },
    /// Processes that still run are asked to end.
    Ending {
        /// The signal that they get.
        signal: Signal,
    },
    /// They are killed: the grace period is over, or a second Ctrl-C came.
    Killing,
    /// A worker has failed, none is left, and all will be started again.
    Restarting {
        /// The first failure.
        failure: &'a Failure,
    },
    /// Nodes are waited for.
    Gathering {
        /// How many have come.
        nodes: u32,
        /// How many are needed.
        min_nodes: u32,
        /// How many may take part.
        max_nodes: u32,
    },
    /// Nodes come or go, no worker is left, and all will be started again.
    Regrouping {
        /// The node that is gone, if that is why.
        left: Option<&'a NodeFailure>,
    },
    /// The store at which the launchers meet is served here.
    Serving {
        /// Where it listens.
        address: SocketAddr,
    },
    /// Something that ends nothing, but that a person should know.
    Warning {
        /// What it is.
        text: &'a str,
    },
}

/// Is told what happens. Every `FnMut(Event<'_>) -> ControlFlow<()>` is one.
pub trait Observer {
    /// Takes note of `event`. To break means to end the job: its [outcome](super::Outcome) is then `Stopped`.
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()>;

    /// Does it want lines now? While it does not, the workers' output stays in their pipes; everything else goes on,
    /// and what a worker has left there at its end still comes. It is asked again every few milliseconds.
    ///
    /// An observer that would have to wait, for a terminal or a disk, should say no here: signals and failures are not
    /// seen to while it keeps [`observe`](Self::observe) busy.
    fn is_ready(&mut self) -> bool {
        true
    }
}

impl<F: FnMut(Event<'_>) -> ControlFlow<()>> Observer for F {
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
        self(event)
    }
}
