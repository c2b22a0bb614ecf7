//! Ranks that train by themselves, or average within a smaller group, and groups that fail.

use std::time::Duration;

use phalanx::join::JoinOptions;
use phalanx::reducer::hooks::{AllReduce, PostLocalSgd};
use phalanx::{GroupHandle, ProcessGroup, Result};
use phalanx_nccl::CallState;
use phalanx_tch::{Ddp, DdpOptions, Optimizer, PeriodicModelAverager, Rule, TrainState};
use tch::Kind;
use tch::nn::{Init, VarStore};

use super::{before_an_error, begin, devices, options, train_step};
use crate::common::{Mlp, device, distance, elements, floats, samples};

/// Ranks that train by themselves after the first steps, and then average gradients again.
pub(super) fn local(group: &ProcessGroup) -> Result<()> {
    let train = |over_nccl: bool| -> Result<(Vec<Vec<f32>>, u64)> {
        let group = &group.split(Some(0), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 3]);
        begin(&model.store);
        let mut ddp = match over_nccl {
            true => Ddp::with_nccl(&model.store, &devices(group)?, options())?,
            false => Ddp::with_options(&model.store, group, options())?,
        };
        ddp.register_comm_hook(PostLocalSgd::new(2))?;
        let mut averager = PeriodicModelAverager::new(2)?.warmup_steps(2);
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
        for step in 0..5 {
            train_step(&model, &mut ddp, &mut optimizer, step)?;
            let is_averaged = averager.step(&mut ddp)?;
            assert_eq!(ddp.replicas_identical()?, step < 2 || is_averaged, "step {step}");
        }
        let sent = ddp.communicated_bytes();
        assert_eq!(sent, 2 * floats(&model.store).iter().map(|one| 4 * one.len() as u64).sum::<u64>());
        ddp.register_comm_hook(AllReduce)?;
        train_step(&model, &mut ddp, &mut optimizer, 5)?;
        assert_eq!(ddp.communicated_bytes(), sent / 2 * 3);
        Ok((floats(&model.store), ddp.communicated_bytes()))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    assert!(distance(&nccl.0, &host.0) < 1e-4, "{:e}", distance(&nccl.0, &host.0));
    assert_eq!(nccl.1, host.1, "bytes");
    [false, true].into_iter().try_for_each(|over_nccl| local_in_join(group, over_nccl))
}

/// Gradients that are each rank's own are divided by nothing, also where averages are divided by the number of ranks that have data.
fn local_in_join(group: &ProcessGroup, over_nccl: bool) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let mut ddp = match over_nccl {
        true => Ddp::with_nccl(&store, &devices(group)?, options())?,
        false => Ddp::with_options(&store, group, options())?,
    };
    ddp.register_comm_hook(PostLocalSgd::new(0))?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = false;
    ddp.join(&mut optimizer, join, |ddp, optimizer| {
        for step in 0..=group.rank().index() {
            optimizer.zero_grad()?;
            let loss = ddp.forward(|| one.sum(Kind::Float) * 3.0)?;
            ddp.backward(&loss)?;
            assert_eq!(elements(&one.grad()), [3.0; 3], "step {step}, over NCCL: {over_nccl}");
        }
        Ok(())
    })
}

/// The two first ranks average among themselves after the first steps, and a third one by itself; and then all again.
pub(super) fn subgroup(group: &ProcessGroup) -> Result<()> {
    let train = |over_nccl: bool| -> Result<Vec<Vec<f32>>> {
        let group = &group.split(Some(0), 0)?.unwrap();
        let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
        let model = Mlp::new(&[8, 32, 3]);
        begin(&model.store);
        let mut ddp = match over_nccl {
            true => Ddp::with_nccl(&model.store, &devices(group)?, options())?,
            false => Ddp::with_options(&model.store, group, options())?,
        };
        ddp.register_comm_hook(PostLocalSgd::new(2).subgroup(smaller.clone()))?;
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
        for step in 0..5 {
            train_step(&model, &mut ddp, &mut optimizer, step)?;
            let is_one = step < 2 || group.world_size() == smaller.world_size();
            assert_eq!(ddp.replicas_identical()?, is_one, "step {step}, over NCCL: {over_nccl}");
            let here = smaller.all_gather_object(&floats(&model.store))?;
            assert!(here.iter().all(|one| *one == here[0]), "step {step}, over NCCL: {over_nccl}");
        }
        ddp.register_comm_hook(AllReduce)?;
        train_step(&model, &mut ddp, &mut optimizer, 5)?;
        Ok(floats(&model.store))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    assert!(distance(&nccl, &host) < 1e-4, "{:e}", distance(&nccl, &host));
    [false, true].into_iter().try_for_each(|over_nccl| subgroup_in_join(group, over_nccl))
}

/// Nobody would answer in the smaller group for a rank that is done.
fn subgroup_in_join(group: &ProcessGroup, over_nccl: bool) -> Result<()> {
    // The error ends its group.
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let store = VarStore::new(device());
    let one = store.root().var("one", &[3], Init::Const(1.0));
    let mut ddp = match over_nccl {
        true => Ddp::with_nccl(&store, &devices(group)?, options())?,
        false => Ddp::with_options(&store, group, options())?,
    };
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let joined = ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
        for _ in 0..=group.rank().index() {
            optimizer.zero_grad()?;
            let loss = ddp.forward(|| one.sum(Kind::Float) * 3.0)?;
            ddp.backward(&loss)?;
        }
        Ok(())
    });
    let error = joined.unwrap_err().to_string();
    assert!(error.contains("ranks have data"), "over NCCL: {over_nccl}: {error}");
    Ok(())
}

/// What ends the smaller group is the error of a step of its ranks, and of every call of the others.
pub(super) fn subgroup_fails(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, options())?;
    ddp.register_comm_hook(PostLocalSgd::new(1).subgroup(smaller.clone()))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    (0..3).try_for_each(|step| train_step(&model, &mut ddp, &mut optimizer, step))?;
    before_an_error(group);
    let has_failed = |error: phalanx::Error| {
        let error = error.to_string();
        assert!(error.contains("the fault of the test"), "{error}");
    };
    if smaller.world_size().get() == 2 {
        if smaller.rank().is_main() {
            smaller.abort(phalanx::Error::aborted("the fault of the test"));
        }
        // Until both ranks know.
        has_failed(smaller.barrier().unwrap_err());
        has_failed(train_step(&model, &mut ddp, &mut optimizer, 3).unwrap_err());
    }
    has_failed(group.barrier().unwrap_err());
    Ok(())
}

/// The second call of the smaller group of ranks 0 and 1, which is that of the only bucket, fails when backward has returned. Rank 2 is in another one.
pub(super) fn subgroup_fails_late(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, DdpOptions::default())?;
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    assert_eq!(ddp.bucket_bytes().len(), 1);
    before_an_error(group);
    let trained = train_step(&model, &mut ddp, &mut optimizer, 0);
    let error = trained.and_then(|()| ddp.average_parameters()).unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The same call fails, and the ranks average within another smaller group from then on.
pub(super) fn subgroup_left(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = || group.split(Some(group.rank().get() / 2), 0);
    let (first, second) = (smaller()?.unwrap(), smaller()?.unwrap());
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, DdpOptions::default())?;
    let handle = GroupHandle::new(first);
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(handle.clone()))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    before_an_error(group);
    let trained = train_step(&model, &mut ddp, &mut optimizer, 0).and_then(|()| {
        handle.rebind(second);
        train_step(&model, &mut ddp, &mut optimizer, 1)
    });
    // Rank 2 hears of it in a call of all ranks.
    let trained = if group.rank().index() == 2 { trained.and_then(|()| group.barrier()) } else { trained };
    let error = trained.unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The same call fails, and the model is evaluated.
pub(super) fn subgroup_evaluated(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = Ddp::with_nccl(&model.store, &devices(group)?, DdpOptions::default())?;
    ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    before_an_error(group);
    let evaluated = train_step(&model, &mut ddp, &mut optimizer, 0)
        .and_then(|()| ddp.evaluate(|| model.loss(samples(0, 4)).double_value(&[])));
    // Rank 2, whose calls have not failed, hears of it in a call of all ranks.
    let evaluated = evaluated.map(drop);
    let evaluated =
        if group.rank().index() == 2 { evaluated.and_then(|()| group.barrier()) } else { evaluated };
    let error = evaluated.unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The same call fails, and the state goes on over the host's memory.
pub(super) fn subgroup_moved(group: &ProcessGroup) -> Result<()> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let smaller = group.split(Some(group.rank().get() / 2), 0)?.unwrap();
    let model = Mlp::new(&[8, 32, 3]);
    let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    let mut state = TrainState::new(&model.store, optimizer, ())?.with_nccl(&devices(group)?)?;
    state.ddp.register_comm_hook(PostLocalSgd::new(0).subgroup(smaller))?;
    before_an_error(group);
    let trained = state.ddp.forward(|| model.loss(samples(0, 4))).and_then(|loss| {
        state.ddp.backward(&loss)?;
        state.step(0.01)
    });
    let moved = trained.and_then(|()| state.with_group(group)).map(drop);
    let error = moved.unwrap_err().to_string();
    assert!(error.contains("the stand-in was told to fail"), "{error}");
    Ok(())
}

/// The group fails between two steps, and the state goes on in another one.
pub(super) fn group_fails_between(group: &ProcessGroup) -> Result<()> {
    let first = group.split(Some(0), 0)?.unwrap();
    let on_devices = devices(&first)?;
    let model = Mlp::new(&[8, 32, 3]);
    let optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    let mut state = TrainState::new(&model.store, optimizer, ())?.with_nccl(&on_devices)?;
    let step = |state: &mut TrainState| {
        let loss = state.ddp.forward(|| model.loss(samples(0, 4)))?;
        state.optimizer.zero_grad()?;
        state.ddp.backward(&loss)?;
        state.step(0.01)
    };
    step(&mut state)?;
    assert!(state.ddp.replicas_identical()?);
    let is_done = |state: CallState| matches!(state, CallState::Done(_));
    while !on_devices.device().calls().iter().all(|call| is_done(call.state)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    group.barrier()?;
    if group.rank().is_main() {
        first.abort(phalanx::Error::aborted("the fault of the test"));
    }
    let error = first.barrier().unwrap_err().to_string();
    assert!(error.contains("the fault of the test"), "{error}");
    let loss = state.ddp.evaluate(|| model.loss(samples(0, 4)).double_value(&[]))?;
    assert!(loss.is_finite());
    let mut state = state.with_group(group)?;
    step(&mut state)?;
    assert!(state.ddp.replicas_identical()?);
    Ok(())
}
