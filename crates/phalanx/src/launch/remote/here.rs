//! Which host is this machine.

use std::net::{IpAddr, TcpListener, ToSocketAddrs};

use crate::host;

/// Is it an address of this machine?
pub(super) fn is_ours(address: IpAddr) -> bool {
    TcpListener::bind((address, 0)).is_ok()
}

/// Does `name` mean this machine?
pub(super) fn is_here(name: &str) -> bool {
    if name == "localhost" || name == host::name() {
        return true;
    }
    if let Ok(address) = name.parse::<IpAddr>() {
        return is_ours(address);
    }
    // A name with a domain counts only if it resolves to this machine: other names may begin with the same label.
    let host = |name: &str| name.split('.').next().map(str::to_owned);
    host(name) == host(&host::name())
        && (name, 0).to_socket_addrs().is_ok_and(|mut found| found.any(|address| is_ours(address.ip())))
}
