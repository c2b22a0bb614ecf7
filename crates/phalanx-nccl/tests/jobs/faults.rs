//! Failures: every survivor gets a named error, and nobody hangs.

use std::process::Command;
use std::time::{Duration, Instant};

use phalanx::{Deadline, Error, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_nccl::{Communicator, Device, DeviceBuffer, DeviceMemory, Stream};

use crate::overlap::await_blocks;
use crate::world::{World, all_done, blocks, meet};
use crate::{Needs, Test};

pub const TESTS: &[Test] = &[
    ("a_rank_that_dies_is_named_though_nccl_says_nothing", 3, Needs::Nothing, dies),
    ("a_rank_that_dies_is_named_and_not_only_its_connection", 3, Needs::StandIn, dies_with_remote_error),
    ("a_rank_that_is_stopped_is_named", 3, Needs::Nothing, stopped),
    ("a_rank_that_does_not_call_ends_with_the_time_out_of_the_call", 2, Needs::Nothing, late),
    ("a_rank_that_leaves_is_named", 2, Needs::Nothing, leaves),
    ("a_rank_that_leaves_is_named_and_not_only_its_connection", 2, Needs::StandIn, leaves_with_remote_error),
    ("an_error_of_nccl_reaches_every_rank", 3, Needs::StandIn, asynchronous),
    ("a_launch_that_is_refused_reaches_every_rank", 3, Needs::StandIn, refused),
    ("a_call_that_hangs_on_one_device_ends_with_its_time_out", 2, Needs::StandIn, hangs),
    ("memory_that_takes_long_to_drop_does_not_hold_up_the_watchdog", 2, Needs::StandIn, detached),
    ("a_launch_that_does_not_return_ends_with_its_time_out", 2, Needs::StandIn, launch_hangs),
    ("a_rank_that_leaves_is_named_by_who_receives_from_it", 2, Needs::Nothing, leaves_receiver),
    ("memory_dropped_during_an_abort_is_freed_after_it", 2, Needs::StandIn, abort_slow),
    ("memory_of_a_launch_that_failed_stays_while_the_abort_lasts", 2, Needs::StandIn, refused_and_kept),
    ("a_call_behind_other_work_of_the_device_ends_with_its_time_out", 1, Needs::StandIn, behind),
    ("a_blocking_communicator_fails_as_another_does", 3, Needs::StandIn, blocking),
    ("the_end_of_a_communicator_waits_for_no_other_rank", 2, Needs::Nothing, ends_alone),
    ("a_communicator_that_is_not_destroyed_holds_up_no_rank", 2, Needs::StandIn, || {
        ends_alone_with(&[("STANDIN_NCCL_DESTROY_HANG", "600000")]);
    }),
    ("a_call_that_ends_after_its_time_out_succeeds_or_fails_and_not_both", 1, Needs::StandIn, tardy),
    ("the_program_ends_it_alone", 1, Needs::Nothing, aborts_alone),
    ("the_program_ends_it_on_every_rank", 3, Needs::Nothing, aborts),
    ("an_abort_that_does_not_return_holds_nobody_up", 2, Needs::StandIn, abort_hangs),
    ("a_failure_of_the_group_is_one_of_the_communicator", 2, Needs::Nothing, one_failure),
    ("an_abort_is_under_way_at_once", 2, Needs::Nothing, aborts_in_flight),
    ("a_process_that_was_forked_from_a_rank_s_does_not_wait_for_its_communicator", 2, Needs::StandIn, || {
        all_done("faults::forks", 2, &[]);
    }),
    ("the_record_of_a_smaller_group_names_the_ranks_of_the_job", 3, Needs::Nothing, smaller),
];

/// The call in which the fault comes.
const FAULT: u64 = 3;

pub fn play(role: &str) -> Result<()> {
    let group = phalanx::init()?;
    let me = group.rank().get();
    let device = Device::of_local_rank(&group)?;
    if role == "smaller" {
        return end_smaller(&group, &device);
    }
    let first = Communicator::new(&group, &device)?;
    match role {
        "behind" => return wait_behind(&first),
        "tardy" => return end_late(&first),
        "ends_alone" => return end_alone(&group, first),
        "forks" => return fork_once(first),
        _ => {}
    }
    let mut data = DeviceBuffer::from_slice(first.stream(), &[1.0f32; 1000])?;
    let spare = DeviceBuffer::from_slice(first.stream(), &[1.0f32; 1000])?;
    for _ in 0..FAULT {
        // The stand-in's faults count launches too.
        data = first.all_reduce_async(data, ReduceOp::Avg)?.wait()?;
    }
    meet(&group)?;
    let limit = match role {
        // What its first call waits for takes a while on a slow machine.
        "detached" => 10,
        _ if SHORT.contains(&role) => 2,
        _ => 100,
    };
    let nccl = first.with_timeout(Duration::from_secs(limit));
    drop(first);
    match role {
        "dies" if me == 1 => std::process::abort(),
        "stopped" if me == 1 => {
            Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status().unwrap();
        }
        "detached" => {
            let memory = Stubborn { buffer: data, group: group.clone() };
            // The call waits for work that takes a while, so it is not over when its `Work` is dropped: then the memory would be dropped
            // here, and wait for what comes after it.
            let compute = Stream::new(&device)?;
            let source = DeviceBuffer::<f32>::zeroed(&compute, 1 << 22)?;
            let mut target = DeviceBuffer::zeroed(&compute, 1 << 22)?;
            (0..100).try_for_each(|_| target.copy_from(&compute, &source))?;
            drop(nccl.after(&compute)?.all_reduce_async(memory, ReduceOp::Sum)?);
            data = DeviceBuffer::from_slice(&Stream::new(&device)?, &[1.0f32; 1000])?;
        }
        "leaves_receiver" if me == 0 => {
            return nccl.recv_async(data, Rank::new(1))?.wait().map(drop);
        }
        "late" | "leaves" | "leaves_receiver" if me == 1 => {
            if role == "late" {
                let started = Instant::now();
                while nccl.failure().is_none() {
                    assert!(started.elapsed() < Duration::from_secs(60));
                    std::thread::sleep(Duration::from_millis(10));
                }
                return nccl.all_reduce(&mut data, ReduceOp::Sum);
            }
            return Ok(());
        }
        "aborts" if me == 0 => {
            let ending = nccl.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                ending.abort(Error::other("the loss is NaN"));
            });
            if nccl.world_size().count() == 1 {
                // Alone nothing keeps a call waiting.
                while nccl.failure().is_none() {
                    nccl.all_reduce(&mut data, ReduceOp::Sum)
                        .or_else(|error| error.is_aborted().then_some(()).ok_or(error))?;
                }
            } else {
                // The others call it, and this one does not: they wait.
                while nccl.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        "aborts_in_flight" if me == 0 => {
            let work = nccl.all_reduce_async(data, ReduceOp::Sum)?;
            nccl.abort(Error::other("enough"));
            // At once, not only when the watchdog has seen it.
            assert!(nccl.is_aborting());
            return work.wait().map(drop);
        }
        "aborts_in_flight" => {
            while nccl.failure().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        "one_failure" if me == 1 => {
            group.abort(Error::other("enough"));
        }
        _ => {}
    }
    let called = Instant::now();
    let outcome = nccl.all_reduce_async(data, ReduceOp::Sum).and_then(|work| work.wait());
    let error = outcome.map(drop).expect_err("there was a fault");
    // It stays failed, and so does the group.
    let again = nccl.barrier().unwrap_err();
    assert_eq!(again.peer(), error.peer(), "{again}");
    assert!(nccl.group().barrier().is_err() && nccl.failure().is_some());
    if role.starts_with("abort_") {
        // The token of barriers, the buffer of the call, and this one.
        assert!(nccl.is_aborting());
        drop(spare);
        assert_eq!(blocks(), 3, "the device may use it");
    }
    if role == "abort_hangs" {
        // The abort lasts 100 s. The call waits 2 s, and 5 s for the abort; the end of the communicator 10 s.
        assert!(called.elapsed() < Duration::from_secs(30), "{:?}", called.elapsed());
        drop(nccl);
        assert!(called.elapsed() < Duration::from_secs(60), "{:?}", called.elapsed());
        assert_eq!(blocks(), 3, "the device may use it");
        return Err(error);
    }
    // A call that is refused does not wait for the abort.
    let started = Instant::now();
    while nccl.is_aborting() {
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
    if role == "abort_slow" {
        await_blocks(1);
    }
    let peer = error.peer().map_or("nobody".to_owned(), |peer: Rank| peer.to_string());
    println!(
        "blames {peer}, in {:?} {:?}, timeout {}",
        error.operation(),
        error.sequence(),
        error.is_timeout()
    );
    Err(error)
}

/// The roles with calls that end with a time-out of 2 s.
const SHORT: &[&str] = &["late", "hangs", "abort_hangs", "abort_slow", "launch_hangs"];

/// Memory that cannot be dropped before the group has failed.
struct Stubborn {
    buffer: DeviceBuffer<f32>,
    group: ProcessGroup,
}

// SAFETY: it is the buffer's memory.
unsafe impl DeviceMemory for Stubborn {
    type Element = f32;

    fn device(&self) -> &Device {
        self.buffer.device()
    }

    fn pointer(&self) -> u64 {
        self.buffer.pointer()
    }

    fn len(&self) -> usize {
        DeviceMemory::len(&self.buffer)
    }
}

impl Drop for Stubborn {
    fn drop(&mut self) {
        while self.group.failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The collective waits for copies that take longer than its time-out; it is aborted before it has begun.
fn wait_behind(nccl: &Communicator) -> Result<()> {
    // Many seconds of the stand-in: when the time is out, a second goes by in which another cause would be heard of, and a call that ends
    // until then is no failure. On an H100 900 copies of 1 GiB did not make the collective late, for a reason that is not known yet.
    let (elements, copies) = (1 << 22, 4000);
    let compute = Stream::new(nccl.device())?;
    let source = DeviceBuffer::<f32>::zeroed(&compute, elements)?;
    let mut target = DeviceBuffer::zeroed(&compute, elements)?;
    let buffers =
        (DeviceBuffer::<f32>::zeroed(&compute, 1000)?, DeviceBuffer::<f32>::zeroed(&compute, 1000)?);
    // The first call of a communicator sets it up, and may wait for the device meanwhile.
    let buffers = nccl.all_gather_async(buffers.0, buffers.1)?.wait()?;
    for _ in 0..copies {
        target.copy_from(&compute, &source)?;
    }
    let started = Instant::now();
    let hasty = nccl.with_timeout(Duration::from_millis(10));
    let work = hasty.after(&compute)?.all_gather_async(buffers.0, buffers.1)?;
    let error = work.wait().expect_err("the copies take longer");
    println!("after {} ms, is a time-out: {}", started.elapsed().as_millis(), error.is_timeout());
    compute.synchronize(Deadline::after(Duration::from_secs(120)))?;
    while nccl.is_aborting() {
        assert!(started.elapsed() < Duration::from_secs(130));
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(error)
}

/// The call ends in the second after its time-out, in which the watchdog waits for another cause.
fn end_late(nccl: &Communicator) -> Result<()> {
    let data = DeviceBuffer::from_slice(nccl.stream(), &[1.0f32; 1000])?;
    let (limit, hasty) = (Duration::from_secs(1), nccl.with_timeout(Duration::from_secs(1)));
    let work = hasty.all_reduce_async(data, ReduceOp::Sum)?;
    std::thread::sleep(limit + Duration::from_millis(300));
    std::fs::write(std::env::var("STANDIN_NCCL_HOLD").unwrap(), "").unwrap();
    let outcome = work.wait().map(drop);
    // Either may be, on a busy machine; both may not.
    let until = Instant::now() + Duration::from_secs(3);
    while nccl.failure().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(outcome.is_ok(), nccl.failure().is_none(), "{outcome:?} and {:?}", nccl.failure());
    Ok(())
}

/// Ranks 1 and 2 have a communicator of their own, which the first of them ends.
fn end_smaller(group: &ProcessGroup, device: &Device) -> Result<()> {
    let smaller = group.new_group(&[1, 2].map(Rank::new))?;
    let nccl = smaller.map(|smaller| Communicator::new(&smaller, device)).transpose()?;
    nccl.as_ref().map_or(Ok(()), Communicator::barrier)?;
    meet(group)?;
    let Some(nccl) = nccl else { return Ok(()) };
    if nccl.rank().is_main() {
        nccl.abort(Error::other("enough"));
    }
    while nccl.failure().is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Rank 1 keeps its communicator until rank 0 has dropped its own, of which nothing may be left.
fn end_alone(group: &ProcessGroup, nccl: Communicator) -> Result<()> {
    nccl.barrier()?;
    if group.rank().is_main() {
        drop(nccl);
        let until = Instant::now() + Duration::from_secs(60);
        while threads().iter().any(|name| name.starts_with("phalanx-nccl")) {
            assert!(Instant::now() < until, "{:?}", threads());
            std::thread::sleep(Duration::from_millis(10));
        }
        return meet(group);
    }
    meet(group)
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

/// A process that is forked from this one drops its copy of the communicator, whose threads it does not have.
fn fork_once(nccl: Communicator) -> Result<()> {
    nccl.barrier()?;
    let started = Instant::now();
    // SAFETY: the child drops the communicator, which takes no lock there, and ends.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        drop(nccl);
        // SAFETY: it has no conditions.
        unsafe { _exit(0) }
    }
    let mut status = -1;
    // SAFETY: it writes one number there.
    let ended = unsafe { waitpid(child, &mut status, 0) };
    assert_eq!(ended, child);
    // To wait for the end of the communicator is to wait for 13 s.
    assert!(status == 0 && started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    nccl.barrier()
}

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// The call that fails, as an error names it.
const CALL: &str = "in Some(\"cuda all_reduce(sum, 1000 x f32)\") Some(Sequence(3))";

fn check(outputs: &[String], ranks: &[usize], parts: &[&str]) {
    for rank in ranks {
        for part in parts {
            assert!(outputs[*rank].contains(part), "rank {rank} does not say {part:?}: {}", outputs[*rank]);
        }
    }
}

fn dies() {
    dies_with(&[]);
}

fn dies_with(variables: &[(&str, &str)]) {
    let outputs = World::start("faults::dies", 3, variables, &[]).outputs();
    check(&outputs, &[0, 2], &["blames 1", CALL, "rank 1 (", "died"]);
}

fn blocking() {
    let blocking = ("NCCL_COMM_BLOCKING", "1");
    dies_with(&[blocking]);
    late_with(&[blocking]);
    launch_hangs_with(&[blocking]);
    ends_alone_with(&[blocking]);
}

fn ends_alone() {
    ends_alone_with(&[]);
}

fn ends_alone_with(variables: &[(&str, &str)]) {
    let outputs = World::start("faults::ends_alone", 2, variables, &[]).outputs();
    check(&outputs, &[0, 1], &["done"]);
}

fn tardy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("go");
    let outputs =
        World::start("faults::tardy", 1, &[("STANDIN_NCCL_HOLD", path.to_str().unwrap())], &[]).outputs();
    check(&outputs, &[0], &["done"]);
}

fn dies_with_remote_error() {
    let outputs = World::start("faults::dies", 3, &[("STANDIN_NCCL_REMOTE_ERROR", "1")], &[]).outputs();
    check(&outputs, &[0, 2], &["blames 1", CALL, "rank 1 (", "died"]);
}

fn stopped() {
    let mut world = World::start("faults::stopped", 3, &[], &[]);
    let outputs = [0, 2].map(|rank| world.output(rank));
    for output in outputs {
        check(&[output], &[0], &["blames 1", CALL, "has not been heard of"]);
    }
    assert!(world.pid(1) > 0);
    world.kill(1);
}

fn late() {
    late_with(&[]);
}

fn late_with(variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let record = [("PHALANX_NCCL_RECORD", path.to_str().unwrap())];
    let outputs = World::start("faults::late", 2, &[&record, variables].concat(), &[]).outputs();
    // The records show who has made which call. Rank 1 has made none after the one that both have.
    let records = [0, 1].map(|rank| std::fs::read_to_string(path.with_extension(rank.to_string())).unwrap());
    check(&records, &[0], &["rank 0 of 2 has failed: ", "the device has not ended it in time"]);
    check(&records, &[0, 1], &["#2 cuda all_reduce(avg, 1000 x f32): made", "done after"]);
    let last = records.each_ref().map(|record| record.lines().last().unwrap().trim());
    assert!(last[0].starts_with("#3 cuda all_reduce(sum, 1000 x f32): made"), "{last:?}");
    assert!(last[0].ends_with("s before, given up"), "{last:?}");
    assert!(last[1].starts_with("#2 cuda all_reduce(avg"), "{last:?}");
    check(&outputs[..1], &[0], &[CALL, "timeout true", "the device has not ended it in time"]);
    check(&outputs, &[1], &["rank 0 (", "cuda all_reduce(sum, 1000 x f32) #3"]);
}

fn smaller() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    all_done("faults::smaller", 3, &[("PHALANX_NCCL_RECORD", path.to_str().unwrap())]);
    let records = [1, 2].map(|rank| std::fs::read_to_string(path.with_extension(rank.to_string())).unwrap());
    for (rank, record) in (1..).zip(&records) {
        let said = format!("rank {rank} (rank {} of 2 in a group of its own) has failed: ", rank - 1);
        assert!(record.starts_with(&said) && record.contains("enough"), "{record}");
    }
}

fn leaves() {
    leaves_with(&[]);
}

/// NCCL says it before the goodbye is there.
fn leaves_with_remote_error() {
    leaves_with(&[("STANDIN_NCCL_REMOTE_ERROR", "1")]);
}

fn leaves_with(variables: &[(&str, &str)]) {
    let outputs = World::start("faults::leaves", 2, variables, &[]).outputs();
    check(&outputs, &[0], &["blames 1", CALL, "has left the group"]);
    assert_eq!(outputs[1].trim(), "done");
}

fn asynchronous() {
    let outputs = World::start("faults::error", 3, &[("STANDIN_NCCL_FAULT", "error:1:3")], &[]).outputs();
    check(&outputs, &[0, 1, 2], &[CALL, "rank 1 (", "internal error: the stand-in was told to fail"]);
}

fn refused() {
    let outputs =
        World::start("faults::error", 3, &[("STANDIN_NCCL_FAULT", "launch_error:1:3")], &[]).outputs();
    check(
        &outputs,
        &[0, 1, 2],
        &[CALL, "rank 1 (", "ncclGroupEnd: unhandled cuda error: the stand-in was told"],
    );
}

fn hangs() {
    let outputs = World::start("faults::hangs", 2, &[("STANDIN_NCCL_FAULT", "hang:1:3")], &[]).outputs();
    check(&outputs, &[0, 1], &[CALL, "timeout true"]);
}

fn behind() {
    let outputs = World::start("faults::behind", 1, &[], &[]).outputs();
    println!("{}", outputs[0]);
    check(
        &outputs,
        &[0],
        &["is a time-out: true", "cuda all_gather(1000 x f32) #1: the device has not ended it in time"],
    );
}

fn aborts_alone() {
    check(&World::start("faults::aborts", 1, &[], &[]).outputs(), &[0], &["the loss is NaN"]);
}

fn aborts() {
    let outputs = World::start("faults::aborts", 3, &[], &[]).outputs();
    check(&outputs, &[0, 1, 2], &["rank 0 (", "the loss is NaN", CALL]);
}

fn abort_hangs() {
    let variables = [("STANDIN_NCCL_FAULT", "hang:1:3"), ("STANDIN_NCCL_ABORT_HANG", "100000")];
    let outputs = World::start("faults::abort_hangs", 2, &variables, &[]).outputs();
    check(&outputs, &[0, 1], &["cuda all_reduce(sum, 1000 x f32) #3", "has not ended it in time"]);
}

fn abort_slow() {
    let variables = [("STANDIN_NCCL_FAULT", "hang:1:3"), ("STANDIN_NCCL_ABORT_HANG", "12000")];
    let outputs = World::start("faults::abort_slow", 2, &variables, &[]).outputs();
    check(&outputs, &[0, 1], &[CALL, "timeout true"]);
}

fn refused_and_kept() {
    let variables = [("STANDIN_NCCL_FAULT", "launch_error:1:3"), ("STANDIN_NCCL_ABORT_HANG", "100000")];
    let outputs = World::start("faults::abort_hangs", 2, &variables, &[]).outputs();
    check(&outputs, &[0, 1], &["cuda all_reduce(sum, 1000 x f32) #3", "rank 1 (", "the stand-in was told"]);
}

fn detached() {
    let outputs = World::start("faults::detached", 2, &[("STANDIN_NCCL_FAULT", "hang:1:4")], &[]).outputs();
    check(&outputs, &[0, 1], &["Some(Sequence(4))", "timeout true"]);
}

fn launch_hangs() {
    launch_hangs_with(&[]);
}

fn launch_hangs_with(variables: &[(&str, &str)]) {
    let variables = [&[("STANDIN_NCCL_FAULT", "launch_hang:1:3")], variables].concat();
    let outputs = World::start("faults::launch_hangs", 2, &variables, &[]).outputs();
    check(&outputs, &[0, 1], &[CALL, "timeout true"]);
}

fn leaves_receiver() {
    let outputs = World::start("faults::leaves_receiver", 2, &[], &[]).outputs();
    check(&outputs, &[0], &["cuda recv(from rank 1, 1000 x f32) #3", "has left the group"]);
    assert_eq!(outputs[1].trim(), "done");
}

fn aborts_in_flight() {
    // So long that it has not ended yet when the rank looks.
    let variables = [("STANDIN_NCCL_ABORT_HANG", "2000")];
    let outputs = World::start("faults::aborts_in_flight", 2, &variables, &[]).outputs();
    check(&outputs, &[0, 1], &["enough"]);
}

fn one_failure() {
    let outputs = World::start("faults::one_failure", 2, &[], &[]).outputs();
    check(&outputs, &[0, 1], &["rank 1 (", "enough"]);
}
