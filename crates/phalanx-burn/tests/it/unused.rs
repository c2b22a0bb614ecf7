//! Parameters that some ranks, some steps or some networks do not use.

use std::fmt::Write;
use std::sync::{Arc, Barrier};

use crate::common::{Mlp, device, distance, floats, run, samples};
use burn::module::{Module, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use parking_lot::Mutex;
use phalanx::join::JoinOptions;
use phalanx::reducer::ReducerOptions;
use phalanx_burn::{DataParallel, Ddp, DdpOptions, TowerGradients, ZeroRedundancyOptimizer};

const STEPS: usize = 20;
const BATCH: usize = 4;
const LEARNING_RATE: f64 = 0.05;

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn finding_unused() -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().find_unused_parameters(true).bucket_cap_mb(0.0005);
    options
}

/// One of its experts answers; the last is never asked.
#[derive(Module, Debug)]
struct Experts {
    stem: Linear,
    experts: Vec<Linear>,
    idle: Linear,
}

impl Experts {
    fn new(experts: usize) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(&device());
        Self { stem: layer(8, 6), experts: (0..experts).map(|_| layer(6, 3)).collect(), idle: layer(3, 3) }
    }

    fn loss(&self, expert: usize, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        (self.experts[expert].forward(self.stem.forward(x).tanh()) - y).powi_scalar(2).mean()
    }
}

/// The experts that the ranks ask in a step: in some steps none asks the last.
fn asked(step: usize, rank: usize, experts: usize) -> usize {
    if step.is_multiple_of(3) { (step + rank) % (experts - 1) } else { (step + rank) % experts }
}

#[test]
fn parameters_that_some_ranks_do_not_use_train_as_in_one_process() {
    for ranks in [2, 3, 4] {
        let experts = ranks as usize;
        let start = Experts::new(experts);
        let batch = |step: usize, rank: usize| {
            let from = (step * experts + rank) * BATCH;
            samples(from, from + BATCH)
        };
        let mut reference = start.clone();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let losses =
                (0..experts).map(|rank| reference.loss(asked(step, rank, experts), batch(step, rank)));
            let loss = losses.reduce(|a, b| a + b).unwrap() / experts as f32;
            let gradients = GradientsParams::from_grads(loss.backward(), &reference);
            reference = optimizer.step(LEARNING_RATE, reference, gradients);
        }
        let trained = run(ranks, |group| {
            let mut ddp = Ddp::with_options(start.clone(), &group, finding_unused()).unwrap();
            let mut optimizer = sgd();
            let rank = group.rank().index();
            for step in 0..STEPS {
                let expert = asked(step, rank, experts);
                let loss = ddp.forward(|model| model.loss(expert, batch(step, rank))).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                assert!(gradients.get::<2>(ddp.model().idle.weight.id).is_none());
                ddp.step(&mut optimizer, LEARNING_RATE, gradients).unwrap();
                assert!(ddp.replicas_identical().unwrap(), "step {step}");
            }
            floats(ddp.model())
        });
        for ours in &trained {
            assert_eq!(ours, &trained[0]);
            let distance = distance(ours, &floats(&reference));
            assert!(distance < 1e-5, "{ranks} ranks: {distance:e}");
        }
        let idle = floats(&start.idle);
        assert_eq!(trained[0][trained[0].len() - idle.len()..], idle);
    }
}

#[test]
fn a_parameter_that_one_rank_does_not_use_is_an_error_that_names_it_on_all() {
    for ranks in [2, 3, 4] {
        let start = Mlp::new(&[8, 8, 8]);
        let all_are_here = Barrier::new(ranks as usize);
        let errors = run(ranks, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let skips = group.rank().get() == ranks - 1;
            let loss = ddp.forward(|model| {
                let x = model.layers[0].forward(samples(0, 4).0);
                if skips { x.mean() } else { model.layers[1].forward(x).mean() }
            });
            let loss = loss.unwrap();
            // One rank's failure would end the others' construction too, and their forward passes.
            all_are_here.wait();
            ddp.backward(&loss).unwrap_err().to_string()
        });
        for text in errors {
            assert!(text.contains(&format!("rank {}", ranks - 1)), "{text}");
            assert!(text.contains("`layers.1.weight`") && text.contains("find_unused_parameters"), "{text}");
        }
    }
}

#[test]
fn unused_parameters_are_named_once() {
    let start = Experts::new(2);
    let warnings = run(2, |group| {
        let log = Log::default();
        tracing::subscriber::with_default(log.clone(), || {
            let mut ddp = Ddp::with_options(start.clone(), &group, finding_unused()).unwrap();
            for step in 0..4 {
                let expert = group.rank().index();
                let loss = ddp.forward(|model| model.loss(expert, samples(step, step + 2))).unwrap();
                ddp.backward(&loss).unwrap();
            }
        });
        log.0.lock().clone()
    });
    for (rank, warnings) in warnings.iter().enumerate() {
        let naming = |name: &str| warnings.iter().filter(|warning| warning.contains(name)).count();
        assert_eq!(naming(&format!("`experts.{}.weight`", 1 - rank)), 1, "{warnings:?}");
        assert_eq!(naming("`idle.weight`"), if rank == 0 { 1 } else { 0 }, "{warnings:?}");
        assert_eq!(naming("`stem.weight`"), 0);
    }
}

/// Keeps the warnings of one thread.
#[derive(Clone, Default)]
pub struct Log(pub Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{value:?}").unwrap();
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
        tracing::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
    fn enter(&self, _: &tracing::Id) {}
    fn exit(&self, _: &tracing::Id) {}
}

/// What a generator and a discriminator are trained on in one step: real samples and noise.
fn real_and_noise(step: usize, ranks: usize, part: std::ops::Range<usize>) -> (Tensor<2>, Tensor<2>) {
    let from = step * ranks * BATCH;
    let (from, to) = (from + part.start * BATCH, from + part.end * BATCH);
    (samples(from, to).0, samples(7000 + from, 7000 + to).1)
}

fn judge(discriminator: &Mlp, real: Tensor<2>, fake: Tensor<2>) -> Tensor<1> {
    (discriminator.forward(real) - 1).powi_scalar(2).mean()
        + discriminator.forward(fake).powi_scalar(2).mean()
}

fn fool(discriminator: &Mlp, fake: Tensor<2>) -> Tensor<1> {
    (discriminator.forward(fake) - 1).powi_scalar(2).mean()
}

#[test]
fn a_generator_and_a_discriminator_train_in_turns_as_in_one_process() {
    let (g0, d0) = (Mlp::new(&[3, 8, 8]), Mlp::new(&[8, 8, 1]));
    for ranks in [2, 3, 4] {
        let (mut g, mut d) = (g0.clone(), d0.clone());
        let (mut optimizer_g, mut optimizer_d) = (sgd(), sgd());
        for step in 0..STEPS {
            let (real, noise) = real_and_noise(step, ranks, 0..ranks);
            let loss = judge(&d, real, g.forward(noise.clone()).detach());
            let gradients = GradientsParams::from_grads(loss.backward(), &d);
            d = optimizer_d.step(LEARNING_RATE, d, gradients);
            let loss = fool(&d, g.forward(noise));
            let gradients = GradientsParams::from_grads(loss.backward(), &g);
            g = optimizer_g.step(LEARNING_RATE, g, gradients);
        }
        let expected = [floats(&g), floats(&d)];

        // The discriminator in the generator's step: once as Ddp runs it, once as the plain model.
        for hooked in [true, false] {
            let trained = run(ranks as u32, |group| {
                let rank = group.rank().index();
                let mut g = Ddp::new(g0.clone(), &group).unwrap();
                let mut d = Ddp::new(d0.clone(), &group).unwrap();
                let (mut optimizer_g, mut optimizer_d) = (sgd(), sgd());
                for step in 0..STEPS {
                    let (real, noise) = real_and_noise(step, ranks, rank..rank + 1);
                    let fake = g.model().forward(noise.clone()).detach();
                    let loss = d.forward(|d| judge(d, real, fake)).unwrap();
                    let gradients = d.backward(&loss).unwrap();
                    d.step(&mut optimizer_d, LEARNING_RATE, gradients).unwrap();
                    let fake = g.forward(|g| g.forward(noise)).unwrap();
                    let loss =
                        if hooked { d.forward(|d| fool(d, fake)).unwrap() } else { fool(d.model(), fake) };
                    let gradients = g.backward(&loss).unwrap();
                    g.step(&mut optimizer_g, LEARNING_RATE, gradients).unwrap();
                }
                [floats(g.model()), floats(d.model())]
            });
            for ours in &trained {
                assert_eq!(ours, &trained[0]);
                for (ours, expected) in ours.iter().zip(&expected) {
                    assert!(distance(ours, expected) < 1e-4, "{ranks} ranks: {:e}", distance(ours, expected));
                }
            }
        }
    }
}

#[test]
fn several_losses_and_backward_passes_make_one_step() {
    let start = Mlp::new(&[8, 6, 3]);
    for ranks in [2, 3, 4] {
        let total = ranks * BATCH;
        let loss = |model: &Mlp, kind: usize, from: usize, to: usize| {
            let (x, y) = samples(1000 * kind + from, 1000 * kind + to);
            let apart = model.forward(x) - y;
            if kind == 0 { apart.powi_scalar(2).mean() } else { apart.abs().mean() }
        };
        let mut reference = start.clone();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let (from, to) = (step * total, (step + 1) * total);
            let mut sum = GradientsAccumulator::new();
            for kind in 0..2 {
                let gradients = loss(&reference, kind, from, to).backward();
                sum.accumulate(&reference, GradientsParams::from_grads(gradients, &reference));
            }
            reference = optimizer.step(LEARNING_RATE, reference, sum.grads());
        }
        let trained = run(ranks as u32, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut optimizer = sgd();
            for step in 0..STEPS {
                let from = step * total + group.rank().index() * BATCH;
                let first = ddp.forward(|model| loss(model, 0, from, from + BATCH)).unwrap();
                let second = ddp.forward(|model| loss(model, 1, from, from + BATCH)).unwrap();
                // One pass for each loss, or one for both.
                let gradients = if step.is_multiple_of(2) {
                    ddp.backward_no_sync(&first).unwrap();
                    ddp.backward(&second).unwrap()
                } else {
                    ddp.backward(&(first + second)).unwrap()
                };
                ddp.step(&mut optimizer, LEARNING_RATE, gradients).unwrap();
            }
            floats(ddp.model())
        });
        for ours in &trained {
            assert_eq!(ours, &trained[0]);
            assert!(distance(ours, &floats(&reference)) < 1e-5, "{:e}", distance(ours, &floats(&reference)));
        }
    }
}

#[test]
fn a_frozen_backbone_and_a_network_for_the_loss_stay_as_they_are() {
    let start = Mlp::new(&[8, 8, 8]);
    let start = start.clone().freeze_group(ParamGroup::ids_from_module(start.layers[0].clone()));
    let style = Mlp::new(&[8, 5, 3]).freeze();
    let loss = |model: &Mlp, (x, y): (Tensor<2>, Tensor<2>)| {
        (style.forward(model.forward(x)) - y).powi_scalar(2).mean()
    };
    for ranks in [2, 3, 4] {
        let mut reference = start.clone();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let from = step * ranks * BATCH;
            let gradients = loss(&reference, samples(from, from + ranks * BATCH)).backward();
            let gradients = GradientsParams::from_grads(gradients, &reference);
            reference = optimizer.step(LEARNING_RATE, reference, gradients);
        }
        let trained = run(ranks as u32, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut optimizer = sgd();
            for step in 0..STEPS {
                let from = (step * ranks + group.rank().index()) * BATCH;
                let loss = ddp.forward(|model| loss(model, samples(from, from + BATCH))).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                assert_eq!(gradients.len(), 2);
                ddp.step(&mut optimizer, LEARNING_RATE, gradients).unwrap();
            }
            floats(ddp.model())
        });
        for ours in &trained {
            assert_eq!(ours, &trained[0]);
            assert_eq!(ours[..2], floats(&start)[..2]);
            assert!(distance(ours, &floats(&reference)) < 1e-5);
        }
    }
}

#[test]
fn a_second_backward_pass_through_one_forward_pass_is_refused() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 6, 3]), &group).unwrap();
        let mut losses = || {
            let two = |model: &Mlp| {
                let y = model.forward(samples(0, 4).0);
                (y.clone().mean(), y.powi_scalar(2).mean())
            };
            ddp.forward(two).unwrap()
        };
        let ((first, second), (third, fourth)) = (losses(), losses());
        drop((third, fourth));
        ddp.backward_no_sync(&first).unwrap();
        // The first error ends the group.
        all_are_here.wait();
        let error = ddp.backward(&second).unwrap_err().to_string();
        assert!(error.contains("has run backward already") && error.contains("add up"), "{error}");
    });
}

/// Optimizers that move a parameter whose gradient is zero, by decay and by momentum.
fn moving() -> [ModuleOptimizer; 4] {
    use burn::optim::AdamWConfig;
    use phalanx_burn::{FusedAdamWConfig, FusedSgdConfig};
    let momentum = || Some(MomentumConfig::new());
    [
        AdamWConfig::new().with_epsilon(1e-3).with_weight_decay(0.1).init(),
        FusedAdamWConfig::new().with_epsilon(1e-3).with_weight_decay(0.1).init(),
        sgd(),
        FusedSgdConfig::new().with_momentum(momentum()).init(),
    ]
}

/// One process, whose loss in each step is the mean of `parts` with the expert that each asks, times `weight`.
fn in_one_process(
    optimizer: &ModuleOptimizer,
    start: &Experts,
    steps: impl Iterator<Item = (Vec<(usize, (Tensor<2>, Tensor<2>))>, f64)>,
) -> Vec<Vec<f32>> {
    let (mut model, mut optimizer) = (start.clone(), optimizer.clone());
    for (parts, weight) in steps {
        let losses = parts.into_iter().map(|(expert, batch)| model.loss(expert, batch));
        let loss = losses.reduce(|a, b| a + b).unwrap() * weight;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    floats(&model)
}

#[track_caller]
fn is_near(ours: &[Vec<f32>], expected: &[Vec<f32>], start: &Experts, what: &str) {
    let idle = floats(&start.idle);
    assert_eq!(ours[ours.len() - idle.len()..], idle, "{what}: what nobody uses stays as it is");
    let apart = distance(ours, expected);
    assert!(apart < 1e-5, "{what}: {apart:e}");
}

/// What a rank trains on in part `part` of a step.
fn small_batch(step: usize, rank: usize, part: usize) -> (Tensor<2>, Tensor<2>) {
    let from = ((step * 4 + rank) * 2 + part) * BATCH;
    samples(from, from + BATCH)
}

/// In every third step the second of three experts is asked by nobody; the last part of a step asks the first alone.
fn expert_of(step: usize, rank: usize, part: usize) -> usize {
    match (part, step % 3) {
        (1, _) => 0,
        (_, 0) => 2 * (rank % 2),
        _ => (step + rank) % 3,
    }
}

#[test]
fn what_no_rank_has_a_gradient_of_does_not_change_with_added_up_gradients_or_a_sharded_optimizer() {
    const FEW: usize = 7;
    for (number, optimizer) in moving().iter().enumerate() {
        for ranks in [1usize, 2, 3] {
            for parts in [1, 2] {
                let start = Experts::new(3);
                let steps = (0..FEW).map(|step| {
                    let all = (0..ranks).flat_map(|rank| {
                        (0..parts)
                            .map(move |part| (expert_of(step, rank, part), small_batch(step, rank, part)))
                    });
                    (all.collect(), 1.0 / (ranks * parts) as f64)
                });
                let expected = in_one_process(optimizer, &start, steps);
                run(ranks as u32, |group| {
                    let rank = group.rank().index();
                    let mut plain = Ddp::with_options(start.clone(), &group, finding_unused()).unwrap();
                    let mut sharded = Ddp::with_options(start.clone(), &group, finding_unused()).unwrap();
                    let mut whole = optimizer.clone();
                    let mut zero = ZeroRedundancyOptimizer::new(optimizer.clone(), &mut sharded).unwrap();
                    let gradients = |ddp: &mut Ddp<Experts>, step: usize| {
                        for part in 0..parts {
                            let batch = small_batch(step, rank, part);
                            let loss = ddp.forward(|model| model.loss(expert_of(step, rank, part), batch));
                            let loss = loss.unwrap() / parts as f64;
                            if part + 1 == parts {
                                return ddp.backward(&loss).unwrap();
                            }
                            ddp.backward_no_sync(&loss).unwrap();
                        }
                        unreachable!("the last part gives the gradients")
                    };
                    for step in 0..FEW {
                        let averages = gradients(&mut plain, step);
                        plain.step(&mut whole, LEARNING_RATE, averages).unwrap();
                        let averages = gradients(&mut sharded, step);
                        zero.step(&mut sharded, LEARNING_RATE, averages).unwrap();
                    }
                    let what = format!("optimizer {number}, {ranks} ranks, {parts} parts");
                    is_near(&floats(plain.model()), &expected, &start, &what);
                    is_near(&floats(sharded.model()), &expected, &start, &format!("ZeRO, {what}"));
                });
            }
        }
    }
}

#[test]
fn a_rank_without_data_has_no_gradients() {
    for optimizer in moving() {
        let start = Experts::new(2);
        // Rank 0 has two batches and asks expert 1; rank 1 has five and asks expert 0.
        let steps = (0..5usize).map(|step| {
            let all = (usize::from(step >= 2)..2).map(|rank| (1 - rank, small_batch(step, rank, 0)));
            (all.collect(), 0.5)
        });
        let expected = in_one_process(&optimizer, &start, steps);
        run(2, |group| {
            let rank = group.rank().index();
            let mut ddp = Ddp::with_options(start.clone(), &group, finding_unused()).unwrap();
            let mut optimizer = optimizer.clone();
            ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                for step in 0..[2, 5][rank] {
                    let loss = ddp.forward(|model| model.loss(1 - rank, small_batch(step, rank, 0)))?;
                    let gradients = ddp.backward(&loss)?;
                    ddp.step(optimizer, LEARNING_RATE, gradients)?;
                }
                Ok(())
            })
            .unwrap();
            is_near(&floats(ddp.model()), &expected, &start, "join");
        });
    }
}

#[test]
fn devices_of_one_process_may_use_different_parameters() {
    // Five samples: the first of two devices has three of them, and asks expert 1 in steps in which the second asks expert 0.
    let all = |step: usize| samples(step * 5, step * 5 + 5);
    let expert = |step: usize, rows: usize| if step.is_multiple_of(2) { rows % 2 } else { 0 };
    for optimizer in moving() {
        let start = Experts::new(2);
        let mut reference = (start.clone(), optimizer.clone());
        for step in 0..6 {
            let (x, y) = all(step);
            let part = |from: usize, to: usize| {
                (x.clone().slice([from..to, 0..8]), y.clone().slice([from..to, 0..3]))
            };
            let loss = reference.0.loss(expert(step, 3), part(0, 3)) * 0.6
                + reference.0.loss(expert(step, 2), part(3, 5)) * 0.4;
            let gradients = GradientsParams::from_grads(loss.backward(), &reference.0);
            reference.0 = reference.1.step(LEARNING_RATE, reference.0, gradients);
        }
        let expected = floats(&reference.0);
        let devices = vec![device(); 2];
        let mut towers = TowerGradients::new(start.clone(), devices.clone()).unwrap();
        let mut parallel = DataParallel::new(start.clone(), devices).unwrap();
        let mut each = [optimizer.clone(), optimizer.clone()];
        for step in 0..6 {
            let (x, y) = all(step);
            let answer = |model: &Experts, x: Tensor<2>| {
                let expert = expert(step, x.dims()[0]);
                model.experts[expert].forward(model.stem.forward(x).tanh())
            };
            let loss = |model: &Experts, (x, y): (Tensor<2>, Tensor<2>)| {
                (answer(model, x) - y).powi_scalar(2).mean()
            };
            let (_, gradients) = towers.backward((x.clone(), y.clone()), loss).unwrap();
            towers.step(&mut each[0], LEARNING_RATE, gradients).unwrap();
            let output = parallel.forward(x, answer).unwrap();
            let gradients = parallel.backward(&(output - y).powi_scalar(2).mean()).unwrap();
            parallel.step(&mut each[1], LEARNING_RATE, gradients).unwrap();
        }
        is_near(&floats(towers.model()), &expected, &start, "towers");
        is_near(&floats(parallel.model()), &expected, &start, "DataParallel");
    }
}

#[cfg(feature = "horovod")]
#[test]
fn horovod_s_optimizer_leaves_out_what_no_rank_uses() {
    use phalanx::Rank;
    use phalanx_burn::horovod::{DistributedOptimizer, DistributedOptions, broadcast_parameters};
    use phalanx_horovod::{Horovod, Options};
    for optimizer in moving() {
        for ranks in [1usize, 2, 3] {
            let start = Experts::new(3);
            // All ranks ask the same; in the second part of a step the first.
            let expert = |step: usize, part: usize| if part == 1 { 0 } else { step % 3 };
            let steps = (0..5).map(|step| {
                let all = (0..ranks).flat_map(|rank| {
                    (0..2).map(move |part| (expert(step, part), small_batch(step, rank, part)))
                });
                // Gradients of both parts are added up.
                (all.collect(), 1.0 / ranks as f64)
            });
            let expected = in_one_process(&optimizer, &start, steps);
            run(ranks as u32, |group| {
                let hvd = Horovod::new(&group, Options::default()).unwrap();
                let options =
                    DistributedOptions { backward_passes_per_step: 2, ..DistributedOptions::default() };
                // Of its own: threads that share parameters share Burn's graph, which a backward pass locks.
                let mut model = broadcast_parameters(&hvd, start.clone(), Rank::MAIN).unwrap();
                let mut ours =
                    DistributedOptimizer::with_options(optimizer.clone(), &model, &hvd, options).unwrap();
                for step in 0..5 {
                    for part in 0..2 {
                        let batch = small_batch(step, group.rank().index(), part);
                        let loss = ours.forward(&model, |model| model.loss(expert(step, part), batch));
                        ours.backward(&loss).unwrap();
                    }
                    model = ours.step(LEARNING_RATE, model).unwrap();
                }
                is_near(&floats(&model), &expected, &start, &format!("{ranks} ranks"));
                hvd.barrier().unwrap();
            });
        }
    }
}

#[test]
fn a_loss_that_depends_on_parameters_past_the_closure_is_refused() {
    for accumulates in [false, true] {
        let errors = run(2, |group| {
            let mut ddp = Ddp::new(Mlp::new(&[8, 4, 3]), &group).unwrap();
            // No rank must end the group while the other makes its `Ddp`. It may learn of it here already.
            let _ended = group.barrier();
            let penalty = ddp.model().layers[1].weight.val().powi_scalar(2).sum();
            let loss = ddp.forward(|model| model.loss(samples(0, 4)));
            let outcome = loss.and_then(|loss| match accumulates {
                true => ddp.backward_no_sync(&(loss + penalty)),
                false => ddp.backward(&(loss + penalty)).map(drop),
            });
            outcome.unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("the parameter `layers.1.weight` past the model"), "{error}");
        }
    }
    // Without its graph it is a number.
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 4, 3]), &group).unwrap();
        let penalty = ddp.model().layers[1].weight.val().powi_scalar(2).sum().detach();
        let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap() + penalty;
        ddp.backward(&loss).unwrap();
    });
}
