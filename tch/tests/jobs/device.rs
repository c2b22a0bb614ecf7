//! What is another on a device than on processors.

use std::path::Path;

use phalanx::launch::Outcome;
use phalanx::{GroupHandle, ProcessGroup, Result};
use phalanx_tch::{Ddp, Optimizer, Rule, SyncBatchNorm};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

use crate::common::{device, distance, elements, floats, run, samples};

pub const TESTS: &[(&str, fn())] =
    &[("statistics_of_two_processes_on_one_device_are_those_of_the_whole_batch", norm)];

/// Those that need another device than the processors.
pub const ON_DEVICES: &[(&str, fn())] = &[
    ("variables_on_two_devices_are_refused", two_devices),
    ("ranks_on_processors_and_on_a_device_are_refused", two_kinds),
    ("an_optimizer_does_not_follow_a_model_to_another_device", moved),
];

/// A layer, and a batch norm over all ranks.
struct Network {
    store: VarStore,
    first: nn::Linear,
    norm: SyncBatchNorm,
}

impl Network {
    fn new(group: &ProcessGroup) -> Self {
        let store = VarStore::new(device());
        let first = nn::linear(store.root() / "first", 8, 6, Default::default());
        let config = nn::BatchNormConfig::default();
        let norm = nn::batch_norm1d(store.root() / "norm", 6, config);
        let norm = SyncBatchNorm::new(norm, config, &GroupHandle::new(group.clone()));
        Self { store, first, norm }
    }

    /// A sum over all samples, so that parts of any size have the whole one's gradient.
    fn loss(&self, from: usize, to: usize) -> Tensor {
        let output = self.norm.forward(&self.first.forward(&samples(from, to).0), true).unwrap();
        (output.square() * output.cos()).sum(Kind::Float)
    }

    fn gradients(&self) -> Vec<Vec<f32>> {
        self.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect()
    }
}

/// What a worker does. On a device, backward and its exchanges run on libtorch's thread for it.
pub fn play(folder: &Path) -> Result<()> {
    let group = phalanx::init()?;
    let mut network = Network::new(&group);
    network.store.load(folder.join("start.safetensors")).unwrap();
    let mut ddp = Ddp::new(&network.store, &group)?;
    let rank = group.rank().index();
    let ends = [0, 4, 9];
    for _ in 0..2 {
        let loss = ddp.forward(|| network.loss(ends[rank], ends[rank + 1]))?;
        network.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        // The average over two ranks of twice the parts' sums.
        ddp.backward(&(loss * 2.0))?;
    }
    let variables = network.store.trainable_variables();
    assert!(variables.iter().all(|one| one.grad().device() == device()));
    let gradients = network.gradients();
    let named = gradients.iter().enumerate().map(|(index, one)| (index.to_string(), Tensor::from_slice(one)));
    Tensor::write_safetensors(&named.collect::<Vec<_>>(), folder.join(format!("{rank}.safetensors")))
        .unwrap();
    Ok(())
}

fn norm() {
    let folder = tempfile::tempdir().unwrap();
    let network = Network::new(&ProcessGroup::alone().unwrap());
    network.store.save(folder.path().join("start.safetensors")).unwrap();
    network.loss(0, 9).backward();
    let expected = network.gradients();
    let mut stderr = String::new();
    let job = crate::job("device", 2, folder.path());
    let report = crate::run(&job, |event| crate::equivalence::note(event, &mut stderr));
    assert!(matches!(report.outcome, Outcome::Succeeded), "{stderr}");
    for rank in 0..2 {
        let file = folder.path().join(format!("{rank}.safetensors"));
        let mut ours = Tensor::read_safetensors(file).unwrap();
        ours.sort_by(|a, b| a.0.cmp(&b.0));
        let ours: Vec<_> = ours.iter().map(|(_, tensor)| elements(tensor)).collect();
        assert!(distance(&ours, &expected) < 1e-4, "{:e}", distance(&ours, &expected));
    }
}

fn two_devices() {
    let store = VarStore::new(device());
    nn::linear(store.root() / "layer", 2, 2, Default::default());
    drop(store.root().add("here", Tensor::zeros([2], (Kind::Float, Device::Cpu)), false));
    let error = Ddp::new(&store, &ProcessGroup::alone().unwrap()).unwrap_err().to_string();
    let words = ["`here` is on Cpu", "`layer.bias` is on Cuda(0)", "a device for each rank"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

fn two_kinds() {
    let errors = run(2, |group| {
        let store = VarStore::new(if group.rank().is_main() { Device::Cpu } else { device() });
        nn::linear(store.root() / "layer", 2, 2, Default::default());
        Ddp::new(&store, &group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("cpu on rank 0 and cuda on rank 1")), "{errors:?}");
}

fn moved() {
    let mut store = VarStore::new(device());
    let layer = nn::linear(store.root() / "layer", 2, 2, Default::default());
    let mut optimizer = Optimizer::new(&store, Rule::ADAMW).unwrap();
    let mut step = |device: Device| {
        optimizer.zero_grad().unwrap();
        Tensor::ones([1, 2], (Kind::Float, device)).apply(&layer).sum(Kind::Float).backward();
        optimizer.step(0.1)
    };
    step(device()).unwrap();
    store.set_device(Device::Cpu);
    let before = floats(&store);
    let error = step(Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("on Cpu now") && error.contains("make a new Optimizer"), "{error}");
    assert_eq!(floats(&store), before, "nothing is changed");
}
