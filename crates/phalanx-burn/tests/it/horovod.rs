//! Horovod's DistributedOptimizer: the same training as with `Ddp`, whatever the order of gradients.

mod state;

use std::sync::Barrier;
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{LayerNormConfig, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Tensor, TensorData};
use phalanx::{Error, ProcessGroup, Rank};
use phalanx_burn::Ddp;
use phalanx_burn::horovod::{DistributedOptimizer, DistributedOptions, Groups, broadcast_parameters};
use phalanx_burn::parallel::tensor::{ColumnParallelLinear, RowParallelLinear, TensorGroup};
use phalanx_horovod::{Compression, Horovod, Op, Options};

use crate::common::{Mlp, Waves, device, distance, floats, run, samples};

const STEPS: usize = 10;
const BATCH: usize = 8;
const WIDTHS: [usize; 4] = [8, 32, 32, 3];
/// What ten steps that are added up or divided in another order may differ by, of weights that are drawn anew each time: of 1,400 models
/// whose gradients were divided twice one was 1.2e-6 away.
const ROUNDING: f64 = 4e-6;

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn horovod(group: &ProcessGroup) -> Horovod {
    Horovod::new(group, Options::default()).unwrap()
}

/// One step, of `micro` batches.
fn ddp_step(
    ddp: &mut Ddp<Mlp>,
    optimizer: &mut ModuleOptimizer,
    group: &ProcessGroup,
    step: usize,
    micro: usize,
) {
    for part in 0..micro {
        let loss = ddp.forward(|model| model.loss(batch(group, step * micro + part))).unwrap();
        if part + 1 < micro {
            ddp.backward_no_sync(&loss).unwrap();
        } else {
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(optimizer, 0.05, gradients).unwrap();
        }
    }
}

/// Trains with `Ddp`; `micro` batches a step.
fn with_ddp(model: &Mlp, ranks: u32, micro: usize) -> Vec<Vec<f32>> {
    let mut trained = run(ranks, |group| {
        let mut ddp = Ddp::new(model.clone(), &group).unwrap();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            ddp_step(&mut ddp, &mut optimizer, &group, step, micro);
        }
        floats(ddp.model())
    });
    trained.swap_remove(0)
}

fn batch(group: &ProcessGroup, step: usize) -> (Tensor<2>, Tensor<2>) {
    let from = (step * group.world_size().count() + group.rank().index()) * BATCH;
    samples(from, from + BATCH)
}

/// Trains with Horovod's optimizer, and checks that all ranks end with the same bits.
fn with_horovod(model: &Mlp, ranks: u32, options: &DistributedOptions) -> Vec<Vec<f32>> {
    let trained = run(ranks, |group| {
        let hvd = horovod(&group);
        // Only rank 0 has the model that counts.
        let mut model = if hvd.rank().is_main() { model.clone() } else { Mlp::new(&WIDTHS) };
        model = broadcast_parameters(&hvd, model, Rank::MAIN).unwrap();
        let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options.clone()).unwrap();
        let micro = options.backward_passes_per_step;
        for step in 0..STEPS {
            for part in 0..micro {
                let loss = optimizer.forward(&model, |model| model.loss(batch(&group, step * micro + part)));
                optimizer.backward(&loss).unwrap();
            }
            model = optimizer.step(0.05, model).unwrap();
        }
        hvd.barrier().unwrap();
        floats(&model)
    });
    assert!(trained.iter().all(|other| *other == trained[0]), "the same bits on every rank");
    trained.into_iter().next().unwrap()
}

#[test]
fn it_trains_as_ddp_does() {
    let model = Mlp::new(&WIDTHS);
    for ranks in [1, 2, 3] {
        let expected = with_ddp(&model, ranks, 1);
        assert!(distance(&expected, &floats(&model)) > 0.01, "the reference has moved");
        let plain = with_horovod(&model, ranks, &DistributedOptions::default());
        if ranks == 2 {
            assert_eq!(plain, expected, "a sum of two is the same in any order");
        }
        let apart = distance(&plain, &expected);
        assert!(apart < ROUNDING, "{ranks} ranks: {apart:e}");
        for options in [
            DistributedOptions { groups: 2.into(), ..DistributedOptions::default() },
            DistributedOptions {
                groups: Groups::Lists(vec![
                    vec!["layers.2.bias".into(), "layers.0.weight".into()],
                    vec!["layers.1.weight".into()],
                ]),
                ..DistributedOptions::default()
            },
            DistributedOptions { gradient_predivide_factor: 2.0, ..DistributedOptions::default() },
        ] {
            let apart = distance(&with_horovod(&model, ranks, &options), &expected);
            assert!(apart < ROUNDING, "{ranks} ranks, {options:?}: {apart:e}");
        }
    }
}

#[test]
fn a_rank_leaves_with_its_optimizer_and_does_not_wait_for_a_loss_to_run_backward() {
    const LIMIT: Duration = Duration::from_secs(120);
    let together = Barrier::new(2);
    run(2, |group| {
        let limited = group.with_timeout(LIMIT);
        drop(group);
        let hvd = horovod(&limited);
        let model = Mlp::new(&WIDTHS);
        let mut optimizer = DistributedOptimizer::new(sgd(), &model, &hvd).unwrap();
        // Burn keeps its graph.
        let loss = optimizer.forward(&model, |model| model.loss(samples(0, 4)));
        together.wait();
        if hvd.rank().is_main() {
            let error = hvd.barrier().unwrap_err().to_string();
            together.wait();
            assert!(error.contains("rank 1 has shut Horovod down"), "{error}");
        } else {
            drop((optimizer, hvd, limited));
            together.wait();
        }
        drop(loss);
    });
}

#[test]
fn several_backward_passes_make_a_step() {
    let model = Mlp::new(&WIDTHS);
    let options = DistributedOptions { backward_passes_per_step: 3, ..DistributedOptions::default() };
    let expected = with_ddp(&model, 2, 3);
    let apart = distance(&with_horovod(&model, 2, &options), &expected);
    assert!(apart < ROUNDING, "{apart:e}");
}

#[test]
fn halves_on_the_way_train_too() {
    let model = Mlp::new(&WIDTHS);
    let expected = with_ddp(&model, 2, 1);
    for compression in [Compression::Fp16, Compression::Bf16] {
        let options = DistributedOptions { compression, ..DistributedOptions::default() };
        let apart = distance(&with_horovod(&model, 2, &options), &expected);
        assert!(apart > 0.0 && apart < 0.02, "{compression:?} is {apart:e} away");
    }
}

fn with_floats(model: Mlp, values: &[Vec<f32>]) -> Mlp {
    struct Put<'a>(std::slice::Iter<'a, Vec<f32>>);
    impl ModuleMapper for Put<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let values = self.0.next().unwrap().clone();
            param.map(|old| {
                let data = TensorData::new(values, old.shape());
                Tensor::from_data(data, &old.device()).set_require_grad(true)
            })
        }
    }
    model.map(&mut Put(values.iter()))
}

/// What every rank's own optimizer would make of its own gradients, and the Adasum of the changes.
fn by_adasum_of_changes(model: &Mlp, micro: usize) -> Vec<Vec<f32>> {
    let mut trained = run(2, |group| {
        let hvd = horovod(&group);
        // A world of one for each rank, with the rank's own batches.
        let alone = ProcessGroup::alone().unwrap();
        let mut optimizer = sgd();
        // Each thread needs tensors of its own, and `Ddp` in a world of one keeps what it is given: Burn can take a graph apart that two threads share.
        let mut model = with_floats(model.clone(), &floats(model));
        for step in 0..STEPS {
            let mut ddp = Ddp::new(model, &alone).unwrap();
            let before = floats(ddp.model());
            ddp_step(&mut ddp, &mut optimizer, &group, step, micro);
            let after = floats(ddp.model());
            let combined = before.iter().zip(&after).enumerate().map(|(index, (before, after))| {
                let change: Vec<f32> =
                    before.iter().zip(after).map(|(before, after)| after - before).collect();
                let change = hvd.allreduce(&format!("{index}"), change, Op::Adasum).unwrap();
                before
                    .iter()
                    .zip(change.as_slice::<f32>().unwrap())
                    .map(|(before, change)| before + change)
                    .collect()
            });
            let combined: Vec<Vec<f32>> = combined.collect();
            model = ddp.into_model();
            model = with_floats(model, &combined);
        }
        hvd.barrier().unwrap();
        floats(&model)
    });
    trained.swap_remove(0)
}

#[test]
fn adasum_combines_what_each_rank_s_optimizer_has_changed() {
    let model = Mlp::new(&WIDTHS);
    for micro in [1, 2] {
        let expected = by_adasum_of_changes(&model, micro);
        for groups in [0, 2] {
            let options = DistributedOptions {
                op: Op::Adasum,
                backward_passes_per_step: micro,
                groups: groups.into(),
                ..DistributedOptions::default()
            };
            let trained = with_horovod(&model, 2, &options);
            let apart = distance(&trained, &expected);
            assert!(apart < ROUNDING, "{micro} {groups}: {apart:e}");
        }
        assert!(distance(&expected, &with_ddp(&model, 2, micro)) > 1e-3, "it is not the average");
    }
}

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
fn adasum_has_no_gradients_of_all_ranks_to_give() {
    run(2, |group| {
        let hvd = horovod(&group);
        let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
        let options = DistributedOptions { op: Op::Adasum, ..DistributedOptions::default() };
        let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
        let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0)));
        optimizer.backward(&loss).unwrap();
        let error = optimizer.synchronize(&model).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("call step"), "{error}");
        optimizer.step(0.05, model).unwrap();
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
fn a_layer_that_is_frozen_later_takes_no_other_s_gradient() {
    // The first two layers have the same shape. Each rank has tensors of its own: those of threads that share some share a graph, which Burn locks.
    let start = || Mlp::new(&[8, 8, 8, 3]).map(&mut Waves::default());
    let frozen = |mut model: Mlp| {
        model.layers[0] = model.layers[0].clone().no_grad();
        model
    };
    let trained = |is_frozen_before: bool| {
        run(2, |group| {
            let hvd = horovod(&group);
            let mut model = if is_frozen_before { frozen(start()) } else { start() };
            let mut optimizer = DistributedOptimizer::new(sgd(), &model, &hvd).unwrap();
            model = frozen(model);
            for step in 0..2 {
                let loss = optimizer.forward(&model, |model| model.loss(batch(&group, step)));
                optimizer.backward(&loss).unwrap();
                model = optimizer.step(0.05, model).unwrap();
            }
            hvd.barrier().unwrap();
            floats(&model)
        })
    };
    let expected = trained(true);
    assert_eq!(expected[0][..2], floats(&start())[..2]);
    assert_eq!(trained(false), expected);
}

#[test]
fn a_layer_that_is_frozen_later_is_not_changed_by_zeros() {
    for op in [Op::Average, Op::Adasum] {
        run(2, |group| {
            let hvd = horovod(&group);
            let mut model = Mlp::new(&[8, 4, 3]);
            let options =
                DistributedOptions { op, zero_missing_gradients: true, ..DistributedOptions::default() };
            // Its decay changes what has any gradient.
            let optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
            let mut optimizer = DistributedOptimizer::with_options(optimizer, &model, &hvd, options).unwrap();
            model.layers[0] = model.layers[0].clone().no_grad();
            let before = floats(&model);
            let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0)));
            optimizer.backward(&loss).unwrap();
            let after = floats(&optimizer.step(0.05, model).unwrap());
            assert_eq!(after[..2], before[..2], "{op}");
            assert_ne!(after[2], before[2], "{op}");
            hvd.barrier().unwrap();
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
fn half_of_the_graph_in_backward_works() {
    // A generator and a discriminator train in turns: each backward pass reaches only one of them.
    let (generator, discriminator) = (Mlp::new(&[8, 16, 3]), Mlp::new(&[3, 16, 1]));
    let judge = |discriminator: &Mlp, fake: Tensor<2>, real: Tensor<2>| {
        (discriminator.forward(real) - 1).powi_scalar(2).mean()
            + discriminator.forward(fake).powi_scalar(2).mean()
    };
    let fool = |discriminator: &Mlp, fake: Tensor<2>| (discriminator.forward(fake) - 1).powi_scalar(2).mean();
    let expected = run(2, |group| {
        let mut g = Ddp::new(generator.clone(), &group).unwrap();
        let mut d = Ddp::new(discriminator.clone(), &group).unwrap();
        let (mut of_g, mut of_d) = (sgd(), sgd());
        for step in 0..STEPS {
            let (noise, real) = batch(&group, step);
            let fake = g.model().forward(noise.clone()).detach();
            let loss = d.forward(|d| judge(d, fake, real)).unwrap();
            let gradients = d.backward(&loss).unwrap();
            d.step(&mut of_d, 0.05, gradients).unwrap();
            let loss = g.forward(|g| fool(d.model(), g.forward(noise))).unwrap();
            let gradients = g.backward(&loss).unwrap();
            g.step(&mut of_g, 0.05, gradients).unwrap();
        }
        (floats(g.model()), floats(d.model()))
    });
    let trained = run(2, |group| {
        let hvd = horovod(&group);
        let (mut g, mut d) = (generator.clone(), discriminator.clone());
        let named = |name: &str| DistributedOptions { name: name.into(), ..DistributedOptions::default() };
        let mut of_g = DistributedOptimizer::with_options(sgd(), &g, &hvd, named("g")).unwrap();
        let mut of_d = DistributedOptimizer::with_options(sgd(), &d, &hvd, named("d")).unwrap();
        for step in 0..STEPS {
            let (noise, real) = batch(&group, step);
            let fake = g.forward(noise.clone()).detach();
            let loss = of_d.forward(&d, |d| judge(d, fake, real));
            of_d.backward(&loss).unwrap();
            d = of_d.step(0.05, d).unwrap();
            // The discriminator's hooks are in this graph too.
            let loss = of_g.forward(&g, |g| of_d.forward(&d, |d| fool(d, g.forward(noise))));
            of_g.backward(&loss).unwrap();
            g = of_g.step(0.05, g).unwrap();
        }
        hvd.barrier().unwrap();
        (floats(&g), floats(&d))
    });
    assert_eq!(trained, expected);

    // Half of one model: only the first layer of two gets a gradient.
    run(2, |group| {
        let hvd = horovod(&group);
        let model = Mlp::new(&[8, 4, 3]);
        for groups in [0, 1] {
            let options = DistributedOptions {
                groups: groups.into(),
                name: format!("groups {groups}"),
                ..DistributedOptions::default()
            };
            let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
            for step in 0..2 {
                let x = batch(&group, step).0;
                let loss = optimizer.forward(&model, |model| model.layers[0].forward(x).mean());
                optimizer.backward(&loss).unwrap();
                assert_eq!(
                    optimizer.synchronize(&model).unwrap().len(),
                    2,
                    "the weight and the bias of one layer"
                );
            }
        }
        hvd.barrier().unwrap();
    });
}

#[test]
fn a_gradient_that_only_some_ranks_have_is_averaged_with_zeros_if_that_is_asked_for() {
    for groups in [Groups::Number(0), Groups::Number(1), Groups::Lists(vec![vec!["layers.1.weight".into()]])]
    {
        let gradients = run(2, |group| {
            let hvd = horovod(&group);
            let model = broadcast_parameters(&hvd, Mlp::new(&[8, 4, 3]), Rank::MAIN).unwrap();
            let options = DistributedOptions {
                groups: groups.clone(),
                zero_missing_gradients: true,
                ..DistributedOptions::default()
            };
            let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
            let mut averages = Vec::new();
            for step in 0..2 {
                // Rank 1 does not use the second layer.
                let x = samples(step * 4, step * 4 + 4).0;
                let is_short = hvd.rank().get() == 1;
                let pass = |model: &Mlp| {
                    let x = model.layers[0].forward(x.clone());
                    if is_short { x.mean() } else { model.layers[1].forward(x).mean() }
                };
                let own = pass(&model).backward();
                let own = GradientsParams::from_grads(own, &model).get::<2>(model.layers[1].weight.id);
                let loss = optimizer.forward(&model, pass);
                optimizer.backward(&loss).unwrap();
                let all = optimizer.synchronize(&model).unwrap();
                assert_eq!(all.len(), 4, "weights and biases of both layers");
                let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
                averages.push((own.map(values), values(all.get::<2>(model.layers[1].weight.id).unwrap())));
            }
            hvd.barrier().unwrap();
            averages
        });
        for ((own, average), (missing, other)) in gradients[0].iter().zip(&gradients[1]) {
            assert_eq!((missing, average), (&None, other));
            let half: Vec<f32> = own.as_ref().unwrap().iter().map(|value| value / 2.0).collect();
            assert_eq!(*average, half);
        }
    }
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

#[test]
fn an_adasum_of_parts_is_refused() {
    run(4, |group| {
        // Ranks 0 and 2 have the first part, and 1 and 3 the second.
        let rank = group.rank().get();
        let parts = group.split(Some(rank / 2), 0).unwrap().unwrap();
        let replicas = group.split(Some(rank % 2), 0).unwrap().unwrap();
        let layer = LinearConfig::new(4, 4).init(&device());
        let divided = ColumnParallelLinear::new(layer, &TensorGroup::new(&parts)).unwrap();
        let hvd = horovod(&replicas);
        let made = |op: Op| {
            let options = DistributedOptions { op, ..DistributedOptions::default() };
            DistributedOptimizer::with_options(sgd(), &divided, &hvd, options)
        };
        drop(made(Op::Average).unwrap());
        let error = made(Op::Adasum).map(drop).unwrap_err().to_string();
        assert!(error.contains("of `weight`, and Op::Adasum"), "{error}");
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
