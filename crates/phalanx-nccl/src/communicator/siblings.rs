//! Communicators of several devices of this process, which one thread may drop one after the other.
//!
//! NCCL ends a communicator by a call of all its ranks (`ncclCommFinalize`), so that a rank that drops its communicator waits for the others. One
//! thread that has all of them would wait for itself, until the communicator is aborted. Here each is told to end, and the last one waits for
//! all. If the others do not come, the watchdog of each ends it as if they were of other processes.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::shared::Shared;
use super::watchdog::END_TIMEOUT;

/// The communicators of the devices of one process, and those of parts of them, by their identity, which is the same on all ranks.
#[derive(Default)]
pub(crate) struct Siblings(Mutex<HashMap<Vec<u8>, Members>>);

#[derive(Default)]
struct Members {
    /// How many are in use.
    here: usize,
    /// Those that are not any more.
    ending: Vec<Ending>,
}

/// A communicator that has been told to end.
pub(super) struct Ending {
    pub shared: Arc<Shared>,
    /// The watchdog and the poller.
    pub threads: [JoinHandle<()>; 2],
}

impl Ending {
    pub(super) fn wait(self) {
        // The memory of a call may have had the last handle, and the poller has dropped it: the threads end by themselves.
        let this = thread::current().id();
        if self.threads.iter().any(|thread| thread.thread().id() == this) {
            return;
        }
        // Their handles of the group must be gone before the program ends: else it would end without a goodbye.
        if self.shared.await_end(END_TIMEOUT) {
            self.threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

/// One of them.
pub(super) struct Member {
    siblings: Arc<Siblings>,
    identity: Vec<u8>,
}

impl Member {
    pub(super) fn join(siblings: Arc<Siblings>, identity: Vec<u8>) -> Self {
        siblings.0.lock().entry(identity.clone()).or_default().here += 1;
        Self { siblings, identity }
    }

    pub(super) fn siblings(&self) -> Arc<Siblings> {
        self.siblings.clone()
    }

    /// Whose end is to be waited for now: that of all by the last one, and by the others of none.
    pub(super) fn leave(&self, own: Ending) -> Vec<Ending> {
        let mut communicators = self.siblings.0.lock();
        let Some(members) = communicators.get_mut(&self.identity) else { return vec![own] };
        members.here = members.here.saturating_sub(1);
        members.ending.push(own);
        if members.here > 0 {
            return Vec::new();
        }
        communicators.remove(&self.identity).map_or_else(Vec::new, |members| members.ending)
    }
}
