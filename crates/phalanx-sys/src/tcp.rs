//! TCP connections: what the kernel knows of their paths, and how soon it sends again what was lost.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::net::sockopt::{set_tcp_thin_linear_timeouts, set_tcp_user_timeout};

/// `TCP_RTO_MAX_MS` of linux/tcp.h: the longest pause between two attempts to send a packet. Since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;
/// The shortest value that the kernel takes for it.
const RETRANSMISSION_LIMIT: Duration = Duration::from_secs(1);

/// What the kernel knows of the path of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpPath {
    /// Packets that were sent and have not been acknowledged.
    pub unacknowledged: u32,
    /// The time since the peer's kernel last acknowledged anything.
    pub last_acknowledgement: Duration,
    /// The usual time from sending something to its acknowledgement.
    pub round_trip: Duration,
}

/// What the kernel knows of the path of this connection.
pub fn path(socket: impl AsFd) -> io::Result<TcpPath> {
    // SAFETY: all its fields are integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open while it is borrowed, and the kernel writes at most `length` bytes to `info`.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(TcpPath {
        unacknowledged: info.tcpi_unacked,
        last_acknowledgement: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
    })
}

/// Has the kernel go on soon after an outage. TCP doubles the pause after each attempt to send a packet again, so that an outage of
/// 2 s may cost 4 s of silence. Where the kernel allows it, the pauses of this connection end at a second. Elsewhere the first six of a
/// connection with few packets are not doubled. The connection is given up when nothing has been acknowledged for `give_up`; with
/// short pauses the kernel's own limit, a number of attempts, would come after a quarter of a minute.
pub fn recover_soon(socket: impl AsFd, give_up: Duration) -> io::Result<()> {
    let milliseconds = u32::try_from(give_up.as_millis()).unwrap_or(u32::MAX);
    // The kernel takes a signed number.
    if_known(set_tcp_user_timeout(&socket, milliseconds.min(i32::MAX.cast_unsigned())).map_err(Into::into))?;
    if_known(set_tcp_thin_linear_timeouts(&socket, true).map_err(Into::into))?;
    let pause = RETRANSMISSION_LIMIT.as_millis() as libc::c_int;
    // SAFETY: the descriptor is open while it is borrowed, and the kernel reads the four bytes of `pause`.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const pause).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if_known(if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) })
}

/// Has a connection count as readable only when this many bytes have come, or it has ended. A read that does not wait still takes fewer.
pub fn set_receive_low_water(socket: impl AsFd, bytes: u16) -> io::Result<()> {
    let bytes = libc::c_int::from(bytes);
    // SAFETY: the descriptor is open while it is borrowed, and the kernel reads the four bytes of `bytes`.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The outcome of setting an option, which older kernels, and those of some sandboxes, do not know: it makes recovery quicker, no more.
fn if_known(outcome: io::Result<()>) -> io::Result<()> {
    outcome.or_else(|error| if error.raw_os_error() == Some(libc::ENOPROTOOPT) { Ok(()) } else { Err(error) })
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use rustix::net::sockopt::{tcp_thin_linear_timeouts, tcp_user_timeout};

    use super::*;

    #[test]
    fn a_connection_that_is_read_is_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        recover_soon(&own, Duration::from_secs(30)).unwrap();
        assert_eq!(tcp_user_timeout(&own).unwrap(), 30_000);
        assert!(tcp_thin_linear_timeouts(&own).unwrap());
        let asked = std::time::Instant::now();
        own.write_all(b"x").unwrap();
        peer.read_exact(&mut [0]).unwrap();
        peer.write_all(b"y").unwrap();
        own.read_exact(&mut [0]).unwrap();
        let path = path(&own).unwrap();
        assert_eq!(path.unacknowledged, 0);
        assert!(path.round_trip <= asked.elapsed() + Duration::from_secs(1), "{path:?}");
        // The kernel counts in ticks of up to 10 ms.
        assert!(path.last_acknowledgement <= asked.elapsed() + Duration::from_millis(20), "{path:?}");
    }

    #[test]
    fn few_bytes_are_read_but_make_nothing_readable() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        own.set_nonblocking(true).unwrap();
        set_receive_low_water(&own, 3).unwrap();
        let is_readable = |own: &TcpStream, seconds| {
            let mut fds = [rustix::event::PollFd::new(own, rustix::event::PollFlags::IN)];
            let timeout = rustix::event::Timespec { tv_sec: seconds, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&timeout)).unwrap() == 1
        };
        // A busy kernel may deliver later what is sent.
        let await_bytes = |own: &TcpStream, bytes| {
            while rustix::io::ioctl_fionread(own).unwrap() < bytes {
                std::thread::yield_now();
            }
        };
        peer.write_all(b"ab").unwrap();
        await_bytes(&own, 2);
        assert!(!is_readable(&own, 0));
        peer.write_all(b"c").unwrap();
        assert!(is_readable(&own, 20));
        own.read_exact(&mut [0; 3]).unwrap();
        peer.write_all(b"d").unwrap();
        await_bytes(&own, 1);
        assert!(!is_readable(&own, 0));
        own.read_exact(&mut [0]).unwrap();
        drop(peer);
        assert!(is_readable(&own, 20));
    }

    #[test]
    fn what_is_no_connection_has_no_path() {
        assert!(path(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
