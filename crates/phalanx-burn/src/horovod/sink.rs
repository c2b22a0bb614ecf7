//! What hooks deliver to: gradients are submitted by name, or added up first.

use std::sync::Arc;

use burn::tensor::{Bytes, DType as BurnDType, TensorData, bf16, f16};
use parking_lot::Mutex;
use phalanx::{DType, Element, Error, Result};
use phalanx_horovod::{Handle, Horovod, Reduction, Tensor};

use super::optimizer::DistributedOptions;
use crate::hook::GradientSink;
use crate::parameters::Parameter;
use crate::sink::Held;
use crate::tensor_bytes::{self, TensorBytes};

/// What happens to a gradient that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// It is submitted, with what was held for its parameter.
    Submit,
    /// It is added to what is held for its parameter.
    Hold,
    /// It is dropped: it came from another model's backward pass.
    Ignore,
}

/// One forward pass. It lives as long as its graph can still run backward.
pub(super) struct Pass(pub Arc<Sink>);

impl GradientSink for Pass {
    fn ready(&self, index: usize, gradient: TensorBytes<'_>) {
        let state = &mut *self.0.0.lock();
        // Backward cannot return an error: the call that runs it asks for the first one.
        if state.failure.is_none() {
            state.failure = state.ready(index, gradient).err();
        }
    }
}

pub(super) struct Sink(Mutex<SinkState>);

struct SinkState {
    hvd: Horovod,
    reduction: Reduction,
    parameters: Vec<Gradient>,
    delivery: Delivery,
    /// Are missing gradients submitted as zeros?
    zero_missing: bool,
    /// Of each group, how many gradients are not ready yet; nothing without groups.
    groups: Vec<usize>,
    flying: Vec<Flying>,
    failure: Option<Error>,
}

/// The gradient of a parameter.
struct Gradient {
    name: String,
    shape: Vec<usize>,
    burn_dtype: BurnDType,
    held: Held,
    group: Option<usize>,
    /// Ready, and waits for its group.
    waits: Option<Tensor>,
    /// It is on its way, or waits for its group.
    is_submitted: bool,
}

/// What was submitted: the parameters' indices, and the handle.
enum Flying {
    One(usize, Handle<Tensor>),
    Group(Vec<usize>, Handle<Vec<Tensor>>),
}

impl Sink {
    pub fn new(
        hvd: Horovod,
        parameters: &[Parameter],
        reduction: Reduction,
        options: &DistributedOptions,
    ) -> Result<Self> {
        let (members, sizes) = options.groups.of(parameters)?;
        let mut gradients = Vec::with_capacity(parameters.len());
        for (parameter, group) in parameters.iter().zip(members) {
            let dtype = tensor_bytes::dtype(parameter.dtype)?;
            gradients.push(Gradient {
                name: format!("{}.{}", options.name, parameter.name),
                shape: parameter.shape.clone(),
                burn_dtype: parameter.dtype,
                held: Held::new(dtype, parameter.shape.iter().product()),
                group,
                waits: None,
                is_submitted: false,
            });
        }
        let delivery = Delivery::Ignore;
        let state = SinkState {
            hvd,
            reduction,
            parameters: gradients,
            delivery,
            zero_missing: options.zero_missing_gradients,
            groups: sizes,
            flying: Vec::new(),
            failure: None,
        };
        Ok(Self(Mutex::new(state)))
    }

    pub fn set(&self, delivery: Delivery) {
        self.0.lock().delivery = delivery;
    }

    /// The failure of this backward pass, if there was one. The next one begins anew.
    pub fn check(&self) -> Result<()> {
        self.0.lock().failure.take().map_or(Ok(()), Err)
    }

    /// Backward is over: submits what is held, zeros where they are asked for, and what waits for gradients of its group that do
    /// not come.
    pub fn submit_held(&self) -> Result<()> {
        let mut state = self.0.lock();
        for index in 0..state.parameters.len() {
            if let Some(sum) = state.parameters[index].held.take() {
                let sum = tensor(sum.dtype(), sum.as_bytes())?;
                state.submit(index, sum)?;
            }
        }
        for index in 0..state.parameters.len() {
            let parameter = &state.parameters[index];
            if state.zero_missing && !parameter.is_submitted {
                let dtype = tensor_bytes::dtype(parameter.burn_dtype)?;
                let elements: usize = parameter.shape.iter().product();
                let zeros = tensor(dtype, &vec![0; elements * dtype.size()])?;
                state.submit(index, zeros)?;
            }
        }
        for index in 0..state.parameters.len() {
            if let Some(gradient) = state.parameters[index].waits.take() {
                state.submit_one(index, gradient)?;
            }
        }
        state.begin_groups();
        state.failure.take().map_or(Ok(()), Err)
    }

    /// Waits for all that was submitted. By the parameters' indices.
    pub fn landed(&self) -> Result<Vec<Option<TensorData>>> {
        let mut state = self.0.lock();
        state.parameters.iter_mut().for_each(|parameter| parameter.is_submitted = false);
        let mut gradients: Vec<Option<TensorData>> = state.parameters.iter().map(|_| None).collect();
        let mut failure = None;
        for flying in std::mem::take(&mut state.flying) {
            // All are waited for, also after the first error: their names can then be used again.
            let landed = match flying {
                Flying::One(index, handle) => handle.synchronize().map(|tensor| vec![(index, tensor)]),
                Flying::Group(indices, handle) => {
                    handle.synchronize().map(|tensors| indices.into_iter().zip(tensors).collect())
                }
            };
            match landed {
                Ok(landed) => {
                    for (index, tensor) in landed {
                        gradients[index] = Some(state.parameters[index].data(tensor)?);
                    }
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(gradients), Err)
    }
}

impl SinkState {
    fn ready(&mut self, index: usize, gradient: TensorBytes<'_>) -> Result<()> {
        let Some(parameter) = self.parameters.get_mut(index) else {
            return Err(Error::invalid_argument(format!(
                "a gradient came for the unknown parameter {index}"
            ))
            .with_remedy("make a DistributedOptimizer for each model"));
        };
        let dtype = tensor_bytes::dtype(gradient.dtype)?;
        match self.delivery {
            Delivery::Ignore => Ok(()),
            Delivery::Hold => parameter.held.add(gradient.bytes),
            Delivery::Submit if !parameter.held.any => {
                let gradient = tensor(dtype, gradient.bytes)?;
                self.submit(index, gradient)
            }
            Delivery::Submit => {
                parameter.held.add(gradient.bytes)?;
                match parameter.held.take() {
                    Some(sum) => {
                        let sum = tensor(sum.dtype(), sum.as_bytes())?;
                        self.submit(index, sum)
                    }
                    None => Ok(()),
                }
            }
        }
    }

    /// Submits a gradient, or its group if it is the last of it.
    fn submit(&mut self, index: usize, gradient: Tensor) -> Result<()> {
        self.parameters[index].is_submitted = true;
        let Some(group) = self.parameters[index].group else { return self.submit_one(index, gradient) };
        self.parameters[index].waits = Some(gradient);
        self.groups[group] = self.groups[group].saturating_sub(1);
        if self.groups[group] > 0 {
            return Ok(());
        }
        let (mut indices, mut tensors) = (Vec::new(), Vec::new());
        let mut name = None;
        for (index, parameter) in self.parameters.iter_mut().enumerate() {
            if parameter.group == Some(group)
                && let Some(tensor) = parameter.waits.take()
            {
                name.get_or_insert_with(|| format!("{} and its group", parameter.name));
                indices.push(index);
                tensors.push(tensor.reshaped(parameter.shape.clone())?);
            }
        }
        let handle = self.hvd.grouped_allreduce_async(&name.unwrap_or_default(), tensors, self.reduction)?;
        self.flying.push(Flying::Group(indices, handle));
        Ok(())
    }

    fn submit_one(&mut self, index: usize, gradient: Tensor) -> Result<()> {
        let parameter = &self.parameters[index];
        let gradient = gradient.reshaped(parameter.shape.clone())?;
        let handle = self.hvd.allreduce_async(&parameter.name, gradient, self.reduction)?;
        self.flying.push(Flying::One(index, handle));
        Ok(())
    }

    fn begin_groups(&mut self) {
        self.groups.fill(0);
        for parameter in &self.parameters {
            if let Some(size) = parameter.group.and_then(|group| self.groups.get_mut(group)) {
                *size += 1;
            }
        }
    }
}

impl Gradient {
    /// What has come back, without a copy.
    fn data(&self, tensor: Tensor) -> Result<TensorData> {
        let bytes = match tensor.dtype() {
            DType::F32 => bytes::<f32>(tensor),
            DType::F64 => bytes::<f64>(tensor),
            DType::F16 => bytes::<f16>(tensor),
            DType::BF16 => bytes::<bf16>(tensor),
            other => Err(Error::invalid_argument(format!("gradients of type {other} are not combined"))),
        }?;
        Ok(TensorData::from_bytes(bytes, self.shape.clone(), self.burn_dtype))
    }
}

fn bytes<T: Element>(tensor: Tensor) -> Result<Bytes> {
    let elements = tensor.into_memory::<Vec<T>>();
    elements.map(Bytes::from_elems).map_err(|_| Error::aborted("a gradient came back in other memory"))
}

/// A copy of a gradient, in memory that becomes Burn's when it comes back.
fn tensor(dtype: DType, bytes: &[u8]) -> Result<Tensor> {
    fn copied<T: Element>(bytes: &[u8]) -> Tensor {
        let elements: Vec<T> = match bytemuck::try_cast_slice(bytes) {
            Ok(elements) => elements.to_vec(),
            Err(_) => bytemuck::pod_collect_to_vec(bytes),
        };
        elements.into()
    }
    match dtype {
        DType::F32 => Ok(copied::<f32>(bytes)),
        DType::F64 => Ok(copied::<f64>(bytes)),
        DType::F16 => Ok(copied::<f16>(bytes)),
        DType::BF16 => Ok(copied::<bf16>(bytes)),
        other => Err(Error::invalid_argument(format!("gradients of type {other} are not combined"))),
    }
}
