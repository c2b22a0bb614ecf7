//! A communicator that goes from group to group, with an elastic job.

use std::fmt;
use std::thread;

use parking_lot::Mutex;
use phalanx::{Error, ProcessGroup, Result};

use super::Communicator;
use crate::cuda::Device;

/// The [`Communicator`] of the current group of an elastic job, for what lives longer than a group, as a
/// [`GroupHandle`](phalanx::GroupHandle) is for the host's.
pub struct CommunicatorHandle {
    device: Device,
    current: Mutex<Current>,
}

enum Current {
    Of(Communicator),
    /// The ranks of this group make one when they need it.
    Next(ProcessGroup),
}

impl CommunicatorHandle {
    /// Leads to `communicator`.
    pub fn new(communicator: Communicator) -> Self {
        Self { device: communicator.device().clone(), current: Mutex::new(Current::Of(communicator)) }
    }

    /// This rank's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// From now on it leads to a communicator of `group`. It calls no collective, and returns whether that is another group than before. The
    /// last communicator ends beside this thread; what its calls have may be written until it has.
    pub fn rebind(&self, group: &ProcessGroup) -> bool {
        let mut current = self.current.lock();
        let last = match &*current {
            Current::Of(communicator) => communicator.group(),
            Current::Next(group) => group,
        };
        if last.is_same(group) {
            return false;
        }
        let last = std::mem::replace(&mut *current, Current::Next(group.clone()));
        drop(current);
        // Its end may take seconds. Without a thread it is now.
        let _detached = thread::Builder::new().name("phalanx-nccl-end".into()).spawn(move || drop(last));
        true
    }

    /// The communicator of the current group. If there is none yet, the ranks make it, and every rank must call this, in the same order as the
    /// group's collectives.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn connect(&self) -> Result<Communicator> {
        let mut current = self.current.lock();
        let communicator = match &*current {
            Current::Of(communicator) => return Ok(communicator.clone()),
            Current::Next(group) => Communicator::new(group, &self.device)?,
        };
        *current = Current::Of(communicator.clone());
        Ok(communicator)
    }

    /// The failure of the communicator that there is, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        match &*self.current.lock() {
            Current::Of(communicator) => communicator.failure(),
            Current::Next(_) => None,
        }
    }
}

impl fmt::Debug for CommunicatorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("CommunicatorHandle");
        match &*self.current.lock() {
            Current::Of(communicator) => debug.field("current", communicator),
            Current::Next(group) => debug.field("next", group),
        };
        debug.finish()
    }
}
