//! A sampler of a group. It stands here because samplers know no group.

use super::ProcessGroup;
use crate::sampler::DistributedSampler;

impl DistributedSampler {
    /// As [`new`](Self::new), for this rank of `group`, whose size is the world's. Another group, a sub-group or the next
    /// round of an elastic job, takes a sampler of its own; [`ElasticSampler`](crate::sampler::ElasticSampler) goes on in
    /// the middle of an epoch instead.
    ///
    /// ```
    /// # use phalanx::{sampler::DistributedSampler, ProcessGroup};
    /// let group = ProcessGroup::alone()?;
    /// let sampler = DistributedSampler::for_group(10_000, &group).seed(42).drop_last(true);
    /// assert_eq!(sampler.len(), 10_000);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn for_group(samples: usize, group: &ProcessGroup) -> Self {
        Self::at(samples, group.rank(), group.world_size())
    }
}
