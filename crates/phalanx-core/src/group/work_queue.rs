//! The work queue of a group: it runs one operation at a time, in the order of the calls.
//!
//! Blocking calls run on the caller's own thread, with the caller's own memory; asynchronous calls run on the group's
//! worker thread, which is started by the first of them. A ticket decides whose turn it is, so both kinds keep one order.
//!
//! A blocking call borrows the caller's memory (`all_reduce(&mut [T])`). Another thread could only use that with unsafe
//! code or a copy. Handing it to a worker and back would also cost two wake-ups, several times as long as the operation
//! itself at 4 bytes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::affinity::{LocalRank, keep_apart};
use super::engine::Engine;
use crate::deadline::Timeout;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::interrupt;
use crate::rank::Rank;

/// The most queued asynchronous operations; a caller that is further ahead waits.
const CAPACITY: usize = 1024;

/// An asynchronous operation, which the worker runs on the engine.
pub(super) type Task = Box<dyn FnOnce(&mut Engine) + Send>;

/// The queue in front of a group's engine.
pub(super) struct WorkQueue {
    health: Arc<Health>,
    shared: Arc<QueueShared>,
    /// The worker's name, and what it needs to know.
    name: String,
    local: LocalRank,
    worker: Mutex<Option<JoinHandle<()>>>,
    /// The process that has made it, and not one that was forked from that.
    process: u32,
}

struct QueueShared {
    state: Mutex<QueueState>,
    /// Wakes callers.
    changed: Condvar,
    /// Wakes the worker; apart from `changed`, so that blocking calls do not wake it.
    due: Condvar,
}

struct QueueState {
    /// `None` while an operation runs on it.
    engine: Option<Box<Engine>>,
    next_ticket: u64,
    serving: u64,
    tasks: VecDeque<(u64, Task)>,
    closed: bool,
}

impl WorkQueue {
    pub(super) fn new(rank: Rank, engine: Engine, local: LocalRank) -> Self {
        let health = engine.health();
        let state = QueueState {
            engine: Some(Box::new(engine)),
            next_ticket: 0,
            serving: 0,
            tasks: VecDeque::new(),
            closed: false,
        };
        let shared =
            Arc::new(QueueShared { state: Mutex::new(state), changed: Condvar::new(), due: Condvar::new() });
        let (name, worker) = (format!("phalanx-comm-{rank}"), Mutex::new(None));
        Self { health, shared, name, local, worker, process: std::process::id() }
    }

    /// Runs `operation` here, after all operations called before it. If `timeout` ends first, the group fails.
    pub(super) fn run<R>(&self, timeout: &Timeout, operation: impl FnOnce(&mut Engine) -> R) -> Result<R> {
        let mut state = self.shared.state.lock();
        state.refuse_in_check()?;
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        self.wait(&mut state, timeout, |state| state.serving == ticket);
        self.shared.with_engine(state, operation)
    }

    /// Queues `task` for the worker, as soon as there is room. If `timeout` ends first, the group fails.
    ///
    /// # Errors
    /// If there is no worker yet, and it cannot be started. The group has failed then: the other ranks have this call, too.
    pub(super) fn submit(&self, timeout: &Timeout, task: Task) -> Result<()> {
        self.start_worker().map_err(|error| self.health.fail(error))?;
        let mut state = self.shared.state.lock();
        state.refuse_in_check()?;
        self.wait(&mut state, timeout, |state| state.tasks.len() < CAPACITY);
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.tasks.push_back((ticket, task));
        self.shared.wake_next(state);
        Ok(())
    }

    /// Starts the worker, unless there is one.
    fn start_worker(&self) -> Result<()> {
        let mut worker = self.worker.lock();
        if worker.is_some() {
            return Ok(());
        }
        let (served, local) = (self.shared.clone(), self.local);
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(move || {
            keep_apart(local);
            served.serve();
        });
        let failed = |error| Error::not_started("the communication worker could not be started", error);
        *worker = Some(thread.map_err(failed)?);
        Ok(())
    }

    /// Waits until `ready`. An operation before this one may have a later deadline. If `timeout` ends first, the group
    /// fails, which ends that operation and all waiting ones; this call returns when that is done.
    fn wait(
        &self,
        state: &mut MutexGuard<'_, QueueState>,
        timeout: &Timeout,
        mut ready: impl FnMut(&QueueState) -> bool,
    ) {
        while !ready(state) {
            let deadline = timeout.deadline();
            // No longer than until this thread's next check.
            let _ = self.shared.changed.wait_for(state, interrupt::at_most(deadline.remaining()));
            if ready(state) {
                return;
            }
            // It may run code of the program.
            let mut ended = MutexGuard::unlocked(state, interrupt::check).err();
            if deadline.has_passed() {
                ended.get_or_insert_with(|| {
                    Error::timeout("the operations called before this one have not ended in time")
                        .with_remedy(
                            "is a rank stuck, or far behind? A longer time-out can be set on the group",
                        )
                });
            }
            if let Some(error) = ended {
                MutexGuard::unlocked(state, || self.health.fail(error));
                self.shared.changed.wait_while(state, |state| !ready(state));
            }
        }
    }
}

impl QueueState {
    /// An error in the check of `interruptible` if there is an operation before the next one: it may be that of this thread, which goes on only when its
    /// check has returned. A check that waited for its turn, for room in the queue or for its result would wait for ever.
    fn refuse_in_check(&self) -> Result<()> {
        if self.serving != self.next_ticket && interrupt::is_checking() {
            return Err(interrupt::refused());
        }
        Ok(())
    }
}

impl Drop for WorkQueue {
    /// Lets the worker finish the queued operations: the peers wait for them, and each has a deadline.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The worker is the parent's, and may have held the lock when this process was forked.
            std::mem::forget(self.worker.get_mut().take());
            return;
        }
        self.shared.state.lock().closed = true;
        self.shared.due.notify_one();
        if let Some(worker) = self.worker.get_mut().take()
            && worker.thread().id() != std::thread::current().id()
        {
            // Panics of tasks are caught where they run; there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl QueueShared {
    /// Runs `f` on the engine when it is this ticket's turn, and then passes the turn to the next, also if `f` panics.
    fn with_engine<R>(
        &self,
        mut state: MutexGuard<'_, QueueState>,
        f: impl FnOnce(&mut Engine) -> R,
    ) -> Result<R> {
        let Some(mut engine) = state.engine.take() else {
            return Err(Error::panicked("an earlier operation of this group panicked"));
        };
        drop(state);
        let outcome = catch_unwind(AssertUnwindSafe(|| f(&mut engine)));
        if outcome.is_err() {
            engine.health().fail(Error::panicked("an operation panicked on this rank"));
        }
        let mut state = self.state.lock();
        state.engine = Some(engine);
        state.serving += 1;
        self.wake_next(state);
        outcome.map_err(|_| Error::panicked("an operation panicked on this rank"))
    }

    /// Wakes the thread whose turn is next.
    fn wake_next(&self, state: MutexGuard<'_, QueueState>) {
        let is_for_worker = state.tasks.front().is_some_and(|(ticket, _)| *ticket == state.serving);
        drop(state);
        if is_for_worker {
            self.due.notify_one();
        }
        self.changed.notify_all();
    }

    fn serve(&self) {
        loop {
            let mut state = self.state.lock();
            let task = loop {
                let turn = state.serving;
                match state.tasks.front() {
                    Some((ticket, _)) if *ticket == turn => break state.tasks.pop_front(),
                    None if state.closed => return,
                    _ => self.due.wait(&mut state),
                }
            };
            if let Some((_, task)) = task {
                // A panic has failed the group; the task's `Work` fails because its completer was dropped.
                let _ = self.with_engine(state, task);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::super::{Connected, connect_in_process};
    use super::*;
    use crate::rank::Generation;
    use crate::world_size::WorldSize;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn a_process_that_was_forked_from_a_rank_s_does_not_wait_for_its_operations() {
        let connected = connect_in_process(WorldSize::ONE).pop().unwrap();
        let Connected { transport, health, partition, domain, .. } = connected;
        let (rank, generation, world) = (Rank::MAIN, Generation::default(), WorldSize::ONE);
        let engine = Engine::new(rank, world, generation, transport, (partition, domain), health);
        let mut queue = WorkQueue::new(rank, engine, LocalRank { rank: 0, world_size: 1 });
        let (end, ends) = mpsc::channel::<()>();
        let operation: Task = Box::new(move |_| {
            let _ = ends.recv();
        });
        queue.submit(&Timeout::new(LIMIT), operation).unwrap();
        // Of no process.
        queue.process = 0;
        let (left, leaves) = mpsc::channel();
        std::thread::spawn(move || {
            drop(queue);
            left.send(()).unwrap();
        });
        leaves.recv_timeout(LIMIT).unwrap();
        drop(end);
    }
}
