//! Copies of a module on several devices, and the work on them.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::thread;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, Device, Int, Tensor};
use phalanx::{Error, Result};

#[cfg(feature = "nccl")]
use super::links::{self, Links};
use super::scatter::{self, Destination, Scatter, through_host};
use super::transfers::{Transfer, Transfers};
use crate::gradients::{ModelToken, SyncedGradients};
use crate::parallel::{refuse_divided, refuse_units};
use crate::ties::Ties;

type Scope = Box<dyn Fn(usize, &mut dyn FnMut()) + Send + Sync>;

thread_local! {
    static ONE_OF_SEVERAL: Cell<bool> = const { Cell::new(false) };
}

/// An error if this thread runs one of several replicas, and `what` exchanges with other ranks: replicas of one process run at once, so one's exchange
/// could meet that of another replica, or of another layer, on the next rank.
pub(crate) fn refuse_several(what: &str, remedy: &str) -> Result<()> {
    if !ONE_OF_SEVERAL.get() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{what} over several ranks is in one of several replicas of a DataParallel or a TowerGradients"
    ))
    .with_remedy(format!("start a process for each device and train with Ddp, or {remedy}")))
}

/// A model and the devices of its replicas.
pub(super) struct Replicas<M> {
    /// Always set, except while an optimizer has it.
    model: Option<M>,
    /// The first is the main one, where the model itself is.
    devices: Vec<Device>,
    scope: Scope,
    token: ModelToken,
    ties: Ties,
    /// What moves tensors from device to device, unless they go through the host's memory.
    #[cfg(feature = "nccl")]
    links: Option<Links>,
    pub transfers: Transfers,
}

/// A copy of the model for one step.
pub(super) struct Replica<M> {
    number: usize,
    module: M,
}

impl<M: Module> Replicas<M> {
    pub fn new(model: M, devices: Vec<Device>) -> Result<Self> {
        let Some(main) = devices.first() else {
            return Err(Error::invalid_argument("the list of devices is empty")
                .with_remedy("give one device or more, such as Device::flex().autodiff()"));
        };
        if let Some(plain) = devices.iter().find(|device| !device.is_autodiff()) {
            return Err(Error::invalid_argument(format!("{plain:?} is a device without autodiff"))
                .with_remedy("give device.autodiff()"));
        }
        // Replicas of a part would exchange with other ranks all at once.
        refuse_units(&model, "data parallelism in one process")?;
        refuse_divided(&model, "data parallelism in one process")?;
        // Before each parameter gets a tensor of its own.
        let ties = Ties::of(&model)?;
        let model = model.fork(main);
        model.visit(&mut Initialiser);
        let model = Some(ties.retie(model));
        let scope: Scope = Box::new(|_, work| work());
        Ok(Self {
            model,
            devices,
            scope,
            token: ModelToken::default(),
            ties,
            #[cfg(feature = "nccl")]
            links: None,
            transfers: Transfers::default(),
        })
    }

    /// The same over NCCL.
    #[cfg(feature = "nccl")]
    pub fn over(mut self, groups: Vec<phalanx_nccl::DeviceGroup>) -> Result<Self> {
        if self.devices.len() > 1 {
            links::refuse_shared(self.model())?;
        }
        self.links = Some(Links::new(&self.devices, groups)?);
        Ok(self)
    }

    pub fn set_scope(&mut self, scope: impl Fn(usize, &mut dyn FnMut()) + Send + Sync + 'static) {
        self.scope = Box::new(scope);
    }

    pub fn model(&self) -> &M {
        match &self.model {
            Some(model) => model,
            None => missing(),
        }
    }

    pub fn into_model(self) -> M {
        match self.model {
            Some(model) => model,
            None => missing(),
        }
    }

    pub fn step(
        &mut self,
        optimizer: &mut ModuleOptimizer,
        learning_rate: ModuleLearningRate,
        gradients: SyncedGradients,
    ) -> Result<()> {
        let gradients = gradients.of(&self.token)?;
        // Moved and not cloned, so that the optimizer can change parameters in place.
        let model = self.model.take().map(|model| optimizer.step(learning_rate, model, gradients));
        self.model = model.map(|model| self.ties.retie(model));
        Ok(())
    }

    /// A replica for each part of `input`, on its device.
    ///
    /// # Errors
    /// If the input has no samples, or a graph, or cannot be copied.
    pub fn scatter<I: Scatter>(&mut self, input: I) -> Result<Vec<(Replica<M>, I)>> {
        scatter::without_graphs(|| self.scattered(input))
    }

    fn scattered<I: Scatter>(&mut self, input: I) -> Result<Vec<(Replica<M>, I)>> {
        let ranges = scatter::parts(input.samples()?, self.devices.len());
        if ranges.is_empty() {
            return Err(
                Error::invalid_argument("the batch has no samples").with_remedy("leave out empty batches")
            );
        }
        let Self {
            devices,
            scope,
            #[cfg(feature = "nccl")]
            links,
            transfers,
            ..
        } = self;
        let inputs: Vec<I> = transfers.scatter.measure(|moved| -> Result<_> {
            #[cfg(feature = "nccl")]
            let mut copying = Vec::new();
            let place = |(number, range): (usize, Range<usize>)| match number {
                0 => Ok(input.part(range)),
                _ => {
                    let mut to = Destination::new(&devices[number], moved);
                    #[cfg(feature = "nccl")]
                    to.directly(links.as_ref(), 0, number);
                    let part = within(scope, number, || input.part(range).begin_copy(&mut to));
                    #[cfg(feature = "nccl")]
                    copying.append(&mut to.take_copying());
                    part
                }
            };
            let parts = ranges.into_iter().enumerate().map(place).collect::<Result<Vec<I>>>()?;
            #[cfg(feature = "nccl")]
            links.as_ref().map_or(Ok(()), |links| links.finish(copying))?;
            Ok(parts)
        })?;
        drop(input);
        Ok(self.replicate(inputs.len())?.into_iter().zip(inputs).collect())
    }

    fn replicate(&mut self, count: usize) -> Result<Vec<Replica<M>>> {
        let model = self.model().clone();
        #[cfg(feature = "nccl")]
        if let Some(links) = &self.links
            && count > 1
        {
            let (devices, scope, ties) = (&self.devices, &self.scope, self.ties);
            return self.transfers.replicate.measure(|moved| {
                let copies = links.broadcast(&model, moved)?;
                let mut replicas = vec![Replica { number: 0, module: model.clone() }];
                let mut copying = Vec::new();
                for (number, copies) in (1..count).zip(copies) {
                    let mut to = Destination::new(&devices[number], moved);
                    to.directly(Some(links), 0, number);
                    let module = within(scope, number, || copies.place(model.clone(), &mut to))?;
                    copying.append(&mut to.take_copying());
                    replicas.push(Replica { number, module: ties.retie(module) });
                }
                links.finish(copying)?;
                Ok(replicas)
            });
        }
        let Self { devices, scope, transfers, ties, .. } = self;
        Ok(transfers.replicate.measure(|moved| {
            let copy = |number| {
                let module = model.clone();
                let module = match number {
                    0 => module,
                    _ => {
                        let copier = &mut Copier { device: &devices[number], moved };
                        within(scope, number, || ties.retie(module.map(copier)))
                    }
                };
                Replica { number, module }
            };
            (0..count).map(copy).collect()
        }))
    }

    /// Runs `work` on all replicas at once, each in a thread; returns the replicas with the results. An error if the system refuses a
    /// thread.
    pub fn run<I: Send, O: Send>(
        &self,
        parts: Vec<(Replica<M>, I)>,
        work: impl Fn(&M, I) -> O + Sync,
    ) -> Result<Vec<(Replica<M>, O)>> {
        let (scope, work) = (&self.scope, &work);
        // Not the number of parts: a short batch may have one, and another rank's more.
        let several = self.devices.len() > 1;
        let each = |(replica, input): (Replica<M>, I)| {
            let output = within(scope, replica.number, || {
                let _mark = Mark::set(several);
                work(&replica.module, input)
            });
            (replica, output)
        };
        thread::scope(|threads| {
            let mut parts = parts.into_iter();
            let main = parts.next();
            let start = |part| thread::Builder::new().spawn_scoped(threads, move || each(part));
            let others: io::Result<Vec<_>> = parts.map(start).collect();
            let others = others.map_err(|error| {
                Error::environment(format!(
                    "a thread for a replica of the model could not be started: {error}"
                ))
            })?;
            // The main replica runs on the caller's thread.
            let mut outcomes: Vec<_> = main.map(each).into_iter().collect();
            for other in others {
                outcomes.push(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            }
            Ok(outcomes)
        })
    }

    /// Puts the parts together on the main device.
    pub fn gather<const D: usize>(&mut self, parts: Vec<Tensor<D>>) -> Result<Tensor<D>> {
        let Self {
            devices,
            scope,
            #[cfg(feature = "nccl")]
            links,
            transfers,
            ..
        } = self;
        let main = devices[0].clone().inner();
        transfers.gather.measure(|moved| {
            let together = || -> Result<Tensor<D>> {
                #[cfg(feature = "nccl")]
                let mut copying = Vec::new();
                let fetch = |(number, part): (usize, Tensor<D>)| match number {
                    0 => Ok(part),
                    _ => {
                        let mut to = Destination::new(&main, moved);
                        #[cfg(feature = "nccl")]
                        to.directly(links.as_ref(), number, 0);
                        let part = part.begin_copy(&mut to);
                        #[cfg(feature = "nccl")]
                        copying.append(&mut to.take_copying());
                        part
                    }
                };
                let parts = parts.into_iter().enumerate().map(fetch).collect::<Result<Vec<_>>>()?;
                #[cfg(feature = "nccl")]
                links.as_ref().map_or(Ok(()), |links| links.finish(copying))?;
                Ok(Tensor::cat(parts, 0))
            };
            within(scope, 0, together).map(Tensor::from_inner)
        })
    }

    /// Gives each replica the gradient of its output.
    #[allow(clippy::type_complexity, reason = "a replica, its output and the gradient of that")]
    pub fn return_parts<const D: usize>(
        &mut self,
        parts: Vec<(Replica<M>, Tensor<D>)>,
        gradient: Tensor<D>,
    ) -> Result<Vec<(Replica<M>, (Tensor<D>, Tensor<D>))>> {
        let Self {
            devices,
            scope,
            #[cfg(feature = "nccl")]
            links,
            transfers,
            ..
        } = self;
        let mut start = 0;
        transfers.gather.measure(|moved| -> Result<_> {
            #[cfg(feature = "nccl")]
            let mut copying = Vec::new();
            let give = |(replica, output): (Replica<M>, Tensor<D>)| {
                let range = start..start + output.dims()[0];
                start = range.end;
                let part = gradient.part(range);
                let part = match replica.number {
                    0 => Ok(part),
                    number => {
                        let device = devices[number].clone().inner();
                        let mut to = Destination::new(&device, moved);
                        #[cfg(feature = "nccl")]
                        to.directly(links.as_ref(), 0, number);
                        let part = within(scope, number, || part.begin_copy(&mut to));
                        #[cfg(feature = "nccl")]
                        copying.append(&mut to.take_copying());
                        part
                    }
                };
                part.map(|part| (replica, (output, Tensor::from_inner(part))))
            };
            let parts = parts.into_iter().map(give).collect::<Result<Vec<_>>>()?;
            #[cfg(feature = "nccl")]
            links.as_ref().map_or(Ok(()), |links| links.finish(copying))?;
            Ok(parts)
        })
    }

    /// The sum of `own` and of all replicas' gradients.
    pub fn reduce(
        &mut self,
        own: GradientsParams,
        parts: Vec<(Replica<M>, GradientsParams)>,
    ) -> Result<SyncedGradients> {
        let model = self.model().clone();
        #[cfg(feature = "nccl")]
        if let Some(links) = &self.links
            && parts.len() > 1
        {
            // The replicas themselves are dropped.
            let parts: Vec<_> = parts.into_iter().map(|(_, gradients)| gradients).collect();
            let reduce = |moved: &mut Transfer| links.reduce(&model, own, parts, moved);
            let sum = self.transfers.reduce.measure(reduce)?;
            return Ok(SyncedGradients::new(sum, &self.token));
        }
        let Self { devices, scope, token, transfers, .. } = self;
        let main = devices[0].clone().inner();
        let sum = transfers.reduce.measure(|moved| {
            within(scope, 0, || {
                let mut sum = own;
                for (Replica { number, module }, part) in parts {
                    drop(module);
                    let mut unused = Transfer::default();
                    let moved = if number == 0 { &mut unused } else { &mut *moved };
                    let from = if number == 0 { None } else { Some(&main) };
                    model.visit(&mut Adder { sum: &mut sum, part, from, moved });
                }
                sum
            })
        });
        Ok(SyncedGradients::new(sum, token))
    }

    /// Averages the running statistics of all replicas.
    pub fn settle(&self) {
        // Running state defers each thread's update; this merges them now.
        drop(self.model().valid());
    }
}

impl<M> fmt::Debug for Replicas<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicas").field("devices", &self.devices).finish_non_exhaustive()
    }
}

/// Only an optimizer's panic that the program catches can leave replicas without their model.
#[allow(clippy::panic, reason = "the program has caught one and goes on")]
fn missing() -> ! {
    panic!("the optimizer panicked in step and took the model with it")
}

fn within<T>(scope: &Scope, number: usize, work: impl FnOnce() -> T) -> T {
    let (mut work, mut outcome) = (Some(work), None);
    scope(number, &mut || {
        if let Some(work) = work.take() {
            outcome = Some(work());
        }
    });
    match (outcome, work) {
        (Some(outcome), _) => outcome,
        // If the scope did not run the work, it is run here.
        (None, Some(work)) => work(),
        (None, None) => unreachable!("work that was taken has an outcome"),
    }
}

/// Sets [`ONE_OF_SEVERAL`] until it is dropped.
struct Mark {
    before: bool,
}

impl Mark {
    fn set(several: bool) -> Self {
        Self { before: ONE_OF_SEVERAL.replace(several) }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        ONE_OF_SEVERAL.set(self.before);
    }
}

/// Initialises parameters that wait for their first use, which would otherwise happen in a replica.
struct Initialiser;

impl ModuleVisitor for Initialiser {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.base());
    }
}

/// Copies a module's tensors to a device, as new leaves.
struct Copier<'a> {
    device: &'a Device,
    moved: &'a mut Transfer,
}

impl ModuleMapper for Copier<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let gradient = old.is_require_grad();
            through_host(old.inner(), self.device, self.moved).set_require_grad(gradient)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|old| through_host(old, self.device, self.moved))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|old| through_host(old, self.device, self.moved))
    }
}

/// Adds one replica's gradients.
struct Adder<'a> {
    sum: &'a mut GradientsParams,
    part: GradientsParams,
    /// The device to which they are copied first, unless they are there.
    from: Option<&'a Device>,
    moved: &'a mut Transfer,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(part) = self.part.remove::<D>(param.id) else { return };
        let part = match self.from {
            Some(main) => through_host(part, main, self.moved),
            None => part,
        };
        let sum = match self.sum.remove::<D>(param.id) {
            Some(sum) => sum + part,
            None => part,
        };
        self.sum.register(param.id, sum);
    }
}
