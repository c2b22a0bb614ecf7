//! Calls in flight.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::Shared;
use super::payload::{Received, read};
use super::pool::Pool;
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::Work;
use crate::rank::Rank;

/// A call whose result may not have come yet. If it is dropped, the function still runs, and its result is lost.
#[doc(alias = "Future")]
#[must_use = "the result, and a failure, come from wait"]
pub struct PendingCall<R> {
    shared: Arc<Shared>,
    work: Work,
    to: Rank,
    name: String,
    timeout: Duration,
    deadline: Deadline,
    _result: PhantomData<fn() -> R>,
}

impl<R> PendingCall<R> {
    pub(super) fn new(
        shared: Arc<Shared>,
        work: Work,
        to: Rank,
        name: &str,
        timeout: Duration,
        deadline: Deadline,
    ) -> Self {
        Self { shared, work, to, name: name.to_owned(), timeout, deadline, _result: PhantomData }
    }

    /// Whether it has been answered, or has failed. A call is not completed merely because its time-out has passed.
    #[doc(alias = "done")]
    pub fn is_completed(&self) -> bool {
        self.work.is_completed()
    }

    fn operation(&self) -> String {
        format!("rpc {:?} on rank {}", self.name, self.to)
    }

    fn late(&self) -> Error {
        let cause = format!("rank {} has not answered within {:.1} s", self.to, self.timeout.as_secs_f64());
        let remedy = match self.timeout.is_zero() {
            true => "give calls time: Duration::MAX waits without an end, as 0 does in PyTorch",
            false => {
                "is its handler slow, or do its handlers wait for each other? Rpc::with_timeout gives calls more time"
            }
        };
        Error::timeout(cause).with_peer(self.to).with_remedy(remedy)
    }
}

impl<R: DeserializeOwned> PendingCall<R> {
    /// Waits for the result, as long as the time-out of the handle with which it was called.
    ///
    /// # Errors
    /// As [`Rpc::call`](super::Rpc::call).
    pub fn wait(self) -> Result<R> {
        let deadline = self.deadline;
        match self.wait_until(deadline) {
            Ok(outcome) => outcome,
            Err(call) => Err(call.shared.located(call.late(), call.operation())),
        }
    }

    /// Waits for the result, but no longer than `timeout`.
    ///
    /// # Errors
    /// The call itself, if `timeout` passes first. An error of [`wait`](Self::wait) is the result: the call's own time-out stands.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<R>, Self> {
        let deadline = self.deadline.at_most(timeout);
        match self.wait_until(deadline) {
            Err(call) if call.deadline.has_passed() => {
                Ok(Err(call.shared.located(call.late(), call.operation())))
            }
            outcome => outcome,
        }
    }

    fn wait_until(self, deadline: Deadline) -> Result<Result<R>, Self> {
        let Self { shared, work, to, name, timeout, deadline: last, .. } = self;
        match Pool::waiting(|| work.wait_until(deadline)) {
            Ok(outcome) => {
                let result = outcome.and_then(|answer| read_result(&shared, answer, &name, to));
                Ok(result.map_err(|error| shared.located(error, format!("rpc {name:?} on rank {to}"))))
            }
            Err(work) => Err(Self { shared, work, to, name, timeout, deadline: last, _result: PhantomData }),
        }
    }
}

fn read_result<R: DeserializeOwned>(shared: &Shared, result: Buffer, name: &str, to: Rank) -> Result<R> {
    read(&Received::new(result, &shared.spare), 0).map_err(|why| {
        Error::mismatch(format!(
            "rank {} cannot read the result of {name:?} that rank {to} has sent as {}: {why}",
            shared.rank,
            std::any::type_name::<R>()
        ))
        .with_peer(to)
        .with_remedy("caller and handler must have the same types")
    })
}

impl<R> std::fmt::Debug for PendingCall<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = if self.is_completed() { "completed" } else { "in flight" };
        write!(f, "PendingCall({}, {state})", self.operation())
    }
}
