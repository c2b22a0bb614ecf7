//! Which rank is on which host, and how ranks on other hosts reach this one.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use crate::error::{Error, Result};
use crate::rank::Rank;

/// The name of each rank's host, by rank.
pub(super) struct Hosts(pub Vec<String>);

impl Hosts {
    /// A rank's place among the ranks of its host, and their number.
    pub fn local(&self, rank: Rank) -> (u32, u32) {
        let Some(mine) = self.0.get(rank.index()) else { return (0, 1) };
        let neighbours = |hosts: &[String]| hosts.iter().filter(|host| *host == mine).count() as u32;
        (neighbours(&self.0[..rank.index()]), neighbours(&self.0))
    }

    /// `interface`, unless it is the loopback and there are other hosts: many a host finds its own name there.
    pub fn reachable(&self, interface: IpAddr) -> Result<IpAddr> {
        let one_host = self.0.windows(2).all(|pair| pair[0] == pair[1]);
        if one_host || !interface.is_loopback() { Ok(interface) } else { outward() }
    }
}

/// The address of this host from which packets leave it. Nothing is sent: the address asked for is for documents.
fn outward() -> Result<IpAddr> {
    let look = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    };
    let address = look().map_err(|error| {
        Error::io("cannot find the address at which other hosts reach this one", error)
            .with_remedy("meet at tcp://host:port instead")
    })?;
    Ok(address.ip())
}
