use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;
use crate::collective::ReduceOp;
use crate::group::GroupOptions;
use crate::store::{MemoryStore, checking};

#[test]
fn an_adapter_s_calls_are_not_the_program_s_and_may_be_left_out_of_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let trace = Trace::to_file(folder.path().join("t.json"), Rank::MAIN);
    let groups = ProcessGroup::in_process_in(Default::default(), WorldSize::new(2).unwrap(), &trace).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let aside = group.new_group_aside(Trace::disabled()).unwrap();
                let before = group.calls();
                let cause = aside.note_remote_error(Error::mismatch("told before"));
                (0..3).for_each(|_| aside.barrier().unwrap());
                assert_eq!(group.calls(), before);
                assert!(aside.remote_error().is_none(), "{cause}: it has calls of its own");
                assert_eq!((group.trace().is_enabled(), aside.trace().is_enabled()), (true, false));
                let other = group.new_group(&[Rank::new(0), Rank::new(1)]).unwrap().unwrap();
                other.barrier().unwrap();
                assert!(group.calls() > before);
            });
        }
    });
}

#[test]
fn what_ends_a_wait_is_not_lost_while_keys_are_removed() {
    thread_local! {
        static CHECKS: Cell<u32> = const { Cell::new(0) };
    }
    fn ends() -> Result<()> {
        CHECKS.set(CHECKS.get() + 1);
        Err(Error::aborted("enough"))
    }
    let (store, key): (SharedStore, _) = (Arc::new(checking()), ["key".to_owned()]);
    let after = interrupt::interruptible(ends, || {
        clear(&store, &key);
        assert_eq!(CHECKS.get(), 0);
        // The next wait gets it.
        store.get("key", Deadline::after(LIMIT)).unwrap_err()
    });
    assert!(after.to_string().contains("enough"), "{after}");
}

#[test]
fn of_long_lists_that_differ_only_the_beginnings_are_sent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    let trace = Trace::to_file(&path, Rank::MAIN);
    let world = WorldSize::new(20).unwrap();
    let groups = ProcessGroup::in_process_in(Default::default(), world, &trace).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let left_out = if group.rank() == Rank::new(7) { 17 } else { 18 };
                let list: Vec<Rank> = world.ranks().filter(|rank| rank.get() != left_out).collect();
                let said = group.new_group(&list).unwrap_err().to_string();
                assert!(said.contains("rank 0 asks for [0, 1, 2, 3,"), "{said}");
                assert!(said.contains(", 15, ..], rank 7 for [0, 1, 2, 3,"), "{said}");
            });
        }
    });
    trace.flush();
    let calls = std::fs::read_to_string(path).unwrap();
    assert!(calls.contains("17 x i64") && !calls.contains("19 x i64"), "{calls}");
}

/// Runs `rank` on threads of a group that has met in a store, with that store.
fn met(world: u32, rank: impl Fn(ProcessGroup, SharedStore) + Sync) {
    let (store, world): (SharedStore, _) = (Arc::new(MemoryStore::new()), WorldSize::new(world).unwrap());
    std::thread::scope(|scope| {
        for number in world.ranks() {
            let (store, rank) = (store.clone(), &rank);
            scope.spawn(move || {
                let met = rendezvous::from_store(store.clone(), number, world, LIMIT).unwrap();
                rank(ProcessGroup::join(met, GroupOptions::default()).unwrap(), store)
            });
        }
    });
}

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_part_has_the_order_of_its_list_and_only_members_make_it() {
    met(3, |group, store| {
        if group.rank() == Rank::new(1) {
            return group.barrier().unwrap();
        }
        let members = [Rank::new(2), Rank::MAIN];
        let part = group.part(store.clone(), "pair", &members, LIMIT).unwrap();
        assert_eq!(part.rank().index(), usize::from(group.rank().is_main()));
        assert_eq!(part.global_rank(Rank::MAIN).unwrap(), Rank::new(2));
        assert_eq!(part.transport(), group.transport());
        let mut ranks = [i64::from(group.rank().get())];
        part.all_reduce(&mut ranks, ReduceOp::Sum).unwrap();
        assert_eq!(ranks, [2]);
        // One of a part.
        let turned = [Rank::new(1), Rank::MAIN];
        let again = part.part(store.clone(), "pair of the pair", &turned, LIMIT).unwrap();
        again.barrier().unwrap();
        let other = part.new_group(&turned).unwrap().unwrap();
        assert!(other.part(store, "third", &turned, LIMIT).unwrap_err().to_string().contains("first group"));
        group.barrier().unwrap();
    });
}

#[test]
fn sub_groups_know_their_numbers_and_each_has_its_own() {
    met(2, |group, store| {
        let all = [Rank::MAIN, Rank::new(1)];
        let mut numbers = vec![group.inner.config.number.unwrap()];
        for _ in 0..2 {
            let pair = group.new_group(&all).unwrap().unwrap();
            let nested = pair.new_group(&all).unwrap().unwrap();
            numbers.extend([pair, nested].map(|group| group.inner.config.number.unwrap()));
        }
        numbers.push(group.part(store, "group/0", &all, LIMIT).unwrap().inner.config.number.unwrap());
        let others = group.all_gather_object(&numbers).unwrap();
        assert_eq!(others, [numbers.clone(), numbers.clone()]);
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 6);
    });
}

#[test]
fn a_store_does_not_grow_with_the_number_of_sub_groups() {
    met(3, |group, store| {
        let keys = || {
            // While all are here, nobody writes.
            group.barrier().unwrap();
            let keys = store.num_keys(Deadline::after(LIMIT)).unwrap();
            group.barrier().unwrap();
            keys
        };
        let before = keys();
        for _ in 0..3 {
            if let Some(pair) = group.new_group(&[Rank::MAIN, Rank::new(2)]).unwrap() {
                pair.split(Some(0), 0).unwrap().unwrap().barrier().unwrap();
            }
            group.new_group_aside(Trace::disabled()).unwrap().barrier().unwrap();
            group.split((!group.rank().is_main()).then_some(7), 0).unwrap();
        }
        assert_eq!(keys(), before);
        // What the last parts wrote stays.
        let pair = [Rank::MAIN, Rank::new(2)];
        let make = |number: usize| {
            if pair.contains(&group.rank()) {
                let part = group.part(store.clone(), &format!("part {number}"), &pair, LIMIT);
                part.unwrap().barrier().unwrap();
            }
        };
        (0..KEPT_PARTS).for_each(make);
        let full = keys();
        assert!(full > before);
        (KEPT_PARTS..2 * KEPT_PARTS).for_each(make);
        assert_eq!(keys(), full);
        group.clear_parts()();
        assert_eq!(keys(), before);
    });
}

#[test]
fn nothing_of_a_meeting_stays_in_its_store_when_it_is_cleared() {
    met(3, |group, store| {
        let left = || store.num_keys(Deadline::after(LIMIT)).unwrap();
        group.barrier().unwrap();
        assert!(left() > 0);
        group.barrier().unwrap();
        ProcessGroup::clear_meeting(store.clone(), group.rank());
        group.barrier().unwrap();
        assert_eq!(left(), 0);
    });
}

#[test]
fn members_that_mean_different_groups_and_those_that_do_not_come_are_named() {
    met(3, |group, store| {
        let ranks = |list: &[u32]| list.iter().map(|rank| Rank::new(*rank)).collect::<Vec<_>>();
        // Rank 2 comes as rank 1 of the group for which rank 0 waits; and so does rank 1, when that has ended.
        if group.rank() == Rank::new(1) {
            store.wait(&["differs/mesh/failure"], Deadline::after(LIMIT)).unwrap();
        }
        let list = if group.rank() == Rank::new(2) { ranks(&[0, 2]) } else { ranks(&[0, 1]) };
        let error = group.part(store.clone(), "differs", &list, LIMIT).unwrap_err();
        let said = error.to_string();
        assert!(error.is_mismatch(), "{said}");
        assert!(said.contains("disagree on the new group") || said.contains("as rank 1"), "{said}");
        if group.rank().is_main() {
            let soon = Duration::from_millis(500);
            let error = group.part(store, "late", &ranks(&[2, 0]), soon).unwrap_err();
            assert!(error.is_timeout() && error.peer() == Some(Rank::MAIN), "{error}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_member_that_has_died_before_it_came_is_not_waited_for() {
    met(3, |group, _| {
        let pair = [Rank::MAIN, Rank::new(2)];
        if group.rank() == Rank::new(2) {
            // It agrees, and then does not come.
            group.agree_on(&pair).unwrap();
            return group.abort(Error::aborted("a test"));
        }
        let start = Instant::now();
        let made = group.with_timeout(LIMIT).new_group(&pair);
        match group.rank().is_main() {
            true => assert!(made.unwrap_err().to_string().contains("has ended: "), "who waits is told"),
            false => assert!(made.is_ok_and(|none| none.is_none())),
        }
        assert!(start.elapsed() < LIMIT / 2, "it took {:?}", start.elapsed());
    });
}

#[test]
fn so_it_is_between_threads_of_one_process() {
    let groups = ProcessGroup::in_process(WorldSize::new(4).unwrap()).unwrap();
    let have_agreed = Barrier::new(groups.len());
    std::thread::scope(|scope| {
        for group in groups {
            let have_agreed = &have_agreed;
            scope.spawn(move || {
                let part = [Rank::MAIN, Rank::new(2), Rank::new(3)];
                let group = group.with_timeout(LIMIT);
                let name = group.agree_on(&part).unwrap();
                have_agreed.wait();
                match group.rank().get() {
                    // Neither blames the other, which waits no longer either.
                    0 | 3 => {
                        let error = group.join_subgroup(&name, &part, Caller::NewGroup).unwrap_err();
                        assert!(error.to_string().contains("has ended: "), "{error}");
                        assert_eq!(error.peer(), None, "{error}");
                    }
                    2 => group.abort(Error::aborted("a test")),
                    _ => {}
                }
            });
        }
    });
}

#[test]
fn a_thread_that_waits_no_longer_for_a_new_group_tells_those_that_wait_and_those_that_come_later() {
    let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
    let has_ended = Barrier::new(groups.len());
    std::thread::scope(|scope| {
        for group in groups {
            let has_ended = &has_ended;
            scope.spawn(move || {
                let all: Vec<Rank> = group.world_size().ranks().collect();
                let name = group.agree_on(&all).unwrap();
                let come = |timeout| {
                    let group = group.with_timeout(timeout);
                    group.join_subgroup(&name, &all, Caller::NewGroup).map(drop).unwrap_err()
                };
                let is_last = group.rank() == Rank::new(2);
                if is_last {
                    has_ended.wait();
                }
                let error = come(if group.rank().is_main() { LIMIT / 100 } else { LIMIT });
                if !is_last {
                    has_ended.wait();
                }
                match group.rank().is_main() {
                    true => assert!(error.is_timeout() && error.peer().is_some(), "{error}"),
                    false => assert!(error.to_string().contains("rank 0 does not wait"), "{error}"),
                }
            });
        }
    });
}

#[test]
fn a_member_that_the_group_refuses_is_not_waited_for_whoever_has_failed() {
    met(3, |group, _| {
        match group.rank().get() {
            0 => {
                let pair = [Rank::MAIN, Rank::new(1)];
                let made = group.with_timeout(LIMIT).aside_among(&pair, Caller::RpcStart, LIMIT);
                assert!(made.unwrap_err().to_string().contains("no sum"), "who waits is told");
            }
            // It does not come, and neither of the two is the cause.
            1 => {
                while group.watched_failure().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            _ => {
                // Most times rank 0 waits by then.
                std::thread::sleep(Duration::from_millis(200));
                group.abort(Error::timeout("no sum").with_peer(Rank::new(2)));
            }
        }
    });
}

#[test]
fn a_rank_connects_several_pairs_at_a_time() {
    met(3, |group, _| {
        let pairs = [[0, 1], [0, 2], [1, 2]].map(|pair| pair.map(Rank::new));
        let (begun, limit) = (AtomicUsize::new(0), Deadline::after(LIMIT));
        let connected = |peer: Rank, pair: Result<ProcessGroup>| {
            begun.fetch_add(1, Ordering::Relaxed);
            // Of pairs that are connected one after the other, the second does not begin before this returns.
            while begun.load(Ordering::Relaxed) < 2 {
                assert!(!limit.has_passed());
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut ranks = [i64::from(group.rank().get())];
            pair?.all_reduce(&mut ranks, ReduceOp::Sum)?;
            assert_eq!(ranks[0], i64::from(group.rank().get() + peer.get()));
            Ok(())
        };
        group.pairs_aside(pairs.into_iter(), Caller::RpcStart, connected).unwrap();
        group.barrier().unwrap();
    });
}

#[test]
fn who_waits_for_the_threads_that_connect_pairs_can_still_be_interrupted() {
    static IS_PRESSED: AtomicBool = AtomicBool::new(false);
    fn pressed() -> Result<()> {
        if IS_PRESSED.load(Ordering::SeqCst) { Err(Error::aborted("the user gives up")) } else { Ok(()) }
    }
    met(3, |group, _| {
        let pairs = [[0, 1], [0, 2]].map(|pair| pair.map(Rank::new));
        if !group.rank().is_main() {
            return group.pairs_aside(pairs.into_iter(), Caller::RpcStart, |_, _| Ok(())).unwrap_or_default();
        }
        let (begun, limit) = (AtomicUsize::new(0), Deadline::after(LIMIT));
        let waits = std::thread::current().id();
        let connected = |_, pair: Result<ProcessGroup>| {
            let _pair = pair?;
            begun.fetch_add(1, Ordering::SeqCst);
            // Two threads have a pair each.
            while begun.load(Ordering::SeqCst) < 2 {
                assert!(!limit.has_passed());
                std::thread::sleep(Duration::from_millis(1));
            }
            if std::thread::current().id() != waits {
                IS_PRESSED.store(true, Ordering::SeqCst);
                while group.watched_failure().is_none() {
                    assert!(!limit.has_passed());
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Ok(())
        };
        let connect = || group.pairs_aside(pairs.into_iter(), Caller::RpcStart, connected);
        let error = interrupt::interruptible(pressed, connect).unwrap_err();
        assert!(error.to_string().contains("the user gives up"), "{error}");
    });
}

#[test]
fn only_who_has_the_number_of_the_whole_can_know_that_of_a_part() {
    let number = |whole: u8, name| super::super::connect_part::number_of(&[whole; 16], name);
    assert_eq!(number(1, "a"), number(1, "a"));
    assert_ne!(number(1, "a"), number(1, "b"));
    assert_ne!(number(1, "a"), number(2, "a"));
    assert_ne!(number(1, "a"), [1; 16]);
}
