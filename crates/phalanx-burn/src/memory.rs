//! The memory of a module's floats, lent to be read and to be written.

use std::collections::HashMap;

use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, bf16, f16};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use phalanx::{Error, Result};

use crate::bridge::{self, Lend, Lent};

/// Calls `look` with the elements of `tensor`, whether or not it is part of a graph.
pub(crate) fn lend<const D: usize, T>(tensor: Tensor<D>, look: impl FnOnce(Lent<'_>) -> T) -> Result<T> {
    let tensor = if tensor.is_autodiff() { tensor.inner() } else { tensor };
    let tensor = tensor
        .try_into_primitive::<Flex>()
        .map_err(|_| Error::invalid_argument("a tensor is on no Flex device"))?;
    let mut seen = None;
    Flex::lend(&tensor, |lent| seen = Some(look(lent)));
    seen.ok_or_else(|| Error::aborted("a tensor's memory was not lent"))
}

/// `old` with other elements: in its own memory, if nobody else holds that.
pub(crate) fn overwritten<const D: usize>(old: Tensor<D>, elements: &[u8]) -> Tensor<D> {
    let (shape, dtype, device) = (old.shape(), old.dtype(), old.device());
    let (tracked, needs_gradient) = (old.is_autodiff(), old.is_require_grad());
    let checkpointing = old.gradient_checkpointing_strategy();
    let bare = if tracked { old.inner() } else { old };
    let written = bare.try_into_primitive::<Flex>().ok().and_then(|tensor| in_place(tensor, elements));
    let tensor = match written {
        Some(tensor) => {
            let tensor = Tensor::<D>::from_primitive::<Flex>(tensor);
            let tensor = if tracked { Tensor::from_inner(tensor) } else { tensor };
            match checkpointing {
                Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
                None => tensor,
            }
        }
        None => Tensor::from_data(bridge::tensor_data(elements, shape.as_slice(), dtype), (&device, dtype)),
    };
    if needs_gradient { tensor.require_grad() } else { tensor }
}

fn in_place(mut tensor: FlexTensor, elements: &[u8]) -> Option<FlexTensor> {
    fn write<T: burn::tensor::Element + Pod>(tensor: &mut FlexTensor, elements: &[u8]) {
        bytemuck::cast_slice_mut(tensor.storage_mut::<T>()).copy_from_slice(elements);
    }
    let whole = tensor.layout().num_elements() * tensor.dtype().size() == tensor.bytes().len();
    let fits = whole && tensor.is_contiguous() && tensor.bytes().len() == elements.len();
    if !fits || !tensor.is_unique() {
        return None;
    }
    match tensor.dtype() {
        DType::F64 => write::<f64>(&mut tensor, elements),
        DType::F32 => write::<f32>(&mut tensor, elements),
        DType::F16 => write::<f16>(&mut tensor, elements),
        DType::BF16 => write::<bf16>(&mut tensor, elements),
        _ => return None,
    }
    Some(tensor)
}

/// Shows `look` the elements of each of `module`'s floats that has a place, once.
pub(crate) fn each<M: Module>(
    module: &M,
    places: &HashMap<ParamId, usize>,
    look: impl FnMut(usize, Lent<'_>) -> Result<()>,
) -> Result<()> {
    let mut visitor = Each { places, seen: vec![false; places.len()], look, outcome: Ok(()) };
    module.visit(&mut visitor);
    visitor.outcome
}

struct Each<'a, F> {
    places: &'a HashMap<ParamId, usize>,
    seen: Vec<bool>,
    look: F,
    outcome: Result<()>,
}

impl<F: FnMut(usize, Lent<'_>) -> Result<()>> ModuleVisitor for Each<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&place) = self.places.get(&param.id) else { return };
        let again = self.seen.get_mut(place).is_none_or(|seen| std::mem::replace(seen, true));
        if !again && self.outcome.is_ok() {
            self.outcome = lend(param.base(), |lent| (self.look)(place, lent)).and_then(|outcome| outcome);
        }
    }
}

/// `module` with the elements that `elements` has for the place of a float, if it has any.
pub(crate) fn replaced<'a, M: Module>(
    module: M,
    places: &HashMap<ParamId, usize>,
    elements: impl FnMut(usize) -> Option<&'a [u8]>,
) -> M {
    module.map(&mut Replace { places, elements })
}

struct Replace<'p, F> {
    places: &'p HashMap<ParamId, usize>,
    elements: F,
}

impl<'a, F: FnMut(usize) -> Option<&'a [u8]>> ModuleMapper for Replace<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let elements = self.places.get(&param.id).and_then(|&place| (self.elements)(place));
        match elements {
            Some(elements) => param.map(|old| overwritten(old, elements)),
            None => param,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn address<const D: usize>(tensor: &Tensor<D>) -> usize {
        lend(tensor.clone(), |lent| lent.bytes.as_ptr() as usize).unwrap()
    }

    #[test]
    fn memory_of_one_s_own_is_written_where_it_is_and_shared_memory_is_left_alone() {
        let device = Device::flex().autodiff();
        let leaf = |values: [f32; 2]| Tensor::<1>::from_floats(values, &device).require_grad();
        let new = bytemuck::cast_slice::<f32, u8>(&[5.0, 6.0]);

        let old = leaf([1.0, 2.0]);
        let place = address(&old);
        let written = overwritten(old, new);
        assert_eq!(address(&written), place);
        assert!(written.is_require_grad());
        assert_eq!(written.to_data().try_to_vec::<f32>().unwrap(), [5.0, 6.0]);

        let old = leaf([1.0, 2.0]);
        let held = old.clone();
        let written = overwritten(old, new);
        assert_eq!(held.to_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(written.to_data().try_to_vec::<f32>().unwrap(), [5.0, 6.0]);
        assert!(written.is_require_grad());
    }
}
