//! What each rank is told if another does something else, or nothing any more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx::testing::{Fabric, run};
use phalanx::{DType, Error, Rank};
use phalanx_horovod::{Handle, Horovod, Memory, Op, Options, SparseGradient, Tensor};

use super::ranks;

#[test]
fn ranks_that_disagree_are_told_both_sides_and_everything_else_goes_on() {
    ranks(3, Fabric::SharedMemory, &Options::default(), |hvd| {
        let rank = hvd.rank().get();
        let length = if rank == 2 { 5 } else { 4 };
        let wrong = hvd.allreduce_async("grad.w", vec![1.0f32; length], Op::Sum).unwrap();
        let right = hvd.allreduce_async("grad.b", [1.0f32; 2], Op::Sum).unwrap();
        let error = wrong.synchronize().unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        let text = error.to_string();
        assert!(text.contains(r#""grad.w": rank 0 submits allreduce(sum) of f32 [4], rank 2"#), "{text}");
        assert_eq!(right.synchronize().unwrap().as_slice::<f32>().unwrap(), [3.0; 2]);
        let again = hvd.allreduce("grad.w", [1.0f32; 4], Op::Sum).unwrap();
        assert_eq!(again.as_slice::<f32>().unwrap(), [3.0; 4]);
    });
}

#[test]
fn a_call_that_one_rank_refuses_fails_on_every_rank_with_its_cause() {
    type Call = fn(&Horovod, bool) -> phalanx::Result<()>;
    // Whether the rank refuses it.
    let calls: [Call; 6] = [
        |hvd, is_wrong| {
            let root = Rank::new(if is_wrong { 9 } else { 0 });
            hvd.broadcast("t", [1.0f32], root).map(drop)
        },
        |hvd, is_wrong| {
            let root = Rank::new(if is_wrong { 9 } else { 0 });
            hvd.broadcast_object("t", Some(&7u8), root).map(drop)
        },
        |hvd, is_wrong| {
            let tensor = if is_wrong { Tensor::from([1i32]) } else { Tensor::from([1.0f32]) };
            hvd.allreduce("t", tensor, Op::Average).map(drop)
        },
        |hvd, is_wrong| {
            let tensor = if is_wrong { Tensor::scalar(1.0f32) } else { Tensor::from([1.0f32]) };
            hvd.allgather("t", tensor).map(drop)
        },
        |hvd, is_wrong| {
            let splits = [1, usize::from(!is_wrong)];
            hvd.alltoall("t", [0u8; 2], Some(&splits[..])).map(drop)
        },
        |hvd, is_wrong| {
            let values = Tensor::from([1.0f32, 2.0]).reshaped([1, 2])?;
            let gradient = SparseGradient { indices: vec![0], values };
            hvd.allreduce_sparse("t", gradient, if is_wrong { Op::Max } else { Op::Sum }).map(drop)
        },
    ];
    let causes = [
        "root 9 is outside a world of 2",
        "root 9 is outside a world of 2",
        "average is not defined for i32",
        "allgather of a scalar",
        "do not divide 2 rows",
        "max is not defined for sparse gradients",
    ];
    let options = Options { stall_shutdown_time: Some(Duration::from_secs(30)), ..Options::default() };
    for (call, cause) in calls.into_iter().zip(causes) {
        ranks(2, Fabric::InProcess, &options, |hvd| {
            let is_wrong = hvd.rank().get() == 1;
            // From now on the ranks know the name.
            call(hvd, false).unwrap();
            let error = call(hvd, is_wrong).unwrap_err();
            assert!(error.to_string().contains(cause), "{error}");
            assert_eq!((error.is_invalid_argument(), error.is_mismatch()), (is_wrong, !is_wrong), "{error}");
            if !is_wrong {
                assert!(error.to_string().contains("rank 1 cannot take part"), "{error}");
                assert_eq!(error.peer(), Some(Rank::new(1)));
            }
            call(hvd, false).unwrap();
        });
    }
}

#[test]
fn parameters_of_a_root_that_one_rank_alone_names_fail_on_every_rank() {
    let options = Options { stall_shutdown_time: Some(Duration::from_secs(30)), ..Options::default() };
    ranks(2, Fabric::InProcess, &options, |hvd| {
        let broadcast = |root| {
            let (mut a, mut b) = ([hvd.rank().get() as f32], [hvd.rank().get() as f32]);
            let outcome = hvd.broadcast_parameters([("a", &mut a[..]), ("b", &mut b[..])], Rank::new(root));
            outcome.map(|()| (a, b))
        };
        let error = broadcast(if hvd.rank().is_main() { 9 } else { 1 }).unwrap_err();
        assert!(error.to_string().contains("root 9 is outside a world of 2"), "{error}");
        assert_eq!(broadcast(1).unwrap(), ([1.0], [1.0]));
    });
}

#[test]
fn a_name_is_in_flight_once() {
    ranks(2, Fabric::InProcess, &Options::default(), |hvd| {
        if hvd.rank().is_main() {
            let first = hvd.allreduce_async("x", [1.0f32], Op::Sum).unwrap();
            let second = hvd.allreduce_async("x", [1.0f32], Op::Sum).unwrap_err();
            assert!(
                second.is_invalid_argument() && second.to_string().contains(r#""x" is in flight"#),
                "{second}"
            );
            assert!(!first.poll());
            hvd.allreduce("ready", [1.0f32], Op::Sum).unwrap();
            first.synchronize().unwrap();
        } else {
            hvd.allreduce("ready", [1.0f32], Op::Sum).unwrap();
            hvd.allreduce("x", [1.0f32], Op::Sum).unwrap();
        }
        assert!(hvd.allreduce("", [1.0f32], Op::Sum).unwrap_err().is_invalid_argument());
        assert!(hvd.allreduce("x", [1i32], Op::Average).unwrap_err().is_invalid_argument());
    });
}

/// Runs a world of three in which rank 1 does `odd`, while the others wait for it; it is told how many of them have submitted. Returns their errors, and what they get
/// afterwards.
fn without_rank_1(options: &Options, odd: impl Fn(Horovod, &AtomicUsize) + Sync) -> Vec<(Error, Error)> {
    let started = Instant::now();
    let submitted = AtomicUsize::new(0);
    let all_are_here = Barrier::new(3);
    let told = run(3, Fabric::SharedMemory, |group| {
        let hvd = Horovod::new(&group, options.clone()).unwrap();
        hvd.barrier().unwrap();
        // The rank that ends the job must not end that barrier, in which others may still be.
        all_are_here.wait();
        if hvd.rank().get() == 1 {
            odd(hvd, &submitted);
            return None;
        }
        // The job may have ended before the first one.
        let submit = |index| hvd.allreduce_async(&format!("t{index}"), [1.0f32], Op::Sum);
        let handles: Vec<_> = (0..3).map(submit).collect();
        submitted.fetch_add(1, Ordering::Relaxed);
        let outcomes = handles.into_iter().map(|handle| handle.and_then(Handle::synchronize));
        let mut errors: Vec<Error> = outcomes.map(Result::unwrap_err).collect();
        let first = errors[0].to_string();
        assert!(
            errors.iter().all(|error| error.to_string() == first),
            "one cause for every handle: {errors:?}"
        );
        let later = match hvd.allreduce("later", [1.0f32], Op::Sum) {
            Err(error) => error,
            Ok(_) => unreachable!("the job has ended"),
        };
        Some((errors.remove(0), later))
    });
    assert!(started.elapsed() < Duration::from_secs(60));
    told.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_panics_is_named_by_every_handle() {
    let told = without_rank_1(&Options::default(), |hvd, _| {
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _hvd = hvd;
            std::panic::resume_unwind(Box::new("the test's own panic"));
        }));
        assert!(panicked.is_err());
    });
    for (error, later) in told {
        assert!(error.to_string().contains("rank 1 panicked"), "{error}");
        assert_eq!(later.to_string(), error.to_string());
    }
}

/// Memory that panics in Horovod's thread.
struct Broken(Vec<f32>);

impl Broken {
    fn check() {
        if std::thread::current().name() == Some("phalanx-horovod") {
            std::panic::resume_unwind(Box::new("the memory is gone"));
        }
    }
}

impl Memory for Broken {
    fn as_bytes(&self) -> &[u8] {
        Self::check();
        Memory::as_bytes(&self.0)
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        Self::check();
        Memory::as_bytes_mut(&mut self.0)
    }
}

/// Memory that keeps a handle.
struct Keeps {
    elements: Vec<f32>,
    _handle: Horovod,
}

impl Memory for Keeps {
    fn as_bytes(&self) -> &[u8] {
        Memory::as_bytes(&self.elements)
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        Memory::as_bytes_mut(&mut self.elements)
    }
}

#[test]
fn a_tensor_that_keeps_the_last_handle_ends_the_job_with_its_operation() {
    let is_dropped = Barrier::new(2);
    run(2, Fabric::InProcess, |group| {
        let hvd = Horovod::new(&group, Options::default()).unwrap();
        if hvd.rank().is_main() {
            let memory = Keeps { elements: vec![1.0; 4], _handle: hvd.clone() };
            let tensor = Tensor::from_memory(DType::F32, [4], memory).unwrap();
            drop(hvd.allreduce_async("t", tensor, Op::Sum).unwrap());
            drop(hvd);
            is_dropped.wait();
            return;
        }
        is_dropped.wait();
        let sum = hvd.allreduce("t", [2.0f32; 4], Op::Sum).unwrap();
        assert_eq!(sum.as_slice::<f32>().unwrap(), [3.0; 4]);
        let error = hvd.allreduce("later", [1.0f32], Op::Sum).unwrap_err().to_string();
        assert!(error.contains("rank 0 has shut Horovod down"), "{error}");
    });
}

#[test]
fn a_panic_of_horovod_s_thread_is_the_first_cause_of_every_operation_on_every_rank() {
    type Submit = fn(&Horovod, Tensor) -> phalanx::Result<()>;
    let operations: [Submit; 5] = [
        |hvd, tensor| hvd.allreduce("t", tensor, Op::Sum).map(drop),
        |hvd, tensor| hvd.allgather("t", tensor).map(drop),
        |hvd, tensor| hvd.broadcast("t", tensor, Rank::MAIN).map(drop),
        |hvd, tensor| hvd.alltoall("t", tensor, None).map(drop),
        |hvd, tensor| hvd.reducescatter("t", tensor, Op::Sum).map(drop),
    ];
    for (index, operation) in operations.into_iter().enumerate() {
        let started = Instant::now();
        run(2, Fabric::SharedMemory, |group| {
            let hvd = Horovod::new(&group, Options::default()).unwrap();
            let waiting =
                hvd.allreduce_async(&format!("of rank {} alone", hvd.rank()), [1i32], Op::Sum).unwrap();
            let data = vec![1.0f32; 4];
            let tensor = match hvd.rank().get() {
                1 => Tensor::from_memory(DType::F32, [4], Broken(data)).unwrap(),
                _ => data.into(),
            };
            let errors = [
                operation(&hvd, tensor).unwrap_err(),
                waiting.synchronize().unwrap_err(),
                hvd.barrier().unwrap_err(),
                hvd.failure().unwrap(),
            ];
            for error in errors {
                let expected = "Horovod's thread of rank 1 panicked: the memory is gone";
                assert!(error.to_string().contains(expected), "operation {index}: {error}");
            }
        });
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn options_of_rank_0_that_are_not_valid_are_an_error_on_every_rank() {
    run(2, Fabric::InProcess, |group| {
        let cycle_time = Duration::from_secs(if group.rank().is_main() { 11 } else { 1 });
        let error = Horovod::new(&group, Options { cycle_time, ..Options::default() }).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("cycle_time is 11s"), "{error}");
    });
}

#[test]
fn a_long_cycle_holds_up_neither_a_timeline_nor_a_shutdown() {
    run(2, Fabric::InProcess, |group| {
        let options = Options { cycle_time: Duration::from_secs(10), ..Options::default() };
        let hvd = Horovod::new(&group, options).unwrap();
        std::thread::sleep(Duration::from_millis(200)); // the first cycle
        let started = Instant::now();
        hvd.stop_timeline().unwrap();
        drop(hvd);
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    });
}

#[test]
fn a_rank_that_leaves_is_named_by_every_handle() {
    for (error, later) in without_rank_1(&Options::default(), |hvd, _| drop(hvd)) {
        assert_eq!(error.peer(), Some(Rank::new(1)), "{error}");
        assert!(error.to_string().contains("rank 1 has shut Horovod down"), "{error}");
        assert_eq!(later.to_string(), error.to_string());
    }
}

#[test]
fn the_cause_with_which_a_rank_ends_the_job_is_that_of_every_handle() {
    let told = without_rank_1(&Options::default(), |hvd, _| {
        hvd.abort(Error::aborted("a sample cannot be read"));
    });
    for (error, later) in told {
        assert!(error.is_aborted() && error.rank() == Some(Rank::new(1)), "{error}");
        assert!(error.to_string().contains("a sample cannot be read"), "{error}");
        assert_eq!(later.to_string(), error.to_string());
    }
}

#[test]
fn the_end_of_the_job_ends_the_process_sets_of_the_rank_and_no_other() {
    let all_are_here = Barrier::new(3);
    run(3, Fabric::SharedMemory, |group| {
        let hvd = Horovod::new(&group, Options::default()).unwrap();
        let set_of = |ranks: [u32; 2]| hvd.add_process_set(&ranks.map(Rank::new)).unwrap();
        let (with_rank_1, without) = (set_of([1, 2]), set_of([0, 2]));
        hvd.barrier().unwrap();
        // The rank that ends the job must not end that barrier, in which others may still be.
        all_are_here.wait();
        if hvd.rank().get() == 1 {
            hvd.abort(Error::aborted("a sample cannot be read"));
        }
        let sum = |set: &Horovod| set.allreduce("x", [1.0f32], Op::Sum).map(drop);
        if let Some(set) = &with_rank_1 {
            // Rank 2 waits here for what rank 1 does not submit.
            let outcome = if hvd.rank().get() == 1 { set.barrier() } else { sum(set) };
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("a sample cannot be read"), "{error}");
        }
        without.as_ref().map_or(Ok(()), sum).unwrap();
        assert!(hvd.barrier().unwrap_err().to_string().contains("a sample cannot be read"));
    });
}

#[test]
fn tensors_that_a_rank_never_submits_are_named_with_the_rank() {
    let options = Options {
        stall_check_time: Some(Duration::from_millis(200)),
        stall_shutdown_time: Some(Duration::from_secs(5)),
        ..Options::default()
    };
    let told = without_rank_1(&options, |hvd, submitted| {
        // What has waited longest is named first.
        let begun = Instant::now();
        while submitted.load(Ordering::Relaxed) < 2 {
            assert!(begun.elapsed() < Duration::from_secs(30), "the others submit nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = hvd.allreduce("of rank 1 alone", [1.0f32], Op::Sum).unwrap_err();
        assert!(error.is_timeout(), "{error}");
    });
    for (error, _) in told {
        assert!(error.is_timeout(), "{error}");
        assert!(error.to_string().contains(r#""t0" (submitted by ranks 0, 2; missing: rank 1)"#), "{error}");
    }
}
