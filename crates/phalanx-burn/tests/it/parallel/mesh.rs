//! Two dimensions: replicas of a model of which each rank has a part.

use std::sync::Barrier;

use burn::module::Module;
use burn::nn::{EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Int, Tensor};
use phalanx::Rank;
use phalanx::mesh::DeviceMesh;
use phalanx::pipeline::Schedule;
use phalanx::testing::{self, Fabric};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::pipeline::{Pipeline, TiedParameter};
use phalanx_burn::parallel::tensor::{Activations, ParallelEncoder, TensorGroup, VocabParallelEmbedding};

use super::model::{Batch, Part, Whole, loss, rows, scalar};
use crate::common::{device, run};

const LAYERS: usize = 4;
const STEPS: usize = 8;
/// With their learning rates. AdamW takes the same steps whatever a gradient is multiplied by; SGD does not.
const OPTIMIZERS: [(fn() -> ModuleOptimizer, f64); 2] =
    [(|| AdamWConfig::new().init(), 1e-2), (|| SgdConfig::new().init(), 0.1)];
/// Rows of a step, over all replicas.
const ROWS: usize = 8;

/// The losses of one process, over two batches in turn.
fn curve((optimizer, rate): (fn() -> ModuleOptimizer, f64)) -> Vec<f64> {
    let (mut model, mut optimizer) = (Whole::new(LAYERS), optimizer());
    let step = |step: usize| {
        let loss = model.loss(rows(step % 2 * ROWS, (step % 2 + 1) * ROWS));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(rate, model.clone(), gradients);
        scalar(&loss)
    };
    let curve: Vec<f64> = (0..STEPS).map(step).collect();
    assert!(
        curve[STEPS - 2] < 0.98 * curve[0],
        "steps change it by much more than what is compared: {curve:?}"
    );
    curve
}

/// This replica's rows of a step.
fn own(step: usize, replica: usize) -> (usize, usize) {
    let from = step % 2 * ROWS + replica * ROWS / 2;
    (from, from + ROWS / 2)
}

fn near(ours: &[f64], expected: &[f64]) {
    for (step, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        assert!((ours / expected - 1.0).abs() < 1e-4, "step {step}: {ours} and not {expected}");
    }
}

/// The whole model, with its layers divided.
#[derive(Module, Debug)]
struct Divided {
    tokens: VocabParallelEmbedding,
    encoder: ParallelEncoder,
    head: Linear,
}

impl Divided {
    fn loss(&self, (tokens, classes): Batch) -> Tensor<1> {
        let x = self.encoder.forward(self.tokens.forward(tokens), None, None);
        loss(&self.head, x, classes)
    }
}

#[test]
fn data_and_tensor_are_one_process() {
    for (optimizer, fabric) in OPTIMIZERS.into_iter().zip([Fabric::TwoHosts, Fabric::InProcess]) {
        let (expected, (optimizer, rate)) = (curve(optimizer), optimizer);
        testing::run(4, fabric, |group| {
            let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
            let (data, tensor) =
                (mesh.group("data").unwrap(), TensorGroup::new(mesh.group("tensor").unwrap()));
            let Whole { tokens, encoder, head } = Whole::new(LAYERS);
            let model = Divided {
                tokens: VocabParallelEmbedding::new(tokens, &tensor).unwrap(),
                encoder: ParallelEncoder::new(encoder, &tensor, Activations::Replicated).unwrap(),
                head: tensor.replicate(head).unwrap(),
            };
            let mut ddp = Ddp::new(model, data).unwrap();
            let mut optimizer = optimizer();
            let replica = mesh.coordinate("data").unwrap();
            let mut ours = Vec::new();
            for step in 0..STEPS {
                let (from, to) = own(step, replica);
                let loss = ddp.forward(|model| model.loss(rows(from, to))).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                ddp.step(&mut optimizer, rate, gradients).unwrap();
                ours.push(ddp.mean(&loss).unwrap());
            }
            near(&ours, &expected);
            assert!(tensor.failure().is_none() && ddp.replicas_identical().unwrap());
        });
    }
}

#[test]
fn a_copy_of_a_tied_part_is_a_part_of_the_same_divided_layer() {
    run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("pipeline", 2), ("tensor", 2)]).unwrap();
        let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
        let embedding = EmbeddingConfig::new(7, 4).init(&device());
        let VocabParallelEmbedding { weight } = VocabParallelEmbedding::new(embedding, &tensor).unwrap();
        let (_, copy) = TiedParameter::new(Some(weight), mesh.group("pipeline").unwrap()).unwrap();
        let copy = VocabParallelEmbedding { weight: copy.unwrap() };
        let vectors = copy.forward(Tensor::<2, Int>::from_ints([[0, 6]], &device()));
        let vectors: Vec<f32> = vectors.into_data().iter::<f32>().collect();
        let whole: Vec<f32> = copy.gather().unwrap().weight.val().into_data().iter::<f32>().collect();
        assert_eq!(whole.len(), 7 * 4);
        assert_eq!(vectors, [&whole[..4], &whole[6 * 4..]].concat());
        assert!(tensor.failure().is_none());
    });
}

/// Such as with the group of all ranks in place of the mesh's pipeline group. The first rank's elements would fit.
#[test]
fn copies_that_are_other_parts_of_a_divided_layer_are_refused_on_every_rank() {
    run(2, |group| {
        let embedding = EmbeddingConfig::new(8, 4).init(&device());
        let divided = VocabParallelEmbedding::new(embedding, &TensorGroup::new(&group)).unwrap();
        let error = TiedParameter::new(Some(divided.weight), &group).map(drop).unwrap_err();
        let text = error.to_string();
        assert!(
            error.is_mismatch() && text.contains("part 0 of 2") && text.contains("part 1 of 2"),
            "{error}"
        );
    });
}

#[test]
fn data_and_pipeline_are_one_process() {
    let interleaved = Schedule::Interleaved { stages_per_rank: 2 };
    let [adamw, sgd] = OPTIMIZERS;
    for (optimizer, schedule) in
        [(adamw, Schedule::GPipe), (sgd, Schedule::OneForwardOneBackward), (sgd, interleaved)]
    {
        let (expected, (optimizer, rate)) = (curve(optimizer), optimizer);
        run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("data", 2), ("pipeline", 2)]).unwrap();
            let data = mesh.group("data").unwrap();
            let mut pipeline = Pipeline::new(mesh.group("pipeline").unwrap(), schedule, 2).unwrap();
            let parts: Vec<Part> =
                pipeline.own_stages().map(|stage| Part::new(LAYERS, stage, pipeline.stages())).collect();
            let mut ddp = Ddp::new(parts, data).unwrap();
            let mut optimizer = optimizer();
            let replica = mesh.coordinate("data").unwrap();
            let mut ours = Vec::new();
            for step in 0..STEPS {
                let (from, to) = own(step, replica);
                let half = from + (to - from) / 2;
                let result = pipeline.train(&mut ddp, &[rows(from, half), rows(half, to)]).unwrap();
                ddp.step(&mut optimizer, rate, result.gradients).unwrap();
                ours.push(ddp.mean(result.loss).unwrap());
            }
            near(&ours, &expected);
            assert!(ddp.replicas_identical().unwrap());
        });
    }
}

#[test]
fn replicas_get_the_cause_of_a_failed_exchange_and_no_nan() {
    let all_are_here = Barrier::new(4);
    testing::run(4, Fabric::TwoHosts, |group| {
        let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
        let (data, tensor) = (mesh.group("data").unwrap(), TensorGroup::new(mesh.group("tensor").unwrap()));
        let head = LinearConfig::new(4, 4).init(&device());
        let mut ddp = Ddp::new(tensor.replicate(head).unwrap(), data).unwrap();
        all_are_here.wait();
        // One replica has a row too many to be divided between two ranks.
        let rows = if data.rank() == Rank::MAIN { 3 } else { 2 };
        let loss = ddp.forward(|head| {
            let x = tensor.copy(Tensor::<2>::ones([rows, 4], &head.weight.device()));
            tensor.gather_sums(tensor.part(head.forward(x), 0), 0).sum()
        });
        // The other replica may know of it before its forward pass begins.
        let error = loss.and_then(|loss| ddp.backward(&loss)).expect_err("NaN would be averaged").to_string();
        assert!(error.contains("cannot be divided evenly"), "{error}");
    });
}
