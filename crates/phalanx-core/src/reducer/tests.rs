//! The reducer on several ranks, over a group of threads.

mod buckets;
mod elsewhere;
mod equality;
mod failures;
mod memory;
mod sharding;
mod unused;
mod weights;

use super::fake::{Call, FakeGroup, Kind, run};
use super::*;
use crate::group::GroupHandle;

const AVERAGE: Kind = Kind::AllReduce(ReduceOp::Avg);

/// Options with buckets of `elements` f32.
fn buckets_of(elements: usize) -> ReducerOptions {
    ReducerOptions::default().bucket_cap_mb((elements * 4) as f64 / (1 << 20) as f64)
}

fn parameters(sizes: &[usize]) -> Vec<ParameterSpec> {
    let spec = |(index, &size): (usize, &usize)| ParameterSpec::new(format!("p{index}"), [size], DType::F32);
    sizes.iter().enumerate().map(spec).collect()
}

/// The gradient that rank `rank` has for parameter `index` in step `step`: small integers, so that averages are exact.
fn gradient(rank: Rank, index: usize, step: usize, size: usize) -> Vec<f32> {
    (0..size).map(|element| ((rank.index() + 1) * (index + 1 + 7 * step) + element) as f32).collect()
}

fn expected(ranks: u32, index: usize, step: usize, size: usize) -> Vec<f32> {
    let mut sum = vec![0.0; size];
    for rank in 0..ranks {
        let part = gradient(Rank::new(rank), index, step, size);
        sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    sum.into_iter().map(|sum| sum / ranks as f32).collect()
}

fn give(reducer: &mut Reducer, rank: Rank, step: usize, order: &[usize]) -> Result<()> {
    for &index in order {
        let size = reducer.parameters()[index].elements();
        reducer.ready(index, bytemuck::cast_slice(&gradient(rank, index, step, size)))?;
    }
    Ok(())
}

fn one_step(reducer: &mut Reducer, rank: Rank, step: usize, order: &[usize]) -> Result<()> {
    reducer.start()?;
    give(reducer, rank, step, order)?;
    reducer.finish()
}

fn floats(reducer: &Reducer, index: usize) -> Vec<f32> {
    let bytes = reducer.gradient(index).unwrap().unwrap();
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

fn averages(group: &FakeGroup) -> Vec<Call> {
    group.calls().into_iter().filter(|call| call.kind == AVERAGE).collect()
}

fn without_verification(
    group: Arc<FakeGroup>,
    parameters: Vec<ParameterSpec>,
    options: ReducerOptions,
) -> Reducer {
    let handle = GroupHandle::new((*FakeGroup::world(1).swap_remove(0)).clone());
    let mut reducer = Reducer::new(Arc::new(handle.clone()), parameters, options).unwrap();
    handle.rebind((*group).clone());
    reducer.regrouped().unwrap();
    reducer
}
