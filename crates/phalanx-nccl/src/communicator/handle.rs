//! A communicator that goes from group to group, with an elastic job.

use std::fmt;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::{Error, ProcessGroup, Result};

use super::{Communicator, CommunicatorOptions};
use crate::cuda::Device;

/// The [`Communicator`] of the current group of an elastic job, for what lives longer than a group, as a
/// [`GroupHandle`](phalanx::GroupHandle) is for the host's.
pub struct CommunicatorHandle {
    device: Device,
    options: CommunicatorOptions,
    timeout: Duration,
    current: Mutex<Current>,
}

enum Current {
    Of(Communicator),
    /// The ranks of this group make one when they need it.
    Next(ProcessGroup),
}

impl CommunicatorHandle {
    /// Leads to `communicator`, whose device, options and time-out those of later groups have, too.
    pub fn new(communicator: Communicator) -> Self {
        Self {
            device: communicator.device().clone(),
            options: communicator.options(),
            timeout: communicator.timeout(),
            current: Mutex::new(Current::Of(communicator)),
        }
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
    /// group's collectives. NCCL has connected the ranks when this returns.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn connect(&self) -> Result<Communicator> {
        let group = match &*self.current.lock() {
            Current::Of(communicator) => return Ok(communicator.clone()),
            Current::Next(group) => group.clone(),
        };
        let communicator = Communicator::with_options(&group, &self.device, self.options)?;
        let communicator = communicator.with_timeout(self.timeout);
        communicator.barrier()?; // NCCL connects in the first call.
        let mut current = self.current.lock();
        if matches!(&*current, Current::Next(next) if next.is_same(&group)) {
            *current = Current::Of(communicator.clone());
        }
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
