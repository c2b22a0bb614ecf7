//! Which part of a whole a parameter is, noted at the parameter itself.

use std::collections::HashMap;

use burn::module::{
    Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{Device, Tensor};

use super::tensor::TensorGroup;

/// A parameter is this rank's part of a whole one along a dimension.
///
/// It is a reparameterization that computes nothing: that is what Burn keeps with a parameter through clones, mappings, evaluation and
/// records, whatever the module that it is in.
#[derive(Clone, Debug)]
pub(super) struct Division {
    pub group: TensorGroup,
    pub span: Span,
}

/// Along which dimension a parameter is divided, and how long that is in the whole one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub dim: usize,
    pub total: usize,
}

/// The type under which visitors see a [`Span`], whose name is its figures.
const CONTAINER: &str = "phalanx::Division";

impl Span {
    fn name(self) -> String {
        format!("{}/{}", self.dim, self.total)
    }

    fn parse(name: &str) -> Option<Self> {
        let (dim, total) = name.split_once('/')?;
        Some(Self { dim: dim.parse().ok()?, total: total.parse().ok()? })
    }
}

impl Division {
    /// `part` with the note that it is a part.
    pub fn attach<const D: usize>(self, part: Param<Tensor<D>>) -> Param<Tensor<D>> {
        part.apply_reparameterization(Attach(self))
    }
}

/// The divided parameters of `module`.
pub(super) fn divided<M: Module>(module: &M) -> HashMap<ParamId, Span> {
    let mut visitor = Divided::default();
    module.visit(&mut visitor);
    visitor.spans
}

#[derive(Default)]
struct Divided {
    /// The parameter that was visited last: what is noted at it comes next.
    last: Option<ParamId>,
    spans: HashMap<ParamId, Span>,
}

impl ModuleVisitor for Divided {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.last = Some(param.id);
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == CONTAINER {
            self.spans.extend(self.last.zip(Span::parse(name)));
        }
    }
}

struct Attach(Division);

impl Reparameterizer for Attach {
    type Reparam = Division;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Division>) {
        (param, Some(self.0.clone()))
    }
}

impl Reparameterization for Division {
    const NAME: &'static str = "division";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

/// It has no parameters. A visitor is told its figures.
impl Module for Division {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _device: &Device) -> Self {
        self
    }

    fn to_device(self, _device: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let name = self.span.name();
        visitor.enter_module(&name, CONTAINER);
        visitor.exit_module(&name, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self
    }
}
