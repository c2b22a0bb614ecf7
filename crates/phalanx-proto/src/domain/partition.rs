//! Which ranks share memory.
//!
//! All ranks compute the same domains, from the entries in the store.

use crate::rank::Rank;

/// The domains of all ranks: each rank is in exactly one. The same on every rank, in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    domains: Vec<Vec<Rank>>,
    /// The index of each rank's domain.
    domain_of: Vec<usize>,
}

impl Partition {
    /// Puts each rank into the first domain with whose members, all of them, it can share memory.
    pub fn of(ranks: usize, can_share: impl Fn(usize, usize) -> bool) -> Self {
        let (mut domains, mut domain_of) = (Vec::<Vec<Rank>>::new(), Vec::new());
        for rank in 0..ranks {
            let fits = |domain: &Vec<Rank>| domain.iter().all(|member| can_share(member.index(), rank));
            let domain = domains.iter().position(fits).unwrap_or(domains.len());
            if domain == domains.len() {
                domains.push(Vec::new());
            }
            domains[domain].push(Rank::new(rank as u32));
            domain_of.push(domain);
        }
        Self { domains, domain_of }
    }

    /// Each of `ranks` in a domain of its own.
    pub fn alone(ranks: usize) -> Self {
        Self::of(ranks, |_, _| false)
    }

    /// Whether all ranks are in one domain.
    pub fn is_one(&self) -> bool {
        self.domains.len() == 1
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
    use super::*;

    fn ranks(partition: &Partition) -> Vec<Vec<u32>> {
        partition.domains().iter().map(|domain| domain.iter().map(|rank| rank.get()).collect()).collect()
    }

    #[test]
    fn ranks_of_one_host_are_one_domain() {
        let partition = Partition::of(5, |one, other| one % 2 == other % 2);
        assert_eq!(ranks(&partition), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(partition.domain_of(Rank::new(3)), [Rank::new(1), Rank::new(3)]);
        assert!(!partition.is_one() && Partition::of(4, |_, _| true).is_one());
    }

    #[test]
    fn all_members_can_share_with_all() {
        // 1 and 2 cannot share memory, though both can with 0.
        let partition = Partition::of(3, |one, other| (one.min(other), one.max(other)) != (1, 2));
        assert_eq!(ranks(&partition), [vec![0, 1], vec![2]]);
    }
}
