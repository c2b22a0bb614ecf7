//! A [`TrainState`] in an elastic job: its steps, and its way from group to group.

use burn::module::Module;
use burn::tensor::Tensor;
use phalanx::checkpoint::training;
use phalanx::elastic::{Context, Parts, State, Step};
use phalanx::{Caller, ProcessGroup, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::TrainState;
use crate::gradients::SyncedGradients;

impl<M: Module, T: Serialize + DeserializeOwned> TrainState<M, T> {
    /// [`Ddp::backward`](crate::Ddp::backward) as a [step](Context::step) of an elastic job: if a worker dies in it, the others average their
    /// gradients again, and none goes back to the last commit. `loss` is that of one [`forward`](crate::Ddp::forward) of
    /// `context.state.model`, or of several; distribute its data by [`Context::rank`] and [`Context::world_size`].
    ///
    /// The average is over the ranks that are not [missing](Step::missing), each with the same weight.
    ///
    /// All go back, through the error and `?`, if a survivor's gradients are lost: it was cut off in an exchange of a
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), or while buckets were rebuilt in the second step. Also if a survivor
    /// had taken over rank 0's buffers for the next step already, or was comparing optimizers in the first, and as [`Context::step`] says.
    ///
    /// It takes memory for another copy of all gradients, and the time to make it, but only if workers can change.
    ///
    /// # Errors
    /// As [`Ddp::backward`](crate::Ddp::backward) and [`Context::step`].
    pub fn backward<const D: usize>(
        context: &mut Context<'_, Self>,
        loss: &Tensor<D>,
    ) -> Result<Step<SyncedGradients>> {
        Self::averaged(context, loss, None)
    }

    /// [`Ddp::backward_weighted`](crate::Ddp::backward_weighted) as a step of an elastic job, as [`backward`](Self::backward): the average
    /// is over the samples of the ranks that are not [missing](Step::missing). If none of them has a sample, it is an error. Each has one in every
    /// step with a sampler of [`Tail::Repeat`](phalanx::sampler::Tail::Repeat).
    ///
    /// # Errors
    /// As [`Ddp::backward_weighted`](crate::Ddp::backward_weighted) and [`Context::step`].
    pub fn backward_weighted<const D: usize>(
        context: &mut Context<'_, Self>,
        loss: &Tensor<D>,
        weight: f64,
    ) -> Result<Step<SyncedGradients>> {
        Self::averaged(context, loss, Some(weight))
    }

    fn averaged<const D: usize>(
        context: &mut Context<'_, Self>,
        loss: &Tensor<D>,
        weight: Option<f64>,
    ) -> Result<Step<SyncedGradients>> {
        if !context.is_elastic() {
            return context.step(|state, _| state.model.synchronised(loss, weight));
        }
        let (mut is_first, mut has_gradients) = (true, false);
        context.step(|state, group| {
            if has_gradients {
                return state.model.replay(group);
            }
            if !std::mem::take(&mut is_first) {
                state.model.follow(group)?; // Connecting was cut off.
            }
            state.model.connect()?;
            has_gradients = true;
            state.model.backward_replayable(loss, weight)
        })
    }
}

impl<M: Module, T: Serialize + DeserializeOwned> State for TrainState<M, T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        // What each rank has of its own is no part of a state that all have in common.
        training::save_common(self, parts, 0)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.read(parts).map(|_| ())
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        // The state of the optimizer is the same by now. Its settings are the program's, which may set them in the loop: the first step, or
        // the first commit, compares them.
        self.model.enter(group, &self.options)
    }

    fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        self.model.follow(group)
    }

    fn leave(&mut self) {
        self.model.leave(&self.alone);
    }

    fn agree(&mut self) -> Result<()> {
        if self.model.has_compared() {
            self.model.compare_again(&self.optimizer, Caller::ElasticCommit)?;
        } else {
            self.model.compare_optimizers(&self.optimizer, None, Caller::ElasticCommit)?;
        }
        self.model.agree()
    }
}
