//! A communicator: the ranks of a group, with a device each.
//!
//! A communicator is beside a group, and not one of its transports. A transport moves bytes of the host for collectives
//! that are made of steps; NCCL does whole collectives, on a device's stream. What the two share is the failure: the
//! group says which rank died, and ends when NCCL fails. So connections and heartbeats, of which NCCL has none, name
//! dead and frozen ranks.

mod call;
mod flight;
mod group_calls;
mod handle;
mod init;
mod launch;
mod operations;
mod record;
mod shared;
mod shrink;
mod siblings;
mod watchdog;
mod work;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};

pub use self::group_calls::GroupCalls;
pub use self::handle::CommunicatorHandle;
pub use self::record::{CallRecord, CallState};
use self::shared::Shared;
pub(crate) use self::siblings::Siblings;
use self::siblings::{Ending, Member};
pub use self::work::Work;
use crate::cuda::{Device, DeviceBuffer, Stream};

/// Collectives on the memory of CUDA devices, among the ranks of a [`ProcessGroup`], by NCCL. Clones are handles to the same.
///
/// All ranks make the same calls in the same order, as with the group. Each call is queued on a stream of the communicator, so
/// that it overlaps with what the device computes on others; [`after`](Self::after) lets it wait for another stream, and
/// [`Work::order`] another stream for it.
///
/// # Failures
/// The communicator fails with its group, and the group with it. If a rank dies, the group is aborted, NCCL reports an error or a
/// call's time-out passes, every rank aborts its communicator (`ncclCommAbort`), and all waiting and later calls return the
/// group's error, with the rank to blame, as far as it is known, and the call.
/// Nothing of NCCL compares calls: if ranks make different ones, they wait until the first time-out, unlike in the group.
///
/// ```no_run
/// use phalanx::ReduceOp;
/// use phalanx_nccl::{Communicator, Device, DeviceBuffer};
///
/// let group = phalanx::init()?;
/// let device = Device::of_local_rank(&group)?;
/// let nccl = Communicator::new(&group, &device)?;
/// let gradients = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 1024])?;
/// let work = nccl.all_reduce_async(gradients, ReduceOp::Avg)?; // the device works, this thread continues
/// let gradients = work.wait()?;
/// assert_eq!(gradients.to_vec(nccl.stream())?, [1.0; 1024]);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias("ncclComm_t", "ProcessGroupNCCL"))]
#[derive(Clone)]
pub struct Communicator {
    owner: Arc<Owner>,
    timeout: Duration,
}

/// How a [`Communicator`] works. Ranks need not choose the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// Whether NCCL's functions may wait inside NCCL, as `blocking` of `ncclConfig_t` says, and as in PyTorch. `NCCL_COMM_BLOCKING` goes
    /// before it.
    ///
    /// If not, which is the default, NCCL starts a thread for each launch of a communicator of more than one rank, and the caller waits
    /// until that thread has queued it. If so, the caller queues it itself, which is faster.
    ///
    /// Deadlines and failures are the same. But NCCL's documentation promises that `ncclCommAbort` may be called at any point only for
    /// communicators that are not blocking. The watchdog ends a launch that waits inside NCCL, such as the first call while ranks are connected,
    /// by aborting a blocking communicator under it, as PyTorch's watchdog does.
    pub blocking: bool,
}

/// Ends the communicator when the last handle is dropped.
struct Owner {
    shared: Arc<Shared>,
    /// What barriers reduce.
    token: DeviceBuffer<f32>,
    options: CommunicatorOptions,
    /// If the other ranks are of this process, too.
    member: Option<Member>,
    /// What tells it from all other communicators, the same on all its ranks.
    identity: Vec<u8>,
    /// Whether it is kept after a failure, so that it can be shrunk.
    is_shrinkable: AtomicBool,
    /// The watchdog and the poller.
    threads: Option<[JoinHandle<()>; 2]>,
}

impl Communicator {
    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.group().rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> WorldSize {
        self.group().world_size()
    }

    /// The group from which it was made.
    pub fn group(&self) -> &ProcessGroup {
        &self.owner.shared.group
    }

    /// This rank's device.
    pub fn device(&self) -> &Device {
        self.owner.shared.stream.device()
    }

    /// The stream on which its calls are queued. What is queued on it besides delays them.
    pub fn stream(&self) -> &Stream {
        &self.owner.shared.stream
    }

    /// The options with which it was made.
    pub fn options(&self) -> CommunicatorOptions {
        self.owner.options
    }

    /// What it has in common with those of the other devices, if they are of this process.
    pub(crate) fn siblings(&self) -> Option<Arc<Siblings>> {
        self.owner.member.as_ref().map(Member::siblings)
    }

    /// The version of NCCL, such as 22703 for 2.27.3.
    pub fn nccl_version(&self) -> i32 {
        self.owner.shared.nccl.version()
    }

    /// For a [`CommunicatorHandle`] of an elastic job: its next group may get a smaller communicator by `ncclCommShrink` of this one, and so may
    /// those that follow. [`CommunicatorHandle::connect`] says when.
    ///
    /// After a failure NCCL is stopped by `ncclCommRevoke`, where the library has it (2.28.7), and not aborted. The communicator then keeps what NCCL has
    /// on the device until it has been shrunk, or all handles to it are dropped.
    #[doc(alias("ncclCommShrink", "ncclCommRevoke"))]
    #[must_use]
    pub fn shrinkable(self) -> Self {
        if self.owner.shared.nccl.shrink.is_some() {
            self.owner.is_shrinkable.store(true, Ordering::Relaxed);
            self.owner.shared.want_kept();
        }
        self
    }

    /// Whether it is [`shrinkable`](Self::shrinkable), and the library can do that.
    pub fn is_shrinkable(&self) -> bool {
        self.owner.is_shrinkable.load(Ordering::Relaxed)
    }

    /// A handle to the same communicator whose calls have the time-out `timeout`.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// The time-out of its calls: at first the group's.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Lets later calls wait for what has been queued on `stream` so far, such as the kernels that compute what is to be reduced.
    /// No thread waits.
    ///
    /// # Errors
    /// If the driver refuses, or a graph is captured from the stream.
    pub fn after(&self, stream: &Stream) -> Result<&Self> {
        self.stream().wait_for(stream)?;
        Ok(self)
    }

    /// Ends the communicator and its group on every rank: pending and later calls fail with `cause`.
    pub fn abort(&self, cause: Error) {
        self.group().abort(cause);
        self.owner.shared.wake_watchdog();
    }

    /// The cause of the failure, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        self.owner.shared.failure().or_else(|| self.group().failure())
    }

    /// The failure, if calls were not done when it came: what these have written is worth nothing. None if the group has failed when all calls were
    /// done, as by another rank's death between two of them. It is known when a wait for the calls has returned, such as [`Stream::synchronize`].
    pub fn failure_of_calls(&self) -> Option<Error> {
        self.owner.shared.failure_of_calls()
    }

    /// The last 64 calls that are done, and those in flight, oldest first. After a failure they show, beside those of the other ranks, which
    /// rank has not made a call. `PHALANX_NCCL_RECORD` names a file to which each process adds them then, with its rank at the
    /// end of the name.
    #[doc(alias("flight recorder", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"))]
    pub fn calls(&self) -> Vec<CallRecord> {
        self.owner.shared.calls()
    }

    /// Has it failed, and may the device still use the memory of its calls? NCCL needs a moment to stop its kernels. Calls that
    /// fail wait for it, up to some seconds.
    pub fn is_aborting(&self) -> bool {
        self.owner.shared.is_aborting()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {} on {:?})", self.rank(), self.world_size(), self.device())
    }
}

impl Drop for Owner {
    /// Waits for the calls in flight, which have deadlines, and some seconds more: NCCL has no limit for the end.
    fn drop(&mut self) {
        let Some(threads) = self.threads.take() else { return };
        if !self.shared.is_own() {
            std::mem::forget(threads);
            return;
        }
        if std::thread::panicking() {
            // The others are not to wait for this rank.
            self.shared.group.abort(Error::aborted(format!("rank {} panicked", self.shared.group.rank())));
        }
        self.shared.close();
        let ending = Ending { shared: self.shared.clone(), threads };
        match &self.member {
            Some(member) => member.leave(ending).into_iter().for_each(Ending::wait),
            None => ending.wait(),
        }
    }
}
