//! Keeps the communication workers of one host's ranks on processors of their own.
//!
//! A worker is woken by the workers it waits for, and the kernel tends to move a thread to the processor of the thread
//! that woke it. Without restriction, the workers of all ranks gather on one processor. They slow down each other, and
//! that rank's backward pass, for which all others then wait.
//!
//! So each worker, and no other thread, is restricted to its rank's share of the processors. The workers of all groups
//! of a process have the same share.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A rank's index among the ranks of its host, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalRank {
    pub rank: u32,
    pub world_size: u32,
}

/// Restricts the calling thread, and no other, to this rank's share of the processors it may use. If there are fewer
/// processors than ranks, for example because a launcher has bound each rank to a few, nothing is changed.
pub(super) fn keep_apart(local: LocalRank) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let processors: Vec<usize> =
        (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect();
    let Some(share) = share(&processors, local) else { return };
    let mut own = CpuSet::new();
    share.iter().for_each(|processor| own.set(*processor));
    if let Err(error) = sched_setaffinity(None, &own) {
        tracing::debug!(%error, "the communication worker could not be bound to this rank's processors");
    }
}

fn share(processors: &[usize], local: LocalRank) -> Option<&[usize]> {
    let (rank, ranks) = (local.rank as usize, local.world_size as usize);
    if ranks < 2 || rank >= ranks || processors.len() < ranks {
        return None;
    }
    let bound = |rank: usize| rank * processors.len() / ranks;
    processors.get(bound(rank)..bound(rank + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(processors: &[usize], rank: u32, world_size: u32) -> Option<&[usize]> {
        share(processors, LocalRank { rank, world_size })
    }

    #[test]
    fn every_processor_is_in_one_share() {
        assert_eq!(of(&[0, 1], 0, 2), Some(&[0][..]));
        assert_eq!(of(&[0, 1], 1, 2), Some(&[1][..]));
        let processors: Vec<usize> = (3..20).collect();
        let shares: Vec<usize> = (0..4).flat_map(|rank| of(&processors, rank, 4).unwrap()).copied().collect();
        assert_eq!(shares, processors);
    }

    #[test]
    fn without_enough_processors_nothing_is_shared() {
        assert_eq!(of(&[0, 1], 0, 3), None);
        assert_eq!(of(&[0, 1], 0, 1), None);
        assert_eq!(of(&[0, 1, 2], 3, 2), None);
    }
}
