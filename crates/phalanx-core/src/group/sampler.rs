//! What samplers do with a group. It is here because samplers do not depend on groups.

use super::ProcessGroup;
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::sampler::DistributedSampler;
use crate::world_size::WorldSize;

impl DistributedSampler {
    /// As [`new`](Self::new), for this rank of `group`. For another group, such as a sub-group or the next round of an
    /// elastic job, make a new sampler, or use [`ElasticSampler`](crate::sampler::ElasticSampler), which continues in the
    /// middle of an epoch.
    ///
    /// ```
    /// # use phalanx::{sampler::DistributedSampler, ProcessGroup};
    /// let group = ProcessGroup::alone()?;
    /// let sampler = DistributedSampler::for_group(10_000, &group).seed(42).drop_last(true);
    /// assert_eq!(sampler.len(), 10_000);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Panics
    /// If no memory can hold an order of so many samples. [`new`](Self::new) returns an error instead.
    pub fn for_group(samples: usize, group: &ProcessGroup) -> Self {
        Self::at(samples, group.rank(), group.world_size())
    }

    /// Checks that all ranks of `group` have the same number of samples and options, where they shuffle also the same seed and epoch, and each its
    /// own part. All ranks call it together, such as once before the first epoch. Nothing else compares them, as in PyTorch: ranks that differ
    /// would train on some samples twice, and on others not at all.
    ///
    /// ```
    /// # use phalanx::sampler::DistributedSampler;
    /// let group = phalanx::init()?;
    /// let sampler = DistributedSampler::for_group(10_000, &group).seed(42);
    /// sampler.check_ranks(&group)?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank, if a rank's sampler differs from rank 0's, with both, or if the samples are not divided among the ranks of `group`
    /// ([`is_mismatch`](Error::is_mismatch)).
    pub fn check_ranks(&self, group: &ProcessGroup) -> Result<()> {
        group.check_parts("sampler", (self.rank(), self.world_size()), &self.describe())
    }
}

impl ProcessGroup {
    /// Checks that what each rank takes, such as its sampler, is the rank's own part of the same whole: the place of the part, and the whole
    /// in words. All ranks call it together.
    #[doc(hidden)]
    pub fn check_parts(&self, what: &str, place: (Rank, WorldSize), whole: &str) -> Result<()> {
        let (own, (rank, world)) = ((self.rank(), self.world_size()), place);
        let part = match place == own {
            true => format!("its own part among {world} ranks"),
            false => format!("the part of rank {rank} of {world}"),
        };
        let all: Vec<String> =
            self.in_call(Caller::CheckRanks).all_gather_object(&format!("{part}: {whole}"))?;
        let other = self.world_size().ranks().zip(&all).find(|(_, other)| Some(*other) != all.first());
        if let (Some(main), Some((rank, theirs))) = (all.first(), other) {
            return Err(Error::mismatch(format!(
                "the {what} of rank 0 is {main}, and that of rank {rank} is {theirs}"
            ))
            .with_peer(rank)
            .with_remedy("give every rank the same, and its own part of it"));
        }
        if place == own {
            return Ok(());
        }
        // All ranks come to here: what they have is the same.
        Err(Error::mismatch(format!(
            "the {what} gives each rank the part of rank {rank} of {world}, and there are {} ranks",
            own.1
        ))
        .with_remedy(format!("make the {what} for this group")))
    }
}
