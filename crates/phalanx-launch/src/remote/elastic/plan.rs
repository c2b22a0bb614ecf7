//! The plan of an elastic job: it carries out the decisions of the [host manager](HostManager), and reports events to
//! the host manager and to the workers.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::ElasticHosts;
use super::discovery::Discovery;
use crate::agent::{AgentConfig, Instruction};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::descriptors;
use crate::elastic::Publisher;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::exit::{Exit, Failure, Outcome, Report, Signal};
use crate::failures::Failures;
use crate::host;
use crate::host_manager::{Action, HostDecision, HostManager, Limits};
use crate::interfaces;
use crate::job::random_name;
use crate::own_address::own_address;
use crate::policy::RECOVERY_INTERVAL;
use crate::remote::address;
use crate::remote::driver::{DriverEnd, Launchers, Plan};
use crate::remote::hosts::{Host, HostList};
use crate::remote::peer::{LauncherEnd, Peer};
use crate::remote::protocol::{RemoteEvent, RemoteReport};
use crate::store::{Access, KeylessClients, TcpStoreServer, host_port};
use crate::world_size::WorldSize;

/// So many unusable answers of the discovery script, one a second, before any list of hosts end the job.
const MAX_FAILURES_BEFORE_LIST: u32 = 5;
/// How long the system may take to look up the address at which the store is served.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);

pub(in crate::remote) struct ElasticPlan {
    discovery: Option<Discovery>,
    /// Unusable answers of the script, which is asked each second.
    discovery_failures: Failures,
    /// How many answers were unusable before the first list; None once there was one.
    failures_before_list: Option<u32>,
    /// Why the last answer was no list.
    script_trouble: Option<String>,
    run_id: String,
    host_manager: HostManager,
    max_workers: u32,
    store: Option<Store>,
    exits: Vec<Exit>,
    /// Failures that the job has not recovered from: of a worker, and of a host.
    failure: Option<Failure>,
    trouble: Option<Error>,
    /// Since when it has had enough workers, without such a failure.
    enough_since: Option<Instant>,
    /// How many workers were left, if the job ends because they are too few.
    too_few: Option<u32>,
    /// Whether workers of some host were ended since all are.
    is_cut_short: bool,
    /// What was said of how the workers are ended.
    endings: Vec<RemoteEvent>,
    workers: u32,
    /// How many hosts have had a launcher, however often.
    nodes: u32,
}

/// The store of the workers.
struct Store {
    publisher: Publisher,
    host: String,
    server: TcpStoreServer,
}

impl ElasticPlan {
    pub(super) fn start(
        elastic: &ElasticHosts,
        limits: Limits,
        launchers: &mut Launchers<'_>,
    ) -> Result<Self> {
        let job = launchers.job;
        let waker = launchers.inbox.waker();
        let discovery = elastic.discovery.as_ref().map(|from| Discovery::start(from, waker)).transpose()?;
        let mut plan = Self {
            discovery,
            discovery_failures: Failures::default(),
            failures_before_list: Some(0),
            script_trouble: None,
            run_id: elastic.run_id.clone().map_or_else(random_name, Ok)?,
            host_manager: HostManager::new(limits),
            max_workers: limits.max,
            store: None,
            exits: Vec::new(),
            failure: None,
            trouble: None,
            enough_since: None,
            too_few: None,
            is_cut_short: false,
            endings: Vec::new(),
            workers: 0,
            nodes: 0,
        };
        // Before a store is served, as in `attempts::run`.
        descriptors::allow(0, limits.max.into());
        if let Some(address) = &job.master_addr {
            plan.serve(launchers, address)?;
        }
        plan.list(&job.hosts);
        Ok(plan)
    }

    fn list(&mut self, hosts: &HostList) {
        let hosts = hosts.hosts().iter().map(|host| (host.name(), host.slots()));
        self.host_manager.list(hosts, Instant::now());
    }

    /// Carries out the decisions of the host manager.
    fn decide(&mut self, launchers: &mut Launchers<'_>) -> Result<()> {
        let now = Instant::now();
        self.forget_recovered(now);
        let actions = self.host_manager.decide(now);
        self.enough_since = self.enough_since.or(Some(now)).filter(|_| self.host_manager.had_enough());
        let mut not_started = Vec::new();
        for action in actions {
            match action {
                Action::Launch { host, first, slots } => {
                    let named = Host::named(self.host_manager.name(host), slots);
                    match launchers.launch(host, named, first) {
                        Ok(()) => {
                            let count = u32::try_from(host).unwrap_or(u32::MAX).saturating_add(1);
                            self.nodes = self.nodes.max(count);
                        }
                        // This machine may lack processes or memory for a moment, and the others train.
                        Err(error) if launchers.peers.iter().any(|peer| peer.was_told_to_start) => {
                            not_started.push((host, error));
                        }
                        Err(error) => return Err(error),
                    }
                }
                Action::Replace { host, slot } => instruct(launchers, host, Instruction::Replace(slot)),
                Action::LeaveEmpty { host, slot } => instruct(launchers, host, Instruction::LeaveEmpty(slot)),
                Action::Retire { host, is_listed } => {
                    let name = self.host_manager.name(host);
                    let cause = match is_listed {
                        true => "has another number of slots in the host list",
                        false => "is no longer in the host list",
                    };
                    let text = format!("{name} {cause}: its workers are ended");
                    launchers.control.tell(Event::Warning { text: &text });
                    retire(launchers, host);
                }
                Action::Expect { workers } => {
                    self.workers = workers;
                    if let Some(store) = &mut self.store {
                        store.publisher.expect(workers);
                    }
                }
                Action::TooFew { there } => {
                    self.too_few = Some(there);
                    launchers.end_all(DriverEnd::Planned, Signal::TERM);
                }
            }
        }
        if not_started.is_empty() {
            return Ok(());
        }
        for (host, error) in not_started {
            let cause = format!("{}: {error}", self.host_manager.name(host));
            self.lose_host(launchers, host, Error::environment(cause));
        }
        // Fewer workers are expected now. None of these hosts is started again before its time.
        self.decide(launchers)
    }

    /// A host has been lost, or could not be started; the others go on.
    fn lose_host(&mut self, launchers: &mut Launchers<'_>, host: usize, error: Error) {
        let now = Instant::now();
        self.forget_recovered(now);
        let text = match self.host_manager.lost(host, now) {
            Some(pause) => format!("{error}; it is left out for {}", seconds(pause)),
            None => format!("{error}; no restart is left for it"),
        };
        launchers.control.tell(Event::Warning { text: &text });
        self.trouble.get_or_insert(error);
        self.enough_since = None;
    }

    /// Forgets the failures from which the job has [recovered](RECOVERY_INTERVAL).
    fn forget_recovered(&mut self, now: Instant) {
        let is_long = |since: Instant| now.saturating_duration_since(since) >= RECOVERY_INTERVAL;
        if self.enough_since.is_some_and(is_long) {
            (self.failure, self.trouble) = (None, None);
        }
    }

    /// Drops launchers that have not answered in time.
    fn give_up_late(launchers: &mut Launchers<'_>) {
        let now = Instant::now();
        while let Some(index) = launchers.peers.iter().position(|peer| peer.is_late(now)) {
            let error = launchers.not_answered(&[&launchers.peers[index]]);
            let peer = &mut launchers.peers[index];
            peer.end = Some(LauncherEnd::Failed(error));
            peer.connection.close();
            peer.connection.must_end_by(now);
        }
    }

    /// Serves the store, once its address is known, and tells the launchers to start that have waited for it.
    fn start_those_who_wait(&mut self, launchers: &mut Launchers<'_>) -> Result<()> {
        // Where nobody has answered, as before a script has printed a host, nothing shows at which address the hosts reach this machine.
        let is_waiting = |peer: &Peer| peer.hello.is_some() && !peer.was_told_to_start && !peer.leaves;
        if self.store.is_none()
            && launchers.peers.iter().any(is_waiting)
            && let Some(address) = self.address(launchers)
        {
            let known = launchers.known(|peer| peer.host.name());
            let warning =
                address::warning_of_router(&known, interfaces::is_own, "start the command on one of them");
            if let Some(text) = warning {
                launchers.control.tell(Event::Warning { text: &text });
            }
            self.serve(launchers, &address)?;
        }
        if let Some(store) = &self.store {
            let (host, port) = (store.host.clone(), store.server.local_addr().port());
            for index in 0..launchers.peers.len() {
                if is_waiting(&launchers.peers[index]) {
                    self.tell_to_start(launchers, index, &host, port);
                }
            }
        }
        Ok(())
    }

    fn serve(&mut self, launchers: &Launchers<'_>, host: &str) -> Result<()> {
        let job = launchers.job;
        let access = if job.open_store { KeylessClients::All } else { KeylessClients::OfThisUser };
        let credentials = Credentials { key: Some(launchers.key.clone()), ..job.credentials.clone() };
        let access = Access::to(credentials.clone(), access).telling(launchers.control.refused.refusals());
        let port = job.master_port;
        let server = match job.bind {
            Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, port), access)?,
            None => {
                TcpStoreServer::bind_to(&host_port(host, port), access, Deadline::after(RESOLVE_TIMEOUT))?
            }
        };
        let mut publisher = Publisher::start(server.reachable_addr(), &credentials, &self.run_id)?;
        if self.workers > 0 {
            publisher.expect(self.workers);
        }
        self.store = Some(Store { publisher, host: host.to_owned(), server });
        Ok(())
    }

    /// The address at which the hosts reach this machine, according to those that have answered; none, if another
    /// answer is worth waiting for.
    fn address(&self, launchers: &mut Launchers<'_>) -> Option<String> {
        let known = launchers.known(|peer| peer.host.name());
        if let Some(address) = address::seen_by_others(&known, interfaces::is_own) {
            return Some(address.to_string());
        }
        let is_waited_for = |peer: &Peer| !peer.is_here && peer.hello.is_none() && !peer.leaves;
        if launchers.peers.iter().any(is_waited_for) {
            return None;
        }
        if known.iter().any(|peer| !peer.is_here) {
            // What listens elsewhere anyway may be behind a router, and have a name there.
            let own = if launchers.job.bind.is_some() { None } else { own_address().ok() };
            return Some(own.map_or_else(host::name, |address| address.to_string()));
        }
        let stays_here = self.discovery.is_none()
            && launchers.job.hosts.hosts().iter().all(|host| launchers.job.is_this_machine(host));
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let address = if stays_here { Ok(loopback) } else { own_address() };
        // Hosts on other networks may come later.
        let address = address.unwrap_or_else(|error| {
            let text = format!(
                "{error}; hosts that come later are told the loopback, at which they do not reach this one"
            );
            launchers.control.tell(Event::Warning { text: &text });
            loopback
        });
        Some(address.to_string())
    }

    fn tell_to_start(&self, launchers: &mut Launchers<'_>, index: usize, host: &str, port: u16) {
        let nodes = u32::try_from(launchers.peers.len()).unwrap_or(u32::MAX);
        if !launchers.peers.iter().any(|peer| peer.was_told_to_start)
            && self.exits.is_empty()
            && let Ok(world_size) = WorldSize::new(self.workers.max(1))
        {
            let (restarts, max_restarts, node) = (0, 0, 0);
            launchers.control.tell(Event::Starting { restarts, max_restarts, world_size, node, nodes });
        }
        let peer = &launchers.peers[index];
        let agent = AgentConfig {
            run_id: self.run_id.clone(),
            host: host.to_owned(),
            port,
            first: peer.first,
            max_workers: self.max_workers,
            node: u32::try_from(peer.index).unwrap_or(u32::MAX),
            nodes,
        };
        launchers.tell_to_start(index, nodes, (host, port), Some(agent));
        // A launcher that answers late has missed the instruction.
        if self.host_manager.is_ending() {
            launchers.peers[index].tell_of_ending();
        }
    }

    /// An error if the script has never worked: then waiting for hosts is useless.
    fn handle_discovery(&mut self, launchers: &mut Launchers<'_>) -> Result<()> {
        while let Some(answer) = self.discovery.as_ref().and_then(Discovery::next) {
            match answer {
                // As where machines are still to be made, or the script has lost sight of them all: the last list stays valid.
                Ok(hosts) if hosts.hosts().is_empty() => {
                    self.failures_before_list = self.failures_before_list.map(|_| 0);
                    let what = match self.failures_before_list {
                        Some(_) => "no host yet: hosts are waited for, at most for --elastic-timeout",
                        None => "no host: the last list stays in use",
                    };
                    self.tell_of_script(launchers, &format!("--host-discovery-script prints {what}"));
                    self.script_trouble = Some("--host-discovery-script prints no host".to_owned());
                }
                Ok(hosts) => {
                    self.discovery_failures.end();
                    (self.failures_before_list, self.script_trouble) = (None, None);
                    self.list(&hosts);
                }
                Err(error) => {
                    self.failures_before_list = self.failures_before_list.map(|failures| failures + 1);
                    if self.failures_before_list == Some(MAX_FAILURES_BEFORE_LIST) {
                        return Err(error);
                    }
                    // The last list stays valid.
                    self.tell_of_script(launchers, &error.to_string());
                    self.script_trouble = Some(error.without_remedy().to_string());
                }
            }
        }
        Ok(())
    }

    fn tell_of_script(&mut self, launchers: &mut Launchers<'_>, text: &str) {
        if self.discovery_failures.is_worth_telling(Instant::now()) {
            launchers.control.tell(Event::Warning { text });
        }
    }

    /// A worker has failed, and its launcher waits for a decision about the slot.
    fn lose_worker(&mut self, launchers: &mut Launchers<'_>, host: usize, slot: u32, failure: &Failure) {
        let now = Instant::now();
        let on_failure = match launchers.end {
            None => {
                self.forget_recovered(now);
                self.host_manager.failed(host, slot, now)
            }
            Some(_) => HostDecision::LeaveEmpty,
        };
        let replaced_in = match on_failure {
            HostDecision::Replace { after } => Some(after),
            HostDecision::LeaveEmpty | HostDecision::ExcludeHost { .. } => {
                self.failure.get_or_insert_with(|| failure.clone());
                self.enough_since = None;
                instruct(launchers, host, Instruction::LeaveEmpty(slot));
                None
            }
        };
        let (replacements, max_replacements) = self.host_manager.restarts();
        launchers.control.tell(Event::Lost { failure, replaced_in, replacements, max_replacements });
        if let HostDecision::ExcludeHost { pause } = on_failure {
            let name = self.host_manager.name(host);
            let text =
                format!("{name}: its workers fail again and again; it is left out for {}", seconds(pause));
            launchers.control.tell(Event::Warning { text: &text });
            retire(launchers, host);
        }
    }
}

impl Plan for ElasticPlan {
    fn act(&mut self, launchers: &mut Launchers<'_>) -> Result<()> {
        Self::give_up_late(launchers);
        if launchers.end.is_some() {
            // It waits until the script has ended.
            self.discovery = None;
            return Ok(());
        }
        self.handle_discovery(launchers)?;
        self.decide(launchers)?;
        // Done afterwards: the address of the store depends on the launchers whose answers are still awaited.
        if launchers.end.is_none() { self.start_those_who_wait(launchers) } else { Ok(()) }
    }

    fn wake_at(&self, launchers: &Launchers<'_>) -> Option<Instant> {
        let silent = launchers.peers.iter().filter(|peer| peer.hello.is_none() && peer.end.is_none());
        // Once all are to end, there are no more decisions.
        let decision = self.host_manager.wake_at().filter(|_| launchers.end.is_none());
        silent.map(|peer| peer.answer_by).chain(decision).min()
    }

    fn handle_event(&mut self, launchers: &mut Launchers<'_>, index: usize, event: &RemoteEvent) {
        let peer = &mut launchers.peers[index];
        let host = peer.index;
        match event {
            RemoteEvent::Started { rank, pid, .. } => {
                if peer.slot(*rank).is_none() {
                    return;
                }
                peer.processes.insert(*rank, *pid);
                self.host_manager.up(host, Instant::now());
            }
            RemoteEvent::Exited { rank, exit, .. } => {
                let Some(slot) = peer.slot(*rank) else { return };
                if let (Some(process), Some(store)) = (peer.processes.remove(rank), &self.store) {
                    store.publisher.exited(rank.get(), process);
                }
                if exit.is_success() {
                    self.host_manager.done(host, slot);
                    // Not if it is one of a host that was told to end, while the others work on.
                    if self.host_manager.is_ending() {
                        let all = launchers.peers.iter_mut();
                        let others = all.filter(|peer| peer.was_told_to_start && !peer.leaves);
                        others.for_each(Peer::tell_of_ending);
                    }
                }
            }
            RemoteEvent::Lost { failure, .. } => {
                if let Some(slot) = peer.slot(failure.rank) {
                    self.lose_worker(launchers, host, slot, failure);
                }
                return;
            }
            RemoteEvent::Line { .. } | RemoteEvent::Logging { .. } | RemoteEvent::Warning { .. } => {}
            // Reported once for all, of which one may be further than another.
            RemoteEvent::Ending { .. } | RemoteEvent::Killing
                if launchers.end.is_some() && !self.endings.contains(event) =>
            {
                self.endings.push(event.clone());
            }
            _ => return,
        }
        launchers.control.stops |= event.tell(launchers.control.observer).is_break();
    }

    // The others go on.
    fn handle_failure(&mut self, _launchers: &mut Launchers<'_>) {}

    fn handle_loss(&mut self, launchers: &mut Launchers<'_>, peer: Peer) {
        // They have ended with their launcher, or will, and nobody sees how.
        for (&rank, &pid) in &peer.processes {
            if let Some(store) = &self.store {
                store.publisher.exited(rank.get(), pid);
            }
            launchers.control.tell(Event::Exited { rank, pid, exit: Exit::Lost });
        }
        let (host, leaves) = (peer.index, peer.leaves);
        let has_succeeded = matches!(
            &peer.end,
            Some(LauncherEnd::Reported(RemoteReport { outcome: Outcome::Succeeded, .. }))
        );
        self.is_cut_short |= launchers.end.is_some() && peer.was_told_to_start && !has_succeeded;
        let error = match peer.end {
            Some(LauncherEnd::Reported(ending)) => {
                self.exits.extend(ending.exits);
                match ending.outcome {
                    Outcome::Interrupted(signal) => {
                        Error::environment(format!("{}: its launcher was ended by {signal}", peer.host))
                    }
                    _ => return self.host_manager.ended(host),
                }
            }
            Some(LauncherEnd::Failed(error)) => error,
            None => launchers.job.diagnose(&peer),
        };
        if leaves || launchers.end.is_some() {
            return self.host_manager.ended(host);
        }
        self.lose_host(launchers, host, error);
    }

    /// Whether no worker is left, and none is expected.
    fn is_over(&self, launchers: &Launchers<'_>) -> bool {
        launchers.peers.is_empty() && (launchers.end.is_some() || self.host_manager.is_ending())
    }

    fn conclude(self: Box<Self>, launchers: Launchers<'_>) -> Result<Report> {
        let was_done = self.host_manager.have_enough_succeeded() && !self.is_cut_short;
        let outcome = match launchers.end {
            // No worker was left that could be ended.
            Some(DriverEnd::Interrupted(_) | DriverEnd::Stopped) if was_done => Outcome::Succeeded,
            Some(DriverEnd::Interrupted(signal)) => Outcome::Interrupted(signal),
            Some(DriverEnd::Stopped) => Outcome::Stopped,
            Some(DriverEnd::Broken(error)) => return Err(error),
            Some(DriverEnd::Planned) => match (self.failure, self.trouble) {
                (Some(failure), _) => Outcome::Failed(failure),
                (None, Some(error)) => return Err(error),
                (None, None) => {
                    let there = self.too_few.unwrap_or(0);
                    let trouble = self.script_trouble.map_or_else(String::new, |why| format!(": {why}"));
                    return Err(Error::timeout(format!(
                        "{there} workers run, and no others have come in time{trouble}"
                    ))
                    .with_remedy("does the host list name enough hosts? --elastic-timeout waits longer"));
                }
            },
            None => Outcome::Succeeded,
        };
        Ok(Report {
            outcome,
            exits: self.exits,
            world_size: WorldSize::new(self.workers).ok(),
            nodes: self.nodes,
            restarts: 0,
            replacements: self.host_manager.restarts().0,
            elapsed: launchers.started.elapsed(),
        })
    }
}

/// Tells a host's launcher, unless it is about to end.
fn instruct(launchers: &Launchers<'_>, host: usize, instruction: Instruction) {
    let peers = launchers.peers.iter().filter(|peer| peer.index == host && !peer.leaves);
    peers.for_each(|peer| peer.instruct(instruction));
}

/// Ends the workers of a host.
fn retire(launchers: &mut Launchers<'_>, host: usize) {
    let timeout = launchers.job.end_timeout();
    let peers = launchers.peers.iter_mut().filter(|peer| peer.index == host);
    peers.for_each(|peer| peer.tell_to_end(Signal::TERM, timeout));
}

fn seconds(pause: Duration) -> String {
    format!("{} s", (pause.as_secs_f64() * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests;
