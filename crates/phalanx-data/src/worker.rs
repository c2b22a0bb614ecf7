//! The worker that loads: a data set is asked on its thread.

use std::cell::Cell;

use phalanx::{Rank, WorldSize};

/// The worker that loads, and its random seeds. Two loaders with the same seed draw alike, on every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerInfo {
    /// Its number among this rank's workers.
    pub id: usize,
    /// The number of worker threads; 0 if items are loaded on the training loop's thread.
    pub num_workers: usize,
    /// The rank of the process.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: WorldSize,
    /// The pass over the data.
    pub epoch: u64,
    /// A seed of (the loader's seed, epoch, rank, worker): no two workers of a job draw alike.
    pub seed: u64,
    /// A seed of (the loader's seed, epoch, index of the item): the same whoever loads the item. What draws from it augments
    /// each item alike with any number of workers and ranks, and after a resume. If a [`Sampler`](crate::Sampler) gives an item several times in a
    /// pass, the seed is another one each time. An item that fills up the last step of a pass ([`Tail::Repeat`](phalanx::sampler::Tail::Repeat)) has
    /// the seed of the item that it repeats.
    ///
    /// - In a stream: of the shard and the number of the item in it. While the shard is opened, the [shard's](crate::Shard::seed).
    /// - In the function of `collate_each` that adds an item: the item's.
    /// - In the function of `collate`, and in the one that begins a batch of `collate_each`: of all items of the batch.
    /// - In a `worker_init`: 0.
    pub item_seed: u64,
    /// The loader's, of which the others are made.
    pub(crate) loader_seed: u64,
    /// How often the item has come before in the pass.
    pub(crate) repeat: u32,
}

impl WorkerInfo {
    pub(crate) fn new(
        seed: u64,
        epoch: u64,
        (id, num_workers): (usize, usize),
        (rank, world_size): (Rank, WorldSize),
    ) -> Self {
        let own = mix(&[WORKER, seed, epoch, u64::from(rank.get()), id as u64]);
        Self {
            id,
            num_workers,
            rank,
            world_size,
            epoch,
            seed: own,
            item_seed: 0,
            loader_seed: seed,
            repeat: 0,
        }
    }

    /// As it works for this rank of so many, which the process has from now on.
    pub(crate) fn of_rank(self, place: (Rank, WorldSize)) -> Self {
        Self::new(self.loader_seed, self.epoch, (self.id, self.num_workers), place)
    }

    /// As it loads an item that has come so often before in the pass.
    pub(crate) fn repeating(self, repeat: u32) -> Self {
        Self { repeat, ..self }
    }

    /// As it loads the item at `index` by a loader with this `seed`.
    pub(crate) fn at(self, seed: u64, index: usize) -> Self {
        let first = mix(&[ITEM, seed, self.epoch, index as u64]);
        let item_seed = if self.repeat == 0 { first } else { mix(&[REPEAT, first, self.repeat.into()]) };
        Self { loader_seed: seed, item_seed, ..self }
    }

    /// As it reads the item at `place` of a shard with this `seed`.
    pub(crate) fn in_shard(self, seed: u64, place: u64) -> Self {
        Self { item_seed: mix(&[PLACE, seed, place]), ..self }
    }

    /// As it makes a batch of items with these seeds.
    pub(crate) fn of_batch(self, items: &[u64]) -> Self {
        let numbers = [&[BATCH, self.loader_seed, self.epoch][..], items].concat();
        Self { item_seed: mix(&numbers), ..self }
    }
}

/// What tells seeds of different purposes apart.
const WORKER: u64 = 1;
const ITEM: u64 = 2;
const PLACE: u64 = 3;
const BATCH: u64 = 4;
const REPEAT: u64 = 5;

/// One number of several, by splitmix64's finalizer (Steele, Lea and Flood, 2014).
pub(crate) fn mix(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0, |state: u64, number| {
        let mut z = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// A number of a text and the number before it.
#[cfg(any(feature = "image", feature = "lmdb"))]
pub(crate) fn mix_bytes(before: u64, bytes: &[u8]) -> u64 {
    let begun = mix(&[before, bytes.len() as u64]);
    bytes.iter().fold(begun, |state, byte| mix(&[state, u64::from(*byte)]))
}

thread_local! {
    static CURRENT: Cell<Option<WorkerInfo>> = const { Cell::new(None) };
}

/// The worker that runs this code, in a data set, a stream, a collate function or a `worker_init`; none elsewhere.
///
/// ```
/// use phalanx_data::{DataLoader, Dataset, InMemory, worker_info};
///
/// let noisy = InMemory::new(vec![0.5f32; 8]).map(|x| {
///     let seed = worker_info().expect("only loaders read this").item_seed;
///     Ok(x + (seed % 100) as f32 * 1e-3) // or a generator made from the seed
/// });
/// let one: Vec<_> = DataLoader::builder(noisy).num_workers(2).seed(7).build()?.iter().map(Result::unwrap).collect();
/// assert_ne!(one[0], one[1]);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias = "get_worker_info")]
pub fn worker_info() -> Option<WorkerInfo> {
    CURRENT.get()
}

/// Says that the item that is being loaded is the one at `index` of all items. For a data set that gives a rank's items in an order of its own: the
/// loader knows the item by its place there, at which each rank has another one, and with the same [`item_seed`](WorkerInfo::item_seed) all ranks
/// would augment alike. What is read afterwards for the same item draws from the seed of `index`. Does nothing outside of loaders.
pub fn set_item(index: usize) {
    CURRENT.set(CURRENT.get().map(|worker| worker.at(worker.loader_seed, index)));
}

/// Runs `code` as what this worker does.
pub(crate) fn as_worker<R>(worker: WorkerInfo, code: impl FnOnce() -> R) -> R {
    struct Back(Option<WorkerInfo>);
    impl Drop for Back {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _back = Back(CURRENT.replace(Some(worker)));
    code()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn seeds_differ_by_everything_they_are_made_of() {
        let world = WorldSize::new(4).unwrap();
        let mut seeds = HashSet::new();
        for (seed, epoch, rank, id) in (0..256).map(|n: u64| (n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6)) {
            let place = (Rank::new(rank as u32), world);
            let worker = WorkerInfo::new(seed, epoch, (id as usize, 4), place);
            assert!(seeds.insert(worker.seed), "{worker:?}");
            // The same for whatever rank and worker.
            let elsewhere = WorkerInfo::new(seed, epoch, (9, 10), (Rank::MAIN, WorldSize::ONE));
            assert_eq!(worker.at(seed, 5).item_seed, elsewhere.at(seed, 5).item_seed);
            assert_ne!(worker.at(seed, 5).item_seed, worker.at(seed, 6).item_seed);
            assert_ne!(worker.at(seed, 5).item_seed, worker.at(seed + 1, 5).item_seed);
            let times = [0, 1, 2].map(|repeat| worker.repeating(repeat).at(seed, 5).item_seed);
            assert!(times[0] == worker.at(seed, 5).item_seed && times[1] != times[0] && times[2] != times[1]);
        }
    }

    #[test]
    fn only_what_a_worker_runs_knows_it() {
        let worker = WorkerInfo::new(1, 2, (3, 4), (Rank::MAIN, WorldSize::ONE));
        assert_eq!(worker_info(), None);
        assert_eq!(as_worker(worker, worker_info), Some(worker));
        let _ = std::panic::catch_unwind(|| as_worker(worker, || panic!("in a data set")));
        assert_eq!(worker_info(), None);
    }
}
