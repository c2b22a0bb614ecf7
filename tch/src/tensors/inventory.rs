//! The variables of a `VarStore`: which are trained, which are buffers, and which are refused.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx::reducer::ParameterSpec;
use phalanx::{Error, Result};
use tch::nn::{VarStore, Variables};
use tch::{Device, Tensor};

use super::sharing;
use crate::shim;

/// A tensor of a `VarStore`; the handle shares its memory.
#[derive(Debug)]
pub(crate) struct Named {
    pub spec: ParameterSpec,
    pub tensor: Tensor,
}

impl Clone for Named {
    fn clone(&self) -> Self {
        Self { spec: self.spec.clone(), tensor: self.tensor.shallow_clone() }
    }
}

impl Named {
    /// An error if it is no longer what the ranks have compared.
    pub fn check_kind(&self) -> Result<()> {
        let Self { spec, tensor } = self;
        if shape(tensor) == spec.shape && shim::dtype(tensor.kind()).is_ok_and(|dtype| dtype == spec.dtype) {
            return Ok(());
        }
        let (kind, size) = (tensor.kind(), tensor.size());
        Err(Error::invalid_argument(format!(
            "the variable's shape or type changed since Ddp::new: {spec} is {kind:?} {size:?} now"
        ))
        .with_remedy("change the VarStore first, then make the Ddp"))
    }
}

/// The tensors of a `VarStore`.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// The parameters that need a gradient, or did and are frozen, in the order in which they were made.
    pub parameters: Vec<Named>,
    /// Every tensor, by name: also frozen parameters, buffers, and tensors that are no floats.
    pub state: Vec<Named>,
    /// The positions in `state` of what no optimizer changes, such as the running statistics of batch norm.
    pub buffers: Vec<usize>,
}

/// What a `VarStore` has in common with its copies here.
pub(crate) type Shared = Arc<Mutex<Variables>>;

pub(crate) fn shared(store: &VarStore) -> Shared {
    store.variables_.clone()
}

impl Inventory {
    /// Lists the tensors of a `VarStore`; refuses one that cannot be trained here.
    pub fn of(variables: &Shared) -> Result<Self> {
        Self::with_frozen(variables, &[])
    }

    /// The same. Those of the parameters `before` that are frozen now are parameters, too: they may be unfrozen again.
    pub fn with_frozen(variables: &Shared, before: &[Named]) -> Result<Self> {
        let before = identities(before);
        let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = variables.named_variables.iter().collect::<Vec<_>>();
        state.sort_unstable_by_key(|(name, _)| name.as_str());
        let state = state
            .into_iter()
            .map(|(name, tensor)| named(name.clone(), tensor))
            .collect::<Result<Vec<_>>>()?;
        check_device(&state)?;
        let names: HashMap<usize, &str> =
            state.iter().map(|one| (shim::identity(&one.tensor), one.spec.name.as_str())).collect();

        let (mut parameters, mut trainable) = (Vec::new(), HashSet::new());
        for variable in &variables.trainable_variables {
            let identity = shim::identity(&variable.tensor);
            // One that is used in several places is listed once.
            let is_trained = variable.tensor.requires_grad() || before.contains(&identity);
            if trainable.insert(identity) && is_trained {
                let Some(name) = names.get(&identity) else {
                    return Err(unnamed(&variable.tensor, &state));
                };
                if !variable.tensor.is_leaf() {
                    return Err(computed(name, &state));
                }
                parameters.push(named((*name).to_owned(), &variable.tensor)?);
            }
        }
        if parameters.is_empty() {
            let cause = match state.len() {
                0 => "the VarStore has no variables".to_owned(),
                count => format!(
                    "no parameter of the model needs a gradient: all {count} variables are frozen or buffers"
                ),
            };
            return Err(Error::invalid_argument(cause)
                .with_remedy("make the layers before the Ddp; unfreeze some with VarStore::unfreeze"));
        }
        let is_buffer = |one: &Named| !trainable.contains(&shim::identity(&one.tensor));
        let buffers =
            state.iter().enumerate().filter(|(_, one)| is_buffer(one)).map(|(index, _)| index).collect();
        Ok(Self { parameters, state, buffers })
    }

    /// What the ranks compare of all tensors: also which of them are buffers, of which every rank takes over rank 0's, and which share memory, or the same
    /// variables would not be the same model.
    pub fn contract(&self) -> Vec<ParameterSpec> {
        let mut contract = Self::specs(&self.state);
        for &index in &self.buffers {
            contract[index].name += " (a buffer)";
        }
        for (index, first) in sharing(&handles(&self.state)).into_iter().enumerate() {
            if let Some(first) = first.and_then(|first| self.state.get(first)) {
                contract[index].name += &format!(" (in the memory of {})", first.spec.name);
            }
        }
        contract
    }

    /// The kind of device on which all of them are.
    pub fn device_kind(&self) -> &'static str {
        match self.state.first().map(|one| one.tensor.device()) {
            Some(Device::Cuda(_)) => "cuda",
            _ => "cpu",
        }
    }

    /// An error if `variables` has a trainable one that this does not list, because it was made or unfrozen later: each rank
    /// would train its own. So is any other that was made later.
    pub fn check_complete(&self, variables: &Shared) -> Result<()> {
        self.check_all_trained(variables)?;
        self.check_all_known(variables)
    }

    fn check_all_trained(&self, variables: &Shared) -> Result<()> {
        let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
        let known = identities(&self.parameters);
        let is_new = |tensor: &Tensor| tensor.requires_grad() && !known.contains(&shim::identity(tensor));
        let Some(other) = variables.trainable_variables.iter().find(|one| is_new(&one.tensor)) else {
            return Ok(());
        };
        let name = name_in(&variables, &other.tensor);
        Err(Error::invalid_argument(format!(
            "the trainable variable `{name}` was made or unfrozen after Ddp::new, which does not average its gradients"
        ))
        .with_remedy("make all layers, and unfreeze what is to be trained, before Ddp::new; it may be frozen later"))
    }

    /// An error if `variables` has one that this does not list, such as the running statistics of a layer that was made later: the ranks have
    /// not compared it, it does not become rank 0's, and a saved state lacks it.
    pub fn check_all_known(&self, variables: &Shared) -> Result<()> {
        let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
        let known = identities(&self.state);
        let named = variables.named_variables.iter();
        let new = named.filter(|(_, tensor)| !known.contains(&shim::identity(tensor)));
        let Some(name) = new.map(|(name, _)| name).min() else { return Ok(()) };
        Err(Error::invalid_argument(format!(
            "the variable `{name}` was made after Ddp::new, which neither makes it equal on all ranks nor saves it"
        ))
        .with_remedy("make all layers before Ddp::new and TrainState::new, or this one in a VarStore of its own"))
    }

    /// What the ranks compare of `tensors`.
    pub fn specs(tensors: &[Named]) -> Vec<ParameterSpec> {
        tensors.iter().map(|one| one.spec.clone()).collect()
    }

    pub fn buffers(&self) -> Vec<Tensor> {
        self.buffers
            .iter()
            .filter_map(|&index| self.state.get(index))
            .map(|one| one.tensor.shallow_clone())
            .collect()
    }
}

/// An error if a trainable one of `variables` has a gradient and is not among the parameters of the optimizer, `trained`: it would stay as it is.
pub(crate) fn check_trained(variables: &Shared, trained: &[Named]) -> Result<()> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let known = identities(trained);
    let is_left_out = |tensor: &Tensor| {
        !known.contains(&shim::identity(tensor)) && tensor.requires_grad() && tensor.grad().defined()
    };
    let Some(other) = variables.trainable_variables.iter().find(|one| is_left_out(&one.tensor)) else {
        return Ok(());
    };
    let name = name_in(&variables, &other.tensor);
    Err(Error::invalid_argument(format!(
        "the variable `{name}` has a gradient and is not among the optimizer's: it was made or unfrozen after Optimizer::new, and would never be \
         trained"
    ))
    .with_remedy(
        "make all layers, and unfreeze what is to be trained, before Optimizer::new; to train parts in turns, make one Optimizer while all of \
         them need a gradient, and freeze after that: what is frozen gets no gradient after zero_grad, and keeps its value; parts that go by \
         rules of their own are groups of one Optimizer (Optimizer::with_group)",
    ))
}

/// The name of one of `variables`.
fn name_in<'a>(variables: &'a Variables, tensor: &Tensor) -> &'a str {
    let identity = shim::identity(tensor);
    let mut named = variables.named_variables.iter();
    named.find(|(_, other)| shim::identity(other) == identity).map_or("", |(name, _)| name)
}

/// The [identities](shim::identity) of `tensors`.
fn identities(tensors: &[Named]) -> HashSet<usize> {
    tensors.iter().map(|one| shim::identity(&one.tensor)).collect()
}

/// The error for a trainable variable that has no name.
fn unnamed(tensor: &Tensor, state: &[Named]) -> Error {
    let mut names: HashMap<usize, Vec<&str>> = HashMap::new();
    for one in state {
        names.entry(shim::identity(&one.tensor)).or_default().push(&one.spec.name);
    }
    let mut shared: Vec<String> = names
        .into_values()
        .filter(|names| names.len() > 1)
        .map(|names| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" and "))
        .collect();
    shared.sort_unstable();
    let ties = match shared.is_empty() {
        true => String::new(),
        false => format!("; {} are one tensor", shared.join(", ")),
    };
    Error::invalid_argument(format!(
        "a trainable variable of shape {:?} is not among the named ones of its VarStore{ties}",
        tensor.size()
    ))
    .with_remedy("remove a variable that another one has replaced from trainable_variables, too")
}

/// The error for a trainable variable that is computed from another one, such as a view of it.
fn computed(name: &str, state: &[Named]) -> Error {
    let place = state.iter().position(|one| one.spec.name == name);
    let shared = sharing(&handles(state));
    let with = |index: usize| {
        let first = shared[index].unwrap_or(index);
        let is_other = |other: usize| other != index && (other == first || shared[other] == Some(first));
        (0..state.len()).find(|&other| is_other(other)).map(|other| state[other].spec.name.as_str())
    };
    let of = match place.and_then(with) {
        Some(other) => format!("a view of `{other}`"),
        None => "computed from others".to_owned(),
    };
    Error::invalid_argument(format!(
        "the trainable variable `{name}` is {of}, and no leaf of the graph: libtorch gives it no gradient, and no optimizer trains it"
    ))
    .with_remedy(
        "compute it in the forward pass from the other variable, which is then trained by both uses, or make it with `detach().copy()`",
    )
}

fn named(name: String, tensor: &Tensor) -> Result<Named> {
    if !shim::is_plain(tensor) {
        let place = tensor.device();
        return Err(Error::invalid_argument(format!(
            "the variable `{name}` is on {place:?}, sparse, or a view that negates"
        ))
        .with_remedy(
            "this version averages dense gradients of processors and of CUDA devices: use VarStore::new(Device::Cpu) or Device::Cuda",
        ));
    }
    let dtype = shim::dtype(tensor.kind()).map_err(|_| {
        let kind = tensor.kind();
        Error::invalid_argument(format!(
            "the variable `{name}` is of type {kind:?}, which does not travel between ranks"
        ))
        .with_remedy("cast it, or make it in a VarStore of its own")
    })?;
    let spec = ParameterSpec::new(name, shape(tensor), dtype);
    Ok(Named { spec, tensor: tensor.shallow_clone() })
}

fn shape(tensor: &Tensor) -> Vec<usize> {
    tensor.size().into_iter().map(|side| usize::try_from(side).unwrap_or(0)).collect()
}

/// An error if the variables lie on several devices: backward then runs on a thread for each, and collectives that it begins, such as those of
/// synchronised batch norms, have no order.
fn check_device(state: &[Named]) -> Result<()> {
    let Some((first, others)) = state.split_first() else { return Ok(()) };
    let device = first.tensor.device();
    let Some(other) = others.iter().find(|one| one.tensor.device() != device) else { return Ok(()) };
    Err(Error::invalid_argument(format!(
        "the variable `{}` is on {device:?}, and `{}` is on {:?}",
        first.spec.name,
        other.spec.name,
        other.tensor.device()
    ))
    .with_remedy("make all variables of a VarStore on one device, a device for each rank: VarStore::new(Device::Cuda(local_rank))"))
}

/// Handles of all tensors.
pub(crate) fn handles(tensors: &[Named]) -> Vec<Tensor> {
    tensors.iter().map(|one| one.tensor.shallow_clone()).collect()
}
