//! Which ranks share memory.
//!
//! All ranks compute the same domains, from what all have told. First the ranks of one host are together, as far as a
//! control block has room for them; then those are parted that cannot map each other's memory. So only ranks of one host
//! are compared with each other: in a world of n ranks, the work of each rank grows with n, and not with its square.

use std::collections::BTreeMap;

use crate::rank::Rank;

/// The domains of all ranks: each rank is in exactly one. The same on every rank, in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    domains: Vec<Vec<Rank>>,
    /// The index of each rank's domain.
    domain_of: Vec<usize>,
}

impl Partition {
    /// Each of `ranks` in a domain of its own.
    pub fn alone(ranks: usize) -> Self {
        Self::of((0..ranks as u32).map(|rank| vec![Rank::new(rank)]).collect())
    }

    /// The ranks with equal `hosts`, given by rank, in one domain; a rank without a host alone. If a host has more than `most` ranks, they
    /// are in as few domains as possible, which have as many ranks each, up to one, and ranks that follow each other.
    pub fn by_host<H: Ord>(hosts: impl IntoIterator<Item = Option<H>>, most: usize) -> Self {
        let (mut known, mut together) = (BTreeMap::new(), Vec::<Vec<Rank>>::new());
        for (rank, host) in hosts.into_iter().enumerate() {
            let index = match host {
                Some(host) => *known.entry(host).or_insert(together.len()),
                None => together.len(),
            };
            if index == together.len() {
                together.push(Vec::new());
            }
            together[index].push(Rank::new(rank as u32));
        }
        let parts = |ranks: Vec<Rank>| {
            let (all, count) = (ranks.len(), ranks.len().div_ceil(most.max(1)));
            (0..count).map(move |part| ranks[all * part / count..all * (part + 1) / count].to_vec())
        };
        Self::of(together.into_iter().flat_map(parts).collect())
    }

    /// These domains, with each rank in the first part of its domain with whose members, all of them, it can share memory.
    /// `can_share` gets the members of a domain, and the indices of two of them, the lower one first.
    pub fn refine(&self, can_share: impl Fn(&[Rank], usize, usize) -> bool) -> Self {
        let mut domains = Vec::new();
        for members in &self.domains {
            let mut parts: Vec<Vec<usize>> = Vec::new();
            for index in 0..members.len() {
                let fits = |part: &Vec<usize>| part.iter().all(|other| can_share(members, *other, index));
                match parts.iter().position(fits) {
                    Some(part) => parts[part].push(index),
                    None => parts.push(vec![index]),
                }
            }
            domains.extend(
                parts
                    .into_iter()
                    .map(|part| part.into_iter().map(|index| members[index]).collect::<Vec<Rank>>()),
            );
        }
        Self::of(domains)
    }

    /// The domains of these `members`, when they form a group of their own and get new ranks, in the order of the list.
    pub fn part(&self, members: &[Rank]) -> Self {
        Self::by_host(members.iter().map(|member| self.domain_of.get(member.index())), usize::MAX)
    }

    /// These domains, of which each rank is in exactly one.
    fn of(mut domains: Vec<Vec<Rank>>) -> Self {
        domains.sort_unstable_by_key(|members| members.first().copied());
        let mut domain_of = vec![0; domains.iter().map(Vec::len).sum()];
        for (index, members) in domains.iter().enumerate() {
            members.iter().for_each(|member| domain_of[member.index()] = index);
        }
        Self { domains, domain_of }
    }

    /// Whether all ranks are in one domain.
    pub fn is_one(&self) -> bool {
        self.domains.len() == 1
    }

    /// Whether each rank is alone.
    pub fn is_alone(&self) -> bool {
        self.domains.len() == self.domain_of.len()
    }

    /// All domains, in the order of their first ranks.
    pub fn domains(&self) -> &[Vec<Rank>] {
        &self.domains
    }

    /// The members of `rank`'s domain, in order.
    pub fn domain_of(&self, rank: Rank) -> &[Rank] {
        self.domain_of.get(rank.index()).map_or(&[], |domain| &self.domains[*domain])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::world_size::MAX_WORLD_SIZE;

    fn ranks(partition: &Partition) -> Vec<Vec<u32>> {
        partition.domains().iter().map(|domain| domain.iter().map(|rank| rank.get()).collect()).collect()
    }

    /// What is the same in a partition of any ranks.
    fn check(partition: &Partition, world: usize) {
        let mut all: Vec<usize> = partition.domains().iter().flatten().map(|rank| rank.index()).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..world), "each rank is in one domain");
        let firsts: Vec<Rank> = partition.domains().iter().map(|domain| domain[0]).collect();
        assert!(firsts.is_sorted() && partition.domains().iter().all(|domain| domain.is_sorted()));
        for domain in partition.domains() {
            assert!(domain.iter().all(|member| partition.domain_of(*member) == &domain[..]));
        }
    }

    /// Each rank in the first domain with whose members it can share memory, of all domains. It compares each rank with all others.
    fn compared_with_all(world: usize, can_share: impl Fn(usize, usize) -> bool) -> Partition {
        let mut domains = Vec::<Vec<Rank>>::new();
        for rank in 0..world {
            let fits = |domain: &Vec<Rank>| domain.iter().all(|member| can_share(member.index(), rank));
            let domain = domains.iter().position(fits).unwrap_or(domains.len());
            if domain == domains.len() {
                domains.push(Vec::new());
            }
            domains[domain].push(Rank::new(rank as u32));
        }
        Partition::of(domains)
    }

    #[test]
    fn ranks_of_one_host_are_one_domain() {
        let partition = Partition::by_host((0..5).map(|rank| Some(rank % 2)), 256);
        assert_eq!(ranks(&partition), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(partition.domain_of(Rank::new(3)), [Rank::new(1), Rank::new(3)]);
        assert!(!partition.is_one() && !partition.is_alone());
        assert!(Partition::by_host([Some("a"); 4], 256).is_one());
        let partition = Partition::by_host([Some("a"), None, Some("a"), None], 256);
        assert_eq!(ranks(&partition), [vec![0, 2], vec![1], vec![3]]);
    }

    #[test]
    fn all_members_can_share_with_all() {
        // 1 and 2 cannot share memory, though both can with 0.
        let host = Partition::by_host([Some("a"); 3], 256);
        assert_eq!(ranks(&host.refine(|_, one, other| (one, other) != (1, 2))), [vec![0, 1], vec![2]]);
        // A part of the first host begins behind the second host.
        let hosts = Partition::by_host(["a", "b", "a", "b"].map(Some), 256);
        let parted = hosts.refine(|members, _, other| members[other] != Rank::new(2));
        assert_eq!(ranks(&parted), [vec![0], vec![1, 3], vec![2]]);
    }

    #[test]
    fn a_host_with_too_many_ranks_is_divided_evenly_and_the_others_are_not() {
        let partition = Partition::by_host((0..308).map(|rank| Some(rank >= 300)), 256);
        let lengths: Vec<usize> = partition.domains().iter().map(Vec::len).collect();
        assert_eq!(lengths, [150, 150, 8]);
        for (most, ranks) in [(256, 257), (256, 512), (256, 513), (4, 10), (1, 3), (0, 3)] {
            let partition = Partition::by_host(vec![Some(()); ranks], most);
            check(&partition, ranks);
            let lengths = || partition.domains().iter().map(Vec::len);
            assert!(
                lengths().max() <= Some(most.max(1)) && lengths().max() <= lengths().min().map(|min| min + 1)
            );
            assert_eq!(lengths().count(), ranks.div_ceil(most.max(1)));
        }
    }

    #[test]
    fn worlds_of_any_size_are_divided_by_their_hosts() {
        let partition = Partition::by_host((0..4096).map(|rank| Some(rank / 8)), 256);
        check(&partition, 4096);
        assert_eq!(partition.domains().len(), 512);
        assert!(partition.domains().iter().all(|domain| domain.len() == 8));
        assert_eq!(partition.refine(|_, _, _| true), partition);
        // The last host cannot share memory.
        let parted = partition.refine(|members, _, _| members[0] != Rank::new(4088));
        check(&parted, 4096);
        assert_eq!(parted.domains().len(), 511 + 8);

        let most = MAX_WORLD_SIZE as usize;
        let alone = Partition::alone(most);
        check(&alone, most);
        assert!(alone.is_alone());
        let in_turn = Partition::by_host((0..most).map(|rank| Some((rank % 8192).to_string())), 256);
        check(&in_turn, most);
        assert_eq!(in_turn.domains().len(), 8192);
        let one_host = Partition::by_host(vec![Some(()); most], 256).refine(|_, _, _| true);
        check(&one_host, most);
        assert_eq!(one_host.domains().len(), 256);
    }

    #[test]
    fn a_part_of_a_group_has_its_domains_in_the_order_of_its_list() {
        let partition = Partition::by_host((0..4096).map(|rank| Some(rank / 8)), 256);
        let part = partition.part(&[4095, 17, 4088, 16, 3].map(Rank::new));
        assert_eq!(ranks(&part), [vec![0, 2], vec![1, 3], vec![4]]);
        let all: Vec<Rank> = (0..4096).map(Rank::new).collect();
        assert_eq!(partition.part(&all), partition);
    }

    proptest! {
        #[test]
        fn the_domains_are_those_of_a_comparison_of_each_rank_with_all_others(
            hosts in prop::collection::vec(prop::option::weighted(0.9, 0u8..4), 1..24),
            cannot in prop::collection::hash_set((0usize..24, 0usize..24), 0..12),
        ) {
            let maps = |one: usize, other: usize| !cannot.contains(&(one, other));
            let can_share = |one: usize, other: usize| {
                hosts[one].is_some() && hosts[one] == hosts[other] && maps(one, other) && maps(other, one)
            };
            let by_host = Partition::by_host(hosts.iter().copied(), 256);
            let found = by_host.refine(|members, one, other| {
                let (one, other) = (members[one].index(), members[other].index());
                maps(one, other) && maps(other, one)
            });
            check(&found, hosts.len());
            let expected = compared_with_all(hosts.len(), can_share);
            prop_assert_eq!(&found, &expected);

            // A group of every second rank, in turned order.
            let members: Vec<Rank> = (0..hosts.len() as u32).rev().step_by(2).map(Rank::new).collect();
            let shares = |one: usize, other: usize| found.domain_of(members[one]).contains(&members[other]);
            prop_assert_eq!(found.part(&members), compared_with_all(members.len(), shares));
        }
    }
}
