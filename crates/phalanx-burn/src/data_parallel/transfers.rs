//! Bytes that are moved between devices, and the time that takes.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// Bytes that went from one device to another, and the time that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes that stay on their device do not count.
    pub bytes: usize,
    /// How many of them went through the host's memory: all, but over NCCL.
    pub host_bytes: usize,
    /// On the thread of the caller, which does nothing else meanwhile.
    pub time: Duration,
}

/// The transfers of data parallelism in one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Inputs to the replicas.
    pub scatter: Transfer,
    /// Parameters, and other state of the model, to the replicas.
    pub replicate: Transfer,
    /// Outputs from the replicas to the main device, and their gradients back.
    pub gather: Transfer,
    /// Gradients of parameters from the replicas to the main device.
    pub reduce: Transfer,
}

impl Transfers {
    /// All four together.
    pub fn total(&self) -> Transfer {
        let mut total = self.scatter;
        [self.replicate, self.gather, self.reduce].into_iter().for_each(|transfer| total += transfer);
        total
    }
}

impl Transfer {
    /// Adds the time of `work`, which adds its bytes.
    pub(super) fn measure<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let start = Instant::now();
        let outcome = work(self);
        self.time += start.elapsed();
        outcome
    }
}

impl AddAssign for Transfer {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.host_bytes += other.host_bytes;
        self.time += other.time;
    }
}
