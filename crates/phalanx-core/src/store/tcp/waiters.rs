//! Which clients wait for which keys. Pure: waking is sending on a channel.

use std::collections::{BTreeSet, HashMap};

use tokio::sync::oneshot;

/// Clients that wait for keys.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waits: HashMap<u64, Wait>,
    by_key: HashMap<Vec<u8>, BTreeSet<u64>>,
    next: u64,
}

#[derive(Debug)]
struct Wait {
    missing: Vec<Vec<u8>>,
    left: usize,
    done: oneshot::Sender<()>,
}

impl Waiters {
    /// Waits for every key of `missing`, each named once.
    pub fn add(&mut self, missing: Vec<Vec<u8>>) -> (u64, oneshot::Receiver<()>) {
        let (done, woken) = oneshot::channel();
        let id = self.next;
        self.next += 1;
        for key in &missing {
            self.by_key.entry(key.clone()).or_default().insert(id);
        }
        self.waits.insert(id, Wait { left: missing.len(), missing, done });
        (id, woken)
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

    /// Wakes all clients that wait for `key`, which has been set.
    pub fn wake_all(&mut self, key: &[u8]) {
        for id in self.by_key.remove(key).unwrap_or_default() {
            self.count_down(id);
        }
    }

    /// Wakes the first client that waits for `key`.
    pub fn wake_one(&mut self, key: &[u8]) {
        let Some(ids) = self.by_key.get_mut(key) else { return };
        let first = ids.pop_first();
        if ids.is_empty() {
            self.by_key.remove(key);
        }
        if let Some(id) = first {
            self.count_down(id);
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.waits.len()
    }

    fn count_down(&mut self, id: u64) {
        let Some(wait) = self.waits.get_mut(&id) else { return };
        wait.left -= 1;
        if wait.left == 0
            && let Some(wait) = self.waits.remove(&id)
        {
            // A receiver that has gone has just been cancelled.
            let _ = wait.done.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_last_key_and_leaves_nothing_behind() {
        let mut waiters = Waiters::default();
        let (_, mut both) = waiters.add(vec![b"a".to_vec(), b"b".to_vec()]);
        let (first, mut one) = waiters.add(vec![b"a".to_vec()]);
        waiters.remove(first);
        waiters.wake_all(b"a");
        assert!(one.try_recv().is_err() && both.try_recv().is_err());
        waiters.wake_all(b"b");
        assert!(both.try_recv().is_ok());
        assert!(waiters.waits.is_empty() && waiters.by_key.is_empty());
    }

    #[test]
    fn an_item_of_a_queue_wakes_the_first_alone() {
        let mut waiters = Waiters::default();
        let (_, mut first) = waiters.add(vec![b"q".to_vec()]);
        let (_, mut second) = waiters.add(vec![b"q".to_vec()]);
        waiters.wake_one(b"q");
        assert!(first.try_recv().is_ok() && second.try_recv().is_err());
        assert_eq!(waiters.len(), 1);
    }
}
