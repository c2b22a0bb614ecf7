//! Statistics of a batch over all ranks, for synchronised batch norms: sums, in f64, by one blocking all_reduce.
//!
//! The variance is a difference of two sums, which has few digits where it is small beside the squared mean. The ranks see that in their sums, which are the
//! same bits on all, and then add up squares about the mean of all, by one all_reduce more.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::error::{Error, Result};
use crate::group::{Communicator, ProcessGroup, WeakGroup, WeakHandle};
use crate::hash::fnv1a;
use crate::world_size::WorldSize;

/// A variance that is a smaller part of the squared mean than this is added up about the mean of all ranks.
pub const SMALL_VARIANCE: f64 = 1e-8;

/// Statistics of each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// How many values of each channel there are.
    pub values: f64,
    /// The mean of each channel.
    pub mean: Vec<f64>,
    /// About `mean`, and biased: the mean of the squares.
    pub variance: Vec<f64>,
}

impl Moments {
    /// The statistics of no values.
    pub fn none(channels: usize) -> Self {
        Self { values: 0.0, mean: vec![0.0; channels], variance: vec![0.0; channels] }
    }

    /// Those of values that could not be had: all are NaN.
    pub fn unknown(channels: usize) -> Self {
        Self { values: f64::NAN, mean: vec![f64::NAN; channels], variance: vec![f64::NAN; channels] }
    }

    /// The number of values; then of each channel the sum, and the sum of squares.
    pub fn sums(&self) -> Vec<f64> {
        let mut sums = Vec::with_capacity(1 + 2 * self.mean.len());
        sums.push(self.values);
        sums.extend(self.mean.iter().map(|mean| self.values * mean));
        let squares = self.mean.iter().zip(&self.variance).map(|(mean, variance)| variance + mean * mean);
        sums.extend(squares.map(|square| self.values * square));
        sums
    }

    /// The statistics of values with these [`sums`](Self::sums), of one rank or of several together.
    ///
    /// # Panics
    /// If `sums` is empty: [`sums`](Self::sums) begin with the number of values.
    pub fn from_sums(sums: &[f64]) -> Self {
        let (values, sums) = (sums[0], &sums[1..]);
        let (sums, squares) = sums.split_at(sums.len() / 2);
        if values == 0.0 {
            return Self::none(sums.len());
        }
        let mean: Vec<f64> = sums.iter().map(|sum| sum / values).collect();
        // If all values are equal, rounding may give a small negative number. `max` would hide NaN.
        let variance = |(square, mean): (&f64, &f64)| {
            let variance = square / values - mean * mean;
            if variance < 0.0 { 0.0 } else { variance }
        };
        Self { values, variance: squares.iter().zip(&mean).map(variance).collect(), mean }
    }

    /// Whether the difference of two sums may have lost a channel's variance.
    fn has_small_variance(&self) -> bool {
        self.mean.iter().zip(&self.variance).any(|(mean, variance)| *variance < SMALL_VARIANCE * mean * mean)
    }

    /// Of each channel the sum of squares about the number in `centre`.
    fn squares_about(&self, centre: &[f64]) -> Vec<f64> {
        let channels = self.mean.iter().zip(&self.variance).zip(centre);
        let square = |((mean, variance), centre): ((&f64, &f64), &f64)| variance + (mean - centre).powi(2);
        channels.map(|channel| self.values * square(channel)).collect()
    }
}

/// The numbers of a layer that are no tensors. Ranks with others would normalise, and keep running statistics, each in its own way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Added to the variance.
    pub epsilon: f64,
    /// The share of the newest batch in the running statistics.
    pub momentum: f64,
}

impl Settings {
    /// In how many parts the ranks compare a hash of their settings.
    const PARTS: usize = 4;
    /// How many numbers ranks add up to compare their settings.
    pub const NUMBERS: usize = 1 + 2 * Self::PARTS;

    /// What is added up over the ranks beside the statistics: 1, and each 16 bits of a hash, with their square. They are whole numbers, and the sums of two
    /// million ranks are exact.
    pub fn numbers(self) -> [f64; Self::NUMBERS] {
        let bits = [self.epsilon, self.momentum].map(f64::to_bits);
        let hash = fnv1a(bits.into_iter().flat_map(u64::to_le_bytes));
        let mut numbers = [1.0; Self::NUMBERS];
        for (place, pair) in numbers[1..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let part = f64::from((hash >> (16 * place)) as u16);
            *pair = [part, part * part];
        }
        numbers
    }

    /// An error if these `sums` of all ranks' [`numbers`](Self::numbers) show that settings differ: every rank finds the same. Ranks without data have
    /// added none.
    ///
    /// # Errors
    /// It has the settings of this rank.
    pub fn check(self, sums: &[f64]) -> Result<()> {
        let Ok(sums) = <[f64; Self::NUMBERS]>::try_from(sums) else {
            return Err(Error::malformed("sums of other settings"));
        };
        // The sums of a failed exchange are NaN, which is 0 here.
        let [ranks, parts @ ..] = sums.map(|sum| sum as u128);
        // Only if all ranks' numbers are the same.
        let are_same = |[sum, squares]: &[u128; 2]| ranks.checked_mul(*squares) == sum.checked_mul(*sum);
        if parts.as_chunks::<2>().0.iter().all(are_same) {
            return Ok(());
        }
        let Self { epsilon, momentum } = self;
        Err(Error::mismatch(format!(
            "synchronised batch norms of the ranks have different settings: this rank's has the epsilon {epsilon} and the momentum {momentum}"
        ))
        .with_remedy("give every rank the same epsilon and momentum"))
    }
}

/// How to reach the other ranks.
#[derive(Clone)]
pub struct Exchange {
    line: Line,
    /// A group that is ended together with the first.
    guarded: Option<Line>,
}

/// An [`Exchange`] that does not keep a group, for an operation in a graph, which may never run backward.
#[derive(Clone)]
pub struct WeakExchange {
    line: WeakLine,
    guarded: Option<WeakLine>,
}

#[derive(Clone)]
enum WeakLine {
    Direct(WeakGroup),
    /// With the group to which it leads.
    Handle(WeakHandle, WeakGroup),
    /// It leads to no group.
    Kept(Arc<dyn Communicator>),
}

impl WeakLine {
    fn upgrade(&self) -> Result<Line> {
        Ok(match self {
            Self::Direct(group) => Line::Direct(group.upgrade()?),
            Self::Handle(handle, group) => Line::Handle(handle().ok_or_else(|| group.dropped())?),
            Self::Kept(group) => Line::Handle(group.clone()),
        })
    }
}

#[derive(Clone)]
enum Line {
    /// Blocking calls run on this thread, which saves the switch to a worker and back.
    Direct(ProcessGroup),
    /// Any other communicator, such as a handle through which ranks without data answer.
    Handle(Arc<dyn Communicator>),
}

impl Line {
    fn to<C: Communicator + Clone + 'static>(group: &C) -> Self {
        match (group as &dyn Any).downcast_ref::<ProcessGroup>() {
            Some(group) => Self::Direct(group.in_call(Caller::SyncBatchNorm)),
            None => Self::Handle(group.in_call(Caller::SyncBatchNorm)),
        }
    }

    fn group(&self) -> &dyn Communicator {
        match self {
            Self::Direct(group) => group,
            Self::Handle(group) => &**group,
        }
    }

    fn downgrade(&self) -> WeakLine {
        match self {
            Self::Direct(group) => WeakLine::Direct(group.downgrade()),
            Self::Handle(handle) => match handle.process_group() {
                // The handle may lead to a larger group later.
                Some(group) if group.world_size() == WorldSize::ONE => WeakLine::Direct(group.downgrade()),
                Some(group) => {
                    let own = Arc::downgrade(handle);
                    let weak = handle.weak_handle();
                    let weak = weak.unwrap_or_else(|| -> WeakHandle { Arc::new(move || own.upgrade()) });
                    WeakLine::Handle(weak, group.downgrade())
                }
                None => WeakLine::Kept(handle.clone()),
            },
        }
    }

    fn sum(&self, values: &mut [f64]) -> Result<()> {
        match self {
            Self::Direct(group) => group.all_reduce(values, ReduceOp::Sum),
            Self::Handle(group) => {
                let sums = group.all_reduce_async(Buffer::from_slice(values), ReduceOp::Sum)?.wait()?;
                values.copy_from_slice(sums.as_slice()?);
                Ok(())
            }
        }
    }
}

impl Exchange {
    /// The ranks of `group`.
    pub fn new<C: Communicator + Clone + 'static>(group: &C) -> Self {
        Self { line: Line::to(group), guarded: None }
    }

    /// Uses `statistics`, a group of the same ranks, from now on; what goes wrong there ends the first group too.
    #[must_use]
    pub fn over<C: Communicator + Clone + 'static>(self, statistics: &C) -> Self {
        let guarded = self.guarded.unwrap_or(self.line);
        Self { guarded: Some(guarded), ..Self::new(statistics) }
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.line.group().world_size().count()
    }

    /// The cause, if their group has failed.
    pub fn failure(&self) -> Option<Error> {
        self.line.group().failure()
    }

    /// The statistics of all ranks' values together; NaN if that failed or their layers have other `settings`, and then the group has ended with the
    /// cause.
    pub fn moments(&self, own: Moments, settings: Settings) -> Moments {
        if self.line.group().world_size() == WorldSize::ONE {
            return own;
        }
        let mut sums = own.sums();
        let statistics = sums.len();
        sums.extend(settings.numbers());
        self.sum(&mut sums);
        let (sums, compared) = sums.split_at(statistics);
        if let Err(cause) = settings.check(compared) {
            self.abort(cause);
            return Moments::unknown(own.mean.len());
        }
        let mut all = Moments::from_sums(sums);
        if all.has_small_variance() {
            let mut squares = own.squares_about(&all.mean);
            self.sum(&mut squares);
            let values = all.values;
            all.variance = squares.into_iter().map(|square| square / values).collect();
        }
        all
    }

    /// Sums over all ranks, in place; NaN if that failed, and then the group has ended with the cause.
    pub fn sum(&self, values: &mut [f64]) {
        let group = self.line.group();
        if group.world_size() == WorldSize::ONE {
            return;
        }
        if let Err(cause) = self.line.sum(values) {
            values.fill(f64::NAN);
            self.abort(cause);
        }
    }

    /// Ends the group with `cause`: this rank has no statistics, and the others would wait for them.
    pub fn abort(&self, cause: Error) {
        if let Some(guarded) = &self.guarded {
            guarded.group().abort(cause.clone());
        }
        self.line.group().abort(cause);
    }

    /// The same, which does not keep the group.
    pub fn downgrade(&self) -> WeakExchange {
        WeakExchange { line: self.line.downgrade(), guarded: self.guarded.as_ref().map(Line::downgrade) }
    }
}

impl WeakExchange {
    /// The exchange.
    ///
    /// # Errors
    /// As [`WeakGroup::upgrade`].
    pub fn upgrade(&self) -> Result<Exchange> {
        let guarded = self.guarded.as_ref().map(WeakLine::upgrade).transpose()?;
        Ok(Exchange { line: self.line.upgrade()?, guarded })
    }
}

impl fmt::Debug for WeakExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakExchange")
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exchange(rank {} of {})", self.line.group().rank(), self.ranks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings { epsilon: 1e-5, momentum: 0.1 };

    fn of(values: &[f64]) -> Moments {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Moments { values: count, mean: vec![mean], variance: vec![variance] }
    }

    fn merged(parts: &[Moments]) -> Moments {
        let mut sums = vec![0.0; 3];
        for part in parts {
            part.sums().iter().zip(&mut sums).for_each(|(part, sum)| *sum += part);
        }
        Moments::from_sums(&sums)
    }

    #[test]
    fn parts_of_any_size_merge_to_the_whole_also_far_from_zero() {
        let values: Vec<f64> = (0..97).map(|i| 1e4 + f64::from(i * i % 31)).collect();
        let parts = [of(&values[..3]), of(&values[3..40]), Moments::none(1), of(&values[40..])];
        let (merged, whole) = (merged(&parts), of(&values));
        assert_eq!(merged.values, 97.0);
        assert!((merged.mean[0] / whole.mean[0] - 1.0).abs() < 1e-14);
        assert!((merged.variance[0] / whole.variance[0] - 1.0).abs() < 1e-6, "{merged:?} {whole:?}");
    }

    #[test]
    fn a_variance_that_is_small_beside_the_squared_mean_is_that_of_one_process() {
        use crate::testing::{Fabric, run};
        // Their squares are 1024 apart, or not at all.
        let parts: [&[f64]; 3] = [&[1e9, 1e9 + 1.0], &[], &[1e9 + 2.0, 1e9 + 3.0, 1e9 + 4.0]];
        let merged = run(3, Fabric::InProcess, |group| {
            let own = parts[group.rank().index()];
            Exchange::new(&group).moments(if own.is_empty() { Moments::none(1) } else { of(own) }, SETTINGS)
        });
        for moments in &merged {
            assert_eq!((moments.values, moments.mean[0]), (5.0, 1e9 + 2.0));
            assert!((moments.variance[0] - 2.0).abs() < 1e-6, "{moments:?}");
            assert_eq!(moments, &merged[0], "the same bits on every rank");
        }
    }

    #[test]
    fn ranks_whose_data_have_ended_answer_both_sums_of_a_small_variance_and_nan_hides_none() {
        use crate::join::{JoinGroup, JoinOptions};
        use crate::testing::{Fabric, run};
        let parts: [&[f64]; 3] = [&[1e9, 1e9 + 2.0], &[], &[1e9 + 4.0]];
        let found = run(3, Fabric::InProcess, |group| {
            let group = JoinGroup::new(group);
            let (own, exchange) = (parts[group.rank().index()], Exchange::new(&group));
            let joined = group.join(JoinOptions::default(), || {
                if own.is_empty() {
                    return Ok(None);
                }
                let Moments { values, mean, variance } = of(own);
                let beside = |number: Vec<f64>| [vec![f64::NAN], number].concat();
                let own = Moments { values, mean: beside(mean), variance: beside(variance) };
                group.step()?;
                Ok(Some(exchange.moments(own, SETTINGS)))
            });
            joined.unwrap().value
        });
        assert!(found[1].is_none());
        for moments in found.iter().flatten() {
            assert!(moments.mean[0].is_nan() && moments.variance[0].is_nan(), "{moments:?}");
            assert!((moments.variance[1] - 8.0 / 3.0).abs() < 1e-6, "{moments:?}");
        }
    }

    #[test]
    fn what_does_not_keep_a_group_needs_it_and_not_the_layer_that_was_made_with_it() {
        use crate::group::GroupHandle;
        use crate::join::JoinGroup;
        use crate::testing::{Fabric, run};
        run(2, Fabric::InProcess, |group| {
            let (handle, joined) = (GroupHandle::new(group.clone()), JoinGroup::new(group.clone()));
            let lines = [Exchange::new(&group), Exchange::new(&handle), Exchange::new(&joined)];
            for line in lines.map(|layer| layer.downgrade()) {
                let mut values = [1.0];
                line.upgrade().unwrap().sum(&mut values);
                assert_eq!(values, [2.0]);
            }
            drop((handle, joined));
        });
    }

    #[test]
    fn a_rank_without_statistics_ends_both_groups_and_the_others_get_no_numbers() {
        use crate::testing::{Fabric, run};
        use std::sync::Barrier;
        let made = Barrier::new(2);
        let outcomes = run(2, Fabric::InProcess, |group| {
            let statistics = group.split(Some(0), 0).unwrap().unwrap();
            let exchange = Exchange::new(&group).over(&statistics);
            made.wait();
            if group.rank().is_main() {
                exchange.abort(Error::aborted("the device has failed"));
                assert!(Moments::unknown(1).mean[0].is_nan());
            } else {
                assert!(exchange.moments(of(&[1.0, 2.0]), SETTINGS).mean[0].is_nan());
            }
            [exchange.failure(), group.failure()].map(|error| error.unwrap().to_string())
        });
        assert!(
            outcomes.iter().flatten().all(|error| error.contains("the device has failed")),
            "{outcomes:?}"
        );
    }

    #[test]
    fn a_graph_of_a_rank_alone_keeps_no_group_to_which_its_handle_leads_later() {
        use crate::group::GroupHandle;
        let handle = GroupHandle::new(ProcessGroup::alone().unwrap());
        let exchange = Exchange::new(&handle);
        let graph = exchange.downgrade();
        let later = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap().remove(0);
        let watched = later.downgrade();
        handle.rebind(later);
        // Its statistics are this rank's.
        assert_eq!((exchange.ranks(), graph.upgrade().unwrap().ranks()), (2, 1));
        drop((exchange, handle));
        assert!(watched.upgrade().is_err());
        assert_eq!(graph.upgrade().unwrap().ranks(), 1);
    }

    #[test]
    fn layers_with_other_settings_end_the_group_on_every_rank_and_ranks_without_data_have_none() {
        use crate::join::{JoinGroup, JoinOptions};
        use crate::testing::{Fabric, run};
        let others =
            [SETTINGS, Settings { epsilon: 1e-3, ..SETTINGS }, Settings { momentum: 0.01, ..SETTINGS }];
        for other in others {
            let found = run(3, Fabric::InProcess, |group| {
                let rank = group.rank().index();
                let group = JoinGroup::new(group);
                let joined = group.join(JoinOptions::default(), || {
                    if rank == 1 {
                        return Ok(1.0);
                    }
                    group.step()?;
                    let settings = if rank == 2 { other } else { SETTINGS };
                    let moments = Exchange::new(&group).moments(of(&[1.0, 3.0]), settings);
                    group.failure().map_or(Ok(moments.mean[0]), Err)
                });
                joined.map(|joined| joined.value).map_err(|error| error.to_string())
            });
            for (rank, found) in found.into_iter().enumerate() {
                match other == SETTINGS {
                    true => assert_eq!(found, Ok(if rank == 1 { 1.0 } else { 2.0 })),
                    false => assert!(
                        found.as_ref().is_err_and(|error| error.contains("different settings")),
                        "{found:?}"
                    ),
                }
            }
        }
    }

    #[test]
    fn settings_of_many_ranks_are_compared_exactly() {
        let sums = |settings: &[(Settings, f64)]| {
            let sum =
                |place: usize| settings.iter().map(|(one, ranks)| one.numbers()[place] * ranks).sum::<f64>();
            std::array::from_fn::<f64, { Settings::NUMBERS }, _>(sum)
        };
        SETTINGS.check(&sums(&[(SETTINGS, 2e6)])).unwrap();
        let tried = Settings { epsilon: 1e-3, momentum: 0.2 };
        for (one, other) in [
            (SETTINGS, Settings { momentum: SETTINGS.momentum.next_up(), ..SETTINGS }),
            (SETTINGS, Settings { epsilon: SETTINGS.epsilon.next_up(), ..SETTINGS }),
            // Of these pairs the highest 16 bits of the hash are the same.
            (SETTINGS, Settings { epsilon: 5e-4, momentum: 0.184 }),
            (tried, Settings { momentum: 0.467, ..tried }),
        ] {
            let differing = sums(&[(one, 2e6 - 1.0), (other, 1.0)]);
            assert!(one.check(&differing).unwrap_err().is_mismatch(), "{one:?} and {other:?}");
        }
        SETTINGS.check(&[f64::NAN; Settings::NUMBERS]).unwrap();
    }

    #[test]
    fn equal_values_have_no_variance_and_a_failure_is_not_hidden() {
        assert_eq!(merged(&[of(&[0.1; 3]), of(&[0.1; 7])]).variance[0], 0.0);
        assert!(Moments::from_sums(&[f64::NAN; 3]).variance[0].is_nan());
    }
}
