//! The limit of descriptors, which is 1024 in most shells and can be raised without a privilege.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What this process holds of each process that it starts, at most: its pipes, the files of its errors, itself, and its connection to the store.
const PER_PROCESS: u64 = 6;
/// What the store needs for each rank, which may have as many connections; of these it makes two at once, and before they are authenticated they
/// may take a quarter of the limit. A rank holds less of each other one: three connections.
const PER_RANK: u64 = 8;
/// What else this process, or a rank, holds.
const OWN: u64 = 64;

/// Raises this process's limit, if it is too low for so many `processes` that it starts in a job of so many `ranks`, as far as the hard limit
/// allows. Those processes inherit it: ranks need it, too. What the hard limit does not allow fails, by name, where it is needed.
pub(super) fn allow(processes: usize, ranks: u64) {
    let needed = PER_PROCESS.saturating_mul(processes as u64).saturating_add(PER_RANK.saturating_mul(ranks));
    if let Some(limit) = raised(&getrlimit(Resource::Nofile), needed.saturating_add(OWN)) {
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

/// The limit in place of this one; none if it stays.
fn raised(limit: &Rlimit, needed: u64) -> Option<Rlimit> {
    let most = limit.maximum.map_or(needed, |maximum| maximum.min(needed));
    let is_low = limit.current.is_some_and(|current| current < most);
    is_low.then_some(Rlimit { current: Some(most), maximum: limit.maximum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_as_far_as_it_is_needed_and_allowed() {
        let raised = |current, maximum| raised(&Rlimit { current, maximum }, 2000).map(|limit| limit.current);
        assert_eq!(raised(Some(1024), Some(4096)), Some(Some(2000)));
        assert_eq!(raised(Some(1024), None), Some(Some(2000)));
        assert_eq!(raised(Some(1024), Some(1500)), Some(Some(1500)));
        for stays in [(Some(1024), Some(1024)), (Some(2000), Some(4096)), (None, None)] {
            assert_eq!(raised(stays.0, stays.1), None, "{stays:?}");
        }
    }
}
