//! Which launcher serves the launchers' store: pure.
//!
//! Where nodes may come and go (`--nnodes MIN:MAX`), a launcher that serves a store may train alone. So two that serve would be two
//! worlds of one job, which both train to the end. A launcher cannot ask the others before it has reached them, so what it knows by
//! itself must be enough for at most one to serve:
//!
//! * An address is one host's, and all launchers are given the same end point. So only the host that has its address serves. Where the
//!   store listens (`--bind`) says nothing about that: each host has an address of its own.
//! * The loopback is every host's. It is a place to meet only if all launchers are on one host. If the number of nodes is fixed, a
//!   launcher on another host finds too few nodes there, and fails. If it is not, the user must say so.
//! * A bridge of a container engine has the same address on every host, and is no place either, unless the number of nodes is fixed.
//! * A name that leads to several hosts, such as that of all pods of a service, is none of theirs.
//! * On one host the first serves, whichever of the host's addresses it takes: see [`Claim`].
//!
//! With a fixed number of nodes a launcher may be told to serve, wherever the end point leads: behind a router it has another address.

use std::io::{ErrorKind, Result as IoResult};
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use crate::cluster::Hosting;
use crate::error::{Error, Result};
use crate::hash::fnv1a;
use crate::interfaces::is_every_hosts;

/// What a launcher knows by itself.
#[derive(Clone, Debug)]
pub(super) struct Facts<'a> {
    pub hosting: Hosting,
    /// The host of the end point, for errors.
    pub host: &'a str,
    /// Its addresses, as they are looked up here.
    pub endpoint: &'a [IpAddr],
    /// The address at which to listen, if one was given.
    pub bind: Option<IpAddr>,
    /// Whether the job needs all of its nodes.
    pub is_fixed: bool,
    /// Whether the user says that all nodes are on this host: others reach it at the loopback.
    pub all_here: bool,
    /// This host's addresses that other hosts may have too: those of inner bridges.
    pub inner: &'a [IpAddr],
}

/// What this launcher does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It serves the store, and listens at this address.
    Serve(IpAddr),
    Connect,
}

/// Where an end point leads, seen from one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// To this host, at this address, which no other host has.
    Here(IpAddr),
    /// To the host of whoever asks, at this address.
    EveryHost(IpAddr),
    Elsewhere,
    /// To this host, at this address, and to others.
    Several(IpAddr),
}

/// Where `endpoint` leads. A host that finds several of its own addresses takes the lowest, in whichever order they come.
fn place(endpoint: &[IpAddr], is_own: impl Fn(IpAddr) -> bool) -> Place {
    let (every, unique): (Vec<IpAddr>, Vec<IpAddr>) =
        endpoint.iter().map(IpAddr::to_canonical).partition(|address| is_every_hosts(*address));
    let (own, others): (Vec<IpAddr>, Vec<IpAddr>) = unique.into_iter().partition(|address| is_own(*address));
    match (own.iter().min(), every.iter().min(), others.is_empty()) {
        (Some(own), _, true) => Place::Here(*own),
        (None, Some(every), true) => Place::EveryHost(*every),
        (None, None, _) => Place::Elsewhere,
        (Some(here), _, false) | (None, Some(here), false) => Place::Several(*here),
    }
}

/// Whether this launcher serves the store. An error where two launchers might, or where what was given contradicts itself.
pub(super) fn who_serves(facts: &Facts<'_>, is_own: impl Fn(IpAddr) -> bool) -> Result<Role> {
    let Facts { hosting, host, endpoint, bind, is_fixed, all_here, inner } = *facts;
    // An address that other hosts may have too is none to meet at, where another will do.
    let is_open = !is_fixed && !all_here;
    let outer: Vec<IpAddr> = endpoint.iter().copied().filter(|address| !inner.contains(address)).collect();
    let endpoint = if is_open && !outer.is_empty() { &outer[..] } else { endpoint };
    let place = || place(endpoint, &is_own);
    match hosting {
        Hosting::Connect => Ok(Role::Connect),
        // All nodes are needed, and the others come to whichever address leads to this one.
        Hosting::Serve if is_fixed => match (bind, place()) {
            (Some(bind), _) => Ok(Role::Serve(bind)),
            (None, Place::Here(own) | Place::EveryHost(own) | Place::Several(own)) => Ok(Role::Serve(own)),
            (None, Place::Elsewhere) => Err(not_here(host, endpoint)),
        },
        Hosting::Serve | Hosting::ByAddress => match place() {
            Place::Here(own) if is_open && inner.contains(&own) => Err(inner_bridge(host, own)),
            Place::Here(own) => match bind {
                Some(bind) if !bind.is_unspecified() && !leads_to(endpoint, bind) => {
                    Err(contradiction(host, bind, own))
                }
                bind => Ok(Role::Serve(bind.unwrap_or(own))),
            },
            Place::EveryHost(every) if is_fixed || all_here => match bind {
                Some(bind) if !bind.is_loopback() || !leads_to(endpoint, bind) => {
                    Err(contradiction(host, bind, every))
                }
                bind => Ok(Role::Serve(bind.unwrap_or(every))),
            },
            Place::EveryHost(every) => Err(every_host(host, every)),
            Place::Elsewhere if hosting == Hosting::ByAddress => Ok(Role::Connect),
            Place::Elsewhere => Err(not_here(host, endpoint)),
            Place::Several(_) => Err(several(host, endpoint)),
        },
    }
}

fn leads_to(endpoint: &[IpAddr], address: IpAddr) -> bool {
    endpoint.iter().any(|endpoint| endpoint.to_canonical() == address.to_canonical())
}

fn listed(addresses: &[IpAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    texts.join(", ")
}

/// The end point as the user wrote it, and what that means here.
fn meaning(host: &str, address: IpAddr) -> String {
    if host == address.to_string() { host.to_owned() } else { format!("{host}, which is {address} here,") }
}

fn contradiction(host: &str, bind: IpAddr, leads_to: IpAddr) -> Error {
    let endpoint = meaning(host, leads_to);
    let (cause, remedy) = if is_every_hosts(leads_to) {
        (
            format!(
                "the end point {endpoint} is every node's own host, so that each would serve a store, at {bind} (--bind, \
                 PHALANX_BIND)"
            ),
            "give every node the name or address of one host as --rdzv-endpoint; if all nodes are on this host, leave out --bind",
        )
    } else {
        (
            format!(
                "the other nodes come to the end point {endpoint} and the store would listen at {bind} (--bind, PHALANX_BIND)"
            ),
            "leave out --bind, or give 0.0.0.0 or an address of the end point",
        )
    };
    refusal(cause, remedy)
}

fn every_host(host: &str, every: IpAddr) -> Error {
    let endpoint = meaning(host, every);
    refusal(
        format!(
            "the end point {endpoint} is every node's own host: with --nnodes MIN:MAX a node on another host would train in a world \
             of its own"
        ),
        "give every node an address of one host that all reach; if all nodes are on this host, say so with --local-addr localhost, \
         or give their exact number with --nnodes N",
    )
}

fn inner_bridge(host: &str, own: IpAddr) -> Error {
    let endpoint = meaning(host, own);
    refusal(
        format!(
            "the end point {endpoint} is the address of a bridge within this host, such as docker0, which other hosts may have too: with \
             --nnodes MIN:MAX a node on another host would train in a world of its own"
        ),
        "give every node an address of one host that all reach; if all nodes are on this host, give their exact number with --nnodes N",
    )
}

fn not_here(host: &str, endpoint: &[IpAddr]) -> Error {
    refusal(
        format!(
            "this node is to serve the launchers' store (--node-rank 0, which it is if none is given, or is_host=true), and {host} is no \
             address of this host: it is {}",
            listed(endpoint)
        ),
        "is this the right host? Each other node has a --node-rank of its own, or all have --rdzv-backend c10d. If it has that address behind a router, give the address at which to listen with --bind, and the exact \
         number of nodes with --nnodes N; with --nnodes MIN:MAX the address must be this host's, or let the store be in etcd",
    )
}

fn several(host: &str, endpoint: &[IpAddr]) -> Error {
    refusal(
        format!(
            "{host} leads to this host and to others ({}): each of them would serve a store",
            listed(endpoint)
        ),
        "give every node the name or address of one host as --rdzv-endpoint",
    )
}

fn refusal(cause: String, remedy: &str) -> Error {
    Error::environment(cause).in_operation("rendezvous of the launchers", None).with_remedy(remedy)
}

/// Shows to other launchers of this host that one of them serves the store at an end point, whichever of the host's addresses it
/// listens at. The kernel lets one process of a network namespace have it, and takes it back when that process ends.
#[derive(Debug)]
pub(super) struct Claim(#[expect(dead_code, reason = "it is held")] UnixListener);

impl Claim {
    /// None if another launcher of this host has it.
    pub(super) fn take(endpoint: &str) -> IoResult<Option<Self>> {
        let name = format!("phalanx/launchers-store/{:016x}", fnv1a(endpoint.bytes()));
        match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Ok(listener) => Ok(Some(Self(listener))),
            Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use proptest::sample::subsequence;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A launcher on a host that has `own`, and the loopback.
    fn role(own: &str, facts: &Facts<'_>) -> Result<Role> {
        who_serves(facts, |address| is_every_hosts(address) || address.to_string() == own)
    }

    fn facts<'a>(hosting: Hosting, host: &'a str, endpoint: &'a [IpAddr]) -> Facts<'a> {
        Facts { hosting, host, endpoint, bind: None, is_fixed: false, all_here: false, inner: &[] }
    }

    #[test]
    fn the_host_with_the_address_serves_wherever_stores_listen() {
        let endpoint = [address("10.0.0.1")];
        let by_address = facts(Hosting::ByAddress, "node0", &endpoint);
        assert_eq!(role("10.0.0.1", &by_address).unwrap(), Role::Serve(endpoint[0]));
        assert_eq!(role("10.0.0.2", &by_address).unwrap(), Role::Connect);
        // A pod template that gives each pod its own address, or all.
        let bind = |text: &str| Facts { bind: Some(address(text)), ..by_address.clone() };
        assert_eq!(role("10.0.0.1", &bind("10.0.0.1")).unwrap(), Role::Serve(endpoint[0]));
        assert_eq!(role("10.0.0.2", &bind("10.0.0.2")).unwrap(), Role::Connect);
        assert_eq!(role("10.0.0.1", &bind("0.0.0.0")).unwrap(), Role::Serve(address("0.0.0.0")));
        assert_eq!(role("10.0.0.2", &bind("0.0.0.0")).unwrap(), Role::Connect);
    }

    /// The error of a launcher on a host with the address 10.0.0.1.
    fn refused(facts: &Facts<'_>, cause: &str, remedy: &str) {
        let error = role("10.0.0.1", facts).unwrap_err();
        assert!(error.to_string().contains(cause) && error.remedy().unwrap().contains(remedy), "{error}");
    }

    #[test]
    fn the_loopback_is_no_place_for_several_hosts() {
        for loopback in ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"] {
            let endpoint = [address(loopback)];
            for hosting in [Hosting::ByAddress, Hosting::Serve] {
                let open = facts(hosting, "localhost", &endpoint);
                refused(&open, "is every node's own host", "--local-addr localhost");
                refused(
                    &Facts { bind: Some(address("10.0.0.1")), ..open.clone() },
                    "every node's own host",
                    "--nnodes N",
                );
                // Where all nodes are needed, or the user says so, they are on one host.
                let here = Role::Serve(address(loopback).to_canonical());
                for stated in
                    [Facts { is_fixed: true, ..open.clone() }, Facts { all_here: true, ..open.clone() }]
                {
                    assert_eq!(role("10.0.0.1", &stated).unwrap(), here);
                }
            }
            let fixed = Facts { is_fixed: true, ..facts(Hosting::ByAddress, "localhost", &endpoint) };
            refused(
                &Facts { bind: Some(address("10.0.0.1")), ..fixed.clone() },
                "each would serve",
                "leave out --bind",
            );
            refused(
                &Facts { bind: Some(address("0.0.0.0")), ..fixed },
                "each would serve",
                "leave out --bind",
            );
        }
        // An operator's template says localhost in the first pod, which is told to serve, and where.
        let endpoint = [address("127.0.0.1")];
        let first = Facts {
            is_fixed: true,
            bind: Some(address("10.0.0.1")),
            ..facts(Hosting::Serve, "localhost", &endpoint)
        };
        assert_eq!(role("10.0.0.1", &first).unwrap(), Role::Serve(address("10.0.0.1")));
    }

    #[test]
    fn a_bridge_within_each_host_is_no_place_for_several() {
        let endpoint = [address("172.17.0.1")];
        for hosting in [Hosting::ByAddress, Hosting::Serve] {
            let open = Facts { inner: &endpoint, ..facts(hosting, "172.17.0.1", &endpoint) };
            let error = role("172.17.0.1", &open).unwrap_err();
            assert!(error.to_string().contains("docker0"), "{error}");
            assert!(error.remedy().unwrap().contains("--nnodes N"), "{error}");
            let fixed = Facts { is_fixed: true, ..open.clone() };
            assert_eq!(role("172.17.0.1", &fixed).unwrap(), Role::Serve(endpoint[0]));
        }
        // A name may lead to the host's own address as well.
        let both = [endpoint[0], address("192.168.1.5")];
        let named = Facts { inner: &endpoint, ..facts(Hosting::ByAddress, "node0", &both) };
        assert_eq!(role("192.168.1.5", &named).unwrap(), Role::Serve(both[1]));
        // Seen from a container, it is the host's.
        let inside = facts(Hosting::ByAddress, "172.17.0.1", &endpoint);
        assert_eq!(role("172.17.0.2", &inside).unwrap(), Role::Connect);
    }

    #[test]
    fn a_name_of_several_hosts_and_a_place_where_nobody_comes_are_refused() {
        let endpoint = [address("10.0.0.2"), address("10.0.0.1")];
        refused(
            &facts(Hosting::ByAddress, "train", &endpoint),
            "leads to this host and to others",
            "one host",
        );
        let mixed = [address("127.0.1.1"), address("10.0.0.2")];
        refused(&facts(Hosting::ByAddress, "node", &mixed), "leads to this host and to others", "one host");
        // Told to serve by a template that all nodes have, or by the default of --node-rank.
        refused(&facts(Hosting::Serve, "node2", &endpoint[..1]), "no address of this host", "--nnodes N");
        let behind = Facts { is_fixed: true, ..facts(Hosting::Serve, "node2", &endpoint[..1]) };
        refused(&behind, "no address of this host", "--bind");
        let listens = Facts { bind: Some(address("10.0.0.1")), ..behind };
        assert_eq!(role("10.0.0.1", &listens).unwrap(), Role::Serve(address("10.0.0.1")));
        let own = [address("10.0.0.1")];
        // All nodes are needed, and this one is node 0.
        let told = Facts { is_fixed: true, ..facts(Hosting::Serve, "train", &endpoint) };
        assert_eq!(role("10.0.0.1", &told).unwrap(), Role::Serve(address("10.0.0.1")));
        let elsewhere = Facts { bind: Some(address("10.9.0.1")), ..facts(Hosting::ByAddress, "node1", &own) };
        refused(&elsewhere, "would listen at 10.9.0.1", "0.0.0.0");
    }

    #[test]
    fn one_launcher_of_a_host_has_the_claim() {
        let endpoint = format!("a-test-of-claims-{}:29400", std::process::id());
        let first = Claim::take(&endpoint).unwrap().unwrap();
        assert!(Claim::take(&endpoint).unwrap().is_none());
        assert!(Claim::take("another-test-of-claims:1").unwrap().is_some());
        drop(first);
        assert!(Claim::take(&endpoint).unwrap().is_some());
    }

    /// A launcher of a job: the host that it is on, and its own options.
    #[derive(Clone, Debug)]
    struct Launcher {
        host: usize,
        hosting: Hosting,
        bind: Option<IpAddr>,
        /// The addresses of the end point, as they are looked up on its host.
        found: Vec<IpAddr>,
    }

    const HOSTS: [[&str; 2]; 3] =
        [["10.0.0.1", "2001:db8::1"], ["10.0.0.2", "2001:db8::2"], ["10.0.0.3", "2001:db8::3"]];
    const SHARED: [&str; 6] = ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"];
    /// A router, or a host that takes no part.
    const FOREIGN: [&str; 2] = ["192.0.2.7", "2001:db8::7"];

    fn is_own_of(host: usize, address: IpAddr) -> bool {
        is_every_hosts(address) || HOSTS[host].iter().any(|own| self::address(own) == address)
    }

    fn any_address() -> impl Strategy<Value = IpAddr> {
        let all: Vec<&str> = HOSTS.concat().into_iter().chain(SHARED).chain(FOREIGN).collect();
        prop::sample::select(all).prop_map(address)
    }

    /// A launcher that finds `least` or more of the end point's addresses, in any order. Or its host maps the name to its loopback, as
    /// Debian does with a host's own.
    fn launcher(endpoint: Vec<IpAddr>, least: usize) -> impl Strategy<Value = Launcher> {
        let hosting = prop::sample::select(vec![Hosting::ByAddress, Hosting::Serve, Hosting::Connect]);
        let count = endpoint.len();
        let found = subsequence(endpoint, least..=count).prop_shuffle();
        let mapped = prop::option::weighted(0.2, prop::sample::select(SHARED.to_vec()));
        let found = (found, mapped).prop_map(|(found, mapped)| mapped.map_or(found, |to| vec![address(to)]));
        (0..HOSTS.len(), hosting, prop::option::of(any_address()), found)
            .prop_map(|(host, hosting, bind, found)| Launcher { host, hosting, bind, found })
    }

    /// Launchers with one end point. That of one host may have all of its addresses or, as names do that come late, some of them. That
    /// of several hosts, or of the loopback, has the same addresses for all.
    fn job() -> impl Strategy<Value = Vec<Launcher>> {
        let one_host = (0..HOSTS.len()).prop_map(|host| (HOSTS[host].map(address).to_vec(), 0));
        let any = prop::collection::vec(any_address(), 0..4)
            .prop_map(|endpoint| (endpoint.clone(), endpoint.len()));
        prop_oneof![one_host, any]
            .prop_flat_map(|(endpoint, least)| prop::collection::vec(launcher(endpoint, least), 1..6))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Launchers of one job with nodes that come and go: those that serve are on one host, where a claim lets only the first.
        #[test]
        fn no_two_hosts_serve(launchers in job()) {
            let mut serving = HashSet::new();
            for launcher in &launchers {
                let facts = Facts { bind: launcher.bind, ..facts(launcher.hosting, "endpoint", &launcher.found) };
                match who_serves(&facts, |address| is_own_of(launcher.host, address)) {
                    Ok(Role::Serve(_)) => {
                        serving.insert(launcher.host);
                    }
                    Ok(Role::Connect) => {}
                    Err(error) => prop_assert!(error.remedy().is_some()),
                }
            }
            prop_assert!(serving.len() < 2, "{:?} serve", serving);
        }

        /// The shared template of the guide: one end point, each node's own address or all of them to listen at. One host serves, and
        /// all others connect.
        #[test]
        fn a_shared_template_has_one_server(
            hosts in subsequence(vec![0, 1, 2], 2..=3),
            first in 0..3_usize,
            binds in prop::sample::select(vec![None, Some(true), Some(false)]),
        ) {
            let endpoint = [address(HOSTS[hosts[first % hosts.len()]][0])];
            let roles: Vec<Role> = hosts.iter().map(|host| {
                let bind = binds.map(|own| if own { address(HOSTS[*host][0]) } else { address("0.0.0.0") });
                let facts = Facts { bind, ..facts(Hosting::ByAddress, "endpoint", &endpoint) };
                who_serves(&facts, |address| is_own_of(*host, address)).unwrap()
            }).collect();
            let serving = roles.iter().filter(|role| matches!(role, Role::Serve(_))).count();
            prop_assert_eq!(serving, 1);
        }
    }
}
