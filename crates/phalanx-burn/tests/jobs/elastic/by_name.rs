//! Gradients averaged by name: a worker dies behind a commit, and all end as one process does that has had no failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Tensor;
use phalanx::checkpoint::Checkpoints;
use phalanx::launch::{Event, Outcome, Stream};
use phalanx::{ProcessGroup, Result, WorldSize};
use phalanx_burn::horovod::{DistributedOptions, ModelState};
use phalanx_horovod::Horovod;
use phalanx_horovod::elastic::{self, ObjectState, State};

use super::{alike, job, run};
use crate::common::{Mlp, Waves, device, distance, floats, samples};

/// Set for a worker of this test.
pub const BY_NAME: &str = "PHALANX_TEST_BY_NAME";
const STEPS: u64 = 60;
/// The step at which a worker dies, three after a commit.
const DEATH: u64 = 23;
/// Where the workers wait for the replacement: a step with a commit.
const HOLD: u64 = 55;
const LEARNING_RATE: f64 = 0.01;

type Training = ModelState<Network, u64>;

/// With running statistics, of which every rank has others until a commit.
#[derive(Module, Debug)]
struct Network {
    mlp: Mlp,
    norm: BatchNorm,
}

impl Network {
    fn new() -> Self {
        let network = Self { mlp: Mlp::new(&[8, 16, 3]), norm: BatchNormConfig::new(8).init(&device()) };
        network.map(&mut Waves::default())
    }

    /// All ranks have the same data, so that the mean gradient is the same for any number of them. What they look at beside it, and
    /// what changes nothing but statistics, is each rank's own.
    fn loss(&self, own: usize) -> Tensor<1> {
        let (beside, _) = samples(7 * own, 7 * own + 7);
        let beside = self.norm.forward(beside).detach().sum() * 0.0;
        self.mlp.loss(samples(0, 16)) + beside
    }
}

fn training() -> Result<Training> {
    ModelState::new(Network::new(), AdamWConfig::new().init(), 0)
}

/// What a worker does.
pub fn work(folder: &Path) -> Result<()> {
    let mut state = ObjectState::new(training()?);
    elastic::run(&mut state, |state, hvd| train(state, hvd, folder))?;
    let checkpoints =
        Checkpoints::open(folder.join(format!("end/{}", std::process::id())), &ProcessGroup::alone()?)?;
    let state = state.into_inner();
    checkpoints.save(state.progress, |snapshot| state.save_to(snapshot))?;
    checkpoints.finish()
}

fn train(state: &mut State<'_, '_, Training>, hvd: &Horovod, folder: &Path) -> Result<()> {
    println!("begins with {} at {}", hvd.size(), state.progress);
    let mut optimizer = state.distributed_optimizer(hvd, DistributedOptions::default())?;
    while state.progress < STEPS {
        // However late the replacement is: commits that change nothing let it in.
        while state.progress == HOLD && hvd.size() < 3 {
            std::thread::sleep(Duration::from_millis(5));
            state.commit()?;
        }
        let own = 1 + hvd.rank().index();
        let loss = optimizer.forward(state.model(), |network| network.loss(own));
        optimizer.backward(&loss)?;
        state.step(&mut optimizer, LEARNING_RATE)?;
        state.progress += 1;
        if state.progress == DEATH
            && std::env::var("LOCAL_RANK").is_ok_and(|place| place == "1")
            && fs::File::create_new(folder.join("dead")).is_ok()
        {
            std::process::abort();
        }
        if state.progress.is_multiple_of(5) {
            state.commit()?;
        }
    }
    Ok(())
}

/// The same steps without averages, in this process.
fn expected() -> Mlp {
    let (mut network, mut optimizer) = (Network::new(), AdamWConfig::new().init());
    for _ in 0..STEPS {
        let gradients = GradientsParams::from_grads(network.loss(1).backward(), &network);
        network = optimizer.step(LEARNING_RATE, network, gradients);
    }
    network.mlp
}

pub fn model_and_optimizer_outlive_a_worker() {
    let folder = tempfile::tempdir().unwrap();
    let job =
        job(3, folder.path()).variable(BY_NAME, "1").min_workers(WorldSize::new(2).unwrap()).max_restarts(1);
    let (mut lines, mut errors) = (Vec::new(), String::new());
    let report = run(&job, |event| {
        if let Event::Line { stream, text, .. } = event {
            let text = String::from_utf8_lossy(text).into_owned();
            match stream {
                Stream::Stdout => lines.push(text),
                Stream::Stderr => errors += &format!("{text}\n"),
            }
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {lines:?} {errors}", report.outcome);
    assert_eq!(report.replacements, 1, "{lines:?} {errors}");
    let from_the_commit = lines.iter().filter(|line| line.ends_with(" at 20")).count();
    assert!(from_the_commit >= 2, "the survivors go on from the last commit: {lines:?}");

    let ends: Vec<PathBuf> =
        fs::read_dir(folder.path().join("end")).unwrap().map(|end| end.unwrap().path()).collect();
    assert_eq!(ends.len(), 3, "{lines:?}");
    // Statistics and the optimizer's state included.
    alike(ends.iter().cloned());
    let mut end = training().unwrap();
    let checkpoints = Checkpoints::open(&ends[0], &ProcessGroup::alone().unwrap()).unwrap();
    end.load_from(&checkpoints.newest().unwrap().unwrap()).unwrap();
    assert_eq!(end.progress, STEPS);
    let (ours, begin) = (floats(&end.model().mlp), floats(&Network::new().mlp));
    let apart = distance(&ours, &floats(&expected()));
    assert!(apart < 1e-3, "{apart}");
    assert!(distance(&ours, &begin) > 0.1, "nothing was trained");
    let means = end.model().norm.running_mean.value_sync().into_data();
    assert!(means.iter::<f32>().any(|mean| mean != 0.0), "no rank's own data have moved the statistics");
}
