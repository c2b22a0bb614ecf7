//! A job with a fixed list of hosts: it needs all of them. The launchers agree among themselves, at the store of node
//! 0.
//!
//! This is not an elastic job with minimum = maximum, and node 0 serves the stores, for two reasons. The hosts must
//! reach each other and need not reach the command, which may be behind a router through which only ssh leads to them.
//! And a restart ends all workers and starts all again, on which the launchers agree through their log, whoever has
//! started them; the driver of an elastic job replaces single workers.

use std::time::{Duration, Instant};

use super::address;
use super::driver::{DriverEnd, Launchers, Plan};
use super::peer::{LauncherEnd, Peer};
use super::protocol::{RemoteEvent, RemoteReport};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::exit::{Outcome, Report, Signal};
use crate::host;
use crate::interfaces;
use crate::world_size::WorldSize;

/// How long a launcher that the others have lost may take to report its own end.
const LOST_GRACE: Duration = Duration::from_secs(5);

/// The hosts of a job, in their order, all of which are needed.
pub(super) struct FixedHosts {
    stage: Stage,
    /// How the launchers ended whose connections are closed, by the numbers of their hosts.
    ended: Vec<(usize, LauncherEnd)>,
    /// The last start of workers that was shown.
    shown: Option<u32>,
}

/// The progress of the launchers.
#[derive(Clone, Debug)]
enum Stage {
    /// All have to answer.
    Answering(Deadline),
    /// Node 0 has to serve the store, at this host.
    Serving(Deadline, String),
    Running,
}

impl FixedHosts {
    /// Starts a launcher on each host.
    pub(super) fn start(launchers: &mut Launchers<'_>) -> Result<Self> {
        let job = launchers.job;
        for (index, host) in job.hosts.hosts().iter().enumerate() {
            launchers.launch(index, host.clone(), 0)?;
        }
        let stage = Stage::Answering(Deadline::after(job.start_timeout));
        Ok(Self { stage, ended: Vec::new(), shown: None })
    }

    /// Whose launchers all run their workers.
    #[cfg(test)]
    pub(super) fn running(self) -> Self {
        Self { stage: Stage::Running, ..self }
    }

    /// A launcher that reports how the job has failed speaks for all. One that cannot hear it, and whose connection stands all the same,
    /// as srun's to a node that was cut off, is not waited for longer than the end of its workers may take; and one that the others
    /// have lost only for a moment, in which it may still report its own end.
    fn limit_the_end(&self, launchers: &mut Launchers<'_>) {
        let (lost, has_failed) = self.reported(launchers);
        if has_failed {
            let now = Instant::now();
            let timeout = launchers.job.end_timeout();
            for peer in launchers.peers.iter_mut().filter(|peer| peer.end.is_none()) {
                let is_lost = lost.contains(&peer.index);
                peer.connection.must_end_by(now + if is_lost { LOST_GRACE } else { timeout });
            }
        }
    }

    /// The nodes that were lost, according to the launchers that have ended, and whether any of those has not succeeded.
    fn reported(&self, launchers: &Launchers<'_>) -> (Vec<usize>, bool) {
        let ends = self.ended.iter().map(|(_, end)| end);
        let (mut lost, mut has_failed) = (Vec::new(), false);
        for end in ends.chain(launchers.peers.iter().filter_map(|peer| peer.end.as_ref())) {
            has_failed |= match end {
                LauncherEnd::Reported(RemoteReport { outcome: Outcome::NodeFailed(failure), .. }) => {
                    lost.extend(failure.node.and_then(|node| usize::try_from(node).ok()));
                    true
                }
                LauncherEnd::Reported(report) => !matches!(report.outcome, Outcome::Succeeded),
                LauncherEnd::Failed(_) => true,
            };
        }
        (lost, has_failed)
    }

    /// The launchers' ends, by the numbers of their hosts; a launcher that was lost has none.
    fn ends(&mut self, launchers: &mut Launchers<'_>) -> Vec<(usize, LauncherEnd)> {
        let mut ends = std::mem::take(&mut self.ended);
        launchers.peers.iter_mut().for_each(|peer| peer.connection.kill());
        ends.extend(launchers.peers.drain(..).filter_map(|peer| Some((peer.index, peer.end?))));
        ends.sort_by_key(|(index, _)| *index);
        ends
    }
}

impl Plan for FixedHosts {
    /// Tells every launcher what to start.
    fn act(&mut self, launchers: &mut Launchers<'_>) -> Result<()> {
        let bringing_up = !matches!(self.stage, Stage::Running);
        let any_has_ended = !self.ended.is_empty() || launchers.peers.iter().any(|peer| peer.end.is_some());
        if bringing_up && any_has_ended {
            // The other launchers would wait for their instructions.
            launchers.end_all(DriverEnd::Planned, Signal::TERM);
        }
        if launchers.end.is_some() {
            self.stage = Stage::Running;
        }
        self.limit_the_end(launchers);
        let nodes = launchers.job.hosts.hosts().len() as u32;
        match &self.stage {
            Stage::Answering(deadline) => {
                let missing: Vec<&Peer> =
                    launchers.peers.iter().filter(|peer| peer.hello.is_none()).collect();
                if !missing.is_empty() {
                    let late = deadline.has_passed().then(|| launchers.not_answered(&missing));
                    return late.map_or(Ok(()), Err);
                }
                let host = match &launchers.job.master_addr {
                    Some(address) => address.clone(),
                    None => {
                        warn_of_router(launchers);
                        node_0_address(launchers)
                    }
                };
                launchers.tell_to_start(0, nodes, (&host, launchers.job.master_port), None);
                let deadline = Deadline::after(launchers.job.start_timeout);
                self.stage = if nodes > 1 { Stage::Serving(deadline, host) } else { Stage::Running };
            }
            Stage::Serving(deadline, host) => match launchers.peers[0].serves_at {
                Some(port) => {
                    for node in 1..launchers.peers.len() {
                        launchers.tell_to_start(node, nodes, (host, port), None);
                    }
                    self.stage = Stage::Running;
                }
                None if deadline.has_passed() => {
                    let remedy = "does it find its own address, or does --master-addr name another host's?";
                    return Err(launchers.too_late(
                        &[&launchers.peers[0]],
                        "does not serve the store",
                        remedy,
                    ));
                }
                None => {}
            },
            Stage::Running => {}
        }
        Ok(())
    }

    fn wake_at(&self, _launchers: &Launchers<'_>) -> Option<Instant> {
        match &self.stage {
            Stage::Answering(deadline) | Stage::Serving(deadline, _) => Some(deadline.instant()),
            Stage::Running => None,
        }
    }

    /// An event that all nodes report is shown once.
    fn handle_event(&mut self, launchers: &mut Launchers<'_>, index: usize, event: &RemoteEvent) {
        let reporter = launchers.peers.iter().position(|peer| peer.end.is_none());
        let is_shown = match event {
            RemoteEvent::Line { .. }
            | RemoteEvent::Started { .. }
            | RemoteEvent::Exited { .. }
            | RemoteEvent::Logging { .. }
            | RemoteEvent::Warning { .. } => true,
            // Of a signal that the user has sent, and not this command by itself.
            RemoteEvent::Lingering => matches!(launchers.end, Some(DriverEnd::Interrupted(_))),
            // Shown before the first line of the first node that starts.
            RemoteEvent::Starting { restarts, .. } => self.shown.replace(*restarts) != Some(*restarts),
            _ => reporter == Some(index),
        };
        if is_shown {
            launchers.control.stops |= event.tell(launchers.control.observer).is_break();
        }
    }

    fn handle_failure(&mut self, launchers: &mut Launchers<'_>) {
        launchers.end_all(DriverEnd::Planned, Signal::TERM);
    }

    fn handle_loss(&mut self, launchers: &mut Launchers<'_>, peer: Peer) {
        match peer.end {
            Some(end) => self.ended.push((peer.index, end)),
            // A launcher that was told to end may end without a report.
            None if launchers.end.is_some() => {}
            // The others' report says why.
            None if self.reported(launchers).0.contains(&peer.index) => {
                launchers.end_all(DriverEnd::Planned, Signal::TERM);
            }
            None => {
                let error = launchers.job.diagnose(&peer);
                launchers.end_all(DriverEnd::Broken(error), Signal::TERM);
            }
        }
    }

    fn is_over(&self, launchers: &Launchers<'_>) -> bool {
        launchers.peers.iter().all(|peer| peer.end.is_some())
    }

    /// How the job ended, according to all reports.
    fn conclude(mut self: Box<Self>, mut launchers: Launchers<'_>) -> Result<Report> {
        let mut report = Report {
            outcome: Outcome::Succeeded,
            exits: Vec::new(),
            world_size: None,
            nodes: launchers.started_peers as u32,
            restarts: 0,
            replacements: 0,
            elapsed: launchers.started.elapsed(),
        };
        let mut failed: Option<Error> = None;
        let ends = self.ends(&mut launchers);
        let all_have_reported = ends.len() == launchers.started_peers;
        for (_, end) in ends {
            match end {
                LauncherEnd::Reported(ending) => {
                    report.exits.extend(ending.exits);
                    report.restarts = report.restarts.max(ending.restarts);
                    report.replacements += ending.replacements;
                    report.world_size = ending.world_size.and_then(|size| WorldSize::new(size).ok());
                    if severity(&ending.outcome) > severity(&report.outcome) {
                        report.outcome = ending.outcome;
                    }
                }
                LauncherEnd::Failed(error) => failed = failed.or(Some(error)),
            }
        }
        // By the name that the user has given, which need not be its own.
        if let Outcome::NodeFailed(failure) = &mut report.outcome
            && let Some(node) = failure.node.and_then(|node| usize::try_from(node).ok())
            && let Some(host) = launchers.job.hosts.hosts().get(node)
        {
            host.name().clone_into(&mut failure.host);
        }
        // A signal, or a reader that has closed its pipe, may come when the launchers know how the job has ended. Each reports what it knew first.
        let was_decided = match report.outcome {
            Outcome::Failed(_) => true,
            Outcome::Succeeded => all_have_reported && failed.is_none(),
            Outcome::NodeFailed(_) | Outcome::Interrupted(_) | Outcome::Stopped => false,
        };
        let error = match launchers.end {
            Some(DriverEnd::Interrupted(_) | DriverEnd::Stopped) if was_decided => None,
            Some(DriverEnd::Interrupted(signal)) => {
                report.outcome = Outcome::Interrupted(signal);
                None
            }
            Some(DriverEnd::Stopped) => {
                report.outcome = Outcome::Stopped;
                None
            }
            Some(DriverEnd::Broken(error)) => Some(error),
            Some(DriverEnd::Planned) | None => failed,
        };
        match error {
            Some(error) if !matches!(report.outcome, Outcome::Failed(_)) => Err(error),
            _ => Ok(report),
        }
    }
}

/// The address at which node 0 is reached.
fn node_0_address(launchers: &Launchers<'_>) -> String {
    let own = host::name();
    // Other hosts would resolve "localhost" to themselves.
    let known = launchers.known(|peer| if peer.is_here { &own } else { peer.host.address() });
    address::of_node_0(&known, interfaces::is_own)
}

/// Says so, if this machine is node 0 and the others may not reach it.
fn warn_of_router(launchers: &mut Launchers<'_>) {
    let known = launchers.known(|peer| peer.host.name());
    if known.first().is_some_and(|node| node.is_here)
        && let Some(text) = address::warning_of_router(
            &known,
            interfaces::is_own,
            "name another host first, which they reach",
        )
    {
        launchers.control.tell(Event::Warning { text: &text });
    }
}

/// Of the nodes' reports, the one nearest to the cause counts.
fn severity(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Succeeded => 0,
        Outcome::Stopped => 1,
        Outcome::Interrupted(_) => 2,
        Outcome::NodeFailed(_) => 3,
        Outcome::Failed(_) => 4,
    }
}
