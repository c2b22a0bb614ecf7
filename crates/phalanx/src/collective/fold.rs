//! The elements of all ranks combined at once, in the order of the ranks, where one rank reaches everybody's.

use super::kernel::Kernel;
use super::{Combine, ReduceOp};
use crate::dtype::DType;
use crate::error::Result;

/// Bytes that are combined over all ranks before the next ones: they stay in the first-level cache.
const BLOCK: usize = 4096;

/// How elements of many ranks become one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    pub dtype: DType,
    pub op: ReduceOp,
    /// By how many an average is divided.
    pub divide_by: Option<u32>,
}

impl Fold {
    /// Combines all `shares`, equally long, and writes the result to each of them.
    pub(crate) fn apply(&self, shares: &mut [&mut [u8]]) -> Result<()> {
        let Some((first, others)) = shares.split_first_mut() else { return Ok(()) };
        let last = others.len();
        for start in (0..first.len()).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(first.len());
            for (index, other) in others.iter().enumerate() {
                self.kernel(index + 1 == last).apply(&mut first[block.clone()], &other[block.clone()])?;
            }
            for other in others.iter_mut() {
                other[block.clone()].copy_from_slice(&first[block.clone()]);
            }
        }
        Ok(())
    }

    /// Combines all `sources` into `target`, all equally long.
    pub(crate) fn collect(&self, target: &mut [u8], sources: &[&[u8]]) -> Result<()> {
        let Some((first, others)) = sources.split_first() else { return Ok(()) };
        for start in (0..target.len()).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(target.len());
            target[block.clone()].copy_from_slice(&first[block.clone()]);
            for (index, other) in others.iter().enumerate() {
                let kernel = self.kernel(index + 1 == others.len());
                kernel.apply(&mut target[block.clone()], &other[block.clone()])?;
            }
        }
        Ok(())
    }

    fn kernel(&self, is_last: bool) -> Kernel {
        let completes = self.divide_by.filter(|_| is_last);
        Kernel { dtype: self.dtype, op: self.op, combine: Combine::Append, completes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_gets_the_result_in_the_order_of_the_ranks() {
        let inputs: Vec<Vec<f32>> = (0..3u16)
            .map(|rank| (0..3000u16).map(|i| f32::from(i) * 0.37 + f32::from(rank) * 1e7).collect())
            .collect();
        let expected: Vec<f32> =
            (0..3000).map(|i| (inputs[0][i] + inputs[1][i] + inputs[2][i]) / 3.0).collect();
        let fold = Fold { dtype: DType::F32, op: ReduceOp::Avg, divide_by: Some(3) };
        let mut target = vec![0f32; 3000];
        let sources: Vec<&[u8]> = inputs.iter().map(|input| bytemuck::cast_slice(input)).collect();
        fold.collect(bytemuck::cast_slice_mut(&mut target), &sources).unwrap();
        assert_eq!(target, expected);
        let mut shares = inputs;
        let mut all: Vec<&mut [u8]> =
            shares.iter_mut().map(|share| bytemuck::cast_slice_mut(share)).collect();
        fold.apply(&mut all).unwrap();
        assert!(shares.iter().all(|share| *share == expected));
    }
}
