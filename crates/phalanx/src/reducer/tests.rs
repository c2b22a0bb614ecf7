//! The reducer on several ranks, over a group of threads.

use std::path::Path;

use proptest::prelude::*;

use super::fake::{Call, FakeGroup, Kind, run};
use super::*;
use crate::group::GroupHandle;

const AVERAGE: Kind = Kind::AllReduce(ReduceOp::Avg);

/// Options with buckets of `elements` f32.
fn buckets_of(elements: usize) -> ReducerOptions {
    ReducerOptions::default().bucket_cap_mb((elements * 4) as f64 / (1 << 20) as f64)
}

fn parameters(sizes: &[usize]) -> Vec<ParameterSpec> {
    let spec = |(index, &size): (usize, &usize)| ParameterSpec::new(format!("p{index}"), [size], DType::F32);
    sizes.iter().enumerate().map(spec).collect()
}

/// The gradient that rank `rank` has for parameter `index` in step `step`: small integers, so that averages are exact.
fn gradient(rank: Rank, index: usize, step: usize, size: usize) -> Vec<f32> {
    (0..size).map(|element| ((rank.index() + 1) * (index + 1 + 7 * step) + element) as f32).collect()
}

fn expected(ranks: u32, index: usize, step: usize, size: usize) -> Vec<f32> {
    let mut sum = vec![0.0; size];
    for rank in 0..ranks {
        let part = gradient(Rank::new(rank), index, step, size);
        sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    sum.into_iter().map(|sum| sum / ranks as f32).collect()
}

fn give(reducer: &mut Reducer, rank: Rank, step: usize, order: &[usize]) -> Result<()> {
    for &index in order {
        let size = reducer.parameters()[index].elements();
        reducer.ready(index, bytemuck::cast_slice(&gradient(rank, index, step, size)))?;
    }
    Ok(())
}

fn one_step(reducer: &mut Reducer, rank: Rank, step: usize, order: &[usize]) -> Result<()> {
    reducer.start()?;
    give(reducer, rank, step, order)?;
    reducer.finish()
}

fn floats(reducer: &Reducer, index: usize) -> Vec<f32> {
    let bytes = reducer.gradient(index).unwrap().unwrap();
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

fn averages(group: &FakeGroup) -> Vec<Call> {
    group.calls().into_iter().filter(|call| call.kind == AVERAGE).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_order_of_gradients_on_any_rank_gives_the_average_in_the_same_order_of_buckets(
        sizes in prop::collection::vec(0usize..20, 1..12),
        ranks in 1u32..5,
        cap in 1usize..40,
        shuffles in prop::collection::vec(any::<prop::sample::Selector>(), 15),
    ) {
        let launches = run(ranks, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group.clone(), parameters(&sizes), buckets_of(cap)).unwrap();
            let mut buckets = vec![reducer.bucket_bytes()];
            for step in 0..3 {
                let mut left: Vec<usize> = (0..sizes.len()).collect();
                let mut order = Vec::new();
                while !left.is_empty() {
                    let next = *shuffles[rank.index() * 3 + step].select(&left);
                    left.retain(|&index| index != next);
                    order.push(next);
                }
                one_step(&mut reducer, rank, step, &order).unwrap();
                for (index, &size) in sizes.iter().enumerate() {
                    assert_eq!(floats(&reducer, index), expected(ranks, index, step, size));
                }
                buckets.push(reducer.bucket_bytes());
            }
            assert_eq!(buckets[2], buckets[3], "rebuilt once");
            let expected: Vec<usize> = buckets[1..].concat();
            let launched: Vec<usize> = averages(&group).iter().map(|call| call.elements * 4).collect();
            assert_eq!(launched, if ranks == 1 { Vec::new() } else { expected });
            group.calls()
        });
        prop_assert!(launches.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn buckets_are_rebuilt_once_in_the_order_of_rank_0_and_their_memory_is_kept() {
    let allocations = run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[1, 2, 3, 4]), buckets_of(5)).unwrap();
        assert_eq!(reducer.bucket_bytes(), [16, 20, 4]);
        let order = if rank.is_main() { [0, 1, 2, 3] } else { [3, 2, 1, 0] };
        let mut allocations = Vec::new();
        for step in 0..20 {
            one_step(&mut reducer, rank, step, &order).unwrap();
            allocations.push(group.allocations());
        }
        assert_eq!(reducer.bucket_bytes(), [12, 12, 16]);
        allocations
    });
    for allocations in allocations {
        // Three buckets and the order that rank 0 sends.
        assert_eq!(allocations[1] - allocations[0], 4);
        assert!(allocations[1..].windows(2).all(|pair| pair[0] == pair[1]), "{allocations:?}");
    }
}

#[test]
fn buckets_leave_while_backward_still_runs() {
    let group = FakeGroup::world(2).swap_remove(0);
    let plan = parameters(&[8, 8, 8]);
    // The second rank never answers, which only a wait would notice.
    let mut reducer = without_verification(group.clone(), plan, buckets_of(8));
    reducer.start().unwrap();
    give(&mut reducer, Rank::MAIN, 0, &[1]).unwrap();
    assert_eq!(averages(&group).len(), 0, "the plan's first bucket holds parameter 2");
    give(&mut reducer, Rank::MAIN, 0, &[2]).unwrap();
    assert_eq!(averages(&group).len(), 2);
}

fn without_verification(
    group: Arc<FakeGroup>,
    parameters: Vec<ParameterSpec>,
    options: ReducerOptions,
) -> Reducer {
    let handle = GroupHandle::new((*FakeGroup::world(1).swap_remove(0)).clone());
    let mut reducer = Reducer::new(Arc::new(handle.clone()), parameters, options).unwrap();
    handle.rebind((*group).clone());
    reducer.regrouped().unwrap();
    reducer
}

#[test]
fn a_parameter_without_gradient_is_named_on_every_rank() {
    let errors = run(3, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[4, 4, 4]), buckets_of(4)).unwrap();
        let order: &[usize] = if rank.get() == 1 { &[2, 0] } else { &[2, 1, 0] };
        let error = one_step(&mut reducer, rank, 0, order).unwrap_err();
        assert_eq!(reducer.start().unwrap_err().to_string(), error.to_string(), "the failure is final");
        assert!(reducer.gradient(0).is_err());
        error.to_string()
    });
    for error in errors {
        assert!(error.contains("rank 1") && error.contains("`p1` (f32 [4])"), "{error}");
        assert!(error.contains("1 of 3") && error.contains("find_unused_parameters"), "{error}");
    }
}

#[test]
fn unused_parameters_count_as_zero_and_stay_without_gradient_if_no_rank_used_them() {
    run(2, |group| {
        let rank = group.rank();
        let options = buckets_of(4).find_unused_parameters(true);
        let mut reducer = Reducer::new(group, parameters(&[4, 4, 4]), options).unwrap();
        one_step(&mut reducer, rank, 0, &[0, 1, 2]).unwrap();
        for step in 1..4 {
            let order: &[usize] = if rank.is_main() { &[0] } else { &[2, 0] };
            one_step(&mut reducer, rank, step, order).unwrap();
            assert_eq!(floats(&reducer, 0), expected(2, 0, step, 4));
            assert_eq!(reducer.gradient(1).unwrap(), None);
            let half: Vec<f32> = gradient(Rank::new(1), 2, step, 4).iter().map(|part| part / 2.0).collect();
            assert_eq!(floats(&reducer, 2), half);
        }
    });
}

#[test]
fn a_static_graph_learns_in_the_first_step_and_holds_the_program_to_it() {
    for ranks in [2, 3, 4] {
        let messages = run(ranks, |group| {
            let rank = group.rank();
            let options = buckets_of(4).static_graph(true);
            let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4, 4]), options).unwrap();
            // Parameter 1 is used nowhere, parameter 2 on all ranks but rank 0.
            let order: &[usize] = if rank.is_main() { &[0] } else { &[2, 0] };
            let mut calls = Vec::new();
            for step in 0..4 {
                let before = group.calls().len();
                one_step(&mut reducer, rank, step, order).unwrap();
                calls.push(group.calls().len() - before);
                assert_eq!(floats(&reducer, 0), expected(ranks, 0, step, 4));
                assert_eq!(reducer.gradient(1).unwrap(), None);
                let all = expected(ranks, 2, step, 4);
                let main = gradient(Rank::MAIN, 2, step, 4);
                for (place, average) in floats(&reducer, 2).into_iter().enumerate() {
                    assert!((average - (all[place] - main[place] / ranks as f32)).abs() < 1e-5);
                }
            }
            assert_eq!(calls[2..], [3, 3], "three buckets, and no exchange of who used what");
            reducer.start().unwrap();
            let (gradient, finished) = (reducer.ready(1, &[0; 16]), reducer.finish());
            gradient.and(finished).unwrap_err().to_string()
        });
        assert!(messages.iter().any(|text| text.contains("`p1` (f32 [4])")), "{messages:?}");
    }
    let errors = run(2, |group| {
        let rank = group.rank();
        let options = buckets_of(4).static_graph(true);
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), options).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
        one_step(&mut reducer, rank, 1, if rank.is_main() { &[1] } else { &[1, 0] }).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("`p0` (f32 [4])")), "{errors:?}");
}

#[test]
fn what_an_adapter_keeps_of_unused_parameters_is_averaged_in_a_static_graph() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4).static_graph(true)).unwrap();
        assert!(reducer.accepts_unused());
        // Rank 0 does not use parameter 1.
        let order: &[usize] = if rank.is_main() { &[0] } else { &[1, 0] };
        one_step(&mut reducer, rank, 0, order).unwrap();
        for step in 1..3 {
            let mut asked = Vec::new();
            let kept = [6.0f32; 4];
            reducer
                .start_with(|index, memory| {
                    asked.push(index);
                    memory.copy_from_slice(bytemuck::cast_slice(&kept));
                    Ok(())
                })
                .unwrap();
            assert_eq!(asked, if rank.is_main() { vec![1] } else { Vec::new() });
            assert!(!reducer.accepts_unused());
            give(&mut reducer, rank, step, order).unwrap();
            reducer.finish().unwrap();
            let part = gradient(Rank::new(1), 1, step, 4);
            assert_eq!(floats(&reducer, 1), part.iter().map(|part| (part + 6.0) / 2.0).collect::<Vec<_>>());
        }
    });
}

#[test]
fn averages_that_are_taken_out_are_their_owners() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4]), buckets_of(8)).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
        one_step(&mut reducer, rank, 1, &[1, 0]).unwrap();
        let allocations = group.allocations();
        let mut gradients = reducer.take_gradients().unwrap();
        assert!(reducer.gradient(1).is_err() && reducer.take_gradients().is_err());
        let gradient = gradients[1].as_mut().unwrap();
        one_step(&mut reducer, rank, 2, &[1, 0]).unwrap();
        assert_eq!(group.allocations(), allocations + 1, "memory is taken anew");
        let floats =
            |bytes: &[u8]| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect::<Vec<f32>>();
        assert_eq!(floats(gradient.as_bytes()), expected(2, 1, 1, 4));
        gradient.as_bytes_mut().fill(0);
        assert_eq!(floats(reducer.gradient(1).unwrap().unwrap()), expected(2, 1, 2, 4));
        reducer.release();
        assert!(reducer.gradient(1).is_err());
        one_step(&mut reducer, rank, 3, &[1, 0]).unwrap();
        assert_eq!(group.allocations(), allocations + 2);
    });
}

#[test]
fn averages_that_are_lent_leave_their_memory_to_the_next_step() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4]), buckets_of(8)).unwrap();
        let mut step = 0;
        let mut lend = |reducer: &mut Reducer| {
            step += 1;
            one_step(reducer, rank, step, &[1, 0]).unwrap();
            let gradients = reducer.lend_gradients().unwrap();
            assert!(reducer.gradient(1).is_err() && reducer.lend_gradients().is_err());
            let gradient: &[u8] = gradients[1].as_ref().unwrap().as_bytes();
            assert_eq!(bytemuck::cast_slice::<u8, f32>(gradient), expected(2, 1, step, 4));
            gradients
        };
        drop(lend(&mut reducer));
        drop(lend(&mut reducer)); // In new buckets, in the order of the gradients.
        let allocations = group.allocations();
        drop(lend(&mut reducer));
        assert_eq!(group.allocations(), allocations);
        let (first, second) = (lend(&mut reducer), lend(&mut reducer));
        assert_eq!(group.allocations(), allocations + 1, "only what was kept needs other memory");
        drop((lend(&mut reducer), first, second));
        assert_eq!(group.allocations(), allocations + 2);

        // Somebody who keeps gradients for the third time gets copies from then on.
        let mut kept = Vec::new();
        for _ in 0..6 {
            kept = lend(&mut reducer);
        }
        assert_eq!(group.allocations(), allocations + 3);
        reducer.release();
        drop(lend(&mut reducer));
        assert_eq!(group.allocations(), allocations + 4, "released memory is gone");
        drop(kept);
    });
}

#[test]
fn a_view_is_a_gradient_s_place_from_step_to_step() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(8)).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
        one_step(&mut reducer, rank, 1, &[1, 0]).unwrap();
        let mut keepers = Vec::new();
        let mut place = |reducer: &mut Reducer| {
            let (bytes, keeper) = reducer.gradient_view(1).unwrap().unwrap();
            keepers.push(keeper);
            bytes.as_ptr()
        };
        let first = place(&mut reducer);
        one_step(&mut reducer, rank, 2, &[1, 0]).unwrap();
        assert_eq!(place(&mut reducer), first);
        assert_eq!(floats(&reducer, 1), expected(2, 1, 2, 4));
        // What backward has written there itself is averaged as it is.
        reducer.start().unwrap();
        give(&mut reducer, rank, 3, &[0]).unwrap();
        let write = |memory: &mut [u8]| {
            assert_eq!(memory.as_ptr(), first);
            Ok(())
        };
        reducer.ready_with(1, write).unwrap();
        reducer.finish().unwrap();
        assert_eq!(floats(&reducer, 1), expected(2, 1, 2, 4));
        // Released, the memory is taken anew; the kept one is nobody else's.
        reducer.release();
        assert!(reducer.gradient_view(1).is_err());
        one_step(&mut reducer, rank, 4, &[1, 0]).unwrap();
        assert_ne!(place(&mut reducer), first);
    });
}

#[test]
fn different_models_and_options_are_named_on_every_rank() {
    let name = |rank: Rank| ParameterSpec::new("head.weight", [10, 4 + rank.index()], DType::F32);
    let failed = |make: &(dyn Fn(Rank) -> (Vec<ParameterSpec>, ReducerOptions) + Sync), parts: &[&str]| {
        let errors = run(3, |group| {
            let (parameters, options) = make(group.rank());
            Reducer::new(group, parameters, options).err().unwrap()
        });
        for error in errors {
            assert!(error.is_mismatch(), "{error}");
            let message = error.to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
            assert!(message.contains("rank 0") && message.contains("rank 1"), "{message}");
        }
    };
    let options = ReducerOptions::default();
    failed(
        &|rank| ([parameters(&[3]), vec![name(rank)]].concat(), ReducerOptions::default()),
        &["parameter 1", "`head.weight` (f32 [10, 4])", "`head.weight` (f32 [10, 5])"],
    );
    let some_have_more = |rank: Rank| parameters(&[3, 4][..if rank.get() == 1 { 1 } else { 2 }]);
    failed(
        &|rank| (some_have_more(rank), options.clone()),
        &["`p1` (f32 [4])", "none (it has 1 parameters)"],
    );
    let none_on_one = |rank: Rank| if rank.get() == 1 { Vec::new() } else { parameters(&[3]) };
    failed(&|rank| (none_on_one(rank), options.clone()), &["none (it has 0 parameters)"]);
    let wide = |rank: Rank| if rank.is_main() { DType::F32 } else { DType::F64 };
    failed(&|rank| (vec![ParameterSpec::new("p", [1], wide(rank))], options.clone()), &["f32", "f64"]);
    failed(
        &|rank| (parameters(&[3]), options.clone().bucket_cap_mb(f64::from(rank.get().min(1)) + 1.0)),
        &["bucket_cap_mb", "is 1 on", "and 2 on"],
    );
}

#[test]
fn a_model_without_trainable_parameter_or_with_integers_is_refused() {
    for ranks in [1, 2] {
        run(ranks, |group| {
            let error = Reducer::new(group, Vec::new(), ReducerOptions::default()).err().unwrap();
            assert!(error.to_string().contains("no parameter needs a gradient"), "{error}");
        });
        run(ranks, |group| {
            let integers = vec![ParameterSpec::new("ids", [3], DType::I64)];
            let error = Reducer::new(group, integers, ReducerOptions::default()).err().unwrap();
            assert!(error.to_string().contains("`ids` (i64 [3])"), "{error}");
        });
        run(ranks, |group| {
            let huge = vec![ParameterSpec::new("huge", [usize::MAX / 2, 4], DType::F32)];
            assert!(Reducer::new(group, huge, ReducerOptions::default()).is_err());
        });
    }
}

#[test]
fn misuse_is_an_error_that_names_the_parameter_and_ends_the_group() {
    let errors = run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4)).unwrap();
        assert!(
            reducer.finish().is_err() && reducer.ready(0, &[0; 16]).is_err() && reducer.gradient(0).is_err()
        );
        reducer.start().unwrap();
        reducer.ready(0, &[0; 16]).unwrap();
        if rank.is_main() { reducer.finish().err() } else { reducer.ready(0, &[0; 16]).err() }
    });
    // Rank 0 lacks a gradient itself; whichever rank ends the group first, nobody waits.
    assert!(
        errors[1].as_ref().is_some_and(|error| error.to_string().contains("`p0` (f32 [4])")),
        "{errors:?}"
    );
    assert!(errors[0].is_some());

    let fresh = || {
        let group = FakeGroup::world(1).swap_remove(0);
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4)).unwrap();
        reducer.start().unwrap();
        reducer
    };
    assert!(fresh().ready(0, &[0; 15]).unwrap_err().to_string().contains("15 B, not 16 B"));
    assert!(fresh().ready(2, &[0; 16]).unwrap_err().is_invalid_argument());
    assert!(fresh().start().unwrap_err().is_invalid_argument());
    let unwritten = fresh().ready_with(0, |_| Err(Error::aborted("no memory to read"))).unwrap_err();
    assert!(unwritten.is_aborted());
}

#[test]
fn a_failed_averaging_reaches_finish_and_stays() {
    let errors = run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4, 4]), buckets_of(4)).unwrap();
        group.fail_after(1, Error::timeout("the fault of the test"));
        let error = one_step(&mut reducer, rank, 0, &[2, 1, 0]).unwrap_err();
        assert!(reducer.finish().unwrap_err().is_timeout());
        error
    });
    assert!(errors.iter().all(Error::is_timeout), "{errors:?}");
}

#[test]
fn gradients_that_a_hook_s_panic_has_lost_are_an_error() {
    struct Panics;
    impl CommHook for Panics {
        fn describe(&self) -> String {
            "panics".into()
        }
        fn start(&mut self, _: &dyn Communicator, _: hooks::GradBucket) -> Result<hooks::Pending> {
            panic!("the hook's own")
        }
        fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
            Ok(())
        }
    }
    let group = FakeGroup::world(2).swap_remove(0);
    let mut reducer = without_verification(group.clone(), parameters(&[4]), buckets_of(4));
    reducer.hook = Box::new(Panics);
    reducer.start().unwrap();
    let ready = std::panic::AssertUnwindSafe(|| reducer.ready(0, &[0; 16]));
    assert!(std::panic::catch_unwind(ready).is_err());
    let error = reducer.finish().unwrap_err();
    assert!(error.to_string().contains("lost"), "{error}");
    assert_eq!(group.failure().unwrap().to_string(), error.to_string(), "the other rank does not wait");
}

#[test]
fn types_travel_apart_and_each_is_averaged() {
    use half::f16;
    run(2, |group| {
        let spec = |name: &str, dtype| ParameterSpec::new(name, [3], dtype);
        let specs =
            vec![spec("a", DType::F32), spec("b", DType::F16), spec("c", DType::F64), spec("d", DType::F32)];
        let value = group.rank().index() as f32 + 1.0;
        let mut reducer = Reducer::new(group, specs, ReducerOptions::default()).unwrap();
        assert_eq!(reducer.bucket_bytes().len(), 3);
        for _ in 0..3 {
            reducer.start().unwrap();
            reducer.ready(0, bytemuck::bytes_of(&[value; 3])).unwrap();
            reducer.ready(1, bytemuck::bytes_of(&[f16::from_f32(value); 3])).unwrap();
            reducer.ready(2, bytemuck::bytes_of(&[f64::from(value); 3])).unwrap();
            reducer
                .ready_with(3, |memory| {
                    memory.copy_from_slice(bytemuck::bytes_of(&[2.0 * value; 3]));
                    Ok(())
                })
                .unwrap();
            reducer.finish().unwrap();
            assert_eq!(floats(&reducer, 0), [1.5; 3]);
            assert_eq!(reducer.gradient(1).unwrap().unwrap(), bytemuck::bytes_of(&[f16::from_f32(1.5); 3]));
            assert_eq!(reducer.gradient(2).unwrap().unwrap(), bytemuck::bytes_of(&[1.5f64; 3]));
            assert_eq!(floats(&reducer, 3), [3.0; 3]);
        }
    });
}

#[test]
fn state_becomes_that_of_rank_0() {
    let sizes =
        [(DType::F32, 70_000_000), (DType::I64, 24), (DType::F32, 0), (DType::U8, 5), (DType::F32, 12)];
    let calls = run(2, |group| {
        let value = group.rank().get() as u8 + 1;
        let mut memory: Vec<Vec<u8>> = sizes.iter().map(|&(_, len)| vec![value; len]).collect();
        let types = sizes.iter().map(|&(dtype, _)| dtype);
        let mut tensors: Vec<_> =
            memory.iter_mut().zip(types).map(|(bytes, dtype)| StateTensor { dtype, bytes }).collect();
        broadcast_state(&*group, &mut tensors).unwrap();
        assert!(memory.iter().flatten().all(|&byte| byte == 1));
        group.calls()
    });
    let largest = calls[0].iter().map(|call| call.elements * call.dtype.size()).max();
    assert_eq!(calls[0].len(), 5);
    assert_eq!(largest, Some(25 << 20));

    let errors = run(2, |group| {
        let mut bytes = vec![0; if group.rank().is_main() { 7 } else { 8 }];
        broadcast_state(&*group, &mut [StateTensor { dtype: DType::F32, bytes: &mut bytes }]).unwrap_err()
    });
    assert!(errors.iter().all(Error::is_invalid_argument), "{errors:?}");
}

#[test]
fn a_trace_shows_each_bucket_and_backward() {
    let folder = tempfile::tempdir().unwrap();
    let path = |rank: u32| folder.path().join(format!("{rank}.json"));
    run(2, |group| {
        let rank = group.rank();
        let group = group.traced(Trace::to_file(path(rank.get()), rank));
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4)).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
    });
    for rank in 0..2 {
        check_trace(&path(rank));
    }
}

fn check_trace(path: &Path) {
    let document: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = document["traceEvents"].as_array().unwrap();
    let find = |name: &str, bucket: Option<u64>| {
        let is_it =
            |event: &&serde_json::Value| event["name"] == name && event["args"]["bucket"].as_u64() == bucket;
        events.iter().find(is_it).unwrap_or_else(|| panic!("{name} of bucket {bucket:?} is missing"))
    };
    let time = |event: &serde_json::Value| event["ts"].as_f64().unwrap();
    let backward = find("backward", None);
    for bucket in [Some(0), Some(1)] {
        let all_reduce = find("all_reduce", bucket);
        assert!(time(backward) <= time(find("ready", bucket)));
        assert!(time(find("ready", bucket)) <= time(all_reduce));
        assert_eq!(time(find("launched", bucket)), time(all_reduce));
        assert_eq!(all_reduce["args"]["bytes"], 16);
        assert_eq!(all_reduce["args"]["parameters"], 1);
    }
    find("wait for gradients", None);
}

/// Each parameter goes to the rank that its index says.
fn owners(ranks: u32, count: usize) -> Vec<Rank> {
    (0..count).map(|index| Rank::new(index as u32 % ranks)).collect()
}

#[test]
fn sharded_averages_are_their_owner_s_and_updated_parameters_come_back_in_the_same_memory() {
    const SIZES: [usize; 5] = [6, 1, 4, 3, 5];
    run(3, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(8)).unwrap();
        let order = [4, 3, 2, 1, 0];
        one_step(&mut reducer, rank, 0, &order).unwrap();
        reducer.shard(owners(3, SIZES.len())).unwrap();
        assert!(reducer.gradient(0).is_err(), "the averages before are gone");
        let mut taken = 0;
        for step in 1..4 {
            one_step(&mut reducer, rank, step, &order).unwrap();
            for (index, &size) in SIZES.iter().enumerate() {
                if index % 3 == rank.index() {
                    assert_eq!(floats(&reducer, index), expected(3, index, step, size));
                } else {
                    assert_eq!(reducer.gradient(index).unwrap(), None);
                }
            }
            let updated = |index: usize| vec![(index * 10 + step) as f32; SIZES[index]];
            reducer
                .gather_parameters(|put| {
                    (0..SIZES.len()).try_for_each(|index| match index % 3 == rank.index() {
                        true => put(index, bytemuck::cast_slice(&updated(index))),
                        false => put(index, &[]),
                    })
                })
                .unwrap();
            for index in 0..SIZES.len() {
                assert_eq!(
                    reducer.parameter(index).unwrap(),
                    bytemuck::cast_slice::<f32, u8>(&updated(index))
                );
            }
            assert!(reducer.gradient(0).is_err());
            if step == 2 {
                taken = group.allocations();
            }
        }
        assert_eq!(group.allocations(), taken);
        let kinds: Vec<_> = group.calls().iter().rev().take(2).map(|call| call.kind).collect();
        assert_eq!(kinds, [Kind::AllGather; 2]);
        assert!(averages(&group).len() <= 3, "{:?}", averages(&group));
    });
}

#[test]
fn parameters_are_sharded_alike_on_every_rank_or_not_at_all() {
    let errors = run(2, |group| {
        let mut reducer = Reducer::new(group.clone(), parameters(&[2, 2]), buckets_of(8)).unwrap();
        assert!(reducer.gather_parameters(|_| Ok(())).unwrap_err().is_invalid_argument());
        let mine = vec![Rank::MAIN, group.rank()];
        reducer.shard(mine).unwrap_err()
    });
    assert!(errors.iter().all(|error| error.to_string().contains("bucket plans")), "{errors:?}");
    run(2, |group| {
        let mut reducer = Reducer::new(group, parameters(&[2, 2]), buckets_of(8)).unwrap();
        assert!(reducer.shard(vec![Rank::new(2); 2]).unwrap_err().is_invalid_argument());
    });
}
