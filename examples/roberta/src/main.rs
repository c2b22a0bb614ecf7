//! Fine-tunes or pre-trains RoBERTa or BERT on several ranks, and compares the ways to train on several devices. See README.md.
//!
//! ```sh
//! examples/roberta/fetch.py                          # mails and a small BERT, through npm and pip
//! cargo run --release -p roberta -- fine-tune --out runs/spam
//! ```

mod compare;
mod largest;
mod measure;
mod perplexity;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::{Parser, Subcommand};
use common::memory::{self, Allocator};
use phalanx::{Error, ProcessGroup};
use phalanx_tracking::{Console, logs};

use crate::compare::{CompareOptions, compare};
use crate::measure::{Saying, Subject, measure};
use roberta::data::Dataset;
use roberta::strategy::{Devices, Strategy};
use roberta::tasks::{Classification, MaskedLanguage, ReadOptions};
use roberta::text::{Text, train_byte_level};
use roberta::train::{TrainOptions, fit};
use roberta::weights::Head;
use roberta::{Config, MaskedLm};

#[global_allocator]
static ALLOCATOR: Allocator = memory::allocator();

const DATA: &str = "out/roberta/mails";
const MODEL: &str = "out/roberta/minilm";
const TOKENIZER: &str = "out/roberta/tokenizer.json";

/// Fine-tunes or pre-trains RoBERTa or BERT on several ranks.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Learns which label a text has
    FineTune {
        #[command(flatten)]
        model: Pretrained,
        #[command(flatten)]
        how: How,
        #[command(flatten)]
        job: Job,
        #[command(flatten)]
        train: TrainOptions,
    },
    /// Fine-tunes with each strategy: time, memory, processor time, accuracy, and the largest batch
    #[command(args_override_self = true)]
    Compare {
        #[command(flatten)]
        model: Pretrained,
        #[command(flatten)]
        job: Job,
        #[command(flatten)]
        options: CompareOptions,
    },
    /// Learns a language from masked texts, from random weights on
    Pretrain {
        /// The model's size
        #[arg(long, default_value = "examples/roberta/models/tiny-roberta/config.json")]
        config: PathBuf,
        /// The model's tokenizer
        #[arg(long, default_value = TOKENIZER)]
        tokenizer: PathBuf,
        /// Characters of a text that are one example
        #[arg(long, default_value_t = 400)]
        characters: usize,
        /// Draws the perplexity of each step and epoch
        #[arg(long, value_name = "PNG")]
        plot: Option<PathBuf>,
        #[command(flatten)]
        how: How,
        #[command(flatten)]
        job: Job,
        #[command(flatten)]
        train: TrainOptions,
    },
    /// Learns a byte-level BPE from the training texts
    Tokenizer {
        /// Folder with train.jsonl, held-out.jsonl and labels.json
        #[arg(long, default_value = DATA)]
        data: PathBuf,
        /// How many tokens it has
        #[arg(long, default_value_t = 4096)]
        vocabulary: usize,
        /// File to write
        #[arg(long, default_value = TOKENIZER)]
        out: PathBuf,
    },
}

#[derive(Clone, clap::Args)]
struct Pretrained {
    /// Folder with config.json, tokenizer.json, and model.safetensors or the files of model.safetensors.index.json
    #[arg(long, default_value = MODEL)]
    model: PathBuf,
    /// Begin with a random classification head, whichever the model has
    #[arg(long)]
    new_head: bool,
}

#[derive(Clone, clap::Args)]
struct How {
    /// How the ranks, or the replicas of one process, train together
    #[arg(long, value_enum, default_value = "ddp")]
    strategy: Strategy,
    /// Ranks of a replica, with --strategy tensor and pipeline
    #[arg(long, default_value_t = 2)]
    parts: u32,
}

#[derive(Clone, clap::Args)]
struct Job {
    /// Devices: worker processes to start, unless a launcher has started this one; with --strategy dp and towers, replicas
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Folder with train.jsonl, held-out.jsonl and labels.json
    #[arg(long, default_value = DATA)]
    data: PathBuf,
    /// Tokens to which texts are cut
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// Accept a tokenizer with fewer tokens than the model has rows for
    #[arg(long)]
    allow_unused_tokens: bool,
    /// The share of what is dropped everywhere, in place of what config.json says
    #[arg(long)]
    dropout: Option<f64>,
    /// Take the first so many training examples alone
    #[arg(long)]
    train_limit: Option<usize>,
    /// Take the first so many held-out examples alone
    #[arg(long)]
    held_out_limit: Option<usize>,
}

/// How often a line says how far it is, where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

impl Job {
    fn run(&self, processes: u32, worker: impl FnOnce(&ProcessGroup, Dataset) -> Result<()>) -> Result<()> {
        let worker = || {
            let group = phalanx::init()?;
            let run = || {
                let data =
                    brought(&self.data, DATA, "examples/roberta/fetch.py", || Dataset::read(&self.data))?;
                let data = data.limited(self.train_limit, self.held_out_limit);
                if group.rank().is_main() {
                    data.warnings().iter().for_each(|warning| eprintln!("warning: {warning}"));
                }
                worker(&group, data)
            };
            // The other ranks, which may have sound files, would never hear why this one has ended.
            run().inspect_err(|error| group.abort_all(Error::other(format!("{error:#}"))))
        };
        // `{:#}` shows causes, too.
        match processes {
            1 => worker(),
            processes => Ok(phalanx::spawn(processes, || worker().map_err(|error| format!("{error:#}")))?),
        }
    }
}

/// What `read` gives. If `path` is the `default` one and is not there, the error says which `command` makes it.
fn brought<T>(path: &Path, default: &str, command: &str, read: impl FnOnce() -> Result<T>) -> Result<T> {
    let absent = path == Path::new(default) && !path.exists();
    let read = read();
    if absent { read.with_context(|| format!("{default} is not there: `{command}` makes it")) } else { read }
}

/// The terminal, for the progress bar and the logs; each rank's logs go into a file of the run.
fn console(group: &ProcessGroup, train: &TrainOptions) -> Result<Console> {
    let console = Console::stderr().lines_every(LINE_INTERVAL);
    logs::install(group.rank(), train.out.join("logs"), &console)?;
    Ok(console)
}

fn main() -> Result<()> {
    match Options::parse().command {
        Command::FineTune { model, how, job, train } => {
            let devices = Devices::new(job.ranks, how.strategy, how.parts);
            job.run(devices.processes(), |group, data| {
                let console = console(group, &train)?;
                let Subject { task, model, .. } = subject(&model, &job, train.seed, devices, data)?;
                fit(&task, model, (devices.of(group), group), &train, &console)?;
                Ok(())
            })
        }
        Command::Compare { model, job, options } => {
            let Some(strategy) = options.strategy else {
                return compare(&options, job.ranks, &work(&model, &job));
            };
            let devices = Devices::new(job.ranks, strategy, options.parts);
            job.run(devices.processes(), |group, data| {
                let observed = measure::begin(devices)?;
                Saying::new(devices, group).now("reads model and tokenizer");
                let subject = subject(&model, &job, options.train().seed, devices, data)?;
                measure(subject, group, observed, &options)
            })
        }
        Command::Pretrain { config, tokenizer, characters, plot, how, job, train } => {
            let devices = Devices::new(job.ranks, how.strategy, how.parts);
            job.run(devices.processes(), |group, data| {
                let console = console(group, &train)?;
                let config = Config::read(&config)?;
                let config = match job.dropout {
                    Some(dropout) => config.with_dropout(dropout)?,
                    None => config,
                };
                let text = brought(&tokenizer, TOKENIZER, "roberta tokenizer", || {
                    Text::open(&tokenizer, &config, job.max_tokens)
                })?;
                if !job.allow_unused_tokens {
                    text.check_unused()?;
                }
                let device = Device::flex().autodiff();
                device.seed(train.seed);
                let model = MaskedLm::new(&config, &device);
                let task = MaskedLanguage::new(config, text, &data, characters);
                let epochs = fit(&Arc::new(task), model, (devices.of(group), group), &train, &console)?;
                match plot.as_ref().filter(|_| group.rank().is_main()) {
                    Some(path) => perplexity::draw(path, &train.out, &epochs),
                    None => Ok(()),
                }
            })
        }
        Command::Tokenizer { data, vocabulary, out } => {
            let data = brought(&data, DATA, "examples/roberta/fetch.py", || Dataset::read(&data))?;
            if let Some(folder) = out.parent() {
                fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
            }
            train_byte_level(data.train.iter().map(|example| example.text.as_str()), vocabulary, &out)
        }
    }
}

/// What is trained: figures of other work are not comparable.
fn work(from: &Pretrained, job: &Job) -> String {
    let head = if from.new_head { ", a new head" } else { "" };
    let (model, data) = (from.model.display(), job.data.display());
    let Job { max_tokens, dropout, train_limit, held_out_limit, .. } = job;
    format!(
        "{model}{head} on {data}, {max_tokens} tokens, dropout {dropout:?}, limits {train_limit:?} and {held_out_limit:?}"
    )
}

/// A classifier, the same on every rank, and what it learns.
fn subject(from: &Pretrained, job: &Job, seed: u64, devices: Devices, data: Dataset) -> Result<Subject> {
    let device = Device::flex().autodiff();
    device.seed(seed);
    let options = ReadOptions {
        max_tokens: job.max_tokens,
        dropout: job.dropout,
        head: if from.new_head { Head::New } else { Head::Kept },
        allow_unused_tokens: job.allow_unused_tokens,
    };
    let (task, model, loaded) = brought(&from.model, MODEL, "examples/roberta/fetch.py", || {
        Classification::pretrained(&from.model, options, data, &device)
    })?;
    if !loaded.new.is_empty() {
        tracing::info!("random at first: {}", loaded.new.join(", "));
    }
    if !loaded.ignored.is_empty() {
        tracing::info!("not used: {}", loaded.ignored.join(", "));
    }
    Ok(Subject { task: Arc::new(task), model, devices })
}
