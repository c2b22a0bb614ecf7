//! Calls that may wait for a disk, or for the kernel, beside the server's own thread, for which all clients wait.

use std::cell::RefCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, SendError, Sender};
use std::thread;

use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// One thread, which is started at the first call. tokio's function for this panics where the system refuses a thread; here the server's own
/// makes the call then.
#[derive(Debug, Default)]
pub(super) struct Blocking(RefCell<Option<Sender<Job>>>);

impl Blocking {
    /// The result of `call`, which begins at once; an error if it has panicked.
    pub fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = io::Result<T>> {
        self.run_in(start, call)
    }

    fn run_in<T: Send + 'static>(
        &self,
        start: fn(Receiver<Job>) -> io::Result<()>,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = io::Result<T>> {
        let (done, outcome) = oneshot::channel();
        let job: Job = Box::new(move || drop(done.send(call())));
        if let Some(job) = self.give(start, job) {
            carry_out(job);
        }
        async move { outcome.await.map_err(|_| io::Error::other("a call beside the store's server panicked")) }
    }

    /// Gives `job` to the thread. Returns it if there is none.
    fn give(&self, start: fn(Receiver<Job>) -> io::Result<()>, job: Job) -> Option<Job> {
        let mut jobs = self.0.borrow_mut();
        if jobs.is_none() {
            let (sender, given) = mpsc::channel();
            *jobs = start(given).is_ok().then_some(sender);
        }
        match &*jobs {
            Some(jobs) => jobs.send(job).err().map(|SendError(job)| job),
            None => Some(job),
        }
    }
}

fn start(given: Receiver<Job>) -> io::Result<()> {
    let work = move || given.into_iter().for_each(carry_out);
    thread::Builder::new().name("phalanx-store-disk".into()).spawn(work).map(drop)
}

/// Whoever waits for the job hears of a panic: its sender is dropped.
fn carry_out(job: Job) {
    drop(catch_unwind(AssertUnwindSafe(job)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
    }

    fn thread_id() -> thread::ThreadId {
        thread::current().id()
    }

    #[test]
    fn all_calls_have_one_thread_which_outlives_a_panic() {
        run(async {
            let blocking = Blocking::default();
            let first = blocking.run(thread_id).await.unwrap();
            assert_ne!(first, thread_id());
            let panics = blocking.run::<()>(|| panic!("as a fault of the server would"));
            assert!(panics.await.unwrap_err().to_string().contains("panicked"));
            assert_eq!(blocking.run(thread_id).await.unwrap(), first);
        });
    }

    #[test]
    fn where_the_system_refuses_a_thread_the_servers_own_makes_the_call() {
        run(async {
            let blocking = Blocking::default();
            let refused = blocking.run_in(|_| Err(io::ErrorKind::WouldBlock.into()), thread_id);
            assert_eq!(refused.await.unwrap(), thread_id());
            // Later there may be one.
            assert_ne!(blocking.run(thread_id).await.unwrap(), thread_id());
        });
    }
}
