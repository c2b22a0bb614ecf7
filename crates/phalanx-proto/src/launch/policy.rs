//! Decides which processes get which signal, and when: pure. Input: events and the time. Output: the signal for all
//! process groups.

use std::time::{Duration, Instant};

use super::exit::{Exit, Signal};
use super::root_cause::root_cause;

/// How long to wait for processes that have got SIGKILL. Only a process stuck in the kernel takes long.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the others may take to end by themselves after the first failure. Ranks notice a dead peer within
/// milliseconds: they report what they saw, and a blamed rank that is still ending may turn out to be the first.
const REPORTING_GRACE: Duration = Duration::from_millis(500);

/// How long a worker that is [about to fail](Policy::tick) may take to end. A process that panics may write a long backtrace,
/// and wait for a processor, while the others know of it already.
const FAILING_GRACE: Duration = Duration::from_secs(5);
/// How often to check whether it is still about to fail.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// An elastic job that has had enough workers for so long has recovered from what failed before: what ends it, perhaps weeks later, has
/// another reason.
pub const RECOVERY_INTERVAL: Duration = Duration::from_secs(60);

/// The state of a job's workers, by index.
#[derive(Debug)]
pub struct Policy {
    grace: Duration,
    /// Those that failed by themselves, in order.
    failures: Vec<WorkerExit>,
    /// In an elastic job: those that failed while the others went on, whose slots are empty, and when. Without those from which it has
    /// [recovered](RECOVERY_INTERVAL).
    lost: Vec<(WorkerExit, Instant)>,
    exits: Vec<Option<Exit>>,
    phase: Phase,
    cause: Option<EndReason>,
    /// Whether another node has asked to end the attempt.
    elsewhere: bool,
    /// The first signal that this process got when the workers were being ended already.
    late_signal: Option<Signal>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Running,
    /// A worker has failed; the others may end by themselves.
    Reporting {
        until: Instant,
        at_most: Instant,
    },
    /// Asked to end. `swept`: with SIGTERM, which also ends processes that ignore SIGINT.
    Ending {
        kill_at: Instant,
        swept: bool,
    },
    Killed {
        give_up_at: Instant,
    },
}

/// The end of one worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerExit {
    /// Its index among the job's workers.
    pub worker: usize,
    /// How it ended.
    pub exit: Exit,
    /// Whom it blames.
    pub blames: Option<usize>,
}

/// Why the job ends before all workers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// A worker failed.
    Failed {
        /// The index of the worker that failed first, as far as blame shows.
        worker: usize,
    },
    /// This process got the signal.
    Interrupted(Signal),
    /// The observer asked for it.
    Stopped,
    /// Another node has asked for it.
    Elsewhere,
}

impl Policy {
    /// So many workers, which all run. `grace` is the time between the first signal and SIGKILL.
    pub fn new(workers: usize, grace: Duration) -> Self {
        let exits = vec![None; workers];
        Self {
            grace,
            failures: Vec::new(),
            lost: Vec::new(),
            exits,
            phase: Phase::Running,
            cause: None,
            elsewhere: false,
            late_signal: None,
        }
    }

    /// Workers whose ends were seen at the same moment. Their order is not known: one that a signal ended is the
    /// likelier cause, since the others may have noticed its death.
    pub fn exited(&mut self, batch: &[WorkerExit], now: Instant) -> Option<Signal> {
        for end in batch {
            if let Some(exit) = self.exits.get_mut(end.worker) {
                *exit = Some(end.exit);
            }
        }
        match self.phase {
            Phase::Running | Phase::Reporting { .. } => {
                let mut failures: Vec<WorkerExit> =
                    batch.iter().filter(|end| !end.exit.is_success()).copied().collect();
                failures.sort_by_key(|end| (!matches!(end.exit, Exit::Signal(_)), end.worker));
                self.failures.extend(failures);
                if self.all_exited() {
                    return Some(self.conclude(now));
                }
                if matches!(self.phase, Phase::Running) && !self.failures.is_empty() {
                    self.collect_reports(now);
                }
                None
            }
            Phase::Ending { kill_at, swept: false } if self.all_exited() => {
                self.phase = Phase::Ending { kill_at, swept: true };
                Some(Signal::TERM)
            }
            Phase::Ending { .. } | Phase::Killed { .. } => None,
        }
    }

    /// A worker has failed and is not replaced, and the others go on.
    pub fn lost(&mut self, end: WorkerExit, now: Instant) {
        self.forget_recovered(now);
        self.lost.push((end, now));
        if let Some(exit) = self.exits.get_mut(end.worker) {
            *exit = Some(end.exit);
        }
    }

    /// Too few workers are left. The first of the lost workers from which the job has not recovered is the first failure.
    pub fn too_few(&mut self, now: Instant) {
        self.forget_recovered(now);
        self.failures.extend(self.lost.drain(..).map(|(end, _)| end));
    }

    fn forget_recovered(&mut self, now: Instant) {
        let is_long = |since: Instant| now.saturating_duration_since(since) >= RECOVERY_INTERVAL;
        if self.lost.last().is_some_and(|(_, at)| is_long(*at)) {
            self.lost.clear();
        }
    }

    /// Whether the job still runs normally, and is not about to end.
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    /// All have ended, or their time is over: the remaining processes are asked to end.
    fn conclude(&mut self, now: Instant) -> Signal {
        let blamed = |end: &WorkerExit| self.failures.iter().find(|other| end.blames == Some(other.worker));
        let first = root_cause(&self.failures, blamed);
        let elsewhere = self.elsewhere.then_some(EndReason::Elsewhere);
        self.cause = first.map(|end| EndReason::Failed { worker: end.worker }).or(elsewhere);
        self.ask(Signal::TERM, now)
    }

    /// This process got `signal`.
    pub fn interrupted(&mut self, signal: Signal, now: Instant) -> Option<Signal> {
        if matches!(self.phase, Phase::Ending { .. } | Phase::Killed { .. }) {
            self.late_signal.get_or_insert(signal);
        }
        match self.phase {
            Phase::Running | Phase::Reporting { .. } => self.end(EndReason::Interrupted(signal), signal, now),
            Phase::Ending { .. } if signal == Signal::INT => Some(self.kill(now)),
            // A worker may ignore the first signal.
            Phase::Ending { kill_at, swept: false } if signal == Signal::TERM => {
                self.phase = Phase::Ending { kill_at, swept: true };
                Some(Signal::TERM)
            }
            Phase::Ending { .. } | Phase::Killed { .. } => None,
        }
    }

    /// Another node has failed, or nodes come or go: the workers may report what they saw, and are then asked to end.
    pub fn ended_elsewhere(&mut self, now: Instant) {
        self.elsewhere = true;
        if matches!(self.phase, Phase::Running) {
            self.collect_reports(now);
        }
    }

    /// The observer has asked for the end.
    pub fn stopped(&mut self, now: Instant) -> Option<Signal> {
        match self.phase {
            Phase::Running | Phase::Reporting { .. } => self.end(EndReason::Stopped, Signal::TERM, now),
            Phase::Ending { .. } | Phase::Killed { .. } => None,
        }
    }

    /// Time has passed. `about_to_fail`: a worker that still runs is about to fail by itself, and its failure may be the
    /// first.
    pub fn tick(&mut self, now: Instant, about_to_fail: bool) -> Option<Signal> {
        match self.phase {
            Phase::Reporting { until, at_most } if now >= until => {
                if about_to_fail && now < at_most {
                    self.phase = Phase::Reporting { until: at_most.min(now + POLL_INTERVAL), at_most };
                    return None;
                }
                Some(self.conclude(now))
            }
            Phase::Ending { kill_at, .. } if now >= kill_at => Some(self.kill(now)),
            _ => None,
        }
    }

    /// When to [tick](Self::tick) at the latest.
    pub fn wake_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running => None,
            Phase::Reporting { until, .. } => Some(until),
            Phase::Ending { kill_at, .. } => Some(kill_at),
            Phase::Killed { give_up_at } => Some(give_up_at),
        }
    }

    /// Whether there is time left for the others to report.
    pub fn collects_reports(&self) -> bool {
        matches!(self.phase, Phase::Reporting { .. })
    }

    /// The workers that have failed and whom they blame.
    pub fn blamed(&self) -> impl Iterator<Item = usize> {
        self.failures.iter().filter_map(|end| end.blames)
    }

    /// Whether a worker has ended well.
    pub fn has_succeeded(&self) -> bool {
        self.exits.iter().flatten().any(|exit| exit.is_success())
    }

    /// Whether every worker has ended. The processes that they have started may still run.
    pub fn all_exited(&self) -> bool {
        self.exits.iter().all(Option::is_some)
    }

    /// Whether everything has got SIGTERM, and nothing SIGKILL.
    pub fn has_swept(&self) -> bool {
        matches!(self.phase, Phase::Ending { swept: true, .. })
    }

    /// Whether all workers have got SIGKILL.
    pub fn has_killed(&self) -> bool {
        matches!(self.phase, Phase::Killed { .. })
    }

    /// Whether it is useless to wait for a process that does not die.
    pub fn gives_up(&self, now: Instant) -> bool {
        matches!(self.phase, Phase::Killed { give_up_at } if now >= give_up_at)
    }

    /// The worker that failed first, without regard to blame.
    pub fn first_failure(&self) -> Option<usize> {
        self.failures.first().map(|end| end.worker)
    }

    /// Why the job ends before all workers have; None as long as it goes on, and if all have ended well.
    pub fn cause(&self) -> Option<EndReason> {
        self.cause
    }

    /// The signal that this process got while the workers were ended for [another reason](Self::cause): they are not to be started again.
    pub fn late_signal(&self) -> Option<Signal> {
        self.late_signal
    }

    /// How each worker ended, by index; [`Exit::Lost`] for one that has not been seen to end.
    pub fn exits(&self) -> Vec<Exit> {
        self.exits.iter().map(|exit| exit.unwrap_or(Exit::Lost)).collect()
    }

    fn end(&mut self, cause: EndReason, signal: Signal, now: Instant) -> Option<Signal> {
        self.cause = Some(cause);
        Some(self.ask(signal, now))
    }

    fn ask(&mut self, signal: Signal, now: Instant) -> Signal {
        self.phase = Phase::Ending { kill_at: now + self.grace, swept: signal == Signal::TERM };
        signal
    }

    fn collect_reports(&mut self, now: Instant) {
        self.phase = Phase::Reporting { until: now + REPORTING_GRACE, at_most: now + FAILING_GRACE };
    }

    fn kill(&mut self, now: Instant) -> Signal {
        self.phase = Phase::Killed { give_up_at: now + KILL_TIMEOUT };
        Signal::KILL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(30);
    const OK: Exit = Exit::Code(0);

    fn policy(workers: usize) -> (Policy, Instant) {
        (Policy::new(workers, GRACE), crate::some_time())
    }

    fn end(worker: usize, exit: Exit) -> WorkerExit {
        WorkerExit { worker, exit, blames: None }
    }

    fn blaming(worker: usize, blamed: usize) -> WorkerExit {
        WorkerExit { worker, exit: Exit::Code(1), blames: Some(blamed) }
    }

    #[test]
    fn early_success_ends_nobody_and_the_last_sweeps_up() {
        let (mut policy, now) = policy(2);
        assert_eq!(policy.exited(&[end(0, OK)], now), None);
        assert_eq!(policy.exited(&[end(1, OK)], now), Some(Signal::TERM));
        assert!(policy.all_exited() && policy.cause().is_none());
    }

    #[test]
    fn the_first_failure_ends_the_others_and_stays_the_cause() {
        let (mut policy, now) = policy(3);
        assert_eq!(policy.exited(&[end(2, Exit::Code(3))], now), None);
        assert_eq!((policy.first_failure(), policy.cause()), (Some(2), None));
        assert_eq!(policy.wake_at(), Some(now + REPORTING_GRACE));
        assert_eq!(policy.exited(&[end(0, Exit::Code(1))], now), None);
        let now = now + REPORTING_GRACE;
        assert_eq!(policy.tick(now, false), Some(Signal::TERM));
        assert_eq!(policy.tick(now + GRACE / 2, false), None);
        assert_eq!(policy.tick(now + GRACE, false), Some(Signal::KILL));
        assert_eq!(policy.tick(now + GRACE, false), None);
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 2 }));
        assert!(!policy.gives_up(now + GRACE));
        assert!(policy.gives_up(now + GRACE + KILL_TIMEOUT));
        assert_eq!(policy.exits(), [Exit::Code(1), Exit::Lost, Exit::Code(3)]);
    }

    #[test]
    fn when_all_have_ended_no_more_reports_are_waited_for() {
        let (mut policy, now) = policy(2);
        assert_eq!(policy.exited(&[end(1, Exit::Code(3))], now), None);
        assert_eq!(policy.exited(&[end(0, OK)], now), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 1 }));
    }

    #[test]
    fn of_failures_at_the_same_moment_a_signal_is_the_cause() {
        let (mut policy, now) = policy(3);
        policy
            .exited(&[end(0, Exit::Code(1)), end(2, Exit::Signal(Signal::KILL)), end(1, Exit::Code(1))], now);
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 2 }));
    }

    #[test]
    fn ctrl_c_is_passed_on_then_sweeps_and_kills_the_second_time() {
        let (mut policy, now) = policy(1);
        assert_eq!(policy.interrupted(Signal::INT, now), Some(Signal::INT));
        assert_eq!(policy.interrupted(Signal::HUP, now), None);
        assert!(!policy.has_swept());
        assert_eq!(policy.exited(&[end(0, Exit::Code(1))], now), Some(Signal::TERM));
        assert!(policy.has_swept());
        assert_eq!(policy.interrupted(Signal::INT, now), Some(Signal::KILL));
        assert!(!policy.has_swept() && policy.has_killed());
        assert_eq!(policy.interrupted(Signal::INT, now), None);
        assert_eq!(policy.cause(), Some(EndReason::Interrupted(Signal::INT)));
    }

    #[test]
    fn a_signal_that_comes_while_workers_are_ended_is_not_forgotten() {
        for late in [Signal::INT, Signal::TERM, Signal::HUP] {
            let (mut policy, now) = policy(2);
            assert_eq!(policy.exited(&[end(0, Exit::Code(3))], now), None);
            assert_eq!(policy.tick(now + REPORTING_GRACE, false), Some(Signal::TERM));
            assert_eq!(policy.late_signal(), None);
            assert_eq!(policy.interrupted(late, now), (late == Signal::INT).then_some(Signal::KILL));
            policy.interrupted(Signal::QUIT, now);
            assert_eq!(policy.late_signal(), Some(late));
            assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 0 }));
        }
    }

    #[test]
    fn a_sigterm_after_ctrl_c_is_passed_on_once_and_gains_no_time() {
        let (mut policy, now) = policy(1);
        assert_eq!(policy.interrupted(Signal::INT, now), Some(Signal::INT));
        assert_eq!(policy.interrupted(Signal::TERM, now + GRACE / 2), Some(Signal::TERM));
        assert_eq!(policy.interrupted(Signal::TERM, now + GRACE / 2), None);
        assert_eq!(policy.tick(now + GRACE, false), Some(Signal::KILL));
        assert_eq!(policy.cause(), Some(EndReason::Interrupted(Signal::INT)));
    }

    #[test]
    fn no_grace_kills_at_once() {
        let mut policy = Policy::new(2, Duration::ZERO);
        let now = crate::some_time();
        assert_eq!(policy.stopped(now), Some(Signal::TERM));
        assert_eq!(policy.tick(now, false), Some(Signal::KILL));
        assert_eq!(policy.cause(), Some(EndReason::Stopped));
    }

    #[test]
    fn a_blamed_worker_that_fails_too_becomes_the_cause() {
        let (mut policy, now) = policy(3);
        assert_eq!(policy.exited(&[blaming(0, 1)], now), None);
        assert_eq!(policy.exited(&[blaming(2, 0)], now), None);
        assert_eq!(policy.exited(&[end(1, Exit::Code(3))], now), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 1 }));
    }

    #[test]
    fn one_that_is_about_to_fail_is_waited_for_but_not_for_ever() {
        let (mut policy, now) = policy(3);
        assert_eq!(policy.exited(&[blaming(0, 1)], now), None);
        assert_eq!(policy.blamed().collect::<Vec<_>>(), [1]);
        let now = now + REPORTING_GRACE;
        assert_eq!(policy.tick(now, true), None);
        assert_eq!(policy.wake_at(), Some(now + POLL_INTERVAL));
        assert_eq!(policy.exited(&[end(1, Exit::Code(101))], now + POLL_INTERVAL / 2), None);
        assert_eq!(policy.tick(now + POLL_INTERVAL, false), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 1 }));

        let (mut policy, now) = self::policy(2);
        assert_eq!(policy.exited(&[blaming(0, 1)], now), None);
        assert_eq!(policy.tick(now + FAILING_GRACE, true), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 0 }));
    }

    #[test]
    fn blame_for_one_that_has_not_failed_leads_nowhere() {
        // It still runs, it has ended well, or there is no such rank.
        for (blamed, ended_well) in [(1, false), (1, true), (9, false)] {
            let (mut policy, now) = policy(3);
            if ended_well {
                assert_eq!(policy.exited(&[end(1, OK)], now), None);
            }
            assert_eq!(policy.exited(&[blaming(0, blamed)], now), None);
            assert_eq!(policy.tick(now + REPORTING_GRACE, false), Some(Signal::TERM));
            assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 0 }));
        }
    }

    #[test]
    fn the_end_that_another_node_asks_for_leaves_time_to_fail() {
        let (mut policy, now) = policy(2);
        policy.ended_elsewhere(now);
        assert_eq!(policy.tick(now, false), None);
        assert_eq!(policy.tick(now + REPORTING_GRACE, false), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Elsewhere));

        let mut policy = Policy::new(2, GRACE);
        policy.ended_elsewhere(now);
        assert_eq!(policy.exited(&[blaming(1, 7), end(0, OK)], now), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 1 }));
    }

    #[test]
    fn who_was_lost_ends_nobody_until_the_others_are_too_few() {
        let (mut policy, now) = policy(3);
        policy.lost(end(2, Exit::Signal(Signal::KILL)), now);
        assert_eq!(policy.exited(&[], now), None);
        assert!(policy.is_running() && policy.first_failure().is_none());
        policy.too_few(now);
        assert_eq!(policy.exited(&[end(0, Exit::Code(7))], now), None);
        assert!(!policy.is_running());
        assert_eq!(policy.tick(now + REPORTING_GRACE, false), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 2 }));
    }

    #[test]
    fn what_a_job_has_recovered_from_is_not_why_it_ends() {
        // From one loss to the next, and from the last one to the end.
        let moment = RECOVERY_INTERVAL / 2;
        for (to_next, to_end, cause) in [
            (moment, moment, 3),
            (RECOVERY_INTERVAL, moment, 2),
            (moment, RECOVERY_INTERVAL, 0),
            (RECOVERY_INTERVAL, RECOVERY_INTERVAL, 0),
        ] {
            let (mut policy, now) = policy(4);
            policy.lost(end(3, Exit::Code(1)), now);
            let now = now + to_next;
            policy.lost(end(2, Exit::Code(1)), now);
            let now = now + to_end;
            policy.too_few(now);
            assert_eq!(policy.exited(&[end(0, Exit::Code(7))], now), None);
            assert_eq!(policy.tick(now + REPORTING_GRACE, false), Some(Signal::TERM));
            assert_eq!(policy.cause(), Some(EndReason::Failed { worker: cause }));
        }
    }

    #[test]
    fn a_job_that_has_lost_some_succeeds_with_the_others() {
        let (mut policy, now) = policy(2);
        policy.lost(end(0, Exit::Code(7)), now);
        assert_eq!(policy.exited(&[end(1, OK)], now), Some(Signal::TERM));
        assert!(policy.all_exited() && policy.cause().is_none());
        assert_eq!(policy.exits(), [Exit::Code(7), OK]);
    }

    #[test]
    fn those_who_blame_each_other_leave_it_with_the_first() {
        let (mut policy, now) = policy(2);
        assert_eq!(policy.exited(&[blaming(1, 0)], now), None);
        assert_eq!(policy.exited(&[blaming(0, 1)], now), Some(Signal::TERM));
        assert_eq!(policy.cause(), Some(EndReason::Failed { worker: 1 }));
    }
}
