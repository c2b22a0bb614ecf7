//! Key-value stores through which ranks find each other.
//!
//! Names and behaviour are those of PyTorch's c10d stores. Keys are at most [`MAX_KEY`] bytes, values at most
//! [`MAX_VALUE`]. Every operation obeys its deadline.

mod call;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod memory;
mod prefix;
mod tcp;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod watched;

use std::sync::Arc;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::Result;
use phalanx_proto::store::table;

#[cfg(feature = "etcd")]
#[doc(hidden)]
pub use etcd::EtcdStore;
#[cfg(all(feature = "etcd", any(test, fuzzing, feature = "fuzzing")))]
pub use etcd::fuzz as fuzz_etcd;
pub use file::FileStore;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use file::fuzz as fuzz_log;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use tcp::fuzz as fuzz_reply;
#[cfg(test)]
pub(crate) use tcp::tests::far_away;
pub use tcp::{
    Access, AtEnd, KeylessClients, MAX_RANKS, Patience, Refusals, addresses_to_serve, host_port, listen,
    resolve, warn_of_own_name,
};
pub use tcp::{TcpStore, TcpStoreServer};
#[doc(hidden)]
#[cfg(test)]
pub(crate) use watched::{Request, Watched, checking, pressed_beside_a_wait, slow_beside_a_wait};

pub use crate::wire::store::{MAX_KEY, MAX_VALUE};

/// How often a wait calls what may end it.
pub(crate) const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// A key-value store that all ranks of a job share.
pub trait Store: Send + Sync {
    /// Writes `value`, replacing any earlier one.
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()>;

    /// The value of `key`; waits until it has been set.
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>>;

    /// Waits until every key exists.
    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()>;

    /// Whether every key exists now.
    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool>;

    /// Adds to a decimal counter, which starts at 0, and returns the sum.
    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64>;

    /// Writes `desired` if the value is `expected`, or if the key is absent and `expected` is empty.
    /// Returns the value after the call; if the key is absent and nothing was written, `expected` itself,
    /// as PyTorch's stores do.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>>;

    /// Removes `key`. Returns whether it existed.
    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool>;

    /// Removes all `keys`, whether they exist or not. A store at the end of a network does that in few round trips. If it fails, some may be
    /// removed.
    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        keys.iter().try_for_each(|key| self.delete_key(key, deadline).map(drop))
    }

    /// The number of keys.
    fn num_keys(&self, deadline: Deadline) -> Result<usize>;

    /// Appends to the value of `key`, which starts empty.
    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()>;

    /// The values of all `keys`, in their order; waits until all have been set.
    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>>;

    /// Writes all pairs; none, if a key or a value is too long.
    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()>;

    /// Writes all `pairs`, as [`multi_set`](Self::multi_set) does, and then returns the values of all `keys`, as
    /// [`multi_get`](Self::multi_get) does: ranks so exchange what each has. It is no atomic operation, and others' calls may come in
    /// between.
    ///
    /// While it waits it calls `go_on` several times a second. `Ok` of that means that it is to wait on. An error ends the wait at once, and
    /// is returned; the pairs stay written.
    ///
    /// A store at the end of a slow network does both in one round trip, and does not interrupt its wait for `go_on`. The default
    /// waits in parts, which suits a store on this host.
    fn set_and_get(
        &self,
        pairs: &[(&str, &[u8])],
        keys: &[&str],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        if !pairs.is_empty() {
            self.multi_set(pairs, deadline)?;
        }
        loop {
            match self.multi_get(keys, deadline.at_most(WATCH_INTERVAL)) {
                Err(error) if error.is_timeout() && !deadline.has_passed() => go_on()?,
                outcome => return outcome,
            }
        }
    }

    /// Calls [`compare_set`](Self::compare_set) with each `(key, expected, desired)` in turn, and returns the values. A store at the
    /// end of a network does that in one round trip.
    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        changes
            .iter()
            .map(|(key, expected, desired)| self.compare_set(key, expected, desired, deadline))
            .collect()
    }

    /// Waits until `before` exists, and then makes the `changes`, as [`multi_compare_set`](Self::multi_compare_set) does. None if `before`
    /// does not exist at `until`: then nothing is changed.
    ///
    /// A store that this library serves makes them by itself, one after the other, as soon as `before` is there. So those that wait for
    /// each other's changes need a few round trips together, and not one each.
    fn multi_compare_set_after(
        &self,
        before: &str,
        changes: &[(&str, &[u8], &[u8])],
        until: Deadline,
        deadline: Deadline,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        compare_set_after(self, self.wait(&[before], until.min(deadline)), changes, deadline)
    }

    /// Makes the `changes`, as [`multi_compare_set`](Self::multi_compare_set) does, gives the values to `found`, and then returns the values
    /// of all `keys`, as [`set_and_get`](Self::set_and_get) does. An error of `found` ends the call before it waits, and is returned; what
    /// was changed stays changed.
    ///
    /// A store at the end of a network does both in one round trip.
    fn compare_set_and_get(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        keys: &[&str],
        deadline: Deadline,
        found: &mut dyn FnMut(&[Vec<u8>]) -> Result<()>,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        found(&self.multi_compare_set(changes, deadline)?)?;
        self.set_and_get(&[], keys, deadline, go_on)
    }
}

/// The second half of [`Store::multi_compare_set_after`], after the wait.
fn compare_set_after<S: Store + ?Sized>(
    store: &S,
    waited: Result<()>,
    changes: &[(&str, &[u8], &[u8])],
    deadline: Deadline,
) -> Result<Option<Vec<Vec<u8>>>> {
    match waited {
        Ok(()) => store.multi_compare_set(changes, deadline).map(Some),
        Err(error) if error.is_timeout() && !deadline.has_passed() => Ok(None),
        Err(error) => Err(error),
    }
}

/// So many keys are asked for in one request.
const ASKED_TOGETHER: usize = 512;
/// What nobody writes.
const NO_VALUE: &[u8] = b"nobody has written this";

/// Whether each of `keys` is there, as far as `store` says so by `deadline`, without a wait. On a slow network there is no time to ask for each by
/// itself.
pub(crate) fn are_there<'a>(
    store: &'a dyn Store,
    keys: &'a [String],
    deadline: Deadline,
) -> impl Iterator<Item = Option<bool>> + 'a {
    keys.chunks(ASKED_TOGETHER).flat_map(move |keys| {
        // They change nothing, and say what is there.
        let questions: Vec<(&str, &[u8], &[u8])> =
            keys.iter().map(|key| (key.as_str(), NO_VALUE, NO_VALUE)).collect();
        let values = store.multi_compare_set(&questions, deadline).ok();
        (0..keys.len()).map(move |index| Some(values.as_ref()?.get(index)? != NO_VALUE))
    })
}

/// A store that a group and others share.
pub type SharedStore = Arc<dyn Store>;
