//! Units of which a part gets no gradient, or none at all: what no rank has a gradient of does not change.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
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
                let states = resumed.to_record().into_bytes().unwrap().len();
                assert!(states > 0);
                train(&mut fsdp, &mut resumed, 2..3, (group.rank().index(), ranks as usize, 1));
            }
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
        let [base, first, frozen, last] = layers().map(|layer| FullySharded::new(layer, sharding));
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

#[test]
fn frozen_units_are_in_checkpoints_of_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let expected = run(3, |group| {
        let sharding = ShardingGroup::new(&group).unwrap();
        let fsdp = adapted(&sharding, 0..2, group.rank().index());
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let [optimizer, ..] = optimizers();
        checkpoints.save_sharded(2, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();
        fsdp.model().floats()
    });
    for ranks in [1, 2] {
        run(ranks, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let mut fsdp = adapted(&sharding, 0..0, 0);
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
