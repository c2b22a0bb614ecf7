//! Combines many ranks' memory into one result.

use bytemuck::Pod;
use half::{bf16, f16};

use super::half::Half;
use super::number::{Loop, Number};
use super::{cast, cast_mut, same_length, vectorised};
use crate::collective::ReduceOp;
use crate::dtype::{Bool, DType};
use crate::error::Result;

/// Bytes that are combined over all ranks before the next ones: they stay in the L1 cache meanwhile.
const STRIDE: usize = 4 * 1024;
/// Elements whose sums are kept in f32 at a time: the same number of bytes.
const BLOCK: usize = STRIDE / size_of::<f32>();

/// Combines the elements of all ranks in the order of the ranks: ((s0 ∘ s1) ∘ s2) ∘ …
///
/// f16 and bf16 are added up in f32 over all ranks and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Fold {
    /// The type of the elements.
    pub dtype: DType,
    /// The operation that combines them.
    pub op: ReduceOp,
    /// The divisor, if the result is an average.
    pub divide_by: Option<u32>,
}

impl Fold {
    /// For all ranks of a world of `ranks`.
    pub fn of_all(dtype: DType, op: ReduceOp, ranks: u32) -> Self {
        Self { dtype, op, divide_by: (op == ReduceOp::Avg).then_some(ranks) }
    }

    /// Writes the result into each of `slices`, which have the same length. Each slice is read once and written
    /// once.
    ///
    /// # Errors
    /// If the lengths differ, if they are not whole, aligned elements, or if the operation is not defined for the type.
    pub fn apply(&self, slices: &mut [&mut [u8]]) -> Result<()> {
        self.op.check(self.dtype)?;
        same_length(slices.iter().map(|slice| slice.len()))?;
        match self.dtype {
            DType::F32 => self.native_slices::<f32>(slices),
            DType::F64 => self.native_slices::<f64>(slices),
            DType::I32 => self.native_slices::<i32>(slices),
            DType::I64 => self.native_slices::<i64>(slices),
            DType::U8 => self.native_slices::<u8>(slices),
            DType::I8 => self.native_slices::<i8>(slices),
            DType::Bool => self.native_slices::<Bool>(slices),
            DType::F16 => self.half_slices::<f16>(slices),
            DType::BF16 => self.half_slices::<bf16>(slices),
        }
    }

    /// As [`apply`](Self::apply), but writes the result to `target` and leaves the sources unchanged.
    pub fn apply_to(&self, sources: &[&[u8]], target: &mut [u8]) -> Result<()> {
        self.op.check(self.dtype)?;
        same_length(sources.iter().map(|source| source.len()).chain([target.len()]))?;
        match self.dtype {
            DType::F32 => self.native_sources::<f32>(sources, target),
            DType::F64 => self.native_sources::<f64>(sources, target),
            DType::I32 => self.native_sources::<i32>(sources, target),
            DType::I64 => self.native_sources::<i64>(sources, target),
            DType::U8 => self.native_sources::<u8>(sources, target),
            DType::I8 => self.native_sources::<i8>(sources, target),
            DType::Bool => self.native_sources::<Bool>(sources, target),
            DType::F16 => self.half_sources::<f16>(sources, target),
            DType::BF16 => self.half_sources::<bf16>(sources, target),
        }
    }

    /// The divisor to use with source `index` of `sources`: only the last one divides.
    fn divide_after(&self, index: usize, sources: usize) -> Option<u32> {
        self.divide_by.filter(|_| index + 1 == sources)
    }

    fn native_slices<T: Number>(&self, slices: &mut [&mut [u8]]) -> Result<()> {
        let count = slices.len();
        match slices {
            [] => Ok(()),
            [only] => {
                self.finish(cast_mut::<T>(only)?);
                Ok(())
            }
            [left, right] => {
                T::each(self.op, self.divide_by, Both(cast_mut(left)?, cast_mut(right)?));
                Ok(())
            }
            [first, others @ ..] => {
                let size = STRIDE / size_of::<T>();
                let length = first.len() / size_of::<T>();
                for start in (0..length).step_by(size) {
                    let block = start..length.min(start + size);
                    let sum = &mut cast_mut::<T>(first)?[block.clone()];
                    for (index, other) in others.iter().enumerate() {
                        let divide_by = self.divide_after(index + 1, count);
                        T::each(self.op, divide_by, Onto(sum, &cast(other)?[block.clone()]));
                    }
                    for other in others.iter_mut() {
                        cast_mut(other)?[block.clone()].copy_from_slice(sum);
                    }
                }
                Ok(())
            }
        }
    }

    fn native_sources<T: Number>(&self, sources: &[&[u8]], target: &mut [u8]) -> Result<()> {
        let count = sources.len();
        let target = cast_mut::<T>(target)?;
        let (first, second, others) = match sources {
            [] => return Ok(()),
            [only] => {
                target.copy_from_slice(cast(only)?);
                self.finish(target);
                return Ok(());
            }
            [first, second, others @ ..] => (cast::<T>(first)?, cast::<T>(second)?, others),
        };
        let size = if others.is_empty() { target.len().max(1) } else { STRIDE / size_of::<T>() };
        for (number, sum) in target.chunks_mut(size).enumerate() {
            let block = number * size..number * size + sum.len();
            let divide_by = self.divide_after(1, count);
            T::each(
                self.op,
                divide_by,
                Into { left: &first[block.clone()], right: &second[block.clone()], sum },
            );
            for (index, other) in others.iter().enumerate() {
                let divide_by = self.divide_after(index + 2, count);
                T::each(self.op, divide_by, Onto(sum, &cast(other)?[block.clone()]));
            }
        }
        Ok(())
    }

    /// The result of a single rank.
    fn finish<T: Number>(&self, data: &mut [T]) {
        if let Some(by) = self.divide_by.filter(|by| *by > 1) {
            vectorised(
                #[inline(always)]
                || data.iter_mut().for_each(|value| *value = value.divide(by)),
            );
        }
    }

    fn half_slices<T: Half>(&self, slices: &mut [&mut [u8]]) -> Result<()> {
        if let [left, right] = slices {
            f32::each(self.op, self.divide_by, BothHalves(cast_mut::<T>(left)?, cast_mut(right)?));
            return Ok(());
        }
        let Some(length) = slices.first().map(|slice| slice.len() / size_of::<T>()) else { return Ok(()) };
        let mut sum = [0.0; BLOCK];
        for start in (0..length).step_by(BLOCK) {
            let block = start..length.min(start + BLOCK);
            let sum = &mut sum[..block.len()];
            for index in 0..slices.len() {
                self.add::<T>(index, slices.len(), &cast(slices[index])?[block.clone()], sum);
            }
            let (first, others) = slices.split_at_mut(1);
            let rounded = &mut cast_mut::<T>(first[0])?[block.clone()];
            narrow(sum, rounded);
            for other in others {
                cast_mut(other)?[block.clone()].copy_from_slice(rounded);
            }
        }
        Ok(())
    }

    fn half_sources<T: Half>(&self, sources: &[&[u8]], target: &mut [u8]) -> Result<()> {
        if sources.is_empty() {
            return Ok(());
        }
        let mut sum = [0.0; BLOCK];
        for (number, target) in cast_mut::<T>(target)?.chunks_mut(BLOCK).enumerate() {
            let block = number * BLOCK..number * BLOCK + target.len();
            let sum = &mut sum[..block.len()];
            for (index, source) in sources.iter().enumerate() {
                self.add::<T>(index, sources.len(), &cast(source)?[block.clone()], sum);
            }
            narrow(sum, target);
        }
        Ok(())
    }

    /// Adds block `index` of `count` to `sum`.
    fn add<T: Half>(&self, index: usize, count: usize, block: &[T], sum: &mut [f32]) {
        if index == 0 {
            widen(block, sum);
            if count == 1 {
                self.finish(sum);
            }
        } else {
            f32::each(self.op, self.divide_after(index, count), OntoWide(sum, block));
        }
    }
}

fn widen<T: Half>(from: &[T], to: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || from.iter().zip(to).for_each(|(from, to)| *to = from.widen()),
    );
}

fn narrow<T: Half>(from: &[f32], to: &mut [T]) {
    vectorised(
        #[inline(always)]
        || from.iter().zip(to).for_each(|(from, to)| *to = T::narrow(*from)),
    );
}

/// The second is combined into the first.
pub struct Onto<'a, T>(pub &'a mut [T], pub &'a [T]);

/// Both get the result.
struct Both<'a, T>(&'a mut [T], &'a mut [T]);

/// Both get the result, rounded.
struct BothHalves<'a, T>(&'a mut [T], &'a mut [T]);

/// The second is added to a sum that is rounded later.
struct OntoWide<'a, T>(&'a mut [f32], &'a [T]);

/// A third gets the result.
struct Into<'a, T> {
    left: &'a [T],
    right: &'a [T],
    sum: &'a mut [T],
}

impl<T: Pod> Loop<T> for Onto<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(T, T) -> T + Copy) {
        vectorised(
            #[inline(always)]
            || {
                for (left, right) in self.0.iter_mut().zip(self.1) {
                    *left = f(*left, *right);
                }
            },
        );
    }
}

impl<T: Pod> Loop<T> for Both<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(T, T) -> T + Copy) {
        vectorised(
            #[inline(always)]
            || {
                for (left, right) in self.0.iter_mut().zip(self.1) {
                    let both = f(*left, *right);
                    (*left, *right) = (both, both);
                }
            },
        );
    }
}

impl<T: Pod> Loop<T> for Into<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(T, T) -> T + Copy) {
        vectorised(
            #[inline(always)]
            || {
                for ((left, right), sum) in self.left.iter().zip(self.right).zip(self.sum) {
                    *sum = f(*left, *right);
                }
            },
        );
    }
}

impl<T: Half> Loop<f32> for BothHalves<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(f32, f32) -> f32 + Copy) {
        vectorised(
            #[inline(always)]
            || {
                for (left, right) in self.0.iter_mut().zip(self.1) {
                    let both = T::narrow(f(left.widen(), right.widen()));
                    (*left, *right) = (both, both);
                }
            },
        );
    }
}

impl<T: Half> Loop<f32> for OntoWide<'_, T> {
    #[inline(always)]
    fn run(self, f: impl Fn(f32, f32) -> f32 + Copy) {
        vectorised(
            #[inline(always)]
            || {
                for (sum, part) in self.0.iter_mut().zip(self.1) {
                    *sum = f(*sum, part.widen());
                }
            },
        );
    }
}
