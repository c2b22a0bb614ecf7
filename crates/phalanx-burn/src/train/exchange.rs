//! What ranks tell each other besides gradients.

use burn::tensor::{Device, TensorData};
use phalanx::{Error, ProcessGroup, Rank, ReduceOp, Result, WorldSize};

use super::outputs::Outputs;

/// The largest output of a step, packed, that is taken from a peer.
const MAX_OUTPUT: u64 = 1 << 30;

/// Do all ranks say yes?
pub(super) fn all(group: &ProcessGroup, yes: bool) -> Result<bool> {
    reduced(group, yes, ReduceOp::Min)
}

/// Does any rank say yes?
pub(super) fn any(group: &ProcessGroup, yes: bool) -> Result<bool> {
    reduced(group, yes, ReduceOp::Max)
}

fn reduced(group: &ProcessGroup, yes: bool, op: ReduceOp) -> Result<bool> {
    let mut answer = [u8::from(yes)];
    group.all_reduce(&mut answer, op)?;
    Ok(answer[0] != 0)
}

/// What rank 0 says.
pub(super) fn main_s(group: &ProcessGroup, yes: bool) -> Result<bool> {
    let mut answer = [u8::from(yes)];
    group.broadcast(&mut answer, Rank::MAIN)?;
    Ok(answer[0] != 0)
}

/// On rank 0, the outputs of all ranks that had one, as one; nothing elsewhere.
pub(super) fn gather<T: Outputs>(group: &ProcessGroup, own: Option<T>, device: &Device) -> Result<Option<T>> {
    if group.world_size() == WorldSize::ONE {
        return Ok(own);
    }
    let own: Vec<TensorData> = own.map(Outputs::into_tensors).unwrap_or_default();
    let packed = postcard::to_stdvec(&own)
        .map_err(|error| Error::invalid_argument(format!("an output cannot be packed: {error}")))?;
    let ranks = group.world_size().count();
    let mut lengths = vec![0i64; ranks];
    group.all_gather(&[packed.len() as i64], &mut lengths)?;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if !u64::try_from(longest).is_ok_and(|longest| longest <= MAX_OUTPUT) {
        return Err(Error::invalid_argument(format!("the output of a step is too large: {longest} B"))
            .with_remedy("let the step give what its metrics need, and no more"));
    }
    let longest = longest as usize;
    let mut padded = packed;
    padded.resize(longest, 0);
    let mut everything = vec![0u8; longest * ranks];
    group.all_gather(&padded, &mut everything)?;
    if !group.rank().is_main() || longest == 0 {
        return Ok(None);
    }
    let unpack = |packed: &[u8]| {
        postcard::take_from_bytes::<Vec<TensorData>>(packed)
            .map(|(tensors, _padding)| tensors)
            .map_err(|error| Error::mismatch(format!("a rank's output cannot be read: {error}")))
    };
    let outputs = everything.chunks(longest).map(unpack).collect::<Result<Vec<_>>>()?;
    let outputs: Vec<_> = outputs.into_iter().filter(|tensors| !tensors.is_empty()).collect();
    if outputs.is_empty() { Ok(None) } else { T::together(outputs, device).map(Some) }
}
