//! Communication hooks of the program's own, and what is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::Module;
use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Tensor};
use phalanx::checkpoint::Checkpoints;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::{AllReduce, CommHook, GradBucket, HookState, Pending};
use phalanx::{Communicator, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_burn::{Ddp, DeviceBucket, DeviceHook, DeviceMessage, TrainState, ZeroRedundancyOptimizer};
use phalanx_nccl::DeviceGroup;

use super::joins::step_of_join;
use super::{Net, RANKS, options, sgd};

/// A hook of the program's own.
struct Own;

impl CommHook for Own {
    fn describe(&self) -> String {
        "of the test".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        group.all_reduce_async(bucket.buffer, ReduceOp::Avg).map(Pending::new)
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

/// Sends gradients as f16, and counts steps.
#[derive(Default)]
pub(super) struct Halves(Arc<AtomicU64>);

impl DeviceHook for Halves {
    fn describe(&self) -> String {
        "halves".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let whole = bucket.buffer();
        let mut end = 0;
        for place in bucket.gradients() {
            assert_eq!(place.elements.len(), place.shape.iter().product::<usize>());
            assert!(place.elements.start >= end);
            end = place.elements.end;
        }
        assert!(end <= whole.dims()[0] && bucket.world_size().count() == RANKS);
        self.0.fetch_add(u64::from(bucket.is_last()), Ordering::Relaxed);
        Ok(DeviceMessage::all_reduce(whole.cast(FloatDType::F16), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        Ok(combined.cast(FloatDType::F32))
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default().number("steps", self.0.load(Ordering::Relaxed)))
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        self.0.store(state.get("steps")?, Ordering::Relaxed);
        Ok(())
    }
}

/// Sends the elements of a bucket with their places, the largest first, as one that sends fewer of them does (top-k).
pub(super) struct Largest;

impl DeviceHook for Largest {
    fn describe(&self) -> String {
        "largest".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let whole = bucket.buffer();
        let count = whole.dims()[0];
        let (_, places) = whole.clone().abs().topk_with_indices(count, 0);
        let values = whole.gather(0, places.clone());
        let places = places.float().cast(FloatDType::F32);
        Ok(DeviceMessage::all_gather(Tensor::cat(vec![values, places], 0)))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        let ranks = bucket.world_size().count();
        let count = combined.dims()[0] / ranks / 2;
        let none = bucket.buffer().zeros_like();
        let sum = (0..ranks).fold(none, |sum, rank| {
            let part = |row: usize| combined.clone().narrow(0, (2 * rank + row) * count, count);
            sum.scatter(0, part(1).int(), part(0), IndexingUpdateOp::Add)
        });
        Ok(sum / ranks as f64)
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

/// Sends less than the other ranks in a step, of its first bucket or of its last.
struct Different {
    differs: bool,
    in_first: bool,
    at: u64,
    step: u64,
}

impl DeviceHook for Different {
    fn describe(&self) -> String {
        "different".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let (whole, step) = (bucket.buffer(), self.step);
        self.step += u64::from(bucket.is_last());
        let is_it = if self.in_first { bucket.index() == 0 } else { bucket.is_last() };
        let less = usize::from(self.differs && step == self.at && is_it);
        let count = whole.dims()[0] - less;
        Ok(DeviceMessage::all_reduce(whole.narrow(0, 0, count), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        Ok(combined)
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

/// NCCL would wait until its time-out.
pub(super) fn own_hook_differs(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    for (in_first, at) in [(false, 0), (false, 2), (true, 0), (true, 2)] {
        // The error ends its group.
        let part = DeviceGroup::new(group.split(Some(0), 0)?.unwrap(), cuda)?;
        let mut ddp = Ddp::with_nccl(Net::new(), &part, options())?;
        let differs = group.rank().index() == 1;
        ddp.register_device_hook(Different { differs, in_first, at, step: 0 })?;
        let mut steps = 0..=at;
        let failed = steps.find_map(|step| {
            let loss = ddp.forward(|net| net.loss(0, &[]));
            let trained = loss.and_then(|loss| ddp.backward(&loss));
            trained.err().map(|error| (step, error.to_string()))
        });
        let (step, error) = failed.unwrap();
        let words = ["rank 0 all_reduce(avg, ", ", and rank 1 all_reduce(avg, ", "DeviceHook"];
        // The error of the rank that differs may reach the other one at the end of the step before.
        assert!(step <= at && words.iter().all(|words| error.contains(words)), "{error}");
    }
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
        Ok(DeviceMessage::all_reduce(bucket.buffer(), ReduceOp::Avg))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        self.reach("receive");
        Ok(combined)
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

pub(super) fn own_hook_panics(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    for at in ["describe", "send", "receive"] {
        // The error ends its group.
        let part = DeviceGroup::new(group.split(Some(0), 0)?.unwrap(), cuda)?;
        let mut ddp = Ddp::with_nccl(Net::new(), &part, options())?;
        let is_here = group.rank().index() == 1;
        // The other rank may hear of it only in a later call.
        let trained = ddp.register_device_hook(Panics { is_here, at });
        let trained = trained.and_then(|()| step_of_join("plain", &mut ddp, &mut sgd(), 0));
        let error = trained.and_then(|()| part.host().barrier()).unwrap_err().to_string();
        assert!(error.contains("the hook's own"), "{at}: {error}");
        assert!(!is_here || ddp.forward(|net| net.loss(0, &[])).is_err());
    }
    Ok(())
}

pub(super) fn own_hook_state(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(folder.path(), group)?;
    let make = || {
        let group = DeviceGroup::new(group.split(Some(0), 0)?.unwrap(), cuda)?;
        let mut state = TrainState::new(Net::new(), sgd(), 0u32)?.with_nccl(&group)?;
        let hook = Halves::default();
        let steps = hook.0.clone();
        state.model.register_device_hook(hook)?;
        Ok::<_, phalanx::Error>((state, steps))
    };
    let (mut state, _) = make()?;
    for _ in 0..3 {
        let loss = state.model.forward(|net| net.loss(0, &[]))?;
        let gradients = state.model.backward(&loss)?;
        state.step(0.05, gradients)?;
    }
    state.checkpoint(&checkpoints)?;
    checkpoints.finish()?;
    let (mut state, steps) = make()?;
    assert!(state.resume(&checkpoints)?);
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    // Another hook takes its place.
    state.model.register_comm_hook(AllReduce)?;
    let loss = state.model.forward(|net| net.loss(0, &[]))?;
    drop(state.model.backward(&loss)?);
    assert_eq!(steps.load(Ordering::Relaxed), 3);
    Ok(())
}

/// Sends what the first makes of a bucket, and makes averages by the second.
pub(super) struct Sends(pub(super) fn(Tensor<1>) -> DeviceMessage, pub(super) fn(Tensor<1>) -> Tensor<1>);

impl DeviceHook for Sends {
    fn describe(&self) -> String {
        "sends".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok((self.0)(bucket.buffer()))
    }

    fn receive(&mut self, _: &DeviceBucket, combined: Tensor<1>) -> Result<Tensor<1>> {
        Ok((self.1)(combined))
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

/// A step with such a hook.
fn step_with(group: &DeviceGroup, hook: Sends) -> Result<()> {
    let mut ddp = Ddp::with_nccl(Net::new(), group, options())?;
    ddp.register_device_hook(hook)?;
    // An error of one rank's ends the calls of the other.
    let _met = group.host().barrier();
    let loss = ddp.forward(|net| net.loss(0, &[]))?;
    ddp.backward(&loss).map(drop)
}

pub(super) fn refuse(group: &ProcessGroup, cuda: &phalanx_nccl::Device) {
    type Call = fn(&DeviceGroup) -> Result<()>;
    let cases: [(&str, Call); 11] = [
        ("register_device_hook(halves)", |group| {
            let mut on_host = Ddp::with_options(Net::new(), group.host(), options())?;
            on_host.register_device_hook(Halves::default())
        }),
        ("combines by max", |group| {
            let send = |whole| DeviceMessage::all_reduce(whole, ReduceOp::Max);
            step_with(group, Sends(send, |averages| averages))
        }),
        ("the communication hook sends", |group| {
            let send =
                |whole: Tensor<1>| DeviceMessage::all_reduce(whole.to_device(&Device::flex()), ReduceOp::Avg);
            step_with(group, Sends(send, |averages| averages))
        }),
        ("the communication hook receives 1 x F32", |group| {
            let send = |whole| DeviceMessage::all_reduce(whole, ReduceOp::Avg);
            step_with(group, Sends(send, |averages| averages.narrow(0, 0, 1)))
        }),
        ("TrainState::sharing after with_nccl", |group| {
            TrainState::new(Net::new(), sgd(), ())?.with_nccl(group)?.sharing(group.host()).map(drop)
        }),
        ("the model is not in the memory of CUDA device 0", |group| {
            let net = Net::new().fork(&Device::flex().autodiff());
            Ddp::with_nccl(net, group, options()).map(drop)
        }),
        ("NCCL averages gradients on one device", |group| {
            let mut net = Net::new();
            net.layers[1] = net.layers[1].clone().fork(&Device::flex().autodiff());
            Ddp::with_nccl(net, group, options()).map(drop)
        }),
        ("averaged by is", |group| match group.host().rank().is_main() {
            true => Ddp::with_nccl(Net::new(), group, options()).map(drop),
            false => Ddp::with_options(Net::new(), group.host(), options()).map(drop),
        }),
        ("register_comm_hook(of the test): NCCL averages", |group| {
            Ddp::with_nccl(Net::new(), group, options())?.register_comm_hook(Own)
        }),
        ("ZeroRedundancyOptimizer::new", |group| {
            ZeroRedundancyOptimizer::new(sgd(), &mut Ddp::with_nccl(Net::new(), group, options())?).map(drop)
        }),
        // Ranks that are done would not make its calls.
        ("a join that this Ddp has not begun", |group| {
            let joined = JoinGroup::new(ProcessGroup::alone()?);
            let state = TrainState::new(Net::new(), sgd(), ())?.sharing(&joined)?;
            let mut state = state.with_nccl(group)?;
            let step = || state.model.forward(|net| net.loss(0, &[]));
            joined.join(JoinOptions::default(), step).map(drop)
        }),
    ];
    for (words, call) in cases {
        // A refusal ends its group.
        let part = group.split(Some(0), 0).unwrap().unwrap();
        let part = DeviceGroup::new(part, cuda).unwrap();
        let error = call(&part).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    group.barrier().unwrap();
}
