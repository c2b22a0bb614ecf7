//! The addresses of this host's interfaces, and the one at which other hosts reach it.
//!
//! What the kernel lists decides whether an address is this host's. That a socket can be bound to it does not: with the setting
//! `ip_nonlocal_bind`, which proxies need, any address can be bound.
//!
//! Addresses come from a dump of the kernel's RTNETLINK (`rtnetlink(7)`):
//!
//! ```text
//! request   nlmsghdr 16 | family 1 | 0 7
//! answer    nlmsghdr 16 | family 1 | prefix 1 | flags 1 | scope 1 | interface 4 | attributes ..
//! nlmsghdr  length 4 | type 2 | flags 2 | number 4 | port 4
//! attribute length 2 | type 2 | value, padded to a multiple of 4
//! ```

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with,
};

use crate::error::{Error, Result};

const HEAD: usize = 16;
const MESSAGE: usize = HEAD + 8;
const RTM_GETADDR: u16 = 22;
const RTM_NEWADDR: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// NLM_F_REQUEST and NLM_F_DUMP.
const DUMP: u16 = 0x301;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// IFA_F_DADFAILED and IFA_F_TENTATIVE: another host has the address, or may have it.
const NOT_USABLE: u8 = 0x48;
/// The kernel answers at once; this is an upper bound.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The most messages of one dump.
const MESSAGES_LIMIT: usize = 4096;

/// Addresses reserved for documentation: no packet goes there, but the kernel tells which route it would take.
pub const OUTSIDE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// The remedy where the address of this host cannot be chosen.
const CHOOSE_REMEDY: &str = "name the interface with GLOO_SOCKET_IFNAME on every host, or for launchers the address with --local-addr";

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name, such as `eth0`.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
}

/// The addresses of all interfaces, those of the loopback included.
///
/// # Errors
/// If the kernel does not list them: a sandbox may forbid it.
pub fn addresses() -> io::Result<Vec<InterfaceAddress>> {
    // NETLINK_ROUTE is the protocol 0.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // Accept only the kernel's answers.
    connect(&socket, &SocketAddrNetlink::new(0, 0))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
    let mut request = [0; MESSAGE];
    request[..4].copy_from_slice(&(MESSAGE as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&RTM_GETADDR.to_ne_bytes());
    request[6..8].copy_from_slice(&DUMP.to_ne_bytes());
    send(&socket, &request, SendFlags::empty())?;
    let mut found = Vec::new();
    let mut answer = vec![0; 1 << 16];
    for _ in 0..MESSAGES_LIMIT {
        let (count, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
        let is_last = read(&answer[..count.min(answer.len())], &mut found)?;
        if is_last {
            break;
        }
    }
    let names = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let named = found.into_iter().map(|(index, address)| {
        let name = rustix::net::netdevice::index_to_name(&names, index);
        InterfaceAddress { interface: name.unwrap_or_else(|_| format!("interface {index}")), address }
    });
    Ok(named.collect())
}

/// Adds the addresses in a datagram of the kernel's answer, with the numbers of their interfaces. Returns whether it is the last.
fn read(mut datagram: &[u8], found: &mut Vec<(u32, IpAddr)>) -> io::Result<bool> {
    let strange =
        || io::Error::new(io::ErrorKind::InvalidData, "the kernel's list of addresses cannot be read");
    while !datagram.is_empty() {
        let length = word(datagram, 0).ok_or_else(strange)? as usize;
        let kind = half(datagram, 4).ok_or_else(strange)?;
        let message = datagram.get(..length).filter(|_| length >= HEAD).ok_or_else(strange)?;
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = word(message, HEAD).ok_or_else(strange)?.cast_signed();
                return Err(io::Error::from_raw_os_error(code.wrapping_neg()));
            }
            RTM_NEWADDR => found.extend(address_of(message)),
            // The kernel may add kinds of messages.
            _other => {}
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// The address in a message, unless it cannot be used.
fn address_of(message: &[u8]) -> Option<(u32, IpAddr)> {
    let family = AddressFamily::from_raw(u16::from(*message.get(HEAD)?));
    let (flags, index) = (message.get(HEAD + 2)?, word(message, HEAD + 4)?);
    if flags & NOT_USABLE != 0 {
        return None;
    }
    let mut attributes = message.get(MESSAGE..)?;
    // On a link between two hosts the first is the other host's, and the second this one's.
    let (mut given, mut local) = (None, None);
    while attributes.len() >= 4 {
        let length = usize::from(half(attributes, 0)?);
        let value = attributes.get(4..length)?;
        let address: Option<IpAddr> = match family {
            AddressFamily::INET => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
            AddressFamily::INET6 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            _ => None,
        };
        match half(attributes, 2)? {
            IFA_ADDRESS => given = address,
            IFA_LOCAL => local = address,
            // An address has more attributes, such as its label.
            _other => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some((index, local.or(given)?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

/// Whether `address` means the host that uses it, whichever that is: the loopback, or no address in particular.
pub fn is_every_hosts(address: IpAddr) -> bool {
    let address = address.to_canonical();
    address.is_loopback() || address.is_unspecified()
}

/// Whether `address` is one of this host's. On each host the loopback is.
pub fn is_own(address: IpAddr) -> bool {
    let address = address.to_canonical();
    if is_every_hosts(address) {
        return true;
    }
    match addresses() {
        Ok(own) => own.iter().any(|own| own.address == address),
        // A packet to an address of this host comes from that address. It may come from the first of several in one network: then
        // the answer is no, which is the safe one.
        Err(_) => way_to(address) == Some(address),
    }
}

/// The addresses of this host's bridges that lead to no network card: those of container engines and virtual machines (`docker0`,
/// `virbr0`), which have the same address on every host.
pub fn inner_bridges() -> Vec<IpAddr> {
    let Ok(own) = addresses() else { return Vec::new() };
    let inner = own.into_iter().filter(|own| is_inner_bridge(Path::new("/sys/class/net"), &own.interface));
    inner.map(|own| own.address).collect()
}

/// Whether `interface`, one of those in `folder`, is a bridge that leads to no other host. A member leads there if the kernel shows a device
/// (a network card), a lower interface (a VLAN, a bond) or a kind (a tunnel such as VXLAN) for it, or if it is a tap, which may be a
/// tunnel's, but not libvirt's `vnet*`. The ends of containers have none of these.
fn is_inner_bridge(folder: &Path, interface: &str) -> bool {
    let bridge = folder.join(interface);
    let Ok(members) = bridge.join("brif").read_dir() else { return false };
    let is_lower = |name: &OsStr| name.as_encoded_bytes().starts_with(b"lower_");
    let leads_out = |name: OsString| {
        let member = folder.join(&name);
        let mut lower = member.read_dir().into_iter().flatten().flatten();
        let is_tap = member.join("tun_flags").exists() && !name.as_encoded_bytes().starts_with(b"vnet");
        let kind = std::fs::read_to_string(member.join("uevent")).is_ok_and(|text| text.contains("DEVTYPE="));
        member.join("device").exists() || is_tap || kind || lower.any(|entry| is_lower(&entry.file_name()))
    };
    !members.flatten().any(|member| leads_out(member.file_name()))
}

/// The address of this host from which packets to `target` go. Nothing is sent.
pub fn way_to(target: IpAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((target, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// What is known of the addresses at which other hosts may reach this one.
struct Facts {
    /// The interfaces that the user names, in GLOO's format: `eth0`, or several with commas, of which the first that has an address
    /// counts.
    named: Option<String>,
    /// The addresses of this host's name, where a name is looked up.
    by_name: Vec<IpAddr>,
    /// The addresses from which packets leave by default routes.
    routed: Vec<IpAddr>,
    /// An error where a sandbox does not let the kernel list them.
    own: io::Result<Vec<InterfaceAddress>>,
}

/// The address at which other hosts reach this one: that of the interface that the user names, or that of its own name, or that
/// from which packets leave it by default, or the only one that it has. `by_name` has the addresses of its name, if that was looked up.
pub fn outward(named: Option<String>, by_name: Vec<IpAddr>) -> Result<IpAddr> {
    let routed = OUTSIDE.into_iter().filter_map(way_to).collect();
    choose(&Facts { named, by_name, routed, own: addresses() })
}

fn choose(facts: &Facts) -> Result<IpAddr> {
    let Facts { named, by_name, routed, own: listed } = facts;
    if let Some(named) = named {
        return of_interface(named, listed.as_deref().map_err(unlisted)?);
    }
    let own = listed.as_deref().unwrap_or_default();
    let is_outward = |address: &IpAddr| !is_every_hosts(*address) && !is_link_local(*address);
    let is_own = |address: &IpAddr| own.iter().any(|own| own.address == *address);
    let names: Vec<IpAddr> =
        by_name.iter().copied().filter(|name| is_outward(name) && is_own(name)).collect();
    if let Some(both) = routed.iter().find(|routed| names.contains(routed)) {
        return Ok(*both);
    }
    if let [only] = names[..] {
        return Ok(only);
    }
    if let Some(routed) = routed.iter().find(|address| is_outward(address)) {
        return Ok(*routed);
    }
    let candidates: Vec<&InterfaceAddress> =
        own.iter().filter(|own| is_outward(&own.address) && !is_bridge(&own.interface)).collect();
    let (v4, v6): (Vec<&InterfaceAddress>, Vec<_>) =
        candidates.iter().copied().partition(|own| own.address.is_ipv4());
    match (&v4[..], &v6[..]) {
        ([only], _) | ([], [only]) => Ok(only.address),
        // There is no network: all ranks are here.
        ([], []) => listed.as_ref().map(|_| Ipv4Addr::LOCALHOST.into()).map_err(unlisted),
        _ => {
            let shown: Vec<String> = candidates.iter().map(|own| own.to_string()).collect();
            Err(Error::environment(format!(
                "this host has several addresses, and no default route that says at which of them other hosts reach it: {}",
                shown.join(", ")
            ))
            .with_remedy(CHOOSE_REMEDY))
        }
    }
}

/// The error if nothing says at which address other hosts reach this one, because the kernel does not list its addresses.
fn unlisted(error: &io::Error) -> Error {
    Error::environment(format!(
        "the kernel does not list this host's addresses ({error}), and no default route says at which of them other hosts reach it"
    ))
    .with_remedy("let the sandbox or container use netlink sockets (AF_NETLINK), or give launchers the address with --local-addr")
}

/// The address of the first of the interfaces in `named` that has one.
fn of_interface(named: &str, own: &[InterfaceAddress]) -> Result<IpAddr> {
    let names = named.split(',').map(str::trim).filter(|name| !name.is_empty());
    for name in names {
        let mut of_it: Vec<IpAddr> = own
            .iter()
            .filter(|own| own.interface == name && !is_link_local(own.address))
            .map(|own| own.address)
            .collect();
        of_it.sort_unstable();
        if let Some(first) = of_it.first() {
            return Ok(*first);
        }
    }
    let shown: Vec<String> = own.iter().map(ToString::to_string).collect();
    Err(Error::environment(format!(
        "GLOO_SOCKET_IFNAME={named:?}: this host has no such interface with an address; it has {}",
        shown.join(", ")
    ))
    .with_remedy("correct GLOO_SOCKET_IFNAME on this host, or unset it"))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Whether it is one of the interfaces that container engines make on their host.
pub fn is_bridge(interface: &str) -> bool {
    ["docker", "br-", "virbr", "cni", "lxcbr", "podman"].iter().any(|prefix| interface.starts_with(prefix))
}

impl std::fmt::Display for InterfaceAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.address, self.interface)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn own(pairs: &[(&str, &str)]) -> Vec<InterfaceAddress> {
        let of = |(interface, text): &(&str, &str)| InterfaceAddress {
            interface: (*interface).to_owned(),
            address: address(text),
        };
        pairs.iter().map(of).collect()
    }

    fn facts(own: Vec<InterfaceAddress>) -> Facts {
        Facts { named: None, by_name: Vec::new(), routed: Vec::new(), own: Ok(own) }
    }

    /// A message of the kernel's, with the attributes in this order.
    fn message(family: AddressFamily, flags: u8, index: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![family.as_raw() as u8, 24, flags, 0];
        body.extend(index.to_ne_bytes());
        for (kind, value) in attributes {
            body.extend((4 + value.len() as u16).to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(*value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        let mut message = ((HEAD + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(RTM_NEWADDR.to_ne_bytes());
        message.resize(HEAD, 0);
        message.extend(body);
        message
    }

    #[test]
    fn a_bridge_without_a_network_card_is_an_inner_one() {
        let folder = tempfile::tempdir().unwrap();
        let make = |path: &str| std::fs::create_dir_all(folder.path().join(path)).unwrap();
        // A container engine's, with one container and without; a host's own, over a card, a VLAN and a bond.
        for path in
            ["docker0/brif/veth1", "veth1", "virbr0/brif", "br0/brif/eth0", "eth0/device", "br1/brif/eth0.7"]
        {
            make(path);
        }
        for path in ["eth0.7/lower_eth0", "br2/brif/bond0", "bond0/lower_eth0", "eth1/device"] {
            make(path);
        }
        for path in [
            "br3/brif/vxlan0",
            "vxlan0",
            "br4/brif/tap0",
            "tap0/tun_flags",
            "virbr1/brif/vnet0",
            "vnet0/tun_flags",
        ] {
            make(path);
        }
        std::fs::write(folder.path().join("vxlan0/uevent"), "DEVTYPE=vxlan\nINTERFACE=vxlan0\n").unwrap();
        std::fs::write(folder.path().join("veth1/uevent"), "INTERFACE=veth1\n").unwrap();
        for (name, is_inner) in [
            ("docker0", true),
            ("virbr0", true),
            ("br0", false),
            ("br1", false),
            ("br2", false),
            ("br3", false),
            ("br4", false),
            ("virbr1", true),
            ("eth1", false),
            ("gone", false),
        ] {
            assert_eq!(is_inner_bridge(folder.path(), name), is_inner, "{name}");
        }
    }

    #[test]
    fn the_kernels_list_is_read() {
        let v6: Ipv6Addr = "2001:db8::7".parse().unwrap();
        let datagram = [
            message(AddressFamily::INET, 0x80, 2, &[(3, b"eth0\0"), (IFA_ADDRESS, &[10, 0, 0, 5])]),
            // A tunnel: the other end, and this one.
            message(AddressFamily::INET, 0, 3, &[(IFA_ADDRESS, &[10, 9, 0, 1]), (IFA_LOCAL, &[10, 9, 0, 2])]),
            message(AddressFamily::INET6, 0, 2, &[(IFA_ADDRESS, &v6.octets())]),
            // Another host has this one too.
            message(AddressFamily::INET6, 0x08, 2, &[(IFA_ADDRESS, &v6.octets())]),
        ]
        .concat();
        let mut found = Vec::new();
        assert!(!read(&datagram, &mut found).unwrap());
        let expected = [(2, address("10.0.0.5")), (3, address("10.9.0.2")), (2, v6.into())];
        assert_eq!(found, expected);
        let done = [&20_u32.to_ne_bytes()[..], &NLMSG_DONE.to_ne_bytes(), &[0; 14]].concat();
        assert!(read(&done, &mut found).unwrap());
        let refused =
            [&20_u32.to_ne_bytes()[..], &NLMSG_ERROR.to_ne_bytes(), &[0; 10], &(-1_i32).to_ne_bytes()];
        assert_eq!(read(&refused.concat(), &mut found).unwrap_err().raw_os_error(), Some(1));
    }

    #[test]
    fn this_host_has_the_loopback_and_not_the_addresses_of_others() {
        let own = addresses().unwrap();
        assert!(
            own.contains(&InterfaceAddress { interface: "lo".into(), address: address("127.0.0.1") }),
            "{own:?}"
        );
        for own in own {
            assert!(is_own(own.address), "{own}");
        }
        for here in ["127.0.1.1", "0.0.0.0", "::", "::ffff:127.0.0.1"] {
            assert!(is_own(address(here)) && is_every_hosts(address(here)), "{here}");
        }
        for elsewhere in ["192.0.2.1", "224.0.0.1", "255.255.255.255", "2001:db8::1"] {
            assert!(!is_own(address(elsewhere)), "{elsewhere}");
        }
        assert_eq!(way_to(address("127.0.0.1")), Some(address("127.0.0.1")));
    }

    #[test]
    fn others_are_told_an_address_that_is_not_the_loopback() {
        let debian = own(&[("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("docker0", "172.17.0.1")]);
        // The name of a Debian host, without a default route, then with one.
        let mut told = facts(debian.clone());
        told.by_name = vec![address("127.0.1.1")];
        assert_eq!(choose(&told).unwrap(), address("10.0.0.5"));
        told.routed = vec![address("10.0.0.5"), address("2001:db8::5")];
        assert_eq!(choose(&told).unwrap(), address("10.0.0.5"));
        // The name says which of two networks, unless it is the name of all of them.
        let two = own(&[("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("ib0", "10.1.0.5")]);
        let mut told = Facts { routed: vec![address("10.0.0.5")], ..facts(two.clone()) };
        told.by_name = vec![address("10.1.0.5"), address("127.0.0.1")];
        assert_eq!(choose(&told).unwrap(), address("10.1.0.5"));
        told.by_name.push(address("10.0.0.5"));
        assert_eq!(choose(&told).unwrap(), address("10.0.0.5"));
        // An address of the name that is another host's counts for nothing.
        told.by_name = vec![address("10.7.0.1")];
        assert_eq!(choose(&told).unwrap(), address("10.0.0.5"));
        // IPv6 alone, with and without a route.
        let v6 = own(&[("lo", "::1"), ("eth0", "fe80::1"), ("eth0", "2001:db8::5")]);
        assert_eq!(choose(&facts(v6)).unwrap(), address("2001:db8::5"));
        // No network at all.
        assert_eq!(choose(&facts(own(&[("lo", "127.0.0.1")]))).unwrap(), address("127.0.0.1"));
        // That there is none is not known where the kernel does not say which addresses there are.
        let unlisted = || Facts { own: Err(io::ErrorKind::PermissionDenied.into()), ..facts(Vec::new()) };
        for told in [unlisted(), Facts { named: Some("eth0".into()), ..unlisted() }] {
            let error = choose(&told).unwrap_err();
            assert!(error.to_string().contains("does not list this host's addresses"), "{error}");
            assert!(error.remedy().unwrap().contains("--local-addr"));
        }
        let told = Facts { routed: vec![address("10.0.0.5")], ..unlisted() };
        assert_eq!(choose(&told).unwrap(), address("10.0.0.5"));
        let error = choose(&facts(two)).unwrap_err();
        assert!(error.to_string().contains("10.0.0.5 (eth0), 10.1.0.5 (ib0)"), "{error}");
        assert!(error.remedy().unwrap().contains("GLOO_SOCKET_IFNAME"));
    }

    #[test]
    fn a_named_interface_comes_first() {
        let own =
            own(&[("lo", "127.0.0.1"), ("ib0", "fe80::1"), ("ib0", "2001:db8::5"), ("eth0", "10.0.0.5")]);
        let named = |named: &str| {
            choose(&Facts {
                named: Some(named.into()),
                routed: vec![address("10.0.0.5")],
                ..facts(own.clone())
            })
        };
        assert_eq!(named("ib0").unwrap(), address("2001:db8::5"));
        assert_eq!(named("eth7, eth0").unwrap(), address("10.0.0.5"));
        let error = named("eth7").unwrap_err();
        assert!(
            error.to_string().contains("eth7") && error.to_string().contains("10.0.0.5 (eth0)"),
            "{error}"
        );
    }

    #[test]
    fn bridges_of_containers_are_known() {
        assert!(is_bridge("docker0") && is_bridge("br-1f2e") && !is_bridge("eth0") && !is_bridge("bond0"));
    }

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes, &mut Vec::new());
        }
    }
}
