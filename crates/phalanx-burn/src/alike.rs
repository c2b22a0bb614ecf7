//! Whether the optimizers of all ranks have the same settings.
//!
//! Replicas whose optimizers differ drift apart, and no error would say so. Burn's optimizers do not show their settings. So a copy of each rank's
//! optimizer takes steps on the same model with small parameters, in the host's memory, and the ranks compare the parameters that result.
//! The gradients are of all sizes: betas show in ordinary ones, epsilon in small ones, and clipping in large ones.
//!
//! In the first step the ranks wait for each other, and compare the optimizers and the step's learning rates. A program may replace its optimizer later. So the
//! ranks compare again every [`WINDOW`] steps, in a collective for which no rank waits: its result is read in the next step. A model may have hundreds of
//! parameters, so each of these comparisons takes the next [`SAMPLE`] of them.

use std::collections::HashSet;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, TensorData};
use phalanx::reducer::broadcast_bytes;
use phalanx::{Buffer, Communicator, Error, Rank, ReduceOp, Result, Work, WorldSize};

use crate::names::Names;
use crate::optimizer::{OptimizerState, on_small};
use crate::parameters::Parameter;
use crate::{lr, read_back};

/// The elements of a parameter, and their gradients in each step. A parameter without dimensions has the first alone.
const ELEMENTS: [f32; 2] = [1.0, -0.5];
/// The steps that a copy of an optimizer takes.
pub(crate) const STEPS: usize = 5;
const GRADIENTS: [[f32; 2]; STEPS] = [[1.0, 1e-6], [-0.5, 3e-6], [0.1, -2e-6], [1e-2, 1e-6], [1e8, 1e6]];
const RATE: f64 = 1.0;
/// Processors of several kinds may round in other ways.
const TOLERANCE: f32 = 2e-6;
/// Learning rates are divided by this before they are compared: they are small, and [`TOLERANCE`] is for numbers near 1.
const RATE_UNIT: f64 = 1e-3;
/// The steps after which the ranks compare again: a prime number, so that it comes to each of several optimizers that step in turns, as those of a
/// generator and a discriminator. After an even number of steps it would always come to the first of two.
pub(crate) const WINDOW: usize = 31;
/// The most parameters that are compared together after the first step: of each an optimizer takes several steps.
const SAMPLE: usize = 32;
/// More than what processors of several kinds round in other ways in many steps, of 1 or of what is larger.
const DRIFT: f32 = 1e-4;
/// In types of 16 bits one rounding is more than that. So many epsilons of the type are added, of the parameter.
const ROUNDINGS: f32 = 8.0;
/// The most bytes that a rank accepts from another.
const MAX_BYTES: usize = 1 << 28;

/// The comparisons of the optimizers that step one model.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Whether the ranks have found their optimizers alike. All ranks have the same value, except in a `join` in which some have no data.
    is_compared: bool,
    /// How many numbers the ranks compare of an optimizer; 0 if it cannot be compared.
    numbers: usize,
    /// Whether no later step compares: the group has changed. Ranks may have learned that in different steps, and would compare in different steps.
    is_stopped: bool,
    /// The steps, or commits, since the last comparison.
    steps: usize,
    /// The comparisons after the first step.
    windows: usize,
    /// Whether a warning has said that an optimizer is not compared.
    has_warned: bool,
    /// The running comparison: this rank's numbers, and the all_reduce of the minima of all ranks' numbers and of their negatives.
    told: Option<(Vec<f32>, Work)>,
}

impl Watch {
    /// Whether the ranks have found their optimizers alike.
    pub fn is_compared(&self) -> bool {
        self.is_compared
    }

    /// Whether the ranks compare in the next [step](Self::step), if they can.
    pub fn is_due(&self) -> bool {
        self.steps + 1 == WINDOW
    }

    /// Lets the ranks compare in no later step. They still compare in the [first](Self::compare) one, if they have not yet.
    pub fn stop(&mut self) {
        (self.told, self.is_stopped) = (None, true);
    }

    /// An error on every rank unless all ranks' optimizers change `parameters` of `model` alike, and these `rates` of their step are the same, if it is
    /// one. The models are the same already, or have the same parameters but for their lengths. All ranks of `group` call it together, after an
    /// error once more.
    ///
    /// Optimizers that panic with small parameters, on every rank, are not compared, and a warning says so once.
    pub fn compare<M: Module>(
        &mut self,
        optimizer: &ModuleOptimizer,
        (model, parameters): (&M, &[Parameter]),
        rates: Option<&ModuleLearningRate>,
        group: &dyn Communicator,
    ) -> Result<()> {
        *self = Self { is_stopped: self.is_stopped, has_warned: self.has_warned, ..Self::default() };
        if group.world_size() != WorldSize::ONE {
            // The others wait for this rank.
            let made = self
                .made(optimizer, (model, parameters), group.rank())
                .inspect_err(|error| group.abort(error.clone()))?;
            let is_unknown = matches!(made[..], [only] if only.is_nan());
            self.numbers = if is_unknown { 0 } else { made.len() };
            let rates = rates.map(|rates| (rates.base(), lr::of_each(rates, parameters)));
            let (base, rates) = rates.map_or((f64::NAN, Vec::new()), |(base, each)| {
                (base, each.map(|rate| (rate / RATE_UNIT) as f32).collect())
            });
            if let Some(rank) = first_other(&[&made[..], &rates].concat(), alike, group)? {
                return Err(match first_other(&made, alike, group)? {
                    Some(rank) => differs(rank),
                    None => other_rate(base, rank, group)?,
                });
            }
        }
        self.is_compared = true;
        Ok(())
    }

    /// Counts a step, or a commit, after the one in which the ranks have [compared](Self::compare), and compares again when it is due. All ranks of `group`
    /// call it together.
    ///
    /// # Errors
    /// On every rank, if the comparison of the step before has found a difference.
    pub fn step<M: Module>(
        &mut self,
        optimizer: &ModuleOptimizer,
        (model, parameters): (&M, &[Parameter]),
        group: &dyn Communicator,
    ) -> Result<()> {
        // Counted also where nothing is compared, as in a world of one: see `is_due`.
        self.steps = self.steps % WINDOW + 1;
        if self.is_stopped || self.numbers == 0 {
            return Ok(());
        }
        if let Some((own, bounds)) = self.told.take() {
            // If the group has failed, the next exchange says so.
            let Ok(bounds) = bounds.wait() else { return Ok(()) };
            let (bounds, _) = bounds.as_slice::<f32>()?.as_chunks::<2>();
            if bounds.iter().any(|[least, most]| !is_near((least, &-most), TOLERANCE))
                && let Some(rank) = first_other(&own, alike, group)?
            {
                return Err(differs(rank));
            }
            if bounds.iter().all(|[least, _]| *least == f32::MAX) {
                // Every rank's optimizer has panicked, as it would again.
                self.numbers = 0;
            }
        }
        if self.steps == WINDOW {
            let sample = self.sample(parameters);
            let mut made = self.made(optimizer, (model, &sample), group.rank())?;
            made.resize(self.numbers, f32::NAN);
            let finite = |number: &f32| if number.is_finite() { *number } else { f32::MAX };
            let bounds: Vec<f32> = made.iter().map(finite).flat_map(|number| [number, -number]).collect();
            let told = group.all_reduce_async(Buffer::from_slice(&bounds), ReduceOp::Min);
            self.told = told.ok().map(|bounds| (made, bounds));
        }
        Ok(())
    }

    /// What the optimizer of this `rank` makes of small parameters in place of the model's. If it panics with them, a single NaN, as any other one that
    /// does.
    pub fn made<M: Module>(
        &mut self,
        optimizer: &ModuleOptimizer,
        (model, parameters): (&M, &[Parameter]),
        rank: Rank,
    ) -> Result<Vec<f32>> {
        let made = on_small(|| trained(optimizer, (model, parameters)))?;
        if made.is_none() && !std::mem::replace(&mut self.has_warned, true) && rank.is_main() {
            phalanx::warn(
                "the ranks' optimizers are not compared, because this one has panicked with parameters of two elements; the panic has no other effect. \
                 Give every rank the same optimizer with the same settings",
            );
        }
        Ok(made.unwrap_or_else(|| vec![f32::NAN]))
    }

    /// The parameters that are compared in this window, the same on every rank.
    fn sample(&mut self, parameters: &[Parameter]) -> Vec<Parameter> {
        // Of optimizers that step in turns, each is compared in every second window, or every sixth. It comes to all samples, because their number is
        // odd, and each round of them begins with another one.
        let turns = parameters.len().div_ceil(SAMPLE) | 1;
        let first = (self.windows + self.windows / turns) % turns;
        self.windows += 1;
        parameters.iter().skip(first).step_by(turns).cloned().collect()
    }
}

/// The first rank whose numbers are not near those of rank 0, as `are_near` finds them, on every rank. All ranks of `group` call it together.
pub(crate) fn first_other(
    own: &[f32],
    are_near: impl FnOnce(&[f32], &[f32]) -> bool,
    group: &dyn Communicator,
) -> Result<Option<Rank>> {
    if group.world_size() == WorldSize::ONE {
        return Ok(None);
    }
    let main = broadcast_bytes(group, Rank::MAIN, bytemuck::cast_slice(own), MAX_BYTES)
        .inspect_err(|error| group.abort(error.clone()))?;
    let main = main.as_bytes().chunks_exact(size_of::<f32>()).map(bytemuck::pod_read_unaligned::<f32>);
    let main: Vec<f32> = main.collect();
    let mine = if are_near(&main, own) { i64::MAX } else { i64::from(group.rank().get()) };
    let first = group.all_reduce_async(Buffer::from_slice(&[mine]), ReduceOp::Min)?.wait()?;
    let first = first.as_slice::<i64>()?.first().copied().and_then(|rank| u32::try_from(rank).ok());
    Ok(first.map(Rank::new))
}

/// The error for the optimizer of `rank`, which makes something else than rank 0's.
pub(crate) fn differs(rank: Rank) -> Error {
    Error::mismatch(format!(
        "the optimizer of rank {rank} changes parameters otherwise than that of rank 0: it is another one, or its settings differ, such as \
         betas, epsilon, decay, momentum or clipping"
    ))
    .with_peer(rank)
    .with_remedy("give every rank the same optimizer with the same settings")
}

/// The error for the learning rates of `rank`, which are others than rank 0's; of parameters without their own this rank's is `own`. All ranks of
/// `group` call it together.
fn other_rate(own: f64, rank: Rank, group: &dyn Communicator) -> Result<Error> {
    let of = |rank| -> Result<f64> {
        let rate = group.broadcast_async(Buffer::from_slice(&[own]), rank)?.wait()?;
        Ok(rate.as_slice::<f64>()?.first().copied().unwrap_or(f64::NAN))
    };
    let (main, other) = (of(Rank::MAIN)?, of(rank)?);
    let cause = match main == other {
        true => format!(
            "rank 0 and rank {rank} give a group of parameters different learning rates; their base rate is {main} on both"
        ),
        false => {
            format!(
                "the learning rates differ: the first one was {main} on rank 0, and {other} on rank {rank}"
            )
        }
    };
    Ok(Error::mismatch(cause)
        .with_peer(rank)
        .with_remedy("give every rank the same learning rates in each step"))
}

/// Whether two ranks' optimizers have [made] the same.
pub(crate) fn alike(one: &[f32], other: &[f32]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|pair| is_near(pair, TOLERANCE))
}

/// Whether two numbers differ by `tolerance` at most, of 1 or of what is larger.
pub(crate) fn is_near((one, other): (&f32, &f32), tolerance: f32) -> bool {
    match one.is_finite() && other.is_finite() {
        true => (one - other).abs() <= tolerance * one.abs().max(other.abs()).max(1.0),
        false => one.is_finite() == other.is_finite(),
    }
}

/// Whether elements of parameters that took the same steps differ by rounding alone, in a type with this `epsilon`.
pub(crate) fn has_not_drifted((one, other): (&f32, &f32), epsilon: f32) -> bool {
    let largest = one.abs().max(other.abs());
    let is_rounded = largest.is_finite() && (one - other).abs() <= ROUNDINGS * epsilon * largest;
    is_rounded || is_near((one, other), DRIFT)
}

/// What a new optimizer like `optimizer` makes of small parameters, after each of [`STEPS`] steps.
pub(crate) fn trained<M: Module>(
    optimizer: &ModuleOptimizer,
    (model, parameters): (&M, &[Parameter]),
) -> Result<Vec<f32>> {
    let ids: HashSet<ParamId> = parameters.iter().map(|parameter| parameter.id).collect();
    let (mut fresh, names) = (OptimizerState::empty().load(optimizer, parameters)?, Names::of(parameters));
    let mut small = model.clone().map(&mut Small(&ids));
    let mut values = Values { ids: &ids, read: Ok(Vec::new()) };
    for gradient in GRADIENTS {
        let mut taught = Taught { ids: &ids, gradient, gradients: GradientsParams::new() };
        small.visit(&mut taught);
        small = names.step(&mut fresh, RATE, small, taught.gradients);
        small.visit(&mut values);
    }
    values.read
}

/// A tensor of these elements along the last dimension.
fn tensor<const D: usize>(elements: [f32; 2], device: &Device) -> Tensor<D> {
    let mut shape = [1; D];
    if let Some(side) = shape.last_mut() {
        *side = elements.len();
    }
    let values: Vec<f32> = elements.into_iter().take(shape.iter().product()).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Gives each of these parameters the [`ELEMENTS`]. All other tensors stay as they are: a model's clones share running state.
struct Small<'a>(&'a HashSet<ParamId>);

impl ModuleMapper for Small<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.0.contains(&param.id) {
            return param;
        }
        param.map(|_| tensor::<D>(ELEMENTS, &Device::flex().autodiff()).set_require_grad(true))
    }
}

/// Gives each of these parameters this gradient.
struct Taught<'a> {
    ids: &'a HashSet<ParamId>,
    gradient: [f32; 2],
    gradients: GradientsParams,
}

impl ModuleVisitor for Taught<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.contains(&param.id) {
            self.gradients.register(param.id, tensor::<D>(self.gradient, &Device::flex()));
        }
    }
}

/// Reads these parameters.
struct Values<'a> {
    ids: &'a HashSet<ParamId>,
    read: Result<Vec<f32>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(read) = &mut self.read else { return };
        if !self.ids.contains(&param.id) {
            return;
        }
        match read_back::data(param.val().detach()) {
            Ok(data) => read.extend(data.iter::<f32>()),
            Err(error) => self.read = Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(count: usize) -> Vec<Parameter> {
        let parameter =
            || Parameter { id: ParamId::new(), name: String::new(), shape: vec![2], dtype: DType::F32 };
        std::iter::repeat_with(parameter).take(count).collect()
    }

    #[test]
    fn later_comparisons_come_to_every_parameter_in_turns() {
        for count in [0, 1, SAMPLE, SAMPLE + 1, 10 * SAMPLE + 3] {
            let parameters = parameters(count);
            let (mut watch, mut seen) = (Watch::default(), HashSet::new());
            for _ in 0..count.div_ceil(SAMPLE) | 1 {
                let sample = watch.sample(&parameters);
                assert!(sample.len() <= SAMPLE, "{count}: {}", sample.len());
                seen.extend(sample.iter().map(|parameter| parameter.id));
            }
            assert_eq!(seen.len(), count);
        }
    }

    /// As those of a generator that steps after every five steps of its discriminator.
    #[test]
    fn each_of_several_optimizers_that_step_in_turns_is_compared_in_every_parameter() {
        for count in [SAMPLE + 1, 3 * SAMPLE, 5 * SAMPLE] {
            let parameters = parameters(count);
            for period in 2..=8 {
                let (mut watch, mut seen) = (Watch::default(), vec![HashSet::new(); period]);
                for window in 0..period * count {
                    let sample = watch.sample(&parameters);
                    seen[window % period].extend(sample.iter().map(|parameter| parameter.id));
                }
                assert!(seen.iter().all(|seen| seen.len() == count), "{count}: {period}");
            }
        }
    }
}
