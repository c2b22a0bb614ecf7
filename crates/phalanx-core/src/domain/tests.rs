use std::thread;
use std::time::Duration;

use half::f16;

use super::*;
use crate::ProcessGroup;
use crate::buffer::Buffer;
use crate::collective::Counts;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::group::{Connected, TransportOptions, connect};
use crate::store::{MemoryStore, Store};
use crate::testing::{Fabric, groups_of, run};
use crate::transport::bootstrap::Starting;
use crate::transport::{MeshConfig, TransportKind};
use crate::world_size::WorldSize;

const LIMIT: Duration = Duration::from_secs(20);

/// The result on ranks that are configured to be on these hosts.
fn connected(hosts: &[&str], kind: Option<TransportKind>) -> Vec<Result<Connected>> {
    let (store, world) = (MemoryStore::new(), WorldSize::new(hosts.len() as u32).unwrap());
    thread::scope(|scope| {
        let ranks: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (store, host) = (&store, Some(hosts[rank.index()]));
                scope.spawn(move || {
                    connect(
                        &MeshConfig::on_loopback(store, rank, world),
                        TransportOptions { kind, host, ..TransportOptions::default() },
                        Deadline::after(LIMIT),
                    )
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn more_ranks_than_a_domain_takes_share_memory_within_their_hosts() {
    const WORLD: usize = 264;
    let ranks: Vec<Rank> = (0..WORLD as u32).map(Rank::new).collect();
    let lend = |rank: &Rank| Some(Lending::new(Some(&format!("host {}", rank.get() / 8)), WORLD));
    let mut lending: Vec<Option<Lending>> = ranks.iter().map(lend).collect();
    let mut lent: Vec<Lent> = lending.iter().flatten().map(Lending::address).collect();
    // A rank has no memory. Another one has gone before its memory was mapped, and tells nothing.
    lent[8] = Err("none, as the test says".to_owned());
    lending[16] = None;
    let tell = |(rank, own): (&Rank, &Option<Lending>)| match own {
        Some(own) => own.map(*rank, lent.clone()).reach(),
        None => Reach::default(),
    };
    let reach: Vec<Reach> = ranks.iter().zip(&lending).map(tell).collect();

    let mut partitions = Vec::new();
    for (rank, expected) in [(0, 0..8), (9, 9..16), (23, 17..24), (263, 256..264)] {
        let rank = Rank::new(rank);
        let own = lending[rank.index()].take().unwrap();
        let mapped = own.map(rank, lent.clone());
        let joined = own.settle(rank, &mapped, &reach);
        assert!(
            joined.reason.as_ref().unwrap().starts_with("rank 0: rank 8 has none"),
            "{:?}",
            joined.reason
        );
        let health = Health::among(rank, vec!["here".to_owned(); WORLD], None);
        let (partition, domain, _) = joined.into_domain(rank, &health);
        let domain = domain.unwrap();
        assert!(!domain.is_world() && domain.peers.members == partition.domain_of(rank));
        assert!(domain.peers.members.iter().map(|member| member.get()).eq(expected));
        partitions.push(partition);
    }
    assert!(partitions.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(partitions[0].domains().len(), 33 + 2);
    for alone in [8, 16].map(Rank::new) {
        assert_eq!(partitions[0].domain_of(alone), [alone]);
    }
}

#[test]
fn a_host_with_more_ranks_than_a_domain_takes_has_several_and_says_so() {
    const WORLD: usize = 258;
    let own = Lending::new(Some("a"), WORLD);
    let mapped = own.map(Rank::MAIN, vec![own.address(); WORLD]);
    let joined = own.settle(Rank::MAIN, &mapped, &vec![Reach::new([None; WORLD / 2]); WORLD]);
    assert!(joined.partition.domains().iter().map(Vec::len).eq([WORLD / 2; 2]));
    let reason = joined.reason.unwrap();
    assert!(reason.contains("at most 256 ranks of a host share memory, and rank 129"), "{reason}");
}

#[test]
fn ranks_that_are_alone_on_their_hosts_tell_only_where_their_memory_is() {
    let (store, world) = (MemoryStore::new(), WorldSize::new(2).unwrap());
    thread::scope(|scope| {
        for rank in world.ranks() {
            let store = &store;
            scope.spawn(move || {
                let (config, host) = (MeshConfig::on_loopback(store, rank, world), rank.to_string());
                let starting = Starting::default();
                let joined = join(&config, Some(&host), &starting, Deadline::after(LIMIT)).unwrap();
                assert!(joined.partition.is_alone());
                assert_eq!(joined.reason.unwrap(), "rank 0: rank 1 is on another host");
            });
        }
    });
    assert_eq!(store.num_keys(Deadline::after(LIMIT)).unwrap(), world.count());
}

#[test]
fn all_ranks_see_the_same_domains() {
    let ranks: Vec<_> = connected(&["a", "b", "a", "b", "c"], None).into_iter().map(Result::unwrap).collect();
    let of = |ranks: &[u32]| ranks.iter().map(|rank| Rank::new(*rank)).collect::<Vec<_>>();
    for rank in &ranks {
        assert_eq!(rank.partition.domains(), [of(&[0, 2]), of(&[1, 3]), of(&[4])]);
        assert_eq!(rank.kind, Some(TransportKind::Tcp));
    }
    let members =
        ranks.iter().map(|rank| rank.domain.as_ref().map_or(0, |domain| domain.peers.members.len()));
    assert_eq!(members.collect::<Vec<_>>(), [2, 2, 2, 2, 0]);
    assert!(ranks.iter().flat_map(|rank| &rank.domain).all(|domain| !domain.is_world()));
}

#[test]
fn where_shared_memory_is_asked_for_hosts_must_be_one() {
    for outcome in connected(&["a", "a", "b"], Some(TransportKind::SharedMemory)) {
        let error = outcome.err().unwrap();
        assert!(error.is_environment() && error.to_string().contains("rank 2 is on another host"), "{error}");
    }
}

#[test]
fn the_groups_memory_is_registered_where_ranks_share_memory() {
    let registered = |group: ProcessGroup| {
        let buffer = group.alloc(crate::DType::F32, 5).unwrap();
        assert_eq!(buffer.as_slice::<f32>().unwrap(), [0.0; 5]);
        assert!(!buffer.clone().is_registered() && buffer.clone().len() == 5);
        buffer.is_registered()
    };
    for (fabric, expected) in [(Fabric::SharedMemory, true), (Fabric::TwoHosts, true), (Fabric::Tcp, false)] {
        assert_eq!(run(4, fabric, registered), [expected; 4]);
    }
}

#[test]
fn more_memory_than_there_is_gives_an_error() {
    for (fabric, which) in [(Fabric::SharedMemory, "no shared memory"), (Fabric::Tcp, "no memory")] {
        for world in [2, 3] {
            let errors = run(world, fabric, |group| {
                let error = group.alloc(crate::DType::F64, 1 << 50).unwrap_err();
                // The group goes on, also with memory that there is.
                let mut buffer = group.alloc(crate::DType::F64, 3).unwrap();
                group.all_reduce(buffer.as_mut_slice::<f64>().unwrap(), ReduceOp::Sum).unwrap();
                error
            });
            for error in errors {
                let text = error.to_string();
                assert!(error.is_out_of_memory() && text.contains(which) && text.contains("f64"), "{text}");
            }
        }
    }
}

#[test]
fn what_failed_in_registered_memory_leaves_it_usable_and_ordinary() {
    run(2, Fabric::SharedMemory, |group| {
        let mut buffer = group.alloc(crate::DType::F32, 1 << 16).unwrap();
        if group.rank().is_main() {
            let hasty = group.with_timeout(Duration::from_millis(50));
            let error = hasty.all_reduce(buffer.as_mut_slice::<f32>().unwrap(), ReduceOp::Sum).unwrap_err();
            assert!(error.is_timeout() && error.peer() == Some(Rank::new(1)), "{error}");
            // No peer can access it any more; the program still has it.
            buffer.as_mut_slice::<f32>().unwrap().fill(2.0);
            assert!(buffer.as_slice::<f32>().unwrap().iter().all(|value| *value == 2.0));
        } else {
            while group.failure().is_none() {
                thread::yield_now();
            }
            assert!(group.all_reduce(buffer.as_mut_slice::<f32>().unwrap(), ReduceOp::Sum).is_err());
        }
    });
}

#[test]
fn a_domain_reduces_into_shares_and_collects_them() {
    const LENGTH: usize = 100_001;
    let ranks = connected(&["a", "a", "a", "b", "b"], None);
    let call = Call {
        operation: Operation::AllReduce,
        dtype: crate::DType::I32,
        elements: LENGTH as u64,
        reduce: Some(ReduceOp::Sum),
        root: None,
        parts: 0,
        tuning: 0,
        caller: None,
    };
    let fold = Fold::of_all(crate::DType::I32, ReduceOp::Sum, 1);
    thread::scope(|scope| {
        for connected in ranks.into_iter().map(Result::unwrap) {
            scope.spawn(move || {
                let Connected { domain, transport: _transport, .. } = connected;
                let mut domain = domain.unwrap();
                domain.copies = true;
                let (count, me) = (domain.peers.members.len(), domain.control_block.me());
                let bytes = LENGTH * size_of::<i32>();
                let mut region = domain.arena().alloc(bytes).unwrap();
                let mut ordinary = vec![0i32; LENGTH];
                for (number, owners) in [(0, count), (2, 2), (4, 1)] {
                    for registered in [true, false] {
                        let data = match registered {
                            true => region.as_mut_slice(),
                            false => bytemuck::cast_slice_mut(&mut ordinary),
                        };
                        let values: &mut [i32] = bytemuck::cast_slice_mut(data);
                        values
                            .iter_mut()
                            .enumerate()
                            .for_each(|(index, value)| *value = (index * (me + 1)) as i32);
                        let timeout = Timeout::new(LIMIT);
                        let reduce = (call, Sequence(number));
                        domain.reduce_scatter(reduce, data, owners, fold, &timeout).unwrap();
                        let own = Domain::chunk(bytes, owners, me);
                        let sum = (1..=count).sum::<usize>();
                        let start = own.start / 4;
                        let values: &mut [i32] = bytemuck::cast_slice_mut(&mut data[own]);
                        for (index, value) in values.iter_mut().enumerate() {
                            assert_eq!(*value, ((start + index) * sum) as i32);
                            *value += 1; // What other hosts bring.
                        }
                        domain.all_gather((call, Sequence(number + 1)), data, owners, &timeout).unwrap();
                        let values: &[i32] = bytemuck::cast_slice(data);
                        assert!(
                            values
                                .iter()
                                .enumerate()
                                .all(|(index, value)| *value == (index * sum + 1) as i32)
                        );
                    }
                }
            });
        }
    });
}

/// What a rank gives to the calls of the test below, and what block of it is for which other one.
const BLOCK: usize = 40_001;
const COPYING: u32 = 3;

fn given(rank: usize) -> Vec<i32> {
    (0..BLOCK * COPYING as usize).map(|index| (rank * 1_000_003 + index * 7) as i32).collect()
}

fn given_block(from: usize, to: usize) -> Vec<i32> {
    given(from)[to * BLOCK..(to + 1) * BLOCK].to_vec()
}

/// Copies something from rank to rank, and checks what comes.
fn copying_call(domain: &mut Domain, sequence: Sequence, operation: Operation) {
    let (me, world, timeout) = (domain.control_block.me(), COPYING as usize, Timeout::new(LIMIT));
    let (own, root) = (given(me), Rank::new(1));
    let call = |elements| Call::new(operation, crate::DType::I32, elements);
    let mut out_of_place = |call: Call, input: &[i32], expected: Vec<i32>| {
        let mut output = vec![0i32; expected.len()];
        let output_bytes = bytemuck::cast_slice_mut(&mut output);
        let memory = Memory::OutOfPlace { input: bytemuck::cast_slice(input), output: output_bytes };
        domain.collective(&call, sequence, memory, &timeout).unwrap();
        assert!(output == expected, "{}", operation.name());
    };
    let from_all = |to: usize| (0..world).flat_map(|from| given_block(from, to)).collect::<Vec<_>>();
    match operation {
        Operation::AllGather => out_of_place(call(BLOCK), &own[..BLOCK], from_all(0)),
        Operation::AllToAll => out_of_place(call(own.len()), &own, from_all(me)),
        Operation::Scatter => out_of_place(call(BLOCK).rooted_at(root), &own, given_block(1, me)),
        Operation::Gather => {
            let expected = if me == 1 { from_all(0) } else { Vec::new() };
            out_of_place(call(BLOCK).rooted_at(root), &own[..BLOCK], expected);
        }
        Operation::Broadcast => {
            let mut data = given(me);
            let call = call(data.len()).rooted_at(root);
            let memory = Memory::InPlace(bytemuck::cast_slice_mut(&mut data));
            domain.collective(&call, sequence, memory, &timeout).unwrap();
            assert!(data == given(1), "broadcast");
        }
        Operation::AllGatherVInPlace => {
            let lengths = [BLOCK, 0, 2 * BLOCK];
            let counts = Counts::new(&lengths, WorldSize::new(COPYING).unwrap()).unwrap();
            let mut data = given(me);
            let memory = Memory::InPlaceV { data: bytemuck::cast_slice_mut(&mut data), counts: &counts };
            let call = call(own.len()).in_parts(lengths.into_iter());
            domain.collective(&call, sequence, memory, &timeout).unwrap();
            assert!(data[..BLOCK] == given(0)[..BLOCK] && data[BLOCK..] == given(2)[BLOCK..], "in place");
        }
        // They combine, or are of other forms.
        Operation::AllReduce
        | Operation::AllReduceCoalesced
        | Operation::Reduce
        | Operation::ReduceScatter
        | Operation::ReduceScatterV
        | Operation::AllGatherV
        | Operation::AllToAllV
        | Operation::Barrier
        | Operation::MonitoredBarrier
        | Operation::PointToPoint => unreachable!("{} is not among the calls", operation.name()),
    }
}

/// On any processor, also where it is not done.
#[test]
fn long_blocks_are_copied_out_of_each_other_s_processes_or_staged_if_that_is_forbidden() {
    let calls = [
        Operation::AllGather,
        Operation::AllToAll,
        Operation::Scatter,
        Operation::Gather,
        Operation::Broadcast,
        Operation::AllGatherVInPlace,
    ];
    // Each is once the call in which one rank finds that the kernel does not allow it.
    for first_refused in 0..calls.len() {
        thread::scope(|scope| {
            for connected in connected(&["a"; COPYING as usize], None).into_iter().map(Result::unwrap) {
                scope.spawn(move || {
                    let Connected { domain, transport: _transport, .. } = connected;
                    let mut domain = domain.unwrap();
                    domain.copies = true;
                    let me = domain.control_block.me();
                    for (number, operation) in calls.into_iter().cycle().take(3 * calls.len()).enumerate() {
                        let is_refused = number >= calls.len() + first_refused;
                        if is_refused && me == number % 3 {
                            domain.control_block.refuse_copies();
                        }
                        copying_call(&mut domain, Sequence(number as u64), operation);
                        assert_eq!(domain.control_block.copies(), !is_refused, "{}", operation.name());
                    }
                });
            }
        });
    }
}

/// As a blocking call and an asynchronous one: the former is not in place, the latter is.
#[test]
fn one_call_may_be_in_place_on_one_rank_alone() {
    let world = COPYING as usize;
    let lengths = [1_000, 20_000, BLOCK];
    let calls = lengths.into_iter().flat_map(|length| (0..world).map(move |alone| (length, alone)));
    thread::scope(|scope| {
        for connected in connected(&["a"; COPYING as usize], None).into_iter().map(Result::unwrap) {
            let calls = calls.clone();
            scope.spawn(move || {
                let Connected { domain, transport: _transport, .. } = connected;
                let mut domain = domain.unwrap();
                domain.copies = true;
                let (me, timeout) = (domain.control_block.me(), Timeout::new(LIMIT));
                let all: Vec<Vec<i32>> = (0..world).map(given).collect();
                for (number, (length, alone)) in calls.enumerate() {
                    let sequence = Sequence(2 * number as u64);
                    let own = me * length..(me + 1) * length;

                    let call = Call::new(Operation::AllGather, crate::DType::I32, length);
                    let mut gathered = vec![0i32; world * length];
                    let input = &all[me][..length];
                    let memory = if me == alone {
                        gathered[own.clone()].copy_from_slice(input);
                        Memory::InPlace(bytemuck::cast_slice_mut(&mut gathered))
                    } else {
                        let output = bytemuck::cast_slice_mut(&mut gathered);
                        Memory::OutOfPlace { input: bytemuck::cast_slice(input), output }
                    };
                    domain.collective(&call, sequence, memory, &timeout).unwrap();
                    let expected: Vec<i32> = all.iter().flat_map(|given| &given[..length]).copied().collect();
                    assert!(gathered == expected, "{length} from each, in place on rank {alone}");

                    let call = Call::new(Operation::ReduceScatter, crate::DType::I32, world * length);
                    let call = call.reducing(ReduceOp::Sum);
                    let (mut whole, mut sums) = (all[me][..world * length].to_vec(), vec![0i32; length]);
                    let memory = if me == alone {
                        Memory::InPlace(bytemuck::cast_slice_mut(&mut whole))
                    } else {
                        let output = bytemuck::cast_slice_mut(&mut sums);
                        Memory::OutOfPlace { input: bytemuck::cast_slice(&whole), output }
                    };
                    domain.collective(&call, Sequence(sequence.0 + 1), memory, &timeout).unwrap();
                    let sums = if me == alone { &whole[own.clone()] } else { &sums };
                    let expected = own.map(|index| all.iter().map(|given| given[index]).sum::<i32>());
                    assert!(sums.iter().copied().eq(expected), "{length} for each, in place on rank {alone}");
                }
                assert!(domain.control_block.copies());
            });
        }
    });
}

/// Nobody offers it: it would be staged later than if it were not to be copied.
#[test]
fn no_broadcast_that_fits_into_a_slot_is_to_be_copied() {
    let is_sooner = |bytes| {
        let call = Call::new(Operation::Broadcast, crate::DType::U8, bytes).rooted_at(Rank::MAIN);
        copied::is_sooner(Job { call: &call, me: 0, ranks: 4, root: 0 }, InPlace::Broadcast)
    };
    let most = phalanx_sys::control_block::SMALL;
    assert_eq!([most, most + 1, 1 << 20, (1 << 20) + 1].map(is_sooner), [false, true, true, false]);
}

/// The element that a rank brings at an index.
fn brought(rank: usize, index: usize) -> i32 {
    (rank * 1_000_003 + index * 7) as i32
}

fn brings(rank: usize, length: usize) -> Vec<i32> {
    (0..length).map(|index| brought(rank, index)).collect()
}

/// Each call is a blocking one with ordinary memory on some ranks, and an asynchronous one with the group's memory on the others.
fn gather_and_scatter(group: &ProcessGroup, unit: usize) {
    let (rank, world) = (group.rank().index(), group.world_size().count());
    let is_blocking = rank % 3 != 1;
    let memory = |elements: &[i32]| match is_blocking {
        true => Buffer::from_slice(elements),
        false => {
            let mut buffer = group.alloc(crate::DType::I32, elements.len()).unwrap();
            buffer.as_mut_slice().unwrap().copy_from_slice(elements);
            buffer
        }
    };
    let what = format!("rank {rank} of {world}, {unit}");

    let own = brings(rank, unit);
    let mut gathered = vec![0i32; unit * world];
    if is_blocking {
        group.all_gather(&own, &mut gathered).unwrap();
    } else {
        let all = group.all_gather_async(memory(&own)).unwrap().wait().unwrap();
        gathered.copy_from_slice(all.as_slice().unwrap());
    }
    assert!(gathered == (0..world).flat_map(|rank| brings(rank, unit)).collect::<Vec<_>>(), "{what}");

    let counts: Vec<usize> = (0..world).map(|rank| [2 * unit, 0, unit + 1, 1][rank % 4]).collect();
    let total = counts.iter().sum::<usize>();
    let (own, mut gathered) = (brings(rank, counts[rank]), vec![0i32; total]);
    if is_blocking {
        group.all_gather_v(&own, &mut gathered, &counts).unwrap();
    } else {
        let all = group.all_gather_v_async(memory(&own), &counts).unwrap().wait().unwrap();
        gathered.copy_from_slice(all.as_slice().unwrap());
    }
    assert!(gathered == (0..world).flat_map(|rank| brings(rank, counts[rank])).collect::<Vec<_>>(), "{what}");

    let sum = |index: usize| (0..world).fold(0i32, |sum, rank| sum.wrapping_add(brought(rank, index)));
    let (whole, mut sums) = (brings(rank, unit * world), vec![0i32; unit]);
    if is_blocking {
        group.reduce_scatter(&whole, &mut sums, ReduceOp::Sum).unwrap();
    } else {
        let own = group.reduce_scatter_async(memory(&whole), ReduceOp::Sum).unwrap().wait().unwrap();
        sums.copy_from_slice(own.as_slice().unwrap());
    }
    assert!(sums.iter().copied().eq((rank * unit..(rank + 1) * unit).map(sum)), "{what}");

    let start = counts[..rank].iter().sum::<usize>();
    let part = start..start + counts[rank];
    let sums = group.reduce_scatter_v_async(memory(&brings(rank, total)), &counts, ReduceOp::Sum);
    let sums = sums.unwrap().wait().unwrap();
    let sums = &sums.as_slice::<i32>().unwrap()[part.clone()];
    assert!(sums.iter().copied().eq(part.clone().map(sum)), "{what}");

    // Two of them are more than the largest number; divided twice, they would be less than half.
    let near = |averages: &[f16]| averages.iter().all(|value| (value.to_f32() - 40_000.0).abs() < 200.0);
    let halves = |length: usize| vec![f16::from_f32(40_000.0); length];
    let mut averages = vec![f16::ZERO; unit];
    group.reduce_scatter(&halves(unit * world), &mut averages, ReduceOp::Avg).unwrap();
    assert!(near(&averages), "{what}: {:?}", averages.first());
    let averages = group.reduce_scatter_v_async(Buffer::from_slice(&halves(total)), &counts, ReduceOp::Avg);
    let averages = averages.unwrap().wait().unwrap();
    assert!(near(&averages.as_slice::<f16>().unwrap()[part]), "{what}");
}

#[test]
fn ranks_of_any_layout_of_hosts_gather_and_scatter_what_ranks_of_one_host_would() {
    // As many ranks on each host, one after the other or in turn; other numbers of ranks, up to twice as many or more, and one alone.
    let layouts = [
        &["a", "a", "b", "b"][..],
        &["a", "b", "c", "c", "a", "b"],
        &["a", "b", "a", "b", "a", "b", "b", "a"],
        &["a", "b", "a", "c", "b", "a"],
        &["a", "b", "b", "a", "a"],
        &["b", "a", "a"],
        &["a", "b", "a", "a", "b", "a"],
    ];
    for hosts in layouts {
        let on = |host: &&'static str| TransportOptions { host: Some(*host), ..TransportOptions::default() };
        let options: Vec<_> = hosts.iter().map(on).collect();
        let groups = groups_of(&options, Credentials::none()).unwrap();
        thread::scope(|scope| {
            for group in &groups {
                let group = group.with_timeout(LIMIT);
                // Around the lengths from which ranks, or hosts, exchange in another way.
                scope.spawn(move || {
                    [0, 1, 500, 3_000, 12_000].iter().for_each(|unit| gather_and_scatter(&group, *unit));
                });
            }
        });
    }
}

#[test]
fn unequal_parts_are_gathered_among_hosts_with_different_numbers_of_ranks() {
    let one_stripe = ["a", "b", "a", "c", "b", "a"];
    let (two_stripes, three) = (["a", "b", "c", "c", "b", "a"], ["a", "a", "b", "a", "b", "b", "a"]);
    for hosts in [&one_stripe[..], &two_stripes, &three] {
        let on = |host: &&'static str| TransportOptions { host: Some(*host), ..TransportOptions::default() };
        let options: Vec<_> = hosts.iter().map(on).collect();
        let groups = groups_of(&options, Credentials::none()).unwrap();
        let counts: Vec<usize> = (0..hosts.len()).map(|rank| [3, 0, 20_001, 1, 700][rank % 5]).collect();
        thread::scope(|scope| {
            for group in &groups {
                let (group, counts) = (group.with_timeout(LIMIT), &counts);
                scope.spawn(move || {
                    let (total, rank) = (counts.iter().sum::<usize>(), group.rank().index());
                    let start: usize = counts[..rank].iter().sum();
                    for registered in [true, false] {
                        let mut buffer = match registered {
                            true => group.alloc(crate::DType::I32, total).unwrap(),
                            false => Buffer::zeroed(crate::DType::I32, total),
                        };
                        let own = &mut buffer.as_mut_slice::<i32>().unwrap()[start..start + counts[rank]];
                        own.iter_mut().zip(start as i32..).for_each(|(place, value)| *place = value);
                        let gathered = group.all_gather_v_in_place_async(buffer, counts).unwrap().wait();
                        let gathered = gathered.unwrap();
                        assert!(gathered.as_slice::<i32>().unwrap().iter().copied().eq(0..total as i32));
                    }
                });
            }
        });
    }
}

#[test]
fn among_many_ranks_each_brings_only_its_own_part_of_a_small_gather() {
    let call = Call {
        operation: Operation::AllGather,
        dtype: crate::DType::U8,
        elements: small::ALWAYS as u64,
        reduce: None,
        root: None,
        parts: 0,
        tuning: 0,
        caller: None,
    };
    let job = Job { call: &call, me: 99, ranks: 100, root: 0 };
    let all = small::ALWAYS * job.ranks;
    assert_eq!(small::part(job, all, 0), Some(all - small::ALWAYS..all));
}
