//! Kills workers of this example again and again, and says how long it takes until the next commit.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use phalanx::launch::{Event, Job, Outcome};
use phalanx::{Error, Result, WorldSize};
use rustix::process::{Pid, Signal, kill_process};

/// A worker that lives shorter is replaced after a pause, which is not what is to be measured.
const KILL_DELAY: Duration = Duration::from_millis(2200);
/// How long each step may take: from the start to the first kill, from a kill to the process's end, from there to the next commit, and
/// from there to the next kill.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// What is measured: kills on `workers` workers.
pub struct Kills {
    pub workers: WorldSize,
    pub kills: u32,
}

/// What the job has come to.
enum Progress {
    /// This process was killed.
    Killed(u32),
    /// The launcher has seen it end.
    Lost(u32),
    /// The others have committed in a new group.
    MadeGood,
    /// The job is over.
    Ended(Result<Vec<Duration>>),
}

/// What follows from a commit.
#[derive(Debug, PartialEq, Eq)]
enum Commit {
    /// It is the first after the kill.
    MadeGood,
    /// This process is to be killed.
    Kill(u32),
}

/// Decides which worker is killed, and when: pure.
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

/// A worker that was killed, until the job has replaced it.
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
        let kills = self.kills as usize;
        let (progress, received) = mpsc::channel();
        // A job tells of nothing while nothing happens in it, so another thread looks at the clock. If this process ends, the
        // launcher's guard ends the workers.
        thread::spawn(move || {
            let outcome = run(&job, kills, &progress);
            // Without a receiver the process is about to end.
            let _ = progress.send(Progress::Ended(outcome));
        });
        let mut times = wait(&received, STEP_TIMEOUT)?;
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        println!(
            "{} workers, {} kills: killed to next commit p50 {:.3} s, p99 {:.3} s, longest {:.3} s",
            self.workers,
            times.len(),
            at(0.5).as_secs_f64(),
            at(0.99).as_secs_f64(),
            at(1.0).as_secs_f64()
        );
        Ok(())
    }
}

/// Runs the job until that many kills have been made good; how long each took.
fn run(job: &Job, kills: usize, progress: &Sender<Progress>) -> Result<Vec<Duration>> {
    let (mut killer, mut error) = (Killer::default(), None);
    let mut random = u64::from(std::process::id()) | 1;
    let report = job.run(&mut |event: Event<'_>| {
        if error.is_some() || killer.times.len() >= kills {
            return ControlFlow::Break(());
        }
        error = killer.observe(&event, &mut random, progress).err();
        ControlFlow::Continue(())
    })?;
    match (error, report.outcome) {
        (Some(error), _) => Err(error),
        (None, Outcome::Stopped) => Ok(killer.times),
        (None, outcome) => Err(Error::aborted(format!("the job ended: {outcome:?}"))),
    }
}

/// Waits for the end of the job. Each step of its progress may take as long as `patience`.
fn wait(progress: &Receiver<Progress>, patience: Duration) -> Result<Vec<Duration>> {
    let mut missing = "no worker has been killed, since none has lived and committed long enough".to_owned();
    loop {
        missing = match progress.recv_timeout(patience) {
            Ok(Progress::Ended(outcome)) => return outcome,
            Ok(Progress::Killed(pid)) => format!("process {pid} was killed, and it has not ended"),
            Ok(Progress::Lost(pid)) => format!("process {pid} was killed, and no new group has committed"),
            Ok(Progress::MadeGood) => "no other worker has been killed since the last commit".to_owned(),
            Err(RecvTimeoutError::Timeout) => {
                return Err(Error::aborted(format!("{missing}, for {} s", patience.as_secs())));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::aborted("the thread that runs the job has panicked"));
            }
        };
    }
}

impl Killer {
    fn observe(&mut self, event: &Event<'_>, random: &mut u64, progress: &Sender<Progress>) -> Result<()> {
        let now = Instant::now();
        let step = match *event {
            Event::Started { rank, pid, .. } => {
                self.started(rank.get(), pid, now);
                None
            }
            Event::Lost { failure, .. } => self.lost(failure.pid),
            Event::Line { text, .. } => {
                let round = std::str::from_utf8(text).ok().and_then(committed_in);
                match round.and_then(|round| self.commit(round, now)) {
                    Some(Commit::MadeGood) => Some(Progress::MadeGood),
                    Some(Commit::Kill(pid)) => {
                        // Not always right behind a commit.
                        *random ^= *random << 13;
                        *random ^= *random >> 7;
                        *random ^= *random << 17;
                        thread::sleep(Duration::from_micros(*random % 15_000));
                        self.killed = Some(Killed { pid, since: Instant::now(), lost_in: None });
                        kill(pid)?;
                        Some(Progress::Killed(pid))
                    }
                    None => None,
                }
            }
            _ => None,
        };
        // Without a receiver the process is about to end.
        let _ = step.map_or(Ok(()), |step| progress.send(step));
        Ok(())
    }

    fn started(&mut self, place: u32, pid: u32, now: Instant) {
        self.workers.insert(place, (pid, now));
        self.next.push_back(place);
    }

    /// A worker has died, whoever wanted that. Its number may soon be another process's.
    fn lost(&mut self, pid: u32) -> Option<Progress> {
        self.workers.retain(|_, (worker, _)| *worker != pid);
        self.next.retain(|place| self.workers.contains_key(place));
        let killed = self.killed.as_mut().filter(|killed| killed.pid == pid)?;
        killed.lost_in = Some(self.round);
        Some(Progress::Lost(pid))
    }

    /// A commit has returned on some rank, in `round`. Returns what follows from it, if anything.
    fn commit(&mut self, round: u64, now: Instant) -> Option<Commit> {
        self.round = self.round.max(round);
        if let Some(Killed { since, lost_in, .. }) = self.killed {
            lost_in.filter(|before| round > *before)?;
            self.times.push(now - since);
            self.killed = None;
            return Some(Commit::MadeGood);
        }
        let place = self.next.front()?;
        let (pid, _) = self.workers.get(place).filter(|(_, since)| now - *since >= KILL_DELAY)?;
        let pid = *pid;
        self.next.pop_front();
        Some(Commit::Kill(pid))
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
        (killer, start + KILL_DELAY)
    }

    #[test]
    fn who_has_died_of_itself_is_not_killed() {
        let (mut killer, now) = killer();
        assert!(killer.lost(100).is_none());
        assert_eq!(killer.commit(1, now), Some(Commit::Kill(101)));
        killer.lost(101);
        assert_eq!(killer.commit(1, now), None, "nobody is left");
        killer.started(0, 102, now);
        assert_eq!(killer.commit(1, now), None, "it has only just been started");
        assert_eq!(killer.commit(1, now + KILL_DELAY), Some(Commit::Kill(102)));
    }

    #[test]
    fn the_first_commit_of_a_later_group_makes_a_kill_good() {
        let (mut killer, now) = killer();
        let Some(Commit::Kill(pid)) = killer.commit(1, now) else { panic!("nobody is killed") };
        killer.killed = Some(Killed { pid, since: now, lost_in: None });
        assert_eq!(killer.commit(2, now), None, "it has not ended yet");
        assert!(matches!(killer.lost(pid), Some(Progress::Lost(lost)) if lost == pid));
        assert_eq!(killer.commit(2, now), None, "that group was there before");
        assert_eq!(killer.commit(3, now + Duration::from_millis(7)), Some(Commit::MadeGood));
        assert_eq!(killer.times, [Duration::from_millis(7)]);
    }

    #[test]
    fn a_job_in_which_nothing_happens_is_an_error_that_says_what_is_missing() {
        const SHORT_TIMEOUT: Duration = Duration::from_millis(50);
        let (progress, received) = mpsc::channel();
        let missing = || wait(&received, SHORT_TIMEOUT).unwrap_err().to_string();
        assert!(missing().contains("no worker has been killed"));
        let steps = [
            (Progress::Killed(7), "process 7 was killed, and it has not ended"),
            (Progress::Lost(7), "no new group has committed"),
            (Progress::MadeGood, "no other worker has been killed"),
        ];
        for (step, expected) in steps {
            progress.send(step).unwrap();
            let error = missing();
            assert!(error.contains(expected), "{error}");
        }
        progress.send(Progress::Ended(Ok(vec![SHORT_TIMEOUT]))).unwrap();
        assert_eq!(wait(&received, SHORT_TIMEOUT).unwrap(), [SHORT_TIMEOUT]);
        drop(progress);
        assert!(missing().contains("panicked"));
    }
}
