//! One pass over a data set.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx::sampler::ElasticSampler;
use phalanx::{Error, Rank, Result, WorldSize, warn};

use super::Inner;
use super::collate::Collating;
use super::order::{Entry, Order};
use super::position::over;
use super::work::Loading;
use crate::dataset::outside;
use crate::error::During;
use crate::pool::{Missing, Pool};
use crate::settings::{Failure, Progress, Settings};
use crate::{Dataset, LoadError, WorkerInfo};

/// One pass over a data set: what [`DataLoader::iter`](super::DataLoader::iter) gives. When it is dropped its threads end; an item
/// that is being read is waited for, at most 5 s.
pub struct Batches<D: Dataset, B: Send + 'static> {
    /// None once it can give nothing more. Dropped before `inner`: a worker that had the data set last would close it, such as an LMDB file, in
    /// whose memory others note at their ends that they are gone.
    pool: Option<Pool<Loading<D, B>>>,
    inner: Arc<Inner<D, B>>,
    /// Which pass of the loader it is.
    pass: u64,
    /// Why it could not begin, until that was said.
    failure: Option<LoadError>,
    /// Of the group among whose ranks the items were divided, until it is told, or the program takes care of it.
    groups_failure: Option<Failure>,
    /// Behind the batches that were handed to workers.
    ahead: ElasticSampler,
    /// The sampler's own order of this epoch.
    order: Option<Order>,
    shard: (Rank, WorldSize),
    /// Whose workers load: the rank of the process, of so many.
    worker_rank: (Rank, WorldSize),
    /// How many batches have been handed to workers.
    issued: u64,
    /// Those that the loop has not got yet.
    in_flight: VecDeque<InFlight>,
    /// Behind the last batch, if the loop got an error in its place.
    behind_failed: Option<ElasticSampler>,
    waited: Duration,
}

struct InFlight {
    number: u64,
    indices: Vec<usize>,
    /// The position behind it.
    after: ElasticSampler,
}

impl<D: Dataset + 'static, B: Send + 'static> Batches<D, B> {
    pub(super) fn begin(inner: Arc<Inner<D, B>>) -> Self {
        let ((pass, position, shard), worker_rank) = {
            let mut progress = inner.progress.lock();
            (progress.begin(ElasticSampler::next_epoch), progress.worker_rank())
        };
        let groups_failure = inner.failure.lock().clone();
        let mut pass = Self {
            inner,
            pass,
            pool: None,
            failure: None,
            groups_failure,
            ahead: position,
            order: None,
            shard,
            worker_rank,
            issued: 0,
            in_flight: VecDeque::new(),
            behind_failed: None,
            waited: Duration::ZERO,
        };
        match pass.start() {
            Ok(pool) => {
                pass.left_out().into_iter().for_each(warn);
                pass.pool = Some(pool);
                pass.fill();
            }
            Err(error) => pass.failure = Some(LoadError::new(During::Start, error, None)),
        }
        pass
    }

    fn start(&mut self) -> Result<Pool<Loading<D, B>>> {
        let epoch = self.ahead.epoch();
        let (shard, worker_rank, samples) = (self.shard, self.worker_rank, self.inner.dataset.len());
        if let Some(own) = &self.inner.own {
            let order = own.order(epoch);
            if let Some(index) = order.indices().iter().find(|index| **index >= samples) {
                return Err(outside(*index, samples).with_remedy("mend the sampler's order"));
            }
            let indices = order.indices();
            self.ahead = over(&self.ahead, indices.len()).seed(own.digest(indices));
            self.record(&self.ahead);
            self.order = Some(order);
        }
        if self.ahead.consumed() == 0 {
            self.inner.check(self.ahead.samples(), shard.1)?;
        }
        let (inner, workers) = (self.inner.clone(), self.inner.settings.num_workers);
        let info = move |id| WorkerInfo::new(inner.settings.seed, epoch, (id, workers), worker_rank);
        let inner = self.inner.clone();
        let name = |id: usize| format!("data-{}-{id}", worker_rank.0);
        Pool::start(workers, name, move |id| Loading::new(&inner, info(id)))
    }

    /// Says, once, if the group has failed among whose ranks the items were divided: this rank goes on, and what it loads is not all.
    fn tell_of_lost_items(&mut self) {
        let Some(cause) = self.groups_failure.as_ref().and_then(|failure| failure()) else { return };
        self.groups_failure = None;
        warn(format_args!(
            "a pass over a data set goes on after its group has failed ({cause}): nobody loads what is left for a rank that was lost. In an \
             elastic job call `regroup` after each step; else leave the loop, go back to the last checkpoint, and call `set_group` and `resume` \
             before the next pass"
        ));
    }

    /// Why the pass has no batch, although there are items.
    fn left_out(&self) -> Option<String> {
        let (ahead, world) = (&self.ahead, self.shard.1);
        let (items, batch_size) = (ahead.samples(), self.inner.settings.batch_size);
        let has_none = ahead.consumed() == 0 && self.inner.steps_left(ahead, world) == 0;
        (items > 0 && has_none).then(|| {
            format!(
                "a pass over {items} items has no batch: `drop_last` or the tail leaves out what does not fill a batch of {batch_size} on \
                 each of {world} ranks. Take smaller batches, or keep the last one"
            )
        })
    }

    /// Hands to the workers what they may be ahead.
    fn fill(&mut self) {
        let Settings { batch_size, num_workers, prefetch_factor, .. } = self.inner.settings;
        let most = (num_workers * prefetch_factor).max(1);
        let ((rank, world), worker_rank) = (self.shard, self.worker_rank);
        while let Some(pool) = self.pool.as_mut()
            && self.in_flight.len() < most
            && self.inner.steps_left(&self.ahead, world) > 0
            && let Some(places) = self.ahead.next_batch(batch_size, rank, world)
        {
            let entry = |place: usize| match &self.order {
                Some(order) => order.entry(place),
                None => Entry { index: place, repeat: 0 },
            };
            let entries: Vec<Entry> = places.into_iter().map(entry).collect();
            let indices = entries.iter().map(|entry| entry.index).collect();
            let (number, workers) = (self.issued, pool.workers() as u64);
            self.issued += 1;
            pool.submit((number % workers) as usize, number, (entries, worker_rank));
            self.in_flight.push_back(InFlight { number, indices, after: self.ahead.clone() });
        }
    }

    /// Call it after each step of an elastic job, on every rank alike, with what the
    /// [step](phalanx::elastic::Context::step) says, before the next batch is asked for. The samples of the ranks `missing` come
    /// again, and from here on this rank is `rank` of `world_size`. Batches that were loaded ahead for the old world are loaded anew. A batch
    /// in whose place this rank got an error counts as the others' do: the step was made without it. A step that adds up the gradients of several
    /// small batches divides one batch of the loader into them: of a dead rank the samples of the last batch alone come again.
    ///
    /// ```no_run
    /// # use phalanx::elastic::{Context, Plain};
    /// # use phalanx_data::{DataLoader, InMemory, Position};
    /// # fn train(context: &mut Context<'_, Plain<(f32, Position)>>, loader: DataLoader<InMemory<f32>>) -> phalanx::Result<()> {
    /// loader.set_group(context.group());
    /// loader.resume(&context.state.0.1)?;
    /// let mut batches = loader.iter();
    /// while let Some(batch) = batches.next().transpose()? {
    ///     let step = context.step(|_, group| {
    ///         let mut gradient = [batch.iter().sum::<f32>()]; // backward
    ///         group.all_reduce(&mut gradient, phalanx::ReduceOp::Sum).map(|()| gradient)
    ///     })?;
    ///     batches.regroup(&step.missing, context.rank(), context.world_size());
    ///     context.state.0.0 -= step.value[0];
    ///     context.state.0.1 = loader.position();
    ///     context.commit()?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// If `rank` is not one of `world_size`: it would get samples of others.
    pub fn regroup(&mut self, missing: &[Rank], rank: Rank, world_size: WorldSize) {
        self.groups_failure = None;
        let changes = !missing.is_empty() || self.shard != (rank, world_size);
        let position = {
            let mut progress = self.inner.progress.lock();
            if self.pass != progress.passes {
                return;
            }
            if let Some(behind) = self.behind_failed.take() {
                progress.position = behind;
            }
            // What the last batch gave can be put back once, and not behind the next one.
            progress.position.put_back(missing);
            progress.shard = (rank, world_size);
            // The next pass is divided among these ranks, too, whatever became of the group before.
            *self.inner.failure.lock() = None;
            if changes {
                progress.worker_rank = None;
            }
            progress.position.clone()
        };
        if !changes {
            return;
        }
        (self.shard, self.worker_rank) = ((rank, world_size), (rank, world_size));
        self.ahead = position;
        self.in_flight.clear();
        if let Some(pool) = self.pool.as_mut() {
            pool.skip_to(self.issued);
        }
        self.fill();
    }

    /// Gives a batch back of which the loop has no more need: with [`reuse`](super::DataLoaderBuilder::reuse) a later one gets its memory.
    /// At most as many are kept as workers may be ahead, and one.
    pub fn recycle(&self, batch: B) {
        if let Collating::Each(each) = &self.inner.collate {
            let Settings { num_workers, prefetch_factor, .. } = self.inner.settings;
            each.give_back(batch, num_workers * prefetch_factor + 1);
        }
    }

    /// How long the loop has waited for batches so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The epoch of this pass.
    pub fn epoch(&self) -> u64 {
        self.ahead.epoch()
    }

    /// Notes that the loop has come to `position`, if this is the loader's newest pass.
    fn record(&self, position: &ElasticSampler) {
        self.progress(|progress| progress.position = position.clone());
    }

    fn progress(&self, change: impl FnOnce(&mut Progress<ElasticSampler>)) {
        let mut progress = self.inner.progress.lock();
        if self.pass == progress.passes {
            change(&mut progress);
        }
    }

    /// The pass is over.
    fn end(&mut self) {
        if self.pool.take().is_some() {
            self.progress(|progress| {
                progress.position.next_epoch();
                progress.begun = false;
            });
        }
    }

    fn missing(&self, missing: &Missing, indices: Vec<usize>, worker: usize) -> LoadError {
        let cause = match missing {
            Missing::Late => Error::timeout(format!(
                "worker {worker} has not loaded it in {:?}",
                self.inner.settings.timeout
            ))
            .with_remedy("does the storage answer? Else raise the loader's `timeout`"),
            Missing::Gone => Error::aborted(format!("worker {worker} has ended before it was loaded"))
                .with_remedy("its panic is on standard error: does dropping an item panic?"),
        };
        LoadError::new(During::Wait(indices), cause, None)
    }
}

impl<D: Dataset + 'static, B: Send + 'static> Iterator for Batches<D, B> {
    type Item = Result<B, LoadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.tell_of_lost_items();
        if let Some(failure) = self.failure.take() {
            return Some(Err(failure));
        }
        self.fill();
        let pool = self.pool.as_mut()?;
        let Some(InFlight { number, indices, after }) = self.in_flight.pop_front() else {
            self.end();
            return None;
        };
        let begin = Instant::now();
        let worker = (number % pool.workers() as u64) as usize;
        let outcome = pool.receive(worker, number, self.inner.settings.timeout);
        self.waited += begin.elapsed();
        self.behind_failed = None;
        match outcome {
            Ok(Ok(batch)) => {
                self.record(&after);
                // While the loop computes, the workers go on.
                self.fill();
                Some(Ok(batch))
            }
            Ok(Err(error)) => {
                self.behind_failed = Some(after);
                Some(Err(error))
            }
            Err(missing) => {
                // The pass is not over, and cannot go on: its position stays where it is.
                self.pool.take().into_iter().for_each(Pool::abandon);
                Some(Err(self.missing(&missing, indices, worker)))
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = match &self.pool {
            Some(_) => self.in_flight.len() + self.inner.steps_left(&self.ahead, self.shard.1),
            None => 0,
        };
        let left = left + usize::from(self.failure.is_some());
        (left, Some(left))
    }
}

impl<D: Dataset + 'static, B: Send + 'static> ExactSizeIterator for Batches<D, B> {}

impl<D: Dataset, B: Send + 'static> fmt::Debug for Batches<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batches(epoch {}, {} in flight)", self.ahead.epoch(), self.in_flight.len())
    }
}

#[cfg(test)]
mod tests {
    use phalanx::sampler::Tail;
    use phalanx::{Error, ProcessGroup, Rank, WorldSize};

    use crate::{DataLoader, InMemory};

    #[test]
    fn a_pass_that_outlives_its_group_tells_so_once_unless_it_is_regrouped() {
        let world = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let items = (0..16).collect::<InMemory<usize>>();
        let loader = DataLoader::builder(items.clone()).group(&world[0]).build().unwrap();
        let (mut told, mut regrouped) = (loader.iter(), loader.iter());
        assert_eq!(told.next().unwrap().unwrap(), [0]);
        assert!(told.groups_failure.is_some() && regrouped.groups_failure.is_some(), "nothing has happened");
        world[0].abort(Error::aborted("rank 1 was lost"));
        assert_eq!(told.next().unwrap().unwrap(), [2]);
        assert!(told.groups_failure.is_none(), "it was told");
        regrouped.regroup(&[], Rank::MAIN, WorldSize::ONE);
        assert!(regrouped.groups_failure.is_none());
        assert!(loader.iter().groups_failure.is_none(), "the next pass is divided among the ranks of now");
        let alone = DataLoader::builder(items).build().unwrap();
        assert!(alone.iter().groups_failure.is_none(), "there are no other ranks");
    }

    #[test]
    fn a_pass_that_leaves_out_all_items_is_told() {
        let told = |len: usize, drop_last: bool, tail: Tail| {
            let loader = DataLoader::builder((0..len).collect::<InMemory<usize>>());
            let loader = loader.batch_size(4).drop_last(drop_last).tail(tail).build().unwrap();
            loader.iter().left_out()
        };
        for (drop_last, tail) in [(true, Tail::Repeat), (false, Tail::Drop)] {
            assert!(told(3, drop_last, tail).is_some_and(|said| said.contains("over 3 items")));
            assert_eq!((told(4, drop_last, tail), told(0, drop_last, tail)), (None, None));
        }
        assert_eq!(told(3, false, Tail::Repeat), None);
    }
}
