//! Every collective, on every transport, against a reference in a fixed order; the same bits on every rank.

use half::{bf16, f16};
use phalanx::testing::{Fabric, run, run_with};
use phalanx::{Bool, Buffer, Credentials, DType, Element, JobKey, ProcessGroup, Rank, ReduceOp, Tls};

use crate::certificates::Authority;

const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

/// Lengths around every boundary: nothing, less than one element a rank, odd splits, beyond a segment.
fn lengths(world: usize) -> Vec<usize> {
    vec![0, 1, 2, 3, world.saturating_sub(1), world + 1, 1000, 65_537]
}

/// Small whole numbers, so that every order of adding gives the same sum, also in half precision.
trait Sample: Element + PartialEq + std::fmt::Debug {
    fn sample(value: u32) -> Self;
}
macro_rules! samples {
    ($($type:ty => |$value:ident| $convert:expr),*) => {
        $(impl Sample for $type { fn sample($value: u32) -> Self { $convert } })*
    };
}
samples!(
    f32 => |v| v as f32, f64 => |v| f64::from(v), i32 => |v| v as i32, i64 => |v| i64::from(v), u8 => |v| v as u8, i8 => |v| v as i8,
    f16 => |v| f16::from_f32(v as f32), bf16 => |v| bf16::from_f32(v as f32)
);

/// What rank `rank` brings at `index`: 1, 2 or 3.
fn value(rank: usize, index: usize) -> u32 {
    ((rank + index) % 3) as u32 + 1
}

fn input<T: Sample>(rank: usize, length: usize) -> Vec<T> {
    (0..length).map(|index| T::sample(value(rank, index))).collect()
}

fn reference(op: ReduceOp, world: usize, index: usize) -> u32 {
    let values = (0..world).map(|rank| value(rank, index));
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum(_) => values.sum(),
        // Compared only where it divides evenly.
        ReduceOp::Avg => values.sum::<u32>() / world as u32,
        ReduceOp::Product => values.product(),
        ReduceOp::Min => values.min().unwrap_or(0),
        ReduceOp::Max => values.max().unwrap_or(0),
        ReduceOp::BAnd => values.reduce(|a, b| a & b).unwrap_or(0),
        ReduceOp::BOr => values.reduce(|a, b| a | b).unwrap_or(0),
        ReduceOp::BXor => values.reduce(|a, b| a ^ b).unwrap_or(0),
    }
}

fn exact<T: Sample>(op: ReduceOp, world: usize, index: usize) -> bool {
    match op {
        ReduceOp::Avg => reference(ReduceOp::Sum, world, index).is_multiple_of(world as u32),
        // bf16 counts exactly to 256, i8 wraps at 128.
        ReduceOp::Product => reference(op, world, index) < 128,
        _ => true,
    }
}

/// The group's memory with these elements.
fn registered<T: Sample>(group: &ProcessGroup, elements: &[T]) -> Buffer {
    let mut buffer = group.alloc(T::DTYPE, elements.len()).unwrap();
    buffer.as_mut_slice().unwrap().copy_from_slice(elements);
    buffer
}

fn all_reduces<T: Sample>(group: &ProcessGroup) {
    let (rank, world) = (group.rank().index(), group.world_size().count());
    for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
        for length in lengths(world) {
            let mut data = input::<T>(rank, length);
            group.all_reduce(&mut data, op).unwrap();
            for (index, element) in data.iter().enumerate().filter(|(index, _)| exact::<T>(op, world, *index))
            {
                let expected = T::sample(reference(op, world, index));
                assert_eq!(*element, expected, "{op} of {length} x {} in {world} at {index}", T::DTYPE);
            }
            let work = group.all_reduce_async(Buffer::from_slice(&input::<T>(rank, length)), op).unwrap();
            assert_eq!(work.wait().unwrap().as_slice::<T>().unwrap(), data);
            // A blocking call recognises the group's memory, and what is only a part of it.
            let mut buffer = registered(group, &input::<T>(rank, length));
            group.all_reduce(buffer.as_mut_slice::<T>().unwrap(), op).unwrap();
            assert_eq!(buffer.as_slice::<T>().unwrap(), data);
            let mut longer = registered(group, &[input::<T>(rank, length), vec![T::sample(7)]].concat());
            group.all_reduce(&mut longer.as_mut_slice::<T>().unwrap()[..length], op).unwrap();
            assert_eq!(longer.as_slice::<T>().unwrap(), [data, vec![T::sample(7)]].concat());
        }
    }
}

#[test]
fn all_reduce_of_every_type_operation_and_length() {
    for fabric in Fabric::ALL {
        for world in WORLDS {
            run(world, fabric, |group| {
                all_reduces::<f32>(&group);
                all_reduces::<f64>(&group);
                all_reduces::<f16>(&group);
                all_reduces::<bf16>(&group);
                all_reduces::<i32>(&group);
                all_reduces::<i64>(&group);
                all_reduces::<u8>(&group);
                all_reduces::<i8>(&group);
            });
        }
    }
}

/// An `all_reduce` of every length in bytes at which shared memory begins to do it otherwise, in two groups in turn.
fn around_each_limit<T: Sample>(groups: [&ProcessGroup; 2]) {
    let (rank, world) = (groups[0].rank().index(), groups[0].world_size().count());
    // What the header's line holds; small in any memory; small between two; in a slot at all; and what is fetched ahead.
    let limits = [24, 512, 4096, 16 << 10, 32 << 10];
    let elements = limits.map(|bytes| bytes / size_of::<T>());
    for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
        for length in elements.into_iter().flat_map(|count| [count - 1, count, count + 1]) {
            for group in groups {
                let mut data = input::<T>(rank, length);
                group.all_reduce(&mut data, op).unwrap();
                let right = |(index, element): (usize, &T)| {
                    !exact::<T>(op, world, index) || *element == T::sample(reference(op, world, index))
                };
                assert!(data.iter().enumerate().all(right), "{op} of {length} x {} in {world}", T::DTYPE);
                let mut buffer = registered(group, &input::<T>(rank, length));
                group.all_reduce(buffer.as_mut_slice::<T>().unwrap(), op).unwrap();
                assert!(buffer.as_slice::<T>().unwrap() == data);
            }
        }
    }
}

#[test]
fn all_reduce_around_each_limit_of_shared_memory_in_two_groups_in_turn() {
    for world in [2, 3] {
        run(world, Fabric::SharedMemory, |group| {
            let all: Vec<_> = (0..world).map(Rank::new).collect();
            let second = group.new_group(&all).unwrap().unwrap();
            let groups = [&group, &second];
            around_each_limit::<f32>(groups);
            around_each_limit::<f64>(groups);
            around_each_limit::<f16>(groups);
            around_each_limit::<bf16>(groups);
            around_each_limit::<i32>(groups);
            around_each_limit::<i64>(groups);
            around_each_limit::<u8>(groups);
            around_each_limit::<i8>(groups);
        });
    }
}

#[test]
fn all_reduce_of_the_groups_memory_on_one_rank_and_ordinary_memory_on_the_others() {
    for fabric in Fabric::ALL {
        for world in [2, 3] {
            run(world, fabric, |group| {
                let (rank, world) = (group.rank().index(), group.world_size().count());
                // The last passes through more windows than there are.
                for length in lengths(world).into_iter().chain([300_001]) {
                    let expected: Vec<i64> =
                        (0..length).map(|index| i64::from(reference(ReduceOp::Sum, world, index))).collect();
                    for one in 0..world {
                        // The one differs from the others, either way.
                        for is_registered in [rank == one, rank != one] {
                            let own = input::<i64>(rank, length);
                            let mut buffer = if is_registered {
                                registered(&group, &own)
                            } else {
                                Buffer::from_slice(&own)
                            };
                            group.all_reduce(buffer.as_mut_slice::<i64>().unwrap(), ReduceOp::Sum).unwrap();
                            assert!(
                                buffer.as_slice::<i64>().unwrap() == expected,
                                "{length}, rank {rank}, the one is {one}"
                            );
                        }
                    }
                }
            });
        }
    }
}

/// Sums whose bits tell the order of the adding, in ordinary memory and in the group's.
fn bits(group: &ProcessGroup, length: usize) -> [Vec<u32>; 2] {
    let rank = group.rank().get() as f32;
    let mut data: Vec<f32> = (0..length).map(|i| (i as f32 * 0.37 + rank).sin() * 1e3).collect();
    let mut buffer = registered(group, &data);
    group.all_reduce(&mut data, ReduceOp::Avg).unwrap();
    let buffer = {
        group.all_reduce(buffer.as_mut_slice::<f32>().unwrap(), ReduceOp::Avg).unwrap();
        buffer.as_slice::<f32>().unwrap().to_vec()
    };
    [data, buffer].map(|data| data.into_iter().map(f32::to_bits).collect())
}

#[test]
fn sums_of_floats_have_the_same_bits_on_every_rank_in_any_memory() {
    for world in WORLDS {
        for length in [5, 1000, 1 << 20] {
            let run = |fabric| run(world, fabric, |group| bits(&group, length));
            let [in_process, tcp, shared, hosts] = Fabric::ALL.map(run);
            for fabric in [[&in_process[..], &tcp].concat(), hosts, shared] {
                let fabric = fabric.concat();
                assert!(fabric.windows(2).all(|pair| pair[0] == pair[1]), "{length} in a world of {world}");
            }
        }
    }
}

#[test]
fn over_tls_every_type_and_operation_gives_the_bits_that_it_gives_without() {
    let (ca, folder) = (Authority::new(), tempfile::tempdir().unwrap());
    let [ca, certificate, key] = ca.write(&ca.certificate(), folder.path());
    let tls = Tls::read(&ca, &certificate, &key).unwrap();
    let credentials = Credentials { key: Some(JobKey::generate().unwrap()), tls: Some(tls) };
    for world in [2, 3, 4] {
        // The upper half shares memory, and not with the lower one.
        for fabric in [Fabric::Tcp, Fabric::TwoHosts] {
            run_with(world, fabric, &credentials, |group| {
                all_reduces::<f32>(&group);
                all_reduces::<bf16>(&group);
                all_reduces::<i64>(&group);
                all_reduces::<u8>(&group);
            });
            for length in [5, 1000, 1 << 20] {
                let secured = run_with(world, fabric, &credentials, |group| bits(&group, length));
                assert!(secured == run(world, fabric, |group| bits(&group, length)), "{length} in {world}");
            }
            run_with(world, fabric, &credentials, |group| {
                let (rank, world) = (group.rank(), group.world_size());
                let mut gathered = vec![0i64; 70_000 * world.count()];
                group.all_gather(&vec![i64::from(rank.get()); 70_000], &mut gathered).unwrap();
                assert!(gathered.iter().enumerate().all(|(place, from)| place / 70_000 == *from as usize));
                for root in world.ranks() {
                    let mut data = vec![if rank == root { 7u8 } else { 0 }; 300_000];
                    group.broadcast(&mut data, root).unwrap();
                    assert!(data.iter().all(|byte| *byte == 7));
                }
                let blocks = |mark: fn(i64, i64) -> i64| -> Vec<i64> {
                    let others = 0..i64::from(world.get());
                    others.flat_map(|other| vec![mark(i64::from(rank.get()), other); 500]).collect()
                };
                let mut received = vec![0i64; 500 * world.count()];
                group.all_to_all(&blocks(|rank, to| 10 * rank + to), &mut received).unwrap();
                assert!(received == blocks(|rank, from| 10 * from + rank));
                // Messages have connections of their own: one that nobody takes for a while stands in nobody's way.
                let around = |steps| Rank::new((rank.get() + steps) % world.get());
                let own = vec![i64::from(rank.get()); 100_000];
                let sending = group.isend(Buffer::from_slice(&own), around(1)).unwrap();
                group.barrier().unwrap();
                let (mut received, previous) = (vec![0i64; 100_000], around(world.get() - 1));
                group.recv(&mut received, previous).unwrap();
                assert!(received.iter().all(|from| *from == i64::from(previous.get())));
                sending.wait().unwrap();
            });
        }
    }
}

#[test]
fn the_size_does_not_change_the_bits_in_shared_memory() {
    for world in [2, 3, 4, 7] {
        let results = run(world, Fabric::SharedMemory, |group| {
            let large = bits(&group, 1 << 18).concat();
            [1, 6, 7, 100, 1000, 1024, 1025, 3000, 8000, 30_000]
                .into_iter()
                .all(|length| large.starts_with(&bits(&group, length)[0]))
        });
        assert_eq!(results, vec![true; world as usize]);
    }
}

#[test]
fn broadcast_from_every_root() {
    for fabric in Fabric::ALL {
        for world in WORLDS {
            run(world, fabric, |group| {
                for root in group.world_size().ranks() {
                    for length in [0, 1, 1000, 200_000] {
                        let mut data = input::<f32>(group.rank().index(), length);
                        group.broadcast(&mut data, root).unwrap();
                        assert_eq!(data, input::<f32>(root.index(), length));
                        let own = input::<u8>(group.rank().index(), length);
                        for own in [Buffer::from_slice(&own), registered(&group, &own)] {
                            let work = group.broadcast_async(own, root).unwrap();
                            assert_eq!(
                                work.wait().unwrap().as_slice::<u8>().unwrap(),
                                input::<u8>(root.index(), length)
                            );
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn a_blocking_call_meets_asynchronous_ones() {
    for fabric in Fabric::ALL {
        // Four are two hosts of two: what goes by the ranks' places there, and what does not.
        for world in [2, 3, 4, 5] {
            run(world, fabric, |group| {
                let (rank, world) = (group.rank().index(), group.world_size().count());
                for (number, length) in [1, 1_000, 20_000, 70_000].into_iter().enumerate() {
                    let (own, mut gathered) = (input::<i32>(rank, length), vec![0i32; length * world]);
                    let expected: Vec<i32> = (0..world).flat_map(|rank| input::<i32>(rank, length)).collect();
                    let is_blocking = rank == number % world;
                    if is_blocking {
                        group.all_gather(&own, &mut gathered).unwrap();
                    } else {
                        let work = group.all_gather_async(Buffer::from_slice(&own)).unwrap();
                        gathered.copy_from_slice(work.wait().unwrap().as_slice::<i32>().unwrap());
                    }
                    assert_eq!(gathered, expected);

                    let (whole, mut share) = (input::<f64>(rank, length * world), vec![0f64; length]);
                    let expected: Vec<f64> = (rank * length..(rank + 1) * length)
                        .map(|index| f64::from(reference(ReduceOp::Sum, world, index)))
                        .collect();
                    if is_blocking {
                        group.reduce_scatter(&whole, &mut share, ReduceOp::Sum).unwrap();
                    } else {
                        let work = group.reduce_scatter_async(Buffer::from_slice(&whole), ReduceOp::Sum);
                        let sums = work.unwrap().wait().unwrap();
                        share.copy_from_slice(sums.as_slice::<f64>().unwrap());
                    }
                    assert_eq!(share, expected);
                }
            });
        }
    }
}

#[test]
fn all_gather_and_reduce_scatter_keep_the_order_of_the_ranks() {
    for fabric in Fabric::ALL {
        for world in WORLDS {
            run(world, fabric, |group| {
                let (rank, world) = (group.rank().index(), group.world_size().count());
                for length in [0, 1, 3, 70_000] {
                    let mut gathered = vec![0i32; length * world];
                    group.all_gather(&input::<i32>(rank, length), &mut gathered).unwrap();
                    let expected: Vec<i32> = (0..world).flat_map(|rank| input::<i32>(rank, length)).collect();
                    assert_eq!(gathered, expected);
                    let work =
                        group.all_gather_async(Buffer::from_slice(&input::<i32>(rank, length))).unwrap();
                    assert_eq!(work.wait().unwrap().as_slice::<i32>().unwrap(), expected);

                    let (own, mut all) =
                        (registered(&group, &input::<i32>(rank, length)), registered(&group, &gathered));
                    all.as_mut_slice::<i32>().unwrap().fill(0);
                    group
                        .all_gather(own.as_slice::<i32>().unwrap(), all.as_mut_slice::<i32>().unwrap())
                        .unwrap();
                    assert_eq!(all.as_slice::<i32>().unwrap(), expected);

                    let whole = input::<f64>(rank, length * world);
                    let mut share = vec![0f64; length];
                    group.reduce_scatter(&whole, &mut share, ReduceOp::Sum).unwrap();
                    let expected: Vec<f64> = (rank * length..(rank + 1) * length)
                        .map(|index| f64::from(reference(ReduceOp::Sum, world, index)))
                        .collect();
                    assert_eq!(share, expected);
                    let own = registered(&group, &whole);
                    share.fill(0.0);
                    group.reduce_scatter(own.as_slice::<f64>().unwrap(), &mut share, ReduceOp::Sum).unwrap();
                    assert_eq!(share, expected);
                    for buffer in [Buffer::from_slice(&whole), own] {
                        let work = group.reduce_scatter_async(buffer, ReduceOp::Sum).unwrap();
                        assert_eq!(work.wait().unwrap().as_slice::<f64>().unwrap(), expected);
                    }
                }
            });
        }
    }
}

#[test]
fn a_token_goes_round_from_rank_to_rank() {
    for fabric in Fabric::ALL {
        run(4, fabric, |group| {
            let (rank, world) = (group.rank().get(), group.world_size().get());
            let (next, previous) = (Rank::new((rank + 1) % world), Rank::new((rank + world - 1) % world));
            let mut token = [0i64; 3];
            for round in 0..10 {
                if rank == 0 {
                    group.send(&[round, 0, 0], next).unwrap();
                    group.recv(&mut token, previous).unwrap();
                    assert_eq!(token, [round, i64::from(world) - 1, 0]);
                } else {
                    group.recv(&mut token, previous).unwrap();
                    token[1] += 1;
                    group.send(&token, next).unwrap();
                }
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn operations_in_flight_keep_their_order_among_blocking_ones() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let rank = group.rank().get() as f32;
            let works: Vec<_> = (0..50)
                .map(|index| {
                    let buffer = Buffer::from_slice(&vec![rank + index as f32; 100 * index + 1]);
                    group.all_reduce_async(buffer, ReduceOp::Sum).unwrap()
                })
                .collect();
            let mut last = [1.0f32];
            group.all_reduce(&mut last, ReduceOp::Sum).unwrap();
            assert_eq!(last, [3.0]);
            for (index, work) in works.into_iter().enumerate() {
                assert!(work.is_completed());
                let buffer = work.wait().unwrap();
                assert!(buffer.as_slice::<f32>().unwrap().iter().all(|sum| *sum == 3.0 + 3.0 * index as f32));
            }
        });
    }
}

#[test]
fn a_dropped_work_still_runs() {
    run(2, Fabric::Tcp, |group| {
        let ones = Buffer::from_slice(&vec![1.0f32; 1 << 18]);
        let work = group.all_reduce_async(ones, ReduceOp::Sum).unwrap();
        // The other rank's result needs what this one brings.
        if group.rank().is_main() {
            drop(work);
        } else {
            assert!(work.wait().unwrap().as_slice::<f32>().unwrap().iter().all(|sum| *sum == 2.0));
        }
        group.barrier().unwrap();
    });
}

#[test]
fn bad_arguments_are_refused_and_harm_nobody() {
    run(2, Fabric::Tcp, |group| {
        let (own, stranger) = (group.rank(), Rank::new(2));
        let mut data = [0f32; 4];
        assert!(group.broadcast(&mut data, stranger).unwrap_err().is_invalid_argument());
        assert!(group.send(&data, stranger).unwrap_err().is_invalid_argument());
        assert!(group.recv(&mut data, own).unwrap_err().is_invalid_argument());
        assert!(group.all_gather(&[0f32; 3], &mut data).unwrap_err().to_string().contains("4 elements"));
        assert!(
            group.reduce_scatter(&data, &mut [0f32; 3], ReduceOp::Sum).unwrap_err().is_invalid_argument()
        );
        let odd = Buffer::zeroed(DType::U8, 3);
        assert!(group.reduce_scatter_async(odd, ReduceOp::Sum).unwrap_err().is_invalid_argument());
        group.all_reduce(&mut data, ReduceOp::Max).unwrap();
    });
}

#[test]
fn what_is_not_defined_is_refused_before_anything_is_sent() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            // One rank alone: nobody waits for it.
            if group.rank().is_main() {
                let mut floats = [1f32; 4];
                for op in [ReduceOp::BAnd, ReduceOp::BOr, ReduceOp::BXor] {
                    let error = group.all_reduce(&mut floats, op).unwrap_err();
                    assert!(error.is_invalid_argument() && error.to_string().contains("not defined for f32"));
                }
                let half = ReduceOp::PreMulSum(0.5);
                assert!(group.all_reduce(&mut [1i32], half).unwrap_err().is_invalid_argument());
                assert!(group.reduce_scatter(&[1u8; 2], &mut [0], half).unwrap_err().is_invalid_argument());
                let mut truths = [Bool::TRUE];
                assert!(group.all_reduce(&mut truths, ReduceOp::Avg).unwrap_err().is_invalid_argument());
                // Gloo refuses it too: what is left over would be lost without a word.
                let error = group.all_reduce(&mut [1i32, 2], ReduceOp::Avg).unwrap_err();
                let text = error.to_string();
                assert!(error.is_invalid_argument(), "{text}");
                assert!(text.contains("all_reduce(avg, 2 x i32): avg is not defined for i32"), "{text}");
                assert!(text.contains("reduce with sum and divide"), "{text}");
                let bytes = Buffer::from_slice(&[1u8; 2]);
                let error = group.reduce_async(bytes, Rank::MAIN, ReduceOp::Avg).unwrap_err().to_string();
                assert!(error.contains("reduce(avg, 2 x u8, root 0): avg is not defined for u8"), "{error}");
                let truths = Buffer::from_slice(&truths);
                assert!(group.all_reduce_async(truths, ReduceOp::Avg).unwrap_err().is_invalid_argument());
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn each_rank_brings_its_own_factor() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let rank = group.rank().get();
            let op = ReduceOp::PreMulSum(f64::from(rank + 1));
            let mut data = [bf16::from_f32(2.0); 5];
            group.all_reduce(&mut data, op).unwrap();
            assert_eq!(data, [bf16::from_f32(12.0); 5]);
            let mut share = [0.0];
            group.reduce_scatter(&[1.0, 10.0, 100.0], &mut share, op).unwrap();
            assert_eq!(share, [6.0 * 10f64.powi(rank as i32)]);
            let work = group.all_reduce_async(Buffer::from_slice(&[1f32]), op).unwrap();
            assert_eq!(work.wait().unwrap().as_slice::<f32>().unwrap(), [6.0]);
        });
    }
}

#[test]
fn truth_values_are_combined_as_such() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let rank = group.rank().get();
            let own = [false, rank == 1, rank != 1, true].map(Bool::from);
            let combined = |op| {
                let mut data = own;
                group.all_reduce(&mut data, op).unwrap();
                data.map(Bool::get)
            };
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::BOr] {
                assert_eq!(combined(op), [false, true, true, true], "{op}");
            }
            for op in [ReduceOp::Product, ReduceOp::Min, ReduceOp::BAnd] {
                assert_eq!(combined(op), [false, false, false, true], "{op}");
            }
            assert_eq!(combined(ReduceOp::BXor), [false, true, false, true]);
        });
    }
}

/// Within a host they connect at first use, between hosts at the start.
#[test]
fn more_ranks_than_connect_to_all_at_the_start() {
    const WORLD: i32 = 18;
    for fabric in Fabric::ALL {
        let sums = run(WORLD as u32, fabric, |group| {
            let rank = group.rank().get() as i32;
            let input: Vec<i32> = (0..WORLD).map(|to| rank * 100 + to).collect();
            let mut output = vec![0; input.len()];
            group.all_to_all(&input, &mut output).unwrap();
            assert_eq!(output, (0..WORLD).map(|from| from * 100 + rank).collect::<Vec<_>>(), "{fabric:?}");
            // Far apart, in both directions.
            let peer = Rank::new((WORLD - 1 - rank) as u32);
            let mut heard = [0i32];
            let sent = group.isend(Buffer::from_slice(&[rank]), peer).unwrap();
            group.recv(&mut heard, peer).unwrap();
            sent.wait().unwrap();
            assert_eq!(heard, [WORLD - 1 - rank], "{fabric:?}");
            let mut sum = [rank];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            sum[0]
        });
        assert_eq!(sums, vec![WORLD * (WORLD - 1) / 2; WORLD as usize], "{fabric:?}");
    }
}
