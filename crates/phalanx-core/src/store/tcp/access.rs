//! Which clients may use a served store.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::io::{PipeWriter, Write};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::blocking::Blocking;
use super::handshake_permits::{HandshakePermit, HandshakePermits};
use super::peer_user::PeerUsers;
use super::server_connection::invalid;
use super::server_stream::Stream;
use crate::credentials::Credentials;
use crate::notice::Aside;
use crate::random;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::{HANDSHAKE_TIMEOUT, TAG, least_handshake_time};
use crate::wire::greeting::{self, CALL, Responder, StoreSecret};
use crate::wire::store::{MAGIC, Op};
use crate::wire::tls;

/// The first bytes of PyTorch's clients, which distinguish the kinds of clients.
const HELLO: usize = 5;

/// Which clients a server accepts.
#[derive(Clone, Debug, Default)]
pub struct Access {
    credentials: Credentials,
    keyless: KeylessClients,
    refusals: Option<Refusals>,
}

/// How to treat clients that do not know the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeylessClients {
    /// All are accepted.
    #[default]
    All,
    /// Only those of a process of this user on this host are accepted.
    OfThisUser,
    /// None is accepted.
    None,
}

/// Where to report the addresses of refused clients, one a line. Other connections, such as port scans, are not
/// reported: they would hide these.
#[derive(Clone, Debug)]
pub struct Refusals(pub Arc<PipeWriter>);

impl Access {
    /// For clients that have these credentials, and for `keyless`; for all clients if there are no credentials.
    pub fn to(credentials: Credentials, keyless: KeylessClients) -> Self {
        Self { credentials, keyless, refusals: None }
    }

    #[doc(hidden)]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    #[doc(hidden)]
    pub fn telling(self, refusals: &Refusals) -> Self {
        Self { refusals: Some(refusals.clone()), ..self }
    }
}

/// Admits a server's clients.
pub(super) struct Admission {
    secret: Option<StoreSecret>,
    tls: Option<Tls>,
    keyless: KeylessClients,
    refusals: Option<Refusals>,
    /// Whether a refused client was reported, by a server that no launcher has started.
    has_warned: Cell<bool>,
    handshakes: HandshakePermits,
    /// It looks for renewed certificates.
    blocking: Blocking,
    peer_users: PeerUsers,
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("keyless", &self.keyless).finish_non_exhaustive()
    }
}

impl Admission {
    pub fn new(access: Access) -> Self {
        let Access { credentials, keyless, refusals } = access;
        let Credentials { key, tls } = credentials;
        Self {
            secret: key.as_ref().map(|key| StoreSecret::new(key.bytes())),
            tls,
            keyless,
            refusals,
            has_warned: Cell::new(false),
            handshakes: HandshakePermits::new(),
            blocking: Blocking::default(),
            peer_users: PeerUsers::default(),
        }
    }

    /// Waits until `stream` has shown that it is an admissible client. Otherwise the error says why not.
    pub async fn admit(&self, stream: &mut Stream) -> io::Result<()> {
        let first = timeout(HANDSHAKE_TIMEOUT, self.introduce(stream)).await??;
        let (Some(tls), Some(hello)) = (&self.tls, first) else { return Ok(()) };
        // A client's time does not count while it waits for the others.
        let permit = self.handshakes.take().await?;
        timeout(HANDSHAKE_TIMEOUT, self.secure(stream, (tls, hello), permit)).await?
    }

    /// Admits a client without TLS, or returns the first record of a TLS client. There is no TLS session before that
    /// record is complete.
    async fn introduce(&self, stream: &mut Stream) -> io::Result<Option<Vec<u8>>> {
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello).await?;
        if self.tls.is_none() {
            if tls::is_hello(&hello) {
                stream.turn_away(&tls::REFUSAL);
                return Err(Refusal::wanted());
            }
            return self.greet(stream, hello, self.secret.clone()).await.map(|()| None);
        }
        if !tls::is_hello(&hello) {
            return self.admit_plain(stream, &hello).await.map(|()| None);
        }
        let mut head = [0; tls::HELLO_HEAD];
        head[..HELLO].copy_from_slice(&hello);
        stream.read_exact(&mut head[HELLO..]).await?;
        let strange = || invalid("its first bytes are not a ClientHello of TLS".to_owned());
        let mut hello = vec![0; tls::hello_length(&head).ok_or_else(strange)?];
        let (start, rest) = hello.split_at_mut(head.len());
        start.copy_from_slice(&head);
        stream.read_exact(rest).await?;
        Ok(Some(hello))
    }

    /// Continues with a client inside TLS, of which this is the first record.
    async fn secure(
        &self,
        stream: &mut Stream,
        (tls, hello): (&Tls, Vec<u8>),
        permit: HandshakePermit<'_>,
    ) -> io::Result<()> {
        let least = least_handshake_time(stream.round_trip());
        let binding = match permit.run(least, stream.encrypt(tls, hello, &self.blocking)).await {
            Ok(binding) => binding,
            Err(error) => {
                // A client with a certificate of another CA may be of this job. A TLS client without a certificate,
                // or another program, is not: port scanners do so.
                if Refusal::is_of_certificates(&error) {
                    self.refuse(stream);
                }
                return Err(error);
            }
        };
        // It has a certificate: it is no longer unauthenticated.
        drop(permit);
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello).await?;
        self.greet(stream, hello, self.secret.as_ref().map(|secret| secret.bound(&binding))).await
    }

    /// Greets a client that began with these bytes.
    async fn greet(
        &self,
        stream: &mut Stream,
        hello: [u8; HELLO],
        secret: Option<StoreSecret>,
    ) -> io::Result<()> {
        if is_validation(&hello) {
            let may = match (&secret, self.keyless) {
                (None, _) | (Some(_), KeylessClients::All) => true,
                (Some(_), KeylessClients::None) => false,
                (Some(_), KeylessClients::OfThisUser) => self.is_of_this_user(stream).await?,
            };
            if may {
                return Ok(());
            }
            self.refuse(stream);
            return Err(invalid("it has no job key, and this store requires one".to_owned()));
        }
        if !is_greeting(&hello) {
            return Err(invalid(format!("its first bytes are {hello:02x?}, not a store client's")));
        }
        let Some(secret) = secret else {
            self.refuse(stream);
            return Err(invalid("it has a job key, and this store has none".to_owned()));
        };
        if authenticate(stream, &secret, &hello).await? {
            return Ok(());
        }
        self.refuse(stream);
        Err(invalid("it does not know this job's key".to_owned()))
    }

    /// With TLS required, admits programs without it, PyTorch's, if their traffic stays on this host.
    async fn admit_plain(&self, stream: &Stream, hello: &[u8; HELLO]) -> io::Result<()> {
        let may = is_validation(hello) && self.keyless != KeylessClients::None;
        if may && self.is_of_this_user(stream).await? {
            return Ok(());
        }
        stream.turn_away(&tls::REFUSAL);
        // A program that does not begin as a store's client does is not of any job.
        if is_validation(hello) || is_greeting(hello) {
            self.refuse(stream);
        }
        Err(Refusal::plain())
    }

    /// Whether a process of this user on this host made the connection.
    async fn is_of_this_user(&self, stream: &Stream) -> io::Result<bool> {
        let (peer, here) = stream.addresses()?;
        Ok(self.peer_users.user_of(peer, here).await? == Some(rustix::process::geteuid().as_raw()))
    }

    fn refuse(&self, stream: &Stream) {
        let Some(peer) = stream.peer() else { return };
        match &self.refusals {
            // It does not block; if the pipe is full, enough has been reported.
            Some(Refusals(pipe)) => {
                let _ = (&**pipe).write_all(format!("{peer}\n").as_bytes());
            }
            // No launcher serves this store. The others have the same reason.
            // All clients wait for this thread.
            None if !self.has_warned.replace(true) => Aside::default().warn(refused(&peer)),
            None => {}
        }
    }
}

/// The report of a client that a rank's own store has refused.
fn refused(peer: &impl fmt::Display) -> String {
    format!(
        "a client at {peer} was not let into the store that this rank serves, because its key, or its \
         certificate, is not this job's: give every rank the same PHALANX_JOB_KEY_FILE and PHALANX_TLS_CA"
    )
}

/// Whether PyTorch's clients, and ours without a key, begin with these bytes.
fn is_validation(hello: &[u8; HELLO]) -> bool {
    let [op, magic @ ..] = hello;
    *op == Op::Validate as u8 && *magic == MAGIC.to_le_bytes()
}

/// Whether our clients with a key begin with these bytes.
fn is_greeting(hello: &[u8; HELLO]) -> bool {
    hello.first_chunk().is_some_and(greeting::is_greeting)
}

/// Whether the client that began with these bytes knows the secret.
async fn authenticate(stream: &mut Stream, secret: &StoreSecret, start: &[u8; HELLO]) -> io::Result<bool> {
    let mut call = [0; CALL];
    call[..HELLO].copy_from_slice(start);
    stream.read_exact(&mut call[HELLO..]).await?;
    let Some(responder) = Responder::new(secret, call, random::bytes().map_err(io::Error::other)?) else {
        return Err(invalid("it greets in another version".to_owned()));
    };
    stream.write_all(responder.answer()).await?;
    stream.flush().await?;
    let mut proof = [0; TAG];
    stream.read_exact(&mut proof).await?;
    Ok(responder.proven(secret, &proof))
}
