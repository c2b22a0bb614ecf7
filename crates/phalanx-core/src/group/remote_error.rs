//! An error of a rank, for the others.

use std::any::Any;

use serde::{Deserialize, Serialize};

use crate::error::{Error, panic_message};
use crate::host;
use crate::rank::Rank;

/// An error of a rank, for the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[doc(hidden)]
pub struct RemoteError {
    rank: u32,
    host: String,
    /// Whether it is a time-out. A program may go on after one, as where a disk is slow, and all ranks decide alike.
    is_timeout: bool,
    cause: String,
    remedy: Option<String>,
}

impl RemoteError {
    /// What `error`, which this rank has had itself or received, tells others.
    pub fn of(error: &Error, me: Rank) -> Self {
        Self {
            rank: error.rank().unwrap_or(me).get(),
            host: error.host().map_or_else(host::name, str::to_owned),
            is_timeout: error.is_timeout(),
            cause: error.full_cause(),
            remedy: error.remedy().map(str::to_owned),
        }
    }

    /// What a `panic` of this rank tells others.
    pub fn of_panic(panic: &(dyn Any + Send), me: Rank) -> Self {
        Self::of(&Error::aborted(format!("rank {me} panicked: {}", panic_message(panic))), me)
    }

    #[doc(hidden)]
    pub fn error(self) -> Error {
        let rank = Rank::new(self.rank);
        let error = if self.is_timeout { Error::timeout(self.cause) } else { Error::aborted(self.cause) };
        let error = error.at(rank, self.host).with_peer(rank);
        self.remedy.into_iter().fold(error, Error::with_remedy)
    }
}
