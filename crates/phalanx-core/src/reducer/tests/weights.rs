//! Ranks that count by their weights.

use super::super::hooks::{Compressed, PostLocalSgd, PowerSgd, PowerSgdOptions};
use super::*;

const SIZES: [usize; 4] = [3, 5, 2, 7];
const ORDER: [usize; 4] = [3, 2, 1, 0];

/// A step whose gradients are those of `loss × weight`: integers, so that sums are exact.
fn weighted_step(reducer: &mut Reducer, rank: Rank, step: usize, weight: u16) -> Result<()> {
    reducer.start_weighted(f64::from(weight))?;
    for index in ORDER {
        let size = reducer.parameters()[index].elements();
        let mut weighted = gradient(rank, index, step, size);
        weighted.iter_mut().for_each(|element| *element *= f32::from(weight));
        reducer.ready(index, bytemuck::cast_slice(&weighted))?;
    }
    reducer.finish()
}

/// `Σ weight·gradient / Σ weight`, in f64.
fn weighted_mean(weights: &[u16], index: usize, step: usize) -> Vec<f64> {
    let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
    let mut sum = vec![0.0; SIZES[index]];
    for (rank, &weight) in weights.iter().enumerate() {
        let part = gradient(Rank::new(rank as u32), index, step, SIZES[index]);
        sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += f64::from(weight) * f64::from(part));
    }
    sum.into_iter().map(|sum| sum / total).collect()
}

fn assert_means(reducer: &Reducer, weights: &[u16], step: usize) -> Vec<Vec<u32>> {
    let check = |index: usize| {
        let ours = floats(reducer, index);
        for (ours, right) in ours.iter().zip(weighted_mean(weights, index, step)) {
            assert!((f64::from(*ours) - right).abs() <= 3e-7 * right.abs(), "{ours} is not {right}");
        }
        ours.into_iter().map(f32::to_bits).collect()
    };
    (0..SIZES.len()).map(check).collect()
}

#[test]
fn each_rank_counts_by_its_weight_with_the_same_bits_everywhere_and_no_call_more() {
    for weights in [&[5, 2][..], &[1, 4096, 37], &[0, 3, 0, 8], &[7]] {
        for cap in [1, 8, 100] {
            let bits = run(weights.len() as u32, |group| {
                let rank = group.rank();
                let mut reducer = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(cap)).unwrap();
                let mut bits = Vec::new();
                for step in 0..4 {
                    let before = group.calls().len();
                    weighted_step(&mut reducer, rank, step, weights[rank.index()]).unwrap();
                    bits.push(assert_means(&reducer, weights, step));
                    let calls = group.calls();
                    let averages = calls[before..].iter().filter(|call| call.kind == AVERAGE);
                    let elements: Vec<usize> = averages.map(|call| call.elements).collect();
                    let mut plan: Vec<usize> = reducer.bucket_bytes().iter().map(|bytes| bytes / 4).collect();
                    plan[0] += 1;
                    assert!(weights.len() == 1 || elements == plan, "{elements:?} are sent, not {plan:?}");
                }
                bits
            });
            assert!(bits.iter().all(|other| *other == bits[0]));
        }
    }
}

#[test]
fn weights_of_one_give_the_bits_of_plain_averages_and_steps_of_both_kinds_may_follow_each_other() {
    run(3, |group| {
        let rank = group.rank();
        let mut weighted = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(8)).unwrap();
        let mut plain = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(8)).unwrap();
        for step in 0..6 {
            match step {
                2 | 5 => one_step(&mut weighted, rank, step, &ORDER).unwrap(),
                _ => weighted_step(&mut weighted, rank, step, 1).unwrap(),
            }
            one_step(&mut plain, rank, step, &ORDER).unwrap();
            for index in ORDER {
                assert_eq!(weighted.gradient(index).unwrap(), plain.gradient(index).unwrap());
            }
            // With memory that is lent, too.
            drop(weighted.lend_gradients().unwrap());
        }
    });
}

#[test]
fn a_bucket_keeps_its_memory_from_weighted_step_to_weighted_step() {
    run(2, |group| {
        let mut reducer = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(8)).unwrap();
        let mut allocations = Vec::new();
        for step in 0..6 {
            weighted_step(&mut reducer, group.rank(), step, 3).unwrap();
            allocations.push(group.allocations());
        }
        assert!(allocations[1..].iter().all(|count| *count == allocations[1]), "{allocations:?}");
    });
}

#[test]
fn doubles_carry_the_weight_in_their_own_precision() {
    run(2, |group| {
        let rank = group.rank().index();
        let spec = |name: &str, dtype| ParameterSpec::new(name, [2], dtype);
        // The last parameter is in the first bucket.
        for specs in
            [[spec("a", DType::F32), spec("b", DType::F64)], [spec("a", DType::F64), spec("b", DType::F32)]]
        {
            let f32_at = usize::from(specs[1].dtype == DType::F32);
            let mut reducer = Reducer::new(group.clone(), specs.to_vec(), ReducerOptions::default()).unwrap();
            for _ in 0..3 {
                // Rank 0 has 1 sample, rank 1 has 2; their gradients are 6 and 3.
                reducer.start_weighted([1.0, 2.0][rank]).unwrap();
                reducer.ready(f32_at, bytemuck::bytes_of(&[6f32; 2])).unwrap();
                reducer.ready(1 - f32_at, bytemuck::bytes_of(&[6f64; 2])).unwrap();
                reducer.finish().unwrap();
                assert_eq!(floats(&reducer, f32_at), [4.0; 2]);
                assert_eq!(reducer.gradient(1 - f32_at).unwrap().unwrap(), bytemuck::bytes_of(&[4f64; 2]));
            }
        }
    });
}

#[test]
fn weights_keep_the_digits_of_doubles_beside_parameters_of_single_precision() {
    run(2, |group| {
        // In f32 both are 1.
        let weight = [1.0 + f64::from(f32::EPSILON) / 128.0, 1.0][group.rank().index()];
        let spec = |name: &str, dtype| ParameterSpec::new(name, [2], dtype);
        // The last parameter is in the first bucket, and later the first gradient.
        let specs = vec![spec("a", DType::F64), spec("b", DType::F32)];
        let mut reducer = Reducer::new(group.clone(), specs, ReducerOptions::default()).unwrap();
        for _ in 0..3 {
            reducer.start_weighted(weight).unwrap();
            reducer.ready(1, bytemuck::bytes_of(&[3f32; 2])).unwrap();
            reducer.ready(0, bytemuck::bytes_of(&[3.0 * weight; 2])).unwrap();
            reducer.finish().unwrap();
            assert_eq!(floats(&reducer, 1), [3.0; 2]);
            assert_eq!(reducer.gradient(0).unwrap().unwrap(), bytemuck::bytes_of(&[3f64; 2]));
        }
        reducer.start().unwrap();
        reducer.ready(1, bytemuck::bytes_of(&[3f32; 2])).unwrap();
        reducer.ready(0, bytemuck::bytes_of(&[3f64; 2])).unwrap();
        reducer.finish().unwrap();
        assert_eq!(reducer.gradient(0).unwrap().unwrap(), bytemuck::bytes_of(&[3f64; 2]));
    });
}

#[test]
fn a_rank_without_samples_changes_nothing_even_with_nan_or_without_gradients() {
    for kind in 0..3 {
        run(3, |group| {
            let rank = group.rank();
            let options = match kind {
                0 => buckets_of(8),
                1 => buckets_of(8).find_unused_parameters(true),
                _ => buckets_of(8).static_graph(true),
            };
            let weights = [2, 0, 6];
            let mut reducer = Reducer::new(group.clone(), parameters(&SIZES), options).unwrap();
            for step in 0..4 {
                if rank.index() == 1 {
                    reducer.start_weighted(0.0).unwrap();
                    // What it has is void; of parameter 0 there is nothing, unless the graph is promised to stay the same.
                    for index in ORDER.into_iter().filter(|&index| index != 0 || kind == 2) {
                        reducer.ready_void(index).unwrap();
                    }
                    reducer.finish().unwrap();
                } else {
                    weighted_step(&mut reducer, rank, step, weights[rank.index()]).unwrap();
                }
                assert_means(&reducer, &weights, step);
            }
        });
    }
}

#[test]
fn a_parameter_that_only_samples_of_weight_zero_use_has_no_gradient() {
    run(2, |group| {
        let is_main = group.rank().is_main();
        let options = buckets_of(8).find_unused_parameters(true);
        let mut reducer = Reducer::new(group, parameters(&[1, 1]), options).unwrap();
        for _ in 0..3 {
            reducer.start_weighted(if is_main { 4.0 } else { 0.0 }).unwrap();
            if is_main {
                reducer.ready(0, bytemuck::bytes_of(&8f32)).unwrap();
                reducer.ready_void(1).unwrap();
            } else {
                reducer.ready_void(1).unwrap();
            }
            reducer.finish().unwrap();
            assert_eq!(floats(&reducer, 0), [2.0]);
            assert_eq!(reducer.gradient(1).unwrap(), None);
        }
    });
}

#[test]
fn weights_that_are_none_are_refused_by_name_on_every_rank() {
    for wrong in [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e39, 1e-39] {
        let errors = run(2, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group, parameters(&SIZES), buckets_of(8)).unwrap();
            match rank.is_main() {
                true => weighted_step(&mut reducer, rank, 0, 3),
                false => reducer.start_weighted(wrong),
            }
            .unwrap_err()
            .to_string()
        });
        for error in errors {
            assert!(error.contains("rank 1") && error.contains("is no weight"), "{error}");
        }
    }
}

#[test]
fn weights_that_are_all_zero_are_an_error_everywhere_and_the_next_step_is_none() {
    run(3, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&SIZES), buckets_of(8)).unwrap();
        for step in 0..4 {
            let weight = u16::from(step % 2 == 1);
            let outcome = weighted_step(&mut reducer, rank, step, weight);
            if weight == 0 {
                let error = outcome.unwrap_err();
                assert!(error.is_invalid_argument() && error.to_string().contains("add up to 0"), "{error}");
                assert!(reducer.gradient(0).is_err(), "there is no average");
            } else {
                assert_means(&reducer, &[1; 3], step);
            }
        }
    });
    let errors = run(2, |group| {
        let mut reducer = Reducer::new(group, parameters(&[1]), buckets_of(8)).unwrap();
        reducer.start_weighted(3e38).unwrap();
        reducer.ready(0, &[0; 4]).unwrap();
        reducer.finish().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("inf")), "{errors:?}");
}

#[test]
fn weighted_and_plain_steps_do_not_mix() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&SIZES), buckets_of(8)).unwrap();
        let outcome = match rank.is_main() {
            true => weighted_step(&mut reducer, rank, 0, 3),
            false => one_step(&mut reducer, rank, 0, &ORDER),
        };
        assert!(outcome.unwrap_err().is_mismatch());
    });
}

#[test]
fn hooks_and_types_that_cannot_tell_weights_are_refused_by_name() {
    let hooks: [fn() -> Box<dyn CommHook>; 4] = [
        || Box::new(Compressed::f16()),
        || Box::new(Compressed::bf16()),
        || Box::new(PowerSgd::new(PowerSgdOptions::default()).unwrap()),
        || Box::new(PostLocalSgd::new(10)),
    ];
    for hook in hooks {
        run(2, |group| {
            let mut reducer = Reducer::new(group, parameters(&SIZES), buckets_of(8)).unwrap();
            reducer.register_hook(hook()).unwrap();
            let error = reducer.start_weighted(3.0).unwrap_err().to_string();
            assert!(error.contains(&hook().describe()) && error.contains("sum of weights"), "{error}");
        });
    }
    for dtype in [DType::F16, DType::BF16] {
        run(2, |group| {
            let specs =
                vec![ParameterSpec::new("narrow", [1], dtype), ParameterSpec::new("b", [1], DType::F32)];
            let mut reducer = Reducer::new(group, specs, buckets_of(8)).unwrap();
            let error = reducer.start_weighted(3.0).unwrap_err().to_string();
            assert!(error.contains("`narrow`"), "{error}");
        });
    }
}

#[test]
fn averages_that_are_one_rank_s_each_count_by_weights_too() {
    run(3, |group| {
        let rank = group.rank();
        let weights = [2, 9, 4];
        let mut reducer = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(8)).unwrap();
        reducer.shard((0..SIZES.len()).map(|index| Rank::new(index as u32 % 3)).collect()).unwrap();
        let mut taken = 0;
        for step in 0..5 {
            weighted_step(&mut reducer, rank, step, weights[rank.index()]).unwrap();
            for index in 0..SIZES.len() {
                if index % 3 != rank.index() {
                    assert_eq!(reducer.gradient(index).unwrap(), None);
                    continue;
                }
                for (ours, right) in floats(&reducer, index).iter().zip(weighted_mean(&weights, index, step))
                {
                    assert!((f64::from(*ours) - right).abs() <= 3e-7 * right.abs(), "{ours} is not {right}");
                }
            }
            let updated = |index: usize| vec![(index * 10 + step) as f32; SIZES[index]];
            let own = |index: usize| if index % 3 == rank.index() { updated(index) } else { Vec::new() };
            reducer
                .gather_parameters(|put| {
                    (0..SIZES.len()).try_for_each(|index| put(index, bytemuck::cast_slice(&own(index))))
                })
                .unwrap();
            for index in 0..SIZES.len() {
                assert_eq!(
                    reducer.parameter(index).unwrap(),
                    bytemuck::cast_slice::<f32, u8>(&updated(index))
                );
            }
            if step == 2 {
                taken = group.allocations();
            }
        }
        assert_eq!(group.allocations(), taken);
    });
}

#[test]
fn a_weighted_step_that_is_cut_off_is_averaged_again_by_those_that_are_left() {
    let [first, second] = [3, 2].map(FakeGroup::world);
    std::thread::scope(|scope| {
        for (index, group) in first.into_iter().enumerate() {
            let next = second.get(index).cloned();
            scope.spawn(move || {
                let weights = [5, 3, 100];
                let handle = GroupHandle::new((*group).clone());
                let mut reducer =
                    Reducer::new(Arc::new(handle.clone()), parameters(&SIZES), buckets_of(8)).unwrap();
                weighted_step(&mut reducer, group.rank(), 0, weights[index]).unwrap();
                reducer.keep_gradients().unwrap();
                group.fail_after(5, Error::timeout("nobody has heard of rank 2"));
                let outcome = weighted_step(&mut reducer, group.rank(), 1, weights[index]);
                let Some(next) = next else { return };
                assert!(outcome.is_err());
                handle.rebind((*next).clone());
                reducer.replay().unwrap();
                assert_means(&reducer, &weights[..2], 1);
                weighted_step(&mut reducer, group.rank(), 2, weights[index]).unwrap();
                assert_means(&reducer, &weights[..2], 2);
            });
        }
    });
}
