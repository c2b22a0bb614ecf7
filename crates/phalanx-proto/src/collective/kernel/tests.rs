use bytemuck::{cast_slice, cast_slice_mut};

use super::*;
use crate::dtype::Element;
use crate::world_size::WorldSize;

fn parts(local: usize, received: usize, world: u32) -> Parts {
    Parts::new(local, received, WorldSize::new(world).unwrap())
}

fn joined<T: Element>(op: ReduceOp, parts: Parts, local: &[T], received: &[T]) -> Vec<T> {
    let mut left = local.to_vec();
    Kernel { dtype: T::DTYPE, op, combine: Combine::Append, parts }
        .apply(cast_slice_mut(&mut left), cast_slice(received))
        .unwrap();
    left
}

fn combine<T: Element>(op: ReduceOp, local: &[T], received: &[T]) -> Vec<T> {
    joined(op, parts(1, 1, 3), local, received)
}

/// The result on each rank and in separate memory. Both must be the same.
fn fold<T: Element + PartialEq + std::fmt::Debug>(op: ReduceOp, sources: &[Vec<T>]) -> Vec<T> {
    let fold = Fold::of_all(T::DTYPE, op, sources.len() as u32);
    let mut slices = sources.to_vec();
    let mut target = slices[0].clone();
    let lent: Vec<&[u8]> = slices.iter().map(|slice| cast_slice(slice)).collect();
    fold.apply_to(&lent, cast_slice_mut(&mut target)).unwrap();
    let mut lent: Vec<&mut [u8]> = slices.iter_mut().map(|slice| cast_slice_mut(slice)).collect();
    fold.apply(&mut lent).unwrap();
    for slice in &slices {
        assert_eq!(cast_slice::<T, u8>(slice), cast_slice::<T, u8>(&target), "{op} of {}", T::DTYPE);
    }
    target
}

#[test]
fn every_operation_on_integers_wraps() {
    let (a, b) = ([i32::MAX, -3, 5], [1, 4, 5]);
    assert_eq!(combine(ReduceOp::Sum, &a, &b), [i32::MIN, 1, 10]);
    assert_eq!(combine(ReduceOp::Product, &a, &b), [i32::MAX, -12, 25]);
    assert_eq!(combine(ReduceOp::Min, &a, &b), [1, -3, 5]);
    assert_eq!(combine(ReduceOp::Max, &a, &b), [i32::MAX, 4, 5]);
    assert_eq!(combine(ReduceOp::BAnd, &a, &b), [1, 4, 5]);
    assert_eq!(combine(ReduceOp::BOr, &a, &b), [i32::MAX, -3, 5]);
    assert_eq!(combine(ReduceOp::BXor, &a, &b), [i32::MAX - 1, -7, 0]);
    assert_eq!(combine(ReduceOp::Sum, &[200u8], &[100u8]), [44]);
    assert_eq!(combine(ReduceOp::Sum, &[-100i8], &[-100i8]), [56]);
    assert_eq!(combine(ReduceOp::Min, &[-100i8], &[100i8]), [-100]);
}

#[test]
fn truth_is_whatever_is_not_zero() {
    let (a, b): (&[u8], &[u8]) = (&[0, 0, 1, 2], &[0, 1, 0, 4]);
    let (a, b): (&[Bool], &[Bool]) = (cast_slice(a), cast_slice(b));
    let bytes = |op| cast_slice::<Bool, u8>(&combine(op, a, b)).to_vec();
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::BOr] {
        assert_eq!(bytes(op), [0, 1, 1, 1], "{op}");
    }
    for op in [ReduceOp::Product, ReduceOp::Min, ReduceOp::BAnd] {
        assert_eq!(bytes(op), [0, 0, 0, 1], "{op}");
    }
    assert_eq!(bytes(ReduceOp::BXor), [0, 1, 1, 0]);
}

#[test]
fn min_and_max_give_the_same_bits_in_both_orders() {
    let values =
        [f32::NAN, f32::from_bits(0xffc0_0001), 0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY];
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for a in values {
            for b in values {
                let (there, back) = (combine(op, &[a], &[b])[0], combine(op, &[b], &[a])[0]);
                assert_eq!(there.to_bits(), back.to_bits(), "{op} of {a} and {b}");
                assert_eq!(there.is_nan(), a.is_nan() || b.is_nan(), "{op} of {a} and {b}");
            }
        }
    }
    assert!(combine(ReduceOp::Min, &[0f32], &[-0.0])[0].is_sign_negative());
    assert!(combine(ReduceOp::Max, &[-0f32], &[0.0])[0].is_sign_positive());
}

#[test]
fn half_precision_is_combined_in_f32() {
    let ones: Vec<f16> = (0..3300).map(|i| f16::from_f32((i % 1300) as f32 / 8.0)).collect();
    let sums = combine(ReduceOp::Sum, &ones, &ones);
    for (one, sum) in ones.iter().zip(sums) {
        assert_eq!(sum, f16::from_f32(one.to_f32() * 2.0));
    }
    let b = |x: f32| bf16::from_f32(x);
    assert_eq!(combine(ReduceOp::Product, &[b(1.5)], &[b(1.5)]), [b(2.25)]);
}

#[test]
fn averages_divide_once_and_do_not_truncate() {
    assert_eq!(joined(ReduceOp::Avg, parts(1, 1, 2), &[-7f32, 7.0, 8.0], &[0.0; 3]), [-3.5, 3.5, 4.0]);
    assert_eq!(joined(ReduceOp::Avg, parts(1, 1, 3), &[7f64], &[1.0]), [8.0]);
    assert_eq!(joined(ReduceOp::Avg, parts(2, 1, 3), &[8.0f64], &[1.0]), [3.0]);
    assert_eq!(fold(ReduceOp::Avg, &[vec![-7f64], vec![0.0], vec![0.0], vec![0.0]]), [-1.75]);
}

#[test]
fn an_average_of_f16_overflows_only_if_it_is_too_large_itself() {
    let large = f16::from_f32(61_440.0);
    // As in a ring: one rank after the other adds its part to the partial result.
    for world in [2u32, 3, 5, 8] {
        let mut partial = vec![large, f16::MAX, f16::from_f32(3.0)];
        for met in 1..world as usize {
            let own = [large, f16::MAX, f16::from_f32(3.0)];
            partial = joined(ReduceOp::Avg, parts(1, met, world), &own, &partial);
        }
        assert_eq!(partial, [large, f16::MAX, f16::from_f32(3.0)], "{world} ranks");
        assert_eq!(fold(ReduceOp::Avg, &vec![vec![large]; world as usize]), [large]);
    }
    assert_eq!(combine(ReduceOp::Sum, &[large], &[large]), [f16::INFINITY]);
}

#[test]
fn a_fold_is_in_the_order_of_the_ranks() {
    for ranks in [1usize, 2, 3, 4, 7] {
        // More than a block, and not a multiple of one.
        let sources: Vec<Vec<f32>> = (0..ranks)
            .map(|rank| (0..5003).map(|i| ((i * 7 + rank * 31) as f32).sin() * 1e3).collect())
            .collect();
        let expected: Vec<f32> = (0..5003)
            .map(|i| sources[1..].iter().fold(sources[0][i], |sum, source| sum + source[i]))
            .collect();
        assert_eq!(fold(ReduceOp::Sum, &sources), expected);
        let average: Vec<f32> = expected.iter().map(|sum| sum / ranks as f32).collect();
        assert_eq!(fold(ReduceOp::Avg, &sources), average);
        let integers: Vec<Vec<i64>> =
            sources.iter().map(|source| source.iter().map(|value| *value as i64).collect()).collect();
        let largest: Vec<i64> =
            (0..5003).map(|i| integers.iter().map(|source| source[i]).max().unwrap()).collect();
        assert_eq!(fold(ReduceOp::Max, &integers), largest);
    }
}

#[test]
fn a_fold_of_half_precision_is_rounded_once() {
    // Added one by one, each would be lost in the rounding.
    let mut sources = vec![vec![bf16::from_f32(256.0); 1500]];
    sources.extend(vec![vec![bf16::from_f32(0.5); 1500]; 4]);
    assert!(fold(ReduceOp::Sum, &sources).iter().all(|sum| sum.to_f32() == 258.0));
    let sources = vec![vec![f16::from_f32(2048.0); 3]; 40];
    assert!(fold(ReduceOp::Avg, &sources).iter().all(|mean| mean.to_f32() == 2048.0));
}

#[test]
fn factors_are_for_floats() {
    let mut data = [f16::from_f32(3.0); 1100];
    scale(DType::F16, cast_slice_mut(&mut data), 0.5).unwrap();
    assert!(data.iter().all(|value| value.to_f32() == 1.5));
    let mut data = [3.0, 4.0];
    scale(DType::F64, cast_slice_mut(&mut data), 0.1).unwrap();
    assert_eq!(data, [3.0 * 0.1, 4.0 * 0.1]);
    assert!(scale(DType::I32, &mut [0; 4], 0.5).unwrap_err().is_invalid_argument());
}

#[test]
fn torn_and_unequal_memory_is_refused() {
    let kernel = Kernel { combine: Combine::Append, ..Kernel::replacing(DType::F32) };
    assert!(kernel.apply(&mut [0; 3], &[0; 3]).is_err());
    assert!(kernel.apply(&mut [0; 4], &[0; 8]).is_err());
    let fold = Fold::of_all(DType::U8, ReduceOp::Sum, 2);
    assert!(fold.apply(&mut [&mut [0; 3], &mut [0; 2]]).unwrap_err().is_invalid_argument());
    assert!(fold.apply_to(&[&[0; 3], &[0; 3]], &mut [0; 2]).is_err());
    assert!(Fold::of_all(DType::F32, ReduceOp::BAnd, 2).apply(&mut [&mut [], &mut []]).is_err());
}
