//! Reductions to one rank, gathers, scatters and exchanges, on every transport and from every root.

use std::sync::Barrier;
use std::time::Duration;

use phalanx::testing::{Fabric, run};
use phalanx::{Buffer, DType, ProcessGroup, Rank, ReduceOp, Work};
use proptest::prelude::*;

const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

/// Around every boundary: nothing, beyond what goes along a tree, beyond what goes along a ring.
const LENGTHS: [usize; 5] = [0, 1, 3, 1000, 70_001];

fn everywhere(test: impl Fn(ProcessGroup) + Sync) {
    for fabric in Fabric::ALL {
        for world in WORLDS {
            run(world, fabric, &test);
        }
    }
}

/// What rank `rank` brings: every element its own.
fn input(rank: usize, length: usize) -> Vec<i32> {
    (0..length).map(|index| (rank * 1_000_003 + index * 7) as i32).collect()
}

/// The same elements in a program's own memory, in the group's, and in the group's on every other rank.
fn memories(group: &ProcessGroup, elements: &[i32]) -> [Buffer; 3] {
    [[false, false], [true, true], [true, false]].map(|registered| match registered[place(group).0 % 2] {
        true => {
            let mut buffer = group.alloc(DType::I32, elements.len()).unwrap();
            buffer.as_mut_slice().unwrap().copy_from_slice(elements);
            buffer
        }
        false => Buffer::from_slice(elements),
    })
}

fn values(buffer: &Buffer) -> &[i32] {
    buffer.as_slice().unwrap()
}

fn place(group: &ProcessGroup) -> (usize, usize) {
    (group.rank().index(), group.world_size().count())
}

#[test]
fn reduce_gives_the_root_the_combination() {
    everywhere(|group| {
        let (rank, world) = place(&group);
        for root in group.world_size().ranks() {
            for length in LENGTHS {
                let sum = |index: usize| {
                    (0..world).fold(0i32, |sum, rank| sum.wrapping_add((rank * 1_000_003 + index * 7) as i32))
                };
                let check = |data: Buffer| {
                    let mut sums = values(&data).iter().enumerate();
                    assert!(group.rank() != root || sums.all(|(index, value)| *value == sum(index)));
                };
                for mut data in memories(&group, &input(rank, length)) {
                    group.reduce(data.as_mut_slice::<i32>().unwrap(), root, ReduceOp::Sum).unwrap();
                    check(data);
                }
                let own = Buffer::from_slice(&input(rank, length));
                check(group.reduce_async(own, root, ReduceOp::Sum).unwrap().wait().unwrap());
            }
        }
    });
}

#[test]
fn averages_arrive_divided_at_the_root() {
    everywhere(|group| {
        for length in [1, 600_000] {
            let mut data = vec![f32::from(group.rank().get() as u8 + 1); length];
            group.reduce(&mut data, Rank::MAIN, ReduceOp::Avg).unwrap();
            let mean = (group.world_size().get() + 1) as f32 / 2.0;
            assert!(!group.rank().is_main() || data.iter().all(|value| *value == mean));
        }
    });
}

#[test]
fn gather_and_scatter_are_each_others_reverse() {
    everywhere(|group| {
        let (rank, world) = place(&group);
        for root in group.world_size().ranks() {
            for length in LENGTHS {
                let own = input(rank, length);
                let is_root = group.rank() == root;
                let mut whole = vec![0; if is_root { length * world } else { 0 }];
                let expected: Vec<i32> = (0..world).flat_map(|rank| input(rank, length)).collect();
                for own in memories(&group, &own) {
                    whole.fill(0);
                    group.gather(values(&own), &mut whole, root).unwrap();
                    assert!(!is_root || whole == expected);
                }
                let work = group.gather_async(Buffer::from_slice(&own), root).unwrap();
                assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), whole);

                let mut back = vec![0; length];
                for whole in memories(&group, &whole) {
                    back.fill(0);
                    group.scatter(values(&whole), &mut back, root).unwrap();
                    assert_eq!(back, own);
                }
                let (whole, room) = (Buffer::from_slice(&whole), Buffer::zeroed(DType::I32, length));
                let work = group.scatter_async(whole, room, root).unwrap();
                assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), own);
            }
        }
    });
}

#[test]
fn all_to_all_transposes() {
    everywhere(|group| {
        let (rank, world) = place(&group);
        for length in LENGTHS {
            // Block t of rank f is the input of a rank f·world + t.
            let own: Vec<i32> = (0..world).flat_map(|to| input(rank * world + to, length)).collect();
            let expected: Vec<i32> = (0..world).flat_map(|from| input(from * world + rank, length)).collect();
            let mut received = vec![0; length * world];
            for own in memories(&group, &own) {
                received.fill(0);
                group.all_to_all(values(&own), &mut received).unwrap();
                assert_eq!(received, expected);
            }
            let work = group.all_to_all_async(Buffer::from_slice(&own)).unwrap();
            assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), expected);
        }
    });
}

/// Small blocks are sent before anything is received, to ranks whose connections are full of what came before.
#[test]
fn small_blocks_reach_ranks_that_are_some_calls_behind() {
    for fabric in [Fabric::InProcess, Fabric::Tcp, Fabric::TwoHosts] {
        run(5, fabric, |group| {
            let (rank, world) = place(&group);
            for round in 0..20 {
                if rank == (round + 1) % world {
                    std::thread::sleep(Duration::from_millis(2));
                }
                // The root waits for nobody.
                let mut data = input(round, if rank == round % world { 200_000 } else { 0 });
                data.resize(200_000, 0);
                group.broadcast(&mut data, Rank::new((round % world) as u32)).unwrap();
                assert!(data == input(round, 200_000));
                // 4 KiB are 1024 elements.
                for length in [1, 1_024, 1_025] {
                    let own: Vec<i32> =
                        (0..world).flat_map(|to| input(rank * world + to + round, length)).collect();
                    let expected: Vec<i32> =
                        (0..world).flat_map(|from| input(from * world + rank + round, length)).collect();
                    let mut received = vec![0; length * world];
                    group.all_to_all(&own, &mut received).unwrap();
                    assert!(received == expected, "{length} in round {round} over {fabric:?}");
                }
            }
        });
    }
}

/// Exchanges blocks of `table[from][to]` elements, and gathers what stands in the table's first column.
fn exchange(group: &ProcessGroup, table: &[Vec<usize>]) {
    let (rank, world) = place(group);
    let sent = &table[rank];
    let received: Vec<usize> = table.iter().map(|row| row[rank]).collect();
    let own: Vec<i32> = (0..world).flat_map(|to| input(rank * world + to, sent[to])).collect();
    let expected: Vec<i32> = (0..world).flat_map(|from| input(from * world + rank, received[from])).collect();
    let mut output = vec![0; expected.len()];
    for own in memories(group, &own) {
        output.fill(0);
        group.all_to_all_v(values(&own), sent, &mut output, &received).unwrap();
        assert_eq!(output, expected);
    }
    let work = group.all_to_all_v_async(Buffer::from_slice(&own), sent, &received).unwrap();
    assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), expected);

    let counts: Vec<usize> = table.iter().map(|row| row[0]).collect();
    let expected: Vec<i32> = (0..world).flat_map(|rank| input(rank, counts[rank])).collect();
    let mut output = vec![0; expected.len()];
    for own in memories(group, &input(rank, counts[rank])) {
        output.fill(0);
        group.all_gather_v(values(&own), &mut output, &counts).unwrap();
        assert_eq!(output, expected);
    }
    let work = group.all_gather_v_async(Buffer::from_slice(&input(rank, counts[rank])), &counts).unwrap();
    assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), expected);
}

/// So long that ranks of a host copy them out of each other's processes, where that is sooner.
#[test]
fn long_shares_arrive_beside_short_ones_and_none() {
    const LONG: usize = 300_000;
    let table = [vec![LONG, 0, 5], vec![20_000, LONG + 1, 0], vec![0, 1, 70_001]];
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            for _ in 0..3 {
                exchange(&group, &table);
            }
        });
    }
}

/// A `reduce_scatter_v` of `counts` elements, and an `all_gather_v` in place after it.
fn parts(group: &ProcessGroup, counts: &[usize]) {
    let (rank, world) = place(group);
    let total: usize = counts.iter().sum();
    let sums: Vec<i32> = (0..total)
        .map(|index| {
            (0..world).fold(0i32, |sum, rank| sum.wrapping_add((rank * 1_000_003 + index * 7) as i32))
        })
        .collect();
    let start: usize = counts[..rank].iter().sum();
    let own = start..start + counts[rank];
    for buffer in memories(group, &input(rank, total)) {
        let scattered = group.reduce_scatter_v_async(buffer, counts, ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(values(&scattered)[own.clone()], sums[own.clone()], "{counts:?}");
        let gathered = group.all_gather_v_in_place_async(scattered, counts).unwrap().wait().unwrap();
        assert_eq!(values(&gathered), sums, "{counts:?}");
    }
    let mut halves = Buffer::zeroed(DType::F32, total);
    halves.as_mut_slice::<f32>().unwrap().fill(rank as f32);
    let averages = group.reduce_scatter_v_async(halves, counts, ReduceOp::Avg).unwrap().wait().unwrap();
    let average = (world - 1) as f32 / 2.0;
    assert!(averages.as_slice::<f32>().unwrap()[own].iter().all(|value| (value - average).abs() < 1e-6));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn parts_may_be_of_any_length(
        counts in (1usize..6).prop_flat_map(|world| {
            let count = prop_oneof![Just(0usize), 1usize..5, 1000usize..30_000];
            prop::collection::vec(count, world)
        }),
        fabric in prop::sample::select(&Fabric::ALL[..]),
    ) {
        run(counts.len() as u32, fabric, |group| parts(&group, &counts));
    }

    #[test]
    fn shares_may_be_of_any_length(
        table in (1usize..6).prop_flat_map(|world| {
            let count = prop_oneof![Just(0usize), 1usize..5, 1000usize..30_000];
            prop::collection::vec(prop::collection::vec(count, world), world)
        }),
        fabric in prop::sample::select(&Fabric::ALL[..]),
    ) {
        run(table.len() as u32, fabric, |group| exchange(&group, &table));
    }
}

#[test]
fn parts_that_differ_are_an_error_and_no_wrong_result() {
    for fabric in [Fabric::SharedMemory, Fabric::Tcp, Fabric::InProcess] {
        let errors = run(3, fabric, |group| {
            let most = if group.rank().get() == 2 { 50_001 } else { 50_000 };
            let counts = [100_000 - most, most, 0];
            let buffer = Buffer::zeroed(DType::F32, 100_000);
            group.reduce_scatter_v_async(buffer, &counts, ReduceOp::Sum).and_then(Work::wait).unwrap_err()
        });
        assert!(errors.iter().any(phalanx::Error::is_mismatch), "{fabric:?}: {errors:?}");
    }
}

/// A call whose parts have these lengths.
type Parted = fn(&ProcessGroup, &[usize]) -> phalanx::Result<()>;

#[test]
fn parts_of_other_lengths_and_the_same_sum_are_an_error_on_every_rank() {
    let slices = "combine slices of different lengths (give every rank slices of the same lengths";
    let counts = "have different counts (give every rank the same count";
    let calls: [(&str, Parted, &str); 5] = [
        (
            "all_reduce_coalesced",
            |group, lengths| {
                let mut data: Vec<Vec<f32>> = lengths.iter().map(|length| vec![1.0; *length]).collect();
                let mut lent: Vec<&mut [f32]> = data.iter_mut().map(Vec::as_mut_slice).collect();
                group.all_reduce_coalesced(&mut lent, ReduceOp::Sum)
            },
            slices,
        ),
        (
            "all_reduce_coalesced_async",
            |group, lengths| {
                let buffers: Vec<_> =
                    lengths.iter().map(|length| Buffer::zeroed(DType::F32, *length)).collect();
                group.all_reduce_coalesced_async(&buffers, ReduceOp::Sum).and_then(Work::wait).map(drop)
            },
            slices,
        ),
        (
            "reduce_scatter_v_async",
            |group, lengths| {
                let buffer = group.alloc(DType::F32, lengths.iter().sum())?;
                group.reduce_scatter_v_async(buffer, lengths, ReduceOp::Sum).and_then(Work::wait).map(drop)
            },
            counts,
        ),
        (
            "all_gather_v",
            |group, lengths| {
                let own = vec![1.0f32; lengths[group.rank().index()]];
                group.all_gather_v(&own, &mut vec![0.0; lengths.iter().sum()], lengths)
            },
            // Which differ, where ranks share memory: there every rank knows all counts.
            "all_gather_v",
        ),
        (
            "all_gather_v_in_place_async",
            |group, lengths| {
                let buffer = Buffer::zeroed(DType::F32, lengths.iter().sum());
                group.all_gather_v_in_place_async(buffer, lengths).and_then(Work::wait).map(drop)
            },
            counts,
        ),
    ];
    // Small, staged, and in a ring between ranks or in stripes between hosts: between hosts, the ranks of each host agree.
    let swapped = |unit: usize| ([2 * unit, 3 * unit, unit, 0], [3 * unit, 2 * unit, unit, 0]);
    let between_hosts = [1, 9_000, 200_000].map(|unit| (swapped(unit), false));
    // Within a host, on one rank so long that another would copy them out of its process, and on the other not.
    let within_hosts = (([4_000, 0, 0, 0], [1_000; 4]), true);
    let cases = between_hosts.into_iter().chain([within_hosts]);
    for (fabric, ((one, other), is_within)) in
        Fabric::ALL.into_iter().flat_map(|fabric| cases.clone().map(move |case| (fabric, case)))
    {
        for (name, call, cause) in calls {
            let errors = run(4, fabric, |group| {
                let group = group.with_timeout(Duration::from_secs(60));
                let rank = group.rank().get();
                let is_one = if is_within { rank.is_multiple_of(2) } else { rank < 2 };
                let lengths = if is_one { one } else { other };
                call(&group, &lengths).and_then(|()| group.barrier()).unwrap_err()
            });
            for error in errors {
                let text = error.to_string();
                assert!(
                    error.is_mismatch() && text.contains(cause),
                    "{name} of {one:?} and {other:?} over {fabric:?}: {text}"
                );
            }
        }
    }
}

#[test]
fn a_slice_more_is_a_difference_too() {
    for fabric in Fabric::ALL {
        let errors = run(2, fabric, |group| {
            let mut data = [0i32; 5];
            // On rank 1 the second is empty: the elements are the same.
            let (head, tail) = data.split_at_mut(5);
            let outcome = match group.rank().is_main() {
                true => group.all_reduce_coalesced(&mut [head], ReduceOp::Sum),
                false => group.all_reduce_coalesced(&mut [head, tail], ReduceOp::Sum),
            };
            outcome.and_then(|()| group.barrier()).unwrap_err()
        });
        let cause = "combine slices of different lengths";
        let is_named = |error: &phalanx::Error| error.is_mismatch() && error.to_string().contains(cause);
        assert!(errors.iter().all(is_named), "{fabric:?}: {errors:?}");
    }
}

#[test]
fn several_slices_are_reduced_as_one() {
    everywhere(|group| {
        let (rank, world) = place(&group);
        let own = |index: usize| vec![(rank + index) as f64; [3, 0, 1000, 1, 40_000][index]];
        let mut data: Vec<Vec<f64>> = (0..5).map(own).collect();
        let mut lent: Vec<&mut [f64]> = data.iter_mut().map(Vec::as_mut_slice).collect();
        group.all_reduce_coalesced(&mut lent, ReduceOp::Sum).unwrap();
        for (index, slice) in data.iter().enumerate() {
            let sum = (world * index + world * (world - 1) / 2) as f64;
            assert!(slice.iter().all(|value| *value == sum));
        }
        let buffers: Vec<_> = (0..5).map(|index| Buffer::from_slice(&own(index))).collect();
        let work = group.all_reduce_coalesced_async(&buffers, ReduceOp::Sum).unwrap();
        assert_eq!(work.wait().unwrap().as_slice::<f64>().unwrap(), data.concat());
        group.all_reduce_coalesced::<f32>(&mut [], ReduceOp::Sum).unwrap();
    });
}

#[test]
fn what_does_not_fit_is_refused_and_harms_nobody() {
    run(2, Fabric::Tcp, |group| {
        let (mut data, stranger) = ([0i32; 4], Rank::new(2));
        let refused = |outcome: phalanx::Result<()>| assert!(outcome.unwrap_err().is_invalid_argument());
        refused(group.reduce(&mut data, stranger, ReduceOp::Sum));
        refused(group.reduce(&mut data, Rank::MAIN, ReduceOp::PreMulSum(2.0)));
        refused(group.gather(&[0; 3], &mut data, group.rank()));
        refused(group.scatter(&[0; 3], &mut data, group.rank()));
        refused(group.all_to_all(&[0; 3], &mut data));
        refused(group.all_to_all(&[0; 6], &mut data));
        refused(group.all_gather_v(&[0; 3], &mut data, &[2, 2]));
        refused(group.all_gather_v(&[0; 2], &mut data, &[2, 2, 2]));
        refused(group.all_gather_v(&[0; 2], &mut data, &[2, usize::MAX]));
        refused(group.all_gather_v(&[0; 2], &mut data, &[2, 3]));
        refused(group.all_to_all_v(&[0; 3], &[1, 1], &mut data, &[2, 2]));
        refused(group.all_to_all_v(&[0; 3], &[1, 2], &mut data, &[3, 1]));
        refused(group.all_to_all_v(&[0; 3], &[1, 2], &mut data, &[1, 2]));
        let two = || Buffer::zeroed(DType::F32, 2);
        refused(group.all_gather_v_in_place_async(two(), &[1, 2]).map(drop));
        refused(group.reduce_scatter_v_async(two(), &[1, 2], ReduceOp::Sum).map(drop));
        let mixed = [Buffer::zeroed(DType::F32, 1), Buffer::zeroed(DType::U8, 1)];
        assert!(group.all_reduce_coalesced_async(&mixed, ReduceOp::Sum).unwrap_err().is_invalid_argument());
        group.barrier().unwrap();
    });
}

#[test]
fn counts_that_differ_show_both_sides() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let (rank, mut output) = (group.rank().index(), [0u8; 8]);
            // Rank 0 sends three where rank 1 expects four.
            let (sent, received) = ([[1, 3], [2, 2]][rank], [[1, 2], [4, 2]][rank]);
            let total: usize = sent.iter().sum();
            let room = received.iter().sum();
            let outcome = group.all_to_all_v(&[0u8; 8][..total], &sent, &mut output[..room], &received);
            // Rank 0 gets what it expects, and hears of it afterwards.
            assert!(outcome.and_then(|()| group.barrier()).unwrap_err().is_mismatch());
        });
    }
}

#[test]
fn where_ranks_share_memory_all_see_whose_counts_differ_at_once() {
    for long in [1, 100_000] {
        run(3, Fabric::SharedMemory, |group| {
            let (rank, mut sent, received) = (group.rank().index(), [long; 3], [long; 3]);
            if rank == 0 {
                sent[2] += 1;
            }
            let total = |counts: &[usize]| counts.iter().sum::<usize>();
            let (own, mut output) = (vec![0u8; total(&sent)], vec![0u8; total(&received)]);
            let error = group.all_to_all_v(&own, &sent, &mut output, &received).unwrap_err();
            let expected = format!("rank 0 sends {} elements where rank 2 expects {long}", long + 1);
            assert!(error.is_mismatch() && error.to_string().contains(&expected), "{error}");
        });
        run(3, Fabric::SharedMemory, |group| {
            let rank = group.rank().index();
            // The same sum, but other counts.
            let counts = if rank == 1 { [long, long + 2, long] } else { [long, long + 1, long + 1] };
            let (own, mut output) = (vec![0u8; counts[rank]], vec![0u8; 3 * long + 2]);
            let error = group.all_gather_v(&own, &mut output, &counts).unwrap_err();
            let expected = format!("rank 1 sends {} elements where rank 0 expects {}", long + 2, long + 1);
            assert!(error.is_mismatch() && error.to_string().contains(&expected), "{error}");
        });
    }
}

#[test]
fn a_monitored_barrier_names_everybody_who_is_missing() {
    let missing = |fabric| {
        let all_done = Barrier::new(5);
        run(5, fabric, |group| {
            group.monitored_barrier(Duration::from_secs(20)).unwrap();
            group.barrier().unwrap();
            all_done.wait();
            let present = ![2, 4].contains(&group.rank().get());
            if present {
                // Enough for the others to come on a busy machine.
                let error = group.monitored_barrier(Duration::from_secs(5)).unwrap_err();
                assert!(error.is_timeout(), "{error}");
                assert!(
                    error.to_string().contains("ranks 2, 4 of 5 have not reached the barrier"),
                    "{error}"
                );
            }
            while group.failure().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    };
    std::thread::scope(|scope| {
        for fabric in Fabric::ALL {
            scope.spawn(move || missing(fabric));
        }
    });
}
