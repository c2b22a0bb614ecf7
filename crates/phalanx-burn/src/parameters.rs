//! The tensors of a module, and how they are read and replaced.

use std::collections::{HashMap, HashSet};

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, BoolStore, DType as BurnDType, Device, Int, Tensor, TensorData};
use phalanx::{Error, Rank, Result};

use crate::parallel::parts_in_words;
use crate::tensor_bytes::{self, TensorBytes};
use crate::ties::Ties;
use crate::{constants, device, read_back};

/// A tensor of a module.
#[derive(Clone)]
pub(crate) struct Parameter {
    pub id: ParamId,
    /// Its path in the module, such as `layers.0.weight`.
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: BurnDType,
}

/// The tensors of a module.
pub(crate) struct Inventory {
    /// The parameters that need a gradient, in module order; one that is used in several places is listed once.
    pub parameters: Vec<Parameter>,
    /// The floats that need no gradient and are no buffers, in module order, each once.
    pub frozen: Vec<Parameter>,
    /// Every tensor, in module order: also frozen parameters, buffers, and tensors that are not floats.
    pub state: Vec<Parameter>,
    /// The position of each parameter in `parameters`, which is its index in the reducer.
    pub indices: HashMap<ParamId, usize>,
    /// Floats that a forward pass may change, such as the running statistics of batch norm.
    pub buffers: HashSet<ParamId>,
    /// The device of the module.
    pub device: Device,
    /// Where the hooks of all passes begin.
    pub token: Tensor<1>,
    /// Whether parameters stand in several places.
    pub ties: Ties,
    /// Which part this rank has of each parameter that is divided among several ranks, in words.
    parts: HashMap<ParamId, String>,
    /// Whether layers such as dropout behave as in training, under names that say so.
    flags: Vec<Parameter>,
    /// What of Burn's layers are no tensors, such as an epsilon, with names that say where it is.
    pub constants: Vec<(String, String)>,
}

impl Inventory {
    /// Lists the tensors of `module`; refuses one that cannot be trained here.
    pub fn of<M: Module>(module: &M) -> Result<Self> {
        let inventory = Self::or_frozen(module)?;
        if inventory.parameters.is_empty() {
            return Err(Error::invalid_argument(format!(
                "no parameter of the model needs a gradient: all {} are frozen",
                inventory.frozen.len()
            ))
            .with_remedy(
                "unfreeze some with Module::unfreeze; a model that is not trained is used as it is",
            ));
        }
        Ok(inventory)
    }

    /// The same for a `module` that may be frozen, as a part of a model that is trained.
    pub fn or_frozen<M: Module>(module: &M) -> Result<Self> {
        let mut visitor = Stock::default();
        module.visit(&mut visitor);
        let Some(device) = visitor.device else {
            return Err(Error::invalid_argument("the model has no parameters")
                .with_remedy("give a model whose fields are layers or parameters"));
        };
        device::check(&device)?;
        if !device.is_autodiff() {
            return Err(Error::invalid_argument("the model is on a device without autodiff")
                .with_remedy("create it on such a device, as Device::flex().autodiff()"));
        }
        let Stock { parameters, frozen, state, flags, .. } = visitor;
        let indices = parameters.iter().enumerate().map(|(index, parameter)| (parameter.id, index)).collect();
        let (ties, buffers) = (Ties::of(module)?, buffers(module));
        let frozen = frozen.into_iter().filter(|parameter| !buffers.contains(&parameter.id)).collect();
        let parts = parts_in_words(module);
        let constants = constants::of(module);
        let token = Tensor::zeros([1], &device).require_grad();
        Ok(Self { parameters, frozen, state, indices, buffers, device, token, ties, parts, flags, constants })
    }

    /// Every tensor, in module order, under names that also say which part of it this rank has, and then the flags: what replicas must have in
    /// common.
    pub fn compared(&self) -> Vec<Parameter> {
        let named = |tensor: &Parameter| match self.parts.get(&tensor.id) {
            Some(part) => Parameter { name: format!("{} ({part})", tensor.name), ..tensor.clone() },
            None => tensor.clone(),
        };
        self.state.iter().map(named).chain(self.flags.iter().cloned()).collect()
    }

    /// Whether this rank has only a part of a parameter.
    pub fn is_divided(&self) -> bool {
        !self.parts.is_empty()
    }
}

/// Selects tensors of a module.
#[derive(Clone, Copy)]
pub(crate) enum Select<'a> {
    /// All tensors: parameters, frozen or not, buffers, and tensors that are not floats.
    All,
    /// Floats that only an optimizer changes, and frozen ones: all but these buffers.
    Weights(&'a HashSet<ParamId>),
    /// The floats that an optimizer changes.
    Trained(&'a HashMap<ParamId, usize>),
    /// These floats: buffers.
    Only(&'a HashSet<ParamId>),
    /// All tensors but these floats: what is not sharded.
    Except(&'a HashSet<ParamId>),
}

impl Select<'_> {
    pub(crate) fn float(self, id: ParamId) -> bool {
        match self {
            Self::All => true,
            Self::Weights(these) | Self::Except(these) => !these.contains(&id),
            Self::Trained(these) => these.contains_key(&id),
            Self::Only(these) => these.contains(&id),
        }
    }

    pub(crate) fn other(self) -> bool {
        matches!(self, Self::All | Self::Except(_))
    }
}

/// The selected tensors' data, in module order.
///
/// # Errors
/// If a device cannot give one; the error names it.
pub(crate) fn read<M: Module>(module: &M, select: Select<'_>) -> Result<Vec<TensorData>> {
    let mut reader = Reader { select, path: Vec::new(), data: Ok(Vec::new()) };
    module.visit(&mut reader);
    reader.data
}

/// `module` with the selected tensors replaced by `data`, which [`read`] gave in this order.
pub(crate) fn write<M: Module>(module: M, select: Select<'_>, data: Vec<TensorData>) -> M {
    module.map(&mut Writer { select, data: data.into_iter() })
}

/// Every tensor of `module`, in module order, and then whether layers such as dropout behave as in training: what
/// replicas must have in common.
pub(crate) fn in_words<M: Module>(module: &M) -> Vec<String> {
    let mut visitor = Stock::default();
    module.visit(&mut visitor);
    let words = |Parameter { name, shape, dtype, .. }: &Parameter| {
        format!("`{name}` of shape {shape:?} and type {dtype:?}")
    };
    visitor.state.iter().chain(&visitor.flags).map(words).collect()
}

/// An error if the modules of these ranks, `all` of a group [in words](in_words), have other tensors than that of
/// rank 0. All find the same.
pub(crate) fn check_words(all: &[Vec<String>]) -> Result<()> {
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    for (rank, other) in (1..).map(Rank::new).zip(others) {
        let place = first.iter().zip(other).take_while(|(one, other)| one == other).count();
        if place == first.len().max(other.len()) {
            continue;
        }
        let shown = |tensors: &[String]| tensors.get(place).cloned().unwrap_or_else(|| "none".to_owned());
        return Err(Error::mismatch(format!(
            "the models differ: tensor number {} is {} on rank 0, and {} on rank {rank}",
            place + 1,
            shown(first),
            shown(other)
        ))
        .with_peer(rank)
        .with_remedy("build the same model on every rank"));
    }
    Ok(())
}

/// Floats that stay without a gradient even if gradients are required for all: Burn's running state is like that.
fn buffers<M: Module>(module: &M) -> HashSet<ParamId> {
    // Every parameter is initialised by now (`Stock` has visited it), so the clone shares nothing that would change.
    let mut visitor = Untrainable::default();
    module.clone().set_require_grad(true).visit(&mut visitor);
    visitor.0
}

#[derive(Default)]
struct Stock {
    path: Vec<String>,
    parameters: Vec<Parameter>,
    frozen: Vec<Parameter>,
    state: Vec<Parameter>,
    flags: Vec<Parameter>,
    seen: HashSet<ParamId>,
    device: Option<Device>,
}

impl Stock {
    fn describe(&self, id: ParamId, shape: &[usize], dtype: BurnDType) -> Parameter {
        Parameter { id, name: self.path.join("."), shape: shape.to_vec(), dtype }
    }
}

impl ModuleVisitor for Stock {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        self.device.get_or_insert_with(|| tensor.device());
        let parameter = self.describe(param.id, tensor.shape().as_slice(), tensor.dtype());
        if self.seen.insert(param.id) {
            let kind = if tensor.is_require_grad() { &mut self.parameters } else { &mut self.frozen };
            kind.push(parameter.clone());
        }
        self.state.push(parameter);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.base();
        self.state.push(self.describe(param.id, tensor.shape().as_slice(), tensor.dtype()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.base();
        self.state.push(self.describe(param.id, tensor.shape().as_slice(), tensor.dtype()));
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        let Parameter { id, name, shape, dtype } =
            self.describe(flag.id, &[], BurnDType::Bool(BoolStore::Native));
        self.flags.push(Parameter { id, name: format!("{name} ({})", flag.val()), shape, dtype });
    }
}

#[derive(Default)]
struct Untrainable(HashSet<ParamId>);

impl ModuleVisitor for Untrainable {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            self.0.insert(param.id);
        }
    }
}

struct Reader<'a> {
    select: Select<'a>,
    path: Vec<String>,
    data: Result<Vec<TensorData>>,
}

impl Reader<'_> {
    fn read<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) {
        let Ok(data) = &mut self.data else { return };
        match read_back::named(tensor, &self.path.join(".")) {
            Ok(tensor) => data.push(tensor),
            Err(error) => self.data = Err(error),
        }
    }
}

impl ModuleVisitor for Reader<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.select.float(param.id) {
            self.read(param.base());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.select.other() {
            self.read(param.base());
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if self.select.other() {
            self.read(param.base());
        }
    }
}

struct Writer<'a> {
    select: Select<'a>,
    data: std::vec::IntoIter<TensorData>,
}

impl Writer<'_> {
    fn next(&mut self, selected: bool) -> Option<TensorData> {
        if selected { self.data.next() } else { None }
    }
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.next(self.select.float(param.id)) {
            Some(data) => param.map(|old| {
                let dtype = data.dtype();
                Tensor::from_data(data, (&old.device(), dtype)).set_require_grad(old.is_require_grad())
            }),
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.next(self.select.other()) {
            Some(data) => param.map(|old| {
                let dtype = data.dtype();
                Tensor::from_data(data, (&old.device(), dtype))
            }),
            None => param,
        }
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        match self.next(self.select.other()) {
            Some(data) => param.map(|old| Tensor::from_data(data, &old.device())),
            None => param,
        }
    }
}

/// Passes to `look` the elements of each of `module`'s floats that has an index, once.
pub(crate) fn each<M: Module>(
    module: &M,
    indices: &HashMap<ParamId, usize>,
    look: impl FnMut(usize, TensorBytes<'_>) -> Result<()>,
) -> Result<()> {
    let mut visitor = Each { indices, seen: vec![false; indices.len()], look, outcome: Ok(()) };
    module.visit(&mut visitor);
    visitor.outcome
}

struct Each<'a, F> {
    indices: &'a HashMap<ParamId, usize>,
    seen: Vec<bool>,
    look: F,
    outcome: Result<()>,
}

impl<F: FnMut(usize, TensorBytes<'_>) -> Result<()>> ModuleVisitor for Each<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(&param.id) else { return };
        let again = self.seen.get_mut(index).is_none_or(|seen| std::mem::replace(seen, true));
        if !again && self.outcome.is_ok() {
            self.outcome = tensor_bytes::with_bytes(param.base(), |bytes| (self.look)(index, bytes))
                .and_then(|outcome| outcome);
        }
    }
}

/// `module` with new elements for each float whose index has some in `elements`.
pub(crate) fn replaced<'a, M: Module>(
    module: M,
    indices: &HashMap<ParamId, usize>,
    elements: impl FnMut(usize) -> Option<&'a [u8]>,
) -> M {
    module.map(&mut Replace { indices, elements })
}

struct Replace<'p, F> {
    indices: &'p HashMap<ParamId, usize>,
    elements: F,
}

impl<'a, F: FnMut(usize) -> Option<&'a [u8]>> ModuleMapper for Replace<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let elements = self.indices.get(&param.id).and_then(|&index| (self.elements)(index));
        match elements {
            Some(elements) => param.map(|old| tensor_bytes::overwritten(old, elements)),
            None => param,
        }
    }
}
