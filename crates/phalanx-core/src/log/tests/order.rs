//! Who appends and who reads: one order, few requests, and no holes.

use std::sync::Barrier;

use super::*;
use crate::store::{Request, Watched};

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
    let waits = Some(LINE_TIMEOUTS.0);
    let error = log.write(5, b"word", waits, short).err().unwrap();
    assert!(error.is_timeout(), "{error}");
    assert!(log.write(5, b"word", waits, limit()).unwrap().is_none());
    assert!(!store.check(&["log/5"], limit()).unwrap());
}

#[test]
fn who_is_far_from_the_store_stays_in_the_line_while_lost_packets_are_sent_again() {
    let waits = [0, 20, 100, 200, 5000].map(|answer| line_timeout(Duration::from_millis(answer)).as_millis());
    assert_eq!(waits, [1000, 1000, 1500, 3000, 3000]);
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
