//! What ranks exchange besides gradients.
//!
//! Burn's trainer gets outputs of steps, not numbers: metrics of parts cannot in general be averaged to that of the
//! whole. Rank 0 alone gets every rank's output of a step, merges them, and computes the metrics that one process
//! would.

use burn::tensor::{Device, TensorData};
use phalanx::{ProcessGroup, Rank, ReduceOp, Result, WorldSize};

use super::outputs::Outputs;

/// Whether all ranks say yes.
pub(super) fn all(group: &ProcessGroup, yes: bool) -> Result<bool> {
    Ok(reduced(group, u8::from(yes), ReduceOp::Min)? != 0)
}

/// Whether any rank says yes.
pub(super) fn any(group: &ProcessGroup, yes: bool) -> Result<bool> {
    Ok(highest(group, u8::from(yes))? != 0)
}

/// The highest level of all ranks.
pub(super) fn highest(group: &ProcessGroup, own: u8) -> Result<u8> {
    reduced(group, own, ReduceOp::Max)
}

fn reduced(group: &ProcessGroup, own: u8, op: ReduceOp) -> Result<u8> {
    let mut answer = [own];
    group.all_reduce(&mut answer, op)?;
    Ok(answer[0])
}

/// Rank 0's value.
pub(super) fn main_s(group: &ProcessGroup, yes: bool) -> Result<bool> {
    let mut answer = [u8::from(yes)];
    group.broadcast(&mut answer, Rank::MAIN)?;
    Ok(answer[0] != 0)
}

/// On rank 0, the outputs of all ranks that had one, merged; nothing elsewhere.
pub(super) fn gather<T: Outputs>(group: &ProcessGroup, own: Option<T>, device: &Device) -> Result<Option<T>> {
    if group.world_size() == WorldSize::ONE {
        return Ok(own);
    }
    let own: Vec<TensorData> = own.map(Outputs::into_tensors).transpose()?.unwrap_or_default();
    let Some(outputs) = group.gather_object(&own, Rank::MAIN)? else { return Ok(None) };
    let outputs: Vec<_> = outputs.into_iter().filter(|tensors| !tensors.is_empty()).collect();
    if outputs.is_empty() { Ok(None) } else { T::together(outputs, device).map(Some) }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use burn::train::RegressionOutput;
    use phalanx::testing::{Fabric, run};

    use super::*;

    /// One rank makes the calls that a gather to rank 0 is made of itself: were the other's different ones, as those that
    /// give every rank everything are, both would have an error.
    #[test]
    fn outputs_are_sent_to_rank_0_and_to_nobody_else() {
        for by_hand in [0, 1] {
            let together = run(2, Fabric::InProcess, |group| {
                let device = Device::flex();
                let rank = group.rank();
                let rows = || Tensor::<2>::full([2, 3], f64::from(rank.get()), &device);
                let own =
                    RegressionOutput::new(Tensor::full([1], f64::from(rank.get()), &device), rows(), rows());
                if rank.get() == by_hand {
                    group.gather_object(&own.into_tensors().unwrap(), Rank::MAIN).unwrap();
                    return None;
                }
                let together = gather(&group, Some(own), &device).unwrap()?;
                Some((
                    together.loss.into_scalar::<f32>(),
                    together.output.into_data().try_to_vec::<f32>().unwrap(),
                ))
            });
            let all = [[0.0; 6], [1.0; 6]].concat();
            assert_eq!(together, [(by_hand != 0).then_some((0.5, all)), None]);
        }
    }
}
