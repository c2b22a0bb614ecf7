//! The deciding half of the store's server: requests go in; answers, and which waits are over, come out. No connection, no thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::table::{MAX_BYTES, Refusal, Table};
use super::waiters::Waiters;
use crate::wire::store::{
    CHECK_NOT_READY, CHECK_READY, OWN_ECHO, OWN_PING, Op, Request, WAIT_CANCELLED, WAIT_DONE,
};

/// What a server holds for all its clients.
#[derive(Debug, Default)]
pub struct StoreServer {
    table: Table,
    queues: BTreeMap<Vec<u8>, VecDeque<Vec<u8>>>,
    queued_bytes: usize,
    waiters: Waiters,
    barriers: Waiters,
    /// Waits that are over, and not yet taken.
    over: Vec<WaitId>,
}

/// The wait of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitId {
    is_barrier: bool,
    number: u64,
}

/// What follows when a wait is over.
#[derive(Debug, PartialEq, Eq)]
pub enum Then {
    /// The client gets the values of these keys.
    Get(Vec<Vec<u8>>),
    /// These changes are made, and the client gets their values. Each is a key, the expected value and the desired one.
    CompareSet(Vec<Vec<u8>>),
}

/// What follows a wait that is over.
#[derive(Debug, PartialEq, Eq)]
pub enum Finished {
    /// The client gets these.
    Values(Vec<Arc<[u8]>>),
    /// A key has been removed again before its value was read: the client waits on, as this wait.
    Again(WaitId),
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The protocol has none.
    Nothing,
    /// As they are.
    Bytes(Vec<u8>),
    /// Each preceded by its length.
    Values(Vec<Arc<[u8]>>),
    /// That a wait is over, and the values that it was for.
    Waited(Vec<Arc<[u8]>>),
    /// None before the wait is over; then [`WAIT_DONE`], and the values of `then` ([`StoreServer::finish`]).
    Wait {
        /// Which wait.
        id: WaitId,
        /// What follows.
        then: Then,
    },
}

impl StoreServer {
    /// Executes `request`. `Validate` and `SetAtEnd` are the connection's: they change nothing here.
    ///
    /// # Errors
    /// A refusal closes the connection, because the protocol has no answer for it.
    pub fn execute(&mut self, request: Request) -> Result<Answer, Refusal> {
        let Request { op, strings, int } = request;
        let answer = match (op, strings.as_slice()) {
            (Op::Set, [key, value]) => {
                self.set(key, value)?;
                Answer::Nothing
            }
            (Op::Append, [key, value]) => {
                self.table.append(key, value)?;
                self.was_set(key);
                Answer::Nothing
            }
            (Op::MultiSet, pairs) => {
                for pair in pairs.chunks_exact(2) {
                    self.set(&pair[0], &pair[1])?;
                }
                Answer::Nothing
            }
            (Op::CompareSet, change) => Answer::Values(self.compare_set(change)?),
            (Op::CompareSetAfter, [before, changes @ ..]) => {
                if self.has(before) {
                    Answer::Waited(self.compare_set(changes)?)
                } else {
                    let id = WaitId { is_barrier: false, number: self.waiters.add(vec![before.clone()]) };
                    Answer::Wait { id, then: Then::CompareSet(changes.to_vec()) }
                }
            }
            (Op::Add, [key]) => {
                let sum = self.table.add(key, int)?;
                self.was_set(key);
                integer(sum)
            }
            (Op::Get | Op::MultiGet, keys) => Answer::Values(self.values(keys)),
            (Op::Delete, [key]) => integer(i64::from(self.table.delete(key))),
            (Op::NumKeys, _) => integer(count(self.table.len())),
            (Op::ListKeys, _) => self.list_keys(),
            (Op::Ping, _) if int == i64::from(OWN_PING) => Answer::Bytes(OWN_ECHO.to_le_bytes().to_vec()),
            (Op::Ping, _) => Answer::Bytes(int.to_le_bytes()[..4].to_vec()),
            (Op::CancelWait, _) => Answer::Bytes(vec![WAIT_CANCELLED]),
            (Op::Check, keys) => {
                let is_ready = keys.iter().all(|key| self.has(key));
                Answer::Bytes(vec![if is_ready { CHECK_READY } else { CHECK_NOT_READY }])
            }
            (Op::Wait | Op::WaitGet, keys) => {
                let missing = self.missing(keys);
                match (op == Op::WaitGet, missing.is_empty()) {
                    (true, true) => Answer::Waited(self.values(keys)),
                    (false, true) => Answer::Bytes(vec![WAIT_DONE]),
                    (is_get, false) => {
                        let id = WaitId { is_barrier: false, number: self.waiters.add(missing) };
                        Answer::Wait { id, then: Then::Get(if is_get { strings } else { Vec::new() }) }
                    }
                }
            }
            (Op::Barrier, [key]) => {
                let arrived = self.table.add(key, 1)?;
                self.was_set(key);
                if arrived >= int {
                    let over = self.barriers.set(key);
                    self.over.extend(over.into_iter().map(|number| WaitId { is_barrier: true, number }));
                    Answer::Bytes(vec![WAIT_DONE])
                } else {
                    let id = WaitId { is_barrier: true, number: self.barriers.add(vec![key.clone()]) };
                    Answer::Wait { id, then: Then::Get(Vec::new()) }
                }
            }
            (Op::QueuePush, [key, value]) => {
                self.push(key, value)?;
                Answer::Nothing
            }
            (Op::QueuePop, [key]) => self.pop(key).map_or(integer(0), |value| {
                let mut bytes = 1_i64.to_le_bytes().to_vec();
                bytes.extend((value.len() as u64).to_le_bytes());
                bytes.extend(value);
                Answer::Bytes(bytes)
            }),
            (Op::QueueLen, [key]) => integer(count(self.queues.get(key).map_or(0, VecDeque::len))),
            // The decoder gives each operation its strings.
            _ => Answer::Nothing,
        };
        Ok(answer)
    }

    /// Sets `key`.
    ///
    /// # Errors
    /// If the store is full.
    pub fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        self.table.set(key, value)?;
        self.was_set(key);
        Ok(())
    }

    /// The waits that are over since the last call.
    pub fn take_over(&mut self) -> Vec<WaitId> {
        std::mem::take(&mut self.over)
    }

    /// A wait was cancelled, or its client has gone.
    pub fn forget(&mut self, wait: WaitId) {
        if wait.is_barrier { &mut self.barriers } else { &mut self.waiters }.remove(wait.number);
    }

    /// Does what follows a wait that is over.
    ///
    /// # Errors
    /// A refusal closes the connection.
    pub fn finish(&mut self, then: &Then) -> Result<Finished, Refusal> {
        match then {
            Then::Get(keys) => {
                let missing = self.missing(keys);
                if missing.is_empty() {
                    return Ok(Finished::Values(self.values(keys)));
                }
                // An absent key reads as empty, which nobody has set.
                Ok(Finished::Again(WaitId { is_barrier: false, number: self.waiters.add(missing) }))
            }
            Then::CompareSet(changes) => self.compare_set(changes).map(Finished::Values),
        }
    }

    /// Those of `keys` that are not there, each once.
    fn missing(&self, keys: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut missing: Vec<_> = keys.iter().filter(|key| !self.has(key)).cloned().collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Makes the changes, each a key, the expected value and the desired one, and returns their values.
    fn compare_set(&mut self, changes: &[Vec<u8>]) -> Result<Vec<Arc<[u8]>>, Refusal> {
        let mut values = Vec::with_capacity(changes.len() / 3);
        for change in changes.chunks_exact(3) {
            let (value, is_written) = self.table.compare_set(&change[0], &change[1], &change[2])?;
            if is_written {
                self.was_set(&change[0]);
            }
            values.push(value);
        }
        Ok(values)
    }

    /// The values of `keys`. As in PyTorch's server, an absent key reads as empty: clients wait for it first.
    fn values(&self, keys: &[Vec<u8>]) -> Vec<Arc<[u8]>> {
        keys.iter().map(|key| self.table.get(key).unwrap_or_default()).collect()
    }

    fn was_set(&mut self, key: &[u8]) {
        let over = self.waiters.set(key);
        self.over.extend(over.into_iter().map(|number| WaitId { is_barrier: false, number }));
    }

    /// Whether `key` has a value, or a queue of that name an item.
    pub fn has(&self, key: &[u8]) -> bool {
        self.table.contains(key) || self.queues.contains_key(key)
    }

    fn push(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let bytes = self.queued_bytes + queue_cost(key, value);
        if bytes > MAX_BYTES {
            return Err(Refusal::ManyBytes(self.queued_bytes));
        }
        self.queued_bytes = bytes;
        self.queues.entry(key.to_vec()).or_default().push_back(value.to_vec());
        let over = self.waiters.item(key);
        self.over.extend(over.map(|number| WaitId { is_barrier: false, number }));
        Ok(())
    }

    fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        self.queued_bytes -= value.as_ref().map_or(0, |value| queue_cost(key, value));
        value
    }

    /// All keys but those of PyTorch's own start-up.
    fn list_keys(&self) -> Answer {
        let keys: Vec<&[u8]> = self.table.keys().filter(|key| !key.starts_with(b"init/")).collect();
        let mut bytes = count(keys.len()).to_le_bytes().to_vec();
        for key in keys {
            bytes.extend((key.len() as u64).to_le_bytes());
            bytes.extend_from_slice(key);
        }
        Answer::Bytes(bytes)
    }
}

/// An item counts with its key and the overhead of a small vector, so that empty ones are limited too.
fn queue_cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + 64
}

fn integer(number: i64) -> Answer {
    Answer::Bytes(number.to_le_bytes().to_vec())
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(server: &mut StoreServer, op: Op, strings: &[&str], int: i64) -> Answer {
        let strings = strings.iter().map(|string| string.as_bytes().to_vec()).collect();
        server.execute(Request { op, strings, int }).unwrap()
    }

    fn wait(server: &mut StoreServer, op: Op, strings: &[&str], int: i64) -> WaitId {
        match ask(server, op, strings, int) {
            Answer::Wait { id, .. } => id,
            other => panic!("it has {other:?} at once"),
        }
    }

    #[test]
    fn a_wait_is_over_when_its_last_key_is_set_however_that_happens() {
        let ways: [(Op, &[&str]); 5] = [
            (Op::Set, &["b", "1"]),
            (Op::Append, &["b", "1"]),
            (Op::MultiSet, &["c", "1", "b", "1"]),
            (Op::CompareSet, &["b", "", "1"]),
            (Op::Add, &["b"]),
        ];
        for (op, strings) in ways {
            let mut server = StoreServer::default();
            let waiting = wait(&mut server, Op::WaitGet, &["a", "b", "a"], 0);
            ask(&mut server, Op::Set, &["a", "0"], 0);
            assert!(server.take_over().is_empty(), "{op:?}");
            ask(&mut server, op, strings, 1);
            assert_eq!(server.take_over(), [waiting], "{op:?}");
            assert_eq!(server.values(&[b"b".to_vec()]), [Arc::from(&b"1"[..])], "{op:?}");
            assert_eq!(
                ask(&mut server, Op::Check, &["a", "b"], 0),
                Answer::Bytes(vec![CHECK_READY]),
                "{op:?}"
            );
        }
    }

    #[test]
    fn changes_that_wait_for_each_other_are_made_one_after_the_other() {
        let mut server = StoreServer::default();
        let change = ["1", "2", "", "b", "1", "?", "?"];
        let Answer::Wait { id: first, then } = ask(&mut server, Op::CompareSetAfter, &change, 0) else {
            panic!("nobody has set 1")
        };
        let second = wait(&mut server, Op::CompareSetAfter, &["2", "3", "", "c"], 0);
        ask(&mut server, Op::CompareSet, &["1", "", "a"], 0);
        assert_eq!(server.take_over(), [first]);
        let values = [&b"b"[..], b"a"].map(Arc::<[u8]>::from).to_vec();
        assert_eq!(server.finish(&then).unwrap(), Finished::Values(values));
        // The change is one on which others wait.
        assert_eq!(server.take_over(), [second]);
        // What is there is not waited for, and a place that is taken stays so.
        let taken = ask(&mut server, Op::CompareSetAfter, &["1", "2", "", "x"], 0);
        assert_eq!(taken, Answer::Waited(vec![Arc::from(&b"b"[..])]));
        // Whoever has gone changes nothing.
        let gone = wait(&mut server, Op::CompareSetAfter, &["8", "9", "", "x"], 0);
        server.forget(gone);
        ask(&mut server, Op::Set, &["8", ""], 0);
        assert!(server.take_over().is_empty() && !server.has(b"9"));
    }

    #[test]
    fn what_does_not_set_a_key_ends_no_wait() {
        let mut server = StoreServer::default();
        let waiting = wait(&mut server, Op::Wait, &["a"], 0);
        ask(&mut server, Op::CompareSet, &["a", "x", "1"], 0);
        ask(&mut server, Op::Delete, &["a"], 0);
        ask(&mut server, Op::Get, &["a"], 0);
        assert!(server.take_over().is_empty());
        server.forget(waiting);
        ask(&mut server, Op::Set, &["a", "1"], 0);
        assert!(server.take_over().is_empty(), "a wait that was forgotten is over");
    }

    #[test]
    fn who_waits_for_values_waits_on_if_one_is_removed_before_it_is_read() {
        let mut server = StoreServer::default();
        let Answer::Wait { id, then } = ask(&mut server, Op::WaitGet, &["a", "b"], 0) else {
            panic!("nobody has set them")
        };
        // The first is removed before the second comes.
        ask(&mut server, Op::Set, &["a", "1"], 0);
        ask(&mut server, Op::Delete, &["a"], 0);
        ask(&mut server, Op::Set, &["b", "2"], 0);
        assert_eq!(server.take_over(), [id]);
        let Finished::Again(again) = server.finish(&then).unwrap() else { panic!("there is no value of a") };
        ask(&mut server, Op::Set, &["a", "3"], 0);
        assert_eq!(server.take_over(), [again]);
        // And once more, between the end of the wait and its answer.
        ask(&mut server, Op::Delete, &["b"], 0);
        let Finished::Again(last) = server.finish(&then).unwrap() else { panic!("there is no value of b") };
        ask(&mut server, Op::Set, &["b", ""], 0);
        assert_eq!(server.take_over(), [last]);
        let values = [&b"3"[..], b""].map(Arc::<[u8]>::from).to_vec();
        assert_eq!(server.finish(&then).unwrap(), Finished::Values(values));
        // Who only waits for a key has what it has waited for.
        let Answer::Wait { then, .. } = ask(&mut server, Op::Wait, &["c"], 0) else { panic!("it is there") };
        ask(&mut server, Op::Set, &["c", "1"], 0);
        ask(&mut server, Op::Delete, &["c"], 0);
        assert_eq!(server.finish(&then).unwrap(), Finished::Values(Vec::new()));
    }

    #[test]
    fn the_last_to_come_ends_a_barrier_for_all() {
        let mut server = StoreServer::default();
        let first = wait(&mut server, Op::Barrier, &["b"], 3);
        let second = wait(&mut server, Op::Barrier, &["b"], 3);
        assert!(server.take_over().is_empty());
        assert_eq!(ask(&mut server, Op::Barrier, &["b"], 3), Answer::Bytes(vec![WAIT_DONE]));
        assert_eq!(server.take_over(), [first, second]);
    }

    #[test]
    fn each_item_of_a_queue_is_for_one() {
        let mut server = StoreServer::default();
        let first = wait(&mut server, Op::Wait, &["q"], 0);
        wait(&mut server, Op::Wait, &["q"], 0);
        ask(&mut server, Op::QueuePush, &["q", "item"], 0);
        assert_eq!(server.take_over(), [first]);
        let Answer::Bytes(popped) = ask(&mut server, Op::QueuePop, &["q"], 0) else { panic!("no item") };
        assert!(popped.ends_with(b"item"));
        assert_eq!(ask(&mut server, Op::QueuePop, &["q"], 0), integer(0));
        assert_eq!(server.queued_bytes, 0);
    }
}
