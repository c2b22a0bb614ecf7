//! Where the ranks are: on which hosts, and beside which others.

use phalanx::{ProcessGroup, Rank, Result};
use phalanx_proto::horovod::controller::ranks;

/// A rank's place among the ranks of its host, and among the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    pub local_rank: u32,
    pub local_size: u32,
    pub cross_rank: u32,
    pub cross_size: u32,
    pub is_homogeneous: bool,
}

impl Topology {
    /// Asks all ranks for their hosts.
    pub fn of(group: &ProcessGroup) -> Result<Self> {
        Ok(Self::new(&group.all_gather_object(&group.host_identity())?, group.rank()))
    }

    /// The place of `rank`, if `hosts` has the host of each.
    fn new(hosts: &[String], rank: Rank) -> Self {
        let own = &hosts[rank.index()];
        let count =
            |host: &String, ranks: &[String]| ranks.iter().filter(|other| *other == host).count() as u32;
        let local_rank = count(own, &hosts[..rank.index()]);
        // The hosts in the order of their first ranks; only those that have a rank with this local rank.
        let mut distinct: Vec<&String> = Vec::new();
        for host in hosts {
            if !distinct.contains(&host) {
                distinct.push(host);
            }
        }
        let sizes: Vec<u32> = distinct.iter().map(|host| count(host, hosts)).collect();
        let with_this_rank = || distinct.iter().zip(&sizes).filter(|(_, size)| **size > local_rank);
        Self {
            local_rank,
            local_size: count(own, hosts),
            cross_rank: with_this_rank().take_while(|(host, _)| **host != own).count() as u32,
            cross_size: with_this_rank().count() as u32,
            is_homogeneous: sizes.iter().all(|size| *size == sizes[0]),
        }
    }
}

/// What a text says at its end that names ranks of `group`: in a process set these are numbers of its own, which no launcher shows.
pub(crate) fn numbered_among(group: &ProcessGroup) -> String {
    let global = || group.world_size().ranks().filter_map(move |rank| group.global_rank(rank).ok());
    match global().eq(group.world_size().ranks()) {
        true => String::new(),
        false => format!(" (ranks are numbered among global {})", ranks(global().map(Rank::index))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(hosts: &str, rank: u32) -> (u32, u32, u32, u32, bool) {
        let hosts: Vec<String> = hosts.chars().map(String::from).collect();
        let Topology { local_rank, local_size, cross_rank, cross_size, is_homogeneous } =
            Topology::new(&hosts, Rank::new(rank));
        (local_rank, local_size, cross_rank, cross_size, is_homogeneous)
    }

    #[test]
    fn ranks_are_counted_on_hosts_and_across_them() {
        assert_eq!(place("a", 0), (0, 1, 0, 1, true));
        assert_eq!(place("aabb", 3), (1, 2, 1, 2, true));
        assert_eq!(place("abab", 2), (1, 2, 0, 2, true));
        assert_eq!(place("aabcc", 4), (1, 2, 1, 2, false));
        assert_eq!(place("aabcc", 2), (0, 1, 1, 3, false));
    }
}
