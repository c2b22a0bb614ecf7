//! The server's side of a client's connection: a socket, with or without TLS.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use phalanx_sys::tcp;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::blocking::Blocking;
use crate::tls::{Binding, Session, Tls};

/// Reads of what a refused client still sends; one that sends without end must not delay the store.
const LAST_READS: usize = 64;
/// Reads without decrypted content, before other clients have their turn: a client may send a record in many pieces,
/// and records without content.
const EMPTY_READS: usize = 16;

#[derive(Debug)]
pub(super) struct Stream {
    socket: TcpStream,
    /// Read when the client connected: a socket that was reset no longer has it.
    peer: Option<IpAddr>,
    tls: Option<Box<Session>>,
}

impl Stream {
    pub(super) fn new(socket: TcpStream) -> Self {
        let peer = socket.peer_addr().ok().map(|peer| peer.ip());
        Self { socket, peer, tls: None }
    }

    /// The client's host, even after the client has gone.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// The usual time from sending something to its acknowledgement; zero if the kernel does not know it.
    pub(super) fn round_trip(&self) -> Duration {
        tcp::path(&self.socket).map_or(Duration::ZERO, |path| path.round_trip)
    }

    /// Its address, and this one's.
    pub(super) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.socket.peer_addr()?, self.socket.local_addr()?))
    }

    /// Makes this the accepting side of a TLS connection, whose first record has been read.
    pub(super) async fn encrypt(
        &mut self,
        tls: &Tls,
        first: Vec<u8>,
        blocking: &Blocking,
    ) -> io::Result<Binding> {
        // It looks whether the certificates were renewed. All clients wait for this thread, and a disk may not answer.
        let tls = tls.clone();
        let mut session = Box::new(blocking.run(move || tls.server()).await??);
        session.begin_with(first);
        loop {
            match session.handshake(&mut Socket(&self.socket)) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.socket.readable().await?,
                Err(error) => return Err(error),
            }
        }
        let binding = session.binding();
        self.tls = Some(session);
        binding
    }

    /// Sends a last message without TLS. Closing a socket with unread data resets the connection, which might discard
    /// this message at the client. So the data is read first.
    pub(super) fn turn_away(&self, message: &[u8]) {
        // It is small, and the first message sent: it is sent whole, or the client has gone.
        let _ = self.socket.try_write(message);
        let mut rest = [0; 1024];
        for _ in 0..LAST_READS {
            if !matches!(self.socket.try_read(&mut rest), Ok(count) if count == rest.len()) {
                return;
            }
        }
    }

    /// The client has been authenticated.
    pub(super) fn admit(&mut self) {
        if let Some(session) = &mut self.tls {
            session.admit();
        }
    }
}

impl Drop for Stream {
    /// To close it is not enough: a process that was forked from this one has it open, too, and the client would not see its end.
    fn drop(&mut self) {
        let _ = SockRef::from(&self.socket).shutdown(Shutdown::Write);
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { socket, tls, .. } = self.get_mut();
        let Some(session) = tls else { return Pin::new(socket).poll_read(context, buffer) };
        let room = buffer.initialize_unfilled();
        if room.is_empty() {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..EMPTY_READS {
            match session.receive(&mut Socket(socket), &mut [IoSliceMut::new(room)]) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    ready!(socket.poll_read_ready(context))?
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Self { socket, tls, .. } = self.get_mut();
        let Some(session) = tls else { return Pin::new(socket).poll_write(context, bytes) };
        loop {
            match session.send(&mut Socket(socket), &[IoSlice::new(bytes)]) {
                Ok((0, _)) if !bytes.is_empty() => ready!(socket.poll_write_ready(context))?,
                sent => return Poll::Ready(sent.map(|(taken, _)| taken)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, tls, .. } = self.get_mut();
        let Some(session) = tls else { return Pin::new(socket).poll_flush(context) };
        loop {
            match session.send(&mut Socket(socket), &[]) {
                Ok((_, false)) => ready!(socket.poll_write_ready(context))?,
                sent => return Poll::Ready(sent.map(|_| ())),
            }
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

/// The socket, with non-blocking reads and writes.
struct Socket<'a>(&'a TcpStream);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.try_write(buffer)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_sees_the_end_of_a_connection_that_a_forked_process_has_too() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        let _copy = server.try_clone().unwrap();
        server.set_nonblocking(true).unwrap();
        let _entered = runtime.enter();
        drop(Stream::new(TcpStream::from_std(server).unwrap()));
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
}
