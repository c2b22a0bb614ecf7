//! Gradients that are equal on all replicas, and the reducer's averages in that form.
//!
//! They are a type of their own, so that a step with the gradients of `loss.backward()` does not compile: such a step would not train, or replicas
//! would drift apart, and no error would say so. The token says of which model they are: those of two models have the same type.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};
use phalanx::reducer::Reducer;
use phalanx::{BufferPart, Error, Result};

use crate::{clip, view};

/// Gradients that are equal on all replicas, as [`Ddp::backward`](crate::Ddp::backward) returns them: a step takes only
/// these.
///
/// They can be read and changed as Burn's [`GradientsParams`], to clip or scale them. Every rank must make the same
/// changes, or replicas drift apart.
///
/// The gradients of `loss.backward()` are this rank's alone, or missing: hooks pass them to the reducer, and leave none
/// in Burn's container. A step with them would not train, and does not compile:
///
/// ```compile_fail,E0277
/// # use burn::{nn::Linear, optim::{GradientsParams, ModuleOptimizer}, tensor::Tensor};
/// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, loss: Tensor<1>)
/// # -> phalanx::Result<()> {
/// let gradients = GradientsParams::from_grads(loss.backward(), ddp.model());
/// ddp.step(optimizer, 1e-3, gradients)?;
/// # Ok(())
/// # }
/// ```
///
/// This does:
///
/// ```
/// # use burn::{nn::Linear, optim::{GradientsParams, ModuleOptimizer}, tensor::Tensor};
/// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, loss: Tensor<1>)
/// # -> phalanx::Result<()> {
/// let gradients = ddp.backward(&loss)?;
/// ddp.step(optimizer, 1e-3, gradients)?;
/// # Ok(())
/// # }
/// ```
pub struct SyncedGradients {
    gradients: GradientsParams,
    model: ModelToken,
    /// By what clipping has multiplied them. The ranks compare it in the step.
    clipped: f64,
    /// Whether this rank has those of some parameters only.
    is_sharded: bool,
}

impl SyncedGradients {
    pub(crate) fn new(gradients: GradientsParams, model: &ModelToken) -> Self {
        Self { gradients, model: model.clone(), clipped: 1.0, is_sharded: false }
    }

    /// The same, of which this rank has those of some parameters only, if they are `sharded`.
    pub(crate) fn sharded(self, sharded: bool) -> Self {
        Self { is_sharded: sharded, ..self }
    }

    /// By what clipping has multiplied them.
    pub(crate) fn clip_factor(&self) -> f64 {
        self.clipped
    }

    /// The gradients, if they are those of the model with this token.
    pub(crate) fn of(self, model: &ModelToken) -> Result<GradientsParams> {
        if self.model.is(model) {
            return Ok(self.gradients);
        }
        let cause = "the gradients of a step are those of another replicated model, or of this one before it was loaded, \
                     went to another group or sharded its gradients";
        let remedy =
            "step with what `backward` of the same Ddp (or DataParallel, TowerGradients) gave since then";
        Err(Error::invalid_argument(cause).with_remedy(remedy))
    }
}

impl Deref for SyncedGradients {
    type Target = GradientsParams;

    fn deref(&self) -> &GradientsParams {
        &self.gradients
    }
}

impl DerefMut for SyncedGradients {
    fn deref_mut(&mut self) -> &mut GradientsParams {
        &mut self.gradients
    }
}

impl fmt::Debug for SyncedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SyncedGradients({} tensors)", self.gradients.len())
    }
}

/// Distinguishes the gradients of one replicated model from those of another in the same program, and from its own
/// gradients before a change that makes them invalid: then it gets a new token.
#[derive(Clone, Default)]
pub(crate) struct ModelToken(Arc<()>);

impl ModelToken {
    /// Whether both are of the same model, between the same changes.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether there is a clone of it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::SyncedGradients {}
    impl Sealed for super::GradientsParams {}
}

/// The gradients that `clip_grad_norm` scales: Burn's, or [`SyncedGradients`], which keep by how much. The ranks compare that in the step.
pub trait Clip: sealed::Sealed {
    /// The gradients.
    #[doc(hidden)]
    fn parameters(&mut self) -> &mut GradientsParams;

    /// They were multiplied by this.
    #[doc(hidden)]
    fn keep(&mut self, factor: f64);

    /// Whether this rank has those of some parameters only.
    #[doc(hidden)]
    fn is_sharded(&self) -> bool;
}

impl Clip for GradientsParams {
    fn parameters(&mut self) -> &mut GradientsParams {
        self
    }

    fn keep(&mut self, _factor: f64) {}

    fn is_sharded(&self) -> bool {
        false
    }
}

impl Clip for SyncedGradients {
    fn parameters(&mut self) -> &mut GradientsParams {
        &mut self.gradients
    }

    fn keep(&mut self, factor: f64) {
        self.clipped *= factor;
    }

    fn is_sharded(&self) -> bool {
        self.is_sharded
    }
}

/// The argument of a step: only [`SyncedGradients`]. It is a trait only so that the compiler can say what to write.
#[diagnostic::on_unimplemented(
    message = "a step takes what `ddp.backward(&loss)?` gives, and `{Self}` is something else",
    label = "these gradients are not those of all ranks",
    note = "write `let gradients = ddp.backward(&loss)?;` in place of `loss.backward()`: it averages over all ranks"
)]
pub trait Synced: sealed::Sealed {
    /// The gradients.
    fn synced(self) -> SyncedGradients;
}

impl Synced for SyncedGradients {
    fn synced(self) -> SyncedGradients {
        self
    }
}

/// How averages become tensors.
#[derive(Clone, Copy)]
pub(crate) struct Handover {
    /// The factor by which they are multiplied.
    pub scale: f64,
    /// Whether they take the buckets' memory with them, and free it. Otherwise the buckets use it again.
    pub view: bool,
}

/// Collects the averages by the ids of `model`'s parameters, whose indices in the reducer are `indices`.
pub(crate) fn averages<M: Module>(
    model: &M,
    reducer: &mut Reducer,
    indices: &HashMap<ParamId, usize>,
    handover: Handover,
) -> Result<GradientsParams> {
    let parts = if handover.view { reducer.take_gradients()? } else { reducer.lend_gradients()? };
    let mut averages = Averages { parts, indices, scale: handover.scale, gradients: GradientsParams::new() };
    model.visit(&mut averages);
    Ok(averages.gradients)
}

struct Averages<'a> {
    parts: Vec<Option<BufferPart>>,
    indices: &'a HashMap<ParamId, usize>,
    scale: f64,
    gradients: GradientsParams,
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(&param.id) else { return };
        // A parameter without a gradient on any rank, or used before in the model, has none here.
        let Some(part) = self.parts.get_mut(index).and_then(Option::take) else { return };
        let dtype = param.dtype();
        let data = view::tensor_data(part, param.shape().as_slice(), dtype);
        let average = Tensor::<D>::from_data(data, (&param.device().inner(), dtype));
        let average = match self.scale == 1.0 {
            true => average,
            false => clip::wide(average, |average| average * self.scale),
        };
        self.gradients.register(param.id, average);
    }
}

/// An error if `gradients`, of a backward pass from a [hooked](crate::hook::hooked) copy of `model`, have some for the parameters of `model`
/// itself, as of a penalty on `Ddp::model`: they are in no bucket, and would be missing in the averages.
pub(crate) fn check_hooked<M: Module>(model: &M, gradients: &Gradients) -> Result<()> {
    Leaves::of(model).check(gradients)
}

/// The parameters of a model, as they are in the graph of a backward pass.
#[derive(Default)]
pub(crate) struct Leaves {
    path: Vec<String>,
    /// By name: whether gradients have one for it.
    found: Vec<(String, HasGradient)>,
}

type HasGradient = Box<dyn Fn(&Gradients) -> bool + Send + Sync>;

impl Leaves {
    /// The parameters of `model` that need a gradient. As long as this exists, no optimizer changes them in place.
    pub fn of<M: Module>(model: &M) -> Self {
        let mut leaves = Self::default();
        model.visit(&mut leaves);
        leaves
    }

    /// The error of [`check_hooked`].
    pub fn check(&self, gradients: &Gradients) -> Result<()> {
        let Some((name, _)) = self.found.iter().find(|(_, has_gradient)| has_gradient(gradients)) else {
            return Ok(());
        };
        Err(Error::invalid_argument(format!(
            "the loss depends on the parameter `{name}` past the model that the closure of `forward` gets: that part of its gradient would be \
             missing in the average"
        ))
        .with_remedy(
            "compute all of the loss in the closure, a penalty on parameters too; or detach() what is to have no gradient",
        ))
    }
}

impl ModuleVisitor for Leaves {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        if tensor.is_require_grad() {
            let has_gradient = move |gradients: &Gradients| tensor.grad(gradients).is_some();
            self.found.push((self.path.join("."), Box::new(has_gradient)));
        }
    }
}
