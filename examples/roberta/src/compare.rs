//! All strategies side by side: the same model, the same batches, one after the other in processes of their own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use roberta::Classifier;
use roberta::loading::Loading;
use roberta::strategy::{Devices, Engine, Scope, Strategy};
use roberta::tasks::{Classification, Part, Task};
use roberta::train::{TrainOptions, evaluate};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::bars::{self, BLUE, ORANGE, Panel};
use crate::memory::{self, Peaks};

/// Steps with which a batch is tried: the first makes the optimizer's state, the second has it.
const TRIED_STEPS: usize = 2;
/// Larger batches of a device are not tried.
const MAX_BATCH: usize = 4096;

/// What is compared.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareOptions {
    /// Strategies, in this order
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Strategy::value_variants().to_vec())]
    pub strategies: Vec<Strategy>,
    /// How often each is timed, in turn; the fastest epoch counts, because others may use the machine too
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// Finds the largest batch with which no device needs more memory than so many megabytes
    #[arg(long, value_name = "MB")]
    pub memory: Option<usize>,
    /// Leaves out the timing: finds the largest batches alone
    #[arg(long, requires = "memory")]
    pub memory_alone: bool,
    /// Draws the result
    #[arg(long, value_name = "PNG")]
    pub plot: Option<PathBuf>,
    /// Adds the figures to a file of JSON lines, and begins with those that are there
    #[arg(long, value_name = "JSONL")]
    pub keep: Option<PathBuf>,
    /// Passes over the training texts in each timing
    #[arg(long, default_value_t = 2)]
    epochs: u64,
    /// Texts in a step of one device
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// Learning rate at the end of the warm-up
    #[arg(long, default_value_t = 1e-4)]
    lr: f64,
    /// Decides the order of the texts, new weights and dropout
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One strategy alone, its figures into a file: how the program starts itself
    #[arg(long, value_enum, requires = "figures", hide = true)]
    pub strategy: Option<Strategy>,
    #[arg(long, hide = true)]
    pub figures: Option<PathBuf>,
    /// Tries whether a batch has room, and measures nothing
    #[arg(long, hide = true)]
    pub limit_bytes: Option<usize>,
}

/// What was measured of one strategy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    devices: Devices,
    /// The fastest.
    epoch_s: f64,
    texts_per_s: f64,
    /// Heap, at its highest, and buckets that processes share.
    peak_main_mb: f64,
    /// Of the replica or rank that held most besides; none if there is no other.
    peak_other_mb: Option<f64>,
    /// Processor time over time in the fastest epoch: 100 is one processor.
    cpu_main_percent: f64,
    /// Of the replica or rank that computed most besides.
    cpu_other_percent: Option<f64>,
    /// Texts of one device in the largest step that has room.
    largest_batch: Option<usize>,
    accuracy: f64,
    loss: f64,
}

impl CompareOptions {
    /// As [`fine-tune`](roberta::train::fit) has it.
    pub fn train(&self) -> TrainOptions {
        TrainOptions {
            epochs: self.epochs,
            batch_size: self.batch_size,
            accumulate: 1,
            num_workers: 1,
            lr: self.lr,
            warmup: 0.1,
            weight_decay: 0.01,
            max_norm: 1.0,
            patience: None,
            save_every: 1,
            seed: self.seed,
            out: PathBuf::new(),
        }
    }
}

impl Figures {
    fn or_faster(self, other: Self) -> Self {
        if other.epoch_s < self.epoch_s { other } else { self }
    }
}

/// Compares all strategies; each is started as this program with `--strategy`.
pub fn compare(options: &CompareOptions, ranks: u32) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut all: Vec<Figures> = match &options.keep {
        Some(path) if path.exists() => std::fs::read_to_string(path)?
            .lines()
            .map(|line| Ok(serde_json::from_str(line)?))
            .collect::<Result<_>>()?,
        _ => Vec::new(),
    };
    let place = |all: &[Figures], devices| all.iter().position(|figures| figures.devices == devices);
    if !options.memory_alone {
        for _ in 0..options.rounds {
            for &strategy in &options.strategies {
                let devices = Devices { count: ranks, strategy };
                let figures = timed(devices, folder.path())?;
                match place(&all, devices) {
                    Some(place) => {
                        let figures = all[place].clone().or_faster(figures);
                        all[place] = figures;
                    }
                    None => all.push(figures),
                }
            }
        }
    }
    if let Some(megabytes) = options.memory {
        for &strategy in &options.strategies {
            let devices = Devices { count: ranks, strategy };
            // One device takes the batches of all.
            let each = if strategy == Strategy::Single { ranks as usize } else { 1 };
            let largest = each * largest_batch(devices, megabytes * 1_000_000)?;
            println!("{}: the largest batch of a device within {megabytes} MB is {largest}", devices.name());
            if let Some(place) = place(&all, devices) {
                all[place].largest_batch = Some(largest);
            }
        }
    }
    if let Some(path) = &options.keep {
        let lines = all.iter().map(|figures| Ok(serde_json::to_string(figures)? + "\n"));
        std::fs::write(path, lines.collect::<Result<String>>()?)?;
    }
    all.retain(|figures| {
        figures.devices.count == ranks && options.strategies.contains(&figures.devices.strategy)
    });
    if all.is_empty() {
        return Ok(());
    }
    show(&all);
    if let Some(path) = &options.plot {
        draw(path, &all, options.memory)?;
    }
    Ok(())
}

fn show(all: &[Figures]) {
    println!(
        "strategy   epoch    texts/s   largest batch   peak main   peak other   CPU main   CPU other   accuracy"
    );
    let or_none = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0} {unit}"))
    };
    for figures in all {
        let largest = figures.largest_batch.map_or_else(|| "-".to_owned(), |batch| batch.to_string());
        println!(
            "{:8} {:>6.2} s {:>9.1} {:>15} {:>8.0} MB {:>12} {:>8.0} % {:>11} {:>8.2} %",
            figures.devices.name(),
            figures.epoch_s,
            figures.texts_per_s,
            largest,
            figures.peak_main_mb,
            or_none(figures.peak_other_mb, "MB"),
            figures.cpu_main_percent,
            or_none(figures.cpu_other_percent, "%"),
            100.0 * figures.accuracy
        );
    }
    let epoch = |wanted| all.iter().find(|figures| figures.devices.strategy == wanted);
    if let (Some(dp), Some(ddp)) = (epoch(Strategy::Dp), epoch(Strategy::Ddp)) {
        println!("ddp is {:.2} times as fast as dp", dp.epoch_s / ddp.epoch_s);
    }
}

fn draw(path: &Path, all: &[Figures], memory: Option<usize>) -> Result<()> {
    let one = |title: &str, digits, value: &dyn Fn(&Figures) -> f64| Panel {
        title: title.to_owned(),
        groups: all
            .iter()
            .map(|figures| (figures.devices.name().to_owned(), vec![(value(figures), ORANGE)]))
            .collect(),
        digits,
    };
    let two = |title: &str, value: &dyn Fn(&Figures) -> (f64, Option<f64>)| Panel {
        title: title.to_owned(),
        groups: all
            .iter()
            .map(|figures| {
                let (main, other) = value(figures);
                let bars = [(main, ORANGE)].into_iter().chain(other.map(|other| (other, BLUE)));
                (figures.devices.name().to_owned(), bars.collect())
            })
            .collect(),
        digits: 0,
    };
    let mut panels = vec![
        one("time of an epoch (s)", 1, &|figures| figures.epoch_s),
        two("peak memory (MB)", &|figures| (figures.peak_main_mb, figures.peak_other_mb)),
        two("processor use (% of one)", &|figures| (figures.cpu_main_percent, figures.cpu_other_percent)),
        one("texts a second", 1, &|figures| figures.texts_per_s),
    ];
    if let Some(megabytes) = memory {
        let title = format!("largest batch of a device in {megabytes} MB");
        panels.push(one(&title, 0, &|figures| figures.largest_batch.unwrap_or(0) as f64));
    }
    panels.push(one("held-out accuracy (%)", 1, &|figures| 100.0 * figures.accuracy));
    let legend =
        [("main replica, rank 0, or all together", ORANGE), ("the busiest or largest of the others", BLUE)];
    bars::draw(path, &legend, &panels, 3)
}

/// This program with its own arguments and more, in a process of its own, so that none sees another's memory.
fn own(devices: Devices, figures: &Path) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1));
    command.args(["--strategy", devices.name(), "--figures"]).arg(figures);
    Ok(command)
}

fn timed(devices: Devices, folder: &Path) -> Result<Figures> {
    let figures = folder.join("figures.json");
    ensure!(own(devices, &figures)?.status()?.success(), "{} failed", devices.name());
    let text = std::fs::read(&figures).with_context(|| format!("{} left no figures", devices.name()))?;
    Ok(serde_json::from_slice(&text)?)
}

/// The largest batch of a device that trains while no device holds more than `limit` bytes: each is tried.
fn largest_batch(devices: Devices, limit: usize) -> Result<usize> {
    let (mut has_room, mut has_none) = (0, 1);
    while fits(devices, has_none, limit)? {
        has_room = has_none;
        if has_none >= MAX_BATCH {
            return Ok(has_room);
        }
        has_none *= 2;
    }
    while has_none - has_room > 1 {
        let middle = has_room.midpoint(has_none);
        if fits(devices, middle, limit)? {
            has_room = middle;
        } else {
            has_none = middle;
        }
    }
    Ok(has_room)
}

fn fits(devices: Devices, batch: usize, limit: usize) -> Result<bool> {
    let mut command = own(devices, Path::new("/dev/null"))?;
    command.args(["--batch-size", &batch.to_string(), "--limit-bytes", &limit.to_string()]);
    let output = command.stdout(Stdio::null()).stderr(Stdio::piped()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return Ok(true);
    }
    if said.contains(memory::EXCEEDED) {
        return Ok(false);
    }
    bail!("{} with a batch of {batch} failed: {said}", devices.name())
}

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
pub fn measure(
    subject: Subject,
    group: &phalanx::ProcessGroup,
    (mut peaks, scope): (Peaks, Scope),
    options: &CompareOptions,
) -> Result<()> {
    let train = options.train();
    let Subject { task, model, devices } = subject;
    let batch_size = train.batch_size * devices.batches();
    let loading = Loading { batch_size, num_workers: train.num_workers };
    let loader = loading.training(&task, group, train.seed, &burn::tensor::Device::flex().autodiff())?;
    let mut engine = Engine::new(model, train.optimizer()?, (devices, group), None, Some(scope))?;
    peaks.restart();
    if let Some(bytes) = options.limit_bytes {
        peaks.limit(bytes);
    }
    let total = loader.len() as u64 * train.epochs;
    let (mut step, mut fastest) = (0, (f64::INFINITY, 0.0, 0.0));
    for _ in 0..train.epochs {
        group.barrier()?;
        let clocks = Clocks::now();
        for batch in &loader {
            train.seed_step(step, group);
            engine.step(&*task, vec![batch?], (train.rate(step, total), train.max_norm))?;
            step += 1;
            if step <= TRIED_STEPS as u64 {
                peaks.look()?;
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
    let found = evaluate(&task, engine.model(), group, loading)?;
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
    };
    let path = options.figures.as_ref().context("--figures is not set")?;
    Ok(std::fs::write(path, serde_json::to_vec(&figures)?)?)
}
