//! The common parts of loaders of data sets and of streams.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use phalanx::group::DEFAULT_TIMEOUT;
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};

use crate::WorkerInfo;

/// More workers than this are a mistake.
const MAX_WORKERS: usize = 1024;
/// So is a longer queue.
const MAX_PREFETCH: usize = 1024;

/// How a batch is made of its items.
pub(crate) type Collate<I, B> = Arc<dyn Fn(Vec<I>) -> Result<B> + Send + Sync>;
/// What a worker does before its first item.
pub(crate) type Init = Arc<dyn Fn(&WorkerInfo) -> Result<()> + Send + Sync>;
/// Why a group has failed, if it has.
pub(crate) type Failure = Arc<dyn Fn() -> Option<Error> + Send + Sync>;

/// What looks whether `group` has failed, if others are in it.
pub(crate) fn failure_of(group: &ProcessGroup) -> Option<Failure> {
    let failure: Failure = Arc::new(group.watch_from_outside());
    (group.world_size() != WorldSize::ONE).then_some(failure)
}

/// The options that both builders have, with PyTorch's defaults.
#[derive(Clone)]
pub(crate) struct Settings {
    pub init: Option<Init>,
    pub seed: u64,
    pub batch_size: usize,
    pub drop_last: bool,
    pub num_workers: usize,
    pub prefetch_factor: usize,
    pub timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            init: None,
            seed: 0,
            batch_size: 1,
            drop_last: false,
            num_workers: 0,
            prefetch_factor: 2,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

impl Settings {
    /// Refuses options outside of their ranges.
    pub fn check(&self) -> Result<()> {
        checked("batch_size", self.batch_size, 1..=usize::MAX)?;
        checked("num_workers", self.num_workers, 0..=MAX_WORKERS)?;
        checked("prefetch_factor", self.prefetch_factor, 1..=MAX_PREFETCH)?;
        if self.timeout.is_zero() {
            return Err(Error::invalid_argument("timeout is 0: no batch comes in that time")
                .with_remedy("to wait without an end, as PyTorch does with 0, give Duration::MAX"));
        }
        Ok(())
    }
}

/// Refuses a number outside of its range.
pub(crate) fn checked(option: &str, number: usize, range: RangeInclusive<usize>) -> Result<()> {
    if range.contains(&number) {
        return Ok(());
    }
    let most = if *range.end() == usize::MAX { "or more".to_owned() } else { format!("to {}", range.end()) };
    Err(Error::invalid_argument(format!("{option} is {number}; it may be {} {most}", range.start())))
}

/// How far a loader's passes have come.
pub(crate) struct Progress<P> {
    /// How many passes have begun. The last is the one whose position counts.
    pub passes: u64,
    /// Whether the pass of this position has begun.
    pub begun: bool,
    /// Behind the batches that the loop has got.
    pub position: P,
    pub shard: (Rank, WorldSize),
    /// Whose workers load, if the program divides the items by itself: the rank of the process, of so many.
    pub worker_rank: Option<(Rank, WorldSize)>,
}

impl<P: Clone> Progress<P> {
    /// At `position`, with nothing begun.
    pub fn new(position: P, shard: (Rank, WorldSize)) -> Self {
        Self { passes: 0, begun: false, position, shard, worker_rank: None }
    }

    /// At the same position, with nothing begun.
    pub fn unbegun(&self) -> Self {
        Self { worker_rank: self.worker_rank, ..Self::new(self.position.clone(), self.shard) }
    }

    /// Whose workers load: the rank of the process, of so many.
    pub fn worker_rank(&self) -> (Rank, WorldSize) {
        self.worker_rank.unwrap_or(self.shard)
    }

    /// Begins a pass: its number, and where it begins. A pass that was begun before and cut off is not continued.
    pub fn begin(&mut self, next_epoch: impl FnOnce(&mut P)) -> (u64, P, (Rank, WorldSize)) {
        if self.begun {
            next_epoch(&mut self.position);
        }
        self.begun = true;
        self.passes += 1;
        (self.passes, self.position.clone(), self.shard)
    }
}
