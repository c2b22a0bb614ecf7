//! The receiver of hooks' gradients: they go to the reducer, or stay in `.grad` until the next synchronised backward pass.

use std::ptr;
use std::sync::Arc;

use phalanx::reducer::{HookedReducer, Reducer};
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};
use tch::Tensor;

use crate::nccl::OnDevice;
use crate::shim;
use crate::tensors::{Named, torch};

/// What to do with a gradient that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It goes to the reducer at once.
    Now,
    /// It stays in `.grad`, where libtorch adds the next one to it.
    Hold,
    /// It is not looked at: it came from another model's backward pass.
    Ignore,
}

/// The reducer, for the hooks.
pub(crate) struct Sink(HookedReducer<Deliveries>);

pub(crate) struct Deliveries {
    /// What averages gradients on their device; else they go to the reducer's buckets.
    on_device: Option<Arc<OnDevice>>,
    delivery: Delivery,
    /// In the reducer's order.
    parameters: Vec<Named>,
    /// For each parameter its place in a bucket, as a tensor: the gradient, from the first average on.
    views: Vec<Option<Tensor>>,
    /// For each parameter: whether `.grad` holds a gradient that has not been averaged.
    held: Vec<bool>,
    /// For each parameter: whether the reducer has what this backward pass gives it.
    given: Vec<bool>,
    /// Parameters that a static graph does not use on this rank, with gradients of passes of this step that have averaged nothing.
    stray: Vec<usize>,
    /// In a pass of weight 0, whose gradients do not count: what `.grad` of each parameter was before.
    set_aside: Option<Vec<Option<Tensor>>>,
    /// For each parameter: whether it had a gradient in a pass of weight 0 since the last average.
    void: Vec<bool>,
    /// Whether a backward pass since the last average has left gradients that are averaged by none.
    is_local: bool,
    /// Whether the model has run forward for a backward pass that has not begun.
    is_awaited: bool,
    /// A parameter whose gradient came meanwhile from a backward pass that no `Ddp` runs.
    missed: Option<usize>,
    /// A parameter whose gradient came meanwhile from the backward pass of another `Ddp`.
    foreign: Option<usize>,
}

impl Sink {
    /// For `reducer`, whose gradients are averaged `on_device` if its buckets have no memory.
    pub fn new(reducer: Reducer, parameters: &[Named], on_device: Option<Arc<OnDevice>>) -> Self {
        let deliveries = Deliveries {
            on_device,
            delivery: Delivery::Ignore,
            parameters: parameters.to_vec(),
            views: parameters.iter().map(|_| None).collect(),
            held: vec![false; parameters.len()],
            given: vec![false; parameters.len()],
            stray: Vec::new(),
            set_aside: None,
            void: vec![false; parameters.len()],
            is_local: false,
            is_awaited: false,
            missed: None,
            foreign: None,
        };
        Self(HookedReducer::new(reducer, deliveries))
    }

    /// Has backward report the gradients of `parameters` to this. On an error none is hooked.
    pub fn hook(self: &Arc<Self>, parameters: &[Named]) -> Result<()> {
        for (index, parameter) in parameters.iter().enumerate() {
            let sink = self.clone();
            // A failure, or a panic, is returned by the call that runs this backward pass.
            let ready = move || {
                drop(sink.0.attempt(|reducer, deliveries| deliveries.ready(reducer, index)));
            };
            if let Err(error) = shim::hook(&parameter.tensor, ready) {
                parameters[..index].iter().for_each(|parameter| shim::unhook(&parameter.tensor));
                let name = &parameter.spec;
                return Err(Error::invalid_argument(format!("parameter {name} cannot be observed"))
                    .with_source(error)
                    .with_remedy("drop the other Ddp of this VarStore first"));
            }
        }
        Ok(())
    }

    /// The bytes of all gradients that were sent.
    pub fn communicated_bytes(&self) -> u64 {
        let on_device =
            self.0.with_state(|deliveries| deliveries.on_device.as_ref().map_or(0, |one| one.bytes()));
        on_device + self.with_reducer(|reducer| reducer.communicated_bytes())
    }

    /// Whether a backward pass since the last average has left gradients that are averaged by none, such as `loss.backward()`.
    pub fn is_local(&self) -> bool {
        self.0.with_state(|deliveries| deliveries.is_local)
    }

    /// Whether NCCL averages the gradients, on their device.
    pub fn is_on_device(&self) -> bool {
        self.0.with_state(|deliveries| deliveries.on_device.is_some())
    }

    /// What makes NCCL's calls, if it averages.
    pub fn on_device(&self) -> Option<Arc<OnDevice>> {
        self.0.with_state(|deliveries| deliveries.on_device.clone())
    }

    /// The ranks of `group` average from now on, by NCCL too.
    pub fn move_to(&self, group: &ProcessGroup) {
        self.0.with_state(|deliveries| {
            if let Some(on_device) = &deliveries.on_device {
                on_device.move_to(group);
            }
        });
    }

    /// NCCL connects the ranks of a group that was [moved to](Self::move_to), outside of backward. All ranks call it together.
    pub fn connect(&self) -> Result<()> {
        self.0.with_state(|deliveries| {
            deliveries.on_device.as_ref().map_or(Ok(()), |on_device| on_device.connect())
        })
    }

    /// The failure of a call of NCCL's that nobody has waited for.
    pub fn check_settled(&self) -> Result<()> {
        self.0.with_state(|deliveries| deliveries.on_device.as_ref().map_or(Ok(()), |one| one.check()))
    }

    /// Waits for the calls of NCCL's that have been made so far, and returns the failure of one.
    pub fn await_calls(&self) -> Result<()> {
        // Not under the lock: a hook may need it meanwhile.
        self.on_device().map_or(Ok(()), |on_device| on_device.await_calls())
    }

    /// The model runs forward. Returns the failure of an earlier backward pass, if there was one.
    pub fn forward(&self) -> Result<()> {
        self.0.attempt(|_, deliveries| deliveries.await_backward(true))
    }

    /// Runs `backward`, whose gradients stay in `.grad`. If steps are weighted, the pass has a `weight`.
    pub fn hold(&self, weight: Option<f64>, backward: impl FnOnce() -> Result<()>) -> Result<()> {
        self.0.attempt(|_, deliveries| {
            deliveries.delivery = Delivery::Hold;
            deliveries.given.fill(false);
            deliveries.await_backward(false)?;
            deliveries.begin(weight)
        })?;
        let outcome = run(backward);
        self.0.attempt(|_, deliveries| {
            deliveries.delivery = Delivery::Ignore;
            deliveries.put_back()?;
            outcome
        })
    }

    /// Runs `backward`, averages its gradients and those that are held, and leaves them in `.grad`, multiplied by `scale`. If steps are
    /// weighted, the pass has a `weight`, and `total` is the weight of all passes of the step.
    pub fn average(
        &self,
        (weight, total): (Option<f64>, Option<f64>),
        backward: impl FnOnce() -> Result<()>,
        scale: impl FnOnce() -> f64,
    ) -> Result<()> {
        let unsettled = Unsettled(Some(self));
        self.0.attempt(|reducer, deliveries| {
            deliveries.delivery = Delivery::Now;
            deliveries.await_backward(false)?;
            deliveries.start(reducer, total)?;
            deliveries.begin(weight)
        })?;
        let outcome = run(backward);
        let averaged = self.0.attempt(|reducer, deliveries| {
            deliveries.delivery = Delivery::Ignore;
            deliveries.put_back()?;
            outcome?;
            deliveries.hand_over(reducer)
        });
        let averaged = averaged.and_then(|()| {
            self.0.finish(|reducer, deliveries| {
                let scale = reducer.scale_in_step(scale());
                deliveries.place(reducer, scale)
            })
        });
        unsettled.end(averaged)
    }

    /// Averages the gradients of the last step again, in the group of `world` that follows a failed one.
    pub fn replay(&self, world: WorldSize) -> Result<()> {
        let unsettled = Unsettled(Some(self));
        let averaged = self.0.replay(|reducer, deliveries| {
            if let Some(on_device) = deliveries.on_device.as_ref().filter(|_| world == WorldSize::ONE) {
                on_device.restore()?;
            }
            deliveries.place(reducer, 1.0)
        });
        unsettled.end(averaged)
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
            deliveries.drop_held()?;
            reducer.adopt(root)
        })
    }

    /// Drops the gradients that are held.
    pub fn drop_held(&self) -> Result<()> {
        self.0.attempt(|_, deliveries| deliveries.drop_held())
    }
}

impl Deliveries {
    fn drop_held(&mut self) -> Result<()> {
        self.void.fill(false);
        for (parameter, held) in self.parameters.iter().zip(&mut self.held) {
            if std::mem::take(held) {
                shim::set_gradient(&parameter.tensor, None)?;
            }
        }
        Ok(())
    }

    /// A backward pass begins whose gradients are averaged, by `weight` if steps are weighted. What a static graph does not use is what
    /// `.grad` has.
    fn start(&mut self, reducer: &mut Reducer, weight: Option<f64>) -> Result<()> {
        self.given.fill(false);
        self.stray.clear();
        self.is_local = false;
        let Self { parameters, given, held, stray, on_device, .. } = self;
        if let Some(on_device) = on_device {
            on_device.begin();
        }
        let unused = |index: usize, memory: &mut [u8]| {
            if held[index] && parameters[index].tensor.grad().defined() {
                stray.push(index);
            }
            (given[index], held[index]) = (true, false);
            if let Some(on_device) = on_device {
                return on_device.is_queued(index).map(drop);
            }
            match gradient(&parameters[index])? {
                Some(gradient) => write(&gradient, memory),
                None => {
                    memory.fill(0);
                    Ok(())
                }
            }
        };
        match weight {
            Some(weight) => reducer.start_weighted_with(weight, unused),
            None => reducer.start_with(unused),
        }
    }

    /// A backward pass begins. If its weight is 0, libtorch must not add its gradients, which may be NaN, to what is there.
    fn begin(&mut self, weight: Option<f64>) -> Result<()> {
        self.set_aside = None;
        if weight != Some(0.0) {
            return Ok(());
        }
        if let Some(on_device) = &self.on_device {
            on_device.held()?; // What was there is taken as it is after what is queued here.
        }
        // What a static graph does not use stays where it is: the reducer has it, and its bucket may take its place while backward runs.
        let ahead = self.parameters.iter().zip(&self.given);
        let before =
            |(one, given): (&Named, &bool)| Some(one.tensor.grad()).filter(|it| it.defined() && !given);
        self.set_aside = Some(ahead.clone().map(before).collect());
        let mut cleared = ahead.filter(|(_, given)| !**given);
        cleared.try_for_each(|(one, _)| shim::set_gradient(&one.tensor, None))
    }

    /// A backward pass is over: a parameter that a pass of weight 0 did not reach has its gradient again.
    fn put_back(&mut self) -> Result<()> {
        for (one, before) in self.parameters.iter().zip(self.set_aside.take().unwrap_or_default()) {
            if let Some(before) = before {
                shim::set_gradient(&one.tensor, Some(&before))?;
            }
        }
        Ok(())
    }

    fn ready(&mut self, reducer: &mut Reducer, index: usize) -> Result<()> {
        let is_void = self.set_aside.is_some() && self.delivery != Delivery::Ignore;
        if let Some(before) = self.set_aside.as_mut().filter(|_| is_void) {
            shim::set_gradient(&self.parameters[index].tensor, before[index].take().as_ref())?;
            self.void[index] = true;
        }
        match self.delivery {
            Delivery::Now if is_void => self.give_what_counts(reducer, index),
            Delivery::Now => {
                (self.held[index], self.void[index]) = (false, false);
                self.give(reducer, index)
            }
            Delivery::Hold => {
                self.held[index] |= !is_void;
                self.on_device.as_ref().map_or(Ok(()), |on_device| on_device.held())
            }
            Delivery::Ignore => {
                self.is_local = true;
                if self.is_awaited {
                    if shim::OfDdp::is_marked() { &mut self.foreign } else { &mut self.missed }
                        .get_or_insert(index);
                }
                Ok(())
            }
        }
    }

    /// Gives the reducer the gradient that is held for the parameter; if there is none, and one in a pass of weight 0, a zero.
    fn give_what_counts(&mut self, reducer: &mut Reducer, index: usize) -> Result<()> {
        let (held, void) = (std::mem::take(&mut self.held[index]), std::mem::take(&mut self.void[index]));
        if held {
            self.give(reducer, index)?;
        }
        if void && !self.given[index] {
            reducer.ready_void(index)?;
            self.given[index] = true;
        }
        Ok(())
    }

    /// From here on a backward pass is awaited, or no longer. An error if one came that was not this `Ddp`'s, or if that of another
    /// `Ddp` was the only one since the last forward pass.
    fn await_backward(&mut self, is_awaited: bool) -> Result<()> {
        self.is_awaited = is_awaited;
        if let Some(index) = self.foreign.take().filter(|_| is_awaited) {
            let name = &self.parameters[index].spec;
            return Err(Error::invalid_argument(format!(
                "after Ddp::forward, parameter {name} got its gradient from the backward pass of another Ddp, which averages only its \
                 own parameters"
            ))
            .with_remedy(
                "to train models with one loss, make them of one VarStore, with one Ddp; to use a model for the loss of another, call it \
                 without Ddp::forward",
            ));
        }
        let Some(index) = self.missed.take() else { return Ok(()) };
        let name = &self.parameters[index].spec;
        Err(Error::invalid_argument(format!(
            "after Ddp::forward, parameter {name} got a gradient from a backward pass that averages nothing"
        ))
        .with_remedy(
            "call ddp.backward(&loss) instead of loss.backward(), and zero_grad, ddp.backward(&loss) and step instead of \
             optimizer.backward_step(&loss)",
        ))
    }

    /// Backward is over: what `.grad` of parameters has that it did not use goes to the reducer: the gradients that are held,
    /// and, if parameters may be unused, the averages of earlier passes.
    fn hand_over(&mut self, reducer: &mut Reducer) -> Result<()> {
        let all = reducer.accepts_unused();
        for index in 0..self.parameters.len() {
            if !self.given[index] {
                // `give` has nothing to give where there is no gradient.
                self.held[index] |= all;
                self.give_what_counts(reducer, index)?;
            }
            (self.held[index], self.void[index]) = (false, false);
        }
        Ok(())
    }

    /// Gives the reducer what is in `.grad`. If that lies in the parameter's place in its bucket, nothing is copied.
    fn give(&mut self, reducer: &mut Reducer, index: usize) -> Result<()> {
        if let Some(on_device) = &self.on_device {
            if on_device.is_queued(index)? {
                self.given[index] = true;
                reducer.ready_elsewhere(index)?;
            }
            return Ok(());
        }
        let parameter = &self.parameters[index];
        let Some(gradient) = gradient(parameter)? else { return Ok(()) };
        let source = gradient.data_ptr().cast_const().cast::<u8>(); // On a device no place in a bucket.
        let mut place = ptr::null();
        reducer.ready_with(index, |memory| {
            place = memory.as_ptr();
            write(&gradient, memory)
        })?;
        self.given[index] = true;
        // libtorch's own memory is free now, and not at the end of backward.
        match &self.views[index] {
            Some(view) if shim::is_here(&gradient) && place != source && is_at(view, place) => {
                shim::set_gradient(&parameter.tensor, Some(view))
            }
            _ => Ok(()),
        }
    }

    /// Makes each parameter's average its gradient: where it lies, or in the memory of the parameter's device.
    fn place(&mut self, reducer: &mut Reducer, scale: f64) -> Result<()> {
        for &index in &self.stray {
            if !reducer.has_average(index)? {
                let name = &self.parameters[index].spec;
                let cause = format!("parameter {name} got a gradient, and no rank had one in the first step");
                return Err(Error::invalid_argument(cause).with_remedy(
                    "static_graph promises the same graph in every step; set find_unused_parameters instead",
                ));
            }
        }
        if let Some(on_device) = &self.on_device {
            for (index, parameter) in self.parameters.iter().enumerate() {
                let leaf = &parameter.tensor;
                if !reducer.has_average(index)? {
                    shim::set_gradient(leaf, None)?; // No rank had one, and there are only zeros.
                } else if !leaf.grad().defined() {
                    // In a world of one, which fills no bucket: ranks that are gone used it.
                    let zeros = tch::no_grad(|| leaf.f_zeros_like()).map_err(torch)?;
                    shim::set_gradient(leaf, Some(&zeros))?;
                }
            }
            return on_device.settle(reducer.average_weight(), scale);
        }
        for (index, parameter) in self.parameters.iter().enumerate() {
            let leaf = &parameter.tensor;
            let Some(average) = reducer.gradient(index)? else {
                // No rank had one. In a replay there may be what the first attempt left, with the gradient of a rank that died.
                if leaf.grad().defined() {
                    shim::set_gradient(leaf, None)?;
                }
                continue;
            };
            parameter.check_kind()?;
            if shim::is_here(leaf) {
                let place = average.as_ptr();
                if !is_at(&leaf.grad(), place) {
                    let view = &mut self.views[index];
                    if !view.as_ref().is_some_and(|view| is_at(view, place)) {
                        *view = shim::gradient_view(leaf, reducer, index)?;
                        if view.is_none() {
                            return Err(Error::aborted("an averaged gradient is not in its bucket"));
                        }
                    }
                    shim::set_gradient(leaf, view.as_ref())?;
                }
            } else {
                let mut gradient = leaf.grad();
                if !shim::may_become(&gradient, leaf) {
                    gradient = tch::no_grad(|| leaf.f_empty_like()).map_err(torch)?;
                }
                shim::write(&gradient, average)?;
                shim::set_gradient(leaf, Some(&gradient))?;
            }
            if scale != 1.0 {
                drop(tch::no_grad(|| leaf.grad().f_mul_scalar_(scale)).map_err(torch)?);
            }
        }
        Ok(())
    }
}

/// A step whose calls of NCCL's nothing waits for yet.
///
/// If the step fails, wherever that is, or a panic ends it, what is queued from then on waits for the calls that were made. Their memory is freed soon
/// after that, and libtorch uses it again in the order of these streams.
struct Unsettled<'a>(Option<&'a Sink>);

impl Unsettled<'_> {
    /// The step is over. One that has succeeded has settled its calls.
    fn end(mut self, outcome: Result<()>) -> Result<()> {
        if outcome.is_ok() {
            self.0 = None;
        }
        outcome
    }
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        let Some(Sink(hooked)) = self.0 else { return };
        // Also after a failure, which `attempt` would return instead.
        hooked.with_state(|deliveries| {
            if let Some(on_device) = &deliveries.on_device {
                on_device.settle_failed();
            }
        });
    }
}

/// Runs a backward pass of a `Ddp`.
fn run(backward: impl FnOnce() -> Result<()>) -> Result<()> {
    let _mark = shim::OfDdp::new()?;
    backward()
}

/// What is in `.grad` of a parameter, row by row; nothing if there is none.
fn gradient(parameter: &Named) -> Result<Option<Tensor>> {
    let Named { spec, tensor: leaf } = parameter;
    let gradient = leaf.grad();
    if !gradient.defined() {
        return Ok(None);
    }
    parameter.check_kind()?;
    if !shim::is_plain(&gradient) || gradient.kind() != leaf.kind() || gradient.size() != leaf.size() {
        return Err(Error::invalid_argument(format!(
            "the gradient of parameter {spec} is sparse, or of another type"
        ))
        .with_remedy("dense gradients in the type of their parameter are averaged"));
    }
    tch::no_grad(|| gradient.f_contiguous()).map(Some).map_err(torch)
}

/// Writes `gradient` to `memory`, unless it lies there.
fn write(gradient: &Tensor, memory: &mut [u8]) -> Result<()> {
    // Compared before the gradient is borrowed: it may be this memory.
    if is_at(gradient, memory.as_ptr()) {
        return Ok(());
    }
    if !shim::is_here(gradient) {
        return shim::read(gradient, memory);
    }
    match shim::bytes(gradient) {
        Some(bytes) if bytes.len() == memory.len() => {
            memory.copy_from_slice(bytes);
            Ok(())
        }
        _ => Err(Error::invalid_argument("a gradient's memory cannot be read")),
    }
}

fn is_at(tensor: &Tensor, place: *const u8) -> bool {
    tensor.defined() && tensor.data_ptr().cast_const().cast::<u8>() == place
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread::{Builder, ThreadId, current};

    use tch::{Device, Kind};

    use super::*;

    /// Runs a backward pass within `depth` others, and `innermost` in the hook of its parameter. Within more than 60 others libtorch runs it
    /// on a thread of its own, as it does for nodes on a device.
    fn backward(depth: u32, innermost: Arc<dyn Fn() + Send + Sync>) {
        let leaf = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let ready = move || match depth {
            0 => innermost(),
            _ => backward(depth - 1, innermost.clone()),
        };
        shim::hook(&leaf, ready).unwrap();
        // Within a backward pass nothing is recorded, unless one asks for it.
        tch::with_grad(|| leaf.sum(Kind::Float)).backward();
        shim::unhook(&leaf);
    }

    /// The thread on which the hook of a backward pass runs that many passes deep, and whether it takes it for one of a `Ddp`.
    fn hooked(depth: u32, of_ddp: bool) -> (ThreadId, bool) {
        let seen = Arc::new(Mutex::new(None));
        let noted = seen.clone();
        let innermost =
            Arc::new(move || *noted.lock().unwrap() = Some((current().id(), shim::OfDdp::is_marked())));
        let backward = || {
            backward(depth, innermost);
            Ok(())
        };
        if of_ddp { run(backward) } else { backward() }.unwrap();
        assert!(!shim::OfDdp::is_marked());
        seen.lock().unwrap().unwrap()
    }

    #[test]
    fn hooks_know_the_backward_pass_of_a_ddp_on_every_thread() {
        let test = || {
            for of_ddp in [true, false, true] {
                assert_eq!(hooked(0, of_ddp), (current().id(), of_ddp));
                let (thread, found) = hooked(62, of_ddp);
                assert_ne!(thread, current().id(), "libtorch has not taken another thread");
                assert_eq!(found, of_ddp);
            }
        };
        // Sixty passes within each other.
        Builder::new().stack_size(64 << 20).spawn(test).unwrap().join().unwrap();
    }
}
