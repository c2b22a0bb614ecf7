//! What a worker does: it reads the items of a batch and collates them.

use std::sync::Arc;

use super::Inner;
use crate::error::{During, guarded};
use crate::pool::Work;
use crate::settings::{Collate, Init};
use crate::worker::as_worker;
use crate::{Dataset, LoadError, WorkerInfo};

pub(super) struct Loading<D: Dataset, B> {
    dataset: Arc<D>,
    collate: Collate<D::Item, B>,
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
        let mut items = Vec::with_capacity(indices.len());
        for index in indices {
            if !wanted() {
                return Ok(None);
            }
            let read = || guarded(worker, || During::Item(*index), || self.dataset.get(*index));
            items.push(as_worker(worker.at(self.seed, *index), read)?);
        }
        let collate = || guarded(worker, || During::Collate(indices.to_vec()), || (self.collate)(items));
        as_worker(worker, collate).map(Some)
    }
}

impl<D: Dataset, B: Send + 'static> Work for Loading<D, B> {
    /// The indices of the items.
    type Task = Vec<usize>;
    type Done = Result<B, LoadError>;

    fn run(&mut self, indices: Vec<usize>, wanted: &dyn Fn() -> bool) -> Option<Self::Done> {
        self.batch(&indices, wanted).transpose()
    }
}
