//! Trains a small network on several processes, in step with a checkpoint:
//! `phalanx run --nproc-per-node 2 -- target/debug/examples/train`. With the name of a folder it saves there, and goes on from there.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, ParamsAdamW, VarBuilder, VarMap, linear};
use phalanx::checkpoint::Checkpoints;
use phalanx::reducer::ReducerOptions;
use phalanx::sampler::DistributedSampler;
use phalanx_candle::{AdamW, Ddp};

const SAMPLES: usize = 2048;
const EPOCHS: u64 = 5;

fn model(vb: &VarBuilder<'_>, x: &Tensor) -> candle_core::Result<Tensor> {
    let hidden = linear(2, 32, vb.pp("hidden"))?.forward(x)?.tanh()?;
    linear(32, 1, vb.pp("output"))?.forward(&hidden)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = phalanx::init()?; // as the launcher says; alone, a world of one
    // The same points on every rank, and what the network is to learn of each.
    let points: Vec<f32> =
        (0..2 * SAMPLES).map(|index| (index as f32 * 0.754_877).fract() * 2.0 - 1.0).collect();
    let xs = Tensor::from_vec(points, (SAMPLES, 2), &Device::Cpu)?;
    let ys = (xs.narrow(1, 0, 1)? * xs.narrow(1, 1, 1)?)?;

    let map = VarMap::new();
    model(&VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), &xs)?; // makes the variables
    let mut ddp = Ddp::new(&map, &group, ReducerOptions::default())?; // every rank takes over rank 0's
    let mut optimizer = AdamW::new(&map, ParamsAdamW { lr: 1e-2, ..ParamsAdamW::default() })?;
    let mut sampler = DistributedSampler::for_group(SAMPLES, &group);

    let checkpoints = std::env::args().nth(1).map(|folder| Checkpoints::open(folder, &group)).transpose()?;
    let mut first = 0;
    if let Some(saved) = checkpoints.as_ref().map(Checkpoints::newest).transpose()?.flatten() {
        ddp.load(&mut optimizer, &saved)?;
        first = saved.step();
    }
    for epoch in first..EPOCHS {
        sampler.set_epoch(epoch);
        for batch in sampler.indices().chunks(32) {
            let batch: Vec<u32> = batch.iter().map(|&index| index as u32).collect();
            let batch = Tensor::new(batch, &Device::Cpu)?;
            let (x, y) = (xs.index_select(&batch, 0)?, ys.index_select(&batch, 0)?);
            let loss = ddp.forward(|vb| (model(&vb, &x)? - y)?.sqr()?.mean_all())?;
            let mut gradients = ddp.backward(&loss)?; // the average over all ranks
            ddp.clip_grad_norm(&mut gradients, 1.0)?;
            optimizer.step(&gradients)?;
        }
        if let Some(checkpoints) = &checkpoints {
            checkpoints.save(epoch + 1, |snapshot| ddp.save(&optimizer, snapshot))?;
        }
    }
    if let Some(checkpoints) = &checkpoints {
        checkpoints.finish()?;
    }
    // The variables themselves, without hooks.
    let output = model(&VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), &xs)?;
    let error = (output - ys)?.sqr()?.mean_all()?.to_scalar::<f32>()?;
    if !ddp.replicas_identical()? || error > 0.02 {
        return Err(format!("the replicas differ, or the mean square error is {error}").into());
    }
    if group.rank().is_main() {
        println!("mean square error {error:.4}  ranks {}", group.world_size());
    }
    Ok(())
}
