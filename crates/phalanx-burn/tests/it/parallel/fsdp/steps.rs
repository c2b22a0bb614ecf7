//! Which optimizers and norms are refused, and what ranks compare of their steps.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::ParamGroup;
use burn::nn::LinearConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::Tensor;
use phalanx::mesh::DeviceMesh;
use phalanx::{Error, ProcessGroup, Result};
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup};
use phalanx_burn::{FusedAdamWConfig, parallel};

use super::errors::{all_say, errors};
use super::layers::Layers;
use crate::common::{Mlp, device, floats, projecting, run};

/// Trains two steps; gives the error of the first, with which nothing has changed.
fn stepped(group: &ProcessGroup, mut optimizer: ModuleOptimizer) -> Result<()> {
    let sharding = ShardingGroup::new(group)?;
    let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
    for _ in 0..2 {
        let x = Tensor::<2>::ones([2, 4], &device());
        let loss = fsdp.forward(|model| model.forward(x).mean())?;
        let gradients = fsdp.backward(&loss)?;
        let before = floats(fsdp.model());
        let step = fsdp.step(&mut optimizer, 0.1, gradients);
        assert_eq!(step.is_err(), floats(fsdp.model()) == before);
        step?;
    }
    Ok(())
}

#[test]
fn optimizers_that_take_a_norm_are_refused() {
    let clipped = |by: GradientClippingConfig| SgdConfig::new().init().with_grad_clipping(by.init());
    for optimizer in [
        LambConfig::new().init(),
        clipped(GradientClippingConfig::Norm(1e-4)),
        clipped(GradientClippingConfig::Norm(1e4)),
    ] {
        let outcomes = run(2, |group| stepped(&group, optimizer.clone()));
        all_say(&errors(outcomes), "of `layers.0.weight`, of which each rank has a piece");
        // The piece of one rank is the whole.
        run(1, |group| stepped(&group, optimizer.clone()).unwrap());
    }
    for optimizer in [
        SgdConfig::new().init(),
        SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
        AdamConfig::new().init(),
        AdamWConfig::new().with_weight_decay(0.1).init(),
        FusedAdamWConfig::new().with_weight_decay(0.1).init(),
        RmsPropConfig::new().init(),
        RmsPropConfig::new().with_centered(true).init(),
        clipped(GradientClippingConfig::Value(1.0)),
    ] {
        run(2, |group| stepped(&group, optimizer.clone()).unwrap());
    }
}

#[test]
fn another_norm_on_one_rank_is_an_error_on_every_rank() {
    for (other, said) in [(2.0, "rank 0 clips to the norm 1, and rank 1 to 2"), (f64::NAN, "max_norm is NaN")]
    {
        let outcomes = run(2, |group| {
            let sharding = ShardingGroup::new(&group)?;
            let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
            let x = Tensor::<2>::ones([2, 4], &device());
            let loss = fsdp.forward(|model| model.forward(x).mean())?;
            let mut gradients = fsdp.backward(&loss)?;
            fsdp.clip_grad_norm(&mut gradients, if group.rank().is_main() { 1.0 } else { other })
        });
        all_say(&errors(outcomes), said);
    }
}

#[test]
fn a_norm_that_is_computed_may_be_rounded_in_another_way_on_one_rank() {
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding).unwrap(), &sharding).unwrap();
        let x = Tensor::<2>::ones([2, 4], &device());
        let loss = fsdp.forward(|model| model.forward(x).mean()).unwrap();
        let mut gradients = fsdp.backward(&loss).unwrap();
        let computed = if group.rank().is_main() { 0.1 } else { 0.1_f64.next_up() };
        // The last is how programs ask for the norm alone.
        for max_norm in [computed, f64::INFINITY] {
            fsdp.clip_grad_norm(&mut gradients, max_norm).unwrap();
        }
    });
}

#[test]
fn another_norm_on_one_replica_is_an_error_on_every_rank() {
    let outcomes = run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
        let sharding = ShardingGroup::hybrid(mesh.group("shard")?, mesh.group("replicate")?);
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let mut optimizer = SgdConfig::new().init();
        let max_norm = if mesh.coordinate("replicate")? == 0 { 1e-4 } else { 2e-4 };
        for _ in 0..4 {
            let x = Tensor::<2>::ones([2, 4], &device());
            let loss = fsdp.forward(|model| model.forward(x).mean())?;
            let mut gradients = fsdp.backward(&loss)?;
            assert!(fsdp.clip_grad_norm(&mut gradients, max_norm)? > 2e-4);
            fsdp.step(&mut optimizer, 0.01, gradients)?;
        }
        Ok::<(), Error>(())
    });
    all_say(&errors(outcomes), "clips gradients otherwise");
}

#[test]
fn an_optimizer_that_takes_a_norm_is_refused_also_in_place_of_another() {
    let outcomes = run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 0..40 {
            if step == 5 {
                optimizer = LambConfig::new().init();
            }
            let x = Tensor::<2>::ones([2, 4], &device());
            let loss = fsdp.forward(|model| model.forward(x).mean())?;
            let gradients = fsdp.backward(&loss)?;
            fsdp.step(&mut optimizer, 0.01, gradients)?;
        }
        Ok::<(), Error>(())
    });
    all_say(&errors(outcomes), "of `layers.0.weight`, of which each rank has a piece");
}

#[test]
fn an_optimizer_that_takes_a_norm_is_refused_also_if_it_steps_in_turns_with_another() {
    let outcomes = run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let mut optimizers = [SgdConfig::new().init(), LambConfig::new().init()];
        for step in 0..40 {
            step_of_ones(&mut fsdp, &mut optimizers[step % 2], 0.01)?;
        }
        Ok::<(), Error>(())
    });
    all_say(&errors(outcomes), "of `layers.0.weight`, of which each rank has a piece");
}

#[test]
fn an_optimizer_that_cannot_be_asked_is_refused_unless_pieces_are_whole() {
    let outcomes = run(2, |group| stepped(&group, projecting()));
    all_say(&errors(outcomes), "nothing says whether it treats each element by itself; of `layers.0.weight`");
    run(1, |group| stepped(&group, projecting()).unwrap());
}

#[test]
fn a_learning_rate_that_differs_in_a_later_step_is_an_error_on_every_rank() {
    let outcomes = run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 0..40 {
            let x = Tensor::<2>::ones([2, 4], &device());
            let loss = fsdp.forward(|model| model.forward(x).mean())?;
            let gradients = fsdp.backward(&loss)?;
            let is_other = step == 20 && !group.rank().is_main();
            fsdp.step(&mut optimizer, if is_other { 0.02 } else { 0.01 }, gradients)?;
        }
        Ok::<(), Error>(())
    });
    all_say(&errors(outcomes), "the learning rates of the last 32 steps differ");
}

#[test]
fn optimizers_that_differ_are_an_error_on_every_rank() {
    let adamw = |epsilon| AdamWConfig::new().with_epsilon(epsilon).init();
    let outcomes = run(3, |group| stepped(&group, adamw(if group.rank().get() == 2 { 1e-8 } else { 1e-5 })));
    all_say(&errors(outcomes), "the optimizer of rank 2 changes parameters otherwise than that of rank 0");
    // Replicas have the same shards, and could drift apart.
    let outcomes = run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
        let sharding = ShardingGroup::hybrid(mesh.group("shard")?, mesh.group("replicate")?);
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let x = Tensor::<2>::ones([2, 4], &device());
        let loss = fsdp.forward(|model| model.forward(x).mean())?;
        let gradients = fsdp.backward(&loss)?;
        let epsilon = if mesh.coordinate("replicate")? == 0 { 1e-5 } else { 1e-8 };
        fsdp.step(&mut adamw(epsilon), 0.1, gradients)
    });
    all_say(&errors(outcomes), "the optimizer of rank 1 changes parameters otherwise than that of rank 0");
    // What one rank alone is told reaches the others, too.
    let outcomes = run(2, |group| {
        stepped(&group, if group.rank().is_main() { adamw(1e-5) } else { LambConfig::new().init() })
    });
    all_say(&errors(outcomes), "of `layers.0.weight`, of which each rank has a piece");
}

/// A model of units, and the group of its first layer by the ids before it was sharded.
fn with_ids(group: &ProcessGroup) -> Result<(Fsdp<Layers>, ParamGroup)> {
    let sharding = ShardingGroup::new(group)?;
    let whole = Mlp::new(&[4, 4, 4]);
    let ids = ParamGroup::ids_from_module(whole.layers[0].clone());
    let layers = whole.layers.into_iter().map(|layer| FullySharded::new(layer, &sharding));
    Ok((Fsdp::new(Layers { layers: layers.collect::<Result<_>>()? }, &sharding)?, ids))
}

/// A step with these rates.
fn step_of_ones(
    fsdp: &mut Fsdp<Layers>,
    optimizer: &mut ModuleOptimizer,
    rates: impl Into<ModuleLearningRate>,
) -> Result<()> {
    let x = Tensor::<2>::ones([2, 4], &device());
    let loss = fsdp.forward(|model| model.forward(x).mean())?;
    let gradients = fsdp.backward(&loss)?;
    fsdp.step(optimizer, rates, gradients)
}

#[test]
fn ranks_of_which_one_alone_has_a_state_are_refused() {
    let outcomes = run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let adamw = || AdamWConfig::new().init();
        let mut trained = adamw();
        step_of_ones(&mut fsdp, &mut trained, 0.1)?;
        // The same units go on in another Fsdp.
        let mut fsdp = Fsdp::new(fsdp.into_model(), &sharding)?;
        let mut optimizer = if group.rank().is_main() { trained } else { adamw() };
        let before = floats(fsdp.model());
        let step = step_of_ones(&mut fsdp, &mut optimizer, 0.1);
        assert_eq!(floats(fsdp.model()), before);
        step
    });
    all_say(&errors(outcomes), "the ranks' optimizers have different states");
}

/// A step of a model whose first layer has no learning rate, or whose optimizer leaves it alone, by its ids before it was sharded, or by its pieces'.
fn frozen_by_ids(group: &ProcessGroup, by_rate: bool, of_pieces: bool) -> Result<[bool; 2]> {
    let (mut fsdp, ids) = with_ids(group)?;
    let ids = if of_pieces { ParamGroup::ids_from_module(fsdp.model().layers[0].clone()) } else { ids };
    let (mut optimizer, mut rates) = (SgdConfig::new().init(), ModuleLrScheduler::new(0.1_f64));
    if by_rate {
        rates = rates.with_group(ids, 0.0_f64);
    } else {
        let clipping = GradientClippingConfig::Value(0.0).init();
        optimizer = optimizer.with_group(ids, SgdConfig::new().build(), Some(clipping));
    }
    let before = [0, 1].map(|layer| floats(&fsdp.model().layers[layer]));
    step_of_ones(&mut fsdp, &mut optimizer, rates.step())?;
    Ok([0, 1].map(|layer| floats(&fsdp.model().layers[layer]) == before[layer]))
}

#[test]
fn a_group_by_the_ids_of_whole_parameters_is_refused() {
    for by_rate in [false, true] {
        for ranks in [1, 2] {
            let refused = errors(run(ranks, |group| frozen_by_ids(&group, by_rate, false)));
            all_say(&refused, "has the ParamId that `layers.0.weight` had before it was sharded");
            run(ranks, |group| assert_eq!(frozen_by_ids(&group, by_rate, true).unwrap(), [true, false]));
        }
    }
}

#[test]
fn a_group_by_the_ids_of_whole_parameters_is_refused_also_in_an_optimizer_that_steps_in_turns_with_another() {
    for ranks in [1, 2] {
        let refused = errors(run(ranks, |group| {
            let (mut fsdp, ids) = with_ids(&group)?;
            let clipping = GradientClippingConfig::Value(0.0).init();
            let grouped = SgdConfig::new().init().with_group(ids, SgdConfig::new().build(), Some(clipping));
            let mut optimizers = [SgdConfig::new().init(), grouped];
            (0..40).try_for_each(|step: usize| step_of_ones(&mut fsdp, &mut optimizers[step % 2], 0.01))
        }));
        all_say(&refused, "has the ParamId that `layers.0.weight` had before it was sharded");
    }
}

/// All rates are 0 at the beginning of a warm-up.
#[test]
fn a_group_of_learning_rates_by_the_ids_of_whole_parameters_is_refused_also_in_a_later_step() {
    for ranks in [1, 2] {
        let refused = errors(run(ranks, |group| {
            let (mut fsdp, ids) = with_ids(&group)?;
            let mut optimizer = SgdConfig::new().init();
            let rates = |base: f64| ModuleLrScheduler::new(base).with_group(ids.clone(), 0.0_f64).step();
            step_of_ones(&mut fsdp, &mut optimizer, rates(0.0)).unwrap();
            step_of_ones(&mut fsdp, &mut optimizer, rates(0.1))
        }));
        all_say(&refused, "a group of the learning rates has the ParamId that `layers.0.weight` had");
    }
}

#[test]
fn gradients_that_cannot_be_clipped_on_one_rank_are_an_error_on_every_rank() {
    let outcomes = run(2, |group| {
        let sharding = ShardingGroup::new(&group)?;
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding)?, &sharding)?;
        let x = Tensor::<2>::ones([2, 4], &device());
        let loss = fsdp.forward(|model| model.forward(x.clone()).mean())?;
        let mut gradients = fsdp.backward(&loss)?;
        if group.rank().is_main() {
            return fsdp.clip_grad_norm(&mut gradients, 1.0);
        }
        let other = LinearConfig::new(4, 4).init(&device());
        let mut gradients = GradientsParams::from_grads(other.forward(x).mean().backward(), &other);
        fsdp.clip_grad_norm(&mut gradients, 1.0)
    });
    all_say(&errors(outcomes), "the gradients to be clipped are those of another model");
}

#[test]
fn a_norm_that_takes_shards_for_the_whole_is_refused() {
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut fsdp = Fsdp::new(Layers::new(&[4, 4, 4], &sharding).unwrap(), &sharding).unwrap();
        let x = Tensor::<2>::ones([2, 4], &device());
        let loss = fsdp.forward(|model| model.forward(x).mean()).unwrap();
        let mut gradients = fsdp.backward(&loss).unwrap();
        for error in [
            phalanx_burn::clip_grad_norm(fsdp.model(), &mut gradients, 1e-9).unwrap_err(),
            parallel::clip_grad_norm(fsdp.model(), &mut gradients, 1e-9, None, None, &[]).unwrap_err(),
        ] {
            assert!(
                error.is_invalid_argument() && error.to_string().contains("`layers.0.shard.0`"),
                "{error}"
            );
            assert!(error.remedy().unwrap().contains("Fsdp::clip_grad_norm"), "{error}");
        }
        // Nothing has been scaled, and the group goes on.
        let norm = fsdp.clip_grad_norm(&mut gradients, 1e9).unwrap();
        assert!(norm > 1e-8, "{norm}");
    });
}
