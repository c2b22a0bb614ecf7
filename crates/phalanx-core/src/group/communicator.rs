//! What a reducer, and whatever else stands on collectives, needs of a group: a trait that a test can fake.

use std::sync::Arc;

use super::{ProcessGroup, WeakHandle, Work};
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::trace::Trace;
use crate::world_size::WorldSize;

/// The operations of a group that a reducer needs, so that tests can replace the group.
pub trait Communicator: Send + Sync {
    /// This process's rank.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world_size(&self) -> WorldSize;

    /// Zeroed memory that the group can combine in place. An error if there is too little.
    fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer>;

    /// The same group, with its collectives as parts of a user's call: see [`ProcessGroup::in_call`].
    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator>;

    /// Starts to combine `buffer` with the other ranks' buffers; [`Work::wait`] returns the result on every rank.
    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work>;

    /// Starts to copy the root's `buffer` to every rank.
    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work>;

    /// Starts to combine `buffer` with the other ranks' buffers. Rank r gets `counts[r]` elements of the result, in the
    /// order of the ranks. [`Work::wait`] returns the buffer, in which only this rank's elements are specified.
    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work>;

    /// Starts to copy each rank's elements, which are in `buffer` as after a
    /// [`reduce_scatter_v_async`](Self::reduce_scatter_v_async), to every rank.
    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work>;

    /// Ends the group on every rank with `cause`: pending and later operations fail with it.
    fn abort(&self, cause: Error);

    /// The cause of the group's failure, if it has failed.
    fn failure(&self) -> Option<Error>;

    /// The recorder of this rank's events; see [`Trace`].
    fn trace(&self) -> Trace;

    /// How many ranks have data: fewer than all inside of a `join` whose first ranks are done.
    fn active_ranks(&self) -> usize {
        self.world_size().count()
    }

    /// By what an average over all ranks is multiplied to be that over the [ranks with data](Self::active_ranks), if the others give zeros: world size /
    /// active ranks.
    fn active_scale(&self) -> f64 {
        self.world_size().count() as f64 / self.active_ranks() as f64
    }

    /// How many times a `join` has ended in which some ranks had data for longer than others. The same on every rank.
    fn uneven_joins(&self) -> u64 {
        0
    }

    /// The group whose collectives these are; of a handle, its current one. None of what stands in for a group, such as a fake in a test.
    fn process_group(&self) -> Option<ProcessGroup> {
        None
    }

    /// What gives this handle again, and keeps no group. None of what has no clones, such as a fake in a test.
    #[doc(hidden)]
    fn weak_handle(&self) -> Option<WeakHandle> {
        None
    }
}

/// The methods of a [`Communicator`] that stands before another one, and leaves to it whatever is no collective.
macro_rules! forward_to_group {
    ($self:ident => $group:expr) => {
        fn rank(&$self) -> $crate::rank::Rank {
            $group.rank()
        }
        fn world_size(&$self) -> $crate::world_size::WorldSize {
            $group.world_size()
        }
        fn alloc(
            &$self,
            dtype: $crate::dtype::DType,
            elements: usize,
        ) -> $crate::error::Result<$crate::buffer::Buffer> {
            $group.alloc(dtype, elements)
        }
        fn abort(&$self, cause: $crate::error::Error) {
            $group.abort(cause);
        }
        fn failure(&$self) -> Option<$crate::error::Error> {
            $group.failure()
        }
        fn trace(&$self) -> $crate::trace::Trace {
            $group.trace()
        }
        fn process_group(&$self) -> Option<$crate::group::ProcessGroup> {
            $group.process_group()
        }
    };
}
pub(crate) use forward_to_group;

impl Communicator for ProcessGroup {
    fn rank(&self) -> Rank {
        self.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.world_size()
    }

    fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        self.alloc(dtype, elements)
    }

    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(self.in_call(caller))
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        self.all_reduce_async(buffer, op)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.broadcast_async(buffer, root)
    }

    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        self.reduce_scatter_v_async(buffer, counts, op)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        self.all_gather_v_in_place_async(buffer, counts)
    }

    fn abort(&self, cause: Error) {
        self.abort(cause);
    }

    fn failure(&self) -> Option<Error> {
        self.failure()
    }

    fn trace(&self) -> Trace {
        self.trace()
    }

    fn process_group(&self) -> Option<ProcessGroup> {
        Some(self.clone())
    }
}
