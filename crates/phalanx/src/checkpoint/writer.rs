//! The thread that writes, on rank 0.

use std::io;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::folder::Folder;
use super::lock::Lock;
use super::snapshot::Snapshot;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// How long a drop waits for the write in flight.
const LAST: Duration = Duration::from_secs(30);

/// What the thread writes.
#[derive(Debug)]
pub(super) struct Job {
    pub step: u64,
    pub world_size: u32,
    pub keep: usize,
    pub snapshot: Snapshot,
}

/// Hands snapshots to a thread, one at a time.
#[derive(Debug)]
pub(super) struct Writer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    folder: Folder,
    state: Mutex<State>,
    changed: Condvar,
    /// Is given back when the thread has ended, even if nobody waited for that.
    _lock: Lock,
}

#[derive(Debug, Default)]
struct State {
    /// Handed over, not begun.
    next: Option<Job>,
    /// The step whose write is in flight, from when it is handed over.
    step: Option<u64>,
    /// Of the write before, until somebody has been told.
    failure: Option<Error>,
    /// The thread takes nothing more.
    closed: bool,
}

impl Writer {
    /// Starts the thread; checkpoints get numbers from `number` on.
    pub fn start(folder: Folder, number: u64, lock: Lock) -> io::Result<Self> {
        let shared =
            Arc::new(Shared { folder, state: Mutex::default(), changed: Condvar::new(), _lock: lock });
        let worker = shared.clone();
        Builder::new().name("phalanx-checkpoint".into()).spawn(move || worker.work(number))?;
        Ok(Self(shared))
    }

    /// Hands a snapshot over once the write before has ended, and gives that one's failure.
    pub fn write(&self, job: Job, deadline: Deadline) -> Result<()> {
        let mut state = self.idle(deadline)?;
        let before = state.failure.take();
        if state.closed {
            return Err(before.unwrap_or_else(panicked));
        }
        state.step = Some(job.step);
        state.next = Some(job);
        self.0.changed.notify_all();
        before.map_or(Ok(()), Err)
    }

    /// Waits until nothing is in flight, and gives the failure of the last write.
    pub fn finish(&self, deadline: Deadline) -> Result<()> {
        self.idle(deadline)?.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until nothing is in flight; a failure is kept for whoever saves or finishes.
    pub fn settle(&self, deadline: Deadline) -> Result<()> {
        self.idle(deadline).map(drop)
    }

    fn idle(&self, deadline: Deadline) -> Result<MutexGuard<'_, State>> {
        let mut state = self.0.state.lock();
        while let Some(step) = state.step {
            if self.0.changed.wait_until(&mut state, deadline.instant()).timed_out() && state.step.is_some() {
                let folder = self.0.folder.path.display();
                return Err(Error::timeout(format!(
                    "the checkpoint of step {step} is still being written to {folder}"
                ))
                .at(Rank::MAIN, host())
                .with_remedy(
                    "save less often, write to a faster disk, or allow more time with `with_timeout`",
                ));
            }
        }
        Ok(state)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let outcome = self.finish(Deadline::after(LAST));
        if let Err(error) = outcome {
            tracing::warn!(%error, "the last checkpoint was not written");
        }
        self.0.state.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn work(&self, first: u64) {
        for number in first.. {
            let Some(job) = self.next() else { return };
            let mut end = End { shared: self, failure: Some(panicked()) };
            end.failure = self.write(number, &job).err();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.next.take() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn write(&self, number: u64, job: &Job) -> Result<()> {
        let Self { folder, .. } = self;
        folder.write(number, job.step, job.world_size, &job.snapshot).map_err(|error| {
            let cause =
                format!("cannot write the checkpoint of step {} to {}", job.step, folder.path.display());
            let remedy = remedy(&error);
            Error::io(cause, error).at(Rank::MAIN, host()).with_remedy(remedy)
        })?;
        if let Err(error) = folder.rotate(job.keep) {
            // What was to be saved is.
            tracing::warn!(folder = %folder.path.display(), %error, "old checkpoints were not removed");
        }
        Ok(())
    }
}

/// Tells those who wait that a write has ended, also by a panic of the program's code that lends its memory.
struct End<'a> {
    shared: &'a Shared,
    failure: Option<Error>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.step = None;
        state.failure = self.failure.take();
        state.closed |= std::thread::panicking();
        self.shared.changed.notify_all();
    }
}

fn panicked() -> Error {
    Error::aborted("the thread that writes checkpoints has panicked")
        .at(Rank::MAIN, host())
        .with_remedy("standard error says where; open the checkpoints anew")
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn remedy(error: &io::Error) -> &'static str {
    use io::ErrorKind::{
        FileTooLarge, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
    };
    match error.kind() {
        StorageFull | QuotaExceeded => {
            "make room, or keep fewer with `keep`; while one is written there is one more. The older ones are as they were"
        }
        FileTooLarge => "is the size of files limited, by `ulimit -f`? The older ones are as they were",
        NotFound => "was the folder removed while the job ran?",
        PermissionDenied | ReadOnlyFilesystem => "may rank 0 write there?",
        _ => "the older ones are as they were",
    }
}
