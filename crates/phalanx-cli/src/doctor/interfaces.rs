//! Interfaces and addresses, and the one that the ranks would use.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use phalanx::Deadline;
use phalanx::store::resolve;

use super::finding::Report;

/// How long the look-up of the store's name may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Addresses reserved for documentation: no packet goes there, but the kernel tells which route it would take.
const OUTSIDE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// Checks the interfaces; ranks use the one that leads to `store`, or to other machines if no store is known.
pub(super) fn look(report: &mut Report, store: Option<&str>) {
    let [trie, routes, inet6] = ["/proc/net/fib_trie", "/proc/net/route", "/proc/net/if_inet6"]
        .map(|path| fs::read_to_string(path).ok());
    let is_told = trie.is_some() || inet6.is_some();
    let mut addresses = v4(&trie.unwrap_or_default(), &routes.unwrap_or_default());
    addresses.extend(v6(&inet6.unwrap_or_default()));
    report.note("addresses", shown(&addresses, is_told));
    let (used, why) = match store {
        Some(store) => {
            let targets = match resolve(store, Deadline::after(RESOLVE_TIMEOUT)) {
                Ok(targets) => targets,
                Err(error) => {
                    return report.bad(
                        "interface",
                        format!("no address of {store} is known: {error}"),
                        "is the host's name right, and does `getent hosts` know it here?",
                    );
                }
            };
            (way_to(targets), format!("it leads to the store at {store}"))
        }
        None => {
            let targets = OUTSIDE.map(|address| SocketAddr::new(address, 9));
            (way_to(targets.to_vec()), "it leads to other machines".to_owned())
        }
    };
    let Some(used) = used else {
        return match store {
            Some(store) => {
                report.bad("interface", format!("none leads to {store}"), "is there a route to its address?")
            }
            None => report.advise(
                "interface",
                "none leads to other machines",
                "for one machine the loopback will do; for several, set up a route",
            ),
        };
    };
    let interface = addresses.iter().find(|(address, _)| *address == used).map_or("?", |(_, name)| name);
    let text = format!("{used} ({interface}): {why}");
    if used.is_loopback() {
        report.advise(
            "interface",
            text,
            "other machines cannot reach it: give the store an address that they can",
        );
    } else if is_bridge(interface) {
        report.advise(
            "interface",
            text,
            "a bridge of containers does not lead to other machines: set MASTER_ADDR to an address on the network",
        );
    } else {
        report.good("interface", text);
    }
}

/// These addresses; or that there are none, or that the kernel's tables are not there.
fn shown(addresses: &[(IpAddr, String)], is_told: bool) -> String {
    let shown: Vec<String> =
        addresses.iter().map(|(address, interface)| format!("{address} ({interface})")).collect();
    match (shown.is_empty(), is_told) {
        (false, _) => shown.join(", "),
        (true, true) => "none".to_owned(),
        (true, false) => "not known: /proc/net does not say".to_owned(),
    }
}

/// Whether processes of this host can meet at the loopback.
pub(super) fn look_at_loopback(report: &mut Report) -> bool {
    let has_loopback = !phalanx::loopback_is_down();
    if !has_loopback {
        report.bad(
            "loopback",
            "it is down: processes of this host cannot meet, and none are timed",
            "`ip link set lo up` in this network namespace, or start the container with a network",
        );
    }
    has_loopback
}

/// The own address from which packets to the first of `targets` to which a route leads would go. Ranks try IPv4 first.
fn way_to(mut targets: Vec<SocketAddr>) -> Option<IpAddr> {
    targets.sort_by_key(SocketAddr::is_ipv6);
    targets.into_iter().find_map(|target| {
        let own: IpAddr =
            if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((own, 0)).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}

/// Whether it is one of the interfaces that container engines make.
fn is_bridge(interface: &str) -> bool {
    ["docker", "br-", "virbr", "cni", "lxcbr", "podman"].iter().any(|prefix| interface.starts_with(prefix))
}

/// The host's own addresses in the kernel's tables of routes, with the interface of their network.
fn v4(fib_trie: &str, routes: &str) -> Vec<(IpAddr, String)> {
    let mut found: Vec<(IpAddr, String)> = Vec::new();
    let mut last = None;
    for line in fib_trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = last
            && found.iter().all(|(known, _)| *known != address)
        {
            found.push((address.into(), v4_interface(address, routes)));
        }
    }
    found
}

/// The interface of the narrowest network around `address` in /proc/net/route.
fn v4_interface(address: Ipv4Addr, routes: &str) -> String {
    if address.is_loopback() {
        return "lo".to_owned();
    }
    // Numbers are in the host's byte order, addresses in the network's.
    let number = |text: &str| {
        u32::from_str_radix(text, 16).ok().map(|number| u32::from_be_bytes(number.to_ne_bytes()))
    };
    let network = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (target, mask) = (number(fields.get(1)?)?, number(fields.get(7)?)?);
        (mask != 0 && u32::from(address) & mask == target).then(|| (mask, fields[0].to_owned()))
    };
    routes.lines().skip(1).filter_map(network).max().map_or_else(|| "?".to_owned(), |(_, name)| name)
}

/// The addresses of /proc/net/if_inet6, without those that hold on one link only.
fn v6(text: &str) -> Vec<(IpAddr, String)> {
    let address = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let address = Ipv6Addr::from(u128::from_str_radix(fields.first()?, 16).ok()?);
        (!address.is_unicast_link_local()).then_some((address.into(), (*fields.get(5)?).to_owned()))
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn the_kernels_tables_are_read() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.0\n        /24 link UNICAST\n     |-- 10.0.0.5\n        \
                    /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host \
                    LOCAL\nLocal:\n     |-- 10.0.0.5\n        /32 host LOCAL\n";
        let routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
                      eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\neth1\t0000000A\t0\t1\t0\t0\t0\t0000FFFF\n\
                      eth0\t0000000A\t0\t1\t0\t0\t0\t00FFFFFF\n";
        let expected = [("10.0.0.5", "eth0"), ("127.0.0.1", "lo")];
        assert_eq!(
            v4(trie, routes),
            expected.map(|(address, name)| (address.parse().unwrap(), name.to_owned()))
        );
        let inet6 = "00000000000000000000000000000001 01 80 10 80       lo\n\
                     fe800000000000000000000000000001 02 40 20 80     eth0\nx\n";
        assert_eq!(v6(inet6), [(IpAddr::from(Ipv6Addr::LOCALHOST), "lo".to_owned())]);
        assert_eq!(v4("", ""), []);
    }

    #[test]
    fn addresses_that_are_not_told_are_not_none() {
        let one = [(IpAddr::from(Ipv4Addr::LOCALHOST), "lo".to_owned())];
        assert_eq!(shown(&one, true), "127.0.0.1 (lo)");
        assert_eq!((&*shown(&[], true), &*shown(&[], false)), ("none", "not known: /proc/net does not say"));
    }

    #[test]
    fn bridges_of_containers_are_known() {
        assert!(is_bridge("docker0") && is_bridge("br-1f2e") && !is_bridge("eth0") && !is_bridge("bond0"));
    }

    #[test]
    fn the_way_to_oneself_is_the_loopback() {
        assert_eq!(way_to(vec!["127.0.0.1:9".parse().unwrap()]), Some(Ipv4Addr::LOCALHOST.into()));
    }

    #[test]
    fn an_address_to_which_nothing_leads_is_passed_over() {
        // The kernel refuses broadcasts of a socket that has not asked for them.
        let targets: [SocketAddr; 2] =
            ["255.255.255.255:9", "127.0.0.1:9"].map(|target| target.parse().unwrap());
        assert_eq!(way_to(targets.to_vec()), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(way_to(targets[..1].to_vec()), None);
    }
}
