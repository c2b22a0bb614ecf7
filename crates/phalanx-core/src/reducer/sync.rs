//! One rank's parameters and buffers become everyone's.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, Work};
use crate::rank::Rank;

/// The most bytes that one broadcast carries.
const CHUNK_BYTES: usize = 25 << 20;

/// Broadcasts on their way at one time: enough that packing, moving and unpacking overlap, and no more memory.
const IN_FLIGHT: usize = 3;

/// A tensor's memory, of which every rank gets the root's content.
#[derive(Debug)]
pub struct StateTensor<'a> {
    /// The type of its elements.
    pub dtype: DType,
    /// Its elements.
    pub bytes: &'a mut [u8],
}

/// Copies rank `root`'s content of `tensors` to every rank.
///
/// Every rank gives tensors of the same types and sizes in the same order. They travel together, type by type, in
/// broadcasts of at most 25 MiB, of which several are on their way at one time.
///
/// # Errors
/// If `root` is no rank of this group, a length is no multiple of its type's size, there is too little memory, or a broadcast fails; then some tensors
/// may have been written, and the group has ended.
pub fn broadcast_state(group: &dyn Communicator, root: Rank, tensors: &mut [StateTensor<'_>]) -> Result<()> {
    for (index, tensor) in tensors.iter().enumerate() {
        if tensor.bytes.len() % tensor.dtype.size() != 0 {
            let error = Error::invalid_argument(format!(
                "state tensor {index} has {} bytes, which is no whole number of {}",
                tensor.bytes.len(),
                tensor.dtype
            ))
            .with_remedy("give all bytes of the tensor, with its own type");
            // The other ranks may have begun.
            group.abort(error.clone());
            return Err(error);
        }
    }
    if group.world_size().get() == 1 {
        return Ok(());
    }
    let is_root = group.rank() == root;
    let mut in_flight: VecDeque<(Chunk, Work)> = VecDeque::new();
    for chunk in chunks(tensors, CHUNK_BYTES) {
        if in_flight.len() == IN_FLIGHT
            && let Some((chunk, work)) = in_flight.pop_front()
        {
            chunk.unpack(work, tensors, is_root)?;
        }
        let mut buffer = alloc_or_abort(group, chunk.dtype, chunk.bytes / chunk.dtype.size())?;
        // On every rank: among ranks that may run out of data, another one may speak for rank 0.
        chunk.pack(buffer.as_bytes_mut(), tensors);
        let work = group.broadcast_async(buffer, root)?;
        in_flight.push_back((chunk, work));
    }
    for (chunk, work) in in_flight {
        chunk.unpack(work, tensors, is_root)?;
    }
    Ok(())
}

/// Memory of the group for its next collective. If there is none, the group ends: the other ranks would wait for this one.
pub(super) fn alloc_or_abort(group: &dyn Communicator, dtype: DType, elements: usize) -> Result<Buffer> {
    group.alloc(dtype, elements).inspect_err(|error| group.abort(error.clone()))
}

/// What one broadcast carries: pieces of tensors of one type, one after another.
#[derive(Debug, PartialEq)]
struct Chunk {
    dtype: DType,
    bytes: usize,
    pieces: Vec<(usize, Range<usize>)>,
}

/// Cuts the tensors of each type, laid end to end, into chunks of at most `limit` bytes.
fn chunks(tensors: &[StateTensor<'_>], limit: usize) -> Vec<Chunk> {
    let mut by_type: BTreeMap<DType, Vec<Chunk>> = BTreeMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let dtype = tensor.dtype;
        let chunks = by_type.entry(dtype).or_default();
        let mut start = 0;
        while start < tensor.bytes.len() {
            if chunks.last().is_none_or(|chunk| chunk.bytes >= limit) {
                chunks.push(Chunk { dtype, bytes: 0, pieces: Vec::new() });
            }
            let Some(chunk) = chunks.last_mut() else { break };
            let end = tensor.bytes.len().min(start + (limit - chunk.bytes));
            chunk.pieces.push((index, start..end));
            chunk.bytes += end - start;
            start = end;
        }
    }
    by_type.into_values().flatten().collect()
}

impl Chunk {
    fn pack(&self, mut to: &mut [u8], tensors: &[StateTensor<'_>]) {
        for (tensor, range) in &self.pieces {
            let (piece, rest) = to.split_at_mut(range.len());
            piece.copy_from_slice(&tensors[*tensor].bytes[range.clone()]);
            to = rest;
        }
    }

    fn unpack(self, work: Work, tensors: &mut [StateTensor<'_>], is_root: bool) -> Result<()> {
        let buffer = work.wait()?;
        if is_root {
            return Ok(());
        }
        let mut from = buffer.as_bytes();
        if from.len() != self.bytes {
            return Err(Error::malformed(format!("a broadcast of {} B gave {} B", self.bytes, from.len())));
        }
        for (tensor, range) in self.pieces {
            let (piece, rest) = from.split_at(range.len());
            tensors[tensor].bytes[range].copy_from_slice(piece);
            from = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_byte_once_type_by_type() {
        let mut memory: Vec<Vec<u8>> = [24, 0, 8, 40, 16, 4].iter().map(|&len| vec![0; len]).collect();
        let types = [DType::F32, DType::F32, DType::I64, DType::F32, DType::I64, DType::F32];
        let tensors: Vec<_> =
            memory.iter_mut().zip(types).map(|(bytes, dtype)| StateTensor { dtype, bytes }).collect();
        let chunks = chunks(&tensors, 32);
        assert!(chunks.iter().all(|chunk| chunk.bytes <= 32 && chunk.bytes > 0));
        let sizes: Vec<_> = chunks.iter().map(|chunk| (chunk.dtype, chunk.bytes)).collect();
        assert_eq!(sizes, [(DType::F32, 32), (DType::F32, 32), (DType::F32, 4), (DType::I64, 24)]);
        for (index, tensor) in tensors.iter().enumerate() {
            let mut next = 0;
            for (_, range) in
                chunks.iter().flat_map(|chunk| &chunk.pieces).filter(|(piece, _)| *piece == index)
            {
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, tensor.bytes.len());
        }
    }
}
