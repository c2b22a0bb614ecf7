//! The driver of a job on several hosts, in the command that the user has started: it starts the launchers, shows their
//! events, and passes on signals. It is not a node; the nodes agree among themselves.

use std::collections::VecDeque;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::process::Signal as Raw;

use super::address::{self, Known};
use super::connection::{Connection, Heard};
use super::environment::surroundings;
use super::here::is_ours;
use super::hosts::Host;
use super::inbox::Inbox;
use super::node::version;
use super::protocol::{Complaint, Ending, FromLauncher, LauncherConfig, News, Route, SentKey, ToLauncher};
use super::{RemoteJob, is_this_machine, keep};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::key::JobKey;
use crate::launch::attempts::Control;
use crate::launch::event::{Event, Observer};
use crate::launch::exit::{Outcome, Report, Signal};
use crate::world_size::WorldSize;

/// How long a launcher may take to end that has not been told to start anything.
const UNWANTED: Duration = Duration::from_secs(2);

/// One host.
#[derive(Debug)]
struct Peer {
    host: Host,
    is_here: bool,
    connection: Connection,
    /// It has said that it is there, and how ssh has reached it.
    hello: Option<Option<Route>>,
    was_told_to_start: bool,
    serves_at: Option<u16>,
    ended: Option<Ended>,
    stderr: VecDeque<String>,
}

#[derive(Debug)]
enum Ended {
    Reported(Ending),
    Failed(Complaint),
    /// Without an instruction.
    Lost,
}

pub(super) struct Driver<'a> {
    job: &'a RemoteJob,
    key: JobKey,
    peers: Vec<Peer>,
    inbox: Inbox,
    control: Control<'a>,
    started: Instant,
    /// Why all are ended, if for a reason of this command's.
    interrupted: Option<Signal>,
    stopped: bool,
    lost: Option<Error>,
    has_ended_all: bool,
    /// The last start of workers that was shown.
    shown: Option<u32>,
}

impl<'a> Driver<'a> {
    /// Starts a launcher on each host.
    pub(super) fn start(job: &'a RemoteJob, observer: &'a mut dyn Observer) -> Result<Self> {
        let started = Instant::now();
        let key = job.credentials.key.clone().map_or_else(JobKey::generate, Ok)?;
        let control = Control::new(observer)?;
        let inbox = Inbox::new()?;
        let surroundings = surroundings()?;
        let mut peers = Vec::new();
        for (index, host) in job.hosts.hosts().iter().enumerate() {
            let connection = Connection::start(job.command(host), inbox.ears(index))?;
            connection.order(surroundings.clone());
            peers.push(Peer {
                host: host.clone(),
                is_here: is_this_machine(host),
                connection,
                hello: None,
                was_told_to_start: false,
                serves_at: None,
                ended: None,
                stderr: VecDeque::new(),
            });
        }
        Ok(Self {
            job,
            key,
            peers,
            inbox,
            control,
            started,
            interrupted: None,
            stopped: false,
            lost: None,
            has_ended_all: false,
            shown: None,
        })
    }

    pub(super) fn run(mut self) -> Result<Report> {
        if let Err(error) = self.bring_up() {
            self.lose(error);
        }
        self.listen(None, |peers| peers.iter().all(|peer| peer.ended.is_some()));
        self.conclude()
    }

    /// Tells every launcher what to start. It ends early if something is wrong.
    fn bring_up(&mut self) -> Result<()> {
        let deadline = Deadline::after(self.job.start_timeout);
        if !self.listen(Some(deadline), |peers| peers.iter().all(|peer| peer.hello.is_some())) {
            return self.too_late(
                |peer| peer.hello.is_none(),
                "has not answered",
                "can `ssh HOST true` be run?",
            );
        }
        let host = self.job.master_addr.clone().unwrap_or_else(|| self.meeting());
        let mut port = self.job.master_port;
        self.tell_to_start(0, &host, port);
        if self.peers.len() > 1 {
            let deadline = Deadline::after(self.job.start_timeout);
            if !self.listen(Some(deadline), |peers| peers[0].serves_at.is_some()) {
                let remedy = "does it find its own address, or does --master-addr name another host's?";
                return self.too_late(|peer| peer.was_told_to_start, "does not serve the store", remedy);
            }
            port = self.peers[0].serves_at.unwrap_or(port);
            for node in 1..self.peers.len() {
                self.tell_to_start(node, &host, port);
            }
        }
        Ok(())
    }

    /// If nothing else has ended the job, it is that these are too slow.
    fn too_late(&self, is_missing: impl Fn(&Peer) -> bool, what: &str, remedy: &str) -> Result<()> {
        if self.is_ending() {
            return Ok(());
        }
        let missing: Vec<&str> =
            self.peers.iter().filter(|peer| is_missing(peer)).map(|peer| peer.host.name()).collect();
        let waited = self.job.start_timeout.as_secs_f64();
        let first = missing.first().copied().unwrap_or_default();
        Err(Error::timeout(format!("{} {what} within {waited} s", missing.join(", ")))
            .with_remedy(format!("{} --start-timeout waits longer", remedy.replace("HOST", first))))
    }

    /// The address at which node 0 is reached.
    fn meeting(&self) -> String {
        let own = host::name();
        let name = |peer: &Peer| match peer.is_here {
            // Other hosts would look for "localhost" at home.
            true => own.clone(),
            false => peer.host.address().to_owned(),
        };
        let names: Vec<String> = self.peers.iter().map(name).collect();
        let known = self.peers.iter().zip(&names).map(|(peer, name)| {
            let route = peer.hello.flatten().filter(|_| !peer.is_here);
            Known { name, is_here: peer.is_here, route }
        });
        address::of_node_0(&known.collect::<Vec<_>>(), is_ours)
    }

    fn tell_to_start(&mut self, node: usize, host: &str, port: u16) {
        let place = LauncherConfig {
            workers: self.peers[node].host.slots(),
            node: node as u32,
            nodes: self.peers.len() as u32,
            host: host.to_owned(),
            port,
            patience: self.job.start_timeout,
            key: SentKey::new(&self.key),
            part: None,
        };
        let arguments =
            self.job.arguments.iter().map(|instruction| instruction.as_bytes().to_vec()).collect();
        self.peers[node].was_told_to_start = true;
        self.peers[node].connection.order(ToLauncher::Start { arguments, place });
    }

    /// Hears what there is, until there is enough: true. False if the deadline has passed, or, before all have been told
    /// to start, the job ends.
    fn listen(&mut self, deadline: Option<Deadline>, is_enough: impl Fn(&[Peer]) -> bool) -> bool {
        loop {
            if deadline.is_some() && self.is_ending() {
                return false;
            }
            if is_enough(&self.peers) {
                return true;
            }
            if deadline.is_some_and(Deadline::has_passed) {
                return false;
            }
            let timeout = deadline.map_or(Duration::MAX, Deadline::remaining);
            self.inbox.wait(&mut self.control, self.peers.iter().map(|peer| &peer.connection), timeout);
            self.handle_signals();
            while let Some((host, heard)) = self.inbox.next(&mut self.control) {
                self.handle(host, heard);
            }
            if std::mem::take(&mut self.control.stops) && !self.stopped {
                self.stopped = true;
                self.end_all(Signal::TERM);
            }
            self.look();
        }
    }

    fn is_ending(&self) -> bool {
        let has_ended = self.peers.iter().any(|peer| peer.ended.is_some());
        has_ended || self.stopped || self.interrupted.is_some() || self.lost.is_some()
    }

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
                    self.interrupted.get_or_insert(signal);
                    self.end_all(signal);
                }
            }
        }
    }

    /// The job cannot go on; the first reason counts.
    fn lose(&mut self, error: Error) {
        self.lost.get_or_insert(error);
        self.end_all(Signal::TERM);
    }

    /// Ends the job on all hosts.
    fn end_all(&mut self, signal: Signal) {
        self.has_ended_all = true;
        let now = Instant::now();
        for peer in &mut self.peers {
            if peer.was_told_to_start {
                peer.connection.order(ToLauncher::Signal(signal.number()));
                peer.connection.must_end_by(now + self.job.patience());
            } else {
                peer.connection.close();
                peer.connection.must_end_by(now + UNWANTED);
            }
        }
    }

    fn handle(&mut self, index: usize, heard: Heard) {
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
                    self.lose(Error::io(cause, error));
                }
                self.peers[index].connection.has_closed();
            }
        }
    }

    fn handle_message(&mut self, index: usize, said: FromLauncher) {
        match said {
            FromLauncher::Hello { version: theirs, route } => {
                if theirs != version() {
                    let host = &self.peers[index].host;
                    let cause = format!("{host} has Phalanx {theirs}, this machine {}", version());
                    self.lose(Error::mismatch(cause).with_remedy("install the same version on all hosts"));
                }
                self.peers[index].hello = Some(route);
            }
            FromLauncher::Serving { port } => self.peers[index].serves_at = Some(port),
            FromLauncher::Event(news) => self.show(index, &news),
            FromLauncher::Ended(ending) => self.peers[index].ended = Some(Ended::Reported(ending)),
            FromLauncher::Failed(complaint) => {
                self.peers[index].ended = Some(Ended::Failed(complaint));
                self.end_all(Signal::TERM);
            }
        }
    }

    /// What all nodes tell alike is shown once.
    fn show(&mut self, index: usize, news: &News) {
        let speaker = self.peers.iter().position(|peer| peer.ended.is_none());
        let is_shown = match news {
            News::Line { .. } | News::Started { .. } | News::Exited { .. } | News::Warning { .. } => true,
            // Before the first line of the first that starts.
            News::Starting { restarts, .. } => self.shown.replace(*restarts) != Some(*restarts),
            _ => speaker == Some(index),
        };
        if is_shown {
            self.control.stops |= news.tell(self.control.observer).is_break();
        }
    }

    /// Sees to connections that have ended, or have to.
    fn look(&mut self) {
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            peer.connection.look();
            if peer.connection.is_over() && peer.ended.is_none() {
                peer.ended = Some(Ended::Lost);
                peer.connection.close();
                // Who was told to end may do so without a instruction.
                if !self.has_ended_all {
                    self.lose(self.diagnose(index));
                }
            }
        }
    }

    fn diagnose(&self, index: usize) -> Error {
        let peer = &self.peers[index];
        self.job.diagnose(&peer.host, &peer.connection, peer.hello.is_some(), &peer.stderr)
    }

    /// How the job ended, of all that was heard.
    fn conclude(mut self) -> Result<Report> {
        let mut report = Report {
            outcome: Outcome::Succeeded,
            exits: Vec::new(),
            world_size: None,
            nodes: self.peers.len() as u32,
            restarts: 0,
            replacements: 0,
            elapsed: self.started.elapsed(),
        };
        let mut worst = 0;
        let mut failed = None;
        for peer in &mut self.peers {
            match peer.ended.take() {
                Some(Ended::Reported(ending)) => {
                    report.exits.extend(ending.exits);
                    report.restarts = report.restarts.max(ending.restarts);
                    report.replacements += ending.replacements;
                    report.world_size = ending.world_size.and_then(|size| WorldSize::new(size).ok());
                    if severity(&ending.outcome) > worst {
                        worst = severity(&ending.outcome);
                        report.outcome = ending.outcome;
                    }
                }
                Some(Ended::Failed(complaint)) if failed.is_none() => {
                    failed = Some(complaint.at(peer.host.name()));
                }
                _ => {}
            }
        }
        if let Some(signal) = self.interrupted {
            report.outcome = Outcome::Interrupted(signal);
        } else if self.stopped {
            report.outcome = Outcome::Stopped;
        } else if !matches!(report.outcome, Outcome::Failed(_))
            && let Some(error) = self.lost.or(failed)
        {
            return Err(error);
        }
        Ok(report)
    }
}

/// Of what nodes report, the nearest to the cause counts.
fn severity(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Succeeded => 0,
        Outcome::Stopped => 1,
        Outcome::Interrupted(_) => 2,
        Outcome::NodeFailed(_) => 3,
        Outcome::Failed(_) => 4,
    }
}
