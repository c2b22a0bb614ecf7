//! Fine-tunes or pre-trains RoBERTa or BERT on several ranks. See README.md.
//!
//! ```sh
//! examples/roberta/fetch.py                          # mails and a small BERT, through npm and pip
//! cargo run --release -p roberta -- fine-tune --out runs/spam
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::{Parser, Subcommand};
use phalanx::ProcessGroup;
use phalanx_tracking::{Console, logs};

use roberta::data::Dataset;
use roberta::tasks::{Classification, MaskedLanguage};
use roberta::text::{Text, train_byte_level};
use roberta::train::{TrainOptions, fit};
use roberta::{Classifier, Config, MaskedLm, weights};

const DATA: &str = "out/roberta/mails";

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
        /// Folder with config.json, model.safetensors and tokenizer.json
        #[arg(long, default_value = "out/roberta/minilm")]
        model: PathBuf,
        #[command(flatten)]
        job: Job,
        #[command(flatten)]
        train: TrainOptions,
    },
    /// Learns a language from masked texts, from random weights on
    Pretrain {
        /// The model's size
        #[arg(long, default_value = "examples/roberta/models/tiny-roberta/config.json")]
        config: PathBuf,
        /// The model's tokenizer
        #[arg(long, default_value = "out/roberta/tokenizer.json")]
        tokenizer: PathBuf,
        /// Characters of a text that are one example
        #[arg(long, default_value_t = 400)]
        characters: usize,
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
        #[arg(long, default_value = "out/roberta/tokenizer.json")]
        out: PathBuf,
    },
}

#[derive(Clone, clap::Args)]
struct Job {
    /// Worker processes to start, unless a launcher has started this one
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Folder with train.jsonl, held-out.jsonl and labels.json
    #[arg(long, default_value = DATA)]
    data: PathBuf,
    /// Tokens to which texts are cut
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// Take the first so many training examples alone
    #[arg(long)]
    train_limit: Option<usize>,
    /// Take the first so many held-out examples alone
    #[arg(long)]
    held_out_limit: Option<usize>,
}

/// How often a line says how far it is, where there is no terminal.
const LINES_EVERY: Duration = Duration::from_secs(10);

impl Job {
    fn run(
        &self,
        train: &TrainOptions,
        worker: impl FnOnce(&ProcessGroup, Dataset, &Console) -> Result<()>,
    ) -> Result<()> {
        let worker = || {
            let group = phalanx::init()?;
            let console = Console::stderr().lines_every(LINES_EVERY);
            logs::install(group.rank(), train.out.join("logs"), &console)?;
            let data = Dataset::read(&self.data)
                .context("examples/roberta/fetch.py brings the mails")?
                .limited(self.train_limit, self.held_out_limit);
            worker(&group, data, &console)
        };
        // `{:#}` shows causes, too.
        match self.ranks {
            1 => worker(),
            ranks => Ok(phalanx::spawn(ranks, || worker().map_err(|error| format!("{error:#}")))?),
        }
    }
}

fn main() -> Result<()> {
    match Options::parse().command {
        Command::FineTune { model, job, train } => {
            job.run(&train, |group, data, console| fine_tune(&model, &job, &train, group, data, console))
        }
        Command::Pretrain { config, tokenizer, characters, job, train } => {
            job.run(&train, |group, data, console| {
                let config = Config::read(&config)?;
                let text = Text::open(&tokenizer, &config, job.max_tokens)
                    .context("`roberta tokenizer` learns one from the training texts")?;
                let device = Device::flex().autodiff();
                device.seed(train.seed);
                let model = MaskedLm::new(&config, &device);
                let task = MaskedLanguage::new(config, text, &data, characters);
                fit(&Arc::new(task), model, group, &train, console)?;
                Ok(())
            })
        }
        Command::Tokenizer { data, vocabulary, out } => {
            let data = Dataset::read(&data)?;
            if let Some(folder) = out.parent() {
                fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
            }
            train_byte_level(data.train.iter().map(|example| example.text.as_str()), vocabulary, &out)
        }
    }
}

fn fine_tune(
    folder: &Path,
    job: &Job,
    train: &TrainOptions,
    group: &ProcessGroup,
    data: Dataset,
    console: &Console,
) -> Result<()> {
    let config = Config::read(&folder.join("config.json"))?;
    let text = Text::open(&folder.join("tokenizer.json"), &config, job.max_tokens)?;
    let device = Device::flex().autodiff();
    device.seed(train.seed);
    let mut model = Classifier::new(&config, data.labels.len(), &device);
    let loaded = weights::load(&mut model, config.model_type, &folder.join("model.safetensors"))?;
    if group.rank().is_main() {
        console.println(&format!("random at first: {}", loaded.new.join(", ")));
    }
    fit(&Arc::new(Classification { config, text, data }), model, group, train, console)?;
    Ok(())
}
