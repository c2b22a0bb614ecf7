//! The driver of a job on several hosts, in the command that the user has started: it starts the launchers, shows their
//! events, and passes on signals. It is not a node. Its [`Plan`] decides what is started, and when.
//!
//! There is one driver with two plans. The launchers of a fixed list of hosts agree among themselves, as if they had
//! been started by hand; those of an elastic job get instructions.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::process::Signal as Raw;

use super::RemoteJob;
use super::address::Known;
use super::connection::{Connection, Incoming};
use super::environment::environment;
use super::hosts::Host;
use super::inbox::{Inbox, POLL_INTERVAL, WAITING};
use super::node::version;
use super::peer::{LauncherEnd, Peer};
use super::protocol::{FromLauncher, LauncherConfig, RemoteEvent, SentKey, ToLauncher};
use crate::agent::AgentConfig;
use crate::attempts::Control;
use crate::deadline::Deadline;
use crate::descriptors;
use crate::error::{Error, Result};
use crate::event::{Event, Observer};
use crate::exit::{Report, Signal};
use crate::key::JobKey;
use crate::names::listed;
use crate::random;

/// How much longer than the other launchers the one with the store waits for all: those that cannot connect to it know why, and it does not.
const SERVER_GRACE: Duration = Duration::from_secs(2);

/// What a job does with its launchers; there is one plan for fixed hosts, and one for elastic jobs.
pub(super) trait Plan {
    /// Does what is due. Called before each wait. An error ends the job.
    fn act(&mut self, launchers: &mut Launchers<'_>) -> Result<()>;

    /// When to act again, if no event comes.
    fn wake_at(&self, launchers: &Launchers<'_>) -> Option<Instant>;

    /// A launcher has reported an event.
    fn handle_event(&mut self, launchers: &mut Launchers<'_>, index: usize, event: &RemoteEvent);

    /// A launcher has reported that it cannot do its part.
    fn handle_failure(&mut self, launchers: &mut Launchers<'_>);

    /// The connection to a launcher is over.
    fn handle_loss(&mut self, launchers: &mut Launchers<'_>, peer: Peer);

    /// Whether there is nothing left to wait for.
    fn is_over(&self, launchers: &Launchers<'_>) -> bool;

    /// How the job ended.
    fn conclude(self: Box<Self>, launchers: Launchers<'_>) -> Result<Report>;
}

/// The launchers of a job, and the inbox of their messages.
pub(super) struct Launchers<'a> {
    pub(super) job: &'a RemoteJob,
    pub(super) key: JobKey,
    environment: ToLauncher,
    /// The launchers that run, start, or are about to end.
    pub(super) peers: Vec<Peer>,
    /// How many were started, or could not be.
    pub(super) started_peers: usize,
    /// How many connections were started: several to a host that was tried again.
    pub(super) connections: usize,
    /// Whether a person knows that a host was tried again.
    has_told_of_retry: bool,
    pub(super) inbox: Inbox,
    pub(super) control: Control<'a>,
    pub(super) started: Instant,
    /// Why all are ended; the first reason counts.
    pub(super) end: Option<DriverEnd>,
}

/// Why a job is ended.
pub(super) enum DriverEnd {
    Interrupted(Signal),
    Stopped,
    Broken(Error),
    /// A reason that the plan knows.
    Planned,
}

pub(super) struct Driver<'a> {
    launchers: Launchers<'a>,
    plan: Box<dyn Plan + 'a>,
    /// Whether the observer has asked for the end.
    is_stopped: bool,
}

impl<'a> Driver<'a> {
    /// A driver with the plan that `plan` makes.
    pub(super) fn start(
        job: &'a RemoteJob,
        observer: &'a mut dyn Observer,
        plan: impl FnOnce(&mut Launchers<'a>) -> Result<Box<dyn Plan + 'a>>,
    ) -> Result<Self> {
        let mut launchers = Launchers {
            job,
            key: job.credentials.key.clone().map_or_else(JobKey::generate, Ok)?,
            environment: environment(job.shell.is_srun())?,
            peers: Vec::new(),
            started_peers: 0,
            connections: 0,
            has_told_of_retry: false,
            inbox: Inbox::new()?,
            control: Control::new(observer)?,
            started: Instant::now(),
            end: None,
        };
        let plan = plan(&mut launchers)?;
        Ok(Self { launchers, plan, is_stopped: false })
    }

    /// Runs until nothing is left of the job, on any host.
    pub(super) fn run(mut self) -> Result<Report> {
        loop {
            if let Err(error) = self.plan.act(&mut self.launchers) {
                self.launchers.end_all(DriverEnd::Broken(error), Signal::TERM);
            }
            if self.plan.is_over(&self.launchers) {
                return self.plan.conclude(self.launchers);
            }
            let wake_at = self.plan.wake_at(&self.launchers);
            let launchers = &mut self.launchers;
            launchers.wait(wake_at);
            launchers.handle_signals();
            // Not all, for hosts may write faster than this thread reads: signals, and what is due, must not wait for them.
            for _ in 0..WAITING {
                let Some((id, incoming)) = self.launchers.inbox.next() else { break };
                self.handle(id, incoming);
            }
            let launchers = &mut self.launchers;
            launchers.control.tell_refusal();
            if std::mem::take(&mut launchers.control.stops) && !self.is_stopped {
                self.is_stopped = true;
                launchers.end_all(DriverEnd::Stopped, Signal::TERM);
            }
            launchers.peers.iter_mut().for_each(|peer| peer.connection.look());
            for index in 0..self.launchers.peers.len() {
                self.try_again(index);
            }
            while let Some(index) = self.launchers.peers.iter().position(Peer::is_over) {
                let peer = self.launchers.peers.remove(index);
                self.plan.handle_loss(&mut self.launchers, peer);
            }
        }
    }

    /// Tries a host again that turns the connection away, as a server does with some of many that begin at the same moment.
    fn try_again(&mut self, index: usize) {
        let (launchers, now) = (&mut self.launchers, Instant::now());
        let peer = &launchers.peers[index];
        let Some(at) = peer.starts_again_at() else {
            let is_refused = peer.is_over() && peer.end.is_none() && !peer.leaves;
            if is_refused && launchers.job.may_pass(peer) {
                launchers.plan_retry(index, now);
            }
            return;
        };
        if now >= at
            && let Err(error) = launchers.start_again(index)
        {
            launchers.peers[index].end = Some(LauncherEnd::Failed(error));
            self.plan.handle_failure(&mut self.launchers);
        }
    }

    fn handle(&mut self, id: usize, incoming: Incoming) {
        let Launchers { peers, control, .. } = &mut self.launchers;
        // A connection that has ended gives only the events that were on their way.
        let Some(index) = peers.iter().position(|peer| peer.id == id) else { return };
        let peer = &mut peers[index];
        peer.connection.was_taken();
        match incoming {
            Incoming::Message(said) => self.handle_message(index, said),
            Incoming::Line(line) => {
                if peer.hello.is_some() {
                    let said = line.strip_prefix("phalanx: warning: ").unwrap_or(&line);
                    let text = format!("{}: {said}", peer.host);
                    control.tell(Event::Warning { text: &text });
                }
                peer.keep(line);
            }
            Incoming::StderrClosed => peer.connection.stderr_has_closed(),
            Incoming::StdoutClosed(error) => {
                peer.connection.stdout_has_closed();
                if let Some(error) = error.filter(|_| peer.end.is_none()) {
                    let cause = format!("{}: the messages of its launcher cannot be decoded", peer.host);
                    peer.end = Some(LauncherEnd::Failed(Error::io(cause, error)));
                    self.plan.handle_failure(&mut self.launchers);
                }
            }
        }
    }

    fn handle_message(&mut self, index: usize, said: FromLauncher) {
        let peer = &mut self.launchers.peers[index];
        match said {
            FromLauncher::Hello { version: theirs, route } if theirs == version() => peer.hello = Some(route),
            FromLauncher::Hello { version: theirs, .. } => {
                let cause = format!("{} has Phalanx {theirs}, this machine {}", peer.host, version());
                let error = Error::mismatch(cause).with_remedy("install the same version on all hosts");
                peer.end = Some(LauncherEnd::Failed(error));
                peer.end_unwanted();
                self.plan.handle_failure(&mut self.launchers);
            }
            FromLauncher::Serving { port } => peer.serves_at = Some(port),
            FromLauncher::Event(event) => {
                peer.taken += event.room();
                let event = event.at(peer.host.name());
                self.plan.handle_event(&mut self.launchers, index, &event);
            }
            FromLauncher::Ended(ending) => peer.end = Some(LauncherEnd::Reported(ending)),
            FromLauncher::Failed(error) => {
                peer.end = Some(LauncherEnd::Failed(error.at(peer.host.name())));
                self.plan.handle_failure(&mut self.launchers);
            }
        }
    }
}

impl Launchers<'_> {
    /// Starts a launcher for `host`, whose number is `index`, and whose first worker has the number `first`.
    pub(super) fn launch(&mut self, index: usize, host: Host, first: u32) -> Result<()> {
        let ranks =
            self.peers.iter().map(|peer| u64::from(peer.slots)).sum::<u64>() + u64::from(host.slots());
        descriptors::allow(self.peers.len() + 1, ranks);
        self.started_peers += 1;
        let (id, connection) = self.connect(&host)?;
        self.peers.push(Peer {
            id,
            index,
            is_here: self.job.is_this_machine(&host),
            connection,
            answer_by: Deadline::after(self.job.start_timeout).instant(),
            retries: 0,
            again_at: None,
            hello: None,
            first,
            slots: host.slots(),
            host,
            was_told_to_start: false,
            knows_of_ending: false,
            leaves: false,
            serves_at: None,
            end: None,
            processes: BTreeMap::new(),
            stderr: VecDeque::new(),
            taken: 0,
        });
        Ok(())
    }

    /// Starts a connection to `host`, which has the number that it returns.
    fn connect(&mut self, host: &Host) -> Result<(usize, Connection)> {
        let (command, remedy) = (self.job.command(host)?, self.job.shell.remedy_if_missing());
        // Also of one that fails half-way: what its threads still say must not count as said by the next one.
        let id = self.connections;
        self.connections += 1;
        let connection = Connection::start(command, remedy, self.inbox.incoming_sender(id))?;
        connection.send(self.environment.clone());
        Ok((id, connection))
    }

    /// Tries a host again after a pause, if it may be tried so often.
    fn plan_retry(&mut self, index: usize, now: Instant) {
        let peer = &mut self.peers[index];
        // Without random numbers they all come back at one moment.
        let is_planned = peer.try_again(now, random::number().unwrap_or(0));
        if is_planned && !std::mem::replace(&mut self.has_told_of_retry, true) {
            let error = self.job.diagnose(&self.peers[index]);
            let text = format!("{error}; it is tried again, as is any other host that does so");
            self.control.tell(Event::Warning { text: &text });
        }
    }

    /// Tries a host again.
    fn start_again(&mut self, index: usize) -> Result<()> {
        let host = self.peers[index].host.clone();
        let (id, connection) = self.connect(&host)?;
        let peer = &mut self.peers[index];
        (peer.id, peer.connection, peer.again_at) = (id, connection, None);
        peer.stderr.clear();
        Ok(())
    }

    /// Tells a launcher to start its workers, as one of `nodes`. Their rendezvous is at `host` and `port`, or, in an
    /// elastic job, as `agent` says.
    pub(super) fn tell_to_start(
        &mut self,
        index: usize,
        nodes: u32,
        (host, port): (&str, u16),
        agent: Option<AgentConfig>,
    ) {
        let peer = &mut self.peers[index];
        let serves = peer.index == 0 && agent.is_none() && nodes > 1;
        let config = LauncherConfig {
            workers: peer.slots,
            node: u32::try_from(peer.index).unwrap_or(u32::MAX),
            nodes,
            host: host.to_owned(),
            port,
            join_timeout: self.job.start_timeout.saturating_add(if serves {
                SERVER_GRACE
            } else {
                Duration::ZERO
            }),
            key: SentKey::new(&self.key),
            agent,
        };
        let arguments = self.job.arguments.iter().map(|argument| argument.as_bytes().to_vec()).collect();
        peer.was_told_to_start = true;
        peer.connection.send(ToLauncher::Start { arguments, config });
    }

    /// Ends the job on all hosts.
    pub(super) fn end_all(&mut self, cause: DriverEnd, signal: Signal) {
        self.end.get_or_insert(cause);
        let timeout = self.job.end_timeout();
        self.peers.iter_mut().for_each(|peer| peer.tell_to_end(signal, timeout));
    }

    /// The launchers, as far as their addresses are known; `name` names each.
    pub(super) fn known<'p>(&'p self, name: impl Fn(&'p Peer) -> &'p str) -> Vec<Known<'p>> {
        let known = |peer: &'p Peer| Known {
            name: name(peer),
            is_here: peer.is_here,
            route: peer.hello.flatten().filter(|_| !peer.is_here),
        };
        self.peers.iter().map(known).collect()
    }

    /// The error for launchers that have not done something in time, and what to do about it.
    pub(super) fn too_late(&self, missing: &[&Peer], what: &str, remedy: &str) -> Error {
        let names: Vec<&str> = missing.iter().map(|peer| peer.host.name()).collect();
        let waited = self.job.start_timeout.as_secs_f64();
        let first = names.first().copied().unwrap_or_default();
        let said = missing.iter().find_map(|peer| peer.stderr.back());
        Error::timeout(format!("{} {what} within {waited} s", listed(&names)))
            .adding(said.map_or_else(String::new, |said| format!(": {said}")))
            .with_remedy(format!("{} --start-timeout waits longer", remedy.replace("HOST", first)))
    }

    /// Those of `missing` have not answered in time.
    pub(super) fn not_answered(&self, missing: &[&Peer]) -> Error {
        let what = if missing.len() == 1 { "has not answered" } else { "have not answered" };
        self.too_late(missing, what, self.job.shell.remedy_if_silent())
    }

    /// Lets the launchers send more lines, unless the observer takes none now, and waits for what they say. The observer is asked once: if it took lines
    /// again between two answers, nobody would say so to launchers that wait for it, and this would wait for them.
    fn wait(&mut self, wake_at: Option<Instant>) {
        let wake_at = self.peers.iter().filter_map(Peer::starts_again_at).chain(wake_at).min();
        let mut timeout = wake_at.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        if self.control.observer.is_ready() {
            self.peers.iter_mut().for_each(Peer::acknowledge);
        } else {
            timeout = timeout.min(POLL_INTERVAL);
        }
        let connections = self.peers.iter().map(|peer| &peer.connection);
        self.inbox.wait(&self.control, connections, timeout);
    }

    fn handle_signals(&mut self) {
        while let Some(number) = self.control.read_signal() {
            match Raw::from_named_raw(number) {
                // A job on other hosts goes on.
                Some(Raw::TSTP | Raw::CONT) => {}
                Some(Raw::USR1 | Raw::USR2) => {
                    self.peers.iter().for_each(|peer| peer.connection.send(ToLauncher::Signal(number)));
                }
                _ => {
                    let signal = Signal::new(number);
                    self.end_all(DriverEnd::Interrupted(signal), signal);
                }
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::ffi::OsString;
    use std::fs;
    use std::ops::ControlFlow;

    use super::*;
    use crate::exit::{Failure, NodeFailure, Outcome};
    use crate::rank::Rank;
    use crate::remote::connection::IncomingSender;
    use crate::remote::fixed::FixedHosts;
    use crate::remote::protocol::RemoteReport;
    use crate::remote::window::ENOUGH_TAKEN;
    use crate::remote::{HostList, RemoteShell};

    /// A job on these hosts, none of which ever answers.
    pub(in crate::remote) fn silent_job(hosts: &str) -> (tempfile::TempDir, RemoteJob) {
        let folder = tempfile::tempdir().unwrap();
        let shell = folder.path().join("shell");
        fs::write(&shell, "exec sleep 600\n").unwrap();
        let program = OsString::from(format!("sh {}", shell.display()));
        let hosts: HostList = hosts.parse().unwrap();
        let job = RemoteJob::new(hosts, "phalanx", Vec::<OsString>::new());
        (folder, job.shell(RemoteShell::default().program(&program)))
    }

    #[test]
    fn a_launcher_that_does_not_hear_of_the_end_is_not_waited_for_without_limit() {
        let (_folder, job) = silent_job("node1,node2");
        let mut observer = |_: Event<'_>| ControlFlow::Continue(());
        let mut driver = Driver::start(&job, &mut observer, |launchers| {
            Ok(Box::new(FixedHosts::start(launchers)?.running()) as _)
        })
        .unwrap();
        let has_limit = |driver: &mut Driver<'_>| {
            driver.plan.act(&mut driver.launchers).unwrap();
            driver.launchers.peers[1].connection.limit().is_some()
        };
        assert!(!has_limit(&mut driver));
        let (exits, world_size, nodes, restarts, replacements) = (Vec::new(), None, 2, 0, 0);
        let ending = |outcome| RemoteReport {
            outcome,
            exits: exits.clone(),
            world_size,
            nodes,
            restarts,
            replacements,
        };
        driver.launchers.peers[0].end = Some(LauncherEnd::Reported(ending(Outcome::Succeeded)));
        assert!(!has_limit(&mut driver));
        let lost = |host: &str| {
            let (host, why) = (host.to_owned(), "it is silent".to_owned());
            Outcome::NodeFailed(NodeFailure { node: Some(1), host, why })
        };
        driver.launchers.peers[0].end = Some(LauncherEnd::Reported(ending(lost("its.own.name"))));
        assert!(has_limit(&mut driver));
        // The one that was lost is ended, and the report is what the others have said of it, under the name that the user knows.
        assert_eq!(driver.run().unwrap().outcome, lost("node2"));
    }

    /// It takes no lines, as long as nobody reads.
    #[derive(Default)]
    struct Paused {
        lines: usize,
    }

    impl Observer for Paused {
        fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
            self.lines += usize::from(matches!(event, Event::Line { .. }));
            ControlFlow::Continue(())
        }

        fn is_ready(&mut self) -> bool {
            false
        }
    }

    #[test]
    fn what_launchers_report_is_handled_though_nobody_reads_and_more_lines_are_not_asked_for() {
        let (_folder, job) = silent_job("node1,node2");
        let mut observer = Paused::default();
        let driver = Driver::start(&job, &mut observer, |launchers| {
            Ok(Box::new(FixedHosts::start(launchers)?.running()) as _)
        })
        .unwrap();
        let say = |host: usize, said: FromLauncher| {
            let IncomingSender { sender, .. } = driver.launchers.inbox.incoming_sender(host);
            sender.send((host, Incoming::Message(said))).unwrap();
        };
        let line = |rank| RemoteEvent::Line { rank: Rank::new(rank), is_stderr: false, text: vec![b'x'; 9] };
        let (exits, world_size, nodes, restarts, replacements) = (Vec::new(), None, 2, 0, 0);
        let outcome = Outcome::Succeeded;
        let ended = RemoteReport { outcome, exits, world_size, nodes, restarts, replacements };
        for host in [0, 1] {
            say(host, FromLauncher::Event(line(host as u32)));
            say(host, FromLauncher::Ended(ended.clone()));
        }
        // It would wait for ever for a reader.
        assert_eq!(driver.run().unwrap().outcome, Outcome::Succeeded);
        assert_eq!(observer.lines, 2);
    }

    #[test]
    fn a_launcher_may_send_more_lines_when_an_observer_takes_them() {
        fn taken_after(observer: &mut dyn Observer) -> usize {
            let (_folder, job) = silent_job("node1");
            let mut driver = Driver::start(&job, observer, |launchers| {
                Ok(Box::new(FixedHosts::start(launchers)?.running()) as _)
            })
            .unwrap();
            let text = vec![b'x'; ENOUGH_TAKEN];
            let line = RemoteEvent::Line { rank: Rank::new(0), is_stderr: true, text };
            let room = line.room();
            driver.handle_message(0, FromLauncher::Event(line));
            assert_eq!(driver.launchers.peers[0].taken, room);
            driver.launchers.wait(Some(Instant::now()));
            driver.launchers.peers[0].taken
        }
        assert!(taken_after(&mut Paused::default()) > ENOUGH_TAKEN);
        assert_eq!(taken_after(&mut |_: Event<'_>| ControlFlow::Continue(())), 0);
    }

    /// It takes no lines the first time that it is asked.
    #[derive(Default)]
    struct Late {
        asked: u32,
    }

    impl Observer for Late {
        fn observe(&mut self, _: Event<'_>) -> ControlFlow<()> {
            ControlFlow::Continue(())
        }

        fn is_ready(&mut self) -> bool {
            self.asked += 1;
            self.asked > 1
        }
    }

    #[test]
    fn no_wait_for_launchers_begins_before_they_hear_that_an_observer_takes_lines_again() {
        let (_folder, job) = silent_job("node1");
        let mut observer = Late::default();
        let mut driver = Driver::start(&job, &mut observer, |launchers| {
            Ok(Box::new(FixedHosts::start(launchers)?.running()) as _)
        })
        .unwrap();
        driver.launchers.peers[0].taken = ENOUGH_TAKEN;
        // It has an end of its own: nothing comes of a launcher that may send no lines.
        driver.launchers.wait(Some(Instant::now() + Duration::from_secs(60)));
        assert_eq!(driver.launchers.peers[0].taken, ENOUGH_TAKEN);
        driver.launchers.wait(Some(Instant::now()));
        assert_eq!(driver.launchers.peers[0].taken, 0);
        drop(driver);
        assert_eq!(observer.asked, 2);
    }

    #[test]
    fn who_has_sent_no_signal_is_told_nothing_of_a_launcher_that_has_got_one() {
        let (_folder, job) = silent_job("node1,node2");
        let mut told = 0;
        let mut observer = |event: Event<'_>| {
            told += u32::from(matches!(event, Event::Lingering));
            ControlFlow::Continue(())
        };
        let mut driver =
            Driver::start(&job, &mut observer, |launchers| Ok(Box::new(FixedHosts::start(launchers)?) as _))
                .unwrap();
        for end in [DriverEnd::Planned, DriverEnd::Interrupted(Signal::INT)] {
            driver.launchers.end = Some(end);
            driver.plan.handle_event(&mut driver.launchers, 0, &RemoteEvent::Lingering);
        }
        drop(driver);
        assert_eq!(told, 1);
    }

    #[test]
    fn a_signal_does_not_hide_how_the_job_had_ended() {
        let outcome_of = |end: DriverEnd, reported: [Option<Outcome>; 2]| {
            let (_folder, job) = silent_job("node1,node2");
            let mut observer = |_: Event<'_>| ControlFlow::Continue(());
            let mut driver = Driver::start(&job, &mut observer, |launchers| {
                Ok(Box::new(FixedHosts::start(launchers)?.running()) as _)
            })
            .unwrap();
            let peers = &mut driver.launchers.peers;
            for (peer, outcome) in peers.iter_mut().zip(reported) {
                let (exits, world_size, nodes, restarts, replacements) = (Vec::new(), None, 2, 0, 0);
                peer.end = outcome.map(|outcome| {
                    LauncherEnd::Reported(RemoteReport {
                        outcome,
                        exits,
                        world_size,
                        nodes,
                        restarts,
                        replacements,
                    })
                });
            }
            // A launcher that was told to end may end without a report.
            peers.retain(|peer| peer.end.is_some());
            driver.launchers.end = Some(end);
            driver.run().unwrap().outcome
        };
        let interrupted = || DriverEnd::Interrupted(Signal::INT);
        let [done, failed, ended] =
            [Outcome::Succeeded, Outcome::Failed(Failure::unknown(1)), Outcome::Interrupted(Signal::INT)];
        let both = |outcome: &Outcome| [Some(outcome.clone()), Some(outcome.clone())];
        // Node 0 has waited until the other had read how the job has ended.
        assert_eq!(outcome_of(interrupted(), both(&done)), done);
        assert_eq!(outcome_of(DriverEnd::Stopped, both(&done)), done);
        // The others' workers had not ended yet.
        for reported in
            [both(&failed), [Some(ended.clone()), Some(failed.clone())], [None, Some(failed.clone())]]
        {
            assert_eq!(outcome_of(interrupted(), reported), failed);
        }
        for reported in [both(&ended), [Some(done.clone()), Some(ended.clone())], [Some(done.clone()), None]]
        {
            assert_eq!(outcome_of(interrupted(), reported), ended);
        }
    }

    #[test]
    fn a_start_may_take_any_time() {
        let (_folder, job) = silent_job("node1,node2");
        let job = job.start_timeout(Duration::MAX);
        let mut observer = |_: Event<'_>| ControlFlow::Continue(());
        let mut driver =
            Driver::start(&job, &mut observer, |launchers| Ok(Box::new(FixedHosts::start(launchers)?) as _))
                .unwrap();
        driver.launchers.tell_to_start(0, 2, ("node1", 29500), None);
        assert!(driver.launchers.peers[0].was_told_to_start);
    }

    #[test]
    fn a_launcher_that_ends_before_all_were_told_to_start_ends_the_job() {
        let (_folder, job) = silent_job("node1,node2");
        let mut observer = |_: Event<'_>| ControlFlow::Continue(());
        let mut driver =
            Driver::start(&job, &mut observer, |launchers| Ok(Box::new(FixedHosts::start(launchers)?) as _))
                .unwrap();
        let outcome = Outcome::Interrupted(Signal::TERM);
        let (exits, world_size, nodes, restarts, replacements) = (Vec::new(), None, 2, 0, 0);
        let ending = RemoteReport { outcome, exits, world_size, nodes, restarts, replacements };
        driver.launchers.peers[0].end = Some(LauncherEnd::Reported(ending));
        // The other one never answers, and is not waited for.
        let report = driver.run().unwrap();
        assert!(matches!(report.outcome, Outcome::Interrupted(Signal::TERM)), "{report:?}");
        assert!(report.elapsed < job.start_timeout, "{report:?}");
    }
}
