//! Elements of any type in memory, for adapters: dispatch over the types, sums, factors, and other types for the way.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::collective::kernel::{Kernel, scale as multiply};
pub use crate::collective::kernel::{cast, cast_mut};
use crate::collective::{Combine, Parts, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Evaluates an expression with a name for the Rust type of a [`DType`]: one dispatch for all element types.
///
/// ```
/// use phalanx::{Buffer, DType, with_element};
///
/// let mut buffer = Buffer::zeroed(DType::F16, 3);
/// let size = with_element!(buffer.dtype(), T => buffer.as_mut_slice::<T>()?.len() * size_of::<T>());
/// assert_eq!(size, 6);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = $crate::elements::of::F32;
                $body
            }
            $crate::dtype::DType::F64 => {
                type $T = $crate::elements::of::F64;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $T = $crate::elements::of::F16;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $T = $crate::elements::of::BF16;
                $body
            }
            $crate::dtype::DType::I32 => {
                type $T = $crate::elements::of::I32;
                $body
            }
            $crate::dtype::DType::I64 => {
                type $T = $crate::elements::of::I64;
                $body
            }
            $crate::dtype::DType::U8 => {
                type $T = $crate::elements::of::U8;
                $body
            }
            $crate::dtype::DType::I8 => {
                type $T = $crate::elements::of::I8;
                $body
            }
            $crate::dtype::DType::Bool => {
                type $T = $crate::elements::of::Bool;
                $body
            }
        }
    };
}

/// The Rust type of each [`DType`], for [`with_element!`](crate::with_element).
#[doc(hidden)]
pub mod of {
    pub use core::primitive::f32 as F32;
    pub use core::primitive::f64 as F64;
    pub use core::primitive::i8 as I8;
    pub use core::primitive::i32 as I32;
    pub use core::primitive::i64 as I64;
    pub use core::primitive::u8 as U8;
    pub use half::{bf16 as BF16, f16 as F16};

    pub use crate::dtype::Bool;
}

/// `sum += other`, element by element, as [`ReduceOp::Sum`] adds: halves in f32, and rounded.
///
/// # Errors
/// If the lengths differ, or as [`cast`].
pub fn add(dtype: DType, sum: &mut [u8], other: &[u8]) -> Result<()> {
    let (op, combine, parts) = (ReduceOp::Sum, Combine::Append, Parts::default());
    Kernel { dtype, op, combine, parts }.apply(sum, other)
}

/// Multiplies floats by `factor`, each product rounded to the type. There is nothing to do if that is 1.
///
/// # Errors
/// If the elements are no floats, or as [`cast`].
pub fn scale(dtype: DType, data: &mut [u8], factor: f64) -> Result<()> {
    if factor == 1.0 {
        return Ok(());
    }
    if !dtype.is_float() {
        return Err(Error::invalid_argument(format!(
            "elements of type {dtype} cannot be multiplied by {factor}"
        ))
        .with_remedy("convert them to f32 or f64"));
    }
    multiply(dtype, data, factor)
}

/// Copies elements of type `from` into elements of type `to`: the same one, or halves of floats, or floats of halves. They are equally many.
///
/// # Errors
/// For other types, and as [`cast`].
pub fn convert(from: DType, source: &[u8], to: DType, target: &mut [u8]) -> Result<()> {
    let (here, there) = (source.len() / from.size(), target.len() / to.size());
    if here != there {
        let cause = format!("{here} elements are to be copied to memory for {there}");
        return Err(Error::invalid_argument(cause).with_remedy("give memory for as many elements"));
    }
    match (from, to) {
        _ if from == to => target.copy_from_slice(source),
        (DType::F32, DType::F16) => cast_mut::<f16>(target)?.convert_from_f32_slice(cast(source)?),
        (DType::F32, DType::BF16) => cast_mut::<bf16>(target)?.convert_from_f32_slice(cast(source)?),
        (DType::F64, DType::F16) => cast_mut::<f16>(target)?.convert_from_f64_slice(cast(source)?),
        (DType::F64, DType::BF16) => cast_mut::<bf16>(target)?.convert_from_f64_slice(cast(source)?),
        (DType::F16, DType::F32) => cast::<f16>(source)?.convert_to_f32_slice(cast_mut(target)?),
        (DType::BF16, DType::F32) => cast::<bf16>(source)?.convert_to_f32_slice(cast_mut(target)?),
        (DType::F16, DType::F64) => cast::<f16>(source)?.convert_to_f64_slice(cast_mut(target)?),
        (DType::BF16, DType::F64) => cast::<bf16>(source)?.convert_to_f64_slice(cast_mut(target)?),
        (from, to) => {
            return Err(Error::invalid_argument(format!(
                "elements of type {from} cannot be converted to {to}"
            ))
            .with_remedy("compress f32 or f64 to f16 or bf16"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_added_in_f32_and_other_lengths_refused() {
        let (mut sum, more) = ([f16::from_f32(2048.0); 3], [f16::from_f32(1.5); 3]);
        add(DType::F16, bytemuck::cast_slice_mut(&mut sum), bytemuck::cast_slice(&more)).unwrap();
        assert_eq!(sum, [f16::from_f32(2050.0); 3]);
        assert!(add(DType::F32, &mut [0; 4], &[0; 8]).is_err());
    }

    #[test]
    fn each_type_is_dispatched_to_itself() {
        use crate::dtype::Element;
        for dtype in DType::ALL {
            assert_eq!(with_element!(dtype, T => <T as Element>::DTYPE), dtype);
        }
    }

    #[test]
    fn floats_travel_as_halves_and_back() {
        let source = [1.5f32, -2.0, 1e9];
        for (wire, large) in [(DType::F16, f32::INFINITY), (DType::BF16, bf16::from_f32(1e9).to_f32())] {
            let (mut halves, mut back) = ([0u16; 3], [0f32; 3]);
            let halves = bytemuck::cast_slice_mut(&mut halves);
            convert(DType::F32, bytemuck::cast_slice(&source), wire, halves).unwrap();
            convert(wire, halves, DType::F32, bytemuck::cast_slice_mut(&mut back)).unwrap();
            assert_eq!(back, [1.5, -2.0, large]);
        }
        assert!(convert(DType::I32, &[0; 4], DType::F16, &mut [0; 2]).is_err());
        assert!(convert(DType::F32, &[0; 8], DType::F16, &mut [0; 2]).is_err(), "two are not one");
    }

    #[test]
    fn factors_are_for_floats() {
        let mut data = [1.0f32, 3.0];
        scale(DType::F32, bytemuck::cast_slice_mut(&mut data), 0.5).unwrap();
        assert_eq!(data, [0.5, 1.5]);
        assert!(scale(DType::I32, &mut [0; 4], 1.0).is_ok() && scale(DType::I32, &mut [0; 4], 2.0).is_err());
    }
}
