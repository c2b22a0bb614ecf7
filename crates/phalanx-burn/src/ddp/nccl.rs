//! A [`Ddp`] whose gradients NCCL averages.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use phalanx::join::JoinGroup;
use phalanx::{Error, Result};
use phalanx_nccl::DeviceGroup;

use super::{Averaging, Ddp, DdpOptions};
use crate::parameters::Inventory;

impl<M: Module> Ddp<M> {
    /// Like [`with_options`](Self::with_options), for a model on a CUDA device, whose gradients NCCL averages in buckets of the device's memory, while
    /// backward continues: nothing of them is copied to the process's memory. All ranks call it together. Everything else,
    /// such as comparing the models, broadcasting buffers and a [`SyncBatchNorm`](crate::SyncBatchNorm), goes through `group`'s
    /// [host](DeviceGroup::host).
    ///
    /// ```no_run
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::Device;
    /// # use phalanx_burn::{Ddp, DdpOptions};
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx_nccl::DeviceGroup;
    ///
    /// let group = phalanx::init()?;
    /// let cuda = phalanx_nccl::Device::of_local_rank(&group)?;
    /// let group = DeviceGroup::new(group, &cuda)?;
    /// let device = Device::cuda(cuda.ordinal() as usize).autodiff();
    /// let ddp = Ddp::with_nccl(LinearConfig::new(4, 1).init(&device), &group, DdpOptions::default())?;
    /// # drop(ddp);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A bucket's call is made when the device has computed its gradients, which a thread of this `Ddp`'s waits for; at the end of backward
    /// the program's thread waits for the calls. No other calls may be made on `group` meanwhile. A bucket takes memory in each step, of which
    /// its averages are parts, but in a weighted step new tensors: who keeps a part keeps its bucket, and [`DdpOptions::gradient_as_bucket_view`] has no meaning here.
    ///
    /// The weights of [`backward_weighted`](Self::backward_weighted) go through the host's group. If one rank calls
    /// [`backward`](Self::backward) in such a step, it gets a wrong average, and the others get an error with their next call of that group, or
    /// with its time-out.
    /// [`Compressed`](phalanx::reducer::hooks::Compressed) rounds on the device, and [`PowerSgd`](phalanx::reducer::hooks::PowerSgd) computes products
    /// there, among devices of one model. With [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd) gradients stay where they are after the first
    /// steps, or are averaged within its smaller group; [`average_parameters`](Self::average_parameters) goes through the host.
    ///
    /// In a [`join`](Self::join) ranks that are done make the calls of the others with zeros.
    ///
    /// Hooks of your own are [registered](Self::register_device_hook) as [`DeviceHook`](crate::DeviceHook)s.
    ///
    /// **These are refused**, by name: [`register_comm_hook`](Self::register_comm_hook) with a hook of the processes' memory,
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer), a step inside of a `join` that another `Ddp` has begun,
    /// and elastic jobs, for which there is [`TrainState::with_nccl_on`](crate::TrainState::with_nccl_on). [`with_options`](Self::with_options) has them all, through the processes' memory.
    ///
    /// # Errors
    /// As [`new`](Self::new); if a parameter that is trained is not in the memory of the communicator's device; on every rank also if some ranks average
    /// otherwise. In a world of one nothing is averaged, and nothing is refused but elastic jobs.
    #[doc(alias("nccl", "init_process_group"))]
    pub fn with_nccl(model: M, group: &DeviceGroup, options: DdpOptions) -> Result<Self> {
        let averaging = Averaging::Nccl(group.device().clone());
        Self::averaged(model, JoinGroup::from(group.host()), options, averaging)
    }

    /// An error if ranks that are done would not make NCCL's calls in the `join` that runs. It ends the group: the others wait for this step.
    pub(super) fn check_join(&self) -> Result<()> {
        match self.engine.on_device() {
            Some(nccl) if !self.group.answers(&**nccl) => {
                self.check_on_host("a join that this Ddp has not begun")
            }
            Some(_) | None => Ok(()),
        }
    }

    /// In each group of an elastic job NCCL averages on `cuda` from now on.
    pub(crate) fn enter_on(&mut self, cuda: Option<phalanx_nccl::Device>) {
        self.cuda = cuda;
    }

    /// The device on which NCCL averages in each group of an elastic job.
    pub(crate) fn cuda(&self) -> Option<&phalanx_nccl::Device> {
        self.cuda.as_ref()
    }
}

/// An error if a parameter of `model` that is trained is on another device than the first one of the model, in whose memory the buckets are.
pub(super) fn check_device<M: Module>(model: &M, inventory: &Inventory) -> Result<()> {
    let mut elsewhere = Elsewhere { inventory, found: None };
    model.visit(&mut elsewhere);
    let Some((index, device)) = elsewhere.found else { return Ok(()) };
    let name = inventory.parameters.get(index).map_or("", |parameter| parameter.name.as_str());
    let first = &inventory.device;
    Err(Error::invalid_argument(format!(
        "the parameter `{name}` is on {device:?}, and the model begins on {first:?}: NCCL averages gradients on one device"
    ))
    .with_remedy("put the model on the device of its rank, or average in the memory of the processes, with Ddp::new"))
}

/// Finds the first parameter that is trained and not on the device of the inventory.
struct Elsewhere<'a> {
    inventory: &'a Inventory,
    found: Option<(usize, Device)>,
}

impl ModuleVisitor for Elsewhere<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.inventory.indices.get(&param.id) else { return };
        let device = param.device();
        if self.found.is_none() && device != self.inventory.device {
            self.found = Some((index, device));
        }
    }
}
