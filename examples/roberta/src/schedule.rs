//! The learning rate and the random numbers of a step: functions of its number, so that a run which goes on from a checkpoint
//! has the same.

/// The rate of step `step`, counted from 0: it grows to `peak` in a straight line over `warmup` steps and falls to zero at `total`.
/// This is transformers' `get_linear_schedule_with_warmup`.
pub fn linear_with_warmup(peak: f64, warmup: u64, total: u64, step: u64) -> f64 {
    if step < warmup {
        return peak * step as f64 / warmup as f64;
    }
    peak * total.saturating_sub(step) as f64 / total.saturating_sub(warmup).max(1) as f64
}

/// One seed of several numbers, such as the run's seed, the step and the rank: others for any that differs.
pub fn seed_of(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0, |seed: u64, &number| {
        // The output function of SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
        let x = (seed ^ number).wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_transformers() {
        // get_linear_schedule_with_warmup(AdamW(lr=0.1), 2, 6).get_last_lr() before each of 7 steps
        let rates: Vec<f64> = (0..7).map(|step| linear_with_warmup(0.1, 2, 6, step)).collect();
        for (rate, expected) in rates.iter().zip([0.0, 0.05, 0.1, 0.075, 0.05, 0.025, 0.0]) {
            assert!((rate - expected).abs() < 1e-12, "{rates:?}");
        }
        assert_eq!(linear_with_warmup(0.1, 0, 0, 0), 0.0);
    }

    #[test]
    fn seeds_differ_in_each_number_and_in_their_order() {
        let seeds = [seed_of(&[1, 0, 0]), seed_of(&[1, 0, 1]), seed_of(&[1, 1, 0]), seed_of(&[0, 1, 1])];
        let different: std::collections::HashSet<u64> = seeds.into_iter().collect();
        assert_eq!(different.len(), seeds.len());
    }
}
