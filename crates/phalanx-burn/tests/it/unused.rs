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
use phalanx::reducer::ReducerOptions;
use phalanx_burn::{Ddp, DdpOptions};

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
struct Log(Arc<Mutex<Vec<String>>>);

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
