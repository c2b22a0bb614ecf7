//! Counts what a hook sends.
//!
//! Three calls between a bucket and its group are dynamic, once for each bucket, and each has a reason. This one counts
//! the bytes of whatever collectives a hook calls, and a hook may be the program's own. `JoinGroup` announces
//! collectives to ranks without data; outside of `join` it looks at a flag. The third is the group behind a
//! `GroupHandle`, which may be another in the next round, or a fake in a test. Two more calls are dynamic because others
//! write what is called: the hook, and the adapter's receiver of gradients.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::error::Result;
use crate::group::{Communicator, Work, forward_to_group};
use crate::rank::Rank;

/// A group that counts the bytes of all buffers given to it. Operations that move half as much as an all_reduce of the same buffer
/// count half.
pub(in super::super) struct Metered {
    group: Arc<dyn Communicator>,
    bytes: Arc<AtomicU64>,
}

impl Metered {
    pub(in super::super) fn new(group: Arc<dyn Communicator>) -> Self {
        Self { group, bytes: Arc::default() }
    }

    /// Another group whose bytes are added to the same count.
    pub(in super::super) fn of(&self, group: Arc<dyn Communicator>) -> Self {
        Self { group, bytes: self.bytes.clone() }
    }

    pub(in super::super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Communicator for Metered {
    forward_to_group!(self => self.group);

    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(self.of(self.group.in_call(caller)))
    }

    fn active_ranks(&self) -> usize {
        self.group.active_ranks()
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        self.count(buffer.as_bytes().len());
        self.group.all_reduce_async(buffer, op)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.count(buffer.as_bytes().len() / 2);
        self.group.broadcast_async(buffer, root)
    }

    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        self.count(buffer.as_bytes().len() / 2);
        self.group.reduce_scatter_v_async(buffer, counts, op)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        self.count(buffer.as_bytes().len() / 2);
        self.group.all_gather_v_in_place_async(buffer, counts)
    }
}
