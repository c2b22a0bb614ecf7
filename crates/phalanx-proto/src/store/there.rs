//! How many of several keys there are.

use std::ops::Range;

/// The number of keys, of `count`, that exist before the first that is missing. The first `known` keys exist. `are_there` says whether all keys of a
/// range exist: it is called once if the number is still `known`, and otherwise as often as a binary search needs.
///
/// # Errors
/// Those of `are_there`.
pub fn count_there<E>(
    count: usize,
    known: usize,
    mut are_there: impl FnMut(Range<usize>) -> Result<bool, E>,
) -> Result<usize, E> {
    if known >= count || !are_there(known..known + 1)? {
        return Ok(known);
    }
    // All before `low` exist, and not all before `high`, which may be one too many.
    let (mut low, mut high) = (known + 1, count + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match are_there(low..middle)? {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn the_first_that_is_missing_is_found_with_few_questions() {
        for (count, known, there) in
            [(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 1), (9, 2, 2), (9, 2, 3), (9, 2, 9), (1000, 7, 512)]
        {
            let mut asked = 0;
            let found = count_there(count, known, |keys| {
                assert!(!keys.is_empty() && keys.end <= count, "{keys:?} of {count}");
                asked += 1;
                Ok::<_, Infallible>(keys.end <= there)
            });
            assert_eq!(found, Ok(there));
            assert!(asked <= 11, "{asked} questions for {there} of {count}");
        }
    }

    #[test]
    fn an_error_ends_the_search() {
        assert_eq!(count_there(3, 0, |_| Err("gone")), Err("gone"));
    }
}
