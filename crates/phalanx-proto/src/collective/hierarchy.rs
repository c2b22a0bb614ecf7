//! Collectives of several hosts whose ranks share memory. Within a host every rank reaches all ranks' elements. So only
//! what must cross moves from host to host, in as many streams as every host has ranks for.
//!
//! The elements are divided into *stripes*. On each host one rank owns stripe s, and the owners of a stripe exchange it
//! as if they were a world of their own. With one stripe, one rank of each host, its leader, does this for all.

use std::ops::Range;

use super::{Plan, Recv, Send, Step};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// A rank's position in a group of several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// The ranks of each host, in the same order on every rank.
    hosts: Vec<Vec<Rank>>,
    /// This rank's host, and its index there.
    host: usize,
    place: usize,
}

/// The leaders' communicator: one rank of each host, which exchange elements between hosts; and the index of this
/// rank's host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaders {
    /// The leaders, by host.
    pub ranks: Vec<Rank>,
    /// This rank's host, as a rank of the world of hosts.
    pub host: Rank,
    /// The number of hosts.
    pub hosts: WorldSize,
}

impl Hierarchy {
    /// None if this gains nothing: one host, or hosts with one rank each.
    pub fn new(hosts: &[Vec<Rank>], rank: Rank) -> Option<Self> {
        let host = hosts.iter().position(|ranks| ranks.contains(&rank))?;
        let place = hosts[host].iter().position(|member| *member == rank)?;
        let shares = hosts.iter().any(|ranks| ranks.len() > 1);
        (hosts.len() > 1 && shares).then(|| Self { hosts: hosts.to_vec(), host, place })
    }

    /// The largest number of stripes for which every host has enough ranks.
    pub fn most_stripes(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// The stripe that this rank owns, and the leaders that own it on the other hosts.
    pub fn owned(&self, stripes: usize) -> Option<(usize, Leaders)> {
        (self.place < stripes).then(|| (self.place, self.leaders_by(|ranks| ranks.get(self.place).copied())))
    }

    /// One leader of each host: `root` on its own host, and the first rank on every other host.
    pub fn leaders(&self, root: Rank) -> Leaders {
        self.leaders_by(|ranks| if ranks.contains(&root) { Some(root) } else { ranks.first().copied() })
    }

    /// The host of `rank`, as a rank of the world of hosts.
    pub fn host_of(&self, rank: Rank) -> Rank {
        Rank::new(self.hosts.iter().position(|ranks| ranks.contains(&rank)).unwrap_or(0) as u32)
    }

    fn leaders_by(&self, leader: impl Fn(&[Rank]) -> Option<Rank>) -> Leaders {
        let ranks: Vec<Rank> = self.hosts.iter().filter_map(|ranks| leader(ranks)).collect();
        // There are at least two hosts, and no more than ranks.
        let hosts = WorldSize::new(ranks.len() as u32).unwrap_or(WorldSize::ONE);
        Leaders { ranks, host: Rank::new(self.host as u32), hosts }
    }
}

impl Leaders {
    /// Whether `rank` is a leader.
    pub fn has(&self, rank: Rank) -> bool {
        self.ranks.contains(&rank)
    }

    /// Translates a plan of a world of hosts into steps of the hosts' leaders, for elements that begin at `start`.
    pub fn translate(&self, plan: Plan, start: usize) -> Plan {
        let leader = |host: Rank| self.ranks.get(host.index()).copied().unwrap_or(host);
        let moved = |range: Range<usize>| start + range.start..start + range.end;
        plan.into_iter()
            .map(|Step { send, recv }| Step {
                send: send.map(|Send { to, range }| Send { to: leader(to), range: moved(range) }),
                recv: recv.map(|recv| Recv { from: leader(recv.from), range: moved(recv.range), ..recv }),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Combine, dissemination};

    fn ranks(ranks: &[u32]) -> Vec<Rank> {
        ranks.iter().copied().map(Rank::new).collect()
    }

    fn hosts() -> Vec<Vec<Rank>> {
        vec![ranks(&[0, 2, 4]), ranks(&[1, 3])]
    }

    #[test]
    fn every_stripe_has_one_owner_on_each_host() {
        let of = |rank| Hierarchy::new(&hosts(), Rank::new(rank)).unwrap();
        assert_eq!(of(0).most_stripes(), 2);
        let (stripe, leaders) = of(3).owned(2).unwrap();
        assert_eq!((stripe, leaders.ranks, leaders.host), (1, ranks(&[2, 3]), Rank::new(1)));
        assert!(of(4).owned(2).is_none() && of(2).owned(1).is_none());
    }

    #[test]
    fn the_root_leads_its_host() {
        let hierarchy = Hierarchy::new(&hosts(), Rank::new(4)).unwrap();
        let leaders = hierarchy.leaders(Rank::new(3));
        assert_eq!(leaders.ranks, ranks(&[0, 3]));
        assert!(leaders.has(Rank::new(3)) && !leaders.has(Rank::new(4)));
        assert_eq!(hierarchy.host_of(Rank::new(3)), Rank::new(1));
    }

    #[test]
    fn without_neighbours_nothing_is_gained() {
        assert!(Hierarchy::new(&[ranks(&[0, 1])], Rank::new(0)).is_none());
        assert!(Hierarchy::new(&[ranks(&[0]), ranks(&[1])], Rank::new(1)).is_none());
    }

    #[test]
    fn a_plan_of_hosts_is_carried_out_by_their_leaders() {
        let (_, leaders) = Hierarchy::new(&hosts(), Rank::new(2)).unwrap().owned(2).unwrap();
        let plan = vec![Step::send(Rank::new(1), 0..3).and_recv(Rank::new(1), 3..5, Combine::Replace)];
        let expected =
            vec![Step::send(Rank::new(3), 10..13).and_recv(Rank::new(3), 13..15, Combine::Replace)];
        assert_eq!(leaders.translate(plan, 10), expected);
        assert_eq!(leaders.translate(dissemination(leaders.host, leaders.hosts), 0).len(), 1);
    }
}
