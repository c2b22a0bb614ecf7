//! Distributions of many numbers.

/// Into how many bins the range of the values is divided.
const BINS: usize = 64;

/// How often values lie where: 64 bins of equal width from the smallest to the largest.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// The smallest value; 0 if there is none.
    pub min: f64,
    /// The largest value; 0 if there is none.
    pub max: f64,
    /// The sum of the values.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_of_squares: f64,
    /// The upper limit of each bin.
    pub limits: Vec<f64>,
    /// How many values are in each bin.
    pub counts: Vec<u64>,
    /// How many values were NaN or infinite; they are in no bin. If all were, the histogram is that of no value.
    pub non_finite: u64,
}

impl Histogram {
    /// Of these values: gradients, weights, activations.
    ///
    /// ```
    /// use phalanx_tracking::Histogram;
    /// let histogram = Histogram::of(&[1.0f32, 2.0, 2.0, f32::NAN]);
    /// assert_eq!((histogram.min, histogram.max, histogram.count(), histogram.non_finite), (1.0, 2.0, 3, 1));
    /// ```
    pub fn of<T: Copy + Into<f64>>(values: &[T]) -> Self {
        let (mut min, mut max, mut finite) = (f64::INFINITY, f64::NEG_INFINITY, 0);
        let (mut sum, mut sum_of_squares) = (0.0, 0.0);
        let values = || values.iter().map(|value| (*value).into());
        for value in values().filter(|value: &f64| value.is_finite()) {
            (min, max, finite) = (min.min(value), max.max(value), finite + 1);
            (sum, sum_of_squares) = (sum + value, sum_of_squares + value * value);
        }
        let non_finite = values().count() as u64 - finite;
        if finite == 0 || min == max {
            let min = if finite == 0 { 0.0 } else { min };
            let (limits, counts) = (vec![min], vec![finite]);
            return Self { min, max: min, sum, sum_of_squares, limits, counts, non_finite };
        }
        // Halves, because the width itself may be more than the largest number.
        let width = max / 2.0 - min / 2.0;
        let mut counts = vec![0; BINS];
        for value in values().filter(|value| value.is_finite()) {
            let place = (value / 2.0 - min / 2.0) / width * BINS as f64;
            counts[(place as usize).min(BINS - 1)] += 1;
        }
        let limit = |bin: usize| match bin + 1 {
            BINS => max,
            above => (min / 2.0 + width * (above as f64 / BINS as f64)) * 2.0,
        };
        let limits = (0..BINS).map(limit).collect();
        Self { min, max, sum, sum_of_squares, limits, counts, non_finite }
    }

    /// How many values there are, without those that are NaN or infinite.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_value_is_in_the_bin_below_its_limit() {
        let values: Vec<f64> = (0..1000).map(|i| (f64::from(i) * 0.7).sin() * 3.0).collect();
        let histogram = Histogram::of(&values);
        assert_eq!((histogram.count(), histogram.limits.len(), histogram.counts.len()), (1000, BINS, BINS));
        let mut below = 0;
        for (limit, count) in histogram.limits.iter().zip(&histogram.counts) {
            below += count;
            let exact = values.iter().filter(|value| *value < limit).count() as u64;
            // A value on the limit itself may be on either side of it.
            assert!(exact.abs_diff(below) <= 1, "{exact} {below}");
        }
    }

    #[test]
    fn few_equal_extreme_and_no_values() {
        let none = Histogram::of::<f32>(&[]);
        assert_eq!((none.min, none.max, none.count(), none.limits.len()), (0.0, 0.0, 0, 1));
        let infinite = Histogram::of(&[f32::INFINITY, f32::NAN]);
        assert_eq!((infinite.count(), infinite.non_finite), (0, 2));
        let equal = Histogram::of(&[2.0f32; 5]);
        assert_eq!((equal.limits, equal.counts), (vec![2.0], vec![5]));
        let extreme = Histogram::of(&[f64::MIN, 0.0, f64::MAX]);
        assert_eq!((extreme.counts[0], extreme.counts[32], extreme.counts[63]), (1, 1, 1));
        assert!(extreme.limits.iter().all(|limit| limit.is_finite()) && extreme.limits.is_sorted());
    }
}
