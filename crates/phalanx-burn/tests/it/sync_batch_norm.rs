//! Several ranks with a part of the batch each normalise as one process does with all of it.

use std::sync::Barrier;

use crate::common::{Waves, device, distance, floats, plain, run};
use burn::module::{Module, ModuleDisplay, Param, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use parking_lot::Mutex;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::ReducerOptions;
use phalanx::testing::{self, Fabric};
use phalanx::{Error, ProcessGroup, WorldSize};
use phalanx_burn::{Ddp, DdpOptions, SyncBatchNorm};

const CHANNELS: usize = 5;
const TOLERANCE: f64 = 1e-5;

/// Samples `from..to` of a data set without end, with channels of different means and scales.
fn samples<const D: usize>(from: usize, to: usize, shape: [usize; D]) -> Tensor<D> {
    let (channels, length) = (shape[1], shape[2..].iter().product::<usize>());
    let value = |i: usize| {
        let channel = i / length % channels;
        ((i * i % 1013) as f32 * 0.1).sin() * (1.0 + channel as f32) + 3.0 * channel as f32
    };
    let row = channels * length;
    let mut shape = shape;
    shape[0] = to - from;
    let values: Vec<f32> = (from * row..to * row).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), &device())
}

/// What a forward and a backward pass of one layer give.
#[derive(Clone, Default)]
struct Outcome {
    output: Vec<f32>,
    input: Vec<f32>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
    mean: Vec<f32>,
    variance: Vec<f32>,
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// A layer whose parameters are no zeros and ones, and the same wherever it is made.
fn layer() -> BatchNorm {
    let mut norm = BatchNormConfig::new(CHANNELS).init(&device());
    let ramp = |from: f32| Tensor::<1>::from_floats([0.0, 0.3, 0.6, 0.9, 1.2], &device()) + from;
    norm.gamma = norm.gamma.map(|_| ramp(0.5).require_grad());
    norm.beta = norm.beta.map(|_| ramp(-0.5).require_grad());
    norm
}

/// Two training passes over `x`, the second of them backward too. The loss is a sum over samples, so that the gradients
/// of ranks add up to those of the whole batch.
fn pass<const D: usize>(norm: &impl Norm, x: Tensor<D>) -> Outcome {
    let x = x.require_grad();
    drop(norm.apply(x.clone() * 0.5));
    let output = norm.apply(x.clone());
    let weights = (x.clone().detach() * 1.7).sin();
    let loss = (output.clone().powi_scalar(3) * weights).sum();
    let gradients = loss.backward();
    let inner = norm.plain();
    Outcome {
        output: values(output),
        input: values(x.grad(&gradients).unwrap()),
        gamma: values(inner.gamma.val().grad(&gradients).unwrap()),
        beta: values(inner.beta.val().grad(&gradients).unwrap()),
        mean: values(inner.running_mean.value_sync()),
        variance: values(inner.running_var.value_sync()),
    }
}

/// Either layer.
trait Norm: Module + ModuleDisplay {
    fn apply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D>;
    fn plain(&self) -> BatchNorm;
}

impl Norm for BatchNorm {
    fn apply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward(x)
    }

    fn plain(&self) -> BatchNorm {
        self.clone()
    }
}

impl Norm for SyncBatchNorm {
    fn apply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward(x)
    }

    fn plain(&self) -> BatchNorm {
        self.clone().into_batch_norm()
    }
}

/// Puts what ranks have into one: samples one after the other, parameters' gradients added.
fn together(ranks: &[Outcome]) -> Outcome {
    let mut whole = ranks[0].clone();
    for rank in &ranks[1..] {
        whole.output.extend(&rank.output);
        whole.input.extend(&rank.input);
        whole.gamma.iter_mut().zip(&rank.gamma).for_each(|(sum, own)| *sum += own);
        whole.beta.iter_mut().zip(&rank.beta).for_each(|(sum, own)| *sum += own);
        assert_eq!((&rank.mean, &rank.variance), (&whole.mean, &whole.variance), "running statistics");
    }
    whole
}

fn apart(ours: &Outcome, expected: &Outcome) -> [f64; 6] {
    let one = |pick: fn(&Outcome) -> &Vec<f32>| distance(&[pick(ours).clone()], &[pick(expected).clone()]);
    [
        one(|o| &o.output),
        one(|o| &o.input),
        one(|o| &o.gamma),
        one(|o| &o.beta),
        one(|o| &o.mean),
        one(|o| &o.variance),
    ]
}

/// Ranks with `batches[rank]` samples each.
fn check<const D: usize>(batches: &[usize], shape: [usize; D]) {
    check_over(Fabric::InProcess, batches, shape);
}

fn check_over<const D: usize>(fabric: Fabric, batches: &[usize], shape: [usize; D]) {
    let total: usize = batches.iter().sum();
    let expected = pass(&layer(), samples(0, total, shape));
    let from = |rank: usize| batches[..rank].iter().sum::<usize>();
    let part = |rank: usize| samples(from(rank), from(rank) + batches[rank], shape);

    let ours = testing::run(batches.len() as u32, fabric, |group| {
        pass(&SyncBatchNorm::new(layer(), &group), part(group.rank().index()))
    });
    let distances = apart(&together(&ours), &expected);
    assert!(distances.iter().all(|distance| *distance < TOLERANCE), "{batches:?}: {distances:?}");

    // Each rank for itself, it is something else.
    if batches.len() > 1 {
        let mut alone: Vec<_> = (0..batches.len())
            .filter(|rank| batches[*rank] > 0)
            .map(|rank| pass(&layer(), part(rank)))
            .collect();
        let first = alone[0].clone();
        for own in &mut alone {
            (own.mean, own.variance) = (first.mean.clone(), first.variance.clone());
        }
        let distances = apart(&together(&alone), &expected);
        assert!(distances.iter().all(|distance| *distance > 100.0 * TOLERANCE), "{batches:?}: {distances:?}");
    }
}

#[test]
fn a_world_of_one_is_batch_norm() {
    check(&[6], [0, CHANNELS, 3, 2]);
    check(&[6], [0, CHANNELS]);
}

#[test]
fn two_three_and_four_ranks_are_one_with_the_whole_batch() {
    for ranks in 2..=4 {
        check(&vec![4; ranks], [0, CHANNELS]);
        check(&vec![3; ranks], [0, CHANNELS, 3, 2]);
        check(&vec![2; ranks], [0, CHANNELS, 7]);
    }
}

#[test]
fn so_they_are_whatever_carries_the_statistics() {
    for fabric in [Fabric::Tcp, Fabric::SharedMemory] {
        check_over(fabric, &[4, 1, 3], [0, CHANNELS, 3, 2]);
    }
}

#[test]
fn batches_may_differ_in_size_and_be_empty() {
    check(&[5, 2], [0, CHANNELS, 3, 2]);
    check(&[1, 8, 3], [0, CHANNELS]);
    check(&[4, 0, 3], [0, CHANNELS, 2]);
}

#[test]
fn a_rank_whose_samples_have_no_width_takes_part_as_one_without_samples() {
    let shape = [0, CHANNELS, 3, 2];
    let expected = pass(&layer(), samples(0, 4, shape));
    for empty in [[4, CHANNELS, 3, 0], [4, CHANNELS, 0, 2], [0, CHANNELS, 3, 0], [4, CHANNELS, 0, 0]] {
        let ours = run(2, |group| {
            let norm = SyncBatchNorm::new(layer(), &group);
            match group.rank().is_main() {
                true => pass(&norm, samples(0, 4, shape)),
                false => pass(&norm, Tensor::<4>::zeros(empty, &device())),
            }
        });
        let distances = apart(&together(&ours), &expected);
        assert!(distances.iter().all(|distance| *distance < TOLERANCE), "{empty:?}: {distances:?}");
    }
}

/// In f16 the squares of these are infinite.
const FAR_APART: [f32; 4] = [-300.0, 300.0, 300.0, -300.0];

/// What a layer of one channel makes of samples `from..to` of [`FAR_APART`] as `dtype`: outputs, gradients of inputs and of gamma, and the running
/// variance.
fn far_apart(norm: &impl Norm, (from, to): (usize, usize), dtype: DType) -> [Vec<f32>; 4] {
    let typed = |values: &[f32]| {
        let data = TensorData::new(values.to_vec(), [values.len(), 1]).convert_dtype(dtype);
        Tensor::<2>::from_data(data, (&device(), dtype))
    };
    let x = typed(&FAR_APART[from..to]).require_grad();
    let output = norm.apply(x.clone());
    let gradients = (output.clone() * typed(&[1.0, 2.0, 3.0, 5.0][from..to])).sum().backward();
    let inner = norm.plain();
    [
        values(output),
        values(x.grad(&gradients).unwrap()),
        values(inner.gamma.val().grad(&gradients).unwrap()),
        values(inner.running_var.value_sync()),
    ]
}

#[test]
fn inputs_of_16_bits_have_the_statistics_of_f32() {
    let expected = far_apart(&BatchNormConfig::new(1).init(&device()), (0, 4), DType::F32);
    for dtype in [DType::F16, DType::BF16].into_iter().filter(|dtype| plain().supports_dtype(*dtype)) {
        let ranks = run(2, |group| {
            let vector = |value: f32| Tensor::<1>::full([1], value, (&device(), dtype));
            let mut norm = BatchNormConfig::new(1).init(&device());
            norm.gamma = Param::from_tensor(vector(1.0).require_grad());
            norm.beta = Param::from_tensor(vector(0.0).require_grad());
            norm.running_mean = RunningState::new(vector(0.0));
            norm.running_var = RunningState::new(vector(1.0));
            let from = 2 * group.rank().index();
            far_apart(&SyncBatchNorm::new(norm, &group), (from, from + 2), dtype)
        });
        let [[first, input, gamma, variance], [second, other_input, other_gamma, other_variance]] =
            <[_; 2]>::try_from(ranks).unwrap();
        assert_eq!(variance, other_variance);
        let gamma = vec![gamma[0] + other_gamma[0]];
        let ours = [[first, second].concat(), [input, other_input].concat(), gamma, variance];
        for (ours, expected) in ours.iter().flatten().zip(expected.iter().flatten()) {
            assert!((ours - expected).abs() <= 0.01 * expected.abs(), "{dtype:?}: {ours} {expected}");
        }
    }
}

#[test]
fn a_step_without_any_sample_leaves_the_running_statistics() {
    for ranks in [1, 2] {
        run(ranks, |group| {
            let norm = SyncBatchNorm::new(layer(), &group);
            let statistics = || {
                let norm = norm.clone().into_batch_norm();
                [norm.running_mean, norm.running_var].map(|running| values(running.value_sync()))
            };
            let from = 10 * group.rank().index();
            drop(norm.forward(samples(from, from + 4, [0, CHANNELS, 2])));
            let before = statistics();
            let output = norm.forward(samples(0, 0, [0, CHANNELS, 2]));
            assert_eq!(output.dims(), [0, CHANNELS, 2]);
            assert_eq!(statistics(), before, "{ranks} ranks");
            drop(norm.forward(samples(from, from + 4, [0, CHANNELS, 2])));
            assert!(statistics() != before && statistics().iter().flatten().all(|value| value.is_finite()));
        });
    }
}

#[test]
fn evaluation_uses_the_running_statistics_and_exchanges_nothing() {
    let outputs = run(2, |group| {
        let norm = SyncBatchNorm::new(layer(), &group);
        let from = 10 * group.rank().index();
        drop(norm.forward(samples(from, from + 4, [0, CHANNELS])));
        let valid = norm.valid();
        // One rank alone.
        let output = group.rank().is_main().then(|| {
            let x = samples(0, 3, [0, CHANNELS]).inner();
            let ours = values(valid.forward(x.clone()));
            (ours, values(valid.clone().into_batch_norm().forward(x)))
        });
        group.barrier().unwrap();
        output
    });
    let (ours, plain) = outputs[0].clone().unwrap();
    assert_eq!(ours, plain);
}

#[test]
fn a_frozen_layer_uses_the_running_statistics_too() {
    run(2, |group| {
        let norm = SyncBatchNorm::new(layer(), &group).freeze();
        if group.rank().is_main() {
            let x = samples(0, 3, [0, CHANNELS]);
            assert_eq!(values(norm.forward(x.clone())), values(norm.clone().into_batch_norm().forward(x)));
        }
    });
}

#[test]
fn saved_weights_of_either_layer_are_the_other_s() {
    let group = ProcessGroup::alone().unwrap();
    let (plain, sync) = (layer(), SyncBatchNorm::new(BatchNormConfig::new(CHANNELS).init(&device()), &group));
    let bytes = plain.clone().into_record().into_bytes().unwrap();
    let sync = sync.load_record(burn::store::ModuleRecord::from_bytes(bytes).unwrap());
    assert_eq!(floats(&plain), floats(&sync));
}

/// Two convolutions, each with a norm, and a head.
#[derive(Module, Debug)]
struct Net<N: Module + ModuleDisplay> {
    conv1: Conv2d,
    norm1: N,
    conv2: Conv2d,
    norm2: N,
    head: Linear,
    relu: Relu,
}

impl<N: Norm> Net<N> {
    fn new(norm: impl Fn(BatchNorm) -> N) -> Self {
        let device = device();
        let conv = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(&device)
        };
        let norm = |channels| norm(BatchNormConfig::new(channels).init(&device));
        let (norm1, norm2) = (norm(4), norm(6));
        let head = LinearConfig::new(6, 3).init(&device);
        let net = Self { conv1: conv(2, 4), norm1, conv2: conv(4, 6), norm2, head, relu: Relu::new() };
        net.map(&mut Waves::default())
    }

    fn loss(&self, x: Tensor<4>) -> Tensor<1> {
        let target = x.clone().mean_dim(3).mean_dim(2).mean_dim(1).flatten::<2>(1, 3).repeat_dim(1, 3).sin();
        let x = self.relu.forward(self.norm1.apply(self.conv1.forward(x)));
        let x = self.relu.forward(self.norm2.apply(self.conv2.forward(x)));
        let features = x.mean_dim(3).mean_dim(2).flatten(1, 3);
        (self.head.forward(features) - target).powi_scalar(2).mean()
    }
}

impl<N: Norm> Net<N> {
    /// The same network with other norms.
    fn renormed<T: Norm>(self, norm: impl Fn(N) -> T) -> Net<T> {
        let Self { conv1, norm1, conv2, norm2, head, relu } = self;
        Net { conv1, norm1: norm(norm1), conv2, norm2: norm(norm2), head, relu }
    }
}

impl Net<BatchNorm> {
    /// A copy with running statistics of its own, which clones would share.
    fn twin(&self) -> Self {
        Self::new(|norm| norm).load_record(self.clone().into_record())
    }
}

const STEPS: usize = 6;
const BATCH: usize = 3;

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn images(from: usize, to: usize) -> Tensor<4> {
    samples(from, to, [0, 2, 5, 5])
}

/// One process with the batches of all ranks.
fn reference(mut net: Net<BatchNorm>, ranks: usize) -> Vec<Vec<f32>> {
    let mut optimizer = sgd();
    for step in 0..STEPS {
        let from = step * ranks * BATCH;
        let gradients = net.loss(images(from, from + ranks * BATCH)).backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        net = optimizer.step(0.05, net, gradients);
    }
    floats(&net.valid())
}

/// All ranks under `Ddp`; `model` makes each rank's network from a plain one and the group.
fn trained<N: Norm>(
    ranks: u32,
    net: &Net<BatchNorm>,
    options: &DdpOptions,
    model: impl Fn(Net<BatchNorm>, &ProcessGroup) -> Net<N> + Sync,
) -> Vec<Vec<Vec<f32>>> {
    run(ranks, |group| {
        let net = if group.rank().is_main() { net.twin() } else { Net::new(|norm| norm) };
        let mut ddp = Ddp::with_options(model(net, &group), &group, options.clone()).unwrap();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let from = (step * ranks as usize + group.rank().index()) * BATCH;
            let loss = ddp.forward(|net| net.loss(images(from, from + BATCH))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 0.05, gradients).unwrap();
        }
        assert!(ddp.replicas_identical().unwrap());
        floats(&ddp.model().valid())
    })
}

#[test]
fn a_convolutional_network_under_ddp_trains_as_one_with_the_whole_batch() {
    let mut unsynced_buffers = DdpOptions::default();
    unsynced_buffers.broadcast_buffers = false;
    // Each layer a bucket of its own, so that buckets and statistics take turns during backward.
    unsynced_buffers.reducer = ReducerOptions::default().bucket_cap_mb(0.0);
    for ranks in [2, 3, 4] {
        let net = Net::new(|norm| norm);
        let expected = reference(net.twin(), ranks as usize);
        for options in [&DdpOptions::default(), &unsynced_buffers] {
            let sync = |net: Net<BatchNorm>, group: &ProcessGroup| {
                net.renormed(|norm| SyncBatchNorm::new(norm, group))
            };
            for ours in trained(ranks, &net, options, sync) {
                let distance = distance(&ours, &expected);
                assert!(distance < TOLERANCE, "{ranks} ranks: {distance:e} away");
            }
        }
        let plain = trained(ranks, &net, &DdpOptions::default(), |net, _| net);
        let distance = distance(&plain[0], &expected);
        assert!(distance > 1e-2, "without synchronisation {ranks} ranks are only {distance:e} away");
    }
}

#[test]
fn the_layers_may_have_a_group_of_their_own() {
    let ranks = 3;
    let net = Net::new(|norm| norm);
    let expected = reference(net.twin(), ranks as usize);
    let own: Vec<_> =
        ProcessGroup::in_process(WorldSize::new(ranks).unwrap()).unwrap().into_iter().map(Some).collect();
    let own = Mutex::new(own);
    let sync = |net: Net<BatchNorm>, group: &ProcessGroup| {
        let statistics = own.lock()[group.rank().index()].take().unwrap();
        net.renormed(|norm| SyncBatchNorm::new(norm, group).with_statistics_group(&statistics))
    };
    for ours in trained(ranks, &net, &DdpOptions::default(), sync) {
        assert!(distance(&ours, &expected) < TOLERANCE);
    }
}

#[test]
fn uneven_inputs_normalise_with_the_ranks_that_still_have_data() {
    let batches = |rank: usize| 2 + (rank * 2) % 3;
    let part = |step: usize, rank: usize| images((step * 3 + rank) * BATCH, (step * 3 + rank + 1) * BATCH);
    for ranks in [2, 3] {
        let net = Net::new(|norm| norm);
        let expected = {
            let (mut net, mut optimizer) = (net.twin(), sgd());
            for step in 0..(0..ranks).map(batches).max().unwrap() {
                let active = (0..ranks).filter(|&rank| step < batches(rank));
                let x = Tensor::cat(active.map(|rank| part(step, rank)).collect(), 0);
                let gradients = GradientsParams::from_grads(net.loss(x).backward(), &net);
                net = optimizer.step(0.05, net, gradients);
            }
            floats(&net.valid())
        };
        let trained = run(ranks as u32, |group| {
            let group = JoinGroup::new(group);
            let rank = phalanx::Communicator::rank(&group).index();
            let net = net.twin().renormed(|norm| SyncBatchNorm::new(norm, &group));
            let mut ddp = Ddp::new(net, &group).unwrap();
            let mut optimizer = sgd();
            let mut join = JoinOptions::default();
            join.divide_by_initial_world_size = false;
            ddp.join(&mut optimizer, join, |ddp, optimizer| {
                for step in 0..batches(rank) {
                    let loss = ddp.forward(|net| net.loss(part(step, rank)))?;
                    let gradients = ddp.backward(&loss)?;
                    ddp.step(optimizer, 0.05, gradients)?;
                }
                Ok(())
            })
            .unwrap();
            assert!(ddp.replicas_identical().unwrap());
            floats(&ddp.model().valid())
        });
        for ours in &trained {
            let distance = distance(ours, &expected);
            assert!(distance < TOLERANCE, "{ranks} ranks: {distance:e} away");
        }
    }
}

#[test]
fn a_failed_exchange_ends_the_group_and_gives_no_numbers() {
    let own: Vec<_> = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let statistics = own[group.rank().index()].clone();
        let norm = |norm| SyncBatchNorm::new(norm, &group).with_statistics_group(&statistics);
        let mut ddp = Ddp::new(Net::new(norm), &group).unwrap();
        // The failure ends the group too, whose barrier one rank leaves before the other.
        all_are_here.wait();
        statistics.abort(Error::aborted("the cable was cut"));
        let loss = ddp.forward(|net| net.loss(images(0, 2)));
        if let Ok(loss) = &loss {
            assert!(loss.clone().into_scalar::<f32>().is_nan());
        }
        let cause = loss.and_then(|loss| ddp.backward(&loss)).unwrap_err().to_string();
        assert!(cause.contains("the cable was cut"), "{cause}");
        let norm = &ddp.model().norm1;
        assert!(norm.failure().unwrap().to_string().contains("cable"));
        let (mean, variance) = (norm.running_mean.value(), norm.running_var.value());
        assert_eq!(mean.abs().sum().into_scalar::<f32>(), 0.0);
        assert_eq!((variance - 1.0).abs().sum().into_scalar::<f32>(), 0.0);
    });
}

#[test]
fn layers_with_other_settings_end_the_group_and_give_no_numbers() {
    for (epsilon, momentum) in [(1e-3, 0.1), (1e-5, 0.5)] {
        run(2, |group| {
            let norm = match group.rank().is_main() {
                true => layer(),
                false => BatchNorm { epsilon, momentum, ..layer() },
            };
            let norm = SyncBatchNorm::new(norm, &group);
            let output = norm.forward(samples(0, 4, [0, CHANNELS]));
            assert!(values(output).iter().all(|value| value.is_nan()));
            let cause = norm.failure().unwrap().to_string();
            assert!(cause.contains("batch norms of the ranks have different settings"), "{cause}");
            assert_eq!(values(norm.running_mean.value_sync()), [0.0; CHANNELS]);
        });
    }
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    let gradients = |device: &Device, group: &ProcessGroup| {
        let norm = SyncBatchNorm::new(BatchNormConfig::new(4).init(device), group);
        let x = Tensor::<2>::from_data(
            TensorData::new(
                (0..12).map(|i| ((i + group.rank().index()) as f32).sin()).collect(),
                Shape::new([3, 4]),
            ),
            device,
        );
        let x = x.require_grad();
        let gradients = norm.forward(x.clone().tanh()).powi_scalar(3).sum().backward();
        values(x.grad(&gradients).unwrap())
    };
    run(2, |group| {
        assert_eq!(gradients(&device(), &group), gradients(&device().gradient_checkpointing(), &group));
    });
}
