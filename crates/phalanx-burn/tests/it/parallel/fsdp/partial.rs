//! Units of which a part gets no gradient, or none at all: what no rank has a gradient of does not change.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::checkpoint::Checkpoints;
use phalanx::mesh::DeviceMesh;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::FusedAdamWConfig;
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup, ShardingOptions};

use super::all_options;
use crate::common::{Waves, device, distance, floats, run, samples};

const STEPS: usize = 5;
const ROWS: usize = 4;

/// `always` computes in every pass, `sometimes` in some, and `never` in none.
#[derive(Module, Debug)]
struct Parts {
    never: Linear,
    always: Linear,
    sometimes: Linear,
}

impl Parts {
    fn new() -> Self {
        let layer = || LinearConfig::new(8, 8).init(&device());
        let parts = Self { never: layer(), always: layer(), sometimes: layer() };
        parts.map(&mut Waves::default())
    }

    fn pass(&self, (x, both): (Tensor<2>, bool)) -> Tensor<2> {
        let x = self.always.forward(x).tanh();
        if both { self.sometimes.forward(x).tanh() } else { x }
    }
}

/// A unit of parts, between two layers.
#[derive(Module, Debug)]
struct Whole {
    first: Linear,
    parts: Parts,
    last: Linear,
}

impl Whole {
    fn new() -> Self {
        let layer = |outputs| LinearConfig::new(8, outputs).init(&device()).map(&mut Waves::default());
        Self { first: layer(8), parts: Parts::new(), last: layer(3) }
    }

    fn loss(&self, both: bool, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let x = self.parts.pass((self.first.forward(x).tanh(), both));
        (self.last.forward(x) - y).powi_scalar(2).mean()
    }
}

#[derive(Module, Debug)]
struct Units {
    first: FullySharded<Linear>,
    parts: FullySharded<Parts>,
    last: FullySharded<Linear>,
}

impl Units {
    fn new(Whole { first, parts, last }: Whole, sharding: &ShardingGroup) -> Result<Self> {
        Ok(Self {
            first: FullySharded::new(first, sharding)?,
            parts: FullySharded::new(parts, sharding)?,
            last: FullySharded::new(last, sharding)?,
        })
    }

    fn loss(&self, both: bool, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let x = self.first.forward(x, |layer, x| layer.forward(x).tanh());
        let x = self.parts.forward((x, both), Parts::pass);
        let x = self.last.forward(x, |layer, x| layer.forward(x));
        (x - y).powi_scalar(2).mean()
    }

    fn floats(&self) -> Vec<Vec<f32>> {
        let whole = Whole {
            first: self.first.gather().unwrap(),
            parts: self.parts.gather().unwrap(),
            last: self.last.gather().unwrap(),
        };
        floats(&whole)
    }
}

/// Optimizers that move a parameter whose gradient is zero.
fn optimizers() -> [ModuleOptimizer; 3] {
    [
        AdamWConfig::new().with_epsilon(1e-3).with_weight_decay(0.1).init(),
        FusedAdamWConfig::new().with_epsilon(1e-3).with_weight_decay(0.1).init(),
        SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
    ]
}

/// Whether a rank uses `sometimes` in part `part` of a step: in some steps all do, in some none, in some the last alone.
fn uses(step: usize, part: usize, rank: usize, ranks: usize) -> bool {
    match step % 4 {
        0 => part == 0,
        1 => false,
        2 => rank + 1 == ranks && part == 0,
        _ => true,
    }
}

fn batch(step: usize, rank: usize, part: usize) -> (Tensor<2>, Tensor<2>) {
    let from = ((step * 4 + rank) * 2 + part) * ROWS;
    samples(from, from + ROWS)
}

/// One process, whose loss is the mean of those of `ranks` ranks with `parts` passes each.
fn one_process(optimizer: &ModuleOptimizer, ranks: usize, parts: usize) -> Vec<Vec<f32>> {
    let (mut model, mut optimizer) = (Whole::new(), optimizer.clone());
    for step in 0..STEPS {
        let each = (0..ranks * parts).map(|index| {
            let (rank, part) = (index / parts, index % parts);
            model.loss(uses(step, part, rank, ranks), batch(step, rank, part))
        });
        let loss = each.reduce(|a, b| a + b).unwrap() / (ranks * parts) as f64;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.02, model, gradients);
    }
    floats(&model)
}

/// Trains the steps `steps` on this rank, of `ranks`.
fn train(
    fsdp: &mut Fsdp<Units>,
    optimizer: &mut ModuleOptimizer,
    steps: std::ops::Range<usize>,
    (rank, ranks, parts): (usize, usize, usize),
) {
    for step in steps {
        for part in 0..parts {
            let both = uses(step, part, rank, ranks);
            let loss =
                fsdp.forward(|model| model.loss(both, batch(step, rank, part))).unwrap() / parts as f64;
            if part + 1 < parts {
                fsdp.backward_no_sync(&loss).unwrap();
                continue;
            }
            let gradients = fsdp.backward(&loss).unwrap();
            fsdp.step(optimizer, 0.02, gradients).unwrap();
        }
    }
}

#[track_caller]
fn check(ours: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let never = floats(&Whole::new());
    assert_eq!(ours[2..4], never[2..4], "{what}: what no pass uses stays as it is");
    let apart = distance(ours, expected);
    assert!(apart < 1e-5, "{what}: {apart:e}");
}

#[test]
fn what_gets_no_gradient_does_not_change() {
    for (number, optimizer) in optimizers().iter().enumerate() {
        for parts in [1, 2] {
            for ranks in [1, 2, 3] {
                let expected = one_process(optimizer, ranks as usize, parts);
                for options in all_options() {
                    run(ranks, |group| {
                        let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
                        let mut fsdp =
                            Fsdp::new(Units::new(Whole::new(), &sharding).unwrap(), &sharding).unwrap();
                        let of = (group.rank().index(), ranks as usize, parts);
                        train(&mut fsdp, &mut optimizer.clone(), 0..STEPS, of);
                        let what = format!("optimizer {number}, {ranks} ranks, {parts} parts, {options:?}");
                        check(&fsdp.model().floats(), &expected, &what);
                    });
                }
            }
        }
    }
}

#[test]
fn it_is_so_with_replicas_of_shards() {
    let [optimizer, ..] = optimizers();
    for parts in [1, 2] {
        let expected = one_process(&optimizer, 4, parts);
        run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
            let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let sharding = ShardingGroup::hybrid(shard, replicate);
            let mut fsdp = Fsdp::new(Units::new(Whole::new(), &sharding).unwrap(), &sharding).unwrap();
            let rank = mesh.coordinate("replicate").unwrap() * 2 + mesh.coordinate("shard").unwrap();
            train(&mut fsdp, &mut optimizer.clone(), 0..STEPS, (rank, 4, parts));
            check(&fsdp.model().floats(), &expected, &format!("{parts} parts"));
        });
    }
}

#[test]
fn a_checkpoint_has_the_state_of_what_has_one() {
    let [optimizer, ..] = optimizers();
    let folder = tempfile::tempdir().unwrap();
    let expected = one_process(&optimizer, 2, 1);
    let trained = |group: &ProcessGroup| {
        let sharding = ShardingGroup::new(group).unwrap();
        Fsdp::new(Units::new(Whole::new(), &sharding).unwrap(), &sharding).unwrap()
    };
    run(2, |group| {
        let (mut fsdp, mut optimizer) = (trained(&group), optimizer.clone());
        // The second step uses one part only.
        train(&mut fsdp, &mut optimizer, 0..2, (group.rank().index(), 2, 1));
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save_sharded(2, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();
    });
    for ranks in [1, 2, 3] {
        run(ranks, |group| {
            let (mut fsdp, mut resumed) = (trained(&group), optimizer.clone());
            let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
            fsdp.load(&mut resumed, &saved, "model").unwrap();
            if ranks == 2 {
                train(&mut fsdp, &mut resumed, 2..STEPS, (group.rank().index(), 2, 1));
                check(&fsdp.model().floats(), &expected, "resumed");
            } else {
                // Every rank has the losses of two: the same steps on other shards.
                for step in 2..STEPS {
                    let loss = fsdp.forward(|model| {
                        let each =
                            (0..2).map(|rank| model.loss(uses(step, 0, rank, 2), batch(step, rank, 0)));
                        each.reduce(|a, b| a + b).unwrap() / 2.0
                    });
                    let gradients = fsdp.backward(&loss.unwrap()).unwrap();
                    fsdp.step(&mut resumed, 0.02, gradients).unwrap();
                }
                check(&fsdp.model().floats(), &expected, &format!("resumed on {ranks} ranks"));
            }
        });
    }
}

/// A unit that no rank uses in some steps, or in any, with replicas of shards.
#[test]
fn a_whole_unit_may_be_without_gradients_on_every_rank() {
    let loss = |model: &Units, step: usize, (x, y): (Tensor<2>, Tensor<2>)| {
        let x = model.first.forward(x, |layer, x| layer.forward(x).tanh());
        let x = match step % 2 {
            0 => x,
            _ => model.parts.forward((x, true), Parts::pass),
        };
        (model.last.forward(x, |layer, x| layer.forward(x)) - y).powi_scalar(2).mean()
    };
    let [optimizer, ..] = optimizers();
    let (mut model, mut alone) = (Whole::new(), optimizer.clone());
    for step in 0..STEPS {
        let each = (0..4).map(|rank| {
            let (x, y) = batch(step, rank, 0);
            let x = model.first.forward(x).tanh();
            let x = if step % 2 == 0 { x } else { model.parts.pass((x, true)) };
            (model.last.forward(x) - y).powi_scalar(2).mean()
        });
        let loss = each.reduce(|a, b| a + b).unwrap() / 4.0;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = alone.step(0.02, model, gradients);
    }
    let expected = floats(&model);
    for shards in [1, 2, 4] {
        run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("replicate", 4 / shards), ("shard", shards)]).unwrap();
            let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let sharding = ShardingGroup::hybrid(shard, replicate);
            let mut fsdp = Fsdp::new(Units::new(Whole::new(), &sharding).unwrap(), &sharding).unwrap();
            let mut optimizer = optimizer.clone();
            for step in 0..STEPS {
                let own = batch(step, group.rank().index(), 0);
                let loss = fsdp.forward(|model| loss(model, step, own)).unwrap();
                let gradients = fsdp.backward(&loss).unwrap();
                fsdp.step(&mut optimizer, 0.02, gradients).unwrap();
            }
            check(&fsdp.model().floats(), &expected, &format!("{shards} shards"));
        });
    }
}

/// Layers between which one is frozen, as adapters are on both sides of a layer of a base.
#[derive(Module, Debug)]
struct Adapted {
    base: FullySharded<Linear>,
    first: FullySharded<Linear>,
    frozen: FullySharded<Linear>,
    last: FullySharded<Linear>,
}

fn layers() -> [Linear; 4] {
    let layer = |outputs| LinearConfig::new(8, outputs).init(&device()).map(&mut Waves::default());
    [layer(8).no_grad(), layer(8), layer(8).no_grad(), layer(3)]
}

impl Adapted {
    fn new(sharding: &ShardingGroup) -> Result<Self> {
        Self::of(layers(), sharding)
    }

    fn of(layers: [Linear; 4], sharding: &ShardingGroup) -> Result<Self> {
        let [base, first, frozen, last] = layers.map(|layer| FullySharded::new(layer, sharding));
        Ok(Self { base: base?, first: first?, frozen: frozen?, last: last? })
    }

    fn loss(&self, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let units = [&self.base, &self.first, &self.frozen];
        let x = units.iter().fold(x, |x, unit| unit.forward(x, |layer, x| layer.forward(x).tanh()));
        (self.last.forward(x, |layer, x| layer.forward(x)) - y).powi_scalar(2).mean()
    }

    fn floats(&self) -> Vec<Vec<f32>> {
        let units = [&self.base, &self.first, &self.frozen, &self.last];
        units.iter().flat_map(|unit| floats(&unit.gather().unwrap())).collect()
    }
}

fn adapted_in_one_process(ranks: usize) -> Vec<Vec<f32>> {
    let (mut model, [mut optimizer, ..]) = (Vec::from(layers()), optimizers());
    for step in 0..STEPS {
        let each = (0..ranks).map(|rank| {
            let (x, y) = batch(step, rank, 0);
            let x = model[..3].iter().fold(x, |x, layer| layer.forward(x).tanh());
            (model[3].forward(x) - y).powi_scalar(2).mean()
        });
        let loss = each.reduce(|a, b| a + b).unwrap() / ranks as f64;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.02, model, gradients);
    }
    floats(&model)
}

fn adapted(sharding: &ShardingGroup, steps: std::ops::Range<usize>, rank: usize) -> Fsdp<Adapted> {
    let mut fsdp = Fsdp::new(Adapted::new(sharding).unwrap(), sharding).unwrap();
    let [mut optimizer, ..] = optimizers();
    for step in steps {
        let loss = fsdp.forward(|model| model.loss(batch(step, rank, 0))).unwrap();
        let gradients = fsdp.backward(&loss).unwrap();
        fsdp.step(&mut optimizer, 0.02, gradients).unwrap();
    }
    fsdp
}

#[test]
fn frozen_units_are_sharded_and_pass_gradients_on() {
    for ranks in [1, 2, 3] {
        let expected = adapted_in_one_process(ranks as usize);
        for options in all_options() {
            run(ranks, |group| {
                let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
                let mut fsdp = adapted(&sharding, 0..STEPS, group.rank().index());
                let what = format!("{ranks} ranks, {options:?}");
                let ours = fsdp.model().floats();
                let start: Vec<_> = layers().iter().flat_map(floats).collect();
                for frozen in [0, 1, 4, 5] {
                    assert_eq!(ours[frozen], start[frozen], "{what}");
                }
                let apart = distance(&ours, &expected);
                assert!(apart < 1e-5, "{what}: {apart:e}");
                // Each rank has its part of all four layers, and no more.
                let shards: usize =
                    [72, 72, 72, 27].iter().map(|all: &usize| all.div_ceil(ranks as usize)).sum();
                assert_eq!(fsdp.bytes().shards, 4 * shards, "{what}");
                // A frozen layer is gathered and freed as others are.
                let inside = fsdp.forward(|model| model.loss(batch(9, 0, 0))).unwrap().into_scalar::<f32>();
                let (x, y) = batch(9, 0, 0);
                let evaluated = fsdp.evaluate(|model| model.loss((x.inner(), y.inner()))).unwrap();
                assert_eq!(evaluated.into_scalar::<f32>(), inside, "{what}");
                let base = fsdp.model().base.gather().unwrap();
                assert!(!base.weight.is_require_grad() && fsdp.model().base.elements() == 72);
            });
        }
    }
}

#[test]
fn frozen_units_hold_no_whole_parameters_between_passes() {
    let peak = |options: ShardingOptions| {
        let peaks = run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
            adapted(&sharding, 0..2, group.rank().index()).bytes().parameters_peak
        });
        peaks[0]
    };
    let [ahead, alone, ..] = all_options();
    assert_eq!(peak(alone), 4 * 72, "one unit at a time");
    assert_eq!(peak(ahead), 2 * 4 * 72, "and one ahead");
}

/// Halves what a module has.
struct Halved;

impl ModuleMapper for Halved {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let half = (old.clone() * 0.5).into_data();
            Tensor::from_data(half, &old.device()).set_require_grad(old.is_require_grad())
        })
    }
}

#[test]
fn frozen_units_are_in_checkpoints_of_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let expected = run(3, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let fsdp = adapted(&sharding, 0..2, group.rank().index());
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let [optimizer, ..] = optimizers();
        // As before the first step: this optimizer has taken none.
        checkpoints.save_sharded(0, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();
        fsdp.model().floats()
    });
    for ranks in [1, 2] {
        run(ranks, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            // Another base than the one that is saved.
            let layers = layers().map(|layer| layer.map(&mut Halved));
            let mut fsdp = Fsdp::new(Adapted::of(layers, &sharding).unwrap(), &sharding).unwrap();
            assert!(distance(&fsdp.model().floats()[..2], &expected[0][..2]) > 0.1);
            let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
            let [mut optimizer, ..] = optimizers();
            fsdp.load(&mut optimizer, &saved, "model").unwrap();
            assert_eq!(fsdp.model().floats(), expected[0]);
        });
    }
}

#[test]
fn frozen_units_have_replicas_too() {
    let expected = adapted_in_one_process(4);
    run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
        let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
        let rank = mesh.coordinate("replicate").unwrap() * 2 + mesh.coordinate("shard").unwrap();
        let fsdp = adapted(&ShardingGroup::hybrid(shard, replicate), 0..STEPS, rank);
        let apart = distance(&fsdp.model().floats(), &expected);
        assert!(apart < 1e-5, "{apart:e}");
    });
}

#[test]
fn a_model_of_frozen_units_alone_has_nothing_to_train() {
    for error in run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let unit = FullySharded::new(LinearConfig::new(4, 4).init(&device()).no_grad(), &sharding).unwrap();
        Fsdp::new(unit, &sharding).unwrap_err().to_string()
    }) {
        assert!(
            error.contains("no parameter of the model needs a gradient") && !error.contains("Ddp"),
            "{error}"
        );
    }
}

#[test]
fn one_id_with_two_values_in_a_frozen_unit_is_refused_with_both_names() {
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let layer = LinearConfig::new(4, 4).init(&device());
        let mut layers = vec![layer; 3];
        let shared = FullySharded::new(layers.clone().no_grad(), &sharding).unwrap();
        assert_eq!(floats(&shared.gather().unwrap()).len(), 6, "the same values are one tensor");
        // As after loading a file into clones.
        layers[2].weight = layers[2].weight.clone().map(|weight| weight * 2.0);
        let error = FullySharded::new(layers.no_grad(), &sharding).unwrap_err().to_string();
        assert!(error.contains("`0.weight`") && error.contains("`2.weight`"), "{error}");
    });
}

#[test]
fn layers_that_are_unfrozen_one_by_one_go_on_from_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let train = |fsdp: &mut Fsdp<Adapted>, optimizer: &mut ModuleOptimizer, steps: std::ops::Range<usize>| {
        for step in steps {
            let loss = fsdp.forward(|model| model.loss(batch(step, 0, 0))).unwrap();
            let gradients = fsdp.backward(&loss).unwrap();
            fsdp.step(optimizer, 0.02, gradients).unwrap();
        }
    };
    // The second and the last layer are trained at first, and then the first one, too.
    let [mut alone, ..] = optimizers();
    let mut model = Vec::from(layers());
    for step in 0..STEPS {
        if step == 2 {
            model[0] = model[0].clone().set_require_grad(true);
        }
        let (x, y) = batch(step, 0, 0);
        let x = model[..3].iter().fold(x, |x, layer| layer.forward(x).tanh());
        let loss = (model[3].forward(x) - y).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = alone.step(0.02, model, gradients);
    }
    let expected = floats(&model);
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut fsdp = Fsdp::new(Adapted::new(&sharding).unwrap(), &sharding).unwrap();
        let [mut optimizer, ..] = optimizers();
        train(&mut fsdp, &mut optimizer, 0..2);
        checkpoints.save_sharded(2, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();

        let mut unfrozen = layers();
        unfrozen[0] = unfrozen[0].clone().set_require_grad(true);
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut fsdp = Fsdp::new(Adapted::of(unfrozen, &sharding).unwrap(), &sharding).unwrap();
        let [mut optimizer, ..] = optimizers();
        fsdp.load(&mut optimizer, &checkpoints.newest().unwrap().unwrap(), "model").unwrap();
        train(&mut fsdp, &mut optimizer, 2..STEPS);
        let apart = distance(&fsdp.model().floats(), &expected);
        assert!(apart < 1e-5, "{apart:e}");
    });
}

#[test]
fn a_unit_that_is_unfrozen_is_trained_and_gathered_as_one() {
    let [expected, ours] = [false, true].map(|in_place| {
        let trained = run(2, |group| {
            let mut whole = layers();
            if !in_place {
                whole[0] = whole[0].clone().set_require_grad(true);
            }
            let sharding = ShardingGroup::new(&group).unwrap();
            let mut model = Adapted::of(whole, &sharding).unwrap();
            if in_place {
                model.base = model.base.set_require_grad(true);
            }
            let mut fsdp = Fsdp::new(model, &sharding).unwrap();
            let [mut optimizer, ..] = optimizers();
            for step in 0..2 {
                let loss = fsdp.forward(|model| model.loss(batch(step, 0, 0))).unwrap();
                let gradients = fsdp.backward(&loss).unwrap();
                fsdp.step(&mut optimizer, 0.02, gradients).unwrap();
            }
            let base = fsdp.model().base.gather().unwrap();
            assert!(base.weight.is_require_grad() && base.valid().train().weight.is_require_grad());
            let weights = fsdp.model().floats();
            // And frozen again.
            let base = fsdp.into_model().base.no_grad();
            let base = base.gather().unwrap();
            assert!(!base.weight.is_require_grad() && !base.valid().train().weight.is_require_grad());
            weights
        });
        trained[0].clone()
    });
    assert_eq!(ours, expected);
}

#[test]
fn units_that_share_a_parameter_are_refused_once_one_is_unfrozen() {
    let refused = run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let [base, first, _, last] = layers();
        let mut model = Adapted::of([base.clone(), first, base, last], &sharding).unwrap();
        model.base = model.base.set_require_grad(true);
        Fsdp::new(model, &sharding).unwrap_err().to_string()
    });
    for error in refused {
        assert!(error.contains("one parameter stands at `base.weight` and at `frozen.weight`"), "{error}");
    }
}

/// With its moments it goes on where it was, once it is trained again.
#[test]
fn what_is_frozen_by_now_keeps_its_moments() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut fsdp = Fsdp::new(Adapted::new(&sharding).unwrap(), &sharding).unwrap();
        let [mut optimizer, ..] = optimizers();
        let loss = fsdp.forward(|model| model.loss(batch(0, 0, 0))).unwrap();
        let gradients = fsdp.backward(&loss).unwrap();
        fsdp.step(&mut optimizer, 0.02, gradients).unwrap();
        let mut model = fsdp.into_model();
        model.first = model.first.no_grad();
        let fsdp = Fsdp::new(model, &sharding).unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save_sharded(1, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();

        let mut frozen = layers();
        frozen[1] = frozen[1].clone().no_grad();
        let sharding = ShardingGroup::new(&group).unwrap();
        let mut again = Fsdp::new(Adapted::of(frozen, &sharding).unwrap(), &sharding).unwrap();
        let [mut loaded, ..] = optimizers();
        again.load(&mut loaded, &checkpoints.newest().unwrap().unwrap(), "model").unwrap();
        assert_eq!(loaded.to_record().len(), optimizer.to_record().len());
        assert_eq!(again.model().floats(), fsdp.model().floats());
    });
}

/// A norm with running statistics, outside of the units.
#[derive(Module, Debug)]
struct Normed {
    first: FullySharded<Linear>,
    norm: BatchNorm,
    last: FullySharded<Linear>,
}

impl Normed {
    fn new(sharding: &ShardingGroup) -> Self {
        let layer = |outputs| LinearConfig::new(8, outputs).init(&device()).map(&mut Waves::default());
        let unit = |outputs| FullySharded::new(layer(outputs), sharding).unwrap();
        // Its factors are in no unit, and so not trained.
        let norm = BatchNormConfig::new(8).init(&device()).no_grad();
        Self { first: unit(8), norm, last: unit(3) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.first.forward(x, |layer, x| layer.forward(x).tanh()));
        self.last.forward(x, |layer, x| layer.forward(x))
    }
}

/// Trains for some steps, each rank with batches of its own.
fn normed(group: &ProcessGroup, from: usize) -> Fsdp<Normed> {
    let mesh = DeviceMesh::new(group, &[("replicate", 2), ("shard", 2)]).unwrap();
    let sharding = ShardingGroup::hybrid(mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
    let mut fsdp = Fsdp::new(Normed::new(&sharding), &sharding).unwrap();
    let mut optimizer = SgdConfig::new().init();
    for step in from..from + 3 {
        let (x, y) = batch(step, group.rank().index(), 0);
        let loss = fsdp.forward(|model| (model.forward(x) - y).powi_scalar(2).mean()).unwrap();
        let gradients = fsdp.backward(&loss).unwrap();
        fsdp.step(&mut optimizer, 0.1, gradients).unwrap();
    }
    fsdp
}

#[test]
fn every_replica_evaluates_with_rank_0_s_running_statistics() {
    let folder = tempfile::tempdir().unwrap();
    let results = run(4, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut fsdp = normed(&group, 0);
        let optimizer = SgdConfig::new().init();
        // Before anything else has applied the last update.
        checkpoints.save_sharded(3, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();
        let answer = |fsdp: &mut Fsdp<Normed>| {
            let (x, _) = samples(500, 507);
            let answer = fsdp.evaluate(|model| model.forward(x.inner())).unwrap();
            answer.into_data().iter::<f32>().collect::<Vec<_>>()
        };
        let evaluated = answer(&mut fsdp);
        // Into a model that has trained otherwise, whose last update is not applied yet.
        let mut again = normed(&group, 7);
        assert_ne!(answer(&mut normed(&group, 7)), evaluated);
        let saved = checkpoints.newest().unwrap().unwrap();
        again.load(&mut SgdConfig::new().init(), &saved, "model").unwrap();
        (evaluated, answer(&mut again), floats(&fsdp.model().norm.valid()))
    });
    let (expected, ..) = &results[0];
    for (evaluated, resumed, _) in &results {
        assert_eq!((evaluated, resumed), (expected, expected));
    }
    // Which is no matter of course: each rank has seen other batches.
    assert_ne!(results[0].2, results[1].2);
}
