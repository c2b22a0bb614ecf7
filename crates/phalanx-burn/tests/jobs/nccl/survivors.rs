//! A worker of an elastic job dies, and the others go on.

use std::path::Path;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::GradientsParams;
use phalanx::elastic::{self, Context};
use phalanx::launch::{Event, Job, Outcome};
use phalanx::{ProcessGroup, Rank, Result, WorldSize};
use phalanx_burn::TrainState;
use rustix::process::{Signal, getpid, kill_process};

use super::{HOST_IS_DEVICE, Net, ROWS, WHAT, is_real, options, sgd, stand_in};
use crate::common::{distance, floats};
use crate::devices::{FOLDER, STEPS};
use crate::harness::run_job;

/// The step in which a worker of an elastic job dies.
const DIES_AT: u64 = 3;
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(120);

type Training = TrainState<Net, Vec<usize>>;

/// Where the rows of each step began, and the parameters in the end.
type Trained = (Vec<usize>, Vec<Vec<f32>>);

fn first_row(step: u64, rank: Rank, world: WorldSize) -> usize {
    (step as usize * world.count() + rank.index()) * ROWS
}

/// What a worker of an elastic job does: rank 1 dies in the middle of a step, and nothing was committed.
pub(super) fn outlive() -> Result<()> {
    crate::harness::abort_after(LIMIT);
    let cuda = phalanx_nccl::Device::open(0)?;
    let state: Training = TrainState::new(Net::new(), sgd(), Vec::new())?;
    let mut state = state.with_options(options())?.with_nccl_on(&cuda);
    let rank = elastic::run(&mut state, |context: &mut Context<'_, Training>, group: &ProcessGroup| {
        while context.state.steps() < STEPS as u64 {
            let (step, rank) = (context.state.steps(), context.rank());
            let from = first_row(step, rank, context.world_size());
            let loss = context.state.model.forward(|net| net.loss(from, &[]))?;
            if step == DIES_AT {
                dies_behind_the_others(rank, context.world_size());
            }
            let is_alone = context.state.model.world_size() == WorldSize::ONE;
            assert!(is_alone || format!("{:?}", context.state.model).contains("NCCL"));
            let averaged = TrainState::backward(context, &loss)?;
            assert_eq!(averaged.missing.len(), usize::from(step == DIES_AT), "in step {step}");
            context.state.progress.push(from);
            context.state.step(0.05, averaged.value)?;
        }
        Ok::<_, phalanx::Error>(group.rank())
    })?;
    let path = Path::new(&std::env::var(FOLDER).unwrap()).join(format!("{rank}.json"));
    let trained: Trained = (state.progress, floats(&state.model.model().valid()));
    std::fs::write(path, serde_json::to_vec(&trained).unwrap()).unwrap();
    Ok(())
}

/// Ends the process of rank 1 when all others have nothing before them but backward, and have had some time for it.
fn dies_behind_the_others(rank: Rank, world: WorldSize) {
    let folder = std::env::var(FOLDER).unwrap();
    let came = |rank: u32| Path::new(&folder).join(format!("{rank}.came"));
    if rank.get() != 1 {
        std::fs::write(came(rank.get()), "").unwrap();
        return;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while (0..world.get()).any(|other| other != 1 && !came(other).exists()) {
        assert!(Instant::now() < deadline, "the others have not come to the step");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(2));
    kill_process(getpid(), Signal::KILL).unwrap();
}

pub(super) fn survivors_go_on(workers: u32) {
    let folder = tempfile::tempdir().unwrap();
    let libraries = if is_real() { None } else { Some(stand_in::build(folder.path())) };
    let program = std::env::current_exe().unwrap().display().to_string();
    let script = "export STANDIN_CUDA_FIRST=$RANK NCCL_HOSTID=host-of-rank-$RANK; exec \"$0\"";
    let world = WorldSize::new(workers).unwrap();
    let mut job = Job::new("sh", world)
        .arguments(["-c", script, &program])
        .min_workers(WorldSize::new(workers - 1).unwrap())
        .variable(crate::harness::ROLE, "nccl")
        .variable(WHAT, "outlive")
        .variable(FOLDER, folder.path().to_str().unwrap());
    let own = [HOST_IS_DEVICE, ("STANDIN_CUDA_DEVICES", "1"), ("NCCL_SOCKET_IFNAME", "lo")];
    let own = own.into_iter().chain([
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
    ]);
    for (name, value) in own {
        job = job.variable(name, value);
    }
    for (name, path) in libraries.iter().flatten() {
        job = job.variable(name, path.to_str().unwrap());
    }
    let mut said = String::new();
    let report = run_job(&job, LIMIT, |event| {
        if let Event::Line { text, .. } = event {
            said += &format!("{}\n", String::from_utf8_lossy(text));
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{said}");
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let left = left.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let trained: Vec<Trained> =
        left.map(|path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()).collect();
    assert_eq!(trained.len(), workers as usize - 1, "{said}");
    // Plain Burn, with the batches of all who were there.
    let (mut net, mut optimizer) = (Net::new(), sgd());
    for step in 0..STEPS {
        let of_the_dead = (step < DIES_AT as usize).then(|| first_row(step as u64, Rank::new(1), world));
        let all = trained.iter().map(|(rows, _)| rows[step]).chain(of_the_dead);
        let losses: Vec<_> = all.map(|from| net.loss(from, &[])).collect();
        let count = losses.len() as f64;
        let loss = losses.into_iter().reduce(|sum, loss| sum + loss).unwrap() / count;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.05, net, gradients);
    }
    let expected = floats(&net.valid());
    for (_, ours) in &trained {
        assert_eq!(ours, &trained[0].1, "the replicas have drifted apart");
        assert!(distance(ours, &expected) < 1e-4, "{:e} away", distance(ours, &expected));
    }
}
