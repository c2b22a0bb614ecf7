//! A world of three in which any operation fails, and what two of them make of it.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::fake::FakeGroup;
use super::super::hooks::{PowerSgd, PowerSgdOptions};
use super::super::{ParameterSpec, ReducerOptions};
use super::*;
use crate::dtype::DType;
use crate::group::{Communicator, GroupHandle};
use crate::rank::Rank;

const SIZES: [usize; 4] = [3, 5, 2, 7];

/// A reducer, and the handle by which it goes from `group` to another.
fn reducer(group: &FakeGroup, options: ReducerOptions) -> (Reducer, GroupHandle) {
    let handle = GroupHandle::new(group.clone());
    let spec = |(index, size): (usize, &usize)| ParameterSpec::new(format!("p{index}"), [*size], DType::F32);
    let parameters = SIZES.iter().enumerate().map(spec).collect();
    let options = options.bucket_cap_mb(24.0 / (1 << 20) as f64);
    (Reducer::new(Arc::new(handle.clone()), parameters, options).unwrap(), handle)
}

fn gradient(rank: Rank, index: usize, step: usize) -> Vec<f32> {
    (0..SIZES[index]).map(|element| ((rank.index() + 2) * (index + 3 + 5 * step) + element) as f32).collect()
}

fn average(ranks: u32, index: usize, step: usize) -> Vec<f32> {
    let mut sum = vec![0.0; SIZES[index]];
    for rank in 0..ranks {
        sum.iter_mut().zip(gradient(Rank::new(rank), index, step)).for_each(|(sum, part)| *sum += part);
    }
    sum.into_iter().map(|sum| sum / ranks as f32).collect()
}

/// Backward, with gradients of the parameters in `order`, whatever becomes of the group.
fn backward(reducer: &mut Reducer, rank: Rank, step: usize, order: &[usize]) {
    reducer.keep_gradients().unwrap();
    reducer.start().unwrap();
    for index in order {
        reducer.ready(*index, bytemuck::cast_slice(&gradient(rank, *index, step))).unwrap();
    }
}

fn averages(reducer: &Reducer) -> Vec<Option<Vec<f32>>> {
    let floats = |bytes: &[u8]| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    (0..SIZES.len()).map(|index| reducer.gradient(index).unwrap().map(floats)).collect()
}

fn expected(ranks: u32, step: usize, unused: &[usize]) -> Vec<Option<Vec<f32>>> {
    (0..SIZES.len()).map(|index| (!unused.contains(&index)).then(|| average(ranks, index, step))).collect()
}

/// The rank's body, on a thread of its own for each group of `worlds`.
fn on_ranks(worlds: [u32; 2], body: impl Fn(Arc<FakeGroup>, Option<Arc<FakeGroup>>) + Sync) {
    let [first, second] = worlds.map(FakeGroup::world);
    std::thread::scope(|scope| {
        for (index, group) in first.into_iter().enumerate() {
            let (next, body) = (second.get(index).cloned(), &body);
            scope.spawn(move || body(group, next));
        }
    });
}

fn options(kind: u8) -> ReducerOptions {
    match kind {
        0 => ReducerOptions::default(),
        1 => ReducerOptions::default().find_unused_parameters(true),
        _ => ReducerOptions::default().static_graph(true),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_operation_fails_the_others_average_what_they_have(
        fails_in in 0..2_usize, skip in 0..6_usize, kind in 0..3_u8, survivors in 1..3_u32, its_own in any::<bool>(),
    ) {
        let used: &[usize] = if kind == 0 { &[3, 2, 1, 0] } else { &[3, 1, 0] };
        let unused: &[usize] = if kind == 0 { &[] } else { &[2] };
        on_ranks([3, survivors], |group, next| {
            let rank = group.rank();
            let (mut reducer, handle) = reducer(&group, options(kind));
            for step in 0..fails_in {
                backward(&mut reducer, rank, step, used);
                reducer.finish().unwrap();
                assert_eq!(averages(&reducer), expected(3, step, unused));
            }
            // Rebuilds may come first, as the second step begins: their failure is no step's.
            reducer.keep_gradients().unwrap();
            reducer.start().unwrap();
            // A rank that is lost, or one that ends the group for a reason of its own.
            let error = match its_own {
                false => Error::timeout("nobody has heard of rank 2"),
                true => Error::out_of_memory("no memory for a bucket").at(Rank::new(2), "there"),
            };
            group.fail_after(skip, error.clone());
            for index in used {
                let ready = reducer.ready(*index, bytemuck::cast_slice(&gradient(rank, *index, fails_in)));
                assert!(ready.is_ok() || (its_own && rank.get() == 2), "{ready:?}");
            }
            // It fails, or succeeds before what comes behind it fails.
            let first = reducer.finish();
            assert!(first.as_ref().is_err_and(|failure| failure.kind() == error.kind()) || averages(&reducer) == expected(3, fails_in, unused));
            let Some(next) = next else { return };
            handle.rebind((*next).clone());
            reducer.replay().unwrap();
            assert_eq!(averages(&reducer), expected(survivors, fails_in, unused));
            for step in fails_in + 1..fails_in + 3 {
                backward(&mut reducer, rank, step, used);
                reducer.finish().unwrap();
                assert_eq!(averages(&reducer), expected(survivors, step, unused));
            }
        });
    }
}

#[test]
fn averages_outlive_a_change_of_the_group_between_steps() {
    on_ranks([3, 2], |group, next| {
        let rank = group.rank();
        let (mut reducer, handle) = reducer(&group, ReducerOptions::default());
        backward(&mut reducer, rank, 0, &[3, 2, 1, 0]);
        assert!(reducer.regrouped().unwrap_err().is_invalid_argument());
        reducer.finish().unwrap();
        let Some(next) = next else { return };
        handle.rebind((*next).clone());
        reducer.regrouped().unwrap();
        assert_eq!(averages(&reducer), expected(3, 0, &[]));
        backward(&mut reducer, rank, 1, &[0, 1, 2, 3]);
        reducer.finish().unwrap();
        assert_eq!(averages(&reducer), expected(2, 1, &[]));
    });
}

#[test]
fn ranks_that_learn_of_a_group_a_step_apart_go_on_together() {
    const LAST: usize = 40; // The ranks have exchanged their times by then.
    on_ranks([3, 2], |group, next| {
        let rank = group.rank();
        let (mut reducer, handle) = reducer(&group, ReducerOptions::default());
        for step in 0..=LAST {
            backward(&mut reducer, rank, step, &[3, 2, 1, 0]);
            reducer.finish().unwrap();
        }
        assert_eq!(reducer.step_times().len(), 3);
        let Some(next) = next else { return };
        // Rank 0 is a step ahead, and cut off there; rank 1 learns of the next group between the steps.
        if rank.is_main() {
            backward(&mut reducer, rank, LAST + 1, &[3, 2, 1, 0]);
            group.abort(Error::timeout("nobody has heard of rank 2"));
            assert!(reducer.finish().is_err());
            handle.rebind((*next).clone());
            reducer.replay().unwrap();
        } else {
            handle.rebind((*next).clone());
        }
        reducer.regrouped().unwrap();
        for step in LAST + 1 + usize::from(rank.is_main())..LAST + 80 {
            backward(&mut reducer, rank, step, &[3, 2, 1, 0]);
            reducer.finish().unwrap();
            assert_eq!(averages(&reducer), expected(2, step, &[]), "step {step} on rank {rank}");
            assert!(reducer.step_times().is_empty(), "the times are those of the last group");
        }
    });
}

#[test]
fn what_could_not_be_averaged_again_is_refused() {
    let group = FakeGroup::world(1).remove(0);
    let (mut keeping, _) = reducer(&group, ReducerOptions::default());
    keeping.keep_gradients().unwrap();
    assert!(keeping.shard(vec![Rank::MAIN; 4]).unwrap_err().is_invalid_argument());
    let hook = Box::new(PowerSgd::new(PowerSgdOptions::default()).unwrap());
    assert!(keeping.register_hook(hook).unwrap_err().to_string().contains("keeps something"));
    assert!(keeping.replay().unwrap_err().to_string().contains("not kept"), "before a step has ended");
    let spec = vec![ParameterSpec::new("p", [1], DType::F32)];
    let mut other = Reducer::new(group.clone(), spec, ReducerOptions::default()).unwrap();
    other.start().unwrap();
    other.ready(0, &[0; 4]).unwrap();
    other.release();
    other.finish().unwrap();
    assert_eq!(
        other.gradient(0).unwrap(),
        Some([0; 4].as_slice()),
        "memory is given back between steps only"
    );
    assert!(other.replay().unwrap_err().to_string().contains("not kept"));
    other.keep_gradients().unwrap();
    assert!(other.replay().unwrap_err().to_string().contains("not kept"));
    // Between steps it goes to another group all the same, unless the averages are those of one rank each.
    other.regrouped().unwrap();
    on_ranks([2, 1], |group, _| {
        let spec = vec![ParameterSpec::new("p", [1], DType::F32)];
        let mut sharded = Reducer::new(group.clone(), spec, ReducerOptions::default()).unwrap();
        sharded.shard(vec![Rank::MAIN]).unwrap();
        assert!(sharded.regrouped().unwrap_err().remedy().is_some());
    });
}
