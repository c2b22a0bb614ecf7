//! Measures the cost of the second rank. It compares a training step of two ranks that average gradients with two processes
//! that train side by side and never communicate, and with one process alone. One thread a rank, AdamW; the three take turns
//! step by step, and the figures are medians.
//!
//! ```sh
//! cargo run --release -p scaling                          # a table
//! cargo run --release -p scaling -- --json --models mlp   # a line for each model
//! PHALANX_TRACE=trace.json cargo run --release -p scaling # also: how much of the communication is hidden
//! cargo run --release -p scaling -- --view                # gradients stay in their buckets
//! cargo run --release -p scaling -- --horovod             # also: the same steps by Horovod's DistributedOptimizer
//! cargo run --release -p scaling -- --weighted            # also: the same steps by Ddp::backward_weighted
//! cargo run --release -p scaling -- --memory              # the most memory that a rank takes
//! cargo run --release -p scaling -- --parallel 2          # replicas, divided layers and pipelines on two ranks
//! cargo run --release -p scaling --features cuda -- --device cuda # on GPUs
//! cargo run --release -p scaling --features nccl -- --device cuda --nccl # their gradients averaged by NCCL
//! cargo run --release -p scaling --features tch -- --device libtorch # with PyTorch's kernels
//! ```
//!
//! With fewer devices than ranks, ranks share a device, and the figures contain the cost of sharing.
//!
//! On Flex and libtorch, if `python3` (or the program in `PYTHON`) finds PyTorch, the program then measures its DistributedDataParallel over gloo, with the same
//! models, batches and turns.

mod memory;
mod models;
mod named;
mod parallel;
mod pytorch;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use common::median;
use common::overlap::{self, Overlap};
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_burn::device::Kind;
use phalanx_burn::{Ddp, DdpOptions, FusedAdamWConfig};
use serde::{Deserialize, Serialize};

use models::{Encoder, Mlp, ResNet, Subject};
use named::Named;

const RANKS: u32 = 2;

/// Steps before anything is measured: memory is touched, buckets are rebuilt in the order of the gradients.
const WARM_UP: usize = 2;

/// Small enough that nothing is learned.
const LEARNING_RATE: f64 = 1e-6;

/// Measures what two ranks cost.
#[derive(Parser)]
struct Options {
    /// Which models
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["mlp", "encoder", "resnet"])]
    models: Vec<Name>,
    /// Measured steps of each kind
    #[arg(long, default_value_t = 11, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    steps: usize,
    /// One line of JSON for each model
    #[arg(long)]
    json: bool,
    /// The most memory that a rank takes, beyond a process that trains alone
    #[arg(long)]
    memory: bool,
    /// Compare replicas, divided layers and pipelines of one encoder, on this many ranks: 2 or 4
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(2..=4))]
    parallel: Option<u32>,
    /// Let the gradients stay in the buckets (`gradient_as_bucket_view`), PyTorch's too
    #[arg(long)]
    view: bool,
    /// Let the same steps be averaged by name, too, by Horovod's DistributedOptimizer, in turns with the others
    #[arg(long)]
    horovod: bool,
    /// Let the same steps be averaged by weight, too, by Ddp::backward_weighted, in turns with the others
    #[arg(long)]
    weighted: bool,
    /// On which kind of device: flex; with the feature of that name, cuda or wgpu; with the feature tch, libtorch
    #[arg(long, default_value = "flex", conflicts_with_all = ["memory", "parallel"])]
    device: Kind,
    /// Let NCCL average the gradients, on the device; ranks that share one need an NCCL_HOSTID each
    #[cfg(feature = "nccl")]
    #[arg(long, conflicts_with_all = ["weighted", "view"])]
    nccl: bool,
    /// Do without PyTorch, even if it is there
    #[arg(long)]
    without_pytorch: bool,
    /// Measure the memory of one kind, as a process of its own
    #[arg(long, hide = true)]
    kind: Option<memory::Kind>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Name {
    Mlp,
    Encoder,
    #[value(name = "resnet")]
    ResNet,
}

impl Name {
    fn text(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Encoder => "encoder",
            Self::ResNet => "resnet",
        }
    }
}

/// What was measured of one model. Times are of one step.
#[derive(Serialize, Deserialize)]
struct Figures {
    model: String,
    parameters: usize,
    /// One process, while the other waits.
    alone_ms: f64,
    /// Two processes side by side that never speak.
    independent_ms: f64,
    /// The slower of these two in each step. Ranks that wait for each other cannot be faster.
    slower_ms: f64,
    /// Two ranks.
    step_ms: f64,
    /// `step_ms / independent_ms`: 1 if communication cost nothing.
    ratio: f64,
    /// Over both ranks.
    samples_per_s: f64,
    /// Two ranks, by Horovod's DistributedOptimizer, and beside `step_ms`; only if they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    horovod_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    horovod_ratio: Option<f64>,
    /// Two ranks, by Ddp::backward_weighted, and beside `step_ms`; only if they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weighted_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weighted_ratio: Option<f64>,
    /// Only if a trace was asked for.
    #[serde(flatten, default, skip_deserializing)]
    overlap: Option<Overlap>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(kind) = options.kind {
        return Ok(phalanx::spawn(RANKS, || memory::measure_all(kind, &options.models))?);
    }
    if options.memory {
        return memory::compare(&options.models);
    }
    // Workers end in `spawn`; what follows is for the program that started them.
    match options.parallel {
        Some(ranks) => phalanx::spawn(ranks, || parallel::measure_all(&phalanx::init()?, options.steps))?,
        None => phalanx::spawn(RANKS, || measure_all(&options))?,
    }
    // PyTorch's are the processors.
    let on_processors = matches!(options.device, Kind::Flex | Kind::LibTorch);
    if options.without_pytorch || !on_processors {
        return Ok(());
    }
    match options.parallel {
        Some(ranks) => pytorch::measure_parallel(ranks, options.steps),
        None => pytorch::measure_all(&options),
    }
}

/// A launcher may have started others.
fn check_ranks(ranks: u32) -> Result<()> {
    ensure!(
        ranks == RANKS,
        "the figures are those of {RANKS} ranks, and there are {ranks}: start the program without a launcher, or with {RANKS} ranks"
    );
    Ok(())
}

fn measure_all(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    check_ranks(group.world_size().get())?;
    for (number, name) in options.models.iter().enumerate() {
        let figures = match name {
            Name::Mlp => measure::<Mlp>(*name, options, &group),
            Name::Encoder => measure::<Encoder>(*name, options, &group),
            Name::ResNet => measure::<ResNet>(*name, options, &group),
        }?;
        if group.rank().is_main() {
            show("", &figures, number == 0, options.json)?;
        }
    }
    Ok(())
}

/// A replica, and what trains it.
struct Trainer<M> {
    ddp: Ddp<M>,
    optimizer: ModuleOptimizer,
    device: Device,
    /// By how much this rank counts, if not as all others.
    weight: Option<f64>,
}

impl<M: Subject> Trainer<M> {
    fn new(group: &ProcessGroup, device: &Device, options: DdpOptions) -> Result<Self> {
        let device = device.clone().autodiff();
        Ok(Self::of(Ddp::with_options(M::new(&device), group, options)?, device))
    }

    /// Whose gradients NCCL averages, on the device with this `number`.
    #[cfg(feature = "nccl")]
    fn over_nccl(group: &ProcessGroup, device: &Device, number: usize, options: DdpOptions) -> Result<Self> {
        let cuda = phalanx_nccl::Device::open(u32::try_from(number)?)?;
        let group = phalanx_nccl::DeviceGroup::new(group.clone(), &cuda)?;
        let device = device.clone().autodiff();
        Ok(Self::of(Ddp::with_nccl(M::new(&device), &group, options)?, device))
    }

    fn of(ddp: Ddp<M>, device: Device) -> Self {
        Self { ddp, optimizer: FusedAdamWConfig::new().init(), device, weight: None }
    }

    /// Trains one step; gives its milliseconds.
    fn step(&mut self) -> Result<f64> {
        let input = M::sample(&self.device);
        self.device.sync()?;
        let start = Instant::now();
        let loss = self.ddp.forward(|model| model.loss(input))?;
        let gradients = match self.weight {
            None => self.ddp.backward(&loss)?,
            Some(weight) => self.ddp.backward_weighted(&loss, weight)?,
        };
        self.ddp.step(&mut self.optimizer, LEARNING_RATE, gradients)?;
        self.device.sync()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}

fn measure<M: Subject>(model: Name, options: &Options, group: &ProcessGroup) -> Result<Figures> {
    let mut ddp = DdpOptions::default();
    ddp.gradient_as_bucket_view = options.view;
    let devices = options.device.devices()?;
    let number = group.local_rank() as usize % devices.len().max(1);
    let device = devices.get(number).context("this host has no such device")?;
    #[cfg(feature = "nccl")]
    let mut together = match options.nccl {
        true => Trainer::<M>::over_nccl(group, device, number, ddp.clone())?,
        false => Trainer::<M>::new(group, device, ddp.clone())?,
    };
    #[cfg(not(feature = "nccl"))]
    let mut together = Trainer::<M>::new(group, device, ddp.clone())?;
    let mut by_weight = if options.weighted { Some(Trainer::<M>::new(group, device, ddp)?) } else { None };
    if let Some(by_weight) = &mut by_weight {
        by_weight.weight = Some(M::BATCH as f64);
    }
    let mut apart = Trainer::<M>::new(&ProcessGroup::alone()?, device, DdpOptions::default())?;
    let mut by_name = if options.horovod { Some(Named::<M>::new(group, device)?) } else { None };
    let began = overlap::now();
    let [mut step, mut independent, mut alone, mut named, mut weighted] = [const { Vec::new() }; 5];
    for round in 0..WARM_UP + options.steps {
        // What comes behind the step of one process alone, in which the other rank's processor was idle, is slower.
        for is_together in [round % 2 == 0, round % 2 != 0] {
            group.barrier()?;
            match is_together {
                true => step.push(together.step()?),
                false => independent.push(apart.step()?),
            }
        }
        if let Some(by_weight) = &mut by_weight {
            group.barrier()?;
            weighted.push(by_weight.step()?);
        }
        if let Some(by_name) = &mut by_name {
            group.barrier()?;
            named.push(by_name.step()?);
        }
        group.barrier()?;
        if group.rank().is_main() {
            alone.push(apart.step()?);
        }
    }
    group.barrier()?;

    let mean = |times: Vec<f64>| -> Result<f64> {
        let mut medians = vec![0.0; group.world_size().count()];
        group.all_gather(&[median(times)], &mut medians)?;
        Ok(medians.iter().sum::<f64>() / medians.len() as f64)
    };
    let horovod_ms = if by_name.is_some() { Some(mean(named.split_off(WARM_UP))?) } else { None };
    let weighted_ms = if by_weight.is_some() { Some(mean(weighted.split_off(WARM_UP))?) } else { None };
    let mut slower = independent.split_off(WARM_UP);
    let (step_ms, independent_ms) = (mean(step.split_off(WARM_UP))?, mean(slower.clone())?);
    group.all_reduce(&mut slower, ReduceOp::Max)?;
    Ok(Figures {
        model: model.text().to_owned(),
        parameters: together.ddp.model().num_params(),
        alone_ms: if alone.is_empty() { 0.0 } else { median(alone.split_off(WARM_UP)) },
        independent_ms,
        slower_ms: median(slower),
        step_ms,
        ratio: step_ms / independent_ms,
        samples_per_s: 1e3 * f64::from(RANKS) * M::BATCH as f64 / step_ms,
        horovod_ms,
        horovod_ratio: horovod_ms.map(|horovod| horovod / step_ms),
        weighted_ms,
        weighted_ratio: weighted_ms.map(|weighted| weighted / step_ms),
        overlap: Overlap::since(began, group)?,
    })
}

/// One line; `whose` if it is not ours.
fn show(whose: &str, figures: &Figures, first: bool, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(figures)?);
        return Ok(());
    }
    if first {
        println!(
            "one step          parameters     alone   2 apart    slower   2 ranks   ratio   samples/s   launch   hidden"
        );
    }
    let Figures {
        model, parameters, alone_ms, independent_ms, slower_ms, step_ms, ratio, samples_per_s, ..
    } = figures;
    let millions = *parameters as f64 / 1e6;
    let model = format!("{model} {whose}");
    print!(
        "{model:16} {millions:>9.2} M {alone_ms:>6.0} ms {independent_ms:>6.0} ms {slower_ms:>6.0} ms {step_ms:>6.0} ms {ratio:>7.3} {samples_per_s:>11.0}"
    );
    match &figures.overlap {
        Some(overlap) => {
            println!("   {:>4.0} %   {:>4.0} %", overlap.launch_at * 100.0, overlap.hidden * 100.0)
        }
        None => println!("        -        -"),
    }
    for (how, ms, ratio) in [
        ("Horovod's DistributedOptimizer", figures.horovod_ms, figures.horovod_ratio),
        ("Ddp::backward_weighted", figures.weighted_ms, figures.weighted_ratio),
    ] {
        if let (Some(ms), Some(ratio)) = (ms, ratio) {
            println!("{:16} two ranks by {how}: {ms:.0} ms, {ratio:.3} times Ddp::backward's", "");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_two_ranks_are_taken_of_no_other_number() {
        assert!(check_ranks(2).is_ok());
        for ranks in [1, 3] {
            assert!(check_ranks(ranks).unwrap_err().to_string().contains(&format!("there are {ranks}")));
        }
    }

    #[test]
    fn no_steps_are_no_measurement() {
        assert!(Options::try_parse_from(["scaling", "--steps", "1"]).is_ok());
        assert!(Options::try_parse_from(["scaling", "--steps", "0"]).is_err());
    }
}
