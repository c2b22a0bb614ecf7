//! An elastic job in which something fails every so often, for as long as one likes.
//!
//! The workers train the network again and again, a few epochs each time, so that there are many accuracies to compare
//! with those of a job without faults, which is run first.

mod faults;
mod report;
mod seen;
mod system;
mod worker;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::Args;
use parking_lot::Mutex;
use phalanx::WorldSize;
use phalanx::launch::{self, Event, Job};

use faults::{Injector, Outcome};
use report::Report;
use seen::Seen;
pub use worker::Worker;

/// No fault is made so shortly before the end.
const LAST_FAULT_GRACE: Duration = Duration::from_secs(8);

#[derive(Args)]
pub struct Options {
    /// How long faults are made
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Seconds from one fault to the next
    #[arg(long, default_value_t = 15.0)]
    every: f64,
    /// Workers
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// Trainings without faults, to compare with
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    compare: u64,
    /// Epochs of a training
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Decides which faults are made
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder with the digits, as gzip-compressed IDX files
    #[arg(long, default_value = digits::FOLDER)]
    data: PathBuf,
}

/// A job that has ended.
struct Trial {
    seen: Seen,
    outcome: Outcome,
    report: launch::Report,
    lasted: Duration,
}

pub fn run(options: Options) -> Result<()> {
    // NaN is in no range.
    ensure!((1e-3..=1e6).contains(&options.minutes), "--minutes is from 0.001 to 1000000");
    ensure!((1e-3..=1e6).contains(&options.every), "--every is from 0.001 to 1000000");
    let orders = tempfile::tempdir().context("there is no folder for temporary files")?;
    println!("{} trainings without faults", options.compare);
    let quiet = trial(&options, orders.path(), Duration::MAX)?;
    println!("{:.0} minutes with a fault each {} s, seed {}", options.minutes, options.every, options.seed);
    let (memory, descriptors) = (system::shared_memory(), system::Held::by(std::process::id()));
    let soaked = trial(&options, orders.path(), Duration::from_secs_f64(60.0 * options.minutes))?;
    let report = Report {
        workers: options.workers as usize,
        quiet,
        soaked,
        processes: system::processes_with(worker::ORDERS, orders.path()),
        shared_memory: system::shared_memory().difference(&memory).cloned().collect(),
        descriptors: (descriptors, system::Held::by(std::process::id())),
    };
    print!("{report}");
    report.check()
}

/// Runs the workers; for `time` and with faults, or without any until there is enough to compare with.
fn trial(options: &Options, orders: &Path, time: Duration) -> Result<Trial> {
    let start = Instant::now();
    let with_faults = start.checked_add(time);
    let faults = if with_faults.is_some() { (time.as_secs_f64() / options.every) as u32 } else { 0 };
    let program = std::env::current_exe().context("this program's own path is not known")?;
    let data = options.data.to_str().context("the path of the digits is not UTF-8")?;
    let mut job = Job::new(program, WorldSize::new(options.workers)?)
        .arguments(["--commit-every", "5", "--epochs", &options.epochs.to_string(), "--data", data])
        .min_workers(WorldSize::new(2.min(options.workers))?)
        .max_restarts(2 * faults)
        .variable(worker::ORDERS, orders)
        .variable("RAYON_NUM_THREADS", "1");
    job = if with_faults.is_some() {
        let until = SystemTime::now().duration_since(UNIX_EPOCH)? + time;
        job.variable(worker::UNTIL, until.as_secs().to_string())
    } else {
        job.variable(worker::TRAININGS, options.compare.to_string())
    };
    let (seen, ended) = (Arc::new(Mutex::new(Seen::default())), Arc::new(AtomicBool::new(false)));
    let injector = Injector {
        seen: Arc::clone(&seen),
        ended: Arc::clone(&ended),
        workers: options.workers as usize,
        every: Duration::from_secs_f64(options.every),
        until: with_faults.map_or(start, |end| end.checked_sub(LAST_FAULT_GRACE).unwrap_or(start)),
        orders: orders.to_owned(),
        random: options.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
        outcome: Outcome::default(),
        calm: false,
        measured: None,
        met: Default::default(),
    };
    let (report, outcome) = thread::scope(|scope| {
        let injector = scope.spawn(|| injector.run());
        let report = job.run(&mut |event: Event<'_>| {
            seen.lock().note(&event, Instant::now());
            ControlFlow::Continue(())
        });
        ended.store(true, Ordering::Relaxed);
        (report, injector.join())
    });
    let outcome = outcome.map_err(|_| anyhow::anyhow!("the thread that makes faults has panicked"))?;
    let seen = std::mem::take(&mut *seen.lock());
    Ok(Trial { seen, outcome, report: report?, lasted: start.elapsed() })
}
