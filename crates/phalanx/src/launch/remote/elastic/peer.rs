//! A launcher of an elastic job, as the command sees it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::error::Error;
use crate::launch::agent::Instruction;
use crate::launch::remote::connection::Connection;
use crate::launch::remote::hosts::Host;
use crate::launch::remote::protocol::{Ending, Route, ToLauncher};
use crate::rank::Rank;

/// One start of a launcher on one host.
#[derive(Debug)]
pub(super) struct Peer {
    /// The number of this connection.
    pub(super) id: usize,
    /// Its host's number in the host manager.
    pub(super) index: usize,
    pub(super) host: Host,
    pub(super) is_here: bool,
    pub(super) connection: Connection,
    /// When it has to have answered.
    pub(super) answer_by: Instant,
    /// It has answered, and how ssh has reached it.
    pub(super) hello: Option<Option<Route>>,
    pub(super) first: u32,
    pub(super) slots: u32,
    pub(super) was_told_to_start: bool,
    /// It was told to end.
    pub(super) leaves: bool,
    pub(super) end: Option<End>,
    /// Its workers' processes, by their numbers.
    pub(super) processes: BTreeMap<Rank, u32>,
    pub(super) stderr: VecDeque<String>,
}

/// What a launcher has said last.
#[derive(Debug)]
pub(super) enum End {
    Reported(Ending),
    Failed(Error),
}

impl Peer {
    /// The place on its host of the worker with this number.
    pub(super) fn place(&self, number: Rank) -> Option<u32> {
        number.get().checked_sub(self.first).filter(|place| *place < self.slots)
    }

    pub(super) fn say(&self, instruction: Instruction) {
        self.connection.order(ToLauncher::Elastic(instruction));
    }
}
