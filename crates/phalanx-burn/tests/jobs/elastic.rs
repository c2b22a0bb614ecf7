//! A Burn model in elastic jobs with real processes, which are killed. This program starts itself as the workers.

mod by_name;
mod retry;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::Tensor;
use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::{self, Context, Options};
use phalanx::launch::{Event, Job, Outcome, Report, Stream};
use phalanx::sampler::ElasticSampler;
use phalanx::{Error, GroupHandle, ProcessGroup, ReduceOp, WorldSize};
use phalanx_burn::{SyncBatchNorm, TrainState};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::common::{device, samples};
use crate::harness::run_job;

/// Where a worker keeps what the test looks at; says that this process is a worker.
const FOLDER: &str = "PHALANX_TEST_FOLDER";
/// A checkpoint to begin with.
const RESUME: &str = "PHALANX_TEST_RESUME";
/// Where all ranks save together. Such a job does nothing but read it if there is `READ`.
const SHARDED: &str = "PHALANX_TEST_SHARDED";
const READ: &str = "PHALANX_TEST_READ";
/// Set where batch norm is over all ranks.
const SYNC: &str = "PHALANX_TEST_SYNC";
/// A file that is there when the test has seen what it waits for.
const ENOUGH: &str = "PHALANX_TEST_ENOUGH";
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(120);
const STEPS: u64 = 120;
/// Where workers wait for that: a multiple of the steps between two commits.
const HOLD: u64 = 100;
const SAMPLES: usize = 200;

pub const TESTS: &[(&str, fn())] = &[
    ("model_and_optimizer_outlive_workers_that_are_killed", workers_are_killed_and_replaced),
    ("without_a_replacement_fewer_go_on_as_if_they_had_begun_there", fewer_go_on),
    ("batch_norm_over_all_ranks_goes_from_group_to_group", batch_norm_goes_along),
    ("what_survivors_save_together_is_read_by_another_number_of_ranks", saved_together),
    ("a_step_that_a_death_cuts_off_is_averaged_again_by_the_others", retry::copies),
    ("a_step_that_a_death_cuts_off_is_averaged_again_in_bucket_views", retry::views),
    ("a_step_that_a_death_cuts_off_is_averaged_again_by_weight", retry::weights),
    ("averaged_by_name_model_and_optimizer_outlive_a_worker", by_name::model_and_optimizer_outlive_a_worker),
];

/// What this program does as a worker.
pub fn play() {
    crate::harness::abort_after(LIMIT);
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let outcome = match (std::env::var(retry::VIEW), std::env::var(by_name::BY_NAME)) {
        (Ok(view), _) => retry::work(&folder, &view),
        (_, Ok(_)) => by_name::work(&folder),
        _ => work(&folder),
    };
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// With running statistics, of which every rank has others until they are made alike, and with something frozen.
#[derive(Module, Debug)]
struct Network {
    first: Linear,
    norm: Norm,
    frozen: Linear,
    last: Linear,
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one")]
enum Norm {
    Own(BatchNorm),
    Shared(SyncBatchNorm),
}

impl Network {
    fn new(handle: &GroupHandle) -> Self {
        let layer = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
        let (first, frozen, last) = (layer(8, 12), layer(12, 12).no_grad(), layer(12, 3));
        let norm = BatchNormConfig::new(12).init(&device());
        let norm = match std::env::var(SYNC) {
            Ok(_) => Norm::Shared(SyncBatchNorm::new(norm, handle)),
            Err(_) => Norm::Own(norm),
        };
        Self { first, norm, frozen, last }
    }

    fn loss(&self, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
        let x = self.first.forward(x).tanh();
        let x = match &self.norm {
            Norm::Own(norm) => norm.forward(x),
            Norm::Shared(norm) => norm.forward(x),
        };
        (self.last.forward(self.frozen.forward(x).tanh()) - y).powi_scalar(2).mean()
    }
}

#[derive(Serialize, Deserialize)]
struct Progress {
    step: u64,
    sampler: ElasticSampler,
}

type Training = TrainState<Network, Progress>;

/// What a worker does. No seed is set: newcomers begin with other parameters, and with other ids of theirs.
fn work(folder: &Path) -> phalanx::Result<()> {
    let progress = Progress { step: 0, sampler: ElasticSampler::new(SAMPLES).seed(3) };
    let handle = GroupHandle::new(ProcessGroup::alone()?);
    let training = TrainState::new(Network::new(&handle), AdamWConfig::new().init(), progress)?;
    let mut training: Training = training.sharing(&handle)?;
    if let Ok(resume) = std::env::var(RESUME) {
        let checkpoints = Checkpoints::open(resume, &ProcessGroup::alone()?)?;
        training.load_from(&checkpoints.newest()?.unwrap())?;
    }
    if std::env::var_os(READ).is_some() {
        return read(training, folder);
    }
    let options = Options::from_env()?;
    let rank = elastic::run_with(&options, &mut training, |context: &mut Context<'_, Training>, group| {
        train(context, group, folder)?;
        Ok::<_, Error>(group.rank())
    })?;
    keep(&training, &folder.join(format!("end/{rank}")))?;
    println!("done rank {rank}");
    Ok(())
}

/// Goes on from what other ranks have saved together, and keeps it.
fn read(training: Training, folder: &Path) -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let checkpoints = Checkpoints::open(std::env::var_os(SHARDED).unwrap(), &group)?;
    let mut training = training.with_group(&group)?;
    assert!(training.resume(&checkpoints)?);
    keep(&training, &folder.join(format!("end/{}", group.rank())))?;
    println!("done rank {}", group.rank());
    Ok(())
}

/// Saves the state as this rank has it.
fn keep<M: Module>(training: &TrainState<M, Progress>, folder: &Path) -> phalanx::Result<()> {
    let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone()?)?;
    checkpoints.save(training.progress.step, |snapshot| training.save_to(snapshot))?;
    checkpoints.finish()
}

fn train(context: &mut Context<'_, Training>, group: &ProcessGroup, folder: &Path) -> phalanx::Result<()> {
    let (rank, world, round) = (group.rank(), group.world_size(), context.round());
    let (xs, ys) = samples(0, SAMPLES);
    keep(context.state, &folder.join(format!("round-{round}/{rank}")))?;
    println!("round {round} rank {rank} of {world} step {}", context.state.progress.step);
    let together = std::env::var_os(SHARDED).map(|path| Checkpoints::open(path, group)).transpose()?;
    while context.state.progress.step < STEPS {
        if context.state.progress.step == HOLD {
            hold(context, round)?;
        }
        let (rank, world) = (context.rank(), context.world_size());
        let state = &mut *context.state;
        let Some(batch) = state.progress.sampler.next_batch(5, rank, world) else {
            state.progress.sampler.next_epoch();
            continue;
        };
        let batch = Tensor::from_data(batch.as_slice(), &device());
        let (x, y) = (xs.clone().select(0, batch.clone()), ys.clone().select(0, batch));
        let loss = state.model.forward(|network| network.loss(x, y))?;
        if let Norm::Shared(norm) = &state.model.model().norm {
            // Not in each step: a death then mostly cuts off an exchange of the layer itself.
            if state.progress.step % 4 == 3 {
                let means = norm.running_mean.value_sync().into_data();
                same_everywhere(context.group(), means.as_slice::<f32>().unwrap())?;
            }
            let averaged = TrainState::backward(context, &loss)?;
            context.state.progress.sampler.put_back(&averaged.missing);
            context.state.step(0.01, averaged.value)?;
        } else {
            let gradients = state.model.backward(&loss)?;
            state.step(0.01, gradients)?;
        }
        let state = &mut *context.state;
        state.progress.step += 1;
        let step = state.progress.step;
        std::thread::sleep(Duration::from_millis(5));
        if step.is_multiple_of(4) {
            context.commit()?;
            println!("commit {step} round {round}");
            if let Some(together) = &together {
                context.state.checkpoint_sharded(together)?;
            }
        }
    }
    together.map_or(Ok(()), |together| together.finish())
}

/// Waits until the test has seen enough, however late it is. Commits that change nothing let newcomers in meanwhile.
fn hold(context: &mut Context<'_, Training>, round: u64) -> phalanx::Result<()> {
    let Some(enough) = std::env::var_os(ENOUGH) else { return Ok(()) };
    loop {
        let mut is_enough = [i64::from(context.rank().is_main() && Path::new(&enough).exists())];
        context.group().all_reduce(&mut is_enough, ReduceOp::Max)?;
        if is_enough[0] > 0 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
        context.commit()?;
        println!("commit {HOLD} round {round}");
    }
}

/// Statistics of each rank's own batches would differ; what is no number is not the same as anything.
fn same_everywhere(group: &ProcessGroup, means: &[f32]) -> phalanx::Result<()> {
    let mut all = vec![0.0; means.len() * group.world_size().count()];
    group.all_gather(means, &mut all)?;
    match all.chunks(means.len()).all(|other| other == means) && means.iter().any(|mean| *mean != 0.0) {
        true => Ok(()),
        false => Err(Error::mismatch(format!("statistics of one rank alone: {means:?}"))),
    }
}

/// What the workers have said.
#[derive(Debug, Default)]
struct Seen {
    /// By place: the process of each life.
    pids: BTreeMap<u32, Vec<u32>>,
    /// Of each round: its ranks, their number, and the step at which it began.
    rounds: BTreeMap<u64, (BTreeSet<u32>, u32, u64)>,
    /// The furthest step that a commit has returned with in each round.
    committed: BTreeMap<u64, u64>,
    done: BTreeSet<u32>,
    stderr: String,
}

impl Seen {
    fn note(&mut self, event: &Event<'_>) {
        match *event {
            Event::Started { rank, pid, .. } => self.pids.entry(rank.get()).or_default().push(pid),
            Event::Line { stream: Stream::Stderr, text, .. } => {
                self.stderr += &format!("{}\n", String::from_utf8_lossy(text));
            }
            Event::Line { text, .. } => self.line(std::str::from_utf8(text).unwrap()),
            _ => {}
        }
    }

    fn line(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match words[0] {
            "round" => {
                let fresh = (BTreeSet::new(), number(5) as u32, number(7));
                let round = self.rounds.entry(number(1)).or_insert(fresh);
                assert_eq!((round.1, round.2), (number(5) as u32, number(7)), "{line}");
                assert!(round.0.insert(number(3) as u32), "{line}");
            }
            "commit" => {
                let furthest = self.committed.entry(number(3)).or_default();
                *furthest = number(1).max(*furthest);
            }
            "done" => assert!(self.done.insert(number(2) as u32), "{line}"),
            _ => panic!("{line}"),
        }
    }

    /// The furthest commit of the newest round, if all its ranks have begun.
    fn progress(&self) -> u64 {
        let Some((number, round)) = self.rounds.last_key_value() else { return 0 };
        let complete = round.0.len() == round.1 as usize;
        if complete { self.committed.get(number).copied().unwrap_or(0) } else { 0 }
    }

    /// What has to hold whatever happened, and that the end is that of a job without failures that begins where the last
    /// round began.
    fn check(&self, folder: &Path, job: impl Fn(u32, &Path) -> Job) {
        for (round, (ranks, _, step)) in &self.rounds {
            let before = self.committed.range(..round).map(|(_, step)| *step).max();
            assert!(*step >= before.unwrap_or(0), "round {round} begins at {step}, behind {before:?}");
            // Newcomers too.
            alike(ranks.iter().map(|rank| folder.join(format!("round-{round}/{rank}"))));
        }
        let (round, (ranks, world, _)) = self.rounds.last_key_value().unwrap();
        assert_eq!((ranks.len(), &self.done), (*world as usize, ranks));
        let end = alike(ranks.iter().map(|rank| folder.join(format!("end/{rank}"))));

        let (other, mut quiet) = (tempfile::tempdir().unwrap(), Self::default());
        let job = job(*world, other.path())
            .variable(RESUME, folder.join(format!("round-{round}/0")).to_str().unwrap());
        let report = run(&job, |event| quiet.note(event));
        assert!(matches!(report.outcome, Outcome::Succeeded), "{}", quiet.stderr);
        assert_eq!(quiet.done, self.done);
        let expected = alike(ranks.iter().map(|rank| other.path().join(format!("end/{rank}"))));
        assert!(end == expected, "the same steps, without failures, lead elsewhere");
    }
}

/// The files of checkpoints that are the same.
fn alike(mut folders: impl Iterator<Item = PathBuf>) -> Vec<Vec<u8>> {
    let first = folders.next().map(|folder| files(&folder)).unwrap();
    folders.for_each(|folder| assert!(files(&folder) == first, "{} differs", folder.display()));
    first
}

/// The files of the newest checkpoint in `folder`, without the manifest, which says when it was made.
fn files(folder: &Path) -> Vec<Vec<u8>> {
    let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
    let newest = checkpoints.newest().unwrap().unwrap();
    let names = ["tensors.safetensors", "model.part", "optimizer.part", "progress.part"];
    names.iter().map(|name| fs::read(newest.folder().join(name)).unwrap()).collect()
}

fn job(workers: u32, folder: &Path) -> Job {
    Job::new(std::env::current_exe().unwrap(), WorldSize::new(workers).unwrap())
        .variable(crate::harness::ROLE, "elastic")
        .variable(FOLDER, folder.to_str().unwrap())
        .variable("RAYON_NUM_THREADS", "1")
        .grace(Duration::from_secs(2))
}

/// Runs the job; gives up when it takes too long.
fn run(job: &Job, note: impl FnMut(&Event<'_>)) -> Report {
    run_job(job, LIMIT, note)
}

/// Runs the job, and kills the worker at each place when its commit is reached; the last victim first. It ends when a later round has
/// `world` workers.
fn kill(job: Job, mut victims: Vec<(u64, u32)>, world: u32) -> Seen {
    let (mut seen, folder, mut killed_in) = (Seen::default(), tempfile::tempdir().unwrap(), 0);
    let enough = folder.path().join("enough");
    let report = run(&job.variable(ENOUGH, &enough), |event| {
        seen.note(event);
        if !matches!(event, Event::Line { .. }) {
            return;
        }
        let newest = seen.rounds.last_key_value().map_or((0, 0), |(round, (_, world, _))| (*round, *world));
        if let Some((step, place)) = victims.last().copied() {
            if seen.progress() >= step {
                victims.pop();
                killed_in = newest.0;
                let pid = *seen.pids[&place].last().unwrap();
                let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
            }
        } else if newest.0 > killed_in && newest.1 == world {
            fs::write(&enough, "").unwrap();
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {}", report.outcome, seen.stderr);
    assert!(victims.is_empty());
    seen
}

fn workers_are_killed_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let elastic = job(3, folder.path()).min_workers(WorldSize::new(2).unwrap()).max_restarts(3);
    let seen = kill(elastic, vec![(88, 2), (52, 0), (20, 1)], 3);
    assert!(seen.pids.values().all(|lives| lives.len() == 2), "{:?}", seen.pids);
    seen.check(folder.path(), job);
}

fn fewer_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let elastic = job(3, folder.path()).min_workers(WorldSize::new(2).unwrap());
    let seen = kill(elastic, vec![(40, 0)], 2);
    let worlds: Vec<u32> = seen.rounds.values().map(|round| round.1).collect();
    assert_eq!(worlds, [3, 2]);
    seen.check(folder.path(), job);
}

fn batch_norm_goes_along() {
    let folder = tempfile::tempdir().unwrap();
    let sync = |workers, folder: &Path| job(workers, folder).variable(SYNC, "1");
    let job = sync(3, folder.path()).min_workers(WorldSize::new(2).unwrap()).max_restarts(3);
    kill(job, vec![(72, 0), (32, 1)], 3).check(folder.path(), sync);
}

fn saved_together() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sharded = folder.path().join("sharded");
    let job = |workers, folder: &Path| job(workers, folder).variable(SHARDED, sharded.to_str().unwrap());
    let seen = kill(job(3, folder.path()).min_workers(WorldSize::new(2).unwrap()), vec![(40, 1)], 2);
    let (_, (ranks, world, _)) = seen.rounds.last_key_value().unwrap();
    assert_eq!((*world, &seen.done), (2, ranks));
    let end = alike(ranks.iter().map(|rank| folder.path().join(format!("end/{rank}"))));
    let newest =
        Checkpoints::open(&sharded, &ProcessGroup::alone().unwrap()).unwrap().newest().unwrap().unwrap();
    assert_eq!((newest.step(), newest.world_size()), (STEPS, 2));
    let mut readers = Seen::default();
    let report = run(&job(4, other.path()).variable(READ, "1"), |event| readers.note(event));
    assert!(matches!(report.outcome, Outcome::Succeeded), "{}", readers.stderr);
    assert_eq!(readers.done, BTreeSet::from([0, 1, 2, 3]));
    let read = alike((0..4).map(|rank| other.path().join(format!("end/{rank}"))));
    assert!(read == end, "four ranks have read something else than two have saved");
}
