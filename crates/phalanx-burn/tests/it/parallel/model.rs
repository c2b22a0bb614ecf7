//! A small transformer, whole and in parts, the same wherever it is made.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Int, Tensor, TensorData};
use phalanx_burn::parallel::pipeline::{Stage, StageOutput};

use crate::common::device;

pub const VOCABULARY: usize = 23;
pub const LENGTH: usize = 8;
pub const WIDTH: usize = 16;
pub const CLASSES: usize = 5;

/// Tokens, and the class of each row.
pub type Batch = (Tensor<2, Int>, Tensor<1, Int>);

/// Rows `from..to` of a data set without end.
pub fn rows(from: usize, to: usize) -> Batch {
    let tokens: Vec<i64> =
        (from * LENGTH..to * LENGTH).map(|i| (i * i * 7 + i / LENGTH) as i64 % VOCABULARY as i64).collect();
    let classes: Vec<i64> = (from..to).map(|i| (i * 3 % CLASSES) as i64).collect();
    let tokens = Tensor::from_data(TensorData::new(tokens, [to - from, LENGTH]), &device());
    (tokens, Tensor::from_data(TensorData::new(classes, [to - from]), &device()))
}

/// Parameters that are the same wherever they are made, as large as a layer's usually are.
pub struct Waves(pub usize);

impl ModuleMapper for Waves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let phase = self.0 as f32;
        param.map(|old| {
            let shape = old.shape();
            let scale = 1.0 / (shape[0] as f32).sqrt();
            let one = |i: usize| scale * (1.7 * i as f32 + phase).sin();
            let wave: Vec<f32> = (0..shape.num_elements()).map(one).collect();
            Tensor::from_data(TensorData::new(wave, shape), &device()).require_grad()
        })
    }
}

pub fn encoder_config(layers: usize) -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, layers).with_dropout(0.0)
}

/// The whole model, in one process.
#[derive(Module, Debug)]
pub struct Whole {
    pub tokens: Embedding,
    pub encoder: TransformerEncoder,
    pub head: Linear,
}

impl Whole {
    pub fn new(layers: usize) -> Self {
        let model = Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device()),
            encoder: encoder_config(layers).init(&device()),
            head: LinearConfig::new(WIDTH, CLASSES).init(&device()),
        };
        model.map(&mut Waves(0))
    }

    pub fn loss(&self, (tokens, classes): Batch) -> Tensor<1> {
        let x = self.tokens.forward(tokens);
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        loss(&self.head, x, classes)
    }
}

/// The cross entropy of the mean over a row's tokens.
pub fn loss(head: &Linear, x: Tensor<3>, classes: Tensor<1, Int>) -> Tensor<1> {
    let logits = head.forward(x.mean_dim(1).squeeze_dim::<2>(1));
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, classes)
}

/// One of several stages: some layers, with the embedding in the first and the head in the last.
#[derive(Module, Debug)]
pub struct Part {
    pub tokens: Option<Embedding>,
    pub encoder: TransformerEncoder,
    pub head: Option<Linear>,
}

impl Part {
    /// Stage `stage` of `stages` of the model with this many layers.
    pub fn new(layers: usize, stage: usize, stages: usize) -> Self {
        let Whole { tokens, mut encoder, head } = Whole::new(layers);
        let each = layers / stages;
        encoder.layers = encoder.layers.drain(stage * each..(stage + 1) * each).collect();
        encoder.n_layers = each;
        Self { tokens: (stage == 0).then_some(tokens), encoder, head: (stage + 1 == stages).then_some(head) }
    }

    pub fn hidden(&self, x: Tensor<3>) -> Tensor<3> {
        self.encoder.forward(TransformerEncoderInput::new(x))
    }
}

impl Stage<3> for Part {
    type Batch = Batch;

    fn forward(&self, input: Option<Tensor<3>>, (tokens, classes): &Batch) -> StageOutput<3> {
        let x = match (input, &self.tokens) {
            (Some(x), None) => x,
            (None, Some(embedding)) => embedding.forward(tokens.clone()),
            _ => unreachable!("the first stage, and no other, begins with tokens"),
        };
        match &self.head {
            None => StageOutput::Hidden(self.hidden(x)),
            Some(head) => StageOutput::Loss(loss(head, self.hidden(x), classes.clone())),
        }
    }
}

/// The gradients of all parameters of a module that have one, in module order.
pub fn gradients_of<M: Module>(module: &M, gradients: &Gradients) -> Vec<Vec<f32>> {
    struct Collect<'a>(&'a Gradients, Vec<Vec<f32>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = param.val().grad(self.0) {
                self.1.push(gradient.into_data().iter::<f32>().collect());
            }
        }
    }
    let mut collect = Collect(gradients, Vec::new());
    module.visit(&mut collect);
    collect.1
}

/// The gradients that a step has, in the same order.
pub fn gradients_for<M: Module>(module: &M, gradients: &GradientsParams) -> Vec<Vec<f32>> {
    struct Collect<'a>(&'a GradientsParams, Vec<Vec<f32>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1.push(gradient.into_data().iter::<f32>().collect());
            }
        }
    }
    let mut collect = Collect(gradients, Vec::new());
    module.visit(&mut collect);
    collect.1
}

/// The stages' tensors in the order of the whole model, from each rank's list of stages, which is in the order of [`Whole`].
pub fn in_order(stages: Vec<Vec<Vec<f32>>>) -> Vec<Vec<f32>> {
    stages.into_iter().flatten().collect()
}

pub fn scalar(loss: &Tensor<1>) -> f64 {
    loss.clone().into_data().iter::<f64>().next().unwrap()
}
