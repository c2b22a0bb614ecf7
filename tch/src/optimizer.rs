//! libtorch's fused optimizers, with a state that can be saved and sent.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;

use phalanx::reducer::{ParameterSpec, verify_state};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Buffer, Communicator, Error, Rank, Result};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::shim::{self, AdamWTensors, SgdSettings};
use crate::tensors::{self, Inventory, Named, Shared, torch};

/// How an [`Optimizer`] changes parameters. The names and defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Rule {
    /// Adam with decoupled weight decay: `torch.optim.AdamW(fused=True)`.
    AdamW {
        /// The decay of the averages of the gradient and of its square.
        betas: (f64, f64),
        /// Added to the denominator.
        epsilon: f64,
        /// The share of the parameter that is taken away in a step, times the learning rate.
        weight_decay: f64,
    },
    /// Stochastic gradient descent: `torch.optim.SGD(fused=True)`, without dampening.
    Sgd {
        /// The share of the last velocity in the next; 0 keeps none.
        momentum: f64,
        /// Added to the gradient, times the parameter.
        weight_decay: f64,
        /// Whether it looks ahead along the velocity.
        nesterov: bool,
    },
}

impl Rule {
    /// AdamW with PyTorch's defaults.
    pub const ADAMW: Self = Self::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01 };

    /// SGD with this momentum.
    pub const fn sgd(momentum: f64) -> Self {
        Self::Sgd { momentum, weight_decay: 0.0, nesterov: false }
    }

    /// What is kept of each parameter: names, as in PyTorch's `state_dict`; the step counts one number.
    fn fields(self) -> &'static [&'static str] {
        match self {
            Self::AdamW { .. } => &["exp_avg", "exp_avg_sq", "step"],
            Self::Sgd { momentum, .. } if momentum != 0.0 => &["momentum_buffer"],
            Self::Sgd { .. } => &[],
        }
    }

    /// An error if no training goes by it. PyTorch's optimizers refuse the same.
    fn check(self) -> Result<()> {
        let is_share = |value: f64| (0.0..1.0).contains(&value);
        let is_size = |value: f64| value.is_finite() && value >= 0.0;
        let conditions = match self {
            Self::AdamW { betas, epsilon, weight_decay } => [
                (is_share(betas.0) && is_share(betas.1), "betas are at least 0, and less than 1"),
                (is_size(epsilon), "epsilon is finite, and not negative"),
                (is_size(weight_decay), "weight_decay is finite, and not negative"),
            ],
            Self::Sgd { momentum, weight_decay, nesterov } => [
                (is_size(momentum), "momentum is finite, and not negative"),
                (is_size(weight_decay), "weight_decay is finite, and not negative"),
                (!nesterov || momentum != 0.0, "nesterov needs a momentum"),
            ],
        };
        match conditions.iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, condition)) => {
                Err(Error::invalid_argument(format!("an optimizer cannot go by {self:?}: {condition}")))
            }
        }
    }

    /// As it travels: its kind, and its settings.
    fn numbers(self) -> [f64; NUMBERS] {
        match self {
            Self::AdamW { betas, epsilon, weight_decay } => [0.0, betas.0, betas.1, epsilon, weight_decay],
            Self::Sgd { momentum, weight_decay, nesterov } => {
                [1.0, momentum, weight_decay, f64::from(u8::from(nesterov)), 0.0]
            }
        }
    }

    /// The one that has these [numbers](Self::numbers).
    fn of_numbers(numbers: &[f64]) -> Option<Self> {
        let &[kind, first, second, third, fourth] = numbers else { return None };
        Some(if kind == 0.0 {
            Self::AdamW { betas: (first, second), epsilon: third, weight_decay: fourth }
        } else {
            Self::Sgd { momentum: first, weight_decay: second, nesterov: third != 0.0 }
        })
    }
}

/// How many [numbers](Rule::numbers) a rule has.
const NUMBERS: usize = 5;

/// An optimizer over the parameters of a `VarStore`: one pass over the memory of each, by libtorch's fused kernels.
///
/// `tch::nn::Optimizer` works with a [`Ddp`](crate::Ddp) as well, but keeps its state to itself; this one's is saved in
/// checkpoints and follows an elastic job.
///
/// ```
/// use phalanx_tch::{Optimizer, Rule};
/// use tch::{Device, Kind, Tensor, nn};
///
/// let store = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(store.root(), 4, 1, Default::default());
/// let mut optimizer = Optimizer::new(&store, Rule::ADAMW)?;
/// let loss = Tensor::ones([2, 4], (Kind::Float, Device::Cpu)).apply(&layer).mean(Kind::Float);
/// optimizer.zero_grad()?;
/// loss.backward();
/// optimizer.step(1e-3)?;
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct Optimizer {
    /// By the number of the group of parameters: see [`with_group`](Self::with_group).
    rules: Vec<Rule>,
    parameters: Vec<Named>,
    /// For each parameter the number of its group.
    groups: Vec<usize>,
    /// For each parameter the tensors of [`Rule::fields`], from its first gradient on.
    moments: Vec<Option<Vec<Tensor>>>,
    /// Of how many parameters the last step has begun to keep tensors.
    begun: usize,
}

impl Optimizer {
    /// An optimizer of the parameters that need a gradient now. One that is made or unfrozen later is not trained by it:
    /// [`TrainState::step`](crate::TrainState::step) refuses that.
    ///
    /// # Errors
    /// If there is none, or one whose elements do not lie row by row, which the kernels ask for. If no training goes by `rule`, such as one whose
    /// weight decay is negative.
    pub fn new(store: &VarStore, rule: Rule) -> Result<Self> {
        rule.check()?;
        let parameters = Inventory::of(&tensors::shared(store))?.parameters;
        if let Some(other) = parameters.iter().find(|one| !one.tensor.is_contiguous()) {
            return Err(Error::invalid_argument(format!("parameter {} is not contiguous", other.spec))
                .with_remedy("make it with `contiguous`, or use an optimizer of tch"));
        }
        let moments = parameters.iter().map(|_| None).collect();
        Ok(Self { rules: vec![rule], groups: vec![0; parameters.len()], parameters, moments, begun: 0 })
    }

    /// Makes a group of these `parameters`, which goes by a `rule` of its own, also of another kind. All others are group 0, which goes by the rule
    /// of [`new`](Self::new); groups of their own are numbered from 1 on. [`step_groups`](Self::step_groups) gives each a learning rate. All ranks
    /// make the same groups.
    ///
    /// ```
    /// # use phalanx_tch::{Optimizer, Rule};
    /// # use tch::{Device, nn};
    /// # let store = nn::VarStore::new(Device::Cpu);
    /// # nn::linear(store.root(), 4, 1, Default::default());
    /// // Biases without weight decay.
    /// let biases = store.variables().into_iter().filter(|(name, _)| name.ends_with("bias"));
    /// let undecayed = Rule::AdamW { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.0 };
    /// let optimizer = Optimizer::new(&store, Rule::ADAMW)?.with_group(undecayed, biases.map(|(_, bias)| bias))?;
    /// # assert_eq!(optimizer.rules(), [Rule::ADAMW, undecayed]);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is none; if one is not among the optimizer's parameters, is in such a group already, or was changed by a step. If no training goes by
    /// `rule`.
    #[doc(alias("param_groups", "add_param_group"))]
    pub fn with_group<P: Borrow<Tensor>>(
        mut self,
        rule: Rule,
        parameters: impl IntoIterator<Item = P>,
    ) -> Result<Self> {
        rule.check()?;
        let identity = |one: &Named| shim::identity(&one.tensor);
        let places: HashMap<usize, usize> = self.parameters.iter().map(identity).zip(0..).collect();
        let number = self.rules.len();
        for tensor in parameters {
            let tensor: &Tensor = tensor.borrow();
            let Some(&place) = places.get(&shim::identity(tensor)) else {
                return Err(Error::invalid_argument(format!(
                    "Optimizer::with_group of {tensor:?}, which is not among the optimizer's parameters"
                ))
                .with_remedy(
                    "give it trainable variables of the VarStore of Optimizer::new, and leave out frozen ones and buffers",
                ));
            };
            let spec = &self.parameters[place].spec;
            if self.moments[place].is_some() {
                return Err(Error::invalid_argument(format!(
                    "parameter {spec} was changed by a step already"
                ))
                .with_remedy("make the groups of an Optimizer before its first step"));
            }
            if ![0, number].contains(&self.groups[place]) {
                return Err(Error::invalid_argument(format!("parameter {spec} is in two groups"))
                    .with_remedy("give each parameter to one call of Optimizer::with_group"));
            }
            self.groups[place] = number;
        }
        if !self.groups.contains(&number) {
            return Err(Error::invalid_argument("Optimizer::with_group of no parameter")
                .with_remedy("is it a name that no variable has?"));
        }
        self.rules.push(rule);
        Ok(self)
    }

    /// How it changes the parameters that are in no [group](Self::with_group) of their own.
    pub fn rule(&self) -> Rule {
        self.rules[0]
    }

    /// How it changes each [group](Self::with_group) of parameters, by number.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Goes on by another rule of the same kind, with the state that there is. All ranks call it in the same step. A checkpoint has the new
    /// rule. It is that of the parameters that are in no [group](Self::with_group) of their own.
    ///
    /// # Errors
    /// If it needs another state, as AdamW does after SGD, or momentum after none; or if no training goes by it.
    pub fn set_rule(&mut self, rule: Rule) -> Result<()> {
        self.set_group_rule(0, rule)
    }

    /// As [`set_rule`](Self::set_rule), for the [group](Self::with_group) of this number.
    ///
    /// # Errors
    /// As [`set_rule`](Self::set_rule), and if there is no such group.
    pub fn set_group_rule(&mut self, group: usize, rule: Rule) -> Result<()> {
        rule.check()?;
        let count = self.rules.len();
        let Some(here) = self.rules.get_mut(group) else {
            return Err(Error::invalid_argument(format!(
                "Optimizer::set_group_rule of group {group}, and there are {count}, from 0 on"
            )));
        };
        if rule.fields() != here.fields() {
            return Err(Error::invalid_argument(format!(
                "Optimizer::set_rule: {rule:?} keeps {} of each parameter, and {here:?} keeps {}",
                listed(rule.fields()),
                listed(here.fields())
            ))
            .with_remedy("make a new Optimizer"));
        }
        *here = rule;
        Ok(())
    }

    /// Leaves all parameters without a gradient: before each step, or before the first backward pass of several. It is PyTorch's
    /// `zero_grad(set_to_none=True)`: a parameter that the next backward pass does not use keeps its value, whatever its momentum and the
    /// weight decay. tch's own optimizers do the same; `Tensor::zero_grad` leaves zeros, which count as gradients.
    ///
    /// # Errors
    /// Of libtorch.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.parameters.iter().try_for_each(|one| shim::set_gradient(&one.tensor, None))
    }

    /// Changes the parameters that have a gradient.
    ///
    /// # Errors
    /// If a parameter, its gradient and what the optimizer keeps of it are no longer of one size and type, or not contiguous:
    /// the kernels look at none of it. If `learning_rate` is negative, infinite or not a number. Nothing is changed then. Else of libtorch.
    pub fn step(&mut self, learning_rate: f64) -> Result<()> {
        self.step_groups(&vec![learning_rate; self.rules.len()])
    }

    /// As [`step`](Self::step), with a learning rate for each [group](Self::with_group), by number.
    ///
    /// # Errors
    /// As [`step`](Self::step), and if there are more or fewer groups.
    #[doc(alias = "param_groups")]
    pub fn step_groups(&mut self, learning_rates: &[f64]) -> Result<()> {
        if learning_rates.len() != self.rules.len() {
            return Err(Error::invalid_argument(format!(
                "Optimizer::step_groups with {} learning rates, and there are {} groups of parameters",
                learning_rates.len(),
                self.rules.len()
            ))
            .with_remedy(
                "give it one for each group, first that of the parameters in no group of their own",
            ));
        }
        learning_rates.iter().try_for_each(|rate| check_rate(*rate))?;
        let _guard = tch::no_grad_guard();
        let mut batches: Vec<((usize, Kind), Batch)> = Vec::new();
        let is_one_by_one = must_be_one_by_one(&self.parameters);
        let mut begun = 0;
        for ((parameter, &group), kept) in self.parameters.iter().zip(&self.groups).zip(&mut self.moments) {
            let gradient = parameter.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            if !shim::is_plain(&gradient) {
                let cause = format!("the gradient of parameter {} is sparse", parameter.spec);
                return Err(
                    Error::invalid_argument(cause).with_remedy("use dense gradients, or an optimizer of tch")
                );
            }
            let rule = self.rules[group];
            let kept = match kept {
                Some(kept) => kept,
                None => {
                    begun += usize::from(!rule.fields().is_empty());
                    kept.insert(fresh(rule, &parameter.tensor)?)
                }
            };
            let gradient = gradient.f_contiguous().map_err(torch)?;
            let alike = rule.fields().iter().zip(kept.iter()).filter(|(field, _)| **field != "step");
            let alike: Vec<&Tensor> = alike.map(|(_, tensor)| tensor).chain([&gradient]).collect();
            if !shim::are_alike(&parameter.tensor, &alike) {
                return Err(changed(parameter));
            }
            let key = (group, parameter.tensor.kind());
            let place = batches.iter().position(|(other, _)| *other == key && !is_one_by_one);
            let place = place.unwrap_or(batches.len());
            if place == batches.len() {
                batches.push((key, Batch::new(rule)));
            }
            let (_, batch) = &mut batches[place];
            batch
                .moments
                .iter_mut()
                .zip(kept.iter())
                .for_each(|(list, tensor)| list.push(tensor.shallow_clone()));
            batch.parameters.push(parameter.tensor.shallow_clone());
            batch.gradients.push(gradient);
        }
        self.begun = begun;
        let mut batches = batches.into_iter();
        batches.try_for_each(|((group, _), batch)| batch.step(self.rules[group], learning_rates[group]))
    }

    /// What ranks compare of it, beside its [parameters](Self::contract).
    pub(crate) fn describe(&self) -> String {
        let rules = self.rules.iter().map(|rule| format!("{rule:?}"));
        rules.collect::<Vec<_>>().join("; ")
    }

    /// Its rules as they travel, one behind the other.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        self.rules.iter().flat_map(|rule| rule.numbers()).collect()
    }

    /// What ranks compare of its last step: its rules, and by which each parameter goes. One that was made anew on one rank alone keeps nothing of the
    /// steps before.
    pub(crate) fn settings(&self) -> Vec<f64> {
        let mut settings = self.numbers();
        settings.push(self.begun as f64);
        settings.extend(self.groups.iter().map(|group| *group as f64));
        settings
    }

    /// What ranks compare of its parameters: also in which groups they are.
    fn contract(&self) -> Vec<ParameterSpec> {
        let mut contract = Inventory::specs(&self.parameters);
        for (spec, group) in contract.iter_mut().zip(&self.groups).filter(|(_, group)| **group != 0) {
            spec.name += &format!(" (in group {group} of the optimizer)");
        }
        contract
    }

    /// An error if a trainable one of `variables` has a gradient, and this optimizer was made without it.
    pub(crate) fn check_trains(&self, variables: &Shared) -> Result<()> {
        tensors::check_trained(variables, &self.parameters)
    }

    /// Takes over the rules and the state of rank `root`.
    ///
    /// # Errors
    /// On every rank, if the optimizers have other parameters, or other groups of them. If an exchange fails.
    pub(crate) fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        verify_state(group, self.contract())?;
        let theirs = group.broadcast_async(Buffer::from_slice(&self.numbers()), root)?.wait()?;
        for (rule, numbers) in self.rules.iter_mut().zip(theirs.as_slice::<f64>()?.chunks(NUMBERS)) {
            let theirs = Rule::of_numbers(numbers).filter(|theirs| theirs.fields() == rule.fields());
            *rule = theirs.ok_or_else(|| {
                Error::mismatch(format!("the optimizer of rank {root} is of another kind than {rule:?}"))
                    .with_remedy("make the same optimizer on every rank")
            })?;
        }
        let mine: Vec<u8> = self.moments.iter().map(|kept| u8::from(kept.is_some())).collect();
        let theirs = group.broadcast_async(Buffer::from_slice(&mine), root)?.wait()?;
        let mut tensors = Vec::new();
        let each = self.parameters.iter().zip(&self.groups).zip(&mut self.moments);
        for (((parameter, &group), kept), &is_kept) in each.zip(theirs.as_bytes()) {
            match (is_kept != 0, kept.is_some()) {
                (true, false) => *kept = Some(fresh(self.rules[group], &parameter.tensor)?),
                (false, true) => *kept = None,
                (true, true) | (false, false) => {}
            }
            tensors.extend(kept.iter().flatten().map(Tensor::shallow_clone));
        }
        tensors::from_rank(group, root, &tensors)
    }

    /// Saves the rules and the state behind `prefix`: for each parameter its group, and whether anything is kept of it. One that has had no
    /// gradient has nothing.
    pub(crate) fn save(&self, writer: &mut impl StateWriter, prefix: &str) -> Result<()> {
        let each = || self.parameters.iter().zip(&self.groups).zip(&self.moments);
        let members: Vec<(&str, usize, bool)> =
            each().map(|((one, &group), kept)| (one.spec.name.as_str(), group, kept.is_some())).collect();
        writer.value(prefix, &(&self.rules, members))?;
        for ((Named { spec, .. }, &group), kept) in each() {
            for (field, tensor) in self.rules[group].fields().iter().zip(kept.iter().flatten()) {
                let bytes = tensors::copy(tensor)?;
                let (name, shape) = (format!("{prefix}.{}.{field}", spec.name), shape(tensor, spec));
                writer.owned(&name, shim::dtype(tensor.kind())?, &shape, bytes)?;
            }
        }
        Ok(())
    }

    /// The state behind `prefix`, for [`load`](Self::load): nothing is changed yet.
    pub(crate) fn read(&self, reader: &impl StateReader, prefix: &str) -> Result<OptimizerState> {
        let (rules, saved): (Vec<Rule>, Vec<(String, usize, bool)>) = reader.value(prefix)?;
        rules.iter().try_for_each(|rule| rule.check())?;
        let as_saved = "make the optimizer as it was made when the state was saved";
        if rules.len() != self.rules.len() {
            return Err(Error::mismatch(format!(
                "the state is that of an optimizer with {} groups of parameters, and this one has {}",
                rules.len(),
                self.rules.len()
            ))
            .with_remedy(as_saved));
        }
        if let Some((rule, here)) = rules.iter().zip(&self.rules).find(|(a, b)| a.fields() != b.fields()) {
            return Err(Error::mismatch(format!(
                "the state is that of another optimizer: {rule:?}, which keeps {} of each parameter; here it is {here:?}, which needs {}",
                listed(rule.fields()),
                listed(here.fields())
            ))
            .with_remedy(as_saved));
        }
        let by_name = saved.iter().map(|(name, group, is_kept)| (name.as_str(), (*group, *is_kept)));
        let by_name: HashMap<&str, (usize, bool)> = by_name.collect();
        let of = |one: &Named| by_name.get(one.spec.name.as_str()).copied();
        let is_here = |name: &str| self.parameters.iter().any(|one| one.spec.name == name);
        let lacks = self.parameters.iter().find(|one| of(one).is_none()).map(|one| {
            format!("the optimizer's state has none for parameter `{}`: it was frozen, or no parameter, when the state was saved", one.spec.name)
        });
        let foreign = saved.iter().find(|(name, ..)| !is_here(name)).map(|(name, ..)| {
            format!(
                "the optimizer's state is for parameter `{name}`, which is not among those of this optimizer"
            )
        });
        if let Some(cause) = foreign.or(lacks) {
            return Err(Error::mismatch(cause).with_remedy(
                "make the model as it was when the state was saved, with the same parameters frozen",
            ));
        }
        let moments = |(one, &here): (&Named, &usize)| {
            let (group, is_kept) = of(one).unwrap_or_default();
            if group != here {
                return Err(Error::mismatch(format!(
                    "parameter `{}` is in group {here} of the optimizer, and was in group {group} when the state was saved",
                    one.spec.name
                ))
                .with_remedy(as_saved));
            }
            if !is_kept {
                return Ok(None);
            }
            let tensors = fresh(rules[group], &one.tensor)?;
            for (field, tensor) in rules[group].fields().iter().zip(&tensors) {
                let (name, shape) = (format!("{prefix}.{}.{field}", one.spec.name), shape(tensor, &one.spec));
                let elements = reader.tensor(&name, shim::dtype(tensor.kind())?, &shape)?;
                tensors::write_elements(tensor, &elements)
                    .map_err(|error| changed(one).with_source(error))?;
            }
            Ok(Some(tensors))
        };
        let moments = self.parameters.iter().zip(&self.groups).map(moments).collect::<Result<Vec<_>>>()?;
        Ok(OptimizerState { rules, moments })
    }

    /// Goes on from what [`read`](Self::read) has given: by its rules, too, as PyTorch's `load_state_dict` does.
    pub(crate) fn load(&mut self, OptimizerState { rules, moments }: OptimizerState) {
        for (rule, here) in rules.iter().zip(&self.rules).filter(|(rule, here)| rule != here) {
            phalanx::warn(format_args!(
                "the optimizer goes on by the rule with which the state was saved, {rule:?}, and not by its own, {here:?}; to go on by another \
                 one, call Optimizer::set_rule or set_group_rule after loading"
            ));
        }
        (self.rules, self.moments) = (rules, moments);
    }
}

/// What an [`Optimizer`] continues from.
pub(crate) struct OptimizerState {
    rules: Vec<Rule>,
    /// As in the optimizer.
    moments: Vec<Option<Vec<Tensor>>>,
}

/// An error for a learning rate by which no training goes, such as that of a schedule that divides by zero: all parameters would become NaN.
fn check_rate(learning_rate: f64) -> Result<()> {
    if learning_rate.is_finite() && learning_rate >= 0.0 {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("Optimizer::step with the learning rate {learning_rate}"))
        .with_remedy("give it one that is finite and not negative"))
}

/// Fields, for people.
fn listed(fields: &[&str]) -> String {
    match fields {
        [] => "nothing".to_owned(),
        fields => fields.join(", "),
    }
}

/// Whether parameters share memory of a device. A kernel there changes all tensors of a call at once, and on processors one after the other.
fn must_be_one_by_one(parameters: &[Named]) -> bool {
    let place = |one: &Named| {
        let start = one.tensor.data_ptr() as usize;
        start..start + one.tensor.numel() * one.tensor.kind().elt_size_in_bytes()
    };
    let on_device = parameters.iter().filter(|one| !shim::is_here(&one.tensor));
    let mut places: Vec<_> = on_device.map(place).filter(|place| !place.is_empty()).collect();
    places.sort_unstable_by_key(|place| place.start);
    places.windows(2).any(|pair| pair[1].start < pair[0].end)
}

/// The parameters of one group and type, with what belongs to them: kernels for GPUs take no others in one call.
struct Batch {
    parameters: Vec<Tensor>,
    gradients: Vec<Tensor>,
    /// A list for each of [`Rule::fields`].
    moments: Vec<Vec<Tensor>>,
}

impl Batch {
    fn new(rule: Rule) -> Self {
        let moments = rule.fields().iter().map(|_| Vec::new()).collect();
        Self { parameters: Vec::new(), gradients: Vec::new(), moments }
    }

    fn step(self, rule: Rule, learning_rate: f64) -> Result<()> {
        let Self { parameters, gradients, moments } = self;
        let mut moments = moments.into_iter();
        match rule {
            Rule::AdamW { betas, epsilon, weight_decay } => {
                let mut next = || moments.next().unwrap_or_default();
                let (firsts, seconds, mut steps) = (next(), next(), next());
                steps.iter_mut().try_for_each(|step| step.f_add_scalar_(1.0).map(drop)).map_err(torch)?;
                let tensors = AdamWTensors { parameters, gradients, firsts, seconds, steps };
                shim::fused_adamw(&tensors, learning_rate, betas, weight_decay, epsilon)
            }
            Rule::Sgd { momentum, weight_decay, nesterov } => {
                // A first velocity is zero: without dampening that is what PyTorch's first step makes of it.
                let settings = SgdSettings { rate: learning_rate, momentum, weight_decay, nesterov };
                shim::fused_sgd(&parameters, &gradients, moments.next().as_deref(), settings)
            }
        }
    }
}

/// The error for a parameter that is not what it was.
fn changed(parameter: &Named) -> Error {
    Error::invalid_argument(format!(
        "parameter {}, its gradient and what the optimizer keeps of it are not all contiguous, on one device, and of one size and type: \
         it is {:?} {:?} on {:?} now",
        parameter.spec,
        parameter.tensor.kind(),
        parameter.tensor.size(),
        parameter.tensor.device()
    ))
    .with_remedy("after `set_data`, or a change of type or device, make a new Optimizer")
}

/// The shape of a moment: the parameter's, or none of a number.
fn shape(tensor: &Tensor, parameter: &ParameterSpec) -> Vec<usize> {
    if tensor.dim() == parameter.shape.len() { parameter.shape.clone() } else { Vec::new() }
}

/// The moments of a parameter that has had no gradient.
fn fresh(rule: Rule, parameter: &Tensor) -> Result<Vec<Tensor>> {
    let of = |field: &&str| match *field {
        "step" => Tensor::f_zeros([], (Kind::Float, parameter.device())),
        _ => Tensor::f_zeros(parameter.size(), (parameter.kind(), parameter.device())),
    };
    rule.fields().iter().map(of).collect::<std::result::Result<_, _>>().map_err(torch)
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer")
            .field("rules", &self.rules)
            .field("parameters", &self.parameters.len())
            .finish()
    }
}
