//! One `Param` in several places of a model trains as one tensor that a model of one process uses several times.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::ProcessGroup;
use phalanx::checkpoint::Checkpoints;
use phalanx::reducer::hooks::PostLocalSgd;
use phalanx_burn::{
    DataParallel, Ddp, FusedAdamWConfig, FusedSgdConfig, PeriodicModelAverager, TowerGradients, TrainState,
    ZeroRedundancyOptimizer, clip_grad_norm,
};

use crate::common::{Waves, device, distance, floats, run, samples};

const STEPS: usize = 6;
const RATE: f64 = 0.05;
/// Samples of a step, for one, two, three or six ranks or parts.
const BATCH: usize = 12;

/// `second` has the weight of `first`; `last` takes the answers out.
#[derive(Module, Debug)]
pub struct Tied {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Tied {
    pub fn new() -> Self {
        let layer = |outputs| LinearConfig::new(8, outputs).init(&device()).map(&mut Waves::default());
        let (first, mut second, last): (Linear, Linear, Linear) = (layer(8), layer(8), layer(3));
        second.weight = first.weight.clone();
        Self { first, second, last }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.last.forward(self.second.forward(self.first.forward(x).tanh()).tanh())
    }

    fn loss(&self, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        (self.forward(x) - y).powi_scalar(2).mean()
    }

    /// The same numbers, as a model that has the weight once.
    fn once(&self) -> Once {
        Once { layer: self.first.clone(), bias: self.second.bias.clone().unwrap(), last: self.last.clone() }
    }
}

/// What [`Tied`] computes, with a weight that stands in one place.
#[derive(Module, Debug)]
struct Once {
    layer: Linear,
    bias: Param<Tensor<1>>,
    last: Linear,
}

impl Once {
    fn loss(&self, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let second = Linear { weight: self.layer.weight.clone(), bias: Some(self.bias.clone()) };
        let x = self.layer.forward(x).tanh();
        (self.last.forward(second.forward(x).tanh()) - y).powi_scalar(2).mean()
    }

    /// In the order of [`Tied`].
    fn floats(&self) -> Vec<Vec<f32>> {
        let weight = floats(&self.layer.weight).remove(0);
        let mut all = floats(&self.layer);
        all.push(weight);
        all.extend(floats(&self.bias));
        all.extend(floats(&self.last));
        all
    }
}

fn optimizers() -> Vec<ModuleOptimizer> {
    let momentum = || Some(MomentumConfig::new());
    vec![
        SgdConfig::new().init(),
        SgdConfig::new().with_momentum(momentum()).init(),
        AdamWConfig::new().with_epsilon(1e-3).init(),
        FusedSgdConfig::new().with_momentum(momentum()).init(),
        FusedAdamWConfig::new().with_epsilon(1e-3).init(),
    ]
}

/// Part `part` of `parts` of a step's batch.
fn batch(step: usize, part: usize, parts: usize) -> (Tensor<2>, Tensor<2>) {
    let (from, size) = (step * BATCH + part * BATCH / parts, BATCH / parts);
    samples(from, from + size)
}

/// One process, whose gradients are clipped if there is a `max_norm`.
fn reference(optimizer: &ModuleOptimizer, max_norm: Option<f64>) -> (Vec<Vec<f32>>, Vec<f64>) {
    let (mut model, mut optimizer, mut norms) = (Tied::new().once(), optimizer.clone(), Vec::new());
    for step in 0..STEPS {
        let mut gradients = GradientsParams::from_grads(model.loss(batch(step, 0, 1)).backward(), &model);
        if let Some(max_norm) = max_norm {
            norms.push(clip_grad_norm(&model, &mut gradients, max_norm).unwrap());
        }
        model = optimizer.step(RATE, model, gradients);
    }
    (model.floats(), norms)
}

/// An error of the places of the weight, or of how far they are from the reference.
#[track_caller]
fn check(ours: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    assert_eq!(ours[0], ours[2], "{what}: both places have the same bits");
    let apart = distance(ours, expected);
    assert!(apart < 1e-5, "{what}: {apart:e}");
}

fn rank_and_ranks(group: &ProcessGroup) -> (usize, usize) {
    (group.rank().index(), group.world_size().count())
}

#[test]
fn one_weight_in_two_layers_trains_as_one_with_ddp() {
    for (number, optimizer) in optimizers().iter().enumerate() {
        let (expected, norms) = reference(optimizer, Some(0.5));
        for ranks in [1, 2, 3] {
            // Each rank's part at once, and in two.
            for parts in [1, 2] {
                run(ranks, |group| {
                    let (rank, ranks) = rank_and_ranks(&group);
                    let mut ddp = Ddp::new(Tied::new(), &group).unwrap();
                    let mut optimizer = optimizer.clone();
                    for (step, norm) in norms.iter().enumerate() {
                        let part = |part| batch(step, rank * parts + part, ranks * parts);
                        for first in 1..parts {
                            let loss = ddp.forward(|model| model.loss(part(first))).unwrap() / parts as f64;
                            ddp.backward_no_sync(&loss).unwrap();
                        }
                        let loss = ddp.forward(|model| model.loss(part(0))).unwrap() / parts as f64;
                        let mut gradients = ddp.backward(&loss).unwrap();
                        let ours = ddp.clip_grad_norm(&mut gradients, 0.5).unwrap();
                        assert!((ours / norm - 1.0).abs() < 1e-4, "step {step}: {ours} and not {norm}");
                        ddp.step(&mut optimizer, RATE, gradients).unwrap();
                    }
                    assert!(ddp.replicas_identical().unwrap());
                    let what = format!("optimizer {number}, {ranks} ranks, {parts} parts");
                    check(&floats(ddp.model()), &expected, &what);
                });
            }
        }
    }
}

/// What has been trained computes, without `forward`, as the reference does.
#[test]
fn the_model_of_ddp_computes_what_its_forward_does() {
    run(2, |group| {
        let (rank, ranks) = rank_and_ranks(&group);
        let mut ddp = Ddp::new(Tied::new(), &group).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..STEPS {
            let loss = ddp.forward(|model| model.loss(batch(step, rank, ranks))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, RATE, gradients).unwrap();
        }
        let inside = ddp.forward(|model| model.loss(batch(9, 0, 1))).unwrap().into_scalar::<f32>();
        assert_eq!(ddp.model().loss(batch(9, 0, 1)).into_scalar::<f32>(), inside);
    });
}

#[test]
fn one_weight_in_two_layers_trains_as_one_with_a_sharded_optimizer() {
    for (number, optimizer) in optimizers().iter().enumerate() {
        let (expected, _) = reference(optimizer, None);
        for ranks in [1, 2, 3] {
            run(ranks, |group| {
                let (rank, ranks) = rank_and_ranks(&group);
                let mut ddp = Ddp::new(Tied::new(), &group).unwrap();
                let mut optimizer = ZeroRedundancyOptimizer::new(optimizer.clone(), &mut ddp).unwrap();
                for step in 0..STEPS {
                    let loss = ddp.forward(|model| model.loss(batch(step, rank, ranks))).unwrap();
                    let gradients = ddp.backward(&loss).unwrap();
                    optimizer.step(&mut ddp, RATE, gradients).unwrap();
                    assert!(ddp.replicas_identical().unwrap(), "step {step}");
                }
                check(&floats(ddp.model()), &expected, &format!("optimizer {number}, {ranks} ranks"));
            });
        }
    }
}

#[test]
fn one_weight_in_two_layers_trains_as_one_on_several_devices_of_a_process() {
    for (number, optimizer) in optimizers().iter().enumerate() {
        let (expected, _) = reference(optimizer, None);
        for replicas in [1, 2, 3] {
            let what = format!("optimizer {number}, {replicas} replicas");
            let devices = vec![device(); replicas];
            let mut towers = TowerGradients::new(Tied::new(), devices.clone()).unwrap();
            let mut parallel = DataParallel::new(Tied::new(), devices).unwrap();
            let mut each = [optimizer.clone(), optimizer.clone()];
            for step in 0..STEPS {
                let (x, y) = batch(step, 0, 1);
                let (_, gradients) = towers.backward((x.clone(), y.clone()), Tied::loss).unwrap();
                towers.step(&mut each[0], RATE, gradients).unwrap();

                let output = parallel.forward(x, Tied::forward).unwrap();
                let gradients = parallel.backward(&(output - y).powi_scalar(2).mean()).unwrap();
                parallel.step(&mut each[1], RATE, gradients).unwrap();
            }
            check(&floats(towers.model()), &expected, &format!("towers, {what}"));
            check(&floats(parallel.model()), &expected, &format!("DataParallel, {what}"));
        }
    }
}

#[cfg(feature = "horovod")]
#[test]
fn one_weight_in_two_layers_trains_as_one_with_horovod() {
    use phalanx::Rank;
    use phalanx_burn::horovod::{DistributedOptimizer, DistributedOptions, ModelState, broadcast_parameters};
    use phalanx_horovod::{Horovod, Op, Options};

    for (number, optimizer) in optimizers().iter().enumerate() {
        let (expected, _) = reference(optimizer, None);
        for ranks in [1, 2, 3] {
            run(ranks, |group| {
                let (rank, ranks) = rank_and_ranks(&group);
                let what = format!("optimizer {number}, {ranks} ranks");
                let hvd = Horovod::new(&group, Options::default()).unwrap();
                let mut model = broadcast_parameters(&hvd, Tied::new(), Rank::MAIN).unwrap();
                let mut ours = DistributedOptimizer::new(optimizer.clone(), &model, &hvd).unwrap();
                for step in 0..STEPS {
                    let loss = ours.forward(&model, |model| model.loss(batch(step, rank, ranks)));
                    ours.backward(&loss).unwrap();
                    model = ours.step(RATE, model).unwrap();
                }
                check(&floats(&model), &expected, &what);

                let mut state = ModelState::new(Tied::new(), optimizer.clone(), ()).unwrap();
                let mut ours = state.distributed_optimizer(&hvd, DistributedOptions::default()).unwrap();
                for step in 0..STEPS {
                    let loss = ours.forward(state.model(), |model| model.loss(batch(step, rank, ranks)));
                    ours.backward(&loss).unwrap();
                    state.step(&mut ours, RATE).unwrap();
                }
                check(&floats(state.model()), &expected, &what);

                // Adasum needs a power of two.
                if ranks.is_power_of_two() {
                    // What Adasum gives is another training's; its places are the same.
                    let options = DistributedOptions { op: Op::Adasum, ..DistributedOptions::default() };
                    let mut ours =
                        DistributedOptimizer::with_options(optimizer.clone(), &model, &hvd, options).unwrap();
                    for step in 0..2 {
                        let loss = ours.forward(&model, |model| model.loss(batch(step, rank, ranks)));
                        ours.backward(&loss).unwrap();
                        model = ours.step(RATE, model).unwrap();
                    }
                    let trained = floats(&model);
                    assert_eq!(trained[0], trained[2], "{what}");
                }
                hvd.barrier().unwrap();
            });
        }
    }
}

/// Ranks train apart, and their models are averaged: the mean of as many trainings of one process.
#[test]
fn averages_of_models_have_one_weight() {
    for ranks in [2, 3] {
        let optimizer = AdamWConfig::new().with_epsilon(1e-3).init();
        let each = (0..ranks as usize).map(|rank| {
            let (mut model, mut optimizer) = (Tied::new().once(), optimizer.clone());
            for step in 0..STEPS {
                let loss = model.loss(batch(step, rank, ranks as usize));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(RATE, model, gradients);
            }
            model.floats()
        });
        let mut expected: Vec<Vec<f32>> = Vec::new();
        for model in each {
            if expected.is_empty() {
                expected = model.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
            }
            for (sum, one) in expected.iter_mut().flatten().zip(model.iter().flatten()) {
                *sum += one / ranks as f32;
            }
        }
        run(ranks, |group| {
            let (rank, ranks) = rank_and_ranks(&group);
            let mut ddp = Ddp::new(Tied::new(), &group).unwrap();
            ddp.register_comm_hook(PostLocalSgd::new(0)).unwrap();
            let mut averager =
                PeriodicModelAverager::new(STEPS as u64).unwrap().warmup_steps(STEPS as u64 - 1);
            let mut optimizer = optimizer.clone();
            for step in 0..STEPS {
                let loss = ddp.forward(|model| model.loss(batch(step, rank, ranks))).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                ddp.step(&mut optimizer, RATE, gradients).unwrap();
                averager.step(&mut ddp).unwrap();
            }
            assert!(ddp.replicas_identical().unwrap());
            check(&floats(ddp.model()), &expected, &format!("{ranks} ranks"));
        });
    }
}

#[test]
fn a_checkpoint_of_a_tied_weight_goes_on_as_the_training_that_it_is_of() {
    for optimizer in optimizers() {
        let (expected, _) = reference(&optimizer, None);
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
        let step = |state: &mut TrainState<Tied, usize>| {
            let step = state.progress;
            let loss = state.model.forward(|model| model.loss(batch(step, 0, 1))).unwrap();
            let gradients = state.model.backward(&loss).unwrap();
            state.step(RATE, gradients).unwrap();
            state.progress += 1;
        };
        let mut state = TrainState::new(Tied::new(), optimizer.clone(), 0).unwrap();
        (0..STEPS / 2).for_each(|_| step(&mut state));
        checkpoints.save(1, |snapshot| state.save_to(snapshot)).unwrap();
        checkpoints.finish().unwrap();

        let mut resumed = TrainState::new(Tied::new(), optimizer, 0).unwrap();
        step(&mut resumed);
        resumed.load_from(&checkpoints.newest().unwrap().unwrap()).unwrap();
        (STEPS / 2..STEPS).for_each(|_| step(&mut resumed));
        check(&floats(resumed.model.model()), &expected, "resumed");
    }
}

/// All places would get the values of the first.
#[test]
fn a_checkpoint_with_other_values_for_the_places_of_one_weight_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
    let mut apart = Tied::new();
    let other: Linear = LinearConfig::new(8, 8).init(&device());
    apart.second.weight = other.weight;
    let state = TrainState::new(apart, SgdConfig::new().init(), ()).unwrap();
    checkpoints.save(1, |snapshot| state.save_to(snapshot)).unwrap();
    checkpoints.finish().unwrap();

    let mut state = TrainState::new(Tied::new(), SgdConfig::new().init(), ()).unwrap();
    let before = floats(state.model.model());
    let error = state.load_from(&checkpoints.newest().unwrap().unwrap()).unwrap_err();
    assert!(error.is_mismatch(), "{error}");
    assert!(error.to_string().contains("`first.weight` and `second.weight` are one parameter"), "{error}");
    assert_eq!(floats(state.model.model()), before);
}

/// The ids of clones are those of the first, also where their values are others.
#[test]
fn one_id_with_two_values_is_refused_with_the_names_of_both() {
    let moved = || {
        let mut model = Tied::new();
        let other = |weight: Tensor<2>| Tensor::from_inner(weight.inner() + 1.0).require_grad();
        model.second.weight = model.first.weight.clone().map(other);
        model
    };
    let frozen = || {
        let mut model = Tied::new();
        model.second.weight = model.first.weight.clone().set_require_grad(false);
        model
    };
    for (model, cause) in [(moved(), "has other values"), (frozen(), "needs a gradient at")] {
        for ranks in [1, 2, 3] {
            let refused = |error: phalanx::Error| {
                let text = error.to_string();
                for part in [cause, "`first.weight`", "`second.weight`", "Param::from_tensor"] {
                    assert!(text.contains(part), "{text}");
                }
            };
            run(ranks, |group| refused(Ddp::new(model.clone(), &group).unwrap_err()));
            let devices = vec![device(); ranks as usize];
            refused(TowerGradients::new(model.clone(), devices.clone()).unwrap_err());
            refused(DataParallel::<_, 2>::new(model.clone(), devices).unwrap_err());
        }
        let error = TrainState::new(model, SgdConfig::new().init(), ()).map(drop).unwrap_err().to_string();
        assert!(error.contains(cause) && error.contains("`second.weight`"), "{error}");
    }
    // Nothing of what is frozen in both places changes.
    let mut model = Tied::new();
    model.first.weight = model.first.weight.clone().set_require_grad(false);
    model.second.weight = model.first.weight.clone().map(|weight| weight + 1.0);
    Ddp::new(model, &ProcessGroup::alone().unwrap()).unwrap();
    // With an id of its own the second weight is trained apart.
    let mut model = Tied::new();
    model.second.weight = Param::from_tensor(model.first.weight.val().detach());
    let mut ddp = Ddp::new(model, &ProcessGroup::alone().unwrap()).unwrap();
    let loss = ddp.forward(|model| model.loss(batch(0, 0, 1))).unwrap();
    let gradients = ddp.backward(&loss).unwrap();
    ddp.step(&mut SgdConfig::new().init(), RATE, gradients).unwrap();
    let trained = floats(ddp.model());
    assert_ne!(trained[0], trained[2]);
}

/// What the tests compare with is itself right: a weight that stands once, by arithmetic.
#[test]
fn the_gradient_of_a_weight_that_is_used_twice_is_the_sum_of_both_uses() {
    // w x w with x = 3 and w = 2: the gradient is 2 w x = 12, and of steps of 0.01 the second begins at 1.88.
    #[derive(Module, Debug)]
    struct Product {
        left: Param<Tensor<1>>,
        right: Param<Tensor<1>>,
    }
    let left = Param::from_tensor(Tensor::<1>::from_floats([2.0], &device()));
    let model = Product { right: left.clone(), left };
    for ranks in [1, 2, 3] {
        run(ranks, |group| {
            let mut ddp = Ddp::new(model.clone(), &group).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let mut weight = 2.0f64;
            for _ in 0..3 {
                let loss = ddp.forward(|m| (m.left.val() * m.right.val() * 3.0).sum()).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                let gradient = gradients.get::<1>(ddp.model().left.id).unwrap().into_scalar::<f32>();
                assert!((f64::from(gradient) - 6.0 * weight).abs() < 1e-5, "{gradient} at {weight}");
                ddp.step(&mut optimizer, 0.01, gradients).unwrap();
                weight -= 0.01 * 6.0 * weight;
            }
            let trained = floats(ddp.model());
            assert!((f64::from(trained[0][0]) - weight).abs() < 1e-6 && trained[0] == trained[1]);
        });
    }
}

/// Both layers in one unit, and units that share a weight.
mod sharded {
    use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup};

    use super::*;

    #[test]
    fn one_weight_in_two_layers_of_a_unit_trains_as_one() {
        for (number, optimizer) in optimizers().iter().enumerate() {
            let (expected, norms) = reference(optimizer, Some(0.5));
            for (ranks, reshard) in [(1, true), (2, true), (3, true), (2, false)] {
                run(ranks, |group| {
                    let (rank, ranks) = rank_and_ranks(&group);
                    let mut options = phalanx_burn::parallel::fsdp::ShardingOptions::default();
                    options.reshard_after_forward = reshard;
                    let sharding = ShardingGroup::new(&group).unwrap().with_options(options);
                    let unit = FullySharded::new(Tied::new(), &sharding).unwrap();
                    let mut fsdp = Fsdp::new(unit, &sharding).unwrap();
                    let mut optimizer = optimizer.clone();
                    for (step, norm) in norms.iter().enumerate() {
                        let batch = batch(step, rank, ranks);
                        let loss = fsdp.forward(|unit| unit.forward(batch, Tied::loss)).unwrap();
                        let mut gradients = fsdp.backward(&loss).unwrap();
                        let ours = fsdp.clip_grad_norm(&mut gradients, 0.5).unwrap();
                        assert!((ours / norm - 1.0).abs() < 1e-4, "step {step}: {ours} and not {norm}");
                        fsdp.step(&mut optimizer, RATE, gradients).unwrap();
                    }
                    let trained = floats(&fsdp.model().gather().unwrap());
                    check(&trained, &expected, &format!("optimizer {number}, {ranks} ranks"));
                });
            }
        }
    }

    #[derive(Module, Debug)]
    struct Units {
        first: FullySharded<Linear>,
        second: FullySharded<Linear>,
    }

    #[test]
    fn a_unit_in_two_places_is_one_unit() {
        let layer = || LinearConfig::new(8, 8).init(&device()).map(&mut Waves::default());
        let x = |step: usize, rank: usize| samples(step * BATCH + rank * 4, step * BATCH + rank * 4 + 4).0;
        for optimizer in optimizers() {
            let (mut model, mut one) = (layer(), optimizer.clone());
            for step in 0..STEPS {
                let each = |rank| model.forward(model.forward(x(step, rank)).tanh()).powi_scalar(2).mean();
                let loss = (each(0) + each(1)) / 2;
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = one.step(RATE, model, gradients);
            }
            let expected = floats(&model);
            run(2, |group| {
                let sharding = ShardingGroup::new(&group).unwrap();
                let first = FullySharded::new(layer(), &sharding).unwrap();
                let model = Units { second: first.clone(), first };
                let mut fsdp = Fsdp::new(model, &sharding).unwrap();
                let (rank, mut optimizer) = (group.rank().index(), optimizer.clone());
                for step in 0..STEPS {
                    let loss = fsdp.forward(|model| {
                        let x = model.first.forward(x(step, rank), |layer, x| layer.forward(x).tanh());
                        model.second.forward(x, |layer, x| layer.forward(x)).powi_scalar(2).mean()
                    });
                    let gradients = fsdp.backward(&loss.unwrap()).unwrap();
                    fsdp.step(&mut optimizer, RATE, gradients).unwrap();
                }
                let (first, second) = (&fsdp.model().first, &fsdp.model().second);
                let [first, second] = [first, second].map(|unit| floats(&unit.gather().unwrap()));
                assert_eq!(first, second);
                let apart = distance(&first, &expected);
                assert!(apart < 1e-5, "{apart:e}");
            });
        }
    }

    #[test]
    fn one_weight_in_two_units_is_refused_with_the_names_of_both() {
        for error in run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let Tied { first, second, .. } = Tied::new();
            let first = FullySharded::new(first, &sharding).unwrap();
            let model = Units { first, second: FullySharded::new(second, &sharding).unwrap() };
            Fsdp::new(model, &sharding).unwrap_err().to_string()
        }) {
            assert!(error.contains("`first.weight`") && error.contains("`second.weight`"), "{error}");
            assert!(error.contains("into one unit"), "{error}");
        }
    }
}

/// Stages 0 and 2 of a pipeline, which one rank has, with one weight.
mod pipeline {
    use phalanx::pipeline::Schedule;
    use phalanx_burn::parallel::pipeline::{Pipeline, Stage, StageOutput};

    use super::*;

    const STAGES: usize = 4;

    #[derive(Module, Debug)]
    struct Part {
        layer: Linear,
        is_last: bool,
    }

    impl Stage<2> for Part {
        type Batch = (Tensor<2>, Tensor<2>);

        fn forward(&self, input: Option<Tensor<2>>, (x, y): &Self::Batch) -> StageOutput<2> {
            let hidden = self.layer.forward(input.unwrap_or_else(|| x.clone()));
            match self.is_last {
                false => StageOutput::Hidden(hidden.tanh()),
                true => StageOutput::Loss((hidden - y.clone()).powi_scalar(2).mean()),
            }
        }
    }

    /// All stages, of which the third has the weight of the first.
    fn stages() -> Vec<Part> {
        let layer = |outputs| LinearConfig::new(8, outputs).init(&device()).map(&mut Waves::default());
        let mut layers: Vec<Linear> = [8, 8, 8, 3].map(layer).into();
        layers[2].weight = layers[0].weight.clone();
        let part = |(stage, layer)| Part { layer, is_last: stage + 1 == STAGES };
        layers.into_iter().enumerate().map(part).collect()
    }

    #[test]
    fn one_weight_in_two_stages_of_a_rank_trains_as_one() {
        let [_, _, adam, ..] = &optimizers()[..] else { panic!("there are five") };
        // One process, in which the places are one tensor before every pass.
        let (mut model, mut optimizer) = (stages(), adam.clone());
        for step in 0..STEPS {
            model[2].layer.weight = model[0].layer.weight.clone();
            let loss = (0..4).map(|part| {
                let (x, y) = batch(step, part, 4);
                let x = model[..3].iter().fold(x, |x, part| part.layer.forward(x).tanh());
                (model[3].layer.forward(x) - y).powi_scalar(2).mean()
            });
            let loss = loss.reduce(|a, b| a + b).unwrap() / 4;
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(RATE, model, gradients);
        }
        model[2].layer.weight = model[0].layer.weight.clone();
        let expected = floats(&model);
        let trained = run(2, |group| {
            let schedule = Schedule::Interleaved { stages_per_rank: 2 };
            let mut pipeline = Pipeline::new(&group, schedule, 4).unwrap();
            let own: Vec<usize> = pipeline.own_stages().collect();
            let parts: Vec<Part> = own.iter().map(|stage| stages()[*stage].clone()).collect();
            // The copies of one call, so that both places have one id.
            let parts = if own == [0, 2] {
                let all = stages();
                vec![all[0].clone(), all[2].clone()]
            } else {
                parts
            };
            let mut ddp = Ddp::new(parts, &ProcessGroup::alone().unwrap()).unwrap();
            let mut optimizer = adam.clone();
            for step in 0..STEPS {
                let batches: Vec<_> = (0..4).map(|part| batch(step, part, 4)).collect();
                let gradients = pipeline.train(&mut ddp, &batches).unwrap().gradients;
                ddp.step(&mut optimizer, RATE, gradients).unwrap();
            }
            floats(ddp.model())
        });
        // Weight and bias of stages 0 and 2, and of 1 and 3.
        let place = |at: usize| [&trained[0][2 * at..2 * at + 2], &trained[1][2 * at..2 * at + 2]].concat();
        let ours = [place(0), place(1)].concat();
        assert_eq!(ours[0], ours[4]);
        let apart = distance(&ours, &expected);
        assert!(apart < 1e-5, "{apart:e}");
    }
}

/// One process gives the gradient of both to the first of them in the first step, and trains them apart from then on.
#[test]
fn one_tensor_with_two_ids_is_refused_with_both_names() {
    let [shared, own] = [false, true].map(|is_own| {
        let mut model = Tied::new();
        let weight = model.first.weight.val();
        model.second.weight = Param::from_tensor(if is_own { weight.detach() } else { weight });
        model
    });
    let zeros = Tensor::<1>::zeros([8], &device());
    let mut cloned = own.clone();
    cloned.first.bias = Some(Param::from_tensor(zeros.clone()));
    cloned.second.bias = Some(Param::from_tensor(zeros));
    for (model, field) in [(&shared, "weight"), (&cloned, "bias")] {
        run(2, |group| {
            let error = Ddp::new(model.clone(), &group).unwrap_err().to_string();
            for place in ["first", "second"] {
                assert!(error.contains(&format!("`{place}.{field}`")), "{error}");
            }
        });
    }
    run(2, |group| drop(Ddp::new(own.clone(), &group).unwrap()));
    let error = DataParallel::<Tied, 2>::new(shared, vec![device(); 2]).unwrap_err().to_string();
    assert!(error.contains("`first.weight`") && error.contains("`second.weight`"), "{error}");
}
