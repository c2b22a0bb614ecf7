//! What the elements of all ranks are combined with: the neutral ones.

use half::{bf16, f16};
use phalanx::adapter::elements::cast_mut;
use phalanx::{Bool, DType, Element, ProcessGroup, ReduceOp, Result, with_element};
use phalanx_proto::horovod::reduction::Op;

/// Combines the elements of all ranks in place.
pub(crate) fn all_reduce(group: &ProcessGroup, dtype: DType, data: &mut [u8], op: ReduceOp) -> Result<()> {
    with_element!(dtype, T => group.all_reduce::<T>(cast_mut(data)?, op))
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
}
