//! Trains one model with one global batch in two ways: `DataParallel`, with replicas as threads of one process, and `Ddp`, with
//! ranks as processes. It shows a table, draws it, and fails if `Ddp` is not faster, or if the models differ.
//!
//! ```sh
//! cargo run --release -p dp_vs_ddp
//! cargo run --release -p dp_vs_ddp -- --replicas 4 --steps 50 --plot dp_vs_ddp.png
//! cargo run --release -p dp_vs_ddp --features cuda -- --device cuda # on GPUs, with the memory of each
//! ```

mod device_memory;
mod plot;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor, TensorData};
use clap::{Parser, ValueEnum};
use common::memory::{self, Allocator, Peaks};
use common::overlap::{self, Overlap};
use device_memory::DeviceMemory;
use phalanx::ProcessGroup;
use phalanx_burn::device::{self, Kind};
use phalanx_burn::{DataParallel, Ddp, FusedAdamWConfig, Transfers};
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATOR: Allocator = memory::allocator();

/// Steps before anything is measured.
const WARM_UP: usize = 3;

/// Trains the same model both ways.
#[derive(Parser)]
struct Options {
    /// Replicas, or ranks
    #[arg(long, default_value_t = 2)]
    replicas: usize,
    /// Samples in a step of all replicas together
    #[arg(long, default_value_t = 128)]
    batch_size: usize,
    /// Steps in the epoch
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// Epochs of each way, in turn; the fastest counts, because others may use the machine too
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// On which kind of device: flex; with the feature of that name, cuda
    #[arg(long, default_value = "flex")]
    device: Kind,
    /// Draw the result
    #[arg(long, value_name = "PNG")]
    plot: Option<PathBuf>,
    /// One way alone, its result into a file: how the program starts itself
    #[arg(long, value_enum, requires = "out", hide = true)]
    way: Option<Way>,
    #[arg(long, hide = true)]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Way {
    Dp,
    Ddp,
}

/// What was measured of one way.
#[derive(Serialize, Deserialize)]
struct Figures {
    way: String,
    epoch_s: f64,
    samples_per_s: f64,
    /// Heap, at its highest, and buckets that processes share; on CUDA the memory of devices.
    peak_main_mb: f64,
    peak_other_mb: f64,
    /// Of each device, on CUDA.
    devices_mb: Vec<f64>,
    /// Of the threads of Burn's kernels in one process.
    peak_kernels_mb: f64,
    /// In a step: between devices; or what a rank gave to collectives.
    moved_mb: f64,
    /// In a step, while nothing is computed.
    waiting_ms: f64,
    loss: f32,
}

impl Figures {
    fn or_faster(self, other: Self) -> Self {
        if other.epoch_s < self.epoch_s { other } else { self }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let Options { replicas, batch_size, steps, .. } = options;
    ensure!(replicas > 0 && steps > 0, "--replicas and --steps are 1 or more");
    ensure!(
        batch_size > 0 && batch_size.is_multiple_of(replicas),
        "--batch-size {batch_size} cannot be divided among {replicas} replicas: take a multiple of {replicas}"
    );
    ensure!(
        matches!(options.device, Kind::Flex | Kind::Cuda),
        "the devices are flex or cuda, and not {}",
        options.device
    );
    match (options.way, &options.out) {
        (Some(Way::Dp), Some(out)) => data_parallel(&options, out),
        (Some(Way::Ddp), Some(out)) => {
            Ok(phalanx::spawn(options.replicas as u32, || distributed(&options, out))?)
        }
        _ => compare(&options),
    }
}

fn compare(options: &Options) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut dp = measured("dp", options, folder.path())?;
    let mut ddp = measured("ddp", options, folder.path())?;
    for _ in 1..options.rounds {
        dp = dp.or_faster(measured("dp", options, folder.path())?);
        ddp = ddp.or_faster(measured("ddp", options, folder.path())?);
    }
    println!(
        "way            epoch   samples/s   peak main   peak other   peak kernels   moved/step   waiting/step"
    );
    for figures in [&dp, &ddp] {
        let Figures { way, epoch_s, samples_per_s, peak_main_mb, peak_other_mb, .. } = figures;
        let Figures { peak_kernels_mb, moved_mb, waiting_ms, .. } = figures;
        println!(
            "{way:12} {epoch_s:>5.2} s {samples_per_s:>11.0} {peak_main_mb:>8.0} MB {peak_other_mb:>9.0} MB \
             {peak_kernels_mb:>11.0} MB {moved_mb:>9.1} MB {waiting_ms:>11.1} ms"
        );
    }
    for Figures { way, devices_mb, .. } in [&dp, &ddp] {
        for (number, mb) in devices_mb.iter().enumerate() {
            println!("{way:12} device {number}: {mb:.0} MB used");
        }
    }
    println!("Ddp is {:.2} times as fast", dp.epoch_s / ddp.epoch_s);
    if let Some(path) = &options.plot {
        plot::draw(path, &dp, &ddp)?;
    }
    ensure!((dp.loss - ddp.loss).abs() < 1e-3 * dp.loss.abs(), "losses of {} and {}", dp.loss, ddp.loss);
    // It is not known of GPUs, whose drivers and links differ.
    ensure!(options.device == Kind::Cuda || ddp.epoch_s < dp.epoch_s, "Ddp is slower");
    Ok(())
}

/// Each way in processes of its own, so that neither sees the other's memory.
fn measured(way: &str, options: &Options, folder: &Path) -> Result<Figures> {
    let out = folder.join(way);
    let mut command = Command::new(std::env::current_exe()?);
    for (option, value) in
        [("--replicas", options.replicas), ("--batch-size", options.batch_size), ("--steps", options.steps)]
    {
        command.args([option, &value.to_string()]);
    }
    command.args(["--device", &options.device.to_string(), "--way", way, "--out"]).arg(&out);
    if way == "dp" {
        // As many threads for kernels as the ranks have together.
        command.env("RAYON_NUM_THREADS", options.replicas.to_string());
    } else {
        // How long ranks wait for each other stands there.
        command.env("PHALANX_TRACE", folder.join("trace.json"));
    }
    ensure!(command.status()?.success(), "{way} failed");
    let text = std::fs::read(&out).with_context(|| format!("{way} left no figures"))?;
    Ok(serde_json::from_slice(&text)?)
}

fn data_parallel(options: &Options, out: &Path) -> Result<()> {
    let (peaks, scope) = memory::of_replicas(options.replicas)?;
    let devices = devices(options)?;
    let mut used = match options.device {
        Kind::Cuda => DeviceMemory::begin(
            (0..options.replicas as u32).map(phalanx_nccl::Device::open).collect::<phalanx::Result<_>>()?,
        )?,
        _ => DeviceMemory::default(),
    };
    let device = devices[0].clone();
    let mut parallel = replicated(Mlp::new(&device), devices, options.device)?.with_scope(scope);
    let mut optimizer = optimizer();
    let (mut start, mut before, mut last) = (Instant::now(), Transfers::default(), 0.0);
    for step in 0..WARM_UP + options.steps {
        if step == WARM_UP {
            (start, before) = (Instant::now(), parallel.transfers());
        }
        let (x, y) = samples(step * options.batch_size, options.batch_size, &device);
        let output = parallel.forward(x, Mlp::forward)?;
        let loss = (output - y).powi_scalar(2).mean();
        let gradients = parallel.backward(&loss)?;
        parallel.step(&mut optimizer, 1e-4, gradients)?;
        last = loss.into_scalar::<f32>();
        used.look()?;
    }
    let moved = parallel.transfers().total();
    let before = before.total();
    let steps = options.steps as f64;
    let epoch_s = start.elapsed().as_secs_f64();
    save(
        out,
        &Figures {
            way: "DataParallel".to_owned(),
            epoch_s,
            samples_per_s: steps * options.batch_size as f64 / epoch_s,
            peak_main_mb: main_of(&used.mb()).unwrap_or_else(|| peaks.main_mb()),
            peak_other_mb: other_of(&used.mb()).unwrap_or_else(|| peaks.other_mb()),
            devices_mb: used.mb(),
            peak_kernels_mb: peaks.kernels_mb(),
            moved_mb: (moved.bytes - before.bytes) as f64 / steps / 1e6,
            waiting_ms: (moved.time - before.time).as_secs_f64() * 1e3 / steps,
            loss: last,
        },
    )
}

fn distributed(options: &Options, out: &Path) -> Result<()> {
    let peaks = Peaks::begin()?;
    let group = phalanx::init()?;
    let mut used = match options.device {
        Kind::Cuda => DeviceMemory::begin(vec![phalanx_nccl::Device::of_local_rank(&group)?])?,
        _ => DeviceMemory::default(),
    };
    let device = device::for_local_rank(options.device)?.autodiff();
    let mut ddp = averaging(Mlp::new(&device), &group, options.device)?;
    let mut optimizer = optimizer();
    let own = options.batch_size / options.replicas;
    let (mut start, mut began, mut before, mut last) = (Instant::now(), 0.0, 0, 0.0);
    for step in 0..WARM_UP + options.steps {
        if step == WARM_UP {
            peaks.look()?;
            group.barrier()?;
            (start, began, before) = (Instant::now(), overlap::now(), ddp.communicated_bytes());
        }
        let (x, y) = samples(step * options.batch_size + group.rank().index() * own, own, &device);
        let loss = ddp.forward(|model| (model.forward(x) - y).powi_scalar(2).mean())?;
        let gradients = ddp.backward(&loss)?;
        ddp.step(&mut optimizer, 1e-4, gradients)?;
        last = loss.into_scalar::<f32>();
        used.look()?;
    }
    group.barrier()?;
    let epoch_s = start.elapsed().as_secs_f64();
    peaks.look()?;
    ensure!(ddp.replicas_identical()?, "the replicas differ");
    let mean = ddp.mean(last)?;
    let all = group.all_gather_object(&(peaks.main_mb(), peaks.kernels_mb()))?;
    let devices_mb = group.all_gather_object(&used.mb())?.concat();
    let Some(overlap) = Overlap::since(began, &group)? else {
        ensure!(!group.rank().is_main(), "rank 0 has no trace of its backward passes");
        return Ok(());
    };
    save(
        out,
        &Figures {
            way: "Ddp".to_owned(),
            epoch_s,
            samples_per_s: (options.steps * options.batch_size) as f64 / epoch_s,
            peak_main_mb: main_of(&devices_mb).unwrap_or(all[0].0),
            peak_other_mb: other_of(&devices_mb)
                .unwrap_or_else(|| all[1..].iter().map(|(rank, _)| *rank).fold(0.0, f64::max)),
            devices_mb,
            peak_kernels_mb: all.iter().map(|(_, kernels)| *kernels).fold(0.0, f64::max),
            moved_mb: (ddp.communicated_bytes() - before) as f64 / options.steps as f64 / 1e6,
            waiting_ms: overlap.waiting_ms,
            loss: mean as f32,
        },
    )
}

/// The devices of the replicas, with autodiff: one for each, or the processors for all.
fn devices(options: &Options) -> Result<Vec<Device>> {
    let found = options.device.devices()?;
    Ok(match options.device {
        Kind::Flex => vec![Device::flex().autodiff(); options.replicas],
        kind if found.len() < options.replicas => {
            bail!(
                "{} replicas need as many devices, and there are {} of kind {kind}",
                options.replicas,
                found.len()
            )
        }
        _ => found.into_iter().take(options.replicas).map(Device::autodiff).collect(),
    })
}

/// On CUDA NCCL moves parameters and gradients.
fn replicated(model: Mlp, devices: Vec<Device>, kind: Kind) -> Result<DataParallel<Mlp, 2>> {
    #[cfg(feature = "cuda")]
    if kind == Kind::Cuda {
        let cuda =
            (0..devices.len() as u32).map(phalanx_nccl::Device::open).collect::<phalanx::Result<Vec<_>>>()?;
        let groups = phalanx_nccl::DeviceGroup::of_devices(&cuda)?;
        return Ok(DataParallel::with_nccl(model, devices, groups)?);
    }
    ensure!(kind != Kind::Cuda, "this program was built without its feature cuda");
    Ok(DataParallel::new(model, devices)?)
}

/// On CUDA NCCL averages the gradients.
fn averaging(model: Mlp, group: &ProcessGroup, kind: Kind) -> Result<Ddp<Mlp>> {
    #[cfg(feature = "cuda")]
    if kind == Kind::Cuda {
        let device = phalanx_nccl::Device::of_local_rank(group)?;
        let group = phalanx_nccl::DeviceGroup::new(group.clone(), &device)?;
        return Ok(Ddp::with_nccl(model, &group, phalanx_burn::DdpOptions::default())?);
    }
    ensure!(kind != Kind::Cuda, "this program was built without its feature cuda");
    Ok(Ddp::new(model, group)?)
}

/// Of the memory of devices that of the main one, and the most of another; None if there are no devices.
fn main_of(devices_mb: &[f64]) -> Option<f64> {
    devices_mb.first().copied()
}

fn other_of(devices_mb: &[f64]) -> Option<f64> {
    let (_, others) = devices_mb.split_first()?;
    Some(others.iter().copied().fold(0.0, f64::max))
}

fn save(out: &Path, figures: &Figures) -> Result<()> {
    Ok(std::fs::write(out, serde_json::to_vec(figures)?)?)
}

fn optimizer() -> ModuleOptimizer {
    FusedAdamWConfig::new().init()
}

/// Four dense layers: 11.5 M parameters.
#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
    head: Linear,
    relu: Relu,
}

impl Mlp {
    const WIDTHS: [usize; 4] = [1024, 2048, 2048, 2048];
    const OUTPUTS: usize = 512;

    fn new(device: &Device) -> Self {
        device.seed(1);
        let layer = |w: &[usize]| LinearConfig::new(w[0], w[1]).init(device);
        let head = LinearConfig::new(Self::WIDTHS[3], Self::OUTPUTS).init(device);
        Self { layers: Self::WIDTHS.windows(2).map(layer).collect(), head, relu: Relu::new() }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.layers.iter().fold(x, |x, layer| self.relu.forward(layer.forward(x))))
    }
}

/// Samples of a data set without end.
fn samples(from: usize, count: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let wave = |width: usize, scale: f32| {
        let value = |i: usize| ((i % 1_000_003) as f32 * scale).sin();
        let values: Vec<f32> = (from * width..(from + count) * width).map(value).collect();
        Tensor::from_data(TensorData::new(values, [count, width]), device)
    };
    (wave(Mlp::WIDTHS[0], 0.1), wave(Mlp::OUTPUTS, 0.37))
}
