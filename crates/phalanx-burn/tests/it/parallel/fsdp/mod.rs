//! Sharded parameters, against one process that has them all.

mod errors;
mod layers;
mod overlap;
mod partial;
mod steps;
mod weights;

use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{Module, ParamGroup};
use burn::nn::transformer::TransformerEncoderLayer;
use burn::nn::{Embedding, Linear};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::Result;
use phalanx::mesh::DeviceMesh;
use phalanx::testing::{self, Fabric};
use phalanx_burn::clip_grad_norm;
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup, ShardingOptions};

use super::model::{Batch, Whole, loss, rows, scalar};
use crate::common::{distance, floats, run};

const LAYERS: usize = 3;
const STEPS: usize = 5;
/// Rows of a step, over all ranks.
const ROWS: usize = 8;

/// [`Whole`], of units.
#[derive(Module, Debug)]
struct Sharded {
    tokens: FullySharded<Embedding>,
    layers: Vec<FullySharded<TransformerEncoderLayer>>,
    head: FullySharded<Linear>,
}

impl Sharded {
    fn new(whole: Whole, sharding: &ShardingGroup) -> Result<Self> {
        let Whole { tokens, encoder, head } = whole;
        let tokens = FullySharded::new(tokens, sharding)?;
        let layers = encoder.layers.into_iter().map(|layer| FullySharded::new(layer, sharding));
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { tokens, layers, head: FullySharded::new(head, sharding)? })
    }

    fn loss(&self, (tokens, classes): Batch) -> Tensor<1> {
        let x = self.tokens.forward(tokens, |embedding, tokens| embedding.forward(tokens));
        let x =
            self.layers.iter().fold(x, |x, layer| layer.forward(x, |layer, x| layer.forward(x, None, None)));
        self.head.forward((x, classes), |head, (x, classes)| loss(head, x, classes))
    }

    /// All parameters, in the order of the whole model.
    fn floats(&self) -> Vec<Vec<f32>> {
        let mut all = floats(&self.tokens.gather().unwrap());
        for layer in &self.layers {
            all.extend(floats(&layer.gather().unwrap()));
        }
        all.extend(floats(&self.head.gather().unwrap()));
        all
    }
}

/// A training, and what it comes to.
#[derive(Clone)]
struct Plan {
    optimizer: ModuleOptimizer,
    rate: ModuleLearningRate,
    /// Parts of each rank's batch, whose gradients are added up.
    parts: usize,
    max_norm: Option<f64>,
}

impl Plan {
    fn adam() -> Self {
        // Large enough that gradients which are rounding errors, as those of keys' biases, move nothing.
        let optimizer = AdamWConfig::new().with_epsilon(1e-3).init();
        Self { optimizer, rate: 1e-2_f64.into(), parts: 1, max_norm: None }
    }

    fn momentum() -> Self {
        let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        Self { optimizer, rate: 0.2_f64.into(), ..Self::adam() }
    }

    /// Biases have no decay, and another rate.
    fn grouped() -> Self {
        let biases = || ParamGroup::from_regex(r"(^|\.)bias$").unwrap();
        let decayed = AdamWConfig::new().with_epsilon(1e-3).with_weight_decay(0.5);
        let plain = decayed.clone().with_weight_decay(0.0).build();
        let optimizer = decayed.init().with_group(biases(), plain, None);
        let mut rates = ModuleLrScheduler::new(1e-2_f64).with_group(biases(), 2e-2_f64);
        Self { optimizer, rate: rates.step(), ..Self::adam() }
    }
}

#[derive(Debug)]
struct Outcome {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<Vec<f32>>,
}

/// The rows of part `part` of a rank's batch.
fn part(step: usize, rank: usize, ranks: usize, plan: &Plan, part: usize) -> Batch {
    let each = ROWS / ranks / plan.parts;
    let from = step % 2 * ROWS + (rank * plan.parts + part) * each;
    rows(from, from + each)
}

fn one_process(plan: &Plan) -> Outcome {
    let (mut model, mut optimizer) = (Whole::new(LAYERS), plan.optimizer.clone());
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let mut sum = GradientsAccumulator::new();
        let mut mean = 0.0;
        for index in 0..plan.parts {
            let loss = model.loss(part(step, 0, 1, plan, index)) / plan.parts as f64;
            mean += scalar(&loss);
            sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
        }
        let mut gradients = sum.grads();
        if let Some(max) = plan.max_norm {
            norms.push(clip_grad_norm(&model, &mut gradients, max).unwrap());
        }
        model = optimizer.step(plan.rate.clone(), model, gradients);
        losses.push(mean);
    }
    Outcome { losses, norms, weights: floats(&model) }
}

/// Of a rank that is number `rank` of `ranks`.
fn sharded(plan: &Plan, sharding: &ShardingGroup, rank: usize, ranks: usize) -> Result<Outcome> {
    let mut fsdp = Fsdp::new(Sharded::new(Whole::new(LAYERS), sharding)?, sharding)?;
    let mut optimizer = plan.optimizer.clone();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let mut mean = 0.0;
        for index in 0..plan.parts - 1 {
            let batch = part(step, rank, ranks, plan, index);
            let loss = fsdp.forward(|model| model.loss(batch))? / plan.parts as f64;
            mean += scalar(&loss);
            fsdp.backward_no_sync(&loss)?;
        }
        let batch = part(step, rank, ranks, plan, plan.parts - 1);
        let loss = fsdp.forward(|model| model.loss(batch))? / plan.parts as f64;
        mean += scalar(&loss);
        let mut gradients = fsdp.backward(&loss)?;
        if let Some(max) = plan.max_norm {
            norms.push(fsdp.clip_grad_norm(&mut gradients, max)?);
        }
        fsdp.step(&mut optimizer, plan.rate.clone(), gradients)?;
        losses.push(fsdp.mean(mean)?);
    }
    Ok(Outcome { losses, norms, weights: fsdp.model().floats() })
}

fn near(ours: &Outcome, expected: &Outcome, what: &str) {
    for (ours, expected) in
        ours.losses.iter().chain(&ours.norms).zip(expected.losses.iter().chain(&expected.norms))
    {
        assert!((ours / expected - 1.0).abs() < 1e-5, "{what}: {ours} and not {expected}");
    }
    assert_eq!(ours.norms.len(), expected.norms.len());
    let apart = distance(&ours.weights, &expected.weights);
    assert!(apart < 1e-5, "{what}: {apart:e}");
}

fn options(reshard_after_forward: bool, prefetch: usize) -> ShardingOptions {
    let mut options = ShardingOptions::default();
    (options.reshard_after_forward, options.prefetch) = (reshard_after_forward, prefetch);
    options
}

/// ZeRO-3 with other numbers of units ahead, and ZeRO-2.
fn all_options() -> [ShardingOptions; 4] {
    [options(true, 1), options(true, 0), options(true, 9), options(false, 1)]
}

#[test]
fn sharded_training_is_one_process() {
    for plan in [Plan::adam(), Plan::momentum()] {
        let expected = one_process(&plan);
        let (first, last) = (expected.losses[0], expected.losses[STEPS - 1]);
        assert!(last / first < 0.99, "steps change it by much more than what is compared: {first} {last}");
        for ranks in [1, 2, 4] {
            for options in all_options() {
                run(ranks, |group| {
                    let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
                    let rank = group.rank().index();
                    let ours = sharded(&plan, &sharding, rank, ranks as usize).unwrap();
                    near(&ours, &expected, &format!("{ranks} ranks, {options:?}"));
                });
            }
        }
    }
}

#[test]
fn groups_of_parameters_are_told_by_their_names_in_the_whole_model() {
    let plan = Plan::grouped();
    let expected = one_process(&plan);
    for ranks in [1, 2] {
        run(ranks, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let ours = sharded(&plan, &sharding, group.rank().index(), ranks as usize).unwrap();
            near(&ours, &expected, &format!("{ranks} ranks"));
        });
    }
}

#[test]
fn it_is_so_over_every_transport() {
    let plan = Plan::adam();
    let expected = one_process(&plan);
    for fabric in [Fabric::Tcp, Fabric::SharedMemory, Fabric::TwoHosts] {
        testing::run(4, fabric, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let ours = sharded(&plan, &sharding, group.rank().index(), 4).unwrap();
            near(&ours, &expected, &format!("{fabric:?}"));
        });
    }
}

#[test]
fn replicas_of_shards_are_one_process() {
    for plan in [Plan::adam(), Plan { parts: 2, max_norm: Some(0.1), ..Plan::momentum() }] {
        let expected = one_process(&plan);
        for (fabric, options) in
            [(Fabric::InProcess, options(true, 1)), (Fabric::TwoHosts, options(false, 1))]
        {
            testing::run(4, fabric, |group| {
                let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
                let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
                let sharding = ShardingGroup::hybrid(shard, replicate).with_options(options.clone());
                let rank = mesh.coordinate("replicate").unwrap() * 2 + mesh.coordinate("shard").unwrap();
                let ours = sharded(&plan, &sharding, rank, 4).unwrap();
                near(&ours, &expected, &format!("{fabric:?}"));
            });
        }
    }
}

#[test]
fn gradients_are_added_up_and_clipped_as_in_one_process() {
    let plan = Plan { parts: 2, max_norm: Some(0.1), ..Plan::adam() };
    let expected = one_process(&plan);
    assert!(expected.norms.iter().all(|norm| *norm > 0.1), "all are clipped: {:?}", expected.norms);
    for ranks in [2, 4] {
        for options in all_options() {
            run(ranks, |group| {
                let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
                let ours = sharded(&plan, &sharding, group.rank().index(), ranks as usize).unwrap();
                near(&ours, &expected, &format!("{ranks} ranks, {options:?}"));
            });
        }
    }
}
