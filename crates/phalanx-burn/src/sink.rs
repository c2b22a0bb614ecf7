//! The receiver of hooks' gradients: they go to the reducer, or are added up here first.

use std::sync::{Arc, Weak};
#[cfg(feature = "nccl")]
use std::time::Instant;

use phalanx::adapter::elements;
use phalanx::reducer::{HookedReducer, Reducer};
#[cfg(feature = "nccl")]
use phalanx::trace::Track;
use phalanx::{Buffer, DType, Error, Rank, Result};

use crate::hook::GradientSink;
#[cfg(feature = "nccl")]
use crate::nccl::{OnDevice, Resident};
use crate::read_back::{InFlight, ReadBack};
use crate::tensor_bytes::{self, Access, TensorBytes};

/// What to do with a gradient that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It goes to the reducer at once, with the sum that is held for its parameter.
    Now,
    /// It is added to the sum that is held for its parameter.
    Hold,
    /// It is dropped: it came from another model's backward pass, such as that of a generator whose loss a
    /// discriminator computes.
    Ignore,
}

/// One forward pass. It lives as long as its graph can still run backward.
///
/// It does not keep the sink, and with it the group: Burn keeps the graph of a loss that never runs backward until some later backward pass of the
/// process, on any thread, drops it under its locks. Until then the other ranks would not hear that this one has left, and that thread would wait for
/// what the group has still to do.
pub(crate) struct Pass(Weak<Sink>);

impl GradientSink for Pass {
    fn ready(&self, index: usize, gradient: Access<'_>) {
        if let Some(Sink(sink)) = self.0.upgrade().as_deref() {
            // A failure is returned by the call that runs this backward pass.
            let _kept = sink.attempt(|reducer, deliveries| deliveries.accept(reducer, index, gradient));
        }
    }
}

impl Pass {
    /// Of gradients that go to `sink`, as long as there is one.
    pub fn to(sink: &Arc<Sink>) -> Self {
        Self(Arc::downgrade(sink))
    }

    /// A part of the gradient of parameter `index`: another one follows, with [`ready`](GradientSink::ready), unless backward ends
    /// before.
    pub fn part(&self, index: usize, gradient: TensorBytes<'_>) {
        if let Some(Sink(sink)) = self.0.upgrade().as_deref() {
            let _kept = sink.attempt(|reducer, deliveries| deliveries.part(reducer, index, gradient));
        }
    }
}

/// The reducer, for the hooks.
pub(crate) struct Sink(HookedReducer<Deliveries>);

/// Where gradients go, and what is held of them.
pub(crate) struct Deliveries {
    delivery: Delivery,
    held: Vec<Held>,
    /// Whether this backward pass has the weight 0: its gradients, which may be NaN, count as zero.
    is_void: bool,
    /// For each parameter: whether it had a gradient in a pass of weight 0 since the last average.
    void: Vec<bool>,
    /// Gradients on their way from a device.
    in_flight: InFlight<usize>,
    /// Where gradients go that a device averages in its own memory.
    #[cfg(feature = "nccl")]
    on_device: Option<Arc<OnDevice>>,
}

/// The gradients that are held for one parameter.
pub(crate) struct Held {
    dtype: DType,
    elements: usize,
    /// The sum of the gradients that have not gone on yet. Its memory is allocated once.
    pub sum: Option<Buffer>,
    /// Whether a gradient was added since the sum last went on.
    pub any: bool,
}

impl Sink {
    pub fn new(reducer: Reducer) -> Self {
        let held = reducer.parameters().iter();
        let held: Vec<_> = held.map(|parameter| Held::new(parameter.dtype, parameter.elements())).collect();
        let void = vec![false; held.len()];
        let (delivery, in_flight) = (Delivery::Ignore, InFlight::new());
        let deliveries = Deliveries {
            delivery,
            held,
            is_void: false,
            void,
            in_flight,
            #[cfg(feature = "nccl")]
            on_device: None,
        };
        Self(HookedReducer::new(reducer, deliveries))
    }

    /// Of a reducer whose gradients are averaged `on_device`.
    #[cfg(feature = "nccl")]
    pub fn on_device(reducer: Reducer, on_device: Arc<OnDevice>) -> Self {
        let sink = Self::new(reducer);
        // A reducer that has just been made has not failed.
        let _kept = sink.0.attempt(|_, deliveries| {
            deliveries.on_device = Some(on_device);
            Ok(())
        });
        sink
    }

    /// The failure of this or an earlier backward pass, if there was one.
    pub fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Sets what to do with gradients from now on. Those that are still on their way from a device are waited for first.
    pub fn set_delivery(&self, delivery: Delivery) -> Result<()> {
        self.0.attempt(|reducer, deliveries| {
            deliveries.land(reducer)?;
            deliveries.delivery = delivery;
            Ok(())
        })
    }

    /// Begins a backward pass that [`finish`](Self::finish) ends. If steps are weighted, the pass has a `weight`, and `total` is
    /// the weight of all passes of the step.
    pub fn start(&self, delivery: Delivery, weight: Option<f64>, total: Option<f64>) -> Result<()> {
        self.0.attempt(|reducer, deliveries| {
            // Of a pass that was not ended.
            deliveries.clear();
            (deliveries.delivery, deliveries.is_void) = (delivery, weight == Some(0.0));
            match total {
                Some(total) => reducer.start_weighted(total),
                None => reducer.start(),
            }
        })
    }

    /// Holds the gradients from now on, of a backward pass with this `weight`.
    pub fn hold(&self, weight: Option<f64>) -> Result<()> {
        self.set_delivery(Delivery::Hold)?;
        self.0.attempt(|_, deliveries| {
            deliveries.is_void = weight == Some(0.0);
            Ok(())
        })
    }

    /// Passes on the sums that are still held, waits for all ranks, and passes the reducer with its averages to `look`.
    pub fn finish<T>(&self, look: impl FnOnce(&mut Reducer) -> Result<T>) -> Result<T> {
        self.0.attempt(|reducer, deliveries| deliveries.hand_over(reducer))?;
        self.0.finish(|reducer, _| look(reducer))
    }

    /// As [`finish`](Self::finish), with the same gradients, in the group that follows a failed one.
    pub fn replay<T>(&self, look: impl FnOnce(&mut Reducer) -> Result<T>) -> Result<T> {
        self.0.replay(|reducer, _| look(reducer))
    }

    /// Runs `call` on the reducer. An error ends it, unless it has failed before.
    pub fn call<T>(&self, call: impl FnOnce(&mut Reducer) -> Result<T>) -> Result<T> {
        self.0.attempt(|reducer, _| call(reducer))
    }

    pub fn hooked(&self) -> &HookedReducer<Deliveries> {
        &self.0
    }

    pub fn with_reducer<T>(&self, look: impl FnOnce(&mut Reducer) -> T) -> T {
        self.0.with_reducer(look)
    }

    /// Takes over the state of rank `root`'s reducer. Gradients that were held are dropped: they belonged to no
    /// finished step.
    pub fn adopt(&self, root: Rank) -> Result<()> {
        self.0.attempt(|reducer, deliveries| {
            deliveries.drop_held();
            reducer.adopt(root)
        })
    }

    /// Drops the gradients that are held.
    pub fn drop_held(&self) {
        // A sink that has failed takes no more gradients.
        let _failed = self.0.attempt(|_, deliveries| {
            deliveries.delivery = Delivery::Ignore;
            deliveries.drop_held();
            Ok(())
        });
    }
}

impl Deliveries {
    fn drop_held(&mut self) {
        self.held.iter_mut().for_each(|held| held.any = false);
        self.void.fill(false);
        self.clear();
        #[cfg(feature = "nccl")]
        if let Some(on_device) = &self.on_device {
            on_device.drop_held();
        }
    }

    /// Drops what is on its way.
    fn clear(&mut self) {
        self.in_flight.clear();
        #[cfg(feature = "nccl")]
        if let Some(on_device) = &self.on_device {
            on_device.clear();
        }
    }

    /// A gradient is finished, or will be when its device has done its work.
    fn accept(&mut self, reducer: &mut Reducer, index: usize, gradient: Access<'_>) -> Result<()> {
        if self.delivery == Delivery::Ignore {
            return Ok(());
        }
        match gradient {
            Access::Here(gradient) => self.ready(reducer, index, gradient),
            Access::Away(tensor) => {
                #[cfg(feature = "nccl")]
                if let Some(on_device) = self.on_device.clone() {
                    return self.queued(reducer, &on_device, index, tensor.stay()?);
                }
                match self.in_flight.push(index, tensor.read().traced(reducer.trace(), index)) {
                    Some((index, begun)) => self.arrived(reducer, index, begun),
                    None => Ok(()),
                }
            }
        }
    }

    /// The device that averages a gradient has the work for it in its queue.
    #[cfg(feature = "nccl")]
    fn queued(
        &mut self,
        reducer: &mut Reducer,
        on_device: &OnDevice,
        index: usize,
        gradient: Resident,
    ) -> Result<()> {
        let Some(spec) = reducer.parameters().get(index) else { return Err(unknown(index)) };
        reducer.trace().instant(
            Track::Backward,
            "gradient queued",
            Instant::now(),
            &[("parameter", index.into())],
        );
        match self.delivery {
            Delivery::Hold if self.is_void => {
                self.void[index] = true;
                return Ok(());
            }
            Delivery::Hold => return on_device.hold(index, spec, gradient),
            _ => self.void[index] = false,
        }
        if self.is_void && !on_device.put_held(index) {
            return reducer.ready_void(index);
        }
        if !self.is_void {
            on_device.put(index, spec, gradient)?;
        }
        reducer.ready_elsewhere(index)
    }

    /// Waits for the gradients that are on their way, which are delivered as each arrives.
    fn land(&mut self, reducer: &mut Reducer) -> Result<()> {
        while let Some((index, read)) = self.in_flight.pop() {
            self.arrived(reducer, index, read)?;
        }
        Ok(())
    }

    /// Waits for a gradient that is on its way, and delivers it.
    fn arrived(&mut self, reducer: &mut Reducer, index: usize, read: ReadBack) -> Result<()> {
        let delivered = read.wait(|gradient| self.ready(reducer, index, gradient));
        delivered.map_err(|lost| match reducer.parameters().get(index) {
            Some(parameter) => lost.of(format_args!("the gradient of {parameter}")),
            None => lost.of("a gradient"),
        })?
    }

    /// Backward is over: the sums that are still held go to the reducer.
    fn hand_over(&mut self, reducer: &mut Reducer) -> Result<()> {
        self.land(reducer)?;
        self.delivery = Delivery::Ignore;
        #[cfg(feature = "nccl")]
        if let Some(on_device) = &self.on_device {
            for index in on_device.hand_over() {
                self.void[index] = false;
                reducer.ready_elsewhere(index)?;
            }
        }
        for (index, held) in self.held.iter_mut().enumerate() {
            let is_void = self.void.get_mut(index).is_some_and(std::mem::take);
            if let Some(sum) = held.take() {
                reducer.ready(index, sum.as_bytes())?;
            } else if is_void {
                reducer.ready_void(index)?;
            }
        }
        Ok(())
    }

    fn ready(&mut self, reducer: &mut Reducer, index: usize, gradient: TensorBytes<'_>) -> Result<()> {
        let (delivery, is_void) = (self.delivery, self.is_void);
        self.held_for(reducer, index, &gradient)?;
        // A gradient that is given now is not given again at the end.
        self.void[index] = match delivery {
            Delivery::Now => false,
            Delivery::Hold => self.void[index] || is_void,
            Delivery::Ignore => self.void[index],
        };
        let held = &mut self.held[index];
        match delivery {
            Delivery::Now if is_void => match held.take() {
                Some(sum) => reducer.ready(index, sum.as_bytes()),
                None => reducer.ready_void(index),
            },
            Delivery::Hold if is_void => Ok(()),
            Delivery::Now if !held.any => reducer.ready(index, gradient.bytes),
            Delivery::Now => {
                held.add(gradient.bytes)?;
                held.take().map_or(Ok(()), |sum| reducer.ready(index, sum.as_bytes()))
            }
            Delivery::Hold => held.add(gradient.bytes),
            Delivery::Ignore => Ok(()),
        }
    }

    fn part(&mut self, reducer: &Reducer, index: usize, gradient: TensorBytes<'_>) -> Result<()> {
        match self.delivery {
            Delivery::Now | Delivery::Hold if self.is_void => {
                self.held_for(reducer, index, &gradient)?;
                self.void[index] = true;
                Ok(())
            }
            Delivery::Now | Delivery::Hold => self.held_for(reducer, index, &gradient)?.add(gradient.bytes),
            Delivery::Ignore => Ok(()),
        }
    }

    /// What is held for the parameter of `gradient`, which must be of its type and size.
    fn held_for(&mut self, reducer: &Reducer, index: usize, gradient: &TensorBytes<'_>) -> Result<&mut Held> {
        let (Some(held), Some(spec)) = (self.held.get_mut(index), reducer.parameters().get(index)) else {
            return Err(unknown(index));
        };
        let (arrived, dtype, elements) = (tensor_bytes::dtype(gradient.dtype)?, held.dtype, held.elements);
        if arrived != dtype || gradient.bytes.len() != elements * dtype.size() {
            return Err(Error::invalid_argument(format!(
                "the gradient of parameter {spec} has {} bytes of {arrived}, and {} are expected",
                gradient.bytes.len(),
                elements * dtype.size()
            )));
        }
        Ok(held)
    }
}

fn unknown(index: usize) -> Error {
    Error::invalid_argument(format!("a gradient came for the unknown parameter {index}"))
}

impl Held {
    pub fn new(dtype: DType, elements: usize) -> Self {
        Self { dtype, elements, sum: None, any: false }
    }

    pub fn add(&mut self, gradient: &[u8]) -> Result<()> {
        let (dtype, elements) = (self.dtype, self.elements);
        let sum = match &mut self.sum {
            Some(sum) => sum,
            none => none.insert(Buffer::try_zeroed(dtype, elements)?),
        };
        if std::mem::replace(&mut self.any, true) {
            elements::add(dtype, sum.as_bytes_mut(), gradient)
        } else {
            sum.as_bytes_mut().copy_from_slice(gradient);
            Ok(())
        }
    }

    /// The sum, if there is one; the next gradient begins another.
    pub fn take(&mut self) -> Option<&Buffer> {
        self.sum.as_ref().filter(|_| std::mem::take(&mut self.any))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType as BurnDType;
    use phalanx::reducer::{ParameterSpec, ReducerOptions};
    use phalanx::{ProcessGroup, WorldSize};

    use super::*;
    use crate::read_back::tests::Unreadable;

    #[test]
    fn a_gradient_for_which_there_is_no_memory_is_an_error() {
        // More bytes than processors can address.
        let mut held = Held::new(DType::F32, 1 << 58);
        let error = held.add(&[]).unwrap_err();
        assert!(error.is_out_of_memory() && error.remedy().is_some() && !held.any, "{error}");
    }

    #[test]
    fn a_gradient_that_a_device_cannot_give_ends_the_group_on_every_rank() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let rank = |group: ProcessGroup| {
            let is_lost = group.rank().is_main();
            let parameters = vec![ParameterSpec::new("weight", &[1][..], DType::F32)];
            let reducer = Reducer::new(Arc::new(group), parameters, ReducerOptions::default()).unwrap();
            let sink = Arc::new(Sink::new(reducer));
            sink.start(Delivery::Now, None, None).unwrap();
            let bytes = bytemuck::bytes_of(&1.0f32);
            Pass::to(&sink).ready(
                0,
                match is_lost {
                    true => Access::Away(Box::new(Unreadable)),
                    false => Access::Here(TensorBytes { dtype: BurnDType::F32, bytes }),
                },
            );
            sink.finish(|_| Ok(())).unwrap_err().to_string()
        };
        let errors: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for error in &errors {
            assert!(
                error.contains("the gradient of `weight`") && error.contains("out of memory"),
                "{errors:?}"
            );
        }
    }
}
