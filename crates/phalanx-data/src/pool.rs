//! Threads that do numbered tasks, each worker its own in their order.
//!
//! Worker w loads the batches w, w + W, ..., as in PyTorch. A shared queue would balance uneven items better, but then
//! which worker loads what would depend on timing, and with it what is drawn from workers' seeds. Each worker has its
//! own queue and its own results, so the order needs no sorting, and a panic of a data set holds no lock of ours. A
//! drop waits for the threads to end, for some seconds at most.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use phalanx::{Error, Result};

use phalanx_sys::freed::keep_freed_memory;

/// How long a drop waits for user code that is running on a worker.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// What a worker does with its tasks. Made and dropped where it works.
pub(crate) trait Work {
    type Task: Send + 'static;
    type Done: Send + 'static;

    /// Does a task; none if it was not wanted any more, which it asks for now and then.
    fn run(&mut self, task: Self::Task, wanted: &dyn Fn() -> bool) -> Option<Self::Done>;
}

/// Tasks below this number are not wanted any more.
#[derive(Clone, Default)]
struct Floor(Arc<AtomicU64>);

impl Floor {
    fn raise(&self, number: u64) {
        self.0.fetch_max(number, Ordering::Relaxed);
    }

    fn admits(&self, number: u64) -> bool {
        number >= self.0.load(Ordering::Relaxed)
    }
}

/// Why a task's result does not come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It takes too long.
    Late,
    /// The worker has ended.
    Gone,
}

/// Workers and their tasks: threads, or the caller itself when it asks for a result.
pub(crate) enum Pool<W: Work> {
    Threads(Threads<W>),
    Caller { work: W, tasks: VecDeque<(u64, W::Task)> },
}

impl<W: Work> Pool<W> {
    /// `workers` threads, or none, and what each of them does.
    pub(crate) fn start(
        workers: usize,
        name: impl Fn(usize) -> String,
        work: impl Fn(usize) -> W + Send + Sync + 'static,
    ) -> Result<Self> {
        keep_freed_memory();
        if workers == 0 {
            return Ok(Self::Caller { work: work(0), tasks: VecDeque::new() });
        }
        let (work, (alive, ended)) = (Arc::new(work), channel::<()>());
        let mut threads = Threads { floor: Floor::default(), workers: Vec::new(), ended };
        let started = (0..workers).try_for_each(|id| {
            let worker = Worker::start(id, name(id), work.clone(), threads.floor.clone(), alive.clone())?;
            threads.workers.push(worker);
            Ok(())
        });
        // From here on the threads alone have it.
        drop(alive);
        started.map(|()| Self::Threads(threads)).map_err(|error: std::io::Error| {
            Error::other(error).with_remedy(
                "the system starts no more threads: lower num_workers, or raise `ulimit -u`, or pids.max of the cgroup",
            )
        })
    }

    /// The number of workers; the caller is one.
    pub(crate) fn workers(&self) -> usize {
        match self {
            Self::Threads(threads) => threads.workers.len(),
            Self::Caller { .. } => 1,
        }
    }

    /// Gives `worker` the task of this number, which is greater than those of its earlier ones.
    pub(crate) fn submit(&mut self, worker: usize, number: u64, task: W::Task) {
        match self {
            // A worker that has ended is found when its result is waited for.
            Self::Threads(threads) => {
                let _ = threads.workers[worker].tasks.send((number, task));
            }
            Self::Caller { tasks, .. } => tasks.push_back((number, task)),
        }
    }

    /// Waits for what has become of the task of this number, which `worker` was given.
    pub(crate) fn receive(
        &mut self,
        worker: usize,
        number: u64,
        timeout: Duration,
    ) -> Result<W::Done, Missing> {
        match self {
            Self::Threads(threads) => loop {
                let (done, result) =
                    threads.workers[worker].results.recv_timeout(timeout).map_err(|error| match error {
                        RecvTimeoutError::Timeout => Missing::Late,
                        RecvTimeoutError::Disconnected => Missing::Gone,
                    })?;
                if done >= number {
                    return Ok(result);
                }
            },
            Self::Caller { work, tasks } => {
                while let Some((next, task)) = tasks.pop_front() {
                    if next >= number {
                        return work.run(task, &|| true).ok_or(Missing::Gone);
                    }
                }
                Err(Missing::Gone)
            }
        }
    }

    /// Ends the pool without waiting for a worker: one that is known to be late would hold up the one who reports that.
    pub(crate) fn abandon(self) {
        match self {
            Self::Threads(mut threads) => threads.hang_up().into_iter().for_each(drop),
            Self::Caller { .. } => {}
        }
    }

    /// Tasks below `number` are not wanted any more, nor their results.
    pub(crate) fn skip_to(&mut self, number: u64) {
        match self {
            Self::Threads(threads) => {
                threads.floor.raise(number);
                threads.workers.iter().for_each(|worker| while worker.results.try_recv().is_ok() {});
            }
            Self::Caller { tasks, .. } => tasks.retain(|(task, _)| *task >= number),
        }
    }
}

pub(crate) struct Threads<W: Work> {
    floor: Floor,
    workers: Vec<Worker<W>>,
    /// Closed when no thread does anything any more.
    ended: Receiver<()>,
}

struct Worker<W: Work> {
    tasks: Sender<(u64, W::Task)>,
    results: Receiver<(u64, W::Done)>,
    thread: JoinHandle<()>,
}

impl<W: Work> Worker<W> {
    fn start(
        id: usize,
        name: String,
        work: Arc<impl Fn(usize) -> W + Send + Sync + 'static>,
        floor: Floor,
        alive: Sender<()>,
    ) -> std::io::Result<Self> {
        let (tasks, queue) = channel::<(u64, W::Task)>();
        let (done, results) = channel();
        let thread = Builder::new().name(name).spawn(move || {
            // Dropped last.
            let _alive = alive;
            let mut work = work(id);
            for (number, task) in queue {
                if !floor.admits(number) {
                    continue;
                }
                let result = work.run(task, &|| floor.admits(number));
                // The pool was dropped: nothing more is wanted.
                if result.is_some_and(|result| done.send((number, result)).is_err()) {
                    break;
                }
            }
        })?;
        Ok(Self { tasks, results, thread })
    }
}

impl<W: Work> Threads<W> {
    /// Lets each thread end when it has done what it is doing.
    fn hang_up(&mut self) -> Vec<JoinHandle<()>> {
        self.floor.raise(u64::MAX);
        let ended = |Worker { tasks, results, thread }: Worker<W>| {
            drop((tasks, results));
            thread
        };
        self.workers.drain(..).map(ended).collect()
    }
}

impl<W: Work> Drop for Threads<W> {
    fn drop(&mut self) {
        let threads = self.hang_up();
        if threads.is_empty() {
            return;
        }
        match self.ended.recv_timeout(DROP_TIMEOUT) {
            // Only the end of the thread is left, which waits for nothing.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {
                threads.into_iter().for_each(|thread| drop(thread.join()));
            }
            Err(RecvTimeoutError::Timeout) => tracing::warn!(
                "a worker of a loader that was dropped still reads an item after {} s; its thread ends behind that",
                DROP_TIMEOUT.as_secs()
            ),
        }
    }
}
