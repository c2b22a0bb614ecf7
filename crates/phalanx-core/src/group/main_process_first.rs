//! One rank prepares what all read.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::ProcessGroup;
use super::config::Backend;
use super::remote_error::RemoteError;
use crate::caller::Caller;
use crate::error::Result;
use crate::host;

impl ProcessGroup {
    /// Runs `prepare` on rank 0, and then on all others: rank 0 downloads, unpacks or tokenizes, and the others find it done.
    /// Accelerate's `main_process_first`.
    ///
    /// Every rank must call it. `prepare` may call nothing of this group, since the others wait. They wait as long as the group's
    /// time-out; for what takes longer, call it on [`with_timeout`](Self::with_timeout).
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let cache = folder.path().join("tokens");
    /// let group = phalanx::init()?;
    /// let tokens = group.main_process_first(|| {
    ///     if !cache.exists() {
    ///         // Rank 0 alone. It gets its name when it is whole: a process that is killed leaves no half of it there.
    ///         let half_done = cache.with_extension("half-done");
    ///         std::fs::write(&half_done, "17 4 3").map_err(phalanx::Error::other)?;
    ///         std::fs::rename(&half_done, &cache).map_err(phalanx::Error::other)?;
    ///     }
    ///     std::fs::read_to_string(&cache).map_err(phalanx::Error::other) // all
    /// })?;
    /// assert_eq!(tokens, "17 4 3");
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// What `prepare` gives. If it fails on rank 0, or panics there, it runs nowhere else, and every rank gets that with its cause; the
    /// group remains sound. As [`all_gather_object`](Self::all_gather_object).
    pub fn main_process_first<T>(&self, prepare: impl FnOnce() -> Result<T>) -> Result<T> {
        self.in_call(Caller::MainProcessFirst).some_first(self.rank().is_main(), prepare)
    }

    /// [`main_process_first`](Self::main_process_first) on each host: runs `prepare` on the lowest rank of every host, and when it
    /// has run on all hosts, on the others. For what is prepared on a host's own disk.
    ///
    /// # Errors
    /// As [`main_process_first`](Self::main_process_first): a failure on one host is an error on all.
    pub fn local_main_process_first<T>(&self, prepare: impl FnOnce() -> Result<T>) -> Result<T> {
        let group = self.in_call(Caller::LocalMainProcessFirst);
        let hosts: Vec<String> = group.all_gather_object(&group.host_identity())?;
        let own = hosts.get(self.rank().index());
        let is_main = hosts.iter().position(|host| Some(host) == own) == Some(self.rank().index());
        group.some_first(is_main, prepare)
    }

    /// Runs `prepare` on the ranks that are `first`, and then on the others.
    fn some_first<T>(&self, first: bool, prepare: impl FnOnce() -> Result<T>) -> Result<T> {
        if !first {
            self.first_error_of_all(Ok(()))?;
            let _section = self.announce_section();
            return prepare();
        }
        self.told_to_all(prepare)
    }

    /// Runs `call` and tells the others whether it has failed, also if it panics, which goes on then. The first rank's error is that of every rank.
    /// For libraries.
    #[doc(hidden)]
    pub fn told_to_all<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        // It may take long, and the others wait for it.
        let section = self.announce_section();
        let outcome = catch_unwind(AssertUnwindSafe(call));
        drop(section);
        let told = match &outcome {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(RemoteError::of(error, self.rank())),
            Err(panic) => Err(RemoteError::of_panic(&**panic, self.rank())),
        };
        let heard = self.first_error_of_all(told);
        match outcome {
            Ok(outcome) => outcome.and_then(|value| heard.map(|()| value)),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Waits until all have come here. The first rank's error is that of every rank.
    fn first_error_of_all(&self, own: Result<(), RemoteError>) -> Result<()> {
        let all: Vec<Result<(), RemoteError>> = self.all_gather_object(&own)?;
        match all.into_iter().find_map(Result::err) {
            None => Ok(()),
            Some(failed) => {
                let operation = self.caller.map_or("main_process_first", Caller::name);
                Err(self.note_remote_error(failed.error().in_operation(operation, None)))
            }
        }
    }

    /// The same on all ranks that have their disk in common: those of one host, or of one container. For adapters.
    #[doc(hidden)]
    pub fn host_identity(&self) -> String {
        match &self.inner.config.backend {
            Backend::Process { .. } => "this process".to_owned(),
            Backend::Mesh { host_id: Some(id), .. } => id.clone(),
            Backend::Mesh { host_id: None, .. } => host::disk_id(),
        }
    }
}
