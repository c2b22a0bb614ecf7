//! One pass over a stream.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx::{Error, warn};

use super::work::{Delivered, Reading};
use super::{Inner, IterableDataset, Shard, StreamPosition};
use crate::error::During;
use crate::pool::{Missing, Pool};
use crate::settings::{Failure, Progress};
use crate::{LoadError, WorkerInfo};

/// One pass over a stream: what [`StreamLoader::iter`](super::StreamLoader::iter) gives. When it is dropped its threads end; an item
/// that is being read is waited for, at most 5 s.
pub struct StreamBatches<D: IterableDataset, B: Send + 'static> {
    /// None once it can give nothing more. Dropped before `inner`, as in [`Batches`](crate::Batches).
    pool: Option<Pool<Reading<D, B>>>,
    inner: Arc<Inner<D, B>>,
    pass: u64,
    failure: Option<LoadError>,
    /// Of the group among whose ranks the shards were divided, until it is told.
    groups_failure: Option<Failure>,
    /// Workers that have not come to the end of their shards, in the order of their turns.
    turns: VecDeque<usize>,
    issued: u64,
    /// The tasks, with their workers, whose results have not come yet.
    in_flight: VecDeque<(u64, usize)>,
    /// Whether the loop has got anything of the pass, also before a resume.
    has_begun: bool,
    /// The items that fill no batch.
    left_out: usize,
    waited: Duration,
}

impl<D: IterableDataset + 'static, B: Send + 'static> StreamBatches<D, B> {
    pub(super) fn begin(inner: Arc<Inner<D, B>>) -> Self {
        let (pass, position, (rank, world)) = {
            let mut progress = inner.progress.lock();
            let begun = progress.begin(StreamPosition::next_epoch);
            // Whatever group is set later, it is this rank's shards that are read.
            progress.position.note(begun.2);
            begun
        };
        let (epoch, workers) = (position.epoch(), inner.settings.num_workers.max(1));
        let has_begun = position.read().iter().any(|read| *read > 0);
        let (seed, count) = (inner.settings.seed, position.shards());
        let shards_of = move |id: usize| {
            let mine = (rank.index()..count).step_by(world.count()).skip(id).step_by(workers);
            let shard = |index: usize| {
                let seed = WorkerInfo::new(seed, epoch, (0, 0), (rank, world)).at(seed, index).item_seed;
                Shard { index, count, skip: position.read()[index], epoch, seed }
            };
            mine.map(shard).collect::<Vec<_>>()
        };
        let (shared, threads) = (inner.clone(), inner.settings.num_workers);
        let work = move |id: usize| {
            let worker = WorkerInfo::new(seed, epoch, (id, threads), (rank, world));
            Reading::new(&shared, worker, shards_of(id))
        };
        let (pool, failure) = match Pool::start(threads, |id| format!("data-{rank}-{id}"), work) {
            Ok(pool) => (Some(pool), None),
            Err(error) => (None, Some(LoadError::new(During::Start, error, None))),
        };
        let turns = (0..workers).collect();
        let (in_flight, waited) = (VecDeque::new(), Duration::ZERO);
        let groups_failure = inner.failure.lock().clone();
        let mut pass = Self {
            inner,
            pass,
            pool,
            failure,
            groups_failure,
            turns,
            issued: 0,
            in_flight,
            has_begun,
            left_out: 0,
            waited,
        };
        pass.fill();
        pass
    }

    /// Asks the workers for what they may be ahead.
    fn fill(&mut self) {
        let Some(pool) = self.pool.as_mut() else { return };
        let each = if self.inner.settings.num_workers == 0 { 1 } else { self.inner.settings.prefetch_factor };
        while self.in_flight.len() < self.turns.len() * each
            && let Some(worker) = self.turns.pop_front()
        {
            self.turns.push_back(worker);
            pool.submit(worker, self.issued, ());
            self.in_flight.push_back((self.issued, worker));
            self.issued += 1;
        }
    }

    /// How long the loop has waited for batches so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Says, once, if the group has failed among whose ranks the shards were divided: this rank goes on, and what it reads is not all.
    fn tell_of_lost_shards(&mut self) {
        let Some(cause) = self.groups_failure.as_ref().and_then(|failure| failure()) else { return };
        self.groups_failure = None;
        warn(format_args!(
            "a pass over a stream goes on after its group has failed ({cause}): nobody reads the rest of the shards of a rank that was \
             lost. Leave the loop, go back to the last commit or checkpoint, and call `set_group` and `resume` before the next pass"
        ));
    }

    /// Why the pass has had no batch, although there were items.
    fn left_out(&self) -> Option<String> {
        let (items, batch_size) = (self.left_out, self.inner.settings.batch_size);
        (items > 0 && !self.has_begun).then(|| {
            format!(
                "a pass over a stream has no batch: `drop_last` leaves out its {items} items, of which no worker of this rank has {batch_size}. Take \
                 smaller batches or fewer workers, or keep the last batches"
            )
        })
    }

    fn progress(&self, change: impl FnOnce(&mut Progress<StreamPosition>)) {
        let mut progress = self.inner.progress.lock();
        if self.pass == progress.passes {
            change(&mut progress);
        }
    }
}

impl<D: IterableDataset + 'static, B: Send + 'static> Iterator for StreamBatches<D, B> {
    type Item = Result<B, LoadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.tell_of_lost_shards();
        if let Some(failure) = self.failure.take() {
            return Some(Err(failure));
        }
        loop {
            self.fill();
            let pool = self.pool.as_mut()?;
            let Some((number, worker)) = self.in_flight.pop_front() else {
                // The position stays at the end: other ranks may not have come to theirs.
                self.pool = None;
                self.left_out().into_iter().for_each(warn);
                return None;
            };
            let begin = Instant::now();
            let outcome = pool.receive(worker, number, self.inner.settings.timeout);
            self.waited += begin.elapsed();
            let Delivered { batch, read, left_out } = match outcome {
                Ok(delivered) => delivered,
                Err(missing) => {
                    self.pool.take().into_iter().for_each(Pool::abandon);
                    let cause = match missing {
                        Missing::Late => {
                            let timeout = self.inner.settings.timeout;
                            Error::timeout(format!("worker {worker} has delivered no batch in {timeout:?}"))
                                .with_remedy("does the source answer? Else raise the loader's `timeout`")
                        }
                        Missing::Gone => {
                            Error::aborted(format!("worker {worker} has ended before its shards"))
                                .with_remedy("its panic is on standard error: does dropping an item panic?")
                        }
                    };
                    return Some(Err(LoadError::new(During::Wait(Vec::new()), cause, None)));
                }
            };
            self.has_begun |= batch.is_some();
            match batch {
                Some(Ok(batch)) => {
                    self.progress(|progress| progress.position.advance(&read));
                    self.fill();
                    return Some(Ok(batch));
                }
                Some(Err(error)) => return Some(Err(error)),
                None => {
                    self.left_out += left_out;
                    self.progress(|progress| progress.position.advance(&read));
                    self.turns.retain(|turn| *turn != worker);
                    // What it was asked for besides comes to nothing.
                    self.in_flight.retain(|(_, asked)| *asked != worker);
                }
            }
        }
    }
}

impl<D: IterableDataset, B: Send + 'static> fmt::Debug for StreamBatches<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamBatches({} in flight)", self.in_flight.len())
    }
}

#[cfg(test)]
mod tests {
    use phalanx::{Error, ProcessGroup, WorldSize};

    use crate::{IterableDataset, Shard, StreamLoader};

    struct Numbers;

    impl IterableDataset for Numbers {
        type Item = u64;
        type Stream = Box<dyn Iterator<Item = phalanx::Result<u64>>>;

        fn stream(&self, shard: &Shard) -> phalanx::Result<Self::Stream> {
            Ok(Box::new(shard.part_of((0..16).map(Ok))))
        }
    }

    #[test]
    fn a_pass_that_leaves_out_all_items_is_told() {
        let told = |batch_size: usize, num_workers: usize, drop_last: bool| {
            let loader = StreamLoader::builder(Numbers).batch_size(batch_size).num_workers(num_workers);
            let loader = loader.drop_last(drop_last).build().unwrap();
            let mut batches = loader.iter();
            let count = batches.by_ref().count();
            (count, batches.left_out())
        };
        // Each of two workers has 8 of the 16 items.
        let (count, said) = told(9, 2, true);
        assert!(count == 0 && said.is_some_and(|said| said.contains("its 16 items")));
        for (asked, count) in [((8, 2, true), 2), ((9, 1, true), 1), ((9, 2, false), 2)] {
            let (batch_size, num_workers, drop_last) = asked;
            assert_eq!(told(batch_size, num_workers, drop_last), (count, None));
        }
        // The first batch was taken before.
        let loader = || StreamLoader::builder(Numbers).batch_size(9).drop_last(true).build().unwrap();
        let first = loader();
        first.iter().next().unwrap().unwrap();
        let rest = loader();
        rest.resume(&first.position()).unwrap();
        let mut batches = rest.iter();
        assert_eq!((batches.by_ref().count(), batches.left_out()), (0, None));
    }

    #[test]
    fn a_pass_that_outlives_its_group_tells_so_once_and_the_next_group_s_does_not() {
        let world = || ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let (first, second) = (world(), world());
        let loader = StreamLoader::builder(Numbers).group(&first[0]).shards(2).build().unwrap();
        let mut batches = loader.iter();
        batches.next().unwrap().unwrap();
        assert!(batches.groups_failure.is_some(), "nothing has happened");
        first[0].abort(Error::aborted("rank 1 was lost"));
        // Nothing of the group is kept.
        drop(first);
        assert_eq!(batches.next().unwrap().unwrap(), [2]);
        assert!(batches.groups_failure.is_none(), "it was told");

        loader.set_group(&second[0]).unwrap();
        let mut batches = loader.iter();
        batches.next().unwrap().unwrap();
        assert!(batches.groups_failure.is_some());
        let alone = StreamLoader::builder(Numbers).group(&ProcessGroup::alone().unwrap()).build().unwrap();
        assert!(alone.iter().groups_failure.is_none(), "there are no other shards");
    }
}
