//! Ranks with unequal numbers of samples, against one process with the samples of all.

use crate::common::{Mlp, Waves, device, distance, everywhere, floats, run, samples};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{FloatDType, Tensor};
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::Compressed;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::{Ddp, DdpOptions, SyncBatchNorm, ZeroRedundancyOptimizer};

const STEPS: usize = 8;
const WIDTHS: [usize; 4] = [8, 32, 16, 3];
const LEARNING_RATE: f64 = 0.05;

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

/// Several buckets, which are rebuilt.
fn options() -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.001);
    options
}

/// How many samples each pass of a step has: rank after rank, and pass after pass. Some have none, and the last steps few.
fn sizes(step: usize, ranks: usize, passes: usize) -> Vec<usize> {
    let size = |place: usize| match step % 4 {
        0 => 3 + 2 * place,
        1 => [0, 7, 1][place % 3] + usize::from(place == 0),
        2 => 9 - (place * 5) % 8,
        _ => usize::from(place == ranks * passes - 1), // the last batch of an epoch
    };
    (0..ranks * passes).map(size).collect()
}

/// Plain Burn, on the samples of all passes of all ranks.
fn reference(mut model: Mlp, ranks: usize, passes: usize) -> Mlp {
    let (mut optimizer, mut from) = (sgd(), 0);
    for step in 0..STEPS {
        let count: usize = sizes(step, ranks, passes).iter().sum();
        let gradients = model.loss(samples(from, from + count)).backward();
        model = optimizer.step(LEARNING_RATE, model.clone(), GradientsParams::from_grads(gradients, &model));
        from += count;
    }
    model
}

fn train(model: Mlp, group: &ProcessGroup, passes: usize) -> Result<Ddp<Mlp>> {
    let mut ddp = Ddp::with_options(model, group, options())?;
    let (mut optimizer, mut from) = (sgd(), 0);
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    for step in 0..STEPS {
        let sizes = sizes(step, ranks, passes);
        for pass in 0..passes {
            let place = rank * passes + pass;
            let first = from + sizes[..place].iter().sum::<usize>();
            let (count, weight) = (sizes[place], sizes[place] as f64);
            let loss = ddp.forward(|model| match count {
                // Of any sample: what it gives is no number, as the mean of nothing.
                0 => model.loss(samples(99, 100)) * f32::NAN,
                _ => model.loss(samples(first, first + count)),
            })?;
            if pass + 1 < passes {
                ddp.backward_no_sync_weighted(&loss, weight)?;
            } else {
                let gradients = ddp.backward_weighted(&loss, weight)?;
                ddp.step(&mut optimizer, LEARNING_RATE, gradients)?;
            }
        }
        from += sizes.iter().sum::<usize>();
    }
    Ok(ddp)
}

#[test]
fn unequal_batches_train_as_one_process_with_the_whole_batch() {
    let start = Mlp::new(&WIDTHS);
    for (ranks, passes) in [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (3, 3)] {
        let expected = floats(&reference(start.clone(), ranks, passes));
        let trained = run(ranks as u32, |group| {
            let ddp = train(start.clone(), &group, passes).unwrap();
            assert!(ddp.replicas_identical().unwrap());
            floats(ddp.model())
        });
        assert!(distance(&expected, &floats(&start)) > 0.01, "the reference has not moved");
        for ours in trained {
            let distance = distance(&ours, &expected);
            assert!(distance < 1e-5, "{ranks} ranks x {passes}: {distance:e} away");
        }
    }
}

/// The means of ranks' means, which plain averages are, differ.
#[test]
fn plain_averages_of_unequal_batches_are_those_of_another_loss() {
    let start = Mlp::new(&WIDTHS);
    let whole = start.loss(samples(0, 10)).backward();
    let whole = start.layers[0].weight.val().grad(&whole).unwrap().into_data().try_to_vec::<f32>().unwrap();
    run(2, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        let (from, to) = if group.rank().is_main() { (0, 9) } else { (9, 10) };
        let mut of = |weighted: bool| {
            let loss = ddp.forward(|model| model.loss(samples(from, to))).unwrap();
            let gradients = match weighted {
                true => ddp.backward_weighted(&loss, (to - from) as f64),
                false => ddp.backward(&loss),
            };
            let weight = start.layers[0].weight.id;
            gradients.unwrap().get::<2>(weight).unwrap().into_data().try_to_vec::<f32>().unwrap()
        };
        assert!(distance(&[of(true)], std::slice::from_ref(&whole)) < 1e-6);
        assert!(distance(&[of(false)], std::slice::from_ref(&whole)) > 0.05);
    });
}

#[test]
fn in_a_world_of_one_weights_change_no_bit() {
    run(1, |group| {
        let mut weighted = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let mut plain = Ddp::new(weighted.model().clone(), &group).unwrap();
        let mut optimizers = [sgd(), sgd()];
        for step in 0..4 {
            let loss = weighted.forward(|model| model.loss(samples(step, step + 7))).unwrap();
            let gradients = weighted.backward_weighted(&loss, 7.0).unwrap();
            weighted.step(&mut optimizers[0], 0.1, gradients).unwrap();
            let loss = plain.forward(|model| model.loss(samples(step, step + 7))).unwrap();
            let gradients = plain.backward(&loss).unwrap();
            plain.step(&mut optimizers[1], 0.1, gradients).unwrap();
        }
        assert_eq!(floats(weighted.model()), floats(plain.model()));
    });
}

#[test]
fn the_weights_cost_four_bytes_a_step_and_no_call() {
    run(2, |group| {
        let mut ddp = Ddp::with_options(Mlp::new(&WIDTHS), &group, options()).unwrap();
        let mut bytes = |weighted: bool| {
            let before = ddp.communicated_bytes();
            let loss = ddp.forward(|model| model.loss(samples(0, 2))).unwrap();
            drop(if weighted { ddp.backward_weighted(&loss, 2.0) } else { ddp.backward(&loss) }.unwrap());
            ddp.communicated_bytes() - before
        };
        bytes(false);
        assert_eq!(bytes(true), bytes(false) + 4);
    });
}

#[test]
fn weighted_and_plain_passes_of_one_step_are_an_error_on_every_rank_that_names_both() {
    everywhere(|group| {
        let mut ddp = Ddp::with_options(Mlp::new(&WIDTHS), &group, options()).unwrap();
        let before = floats(ddp.model());
        // No rank must end the group while others are in `new`. They may learn of it here already.
        let _ended = group.barrier();
        let outcome =
            ddp.forward(|model| model.loss(samples(0, 4))).and_then(|loss| match group.rank().is_main() {
                true => ddp.backward_weighted(&loss, 4.0),
                false => ddp.backward(&loss),
            });
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("Ddp::backward_weighted") && error.contains("Ddp::backward "), "{error}");
        assert_eq!(floats(ddp.model()), before);
    });
    for weighted_first in [true, false] {
        run(2, |group| {
            let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
            // No rank must end the group while the other is in `new`. It may learn of it here already.
            let _ended = group.barrier();
            let mut loss = || ddp.forward(|model| model.loss(samples(0, 4)));
            let losses = loss().and_then(|first| Ok((first, loss()?)));
            let outcome = losses.and_then(|(first, second)| match weighted_first {
                true => ddp.backward_no_sync_weighted(&first, 4.0).and_then(|()| ddp.backward(&second)),
                false => ddp.backward_no_sync(&first).and_then(|()| ddp.backward_weighted(&second, 4.0)),
            });
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("passes without"), "{error}");
        });
    }
}

#[test]
fn weights_that_are_none_are_refused_by_name_on_every_rank() {
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        everywhere(|group| {
            let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
            // Rank 1 must not end the group while others are in `new`. They may learn of it here already.
            let _ended = group.barrier();
            let weight = if group.rank().index() == 1 { wrong } else { 4.0 };
            let outcome = ddp.forward(|model| model.loss(samples(0, 4)));
            let outcome = outcome.and_then(|loss| ddp.backward_weighted(&loss, weight));
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains("is no weight"), "{error}");
        });
    }
    run(1, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
        assert!(ddp.backward_weighted(&loss, -1.0).unwrap_err().is_invalid_argument());
    });
}

/// The gradient of such a loss begins as the weight: 4097 is 4096 in f16, and 70,000 is infinite.
#[test]
fn a_loss_of_16_bits_has_no_weight() {
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        run(1, |group| {
            let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
            let loss = ddp.forward(|model| model.loss(samples(0, 4)).cast(dtype)).unwrap();
            let error = ddp.backward_weighted(&loss, 4097.0).unwrap_err().to_string();
            assert!(error.contains("too narrow for weights") && error.contains("in f32"), "{error}");
            let error = ddp.backward_no_sync_weighted(&loss, 70_000.0).unwrap_err().to_string();
            assert!(error.contains("too narrow for weights"), "{error}");
        });
    }
}

#[test]
fn a_step_without_samples_is_an_error_everywhere_and_training_goes_on() {
    for ranks in [1, 3] {
        run(ranks, |group| {
            let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
            let mut optimizer = sgd();
            for step in 0..4 {
                let loss = ddp.forward(|model| model.loss(samples(step, step + 1))).unwrap();
                let outcome = ddp.backward_weighted(&loss, (step % 2) as f64);
                match step % 2 {
                    0 => {
                        let error = outcome.unwrap_err().to_string();
                        assert!(error.contains("add up to 0"), "{error}");
                    }
                    _ => ddp.step(&mut optimizer, 0.1, outcome.unwrap()).unwrap(),
                }
            }
            assert!(ddp.replicas_identical().unwrap());
        });
    }
}

#[test]
fn hooks_that_cannot_tell_weights_are_refused_by_name() {
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        ddp.register_comm_hook(Compressed::bf16()).unwrap();
        // No rank must end the group while the other registers the hook. It may learn of it here already.
        let _ended = group.barrier();
        let outcome = ddp.forward(|model| model.loss(samples(0, 4)));
        let error = outcome.and_then(|loss| ddp.backward_weighted(&loss, 4.0)).unwrap_err().to_string();
        assert!(error.contains("compressed to bf16") && error.contains("sum of weights"), "{error}");
    });
}

#[test]
fn a_zero_redundancy_optimizer_takes_weighted_averages() {
    let start = Mlp::new(&WIDTHS);
    for ranks in [2, 3] {
        run(ranks, |group| {
            let mut plain = Ddp::with_options(start.clone(), &group, options()).unwrap();
            let mut spread = Ddp::with_options(start.clone(), &group, options()).unwrap();
            let mut whole = sgd();
            let mut sharded = ZeroRedundancyOptimizer::new(sgd(), &mut spread).unwrap();
            for step in 0..5 {
                let count = 1 + (group.rank().index() * 5 + step) % 7;
                let batch = || samples(step * 10, step * 10 + count);
                let loss = plain.forward(|model| model.loss(batch())).unwrap();
                let gradients = plain.backward_weighted(&loss, count as f64).unwrap();
                plain.step(&mut whole, 0.05, gradients).unwrap();
                let loss = spread.forward(|model| model.loss(batch())).unwrap();
                let gradients = spread.backward_weighted(&loss, count as f64).unwrap();
                sharded.step(&mut spread, 0.05, gradients).unwrap();
                assert_eq!(floats(plain.model()), floats(spread.model()), "step {step}");
            }
        });
    }
}

#[test]
fn in_a_join_a_rank_without_batches_has_no_weight() {
    let start = Mlp::new(&WIDTHS);
    // Rank r has r + 1 batches; in step s of 3 + 2s + r samples.
    let count = |step: usize, rank: usize| if step > rank { 0 } else { 3 + 2 * step + rank };
    for ranks in [2, 3] {
        for divide_by_all in [true, false] {
            let mut model = start.clone();
            let mut optimizer = sgd();
            for step in 0..ranks {
                let all: usize = (0..ranks).map(|rank| count(step, rank)).sum();
                let gradients = model.loss(samples(step * 50, step * 50 + all)).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                model = optimizer.step(LEARNING_RATE, model, gradients);
            }
            let expected = floats(&model);
            let trained = run(ranks as u32, |group| {
                let mut ddp = Ddp::with_options(start.clone(), &group, options()).unwrap();
                let (rank, mut optimizer) = (group.rank().index(), sgd());
                let mut join = JoinOptions::default();
                join.divide_by_initial_world_size = divide_by_all;
                ddp.join(&mut optimizer, join, |ddp, optimizer| {
                    for step in 0..=rank {
                        let from = step * 50 + (0..rank).map(|rank| count(step, rank)).sum::<usize>();
                        let count = count(step, rank);
                        let loss = ddp.forward(|model| model.loss(samples(from, from + count)))?;
                        let gradients = ddp.backward_weighted(&loss, count as f64)?;
                        ddp.step(optimizer, LEARNING_RATE, gradients)?;
                    }
                    Ok(())
                })
                .unwrap();
                assert!(ddp.replicas_identical().unwrap());
                floats(ddp.model())
            });
            for ours in trained {
                let distance = distance(&ours, &expected);
                assert!(distance < 1e-5, "{ranks} ranks: {distance:e}");
            }
        }
    }
}

#[test]
fn a_synchronised_batch_norm_sees_weighted_gradients() {
    #[derive(Module, Debug)]
    struct Model<N: Module> {
        first: Linear,
        norm: N,
        last: Linear,
    }
    fn start() -> Model<BatchNorm> {
        let linear = |from, to| LinearConfig::new(from, to).init(&device());
        let model =
            Model { first: linear(8, 6), norm: BatchNormConfig::new(6).init(&device()), last: linear(6, 3) };
        model.map(&mut Waves::default())
    }
    fn loss<N: Module>(
        model: &Model<N>,
        (x, y): (Tensor<2>, Tensor<2>),
        norm: impl Fn(&N, Tensor<2>) -> Tensor<2>,
    ) -> Tensor<1> {
        let hidden = norm(&model.norm, model.first.forward(x)).tanh();
        (model.last.forward(hidden) - y).powi_scalar(2).mean()
    }
    const COUNTS: [usize; 3] = [2, 9, 4];
    for ranks in [2, 3] {
        let all = COUNTS[..ranks].iter().sum::<usize>();
        let (mut model, mut optimizer) = (start(), SgdConfig::new().init());
        for step in 0..3 {
            let loss = loss(&model, samples(step * 20, step * 20 + all), |norm, x| norm.forward(x));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model, gradients);
        }
        let expected = [floats(&model.first), floats(&model.last)].concat();
        run(ranks as u32, |group| {
            let group = JoinGroup::new(group);
            let Model { first, norm, last } = start();
            let model = Model { first, norm: SyncBatchNorm::new(norm, &group), last };
            let mut ddp = Ddp::new(model, &group).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let rank = ddp.rank().index();
            for step in 0..3 {
                let from = step * 20 + COUNTS[..rank].iter().sum::<usize>();
                let batch = samples(from, from + COUNTS[rank]);
                let loss = ddp.forward(|model| loss(model, batch, |norm, x| norm.forward(x))).unwrap();
                let gradients = ddp.backward_weighted(&loss, COUNTS[rank] as f64).unwrap();
                ddp.step(&mut optimizer, 0.1, gradients).unwrap();
            }
            let ours = [floats(&ddp.model().first), floats(&ddp.model().last)].concat();
            let distance = distance(&ours, &expected);
            assert!(distance < 1e-5, "{ranks} ranks: {distance:e}");
        });
    }
}

#[test]
fn of_several_forward_passes_a_rank_without_samples_uses_none() {
    let start = Mlp::new(&WIDTHS);
    let whole = {
        let loss = start.loss(samples(0, 4)) + start.loss(samples(4, 8));
        let gradients = loss.backward();
        start.layers[0].weight.val().grad(&gradients).unwrap().into_data().try_to_vec::<f32>().unwrap()
    };
    run(2, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        for _ in 0..2 {
            let first = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
            let second = ddp.forward(|model| model.loss(samples(4, 8))).unwrap();
            let gradients = match group.rank().is_main() {
                true => ddp.backward_weighted(&(first + second), 3.0),
                false => ddp.backward_weighted(&((first + second) * f32::NAN), 0.0),
            };
            let gradients = gradients.unwrap();
            let ours =
                gradients.get::<2>(start.layers[0].weight.id).unwrap().into_data().try_to_vec().unwrap();
            assert!(distance(&[ours], std::slice::from_ref(&whole)) < 1e-6);
        }
    });
}
