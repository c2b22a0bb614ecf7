//! One strategy, measured in processes of its own: time, processor time, memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use common::memory::{self, Peaks};
use phalanx::ProcessGroup;
use roberta::Classifier;
use roberta::loading::Loading;
use roberta::mesh::Mesh;
use roberta::strategy::{Devices, Engine, Scope, Strategy};
use roberta::tasks::{Classification, Part, Task};
use roberta::train::evaluate;
use rustix::time::{ClockId, clock_gettime};

use crate::compare::{CompareOptions, Figures};

/// Steps with which a batch is tried: the first makes the optimizer's state, the second has it.
const TRIED_STEPS: usize = 2;
/// How often a line says how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The processor time that replicas other than the main one have used, in nanoseconds.
static COMPUTED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn cpu(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Burn's kernels run in the thread that calls them, so that a replica has one thread as a rank has, and what it computes and
/// holds is its own.
fn kernels_of_this_thread() {
    if rayon::current_thread_index().is_none() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
        // Without it the kernels run in the pool that all threads share.
        std::mem::forget(pool);
    }
}

fn observed(memory: memory::Scope) -> Scope {
    Box::new(move |replica, work| {
        let Some(computed) = COMPUTED.get(replica).filter(|_| replica > 0) else {
            return memory(replica, work);
        };
        kernels_of_this_thread();
        let begin = cpu(ClockId::ThreadCPUTime);
        memory(replica, work);
        let spent = cpu(ClockId::ThreadCPUTime) - begin;
        computed.fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
    })
}

/// What a clock, and the processor times of the process and of each other replica, say.
struct Clocks {
    begin: Instant,
    process: Duration,
    others: Vec<u64>,
}

impl Clocks {
    fn now() -> Self {
        let others = COMPUTED.iter().map(|computed| computed.load(Ordering::Relaxed)).collect();
        Self { begin: Instant::now(), process: cpu(ClockId::ProcessCPUTime), others }
    }

    /// Seconds since then, and in these the processor time of the main replica and of the busiest other one, in percent.
    fn read(&self) -> (f64, f64, f64) {
        let Self { begin, process, others } = Self::now();
        let seconds = (begin - self.begin).as_secs_f64();
        let others: Vec<f64> =
            others.iter().zip(&self.others).map(|(now, before)| (now - before) as f64 / 1e9).collect();
        let main = (process - self.process).as_secs_f64() - others.iter().sum::<f64>();
        let percent = |busy: f64| 100.0 * busy / seconds;
        (seconds, percent(main), percent(others.into_iter().fold(0.0, f64::max)))
    }
}

/// Lines on standard error that say how far a strategy is.
pub struct Saying {
    /// The strategy; none on the ranks that say nothing.
    name: Option<&'static str>,
    said: Instant,
}

impl Saying {
    /// Of the strategy of `devices`; rank 0 alone says something.
    pub fn new(devices: Devices, group: &ProcessGroup) -> Self {
        Self { name: group.rank().is_main().then(|| devices.name()), said: Instant::now() }
    }

    /// Says something.
    pub fn now(&mut self, text: &str) {
        if let Some(name) = self.name {
            eprintln!("{name}: {text}");
            self.said = Instant::now();
        }
    }

    /// Says something if nothing has been said for a while.
    fn sometimes(&mut self, text: impl FnOnce() -> String) {
        if self.said.elapsed() >= PROGRESS_INTERVAL {
            self.now(&text());
        }
    }
}

/// What [`measure`] trains.
pub struct Subject {
    pub task: Arc<Classification>,
    pub model: Classifier,
    pub devices: Devices,
}

/// Begins to count memory: before any kernel runs.
pub fn begin(devices: Devices) -> Result<(Peaks, Scope)> {
    kernels_of_this_thread();
    let (peaks, memory) = memory::of_replicas(devices.batches())?;
    Ok((peaks, observed(memory)))
}

/// Trains with one strategy; gives its figures on rank 0, or with `--limit-bytes` ends when a device needs more.
///
/// # Errors
/// If a step fails, or there are too few texts.
pub fn measure(
    subject: Subject,
    group: &ProcessGroup,
    (mut peaks, scope): (Peaks, Scope),
    options: &CompareOptions,
) -> Result<()> {
    let train = options.train();
    let Subject { task, model, devices } = subject;
    let batch_size = train.batch_size * devices.batches();
    let loading = Loading { batch_size, num_workers: train.num_workers };
    let mesh = Mesh::new(devices, group)?;
    let loader = loading.training(&task, &mesh.data, train.seed, &burn::tensor::Device::flex().autodiff())?;
    let mut engine = Engine::new(model, train.optimizer()?, (devices, &mesh), None, Some(scope))?;
    peaks.restart();
    // Anew when more is shared: that is a part of the cap.
    let limit =
        |peaks: &mut Peaks| options.limit_bytes.map_or(Ok(()), |bytes| options.memory_by.limit(peaks, bytes));
    limit(&mut peaks)?;
    let (steps, epochs) = (loader.len() as u64, train.epochs);
    let total = steps * epochs;
    let mut saying = Saying::new(devices, group);
    saying.now(&format!(
        "{epochs} epochs of {steps} steps of {} texts",
        train.batch_size * devices.count as usize
    ));
    let (mut step, mut fastest) = (0, (f64::INFINITY, 0.0, 0.0));
    for epoch in 1..=epochs {
        group.barrier()?;
        let clocks = Clocks::now();
        for batch in &loader {
            train.seed_step(step, &mesh.all);
            engine.step(&*task, vec![batch?], (train.rate(step, total), train.max_norm))?;
            step += 1;
            saying.sometimes(|| {
                format!("epoch {epoch} of {epochs}, step {} of {steps}", (step - 1) % steps + 1)
            });
            if step <= TRIED_STEPS as u64 {
                peaks.look()?;
                limit(&mut peaks)?;
            }
            if options.limit_bytes.is_some() && step == TRIED_STEPS as u64 {
                return Ok(());
            }
        }
        group.barrier()?;
        let (seconds, main, other) = clocks.read();
        if seconds < fastest.0 {
            fastest = (seconds, main, other);
        }
    }
    ensure!(options.limit_bytes.is_none(), "there are too few texts to try this batch: raise --train-limit");
    let (epoch_s, main, other) = fastest;
    let own = (peaks.main_mb(), main);
    let all: Vec<(f64, f64)> = group.all_gather_object(&own)?;
    saying.now(&format!("looks at {} held-out texts", task.examples(Part::HeldOut)));
    let found = evaluate(&task, &engine.model(&*task)?, group, loading)?;
    engine.check_replicas()?;
    if !group.rank().is_main() {
        return Ok(());
    }
    let most = |values: &mut dyn Iterator<Item = f64>| values.reduce(f64::max);
    let (mut peak_other_mb, mut cpu_other_percent) =
        (most(&mut all[1..].iter().map(|(peak, _)| *peak)), most(&mut all[1..].iter().map(|(_, cpu)| *cpu)));
    if matches!(devices.strategy, Strategy::Dp | Strategy::Towers) && devices.count > 1 {
        (peak_other_mb, cpu_other_percent) = (Some(peaks.other_mb()), Some(other));
    }
    let figures = Figures {
        devices,
        epoch_s,
        texts_per_s: task.examples(Part::Train) as f64 / epoch_s,
        peak_main_mb: own.0,
        peak_other_mb,
        cpu_main_percent: own.1,
        cpu_other_percent,
        largest_batch: None,
        accuracy: found.accuracy,
        loss: found.loss,
        // The program that has started this one knows them.
        conditions: String::new(),
    };
    let path = options.figures.as_ref().context("--figures is not set")?;
    Ok(std::fs::write(path, serde_json::to_vec(&figures)?)?)
}
