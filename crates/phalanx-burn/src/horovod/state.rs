//! Models, optimizers and tensors that go from rank to rank by name.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, Tensor, TensorData};
use phalanx::adapter::copy_of;
use phalanx::{Buffer, Error, Rank, Result};
use phalanx_horovod::{Horovod, Reduction, Tensor as Named};

use crate::alike;
use crate::collectives::refuse_graph;
use crate::constants;
use crate::optimizer::OptimizerState;
use crate::parallel::refuse_units;
use crate::parameters::{self, Inventory, Select};
use crate::state::{Begun, fit};
use crate::tensor_bytes;

/// The most bytes of an optimizer's state.
const MAX_STATE_BYTES: usize = 1 << 38;

/// `model` with the parameters and buffers of rank `root`. All ranks call it, with the same model, before they train, and after the
/// root has loaded a checkpoint.
///
/// # Errors
/// If the ranks' models differ, with the name of the first tensor that does, or the first number of Burn's layers, as in [`Ddp::new`](crate::Ddp::new);
/// if the model has [units](crate::parallel::fsdp::FullySharded),
/// or ranks have different parts of [divided](crate::parallel::tensor) layers; and as a collective.
#[doc(alias = "hvd.broadcast_parameters")]
pub fn broadcast_parameters<M: Module>(hvd: &Horovod, model: M, root: Rank) -> Result<M> {
    check_replicas(hvd, &model, "broadcast.parts", "horovod::broadcast_parameters")?;
    let Inventory { state: names, ties, buffers, constants, .. } = Inventory::of(&model)?;
    if hvd.size() > 1 {
        // A tensor that one rank alone has would be waited for.
        let all = hvd.allgather_object("broadcast.model", &(parameters::in_words(&model), constants))?;
        let (tensors, constants): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        parameters::check_words(&tensors)?;
        constants::check(&constants)?;
    }
    if !buffers.is_empty() {
        // Running state defers the last forward pass's update, which would overwrite the root's.
        drop(model.valid());
    }
    let (mut flying, mut failure) = (Vec::with_capacity(names.len()), None);
    let values = or_leave(hvd, parameters::read(&model, Select::All))?;
    for (index, (parameter, data)) in names.iter().zip(values).enumerate() {
        // One that stands in several places has several names.
        let name = format!("broadcast.{index}.{}", parameter.name);
        let dtype = tensor_bytes::dtype(parameter.dtype)?;
        let tensor = or_leave(hvd, named(data.as_bytes(), &parameter.shape, dtype))?;
        match hvd.broadcast_async(&name, tensor, root) {
            Ok(handle) => flying.push((handle, parameter)),
            // The others wait for the next ones, too.
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(()), Err)?;
    let mut data = Vec::with_capacity(flying.len());
    for (handle, parameter) in flying {
        let tensor = handle.synchronize()?;
        data.push(tensor_bytes::tensor_data(tensor.as_bytes(), &parameter.shape, parameter.dtype));
    }
    Ok(ties.retie(parameters::write(model, Select::All, data)))
}

/// `optimizer` with the state that rank `root`'s has of `model`. All ranks call it.
///
/// Settings, such as betas, decay and momentum, are no part of what Burn saves of an optimizer: the ranks compare what their optimizers do to
/// parameters.
///
/// # Errors
/// If the ranks' models or optimizers differ, in kind or in settings but learning rates, or the ranks name several roots, or one that there is not;
/// if the model has [units](crate::parallel::fsdp::FullySharded), or ranks have different parts of [divided](crate::parallel::tensor) layers, whose
/// states are each rank's own; and as a collective.
#[doc(alias = "hvd.broadcast_optimizer_state")]
pub fn broadcast_optimizer_state<M: Module>(
    hvd: &Horovod,
    optimizer: &ModuleOptimizer,
    model: &M,
    root: Rank,
) -> Result<ModuleOptimizer> {
    check_replicas(hvd, model, "broadcast.optimizer_parts", "horovod::broadcast_optimizer_state")?;
    let Inventory { parameters: trained, state: parameters, .. } = Inventory::of(model)?;
    if hvd.size() > 1 {
        let made = alike::Watch::default().made(optimizer, (model, &trained), hvd.rank());
        let made = or_leave(hvd, made)?;
        let all = hvd.allgather_object("broadcast.optimizer_settings", &(root.get(), made))?;
        let (first_root, first_made) = &all[0];
        if let Some((rank, (other, _))) = all.iter().enumerate().find(|(_, (named, _))| named != first_root) {
            return Err(Error::mismatch(format!(
                "rank 0 called broadcast_optimizer_state with root {first_root}, and rank {rank} with root {other}"
            ))
            .with_peer(Rank::new(rank as u32))
            .with_remedy("all ranks must call with the same root"));
        }
        if let Some(other) = all.iter().position(|(_, made)| !alike::alike(made, first_made)) {
            return Err(alike::differs(Rank::new(other as u32)));
        }
    }
    if root.get() >= hvd.size() {
        return Err(Error::invalid_argument(format!("root {root} is outside a world of {}", hvd.size()))
            .with_remedy(format!("name a rank from 0 to {}", hvd.size() - 1)));
    }
    let own = match hvd.rank() == root {
        true => {
            let state = OptimizerState::of(optimizer, &parameters).and_then(OptimizerState::into_bytes);
            or_leave(hvd, state.and_then(bounded).and_then(|bytes| copy_of(&bytes)))?
        }
        false => Vec::new(),
    };
    // The others do not know how long it is, and bring nothing.
    let all = hvd.allgather("broadcast.optimizer_state", own)?;
    if hvd.rank() == root {
        return Ok(optimizer.clone());
    }
    let state = copy_of(all.as_bytes())
        .map(Bytes::from_bytes_vec)
        .and_then(OptimizerState::from_bytes)
        .and_then(|state| {
            fit::check(optimizer, (model, &parameters), &state.index(), Begun::Unknown)?;
            state.load(optimizer, &parameters)
        });
    or_leave(hvd, state)
}

/// Combines tensors of all ranks under a name; every rank gets the result, on the tensor's device. Gradients do not flow through it, as they do through
/// Horovod's: for the value of a tensor that is part of a graph, as in a log, call `detach` first, and for that of a parameter
/// `set_require_grad(false)`.
///
/// # Errors
/// As [`Horovod::allreduce`], and if the tensor is part of a graph, or on a device that this build does not know.
#[doc(alias = "hvd.allreduce")]
pub fn allreduce<const D: usize>(
    hvd: &Horovod,
    name: &str,
    tensor: Tensor<D>,
    reduction: impl Into<Reduction>,
) -> Result<Tensor<D>> {
    let tell = |error: &Error| hvd.refuse(name, &error.full_cause());
    refuse_graph(&tensor, "horovod::allreduce").inspect_err(tell)?;
    let (shape, device, dtype) = (tensor.dims(), tensor.device(), tensor.dtype());
    let named_dtype = tensor_bytes::dtype(dtype).inspect_err(tell)?;
    let own = tensor_bytes::with_bytes(tensor, |tensor| named(tensor.bytes, &shape, named_dtype));
    let own = or_leave(hvd, own.and_then(|named| named))?;
    let combined = hvd.allreduce(name, own, reduction)?;
    let data: TensorData = tensor_bytes::tensor_data(combined.as_bytes(), &shape, dtype);
    Ok(Tensor::from_data(data, (&device, dtype)))
}

/// An error, on every rank, if the ranks' models are no replicas of each other: `what` would give all of them one rank's part. Models without
/// parts are not compared. All ranks call it together, under a `name` of its own.
pub(super) fn check_replicas<M: Module>(hvd: &Horovod, model: &M, name: &str, what: &str) -> Result<()> {
    refuse_units(model, what)?;
    let inventory = Inventory::of(model)?;
    if !inventory.is_divided() || hvd.size() == 1 {
        return Ok(());
    }
    let own: Vec<String> = inventory.compared().into_iter().map(|tensor| tensor.name).collect();
    let all = hvd.allgather_object(name, &own)?;
    let other = all.iter().enumerate().find_map(|(rank, names)| {
        let place = names.iter().zip(&all[0]).position(|(one, first)| one != first)?;
        Some((rank, &names[place], &all[0][place]))
    });
    other.map_or(Ok(()), |(rank, name, first)| {
        Err(Error::mismatch(format!(
            "rank 0 has `{first}`, and rank {rank} `{name}`: {what} takes all ranks for replicas of one model"
        ))
        .with_peer(Rank::new(rank as u32))
        .with_remedy(
            "make the Horovod of the ranks that have the same part, such as those of mesh.group(\"data\")",
        ))
    })
}

/// `state`, unless the ranks would not accept it.
fn bounded(state: Bytes) -> Result<Bytes> {
    match state.len() <= MAX_STATE_BYTES {
        true => Ok(state),
        false => Err(Error::invalid_argument(format!("the optimizer's state takes {} bytes", state.len()))),
    }
}

/// What this rank has `read`. An error ends the job: the other ranks wait for this one.
fn or_leave<T>(hvd: &Horovod, read: Result<T>) -> Result<T> {
    read.inspect_err(|error| hvd.leave_with(error))
}

/// A copy.
fn named(bytes: &[u8], shape: &[usize], dtype: phalanx::DType) -> Result<Named> {
    let mut buffer = Buffer::try_zeroed(dtype, shape.iter().product())?;
    let target = buffer.as_bytes_mut();
    if target.len() != bytes.len() {
        return Err(Error::invalid_argument(format!(
            "{} bytes do not have the shape {shape:?}",
            bytes.len()
        )));
    }
    target.copy_from_slice(bytes);
    Named::new(shape, buffer)
}
