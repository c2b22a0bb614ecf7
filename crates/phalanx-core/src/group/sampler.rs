//! The constructor of a sampler from a group. It is here because samplers do not depend on groups.

use super::ProcessGroup;
use crate::sampler::DistributedSampler;

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
}
