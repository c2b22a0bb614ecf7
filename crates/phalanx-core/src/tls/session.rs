//! One side of a TLS connection, without its socket, which the caller passes in.
//!
//! Sockets may block or not: an error of kind `WouldBlock` is passed through, and nothing is lost.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};

use rustls::Connection;

use super::{Binding, Refusal, explain};

/// The most bytes that a side may send before it is authenticated: enough for a chain of a few certificates.
const LONGEST_HANDSHAKE: usize = 16 * 1024;
/// The size of one read at first; rustls reads less at once.
const FIRST_BUFFER: usize = 1024;
/// The size of one read from an authenticated process of the job.
const BUFFER: usize = 128 * 1024;
/// Bytes that are encrypted before they are sent. rustls has memory of its own for each record, and all of it is freed together. 256 KiB are more
/// than glibc keeps at first (M_TRIM_THRESHOLD, 128 KiB), so that each send takes new pages from the system: a `phalanx bench` of 1 MiB went at
/// 1.0 GB/s, and goes at 1.7 with 64 KiB. These also stay in a processor's cache on their way.
const OUTGOING: usize = 64 * 1024;

/// The number of reads without content after which the caller is asked to come back later.
const EMPTY_READS: usize = 64;

const LABEL: &[u8] = b"EXPORTER-Channel-Binding";

pub(crate) struct Session {
    tls: Connection,
    /// Read from the socket; the bytes from `start` to `end` are not decrypted yet.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// Decrypted, and read by `peek` only.
    plain: Vec<u8>,
    /// Bytes of the handshake received so far.
    heard: usize,
    /// The other side is authenticated and may use more memory.
    is_admitted: bool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Session {
    /// What encrypts, once both have agreed on it.
    #[cfg(test)]
    pub(crate) fn cipher(&self) -> Option<rustls::CipherSuite> {
        self.tls.negotiated_cipher_suite().map(|suite| suite.suite())
    }

    pub(super) fn new(mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(OUTGOING));
        Self { tls, incoming: Vec::new(), start: 0, end: 0, plain: Vec::new(), heard: 0, is_admitted: false }
    }

    /// Bytes that have already been read from the socket.
    pub(crate) fn begin_with(&mut self, bytes: Vec<u8>) {
        (self.start, self.end) = (0, bytes.len());
        self.incoming = bytes;
    }

    /// Continues the handshake, by at most one read. Returns true when it is done. The accepting side has then
    /// authenticated the other; the connecting side learns with the first answer whether it has been accepted.
    pub(crate) fn handshake(&mut self, io: &mut (impl Read + Write)) -> io::Result<bool> {
        if self.tls.wants_write() && !self.flush(io)? {
            // The message is small, and the connection empty.
            return Err(ErrorKind::WriteZero.into());
        }
        if self.tls.is_handshaking() {
            let filled = self.fill(io);
            // This also sends the alert with which this side ends the handshake.
            if self.tls.wants_write() && !self.flush(io)? {
                return Err(ErrorKind::WriteZero.into());
            }
            filled?;
            if self.tls.is_handshaking() && !self.tls.wants_read() {
                // The other side has closed the connection during the handshake.
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(!self.tls.is_handshaking())
    }

    /// The other side is fully authenticated: from now on reads are larger.
    pub(crate) fn admit(&mut self) {
        self.is_admitted = true;
    }

    /// A value that no other session has.
    pub(crate) fn binding(&self) -> io::Result<Binding> {
        self.tls.export_keying_material(Binding::default(), LABEL, None).map_err(io::Error::other)
    }

    /// Takes as much of `parts` as there is room for, and sends what the socket accepts. Returns how much was taken,
    /// and whether everything taken so far has been sent.
    pub(crate) fn send(&mut self, io: &mut impl Write, parts: &[IoSlice<'_>]) -> io::Result<(usize, bool)> {
        if !self.flush(io)? {
            return Ok((0, false));
        }
        let taken = self.tls.writer().write_vectored(parts)?;
        Ok((taken, self.flush(io)?))
    }

    /// Receives data into `parts`, which are not all empty. Returns 0 if the other side has closed the connection.
    /// Reads the socket at most once: an error of kind `Interrupted` says that the data is not enough to be decrypted.
    pub(crate) fn receive(&mut self, io: &mut impl Read, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self.take(parts) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            taken => return taken,
        }
        if let Err(error) = self.fill(io) {
            return if error.kind() == ErrorKind::UnexpectedEof { Ok(0) } else { Err(error) };
        }
        self.take(parts).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => ErrorKind::Interrupted.into(),
            _ => error,
        })
    }

    /// Copies the data that will be received next, as much as is there and fits, without receiving it. The number of
    /// reads is limited, so that a record in many pieces, or records without content, cannot hold the caller here.
    pub(crate) fn peek(&mut self, io: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        let (mut outcome, mut empty) = (Ok(()), 0);
        while self.plain.len() < into.len() && outcome.is_ok() {
            let missing = (into.len() - self.plain.len()) as u64;
            let before = self.plain.len();
            match self.tls.reader().take(missing).read_to_end(&mut self.plain) {
                Ok(0) if self.plain.len() == before => outcome = Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() != ErrorKind::WouldBlock => outcome = Err(error),
                // All data that was read is decrypted, so a poll shows whether there is more.
                _ if self.plain.len() == before && empty == EMPTY_READS => {
                    outcome = Err(ErrorKind::WouldBlock.into());
                }
                _ if self.plain.len() == before => (outcome, empty) = (self.fill(io), empty + 1),
                _ => {}
            }
        }
        let count = self.plain.len().min(into.len());
        into[..count].copy_from_slice(&self.plain[..count]);
        match outcome {
            Err(error) if count == 0 && error.kind() == ErrorKind::UnexpectedEof => Ok(0),
            Err(error) if count == 0 => Err(error),
            _ => Ok(count),
        }
    }

    /// Whether there is data that no poll of the socket would show.
    pub(crate) fn holds_input(&self) -> bool {
        self.start < self.end || !self.plain.is_empty() || !self.tls.wants_read()
    }

    /// Sends encrypted data. False if the socket does not accept all of it now.
    fn flush(&mut self, io: &mut impl Write) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(io) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Takes decrypted data, and decrypts what has been read, until `parts` are full.
    fn take(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut count = 0;
        for part in parts {
            let mut filled = 0;
            while filled < part.len() {
                match self.take_some(&mut part[filled..]) {
                    Ok(0) => return Ok(count),
                    Ok(some) => (filled, count) = (filled + some, count + some),
                    Err(error) if count > 0 && error.kind() == ErrorKind::WouldBlock => return Ok(count),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(count)
    }

    fn take_some(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.plain.is_empty() {
            let count = self.plain.len().min(into.len());
            into[..count].copy_from_slice(&self.plain[..count]);
            self.plain.drain(..count);
            return Ok(count);
        }
        if self.tls.wants_read() {
            self.decrypt()?;
        }
        self.tls.reader().read(into)
    }

    /// Reads the socket once, unless there is data that is not decrypted yet.
    fn fill(&mut self, io: &mut impl Read) -> io::Result<()> {
        if self.start == self.end {
            if self.incoming.len() < FIRST_BUFFER {
                self.incoming.resize(FIRST_BUFFER, 0);
            }
            let count = io.read(&mut self.incoming)?;
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            (self.start, self.end) = (0, count);
        }
        let was_full = self.end == self.incoming.len();
        self.decrypt()?;
        if was_full && self.start == self.end && self.incoming.len() < BUFFER && self.is_admitted {
            self.incoming.resize(BUFFER, 0);
        }
        Ok(())
    }

    /// Passes data that has been read to rustls, until it has data to take, or to send.
    fn decrypt(&mut self) -> io::Result<()> {
        while self.start < self.end && self.tls.wants_read() {
            let count = self.tls.read_tls(&mut &self.incoming[self.start..self.end])?;
            self.start += count;
            if self.tls.is_handshaking() {
                self.heard += count;
                if self.heard > LONGEST_HANDSHAKE {
                    let what = "its TLS handshake is too long";
                    return Err(Refusal::error(what, "use a shorter chain of certificates"));
                }
            }
            self.tls.process_new_packets().map_err(|error| explain::refusal(&error))?;
        }
        Ok(())
    }
}
