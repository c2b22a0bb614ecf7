//! A model, its optimizer, and everything else that the next step depends on, as one value: for elastic jobs and for
//! checkpoints.

use std::borrow::Cow;
use std::fmt;

use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::elastic::{Context, Parts, State, Step};
use phalanx::join::JoinGroup;
use phalanx::reducer::ParameterSpec;
use phalanx::sampler::ElasticSampler;
use phalanx::state::{ShardWriter, StateReader, StateWriter};
use phalanx::{Error, ProcessGroup, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Tensor;
use tch::nn::VarStore;

use crate::tensors::{self, Inventory, Named};
use crate::{Ddp, DdpOptions, Optimizer};

/// Everything that the next step of a training depends on: the variables of a `VarStore`, the optimizer with its state, the
/// number of steps taken, and the program's own `progress`, of any type that serde can serialize, such as an
/// [`ElasticSampler`], which knows the position in the data.
///
/// # In an elastic job
///
/// It is a [`State`], for [`phalanx::elastic::run`], like Horovod's `TorchState(model, optimizer, epoch=0)`. Inside the
/// loop [`ddp`](Self::ddp) averages gradients over the current group; before and after the loop it is in a world of one.
///
/// ```no_run
/// use phalanx::elastic::{self, Context};
/// use phalanx::sampler::ElasticSampler;
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_tch::{Optimizer, Rule, TrainState};
/// use tch::{Device, Kind, Tensor, nn};
///
/// fn main() -> Result<()> {
///     let store = nn::VarStore::new(Device::Cpu);
///     let model = nn::linear(store.root(), 4, 1, Default::default());
///     let xs = Tensor::randn([10_000, 4], (Kind::Float, Device::Cpu)); // read them
///     let optimizer = Optimizer::new(&store, Rule::ADAMW)?;
///     let mut state = TrainState::new(&store, optimizer, ElasticSampler::new(10_000))?;
///     elastic::run(&mut state, |context: &mut Context<'_, TrainState<ElasticSampler>>, _: &ProcessGroup| {
///         while context.state.progress.epoch() < 10 {
///             let (rank, world) = (context.rank(), context.world_size()); // in every step anew
///             let Some(batch) = context.state.progress.next_batch(64, rank, world) else {
///                 context.state.progress.next_epoch();
///                 continue;
///             };
///             let batch: Vec<i64> = batch.into_iter().map(|index| index as i64).collect();
///             let x = xs.index_select(0, &Tensor::from_slice(&batch));
///             let loss = context.state.ddp.forward(|| x.apply(&model).square().mean(Kind::Float))?;
///             context.state.optimizer.zero_grad()?;
///             let averaged = TrainState::backward(context, &loss)?; // again among the survivors, if a worker dies in it
///             context.state.progress.put_back(&averaged.missing); // the dead rank's samples come again
///             context.state.step(1e-3)?;
///             context.commit()?;
///         }
///         Ok::<_, phalanx::Error>(())
///     })
/// }
/// ```
///
/// # In checkpoints
///
/// [`with_group`](Self::with_group), [`resume`](Self::resume) and [`checkpoint`](Self::checkpoint). Tensors are in the
/// safetensors file as `model.conv1.weight` and `optimizer.conv1.weight.exp_avg`. A checkpoint of a model with other
/// variables, shapes or types is refused; the error names the first difference.
///
/// # Limits
///
/// Gradients that [`Ddp::backward_no_sync`] holds, a communication hook's state (PowerSGD's errors) and libtorch's random number
/// generator are not included. A hook is removed wherever the state changes its group ([`with_group`](Self::with_group),
/// [`with_options`](Self::with_options), [`sharing`](Self::sharing), each round of an elastic job): register it again after that.
pub struct TrainState<T = ()> {
    /// The model's variables, and their averages.
    pub ddp: Ddp,
    /// The optimizer, with its state.
    pub optimizer: Optimizer,
    /// Other state of the program.
    pub progress: T,
    steps: u64,
    options: DdpOptions,
    /// The group outside of the loop.
    alone: ProcessGroup,
}

impl<T> TrainState<T> {
    /// A state of these, in a world of one.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn new(store: &VarStore, optimizer: Optimizer, progress: T) -> Result<Self> {
        let alone = ProcessGroup::alone()?;
        let ddp = Ddp::new(store, &alone)?;
        Ok(Self { ddp, optimizer, progress, steps: 0, options: DdpOptions::default(), alone })
    }

    /// Averages gradients as `options` say, in each group. If it comes after [`with_group`](Self::with_group), all ranks
    /// call it together.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn with_options(mut self, options: DdpOptions) -> Result<Self> {
        self.options = options;
        let group = self.ddp.group().clone();
        self.sharing(group)
    }

    /// Makes the [`ddp`](Self::ddp) change its group through `handle`, a [`GroupHandle`](phalanx::GroupHandle), so that
    /// layers that share it, such as a [`SyncBatchNorm`](crate::SyncBatchNorm), change too.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn sharing(mut self, handle: impl Into<JoinGroup>) -> Result<Self> {
        self.ddp = self.ddp.again(handle.into(), &self.options)?;
        Ok(self)
    }

    /// Trains in `group` from now on, as [`Ddp::new`] does: every rank takes over rank 0's variables. For a program that is
    /// not elastic; all ranks call it together, before or after they load the same checkpoint.
    ///
    /// # Errors
    /// As [`Ddp::new`].
    pub fn with_group(self, group: &ProcessGroup) -> Result<Self> {
        let shared = self.ddp.group().clone();
        shared.rebind(group.clone())?;
        self.sharing(shared)
    }

    /// [`Optimizer::step`], counted.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step(&mut self, learning_rate: f64) -> Result<()> {
        self.optimizer.step(learning_rate)?;
        self.steps += 1;
        Ok(())
    }

    /// How many steps the model has done, including those before a checkpoint.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl TrainState<ElasticSampler> {
    /// The indices of this rank's samples of the next step, at most `batch`; none at the end of the epoch. In an elastic
    /// job call the sampler itself, with [`Context::rank`] and [`Context::world_size`].
    pub fn next_batch(&mut self, batch: usize) -> Option<Vec<usize>> {
        self.progress.next_batch(batch, self.ddp.rank(), self.ddp.world_size())
    }
}

impl<T: Serialize + DeserializeOwned> TrainState<T> {
    /// [`Ddp::backward`] as a [step](Context::step) of an elastic job: if a worker dies in it, the others average their
    /// gradients again, and none goes back to the last commit.
    ///
    /// The average is over the ranks that are not [missing](Step::missing), each with the same weight. It takes memory for
    /// another copy of all gradients, and the time to make it, but only if workers can change.
    ///
    /// # Errors
    /// As [`Ddp::backward`] and [`Context::step`].
    pub fn backward(context: &mut Context<'_, Self>, loss: &Tensor) -> Result<Step<()>> {
        if !context.is_elastic() {
            return context.step(|state, _| state.ddp.backward(loss));
        }
        let mut first = true;
        context.step(|state, group| match std::mem::take(&mut first) {
            true => state.ddp.backward_replayable(loss),
            false => state.ddp.replay(group),
        })
    }

    /// Resumes from the newest of `checkpoints`; returns whether there was one. All ranks call it together.
    ///
    /// # Errors
    /// As [`Checkpoints::newest`] and [`load_from`](Self::load_from).
    pub fn resume(&mut self, checkpoints: &Checkpoints) -> Result<bool> {
        let saved = checkpoints.newest()?;
        saved.map_or(Ok(false), |saved| self.load_from(&saved).map(|()| true))
    }

    /// Saves all of it as the checkpoint after [`steps`](Self::steps). All ranks call it together; rank 0 writes, while training
    /// goes on.
    ///
    /// # Errors
    /// As [`Checkpoints::save`] and [`save_to`](Self::save_to).
    pub fn checkpoint(&self, checkpoints: &Checkpoints) -> Result<()> {
        checkpoints.save(self.steps, |snapshot| self.save_to(snapshot))
    }

    /// As [`checkpoint`](Self::checkpoint), with the work divided: all ranks write the optimizer's tensors in turns, each of
    /// them once. Every rank must see the folder.
    ///
    /// # Errors
    /// As [`Checkpoints::save_sharded`] and [`save_to`](Self::save_to).
    pub fn checkpoint_sharded(&self, checkpoints: &Checkpoints) -> Result<()> {
        let group = checkpoints.group();
        let share = (group.rank().index(), group.world_size().count());
        checkpoints.save_sharded(self.steps, |snapshot| self.write(&mut ShardWriter::new(snapshot, share)))
    }

    /// Saves all of it in a checkpoint, for [`Checkpoints::save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// # Errors
    /// If a tensor or the progress cannot be written.
    pub fn save_to(&self, snapshot: &mut Snapshot) -> Result<()> {
        self.write(snapshot)
    }

    /// Loads what [`save_to`](Self::save_to) has saved. Every rank calls it.
    ///
    /// # Errors
    /// If the checkpoint is of another model or optimizer ([`is_mismatch`](phalanx::Error::is_mismatch)), or its `progress`
    /// is not of this type `T`. Nothing is changed then.
    pub fn load_from(&mut self, saved: &Saved) -> Result<()> {
        self.read(saved)
    }

    fn write(&self, writer: &mut impl StateWriter) -> Result<()> {
        let state = self.ddp.state();
        writer.value("model", &Inventory::specs(state))?;
        for one in state {
            let ParameterSpec { name, shape, dtype } = &one.spec;
            tensors::read_elements(&[one.tensor.shallow_clone()], |parts| {
                writer.tensor(&format!("model.{name}"), *dtype, shape, parts.next().unwrap_or_default())
            })?;
        }
        self.optimizer.save(writer, "optimizer")?;
        writer.value("steps", &self.steps)?;
        writer.value("progress", &self.progress)
    }

    /// Everything is read before anything is changed.
    fn read(&mut self, reader: &impl StateReader) -> Result<()> {
        let (steps, progress) = (reader.value("steps")?, reader.value("progress")?);
        let saved: Vec<ParameterSpec> = reader.value("model")?;
        let here = Inventory::specs(self.ddp.state());
        if here != saved {
            return Err(other_model(&here, &saved));
        }
        self.ddp.state().iter().try_for_each(Named::check_kind)?;
        let tensor =
            |spec: &ParameterSpec| reader.tensor(&format!("model.{}", spec.name), spec.dtype, &spec.shape);
        let elements = here.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        let moments = self.optimizer.read(reader, "optimizer")?;
        self.write_variables(&elements)?;
        self.optimizer.load(moments);
        (self.steps, self.progress) = (steps, progress);
        Ok(())
    }

    /// Gives all variables these elements. Of those that share memory each must have its own afterwards: otherwise it is as before, and
    /// an error.
    fn write_variables(&self, elements: &[Cow<'_, [u8]>]) -> Result<()> {
        let state = self.ddp.state();
        let firsts = tensors::sharing(&tensors::handles(state));
        let is_shared = |index: usize| firsts[index].is_some() || firsts.contains(&Some(index));
        let shared: Vec<usize> = (0..state.len()).filter(|&index| is_shared(index)).collect();
        let those: Vec<Tensor> = shared.iter().map(|&index| state[index].tensor.shallow_clone()).collect();
        let before = tensors::copies(&those)?;
        for (tensor, &index) in those.iter().zip(&shared) {
            tensors::write_elements(tensor, &elements[index])?;
        }
        for (&index, after) in shared.iter().zip(tensors::copies(&those)?) {
            if after == *elements[index] {
                continue;
            }
            for (tensor, elements) in those.iter().zip(&before) {
                tensors::write_elements(tensor, elements)?;
            }
            let is_other = |&other: &usize| {
                let first = |index: usize| firsts[index].unwrap_or(index);
                other != index && first(other) == first(index)
            };
            let other = shared.iter().copied().find(is_other).unwrap_or(index);
            let (one, other) = (&state[index].spec.name, &state[other].spec.name);
            return Err(Error::mismatch(format!(
                "the variables `{one}` and `{other}` share memory, and the saved state has other values for the one than for the other"
            ))
            .with_remedy("tie only weights that were tied when the state was saved"));
        }
        for (one, elements) in state.iter().zip(elements) {
            tensors::write_elements(&one.tensor, elements)?;
        }
        Ok(())
    }
}

/// The error that names the first difference.
fn other_model(here: &[ParameterSpec], saved: &[ParameterSpec]) -> Error {
    let place = here.iter().zip(saved).take_while(|(here, saved)| here == saved).count();
    let describe = |specs: &[ParameterSpec]| specs.get(place).map_or("none".to_owned(), ToString::to_string);
    let (here, saved) = (describe(here), describe(saved));
    Error::mismatch(format!(
        "the state is that of another model: its variable number {} is {saved}, here it is {here}",
        place + 1
    ))
    .with_remedy("build the model as it was built when the state was saved")
}

impl<T: Serialize + DeserializeOwned> State for TrainState<T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        self.write(parts)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.read(parts)
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        self.ddp.enter(group, &self.options)
    }

    fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        self.ddp.follow(group).map(|()| true)
    }

    fn leave(&mut self) {
        self.ddp.leave(&self.alone);
    }

    fn agree(&mut self) -> Result<()> {
        self.ddp.agree()
    }
}

impl<T: fmt::Debug> fmt::Debug for TrainState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainState")
            .field("ddp", &self.ddp)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}
