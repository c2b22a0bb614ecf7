//! Queries one socket, by its two addresses, with the kernel's NETLINK_SOCK_DIAG (`sock_diag(7)`).
//!
//! ```text
//! request   nlmsghdr 16 | family 1 | protocol 1 | 0 2 | states 4 | socket 48
//! answer    nlmsghdr 16 | family 1 | state 1    | 0 2            | socket 48 | expires 4 | queues 8 | user 4 | inode 4 | ..
//! socket    port 2 | peer's port 2 | address 16 | peer's address 16 | interface 4 | cookie 8
//! ```
//!
//! Ports and addresses are in network order, everything else in this processor's.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with,
};

use super::Ends;

const HEAD: usize = 16;
const REQUEST: usize = HEAD + 56;
/// The fields that are used here; attributes may follow.
const ANSWER: usize = HEAD + 72;
/// The offset of the socket in both, and those of its fields.
const SOCKET: (usize, usize) = (HEAD + 8, HEAD + 4);
const USER: usize = ANSWER - 8;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_TCP: u8 = 6;
/// The only state in which a socket's user is its creator: half-open and closed sockets have 0.
const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;
/// The largest error number of Linux.
const MAX_ERRNO: i32 = 4095;
/// The kernel answers at once; this is an upper bound.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether the kernel answers such queries of this process. A container's or a service's rules may forbid them, and a
/// kernel may be built without them.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    // This queries a socket that certainly exists. If resources are short, the answer is not known yet, and an error of
    // the query itself says so.
    let Some(known) = AVAILABLE.get() else {
        let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) else { return true };
        let Ok(here) = listener.local_addr() else { return true };
        let nowhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
        let found = match ask((here, nowhere)) {
            Ok(answer) => matches!(answer, Some(Found { ends, state: LISTEN, .. }) if ends.0 == here),
            Err(error) if is_passing(&error) => return true,
            Err(_) => false,
        };
        return *AVAILABLE.get_or_init(|| found);
    };
    *known
}

/// Whether this is a lack of resources or an interruption, and not a refusal.
fn is_passing(error: &io::Error) -> bool {
    let passing = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::INTR, Errno::AGAIN];
    Errno::from_io_error(error).is_some_and(|errno| passing.contains(&errno))
}

/// The user who created this socket, if it is connected to this peer.
pub(super) fn user_of(ends: Ends) -> io::Result<Option<u32>> {
    // Without such a connection the kernel returns a listening socket.
    let found = ask(ends)?.filter(|found| found.state == ESTABLISHED && found.ends == ends);
    Ok(found.map(|found| found.user))
}

#[derive(Debug, PartialEq, Eq)]
struct Found {
    ends: Ends,
    state: u8,
    user: u32,
}

fn ask(ends: Ends) -> io::Result<Option<Found>> {
    let kind = SocketType::DGRAM;
    let socket = socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    // Accept only the kernel's answers.
    connect(&socket, &SocketAddrNetlink::new(0, 0))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
    send(&socket, &request(ends), SendFlags::empty())?;
    let mut answer = [0; 512];
    let (count, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    read(&answer[..count.min(512)])
}

fn request((own, peer): Ends) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    let family = if own.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    bytes[HEAD] = family.as_raw() as u8;
    bytes[HEAD + 1] = IPPROTO_TCP;
    bytes[HEAD + 4..HEAD + 8].fill(0xff);
    let socket = &mut bytes[SOCKET.0..];
    socket[..2].copy_from_slice(&own.port().to_be_bytes());
    socket[2..4].copy_from_slice(&peer.port().to_be_bytes());
    for (place, address) in [(4, own.ip()), (20, peer.ip())] {
        match address {
            IpAddr::V4(ip) => socket[place..place + 4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => socket[place..place + 16].copy_from_slice(&ip.octets()),
        }
    }
    // With any cookie.
    socket[40..48].fill(0xff);
    bytes
}

fn read(answer: &[u8]) -> io::Result<Option<Found>> {
    let strange =
        || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer about a socket cannot be read");
    let word = |at: usize| answer.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let kind = answer.get(4..6).ok_or_else(strange)?;
    if *kind == NLMSG_ERROR.to_ne_bytes() {
        let code = word(HEAD).ok_or_else(strange)?.cast_signed().wrapping_neg();
        return match code {
            code if code == Errno::NOENT.raw_os_error() => Ok(None),
            1..=MAX_ERRNO => Err(io::Error::from_raw_os_error(code)),
            _ => Err(strange()),
        };
    }
    if *kind != SOCK_DIAG_BY_FAMILY.to_ne_bytes() || answer.len() < ANSWER {
        return Err(strange());
    }
    let (family, state, socket) = (u16::from(answer[HEAD]), answer[HEAD + 1], &answer[SOCKET.1..]);
    let end = |port: usize, address: usize| {
        let port = u16::from_be_bytes([socket[port], socket[port + 1]]);
        let [a, b, c, d, ..] = socket[address..] else { return None };
        let ip: IpAddr = match AddressFamily::from_raw(family) {
            AddressFamily::INET => Ipv4Addr::new(a, b, c, d).into(),
            _ => Ipv6Addr::from(<[u8; 16]>::try_from(&socket[address..address + 16]).ok()?).to_canonical(),
        };
        Some(SocketAddr::new(ip, port))
    };
    let ends = end(0, 4).zip(end(2, 20)).ok_or_else(strange)?;
    Ok(Some(Found { ends, state, user: word(USER).ok_or_else(strange)? }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_answer_says_what_was_asked_for() {
        for (own, peer) in [("127.0.0.1:80", "127.0.0.2:81"), ("[::1]:80", "[2001:db8::1]:443")] {
            let ends: Ends = (own.parse().unwrap(), peer.parse().unwrap());
            let request = request(ends);
            let mut answer = [0; ANSWER];
            answer[..HEAD].copy_from_slice(&request[..HEAD]);
            (answer[HEAD], answer[HEAD + 1]) = (request[HEAD], ESTABLISHED);
            answer[SOCKET.1..SOCKET.1 + 48].copy_from_slice(&request[SOCKET.0..]);
            answer[USER..USER + 4].copy_from_slice(&1000_u32.to_ne_bytes());
            assert_eq!(read(&answer).unwrap(), Some(Found { ends, state: ESTABLISHED, user: 1000 }));
            assert!(read(&answer[..ANSWER - 1]).is_err());
        }
    }

    #[test]
    fn who_is_not_there_is_told_from_a_refusal() {
        let error = |code: i32| {
            let kind = NLMSG_ERROR.to_ne_bytes();
            [&[0; 4][..], &kind[..], &[0; 10], &code.to_ne_bytes()].concat()
        };
        assert_eq!(read(&error(-Errno::NOENT.raw_os_error())).unwrap(), None);
        let refused = read(&error(-Errno::PERM.raw_os_error())).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(
            [0, 1, i32::MIN, -5000].iter().all(|code| read(&error(*code)).is_err()) && read(&[]).is_err()
        );
    }

    proptest! {
        #[test]
        fn garbage_never_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..150), is_error: bool) {
            if let Some(kind) = bytes.get_mut(4..6).filter(|_| is_error) {
                kind.copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
            }
            let _ = read(&bytes);
        }
    }
}
