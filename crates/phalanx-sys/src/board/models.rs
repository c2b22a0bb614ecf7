//! The board's protocol in every order that the memory model allows, as loom tries them.
//!
//! Loom objects to a slot, a window or a region that somebody touches while it is another's, and to a rank that sleeps
//! while nobody will wake it.

use std::convert::Infallible;
use std::sync::Arc;

use loom::thread;

use super::*;

const CALL: Call = *b"sixteen letters.";
/// Bytes that travel in a slot, and bytes of each rank's share of a region.
const FEW: usize = 8;
const SHARE: usize = 64;
const REGION: usize = STAGING + STREAMS * BUFFERS * WINDOW;

fn arena(ranks: usize) -> Arc<Arena> {
    let counters = (0..STREAMS * 2).map(|index| COUNTERS + index * LINE);
    let slots = || [SLOTS, SLOTS + SLOT].into_iter();
    let words = slots().flat_map(|slot| (slot..slot + HEAD).step_by(8));
    let words = [DONE].into_iter().chain(counters).chain(words);
    let windows = (0..STREAMS * BUFFERS).map(|index| STAGING + index * WINDOW).map(|at| at..at + WINDOW);
    let shares = (0..ranks).map(|index| REGION + index * SHARE).map(|at| at..at + SHARE);
    let parts = slots().map(|slot| slot + HEAD..slot + HEAD + FEW).chain(windows).chain(shares);
    Arena::modelled(words, [START, START + LINE], parts, REGION..REGION + ranks * SHARE)
}

/// Lets `ranks` threads, each with its end of the board, do the same, in every order; or, if `preemptions` is given, in
/// every one in which threads are interrupted no more often than so.
fn model(ranks: usize, preemptions: Option<usize>, rank: fn(Board)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        let arenas: Vec<_> = (0..ranks).map(|_| arena(ranks)).collect();
        let board = |me: usize| {
            let members = arenas.iter().map(|arena| arena.mapping().clone()).collect();
            Board::new(arenas[me].clone(), members, me).unwrap()
        };
        let others: Vec<_> = (1..ranks).map(board).map(|board| thread::spawn(move || rank(board))).collect();
        rank(board(0));
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

fn go_on(_: usize) -> Result<(), Infallible> {
    Ok(())
}

/// More calls than there are slots.
fn small_calls(mut board: Board) {
    for call in 0..3 {
        let bytes = [call * 16 + board.me() as u8; FEW];
        let words = board.small(CALL, &bytes, &mut go_on).unwrap();
        for member in 0..words.board.members() {
            assert_eq!(words.call(member), CALL);
            assert_eq!(words.bytes(member), [call * 16 + member as u8; FEW]);
        }
    }
}

#[test]
fn loom_slots_hold_their_words_until_all_have_read_them() {
    model(2, Some(3), small_calls);
}

#[test]
fn loom_three_ranks_meet_in_their_slots() {
    model(3, Some(1), small_calls);
}

/// Each rank fills its own region, all add them up, and each looks at its own.
fn combine(mut board: Board) {
    for call in 1..3 {
        let ranks = board.members();
        let own = board.own.clone();
        // SAFETY: the region is the rank's own between calls.
        let region = unsafe { own.mapping().lend_mut(REGION, ranks * SHARE) };
        region.fill(call);
        board
            .in_place(CALL, region, None, &mut go_on, |meeting| {
                assert_eq!(meeting.way(), Way::Direct);
                meeting.combine(ranks, SHARE, |shares| {
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

/// Each rank reads all regions, and writes to its own again.
fn read(mut board: Board) {
    let ranks = board.members();
    let own = board.own.clone();
    // SAFETY: the region is the rank's own before the call.
    let region = unsafe { own.mapping().lend_mut(REGION, ranks * SHARE) };
    region.fill(1 + board.me() as u8);
    let sum = board.apart(CALL, &[], region, None, &mut go_on, |meeting| {
        Ok(meeting.read(|regions| regions.iter().map(|region| region[SHARE]).sum::<u8>()))
    });
    assert_eq!(sum, Ok((1..=ranks as u8).sum()));
    // SAFETY: and after it.
    unsafe { own.mapping().lend_mut(REGION, ranks * SHARE) }.fill(0);
}

#[test]
fn loom_regions_stay_until_all_have_read_them() {
    model(2, Some(3), read);
}

/// More windows than there are buffers, staged one ahead.
fn stage(mut board: Board) {
    let mut memory = [0];
    let outcome = board.in_place(CALL, &mut memory, None, &mut go_on, |meeting| {
        let me = meeting.me() as u8;
        let fill = |window: u8| {
            move |_: &[u8], staged: &mut [u8]| {
                staged.fill(16 * window + me);
                Ok(())
            }
        };
        meeting.stage(Stream::Inputs, fill(0))?;
        for window in 0..3 {
            if window < 2 {
                meeting.stage(Stream::Inputs, fill(window + 1))?;
            }
            meeting.take(Stream::Inputs, |windows, _| {
                for (member, staged) in windows.iter().enumerate() {
                    assert!(staged.iter().all(|byte| *byte == 16 * window + member as u8));
                }
                Ok(())
            })?;
        }
        Ok(meeting.way())
    });
    assert_eq!(outcome, Ok(Way::Staged));
}

#[test]
fn loom_windows_stay_until_all_have_taken_them() {
    model(2, Some(2), stage);
}
