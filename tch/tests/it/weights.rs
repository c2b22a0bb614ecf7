//! Ranks with unequal numbers of samples, against one process with the samples of all.

use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::Compressed;
use phalanx::testing::{self, Fabric};
use phalanx::{ProcessGroup, Result};
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule, SyncBatchNorm};
use tch::nn::OptimizerConfig;
use tch::{Kind, Tensor, nn};

use crate::common::{Mlp, device, distance, elements, floats, load, run, samples};

const STEPS: usize = 8;
const WIDTHS: [i64; 4] = [8, 32, 16, 3];
const LEARNING_RATE: f64 = 0.05;
const SGD: Rule = Rule::sgd(0.9);

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

/// Plain tch, on the samples of all passes of all ranks.
fn reference(start: &[Vec<f32>], ranks: usize, passes: usize) -> Vec<Vec<f32>> {
    let (model, mut from) = (Mlp::like(&WIDTHS, start), 0);
    let sgd = nn::Sgd { momentum: 0.9, ..Default::default() };
    let mut optimizer = sgd.build(&model.store, LEARNING_RATE).unwrap();
    for step in 0..STEPS {
        let count: usize = sizes(step, ranks, passes).iter().sum();
        optimizer.backward_step(&model.loss(samples(from, from + count)));
        from += count;
    }
    floats(&model.store)
}

fn gradients(model: &Mlp) -> Vec<Vec<f32>> {
    model.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect()
}

/// As [`reference`], in `group`. `leaves_zeros`: with an optimizer whose `zero_grad` leaves zeros.
fn train(model: &Mlp, group: &ProcessGroup, passes: usize, leaves_zeros: bool) -> Result<Ddp> {
    let mut ddp = Ddp::with_options(&model.store, group, options())?;
    let (mut optimizer, mut from) = (Optimizer::new(&model.store, SGD)?, 0);
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    for step in 0..STEPS {
        let sizes = sizes(step, ranks, passes);
        match leaves_zeros {
            true => model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad),
            false => optimizer.zero_grad()?,
        }
        for pass in 0..passes {
            let place = rank * passes + pass;
            let first = from + sizes[..place].iter().sum::<usize>();
            let (count, weight) = (sizes[place], sizes[place] as f64);
            let loss = ddp.forward(|| match count {
                // The mean of nothing is no number; its gradients are zeros. Those of a number times NaN are none.
                0 if step % 2 == 0 => model.loss(samples(99, 99)),
                0 => model.loss(samples(99, 100)) * f64::NAN,
                _ => model.loss(samples(first, first + count)),
            })?;
            assert_eq!(loss.double_value(&[]).is_nan(), count == 0);
            if pass + 1 < passes {
                ddp.backward_no_sync_weighted(&loss, weight)?;
            } else {
                ddp.backward_weighted(&loss, weight)?;
                optimizer.step(LEARNING_RATE)?;
            }
        }
        from += sizes.iter().sum::<usize>();
    }
    Ok(ddp)
}

#[test]
fn unequal_batches_train_as_one_process_with_the_whole_batch() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    for (ranks, passes) in [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (3, 3)] {
        let expected = reference(&start, ranks, passes);
        assert!(distance(&expected, &start) > 0.01, "the reference has not moved");
        for leaves_zeros in [false, true] {
            let trained = run(ranks as u32, |group| {
                let model = Mlp::like(&WIDTHS, &start);
                let ddp = train(&model, &group, passes, leaves_zeros).unwrap();
                assert!(ddp.replicas_identical().unwrap());
                floats(&model.store)
            });
            for ours in trained {
                let distance = distance(&ours, &expected);
                assert!(distance < 1e-5, "{ranks} ranks x {passes}, zeros {leaves_zeros}: {distance:e} away");
            }
        }
    }
}

/// The means of ranks' means, which plain averages are, differ. Steps of both kinds may follow each other.
#[test]
fn plain_averages_of_unequal_batches_are_those_of_another_loss() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    let whole = Mlp::like(&WIDTHS, &start);
    whole.loss(samples(0, 10)).backward();
    let whole = gradients(&whole);
    run(2, |group| {
        let model = Mlp::like(&WIDTHS, &start);
        let mut ddp = Ddp::with_options(&model.store, &group, options()).unwrap();
        let mut optimizer = Optimizer::new(&model.store, SGD).unwrap();
        let (from, to) = if group.rank().is_main() { (0, 9) } else { (9, 10) };
        for weighted in [true, false, true, true, false] {
            optimizer.zero_grad().unwrap();
            let loss = ddp.forward(|| model.loss(samples(from, to))).unwrap();
            match weighted {
                true => ddp.backward_weighted(&loss, (to - from) as f64).unwrap(),
                false => ddp.backward(&loss).unwrap(),
            }
            let distance = distance(&gradients(&model), &whole);
            assert!(if weighted { distance < 1e-6 } else { distance > 0.05 }, "{weighted}: {distance:e}");
        }
    });
}

#[test]
fn in_a_world_of_one_weights_change_nothing() {
    run(1, |group| {
        let start = floats(&Mlp::new(&WIDTHS).store);
        let [weighted, plain] = [true, false].map(|is_weighted| {
            let model = Mlp::like(&WIDTHS, &start);
            let mut ddp = Ddp::new(&model.store, &group).unwrap();
            let mut optimizer = Optimizer::new(&model.store, SGD).unwrap();
            for step in 0..4 {
                let loss = ddp.forward(|| model.loss(samples(step, step + 7))).unwrap();
                optimizer.zero_grad().unwrap();
                match is_weighted {
                    true => ddp.backward_weighted(&loss, 7.0).unwrap(),
                    false => ddp.backward(&loss).unwrap(),
                }
                optimizer.step(0.1).unwrap();
            }
            floats(&model.store)
        });
        // Not bit for bit: sums of libtorch's kernels on several threads depend on where their memory begins.
        let apart = distance(&weighted, &plain);
        assert!(apart < 1e-6, "{apart:e}");
    });
}

#[test]
fn the_weights_cost_four_bytes_a_step_and_no_call() {
    run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::with_options(&model.store, &group, options()).unwrap();
        let mut optimizer = Optimizer::new(&model.store, SGD).unwrap();
        let mut bytes = |weighted: bool| {
            let before = ddp.communicated_bytes();
            let loss = ddp.forward(|| model.loss(samples(0, 2))).unwrap();
            optimizer.zero_grad().unwrap();
            if weighted { ddp.backward_weighted(&loss, 2.0) } else { ddp.backward(&loss) }.unwrap();
            ddp.communicated_bytes() - before
        };
        bytes(false);
        assert_eq!(bytes(true), bytes(false) + 4);
    });
}

/// The errors of `backward`, of the loss of one batch, on every rank. The first rank's error ends the group, so others may get it in an
/// earlier call, here as in all tests.
fn errors_of(backward: impl Fn(&mut Ddp, &Tensor) -> Result<()> + Sync) -> Vec<String> {
    tch::set_num_threads(1);
    let rank = |group: ProcessGroup| {
        let model = Mlp::new(&WIDTHS);
        let outcome = Ddp::with_options(&model.store, &group, options()).and_then(|mut ddp| {
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            backward(&mut ddp, &loss)
        });
        outcome.unwrap_err().to_string()
    };
    let jobs = [2, 3].into_iter().flat_map(|ranks| [(ranks, Fabric::SharedMemory), (ranks, Fabric::Tcp)]);
    jobs.flat_map(|(ranks, fabric)| testing::run(ranks, fabric, rank)).collect()
}

#[test]
fn weighted_and_plain_passes_of_one_step_are_an_error_on_every_rank_that_names_both() {
    let errors = errors_of(|ddp, loss| match ddp.rank().is_main() {
        true => ddp.backward_weighted(loss, 4.0),
        false => ddp.backward(loss),
    });
    for error in errors {
        assert!(error.contains("Ddp::backward_weighted") && error.contains("Ddp::backward "), "{error}");
    }
    for (ranks, weighted_first) in [(1, true), (1, false), (2, true), (2, false)] {
        run(ranks, |group| {
            let attempt = || {
                let model = Mlp::new(&WIDTHS);
                let mut ddp = Ddp::new(&model.store, &group)?;
                let mut loss = || ddp.forward(|| model.loss(samples(0, 4)));
                let (first, second) = (loss()?, loss()?);
                match weighted_first {
                    true => ddp.backward_no_sync_weighted(&first, 4.0).and_then(|()| ddp.backward(&second)),
                    false => ddp.backward_no_sync(&first).and_then(|()| ddp.backward_weighted(&second, 4.0)),
                }
            };
            let error = attempt().unwrap_err().to_string();
            assert!(error.contains("passes without"), "{error}");
        });
    }
}

/// libtorch adds to what is there, and that would be weighted as if it belonged to the step.
#[test]
fn gradients_of_before_a_weighted_step_are_refused_by_name() {
    let refused = |ranks: u32, word: &str, passes: &(dyn Fn(&mut Ddp, &Mlp) -> Result<()> + Sync)| {
        run(ranks, |group| {
            let model = Mlp::new(&WIDTHS);
            let mut ddp = Ddp::new(&model.store, &group);
            let attempt = ddp.as_mut().map_err(|error| error.clone()).and_then(|ddp| passes(ddp, &model));
            let error = attempt.unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("parameter `0."), "{error}");
            if ranks > 1 {
                return;
            }
            // Alone, it ends the step and nothing else.
            let mut ddp = ddp.unwrap();
            model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            let loss = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
            ddp.backward_weighted(&loss, 4.0).unwrap();
            let ours = gradients(&model);
            model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            model.loss(samples(0, 4)).backward();
            assert_eq!(ours, gradients(&model));
        });
    };
    for ranks in [1, 2] {
        refused(ranks, "from before this weighted step", &|ddp, model| {
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_weighted(&loss, 4.0)?;
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_weighted(&loss, 4.0)
        });
        refused(ranks, "was changed between two backward passes", &|ddp, model| {
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_no_sync_weighted(&loss, 4.0)?;
            ddp.clip_grad_norm(1e-3)?;
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_weighted(&loss, 4.0)
        });
        refused(ranks, "was changed between two backward passes", &|ddp, model| {
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_no_sync_weighted(&loss, 4.0)?;
            Optimizer::new(&model.store, SGD)?.zero_grad()?;
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_weighted(&loss, 4.0)
        });
    }
}

#[test]
fn weights_that_are_none_are_refused_by_name_on_every_rank() {
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let errors = errors_of(|ddp, loss| {
            ddp.backward_weighted(loss, if ddp.rank().index() == 1 { wrong } else { 4.0 })
        });
        for error in errors {
            assert!(error.contains("rank 1") && error.contains("is no weight"), "{error}");
        }
    }
    run(1, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let loss = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
        assert!(ddp.backward_weighted(&loss, -1.0).unwrap_err().is_invalid_argument());
    });
}

#[test]
fn a_step_without_samples_is_an_error_everywhere_and_training_goes_on() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    for ranks in [1, 3] {
        let ends = run(ranks, |group| {
            let model = Mlp::like(&WIDTHS, &start);
            let mut ddp = Ddp::new(&model.store, &group).unwrap();
            let mut optimizer = Optimizer::new(&model.store, SGD).unwrap();
            for step in 0..4 {
                let loss = ddp.forward(|| model.loss(samples(step, step + step % 2))).unwrap();
                optimizer.zero_grad().unwrap();
                let outcome = ddp.backward_weighted(&loss, (step % 2) as f64);
                match step % 2 {
                    0 => {
                        let error = outcome.unwrap_err().to_string();
                        assert!(error.contains("add up to 0"), "{error}");
                    }
                    _ => outcome.and_then(|()| optimizer.step(0.1)).unwrap(),
                }
            }
            assert!(ddp.replicas_identical().unwrap());
            floats(&model.store)
        });
        let expected = Mlp::like(&WIDTHS, &start);
        let mut optimizer = Optimizer::new(&expected.store, SGD).unwrap();
        for step in [1, 3] {
            optimizer.zero_grad().unwrap();
            expected.loss(samples(step, step + 1)).backward();
            optimizer.step(0.1).unwrap();
        }
        let distance = distance(&ends[0], &floats(&expected.store));
        assert!(distance < 1e-6, "{ranks} ranks: {distance:e}");
    }
}

#[test]
fn what_cannot_be_weighted_is_refused_by_name() {
    run(2, |group| {
        let attempt = || {
            let model = Mlp::new(&WIDTHS);
            let mut ddp = Ddp::new(&model.store, &group)?;
            ddp.register_comm_hook(Compressed::bf16())?;
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward_weighted(&loss, 4.0)
        };
        let error = attempt().unwrap_err().to_string();
        assert!(error.contains("compressed to bf16") && error.contains("sum of weights"), "{error}");
    });
    run(1, |group| {
        let mut model = Mlp::new(&WIDTHS);
        model.store.bfloat16();
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let loss = ddp.forward(|| samples(0, 4).0.to_kind(Kind::BFloat16).apply(&model.layers[0])).unwrap();
        let error = ddp.backward_weighted(&loss.sum(Kind::BFloat16), 4.0).unwrap_err().to_string();
        assert!(error.contains("too narrow for weights"), "{error}");
    });
}

/// The gradient of such a loss begins as the weight: 4097 is 4096 in f16, and 70,000 is infinite.
#[test]
fn a_loss_of_16_bits_has_no_weight() {
    for kind in [Kind::Half, Kind::BFloat16] {
        run(1, |group| {
            let model = Mlp::new(&WIDTHS);
            let mut ddp = Ddp::new(&model.store, &group).unwrap();
            let mut loss = || ddp.forward(|| model.loss(samples(0, 4)).to_kind(kind)).unwrap();
            let (first, second) = (loss(), loss());
            for error in
                [ddp.backward_weighted(&first, 4097.0), ddp.backward_no_sync_weighted(&second, 70_000.0)]
            {
                let error = error.unwrap_err().to_string();
                assert!(error.contains("too narrow for weights") && error.contains("in f32"), "{error}");
            }
        });
    }
}

#[test]
fn alone_gradients_in_one_memory_are_divided_once() {
    run(1, |group| {
        let store = nn::VarStore::new(device());
        let (square, column) = (store.root().ones("square", &[2, 2]), store.root().ones("column", &[4, 1]));
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let factors = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).to_device(device());
        // libtorch gives each a view of one tensor as its gradient, that of the sum.
        let loss = || ((square.view([4]) + column.view([4])) * &factors).sum(Kind::Float);
        let (first, second) = (ddp.forward(loss).unwrap(), ddp.forward(loss).unwrap());
        ddp.backward_no_sync_weighted(&first, 2.0).unwrap();
        ddp.backward_weighted(&second, 0.0).unwrap();
        for gradient in [square.grad(), column.grad()] {
            assert_eq!(elements(&gradient), [1.0, 2.0, 3.0, 4.0]);
        }
    });
}

#[test]
fn in_a_join_a_rank_without_batches_has_no_weight() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    // Rank r has r + 1 batches; in step s of 3 + 2s + r samples.
    let count = |step: usize, rank: usize| if step > rank { 0 } else { 3 + 2 * step + rank };
    for ranks in [2, 3] {
        for divide_by_all in [true, false] {
            let expected = Mlp::like(&WIDTHS, &start);
            let mut optimizer = Optimizer::new(&expected.store, SGD).unwrap();
            for step in 0..ranks {
                let all: usize = (0..ranks).map(|rank| count(step, rank)).sum();
                optimizer.zero_grad().unwrap();
                expected.loss(samples(step * 50, step * 50 + all)).backward();
                optimizer.step(LEARNING_RATE).unwrap();
            }
            let expected = floats(&expected.store);
            let trained = run(ranks as u32, |group| {
                let model = Mlp::like(&WIDTHS, &start);
                let mut ddp = Ddp::with_options(&model.store, &group, options()).unwrap();
                let (rank, mut optimizer) =
                    (group.rank().index(), Optimizer::new(&model.store, SGD).unwrap());
                let mut join = JoinOptions::default();
                join.divide_by_initial_world_size = divide_by_all;
                ddp.join(&mut optimizer, join, |ddp, optimizer| {
                    for step in 0..=rank {
                        let from = step * 50 + (0..rank).map(|rank| count(step, rank)).sum::<usize>();
                        let count = count(step, rank);
                        let loss = ddp.forward(|| model.loss(samples(from, from + count)))?;
                        optimizer.zero_grad()?;
                        ddp.backward_weighted(&loss, count as f64)?;
                        optimizer.step(LEARNING_RATE)?;
                    }
                    Ok(())
                })
                .unwrap();
                assert!(ddp.replicas_identical().unwrap());
                floats(&model.store)
            });
            for ours in trained {
                let distance = distance(&ours, &expected);
                assert!(distance < 1e-5, "{ranks} ranks: {distance:e}");
            }
        }
    }
}

/// `.ci/gpu` leaves it out where three ranks that are threads have no device each.
#[test]
fn a_synchronised_batch_norm_sees_weighted_gradients() {
    const COUNTS: [usize; 3] = [2, 9, 4];
    struct Model {
        dense: Mlp,
        norm: SyncBatchNorm,
    }
    let new = |group: &JoinGroup| {
        let (dense, config) = (Mlp::new(&[8, 6, 3]), nn::BatchNormConfig::default());
        let norm = nn::batch_norm1d(dense.store.root() / "norm", 6, config);
        Model { dense, norm: SyncBatchNorm::new(norm, config, group) }
    };
    let loss = |model: &Model, (x, y): (Tensor, Tensor)| {
        let hidden = model.norm.forward(&x.apply(&model.dense.layers[0]), true).unwrap().tanh();
        (hidden.apply(&model.dense.layers[1]) - y).square().mean(Kind::Float)
    };
    let alone = JoinGroup::new(ProcessGroup::alone().unwrap());
    let start = floats(&new(&alone).dense.store);
    for ranks in [2, 3] {
        let all = COUNTS[..ranks].iter().sum::<usize>();
        let expected = new(&alone);
        load(&expected.dense.store, &start);
        let mut optimizer = Optimizer::new(&expected.dense.store, SGD).unwrap();
        for step in 0..3 {
            optimizer.zero_grad().unwrap();
            loss(&expected, samples(step * 20, step * 20 + all)).backward();
            optimizer.step(0.1).unwrap();
        }
        let expected = floats(&expected.dense.store);
        run(ranks as u32, |group| {
            let group = JoinGroup::new(group);
            let model = new(&group);
            load(&model.dense.store, &start);
            let mut ddp = Ddp::new(&model.dense.store, group).unwrap();
            let mut optimizer = Optimizer::new(&model.dense.store, SGD).unwrap();
            let rank = ddp.rank().index();
            for step in 0..3 {
                let from = step * 20 + COUNTS[..rank].iter().sum::<usize>();
                let batch = samples(from, from + COUNTS[rank]);
                let loss = ddp.forward(|| loss(&model, batch)).unwrap();
                optimizer.zero_grad().unwrap();
                ddp.backward_weighted(&loss, COUNTS[rank] as f64).unwrap();
                optimizer.step(0.1).unwrap();
            }
            let distance = distance(&floats(&model.dense.store), &expected);
            assert!(distance < 1e-5, "{ranks} ranks: {distance:e}");
        });
    }
}

/// Two layers, of which a pass uses the first, and perhaps the second.
#[test]
fn parameters_that_some_passes_do_not_use_have_the_gradient_of_the_whole_batch() {
    const COUNTS: [usize; 4] = [5, 0, 2, 3];
    let new = || Mlp::new(&[8, 3, 3]);
    let sum = |model: &Mlp, (x, y): (Tensor, Tensor), uses_both: bool| {
        let hidden = x.apply(&model.layers[0]);
        let output = if uses_both { hidden.apply(&model.layers[1]) } else { hidden };
        (output - y).square().sum(Kind::Float)
    };
    let start = floats(&new().store);
    let gradients = |model: &Mlp| {
        let of = |one: &Tensor| one.grad().defined().then(|| elements(&one.grad()));
        model.store.trainable_variables().iter().map(of).collect::<Vec<_>>()
    };
    // Whether each pass uses the second layer: those of rank 0, then those of rank 1, which has no sample in its second.
    for uses in [
        [true, false, false, true],
        [false, true, false, true],
        [false, true, false, false],
        [false, false, true, false],
    ] {
        let whole = Mlp::like(&[8, 3, 3], &start);
        let (mut from, mut loss) = (0, Tensor::from(0f32).to_device(device()));
        for place in 0..4 {
            loss += sum(&whole, samples(from, from + COUNTS[place]), uses[place]);
            from += COUNTS[place];
        }
        (loss / (3 * from as i64)).backward();
        let expected = gradients(&whole);
        // What only a pass without samples has used is used by none.
        let is_used = (0..4).any(|place| uses[place] && COUNTS[place] > 0);
        let unused = ReducerOptions::default().find_unused_parameters(true);
        let fixed = ReducerOptions::default().static_graph(true);
        // A parameter that only a pass without samples has used is not missing.
        let each_uses_it = (uses[0] || uses[1]) && (uses[2] || uses[3]);
        let all = each_uses_it.then(ReducerOptions::default);
        for reducer in [unused, fixed].into_iter().chain(all) {
            run(2, |group| {
                let mut options = DdpOptions::default();
                options.reducer = reducer.clone();
                let model = Mlp::like(&[8, 3, 3], &start);
                let mut ddp = Ddp::with_options(&model.store, &group, options).unwrap();
                let mut optimizer = Optimizer::new(&model.store, SGD).unwrap();
                for step in 0..3 {
                    optimizer.zero_grad().unwrap();
                    for pass in 0..2 {
                        let place = 2 * group.rank().index() + pass;
                        let (first, count) = (COUNTS[..place].iter().sum::<usize>(), COUNTS[place]);
                        // A pass without samples has one, and a loss that is infinite.
                        let batch = samples(first, first + count.max(1));
                        let loss = || sum(&model, batch, uses[place]) / (3 * count as i64);
                        let loss = ddp.forward(loss).unwrap();
                        assert_eq!(loss.isfinite().int64_value(&[]), i64::from(count > 0));
                        match pass {
                            0 => ddp.backward_no_sync_weighted(&loss, count as f64).unwrap(),
                            _ => ddp.backward_weighted(&loss, count as f64).unwrap(),
                        }
                    }
                    for (index, (ours, expected)) in gradients(&model).into_iter().zip(&expected).enumerate()
                    {
                        if index >= 2 && !is_used {
                            let none = ours.is_none_or(|ours| ours.iter().all(|&x| x == 0.0));
                            assert!(none, "{uses:?}, step {step}");
                            continue;
                        }
                        let distance = distance(&[ours.unwrap()], &[expected.clone().unwrap()]);
                        assert!(distance < 1e-6, "{uses:?}, {reducer:?}, step {step}: {distance:e}");
                    }
                }
            });
        }
    }
}

#[test]
fn of_several_forward_passes_a_rank_without_samples_uses_none() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    let whole = Mlp::like(&WIDTHS, &start);
    (whole.loss(samples(0, 4)) + whole.loss(samples(4, 8))).backward();
    let whole = gradients(&whole);
    run(2, |group| {
        let model = Mlp::like(&WIDTHS, &start);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let mut optimizer = Optimizer::new(&model.store, SGD).unwrap();
        for _ in 0..2 {
            optimizer.zero_grad().unwrap();
            let first = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
            let second = ddp.forward(|| model.loss(samples(4, 8))).unwrap();
            match group.rank().is_main() {
                true => ddp.backward_weighted(&(first + second), 3.0),
                false => ddp.backward_weighted(&((first + second) * f64::NAN), 0.0),
            }
            .unwrap();
            assert!(distance(&gradients(&model), &whole) < 1e-6);
        }
    });
}
