//! Where a backward pass delivers gradients: to the reducer, or nowhere in a world of one.

use std::sync::{Arc, Weak};
use std::time::Instant;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Gradients, Tensor};
use phalanx::adapter::{Elsewhere, JoinGroup};
use phalanx::reducer::{ParameterSpec, Reducer, verify_state_on};
use phalanx::trace::Track;
use phalanx::{Caller, Communicator, Error, ProcessGroup, Result, WorldSize};

use super::DdpOptions;
use crate::device;
#[cfg(feature = "nccl")]
use crate::nccl;
use crate::parameters::{Inventory, Parameter};
use crate::sink::{Delivery, Pass, Sink};
use crate::tensor_bytes;

/// Averages the gradients of a model. A world of one needs neither hooks nor a reducer.
pub(crate) enum Engine<M> {
    Alone {
        held: Option<GradientsAccumulator<M>>,
    },
    Together {
        sink: Arc<Sink>,
        passes: Vec<Weak<Pass>>,
        /// What averages gradients by NCCL.
        #[cfg(feature = "nccl")]
        on_device: Option<Arc<nccl::OnDevice>>,
    },
}

/// Where gradients are averaged.
#[derive(Clone, Debug)]
pub(crate) enum Averaging {
    /// In the memory of the processes, by their group.
    Host,
    /// In the memory of the device, by NCCL.
    #[cfg(feature = "nccl")]
    Nccl(phalanx_nccl::Communicator),
}

impl<M> Engine<M> {
    /// For a model in `group`; the ranks compare their models.
    pub fn new(
        inventory: &Inventory,
        group: &JoinGroup,
        options: &DdpOptions,
        averaging: &Averaging,
    ) -> Result<Self> {
        if group.world_size() == WorldSize::ONE {
            return Ok(Self::Alone { held: None });
        }
        let kind = device::kind_of(&inventory.device)?;
        // To give all ranks rank 0's buffers is a call of all of them.
        let broadcast = || ("broadcast_buffers", options.broadcast_buffers.to_string());
        let mut alike: Vec<(&str, String)> = Vec::from_iter((!inventory.buffers.is_empty()).then(broadcast));
        alike.extend(inventory.constants.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let tensors = specs(&inventory.compared())?;
        let same = verify_state_on(&group.in_call(Caller::DdpNew), kind, tensors, &alike);
        same.map_err(|error| match inventory.is_divided() && error.is_mismatch() {
            true => error.with_remedy(
                "build the same model on every rank; ranks that divide layers among themselves are no replicas of each other: give Ddp the \
                 group of those that have the same part, such as mesh.group(\"data\")",
            ),
            false => error,
        })?;
        let parameters = specs(&inventory.parameters)?;
        let options = options.reducer.clone();
        match averaging {
            Averaging::Host => Ok(Self::Together {
                sink: Arc::new(Sink::new(Reducer::new(Arc::new(group.clone()), parameters, options)?)),
                passes: Vec::new(),
                #[cfg(feature = "nccl")]
                on_device: None,
            }),
            #[cfg(feature = "nccl")]
            Averaging::Nccl(communicator) => {
                let (on_device, reducer) =
                    nccl::OnDevice::new(communicator, &inventory.device, group, parameters, options)?;
                // NCCL connects ranks in the first call, and not in the first backward pass.
                communicator.barrier()?;
                let sink = Arc::new(Sink::on_device(reducer, on_device.clone()));
                Ok(Self::Together { sink, passes: Vec::new(), on_device: Some(on_device) })
            }
        }
    }

    /// What averages gradients by NCCL.
    #[cfg(feature = "nccl")]
    pub fn on_device(&self) -> Option<&Arc<nccl::OnDevice>> {
        match self {
            Self::Alone { .. } => None,
            Self::Together { on_device, .. } => on_device.as_ref(),
        }
    }

    /// What makes the others' calls of NCCL when this rank has no data left.
    #[cfg_attr(not(feature = "nccl"), allow(clippy::unused_self))]
    pub fn elsewhere(&self) -> Option<Arc<dyn Elsewhere>> {
        #[cfg(feature = "nccl")]
        if let Some(on_device) = self.on_device() {
            return Some(on_device.clone());
        }
        None
    }

    /// What averages the gradients, for people.
    pub fn averaged_by(&self) -> &'static str {
        #[cfg(feature = "nccl")]
        if self.on_device().is_some() {
            return "NCCL";
        }
        match self {
            Self::Alone { .. } => "nothing",
            Self::Together { .. } => "the group",
        }
    }

    /// NCCL connects the ranks of a group to which this has [moved](Self::move_to). All ranks call it together.
    #[cfg_attr(not(feature = "nccl"), allow(clippy::unused_self, clippy::unnecessary_wraps))]
    pub fn connect(&self) -> Result<()> {
        #[cfg(feature = "nccl")]
        if let Some(on_device) = self.on_device() {
            return on_device.nccl().connect().map(drop);
        }
        Ok(())
    }

    /// The ranks of `group` average from now on, by NCCL too.
    #[cfg_attr(not(feature = "nccl"), allow(clippy::unused_self))]
    pub fn move_to(&self, group: &ProcessGroup) {
        #[cfg(feature = "nccl")]
        if let Some(on_device) = self.on_device() {
            on_device.move_to(group);
        }
        let _ = group;
    }

    /// An error if `call` cannot be made because NCCL averages the gradients.
    #[cfg_attr(not(feature = "nccl"), allow(clippy::unused_self, clippy::unnecessary_wraps))]
    pub fn check_on_host(&self, call: &str) -> Result<()> {
        #[cfg(feature = "nccl")]
        if self.on_device().is_some() {
            return Err(Error::invalid_argument(format!(
                "{call}: NCCL averages this model's gradients, in the memory of the device"
            ))
            .with_remedy("do without it, or average in the memory of the processes, with Ddp::new"));
        }
        let _ = call;
        Ok(())
    }

    /// The receiver of gradients; none in a world of one.
    pub fn sink(&self) -> Option<&Sink> {
        match self {
            Self::Alone { .. } => None,
            Self::Together { sink, .. } => Some(sink),
        }
    }

    /// An error if backward cannot run from `loss`. It ends the group: the others may wait for this rank's gradients.
    pub(super) fn check_tracked<const D: usize>(&self, loss: &Tensor<D>) -> Result<()> {
        if loss.is_tracked() {
            return Ok(());
        }
        let error =
            Error::invalid_argument("the loss does not depend on any parameter that needs a gradient")
                .with_remedy("compute it in Ddp::forward, from the model that the closure gets");
        match self.sink() {
            Some(sink) => sink.call(|_| Err(error)),
            None => Err(error),
        }
    }
}

pub(super) fn specs(parameters: &[Parameter]) -> Result<Vec<ParameterSpec>> {
    parameters.iter().map(spec).collect()
}

fn spec(parameter: &Parameter) -> Result<ParameterSpec> {
    Ok(ParameterSpec::new(
        parameter.name.as_str(),
        parameter.shape.as_slice(),
        tensor_bytes::dtype_of(&parameter.name, parameter.dtype)?,
    ))
}

/// How gradients reach the reducer: hooks of several passes may report one parameter several times, and only the end of
/// backward tells when it is complete.
pub(super) fn delivery(passes: &mut Vec<Weak<Pass>>) -> Result<Delivery> {
    Ok(if live(passes)? > 1 { Delivery::Hold } else { Delivery::Now })
}

/// The number of forward passes that can still run backward.
pub(super) fn live(passes: &mut Vec<Weak<Pass>>) -> Result<usize> {
    passes.retain(|pass| pass.strong_count() > 0);
    if passes.is_empty() {
        let cause = "the loss was not computed in Ddp::forward, or its forward pass has run backward already";
        return Err(Error::invalid_argument(cause).with_remedy(
            "let loss = ddp.forward(|model| ...)?; the model that Ddp::model gives reports nothing; several losses \
             of one forward pass: add up and run backward once",
        ));
    }
    Ok(passes.len())
}

pub(super) fn alone<M: Module, const D: usize>(
    group: &dyn Communicator,
    model: &M,
    loss: &Tensor<D>,
) -> GradientsParams {
    GradientsParams::from_grads(traced(group, loss), model)
}

/// Runs backward, and records the time; where gradients are averaged, the reducer records it.
pub(super) fn traced<const D: usize>(group: &dyn Communicator, loss: &Tensor<D>) -> Gradients {
    let start = Instant::now();
    let gradients = loss.backward();
    group.trace().complete(Track::Backward, "backward", start, Instant::now(), &[]);
    gradients
}
