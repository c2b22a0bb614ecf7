//! Ranks that have unequal numbers of batches.

use burn::module::{Module, Param};
use burn::nn::BatchNormConfig;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::hooks::{Compressed, PowerSgd};
use phalanx::{ProcessGroup, ReduceOp, Result};
use phalanx_burn::{Ddp, DeviceMessage, SyncBatchNorm, TrainState};
use phalanx_nccl::DeviceGroup;
use rustix::process::{Signal, getpid, kill_process};

use super::own_hooks::{Largest, Sends};
use super::{CASE, HOST_IS_DEVICE, IDLE, Net, ROWS, WIDTH, begin, compressing, ddp, job_of, options, sgd};
use crate::common::{Waves, device, distance, floats, samples};

/// A rank's batches in a join: the first has two, the second four, the third none.
const BATCHES: [usize; 3] = [2, 4, 0];
/// The step after it, which all ranks make.
const TOGETHER: usize = 9;

/// Where the rows of a rank's passes begin.
pub(super) fn rows_in_join(case: &str, step: usize, rank: usize) -> Vec<usize> {
    let count = if case == "accumulated" { 2 } else { 1 };
    (0..count).map(|pass| ((step * BATCHES.len() + rank) * 2 + pass) * ROWS).collect()
}

/// The layers that a rank leaves out.
fn left_out(case: &str, rank: usize) -> Vec<usize> {
    if case == "unused" { vec![IDLE, rank] } else { Vec::new() }
}

fn weight_in_join(case: &str, step: usize, rank: usize) -> f64 {
    if case == "weighted" { ((step + 2 * rank) % 3 + 1) as f64 } else { 1.0 }
}

/// What ranks train with unequal numbers of batches over NCCL, and through the host, is what one process trains with all their batches.
pub(super) fn join(group: &ProcessGroup, cuda: &phalanx_nccl::Device, case: &str) -> Result<()> {
    let (nccl, host) = (train_in_join(group, Some(cuda), case)?, train_in_join(group, None, case)?);
    let expected = match case {
        "low rank" => host.clone(), // It approximates.
        _ => reference_of_join(case, group.world_size().count()),
    };
    let before = floats(&Net::new().valid());
    assert!(distance(&expected[0], &before) > 0.01, "the reference has not moved");
    // bf16 has 8 significant bits.
    let most = if case == "compressed" { 1e-2 } else { 1e-4 };
    for (way, trained) in [("NCCL", nccl), ("the host", host)] {
        for (when, (ours, expected)) in
            ["after the join", "a step later"].iter().zip(trained.iter().zip(&expected))
        {
            let distance = distance(ours, expected);
            assert!(distance < most, "{case}, {way}, {when}: {distance:e}");
        }
    }
    Ok(())
}

/// The parameters after a join, and after one step more together; by NCCL on `cuda`, or through the host.
fn train_in_join(
    group: &ProcessGroup,
    cuda: Option<&phalanx_nccl::Device>,
    case: &str,
) -> Result<[Vec<Vec<f32>>; 2]> {
    let group = group.split(Some(0), 0)?.unwrap();
    let rank = group.rank().index();
    let mut options = options();
    if case == "unused" {
        options.reducer = options.reducer.find_unused_parameters(true);
    }
    let mut ddp = ddp(group, cuda, options)?;
    match case {
        "compressed" => ddp.register_comm_hook(Compressed::bf16())?,
        "low rank" => ddp.register_comm_hook(PowerSgd::new(compressing(1))?)?,
        "own" if cuda.is_some() => {
            let send = |whole| DeviceMessage::all_reduce(whole, ReduceOp::Avg);
            ddp.register_device_hook(Sends(send, |averages| averages))?;
        }
        "largest" if cuda.is_some() => ddp.register_device_hook(Largest)?,
        _ => {}
    }
    let mut optimizer = sgd();
    let mut join = JoinOptions::default();
    join.divide_by_initial_world_size = case != "by active";
    ddp.join(&mut optimizer, join, |ddp, optimizer| {
        (0..BATCHES[rank]).try_for_each(|step| step_of_join(case, ddp, optimizer, step))
    })?;
    assert!(ddp.replicas_identical()?);
    let joined = floats(&ddp.model().valid());
    // With other moments replicas would drift apart.
    step_of_join(case, &mut ddp, &mut optimizer, TOGETHER)?;
    assert!(ddp.replicas_identical()?);
    Ok([joined, floats(&ddp.model().valid())])
}

pub(super) fn step_of_join(
    case: &str,
    ddp: &mut Ddp<Net>,
    optimizer: &mut ModuleOptimizer,
    step: usize,
) -> Result<()> {
    let rank = ddp.rank().index();
    let (rows, without) = (rows_in_join(case, step, rank), left_out(case, rank));
    let share = 1.0 / rows.len() as f64;
    let (last, firsts) = rows.split_last().unwrap();
    for from in firsts {
        let loss = ddp.forward(|net| net.loss(*from, &without))? * share;
        ddp.backward_no_sync(&loss)?;
    }
    let loss = ddp.forward(|net| net.loss(*last, &without))? * share;
    let gradients = match case {
        "weighted" => ddp.backward_weighted(&loss, weight_in_join(case, step, rank))?,
        _ => ddp.backward(&loss)?,
    };
    ddp.step(optimizer, 0.05, gradients)
}

/// Plain Burn, with the batches of all ranks that have one: after the join, and after one step more.
fn reference_of_join(case: &str, ranks: usize) -> [Vec<Vec<f32>>; 2] {
    let (mut net, mut optimizer) = (Net::new(), sgd());
    let mut joined = None;
    let longest = BATCHES[..ranks].iter().copied().max().unwrap();
    for step in (0..longest).chain([TOGETHER]) {
        if step == TOGETHER {
            joined = Some(floats(&net.valid()));
        }
        let has_data = |rank: &usize| step == TOGETHER || step < BATCHES[*rank];
        let active: Vec<usize> = (0..ranks).filter(has_data).collect();
        let divisor: f64 = match case {
            "weighted" => active.iter().map(|rank| weight_in_join(case, step, *rank)).sum(),
            "by active" => active.len() as f64,
            _ => ranks as f64,
        };
        let losses = active.iter().flat_map(|rank| {
            let (rows, without) = (rows_in_join(case, step, *rank), left_out(case, *rank));
            let factor = weight_in_join(case, step, *rank) / rows.len() as f64;
            let net = &net;
            rows.into_iter().map(move |from| net.loss(from, &without) * factor)
        });
        let loss = losses.reduce(|sum, loss| sum + loss).unwrap() / divisor;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    [joined.unwrap(), floats(&net.valid())]
}

pub(super) fn joined(case: &'static str, ranks: usize) {
    job_of(ranks, "join", &[(CASE, case), HOST_IS_DEVICE]);
}

#[derive(Module, Debug)]
struct Normed {
    first: Param<Tensor<1>>,
    norm: SyncBatchNorm,
}

/// Statistics go through the host's group, and gradients over NCCL; both are announced.
pub(super) fn join_norm(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let train = |over_nccl: bool| {
        let group = group.split(Some(0), 0)?.unwrap();
        let rank = group.rank().index();
        let joined = JoinGroup::new(ProcessGroup::alone()?);
        let norm = SyncBatchNorm::new(BatchNormConfig::new(WIDTH).init(&device()), &joined);
        let net = Normed { first: Param::from_tensor(Tensor::zeros([WIDTH], &device())), norm };
        let state = TrainState::new(net.map(&mut Waves::default()), sgd(), ())?.sharing(&joined)?;
        let state = match over_nccl {
            true => state.with_nccl(&DeviceGroup::new(group, cuda)?)?,
            false => state.with_group(&group)?,
        };
        let state = state.with_options(options())?;
        let (mut ddp, mut optimizer) = (state.model, state.optimizer);
        assert_eq!(over_nccl, format!("{ddp:?}").contains("NCCL"));
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..BATCHES[rank] {
                let from = rows_in_join("plain", step, rank)[0];
                let loss = ddp.forward(|net| {
                    let (x, _) = samples(from, from + ROWS);
                    let out = net.norm.forward((x.clone() * net.first.val().unsqueeze()).tanh());
                    (out - x).powi_scalar(2).mean()
                })?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, 0.05, gradients)?;
            }
            Ok(())
        })?;
        assert!(ddp.replicas_identical()? && ddp.buffers_identical()?);
        Ok::<_, phalanx::Error>(floats(&ddp.model().valid()))
    };
    let (host, nccl) = (train(false)?, train(true)?);
    let distance = distance(&nccl, &host);
    assert!(distance < 1e-4, "{distance:e}");
    Ok(())
}

/// The rank that dies, and when: rank 0 is done by then.
const DIES_IN_JOIN: (usize, usize) = (2, 3);

/// The others learn of it, whoever makes whose calls.
pub(super) fn die_in_a_join(group: &ProcessGroup, cuda: &phalanx_nccl::Device) -> Result<()> {
    let rank = group.rank().index();
    let mut ddp = Ddp::with_nccl(Net::new(), &DeviceGroup::new(group.clone(), cuda)?, options())?;
    let joined = ddp.join(&mut sgd(), JoinOptions::default(), |ddp, optimizer| {
        for step in 0..[1, 6, 6][rank] {
            if (rank, step) == DIES_IN_JOIN {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            step_of_join("plain", ddp, optimizer, step)?;
        }
        Ok(())
    });
    let error = joined.unwrap_err().to_string();
    assert!(error.contains("rank 2"), "{error}");
    Ok(())
}

pub(super) fn dies_in_a_join() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, mut ranks) = begin(folder.path(), 3, "dies", &[HOST_IS_DEVICE]);
    for (rank, worker) in ranks.iter_mut().enumerate() {
        let (finished, text) = worker.outcome("a rank in a join");
        assert_eq!(finished, rank != DIES_IN_JOIN.0, "rank {rank}: {text}");
    }
}
