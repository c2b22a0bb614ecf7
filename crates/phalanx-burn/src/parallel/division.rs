//! Which part of a whole a parameter is, noted at the parameter itself.

use std::cell::RefCell;
use std::collections::HashMap;

use burn::module::{
    Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{Device, Tensor};
use phalanx::Error;

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

/// The part of a parameter that this rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub span: Span,
    /// This rank's number among those that have the parts, and how many there are.
    pub rank: usize,
    pub ranks: usize,
}

/// The type under which visitors see a [`Part`], whose name is its figures.
const CONTAINER: &str = "phalanx::Division";

impl Part {
    fn name(self) -> String {
        let Self { span: Span { dim, total }, rank, ranks } = self;
        format!("{dim}/{total}/{rank}/{ranks}")
    }

    fn parse(name: &str) -> Option<Self> {
        let mut figures = name.split('/').map(|figure| figure.parse().ok());
        let mut next = || figures.next().flatten();
        let (span, rank) = (Span { dim: next()?, total: next()? }, next()?);
        Some(Self { span, rank, ranks: next()? })
    }
}

impl Division {
    /// `part` with the note that it is a part.
    pub fn attach<const D: usize>(self, part: Param<Tensor<D>>) -> Param<Tensor<D>> {
        part.apply_reparameterization(Attach(self))
    }
}

thread_local! {
    /// While [`group_of`] asks: the first group of several ranks of which a part was visited. Visitors are told names alone.
    static ASKED: RefCell<Option<Option<TensorGroup>>> = const { RefCell::new(None) };
}

/// The ranks among which the parameters of `module` are divided: the first group of several ranks, if there is one.
pub(crate) fn group_of<M: Module>(module: &M) -> Option<TensorGroup> {
    struct Nothing;
    impl ModuleVisitor for Nothing {}
    /// Nobody asks any more: a handle that stays would keep the group.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            drop(ASKED.take());
        }
    }
    let _end = End;
    ASKED.set(Some(None));
    module.visit(&mut Nothing);
    ASKED.take().flatten()
}

/// The type under which visitors see what Burn computes a parameter's value with, behind the parameter.
pub(super) const REPARAMETERIZATION: &str = "Reparameterization";

/// The error for a parameter with the reparameterization `name` that is to be divided.
pub(super) fn reparameterized(name: &str) -> Error {
    Error::invalid_argument(format!(
        "a parameter with the reparameterization `{name}` cannot be divided: its part would have none"
    ))
    .with_remedy("divide a parameter once; Module::materialize merges an adapter, such as LoRA, into it")
}

/// What Burn computes the value of `parameter` with, such as `lora`, or `division` where it is noted that it is a part.
pub(super) fn reparameterization<const D: usize>(parameter: &Param<Tensor<D>>) -> Option<String> {
    struct Name(Option<String>);
    impl ModuleVisitor for Name {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            if container_type == REPARAMETERIZATION {
                self.0.get_or_insert_with(|| name.to_owned());
            }
        }
    }
    let mut name = Name(None);
    parameter.visit(&mut name);
    name.0
}

/// The divided parameters of `module`.
pub(super) fn divided<M: Module>(module: &M) -> HashMap<ParamId, Span> {
    noted(module).into_iter().map(|(id, part)| (id, part.span)).collect()
}

/// What is noted at the divided parameters of `module`, also in a group of one rank, where the part is the whole.
pub(super) fn noted<M: Module>(module: &M) -> HashMap<ParamId, Part> {
    let mut visitor = Divided::default();
    module.visit(&mut visitor);
    visitor.found.into_iter().map(|(id, (part, _))| (id, part)).collect()
}

/// Which part this rank has of each parameter of `module` that it has not whole. In a group of one rank the part is the whole.
pub(super) fn parts<M: Module>(module: &M) -> HashMap<ParamId, Part> {
    let mut visitor = Divided::default();
    module.visit(&mut visitor);
    let is_part = |part: &Part, shape: &[usize]| shape.get(part.span.dim) != Some(&part.span.total);
    let found = visitor.found.into_iter();
    found.filter(|(_, (part, shape))| is_part(part, shape)).map(|(id, (part, _))| (id, part)).collect()
}

#[derive(Default)]
struct Divided {
    /// The parameter that was visited last: what is noted at it comes next.
    last: Option<(ParamId, Vec<usize>)>,
    /// With their shapes here.
    found: HashMap<ParamId, (Part, Vec<usize>)>,
}

impl ModuleVisitor for Divided {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.last = Some((param.id, param.shape().as_slice().to_vec()));
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == CONTAINER {
            let found = self.last.clone().zip(Part::parse(name));
            self.found.extend(found.map(|((id, shape), part)| (id, (part, shape))));
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
        ASKED.with_borrow_mut(|asked| {
            if let Some(found) = asked
                && self.group.ranks() > 1
            {
                found.get_or_insert_with(|| self.group.clone());
            }
        });
        let name = Part { span: self.span, rank: self.group.rank(), ranks: self.group.ranks() }.name();
        visitor.enter_module(&name, CONTAINER);
        visitor.exit_module(&name, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use phalanx::ProcessGroup;
    use phalanx::testing::{Fabric, run};

    use super::super::tensor::ColumnParallelLinear;
    use super::*;

    #[test]
    fn a_group_of_one_rank_hides_none_of_several() {
        run(2, Fabric::InProcess, |group| {
            let [alone, pair] = [&ProcessGroup::alone().unwrap(), &group].map(TensorGroup::new);
            let layer = |group: &TensorGroup| {
                let layer: Linear = LinearConfig::new(4, 4).init(&Device::flex().autodiff());
                ColumnParallelLinear::new(layer, group).unwrap()
            };
            assert!(group_of(&layer(&alone)).is_none());
            let found = group_of(&(layer(&alone), layer(&pair)));
            assert_eq!(found.map(|group| group.ranks()), Some(2));
        });
    }

    #[test]
    fn a_part_is_read_as_it_is_written() {
        let part = Part { span: Span { dim: 1, total: 768 }, rank: 2, ranks: 3 };
        assert_eq!(Part::parse(&part.name()), Some(part));
        for other in ["", "1/768", "1/768/2", "1/768/2/x"] {
            assert_eq!(Part::parse(other), None, "{other}");
        }
    }
}
