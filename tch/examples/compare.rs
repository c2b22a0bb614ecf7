//! A rank of `compare.py`: trains a step of the model that its first argument names whenever a line on standard input asks for one,
//! and prints its milliseconds. The second argument says where: `cpu`; `cuda`, with gradients averaged in the host's memory; or `nccl`.
//!
//! The models, batches and the optimizer are those of `bench/peers/ddp.py`.

use std::error::Error;
use std::io::BufRead;
use std::time::Instant;

use phalanx::ProcessGroup;
use phalanx_nccl::DeviceGroup;
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule};
use tch::nn::{self, ConvConfig, Module, Path, VarStore};
use tch::{Device, Kind, Tensor};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Small enough that nothing is learned.
const LEARNING_RATE: f64 = 1e-6;

/// A model, and the data that it would see: random, new in every step, and with random answers.
struct Subject {
    batch: i64,
    classes: i64,
    sample: fn(Device) -> Tensor,
    logits: Box<dyn Fn(&Tensor) -> Tensor>,
}

/// Four dense layers: 10.5 M parameters.
fn mlp(root: &Path<'_>) -> Subject {
    let widths = [1024, 2048, 2048, 2048];
    let layer = |(index, w): (usize, &[i64])| nn::linear(root / index, w[0], w[1], Default::default());
    let layers: Vec<_> = widths.windows(2).enumerate().map(layer).collect();
    let head = nn::linear(root / "head", 2048, 10, Default::default());
    let logits = move |x: &Tensor| {
        let hidden = layers.iter().fold(x.shallow_clone(), |x, layer| layer.forward(&x).relu());
        head.forward(&hidden)
    };
    Subject {
        batch: 128,
        classes: 10,
        sample: |device| Tensor::randn([128, 1024], (Kind::Float, device)),
        logits: Box::new(logits),
    }
}

/// Six layers of a transformer's encoder over embedded tokens: 22.7 M parameters.
fn encoder(root: &Path<'_>) -> Subject {
    const WIDTH: i64 = 512;
    let tokens = nn::embedding(root / "tokens", 7300, WIDTH, Default::default());
    let positions = nn::embedding(root / "positions", 64, WIDTH, Default::default());
    let layers: Vec<_> = (0..6).map(|index| encoder_layer(&(root / index), WIDTH, 8)).collect();
    let head = nn::linear(root / "head", WIDTH, 32, Default::default());
    let logits = move |x: &Tensor| {
        let embedded = tokens.forward(x) + positions.forward(&Tensor::arange(64, (Kind::Int64, x.device())));
        let encoded = layers.iter().fold(embedded, |x, layer| layer(&x));
        head.forward(&encoded.mean_dim(1, false, Kind::Float))
    };
    Subject {
        batch: 8,
        classes: 32,
        sample: |device| Tensor::randint(7300, [8, 64], (Kind::Int64, device)),
        logits: Box::new(logits),
    }
}

/// As PyTorch's: attention and a feed-forward network, each added and then normalised.
fn encoder_layer(root: &Path<'_>, width: i64, heads: i64) -> Box<dyn Fn(&Tensor) -> Tensor> {
    let inward = nn::linear(root / "in", width, 3 * width, Default::default());
    let outward = nn::linear(root / "out", width, width, Default::default());
    let first = nn::linear(root / "first", width, 4 * width, Default::default());
    let second = nn::linear(root / "second", 4 * width, width, Default::default());
    let norms =
        [1, 2].map(|index| nn::layer_norm(root / format!("norm{index}"), vec![width], Default::default()));
    Box::new(move |x| {
        let (batch, length, _) = x.size3().unwrap_or_default();
        let parts = inward.forward(x).view([batch, length, 3, heads, width / heads]).permute([2, 0, 3, 1, 4]);
        let [query, key, value] = [0, 1, 2].map(|part| parts.select(0, part));
        let mixed = Tensor::scaled_dot_product_attention(
            &query,
            &key,
            &value,
            None::<&Tensor>,
            0.0,
            false,
            None,
            false,
        );
        let mixed = outward.forward(&mixed.transpose(1, 2).reshape([batch, length, width]));
        let x = norms[0].forward(&(x + mixed));
        let fed = second.forward(&first.forward(&x).gelu("none"));
        norms[1].forward(&(x + fed))
    })
}

/// A residual network of 20 layers for 32 x 32 pixels, with batch norm: 0.27 M parameters.
fn resnet(root: &Path<'_>) -> Subject {
    let stem = normed(&(root / "stem"), 3, 16, 3, 1);
    let stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)];
    let blocks =
        stages.into_iter().flat_map(|(from, to, stride)| [(from, to, stride), (to, to, 1), (to, to, 1)]);
    let blocks: Vec<_> = blocks.enumerate().map(|(index, shape)| block(&(root / index), shape)).collect();
    let head = nn::linear(root / "head", 64, 10, Default::default());
    let logits = move |x: &Tensor| {
        let features = blocks.iter().fold(stem(x).relu(), |x, block| block(&x));
        head.forward(&features.mean_dim([2i64, 3].as_slice(), false, Kind::Float))
    };
    Subject {
        batch: 64,
        classes: 10,
        sample: |device| Tensor::randn([64, 3, 32, 32], (Kind::Float, device)),
        logits: Box::new(logits),
    }
}

type Layer = Box<dyn Fn(&Tensor) -> Tensor>;

fn normed(root: &Path<'_>, from: i64, to: i64, kernel: i64, stride: i64) -> Layer {
    let config = ConvConfig { stride, padding: kernel / 2, bias: false, ..Default::default() };
    let conv = nn::conv2d(root / "conv", from, to, kernel, config);
    let norm = nn::batch_norm2d(root / "norm", to, Default::default());
    Box::new(move |x| x.apply(&conv).apply_t(&norm, true))
}

fn block(root: &Path<'_>, (from, to, stride): (i64, i64, i64)) -> Layer {
    let first = normed(&(root / "first"), from, to, 3, stride);
    let second = normed(&(root / "second"), to, to, 3, 1);
    let shortcut = (from != to).then(|| normed(&(root / "shortcut"), from, to, 1, stride));
    Box::new(move |x| {
        let y = second(&first(x).relu());
        (y + shortcut.as_ref().map_or_else(|| x.shallow_clone(), |shortcut| shortcut(x))).relu()
    })
}

/// A replica, and what trains it.
struct Trainer {
    device: Device,
    subject: Subject,
    ddp: Ddp,
    optimizer: Optimizer,
    parameters: usize,
}

impl Trainer {
    fn new(model: &str, place: &str, group: &ProcessGroup) -> Outcome<Self> {
        let number = || group.local_rank() as usize % tch::Cuda::device_count().max(1) as usize;
        let device = match place {
            "cpu" => Device::Cpu,
            "cuda" | "nccl" => Device::Cuda(number()),
            other => return Err(format!("there is no device {other}").into()),
        };
        let store = VarStore::new(device);
        let subject = match model {
            "mlp" => mlp(&store.root()),
            "encoder" => encoder(&store.root()),
            "resnet" => resnet(&store.root()),
            other => return Err(format!("there is no model {other}").into()),
        };
        let parameters = store.trainable_variables().iter().map(Tensor::numel).sum();
        let ddp = match place {
            "nccl" => {
                let cuda = phalanx_nccl::Device::open(u32::try_from(number())?)?;
                Ddp::with_nccl(&store, &DeviceGroup::new(group.clone(), &cuda)?, DdpOptions::default())?
            }
            _ => Ddp::new(&store, group)?,
        };
        let optimizer = Optimizer::new(&store, Rule::ADAMW)?;
        Ok(Self { device, subject, ddp, optimizer, parameters })
    }

    fn synchronize(&self) {
        if let Device::Cuda(number) = self.device {
            tch::Cuda::synchronize(number as i64);
        }
    }

    /// Trains one step; gives its milliseconds.
    fn step(&mut self) -> Outcome<f64> {
        let Subject { batch, classes, sample, logits } = &self.subject;
        let input = sample(self.device);
        self.synchronize();
        let start = Instant::now();
        let answers = Tensor::randint(*classes, [*batch], (Kind::Int64, self.device));
        self.optimizer.zero_grad()?;
        let loss = self.ddp.forward(|| logits(&input).cross_entropy_for_logits(&answers))?;
        self.ddp.backward(&loss)?;
        self.optimizer.step(LEARNING_RATE)?;
        self.synchronize();
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}

fn main() -> Outcome<()> {
    tch::set_num_threads(1);
    let model = std::env::args().nth(1).ok_or("which model: mlp, encoder or resnet?")?;
    let place = std::env::args().nth(2).unwrap_or_else(|| "cpu".into());
    let group = phalanx::init()?;
    let mut together = Trainer::new(&model, &place, &group)?;
    let alone = ProcessGroup::alone()?;
    let mut apart = Trainer::new(&model, &place, &alone)?;
    println!("{}", apart.parameters);
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "together" => println!("{}", together.step()?),
            "apart" => println!("{}", apart.step()?),
            other => return Err(format!("no step {other}").into()),
        }
    }
    Ok(())
}
