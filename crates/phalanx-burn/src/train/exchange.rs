//! What ranks tell each other besides gradients.

use burn::tensor::{Device, TensorData};
use phalanx::{ProcessGroup, Rank, ReduceOp, Result, WorldSize};

use super::outputs::Outputs;

/// Do all ranks say yes?
pub(super) fn all(group: &ProcessGroup, yes: bool) -> Result<bool> {
    Ok(reduced(group, u8::from(yes), ReduceOp::Min)? != 0)
}

/// Does any rank say yes?
pub(super) fn any(group: &ProcessGroup, yes: bool) -> Result<bool> {
    Ok(highest(group, u8::from(yes))? != 0)
}

/// The highest level of all ranks.
pub(super) fn highest(group: &ProcessGroup, own: u8) -> Result<u8> {
    reduced(group, own, ReduceOp::Max)
}

fn reduced(group: &ProcessGroup, own: u8, op: ReduceOp) -> Result<u8> {
    let mut answer = [own];
    group.all_reduce(&mut answer, op)?;
    Ok(answer[0])
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
    let Some(outputs) = group.gather_object(&own, Rank::MAIN)? else { return Ok(None) };
    let outputs: Vec<_> = outputs.into_iter().filter(|tensors| !tensors.is_empty()).collect();
    if outputs.is_empty() { Ok(None) } else { T::together(outputs, device).map(Some) }
}
