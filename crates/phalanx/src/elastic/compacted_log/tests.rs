//! Readers, writers and trimmers that are late in every way.

use std::sync::Arc;

use super::super::members::{Departure, Settings, Worker, WorkerId};
use super::super::round_store::{RoundStore, sweep};
use super::*;
use crate::store::MemoryStore;

const SETTINGS: Settings = Settings { min: 1, max: 4, reset_limit: None };

fn limit() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn worker(id: u64, place: u32) -> Worker {
    Worker { id: WorkerId(id), host: "here".to_owned(), place, process: id as u32 }
}

/// One who reads as fast as he can.
struct Reader {
    store: SharedStore,
    state: MembersState,
    next: u64,
    /// The last place at which the log may be cut off.
    stop: Option<(MembersState, u64)>,
}

impl Reader {
    fn new(store: &SharedStore) -> Self {
        let (state, next) = begin(&**store, limit()).unwrap();
        Self { store: Arc::clone(store), state, next, stop: None }
    }

    fn read_up_to(&mut self, end: u64) {
        while self.next < end {
            match read(&*self.store, self.next, limit()).unwrap() {
                Read::Entry(entry) => {
                    let _ = self.state.apply(entry);
                    self.next += 1;
                    if self.next.is_multiple_of(STRIDE) {
                        self.stop = Some((self.state.clone(), self.next));
                    }
                }
                Read::Behind(state, next) => {
                    assert!(next > self.next);
                    (self.state, self.next) = (state, next);
                }
            }
        }
    }

    fn trim(&mut self) {
        let (state, index) = self.stop.take().unwrap();
        trim(&*self.store, index, &state, limit()).unwrap();
    }
}

fn filled(entries: u64) -> (SharedStore, CompactedLog) {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let compacted_log = CompactedLog::new(Arc::clone(&store));
    for change in 0..entries {
        compacted_log.append(&Entry::Expected { change, workers: 1 + change as u32 }, limit()).unwrap();
    }
    (store, compacted_log)
}

#[test]
fn a_newcomer_and_a_straggler_know_what_all_know() {
    let (store, compacted_log) = filled(0);
    let mut straggler = Reader::new(&store);
    let mut veteran = Reader::new(&store);
    let mut index = 0;
    for id in 0..STRIDE * 5 / 2 {
        for entry in [
            Entry::Join { worker: worker(id, 0), settings: SETTINGS },
            Entry::Gone { worker: WorkerId(id), by: WorkerId(id), why: Departure::Died },
        ] {
            index = compacted_log.try_append(&entry, limit()).unwrap().unwrap();
        }
        straggler.read_up_to(7.min(index + 1));
        veteran.read_up_to(index + 1);
        if id % 50 == 49 {
            veteran.trim();
        }
    }
    assert!(begin(&*store, limit()).unwrap().1 >= STRIDE * 4);
    straggler.read_up_to(index + 1);
    let mut newcomer = Reader::new(&store);
    newcomer.read_up_to(index + 1);
    assert_eq!(veteran.state, straggler.state);
    assert_eq!(veteran.state, newcomer.state);
}

#[test]
fn who_was_stopped_while_he_wrote_writes_again_and_nobody_reads_what_is_in_a_hole() {
    let (store, compacted_log) = filled(10);
    let late = CompactedLog::new(Arc::clone(&store));
    let mut log = Log::new(Arc::clone(&store));
    log.skip_to(5);
    let mut behind = Reader::new(&store);
    behind.read_up_to(5);
    // While he sleeps the log goes on, and is cut off behind him.
    for change in 10..STRIDE + 3 {
        compacted_log.append(&Entry::Expected { change, workers: 1 }, limit()).unwrap();
    }
    let mut other = Reader::new(&store);
    other.read_up_to(STRIDE + 3);
    other.trim();
    let entry = Entry::LastCall { round: 9, nonce: 1 };
    let index = log.append(&entry.to_bytes().unwrap(), limit()).unwrap();
    assert_eq!(index, 5);
    // Before he knows it, another one reads.
    assert!(matches!(read(&*store, 5, limit()).unwrap(), Read::Behind(_, STRIDE)));
    assert_eq!(late.confirm(index, limit()).unwrap(), None);
    assert!(!store.check(&["log/5"], limit()).unwrap());
    assert_eq!(late.try_append(&entry, limit()).unwrap(), Some(STRIDE + 3));
    behind.read_up_to(STRIDE + 4);
    other.read_up_to(STRIDE + 4);
    assert_eq!(behind.state, other.state);
}

#[test]
fn what_a_trimmer_leaves_that_dies_the_next_one_removes() {
    let (store, compacted_log) = filled(STRIDE);
    let mut reader = Reader::new(&store);
    reader.read_up_to(STRIDE);
    // It has moved the base, and removed half of what was before.
    let (state, index) = reader.stop.take().unwrap();
    store.set(&state_key(index), &log::encode(VERSION, &state).unwrap(), limit()).unwrap();
    base(&*store, limit()).unwrap();
    store.compare_set(BASE, b"0", b"64", limit()).unwrap();
    (0..STRIDE / 2).for_each(|entry| assert!(store.delete_key(&log::key(entry), limit()).unwrap()));
    for change in STRIDE..2 * STRIDE {
        compacted_log.append(&Entry::Expected { change, workers: 1 }, limit()).unwrap();
    }
    let mut next = Reader::new(&store);
    next.read_up_to(2 * STRIDE);
    next.trim();
    // The base, how far was removed, and one state.
    assert_eq!(store.num_keys(limit()).unwrap(), 3);
    // Who is slower, with an older state, changes nothing.
    trim(&*store, index, &state, limit()).unwrap();
    assert_eq!((begin(&*store, limit()).unwrap().1, store.num_keys(limit()).unwrap()), (2 * STRIDE, 3));
}

#[test]
fn a_newcomer_that_finds_nothing_where_a_state_was_looks_for_the_next() {
    let (store, _) = filled(2 * STRIDE);
    let mut reader = Reader::new(&store);
    reader.read_up_to(STRIDE);
    reader.trim();
    reader.read_up_to(2 * STRIDE);
    // As a store answers from which it is removed while somebody waits for it.
    store.set(&state_key(STRIDE), b"", limit()).unwrap();
    let newcomer = std::thread::spawn({
        let store = SharedStore::clone(&store);
        move || begin(&*store, limit())
    });
    // So that it looks for sure.
    std::thread::sleep(MOMENT);
    reader.trim();
    assert_eq!(newcomer.join().unwrap().unwrap().1, 2 * STRIDE);
}

#[test]
fn a_store_that_does_not_answer_is_not_taken_for_one_that_has_nothing_new() {
    let asked = std::cell::Cell::new(0);
    let silent_for = |times: u32| {
        asked.set(0);
        answer(|_| {
            asked.set(asked.get() + 1);
            if asked.get() > times { Ok(()) } else { Err(Error::timeout("silent")) }
        })
    };
    assert!(silent_for(1).is_ok());
    let error = silent_for(9).unwrap_err();
    assert!(!error.is_timeout() && error.remedy().is_some(), "{error}");
    assert_eq!(asked.get(), 2);
}

#[test]
fn the_store_of_a_job_with_ten_thousand_kills_stays_small() {
    let (store, compacted_log) = filled(0);
    let append = |entry: Entry| compacted_log.try_append(&entry, limit()).unwrap().unwrap();
    let mut first = Reader::new(&store);
    let mut places: Vec<u64> = (0..4).collect();
    for (place, id) in (0..).zip(&places) {
        append(Entry::Join { worker: worker(*id, place), settings: SETTINGS });
    }
    let mut most = 0;
    for kill in 0..10_000_u64 {
        let (victim, round) = ((kill % 4) as usize, kill + 1);
        let (dead, successor) = (places[victim], kill + 4);
        // What four ranks say while they connect.
        let group = RoundStore::new(&store, round);
        for rank in 0..4 {
            for what in ["rank", "address", "host"] {
                group.set(&format!("{what}/{rank}"), b"x", limit()).unwrap();
            }
            group.add("arrived", 1, limit()).unwrap();
        }
        append(Entry::Exited { place: victim as u32, process: dead as u32, nonce: kill });
        for id in places.iter().filter(|id| **id != dead) {
            append(Entry::Gone { worker: WorkerId(dead), by: WorkerId(*id), why: Departure::Died });
            append(Entry::Ready { round, worker: WorkerId(*id), holds: false });
        }
        let end = append(Entry::Join { worker: worker(successor, victim as u32), settings: SETTINGS });
        places[victim] = successor;
        // Once a second, say.
        if kill % 10 == 9 {
            first.read_up_to(end + 1);
            assert_eq!(first.state.round(), round + 1);
            if let Some((state, index)) = first.stop.take() {
                trim(&*store, index, &state, limit()).unwrap();
            }
            sweep(&*store, first.state.round(), limit()).unwrap();
        }
        most = most.max(store.num_keys(limit()).unwrap());
    }
    // Eight entries, and the keys of a round, for each kill of that second; the entries since the last stride.
    assert!(most < 10 * (8 + 14) + STRIDE as usize + 10, "{most}");
    let mut newcomer = Reader::new(&store);
    assert!(newcomer.next + 2 * STRIDE > first.next);
    newcomer.read_up_to(first.next);
    assert_eq!(newcomer.state, first.state);
}
