//! Which units and models are refused, and what a failure does.

use std::sync::Barrier;

use burn::module::{Module, ParamGroup};
use burn::nn::{BatchNormConfig, DropoutConfig, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::Tensor;
use phalanx::mesh::DeviceMesh;
use phalanx::testing::{self, Fabric};
use phalanx::{Error, ProcessGroup, Rank, Result};
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup};
use phalanx_burn::parallel::tensor::{ColumnParallelLinear, TensorGroup};
use phalanx_burn::{DataParallel, Ddp, TowerGradients, TrainState};

use super::layers::Layers;
use super::{all_options, options};
use crate::common::{device, floats, run};

/// The errors of all ranks, which must be errors.
pub fn errors<T>(outcomes: Vec<Result<T>>) -> Vec<Error> {
    outcomes.into_iter().map(|outcome| outcome.err().expect("every rank has an error")).collect()
}

pub fn all_say(errors: &[Error], what: &str) {
    assert!(errors.iter().all(|error| error.to_string().contains(what)), "{what}: {errors:?}");
}

#[test]
fn units_that_differ_are_an_error_on_every_rank() {
    let linear = |group: &ProcessGroup, width| {
        let sharding = ShardingGroup::new(group)?;
        FullySharded::new(LinearConfig::new(8, width).init(&device()), &sharding).map(drop)
    };
    let wide = errors(run(3, |group| linear(&group, if group.rank().get() == 2 { 5 } else { 4 })));
    all_say(&wide, "tensor 1 of unit 0 is `weight` F32 [8, 4] on rank 0, and `weight` F32 [8, 5] on rank 2");
    assert!(wide.iter().all(Error::is_mismatch));

    let other = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?.with_options(options(group.rank().is_main(), 1));
        FullySharded::new(LinearConfig::new(8, 4).init(&device()), &sharding).map(drop)
    }));
    all_say(&other, "rank 0 has the options");

    let frozen = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let layer = LinearConfig::new(8, 4).init(&device());
        let layer = if group.rank().is_main() { layer } else { layer.no_grad() };
        FullySharded::new(layer, &sharding).map(drop)
    }));
    all_say(&frozen, "`weight` F32 [8, 4] on rank 0, and `weight` frozen F32 [8, 4] on rank 1");
    assert_eq!(frozen[0].peer(), Some(Rank::new(1)));

    let norm = errors(run(2, |group| {
        FullySharded::new(BatchNormConfig::new(4).init(&device()), &ShardingGroup::new(&group)?).map(drop)
    }));
    all_say(&norm, "running");
}

#[test]
fn replicas_whose_units_or_models_differ_are_named_on_every_rank() {
    let hybrid = |group: &ProcessGroup| {
        let mesh = DeviceMesh::new(group, &[("replicate", 2), ("shard", 2)])?;
        let sharding = ShardingGroup::hybrid(mesh.group("shard")?, mesh.group("replicate")?);
        Ok::<_, Error>((mesh.coordinate("replicate")?, sharding))
    };
    let wide = errors(run(4, |group| {
        let (replica, sharding) = hybrid(&group)?;
        let layer = LinearConfig::new(8, 4 + replica).init(&device());
        FullySharded::new(layer, &sharding).map(drop)
    }));
    all_say(
        &wide,
        "tensor 1 of unit 0 is `weight` F32 [8, 4] on rank 0 of replica 0, and `weight` F32 [8, 5] on rank 0 of replica 1",
    );
    let fewer = errors(run(4, |group| {
        let (replica, sharding) = hybrid(&group)?;
        let mut model = Layers::new(&[4, 4, 4, 4], &sharding)?;
        model.layers.truncate(3 - replica);
        Fsdp::new(model, &sharding)
    }));
    all_say(&fewer, "rank 0 of replica 0's model has the units [0, 1, 2], and rank 0 of replica 1's [0, 1]");
}

/// Replicas that have other shards would take over rank 0's.
#[test]
fn groups_that_are_no_dimensions_of_one_mesh_are_an_error_on_every_rank() {
    let unit = |shard: &ProcessGroup, replicate: &ProcessGroup| {
        let sharding = ShardingGroup::hybrid(shard, replicate);
        FullySharded::new(LinearConfig::new(8, 4).init(&device()), &sharding).map(drop)
    };
    let said = "the groups of ShardingGroup::hybrid are no dimensions of one mesh";
    all_say(&errors(run(2, |group| unit(&group, &group))), said);
    let whole = errors(run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
        unit(&group, mesh.group("replicate")?)
    }));
    all_say(&whole, said);
}

#[test]
fn a_second_model_of_one_sharding_group_is_refused() {
    let refused = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let first = Fsdp::new(Layers::new(&[4, 4], &sharding)?, &sharding)?;
        // The model of one that has ended may have another.
        let _first = Fsdp::new(first.into_model(), &sharding)?;
        Fsdp::new(Layers::new(&[4, 4], &sharding)?, &sharding)
    }));
    all_say(&refused, "another Fsdp has units of this ShardingGroup");
}

#[test]
fn a_failure_reaches_every_group_of_the_rank() {
    run(2, |group| {
        let sharding =
            ShardingGroup::new(&group.new_group(&[Rank::new(0), Rank::new(1)]).unwrap().unwrap()).unwrap();
        let width = 4 + group.rank().index();
        FullySharded::new(LinearConfig::new(4, width).init(&device()), &sharding).unwrap_err();
        let error = group.barrier().unwrap_err().to_string();
        assert!(
            error.contains("another group of this rank has failed") && error.contains("units differ"),
            "{error}"
        );
    });
}

/// A layer, and a unit in it.
#[derive(Module, Debug)]
struct Block {
    layer: Linear,
    inner: FullySharded<Linear>,
}

#[test]
fn units_in_units_are_an_error_on_every_rank() {
    let layer = || LinearConfig::new(4, 4).init(&device());
    for other_group in [false, true] {
        let block = errors(run(2, |group| {
            let sharding = ShardingGroup::new(&group)?;
            let inner = FullySharded::new(layer(), &sharding)?;
            let sharding = if other_group { ShardingGroup::new(&group)? } else { sharding };
            FullySharded::new(Block { layer: layer(), inner }, &sharding).map(drop)
        }));
        all_say(&block, "`inner.shard` is the shard of a unit: units are not nested");
    }
    let twice = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        FullySharded::new(FullySharded::new(layer(), &sharding)?, &sharding).map(drop)
    }));
    all_say(&twice, "`shard` is the shard of a unit: units are not nested");
}

/// A unit, trained or frozen, would be overwritten by rank 0's, or averaged with others.
#[test]
fn what_takes_a_model_for_the_whole_refuses_units() {
    for is_trained in [true, false] {
        let all_are_here = Barrier::new(2);
        let all = run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let sharded = Layers::new(&[4, 4], &sharding).unwrap();
            let sharded = if is_trained { sharded } else { sharded.no_grad() };
            let before = floats(&sharded);
            let model = || (sharded.clone(), LinearConfig::new(4, 4).init(&device()));
            let devices = || vec![device(); 2];
            let local = [
                DataParallel::<_, 2>::new(model(), devices()).err(),
                TowerGradients::new(model(), devices()).err(),
                TrainState::new(model(), AdamWConfig::new().init(), ()).err(),
                TensorGroup::new(&group).replicate(model()).err(),
            ];
            all_are_here.wait();
            // It ends the groups: some rank may have a model without units.
            let together = Ddp::new(model(), &group).err();
            assert_eq!(floats(&sharded), before);
            let refused = local.into_iter().chain([together]);
            refused.map(|error| error.expect("each is refused")).collect::<Vec<_>>()
        });
        for error in all.iter().flatten() {
            assert!(error.is_invalid_argument(), "{error}");
            assert!(error.to_string().contains("`0.layers.0.shard` is the shard of a unit"), "{error}");
            assert!(error.remedy().is_some(), "{error}");
        }
    }
}

#[test]
fn divided_layers_are_no_units_on_every_rank() {
    let layer = || LinearConfig::new(4, 4).init(&device());
    let unit = errors(run(2, |group| {
        let divided = ColumnParallelLinear::new(layer(), &TensorGroup::new(&group))?;
        FullySharded::new(divided, &ShardingGroup::new(&group)?).map(drop)
    }));
    all_say(&unit, "of `weight`, and FullySharded takes what a rank has for the whole model");
    let frozen = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let divided = ColumnParallelLinear::new(layer(), &TensorGroup::new(&group))?.no_grad();
        Fsdp::new((FullySharded::new(layer(), &sharding)?, divided), &sharding).map(drop)
    }));
    all_say(&frozen, "of `1.weight`, and Fsdp takes what a rank has for the whole model");
}

#[derive(Module, Debug)]
struct Half {
    sharded: FullySharded<Linear>,
    replicated: Linear,
}

#[test]
fn models_that_differ_or_have_more_than_units_are_an_error_on_every_rank() {
    let outside = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let [sharded, replicated] = [0, 1].map(|_| LinearConfig::new(4, 4).init(&device()));
        Fsdp::new(Half { sharded: FullySharded::new(sharded, &sharding)?, replicated }, &sharding)
    }));
    all_say(&outside, "`replicated.weight` is in no unit");

    let wide = errors(run(3, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let sharded = LinearConfig::new(4, 4).init(&device());
        let width = if group.rank().get() == 2 { 5 } else { 4 };
        let replicated = LinearConfig::new(4, width).init(&device()).no_grad();
        Fsdp::new(Half { sharded: FullySharded::new(sharded, &sharding)?, replicated }, &sharding)
    }));
    let cause = "tensor 1 that is in no unit is `replicated.weight` F32 [4, 4] in rank 0's model, and `replicated.weight` F32 [4, 5] in \
                 rank 2's";
    all_say(&wide, cause);

    let fewer = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let mut model = Layers::new(&[4, 4, 4, 4], &sharding)?;
        model.layers.truncate(if group.rank().is_main() { 3 } else { 2 });
        Fsdp::new(model, &sharding)
    }));
    all_say(&fewer, "rank 0's model has the units [0, 1, 2], and rank 1's [0, 1]");
}

#[test]
fn a_unit_of_which_a_part_was_frozen_is_an_error_on_every_rank() {
    let partial = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let model = Layers::new(&[4, 4, 4], &sharding)?;
        Fsdp::new(model.freeze_group(ParamGroup::from_path("layers.1.shard.0")), &sharding)
    }));
    all_say(&partial, "a part of the unit of `layers.1.shard` needs a gradient, and another part does not");
    // All of one may be.
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut model = Layers::new(&[4, 4, 4], &sharding).unwrap();
        model.layers[0] = model.layers[0].clone().no_grad();
        Fsdp::new(model, &sharding).unwrap();
    });
}

#[test]
fn a_layer_outside_of_units_that_trains_on_some_ranks_only_is_an_error_on_every_rank() {
    let outcomes = run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let dropout = DropoutConfig::new(0.5).init();
        let dropout = if group.rank().is_main() { dropout } else { dropout.freeze() };
        Fsdp::new((Layers::new(&[4, 4, 4], &sharding)?, dropout), &sharding)
    });
    all_say(&errors(outcomes), "`1.training (disabled)`");
}

#[test]
fn layers_that_compute_with_other_numbers_on_one_rank_are_an_error_on_every_rank() {
    let inside = errors(run(2, |group| {
        let epsilon = if group.rank().is_main() { 1e-5 } else { 1e-3 };
        let norm = LayerNormConfig::new(4).with_epsilon(epsilon).init(&device());
        FullySharded::new(norm, &ShardingGroup::new(&group)?).map(drop)
    }));
    all_say(&inside, "`epsilon` of LayerNorm (layer 1 of those with such numbers) 0.001 on rank 1");
    let outside = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let dropout = DropoutConfig::new(if group.rank().is_main() { 0.1 } else { 0.2 }).init();
        Fsdp::new((Layers::new(&[4, 4, 4], &sharding)?, dropout), &sharding)
    }));
    all_say(&outside, "`prob` of Dropout (layer 1 of those with such numbers) 0.2 on rank 1");
}

#[test]
fn another_order_on_one_rank_is_an_error_on_every_rank_before_the_step() {
    for options in all_options() {
        let errors = errors(run(3, |group| {
            let sharding = ShardingGroup::new(&group)?.with_options(options.clone());
            // Equally large, so that the collectives themselves fit.
            let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4, 4], &sharding)?, &sharding)?;
            let mut order = [0, 1, 2];
            if group.rank().get() == 2 {
                order.swap(1, 2);
            }
            let loss = fsdp.forward(|model| {
                let unit = |x, index: &usize| model.layers[*index].forward(x, |layer, x| layer.forward(x));
                order.iter().fold(Tensor::<2>::ones([2, 4], &device()), unit).mean()
            })?;
            let gradients = fsdp.backward(&loss)?;
            drop(gradients);
            Ok(())
        }));
        all_say(&errors, "the ranks use the units of a sharded model differently");
        all_say(&errors, ", and rank 2 ");
    }
}

/// A layer with a tensor that is no parameter.
#[derive(Module, Debug)]
struct Hidden {
    layer: Linear,
    #[module(skip)]
    factor: Tensor<1>,
}

#[test]
fn a_gradient_that_would_be_lost_is_an_error() {
    let errors = errors(run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let factor = Tensor::ones([1], &device()).require_grad();
        let unit = Hidden { layer: LinearConfig::new(4, 4).init(&device()), factor };
        let mut fsdp = Fsdp::new(FullySharded::new(unit, &sharding)?, &sharding)?;
        let x = Tensor::<2>::ones([2, 4], &device());
        fsdp.forward(|unit| {
            unit.forward(x, |unit, x| unit.layer.forward(x) * unit.factor.clone().unsqueeze()).mean()
        })
    }));
    all_say(
        &errors,
        "unit 0 computes with a tensor that has a graph and is neither a parameter nor an input",
    );
}

#[test]
fn after_a_failure_nothing_steps() {
    for options in all_options() {
        for in_backward in [false, true] {
            let outcomes = run(3, |group| {
                let sharding = ShardingGroup::new(&group)?.with_options(options.clone());
                let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
                let mut optimizer = SgdConfig::new().init();
                let x = || Tensor::<2>::ones([2, 4], &device());
                let cut = || group.abort(Error::aborted("the cable was cut"));
                let is_victim = group.rank().get() == 1;
                let loss = fsdp.forward(|model| model.forward(x()).mean())?;
                let gradients = fsdp.backward(&loss)?;
                fsdp.step(&mut optimizer, 0.1, gradients)?;
                let loss = fsdp.forward(|model| model.forward(x()).mean())?;
                let sound = fsdp.backward(&loss)?;
                let loss = fsdp.forward(|model| {
                    if is_victim && !in_backward {
                        cut();
                    }
                    model.forward(x()).mean()
                })?;
                if is_victim && in_backward {
                    cut();
                }
                let error = fsdp.backward(&loss).unwrap_err();
                // With any gradients.
                let before = floats(fsdp.model());
                let step = fsdp.step(&mut optimizer, 0.1, sound).unwrap_err();
                assert!(step.to_string().contains("the cable was cut"), "{step}");
                assert_eq!(floats(fsdp.model()), before);
                let again = fsdp.forward(|model| model.forward(x()).mean()).unwrap_err();
                assert!(again.to_string().contains("the cable was cut"), "{again}");
                Err::<(), _>(error)
            });
            all_say(&errors(outcomes), "the cable was cut");
        }
    }
}

#[test]
fn a_failure_among_some_shards_ends_their_replicas_before_the_step() {
    for options in [options(true, 1), options(false, 1)] {
        let outcomes = testing::run(4, Fabric::InProcess, |group| {
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
            let (shard, replicate) = (mesh.group("shard")?, mesh.group("replicate")?);
            let sharding = ShardingGroup::hybrid(shard, replicate).with_options(options.clone());
            let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
            let x = Tensor::<2>::ones([2, 4], &device());
            let loss = fsdp.forward(|model| model.forward(x.clone()).mean())?;
            if group.rank().is_main() {
                shard.abort(Error::aborted("the cable was cut"));
            }
            fsdp.backward(&loss).map(drop)
        });
        all_say(&errors(outcomes), "the cable was cut");
    }
}
