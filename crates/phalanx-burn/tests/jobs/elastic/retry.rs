//! Steps that a death cuts off: the survivors come to what a computation in one process comes to in which the dead rank's part
//! is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use burn::optim::AdamWConfig;
use burn::tensor::Tensor;
use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::{self, Context, Options};
use phalanx::launch::{Event, Outcome, Stream};
use phalanx::sampler::ElasticSampler;
use phalanx::{ProcessGroup, Rank, ReduceOp, WorldSize};
use phalanx_burn::{DdpOptions, TrainState};
use rustix::process::{Pid, Signal, kill_process};

use super::{Progress, SAMPLES, STEPS, job, keep, run};
use crate::common::{Mlp, device, distance, floats, samples};

const BATCH: usize = 5;
/// Set for a worker of this test; `view` has gradients stay in their buckets, and `weighted` counts ranks by their samples.
pub const VIEW: &str = "PHALANX_TEST_RETRY";
/// The steps at which the workers wait until the first and the second are killed, however late the test is.
const HOLDS: [u64; 2] = [50, 100];

/// The file that is there when the worker is killed for whom all wait at this step.
fn killed(folder: &Path, hold: u64) -> PathBuf {
    folder.join(format!("killed-{hold}"))
}

type Training = TrainState<Mlp, Progress>;

/// How a rank counts.
fn weight(view: &str, rank: Rank) -> f64 {
    if view == "weighted" { f64::from(1 + rank.get() * rank.get()) } else { 1.0 }
}

fn training() -> phalanx::Result<Training> {
    let progress = Progress { step: 0, sampler: ElasticSampler::new(SAMPLES).seed(5) };
    TrainState::new(Mlp::new(&[8, 16, 3]), AdamWConfig::new().init(), progress)
}

/// What a worker does. Nobody commits before the end: without steps that are done again, all would begin anew.
pub fn work(folder: &Path, view: &str) -> phalanx::Result<()> {
    let mut options = DdpOptions::default();
    options.gradient_as_bucket_view = view == "view";
    // Several buckets of a few hundred bytes.
    options.reducer = options.reducer.bucket_cap_mb(256e-6).first_bucket_mb(64e-6);
    let mut training = training()?.with_options(options)?;
    elastic::run_with(&Options::from_env()?, &mut training, |context: &mut Context<'_, Training>, group| {
        assert_eq!(context.state.progress.step, 0, "nobody has committed anything");
        keep(context.state, &folder.join(format!("begin-{}/{}", context.round(), group.rank())))?;
        println!("begin {}", std::process::id());
        let (xs, ys) = samples(0, SAMPLES);
        while context.state.progress.step < STEPS {
            let step = context.state.progress.step;
            let mut waits = [f32::from(u8::from(HOLDS.contains(&step)))];
            while waits[0] > 0.0 {
                // What any of them does not see yet, all wait for.
                waits[0] = f32::from(u8::from(!killed(folder, step).exists()));
                context.all_reduce(&mut waits, ReduceOp::Max)?;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            let (rank, world) = (context.rank(), context.world_size());
            let state = &mut *context.state;
            let Some(batch) = state.progress.sampler.next_batch(BATCH, rank, world) else {
                state.progress.sampler.next_epoch();
                continue;
            };
            let batch = Tensor::from_data(batch.as_slice(), &device());
            let part = (xs.clone().select(0, batch.clone()), ys.clone().select(0, batch));
            let loss = state.model.forward(|model| model.loss(part))?;
            let averaged = match view == "weighted" {
                true => TrainState::backward_weighted(context, &loss, weight(view, rank))?,
                false => TrainState::backward(context, &loss)?,
            };
            let state = &mut *context.state;
            state.progress.sampler.put_back(&averaged.missing);
            state.step(0.01, averaged.value)?;
            let missing: Vec<String> = averaged.missing.iter().map(ToString::to_string).collect();
            println!(
                "step {} of {world} {} [{}]",
                state.progress.step,
                std::process::id(),
                missing.join(",")
            );
            state.progress.step += 1;
            if state.progress.step.is_multiple_of(2) {
                // Another step of the same loop, in which a worker may die as well.
                let mut steps = [state.progress.step as f32];
                context.all_reduce(&mut steps, ReduceOp::Avg)?;
                assert_eq!(steps[0], context.state.progress.step as f32);
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        context.commit()
    })?;
    keep(&training, &folder.join(format!("end/{}", std::process::id())))?;
    println!("end {}", std::process::id());
    Ok(())
}

#[derive(Debug, Default)]
struct Seen {
    pids: BTreeMap<u32, u32>,
    begun: BTreeSet<u32>,
    ended: BTreeSet<u32>,
    /// Of each step: the world that its data were distributed to, and whose part is missing.
    steps: BTreeMap<u64, (u32, Vec<u32>)>,
    /// The steps of each process.
    of: BTreeMap<u32, Vec<u64>>,
    stderr: String,
}

impl Seen {
    fn note(&mut self, event: &Event<'_>) {
        match *event {
            Event::Started { rank, pid, .. } => drop(self.pids.insert(rank.get(), pid)),
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
            "begin" => {
                assert!(self.begun.insert(number(1) as u32), "{line}: it has gone back\n{}", self.stderr)
            }
            "end" => drop(self.ended.insert(number(1) as u32)),
            "step" => {
                let missing = words[5].trim_matches(['[', ']']).split(',').filter(|rank| !rank.is_empty());
                let step = (number(3) as u32, missing.map(|rank| rank.parse().unwrap()).collect());
                let first = self.steps.entry(number(1)).or_insert_with(|| step.clone());
                assert_eq!(*first, step, "the ranks differ: {line}");
                self.of.entry(number(4) as u32).or_default().push(number(1));
            }
            _ => panic!("{line}"),
        }
    }

    /// The same steps in this process: of each the parts that were there.
    fn expected(&self, folder: &Path, view: &str) -> Training {
        let mut training = training().unwrap();
        load(&mut training, &folder.join("begin-1/0"));
        let (xs, ys) = samples(0, SAMPLES);
        for (world, missing) in self.steps.values() {
            let world = WorldSize::new(*world).unwrap();
            let next_batches = |sampler: &ElasticSampler| {
                let batches = world.ranks().map(|rank| sampler.clone().next_batch(BATCH, rank, world));
                batches.collect::<Option<Vec<_>>>()
            };
            let sampler = &mut training.progress.sampler;
            let batches = next_batches(sampler).or_else(|| {
                sampler.next_epoch();
                next_batches(sampler)
            });
            sampler.next_batch(BATCH, Rank::MAIN, world).unwrap();
            sampler.put_back(&missing.iter().copied().map(Rank::new).collect::<Vec<_>>());
            let there = (0..).zip(batches.unwrap()).filter(|(rank, _)| !missing.contains(rank));
            let parts: Vec<_> = there
                .map(|(rank, batch)| {
                    let batch = Tensor::from_data(batch.as_slice(), &device());
                    let part = (xs.clone().select(0, batch.clone()), ys.clone().select(0, batch));
                    (part, weight(view, Rank::new(rank)))
                })
                .collect();
            let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
            let losses = |model: &Mlp| {
                let losses = parts.into_iter().map(|(part, weight)| model.loss(part) * weight);
                losses.reduce(|sum, loss| sum + loss).unwrap() / total
            };
            let loss = training.model.forward(losses).unwrap();
            let gradients = training.model.backward(&loss).unwrap();
            training.step(0.01, gradients).unwrap();
        }
        training
    }
}

fn load(training: &mut Training, folder: &Path) {
    let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
    training.load_from(&checkpoints.newest().unwrap().unwrap()).unwrap();
}

pub fn copies() {
    survivors_go_on("copy");
}

pub fn views() {
    survivors_go_on("view");
}

pub fn weights() {
    survivors_go_on("weighted");
}

/// Two of four workers die, one after the other, at whatever point of a step.
fn survivors_go_on(view: &str) {
    let folder = tempfile::tempdir().unwrap();
    let job = job(4, folder.path()).variable(VIEW, view).min_workers(WorldSize::new(2).unwrap());
    let mut seen = Seen::default();
    let mut victims = vec![(70, 0), (30, 2)];
    let report = run(&job, |event| {
        seen.note(event);
        let newest = seen.steps.last_key_value().map_or(0, |(step, _)| *step);
        if let Some((step, place)) = victims.last().copied()
            && newest >= step
        {
            victims.pop();
            let _ = kill_process(Pid::from_raw(seen.pids[&place] as i32).unwrap(), Signal::KILL);
            std::fs::write(killed(folder.path(), HOLDS[1 - victims.len()]), "").unwrap();
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {}", report.outcome, seen.stderr);
    assert!(victims.is_empty());
    let worlds: BTreeSet<u32> = seen.steps.values().map(|(world, _)| *world).collect();
    assert_eq!((worlds, seen.ended.len()), (BTreeSet::from([4, 3, 2]), 2));
    // No process has done a step twice, or left one out.
    for steps in seen.of.values() {
        assert!(steps.iter().zip(0..).all(|(step, number)| *step == number), "{steps:?}");
    }
    let mut theirs = training().unwrap();
    let expected = seen.expected(folder.path(), view);
    for pid in &seen.ended {
        load(&mut theirs, &folder.path().join(format!("end/{pid}")));
        let apart = distance(&floats(theirs.model.model()), &floats(expected.model.model()));
        assert!(apart < 1e-3, "{apart}");
        assert_eq!(theirs.progress.sampler.consumed(), expected.progress.sampler.consumed());
    }
}
