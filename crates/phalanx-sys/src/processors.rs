//! How many processors the ranks of this host have together, and what they are slow at.

use std::fs;
use std::sync::OnceLock;
use std::thread::available_parallelism;

use rustix::thread::sched_getaffinity;

/// Whether each of `ranks` ranks of this host can have a processor of its own. If not, one that polls may keep another from going on.
///
/// All processors of the host count, not those that this process is bound to: a launcher may bind each rank to its own. Ranks that share some
/// of them yield while they poll. Of a container's quota only so many count as it has time for: ranks that poll would use up each other's.
pub fn suffice_for(ranks: usize) -> bool {
    static USABLE: OnceLock<usize> = OnceLock::new();
    ranks <= *USABLE.get_or_init(usable)
}

/// Whether a processor of this host writes slowly to memory that another one has read, and that both have in their caches. AMD's do: 7 ns for each
/// line of two staging buffers of 64 KiB that take turns, and 2 ns if they take turns with so many that the lines have left the reader's cache.
pub fn rereads_slowly() -> bool {
    static SLOWLY: OnceLock<bool> = OnceLock::new();
    *SLOWLY.get_or_init(|| {
        let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        about.lines().any(|line| line.starts_with("vendor_id") && line.ends_with("AuthenticAMD"))
    })
}

fn usable() -> usize {
    let bound = sched_getaffinity(None).map_or(usize::MAX, |set| set.count() as usize);
    within_quota(online(), bound, available_parallelism().map_or(usize::MAX, usize::from))
}

/// `available` is the smaller of the processors to which this process is `bound` and of a container's quota. Where it is the quota, that counts;
/// the quota of a process that is bound to fewer processors is not known from it.
fn within_quota(online: usize, bound: usize, available: usize) -> usize {
    if available < bound { online.min(available) } else { online }
}

/// From the kernel, because libraries of C differ in whether they count those to which a process is bound.
fn online() -> usize {
    let listed = fs::read_to_string("/sys/devices/system/cpu/online").ok().and_then(|list| count(&list));
    listed.unwrap_or_else(|| available_parallelism().map_or(1, usize::from))
}

/// The processors of a list such as `0-3,8`.
fn count(list: &str) -> Option<usize> {
    let each = list.trim().split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    each.sum()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn processors_suffice_for_as_many_ranks_as_there_are_processors() {
        assert!(suffice_for(1) && suffice_for(usable()));
        assert!(!suffice_for(usable() + 1));
    }

    #[test]
    fn a_quota_counts_and_a_binding_does_not() {
        assert_eq!(within_quota(8, 8, 8), 8);
        assert_eq!(within_quota(8, 1, 1), 8, "bound to one, without a quota");
        assert_eq!(within_quota(64, 64, 2), 2, "a quota of two processors");
        assert_eq!(within_quota(2, 2, 4), 2);
    }

    #[test]
    fn lists_of_processors_are_counted() {
        assert_eq!(count("0-3,8\n"), Some(5));
        assert_eq!(count("0\n"), Some(1));
        assert_eq!(["", "3-1", "0-", "a"].map(count), [None; 4]);
    }
}
