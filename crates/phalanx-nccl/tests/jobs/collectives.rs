//! Every call, on every type.

use half::{bf16, f16};
use phalanx::{ProcessGroup, Rank, ReduceOp, Result};
use phalanx_nccl::{
    Communicator, CommunicatorHandle, CommunicatorOptions, DType, Device, DeviceBuffer, DeviceGroup,
    DeviceMemory, Element,
};

use crate::world::{all_done, launch_threads, meet};
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("every_call_on_every_type_alone", 1, Needs::Nothing, || all_done("collectives::all", 1, &[])),
    ("every_call_on_every_type_of_two_ranks", 2, Needs::Nothing, || all_done("collectives::all", 2, &[])),
    ("every_call_on_every_type_of_three_ranks", 3, Needs::Nothing, || all_done("collectives::all", 3, &[])),
    ("calls_without_elements_succeed_though_nccl_checks_addresses", 2, Needs::Nothing, || {
        all_done("collectives::empty", 2, &[("NCCL_CHECK_POINTERS", "1")]);
    }),
    ("launches_that_are_in_progress_are_waited_for", 2, Needs::StandIn, || {
        all_done("collectives::few", 2, &[("STANDIN_NCCL_SLOW_LAUNCH", "20")]);
    }),
    ("launches_of_a_blocking_communicator_start_no_thread", 2, Needs::StandIn, || {
        all_done("collectives::blocking", 2, &[]);
    }),
    ("a_variable_of_nccls_makes_communicators_block", 2, Needs::StandIn, || {
        all_done("collectives::few", 2, &[("NCCL_COMM_BLOCKING", "1"), ("STANDIN_NCCL_SLOW_LAUNCH", "20")]);
    }),
    ("misuse_is_refused_and_the_communicator_goes_on", 2, Needs::Devices, || {
        all_done("collectives::misuse", 2, &[]);
    }),
    ("host_and_device_memory_in_one_group_and_its_parts_alone", 1, Needs::Nothing, || {
        all_done("collectives::hybrid", 1, &[]);
    }),
    ("a_handle_goes_with_those_that_are_left", 3, Needs::Nothing, || {
        all_done("collectives::handle", 3, &[]);
    }),
    ("host_and_device_memory_in_one_group_and_its_parts", 3, Needs::Nothing, || {
        all_done("collectives::hybrid", 3, &[]);
    }),
];

pub fn play(role: &str) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::of_local_rank(&group)?;
    let blocking = CommunicatorOptions { blocking: true };
    if role == "hybrid" {
        // Which of the two a rank chooses is its own business.
        let options = if group.rank().is_main() { blocking } else { CommunicatorOptions::default() };
        let group = DeviceGroup::with_options(group, &device, options)?;
        assert_eq!(group.device().options(), options);
        return hybrid(group);
    }
    if role == "blocking" {
        let nccl = Communicator::with_options(&group, &device, blocking)?;
        every_call::<f32>(&nccl, 100)?;
        assert_eq!(launch_threads(), 0);
        let nccl = Communicator::new(&group, &device)?;
        nccl.barrier()?;
        assert_eq!(launch_threads(), 1);
        return Ok(());
    }
    let nccl = Communicator::new(&group, &device)?;
    match role {
        "handle" => handle(&group, nccl),
        "all" => {
            types(&nccl)?;
            factors::<f16>(&nccl)?;
            factors::<bf16>(&nccl)?;
            factors::<f32>(&nccl)?;
            factors::<f64>(&nccl)?;
            sizes(&nccl)?;
            // An older library is refused.
            assert!(nccl.nccl_version() >= 22_700, "{}", nccl.nccl_version());
            kept(&nccl)
        }
        "few" => every_call::<f32>(&nccl, 100),
        "empty" => empty(&nccl),
        _ => misuse(&nccl),
    }
}

/// A small number as a type of elements.
trait Small: Element + PartialEq + std::fmt::Debug {
    fn small(number: u32) -> Self;
}

macro_rules! small {
    ($($type:ty: $from:expr),*) => {$(
        impl Small for $type {
            fn small(number: u32) -> Self {
                let from: fn(u32) -> $type = $from;
                from(number)
            }
        }
    )*};
}
small!(i8: |n| n as i8, u8: |n| n as u8, i32: |n| n as i32, u32: |n| n, i64: i64::from, u64: u64::from,
       f16: |n| f16::from_f32(n as f32), bf16: |n| bf16::from_f32(n as f32), f32: |n| n as f32, f64: f64::from);

fn types(nccl: &Communicator) -> Result<()> {
    assert_eq!(DType::ALL.len(), 10);
    let (block, here) = (DeviceBuffer::<u8>::zeroed(nccl.stream(), 1000)?, 0u8);
    for address in [block.pointer(), block.pointer() + 999] {
        assert!(nccl.device().holds(address)?);
    }
    assert!(!nccl.device().holds((&raw const here).expose_provenance() as u64)?);
    assert!(!nccl.device().holds(0)?);
    every_call::<i8>(nccl, 5)?;
    every_call::<u8>(nccl, 5)?;
    every_call::<i32>(nccl, 5)?;
    every_call::<u32>(nccl, 5)?;
    every_call::<i64>(nccl, 5)?;
    every_call::<u64>(nccl, 5)?;
    every_call::<f16>(nccl, 5)?;
    every_call::<bf16>(nccl, 5)?;
    every_call::<f64>(nccl, 5)?;
    every_call::<f32>(nccl, 5)
}

/// Rank r's elements count r + 2 times, more often than there are operations at one time.
fn factors<T: Small>(nccl: &Communicator) -> Result<()> {
    let (stream, me, world) = (nccl.stream(), nccl.rank().get(), nccl.world_size().get());
    let op = ReduceOp::PreMulSum(f64::from(me + 2));
    let own = |len: u32| -> Vec<T> { (0..len).map(|index| T::small(number(me, index as usize))).collect() };
    let total = |index: usize| T::small((0..world).map(|rank| (rank + 2) * number(rank, index)).sum());
    for _ in 0..10 {
        let mut data = DeviceBuffer::from_slice(stream, &own(7))?;
        nccl.all_reduce(&mut data, op)?;
        assert_eq!(data.to_vec(stream)?, (0..7).map(total).collect::<Vec<_>>());
        let mut data = DeviceBuffer::from_slice(stream, &own(7))?;
        nccl.reduce(&mut data, Rank::MAIN, op)?;
        if me == 0 {
            assert_eq!(data.to_vec(stream)?, (0..7).map(total).collect::<Vec<_>>());
        }
        let input = DeviceBuffer::from_slice(stream, &own(2 * world))?;
        let output = DeviceBuffer::zeroed(stream, 2)?;
        let (input, output) = nccl.reduce_scatter_async(input, output, op)?.wait()?;
        let place = 2 * me as usize;
        assert_eq!(output.to_vec(stream)?, [total(place), total(place + 1)]);
        assert_eq!(input.to_vec(stream)?, own(2 * world));
    }
    Ok(())
}

fn sizes(nccl: &Communicator) -> Result<()> {
    for len in [0, 1, 16_384, 100_003] {
        every_call::<f32>(nccl, len)?;
    }
    Ok(())
}

/// Rank r brings 1 + (r + i) % 3 at i, so that what comes of another rank or place differs.
fn number(rank: u32, index: usize) -> u32 {
    1 + (rank + index as u32) % 3
}

fn every_call<T: Small>(nccl: &Communicator, len: usize) -> Result<()> {
    let (world, me, stream) = (nccl.world_size(), nccl.rank().get(), nccl.stream());
    let all = || 0..world.get();
    let own = |len: usize| -> Vec<T> { (0..len).map(|index| T::small(number(me, index))).collect() };
    let buffer = |len: usize| DeviceBuffer::from_slice(stream, &own(len));
    let zeros = |len: usize| DeviceBuffer::<T>::zeroed(stream, len);
    let expect = |buffer: &DeviceBuffer<T>, what: &str, at: &dyn Fn(usize) -> u32| -> Result<()> {
        let found = buffer.to_vec(stream)?;
        let wrong = (0..found.len()).find(|index| found[*index] != T::small(at(*index)));
        assert_eq!(wrong, None, "{what} of {} x {}", found.len(), T::DTYPE);
        Ok(())
    };
    let sum = |index: usize| all().map(|rank| number(rank, index)).sum::<u32>();

    // In place, with every operation.
    type Fold = fn(&mut dyn Iterator<Item = u32>) -> u32;
    let folds: [(ReduceOp, Fold); 4] = [
        (ReduceOp::Sum, |ranks| ranks.sum()),
        (ReduceOp::Product, |ranks| ranks.product()),
        (ReduceOp::Min, |ranks| ranks.min().unwrap()),
        (ReduceOp::Max, |ranks| ranks.max().unwrap()),
    ];
    for (op, fold) in folds {
        let combined = |index: usize| fold(&mut all().map(|rank| number(rank, index)));
        let mut data = buffer(len)?;
        nccl.all_reduce(&mut data, op)?;
        expect(&data, "all_reduce", &combined)?;
        let last = Rank::new(world.get() - 1);
        let mut data = buffer(len)?;
        nccl.reduce(&mut data, last, op)?;
        let is_root = nccl.rank() == last;
        expect(&data, "reduce", &|index| if is_root { combined(index) } else { number(me, index) })?;
    }
    // Twice the ranks' numbers have an average that is whole, for integers too.
    let mut data = DeviceBuffer::from_slice(stream, &vec![T::small(2 * me); len])?;
    nccl.all_reduce(&mut data, ReduceOp::Avg)?;
    expect(&data, "average", &|_| world.get() - 1)?;

    for root in world.ranks() {
        let mut data = buffer(len)?;
        nccl.broadcast(&mut data, root)?;
        expect(&data, "broadcast", &|index| number(root.get(), index))?;
    }
    let (input, output) = (buffer(len)?, zeros(len * world.count())?);
    let (_, output) = nccl.all_gather_async(input, output)?.wait()?;
    expect(&output, "all_gather", &|index| number((index / len) as u32, index % len))?;
    let (input, output) = (buffer(len * world.count())?, zeros(len)?);
    let (_, output) = nccl.reduce_scatter_async(input, output, ReduceOp::Sum)?.wait()?;
    expect(&output, "reduce_scatter", &|index| sum(me as usize * len + index))?;
    let (mut input, mut output) = (buffer(len * world.count())?, zeros(len * world.count())?);
    nccl.all_to_all(&mut input, &mut output)?;
    expect(&output, "all_to_all", &|index| number((index / len) as u32, me as usize * len + index % len))?;
    // Rank r has 2 r + 1 of the elements, but rank 1 none.
    let counts: Vec<usize> = all().map(|rank| if rank == 1 { 0 } else { 2 * rank as usize + 1 }).collect();
    let (own_count, total) = (counts[me as usize], counts.iter().sum::<usize>());
    let start = counts[..me as usize].iter().sum::<usize>();
    let (input, output) = (buffer(own_count)?, zeros(total)?);
    let (_, output) = nccl.all_gather_v_async(input, output, &counts)?.wait()?;
    let places: Vec<(u32, usize)> =
        all().flat_map(|rank| (0..counts[rank as usize]).map(move |at| (rank, at))).collect();
    expect(&output, "all_gather_v", &|index| number(places[index].0, places[index].1))?;
    let (mut input, mut output) = (buffer(total)?, zeros(own_count)?);
    nccl.reduce_scatter_v(&mut input, &mut output, &counts, ReduceOp::Sum)?;
    expect(&output, "reduce_scatter_v", &|index| sum(start + index))?;
    expect(&input, "the input of reduce_scatter_v", &|index| number(me, index))?;
    nccl.barrier()?;

    // Around the ring, and back.
    let next = Rank::new((me + 1) % world.get());
    let previous = Rank::new((me + world.get() - 1) % world.get());
    let calls = nccl.group_calls().send(buffer(len)?, next).recv(zeros(len)?, previous);
    let both = calls.launch()?.wait()?;
    expect(&both[1], "recv", &|index| number(previous.get(), index))?;
    if me == 0 && world.count() > 1 {
        nccl.send(&mut buffer(len)?, Rank::new(1))?;
        let sent = nccl.send_async(buffer(len)?, Rank::new(1))?.wait()?;
        expect(&sent, "what was sent", &|index| number(0, index))?;
    } else if me == 1 {
        for _ in 0..2 {
            let mut data = zeros(len)?;
            nccl.recv(&mut data, Rank::MAIN)?;
            expect(&data, "recv", &|index| number(0, index))?;
        }
    }
    // Several as one.
    let calls =
        nccl.group_calls().all_reduce(buffer(len)?, ReduceOp::Sum).broadcast(buffer(len)?, Rank::MAIN);
    let results = calls.reduce(buffer(len)?, Rank::MAIN, ReduceOp::Sum).launch()?.wait()?;
    expect(&results[0], "all_reduce in a group", &sum)?;
    expect(&results[1], "broadcast in a group", &|index| number(0, index))?;
    Ok(())
}

/// Memory without elements has no address.
fn empty(nccl: &Communicator) -> Result<()> {
    let none = || DeviceBuffer::<f32>::zeroed(nccl.stream(), 0);
    let (mut first, mut second) = (none()?, none()?);
    nccl.all_reduce(&mut first, ReduceOp::Avg)?;
    nccl.all_reduce(&mut first, ReduceOp::PreMulSum(0.5))?;
    nccl.broadcast(&mut first, Rank::MAIN)?;
    nccl.reduce(&mut first, Rank::MAIN, ReduceOp::Sum)?;
    nccl.all_gather(&mut first, &mut second)?;
    nccl.reduce_scatter(&mut first, &mut second, ReduceOp::Sum)?;
    nccl.all_to_all(&mut first, &mut second)?;
    let counts = vec![0; nccl.world_size().count()];
    nccl.all_gather_v(&mut first, &mut second, &counts)?;
    nccl.reduce_scatter_v(&mut first, &mut second, &counts, ReduceOp::Sum)?;
    let peer = Rank::new(1 - nccl.rank().get());
    nccl.group_calls().send(none()?, peer).recv(none()?, peer).launch()?.wait()?;
    // Between others in a group, too.
    let ones = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 3])?;
    let calls = nccl.group_calls().all_reduce(none()?, ReduceOp::Sum).all_reduce(ones, ReduceOp::Sum);
    assert_eq!(calls.launch()?.wait()?[1].to_vec(nccl.stream())?, [2.0; 3]);
    Ok(())
}

/// A work that is dropped keeps its memory until the call is done, and the communicator ends after it.
fn kept(nccl: &Communicator) -> Result<()> {
    for _ in 0..20 {
        drop(
            nccl.all_reduce_async(DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 5000])?, ReduceOp::Sum)?,
        );
    }
    nccl.barrier()
}

fn misuse(nccl: &Communicator) -> Result<()> {
    let stream = nccl.stream();
    let mut data = DeviceBuffer::from_slice(stream, &[1.0f32; 4])?;
    let mut short = DeviceBuffer::<f32>::zeroed(stream, 7)?;
    let refused = [
        nccl.all_reduce(&mut data, ReduceOp::BXor),
        nccl.all_reduce(&mut DeviceBuffer::from_slice(stream, &[1u8])?, ReduceOp::PreMulSum(2.0)),
        nccl.all_gather_v(&mut data, &mut short, &[4, 4]),
        nccl.all_gather(&mut data, &mut short),
        nccl.broadcast(&mut data, Rank::new(2)),
        nccl.send(&mut data, nccl.rank()),
        nccl.recv(&mut data, nccl.rank()),
        data.write(stream, &[1.0; 3]),
    ];
    for outcome in refused {
        let error = outcome.unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
    }
    let other = Device::open(1 - nccl.device().ordinal())?;
    let elsewhere = phalanx_nccl::Stream::new(&other)?;
    let mut far = DeviceBuffer::from_slice(&elsewhere, &[1.0f32])?;
    let error = nccl.all_reduce(&mut far, ReduceOp::Sum).unwrap_err();
    assert!(error.to_string().contains("the memory is on device"), "{error}");
    assert!(other.holds(far.pointer())? && !nccl.device().holds(far.pointer())?);
    let error = DeviceBuffer::<f64>::zeroed(stream, 1 << 40).unwrap_err();
    let words = format!("of {} bytes on CUDA device {}", 8u64 << 40, nccl.device().ordinal());
    assert!(error.is_out_of_memory() && error.to_string().contains(&words), "{error}");
    let error = Device::open(1000).unwrap_err();
    assert!(error.to_string().contains("there is no CUDA device 1000"), "{error}");
    nccl.all_reduce(&mut data, ReduceOp::Sum)?;
    assert_eq!(data.to_vec(stream)?, [2.0; 4]);
    Ok(())
}

fn handle(group: &ProcessGroup, nccl: Communicator) -> Result<()> {
    let handle = CommunicatorHandle::new(nccl);
    assert!(!handle.rebind(&group.clone()), "it is the same group");
    let sum = || {
        let nccl = handle.connect()?;
        let mut one = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32])?;
        nccl.all_reduce(&mut one, ReduceOp::Sum)?;
        one.to_vec(nccl.stream())
    };
    assert_eq!(sum()?, [3.0]);
    let left = [Rank::new(0), Rank::new(2)];
    let Some(part) = group.new_group(&left)? else { return group.barrier() };
    assert!(handle.rebind(&part));
    assert!(handle.failure().is_none());
    for _ in 0..2 {
        assert_eq!(sum()?, [2.0]);
    }
    // Until then the other rank may not know yet that its call is done.
    meet(&part)?;
    part.abort(phalanx::Error::aborted("it ends"));
    assert!(handle.failure().is_some());
    // The group of all is another one, and goes on.
    assert!(handle.rebind(group));
    assert!(handle.failure().is_none());
    group.barrier()
}

fn hybrid(group: DeviceGroup) -> Result<()> {
    check_both(&group)?;
    let ranks = group.host().world_size();
    let pair: Vec<Rank> = ranks.ranks().filter(|rank| *rank != Rank::new(1)).collect();
    let part = group.new_group(&pair)?;
    assert_eq!(part.is_some(), group.host().rank() != Rank::new(1));
    if let Some(part) = part {
        assert_eq!(part.device().options(), group.device().options());
        assert_eq!(part.device().world_size().count(), pair.len());
        check_both(&part)?;
    }
    let Some(part) = group.split(Some(group.host().rank().get() % 2), 0)? else { unreachable!() };
    check_both(&part)?;
    check_both(&group)
}

fn check_both(group: &DeviceGroup) -> Result<()> {
    let world = group.host().world_size().get() as f32;
    let mut host = [1.0f32; 3];
    group.all_reduce(&mut host[..], ReduceOp::Sum)?;
    assert_eq!(host, [world; 3]);
    let stream = group.device().stream();
    let mut device = DeviceBuffer::from_slice(stream, &[1.0f32; 3])?;
    group.all_reduce(&mut device, ReduceOp::Sum)?;
    group.broadcast(&mut device, Rank::MAIN)?;
    assert_eq!(device.to_vec(stream)?, host);
    Ok(())
}
