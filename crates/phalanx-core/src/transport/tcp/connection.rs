//! A connection of the mesh: a socket, with or without TLS.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

use parking_lot::Mutex;
use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg};

use crate::tls::{Binding, Session};

/// Reads of what a refused peer still sends; one that sends without end must not delay others.
const LAST_READS: usize = 64;
/// Reads without decrypted content, before the caller is asked to come back: a peer may send a record in
/// many pieces, and records without content.
const EMPTY_READS: usize = 64;

/// May be used by several threads, each of which receives, or sends, whole messages.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: TcpStream,
    /// Both directions share a session. No thread waits while it is locked, unless the socket blocks.
    tls: Option<Box<Mutex<Session>>>,
    /// Whether the peer is on this host, once the two are connected.
    is_within_host: OnceLock<bool>,
}

impl Connection {
    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, tls: None, is_within_host: OnceLock::new() }
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The peer's address; none of a connection that has been reset.
    pub(super) fn host(&self) -> Option<IpAddr> {
        self.socket.peer_addr().ok().map(|peer| peer.ip())
    }

    /// Whether the peer is on this host.
    pub(super) fn is_within_host(&self) -> bool {
        if let Some(known) = self.is_within_host.get() {
            return *known;
        }
        let (Ok(own), Ok(peer)) = (self.socket.local_addr(), self.socket.peer_addr()) else { return false };
        *self.is_within_host.get_or_init(|| own.ip() == peer.ip())
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Passes all further data through `session`.
    pub(super) fn encrypt(&mut self, session: Session) {
        self.tls = Some(Box::new(Mutex::new(session)));
    }

    /// The peer has been authenticated.
    pub(super) fn admit(&self) {
        if let Some(tls) = &self.tls {
            tls.lock().admit();
        }
    }

    /// Continues the TLS handshake, if there is one; true when it is done.
    pub(super) fn handshake(&self) -> io::Result<bool> {
        self.tls.as_ref().map_or(Ok(true), |tls| tls.lock().handshake(&mut Socket(&self.socket)))
    }

    /// A value that no other connection has, if this one is encrypted.
    pub(super) fn binding(&self) -> io::Result<Option<Binding>> {
        self.tls.as_ref().map(|tls| tls.lock().binding()).transpose()
    }

    /// Sends as much as the connection accepts now. Returns how much it accepted, and whether everything accepted so
    /// far has left this process. If not, call it again, even without data.
    pub(in crate::transport) fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<(usize, bool)> {
        match &self.tls {
            None => Socket(&self.socket).write_vectored(parts).map(|count| (count, true)),
            Some(tls) => tls.lock().send(&mut Socket(&self.socket), parts),
        }
    }

    /// Receives what has arrived; 0 if the peer has closed the connection. An error of kind `WouldBlock` says that
    /// nothing could be decrypted. On a blocking socket it does not always mean that the time-out has passed.
    pub(in crate::transport) fn receive(&self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(tls) = &self.tls else { return Socket(&self.socket).read_vectored(parts) };
        patiently(|| tls.lock().receive(&mut Socket(&self.socket), parts))
    }

    /// Copies the data that will be received next, without receiving it.
    pub(in crate::transport) fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            None => self.socket.peek(into),
            Some(tls) => tls.lock().peek(&mut Socket(&self.socket), into),
        }
    }

    /// Reads the remaining data before the connection is closed: closing a socket with unread data resets it, and the
    /// peer might lose the last message.
    pub(super) fn discard(&self) {
        let mut rest = [0; 1024];
        for _ in 0..LAST_READS {
            if !matches!(Socket(&self.socket).read(&mut rest), Ok(count) if count == rest.len()) {
                return;
            }
        }
    }

    /// Whether there is data that no poll shows.
    pub(super) fn holds_input(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.lock().holds_input())
    }

    /// Sends nothing more. Earlier data still arrive.
    pub(super) fn finish_sending(&self) {
        // If it is closed already, nothing more is sent.
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Reads what has come, and throws it away. Returns whether the peer will send nothing more, because it has finished too or has
    /// gone.
    pub(super) fn has_ended(&self) -> bool {
        let mut rest = [0; 4096];
        for _ in 0..LAST_READS {
            match Socket(&self.socket).read(&mut rest) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
        false
    }

    /// Wakes the threads that wait for it, on both sides.
    pub(super) fn shut(&self) {
        // If it is closed already, no thread waits.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Receives until there is data, or none. It does not go on for ever if each read brings only a part of a record.
fn patiently(mut receive: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    for _ in 0..EMPTY_READS {
        match receive() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            received => return received,
        }
    }
    // All data that was read is decrypted, so a poll shows whether there is more.
    Err(ErrorKind::WouldBlock.into())
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The socket itself. If the peer has gone, this is an error, whatever this program's signal settings.
struct Socket<'a>(&'a TcpStream);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buffer)])
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let receive = || recvmsg(self.0, parts, &mut RecvAncillaryBuffer::default(), RecvFlags::empty());
        Ok(retry_on_intr(receive)?.bytes)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let send = || sendmsg(self.0, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        Ok(retry_on_intr(send)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sends_a_record_in_pieces_without_end_holds_nobody_in_a_call() {
        let mut reads = 0;
        let endless = patiently(|| {
            reads += 1;
            Err(ErrorKind::Interrupted.into())
        });
        assert_eq!((endless.unwrap_err().kind(), reads), (ErrorKind::WouldBlock, EMPTY_READS));
        for last in [Ok(7), Ok(0), Err(ErrorKind::WouldBlock), Err(ErrorKind::ConnectionReset)] {
            let mut pieces = EMPTY_READS - 1;
            let received = patiently(|| match pieces {
                0 => last.map_err(io::Error::from),
                _ => {
                    pieces -= 1;
                    Err(ErrorKind::Interrupted.into())
                }
            });
            assert_eq!(received.map_err(|error| error.kind()), last);
        }
    }
}
