//! Several devices of one process.

use std::time::Duration;

use phalanx::{Deadline, Error, Rank, ReduceOp, Result};
use phalanx_nccl::{CommunicatorOptions, Device, DeviceBuffer, DeviceGroup, Stream};

use crate::world::{aborts, all_done, reaches};
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("devices_of_a_process_are_a_group_without_a_store", 3, Needs::Devices, || {
        all_done("devices::group", 1, &[]);
    }),
    ("one_thread_drops_the_communicators_of_all_devices_and_none_is_aborted", 3, Needs::StandIn, || {
        all_done("devices::dropped", 1, &[]);
    }),
    ("devices_that_are_no_group_are_refused_by_name", 1, Needs::Nothing, || {
        all_done("devices::refused", 1, &[]);
    }),
    ("a_device_that_nccl_cannot_connect_is_told_to_all_of_the_process", 2, Needs::StandIn, || {
        all_done("devices::not_connected", 1, &[("STANDIN_NCCL_FAULT", "init_error:1:0")]);
    }),
    ("an_error_on_one_device_reaches_all_of_the_process", 3, Needs::StandIn, || {
        all_done("devices::fails", 1, &[("STANDIN_NCCL_FAULT", "error:1:0")]);
    }),
    ("a_copy_to_another_device_comes_behind_both_streams_and_keeps_what_it_reads", 2, Needs::Devices, || {
        all_done("devices::copies", 1, &[]);
    }),
    ("without_memory_pools_a_copy_to_another_device_keeps_what_it_reads", 2, Needs::StandIn, || {
        all_done("devices::copies", 1, &[("STANDIN_CUDA_POOLS", "0")]);
    }),
    ("lent_memory_is_copied_to_another_device_and_what_does_not_fit_is_refused", 2, Needs::Devices, || {
        all_done("devices::lent", 1, &[]);
    }),
    ("devices_reach_each_other_s_memory_if_they_can", 2, Needs::StandIn, || {
        all_done("devices::peers", 1, &[]);
    }),
    ("devices_that_cannot_reach_each_other_s_memory_say_so_and_copies_work", 2, Needs::StandIn, || {
        let alone = [("STANDIN_CUDA_PEERS", "0")];
        all_done("devices::no_peers", 1, &alone);
        all_done("devices::copies", 1, &alone);
    }),
    ("the_memory_that_is_used_is_that_of_each_device", 2, Needs::StandIn, || {
        all_done("devices::memory", 1, &[]);
    }),
];

pub fn play(role: &str) -> Result<()> {
    match role {
        "group" => group(),
        "dropped" => dropped(),
        "refused" => refused(),
        "not_connected" => not_connected(),
        "fails" => fails(),
        "copies" => copies(),
        "lent" => lent(),
        "peers" => peers(),
        "no_peers" => {
            assert!(!Device::open(0)?.enable_peer_access(&Device::open(1)?)?);
            Ok(())
        }
        _ => memory(),
    }
}

fn open(count: u32) -> Result<Vec<Device>> {
    (0..count).map(Device::open).collect()
}

/// What each rank's thread gives, by rank.
fn on_each<T: Send>(groups: &[DeviceGroup], rank: impl Fn(&DeviceGroup) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn group() -> Result<()> {
    let groups = DeviceGroup::of_devices(&open(3)?)?;
    let outcomes = on_each(&groups, |group| -> Result<()> {
        let (nccl, me) = (group.device(), group.host().rank());
        assert_eq!((me.get(), group.host().world_size().get()), (nccl.device().ordinal(), 3));
        let mut sum = DeviceBuffer::from_slice(nccl.stream(), &[me.get() as i32 + 1; 1000])?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum.to_vec(nccl.stream())?, [6; 1000]);
        let mut parameters = DeviceBuffer::from_slice(nccl.stream(), &[me.get() as f32; 1000])?;
        group.broadcast(&mut parameters, Rank::new(2))?;
        assert_eq!(parameters.to_vec(nccl.stream())?, [2.0; 1000]);
        let mut gradients = DeviceBuffer::from_slice(nccl.stream(), &[0.5f32; 1000])?;
        group.reduce(&mut gradients, Rank::MAIN, ReduceOp::Sum)?;
        let expected = if me.is_main() { 1.5 } else { 0.5 };
        assert_eq!(gradients.to_vec(nccl.stream())?, [expected; 1000]);
        // The memory of the host goes through the process.
        let mut host = [1i64];
        group.all_reduce(&mut host[..], ReduceOp::Sum)?;
        assert_eq!(host, [3]);
        Ok(())
    });
    outcomes.into_iter().collect()
}

fn dropped() -> Result<()> {
    let groups = DeviceGroup::of_devices(&open(3)?)?;
    let parts = on_each(&groups, |group| group.new_group(&[Rank::new(0), Rank::new(2)]));
    let parts: Vec<DeviceGroup> =
        parts.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    assert_eq!(parts.len(), 2);
    on_each(&parts, |part| part.device().barrier()).into_iter().collect::<Result<()>>()?;
    drop(parts);
    assert_eq!(aborts(), 0, "the communicators of a part did not end together");
    on_each(&groups, |group| group.device().barrier()).into_iter().collect::<Result<()>>()?;
    drop(groups);
    assert_eq!(aborts(), 0, "the communicators did not end together");
    Ok(())
}

fn refused() -> Result<()> {
    let first = Device::open(0)?;
    let error = DeviceGroup::of_devices(&[first.clone(), first.clone()]).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("Device(0) is there twice"), "{error}");
    assert!(DeviceGroup::of_devices(&[]).unwrap_err().is_invalid_argument());
    // One is a group, too.
    let alone = DeviceGroup::of_devices(&[first])?;
    assert_eq!(alone.len(), 1);
    alone[0].device().barrier()
}

fn not_connected() -> Result<()> {
    let error = DeviceGroup::of_devices(&open(2)?).unwrap_err().to_string();
    assert!(
        error.contains("Communicator::new") && error.contains("the stand-in was told to fail"),
        "{error}"
    );
    Ok(())
}

fn fails() -> Result<()> {
    let timeout = Duration::from_secs(120);
    let groups = DeviceGroup::of_devices_with_options(&open(3)?, timeout, CommunicatorOptions::default())?;
    assert_eq!(groups[2].device().timeout(), timeout);
    for error in on_each(&groups, |group| group.device().barrier().unwrap_err().to_string()) {
        assert!(error.contains("the stand-in was told to fail"), "{error}");
    }
    // One thread drops them after a failure, too.
    drop(groups);
    Ok(())
}

/// A copy that comes late, behind others of either device, and whose source is dropped at once.
fn copies() -> Result<()> {
    const LEN: usize = 1 << 18;
    let devices = open(2)?;
    let streams: Vec<Stream> = devices.iter().map(Stream::new).collect::<Result<_>>()?;
    let mut copy = DeviceBuffer::zeroed(&streams[1], LEN)?;
    for round in 0..6 {
        let late = &streams[round as usize % 2];
        let (busy, mut sink) =
            (DeviceBuffer::<f32>::zeroed(late, 1 << 24)?, DeviceBuffer::zeroed(late, 1 << 24)?);
        let first = DeviceBuffer::from_slice(&streams[0], &[round; LEN])?;
        let mut source = DeviceBuffer::zeroed(&streams[0], LEN)?;
        for _ in 0..10 {
            sink.copy_from(late, &busy)?;
        }
        source.copy_from(&streams[0], &first)?;
        copy.copy_from_peer(&streams[1], &source, &streams[0])?;
        drop(source);
        // What takes the memory that is free.
        let other = Stream::new(&devices[0])?;
        let others: Vec<_> =
            (0..4).map(|_| DeviceBuffer::from_slice(&other, &[-1; LEN])).collect::<Result<_>>()?;
        assert!(copy.to_vec(&streams[1])?.iter().all(|one| *one == round), "round {round}");
        drop(others);
    }
    // On one device it is a copy like any other; and no elements are copied without an error.
    let mut again = DeviceBuffer::zeroed(&streams[1], LEN)?;
    again.copy_from_peer(&streams[1], &copy, &streams[1])?;
    assert_eq!(again.to_vec(&streams[1])?, [5; LEN]);
    let none = DeviceBuffer::<i32>::zeroed(&streams[0], 0)?;
    DeviceBuffer::zeroed(&streams[1], 0)?.copy_from_peer(&streams[1], &none, &streams[0])?;
    // Streams and sizes are compared before anything is queued.
    let error = again.copy_from_peer(&streams[0], &copy, &streams[1]).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("is not on the device"), "{error}");
    assert!(again.copy_from_peer(&streams[1], &none, &streams[0]).unwrap_err().is_invalid_argument());
    Ok(())
}

fn lent() -> Result<()> {
    let soon = || Deadline::after(Duration::from_secs(60));
    let devices = open(2)?;
    let streams: Vec<Stream> = devices.iter().map(Stream::new).collect::<Result<_>>()?;
    let from = DeviceBuffer::from_slice(&streams[0], &[7i32; 1000])?;
    let to = DeviceBuffer::zeroed(&streams[1], 1000)?;
    let (to, from) = streams[1].copy(to, from, soon())?;
    assert_eq!((to.to_vec(&streams[1])?, from.to_vec(&streams[0])?), (vec![7; 1000], vec![7; 1000]));
    let elsewhere = streams[0].copy(to, from, soon()).unwrap_err();
    assert!(elsewhere.to_string().contains("cannot be queued on"), "{elsewhere}");
    let short = DeviceBuffer::from_slice(&streams[0], &[1i32; 3])?;
    let error = streams[1].copy(DeviceBuffer::zeroed(&streams[1], 4)?, short, soon()).unwrap_err();
    assert!(error.to_string().contains("3 elements cannot be copied to 4"), "{error}");
    Ok(())
}

fn peers() -> Result<()> {
    let [first, second] = <[Device; 2]>::try_from(open(2)?).map_err(|_| Error::other("two devices"))?;
    assert_eq!((reaches(0, 1), reaches(1, 0)), (0, 0));
    for _ in 0..2 {
        assert!(first.enable_peer_access(&second)?);
        // That of the context, and that of the pool; in one direction.
        assert_eq!((reaches(0, 1), reaches(1, 0)), (3, 0));
    }
    assert!(first.enable_peer_access(&first)?);
    Ok(())
}

fn memory() -> Result<()> {
    const BYTES: u64 = 1 << 20;
    let devices = open(2)?;
    let used =
        || -> Result<Vec<u64>> { devices.iter().map(|device| Ok(device.memory_info()?.used())).collect() };
    let before = used()?;
    let buffer = DeviceBuffer::<u8>::zeroed(&Stream::new(&devices[1])?, BYTES as usize)?;
    let info = devices[1].memory_info()?;
    assert_eq!(info.free + info.used(), info.total);
    assert_eq!(used()?, [before[0], before[1] + BYTES]);
    drop(buffer);
    Ok(())
}
