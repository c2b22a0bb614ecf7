//! What workers and launcher have said, and what follows from it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use phalanx::launch::{Event, Stream};

/// How many lines of the workers' errors are kept.
const LINES: usize = 200;

/// One group of workers.
#[derive(Clone, Debug, Default)]
pub struct Round {
    pub world: usize,
    /// The processes that have begun it.
    pub members: BTreeSet<u32>,
    /// The most steps that one of them has taken and lost.
    pub lost: u64,
    /// Whether a commit in it has returned.
    pub committed: bool,
}

impl Round {
    pub fn is_complete(&self) -> bool {
        self.members.len() == self.world
    }
}

#[derive(Debug, Default)]
pub struct Seen {
    /// By place: the worker that was started there last.
    pub workers: BTreeMap<u32, u32>,
    pub rounds: BTreeMap<u64, Round>,
    /// When the first commit in each round was seen, and the last in any.
    pub first_commits: BTreeMap<u64, Instant>,
    pub last_commit: Option<(u64, Instant)>,
    /// The furthest step that was committed.
    pub steps: u64,
    /// The accuracy of each training.
    pub accuracies: BTreeMap<u64, f64>,
    /// The hash of the model of each worker that has come to the end.
    pub done: BTreeMap<u32, String>,
    pub errors: VecDeque<String>,
    /// Places that stay empty.
    pub given_up: Vec<u32>,
}

impl Seen {
    pub fn note(&mut self, event: &Event<'_>, now: Instant) {
        match *event {
            Event::Started { rank, pid, .. } => {
                self.workers.insert(rank.get(), pid);
            }
            Event::Lost { failure, replaced_in: None, .. } => self.given_up.push(failure.rank.get()),
            Event::Line { rank, stream: Stream::Stderr, text } => {
                self.errors.push_back(format!("[{rank}] {}", String::from_utf8_lossy(text)));
                if self.errors.len() > LINES {
                    self.errors.pop_front();
                }
            }
            Event::Line { text, .. } => {
                let line = String::from_utf8_lossy(text);
                if self.line(&line, now).is_none() {
                    self.errors.push_back(line.into_owned());
                }
            }
            _ => {}
        }
    }

    /// None if no worker of ours says that.
    fn line(&mut self, line: &str, now: Instant) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        match *words.as_slice() {
            ["round", round, "rank", _, "world", world, "pid", pid, "step", _, "lost", lost] => {
                let round = self.rounds.entry(round.parse().ok()?).or_default();
                round.world = world.parse().ok()?;
                round.members.insert(pid.parse().ok()?);
                round.lost = round.lost.max(lost.parse().ok()?);
            }
            ["commit", step, "round", round] => {
                let (step, round) = (step.parse().ok()?, round.parse().ok()?);
                self.steps = self.steps.max(step);
                self.first_commits.entry(round).or_insert(now);
                self.last_commit = Some((round, now));
                self.rounds.entry(round).or_default().committed = true;
            }
            ["training", number, "accuracy", accuracy] => {
                self.accuracies.insert(number.parse().ok()?, accuracy.parse().ok()?);
            }
            ["done", hash, "pid", pid] => {
                self.done.insert(pid.parse().ok()?, hash.to_owned());
            }
            _ => return None,
        }
        Some(())
    }

    /// The newest group, and its number.
    pub fn newest(&self) -> Option<(u64, &Round)> {
        self.rounds.last_key_value().map(|(number, round)| (*number, round))
    }

    /// Whether `workers` train together, in the newest group.
    pub fn is_whole(&self, workers: usize) -> bool {
        self.newest()
            .is_some_and(|(_, round)| round.is_complete() && round.committed && round.world == workers)
    }
}
