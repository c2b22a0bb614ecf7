//! The networks that may be trained.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use clap::ValueEnum;
use digits::{Batch, Network};

/// Which network is trained.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Name {
    /// Two convolutions and two dense layers: 54,000 parameters
    Convolutions,
    /// Two layers of a transformer's encoder over the rows of an image: 41,000 parameters
    Encoder,
}

/// A network that reads digits.
pub trait Model: Module {
    /// With new weights, from the device's seed.
    fn new(device: &Device) -> Self;

    /// The mean cross entropy of a batch.
    fn loss(&self, batch: Batch) -> Tensor<1>;

    /// How many digits of a batch are recognised.
    fn correct(&self, batch: Batch) -> i64;
}

impl Model for Network {
    fn new(device: &Device) -> Self {
        Self::new(device)
    }

    fn loss(&self, batch: Batch) -> Tensor<1> {
        self.loss(batch)
    }

    fn correct(&self, batch: Batch) -> i64 {
        self.correct(batch)
    }
}

/// Reads an image as a sequence of its rows.
#[derive(Module, Debug)]
pub struct Encoder {
    rows: Linear,
    places: Linear,
    layers: TransformerEncoder,
    head: Linear,
}

impl Encoder {
    const SIDE: usize = 28;
    const WIDTH: usize = 48;

    /// The score of each digit for each image.
    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        // A row of the identity is a place: each has a vector of its own.
        let places = Tensor::<2>::eye(Self::SIDE, &images.device());
        let rows = self.rows.forward(images) + self.places.forward(places).unsqueeze();
        let read = self.layers.forward(TransformerEncoderInput::new(rows));
        self.head.forward(read.mean_dim(1).flatten(1, 2))
    }
}

impl Model for Encoder {
    fn new(device: &Device) -> Self {
        let layers = TransformerEncoderConfig::new(Self::WIDTH, 2 * Self::WIDTH, 4, 2);
        Self {
            rows: LinearConfig::new(Self::SIDE, Self::WIDTH).init(device),
            places: LinearConfig::new(Self::SIDE, Self::WIDTH).with_bias(false).init(device),
            layers: layers.with_dropout(0.0).with_norm_first(true).init(device),
            head: LinearConfig::new(Self::WIDTH, 10).init(device),
        }
    }

    fn loss(&self, batch: Batch) -> Tensor<1> {
        let device = batch.labels.device();
        CrossEntropyLossConfig::new().init(&device).forward(self.forward(batch.images), batch.labels)
    }

    fn correct(&self, batch: Batch) -> i64 {
        let answers: Tensor<1, Int> = self.forward(batch.images).argmax(1).flatten(0, 1);
        answers.equal(batch.labels).int().sum().into_scalar::<i64>()
    }
}
