//! libtorch's fused optimizers, with a state that can be saved and sent.

use std::fmt;

use phalanx::reducer::broadcast_bytes;
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Communicator, Error, Rank, Result};
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
}

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
    rule: Rule,
    parameters: Vec<Named>,
    /// For each parameter the tensors of [`Rule::fields`], from its first gradient on.
    moments: Vec<Option<Vec<Tensor>>>,
}

impl Optimizer {
    /// An optimizer of the parameters that need a gradient now. One that is made or unfrozen later is not trained by it:
    /// [`TrainState::step`](crate::TrainState::step) refuses that.
    ///
    /// # Errors
    /// If there is none, or one whose elements do not lie row by row, which the kernels ask for.
    pub fn new(store: &VarStore, rule: Rule) -> Result<Self> {
        let parameters = Inventory::of(&tensors::shared(store))?.parameters;
        if let Some(other) = parameters.iter().find(|one| !one.tensor.is_contiguous()) {
            return Err(Error::invalid_argument(format!("parameter {} is not contiguous", other.spec))
                .with_remedy("make it with `contiguous`, or use an optimizer of tch"));
        }
        let moments = parameters.iter().map(|_| None).collect();
        Ok(Self { rule, parameters, moments })
    }

    /// How it changes parameters.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// Goes on by another rule of the same kind, with the state that there is. All ranks call it in the same step. A checkpoint has the new
    /// rule.
    ///
    /// # Errors
    /// If it needs another state, as AdamW does after SGD, or momentum after none.
    #[doc(alias = "param_groups")]
    pub fn set_rule(&mut self, rule: Rule) -> Result<()> {
        if rule.fields() != self.rule.fields() {
            return Err(Error::invalid_argument(format!(
                "Optimizer::set_rule: {rule:?} keeps {} of each parameter, and {:?} keeps {}",
                listed(rule.fields()),
                self.rule,
                listed(self.rule.fields())
            ))
            .with_remedy("make a new Optimizer"));
        }
        self.rule = rule;
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
    /// the kernels look at none of it. Nothing is changed then. Else of libtorch.
    pub fn step(&mut self, learning_rate: f64) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let mut batches: Vec<(Kind, Batch)> = Vec::new();
        let is_one_by_one = must_be_one_by_one(&self.parameters);
        for (parameter, kept) in self.parameters.iter().zip(&mut self.moments) {
            let gradient = parameter.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            let kept = match kept {
                Some(kept) => kept,
                None => kept.insert(fresh(self.rule, &parameter.tensor)?),
            };
            let gradient = gradient.f_contiguous().map_err(torch)?;
            let alike = self.rule.fields().iter().zip(kept.iter()).filter(|(field, _)| **field != "step");
            let alike: Vec<&Tensor> = alike.map(|(_, tensor)| tensor).chain([&gradient]).collect();
            if !shim::are_alike(&parameter.tensor, &alike) {
                return Err(changed(parameter));
            }
            let kind = parameter.tensor.kind();
            let place = batches.iter().position(|(other, _)| *other == kind && !is_one_by_one);
            let place = place.unwrap_or(batches.len());
            if place == batches.len() {
                batches.push((kind, Batch::new(self.rule)));
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
        batches.into_iter().try_for_each(|(_, batch)| batch.step(self.rule, learning_rate))
    }

    /// An error if a trainable one of `variables` has a gradient, and this optimizer was made without it.
    pub(crate) fn check_trains(&self, variables: &Shared) -> Result<()> {
        tensors::check_trained(variables, &self.parameters)
    }

    /// Takes over the state of rank `root`.
    pub(crate) fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        let mine: Vec<u8> = self.moments.iter().map(|kept| u8::from(kept.is_some())).collect();
        let theirs = broadcast_bytes(group, root, &mine, mine.len())?;
        let mut tensors = Vec::new();
        for ((parameter, kept), &is_kept) in
            self.parameters.iter().zip(&mut self.moments).zip(theirs.as_bytes())
        {
            match (is_kept != 0, kept.is_some()) {
                (true, false) => *kept = Some(fresh(self.rule, &parameter.tensor)?),
                (false, true) => *kept = None,
                (true, true) | (false, false) => {}
            }
            tensors.extend(kept.iter().flatten().map(Tensor::shallow_clone));
        }
        tensors::from_rank(group, root, &tensors)
    }

    /// Saves the rule and the state behind `prefix`: for each parameter whether anything is kept of it. One that has had no gradient has
    /// nothing.
    pub(crate) fn save(&self, writer: &mut impl StateWriter, prefix: &str) -> Result<()> {
        let each = self.parameters.iter().zip(&self.moments);
        let each: Vec<(&str, bool)> =
            each.map(|(one, kept)| (one.spec.name.as_str(), kept.is_some())).collect();
        writer.value(prefix, &(self.rule, each))?;
        for (Named { spec, .. }, tensors) in self.kept() {
            for (field, tensor) in self.rule.fields().iter().zip(tensors) {
                let bytes = tensors::copy(tensor)?;
                let (name, shape) = (format!("{prefix}.{}.{field}", spec.name), shape(tensor, spec));
                writer.owned(&name, shim::dtype(tensor.kind())?, &shape, bytes)?;
            }
        }
        Ok(())
    }

    /// The state behind `prefix`, for [`load`](Self::load): nothing is changed yet.
    pub(crate) fn read(&self, reader: &impl StateReader, prefix: &str) -> Result<OptimizerState> {
        let (rule, saved): (Rule, Vec<(String, bool)>) = reader.value(prefix)?;
        if rule.fields() != self.rule.fields() {
            return Err(Error::mismatch(format!(
                "the state is that of another optimizer: {rule:?}, which keeps {} of each parameter; here it is {:?}, which needs {}",
                listed(rule.fields()),
                self.rule,
                listed(self.rule.fields())
            ))
            .with_remedy("make the optimizer as it was made when the state was saved"));
        }
        let is_saved = |one: &&Named| saved.iter().any(|(name, _)| *name == one.spec.name);
        let is_here = |name: &str| self.parameters.iter().any(|one| one.spec.name == name);
        let lacks = self.parameters.iter().find(|one| !is_saved(one)).map(|one| {
            format!("the optimizer's state has none for parameter `{}`: it was frozen, or no parameter, when the state was saved", one.spec.name)
        });
        let foreign = saved.iter().find(|(name, _)| !is_here(name)).map(|(name, _)| {
            format!(
                "the optimizer's state is for parameter `{name}`, which is not among those of this optimizer"
            )
        });
        if let Some(cause) = foreign.or(lacks) {
            return Err(Error::mismatch(cause).with_remedy(
                "make the model as it was when the state was saved, with the same parameters frozen",
            ));
        }
        let of = |parameter: &Named| {
            let tensors = fresh(rule, &parameter.tensor)?;
            for (field, tensor) in rule.fields().iter().zip(&tensors) {
                let (name, shape) =
                    (format!("{prefix}.{}.{field}", parameter.spec.name), shape(tensor, &parameter.spec));
                let elements = reader.tensor(&name, shim::dtype(tensor.kind())?, &shape)?;
                tensors::write_elements(tensor, &elements)
                    .map_err(|error| changed(parameter).with_source(error))?;
            }
            Ok(tensors)
        };
        let is_kept =
            |parameter: &Named| saved.iter().any(|(name, kept)| *kept && *name == parameter.spec.name);
        let moments = self.parameters.iter().map(|one| is_kept(one).then(|| of(one)).transpose());
        Ok(OptimizerState { rule, moments: moments.collect::<Result<_>>()? })
    }

    /// Goes on from what [`read`](Self::read) has given: by its rule, too, as PyTorch's `load_state_dict` does.
    pub(crate) fn load(&mut self, OptimizerState { rule, moments }: OptimizerState) {
        if rule != self.rule {
            phalanx::warn(format_args!(
                "the optimizer goes on by the rule with which the state was saved, {rule:?}, and not by its own, {:?}; to go on by another \
                 one, call Optimizer::set_rule after loading",
                self.rule
            ));
        }
        (self.rule, self.moments) = (rule, moments);
    }

    fn kept(&self) -> impl Iterator<Item = (&Named, &Vec<Tensor>)> {
        self.parameters.iter().zip(&self.moments).filter_map(|(one, kept)| Some((one, kept.as_ref()?)))
    }
}

/// What an [`Optimizer`] continues from.
pub(crate) struct OptimizerState {
    rule: Rule,
    /// As in the optimizer.
    moments: Vec<Option<Vec<Tensor>>>,
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

/// The parameters of one type, with what belongs to them: kernels for GPUs take no others in one call.
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
fn shape(tensor: &Tensor, parameter: &phalanx::reducer::ParameterSpec) -> Vec<usize> {
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
            .field("rule", &self.rule)
            .field("parameters", &self.parameters.len())
            .finish()
    }
}
