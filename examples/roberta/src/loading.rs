//! The batches of one rank: a task's examples through phalanx-data's loader.

use std::sync::Arc;

use burn::tensor::Device;
use phalanx::sampler::DistributedSampler;
use phalanx::{Error, ProcessGroup, Result};
use phalanx_data::{DataLoader, DataLoaderBuilder, Dataset, from_fn, worker_info};

use crate::tasks::{Batch, Part, Task};

/// A loader of a task's examples.
pub type Loader<T> = DataLoader<Examples<T>, Batch>;

/// A part of a task's examples, of which each is tokenized when it is read.
pub struct Examples<T> {
    task: Arc<T>,
    part: Part,
}

impl<T: Task> Dataset for Examples<T> {
    type Item = T::Item;

    fn len(&self) -> usize {
        self.task.examples(self.part)
    }

    fn get(&self, index: usize) -> Result<T::Item> {
        let seed = worker_info().map_or(0, |worker| worker.item_seed);
        self.task.item(self.part, index, seed).map_err(described)
    }

    fn fingerprint(&self) -> u64 {
        Task::fingerprint(&*self.task, self.part)
    }
}

/// How batches are loaded.
#[derive(Clone, Copy, Debug)]
pub struct Loading {
    /// Examples in a batch of one rank.
    pub batch_size: usize,
    /// Threads of each rank that tokenize and pad.
    pub num_workers: usize,
}

impl Loading {
    /// The training examples of this rank of `group`, in the order of a `DistributedSampler` with this seed; each pass is the next
    /// epoch's.
    ///
    /// # Errors
    /// If there are fewer examples than ranks, or an option is out of its range.
    pub fn training<T: Task>(
        self,
        task: &Arc<T>,
        group: &ProcessGroup,
        seed: u64,
        device: &Device,
    ) -> Result<Loader<T>> {
        let sampler = DistributedSampler::for_group(task.examples(Part::Train), group).seed(seed);
        self.build(self.builder(task, Part::Train).sampler(sampler).seed(seed), task, device)
    }

    /// This rank's share of the held-out examples: ranks have unequal numbers of them rather than repeated ones. Every seed
    /// masks them alike, so that perplexities can be compared.
    ///
    /// # Errors
    /// If an option is out of its range.
    pub fn held_out<T: Task>(
        self,
        task: &Arc<T>,
        group: &ProcessGroup,
        device: &Device,
    ) -> Result<Loader<T>> {
        let (first, ranks) = (group.rank().index(), group.world_size().count());
        let examples = task.examples(Part::HeldOut);
        let mine = from_fn(move |_| (first..examples).step_by(ranks).collect());
        self.build(self.builder(task, Part::HeldOut).sampler(mine), task, device)
    }

    fn builder<T: Task>(self, task: &Arc<T>, part: Part) -> DataLoaderBuilder<Examples<T>> {
        let Self { batch_size, num_workers } = self;
        let examples = Examples { task: task.clone(), part };
        DataLoader::builder(examples).batch_size(batch_size).num_workers(num_workers)
    }

    fn build<T: Task>(
        self,
        builder: DataLoaderBuilder<Examples<T>>,
        task: &Arc<T>,
        device: &Device,
    ) -> Result<Loader<T>> {
        let (task, device) = (task.clone(), device.clone());
        builder.collate(move |items| task.collate(&items, &device).map_err(described)).build()
    }
}

/// With all causes.
fn described(error: anyhow::Error) -> Error {
    Error::other(format!("{error:#}"))
}
