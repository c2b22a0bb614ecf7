//! The limit of descriptors, which is 1024 in most shells and can be raised without a privilege.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What this process holds of each process that it starts, at most: its pipes, the files of its errors, itself, and its connection to the store.
const PER_PROCESS: u64 = 6;
/// A rank has three connections with each other one in a group of all, and a program may have several: Horovod's functions make two beside the first,
/// and so do frameworks. This is enough for eight. The store needs less for each rank, which may have eight connections with it; of these it makes two
/// at once, and before they are authenticated they may take a quarter of the limit.
const PER_RANK: u64 = 3 * 8;
/// What else this process, or a rank, holds.
const OWN: u64 = 64;

/// Raises this process's limit, if it is too low for so many `processes` that it starts in a job of so many `ranks`, as far as the hard limit
/// allows. Those processes inherit it: ranks need it, too. What the hard limit does not allow fails, by name, where it is needed.
pub(super) fn allow(processes: usize, ranks: u64) {
    if let Some(limit) = raised(&getrlimit(Resource::Nofile), needed(processes, ranks)) {
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

fn needed(processes: usize, ranks: u64) -> u64 {
    let all = PER_PROCESS.saturating_mul(processes as u64).saturating_add(PER_RANK.saturating_mul(ranks));
    all.saturating_add(OWN)
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
    fn ranks_of_many_hosts_may_have_more_groups_than_the_first() {
        // Three connections with each other rank in the program's group, and in the two of Horovod's functions.
        let of_horovod = |ranks: u64| 3 * 3 * (ranks - 1) + OWN;
        assert!([32, 128, 4000].into_iter().all(|ranks| needed(8, ranks) > of_horovod(ranks)));
        assert_eq!(needed(0, u64::MAX), u64::MAX);
    }

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
