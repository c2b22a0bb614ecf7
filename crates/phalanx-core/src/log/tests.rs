//! Readers, writers and caretakers that are late in every way, and stores that fail.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Barrier, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_proto::log::Compaction;
use phalanx_proto::log::liveness::Absence;
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::compaction::{IN_PARTS, Looks, PART, answer, state_key};
use super::participant::{Caretaker, STANDSTILL_LIMIT};
use super::*;
use crate::error::Kind;
use crate::store::{MemoryStore, Request, Store, TcpStore, TcpStoreServer, Watched, far_away};

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

#[test]
fn those_who_append_at_once_get_one_order() {
    let store = memory();
    let shared = log::<false>(&store);
    thread::scope(|scope| {
        for writer in 0..4_u32 {
            // Two have a log of their own, and two share one.
            let (own, shared) = (log::<false>(&store), &shared);
            scope.spawn(move || {
                let log = if writer < 2 { &own } else { shared };
                for number in 0..25 {
                    log.append(&Entry::Word(writer * 100 + number), limit()).unwrap();
                }
            });
        }
    });
    let mut next = [0; 4];
    for index in 0..100 {
        let Read::Entry(Entry::Word(word)) = shared.read(index, limit()).unwrap() else { panic!() };
        let next = &mut next[word as usize / 100];
        assert_eq!(word % 100, *next);
        *next += 1;
    }
    assert!(!store.check(&["log/100"], limit()).unwrap());
}

#[test]
fn many_who_append_at_once_make_few_requests_each() {
    const WRITERS: u32 = 100;
    let store = Arc::new(Faulty::default());
    let shared = Arc::clone(&store) as SharedStore;
    let together = Barrier::new(WRITERS as usize);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            // No writer knows more than that the log may be empty.
            let (log, together) = (log::<false>(&shared), &together);
            scope.spawn(move || {
                together.wait();
                log.append(&Entry::Word(writer), limit()).unwrap();
            });
        }
    });
    let calls = store.calls.load(Ordering::Relaxed);
    // It is four for each; one that was stopped for long has left the line, and made some more.
    assert!(calls <= 10 * WRITERS as usize, "{calls} requests");
    let log = log::<false>(&shared);
    let words: BTreeSet<u32> = (0..u64::from(WRITERS))
        .map(|index| match log.read(index, limit()).unwrap() {
            Read::Entry(Entry::Word(word)) => word,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(words.len(), WRITERS as usize);
    assert!(!shared.check(&[&key(WRITERS.into())], limit()).unwrap());
}

#[test]
fn whoever_is_behind_reads_many_entries_with_each_request() {
    const WORDS: u32 = 1000;
    fn read_all<const COMPACTED: bool>() {
        let waits = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&waits);
        let store: SharedStore = Arc::new(Watched::new(move |request| {
            counted.fetch_add(usize::from(request == Request::SetAndGet), Ordering::Relaxed);
            Ok(())
        }));
        let log = log::<COMPACTED>(&store);
        (0..WORDS).for_each(|word| log.append(&Entry::Word(word), limit()).unwrap());
        assert_eq!(waits.load(Ordering::Relaxed), 0);
        let (member, threads) = participant::<Heard<COMPACTED>>(&store, Mac::none());
        wait_for(member.replica(), |view| view.next == u64::from(WORDS));
        assert_eq!(member.replica().view().state.words, (0..WORDS).collect::<Vec<_>>());
        member.close();
        assert_eq!(threads.strong_count(), 0);
        // Each of two readers asks for 17, 33, 65 and then 129 entries, and waits for one that does not come.
        let most = 2 * (4 + u64::from(WORDS).div_ceil(AHEAD.1) + 1);
        let waits = waits.load(Ordering::Relaxed);
        assert!(waits as u64 <= most, "{waits} requests for {WORDS} entries");
    }
    read_all::<false>();
    read_all::<true>();
}

#[test]
fn two_readers_that_fetch_the_same_entries_take_each_once() {
    let replica = Replica::<Compacted>::new(|_| ());
    for (index, word) in [(0, 0), (1, 1), (0, 0), (1, 1), (2, 2), (2, 2)] {
        replica.apply(index, Entry::Word(word));
    }
    replica.skip(2);
    let early = Compacted { words: vec![0], present: BTreeSet::new() };
    replica.restore(early, 1);
    let view = replica.view();
    assert_eq!((view.next, &view.state.words[..]), (3, &[0, 1, 2][..]));
}

#[test]
fn who_dies_in_the_line_holds_nobody_up_for_long_and_leaves_no_hole() {
    let store = memory();
    log::<false>(&store).append(&Entry::Word(0), limit()).unwrap();
    // It has found place 0 taken, and is the first in the line.
    assert_eq!(store.add(&line_key(0), 1, limit()).unwrap(), 1);
    thread::scope(|scope| {
        for word in 1..=3 {
            let log = log::<false>(&store);
            scope.spawn(move || log.append(&Entry::Word(word), limit()).unwrap());
        }
    });
    let log = log::<false>(&store);
    let mut words = (0..4).map(|index| log.read(index, limit()).unwrap()).collect::<Vec<_>>();
    assert_eq!(words.remove(0), Read::Entry(Entry::Word(0)));
    for word in 1..=3 {
        assert!(words.contains(&Read::Entry(Entry::Word(word))), "{word} is lost");
    }
    assert!(!store.check(&["log/4"], limit()).unwrap());
    // What is no turn is not waited for.
    for turn in [-5, 0, i64::MAX - 1] {
        store.set(&line_key(0), turn.to_string().as_bytes(), limit()).unwrap();
        assert_eq!(log.turn_in_line(0, limit()).unwrap(), 1);
    }
    store.set(&line_key(0), b"4", limit()).unwrap();
    assert_eq!(log.turn_in_line(0, limit()).unwrap(), 5);
    // Whoever is late for its own deadline says so, and not that it has waited in a line. Nothing is written behind a hole.
    let short = Deadline::after(Duration::from_millis(50));
    let error = log.write(5, b"word", true, short).err().unwrap();
    assert!(error.is_timeout(), "{error}");
    assert!(log.write(5, b"word", true, limit()).unwrap().is_none());
    assert!(!store.check(&["log/5"], limit()).unwrap());
}

#[test]
fn entries_come_back_and_nonsense_does_not() {
    let bytes = encode(7, &Entry::Join(300)).unwrap();
    let read = |bytes: &[u8]| decode::<Entry>(7, bytes, "another tester");
    assert_eq!(read(&bytes).unwrap(), Entry::Join(300));
    for bad in [&b""[..], &[7], &[8, 0], &bytes[..bytes.len() - 1]] {
        let error = read(bad).unwrap_err();
        assert!(error.to_string().contains("an entry of another tester cannot be decoded"), "{error}");
    }
}

#[test]
fn a_newcomer_and_a_straggler_know_what_all_know() {
    let (store, log) = filled(0);
    let (straggler, veteran) = (Reader::new(&store), Reader::new(&store));
    let mut index = 0;
    for word in 0..STRIDE * 5 {
        index = log.try_append(&Entry::Word(word as u32), limit()).unwrap().unwrap();
        straggler.read_up_to(7.min(index + 1));
        veteran.read_up_to(index + 1);
        if word % 100 == 99 {
            veteran.compact();
        }
    }
    assert!(log.begin(limit()).unwrap().1 >= STRIDE * 4);
    straggler.read_up_to(index + 1);
    let newcomer = Reader::new(&store);
    newcomer.read_up_to(index + 1);
    assert_eq!(veteran.state(), straggler.state());
    assert_eq!(veteran.state(), newcomer.state());
}

#[test]
fn a_writer_that_was_stopped_writes_again_and_nobody_reads_what_is_in_a_hole() {
    let (store, log) = filled(10);
    let (late, behind) = (Log::<Compacted>::new(Arc::clone(&store), Mac::none()), Reader::new(&store));
    behind.read_up_to(5);
    // While it sleeps the log goes on, and is compacted behind it.
    for word in 10..STRIDE + 3 {
        log.append(&Entry::Word(word as u32), limit()).unwrap();
    }
    let other = Reader::new(&store);
    other.read_up_to(STRIDE + 3);
    other.compact();
    let entry = Entry::Word(1000);
    store.compare_set("log/5", b"", &encode(7, &entry).unwrap(), limit()).unwrap();
    // Before it knows that, another one reads.
    assert!(matches!(late.read(5, limit()).unwrap(), Read::Compacted(_, STRIDE)));
    assert_eq!(late.confirm(5, late.base(limit()).unwrap(), limit()).unwrap(), None);
    assert!(!store.check(&["log/5"], limit()).unwrap());
    // Entry 0 is no such place, whatever is in it.
    assert_eq!(late.confirm(0, STRIDE, limit()).unwrap(), None);
    assert!(store.check(&["log/0"], limit()).unwrap());
    assert_eq!(late.try_append(&entry, limit()).unwrap(), Some(STRIDE + 3));
    behind.read_up_to(STRIDE + 4);
    other.read_up_to(STRIDE + 4);
    assert_eq!(behind.state(), other.state());
}

#[test]
fn what_a_caretaker_leaves_that_dies_the_next_one_removes() {
    let (store, log) = filled(STRIDE);
    let reader = Reader::new(&store);
    reader.read_up_to(STRIDE);
    // It has moved the base, and removed half of what was before.
    let (state, index) = reader.checkpoint();
    store.set(&state_key(index), &encode(1, &state).unwrap(), limit()).unwrap();
    store.compare_set(BASE, b"0", b"64", limit()).unwrap();
    (1..STRIDE / 2).for_each(|entry| assert!(store.delete_key(&key(entry), limit()).unwrap()));
    store.add(&line_key(STRIDE + 1), 2, limit()).unwrap();
    for word in STRIDE..2 * STRIDE {
        log.append(&Entry::Word(word as u32), limit()).unwrap();
    }
    let next = Reader::new(&store);
    next.read_up_to(2 * STRIDE);
    next.compact();
    // The base, how far was removed, one state, and the first entry.
    assert_eq!(store.num_keys(limit()).unwrap(), 4);
    assert!(store.check(&["log/0"], limit()).unwrap());
    // One that is slower, with an older state, changes nothing.
    log.compact(&state, index, limit()).unwrap();
    assert_eq!((log.begin(limit()).unwrap().1, store.num_keys(limit()).unwrap()), (2 * STRIDE, 4));
}

#[test]
fn whoever_counts_itself_where_the_line_was_removed_leaves_nothing_for_long() {
    let (store, log) = filled(STRIDE);
    let reader = Reader::new(&store);
    reader.read_up_to(STRIDE);
    reader.compact();
    // It had found the place taken before.
    store.add(&line_key(5), 1, limit()).unwrap();
    (STRIDE..2 * STRIDE).for_each(|word| log.append(&Entry::Word(word as u32), limit()).unwrap());
    reader.read_up_to(2 * STRIDE);
    reader.compact();
    assert!(!store.check(&[&line_key(5)], limit()).unwrap());
}

#[test]
fn those_who_come_and_go_without_end_leave_no_keys_and_those_who_are_there_keep_theirs() {
    let (store, log) = filled(1);
    let reader = Reader::new(&store);
    let mut end = 1;
    let mut append = |entry: &Entry| {
        log.append(entry, limit()).unwrap();
        end += 1;
        end
    };
    let announce = |id: u32| assert_eq!(store.add(&format!("beat/{id}"), 1, limit()).unwrap(), 1);
    let compact = |end: u64| {
        reader.read_up_to(end);
        if let Some((state, index)) = reader.replica.take_checkpoint() {
            reader.log.compact(&state, index, limit()).unwrap();
        }
    };
    // It is refused.
    announce(13);
    append(&Entry::Join(13));
    for id in 1000..2000 {
        announce(id);
        let mut end = append(&Entry::Join(id));
        if id >= 1010 {
            end = append(&Entry::Gone(id - 10));
        }
        if id % 50 == 49 {
            compact(end);
        }
    }
    let present = reader.state().present;
    assert_eq!(present, (1990..2000).collect::<BTreeSet<u32>>());
    assert!(present.iter().all(|id| store.check(&[&format!("beat/{id}")], limit()).unwrap()));
    assert!(!store.check(&["beat/13"], limit()).unwrap());
    // Those who are there; of the entries since the last state each is there, and may name one that has gone; and a few of the log's own.
    let keys = store.num_keys(limit()).unwrap();
    assert!(keys < 10 + 2 * STRIDE as usize + 10, "{keys} keys");
}

#[test]
fn a_state_that_is_too_long_for_one_value_is_in_several() {
    let store = memory();
    let log = || Log::<Compacted>::new(Arc::clone(&store), Mac::new(Some(&[1; 32]), "job"));
    let state = |words| Compacted { words: vec![u32::MAX; words], present: BTreeSet::new() };
    // Some 5 bytes each.
    let long = state(3 * PART / 5);
    log().compact(&long, STRIDE, limit()).unwrap();
    let length = |key: &str| store.get(key, limit()).unwrap().len();
    assert_eq!(length(&state_key(STRIDE)), 2);
    let parts = [0, 1, 2, 3].map(|part| length(&format!("state/{STRIDE}/{part}")));
    assert_eq!(parts[..3], [PART; 3]);
    assert!(parts[3] < PART && !store.check(&["state/64/4"], limit()).unwrap());
    assert!(log().begin(limit()).unwrap() == (long, STRIDE));
    for nonsense in [&[IN_PARTS][..], &[IN_PARTS, 0], &[IN_PARTS, 255], &[IN_PARTS, 4, 0]] {
        store.set(&state_key(STRIDE), nonsense, limit()).unwrap();
        let error = log().begin(limit()).unwrap_err();
        assert!(error.to_string().contains("the parts of the state in the testers' log"), "{error}");
    }
    // The next one, which is short, takes the place of all of them.
    log().compact(&state(1), 2 * STRIDE, limit()).unwrap();
    // The base, how far was removed, and one state.
    assert_eq!(store.num_keys(limit()).unwrap(), 3);
    let error = log().replace_entries(&state(7 * PART), 3 * STRIDE, limit()).unwrap_err();
    assert!(error.to_string().contains("and may have"), "{error}");
    assert_eq!(log().begin(limit()).unwrap(), (state(1), 2 * STRIDE));
}

/// What one of those that use a log does next.
#[derive(Clone, Debug)]
enum Act {
    Append(u32),
    Read(u64),
    /// It takes itself for the caretaker, with the last state that it knows.
    Compact,
    /// The same, and it dies before it has removed anything.
    Die,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (1..100_u32).prop_map(Act::Append),
        4 => (1..200_u64).prop_map(Act::Read),
        2 => Just(Act::Compact),
        1 => Just(Act::Die),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whoever_reads_writes_and_compacts_when_all_see_one_log(
        acts in proptest::collection::vec((0..3_usize, act()), 1..60),
    ) {
        let store = memory();
        let readers: [Reader; 3] = std::array::from_fn(|_| Reader::new(&store));
        // Those that only write know nothing of what the others have read.
        let writers: [Log<Compacted>; 3] = std::array::from_fn(|_| log(&store));
        let mut words: Vec<u32> = Vec::new();
        for (who, act) in acts {
            let reader = &readers[who];
            match act {
                Act::Append(count) => for _ in 0..count {
                    let word = words.len() as u32;
                    // What is in the place of a removed entry is taken back, and written at the end: nobody has read it.
                    let index = writers[who].try_append(&Entry::Word(word), limit()).unwrap();
                    prop_assert_eq!(index, Some(u64::from(word)));
                    words.push(word);
                },
                Act::Read(count) => reader.read_up_to((reader.next() + count).min(words.len() as u64)),
                Act::Compact => if let Some((state, index)) = reader.replica.take_checkpoint() {
                    reader.log.compact(&state, index, limit()).unwrap();
                },
                Act::Die => if let Some((state, index)) = reader.replica.take_checkpoint() {
                    reader.log.replace_entries(&state, index, limit()).unwrap();
                },
            }
            let read = reader.state().words;
            prop_assert_eq!(&read[..], &words[..reader.next() as usize]);
        }
        let newcomer = Reader::new(&store);
        for reader in readers.iter().chain([&newcomer]) {
            reader.read_up_to(words.len() as u64);
            let read = reader.state().words;
            prop_assert_eq!(&read, &words);
        }
    }
}

#[test]
fn a_state_is_held_before_it_takes_the_place_of_entries() {
    let (store, log) = filled(0);
    log.append(&Entry::Join(1), limit()).unwrap();
    let reader = Reader::new(&store);
    reader.replica.set_own(1, "beat/1".to_owned());
    let base_after = |hold, end| {
        (reader.next()..end).for_each(|word| log.append(&Entry::Word(word as u32), limit()).unwrap());
        reader.read_up_to(end);
        Caretaker::new(hold).clean(&reader.log, &reader.replica, limit(), &|_, _| Ok(())).unwrap();
        log.base(limit()).unwrap()
    };
    reader.read_up_to(1);
    assert_eq!(base_after(Duration::from_secs(3600), STRIDE + 3), 0);
    assert_eq!(base_after(Duration::ZERO, 2 * STRIDE + 3), 2 * STRIDE);
    assert!(!store.check(&["log/1"], limit()).unwrap());
    // Whoever is not the caretaker leaves all as it is.
    reader.replica.set_own(2, "beat/2".to_owned());
    assert_eq!(base_after(Duration::ZERO, 3 * STRIDE), 2 * STRIDE);
}

#[test]
fn a_compaction_that_fails_is_tried_again_or_told() {
    let faulty = Arc::new(Faulty::default());
    let store: SharedStore = faulty.clone();
    let log = log::<true>(&store);
    log.append(&Entry::Join(1), limit()).unwrap();
    let reader = Reader::new(&store);
    reader.replica.set_own(1, "beat/1".to_owned());
    (1..=STRIDE).for_each(|word| log.append(&Entry::Word(word as u32), limit()).unwrap());
    reader.read_up_to(STRIDE + 1);
    let mut caretaker = Caretaker::new(Duration::ZERO);
    let mut clean = |deadline| caretaker.clean(&reader.log, &reader.replica, deadline, &|_, _| Ok(()));
    // No answer in time: the same state is written later.
    faulty.set_fault(Some(Fault::Silent { was_asked: false }));
    assert!(clean(Deadline::now()).unwrap_err().is_timeout());
    assert_eq!(reader.replica.view().warnings().next(), None);
    faulty.set_fault(None);
    clean(limit()).unwrap();
    assert_eq!(log.base(limit()).unwrap(), STRIDE);
    // A store that does not take it: a person should know.
    (0..STRIDE).for_each(|word| log.append(&Entry::Word(word as u32), limit()).unwrap());
    reader.read_up_to(2 * STRIDE);
    faulty.set_fault(Some(Fault::Broken));
    assert!(!clean(limit()).unwrap_err().is_timeout());
    let warning = reader.replica.view().warnings().next().unwrap().to_owned();
    assert!(warning.contains("old entries of the testers' log stay in the store"), "{warning}");
}

/// A caretaker, and one entry more than a state needs, at a store that can fail.
fn caretaker(faulty: &Arc<Faulty>, hold: Duration) -> (Caretaker<Compacted>, Reader) {
    let store: SharedStore = faulty.clone();
    let log = log::<true>(&store);
    log.append(&Entry::Join(1), limit()).unwrap();
    let reader = Reader::new(&store);
    reader.replica.set_own(1, "beat/1".to_owned());
    (1..=STRIDE).for_each(|word| log.append(&Entry::Word(word as u32), limit()).unwrap());
    reader.read_up_to(STRIDE + 1);
    (Caretaker::new(hold), reader)
}

#[test]
fn entries_that_the_store_keeps_are_told_once_and_tried_again() {
    let faulty = Arc::new(Faulty::default());
    let (mut caretaker, reader) = caretaker(&faulty, Duration::ZERO);
    let tidied = AtomicUsize::new(0);
    let tidy = |_: &Compacted, _: Deadline| -> Result<()> {
        tidied.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    let mut clean = || caretaker.clean(&reader.log, &reader.replica, limit(), &tidy);
    faulty.set_fault(Some(Fault::Keeps(Kind::Protocol)));
    for _ in 0..2 {
        assert!(!clean().unwrap_err().is_timeout());
    }
    // It is not in the way of what else is to be removed.
    assert_eq!(tidied.load(Ordering::Relaxed), 2);
    let warnings: Vec<String> = reader.replica.view().warnings().map(str::to_owned).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for part in ["old entries of the testers' log", "which ends the job", "the store keeps everything"] {
        assert!(warnings[0].contains(part), "{warnings:?}");
    }
    assert!(faulty.check(&["log/1"], limit()).unwrap());
    faulty.set_fault(None);
    clean().unwrap();
    assert!(!faulty.check(&["log/1"], limit()).unwrap());
}

#[test]
fn a_store_that_is_never_in_time_for_the_caretaker_is_told() {
    let faulty = Arc::new(Faulty::default());
    let (mut caretaker, reader) = caretaker(&faulty, Duration::ZERO);
    faulty.set_fault(Some(Fault::Silent { was_asked: false }));
    for told in [0, 1, 1] {
        let cleaned = caretaker.clean(&reader.log, &reader.replica, Deadline::now(), &|_, _| Ok(()));
        assert!(cleaned.unwrap_err().is_timeout());
        // One that may hold a state for no time has no patience.
        assert_eq!(reader.replica.view().warnings().count(), told);
    }
}

#[test]
fn a_store_that_fails_again_and_again_while_entries_are_removed_is_told() {
    let faulty = Arc::new(Faulty::default());
    let (mut caretaker, reader) = caretaker(&faulty, Duration::from_millis(1));
    faulty.set_fault(Some(Fault::Keeps(Kind::Io)));
    let limit = limit();
    // It may pass, so nobody is told at once.
    while reader.replica.view().warnings().count() == 0 {
        assert!(!limit.has_passed(), "nobody has heard of it");
        let _ = caretaker.clean(&reader.log, &reader.replica, limit, &|_, _| Ok(()));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_log_that_is_lost_after_a_standstill_says_how_long_it_was() {
    let replica = Replica::<Whole>::new(|_| ());
    replica.lose(Error::aborted("without heartbeats nothing is known"));
    assert_eq!(replica.view().stood_still, None);
    let replica = Replica::<Whole>::new(|_| ());
    // It is to be awake again at once, and is not.
    replica.awake(Duration::ZERO);
    thread::sleep(Duration::from_millis(2));
    replica.lose(Error::new(Kind::Io, "the connection was closed"));
    let stood_still = replica.view().stood_still;
    assert!(stood_still.is_some_and(|time| time >= Duration::from_millis(2)), "{stood_still:?}");
    let warnings: Vec<String> = replica.view().warnings().map(str::to_owned).collect();
    assert!(warnings.len() == 1 && warnings[0].starts_with("this tester stood still for"), "{warnings:?}");
    let error = replica.view().why_lost().unwrap();
    assert!(error.to_string().contains("was closed; before that this tester stood still for 0 s"), "{error}");
    assert!(error.remedy().unwrap().contains("must not sleep"), "{error}");
    // A store in a file that does not answer looks the same, and is not left out.
    assert!(
        error.remedy().unwrap().contains("file system") && warnings[0].contains("file system"),
        "{error}"
    );
}

#[test]
fn who_has_just_been_given_up_knows_that_it_stood_still_and_who_is_late_by_little_does_not() {
    let limits = |interval: u64, silence: u64| {
        let [interval, silence] = [interval, silence].map(Duration::from_secs);
        let (sending, waiting) = Heartbeats { interval, silence, must_be_answered: true }.awake_limits();
        (sending.as_secs(), waiting.as_secs())
    };
    // As launchers have by default: they give each other up after 12 s.
    assert_eq!(limits(1, 12), (22, 12));
    // A thread of a busy machine may be late by seconds.
    assert_eq!(limits(1, 1), (5, 4));
    assert_eq!(limits(5, 5), (15, 8));
    assert_eq!(limits(u64::MAX, u64::MAX), (u64::MAX, u64::MAX));
}

#[test]
fn readers_that_wait_for_what_is_gone_go_on_from_the_state() {
    let store = memory();
    let (member, _) = participant::<Compacted>(&store, Mac::none());
    // They wait for entries 0 and 1, which another one has read and removed.
    let words: Vec<u32> = (0..STRIDE as u32).collect();
    let state = Compacted { words, present: BTreeSet::new() };
    let log = log::<true>(&store);
    log.compact(&state, STRIDE, limit()).unwrap();
    for word in 0..5 {
        let index = log.try_append(&Entry::Word(1000 + word), limit()).unwrap();
        assert_eq!(index, Some(STRIDE + u64::from(word)));
    }
    wait_for(member.replica(), |view| view.next == STRIDE + 5);
    let read = member.replica().view().state.words.clone();
    assert_eq!(read[..STRIDE as usize], state.words[..]);
    assert_eq!(read[STRIDE as usize..], [1000, 1001, 1002, 1003, 1004]);
    assert!(member.replica().view().lost.is_none());
}

#[test]
fn a_state_is_taken_only_if_the_job_has_signed_it() {
    let store = memory();
    let log = |mac| Log::<Compacted>::new(Arc::clone(&store), mac);
    let mac = |key| Mac::new(Some(&[key; 32]), "job");
    let state = Compacted { words: vec![7], present: BTreeSet::new() };
    log(mac(1)).compact(&state, STRIDE, limit()).unwrap();
    assert_eq!(log(mac(1)).begin(limit()).unwrap(), (state.clone(), STRIDE));
    let error = log(mac(2)).begin(limit()).unwrap_err();
    assert!(error.to_string().contains("the state in the testers' log is not signed"), "{error}");
    let error = log(Mac::none()).begin(limit()).unwrap_err();
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("--job-key-file")), "{error}");
    // Nor is one without a MAC, or that of another place.
    let moved = mac(1).sign_state(2 * STRIDE, &encode(1, &state).unwrap());
    for forged in [encode(1, &state).unwrap(), moved] {
        store.set(&state_key(STRIDE), &forged, limit()).unwrap();
        assert!(log(mac(1)).begin(limit()).is_err());
    }
    for nonsense in [&b""[..], b"-1", b"x", b"18446744073709551615"] {
        store.set(BASE, nonsense, limit()).unwrap();
        let log = log(mac(1));
        log.has_base.store(true, Ordering::Relaxed);
        let error = log.try_append(&Entry::Word(1), limit()).unwrap_err();
        assert!(error.to_string().contains("is no number"), "{error}");
    }
}

#[test]
fn a_newcomer_that_finds_nothing_where_a_state_was_looks_for_the_next() {
    let (store, _) = filled(2 * STRIDE);
    let reader = Reader::new(&store);
    reader.read_up_to(STRIDE);
    reader.compact();
    reader.read_up_to(2 * STRIDE);
    // As a store answers from which it is removed while somebody waits for it.
    store.set(&state_key(STRIDE), b"", limit()).unwrap();
    let newcomer = thread::spawn({
        let store = SharedStore::clone(&store);
        move || Reader::new(&store).next()
    });
    // So that it looks for sure.
    thread::sleep(LOOK_DELAY);
    reader.compact();
    assert_eq!(newcomer.join().unwrap(), 2 * STRIDE);
}

#[test]
fn a_wait_for_an_entry_asks_soon_whether_it_is_gone_and_then_seldom() {
    let (mut looks, began) = (Looks::new(), Instant::now());
    // As a wait calls what it is to look at.
    let calls = (1..=5 * 600).map(|call| began + Duration::from_millis(200) * call);
    let asked: Vec<Instant> = calls.filter(|now| looks.is_due(*now)).collect();
    assert_eq!(asked[0], began + Duration::from_millis(200));
    assert!(asked.windows(2).all(|pair| pair[1] - pair[0] <= Duration::from_secs(6)));
    assert!((100..150).contains(&asked.len()), "{} times in ten minutes", asked.len());
}

#[test]
fn a_store_that_does_not_answer_is_not_taken_for_one_that_has_nothing_new() {
    let asked = std::cell::Cell::new(0);
    let silent_for = |times: u32| {
        asked.set(0);
        answer::<Compacted, _>(|_| {
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
fn nobody_waits_for_a_silent_store_longer_than_by_its_own_deadline() {
    let faulty = Arc::new(Faulty::default());
    let log = Log::<Compacted>::new(Arc::clone(&faulty) as SharedStore, Mac::none());
    faulty.set_fault(Some(Fault::Silent { was_asked: false }));
    thread::scope(|scope| {
        let first = scope.spawn(|| log.append(&Entry::Word(1), limit()));
        faulty.wait_until_asked();
        let started = Instant::now();
        let soon = Deadline::after(Duration::from_millis(50));
        let error = log.append(&Entry::Word(2), soon).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        faulty.set_fault(None);
        first.join().unwrap().unwrap();
    });
    log.append(&Entry::Word(3), limit()).unwrap();
    let read = [0, 1].map(|index| log.read(index, limit()).unwrap());
    assert_eq!(read, [1, 3].map(|word| Read::Entry(Entry::Word(word))));
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

#[test]
fn an_entry_that_nobody_of_the_job_has_signed_is_passed_over() {
    let store = memory();
    let mac = |key| Mac::new(Some(&[key; 32]), "job");
    let log = |mac| Log::<Whole>::new(Arc::clone(&store), mac);
    // Without a key, with another one, and moved from its place.
    log(Mac::none()).append(&Entry::Word(1), limit()).unwrap();
    log(mac(2)).append(&Entry::Word(2), limit()).unwrap();
    let moved = mac(1).sign(0, &encode(7, &Entry::Word(3)).unwrap());
    store.set("log/2", &moved, limit()).unwrap();
    log(mac(1)).append(&Entry::Word(4), limit()).unwrap();
    let (member, _) = participant::<Whole>(&store, mac(1));
    wait_for(member.replica(), |view| view.next == 4);
    assert_eq!(member.replica().view().state.words, [4]);
    let warning = member.replica().view().warnings().next().unwrap().to_owned();
    assert!(warning.contains("entry 0 of the testers' log was ignored"), "{warning}");
    // A process without a key is told which one is missing.
    let (keyless, threads) = participant::<Whole>(&store, Mac::none());
    wait_for(keyless.replica(), |view| view.lost.is_some());
    assert_eq!(keyless.replica().view().state.words, [1]);
    let lost = keyless.replica().view().lost.clone().unwrap();
    assert!(lost.remedy().is_some_and(|remedy| remedy.contains("--job-key-file")), "{lost}");
    drop(keyless);
    wait_until_gone(&threads);
}

#[test]
fn an_entry_that_cannot_be_read_counts_after_those_before_it() {
    let store = memory();
    let mac = Mac::new(Some(&[1; 32]), "job");
    // It is there first, as on a network that reorders.
    store.set("log/1", &mac.sign(1, &encode(7, &Entry::Word(2)).unwrap()), limit()).unwrap();
    let (keyless, _) = participant::<Whole>(&store, Mac::none());
    Log::<Whole>::new(Arc::clone(&store), Mac::none()).append(&Entry::Word(1), limit()).unwrap();
    wait_for(keyless.replica(), |view| view.lost.is_some());
    assert_eq!(keyless.replica().view().state.words, [1]);
}

#[test]
fn one_that_sends_no_heartbeats_is_given_up_and_its_threads_end_with_it() {
    let store = memory();
    let (mut first, _) = participant::<Compacted>(&store, Mac::none());
    let (second, threads) = participant::<Compacted>(&store, Mac::none());
    for (member, id) in [(&first, 1), (&second, 2)] {
        assert!(member.join(id, format!("beat/{id}"), &Entry::Join(id), limit()).unwrap());
    }
    first.watch(HEARTBEATS, |_, _| Ok(())).unwrap();
    wait_for(second.replica(), View::is_given_up);
    drop(second);
    wait_until_gone(&threads);
    // The caretaker compacts the log.
    for word in 0..STRIDE as u32 {
        first.append(&Entry::Word(word), limit()).unwrap();
    }
    let limit = limit();
    while store.check(&["log/1"], limit).unwrap() {
        assert!(!limit.has_passed(), "nobody has compacted the log");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(!first.replica().view().is_given_up());
}

#[test]
fn whoever_finds_many_lost_at_once_far_from_the_store_is_not_silent_itself() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let (address, _) = far_away(&server, Duration::from_millis(40));
    let [near, far] = [server.local_addr(), address]
        .map(|address| -> SharedStore { Arc::new(TcpStore::connect(address, limit()).unwrap()) });
    let (mut first, _) = participant::<Whole>(&far, Mac::none());
    assert!(first.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    let other = log::<false>(&near);
    (2..62).for_each(|id| other.append(&Entry::Join(id), limit()).unwrap());
    wait_for(first.replica(), |view| view.state.present.len() == 61);
    // To append them all takes longer than the silence after which it would be given up.
    let (interval, silence) = (Duration::from_millis(500), Duration::from_secs(3));
    first.watch(Heartbeats { interval, silence, must_be_answered: true }, |_, _| Ok(())).unwrap();
    wait_for(first.replica(), |view| view.lost.is_some() || view.state.present.len() == 1);
    assert!(first.replica().view().lost.is_none());
}

#[test]
fn a_heartbeat_whose_answer_is_lost_is_sent_again() {
    let faulty = Arc::new(Faulty::default());
    let store: SharedStore = faulty.clone();
    let (mut member, _threads) = participant::<Whole>(&store, Mac::none());
    assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    let sent = || faulty.store.get("beat/1", limit()).unwrap();
    // The first came with the entry.
    let (before, limit) = (sent(), limit());
    faulty.set_fault(Some(Fault::Lost { left: 3 }));
    member.watch(Heartbeats { silence: Duration::from_secs(60), ..HEARTBEATS }, |_, _| Ok(())).unwrap();
    while sent() == before {
        assert!(!limit.has_passed(), "no heartbeat is sent: {:?}", member.replica().view().lost);
        thread::sleep(Duration::from_millis(1));
    }
    assert!(faulty.fault.lock().is_none() && member.replica().view().lost.is_none());
}

#[test]
fn a_place_in_a_line_whose_number_is_lost_is_not_waited_for() {
    let faulty = Arc::new(Faulty::default());
    let store: SharedStore = faulty.clone();
    let log = log::<false>(&store);
    assert_eq!(log.turn_in_line(7, limit()).unwrap(), 1);
    assert_eq!(log.turn_in_line(7, limit()).unwrap(), 2);
    faulty.set_fault(Some(Fault::Lost { left: 1 }));
    assert_eq!(log.turn_in_line(7, limit()).unwrap(), 1);
}

#[test]
fn who_sends_a_heartbeat_once_in_an_age_sends_it() {
    let store = memory();
    let (mut member, threads) = participant::<Whole>(&store, Mac::none());
    assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    let seldom = Heartbeats { interval: Duration::MAX, silence: Duration::MAX, must_be_answered: true };
    member.watch(seldom, |_, _| Ok(())).unwrap();
    // The first came with the entry.
    let limit = limit();
    while store.add("beat/1", 0, limit).unwrap() < 2 {
        assert!(!limit.has_passed(), "no heartbeat was sent");
        thread::sleep(Duration::from_millis(1));
    }
    member.close();
    assert_eq!(threads.strong_count(), 0);
}

#[test]
fn whoever_the_store_takes_for_ended_says_so() {
    let store = memory();
    let (mut member, _) = participant::<Whole>(&store, Mac::none());
    assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    // As when the connection that tells the store of its end is cut.
    store.set("beat/1", ENDED, limit()).unwrap();
    member.watch(HEARTBEATS, |_, _| Ok(())).unwrap();
    wait_for(member.replica(), |view| view.lost.is_some());
    let error = member.replica().view().lost.clone().unwrap();
    assert!(error.is_aborted() && error.to_string().contains("takes it for ended"), "{error}");
    // Another cause stays what it is.
    let (mut other, _) = participant::<Whole>(&store, Mac::none());
    assert!(other.join(2, "beat/2".to_owned(), &Entry::Join(2), limit()).unwrap());
    store.set("beat/2", b"nonsense", limit()).unwrap();
    other.watch(HEARTBEATS, |_, _| Ok(())).unwrap();
    wait_for(other.replica(), |view| view.lost.is_some());
    let error = other.replica().view().lost.clone().unwrap();
    assert!(error.to_string().contains("nonsense"), "{error}");
}

#[test]
fn a_thread_that_panics_loses_the_log() {
    fn loses<M: Machine>(replica: &Replica<M>) {
        let (limit, mut view) = (limit(), replica.view());
        while view.lost.is_none() {
            assert!(!limit.has_passed(), "nobody has heard of it");
            replica.wait_until(&mut view, limit.instant());
        }
        let error = view.lost.clone().unwrap();
        assert!(error.is_aborted() && error.to_string().contains("panicked"), "{error}");
        assert!(error.remedy().unwrap().contains("standard error"), "{error}");
    }
    let replica = Arc::new(Replica::<Whole>::new(|replica| {
        let view = replica.view();
        assert!(view.state.words.is_empty() || view.lost.is_some(), "the one that reads panics");
    }));
    let reader = Participant::start_at_first_entry(log(&memory()), replica).unwrap();
    reader.append(&Entry::Word(1), limit()).unwrap();
    loses(reader.replica());
    reader.close();
    let (mut member, threads) = participant::<Compacted>(&memory(), Mac::none());
    assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    member.watch(HEARTBEATS, |_, _| panic!("the one that tidies panics")).unwrap();
    loses(member.replica());
    member.close();
    assert_eq!(threads.strong_count(), 0);
}

#[test]
fn whoever_watches_one_whose_key_is_gone_beats_on() {
    let store = memory();
    let (mut first, _) = participant::<Compacted>(&store, Mac::none());
    assert!(first.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    first.append(&Entry::Join(2), limit()).unwrap();
    wait_for(first.replica(), |view| view.state.present.contains(&2));
    let silence = Duration::from_secs(3600);
    first.watch(Heartbeats { silence, ..HEARTBEATS }, |_, _| Ok(())).unwrap();
    let limit = limit();
    let beat = || String::from_utf8(store.get("beat/1", limit).unwrap()).unwrap().parse::<u32>().unwrap();
    while beat() < 6 {
        assert!(!limit.has_passed(), "it waits for a key that is gone");
        thread::sleep(Duration::from_millis(1));
    }
    let view = first.replica().view();
    assert!(view.lost.is_none() && view.state.present.contains(&2));
}

#[test]
fn one_whose_key_is_gone_is_missed_as_one_that_is_silent_and_nobody_else() {
    let store = memory();
    let [(mut first, _), (mut second, _)] = [(); 2].map(|()| participant::<Compacted>(&store, Mac::none()));
    for (member, id) in [(&first, 1), (&second, 2)] {
        assert!(member.join(id, format!("beat/{id}"), &Entry::Join(id), limit()).unwrap());
    }
    // It has joined, and has no key.
    first.append(&Entry::Join(3), limit()).unwrap();
    // Long enough for a thread that waits for a processor.
    let silence = Duration::from_secs(3);
    for member in [&mut first, &mut second] {
        wait_for(member.replica(), |view| view.state.present.contains(&3));
        member.watch(Heartbeats { silence, ..HEARTBEATS }, |_, _| Ok(())).unwrap();
    }
    for member in [&first, &second] {
        wait_for(member.replica(), |view| view.state.present == BTreeSet::from([1, 2]));
        assert!(member.replica().view().lost.is_none());
    }
    // One whose key is removed while it is there makes it anew, and stays.
    store.delete_key("beat/2", limit()).unwrap();
    let limit = limit();
    while !store.check(&["beat/2"], limit).unwrap() {
        assert!(!limit.has_passed(), "it sends no heartbeat any more");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_was_said_to_one_number_is_not_about_the_next() {
    let store = memory();
    let (member, _) = participant::<Whole>(&store, Mac::none());
    let joins = |id: u32| member.join(id, format!("beat/{id}"), &Entry::Join(id), limit()).unwrap();
    assert!(joins(13));
    wait_for(member.replica(), |view| view.refusal.is_some() && view.is_given_up());
    assert!(joins(1));
    wait_for(member.replica(), |view| view.next == 2);
    {
        let view = member.replica().view();
        assert_eq!((view.id(), view.refusal.as_deref(), view.is_given_up()), (Some(1), None, false));
    }
    member.append(&Entry::Gone(1), limit()).unwrap();
    wait_for(member.replica(), View::is_given_up);
}

#[test]
fn a_refusal_concerns_the_one_that_wants_to_join() {
    let store = memory();
    let [(refused, _), (other, _)] = [(); 2].map(|()| participant::<Whole>(&store, Mac::none()));
    assert!(refused.join(13, "beat/13".to_owned(), &Entry::Join(13), limit()).unwrap());
    assert!(other.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    for member in [&refused, &other] {
        wait_for(member.replica(), |view| view.next == 2);
    }
    assert_eq!(refused.replica().view().refusal.as_deref(), Some("13 is unlucky"));
    assert_eq!(other.replica().view().refusal, None);
}

#[test]
fn a_store_that_fails_is_lost_and_no_thread_stays() {
    for fault in [Fault::Broken, Fault::Silent { was_asked: false }] {
        let faulty = Arc::new(Faulty::default());
        let store = Arc::clone(&faulty) as SharedStore;
        let (mut member, threads) = participant::<Whole>(&store, Mac::none());
        assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
        member.watch(HEARTBEATS, |_, _| Ok(())).unwrap();
        faulty.set_fault(Some(fault));
        wait_for(member.replica(), |view| view.lost.is_some());
        member.close();
        assert_eq!(threads.strong_count(), 0);
    }
}

#[test]
fn whoever_stood_still_does_not_take_its_store_for_lost() {
    let faulty = Arc::new(Faulty::default());
    let store = Arc::clone(&faulty) as SharedStore;
    let (mut member, _) = participant::<Whole>(&store, Mac::none());
    assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    faulty.set_fault(Some(Fault::Stopped { after: 0 }));
    member.append(&Entry::Word(1), Deadline::after(HEARTBEATS.silence)).unwrap();
    wait_for(member.replica(), |view| view.state.words == [1]);
    // An entry by which a process joins is not written again: it may have been read, and its author missed since.
    faulty.set_fault(Some(Fault::Stopped { after: 0 }));
    let deadline = Deadline::after(HEARTBEATS.silence);
    let error = member.enter(2, "beat/2".to_owned(), &Entry::Join(2), deadline).unwrap_err();
    assert!(stood_still(&error, deadline) && !stood_still(&error, Deadline::now()), "{error}");
    // After its first heartbeat: it may try again under another number.
    faulty.set_fault(Some(Fault::Stopped { after: 1 }));
    let deadline = Deadline::after(HEARTBEATS.silence);
    assert!(!member.join(4, "beat/4".to_owned(), &Entry::Join(4), deadline).unwrap());
    assert!(member.join(3, "beat/3".to_owned(), &Entry::Join(3), limit()).unwrap());
    member.watch(HEARTBEATS, |_, _| Ok(())).unwrap();
    faulty.set_fault(Some(Fault::Stopped { after: 0 }));
    let limit = limit();
    let wait_until = |what: &dyn Fn() -> bool| {
        while !what() {
            assert!(!limit.has_passed() && member.replica().view().lost.is_none());
            thread::sleep(Duration::from_millis(1));
        }
    };
    wait_until(&|| faulty.fault.lock().is_none());
    let beats = || store.get("beat/3", limit).unwrap();
    let before = beats();
    wait_until(&|| beats() != before);
}

#[test]
fn whoever_stood_still_while_it_began_asks_again() {
    let faulty = Arc::new(Faulty::default());
    let store = Arc::clone(&faulty) as SharedStore;
    faulty.set_fault(Some(Fault::Stopped { after: 0 }));
    let (log, replica) = (log::<true>(&store), Arc::new(Replica::new(|_| ())));
    let member = Participant::start(log, replica, Deadline::after(HEARTBEATS.silence)).unwrap();
    assert!(faulty.fault.lock().is_none());
    faulty.set_fault(Some(Fault::Stopped { after: 0 }));
    member.announce("beat/1", Deadline::after(HEARTBEATS.silence)).unwrap();
    assert!(faulty.fault.lock().is_none());
    assert_eq!(store.add("beat/1", 0, limit()).unwrap(), 1);
    member.close();
}

#[test]
fn a_store_that_is_slow_for_a_while_is_not_lost_to_one_that_may_wait() {
    let faulty = Arc::new(Faulty::default());
    let store = Arc::clone(&faulty) as SharedStore;
    let (mut member, threads) = participant::<Whole>(&store, Mac::none());
    assert!(member.join(1, "beat/1".to_owned(), &Entry::Join(1), limit()).unwrap());
    member.watch(Heartbeats { must_be_answered: false, ..HEARTBEATS }, |_, _| Ok(())).unwrap();
    for _ in 0..3 {
        faulty.set_fault(Some(Fault::Silent { was_asked: false }));
        faulty.wait_until_asked();
        thread::sleep(HEARTBEATS.silence);
    }
    faulty.set_fault(None);
    member.append(&Entry::Word(1), limit()).unwrap();
    wait_for(member.replica(), |view| !view.state.words.is_empty());
    assert!(member.replica().view().lost.is_none());
    member.close();
    assert_eq!(threads.strong_count(), 0);
}
