//! The receiver of gradients: they go to the reducer, or are added up until the next averaged pass.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use phalanx::reducer::{HookedReducer, Reducer, StepWeight};
use phalanx::{Error, Rank, Result};

use crate::variables::Named;

pub(crate) struct Sink {
    /// In the reducer's order.
    pub parameters: Vec<Named>,
    rank: Rank,
    reducer: HookedReducer<Gradients>,
}

/// What a backward pass does with gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mode {
    /// They go to the reducer at once.
    Average,
    /// They are added up on this rank.
    Hold,
}

/// What is known of gradients on their way.
#[derive(Default)]
struct Gradients {
    /// None outside of the `Ddp`'s own backward passes.
    mode: Option<Mode>,
    /// The number of the newest forward pass.
    pass: u64,
    /// For each parameter, the sum of the passes that are not averaged yet.
    held: Vec<Option<Tensor>>,
    /// The weight of the running pass, if it has one.
    weight: Option<f64>,
    /// The weights of this step's passes.
    step: StepWeight,
}

impl Sink {
    pub fn new(reducer: Reducer, parameters: Vec<Named>, rank: Rank) -> Self {
        let gradients = Gradients { held: vec![None; parameters.len()], ..Gradients::default() };
        Self { parameters, rank, reducer: HookedReducer::new(reducer, gradients) }
    }

    /// Runs `call`, whose error ends the group.
    pub fn call<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.reducer.attempt(|_, _| call())
    }

    /// The number of the forward pass that begins.
    pub fn forward(&self) -> Result<u64> {
        self.reducer.attempt(|_, gradients| {
            gradients.pass += 1;
            Ok(gradients.pass)
        })
    }

    /// Takes over the reducer of rank `root`. What is held belongs to no step.
    pub fn adopt(&self, root: Rank) -> Result<()> {
        self.reducer.attempt(|reducer, gradients| {
            gradients.forget();
            reducer.adopt(root)
        })
    }

    /// Whether gradients are held for a step.
    pub fn holds(&self) -> bool {
        self.reducer.with_state(|gradients| gradients.step != StepWeight::Nothing)
    }

    /// Drops what is held.
    pub fn forget(&self) {
        self.reducer.with_state(Gradients::forget);
    }

    /// Adds up the gradients of `loss` on this rank.
    pub fn hold(&self, loss: &Tensor, weight: Option<f64>) -> Result<()> {
        let store = self.backward(Mode::Hold, loss, weight)?;
        self.reducer.attempt(|_, gradients| {
            for (one, held) in self.parameters.iter().zip(&mut gradients.held) {
                // Those of a pass of weight 0 do not count.
                let gradient = store.get(&one.var).filter(|_| weight != Some(0.0));
                *held = sum(held.take(), gradient)?;
            }
            Ok(())
        })
    }

    /// Averages the gradients of `loss` and those that are held, and multiplies them by `scale`.
    pub fn average(&self, loss: &Tensor, weight: Option<f64>, scale: f64) -> Result<GradStore> {
        let mut store = self.backward(Mode::Average, loss, weight)?;
        self.reducer.attempt(|reducer, gradients| {
            for (index, one) in self.parameters.iter().enumerate() {
                // What no hook gave. A parameter that is used with its hook and without is an error of the reducer.
                gradients.give(reducer, index, store.get(&one.var))?;
            }
            gradients.step = StepWeight::Nothing;
            Ok(())
        })?;
        self.reducer.finish(|reducer, _| {
            for (index, one) in self.parameters.iter().enumerate() {
                // A parameter without a gradient on any rank has none here, and no optimizer moves it.
                store.remove(&one.var);
                if let Some(bytes) = reducer.gradient(index)? {
                    let average = one.tensor(bytes)?;
                    let scaled = if scale == 1.0 { Ok(average) } else { average * scale };
                    store.insert(&one.var, scaled.map_err(Error::other)?);
                }
            }
            Ok(store)
        })
    }

    /// Runs backward from `loss`, times the weight if it counts.
    fn backward(&self, mode: Mode, loss: &Tensor, weight: Option<f64>) -> Result<GradStore> {
        self.reducer.attempt(|reducer, gradients| {
            gradients.step = gradients.step.with(weight, self.rank, reducer.parameters())?;
            // Its gradient would begin as the weight, rounded to that type.
            if weight.is_some() && matches!(loss.dtype(), DType::F16 | DType::BF16) {
                let cause = format!("a loss of type {:?} is too narrow for weights", loss.dtype());
                return Err(Error::invalid_argument(cause)
                    .with_remedy("compute it in f32: `loss.to_dtype(DType::F32)`"));
            }
            (gradients.mode, gradients.weight) = (Some(mode), weight);
            if mode == Mode::Average { gradients.start(reducer) } else { Ok(()) }
        })?;
        let scaled = match weight.filter(|&weight| weight != 0.0) {
            Some(weight) => loss.affine(weight, 0.0),
            None => Ok(loss.clone()),
        };
        let outcome = scaled.and_then(|loss| loss.backward()).map_err(Error::other);
        self.reducer.attempt(|_, gradients| {
            gradients.mode = None;
            outcome
        })
    }

    /// Takes the gradient that a hook got. Returns what is left for candle.
    pub fn hooked(&self, pass: u64, index: usize, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.reducer.attempt(|reducer, gradients| {
            if gradients.mode.is_none() || pass != gradients.pass {
                let name = &self.parameters[index].spec;
                let cause = format!("parameter {name} got a gradient that is not of the newest forward pass's ddp.backward");
                let remedy = "call ddp.backward(&loss), not loss.backward(), after each Ddp::forward, which makes the model anew";
                return Err(Error::invalid_argument(cause).with_remedy(remedy));
            }
            match gradients.mode {
                Some(Mode::Average) => gradients.give(reducer, index, Some(gradient)).map(|()| None),
                Some(Mode::Hold) | None => Ok(Some(gradient.clone())),
            }
        })
    }
}

impl Gradients {
    fn forget(&mut self) {
        self.held.fill(None);
        self.step = StepWeight::Nothing;
    }

    fn start(&mut self, reducer: &mut Reducer) -> Result<()> {
        // What a static graph does not use here.
        let unused = |index: usize, memory: &mut [u8]| {
            memory.fill(0);
            self.held[index].take().map_or(Ok(()), |sum| write(&sum, memory))
        };
        match self.step.sum() {
            Some(sum) => reducer.start_weighted_with(sum, unused),
            None => reducer.start_with(unused),
        }
    }

    /// Gives the reducer the parameter's gradient of this pass with what is held, if there is either.
    fn give(&mut self, reducer: &mut Reducer, index: usize, gradient: Option<&Tensor>) -> Result<()> {
        let counts = self.weight != Some(0.0);
        match sum(self.held[index].take(), gradient.filter(|_| counts))? {
            Some(sum) => reducer.ready_with(index, |memory| write(&sum, memory)),
            None if gradient.is_some() => reducer.ready_void(index),
            None => Ok(()),
        }
    }
}

fn sum(held: Option<Tensor>, gradient: Option<&Tensor>) -> Result<Option<Tensor>> {
    match (held, gradient) {
        (Some(held), Some(gradient)) => (held + gradient).map(Some).map_err(Error::other),
        (held, gradient) => Ok(held.or(gradient.cloned())),
    }
}

fn write(tensor: &Tensor, mut memory: &mut [u8]) -> Result<()> {
    tensor.write_bytes(&mut memory).map_err(Error::other)
}
