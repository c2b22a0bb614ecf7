//! Entries that a state has taken the place of: who removes them, what a newcomer reads, and stores that fail meanwhile.

use proptest::prelude::*;

use super::*;
use crate::log::compaction::{IN_PARTS, PART, state_key};
use crate::log::participant::Caretaker;

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
