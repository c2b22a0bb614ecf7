//! Gradients that are sent with half the bits.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::spares::Spares;
use super::{AllReduce, BuiltInHook, CommHook, GradBucket, HookState, Pending};
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::Communicator;
use crate::rank::Rank;

/// Elements that are converted at a time: they stay in the first cache.
const BLOCK: usize = 2048;

/// Sends f32 gradients as f16 or bf16; other types as they are.
///
/// Each rank divides by the world size before it rounds, so the sum is no larger than a gradient. f16 has 11
/// significant bits but ends at 65,504: a larger gradient becomes infinite. bf16 has the range of f32 and 8 bits.
///
/// It takes memory for what it sends: half as much as the gradients.
#[doc(alias("fp16_compress_hook", "bf16_compress_hook", "Compression"))]
pub struct Compressed {
    dtype: DType,
    halves: Spares,
}

impl Compressed {
    /// IEEE half precision: PyTorch's `fp16_compress_hook`.
    pub fn f16() -> Self {
        Self { dtype: DType::F16, halves: Spares::default() }
    }

    /// The upper half of an f32: PyTorch's `bf16_compress_hook`.
    pub fn bf16() -> Self {
        Self { dtype: DType::BF16, halves: Spares::default() }
    }
}

impl CommHook for Compressed {
    fn describe(&self) -> String {
        format!("compressed to {}", self.dtype)
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        if bucket.buffer.dtype() != DType::F32 {
            return AllReduce.start(group, bucket);
        }
        let mut whole = bucket.buffer;
        let message = (bucket.index, 0);
        let halves = self.halves.share();
        let mut half = halves.take(group, message, self.dtype, whole.len())?;
        let factor = 1.0 / group.world_size().get() as f32;
        match self.dtype {
            DType::F16 => {
                compress::<f16>(&whole, &mut half, factor, |half, whole| half.convert_from_f32_slice(whole))?;
            }
            DType::BF16 => {
                compress::<bf16>(&whole, &mut half, factor, |half, whole| {
                    half.convert_from_f32_slice(whole)
                })?;
            }
            other => {
                return Err(Error::invalid_argument(format!("gradients are not compressed to {other}"))
                    .with_remedy("compress them to f16 or bf16"));
            }
        }
        let work = group.all_reduce_async(half, ReduceOp::Sum)?;
        Ok(Pending::then(work, move |half, _| {
            let to = whole.as_mut_slice::<f32>()?;
            match half.dtype() {
                DType::F16 => half.as_slice::<f16>()?.convert_to_f32_slice(to),
                // An error for any other type.
                DType::BF16
                | DType::F32
                | DType::F64
                | DType::I32
                | DType::I64
                | DType::U8
                | DType::I8
                | DType::Bool => half.as_slice::<bf16>()?.convert_to_f32_slice(to),
            }
            halves.keep(message, half);
            Ok(Pending::ready(whole))
        }))
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        self.halves.clear(); // The buckets may become others.
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }

    fn built_in(&self) -> Option<BuiltInHook> {
        Some(BuiltInHook::Compressed(self.dtype))
    }
}

impl Clone for Compressed {
    /// The same setting, with memory of its own.
    fn clone(&self) -> Self {
        Self { dtype: self.dtype, halves: Spares::default() }
    }
}

impl fmt::Debug for Compressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Compressed({})", self.dtype)
    }
}

fn compress<T: crate::dtype::Element>(
    from: &Buffer,
    to: &mut Buffer,
    factor: f32,
    convert: impl Fn(&mut [T], &[f32]),
) -> Result<()> {
    let mut scaled = [0.0; BLOCK];
    for (from, to) in from.as_slice::<f32>()?.chunks(BLOCK).zip(to.as_mut_slice::<T>()?.chunks_mut(BLOCK)) {
        let scaled = &mut scaled[..from.len()];
        scaled.iter_mut().zip(from).for_each(|(scaled, x)| *scaled = x * factor);
        convert(to, scaled);
    }
    Ok(())
}
