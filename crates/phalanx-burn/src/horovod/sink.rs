//! What hooks deliver to: gradients are submitted by name, or added up first.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use burn::tensor::{DType as BurnDType, TensorData};
use parking_lot::Mutex;
use phalanx::{Buffer, DType, Error, Result};
use phalanx_horovod::{Handle, Horovod, Reduction, Tensor};

use super::memory::{Home, Recycled};
use super::optimizer::DistributedOptions;
use crate::hook::GradientSink;
use crate::parameters::Parameter;
use crate::read_back::{InFlight, ReadBack};
use crate::sink::Held;
use crate::tensor_bytes::{self, Access, TensorBytes};
use crate::view;

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
///
/// It does not keep the sink, and with it the job, for the reason that [`crate::sink::Pass`] has.
pub(super) struct Pass(Weak<Sink>);

impl Pass {
    /// Of gradients that go to `sink`, as long as there is one.
    pub fn to(sink: &Arc<Sink>) -> Self {
        Self(Arc::downgrade(sink))
    }
}

impl GradientSink for Pass {
    fn ready(&self, index: usize, gradient: Access<'_>) {
        let Some(sink) = self.0.upgrade() else { return };
        let state = &mut *sink.0.lock();
        // Backward cannot return an error: the call that runs it asks for the first one.
        if state.failure.is_none()
            && let Err(error) = state.accept(index, gradient)
        {
            state.fail(error);
        }
    }
}

pub(super) struct Sink(Mutex<SinkState>);

struct SinkState {
    hvd: Horovod,
    reduction: Reduction,
    parameters: Vec<Gradient>,
    delivery: Delivery,
    /// Whether missing gradients are submitted as zeros.
    zero_missing: bool,
    /// Of each group, how many gradients are not ready yet; nothing without groups.
    groups: Vec<usize>,
    flying: Vec<Flying>,
    /// Gradients on their way from a device.
    in_flight: InFlight<usize>,
    /// Why a gradient of this backward pass is lost.
    failure: Option<Error>,
}

/// The gradient of a parameter.
struct Gradient {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    burn_dtype: BurnDType,
    held: Held,
    /// Its memory of the last step, if nobody uses it.
    home: Home,
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
                dtype,
                burn_dtype: parameter.dtype,
                home: Home::default(),
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
            in_flight: InFlight::new(),
            failure: None,
        };
        Ok(Self(Mutex::new(state)))
    }

    /// Sets what to do with gradients from now on. Those that are still on their way from a device are waited for first.
    pub fn set(&self, delivery: Delivery) {
        let state = &mut *self.0.lock();
        state.land();
        state.delivery = delivery;
    }

    /// The failure of this backward pass, if there was one. The next one begins anew.
    pub fn check(&self) -> Result<()> {
        self.0.lock().failure.take().map_or(Ok(()), Err)
    }

    /// Backward is over: submits what is held, zeros where they are asked for, and what waits for gradients of its group that do
    /// not come. There are no zeros for `frozen` parameters, by their indices: an optimizer would change them. After an error
    /// [`leave`](Self::leave).
    pub fn submit_held(&self, frozen: &HashSet<usize>) -> Result<()> {
        let state = &mut *self.0.lock();
        state.land();
        // A lost gradient does not count as zero.
        if let Some(error) = state.failure.take() {
            return Err(error);
        }
        for index in 0..state.parameters.len() {
            state.submit_sum(index)?;
        }
        for index in 0..state.parameters.len() {
            if state.zero_missing && !state.parameters[index].is_submitted && !frozen.contains(&index) {
                state.submit(index, |memory| {
                    memory.fill(0);
                    Ok(())
                })?;
            }
        }
        state.submit_waiting()
    }

    /// This rank's own gradients, which are not submitted. By the parameters' indices; of `frozen` ones there are none.
    pub fn own(&self, frozen: &HashSet<usize>) -> Result<Vec<Option<TensorData>>> {
        let state = &mut *self.0.lock();
        state.land();
        let own = state.parameters.iter_mut().enumerate().map(|(index, parameter)| {
            let data =
                |bytes: &[u8]| tensor_bytes::tensor_data(bytes, &parameter.shape, parameter.burn_dtype);
            match parameter.held.take() {
                Some(sum) => Some(data(sum.as_bytes())),
                None if state.zero_missing && !frozen.contains(&index) => {
                    let elements: usize = parameter.shape.iter().product();
                    Some(data(&vec![0; elements * parameter.dtype.size()]))
                }
                None => None,
            }
        });
        let own = own.collect();
        state.failure.take().map_or(Ok(own), Err)
    }

    /// Ends the job because of an `error` of this rank: others would wait for what it cannot have.
    pub fn leave(&self, error: &Error) {
        self.0.lock().hvd.leave_with(error);
    }

    /// Submits what an optimizer has changed, by the parameters' indices. After an error [`leave`](Self::leave).
    pub fn submit_changes(&self, changes: Vec<(usize, Buffer)>) -> Result<()> {
        let mut state = self.0.lock();
        for (index, change) in changes {
            state.submit(index, |memory| copy(change.as_bytes(), memory))?;
        }
        state.submit_waiting()
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
    /// A gradient is finished, or will be when its device has done its work.
    fn accept(&mut self, index: usize, gradient: Access<'_>) -> Result<()> {
        if self.delivery == Delivery::Ignore {
            return Ok(());
        }
        match gradient {
            Access::Here(gradient) => self.ready(index, gradient),
            Access::Away(tensor) => match self.in_flight.push(index, tensor.read()) {
                Some((index, read)) => self.copied(index, read),
                None => Ok(()),
            },
        }
    }

    /// Waits for the gradients that are on their way, which are delivered as each arrives.
    fn land(&mut self) {
        while let Some((index, read)) = self.in_flight.pop() {
            if self.failure.is_some() {
                read.discard();
            } else if let Err(error) = self.copied(index, read) {
                self.fail(error);
            }
        }
    }

    /// A gradient is lost. The job ends: other ranks would wait for it.
    fn fail(&mut self, error: Error) {
        self.hvd.leave_with(&error);
        self.failure = Some(error);
    }

    /// Waits for a gradient, and takes it.
    fn copied(&mut self, index: usize, read: ReadBack) -> Result<()> {
        let copied = read.wait(|gradient| self.ready(index, gradient));
        copied.map_err(|lost| match self.parameters.get(index) {
            Some(parameter) => lost.of(format_args!("the gradient of `{}`", parameter.name)),
            None => lost.of("a gradient"),
        })?
    }

    fn ready(&mut self, index: usize, gradient: TensorBytes<'_>) -> Result<()> {
        let Some(parameter) = self.parameters.get_mut(index) else {
            return Err(Error::invalid_argument(format!(
                "a gradient came for the unknown parameter {index}"
            ))
            .with_remedy("make a DistributedOptimizer for each model"));
        };
        let (arrived, dtype) = (tensor_bytes::dtype(gradient.dtype)?, parameter.dtype);
        if arrived != dtype {
            return Err(Error::invalid_argument(format!(
                "the gradient of {:?} is of type {arrived}, the parameter of {dtype}",
                parameter.name
            )));
        }
        match self.delivery {
            Delivery::Ignore => Ok(()),
            Delivery::Hold => parameter.held.add(gradient.bytes),
            Delivery::Submit if !parameter.held.any => {
                self.submit(index, |memory| copy(gradient.bytes, memory))
            }
            Delivery::Submit => {
                parameter.held.add(gradient.bytes)?;
                self.submit_sum(index)
            }
        }
    }

    /// Submits what is held of a gradient, if there is any.
    fn submit_sum(&mut self, index: usize) -> Result<()> {
        let held = &mut self.parameters[index].held;
        if !std::mem::take(&mut held.any) {
            return Ok(());
        }
        let Some(sum) = held.sum.take() else { return Ok(()) };
        let submitted = self.submit(index, |memory| copy(sum.as_bytes(), memory));
        self.parameters[index].held.sum = Some(sum);
        submitted
    }

    /// Submits a gradient that `fill` writes, or its group if it is the last of it.
    fn submit(&mut self, index: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let gradient = self.parameters[index].tensor(&self.hvd, self.reduction, fill)?;
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
                tensors.push(tensor);
            }
        }
        let handle = self.hvd.grouped_allreduce_async(&name.unwrap_or_default(), tensors, self.reduction)?;
        self.flying.push(Flying::Group(indices, handle));
        Ok(())
    }

    /// Submits what waits for gradients of its group that do not come.
    fn submit_waiting(&mut self) -> Result<()> {
        for index in 0..self.parameters.len() {
            if let Some(gradient) = self.parameters[index].waits.take() {
                self.submit_one(index, gradient)?;
            }
        }
        self.begin_groups();
        Ok(())
    }

    fn submit_one(&mut self, index: usize, gradient: Tensor) -> Result<()> {
        let handle = self.hvd.allreduce_async(&self.parameters[index].name, gradient, self.reduction)?;
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
    /// A tensor in this gradient's memory.
    fn tensor(
        &self,
        hvd: &Horovod,
        reduction: Reduction,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Tensor> {
        let kept = self.home.lock().take();
        let mut buffer = match kept {
            Some(buffer) => buffer,
            None => hvd.alloc(self.dtype, self.shape.iter().product(), reduction)?,
        };
        fill(buffer.as_bytes_mut())?;
        Tensor::from_memory(self.dtype, self.shape.clone(), Recycled::new(buffer, self.home.clone()))
    }

    /// What has come back, without a copy: its memory is Burn's until Burn drops it.
    fn data(&self, tensor: Tensor) -> Result<TensorData> {
        let memory = tensor.into_memory::<Recycled>();
        let memory = memory.map_err(|_| Error::aborted("a gradient came back in other memory"))?;
        Ok(view::tensor_data(memory, &self.shape, self.burn_dtype))
    }
}

fn copy(elements: &[u8], memory: &mut [u8]) -> Result<()> {
    if elements.len() != memory.len() {
        return Err(Error::invalid_argument(format!(
            "a gradient has {} bytes, its parameter {}",
            elements.len(),
            memory.len()
        )));
    }
    memory.copy_from_slice(elements);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use burn::module::ParamId;
    use phalanx::{ProcessGroup, WorldSize};
    use phalanx_horovod::{Op, Options};

    use super::*;
    use crate::read_back::tests::Unreadable;

    /// What each of two ranks is told, of which rank 0 has `lost` as its gradient, of a parameter of so many elements.
    fn told(elements: usize, lost: impl Fn() -> Access<'static> + Sync) -> Vec<String> {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let all_are_here = Barrier::new(2);
        let rank = |group: ProcessGroup| {
            let is_lost = group.rank().is_main();
            let hvd = Horovod::new(&group, Options::default()).unwrap();
            // The rank that ends the job must not end that, in which the other may still be.
            all_are_here.wait();
            let (id, name) = (ParamId::new(), "weight".to_owned());
            let shape = vec![if is_lost { elements } else { 1 }];
            let parameters = [Parameter { id, name, shape, dtype: BurnDType::F32 }];
            let options =
                DistributedOptions { zero_missing_gradients: true, ..DistributedOptions::default() };
            let sink = Sink::new(hvd, &parameters, Reduction::new(Op::Average), &options).unwrap();
            let sink = Arc::new(sink);
            sink.set(Delivery::Submit);
            let bytes = bytemuck::bytes_of(&1.0f32);
            let own = match is_lost {
                true => lost(),
                false => Access::Here(TensorBytes { dtype: BurnDType::F32, bytes }),
            };
            Pass::to(&sink).ready(0, own);
            sink.set(Delivery::Ignore);
            let landed = sink.submit_held(&HashSet::new()).and_then(|()| sink.landed());
            landed.unwrap_err().to_string()
        };
        std::thread::scope(|scope| {
            let rank = &rank;
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_gradient_that_cannot_be_had_ends_the_job_and_does_not_count_as_zero() {
        let check = |errors: Vec<String>, cause: &str| {
            assert!(errors.iter().all(|error| error.contains(cause)), "{errors:?}");
            assert!(errors[1].contains("rank 0 cannot take part"), "{errors:?}");
        };
        check(told(1, || Access::Away(Box::new(Unreadable))), "out of memory");
        let other = || Access::Here(TensorBytes { dtype: BurnDType::F64, bytes: &[0; 8] });
        check(told(1, other), "is of type f64");
        // More bytes than processors can address.
        let large = || Access::Here(TensorBytes { dtype: BurnDType::F32, bytes: &[0; 4] });
        check(told(1 << 58, large), "no memory");
    }
}
