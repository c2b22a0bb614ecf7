//! How far a loop has come in a stream.

use phalanx::{Error, Result};
use serde::{Deserialize, Serialize};

/// How far a loop has come in a stream: for each shard, how many items of it were in batches that the loop has got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPosition {
    epoch: u64,
    /// By shard.
    read: Vec<u64>,
}

impl StreamPosition {
    pub(super) fn start(shards: usize) -> Self {
        Self { epoch: 0, read: vec![0; shards] }
    }

    /// The position of all ranks together, of each rank's: as `group.all_gather_object` gives them.
    ///
    /// # Errors
    /// If they are not of the same pass over the same shards.
    pub fn merged(ranks: &[Self]) -> Result<Self> {
        let Some((first, others)) = ranks.split_first() else {
            return Err(Error::invalid_argument("no position was given: one for each rank is needed"));
        };
        others.iter().try_fold(first.clone(), |mut all, one| {
            if (all.epoch, all.read.len()) != (one.epoch, one.read.len()) {
                return Err(Error::mismatch(format!(
                    "a rank is in epoch {} of {} shards, another in epoch {} of {}",
                    all.epoch,
                    all.read.len(),
                    one.epoch,
                    one.read.len()
                ))
                .with_remedy(
                    "ask all ranks for their positions after the same step, or between two passes",
                ));
            }
            all.read.iter_mut().zip(&one.read).for_each(|(all, one)| *all = (*all).max(*one));
            Ok(all)
        })
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The number of shards.
    pub fn shards(&self) -> usize {
        self.read.len()
    }

    /// How many items of each shard were in batches that the loop has got.
    pub fn read(&self) -> &[u64] {
        &self.read
    }

    /// Notes how far these shards were read.
    pub(super) fn advance(&mut self, shards: &[(usize, u64)]) {
        for (shard, read) in shards {
            if let Some(place) = self.read.get_mut(*shard) {
                *place = *read;
            }
        }
    }

    pub(super) fn next_epoch(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.read.fill(0);
    }

    /// Checks that it is one of as many shards.
    pub(super) fn fits(&self, own: &Self) -> Result<()> {
        let (saved, own) = (self.read.len(), own.read.len());
        if saved == own {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "the position was saved with {saved} shards, the loader has {own}"
        ))
        .with_remedy(format!("build the loader with `.shards({saved})`")))
    }
}
