//! Code of the program's own that this crate calls, a communicator's or a hook's, can reach the model's tensors. All of it is safe code.

use std::sync::{Arc, Mutex};

use phalanx::join::JoinGroup;
use phalanx::trace::Trace;
use phalanx::{
    Buffer, Caller, Communicator, DType, Error, ProcessGroup, Rank, ReduceOp, Result, Work, WorldSize,
};
use phalanx_tch::{Ddp, SyncBatchNorm};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::common::{device, on_device, run, samples};

/// A group that does something before each collective.
#[derive(Clone)]
struct Meddling(ProcessGroup, Arc<dyn Fn() + Send + Sync>);

impl Communicator for Meddling {
    fn rank(&self) -> Rank {
        self.0.rank()
    }
    fn world_size(&self) -> WorldSize {
        self.0.world_size()
    }
    fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        self.0.alloc(dtype, elements)
    }
    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(Self(self.0.in_call(caller), self.1.clone()))
    }
    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        (self.1)();
        self.0.all_reduce_async(buffer, op)
    }
    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        (self.1)();
        self.0.broadcast_async(buffer, root)
    }
    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        self.0.reduce_scatter_v_async(buffer, counts, op)
    }
    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        self.0.all_gather_v_in_place_async(buffer, counts)
    }
    fn abort(&self, cause: Error) {
        self.0.abort(cause);
    }
    fn failure(&self) -> Option<Error> {
        self.0.failure()
    }
    fn trace(&self) -> Trace {
        self.0.trace()
    }
}

/// What a tensor of the model is given within each collective, once it is set.
type Slot = Arc<Mutex<Option<Tensor>>>;

#[test]
fn a_variable_that_is_given_other_memory_meanwhile_is_an_error_and_no_dangling_pointer() {
    let errors = run(2, |group| {
        let store = VarStore::new(device());
        let norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let slot: Slot = Arc::default();
        let meddled = slot.clone();
        // Its elements move, and the memory in which they were is freed.
        let meddle = move || {
            if let Some(tensor) = &mut *meddled.lock().unwrap() {
                drop(tensor.resize_([1 << 20]));
            }
        };
        let group = JoinGroup::new(Meddling(group, Arc::new(meddle)));
        let mut ddp = Ddp::new(&store, group).unwrap();
        let loss = ddp.forward(|| samples(0, 4).0.apply_t(&norm, true).square().mean(Kind::Float)).unwrap();
        ddp.backward(&loss).unwrap();
        *slot.lock().unwrap() = Some(norm.running_mean.shallow_clone());
        ddp.forward(|| ()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("size has changed")), "{errors:?}");
}

/// The others would wait for what this rank has not done.
#[test]
fn an_error_of_one_rank_alone_ends_the_group() {
    type Call = fn(&mut Ddp) -> Result<()>;
    let calls: [(&str, Call); 3] = [
        ("norm.running_mean", |ddp| ddp.forward(|| ())),
        ("norm.running_mean", |ddp| ddp.evaluate(|| ())),
        ("norm.weight", Ddp::average_parameters),
    ];
    for (name, call) in calls {
        // The groups are dropped when all ranks are done: nobody has left.
        let ends = run(2, |group| {
            let store = VarStore::new(device());
            let norm = nn::batch_norm1d(store.root() / "norm", 8, Default::default());
            let slot: Slot = Arc::default();
            let meddled = slot.clone();
            let meddle = move || {
                if let Some(tensor) = &mut *meddled.lock().unwrap() {
                    tensor.set_data(&Tensor::zeros([1 << 10], on_device(Kind::Float)));
                }
            };
            let joined = JoinGroup::new(Meddling(group.clone(), Arc::new(meddle)));
            let mut ddp = Ddp::new(&store, joined).unwrap();
            let loss =
                ddp.forward(|| samples(0, 4).0.apply_t(&norm, true).square().mean(Kind::Float)).unwrap();
            ddp.backward(&loss).unwrap();
            if group.rank().index() == 1 {
                *slot.lock().unwrap() = Some(store.variables()[name].shallow_clone());
            }
            let error = call(&mut ddp).err().map(|error| error.to_string());
            (error, group.failure().map(|cause| cause.to_string()), group)
        });
        let (error, failure, _) = &ends[1];
        for text in [error, failure] {
            assert!(text.as_ref().is_some_and(|text| text.contains("size has changed")), "{name}: {text:?}");
        }
    }
}

#[test]
fn a_communicator_s_panic_in_backward_is_an_error_of_batch_norm() {
    let errors = run(2, |group| {
        let calls = Mutex::new(0);
        let panics = move || {
            let mut calls = calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *calls += 1;
            // The first one is forward's.
            assert!(*calls < 2, "the cable was cut");
        };
        let group = Meddling(group, Arc::new(panics));
        let store = VarStore::new(device());
        let config = nn::BatchNormConfig::default();
        let norm = SyncBatchNorm::new(nn::batch_norm1d(store.root(), 8, config), config, &group);
        let input = samples(0, 4).0.set_requires_grad(true);
        // The first rank's panic ends the group, so the other may get it in its forward pass.
        if let Ok(output) = norm.forward(&input, true) {
            output.square().sum(Kind::Float).backward();
            // There is no gradient that could be taken for one.
            assert!(input.grad().isnan().any().int64_value(&[]) != 0);
        }
        group.failure().unwrap().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("the cable was cut")), "{errors:?}");
}

#[test]
fn a_view_that_negates_is_refused() {
    let store = VarStore::new(Device::Cpu);
    let floats = (Kind::Float, Device::Cpu);
    let complex = Tensor::complex(&Tensor::ones([1], floats), &Tensor::ones([1], floats));
    // Its element in memory is 1, and its value -1.
    let negated = complex.conj().imag();
    assert_eq!(negated.double_value(&[0]), -1.0);
    nn::linear(store.root(), 2, 2, Default::default());
    drop(store.root().add("negated", negated, false));
    let error = Ddp::new(&store, &ProcessGroup::alone().unwrap()).unwrap_err().to_string();
    assert!(error.contains("`negated`") && error.contains("negates"), "{error}");
}

#[test]
fn a_variable_of_a_type_that_does_not_travel_is_refused_by_name() {
    let store = VarStore::new(Device::Cpu);
    let floats = (Kind::Float, Device::Cpu);
    nn::linear(store.root(), 2, 2, Default::default());
    let phases = Tensor::complex(&Tensor::ones([1], floats), &Tensor::ones([1], floats));
    drop(store.root().add("phases", phases, false));
    let error = Ddp::new(&store, &ProcessGroup::alone().unwrap()).unwrap_err().to_string();
    assert!(error.contains("`phases`") && error.contains("ComplexFloat"), "{error}");
}

#[test]
fn elements_that_nobody_has_written_are_rank_0_s_too() {
    run(2, |group| {
        let store = VarStore::new(device());
        let linear = nn::linear(store.root(), 2, 2, Default::default());
        let scratch = store.root().add("scratch", Tensor::empty([1 << 12], on_device(Kind::Float)), false);
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let loss = ddp
            .forward(|| Tensor::ones([1, 2], on_device(Kind::Float)).apply(&linear).sum(Kind::Float))
            .unwrap();
        ddp.backward(&loss).unwrap();
        let mine: Vec<u32> = crate::common::elements(&scratch).iter().map(|value| value.to_bits()).collect();
        let all = group.all_gather_object(&mine).unwrap();
        assert!(all.iter().all(|other| *other == mine));
    });
}
