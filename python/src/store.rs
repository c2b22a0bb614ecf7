//! PyTorch's stores, as stores in which ranks meet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use phalanx::store::Store;
use phalanx::{Deadline, Error, Result};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// How long a wait sleeps between two looks, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));
/// A pause is longer than the one before by one part of these: whoever waits comes later than it could by a fifth of its wait at most, and a
/// thousand ranks that wait for long ask the store as seldom as with pauses that double.
const GROWTH: u32 = 4;

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

    fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::aborted("the program of this rank was interrupted while it joined the group")),
        }
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
        self.until("wait", first, deadline, || Ok(self.check(keys, deadline)?.then_some(())))
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
        self.call("compare_set", key, |py, store| {
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
        // Not every store of PyTorch has `multi_get`.
        keys.iter().map(|key| self.get_now(key)).collect()
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value, deadline))
    }
}
