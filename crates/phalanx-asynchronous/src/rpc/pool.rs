//! The threads that run handlers.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::registry::{HANDLER, caught};
use crate::error::{Error, Result};
use crate::wire::rpc::DEPTHS;

thread_local! {
    /// The job that this thread runs.
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

#[derive(Clone)]
struct Current {
    pool: Arc<Pool>,
    depth: u8,
    /// Whether it counts towards the limit.
    is_counted: bool,
}

/// Runs jobs, at most `limit` at a time. A job that waits for a call of its own, or for a peer that receives slowly, does not count
/// while it waits, so that jobs which others wait for always find a thread. Deeper jobs come first: threads of other ranks wait for
/// them, and each job that begins before them may be one more that waits, with a thread.
pub(super) struct Pool {
    limit: usize,
    name: String,
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// Jobs of the pool's owner, which do not count towards the limit: jobs that have reached it may wait for what these do.
    internal: VecDeque<Job>,
    /// By depth.
    queues: [VecDeque<Job>; DEPTHS],
    /// Threads that wait for a job.
    idle: usize,
    /// Threads with a job that does not wait.
    running: usize,
    closed: bool,
}

struct Job {
    depth: u8,
    is_internal: bool,
    run: Box<dyn FnOnce() + Send>,
}

impl Pool {
    /// A pool with one thread; the others are started when they are needed.
    pub(super) fn new(limit: usize, name: String) -> Result<Arc<Self>> {
        let pool = Arc::new(Self { limit, name, state: Mutex::default(), changed: Condvar::new() });
        pool.spawn()?;
        Ok(pool)
    }

    /// Runs `job`, which serves a call at `depth`.
    pub(super) fn push(self: &Arc<Self>, depth: u8, job: impl FnOnce() + Send + 'static) {
        self.add(Job { depth, is_internal: false, run: Box::new(job) });
    }

    /// Runs `job` soon, even if the limit is reached.
    pub(super) fn push_internal(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        self.add(Job { depth: 0, is_internal: true, run: Box::new(job) });
    }

    fn add(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return job.forget();
        }
        state.push(job);
        self.employ(&state);
    }

    /// Wakes or starts a thread for the next job, if one may run. The caller holds the lock.
    fn employ(self: &Arc<Self>, state: &PoolState) {
        let startable = state.startable(self.limit);
        // If no thread can be started, the job waits for one of the existing ones.
        if startable > 0 && (state.idle >= startable || self.spawn().is_err()) {
            self.changed.notify_one();
        }
    }

    fn spawn(self: &Arc<Self>) -> Result<()> {
        let pool = self.clone();
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(move || pool.serve());
        thread
            .map(drop)
            .map_err(|error| Error::not_started("a thread for remote calls could not be started", error))
    }

    fn serve(self: Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            let Some(job) = state.next(self.limit) else {
                if state.closed || state.idle >= self.limit {
                    return;
                }
                state.idle += 1;
                self.changed.wait(&mut state);
                state.idle -= 1;
                continue;
            };
            state.running += usize::from(!job.is_internal);
            let is_internal = job.is_internal;
            drop(state);
            CURRENT.set(Some(Current { pool: self.clone(), depth: job.depth, is_counted: !is_internal }));
            job.run();
            CURRENT.set(None);
            state = self.state.lock();
            state.running -= usize::from(!is_internal);
        }
    }

    /// Ends the threads when they are done with their jobs; forgets those that wait.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let (internal, queues) = (std::mem::take(&mut state.internal), std::mem::take(&mut state.queues));
        drop(state);
        self.changed.notify_all();
        internal.into_iter().chain(queues.into_iter().flatten()).for_each(Job::forget);
    }

    /// The number of calls around one that this thread makes.
    pub(super) fn depth_of_calls() -> u8 {
        CURRENT.with_borrow(|current| current.as_ref().map_or(0, |current| current.depth + 1))
    }

    /// Waits with `wait`, for a call or a peer. If this thread runs a job, another may run meanwhile.
    pub(super) fn waiting<R>(wait: impl FnOnce() -> R) -> R {
        let Some(Current { pool, is_counted, .. }) = CURRENT.with_borrow(Clone::clone) else { return wait() };
        if !is_counted {
            // It has no place to leave. If it gave one back after it has waited, the pool would run a job less for good.
            return wait();
        }
        {
            let mut state = pool.state.lock();
            state.running = state.running.saturating_sub(1);
            pool.employ(&state);
        }
        let _again = RunsAgain(pool);
        wait()
    }
}

/// Counts this thread's job again when it is dropped, also by a panic of what it waits with: the thread that runs the job takes it
/// away at its end.
struct RunsAgain(Arc<Pool>);

impl Drop for RunsAgain {
    fn drop(&mut self) {
        self.0.state.lock().running += 1;
    }
}

impl Job {
    fn run(self) {
        self.end(|job| (job.run)());
    }

    /// Drops its closure, which may run the program's code.
    fn forget(self) {
        self.end(drop);
    }

    fn end(self, how: impl FnOnce(Self)) {
        // A panic has been printed, and there is no caller to report it to.
        let _ = caught(HANDLER, || {
            how(self);
            Ok(())
        });
    }
}

impl PoolState {
    fn push(&mut self, job: Job) {
        let depth = usize::from(job.depth).min(DEPTHS - 1);
        let queue = if job.is_internal { &mut self.internal } else { &mut self.queues[depth] };
        queue.push_back(job);
    }

    /// How many jobs have no thread yet, and may begin.
    fn startable(&self, limit: usize) -> usize {
        let queued = self.queues.iter().map(VecDeque::len).sum::<usize>();
        self.internal.len() + queued.min(limit.saturating_sub(self.running))
    }

    /// The next job, if one may run.
    fn next(&mut self, limit: usize) -> Option<Job> {
        if self.startable(limit) == 0 {
            return None;
        }
        let deepest = || self.queues.iter_mut().rev().find_map(VecDeque::pop_front);
        self.internal.pop_front().or_else(deepest)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn no_more_jobs_run_at_once_than_the_limit() {
        let pool = Pool::new(2, "jobs".to_owned()).unwrap();
        let (say, said) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        for _ in 0..5 {
            let (say, ends) = (say.clone(), ends.clone());
            pool.push(0, move || {
                say.send(()).unwrap();
                let _ = ends.lock().recv_timeout(LIMIT);
            });
        }
        said.recv_timeout(LIMIT).unwrap();
        said.recv_timeout(LIMIT).unwrap();
        assert!(said.recv_timeout(Duration::from_millis(50)).is_err());
        // Work of the owner runs all the same.
        let (internal, done) = mpsc::channel();
        pool.push_internal(move || internal.send(()).unwrap());
        done.recv_timeout(LIMIT).unwrap();
        for _ in 0..3 {
            end.send(()).unwrap();
            said.recv_timeout(LIMIT).unwrap();
        }
        drop(end);
        pool.close();
    }

    #[test]
    fn jobs_that_may_not_begin_need_no_threads() {
        let mut state = PoolState { running: 1, ..Default::default() };
        for is_internal in [false, false, false, true] {
            state.push(Job { depth: 0, is_internal, run: Box::new(|| ()) });
        }
        assert_eq!([1, 2, 9].map(|limit| state.startable(limit)), [1, 2, 4]);
        // Some that have waited run again.
        state.running = 5;
        assert_eq!(state.startable(2), 1);
    }

    #[test]
    fn deeper_jobs_run_first_and_those_of_one_depth_in_their_order() {
        let pool = Pool::new(1, "jobs".to_owned()).unwrap();
        let (say, said) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let (begin, begins) = mpsc::channel();
        // It has the only place while the others come.
        pool.push(0, move || {
            begin.send(()).unwrap();
            let _ = ends.recv_timeout(LIMIT);
        });
        begins.recv_timeout(LIMIT).unwrap();
        for (depth, job) in [(0, 'a'), (1, 'b'), (0, 'c'), (3, 'd'), (1, 'e')] {
            let say = say.clone();
            pool.push(depth, move || say.send(job).unwrap());
        }
        end.send(()).unwrap();
        let order: String = (0..5).map(|_| said.recv_timeout(LIMIT).unwrap()).collect();
        assert_eq!(order, "dbeac");
        pool.close();
    }

    #[test]
    fn a_panic_while_it_waits_leaves_the_count_right() {
        let pool = Pool::new(1, "jobs".to_owned()).unwrap();
        let (say, said) = mpsc::channel();
        let counted = pool.clone();
        pool.push(0, move || {
            let outcome =
                std::panic::catch_unwind(|| Pool::waiting::<()>(|| panic!("as a program's code may")));
            say.send((outcome.is_err(), counted.state.lock().running)).unwrap();
        });
        assert_eq!(said.recv_timeout(LIMIT), Ok((true, 1)));
        pool.close();
    }

    #[test]
    fn a_job_of_the_owner_that_waits_takes_no_place_and_gives_none_back() {
        let pool = Pool::new(1, "jobs".to_owned()).unwrap();
        let (say, said) = mpsc::channel();
        let counted = pool.clone();
        pool.push_internal(move || {
            Pool::waiting(|| ());
            say.send(counted.state.lock().running).unwrap();
        });
        assert_eq!(said.recv_timeout(LIMIT), Ok(0));
        let (say, said) = mpsc::channel();
        pool.push(0, move || say.send(()).unwrap());
        assert_eq!(said.recv_timeout(LIMIT), Ok(()), "the only place is still free");
        pool.close();
    }

    #[test]
    fn jobs_that_wait_for_calls_leave_their_place_to_others() {
        let pool = Pool::new(1, "jobs".to_owned()).unwrap();
        let (done, ends) = mpsc::channel();
        fn nested(pool: &Arc<Pool>, depth: u8, done: mpsc::Sender<u8>) {
            let (inner, pool_of_inner) = (pool.clone(), pool.clone());
            pool.push(depth, move || {
                assert_eq!(Pool::depth_of_calls(), depth + 1);
                if depth < 3 {
                    let (say, said) = mpsc::channel();
                    nested(&inner, depth + 1, say);
                    Pool::waiting(|| said.recv_timeout(LIMIT).unwrap());
                }
                done.send(depth).unwrap();
                drop(pool_of_inner);
            });
        }
        nested(&pool, 0, done);
        assert_eq!(ends.recv_timeout(LIMIT), Ok(0));
        assert_eq!(Pool::depth_of_calls(), 0);
        pool.close();
    }
}
