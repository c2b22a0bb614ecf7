//! What a worker does: it reads its shards, one after the other, and makes batches of them.

use std::sync::Arc;

use super::{Inner, IterableDataset, Shard};
use crate::error::{During, guarded};
use crate::pool::Work;
use crate::settings::{Collate, Init};
use crate::worker::{as_worker, worker_info};
use crate::{LoadError, WorkerInfo};

pub(super) struct Reading<D: IterableDataset, B> {
    dataset: Arc<D>,
    collate: Collate<D::Item, B>,
    init: Option<Init>,
    worker: WorkerInfo,
    batch_size: usize,
    drop_last: bool,
    /// The shards that are left to read, the last first.
    shards: Vec<Shard>,
    open: Option<Open<D::Stream>>,
    /// Of the next batch.
    items: Vec<D::Item>,
    /// Of these items.
    seeds: Vec<u64>,
    /// How far the shards of these items have been read.
    read: Vec<(usize, u64)>,
}

struct Open<S> {
    stream: S,
    shard: Shard,
    /// How many of its items have been read, with those that were read before.
    read: u64,
}

/// A batch, and how far the shards behind it have been read.
pub(super) struct Delivered<B> {
    /// None at the end of the worker's shards.
    pub batch: Option<Result<B, LoadError>>,
    pub read: Vec<(usize, u64)>,
    /// The items at the end that fill no batch.
    pub left_out: usize,
}

impl<D: IterableDataset, B> Reading<D, B> {
    pub fn new(inner: &Inner<D, B>, worker: WorkerInfo, mut shards: Vec<Shard>) -> Self {
        shards.reverse();
        Self {
            dataset: inner.dataset.clone(),
            collate: inner.collate.clone(),
            init: inner.settings.init.clone(),
            worker,
            batch_size: inner.settings.batch_size,
            drop_last: inner.settings.drop_last,
            shards,
            open: None,
            items: Vec::new(),
            seeds: Vec::new(),
            read: Vec::new(),
        }
    }

    /// The next item, and its seed; none at the end of the last shard.
    fn item(&mut self) -> Result<Option<(D::Item, u64)>, LoadError> {
        loop {
            if self.open.is_none() {
                let Some(shard) = self.shards.pop() else { return Ok(None) };
                let during = || During::Stream { shard: shard.index, place: shard.skip };
                let worker = WorkerInfo { item_seed: shard.seed, ..self.worker };
                let stream = as_worker(worker, || guarded(worker, during, || self.dataset.stream(&shard)))?;
                self.open = Some(Open { stream, shard, read: shard.skip });
            }
            let Some(open) = self.open.as_mut() else { continue };
            let (index, place) = (open.shard.index, open.read);
            let worker = self.worker.in_shard(open.shard.seed, place);
            let during = || During::Stream { shard: index, place };
            let seeded = |item| (item, worker_info().unwrap_or(worker).item_seed);
            let read = || open.stream.next().transpose().map(|item| item.map(seeded));
            let next = as_worker(worker, || guarded(worker, during, read));
            if next.as_ref().is_err_and(LoadError::is_panic) {
                // What it would give next, nobody knows.
                self.open = None;
            } else if !matches!(next, Ok(None)) {
                open.read += 1;
                let read = open.read;
                match self.read.last_mut() {
                    Some((last, place)) if *last == index => *place = read,
                    _ => self.read.push((index, read)),
                }
            }
            match next {
                Ok(None) => self.open = None,
                item => return item,
            }
        }
    }

    fn batch(&mut self, wanted: &dyn Fn() -> bool) -> Option<Option<Result<B, LoadError>>> {
        let worker = self.worker;
        if let Some(init) = &self.init {
            match as_worker(worker, || guarded(worker, || During::Start, || init(&worker))) {
                Ok(()) => self.init = None,
                Err(error) => {
                    // A loop that goes on finds the end here, and not the same error for ever.
                    (self.init, self.open) = (None, None);
                    self.shards.clear();
                    return Some(Some(Err(error)));
                }
            }
        }
        while self.items.len() < self.batch_size {
            if !wanted() {
                return None;
            }
            match self.item() {
                Ok(Some((item, seed))) => {
                    self.items.push(item);
                    self.seeds.push(seed);
                }
                Ok(None) if self.items.is_empty() || self.drop_last => return Some(None),
                Ok(None) => break,
                // What was read so far is in the next batch.
                Err(error) => return Some(Some(Err(error))),
            }
        }
        let (items, seeds) = (std::mem::take(&mut self.items), std::mem::take(&mut self.seeds));
        let collate = || guarded(worker, || During::CollateStream, || (self.collate)(items));
        Some(Some(as_worker(worker.of_batch(&seeds), collate)))
    }
}

impl<D: IterableDataset, B: Send + 'static> Work for Reading<D, B> {
    type Task = ();
    type Done = Delivered<B>;

    fn run(&mut self, (): (), wanted: &dyn Fn() -> bool) -> Option<Delivered<B>> {
        let batch = self.batch(wanted)?;
        let read = match &batch {
            Some(Ok(_)) => std::mem::take(&mut self.read),
            None if self.items.is_empty() => std::mem::take(&mut self.read),
            // A loop that goes on after an error gets it with the next batch; a loop that resumes reads it again.
            Some(Err(_)) | None => Vec::new(),
        };
        let left_out = if batch.is_none() { self.items.len() } else { 0 };
        Some(Delivered { batch, read, left_out })
    }
}
