//! Which layers of a model are divided, and how, by their names.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use phalanx::{Error, Rank, Result};
use serde::{Deserialize, Serialize};

use super::super::division::{REPARAMETERIZATION, reparameterized};
use super::TensorGroup;
use crate::ties::Ties;

/// How the layers of a model are divided among ranks, by their paths in the module: PyTorch's `parallelize_module`.
///
/// A path is the names of fields and the numbers of list elements, with dots between them, as in
/// `layers.0.attention.query`; in a pattern, `*` stands for any one of these.
///
/// Burn's modules have fixed types, so a plan cannot replace a [`Linear`](burn::nn::Linear) by another type, as PyTorch's replaces
/// parameters: the model has a [`ParallelLinear`](super::ParallelLinear) or a
/// [`VocabParallelEmbedding`](super::VocabParallelEmbedding) in its place, which is the same until a plan divides it. The rest of the
/// model must take shapes from tensors: between a layer whose outputs are divided and one whose inputs are, tensors are as wide as
/// a rank's part. Attention takes the number of heads from that width, and the caller sees to it that a part is a multiple of a head's.
/// The example is that of [`ParallelLinear`](super::ParallelLinear).
#[doc(alias("parallelize_module", "ColwiseParallel", "RowwiseParallel"))]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorPlan {
    rules: Vec<(String, Style)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Style {
    Column,
    Row,
    Vocabulary,
}

impl Style {
    /// The type of the layers that can be divided so, as Burn's derive names a struct.
    fn layer(self) -> &'static str {
        match self {
            Self::Column | Self::Row => "Struct:ParallelLinear",
            Self::Vocabulary => "Struct:VocabParallelEmbedding",
        }
    }

    /// The dimension along which a parameter is divided, if it is.
    fn dimension(self, field: &str) -> Option<usize> {
        match (self, field) {
            (Self::Column, "weight") => Some(1),
            (Self::Column, "bias") | (Self::Row | Self::Vocabulary, "weight") => Some(0),
            (Self::Column | Self::Row | Self::Vocabulary, _) => None,
        }
    }
}

impl TensorPlan {
    /// A plan that divides nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Divides the outputs of the [`ParallelLinear`](super::ParallelLinear)s whose paths match.
    #[must_use]
    pub fn column(self, pattern: &str) -> Self {
        self.with(pattern, Style::Column)
    }

    /// Divides the inputs of the [`ParallelLinear`](super::ParallelLinear)s whose paths match.
    #[must_use]
    pub fn row(self, pattern: &str) -> Self {
        self.with(pattern, Style::Row)
    }

    /// Divides the vectors of the [`VocabParallelEmbedding`](super::VocabParallelEmbedding)s whose paths match.
    #[must_use]
    pub fn vocabulary(self, pattern: &str) -> Self {
        self.with(pattern, Style::Vocabulary)
    }

    fn with(mut self, pattern: &str, style: Style) -> Self {
        self.rules.push((pattern.to_owned(), style));
        self
    }

    /// This rank's part of rank 0's `module`. All ranks call it together, with modules of the same shapes.
    /// [`TensorGroup::gather_module`] makes it whole again.
    ///
    /// # Errors
    /// On every rank, if plans differ; if a pattern matches no layer, a layer of another type, one that another pattern matches, or one
    /// that is divided already or has an adapter, such as LoRA; if inputs or outputs cannot be divided evenly; if one
    /// parameter in two places is divided in two ways. If modules differ, or the exchange fails.
    pub fn divide<M: Module>(&self, module: M, group: &TensorGroup) -> Result<M> {
        // One tensor with two ids is found while it is one. Asked of all ranks, or the others would wait for one that finds it here alone.
        let own = Ties::of(&module).map(|_| ());
        let all = group.all_plans(self, own.as_ref().err().map(Error::to_string))?;
        if let Some(other) = all.iter().position(|(plan, _)| *plan != all[0].0) {
            return Err(Error::mismatch(format!(
                "the ranks disagree on the plan: rank 0 has {:?}, rank {other} {:?}",
                all[0].0.rules, all[other].0.rules
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy("divide with the same TensorPlan on every rank"));
        }
        own?;
        let fault = |(rank, (_, fault)): (usize, &(Self, Option<String>))| Some((rank, fault.clone()?));
        if let Some((rank, cause)) = all.iter().enumerate().find_map(fault) {
            return Err(Error::mismatch(format!("rank {rank} cannot divide its module: {cause}"))
                .with_peer(Rank::new(rank as u32))
                .with_remedy("make the same module on every rank"));
        }
        let module = group.replicate(module)?;
        let matched = vec![false; self.rules.len()];
        let (path, has_divided) = (Vec::new(), false);
        let mut dividing = Dividing { plan: self, group, path, matched, has_divided, outcome: Ok(()) };
        let module = module.map(&mut dividing);
        dividing.outcome?;
        match dividing.matched.iter().position(|matched| !matched) {
            None => {
                // Two places of one parameter may have been divided otherwise.
                let remedy = "divide both places alike, as by patterns of the same kind, or give one of them an id of its own: \
                              Param::from_tensor(param.val().detach())";
                let ties = Ties::of(&module).map_err(|error| error.with_remedy(remedy))?;
                Ok(ties.retie(module))
            }
            Some(rule) => Err(Error::invalid_argument(format!(
                "no layer of the module matches `{}` of the plan",
                self.rules[rule].0
            ))
            .with_remedy("give the path of a layer, such as `layers.*.attention.query`")),
        }
    }
}

/// Divides parameters as they come.
struct Dividing<'a> {
    plan: &'a TensorPlan,
    group: &'a TensorGroup,
    /// The fields that enclose the next parameter, each with the type that it is in.
    path: Vec<(String, String)>,
    /// By rule.
    matched: Vec<bool>,
    /// Whether the last parameter was divided. If it is reparameterized, that comes next.
    has_divided: bool,
    outcome: Result<()>,
}

impl Dividing<'_> {
    fn divided<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Result<Param<Tensor<D>>> {
        let Some(((field, container), path)) = self.path.split_last() else { return Ok(param) };
        let layer = || joined(path);
        let mut found: Option<(&str, Style)> = None;
        for ((pattern, style), matched) in self.plan.rules.iter().zip(&mut self.matched) {
            if !matches(pattern, path) {
                continue;
            }
            *matched = true;
            if let Some((other, _)) = found.replace((pattern, *style)) {
                return Err(Error::invalid_argument(format!(
                    "`{}` matches both `{other}` and `{pattern}` of the plan",
                    layer()
                ))
                .with_remedy("let one pattern match each layer"));
            }
        }
        let Some((_, style)) = found else { return Ok(param) };
        if container != style.layer() {
            let (there, wanted) = (shown(container), shown(style.layer()));
            return Err(Error::invalid_argument(format!(
                "the plan divides `{}`, which is a {there} and no {wanted}",
                layer()
            ))
            .with_remedy(format!("make it {wanted}::from(layer) where the model is made")));
        }
        let Some(dim) = style.dimension(field) else { return Ok(param) };
        let size = param.shape().as_slice().get(dim).copied().unwrap_or(0);
        match style {
            Style::Column => self.group.check_divides(size, &format!("outputs of `{}`", layer()))?,
            Style::Row => self.group.check_divides(size, &format!("inputs of `{}`", layer()))?,
            Style::Vocabulary => {}
        }
        self.has_divided = true;
        self.group.shard(param, dim)
    }
}

impl ModuleMapper for Dividing<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == REPARAMETERIZATION && self.has_divided && self.outcome.is_ok() {
            self.outcome = Err(reparameterized(name));
        }
        self.path.push((name.to_owned(), container_type.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.has_divided = false;
        if self.outcome.is_err() {
            return param;
        }
        // What stays after an error is thrown away.
        let kept = param.clone();
        self.divided(param).unwrap_or_else(|error| {
            self.outcome = Err(error);
            kept
        })
    }
}

fn matches(pattern: &str, path: &[(String, String)]) -> bool {
    let mut parts = pattern.split('.');
    path.iter().all(|(name, _)| parts.next().is_some_and(|part| part == "*" || part == name))
        && parts.next().is_none()
}

fn joined(path: &[(String, String)]) -> String {
    let names: Vec<&str> = path.iter().map(|(name, _)| name.as_str()).collect();
    names.join(".")
}

/// A type as the source names it.
fn shown(container: &str) -> &str {
    container.strip_prefix("Struct:").unwrap_or(container)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_one_name() {
        let path = |path: &str| -> Vec<(String, String)> {
            path.split('.').map(|name| (name.to_owned(), String::new())).collect()
        };
        for (pattern, matched) in [
            ("layers.*.query", true),
            ("layers.0.query", true),
            ("layers.1.query", false),
            ("*.*.*", true),
            ("layers.*", false),
            ("layers.*.query.weight", false),
            ("*.query", false),
        ] {
            assert_eq!(matches(pattern, &path("layers.0.query")), matched, "{pattern}");
        }
    }
}
