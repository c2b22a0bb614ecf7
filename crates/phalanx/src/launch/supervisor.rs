//! Runs a job: the I/O around [`Policy`].
//!
//! One thread and one `poll`, and no runtime: it works inside any program, also under an async runtime of the user's,
//! and failures that are seen together can be judged together.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use phalanx_sys::guard::Guard;
use phalanx_sys::signal::{Catcher, keep_exit_status_of_children};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal as Raw};

use super::event::{Event, Observer};
use super::exit::{Outcome, Report, Signal};
use super::job::Job;
use super::members;
use super::policy::{Cause, End, Policy};
use super::worker::Worker;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::TcpStoreServer;

/// How often to look whether a group is empty, or at what has to be polled.
const POLL: Duration = Duration::from_millis(20);
/// How long to wait for killed workers when the job is given up.
const REAP: Duration = Duration::from_secs(5);

pub(super) fn run(job: &Job, observer: &mut dyn Observer) -> Result<Report> {
    let started = Instant::now();
    keep_exit_status_of_children()
        .map_err(|error| Error::io("SIGCHLD cannot be set to its default", error))?;
    let store = job.serve_store()?;
    let mut supervisor = Supervisor::new(job, observer)?;
    supervisor.start_workers(job, &store)?;
    let outcome = supervisor.watch()?;
    Ok(Report { outcome, exits: supervisor.policy.exits(), elapsed: started.elapsed() })
}

struct Supervisor<'a> {
    workers: Vec<Worker>,
    policy: Policy,
    observer: &'a mut dyn Observer,
    observer_stops: bool,
    // None if a job in another thread catches the signals.
    signals: Option<Catcher>,
    guard: Guard,
}

impl<'a> Supervisor<'a> {
    fn new(job: &Job, observer: &'a mut dyn Observer) -> Result<Self> {
        let count = job.workers().count();
        let caught = [Raw::INT, Raw::TERM, Raw::HUP, Raw::QUIT, Raw::TSTP, Raw::CONT, Raw::USR1, Raw::USR2];
        Ok(Self {
            workers: Vec::with_capacity(count),
            policy: Policy::new(count, job.grace_period()),
            observer,
            observer_stops: false,
            guard: Guard::start(count)
                .map_err(|error| Error::io("cannot start the workers' guard", error))?,
            signals: Catcher::install(&caught.map(Raw::as_raw))
                .map_err(|error| Error::io("cannot catch signals", error))?,
        })
    }

    fn start_workers(&mut self, job: &Job, store: &TcpStoreServer) -> Result<()> {
        let run_id = run_id()?;
        for rank in job.workers().ranks() {
            let environment = job.environment(rank, store.local_addr(), &run_id);
            let worker = Worker::start(job, rank, environment, &self.guard)?;
            let pid = worker.id();
            self.workers.push(worker);
            self.tell(Event::Started { rank, pid });
        }
        Ok(())
    }

    /// Until nothing of the job is left.
    fn watch(&mut self) -> Result<Outcome> {
        loop {
            let over = self.policy.all_exited() && !members::any_alive(&self.groups());
            if over || self.policy.gives_up(Instant::now()) {
                break;
            }
            let reads = self.observer.is_ready();
            self.wait(reads)?;
            // Signals first: what sends one to this process may send it to the workers as well.
            self.handle_signals();
            if reads {
                self.handle_output();
            }
            self.handle_ends();
            self.handle_time();
        }
        self.finish_output();
        Ok(self.outcome())
    }

    fn wait(&self, reads: bool) -> Result<()> {
        let now = Instant::now();
        let mut timeout = self.policy.wake_at().map(|at| at.saturating_duration_since(now));
        if !reads || self.policy.all_exited() || self.workers.iter().any(Worker::must_be_polled) {
            timeout = Some(timeout.map_or(POLL, |timeout| timeout.min(POLL)));
        }
        // A duration that the system cannot express is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let signals = self.signals.iter().map(AsFd::as_fd);
        let output = self.workers.iter().filter(|_| reads).flat_map(Worker::open_output);
        let mut descriptors: Vec<PollFd<'_>> = signals
            .chain(self.workers.iter().filter_map(Worker::end_notice))
            .chain(output)
            .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
            .collect();
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("cannot wait for the workers", error.into())),
        }
    }

    fn handle_signals(&mut self) {
        while let Some(number) = self.signals.as_mut().and_then(Catcher::read) {
            match Raw::from_named_raw(number) {
                Some(Raw::TSTP) => {
                    self.send(Raw::STOP);
                    let _ = rustix::process::kill_process(rustix::process::getpid(), Raw::STOP);
                }
                Some(passed_on @ (Raw::CONT | Raw::USR1 | Raw::USR2)) => self.send(passed_on),
                _ => {
                    let order = self.policy.interrupted(Signal::new(number), Instant::now());
                    self.obey(order);
                }
            }
        }
    }

    fn handle_output(&mut self) {
        for worker in 0..self.workers.len() {
            self.read_output(worker);
        }
        if std::mem::take(&mut self.observer_stops) {
            let order = self.policy.stopped(Instant::now());
            self.obey(order);
        }
    }

    fn handle_ends(&mut self) {
        let mut batch = Vec::new();
        for index in 0..self.workers.len() {
            if let Some(exit) = self.workers[index].poll_end() {
                let blames = self.workers[index].blames().map(|rank| rank as usize);
                batch.push(End { worker: index, exit, blames });
                // All that it has written is in the pipe by now, and comes before the news of its end.
                self.read_output(index);
                let worker = &self.workers[index];
                self.tell(Event::Exited { rank: worker.rank(), pid: worker.id(), exit });
            }
        }
        if !batch.is_empty() {
            let order = self.policy.exited(&batch, Instant::now());
            self.obey(order);
        }
    }

    fn handle_time(&mut self) {
        let order = self.policy.tick(Instant::now());
        self.obey(order);
    }

    fn obey(&mut self, order: Option<Signal>) {
        let Some(signal) = order else { return };
        // After a good end, too, the groups are asked to go, but there is nothing to tell if nobody is left.
        if !self.policy.all_exited() || members::any_alive(&self.groups()) {
            self.tell(if signal == Signal::KILL { Event::Killing } else { Event::Ending { signal } });
        }
        if let Some(raw) = Raw::from_named_raw(signal.number()) {
            self.send(raw);
            // A stopped process takes no signal but SIGKILL before it goes on.
            self.send(Raw::CONT);
        }
    }

    fn send(&self, signal: Raw) {
        for worker in &self.workers {
            worker.signal(signal);
        }
    }

    fn read_output(&mut self, worker: usize) {
        let Self { workers, observer, observer_stops, .. } = self;
        let worker = &mut workers[worker];
        let rank = worker.rank();
        worker.read_output(Instant::now(), |stream, text| {
            *observer_stops |= observer.observe(Event::Line { rank, stream, text }).is_break();
        });
    }

    fn finish_output(&mut self) {
        for index in 0..self.workers.len() {
            self.read_output(index);
            let Self { workers, observer, .. } = self;
            let rank = workers[index].rank();
            workers[index].finish_output(|stream, text| {
                let _: ControlFlow<()> = observer.observe(Event::Line { rank, stream, text });
            });
        }
    }

    fn tell(&mut self, event: Event<'_>) {
        self.observer_stops |= self.observer.observe(event).is_break();
    }

    fn groups(&self) -> Vec<Pid> {
        self.workers.iter().map(Worker::pid).collect()
    }

    fn outcome(&self) -> Outcome {
        match self.policy.cause() {
            None => Outcome::Succeeded,
            Some(Cause::Stopped) => Outcome::Stopped,
            Some(Cause::Interrupted(signal)) => Outcome::Interrupted(signal),
            Some(Cause::Failed { worker }) => Outcome::Failed(self.workers[worker].failure()),
        }
    }
}

impl Drop for Supervisor<'_> {
    /// On every path, also when a worker could not be started or the observer panics.
    fn drop(&mut self) {
        self.send(Raw::KILL);
        self.guard.dismiss();
        let deadline = Deadline::after(REAP);
        for worker in &mut self.workers {
            worker.reap(deadline);
        }
    }
}

/// A name for the job that no other job has.
fn run_id() -> Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::environment(format!("the system gives no random numbers: {error}")))?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}
