#[path = "../scaling/models.rs"]
mod models;
use models::*;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use std::time::Instant;
fn run<S: Subject>(name: &str) {
    let device = Device::flex().autodiff();
    let mut m = S::new(&device);
    println!("{name} {} parameters", m.num_params());
    let mut opt = AdamWConfig::new().init();
    for _ in 0..6 {
        let x = S::sample(&device);
        let t = Instant::now();
        let l = m.loss(x);
        let f = t.elapsed();
        let grads = GradientsParams::from_grads(l.backward(), &m);
        let b = t.elapsed();
        m = opt.step(1e-4, m, grads);
        println!("{name} fwd {:.1} bwd {:.1} step {:.1} loss {:.3}", f.as_secs_f64()*1e3, (b-f).as_secs_f64()*1e3, t.elapsed().as_secs_f64()*1e3, l.into_scalar::<f32>());
    }
}
fn main() {
    run::<Mlp>("mlp"); run::<Encoder>("encoder"); run::<ResNet>("resnet");
}
