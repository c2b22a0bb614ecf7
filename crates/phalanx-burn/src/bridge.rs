//! Between Burn's tensors and the bytes that travel: nothing else here knows how a backend keeps its memory.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex};
use burn::tensor::{Bytes, DType as BurnDType, TensorData};
use bytemuck::{AnyBitPattern, NoUninit};
use phalanx::{DType, Error, Result};

/// A tensor's elements, row by row, for as long as somebody looks at them.
#[derive(Clone, Copy)]
pub(crate) struct Lent<'a> {
    /// Burn's type; see [`dtype`].
    pub dtype: BurnDType,
    pub bytes: &'a [u8],
}

/// A backend whose tensors can lend their memory.
pub trait Lend: Backend {
    /// Calls `look` with the elements of `tensor`; copies them only if they do not lie in a row.
    fn lend(tensor: &FloatTensor<Self>, look: impl FnOnce(Lent<'_>));
}

impl Lend for Flex {
    fn lend(tensor: &FloatTensor<Self>, look: impl FnOnce(Lent<'_>)) {
        match tensor.layout().contiguous_offsets() {
            Some((start, end)) => {
                let size = tensor.dtype().size();
                look(Lent { dtype: tensor.dtype(), bytes: &tensor.bytes()[start * size..end * size] });
            }
            None => {
                let tensor = tensor.to_contiguous();
                let bytes = tensor.layout().num_elements() * tensor.dtype().size();
                look(Lent { dtype: tensor.dtype(), bytes: &tensor.bytes()[..bytes] });
            }
        }
    }
}

/// The type that travels for Burn's `dtype`.
pub(crate) fn dtype(dtype: BurnDType) -> Result<DType> {
    match dtype {
        BurnDType::F64 => Ok(DType::F64),
        BurnDType::F32 | BurnDType::Flex32 => Ok(DType::F32),
        BurnDType::F16 => Ok(DType::F16),
        BurnDType::BF16 => Ok(DType::BF16),
        BurnDType::I64 | BurnDType::U64 => Ok(DType::I64),
        BurnDType::I32 | BurnDType::U32 => Ok(DType::I32),
        BurnDType::U8 | BurnDType::I8 => Ok(DType::U8),
        BurnDType::Bool(_) if dtype.size() == 1 => Ok(DType::U8),
        other => {
            Err(Error::invalid_argument(format!("tensors of type {other:?} do not travel between ranks"))
                .with_remedy("cast it, or leave it out of the module"))
        }
    }
}

/// Tensor data of a copy of `bytes`, in memory that any element type can be read from.
pub(crate) fn tensor_data(bytes: &[u8], shape: &[usize], dtype: BurnDType) -> TensorData {
    let copy = match dtype.size() {
        8 => Bytes::from_elems(copied::<u64>(bytes)),
        4 => Bytes::from_elems(copied::<u32>(bytes)),
        2 => Bytes::from_elems(copied::<u16>(bytes)),
        _ => Bytes::from_bytes_vec(bytes.to_vec()),
    };
    TensorData::from_bytes(copy, shape.to_vec(), dtype)
}

fn copied<T: AnyBitPattern + NoUninit>(bytes: &[u8]) -> Vec<T> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => elements.to_vec(),
        Err(_) => bytemuck::pod_collect_to_vec(bytes),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    fn lent(tensor: Tensor<2>) -> Vec<f32> {
        let tensor = tensor.try_into_primitive::<Flex>().unwrap_or_else(|_| panic!("a Flex tensor"));
        let mut elements = Vec::new();
        Flex::lend(&tensor, |lent| elements.extend_from_slice(bytemuck::cast_slice(lent.bytes)));
        elements
    }

    #[test]
    fn views_and_transposes_are_lent_in_row_order() {
        let tensor = Tensor::<2>::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::flex());
        assert_eq!(lent(tensor.clone()), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(lent(tensor.clone().transpose()), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!(lent(tensor.clone().slice([1..2, 0..3])), [4.0, 5.0, 6.0]);
        assert_eq!(lent(tensor.slice([0..2, 1..2])), [2.0, 5.0]);
    }

    #[test]
    fn bytes_become_tensors() {
        let data = tensor_data(bytemuck::cast_slice(&[1.0f32, 2.0]), &[2, 1], BurnDType::F32);
        let tensor = Tensor::<2>::from_data(data, &Device::flex());
        assert_eq!(lent(tensor), [1.0, 2.0]);
    }

    #[test]
    fn quantized_tensors_are_refused() {
        assert!(dtype(BurnDType::QFloat(Default::default())).unwrap_err().is_invalid_argument());
    }
}
