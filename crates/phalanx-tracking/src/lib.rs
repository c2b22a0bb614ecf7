//! The record of a distributed training run.
//!
//! Every rank has a [`Run`] and makes the same calls; rank 0 alone writes: event files for TensorBoard, JSON lines, CSV, and the
//! one progress bar of the job. [`logs`] sends the logs of rank 0 to the terminal, and every rank's into a file of its own.
//!
//! ```no_run
//! use phalanx_tracking::{Console, Run, RunOptions, Traffic, logs};
//!
//! fn train() -> phalanx::Result<()> {
//!     let group = phalanx::init()?;
//!     let console = Console::stderr();
//!     logs::install(group.rank(), "runs/digits/logs", &console)?;
//!     let options = RunOptions::new("runs/digits").tensorboard().json_lines().progress(&console, Some(1000));
//!     let run = Run::start(&group, options)?;
//!     for step in 0..1000 {
//!         let loss = 0.5; // of this rank's part of the batch
//!         run.log_mean(step, "loss", loss)?; // one number, of all ranks
//!         run.log(step, "learning_rate", 1e-3); // rank 0's, which is everybody's
//!         if step % 100 == 0 {
//!             run.log_system(step, Traffic::default())?; // processor time and memory of every rank
//!         }
//!     }
//!     run.finish()?;
//!     Ok(())
//! }
//! ```
//!
//! # The record
//!
//! | file | has |
//! |---|---|
//! | `run.json` | each attempt: when, by which process, how it ended; see [`RunStatus`] |
//! | `run.lock` | nothing: whoever writes the record holds a lock on it |
//! | `events.out.tfevents.*` | everything, for TensorBoard; a file for each attempt |
//! | `metrics.jsonl`, `media/` | everything, an object a line; pictures as files |
//! | `metrics.csv` | the scalars |
//! | `superseded.jsonl`, `superseded.csv` | what later attempts have superseded |
//!
//! A record can be read at any moment. While a run is open, `run.json` says `running` and names the process. That process holds a
//! lock, which ends with it. So [`RunStatus::read`] can tell a killed run from a running one, and the next start marks a killed run as
//! failed.
//!
//! # wandb
//!
//! There is no sink for Weights & Biases: the format of its offline runs is not documented, and only its own library writes it. The
//! JSON lines have the values that `wandb.log` takes. A [`Sink`] of your own can send them.
#![forbid(unsafe_code)]

mod console;
mod histogram;
pub mod logs;
mod named;
mod options;
mod picture;
mod queue;
mod record;
mod run;
pub mod sinks;
mod state;
mod system;
mod writer;

pub use console::Console;
pub use histogram::Histogram;
pub use options::RunOptions;
pub use picture::Picture;
pub use record::{Hyperparameter, Record, Value};
pub use run::{Outcome, Run};
pub use sinks::Sink;
pub use state::{Attempt, RunState, RunStatus};
pub use system::Traffic;
pub use writer::{Report, SinkReport};

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    use std::time::{SystemTime, UNIX_EPOCH};
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The programs of the README and of the guide must compile.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/tracking.md")]
    struct Tracking;
}
