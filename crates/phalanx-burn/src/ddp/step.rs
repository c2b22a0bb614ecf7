//! The optimizer's step, and the norm of its gradients.

use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use phalanx::trace::Track;
use phalanx::{Buffer, Caller, Communicator, Error, ReduceOp, Result, adapter};

use super::{Ddp, held};
use crate::gradients::{Clip, Synced};
use crate::names::Names;
use crate::parallel::{check_parts, of_stages, refuse_parts};
use crate::{alike, clip, lr};

impl<M: Module> Ddp<M> {
    /// Scales `gradients` from [`backward`](Self::backward) so that their norm, taken over all elements of all of them
    /// as one vector, is at most `max_norm`; returns the 2-norm before, summed in f64. This is
    /// `torch.nn.utils.clip_grad_norm_`. All ranks call it together.
    ///
    /// ```
    /// # use burn::{nn::Linear, optim::ModuleOptimizer, tensor::Tensor};
    /// # fn step(ddp: &mut phalanx_burn::Ddp<Linear>, optimizer: &mut ModuleOptimizer, loss: Tensor<1>)
    /// # -> phalanx::Result<()> {
    /// let mut gradients = ddp.backward(&loss)?;
    /// let norm = ddp.clip_grad_norm(&mut gradients, 1.0)?;
    /// if norm.is_finite() {
    ///     ddp.step(optimizer, 1e-3, gradients)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// It needs no communication where every rank has all averages. Where a
    /// [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) has sharded them, the ranks exchange one number for
    /// each parameter; the norm has the same bits either way.
    ///
    /// If an element is infinite or not a number, so is the norm, on every rank alike; the gradients are then left alone.
    ///
    /// # Errors
    /// If layers of the model are [divided](crate::parallel::tensor) among ranks, or it has trained as this rank's stages of a
    /// [`Pipeline`](crate::parallel::pipeline::Pipeline), or in a chain of [`StageLink`](crate::parallel::StageLink)s, which
    /// [`parallel::clip_grad_norm`](crate::parallel::clip_grad_norm) clips; and, which ends the group, if `max_norm` is not a positive number, if the gradients are those of another `Ddp`, if one is no float or cannot be read from its
    /// device, or if the exchange fails.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(&self, gradients: &mut impl Clip, max_norm: f64) -> Result<f64> {
        // It may be computed, on this rank alone otherwise than on the others.
        adapter::check_max_norm(max_norm).map_err(|error| self.fail(error))?;
        // The replicas have the same parts, and the same error.
        let is_whole = if self.is_of_stages { Err(of_stages()) } else { refuse_parts(self.model()) };
        is_whole.map_err(|error| match self.sharded {
            true => error.with_remedy(
                "clip with phalanx_burn::parallel::clip_grad_norm, and without a ZeroRedundancyOptimizer: it leaves each rank the averages of \
                 some parameters only",
            ),
            false => error,
        })?;
        // The others wait for this rank's numbers, or for its next gradients.
        let own = clip::squares_of(self.model(), gradients.parameters()).map_err(|error| self.fail(error))?;
        if !self.sharded {
            let squares = own.into_iter().map(|(_, square)| square);
            return Ok(clip::scale(self.model(), gradients, max_norm, squares));
        }
        let indices = &self.inventory.indices;
        let mut squares = vec![0.0; indices.len()];
        for (id, sum) in own {
            if let Some(square) = indices.get(&id).and_then(|&index| squares.get_mut(index)) {
                *square = sum;
            }
        }
        // For each parameter all ranks but one contribute zero: the sums are exact, and added in the same order
        // everywhere.
        let group = self.group.in_call(Caller::DdpClipGradNorm);
        let begin = Instant::now();
        let squares = group.all_reduce_async(Buffer::from_slice(&squares), ReduceOp::Sum)?.wait()?;
        self.waited_since(begin);
        let squares = squares.as_slice::<f64>()?.iter().copied();
        Ok(clip::scale(self.model(), gradients, max_norm, squares))
    }

    /// Lets `optimizer` change the model by `gradients` from [`backward`](Self::backward). Only the first step
    /// waits for the other ranks: in it they compare their optimizers, so all ranks take it together. They compare them again every 31 steps, without a wait.
    ///
    /// All ranks give it the same optimizer, with the same settings and state, and the same learning rate. Otherwise replicas drift apart. What is
    /// compared, and when:
    ///
    /// | | |
    /// |---|---|
    /// | what the optimizers do to parameters: their kinds, betas, decay, momentum, clipping | in the first step of each `Ddp`, and every 31 steps, each time of the next 32 parameters; of an elastic job's state in the first step or commit in each group, and every 31 commits; in [`TrainState::with_group`](crate::TrainState::with_group), [`ZeroRedundancyOptimizer::new`](crate::ZeroRedundancyOptimizer::new) and [`Fsdp::step`](crate::parallel::fsdp::Fsdp::step); when an uneven [`join`](Self::join) ends |
    /// | of which parameters they have a state, and after how many steps | in the first step of each `Ddp` or `Fsdp`, which reads a loaded state once, and in `ZeroRedundancyOptimizer::new`; `TrainState::with_group`, an elastic job and an uneven `join` give every rank the same state |
    /// | learning rates, and the norms of [`Ddp::clip_grad_norm`](Self::clip_grad_norm), [`clip_grad_norm`](crate::clip_grad_norm) and [`parallel::clip_grad_norm`](crate::parallel::clip_grad_norm) | in the first step, and every 32 steps those of all 32; they may differ by rounding |
    /// | the steps and runs of the checkpoints from which each rank has loaded a [`TrainState`](crate::TrainState) or a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) | together with the learning rates; not in an elastic job, which gives every rank the same state |
    /// | among the ranks that [divide](crate::parallel::tensor) layers: what optimizers do, and learning rates | in the first step, and then as often as among replicas |
    /// | among these ranks, too: of which parameters optimizers have a state, and after how many steps | in the first step, without a `ZeroRedundancyOptimizer` |
    /// | among the stages of a [`Pipeline`](crate::parallel::pipeline::Pipeline) | nothing: each may have an optimizer of its own. Give the stages of a [tied parameter](crate::parallel::pipeline::TiedParameter) the same: its copies are compared |
    /// | the sampler, and the size of the batches, of [`TrainState::next_batch`](crate::TrainState::next_batch) | together with the learning rates; not in an elastic job |
    /// | the state of an optimizer that replaces the first one later | never: [`replicas_identical`](Self::replicas_identical) says whether replicas have drifted apart |
    ///
    /// # Errors
    /// On every rank, if in the first step the ranks' optimizers do not do the same to parameters, their learning rates differ, or only some have a state, as
    /// after a record that one rank alone has loaded. The group stays usable, unless layers are divided. If optimizers differ in a later step, the group ends.
    ///
    /// If the gradients are those of another `Ddp`, such as a generator's, or of this one before its state was loaded
    /// or it changed its group. After a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) was made for this
    /// `Ddp`: then no rank has all gradients, and only that optimizer may step. In the first step, and every 31 steps, if layers are
    /// [divided](crate::parallel::tensor) among ranks and the optimizer does not treat each element by itself, as LAMB, Muon and Burn's clipping
    /// by norm do not: it would take a norm of this rank's part; or if an exchange among those ranks has failed. If a learning rate is infinite or not a number. Each of these ends the group:
    /// replicas would drift apart, or train otherwise than one process.
    pub fn step(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        if self.sharded {
            let cause = "Ddp::step was called while gradients are sharded among the ranks: replicas would drift apart";
            let remedy = "step with the ZeroRedundancyOptimizer, or make a new Ddp from Ddp::into_model";
            return Err(self.fail(Error::invalid_argument(cause).with_remedy(remedy)));
        }
        self.apply(optimizer, learning_rate, gradients)
    }

    pub(crate) fn apply(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
        gradients: impl Synced,
    ) -> Result<()> {
        let gradients = gradients.synced();
        let clipped = gradients.clip_factor();
        let gradients = gradients.of(&self.token).map_err(|error| self.fail(error))?;
        self.check_elementwise(optimizer)?;
        let rates: ModuleLearningRate = learning_rate.into();
        lr::check(&rates, &self.inventory.parameters).map_err(|error| self.fail(error))?;
        let compared = self.compare_step(optimizer, &rates);
        compared.map_err(|error| self.fail_for_sharers(error))?;
        let (trace, begin) = (self.group.trace(), Instant::now());
        // Moved and not cloned, so that the optimizer can change parameters in place.
        let parameters = &self.inventory.parameters;
        let model = self.model.take().map(|model| match self.is_renamed {
            true => Names::of(parameters).step(optimizer, rates.clone(), model, gradients),
            false => optimizer.step(rates.clone(), model, gradients),
        });
        self.model = model.map(|model| self.inventory.ties.retie(model));
        let loaded = self.loads.settle();
        if let Some(sink) = self.engine.sink() {
            // Burn's optimizers do not say what their settings are.
            let rates = lr::of_each(&rates, &self.inventory.parameters);
            sink.with_reducer(|reducer| {
                reducer.clipped(clipped);
                reducer.stepped(rates, [loaded]);
            });
        }
        if let Some(sharers) = &mut self.sharers {
            let compared = sharers.stepped(&rates, &self.inventory.parameters);
            compared.map_err(|error| self.fail_for_sharers(error))?;
        }
        let end = Instant::now();
        trace.complete(Track::Optimizer, "optimizer", begin, end, &[]);
        if let Some(began) = self.step_began.take() {
            trace.complete(Track::Step, "step", began, end, &[]);
        }
        Ok(())
    }

    /// Replicas, and the ranks that divide layers with this one, compare their optimizers and the `rates` of the step that follows.
    fn compare_step(&mut self, optimizer: &ModuleOptimizer, rates: &ModuleLearningRate) -> Result<()> {
        if !self.optimizers.is_compared() {
            self.compare_states(optimizer)?;
            self.compare_optimizers(optimizer, Some(rates), Caller::DdpStep)?;
        } else if !self.has_common_state {
            // In an elastic job commits do it: a collective here may be in the way of a step that is done again.
            self.compare_again(optimizer, Caller::DdpStep).map_err(|error| self.fail(error))?;
        }
        let replica = (held(&self.model), &self.inventory.parameters[..]);
        // Ranks that have parts of the states have those of other parameters, if the parts of layers are not equally large.
        let first = (!self.sharded, &self.inventory.constants[..]);
        self.sharers.as_mut().map_or(Ok(()), |sharers| sharers.compare(optimizer, replica, rates, first))
    }

    /// Ends the groups with `error` if layers are divided: replicas compare without the ranks that have the other parts, and these without the replicas.
    pub(super) fn fail_for_sharers(&self, error: Error) -> Error {
        if self.sharers.is_some() { self.fail(error) } else { error }
    }

    /// An error, which ends the group, if this rank has parts of layers and `optimizer` does otherwise with them than with the whole ones. It is
    /// checked in the first step and every 31 steps, because a program may replace it, or take several in turns.
    fn check_elementwise(&mut self, optimizer: &ModuleOptimizer) -> Result<()> {
        if self.elementwise_steps == 0 {
            let checked = check_parts(optimizer, self.model(), &self.inventory);
            checked.map_err(|error| self.fail(error))?;
            self.elementwise_steps = alike::WINDOW;
        }
        self.elementwise_steps -= 1;
        Ok(())
    }
}
