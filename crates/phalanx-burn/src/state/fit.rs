//! Whether an optimizer goes on from a saved state.
//!
//! Burn's optimizers say nowhere what they keep, make it with a parameter's first gradient, and leave out without a word what they do not
//! know. So an optimizer of the same settings takes a step on the same model with parameters of one element each.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use phalanx::{Error, Result};

use crate::names::Names;
use crate::optimizer::{Key, OptimizerState, RANK, on_small, own_dimensions, unknown};
use crate::parameters::{Inventory, Parameter};

/// What an error names of each kind; it counts the rest.
const MAX_NAMED: usize = 4;

/// The fields of each parameter's state.
type Fields = BTreeMap<usize, BTreeSet<String>>;

/// Whether steps had been done when a state was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Yes,
    Unknown,
}

impl Begun {
    /// After so many steps.
    pub fn after(steps: u64) -> Self {
        if steps > 0 { Self::Yes } else { Self::Unknown }
    }

    /// The same for a part of what was saved: if the whole `has_state`, the part may have none.
    pub fn unless(self, has_state: bool) -> Self {
        if has_state { Self::Unknown } else { self }
    }
}

/// Checks that `optimizer` takes all of `saved`, which is of `parameters` of `model`, and needs nothing else of a parameter that has a state
/// there. A parameter without any has never had a gradient; if none has any, training must not have `begun`, or the optimizer must keep
/// nothing.
///
/// An optimizer that panics with parameters of one element is not checked, and a warning says so.
///
/// # Errors
/// If not; the error names what is missing, and what there is too much.
pub(crate) fn check<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    saved: &OptimizerState<()>,
    begun: Begun,
) -> Result<()> {
    let fields = fields(saved);
    if let Some((index, _)) = fields.iter().find(|(index, _)| parameters.get(**index).is_none()) {
        return Err(unknown(*index));
    }
    if fields.is_empty() {
        return match begun {
            Begun::Yes => {
                let trained: HashSet<ParamId> =
                    Inventory::or_frozen(model)?.parameters.iter().map(|parameter| parameter.id).collect();
                let indices = parameters.iter().enumerate().filter(|(_, other)| trained.contains(&other.id));
                let wanted = indices.map(|(index, _)| (index, BTreeSet::new())).collect();
                let made = on_small(|| made(optimizer, (model, parameters), &wanted))?;
                let Some(made) = made else {
                    unchecked();
                    return Ok(());
                };
                none_needed(&made, parameters)
            }
            Begun::Unknown => Ok(()),
        };
    }
    own_dimensions(&saved.scalars, parameters)?;
    let both = on_small(|| {
        Ok((taken(optimizer, parameters, saved)?, made(optimizer, (model, parameters), &fields)?))
    })?;
    let Some((taken, made)) = both else {
        unchecked();
        return Ok(());
    };
    let (none, mut missing, mut unknown) = (BTreeSet::new(), Vec::new(), Vec::new());
    for (index, saved) in &fields {
        let (taken, made) = (taken.get(index).unwrap_or(&none), made.get(index).unwrap_or(&none));
        let name = |field: &String| format!("`{}.{field}`", parameters[*index].name);
        missing.extend(made.difference(saved).map(name));
        // A list may grow from step to step.
        let is_listed = |field: &str| field.split('.').any(|part| part.parse::<usize>().is_ok());
        let is_known = |field: &String| taken.contains(field) && (made.contains(field) || is_listed(field));
        unknown
            .extend(saved.iter().filter(|field| !is_known(field)).filter(|field| *field != RANK).map(name));
    }
    if missing.is_empty() && unknown.is_empty() {
        return Ok(());
    }
    let lacks =
        (!missing.is_empty()).then(|| format!("it lacks {}, which this optimizer needs", listed(&missing)));
    let has = (!unknown.is_empty())
        .then(|| format!("it has {}, which this optimizer does not take", listed(&unknown)));
    let difference: Vec<String> = lacks.into_iter().chain(has).collect();
    Err(Error::mismatch(format!(
        "the optimizer's state is that of another optimizer: {}",
        difference.join("; ")
    ))
    .with_remedy("make the optimizer with the settings with which the state was saved"))
}

/// Warns that nothing says whether an optimizer takes a saved state.
fn unchecked() {
    phalanx::warn(
        "the optimizer's saved state is loaded without a check that it is that of this optimizer, because this one has panicked with parameters \
         of one element; the panic has no other effect",
    );
}

/// An error if the optimizer makes anything of parameters, of which a state that was saved during training has nothing.
fn none_needed(made: &Fields, parameters: &[Parameter]) -> Result<()> {
    let mut missing = Vec::new();
    for (index, fields) in made {
        let name = |field: &String| format!("`{}.{field}`", parameters[*index].name);
        missing.extend(fields.iter().filter(|field| *field != RANK).map(name));
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::mismatch(format!(
        "the saved state has nothing of an optimizer after steps were done: it lacks {}, which this optimizer needs",
        listed(&missing)
    ))
    .with_remedy(
        "load it with the optimizer with which it was saved, such as plain SGD, and take another one then; the state of a \
         ZeroRedundancyOptimizer is saved beside, and loaded by it",
    ))
}

fn listed(names: &[String]) -> String {
    let shown = names.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
        Some(more) => format!("{shown} and {more} more"),
        None => shown,
    }
}

fn fields<E>(state: &OptimizerState<E>) -> Fields {
    let mut fields = Fields::new();
    let keys = state.tensors.iter().map(|(key, ..)| key).chain(state.scalars.iter().map(|(key, _)| key));
    for Key { index, field } in keys {
        fields.entry(*index).or_default().insert(field.clone());
    }
    fields
}

/// What is left of `saved` once `optimizer` has loaded it.
fn taken(
    optimizer: &ModuleOptimizer,
    parameters: &[Parameter],
    saved: &OptimizerState<()>,
) -> Result<Fields> {
    Ok(fields(&OptimizerState::of(&saved.small().load(optimizer, parameters)?, parameters)?))
}

/// What `optimizer` makes of those parameters whose indices are in `wanted`.
fn made<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
    wanted: &Fields,
) -> Result<Fields> {
    let ids =
        wanted.keys().filter_map(|index| parameters.get(*index)).map(|parameter| parameter.id).collect();
    let mut fresh = OptimizerState::empty().load(optimizer, parameters)?;
    let mut shrink = Shrink { ids, gradients: GradientsParams::new() };
    let model = model.clone().map(&mut shrink);
    drop(Names::of(parameters).step(&mut fresh, 1e-3, model, shrink.gradients));
    Ok(fields(&OptimizerState::of(&fresh, parameters)?))
}

/// Gives each of these parameters one element, and a gradient. All other tensors stay as they are: a model's clones share running state.
struct Shrink {
    ids: HashSet<ParamId>,
    gradients: GradientsParams,
}

impl ModuleMapper for Shrink {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        if !self.ids.contains(&id) {
            return param;
        }
        param.map(|old| {
            let small = Tensor::<D>::ones([1; D], (&old.device(), old.dtype()));
            let gradient = if old.device().is_autodiff() { small.clone().inner() } else { small.clone() };
            self.gradients.register(id, gradient);
            small.set_require_grad(old.device().is_autodiff())
        })
    }
}
