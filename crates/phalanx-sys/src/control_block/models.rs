//! The control block's protocol under loom, with every interleaving that the memory model allows.
//!
//! Loom reports an access to a slot, a window or a region that belongs to another rank at that time, and a rank that
//! sleeps and is never woken.

use std::convert::Infallible;
use std::sync::Arc;

use loom::thread;

use super::*;

const CALL: Call = u128::from_le_bytes(*b"sixteen letters.");
/// Bytes of data in a slot, and bytes of each rank's share of a region.
const FEW: usize = 8;
/// Bytes of data in a slot that begin at the next cache line.
const MORE: usize = 32;
const SHARE: usize = 64;
/// Bytes of each rank's block of a window.
const BLOCK: usize = WINDOW / 2;
const REGION: usize = END;
/// Ordinary memory of a rank, behind any region: it is so long that it is offered.
const ORDINARY: usize = REGION + 8 * SHARE;
const LONG: usize = SMALL + 64;

fn arena(ranks: usize) -> Arc<Arena> {
    let slots = || [SLOTS, SLOTS + SLOT].into_iter();
    let posts = || (0..post::POSTS as u64).map(post::slot);
    let words = slots().chain(posts()).flat_map(|slot| (slot..slot + HEAD).step_by(8));
    let words = [DONE, REFUSED, OFFERED, OFFERED + 8, STAGED, TAKEN].into_iter().chain(words);
    let noted = (0..BUFFERS as u64).map(windows::noted);
    let blocks = BUFFERS * WINDOW / BLOCK;
    let windows = (0..blocks).map(|index| STAGING + index * BLOCK).map(|at| at..at + BLOCK);
    let shares = (0..ranks).map(|index| REGION + index * SHARE).map(|at| at..at + SHARE);
    let few = slots().chain(posts()).map(|slot| slot + HEAD..slot + HEAD + FEW);
    let more = slots().chain(posts()).map(|slot| slot + BODY..slot + BODY + MORE);
    let parts = few.chain(more).chain(windows).chain(shares).chain([ORDINARY..ORDINARY + LONG]);
    Arena::modelled(
        words,
        [START, START + LINE].into_iter().chain(noted),
        parts,
        REGION..REGION + ranks * SHARE,
    )
}

/// A region of which each rank has a share.
fn divided(owners: usize) -> Division {
    Division { owners, unit: SHARE, combines_windows: false }
}

/// Runs `rank` on `ranks` threads, each with its handle of the control block, in every interleaving. If `preemptions`
/// is given, only interleavings with at most that many preemptions are run.
fn model(ranks: usize, preemptions: Option<usize>, rank: fn(ControlBlock)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        let arenas: Vec<_> = (0..ranks).map(|_| arena(ranks)).collect();
        let control_block = |me: usize| {
            let members = arenas.iter().map(|arena| arena.mapping().clone()).collect();
            ControlBlock::new(arenas[me].clone(), members, me).unwrap()
        };
        let others: Vec<_> = (1..ranks)
            .map(control_block)
            .map(|control_block| thread::spawn(move || rank(control_block)))
            .collect();
        rank(control_block(0));
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

fn go_on(_: usize, _: Option<Difference>) -> Result<(), Infallible> {
    Ok(())
}

/// More calls than there are slots.
fn small_calls(mut control_block: ControlBlock) {
    for call in 0..3 {
        let bytes = [call * 16 + control_block.me() as u8; FEW];
        let slots = control_block.small(CALL, &bytes).slots(&mut go_on).unwrap();
        for member in 0..slots.control_block.members() {
            assert_eq!(slots.call(member), CALL);
            assert_eq!(slots.bytes(member), [call * 16 + member as u8; FEW]);
        }
    }
}

#[test]
fn loom_slots_hold_their_bytes_until_all_have_read_them() {
    model(2, Some(3), small_calls);
}

/// Calls whose data is behind the header, and from the next cache line on. Each rank has its own length.
fn calls_of_two_lengths(mut control_block: ControlBlock) {
    for call in 0..4 {
        let length = |member: usize| if (call + member).is_multiple_of(3) { FEW } else { MORE };
        let bytes = vec![(call * 16 + control_block.me()) as u8; length(control_block.me())];
        let slots = control_block.small(CALL, &bytes).slots(&mut go_on).unwrap();
        for member in 0..2 {
            assert_eq!(slots.bytes(member), vec![(call * 16 + member) as u8; length(member)]);
        }
    }
}

#[test]
fn loom_slots_hold_bytes_of_either_place_until_all_have_read_them() {
    model(2, Some(2), calls_of_two_lengths);
}

#[test]
fn loom_three_ranks_meet_in_their_slots() {
    model(3, Some(1), small_calls);
}

/// More posts than there are slots, from one rank, of data in either place. The ranks meet before, between and after them.
fn posts(mut control_block: ControlBlock) {
    let needs = if control_block.me() == 0 { Needs::Nobody } else { Needs::Member(0) };
    let meet = |control_block: &mut ControlBlock| {
        let slots = control_block.small(CALL, &[1; FEW]).slots(&mut go_on).unwrap();
        assert_eq!(slots.bytes(0), [1; FEW]);
    };
    meet(&mut control_block);
    for number in 0..6 {
        let bytes = vec![number; if number % 2 == 0 { FEW } else { MORE }];
        let own = if needs == Needs::Nobody { &bytes[..] } else { &[] };
        let posted = control_block.post((CALL, 0), own, needs, &mut go_on).unwrap();
        let slots = posted.slots(&mut go_on).unwrap();
        assert!(needs == Needs::Nobody || slots.bytes(0) == bytes);
        if number == 4 {
            meet(&mut control_block);
        }
    }
    meet(&mut control_block);
}

#[test]
fn loom_posts_hold_their_bytes_until_those_who_need_them_have_read_them() {
    model(2, Some(2), posts);
}

/// The root changes, and there are ranks that need nothing of each other.
fn posts_of_several(mut control_block: ControlBlock) {
    for root in [0, 0, 0, 1, 1] {
        let is_root = control_block.me() == root;
        let (needs, own) =
            if is_root { (Needs::Nobody, &[7; FEW][..]) } else { (Needs::Member(root), &[][..]) };
        let slots = control_block.post((CALL, 0), own, needs, &mut go_on).unwrap().slots(&mut go_on).unwrap();
        assert!(is_root || slots.bytes(root) == [7; FEW]);
    }
}

#[test]
fn loom_three_ranks_post_in_turn() {
    model(3, Some(1), posts_of_several);
}

/// Each rank fills its own region, all ranks add the regions up, and each checks its own.
fn combine(mut control_block: ControlBlock) {
    for call in 1..3 {
        let ranks = control_block.members();
        let own = control_block.own.clone();
        // SAFETY: the region is the rank's own between calls.
        let region = unsafe { own.mapping().lend_mut(REGION, ranks * SHARE) };
        region.fill(call);
        control_block
            .in_place(CALL, region, (divided(ranks), Unregistered::Later), &mut go_on, |operation| {
                assert_eq!(operation.protocol(), Protocol::Direct);
                operation.combine(|shares| {
                    let sum = shares.iter().map(|share| share[0]).sum();
                    shares.iter_mut().for_each(|share| share.fill(sum));
                });
                Ok(())
            })
            .unwrap();
        // SAFETY: as above.
        let region = unsafe { own.mapping().lend(REGION, ranks * SHARE) };
        assert!(region.iter().all(|byte| *byte == call * ranks as u8));
    }
}

#[test]
fn loom_regions_are_combined_by_one_rank_each_part() {
    model(2, Some(3), combine);
}

/// Each rank reads all regions, and then writes to its own again.
fn read(mut control_block: ControlBlock) {
    let ranks = control_block.members();
    let own = control_block.own.clone();
    // SAFETY: the region is the rank's own before the call.
    let region = unsafe { own.mapping().lend_mut(REGION, ranks * SHARE) };
    region.fill(1 + control_block.me() as u8);
    let brought = Brought { note: &[], memory: region, small: None, copied_from: None };
    let sum = control_block.out_of_place(CALL, brought).finish(&mut go_on, |operation| {
        Ok(operation.read(|regions| regions.iter().map(|region| region[SHARE]).sum::<u8>()))
    });
    assert_eq!(sum, Ok(Some((1..=ranks as u8).sum())));
    // SAFETY: the region is the rank's own after the call.
    unsafe { own.mapping().lend_mut(REGION, ranks * SHARE) }.fill(0);
}

#[test]
fn loom_regions_stay_until_all_have_read_them() {
    model(2, Some(3), read);
}

/// Each rank copies the other's memory out of its process, and then writes to its own again. In the last call one of them cannot.
fn copy_out(mut control_block: ControlBlock) {
    control_block.copies = true;
    let (me, own) = (control_block.me(), control_block.own.clone());
    for call in 1..3 {
        // SAFETY: the memory is the rank's own between calls.
        let memory = unsafe { own.mapping().lend_mut(ORDINARY, LONG) };
        memory.fill((16 * call + me) as u8);
        if call == 2 && me == 1 {
            control_block.refuse_copies();
        }
        let brought = Brought { note: &[], memory, small: None, copied_from: Some(LONG) };
        let copied = control_block.out_of_place(CALL, brought).finish(&mut go_on, |operation| {
            assert_eq!(operation.protocol(), Protocol::Copied);
            let mut last = [0];
            operation.copy(1 - me, LONG - 1, &mut last)?;
            Ok(usize::from(last[0]))
        });
        assert_eq!(copied, Ok((call == 1).then_some(16 * call + 1 - me)));
    }
    assert!(!control_block.copies());
    // SAFETY: as above.
    unsafe { own.mapping().lend_mut(ORDINARY, LONG) }.fill(0);
}

#[test]
fn loom_memory_stays_until_all_have_copied_it_and_all_know_of_one_that_cannot() {
    model(2, Some(2), copy_out);
}

/// Fills the window with this number: a different byte for each rank and window.
fn fill(me: usize) -> impl FnMut(usize, &[u8], &mut [u8]) -> Result<(), Infallible> {
    move |number, _, window| {
        window.fill((16 * number + me) as u8);
        Ok(())
    }
}

/// More windows than there are buffers, which both ranks read; the first is staged before the call.
fn read_windows(mut control_block: ControlBlock) {
    let me = control_block.me();
    let first = |memory: &[u8], window: &mut [u8]| fill(me)(0, memory, window);
    let read = |operation: &mut SharedOperation<'_, '_, Infallible>, number| {
        operation.take(|windows, _| {
            for (member, window) in windows.iter().enumerate() {
                assert!(window.iter().all(|byte| *byte == (16 * number + member) as u8));
            }
            Ok(())
        })
    };
    let outcome = control_block.in_place(
        CALL,
        &mut [0],
        (divided(2), Unregistered::InWindow(&first)),
        &mut go_on,
        |operation| operation.pass(BUFFERS + 1, fill(me), read, None),
    );
    assert_eq!(outcome, Ok(()));
}

#[test]
fn loom_windows_stay_until_all_have_taken_them() {
    model(2, Some(2), read_windows);
}

/// The same, of two ranks that overwrite what they have read.
fn take_windows(mut control_block: ControlBlock) {
    let (me, other) = (control_block.me(), 1 - control_block.me());
    let first = |memory: &[u8], window: &mut [u8]| fill(me)(0, memory, window);
    let take = |operation: &mut SharedOperation<'_, '_, Infallible>, number| {
        operation.take_from_other(|window, _| {
            assert!(window.iter().all(|byte| *byte == (16 * number + other) as u8));
            take_lines(window);
            Ok(())
        })
    };
    let outcome = control_block.in_place(
        CALL,
        &mut [0],
        (divided(2), Unregistered::InWindow(&first)),
        &mut go_on,
        |operation| operation.pass(BUFFERS + 1, fill(me), take, None),
    );
    assert_eq!(outcome, Ok(()));
}

#[test]
fn loom_windows_that_are_overwritten_stay_until_they_are_taken() {
    model(2, Some(2), take_windows);
}

/// More windows than there are buffers. Each rank adds to its block of the other's window, whose owner takes it back.
fn combine_windows(mut control_block: ControlBlock) {
    let (me, other) = (control_block.me(), 1 - control_block.me());
    let first = |memory: &[u8], window: &mut [u8]| fill(me)(0, memory, window);
    let combine = |operation: &mut SharedOperation<'_, '_, Infallible>, number| {
        operation.combine_staged(BLOCK, |blocks, _| {
            assert_eq!(usize::from(blocks[0][0]), 16 * number + other);
            blocks[0].fill((16 * number + other + 2) as u8);
            Ok(())
        })
    };
    let combined = Division { combines_windows: true, ..divided(2) };
    let take_back: TakeBack<'_, Infallible> = &mut |number, window, _| {
        let block = &window[other * BLOCK..][..BLOCK];
        assert!(block.iter().all(|byte| usize::from(*byte) == 16 * number + me + 2));
        Ok(())
    };
    let outcome = control_block.in_place(
        CALL,
        &mut [0],
        (combined, Unregistered::InWindow(&first)),
        &mut go_on,
        |operation| operation.pass(BUFFERS + 1, fill(me), combine, Some(take_back)),
    );
    assert_eq!(outcome, Ok(()));
}

/// Calls of one window each, which take the usual buffers in turn.
fn single_windows(mut control_block: ControlBlock) {
    let (me, other) = (control_block.me(), 1 - control_block.me());
    for call in 0..3 {
        let first = |memory: &[u8], window: &mut [u8]| fill(me)(call, memory, window);
        let combine = |operation: &mut SharedOperation<'_, '_, Infallible>, _| {
            operation.combine_staged(BLOCK, |blocks, _| {
                assert_eq!(usize::from(blocks[0][0]), 16 * call + other);
                blocks[0].fill((16 * call + other + 2) as u8);
                Ok(())
            })
        };
        let take_back: TakeBack<'_, Infallible> = &mut |_, window, _| {
            let block = &window[other * BLOCK..][..BLOCK];
            assert!(block.iter().all(|byte| usize::from(*byte) == 16 * call + me + 2));
            Ok(())
        };
        let combined = Division { combines_windows: true, ..divided(2) };
        let outcome = control_block.in_place(
            CALL,
            &mut [0],
            (combined, Unregistered::InWindow(&first)),
            &mut go_on,
            |operation| {
                assert_eq!(operation.control_block.staging.buffers[call], call % USUAL);
                operation.pass(1, fill(me), combine, Some(take_back))
            },
        );
        assert_eq!(outcome, Ok(()));
    }
}

#[test]
fn loom_calls_of_one_window_take_turns_with_the_buffers() {
    model(2, Some(2), single_windows);
}

#[test]
fn loom_windows_come_back_when_all_have_combined_into_them() {
    model(2, Some(2), combine_windows);
}

/// A window that nobody takes back, and then those of another call. The first of these is staged before that call, or after
/// its header.
fn two_calls(mut control_block: ControlBlock, is_ahead: bool, rotates: bool) {
    let me = control_block.me();
    for (call, count) in [(0, 1), (1, 2)] {
        let fill = |memory: &[u8], window: &mut [u8]| fill(me)(call, memory, window);
        let unregistered = if is_ahead { Unregistered::InWindow(&fill) } else { Unregistered::Later };
        let read = |operation: &mut SharedOperation<'_, '_, Infallible>, _| {
            operation.take(|windows, _| {
                assert_eq!(usize::from(windows[1 - me][0]), 16 * call + 1 - me);
                Ok(())
            })
        };
        let outcome =
            control_block.in_place(CALL, &mut [0], (divided(2), unregistered), &mut go_on, |operation| {
                if rotates {
                    operation.rotate();
                }
                operation.pass(count, |_, memory, window| fill(memory, window), read, None)
            });
        assert_eq!(outcome, Ok(()));
    }
}

#[test]
fn loom_the_next_call_leaves_windows_alone_that_are_still_read() {
    model(2, Some(2), |control_block| two_calls(control_block, true, false));
}

#[test]
fn loom_windows_are_free_when_all_have_begun_the_next_call() {
    model(2, Some(2), |control_block| two_calls(control_block, false, false));
}

#[test]
fn loom_windows_that_take_turns_with_all_buffers_are_left_alone_too() {
    model(2, Some(2), |control_block| two_calls(control_block, true, true));
}
