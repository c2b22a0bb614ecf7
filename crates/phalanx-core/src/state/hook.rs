//! The state of a communication hook, by the names of parameters.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{StateReader, StateWriter};
use crate::buffer::with_room;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::notice::warn;
use crate::reducer::hooks::{HookState, HookTensor};

/// The state without the elements of its tensors.
#[derive(Serialize, Deserialize)]
struct Index {
    hook: String,
    numbers: BTreeMap<String, u64>,
    tensors: Vec<Entry>,
    /// How many ranks have saved what each has of its own; 0 if that is left out.
    ranks: usize,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    field: String,
    parameter: String,
    is_own: bool,
    elements: usize,
}

impl Entry {
    fn name(&self, prefix: &str, rank: usize) -> String {
        named(prefix, &self.field, self.is_own.then_some(rank), &self.parameter)
    }
}

fn named(prefix: &str, field: &str, rank: Option<usize>, parameter: &str) -> String {
    let rank = rank.map_or_else(String::new, |rank| format!(".rank-{rank:05}"));
    format!("{prefix}.{field}{rank}.{parameter}")
}

/// Saves what all ranks have in common of `state`, as the value `name` and tensors behind it. `parameters` are the names of all
/// parameters that have a gradient, in their order. `ranks` says how many ranks save [what each has of its own](save_own_of_hook) in the
/// same place; 0 if none does.
///
/// # Errors
/// As the writer's, and if a tensor is of none of `parameters`.
pub fn save_hook(
    state: &HookState,
    parameters: &[&str],
    writer: &mut impl StateWriter,
    name: &str,
    ranks: usize,
) -> Result<()> {
    let names = unique(parameters);
    let entry = |tensor: &HookTensor| {
        let HookTensor { field, parameter, is_own, elements } = tensor;
        let parameter = names.get(*parameter).ok_or_else(|| unknown(*parameter))?;
        Ok(Entry {
            field: field.clone(),
            parameter: parameter.clone(),
            is_own: *is_own,
            elements: elements.len(),
        })
    };
    let kept = |tensor: &&HookTensor| !tensor.is_own || ranks > 0;
    let tensors = state.tensors().iter().filter(kept).map(entry).collect::<Result<_>>()?;
    let index = Index { hook: state.hook().to_owned(), numbers: state.numbers().clone(), tensors, ranks };
    writer.value(name, &index)?;
    elements(state, &names, writer, name, None)
}

/// Saves what `rank` has of its own of `state`. It is no part of what `writer` divides among ranks.
///
/// # Errors
/// As [`save_hook`].
pub fn save_own_of_hook(
    state: &HookState,
    parameters: &[&str],
    writer: &mut impl StateWriter,
    name: &str,
    rank: usize,
) -> Result<()> {
    elements(state, &unique(parameters), writer, name, Some(rank))
}

/// Saves the tensors that `rank` has of its own, or those that all have in common.
fn elements(
    state: &HookState,
    names: &[String],
    writer: &mut impl StateWriter,
    prefix: &str,
    rank: Option<usize>,
) -> Result<()> {
    state.tensors().iter().filter(|tensor| tensor.is_own == rank.is_some()).try_for_each(|tensor| {
        let parameter = names.get(tensor.parameter).ok_or_else(|| unknown(tensor.parameter))?;
        let bytes = bytemuck::cast_slice::<f32, u8>(&tensor.elements);
        writer.tensor(
            &named(prefix, &tensor.field, rank, parameter),
            DType::F32,
            &[tensor.elements.len()],
            bytes,
        )
    })
}

/// The state that was saved under `name`, for this rank of so many. If another number of ranks has saved what each has of its own, that
/// is left out, with a warning: it begins anew.
///
/// # Errors
/// If it cannot be read, or is of parameters that are not among `parameters`; the error names the first.
pub fn load_hook(
    reader: &impl StateReader,
    parameters: &[&str],
    name: &str,
    (rank, ranks): (usize, usize),
) -> Result<HookState> {
    let names = unique(parameters);
    let Index { hook, numbers, tensors, ranks: saved } = reader.value(name)?;
    let has_own = saved == ranks;
    if saved > 0 && !has_own && rank == 0 && tensors.iter().any(|tensor| tensor.is_own) {
        warn(format_args!(
            "{saved} ranks have saved what the communication hook {hook} keeps for each of them, and there are {ranks}: it begins \
             anew with what it has lost in compression"
        ));
    }
    let mut state =
        numbers.iter().fold(HookState::default(), |state, (name, value)| state.number(name, *value));
    for entry in tensors.iter().filter(|entry| !entry.is_own || has_own) {
        let Some(parameter) = names.iter().position(|name| *name == entry.parameter) else {
            return Err(Error::mismatch(format!(
                "the communication hook has saved its `{}` of the parameter {:?}, and no parameter that needs a gradient has that name",
                entry.field, entry.parameter
            ))
            .with_remedy("build the model as it was built, and frozen, when the state was saved"));
        };
        let bytes = reader.tensor(&entry.name(name, rank), DType::F32, &[entry.elements])?;
        let mut elements = with_room(entry.elements)?;
        elements.extend(bytes.chunks_exact(size_of::<f32>()).map(bytemuck::pod_read_unaligned::<f32>));
        state = state.tensor(HookTensor {
            field: entry.field.clone(),
            parameter,
            is_own: entry.is_own,
            elements,
        });
    }
    Ok(state.of(hook))
}

/// A name that occurs twice gets a number.
fn unique(parameters: &[&str]) -> Vec<String> {
    let mut taken = HashSet::new();
    let free = |name: &&str| {
        let numbered = (2..).map(|number| format!("{name}#{number}"));
        std::iter::once((*name).to_owned()).chain(numbered).find(|name| taken.insert(name.clone()))
    };
    parameters.iter().filter_map(free).collect()
}

fn unknown(parameter: usize) -> Error {
    Error::invalid_argument(format!(
        "the communication hook keeps a tensor of parameter number {parameter}, which does not exist"
    ))
    .with_remedy("let CommHook::state name only parameters of the buckets that the hook has averaged")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::Parts;

    #[test]
    fn each_rank_gets_its_own_again_unless_there_are_more_or_fewer() {
        let of = |rank: usize| {
            let state =
                HookState::default().number("step", 7).common("factors", 1, vec![0.5, f32::MIN_POSITIVE]);
            state.own("losses", 0, vec![rank as f32, -1.0]).of("a hook".to_owned())
        };
        let mut parts = Parts::default();
        save_hook(&of(0), &["a", "b"], &mut parts, "hook", 2).unwrap();
        (0..2).for_each(|rank| save_own_of_hook(&of(rank), &["a", "b"], &mut parts, "hook", rank).unwrap());
        for rank in 0..2 {
            assert_eq!(load_hook(&parts, &["a", "b"], "hook", (rank, 2)).unwrap(), of(rank));
            assert_eq!(load_hook(&parts, &["a", "b"], "hook", (rank, 3)).unwrap(), of(rank).without_own());
        }
        // Another parameter is frozen: the indices are others, the names are not.
        let moved = load_hook(&parts, &["b", "c", "a"], "hook", (0, 2)).unwrap();
        assert_eq!(moved.tensors().iter().map(|tensor| tensor.parameter).collect::<Vec<_>>(), [0, 2]);
        let error = load_hook(&parts, &["b"], "hook", (0, 2)).unwrap_err();
        assert!(
            error.is_mismatch() && error.to_string().contains("`losses` of the parameter \"a\""),
            "{error}"
        );
    }
}
