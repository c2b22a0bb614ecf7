//! Data parallelism in one process without gathering: every replica has its own loss.

use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use phalanx::{Error, Result};

use super::replicas::Replicas;
use super::{Scatter, Transfers};
use crate::gradients::{Synced, SyncedGradients};
use crate::read_back;

/// Towers: each replica computes the loss of its part of the batch and runs backward from it, and the gradients are
/// averaged on the main device.
///
/// Unlike [`DataParallel`](crate::DataParallel) it gathers no outputs, and each replica does all of its work without an
/// interruption. Parameters and gradients still go through the main device in every step.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use phalanx_burn::TowerGradients;
///
/// let device = Device::flex().autodiff();
/// let mut towers = TowerGradients::new(LinearConfig::new(4, 1).init(&device), vec![device.clone(); 2])?;
/// let mut optimizer = SgdConfig::new().init();
/// let x = Tensor::<2>::random([64, 4], Distribution::Default, &device);
/// let y = x.clone().sum_dim(1);
///
/// let (loss, gradients) =
///     towers.backward((x, y), |replica, (x, y)| (replica.forward(x) - y).powi_scalar(2).mean())?;
/// towers.step(&mut optimizer, 0.1, gradients)?;
/// # assert!(loss.is_finite());
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Source: A. Krizhevsky, *One weird trick for parallelizing convolutional neural networks*, 2014, section 3.
pub struct TowerGradients<M> {
    replicas: Replicas<M>,
}

impl<M: Module> TowerGradients<M> {
    /// Replicates `module` over `devices`, of which the first is the main one.
    ///
    /// # Errors
    /// If there is no device, or one is without autodiff; if the module is a part of a larger one: it has
    /// [units](crate::parallel::fsdp::FullySharded), or [divided](crate::parallel::tensor) layers.
    pub fn new(module: M, devices: Vec<Device>) -> Result<Self> {
        Ok(Self { replicas: Replicas::new(module, devices)? })
    }

    /// As [`DataParallel::with_nccl`](crate::DataParallel::with_nccl).
    ///
    /// # Errors
    /// As [`DataParallel::with_nccl`](crate::DataParallel::with_nccl).
    #[cfg(feature = "nccl")]
    pub fn with_nccl(
        module: M,
        devices: Vec<Device>,
        groups: Vec<phalanx_nccl::DeviceGroup>,
    ) -> Result<Self> {
        Ok(Self { replicas: Replicas::new(module, devices)?.over(groups)? })
    }

    /// As [`DataParallel::with_scope`](crate::DataParallel::with_scope).
    #[must_use]
    pub fn with_scope(mut self, scope: impl Fn(usize, &mut dyn FnMut()) + Send + Sync + 'static) -> Self {
        self.replicas.set_scope(scope);
        self
    }

    /// Runs `loss`, a mean over samples, forward and backward on each replica with its part of `input`. Returns the
    /// mean over all samples, and its gradients, also if the parts have different sizes.
    ///
    /// # Errors
    /// If `input` has no samples, or a graph, as [`DataParallel::forward`](crate::DataParallel::forward); if a loss does not depend on any parameter that
    /// needs a gradient, or the system refuses a thread; over NCCL also if parameters or inputs cannot be copied, or it cannot add the gradients up.
    pub fn backward<I: Scatter>(
        &mut self,
        input: I,
        loss: impl Fn(&M, I) -> Tensor<1> + Sync,
    ) -> Result<(f64, SyncedGradients)> {
        let samples = input.samples()? as f64;
        let parts = self.replicas.scatter(input)?.into_iter().map(|(replica, input)| {
            let share = input.samples()? as f64 / samples;
            Ok((replica, (input, share)))
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let parts = self.replicas.run(parts, |replica, (input, share)| {
            let loss = loss(replica, input) * share;
            let gradients = loss.is_tracked().then(|| GradientsParams::from_grads(loss.backward(), replica));
            (read_back::data(loss), gradients)
        })?;
        self.replicas.settle();
        let mut mean = 0.0;
        let mut gradients = Vec::with_capacity(parts.len());
        for (replica, (loss, own)) in parts {
            mean += loss?.iter::<f64>().sum::<f64>();
            gradients.push(own.map(|own| (replica, own)));
        }
        let Some(gradients) = gradients.into_iter().collect() else {
            return Err(Error::invalid_argument(
                "the loss does not depend on any parameter that needs a gradient",
            )
            .with_remedy("compute it from the model that the closure gets"));
        };
        Ok((mean, self.replicas.reduce(GradientsParams::new(), gradients)?))
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

    /// The bytes moved since the beginning, and the time; nothing was gathered.
    pub fn transfers(&self) -> Transfers {
        self.replicas.transfers
    }
}

impl<M> fmt::Debug for TowerGradients<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TowerGradients").field("replicas", &self.replicas).finish_non_exhaustive()
    }
}
