//! How replicas stay equal besides averaged gradients: copies of rank 0's state, and a check.

use burn::module::Module;
use burn::tensor::TensorData;
use phalanx::reducer::{StateTensor, broadcast_state, states_identical};
use phalanx::{Communicator, Rank, Result};

use crate::parameters::{self, Select};
use crate::tensor_bytes;

/// `model` with the selected tensors of rank `root`.
pub(crate) fn from_rank<M: Module>(
    model: M,
    group: &dyn Communicator,
    root: Rank,
    select: Select<'_>,
) -> Result<M> {
    // Running state defers the last forward pass's update, which would be missing here, and would replace there what the root has sent. This
    // applies it, for all clones of the state.
    drop(model.valid());
    let mut parts: Vec<_> = read(&model, group, select)?.into_iter().map(TensorData::into_parts).collect();
    let tensors = parts
        .iter_mut()
        .map(|(bytes, _, dtype)| Ok(StateTensor { dtype: tensor_bytes::dtype(*dtype)?, bytes }));
    broadcast_state(group, root, &mut tensors.collect::<Result<Vec<_>>>()?)?;
    if group.rank() == root {
        return Ok(model);
    }
    let data = parts.into_iter().map(|(bytes, shape, dtype)| TensorData::from_bytes(bytes, shape, dtype));
    Ok(parameters::write(model, select, data.collect()))
}

/// Whether the selected tensors are the same bits on every rank.
pub(crate) fn identical<M: Module>(model: &M, group: &dyn Communicator, select: Select<'_>) -> Result<bool> {
    states_identical(group, read(model, group, select)?.iter().map(TensorData::as_bytes))
}

/// The selected tensors. The others wait for them: if this rank's device cannot give them, the group ends.
fn read<M: Module>(model: &M, group: &dyn Communicator, select: Select<'_>) -> Result<Vec<TensorData>> {
    parameters::read(model, select).inspect_err(|error| group.abort(error.clone()))
}
