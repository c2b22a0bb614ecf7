//! A job is a sequence of attempts: workers are started, and started again after a failure as long as restarts are
//! left.

use std::time::{Duration, Instant};

use phalanx_sys::signal::{Catcher, ignore_file_size_signal, keep_exit_status_of_children};
use rustix::process::Signal as Raw;

use super::cluster::Cluster;
use super::descriptors;
use super::event::{Event, Observer};
use super::exit::{Outcome, Report, Signal};
use super::job::Job;
use super::key_file::KeyFile;
use super::logs::JobLogs;
use super::nodes::{AfterAttempt, AgentNode, AttemptEnd, Gathered, MultiNode, Nodes, SingleNode};
use super::refusals::Refused;
use super::supervisor;
use crate::error::{Error, Result};
use crate::world_size::MAX_WORLD_SIZE;

const NO_KEY: &str = "this job has no key: any process that reaches its ports can join it. Make one with `phalanx keygen \
                      FILE`, copy it to every node, and start each launcher with --job-key-file FILE";

pub(super) fn run(job: &Job, observer: &mut dyn Observer) -> Result<Report> {
    let started = Instant::now();
    let mut control = Control::new(observer)?;
    let key = job.key_of_run()?;
    let lent = key.as_ref().map(KeyFile::new).transpose()?;
    let job = &job.with_key(key, lent.as_ref());
    if lent.is_none() {
        control.tell(Event::Warning { text: NO_KEY });
    }
    // Before a store is served, which admits the fewer clients at a time the lower the limit is. Usually other nodes have as many workers.
    let nodes = job.cluster.as_ref().map_or(1, |cluster| cluster.max_nodes);
    let ranks = u64::from(job.workers.get()) * u64::from(nodes);
    descriptors::allow(job.workers.count(), ranks.min(MAX_WORLD_SIZE.into()));
    let run_id = job.name_of_run()?;
    let logs = job.logs.as_ref().map(|logs| logs.open(&run_id)).transpose()?;
    if let Some(logs) = &logs {
        control.tell(Event::Logging { host: None, folder: logs.folder() });
    }
    let mut nodes: Box<dyn Nodes + '_> = match (&job.agent, &job.cluster) {
        (Some(agent), _) => Box::new(AgentNode::new(job, agent)),
        (None, Some(cluster)) => Box::new(MultiNode::new(job, cluster, run_id, control.refused.refusals())?),
        (None, None) => Box::new(SingleNode::new(job, run_id)),
    };
    let mut report = Report {
        outcome: Outcome::Stopped,
        exits: Vec::new(),
        world_size: None,
        nodes: 1,
        restarts: 0,
        replacements: 0,
        elapsed: Duration::ZERO,
    };
    let outcome = run_attempts(job, logs.as_ref(), &mut *nodes, &mut control, &mut report);
    // The other nodes receive all messages of this one.
    let mut is_interrupted = matches!(outcome, Ok(Outcome::Interrupted(_)));
    nodes.finish(&mut control, is_interrupted);
    drop(nodes);
    // Also if the job cannot go on: then the last lines say most. A second signal ends that wait, too.
    let mut goes_on = || control.read_end().is_none() || !std::mem::replace(&mut is_interrupted, true);
    if let Some(text) = logs.and_then(|logs| logs.finish(&mut goes_on)) {
        control.tell(Event::Warning { text: &text });
    }
    report.outcome = outcome?;
    report.elapsed = started.elapsed();
    Ok(report)
}

/// Starts the workers until no other attempt follows. Returns how the job has ended.
fn run_attempts(
    job: &Job,
    logs: Option<&JobLogs>,
    nodes: &mut dyn Nodes,
    control: &mut Control<'_>,
    report: &mut Report,
) -> Result<Outcome> {
    loop {
        let gathered = nodes.gather(control).inspect_err(|error| nodes.give_up(error));
        let placement = match gathered? {
            Gathered::Placed(placement) => placement,
            Gathered::Over(outcome) => return Ok(outcome),
        };
        control.tell(Event::Starting {
            restarts: placement.restarts,
            max_restarts: job.restarts_allowed(),
            world_size: placement.world_size,
            node: placement.node,
            nodes: placement.nodes,
        });
        let has_begun = report.world_size.is_some();
        let attempt = supervisor::run(job, &placement, logs, nodes, control, has_begun)
            .inspect_err(|error| nodes.give_up(error))?;
        report.exits = attempt.exits;
        report.world_size = Some(placement.world_size);
        report.nodes = placement.nodes;
        report.restarts = placement.restarts;
        report.replacements += attempt.replacements;
        let is_last = placement.restarts >= job.restarts_allowed();
        let is_fixed = job.cluster.as_ref().is_none_or(Cluster::is_fixed);
        let end =
            with_late_end(attempt.end, late_end(attempt.late_signal, control.stops), (is_last, is_fixed));
        let sent_elsewhere = attempt.late_signal.filter(|_| matches!(end, AttemptEnd::Elsewhere));
        let next = after_late_signal(nodes.after_attempt(end, control), sent_elsewhere)?;
        let next = match (next, late_end(attempt.late_signal, control.stops)) {
            // No restart was left, and another attempt costs none, as after a node that has left. Or the observer does not want one.
            (AfterAttempt::Restart, Some(late)) => nodes.after_attempt(late, control)?,
            (next, _) => next,
        };
        match next {
            AfterAttempt::Restart => {}
            AfterAttempt::Over(outcome) => return Ok(outcome),
        }
    }
}

/// How the job ends where a signal has come, or the observer has asked for the end, while the workers were being ended.
fn late_end(late_signal: Option<Signal>, stops: bool) -> Option<AttemptEnd> {
    late_signal.map(AttemptEnd::Interrupted).or(stops.then_some(AttemptEnd::Stopped))
}

/// The end of an attempt with what came while its workers were being ended: whoever has sent a signal, or asked for the end, wants no other
/// attempt. If none follows a failure, the failure is how the job has ended, on this node or on another; unless the number of nodes `is_fixed`,
/// the others may go on when this one leaves.
fn with_late_end(end: AttemptEnd, late: Option<AttemptEnd>, (is_last, is_fixed): (bool, bool)) -> AttemptEnd {
    match (end, late) {
        (AttemptEnd::Failed(..), Some(late)) if !is_last => late,
        (AttemptEnd::Elsewhere, Some(late)) if !(is_last && is_fixed) => late,
        (end, _) => end,
    }
}

/// What follows an attempt that has ended because of another node, if `late_signal` came while the workers were being ended. If that node
/// was told to end, or is gone, so it is with this one.
fn after_late_signal(next: Result<AfterAttempt>, late_signal: Option<Signal>) -> Result<AfterAttempt> {
    match (next, late_signal) {
        (Ok(AfterAttempt::Over(Outcome::NodeFailed(_))) | Err(_), Some(signal)) => {
            Ok(AfterAttempt::Over(Outcome::Interrupted(signal)))
        }
        (next, _) => next,
    }
}

/// What lasts longer than an attempt: the signals of this process, and the observer.
pub(super) struct Control<'a> {
    // None if a job in another thread handles the signals.
    pub(super) signals: Option<Catcher>,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) refused: Refused,
    /// Whether the observer has asked for the end; it does so for good.
    pub(super) stops: bool,
}

impl<'a> Control<'a> {
    pub(super) fn new(observer: &'a mut dyn Observer) -> Result<Self> {
        keep_exit_status_of_children()
            .map_err(|error| Error::io("SIGCHLD cannot be set to its default", error))?;
        // The workers inherit it: what they and this launcher write may be limited (`ulimit -f`).
        ignore_file_size_signal().map_err(|error| Error::io("SIGXFSZ cannot be ignored", error))?;
        let caught = [Raw::INT, Raw::TERM, Raw::HUP, Raw::QUIT, Raw::TSTP, Raw::CONT, Raw::USR1, Raw::USR2];
        let signals = Catcher::install(&caught.map(Raw::as_raw))
            .map_err(|error| Error::io("cannot catch signals", error))?;
        Ok(Self { signals, observer, refused: Refused::new()?, stops: false })
    }

    pub(super) fn tell(&mut self, event: Event<'_>) {
        self.stops |= self.observer.observe(event).is_break();
    }

    /// Reports a client that a store has refused.
    pub(super) fn tell_refusal(&mut self) {
        if let Some(text) = self.refused.read() {
            self.tell(Event::Warning { text: &text });
        }
    }

    pub(super) fn read_signal(&mut self) -> Option<i32> {
        self.signals.as_mut().and_then(Catcher::read)
    }

    /// Stops this process, as Ctrl-Z does where nobody catches it.
    pub(super) fn stop(&self) {
        // What cannot be stopped goes on.
        let _ = self.signals.as_ref().map(Catcher::stop);
    }

    /// A signal that ends this launcher, where no worker runs that would get it.
    pub(super) fn read_end(&mut self) -> Option<Signal> {
        while let Some(number) = self.read_signal() {
            match Raw::from_named_raw(number) {
                Some(Raw::TSTP) => self.stop(),
                Some(Raw::CONT | Raw::USR1 | Raw::USR2) => {}
                _ => return Some(Signal::new(number)),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Failure;

    #[test]
    fn a_signal_does_not_hide_the_failure_after_which_no_attempt_follows() {
        let elsewhere = |signal, job| with_late_end(AttemptEnd::Elsewhere, late_end(signal, false), job);
        assert!(matches!(elsewhere(Some(Signal::TERM), (true, true)), AttemptEnd::Elsewhere));
        for job in [(false, true), (true, false)] {
            assert!(matches!(elsewhere(Some(Signal::TERM), job), AttemptEnd::Interrupted(Signal::TERM)));
        }
        assert!(matches!(elsewhere(None, (false, true)), AttemptEnd::Elsewhere));
        let late = late_end(Some(Signal::TERM), true);
        let succeeded = with_late_end(AttemptEnd::Succeeded, late, (false, true));
        assert!(matches!(succeeded, AttemptEnd::Succeeded));
    }

    #[test]
    fn an_observer_that_asks_late_for_the_end_gets_no_other_attempt() {
        let failed = || AttemptEnd::Failed(Failure::unknown(3), None);
        let end = |end, is_last| with_late_end(end, late_end(None, true), (is_last, true));
        assert!(matches!(end(failed(), false), AttemptEnd::Stopped));
        assert!(matches!(end(AttemptEnd::Elsewhere, false), AttemptEnd::Stopped));
        assert!(matches!(end(failed(), true), AttemptEnd::Failed(..)));
        assert!(matches!(late_end(Some(Signal::INT), true), Some(AttemptEnd::Interrupted(Signal::INT))));
        assert!(late_end(None, false).is_none());
    }

    #[test]
    fn who_is_told_to_end_as_another_node_is_ends_by_its_own_signal() {
        let gone = || Err(Error::aborted("the launchers' store is gone"));
        let is_interrupted =
            |next| matches!(next, Ok(AfterAttempt::Over(Outcome::Interrupted(Signal::TERM))));
        assert!(is_interrupted(after_late_signal(gone(), Some(Signal::TERM))));
        assert!(after_late_signal(gone(), None).is_err());
        let restart = after_late_signal(Ok(AfterAttempt::Restart), Some(Signal::TERM));
        assert!(matches!(restart, Ok(AfterAttempt::Restart)));
    }
}
