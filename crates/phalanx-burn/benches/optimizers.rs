//! A step of AdamW and of SGD over 22.7 M parameters: fused, as Burn has it, and the same traffic with no arithmetic to
//! speak of, which is what memory allows.
//!
//! ```sh
//! cargo bench -p phalanx-burn --bench optimizers
//! RAYON_NUM_THREADS=1 cargo bench -p phalanx-burn --bench optimizers # one thread, as a rank among others has
//! ```
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Distribution, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use phalanx_burn::{FusedAdamWConfig, FusedSgdConfig};
use rayon::prelude::*;

/// Elements that a thread takes at a time in the bare loops.
const CHUNK: usize = 1 << 15;

/// The parameters of a transformer's encoder with six layers.
#[derive(Module, Debug)]
struct Model {
    tokens: Embedding,
    encoder: TransformerEncoder,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(7300, 512).init(device),
            encoder: TransformerEncoderConfig::new(512, 2048, 8, 6).init(device),
        }
    }

    /// Gradients that nobody else holds, as a backward pass leaves them.
    fn gradients(&self) -> GradientsParams {
        struct Random(GradientsParams);
        impl ModuleVisitor for Random {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let device = param.device().inner();
                let gradient = Tensor::random(param.shape(), Distribution::Uniform(-1e-3, 1e-3), &device);
                self.0.register::<D>(param.id, gradient);
            }
        }
        let mut random = Random(GradientsParams::new());
        self.visit(&mut random);
        random.0
    }
}

/// The time of `count` steps; what comes before each is not part of it.
fn steps(model: &mut Option<Model>, optimizer: &mut ModuleOptimizer, count: u64) -> Duration {
    let mut time = Duration::ZERO;
    for _ in 0..count {
        let Some(before) = model.take() else { continue };
        let gradients = before.gradients();
        let start = Instant::now();
        *model = Some(optimizer.step(1e-4, before, gradients));
        time += start.elapsed();
    }
    time
}

fn optimizers(criterion: &mut Criterion) {
    let parameters = Model::new(&Device::flex().autodiff()).num_params();
    let momentum = || Some(MomentumConfig::new());
    let adamw = [("fused", FusedAdamWConfig::new().init()), ("burn", AdamWConfig::new().init())];
    // Parameter, gradient and two moments are read; parameter and moments are written.
    compare(criterion, "adamw", parameters, 7, adamw, |p, g, m, v| {
        let m_next = *m + g;
        (*p, *m, *v) = (*p + m_next, m_next, *v + g);
    });
    let sgd = [
        ("fused", FusedSgdConfig::new().with_momentum(momentum()).init()),
        ("burn", SgdConfig::new().with_momentum(momentum()).init()),
    ];
    compare(criterion, "sgd with momentum", parameters, 5, sgd, |p, g, m, _| {
        let m_next = *m + g;
        (*p, *m) = (*p + m_next, m_next);
    });
}

fn compare(
    criterion: &mut Criterion,
    name: &str,
    parameters: usize,
    transfers: u64,
    optimizers: [(&str, ModuleOptimizer); 2],
    touch: impl Fn(&mut f32, f32, &mut f32, &mut f32) + Sync + Copy,
) {
    let mut group = criterion.benchmark_group(format!("{name}, {:.1} M parameters", parameters as f64 / 1e6));
    group.throughput(Throughput::Bytes(transfers * 4 * parameters as u64)).sample_size(10);
    for (which, mut optimizer) in optimizers {
        let mut model = Some(Model::new(&Device::flex().autodiff()));
        steps(&mut model, &mut optimizer, 2);
        group.bench_function(which, |bencher| {
            bencher.iter_custom(|count| steps(&mut model, &mut optimizer, count));
        });
    }
    let [mut p, g, mut m, mut v] = [1.0f32, 1e-9, 1e-9, 1e-9].map(|value| vec![value; parameters]);
    group.bench_function("memory", |bencher| {
        bencher.iter(|| {
            p.par_chunks_mut(CHUNK)
                .zip(g.par_chunks(CHUNK))
                .zip(m.par_chunks_mut(CHUNK))
                .zip(v.par_chunks_mut(CHUNK))
                .for_each(|(((p, g), m), v)| {
                    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                        touch(p, *g, m, v);
                    }
                });
            black_box((&mut p, &mut m, &mut v));
        });
    });
    group.finish();
}

criterion_group!(benches, optimizers);
criterion_main!(benches);
