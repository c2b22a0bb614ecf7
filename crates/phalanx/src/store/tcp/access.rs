//! Who may use a served store.

use std::fmt;
use std::io;
use std::io::{PipeWriter, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::connection::invalid;
use super::neighbour::Neighbours;
use super::stream::Stream;
use super::turns::{Turn, Turns};
use crate::credentials::Credentials;
use crate::tls::{Refusal, Tls};
use crate::wire::auth::{TAG, nonce};
use crate::wire::greeting::{self, Answerer, CALL, StoreSecret};
use crate::wire::store::{MAGIC, Op};
use crate::wire::tls;

/// How long a stranger may take to say, and to prove, that it is a client.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// Bytes with which PyTorch's clients open, and by which the kinds of clients are told apart.
const HELLO: usize = 5;

/// Whom a server lets in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    credentials: Credentials,
    strangers: Strangers,
    refusals: Option<Refusals>,
}

/// What becomes of clients that do not know the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Strangers {
    /// All are let in.
    #[default]
    All,
    /// Those that a process of this user's on this host has made.
    OfThisUser,
    /// None is let in.
    None,
}

/// Who hears of clients that were not let in although they are clients: their addresses, a line each. Of what else comes to
/// a port nobody hears: it would hide them.
#[derive(Clone, Debug)]
pub(crate) struct Refusals(pub Arc<PipeWriter>);

impl Access {
    /// For those who have these credentials, and those `strangers`; for all if there are none.
    pub(crate) fn to(credentials: Credentials, strangers: Strangers) -> Self {
        Self { credentials, strangers, refusals: None }
    }

    pub(crate) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    pub(crate) fn telling(self, refusals: &Refusals) -> Self {
        Self { refusals: Some(refusals.clone()), ..self }
    }
}

/// Where a server's clients come in.
pub(super) struct Gate {
    secret: Option<StoreSecret>,
    tls: Option<Tls>,
    strangers: Strangers,
    refusals: Option<Refusals>,
    turns: Turns,
    neighbours: Neighbours,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("strangers", &self.strangers).finish_non_exhaustive()
    }
}

impl Gate {
    pub fn new(access: Access) -> Self {
        let Access { credentials, strangers, refusals } = access;
        let Credentials { key, tls } = credentials;
        let (secret, turns, neighbours) =
            (key.as_ref().map(StoreSecret::new), Turns::new(), Neighbours::default());
        Self { secret, tls, strangers, refusals, turns, neighbours }
    }

    /// Waits until `stream` has shown that it is a client that may come in; otherwise the error says why not.
    pub async fn admit(&self, stream: &mut Stream) -> io::Result<()> {
        let first = timeout(HANDSHAKE, self.introduce(stream)).await??;
        let (Some(tls), Some(hello)) = (&self.tls, first) else { return Ok(()) };
        // How long others take is not this client's fault.
        let turn = self.turns.take().await?;
        timeout(HANDSHAKE, self.secure(stream, (tls, hello), turn)).await?
    }

    /// Lets a client in without TLS, or gives the first record of one that comes with it. No state of TLS is made before
    /// that is there.
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
        let strange = || invalid("what it begins with is not the first record of a client of TLS".to_owned());
        let mut hello = vec![0; tls::hello_length(&head).ok_or_else(strange)?];
        let (start, rest) = hello.split_at_mut(head.len());
        start.copy_from_slice(&head);
        stream.read_exact(rest).await?;
        Ok(Some(hello))
    }

    /// Hears the client inside TLS, which it has begun so.
    async fn secure(
        &self,
        stream: &mut Stream,
        (tls, hello): (&Tls, Vec<u8>),
        turn: Turn<'_>,
    ) -> io::Result<()> {
        let binding = match turn.last(stream.encrypt(tls, hello)).await {
            Ok(binding) => binding,
            Err(error) => {
                // Somebody with a certificate of another CA is perhaps of this job. Who speaks TLS and shows none, or
                // says something else, is not: programs that look at every port do so.
                if Refusal::is_of_certificates(&error) {
                    self.refuse(stream);
                }
                return Err(error);
            }
        };
        // It has a certificate: it is no stranger any more.
        drop(turn);
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello).await?;
        self.greet(stream, hello, self.secret.as_ref().map(|secret| secret.bound(&binding))).await
    }

    /// Hears a client that began so.
    async fn greet(
        &self,
        stream: &mut Stream,
        hello: [u8; HELLO],
        secret: Option<StoreSecret>,
    ) -> io::Result<()> {
        if is_validation(&hello) {
            let may = match (&secret, self.strangers) {
                (None, _) | (Some(_), Strangers::All) => true,
                (Some(_), Strangers::None) => false,
                (Some(_), Strangers::OfThisUser) => self.is_of_this_user(stream).await?,
            };
            if may {
                return Ok(());
            }
            self.refuse(stream);
            return Err(invalid("it has no job key, which this store wants".to_owned()));
        }
        if !is_greeting(&hello) {
            return Err(invalid(format!("its first bytes are {hello:02x?}, not a store client's")));
        }
        let Some(secret) = secret else {
            return Err(invalid("it has a job key, and this store has none".to_owned()));
        };
        if authenticate(stream, &secret, &hello).await? {
            return Ok(());
        }
        self.refuse(stream);
        Err(invalid("it does not know this job's key".to_owned()))
    }

    /// Where others come by TLS: lets programs in that know nothing of it, PyTorch's, if what they say stays on this host.
    async fn admit_plain(&self, stream: &Stream, hello: &[u8; HELLO]) -> io::Result<()> {
        let may = is_validation(hello) && self.strangers != Strangers::None;
        if may && self.is_of_this_user(stream).await? {
            return Ok(());
        }
        stream.turn_away(&tls::REFUSAL);
        // Somebody who says what no store's client says is of no job.
        if is_validation(hello) || is_greeting(hello) {
            self.refuse(stream);
        }
        Err(Refusal::plain())
    }

    /// Has a process of this user's on this host made the connection?
    async fn is_of_this_user(&self, stream: &Stream) -> io::Result<bool> {
        let (peer, here) = stream.addresses()?;
        Ok(self.neighbours.user_of(peer, here).await? == Some(rustix::process::geteuid().as_raw()))
    }

    fn refuse(&self, stream: &Stream) {
        if let (Some(Refusals(pipe)), Some(peer)) = (&self.refusals, stream.peer()) {
            // It does not block; who has heard of many need not hear of more.
            let _ = (&**pipe).write_all(format!("{peer}\n").as_bytes());
        }
    }
}

/// Is this how PyTorch's clients begin, and ours without a key?
fn is_validation(hello: &[u8; HELLO]) -> bool {
    let [op, magic @ ..] = hello;
    *op == Op::Validate as u8 && *magic == MAGIC.to_le_bytes()
}

/// Is this how our clients begin that have a key?
fn is_greeting(hello: &[u8; HELLO]) -> bool {
    hello.first_chunk().is_some_and(greeting::is_greeting)
}

/// Does the client that began so know the secret?
async fn authenticate(stream: &mut Stream, secret: &StoreSecret, start: &[u8; HELLO]) -> io::Result<bool> {
    let mut call = [0; CALL];
    call[..HELLO].copy_from_slice(start);
    stream.read_exact(&mut call[HELLO..]).await?;
    let Some(answerer) = Answerer::new(secret, call, nonce().map_err(io::Error::other)?) else {
        return Err(invalid("it greets in another version".to_owned()));
    };
    stream.write_all(answerer.answer()).await?;
    stream.flush().await?;
    let mut proof = [0; TAG];
    stream.read_exact(&mut proof).await?;
    Ok(answerer.proven(secret, &proof))
}
