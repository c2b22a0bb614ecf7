//! Whose process is at the other end of a connection within this host?

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The kernel's tables of the connections of this thread's network namespace.
const TABLES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];
/// The only state in which a line's user is the one who made the socket: half-open and closed ones say 0.
const ESTABLISHED: &str = "01";

/// The user who made the socket at `peer` that is connected to `here`; `None` if it is not of this host.
///
/// A remote host cannot appear in the kernel's own table, whatever address it claims.
pub(super) fn user_of(peer: SocketAddr, here: SocketAddr) -> io::Result<Option<u32>> {
    let wanted = (canonical(peer), canonical(here));
    // Whoever connects from elsewhere is not worth a look.
    if !wanted.0.ip().is_loopback() && wanted.0.ip() != wanted.1.ip() {
        return Ok(None);
    }
    for table in TABLES {
        let file = match File::open(table) {
            Ok(file) => file,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for line in BufReader::with_capacity(1024, file).lines() {
            if let Some((local, remote, user)) = parse(&line?)
                && (local, remote) == wanted
            {
                return Ok(Some(user));
            }
        }
    }
    Ok(None)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// An established connection: its local end, its remote end, and its user.
fn parse(line: &str) -> Option<(SocketAddr, SocketAddr, u32)> {
    // sl local_address rem_address st tx:rx tr:when retrnsmt uid ..
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (end(fields.next()?)?, end(fields.next()?)?);
    if fields.next()? != ESTABLISHED {
        return None;
    }
    Some((local, remote, fields.nth(3)?.parse().ok()?))
}

/// `0100007F:1F90`: words of four bytes as this processor reads them, and the port.
fn end(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |text: &str| Some(u32::from_str_radix(text, 16).ok()?.to_ne_bytes());
    let ip: IpAddr = match address.len() {
        8 => Ipv4Addr::from(word(address)?).into(),
        32 => {
            let mut bytes = [0; 16];
            for (place, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(address.get(8 * place..8 * place + 8)?)?);
            }
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_other_end_of_a_connection_of_this_process_is_this_users() {
        let user = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                eprintln!("skipped: no {address}");
                continue;
            };
            let here = listener.local_addr().unwrap();
            let client = TcpStream::connect(here).unwrap();
            let (server, peer) = listener.accept().unwrap();
            assert_eq!(user_of(peer, here).unwrap(), Some(user));
            // Nobody has connected from there.
            let nobody = SocketAddr::new(peer.ip(), here.port());
            assert_eq!(user_of(nobody, here).unwrap(), None);
            // A connection that has ended is nobody's.
            drop((server, client));
            assert_eq!(user_of(peer, here).unwrap(), None);
        }
    }

    #[test]
    fn lines_of_the_kernel_are_read() {
        let line =
            "   7: 0100007F:C350 0100007F:7350 01 00000000:00000000 00:00000000 00000000  1000        0 5 1";
        let at = |text: &str| text.parse().unwrap();
        if cfg!(target_endian = "little") {
            assert_eq!(parse(line), Some((at("127.0.0.1:50000"), at("127.0.0.1:29520"), 1000)));
            let mapped = line.replace("0100007F", "0000000000000000FFFF00000100007F");
            assert_eq!(parse(&mapped), parse(line));
        }
        // Half-open and closed ones say 0 where the user stands.
        assert_eq!(parse(&line.replace(" 01 ", " 06 ")), None);
        assert_eq!(
            parse("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid"),
            None
        );
    }

    proptest! {
        #[test]
        fn garbage_is_no_line(line in "[0-9A-F: é]{0,120}") {
            let _ = parse(&line);
        }
    }
}
