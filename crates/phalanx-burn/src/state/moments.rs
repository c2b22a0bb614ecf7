//! An optimizer's state, saved tensor by tensor.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use phalanx::Result;
use phalanx::state::{StateReader, StateWriter};

use super::fit::{self, Begun};
use super::storage::Owned;
use crate::optimizer::{Key, OptimizerState, unknown};
use crate::parameters::Parameter;
use crate::tensor_bytes;

/// The state without the elements of its tensors.
type Index = OptimizerState<()>;

/// Saves the state that `optimizer` has, of whichever parameters: its tensors behind `prefix`, and the rest as the value `index_name`.
///
/// # Errors
/// If it cannot be read or written, or the optimizer would load a tensor as one of another type: nobody could go on from it.
pub(crate) fn save(
    optimizer: &ModuleOptimizer,
    parameters: &[Parameter],
    writer: &mut impl StateWriter,
    (index_name, prefix): (&str, &str),
) -> Result<()> {
    let state = OptimizerState::of(optimizer, parameters)?;
    state.check_types(optimizer, parameters)?;
    writer.value(index_name, &state.index())?;
    state.tensors.into_iter().try_for_each(|(key, layout, elements)| {
        let (name, dtype) = (name(prefix, &key, parameters)?, tensor_bytes::dtype(layout.dtype)?);
        writer.owned(&name, dtype, &layout.shape, Owned(elements))
    })
}

/// `optimizer` with the state of `parameters` of `model` that was saved in parts, of those whose indices are to be kept.
///
/// # Errors
/// If it cannot be read, is that of another model, or [does not fit](fit::check) the optimizer. Where nothing was saved of those that are
/// kept, it fits if something was saved of others: the kept ones may never have had a gradient, and may be none.
pub(crate) fn load<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    reader: &impl StateReader,
    begun: Begun,
    (index_names, prefix): (impl IntoIterator<Item = String>, &str),
    keep: impl Fn(usize) -> bool,
) -> Result<ModuleOptimizer> {
    let mut index = Index { tensors: Vec::new(), scalars: Vec::new(), paths: Vec::new() };
    let mut has_state = false;
    for index_name in index_names {
        let Index { tensors, scalars, paths } = reader.value(&index_name)?;
        has_state |= !tensors.is_empty() || !scalars.is_empty();
        index.tensors.extend(tensors.into_iter().filter(|(key, ..)| keep(key.index)));
        index.scalars.extend(scalars.into_iter().filter(|(key, _)| keep(key.index)));
        index.paths.extend(paths.into_iter().filter(|(index, _)| keep(*index)));
    }
    fit::check(optimizer, (model, parameters), &index, begun.unless(has_state))?;
    let tensors = index.tensors.into_iter().map(|(key, layout, ())| {
        let (name, dtype) = (name(prefix, &key, parameters)?, tensor_bytes::dtype(layout.dtype)?);
        let elements = reader.tensor(&name, dtype, &layout.shape)?.into_owned();
        Ok((key, layout, Bytes::from_bytes_vec(elements)))
    });
    let (tensors, scalars, paths) = (tensors.collect::<Result<_>>()?, index.scalars, index.paths);
    OptimizerState { tensors, scalars, paths }.load(optimizer, parameters)
}

fn name(prefix: &str, key: &Key, parameters: &[Parameter]) -> Result<String> {
    let parameter = parameters.get(key.index).ok_or_else(|| unknown(key.index))?;
    Ok(format!("{prefix}.{}.{}", parameter.name, key.field))
}
