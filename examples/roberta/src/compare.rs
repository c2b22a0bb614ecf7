//! All strategies side by side: the same model, the same batches, one after the other in processes of their own.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use common::bars::{self, Panel};
use common::canvas::{BLUE, ORANGE};
use roberta::strategy::{Devices, Strategy};
use roberta::train::TrainOptions;
use serde::{Deserialize, Serialize};

use crate::largest::{Cap, largest_batch};

/// What is compared.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareOptions {
    /// Strategies, in this order
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Strategy::OF_DATA)]
    pub strategies: Vec<Strategy>,
    /// Ranks of a replica, with tensor and pipeline
    #[arg(long, default_value_t = 2)]
    pub parts: u32,
    /// How often each is timed, in turn; the fastest epoch counts, because others may use the machine too
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// Finds the largest batch with which no device needs more memory than so many megabytes
    #[arg(long, value_name = "MB")]
    pub memory: Option<usize>,
    /// Who refuses memory beyond that
    #[arg(long, value_enum, default_value = "allocator")]
    pub memory_by: Cap,
    /// Leaves out the timing: finds the largest batches alone
    #[arg(long, requires = "memory")]
    pub memory_alone: bool,
    /// Draws the result
    #[arg(long, value_name = "PNG")]
    pub plot: Option<PathBuf>,
    /// Adds the figures to a file of JSON lines, and begins with those that are there, if they are of this machine and of the same work
    #[arg(long, value_name = "JSONL")]
    pub keep: Option<PathBuf>,
    /// Passes over the training texts in each timing
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Texts in a step of one device
    #[arg(long, default_value_t = 16, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
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
    pub devices: Devices,
    /// The fastest.
    pub epoch_s: f64,
    pub texts_per_s: f64,
    /// Heap, at its highest, and buckets that processes share.
    pub peak_main_mb: f64,
    /// Of the replica or rank that held most besides; none if there is no other.
    pub peak_other_mb: Option<f64>,
    /// Processor time over time in the fastest epoch: 100 is one processor.
    pub cpu_main_percent: f64,
    /// Of the replica or rank that computed most besides.
    pub cpu_other_percent: Option<f64>,
    /// Texts of one device in the largest step that has room.
    pub largest_batch: Option<usize>,
    pub accuracy: f64,
    pub loss: f64,
    /// The machine, and what was trained how.
    #[serde(default)]
    pub conditions: String,
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

    /// Where figures are measured, and of what.
    fn conditions(&self, work: &str) -> String {
        let Self { epochs, batch_size, lr, seed, .. } = self;
        format!("{}; {work}, {epochs} epochs, batches of {batch_size}, lr {lr}, seed {seed}", machine())
    }

    /// An error if the kept figures of one strategy would stand beside new ones with which they cannot be compared. What is looked for
    /// with `--memory-alone` depends on the machine alone.
    fn check(&self, kept: &Figures, now: &str) -> Result<()> {
        let of = |conditions: &str| match self.memory_alone {
            true => conditions.split(';').next().unwrap_or_default().to_owned(),
            false => conditions.to_owned(),
        };
        let (before, now) = (of(&kept.conditions), of(now));
        ensure!(
            before == now,
            "--keep: the figures of {} there are of other conditions ({before}) than these ({now}): give --keep another file",
            kept.devices.name()
        );
        Ok(())
    }

    /// Keeps what has been measured so far, if it was asked to.
    fn save(&self, all: &[Figures]) -> Result<()> {
        let Some(path) = &self.keep else { return Ok(()) };
        let lines = all.iter().map(|figures| Ok(serde_json::to_string(figures)? + "\n"));
        let lines = lines.collect::<Result<String>>()?;
        // On a disk without room, what was kept stays.
        let mut new = path.clone().into_os_string();
        new.push(".new");
        std::fs::write(&new, lines)
            .and_then(|()| std::fs::rename(&new, path))
            .with_context(|| format!("{} cannot be written", path.display()))
    }
}

/// The processor, and how many of them this process may use.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, model)| model.trim());
    let processors = std::thread::available_parallelism().map_or(0, NonZero::get);
    format!("{model}, {processors} processors")
}

impl Figures {
    /// The faster ones, with the largest batch that was found before.
    fn or_faster(self, other: Self) -> Self {
        let largest_batch = other.largest_batch.or(self.largest_batch);
        let faster = if other.epoch_s < self.epoch_s { other } else { self };
        Self { largest_batch, ..faster }
    }
}

/// Compares all strategies; each is started as this program with `--strategy`.
pub fn compare(options: &CompareOptions, ranks: u32, work: &str) -> Result<()> {
    let conditions = options.conditions(work);
    let devices = |strategy| Devices::new(ranks, strategy, options.parts);
    if options.memory.is_some() {
        options.strategies.iter().try_for_each(|&strategy| options.memory_by.check(devices(strategy)))?;
    }
    let folder = tempfile::tempdir()?;
    let mut all: Vec<Figures> = match &options.keep {
        Some(path) if path.exists() => std::fs::read_to_string(path)?
            .lines()
            .zip(1..)
            .map(|(line, number)| {
                let place = || format!("{}:{number}: these are no figures of a comparison", path.display());
                serde_json::from_str(line).with_context(place)
            })
            .collect::<Result<_>>()?,
        _ => Vec::new(),
    };
    all.iter().try_for_each(|figures| options.check(figures, &conditions))?;
    let place = |all: &[Figures], devices| all.iter().position(|figures| figures.devices == devices);
    if !options.memory_alone {
        let turns = options.rounds * options.strategies.len();
        let mut turn = 0;
        for _ in 0..options.rounds {
            for &strategy in &options.strategies {
                let devices = devices(strategy);
                turn += 1;
                eprintln!("[{turn} of {turns}] {}, with the batches of {ranks} devices", devices.name());
                let figures = Figures { conditions: conditions.clone(), ..timed(devices, folder.path())? };
                let Figures { epoch_s, texts_per_s, .. } = figures;
                eprintln!(
                    "[{turn} of {turns}] {}: {epoch_s:.2} s an epoch, {texts_per_s:.1} texts/s",
                    devices.name()
                );
                match place(&all, devices) {
                    Some(place) => {
                        let figures = all[place].clone().or_faster(figures);
                        all[place] = figures;
                    }
                    None => all.push(figures),
                }
                options.save(&all)?;
            }
        }
    }
    if let Some(megabytes) = options.memory {
        for (turn, &strategy) in (1..).zip(&options.strategies) {
            let (devices, turns) = (devices(strategy), options.strategies.len());
            eprintln!(
                "[{turn} of {turns}] {}: the largest batch of a device within {megabytes} MB",
                devices.name()
            );
            // One device takes the batches of all.
            let each = if strategy == Strategy::Single { ranks as usize } else { 1 };
            let largest = each * largest_batch(devices, options.memory_by, megabytes * 1_000_000)?;
            let name = devices.name();
            println!("{name}: the largest batch of a device within {megabytes} MB is {largest}");
            if let Some(place) = place(&all, devices) {
                all[place].largest_batch = Some(largest);
                options.save(&all)?;
            }
        }
    }
    options.save(&all)?;
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
pub fn own(devices: Devices, figures: &Path) -> Result<Command> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_epoch_has_the_largest_batch_that_was_found_before() {
        let figures = |epoch_s, largest_batch| Figures {
            devices: Devices::new(2, Strategy::Ddp, 1),
            epoch_s,
            texts_per_s: 1.0,
            peak_main_mb: 1.0,
            peak_other_mb: None,
            cpu_main_percent: 100.0,
            cpu_other_percent: None,
            largest_batch,
            accuracy: 1.0,
            loss: 0.1,
            conditions: String::new(),
        };
        for (kept, now) in [(3.0, 2.0), (2.0, 3.0)] {
            let figures = figures(kept, Some(16)).or_faster(figures(now, None));
            assert_eq!((figures.epoch_s, figures.largest_batch), (2.0, Some(16)));
        }
    }
}
