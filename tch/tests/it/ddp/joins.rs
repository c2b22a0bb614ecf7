//! Ranks with unequal numbers of batches.

use phalanx::join::JoinOptions;
use phalanx::reducer::hooks::PeriodicModelAverager;

use super::*;

#[test]
fn ranks_with_fewer_batches_answer_the_others() {
    let ends = run(3, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
        let batches = 3 + 2 * group.rank().index();
        let (steps, last) = ddp
            .join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                for step in 0..batches {
                    let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
                    optimizer.zero_grad()?;
                    ddp.backward(&loss)?;
                    optimizer.step(0.01)?;
                }
                Ok((batches, floats(&model.store)))
            })
            .unwrap();
        let joined = floats(&model.store);
        // One step more together: with other states of the optimizer, replicas would drift apart.
        let loss = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
        optimizer.zero_grad().unwrap();
        ddp.backward(&loss).unwrap();
        optimizer.step(0.01).unwrap();
        (steps, last, joined, floats(&model.store))
    });
    assert_eq!(ends.iter().map(|end| end.0).collect::<Vec<_>>(), [3, 5, 7]);
    // All have what the rank with the most steps had at its end.
    assert_ne!(ends[0].1, ends[2].1);
    assert!(ends.iter().all(|end| end.2 == ends[2].1 && end.3 == ends[0].3));
}

#[test]
fn ranks_that_are_done_count_in_the_averages_or_do_not() {
    // The gradient is the input, so that the average can be told. A model without buffers may run outside of `forward`.
    for (divide, in_forward, expected) in [
        (true, true, [1.5, 1.0]),
        (false, true, [1.5, 2.0]),
        (true, false, [1.5, 1.0]),
        (false, false, [1.5, 2.0]),
    ] {
        let gradients = run(2, |group| {
            let store = nn::VarStore::new(device());
            let weight = store.root().zeros("weight", &[1]);
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
            let mut options = JoinOptions::default();
            options.divide_by_initial_world_size = divide;
            let value = group.rank().index() as f64 + 1.0;
            // Rank 1 has a batch more.
            let batches = 1 + group.rank().index();
            ddp.join(&mut optimizer, options, |ddp, optimizer| {
                let mut seen = Vec::new();
                for _ in 0..batches {
                    let pass = || (&weight * value).sum(Kind::Float);
                    let loss = if in_forward { ddp.forward(pass)? } else { pass() };
                    optimizer.zero_grad()?;
                    ddp.backward(&loss)?;
                    seen.push(elements(&weight.grad())[0]);
                }
                Ok(seen)
            })
            .unwrap()
        });
        assert_eq!(gradients[1], expected, "divide_by_initial_world_size: {divide}, forward: {in_forward}");
        assert_eq!(gradients[0], expected[..1]);
    }
}

#[test]
fn in_a_join_an_average_of_models_is_without_a_rank_that_was_done_before_it() {
    for has_averager in [false, true] {
        let ends = run(2, |group| {
            let store = nn::VarStore::new(device());
            let weight = store.root().var("weight", &[1], nn::Init::Const(1.0));
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
            let mut averager = PeriodicModelAverager::new(1).unwrap();
            let joined = ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                let loss = ddp.forward(|| weight.sum(Kind::Float))?;
                ddp.backward(&loss)?;
                optimizer.step(0.01)?;
                match has_averager {
                    // It has made the step, and not the average.
                    _ if group.rank().is_main() => Ok(()),
                    true => averager.step(ddp).map(drop),
                    false => ddp.average_parameters(),
                }
            });
            joined.unwrap();
            elements(&weight)
        });
        // A sum of both, divided by two, would be half of it.
        assert!(ends.iter().all(|end| end[0] > 0.9), "{ends:?}");
    }
}

#[test]
fn in_a_join_small_batches_that_make_no_whole_step_are_in_no_average() {
    let ends = run(2, |group| {
        let store = nn::VarStore::new(device());
        let weight = store.root().zeros("weight", &[1]);
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
        let value = group.rank().index() as f64 + 1.0;
        let pass = || (&weight * value).sum(Kind::Float);
        // Two make a step. Rank 0 has three, and rank 1 four.
        let batches = 3 + group.rank().index();
        let seen = ddp
            .join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                let mut seen = Vec::new();
                for batch in 0..batches {
                    let loss = ddp.forward(pass)?;
                    if batch % 2 == 0 {
                        optimizer.zero_grad()?;
                        ddp.backward_no_sync(&loss)?;
                    } else {
                        ddp.backward(&loss)?;
                        seen.push(elements(&weight.grad())[0]);
                        optimizer.step(0.01)?;
                    }
                }
                Ok(seen)
            })
            .unwrap();
        // What rank 0 held is gone.
        assert_eq!(weight.grad().defined(), !group.rank().is_main());
        optimizer.zero_grad().unwrap();
        let loss = ddp.forward(pass).unwrap();
        ddp.backward(&loss).unwrap();
        (seen, elements(&weight.grad()), elements(&weight))
    });
    assert_eq!((&ends[0].0[..], &ends[1].0[..]), (&[3.0][..], &[3.0, 2.0][..]));
    assert!(ends.iter().all(|end| end.1 == [1.5] && end.2 == ends[0].2));
}

#[test]
fn the_first_rank_that_is_done_ends_a_join_that_is_to_end_early_also_outside_of_forward() {
    let errors = run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.0)).unwrap();
        let mut options = JoinOptions::default();
        options.throw_on_early_termination = true;
        let joined = ddp.join(&mut optimizer, options, |ddp, _| {
            (0..=group.rank().index()).try_for_each(|step| ddp.backward(&model.loss(samples(step, step + 4))))
        });
        // The group goes on.
        group.barrier().unwrap();
        joined.unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("rank 0 has no data left")), "{errors:?}");
}
