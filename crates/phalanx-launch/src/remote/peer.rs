//! One launcher, on the command's side.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::KEPT_LINES;
use super::connection::Connection;
use super::hosts::Host;
use super::protocol::{RemoteReport, Route, ToLauncher};
use super::window::ENOUGH_TAKEN;
use crate::agent::Instruction;
use crate::error::Error;
use crate::exit::Signal;
use crate::rank::Rank;

/// How often a host is tried again that [turns a connection away](super::diagnosis::LostConnection::may_pass).
const RETRIES: u32 = 5;
/// The first pause before that. Each is twice as long as the one before, up to the longest.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const LONGEST_RETRY_DELAY: Duration = Duration::from_secs(5);
/// How long a launcher may take to end if it was not told to start workers.
const UNUSED_GRACE: Duration = Duration::from_secs(2);

/// One start of a launcher on one host.
#[derive(Debug)]
pub(super) struct Peer {
    /// The number of this connection.
    pub(super) id: usize,
    /// Its host's number.
    pub(super) index: usize,
    pub(super) host: Host,
    pub(super) is_here: bool,
    pub(super) connection: Connection,
    /// When it must have answered.
    pub(super) answer_by: Instant,
    /// How often it was tried again, and when it will be once more.
    pub(super) retries: u32,
    pub(super) again_at: Option<Instant>,
    /// It has answered, and from which address.
    pub(super) hello: Option<Option<Route>>,
    /// The number of its first worker, and how many it has.
    pub(super) first: u32,
    pub(super) slots: u32,
    pub(super) was_told_to_start: bool,
    /// It was told that workers have ended well.
    pub(super) knows_of_ending: bool,
    /// It was told to end.
    pub(super) leaves: bool,
    /// The port of the store that it serves.
    pub(super) serves_at: Option<u16>,
    pub(super) end: Option<LauncherEnd>,
    /// Its workers' processes, by their numbers.
    pub(super) processes: BTreeMap<Rank, u32>,
    pub(super) stderr: VecDeque<String>,
    /// How much of its lines was taken, which it has not been told yet.
    pub(super) taken: usize,
}

/// The last report of a launcher.
#[derive(Debug)]
pub(super) enum LauncherEnd {
    Reported(RemoteReport),
    Failed(Error),
}

impl Peer {
    /// The slot on its host of the worker with this number.
    pub(super) fn slot(&self, number: Rank) -> Option<u32> {
        number.get().checked_sub(self.first).filter(|slot| *slot < self.slots)
    }

    /// Whether its answer was due before `now`.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.hello.is_none() && self.end.is_none() && now >= self.answer_by
    }

    /// Whether nothing more comes of it.
    pub(super) fn is_over(&self) -> bool {
        self.connection.is_over() && self.starts_again_at().is_none()
    }

    /// When it is tried again; never if it is to end.
    pub(super) fn starts_again_at(&self) -> Option<Instant> {
        self.again_at.filter(|_| self.end.is_none() && !self.leaves)
    }

    /// Its host has turned the connection away: it is tried again after a pause, of which a half is drawn at random, for many hosts may be
    /// reached through one server. Returns whether there is a try, and time for it.
    pub(super) fn try_again(&mut self, now: Instant, random: u64) -> bool {
        let longest = RETRY_DELAY.saturating_mul(1 << self.retries.min(RETRIES)).min(LONGEST_RETRY_DELAY);
        let share = (random % 1024) as u32;
        let at = now + longest / 2 + longest / 2 * share / 1024;
        let is_possible = self.retries < RETRIES && at + RETRY_DELAY < self.answer_by;
        if is_possible {
            self.retries += 1;
            self.again_at = Some(at);
        }
        is_possible
    }

    /// Lets it send as many lines as were taken.
    pub(super) fn acknowledge(&mut self) {
        if self.taken >= ENOUGH_TAKEN {
            self.connection.send(ToLauncher::Taken(std::mem::take(&mut self.taken)));
        }
    }

    /// Tells it that workers have ended well, once: in a large job that many end is seen within a moment, and each host would hear of each.
    pub(super) fn tell_of_ending(&mut self) {
        if !std::mem::replace(&mut self.knows_of_ending, true) {
            self.instruct(Instruction::Ending);
        }
    }

    pub(super) fn instruct(&self, instruction: Instruction) {
        self.connection.send(ToLauncher::Elastic(instruction));
    }

    /// Tells it to end itself and its workers, which may take `timeout`.
    pub(super) fn tell_to_end(&mut self, signal: Signal, timeout: Duration) {
        self.leaves = true;
        if self.was_told_to_start {
            self.connection.send(ToLauncher::Signal(signal.number()));
            self.connection.must_end_by(Instant::now() + timeout);
        } else {
            self.end_unwanted();
        }
    }

    /// Ends a launcher that has started nothing.
    pub(super) fn end_unwanted(&mut self) {
        self.connection.close();
        self.connection.must_end_by(Instant::now() + UNUSED_GRACE);
    }

    /// Keeps a line of its standard error for an error.
    pub(super) fn keep(&mut self, line: String) {
        if self.stderr.len() == KEPT_LINES {
            self.stderr.pop_front();
        }
        self.stderr.push_back(line);
    }
}
