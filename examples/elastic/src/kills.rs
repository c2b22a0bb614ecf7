//! Kills workers of this example again and again, and says how long it takes until the next commit.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use phalanx::launch::{Event, Job, Outcome};
use phalanx::{Error, Result, WorldSize};
use rustix::process::{Pid, Signal, kill_process};

/// A worker that lives shorter is replaced after a pause, which is not what is to be measured.
const LIFE: Duration = Duration::from_millis(2200);

/// What is measured: kills on `workers` workers.
pub struct Kills {
    pub workers: WorldSize,
    pub kills: u32,
}

/// How a job is killed.
#[derive(Default)]
struct Killer {
    /// By place: the worker's process, and since when it runs.
    workers: BTreeMap<u32, (u32, Instant)>,
    /// The newest group.
    round: u64,
    killed: Option<Killed>,
    times: Vec<Duration>,
    /// The places to kill, each in its turn.
    next: VecDeque<u32>,
    random: u64,
}

/// Who was killed, and is to be made good.
struct Killed {
    pid: u32,
    since: Instant,
    /// The newest group when the launcher had seen it end. A commit in a later one is the first after it; what is read before
    /// may have been in the pipe, even from a later group than that of the kill.
    lost_in: Option<u64>,
}

impl Kills {
    /// Runs this program as the workers of an elastic job.
    pub fn measure(&self) -> Result<()> {
        if self.kills == 0 {
            return Err(Error::invalid_argument("at least one kill is needed to measure anything"));
        }
        let program = std::env::current_exe().map_err(|error| Error::aborted(error.to_string()))?;
        let job = Job::new(program, self.workers)
            .min_workers(WorldSize::ONE)
            .max_restarts(self.kills)
            .variable("STEPS", u64::MAX.to_string())
            .variable("PAUSE_MS", "2")
            .variable("COMMIT_EVERY", "5");
        let mut killer = Killer { random: u64::from(std::process::id()) | 1, ..Killer::default() };
        let report = job.run(&mut |event: Event<'_>| {
            killer.observe(&event);
            match killer.times.len() < self.kills as usize {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        })?;
        if !matches!(report.outcome, Outcome::Stopped) {
            return Err(Error::aborted(format!("the job ended: {:?}", report.outcome)));
        }
        killer.times.sort_unstable();
        let at = |share: f64| killer.times[((killer.times.len() - 1) as f64 * share).round() as usize];
        println!(
            "{} workers, {} kills: killed to next commit p50 {:.3} s, p99 {:.3} s, longest {:.3} s",
            self.workers,
            killer.times.len(),
            at(0.5).as_secs_f64(),
            at(0.99).as_secs_f64(),
            at(1.0).as_secs_f64()
        );
        Ok(())
    }
}

impl Killer {
    fn observe(&mut self, event: &Event<'_>) {
        let now = Instant::now();
        match *event {
            Event::Started { rank, pid, .. } => {
                self.workers.insert(rank.get(), (pid, now));
                self.next.push_back(rank.get());
            }
            Event::Lost { failure, .. } => {
                if let Some(killed) = self.killed.as_mut().filter(|killed| killed.pid == failure.pid) {
                    killed.lost_in = Some(self.round);
                }
            }
            Event::Line { text, .. } => {
                if let Some(round) = std::str::from_utf8(text).ok().and_then(committed_in) {
                    self.commit(round, now);
                }
            }
            _ => {}
        }
    }

    /// A commit has returned on some rank, in `round`.
    fn commit(&mut self, round: u64, now: Instant) {
        self.round = self.round.max(round);
        if let Some(Killed { since, lost_in, .. }) = self.killed {
            if lost_in.is_some_and(|before| round > before) {
                self.times.push(now - since);
                self.killed = None;
            }
            return;
        }
        let Some(place) = self.next.front().copied() else { return };
        let Some((pid, since)) = self.workers.get(&place).copied() else { return };
        if now - since < LIFE {
            return;
        }
        // Not always right behind a commit.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        std::thread::sleep(Duration::from_micros(self.random % 15_000));
        self.next.pop_front();
        if let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            self.killed = Some(Killed { pid, since: Instant::now(), lost_in: None });
            let _ = kill_process(process, Signal::KILL);
        }
    }
}

/// The round in `commit 10 round 1 world 2`.
fn committed_in(line: &str) -> Option<u64> {
    let mut words = line.split(' ');
    (words.next() == Some("commit")).then(|| words.nth(2)?.parse().ok())?
}
