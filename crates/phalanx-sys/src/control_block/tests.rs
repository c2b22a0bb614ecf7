use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::operation::COPIED;
use super::*;
use crate::arena::{OWNER, OWNER_ADDRESS, Region};

const ARENA: usize = 16 << 20;
pub(super) const CALL: Call = u128::from_le_bytes(*b"sixteen letters.");
const SHARES: Division = Division { owners: 3, unit: 64, combines_windows: false };
const WINDOWS: Division = Division { combines_windows: true, ..SHARES };

/// The control blocks of all ranks, each with its own mappings, as in separate processes.
pub(super) fn blocks(ranks: usize) -> Vec<(ControlBlock, Arc<Arena>)> {
    let arenas: Vec<_> = (0..ranks).map(|_| Arena::create(ARENA, ranks, 7).unwrap()).collect();
    let open = |arena: &Arena| Arena::open(std::process::id(), arena.descriptor(), arena.bytes(), 7).unwrap();
    let control_block = |(me, own): (usize, &Arc<Arena>)| {
        let members = arenas.iter().enumerate();
        let members = members
            .map(|(index, arena)| if index == me { arena.mapping().clone() } else { open(arena) })
            .collect();
        (ControlBlock::new(own.clone(), members, me).unwrap(), own.clone())
    };
    arenas.iter().enumerate().map(control_block).collect()
}

pub(super) fn run(ranks: usize, rank: impl Fn(&mut ControlBlock, &Arc<Arena>) + Sync) {
    thread::scope(|scope| {
        for (mut control_block, arena) in blocks(ranks) {
            let rank = &rank;
            scope.spawn(move || rank(&mut control_block, &arena));
        }
    });
}

/// If one rank's test fails, the others keep waiting for it, but not for ever.
pub(super) fn go_on(missing: usize, _: Option<Difference>) -> Result<(), String> {
    static START: OnceLock<Instant> = OnceLock::new();
    let waited = START.get_or_init(Instant::now).elapsed() > Duration::from_secs(300);
    if waited { Err(format!("member {missing} does not come")) } else { Ok(()) }
}

/// What is not offered to be copied.
fn brought<'a>(note: &'a [u8], memory: &'a [u8], small: Option<Range<usize>>) -> Brought<'a> {
    Brought { note, memory, small, copied_from: None }
}

fn add(shares: &mut [&mut [u8]]) {
    for index in 0..shares[0].len() {
        let sum = shares.iter().fold(0u8, |sum, share| sum.wrapping_add(share[index]));
        shares.iter_mut().for_each(|share| share[index] = sum);
    }
}

fn filled(arena: &Arc<Arena>, bytes: usize, value: u8) -> Region {
    let mut region = arena.alloc(bytes).unwrap();
    region.as_mut_slice().fill(value);
    region
}

#[test]
fn few_bytes_travel_in_the_slots() {
    run(3, |control_block, _| {
        for round in 0..20_000u32 {
            let call = CALL ^ u128::from(round);
            let length = 1 + round as usize % 100;
            let bytes = vec![(control_block.me() as u8).wrapping_add(round as u8); length];
            let slots = control_block.small(call, &bytes).slots(&mut go_on).unwrap();
            for member in 0..3 {
                assert_eq!(slots.call(member), call);
                assert_eq!(slots.bytes(member), vec![(member as u8).wrapping_add(round as u8); length]);
            }
        }
    });
}

#[test]
fn data_of_every_length_is_whole_in_either_slot_beside_a_note() {
    run(2, |control_block, _| {
        let lengths = [0, 1, 7, 8, 23, 24, 25, 31, 32, 64, 88, 511, 512, 513, 2112, 4096, 4097, SMALL - 16];
        for (round, length) in lengths.into_iter().cycle().take(4 * lengths.len()).enumerate() {
            for note in [0, 5, 16] {
                // The second rank brings one byte less, which another place may suit.
                let bytes = |member: usize| vec![(round * 2 + member) as u8; length.saturating_sub(member)];
                let noted = |member: usize| vec![(note + member) as u8; note];
                let (memory, own_note) = (bytes(control_block.me()), noted(control_block.me()));
                let small = Some(0..memory.len());
                let outcome = control_block.out_of_place(CALL, brought(&own_note, &memory, small)).finish(
                    &mut go_on,
                    |operation| {
                        for member in 0..2 {
                            assert_eq!(operation.note(member), noted(member));
                            operation.slots(|slots, _| assert_eq!(slots.bytes(member), bytes(member)));
                        }
                        Ok(())
                    },
                );
                assert_eq!(outcome, Ok(Some(())));
            }
        }
    });
}

#[test]
fn slices_of_few_and_many_members_are_lent_in_order() {
    for members in [0, 1, 2, 7, 8, 9, 20] {
        let mut memory: Vec<u8> = (0..members).collect();
        let seen = with_all(memory.chunks_mut(1), |slices| {
            slices.iter_mut().map(|slice| slice[0]).collect::<Vec<_>>()
        });
        assert_eq!(seen, (0..members).collect::<Vec<_>>());
    }
}

#[test]
fn regions_are_combined_where_they_are() {
    run(3, |control_block, arena| {
        for bytes in [1, 64, 5000, 100_000] {
            let mut region = filled(arena, bytes, 1 + control_block.me() as u8);
            for round in 0..100 {
                region.as_mut_slice().fill(1 + control_block.me() as u8 + round);
                control_block
                    .in_place(
                        CALL,
                        region.as_mut_slice(),
                        (SHARES, Unregistered::Later),
                        &mut go_on,
                        |operation| {
                            assert_eq!(operation.protocol(), Protocol::Direct);
                            operation.combine(add);
                            Ok(())
                        },
                    )
                    .unwrap();
                assert_eq!(region.as_slice(), vec![(6 + 3 * u32::from(round)) as u8; bytes]);
            }
        }
    });
}

#[test]
fn regions_are_read_where_they_are() {
    run(4, |control_block, arena| {
        let region = filled(arena, 10_000, control_block.me() as u8);
        let mut sum = 0;
        control_block
            .out_of_place(CALL, brought(&[], region.as_slice(), None))
            .finish(&mut go_on, |operation| {
                sum = operation.read(|regions| regions.iter().map(|region| u32::from(region[9_999])).sum());
                Ok(())
            })
            .unwrap();
        assert_eq!(sum, 6);
    });
}

/// What a rank offers to be copied, if one brings so many bytes.
const MUCH: usize = 100_000;

fn offered_from_much(memory: &[u8]) -> Brought<'_> {
    Brought { copied_from: Some(MUCH), ..brought(&[7; 8], memory, None) }
}

/// Each member's bytes but for the first three, as this rank copies them out of their processes after `prepare`. None if one of
/// the members could not.
fn copied(
    control_block: &mut ControlBlock,
    own: &[u8],
    lengths: &[usize],
    prepare: impl FnOnce(&Mapping),
) -> Option<Vec<Vec<u8>>> {
    let outcome = control_block.out_of_place(CALL, offered_from_much(own)).finish(&mut go_on, |operation| {
        assert_eq!(operation.protocol(), Protocol::Copied);
        assert!((0..lengths.len()).all(|member| operation.note(member) == [7; 8]));
        assert!((0..lengths.len()).all(|member| operation.length(member) == lengths[member]));
        prepare(&operation.control_block.members[0]);
        let mut all: Vec<_> = lengths.iter().map(|length| vec![0; length.saturating_sub(3)]).collect();
        for (member, into) in all.iter_mut().enumerate() {
            operation.copy(member, lengths[member].min(3), into)?;
        }
        Ok(all)
    });
    outcome.unwrap()
}

fn protocol(control_block: &mut ControlBlock, memory: &[u8]) -> Protocol {
    let read = |operation: &mut SharedOperation<'_, '_, String>| Ok(operation.protocol());
    control_block.out_of_place(CALL, offered_from_much(memory)).finish(&mut go_on, read).unwrap().unwrap()
}

#[test]
fn much_ordinary_memory_is_copied_out_of_each_other_s_processes() {
    const LENGTHS: [usize; 4] = [MUCH, 20_001, 0, 77_777];
    run(4, |control_block, arena| {
        let me = control_block.me();
        // A region goes along where others have none.
        let mut region = filled(arena, LENGTHS[1], 0);
        let mut ordinary = vec![0; LENGTHS[me]];
        let memory = if me == 1 { region.as_mut_slice() } else { &mut ordinary };
        for round in 0..20 {
            // Each rank may write to its own memory when a call has ended.
            memory.fill((me + round) as u8);
            let all = copied(control_block, memory, &LENGTHS, |_| ()).unwrap();
            for (member, bytes) in all.iter().enumerate() {
                let expected = vec![(member + round) as u8; LENGTHS[member].saturating_sub(3)];
                assert!(*bytes == expected, "member {member} in round {round}");
            }
        }
        assert!(control_block.copies());
    });
}

#[test]
fn nothing_is_copied_out_of_a_process_if_all_bring_little_or_one_offers_nothing() {
    run(3, |control_block, _| {
        assert_eq!(protocol(control_block, &[1; MUCH - 1]), Protocol::Staged);
        // What fits into a slot is offered by nobody.
        let bytes = if control_block.me() == 1 { SMALL } else { MUCH };
        assert_eq!(protocol(control_block, &vec![1; bytes]), Protocol::Staged);
        assert_eq!(protocol(control_block, &[1; MUCH]), Protocol::Copied);
    });
    // One rank is a process that was forked from the one that has made its arena.
    run(3, |control_block, arena| {
        if control_block.me() == 1 {
            arena.mapping().word(OWNER).store(u64::from(std::process::id()) + 1, Ordering::Relaxed);
        }
        assert_eq!(protocol(control_block, &[1; MUCH]), Protocol::Staged);
    });
}

/// There is no process to copy from, as if the kernel allowed none; or another one has the number of the one that lent its memory.
#[test]
fn if_one_member_cannot_copy_from_another_all_know_it_and_nobody_tries_again() {
    let nobody = u64::from(u32::MAX);
    for (word, value) in [(OWNER, nobody), (OWNER_ADDRESS, 0)] {
        run(3, |control_block, _| {
            let me = control_block.me();
            let own = vec![me as u8; MUCH];
            let elsewhere = own.as_ptr().addr() as u64;
            let value = if value == 0 { elsewhere } else { value };
            // By the last rank alone: the others may have copied by then.
            let all = copied(control_block, &own, &[MUCH; 3], |first| {
                if me == 2 {
                    first.word(word).store(value, Ordering::Relaxed);
                }
            });
            assert_eq!(all, None);
            assert!(!control_block.copies());
            assert_eq!(protocol(control_block, &own), Protocol::Staged);
        });
    }
}

/// A block is elsewhere in memory that a rank gives in place.
#[test]
fn what_some_bring_in_place_and_others_do_not_is_staged() {
    run(3, |control_block, _| {
        let mut memory = vec![1; MUCH];
        let read = |operation: &mut SharedOperation<'_, '_, String>| -> Result<Protocol, String> {
            let take = |operation: &mut SharedOperation<'_, '_, String>, _| {
                operation.take(|windows, _| {
                    assert!(windows.iter().enumerate().all(|(member, window)| window[0] == member as u8));
                    Ok(())
                })
            };
            let me = operation.me() as u8;
            let fill = |_, _: &[u8], window: &mut [u8]| {
                window[0] = me;
                Ok(())
            };
            operation.pass(1, fill, take, None)?;
            Ok(operation.protocol())
        };
        let protocol = if control_block.me() == 1 {
            control_block.offered_in_place(CALL, &mut memory, SHARES, &mut go_on, read)
        } else {
            let brought = Brought { copied_from: Some(MUCH), ..brought(&[], &memory, None) };
            control_block.out_of_place(CALL, brought).finish(&mut go_on, read)
        };
        assert_eq!(protocol, Ok(Some(Protocol::Staged)));
        // They do not count as ranks that could not copy.
        let protocol = control_block
            .offered_in_place(CALL, &mut memory, SHARES, &mut go_on, |operation| Ok(operation.protocol()));
        assert_eq!(protocol, Ok(Some(Protocol::Copied)));
    });
}

/// In two pieces. Between them a rank looks whether to go on, and in the second call it does not.
#[test]
fn a_rank_that_gives_up_between_two_pieces_has_no_result_and_nor_has_the_other() {
    const LONG: usize = COPIED + 5;
    let mut long = vec![1u8; LONG];
    (long[COPIED - 1], long[COPIED], long[COPIED + 2], long[LONG - 1]) = (2, 3, 4, 5);
    let (long, has_given_up) = (&*long, &AtomicBool::new(false));
    run(2, |control_block, _| {
        let copies = control_block.me() == 1;
        let memory = if copies { &[][..] } else { long };
        for gives_up in [false, true] {
            let (is_between, looks) = (Cell::new(false), Cell::new(0));
            let mut watch = |missing, _| {
                if is_between.get() {
                    looks.set(looks.get() + 1);
                }
                match () {
                    () if is_between.get() && gives_up => Err("enough".to_owned()),
                    () if has_given_up.load(Ordering::Relaxed) => Err("told".to_owned()),
                    () => go_on(missing, None),
                }
            };
            let outcome =
                control_block.out_of_place(CALL, offered_from_much(memory)).finish(&mut watch, |operation| {
                    assert_eq!(operation.protocol(), Protocol::Copied);
                    let mut into = vec![0; if copies { LONG - 3 } else { 0 }];
                    if copies {
                        is_between.set(true);
                        let copied = operation.copy(0, 3, &mut into);
                        is_between.set(false);
                        copied?;
                    }
                    Ok(into)
                });
            match (copies, gives_up) {
                (true, false) => assert!(outcome.unwrap().unwrap() == long[3..]),
                (false, false) => assert_eq!(outcome, Ok(Some(Vec::new()))),
                (true, true) => {
                    assert_eq!(outcome, Err("enough".to_owned()));
                    has_given_up.store(true, Ordering::Relaxed);
                }
                (false, true) => assert_eq!(outcome, Err("told".to_owned())),
            }
            assert_eq!(looks.get(), usize::from(copies));
        }
    });
}

#[test]
fn what_is_no_whole_region_on_every_rank_is_staged() {
    run(2, |control_block, arena| {
        let mut region = filled(arena, 10_000, 1);
        let mut unregistered = vec![1; 10_000];
        let length = 10_000 - control_block.me();
        let memories: [&mut [u8]; 2] = [
            if control_block.me() == 0 { region.as_mut_slice() } else { &mut unregistered },
            &mut [0; 10_000][..length],
        ];
        for memory in memories {
            let protocol = control_block.in_place(
                CALL,
                memory,
                (SHARES, Unregistered::Later),
                &mut go_on,
                |operation| Ok(operation.protocol()),
            );
            assert_eq!(protocol, Ok(Protocol::Staged));
        }
        let shorter = filled(arena, length, 1);
        let mut lent = filled(arena, length, 1);
        let lent = control_block.in_place(
            CALL,
            lent.as_mut_slice(),
            (SHARES, Unregistered::Later),
            &mut go_on,
            |operation| Ok(operation.protocol()),
        );
        assert_eq!(lent, Ok(Protocol::Staged), "they differ in length");
        let shown = control_block
            .out_of_place(CALL, brought(&[], shorter.as_slice(), None))
            .finish(&mut go_on, |operation| Ok(operation.protocol()));
        assert_eq!(shown, Ok(Some(Protocol::Direct)));
    });
}

#[test]
fn few_bytes_of_ordinary_memory_travel_in_the_slots_if_nobody_lends() {
    run(2, |control_block, arena| {
        let mut unregistered = vec![control_block.me() as u8; 100];
        let read = |operation: &mut SharedOperation<'_, '_, String>| {
            assert_eq!(operation.protocol(), Protocol::Small);
            Ok(operation.slots(|slots, memory| [slots.bytes(0)[0], slots.bytes(1)[9], memory[0]]))
        };
        let seen = control_block.in_place(
            CALL,
            &mut unregistered,
            (SHARES, Unregistered::InSlot(50..60)),
            &mut go_on,
            read,
        );
        assert_eq!(seen, Ok([0, 1, control_block.me() as u8]));
        let mut region = filled(arena, 100, 1);
        let memory = if control_block.me() == 0 { region.as_mut_slice() } else { &mut unregistered };
        let protocol = control_block.in_place(
            CALL,
            memory,
            (SHARES, Unregistered::InSlot(0..100)),
            &mut go_on,
            |operation| Ok(operation.protocol()),
        );
        assert_eq!(protocol, Ok(Protocol::Staged));
    });
}

#[test]
fn who_brings_nothing_goes_along_and_notes_reach_everybody() {
    run(3, |control_block, arena| {
        let (me, few, many) = (control_block.me(), [7; 10], vec![7; 100_000]);
        let region = filled(arena, 100_000, 7);
        for (memory, small, protocol) in [
            (&few[..], Some(0..10), Protocol::Small),
            (region.as_slice(), None, Protocol::Direct),
            (&many, None, Protocol::Staged),
            (&[], None, Protocol::Small),
        ] {
            let (memory, small) = if me == 1 { (memory, small) } else { (&[][..], None) };
            let outcome = control_block.out_of_place(CALL, brought(&[me as u8; 24], memory, small)).finish(
                &mut go_on,
                |operation| {
                    assert!((0..3).all(|member| operation.note(member) == [member as u8; 24]));
                    match operation.protocol() {
                        Protocol::Small => {
                            operation.slots(|slots, _| assert!([0, 10].contains(&slots.bytes(1).len())))
                        }
                        Protocol::Direct => {
                            operation.read(|all| assert_eq!((all[0], all[1]), (&[][..], &many[..])))
                        }
                        Protocol::Copied | Protocol::Staged => {}
                    }
                    Ok(operation.protocol())
                },
            );
            assert_eq!(outcome, Ok(Some(protocol)));
        }
    });
}

#[test]
fn who_has_not_come_is_known() {
    let mut blocks = blocks(4);
    let (mut control_block, _) = blocks.swap_remove(2);
    assert_eq!(control_block.small(CALL, &[]).slots(&mut |_, _| Err("enough")).map(|_| ()), Err("enough"));
    assert_eq!(control_block.missing().collect::<Vec<_>>(), [0, 1, 3]);
    let (mut other, _) = blocks.swap_remove(1);
    assert_eq!(other.small(CALL, &[]).slots(&mut |_, _| Err("enough")).map(|_| ()), Err("enough"));
    assert_eq!(control_block.missing().collect::<Vec<_>>(), [0, 3]);
}

#[test]
fn what_a_peer_does_to_a_slot_is_not_its_owner_s_own_word() {
    let mut blocks = blocks(2);
    let ((other, _), (mut control_block, _)) = (blocks.swap_remove(1), blocks.swap_remove(0));
    let header = Announcement { call: CALL, division: 0, first: 0 };
    control_block.begin(header, &[1; 8], &[7; 16], None, Some(4..12));
    let slot = control_block.slot;
    for place in (slot + 8..slot + HEAD + 16).step_by(8) {
        other.members[0].word(place).store(u64::MAX, Ordering::Relaxed);
    }
    assert_eq!((control_block.call_of(0), control_block.in_slot(0, 0, 8)), (CALL, &[1; 8][..]));
    assert_eq!(Slots { control_block: &control_block, needs: Needs::All }.bytes(0), [7; 8]);
}

/// A fill that writes the rank's byte, plus the window's number.
fn numbered(me: usize) -> impl FnMut(usize, &[u8], &mut [u8]) -> Result<(), String> {
    move |number, _, window| {
        window.fill((me + number) as u8);
        Ok(())
    }
}

/// Passes `count` windows that all ranks read, in which this rank has written its number plus theirs.
fn read_windows(operation: &mut SharedOperation<'_, '_, String>, count: usize) -> Result<(), String> {
    let (me, ranks) = (operation.me(), operation.members());
    let read = |operation: &mut SharedOperation<'_, '_, String>, number| {
        operation.take(|windows, memory| {
            for (member, window) in windows.iter().enumerate() {
                assert_eq!(window.len(), WINDOW);
                assert!([window[0], window[WINDOW - 1]].iter().all(|byte| *byte == (member + number) as u8));
            }
            memory[0] += windows.len() as u8 / ranks as u8;
            Ok(())
        })
    };
    operation.pass(count, numbered(me), read, None)
}

/// The same with two ranks, which overwrite what they have read.
fn take_windows(operation: &mut SharedOperation<'_, '_, String>, count: usize) -> Result<(), String> {
    let (me, other) = (operation.me(), 1 - operation.me());
    let take = |operation: &mut SharedOperation<'_, '_, String>, number| {
        operation.take_from_other(|window, memory| {
            assert_eq!(window.len(), WINDOW);
            assert!(window.iter().all(|byte| *byte == (other + number) as u8));
            window.fill(0);
            memory[0] += 1;
            Ok(())
        })
    };
    operation.pass(count, numbered(me), take, None)
}

/// The same, in all buffers in turn.
fn read_rotating(operation: &mut SharedOperation<'_, '_, String>, count: usize) -> Result<(), String> {
    operation.rotate();
    read_windows(operation, count)
}

/// Passes `count` windows, into each of which every other rank adds ten times its own number plus one.
fn combine_windows(operation: &mut SharedOperation<'_, '_, String>, count: usize) -> Result<(), String> {
    let (me, ranks) = (operation.me(), operation.members());
    let block = WINDOW / ranks / 64 * 64;
    let combine = |operation: &mut SharedOperation<'_, '_, String>, number| {
        operation.combine_staged(block, |blocks, _| {
            let others = (0..ranks).filter(|other| *other != me);
            for (bytes, other) in blocks.iter_mut().zip(others) {
                assert_eq!((bytes.len(), bytes[block - 1]), (block, (other + number) as u8));
                bytes.iter_mut().for_each(|byte| *byte += 10 * (me as u8 + 1));
            }
            Ok(())
        })
    };
    let mut back = 0;
    let take_back: TakeBack<'_, String> = &mut |number, window, _| {
        assert_eq!(number, back);
        back += 1;
        for other in (0..ranks).filter(|other| *other != me) {
            let bytes = &window[other * block..][..block];
            let expected = (me + number + 10 * (other + 1)) as u8;
            assert!(bytes.iter().all(|byte| *byte == expected), "{number} {other}");
        }
        Ok(())
    };
    operation.pass(count, numbered(me), combine, Some(take_back))?;
    assert_eq!(back, count);
    Ok(())
}

#[test]
fn windows_pass_in_order() {
    for has_all in [None, Some(false)] {
        run(3, |control_block, _| {
            // Without memory for more buffers two are enough.
            control_block.staging.has_all = has_all;
            let me = control_block.me();
            let first = |memory: &[u8], window: &mut [u8]| numbered(me)(0, memory, window);
            // Every other call finds its first window already staged, while others may still read those of the call before.
            for (index, count) in [1, 2, 40, 40, 2, 1, 1, 8, 1].into_iter().enumerate() {
                let unregistered =
                    if index % 2 == 0 { Unregistered::InWindow(&first) } else { Unregistered::Later };
                let mut memory = vec![0; 8];
                control_block
                    .in_place(CALL, &mut memory, (SHARES, unregistered), &mut go_on, |operation| {
                        read_windows(operation, count)
                    })
                    .unwrap();
                assert_eq!(usize::from(memory[0]), count);
            }
        });
    }
}

#[test]
fn windows_of_two_pass_in_order_and_may_be_overwritten() {
    for rotates in [false, true] {
        run(2, |control_block, _| {
            for count in [1, 2, 40, 2, 1, 9, 1] {
                let mut memory = vec![0; 8];
                let given = (SHARES, Unregistered::Later);
                control_block
                    .in_place(CALL, &mut memory, given, &mut go_on, |operation| {
                        if rotates {
                            operation.rotate();
                        }
                        take_windows(operation, count)
                    })
                    .unwrap();
                assert_eq!(usize::from(memory[0]), count);
            }
        });
    }
}

/// The lines of the slots go from rank to rank, and the data is whole in each call.
#[test]
fn slots_of_two_are_whole_in_each_call() {
    run(2, |control_block, _| {
        let (me, other) = (control_block.me(), 1 - control_block.me());
        for call in 0..100 {
            let bytes = [0, 8, 24, 25, READY, READY + 1, 5000, SMALL - 8][call % 8];
            let data = |rank: usize| vec![(2 * call + rank) as u8 | 1; bytes];
            let (note, own) = ([call as u8; 8], data(me));
            control_block
                .out_of_place(CALL, brought(&note, &own, Some(0..bytes)))
                .finish(&mut go_on, |operation| {
                    assert_eq!((operation.note(0), operation.note(1)), (&note[..], &note[..]));
                    operation.slots(|slots, _| {
                        assert!(slots.bytes(me) == own && slots.bytes(other) == data(other));
                    });
                    Ok::<_, String>(())
                })
                .unwrap();
        }
    });
}

/// Calls whose windows take turns with all buffers, and others, one of whose windows may be staged ahead in any buffer.
#[test]
fn windows_pass_in_order_in_all_buffers() {
    for has_all in [None, Some(false)] {
        run(3, |control_block, _| {
            control_block.staging.has_all = has_all;
            let me = control_block.me();
            let first = |memory: &[u8], window: &mut [u8]| numbered(me)(0, memory, window);
            for (index, count) in [1, 9, 40, 8, 2, 1, 1, 40, 17, 1].into_iter().enumerate() {
                for kind in 0..3 {
                    let unregistered = if (index + kind) % 2 == 0 {
                        Unregistered::InWindow(&first)
                    } else {
                        Unregistered::Later
                    };
                    let division = if kind == 1 { WINDOWS } else { SHARES };
                    control_block
                        .in_place(CALL, &mut [0; 8], (division, unregistered), &mut go_on, |operation| {
                            match kind {
                                0 => read_rotating(operation, count),
                                1 => combine_windows(operation, count),
                                _ => read_windows(operation, count),
                            }
                        })
                        .unwrap();
                }
            }
        });
    }
}

#[test]
fn windows_that_rotate_are_in_the_next_buffer_each() {
    let mut staging = Staging::default();
    staging.rotates = true;
    for number in 0..20 {
        let buffer = staging.free_buffer();
        assert_eq!(buffer, number as usize % BUFFERS);
        staging.buffers[number as usize % BUFFERS] = buffer;
        staging.staged += 1;
        staging.free = staging.staged.saturating_sub(3);
    }
}

#[test]
fn windows_are_combined_by_all_and_come_back() {
    for has_all in [None, Some(false)] {
        run(3, |control_block, _| {
            control_block.staging.has_all = has_all;
            let me = control_block.me();
            let first = |memory: &[u8], window: &mut [u8]| numbered(me)(0, memory, window);
            // Every other call finds its first window already staged.
            for (index, count) in [1, 2, 20, 20, 1].into_iter().enumerate() {
                let unregistered =
                    if index % 2 == 0 { Unregistered::InWindow(&first) } else { Unregistered::Later };
                control_block
                    .in_place(CALL, &mut [0; 8], (WINDOWS, unregistered), &mut go_on, |operation| {
                        combine_windows(operation, count)
                    })
                    .unwrap();
            }
        });
    }
}

/// Ranks that are late in turns, at any window.
#[test]
fn ranks_go_on_while_one_is_late() {
    run(3, |control_block, _| {
        let me = control_block.me();
        for round in 0..30 {
            let division = if round % 2 == 0 { WINDOWS } else { SHARES };
            control_block
                .in_place(CALL, &mut [0; 8], (division, Unregistered::Later), &mut go_on, |operation| {
                    if round % 3 == me {
                        thread::sleep(Duration::from_millis(2));
                    }
                    if round % 2 == 0 { combine_windows(operation, 20) } else { read_windows(operation, 20) }
                })
                .unwrap();
        }
    });
}

#[test]
fn a_rank_fills_all_buffers_before_it_waits_for_a_late_one() {
    let windows_of_the_first = |has_all: Option<bool>| {
        let mut blocks = blocks(2);
        let ((mut late, _), (mut control_block, _)) = (blocks.swap_remove(1), blocks.swap_remove(0));
        control_block.staging.has_all = has_all;
        let staged = late.members[0].clone();
        let staged = || staged.word(STAGED).load(Ordering::Acquire);
        let (sees, seen) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                // Reports each look in vain at the late rank.
                let mut watch = |missing, _| {
                    sees.send(()).ok();
                    go_on(missing, None)
                };
                control_block
                    .in_place(CALL, &mut [0; 8], (WINDOWS, Unregistered::Later), &mut watch, |operation| {
                        combine_windows(operation, 20)
                    })
                    .unwrap();
            });
            late.in_place(CALL, &mut [0; 8], (WINDOWS, Unregistered::Later), &mut go_on, |operation| {
                // Some looks may still be for the late rank's header. It stages nothing between two that are for the first window.
                let (mut last, mut looks) = (staged(), 0);
                while looks < 10 {
                    seen.recv().unwrap();
                    looks = if staged() == last { looks + 1 } else { 0 };
                    last = staged();
                }
                combine_windows(operation, 20)?;
                Ok(last)
            })
            .unwrap()
        })
    };
    assert_eq!(windows_of_the_first(None), BUFFERS as u64);
    assert_eq!(windows_of_the_first(Some(false)), USUAL as u64);
}

#[test]
fn ranks_that_keep_pace_use_two_buffers() {
    let mut staging = Staging::default();
    for number in 0..20 {
        // As `ControlBlock::stage` does.
        let buffer = staging.free_buffer();
        assert_eq!(buffer, number as usize % USUAL);
        staging.buffers[number as usize % BUFFERS] = buffer;
        staging.staged += 1;
        staging.free = staging.staged.saturating_sub(1);
    }
    // In calls of one window, which every rank has taken back before the next.
    for number in 20..40 {
        staging.free = staging.staged;
        assert_eq!(staging.free_buffer(), number as usize % USUAL);
        staging.buffers[number as usize % BUFFERS] = staging.free_buffer();
        staging.staged += 1;
    }
    // After a peer was late, from a further buffer back to the usual ones.
    staging.buffers[39 % BUFFERS] = 5;
    assert_eq!(staging.free_buffer(), 0);
}

/// One rank has given up between two windows, and numbers its windows otherwise than the other from then on.
#[test]
fn windows_do_not_pass_after_a_call_that_failed_between_them() {
    let (mut control_block, _) = blocks(1).swap_remove(0);
    let failed =
        control_block.in_place(CALL, &mut [0; 8], (SHARES, Unregistered::Later), &mut go_on, |operation| {
            operation.pass(2, numbered(0), |_, _| Err("enough".to_owned()), None)
        });
    assert_eq!(failed, Err("enough".to_owned()));
    let next = catch_unwind(AssertUnwindSafe(|| {
        control_block.in_place(CALL, &mut [0; 8], (SHARES, Unregistered::Later), &mut go_on, |operation| {
            read_windows(operation, 2)
        })
    }));
    assert!(next.is_err());
}

#[test]
fn a_buffer_that_no_rank_has_is_not_looked_for() {
    let (control_block, _) = blocks(2).swap_remove(0);
    control_block.members[1].half_word(windows::noted(7)).store(u32::MAX, Ordering::Relaxed);
    let place = control_block.window(1, 7);
    assert!(place.start >= STAGING && place.end <= END);
}

#[test]
fn sleepers_are_woken() {
    run(2, |control_block, _| {
        for round in 0..30 {
            if control_block.me() == round % 2 {
                thread::sleep(Duration::from_millis(2));
            }
            let start = Instant::now();
            control_block.small(CALL, &[]).slots(&mut go_on).unwrap();
            assert!(start.elapsed() < Duration::from_secs(30));
        }
    });
}

#[test]
fn a_watch_ends_the_wait_and_says_for_whom_it_was() {
    let (mut control_block, _) = blocks(3).swap_remove(1);
    let mut give_up =
        |missing: usize, _: Option<Difference>| if missing == 0 { Err("enough") } else { Ok(()) };
    assert_eq!(control_block.small(CALL, &[]).slots(&mut give_up).map(|_| ()), Err("enough"));
}

/// A late peer may read the slot of the call that was given up at any time.
#[test]
fn who_has_given_up_a_call_writes_to_its_slots_no_more() {
    for is_dropped in [false, true] {
        let mut blocks = blocks(2);
        let ((mut late, _), (mut control_block, _)) = (blocks.swap_remove(1), blocks.swap_remove(0));
        for (number, bytes) in [[1; 8], [2; 8], [3; 8]].iter().enumerate() {
            let begun = control_block.small(CALL, bytes);
            if is_dropped && number == 0 {
                continue;
            }
            assert_eq!(begun.slots(&mut |_, _| Err("enough")).map(|_| ()), Err("enough"));
        }
        let slots = late.small(CALL, &[4; 8]).slots(&mut go_on).unwrap();
        assert_eq!((slots.bytes(0), slots.bytes(1)), (&[1; 8][..], &[4; 8][..]));
        // Nor does it make the next one.
        assert_eq!(late.small(CALL, &[]).slots(&mut |_, _| Err("enough")).map(|_| ()), Err("enough"));
    }
}

/// A late peer takes what is staged next for the next window of its own call.
#[test]
fn who_has_given_up_a_call_stages_no_window_of_another() {
    let mut blocks = blocks(2);
    let ((mut late, _), (mut control_block, _)) = (blocks.swap_remove(1), blocks.swap_remove(0));
    for value in [1, 2] {
        let fill = |_: &[u8], window: &mut [u8]| {
            window.fill(value);
            Ok(())
        };
        let ahead = (SHARES, Unregistered::InWindow(&fill));
        let outcome = control_block.in_place(CALL, &mut [0; 8], ahead, &mut |_, _| Err("enough"), |_| Ok(()));
        assert_eq!(outcome, Err("enough"));
    }
    let mut taken = Vec::new();
    let mut watch = |_, _| Err("there is no other window");
    let later = (SHARES, Unregistered::Later);
    let outcome = late.in_place(CALL, &mut [0; 8], later, &mut watch, |operation| {
        operation.pass(
            2,
            |_, _, _| Ok(()),
            |operation, _| {
                operation.take(|windows, _| {
                    taken.push(windows[0][0]);
                    Ok(())
                })
            },
            None,
        )
    });
    assert_eq!((outcome, taken), (Err("there is no other window"), vec![1]));
}

/// The peer has published its header, and its window with it, and dies before it reads this rank's.
#[test]
fn a_peer_that_ends_between_its_flag_and_its_reading_is_waited_for_by_name() {
    run(2, |control_block, _| {
        let (me, dies) = (control_block.me(), control_block.me() == 1);
        let is_dead = Cell::new(false);
        let watch = |missing: usize, _: Option<Difference>| match is_dead.get() {
            true => Err(format!("member {missing} is dead")),
            false => go_on(missing, None),
        };
        let first = |memory: &[u8], window: &mut [u8]| numbered(me)(0, memory, window);
        let memory = (Division { owners: 2, ..WINDOWS }, Unregistered::InWindow(&first));
        let outcome = control_block.in_place(CALL, &mut [0; 8], memory, &mut &watch, |operation| {
            if dies {
                return Err("killed".to_owned());
            }
            is_dead.set(true);
            combine_windows(operation, 1)
        });
        assert_eq!(outcome, Err(if dies { "killed" } else { "member 1 is dead" }.to_owned()));
        if !dies {
            // Nor does the peer make the next call.
            let next = control_block.small(CALL, &[1; 600]).slots(&mut &watch).map(|_| ());
            assert_eq!(next, Err("member 1 is dead".to_owned()));
        }
    });
}

#[test]
fn after_a_failed_call_late_peers_do_not_reach_the_region() {
    let mut blocks = blocks(2);
    let ((mut late, other), (mut control_block, arena)) = (blocks.swap_remove(1), blocks.swap_remove(0));
    let mut region = filled(&arena, 10_000, 1);
    let outcome = control_block.in_place(
        CALL,
        region.as_mut_slice(),
        (SHARES, Unregistered::Later),
        &mut |_, _| Err("enough"),
        |_| Ok(()),
    );
    assert_eq!(outcome, Err("enough"));
    // The peer reads the header in the slot, sees that the region is lent, and writes.
    let mut own = filled(&other, 10_000, 1);
    let mut watch = |_, _| Err("nobody is done any more");
    let outcome =
        late.in_place(CALL, own.as_mut_slice(), (SHARES, Unregistered::Later), &mut watch, |operation| {
            assert_eq!(operation.protocol(), Protocol::Direct);
            operation.combine(|shares| shares.iter_mut().for_each(|share| share.fill(9)));
            Ok(())
        });
    assert_eq!(outcome, Err("nobody is done any more"));
    assert!(region.as_slice().iter().all(|byte| *byte == 1));
    assert_eq!(control_block.own.find(region.as_slice()), None);
}

#[test]
fn what_a_late_peer_reads_after_a_failed_call_is_no_result() {
    for expected in [Protocol::Direct, Protocol::Copied] {
        let mut blocks = blocks(2);
        let ((mut late, other), (mut control_block, arena)) = (blocks.swap_remove(1), blocks.swap_remove(0));
        let (working, worked) = mpsc::channel();
        let (failed, failure) = mpsc::channel();
        let memory = |arena: &Arc<Arena>| (filled(arena, MUCH, 1), vec![1; MUCH]);
        thread::scope(|scope| {
            scope.spawn(move || {
                let (region, ordinary) = memory(&other);
                let own = if expected == Protocol::Direct { region.as_slice() } else { &ordinary };
                let read = Cell::new(false);
                let mut watch = |_, _| if read.get() { Err("somebody is not done") } else { Ok(()) };
                let late = late.out_of_place(CALL, offered_from_much(own)).finish(&mut watch, |operation| {
                    assert_eq!(operation.protocol(), expected);
                    working.send(()).unwrap();
                    failure.recv().unwrap();
                    read.set(true);
                    if expected == Protocol::Direct {
                        return Ok(operation.read(|inputs| inputs[0][0]));
                    }
                    let mut into = vec![0; MUCH];
                    operation.copy(0, 0, &mut into)?;
                    Ok(into[0])
                });
                assert_eq!(late, Err("somebody is not done"));
            });
            // This rank has done its part, and gives up on the other.
            let (region, ordinary) = memory(&arena);
            let own = if expected == Protocol::Direct { region.as_slice() } else { &ordinary };
            // From then on, every time it is called: a result that comes with the end of a wait may be ignored.
            let enough = Cell::new(false);
            let mut watch = |_, _| {
                enough.set(enough.get() || worked.try_recv().is_ok());
                if enough.get() { Err("enough") } else { Ok(()) }
            };
            let outcome =
                control_block.out_of_place(CALL, offered_from_much(own)).finish(&mut watch, |_| Ok(()));
            assert_eq!(outcome, Err("enough"));
            drop((region, ordinary));
            failed.send(()).unwrap();
        });
    }
}

/// One rank gives up on a late rank; a third has seen that the first is done, and waits only for the late one.
#[test]
fn what_a_late_rank_combines_without_one_that_gave_up_is_no_result_for_a_third() {
    const BYTES: usize = 10_000;
    let mut ranks = blocks(3).into_iter();
    let [(mut gives_up, one), (mut waits, two), (mut late, four)] = [(); 3].map(|()| ranks.next().unwrap());
    let (alone, waits_alone) = mpsc::channel();
    let (failed, failure) = mpsc::channel();
    let (ended, end) = mpsc::channel();
    let combine = |operation: &mut SharedOperation<'_, '_, &str>| {
        assert_eq!(operation.protocol(), Protocol::Direct);
        operation.combine(add);
        Ok(())
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut own = filled(&four, BYTES, 4);
            let ended = Cell::new(false);
            let mut watch = |_, _| {
                ended.set(ended.get() || end.try_recv().is_ok());
                if ended.get() { Err("the third rank has its result") } else { Ok(()) }
            };
            let outcome = late.in_place(
                CALL,
                own.as_mut_slice(),
                (SHARES, Unregistered::Later),
                &mut watch,
                |operation| {
                    failure.recv().unwrap();
                    combine(operation)
                },
            );
            assert_eq!(outcome, Err("the third rank has its result"));
        });
        scope.spawn(move || {
            let mut own = filled(&two, BYTES, 2);
            let combined = Cell::new(false);
            let mut told = false;
            let mut watch = |member, _| match member {
                // Called for the last member, after this rank has done its part: the first was seen as done.
                2 if combined.get() && !told => {
                    told = true;
                    alone.send(()).unwrap();
                    Ok(())
                }
                0 if told => Err("the first rank is not done any more"),
                _ => Ok(()),
            };
            let outcome = waits.in_place(
                CALL,
                own.as_mut_slice(),
                (SHARES, Unregistered::Later),
                &mut watch,
                |operation| {
                    combined.set(true);
                    combine(operation)
                },
            );
            ended.send(()).unwrap();
            assert_eq!(outcome, Err("the first rank is not done any more"), "a sum that lacks a part");
        });
        scope.spawn(move || {
            let mut own = filled(&one, BYTES, 1);
            let enough = Cell::new(false);
            let mut watch = |_, _| {
                enough.set(enough.get() || waits_alone.try_recv().is_ok());
                if enough.get() { Err("enough") } else { Ok(()) }
            };
            let outcome = gives_up.in_place(
                CALL,
                own.as_mut_slice(),
                (SHARES, Unregistered::Later),
                &mut watch,
                combine,
            );
            assert_eq!(outcome, Err("enough"));
            failed.send(()).unwrap();
        });
    });
}

#[test]
fn offsets_that_no_peer_can_have_are_no_region() {
    let (control_block, _) = blocks(2).swap_remove(0);
    let peer = &control_block.members[1];
    let slot = control_block.slot;
    for (offset, bytes) in [(0, 8), (ARENA as u64, 8), (OFFSET, 8), (ARENA as u64 - 4096, LENGTH), (4096, 8)]
    {
        peer.word(slot + 24).store(offset | MemoryKind::Lent as u64, Ordering::Relaxed);
        peer.word(slot + 32).store(bytes, Ordering::Relaxed);
        assert_eq!(control_block.region(1, MemoryKind::Lent), None, "{offset} {bytes}");
    }
    assert_eq!(Slots { control_block: &control_block, needs: Needs::All }.bytes(1), b"");
}

#[test]
fn shares_cover_everything_once() {
    for bytes in [0, 1, 63, 64, 65, 1000, 4096] {
        for ranks in 1..9 {
            let shares: Vec<_> = (0..ranks).map(|index| share(bytes, 64, ranks, index)).collect();
            assert_eq!((shares[0].start, shares[ranks - 1].end), (0, bytes));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(
                share(bytes, 64, ranks, ranks).is_empty() && share(bytes, 64, ranks, ranks + 3).is_empty()
            );
        }
    }
}

/// Those of the members have other shares. Whole windows all may read, unless one of them combines windows.
#[test]
fn memory_that_is_divided_otherwise_is_not_lent() {
    let other = Division { owners: 2, ..SHARES };
    let units = Division { unit: 1, ..SHARES };
    for (mine, theirs) in [(SHARES, other), (SHARES, units), (SHARES, WINDOWS)] {
        run(2, |control_block, arena| {
            let division = if control_block.me() == 0 { mine } else { theirs };
            let mut region = filled(arena, 10_000, 1);
            let memory = region.as_mut_slice();
            let reads = !mine.combines_windows && !theirs.combines_windows;
            let passes = |operation: &mut SharedOperation<'_, '_, String>| {
                let mut refuses = |work: &mut dyn FnMut(&mut SharedOperation<'_, '_, String>)| {
                    catch_unwind(AssertUnwindSafe(|| work(operation))).is_err()
                };
                let refused = [
                    refuses(&mut |operation| operation.combine(|_| ())),
                    refuses(&mut |operation| operation.combine_staged(64, |_, _| Ok(())).unwrap()),
                    refuses(&mut |operation| {
                        let take = |operation: &mut SharedOperation<'_, '_, String>, _| {
                            operation.take(|windows, _| {
                                assert!(windows[0][0] == 7 && windows[1][0] == 7);
                                Ok(())
                            })
                        };
                        let fill = |_, _: &[u8], window: &mut [u8]| {
                            window[0] = 7;
                            Ok(())
                        };
                        operation.pass(1, fill, take, None).unwrap();
                    }),
                ];
                Ok((operation.protocol(), refused))
            };
            let seen =
                control_block.in_place(CALL, memory, (division, Unregistered::Later), &mut go_on, passes);
            assert_eq!(seen, Ok((Protocol::Staged, [true, true, !reads])));
        });
    }
}

/// What members pass alike, they have taken alike; a member that has passed fewer may still read what it has not taken.
#[test]
fn windows_are_free_when_those_who_passed_fewer_say_so() {
    let (mut control_block, _) = blocks(2).swap_remove(0);
    let peer = control_block.members[1].clone();
    control_block.staging.staged = 3;
    let header = |first| Announcement { call: CALL, division: 0, first };
    control_block.begin(header(2), &[], &[], None, None);
    let length = peer.word(control_block.slot + 32);
    length.store(1 << LENGTH.count_ones(), Ordering::Relaxed);
    control_block.free_windows_before(2);
    assert_eq!(control_block.staging.free, 0);
    length.store(2 << LENGTH.count_ones(), Ordering::Relaxed);
    control_block.free_windows_before(2);
    assert_eq!(control_block.staging.free, 2);
}
