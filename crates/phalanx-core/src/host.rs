//! The name of this host, and what identifies it: names are not unique.
//!
//! Two hosts may have one name, as containers of one image have. If a name decided, their ranks would look for each other at the loopback, and
//! for memory that the other host does not have. So the kernel's boot id and the network namespace decide; the name is for errors and logs.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::OnceLock;

use phalanx_sys::interface;

use crate::error::{LOOPBACK_IS_DOWN, loopback_is_down as says_that_loopback_is_down};
use crate::interfaces;

/// The name of this host, as errors and logs show it. Linux allows 64 bytes. Spaces would end a field in a store.
pub fn name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.split_whitespace().collect()
}

/// Identifies this host, unlike its [`name`]: processes with the same identity reach each other at the loopback. Containers with a
/// network of their own are hosts of their own. It has no spaces.
///
/// It consists of the kernel's boot id and the number of the network namespace. Where `/proc` hides one of them, it is the name and
/// the addresses of the host, which differ in any network in which hosts reach each other.
pub fn id() -> String {
    let addresses = || {
        let found = interfaces::addresses().unwrap_or_default();
        found.into_iter().map(|own| own.address).filter(|own| !interfaces::is_every_hosts(*own)).collect()
    };
    identity(boot_id().zip(namespace("net")), &name(), addresses)
}

/// Identifies what processes take for one host with one disk: the kernel's boot and the name, so that containers of one machine are
/// hosts of their own if they have names of their own.
pub(crate) fn disk_id() -> String {
    let boot = boot_id().map_or_else(id, |boot| format!("{boot:032x}"));
    format!("{boot} {}", name())
}

/// Whether `name` is that of the loopback, on every host. Capitals make no difference in names, and a dot may end one.
pub fn is_localhost(name: &str) -> bool {
    name.trim_end_matches('.').eq_ignore_ascii_case("localhost")
}

/// Why `text` can be neither a host's name nor its address, if it cannot: nobody has to wait for its address.
pub fn unfit_host(text: &str) -> Option<&'static str> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    // An address of one link has its interface behind it: fe80::1%eth0.
    let (address, _) = bare.split_once('%').unwrap_or((bare, ""));
    if address.parse::<Ipv6Addr>().is_ok() {
        None
    } else if text.is_empty() {
        Some("it is empty: give the name or address of a host")
    } else if text.contains("://") {
        Some("it is a URL: give the host alone, without `://` and what is before it")
    } else if text.contains(':') {
        Some("it has a colon, and is no IPv6 address: give the host alone, and its port by itself")
    } else if text
        .contains(|letter: char| letter.is_whitespace() || letter.is_control() || "/,[]".contains(letter))
    {
        Some("it is neither a host's name nor an address")
    } else {
        None
    }
}

/// Whether the loopback is down, over which processes of this host reach each other at all of its addresses. In a new network
/// namespace the kernel has no route to it; one that was up, and is down now, drops what is sent.
pub fn loopback_is_down() -> bool {
    interface::is_up(c"lo").is_ok_and(|is_up| !is_up)
}

/// The remedy if `error`, of connecting to `target`, comes of a loopback that is down.
pub(crate) fn loopback_remedy(target: &SocketAddr, error: &io::Error) -> Option<&'static str> {
    let is_own = || target.ip().is_loopback() || UdpSocket::bind((target.ip(), 0)).is_ok();
    let is_dropped = || error.kind() == ErrorKind::TimedOut && is_own() && loopback_is_down();
    says_that_loopback_is_down(target, error).or_else(|| is_dropped().then_some(LOOPBACK_IS_DOWN))
}

fn identity(kernel: Option<(u128, u64)>, name: &str, addresses: impl FnOnce() -> Vec<IpAddr>) -> String {
    if let Some((boot, network)) = kernel {
        return format!("{boot:032x}-{network}");
    }
    let mut addresses = addresses();
    addresses.sort_unstable();
    let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    format!("{name}/{}", addresses.join(","))
}

/// Identifies this boot of the kernel: containers of one machine have the same. None if `/proc` hides it.
pub(crate) fn boot_id() -> Option<u128> {
    static BOOT: OnceLock<Option<u128>> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        u128::from_str_radix(&boot.trim().replace('-', ""), 16).ok()
    })
}

/// The number of this process's namespace of a `kind`: on one boot, no other namespace has it. None if `/proc` hides it.
pub(crate) fn namespace(kind: &str) -> Option<u64> {
    let link = fs::read_link(format!("/proc/self/ns/{kind}")).ok()?;
    link.to_str()?.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_is_no_host_is_told_from_names_and_addresses() {
        for host in
            ["node0", "node0.train.example", "my_host", "10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "*"]
        {
            assert_eq!(unfit_host(host), None, "{host}");
        }
        for (text, why) in [
            ("", "empty"),
            ("tcp://node0", "a URL"),
            ("http://node0:80", "a URL"),
            ("node0:29500", "its port by itself"),
            ("[::1]:29500", "its port by itself"),
            ("node0,node1", "neither"),
            ("node 0", "neither"),
            ("node0/", "neither"),
            ("node0\n", "neither"),
        ] {
            assert!(unfit_host(text).is_some_and(|said| said.contains(why)), "{text:?}");
        }
    }

    #[test]
    fn hosts_of_one_name_are_told_apart() {
        let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        let never = || -> Vec<IpAddr> { unreachable!("the kernel has said enough") };
        let one = identity(Some((7, 4_026_531_840)), "localhost", never);
        assert_eq!(one, identity(Some((7, 4_026_531_840)), "other-name", never));
        // Another machine with the same number, and another container of this one.
        assert_ne!(one, identity(Some((8, 4_026_531_840)), "localhost", never));
        assert_ne!(one, identity(Some((7, 4_026_532_000)), "localhost", never));
        // Without the kernel's numbers, in whichever order the addresses come.
        let hidden = |texts: &[&str]| identity(None, "localhost", || addresses(texts));
        assert_eq!(hidden(&["10.0.0.5", "2001:db8::5"]), hidden(&["2001:db8::5", "10.0.0.5"]));
        assert_ne!(hidden(&["10.0.0.5"]), hidden(&["10.0.0.6"]));
        assert_ne!(hidden(&["10.0.0.5"]), one);
    }

    #[test]
    fn this_host_has_an_identity_without_spaces() {
        assert_eq!(id(), id());
        assert!(!id().contains(char::is_whitespace) && id().len() > 32, "{}", id());
        assert_eq!(disk_id(), disk_id());
    }

    #[test]
    fn the_loopback_of_a_host_with_one_is_up() {
        assert!(!loopback_is_down());
        let error = ErrorKind::TimedOut.into();
        assert_eq!(loopback_remedy(&(Ipv4Addr::LOCALHOST, 9).into(), &error), None);
    }
}
