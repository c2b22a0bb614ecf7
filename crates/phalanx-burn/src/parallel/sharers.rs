//! What the ranks that divide layers among themselves compare of their steps.
//!
//! They are no replicas of each other, so no [`Ddp`](crate::Ddp) compares their optimizers. But each trains the parameters that all of them have whole,
//! such as norms and biases, for itself: with other settings, or another learning rate, these would drift apart without an error.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use phalanx::reducer::OptimizerSteps;
use phalanx::{Error, Result};

use super::division::group_of;
use super::panicked::EndIfPanicked;
use super::tensor::TensorGroup;
use crate::parameters::Parameter;
use crate::{alike, constants, lr, optimizer};

/// The steps of a rank that has parts of layers, as the ranks with the other parts compare them.
pub(crate) struct Sharers {
    group: TensorGroup,
    optimizers: alike::Watch,
    /// The learning rates of the steps that the ranks have not compared yet.
    steps: OptimizerSteps,
}

impl Sharers {
    /// Of `model`, if it has parts of layers; `constants` are its numbers. Warns of dropout: nothing at a tensor says whether all ranks have it.
    pub fn of<M: Module>(model: &M, constants: &[(String, String)]) -> Option<Self> {
        let group = group_of(model)?;
        if let (0, 2.., Some(probability)) = (group.rank(), group.ranks(), constants::dropout(constants)) {
            phalanx::warn(format_args!(
                "a model whose layers are divided among {} ranks has a dropout of {probability}: of tensors that all of these ranks have, all must drop the \
                 same elements. Inputs of divided layers alone are compared, now and then. Set it to 0, or seed the devices of these ranks alike and drop on \
                 all of them in the same order",
                group.ranks()
            ));
        }
        Some(Self { group, optimizers: alike::Watch::default(), steps: OptimizerSteps::default() })
    }

    /// For a forward or backward pass: if it panics, the groups of this rank end.
    pub fn end_if_panicked(&self) -> EndIfPanicked {
        EndIfPanicked::of(self.group.group(), "a pass of divided layers")
    }

    /// An error on every rank, which ends their groups, unless all ranks' optimizers do the same to parameters, with the same `rates` in the first step.
    /// They compare in that, and then every 31 steps. An error, too, if in the first step optimizers that `have_whole_states` have something of a parameter
    /// on one rank that they have not on another, or the ranks' layers compute with other `constants`; and if an exchange has failed: gradients may be NaN
    /// then, and no backward pass in a world of one says so. All ranks call it together, before each step.
    pub fn compare<M: Module>(
        &mut self,
        optimizer: &ModuleOptimizer,
        replica: (&M, &[Parameter]),
        rates: &ModuleLearningRate,
        (have_whole_states, constants): (bool, &[(String, String)]),
    ) -> Result<()> {
        if let Some(error) = self.group.failure() {
            return Err(error);
        }
        let group = self.group.group();
        let compared = match self.optimizers.is_compared() {
            false => {
                let states = || match have_whole_states {
                    true => optimizer::check_states(optimizer, group, replica.1),
                    false => Ok(()),
                };
                let same =
                    group.all_gather_object(&constants.to_vec()).and_then(|all| constants::check(&all));
                let same = same.and_then(|()| states());
                same.and_then(|()| self.optimizers.compare(optimizer, replica, Some(rates), group))
            }
            true => self.optimizers.step(optimizer, replica, group),
        };
        compared.inspect_err(|error| self.group.abort(error.clone()))
    }

    /// Counts a step with these `rates` of `parameters`. Every 32 steps: an error on every rank, which ends their groups, if the ranks' rates differ.
    pub fn stepped(&mut self, rates: &ModuleLearningRate, parameters: &[Parameter]) -> Result<()> {
        self.steps.step(lr::of_each(rates, parameters), []);
        self.steps.verify(self.group.group()).inspect_err(|error| self.group.abort(error.clone()))
    }

    /// Ends the groups of this rank because of an `error` of its step, which is not of these ranks: their numbers may be others there.
    pub fn tell(&self, error: &Error) {
        if self.group.failure().is_none() {
            self.group.abort(Error::aborted(error.to_string()));
        }
    }
}
