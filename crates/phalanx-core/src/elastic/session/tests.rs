//! Heartbeats, and what many rounds leave in the store.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use super::*;
use crate::error::Kind;
use crate::log::{Read, STRIDE};
use crate::store::MemoryStore;

fn limit() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn worker(id: WorkerId, slot: u32, process: u32) -> Worker {
    Worker { id, host: "here".to_owned(), slot, process }
}

#[test]
fn whoever_comes_next_has_another_heartbeat_and_there_are_never_many() {
    let store = MemoryStore::new();
    let stay = |slot| worker(next_id(&store, slot, limit()).unwrap(), slot, 1).heartbeat_key();
    let keys: Vec<String> = (0..40).map(|_| stay(3)).collect();
    for turn in keys.windows(8) {
        assert_eq!(turn.iter().collect::<BTreeSet<_>>().len(), 8, "{turn:?}");
    }
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), 8);
    assert!(!keys.contains(&stay(4)));
}

#[test]
fn each_round_has_a_number_that_its_members_need_not_ask_for() {
    let members = [WorkerId(7), WorkerId(9)];
    let number = group_number(3, &members);
    assert_eq!(number, group_number(3, &members));
    assert_ne!(number, group_number(4, &members));
    assert_ne!(number, group_number(3, &[WorkerId(7), WorkerId(10)]));
    assert_ne!(number, group_number(3, &members[..1]));
}

#[test]
fn a_frozen_successor_is_not_kept_alive_by_the_heartbeats_of_the_one_before() {
    let (store, limit): (SharedStore, _) = (Arc::new(MemoryStore::new()), limit());
    let worker = |slot, process| worker(next_id(&*store, slot, limit).unwrap(), slot, process);
    // Given up, though it has not read that yet.
    let before = worker(1, 10);
    let (successor, me) = (worker(1, 11), worker(0, 12));
    let settings = Settings { min: 2, max: 2, reset_limit: None };
    let join = |worker: &Worker| Entry::Join { worker: worker.clone(), settings };
    let mut watcher = participate(&store, &CurrentRound::new(Arc::clone(&store), "here")).unwrap();
    watcher.join(me.id, me.heartbeat_key(), &join(&me), limit).unwrap();
    store.add(&successor.heartbeat_key(), 1, limit).unwrap();
    watcher.append(&join(&successor), limit).unwrap();
    let (interval, silence) = (Duration::from_millis(20), Duration::from_millis(200));
    watcher.watch(Heartbeats { interval, silence, must_be_answered: false }, |_, _| Ok(())).unwrap();
    let log = Log::<MembersState>::new(Arc::clone(&store), Mac::none());
    while !store.check(&["log/2"], limit).unwrap() {
        assert!(!limit.has_passed(), "the successor's silence was never noticed");
        store.add(&before.heartbeat_key(), 1, limit).unwrap();
        std::thread::sleep(interval);
    }
    let gone = log.read(2, limit).unwrap();
    let Read::Entry(Entry::Gone { worker, by, why: Departure::Silent(_) }) = gone else { panic!("{gone:?}") };
    assert_eq!((worker, by), (successor.id, me.id));
}

#[test]
fn the_store_of_a_job_with_ten_thousand_kills_stays_small() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let first = participate(&store, &CurrentRound::new(Arc::clone(&store), "here")).unwrap();
    let append = |entry: Entry| first.append(&entry, limit()).unwrap();
    let settings = Settings { min: 1, max: 4, reset_limit: None };
    let join = |id, slot| Entry::Join { worker: worker(WorkerId(id), slot, id as u32), settings };
    let mut places: Vec<u64> = (0..4).collect();
    (0..4).for_each(|slot| append(join(slot, slot as u32)));
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
        append(Entry::Exited { slot: victim as u32, process: dead as u32, nonce: kill });
        for id in places.iter().filter(|id| **id != dead) {
            append(Entry::Gone { worker: WorkerId(dead), by: WorkerId(*id), why: Departure::Died });
            append(Entry::Ready { round, worker: WorkerId(*id), can_replay: false });
        }
        append(join(successor, victim as u32));
        places[victim] = successor;
        // Once a second, say.
        if kill % 10 == 9 {
            wait_for_round(&first, round + 1);
            first.compact(limit()).unwrap();
            round_store::sweep(&*store, round + 1, limit()).unwrap();
        }
        most = most.max(store.num_keys(limit()).unwrap());
    }
    // Eight entries, and the keys of a round, for each kill of that second; the entries since the last stride.
    assert!(most < 10 * (8 + 14) + STRIDE as usize + 10, "{most}");
    let base = String::from_utf8(store.get("base", limit()).unwrap()).unwrap();
    assert!(base.parse::<u64>().unwrap() + 2 * STRIDE > 4 + 8 * 10_000, "{base}");
    let newcomer = participate(&store, &CurrentRound::new(Arc::clone(&store), "here")).unwrap();
    wait_for_round(&newcomer, 10_001);
    assert_eq!(newcomer.replica().view().state, first.replica().view().state);
}

#[test]
fn a_death_that_a_worker_has_read_is_not_told_again() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    // The first two entries are theirs.
    let [first, second] = [0, 1].map(|slot| session(&store, slot));
    wait_for_round(&first.participant, 1);
    let members = [first.id(), second.id()];
    let lost = Error::new(Kind::PeerFailed, "it died").with_peer(Rank::new(1));
    for _ in 0..2 {
        first.leave(&members, Some(&lost)).unwrap();
        wait_until_gone(&first.participant, second.id());
    }
    assert!(store.check(&["log/2"], limit()).unwrap());
    assert!(!store.check(&["log/3"], limit()).unwrap());
}

#[test]
fn a_process_that_was_forked_from_a_worker_s_does_not_tell_its_end() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    // The first two entries are theirs.
    let [first, mut second] = [0, 1].map(|slot| session(&store, slot));
    // Of no process.
    second.me.process = 0;
    drop(second);
    assert!(!store.check(&["log/2"], limit()).unwrap());
    drop(first);
    assert!(store.check(&["log/2"], limit()).unwrap());
}

#[test]
fn that_a_round_cannot_be_used_is_told_once_however_many_entries_follow() {
    let store: SharedStore = Arc::new(MemoryStore::new());
    let current = CurrentRound::new(Arc::clone(&store), "here");
    let participant = participate(&store, &current).unwrap();
    let append = |entry: Entry| participant.append(&entry, limit()).unwrap();
    let gone = |id| Entry::Gone { worker: WorkerId(id), by: WorkerId(0), why: Departure::Died };
    let settings = Settings { min: 3, max: 3, reset_limit: None };
    (0..3).for_each(|id| append(Entry::Join { worker: worker(WorkerId(id), id as u32, 1), settings }));
    wait_for_round(&participant, 1);
    *current.phase.lock() = Phase::Joining { round: 1, rank: Rank::MAIN, is_told: false };
    append(gone(1));
    append(Entry::Exited { slot: 7, process: 1, nonce: 1 });
    append(gone(2));
    // Those before it have been read.
    wait_until_gone(&participant, WorkerId(2));
    assert_eq!(store.get("keys/1", limit()).unwrap(), b"mesh/failure\n");
}

/// A worker of a job of two, which has asked to take part.
fn session(store: &SharedStore, slot: u32) -> Session {
    let current = CurrentRound::new(Arc::clone(store), "here");
    let participant = participate(store, &current).unwrap();
    let mut session = Session {
        participant,
        current,
        me: worker(WorkerId(0), slot, std::process::id()),
        interface: Ipv4Addr::LOCALHOST.into(),
        credentials: Credentials::default(),
        settings: Settings { min: 2, max: 2, reset_limit: None },
        local: (slot, 2),
        options: Options::default(),
        ended: false,
    };
    session.join().unwrap();
    session
}

fn wait_for_round(participant: &Participant<MembersState>, round: u64) {
    wait_for(participant, |state| state.round() >= round);
}

fn wait_until_gone(participant: &Participant<MembersState>, worker: WorkerId) {
    wait_for(participant, |state| state.rank(worker).is_none());
}

fn wait_for(participant: &Participant<MembersState>, what: impl Fn(&MembersState) -> bool) {
    let (replica, limit) = (participant.replica(), limit());
    let mut view = replica.view();
    while !what(&view.state) {
        assert!(!limit.has_passed(), "round {}: {:?}", view.state.round(), view.state);
        replica.wait_until(&mut view, limit.instant());
    }
}
