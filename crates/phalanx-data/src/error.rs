//! Why a batch could not be loaded.

use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx::{Error, panic_message};

use crate::WorkerInfo;

/// Why a batch could not be loaded: at which item, on which worker, and the error or panic there.
///
/// It becomes a [`phalanx::Error`] by `?`, of the kind of its [`cause`](Self::cause): `is_timeout` is true for a batch that did not come in time.
#[derive(Clone)]
pub struct LoadError(Arc<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    during: During,
    cause: Error,
    panicked: bool,
    worker: Option<WorkerInfo>,
}

/// What was done when it failed.
#[derive(Clone, Debug)]
pub(crate) enum During {
    /// Reading the item of this index.
    Item(usize),
    /// Making a batch of the items of these indices.
    Collate(Vec<usize>),
    /// Reading the next item of a shard, behind so many.
    Stream { shard: usize, place: u64 },
    /// Making a batch of items of a stream.
    CollateStream,
    /// Readying a worker.
    Start,
    /// Waiting for the batch of the items of these indices.
    Wait(Vec<usize>),
}

impl LoadError {
    pub(crate) fn new(during: During, cause: Error, worker: Option<WorkerInfo>) -> Self {
        Self(Arc::new(Inner { during, cause, panicked: false, worker }))
    }

    /// The index of the item at which it failed; none if it was no single one, or of a stream.
    pub fn index(&self) -> Option<usize> {
        match self.0.during {
            During::Item(index) => Some(index),
            During::Collate(_) | During::Stream { .. } | During::CollateStream => None,
            During::Start | During::Wait(_) => None,
        }
    }

    /// The indices of the items among which the cause is: one, or all of a batch.
    pub fn indices(&self) -> &[usize] {
        match &self.0.during {
            During::Item(index) => std::slice::from_ref(index),
            During::Collate(indices) | During::Wait(indices) => indices,
            During::Stream { .. } | During::CollateStream | During::Start => &[],
        }
    }

    /// The worker on which it failed.
    pub fn worker(&self) -> Option<WorkerInfo> {
        self.0.worker
    }

    /// Whether it was a panic.
    pub fn is_panic(&self) -> bool {
        self.0.panicked
    }

    /// The cause of the error.
    pub fn cause(&self) -> &Error {
        &self.0.cause
    }
}

/// Runs the user's `code`; an error or a panic is one of what was done `during` it.
pub(crate) fn guarded<T>(
    worker: WorkerInfo,
    during: impl Fn() -> During,
    code: impl FnOnce() -> phalanx::Result<T>,
) -> Result<T, LoadError> {
    let (cause, panicked) = match catch_unwind(AssertUnwindSafe(code)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => (error, false),
        Err(panic) => (Error::aborted(panic_message(&*panic)), true),
    };
    Err(LoadError(Arc::new(Inner { during: during(), cause, panicked, worker: Some(worker) })))
}

/// Indices of a batch that an error shows.
const SHOWN: usize = 8;

fn list(indices: &[usize]) -> String {
    let shown: Vec<String> = indices.iter().take(SHOWN).map(usize::to_string).collect();
    let more = if indices.len() > SHOWN { ", .." } else { "" };
    format!("[{}{more}]", shown.join(", "))
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { during, cause, panicked, worker } = &*self.0;
        match during {
            During::Item(index) => write!(f, "item {index} of the data set")?,
            During::Collate(indices) => write!(f, "the collate function, with the items {}", list(indices))?,
            During::Stream { shard, place } => write!(f, "item {place} of shard {shard} of the stream")?,
            During::CollateStream => f.write_str("the collate function")?,
            During::Start => f.write_str("the start of a worker")?,
            During::Wait(indices) => write!(f, "the batch of the items {}", list(indices))?,
        }
        if let Some(worker) = worker {
            write!(f, " (epoch {}, worker {} of rank {})", worker.epoch, worker.id, worker.rank)?;
        }
        write!(f, "{}: {cause}", if *panicked { " panicked" } else { "" })
    }
}

impl fmt::Debug for LoadError {
    // `fn main() -> Result<(), LoadError>` prints the debug form: it must read well.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StdError for LoadError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        // The message shows the cause already.
        self.0.cause.source()
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Self {
        // As `Error::other`, but of the cause's kind: a late batch is a time-out behind `?` too.
        Self::new(error.cause().kind(), "").with_source(error)
    }
}
