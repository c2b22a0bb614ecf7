//! Makes faults, one after the other, and measures how the others get over each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Signal;

use super::seen::Seen;
use super::system::{Held, send};

/// How long the workers may take to get over a fault; then something hangs.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(120);
/// How often is looked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often memory is measured.
const MEMORY_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Kill,
    /// Stopped for longer than the heartbeats' time-out, and continued.
    Stop,
    /// Stopped for less.
    Blink,
    Abort,
    Exit,
    Panic,
    Error,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kill => "SIGKILL",
            Self::Stop => "SIGSTOP, 1.5 to 6 s",
            Self::Blink => "SIGSTOP, 0.1 to 0.6 s",
            Self::Abort => "abort",
            Self::Exit => "exit code 7",
            Self::Panic => "panic",
            Self::Error => "error returned",
        })
    }
}

/// A fault that the others have got over.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub kind: Kind,
    /// Until the next commit that has returned, and until all places were taken again.
    pub commit: Duration,
    pub whole: Duration,
    /// Steps that were taken, and had to be taken again.
    pub lost: u64,
}

/// What comes of all faults.
#[derive(Debug, Default)]
pub struct Outcome {
    pub faults: Vec<Fault>,
    /// Groups that were formed anew though nothing had been done to anybody, and workers that were left out though nothing
    /// had been done to them.
    pub unexplained: Vec<String>,
    /// The launcher when all workers were there, and at the end.
    pub launcher: Option<(Held, Held)>,
    /// By process: how long it was looked at, and what it held first and last.
    pub workers: BTreeMap<u32, (Duration, Held, Held)>,
    /// Why no more faults were made.
    pub hang: Option<String>,
}

pub struct Injector {
    pub seen: Arc<Mutex<Seen>>,
    /// Set when the job has ended.
    pub ended: Arc<AtomicBool>,
    pub workers: usize,
    pub every: Duration,
    /// No fault after this.
    pub until: Instant,
    pub orders: PathBuf,
    pub random: u64,
    pub outcome: Outcome,
    /// Whether nothing is going on. A worker between two groups holds less than one in a group.
    pub calm: bool,
    pub measured: Option<Instant>,
    pub met: BTreeMap<u32, Instant>,
}

impl Injector {
    /// Makes a fault every so often, until the time is over or something hangs.
    pub fn run(mut self) -> Outcome {
        let start = Instant::now();
        let mut next = start + self.every;
        let mut round = self.wait(RECOVERY_TIMEOUT, Self::whole);
        while let Some(before) = round.filter(|_| next < self.until) {
            self.calm = true;
            self.wait(next.saturating_duration_since(Instant::now()), |_| None::<()>);
            self.calm = false;
            if self.ended.load(Ordering::Relaxed) {
                return self.outcome;
            }
            next += self.every;
            let now = self.seen.lock().newest().map_or(0, |(number, _)| number);
            if now != before {
                self.outcome.unexplained.push(format!("from group {before} to {now}, without any fault"));
            }
            round = self.fault(start).or_else(|| self.wait(RECOVERY_TIMEOUT, Self::whole));
        }
        if round.is_none() && !self.ended.load(Ordering::Relaxed) {
            self.outcome.hang =
                Some(format!("not all workers were back within {} s", RECOVERY_TIMEOUT.as_secs()));
            let pids: Vec<u32> = self.seen.lock().workers.values().copied().collect();
            pids.into_iter().for_each(|pid| send(pid, Signal::KILL));
        }
        self.calm = true;
        while !self.ended.load(Ordering::Relaxed) {
            self.wait(Duration::from_secs(1), |_| None::<()>);
        }
        self.outcome
    }

    /// Makes one fault, and waits until the others have got over it; then gives the number of the group.
    fn fault(&mut self, start: Instant) -> Option<u64> {
        let kinds = [
            Kind::Kill,
            Kind::Kill,
            Kind::Stop,
            Kind::Stop,
            Kind::Blink,
            Kind::Abort,
            Kind::Exit,
            Kind::Panic,
            Kind::Error,
        ];
        let kind = kinds[self.below(kinds.len() as u64) as usize];
        let (number, members) = {
            let seen = self.seen.lock();
            let (number, round) = seen.newest()?;
            (number, round.members.iter().copied().collect::<Vec<u32>>())
        };
        let victim = members[self.below(members.len() as u64) as usize];
        let order = self.orders.join(victim.to_string());
        let at = Instant::now();
        let obey = |what| fs::write(&order, what).ok();
        let mut woken = None;
        match kind {
            Kind::Kill => send(victim, Signal::KILL),
            Kind::Stop | Kind::Blink => {
                let milliseconds =
                    if kind == Kind::Stop { 1500 + self.below(4500) } else { 100 + self.below(500) };
                send(victim, Signal::STOP);
                self.wait(Duration::from_millis(milliseconds), |_| None::<()>);
                woken = Some(Instant::now());
                send(victim, Signal::CONT);
            }
            Kind::Abort => drop(obey("abort")),
            Kind::Exit => drop(obey("exit")),
            Kind::Panic => drop(obey("panic")),
            Kind::Error => drop(obey("error")),
        }
        let commit = self.wait(RECOVERY_TIMEOUT, |it| {
            let seen = it.seen.lock();
            let later = seen.first_commits.range(number + 1..).next().map(|(_, at)| *at);
            // The same group goes on when one that was stopped for a moment is awake again.
            later.or_else(|| {
                seen.last_commit.filter(|(_, at)| woken.is_some_and(|woken| *at > woken)).map(|(_, at)| at)
            })
        });
        let _ = fs::remove_file(&order);
        let gone = !matches!(kind, Kind::Stop | Kind::Blink);
        let whole = self.wait(RECOVERY_TIMEOUT, |it| {
            let replaced = !gone || !it.seen.lock().workers.values().any(|pid| *pid == victim);
            it.whole().filter(|_| replaced)
        });
        let now = Instant::now();
        let (Some(commit), Some(whole)) = (commit, whole) else { return None };
        let lost = self.judge(number, whole, victim);
        let fault = Fault { kind, commit: commit - at, whole: now - at, lost };
        println!(
            "{:>6.0} s  {kind:<21}  process {victim:>7}: next commit after {:.2} s, all {} there after {:.2} s, {lost} steps lost, group {whole}",
            (at - start).as_secs_f64(),
            fault.commit.as_secs_f64(),
            self.workers,
            fault.whole.as_secs_f64()
        );
        self.outcome.faults.push(fault);
        Some(whole)
    }

    /// The steps that the groups after `before` had to take again. Notes who was left out besides the victim.
    fn judge(&mut self, before: u64, whole: u64, victim: u32) -> u64 {
        let seen = self.seen.lock();
        let complete = seen.rounds.range(before..whole + 1).filter(|(_, round)| round.is_complete());
        let complete: Vec<(u64, &BTreeSet<u32>)> =
            complete.map(|(number, round)| (*number, &round.members)).collect();
        for pair in complete.windows(2) {
            let [(_, earlier), (number, later)] = pair else { continue };
            for other in earlier.difference(later).filter(|pid| **pid != victim) {
                self.outcome.unexplained.push(format!(
                    "group {number} is without process {other}, though the fault was {victim}'s"
                ));
            }
        }
        seen.rounds.range(before + 1..whole + 1).map(|(_, round)| round.lost).sum()
    }

    /// The number of the newest group, if everybody trains in it.
    fn whole(&self) -> Option<u64> {
        let seen = self.seen.lock();
        seen.newest().map(|(number, _)| number).filter(|_| seen.is_whole(self.workers))
    }

    /// Looks until there is something to see, or the time is over.
    fn wait<T>(&mut self, patience: Duration, look: impl Fn(&Self) -> Option<T>) -> Option<T> {
        let until = Instant::now() + patience;
        loop {
            let found = look(self);
            let now = Instant::now();
            if found.is_some() || now >= until || self.ended.load(Ordering::Relaxed) {
                return found;
            }
            if self.calm && self.measured.is_none_or(|at| now - at > MEMORY_INTERVAL) {
                self.measure(now);
            }
            thread::sleep(POLL_INTERVAL.min(until - now));
        }
    }

    fn measure(&mut self, now: Instant) {
        let Some(round) = self.whole() else { return };
        self.measured = Some(now);
        if let Some(held) = Held::by(std::process::id()) {
            let launcher = self.outcome.launcher.get_or_insert((held, held));
            launcher.1 = held;
        }
        let members = self.seen.lock().rounds.get(&round).map(|round| round.members.clone());
        for pid in members.unwrap_or_default() {
            let since = *self.met.entry(pid).or_insert(now);
            // A worker that has just come still takes memory for the first time.
            if let Some(held) = Held::by(pid).filter(|_| now - since > Duration::from_secs(10)) {
                let known = self.outcome.workers.entry(pid).or_insert((Duration::ZERO, held, held));
                (known.0, known.2) = (now - since, held);
            }
        }
    }

    /// A number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % bound.max(1)
    }
}
