//! An optimizer's state on its way between ranks.
//!
//! Burn keys it by parameter ids, which each process draws by itself, so on the way it is keyed by the parameter's
//! place in the model.

use std::collections::{BTreeMap, HashMap, HashSet};

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Bytes;
use burn_pack::{Reader, Tensor, Writer};
use phalanx::{Buffer, Communicator, DType, Error, Rank, Result};

use crate::parameters::Parameter;

/// The most bytes of state that one rank may make another take.
const MAX_BYTES: usize = 1 << 38;

/// `optimizer` with the state of rank `root`, for the same `parameters`.
pub(crate) fn from_rank(
    optimizer: &ModuleOptimizer,
    group: &dyn Communicator,
    root: Rank,
    parameters: &[Parameter],
) -> Result<ModuleOptimizer> {
    let ids: Vec<u64> = parameters.iter().map(|parameter| parameter.id.val()).collect();
    let mine =
        if group.rank() == root { places(optimizer, &ids)? } else { Bytes::from_bytes_vec(Vec::new()) };
    let state = broadcast(group, root, &mine)?;
    if group.rank() == root {
        return Ok(optimizer.clone());
    }
    let state =
        rekeyed(state, |place| usize::try_from(place).ok().and_then(|place| ids.get(place).copied()))?;
    Ok(optimizer.clone().load_record(OptimizerRecord::from_bytes(state).map_err(unreadable)?))
}

/// `optimizer` with the state of the parameters in `keep` only.
pub(crate) fn restricted(optimizer: ModuleOptimizer, keep: &HashSet<ParamId>) -> Result<ModuleOptimizer> {
    let state = optimizer.to_record();
    if state.is_empty() {
        return Ok(optimizer);
    }
    let keep: HashSet<u64> = keep.iter().map(ParamId::val).collect();
    let state = rekeyed(state.into_bytes().map_err(unreadable)?, |id| keep.contains(&id).then_some(id))?;
    Ok(optimizer.load_record(OptimizerRecord::from_bytes(state).map_err(unreadable)?))
}

/// How large the state is when it is saved.
pub(crate) fn bytes(optimizer: &ModuleOptimizer) -> Result<usize> {
    optimizer.to_record().into_bytes().map(|bytes| bytes.len()).map_err(unreadable)
}

/// The states of all ranks, on rank `to`, keyed by its own ids; elsewhere nothing.
pub(crate) fn gather(
    optimizer: &ModuleOptimizer,
    group: &dyn Communicator,
    to: Rank,
    parameters: &[Parameter],
) -> Result<Vec<Bytes>> {
    let ids: Vec<u64> = parameters.iter().map(|parameter| parameter.id.val()).collect();
    let mine = places(optimizer, &ids)?;
    let mut states = Vec::new();
    for rank in group.world_size().ranks() {
        let state = broadcast(group, rank, &mine)?;
        if group.rank() == to {
            states.push(rekeyed(state, |place| ids.get(usize::try_from(place).ok()?).copied())?);
        }
    }
    Ok(states)
}

/// `optimizer` with all of `states` together.
pub(crate) fn merged(optimizer: &ModuleOptimizer, states: Vec<Bytes>) -> Result<ModuleOptimizer> {
    let mut tensors = Vec::new();
    let (mut scalars, mut paths) = (BTreeMap::new(), BTreeMap::new());
    for state in states {
        let reader = Reader::from_bytes(state).map_err(unreadable)?;
        scalars.extend(reader.scalars().clone());
        paths.extend(reader.metadata().clone());
        tensors.extend(reader.into_tensors().map_err(unreadable)?);
    }
    let mut writer = Writer::new(tensors);
    for (name, value) in &scalars {
        writer = writer.with_scalar(name, *value);
    }
    for (key, path) in &paths {
        writer = writer.with_metadata(key, path);
    }
    let state = writer.into_bytes().map_err(unreadable)?;
    Ok(optimizer.clone().load_record(OptimizerRecord::from_bytes(state).map_err(unreadable)?))
}

/// The state, keyed by places.
fn places(optimizer: &ModuleOptimizer, ids: &[u64]) -> Result<Bytes> {
    let places: HashMap<u64, u64> = ids.iter().copied().zip(0..).collect();
    let state = optimizer.to_record().into_bytes().map_err(unreadable)?;
    rekeyed(state, |id| places.get(&id).copied())
}

/// `state` under other keys; what has no new key is left out.
fn rekeyed(state: Bytes, new: impl Fn(u64) -> Option<u64>) -> Result<Bytes> {
    let reader = Reader::from_bytes(state).map_err(unreadable)?;
    let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
    // Names are the key, a dot, and the field.
    let rename = |name: &str| {
        let (key, field) = name.split_once('.')?;
        Some(format!("{}.{field}", new(key.parse().ok()?)?))
    };
    let mut tensors = Vec::new();
    for tensor in reader.into_tensors().map_err(unreadable)? {
        let (name, dtype, shape, id, bytes) = tensor.into_parts().map_err(unreadable)?;
        if let (Some(name), Some(id)) = (rename(&name), id.and_then(&new)) {
            tensors.push(Tensor::new(name, dtype, shape, Some(id), bytes));
        }
    }
    let mut writer = Writer::new(tensors);
    for (name, value) in &scalars {
        if let Some(name) = rename(name) {
            writer = writer.with_scalar(&name, *value);
        }
    }
    for (key, path) in &paths {
        if let Some(key) = key.parse().ok().and_then(&new) {
            writer = writer.with_metadata(&key.to_string(), path);
        }
    }
    writer.into_bytes().map_err(unreadable)
}

/// The bytes of rank `root`, on every rank.
fn broadcast(group: &dyn Communicator, root: Rank, mine: &[u8]) -> Result<Bytes> {
    let length = group.broadcast_async(Buffer::from_slice(&[mine.len() as i64]), root)?.wait()?;
    let length = length.as_slice::<i64>()?.first().copied().unwrap_or(-1);
    let length = usize::try_from(length).ok().filter(|&length| length <= MAX_BYTES).ok_or_else(|| {
        Error::aborted(format!(
            "rank {root} announced {length} B of optimizer state; at most {MAX_BYTES} are taken"
        ))
    })?;
    let mut buffer = group.alloc(DType::U8, length)?;
    if group.rank() == root {
        buffer.as_bytes_mut().copy_from_slice(mine);
    }
    let buffer = group.broadcast_async(buffer, root)?.wait()?;
    Ok(Bytes::from_bytes_vec(buffer.as_bytes().to_vec()))
}

fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::invalid_argument("the optimizer's state cannot be read").with_source(error)
}
