//! `Ddp`: every rank has the whole model and its own part of the data.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions, states_identical, verify_state};
use phalanx::state::{StateReader, StateWriter};
use phalanx::{Caller, Communicator, Error, Rank, Result, adapter};

use crate::hook::Hook;
use crate::optimizer::OptimizerState;
use crate::sink::Sink;
use crate::variables::{self, Named, specs, take_over};

/// The last parts of the names under which candle's batch norm keeps its statistics.
const UNTRAINED: [&str; 2] = ["running_mean", "running_var"];

/// The variables of a model of which every rank has a replica, and whose gradients are averaged over all ranks.
///
/// All ranks make the same calls in the same order: [`forward`](Self::forward), [`backward`](Self::backward), the optimizer's step.
pub struct Ddp {
    map: VarMap,
    variables: Vec<Named>,
    /// Those that are not trained.
    buffers: Vec<Named>,
    sink: Arc<Sink>,
    group: JoinGroup,
}

impl Ddp {
    /// Checks that the variables of `map` have the same names, shapes and types on every rank, and gives every rank rank 0's values.
    /// Make the whole model before it.
    ///
    /// # Errors
    /// On every rank, and it ends the group: if the models differ (it names the first variable that does), or nothing is trained.
    /// Trained are all floats but the statistics of candle's batch norms.
    pub fn new(map: &VarMap, group: impl Into<JoinGroup>, options: ReducerOptions) -> Result<Self> {
        let group = group.into();
        let prepared = || {
            let variables = variables::all(map)?;
            let call = group.in_call(Caller::DdpNew);
            verify_state(&call, specs(&variables))?;
            let is_trained = |one: &Named| {
                let last = one.spec.name.rsplit('.').next().unwrap_or_default();
                one.var.dtype().is_float() && !UNTRAINED.contains(&last)
            };
            let (parameters, buffers) = variables.iter().cloned().partition::<Vec<_>, _>(is_trained);
            let reducer = Reducer::new(Arc::new(group.clone()), specs(&parameters), options)?;
            take_over(&call, Rank::MAIN, &variables)?;
            let sink = Arc::new(Sink::new(reducer, parameters, group.rank()));
            Ok(Self { map: map.clone(), variables, buffers, sink, group: group.clone() })
        };
        prepared().inspect_err(|error: &Error| group.abort(error.clone()))
    }

    /// Runs `pass`, which makes the model from the given `VarBuilder` and computes a loss for the next backward pass. Parameters of that
    /// model have hooks: their gradients are sent while backward still runs. Each pass copies the parameters once.
    ///
    /// Without this, for a model of `VarBuilder::from_varmap`, averaging begins after backward. Such a model is also the one for
    /// evaluations. A weight that several layers share has one hook.
    pub fn forward<T>(&self, pass: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<T>) -> Result<T> {
        let number = self.sink.forward()?;
        let hooked = self.sink.parameters.iter().enumerate().map(|(index, one)| {
            let hook = Hook { sink: self.sink.clone(), pass: number, index };
            Ok((one.spec.name.clone(), one.var.apply_op1(hook)?))
        });
        let buffers = self.buffers.iter().map(|one| Ok((one.spec.name.clone(), one.var.as_tensor().clone())));
        let tensors = hooked.chain(buffers).collect::<candle_core::Result<HashMap<_, _>>>();
        let first = &self.sink.parameters[0].var; // A reducer has one.
        let builder = |tensors| {
            VarBuilder::from_backend(Box::new(Pass(tensors)), first.dtype(), first.device().clone())
        };
        tensors.and_then(|tensors| pass(builder(tensors))).map_err(Error::other)
    }

    /// Runs backward from `loss`, and returns the averages over all ranks, those of [`backward_no_sync`](Self::backward_no_sync) since
    /// the last call in them.
    ///
    /// # Errors
    /// On every rank, and it ends the group: if a rank fails, or a parameter got no gradient and
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters) is not set.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        self.average(loss, None)
    }

    /// As [`backward`](Self::backward), with ranks that have unequal numbers of samples: `loss` is the mean over those of this rank, and
    /// `weight` is their number, 0 if the pass is only for show. The result is that of one process with the whole batch.
    pub fn backward_weighted(&mut self, loss: &Tensor, weight: f64) -> Result<GradStore> {
        self.average(loss, Some(weight))
    }

    /// Adds up the gradients of `loss` on this rank, for the next [`backward`](Self::backward). This is PyTorch's `no_sync`.
    pub fn backward_no_sync(&mut self, loss: &Tensor) -> Result<()> {
        self.check_complete()?;
        self.sink.hold(loss, None)
    }

    /// As [`backward_no_sync`](Self::backward_no_sync), for the next [`backward_weighted`](Self::backward_weighted).
    pub fn backward_no_sync_weighted(&mut self, loss: &Tensor, weight: f64) -> Result<()> {
        self.check_complete()?;
        self.sink.hold(loss, Some(weight))
    }

    /// Drops the gradients of passes without communication: those that an epoch leaves over. All ranks call it in the same place.
    pub fn drop_accumulated(&self) {
        self.sink.forget();
    }

    fn average(&self, loss: &Tensor, weight: Option<f64>) -> Result<GradStore> {
        self.check_complete()?;
        self.group.step()?;
        self.sink.average(loss, weight, self.group.average_scale(weight.is_some()))
    }

    /// An error if the map has a variable that `new` did not see: it would be each rank's own.
    fn check_complete(&self) -> Result<()> {
        self.sink.call(|| {
            let (now, then) = (variables::all(&self.map)?.len(), self.variables.len());
            if now == then {
                return Ok(());
            }
            let cause = format!("the VarMap has {now} variables, and had {then} when Ddp::new was called");
            Err(Error::invalid_argument(cause).with_remedy("make the whole model before Ddp::new"))
        })
    }

    /// Scales averaged `gradients` so that their norm, as one vector, is at most `max_norm`; returns the norm before. If that is not
    /// finite, they are left alone, on every rank alike. This is `torch.nn.utils.clip_grad_norm_`.
    pub fn clip_grad_norm(&self, gradients: &mut GradStore, max_norm: f64) -> Result<f64> {
        // An error may be this rank's alone: the others go on, and would wait for it.
        self.sink.call(|| {
            adapter::check_max_norm(max_norm)?;
            let square = |one: &Tensor| one.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>();
            let present = self.sink.parameters.iter().filter_map(|one| gradients.get(&one.var));
            let squares =
                present.map(square).collect::<candle_core::Result<Vec<_>>>().map_err(Error::other)?;
            let norm = squares.iter().sum::<f64>().sqrt();
            if let Some(factor) = adapter::clip_factor(norm, max_norm) {
                for one in &self.sink.parameters {
                    let Some(gradient) = gradients.remove(&one.var) else { continue };
                    gradients.insert(&one.var, (gradient * factor).map_err(Error::other)?);
                }
            }
            Ok(norm)
        })
    }

    /// Whether the parameters of all replicas are the same, bit for bit. All ranks call it, and get the same answer.
    pub fn replicas_identical(&self) -> Result<bool> {
        let call = self.group.in_call(Caller::DdpReplicasIdentical);
        self.sink.call(|| {
            let values = self.sink.parameters.iter().map(Named::bytes).collect::<Result<Vec<_>>>()?;
            states_identical(&call, values.iter().map(Vec::as_slice))
        })
    }

    /// Takes over rank 0's values of variables that are not trained, such as the statistics of batch norms, before an evaluation or a
    /// checkpoint. All ranks call it together.
    pub fn broadcast_buffers(&self) -> Result<()> {
        let group = self.group.in_call(Caller::DdpEvaluate);
        self.sink.call(|| take_over(&group, Rank::MAIN, &self.buffers))
    }

    /// Runs `body`, in which ranks may have unequal numbers of batches: one without data answers the others' collectives. Afterwards all
    /// have the model and the optimizer's state of a rank that took every step. All ranks call it together.
    pub fn join<T, O: OptimizerState>(
        &mut self,
        optimizer: &mut O,
        options: JoinOptions,
        body: impl FnOnce(&mut Self, &mut O) -> Result<T>,
    ) -> Result<T> {
        let group = self.group.clone();
        let joined = group.join(options, || body(self, optimizer))?;
        if joined.uneven {
            self.sink.adopt(joined.last)?;
            let call = group.in_call(Caller::Join);
            self.sink.call(|| take_over(&call, joined.last, &self.with_optimizer(optimizer)?))?;
        }
        Ok(joined.value)
    }

    /// Saves the variables and the optimizer's state, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save). It has no
    /// collectives.
    ///
    /// # Errors
    /// If gradients of [`backward_no_sync`](Self::backward_no_sync) are held, which the saved state would lack.
    pub fn save(&self, optimizer: &impl OptimizerState, to: &mut impl StateWriter) -> Result<()> {
        if self.sink.holds() {
            let cause =
                "a state was to be saved in the middle of a step: gradients of backward_no_sync are held";
            let remedy = "save before the first backward_no_sync of a step, or call drop_accumulated";
            return Err(Error::invalid_argument(cause).with_remedy(remedy));
        }
        let state = self.with_optimizer(optimizer)?;
        to.value(CONTENTS, &specs(&state))?;
        state
            .iter()
            .try_for_each(|one| to.tensor(&one.spec.name, one.spec.dtype, &one.spec.shape, &one.bytes()?))
    }

    /// Goes on from a saved state, the same on every rank. Gradients that are held are dropped.
    ///
    /// # Errors
    /// If it is that of another model or optimizer; it names the first difference, and nothing has changed.
    pub fn load(&self, optimizer: &mut impl OptimizerState, from: &impl StateReader) -> Result<()> {
        let state = self.with_optimizer(optimizer)?;
        let (here, there) = (specs(&state), from.value::<Vec<ParameterSpec>>(CONTENTS)?);
        let count = here.len().max(there.len());
        if let Some(index) = (0..count).find(|&index| here.get(index) != there.get(index)) {
            let side = |all: &[ParameterSpec]| all.get(index).map_or("none".to_owned(), ToString::to_string);
            let cause =
                format!("tensor {index} is {} in the saved state and {} here", side(&there), side(&here));
            let remedy = "load it into the model and the optimizer that were saved";
            return Err(Error::mismatch(cause).with_remedy(remedy));
        }
        let values = here.iter().map(|spec| from.tensor(&spec.name, spec.dtype, &spec.shape));
        let values = values.collect::<Result<Vec<_>>>()?;
        self.sink.forget();
        state.iter().zip(&values).try_for_each(|(one, bytes)| one.write(bytes))
    }

    fn with_optimizer(&self, optimizer: &impl OptimizerState) -> Result<Vec<Named>> {
        let model = self.variables.iter().map(|one| (format!("model.{}", one.spec.name), one.var.clone()));
        let kept = optimizer.state().into_iter().map(|(name, var)| (format!("optimizer.{name}"), var));
        model.chain(kept).map(|(name, var)| Named::new(name, var)).collect()
    }
}

/// The part of a saved state that says what is in it.
const CONTENTS: &str = "candle.variables";

/// The tensors of a pass, each in its own type, as a `VarMap` gives its variables. `VarBuilder::from_tensors` would give all in the builder's.
struct Pass(HashMap<String, Tensor>);

impl SimpleBackend for Pass {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            bail!("{name} has the shape {:?}, and {shape:?} is asked for", tensor.shape())
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        match self.0.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => bail!("there is no variable {name}: make the whole model before Ddp::new"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}
