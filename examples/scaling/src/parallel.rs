//! What the ways to spread one model over ranks cost: the same encoder and the same batch in each step, by one process, by
//! replicas, by sharded and by divided layers, and by a pipeline.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput, TransformerEncoderLayer,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Distribution, Tensor};
use common::median;
use phalanx::ProcessGroup;
use phalanx::pipeline::Schedule;
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup, ShardingOptions};
use phalanx_burn::parallel::pipeline::{Pipeline, Stage, StageOutput};
use phalanx_burn::parallel::tensor::{Activations, ParallelEncoder, TensorGroup};
use phalanx_burn::{Ddp, FusedAdamWConfig};

const WIDTH: usize = 512;
const LENGTH: usize = 64;
/// Divided by stages of pipelines with two and four ranks.
const LAYERS: usize = 4;
/// Rows of a step, over all ranks.
const ROWS: usize = 8;
const MICROBATCHES: usize = 4;
const WARM_UP: usize = 2;
/// Small enough that nothing is learned.
const LEARNING_RATE: f64 = 1e-6;

/// One step of each way: its time, and the bubble if it has one.
type Step<'a> = Box<dyn FnMut() -> Result<(Duration, Option<f64>)> + 'a>;

/// Measures all ways on `group`'s ranks, in turns; rank 0 prints a table.
pub fn measure_all(group: &ProcessGroup, steps: usize) -> Result<()> {
    let device = Device::flex().autodiff();
    let alone = ProcessGroup::alone()?;
    let ranks = group.world_size().count();
    ensure!(
        LAYERS.is_multiple_of(ranks) && ROWS.is_multiple_of(ranks),
        "{LAYERS} layers and {ROWS} rows cannot be divided evenly among {ranks} ranks: take --parallel 2 or --parallel 4"
    );
    let mut ways: Vec<(&str, usize, Step<'_>)> = Vec::new();
    let mut add = |name, (parameters, step)| ways.push((name, parameters, step));
    add("one process", replicas(&alone, ROWS, &device)?);
    add("Ddp", replicas(group, ROWS / ranks, &device)?);
    add("zero2", sharded(group, false, ROWS / ranks, &device)?);
    add("zero3", sharded(group, true, ROWS / ranks, &device)?);
    add("tensor", divided(group, Activations::Replicated, &device)?);
    add("tensor, sequence", divided(group, Activations::Sequence, &device)?);
    add("GPipe", staged(group, Schedule::GPipe, false, &device)?);
    add("1F1B", staged(group, Schedule::OneForwardOneBackward, false, &device)?);
    add("1F1B, recomputed", staged(group, Schedule::OneForwardOneBackward, true, &device)?);
    // Each rank has two stages.
    if LAYERS.is_multiple_of(2 * ranks) {
        add("interleaved", staged(group, Schedule::Interleaved { stages_per_rank: 2 }, false, &device)?);
    }
    let mut times = vec![Vec::new(); ways.len()];
    let mut bubbles = vec![Vec::new(); ways.len()];
    for round in 0..WARM_UP + steps {
        for (index, (name, _, step)) in ways.iter_mut().enumerate() {
            group.barrier()?;
            if *name == "one process" && !group.rank().is_main() {
                continue;
            }
            let (time, bubble) = step()?;
            if round >= WARM_UP {
                times[index].push(time.as_secs_f64() * 1e3);
                bubbles[index].extend(bubble);
            }
        }
    }
    group.barrier()?;
    if group.rank().is_main() {
        if !LAYERS.is_multiple_of(2 * ranks) {
            println!("interleaved is left out: {LAYERS} layers are no two stages for each of {ranks} ranks");
        }
        println!(
            "{:<43} parameters of a rank   step   bubble",
            format!("{ranks} ranks, {MICROBATCHES} micro-batches")
        );
        for ((name, parameters, _), (times, bubbles)) in ways.iter().zip(times.into_iter().zip(bubbles)) {
            let bubble = (!bubbles.is_empty()).then(|| median(bubbles));
            show(name, *parameters, median(times), bubble);
        }
    }
    Ok(())
}

/// Prints a line of the table.
pub fn show(name: &str, parameters: usize, step_ms: f64, bubble: Option<f64>) {
    let bubble = bubble.map_or("-".to_owned(), |bubble| format!("{bubble:.2}"));
    println!("{name:43} {:>18.2} M {step_ms:>5.0} ms {bubble:>8}", parameters as f64 / 1e6);
}

fn config() -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 8, LAYERS).with_dropout(0.0)
}

fn head(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, 32).init(device)
}

/// The same on every rank, as ranks that divide a layer need it.
fn sample(rows: usize, device: &Device) -> Tensor<3> {
    device.seed(1);
    Tensor::random([rows, LENGTH, WIDTH], Distribution::Normal(0.0, 1.0), device)
}

fn loss(head: &Linear, x: Tensor<3>) -> Tensor<1> {
    (head.forward(x) - 1.0).powi_scalar(2).mean()
}

/// A model and its optimizer, which take a step.
fn trained<'a, M: Module + 'a>(mut ddp: Ddp<M>, forward: impl Fn(&M) -> Tensor<1> + 'a) -> (usize, Step<'a>) {
    let mut optimizer = FusedAdamWConfig::new().init();
    let parameters = ddp.model().num_params();
    let step = move || {
        let start = Instant::now();
        let loss = ddp.forward(&forward)?;
        let gradients = ddp.backward(&loss)?;
        ddp.step(&mut optimizer, LEARNING_RATE, gradients)?;
        Ok((start.elapsed(), None))
    };
    (parameters, Box::new(step))
}

fn replicas<'a>(group: &ProcessGroup, rows: usize, device: &'a Device) -> Result<(usize, Step<'a>)> {
    let ddp = Ddp::new((config().init(device), head(device)), group)?;
    Ok(trained(ddp, move |(encoder, head): &(TransformerEncoder, Linear)| {
        loss(head, encoder.forward(TransformerEncoderInput::new(sample(rows, device))))
    }))
}

/// Of which a rank has a shard of each layer.
#[derive(Module, Debug)]
struct Units {
    layers: Vec<FullySharded<TransformerEncoderLayer>>,
    head: FullySharded<Linear>,
}

impl Units {
    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let layer = |x, layer: &FullySharded<TransformerEncoderLayer>| {
            layer.forward(x, |layer, x| layer.forward(x, None, None))
        };
        self.head.forward(self.layers.iter().fold(x, layer), loss)
    }
}

fn sharded<'a>(
    group: &ProcessGroup,
    reshard_after_forward: bool,
    rows: usize,
    device: &'a Device,
) -> Result<(usize, Step<'a>)> {
    let mut options = ShardingOptions::default();
    options.reshard_after_forward = reshard_after_forward;
    let sharding = ShardingGroup::new(group)?.with_options(options);
    let layers = config().init(device).layers.into_iter().map(|layer| FullySharded::new(layer, &sharding));
    let model = Units {
        layers: layers.collect::<phalanx::Result<_>>()?,
        head: FullySharded::new(head(device), &sharding)?,
    };
    let mut fsdp = Fsdp::new(model, &sharding)?;
    let mut optimizer = FusedAdamWConfig::new().init();
    let parameters = fsdp.model().num_params();
    let step = move || {
        let start = Instant::now();
        let loss = fsdp.forward(|model| model.loss(sample(rows, device)))?;
        let gradients = fsdp.backward(&loss)?;
        fsdp.step(&mut optimizer, LEARNING_RATE, gradients)?;
        Ok((start.elapsed(), None))
    };
    Ok((parameters, Box::new(step)))
}

fn divided<'a>(
    group: &ProcessGroup,
    activations: Activations,
    device: &'a Device,
) -> Result<(usize, Step<'a>)> {
    let group = TensorGroup::new(group);
    let encoder = ParallelEncoder::new(config().init(device), &group, activations)?;
    let ddp = Ddp::new((encoder, group.replicate(head(device))?), &ProcessGroup::alone()?)?;
    Ok(trained(ddp, move |(encoder, head): &(ParallelEncoder, Linear)| {
        loss(head, encoder.forward(sample(ROWS, device), None, None))
    }))
}

/// Some layers, and the head in the last stage.
#[derive(Module, Debug)]
struct Part {
    encoder: TransformerEncoder,
    head: Option<Linear>,
}

impl Stage<3> for Part {
    type Batch = Tensor<3>;

    fn forward(&self, input: Option<Tensor<3>>, x: &Tensor<3>) -> StageOutput<3> {
        let x = self.encoder.forward(TransformerEncoderInput::new(input.unwrap_or_else(|| x.clone())));
        match &self.head {
            Some(head) => StageOutput::Loss(loss(head, x)),
            None => StageOutput::Hidden(x),
        }
    }
}

fn staged<'a>(
    group: &ProcessGroup,
    schedule: Schedule,
    recompute: bool,
    device: &'a Device,
) -> Result<(usize, Step<'a>)> {
    let mut pipeline = Pipeline::new(group, schedule, MICROBATCHES)?;
    if recompute {
        pipeline = pipeline.with_recomputation(1);
    }
    let each = LAYERS / pipeline.stages();
    let part = |stage| Part {
        encoder: TransformerEncoderConfig { n_layers: each, ..config() }.init(device),
        head: (stage + 1 == pipeline.stages()).then(|| head(device)),
    };
    let parts: Vec<Part> = pipeline.own_stages().map(part).collect();
    let mut ddp = Ddp::new(parts, &ProcessGroup::alone()?)?;
    let mut optimizer: ModuleOptimizer = FusedAdamWConfig::new().init();
    let parameters = ddp.model().num_params();
    let step = move || {
        let start = Instant::now();
        let batches: Vec<_> = (0..MICROBATCHES).map(|_| sample(ROWS / MICROBATCHES, device)).collect();
        let step = pipeline.train(&mut ddp, &batches)?;
        ddp.step(&mut optimizer, LEARNING_RATE, step.gradients)?;
        Ok((start.elapsed(), Some(step.bubble)))
    };
    Ok((parameters, Box::new(step)))
}
