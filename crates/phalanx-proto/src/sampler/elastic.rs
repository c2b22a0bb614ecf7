//! Indices for a world whose size changes in the middle of an epoch.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{check_order, random_permutation};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// What to do with the last samples of an epoch, if they do not fill a batch on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Tail {
    /// They are distributed as evenly as possible: the batches of that step differ by at most one sample, and some may
    /// be empty. Every sample is seen exactly once. The default. With the sum of gradients divided by the number of
    /// samples of all ranks, no sample is lost and none counts twice. That number is 0 in an elastic step if all who had samples have
    /// died: such a step changes nothing.
    #[default]
    Split,
    /// They are left out: every batch of every step is full.
    Drop,
    /// As [`Split`](Self::Split), and ranks that got one less repeat a sample from the front of the epoch's order, so that
    /// all batches of a step are equally long. For averages that count every rank alike. In a world that stays as it is,
    /// every rank gets what a `DistributedSampler` gives it.
    Repeat,
    /// As [`Split`](Self::Split), and ranks that got one more leave it out: all batches of a step are equally long, and up to
    /// `world - 1` samples are not seen. That is a `DistributedSampler` with `drop_last`.
    Truncate,
}

/// Distributes an epoch's samples step by step, to the ranks that there are at each step.
///
/// Its state is the progress in the epoch, and does not depend on rank or world size. So it is the same on every rank,
/// and can be a part of an elastic `State`. A step of `w` ranks with batches of `b` takes the
/// next `w·b` samples of the epoch's order; rank r has the places r, r + w, r + 2w, ... of them. The order is that of
/// `DistributedSampler`, and torch's.
///
/// ```
/// use phalanx::sampler::ElasticSampler;
/// use phalanx::{Rank, WorldSize};
///
/// let mut sampler = ElasticSampler::new(10).shuffle(false);
/// let two = WorldSize::new(2)?;
/// assert_eq!(sampler.next_batch(2, Rank::MAIN, two), Some(vec![0, 2])); // rank 1 has 1 and 3
/// // From here on rank 0 is alone.
/// assert_eq!(sampler.next_batch(4, Rank::MAIN, WorldSize::ONE), Some(vec![4, 5, 6, 7]));
/// assert_eq!(sampler.next_batch(4, Rank::MAIN, WorldSize::ONE), Some(vec![8, 9]));
/// assert_eq!(sampler.next_batch(4, Rank::MAIN, WorldSize::ONE), None);
/// sampler.next_epoch();
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ElasticSampler {
    samples: usize,
    shuffle: bool,
    seed: u64,
    tail: Tail,
    epoch: u64,
    consumed: usize,
    /// Places before `consumed` that have been put back. They come next.
    again: Vec<usize>,
    /// The places of the last step, which can be put back until the next step.
    #[serde(skip)]
    last: Option<StepPlaces>,
    /// The shuffled order of the epoch, once it was needed; clones share it. A slice would be a copy: twice the memory that was checked.
    #[serde(skip)]
    order: Option<Arc<Vec<usize>>>,
}

/// The places of one step: those that were put back, and then a part of the order.
#[derive(Clone, Debug)]
struct StepPlaces {
    again: Vec<usize>,
    range: Range<usize>,
    ranks: usize,
}

impl StepPlaces {
    fn of(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.again.iter().copied().chain(self.range.clone()).skip(rank).step_by(self.ranks)
    }
}

impl PartialEq for ElasticSampler {
    /// Whether both are at the same place of the same order. The seed counts also without `shuffle`: for the order of a program's own a loader
    /// notes there by what it knows that order again.
    fn eq(&self, other: &Self) -> bool {
        let place = |it: &Self| (it.samples, it.shuffle, it.seed, it.tail, it.epoch, it.consumed);
        place(self) == place(other) && self.again == other.again
    }
}

impl ElasticSampler {
    /// A sampler for a data set of `samples`: shuffled with seed 0, at the start of epoch 0.
    pub fn new(samples: usize) -> Self {
        let (shuffle, tail) = (true, Tail::default());
        let (again, last, order) = (Vec::new(), None, None);
        Self { samples, shuffle, seed: 0, tail, epoch: 0, consumed: 0, again, last, order }
    }

    /// Whether to shuffle in every epoch. True by default.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        (self.shuffle, self.order) = (shuffle, None);
        self
    }

    /// The seed of the order; 0 by default.
    pub fn seed(mut self, seed: u64) -> Self {
        (self.seed, self.order) = (seed, None);
        self
    }

    /// What to do with the last samples of an epoch.
    pub fn tail(mut self, tail: Tail) -> Self {
        self.tail = tail;
        self
    }

    /// How many samples the data set has.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Whether it shuffles in every epoch.
    #[doc(hidden)]
    pub fn is_shuffled(&self) -> bool {
        self.shuffle
    }

    /// The same for a data set of `samples`, at the start of the epoch.
    pub fn with_samples(&self, samples: usize) -> Self {
        let mut other = Self { samples, order: None, ..self.clone() };
        other.set_epoch(self.epoch);
        other
    }

    /// Checks that there is memory for the order, if it shuffles. Without it a step of a sampler whose number of samples is wrong, as a
    /// damaged file may announce it, panics.
    ///
    /// # Errors
    /// If there is not ([`is_invalid_argument`](Error::is_invalid_argument)).
    pub fn check_memory(&self) -> Result<()> {
        if self.shuffle { check_order(self.samples) } else { Ok(()) }
    }

    /// Checks that `saved`, which is to replace this sampler, distributes the same samples in the same order. The epoch and the progress
    /// in it may be others. A `TrainState` whose `progress` is a sampler calls it when it is loaded from a checkpoint; for a sampler within
    /// a type of its own a program calls it.
    ///
    /// ```
    /// # use phalanx::sampler::ElasticSampler;
    /// let saved = ElasticSampler::new(100); // read from a checkpoint
    /// ElasticSampler::new(100).check_resumes(&saved)?;
    /// let error = ElasticSampler::new(150).check_resumes(&saved).unwrap_err();
    /// assert!(error.is_mismatch());
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the number of samples, `shuffle`, the tail, or with `shuffle` the seed differs ([`is_mismatch`](Error::is_mismatch)); the error names
    /// each with both values.
    pub fn check_resumes(&self, saved: &Self) -> Result<()> {
        let differences =
            saved.options().into_iter().zip(self.options()).filter_map(|((name, saved), (_, here))| {
                let (saved, here) = saved.zip(here)?;
                (saved != here).then(|| format!("`{name}` was {saved} and is {here}"))
            });
        let differences = differences.collect::<Vec<_>>().join(", ");
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::mismatch(format!("the saved sampler has another order of samples: {differences}")).with_remedy(
            "make the sampler as it was when it was saved; to go on with another one, put it in its place after loading",
        ))
    }

    /// All that the order depends on but the epoch, for people. Ranks whose samplers are described in other words train on some samples
    /// twice, and on others not at all.
    #[doc(hidden)]
    pub fn describe(&self) -> String {
        let options = self.options().into_iter();
        options.filter_map(|(name, value)| Some(format!("{name} {}", value?))).collect::<Vec<_>>().join(", ")
    }

    /// Each option, if the order depends on it.
    fn options(&self) -> [(&'static str, Option<String>); 4] {
        [
            ("samples", Some(self.samples.to_string())),
            ("shuffle", Some(self.shuffle.to_string())),
            ("seed", self.shuffle.then(|| self.seed.to_string())),
            ("tail", Some(format!("{:?}", self.tail))),
        ]
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// How many samples of the epoch have been distributed, to all ranks together, and not [put back](Self::put_back).
    pub fn consumed(&self) -> usize {
        self.consumed.saturating_sub(self.again.len())
    }

    /// Goes to the start of the next epoch, whatever the progress in this one.
    pub fn next_epoch(&mut self) {
        self.set_epoch(self.epoch.wrapping_add(1));
    }

    /// To the start of `epoch`, also if it is the current one. Do not call it for an epoch that continues from a checkpoint or
    /// a commit: the samples that were consumed would come again.
    pub fn set_epoch(&mut self, epoch: u64) {
        if epoch != self.epoch {
            // At once: a clone may be the one that makes the next order, beside this one.
            self.order = None;
        }
        (self.epoch, self.consumed) = (epoch, 0);
        self.again.clear();
        self.last = None;
    }

    /// How many steps are left in this epoch, if the world stays as it is.
    pub fn steps_left(&self, batch: usize, world: WorldSize) -> usize {
        let (left, step) =
            (self.samples - self.consumed().min(self.samples), batch.saturating_mul(world.count()));
        match self.tail {
            _ if step == 0 => 0,
            Tail::Drop => left / step,
            Tail::Split | Tail::Repeat => left.div_ceil(step),
            Tail::Truncate => (left / world.count()).div_ceil(batch),
        }
    }

    /// How many of the [steps left](Self::steps_left) give every rank a whole batch: those of a loader that drops the last one.
    pub fn full_steps_left(&self, batch: usize, world: WorldSize) -> usize {
        let (left, ranks) = (self.samples - self.consumed().min(self.samples), world.count());
        let each = if self.tail == Tail::Repeat { left.div_ceil(ranks) } else { left / ranks };
        each.checked_div(batch).unwrap_or(0)
    }

    /// This rank's samples of the next step, at most `batch`; None at the end of the epoch. Every rank must call it
    /// equally often, with the same batch and world.
    ///
    /// # Panics
    /// If `rank` is not in the world: it would get samples of others. Rank and world are to be those of one group. If `batch` is 0, as a number of
    /// all ranks may be that was divided by more ranks: every epoch would end at once, and nothing be trained.
    pub fn next_batch(&mut self, batch: usize, rank: Rank, world: WorldSize) -> Option<Vec<usize>> {
        assert!(
            rank.index() < world.count(),
            "rank {rank} asks for a batch in a world of {world}: take both from the same group"
        );
        assert!(
            batch > 0,
            "batches of 0 samples were asked for: is the number of all ranks divided by more ranks than it has samples?"
        );
        if self.steps_left(batch, world) == 0 {
            return None;
        }
        let ranks = world.count();
        let all = batch.saturating_mul(ranks);
        let again: Vec<usize> = self.again.drain(..all.min(self.again.len())).collect();
        let until = self.samples.min(self.consumed.saturating_add(all - again.len()));
        let places = StepPlaces { again, range: self.consumed.min(until)..until, ranks };
        self.consumed = until;
        let distributed = places.again.len() + places.range.len();
        let mut mine: Vec<usize> = places.of(rank.index()).collect();
        match self.tail {
            Tail::Repeat if mine.len() < distributed.div_ceil(ranks) => {
                // As in DistributedSampler, the order begins again behind its end.
                mine.push((rank.index() - distributed % ranks) % self.samples.max(1));
            }
            Tail::Truncate => mine.truncate(distributed / ranks),
            Tail::Repeat | Tail::Split | Tail::Drop => {}
        }
        if let Some(order) = self.shuffled() {
            mine.retain_mut(|place| order.get(*place).map(|index| *place = *index).is_some());
        } else {
            mine.retain(|place| *place < self.samples);
        }
        self.last = Some(places);
        Some(mine)
    }

    /// Distributes the samples that the last [`next_batch`](Self::next_batch) gave to the ranks `missing` again, first,
    /// because they have not counted. Every rank must call it with the same ranks, after the step and before the next
    /// batch, as `Step::missing` says. With no ranks it does nothing.
    ///
    /// A step that adds up the gradients of several small batches takes the samples of all of them with one [`next_batch`](Self::next_batch), and
    /// divides these: what earlier calls gave a dead rank does not come again.
    ///
    /// ```
    /// # use phalanx::sampler::ElasticSampler;
    /// # use phalanx::{Rank, WorldSize};
    /// let mut sampler = ElasticSampler::new(10).shuffle(false);
    /// let two = WorldSize::new(2)?;
    /// assert_eq!(sampler.next_batch(2, Rank::MAIN, two), Some(vec![0, 2])); // rank 1 has 1 and 3, and dies
    /// sampler.put_back(&[Rank::new(1)]);
    /// assert_eq!(sampler.next_batch(4, Rank::MAIN, WorldSize::ONE), Some(vec![1, 3, 4, 5]));
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn put_back(&mut self, missing: &[Rank]) {
        let Some(places) = self.last.take() else { return };
        for rank in missing.iter().filter(|rank| rank.index() < places.ranks) {
            self.again.extend(places.of(rank.index()));
        }
    }

    /// The order of the epoch, unless it is that of the samples.
    fn shuffled(&mut self) -> Option<Arc<Vec<usize>>> {
        let Self { samples, shuffle, seed, epoch, .. } = *self;
        if !shuffle {
            return None;
        }
        let order = || Arc::new(random_permutation(samples, seed.wrapping_add(epoch)));
        Some(self.order.get_or_insert_with(order).clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_batch_may_be_larger_than_any_epoch() {
        for batch in [usize::MAX, usize::MAX / 2] {
            let mut sampler = ElasticSampler::new(10).shuffle(false);
            let world = WorldSize::new(2).unwrap();
            sampler.next_batch(1, Rank::MAIN, world).unwrap();
            assert_eq!(sampler.next_batch(batch, Rank::MAIN, world).unwrap(), [2, 4, 6, 8]);
            assert_eq!(sampler.next_batch(batch, Rank::MAIN, world), None);
        }
    }

    /// The samples of all ranks of a world in the next step, each from its own copy, as in separate processes.
    fn step(sampler: &mut ElasticSampler, batch: usize, world: u32) -> Option<Vec<Vec<usize>>> {
        let world = WorldSize::new(world).unwrap();
        let mut copies: Vec<ElasticSampler> = world.ranks().map(|_| sampler.clone()).collect();
        let batches = world.ranks().zip(&mut copies).map(|(rank, copy)| copy.next_batch(batch, rank, world));
        let batches: Option<Vec<Vec<usize>>> = batches.collect();
        assert!(copies.iter().all(|copy| *copy == copies[0]));
        *sampler = copies.swap_remove(0);
        batches
    }

    fn tail() -> impl Strategy<Value = Tail> {
        prop_oneof![Just(Tail::Split), Just(Tail::Drop), Just(Tail::Repeat), Just(Tail::Truncate)]
    }

    proptest! {
        #[test]
        fn whatever_the_worlds_each_sample_counts_once(
            samples in 0..400_usize, batch in 1..9_usize, seed in any::<u64>(), tail in tail(),
            // For each step: the world size, whether the step is lost, so that all go back to the last commit, and
            // whose part of it is missing.
            steps in proptest::collection::vec((1..7_u32, 0..4_u8, 0..256_u32), 1..60),
        ) {
            let mut sampler = ElasticSampler::new(samples).seed(seed).tail(tail);
            let mut seen = vec![0; samples];
            let mut committed = (sampler.clone(), seen.clone());
            for (world, fate, lost) in steps.into_iter().cycle() {
                let Some(batches) = step(&mut sampler, batch, world) else { break };
                let lengths = batches.iter().map(Vec::len);
                let (least, most) = (lengths.clone().min().unwrap(), lengths.max().unwrap());
                prop_assert!(most <= batch && most - least <= usize::from(tail == Tail::Split));
                // One rank survives, and has a sample not seen before; otherwise this would never end.
                let survivor = (lost % world) as usize;
                let gets_on = batches[survivor].iter().any(|index| seen[*index] == 0);
                let dies = |rank: &u32| gets_on && lost & (1 << rank) != 0 && *rank as usize != survivor;
                let missing: Vec<Rank> = (0..world).filter(dies).map(Rank::new).collect();
                let (before, counted) = (sampler.consumed(), batches.iter().zip((0..world).map(Rank::new)));
                let counted = counted.filter(|(_, rank)| !missing.contains(rank)).flat_map(|(batch, _)| batch);
                counted.for_each(|index| seen[*index] += 1);
                sampler.put_back(&missing);
                prop_assert!(sampler.consumed() <= before && (!missing.is_empty() || sampler.consumed() == before));
                if fate == 0 && committed.0.consumed() < sampler.consumed() && seed % 3 != 0 {
                    // As after a commit: written and read.
                    let bytes = postcard::to_stdvec(&committed.0).unwrap();
                    sampler = postcard::from_bytes(&bytes).unwrap();
                    seen.clone_from(&committed.1);
                    // The next one must get further; otherwise this would never end.
                    let Some(batches) = step(&mut sampler, batch, world) else { break };
                    batches.iter().flatten().for_each(|index| seen[*index] += 1);
                    committed = (sampler.clone(), seen.clone());
                } else if fate > 1 {
                    committed = (sampler.clone(), seen.clone());
                }
            }
            match tail {
                Tail::Split => prop_assert!(seen.iter().all(|times| *times == 1)),
                Tail::Repeat => prop_assert!(seen.iter().all(|times| *times >= 1)),
                Tail::Drop | Tail::Truncate => prop_assert!(seen.iter().all(|times| *times <= 1)),
            }
        }
    }

    #[test]
    fn what_was_put_back_comes_first_and_only_once() {
        let mut sampler = ElasticSampler::new(12).shuffle(false);
        assert_eq!(step(&mut sampler, 2, 3), Some(vec![vec![0, 3], vec![1, 4], vec![2, 5]]));
        sampler.put_back(&[Rank::new(2), Rank::new(7)]);
        sampler.put_back(&[Rank::new(1)]);
        assert_eq!((sampler.consumed(), sampler.steps_left(2, WorldSize::new(2).unwrap())), (4, 2));
        assert_eq!(step(&mut sampler, 2, 2), Some(vec![vec![2, 6], vec![5, 7]]));
        // Samples that were put back may be lost again.
        sampler.put_back(&[Rank::new(1)]);
        assert_eq!(step(&mut sampler, 1, 1), Some(vec![vec![5]]));
        sampler.put_back(&[]);
        assert_eq!(step(&mut sampler, 2, 3), Some(vec![vec![7, 10], vec![8, 11], vec![9]]));
        sampler.next_epoch();
        sampler.put_back(&[Rank::MAIN]);
        assert_eq!((sampler.consumed(), step(&mut sampler, 1, 1)), (0, Some(vec![vec![0]])));
    }

    #[test]
    fn a_saved_sampler_of_another_order_is_refused_by_what_differs() {
        let own = || ElasticSampler::new(100).seed(3);
        let mut saved = own();
        saved.set_epoch(4);
        step(&mut saved, 2, 3);
        own().check_resumes(&saved).unwrap();
        // Nothing depends on the seed of an order that is not shuffled.
        let ordered = |seed| own().shuffle(false).seed(seed);
        ordered(5).check_resumes(&ordered(3)).unwrap();
        assert_eq!(ordered(5).describe(), ordered(3).describe());
        assert_ne!(own().describe(), own().seed(5).describe());
        for (other, said) in [
            (own().with_samples(150), "`samples` was 100 and is 150"),
            (own().shuffle(false), "`shuffle` was true and is false"),
            (own().seed(5), "`seed` was 3 and is 5"),
            (own().tail(Tail::Repeat), "`tail` was Split and is Repeat"),
            (own().seed(5).tail(Tail::Drop), "`seed` was 3 and is 5, `tail` was Split and is Drop"),
        ] {
            let error = other.check_resumes(&saved).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn an_order_that_no_memory_holds_is_refused_if_it_is_needed() {
        let sampler = ElasticSampler::new(1 << 45);
        let error = sampler.check_memory().unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("no memory for an order"),
            "{error}"
        );
        let mut ordered = sampler.shuffle(false);
        ordered.check_memory().unwrap();
        assert_eq!(ordered.next_batch(2, Rank::MAIN, WorldSize::ONE), Some(vec![0, 1]));
    }

    #[test]
    fn an_order_is_kept_for_its_epoch_alone() {
        let mut sampler = ElasticSampler::new(10);
        step(&mut sampler, 1, 2);
        // As a loader's position has it, of which a pass begins with a clone.
        let mut position = sampler.clone();
        let order = Arc::downgrade(sampler.order.as_ref().unwrap());
        drop(sampler);
        position.set_epoch(0);
        assert!(order.upgrade().is_some());
        position.next_epoch();
        assert!(order.upgrade().is_none());
    }

    #[test]
    #[should_panic(expected = "rank 2 asks for a batch in a world of 2")]
    fn a_rank_outside_the_world_gets_no_samples_of_others() {
        ElasticSampler::new(10).next_batch(1, Rank::new(2), WorldSize::new(2).unwrap());
    }

    #[test]
    #[should_panic(expected = "batches of 0 samples were asked for")]
    fn batches_without_samples_are_no_end_of_the_epoch() {
        ElasticSampler::new(10).next_batch(0, Rank::MAIN, WorldSize::ONE);
    }

    #[test]
    fn tails_are_as_they_say() {
        let ends = |tail| {
            let mut sampler = ElasticSampler::new(10).shuffle(false).tail(tail);
            step(&mut sampler, 2, 3);
            (step(&mut sampler, 2, 3), step(&mut sampler, 2, 3))
        };
        assert_eq!(ends(Tail::Split), (Some(vec![vec![6, 9], vec![7], vec![8]]), None));
        assert_eq!(ends(Tail::Drop), (None, None));
        assert_eq!(ends(Tail::Repeat), (Some(vec![vec![6, 9], vec![7, 0], vec![8, 1]]), None));
        assert_eq!(ends(Tail::Truncate), (Some(vec![vec![6], vec![7], vec![8]]), None));
    }
}
