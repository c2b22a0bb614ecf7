//! Ranks that have unequal numbers of batches.

use std::path::PathBuf;
use std::time::Duration;

use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::launch::Outcome;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{Compressed, PowerSgd};
use phalanx::{ProcessGroup, Rank, ReduceOp, Result};
use phalanx_tch::{Ddp, DeviceMessage, Optimizer, Rule, SyncBatchNorm, TrainState};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, Init, VarStore};
use tch::{Kind, Tensor};

use super::messages::Largest;
use super::own_hooks::Sends;
use super::{HOLD, NCCL, all, begin, compressing, ddp, devices, options};
use crate::common::{Mlp, device, distance, elements, floats, samples};

/// What ranks do that have unequal numbers of batches.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Uneven {
    Plain,
    /// What ranks average counts those that have data.
    ByActive,
    Accumulated,
    /// A layer that only rank 1 uses, and one that nobody does.
    Unused,
    Weighted,
    Half,
    LowRank,
    /// A hook of the program's that changes nothing.
    Own,
    /// One that gathers the gradients of all ranks.
    Gathered,
}

/// A rank's batches: the first has two, the second four, the third none.
fn batches(rank: usize) -> usize {
    [2, 4, 0][rank]
}

pub(super) fn joined(group: &ProcessGroup) -> Result<()> {
    use Uneven::{Accumulated, ByActive, Gathered, Half, LowRank, Own, Plain, Unused, Weighted};
    for case in [Plain, ByActive, Accumulated, Unused, Weighted, Half, LowRank, Own, Gathered] {
        let (host, nccl) = (train_uneven(case, group, false)?, train_uneven(case, group, true)?);
        for (ours, expected) in nccl.iter().zip(&host) {
            let apart = distance(ours, expected);
            let near = if case == Half { 1e-3 } else { 1e-5 };
            assert!(apart < near, "{case:?}: {apart:e}");
        }
    }
    Ok(())
}

/// The parameters after a `join`, and after one step more together.
fn train_uneven(case: Uneven, group: &ProcessGroup, over_nccl: bool) -> Result<[Vec<Vec<f32>>; 2]> {
    let group = &group.split(Some(0), 0)?.unwrap();
    let rank = group.rank().index();
    let model = Mlp::new(&[8, 32, 3]);
    let extra = ["only", "none"].map(|name| model.store.root().var(name, &[3], Init::Const(0.0)));
    begin(&model.store);
    let mut options = options();
    if case == Uneven::Unused {
        options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005).find_unused_parameters(true);
    }
    let mut ddp = match over_nccl {
        true => Ddp::with_nccl(&model.store, &devices(group)?, options)?,
        false => Ddp::with_options(&model.store, group, options)?,
    };
    match case {
        Uneven::Half => ddp.register_comm_hook(Compressed::f16())?,
        Uneven::LowRank => ddp.register_comm_hook(PowerSgd::new(compressing(1))?)?,
        Uneven::Own if over_nccl => {
            ddp.register_device_hook(Sends(|whole| DeviceMessage::all_reduce(whole * 1.0, ReduceOp::Avg)))?
        }
        Uneven::Gathered if over_nccl => ddp.register_device_hook(Largest { of_each: None })?,
        _ => {}
    }
    // Adam makes large steps of what is rounding alone, of which products of two vectors have much.
    let rule = match case {
        Uneven::LowRank | Uneven::Gathered => Rule::sgd(0.9),
        _ => Rule::ADAMW,
    };
    let mut optimizer = Optimizer::new(&model.store, rule)?;
    let step = |ddp: &mut Ddp, optimizer: &mut Optimizer, step: usize| {
        let from = step * 40 + rank * 10;
        let loss = || {
            let loss = model.loss(samples(from, from + 4 + step % 3));
            match case {
                Uneven::Unused if rank == 1 => loss + extra[0].sum(Kind::Float),
                Uneven::Unused => loss,
                _ => loss + extra[0].sum(Kind::Float) + extra[1].sum(Kind::Float) * 0.5,
            }
        };
        optimizer.zero_grad()?;
        if case == Uneven::Accumulated {
            let loss = ddp.forward(loss)?;
            ddp.backward_no_sync(&loss)?;
        }
        let loss = ddp.forward(loss)?;
        match case {
            Uneven::Weighted => ddp.backward_weighted(&loss, (4 + step % 3) as f64)?,
            _ => ddp.backward(&loss)?,
        }
        if case == Uneven::Unused {
            assert!(!extra[1].grad().defined(), "nobody has used it");
        }
        optimizer.step(0.02)
    };
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = case != Uneven::ByActive;
    ddp.join(&mut optimizer, join, |ddp, optimizer| {
        (0..batches(rank)).try_for_each(|index| step(ddp, optimizer, index))
    })?;
    assert!(ddp.replicas_identical()?);
    let joined = floats(&model.store);
    // With other states of the optimizer replicas would drift apart.
    step(&mut ddp, &mut optimizer, 9)?;
    assert!(ddp.replicas_identical()?);
    Ok([joined, floats(&model.store)])
}

/// Sums of statistics go through the host's group, and gradients over NCCL; both are announced.
pub(super) fn joined_norm(group: &ProcessGroup) -> Result<()> {
    let train = |over_nccl: bool| {
        let group = &group.split(Some(0), 0)?.unwrap();
        let rank = group.rank().index();
        let joined = JoinGroup::new(ProcessGroup::alone()?);
        let store = VarStore::new(device());
        let config = nn::LinearConfig {
            ws_init: Init::Const(0.1),
            bs_init: Some(Init::Const(0.2)),
            ..Default::default()
        };
        let first = nn::linear(store.root() / "first", 8, 6, config);
        let of_norm = nn::BatchNormConfig { ws_init: Init::Const(0.7), ..Default::default() };
        let norm = nn::batch_norm1d(store.root() / "norm", 6, of_norm);
        let norm = SyncBatchNorm::new(norm, of_norm, &joined);
        tch::no_grad(|| {
            let wave = Tensor::arange(48, (Kind::Float, device())).sin().reshape([6, 8]);
            first.ws.shallow_clone().copy_(&wave);
        });
        let optimizer = Optimizer::new(&store, Rule::ADAMW)?;
        let state = TrainState::new(&store, optimizer, ())?.sharing(&joined)?;
        let state = if over_nccl { state.with_nccl(&devices(group)?)? } else { state.with_group(group)? };
        let TrainState { mut ddp, mut optimizer, .. } = state.with_options(options())?;
        assert_eq!(over_nccl, format!("{ddp:?}").contains("NCCL"));
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..batches(rank) {
                let (x, _) = samples(step * 40 + rank * 10, step * 40 + rank * 10 + 4);
                let loss = ddp.forward(|| norm.forward(&x.apply(&first), true))??;
                optimizer.zero_grad()?;
                ddp.backward(&(&loss * loss.cos()).sum(Kind::Float))?;
                optimizer.step(0.02)?;
            }
            Ok(())
        })?;
        assert!(ddp.replicas_identical()? && ddp.buffers_identical()?);
        Ok(floats(&store))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    assert!(distance(&nccl, &host) < 1e-4, "{:e}", distance(&nccl, &host));
    Ok(())
}

/// Rank 0 is done when rank 2 dies; the others learn of it, whoever makes whose calls.
pub(super) fn dies(group: &ProcessGroup, is_low_rank: bool) -> Result<()> {
    let rank = group.rank().index();
    let model = Mlp::new(&[8, 32, 3]);
    let mut ddp = ddp(&model.store, group, options())?;
    if is_low_rank {
        ddp.register_comm_hook(PowerSgd::new(compressing(0))?)?;
    }
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.0))?;
    ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
        for step in 0..[1, 6, 6][rank] {
            if (rank, step) == (2, 3) {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
            optimizer.zero_grad()?;
            ddp.backward(&loss)?;
        }
        Ok(())
    })?;
    panic!("it went well");
}

pub(super) fn dies_in_a_join(case: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut stderr = String::new();
    let job = crate::job(&format!("nccl {case}"), 3, folder.path())
        .variable(NCCL, "1")
        .grace(Duration::from_secs(30));
    let report = crate::run(&job, |event| crate::equivalence::note(event, &mut stderr));
    let is_named = matches!(&report.outcome, Outcome::Failed(failure) if failure.rank == Rank::new(2));
    assert!(is_named && !stderr.contains("it went well"), "{:?}: {stderr}", report.outcome);
    crate::equivalence::assert_each_says(2, &stderr, &["rank 2"]);
}

/// Rank 0 has one batch and makes the calls of rank 1's second one, while they are held up.
pub(super) fn held_join(group: &ProcessGroup) -> Result<()> {
    let go = PathBuf::from(std::env::var_os(HOLD).unwrap());
    let release = || std::fs::write(&go, "").unwrap();
    let rank = group.rank().index();
    if rank == 0 {
        release();
    }
    let devices = devices(group)?;
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..12).map(|index| store.root().var(&format!("l{index}"), &[64], Init::Const(0.0))).collect();
    let mut ddp = Ddp::with_nccl(&store, &devices, options())?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    let mut seen = Vec::new();
    ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
        for step in 0..=rank {
            let loss = ddp.forward(|| all(&layers) * (rank as f64 + 1.0))?;
            optimizer.zero_grad()?;
            if step == 1 {
                // The only one that has data: nobody removes it meanwhile.
                std::fs::remove_file(&go).unwrap();
            }
            ddp.backward(&loss)?;
            if step == 1 {
                assert!(!go.exists(), "somebody has waited");
                release();
            }
            seen.push((step, layers.iter().map(|one| one.grad() * 1.0).collect::<Vec<_>>()));
        }
        Ok(())
    })?;
    for (step, seen) in seen {
        let average = if step == 0 { 1.5 } else { 1.0 };
        assert!(seen.iter().all(|one| elements(one) == [average; 64]), "step {step}");
    }
    Ok(())
}

/// Rank 0 has no batch: its zeros are there when rank 1 averages.
pub(super) fn late_join(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..2).map(|index| store.root().var(&format!("l{index}"), &[64, 64], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
    ddp.join(&mut optimizer, JoinOptions::default(), |ddp, _| {
        for step in 0..3 * group.rank().index() {
            let loss = ddp.forward(|| all(&layers) * (step as f64 + 1.0))?;
            // Gradients stay in their places, so that the calls begin at once.
            layers.iter().for_each(|one| one.shallow_clone().zero_grad());
            ddp.backward(&loss)?;
            let average = (step as f32 + 1.0) / 2.0;
            assert!(layers.iter().all(|one| elements(&one.grad()) == [average; 64 * 64]), "step {step}");
        }
        Ok(())
    })
}
