//! Groups of parameters that go by ids.
//!
//! The pieces of a parameter have ids of their own, so a group by the id that a parameter had before it was sharded reaches none of them, and no error
//! would say so. Neither optimizers nor learning rates show their groups. So both are asked what they do with an id that has been sharded, with its
//! piece's, and with one that nobody knows, all under the parameter's name.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor};
use phalanx::{Error, Result};

use crate::alike;
use crate::optimizer::on_small;
use crate::parameters::Parameter;

/// An error if `optimizer` has a group for one of the ids in `wholes`, which are those of the parameters of `pieces` in their order, and none for the id
/// of the piece. An optimizer that panics with small parameters is not asked.
pub(super) fn check(optimizer: &ModuleOptimizer, pieces: &[Parameter], wholes: &[ParamId]) -> Result<()> {
    let own: Vec<ParamId> = pieces.iter().map(|piece| piece.id).collect();
    let unknown: Vec<ParamId> = pieces.iter().map(|_| ParamId::new()).collect();
    let of = |ids: &[ParamId]| asked(optimizer, pieces, ids);
    let all = on_small(|| Ok([of(wholes)?, of(&own)?, of(&unknown)?]))?;
    let Some([of_wholes, of_pieces, of_unknown]) = all else { return Ok(()) };
    let is_missed = |index: &usize| {
        let of_whole = &of_wholes[*index];
        *of_whole != of_pieces[*index] && *of_whole != of_unknown[*index]
    };
    let missed = (0..pieces.len()).find(is_missed).and_then(|index| pieces.get(index));
    missed.map_or(Ok(()), |piece| Err(missing(piece, "the optimizer's parameters")))
}

/// The same of the `rates` of a step. They are asked in each: at the beginning of a warm-up all of them may be 0.
pub(super) fn check_rates(
    rates: &ModuleLearningRate,
    pieces: &[Parameter],
    wholes: &[ParamId],
) -> Result<()> {
    let is_missed = |(piece, whole): &(&Parameter, &ParamId)| {
        let of = |id: ParamId| rates.lr_from_param(id, Some(&piece.name)).to_bits();
        let of_whole = of(**whole);
        of_whole != of(piece.id) && of_whole != of(ParamId::new())
    };
    let missed = pieces.iter().zip(wholes).find(is_missed);
    missed.map_or(Ok(()), |(piece, _)| Err(missing(piece, "the learning rates")))
}

/// The error for a group of `what` that does not reach this piece.
fn missing(piece: &Parameter, what: &str) -> Error {
    Error::invalid_argument(format!(
        "a group of {what} has the ParamId that `{}` had before it was sharded: its pieces have ids of their own, and would be in no group",
        piece.name
    ))
    .with_remedy(
        "tell the group by names, as ParamGroup::from_regex does, or by ParamGroup::ids_from_module of a unit of Fsdp::model",
    )
}

/// What `optimizer` makes of each of `pieces`, if it has the id in `ids`: as bits, so that what is no number equals itself.
fn asked(optimizer: &ModuleOptimizer, pieces: &[Parameter], ids: &[ParamId]) -> Result<Vec<Vec<u32>>> {
    let named = pieces.iter().zip(ids).map(|(piece, id)| Parameter { id: *id, ..piece.clone() });
    let parameters: Vec<Parameter> = named.collect();
    let device = Device::flex().autodiff();
    let small = |parameter: &Parameter| {
        Param::initialized(parameter.id, Tensor::<1>::zeros([1], &device).require_grad())
    };
    let model: Vec<Param<Tensor<1>>> = parameters.iter().map(small).collect();
    let made = alike::trained(optimizer, (&model, &parameters))?;
    // Of each step, that of one parameter after the other.
    let each = made.len() / alike::STEPS / parameters.len().max(1);
    let of = |index: usize| {
        let numbers = made.chunks(each.max(1)).skip(index).step_by(parameters.len());
        numbers.flatten().map(|number| number.to_bits()).collect::<Vec<u32>>()
    };
    Ok((0..parameters.len()).map(of).collect())
}
