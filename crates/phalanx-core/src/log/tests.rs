//! Readers, writers and caretakers that are late in every way, and stores that fail.

mod compaction;
mod order;
mod participants;

use std::collections::BTreeSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use phalanx_proto::log::Compaction;
use phalanx_proto::log::liveness::Absence;
use serde::{Deserialize, Serialize};

use super::participant::STANDSTILL_LIMIT;
use super::*;
use crate::error::Kind;
use crate::store::{MemoryStore, Store};

/// Longer than a newcomer needs to ask for the state.
const LOOK_DELAY: Duration = Duration::from_millis(200);

fn limit() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Collects the words, and knows which processes are present.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Heard<const COMPACTED: bool> {
    words: Vec<u32>,
    present: BTreeSet<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Entry {
    Word(u32),
    Join(u32),
    Gone(u32),
}

fn heartbeats_of(entry: &Entry) -> Option<(u32, String)> {
    match entry {
        Entry::Join(id) | Entry::Gone(id) => Some((*id, format!("beat/{id}"))),
        Entry::Word(_) => None,
    }
}

type Whole = Heard<false>;
type Compacted = Heard<true>;

impl<const COMPACTED: bool> Machine for Heard<COMPACTED> {
    type Entry = Entry;
    type Id = u32;

    const VERSION: u8 = 7;
    const PROCESS: &'static str = "tester";
    const AUTHOR: &'static str = "another tester";
    const READERS: u64 = 2;
    const COMPACTION: Option<Compaction<Self>> = if COMPACTED {
        Some(Compaction {
            encode: |state| encode(1, state),
            decode: |bytes| decode(1, bytes, "another tester"),
            caretaker: |state| state.present.first().copied(),
            heartbeats_of: Some(heartbeats_of),
        })
    } else {
        None
    };

    fn apply(&mut self, entry: Entry) -> Result<(), String> {
        match entry {
            Entry::Word(word) => self.words.push(word),
            Entry::Join(13) => return Err("13 is unlucky".to_owned()),
            Entry::Join(id) => drop(self.present.insert(id)),
            Entry::Gone(id) => drop(self.present.remove(&id)),
        }
        Ok(())
    }

    fn joining(entry: &Entry) -> Option<u32> {
        if let Entry::Join(id) = entry { Some(*id) } else { None }
    }

    fn is_present(&self, id: u32) -> bool {
        self.present.contains(&id)
    }

    fn watched_by(&self, id: u32) -> Vec<u32> {
        self.present.iter().copied().filter(|other| *other != id).collect()
    }

    fn heartbeat_key(&self, id: u32) -> Option<String> {
        Some(format!("beat/{id}"))
    }

    fn absent(id: u32, _by: u32, _absence: Absence) -> Entry {
        Entry::Gone(id)
    }
}

#[test]
fn copies_of_a_view_share_the_state_until_it_changes() {
    let replica = Replica::<Compacted>::new(|_| ());
    let [before, again] = [(); 2].map(|()| replica.view().clone());
    assert!(Arc::ptr_eq(&before.state, &again.state));
    replica.apply(0, Entry::Word(5));
    assert_eq!((&before.state.words[..], &replica.view().state.words[..]), (&[][..], &[5][..]));
}

/// A store that answers nothing that would change it, or fails, for as long as it is told to.
#[derive(Default)]
struct Faulty {
    store: MemoryStore,
    fault: Mutex<Option<Fault>>,
    changed: Condvar,
    /// How often it was asked for something.
    calls: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// No write is answered; whether one has been asked for.
    Silent {
        was_asked: bool,
    },
    Broken,
    /// The answers to so many writes are lost, and their writers hear that at once.
    Lost {
        left: u32,
    },
    /// Nothing is removed, with an error of this kind.
    Keeps(Kind),
    /// Whoever writes next, after so many writes that are answered, stands still until its time has been up for long.
    Stopped {
        after: u32,
    },
}

impl Faulty {
    fn set_fault(&self, fault: Option<Fault>) {
        *self.fault.lock() = fault;
        self.changed.notify_all();
    }

    fn wait_until_asked(&self) {
        let mut fault = self.fault.lock();
        while *fault != Some(Fault::Silent { was_asked: true }) {
            assert!(!self.changed.wait_until(&mut fault, limit().instant()).timed_out());
        }
    }

    fn read(&self, _deadline: Deadline) -> Result<&MemoryStore> {
        match *self.fault.lock() {
            Some(Fault::Broken) => Err(Error::protocol("the store is broken")),
            _ => Ok(&self.store),
        }
    }

    fn remove(&self, deadline: Deadline) -> Result<&MemoryStore> {
        let fault = *self.fault.lock();
        match fault {
            Some(Fault::Keeps(kind)) => Err(Error::new(kind, "the store keeps everything")),
            _ => self.write(deadline),
        }
    }

    fn write(&self, deadline: Deadline) -> Result<&MemoryStore> {
        let mut fault = self.fault.lock();
        if fault.take_if(|fault| *fault == Fault::Stopped { after: 0 }).is_some() {
            drop(fault);
            thread::sleep(deadline.remaining() + STANDSTILL_LIMIT + STANDSTILL_LIMIT / 5);
            return Err(Error::timeout("the process was stopped"));
        }
        if let Some(Fault::Stopped { after }) = &mut *fault {
            *after -= 1;
        }
        if let Some(Fault::Lost { left }) = &mut *fault {
            *left -= 1;
            if *left == 0 {
                *fault = None;
            }
            return Err(Error::timeout("the answer is lost"));
        }
        while let Some(Fault::Silent { was_asked }) = &mut *fault {
            *was_asked = true;
            self.changed.notify_all();
            if self.changed.wait_until(&mut fault, deadline.instant()).timed_out() {
                return Err(Error::timeout("the store is silent"));
            }
        }
        drop(fault);
        self.read(deadline)
    }
}

/// Passes each call on to the store, if reading, writing or removing is possible.
macro_rules! pass_on {
    ($($access:ident $call:ident($($name:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl Store for Faulty {
            $(fn $call(&self, $($name: $kind,)* deadline: Deadline) -> Result<$result> {
                self.calls.fetch_add(1, Ordering::Relaxed);
                self.$access(deadline)?.$call($($name,)* deadline)
            })*

            fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
                self.calls.fetch_add(1, Ordering::Relaxed);
                // A reader asks so for what comes after the next entry.
                let is_question = key.starts_with("log/") && expected == desired;
                let store = if is_question { self.read(deadline)? } else { self.write(deadline)? };
                store.compare_set(key, expected, desired, deadline)
            }
        }
    };
}

pass_on! {
    write set(key: &str, value: &[u8]) -> ();
    read get(key: &str) -> Vec<u8>;
    read wait(keys: &[&str]) -> ();
    read check(keys: &[&str]) -> bool;
    write add(key: &str, amount: i64) -> i64;
    remove delete_key(key: &str) -> bool;
    read num_keys() -> usize;
    write append(key: &str, value: &[u8]) -> ();
    read multi_get(keys: &[&str]) -> Vec<Vec<u8>>;
    write multi_set(pairs: &[(&str, &[u8])]) -> ();
}

fn memory() -> SharedStore {
    Arc::new(MemoryStore::new())
}

fn log<const COMPACTED: bool>(store: &SharedStore) -> Log<Heard<COMPACTED>> {
    Log::new(Arc::clone(store), Mac::none())
}

/// A log of so many words.
fn filled(words: u64) -> (SharedStore, Log<Compacted>) {
    let store = memory();
    let log = log(&store);
    for word in 0..words {
        log.append(&Entry::Word(word as u32), limit()).unwrap();
    }
    (store, log)
}

/// One that reads as fast as it can, without a thread.
struct Reader {
    log: Log<Compacted>,
    replica: Replica<Compacted>,
}

impl Reader {
    fn new(store: &SharedStore) -> Self {
        let (log, replica) = (log(store), Replica::new(|_| ()));
        let (state, next) = log.begin(limit()).unwrap();
        replica.restore(state, next);
        Self { log, replica }
    }

    fn next(&self) -> u64 {
        self.replica.view().next
    }

    fn state(&self) -> Compacted {
        Compacted::clone(&self.replica.view().state)
    }

    fn read_up_to(&self, end: u64) {
        while self.next() < end {
            let next = self.next();
            // All are there, or have been removed.
            match self.log.read(next, Deadline::now()).unwrap() {
                Read::Entry(entry) => self.replica.apply(next, entry),
                Read::Compacted(state, index) => {
                    assert!(index > next);
                    self.replica.restore(state, index);
                }
                Read::Forged => panic!("without a key nothing is forged"),
            }
        }
    }

    fn checkpoint(&self) -> (Compacted, u64) {
        self.replica.take_checkpoint().unwrap()
    }

    fn compact(&self) {
        let (state, index) = self.checkpoint();
        self.log.compact(&state, index, limit()).unwrap();
    }
}

/// Waits until `what` holds of the replica.
fn wait_for<M: Machine>(replica: &Replica<M>, what: impl Fn(&View<M>) -> bool) {
    let (mut view, limit) = (replica.view(), limit());
    while !what(&view) {
        assert!(!limit.has_passed(), "what was waited for has not happened");
        replica.wait_until(&mut view, limit.instant());
    }
}

/// A participant, and what is gone when its threads are.
fn participant<M: Machine>(store: &SharedStore, mac: Mac) -> (Participant<M>, Weak<()>) {
    let alive = Arc::new(());
    let gone = Arc::downgrade(&alive);
    let replica = Replica::new(move |_| drop(Arc::clone(&alive)));
    (Participant::start(Log::new(Arc::clone(store), mac), Arc::new(replica), limit()).unwrap(), gone)
}

fn wait_until_gone(threads: &Weak<()>) {
    let limit = limit();
    while threads.strong_count() > 0 {
        assert!(!limit.has_passed(), "a thread has stayed");
        thread::sleep(Duration::from_millis(1));
    }
}

const HEARTBEATS: Heartbeats = Heartbeats {
    interval: Duration::from_millis(20),
    silence: Duration::from_millis(200),
    must_be_answered: true,
};
