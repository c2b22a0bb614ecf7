//! An optimizer's state, tensor by tensor.
//!
//! Burn keys it by parameter ids, which each process draws by itself; what is saved says the parameter's place in the model.
//! Burn keeps it in a map of no order, and lets nobody see it but as one record: so it is copied into that first, and
//! then saved in the order of names.

use std::collections::HashMap;

use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Bytes;
use burn_pack::{Reader, Scalar, Tensor, Writer};
use phalanx::{Error, Result};
use serde::{Deserialize, Serialize};

use super::medium::{Layout, Source, Target};
use crate::parameters::Parameter;

/// The scalar under which Burn keeps the number of a parameter's dimensions.
const RANK: &str = "__rank";

/// The state without the elements of its tensors.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Index {
    tensors: Vec<(Key, Layout)>,
    scalars: Vec<(Key, Scalar)>,
    /// The parameters' paths, by which Burn finds the group that a parameter belongs to.
    paths: Vec<(usize, String)>,
}

/// A field of a parameter's state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Key {
    /// The parameter's place in the model.
    place: usize,
    field: String,
}

pub(super) fn save(
    optimizer: &ModuleOptimizer,
    state: &[Parameter],
    target: &mut impl Target,
    prefix: &str,
) -> Result<()> {
    save_part(optimizer, state, target, (prefix, prefix))
}

/// Saves the state that `optimizer` has, of whichever parameters: its tensors behind `prefix`, and the rest as the value `index_name`.
pub(crate) fn save_part(
    optimizer: &ModuleOptimizer,
    state: &[Parameter],
    target: &mut impl Target,
    (index_name, prefix): (&str, &str),
) -> Result<()> {
    let mut places = HashMap::new();
    for (place, parameter) in state.iter().enumerate() {
        // One that stands in several places is known by the first.
        places.entry(parameter.id.val()).or_insert(place);
    }
    let place = |id: &str| places.get(&id.parse().ok()?).copied();
    // Names are the id, a dot, and the field.
    let key = |name: &str| {
        let (id, field) = name.split_once('.')?;
        Some(Key { place: place(id)?, field: field.to_owned() })
    };
    let reader =
        Reader::from_bytes(optimizer.to_record().into_bytes().map_err(unreadable)?).map_err(unreadable)?;
    let mut index = Index {
        tensors: Vec::new(),
        scalars: reader.scalars().iter().filter_map(|(name, value)| Some((key(name)?, *value))).collect(),
        paths: reader.metadata().iter().filter_map(|(id, path)| Some((place(id)?, path.clone()))).collect(),
    };
    let mut tensors = Vec::new();
    for tensor in reader.into_tensors().map_err(unreadable)? {
        let (name, dtype, shape, _, elements) = tensor.into_parts().map_err(unreadable)?;
        if let Some(key) = key(&name) {
            tensors.push((key, Layout { dtype, shape: shape.as_slice().to_vec() }, elements));
        }
    }
    tensors.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
    index.scalars.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    index.paths.sort_unstable();
    index.tensors = tensors.iter().map(|(key, layout, _)| (key.clone(), layout.clone())).collect();
    target.value(index_name, &index)?;
    tensors
        .into_iter()
        .try_for_each(|(key, layout, elements)| target.owned(&name(prefix, &key, state)?, &layout, elements))
}

/// `optimizer` with the state that was saved.
pub(super) fn load(
    optimizer: &ModuleOptimizer,
    state: &[Parameter],
    source: &impl Source,
    prefix: &str,
) -> Result<ModuleOptimizer> {
    load_parts(optimizer, state, source, (std::iter::once(prefix.to_owned()), prefix), |_| true)
}

/// `optimizer` with the state that was saved in parts, of those parameters whose places are to be kept.
pub(crate) fn load_parts(
    optimizer: &ModuleOptimizer,
    state: &[Parameter],
    source: &impl Source,
    (index_names, prefix): (impl Iterator<Item = String>, &str),
    keep: impl Fn(usize) -> bool,
) -> Result<ModuleOptimizer> {
    let mut index = Index::default();
    for name in index_names {
        let part: Index = source.value(&name)?;
        index.tensors.extend(part.tensors.into_iter().filter(|(key, _)| keep(key.place)));
        index.scalars.extend(part.scalars.into_iter().filter(|(key, _)| keep(key.place)));
        index.paths.extend(part.paths.into_iter().filter(|(place, _)| keep(*place)));
    }
    let id = |place: usize| state.get(place).map(|parameter| parameter.id.val()).ok_or_else(other_model);
    let mut tensors = Vec::with_capacity(index.tensors.len());
    for (key, layout) in &index.tensors {
        let (id, elements) = (id(key.place)?, source.tensor(&name(prefix, key, state)?, layout)?);
        let elements = Bytes::from_bytes_vec(elements.to_vec());
        let (name, shape) = (format!("{id}.{}", key.field), layout.shape.as_slice());
        tensors.push(Tensor::new(name, layout.dtype, shape, Some(id), elements));
    }
    let mut writer = Writer::new(tensors);
    for (Key { place, field }, value) in &index.scalars {
        let dimensions = state.get(*place).map(|parameter| Scalar::from(parameter.shape.len()));
        if field == RANK && dimensions != Some(*value) {
            return Err(other_model());
        }
        writer = writer.with_scalar(&format!("{}.{field}", id(*place)?), *value);
    }
    for (place, path) in &index.paths {
        writer = writer.with_metadata(&id(*place)?.to_string(), path);
    }
    let record = OptimizerRecord::from_bytes(writer.into_bytes().map_err(unreadable)?).map_err(unreadable)?;
    Ok(optimizer.clone().load_record(record))
}

fn name(prefix: &str, key: &Key, state: &[Parameter]) -> Result<String> {
    let parameter = state.get(key.place).ok_or_else(other_model)?;
    Ok(format!("{prefix}.{}.{}", parameter.name, key.field))
}

fn other_model() -> Error {
    Error::mismatch("the optimizer's state is that of another model")
        .with_remedy("build the model as it was built when the state was saved")
}

fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::invalid_argument("the optimizer's state cannot be read").with_source(error)
}
