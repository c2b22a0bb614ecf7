//! A call of NCCL's, from the work of the device that it waits for to its end.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::adapter::Comparison;
use phalanx::reducer::hooks::Pending;
use phalanx::{Error, Result};
use phalanx_nccl::Work;

/// How far the averaging of a bucket is. The memory of its call is `M`.
pub(super) enum Stage<M: Send + 'static> {
    /// The device computes it, or the thread has not come to it.
    Computing(Receiver<Result<Work<M>>>),
    Launched(Result<Work<M>>),
    Over,
}

impl<M: Send + 'static> Stage<M> {
    fn is_completed(&mut self) -> bool {
        if let Self::Computing(launching) = self {
            match launching.try_recv() {
                Ok(work) => *self = Self::Launched(work),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        !matches!(self, Self::Launched(Ok(work)) if !work.is_completed())
    }

    /// Runs `then` after the averaging, and after `comparison`, if there is one.
    pub fn then(
        self,
        timeout: Duration,
        comparison: Option<Comparison>,
        then: impl FnOnce() -> Result<Pending> + Send + 'static,
    ) -> Pending {
        let stage = Arc::new(Mutex::new(self));
        let under_way = stage.clone();
        Pending::elsewhere_then(
            move || under_way.lock().is_completed(),
            move || {
                comparison.map_or(Ok(()), Comparison::wait)?;
                let stage = std::mem::replace(&mut *stage.lock(), Self::Over);
                stage.wait(timeout)?;
                then()
            },
        )
    }

    /// Waits until the bucket is averaged: at most `timeout` for the device, and then for NCCL at most the time-out of its call.
    pub fn wait(self, timeout: Duration) -> Result<()> {
        let work = match self {
            Self::Computing(launching) => launching.recv_timeout(timeout).map_err(|cause| match cause {
                RecvTimeoutError::Disconnected => gone(),
                RecvTimeoutError::Timeout => Error::timeout(format!(
                    "the device has not computed a bucket of gradients, or NCCL has not taken its call, within {} s",
                    timeout.as_secs_f64()
                ))
                .with_remedy(
                    "see the device's own messages; where a step takes longer, the group needs a longer time-out",
                ),
            })?,
            Self::Launched(work) => work,
            Self::Over => return Ok(()),
        };
        work?.wait().map(drop)
    }
}

pub(super) fn gone() -> Error {
    Error::aborted("the thread that makes NCCL's calls has panicked, as its message on stderr says")
}
