//! Communication beside computation: streams and events.

use std::time::Duration;

use phalanx::{Deadline, ReduceOp, Result};
use phalanx_nccl::{Communicator, Device, DeviceBuffer, Stream};

use crate::world::all_done;
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("a_collective_in_flight_holds_up_no_other_stream", 2, Needs::StandIn, held),
    ("streams_wait_for_each_other_without_a_thread", 1, Needs::Nothing, || {
        all_done("overlap::ordered", 1, &[])
    }),
    ("streams_of_two_ranks_wait_for_each_other", 2, Needs::Nothing, || all_done("overlap::ordered", 2, &[])),
];

fn held() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("go");
    all_done("overlap::held", 2, &[("STANDIN_NCCL_HOLD", path.to_str().unwrap())]);
}

pub fn play(role: &str) -> Result<()> {
    let group = phalanx::init()?;
    let device = Device::of_local_rank(&group)?;
    let nccl = Communicator::new(&group, &device)?;
    let compute = Stream::new(&device)?;
    if role == "held" { beside(&nccl, &compute) } else { ordered(&nccl, &compute) }
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
    let work = work.wait_until(Deadline::after(Duration::from_millis(20))).unwrap_err();
    nccl.group().barrier()?;
    std::fs::write(std::env::var("STANDIN_NCCL_HOLD").unwrap(), "").unwrap();
    assert_eq!(work.wait()?.to_vec(nccl.stream())?, [2.0; 1000]);
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
