//! Ranks with unequal numbers of samples, against one process with the whole batch.

use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor};
use phalanx::checkpoint::Checkpoints;
use phalanx::mesh::DeviceMesh;
use phalanx::testing::{self, Fabric};
use phalanx::{ProcessGroup, Result};
use phalanx_burn::parallel::fsdp::{Fsdp, ShardingGroup, ShardingOptions};

use super::{Plan, Sharded, options};
use crate::common::{distance, floats, run};
use crate::parallel::model::{Batch, Whole, rows};

const LAYERS: usize = 2;
const STEPS: usize = 4;

/// The samples of each pass of a step; `slots` are all passes of all ranks. Some have none.
fn counts(step: usize, slots: usize) -> Vec<usize> {
    (0..slots).map(|slot| (slot * 5 + step * 3 + 1) % 4).collect()
}

/// Where the samples of a step begin.
fn begin(step: usize) -> usize {
    step * 16
}

/// The samples of one pass, or any one if it has none.
fn batch(step: usize, slot: usize, slots: usize) -> (Batch, usize) {
    let counts = counts(step, slots);
    let from = begin(step) + counts[..slot].iter().sum::<usize>();
    (rows(from, from + counts[slot].max(1)), counts[slot])
}

/// The mean over all samples of a step.
fn one_process(plan: &Plan, slots: usize) -> Vec<Vec<f32>> {
    let (mut model, mut optimizer) = (Whole::new(LAYERS), plan.optimizer.clone());
    for step in 0..STEPS {
        let total: usize = counts(step, slots).iter().sum();
        let loss = model.loss(rows(begin(step), begin(step) + total));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(plan.rate.clone(), model, gradients);
    }
    floats(&model)
}

fn model(sharding: &ShardingGroup) -> Fsdp<Sharded> {
    Fsdp::new(Sharded::new(Whole::new(LAYERS), sharding).unwrap(), sharding).unwrap()
}

/// The loss of a pass, and its weight. Without samples it is the mean of nothing.
fn loss(fsdp: &mut Fsdp<Sharded>, (batch, count): (Batch, usize)) -> Result<(Tensor<1>, f64)> {
    let loss = fsdp.forward(|model| model.loss(batch))?;
    Ok((if count == 0 { loss * f32::NAN } else { loss }, count as f64))
}

/// Of a rank that is number `rank` of `ranks`.
fn sharded(plan: &Plan, sharding: &ShardingGroup, rank: usize, ranks: usize) -> Vec<Vec<f32>> {
    let (mut fsdp, mut optimizer) = (model(sharding), plan.optimizer.clone());
    let slots = ranks * plan.parts;
    for step in 0..STEPS {
        for part in 0..plan.parts {
            let (loss, weight) = loss(&mut fsdp, batch(step, rank * plan.parts + part, slots)).unwrap();
            if part + 1 < plan.parts {
                fsdp.backward_no_sync_weighted(&loss, weight).unwrap();
                continue;
            }
            let gradients = fsdp.backward_weighted(&loss, weight).unwrap();
            fsdp.step(&mut optimizer, plan.rate.clone(), gradients).unwrap();
        }
    }
    fsdp.model().floats()
}

fn near(ours: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let apart = distance(ours, expected);
    assert!(apart < 1e-5, "{what}: {apart:e}");
}

#[test]
fn weighted_steps_are_those_of_one_process_with_all_samples() {
    for plan in [Plan::adam(), Plan { parts: 2, ..Plan::momentum() }] {
        for ranks in [2, 3] {
            let expected = one_process(&plan, ranks as usize * plan.parts);
            for options in [options(true, 1), options(false, 1)] {
                run(ranks, |group| {
                    let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
                    let ours = sharded(&plan, &sharding, group.rank().index(), ranks as usize);
                    near(&ours, &expected, &format!("{ranks} ranks, {} parts, {options:?}", plan.parts));
                });
            }
        }
    }
}

#[test]
fn it_is_so_with_replicas_of_shards() {
    for (plan, fabric) in
        [(Plan::adam(), Fabric::InProcess), (Plan { parts: 2, ..Plan::momentum() }, Fabric::TwoHosts)]
    {
        let expected = one_process(&plan, 4 * plan.parts);
        testing::run(4, fabric, |group| {
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
            let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let sharding = ShardingGroup::hybrid(shard, replicate);
            let rank = mesh.coordinate("replicate").unwrap() * 2 + mesh.coordinate("shard").unwrap();
            near(&sharded(&plan, &sharding, rank, 4), &expected, &format!("{fabric:?}"));
        });
    }
}

#[test]
fn equal_weights_of_one_give_the_bits_of_steps_without() {
    let trained = |weighted: bool| {
        run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let (mut fsdp, mut optimizer) = (model(&sharding), Plan::adam().optimizer);
            for step in 0..STEPS {
                let from = 8 * step + 4 * group.rank().index();
                let loss = fsdp.forward(|model| model.loss(rows(from, from + 4))).unwrap();
                let gradients = match weighted {
                    true => fsdp.backward_weighted(&loss, 1.0),
                    false => fsdp.backward(&loss),
                };
                fsdp.step(&mut optimizer, 1e-2, gradients.unwrap()).unwrap();
            }
            fsdp.model().floats()
        })
    };
    assert_eq!(trained(true), trained(false));
}

/// The errors of both ranks, which end the group: at whatever call of the other rank.
fn refused(pass: impl Fn(&mut Fsdp<Sharded>, &Tensor<1>, usize) -> Result<()> + Sync) -> Vec<String> {
    let attempt = |group: &ProcessGroup| {
        let sharding = ShardingGroup::new(group)?;
        let mut fsdp = Fsdp::new(Sharded::new(Whole::new(LAYERS), &sharding)?, &sharding)?;
        let loss = fsdp.forward(|model| model.loss(rows(0, 2)))?;
        pass(&mut fsdp, &loss, group.rank().index())
    };
    run(2, |group| {
        let error = attempt(&group).unwrap_err();
        assert!(group.failure().is_some(), "{error}");
        error.to_string()
    })
}

#[test]
fn ranks_that_weight_and_ranks_that_do_not_are_an_error_on_both() {
    let errors = refused(|fsdp, loss, rank| match rank {
        0 => fsdp.backward(loss).map(drop),
        _ => fsdp.backward_weighted(loss, 2.0).map(drop),
    });
    for error in errors {
        assert!(error.contains("rank 1 calls Fsdp::backward_weighted"), "{error}");
        assert!(error.contains("rank 0 a backward pass without a weight"), "{error}");
    }
    let errors = refused(|fsdp, loss, rank| match rank {
        0 => fsdp.backward_no_sync(loss),
        _ => fsdp.backward_no_sync_weighted(loss, 2.0),
    });
    assert!(errors.iter().all(|error| error.contains("backward_no_sync_weighted")), "{errors:?}");
}

#[test]
fn what_is_no_weight_is_refused_on_every_rank() {
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let errors = refused(|fsdp, loss, rank| {
            fsdp.backward_weighted(loss, if rank == 1 { wrong } else { 1.0 }).map(drop)
        });
        assert!(
            errors.iter().all(|error| error.contains("rank 1") && error.contains("no weight")),
            "{errors:?}"
        );
    }
    let errors = refused(|fsdp, loss, rank| {
        if rank == 0 {
            fsdp.backward_no_sync(loss)?;
            let second = fsdp.forward(|model| model.loss(rows(0, 2)))?;
            return fsdp.backward_weighted(&second, 1.0).map(drop);
        }
        fsdp.backward_no_sync(loss)?;
        let second = fsdp.forward(|model| model.loss(rows(0, 2)))?;
        fsdp.backward(&second).map(drop)
    });
    assert!(errors.iter().all(|error| error.contains("of passes without")), "{errors:?}");
}

/// The gradient of such a loss begins as the weight: 4097 is 4096 in f16, and 70,000 is infinite.
#[test]
fn a_loss_of_16_bits_has_no_weight() {
    for accumulates in [false, true] {
        let errors = refused(|fsdp, loss, rank| {
            let loss = if rank == 1 { loss.clone().cast(FloatDType::F16) } else { loss.clone() };
            match accumulates {
                true => fsdp.backward_no_sync_weighted(&loss, 70_000.0),
                false => fsdp.backward_weighted(&loss, 4097.0).map(drop),
            }
        });
        assert!(errors.iter().all(|error| error.contains("too narrow for weights")), "{errors:?}");
    }
}

#[test]
fn a_step_without_any_sample_is_an_error_after_which_training_goes_on() {
    for sharding_options in [ShardingOptions::default(), options(false, 1)] {
        let trained = |with_nothing: bool| {
            run(2, |group| {
                let sharding = ShardingGroup::new(&group).unwrap().with_options(sharding_options.clone());
                let (mut fsdp, mut optimizer) = (model(&sharding), Plan::adam().optimizer);
                for step in 0..2 {
                    if with_nothing {
                        let (nothing, weight) = loss(&mut fsdp, (rows(0, 1), 0)).unwrap();
                        let error = fsdp.backward_weighted(&nothing, weight).unwrap_err();
                        assert!(error.to_string().contains("add up to 0"), "{error}");
                    }
                    let (loss, weight) = loss(&mut fsdp, batch(step, group.rank().index(), 2)).unwrap();
                    let gradients = fsdp.backward_weighted(&loss, weight).unwrap();
                    fsdp.step(&mut optimizer, 1e-2, gradients).unwrap();
                }
                fsdp.model().floats()
            })
        };
        assert_eq!(trained(true), trained(false));
    }
}

#[test]
fn a_state_that_is_loaded_drops_gradients_that_were_added_up() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let (mut fsdp, mut optimizer) = (model(&sharding), Plan::adam().optimizer);
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save_sharded(0, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let mut step = |adds_up: bool| {
            fsdp.load(&mut optimizer, &saved, "model").unwrap();
            if adds_up {
                let loss = fsdp.forward(|model| model.loss(rows(0, 2))).unwrap();
                fsdp.backward_no_sync(&loss).unwrap();
                fsdp.load(&mut optimizer, &saved, "model").unwrap();
            }
            let (loss, weight) = loss(&mut fsdp, batch(0, group.rank().index(), 2)).unwrap();
            let gradients = fsdp.backward_weighted(&loss, weight).unwrap();
            fsdp.step(&mut optimizer, 1e-2, gradients).unwrap();
            fsdp.model().floats()
        };
        assert_eq!(step(true), step(false));
    });
}
