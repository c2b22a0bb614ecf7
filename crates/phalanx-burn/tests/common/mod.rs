//! Ranks as threads, a small model, and a group that can be watched and broken.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::panic)] // Each test file uses a part of it.

use std::sync::{Arc, OnceLock};
use std::thread;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamW, AdamWConfig, AdamWState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor, TensorData};
use parking_lot::Mutex;
use phalanx::testing::{self, Fabric};
use phalanx::trace::Trace;
use phalanx::{Buffer, Communicator, DType, Error, ProcessGroup, Rank, ReduceOp, Result, Work, WorldSize};
use phalanx_burn::device::Kind;

/// By rank, which of two saved states it loads one after the other before its first step, and whether that is an error.
pub const LOADS: [([&[usize]; 2], bool); 5] = [
    ([&[0], &[0]], false),
    ([&[0], &[]], true),
    ([&[], &[0]], true),
    ([&[0], &[1]], true),
    // Rank 1 could not read the other one.
    ([&[1, 0], &[0]], false),
];

/// Runs `rank` in one thread for each of `world` ranks; gives what they returned, in the order of the ranks.
pub fn run<T: Send>(world: u32, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::in_process(WorldSize::new(world).unwrap()).unwrap();
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs with two and three ranks, where they share memory and where they do not.
pub fn everywhere(rank: impl Fn(ProcessGroup) + Sync) {
    for ranks in [2, 3] {
        for fabric in [Fabric::SharedMemory, Fabric::Tcp] {
            testing::run(ranks, fabric, &rank);
        }
    }
}

/// The device on which models are trained: [`plain`], with autodiff.
pub fn device() -> Device {
    plain().autodiff()
}

/// The kind of the device of all tests: that which `PHALANX_TEST_DEVICE` names, or Flex. Each is a feature of the package.
fn kind() -> Kind {
    std::env::var("PHALANX_TEST_DEVICE").map_or(Kind::Flex, |name| name.parse().unwrap())
}

/// Whether tensors lie in the process's memory on [`plain`].
pub fn is_in_memory() -> bool {
    matches!(kind(), Kind::Flex | Kind::LibTorch)
}

/// `steps` of training, or `fewer` on a device that is handed each operation, which is slow where it is software.
pub fn steps(steps: usize, fewer: usize) -> usize {
    if is_in_memory() { steps } else { fewer }
}

/// Whether a square root on [`plain`] differs from that of the processor in the last bit. libtorch uses Intel's MKL.
pub fn has_other_roots() -> bool {
    kind() == Kind::LibTorch
}

/// The device of all tests: the first of its kind.
pub fn plain() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let first = || {
        let kind = kind();
        let devices = kind.devices().unwrap();
        devices.into_iter().next().unwrap_or_else(|| panic!("this host has no device of kind {kind}"))
    };
    DEVICE.get_or_init(first).clone()
}

/// Dense layers with tanh between them, and a mean squared error.
#[derive(Module, Debug)]
pub struct Mlp {
    pub layers: Vec<Linear>,
}

impl Mlp {
    pub fn new(widths: &[usize]) -> Self {
        let layer = |w: &[usize]| LinearConfig::new(w[0], w[1]).init(&device());
        Self { layers: widths.windows(2).map(layer).collect() }
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (last, hidden) = self.layers.split_last().unwrap();
        last.forward(hidden.iter().fold(x, |x, layer| layer.forward(x).tanh()))
    }

    pub fn loss(&self, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        (self.forward(x) - y).powi_scalar(2).mean()
    }
}

/// The same parameters in every run: how far rounding errors grow in training depends on them.
#[derive(Default)]
pub struct Waves(usize);

impl ModuleMapper for Waves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        self.0 += 1;
        let phase = self.0 as f32;
        param.map(|old| {
            let wave: Vec<f32> =
                (0..old.shape().num_elements()).map(|i| 0.4 * (1.7 * i as f32 + phase).sin() + 0.2).collect();
            Tensor::from_data(TensorData::new(wave, old.shape()), &device()).require_grad()
        })
    }
}

/// Samples `from..to` of a data set without end: 8 inputs, 3 answers each.
pub fn samples(from: usize, to: usize) -> (Tensor<2>, Tensor<2>) {
    let wave = |width: usize, scale: f32| {
        let values: Vec<f32> =
            (from * width..to * width).map(|i| ((i * i % 1009) as f32 * scale).sin()).collect();
        Tensor::from_data(TensorData::new(values, [to - from, width]), &device())
    };
    (wave(8, 0.1), wave(3, 0.37))
}

/// The elements of all floats of a module, tensor by tensor.
pub fn floats<M: Module>(module: &M) -> Vec<Vec<f32>> {
    struct Floats(Vec<Vec<f32>>);
    impl ModuleVisitor for Floats {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().into_data().iter::<f32>().collect());
        }
    }
    let mut visitor = Floats(Vec::new());
    module.visit(&mut visitor);
    visitor.0
}

/// The largest distance of two tensors, relative to the length of the second. Should its elements happen to be near nought, as a
/// bias's may, they count as a tenth of what elements are among all tensors.
pub fn distance(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let of = |tensor: &[f32]| squares(&mut tensor.iter().map(|x| f64::from(*x)));
    let (all, elements): (f64, usize) =
        theirs.iter().fold((0.0, 0), |(all, count), tensor| (all + of(tensor), count + tensor.len()));
    let usual = all / elements as f64;
    let relative = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        assert_eq!(a.len(), b.len());
        let apart = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
        // The same may be nought on both sides.
        if apart == 0.0 { 0.0 } else { (apart / of(b).max(b.len() as f64 * usual / 100.0)).sqrt() }
    };
    // NaN, which has a sign too, comes behind infinity: it is near to nothing.
    ours.iter().zip(theirs).map(|pair| relative(pair).abs()).max_by(f64::total_cmp).unwrap()
}

/// AdamW that panics with small parameters, as an optimizer that projects gradients may.
pub fn projecting() -> ModuleOptimizer {
    ModuleOptimizer::from(Projecting(AdamWConfig::new().build()))
}

#[derive(Clone)]
struct Projecting(AdamW);

impl Optimizer for Projecting {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        assert!(tensor.shape().num_elements() > 2, "there is nothing to project");
        self.0.step(lr, tensor, grad, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        AdamW::to_device(state, device)
    }
}

/// A group that notes what is asked of it, and refuses to average floats once it is told to.
#[derive(Clone)]
pub struct Watched {
    pub group: ProcessGroup,
    pub trace: Trace,
    pub state: Arc<Mutex<Watch>>,
}

#[derive(Default)]
pub struct Watch {
    pub averaged: usize,
    pub broadcast: usize,
    pub allocated: usize,
    pub refuse: bool,
}

impl Watched {
    pub fn new(group: ProcessGroup) -> Self {
        Self { group, trace: Trace::disabled(), state: Arc::default() }
    }
}

impl Communicator for Watched {
    fn rank(&self) -> Rank {
        self.group.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.group.world_size()
    }

    fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        self.state.lock().allocated += 1;
        self.group.alloc(dtype, elements)
    }

    fn in_call(&self, caller: phalanx::Caller) -> Arc<dyn Communicator> {
        Arc::new(Self {
            group: self.group.in_call(caller),
            trace: self.trace.clone(),
            state: self.state.clone(),
        })
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        let mut state = self.state.lock();
        if buffer.dtype() == DType::F32 {
            state.averaged += 1;
            if state.refuse {
                return Err(Error::aborted("the cable was cut"));
            }
        }
        drop(state);
        self.group.all_reduce_async(buffer, op)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.state.lock().broadcast += 1;
        self.group.broadcast_async(buffer, root)
    }

    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        self.group.reduce_scatter_v_async(buffer, counts, op)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        self.group.all_gather_v_in_place_async(buffer, counts)
    }

    fn abort(&self, cause: Error) {
        self.group.abort(cause);
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure()
    }

    fn trace(&self) -> Trace {
        self.trace.clone()
    }
}
