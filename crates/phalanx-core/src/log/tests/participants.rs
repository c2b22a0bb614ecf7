//! Heartbeats and standstills: who is given up, what a participant says of its store, and that no thread stays.

use std::time::Instant;

use super::*;
use crate::log::compaction::{Looks, answer};
use crate::store::{TcpStore, TcpStoreServer, far_away};

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
fn of_several_that_append_an_entry_of_each_of_many_each_begins_somewhere_else() {
    assert!(from_a_random_one(Vec::<u32>::new()).is_empty());
    let mut first = BTreeSet::new();
    for _ in 0..32 {
        let mut all = from_a_random_one((0..1000).collect::<Vec<u32>>());
        first.insert(all[0]);
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
    }
    assert!(first.len() > 8, "{first:?}");
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
    (20..80).for_each(|id| other.append(&Entry::Join(id), limit()).unwrap());
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
fn a_process_that_was_forked_from_a_participant_s_does_not_wait_for_its_threads() {
    let replica = Arc::new(Replica::<Whole>::new(|_| ()));
    let mut participant = Participant::start_at_first_entry(log(&memory()), Arc::clone(&replica)).unwrap();
    // Of no process.
    participant.process = 0;
    let view = replica.view();
    let (left, leaves) = std::sync::mpsc::channel();
    thread::spawn(move || {
        drop(participant);
        left.send(()).unwrap();
    });
    leaves.recv_timeout(Duration::from_secs(20)).unwrap();
    drop(view);
    replica.close();
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
