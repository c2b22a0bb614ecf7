//! Descriptors that a parent process has left open for this one, and named by their numbers.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// A second descriptor of the stream socket `number`, which is closed on exec. The first one stays open, and both are one connection:
/// what one reads, the other does not, and a setting of the connection is for both.
///
/// # Errors
/// If no such descriptor is open, or if it is something else than a stream of the Unix domain.
pub fn stream(number: RawFd) -> io::Result<UnixStream> {
    // SAFETY: the call takes no memory. A number that is not open is an error, and an open one stays as it is.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    let family = rustix::net::getsockname(&copy)?.address_family();
    let kind = rustix::net::sockopt::socket_type(&copy)?;
    if family != rustix::net::AddressFamily::UNIX || kind != rustix::net::SocketType::STREAM {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is another kind of socket"));
    }
    Ok(copy.into())
}

/// The process that has made the other end of `stream`, as this process's namespace numbers it: 0 if it is outside of it.
///
/// # Errors
/// The system's.
pub fn peer(stream: &UnixStream) -> io::Result<libc::pid_t> {
    // rustix takes 0 for no process number, which this is not.
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which `peer` has.
    let outcome = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(peer.pid) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_copy_is_the_same_connection_and_leaves_the_first_open() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let mut copy = stream(near.as_raw_fd()).unwrap();
        copy.write_all(b"a").unwrap();
        drop(copy);
        near.write_all(b"b").unwrap();
        let mut found = [0; 2];
        far.read_exact(&mut found).unwrap();
        assert_eq!(&found, b"ab");
    }

    #[test]
    fn a_socket_pair_has_this_process_at_both_ends() {
        let (near, _far) = UnixStream::pair().unwrap();
        assert_eq!(u32::try_from(peer(&near).unwrap()).unwrap(), std::process::id());
    }

    #[test]
    fn what_is_no_stream_of_this_host_is_refused() {
        let (pipe, _writer) = io::pipe().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (datagrams, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        for other in [pipe.as_raw_fd(), listener.as_raw_fd(), datagrams.as_raw_fd(), -1, RawFd::MAX] {
            assert!(stream(other).is_err(), "{other}");
        }
    }
}
