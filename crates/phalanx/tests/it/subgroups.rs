//! Groups of some of a group's ranks: which ranks are in them, that they are independent, and what they say when they fail.

use std::sync::Arc;
use std::time::Duration;

use phalanx::store::{MemoryStore, SharedStore};
use phalanx::testing::{Fabric, run};
use phalanx::{Buffer, DType, Error, ProcessGroup, Rank, ReduceOp, Result, interruptible};

/// Nothing in here may wait for this long.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

fn patient(group: &ProcessGroup) -> ProcessGroup {
    group.with_timeout(WAIT_LIMIT)
}

fn ranks(ranks: &[u32]) -> Vec<Rank> {
    ranks.iter().copied().map(Rank::new).collect()
}

/// The sum of the members' ranks in the first group, as all of them find it.
fn sum_of_ranks(group: &ProcessGroup) -> i64 {
    let own = group.global_rank(group.rank()).unwrap();
    let mut sum = [i64::from(own.get())];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    sum[0]
}

#[test]
fn members_get_a_group_and_others_none() {
    for fabric in Fabric::ALL {
        for world in 2..=5u32 {
            run(world, fabric, |group| {
                let (group, own) = (patient(&group), group.rank());
                for first in 0..world {
                    // Any order of the list, one member, all of them.
                    let list: Vec<u32> = (first..world).rev().collect();
                    let part = group.new_group(&ranks(&list)).unwrap();
                    assert_eq!(part.is_some(), own.get() >= first);
                    let Some(part) = part else { continue };
                    assert_eq!(part.world_size().get(), world - first);
                    assert_eq!(part.rank().get(), own.get() - first);
                    assert_eq!(part.global_rank(part.rank()).unwrap(), own);
                    assert_eq!(part.group_rank(own), Some(part.rank()));
                    assert_eq!(part.group_rank(Rank::new(first + 7)), None);
                    assert!(part.global_rank(Rank::new(world)).unwrap_err().is_invalid_argument());
                    assert_eq!(part.local_rank(), group.local_rank());
                    assert_eq!(sum_of_ranks(&part), (first..world).map(i64::from).sum::<i64>());
                }
                group.barrier().unwrap();
            });
        }
    }
}

#[test]
fn a_split_orders_by_key_and_then_by_rank() {
    for fabric in Fabric::ALL {
        run(5, fabric, |group| {
            let (group, own) = (patient(&group), group.rank().get());
            // Ranks 0, 2 and 4 backwards, 1 alone, 3 in none.
            let color = [Some(7), Some(0), Some(7), None, Some(7)][own as usize];
            let part = group.split(color, -i64::from(own / 3)).unwrap();
            let members: &[u32] = match own {
                1 => &[1],
                3 => &[],
                _ => &[4, 0, 2],
            };
            let Some(part) = part else { return assert!(members.is_empty()) };
            let found: Vec<u32> =
                part.world_size().ranks().map(|rank| part.global_rank(rank).unwrap().get()).collect();
            assert_eq!(found, members);
            assert_eq!(sum_of_ranks(&part), members.iter().copied().map(i64::from).sum::<i64>());
            let mut data = [i64::from(own)];
            part.broadcast(&mut data, Rank::MAIN).unwrap();
            assert_eq!(data, [i64::from(members[0])]);
        });
    }
}

#[test]
fn groups_of_groups_count_ranks_of_the_first() {
    for fabric in Fabric::ALL {
        run(4, fabric, |group| {
            let Some(upper) = patient(&group).new_group(&ranks(&[1, 2, 3])).unwrap() else { return };
            let Some(last) = upper.new_group(&ranks(&[1, 2])).unwrap() else { return };
            // It outlives those that it was made of.
            drop((group, upper));
            assert_eq!(last.global_rank(Rank::MAIN).unwrap(), Rank::new(2));
            assert_eq!(sum_of_ranks(&last), 5);
            let peer = Rank::new(1 - last.rank().get());
            let received = last.irecv(Buffer::zeroed(DType::U8, 3), peer).unwrap();
            last.send(&[peer.get() as u8; 3], peer).unwrap();
            assert_eq!(received.wait().unwrap().as_slice::<u8>().unwrap(), [last.rank().get() as u8; 3]);
        });
    }
}

#[test]
fn lists_that_differ_are_shown_to_every_rank() {
    for fabric in Fabric::ALL {
        run(4, fabric, |group| {
            let group = patient(&group);
            let list = if group.rank().get() == 2 { ranks(&[1, 3, 2]) } else { ranks(&[0, 1]) };
            let error = group.new_group(&list).unwrap_err();
            assert!(error.is_mismatch(), "{fabric:?}: {error}");
            let text = error.to_string();
            assert!(text.contains("rank 0 asks for [0, 1], rank 2 for [1, 2, 3]"), "{text}");
            // Nothing is broken: the next one is made.
            let whole = group.new_group(&ranks(&[0, 1, 2, 3])).unwrap().unwrap();
            assert_eq!(sum_of_ranks(&whole), 6);
            let error = match group.rank().is_main() {
                true => group.split(None, 0).unwrap_err(),
                false => group.new_group(&ranks(&[0])).unwrap_err(),
            };
            let text = error.to_string();
            assert!(error.is_mismatch() && text.contains("rank 0 calls split ["), "{text}");
            assert!(text.contains("calls new_group ["), "{text}");
        });
    }
}

#[test]
fn a_list_that_is_bad_on_one_rank_alone_is_shown_to_every_rank() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let group = patient(&group);
            for (bad, shown) in [(&[][..], "[]"), (&[0, 1, 1], "[0, 1, 1]"), (&[0, 2], "[0, 2]")] {
                let list = if group.rank().is_main() { &[0, 1][..] } else { bad };
                let error = group.new_group(&ranks(list)).unwrap_err();
                assert!(error.is_mismatch(), "{fabric:?}: {error}");
                let said = format!("rank 0 asks for [0, 1], rank 1 for {shown}");
                assert!(error.to_string().contains(&said), "{fabric:?}: {error}");
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn bad_lists_are_refused_at_the_call() {
    run(2, Fabric::Tcp, |group| {
        for (list, reason) in
            [(&[][..], "name at least one"), (&[0, 1, 0], "list twice (name each"), (&[0, 2], "outside")]
        {
            let error = group.new_group(&ranks(list)).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(reason), "{error}");
        }
        group.barrier().unwrap();
    });
    let alone = ProcessGroup::alone().unwrap();
    let part = alone.new_group(&[Rank::MAIN]).unwrap().unwrap();
    part.barrier().unwrap();
    assert_eq!(part.split(Some(3), 0).unwrap().unwrap().world_size().get(), 1);
}

#[test]
fn a_call_that_is_missing_is_named() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            if group.rank().get() == 2 {
                while group.failure().is_none() {
                    std::thread::yield_now();
                }
                return;
            }
            let hasty = group.with_timeout(Duration::from_millis(300));
            let error = hasty.new_group(&ranks(&[0, 1])).unwrap_err();
            assert!(error.is_timeout() && error.peer().is_some(), "{fabric:?}: {error}");
        });
    }
}

#[test]
fn a_group_and_its_parts_work_side_by_side() {
    for fabric in Fabric::ALL {
        run(4, fabric, |group| {
            let (group, own) = (patient(&group), group.rank().get());
            let row = group.split(Some(own / 2), 0).unwrap().unwrap();
            let column = group.split(Some(own % 2), 0).unwrap().unwrap();
            std::thread::scope(|scope| {
                for part in [&group, &row, &column] {
                    scope.spawn(move || {
                        let world = part.world_size().get();
                        for length in (0..60).map(|round| round * round * 40 + 1) {
                            let work =
                                part.all_reduce_async(Buffer::from_slice(&vec![1f32; length]), ReduceOp::Sum);
                            let mut data = vec![own as i32; 100];
                            part.all_reduce(&mut data, ReduceOp::Max).unwrap();
                            let sums = work.unwrap().wait().unwrap();
                            assert!(sums.as_slice::<f32>().unwrap().iter().all(|sum| *sum == world as f32));
                        }
                    });
                }
                let row = &row;
                scope.spawn(move || {
                    let peer = Rank::new(1 - row.rank().get());
                    for round in 0..100u8 {
                        let received = row.irecv(Buffer::zeroed(DType::U8, 10_000), peer).unwrap();
                        row.send(&[round; 10_000], peer).unwrap();
                        assert_eq!(received.wait().unwrap().as_slice::<u8>().unwrap(), [round; 10_000]);
                    }
                });
            });
        });
    }
}

#[test]
fn memory_of_one_group_may_be_used_in_another() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let group = patient(&group);
            let part = group.split(Some(0), -i64::from(group.rank().get())).unwrap().unwrap();
            for length in [3, 1 << 16] {
                for (of, with) in [(&group, &part), (&part, &group), (&part, &part)] {
                    let mut buffer = of.alloc(DType::F32, length).unwrap();
                    buffer.as_mut_slice::<f32>().unwrap().fill(2.0);
                    let sums = with.all_reduce_async(buffer, ReduceOp::Sum).unwrap().wait().unwrap();
                    assert!(sums.as_slice::<f32>().unwrap().iter().all(|sum| *sum == 6.0));
                }
            }
        });
    }
}

#[test]
fn the_failure_of_a_part_is_its_own() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let group = patient(&group);
            let part = group.new_group(&ranks(&[1, 2])).unwrap();
            // The other member may still be making it.
            group.barrier().unwrap();
            if let Some(part) = part {
                if part.rank().is_main() {
                    part.abort(Error::aborted("this part has diverged"));
                }
                let error = loop {
                    if let Err(error) = part.barrier() {
                        break error;
                    }
                };
                assert!(error.is_aborted() && error.rank() == Some(Rank::MAIN), "{fabric:?}: {error}");
                if fabric != Fabric::InProcess {
                    assert!(error.host().unwrap().ends_with("global rank 1"), "{error}");
                }
            }
            group.barrier().unwrap();
            assert!(group.failure().is_none());
        });
    }
}

/// Runs ranks that have a store to meet in, over each fabric that has connections.
fn with_a_store(world: u32, rank: impl Fn(Fabric, ProcessGroup, &SharedStore) + Sync) {
    for fabric in [Fabric::Tcp, Fabric::SharedMemory, Fabric::TwoHosts] {
        let store: SharedStore = Arc::<MemoryStore>::default();
        run(world, fabric, |group| rank(fabric, group, &store));
    }
}

fn part(group: &ProcessGroup, store: &SharedStore, name: &str, list: &[u32]) -> Result<ProcessGroup> {
    group.part(store.clone(), name, &ranks(list), WAIT_LIMIT)
}

#[test]
fn members_alone_meet_in_a_store_in_the_order_that_they_name() {
    with_a_store(4, |_, group, store| {
        let own = group.rank().get();
        // Ranks 0 and 2 do not even know of it; the pairs after it have names of their own, and are made at the same time.
        if own % 2 == 1 {
            let odd = part(&group, store, "odd", &[3, 1]).unwrap();
            assert_eq!((odd.rank().get(), odd.world_size().get()), ((3 - own) / 2, 2));
            assert_eq!(odd.global_rank(Rank::MAIN).unwrap(), Rank::new(3));
            assert_eq!(sum_of_ranks(&odd), 4);
            let mut data = [own as i32];
            odd.broadcast(&mut data, Rank::MAIN).unwrap();
            assert_eq!(data, [3]);
            odd.close().unwrap();
        }
        let pair = [own / 2 * 2, own / 2 * 2 + 1];
        let pair = part(&group, store, &format!("pair {}", own / 2), &pair).unwrap();
        assert_eq!(sum_of_ranks(&pair), i64::from(own / 2 * 4 + 1));
        // One of all, and one of one.
        let all = part(&group, store, "all", &[0, 1, 2, 3]).unwrap();
        assert_eq!((sum_of_ranks(&all), all.rank()), (6, group.rank()));
        let alone = part(&group, store, &format!("alone {own}"), &[own]).unwrap();
        assert_eq!(sum_of_ranks(&alone), i64::from(own));
        assert_eq!(sum_of_ranks(&group), 6);
    });
}

#[test]
fn a_part_whose_members_differ_is_refused_on_all() {
    with_a_store(3, |fabric, group, store| {
        let list = if group.rank().is_main() { [0, 1, 2] } else { [0, 2, 1] };
        // In their places ranks 1 and 2 are each other.
        let error = part(&group, store, "same", &list).unwrap_err();
        assert!(error.is_mismatch(), "{fabric:?}: {error}");
        assert_eq!(sum_of_ranks(&part(&group, store, "next", &[2, 1, 0]).unwrap()), 3);
    });
}

#[test]
fn a_part_names_who_is_missing_and_refuses_who_is_no_member() {
    with_a_store(3, |fabric, group, store| {
        let own = group.rank().get();
        for (list, reason) in [
            (&[(own + 1) % 3][..], "not among the members"),
            (&[own, own], "in the list twice"),
            (&[own, 3], "outside"),
            (&[], "at least one"),
        ] {
            let error = part(&group, store, "bad", list).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(reason), "{error}");
        }
        group.barrier().unwrap();
        if own != 2 {
            let all = ranks(&[0, 1, 2]);
            let error = group.part(store.clone(), "late", &all, Duration::from_secs(3)).unwrap_err();
            assert!(error.is_timeout(), "{fabric:?}: {error}");
            assert!(error.to_string().contains("rank 2"), "{fabric:?}: {error}");
        }
        assert_eq!(sum_of_ranks(&group), 3);
    });
    let alone = ProcessGroup::alone().unwrap();
    let error = part(&alone, &(Arc::<MemoryStore>::default() as SharedStore), "none", &[0]).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
}

#[test]
fn a_part_can_be_made_of_a_group_that_has_failed() {
    with_a_store(3, |_, group, store| {
        let group = patient(&group);
        if group.rank().is_main() {
            group.abort(Error::aborted("the loss is not a number"));
        }
        // Here or there it fails.
        assert!(group.barrier().unwrap_err().is_aborted());
        let whole = part(&group, store, "again", &[0, 1, 2]).unwrap();
        assert_eq!(sum_of_ranks(&whole), 3);
    });
}

#[test]
fn a_part_has_memory_for_what_is_large_and_what_is_uneven() {
    const MANY: usize = 1 << 18;
    with_a_store(3, |fabric, group, store| {
        let own = group.rank().get() as usize;
        let whole = part(&group, store, "large", &[0, 1, 2]).unwrap();
        let mut data = vec![own as f32; MANY];
        whole.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|element| *element == 3.0), "{fabric:?}");
        // In the first call of the next one a rank has little, and gets much.
        let counts = [1, MANY, 7];
        let whole = part(&group, store, "uneven", &[0, 1, 2]).unwrap();
        let mut all = vec![0i32; counts.iter().sum()];
        whole.all_gather_v(&vec![own as i32; counts[own]], &mut all, &counts).unwrap();
        let expected = (0..3).flat_map(|rank| std::iter::repeat_n(rank as i32, counts[rank]));
        assert!(all.iter().copied().eq(expected), "{fabric:?}");
    });
}

#[test]
fn who_waits_for_the_others_of_a_part_may_end_the_wait() {
    fn pressed() -> Result<()> {
        Err(Error::aborted("somebody pressed Ctrl-C"))
    }
    with_a_store(3, |fabric, group, store| {
        let make = || part(&group, store, "late", &[0, 1, 2]).unwrap_err();
        let error = match group.rank().get() {
            0 => interruptible(pressed, make),
            1 => make(),
            // It never comes.
            _ => return,
        };
        assert!(error.is_aborted(), "{fabric:?}: {error}");
        assert!(error.to_string().contains("somebody pressed Ctrl-C"), "{fabric:?}: {error}");
        assert_eq!(error.rank(), Some(Rank::MAIN), "{fabric:?}: {error}");
    });
}
