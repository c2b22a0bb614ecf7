//! A small model, its data, and ranks as threads.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::panic)] // Each test file uses a part of it.

use std::cell::Cell;
use std::thread;

use phalanx::{ProcessGroup, WorldSize};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

thread_local! {
    /// The rank that this thread plays.
    static RANK: Cell<usize> = const { Cell::new(0) };
}

/// Where the models of this thread's rank are: on the kind of device that `PHALANX_TEST_DEVICE` names, or on processors. Ranks that are threads
/// have a device each, if there are so many: libtorch has one thread for a device, and a rank in it must not wait there for another.
pub fn device() -> Device {
    match std::env::var("PHALANX_TEST_DEVICE").as_deref() {
        Err(_) | Ok("cpu") => Device::Cpu,
        Ok("cuda") => {
            let count = usize::try_from(tch::Cuda::device_count()).unwrap();
            assert!(
                count > 0,
                "PHALANX_TEST_DEVICE=cuda, and libtorch has no CUDA device: is libtorch_cuda.so loaded?"
            );
            Device::Cuda(RANK.get() % count)
        }
        Ok(other) => panic!("PHALANX_TEST_DEVICE={other}: it is cpu or cuda"),
    }
}

/// Of this type, on this rank's device.
pub fn on_device(kind: Kind) -> (Kind, Device) {
    (kind, device())
}

/// Runs `rank` in one thread for each of `world` ranks; gives what they returned, in the order of the ranks.
pub fn run<T: Send>(world: u32, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    tch::set_num_threads(1);
    let groups = ProcessGroup::in_process(WorldSize::new(world).unwrap()).unwrap();
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    RANK.set(group.rank().index());
                    rank(group)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Dense layers with tanh between them, and a mean squared error.
#[derive(Debug)]
pub struct Mlp {
    pub store: VarStore,
    pub layers: Vec<nn::Linear>,
}

impl Mlp {
    pub fn new(widths: &[i64]) -> Self {
        let store = VarStore::new(device());
        let layer =
            |(index, w): (usize, &[i64])| nn::linear(store.root() / index, w[0], w[1], Default::default());
        let layers = widths.windows(2).enumerate().map(layer).collect();
        Self { store, layers }
    }

    pub fn like(widths: &[i64], values: &[Vec<f32>]) -> Self {
        let this = Self::new(widths);
        load(&this.store, values);
        this
    }

    pub fn forward(&self, x: &Tensor) -> Tensor {
        let (last, hidden) = self.layers.split_last().unwrap();
        last.forward(&hidden.iter().fold(x.shallow_clone(), |x, layer| layer.forward(&x).tanh()))
    }

    pub fn loss(&self, (x, y): (Tensor, Tensor)) -> Tensor {
        (self.forward(&x) - y).square().mean(Kind::Float)
    }
}

/// Samples `from..to` of a data set without end: 8 inputs, 3 answers each.
pub fn samples(from: usize, to: usize) -> (Tensor, Tensor) {
    let wave = |width: usize, scale: f32| {
        let values: Vec<f32> =
            (from * width..to * width).map(|i| ((i * i % 1009) as f32 * scale).sin()).collect();
        Tensor::from_slice(&values).reshape([(to - from) as i64, width as i64]).to_device(device())
    };
    (wave(8, 0.1), wave(3, 0.37))
}

fn sorted(store: &VarStore) -> Vec<Tensor> {
    let mut variables: Vec<_> = store.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    variables.into_iter().map(|(_, tensor)| tensor).collect()
}

/// The elements of all variables, by name.
pub fn floats(store: &VarStore) -> Vec<Vec<f32>> {
    sorted(store).iter().map(elements).collect()
}

pub fn elements(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.detach().to_kind(Kind::Float).reshape([-1])).unwrap()
}

/// Gives all variables what [`floats`] has given.
pub fn load(store: &VarStore, values: &[Vec<f32>]) {
    let _guard = tch::no_grad_guard();
    for (mut tensor, values) in sorted(store).into_iter().zip(values) {
        let size = tensor.size();
        tensor.copy_(&Tensor::from_slice(values).reshape(size));
    }
}

/// The largest distance of two tensors, relative to the length of the second, or to a tenth of the usual one.
pub fn distance(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let of = |tensor: &[f32]| tensor.iter().map(|&x| square(x)).sum::<f64>();
    let all: f64 = theirs.iter().map(|tensor| of(tensor)).sum();
    let count: usize = theirs.iter().map(Vec::len).sum();
    let relative = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        assert_eq!(a.len(), b.len());
        let apart: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
        // The same may be nought on both sides.
        if apart == 0.0 {
            0.0
        } else {
            (apart / of(b).max(b.len() as f64 * all / count as f64 / 100.0)).sqrt()
        }
    };
    // NaN, which has a sign too, comes behind infinity: it is near to nothing.
    ours.iter().zip(theirs).map(|pair| relative(pair).abs()).max_by(f64::total_cmp).unwrap()
}
