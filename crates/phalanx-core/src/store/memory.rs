//! A store for ranks that are threads of one process.

use std::slice::from_ref;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Store;
use super::call::Call;
use super::table::{Refusal, Table};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::interrupt;

const NAME: &str = "the in-process store";

/// A store within one process.
///
/// ```
/// use std::time::Duration;
/// use phalanx::Deadline;
/// use phalanx::store::{MemoryStore, Store};
///
/// let store = MemoryStore::new();
/// assert_eq!(store.add("arrived", 1, Deadline::after(Duration::from_secs(1)))?, 1);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias = "HashStore")]
#[derive(Debug, Default)]
pub struct MemoryStore {
    table: Mutex<Table>,
    changed: Condvar,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes the table and wakes waiting threads.
    fn change<T>(&self, call: &Call<'_>, change: impl FnOnce(&mut Table) -> Result<T, Refusal>) -> Result<T> {
        let result = change(&mut self.table.lock());
        self.changed.notify_all();
        result.map_err(|refusal| call.refused(&refusal))
    }

    /// Reads from the table when all keys of the call exist.
    fn read<T>(&self, call: &Call<'_>, mut read: impl FnMut(&Table) -> Option<T>) -> Result<T> {
        let mut table = self.table.lock();
        let mut late = false;
        loop {
            if call.keys.iter().all(|key| table.contains(key.as_bytes()))
                && let Some(value) = read(&table)
            {
                return Ok(value);
            }
            if late {
                return Err(call.timed_out());
            }
            self.changed.wait_for(&mut table, interrupt::at_most(call.deadline.remaining()));
            // It may run code of the program, which may use the store.
            MutexGuard::unlocked(&mut table, interrupt::check)?;
            // A key that was set just before the deadline is still seen.
            late = call.deadline.has_passed();
        }
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(NAME, "set", from_ref(&key), deadline)?;
        self.change(&call, |table| table.set(key.as_bytes(), value))
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(NAME, "get", from_ref(&key), deadline)?;
        self.read(&call, |table| table.get(key.as_bytes()).map(|value| value.to_vec()))
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(NAME, "wait", keys, deadline)?;
        self.read(&call, |_| Some(()))
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        Call::new(NAME, "check", keys, deadline)?;
        let table = self.table.lock();
        Ok(keys.iter().all(|key| table.contains(key.as_bytes())))
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        let call = Call::new(NAME, "add", from_ref(&key), deadline)?;
        self.change(&call, |table| table.add(key.as_bytes(), amount))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(NAME, "compare_set", from_ref(&key), deadline)?;
        self.change(&call, |table| Ok(table.compare_set(key.as_bytes(), expected, desired)?.0.to_vec()))
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        Call::new(NAME, "delete_key", &[key], deadline)?;
        Ok(self.table.lock().delete(key.as_bytes()))
    }

    fn num_keys(&self, _deadline: Deadline) -> Result<usize> {
        Ok(self.table.lock().len())
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(NAME, "append", from_ref(&key), deadline)?;
        self.change(&call, |table| table.append(key.as_bytes(), value))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let call = Call::new(NAME, "multi_get", keys, deadline)?;
        self.read(&call, |table| {
            keys.iter().map(|key| table.get(key.as_bytes()).map(|value| value.to_vec())).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        let call = Call::new(NAME, "multi_set", &keys, deadline)?;
        pairs.iter().try_for_each(|(_, value)| call.value(value))?;
        self.change(&call, |table| {
            pairs.iter().try_for_each(|(key, value)| table.set(key.as_bytes(), *value))
        })
    }
}
