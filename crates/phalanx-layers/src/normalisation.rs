//! Batch norm with the statistics of the batch, and its gradients, on slices of `[samples, channels, length]`.
//!
//! With one thread, a channel is read three times in a row, and one of usual size stays in the second-level cache meanwhile. Several threads
//! first divide the channels, for the sums, and then the samples. Made of tensor operations, each of some ten reads and writes a whole tensor.

use std::iter::zip;
use std::mem::MaybeUninit;

use pulp::Arch;
use rayon::prelude::*;

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
    fn channel_mut<'a>(
        &self,
        values: &'a mut [MaybeUninit<f32>],
        channel: usize,
    ) -> impl Iterator<Item = &'a mut [MaybeUninit<f32>]> {
        values.chunks_exact_mut(self.length).skip(channel).step_by(self.channels)
    }

    /// Values of a sample.
    fn sample(&self) -> usize {
        self.channels * self.length
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

/// Writes `gamma · (x - mean) / sqrt(variance + epsilon) + beta`, which is every value of `y`.
pub fn forward(
    shape: &Shape,
    x: &[f32],
    [gamma, beta]: [&[f32]; 2],
    epsilon: f64,
    y: &mut [MaybeUninit<f32>],
) -> Statistics {
    assert!(x.len() == y.len() && x.len().is_multiple_of(shape.sample()), "tensors that do not fit");
    let of = |channel: usize, (mean, variance): (f32, f32)| {
        let scale = gamma[channel] / (variance + epsilon as f32).sqrt();
        (mean, scale, beta[channel])
    };
    let each = if rayon::current_num_threads() == 1 {
        let mut each = Vec::with_capacity(shape.channels);
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for channel in 0..shape.channels {
                    let statistics = statistics(shape, x, channel);
                    let of = of(channel, statistics);
                    for (y, x) in zip(shape.channel_mut(y, channel), shape.channel(x, channel)) {
                        normalise(of, x, y);
                    }
                    each.push(statistics);
                }
            },
        );
        each
    } else {
        let each = each_channel(shape, |channel| statistics(shape, x, channel));
        let samples = y.par_chunks_exact_mut(shape.sample()).zip(x.par_chunks_exact(shape.sample()));
        samples.for_each(|(y, x)| {
            Arch::new().dispatch(
                #[inline(always)]
                || {
                    let channels = zip(y.chunks_exact_mut(shape.length), x.chunks_exact(shape.length));
                    for (channel, (y, x)) in channels.enumerate() {
                        normalise(of(channel, each[channel]), x, y);
                    }
                },
            );
        });
        each
    };
    let (mean, variance) = each.into_iter().unzip();
    Statistics { mean, variance }
}

/// What `compute` makes of each channel, on all threads.
fn each_channel<T: Send>(shape: &Shape, compute: impl Fn(usize) -> T + Sync + Send) -> Vec<T> {
    let channels = (0..shape.channels).into_par_iter();
    let compute = |channel| {
        Arch::new().dispatch(
            #[inline(always)]
            || compute(channel),
        )
    };
    channels.map(compute).collect()
}

#[inline(always)]
fn statistics(shape: &Shape, x: &[f32], channel: usize) -> (f32, f32) {
    let values = shape.values(x);
    let total: f64 = shape.channel(x, channel).map(|x| sum(x, |x| x)).sum();
    let mean = (total / values) as f32;
    let total: f64 = shape.channel(x, channel).map(|x| sum(x, |x| (x - mean) * (x - mean))).sum();
    (mean, (total / values) as f32)
}

#[inline(always)]
fn normalise((mean, scale, beta): (f32, f32, f32), x: &[f32], y: &mut [MaybeUninit<f32>]) {
    zip(y, x).for_each(|(y, x)| {
        y.write((x - mean) * scale + beta);
    });
}

/// The gradients of `gamma` and `beta`.
pub struct Gradients {
    pub gamma: Vec<f32>,
    pub beta: Vec<f32>,
}

/// Writes the gradient of the input, which is every value of `dx`. With x̂ the normalised input and N the number of values of a channel:
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
    dx: &mut [MaybeUninit<f32>],
) -> Gradients {
    let is_whole = x.len().is_multiple_of(shape.sample());
    assert!(is_whole && [dy.len(), dx.len()] == [x.len(); 2], "tensors that do not fit");
    let values = shape.values(x);
    let inverse = |channel: usize| (statistics.variance[channel] + epsilon as f32).sqrt().recip();
    let of = |channel: usize, (dgamma, dbeta): (f64, f64)| Terms {
        mean: statistics.mean[channel],
        scale: gamma[channel] * inverse(channel),
        of_all: (dbeta / values) as f32,
        of_x: (dgamma / values) as f32 * inverse(channel),
    };
    let sums_of = |channel: usize| sums(shape, [x, dy], statistics.mean[channel], inverse(channel), channel);
    let each = if rayon::current_num_threads() == 1 {
        let mut each = Vec::with_capacity(shape.channels);
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for channel in 0..shape.channels {
                    let sums = sums_of(channel);
                    let terms = of(channel, sums);
                    let inputs = zip(shape.channel(x, channel), shape.channel(dy, channel));
                    zip(shape.channel_mut(dx, channel), inputs)
                        .for_each(|(dx, (x, dy))| terms.gradient(x, dy, dx));
                    each.push(sums);
                }
            },
        );
        each
    } else {
        let each = each_channel(shape, sums_of);
        let inputs = x.par_chunks_exact(shape.sample()).zip(dy.par_chunks_exact(shape.sample()));
        dx.par_chunks_exact_mut(shape.sample()).zip(inputs).for_each(|(dx, (x, dy))| {
            Arch::new().dispatch(
                #[inline(always)]
                || {
                    let inputs = zip(x.chunks_exact(shape.length), dy.chunks_exact(shape.length));
                    for (channel, (dx, (x, dy))) in zip(dx.chunks_exact_mut(shape.length), inputs).enumerate()
                    {
                        of(channel, each[channel]).gradient(x, dy, dx);
                    }
                },
            );
        });
        each
    };
    let (gamma, beta) = each.into_iter().map(|(gamma, beta)| (gamma as f32, beta as f32)).unzip();
    Gradients { gamma, beta }
}

/// The gradients of a channel's `gamma` and `beta`.
#[inline(always)]
fn sums(shape: &Shape, [x, dy]: [&[f32]; 2], mean: f32, inverse: f32, channel: usize) -> (f64, f64) {
    let (mut dgamma, mut dbeta) = (0.0, 0.0);
    for (x, dy) in zip(shape.channel(x, channel), shape.channel(dy, channel)) {
        dbeta += sum(dy, |dy| dy);
        dgamma += sum_of_two(x, dy, |x, dy| dy * (x - mean));
    }
    (dgamma * f64::from(inverse), dbeta)
}

/// What the gradient of a channel's input is made of.
struct Terms {
    mean: f32,
    scale: f32,
    of_all: f32,
    of_x: f32,
}

impl Terms {
    #[inline(always)]
    fn gradient(&self, x: &[f32], dy: &[f32], dx: &mut [MaybeUninit<f32>]) {
        let Self { mean, scale, of_all, of_x } = *self;
        zip(dx, zip(x, dy)).for_each(|(dx, (x, dy))| {
            dx.write(scale * (dy - of_all - (x - mean) * of_x));
        });
    }
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
