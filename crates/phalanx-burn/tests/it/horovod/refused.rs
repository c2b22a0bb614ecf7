//! What is refused, and what ranks hear of another one's mistake.

use phalanx_burn::parallel::tensor::RowParallelLinear;

use super::*;

#[test]
fn layers_that_compute_with_other_numbers_on_one_rank_are_an_error_on_every_rank() {
    run(2, |group| {
        let hvd = horovod(&group);
        let norm = |epsilon| LayerNormConfig::new(8).with_epsilon(epsilon).init(&device());
        let own = norm(if hvd.rank().is_main() { 1e-5 } else { 1e-3 });
        let error = broadcast_parameters(&hvd, own, Rank::MAIN).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("0.001 on rank 1"), "{error}");
        // It ends nothing.
        broadcast_parameters(&hvd, norm(1e-5), Rank::MAIN).unwrap();
        hvd.barrier().unwrap();
    });
}

#[test]
fn models_of_which_one_has_a_layer_more_are_an_error_on_every_rank() {
    run(2, |group| {
        let hvd = horovod(&group);
        let widths: &[usize] = if hvd.rank().is_main() { &[8, 4] } else { &[8, 4, 3] };
        let error = broadcast_parameters(&hvd, Mlp::new(widths), Rank::MAIN).unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && text.contains("`layers.1.weight` of shape [4, 3]"), "{error}");
        assert!(text.contains("none on rank 0"), "{error}");
        // It ends nothing.
        broadcast_parameters(&hvd, Mlp::new(&[8, 4]), Rank::MAIN).unwrap();
        hvd.barrier().unwrap();
    });
}

#[test]
fn a_loss_that_depends_on_parameters_past_the_closure_is_refused() {
    let all_are_here = Barrier::new(2);
    for op in [Op::Average, Op::Adasum] {
        run(2, |group| {
            let hvd = horovod(&group);
            let model = Mlp::new(&[8, 4, 3]);
            let options = DistributedOptions { op, ..DistributedOptions::default() };
            let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
            let penalty = model.layers[1].weight.val().powi_scalar(2).sum();
            let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0))) + penalty;
            // The first error ends the job, which the other rank may still begin.
            all_are_here.wait();
            let error = optimizer.backward(&loss).unwrap_err().to_string();
            assert!(error.contains("the parameter `layers.1.weight` past the model"), "{error}");
        });
    }
}

#[test]
fn a_model_whose_parameters_have_other_ids_is_refused() {
    let all_are_here = Barrier::new(2);
    for op in [Op::Average, Op::Adasum] {
        run(2, |group| {
            let hvd = horovod(&group);
            let model = Mlp::new(&[8, 4, 3]);
            let options = DistributedOptions { op, ..DistributedOptions::default() };
            let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
            // A record brings the ids with which it was saved.
            let loaded = model.clone().load_record(Mlp::new(&[8, 4, 3]).into_record());
            let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0)));
            optimizer.backward(&loss).unwrap();
            // An error may end the job, for which the other rank may still wait; the next one does, and the averages.
            all_are_here.wait();
            let error = optimizer.step(0.05, loaded.clone()).unwrap_err().to_string();
            assert!(error.contains("`layers.0.weight` is another parameter"), "{error}");
            all_are_here.wait();
            let loss = optimizer.forward(&loaded, |model| model.loss(batch(&group, 0)));
            let error = optimizer.backward(&loss).unwrap_err().to_string();
            assert!(error.contains("`layers.0.weight` is another parameter"), "{error}");
        });
    }
}

#[test]
fn a_step_after_the_gradients_were_given_is_refused_and_the_others_are_told() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let hvd = horovod(&group);
        let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
        let mut optimizer = DistributedOptimizer::new(sgd(), &model, &hvd).unwrap();
        let mut given = |model: Mlp, step: usize| {
            let loss = optimizer.forward(&model, |model| model.loss(batch(&group, step)));
            optimizer.backward(&loss)?;
            let gradients = optimizer.synchronize(&model)?;
            // Rank 0 forgets what it has.
            match hvd.rank().is_main() && step == 2 {
                true => {
                    all_are_here.wait();
                    optimizer.step(0.05, model)
                }
                false => {
                    if step == 2 {
                        all_are_here.wait();
                    }
                    optimizer.apply(0.05, model, gradients)
                }
            }
        };
        let error = (0..4).try_fold(model, &mut given).unwrap_err().to_string();
        assert!(error.contains("the step would go without them"), "{error}");
        assert!(hvd.rank().is_main() || error.contains("rank 0 cannot take part"), "{error}");
    });
}

/// A backward pass brings gradients, and a forward pass none.
#[test]
fn gradients_that_were_given_are_those_of_a_step_until_the_next_backward_pass() {
    let all_are_here = Barrier::new(2);
    for is_step in [true, false] {
        run(2, |group| {
            let hvd = horovod(&group);
            let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
            let mut optimizer = DistributedOptimizer::new(sgd(), &model, &hvd).unwrap();
            let losses =
                [0, 1].map(|step| optimizer.forward(&model, |model| model.loss(batch(&group, step))));
            optimizer.backward(&losses[0]).unwrap();
            let gradients = optimizer.synchronize(&model).unwrap();
            // By an optimizer of the program's own, as that of a ModelState.
            let model = sgd().step(0.05, model, gradients);
            optimizer.backward(&losses[1]).unwrap();
            let model = optimizer.step(0.05, model).unwrap();

            let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 2)));
            optimizer.backward(&loss).unwrap();
            let given = optimizer.synchronize(&model).unwrap();
            let next = optimizer.forward(&model, |model| model.loss(batch(&group, 3)));
            // The first error ends the job, in which the other rank may still wait for the gradients.
            all_are_here.wait();
            let error = match is_step {
                true => optimizer.step(0.05, model).map(drop),
                false => optimizer.synchronize(&model).map(drop),
            };
            let error = error.unwrap_err().to_string();
            assert!(error.contains("the step would go without them"), "{error}");
            drop((given, next));
        });
    }
}

#[test]
fn a_learning_rate_of_one_rank_that_is_no_number_ends_the_job() {
    let all_are_here = Barrier::new(2);
    for op in [Op::Average, Op::Adasum] {
        run(2, |group| {
            let hvd = horovod(&group);
            let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
            let options = DistributedOptions { op, ..DistributedOptions::default() };
            let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
            let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0)));
            optimizer.backward(&loss).unwrap();
            // The error ends the job, in which the other rank may still submit its gradients.
            all_are_here.wait();
            let rate = if hvd.rank().is_main() { f64::NAN } else { 0.05 };
            // The other rank may have had all gradients before.
            let outcome = optimizer.step(rate, model).and_then(|_model| hvd.barrier());
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("the learning rate NaN, of `layers.0.weight`"), "{error}");
            assert!(hvd.rank().is_main() || error.contains("rank 0 cannot take part"), "{error}");
        });
    }
}

#[test]
fn gradients_are_not_applied_with_a_learning_rate_that_is_no_number() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let hvd = horovod(&group);
        let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
        let mut optimizer = DistributedOptimizer::new(sgd(), &model, &hvd).unwrap();
        let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0)));
        optimizer.backward(&loss).unwrap();
        let gradients = optimizer.synchronize(&model).unwrap();
        // The error ends the job, in which the other rank may still wait for its gradients.
        all_are_here.wait();
        let rate = if hvd.rank().is_main() { f64::NAN } else { 0.05 };
        let outcome = optimizer.apply(rate, model, gradients).and_then(|_model| hvd.barrier());
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("the learning rate NaN, of `layers.0.weight`"), "{error}");
        assert!(hvd.rank().is_main() || error.contains("rank 0 cannot take part"), "{error}");
    });
}

#[test]
fn mistakes_are_named() {
    run(2, |group| {
        let hvd = horovod(&group);
        let model = Mlp::new(&WIDTHS);
        let new = |options| DistributedOptimizer::with_options(sgd(), &model, &hvd, options);
        let none = DistributedOptions { backward_passes_per_step: 0, ..DistributedOptions::default() };
        assert!(new(none).unwrap_err().to_string().contains("backward_passes_per_step"));
        let sum = DistributedOptions {
            op: Op::Sum,
            gradient_predivide_factor: 2.0,
            ..DistributedOptions::default()
        };
        assert!(new(sum).unwrap_err().to_string().contains("gradient_predivide_factor"));
        let listed = |names: &[&[&str]]| {
            let lists = names.iter().map(|names| names.iter().map(|name| (*name).to_owned()).collect());
            let groups = Groups::Lists(lists.collect());
            new(DistributedOptions { groups, ..DistributedOptions::default() }).unwrap_err().to_string()
        };
        let unknown = listed(&[&["layers.0.weight", "layers.9.weight"]]);
        assert!(unknown.contains("\"layers.9.weight\"") && unknown.contains("no parameter"), "{unknown}");
        let twice = listed(&[&["layers.0.weight"], &["layers.1.bias", "layers.0.weight"]]);
        assert!(twice.contains("in group 0 and in group 1"), "{twice}");
        let mut optimizer = new(DistributedOptions::default()).unwrap();
        let plain = model.loss(samples(0, 8));
        assert!(optimizer.backward(&plain).unwrap_err().is_invalid_argument());
        for _ in 0..2 {
            let loss = optimizer.forward(&model, |model| model.loss(samples(0, 8)));
            let _outcome = optimizer.backward(&loss);
        }
        let loss = optimizer.forward(&model, |model| model.loss(samples(0, 8)));
        assert!(optimizer.backward(&loss).unwrap_err().to_string().contains("without a step"));
        drop(loss);
        optimizer.synchronize(&model).unwrap();
        // A model that differs between ranks.
        let width = if hvd.rank().is_main() { 4 } else { 5 };
        let error = broadcast_parameters(&hvd, Mlp::new(&[8, width]), Rank::MAIN).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("layers.0.weight"), "{error}");
        hvd.barrier().unwrap();
    });
}

/// No gradient is combined that could say so, where this rank alone is the job.
#[test]
fn gradients_of_a_failed_exchange_among_parts_are_not_stepped_with() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let tensor = TensorGroup::new(&group);
        let layer = LinearConfig::new(8, 3).init(&device());
        let layer = RowParallelLinear::new(layer, &tensor).unwrap();
        let hvd = horovod(&ProcessGroup::alone().unwrap());
        let mut optimizer = DistributedOptimizer::new(sgd(), &layer, &hvd).unwrap();
        let mut step = |layer: RowParallelLinear| {
            let x = tensor.part(samples(0, 4).0, 1);
            let loss = optimizer.forward(&layer, |layer| layer.forward(x).mean());
            optimizer.backward(&loss).unwrap();
            optimizer.step(0.1, layer)
        };
        let layer = step(layer).unwrap();
        // None ends the group while the other is still in that step.
        all_are_here.wait();
        if group.rank().is_main() {
            group.abort(Error::aborted("the cable was cut"));
            let error = step(layer).map(drop).unwrap_err().to_string();
            assert!(error.contains("the cable was cut"), "{error}");
        } else {
            assert!(group.barrier().unwrap_err().to_string().contains("the cable was cut"));
        }
    });
}
