use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use super::post::{AHEAD, POSTED};
use super::tests::{CALL, blocks, go_on, run};
use super::*;

/// A call of which `root` sends the data.
fn from(root: usize) -> Call {
    CALL ^ (1 + root as u128)
}

fn needs(control_block: &ControlBlock, root: usize) -> Needs {
    if control_block.me() == root { Needs::Nobody } else { Needs::Member(root) }
}

/// The root sends `bytes` to all; the others get what they have received.
fn send(control_block: &mut ControlBlock, root: usize, bytes: &[u8]) -> Option<Vec<u8>> {
    let (me, needs) = (control_block.me(), needs(control_block, root));
    let own = if me == root { bytes } else { &[] };
    let slots =
        control_block.post((from(root), 0), own, needs, &mut go_on).unwrap().slots(&mut go_on).unwrap();
    (me != root).then(|| slots.bytes(root).to_vec())
}

fn meet(control_block: &mut ControlBlock) {
    let me = [control_block.me() as u8; 100];
    let slots = control_block.small(CALL, &me).slots(&mut go_on).unwrap();
    for member in 0..slots.control_block.members() {
        assert_eq!(slots.bytes(member), [member as u8; 100]);
    }
}

/// Two members that have met.
fn two() -> [ControlBlock; 2] {
    let mut blocks = blocks(2).into_iter().map(|(control_block, _)| control_block);
    let mut two = [blocks.next().unwrap(), blocks.next().unwrap()];
    thread::scope(|scope| two.iter_mut().for_each(|one| drop(scope.spawn(|| meet(one)))));
    two
}

#[test]
fn what_is_posted_reaches_those_who_need_it_between_meetings_and_from_changing_roots() {
    run(3, |control_block, _| {
        for round in 0..20_000usize {
            let root = round / 40 % 3;
            let bytes = vec![round as u8; [0, 4, 24, 25, 64, 300, POSTED][round % 7]];
            let received = send(control_block, root, &bytes);
            assert!(received.is_none_or(|received| received == bytes));
            if round % 53 == 0 || round % 59 == 0 {
                meet(control_block);
            }
        }
    });
}

#[test]
fn who_needs_all_gets_all_and_its_own_and_is_not_waited_for() {
    run(3, |control_block, _| {
        for round in 0..5_000u32 {
            let me = control_block.me();
            let bytes = [(me as u8).wrapping_add(round as u8); 12];
            let needs = if me == 0 { Needs::All } else { Needs::Nobody };
            let posted = control_block.post((CALL, 0), &bytes, needs, &mut go_on).unwrap();
            let slots = posted.slots(&mut go_on).unwrap();
            for member in 0..3 {
                let expected = [(member as u8).wrapping_add(round as u8); 12];
                assert_eq!(slots.bytes(member), if me == 0 { &expected[..] } else { &[] });
            }
        }
    });
}

#[test]
fn a_root_is_so_many_posts_ahead_and_then_waits_for_who_is_late() {
    let [mut root, mut late] = two();
    for number in 0..AHEAD as u8 {
        assert_eq!(send(&mut root, 0, &[number]), None);
    }
    let more = root.post((from(0), 0), &[], Needs::Nobody, &mut |member, difference| {
        assert_eq!((member, difference), (1, None));
        Err("enough")
    });
    assert_eq!(more.map(|_| ()), Err("enough"));
    for number in 0..AHEAD as u8 {
        assert_eq!(send(&mut late, 0, &[]).unwrap(), [number]);
    }
    // It is no call that this rank has begun, so the next one is made.
    assert_eq!(send(&mut root, 0, &[77]), None);
    assert_eq!(send(&mut late, 0, &[]).unwrap(), [77]);
}

#[test]
fn before_all_have_met_nobody_goes_ahead() {
    let mut blocks = blocks(2);
    let (mut other, _) = blocks.swap_remove(1);
    let (mut root, _) = blocks.swap_remove(0);
    let alone = root.post((CALL, 0), &[1], Needs::Nobody, &mut go_on).unwrap();
    assert_eq!(alone.slots(&mut |_, _| Err("enough")).map(|_| ()), Err("enough"));
    // It has posted its data all the same, and makes no other call.
    let posted = other.post((CALL, 0), &[], Needs::Member(0), &mut go_on).unwrap();
    assert_eq!(posted.slots(&mut go_on).unwrap().bytes(0), [1]);
    let again = root.post((CALL, 0), &[2], Needs::Nobody, &mut go_on).unwrap();
    assert_eq!(again.slots(&mut |_, _| Err("enough")).map(|_| ()), Err("enough"));
}

#[test]
fn sleepers_are_woken_by_a_post_and_by_the_room_that_one_makes() {
    run(2, |control_block, _| {
        meet(control_block);
        for round in 0..20 * AHEAD {
            if round % AHEAD == 0 && control_block.me() == (round / AHEAD % 2) as usize {
                thread::sleep(Duration::from_millis(3));
            }
            send(control_block, 0, &[1; 40]);
        }
    });
}

/// What the two find when each runs its part of a program. They return the first difference.
fn differences(
    first: impl FnOnce(&mut ControlBlock) -> Result<(), Difference> + Send,
    second: impl FnOnce(&mut ControlBlock) -> Result<(), Difference> + Send,
) -> [Result<(), Difference>; 2] {
    let [mut one, mut other] = two();
    // No rank ends before both have found what they can: their memory stays.
    let both = &Barrier::new(2);
    thread::scope(|scope| {
        let one = scope.spawn(move || (first(&mut one), both.wait()).0);
        let other = scope.spawn(move || (second(&mut other), both.wait()).0);
        [one.join().unwrap(), other.join().unwrap()]
    })
}

fn told(_: usize, difference: Option<Difference>) -> Result<(), Difference> {
    difference.map_or(Ok(()), Err)
}

fn post(control_block: &mut ControlBlock, call: Call, number: u64, needs: Needs) -> Result<(), Difference> {
    control_block.post((call, number), &[], needs, &mut told)?.slots(&mut told).map(drop)
}

fn meeting(control_block: &mut ControlBlock, call: Call) -> Result<(), Difference> {
    control_block.small(call, &[]).slots(&mut told).map(drop)
}

#[test]
fn two_that_both_send_find_it_when_they_meet() {
    let both_send = |call: Call| {
        move |control_block: &mut ControlBlock| {
            post(control_block, call, 5, Needs::Nobody)?;
            post(control_block, from(9), 6, Needs::Nobody)?;
            meeting(control_block, CALL)
        }
    };
    let found = differences(both_send(from(0)), both_send(from(1)));
    assert_eq!(found[0], Err(Difference { earlier: Some((from(0), 5)), theirs: from(1) }));
    assert_eq!(found[1], Err(Difference { earlier: Some((from(1), 5)), theirs: from(0) }));
}

#[test]
fn two_that_both_send_find_it_when_there_is_no_more_room() {
    let sends = |call: Call| {
        move |control_block: &mut ControlBlock| {
            (0..=AHEAD).try_for_each(|number| {
                post(control_block, if number == 1 { call } else { CALL }, number, Needs::Nobody)
            })
        }
    };
    let found = differences(sends(from(0)), sends(from(1)));
    assert_eq!(found[0], Err(Difference { earlier: Some((from(0), 1)), theirs: from(1) }));
    assert_eq!(found[1], Err(Difference { earlier: Some((from(1), 1)), theirs: from(0) }));
}

#[test]
fn one_that_receives_finds_that_the_other_has_posted_another_call() {
    let found = differences(
        |control_block| post(control_block, from(0), 1, Needs::Nobody),
        |control_block| post(control_block, from(5), 1, Needs::Member(0)),
    );
    assert_eq!(found, [Ok(()), Err(Difference { earlier: None, theirs: from(0) })]);
}

#[test]
fn one_at_a_meeting_and_one_that_waits_for_a_post_find_each_other() {
    let found = differences(
        |control_block| meeting(control_block, CALL),
        |control_block| post(control_block, from(0), 1, Needs::Member(0)),
    );
    assert_eq!(found[0], Err(Difference { earlier: None, theirs: from(0) }));
    assert_eq!(found[1], Err(Difference { earlier: None, theirs: CALL }));
}

#[test]
fn one_that_meets_too_soon_and_one_that_has_posted_more_find_each_other_at_the_meeting() {
    let found = differences(
        |control_block| {
            post(control_block, from(0), 1, Needs::Nobody)?;
            meeting(control_block, CALL)
        },
        |control_block| {
            post(control_block, from(0), 1, Needs::Member(0))?;
            post(control_block, from(1), 2, Needs::Nobody)?;
            post(control_block, from(1), 3, Needs::Nobody)?;
            meeting(control_block, CALL)
        },
    );
    assert_eq!(found[0], Err(Difference { earlier: None, theirs: from(1) }));
    assert_eq!(found[1], Err(Difference { earlier: Some((from(1), 2)), theirs: CALL }));
}
