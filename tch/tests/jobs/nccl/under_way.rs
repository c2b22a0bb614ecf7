//! What is queued while calls are under way, and the memory that is freed then: nobody waits for a call, and nothing is used too early.

use std::path::PathBuf;
use std::time::Duration;

use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{Compressed, PostLocalSgd, PowerSgd};
use phalanx::{ProcessGroup, Result};
use phalanx_tch::{Ddp, Optimizer, Rule};
use tch::nn::{Init, VarStore};
use tch::{Kind, Tensor};

use super::own_hooks::Rounded;
use super::{HOLD, NO_WAIT, compressing, ddp, devices, ones, options, zero_grad};
use crate::common::{Mlp, device, elements, samples};

/// What is queued right behind backward, and the memory of gradients that are dropped then, wait for the averages.
pub(super) fn at_once(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let rank = group.rank().index() as f64 + 1.0;
    let mut ddp = ddp(&store, group, options())?;
    for step in 1..6 {
        let loss = ddp.forward(|| {
            let parts = layers
                .iter()
                .enumerate()
                .map(|(index, one)| one.sum(Kind::Float) * (rank * (index + step) as f64));
            parts.reduce(|a, b| a + b).unwrap()
        })?;
        ddp.backward(&loss)?;
        // Queued before anybody has waited for the device.
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        zero_grad(&store);
        // In the memory of the gradients.
        let others: Vec<Tensor> = layers.iter().map(|_| ones(&[64, 64], 7.0)).collect();
        for (index, (seen, other)) in seen.iter().zip(&others).enumerate() {
            let average = 1.5 * (index + step) as f32;
            assert!(elements(seen).iter().all(|one| *one == average * 2.0), "step {step}, {index}");
            assert!(elements(other).iter().all(|one| *one == 7.0), "step {step}, {index}");
        }
    }
    Ok(())
}

/// Backward returns while its calls are held up, one for each bucket, and what is queued then waits for them.
pub(super) fn held(group: &ProcessGroup) -> Result<()> {
    let go = PathBuf::from(std::env::var_os(HOLD).unwrap());
    let release = || std::fs::write(&go, "").unwrap();
    if group.rank().is_main() {
        release();
    }
    let devices = devices(group)?;
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64], Init::Const(0.0))).collect();
    let mut ddp = Ddp::with_nccl(&store, &devices, options())?;
    let rank = group.rank().index() as f64 + 1.0;
    let nccl = devices.device();
    for step in 0..3 {
        // What is held up begins with the calls of this step.
        group.barrier()?;
        if group.rank().is_main() && go.exists() {
            std::fs::remove_file(&go).unwrap();
        }
        group.barrier()?;
        let before = nccl.calls().last().map_or(0, |call| call.sequence.0 + 1);
        let loss = ddp
            .forward(|| layers.iter().map(|one| one.sum(Kind::Float) * rank).reduce(|a, b| a + b).unwrap())?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        assert!(!go.exists(), "somebody has waited");
        let calls: Vec<_> = nccl.calls().into_iter().filter(|call| call.sequence.0 >= before).collect();
        assert_eq!(calls.len(), ddp.bucket_bytes().len(), "step {step}: {calls:?}");
        assert!(calls.iter().all(|call| call.name.contains("all_reduce(avg")), "{calls:?}");
        group.barrier()?;
        if group.rank().is_main() {
            release();
        }
        assert!(layers.iter().all(|one| elements(&one.grad()) == [1.5; 64]), "step {step}");
    }
    Ok(())
}

/// A step that fails when its calls are under way: they go on for a while, and their memory is free.
pub(super) fn failed_step(group: &ProcessGroup) -> Result<()> {
    // Its error ends its group.
    let group = &group.split(Some(0), 0)?.unwrap();
    let go = PathBuf::from(std::env::var_os(HOLD).unwrap());
    let release = || std::fs::write(&go, "").unwrap();
    if group.rank().is_main() {
        release();
    }
    let devices = devices(group)?;
    let store = VarStore::new(device());
    let [used, idle] = ["used", "idle"].map(|name| store.root().var(name, &[64], Init::Const(0.0)));
    let mut options = options();
    options.reducer = ReducerOptions::default().static_graph(true);
    let mut ddp = Ddp::with_nccl(&store, &devices, options)?;
    let loss = ddp.forward(|| used.sum(Kind::Float))?;
    ddp.backward(&loss)?;
    drop(loss);
    assert_eq!(elements(&used.grad()), [1.0; 64]);
    // What is held up begins with the calls of the next step.
    group.barrier()?;
    if group.rank().is_main() {
        std::fs::remove_file(&go).unwrap();
    }
    group.barrier()?;
    // The first rank's error ends the group, so the other one may get it in an earlier call.
    let mut step = || {
        let loss = ddp.forward(|| (&idle * &used).sum(Kind::Float))?;
        ddp.backward_no_sync(&loss)?;
        let loss = ddp.forward(|| used.sum(Kind::Float))?;
        ddp.backward(&loss)
    };
    let error = step().unwrap_err().to_string();
    assert!(error.contains("idle") && error.contains("static_graph promises"), "{error}");
    drop((ddp, used, idle, store));
    // In the memory of buckets and gradients, of whatever size they are.
    let others: Vec<Tensor> = (0..16).flat_map(|_| [64, 128].map(|count| ones(&[count], 7.0))).collect();
    let are_sevens = || others.iter().all(|one| elements(one).iter().all(|element| *element == 7.0));
    assert!(are_sevens());
    // If the calls have not been waited for, they write now.
    release();
    let nccl = devices.device();
    while nccl.is_aborting() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(are_sevens(), "a call has written to memory that was used again");
    Ok(())
}

/// Nothing is read in backward, and nothing is copied to the device, whatever averages.
pub(super) fn no_wait(group: &ProcessGroup) -> Result<()> {
    let nobody = PathBuf::from(std::env::var_os(NO_WAIT).unwrap());
    type Register = fn(&mut Ddp) -> Result<()>;
    let hooks: [Register; 5] = [
        |_| Ok(()),
        |ddp| ddp.register_comm_hook(PostLocalSgd::new(1)),
        |ddp| ddp.register_device_hook(Rounded::default()),
        |ddp| ddp.register_comm_hook(Compressed::f16()),
        |ddp| ddp.register_comm_hook(PowerSgd::new(compressing(1).rank(2))?),
    ];
    for register in hooks {
        let group = &group.split(Some(0), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 32, 3]);
        let mut ddp = ddp(&model.store, group, options())?;
        register(&mut ddp)?;
        let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW)?;
        for step in 0..4 {
            let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
            optimizer.zero_grad()?;
            std::fs::write(&nobody, "").unwrap();
            let averaged = ddp.backward(&loss);
            std::fs::remove_file(&nobody).unwrap();
            averaged?;
            optimizer.step(0.01)?;
        }
        // The stand-in would have said so.
        std::fs::write(&nobody, "").unwrap();
        assert!(model.layers[0].ws.grad().f_to_device(tch::Device::Cpu).is_err());
        std::fs::remove_file(&nobody).unwrap();
    }
    Ok(())
}
