//! What is refused by name.

use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::{CommHook, Compressed, GradBucket, HookState, Pending, PowerSgd};
use phalanx::{Communicator, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_tch::{Ddp, Optimizer, Rule, TrainState};
use tch::Kind;
use tch::nn::{Init, VarStore};

use super::{before_an_error, compressing, ddp, devices, options};
use crate::common::device;

pub(super) fn refused(group: &ProcessGroup) -> Result<()> {
    type Call = fn(&mut Ddp) -> Result<()>;
    let cases: [(&str, Call); 2] = [
        ("register_comm_hook(of the test): NCCL averages", |ddp| ddp.register_comm_hook(OfHost)),
        ("warm_start(false) where NCCL averages", |ddp| {
            ddp.register_comm_hook(PowerSgd::new(compressing(0).warm_start(false))?)
        }),
    ];
    for (words, call) in cases {
        let store = VarStore::new(device());
        drop(store.root().var("one", &[3], Init::Const(1.0)));
        // A refusal ends its group.
        let part = group.split(Some(0), 0)?.unwrap();
        let mut ddp = ddp(&store, &part, options())?;
        before_an_error(&part);
        let called = call(&mut ddp);
        match group.world_size().get() {
            1 => called?,
            _ => {
                let error = called.unwrap_err().to_string();
                assert!(error.contains(words), "{words}: {error}");
            }
        }
    }
    let part = group.split(Some(0), 0)?.unwrap();
    foreign_join(&part)?;
    if group.world_size().get() == 1 {
        return Ok(());
    }
    let part = group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(tch::Device::Cpu);
    drop(store.root().var("one", &[3], Init::Const(1.0)));
    let error = ddp(&store, &part, options()).unwrap_err().to_string();
    assert!(error.contains("`one` is on Cpu") && error.contains("Device::Cuda(0)"), "{error}");
    // Some average by NCCL and some do not.
    let part = group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(device());
    drop(store.root().var("one", &[3], Init::Const(1.0)));
    let error = match group.rank().is_main() {
        true => ddp(&store, &part, options()).unwrap_err(),
        false => {
            let _communicator = devices(&part)?;
            Ddp::with_options(&store, &part, options()).unwrap_err()
        }
    };
    assert!(error.to_string().contains("averaged by is"), "{error}");
    group.barrier()
}

/// In a `join` that the `Ddp` has not begun ranks that are done would not make its calls.
fn foreign_join(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let joined = JoinGroup::new(ProcessGroup::alone()?);
    let optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let state = TrainState::new(&store, optimizer, ())?.sharing(&joined)?;
    let mut state = state.with_nccl(&devices(group)?)?;
    before_an_error(group);
    let called = joined.join(JoinOptions::default(), || {
        let loss = state.ddp.forward(|| one.sum(Kind::Float))?;
        state.ddp.backward(&loss)
    });
    if group.world_size().get() == 1 {
        return called.map(drop);
    }
    let error = called.unwrap_err().to_string();
    assert!(error.contains("a join that this Ddp has not begun"), "{error}");
    Ok(())
}

/// A hook for the host's memory.
struct OfHost;

impl CommHook for OfHost {
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

pub(super) fn other_models(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    drop(store.root().var("one", &[8, 8], Init::Const(1.0)));
    let mut ddp = ddp(&store, group, options())?;
    ddp.register_comm_hook(Compressed::f16())?;
    let error = ddp.register_comm_hook(PowerSgd::new(compressing(0))?).unwrap_err().to_string();
    let names = ["host-of-rank-0", "host-of-rank-1"];
    assert!(names.iter().all(|name| error.contains(name)), "{error}");
    Ok(())
}
