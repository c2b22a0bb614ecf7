//! Who is ended when, and how: pure. Events and the time go in; the signal for all process groups comes out.

use std::time::{Duration, Instant};

use super::exit::{Exit, Signal};

/// How long to wait for what has got SIGKILL. Only a process stuck in the kernel takes longer than a moment.
const AFTER_KILL: Duration = Duration::from_secs(5);

/// The state of a job's workers, by index.
#[derive(Debug)]
pub(super) struct Policy {
    grace: Duration,
    exits: Vec<Option<Exit>>,
    phase: Phase,
    cause: Option<Cause>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Running,
    /// Asked to end; `swept`: with SIGTERM, which also reaches what ignores SIGINT.
    Ending {
        kill_at: Instant,
        swept: bool,
    },
    Killed {
        give_up_at: Instant,
    },
}

/// Why the job ends before all workers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Failed { worker: usize },
    Interrupted(Signal),
    Stopped,
}

impl Policy {
    pub(super) fn new(workers: usize, grace: Duration) -> Self {
        Self { grace, exits: vec![None; workers], phase: Phase::Running, cause: None }
    }

    /// Workers that were seen to have ended at the same moment. Which of them came first cannot be known: one that a
    /// signal ended is the likelier cause, since the others may have noticed its death.
    pub(super) fn exited(&mut self, batch: &[(usize, Exit)], now: Instant) -> Option<Signal> {
        for &(worker, exit) in batch {
            self.exits[worker] = Some(exit);
        }
        let failed = batch
            .iter()
            .filter(|(_, exit)| !exit.is_success())
            .min_by_key(|(worker, exit)| (!matches!(exit, Exit::Signal(_)), *worker));
        match (self.phase, failed) {
            (Phase::Running, Some(&(worker, _))) => self.end(Cause::Failed { worker }, Signal::TERM, now),
            (Phase::Running, None) if self.all_exited() => Some(self.ask(Signal::TERM, now)),
            (Phase::Ending { kill_at, swept: false }, _) if self.all_exited() => {
                self.phase = Phase::Ending { kill_at, swept: true };
                Some(Signal::TERM)
            }
            _ => None,
        }
    }

    /// This process got `signal`.
    pub(super) fn interrupted(&mut self, signal: Signal, now: Instant) -> Option<Signal> {
        match self.phase {
            Phase::Running => self.end(Cause::Interrupted(signal), signal, now),
            Phase::Ending { .. } if signal == Signal::INT => Some(self.kill(now)),
            Phase::Ending { .. } | Phase::Killed { .. } => None,
        }
    }

    /// The observer wants no more.
    pub(super) fn stopped(&mut self, now: Instant) -> Option<Signal> {
        match self.phase {
            Phase::Running => self.end(Cause::Stopped, Signal::TERM, now),
            Phase::Ending { .. } | Phase::Killed { .. } => None,
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Signal> {
        match self.phase {
            Phase::Ending { kill_at, .. } if now >= kill_at => Some(self.kill(now)),
            _ => None,
        }
    }

    /// When to [tick](Self::tick) at the latest.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running => None,
            Phase::Ending { kill_at, .. } => Some(kill_at),
            Phase::Killed { give_up_at } => Some(give_up_at),
        }
    }

    /// Has every worker ended? What they have started may still run.
    pub(super) fn all_exited(&self) -> bool {
        self.exits.iter().all(Option::is_some)
    }

    /// Is there no use in waiting for what does not die?
    pub(super) fn gives_up(&self, now: Instant) -> bool {
        matches!(self.phase, Phase::Killed { give_up_at } if now >= give_up_at)
    }

    pub(super) fn cause(&self) -> Option<Cause> {
        self.cause
    }

    pub(super) fn exits(&self) -> Vec<Exit> {
        self.exits.iter().map(|exit| exit.unwrap_or(Exit::Lost)).collect()
    }

    fn end(&mut self, cause: Cause, signal: Signal, now: Instant) -> Option<Signal> {
        self.cause = Some(cause);
        Some(self.ask(signal, now))
    }

    fn ask(&mut self, signal: Signal, now: Instant) -> Signal {
        self.phase = Phase::Ending { kill_at: now + self.grace, swept: signal == Signal::TERM };
        signal
    }

    fn kill(&mut self, now: Instant) -> Signal {
        self.phase = Phase::Killed { give_up_at: now + AFTER_KILL };
        Signal::KILL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(30);
    const OK: Exit = Exit::Code(0);

    fn policy(workers: usize) -> (Policy, Instant) {
        (Policy::new(workers, GRACE), Instant::now())
    }

    #[test]
    fn early_success_ends_nobody_and_the_last_sweeps_up() {
        let (mut policy, now) = policy(2);
        assert_eq!(policy.exited(&[(0, OK)], now), None);
        assert_eq!(policy.exited(&[(1, OK)], now), Some(Signal::TERM));
        assert!(policy.all_exited() && policy.cause().is_none());
    }

    #[test]
    fn the_first_failure_ends_the_others_and_stays_the_cause() {
        let (mut policy, now) = policy(3);
        assert_eq!(policy.exited(&[(2, Exit::Code(3))], now), Some(Signal::TERM));
        assert_eq!(policy.exited(&[(0, Exit::Code(1))], now), None);
        assert_eq!(policy.tick(now + GRACE / 2), None);
        assert_eq!(policy.tick(now + GRACE), Some(Signal::KILL));
        assert_eq!(policy.tick(now + GRACE), None);
        assert_eq!(policy.cause(), Some(Cause::Failed { worker: 2 }));
        assert!(!policy.gives_up(now + GRACE));
        assert!(policy.gives_up(now + GRACE + AFTER_KILL));
        assert_eq!(policy.exits(), [Exit::Code(1), Exit::Lost, Exit::Code(3)]);
    }

    #[test]
    fn of_failures_at_the_same_moment_a_signal_is_the_cause() {
        let (mut policy, now) = policy(3);
        policy.exited(&[(0, Exit::Code(1)), (2, Exit::Signal(Signal::KILL)), (1, Exit::Code(1))], now);
        assert_eq!(policy.cause(), Some(Cause::Failed { worker: 2 }));
    }

    #[test]
    fn ctrl_c_is_passed_on_then_sweeps_and_kills_the_second_time() {
        let (mut policy, now) = policy(1);
        assert_eq!(policy.interrupted(Signal::INT, now), Some(Signal::INT));
        assert_eq!(policy.interrupted(Signal::HUP, now), None);
        assert_eq!(policy.exited(&[(0, Exit::Code(1))], now), Some(Signal::TERM));
        assert_eq!(policy.interrupted(Signal::INT, now), Some(Signal::KILL));
        assert_eq!(policy.interrupted(Signal::INT, now), None);
        assert_eq!(policy.cause(), Some(Cause::Interrupted(Signal::INT)));
    }

    #[test]
    fn no_grace_kills_at_once() {
        let mut policy = Policy::new(2, Duration::ZERO);
        let now = Instant::now();
        assert_eq!(policy.stopped(now), Some(Signal::TERM));
        assert_eq!(policy.tick(now), Some(Signal::KILL));
        assert_eq!(policy.cause(), Some(Cause::Stopped));
    }
}
