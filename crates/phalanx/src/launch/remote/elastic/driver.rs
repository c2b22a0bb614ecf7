//! The driver of an elastic job: it starts launchers, sends them the decisions of the [host manager](HostManager), and
//! reports events to the host manager and to the workers.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::process::Signal as Raw;

use super::ElasticHosts;
use super::discovery::Discovery;
use super::host_manager::{Action, Fate, HostManager};
use super::peer::{End, Peer};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::elastic::Publisher;
use crate::error::{Error, Result};
use crate::host;
use crate::key::JobKey;
use crate::launch::agent::{AgentConfig, Instruction};
use crate::launch::attempts::Control;
use crate::launch::event::{Event, Observer};
use crate::launch::exit::{Exit, Failure, Outcome, Report, Signal};
use crate::launch::job::random_name;
use crate::launch::remote::address::{self, Known};
use crate::launch::remote::connection::{Connection, Heard};
use crate::launch::remote::environment::surroundings;
use crate::launch::remote::here::is_ours;
use crate::launch::remote::hosts::{Host, HostList};
use crate::launch::remote::inbox::Inbox;
use crate::launch::remote::node::version;
use crate::launch::remote::protocol::{FromLauncher, LauncherConfig, News, SentKey, ToLauncher};
use crate::launch::remote::{RemoteJob, is_this_machine, keep};
use crate::rendezvous;
use crate::store::{Access, Strangers, TcpStoreServer, host_port};
use crate::world_size::WorldSize;

/// How long the system may take to look up the address at which the store is served.
const LOOK_UP: Duration = Duration::from_secs(30);
/// How long a launcher may take to end that has not been told to start anything.
const UNWANTED: Duration = Duration::from_secs(2);

pub(super) struct ElasticDriver<'a> {
    job: &'a RemoteJob,
    discovery: Option<Discovery>,
    /// Could its last answer not be used?
    discovery_fails: bool,
    key: JobKey,
    run_id: String,
    host_manager: HostManager,
    most: u32,
    surroundings: ToLauncher,
    /// Launchers that are there, on their way, or about to end.
    peers: Vec<Peer>,
    started_peers: usize,
    store: Option<Store>,
    inbox: Inbox,
    control: Control<'a>,
    started: Instant,
    exits: Vec<Exit>,
    /// Failures that were not made good: of a worker, and of a host.
    failure: Option<Failure>,
    trouble: Option<Error>,
    /// Why all are ended.
    end: Option<Cause>,
    workers: u32,
}

/// Where the workers meet.
struct Store {
    publisher: Publisher,
    host: String,
    server: TcpStoreServer,
}

enum Cause {
    Interrupted(Signal),
    Stopped,
    TooFew(u32),
    Broken(Error),
}

impl<'a> ElasticDriver<'a> {
    pub(super) fn start(
        job: &'a RemoteJob,
        elastic: &ElasticHosts,
        observer: &'a mut dyn Observer,
    ) -> Result<Self> {
        let limits = elastic.limits(job)?;
        let inbox = Inbox::new()?;
        let discovery =
            elastic.discovery.as_ref().map(|from| Discovery::start(from, inbox.bell())).transpose()?;
        let mut driver = Self {
            job,
            discovery,
            discovery_fails: false,
            key: job.credentials.key.clone().map_or_else(JobKey::generate, Ok)?,
            run_id: elastic.run_id.clone().map_or_else(random_name, Ok)?,
            host_manager: HostManager::new(limits),
            most: limits.max,
            surroundings: surroundings()?,
            peers: Vec::new(),
            started_peers: 0,
            store: None,
            inbox,
            control: Control::new(observer)?,
            started: Instant::now(),
            exits: Vec::new(),
            failure: None,
            trouble: None,
            end: None,
            workers: 0,
        };
        if let Some(address) = &job.master_addr {
            driver.serve(address)?;
        }
        driver.name(&job.hosts);
        Ok(driver)
    }

    /// Until nothing is left of the job, on any host.
    pub(super) fn run(mut self) -> Result<Report> {
        loop {
            self.act();
            if self.is_over() {
                return self.conclude();
            }
            let timeout = self.timeout();
            let connections = self.peers.iter().map(|peer| &peer.connection);
            self.inbox.wait(&mut self.control, connections, timeout);
            self.handle_signals();
            while let Some((id, heard)) = self.inbox.next(&mut self.control) {
                self.handle(id, heard);
            }
            self.handle_discovery();
            self.control.tell_refusal();
            if std::mem::take(&mut self.control.stops) {
                self.end_all(Cause::Stopped, Signal::TERM);
            }
            self.look();
        }
    }

    /// Is no worker left, and none expected?
    fn is_over(&self) -> bool {
        self.peers.is_empty() && (self.end.is_some() || self.host_manager.is_ending())
    }

    fn timeout(&self) -> Duration {
        let silent = self.peers.iter().filter(|peer| peer.hello.is_none() && peer.end.is_none());
        // Once all are to end, nothing is decided any more.
        let decision = self.host_manager.wake_at().filter(|_| self.end.is_none());
        let wake_at = silent.map(|peer| peer.answer_by).chain(decision).min();
        wake_at.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    // What the host manager decides.

    fn act(&mut self) {
        if self.end.is_some() {
            return;
        }
        for action in self.host_manager.decide(Instant::now()) {
            let done = match action {
                Action::Launch { host, first, slots } => self.launch(host, first, slots),
                Action::Replace { host, place } => {
                    self.say(host, Instruction::Replace(place));
                    Ok(())
                }
                Action::Vacate { host, place } => {
                    self.say(host, Instruction::Vacate(place));
                    Ok(())
                }
                Action::Retire { host } => {
                    let text = format!(
                        "{} is no longer listed so: its workers are ended",
                        self.host_manager.name(host)
                    );
                    self.control.tell(Event::Warning { text: &text });
                    self.retire(host);
                    Ok(())
                }
                Action::Expect { workers } => {
                    self.workers = workers;
                    if let Some(store) = &mut self.store {
                        store.publisher.expect(workers);
                    }
                    Ok(())
                }
                Action::TooFew { there } => {
                    self.end_all(Cause::TooFew(there), Signal::TERM);
                    Ok(())
                }
            };
            if let Err(error) = done {
                self.end_all(Cause::Broken(error), Signal::TERM);
            }
        }
    }

    fn launch(&mut self, index: usize, first: u32, slots: u32) -> Result<()> {
        let host = Host::named(self.host_manager.name(index), slots);
        let id = self.started_peers;
        let connection = Connection::start(self.job.command(&host), self.inbox.ears(id))?;
        self.started_peers += 1;
        connection.order(self.surroundings.clone());
        self.peers.push(Peer {
            id,
            index,
            is_here: is_this_machine(&host),
            host,
            connection,
            answer_by: Deadline::after(self.job.start_timeout).instant(),
            hello: None,
            first,
            slots,
            was_told_to_start: false,
            leaves: false,
            end: None,
            processes: Default::default(),
            stderr: VecDeque::new(),
        });
        Ok(())
    }

    fn say(&self, host: usize, instruction: Instruction) {
        self.peers
            .iter()
            .filter(|peer| peer.index == host && !peer.leaves)
            .for_each(|peer| peer.say(instruction));
    }

    fn retire(&mut self, host: usize) {
        let patience = self.job.patience();
        let peers = self.peers.iter_mut().filter(|peer| peer.index == host);
        peers.for_each(|peer| tell_to_end(peer, Signal::TERM, patience));
    }

    fn end_all(&mut self, cause: Cause, signal: Signal) {
        self.end.get_or_insert(cause);
        let patience = self.job.patience();
        self.peers.iter_mut().for_each(|peer| tell_to_end(peer, signal, patience));
        // Afterwards: it waits until the script has ended.
        self.discovery = None;
    }

    /// These are the hosts now.
    fn name(&mut self, hosts: &HostList) {
        let hosts = hosts.hosts().iter().map(|host| (host.name(), host.slots()));
        self.host_manager.list(hosts, Instant::now());
    }

    // The store.

    /// Serves it, once it is known at which address, and tells those to start who have waited for that.
    fn start_those_who_wait(&mut self) {
        if self.end.is_some() {
            return;
        }
        if self.store.is_none()
            && let Some(address) = self.address()
            && let Err(error) = self.serve(&address)
        {
            self.end_all(Cause::Broken(error), Signal::TERM);
            return;
        }
        if let Some(store) = &self.store {
            let (host, port) = (store.host.clone(), store.server.local_addr().port());
            for index in 0..self.peers.len() {
                let peer = &self.peers[index];
                if peer.hello.is_some() && !peer.was_told_to_start && !peer.leaves {
                    self.tell_to_start(index, &host, port);
                }
            }
        }
    }

    fn serve(&mut self, host: &str) -> Result<()> {
        let access = if self.job.open_store { Strangers::All } else { Strangers::OfThisUser };
        let credentials = Credentials { key: Some(self.key.clone()), ..self.job.credentials.clone() };
        let access = Access::to(credentials.clone(), access).telling(self.control.refused.refusals());
        let port = self.job.master_port;
        let server = match self.job.bind {
            Some(address) => TcpStoreServer::bind_anywhere(SocketAddr::new(address, port), access)?,
            None => TcpStoreServer::bind_to(&host_port(host, port), access, Deadline::after(LOOK_UP))?,
        };
        let mut publisher = Publisher::start(server.reachable_addr(), &credentials, &self.run_id)?;
        if self.workers > 0 {
            publisher.expect(self.workers);
        }
        self.store = Some(Store { publisher, host: host.to_owned(), server });
        Ok(())
    }

    /// Where the hosts find this machine, as far as they have answered; none, if it is worth waiting for another answer.
    fn address(&self) -> Option<String> {
        let known: Vec<Known<'_>> = self
            .peers
            .iter()
            .map(|peer| Known {
                name: peer.host.name(),
                is_here: peer.is_here,
                route: peer.hello.flatten().filter(|_| !peer.is_here),
            })
            .collect();
        if let Some(address) = address::seen_by_others(&known, is_ours) {
            return Some(address.to_string());
        }
        let is_waited_for = |peer: &&Peer| !peer.is_here && peer.hello.is_none() && !peer.leaves;
        if self.peers.iter().any(|peer| is_waited_for(&peer)) {
            return None;
        }
        if known.iter().any(|peer| !peer.is_here) {
            return Some(host::name());
        }
        let stays_here = self.discovery.is_none() && self.job.hosts.hosts().iter().all(is_this_machine);
        // Hosts elsewhere may come later.
        let address = if stays_here { None } else { rendezvous::outward().ok() };
        Some(address.unwrap_or_else(|| IpAddr::from([127, 0, 0, 1])).to_string())
    }

    fn tell_to_start(&mut self, index: usize, host: &str, port: u16) {
        let nodes = u32::try_from(self.peers.len()).unwrap_or(u32::MAX);
        if !self.peers.iter().any(|peer| peer.was_told_to_start)
            && self.exits.is_empty()
            && let Ok(world_size) = WorldSize::new(self.workers.max(1))
        {
            let (restarts, max_restarts, node) = (0, 0, 0);
            self.control.tell(Event::Starting { restarts, max_restarts, world_size, node, nodes });
        }
        let peer = &mut self.peers[index];
        let node = u32::try_from(peer.index).unwrap_or(u32::MAX);
        let place = LauncherConfig {
            workers: peer.slots,
            node,
            nodes,
            host: host.to_owned(),
            port,
            patience: self.job.start_timeout,
            key: SentKey::new(&self.key),
            part: Some(AgentConfig {
                run_id: self.run_id.clone(),
                host: host.to_owned(),
                port,
                first: peer.first,
                most: self.most,
                node,
                nodes,
            }),
        };
        let arguments =
            self.job.arguments.iter().map(|instruction| instruction.as_bytes().to_vec()).collect();
        peer.was_told_to_start = true;
        peer.connection.order(ToLauncher::Start { arguments, place });
        // One that comes late has missed the instruction.
        if self.host_manager.has_succeeded() {
            peer.say(Instruction::Ending);
        }
    }

    // What is heard.

    fn handle_signals(&mut self) {
        while let Some(number) = self.control.read_signal() {
            match Raw::from_named_raw(number) {
                // A job on other hosts goes on.
                Some(Raw::TSTP | Raw::CONT) => {}
                Some(Raw::USR1 | Raw::USR2) => {
                    self.peers.iter().for_each(|peer| peer.connection.order(ToLauncher::Signal(number)));
                }
                _ => {
                    let signal = Signal::new(number);
                    self.end_all(Cause::Interrupted(signal), signal);
                }
            }
        }
    }

    fn handle_discovery(&mut self) {
        while let Some(answer) = self.discovery.as_ref().and_then(Discovery::next) {
            match answer {
                Ok(hosts) => {
                    self.discovery_fails = false;
                    self.name(&hosts);
                }
                // The last list stands.
                Err(error) if !std::mem::replace(&mut self.discovery_fails, true) => {
                    self.control.tell(Event::Warning { text: &error.to_string() });
                }
                Err(_) => {}
            }
        }
    }

    fn handle(&mut self, id: usize, heard: Heard) {
        // Of one that is gone nothing is heard any more, but what was on its way.
        let Some(index) = self.peers.iter().position(|peer| peer.id == id) else { return };
        let peer = &mut self.peers[index];
        match heard {
            Heard::Message(said) => self.handle_message(index, said),
            Heard::Line(line) => {
                if peer.hello.is_some() {
                    let text = format!("{}: {line}", peer.host);
                    self.control.tell(Event::Warning { text: &text });
                }
                keep(&mut self.peers[index].stderr, line);
            }
            Heard::Quiet => peer.connection.is_quiet(),
            Heard::Closed(error) => {
                if let Some(error) = error {
                    let cause = format!("{}: what its launcher says cannot be read", peer.host);
                    peer.end.get_or_insert(End::Failed(Error::io(cause, error)));
                }
                peer.connection.has_closed();
            }
        }
    }

    fn handle_message(&mut self, index: usize, said: FromLauncher) {
        let peer = &mut self.peers[index];
        match said {
            FromLauncher::Hello { version: theirs, route } if theirs == version() => {
                peer.hello = Some(route);
                self.start_those_who_wait();
            }
            FromLauncher::Hello { version: theirs, .. } => {
                let cause = format!("{} has Phalanx {theirs}, this machine {}", peer.host, version());
                let error = Error::mismatch(cause).with_remedy("install the same version on all hosts");
                peer.end = Some(End::Failed(error));
                peer.connection.close();
                peer.connection.must_end_by(Instant::now() + UNWANTED);
            }
            FromLauncher::Event(news) => self.handle_news(index, &news),
            FromLauncher::Ended(ending) => peer.end = Some(End::Reported(ending)),
            FromLauncher::Failed(complaint) => peer.end = Some(End::Failed(complaint.at(peer.host.name()))),
            // It serves nothing.
            FromLauncher::Serving { .. } => {}
        }
    }

    fn handle_news(&mut self, index: usize, news: &News) {
        let peer = &mut self.peers[index];
        let host = peer.index;
        match news {
            News::Started { rank, pid, .. } => {
                if peer.place(*rank).is_none() {
                    return;
                }
                peer.processes.insert(*rank, *pid);
                self.host_manager.up(host, Instant::now());
            }
            News::Exited { rank, exit, .. } => {
                let Some(place) = peer.place(*rank) else { return };
                if let (Some(process), Some(store)) = (peer.processes.remove(rank), &self.store) {
                    store.publisher.exited(rank.get(), process);
                }
                if exit.is_success() {
                    self.host_manager.done(host, place);
                    let others = self.peers.iter().filter(|peer| peer.was_told_to_start && !peer.leaves);
                    others.for_each(|peer| peer.say(Instruction::Ending));
                }
            }
            News::Lost { failure, .. } => {
                if let Some(place) = peer.place(failure.rank) {
                    self.lose_worker(host, place, failure);
                }
                return;
            }
            News::Line { .. } | News::Logging { .. } | News::Warning { .. } => {}
            // Told once for all.
            News::Ending { .. } | News::Killing if self.end.is_some() => {}
            _ => return,
        }
        self.control.stops |= news.tell(self.control.observer).is_break();
    }

    /// A worker has failed, and its launcher asks what becomes of its place.
    fn lose_worker(&mut self, host: usize, place: u32, failure: &Failure) {
        let fate = match self.end {
            None => self.host_manager.failed(host, place, Instant::now()),
            Some(_) => Fate::Empty,
        };
        let replaced_in = match fate {
            Fate::Replaced { after } => Some(after),
            Fate::Empty | Fate::LeftOut { .. } => {
                self.failure.get_or_insert_with(|| failure.clone());
                self.say(host, Instruction::Vacate(place));
                None
            }
        };
        let (replacements, max_replacements) = self.host_manager.restarts();
        self.control.tell(Event::Lost { failure, replaced_in, replacements, max_replacements });
        if let Fate::LeftOut { pause } = fate {
            let name = self.host_manager.name(host);
            let text =
                format!("{name}: its workers fail again and again; it is left out for {}", seconds(pause));
            self.control.tell(Event::Warning { text: &text });
            self.retire(host);
        }
    }

    /// Sees to connections that have ended, or have to.
    fn look(&mut self) {
        let now = Instant::now();
        for peer in &mut self.peers {
            if peer.hello.is_none() && peer.end.is_none() && now >= peer.answer_by {
                let waited = self.job.start_timeout.as_secs_f64();
                let remedy = format!("can `ssh {} true` be run? --start-timeout waits longer", peer.host);
                let error = Error::timeout(format!("{} has not answered within {waited} s", peer.host));
                peer.end = Some(End::Failed(error.with_remedy(remedy)));
                peer.connection.close();
                peer.connection.must_end_by(now);
            }
            peer.connection.look();
        }
        while let Some(index) = self.peers.iter().position(|peer| peer.connection.is_over()) {
            let peer = self.peers.remove(index);
            self.part(peer);
        }
        // Perhaps it was the answer of one of them that was waited for.
        self.start_those_who_wait();
    }

    /// A launcher is gone.
    fn part(&mut self, peer: Peer) {
        if let Some(store) = &self.store {
            for (number, process) in &peer.processes {
                store.publisher.exited(number.get(), *process);
            }
        }
        let error = match peer.end {
            Some(End::Reported(ending)) => {
                self.exits.extend(ending.exits);
                match ending.outcome {
                    Outcome::Interrupted(signal) => {
                        Error::environment(format!("{}: its launcher was ended by {signal}", peer.host))
                    }
                    _ => return self.host_manager.ended(peer.index),
                }
            }
            Some(End::Failed(error)) => error,
            None => self.job.diagnose(&peer.host, &peer.connection, peer.hello.is_some(), &peer.stderr),
        };
        if peer.leaves || self.end.is_some() {
            return self.host_manager.ended(peer.index);
        }
        let text = match self.host_manager.lost(peer.index, Instant::now()) {
            Some(pause) => format!("{error}; it is left out for {}", seconds(pause)),
            None => format!("{error}; no restart is left for it"),
        };
        self.control.tell(Event::Warning { text: &text });
        self.trouble.get_or_insert(error);
    }

    /// How the job ended.
    fn conclude(self) -> Result<Report> {
        let outcome = match self.end {
            Some(Cause::Interrupted(signal)) => Outcome::Interrupted(signal),
            Some(Cause::Stopped) => Outcome::Stopped,
            Some(Cause::Broken(error)) => return Err(error),
            Some(Cause::TooFew(there)) => match (self.failure, self.trouble) {
                (Some(failure), _) => Outcome::Failed(failure),
                (None, Some(error)) => return Err(error),
                (None, None) => {
                    return Err(Error::timeout(format!(
                        "{there} workers are there, and no others have come"
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
            nodes: u32::try_from(self.started_peers).unwrap_or(u32::MAX),
            restarts: 0,
            replacements: self.host_manager.restarts().0,
            elapsed: self.started.elapsed(),
        })
    }
}

fn tell_to_end(peer: &mut Peer, signal: Signal, patience: Duration) {
    peer.leaves = true;
    if peer.was_told_to_start {
        peer.connection.order(ToLauncher::Signal(signal.number()));
        peer.connection.must_end_by(Instant::now() + patience);
    } else {
        peer.connection.close();
        peer.connection.must_end_by(Instant::now() + UNWANTED);
    }
}

fn seconds(pause: Duration) -> String {
    format!("{} s", (pause.as_secs_f64() * 10.0).round() / 10.0)
}
