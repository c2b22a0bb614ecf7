//! The samples that this rank trains on, and their order.
//!
//! [`DistributedSampler`] gives the same indices as PyTorch's class of that name, in the same order, for the same
//! length, world, seed, epoch and options:
//!
//! - Every rank gets `ceil(N / R)` indices (N samples, R ranks). With `drop_last`, if N is not a multiple of R, it gets
//!   `ceil((N - R) / R)`.
//! - The order of all N samples is `0..N`, or with `shuffle` a permutation that depends only on `seed + epoch`
//!   (torch's `randperm` on the CPU; only the lower 32 bits of `seed + epoch` count).
//! - If there are too few samples, indices are repeated from the front of that order, several times if
//!   needed; with `drop_last` the end of the order is cut instead.
//! - Rank r takes the places r, r + R, r + 2R, ... of it.
//!
//! So every rank makes the same number of steps. Without `drop_last` every sample is seen, up to R - 1 of them twice.
//!
//! [`ElasticSampler`] distributes the same order step by step, to worlds whose size changes.

use std::sync::atomic::{AtomicBool, Ordering};

#[doc(hidden)]
pub use phalanx_proto::sampler::random_permutation;
pub use phalanx_proto::sampler::{ElasticSampler, Tail};

use crate::error::{Error, Result};
use crate::notice::warn;
use crate::rank::Rank;
use crate::world_size::WorldSize;
use phalanx_proto::sampler::Share;

/// The most samples of an order. Behind it sums of places and ranks would overflow.
const MAX_SAMPLES: usize = isize::MAX as usize / size_of::<usize>();
const LENGTH_REMEDY: &str = "is the length of the data set right?";

fn too_many(samples: usize) -> String {
    format!("a data set of {samples} samples has more than any memory holds, {MAX_SAMPLES}")
}

/// Distributes the indices of a data set among the ranks; see the [module](self) for the exact order.
///
/// PyTorch's `DistributedSampler(dataset)` is [`for_group`](Self::for_group), which takes rank and world size from the group. PyTorch's arguments
/// `shuffle=True`, `seed=0` and `drop_last=False` are methods with the same names and defaults; `num_replicas` and `rank` are those of
/// [`new`](Self::new).
///
/// ```
/// use phalanx::sampler::DistributedSampler;
///
/// let group = phalanx::init()?; // as the launcher says; alone, a world of one
/// let mut sampler = DistributedSampler::for_group(10, &group).seed(42);
/// for epoch in 0..2 {
///     sampler.set_epoch(epoch);
///     for index in sampler.iter() {
///         assert!(index < 10);
///     }
/// }
/// assert_eq!(sampler.len(), 10_usize.div_ceil(group.world_size().count()));
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias = "num_replicas")]
#[derive(Debug)]
pub struct DistributedSampler {
    share: Share,
    shuffle: bool,
    seed: u64,
    epoch: u64,
    reminder: Reminder,
}

impl DistributedSampler {
    /// A sampler for a data set of `samples`: shuffled with seed 0, nothing dropped, in epoch 0. For the ranks of a
    /// group [`for_group`](Self::for_group) is shorter.
    ///
    /// # Errors
    /// If `rank` is not in the world, or no memory can hold an order of so many samples.
    pub fn new(samples: usize, rank: Rank, world_size: WorldSize) -> Result<Self> {
        if samples > MAX_SAMPLES {
            return Err(Error::invalid_argument(too_many(samples)).with_remedy(LENGTH_REMEDY));
        }
        let rank = world_size.rank(rank.get()).map_err(|error| {
            error.with_remedy("DistributedSampler::for_group(samples, &group) takes both from the group")
        })?;
        Ok(Self::at(samples, rank, world_size))
    }

    /// For a rank that belongs to the world.
    ///
    /// # Panics
    /// If no memory can hold an order of so many samples.
    pub(crate) fn at(samples: usize, rank: Rank, world_size: WorldSize) -> Self {
        // Otherwise the places of some ranks would overflow, and be others' places.
        assert!(samples <= MAX_SAMPLES, "{}: {LENGTH_REMEDY}", too_many(samples));
        let reminder = Reminder::default();
        let share = Share { samples, rank, world_size, drop_last: false };
        Self { share, shuffle: true, seed: 0, epoch: 0, reminder }
    }

    /// Whether to shuffle in every epoch. True by default.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The seed of the order; 0 by default. It must be the same on every rank, otherwise samples are lost and repeated:
    /// [`check_ranks`](Self::check_ranks) compares.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether to drop the last samples that do not divide evenly among the ranks, instead of repeating some. False by
    /// default.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.share.drop_last = drop_last;
        self
    }

    /// Sets the epoch, and with it the order. Without it every epoch has the same order.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.reminder.epoch_was_set();
    }

    /// How many samples the data set has.
    pub fn samples(&self) -> usize {
        self.share.samples
    }

    /// The rank whose samples it gives.
    pub fn rank(&self) -> Rank {
        self.share.rank
    }

    /// The number of ranks among which it distributes.
    pub fn world_size(&self) -> WorldSize {
        self.share.world_size
    }

    /// The current epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// All that the order depends on, for people.
    pub(crate) fn describe(&self) -> String {
        let Self { share: Share { samples, drop_last, .. }, shuffle, seed, epoch, .. } = self;
        let order = if *shuffle { format!(", seed {seed}, epoch {epoch}") } else { String::new() };
        format!("samples {samples}, drop_last {drop_last}, shuffle {shuffle}{order}")
    }

    /// How many indices this rank, and every other, gets in an epoch.
    pub fn len(&self) -> usize {
        self.share.places_per_rank()
    }

    /// Whether the number of indices is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's indices in the current epoch.
    ///
    /// If a second pass with shuffling comes without [`set_epoch`](Self::set_epoch) in between, there is a warning in
    /// the log.
    ///
    /// # Panics
    /// If there is no memory for them, or with shuffling for an order of all samples.
    pub fn indices(&self) -> Vec<usize> {
        if self.shuffle {
            self.reminder.pass_begins();
        }
        let places = self.share.places();
        if self.shuffle {
            let order = random_permutation(self.samples(), self.seed.wrapping_add(self.epoch));
            places.map(|place| order[place]).collect()
        } else {
            places.collect()
        }
    }

    /// Iterates over [`indices`](Self::indices).
    pub fn iter(&self) -> std::vec::IntoIter<usize> {
        self.indices().into_iter()
    }
}

impl IntoIterator for &DistributedSampler {
    type Item = usize;
    type IntoIter = std::vec::IntoIter<usize>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl From<&DistributedSampler> for ElasticSampler {
    /// What gives the same samples to the same ranks in the same steps, and can continue in another world: at the start of the
    /// sampler's epoch.
    fn from(sampler: &DistributedSampler) -> Self {
        let DistributedSampler { share: Share { samples, drop_last, .. }, shuffle, seed, epoch, .. } =
            *sampler;
        let tail = if drop_last { Tail::Truncate } else { Tail::Repeat };
        let mut elastic = Self::new(samples).shuffle(shuffle).seed(seed).tail(tail);
        elastic.set_epoch(epoch);
        elastic
    }
}

/// Warns, once, of a forgotten `set_epoch`.
#[derive(Debug, Default)]
struct Reminder {
    passed: AtomicBool,
    warned: AtomicBool,
}

impl Reminder {
    fn epoch_was_set(&mut self) {
        *self.passed.get_mut() = false;
    }

    fn pass_begins(&self) {
        if self.passed.swap(true, Ordering::Relaxed) && !self.warned.swap(true, Ordering::Relaxed) {
            warn(
                "a shuffled DistributedSampler begins a second pass in the same order: \
                 call `set_epoch` before every epoch",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;
    use crate::testing::{Fabric, run};

    #[derive(Deserialize)]
    struct Vectors {
        short: Vec<Short>,
        long: Vec<Long>,
    }

    #[derive(Debug, Deserialize)]
    struct Short {
        n: usize,
        world: u32,
        shuffle: bool,
        seed: u64,
        epoch: u64,
        drop_last: bool,
        indices: Vec<Vec<usize>>,
    }

    #[derive(Debug, Deserialize)]
    struct Long {
        n: usize,
        world: u32,
        seed: u64,
        epoch: u64,
        drop_last: bool,
        rank: u32,
        count: usize,
        ends: Vec<usize>,
        weighted_sum: i64,
    }

    fn vectors() -> Vectors {
        serde_json::from_str(include_str!("../../tests/data/sampler_vectors.json")).unwrap()
    }

    fn sampler(samples: usize, rank: u32, world: u32) -> DistributedSampler {
        DistributedSampler::new(samples, Rank::new(rank), WorldSize::new(world).unwrap()).unwrap()
    }

    #[test]
    fn every_index_is_that_of_torch() {
        let cases = vectors().short;
        assert!(cases.len() > 200);
        for case in cases {
            for (rank, expected) in (0..case.world).zip(&case.indices) {
                let mut sampler = sampler(case.n, rank, case.world)
                    .shuffle(case.shuffle)
                    .seed(case.seed)
                    .drop_last(case.drop_last);
                sampler.set_epoch(case.epoch);
                assert_eq!(sampler.iter().collect::<Vec<_>>(), *expected, "rank {rank} of {case:?}");
                assert_eq!(sampler.len(), expected.len());
            }
        }
    }

    #[test]
    fn large_data_sets_come_in_the_order_of_torch() {
        for case in vectors().long {
            let mut sampler =
                sampler(case.n, case.rank, case.world).seed(case.seed).drop_last(case.drop_last);
            sampler.set_epoch(case.epoch);
            let indices = sampler.indices();
            assert_eq!(indices.len(), case.count, "{case:?}");
            assert_eq!([&indices[..4], &indices[case.count - 4..]].concat(), case.ends, "{case:?}");
            let sum = indices.iter().enumerate().fold(0i64, |sum, (place, &index)| {
                sum.wrapping_add((index as i64).wrapping_mul(place as i64 + 1))
            });
            assert_eq!(sum, case.weighted_sum, "{case:?}");
        }
    }

    proptest! {
        #[test]
        fn every_sample_is_seen_and_every_rank_makes_the_same_steps(
            samples in 0usize..300, world in 1u32..9, seed in any::<u64>(), drop_last in any::<bool>(),
        ) {
            let mut times = vec![0usize; samples];
            for rank in 0..world {
                let sampler = sampler(samples, rank, world).seed(seed).drop_last(drop_last);
                prop_assert_eq!(sampler.indices().len(), sampler.len());
                sampler.iter().for_each(|index| times[index] += 1);
            }
            let ranks = world as usize;
            if drop_last {
                prop_assert!(times.iter().all(|&times| times <= 1));
                prop_assert_eq!(times.iter().sum::<usize>(), samples / ranks * ranks);
            } else {
                prop_assert!(times.iter().all(|&times| times >= 1));
                prop_assert_eq!(times.iter().sum::<usize>(), samples.div_ceil(ranks) * ranks);
            }
        }
    }

    proptest! {
        #[test]
        fn in_a_world_that_stays_it_is_the_distributed_sampler(
            samples in 0..80_usize, world in 1..9_u32, batch in 1..9_usize, epoch in 0..4_u64, shuffle in any::<bool>(),
            drop_last in any::<bool>(),
        ) {
            let size = WorldSize::new(world).unwrap();
            let distributed = |rank| {
                let sampler = DistributedSampler::new(samples, rank, size).unwrap();
                let mut sampler = sampler.seed(42).shuffle(shuffle).drop_last(drop_last);
                sampler.set_epoch(epoch);
                sampler
            };
            let sampler = ElasticSampler::from(&distributed(Rank::MAIN));
            let steps = distributed(Rank::MAIN).len().div_ceil(batch);
            prop_assert_eq!(sampler.steps_left(batch, size), steps);
            let mut all = vec![Vec::new(); world as usize];
            let mut full = sampler.full_steps_left(batch, size);
            let mut samplers: Vec<ElasticSampler> = size.ranks().map(|_| sampler.clone()).collect();
            loop {
                let batches: Option<Vec<Vec<usize>>> =
                    size.ranks().zip(&mut samplers).map(|(rank, own)| own.next_batch(batch, rank, size)).collect();
                let Some(batches) = batches else { break };
                prop_assert!(batches.iter().all(|mine| (mine.len() == batch) == (full > 0)));
                full = samplers[0].full_steps_left(batch, size);
                all.iter_mut().zip(batches).for_each(|(all, batch)| all.push(batch));
            }
            for (rank, all) in size.ranks().zip(all) {
                let other = distributed(rank).indices();
                prop_assert_eq!(all, other.chunks(batch).map(<[usize]>::to_vec).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_rank_outside_the_world_is_an_error() {
        let error = DistributedSampler::new(10, Rank::new(2), WorldSize::new(2).unwrap()).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("DistributedSampler::for_group"), "{error}");
    }

    #[test]
    fn more_samples_than_any_memory_holds_are_refused() {
        for samples in [MAX_SAMPLES + 1, usize::MAX] {
            let error =
                DistributedSampler::new(samples, Rank::MAIN, WorldSize::new(64).unwrap()).unwrap_err();
            assert!(
                error.is_invalid_argument() && error.to_string().contains(&samples.to_string()),
                "{error}"
            );
        }
        // None of its places is counted wrongly.
        let last = sampler(MAX_SAMPLES, 63, 64);
        assert_eq!(last.len(), MAX_SAMPLES.div_ceil(64));
    }

    #[test]
    #[should_panic(expected = "is the length of the data set right?")]
    fn a_group_s_sampler_refuses_them_too() {
        let group = crate::ProcessGroup::alone().unwrap();
        let _ = DistributedSampler::for_group(MAX_SAMPLES + 1, &group);
    }

    #[test]
    fn a_group_gives_its_rank_and_its_world() {
        for group in crate::ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap() {
            let from_group = DistributedSampler::for_group(11, &group).seed(5);
            assert_eq!(from_group.indices(), sampler(11, group.rank().get(), 3).seed(5).indices());
        }
    }

    #[test]
    fn ranks_with_other_samplers_are_told_on_every_rank() {
        run(3, Fabric::InProcess, |group| {
            let last = group.rank().get() == 2;
            let sampler = |samples| DistributedSampler::for_group(samples, &group);
            sampler(10).check_ranks(&group).unwrap();
            // Where nothing is shuffled, each rank may have a seed of its own, and has the same order in each epoch.
            let mut in_order = sampler(10).shuffle(false).seed(last.into());
            in_order.set_epoch(last.into());
            in_order.check_ranks(&group).unwrap();
            let mut later = sampler(10);
            later.set_epoch(last.into());
            let alone = DistributedSampler::new(10, Rank::MAIN, WorldSize::ONE).unwrap();
            let cases = [
                (sampler(10 + usize::from(last)), "rank 2 is its own part among 3 ranks: samples 11"),
                (sampler(10).seed(last.into()), "seed 1"),
                (sampler(10).shuffle(last), "shuffle false"),
                (sampler(10).drop_last(last), "drop_last true"),
                (later, "epoch 1"),
                (alone, "part of rank 0 of 1, and there are 3 ranks"),
            ];
            for (sampler, said) in cases {
                let error = sampler.check_ranks(&group).unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
            }
            let of_main = DistributedSampler::new(10, Rank::MAIN, group.world_size()).unwrap();
            let error = (if last { of_main } else { sampler(10) }).check_ranks(&group).unwrap_err();
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("its own part")), "{error}");
            assert!(group.failure().is_none());
        });
    }

    #[test]
    fn a_forgotten_epoch_is_noticed_only_when_shuffling() {
        let noticed = |sampler: &DistributedSampler| sampler.reminder.warned.load(Ordering::Relaxed);
        let mut shuffled = sampler(5, 0, 1);
        for epoch in 0..3 {
            shuffled.set_epoch(epoch);
            shuffled.indices();
        }
        assert!(!noticed(&shuffled));
        shuffled.indices();
        assert!(noticed(&shuffled));

        let ordered = sampler(5, 0, 1).shuffle(false);
        ordered.indices();
        ordered.indices();
        assert!(!noticed(&ordered));
    }
}
