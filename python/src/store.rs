//! PyTorch's stores, as stores in which ranks meet.
//!
//! A `TCPStore` speaks a protocol that Phalanx's client speaks too. So a rank that makes more groups has a connection of its own to that
//! server, on which several requests go together and a wait ends when the key comes. PyTorch's client takes one request a round trip, and has
//! to be asked again and again. Both see the same keys.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::store::{SharedStore, Store, TcpStore};
use phalanx::{Deadline, Error, Result, count_there};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// How long a wait sleeps between two looks, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));
/// A pause is longer than the one before by one part of these: whoever waits comes later than it could by a fifth of its wait at most, and a
/// thousand ranks that wait for long ask the store as seldom as with pauses that double.
const GROWTH: u32 = 4;

/// A wait for more keys than these looks at one of them alone, as long as that is missing.
const LOOKED_AT_TOGETHER: usize = 32;

/// A `torch.distributed.Store`, of whatever kind.
///
/// Waits look again and again. PyTorch's `get` and `wait` hold a lock of the store until they end, so that another
/// thread of the process could not set the key for which they wait.
pub struct TorchStore {
    store: Py<PyAny>,
    given_up: GivenUp,
}

/// Whether nobody waits for a group any more that meets in a store.
#[derive(Clone, Default)]
pub struct GivenUp(Arc<AtomicBool>);

impl GivenUp {
    pub fn give_up(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_given_up(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<()> {
        match self.is_given_up() {
            false => Ok(()),
            true => Err(Error::aborted("the program of this rank was interrupted while it joined the group")),
        }
    }
}

/// How long a connection to a store's server may take that another client of this process has already: without it, that client is asked.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection of ours to the server of a `TCPStore`, for all groups that are made from one; made at the first use.
#[derive(Clone, Default)]
pub struct Connection(Arc<Mutex<Option<Option<Arc<TcpStore>>>>>);

impl Connection {
    /// Whether it has been made: the first use may wait for the server. Another thread may wait so now, and the caller has Python's lock.
    pub fn is_made(&self) -> bool {
        self.0.try_lock().is_some_and(|made| matches!(&*made, Some(Some(_))))
    }

    /// The keys at `address`; through the `other` client if there is no connection.
    pub fn store(&self, address: Option<&str>, other: Py<PyAny>, given_up: GivenUp) -> SharedStore {
        let connect = |address: &str| {
            let connected = TcpStore::connect(address, Deadline::after(CONNECT_TIMEOUT));
            connected.map(Arc::new).ok()
        };
        let direct =
            address.and_then(|address| self.0.lock().get_or_insert_with(|| connect(address)).clone());
        match direct {
            Some(store) => Arc::new(Direct { store, given_up }),
            None => Arc::new(TorchStore::new(other, given_up)),
        }
    }
}

/// Our client of a `TCPStore`'s server.
struct Direct {
    store: Arc<TcpStore>,
    given_up: GivenUp,
}

impl Direct {
    fn asked(&self) -> Result<&TcpStore> {
        self.given_up.check().map(|()| &*self.store)
    }
}

impl Store for Direct {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.asked()?.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let values = self.multi_get(&[key], deadline)?;
        values.into_iter().next().ok_or_else(|| Error::protocol("the store has answered without a value"))
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.multi_get(keys, deadline).map(drop)
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        self.asked()?.check(keys, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.asked()?.add(key, amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        // Also a rank that has given up: so it tells the others.
        self.store.compare_set(key, expected, desired, deadline)
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        self.asked()?.delete_key(key, deadline)
    }

    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.asked()?.delete_keys(keys, deadline)
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        self.asked()?.num_keys(deadline)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.asked()?.append(key, value, deadline)
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.set_and_get(&[], keys, deadline, &mut || Ok(()))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        self.asked()?.multi_set(pairs, deadline)
    }

    fn set_and_get(
        &self,
        pairs: &[(&str, &[u8])],
        keys: &[&str],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        let mut go_on = || self.given_up.check().and_then(|()| go_on());
        self.asked()?.set_and_get(pairs, keys, deadline, &mut go_on)
    }

    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        self.asked()?.multi_compare_set(changes, deadline)
    }

    fn compare_set_and_get(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        keys: &[&str],
        deadline: Deadline,
        found: &mut dyn FnMut(&[Vec<u8>]) -> Result<()>,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        let mut go_on = || self.given_up.check().and_then(|()| go_on());
        self.asked()?.compare_set_and_get(changes, keys, deadline, found, &mut go_on)
    }
}

impl TorchStore {
    pub fn new(store: Py<PyAny>, given_up: GivenUp) -> Self {
        Self { store, given_up }
    }

    fn call<T>(
        &self,
        operation: &str,
        key: &str,
        call: impl for<'py> FnOnce(Python<'py>, &Bound<'py, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        self.given_up.check()?;
        self.call_always(operation, key, call)
    }

    /// The same, also when nobody waits any more.
    fn call_always<T>(
        &self,
        operation: &str,
        key: &str,
        call: impl for<'py> FnOnce(Python<'py>, &Bound<'py, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        // Not at the interpreter's end, when a join may still run that was given up.
        let called = Python::try_attach(|py| call(py, self.store.bind(py)));
        let called = called.ok_or_else(|| Error::aborted("Python ends while this rank joins a group"))?;
        called.map_err(|error| {
            Error::other(error).with_remedy(format!("{operation} {key:?} in PyTorch's store failed"))
        })
    }

    /// The value of a key that is there.
    fn get_now(&self, key: &str) -> Result<Vec<u8>> {
        self.call("get", key, |py, store| bytes(&store.call_method1(intern!(py, "get"), (key,))?))
    }

    /// Whether the store answers several keys at once: not every store of PyTorch does.
    fn has_batches(&self) -> bool {
        let has = |py: Python<'_>| -> PyResult<bool> {
            self.store.bind(py).call_method0(intern!(py, "has_extended_api"))?.extract()
        };
        Python::try_attach(|py| has(py).unwrap_or(false)).unwrap_or(false)
    }

    /// How many of `keys` exist before the first that is missing; `known` of them do. If there are many, that one is looked at alone until it has
    /// come: all ranks ask the same server, and all keys each time would be as many as the square of the ranks.
    fn there(&self, keys: &[&str], known: usize, deadline: Deadline) -> Result<usize> {
        let are_there = |range: Range<usize>| match keys.get(range) {
            Some(keys) => self.check(keys, deadline),
            None => Ok(false),
        };
        if keys.len() - known <= LOOKED_AT_TOGETHER {
            return Ok(if are_there(known..keys.len())? { keys.len() } else { known });
        }
        count_there(keys.len(), known, are_there)
    }

    fn until<T>(
        &self,
        operation: &str,
        key: &str,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let mut pause = PAUSES.0;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if deadline.has_passed() {
                return Err(Error::timeout(format!("{operation} {key:?}: not set in time in PyTorch's store"))
                    .with_remedy("has the rank that sets it started, and does it still run? If it is only slow, raise the time-out"));
            }
            std::thread::sleep(pause.min(deadline.remaining()));
            pause = (pause + pause / GROWTH).min(PAUSES.1);
        }
    }
}

fn bytes(answer: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    Ok(answer.cast::<PyBytes>()?.as_bytes().to_vec())
}

impl Store for TorchStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        self.call("set", key, |py, store| {
            store.call_method1(intern!(py, "set"), (key, PyBytes::new(py, value))).map(drop)
        })
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.wait(&[key], deadline)?;
        self.get_now(key)
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let first = keys.first().copied().unwrap_or_default();
        let mut there = 0;
        self.until("wait", first, deadline, || {
            there = self.there(keys, there, deadline)?;
            Ok((there == keys.len()).then_some(()))
        })
    }

    fn check(&self, keys: &[&str], _deadline: Deadline) -> Result<bool> {
        let first = keys.first().copied().unwrap_or_default();
        self.call("check", first, |py, store| {
            store.call_method1(intern!(py, "check"), (keys.to_vec(),))?.extract()
        })
    }

    fn add(&self, key: &str, amount: i64, _deadline: Deadline) -> Result<i64> {
        self.call("add", key, |py, store| store.call_method1(intern!(py, "add"), (key, amount))?.extract())
    }

    fn compare_set(
        &self,
        key: &str,
        expected: &[u8],
        desired: &[u8],
        _deadline: Deadline,
    ) -> Result<Vec<u8>> {
        // So a rank that has given up tells the others.
        self.call_always("compare_set", key, |py, store| {
            let arguments = (key, PyBytes::new(py, expected), PyBytes::new(py, desired));
            bytes(&store.call_method1(intern!(py, "compare_set"), arguments)?)
        })
    }

    fn delete_key(&self, key: &str, _deadline: Deadline) -> Result<bool> {
        self.call("delete_key", key, |py, store| {
            store.call_method1(intern!(py, "delete_key"), (key,))?.extract()
        })
    }

    fn num_keys(&self, _deadline: Deadline) -> Result<usize> {
        self.call("num_keys", "", |py, store| store.call_method0(intern!(py, "num_keys"))?.extract())
    }

    fn append(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        self.call("append", key, |py, store| {
            store.call_method1(intern!(py, "append"), (key, PyBytes::new(py, value))).map(drop)
        })
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, deadline)?;
        match keys {
            // Most times each is a round trip.
            [first, _, ..] if self.has_batches() => self.call("multi_get", first, |py, store| {
                let values = store.call_method1(intern!(py, "multi_get"), (keys.to_vec(),))?;
                values.try_iter()?.map(|value| bytes(&value?)).collect()
            }),
            _ => keys.iter().map(|key| self.get_now(key)).collect(),
        }
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value, deadline))
    }
}
