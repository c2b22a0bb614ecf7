//! Batch norm with the statistics of the batch, and its gradients, on slices of `[samples, channels, length]`.
//!
//! A channel is read three times in a row, and one of usual size stays in the second-level cache meanwhile. Made of tensor
//! operations, each of some ten reads and writes a whole tensor.

use std::iter::zip;

use pulp::Arch;

/// Sums at a time, for as many lanes and more than vectors have.
const LANES: usize = 32;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub channels: usize,
    pub length: usize,
}

impl Shape {
    /// The values of one channel, sample by sample.
    #[inline(always)]
    fn channel<'a>(&self, values: &'a [f32], channel: usize) -> impl Iterator<Item = &'a [f32]> {
        values.chunks_exact(self.length).skip(channel).step_by(self.channels)
    }

    #[inline(always)]
    fn channel_mut<'a>(&self, values: &'a mut [f32], channel: usize) -> impl Iterator<Item = &'a mut [f32]> {
        values.chunks_exact_mut(self.length).skip(channel).step_by(self.channels)
    }

    /// How many values a channel has.
    fn values(&self, x: &[f32]) -> f64 {
        (x.len() / self.channels) as f64
    }
}

/// The means and the biased variances of the channels.
pub struct Statistics {
    pub mean: Vec<f32>,
    pub variance: Vec<f32>,
}

/// `y` becomes `gamma · (x - mean) / sqrt(variance + epsilon) + beta`.
pub fn forward(
    shape: &Shape,
    x: &[f32],
    [gamma, beta]: [&[f32]; 2],
    epsilon: f64,
    y: &mut [f32],
) -> Statistics {
    let mut statistics = Statistics { mean: vec![0.0; shape.channels], variance: vec![0.0; shape.channels] };
    let values = shape.values(x);
    Arch::new().dispatch(
        #[inline(always)]
        || {
            for channel in 0..shape.channels {
                let total: f64 = shape.channel(x, channel).map(|x| sum(x, |x| x)).sum();
                let mean = (total / values) as f32;
                let total: f64 = shape.channel(x, channel).map(|x| sum(x, |x| (x - mean) * (x - mean))).sum();
                let variance = (total / values) as f32;
                let scale = gamma[channel] / (variance + epsilon as f32).sqrt();
                let beta = beta[channel];
                for (y, x) in zip(shape.channel_mut(y, channel), shape.channel(x, channel)) {
                    zip(y, x).for_each(|(y, x)| *y = (x - mean) * scale + beta);
                }
                statistics.mean[channel] = mean;
                statistics.variance[channel] = variance;
            }
        },
    );
    statistics
}

/// The gradients of `gamma` and `beta`.
pub struct Gradients {
    pub gamma: Vec<f32>,
    pub beta: Vec<f32>,
}

/// `dx` becomes the gradient of the input. With x̂ the normalised input and N the number of values of a channel:
///
/// ```text
/// dbeta  = Σ dy        dx = gamma / sqrt(variance + epsilon) · (dy - dbeta / N - x̂ · dgamma / N)
/// dgamma = Σ dy · x̂
/// ```
pub fn backward(
    shape: &Shape,
    [x, dy]: [&[f32]; 2],
    gamma: &[f32],
    statistics: &Statistics,
    epsilon: f64,
    dx: &mut [f32],
) -> Gradients {
    let mut gradients = Gradients { gamma: vec![0.0; shape.channels], beta: vec![0.0; shape.channels] };
    let values = shape.values(x);
    Arch::new().dispatch(
        #[inline(always)]
        || {
            for (channel, gamma) in gamma.iter().enumerate() {
                let mean = statistics.mean[channel];
                let inverse = (statistics.variance[channel] + epsilon as f32).sqrt().recip();
                let (mut dbeta, mut dgamma) = (0.0, 0.0);
                for (x, dy) in zip(shape.channel(x, channel), shape.channel(dy, channel)) {
                    dbeta += sum(dy, |dy| dy);
                    dgamma += sum_of_two(x, dy, |x, dy| dy * (x - mean));
                }
                dgamma *= f64::from(inverse);
                let scale = gamma * inverse;
                let (of_all, of_x) = ((dbeta / values) as f32, (dgamma / values) as f32 * inverse);
                let inputs = zip(shape.channel(x, channel), shape.channel(dy, channel));
                for (dx, (x, dy)) in zip(shape.channel_mut(dx, channel), inputs) {
                    let inputs = zip(x, dy);
                    zip(dx, inputs).for_each(|(dx, (x, dy))| *dx = scale * (dy - of_all - (x - mean) * of_x));
                }
                gradients.beta[channel] = dbeta as f32;
                gradients.gamma[channel] = dgamma as f32;
            }
        },
    );
    gradients
}

#[inline(always)]
fn sum(values: &[f32], term: impl Fn(f32) -> f32) -> f64 {
    sum_of_two(values, values, |value, _| term(value))
}

#[inline(always)]
fn sum_of_two(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f64 {
    let ((a, rest_of_a), (b, rest_of_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in zip(a, b) {
        for lane in 0..LANES {
            sums[lane] += term(a[lane], b[lane]);
        }
    }
    let rest: f32 = zip(rest_of_a, rest_of_b).map(|(a, b)| term(*a, *b)).sum();
    f64::from(sums.iter().sum::<f32>() + rest)
}
