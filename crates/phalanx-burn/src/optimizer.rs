//! An optimizer's state: sent between ranks, saved in checkpoints, and loaded again.
//!
//! Burn keys it by parameter ids, which are random in each process, and returns it as one record without an order. Here
//! the key is the parameter's index in the model, and only [`OptimizerState`] reads and writes records.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device};
use burn_pack::{Reader, Scalar, Tensor, Writer};
use phalanx::adapter::copy_of;
use phalanx::reducer::{broadcast_bytes, states_identical};
use phalanx::{Buffer, Communicator, Error, Rank, Result, WorldSize};
use serde::{Deserialize, Serialize};

use crate::parameters::Parameter;
use crate::state::Layout;
use crate::tensor_bytes;

/// The most bytes of state that a rank accepts from another.
const MAX_BYTES: usize = 1 << 38;

/// The scalar in which Burn keeps the number of a parameter's dimensions.
pub(crate) const RANK: &str = "__rank";

/// The whole state of an optimizer, in the order of its keys; `E` are a tensor's elements.
#[derive(Serialize, Deserialize)]
pub(crate) struct OptimizerState<E = Bytes> {
    pub tensors: Vec<(Key, Layout, E)>,
    pub scalars: Vec<(Key, Scalar)>,
    /// The parameters' paths, by which Burn finds a parameter's group.
    pub paths: Vec<(usize, String)>,
}

/// A field of a parameter's state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Key {
    /// The parameter's index in the model.
    pub index: usize,
    pub field: String,
}

impl OptimizerState {
    pub fn empty() -> Self {
        Self { tensors: Vec::new(), scalars: Vec::new(), paths: Vec::new() }
    }

    /// The state that `optimizer` has of `parameters`.
    pub fn of(optimizer: &ModuleOptimizer, parameters: &[Parameter]) -> Result<Self> {
        let mut indices = HashMap::new();
        for (index, parameter) in parameters.iter().enumerate() {
            // A parameter that is used in several places has the index of the first.
            indices.entry(parameter.id.val()).or_insert(index);
        }
        Self::read(optimizer.to_record().into_bytes().map_err(unreadable)?, |id| indices.get(&id).copied())
    }

    /// `optimizer` with this state of `parameters`.
    ///
    /// # Errors
    /// If it is that of another model, or the optimizer would change the type of a tensor.
    pub fn load(self, optimizer: &ModuleOptimizer, parameters: &[Parameter]) -> Result<ModuleOptimizer> {
        own_dimensions(&self.scalars, parameters)?;
        self.check_types(optimizer, parameters)?;
        self.loaded(optimizer, parameters)
    }

    fn loaded(self, optimizer: &ModuleOptimizer, parameters: &[Parameter]) -> Result<ModuleOptimizer> {
        let id = |index: usize| parameters.get(index).map(|parameter| parameter.id.val());
        let record = OptimizerRecord::from_bytes(self.write(id)?).map_err(unreadable)?;
        Ok(optimizer.clone().load_record(record))
    }

    /// An error if `optimizer` would load a tensor as one of another type. Burn 0.22 makes what it loads tensors of the default device's
    /// default type, whatever they were: digits would be lost, or the next step would compute with two types.
    ///
    /// An optimizer of one's own may keep types, so it is asked: it loads tensors of one element.
    pub fn check_types(&self, optimizer: &ModuleOptimizer, parameters: &[Parameter]) -> Result<()> {
        if self.tensors.is_empty() {
            return Ok(());
        }
        let usual = burn::tensor::Tensor::<1>::zeros([1], &Device::default()).dtype();
        if self.tensors.iter().all(|(_, layout, _)| is_same(layout.dtype, usual)) {
            return Ok(());
        }
        let small = on_small(|| Self::of(&self.index().small().loaded(optimizer, parameters)?, parameters))?;
        let Some(small) = small else { return Ok(()) };
        let kept: BTreeMap<&Key, DType> =
            small.tensors.iter().map(|(key, layout, _)| (key, layout.dtype)).collect();
        let other = self.tensors.iter().find_map(|(key, layout, _)| {
            let kept = kept.get(key).filter(|kept| !is_same(**kept, layout.dtype))?;
            Some((key, layout.dtype, *kept))
        });
        let Some((Key { index, field }, saved, kept)) = other else { return Ok(()) };
        let name = parameters.get(*index).map_or("", |parameter| parameter.name.as_str());
        Err(Error::mismatch(format!(
            "`{field}` of `{name}` in the optimizer's state is {saved:?}, and this optimizer loads it as {kept:?}"
        ))
        .with_remedy(format!(
            "train with FusedAdamW or FusedSgd, which keep types; or make {saved:?} the default type of the first device by \
             Device::configure, before there are tensors: Burn's optimizers load what they keep in that type"
        )))
    }

    /// Reads a record; `index` translates its keys, and entries without an index are left out.
    fn read(record: Bytes, index: impl Fn(u64) -> Option<usize>) -> Result<Self> {
        let index = |key: &str| index(key.parse().ok()?);
        // Names are the key, a dot, and the field.
        let key = |name: &str| {
            let (key, field) = name.split_once('.')?;
            Some(Key { index: index(key)?, field: field.to_owned() })
        };
        let reader = Reader::from_bytes(record).map_err(unreadable)?;
        let scalars = reader.scalars().iter().filter_map(|(name, value)| Some((key(name)?, *value)));
        let paths = reader.metadata().iter().filter_map(|(key, path)| Some((index(key)?, path.clone())));
        let mut state = Self { tensors: Vec::new(), scalars: scalars.collect(), paths: paths.collect() };
        for tensor in reader.into_tensors().map_err(unreadable)? {
            let (name, dtype, shape, _, elements) = tensor.into_parts().map_err(unreadable)?;
            if let Some(key) = key(&name) {
                let layout = Layout { dtype, shape: shape.as_slice().to_vec() };
                state.tensors.push((key, layout, elements));
            }
        }
        state.tensors.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
        state.scalars.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        state.paths.sort_unstable();
        Ok(state)
    }

    /// Writes a record; `key` translates indices to keys.
    fn write(self, key: impl Fn(usize) -> Option<u64>) -> Result<Bytes> {
        let key = |index: usize| key(index).ok_or_else(|| unknown(index));
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for (Key { index, field }, Layout { dtype, shape }, elements) in self.tensors {
            let key = key(index)?;
            tensors.push(Tensor::new(format!("{key}.{field}"), dtype, shape.as_slice(), Some(key), elements));
        }
        let mut writer = Writer::new(tensors);
        for (Key { index, field }, value) in &self.scalars {
            writer = writer.with_scalar(&format!("{}.{field}", key(*index)?), *value);
        }
        for (index, path) in &self.paths {
            writer = writer.with_metadata(&key(*index)?.to_string(), path);
        }
        writer.into_bytes().map_err(unreadable)
    }

    /// It without the elements of its tensors.
    pub fn index(&self) -> OptimizerState<()> {
        let tensors = self.tensors.iter().map(|(key, layout, _)| (key.clone(), layout.clone(), ())).collect();
        OptimizerState { tensors, scalars: self.scalars.clone(), paths: self.paths.clone() }
    }

    /// In the form that is sent: a record whose keys are indices.
    pub fn into_bytes(self) -> Result<Bytes> {
        self.write(|index| u64::try_from(index).ok())
    }

    /// What [`into_bytes`](Self::into_bytes) has made.
    pub fn from_bytes(bytes: Bytes) -> Result<Self> {
        Self::read(bytes, |index| usize::try_from(index).ok())
    }

    fn extend(&mut self, other: Self) {
        self.tensors.extend(other.tensors);
        self.scalars.extend(other.scalars);
        self.paths.extend(other.paths);
    }
}

impl OptimizerState<()> {
    /// A state with tensors of one element each, which is zero.
    pub fn small(&self) -> OptimizerState {
        let tensors = self.tensors.iter().map(|(key, layout, ())| {
            let layout = Layout { dtype: layout.dtype, shape: vec![1; layout.shape.len()] };
            let element = Bytes::from_bytes_vec(vec![0; layout.dtype.size()]);
            (key.clone(), layout, element)
        });
        let (scalars, paths) = (self.scalars.clone(), self.paths.clone());
        OptimizerState { tensors: tensors.collect(), scalars, paths }
    }
}

/// What `attempt` gives, in which a copy of an optimizer has small tensors in place of the program's; None if it panics there. Burn's optimizers do
/// not. One of the program's own may count on sizes that its parameters have, such as one that projects gradients.
pub(crate) fn on_small<T>(attempt: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    // The copy, and all that it has changed, is thrown away.
    catch_unwind(AssertUnwindSafe(attempt)).ok().transpose()
}

/// Whether elements of the types are sent as the same.
fn is_same(one: DType, other: DType) -> bool {
    tensor_bytes::dtype(one).ok() == tensor_bytes::dtype(other).ok()
}

/// `optimizer` with the state of rank `root`, for the same `parameters`.
pub(crate) fn from_rank(
    optimizer: &ModuleOptimizer,
    group: &dyn Communicator,
    root: Rank,
    parameters: &[Parameter],
) -> Result<ModuleOptimizer> {
    if group.rank() == root {
        broadcast_bytes(group, root, &own_state(optimizer, group, parameters)?, MAX_BYTES)?;
        return Ok(optimizer.clone());
    }
    let state = received(&broadcast_bytes(group, root, &[], MAX_BYTES)?);
    // The root goes on, and would wait for this rank.
    let loaded = state.and_then(|state| state.load(optimizer, parameters));
    loaded.inspect_err(|error| group.abort(error.clone()))
}

/// The state of this rank's `optimizer`. An error ends the group: the others wait for it.
fn own_state(
    optimizer: &ModuleOptimizer,
    group: &dyn Communicator,
    parameters: &[Parameter],
) -> Result<Bytes> {
    let state = OptimizerState::of(optimizer, parameters).and_then(OptimizerState::into_bytes);
    state.inspect_err(|error| group.abort(error.clone()))
}

/// An error on every rank unless all ranks' optimizers keep the same of `parameters`: the same fields, after as many steps. Elements are not
/// compared: processors of several kinds may have rounded in other ways.
pub(crate) fn check_states(
    optimizer: &ModuleOptimizer,
    group: &dyn Communicator,
    parameters: &[Parameter],
) -> Result<()> {
    if group.world_size() == WorldSize::ONE {
        return Ok(());
    }
    // The others wait for this rank.
    let state = OptimizerState::of(optimizer, parameters).inspect_err(|error| group.abort(error.clone()))?;
    let keys: Vec<&Key> = state.tensors.iter().map(|(key, ..)| key).collect();
    // Of an optimizer that keeps nothing, such as SGD without momentum, Burn's records have that alone.
    let scalars: Vec<_> = state.scalars.iter().filter(|(key, _)| key.field != RANK).collect();
    let kept = format!("{keys:?} {scalars:?}");
    if states_identical(group, [kept.as_bytes()])? {
        return Ok(());
    }
    Err(Error::mismatch(
        "the ranks' optimizers have different states: one has something of a parameter, or a number of steps, that another has not",
    )
    .with_remedy(
        "load the same state on every rank, or on none; Burn's records have it under parameters' ids, which must be those of this rank's model",
    ))
}

/// `optimizer` with the states of all ranks together, on rank `to`; elsewhere nothing.
pub(crate) fn gather(
    optimizer: &ModuleOptimizer,
    group: &dyn Communicator,
    to: Rank,
    parameters: &[Parameter],
) -> Result<Option<ModuleOptimizer>> {
    let mine = own_state(optimizer, group, parameters)?;
    let mut whole = OptimizerState::empty();
    for rank in group.world_size().ranks() {
        let state = broadcast_bytes(group, rank, &mine, MAX_BYTES)?;
        if group.rank() == to {
            // The others go on, and wait for this rank's part.
            whole.extend(received(&state).inspect_err(|error| group.abort(error.clone()))?);
        }
    }
    let loaded = (group.rank() == to).then(|| whole.load(optimizer, parameters)).transpose();
    // The others go on, and would wait for this rank.
    loaded.inspect_err(|error| group.abort(error.clone()))
}

/// `optimizer` with the state of only those `parameters` that are in `keep`.
pub(crate) fn restricted(
    optimizer: ModuleOptimizer,
    parameters: &[Parameter],
    keep: &HashSet<ParamId>,
) -> Result<ModuleOptimizer> {
    if optimizer.to_record().is_empty() {
        return Ok(optimizer);
    }
    let kept: Vec<_> = parameters.iter().filter(|parameter| keep.contains(&parameter.id)).cloned().collect();
    OptimizerState::of(&optimizer, &kept)?.load(&optimizer, &kept)
}

/// The size of the state when it is saved.
pub(crate) fn bytes(optimizer: &ModuleOptimizer) -> Result<usize> {
    optimizer.to_record().into_bytes().map(|bytes| bytes.len()).map_err(unreadable)
}

/// The state that another rank has sent.
fn received(state: &Buffer) -> Result<OptimizerState> {
    OptimizerState::from_bytes(Bytes::from_bytes_vec(copy_of(state.as_bytes())?))
}

/// Checks that each parameter has as many dimensions as when the state was saved.
pub(crate) fn own_dimensions(scalars: &[(Key, Scalar)], parameters: &[Parameter]) -> Result<()> {
    for (Key { index, .. }, saved) in scalars.iter().filter(|(key, _)| key.field == RANK) {
        let parameter = parameters.get(*index).ok_or_else(|| unknown(*index))?;
        if Scalar::from(parameter.shape.len()) != *saved {
            let Parameter { name, shape, .. } = parameter;
            let saved = usize::try_from(*saved)
                .map_or_else(|_| "another number of".to_owned(), |saved| saved.to_string());
            return Err(other_model(&format!(
                "its tensors of `{name}` have {saved} dimensions, and `{name}` is {shape:?}"
            )));
        }
    }
    Ok(())
}

pub(crate) fn unknown(index: usize) -> Error {
    other_model(&format!("it has tensors of parameter number {index}, which does not exist"))
}

pub(crate) fn other_model(cause: &str) -> Error {
    Error::mismatch(format!("the optimizer's state is that of another model: {cause}"))
        .with_remedy("build the model as it was built when the state was saved")
}

fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::invalid_argument("the optimizer's state cannot be read").with_source(error)
}
