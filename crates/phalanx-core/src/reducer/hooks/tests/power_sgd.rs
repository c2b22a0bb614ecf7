//! PowerSGD: what it loses, makes up for, and keeps.

use super::*;

#[test]
fn power_sgd_is_exact_where_the_rank_suffices_and_sends_thin_matrices() {
    for world in [2, 3, 4] {
        run(world, |group| {
            let hook = PowerSgd::new(PowerSgdOptions::default().start_iter(2)).unwrap();
            let mut reducer = reducer(group.clone(), hook);
            let factor = |rank: Rank| rank.index() as f32 + 1.0;
            for number in 0..6 {
                let before = reducer.communicated_bytes();
                let ours = step(&mut reducer, &rank_one(factor(group.rank()), number));
                let expected = average(world, |rank| rank_one(factor(rank), number));
                assert!(farthest(&ours, &expected) < 1e-5, "step {number}: {:e}", farthest(&ours, &expected));
                let floats = if number < 2 { ROWS * COLUMNS } else { ROWS + COLUMNS };
                let sent = (reducer.communicated_bytes() - before) as usize;
                assert_eq!(sent, 4 * (floats + 9) + 8 * ROWS * COLUMNS, "step {number}");
            }
        });
    }
}

#[test]
fn power_sgd_makes_up_for_what_it_loses() {
    let remaining = |feedback: bool, warm: bool, rank: usize| {
        let sums = run(3, |group| {
            let options = PowerSgdOptions::default().start_iter(1).rank(rank);
            let hook = PowerSgd::new(options.error_feedback(feedback).warm_start(warm)).unwrap();
            let mut reducer = reducer(group.clone(), hook);
            let mut sum = vec![0.0; ROWS * COLUMNS];
            for _ in 0..400 {
                let ours = step(&mut reducer, &full_rank(group.rank()));
                sum.iter_mut().zip(ours).for_each(|(sum, x)| *sum += x / 400.0);
            }
            sum
        });
        assert!(sums.iter().all(|sum| *sum == sums[0]), "the same bits on every rank");
        farthest(&sums[0], &average(3, full_rank))
    };
    // The same gradient again and again: with feedback, the average over time is the average over ranks.
    assert!(remaining(true, true, 1) < 0.1, "{}", remaining(true, true, 1));
    assert!(remaining(true, false, 2) < 0.1);
    assert!(remaining(false, true, 1) > 0.3);
}

#[test]
fn power_sgd_makes_up_for_no_more_than_it_loses_when_a_rank_is_done() {
    let is_done = |rank: Rank| rank.index() == 2;
    let mean_on = |group: ProcessGroup| {
        let (rank, group) = (group.rank(), Arc::new(JoinGroup::new(group)));
        let hook = PowerSgd::new(PowerSgdOptions::default().start_iter(1)).unwrap();
        let mut reducer = reducer(group.clone(), hook);
        let mut mean = vec![0.0; ROWS * COLUMNS];
        let steps = if is_done(rank) { 0 } else { 400 };
        let joined = group.join(JoinOptions::default(), || {
            for _ in 0..steps {
                group.step()?;
                let ours = step(&mut reducer, &full_rank(rank));
                mean.iter_mut().zip(ours).for_each(|(mean, x)| *mean += x / 400.0);
            }
            Ok(())
        });
        assert!(joined.unwrap().uneven);
        mean
    };
    let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
    let means: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || mean_on(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let expected = average(3, |rank| if is_done(rank) { vec![0.0; ROWS * COLUMNS] } else { full_rank(rank) });
    assert_eq!(means[0], means[1], "the same bits on every rank");
    assert!(farthest(&means[0], &expected) < 0.1, "{:e}", farthest(&means[0], &expected));
}

#[test]
fn power_sgd_recovers_from_gradients_that_were_zero_or_no_numbers() {
    for (bad, feedback) in [(0.0, true), (0.0, false), (f32::NAN, true), (f32::INFINITY, false)] {
        run(2, |group| {
            let options = PowerSgdOptions::default().start_iter(0).rank(2).error_feedback(feedback);
            let mut reducer = reducer(group.clone(), PowerSgd::new(options).unwrap());
            let factor = |rank: Rank| rank.index() as f32 + 1.0;
            for number in 0..6 {
                let mut mine = rank_one(factor(group.rank()), number);
                let is_bad = matches!(number, 0 | 3);
                if is_bad && (bad == 0.0 || group.rank().is_main()) {
                    mine.fill(bad);
                }
                let ours = step(&mut reducer, &mine);
                if is_bad {
                    assert!(ours.iter().all(|x| x.abs() < 1e-5 || !x.is_finite()), "{bad}: {ours:?}");
                    continue;
                }
                let expected = average(2, |rank| rank_one(factor(rank), number));
                let distance = farthest(&ours, &expected);
                assert!(distance < 1e-5, "{bad}, step {number}: {distance:e}");
            }
        });
    }
}

#[test]
fn what_power_sgd_has_saved_of_another_shape_is_refused_and_any_step_is_taken() {
    let group = ProcessGroup::alone().unwrap();
    let bucket = || GradBucket {
        index: 0,
        is_last: true,
        buffer: Buffer::zeroed(DType::F32, ROWS * COLUMNS),
        gradients: [GradientPlace { parameter: 4, shape: vec![ROWS, COLUMNS], elements: 0..ROWS * COLUMNS }]
            .into(),
        keeps: false,
        counts: None,
    };
    let mut hook = PowerSgd::new(PowerSgdOptions::default().start_iter(0)).unwrap();
    let saved = HookState::default().number("step", u64::MAX);
    let other = [
        (saved.clone().own("losses", 4, vec![0.5; 7]), "what 7 elements"),
        (saved.clone().common("factors", 4, vec![0.5; 7]), "a factor of 7 elements"),
    ];
    for (state, words) in other {
        hook.load(state).unwrap();
        let error = hook.start(&group, bucket()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(words), "{error}");
        assert!(hook.state().unwrap_err().to_string().contains("a step was cut off"));
    }
    let mut hooks: [Box<dyn CommHook>; 2] = [Box::new(hook), Box::new(PostLocalSgd::new(1))];
    for hook in &mut hooks {
        hook.load(saved.clone()).unwrap();
        let mut pending = hook.start(&group, bucket()).unwrap();
        while let Err(more) = pending.advance(&group).unwrap() {
            pending = more;
        }
        assert_eq!(hook.state().unwrap().get("step").unwrap(), u64::MAX);
    }
}

#[test]
fn what_power_sgd_keeps_of_a_step_that_was_cut_off_is_no_state() {
    run(2, |group| {
        let options = PowerSgdOptions::default().start_iter(0).min_compression_rate(1.0);
        let mut reducer = reducer(group.clone(), PowerSgd::new(options).unwrap());
        // Buckets are laid out anew in the second step.
        (0..2).for_each(|_| drop(step(&mut reducer, &full_rank(group.rank()))));
        let before = reducer.hook_state().unwrap();
        // The second message of the matrix is not averaged: the doubles and the first one are.
        group.fail_after(2, Error::timeout("the fault of the test"));
        reducer.start().unwrap();
        reducer.ready(2, &[0; ROWS * COLUMNS * 8]).unwrap();
        reducer.ready(1, &[0; 9 * 4]).unwrap();
        reducer.ready(0, &[0; ROWS * COLUMNS * 4]).unwrap();
        assert!(reducer.finish().unwrap_err().is_timeout());
        for error in [reducer.hook_state().unwrap_err(), reducer.common_hook_state().unwrap_err()] {
            assert!(error.to_string().contains("a step was cut off"), "{error}");
        }
        // The training goes back to a checkpoint.
        reducer.load_hook_state(before.clone()).unwrap();
        assert_eq!(reducer.hook_state().unwrap(), before);
    });
}

#[test]
fn what_power_sgd_has_in_common_is_its_state_without_the_losses() {
    run(2, |group| {
        let options = PowerSgdOptions::default().start_iter(0).min_compression_rate(1.0);
        let mut reducer = reducer(group.clone(), PowerSgd::new(options).unwrap());
        drop(step(&mut reducer, &full_rank(group.rank())));
        let state = reducer.hook_state().unwrap();
        assert!(state.tensors().iter().any(|tensor| tensor.is_own));
        assert!(state.tensors().iter().any(|tensor| !tensor.is_own));
        assert_eq!(reducer.common_hook_state().unwrap(), state.without_own());
    });
}
