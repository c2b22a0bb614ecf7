//! What a worker does: it reads the items of a batch and collates them.

use std::sync::Arc;

use phalanx::{Rank, WorldSize};

use super::Inner;
use super::collate::Collating;
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

    fn batch(&mut self, indices: &[usize], wanted: &dyn Fn() -> bool) -> Result<Option<B>, LoadError> {
        let worker = self.worker;
        if let Some(init) = &self.init {
            as_worker(worker, || guarded(worker, || During::Start, || init(&worker)))?;
            self.init = None;
        }
        match &self.collate {
            Collating::All(collate) => {
                let mut items = Vec::with_capacity(indices.len());
                let mut seeds = Vec::with_capacity(indices.len());
                for index in indices {
                    let Some((item, seeded)) = self.item(*index, wanted)? else { return Ok(None) };
                    items.push(item);
                    seeds.push(seeded.item_seed);
                }
                let all = || During::Collate(indices.to_vec());
                as_worker(worker.of_batch(&seeds), || guarded(worker, all, || collate(items))).map(Some)
            }
            Collating::Each(each) => {
                let all = || During::Collate(indices.to_vec());
                // No item has been read yet.
                let seeds: Vec<u64> =
                    indices.iter().map(|index| worker.at(self.seed, *index).item_seed).collect();
                let begin = || guarded(worker, all, || Ok(each.begin(indices.len())));
                let mut batch = as_worker(worker.of_batch(&seeds), begin)?;
                for index in indices {
                    let Some((item, seeded)) = self.item(*index, wanted)? else { return Ok(None) };
                    let one = || During::Collate(vec![*index]);
                    as_worker(seeded, || guarded(worker, one, || each.add(&mut batch, item)))?;
                }
                Ok(Some(batch))
            }
        }
    }

    /// The item at `index`, and the worker with its seed; none if its batch is not wanted any more.
    fn item(
        &self,
        index: usize,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Option<(D::Item, WorkerInfo)>, LoadError> {
        if !wanted() {
            return Ok(None);
        }
        let worker = self.worker.at(self.seed, index);
        // The data set may have said that it is another one: `set_item`.
        let get = || self.dataset.get(index).map(|item| (item, worker_info().unwrap_or(worker)));
        as_worker(worker, || guarded(self.worker, || During::Item(index), get)).map(Some)
    }
}

impl<D: Dataset, B: Send + 'static> Work for Loading<D, B> {
    /// The indices of the items, and the rank of the process, of so many: in an elastic job it changes in the middle of a pass.
    type Task = (Vec<usize>, (Rank, WorldSize));
    type Done = Result<B, LoadError>;

    fn run(&mut self, (indices, rank): Self::Task, wanted: &dyn Fn() -> bool) -> Option<Self::Done> {
        self.worker = self.worker.of_rank(rank);
        self.batch(&indices, wanted).transpose()
    }
}
