//! Heartbeats, and what many rounds leave in the store.

use std::collections::BTreeSet;

use super::*;
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

fn wait_for_round(participant: &Participant<MembersState>, round: u64) {
    let (replica, limit) = (participant.replica(), limit());
    let mut view = replica.view();
    while view.state.round() < round {
        assert!(!limit.has_passed(), "round {} of {round}", view.state.round());
        replica.wait_until(&mut view, limit.instant());
    }
}
