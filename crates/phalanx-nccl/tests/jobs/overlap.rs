//! Communication beside computation: streams and events.

use std::time::Duration;

use phalanx::{Deadline, Rank, ReduceOp, Result};
use phalanx_nccl::{Communicator, Device, DeviceBuffer, Stream};

use crate::world::{all_done, blocks, events_made, function, queries};
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("a_collective_in_flight_holds_up_no_other_stream", 2, Needs::StandIn, held),
    ("calls_in_flight_are_limited", 2, Needs::StandIn, || hold("overlap::many")),
    ("a_stream_that_is_borrowed_often_costs_few_looks_at_events", 2, Needs::StandIn, || {
        hold("overlap::borrowed");
    }),
    ("memory_is_freed_though_there_is_always_a_call_in_flight", 2, Needs::StandIn, || {
        all_done("overlap::pipeline", 2, &[]);
    }),
    ("without_memory_pools_memory_is_freed_when_no_call_is_in_flight", 2, Needs::StandIn, || {
        all_done("overlap::no_pools", 2, &[("STANDIN_CUDA_POOLS", "0")]);
    }),
    ("memory_that_is_dropped_behind_work_of_any_stream_stays_until_then", 1, Needs::Nothing, || {
        all_done("overlap::behind", 1, &[]);
    }),
    ("calls_use_the_events_of_earlier_ones_again", 2, Needs::StandIn, || {
        all_done("overlap::events", 2, &[]);
    }),
    ("streams_wait_for_each_other_without_a_thread", 1, Needs::Nothing, || {
        all_done("overlap::ordered", 1, &[])
    }),
    ("captures_of_graphs_elsewhere_in_the_process_go_on", 1, Needs::Nothing, || {
        all_done("overlap::capture", 1, &[]);
    }),
    ("streams_of_two_ranks_wait_for_each_other", 2, Needs::Nothing, || all_done("overlap::ordered", 2, &[])),
];

fn held() {
    hold("overlap::held");
}

/// Starts two ranks whose calls begin when a file exists.
fn hold(role: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("go");
    all_done(role, 2, &[("STANDIN_NCCL_HOLD", path.to_str().unwrap())]);
}

pub fn play(role: &str) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::of_local_rank(&group)?;
    let nccl = Communicator::new(&group, &device)?;
    let compute = Stream::new(&device)?;
    match role {
        "held" => beside(&nccl, &compute),
        "many" => many(&nccl),
        "borrowed" => borrowed(&nccl, &compute),
        "behind" => behind(&nccl, &compute),
        "events" => events(&nccl),
        "pipeline" => pipeline(&nccl, &compute, true),
        "no_pools" => pipeline(&nccl, &compute, false),
        "capture" => capture(&nccl, &compute),
        _ => ordered(&nccl, &compute),
    }
}

/// The collective cannot begin before the file exists; what the other stream does is done before.
fn beside(nccl: &Communicator, compute: &Stream) -> Result<()> {
    let gradients = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 1000])?;
    let work = nccl.all_reduce_async(gradients, ReduceOp::Sum)?;
    let source = DeviceBuffer::from_slice(compute, &[3i32; 1000])?;
    let mut target = DeviceBuffer::zeroed(compute, 1000)?;
    target.copy_from(compute, &source)?;
    assert_eq!(target.to_vec(compute)?, [3; 1000]);
    assert!(!work.is_completed(), "it is held");
    // Memory that is dropped meanwhile is freed when the collective is done.
    let before = blocks();
    drop(source);
    assert_eq!(blocks(), before, "a free would wait for the collective");
    let work = work.wait_until(Deadline::after(Duration::from_millis(20))).unwrap_err();
    nccl.group().barrier()?;
    std::fs::write(std::env::var("STANDIN_NCCL_HOLD").unwrap(), "").unwrap();
    assert_eq!(work.wait()?.to_vec(nccl.stream())?, [2.0; 1000]);
    await_blocks(before - 2); // the gradients too
    Ok(())
}

/// Waits until so many pieces of memory are left.
pub fn await_blocks(count: i32) {
    let deadline = Deadline::after(Duration::from_secs(60));
    while blocks() != count {
        assert!(!deadline.has_passed(), "{} pieces are left, not {count}", blocks());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rank 1 sends what rank 0 receives, but only when rank 0 has called the next receive: rank 0 always has a call in flight, as a
/// pipeline has. What is dropped behind each is freed all the same, if the device has memory pools.
fn pipeline(nccl: &Communicator, compute: &Stream, frees: bool) -> Result<()> {
    const LEN: usize = 1000;
    let (is_receiver, group) = (nccl.rank().is_main(), nccl.group());
    let peer = Rank::new(1 - nccl.rank().get());
    let recv = || nccl.recv_async(DeviceBuffer::<i32>::zeroed(compute, LEN)?, peer);
    let send = |number: i32| {
        let mut data = DeviceBuffer::from_slice(compute, &[number; LEN])?;
        nccl.send(&mut data, peer)
    };
    // A stream that is late: each copy of what was received comes behind others.
    let slow = Stream::new(nccl.device())?;
    let (source, mut sink) =
        (DeviceBuffer::<f32>::zeroed(&slow, 1 << 22)?, DeviceBuffer::zeroed(&slow, 1 << 22)?);
    let mut copies: Vec<DeviceBuffer<i32>> = Vec::new();
    let before = blocks();
    let mut waiting = if is_receiver { Some(recv()?) } else { None };
    let deadline = Deadline::after(Duration::from_secs(60));
    for round in 0.. {
        let next = if is_receiver { Some(recv()?) } else { None };
        // After thirty rounds it goes on until a few are left: those in flight, and those that were dropped just now.
        let left = blocks() - before - copies.len() as i32;
        assert!(!frees || !deadline.has_passed(), "{left} pieces are left after {round} rounds");
        let enough = round >= 30 && (!frees || left < 10);
        let mut goes_on = [i32::from(is_receiver && !enough)];
        group.all_reduce(&mut goes_on[..], ReduceOp::Sum)?;
        if let Some(work) = std::mem::replace(&mut waiting, next) {
            assert!(frees || left > round, "{left} pieces are left after {round} rounds");
            let received = work.wait()?;
            if round < 30 {
                for _ in 0..5 {
                    sink.copy_from(&slow, &source)?;
                }
                let mut copy = DeviceBuffer::zeroed(compute, LEN)?;
                copy.copy_from(&slow, &received)?;
                copies.push(copy);
            }
            // It is dropped before it is copied.
            drop(received);
        } else {
            send(round)?;
        }
        if goes_on == [0] {
            if waiting.is_none() {
                send(round + 1)?;
            }
            break;
        }
    }
    if let Some(work) = waiting {
        drop(work.wait()?);
    }
    for (round, copy) in (0..).zip(&copies) {
        assert_eq!(copy.to_vec(&slow)?, [round; LEN]);
    }
    drop(copies);
    await_blocks(before);
    Ok(())
}

/// A copy that comes late, behind others, of memory that is dropped at once; with and without a call in flight when it is.
fn behind(nccl: &Communicator, compute: &Stream) -> Result<()> {
    const LEN: usize = 1 << 20;
    let slow = Stream::new(nccl.device())?;
    let (source, mut sink) =
        (DeviceBuffer::<f32>::zeroed(&slow, 1 << 26)?, DeviceBuffer::zeroed(&slow, 1 << 26)?);
    let mut copy = DeviceBuffer::zeroed(&slow, LEN)?;
    for round in 0..10 {
        for _ in 0..10 {
            sink.copy_from(&slow, &source)?;
        }
        let mut dropped = DeviceBuffer::from_slice(compute, &[round; LEN])?;
        if round % 2 == 1 {
            // As the guide shows it: the work is ordered, and the memory dropped before anybody has waited.
            slow.wait_for(compute)?;
            dropped = nccl.after(compute)?.all_reduce_async(dropped, ReduceOp::Sum)?.order(&slow)?;
        }
        copy.copy_from(&slow, &dropped)?;
        drop(dropped);
        // What takes the memory that is free.
        let others: Vec<_> =
            (0..4).map(|_| DeviceBuffer::from_slice(compute, &[-1; LEN])).collect::<Result<_>>()?;
        assert!(copy.to_vec(&slow)?.iter().all(|one| *one == round), "round {round}");
        drop(others);
    }
    Ok(())
}

/// What was made for the first calls does for all that follow.
fn events(nccl: &Communicator) -> Result<()> {
    let mut data = DeviceBuffer::from_slice(nccl.stream(), &[0i32; 10])?;
    let mut calls = |count: usize| (0..count).try_for_each(|_| nccl.all_reduce(&mut data, ReduceOp::Sum));
    // An event is free when the poller has forgotten its call, which on a busy machine is late.
    for _ in 0..100 {
        let before = events_made();
        calls(200)?;
        let needed_none = [u8::from(events_made() == before)];
        if nccl.group().all_gather_object(&needed_none)?.iter().all(|rank| *rank == [1]) {
            return Ok(());
        }
    }
    panic!("every 200 calls need events of their own: {}", events_made());
}

/// No more calls are in flight than the driver takes: the next one waits, no longer than its time-out.
fn many(nccl: &Communicator) -> Result<()> {
    let call = |nccl: &Communicator| {
        let data = DeviceBuffer::from_slice(&Stream::new(nccl.device())?, &[1i32])?;
        nccl.all_reduce_async(data, ReduceOp::Sum)
    };
    let works: Vec<_> = (0..128).map(|_| call(nccl)).collect::<Result<_>>()?;
    let error = call(&nccl.with_timeout(Duration::from_millis(200))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("128 calls are in flight"), "{error}");
    assert!(nccl.failure().is_none());
    nccl.group().barrier()?;
    std::fs::write(std::env::var("STANDIN_NCCL_HOLD").unwrap(), "").unwrap();
    for work in works.into_iter().chain((0..300).map(|_| call(nccl).unwrap())) {
        assert_eq!(work.wait()?.to_vec(nccl.stream())?, [2]);
    }
    Ok(())
}

/// An adapter borrows its framework's stream for each bucket, while the device is late.
fn borrowed(nccl: &Communicator, compute: &Stream) -> Result<()> {
    const TIMES: i32 = 400;
    let work = nccl.all_reduce_async(DeviceBuffer::from_slice(nccl.stream(), &[1i32])?, ReduceOp::Sum)?;
    compute.wait_for(nccl.stream())?;
    let before = queries();
    for _ in 0..TIMES {
        // SAFETY: it is alive.
        drop(unsafe { Stream::from_raw(nccl.device(), compute.as_raw()) });
    }
    // A look at all of them for each would be 80,000. The poller has some of its own, every few milliseconds.
    let looks = queries() - before;
    assert!(looks < 50 * TIMES, "{looks}");
    nccl.group().barrier()?;
    std::fs::write(std::env::var("STANDIN_NCCL_HOLD").unwrap(), "").unwrap();
    assert_eq!(work.wait()?.to_vec(compute)?, [2]);
    Ok(())
}

/// A framework captures a graph, in the mode that forbids all other threads what could disturb it. Calls, and looks at what is in
/// flight, and memory that is allocated and freed meanwhile, do not.
fn capture(nccl: &Communicator, captured: &Stream) -> Result<()> {
    const GLOBAL: i32 = 0;
    type Begin = unsafe extern "C" fn(usize, i32) -> i32;
    type End = unsafe extern "C" fn(usize, *mut usize) -> i32;
    let variable = "PHALANX_CUDA_LIBRARY";
    // SAFETY: a `CUstream` and a `CUgraph` are pointers.
    let (begin, end) = unsafe {
        (
            function::<Begin>(variable, "libcuda.so.1", "cuStreamBeginCapture_v2"),
            function::<End>(variable, "libcuda.so.1", "cuStreamEndCapture"),
        )
    };
    let calls = |nccl: &Communicator| -> Result<()> {
        for _ in 0..10 {
            let data = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 1000])?;
            let work = nccl.all_reduce_async(data, ReduceOp::Sum)?;
            // The poller looks at it meanwhile.
            std::thread::sleep(Duration::from_millis(10));
            drop(work.wait()?);
            drop(nccl.all_reduce_async(DeviceBuffer::<f32>::zeroed(nccl.stream(), 10)?, ReduceOp::Sum)?);
        }
        Ok(())
    };
    let mut graph = 0;
    // Of the communicator's own stream: the call would be a part of the graph. It is refused, and ends nothing. No memory was dropped before, for which
    // the poller would look at the stream while the capture begins.
    let data = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 10])?;
    // SAFETY: the stream is alive, and nothing is queued on it until the capture ends.
    assert_eq!(unsafe { begin(nccl.stream().as_raw(), GLOBAL) }, 0);
    let refused = nccl.all_reduce_async(data, ReduceOp::Sum).unwrap_err();
    assert!(refused.to_string().contains("cannot be captured"), "{refused}");
    // SAFETY: it is captured; it writes a pointer there.
    assert_eq!(unsafe { end(nccl.stream().as_raw(), &mut graph) }, 0, "the capture was disturbed");
    calls(nccl)?;
    // SAFETY: as above.
    assert_eq!(unsafe { begin(captured.as_raw(), GLOBAL) }, 0);
    calls(nccl)?; // on the thread that captures
    let refused = nccl.after(captured).unwrap_err();
    assert!(refused.to_string().contains("cannot be captured"), "{refused}");
    let data = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 10])?;
    let refused = nccl.all_reduce_async(data, ReduceOp::Sum)?.order(captured).unwrap_err();
    assert!(refused.is_invalid_argument(), "{refused}");
    std::thread::scope(|scope| scope.spawn(|| calls(nccl)).join().unwrap())?;
    // SAFETY: it is captured; it writes a pointer there.
    assert_eq!(unsafe { end(captured.as_raw(), &mut graph) }, 0, "the capture was disturbed");
    Ok(())
}

/// A chain over both streams: each step needs the one before, and only the end is waited for.
fn ordered(nccl: &Communicator, compute: &Stream) -> Result<()> {
    const STEPS: u32 = 8;
    let world = nccl.world_size().get() as i64;
    let mut data = DeviceBuffer::from_slice(compute, &[1i64; 100_000])?;
    let copies: Result<Vec<_>> = (0..STEPS).map(|_| DeviceBuffer::zeroed(compute, 100_000)).collect();
    let mut copies = copies?;
    for copy in &mut copies {
        let work = nccl.after(compute)?.all_reduce_async(data, ReduceOp::Sum)?;
        data = work.order(compute)?;
        copy.copy_from(compute, &data)?;
    }
    for (step, copy) in (1..).zip(copies) {
        assert_eq!(copy.to_vec(compute)?, [world.pow(step); 100_000]);
    }
    Ok(())
}
