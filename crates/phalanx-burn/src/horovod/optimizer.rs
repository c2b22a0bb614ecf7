//! An optimizer that steps with the gradients of all ranks.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Tensor, TensorData};
use phalanx::adapter::elements;
use phalanx::{Buffer, Error, Result};
use phalanx_horovod::{Compression, Horovod, Op, Reduction};

use super::sink::{Delivery, Pass, Sink};
use super::state::check_replicas;
use crate::gradients::Leaves;
use crate::hook;
use crate::lr;
use crate::parallel::tensor::TensorGroup;
use crate::parallel::{check_parts, group_of, refuse_divided};
use crate::parameters::{self, Inventory, Parameter};
use crate::tensor_bytes::{self, TensorBytes};

/// What [`DistributedOptimizer::with_options`] may be told. The defaults are Horovod's.
#[derive(Clone, Debug, PartialEq)]
pub struct DistributedOptions {
    /// How gradients are combined. [`Op::Adasum`] combines what the optimizer changes instead, as in Horovod: each rank's optimizer
    /// steps with this rank's gradients, and [`DistributedOptimizer::step`] takes the Adasum of the changes. So nothing travels
    /// during the backward pass, and the optimizer's state stays each rank's own.
    pub op: Op,
    /// The form in which they travel.
    pub compression: Compression,
    /// How many backward passes are added up, on each rank, before they are combined. As in Horovod, the ranks do not compare it: one with twice as many
    /// brings the sum of twice as many.
    pub backward_passes_per_step: usize,
    /// Divides gradients by this before they are added up, and by the rest of the number of ranks afterwards. Only for
    /// [`Op::Average`].
    pub gradient_predivide_factor: f64,
    /// The groups into which gradients are put. Those of a group are combined when all of them are ready.
    pub groups: Groups,
    /// Whether a parameter without a gradient on this rank counts as one whose gradient is zero, as in Horovod. It is for parameters that
    /// only some ranks use. Parameters that no rank uses then have a gradient of zeros, too, by which momentum and weight decay change
    /// them. A parameter that is frozen has none. Unless this is set, a parameter without a gradient on any rank is left out. If only some
    /// ranks have a gradient of it, they wait for the others: the wait is
    /// [reported](phalanx_horovod::Options::stall_check_time), and at last an [error](phalanx_horovod::Options::stall_shutdown_time).
    pub zero_missing_gradients: bool,
    /// In front of the names of gradients. Two optimizers that have gradients in flight at the same time need different ones.
    pub name: String,
}

/// How gradients are grouped; Horovod's `groups`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Groups {
    /// So many, in the order of the parameters, as even as possible. 0: none, each gradient is combined when it is ready.
    Number(usize),
    /// The names of the parameters in each, such as `layers.0.weight`. Parameters in none are combined when they are ready.
    Lists(Vec<Vec<String>>),
}

impl Default for Groups {
    fn default() -> Self {
        Self::Number(0)
    }
}

impl From<usize> for Groups {
    fn from(number: usize) -> Self {
        Self::Number(number)
    }
}

impl Groups {
    /// The group of each parameter, and how many parameters each group has.
    ///
    /// # Errors
    /// If a list names a parameter that there is not, or one that is in a group already.
    pub(super) fn of(&self, parameters: &[Parameter]) -> Result<(Vec<Option<usize>>, Vec<usize>)> {
        let count = parameters.len();
        let (members, groups) = match self {
            Self::Number(groups) => {
                let groups = (*groups).min(count);
                let member = |index: usize| (groups > 0).then(|| index * groups / count);
                ((0..count).map(member).collect(), groups)
            }
            Self::Lists(lists) => {
                let mut members = vec![None; count];
                for (group, name) in lists
                    .iter()
                    .enumerate()
                    .flat_map(|(group, names)| names.iter().map(move |name| (group, name)))
                {
                    let known = parameters.iter().position(|parameter| parameter.name == *name);
                    let Some(index) = known else {
                        return Err(Error::invalid_argument(format!(
                            "group {group} names {name:?}, and no parameter has that name"
                        ))
                        .with_remedy(format!(
                            "names are such as {:?}",
                            parameters.first().map_or("", |first| &first.name)
                        )));
                    };
                    if let Some(other) = members[index].replace(group) {
                        return Err(Error::invalid_argument(format!(
                            "{name:?} is in group {other} and in group {group}"
                        ))
                        .with_remedy("a gradient is in one group at most"));
                    }
                }
                (members, lists.len())
            }
        };
        let mut sizes = vec![0; groups];
        members.iter().flatten().for_each(|group: &usize| sizes[*group] += 1);
        Ok((members, sizes))
    }
}

impl Default for DistributedOptions {
    fn default() -> Self {
        Self {
            op: Op::Average,
            compression: Compression::None,
            backward_passes_per_step: 1,
            gradient_predivide_factor: 1.0,
            groups: Groups::default(),
            zero_missing_gradients: false,
            name: "gradient".to_owned(),
        }
    }
}

impl DistributedOptions {
    /// How gradients are combined in a world of `size`.
    fn reduction(&self, size: u32) -> Result<Reduction> {
        let reduction = Reduction::new(self.op).compression(self.compression);
        let factor = self.gradient_predivide_factor;
        if factor == 1.0 {
            return Ok(reduction);
        }
        if self.op != Op::Average || !(factor.is_finite() && factor > 0.0) {
            return Err(Error::invalid_argument(format!(
                "gradient_predivide_factor {factor} with {}",
                self.op
            ))
            .with_remedy("it must be a positive number, and is for Op::Average"));
        }
        let sum = Reduction::new(Op::Sum).compression(self.compression);
        Ok(sum.prescale(1.0 / factor).postscale(factor / f64::from(size)))
    }
}

/// An optimizer around one of Burn's, which steps with the gradients of all ranks.
///
/// [`backward`](Self::backward) submits each gradient as soon as it is finished, under its parameter's name, while the layers
/// below are still computing theirs. [`step`](Self::step) waits for all that was submitted. Parameters that get no gradient on any rank are
/// left out: a backward pass through half of the graph works, such as that of a generator or a discriminator. If only some ranks have a
/// gradient of a parameter, they wait for the others, which are named
/// ([`Options::stall_check_time`](phalanx_horovod::Options::stall_check_time)). With
/// [`DistributedOptions::zero_missing_gradients`] the others bring zeros.
///
/// The model stays the program's: [`forward`](Self::forward) borrows it, and [`step`](Self::step) takes it and gives it back, as
/// Burn's optimizers do. It must have the parameters that it had in [`new`](Self::new), with the same ids: Burn replaces ids when it loads a
/// record. Some may be frozen since.
///
/// As in Horovod, the ranks do not compare their learning rates: give all ranks the same in each step, or replicas drift apart. A [`Ddp`](crate::Ddp)
/// compares them.
#[doc(alias("hvd.DistributedOptimizer", "DistributedGradientTape"))]
pub struct DistributedOptimizer {
    optimizer: ModuleOptimizer,
    inventory: Inventory,
    sink: Arc<Sink>,
    passes: Vec<Weak<Pass>>,
    /// The parameters of the last forward pass, until its gradients are waited for.
    leaves: Leaves,
    /// What is otherwise with them than in [`new`](Self::new).
    changes: Changes,
    per_step: usize,
    /// What the optimizer changes is combined, and not gradients.
    combines_changes: bool,
    /// Backward passes since the last step.
    backwards: usize,
    /// Whether [`synchronize`](Self::synchronize) has given gradients since the last backward pass that were not applied.
    has_given: bool,
    /// Whether the optimizer has been found to treat each element of divided layers by itself.
    is_elementwise: bool,
    /// The ranks among which layers are divided.
    tensor: Option<TensorGroup>,
}

impl DistributedOptimizer {
    /// For the parameters of `model` that need a gradient, with the default options.
    ///
    /// # Errors
    /// If the model has none, or is on a device without autodiff, or on one that this build does not know; if it has
    /// [units](crate::parallel::fsdp::FullySharded), or ranks have different parts of [divided](crate::parallel::tensor) layers: of a model
    /// with those, all ranks make it together. If layers are divided and `optimizer` does not treat each element by itself, as LAMB and Burn's
    /// clipping by norm do not: it would take a norm of this rank's part.
    pub fn new<M: Module>(optimizer: ModuleOptimizer, model: &M, hvd: &Horovod) -> Result<Self> {
        Self::with_options(optimizer, model, hvd, DistributedOptions::default())
    }

    /// As [`new`](Self::new), with options.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if the options have no meaning. With [`Op::Adasum`] among several ranks, if layers are
    /// [divided](crate::parallel::tensor): its dot products would be those of parts.
    pub fn with_options<M: Module>(
        optimizer: ModuleOptimizer,
        model: &M,
        hvd: &Horovod,
        options: DistributedOptions,
    ) -> Result<Self> {
        if options.backward_passes_per_step == 0 {
            return Err(
                Error::invalid_argument("backward_passes_per_step is 0").with_remedy("it must be at least 1")
            );
        }
        check_replicas(hvd, model, &format!("{}.parts", options.name), "DistributedOptimizer")?;
        let inventory = Inventory::of(model)?;
        check_parts(&optimizer, model, &inventory)?;
        // All ranks have the same parts, and the same error.
        if options.op == Op::Adasum && hvd.size() > 1 {
            refuse_divided(model, "Op::Adasum, which combines by dot products of whole tensors,")?;
        }
        let reduction = options.reduction(hvd.size())?;
        let sink = Sink::new(hvd.clone(), &inventory.parameters, reduction, &options)?;
        Ok(Self {
            optimizer,
            inventory,
            sink: Arc::new(sink),
            passes: Vec::new(),
            leaves: Leaves::default(),
            changes: Changes::default(),
            per_step: options.backward_passes_per_step,
            // Of one rank they are what it changes.
            combines_changes: options.op == Op::Adasum && hvd.size() > 1,
            backwards: 0,
            has_given: false,
            is_elementwise: true,
            tensor: group_of(model),
        })
    }

    /// Runs `pass` on the model, so that a [`backward`](Self::backward) of its result submits gradients.
    pub fn forward<M: Module, T>(&mut self, model: &M, pass: impl FnOnce(&M) -> T) -> T {
        let token = Arc::new(Pass::to(&self.sink));
        self.passes.retain(|pass| pass.strong_count() > 0);
        self.passes.push(Arc::downgrade(&token));
        self.leaves = Leaves::of(model);
        self.changes = Changes::of(model, &self.inventory.indices);
        pass(&hook::hooked(model, &self.inventory, token))
    }

    /// Runs backward from `loss`. Gradients are added up over
    /// [`backward_passes_per_step`](DistributedOptions::backward_passes_per_step) calls; in the last of them they are submitted as
    /// they become ready.
    ///
    /// # Errors
    /// If the loss was not computed in [`forward`](Self::forward), if this is one backward pass too many before a step, or the job
    /// has failed. Each of these ends the job: if a gradient cannot be submitted, as where there is too little memory; if a parameter of the
    /// model needs a gradient, and needed none or had another id in [`new`](Self::new); if the loss depends on parameters of the model itself,
    /// and not only on those that the closure of [`forward`](Self::forward) gets: a penalty on parameters belongs into the closure.
    pub fn backward<const D: usize>(&mut self, loss: &Tensor<D>) -> Result<()> {
        if let Some(name) = &self.changes.unknown {
            let error = another(name);
            // The others wait for what this rank does not submit.
            self.sink.leave(&error);
            return Err(error);
        }
        self.passes.retain(|pass| pass.strong_count() > 0);
        if !loss.is_tracked() || self.passes.is_empty() {
            let cause =
                "the loss was not computed in DistributedOptimizer::forward, or has run backward already";
            return Err(Error::invalid_argument(cause).with_remedy(
                "let loss = optimizer.forward(&model, |model| ...); several losses: add them up",
            ));
        }
        if self.backwards == self.per_step {
            return Err(Error::invalid_argument(format!(
                "backward pass {} without a step",
                self.backwards + 1
            ))
            .with_remedy("call step, or raise DistributedOptions::backward_passes_per_step"));
        }
        self.backwards += 1;
        self.has_given = false;
        let is_last = self.backwards == self.per_step;
        // Hooks of several forward passes may report one parameter several times, and only the end of backward tells.
        let submits = is_last && self.passes.len() == 1 && !self.combines_changes;
        let delivery = if submits { Delivery::Submit } else { Delivery::Hold };
        self.sink.set(delivery);
        let past_hooks = loss.backward();
        self.sink.set(Delivery::Ignore);
        // The others wait for what this rank does not submit.
        self.leaves.check(&past_hooks).inspect_err(|error| self.sink.leave(error))?;
        drop(past_hooks);
        if is_last && !self.combines_changes {
            self.sink.submit_held(&self.changes.frozen).inspect_err(|error| self.sink.leave(error))
        } else {
            self.sink.check()
        }
    }

    /// Waits for all gradients that were submitted, and gives them. For what a program does with them before
    /// [`apply`](Self::apply), such as clipping; it must do the same on every rank.
    ///
    /// # Errors
    /// If a gradient was not combined: the ranks disagree on it, or the job has failed. With [`Op::Adasum`], which combines no gradients. Each of
    /// these ends the job: if `model` does not have the parameter of a gradient; if layers are divided, and an exchange among these ranks has
    /// failed, or the optimizer of [`set_optimizer`](Self::set_optimizer) does not treat each element by itself, as in [`new`](Self::new); if an
    /// earlier call has given all gradients, and none of them was applied.
    pub fn synchronize<M: Module>(&mut self, model: &M) -> Result<GradientsParams> {
        if self.combines_changes {
            return Err(Error::invalid_argument(
                "Op::Adasum combines what the optimizer changes, not gradients",
            )
            .with_remedy("call step; clip gradients by Burn's optimizer (with_grad_clipping)"));
        }
        // Gradients may be NaN, and nothing else says so where this rank is the job.
        if let Some(error) = self.tensor.as_ref().and_then(TensorGroup::failure) {
            self.sink.leave(&error);
            return Err(error);
        }
        if !self.is_elementwise {
            // The others wait for what this rank does not submit.
            check_parts(&self.optimizer, model, &self.inventory)
                .inspect_err(|error| self.sink.leave(error))?;
            self.is_elementwise = true;
        }
        self.leaves = Leaves::default();
        // Before the last of its backward passes: with what there is.
        self.sink.submit_held(&self.changes.frozen).inspect_err(|error| self.sink.leave(error))?;
        self.backwards = 0;
        let landed = self.sink.landed()?;
        // The others step, and wait for this rank in the next one.
        let gradients = self.of(model, landed).inspect_err(|error| self.sink.leave(error))?;
        if gradients.is_empty() {
            self.refuse_if_given("synchronize")?;
        }
        self.has_given = true;
        Ok(gradients)
    }

    /// As [`synchronize`](Self::synchronize), for a step with these `rates`. An error, which ends the job, if that has given the gradients already, or a
    /// rate is infinite or not a number: this rank's next gradients would be NaN, and with them those of all.
    pub(super) fn synchronize_step<M: Module>(
        &mut self,
        rates: &ModuleLearningRate,
        model: &M,
    ) -> Result<GradientsParams> {
        self.check_rates(rates)?;
        self.refuse_if_given("step")?;
        let gradients = self.synchronize(model)?;
        self.has_given = false;
        Ok(gradients)
    }

    fn check_rates(&self, rates: &ModuleLearningRate) -> Result<()> {
        lr::check(rates, &self.inventory.parameters).inspect_err(|error| self.sink.leave(error))
    }

    /// An error of `call`, which ends the job, if [`synchronize`](Self::synchronize) has given the gradients, and there was no backward pass since.
    fn refuse_if_given(&self, call: &str) -> Result<()> {
        if !self.has_given {
            return Ok(());
        }
        let error = Error::invalid_argument(format!(
            "DistributedOptimizer::{call} after synchronize, which has given the gradients: the step would go without them"
        ))
        .with_remedy("step with what synchronize gave: call apply in place of step");
        self.sink.leave(&error);
        Err(error)
    }

    /// Gradients by the parameters' indices, under the parameters' ids.
    fn of<M: Module>(&self, model: &M, gradients: Vec<Option<TensorData>>) -> Result<GradientsParams> {
        let mut landed = Landed { inventory: &self.inventory, gradients, params: GradientsParams::new() };
        model.visit(&mut landed);
        let left = landed.gradients.iter().zip(&self.inventory.parameters).find(|(left, _)| left.is_some());
        left.map_or(Ok(landed.params), |(_, parameter)| Err(another(&parameter.name)))
    }

    /// Lets the optimizer change the model by `gradients`, which [`synchronize`](Self::synchronize) gave.
    ///
    /// # Errors
    /// If a learning rate is infinite or not a number, which ends the job.
    pub fn apply<M: Module>(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let rates: ModuleLearningRate = learning_rate.into();
        self.check_rates(&rates)?;
        self.has_given = false;
        Ok(self.inventory.ties.retie(self.optimizer.step(rates, model, gradients)))
    }

    /// Waits for the gradients, and lets the optimizer change the model by them.
    ///
    /// # Errors
    /// If a gradient, or a change, was not combined: the ranks disagree on it, or the job has failed. Each of these ends the job: if
    /// [`synchronize`](Self::synchronize) has given the gradients already; if a learning rate is infinite or not a number.
    pub fn step<M: Module>(&mut self, learning_rate: impl Into<ModuleLearningRate>, model: M) -> Result<M> {
        let rates: ModuleLearningRate = learning_rate.into();
        if self.combines_changes {
            return self.step_apart(rates, model);
        }
        let gradients = self.synchronize_step(&rates, &model)?;
        self.apply(rates, model, gradients)
    }

    /// Lets the optimizer change the model by this rank's gradients, and takes the Adasum of what it has changed.
    fn step_apart<M: Module>(&mut self, learning_rate: ModuleLearningRate, model: M) -> Result<M> {
        self.check_rates(&learning_rate)?;
        (self.backwards, self.leaves) = (0, Leaves::default());
        let own = self.sink.own(&self.changes.frozen)?;
        let indices = &self.inventory.indices;
        let has_one: Vec<bool> = own.iter().map(Option::is_some).collect();
        let mut parameters: Vec<Option<Buffer>> = own.iter().map(|_| None).collect();
        parameters::each(&model, indices, |index, values| {
            if has_one[index] {
                parameters[index] = Some(buffer(values)?);
            }
            Ok(())
        })
        .inspect_err(|error| self.sink.leave(error))?;
        // The others wait for what this rank would change.
        let gradients = self.of(&model, own).inspect_err(|error| self.sink.leave(error))?;
        let model = self.optimizer.step(learning_rate, model, gradients);
        let mut changes = Vec::new();
        parameters::each(&model, indices, |index, values| {
            if let Some(before) = &parameters[index] {
                let mut change = buffer(values)?;
                subtract(&mut change, before)?;
                changes.push((index, change));
            }
            Ok(())
        })
        .inspect_err(|error| self.sink.leave(error))?;
        self.sink.submit_changes(changes).inspect_err(|error| self.sink.leave(error))?;
        for (parameter, change) in parameters.iter_mut().zip(self.sink.landed()?) {
            if let (Some(parameter), Some(change)) = (parameter, change) {
                elements::add(parameter.dtype(), parameter.as_bytes_mut(), change.as_bytes())?;
            }
        }
        let model = parameters::replaced(model, indices, |index| {
            parameters.get(index)?.as_ref().map(Buffer::as_bytes)
        });
        Ok(self.inventory.ties.retie(model))
    }

    /// Burn's optimizer, with its state: to save it.
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// Replaces Burn's optimizer: by one with a state that was loaded.
    pub fn set_optimizer(&mut self, optimizer: ModuleOptimizer) {
        (self.optimizer, self.is_elementwise) = (optimizer, false);
    }
}

impl fmt::Debug for DistributedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DistributedOptimizer({} parameters)", self.inventory.parameters.len())
    }
}

/// The error for a model that is not the one of [`DistributedOptimizer::new`], because of the parameter `name`.
fn another(name: &str) -> Error {
    Error::invalid_argument(format!(
        "`{name}` is another parameter than in DistributedOptimizer::new, or needs a gradient only since then: the optimizer would step without it"
    ))
    .with_remedy(
        "make the DistributedOptimizer after the model's record is loaded, which gives parameters other ids, and anew when parameters are \
         unfrozen",
    )
}

/// How a model differs from that of [`DistributedOptimizer::new`].
#[derive(Default)]
struct Changes {
    /// The name of the first parameter that needs a gradient and has no index: none is combined for it.
    unknown: Option<String>,
    /// The indices of parameters that need no gradient any more.
    frozen: HashSet<usize>,
}

impl Changes {
    fn of<M: Module>(model: &M, indices: &HashMap<ParamId, usize>) -> Self {
        let mut finder = Finder { indices, path: Vec::new(), found: Self::default() };
        model.visit(&mut finder);
        finder.found
    }
}

struct Finder<'a> {
    indices: &'a HashMap<ParamId, usize>,
    path: Vec<String>,
    found: Changes,
}

impl ModuleVisitor for Finder<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match (self.indices.get(&param.id), param.is_require_grad()) {
            (Some(&index), false) => {
                self.found.frozen.insert(index);
            }
            (None, true) if self.found.unknown.is_none() => self.found.unknown = Some(self.path.join(".")),
            (Some(_), true) | (None, _) => {}
        }
    }
}

/// A copy.
fn buffer(values: TensorBytes<'_>) -> Result<Buffer> {
    let dtype = tensor_bytes::dtype(values.dtype)?;
    let mut copy = Buffer::try_zeroed(dtype, values.bytes.len() / dtype.size())?;
    copy.as_bytes_mut().copy_from_slice(values.bytes);
    Ok(copy)
}

/// Registers what has come back under the ids of the parameters.
struct Landed<'a> {
    inventory: &'a Inventory,
    /// By the parameter's index.
    gradients: Vec<Option<TensorData>>,
    params: GradientsParams,
}

impl Landed<'_> {
    fn take(&mut self, id: ParamId) -> Option<TensorData> {
        let index = self.inventory.indices.get(&id)?;
        self.gradients.get_mut(*index)?.take()
    }
}

impl ModuleVisitor for Landed<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let dtype = param.dtype();
        if let Some(data) = self.take(param.id) {
            let gradient = Tensor::<D>::from_data(data, (&param.device().inner(), dtype));
            self.params.register(param.id, gradient);
        }
    }
}

/// `from -= other`, element by element.
fn subtract(from: &mut Buffer, other: &Buffer) -> Result<()> {
    let mut minus = Buffer::try_zeroed(other.dtype(), other.len())?;
    minus.as_bytes_mut().copy_from_slice(other.as_bytes());
    elements::scale(minus.dtype(), minus.as_bytes_mut(), -1.0)?;
    elements::add(from.dtype(), from.as_bytes_mut(), minus.as_bytes())
}
