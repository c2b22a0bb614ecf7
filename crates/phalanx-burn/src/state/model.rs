//! A model's tensors: parameters, frozen or not, buffers, and tensors that are not floats.
//!
//! What Burn identifies by an id is saved by a path, because ids are random in each process. One walk over model and
//! optimizer serves commits and checkpoints: `StateWriter` and `StateReader` of `phalanx::state` hide the target.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Error, Result};
use serde::{Deserialize, Serialize};

use super::storage::Layout;
use crate::parameters::{Parameter, Select};
use crate::{read_back, tensor_bytes};

/// A tensor of the model that was saved.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    name: String,
    layout: Layout,
}

impl Entry {
    pub fn new(name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self { name: name.to_owned(), layout: Layout { dtype, shape: shape.to_vec() } }
    }
}

/// Saves the selected tensors of `model`, which are `tensors`, in module order.
pub(crate) fn save<M: Module>(
    (model, select): (&M, Select<'_>),
    tensors: &[Parameter],
    writer: &mut impl StateWriter,
    prefix: &str,
) -> Result<()> {
    let entries = entries(tensors);
    writer.value(prefix, &entries)?;
    let mut saver = Saver { select, entries: entries.iter(), writer, prefix, outcome: Ok(()) };
    model.visit(&mut saver);
    saver.outcome
}

/// The elements of what [`save`] has saved of `tensors`.
pub(crate) fn read<'a>(
    tensors: &[Parameter],
    reader: &'a impl StateReader,
    prefix: &str,
) -> Result<Vec<Cow<'a, [u8]>>> {
    let (here, saved) = (entries(tensors), reader.value::<Vec<Entry>>(prefix)?);
    compare(&here, &saved)?;
    let tensor = |Entry { name, layout }: &Entry| {
        reader.tensor(&format!("{prefix}.{name}"), tensor_bytes::dtype_of(name, layout.dtype)?, &layout.shape)
    };
    here.iter().map(tensor).collect()
}

/// An error if two places of one of the `trained` parameters would have different `elements`, which [`read`] gave of `tensors`: they are one tensor, and
/// would all get those of the first.
pub(crate) fn check_tied(
    tensors: &[Parameter],
    trained: &[Parameter],
    elements: &[Cow<'_, [u8]>],
) -> Result<()> {
    let trained: HashSet<ParamId> = trained.iter().map(|parameter| parameter.id).collect();
    let mut first = HashMap::new();
    let saved = tensors.iter().zip(elements).filter(|(tensor, _)| trained.contains(&tensor.id));
    for (tensor, elements) in saved {
        let (other, theirs) = *first.entry(tensor.id).or_insert((tensor, elements));
        if theirs != elements {
            return Err(Error::mismatch(format!(
                "`{}` and `{}` are one parameter, and the saved state has other values for the one than for the other",
                other.name, tensor.name
            ))
            .with_remedy("tie only weights that were tied when the state was saved"));
        }
    }
    Ok(())
}

/// `model` with other elements of the selected tensors, which [`read`] gave.
pub(crate) fn loaded<M: Module>(model: M, select: Select<'_>, elements: Vec<Cow<'_, [u8]>>) -> M {
    model.map(&mut Loader { select, elements: elements.into_iter() })
}

/// The names and layouts of the tensors; a name that occurs twice gets a number.
pub(crate) fn entries(state: &[Parameter]) -> Vec<Entry> {
    let mut names = HashSet::new();
    let unique = |name: &str| {
        let numbered = (2..).map(|number| format!("{name}#{number}"));
        std::iter::once(name.to_owned()).chain(numbered).find(|name| names.insert(name.clone()))
    };
    let named = state.iter().map(|parameter| parameter.name.as_str()).filter_map(unique);
    let layouts =
        state.iter().map(|Parameter { dtype, shape, .. }| Layout { dtype: *dtype, shape: shape.clone() });
    named.zip(layouts).map(|(name, layout)| Entry { name, layout }).collect()
}

/// An error that names the first difference, if there is one.
pub(crate) fn compare(here: &[Entry], saved: &[Entry]) -> Result<()> {
    if here == saved {
        return Ok(());
    }
    let place = here.iter().zip(saved).take_while(|(here, saved)| here == saved).count();
    let describe = |entries: &[Entry]| match entries.get(place) {
        Some(Entry { name, layout: Layout { dtype, shape } }) => format!("{name} {dtype:?} {shape:?}"),
        None => "none".to_owned(),
    };
    let (here, saved) = (describe(here), describe(saved));
    Err(Error::mismatch(format!(
        "the state is that of another model: its tensor number {} is {saved}, here it is {here}",
        place + 1
    ))
    .with_remedy("build the model as it was built when the state was saved"))
}

struct Saver<'a, T> {
    select: Select<'a>,
    entries: std::slice::Iter<'a, Entry>,
    writer: &'a mut T,
    prefix: &'a str,
    outcome: Result<()>,
}

impl<T: StateWriter> Saver<'_, T> {
    fn save(&mut self, elements: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>) {
        let (Some(entry), Ok(())) = (self.entries.next(), &self.outcome) else { return };
        let name = format!("{}.{}", self.prefix, entry.name);
        let Layout { dtype, shape } = &entry.layout;
        self.outcome = tensor_bytes::dtype_of(&entry.name, *dtype)
            .and_then(|dtype| elements(&mut |bytes| self.writer.tensor(&name, dtype, shape, bytes)));
    }
}

impl<T: StateWriter> ModuleVisitor for Saver<'_, T> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.select.float(param.id) {
            self.save(|put| {
                tensor_bytes::with_bytes(param.base(), |tensor| put(tensor.bytes)).and_then(|put| put)
            });
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.select.other() {
            self.save(|put| put(read_back::data(param.base())?.as_bytes()));
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if self.select.other() {
            self.save(|put| put(read_back::data(param.base())?.as_bytes()));
        }
    }
}

/// The elements of each tensor, in module order, with the lengths in this model.
struct Loader<'s, 'a> {
    select: Select<'s>,
    elements: std::vec::IntoIter<Cow<'a, [u8]>>,
}

impl<'a> Loader<'_, 'a> {
    fn next(&mut self, selected: bool) -> Option<Cow<'a, [u8]>> {
        if selected { self.elements.next() } else { None }
    }
}

impl ModuleMapper for Loader<'_, '_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.next(self.select.float(param.id)) {
            Some(elements) => param.map(|old| tensor_bytes::overwritten(old, &elements)),
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.next(self.select.other()) {
            Some(elements) => param.map(|old| replaced(&old, &elements)),
            None => param,
        }
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        match self.next(self.select.other()) {
            Some(elements) => param.map(|old| replaced(&old, &elements)),
            None => param,
        }
    }
}

fn replaced<const D: usize, K: Basic>(old: &Tensor<D, K>, elements: &[u8]) -> Tensor<D, K> {
    let (shape, dtype) = (old.shape(), old.dtype());
    Tensor::from_data(tensor_bytes::tensor_data(elements, shape.as_slice(), dtype), (&old.device(), dtype))
}
