//! The ranks among which parameters are sharded.

use std::fmt;
use std::sync::Arc;

use phalanx::{Error, ProcessGroup, Result};

use super::exchanges::Exchanges;

/// How units are gathered and freed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardingOptions {
    /// Whether a unit's parameters are freed after its forward pass, and gathered again for its backward pass.
    ///
    /// If so (ZeRO-3, PyTorch's `FULL_SHARD`), a rank has whole parameters of one unit and of those [ahead](Self::prefetch), and keeps of
    /// a unit's forward pass only its inputs: the backward pass computes the rest again, which is a third more work. If not (ZeRO-2,
    /// `SHARD_GRAD_OP`), all parameters and activations stay until the backward pass has used them, and a step sends a third less.
    /// Gradients of a unit are then scattered with its last one; if a parameter has none, only at the end of the backward pass, until when
    /// they stay whole.
    pub reshard_after_forward: bool,
    /// How many units are gathered ahead of their use, while the one before them computes; 0 for none. Each takes memory for its
    /// parameters.
    pub prefetch: usize,
    /// Before a unit's forward pass, and again before it is repeated, the device is seeded with a number made of this one, the rank, the
    /// unit's place in the pass, and a number that is drawn from the program's own, so that dropout drops the same. So what units drop follows
    /// the program's seed. After either pass the device continues with the program's own random numbers, as if one had been drawn: so does
    /// what is drawn outside of units. Not used where nothing is repeated.
    ///
    /// Seed the device before each step, and a run that continues from a checkpoint drops what it would have dropped.
    ///
    /// Random numbers belong to the process: another thread that draws during a pass of a unit changes what is dropped there, and what is
    /// dropped when the pass is repeated may then differ.
    pub seed: u64,
}

impl Default for ShardingOptions {
    fn default() -> Self {
        Self { reshard_after_forward: true, prefetch: 1, seed: 0 }
    }
}

/// The ranks among which the parameters of [units](super::FullySharded) are sharded. Each model needs one of its own.
#[doc(alias("ShardingStrategy", "HYBRID_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"))]
#[derive(Clone)]
pub struct ShardingGroup {
    pub(super) exchanges: Arc<Exchanges>,
}

impl ShardingGroup {
    /// Each of `group`'s ranks has one shard.
    ///
    /// # Errors
    /// If there is no memory for a group of this rank alone.
    pub fn new(group: &ProcessGroup) -> Result<Self> {
        Ok(Self::hybrid(group, &ProcessGroup::alone()?))
    }

    /// Each of `shard`'s ranks has one shard, and all of `replicate`'s ranks have the same one: parameters travel only within `shard`,
    /// such as the ranks of a host, and each gradient's shard is averaged over `replicate`. A unit's gradients are reduced and scattered while
    /// the unit before it computes its own, and the average over replicas follows, one for each unit. The groups are dimensions of one
    /// mesh; [`FullySharded::new`](super::FullySharded::new) refuses others.
    ///
    /// ```
    /// use phalanx::mesh::DeviceMesh;
    /// use phalanx_burn::parallel::fsdp::ShardingGroup;
    ///
    /// # fn show(group: &phalanx::ProcessGroup) -> phalanx::Result<()> {
    /// let mesh = DeviceMesh::new(group, &[("replicate", 2), ("shard", 2)])?; // four ranks; shards within hosts
    /// let sharding = ShardingGroup::hybrid(mesh.group("shard")?, mesh.group("replicate")?);
    /// # drop(sharding);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "HSDP")]
    pub fn hybrid(shard: &ProcessGroup, replicate: &ProcessGroup) -> Self {
        Self { exchanges: Exchanges::new(shard, replicate, ShardingOptions::default()) }
    }

    /// The same ranks with other options, which must be the same on every rank. Make units after this.
    #[must_use]
    pub fn with_options(self, options: ShardingOptions) -> Self {
        let Exchanges { group, replicas, .. } = &*self.exchanges;
        Self { exchanges: Exchanges::new(group, replicas, options) }
    }

    /// The number of shards.
    pub fn ranks(&self) -> usize {
        self.exchanges.ranks()
    }

    /// The number of this rank's shard.
    pub fn rank(&self) -> usize {
        self.exchanges.rank()
    }

    /// The cause, if an exchange has failed.
    pub fn failure(&self) -> Option<Error> {
        self.exchanges.check().err()
    }
}

impl fmt::Debug for ShardingGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardingGroup(rank {} of {})", self.rank(), self.ranks())
    }
}
