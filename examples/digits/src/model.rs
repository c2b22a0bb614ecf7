//! A small convolutional network for 28 x 28 pixels.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::{Device, Int, Tensor};

use crate::Batch;

/// Two convolutions, two dense layers: 54,000 parameters.
#[derive(Module, Debug)]
pub struct Network {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    dense1: Linear,
    dense2: Linear,
    relu: Relu,
}

impl Network {
    /// With new weights, from the device's seed.
    pub fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 8], [5, 5]).with_stride([2, 2]).init(device),
            conv2: Conv2dConfig::new([8, 24], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dense1: LinearConfig::new(24 * 5 * 5, 80).init(device),
            dense2: LinearConfig::new(80, 10).init(device),
            relu: Relu::new(),
        }
    }

    /// The score of each digit for each image.
    pub fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = self.relu.forward(self.conv1.forward(images.unsqueeze_dim(1)));
        let x = self.pool.forward(self.relu.forward(self.conv2.forward(x)));
        let x = self.relu.forward(self.dense1.forward(x.flatten(1, 3)));
        self.dense2.forward(x)
    }

    /// The mean cross entropy of a batch.
    pub fn loss(&self, batch: Batch) -> Tensor<1> {
        let device = batch.labels.device();
        CrossEntropyLossConfig::new().init(&device).forward(self.forward(batch.images), batch.labels)
    }

    /// How many digits of a batch are recognised.
    pub fn correct(&self, batch: Batch) -> i64 {
        let answers: Tensor<1, Int> = self.forward(batch.images).argmax(1).flatten(0, 1);
        answers.equal(batch.labels).int().sum().into_scalar::<i64>()
    }
}
