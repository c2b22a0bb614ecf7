//! Interfaces and addresses, and the one that the ranks would use.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use phalanx::Deadline;
use phalanx::interfaces::{InterfaceAddress, OUTSIDE, addresses, is_bridge, is_every_hosts};
use phalanx::rendezvous::interface_named;
use phalanx::store::resolve;

use super::finding::Report;

/// How long the look-up of the store's name may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Checks the interfaces. Ranks use the one that the user names, else the one that leads to `store`. If that is not known, it is the one
/// that leads to where they meet, or to other machines.
pub(super) fn look(report: &mut Report, store: Option<&str>, meeting: Option<&str>) {
    let listed = addresses();
    report.note("addresses", shown(&listed));
    let (leading, why) = match store {
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
        None => match meeting.and_then(|meeting| Some((way_to_meeting(meeting)?, meeting))) {
            Some((way, meeting)) => (Some(way), format!("it leads to the store at {meeting}")),
            None => {
                let targets = OUTSIDE.map(|address| SocketAddr::new(address, 9));
                (way_to(targets.to_vec()), "it leads to other machines".to_owned())
            }
        },
    };
    // Ranks that meet at the loopback are all on this host, and the name has no effect.
    let named = if leading.is_some_and(is_every_hosts) { Ok(None) } else { interface_named() };
    let chosen = match named {
        Ok(named) => named
            .map(|named| (named, "GLOO_SOCKET_IFNAME names it".to_owned()))
            .or_else(|| leading.map(|leading| (leading, why))),
        Err(error) => {
            return report.failed("interface", &error, "correct GLOO_SOCKET_IFNAME, or unset it");
        }
    };
    let Some((used, why)) = chosen else {
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
    let mut own = listed.iter().flatten();
    let interface = own.find(|own| own.address == used).map_or("?", |own| &own.interface);
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
            "a bridge of containers does not lead to other machines: set MASTER_ADDR to an address on the network, or GLOO_SOCKET_IFNAME to \
             an interface that leads there",
        );
    } else {
        report.good("interface", text);
    }
}

/// These addresses, without those of IPv6 that hold on one link only; or that there are none, or that the kernel does not list them.
fn shown(listed: &io::Result<Vec<InterfaceAddress>>) -> String {
    let own = match listed {
        Ok(own) => own,
        Err(error) => return format!("not known: the kernel does not list them ({error})"),
    };
    let of_link =
        |own: &&InterfaceAddress| matches!(own.address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let shown: Vec<String> = own.iter().filter(|own| !of_link(own)).map(ToString::to_string).collect();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
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

/// The own address from which packets to the store of rank 0 go, if its name has an address by now. Not the loopback, to which many hosts
/// map their own name: the other ranks reach this host at another address then.
fn way_to_meeting(store: &str) -> Option<IpAddr> {
    let targets = resolve(store, Deadline::after(RESOLVE_TIMEOUT)).ok()?;
    way_to(targets).filter(|way| !is_every_hosts(*way))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_not_told_are_not_none() {
        let of = |interface: &str, address: &str| InterfaceAddress {
            interface: interface.to_owned(),
            address: address.parse().unwrap(),
        };
        let told = vec![of("lo", "127.0.0.1"), of("eth0", "fe80::1"), of("eth0", "2001:db8::5")];
        assert_eq!(shown(&Ok(told)), "127.0.0.1 (lo), 2001:db8::5 (eth0)");
        assert_eq!(shown(&Ok(Vec::new())), "none");
        let untold = shown(&Err(io::ErrorKind::PermissionDenied.into()));
        assert!(untold.starts_with("not known: the kernel does not list them ("), "{untold}");
    }

    #[test]
    fn the_way_to_oneself_is_the_loopback() {
        assert_eq!(way_to(vec!["127.0.0.1:9".parse().unwrap()]), Some(Ipv4Addr::LOCALHOST.into()));
    }

    #[test]
    fn a_store_of_rank_0_at_the_loopback_names_no_interface() {
        assert_eq!(way_to_meeting("127.0.1.1:9"), None);
        assert_eq!(way_to_meeting("no port"), None);
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
