//! A model's tensors: parameters, frozen or not, buffers, and tensors that are not floats.

use std::borrow::Cow;
use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Int, Tensor};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Error, Result};
use serde::{Deserialize, Serialize};

use super::storage::Layout;
use crate::parameters::Parameter;
use crate::{Ddp, tensor_bytes};

/// A tensor of the model that was saved.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    name: String,
    layout: Layout,
}

pub(super) fn save<M: Module>(ddp: &Ddp<M>, writer: &mut impl StateWriter, prefix: &str) -> Result<()> {
    ddp.settle_buffers();
    let entries = entries(ddp.state());
    writer.value(prefix, &entries)?;
    let mut saver = Saver { entries: entries.iter(), writer, prefix, outcome: Ok(()) };
    ddp.model().visit(&mut saver);
    saver.outcome
}

pub(super) fn load<M: Module>(ddp: &mut Ddp<M>, reader: &impl StateReader, prefix: &str) -> Result<()> {
    let (here, saved) = (entries(ddp.state()), reader.value::<Vec<Entry>>(prefix)?);
    if here != saved {
        return Err(other_model(&here, &saved));
    }
    let tensor = |Entry { name, layout }: &Entry| {
        reader.tensor(&format!("{prefix}.{name}"), tensor_bytes::dtype(layout.dtype)?, &layout.shape)
    };
    let elements = here.iter().map(tensor).collect::<Result<Vec<_>>>()?;
    // Deferred updates of forward passes would overwrite the loaded values.
    ddp.settle_buffers();
    ddp.map(|model| model.map(&mut Loader(elements.into_iter())));
    Ok(())
}

/// The names and layouts of the tensors; a name that occurs twice gets a number.
fn entries(state: &[Parameter]) -> Vec<Entry> {
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

/// The error that names the first difference.
fn other_model(here: &[Entry], saved: &[Entry]) -> Error {
    let place = here.iter().zip(saved).take_while(|(here, saved)| here == saved).count();
    let describe = |entries: &[Entry]| match entries.get(place) {
        Some(Entry { name, layout: Layout { dtype, shape } }) => format!("{name} {dtype:?} {shape:?}"),
        None => "none".to_owned(),
    };
    let (here, saved) = (describe(here), describe(saved));
    Error::mismatch(format!(
        "the state is that of another model: its tensor number {} is {saved}, here it is {here}",
        place + 1
    ))
    .with_remedy("build the model as it was built when the state was saved")
}

struct Saver<'a, T> {
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
        self.outcome = tensor_bytes::dtype(*dtype)
            .and_then(|dtype| elements(&mut |bytes| self.writer.tensor(&name, dtype, shape, bytes)));
    }
}

impl<T: StateWriter> ModuleVisitor for Saver<'_, T> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.save(|put| {
            tensor_bytes::with_bytes(param.base(), |tensor| put(tensor.bytes)).and_then(|put| put)
        });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.save(|put| put(param.base().into_data().as_bytes()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.save(|put| put(param.base().into_data().as_bytes()));
    }
}

/// The elements of each tensor, in module order, with the lengths in this model.
struct Loader<'a>(std::vec::IntoIter<Cow<'a, [u8]>>);

impl ModuleMapper for Loader<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.next() {
            Some(elements) => param.map(|old| tensor_bytes::overwritten(old, &elements)),
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.0.next() {
            Some(elements) => param.map(|old| replaced(&old, &elements)),
            None => param,
        }
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        match self.0.next() {
            Some(elements) => param.map(|old| replaced(&old, &elements)),
            None => param,
        }
    }
}

fn replaced<const D: usize, K: Basic>(old: &Tensor<D, K>, elements: &[u8]) -> Tensor<D, K> {
    let (shape, dtype) = (old.shape(), old.dtype());
    Tensor::from_data(tensor_bytes::tensor_data(elements, shape.as_slice(), dtype), (&old.device(), dtype))
}
