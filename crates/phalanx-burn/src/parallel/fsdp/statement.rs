//! What the ranks of all replicas say of their modules, to be compared.

use phalanx::{Error, ProcessGroup, Rank, Result};
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
    fn about_this_rank(&self, error: Error) -> Error {
        self.peer.into_iter().fold(error, Error::with_peer)
    }
}

/// What a rank says, or why it has nothing to say.
pub(super) type Said<T> = std::result::Result<T, String>;

/// An error unless all ranks say the same: a rank `cannot` do something, or something `differs` between two of them, each with its name.
pub(super) fn compare<T: PartialEq>(
    all: &[Statement<Said<T>>],
    cannot: &str,
    differs: impl Fn((&str, &T), (&str, &T)) -> String,
    remedy: &'static str,
) -> Result<()> {
    for said in all {
        if let Err(cause) = &said.what {
            return Err(said.about_this_rank(Error::mismatch(format!("{} {cannot}: {cause}", said.by))));
        }
    }
    let (first, others) = match all.split_first() {
        Some((Statement { by, what: Ok(what), .. }, others)) => ((by.as_str(), what), others),
        Some(_) | None => return Ok(()),
    };
    for other in others {
        if let Ok(what) = &other.what
            && what != first.1
        {
            let cause = differs(first, (&other.by, what));
            return Err(other.about_this_rank(Error::mismatch(cause)).with_remedy(remedy));
        }
    }
    Ok(())
}

impl Exchanges {
    /// An error unless this rank's replicas have the same shards, and the ranks with its other shards are in one replica: rank 0's shard would
    /// overwrite another one. All ranks call it together.
    pub fn check_groups(&self) -> Result<()> {
        let place = |group: &ProcessGroup| (group.rank().index(), group.world_size().count());
        let own = (place(&self.group), place(&self.replicas));
        let replicas = self.replicas.all_gather_object(&self.group.all_gather_object(&own)?)?;
        let ((_, ranks), (_, count)) = own;
        for (replica, places) in replicas.into_iter().enumerate() {
            for (rank, ((shard, shards), (number, numbers))) in places.into_iter().enumerate() {
                if (shard, shards, number, numbers) != (rank, ranks, replica, count) {
                    return Err(Error::invalid_argument(format!(
                        "the groups of ShardingGroup::hybrid are no dimensions of one mesh: a rank is number {shard} of {shards} in `shard` and \
                         {number} of {numbers} in `replicate`, where it should be {rank} of {ranks} and {replica} of {count}"
                    ))
                    .with_remedy("give it mesh.group(\"shard\") and mesh.group(\"replicate\") of one DeviceMesh"));
                }
            }
        }
        Ok(())
    }

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
