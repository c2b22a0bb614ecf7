//! How far a loop has come in a stream.

use phalanx::{Error, Rank, Result, WorldSize};
use serde::{Deserialize, Serialize};

use crate::worker::mix;

/// The most items of a shard: counting on from there never overflows.
const MAX_READ: u64 = u64::MAX / 2;

/// How far a loop has come in a stream: for each shard, how many items of it were in batches that the loop has got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPosition {
    epoch: u64,
    /// By shard.
    read: Vec<u64>,
    /// Whose it is, a rank of so many: other ranks' shards are where they were when the pass began. None if it is all ranks'.
    part: Option<(u32, u32)>,
    /// The loader's: a shard may be read in an order that is drawn from it.
    seed: u64,
}

impl StreamPosition {
    pub(super) fn start(shards: usize, seed: u64) -> Self {
        Self { epoch: 0, read: vec![0; shards], part: None, seed }
    }

    /// The position of all ranks together, of each rank's: as `group.all_gather_object` gives them.
    ///
    /// # Errors
    /// If they are not of the same pass over the same shards, or of loaders with several seeds, or a rank's is missing or comes twice.
    pub fn merged(ranks: &[Self]) -> Result<Self> {
        let Some((first, others)) = ranks.split_first() else {
            return Err(Error::invalid_argument("no position was given: one for each rank is needed"));
        };
        let of = |one: &Self| (one.epoch, one.read.len());
        if let Some(other) = others.iter().find(|other| of(other) != of(first)) {
            return Err(Error::mismatch(format!(
                "a rank is in epoch {} of {} shards, another in epoch {} of {}",
                first.epoch,
                first.read.len(),
                other.epoch,
                other.read.len()
            ))
            .with_remedy("ask all ranks for their positions after the same step, or between two passes"));
        }
        if let Some(other) = others.iter().find(|other| other.seed != first.seed) {
            return Err(Error::mismatch(format!(
                "a rank's loader has the seed {}, another's {}",
                first.seed, other.seed
            ))
            .with_remedy("give the loaders of all ranks the same seed"));
        }
        let mut by_rank: Vec<&Self> = ranks.iter().collect();
        by_rank.sort_unstable_by_key(|one| one.part);
        let parts: Vec<Option<(u32, u32)>> = by_rank.iter().map(|one| one.part).collect();
        let world = first.part.map_or(0, |(_, world)| world);
        if parts.iter().copied().eq((0..world).map(|rank| Some((rank, world)))) {
            // Of each shard what the rank says that reads it: another one may have begun the pass elsewhere, as one that alone has resumed.
            let read = (0..first.read.len()).map(|shard| by_rank[shard % by_rank.len()].read[shard]);
            return Ok(Self { read: read.collect(), part: None, ..first.clone() });
        }
        Err(Error::invalid_argument(format!(
            "`StreamPosition::merged` needs the position of each rank once, and got those of {}",
            list(&parts)
        ))
        .with_remedy("give it `&group.all_gather_object(&loader.position())?`, of the loader's group"))
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

    /// Where it is, as ranks compare it: that of all ranks is the same on each, and within a pass each rank has its own.
    pub(super) fn describe(&self) -> String {
        let items = match self.part {
            None => {
                let items = self.read.iter().fold(0, |sum: u64, read| sum.saturating_add(*read));
                format!("behind {items} items (digest {:016x})", mix(&self.read))
            }
            Some(_) => "within a pass".to_owned(),
        };
        format!("epoch {} {items}", self.epoch)
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
        self.part = None;
    }

    /// Notes that it is this rank's from here on, unless it is noted already whose it is.
    pub(super) fn note(&mut self, (rank, world): (Rank, WorldSize)) {
        self.part.get_or_insert((rank.get(), world.get()));
    }

    /// This position for a loader of this rank that is at `own`, if it is one of as many shards and not another rank's; within a pass, if it is one
    /// of the same seed.
    pub(super) fn for_loader(&self, own: &Self, shard: (Rank, WorldSize)) -> Result<Self> {
        let (saved, here) = (self.read.len(), own.read.len());
        if saved != here {
            return Err(Error::invalid_argument(format!(
                "the position was saved with {saved} shards, the loader has {here}"
            ))
            .with_remedy(format!("build the loader with `.shards({saved})`")));
        }
        self.suffices(shard)?;
        if let Some(shard) = self.read.iter().position(|read| *read > MAX_READ) {
            return Err(Error::invalid_argument(format!(
                "the position says that {} items of shard {shard} were read, and no stream has so many",
                self.read[shard]
            ))
            .with_remedy("it is damaged: resume with another one, or begin anew"));
        }
        if self.seed != own.seed && self.read.iter().any(|read| *read > 0) {
            return Err(Error::invalid_argument(format!(
                "the position was saved within a pass of a loader with the seed {}, and this one has {}: a shard that is shuffled by its seed has \
                 another order now",
                self.seed, own.seed
            ))
            .with_remedy(format!("build the loader with `.seed({})`", self.seed)));
        }
        // Alone, a rank had all shards.
        Ok(Self { part: self.part.filter(|(_, world)| *world > 1), seed: own.seed, ..self.clone() })
    }

    /// Checks that it says how far the shards of this rank have been read.
    pub(super) fn suffices(&self, (rank, world): (Rank, WorldSize)) -> Result<()> {
        match self.part {
            Some((of, among)) if among > 1 && (of, among) != (rank.get(), world.get()) => {
                Err(Error::invalid_argument(format!(
                    "the position is that of rank {of} of {among} alone, without the shards of the others; \
                     the loader is rank {rank} of {world}"
                ))
                .with_remedy("save `StreamPosition::merged(&group.all_gather_object(&loader.position())?)?`"))
            }
            _ => Ok(()),
        }
    }
}

/// Positions that an error shows.
const SHOWN: usize = 8;

fn list(parts: &[Option<(u32, u32)>]) -> String {
    let shown = parts.iter().take(SHOWN).map(|part| match part {
        Some((rank, world)) => format!("rank {rank} of {world}"),
        None => "all ranks together".to_owned(),
    });
    let more = if parts.len() > SHOWN { ", .." } else { "" };
    format!("{}{more}", shown.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_behind_any_stream_is_refused() {
        let (own, shard) = (StreamPosition::start(2, 0), (Rank::MAIN, WorldSize::ONE));
        let at = |read| StreamPosition { read: vec![0, read], ..StreamPosition::start(2, 0) };
        assert_eq!(at(MAX_READ).for_loader(&own, shard).unwrap(), at(MAX_READ));
        let error = at(u64::MAX).for_loader(&own, shard).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("of shard 1"), "{error}");
    }
}
