//! Communication hooks of the program's own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx::reducer::hooks::{AllReduce, HookState};
use phalanx::{Communicator, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_tch::{Ddp, DeviceBucket, DeviceHook, DeviceMessage, Optimizer, Rule, TrainState};
use tch::nn::{Init, VarStore};
use tch::{Kind, Tensor};

use super::{all, before_an_error, ddp, devices, ones, options, train_step, zero_grad};
use crate::common::{Mlp, device, elements};

/// Sends what this makes of a bucket, and takes what comes back for the average.
pub(super) struct Sends(pub fn(&Tensor) -> DeviceMessage);

impl DeviceHook for Sends {
    fn describe(&self) -> String {
        "sends".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok((self.0)(bucket.buffer()))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        bucket.buffer().shallow_clone().copy_(combined);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Rounds what is sent to f16, and makes up for it in later steps.
#[derive(Default)]
pub(super) struct Rounded {
    /// By the parameters of the bucket.
    losses: BTreeMap<Vec<usize>, Tensor>,
    steps: Arc<AtomicU64>,
}

impl DeviceHook for Rounded {
    fn describe(&self) -> String {
        "rounded".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let parts = bucket.gradients().map(|(_, part)| part.numel()).sum::<usize>();
        assert_eq!((parts, bucket.world_size().get()), (bucket.buffer().numel(), 2));
        let parameters: Vec<usize> = bucket.gradients().map(|(parameter, _)| parameter).collect();
        let whole = match self.losses.get(&parameters) {
            Some(loss) => bucket.buffer() + loss,
            None => bucket.buffer() * 1.0,
        };
        let half = whole.to_kind(Kind::Half);
        self.losses.insert(parameters, whole - half.to_kind(Kind::Float));
        if bucket.is_last() {
            self.steps.fetch_add(1, Ordering::Relaxed);
        }
        Ok(DeviceMessage::all_reduce(half, ReduceOp::Avg))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        bucket.buffer().shallow_clone().copy_(combined);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        self.losses.clear();
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default().number("steps", self.steps.load(Ordering::Relaxed)))
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        self.losses.clear();
        self.steps.store(state.get("steps")?, Ordering::Relaxed);
        Ok(())
    }
}

/// What is queued behind backward waits for what the hook writes, and what the hook keeps is there in the next step.
pub(super) fn own_hook(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    let hook = Rounded::default();
    let steps = hook.steps.clone();
    ddp.register_device_hook(hook)?;
    // f16 has steps of 4 units above 1: what is lost adds up to one in each third of four steps.
    let unit = 2f64.powi(-12);
    for step in 0..8 {
        let loss = ddp.forward(|| all(&layers) * (1.0 + unit))?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        zero_grad(&store);
        // In the memory of the gradients.
        let others: Vec<Tensor> = layers.iter().map(|_| ones(&[64, 64], 7.0)).collect();
        let average = if step % 4 == 2 { 1.0 + 4.0 * unit } else { 1.0 };
        for seen in &seen {
            assert_eq!(elements(seen), [2.0 * average as f32; 64 * 64], "step {step}");
        }
        assert!(others.iter().all(|other| elements(other) == [7.0; 64 * 64]), "step {step}");
    }
    assert_eq!(steps.load(Ordering::Relaxed), 8);
    assert_eq!(ddp.communicated_bytes(), 8 * 12 * 64 * 64 * 2);
    // Another hook takes its place.
    ddp.register_comm_hook(AllReduce)?;
    let loss = ddp.forward(|| all(&layers) * (1.0 + unit))?;
    zero_grad(&store);
    ddp.backward(&loss)?;
    assert_eq!(elements(&layers[0].grad()), [(1.0 + unit) as f32; 64 * 64]);
    assert_eq!(steps.load(Ordering::Relaxed), 8);
    Ok(())
}

pub(super) fn own_hook_state(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let make = || {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[8], Init::Const(1.0));
        let optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
        let mut state = TrainState::new(&store, optimizer, 0u32)?.with_nccl(&devices(&group)?)?;
        let hook = Rounded::default();
        let steps = hook.steps.clone();
        state.ddp.register_device_hook(hook)?;
        Ok::<_, phalanx::Error>((one, state, steps))
    };
    let (one, mut state, _) = make()?;
    for _ in 0..3 {
        let loss = state.ddp.forward(|| one.square().sum(Kind::Float))?;
        state.optimizer.zero_grad()?;
        state.ddp.backward(&loss)?;
        state.step(0.1)?;
    }
    let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    drop(state);
    let (_one, mut state, steps) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    Ok(())
}

pub(super) fn own_hook_refused(group: &ProcessGroup) -> Result<()> {
    let cases: [(&str, Sends); 5] = [
        (
            "sends a tensor of Float on Cpu",
            Sends(|whole| DeviceMessage::all_reduce(whole.to_device(tch::Device::Cpu), ReduceOp::Avg)),
        ),
        (
            "sends a tensor of Int64 on Cuda(0)",
            Sends(|whole| DeviceMessage::all_reduce(whole.to_kind(Kind::Int64), ReduceOp::Sum)),
        ),
        ("sends no tensor", Sends(|_| DeviceMessage::all_reduce(Tensor::new(), ReduceOp::Sum))),
        ("combines by max", Sends(|whole| DeviceMessage::all_reduce(whole * 1.0, ReduceOp::Max))),
        ("sends a tensor of Bool on Cuda(0)", Sends(|whole| DeviceMessage::all_gather(whole.gt(0.0)))),
    ];
    for (words, hook) in cases {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[3], Init::Const(1.0));
        let mut ddp = ddp(&store, &group, options())?;
        ddp.register_device_hook(hook)?;
        before_an_error(&group);
        let loss = ddp.forward(|| one.sum(Kind::Float));
        let error = loss.and_then(|loss| ddp.backward(&loss)).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    // It cannot reach the host's memory, and its kind of step has no weights.
    let part = group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let mut on_host = Ddp::with_options(&store, &part, options())?;
    before_an_error(&part);
    let error = on_host.register_device_hook(Rounded::default()).unwrap_err().to_string();
    assert!(error.contains("register_device_hook(rounded)") && error.contains("with_nccl"), "{error}");
    drop(on_host);
    let part = group.split(Some(0), 0)?.unwrap();
    let mut ddp = ddp(&store, &part, options())?;
    ddp.register_device_hook(Rounded::default())?;
    before_an_error(&part);
    let loss = ddp.forward(|| one.sum(Kind::Float));
    let error = loss.and_then(|loss| ddp.backward_weighted(&loss, 1.0)).unwrap_err().to_string();
    assert!(error.contains("rounded"), "{error}");
    Ok(())
}

/// It panics on one rank, in one of its functions.
struct Panics {
    is_here: bool,
    at: &'static str,
}

impl Panics {
    fn reach(&self, function: &str) {
        assert!(!(self.is_here && function == self.at), "the hook's own");
    }
}

impl DeviceHook for Panics {
    fn describe(&self) -> String {
        self.reach("describe");
        "panics".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        if bucket.is_last() {
            self.reach("send");
        }
        Ok(DeviceMessage::all_reduce(bucket.buffer() * 1.0, ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, _: &Tensor) -> Result<()> {
        self.reach("receive");
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

pub(super) fn own_hook_panics(group: &ProcessGroup) -> Result<()> {
    for at in ["describe", "send", "receive"] {
        let group = &group.split(Some(0), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 3]);
        let mut ddp = ddp(&model.store, group, options())?;
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
        let is_here = group.rank().index() == 1;
        // The other rank may hear of it only in a later call.
        let trained = ddp.register_device_hook(Panics { is_here, at });
        let error = trained.and_then(|()| train_step(&model, &mut ddp, &mut optimizer, 0));
        let error = error.and_then(|()| group.barrier()).unwrap_err().to_string();
        assert!(error.contains("the hook's own"), "{at}: {error}");
        assert!(!is_here || ddp.forward(|| ()).is_err());
    }
    Ok(())
}

/// Averages, and keeps nothing.
pub struct Stateless;

impl DeviceHook for Stateless {
    fn describe(&self) -> String {
        "stateless".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok(DeviceMessage::all_reduce(bucket.buffer() * 2.0, ReduceOp::Avg))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        bucket.buffer().shallow_clone().copy_(&(combined * 0.5));
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }

    fn is_stateless(&self) -> bool {
        true
    }
}

/// Keeps a state on the device, which nobody reads between steps without need.
struct Resident {
    reads: Arc<AtomicU64>,
}

impl DeviceHook for Resident {
    fn describe(&self) -> String {
        "resident".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok(DeviceMessage::all_reduce(bucket.buffer().shallow_clone(), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, _: &Tensor) -> Result<()> {
        Ok(()) // The average is where it belongs.
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(HookState::default().common("factors", 0, vec![1.0]))
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        assert_eq!(state.take("factors")[&0], [1.0]);
        Ok(())
    }

    fn keeps_state(&self) -> Result<bool> {
        Ok(true)
    }
}

pub(super) fn own_hook_label(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = phalanx::checkpoint::Checkpoints::open(folder.path(), group)?;
    let reads = Arc::new(AtomicU64::new(0));
    let make = || {
        let group = group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[8], Init::Const(1.0));
        let optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
        let mut state = TrainState::new(&store, optimizer, 0u32)?.with_nccl(&devices(&group)?)?;
        state.ddp.register_device_hook(Resident { reads: reads.clone() })?;
        Ok::<_, phalanx::Error>((one, state))
    };
    let (one, mut state) = make()?;
    let loss = state.ddp.forward(|| one.square().sum(Kind::Float))?;
    state.optimizer.zero_grad()?;
    state.ddp.backward(&loss)?;
    assert_eq!(elements(&one.grad()), [2.0; 8]);
    state.step(0.1)?;
    assert_eq!(reads.load(Ordering::Relaxed), 0);
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    let once = reads.load(Ordering::Relaxed);
    assert_eq!(once, 1, "a checkpoint reads what it has");
    let (_one, mut state) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(reads.load(Ordering::Relaxed), once, "what is replaced is not read");
    Ok(())
}
