//! torch's `randperm` on the CPU, bit for bit: checked against torch 2.15 with the vectors in `tests/data`.

// `Mt::new` seeds like the reference's `init_genrand`, as torch does. The crate has no dependencies.
use rand_mt::Mt;

use crate::error::{Error, Result};

/// From this length on, torch draws 64 bits for each place.
const WIDE: usize = (u32::MAX / 20) as usize;

/// Checks that there is memory for an order of `samples`.
///
/// # Errors
/// If there is not.
pub fn check_order(samples: usize) -> Result<()> {
    memory_for(samples).map(drop)
}

/// Memory for an order of `samples`.
fn memory_for(samples: usize) -> Result<Vec<usize>> {
    let mut order = Vec::new();
    match order.try_reserve_exact(samples) {
        Ok(()) => Ok(order),
        Err(error) => Err(Error::invalid_argument(format!(
            "there is no memory for an order of {samples} samples, which takes {} bytes",
            samples as u128 * size_of::<usize>() as u128
        ))
        .with_remedy("is the length of the data set right?")
        .with_source(error)),
    }
}

/// The same for callers that cannot return an error.
#[expect(clippy::panic, reason = "an allocation that fails would abort the process, without this sentence")]
fn room_for(samples: usize) -> Vec<usize> {
    memory_for(samples).unwrap_or_else(|error| panic!("{error}"))
}

/// A random order of `0..len`.
///
/// Only the lower 32 bits of `seed` count, as in torch.
///
/// # Panics
/// If there is no memory for it, which [`check_order`] finds out beforehand.
pub fn random_permutation(len: usize, seed: u64) -> Vec<usize> {
    let mut generator = Mt::new(seed as u32);
    if len < WIDE { narrow(len, &mut generator) } else { wide(len, &mut generator) }
}

/// Swaps each place with itself or one after it.
fn narrow(len: usize, generator: &mut Mt) -> Vec<usize> {
    let mut order = room_for(len);
    order.extend(0..len);
    for (place, other) in narrow_places(len, generator).enumerate() {
        order.swap(place, other);
    }
    order
}

/// For each place but the last: the place that it is swapped with.
fn narrow_places(len: usize, generator: &mut Mt) -> impl Iterator<Item = usize> {
    (0..len.saturating_sub(1)).map(move |place| place + generator.next_u32() as usize % (len - place))
}

/// Puts each number into one of the places up to its own, and the number that was there into its own place.
fn wide(len: usize, generator: &mut Mt) -> Vec<usize> {
    let mut order = room_for(len);
    for (number, place) in wide_places(len, generator).enumerate() {
        order.push(number);
        order.swap(number, place);
    }
    order
}

/// For each number: the place that it is put into.
fn wide_places(len: usize, generator: &mut Mt) -> impl Iterator<Item = usize> {
    (0..len).map(move |number| {
        let (high, low) = (u64::from(generator.next_u32()), u64::from(generator.next_u32()));
        // The remainder is at most `number`.
        ((high << 32 | low) % (number as u64 + 1)) as usize
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first places of [`narrow`], which are final after they have been swapped, so nothing else is computed. True
    /// as long as no place is swapped twice, which holds in a long order.
    fn narrow_begins_with(len: usize, generator: &mut Mt) -> [usize; 4] {
        let mut places = narrow_places(len, generator);
        [(); 4].map(|()| places.next().unwrap())
    }

    /// The first places of [`wide`], which hold the number put there last.
    fn wide_begins_with(len: usize, generator: &mut Mt) -> [usize; 4] {
        let mut first = [0; 4];
        for (number, place) in wide_places(len, generator).enumerate() {
            if let Some(held) = first.get_mut(place) {
                *held = number;
            }
        }
        first
    }

    #[test]
    fn an_order_for_which_there_is_no_memory_is_refused_by_its_length() {
        // More than a process can address, and more than a `Vec` can have.
        for samples in [1 << 45, 1 << 61, usize::MAX] {
            let error = check_order(samples).unwrap_err();
            assert!(
                error.is_invalid_argument() && error.to_string().contains(&samples.to_string()),
                "{error}"
            );
            let panic = std::panic::catch_unwind(|| random_permutation(samples, 0)).unwrap_err();
            let said = panic.downcast_ref::<String>().unwrap();
            assert!(said.contains("no memory for an order"), "{said}");
        }
        check_order(1000).unwrap();
    }

    #[test]
    fn an_order_begins_as_its_places_say() {
        for seed in 0..20 {
            let generator = || Mt::new(seed);
            assert_eq!(narrow(100_000, &mut generator())[..4], narrow_begins_with(100_000, &mut generator()));
            assert_eq!(wide(100_000, &mut generator())[..4], wide_begins_with(100_000, &mut generator()));
        }
    }

    #[test]
    fn it_is_that_of_torch_for_long_permutations() {
        let vectors: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/data/permutation_vectors.json")).unwrap();
        let cases = vectors["randperm"].as_array().unwrap();
        let lengths: Vec<_> = cases.iter().map(|case| case["n"].as_u64().unwrap() as usize).collect();
        assert_eq!(lengths, [WIDE - 1, WIDE]);
        for (case, len) in cases.iter().zip(lengths) {
            // The whole order would take 2 GiB and a minute.
            let generator = &mut Mt::new(case["seed"].as_u64().unwrap() as u32);
            let begin = match len < WIDE {
                true => narrow_begins_with(len, generator),
                false => wide_begins_with(len, generator),
            };
            assert_eq!(serde_json::json!(begin), case["begin"]);
        }
    }
}
