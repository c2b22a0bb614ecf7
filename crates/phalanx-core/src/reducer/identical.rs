//! Compares the replicas of all ranks, by a hash of their bits.

use xxhash_rust::xxh3::Xxh3Default;

use super::sync::alloc_or_abort;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::Result;
use crate::group::Communicator;
use crate::world_size::WorldSize;

/// Whether `tensors` are the same bits on every rank. All ranks call it together, and get the same answer. Only a hash is sent.
///
/// # Errors
/// If the exchange fails; the group has ended then.
pub fn states_identical<'a>(
    group: &dyn Communicator,
    tensors: impl IntoIterator<Item = &'a [u8]>,
) -> Result<bool> {
    if group.world_size() == WorldSize::ONE {
        return Ok(true);
    }
    let hash = hash(tensors.into_iter()) as i64;
    // The smallest hash, and the complement of the largest, in one operation.
    let mut bounds = alloc_or_abort(group, DType::I64, 2)?;
    bounds.as_mut_slice::<i64>()?.copy_from_slice(&[hash, !hash]);
    let bounds = group.all_reduce_async(bounds, ReduceOp::Min)?.wait()?;
    let bounds = bounds.as_slice::<i64>()?;
    Ok(bounds[0] == !bounds[1])
}

/// XXH3 of all tensors' lengths and bytes.
pub(super) fn hash<'a>(tensors: impl Iterator<Item = &'a [u8]>) -> u64 {
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
