use std::cell::Cell;
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::arena::Region;

const ARENA: usize = 16 << 20;
const CALL: Call = *b"sixteen letters.";

/// The control blocks of all ranks, each with its own mappings, as in separate processes.
fn blocks(ranks: usize) -> Vec<(ControlBlock, Arc<Arena>)> {
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

fn run(ranks: usize, rank: impl Fn(&mut ControlBlock, &Arc<Arena>) + Sync) {
    thread::scope(|scope| {
        for (mut control_block, arena) in blocks(ranks) {
            let rank = &rank;
            scope.spawn(move || rank(&mut control_block, &arena));
        }
    });
}

/// If one rank's test fails, the others keep waiting for it, but not for ever.
fn go_on(missing: usize) -> Result<(), String> {
    static START: OnceLock<Instant> = OnceLock::new();
    let waited = START.get_or_init(Instant::now).elapsed() > Duration::from_secs(60);
    if waited { Err(format!("member {missing} does not come")) } else { Ok(()) }
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
            let mut call = CALL;
            call[..4].copy_from_slice(&round.to_le_bytes());
            let length = 1 + round as usize % 100;
            let bytes = vec![(control_block.me() as u8).wrapping_add(round as u8); length];
            let slots = control_block.small(call, &bytes, &mut go_on).unwrap();
            for member in 0..3 {
                assert_eq!(slots.call(member), call);
                assert_eq!(slots.bytes(member), vec![(member as u8).wrapping_add(round as u8); length]);
            }
        }
    });
}

#[test]
fn regions_are_combined_where_they_are() {
    run(3, |control_block, arena| {
        for bytes in [1, 64, 5000, 100_000] {
            let mut region = filled(arena, bytes, 1 + control_block.me() as u8);
            for round in 0..100 {
                region.as_mut_slice().fill(1 + control_block.me() as u8 + round);
                control_block
                    .in_place(CALL, region.as_mut_slice(), Unregistered::Later, &mut go_on, |operation| {
                        assert_eq!(operation.protocol(), Protocol::Direct);
                        operation.combine(3, 64, add);
                        Ok(())
                    })
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
            .out_of_place(CALL, &[], region.as_slice(), None, &mut go_on, |operation| {
                sum = operation.read(|regions| regions.iter().map(|region| u32::from(region[9_999])).sum());
                Ok(())
            })
            .unwrap();
        assert_eq!(sum, 6);
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
            let protocol =
                control_block.in_place(CALL, memory, Unregistered::Later, &mut go_on, |operation| {
                    Ok(operation.protocol())
                });
            assert_eq!(protocol, Ok(Protocol::Staged));
        }
        let shorter = filled(arena, length, 1);
        let mut lent = filled(arena, length, 1);
        let lent =
            control_block.in_place(CALL, lent.as_mut_slice(), Unregistered::Later, &mut go_on, |operation| {
                Ok(operation.protocol())
            });
        assert_eq!(lent, Ok(Protocol::Staged), "they differ in length");
        let shown =
            control_block.out_of_place(CALL, &[], shorter.as_slice(), None, &mut go_on, |operation| {
                Ok(operation.protocol())
            });
        assert_eq!(shown, Ok(Protocol::Direct));
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
        let seen =
            control_block.in_place(CALL, &mut unregistered, Unregistered::InSlot(50..60), &mut go_on, read);
        assert_eq!(seen, Ok([0, 1, control_block.me() as u8]));
        let mut region = filled(arena, 100, 1);
        let memory = if control_block.me() == 0 { region.as_mut_slice() } else { &mut unregistered };
        let protocol =
            control_block.in_place(CALL, memory, Unregistered::InSlot(0..100), &mut go_on, |operation| {
                Ok(operation.protocol())
            });
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
            let outcome =
                control_block.out_of_place(CALL, &[me as u8; 24], memory, small, &mut go_on, |operation| {
                    assert!((0..3).all(|member| operation.note(member) == [member as u8; 24]));
                    match operation.protocol() {
                        Protocol::Small => {
                            operation.slots(|slots, _| assert!([0, 10].contains(&slots.bytes(1).len())))
                        }
                        Protocol::Direct => {
                            operation.read(|all| assert_eq!((all[0], all[1]), (&[][..], &many[..])))
                        }
                        Protocol::Staged => {}
                    }
                    Ok(operation.protocol())
                });
            assert_eq!(outcome, Ok(protocol));
        }
    });
}

#[test]
fn who_has_not_come_is_known() {
    let mut blocks = blocks(4);
    let (mut control_block, _) = blocks.swap_remove(2);
    assert_eq!(control_block.small(CALL, &[], &mut |_| Err("enough")).map(|_| ()), Err("enough"));
    assert_eq!(control_block.missing().collect::<Vec<_>>(), [0, 1, 3]);
    let (mut other, _) = blocks.swap_remove(1);
    assert_eq!(other.small(CALL, &[], &mut |_| Err("enough")).map(|_| ()), Err("enough"));
    assert_eq!(control_block.missing().collect::<Vec<_>>(), [0, 3]);
}

#[test]
fn what_a_peer_does_to_a_slot_is_not_its_owner_s_own_word() {
    let mut blocks = blocks(2);
    let ((other, _), (mut control_block, _)) = (blocks.swap_remove(1), blocks.swap_remove(0));
    control_block.begin(CALL, &[1; 8], &[7; 16], None, Some(4..12));
    let slot = control_block.slot();
    for place in (slot + 8..slot + HEAD + 16).step_by(8) {
        other.members[0].word(place).store(u64::MAX, Ordering::Relaxed);
    }
    assert_eq!((control_block.call_of(0), control_block.in_slot(0, 0, 8)), (CALL, &[1; 8][..]));
    assert_eq!(Slots { control_block: &control_block }.bytes(0), [7; 8]);
}

#[test]
fn windows_pass_in_order() {
    run(3, |control_block, _| {
        let mut memory = vec![control_block.me() as u8; 8];
        let sums = control_block.in_place(CALL, &mut memory, Unregistered::Later, &mut go_on, |operation| {
            let mut sums = Vec::new();
            let fill = |window: u8| {
                move |memory: &[u8], staged: &mut [u8]| {
                    staged.fill(memory[0] + window);
                    Ok(())
                }
            };
            operation.stage(fill(0))?;
            for window in 0..40 {
                if window < 39 {
                    operation.stage(fill(window + 1))?;
                }
                operation.take(|windows, memory| {
                    assert!(windows.iter().all(|window| window.len() == WINDOW));
                    memory[7] = window;
                    sums.push(windows.iter().map(|window| window[WINDOW - 1]).sum::<u8>());
                    Ok(())
                })?;
            }
            Ok::<_, String>(sums)
        });
        assert_eq!(sums.unwrap(), (0..40).map(|window| 3 + 3 * window).collect::<Vec<_>>());
        assert_eq!(memory[7], 39);
    });
}

#[test]
fn windows_are_combined_by_all_and_come_back() {
    const RANKS: usize = 3;
    const BLOCK: usize = WINDOW / RANKS / 64 * 64;
    run(RANKS, |control_block, _| {
        let me = control_block.me();
        // The first call finds its window already staged.
        for ahead in [true, false] {
            let fill = |_: &[u8], staged: &mut [u8]| {
                staged.fill(me as u8);
                Ok(())
            };
            let unregistered = if ahead { Unregistered::InWindow(&fill) } else { Unregistered::Later };
            let outcome = control_block.in_place(CALL, &mut [0; 8], unregistered, &mut go_on, |operation| {
                let take_back = |operation: &mut SharedOperation<'_, '_, String>, number: u8| {
                    operation.take_back(|window, _| {
                        for other in (0..RANKS).filter(|other| *other != me) {
                            let block = &window[other * BLOCK..][..BLOCK];
                            let expected = me as u8 + number + 10 * (other as u8 + 1);
                            assert!(block.iter().all(|byte| *byte == expected), "{number} {other}");
                        }
                        Ok(())
                    })
                };
                operation.stage(fill)?;
                for number in 0..20 {
                    if number < 19 {
                        if number > 0 {
                            take_back(operation, number - 1)?;
                        }
                        operation.stage(|_, staged| {
                            staged.fill(me as u8 + number + 1);
                            Ok(())
                        })?;
                    }
                    operation.combine_staged(BLOCK, |blocks, _| {
                        let others = (0..RANKS as u8).filter(|other| *other != me as u8);
                        for (block, other) in blocks.iter_mut().zip(others) {
                            assert_eq!((block.len(), block[BLOCK - 1]), (BLOCK, other + number));
                            block.iter_mut().for_each(|byte| *byte += 10 * (me as u8 + 1));
                        }
                        Ok(())
                    })?;
                }
                take_back(operation, 18)?;
                take_back(operation, 19)
            });
            outcome.unwrap();
        }
    });
}

#[test]
fn sleepers_are_woken() {
    run(2, |control_block, _| {
        for round in 0..30 {
            if control_block.me() == round % 2 {
                thread::sleep(Duration::from_millis(2));
            }
            let start = Instant::now();
            control_block.small(CALL, &[], &mut go_on).unwrap();
            assert!(start.elapsed() < Duration::from_secs(30));
        }
    });
}

#[test]
fn a_watch_ends_the_wait_and_says_for_whom_it_was() {
    let (mut control_block, _) = blocks(3).swap_remove(1);
    let mut give_up = |missing: usize| if missing == 0 { Err("enough") } else { Ok(()) };
    assert_eq!(control_block.small(CALL, &[], &mut give_up).map(|_| ()), Err("enough"));
}

#[test]
fn after_a_failed_call_late_peers_do_not_reach_the_region() {
    let mut blocks = blocks(2);
    let ((mut late, other), (mut control_block, arena)) = (blocks.swap_remove(1), blocks.swap_remove(0));
    let mut region = filled(&arena, 10_000, 1);
    let outcome = control_block.in_place(
        CALL,
        region.as_mut_slice(),
        Unregistered::Later,
        &mut |_| Err("enough"),
        |_| Ok(()),
    );
    assert_eq!(outcome, Err("enough"));
    // The peer reads the header in the slot, sees that the region is lent, and writes.
    let mut own = filled(&other, 10_000, 1);
    let mut watch = |_| Err("nobody is done any more");
    let outcome = late.in_place(CALL, own.as_mut_slice(), Unregistered::Later, &mut watch, |operation| {
        assert_eq!(operation.protocol(), Protocol::Direct);
        operation.combine(2, 64, |shares| shares.iter_mut().for_each(|share| share.fill(9)));
        Ok(())
    });
    assert_eq!(outcome, Err("nobody is done any more"));
    assert!(region.as_slice().iter().all(|byte| *byte == 1));
    assert_eq!(control_block.own.find(region.as_slice()), None);
}

#[test]
fn what_a_late_peer_reads_after_a_failed_call_is_no_result() {
    let mut blocks = blocks(2);
    let ((mut late, other), (mut control_block, arena)) = (blocks.swap_remove(1), blocks.swap_remove(0));
    let (working, worked) = mpsc::channel();
    let (failed, failure) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let own = filled(&other, 10_000, 1);
            let read = Cell::new(false);
            let mut watch = |_| if read.get() { Err("somebody is not done") } else { Ok(()) };
            let late = late.out_of_place(CALL, &[], own.as_slice(), None, &mut watch, |operation| {
                assert_eq!(operation.protocol(), Protocol::Direct);
                working.send(()).unwrap();
                failure.recv().unwrap();
                read.set(true);
                Ok(operation.read(|inputs| inputs[0][0]))
            });
            assert_eq!(late, Err("somebody is not done"));
        });
        // This rank has done its part, and gives up on the other.
        let region = filled(&arena, 10_000, 1);
        // From then on, every time it is called: a result that comes with the end of a wait may be ignored.
        let enough = Cell::new(false);
        let mut watch = |_| {
            enough.set(enough.get() || worked.try_recv().is_ok());
            if enough.get() { Err("enough") } else { Ok(()) }
        };
        let outcome = control_block.out_of_place(CALL, &[], region.as_slice(), None, &mut watch, |_| Ok(()));
        assert_eq!(outcome, Err("enough"));
        drop(region);
        failed.send(()).unwrap();
    });
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
        operation.combine(3, 64, add);
        Ok(())
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut own = filled(&four, BYTES, 4);
            let ended = Cell::new(false);
            let mut watch = |_| {
                ended.set(ended.get() || end.try_recv().is_ok());
                if ended.get() { Err("the third rank has its result") } else { Ok(()) }
            };
            let outcome =
                late.in_place(CALL, own.as_mut_slice(), Unregistered::Later, &mut watch, |operation| {
                    failure.recv().unwrap();
                    combine(operation)
                });
            assert_eq!(outcome, Err("the third rank has its result"));
        });
        scope.spawn(move || {
            let mut own = filled(&two, BYTES, 2);
            let combined = Cell::new(false);
            let mut told = false;
            let mut watch = |member| match member {
                // Called for the last member, after this rank has done its part: the first was seen as done.
                2 if combined.get() && !told => {
                    told = true;
                    alone.send(()).unwrap();
                    Ok(())
                }
                0 if told => Err("the first rank is not done any more"),
                _ => Ok(()),
            };
            let outcome =
                waits.in_place(CALL, own.as_mut_slice(), Unregistered::Later, &mut watch, |operation| {
                    combined.set(true);
                    combine(operation)
                });
            ended.send(()).unwrap();
            assert_eq!(outcome, Err("the first rank is not done any more"), "a sum that lacks a part");
        });
        scope.spawn(move || {
            let mut own = filled(&one, BYTES, 1);
            let enough = Cell::new(false);
            let mut watch = |_| {
                enough.set(enough.get() || waits_alone.try_recv().is_ok());
                if enough.get() { Err("enough") } else { Ok(()) }
            };
            let outcome =
                gives_up.in_place(CALL, own.as_mut_slice(), Unregistered::Later, &mut watch, combine);
            assert_eq!(outcome, Err("enough"));
            failed.send(()).unwrap();
        });
    });
}

#[test]
fn offsets_that_no_peer_can_have_are_no_region() {
    let (control_block, _) = blocks(2).swap_remove(0);
    let peer = &control_block.members[1];
    let slot = control_block.slot();
    for (offset, bytes) in [(0, 8), (ARENA as u64, 8), (!3, 8), (ARENA as u64 - 4096, u64::MAX), (4096, 8)] {
        peer.word(slot + 24).store(offset | MemoryKind::Lent as u64, Ordering::Relaxed);
        peer.word(slot + 32).store(bytes, Ordering::Relaxed);
        assert_eq!(control_block.region(1, MemoryKind::Lent), None, "{offset} {bytes}");
    }
    assert_eq!(Slots { control_block: &control_block }.bytes(1), b"");
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
