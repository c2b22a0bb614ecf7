//! An optimizer's state, saved tensor by tensor.

use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use phalanx::Result;
use phalanx::state::{StateReader, StateWriter};

use super::storage::Owned;
use crate::optimizer::{Key, OptimizerState, other_model};
use crate::parameters::Parameter;
use crate::tensor_bytes;

/// The state without the elements of its tensors.
type Index = OptimizerState<()>;

/// Saves the state that `optimizer` has, of whichever parameters: its tensors behind `prefix`, and the rest as the value `index_name`.
pub(crate) fn save(
    optimizer: &ModuleOptimizer,
    parameters: &[Parameter],
    writer: &mut impl StateWriter,
    (index_name, prefix): (&str, &str),
) -> Result<()> {
    let OptimizerState { tensors, scalars, paths } = OptimizerState::of(optimizer, parameters)?;
    let layouts = tensors.iter().map(|(key, layout, _)| (key.clone(), layout.clone(), ())).collect();
    writer.value(index_name, &Index { tensors: layouts, scalars, paths })?;
    tensors.into_iter().try_for_each(|(key, layout, elements)| {
        let (name, dtype) = (name(prefix, &key, parameters)?, tensor_bytes::dtype(layout.dtype)?);
        writer.owned(&name, dtype, &layout.shape, Owned(elements))
    })
}

/// `optimizer` with the state that was saved in parts, of those parameters whose indices are to be kept.
pub(crate) fn load(
    optimizer: &ModuleOptimizer,
    parameters: &[Parameter],
    reader: &impl StateReader,
    (index_names, prefix): (impl IntoIterator<Item = String>, &str),
    keep: impl Fn(usize) -> bool,
) -> Result<ModuleOptimizer> {
    let mut state = OptimizerState::empty();
    for index_name in index_names {
        let Index { tensors, scalars, paths } = reader.value(&index_name)?;
        for (key, layout, ()) in tensors.into_iter().filter(|(key, ..)| keep(key.index)) {
            let (name, dtype) = (name(prefix, &key, parameters)?, tensor_bytes::dtype(layout.dtype)?);
            let elements = reader.tensor(&name, dtype, &layout.shape)?.into_owned();
            state.tensors.push((key, layout, Bytes::from_bytes_vec(elements)));
        }
        state.scalars.extend(scalars.into_iter().filter(|(key, _)| keep(key.index)));
        state.paths.extend(paths.into_iter().filter(|(index, _)| keep(*index)));
    }
    state.load(optimizer, parameters)
}

fn name(prefix: &str, key: &Key, parameters: &[Parameter]) -> Result<String> {
    let parameter = parameters.get(key.index).ok_or_else(other_model)?;
    Ok(format!("{prefix}.{}.{}", parameter.name, key.field))
}
