//! Which rank is on which host, and how ranks on other hosts reach this one.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::interfaces::{is_every_hosts, is_own, outward};
use crate::rank::Rank;

/// The host of each rank, by rank.
pub(super) struct Hosts(pub Vec<Host>);

/// A rank's host, and the address at which the rank found the store.
pub(super) struct Host {
    /// What identifies it; its name does not.
    pub id: Arc<str>,
    pub store: Option<IpAddr>,
}

/// The hosts of many ranks, as rank 0 writes them for all: each host once.
#[derive(Serialize, Deserialize)]
struct Written {
    hosts: Vec<(String, Option<IpAddr>)>,
    /// The index of each rank's host, by rank.
    of: Vec<u32>,
}

impl Hosts {
    /// As rank 0 writes them.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut written = Written { hosts: Vec::new(), of: Vec::with_capacity(self.0.len()) };
        let mut known = HashMap::new();
        for Host { id, store } in &self.0 {
            let next = written.hosts.len() as u32;
            let index = *known.entry((id, store)).or_insert(next);
            if index == next {
                written.hosts.push((id.to_string(), *store));
            }
            written.of.push(index);
        }
        postcard::to_stdvec(&written).map_err(|error| malformed().with_source(error))
    }

    /// Reads what rank 0 has written of so many ranks.
    pub fn from_bytes(bytes: &[u8], ranks: usize) -> Result<Self> {
        let written = postcard::from_bytes(bytes).map_err(|error| malformed().with_source(error));
        let Written { hosts, of } = written?;
        let hosts: Vec<(Arc<str>, Option<IpAddr>)> =
            hosts.into_iter().map(|(id, store)| (id.into(), store)).collect();
        let host = |index: u32| {
            let (id, store) = hosts.get(usize::try_from(index).ok()?)?;
            Some(Host { id: id.clone(), store: *store })
        };
        let all: Option<Vec<Host>> = of.into_iter().map(host).collect();
        all.filter(|all| all.len() == ranks).map(Self).ok_or_else(malformed)
    }

    /// A rank's local rank, and the number of ranks on its host.
    pub fn local(&self, rank: Rank) -> (u32, u32) {
        let Some(mine) = self.0.get(rank.index()) else { return (0, 1) };
        let neighbours = |hosts: &[Host]| hosts.iter().filter(|host| host.id == mine.id).count() as u32;
        (neighbours(&self.0[..rank.index()]), neighbours(&self.0))
    }

    /// The address at which the other ranks reach `rank`, this one, which reaches the store from `interface`.
    pub fn reachable(&self, rank: Rank, interface: IpAddr) -> Result<IpAddr> {
        match self.choose(rank, interface, is_own) {
            Some(address) => Ok(address),
            None => outward(None, Vec::new()),
        }
    }

    /// The address of `interface`, which routes to the store, unless it is the loopback and there are other hosts: many
    /// hosts resolve their own name to it. Then the store is on this host, and ranks on other hosts know at which
    /// address they reach it. None if none of them has found the store at an address that `is_own`, for example behind
    /// a tunnel or a virtual address.
    fn choose(&self, rank: Rank, interface: IpAddr, is_own: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
        let one_host = self.0.windows(2).all(|pair| pair[0].id == pair[1].id);
        if one_host || !is_every_hosts(interface) {
            return Some(interface);
        }
        let own = self.0.get(rank.index()).map(|host| &host.id);
        let elsewhere = self.0.iter().filter(|host| Some(&host.id) != own);
        elsewhere.filter_map(|host| host.store).find(|address| !is_every_hosts(*address) && is_own(*address))
    }
}

fn malformed() -> Error {
    Error::malformed("the store holds a malformed list of the ranks' hosts")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: &str = "127.0.1.1";

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Each rank's host, and where it found the store.
    fn hosts(ranks: &[(&str, &str)]) -> Hosts {
        let host = |(id, store): &(&str, &str)| Host { id: (*id).into(), store: store.parse().ok() };
        Hosts(ranks.iter().map(host).collect())
    }

    fn choose(hosts: &Hosts, interface: &str) -> Option<IpAddr> {
        hosts.choose(Rank::MAIN, address(interface), |own| own == address("10.0.0.5"))
    }

    #[test]
    fn neighbours_are_counted_host_by_host() {
        let hosts = hosts(&[("a", ""), ("b", ""), ("a", ""), ("b", ""), ("b", "")]);
        let locals: Vec<(u32, u32)> = (0..5).map(|rank| hosts.local(Rank::new(rank))).collect();
        assert_eq!(locals, [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]);
    }

    #[test]
    fn what_rank_0_writes_of_many_ranks_is_short_and_read_as_it_was() {
        let ranks: Vec<(String, &str)> =
            (0..1000).map(|rank| (format!("host-{}", rank / 8), ["10.0.0.5", "-"][rank % 2])).collect();
        let ranks: Vec<(&str, &str)> = ranks.iter().map(|(id, store)| (id.as_str(), *store)).collect();
        let written = hosts(&ranks).to_bytes().unwrap();
        assert!(written.len() < 10_000, "{}", written.len());
        let read = Hosts::from_bytes(&written, 1000).unwrap();
        let same = |(read, (id, store)): (&Host, &(&str, &str))| {
            *read.id == **id && read.store == store.parse().ok()
        };
        assert!(read.0.len() == 1000 && read.0.iter().zip(&ranks).all(same));
        assert!(Hosts::from_bytes(&written, 999).is_err() && Hosts::from_bytes(b"hosts", 5).is_err());
        let beyond = postcard::to_stdvec(&Written { hosts: Vec::new(), of: vec![0] }).unwrap();
        assert!(Hosts::from_bytes(&beyond, 1).is_err());
    }

    #[test]
    fn peers_get_the_address_that_routes_to_the_store() {
        // The interface from which the store was reached, whatever the default route is.
        let two = hosts(&[("a", "10.0.0.5"), ("b", "10.0.0.5")]);
        assert_eq!(choose(&two, "192.168.7.2"), Some(address("192.168.7.2")));
        let one = hosts(&[("a", LOOPBACK), ("a", LOOPBACK)]);
        assert_eq!(choose(&one, LOOPBACK), Some(address(LOOPBACK)));
    }

    #[test]
    fn who_finds_the_store_at_home_is_reached_where_others_find_it() {
        let named = hosts(&[("a", LOOPBACK), ("a", "10.0.0.9"), ("b", "10.0.0.5")]);
        assert_eq!(choose(&named, LOOPBACK), Some(address("10.0.0.5")));
        // Through a tunnel, or at an address that stands for several hosts.
        let tunnelled = hosts(&[("a", LOOPBACK), ("b", "127.0.0.1"), ("c", "10.96.0.1")]);
        assert_eq!(choose(&tunnelled, LOOPBACK), None);
        assert_eq!(choose(&hosts(&[("a", "-"), ("b", "-")]), "127.0.0.1"), None);
    }
}
