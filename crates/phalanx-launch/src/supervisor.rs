//! Runs the workers of this node for one attempt: the I/O around [`Policy`].
//!
//! One thread with one `poll`, and no runtime: it works inside any program, also under an async runtime, and failures
//! that are seen at the same moment can be judged together.
//!
//! The end of a job waits for slow workers, and not for frozen ones. A rank that has left its group no longer watches
//! the others, so only the launcher can see that the last worker is stopped. It asks the kernel for the stops of its
//! own children, which distinguishes one long stop from many short ones and names the signal; `/proc` does neither.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use phalanx_sys::guard::Guard;
use rustix::process::{Pid, Signal as Raw};

use super::agent::Instruction;
use super::attempts::Control;
use super::descriptors;
use super::event::Event;
use super::exit::{Exit, Signal};
use super::job::Job;
use super::job_processes::{JobProcesses, ProcessId, RunningProcesses, Stray};
use super::logs::JobLogs;
use super::nodes::{AttemptEnd, Nodes};
use super::placement::Placement;
use super::policy::{EndReason, Policy, WorkerExit};
use super::replacements::{OnFailure, Replacements};
use super::shortage::Shortage;
use super::worker::Worker;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::frozen::{Frozen, STOPPED_LIMIT};
use crate::notice::warn;
use crate::poll::poll_readable;

/// How often to check whether a group is empty, and what has no descriptor.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long to wait for killed workers if the job cannot be watched any more.
const REAP_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of one attempt, when no process of it is left.
pub(super) struct Attempt {
    pub(super) end: AttemptEnd,
    /// How each worker ended, by local rank.
    pub(super) exits: Vec<Exit>,
    /// How often a worker was replaced.
    pub(super) replacements: u32,
    /// The signal that this process got while the workers were being ended for another reason.
    pub(super) late_signal: Option<Signal>,
}

/// Starts the workers at `placement`, and watches them to their end. `has_begun`: workers of this job were started before.
pub(super) fn run(
    job: &Job,
    placement: &Placement,
    logs: Option<&JobLogs>,
    nodes: &mut dyn Nodes,
    control: &mut Control<'_>,
    has_begun: bool,
) -> Result<Attempt> {
    let count = job.workers.count();
    // The workers inherit it, and have more peers where there are several nodes.
    descriptors::allow(count, placement.world_size.get().into());
    let mut processes = JobProcesses::new(job.subreaper)?;
    let mut shortage = Shortage::new(has_begun);
    let guard = shortage.wait_for(control, |_| {
        Guard::start(count, processes.tag())
            .map_err(|error| Error::not_started("cannot start the workers' guard", error))
    });
    let guard = match guard? {
        ControlFlow::Continue(guard) => guard,
        ControlFlow::Break(end) => {
            return Ok(Attempt { end, exits: vec![Exit::Lost; count], replacements: 0, late_signal: None });
        }
    };
    processes.set_guard(guard.pid());
    let policy = Policy::new(count, job.grace_period());
    let workers = Vec::with_capacity(count);
    let replacements = job.replacements(Instant::now());
    let mut supervisor = Supervisor {
        job,
        workers,
        start_at: None,
        shortage,
        policy,
        frozen: Frozen::new(count, STOPPED_LIMIT),
        others_are_ending: false,
        replacements,
        placement,
        logs,
        nodes,
        control,
        processes,
        guard,
        reported: Reported::Nothing,
        may_be_asked: None,
        asked: HashSet::new(),
        empty_since: None,
    };
    supervisor.start_workers()?;
    supervisor.watch()?;
    let replacements = supervisor.replacements.as_ref().map_or(0, |replacements| replacements.count().0);
    let late_signal = supervisor.policy.late_signal();
    Ok(Attempt { end: supervisor.end(), exits: supervisor.policy.exits(), replacements, late_signal })
}

struct Supervisor<'a, 'b> {
    job: &'a Job,
    /// Those that have been started, by local rank.
    workers: Vec<Worker>,
    /// When to start the others, if there was no room for them.
    start_at: Option<Instant>,
    shortage: Shortage,
    policy: Policy,
    frozen: Frozen,
    /// Whether a worker of another node has ended well.
    others_are_ending: bool,
    /// Of an elastic job.
    replacements: Option<Replacements>,
    placement: &'a Placement,
    logs: Option<&'a JobLogs>,
    nodes: &'a mut dyn Nodes,
    control: &'a mut Control<'b>,
    processes: JobProcesses,
    guard: Guard,
    reported: Reported,
    /// The processes of this machine, outside the workers' groups, that were there when all of the job were asked to end;
    /// None if that could not be seen yet. Which of them are the job's was not quite known: in the middle of `execve` a
    /// process has no environment, and so no tag.
    may_be_asked: Option<HashSet<ProcessId>>,
    /// Those of the job that have got SIGTERM.
    asked: HashSet<ProcessId>,
    /// Since when no process of the job was found.
    empty_since: Option<Instant>,
}

/// What a wait has shown.
struct Ready {
    /// The workers that have written.
    written: Vec<usize>,
    /// Whether some worker may have ended.
    has_any_ended: bool,
}

/// The state shared with the other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reported {
    Nothing,
    /// A worker has failed.
    Failure,
    /// Why the workers are ended.
    EndReason,
}

impl Supervisor<'_, '_> {
    /// Starts the workers that have not been started, until there is no room for one.
    fn start_workers(&mut self) -> Result<()> {
        self.start_at = None;
        while self.workers.len() < self.job.workers.count() {
            let local_rank = u32::try_from(self.workers.len()).unwrap_or(u32::MAX);
            let worker = match self.start_worker(local_rank) {
                Ok(worker) => worker,
                Err(error) => {
                    self.start_at = Some(self.wait_for_room(error)?);
                    return Ok(());
                }
            };
            let (rank, pid) = (worker.rank(), worker.id());
            self.workers.push(worker);
            self.tell(Event::Started { rank, local_rank, pid });
        }
        self.shortage.begin();
        self.logs.into_iter().for_each(JobLogs::begin);
        Ok(())
    }

    /// Starts the workers for which there was no room when their time has come; none once the job ends.
    fn handle_starts(&mut self) -> Result<()> {
        let now = Instant::now();
        let Some(at) = self.start_at else { return Ok(()) };
        if self.policy.is_running() {
            return if now >= at { self.start_workers() } else { Ok(()) };
        }
        self.start_at = None;
        for worker in self.workers.len()..self.job.workers.count() {
            self.policy.lost(WorkerExit { worker, exit: Exit::Lost, blames: None }, now);
        }
        // Possibly no worker is left.
        let signal = self.policy.exited(&[], now);
        self.deliver(signal);
        Ok(())
    }

    /// When to start something again that has failed with `error`.
    fn wait_for_room(&mut self, error: Error) -> Result<Instant> {
        let (at, news) = self.shortage.retry(error, Instant::now())?;
        if let Some(text) = news {
            self.tell(Event::Warning { text: &text });
        }
        Ok(at)
    }

    fn start_worker(&mut self, local: u32) -> Result<Worker> {
        let logs = match self.logs.map(|logs| logs.worker(self.placement.restarts, local)) {
            // At the first start a person sees it at once. Later a full disk must not end the training.
            Some(Err(error)) if self.logs.is_some_and(JobLogs::have_begun) => {
                let rank = self.placement.rank(local);
                let text = format!("the output of rank {rank} is not kept: {error}");
                self.tell(Event::Warning { text: &text });
                None
            }
            logs => logs.transpose()?,
        };
        let tag = self.processes.next_tag();
        let worker = Worker::start(self.job, self.placement, local, tag, logs, &self.guard)?;
        self.shortage.end();
        Ok(worker)
    }

    /// Runs until nothing of the job is left.
    fn watch(&mut self) -> Result<()> {
        loop {
            let over = self.policy.all_exited() && {
                let running = self.running();
                if self.policy.has_swept() {
                    self.sweep(running.as_ref());
                }
                self.is_empty(running.as_ref())
            };
            if over || self.policy.gives_up(Instant::now()) {
                break;
            }
            let reads = self.control.observer.is_ready() && self.logs.is_none_or(JobLogs::is_ready);
            let Ready { written, has_any_ended } = self.wait(reads)?;
            // Signals first: a sender may signal this process and the workers at the same time.
            self.handle_signals();
            written.into_iter().for_each(|worker| self.read_output(worker));
            self.handle_stop();
            if has_any_ended {
                self.handle_ends();
            }
            self.handle_nodes();
            self.handle_time();
            self.handle_starts()?;
            self.handle_instructions();
            self.handle_frozen();
            self.handle_replacements();
            self.handle_logs();
            self.handle_strays();
            self.control.tell_refusal();
        }
        self.finish_output();
        Ok(())
    }

    /// Waits until there is something to do. Of many workers, each of which writes a line now and then, only those are looked at.
    fn wait(&self, reads: bool) -> Result<Ready> {
        let now = Instant::now();
        let due = self.replacements.as_ref().and_then(Replacements::wake_at);
        let look_at = self.frozen.look_at().filter(|_| self.is_ending());
        let reap_at = self.processes.wake_at();
        let wake_at = self.policy.wake_at().into_iter().chain(due).chain(self.start_at);
        let wake_at = wake_at.chain(look_at).chain(reap_at).min();
        let mut timeout = wake_at.map(|at| at.saturating_duration_since(now));
        if !reads || self.policy.all_exited() || self.workers.iter().any(Worker::must_be_polled) {
            timeout = Some(timeout.map_or(POLL_INTERVAL, |timeout| timeout.min(POLL_INTERVAL)));
        }
        let signals = self.control.signals.iter().map(AsFd::as_fd);
        let workers = self.workers.iter().enumerate().filter(|_| reads);
        let output = workers.flat_map(|(index, worker)| worker.open_output().map(move |pipe| (index, pipe)));
        let output: Vec<(usize, BorrowedFd<'_>)> = output.collect();
        let ends: Vec<BorrowedFd<'_>> = self.workers.iter().filter_map(Worker::end_notice).collect();
        let pipes = output.iter().map(|(_, pipe)| *pipe);
        let descriptors = pipes
            .chain(ends.iter().copied())
            .chain(signals)
            .chain(self.nodes.notice())
            .chain(self.control.refused.notice());
        let is_ready = poll_readable(descriptors, timeout)
            .map_err(|error| Error::io("cannot wait for the workers", error))?;
        let mut is_ready = is_ready.into_iter();
        let ready = output.iter().zip(is_ready.by_ref()).filter(|(_, is_ready)| *is_ready);
        let mut written: Vec<usize> = ready.map(|((worker, _), _)| *worker).collect();
        written.dedup();
        let is_seen = is_ready.take(ends.len()).any(|is_ready| is_ready);
        Ok(Ready { written, has_any_ended: is_seen || self.workers.iter().any(Worker::must_be_polled) })
    }

    fn handle_signals(&mut self) {
        while let Some(number) = self.control.read_signal() {
            match Raw::from_named_raw(number) {
                Some(Raw::TSTP) => {
                    self.send(Raw::STOP);
                    self.control.stop();
                    // Also where nobody could have continued this process, so that it was not stopped.
                    self.send(Raw::CONT);
                }
                Some(passed_on @ (Raw::CONT | Raw::USR1 | Raw::USR2)) => self.send(passed_on),
                _ => {
                    let signal = self.policy.interrupted(Signal::new(number), Instant::now());
                    self.deliver(signal);
                }
            }
        }
    }

    /// Ends the workers if the observer has asked for that. If they are being ended already, no other attempt follows.
    fn handle_stop(&mut self) {
        if self.control.stops {
            let signal = self.policy.stopped(Instant::now());
            self.deliver(signal);
        }
    }

    fn handle_ends(&mut self) {
        let mut batch = Vec::new();
        for index in 0..self.workers.len() {
            if let Some(exit) = self.workers[index].poll_end() {
                // In an elastic job a rank does not identify a slot.
                let blames = self.workers[index].blames().filter(|_| self.replacements.is_none());
                let blames = blames.and_then(|rank| self.placement.local(rank));
                batch.push(WorkerExit { worker: index, exit, blames });
                // All its output is in the pipe by now, and is reported before its end.
                self.read_output(index);
                let worker = &self.workers[index];
                self.tell(Event::Exited { rank: worker.rank(), pid: worker.id(), exit });
            }
        }
        if batch.is_empty() {
            return;
        }
        self.keep_running(&mut batch);
        let signal = self.policy.exited(&batch, Instant::now());
        // At once: workers of other nodes will fail because of this one, and the other nodes go by the order of
        // reports.
        if self.reported == Reported::Nothing
            && let Some(worker) = self.policy.first_failure()
        {
            self.reported = Reported::Failure;
            let failed = self.failed(worker);
            self.nodes.tell(&failed);
        }
        self.deliver(signal);
    }

    /// Removes from `batch` the failures that end only the worker that failed.
    fn keep_running(&mut self, batch: &mut Vec<WorkerExit>) {
        if !self.policy.is_running() {
            return;
        }
        let Some(mut replacements) = self.replacements.take() else { return };
        batch.retain(|end| {
            if end.exit.is_success() {
                replacements.ended_well(end.worker);
                return true;
            }
            // Processes that it has started would disturb its replacement.
            self.workers[end.worker].signal(Raw::KILL);
            let strays = self.processes.tagged(self.workers[end.worker].tag());
            strays.iter().flatten().for_each(|stray| stray.signal(Raw::KILL));
            let now = Instant::now();
            let replaced_in = match replacements.failed(end.worker, end.exit, now) {
                OnFailure::TooFew => {
                    self.policy.too_few(now);
                    return true;
                }
                OnFailure::Replace { after } => Some(after),
                OnFailure::LeaveEmpty => {
                    self.policy.lost(*end, now);
                    None
                }
                OnFailure::AskDriver => None,
            };
            let worker = &self.workers[end.worker];
            self.nodes.worker_lost(u32::try_from(end.worker).unwrap_or(u32::MAX), worker.id());
            let failure = worker.failure(self.placement.node);
            let (replacements, max_replacements) = replacements.count();
            self.tell(Event::Lost { failure: &failure, replaced_in, replacements, max_replacements });
            false
        });
        self.replacements = Some(replacements);
    }

    /// Receives the driver's decisions about empty slots.
    fn handle_instructions(&mut self) {
        while let Some(instruction) = self.nodes.next_instruction() {
            let Some(replacements) = &mut self.replacements else { continue };
            match instruction {
                Instruction::Ending => self.others_are_ending = true,
                Instruction::Replace(slot) => replacements.replace(slot as usize, Instant::now()),
                Instruction::LeaveEmpty(slot) => {
                    let Some(exit) = replacements.leave_empty(slot as usize) else { continue };
                    let now = Instant::now();
                    self.policy.lost(WorkerExit { worker: slot as usize, exit, blames: None }, now);
                    // Possibly no worker is left.
                    let signal = self.policy.exited(&[], now);
                    self.deliver(signal);
                }
            }
        }
    }

    /// Whether all but the remaining workers have ended well.
    fn is_ending(&self) -> bool {
        let others = || self.policy.has_succeeded() || self.others_are_ending || self.nodes.are_ending();
        self.policy.is_running() && !self.policy.all_exited() && others()
    }

    /// Checks for a frozen worker when no other worker is waited for.
    fn handle_frozen(&mut self) {
        let now = Instant::now();
        if !self.is_ending() || self.frozen.look_at().is_some_and(|at| now < at) {
            return;
        }
        let stops = self.workers.iter_mut().map(Worker::poll_stop);
        for worker in self.frozen.look(stops, now) {
            self.workers[worker].give_up();
        }
    }

    /// Starts the workers that are due; none once the job ends.
    fn handle_replacements(&mut self) {
        let Some(mut replacements) = self.replacements.take() else { return };
        if !self.policy.is_running() {
            for (worker, exit) in replacements.cancel() {
                self.policy.lost(WorkerExit { worker, exit, blames: None }, Instant::now());
            }
        }
        let mut failed = Vec::new();
        while let Some(slot) = replacements.due(Instant::now()) {
            let Err(error) = self.replace(slot) else { continue };
            match self.wait_for_room(error) {
                Ok(at) => replacements.put_off(slot, at),
                Err(error) => {
                    self.tell(Event::Warning { text: &error.to_string() });
                    failed.push(WorkerExit { worker: slot, exit: Exit::Lost, blames: None });
                }
            }
        }
        self.replacements = Some(replacements);
        if !failed.is_empty() {
            self.keep_running(&mut failed);
            let signal = self.policy.exited(&failed, Instant::now());
            self.deliver(signal);
        }
    }

    fn replace(&mut self, slot: usize) -> Result<()> {
        self.finish_output_of(slot);
        let (old, deadline) = (&mut self.workers[slot], Deadline::after(REAP_TIMEOUT));
        // It is if there was no room for the next one before.
        if !old.is_reaped() {
            // Also processes that were being started when it ended.
            self.processes.kill_tagged(old.tag(), deadline);
            // Before its number may be used by another process.
            self.guard.forget(old.id());
            old.reap(deadline);
        }
        let local_rank = u32::try_from(slot).unwrap_or(u32::MAX);
        let worker = self.start_worker(local_rank)?;
        let (rank, pid) = (worker.rank(), worker.id());
        self.workers[slot] = worker;
        self.tell(Event::Started { rank, local_rank, pid });
        Ok(())
    }

    fn handle_nodes(&mut self) {
        if self.nodes.ask_for_end() {
            self.policy.ended_elsewhere(Instant::now());
        }
        while let Some(text) = self.nodes.next_warning() {
            self.tell(Event::Warning { text: &text });
        }
    }

    fn handle_logs(&mut self) {
        if let Some(text) = self.logs.and_then(JobLogs::take_failure) {
            self.tell(Event::Warning { text: &text });
        }
    }

    fn handle_time(&mut self) {
        let about_to_fail = self.any_about_to_fail();
        let signal = self.policy.tick(Instant::now(), about_to_fail);
        self.deliver(signal);
    }

    /// Whether a worker still runs that is about to fail by itself. Either it has reported an error, or a worker that has
    /// failed blames it; a stopped worker does not end.
    fn any_about_to_fail(&mut self) -> bool {
        if !self.policy.collects_reports() {
            return false;
        }
        let blamed: Vec<usize> = self.policy.blamed().collect();
        self.workers.iter_mut().enumerate().any(|(index, worker)| {
            let is_blamed = blamed.contains(&index) && !worker.has_ended() && worker.poll_stop().is_none();
            is_blamed || worker.is_failing()
        })
    }

    fn deliver(&mut self, signal: Option<Signal>) {
        let Some(signal) = signal else { return };
        if self.reported != Reported::EndReason {
            self.reported = Reported::EndReason;
            let end = self.end();
            self.nodes.tell(&end);
        }
        // After success, too, the groups are asked to end, but that is reported only if a process is left.
        let running = self.running();
        if !self.policy.all_exited() || running.as_ref().is_none_or(|running| !running.is_empty()) {
            self.tell(if signal == Signal::KILL { Event::Killing } else { Event::Ending { signal } });
        }
        if let Some(raw) = Raw::from_named_raw(signal.number()) {
            // Processes outside the workers' groups do not get the signals that a user or a scheduler has sent to the
            // job.
            match raw {
                Raw::TERM => {
                    let before = self.processes.everyone();
                    self.send(raw);
                    // Who leaves its group between a look and the signal gets none with the group. One that leaves it just after the signal
                    // gets another; one that starts while this process looks, and has left by then, is not known, and has the grace period.
                    let outside = self.processes.outside(&self.groups());
                    self.may_be_asked = before.zip(outside).map(|(before, outside)| &before & &outside);
                    let strays = running.iter().flat_map(|running| &running.strays);
                    self.may_be_asked
                        .iter_mut()
                        .for_each(|known| known.extend(strays.clone().map(Stray::id)));
                    self.sweep(running.as_ref());
                }
                Raw::KILL => {
                    kill_strays(running.as_ref());
                    self.send(raw);
                }
                _ => self.send(raw),
            }
            // A stopped process handles no signal but SIGKILL before it continues.
            self.send(Raw::CONT);
        }
    }

    /// Kills processes that have started since all were killed.
    fn handle_strays(&mut self) {
        if self.policy.has_killed() {
            self.kill(self.running().as_ref());
        }
        self.processes.reap(&self.groups());
    }

    /// Sends SIGTERM, once, to the processes outside the workers' groups that were there when all were asked to end, and to
    /// the children of those that are asked late. Processes that others have started since may be cleaning up.
    fn sweep(&mut self, running: Option<&RunningProcesses>) {
        if self.may_be_asked.is_none() {
            self.may_be_asked = self.processes.outside(&self.groups());
        }
        let (Some(running), Some(known)) = (running, &self.may_be_asked) else { return };
        let is_new = |id: &ProcessId| known.contains(id) && !self.asked.contains(id);
        let roots = running.strays.iter().map(Stray::id).filter(is_new).collect();
        for stray in running.with_descendants(roots) {
            if self.asked.insert(stray.id()) {
                stray.signal(Raw::TERM);
                stray.signal(Raw::CONT);
            }
        }
    }

    fn kill(&self, running: Option<&RunningProcesses>) {
        kill_strays(running);
        self.send(Raw::KILL);
    }

    /// None if that is not known.
    fn running(&self) -> Option<RunningProcesses> {
        self.processes.running(&self.groups())
    }

    /// Whether no process is left. Two polls in a row must agree, because of processes in the middle of `execve`.
    fn is_empty(&mut self, running: Option<&RunningProcesses>) -> bool {
        if !running.is_some_and(RunningProcesses::is_empty) {
            self.empty_since = None;
            return false;
        }
        self.empty_since.get_or_insert_with(Instant::now).elapsed() >= POLL_INTERVAL
    }

    fn send(&self, signal: Raw) {
        for worker in &self.workers {
            worker.signal(signal);
        }
    }

    fn read_output(&mut self, worker: usize) {
        let Self { workers, control, .. } = self;
        let worker = &mut workers[worker];
        let rank = worker.rank();
        worker.read_output(Instant::now(), |stream, text| control.tell(Event::Line { rank, stream, text }));
    }

    fn finish_output(&mut self) {
        for index in 0..self.workers.len() {
            self.finish_output_of(index);
        }
    }

    fn finish_output_of(&mut self, worker: usize) {
        self.read_output(worker);
        let Self { workers, control, .. } = self;
        let rank = workers[worker].rank();
        workers[worker].finish_output(|stream, text| control.tell(Event::Line { rank, stream, text }));
    }

    fn tell(&mut self, event: Event<'_>) {
        self.control.tell(event);
    }

    fn groups(&self) -> Vec<Pid> {
        self.workers.iter().filter_map(Worker::group).collect()
    }

    fn end(&self) -> AttemptEnd {
        match self.policy.cause() {
            None => AttemptEnd::Succeeded,
            Some(EndReason::Stopped) => AttemptEnd::Stopped,
            Some(EndReason::Interrupted(signal)) => AttemptEnd::Interrupted(signal),
            Some(EndReason::Elsewhere) => AttemptEnd::Elsewhere,
            Some(EndReason::Failed { worker }) => self.failed(worker),
        }
    }

    fn failed(&self, worker: usize) -> AttemptEnd {
        let worker = &self.workers[worker];
        AttemptEnd::Failed(worker.failure(self.placement.node), worker.blames())
    }
}

fn kill_strays(running: Option<&RunningProcesses>) {
    running.into_iter().flat_map(|running| &running.strays).for_each(|stray| stray.signal(Raw::KILL));
}

impl Drop for Supervisor<'_, '_> {
    /// On every path, also if a worker could not be started or the observer panics.
    fn drop(&mut self) {
        let deadline = Deadline::after(REAP_TIMEOUT);
        let is_known = loop {
            let running = self.running();
            self.kill(running.as_ref());
            if running.is_none() || self.is_empty(running.as_ref()) || deadline.has_passed() {
                break running.is_some();
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        if is_known {
            self.guard.dismiss();
        } else if let Err(error) = self.guard.kill() {
            // It may have found processes that this one could not see, for want of descriptors for instance.
            warn(format_args!("{error}: is there a limit of descriptors (`ulimit -n`)?"));
        }
        for worker in &mut self.workers {
            worker.reap(deadline);
        }
    }
}
