//! Which clients wait for which keys.

use std::collections::{BTreeMap, BTreeSet};

/// Clients that wait for keys.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waits: BTreeMap<u64, Wait>,
    by_key: BTreeMap<Vec<u8>, BTreeSet<u64>>,
    next: u64,
}

#[derive(Debug)]
struct Wait {
    missing: Vec<Vec<u8>>,
    left: usize,
}

impl Waiters {
    /// Waits for every key of `missing`, each named once.
    pub fn add(&mut self, missing: Vec<Vec<u8>>) -> u64 {
        let id = self.next;
        self.next += 1;
        for key in &missing {
            self.by_key.entry(key.clone()).or_default().insert(id);
        }
        self.waits.insert(id, Wait { left: missing.len(), missing });
        id
    }

    /// Removes a wait that was cancelled, or whose client has gone.
    pub fn remove(&mut self, id: u64) {
        let Some(wait) = self.waits.remove(&id) else { return };
        for key in &wait.missing {
            if let Some(ids) = self.by_key.get_mut(key) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.by_key.remove(key);
                }
            }
        }
    }

    /// `key` has been set. Returns the waits that are over.
    pub fn set(&mut self, key: &[u8]) -> Vec<u64> {
        let ids = self.by_key.remove(key).unwrap_or_default();
        ids.into_iter().filter(|&id| self.count_down(id)).collect()
    }

    /// There is an item under `key`, for the first client that waits for it. Returns its wait, if that is over.
    pub fn item(&mut self, key: &[u8]) -> Option<u64> {
        let ids = self.by_key.get_mut(key)?;
        let first = ids.pop_first();
        if ids.is_empty() {
            self.by_key.remove(key);
        }
        first.filter(|&id| self.count_down(id))
    }

    fn count_down(&mut self, id: u64) -> bool {
        let Some(wait) = self.waits.get_mut(&id) else { return false };
        wait.left -= 1;
        let is_over = wait.left == 0;
        if is_over {
            self.waits.remove(&id);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_last_key_and_leaves_nothing_behind() {
        let mut waiters = Waiters::default();
        let both = waiters.add(vec![b"a".to_vec(), b"b".to_vec()]);
        let one = waiters.add(vec![b"a".to_vec()]);
        waiters.remove(one);
        assert!(waiters.set(b"a").is_empty());
        assert_eq!(waiters.set(b"b"), [both]);
        assert!(waiters.waits.is_empty() && waiters.by_key.is_empty());
    }

    #[test]
    fn an_item_of_a_queue_ends_the_first_wait_alone() {
        let mut waiters = Waiters::default();
        let (first, second) = (waiters.add(vec![b"q".to_vec()]), waiters.add(vec![b"q".to_vec()]));
        assert_eq!(waiters.item(b"q"), Some(first));
        assert_eq!(waiters.waits.keys().copied().collect::<Vec<_>>(), [second]);
    }
}
