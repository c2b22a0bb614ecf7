//! Several devices of one process.

use std::time::Duration;

use phalanx::{Deadline, Error, Rank, ReduceOp, Result};
use phalanx_nccl::{
    CommunicatorOptions, Device, DeviceBuffer, DeviceGroup, DeviceMemory, DeviceSlice, Stream,
};

use crate::world::{aborts, all_done, reaches, use_other_pool};
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("devices_of_a_process_are_a_group_without_a_store", 3, Needs::Devices, || {
        all_done("devices::group", 1, &[]);
    }),
    ("devices_in_another_order_are_a_group_whose_ranks_have_that_order", 3, Needs::Devices, || {
        all_done("devices::reversed", 1, &[]);
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
    ("a_device_reaches_the_pool_from_which_another_one_takes_memory", 2, Needs::StandIn, || {
        all_done("devices::other_pool", 1, &[]);
    }),
    ("devices_of_a_group_reach_the_memory_of_each_other_s_calls", 3, Needs::StandIn, || {
        all_done("devices::open_pools", 1, &[]);
        all_done("devices::group", 1, &[("STANDIN_CUDA_PEERS", "0")]);
        all_done("devices::group", 1, &[("STANDIN_CUDA_POOLS", "0")]);
    }),
    // Of the stand-in: a real driver may find such a mistake late, or never.
    ("an_address_on_another_device_than_it_is_said_to_be_is_refused", 2, Needs::StandIn, || {
        for more in [[("STANDIN_CUDA_POOLS", "1")], [("STANDIN_CUDA_POOLS", "0")], [HOST_IS_ANY]] {
            all_done("devices::elsewhere", 1, &more);
        }
    }),
    ("the_process_s_memory_is_that_of_the_device_that_asked_last", 2, Needs::StandIn, || {
        all_done("devices::claimed", 1, &[HOST_IS_ANY]);
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

/// The stand-in takes the process's memory for that of any device.
const HOST_IS_ANY: (&str, &str) = ("STANDIN_CUDA_HOST", "any");

pub fn play(role: &str) -> Result<()> {
    match role {
        "group" => group(&open(3)?),
        "reversed" => reversed(),
        "dropped" => dropped(),
        "refused" => refused(),
        "not_connected" => not_connected(),
        "fails" => fails(),
        "copies" => copies(),
        "lent" => lent(),
        "peers" => peers(),
        "other_pool" => other_pool(),
        "open_pools" => open_pools(),
        "elsewhere" => elsewhere(),
        "claimed" => claimed(),
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

/// Three devices, of which the first is that of rank 0, and so on.
fn group(devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(devices)?;
    let outcomes = on_each(&groups, |group| -> Result<()> {
        let (nccl, me) = (group.device(), group.host().rank());
        assert_eq!((nccl.device(), group.host().world_size().get()), (&devices[me.index()], 3));
        let mut sum = DeviceBuffer::from_slice(nccl.stream(), &[me.get() as i32 + 1; 1000])?;
        // Of all devices this one alone has it.
        let has: Vec<bool> =
            devices.iter().map(|device| device.holds(sum.pointer())).collect::<Result<_>>()?;
        assert_eq!(has, (0..3).map(|rank| rank == me.index()).collect::<Vec<_>>());
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

/// The order of ranks is that of the list, and not that of the devices' numbers; in a part it may be another one again.
fn reversed() -> Result<()> {
    let mut devices = open(3)?;
    devices.reverse();
    group(&devices)?;
    let groups = DeviceGroup::of_devices(&devices)?;
    let outcomes = on_each(&groups, |group| -> Result<()> {
        let me = group.host().rank();
        let part = group.split(Some(0), -i64::from(me.get()))?.ok_or_else(|| Error::other("no part"))?;
        let nccl = part.device();
        let ordinal = nccl.device().ordinal();
        assert_eq!((ordinal, part.host().rank().get()), (2 - me.get(), 2 - me.get()));
        let mut own = DeviceBuffer::from_slice(nccl.stream(), &[ordinal as i32; 10])?;
        let mut all = DeviceBuffer::<i32>::zeroed(nccl.stream(), 30)?;
        nccl.all_gather(&mut own, &mut all)?;
        assert_eq!(all.to_vec(nccl.stream())?, [[0; 10], [1; 10], [2; 10]].concat());
        // From the last device to the first, in both groups.
        for (group, root) in [(group, 0), (&part, 2)] {
            let mut last = DeviceBuffer::from_slice(nccl.stream(), &[ordinal as f32; 10])?;
            group.broadcast(&mut last, Rank::new(root))?;
            assert_eq!(last.to_vec(nccl.stream())?, [2.0; 10]);
        }
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
    // Several, of which one has no elements; and of others one does not fit, and so none is made.
    let pair = |count: usize, number: i32| {
        let from = DeviceBuffer::from_slice(&streams[0], &vec![number; count])?;
        Ok::<_, Error>((DeviceBuffer::<i32>::zeroed(&streams[1], count)?, from))
    };
    let copied = streams[1].copy_all(vec![pair(500, 3)?, pair(0, 0)?, pair(9, 4)?], soon())?;
    let found: Vec<_> = copied.iter().map(|(to, _)| to.to_vec(&streams[1])).collect::<Result<_>>()?;
    assert_eq!(found, [vec![3; 500], vec![], vec![4; 9]]);
    let lent = |buffer: &DeviceBuffer<i32>| {
        // SAFETY: the buffer outlives the call, which is waited for.
        unsafe { DeviceSlice::<i32>::from_raw(buffer.device(), buffer.pointer(), buffer.len()) }
    };
    let ((to, from), (other, short)) = (pair(5, 8)?, (pair(4, 0)?.0, pair(3, 0)?.1));
    let copies = vec![(lent(&to), lent(&from)), (lent(&other), lent(&short))];
    let error = streams[1].copy_all(copies, soon()).unwrap_err();
    assert!(error.to_string().contains("3 elements cannot be copied to 4"), "{error}");
    assert_eq!(to.to_vec(&streams[1])?, [0; 5]);
    assert!(streams[1].copy_all(Vec::<(DeviceBuffer<i32>, DeviceBuffer<i32>)>::new(), soon())?.is_empty());
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

/// Another library has given the first device a pool that is not the default one.
fn other_pool() -> Result<()> {
    let devices = open(2)?;
    use_other_pool(0);
    assert_eq!(reaches(1, 0), 0);
    assert!(devices[1].enable_peer_access(&devices[0])?);
    assert_eq!((reaches(1, 0), reaches(0, 1)), (3, 0));
    let there = DeviceBuffer::from_slice(&Stream::new(&devices[0])?, &[7i32; 10])?;
    let stream = Stream::new(&devices[1])?;
    // SAFETY: the second device reaches it. It is not changed meanwhile, and stays until the copy is done.
    let reached = unsafe { DeviceSlice::<i32>::from_raw(&devices[1], there.pointer(), 10) };
    let deadline = Deadline::after(Duration::from_secs(60));
    let (copy, _) = stream.copy(DeviceBuffer::zeroed(&stream, 10)?, reached, deadline)?;
    assert_eq!(copy.to_vec(&stream)?, [7; 10]);
    Ok(())
}

/// NCCL's kernels may use memory of another device's pool.
fn open_pools() -> Result<()> {
    let groups = DeviceGroup::of_devices(&open(3)?)?;
    for device in 0..3 {
        for peer in (0..3).filter(|peer| *peer != device) {
            assert_eq!(reaches(device, peer), 2, "{device} to {peer}");
        }
    }
    drop(groups);
    Ok(())
}

/// Memory of one device that is said to be the other's. What is safe refuses it by what it knows: only an adapter can be wrong.
fn elsewhere() -> Result<()> {
    const LEN: usize = 1000;
    let soon = || Deadline::after(Duration::from_secs(60));
    let devices = open(2)?;
    let streams: Vec<Stream> = devices.iter().map(Stream::new).collect::<Result<_>>()?;
    let [first, second] = [0, 1].map(|number| DeviceBuffer::from_slice(&streams[number], &[7i32; LEN]));
    let (first, second) = (first?, second?);
    assert!(devices[0].holds(first.pointer())? && !devices[1].holds(first.pointer())?);
    let address = first.pointer();
    // SAFETY: the stand-in refuses it, or carries out what is queued before the memory is freed. Nobody else uses it meanwhile.
    let wrong = || unsafe { DeviceSlice::<i32>::from_raw(&devices[1], address, LEN) };
    let zeros = || DeviceBuffer::<i32>::zeroed(&streams[1], LEN);
    let refused = |error: Error| assert!(error.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
    // A device's own copies reach no other device.
    refused(streams[1].copy(zeros()?, wrong(), soon()).unwrap_err());
    refused(streams[1].copy(wrong(), zeros()?, soon()).unwrap_err());
    // A copy between two devices names both.
    // SAFETY: as above.
    let said = unsafe { DeviceSlice::<i32>::from_raw(&devices[0], second.pointer(), LEN) };
    refused(streams[1].copy(zeros()?, said, soon()).unwrap_err());
    // With access they reach it, in the one direction.
    assert!(devices[1].enable_peer_access(&devices[0])?);
    let (read, _) = streams[1].copy(zeros()?, wrong(), soon())?;
    assert_eq!(read.to_vec(&streams[1])?, [7; LEN]);
    drop(streams[1].copy(wrong(), zeros()?, soon())?);
    assert_eq!(first.to_vec(&streams[0])?, [0; LEN]);
    // SAFETY: as above.
    let back = unsafe { DeviceSlice::<i32>::from_raw(&devices[0], second.pointer(), LEN) };
    let here = DeviceBuffer::<i32>::zeroed(&streams[0], LEN)?;
    refused(streams[0].copy(here, back, soon()).unwrap_err());
    // NCCL wants each communicator's own memory, whatever its device reaches.
    let groups = DeviceGroup::of_devices(&devices)?;
    let outcomes = on_each(&groups, |group| {
        let nccl = group.device();
        match nccl.device().ordinal() {
            0 => nccl.all_reduce(&mut DeviceBuffer::<i32>::zeroed(nccl.stream(), LEN)?, ReduceOp::Sum),
            _ => nccl.all_reduce(&mut wrong(), ReduceOp::Sum),
        }
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("an address that is not the device's"), "{error}");
    }
    assert_eq!(first.to_vec(&streams[0])?, [0; LEN]);
    Ok(())
}

/// Memory of the process that the stand-in takes for the devices': each piece is that of the one for which it was asked last.
fn claimed() -> Result<()> {
    const LEN: usize = 1000;
    let devices = open(2)?;
    let groups = DeviceGroup::of_devices(&devices)?;
    let sum = |group: &DeviceGroup, is_asked_for: fn(usize) -> usize| -> Result<Vec<i32>> {
        let (nccl, me) = (group.device(), group.host().rank().index());
        let mut memory = vec![me as i32 + 1; LEN];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        assert!(devices[is_asked_for(me)].holds(address)?);
        // SAFETY: for the stand-in it is the device's, or it is refused. Nobody else uses it until the call is done.
        let mut lent = unsafe { DeviceSlice::<i32>::from_raw(nccl.device(), address, LEN) };
        nccl.all_reduce(&mut lent, ReduceOp::Sum)?;
        Ok(memory)
    };
    for sums in on_each(&groups, |group| sum(group, |me| me)) {
        assert_eq!(sums?, [3; LEN]);
    }
    // As if the ranks had taken each other's.
    for outcome in on_each(&groups, |group| sum(group, |me| 1 - me)) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("an address that is not the device's"), "{error}");
    }
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
