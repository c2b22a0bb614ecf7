//! Process groups: a handle through which a rank takes part in collectives.

mod work;

pub use work::Work;

use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::{Rank, WorldSize};
use crate::trace::Trace;

/// What a reducer needs of a group, and no more, so that a test can stand in for it.
pub trait Communicator: Send + Sync {
    /// This process's rank.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world_size(&self) -> WorldSize;

    /// Zeroed memory that the group can move without a further copy.
    fn alloc(&self, dtype: DType, elements: usize) -> Buffer;

    /// Starts to combine `buffer` with the other ranks' buffers; [`Work::wait`] gives the result on every rank.
    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work>;

    /// Starts to copy the root's `buffer` to every rank.
    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work>;

    /// Ends the group on every rank with `cause`: pending and later operations fail with it.
    fn abort(&self, cause: Error);

    /// Where this rank notes what happened when; see [`Trace`].
    fn trace(&self) -> Trace;
}

/// A handle to a group of ranks.
#[derive(Clone)]
pub struct ProcessGroup {}
