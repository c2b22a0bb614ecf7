//! Models of which each rank has a part, where all of a model is asked for.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use phalanx::{Error, Result};

use super::division::{Part, parts};
use super::fsdp::first_shard;

/// Which part this rank has of each parameter of `model` that is divided among several ranks, in words: ranks whose words differ are no
/// replicas of each other.
pub(crate) fn parts_in_words<M: Module>(model: &M) -> HashMap<ParamId, String> {
    let in_words = |(id, Part { span, rank, ranks })| {
        (id, format!("part {rank} of {ranks} along dimension {}", span.dim))
    };
    parts(model).into_iter().map(in_words).collect()
}

/// Of each parameter of `model` of which this rank has a part of several, the dimension along which it is divided.
pub(crate) fn divided_dimensions<M: Module>(model: &M) -> HashMap<ParamId, usize> {
    parts(model).into_iter().map(|(id, part)| (id, part.span.dim)).collect()
}

/// An error if there is a [unit](super::fsdp::FullySharded) in `model`, trained or frozen: `what` would give every rank one rank's shards,
/// or average them with those of other ranks.
///
/// A unit counts in a group of one rank, too: nothing at it says how many there are.
pub(crate) fn refuse_units<M: Module>(model: &M, what: &str) -> Result<()> {
    first_shard(model).map_or(Ok(()), |name| {
        Err(Error::invalid_argument(format!(
            "`{name}` is the shard of a unit, of which each rank has another one, and {what} takes what a rank has for the whole model"
        ))
        .with_remedy(
            "train units with phalanx_burn::parallel::fsdp::Fsdp, and replicas of them with ShardingGroup::hybrid; FullySharded::gather makes \
             a layer whole",
        ))
    })
}

/// An error if a parameter of `model` is divided among tensor-parallel ranks, where `what` takes a part for the whole.
pub(crate) fn refuse_divided<M: Module>(model: &M, what: &str) -> Result<()> {
    let mut names = Names { parts: parts_in_words(model), path: Vec::new(), found: None };
    if !names.parts.is_empty() {
        model.visit(&mut names);
    }
    names.found.map_or(Ok(()), |(name, part)| {
        Err(Error::invalid_argument(format!(
            "this rank has {part} of `{name}`, and {what} takes what a rank has for the whole model"
        ))
        .with_remedy(
            "make layers whole with TensorGroup::gather_module, or take Ddp over the mesh's data dimension",
        ))
    })
}

/// Finds the name of a divided parameter.
struct Names {
    parts: HashMap<ParamId, String>,
    path: Vec<String>,
    found: Option<(String, String)>,
}

impl ModuleVisitor for Names {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.found.is_none()
            && let Some(part) = self.parts.get(&param.id)
        {
            self.found = Some((self.path.join("."), part.clone()));
        }
    }
}
