//! The tensors of a `VarStore`, and how they travel.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx::reducer::{ParameterSpec, StateTensor, broadcast_state_from, states_identical};
use phalanx::{Communicator, Error, Rank, Result};
use tch::Tensor;
use tch::nn::{VarStore, Variables};

use crate::shim;

/// A tensor of a `VarStore`; the handle shares its memory.
#[derive(Debug)]
pub(crate) struct Named {
    pub spec: ParameterSpec,
    pub tensor: Tensor,
}

impl Clone for Named {
    fn clone(&self) -> Self {
        Self { spec: self.spec.clone(), tensor: self.tensor.shallow_clone() }
    }
}

impl Named {
    /// An error if it is no longer what the ranks have compared.
    pub fn check_kind(&self) -> Result<()> {
        let Self { spec, tensor } = self;
        if tensor.numel() == spec.elements()
            && shim::dtype(tensor.kind()).is_ok_and(|dtype| dtype == spec.dtype)
        {
            return Ok(());
        }
        let (kind, size) = (tensor.kind(), tensor.size());
        Err(Error::invalid_argument(format!(
            "the variable's type changed since Ddp::new: {spec} is {kind:?} {size:?} now"
        ))
        .with_remedy("change the VarStore first, then make the Ddp"))
    }
}

/// The tensors of a `VarStore`.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// The parameters that need a gradient, in the order in which they were made.
    pub parameters: Vec<Named>,
    /// Every tensor, by name: also frozen parameters, buffers, and tensors that are no floats.
    pub state: Vec<Named>,
    /// The positions in `state` of what no optimizer changes, such as the running statistics of batch norm.
    pub buffers: Vec<usize>,
}

/// What a `VarStore` has in common with its copies here.
pub(crate) type Shared = Arc<Mutex<Variables>>;

pub(crate) fn shared(store: &VarStore) -> Shared {
    store.variables_.clone()
}

impl Inventory {
    /// Lists the tensors of a `VarStore`; refuses one that cannot be trained here.
    pub fn of(variables: &Shared) -> Result<Self> {
        let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = variables.named_variables.iter().collect::<Vec<_>>();
        state.sort_unstable_by_key(|(name, _)| name.as_str());
        let state = state
            .into_iter()
            .map(|(name, tensor)| named(name.clone(), tensor))
            .collect::<Result<Vec<_>>>()?;
        let names: HashMap<usize, &str> =
            state.iter().map(|one| (shim::identity(&one.tensor), one.spec.name.as_str())).collect();

        let (mut parameters, mut trainable) = (Vec::new(), HashSet::new());
        for variable in &variables.trainable_variables {
            let identity = shim::identity(&variable.tensor);
            // One that is used in several places is listed once.
            if trainable.insert(identity) && variable.tensor.requires_grad() {
                let Some(name) = names.get(&identity) else {
                    let cause = "a trainable variable is not among the named ones of its VarStore";
                    return Err(Error::invalid_argument(cause));
                };
                parameters.push(named((*name).to_owned(), &variable.tensor)?);
            }
        }
        if parameters.is_empty() {
            let cause = match state.len() {
                0 => "the VarStore has no variables".to_owned(),
                count => format!(
                    "no parameter of the model needs a gradient: all {count} variables are frozen or buffers"
                ),
            };
            return Err(Error::invalid_argument(cause)
                .with_remedy("make the layers before the Ddp; unfreeze some with VarStore::unfreeze"));
        }
        let is_buffer = |one: &Named| !trainable.contains(&shim::identity(&one.tensor));
        let buffers =
            state.iter().enumerate().filter(|(_, one)| is_buffer(one)).map(|(index, _)| index).collect();
        Ok(Self { parameters, state, buffers })
    }

    /// What the ranks compare of `tensors`.
    pub fn specs(tensors: &[Named]) -> Vec<ParameterSpec> {
        tensors.iter().map(|one| one.spec.clone()).collect()
    }

    pub fn buffers(&self) -> Vec<Tensor> {
        self.buffers
            .iter()
            .filter_map(|&index| self.state.get(index))
            .map(|one| one.tensor.shallow_clone())
            .collect()
    }
}

fn named(name: String, tensor: &Tensor) -> Result<Named> {
    if !shim::is_plain(tensor) {
        let place = tensor.device();
        return Err(Error::invalid_argument(format!("the variable `{name}` is on {place:?}, or sparse"))
            .with_remedy("this version averages dense gradients in this machine's memory: use VarStore::new(Device::Cpu)"));
    }
    let shape: Vec<usize> =
        tensor.size().into_iter().map(|side| usize::try_from(side).unwrap_or(0)).collect();
    let spec = ParameterSpec::new(name, shape, shim::dtype(tensor.kind())?);
    Ok(Named { spec, tensor: tensor.shallow_clone() })
}

/// Gives `change` the elements of all `tensors`, for writing. Tensors whose elements do not lie row by row are copied, and
/// copied back; elements that several tensors share are given once.
pub(crate) fn with_elements<T>(
    tensors: &[Tensor],
    change: impl FnOnce(&mut [StateTensor<'_>]) -> Result<T>,
) -> Result<T> {
    let _guard = tch::no_grad_guard();
    let mut rows = rows(tensors)?;
    let mut parts = Vec::with_capacity(rows.len());
    for (index, row) in &mut rows {
        let dtype = shim::dtype(row.kind())?;
        let bytes = shim::bytes_mut(row).ok_or_else(|| without_memory(*index))?;
        parts.push(StateTensor { dtype, bytes });
    }
    let outcome = change(&mut parts)?;
    drop(parts);
    for (index, row) in rows {
        let mut tensor = tensors[index].shallow_clone();
        if tensor.data_ptr() != row.data_ptr() {
            tensor.f_copy_(&row).map_err(torch)?;
        }
    }
    Ok(outcome)
}

/// Gives `look` the elements of all `tensors`, as [`with_elements`] does, and leaves the tensors alone: autograd refuses to run backward
/// through one that was written since.
pub(crate) fn read_elements<T>(tensors: &[Tensor], look: impl FnOnce(&[&[u8]]) -> Result<T>) -> Result<T> {
    let _guard = tch::no_grad_guard();
    let rows = rows(tensors)?;
    let bytes = |(index, row)| shim::bytes(row).ok_or_else(|| without_memory(index));
    let parts = rows.iter().map(|(index, row)| bytes((*index, row))).collect::<Result<Vec<_>>>()?;
    look(&parts)
}

/// Of the tensors that [`distinct`] names, the position and the elements row by row: in place where they lie so.
fn rows(tensors: &[Tensor]) -> Result<Vec<(usize, Tensor)>> {
    let row = |(index, is_shared): (usize, bool)| {
        let tensor = &tensors[index];
        let own = if is_shared { tensor.f_detach_copy() } else { tensor.f_detach() };
        Ok((index, own.and_then(|tensor| tensor.f_contiguous()).map_err(torch)?))
    };
    distinct(tensors).into_iter().map(row).collect()
}

fn without_memory(index: usize) -> Error {
    Error::invalid_argument(format!("tensor {index} has no memory of this machine"))
}

/// The positions of the tensors, without those that lie within another one, which has their elements; and of each, does it
/// share a part of its elements with another?
fn distinct(tensors: &[Tensor]) -> Vec<(usize, bool)> {
    // Begin and end, from the first element to the last, whatever lies between; and does nothing lie between?
    let extent = |(index, tensor): (usize, &Tensor)| {
        let strides = tensor.size().into_iter().zip(tensor.stride());
        let last: i64 = strides.map(|(side, stride)| (side - 1) * stride).sum();
        let begin = tensor.data_ptr() as usize;
        let bytes = (usize::try_from(last).unwrap_or(0) + 1) * tensor.kind().elt_size_in_bytes();
        (begin, begin + bytes, tensor.is_contiguous(), index)
    };
    let mut extents: Vec<_> =
        tensors.iter().enumerate().filter(|(_, tensor)| tensor.numel() > 0).map(extent).collect();
    // One that has all its elements comes before those that lie within it.
    extents.sort_by_key(|&(begin, end, is_rows, index)| (begin, Reverse(end), !is_rows, index));
    let (mut kept, mut last, mut rows_end) = (Vec::new(), (0, 0), 0);
    for (begin, end, is_rows, index) in extents {
        if (begin, end) == last || end <= rows_end {
            continue;
        }
        let is_shared = begin < rows_end;
        if is_rows && !is_shared {
            rows_end = end;
        }
        last = (begin, end);
        kept.push((index, is_shared));
    }
    // The same order on every rank.
    kept.sort_unstable();
    kept
}

/// All ranks take over `tensors` of rank `root`.
pub(crate) fn from_rank(group: &dyn Communicator, root: Rank, tensors: &[Tensor]) -> Result<()> {
    with_elements(tensors, |parts| broadcast_state_from(group, root, parts))
}

/// Are `tensors` the same bits on every rank?
pub(crate) fn identical(group: &dyn Communicator, tensors: &[Tensor]) -> Result<bool> {
    read_elements(tensors, |parts| states_identical(group, parts.iter().copied()))
}

/// Handles of all tensors.
pub(crate) fn handles(tensors: &[Named]) -> Vec<Tensor> {
    tensors.iter().map(|one| one.tensor.shallow_clone()).collect()
}

/// An error of libtorch's, without the stack that follows in further lines.
pub(crate) fn torch(error: tch::TchError) -> Error {
    let text = error.to_string();
    Error::invalid_argument(format!(
        "libtorch: {}",
        text.lines().next().unwrap_or("an error without a message")
    ))
    .with_source(error)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn of_tensors_that_share_memory_each_element_is_given() {
        let all = Tensor::arange(12, (Kind::Float, Device::Cpu));
        let (head, tail, middle) = (all.narrow(0, 0, 4), all.narrow(0, 8, 4), all.narrow(0, 6, 4));
        let table = all.view([3, 4]);
        let of = |tensors: &[&Tensor]| {
            distinct(&tensors.iter().map(|tensor| tensor.shallow_clone()).collect::<Vec<_>>())
        };
        // The longer one, whichever comes first; a part that begins elsewhere; the same, transposed.
        assert_eq!(of(&[&head, &all]), [(1, false)]);
        assert_eq!(of(&[&all, &head, &middle]), [(0, false)]);
        assert_eq!(of(&[&table.tr(), &table]), [(1, false)]);
        assert_eq!(of(&[&table.tr(), &table.tr()]), [(0, false)]);
        assert_eq!(of(&[&tail, &head]), [(0, false), (1, false)]);
        // Two that overlap: one of them is copied.
        assert_eq!(of(&[&tail, &middle]), [(0, true), (1, false)]);

        let tensors = [head, all.shallow_clone(), tail, middle];
        for tensors in [&tensors[..2], &tensors[2..]] {
            with_elements(tensors, |parts| {
                parts.iter_mut().for_each(|part| part.bytes.fill(0));
                Ok(())
            })
            .unwrap();
            assert!(tensors.iter().all(|tensor| tensor.abs().sum(Kind::Float).double_value(&[]) == 0.0));
        }
    }
}
