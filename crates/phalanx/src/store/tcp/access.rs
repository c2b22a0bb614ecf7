//! Who may use a served store.

use std::fmt;
use std::io;
use std::io::{PipeWriter, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout_at};

use super::connection::invalid;
use super::neighbour;
use super::stream::Stream;
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

/// Who hears of clients that were not let in: their addresses, a line each.
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
        Self { secret: key.as_ref().map(StoreSecret::new), tls, strangers, refusals }
    }

    /// Waits until `stream` has shown that it is a client that may come in; otherwise the error says why not.
    pub async fn admit(&self, stream: &mut Stream) -> io::Result<()> {
        timeout_at(Instant::now() + HANDSHAKE, self.introduce(stream)).await?
    }

    async fn introduce(&self, stream: &mut Stream) -> io::Result<()> {
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello).await?;
        let Some(tls) = &self.tls else {
            if tls::is_hello(&hello) {
                stream.turn_away(&tls::REFUSAL);
                return Err(Refusal::wanted());
            }
            return self.greet(stream, hello, self.secret.clone()).await;
        };
        if !tls::is_hello(&hello) {
            return self.admit_plain(stream, &hello).await;
        }
        let binding = match stream.encrypt(tls, &hello).await {
            Ok(binding) => binding,
            Err(error) => {
                // Somebody who speaks TLS and has another certificate, or none, is perhaps of this job.
                if Refusal::remedy(&error).is_some() {
                    self.refuse(stream);
                }
                return Err(error);
            }
        };
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
                (Some(_), Strangers::OfThisUser) => is_of_this_user(stream).await?,
            };
            if may {
                return Ok(());
            }
            self.refuse(stream);
            return Err(invalid("it has no job key, which this store wants".to_owned()));
        }
        if !hello.first_chunk().is_some_and(greeting::is_greeting) {
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
        if may && is_of_this_user(stream).await? {
            return Ok(());
        }
        stream.turn_away(&tls::REFUSAL);
        self.refuse(stream);
        Err(Refusal::plain())
    }

    fn refuse(&self, stream: &Stream) {
        if let (Some(Refusals(pipe)), Ok((peer, _))) = (&self.refusals, stream.addresses()) {
            // It does not block; who has heard of many need not hear of more.
            let _ = (&**pipe).write_all(format!("{}\n", peer.ip()).as_bytes());
        }
    }
}

/// Is this how PyTorch's clients begin, and ours without a key?
fn is_validation(hello: &[u8; HELLO]) -> bool {
    let [op, magic @ ..] = hello;
    *op == Op::Validate as u8 && *magic == MAGIC.to_le_bytes()
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

/// Has a process of this user's on this host made the connection?
async fn is_of_this_user(stream: &Stream) -> io::Result<bool> {
    let (peer, here) = stream.addresses()?;
    // The kernel's table of connections is long where there are many.
    let user = tokio::task::spawn_blocking(move || neighbour::user_of(peer, here));
    Ok(user.await.map_err(io::Error::other)?? == Some(rustix::process::geteuid().as_raw()))
}
