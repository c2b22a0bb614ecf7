//! How a group ends before its time: by this rank's will, another rank's failure, or an error that this rank tells the others.

use std::sync::atomic::Ordering;

use super::ProcessGroup;
use crate::error::Error;
use crate::rank::Rank;
use crate::worker_error;
use crate::world_size::WorldSize;

impl ProcessGroup {
    /// The cause of the group's failure, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        self.inner.health.cause().inspect(|_| self.inner.health.note_returned())
    }

    /// The cause of the group's failure, for a library that watches the group beside the program: which is not told of it by this.
    #[doc(hidden)]
    pub fn watched_failure(&self) -> Option<Error> {
        self.inner.health.cause()
    }

    /// As [`watched_failure`](Self::watched_failure), also when the group has been left: then it may be the error of leaving, too.
    #[doc(hidden)]
    pub fn watch(&self) -> impl Fn() -> Option<Error> + Send + 'static {
        let health = self.inner.health.clone();
        move || health.cause().or_else(|| health.parting())
    }

    /// As [`watched_failure`](Self::watched_failure), also when the group is gone, of which it keeps nothing: for what outlives the group, such as a
    /// loader that has divided its data among the group's ranks.
    #[doc(hidden)]
    pub fn watch_from_outside(&self) -> impl Fn() -> Option<Error> + Send + Sync + 'static {
        let first = self.inner.health.first();
        move || first.get().cloned()
    }

    /// Ends the group on every rank: pending and later operations fail with `cause`.
    pub fn abort(&self, cause: Error) {
        self.inner.aborted.store(true, Ordering::Relaxed);
        self.inner.health.fail(self.in_own_numbers(cause));
        // The program knows it.
        self.inner.health.note_returned();
    }

    /// Ends the group on every rank if this thread panics, as when its last handle is dropped. For a `drop` that waits for a disk before.
    /// In a world of one nobody waits, and a program that catches the panic may go on with the group.
    #[doc(hidden)]
    pub fn note_panic(&self) {
        if self.world_size() != WorldSize::ONE {
            self.inner.note_panic();
        }
    }

    /// Ends the group because of an `error` of a transport that an adapter has beside this crate's, unless the connections
    /// report within a moment what has caused it. Returns the group's failure.
    #[doc(hidden)]
    pub fn fail_unless_explained(&self, error: Error) -> Error {
        let cause = self.inner.health.explain(error);
        self.inner.health.fail(cause)
    }

    /// Ends the group because of an `error` with which this rank leaves a call of all ranks half-way, so that the others would wait for it in
    /// what is left: it `could_not` do a part. If the connections report within a moment what has caused it, that is the failure. Returns
    /// the group's failure.
    #[doc(hidden)]
    pub fn fail_half_way(&self, could_not: &str, error: &Error) -> Error {
        let cause =
            Error::aborted(format!("rank {} could not {could_not}: {}", self.rank(), error.full_cause()));
        let cause = match error.remedy() {
            Some(remedy) => cause.with_remedy(remedy),
            None => cause,
        };
        // No other rank knows more of what this one lacks.
        if error.is_invalid_argument() || error.is_out_of_memory() || error.is_local_shortage() {
            return self.inner.health.fail(cause);
        }
        self.fail_unless_explained(cause)
    }

    /// The error of an operation that waits for the ranks that `needs` names, if one of them has left the group. For adapters.
    #[doc(hidden)]
    pub fn left_by(&self, needs: impl Fn(Rank) -> bool) -> Option<Error> {
        let has_left = |rank: &Rank| needs(*rank) && self.inner.health.has_left(*rank);
        let peer = self.inner.world.ranks().find(has_left)?;
        Some(self.inner.health.peer_left(peer))
    }

    /// Ends the group because of another rank's failure.
    pub(crate) fn fail(&self, cause: Error) {
        self.inner.health.fail(cause);
    }

    /// Whether this rank has ended the group, whatever others have done. If so, its contribution to an operation may be lost.
    pub(crate) fn was_aborted(&self) -> bool {
        self.inner.aborted.load(Ordering::Relaxed)
    }

    /// Notes that a call has returned `cause` on this rank, the error of another rank, while the group stays usable.
    /// Returns it.
    #[doc(hidden)]
    pub fn note_remote_error(&self, cause: Error) -> Error {
        if let Some(culprit) = cause.peer().filter(|peer| *peer != self.rank()) {
            worker_error::blame(self.inner.config.global(culprit));
        }
        *self.inner.remote_error.lock() = Some((self.calls(), cause.clone()));
        cause
    }

    /// The error of another rank that the last call has returned on this one, if any. A program that has made another
    /// call since has gone on in spite of it.
    #[doc(hidden)]
    pub fn remote_error(&self) -> Option<Error> {
        let told = self.inner.remote_error.lock();
        told.as_ref().filter(|(calls, _)| *calls == self.calls()).map(|(_, cause)| cause.clone())
    }
}
