//! A communicator that goes from group to group, with an elastic job.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::{Error, ProcessGroup, Result};

use super::{Communicator, CommunicatorOptions, Siblings};
use crate::cuda::Device;

/// The [`Communicator`] of the current group of an elastic job, for what lives longer than a group, as a
/// [`GroupHandle`](phalanx::GroupHandle) is for the host's.
pub struct CommunicatorHandle {
    device: Device,
    options: CommunicatorOptions,
    timeout: Duration,
    is_shrinkable: bool,
    siblings: Option<Arc<Siblings>>,
    current: Mutex<Current>,
}

enum Current {
    Of(Communicator),
    /// The ranks of this group make one when they need it, if possible by shrinking the last one.
    Next(ProcessGroup, Option<Communicator>),
}

impl CommunicatorHandle {
    /// Leads to `communicator`, whose device, options and time-out those of later groups have, too.
    pub fn new(communicator: Communicator) -> Self {
        Self {
            device: communicator.device().clone(),
            options: communicator.options(),
            timeout: communicator.timeout(),
            is_shrinkable: communicator.is_shrinkable(),
            siblings: communicator.siblings(),
            current: Mutex::new(Current::Of(communicator)),
        }
    }

    /// Leads to a communicator of `group`, a smaller group of this process, beside those of this handle: of the same device, with the same options, and
    /// with the group's time-out. The ranks of `group` make it with the first [`connect`](Self::connect).
    #[must_use]
    pub fn subgroup(&self, group: &ProcessGroup) -> Self {
        Self {
            device: self.device.clone(),
            options: self.options,
            timeout: group.timeout(),
            is_shrinkable: self.is_shrinkable,
            siblings: self.siblings.clone(),
            current: Mutex::new(Current::Next(group.clone(), None)),
        }
    }

    /// This rank's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// From now on it leads to a communicator of `group`. It calls no collective, and returns whether that is another group than before. The
    /// last communicator ends beside this thread, at once or when the next one has been made; what its calls have may be written until it has.
    pub fn rebind(&self, group: &ProcessGroup) -> bool {
        let mut current = self.current.lock();
        let last = match &*current {
            Current::Of(communicator) => communicator.group(),
            Current::Next(group, _) => group,
        };
        if last.is_same(group) {
            return false;
        }
        let last = match std::mem::replace(&mut *current, Current::Next(group.clone(), None)) {
            Current::Of(last) => Some(last),
            Current::Next(_, last) => last,
        };
        let ranks = group.world_size().get();
        let (kept, over): (Vec<_>, Vec<_>) = last
            .into_iter()
            .partition(|last| last.is_shrinkable() && ranks > 1 && ranks < last.world_size().get());
        *current = Current::Next(group.clone(), kept.into_iter().next());
        drop(current);
        end_beside(over.into_iter().next());
        true
    }

    /// The communicator of the current group. If there is none yet, the ranks make it, and every rank must call this, in the same order as the
    /// group's collectives. NCCL has connected the ranks when this returns.
    ///
    /// It is what `ncclCommShrink` makes of the last one, if that is [shrinkable](Communicator::shrinkable) and: all ranks of this group have it, in this
    /// order, and not all of its ranks are in this group; and it was stopped by `ncclCommRevoke` after a failure, or has not failed,
    /// has no call in flight, and only this handle leads to it. Otherwise, or if NCCL cannot do it on one rank, it is made as by [`Communicator::new`].
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn connect(&self) -> Result<Communicator> {
        let (group, last) = match &mut *self.current.lock() {
            Current::Of(communicator) => return Ok(communicator.clone()),
            Current::Next(group, last) => (group.clone(), last.take()),
        };
        let siblings = self.siblings.clone();
        let made = Communicator::made(&group, &self.device, self.options, (last.as_ref(), siblings));
        if let Some(last) = &last {
            last.release();
        }
        end_beside(last);
        let communicator = made?.with_timeout(self.timeout);
        let communicator = if self.is_shrinkable { communicator.shrinkable() } else { communicator };
        communicator.barrier()?; // NCCL connects in the first call.
        let mut current = self.current.lock();
        if matches!(&*current, Current::Next(next, _) if next.is_same(&group)) {
            *current = Current::Of(communicator.clone());
        }
        Ok(communicator)
    }

    /// The communicator of the current group, if its ranks have made one.
    pub fn current(&self) -> Option<Communicator> {
        match &*self.current.lock() {
            Current::Of(communicator) => Some(communicator.clone()),
            Current::Next(..) => None,
        }
    }

    /// The failure of the communicator that there is, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        self.current().and_then(|communicator| communicator.failure())
    }
}

/// Its end may take seconds. Without a thread it is now.
fn end_beside(last: Option<Communicator>) {
    if let Some(last) = last {
        let _detached = thread::Builder::new().name("phalanx-nccl-end".into()).spawn(move || drop(last));
    }
}

impl fmt::Debug for CommunicatorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("CommunicatorHandle");
        match &*self.current.lock() {
            Current::Of(communicator) => debug.field("current", communicator),
            Current::Next(group, _) => debug.field("next", group),
        };
        debug.finish()
    }
}
