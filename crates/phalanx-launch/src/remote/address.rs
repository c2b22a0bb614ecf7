//! Finds the address at which the other hosts reach node 0, or this machine: pure.
//!
//! A host has many addresses, and most cannot be reached from elsewhere: those of containers, of a second network,
//! 127.0.1.1 under its own name. The only address of a host that is known to be reachable from another host is that of
//! the ssh connection.

use std::net::IpAddr;

use super::protocol::Route;

/// The known facts of a node.
#[derive(Clone, Debug)]
pub(super) struct Known<'a> {
    /// Its name for ssh.
    pub(super) name: &'a str,
    /// Whether it is this machine.
    pub(super) is_here: bool,
    pub(super) route: Option<Route>,
}

/// The address at which the nodes reach node 0, the first of `nodes`. `is_ours` tells whether an address is this
/// machine's.
pub(super) fn of_node_0(nodes: &[Known<'_>], is_ours: impl Fn(IpAddr) -> bool) -> String {
    if nodes.iter().all(|node| node.is_here) {
        return "127.0.0.1".to_owned();
    }
    let Some(first) = nodes.first() else { return String::new() };
    let address = if first.is_here {
        seen_by_others(nodes, is_ours)
    } else {
        // The address at which it sees our connection arrive, which is its own also behind a router. A dual-stack server
        // shows an IPv4 address as an IPv6 address.
        first.route.map(|route| route.to.to_canonical()).filter(|address| is_usable(*address))
    };
    address.map_or_else(|| first.name.to_owned(), |address| address.to_string())
}

/// The address of this machine as the other `nodes` see it, unless that is a router's.
pub(super) fn seen_by_others(nodes: &[Known<'_>], is_ours: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
    let others = nodes.iter().filter(|node| !node.is_here);
    let mut seen = others.filter_map(|node| node.route.map(|route| route.from.to_canonical()));
    seen.find(|address| is_usable(*address) && is_ours(*address))
}

/// What the user should know where the other `nodes` see this machine only as a router or a jump host, behind which they may not reach
/// the store that it serves; `instead` says what helps besides.
pub(super) fn warning_of_router(
    nodes: &[Known<'_>],
    is_ours: impl Fn(IpAddr) -> bool,
    instead: &str,
) -> Option<String> {
    if seen_by_others(nodes, &is_ours).is_some() {
        return None;
    }
    let others = nodes.iter().filter(|node| !node.is_here);
    let mut seen = others.filter_map(|node| Some((node.name, node.route?.from.to_canonical())));
    let (name, address) = seen.find(|(_, address)| is_usable(*address))?;
    Some(format!(
        "{name} sees this machine come from {address}, which is none of its addresses but a router's or a jump host's: the hosts may not \
         reach the store that this machine serves. --master-addr names an address that they reach, or {instead}"
    ))
}

/// Whether other hosts reach the same machine by it.
fn is_usable(address: IpAddr) -> bool {
    let is_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_loopback() && !address.is_unspecified() && !is_local
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node<'a>(name: &'a str, is_here: bool, route: Option<(&str, &str)>) -> Known<'a> {
        let route = route.map(|(from, to)| Route { from: from.parse().unwrap(), to: to.parse().unwrap() });
        Known { name, is_here, route }
    }

    #[test]
    fn node_0_is_found_where_ssh_has_found_it() {
        let ours = |address: IpAddr| address.to_string() == "10.0.0.1";
        let cases = [
            (vec![node("localhost", true, None), node("127.0.0.1", true, None)], "127.0.0.1"),
            (
                vec![node("far", false, Some(("10.0.0.1", "::ffff:10.0.0.2"))), node("b", false, None)],
                "10.0.0.2",
            ),
            (vec![node("here", true, None), node("far", false, Some(("10.0.0.1", "10.0.0.2")))], "10.0.0.1"),
            // Behind a router, nobody knows better than the names.
            (vec![node("here", true, None), node("far", false, Some(("192.0.2.9", "10.0.0.2")))], "here"),
            (vec![node("far", false, Some(("127.0.0.1", "127.0.0.1"))), node("here", true, None)], "far"),
            (vec![node("far", false, Some(("fe80::1", "fe80::2"))), node("b", false, None)], "far"),
            (vec![node("far", false, None), node("here", true, None)], "far"),
        ];
        for (nodes, expected) in cases {
            assert_eq!(of_node_0(&nodes, ours), expected, "{nodes:?}");
        }
    }

    #[test]
    fn a_router_before_this_machine_is_named() {
        let ours = |address: IpAddr| address.to_string() == "10.0.0.1";
        let warning = |from: Option<&str>| {
            let route = from.map(|from| (from, "10.0.0.2"));
            warning_of_router(&[node("here", true, None), node("far", false, route)], ours, "do so")
        };
        let said = warning(Some("192.0.2.9")).unwrap();
        assert!(
            said.starts_with("far sees") && said.contains("192.0.2.9") && said.ends_with("or do so"),
            "{said}"
        );
        for silent in [None, Some("10.0.0.1"), Some("::ffff:10.0.0.1"), Some("127.0.0.1"), Some("fe80::1")] {
            assert_eq!(warning(silent), None, "{silent:?}");
        }
    }
}
