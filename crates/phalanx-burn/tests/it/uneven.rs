//! Ranks with unequal numbers of batches.

use std::sync::Barrier;

use crate::common::{Mlp, device, distance, floats, run, samples};
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::checkpoint::Checkpoints;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::mesh::DeviceMesh;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::PostLocalSgd;
use phalanx::{Buffer, Communicator, ProcessGroup, ReduceOp, Result};
use phalanx_burn::parallel::tensor::{RowParallelLinear, TensorGroup};
use phalanx_burn::{Ddp, DdpOptions, PeriodicModelAverager, TrainState, ZeroRedundancyOptimizer};

const BATCH: usize = 4;
const LEARNING_RATE: f64 = 0.05;
const EPOCHS: usize = 3;

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn batch(epoch: usize, step: usize, rank: usize) -> (Tensor<2>, Tensor<2>) {
    let from = ((epoch * 10 + step) * 4 + rank) * BATCH;
    samples(from, from + BATCH)
}

/// The batches of each rank in each epoch: equal ones, none, one.
fn batches(epoch: usize, ranks: usize) -> Vec<usize> {
    let of = |rank: usize| match epoch {
        0 => rank * 2,                       // rank 0, whose order of buckets counts, has none
        1 => 5 - (rank + ranks - 1) % ranks, // another rank has most
        _ => 3,
    };
    (0..ranks).map(of).collect()
}

/// One process that adds up what each rank that still has batches would give.
fn reference(start: &Mlp, ranks: usize, divide_by_all: bool) -> Mlp {
    let mut model = start.clone();
    let mut optimizer = sgd();
    for epoch in 0..EPOCHS {
        let counts = batches(epoch, ranks);
        for step in 0..*counts.iter().max().unwrap() {
            let active: Vec<usize> = (0..ranks).filter(|&rank| step < counts[rank]).collect();
            let divisor = if divide_by_all { ranks } else { active.len() };
            let mut sum = GradientsAccumulator::new();
            for rank in active {
                let loss = model.loss(batch(epoch, step, rank)) / divisor as f32;
                sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
            }
            model = optimizer.step(LEARNING_RATE, model, sum.grads());
        }
    }
    model
}

fn train(start: &Mlp, group: &ProcessGroup, divide_by_all: bool) -> Result<Vec<Vec<f32>>> {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.001); // several buckets, which are rebuilt
    let mut ddp = Ddp::with_options(start.clone(), group, options)?;
    let mut optimizer = sgd();
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = divide_by_all;
    for epoch in 0..EPOCHS {
        let steps = ddp.join(&mut optimizer, join, |ddp, optimizer| {
            let mine = batches(epoch, ranks)[rank];
            for step in 0..mine {
                let loss = ddp.forward(|model| model.loss(batch(epoch, step, rank)))?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, LEARNING_RATE, gradients)?;
            }
            Ok(mine)
        })?;
        assert_eq!(steps, batches(epoch, ranks)[rank]);
        assert!(ddp.replicas_identical()?, "epoch {epoch}");
    }
    Ok(floats(ddp.model()))
}

#[test]
fn uneven_inputs_train_as_one_process_that_sees_the_same_batches() {
    let start = Mlp::new(&[8, 16, 16, 3]);
    for ranks in [1, 2, 3, 4] {
        for divide_by_all in [true, false] {
            let expected = floats(&reference(&start, ranks, divide_by_all));
            let trained = run(ranks as u32, |group| train(&start, &group, divide_by_all).unwrap());
            for ours in &trained {
                assert_eq!(ours, &trained[0], "{ranks} ranks");
                let distance = distance(ours, &expected);
                assert!(distance < 1e-5, "{ranks} ranks, by all {divide_by_all}: {distance:e}");
            }
        }
    }
}

#[test]
fn buffers_accumulation_unused_parameters_and_other_participants_are_joined_too() {
    #[derive(Module, Debug)]
    struct Model {
        dense: Linear,
        spare: Linear,
        norm: BatchNorm,
    }
    let layer = || LinearConfig::new(8, 4).init(&device());
    let start = Model { dense: layer(), spare: layer(), norm: BatchNormConfig::new(4).init(&device()) };
    for ranks in [2, 3, 4] {
        let trained = run(ranks, |group| {
            // Someone else's collectives in each forward pass, as those of a synchronised batch norm.
            let group = JoinGroup::new(group);
            let mut options = DdpOptions::default();
            options.reducer = ReducerOptions::default().find_unused_parameters(true);
            // Clones of a batch norm have its running statistics in common. Ranks that are threads must not.
            let own = Model { norm: BatchNormConfig::new(4).init(&device()), ..start.clone() };
            let mut ddp = Ddp::with_options(own, &group, options).unwrap();
            let mut optimizer = sgd();
            let rank = group.rank().index();
            let mut statistics = Vec::new();
            for epoch in 0..EPOCHS {
                let counts = batches(epoch, ranks as usize);
                ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                    for step in 0..counts[rank] {
                        for part in 0..2 {
                            let x = batch(epoch, step, rank).0;
                            let loss = ddp.forward(|model| {
                                let ones = Buffer::from_slice(&[1i64]);
                                let count = group.all_reduce_async(ones, ReduceOp::Sum)?.wait()?;
                                let active = counts.iter().filter(|&&count| step < count).count();
                                assert_eq!(count.as_slice::<i64>()?, [active as i64]);
                                Ok::<_, phalanx::Error>(
                                    model.norm.forward(model.dense.forward(x)).powi_scalar(4).mean(),
                                )
                            })??;
                            if part == 0 {
                                ddp.backward_no_sync(&loss)?;
                            } else {
                                let gradients = ddp.backward(&loss)?;
                                ddp.step(optimizer, LEARNING_RATE, gradients)?;
                            }
                        }
                    }
                    Ok(())
                })
                .unwrap();
                assert!(ddp.replicas_identical().unwrap());
                // After an even epoch they are each rank's own until the next forward pass.
                if counts.iter().any(|count| *count != counts[0]) {
                    let mean = ddp.model().norm.running_mean.value_sync();
                    statistics.push(mean.into_data().try_to_vec::<f32>().unwrap());
                }
            }
            assert_eq!(statistics.len(), 2);
            (floats(&ddp.model().dense.clone().valid()), statistics)
        });
        assert!(trained.iter().all(|ours| *ours == trained[0]), "{ranks} ranks");
        assert!(trained[0].1[0] != trained[0].1[1]);
        assert_ne!(trained[0].0[0], floats(&start)[0]);
    }
}

#[test]
fn early_termination_ends_every_rank_on_the_same_step() {
    let start = Mlp::new(&[8, 3]);
    for ranks in [2, 3, 4] {
        let ends = run(ranks, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut optimizer = sgd();
            let mut join = JoinOptions::default();
            join.throw_on_early_termination = true;
            let rank = group.rank().index();
            let mut steps = 0;
            let error = ddp
                .join(&mut optimizer, join, |ddp, optimizer| {
                    for step in 0..if rank == 1 { 2 } else { 4 } {
                        let loss = ddp.forward(|model| model.loss(batch(0, step, rank)))?;
                        let gradients = ddp.backward(&loss)?;
                        ddp.step(optimizer, LEARNING_RATE, gradients)?;
                        steps += 1;
                    }
                    Ok(())
                })
                .unwrap_err();
            assert!(error.to_string().contains("rank 1 has no data left"), "{error}");
            assert!(ddp.replicas_identical().unwrap(), "the group still works");
            // And so does training.
            let loss = ddp.forward(|model| model.loss(batch(1, 0, rank))).unwrap();
            assert_eq!(ddp.backward(&loss).unwrap().len(), 2);
            steps
        });
        assert!(ends.iter().all(|&steps| steps == 2), "{ends:?}");
    }
}

#[test]
fn an_average_of_the_model_is_that_of_the_ranks_that_still_train() {
    let start = Mlp::new(&[8, 16, 3]);
    // Gradients that are each rank's own are divided by nothing, whatever ranks average is divided by.
    for (ranks, by_initial) in [(2, true), (3, true), (3, false)] {
        let mut options = JoinOptions::default();
        options.divide_by_initial_world_size = by_initial;
        // Every rank takes a step, the last rank takes two more.
        let step = |model: &Mlp, number: usize, rank: usize| {
            let gradients = GradientsParams::from_grads(model.loss(batch(0, number, rank)).backward(), model);
            SgdConfig::new().init().step(LEARNING_RATE, model.clone(), gradients)
        };
        let firsts: Vec<_> = (0..ranks).map(|rank| floats(&step(&start, 0, rank))).collect();
        let trained = run(ranks as u32, |group| {
            let rank = group.rank().index();
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            ddp.register_comm_hook(PostLocalSgd::new(0)).unwrap();
            let mut averager = PeriodicModelAverager::new(1).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let mut reached = Vec::new();
            let steps = if rank + 1 == ranks { 3 } else { 1 };
            ddp.join(&mut optimizer, options, |ddp, optimizer| {
                for number in 0..steps {
                    let expected = step(ddp.model(), number, rank);
                    let loss = ddp.forward(|model| model.loss(batch(0, number, rank)))?;
                    let gradients = ddp.backward(&loss)?;
                    ddp.step(optimizer, LEARNING_RATE, gradients)?;
                    assert!(averager.step(ddp)?);
                    reached.push((floats(ddp.model()), floats(&expected)));
                }
                Ok(())
            })
            .unwrap();
            assert!(ddp.replicas_identical().unwrap());
            reached
        });
        for (index, values) in trained[0][0].0.iter().enumerate() {
            for (place, value) in values.iter().enumerate() {
                let mean = firsts.iter().map(|model| model[index][place]).sum::<f32>() / ranks as f32;
                assert!((value - mean).abs() < 1e-6, "{value} is not {mean}");
            }
        }
        for (ours, alone) in &trained[ranks - 1][1..] {
            let distance = distance(ours, alone);
            assert!(distance < 1e-6, "{ranks} ranks: {distance:e} from a rank that trains by itself");
        }
    }
}

#[test]
fn an_average_of_the_model_is_without_a_rank_that_was_done_before_it() {
    let start = Mlp::new(&[8, 16, 3]);
    for has_averager in [false, true] {
        let ends = run(2, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut averager = PeriodicModelAverager::new(1).unwrap();
            let joined = ddp.join(&mut sgd(), JoinOptions::default(), |ddp, optimizer| {
                let loss = ddp.forward(|model| model.loss(batch(0, 0, 0)))?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, LEARNING_RATE, gradients)?;
                let before = floats(ddp.model());
                match has_averager {
                    // It has made the step, and not the average.
                    _ if group.rank().is_main() => {}
                    true => averager.step(ddp).map(drop)?,
                    false => ddp.average_parameters()?,
                }
                Ok(before)
            });
            (joined.unwrap(), floats(ddp.model()))
        });
        assert!(ends.iter().all(|(_, after)| *after == ends[1].0), "a model was averaged with nothing");
    }
}

#[test]
fn an_optimizer_that_is_spread_says_that_it_needs_every_rank() {
    let start = Mlp::new(&[8, 16, 3]);
    let errors = run(2, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        let mut zero = ZeroRedundancyOptimizer::new(sgd(), &mut ddp).unwrap();
        let steps = 1 + group.rank().index();
        ddp.join(&mut sgd(), JoinOptions::default(), |ddp, _| {
            for number in 0..steps {
                let loss = ddp.forward(|model| model.loss(batch(0, number, 0)))?;
                let gradients = ddp.backward(&loss)?;
                zero.step(ddp, LEARNING_RATE, gradients)?;
            }
            Ok(())
        })
        .unwrap_err()
        .to_string()
    });
    assert!(errors.iter().all(|error| error.contains("1 of 2 ranks have no data left")), "{errors:?}");
}

#[test]
fn a_training_state_counts_its_steps_and_all_ranks_go_on_from_the_same_place() {
    let (start, folder) = (Mlp::new(&[8, 16, 3]), tempfile::tempdir().unwrap());
    let rates = run(2, |group| {
        let rank = group.rank().index();
        let scheduler = LinearLrSchedulerConfig::new(0.1, 0.01, 10).init().unwrap();
        let state = TrainState::new(start.clone(), sgd(), ()).unwrap().with_scheduler(scheduler);
        let averager = PeriodicModelAverager::new(2).unwrap();
        let mut state = state.with_averager(averager).with_group(&group).unwrap();
        let epoch = |state: &mut TrainState<Mlp>, steps: usize| {
            state.join(JoinOptions::default(), |state| {
                let mut rate = 0.0;
                for number in 0..steps {
                    let loss = state.model.forward(|model| model.loss(batch(0, number, rank)))?;
                    let gradients = state.model.backward(&loss)?;
                    rate = state.scheduled_step(gradients)?;
                }
                Ok(rate)
            })
        };
        epoch(&mut state, 1 + 2 * rank).unwrap();
        let averaged = state.averager.as_ref().map(PeriodicModelAverager::steps);
        assert_eq!((state.steps(), averaged), (3, Some(3)));
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        state.checkpoint(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 3);
        let rate = epoch(&mut state, 1).unwrap();
        assert!(state.model.replicas_identical().unwrap());
        rate
    });
    assert_eq!(rates[0], rates[1]);
}

#[test]
fn an_optimizer_that_one_rank_alone_has_exchanged_in_a_join_is_an_error_on_every_rank() {
    let start = Mlp::new(&[8, 16, 3]);
    let other = || SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.5))).init();
    // The first rank is done after one step, the second after three.
    let attempt = |group: &ProcessGroup, exchanged_in: usize| {
        let mut state = TrainState::new(start.clone(), sgd(), ()).unwrap().with_group(group).unwrap();
        let rank = group.rank().index();
        state.join(JoinOptions::default(), |state| {
            for number in 0..1 + 2 * rank {
                if number == exchanged_in {
                    state.optimizer = other();
                }
                let loss = state.model.forward(|model| model.loss(batch(0, number, rank)))?;
                let gradients = state.model.backward(&loss)?;
                state.step(LEARNING_RATE, gradients)?;
            }
            Ok(())
        })
    };
    for error in run(2, |group| attempt(&group, 2).unwrap_err()) {
        let said = "the optimizer of rank 1 changes parameters otherwise than that of rank 0";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
    }
    run(2, |group| attempt(&group, 0).unwrap());
}

/// The replicas of the other parts have the same optimizers, and would wait for these ranks in their next exchange.
#[test]
fn an_optimizer_that_differs_after_a_join_ends_the_groups_among_which_layers_are_divided() {
    let other = || SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.5))).init();
    let all_have_stepped = [Barrier::new(2), Barrier::new(2)];
    let errors = run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
        let (data, part) = (mesh.coordinate("data").unwrap(), mesh.coordinate("tensor").unwrap());
        let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
        let layer = RowParallelLinear::new(LinearConfig::new(8, 3).init(&device()), &tensor).unwrap();
        let mut ddp = Ddp::new(layer, mesh.group("data").unwrap()).unwrap();
        let outcome = ddp.join(&mut sgd(), JoinOptions::default(), |ddp, optimizer| {
            for number in 0..1 + 2 * data {
                if number == 2 && part == 0 {
                    *optimizer = other();
                }
                let x = tensor.part(batch(0, number, data).0, 1);
                let loss = ddp.forward(|layer| layer.forward(x).mean())?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, LEARNING_RATE, gradients)?;
            }
            // None ends the tensor group while the other is still in that step.
            all_have_stepped[data].wait();
            Ok(())
        });
        let next = outcome.and_then(|()| mesh.group("tensor").and_then(ProcessGroup::barrier));
        next.unwrap_err().to_string()
    });
    for error in errors {
        let said = "the optimizer of rank 1 changes parameters otherwise than that of rank 0";
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn a_rank_that_has_had_no_data_in_the_first_join_steps_with_the_others_in_the_next() {
    let start = Mlp::new(&[8, 16, 3]);
    run(2, |group| {
        let rank = group.rank().index();
        let (mut ddp, mut optimizer) = (Ddp::new(start.clone(), &group).unwrap(), sgd());
        // In the first, rank 1 has nobody to compare its optimizer with; at its end both have compared.
        for steps in [2 * rank, 2] {
            ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                for number in 0..steps {
                    let loss = ddp.forward(|model| model.loss(batch(0, number, rank)))?;
                    let gradients = ddp.backward(&loss)?;
                    ddp.step(optimizer, LEARNING_RATE, gradients)?;
                }
                Ok(())
            })
            .unwrap();
        }
        assert!(ddp.replicas_identical().unwrap());
    });
}

#[test]
fn a_second_model_of_an_uneven_join_is_an_error_of_its_next_forward() {
    let start = Mlp::new(&[8, 16, 3]);
    for error in run(2, |group| {
        let group = JoinGroup::new(group);
        let rank = group.rank().index();
        let new = || (Ddp::new(start.clone(), &group).unwrap(), sgd());
        let ((mut own, mut optimizer), (mut other, mut others)) = (new(), new());
        let joined = own.join(&mut optimizer, JoinOptions::default(), |own, optimizer| {
            for number in 0..=rank {
                for (ddp, optimizer) in [(&mut *own, &mut *optimizer), (&mut other, &mut others)] {
                    let loss = ddp.forward(|model| model.loss(batch(0, number, rank)))?;
                    let gradients = ddp.backward(&loss)?;
                    ddp.step(optimizer, LEARNING_RATE, gradients)?;
                }
            }
            Ok(())
        });
        joined.unwrap();
        own.forward(|_| ()).unwrap();
        assert!(own.replicas_identical().unwrap());
        other.forward(|_| ()).unwrap_err().to_string()
    }) {
        assert!(error.contains("1 to 2 by now"), "{error}");
    }
}

#[test]
fn ranks_whose_optimizers_differ_at_the_end_of_a_join_compare_again_together() {
    let start = Mlp::new(&[8, 16, 3]);
    run(2, |group| {
        let rank = group.rank().index();
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        let mut own = if rank == 0 { sgd() } else { SgdConfig::new().init() };
        let step = |ddp: &mut Ddp<Mlp>, optimizer: &mut ModuleOptimizer, number: usize| {
            let loss = ddp.forward(|model| model.loss(batch(0, number, rank)))?;
            let gradients = ddp.backward(&loss)?;
            ddp.step(optimizer, LEARNING_RATE, gradients)
        };
        // Rank 1 has compared its optimizer with nobody's, and rank 0 not yet.
        let error = ddp
            .join(&mut own, JoinOptions::default(), |ddp, optimizer| {
                (0..2 * rank).try_for_each(|number| step(ddp, optimizer, number))
            })
            .unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        let mut same = sgd();
        (0..2).for_each(|number| step(&mut ddp, &mut same, number).unwrap());
        assert!(ddp.replicas_identical().unwrap());
    });
}
