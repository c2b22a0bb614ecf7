//! Collectives of several hosts whose ranks share memory. Within a host every rank reaches all ranks' elements. So only
//! what must cross moves from host to host, in as many streams as every host has ranks for.
//!
//! The elements are divided into *stripes*. On each host one rank owns stripe s, and the owners of a stripe exchange it
//! as if they were a world of their own. With one stripe, one rank of each host, its leader, does this for all.

use std::ops::Range;

use super::ring::{all_gather_parts, reduce_scatter_parts};
use super::{Counts, Plan, Recv, Send, Step, all_gather_in_rounds};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// A rank's position in a group of several hosts. Each call asks it for leaders, some once for each rank of the group. So what is asked
/// is found beforehand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// The ranks of each host, in the same order on every rank.
    ranks: Vec<Vec<Rank>>,
    /// The number of hosts.
    hosts: WorldSize,
    /// Each rank's host, by rank.
    host_of: Vec<Rank>,
    /// The first rank of each host.
    firsts: Vec<Rank>,
    /// On each host the rank at this rank's `place`, as far as all hosts have so many ranks.
    owners: Vec<Rank>,
    /// The least number of ranks that any host has.
    most_stripes: usize,
    /// This rank's host, and its index there.
    host: Rank,
    place: usize,
}

/// The leaders' communicator: one rank of each host, which exchange elements between hosts; and the index of this
/// rank's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaders<'a> {
    /// The leaders, by host.
    ranks: &'a [Rank],
    /// A root, which leads its host in place of the rank above; and that host.
    root: Option<(Rank, Rank)>,
    /// This rank's host, as a rank of the world of hosts.
    pub host: Rank,
    /// The number of hosts.
    pub hosts: WorldSize,
}

impl Hierarchy {
    /// None if this gains nothing: one host, or hosts with one rank each. The `hosts` have the ranks in the same order on every rank.
    pub fn new(hosts: &[Vec<Rank>], rank: Rank) -> Option<Self> {
        let host = hosts.iter().position(|ranks| ranks.contains(&rank))?;
        let place = hosts[host].iter().position(|member| *member == rank)?;
        if hosts.len() < 2 || hosts.iter().all(|ranks| ranks.len() < 2) {
            return None;
        }
        let at = |place: usize| -> Vec<Rank> {
            hosts.iter().filter_map(|ranks| ranks.get(place).copied()).collect()
        };
        let most_stripes = hosts.iter().map(Vec::len).min().unwrap_or(1);
        let count = hosts.iter().flatten().map(|rank| rank.index() + 1).max().unwrap_or(0);
        let mut host_of = vec![Rank::MAIN; count];
        for (index, ranks) in hosts.iter().enumerate() {
            ranks.iter().for_each(|rank| host_of[rank.index()] = Rank::new(index as u32));
        }
        Some(Self {
            ranks: hosts.to_vec(),
            hosts: WorldSize::new(hosts.len() as u32).ok()?,
            host_of,
            firsts: at(0),
            owners: if place < most_stripes { at(place) } else { Vec::new() },
            most_stripes,
            host: Rank::new(host as u32),
            place,
        })
    }

    /// The largest number of stripes for which every host has enough ranks.
    pub fn most_stripes(&self) -> usize {
        self.most_stripes
    }

    /// The stripe that this rank owns, and the leaders that own it on the other hosts.
    pub fn owned(&self, stripes: usize) -> Option<(usize, Leaders<'_>)> {
        let is_owner = self.place < stripes.min(self.most_stripes);
        is_owner.then(|| (self.place, self.led_by(&self.owners, None)))
    }

    /// One leader of each host: `root` on its own host, and the first rank on every other host.
    pub fn leaders(&self, root: Rank) -> Leaders<'_> {
        self.led_by(&self.firsts, Some((root, self.host_of(root))))
    }

    /// The number of hosts.
    pub fn hosts(&self) -> WorldSize {
        self.hosts
    }

    /// The ranks of a host, in order.
    pub fn ranks_of(&self, host: Rank) -> &[Rank] {
        self.ranks.get(host.index()).map_or(&[], Vec::as_slice)
    }

    /// An `all_gather_v` between the hosts, when each rank has the parts of all ranks of its host: what this rank does if it owns one of [as
    /// many stripes as there can be](Self::most_stripes). In each turn every owner passes the part of one rank of each host around the ring.
    pub fn all_gather_v(&self, counts: &Counts) -> Option<(Leaders<'_>, Plan)> {
        let (stripe, leaders) = self.owned(self.most_stripes)?;
        let turn = |turn: usize| {
            let part = |host: usize| self.part(counts, turn, Rank::new(host as u32), stripe);
            all_gather_parts(leaders.host, leaders.hosts, part)
        };
        Some((leaders, (0..self.turns()).flat_map(turn).collect()))
    }

    /// The same between one leader of each host, in the fewest rounds. The buffer holds the parts of all ranks, host after host around the ring
    /// of the hosts, and this host's last.
    pub fn all_gather_in_rounds(&self, counts: &Counts) -> Plan {
        let held = |ranks: &Vec<Rank>| ranks.iter().map(|rank| counts.of(rank.index()).len()).sum();
        let by_host = Counts::of_existing(self.ranks.iter().map(held));
        all_gather_in_rounds(self.host, self.hosts, &by_host)
    }

    /// Where the parts of all ranks are: those of `host`, and then those of the others, around the ring of the hosts.
    pub fn parts_from(&self, counts: &Counts, host: Rank) -> impl Iterator<Item = Range<usize>> {
        let hosts = self.ranks.iter().cycle().skip(host.index()).take(self.ranks.len());
        hosts.flatten().map(|rank| counts.of(rank.index()))
    }

    /// A `reduce_scatter_v` between the hosts, when the owner of each of [as many stripes as there can be](Self::most_stripes) has its host's sums
    /// of the [parts](Self::part) of its stripe: what this rank does if it is an owner. In each turn every owner gets the sums of one rank of its
    /// host.
    pub fn reduce_scatter_v(&self, counts: &Counts) -> Option<(Leaders<'_>, Plan)> {
        let (stripe, leaders) = self.owned(self.most_stripes)?;
        let turn = |turn: usize| {
            let part = |host: usize| self.part(counts, turn, Rank::new(host as u32), stripe);
            reduce_scatter_parts(leaders.host, leaders.hosts, part)
        };
        Some((leaders, (0..self.turns()).flat_map(turn).collect()))
    }

    /// Whether a [`reduce_scatter_v`](Self::reduce_scatter_v) has no more rounds than an all-reduce in a ring, which sends twice as much: no host has
    /// more than twice as many ranks as another.
    pub fn scatters_in_few_rounds(&self) -> bool {
        self.turns() <= 2
    }

    /// The turns of an [`all_gather_v`](Self::all_gather_v), and of a [`reduce_scatter_v`](Self::reduce_scatter_v).
    pub fn turns(&self) -> usize {
        self.ranks.iter().map(Vec::len).max().unwrap_or(0).div_ceil(self.most_stripes.max(1))
    }

    /// The part of `host` that the owners of `stripe` pass on in this `turn`. Empty if the host has no more ranks, or if there is no
    /// such stripe.
    pub fn part(&self, counts: &Counts, turn: usize, host: Rank, stripe: usize) -> Range<usize> {
        let place = (stripe < self.most_stripes).then_some(turn * self.most_stripes + stripe);
        let rank = place.and_then(|place| self.ranks_of(host).get(place));
        rank.map_or(0..0, |rank| counts.of(rank.index()))
    }

    /// The host of `rank`, as a rank of the world of hosts.
    pub fn host_of(&self, rank: Rank) -> Rank {
        self.host_of.get(rank.index()).copied().unwrap_or(Rank::MAIN)
    }

    fn led_by<'a>(&self, ranks: &'a [Rank], root: Option<(Rank, Rank)>) -> Leaders<'a> {
        Leaders { ranks, root, host: self.host, hosts: self.hosts }
    }
}

impl Leaders<'_> {
    /// The leader of `host`, a rank of the world of hosts.
    pub fn of(&self, host: Rank) -> Rank {
        let root = self.root.filter(|(_, of_root)| *of_root == host).map(|(root, _)| root);
        root.or_else(|| self.ranks.get(host.index()).copied()).unwrap_or(host)
    }

    /// Translates a plan of a world of hosts into steps of the hosts' leaders, for elements that begin at `start`.
    pub fn translate(&self, plan: Plan, start: usize) -> Plan {
        let moved = |range: Range<usize>| start + range.start..start + range.end;
        plan.into_iter()
            .map(|Step { send, recv }| Step {
                send: send.map(|Send { to, range }| Send { to: self.of(to), range: moved(range) }),
                recv: recv.map(|recv| Recv { from: self.of(recv.from), range: moved(recv.range), ..recv }),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::collective::{Combine, dissemination};

    fn ranks(ranks: &[u32]) -> Vec<Rank> {
        ranks.iter().copied().map(Rank::new).collect()
    }

    fn hosts() -> Vec<Vec<Rank>> {
        vec![ranks(&[0, 2, 4]), ranks(&[1, 3])]
    }

    /// The leaders of all hosts.
    fn all(leaders: Leaders<'_>) -> Vec<Rank> {
        leaders.hosts.ranks().map(|host| leaders.of(host)).collect()
    }

    #[test]
    fn every_stripe_has_one_owner_on_each_host() {
        let [third, fourth, fifth] = [2, 3, 4].map(|rank| Hierarchy::new(&hosts(), Rank::new(rank)).unwrap());
        assert_eq!(third.most_stripes(), 2);
        let (stripe, leaders) = fourth.owned(2).unwrap();
        assert_eq!((stripe, all(leaders), leaders.host), (1, ranks(&[2, 3]), Rank::new(1)));
        assert!(fifth.owned(2).is_none() && third.owned(1).is_none());
    }

    #[test]
    fn the_root_leads_its_host() {
        let hierarchy = Hierarchy::new(&hosts(), Rank::new(4)).unwrap();
        assert_eq!(all(hierarchy.leaders(Rank::new(3))), ranks(&[0, 3]));
        assert_eq!(all(hierarchy.leaders(Rank::new(0))), ranks(&[0, 1]));
        assert_eq!(hierarchy.host_of(Rank::new(3)), Rank::new(1));
    }

    #[test]
    fn without_neighbours_nothing_is_gained() {
        assert!(Hierarchy::new(&[ranks(&[0, 1])], Rank::new(0)).is_none());
        assert!(Hierarchy::new(&[ranks(&[0]), ranks(&[1])], Rank::new(1)).is_none());
    }

    #[test]
    fn a_plan_of_hosts_is_carried_out_by_their_leaders() {
        let hierarchy = Hierarchy::new(&hosts(), Rank::new(2)).unwrap();
        let (_, leaders) = hierarchy.owned(2).unwrap();
        let plan = vec![Step::send(Rank::new(1), 0..3).and_recv(Rank::new(1), 3..5, Combine::Replace)];
        let expected =
            vec![Step::send(Rank::new(3), 10..13).and_recv(Rank::new(3), 13..15, Combine::Replace)];
        assert_eq!(leaders.translate(plan, 10), expected);
        assert_eq!(leaders.translate(dissemination(leaders.host, leaders.hosts), 0).len(), 1);
    }

    #[test]
    fn the_ranks_of_many_hosts_exchange_with_a_few_leaders_each() {
        let hosts: Vec<Vec<Rank>> =
            (0..512).map(|host| (8 * host..8 * host + 8).map(Rank::new).collect()).collect();
        let hierarchy = Hierarchy::new(&hosts, Rank::new(4091)).unwrap();
        let (stripe, owners) = hierarchy.owned(hierarchy.most_stripes()).unwrap();
        assert_eq!((stripe, owners.host, owners.hosts.get()), (3, Rank::new(511), 512));
        assert!(all(owners).iter().map(|rank| rank.get()).eq((0..512).map(|host| 8 * host + 3)));
        // The distances 1, 2, 4, .. around the ring of the hosts.
        let plan = owners.translate(dissemination(owners.host, owners.hosts), 0);
        let to = plan.iter().filter_map(|step| step.send.as_ref()).map(|send| send.to.get());
        assert!(to.eq((0..9).map(|round| 8 * ((511 + (1u32 << round)) % 512) + 3)));
        // What is asked once for each root.
        for root in (0..4096).map(Rank::new) {
            let leaders = hierarchy.leaders(root);
            assert_eq!(leaders.of(hierarchy.host_of(root)), root);
            assert_eq!(leaders.of(Rank::new(511)).get(), if root.get() < 4088 { 4088 } else { root.get() });
        }
    }

    proptest! {
        #[test]
        fn leaders_are_those_that_a_search_finds(
            host_of in prop::collection::vec(0usize..5, 2..20),
            (rank, root, stripes) in (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1usize..4),
        ) {
            let mut hosts = vec![Vec::new(); 5];
            host_of.iter().enumerate().for_each(|(rank, host)| hosts[*host].push(Rank::new(rank as u32)));
            hosts.retain(|ranks| !ranks.is_empty());
            let rank = Rank::new(rank.index(host_of.len()) as u32);
            let root = Rank::new(root.index(host_of.len()) as u32);
            let shares = hosts.len() > 1 && hosts.iter().any(|ranks| ranks.len() > 1);
            let hierarchy = Hierarchy::new(&hosts, rank);
            prop_assert_eq!(hierarchy.is_some(), shares);
            let Some(hierarchy) = hierarchy else { return Ok(()) };
            let least = hosts.iter().map(Vec::len).min().unwrap();
            prop_assert_eq!(hierarchy.most_stripes(), least);
            let find = |rank: Rank| hosts.iter().position(|ranks| ranks.contains(&rank)).unwrap();
            prop_assert_eq!(hierarchy.host_of(root).index(), find(root));
            let leader = |ranks: &Vec<Rank>| if ranks.contains(&root) { root } else { ranks[0] };
            let leaders = hierarchy.leaders(root);
            prop_assert_eq!(leaders.host.index(), find(rank));
            prop_assert_eq!(all(leaders), hosts.iter().map(leader).collect::<Vec<_>>());
            let place = hosts[find(rank)].iter().position(|member| *member == rank).unwrap();
            let stripes = stripes.min(least);
            let owned = hierarchy.owned(stripes).map(|(stripe, leaders)| (stripe, all(leaders)));
            let expected = || (place, hosts.iter().map(|ranks| ranks[place]).collect::<Vec<_>>());
            prop_assert_eq!(owned, (place < stripes).then(expected));
            for host in hierarchy.hosts().ranks() {
                prop_assert_eq!(hierarchy.ranks_of(host), &hosts[host.index()][..]);
            }
        }
    }
}
