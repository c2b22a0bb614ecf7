//! The tensors of a `VarStore`, and how they travel.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx::adapter::copy_of;
use phalanx::reducer::{ParameterSpec, StateTensor, broadcast_state_from, states_identical};
use phalanx::{Communicator, Error, Rank, Result};
use tch::nn::{VarStore, Variables};
use tch::{Device, Tensor};

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
    /// The parameters that need a gradient, in the order in which they were made.
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
            if trainable.insert(identity) && variable.tensor.requires_grad() {
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

/// Copies the elements of all `tensors`, gives them to `change`, and copies them back. Elements that several tensors share are given once.
///
/// `change` never sees the tensors' own memory: it may run code of others, such as a communicator of the program's own, which can reach
/// the tensors through handles.
pub(crate) fn with_elements<T>(
    tensors: &[Tensor],
    change: impl FnOnce(&mut [StateTensor<'_>]) -> Result<T>,
) -> Result<T> {
    let rows = rows(tensors)?;
    let copy = |(index, row): &(usize, Tensor)| {
        let bytes = shim::bytes(row).ok_or_else(|| without_memory(*index))?;
        Ok((shim::dtype(row.kind())?, copy_of(bytes)?))
    };
    let mut copies = rows.iter().map(copy).collect::<Result<Vec<_>>>()?;
    let mut parts: Vec<_> =
        copies.iter_mut().map(|(dtype, bytes)| StateTensor { dtype: *dtype, bytes }).collect();
    let outcome = change(&mut parts)?;
    for ((index, _), (_, bytes)) in rows.iter().zip(&copies) {
        write_elements(&tensors[*index], bytes)?;
    }
    Ok(outcome)
}

/// Gives `look` the elements of all `tensors`, and leaves the tensors alone: autograd refuses to run backward through one that was
/// written since. Elements that several tensors share are given once.
///
/// Each tensor's elements are looked at before the next one's are taken: see [`with_elements`].
pub(crate) fn read_elements<T>(
    tensors: &[Tensor],
    look: impl FnOnce(&mut dyn Iterator<Item = &[u8]>) -> Result<T>,
) -> Result<T> {
    let rows = rows(tensors)?;
    let mut unreadable = None;
    let mut parts = rows.iter().map(|(index, row)| {
        shim::bytes(row).unwrap_or_else(|| {
            unreadable = Some(*index);
            &[]
        })
    });
    let outcome = look(&mut parts)?;
    unreadable.map_or(Ok(outcome), |index| Err(without_memory(index)))
}

/// The elements of each tensor, row by row.
pub(crate) fn copies(tensors: &[Tensor]) -> Result<Vec<Vec<u8>>> {
    tensors.iter().map(copy).collect()
}

/// The elements of `tensor`, row by row.
pub(crate) fn copy(tensor: &Tensor) -> Result<Vec<u8>> {
    read_elements(&[tensor.shallow_clone()], |parts| copy_of(parts.next().unwrap_or_default()))
}

/// Writes `elements`, row by row, to `tensor`.
pub(crate) fn write_elements(tensor: &Tensor, elements: &[u8]) -> Result<()> {
    if shim::is_plain(tensor) && !shim::is_here(tensor) {
        return shim::write(tensor, elements);
    }
    let _guard = tch::no_grad_guard();
    let mut tensor = tensor.f_detach().map_err(torch)?;
    let is_rows = tensor.is_contiguous();
    let mut row = if is_rows { tensor.shallow_clone() } else { tensor.f_contiguous().map_err(torch)? };
    match shim::bytes_mut(&mut row) {
        Some(bytes) if bytes.len() == elements.len() => bytes.copy_from_slice(elements),
        Some(bytes) => {
            return Err(Error::invalid_argument(format!(
                "a variable's size has changed meanwhile from {} B to {} B",
                elements.len(),
                bytes.len()
            )));
        }
        None => return Err(Error::invalid_argument("a variable has no memory of this machine any more")),
    }
    if !is_rows {
        tensor.f_copy_(&row).map_err(torch)?;
    }
    Ok(())
}

/// Of the tensors that [`distinct`] names, the position and the elements row by row in this machine's memory: in place where they lie so.
fn rows(tensors: &[Tensor]) -> Result<Vec<(usize, Tensor)>> {
    let _guard = tch::no_grad_guard();
    let row = |index: usize| {
        let row =
            tensors[index].f_detach().and_then(|tensor| tensor.f_to_device(Device::Cpu)?.f_contiguous());
        let row = row.map_err(torch)?;
        if shim::is_plain(&row) { Ok((index, row)) } else { Err(without_memory(index)) }
    };
    distinct(tensors).into_iter().map(row).collect()
}

fn without_memory(index: usize) -> Error {
    Error::invalid_argument(format!("tensor {index} has no memory of this machine"))
}

/// Where the elements of a tensor lie: from `begin`, the first element's address, to `end`, behind the last one's.
struct Extent {
    begin: usize,
    end: usize,
    /// Whether the elements between are all the tensor's.
    is_rows: bool,
    /// The steps between elements and the number of these steps, in an order that transposed tensors have in common.
    strides: Vec<(i64, i64)>,
    index: usize,
}

/// Those of all tensors that have elements; one that has all elements of another comes before it.
fn extents(tensors: &[Tensor]) -> Vec<Extent> {
    let extent = |(index, tensor): (usize, &Tensor)| {
        let sides = tensor.size().into_iter().zip(tensor.stride());
        let mut strides: Vec<(i64, i64)> =
            sides.filter(|(side, _)| *side > 1).map(|(side, stride)| (stride, side - 1)).collect();
        strides.sort_unstable();
        let last: i64 = strides.iter().map(|(stride, steps)| stride * steps).sum();
        let begin = tensor.data_ptr() as usize;
        let bytes = (usize::try_from(last).unwrap_or(0) + 1) * tensor.kind().elt_size_in_bytes();
        Extent { begin, end: begin + bytes, is_rows: tensor.is_contiguous(), strides, index }
    };
    let mut extents: Vec<_> =
        tensors.iter().enumerate().filter(|(_, tensor)| tensor.numel() > 0).map(extent).collect();
    extents.sort_by_key(|one| (one.begin, Reverse(one.end), !one.is_rows, one.index));
    extents
}

/// The positions of the tensors, without those all of whose elements another one has.
fn distinct(tensors: &[Tensor]) -> Vec<usize> {
    let (mut kept, mut rows_end): (Vec<Extent>, usize) = (Vec::new(), 0);
    for extent in extents(tensors) {
        let is_same = |other: &&Extent| other.begin == extent.begin && other.end == extent.end;
        let has_all = |other: &Extent| other.strides == extent.strides;
        if extent.end <= rows_end || kept.iter().rev().take_while(is_same).any(has_all) {
            continue;
        }
        if extent.is_rows {
            rows_end = extent.end;
        }
        kept.push(extent);
    }
    // The same order on every rank.
    let mut kept: Vec<usize> = kept.into_iter().map(|extent| extent.index).collect();
    kept.sort_unstable();
    kept
}

/// Of each tensor the first one with which it shares memory, if that is not itself. Tensors whose elements lie between each other's, such as
/// the columns of a matrix, count as sharing.
pub(crate) fn sharing(tensors: &[Tensor]) -> Vec<Option<usize>> {
    let mut shared = vec![None; tensors.len()];
    let extents = extents(tensors);
    let mut rest = &extents[..];
    while let Some(first) = rest.first() {
        let mut end = first.end;
        let overlapping = rest.iter().take_while(|one| {
            let overlaps = one.begin < end;
            end = end.max(one.end);
            overlaps
        });
        let (together, behind) = rest.split_at(overlapping.count());
        let lowest = together.iter().map(|one| one.index).min();
        for one in together.iter().filter(|one| Some(one.index) != lowest) {
            shared[one.index] = lowest;
        }
        rest = behind;
    }
    shared
}

/// The gradients that are there, each in memory of its own, to be changed in place. Backward may leave those of several parameters in one memory,
/// as it does for the terms of a sum: what one of them is multiplied by would change the others, too.
pub(crate) fn own_gradients(parameters: &[Named]) -> Result<Vec<Tensor>> {
    let _guard = tch::no_grad_guard();
    let gradients = parameters.iter().map(|one| (one, one.tensor.grad()));
    let mut gradients: Vec<(&Named, Tensor)> = gradients.filter(|(_, gradient)| gradient.defined()).collect();
    // A sparse one does not lie in one piece of memory.
    let plain: Vec<usize> =
        (0..gradients.len()).filter(|&index| shim::is_plain(&gradients[index].1)).collect();
    let handles: Vec<Tensor> = plain.iter().map(|&index| gradients[index].1.shallow_clone()).collect();
    for (&index, first) in plain.iter().zip(sharing(&handles)) {
        if first.is_some() {
            let (parameter, gradient) = &mut gradients[index];
            let mut own = gradient.f_empty_like().map_err(torch)?;
            own.f_copy_(gradient).map_err(torch)?;
            shim::set_gradient(&parameter.tensor, Some(&own))?;
            *gradient = own;
        }
    }
    Ok(gradients.into_iter().map(|(_, gradient)| gradient).collect())
}

/// All ranks take over `tensors` of rank `root`.
pub(crate) fn from_rank(group: &dyn Communicator, root: Rank, tensors: &[Tensor]) -> Result<()> {
    with_elements(tensors, |parts| broadcast_state_from(group, root, parts))
}

/// Whether `tensors` are the same bits on every rank.
pub(crate) fn identical(group: &dyn Communicator, tensors: &[Tensor]) -> Result<bool> {
    read_elements(tensors, |parts| states_identical(group, parts))
}

/// Handles of all tensors.
pub(crate) fn handles(tensors: &[Named]) -> Vec<Tensor> {
    tensors.iter().map(|one| one.tensor.shallow_clone()).collect()
}

/// An error of libtorch's, without the stack that follows in further lines.
pub(crate) fn torch(error: tch::TchError) -> Error {
    shim::error_of(&error.to_string()).with_source(error)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use phalanx::Rank;
    use tch::Kind;

    use super::*;

    #[test]
    fn of_tensors_that_share_memory_each_element_is_given() {
        let all = Tensor::arange(12, (Kind::Float, Device::Cpu));
        let (head, tail, middle) = (all.narrow(0, 0, 4), all.narrow(0, 8, 4), all.narrow(0, 6, 4));
        let table = all.view([3, 4]);
        // Both end at the ninth element, and have others before.
        let (column, even) = (table.select(1, 0), all.slice(0, 0, 9, 2));
        let handles = |tensors: &[&Tensor]| tensors.iter().map(|one| one.shallow_clone()).collect::<Vec<_>>();
        let of = |tensors: &[&Tensor]| distinct(&handles(tensors));
        // The longer one, whichever comes first; a part that begins elsewhere; the same, transposed.
        assert_eq!(of(&[&head, &all]), [1]);
        assert_eq!(of(&[&all, &head, &middle]), [0]);
        assert_eq!(of(&[&table.tr(), &table]), [1]);
        assert_eq!(of(&[&table.tr(), &table.tr()]), [0]);
        assert_eq!(of(&[&tail, &head]), [0, 1]);
        assert_eq!(of(&[&tail, &middle]), [0, 1]);
        assert_eq!(of(&[&column, &even, &column]), [0, 1]);

        let shares = |tensors: &[&Tensor]| sharing(&handles(tensors));
        assert_eq!(shares(&[&tail, &head, &all.copy()]), [None; 3]);
        assert_eq!(shares(&[&tail, &head, &middle]), [None, None, Some(0)]);
        assert_eq!(shares(&[&head, &all.copy(), &all, &tail]), [None, None, Some(0), Some(0)]);

        let tensors = [head, all.shallow_clone(), tail, middle, column, even];
        for tensors in [&tensors[..2], &tensors[2..4], &tensors[4..]] {
            drop(tch::no_grad(|| all.shallow_clone().fill_(1.0)));
            with_elements(tensors, |parts| {
                parts.iter_mut().for_each(|part| part.bytes.fill(0));
                Ok(())
            })
            .unwrap();
            assert!(tensors.iter().all(|tensor| tensor.abs().sum(Kind::Float).double_value(&[]) == 0.0));
        }
    }

    #[test]
    fn memory_and_devices_are_one_rank_s_and_other_errors_the_program_s() {
        let is_a_peers = |text: &str| {
            let error = torch(tch::TchError::Torch(text.to_owned()));
            error.at(Rank::new(1), "host").is_a_peers(Rank::MAIN)
        };
        assert!(is_a_peers("CUDA out of memory. Tried to allocate 20.00 GiB.\nException raised from malloc"));
        assert!(is_a_peers("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."));
        assert!(is_a_peers("CUDA error: an illegal memory access was encountered"));
        assert!(is_a_peers("std::bad_alloc"));
        assert!(is_a_peers("CUDA driver error: unknown error"));
        assert!(is_a_peers(
            "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"
        ));
        assert!(!is_a_peers("The size of tensor a (2) must match the size of tensor b (3)"));
    }
}
