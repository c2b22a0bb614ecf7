//! What the negotiation costs: the same gradients through the reducer of `Ddp`, whose order is planned, and by name.
//!
//! `cargo run --release -p phalanx-horovod --example cost -- 220` starts two ranks. A backward pass is some arithmetic for each of 24
//! gradients (12 of 1 MiB, 12 of 4 KiB), here 220 passes over 64 KiB of floats; the four kinds of steps take turns, and the medians
//! are printed. By name they are submitted from ordinary memory, and from memory of [`Horovod::alloc`], as `DistributedOptimizer` does.

use std::hint::black_box;
use std::time::{Duration, Instant};

use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::{DType, Error, Result};
use phalanx_horovod::{Horovod, Op, Options, Tensor};

const LAYERS: usize = 12;
const SIZES: [usize; 2] = [1 << 18, 1 << 10];
const STEPS: usize = 41;

fn main() -> Result<()> {
    let passes = std::env::args().nth(1).map_or(Ok(220), |passes| passes.parse());
    let passes = passes
        .map_err(|_| Error::invalid_argument("give the number of passes over 64 KiB for each gradient"))?;
    phalanx::spawn(2, || measure(passes))
}

fn measure(passes: usize) -> Result<()> {
    let work = || work(passes);
    let group = phalanx::init()?;
    let hvd = Horovod::new(&group, Options::from_env()?)?;
    let lengths: Vec<usize> = (0..LAYERS).flat_map(|_| SIZES).collect();
    let specs = lengths.iter().enumerate();
    let specs =
        specs.map(|(index, length)| ParameterSpec::new(format!("p{index}"), [*length], DType::F32)).collect();
    let mut reducer = Reducer::new(std::sync::Arc::new(group.clone()), specs, ReducerOptions::default())?;
    let names: Vec<String> = (0..lengths.len()).map(|index| format!("gradient.p{index}")).collect();
    let source: Vec<f32> = vec![1.0; SIZES[0]];
    // What an optimizer gets: memory of its own for each gradient.
    let mut planned: Vec<Vec<u8>> = vec![Vec::new(); lengths.len()];
    let mut named: Vec<Option<Tensor>> = lengths.iter().map(|_| None).collect();
    let own = |length: &usize| hvd.alloc(DType::F32, *length, Op::Average).map(Tensor::from).map(Some);
    let mut in_place = lengths.iter().map(own).collect::<Result<Vec<_>>>()?;

    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..STEPS {
        group.barrier()?;
        let begin = Instant::now();
        lengths.iter().rev().for_each(|_| work());
        times[0].push(begin.elapsed());

        group.barrier()?;
        let begin = Instant::now();
        reducer.start()?;
        for (index, length) in lengths.iter().enumerate().rev() {
            work();
            reducer.ready(index, bytemuck::cast_slice(&source[..*length]))?;
        }
        reducer.finish()?;
        for (index, gradient) in planned.iter_mut().enumerate() {
            *gradient = reducer.gradient(index)?.map_or_else(Vec::new, <[u8]>::to_vec);
        }
        times[1].push(begin.elapsed());

        group.barrier()?;
        let begin = Instant::now();
        let mut handles = Vec::with_capacity(lengths.len());
        for (index, length) in lengths.iter().enumerate().rev() {
            work();
            handles.push((index, hvd.allreduce_async(&names[index], &source[..*length], Op::Average)?));
        }
        for (index, handle) in handles {
            named[index] = Some(handle.synchronize()?);
        }
        times[2].push(begin.elapsed());

        group.barrier()?;
        let begin = Instant::now();
        let mut handles = Vec::with_capacity(lengths.len());
        for (index, length) in lengths.iter().enumerate().rev() {
            work();
            let Some(mut tensor) = in_place[index].take() else { continue };
            tensor.as_mut_slice::<f32>()?.copy_from_slice(&source[..*length]);
            handles.push((index, hvd.allreduce_async(&names[index], tensor, Op::Average)?));
        }
        for (index, handle) in handles {
            in_place[index] = Some(handle.synchronize()?);
        }
        times[3].push(begin.elapsed());
    }
    black_box((&planned, &named, &in_place));
    if group.rank().is_main() {
        let [alone, planned, named, in_place] = times.map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2].as_secs_f64() * 1e3
        });
        println!(
            "a step without averages {alone:.1} ms, planned (Ddp) {planned:.1} ms, by name {named:.1} ms, in memory of \
             Horovod::alloc {in_place:.1} ms"
        );
        println!(
            "by name / planned: {:.3} and {:.3}; {:?}",
            named / planned,
            in_place / planned,
            hvd.stats()
        );
    }
    hvd.barrier()
}

/// So much arithmetic as a layer's backward pass.
fn work(passes: usize) {
    let mut values = [1.0f32; 16 << 10];
    for _ in 0..passes {
        for value in black_box(&mut values) {
            *value = *value * 0.999 + 0.001;
        }
    }
}
