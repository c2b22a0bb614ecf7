//! torch's `randperm` on the CPU, bit for bit: checked against torch 2.15 with the vectors in `tests/data`.

// The crate's `new` seeds as the reference's `init_genrand`, as torch does; it has no dependencies.
use rand_mt::Mt;

/// From this length on, torch draws 64 bits for each place.
const WIDE: usize = (u32::MAX / 20) as usize;

/// A random order of `0..len`.
///
/// Of `seed` only the lower 32 bits count, in torch too.
pub(super) fn random_permutation(len: usize, seed: u64) -> Vec<usize> {
    let mut generator = Mt::new(seed as u32);
    if len < WIDE { narrow(len, &mut generator) } else { wide(len, &mut generator) }
}

/// Swaps each place with one of those behind it, or itself.
fn narrow(len: usize, generator: &mut Mt) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    for place in 0..len.saturating_sub(1) {
        let offset = generator.next_u32() as usize % (len - place);
        order.swap(place, place + offset);
    }
    order
}

/// Puts each number into one of the places up to its own, and what was there into its own.
fn wide(len: usize, generator: &mut Mt) -> Vec<usize> {
    let mut order = Vec::with_capacity(len);
    for number in 0..len {
        let (high, low) = (u64::from(generator.next_u32()), u64::from(generator.next_u32()));
        // The remainder is at most `number`.
        let place = ((high << 32 | low) % (number as u64 + 1)) as usize;
        order.push(number);
        order.swap(number, place);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes 2 GiB and, without optimisation, a minute: `cargo test --release -- --ignored torch_for_long`.
    #[test]
    #[ignore = "takes 2 GiB of memory: .ci/full runs it"]
    fn it_is_that_of_torch_for_long_permutations() {
        let vectors: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/data/sampler_vectors.json")).unwrap();
        for case in vectors["randperm"].as_array().unwrap() {
            let len = case["n"].as_u64().unwrap() as usize;
            let order = random_permutation(len, case["seed"].as_u64().unwrap());
            let ends = [&order[..4], &order[len - 4..]].concat();
            assert_eq!(serde_json::json!(ends), case["ends"], "{case}");
            let sum = order.iter().enumerate().fold(0i64, |sum, (place, &number)| {
                sum.wrapping_add((number as i64).wrapping_mul(place as i64 + 1))
            });
            assert_eq!(serde_json::json!(sum), case["weighted_sum"], "{case}");
        }
    }
}
