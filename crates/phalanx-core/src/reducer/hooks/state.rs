//! What a hook keeps from step to step, in a form that can be saved.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::buffer::copy_of;
use crate::error::{Error, Result};
use crate::hash::fnv1a;

/// What a [hook](super::CommHook) keeps from step to step: numbers, and tensors for parameters. It is empty for a hook that keeps
/// nothing that later averages depend on.
///
/// Numbers and common tensors are the same on every rank. Every rank has own tensors under the same names and of the same lengths,
/// with elements of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HookState {
    hook: String,
    numbers: BTreeMap<String, u64>,
    tensors: Vec<HookTensor>,
}

/// What is compared of a hook before it goes on from a state, without a look at what it keeps.
#[derive(Debug)]
pub(crate) struct HookLabel {
    /// As [`HookState::hook`].
    pub hook: String,
    /// As [`HookState::is_empty`].
    pub is_empty: bool,
}

/// A tensor of a [`HookState`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HookTensor {
    /// What it is, such as `losses`.
    pub field: String,
    /// The index of its parameter.
    pub parameter: usize,
    /// Whether each rank has elements of its own.
    pub is_own: bool,
    /// Its elements.
    pub elements: Vec<f32>,
}

impl HookState {
    /// Adds a number that is the same on every rank.
    #[must_use]
    pub fn number(mut self, name: &str, value: u64) -> Self {
        self.numbers.insert(name.to_owned(), value);
        self
    }

    /// Adds a tensor that is the same on every rank.
    #[must_use]
    pub fn common(self, field: &str, parameter: usize, elements: Vec<f32>) -> Self {
        self.tensor(HookTensor { field: field.to_owned(), parameter, is_own: false, elements })
    }

    /// Adds a tensor of which each rank has its own.
    #[must_use]
    pub fn own(self, field: &str, parameter: usize, elements: Vec<f32>) -> Self {
        self.tensor(HookTensor { field: field.to_owned(), parameter, is_own: true, elements })
    }

    /// A copy of it, whose tensors may be as large as the parameters.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn copied(&self) -> Result<Self> {
        let tensor = |tensor: &HookTensor| {
            let HookTensor { field, parameter, is_own, elements } = tensor;
            let elements = copy_of(elements)?;
            Ok(HookTensor { field: field.clone(), parameter: *parameter, is_own: *is_own, elements })
        };
        let tensors = self.tensors.iter().map(tensor).collect::<Result<_>>()?;
        Ok(Self { hook: self.hook.clone(), numbers: self.numbers.clone(), tensors })
    }

    pub(crate) fn tensor(mut self, tensor: HookTensor) -> Self {
        self.tensors.push(tensor);
        self
    }

    /// Notes the settings of the hook whose state it is.
    pub(crate) fn of(mut self, hook: String) -> Self {
        self.hook = hook;
        self
    }

    /// The name and settings of the hook whose state it is. Empty for one that never keeps anything.
    pub fn hook(&self) -> &str {
        &self.hook
    }

    /// Whether there is nothing to save.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty() && self.tensors.is_empty()
    }

    /// All numbers, by name.
    pub fn numbers(&self) -> &BTreeMap<String, u64> {
        &self.numbers
    }

    /// All tensors, in the order in which they were added.
    pub fn tensors(&self) -> &[HookTensor] {
        &self.tensors
    }

    /// The number of this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, name: &str) -> Result<u64> {
        self.numbers.get(name).copied().ok_or_else(|| {
            Error::mismatch(format!("the saved state of the communication hook has no number {name:?}"))
                .with_remedy("load it with the hook, and the version of the program, that have saved it")
        })
    }

    /// The elements of all tensors of one field, by the index of their parameter.
    pub fn take(&mut self, field: &str) -> BTreeMap<usize, Vec<f32>> {
        let (taken, left) =
            std::mem::take(&mut self.tensors).into_iter().partition(|tensor| tensor.field == field);
        self.tensors = left;
        let taken: Vec<HookTensor> = taken;
        taken.into_iter().map(|tensor| (tensor.parameter, tensor.elements)).collect()
    }

    /// What ranks compare of it: all that they have in common. Ranks that have taken over a state have nothing of another rank's own.
    pub(crate) fn digest(&self) -> String {
        let common = || self.tensors.iter().filter(|tensor| !tensor.is_own);
        if self.numbers.is_empty() && common().next().is_none() {
            return "nothing".to_owned();
        }
        let bytes = common().flat_map(|HookTensor { field, parameter, elements, .. }| {
            let elements = elements.iter().flat_map(|element| element.to_bits().to_le_bytes());
            field.bytes().chain((*parameter as u64).to_le_bytes()).chain(elements)
        });
        format!("{:?} and {} tensors with the hash {:016x}", self.numbers, common().count(), fnv1a(bytes))
    }

    /// The state without what each rank has of its own.
    #[must_use]
    pub fn without_own(mut self) -> Self {
        self.tensors.retain(|tensor| !tensor.is_own);
        self
    }

    /// The state where parameters have other numbers by now, since some were frozen or unfrozen: `number` gives the new one of each. None means that its
    /// gradient is no longer averaged, and what is kept for it goes.
    #[must_use]
    pub fn renumbered(mut self, number: impl Fn(usize) -> Option<usize>) -> Self {
        self.tensors.retain_mut(|tensor| {
            let new = number(tensor.parameter);
            tensor.parameter = new.unwrap_or(tensor.parameter);
            new.is_some()
        });
        self
    }

    /// For hooks that keep nothing.
    ///
    /// # Errors
    /// If there is anything in it.
    pub fn nothing(&self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        Err(Error::mismatch(format!(
            "the saved state is that of the communication hook {}, and this hook keeps none",
            self.hook
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_all_of_a_state() {
        let state = HookState::default().number("step", 7).common("factors", 1, vec![0.5; 3]);
        let state = state.own("losses", 1, vec![f32::MAX; 4]).of("a hook".to_owned());
        assert_eq!(state.copied().unwrap(), state);
    }

    #[test]
    fn what_is_kept_follows_its_parameter_to_another_number() {
        let step = || HookState::default().number("step", 7);
        let state = step().common("factors", 0, vec![1.0]).common("factors", 2, vec![2.0]);
        let state = state.own("losses", 2, vec![3.0]);
        let expected = step().common("factors", 1, vec![2.0]).own("losses", 1, vec![3.0]);
        assert_eq!(state.renumbered(|number| number.checked_sub(1)), expected);
    }
}
