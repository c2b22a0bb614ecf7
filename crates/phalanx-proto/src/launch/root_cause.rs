//! Which of several failures was the first: pure.
//!
//! The first failure is the one that others report, not the first process to end: a rank that panics tells the others
//! before its process ends, and they may end before it. So a rank whose group fails notes which rank caused that, apart
//! from the error with which it may end later (`worker_error`). The launcher waits a little for a rank that is still
//! ending (`policy`).

/// Follows the blame from the first failure to one that blames none of the others: that is the root cause. `blamed` is the
/// failure that a failure blames. If failures blame each other in a circle, the first counts.
pub(super) fn root_cause<'a, T>(failures: &'a [T], blamed: impl Fn(&T) -> Option<&'a T>) -> Option<&'a T> {
    let first = failures.first()?;
    let mut current = first;
    for _ in failures {
        match blamed(current) {
            Some(other) => current = other,
            None => return Some(current),
        }
    }
    Some(first)
}
