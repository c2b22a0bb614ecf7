//! What a worker does: it reads the items of a batch and collates them.

use std::sync::Arc;

use phalanx::{Rank, WorldSize};

use super::Inner;
use super::collate::Collating;
use super::order::Entry;
use crate::error::{During, guarded};
use crate::pool::Work;
use crate::settings::Init;
use crate::worker::{as_worker, worker_info};
use crate::{Dataset, LoadError, WorkerInfo};

pub(super) struct Loading<D: Dataset, B> {
    dataset: Arc<D>,
    collate: Collating<D::Item, B>,
    /// Until it has been called.
    init: Option<Init>,
    worker: WorkerInfo,
    seed: u64,
}

impl<D: Dataset, B> Loading<D, B> {
    pub fn new(inner: &Inner<D, B>, worker: WorkerInfo) -> Self {
        let Inner { dataset, collate, settings, .. } = inner;
        let (init, seed) = (settings.init.clone(), settings.seed);
        Self { dataset: dataset.clone(), collate: collate.clone(), init, worker, seed }
    }

    fn batch(&mut self, entries: &[Entry], wanted: &dyn Fn() -> bool) -> Result<Option<B>, LoadError> {
        let worker = self.worker;
        if let Some(init) = &self.init {
            as_worker(worker, || guarded(worker, || During::Start, || init(&worker)))?;
            self.init = None;
        }
        let all = || During::Collate(entries.iter().map(|entry| entry.index).collect());
        match &self.collate {
            Collating::All(collate) => {
                let mut items = Vec::with_capacity(entries.len());
                let mut seeds = Vec::with_capacity(entries.len());
                for entry in entries {
                    let Some((item, seeded)) = self.item(*entry, wanted)? else { return Ok(None) };
                    items.push(item);
                    seeds.push(seeded.item_seed);
                }
                as_worker(worker.of_batch(&seeds), || guarded(worker, all, || collate(items))).map(Some)
            }
            Collating::Each(each) => {
                // No item has been read yet.
                let seeds: Vec<u64> = entries.iter().map(|entry| self.seeded(*entry).item_seed).collect();
                let begin = || guarded(worker, all, || Ok(each.begin(entries.len())));
                let mut batch = as_worker(worker.of_batch(&seeds), begin)?;
                for entry in entries {
                    let Some((item, seeded)) = self.item(*entry, wanted)? else { return Ok(None) };
                    let one = || During::Collate(vec![entry.index]);
                    as_worker(seeded, || guarded(worker, one, || each.add(&mut batch, item)))?;
                }
                Ok(Some(batch))
            }
        }
    }

    /// The worker with the seed of an item.
    fn seeded(&self, Entry { index, repeat }: Entry) -> WorkerInfo {
        self.worker.repeating(repeat).at(self.seed, index)
    }

    /// An item, and the worker with its seed; none if its batch is not wanted any more.
    fn item(
        &self,
        entry: Entry,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Option<(D::Item, WorkerInfo)>, LoadError> {
        if !wanted() {
            return Ok(None);
        }
        let (index, worker) = (entry.index, self.seeded(entry));
        // The data set may have said that it is another one: `set_item`.
        let get = || self.dataset.get(index).map(|item| (item, worker_info().unwrap_or(worker)));
        as_worker(worker, || guarded(self.worker, || During::Item(index), get)).map(Some)
    }
}

impl<D: Dataset, B: Send + 'static> Work for Loading<D, B> {
    /// The items, and the rank of the process, of so many: in an elastic job it changes in the middle of a pass.
    type Task = (Vec<Entry>, (Rank, WorldSize));
    type Done = Result<B, LoadError>;

    fn run(&mut self, (entries, rank): Self::Task, wanted: &dyn Fn() -> bool) -> Option<Self::Done> {
        self.worker = self.worker.of_rank(rank);
        self.batch(&entries, wanted).transpose()
    }
}
