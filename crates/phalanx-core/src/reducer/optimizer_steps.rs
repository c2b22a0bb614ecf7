//! Whether the optimizers of all ranks do the same in each step.
//!
//! Replicas whose learning rates differ drift apart, and no error would say so. An adapter that sees the steps of an optimizer notes them
//! ([`Reducer::stepped`](super::Reducer::stepped)), and a few numbers of all steps of a window travel with the [step times](super::StepTime), which the
//! ranks exchange anyway. So a difference is an error some steps after a window of [`WINDOW`] steps, or after the first step: the ranks know by then what
//! to compare, and no rank has waited for it.
//!
//! Both may be computed, and processors of several kinds may round a cosine in other ways. Settings are compared by a hash of what they are in f32, as their
//! kind and an epsilon differ in other orders of size than a decay. Learning rates are compared by a sum of all of them, each with a factor of its own, but for
//! rounding: a schedule that begins or ends at zero subtracts numbers of the size of its highest rates, so that these say how much rounding may be. At the
//! beginning of a warm-up, and after a checkpoint was loaded, they are not known, and [`LEAST`] stands for them.
//!
//! Of clipped gradients the factors are compared, and not the limits: a norm that is rounded in another way may be beyond the limit on one rank alone,
//! whose factor is almost 1 then, and a limit may be computed from earlier norms. Their logarithms are added up: these differ by that of the
//! limits' quotient, however large the norms are.

use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::error::{Error, Result};
use crate::group::Communicator;
use crate::hash::fnv1a;
use crate::rank::Rank;
use crate::sampler::ElasticSampler;
use crate::world_size::WorldSize;

/// The steps that are compared together.
pub(super) const WINDOW: usize = 32;
/// How many numbers of a window travel.
pub(super) const NUMBERS: usize = 6;
/// By so much, relative to the sum of the sizes of the largest window so far, sums of rates may differ.
const TOLERANCE: f64 = 1e-6;
/// A rate's size is at least this: rates up to 0.03 that are computed in f32 are then alike, and schedules for AdamW that are a step apart are not.
const LEAST: f64 = 1e-3;
/// By so much sums of logarithms of factors may differ: each norm by 2e-4 of itself, as one of many million elements that is summed in f32.
const CLIP_TOLERANCE: f64 = 1e-2;

/// What an optimizer of this rank has done since the ranks have compared it last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OptimizerSteps {
    count: u32,
    /// Of the settings in all steps.
    hash: u64,
    /// The sum of all learning rates, each with its factor.
    rates: f64,
    /// The first rate of the last step, for people.
    last: f64,
    /// The sum of the logarithms of the factors by which gradients were clipped, each with its weight.
    clipped: f64,
    /// The sum of the sizes of all learning rates.
    size: f64,
    /// The largest sum of sizes so far, of all windows.
    highest: f64,
}

impl OptimizerSteps {
    /// A step with these learning rates, one for each group of parameters, and these settings, such as betas and decays. What is not known is left out,
    /// on every rank.
    pub fn step(&mut self, rates: impl IntoIterator<Item = f64>, settings: impl IntoIterator<Item = f64>) {
        self.count = self.count.saturating_add(1);
        let bytes = settings.into_iter().flat_map(|setting| (setting as f32).to_bits().to_le_bytes());
        self.hash = fnv1a(self.hash.to_le_bytes().into_iter().chain(bytes));
        for (group, rate) in rates.into_iter().enumerate() {
            if group == 0 {
                self.last = rate;
            }
            self.size += rate.abs().max(LEAST);
            // Rates that are exchanged between steps or groups show, too.
            self.rates += rate * weight(self.count, group);
        }
    }

    /// The gradients of the step that comes next were multiplied by this `factor`, so that their norm is not beyond a limit.
    pub(super) fn clipped(&mut self, factor: f64) {
        self.clipped += factor.ln() * weight(self.count, 0);
    }

    /// For an adapter whose ranks exchange no step times: after 32 steps, compares them with those of the other ranks of `group`. They call it
    /// together after each step.
    ///
    /// # Errors
    /// On every rank, if they differ. If the exchange fails.
    pub fn verify(&mut self, group: &dyn Communicator) -> Result<()> {
        if (self.count as usize) < WINDOW {
            return Ok(());
        }
        let own = self.take();
        if group.world_size() == WorldSize::ONE {
            return Ok(());
        }
        let mut all = vec![0.0; NUMBERS * group.world_size().count()];
        let place = NUMBERS * group.rank().index();
        all[place..place + NUMBERS].copy_from_slice(&own);
        let all = group.all_reduce_async(Buffer::from_slice(&all), ReduceOp::Sum)?.wait()?;
        compare(all.as_slice::<f64>()?.as_chunks::<NUMBERS>().0.iter().copied())
    }

    /// What travels of a window, which ends. The first number is not zero: ranks without data give zeros.
    pub(super) fn take(&mut self) -> [f64; NUMBERS] {
        let Self { count, hash, rates, last, clipped, .. } = *self;
        self.restart();
        // As many bits as a float has.
        let hash = (hash >> 12) as f64;
        [1.0 + f64::from(count), hash, rates, last, clipped, self.highest]
    }

    /// The window begins anew.
    pub(super) fn restart(&mut self) {
        let size = if self.size.is_finite() { self.size } else { 0.0 };
        *self = Self { highest: self.highest.max(size), ..Self::default() };
    }
}

/// Which states a rank has loaded from checkpoints, and how far its sampler is: what an adapter gives as a setting of each
/// [step](super::Reducer::stepped).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadedStates {
    /// The state that was loaded last, if no step of training has followed.
    newest: Option<LoadedState>,
    /// Of those before.
    hash: u64,
    /// Of the sampler, behind the last batch that it gave.
    samples: u64,
}

/// A state that was loaded from a checkpoint, as ranks know it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedState {
    /// The step after which it was saved.
    pub step: u64,
    /// Of what is the same on every rank: two runs have states after the same step.
    pub checksum: u64,
}

impl LoadedState {
    /// One that was saved after this `step`, with these tensors.
    pub fn of<'a>(step: u64, tensors: impl Iterator<Item = &'a [u8]>) -> Self {
        Self { step, checksum: super::identical::hash(tensors) }
    }
}

impl LoadedStates {
    /// This state was loaded. Of several before the next step of training the last one counts: a rank may have loaded a
    /// newer one that another rank could not read.
    pub fn loaded(&mut self, state: LoadedState) {
        self.newest = Some(state);
    }

    /// What ranks that come into a group compare by [`verify_description`](super::verify_description): which state was loaded last, if no step of training has
    /// followed. Before the first step of all there is nothing of which ranks must not have two.
    pub fn describe(&self) -> String {
        match self.newest {
            Some(LoadedState { step, checksum }) if step > 0 => {
                format!("that after step {step} with the checksum {checksum:016x}")
            }
            Some(_) | None => "none".to_owned(),
        }
    }

    /// The next step takes the last batch of this sampler, of which each rank has its part. Ranks with other samplers, or batches of another
    /// size, train on some samples twice, and on others not at all.
    pub fn sampled(&mut self, sampler: &ElasticSampler) {
        let place = format!("{}, {}, {}", sampler.describe(), sampler.epoch(), sampler.consumed());
        self.samples = fnv1a(place.into_bytes());
    }

    /// The training goes on with what was loaded. Gives the setting.
    pub fn settle(&mut self) -> f64 {
        if let Some(LoadedState { step, checksum }) = self.newest.take() {
            self.hash = fnv1a([self.hash, step, checksum].into_iter().flat_map(u64::to_le_bytes));
        }
        let both = fnv1a([self.hash, self.samples].into_iter().flat_map(u64::to_le_bytes));
        // As many bits as an f32 has, in which settings are compared.
        (both >> 40) as f64
    }
}

/// By what each number of a step, of a group of parameters, is multiplied, so that numbers that are exchanged between them show in a sum.
fn weight(step: u32, group: usize) -> f64 {
    0.5 + (f64::from(step) * 0.618 + group as f64 * 0.414).fract()
}

/// An error if the steps of two ranks differ. By rank, what each has [taken](OptimizerSteps::take).
pub(super) fn compare(all: impl Iterator<Item = [f64; NUMBERS]>) -> Result<()> {
    let mut present = all.zip(0u32..).filter(|([count, ..], _)| *count != 0.0);
    let Some((expected, first)) = present.next() else { return Ok(()) };
    for (found, rank) in present {
        let [count, hash, rates, last, clipped, highest] = found;
        let cause = if count != expected[0] {
            let steps = |count: f64| count - 1.0;
            let (there, here) = (steps(expected[0]), steps(count));
            format!(
                "in the same averages the optimizer of rank {first} has made {there} steps, and that of rank {rank} {here}"
            )
        } else if hash != expected[1] {
            format!(
                "the optimizer of rank {rank} has other settings than that of rank {first}, such as its kind, betas, epsilon, momentum or decay, or is a new one; or \
                 one rank alone has loaded a state, or that of another step or run; or the sampler that gave `next_batch` is another one, or was asked for \
                 batches of another size"
            )
        } else if !are_near(rates, expected[2], TOLERANCE * highest.max(expected[5])) {
            let before = expected[3];
            let steps = if count == 2.0 { "step".to_owned() } else { format!("{} steps", count - 1.0) };
            format!(
                "the learning rates of the last {steps} differ: the last one was {before} on rank {first}, and {last} on rank {rank}"
            )
        } else if !are_near(clipped, expected[4], CLIP_TOLERANCE) {
            format!(
                "rank {rank} clips gradients otherwise than rank {first}: it scales them by other factors"
            )
        } else {
            continue;
        };
        return Err(Error::mismatch(format!("{cause}; their replicas drift apart"))
            .with_peer(Rank::new(rank))
            .with_remedy("give every rank the same optimizer, learning rates, limits of norms and sampler"));
    }
    Ok(())
}

fn are_near(one: f64, other: f64, tolerance: f64) -> bool {
    let is_same = one == other || one.is_nan() && other.is_nan();
    is_same || (one - other).abs() <= tolerance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reducer::fake;

    /// The rate of each step of a rank, and its setting.
    type Taken<'a> = (&'a [f64], f64);

    /// What ranks with these rates and settings find out.
    fn compared(ranks: &[Taken<'_>]) -> Option<String> {
        let numbers = ranks.iter().map(|(rates, setting)| {
            let mut steps = OptimizerSteps::default();
            rates.iter().for_each(|rate| steps.step([*rate, 0.1], [0.9, *setting]));
            steps.take()
        });
        compare(numbers).err().map(|error| error.to_string())
    }

    #[test]
    fn other_rates_settings_or_numbers_of_steps_are_named_and_rounding_is_not() {
        let rates: &[f64] = &[0.1, 0.2, 0.3];
        assert_eq!(compared(&[(rates, 0.01), (rates, 0.01), (rates, 0.01)]), None);
        assert_eq!(compared(&[(rates, 0.01), (&[0.1, 0.2, 0.3 + 1e-15], 0.01)]), None);
        assert_eq!(compared(&[(rates, 0.01), (rates, 0.01_f64.next_up())]), None);
        assert_eq!(compared(&[(&[], 0.01), (&[], 0.01)]), None);
        let differing: [([Taken<'_>; 3], &str); 5] = [
            ([(rates, 0.01), (rates, 0.01), (&[0.1, 0.2, 0.4], 0.01)], "0.3 on rank 0, and 0.4 on rank 2"),
            ([(rates, 0.01), (&[0.2, 0.1, 0.3], 0.01), (rates, 0.01)], "0.3 on rank 0, and 0.3 on rank 1"),
            (
                [(rates, 0.01), (rates, 0.0), (rates, 0.01)],
                "of rank 1 has other settings than that of rank 0",
            ),
            (
                [(rates, 0.01), (rates, 0.01), (&[0.1, 0.2], 0.01)],
                "rank 0 has made 3 steps, and that of rank 2 2",
            ),
            ([(&[0.0], 0.01), (&[0.0], 0.01), (&[0.1], 0.01)], "0 on rank 0, and 0.1 on rank 2"),
        ];
        for (ranks, said) in differing {
            let error = compared(&ranks).unwrap();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn states_that_ranks_load_are_compared_and_the_last_before_a_step_counts() {
        type Loads<'a> = &'a [&'a [(u64, u8)]];
        // By step of training, the states that are loaded before it: after which steps they were saved, and what their tensors are.
        let taken = |loads: Loads<'_>| {
            let (mut steps, mut states) = (OptimizerSteps::default(), LoadedStates::default());
            for loads in loads {
                for (step, tensor) in *loads {
                    states.loaded(LoadedState::of(*step, [&[*tensor][..]].into_iter()));
                }
                steps.step([0.1], [states.settle()]);
            }
            steps.take()
        };
        let (one, other, later) = ((7, 1), (7, 2), (9, 1));
        let own = taken(&[&[], &[one], &[]]);
        let alike: [Loads<'_>; 3] =
            [&[&[], &[one], &[]], &[&[], &[one, one], &[]], &[&[], &[later, one], &[]]];
        for same in alike {
            compare([own, taken(same)].into_iter()).unwrap();
        }
        // The state of another run was saved after as many steps.
        let others: [Loads<'_>; 5] = [
            &[&[], &[], &[]],
            &[&[], &[later], &[]],
            &[&[], &[other], &[]],
            &[&[], &[one], &[one]],
            &[&[one], &[], &[]],
        ];
        for other in others {
            let error = compare([own, taken(other)].into_iter()).unwrap_err().to_string();
            assert!(error.contains("has loaded a state, or that of another step or run"), "{error}");
        }
    }

    #[test]
    fn samplers_of_ranks_are_compared_where_the_last_batch_has_left_them() {
        // What the steps of a rank have taken of this sampler, in batches of these sizes.
        let taken = |mut sampler: ElasticSampler, batches: &[usize]| {
            let (mut steps, mut states) = (OptimizerSteps::default(), LoadedStates::default());
            for batch in batches {
                sampler.next_batch(*batch, Rank::MAIN, WorldSize::ONE).unwrap();
                states.sampled(&sampler);
                steps.step([0.1], [states.settle()]);
            }
            steps.take()
        };
        let sampler = || ElasticSampler::new(100).seed(1);
        let own = taken(sampler(), &[4, 4]);
        compare([own, taken(sampler(), &[4, 4])].into_iter()).unwrap();
        let mut later = sampler();
        later.next_epoch();
        let others = [
            taken(sampler(), &[4, 5]),
            taken(sampler().seed(2), &[4, 4]),
            taken(sampler().with_samples(101), &[4, 4]),
            taken(later, &[4, 4]),
        ];
        for other in others {
            let error = compare([own, other].into_iter()).unwrap_err().to_string();
            assert!(error.contains("batches of another size"), "{error}");
        }
    }

    #[test]
    fn a_loaded_state_is_described_until_the_training_goes_on() {
        let mut states = LoadedStates::default();
        assert_eq!(states.describe(), "none");
        let mut described = |step: u64, tensor: u8| {
            states.loaded(LoadedState::of(step, [&[tensor][..]].into_iter()));
            let said = states.describe();
            states.settle();
            assert_eq!(states.describe(), "none");
            said
        };
        assert_eq!(described(0, 1), "none");
        let own = described(7, 1);
        assert!(own.starts_with("that after step 7 with the checksum "), "{own}");
        assert!(described(7, 1) == own && described(7, 2) != own && described(9, 1) != own);
    }

    #[test]
    fn gradients_that_are_clipped_otherwise_are_found_whoever_makes_the_steps() {
        let clipped = |factors: &[f64]| {
            let mut steps = OptimizerSteps::default();
            factors.iter().for_each(|factor| steps.clipped(*factor));
            steps.take()
        };
        for factors in [[0.5, 0.25], [1e-9, 2e-9]] {
            compare([clipped(&factors), clipped(&factors)].into_iter()).unwrap();
            let [first, second] = factors;
            for other in [&[first, 1.1 * second][..], &[first], &[]] {
                let error = compare([clipped(&factors), clipped(other)].into_iter()).unwrap_err().to_string();
                assert!(error.contains("rank 1 clips gradients otherwise than rank 0"), "{error}");
            }
        }
    }

    #[test]
    fn norms_that_are_rounded_in_another_way_clip_alike_also_about_the_limit() {
        let taken = |factor: &dyn Fn(usize) -> Option<f64>| {
            let mut steps = OptimizerSteps::default();
            for step in 0..WINDOW {
                factor(step).into_iter().for_each(|factor| steps.clipped(factor));
                steps.step([0.1], []);
            }
            steps.take()
        };
        let clips =
            |rounding: f64| taken(&move |step: usize| Some((0.1 + step as f64 / 64.0) * (1.0 + rounding)));
        compare([clips(0.0), clips(1e-4)].into_iter()).unwrap();
        // One rank's norm is above the limit, and the other's is not.
        compare([taken(&|_| Some(1.0 - 1e-4)), taken(&|_| None)].into_iter()).unwrap();
        // A limit that is one in a thousand higher.
        assert!(compare([clips(0.0), clips(1e-3)].into_iter()).is_err());
    }

    #[test]
    fn ranks_without_data_are_not_compared() {
        let mut steps = OptimizerSteps::default();
        steps.step([0.1], []);
        let own = steps.take();
        compare([[0.0; NUMBERS], own, [0.0; NUMBERS], own].into_iter()).unwrap();
        assert_eq!(steps.take()[..4], [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_schedule_that_ends_at_zero_may_be_rounded_in_another_way_up_to_its_end() {
        // In f32, where the other processor has the next number for each cosine.
        let roundings: [fn(f32) -> f32; 2] = [|cosine| cosine, f32::next_up];
        let rate = |step: u16, rounded: fn(f32) -> f32| {
            let cosine = (std::f32::consts::PI * f32::from(step) / 10_000.0).cos();
            f64::from(0.5 * (1.0 + rounded(cosine)))
        };
        let mut ranks = roundings.map(|rounded| (rounded, OptimizerSteps::default()));
        for step in 0..10_000 {
            for (rounded, steps) in &mut ranks {
                steps.step([rate(step, *rounded)], []);
            }
            if usize::from(step) % WINDOW == WINDOW - 1 {
                compare(ranks.iter_mut().map(|(_, steps)| steps.take())).unwrap();
            }
            if step == 5000 {
                // As at the end of a join.
                ranks.iter_mut().for_each(|(_, steps)| steps.restart());
            }
        }
        let [(_, first), (_, second)] = &mut ranks;
        first.step([0.0], []);
        second.step([1e-3], []);
        assert!(compare([first.take(), second.take()].into_iter()).is_err());
    }

    #[test]
    fn the_first_window_of_a_warm_up_from_zero_or_of_the_end_may_be_rounded_in_another_way() {
        fn cosine(step: u16) -> f32 {
            (std::f32::consts::PI * f32::from(step) / 10_000.0).cos()
        }
        type Rounding = fn(f32) -> f32;
        let schedules: [fn(u16, Rounding) -> f32; 2] = [
            |step, rounded| 0.005 * (1.0 - rounded(cosine(step))),
            |step, rounded| 0.005 * (1.0 + rounded(cosine(10_000 - step))),
        ];
        let taken = |rate: &dyn Fn(u16) -> f32| {
            let mut steps = OptimizerSteps::default();
            (0..WINDOW as u16).for_each(|step| steps.step([f64::from(rate(step))], []));
            steps.take()
        };
        for schedule in schedules {
            let own = taken(&|step| schedule(step, |cosine| cosine));
            let other = taken(&|step| schedule(step, f32::next_up));
            assert!(own[2] != other[2]);
            compare([own, other].into_iter()).unwrap();
            // Twice the rates of the others.
            assert!(
                compare([own, taken(&|step| 2.0 * schedule(step, |cosine| cosine))].into_iter()).is_err()
            );
        }
    }

    #[test]
    fn a_small_schedule_that_is_a_step_off_on_one_rank_is_found() {
        let rate = |step: u16| 1e-5 * (1.0 + (std::f64::consts::PI * f64::from(step) / 10_000.0).cos());
        let taken = |first: u16| {
            let mut steps = OptimizerSteps::default();
            (0..WINDOW as u16).for_each(|step| steps.step([rate(5_000 + first + step)], []));
            steps.take()
        };
        compare([taken(0), taken(0)].into_iter()).unwrap();
        // A step is 3e-9 here, and rounding 3e-10.
        assert!(compare([taken(0), taken(1)].into_iter()).is_err());
    }

    #[test]
    fn without_step_times_they_are_compared_after_each_window() {
        for differs in [false, true] {
            let errors = fake::run(2, |group| {
                let mut steps = OptimizerSteps::default();
                for step in 1..=2 * WINDOW {
                    // The second window differs.
                    let is_other = differs && step > WINDOW && group.rank() != Rank::MAIN;
                    steps.step([if is_other { 0.2 } else { 0.1 }], []);
                    if let Err(error) = steps.verify(&*group) {
                        assert_eq!(step, 2 * WINDOW);
                        return Some(error.to_string());
                    }
                }
                assert_eq!(group.calls().len(), 2);
                None
            });
            for error in errors {
                assert_eq!(error.is_some(), differs);
                assert!(error.is_none_or(|error| error.contains("0.1 on rank 0, and 0.2 on rank 1")));
            }
        }
    }
}
