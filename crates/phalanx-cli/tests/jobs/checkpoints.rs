//! A job under `phalanx run` that loses a rank, and goes on from its checkpoint: the result is that of a job that lost
//! nobody.

use phalanx::checkpoint::Checkpoints;
use phalanx::sampler::DistributedSampler;
use phalanx::{ProcessGroup, ReduceOp};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

use crate::ROLE;
use crate::support::{bare, output, text};

const FOLDER: &str = "TEST_FOLDER";
/// The step at which rank 1 dies in the first life.
const DIES: &str = "TEST_DIES";

const SAMPLES: usize = 50;
const FEATURES: usize = 4;
const EPOCHS: u64 = 5;

pub const TESTS: &[(&str, fn())] =
    &[("a_restarted_job_ends_as_if_nothing_had_happened", a_restarted_job_ends_as_if_nothing_had_happened)];

/// What this program does as a worker.
pub fn work() {
    train().unwrap();
}

/// Besides the model: where in the data it is, and the optimizer's memory.
#[derive(Default, Serialize, Deserialize)]
struct Progress {
    epoch: u64,
    /// Batches of this epoch that are done.
    batches: usize,
    momentum: Vec<f32>,
}

/// A linear model by gradient descent with momentum; a checkpoint after every step.
fn train() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let (mut step, mut weights) = (0, vec![0f32; FEATURES]);
    let mut progress = Progress { momentum: vec![0.0; FEATURES], ..Progress::default() };
    let checkpoints = Checkpoints::open(std::env::var(FOLDER).unwrap(), &group)?.keep(2);
    if let Some(saved) = checkpoints.newest()? {
        step = saved.step();
        saved.tensor("weights")?.copy_to(&mut weights)?;
        progress = saved.value("progress")?;
    }
    if group.rank().is_main() {
        println!("from {step}");
    }
    let mut sampler = DistributedSampler::for_group(SAMPLES, &group).seed(7);
    while progress.epoch < EPOCHS {
        sampler.set_epoch(progress.epoch);
        for batch in sampler.indices().chunks(5).skip(progress.batches) {
            let mut gradient = gradient(&weights, batch);
            die_at(step, &group);
            group.all_reduce(&mut gradient, ReduceOp::Avg)?;
            for ((weight, momentum), slope) in weights.iter_mut().zip(&mut progress.momentum).zip(gradient) {
                *momentum = 0.9 * *momentum + slope;
                *weight -= 0.01 * *momentum;
            }
            (step, progress.batches) = (step + 1, progress.batches + 1);
            checkpoints.save(step, |snapshot| {
                snapshot.tensor("weights", &[FEATURES], &weights)?;
                snapshot.value("progress", &progress)
            })?;
        }
        (progress.epoch, progress.batches) = (progress.epoch + 1, 0);
    }
    checkpoints.finish()?;
    if group.rank().is_main() {
        println!("{step} steps: {:08x?}", weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>());
    }
    Ok(())
}

/// Of the squared error, for samples that are functions of their number.
fn gradient(weights: &[f32], batch: &[usize]) -> Vec<f32> {
    let mut gradient = vec![0f32; FEATURES];
    for sample in batch {
        let features: Vec<f32> =
            (0..FEATURES).map(|feature| ((sample * 7 + feature * 3) as f32).sin()).collect();
        let target: f32 =
            features.iter().zip(1u8..).map(|(feature, number)| feature * f32::from(number)).sum();
        let error =
            features.iter().zip(weights).map(|(feature, weight)| feature * weight).sum::<f32>() - target;
        gradient.iter_mut().zip(&features).for_each(|(slope, feature)| *slope += error * feature);
    }
    gradient
}

/// The end of rank 1, once.
fn die_at(step: u64, group: &ProcessGroup) {
    let first_life = std::env::var("TORCHELASTIC_RESTART_COUNT").is_ok_and(|count| count == "0");
    let dies = std::env::var(DIES).is_ok_and(|dies| dies == step.to_string());
    if group.rank().get() == 1 && first_life && dies {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
}

/// What rank 0 says of a job of two ranks.
fn job(dies: Option<u64>) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut command = bare();
    command
        .args(["--nproc-per-node", "2", "--max-restarts", "1", "--"])
        .arg(std::env::current_exe().unwrap());
    command.env(ROLE, "checkpoints").env(FOLDER, folder.path().join("run"));
    command.envs(dies.map(|step| (DIES, step.to_string())));
    let output = output(command);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr).contains("restart 1 of 1"), dies.is_some(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn a_restarted_job_ends_as_if_nothing_had_happened() {
    let undisturbed = job(None);
    assert_eq!(undisturbed.len(), 2, "{undisturbed:?}");
    assert!(undisturbed[1].starts_with("[0] 25 steps: "), "{undisturbed:?}");
    // In the middle of an epoch, at its end, and before there is any checkpoint.
    for step in [13, 10, 0] {
        let disturbed = job(Some(step));
        assert_eq!(disturbed.len(), 3, "{disturbed:?}");
        let from: u64 = disturbed[1].strip_prefix("[0] from ").unwrap().parse().unwrap();
        // The step before was handed over; the one before that was on the disk.
        assert!(from <= step && from + 1 >= step, "{disturbed:?}");
        assert_eq!(disturbed[2], undisturbed[1]);
    }
}
