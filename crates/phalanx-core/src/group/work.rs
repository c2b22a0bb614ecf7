//! Handles to operations in flight.
//!
//! A `Work` owns its buffer, so memory cannot be freed during a transfer. Dropping it detaches it, and does nothing
//! else: a wait inside `drop` would be hidden, and an abort would end the group, whose other ranks need this rank's
//! part.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{DEFAULT_TIMEOUT, Inner, ProcessGroup};
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;

/// An asynchronous operation that owns its buffer until it is done.
///
/// Wait for it with [`wait`](Self::wait), on a thread, or as a future, with any executor: the group's worker moves the
/// data and wakes the future, so it needs no runtime. The operation runs from the call on, whether the future is polled
/// or not, and so does its deadline.
///
/// Dropping a `Work` detaches it: the operation still runs, because the other ranks need this rank's part, and its
/// buffer is freed afterwards. A failure is not lost, because it ends the whole group.
///
/// ```
/// use phalanx::{Buffer, ProcessGroup, ReduceOp, Result};
/// async fn sums(group: &ProcessGroup, weights: Buffer, losses: Buffer) -> Result<(Buffer, Buffer)> {
///     let weights = group.all_reduce_async(weights, ReduceOp::Sum)?;
///     let losses = group.all_reduce_async(losses, ReduceOp::Sum)?; // both are under way
///     Ok((weights.await?, losses.await?))
/// }
/// ```
#[doc(alias = "Future")]
pub struct Work {
    slot: Arc<Slot>,
    /// None if it was never in flight.
    group: Option<Arc<Health>>,
    /// The group itself, which may end before the work.
    handle: Weak<Inner>,
}

struct Slot {
    state: Mutex<WorkState>,
    done: Condvar,
}

enum WorkState {
    /// In flight, with the waker of the task that has polled it, if any.
    InFlight(Option<Waker>),
    Done(Result<Buffer>),
    /// The outcome has been taken.
    Taken,
}

impl WorkState {
    /// The outcome, if it is there and was not taken before.
    fn take(&mut self) -> Option<Result<Buffer>> {
        match std::mem::replace(self, Self::Taken) {
            Self::Done(outcome) => Some(outcome),
            Self::Taken => {
                let error = Error::invalid_argument("the outcome of this work was taken already");
                Some(Err(error.with_remedy("wait once for each work, and keep what it returns")))
            }
            waiting @ Self::InFlight(_) => {
                *self = waiting;
                None
            }
        }
    }
}

/// The side that completes a [`Work`]. If it is dropped without an outcome (a panicked worker), the work fails.
#[doc(hidden)]
pub struct Completer {
    slot: Arc<Slot>,
}

impl Work {
    /// A work, and the handle that completes it.
    #[doc(hidden)]
    pub fn pending() -> (Self, Completer) {
        let slot = Arc::new(Slot { state: Mutex::new(WorkState::InFlight(None)), done: Condvar::new() });
        (Self { slot: slot.clone(), group: None, handle: Weak::new() }, Completer { slot })
    }

    /// As [`pending`](Self::pending), for a group of this health.
    pub(crate) fn pending_in(group: Arc<Health>) -> (Self, Completer) {
        let (work, completer) = Self::pending();
        (Self { group: Some(group), ..work }, completer)
    }

    /// The same of this group, which the work can abort.
    pub(super) fn of(self, group: &Arc<Inner>) -> Self {
        Self { handle: Arc::downgrade(group), ..self }
    }

    /// A work that is already done.
    pub fn ready(outcome: Result<Buffer>) -> Self {
        let (work, completer) = Self::pending();
        completer.complete(outcome);
        work
    }

    /// Whether it has succeeded or failed.
    #[doc(alias = "poll")]
    pub fn is_completed(&self) -> bool {
        !matches!(*self.slot.state.lock(), WorkState::InFlight(_))
    }

    /// The error, if it has failed. [`wait`](Self::wait) returns the same one.
    pub fn error(&self) -> Option<Error> {
        match &*self.slot.state.lock() {
            WorkState::Done(outcome) => outcome.as_ref().err().cloned().inspect(|_| self.note_returned()),
            WorkState::InFlight(_) | WorkState::Taken => None,
        }
    }

    /// The program has got the group's error.
    fn note_returned(&self) {
        if let Some(group) = &self.group {
            group.note_returned();
        }
    }

    /// Ends the operation, and with it its group on every rank, as [`ProcessGroup::abort`](crate::ProcessGroup::abort)
    /// does: the peers take part in the operation, so it cannot end only here. A work that is completed still returns
    /// its outcome.
    pub fn abort(&self, cause: Error) {
        match (self.handle.upgrade(), &self.group) {
            (Some(inner), _) => ProcessGroup { inner, timeout: DEFAULT_TIMEOUT, caller: None }.abort(cause),
            // The last handle is being dropped, and waits for this operation.
            (None, Some(group)) => {
                group.fail(cause);
                group.note_returned();
            }
            (None, None) => {}
        }
    }

    /// Waits for the end of the operation, and returns the buffer. The wait is limited by the deadlines of this
    /// operation and of those called before it.
    ///
    /// # Errors
    /// If the operation fails or its time passes: then the group has failed on every rank, and the error names the peer and the cause.
    #[doc(alias = "synchronize")]
    pub fn wait(self) -> Result<Buffer> {
        let mut state = self.slot.state.lock();
        loop {
            match state.take() {
                Some(outcome) => return outcome.inspect_err(|_| self.note_returned()),
                None => self.slot.done.wait(&mut state),
            }
        }
    }

    /// As [`wait_until`](Self::wait_until), for `timeout` from now.
    ///
    /// ```
    /// use std::time::Duration;
    /// use phalanx::{Buffer, DType, ProcessGroup, ReduceOp};
    /// let group = ProcessGroup::alone()?;
    /// let mut work = group.all_reduce_async(Buffer::zeroed(DType::F32, 8), ReduceOp::Sum)?;
    /// let buffer = loop {
    ///     match work.wait_timeout(Duration::from_millis(100)) {
    ///         Ok(outcome) => break outcome?,
    ///         Err(unfinished) => work = unfinished, // time to do something else
    ///     }
    /// };
    /// assert_eq!(buffer.len(), 8);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`wait_until`](Self::wait_until).
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<Buffer>, Self> {
        self.wait_until(Deadline::after(timeout))
    }

    /// Waits until `deadline`. If it passes first, the work itself is returned unchanged.
    ///
    /// # Errors
    /// The work itself, if it has not ended by then. The inner result is that of [`wait`](Self::wait).
    pub fn wait_until(self, deadline: Deadline) -> Result<Result<Buffer>, Self> {
        let mut state = self.slot.state.lock();
        let mut late = false;
        loop {
            match state.take() {
                Some(outcome) => return Ok(outcome.inspect_err(|_| self.note_returned())),
                None if late => break,
                None => late = self.slot.done.wait_until(&mut state, deadline.instant()).timed_out(),
            }
        }
        drop(state);
        Err(self)
    }
}

impl Future for Work {
    type Output = Result<Buffer>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker().clone();
        let mut state = self.slot.state.lock();
        if let Some(outcome) = state.take() {
            return Poll::Ready(outcome.inspect_err(|_| self.note_returned()));
        }
        let before = std::mem::replace(&mut *state, WorkState::InFlight(Some(waker)));
        drop(state);
        // It may be the last that holds a task, and drop whatever that has.
        drop(before);
        Poll::Pending
    }
}

impl Completer {
    #[doc(hidden)]
    pub fn complete(self, outcome: Result<Buffer>) {
        self.finish(outcome);
    }

    fn finish(&self, outcome: Result<Buffer>) {
        let mut state = self.slot.state.lock();
        if let WorkState::InFlight(waker) = &mut *state {
            let waker = waker.take();
            *state = WorkState::Done(outcome);
            drop(state);
            self.slot.done.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        // After `complete` this changes nothing.
        self.finish(Err(Error::aborted("the group's communication worker ended before the operation did")));
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_completed() { "Work(completed)" } else { "Work(in flight)" })
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;
    use std::thread::Thread;

    use super::*;
    use crate::{ProcessGroup, ReduceOp, WorldSize};

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// A minimal executor.
    fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => return output,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    /// Both outcomes, of works that are polled alternately.
    async fn join(mut left: Work, mut right: Work) -> (Result<Buffer>, Result<Buffer>) {
        let (mut first, mut second) = (None, None);
        poll_fn(|context| {
            for (work, outcome) in [(&mut left, &mut first), (&mut right, &mut second)] {
                if outcome.is_none()
                    && let Poll::Ready(done) = Pin::new(work).poll(context)
                {
                    *outcome = Some(done);
                }
            }
            match (first.take(), second.take()) {
                (Some(first), Some(second)) => Poll::Ready((first, second)),
                undone => {
                    (first, second) = undone;
                    Poll::Pending
                }
            }
        })
        .await
    }

    #[test]
    fn two_works_are_awaited_together() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let start = |value: f32| {
                        group.all_reduce_async(Buffer::from_slice(&[value; 3]), ReduceOp::Sum).unwrap()
                    };
                    let (small, large) = block_on(join(start(1.0), start(5.0)));
                    assert_eq!(small.unwrap().as_slice::<f32>().unwrap(), [2.0; 3]);
                    assert_eq!(large.unwrap().as_slice::<f32>().unwrap(), [10.0; 3]);
                });
            }
        });
    }

    #[test]
    fn who_has_polled_last_is_woken_and_the_outcome_is_given_once() {
        let (mut work, completer) = Work::pending();
        let forgotten = Arc::new(Unpark(std::thread::current()));
        let before = Waker::from(forgotten.clone());
        assert!(Pin::new(&mut work).poll(&mut Context::from_waker(&before)).is_pending());
        drop(before);
        let last = Arc::new(Unpark(std::thread::current()));
        let waker = Waker::from(last.clone());
        assert!(Pin::new(&mut work).poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!((Arc::strong_count(&forgotten), Arc::strong_count(&last)), (1, 3));
        assert!(!work.is_completed());
        completer.complete(Ok(Buffer::from_slice(&[7u8])));
        assert_eq!(Arc::strong_count(&last), 2, "it was woken, and let go");
        assert!(work.is_completed());
        assert_eq!(block_on(&mut work).unwrap().as_slice::<u8>().unwrap(), [7]);
        let again = block_on(&mut work).unwrap_err();
        assert!(again.to_string().contains("taken already"), "{again}");
        assert!(work.wait().unwrap_err().to_string().contains("taken already"));
    }

    #[test]
    fn a_waker_is_let_go_when_the_work_is_not_locked() {
        /// When it is dropped, it notes whether it could ask for the work's state.
        struct Asks(Arc<Slot>, Arc<AtomicBool>);

        impl Wake for Asks {
            fn wake(self: Arc<Self>) {}
        }

        impl Drop for Asks {
            fn drop(&mut self) {
                self.1.store(self.0.state.try_lock().is_some(), Ordering::Relaxed);
            }
        }

        let (mut work, _completer) = Work::pending();
        let could_ask = Arc::new(AtomicBool::new(false));
        let waker = Waker::from(Arc::new(Asks(work.slot.clone(), could_ask.clone())));
        assert!(Pin::new(&mut work).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        assert!(Pin::new(&mut work).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(could_ask.load(Ordering::Relaxed));
    }

    #[test]
    fn who_aborts_a_work_has_ended_its_group_as_by_the_group_itself() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let [group, other] = &groups[..] else { panic!("two ranks") };
        let work = group.all_reduce_async(Buffer::from_slice(&[1u8]), ReduceOp::Sum).unwrap();
        work.abort(Error::aborted("enough"));
        assert!(group.was_aborted() && !other.was_aborted());
        for error in [work.wait().unwrap_err(), other.barrier().unwrap_err()] {
            assert!(error.to_string().contains("enough"), "{error}");
        }
    }

    #[test]
    fn a_worker_that_ends_wakes_who_awaits_it() {
        let (work, completer) = Work::pending();
        let waiting = std::thread::spawn(move || block_on(work));
        drop(completer);
        assert!(waiting.join().unwrap().unwrap_err().is_aborted());
    }

    #[test]
    fn a_work_that_was_polled_can_still_be_waited_for_and_dropped() {
        let (mut work, completer) = Work::pending();
        assert!(Pin::new(&mut work).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let work = work.wait_timeout(Duration::ZERO).unwrap_err();
        completer.complete(Ok(Buffer::from_slice(&[1u8])));
        assert_eq!(work.wait_timeout(Duration::ZERO).unwrap().unwrap().len(), 1);
        let (work, completer) = Work::pending();
        drop(work);
        completer.complete(Ok(Buffer::from_slice(&[1u8])));
    }
}
