//! What keeps replicas equal besides averaged gradients: rank 0's state, copied, and a check.

use burn::module::Module;
use burn::tensor::TensorData;
use phalanx::reducer::{StateTensor, broadcast_state_from};
use phalanx::{Communicator, DType, Rank, ReduceOp, Result, WorldSize};

use crate::bridge;
use crate::parameters::{self, Select};

/// `model` with the selected tensors of rank `root`.
pub(crate) fn from_rank<M: Module>(
    model: M,
    group: &dyn Communicator,
    root: Rank,
    select: Select<'_>,
) -> Result<M> {
    let mut parts: Vec<_> =
        parameters::read(&model, select).into_iter().map(TensorData::into_parts).collect();
    let tensors =
        parts.iter_mut().map(|(bytes, _, dtype)| Ok(StateTensor { dtype: bridge::dtype(*dtype)?, bytes }));
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
    let mut hash = Hash::default();
    for data in parameters::read(model, select) {
        hash.add(data.as_bytes());
    }
    // The smallest hash, and the complement of the largest, in one operation.
    let mut bounds = group.alloc(DType::I64, 2)?;
    bounds.as_mut_slice::<i64>()?.copy_from_slice(&[hash.0 as i64, !(hash.0 as i64)]);
    let bounds = group.all_reduce_async(bounds, ReduceOp::Min)?.wait()?;
    let bounds = bounds.as_slice::<i64>()?;
    Ok(bounds[0] == !bounds[1])
}

/// FNV-1a over words of eight bytes, and over the length of each tensor.
struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn add(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        for byte in rest {
            self.word(u64::from(*byte));
        }
    }

    fn word(&mut self, word: u64) {
        // The rotation brings high bits down, which a product alone never does.
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_sees_every_bit_and_where_a_tensor_ends() {
        let of = |tensors: &[&[u8]]| {
            let mut hash = Hash::default();
            tensors.iter().for_each(|bytes| hash.add(bytes));
            hash.0
        };
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
