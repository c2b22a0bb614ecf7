//! The adaptive sum of two gradients, and of those of all ranks, after Maleki et al., "Scaling distributed training with
//! adaptive summation", 2020 (<https://arxiv.org/abs/2006.02924>):
//!
//! ```text
//! Adasum(a, b) = (1 - a·b / (2 |a|²)) a + (1 - a·b / (2 |b|²)) b
//! ```
//!
//! For more gradients, Adasum of the first and of the second half of them. So rank r combines first with rank r ^ 1, then with
//! r ^ 2, r ^ 4, ..., and both compute the same from the same two gradients: the results have the same bits on every rank.

use half::{bf16, f16};
use phalanx::{Buffer, DType, Element, Error, P2pOp, ProcessGroup, Rank, Result};

use phalanx::adapter::elements::{cast, cast_mut};

/// Combines the tensors in `data`, of `lengths` elements each, with those of all ranks. Every tensor is combined as an Adasum of its
/// own. Sends log2(ranks) times the bytes of `data`, and needs twice as much memory beside it.
pub(crate) fn all_reduce(
    group: &ProcessGroup,
    dtype: DType,
    data: &mut [u8],
    lengths: &[usize],
) -> Result<()> {
    let (rank, size) = (group.rank().index(), group.world_size().count());
    for distance in (0..).map(|level| 1usize << level).take_while(|distance| *distance < size) {
        let partner = Rank::new((rank ^ distance) as u32);
        let elements = data.len() / dtype.size();
        let mut own = memory(dtype, elements)?;
        own.as_bytes_mut().copy_from_slice(data);
        let messages = vec![P2pOp::recv(memory(dtype, elements)?, partner), P2pOp::send(own, partner)];
        let mut outcomes = group.batch_isend_irecv(messages)?.into_iter().map(|work| work.wait());
        let received = outcomes.next().transpose()?;
        outcomes.try_for_each(|sent| sent.map(drop))?;
        let Some(received) = received else { continue };
        match dtype {
            DType::F32 => combine_all::<f32>(data, received.as_bytes(), lengths),
            DType::F64 => combine_all::<f64>(data, received.as_bytes(), lengths),
            DType::F16 => combine_all::<f16>(data, received.as_bytes(), lengths),
            DType::BF16 => combine_all::<bf16>(data, received.as_bytes(), lengths),
            // `Reduction::check` refuses them.
            DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => Ok(()),
        }?;
    }
    Ok(())
}

/// Memory beside the tensors. An error if there is none, which ends the job on every rank: the partner waits.
fn memory(dtype: DType, elements: usize) -> Result<Buffer> {
    Buffer::try_zeroed(dtype, elements).map_err(|error| {
        Error::out_of_memory(format!("there is no memory for an adasum of {elements} x {dtype}"))
            .with_source(error)
            .with_remedy("an adasum needs twice as much memory as its tensors have: submit fewer at once, or smaller ones")
    })
}

/// A float that is computed with as an f64.
trait Real: Element {
    fn get(self) -> f64;
    fn of(value: f64) -> Self;
}

macro_rules! reals {
    ($($T:ty: $get:expr, $of:expr;)*) => {
        $(impl Real for $T {
            fn get(self) -> f64 {
                $get(self)
            }
            fn of(value: f64) -> Self {
                $of(value)
            }
        })*
    };
}
reals! {
    f32: f64::from, |value| value as f32;
    f64: |value| value, |value| value;
    f16: f16::to_f64, f16::from_f64;
    bf16: bf16::to_f64, bf16::from_f64;
}

fn combine_all<T: Real>(own: &mut [u8], other: &[u8], lengths: &[usize]) -> Result<()> {
    let (mut own, mut other) = (cast_mut::<T>(own)?, cast::<T>(other)?);
    for length in lengths {
        let (a, own_rest) = own.split_at_mut(*length);
        let (b, other_rest) = other.split_at(*length);
        combine(a, b);
        (own, other) = (own_rest, other_rest);
    }
    Ok(())
}

/// `own = Adasum(own, other)`, computed in f64. Exchanging the two changes no bit of the result.
fn combine<T: Real>(own: &mut [T], other: &[T]) {
    let dot = |a: &[T], b: &[T]| a.iter().zip(b).map(|(a, b)| a.get() * b.get()).sum::<f64>();
    let (product, own_square, other_square) = (dot(own, other), dot(own, own), dot(other, other));
    // A gradient of zeros adds nothing, whatever its factor.
    let factor = |square: f64| if square == 0.0 { 1.0 } else { 1.0 - product / (2.0 * square) };
    let (own_factor, other_factor) = (factor(own_square), factor(other_square));
    for (own, other) in own.iter_mut().zip(other) {
        *own = T::of(own_factor * own.get() + other_factor * other.get());
    }
}

#[cfg(test)]
mod tests {
    use phalanx::WorldSize;
    use serde_json::Value;

    use super::*;

    /// Gradients of all ranks, and what NumPy makes of them: tests/vectors/adasum.py.
    fn vectors() -> Vec<(Vec<Vec<f64>>, Vec<f64>)> {
        let text = include_str!("../tests/vectors/adasum.json");
        let numbers = |value: &Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
        };
        let cases: Value = serde_json::from_str(text).unwrap();
        let case = |case: &Value| {
            let gradients = case["gradients"].as_array().unwrap().iter().map(numbers).collect();
            (gradients, numbers(&case["adasum"]))
        };
        cases.as_array().unwrap().iter().map(case).collect()
    }

    fn reduced<T: Real>(gradients: &[Vec<f64>]) -> Vec<Vec<T>> {
        let groups = ProcessGroup::in_process(WorldSize::new(gradients.len() as u32).unwrap()).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups
                .into_iter()
                .zip(gradients)
                .map(|(group, gradient)| {
                    scope.spawn(move || {
                        // Twice, as two tensors of a batch.
                        let one = gradient.iter().map(|value| T::of(*value));
                        let mut data: Vec<T> = one.clone().chain(one).collect();
                        let lengths = [gradient.len(); 2];
                        all_reduce(&group, T::DTYPE, bytemuck::cast_slice_mut(&mut data), &lengths).unwrap();
                        data
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn check<T: Real + PartialEq + std::fmt::Debug>(tolerance: f64) {
        for (gradients, expected) in vectors() {
            let results = reduced::<T>(&gradients);
            assert!(results.iter().all(|result| *result == results[0]), "the same bits on every rank");
            for half in results[0].chunks(expected.len()) {
                for (got, expected) in half.iter().zip(&expected) {
                    let error = (got.get() - expected).abs();
                    assert!(error <= tolerance * expected.abs().max(1.0), "{got:?}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn it_is_what_numpy_makes_of_the_paper_s_formula() {
        assert!(vectors().iter().any(|(gradients, _)| gradients.len() == 8));
        check::<f64>(1e-12);
        check::<f32>(1e-6);
        check::<bf16>(0.05);
        check::<f16>(0.01);
    }

    #[test]
    fn parallel_gradients_are_averaged_orthogonal_ones_added_and_zeros_change_nothing() {
        let of = |gradients: [[f64; 2]; 2]| reduced::<f64>(&gradients.map(Vec::from))[0][..2].to_vec();
        assert_eq!(of([[3.0, 4.0], [3.0, 4.0]]), [3.0, 4.0]);
        assert_eq!(of([[3.0, 0.0], [0.0, 4.0]]), [3.0, 4.0]);
        assert_eq!(of([[0.0, 0.0], [1.0, -2.0]]), [1.0, -2.0]);
    }
}
