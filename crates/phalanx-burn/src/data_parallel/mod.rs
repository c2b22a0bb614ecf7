//! Data parallelism in one process: one model, several devices, no groups.

#[cfg(feature = "nccl")]
mod links;
mod replicas;
mod scatter;
mod towers;
mod transfers;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Dispatch;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use phalanx::{Error, Result};

pub(crate) use self::replicas::refuse_several;
use self::replicas::{Replica, Replicas};
pub use self::scatter::{Destination, Scatter};
pub use self::towers::TowerGradients;
pub use self::transfers::{Transfer, Transfers};
use crate::gradients::{Synced, SyncedGradients};
use crate::hook::{GradientHook, Visit};

/// PyTorch's `DataParallel`: in each step the batch is scattered over devices, the model is copied to each, and the
/// outputs are gathered on the main device, where the loss is computed and the optimizer runs.
///
/// It needs no launcher and no group. It is meant for programs that cannot become several processes, and for
/// comparison. [`Ddp`](crate::Ddp) trains the same model faster: it moves only gradients, overlaps that with backward,
/// and has no device that does more than the others. In each step `DataParallel` moves, from or to the main device,
///
/// | | bytes, with n devices |
/// |---|---|
/// | scatter | (n-1)/n of the inputs |
/// | replicate | n-1 times the parameters |
/// | gather | (n-1)/n of the outputs, and as much of their gradients back |
/// | reduce | n-1 times the gradients |
///
/// one after the other, without overlap. [`transfers`](Self::transfers) returns the bytes and the time of each.
/// The main device also holds all outputs, the optimizer's state and one more set of gradients.
///
/// [`TowerGradients`] gathers no outputs: each replica computes its own loss.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use phalanx_burn::DataParallel;
///
/// let device = Device::flex().autodiff();
/// let mut parallel = DataParallel::new(LinearConfig::new(4, 1).init(&device), vec![device.clone(); 2])?;
/// let mut optimizer = SgdConfig::new().init();
/// let x = Tensor::<2>::random([64, 4], Distribution::Default, &device);
/// let y = x.clone().sum_dim(1);
///
/// let output = parallel.forward(x, |replica, x| replica.forward(x))?;
/// let loss = (output - y).powi_scalar(2).mean();
/// let gradients = parallel.backward(&loss)?;
/// parallel.step(&mut optimizer, 0.1, gradients)?;
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Copies go through the host's memory; with `with_nccl`, of the feature `nccl`, they go from device to device. If the same device is listed several times, such as the one Flex device, there
/// are several replicas with their own memory, each in a thread. Running statistics of the replicas, such as those of
/// batch norm, are averaged, as Burn does for threads. A [`SyncBatchNorm`](crate::SyncBatchNorm), a [`TensorGroup`](crate::parallel::tensor::TensorGroup)
/// and an [`all_gather`](crate::Collectives::all_gather) with gradients, over several ranks, are refused in one of several replicas: they end their group
/// with an error that says so.
///
/// Source: the technique as PyTorch documents it for `torch.nn.DataParallel`.
#[doc(alias = "nn.DataParallel")]
pub struct DataParallel<M, const D: usize> {
    replicas: Replicas<M>,
    /// That of the last forward pass, until its backward pass.
    pending: Option<Pending<M, D>>,
    /// The number of forward passes.
    passes: u64,
    /// The first of them to whose output the last backward pass came.
    first: Arc<AtomicU64>,
}

/// What a forward pass keeps for its backward pass.
struct Pending<M, const D: usize> {
    /// A leaf of the graph of the loss.
    gathered: Tensor<D>,
    parts: Vec<(Replica<M>, Tensor<D>)>,
}

impl<M: Module, const D: usize> DataParallel<M, D> {
    /// Replicates `module` over `devices`; the first is the main one. `D` is the number of dimensions of the output.
    ///
    /// # Errors
    /// If there is no device, or one is without autodiff; if the module is a part of a larger one: it has
    /// [units](crate::parallel::fsdp::FullySharded), or [divided](crate::parallel::tensor) layers.
    pub fn new(module: M, devices: Vec<Device>) -> Result<Self> {
        Ok(Self::of(Replicas::new(module, devices)?))
    }

    fn of(replicas: Replicas<M>) -> Self {
        Self { replicas, pending: None, passes: 0, first: Arc::default() }
    }

    /// As [`new`](Self::new), for CUDA devices: NCCL broadcasts the parameters from the main device's memory, and adds the gradients up there. Inputs,
    /// outputs and their gradients, and tensors of the model that are not of floats, are copied from device to device by the driver (`cuMemcpyPeerAsync`),
    /// directly where the devices reach each other. An input that is not on the main device goes through the host's memory, and so does an output
    /// that its replica has left on another device than its own. `groups` are those of
    /// [`DeviceGroup::of_devices`](phalanx_nccl::DeviceGroup::of_devices), one for each of the devices, and nothing else uses them meanwhile.
    ///
    /// All devices take part in a step whose batch has parts for two of them or more. The time-out of the groups' communicators limits each
    /// transfer. After an error of NCCL's or of a device later steps of several devices fail, and the model is as it was.
    ///
    /// ```no_run
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::Device;
    /// # use phalanx_burn::DataParallel;
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx_nccl::DeviceGroup;
    ///
    /// let cuda = phalanx_nccl::Device::all()?;
    /// let devices: Vec<_> = (0..cuda.len()).map(|number| Device::cuda(number).autodiff()).collect();
    /// let model = LinearConfig::new(4, 1).init(&devices[0]);
    /// let parallel = DataParallel::<_, 2>::with_nccl(model, devices, DeviceGroup::of_devices(&cuda)?)?;
    /// # drop(parallel);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new); if there are other groups than devices, or a group's device is not the one of its place; if copies of a part of
    /// the model share tensors with it, as those of a batch norm share its running statistics.
    #[cfg(feature = "nccl")]
    pub fn with_nccl(
        module: M,
        devices: Vec<Device>,
        groups: Vec<phalanx_nccl::DeviceGroup>,
    ) -> Result<Self> {
        Ok(Self::of(Replicas::new(module, devices)?.over(groups)?))
    }

    /// Calls `scope` around the work of each replica, in that replica's thread, with the replica's number: for example
    /// to pin the thread, or to attribute its memory.
    #[must_use]
    pub fn with_scope(mut self, scope: impl Fn(usize, &mut dyn FnMut()) + Send + Sync + 'static) -> Self {
        self.replicas.set_scope(scope);
        self
    }

    /// Runs `pass` on each replica with its part of `input`, in parallel, and returns the outputs of all samples, in
    /// order.
    ///
    /// # Errors
    /// If `input` has no samples; if it has a graph: gradients do not come back to it, and layers that compute it would not be trained. If the system
    /// refuses a thread; over NCCL also if parameters, inputs or outputs cannot be copied.
    pub fn forward<I: Scatter>(
        &mut self,
        input: I,
        pass: impl Fn(&M, I) -> Tensor<D> + Sync,
    ) -> Result<Tensor<D>> {
        self.pending = None;
        let parts = self.replicas.scatter(input)?;
        let parts = self.replicas.run(parts, |replica, input| pass(replica, input))?;
        let outputs = parts.iter().map(|(_, output)| output.clone().inner()).collect();
        let gathered = self.replicas.gather(outputs)?.require_grad();
        self.replicas.settle();
        self.passes += 1;
        let visit = Visit { pass: self.passes, first: self.first.clone() };
        let output = Dispatch::visited(gathered.clone().into_dispatch(), visit);
        self.pending = Some(Pending { gathered, parts });
        Ok(Tensor::from_dispatch(output))
    }

    /// Runs backward on all replicas from `loss`, which was computed from the result of [`forward`](Self::forward), and
    /// returns the sum of their gradients, on the main device.
    ///
    /// The loss must be one number of rank 1, as Burn's losses are: reshape it if it has another rank.
    ///
    /// # Errors
    /// If there was no forward pass before, if `loss` does not depend on its output, or also on that of an earlier one, or the output not on a
    /// parameter that needs a gradient, or if the system refuses a thread; over NCCL also if it cannot add the gradients up, or those of outputs cannot be copied.
    pub fn backward(&mut self, loss: &Tensor<1>) -> Result<SyncedGradients> {
        let Some(Pending { gathered, parts }) = self.pending.take() else {
            return Err(Error::invalid_argument("there was no forward pass to run backward from")
                .with_remedy("call DataParallel::forward before each backward"));
        };
        if parts.iter().any(|(_, output)| !output.is_tracked()) {
            return Err(Error::invalid_argument(
                "the output of the forward pass does not depend on any parameter that needs a gradient",
            )
            .with_remedy("compute it from the model that the closure gets"));
        }
        self.first.store(u64::MAX, Ordering::Relaxed);
        let gradient = loss.is_tracked().then(|| {
            let mut gradients = loss.backward();
            gathered.grad_remove(&mut gradients).map(|gradient| (gradient, gradients))
        });
        if self.first.load(Ordering::Relaxed) < self.passes {
            return Err(Error::invalid_argument(
                "the loss depends on the output of an earlier forward pass, whose replicas are gone: its gradient would be lost",
            )
            .with_remedy("give both inputs to one DataParallel::forward, as a pair; or detach() the earlier output"));
        }
        let Some((gradient, gradients)) = gradient.flatten() else {
            return Err(Error::invalid_argument(
                "the loss does not depend on the output of the forward pass",
            )
            .with_remedy("compute it from what DataParallel::forward returned"));
        };
        let parts = self.replicas.return_parts(parts, gradient)?;
        let parts = self.replicas.run(parts, |replica, (output, gradient): (Tensor<D>, Tensor<D>)| {
            // The chain rule: the gradient of this product is that of the output, times `gradient`.
            GradientsParams::from_grads((output * gradient).sum().backward(), replica)
        })?;
        // The gradients that the loss has for the parameters directly, such as those of a penalty on their size.
        let own = GradientsParams::from_grads(gradients, self.replicas.model());
        self.replicas.reduce(own, parts)
    }

    /// Lets `optimizer` change the model by `gradients` from [`backward`](Self::backward).
    ///
    /// # Errors
    /// If they are gradients of another model.
    pub fn step(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        self.pending = None;
        self.replicas.step(optimizer, learning_rate.into(), gradients.synced())
    }

    /// The model on the main device.
    pub fn model(&self) -> &M {
        self.replicas.model()
    }

    /// Returns the model itself.
    pub fn into_model(self) -> M {
        self.replicas.into_model()
    }

    /// The bytes moved since the beginning, and the time.
    pub fn transfers(&self) -> Transfers {
        self.replicas.transfers
    }
}

impl<M, const D: usize> fmt::Debug for DataParallel<M, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallel").field("replicas", &self.replicas).finish_non_exhaustive()
    }
}
