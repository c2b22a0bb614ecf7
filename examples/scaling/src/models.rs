//! The models that are measured, each with the data it would see: random, new in every step, and with random answers,
//! so that nothing can be learned by heart. At a loss of zero, gradients are denormal and a step takes 50 times longer.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
};
use burn::tensor::{Device, Distribution, Int, Tensor};

use phalanx_layers::{batch_norm, conv2d, transformer_encoder};

/// A model that can be trained for its own sake.
pub trait Subject: Module {
    /// What it takes.
    type Input;

    /// Samples in a batch.
    const BATCH: usize;

    fn new(device: &Device) -> Self;

    /// A batch that no other step has seen.
    fn sample(device: &Device) -> Self::Input;

    fn logits(&self, input: Self::Input) -> Tensor<2>;

    /// Cross entropy against random answers.
    fn loss(&self, input: Self::Input) -> Tensor<1> {
        let logits = self.logits(input);
        let ([samples, classes], device) = (logits.dims(), logits.device());
        let answers = random_ints([samples], classes, &device);
        CrossEntropyLossConfig::new().init(&device).forward(logits, answers)
    }
}

fn random_ints<const D: usize>(shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    Tensor::<D>::random(shape, Distribution::Uniform(0.0, below as f64), &device.clone().inner())
        .int()
        .autodiff()
}

/// Four dense layers: 10.5 M parameters.
#[derive(Module, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    head: Linear,
    relu: Relu,
}

impl Mlp {
    const INPUT: usize = 1024;
    const WIDTH: usize = 2048;
}

impl Subject for Mlp {
    type Input = Tensor<2>;

    const BATCH: usize = 128;

    fn new(device: &Device) -> Self {
        let widths = [Self::INPUT, Self::WIDTH, Self::WIDTH, Self::WIDTH];
        Self {
            layers: widths.windows(2).map(|w| LinearConfig::new(w[0], w[1]).init(device)).collect(),
            head: LinearConfig::new(Self::WIDTH, 10).init(device),
            relu: Relu::new(),
        }
    }

    fn sample(device: &Device) -> Self::Input {
        Tensor::random([Self::BATCH, Self::INPUT], Distribution::Normal(0.0, 1.0), device)
    }

    fn logits(&self, input: Self::Input) -> Tensor<2> {
        let hidden = self.layers.iter().fold(input, |x, layer| self.relu.forward(layer.forward(x)));
        self.head.forward(hidden)
    }
}

/// Six layers of a transformer's encoder over embedded tokens: 22.7 M parameters.
#[derive(Module, Debug)]
pub struct Encoder {
    tokens: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Encoder {
    const LENGTH: usize = 64;
    const VOCABULARY: usize = 7300;
    const WIDTH: usize = 512;
}

impl Subject for Encoder {
    type Input = Tensor<2, Int>;

    const BATCH: usize = 8;

    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(Self::VOCABULARY, Self::WIDTH).init(device),
            positions: EmbeddingConfig::new(Self::LENGTH, Self::WIDTH).init(device),
            encoder: TransformerEncoderConfig::new(Self::WIDTH, 4 * Self::WIDTH, 8, 6)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(Self::WIDTH, 32).init(device),
        }
    }

    fn sample(device: &Device) -> Self::Input {
        random_ints([Self::BATCH, Self::LENGTH], Self::VOCABULARY, device)
    }

    fn logits(&self, input: Self::Input) -> Tensor<2> {
        let positions = Tensor::arange(0..Self::LENGTH as i64, &input.device()).unsqueeze();
        let embedded = self.tokens.forward(input) + self.positions.forward(positions);
        let encoded = transformer_encoder(&self.encoder, embedded, None, None);
        self.head.forward(encoded.mean_dim(1).squeeze_dim(1))
    }
}

/// A residual network of 20 layers for 32 x 32 pixels, with batch norm: 0.27 M parameters.
#[derive(Module, Debug)]
pub struct ResNet {
    stem: Normed,
    blocks: Vec<Block>,
    head: Linear,
    relu: Relu,
}

#[derive(Module, Debug)]
struct Normed {
    conv: Conv2d,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
struct Block {
    first: Normed,
    second: Normed,
    shortcut: Option<Normed>,
    relu: Relu,
}

impl Subject for ResNet {
    type Input = Tensor<4>;

    const BATCH: usize = 64;

    fn new(device: &Device) -> Self {
        let stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)];
        let blocks = stages.into_iter().flat_map(|(from, to, stride)| {
            [
                Block::new(from, to, stride, device),
                Block::new(to, to, 1, device),
                Block::new(to, to, 1, device),
            ]
        });
        Self {
            stem: Normed::new(3, 16, 3, 1, device),
            blocks: blocks.collect(),
            head: LinearConfig::new(64, 10).init(device),
            relu: Relu::new(),
        }
    }

    fn sample(device: &Device) -> Self::Input {
        Tensor::random([Self::BATCH, 3, 32, 32], Distribution::Normal(0.0, 1.0), device)
    }

    fn logits(&self, input: Self::Input) -> Tensor<2> {
        let stem = self.relu.forward(self.stem.forward(input));
        let features = self.blocks.iter().fold(stem, |x, block| block.forward(x));
        self.head.forward(features.mean_dim(3).mean_dim(2).flatten(1, 3))
    }
}

impl Normed {
    fn new(from: usize, to: usize, kernel: usize, stride: usize, device: &Device) -> Self {
        let padding = PaddingConfig2d::Explicit(kernel / 2, kernel / 2, kernel / 2, kernel / 2);
        Self {
            conv: Conv2dConfig::new([from, to], [kernel, kernel])
                .with_stride([stride, stride])
                .with_padding(padding)
                .with_bias(false)
                .init(device),
            norm: BatchNormConfig::new(to).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        batch_norm(&self.norm, conv2d(&self.conv, x))
    }
}

impl Block {
    fn new(from: usize, to: usize, stride: usize, device: &Device) -> Self {
        Self {
            first: Normed::new(from, to, 3, stride, device),
            second: Normed::new(to, to, 3, 1, device),
            shortcut: (from != to).then(|| Normed::new(from, to, 1, stride, device)),
            relu: Relu::new(),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.second.forward(self.relu.forward(self.first.forward(x.clone())));
        let x = self.shortcut.as_ref().map_or(x.clone(), |shortcut| shortcut.forward(x));
        self.relu.forward(x + y)
    }
}
