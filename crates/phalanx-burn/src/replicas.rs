//! How replicas stay equal besides averaged gradients: copies of rank 0's state, and a check.

use burn::module::Module;
use burn::tensor::TensorData;
use phalanx::reducer::{StateTensor, broadcast_state_from};
use phalanx::{Communicator, DType, Rank, ReduceOp, Result, WorldSize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::parameters::{self, Select};
use crate::tensor_bytes;

/// `model` with the selected tensors of rank `root`.
pub(crate) fn from_rank<M: Module>(
    model: M,
    group: &dyn Communicator,
    root: Rank,
    select: Select<'_>,
) -> Result<M> {
    let mut parts: Vec<_> =
        parameters::read(&model, select).into_iter().map(TensorData::into_parts).collect();
    let tensors = parts
        .iter_mut()
        .map(|(bytes, _, dtype)| Ok(StateTensor { dtype: tensor_bytes::dtype(*dtype)?, bytes }));
    broadcast_state_from(group, root, &mut tensors.collect::<Result<Vec<_>>>()?)?;
    if group.rank() == root {
        return Ok(model);
    }
    let data = parts.into_iter().map(|(bytes, shape, dtype)| TensorData::from_bytes(bytes, shape, dtype));
    Ok(parameters::write(model, select, data.collect()))
}

/// Are the selected tensors the same bits on every rank?
pub(crate) fn identical<M: Module>(model: &M, group: &dyn Communicator, select: Select<'_>) -> Result<bool> {
    if group.world_size() == WorldSize::ONE {
        return Ok(true);
    }
    let tensors = parameters::read(model, select);
    let hash = hash(tensors.iter().map(TensorData::as_bytes)) as i64;
    // The smallest hash, and the complement of the largest, in one operation.
    let mut bounds = group.alloc(DType::I64, 2)?;
    bounds.as_mut_slice::<i64>()?.copy_from_slice(&[hash, !hash]);
    let bounds = group.all_reduce_async(bounds, ReduceOp::Min)?.wait()?;
    let bounds = bounds.as_slice::<i64>()?;
    Ok(bounds[0] == !bounds[1])
}

/// XXH3 of all tensors' lengths and bytes.
fn hash<'a>(tensors: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut hash = Xxh3Default::new();
    for bytes in tensors {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_sees_every_bit_and_where_a_tensor_ends() {
        let of = |tensors: &[&[u8]]| hash(tensors.iter().copied());
        let bytes: Vec<u8> = (0..21).collect();
        let original = of(&[&bytes]);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&[&changed]), original);
        }
        assert_ne!(of(&[&bytes[..8], &bytes[8..]]), original);
    }
}
