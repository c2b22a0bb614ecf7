//! Models, optimizers and tensors that go from rank to rank, and their states in checkpoints and elastic jobs.

use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::LambConfig;
use phalanx::Error;
use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::State;
use phalanx::sampler::ElasticSampler;
use phalanx_burn::horovod::{ModelState, allreduce, broadcast_optimizer_state};
use phalanx_burn::parallel::fsdp::{FullySharded, ShardingGroup};

use super::*;

#[test]
fn an_optimizer_s_state_and_tensors_go_from_rank_to_rank() {
    run(2, |group| {
        let hvd = horovod(&group);
        let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
        // Only rank 0 has taken a step.
        let fresh = || AdamWConfig::new().init();
        let mut optimizer = fresh();
        let mut trained = model.clone();
        if hvd.rank().is_main() {
            let loss = model.loss(samples(0, 8));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            trained = optimizer.step(0.1, trained, gradients);
        }
        let trained = broadcast_parameters(&hvd, trained, Rank::MAIN).unwrap();
        let state = broadcast_optimizer_state(&hvd, &optimizer, &trained, Rank::MAIN).unwrap();
        let mut distributed = DistributedOptimizer::new(fresh(), &trained, &hvd).unwrap();
        distributed.set_optimizer(state);
        let loss = distributed.forward(&trained, |model| model.loss(samples(8, 16)));
        distributed.backward(&loss).unwrap();
        let next = floats(&distributed.step(0.1, trained).unwrap());
        let mine = Tensor::<1>::from_floats(next[0].as_slice(), &device());
        let sum = allreduce(&hvd, "next", mine.clone(), Op::Sum).unwrap();
        let twice = (mine * 2).into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(sum.into_data().try_to_vec::<f32>().unwrap(), twice, "both ranks have the same moments");
        hvd.barrier().unwrap();
    });
}

#[test]
fn a_tensor_that_is_part_of_a_graph_is_not_combined() {
    run(2, |group| {
        let hvd = horovod(&group);
        let leaf = Tensor::<1>::ones([2], &device()).require_grad();
        let twice = leaf.clone() * 2.0;
        for (tracked, remedy) in [(leaf.clone(), "set_require_grad(false)"), (twice.clone(), "detach()")] {
            let error = allreduce(&hvd, "sum", tracked, Op::Sum).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains("part of a graph"), "{error}");
            assert!(error.remedy().unwrap().contains(remedy), "{error}");
        }
        for (value, expected) in [(leaf.set_require_grad(false), 2.0), (twice.detach(), 4.0)] {
            let sum = allreduce(&hvd, "sum", value, Op::Sum).unwrap();
            assert_eq!(sum.into_data().try_to_vec::<f32>().unwrap(), [expected; 2]);
        }
        hvd.barrier().unwrap();
    });
}

#[test]
fn optimizers_with_other_settings_are_refused_on_every_rank() {
    let optimizer = |group: &ProcessGroup| {
        let epsilon = if group.rank().get() == 1 { 1e-8 } else { 1e-5 };
        AdamWConfig::new().with_epsilon(epsilon).init()
    };
    let is_told = |error: &Error| {
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
    };
    run(3, |group| {
        let hvd = horovod(&group);
        let model = Mlp::new(&WIDTHS);
        let error = broadcast_optimizer_state(&hvd, &optimizer(&group), &model, Rank::MAIN).err().unwrap();
        is_told(&error);
        hvd.barrier().unwrap();
    });
    // In each round of an elastic job, too.
    run(3, |group| {
        let mut state = ModelState::new(Mlp::new(&WIDTHS), optimizer(&group), ()).unwrap();
        is_told(&state.enter(&group).unwrap_err());
    });
}

/// Nothing is broadcast there by name.
#[test]
fn a_round_of_an_elastic_job_refuses_layers_that_compute_with_other_numbers() {
    run(2, |group| {
        let epsilon = if group.rank().is_main() { 1e-5 } else { 1e-3 };
        let norm = LayerNormConfig::new(8).with_epsilon(epsilon).init(&device());
        let mut state = ModelState::new(norm, sgd(), ()).unwrap();
        let error = state.enter(&group).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("0.001 on rank 1"), "{error}");
    });
}

#[test]
fn a_state_keeps_its_model_where_a_learning_rate_is_no_number() {
    let mut state = ModelState::new(Mlp::new(&WIDTHS), sgd(), ()).unwrap();
    let before = floats(state.model());
    for rate in [f64::NAN, f64::INFINITY] {
        let gradients =
            GradientsParams::from_grads(state.model().loss(samples(0, 8)).backward(), state.model());
        let error = state.apply(rate, gradients).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("the learning rate"), "{error}");
    }
    assert_eq!(floats(state.model()), before);
}

#[test]
fn several_roots_of_an_optimizer_s_state_are_refused_on_every_rank() {
    run(3, |group| {
        let hvd = horovod(&group);
        let (model, optimizer) = (Mlp::new(&WIDTHS), AdamWConfig::new().init());
        let refused = |root| broadcast_optimizer_state(&hvd, &optimizer, &model, root).err().unwrap();
        // Each would keep its own.
        let error = refused(hvd.rank());
        let said = "rank 0 called broadcast_optimizer_state with root 0, and rank 1 with root 1";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        let error = refused(Rank::new(3));
        let said = "root 3 is outside a world of 3";
        assert!(error.is_invalid_argument() && error.to_string().contains(said), "{error}");
        // The job goes on.
        hvd.barrier().unwrap();
    });
}

#[test]
fn a_state_refuses_a_checkpoint_with_a_sampler_of_another_order() {
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let new = |samples| ModelState::new(Mlp::new(&WIDTHS), sgd(), ElasticSampler::new(samples)).unwrap();
    checkpoints.save(0, |snapshot| new(100).save_to(snapshot)).unwrap();
    checkpoints.finish().unwrap();
    let saved = checkpoints.newest().unwrap().unwrap();
    let mut other = new(150);
    let error = other.load_from(&saved).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("`samples` was 100 and is 150"), "{error}");
    assert_eq!(other.progress, ElasticSampler::new(150));
    new(100).load_from(&saved).unwrap();
}

#[test]
fn a_state_refuses_steps_without_anything_of_an_optimizer_that_needs_some() {
    let (folder, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &alone).unwrap();
    let new = |optimizer: ModuleOptimizer| ModelState::new(Mlp::new(&WIDTHS), optimizer, 7_u64).unwrap();
    for step in [0, 5] {
        // Whatever took the steps, this one did not, and has nothing.
        let mut plain = new(SgdConfig::new().init());
        plain.progress = step;
        checkpoints.save(step, |snapshot| plain.save_to(snapshot)).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let mut other = new(AdamWConfig::new().init());
        let before = floats(other.model());
        let loaded = other.load_from(&saved);
        if step == 0 {
            loaded.unwrap();
        } else {
            let error = loaded.unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(".momentum.moment_1`"), "{error}");
            assert_eq!((other.progress, floats(other.model())), (7, before));
        }
        plain.load_from(&saved).unwrap();
    }
}

#[test]
fn broadcast_parameters_gives_every_rank_the_root_s_running_statistics() {
    let statistics = run(3, |group| {
        let hvd = horovod(&group);
        let norm: BatchNorm = BatchNormConfig::new(8).init(&device());
        // Burn applies the last of these updates later.
        for step in 0..3 {
            let from = 16 * step + 5 * group.rank().index();
            drop(norm.forward(samples(from, from + 4).0));
        }
        let root = Rank::new(1);
        let taken = broadcast_parameters(&hvd, norm.clone(), root).unwrap().valid();
        let own = floats(&norm.valid());
        hvd.shutdown();
        (floats(&taken), own)
    });
    let (_, expected) = &statistics[1];
    assert!(statistics.iter().all(|(taken, _)| taken == expected), "{statistics:?}");
    assert!(expected[2].iter().any(|mean| mean.abs() > 0.01));
}

#[test]
fn parts_of_a_model_are_refused() {
    let layer = || LinearConfig::new(4, 4).init(&device());
    let said = |error: Option<Error>| error.expect("it is refused").to_string();
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let unit = FullySharded::new(layer(), &sharding).unwrap();
        let divided = ColumnParallelLinear::new(layer(), &TensorGroup::new(&group)).unwrap();
        let hvd = horovod(&group);
        for error in [
            said(broadcast_parameters(&hvd, unit.clone(), Rank::MAIN).err()),
            said(broadcast_optimizer_state(&hvd, &sgd(), &unit, Rank::MAIN).err()),
            said(DistributedOptimizer::new(sgd(), &unit, &hvd).err()),
            said(ModelState::new(unit.clone(), sgd(), ()).err()),
        ] {
            assert!(error.contains("`shard` is the shard of a unit"), "{error}");
        }
        for error in [
            said(broadcast_parameters(&hvd, divided.clone(), Rank::MAIN).err()),
            said(broadcast_optimizer_state(&hvd, &sgd(), &divided, Rank::MAIN).err()),
            said(DistributedOptimizer::new(sgd(), &divided, &hvd).err()),
        ] {
            assert!(error.contains("rank 0 has `weight (part 0 of 2 along dimension 1)`"), "{error}");
            assert!(error.contains("rank 1 `weight (part 1 of 2 along dimension 1)`"), "{error}");
        }
        // Those that have the same part, of which there is one of each here, are replicas.
        let own = horovod(&ProcessGroup::alone().unwrap());
        let mut distributed = DistributedOptimizer::new(sgd(), &divided, &own).unwrap();
        distributed.set_optimizer(LambConfig::new().init());
        for error in [
            said(DistributedOptimizer::new(LambConfig::new().init(), &divided, &own).err()),
            said(distributed.synchronize(&divided).err()),
        ] {
            assert!(error.contains("of `weight`, of which each rank has a piece"), "{error}");
        }
        // Other replicas would wait for what this rank does not submit.
        assert!(own.allreduce("after", vec![1f32], Op::Sum).is_err());
        let error = said(ModelState::new(divided, sgd(), ()).err());
        assert!(error.contains("of `weight`, and ModelState takes"), "{error}");
        // A group of one rank divides nothing.
        let alone = TensorGroup::new(&ProcessGroup::alone().unwrap());
        let whole = ColumnParallelLinear::new(layer(), &alone).unwrap();
        let options = DistributedOptions { op: Op::Adasum, ..DistributedOptions::default() };
        drop(DistributedOptimizer::with_options(sgd(), &whole, &hvd, options).unwrap());
        // Nothing has ended.
        assert_eq!(hvd.allreduce("sum", vec![1f32], Op::Sum).unwrap().as_slice::<f32>().unwrap(), [2.0]);
    });
}
