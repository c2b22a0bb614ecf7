//! Finds the user whose process is at the other end of a connection within this host.
//!
//! The kernel is queried for that one socket ([`diag`]), which takes some microseconds, however many there are. If it
//! does not answer such queries, its tables of all connections are read ([`tables`]), once for all waiting queries.
//!
//! PyTorch's clients do not know the job's key, and must work. So the server may accept them by their user: a process
//! of that user could read the key anyway.

mod diag;
mod tables;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use self::tables::Tables;

/// The two addresses of a connection, IPv4 addresses as such: of the socket in question, and of its peer.
type Ends = (SocketAddr, SocketAddr);

/// Finds the users of a store's clients.
#[derive(Debug, Default)]
pub(super) struct PeerUsers(Rc<Tables>);

impl PeerUsers {
    /// The user who created the socket at `peer` that is connected to `here`. `None` if it is not on this host, or
    /// closing.
    ///
    /// A remote host cannot appear in the kernel's own tables, whatever address it claims.
    pub async fn user_of(&self, peer: SocketAddr, here: SocketAddr) -> io::Result<Option<u32>> {
        let ends = (canonical(peer), canonical(here));
        // Connections from other hosts need no query.
        if !ends.0.ip().is_loopback() && ends.0.ip() != ends.1.ip() {
            return Ok(None);
        }
        if diag::is_available() {
            return diag::user_of(ends);
        }
        self.0.user_of(ends).await
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The result of both methods.
    fn user_of(peer: SocketAddr, here: SocketAddr) -> Option<u32> {
        let ends = (canonical(peer), canonical(here));
        let read = tables::users_of(&[ends]).unwrap().get(&ends).copied();
        if diag::is_available() {
            assert_eq!(diag::user_of(ends).unwrap(), read, "{ends:?}");
        }
        read
    }

    #[test]
    fn the_other_end_of_a_connection_of_this_process_is_this_users() {
        is_this_users(&[("127.0.0.1:0", "127.0.0.1")]);
    }

    /// The last one is IPv4 over an IPv6 socket.
    #[test]
    #[ignore = "needs IPv6: .ci/full runs it"]
    fn so_it_is_over_ipv6() {
        is_this_users(&[("[::1]:0", "::1"), ("[::]:0", "127.0.0.1"), ("[::]:0", "::ffff:127.0.0.1")]);
    }

    fn is_this_users(ways: &[(&str, &str)]) {
        let user = rustix::process::geteuid().as_raw();
        for (serve, call) in ways.iter().copied() {
            let listener = TcpListener::bind(serve).unwrap();
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect((call, port)).unwrap();
            let (server, peer) = listener.accept().unwrap();
            let here = server.local_addr().unwrap();
            assert_eq!(user_of(peer, here), Some(user), "{serve} {call}");
            // There is no connection from there; a socket that only listens there is not connected.
            let at = |address: SocketAddr, port| SocketAddr::new(address.ip(), port);
            assert_eq!(user_of(at(peer, port), here), None);
            assert_eq!(user_of(here, at(peer, 1)), None);
            assert_eq!(user_of(peer, at(here, 1)), None);
            // A closed connection has no user.
            drop((server, client));
            assert_eq!(user_of(peer, here), None);
        }
    }
}
