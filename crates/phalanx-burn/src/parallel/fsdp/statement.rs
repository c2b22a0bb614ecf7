//! What the ranks of all replicas say of their modules, to be compared.

use phalanx::{Error, Rank, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::exchanges::Exchanges;

/// What a rank says.
pub(super) struct Statement<T> {
    /// What it is called in errors.
    pub by: String,
    /// Its number, if it is of this rank's replica.
    pub peer: Option<Rank>,
    pub what: T,
}

impl<T> Statement<T> {
    /// `error` about this rank.
    pub fn about_this_rank(&self, error: Error) -> Error {
        self.peer.into_iter().fold(error, Error::with_peer)
    }
}

impl Exchanges {
    /// What the ranks of all replicas say, on every rank in the same order. All ranks call it together.
    pub fn gather_from_all<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<Statement<T>>> {
        let replica = self.group.all_gather_object(own)?;
        let replicas = self.replicas.all_gather_object(&replica)?;
        let (own, count) = (self.replicas.rank().index(), replicas.len());
        let said = |(replica, said): (usize, Vec<T>)| {
            let said = said.into_iter().enumerate();
            said.map(move |(rank, what)| Statement {
                by: if count == 1 {
                    format!("rank {rank}")
                } else {
                    format!("rank {rank} of replica {replica}")
                },
                peer: (replica == own).then_some(Rank::new(rank as u32)),
                what,
            })
        };
        Ok(replicas.into_iter().enumerate().flat_map(said).collect())
    }
}
