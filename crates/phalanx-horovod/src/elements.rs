//! Elements one by one: factors, other types for the way, and neutral elements.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use phalanx::{Bool, DType, Element, Error, ProcessGroup, ReduceOp, Result};

use phalanx_proto::horovod::reduction::Op;

/// Runs `$body` with `$T` as the Rust type of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F64 => {
                type $T = f64;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            DType::I32 => {
                type $T = i32;
                $body
            }
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::U8 => {
                type $T = u8;
                $body
            }
            DType::I8 => {
                type $T = i8;
                $body
            }
            DType::Bool => {
                type $T = Bool;
                $body
            }
        }
    };
}

/// `bytes` as elements.
pub(crate) fn cast<T: Element>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|_| misaligned(T::DTYPE))
}

/// `bytes` as elements, for writing.
pub(crate) fn cast_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|_| misaligned(T::DTYPE))
}

fn misaligned(dtype: DType) -> Error {
    Error::invalid_argument(format!("a tensor's memory is not aligned to {dtype}"))
}

/// Combines the elements of all ranks in place.
pub(crate) fn all_reduce(group: &ProcessGroup, dtype: DType, data: &mut [u8], op: ReduceOp) -> Result<()> {
    with_type!(dtype, T => group.all_reduce::<T>(cast_mut(data)?, op))
}

/// Multiplies floats by `factor`, each product rounded to the type. There is nothing to do if that is 1.
pub(crate) fn scale(dtype: DType, data: &mut [u8], factor: f64) -> Result<()> {
    if factor == 1.0 {
        return Ok(());
    }
    match dtype {
        DType::F32 => cast_mut::<f32>(data)?.iter_mut().for_each(|value| *value *= factor as f32),
        DType::F64 => cast_mut::<f64>(data)?.iter_mut().for_each(|value| *value *= factor),
        DType::F16 => {
            let values = cast_mut::<f16>(data)?;
            values.iter_mut().for_each(|value| *value = f16::from_f32(value.to_f32() * factor as f32));
        }
        DType::BF16 => {
            let values = cast_mut::<bf16>(data)?;
            values.iter_mut().for_each(|value| *value = bf16::from_f32(value.to_f32() * factor as f32));
        }
        DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => {
            return Err(Error::invalid_argument(format!("a factor is not defined for {dtype}")));
        }
    }
    Ok(())
}

/// Copies elements of type `from` into elements of type `to`: the same one, or halves of floats, or floats of halves.
pub(crate) fn convert(from: DType, source: &[u8], to: DType, target: &mut [u8]) -> Result<()> {
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
        (from, to) => return Err(Error::invalid_argument(format!("{from} does not travel as {to}"))),
    }
    Ok(())
}

/// Fills `data` with what changes no other rank's elements under `op`.
pub(crate) fn fill_neutral(dtype: DType, data: &mut [u8], op: Op) -> Result<()> {
    fn fill<T: Element>(data: &mut [u8], value: T) -> Result<()> {
        cast_mut::<T>(data)?.fill(value);
        Ok(())
    }
    macro_rules! fill_with {
        ($($dtype:ident $T:ty: $zero:expr, $one:expr, $low:expr, $high:expr;)*) => {
            match (dtype, op) {
                $(
                    (DType::$dtype, Op::Average | Op::Sum | Op::Adasum) => fill::<$T>(data, $zero),
                    (DType::$dtype, Op::Product) => fill::<$T>(data, $one),
                    (DType::$dtype, Op::Max) => fill::<$T>(data, $low),
                    (DType::$dtype, Op::Min) => fill::<$T>(data, $high),
                )*
            }
        };
    }
    fill_with! {
        F32 f32: 0.0, 1.0, f32::NEG_INFINITY, f32::INFINITY;
        F64 f64: 0.0, 1.0, f64::NEG_INFINITY, f64::INFINITY;
        F16 f16: f16::ZERO, f16::ONE, f16::NEG_INFINITY, f16::INFINITY;
        BF16 bf16: bf16::ZERO, bf16::ONE, bf16::NEG_INFINITY, bf16::INFINITY;
        I32 i32: 0, 1, i32::MIN, i32::MAX;
        I64 i64: 0, 1, i64::MIN, i64::MAX;
        U8 u8: 0, 1, u8::MIN, u8::MAX;
        I8 i8: 0, 1, i8::MIN, i8::MAX;
        Bool Bool: Bool::FALSE, Bool::TRUE, Bool::FALSE, Bool::TRUE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neutral_elements_change_nothing() {
        for dtype in DType::ALL {
            for op in [Op::Sum, Op::Product, Op::Min, Op::Max] {
                let world = phalanx::WorldSize::new(2).unwrap();
                let groups = ProcessGroup::in_process(world).unwrap();
                let mut results = std::thread::scope(|scope| {
                    let ranks: Vec<_> = groups
                        .into_iter()
                        .map(|group| {
                            scope.spawn(move || {
                                // 64 ones of any type, or neutral elements.
                                let mut data = phalanx::Buffer::zeroed(dtype, 64);
                                fill_neutral(dtype, data.as_bytes_mut(), Op::Product).unwrap();
                                if group.rank().get() == 1 {
                                    fill_neutral(dtype, data.as_bytes_mut(), op).unwrap();
                                }
                                all_reduce(&group, dtype, data.as_bytes_mut(), op.reduce_op().unwrap())
                                    .unwrap();
                                data
                            })
                        })
                        .collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
                });
                let mut ones = phalanx::Buffer::zeroed(dtype, 64);
                fill_neutral(dtype, ones.as_bytes_mut(), Op::Product).unwrap();
                assert_eq!(results.remove(0).as_bytes(), ones.as_bytes(), "{op} of {dtype}");
            }
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
    }

    #[test]
    fn factors_are_for_floats() {
        let mut data = [1.0f32, 3.0];
        scale(DType::F32, bytemuck::cast_slice_mut(&mut data), 0.5).unwrap();
        assert_eq!(data, [0.5, 1.5]);
        assert!(scale(DType::I32, &mut [0; 4], 1.0).is_ok() && scale(DType::I32, &mut [0; 4], 2.0).is_err());
    }
}
