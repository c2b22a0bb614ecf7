//! A view of another store under a prefix.

use super::{SharedStore, Store};
use crate::deadline::Deadline;
use crate::error::Result;

/// A view of a store in which every key `k` is the other store's `prefix/k`, so that two users of one store do not use
/// the same keys.
///
/// As in PyTorch, [`num_keys`](Store::num_keys) counts the keys of the whole store.
#[derive(Clone)]
pub struct PrefixStore {
    prefix: String,
    store: SharedStore,
}

impl PrefixStore {
    /// The view of `store` under `prefix`.
    pub fn new(prefix: impl Into<String>, store: SharedStore) -> Self {
        Self { prefix: prefix.into(), store }
    }

    /// The key in the other store.
    #[doc(hidden)]
    pub fn key_in(prefix: &str, key: &str) -> String {
        format!("{prefix}/{key}")
    }

    fn key(&self, key: &str) -> String {
        Self::key_in(&self.prefix, key)
    }

    fn with_keys<T>(&self, keys: &[&str], then: impl FnOnce(&[&str]) -> T) -> T {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        then(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn with_changes<T>(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        then: impl FnOnce(&[(&str, &[u8], &[u8])]) -> T,
    ) -> T {
        let keys: Vec<String> = changes.iter().map(|(key, ..)| self.key(key)).collect();
        let changes: Vec<(&str, &[u8], &[u8])> = keys
            .iter()
            .zip(changes)
            .map(|(key, (_, expected, desired))| (key.as_str(), *expected, *desired))
            .collect();
        then(&changes)
    }
}

impl std::fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.store.set(&self.key(key), value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.store.get(&self.key(key), deadline)
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.with_keys(keys, |keys| self.store.wait(keys, deadline))
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        self.with_keys(keys, |keys| self.store.check(keys, deadline))
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.store.add(&self.key(key), amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        self.store.compare_set(&self.key(key), expected, desired, deadline)
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        self.store.delete_key(&self.key(key), deadline)
    }

    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        self.with_keys(keys, |keys| self.store.delete_keys(keys, deadline))
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        self.store.num_keys(deadline)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.store.append(&self.key(key), value, deadline)
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |keys| self.store.multi_get(keys, deadline))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        let keys: Vec<String> = pairs.iter().map(|(key, _)| self.key(key)).collect();
        let pairs: Vec<(&str, &[u8])> =
            keys.iter().map(String::as_str).zip(pairs.iter().map(|pair| pair.1)).collect();
        self.store.multi_set(&pairs, deadline)
    }

    fn set_and_get(
        &self,
        pairs: &[(&str, &[u8])],
        keys: &[&str],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        let names: Vec<String> = pairs.iter().map(|(key, _)| self.key(key)).collect();
        let pairs: Vec<(&str, &[u8])> =
            names.iter().map(String::as_str).zip(pairs.iter().map(|pair| pair.1)).collect();
        self.with_keys(keys, |keys| self.store.set_and_get(&pairs, keys, deadline, go_on))
    }

    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        self.with_changes(changes, |changes| self.store.multi_compare_set(changes, deadline))
    }

    fn multi_compare_set_after(
        &self,
        before: &str,
        changes: &[(&str, &[u8], &[u8])],
        until: Deadline,
        deadline: Deadline,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let before = self.key(before);
        self.with_changes(changes, |changes| {
            self.store.multi_compare_set_after(&before, changes, until, deadline)
        })
    }

    fn compare_set_and_get(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        keys: &[&str],
        deadline: Deadline,
        found: &mut dyn FnMut(&[Vec<u8>]) -> Result<()>,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        self.with_changes(changes, |changes| {
            self.with_keys(keys, |keys| self.store.compare_set_and_get(changes, keys, deadline, found, go_on))
        })
    }
}
