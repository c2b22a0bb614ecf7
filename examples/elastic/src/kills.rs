//! Kills workers of this example again and again, and says how long it takes until the next commit.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use phalanx::launch::{Event, Job, Outcome};
use phalanx::{Error, Result, WorldSize};
use rustix::process::{Pid, Signal, kill_process};

/// A worker that lives shorter is replaced after a pause, which is not what is to be measured.
const LIFE: Duration = Duration::from_millis(2200);
/// How long after a kill the next commit may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is measured: kills on `workers` workers.
pub struct Kills {
    pub workers: WorldSize,
    pub kills: u32,
}

/// Who is to be killed when: pure.
#[derive(Default)]
struct Killer {
    /// By place: the worker's process, and since when it runs. The launcher reaps none before it has told of its loss, so that
    /// none of these numbers can be another process's.
    workers: BTreeMap<u32, (u32, Instant)>,
    /// The newest group.
    round: u64,
    killed: Option<Killed>,
    times: Vec<Duration>,
    /// The places to kill, each in its turn.
    next: VecDeque<u32>,
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
        let (mut killer, mut error) = (Killer::default(), None);
        let mut random = u64::from(std::process::id()) | 1;
        let report = job.run(&mut |event: Event<'_>| {
            if error.is_some() || killer.times.len() >= self.kills as usize {
                return ControlFlow::Break(());
            }
            error = killer.observe(&event, &mut random).err();
            ControlFlow::Continue(())
        })?;
        if let Some(error) = error {
            return Err(error);
        }
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
    fn observe(&mut self, event: &Event<'_>, random: &mut u64) -> Result<()> {
        let now = Instant::now();
        match *event {
            Event::Started { rank, pid, .. } => self.started(rank.get(), pid, now),
            Event::Lost { failure, .. } => self.lost(failure.pid),
            Event::Line { text, .. } => {
                let round = std::str::from_utf8(text).ok().and_then(committed_in);
                if let Some(pid) = round.map_or(Ok(None), |round| self.commit(round, now))? {
                    // Not always right behind a commit.
                    *random ^= *random << 13;
                    *random ^= *random >> 7;
                    *random ^= *random << 17;
                    std::thread::sleep(Duration::from_micros(*random % 15_000));
                    self.killed = Some(Killed { pid, since: Instant::now(), lost_in: None });
                    kill(pid)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn started(&mut self, place: u32, pid: u32, now: Instant) {
        self.workers.insert(place, (pid, now));
        self.next.push_back(place);
    }

    /// A worker has died, whoever wanted that. Its number may soon be another process's.
    fn lost(&mut self, pid: u32) {
        if let Some(killed) = self.killed.as_mut().filter(|killed| killed.pid == pid) {
            killed.lost_in = Some(self.round);
        }
        self.workers.retain(|_, (worker, _)| *worker != pid);
        self.next.retain(|place| self.workers.contains_key(place));
    }

    /// A commit has returned on some rank, in `round`. Who is to be killed, if anybody?
    fn commit(&mut self, round: u64, now: Instant) -> Result<Option<u32>> {
        self.round = self.round.max(round);
        if let Some(Killed { pid, since, lost_in }) = self.killed {
            if lost_in.is_some_and(|before| round > before) {
                self.times.push(now - since);
                self.killed = None;
            } else if now.saturating_duration_since(since) > PATIENCE {
                let missing =
                    if lost_in.is_some() { "no new group has committed" } else { "it has not ended" };
                return Err(Error::aborted(format!(
                    "process {pid} was killed {} s ago, and {missing}",
                    PATIENCE.as_secs()
                )));
            }
            return Ok(None);
        }
        let Some(place) = self.next.front() else { return Ok(None) };
        let ripe = self.workers.get(place).filter(|(_, since)| now - *since >= LIFE);
        let Some((pid, _)) = ripe.copied() else { return Ok(None) };
        self.next.pop_front();
        Ok(Some(pid))
    }
}

fn kill(pid: u32) -> Result<()> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let killed = process.map_or(Ok(()), |process| kill_process(process, Signal::KILL));
    killed.map_err(|error| Error::aborted(format!("worker {pid} cannot be killed: {error}")))
}

/// The round in `commit 10 round 1 world 2`.
fn committed_in(line: &str) -> Option<u64> {
    let mut words = line.split(' ');
    (words.next() == Some("commit")).then(|| words.nth(2)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two workers that have lived long enough to be killed.
    fn killer() -> (Killer, Instant) {
        let (mut killer, start) = (Killer::default(), Instant::now());
        killer.started(0, 100, start);
        killer.started(1, 101, start);
        (killer, start + LIFE)
    }

    #[test]
    fn who_has_died_of_itself_is_not_killed() {
        let (mut killer, now) = killer();
        killer.lost(100);
        assert_eq!(killer.commit(1, now).unwrap(), Some(101));
        killer.lost(101);
        assert_eq!(killer.commit(1, now).unwrap(), None, "nobody is left");
        killer.started(0, 102, now);
        assert_eq!(killer.commit(1, now).unwrap(), None, "it has only just been started");
        assert_eq!(killer.commit(1, now + LIFE).unwrap(), Some(102));
    }

    #[test]
    fn the_first_commit_of_a_later_group_makes_a_kill_good() {
        let (mut killer, now) = killer();
        let pid = killer.commit(1, now).unwrap().unwrap();
        killer.killed = Some(Killed { pid, since: now, lost_in: None });
        assert_eq!(killer.commit(2, now).unwrap(), None, "it has not ended yet");
        killer.lost(pid);
        assert_eq!(killer.commit(2, now).unwrap(), None, "that group was there before");
        assert_eq!(killer.commit(3, now + Duration::from_millis(7)).unwrap(), None);
        assert_eq!(killer.times, [Duration::from_millis(7)]);
    }

    #[test]
    fn a_kill_that_has_no_consequences_is_an_error() {
        let (mut killer, now) = killer();
        let pid = killer.commit(1, now).unwrap().unwrap();
        killer.killed = Some(Killed { pid, since: now, lost_in: None });
        assert_eq!(killer.commit(1, now + PATIENCE).unwrap(), None);
        let late = now + PATIENCE + Duration::from_millis(1);
        assert!(killer.commit(1, late).unwrap_err().to_string().contains("it has not ended"));
        killer.lost(pid);
        assert!(killer.commit(1, late).unwrap_err().to_string().contains("no new group"));
    }
}
