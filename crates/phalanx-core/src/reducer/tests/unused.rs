//! Parameters that get no gradient in a step.

use super::*;

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
