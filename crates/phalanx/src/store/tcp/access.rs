//! Who may use a served store.

use std::fmt;
use std::io;
use std::io::{PipeWriter, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::connection::invalid;
use super::neighbour;
use crate::key::JobKey;
use crate::wire::auth::{TAG, nonce};
use crate::wire::greeting::{self, Answerer, CALL, StoreSecret};
use crate::wire::store::{MAGIC, Op};

/// How long a stranger may take to say, and to prove, that it is a client.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// Bytes with which PyTorch's clients open, and by which the kinds of clients are told apart.
const HELLO: usize = 5;

/// Whom a server lets in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    key: Option<JobKey>,
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
    /// For those who know `key`, if there is one, and those `strangers`; for all if there is none.
    pub(crate) fn to(key: Option<JobKey>, strangers: Strangers) -> Self {
        let strangers = if key.is_some() { strangers } else { Strangers::All };
        Self { key, strangers, refusals: None }
    }

    pub(crate) fn key(&self) -> Option<&JobKey> {
        self.key.as_ref()
    }

    pub(crate) fn telling(self, refusals: &Refusals) -> Self {
        Self { refusals: Some(refusals.clone()), ..self }
    }
}

/// Where a server's clients come in.
pub(super) struct Gate {
    secret: Option<StoreSecret>,
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
        let Access { key, strangers, refusals } = access;
        Self { secret: key.as_ref().map(StoreSecret::new), strangers, refusals }
    }

    /// Waits until `stream` has shown that it is a client that may come in; otherwise the error says why not.
    pub async fn admit(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut hello = [0; HELLO];
        let patience = Instant::now() + HANDSHAKE;
        timeout_at(patience, stream.read_exact(&mut hello)).await??;
        let mut plain = [Op::Validate as u8; HELLO];
        plain[1..].copy_from_slice(&MAGIC.to_le_bytes());
        if hello == plain {
            return timeout_at(patience, self.admit_stranger(stream)).await?;
        }
        if !hello.first_chunk().is_some_and(greeting::is_greeting) {
            return Err(invalid(format!("its first bytes are {hello:02x?}, not a store client's")));
        }
        match timeout_at(patience, self.authenticate(stream, &hello)).await? {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.refuse(stream);
                Err(invalid("it does not know this job's key".to_owned()))
            }
            Err(error) => Err(error),
        }
    }

    /// Does the client that began so know the secret?
    async fn authenticate(&self, stream: &mut TcpStream, start: &[u8; HELLO]) -> io::Result<bool> {
        let Some(secret) = &self.secret else {
            return Err(invalid("it has a job key, and this store has none".to_owned()));
        };
        let mut call = [0; CALL];
        call[..HELLO].copy_from_slice(start);
        stream.read_exact(&mut call[HELLO..]).await?;
        let Some(answerer) = Answerer::new(secret, call, nonce().map_err(io::Error::other)?) else {
            return Err(invalid("it greets in another version".to_owned()));
        };
        stream.write_all(answerer.answer()).await?;
        let mut proof = [0; TAG];
        stream.read_exact(&mut proof).await?;
        Ok(answerer.proven(secret, &proof))
    }

    /// Lets a client in that has no key, if it may.
    async fn admit_stranger(&self, stream: &TcpStream) -> io::Result<()> {
        let may = match self.strangers {
            Strangers::All => true,
            Strangers::None => false,
            Strangers::OfThisUser => {
                let (peer, here) = (stream.peer_addr()?, stream.local_addr()?);
                // The kernel's table of connections is long where there are many.
                let user = tokio::task::spawn_blocking(move || neighbour::user_of(peer, here));
                user.await.map_err(io::Error::other)?? == Some(rustix::process::geteuid().as_raw())
            }
        };
        if may {
            return Ok(());
        }
        self.refuse(stream);
        Err(invalid("it has no job key, which this store wants".to_owned()))
    }

    fn refuse(&self, stream: &TcpStream) {
        if let (Some(Refusals(pipe)), Ok(peer)) = (&self.refusals, stream.peer_addr()) {
            // It does not block; who has heard of many need not hear of more.
            let _ = (&**pipe).write_all(format!("{}\n", peer.ip()).as_bytes());
        }
    }
}
