//! The state of a model of which each rank has a part, in checkpoints that load at another mesh shape.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, Bytes, DType as BurnDType, Int, Tensor};
use burn_pack::Scalar;
use phalanx::adapter::copy_of;
use phalanx::checkpoint::{Saved, Snapshot};
use phalanx::{Caller, Error, ProcessGroup, Rank, Result};
use serde::{Deserialize, Serialize};

use super::division::{Span, divided, parts};
use super::tensor::{TensorGroup, part};
use crate::Ddp;
use crate::optimizer::{Key, OptimizerState, unknown};
use crate::parameters::{Parameter, Select};
use crate::state::model::{self, Entry};
use crate::state::{Begun, Layout, fit};
use crate::{read_back, tensor_bytes};

/// How long a rank waits for others whose disks are slower.
const TIMEOUT: Duration = Duration::from_secs(600);

/// What the tensors of a rank's part are called in the whole model.
pub struct StateNames<'a> {
    whole: Box<dyn Fn(&str) -> String + 'a>,
    tied: HashSet<String>,
}

impl<'a> StateNames<'a> {
    /// `whole` gives the path in the whole model for a path in this rank's module, such as `0.layers.1.weight` of a list of stages.
    /// [`Pipeline::stage_path`](super::pipeline::Pipeline::stage_path) takes such a path apart.
    pub fn new(whole: impl Fn(&str) -> String + 'a) -> Self {
        Self { whole: Box::new(whole), tied: HashSet::new() }
    }

    /// Every rank's module has the whole model's paths, as without a pipeline.
    pub fn same() -> Self {
        Self::new(str::to_owned)
    }

    /// The tensor `name` of the whole model is on several stages, as a [`TiedParameter`](super::pipeline::TiedParameter).
    #[must_use]
    pub fn tied(mut self, name: &str) -> Self {
        self.tied.insert(name.to_owned());
        self
    }
}

impl fmt::Debug for StateNames<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StateNames(tied {:?})", self.tied)
    }
}

/// Where this rank's tensors are in the whole model: saves a training on a mesh of data, pipeline and tensor dimensions, and loads it
/// on one of another shape, or in one process.
///
/// A checkpoint has the tensors of the whole model and of the optimizer's state, under the names and with the shapes of one process.
/// Each rank writes slices of them, those that replicas have in turns, and reads the slices that it needs. Nothing is gathered.
///
/// ```
/// use burn::module::Module;
/// use burn::optim::ModuleOptimizer;
/// use phalanx::checkpoint::Checkpoints;
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::Ddp;
/// use phalanx_burn::parallel::tensor::TensorGroup;
/// use phalanx_burn::parallel::{ShardedState, StateNames};
///
/// /// `group` has all ranks, `ddp` and `tensor` those of the mesh's dimensions.
/// fn train<M: Module>(
///     group: &ProcessGroup,
///     tensor: &TensorGroup,
///     ddp: &mut Ddp<M>,
///     optimizer: &mut ModuleOptimizer,
///     checkpoints: &Checkpoints,
/// ) -> Result<()> {
///     let state = ShardedState::new(ddp, group, Some(tensor), &StateNames::same())?; // once
///     if let Some(saved) = checkpoints.newest()? {
///         state.load(ddp, optimizer, &saved, "model")?; // of any mesh
///     }
///     // .. steps
///     checkpoints.save_sharded(100, |snapshot| state.save(ddp, optimizer, snapshot, "model"))
/// }
/// ```
#[doc(alias("torch.distributed.checkpoint", "sharded_state_dict"))]
#[derive(Debug)]
pub struct ShardedState {
    /// This rank's tensors, in the order of its module.
    own: Vec<Own>,
    /// All tensors of the whole model, by name.
    whole: Vec<Entry>,
    /// All ranks.
    group: ProcessGroup,
}

/// A tensor of this rank.
#[derive(Clone, Debug)]
struct Own {
    /// What it is called in the whole model.
    name: String,
    dtype: BurnDType,
    /// Of the whole tensor.
    whole: Vec<usize>,
    /// Where this rank's part begins, and its shape.
    offsets: Vec<usize>,
    shape: Vec<usize>,
    /// Whether this rank writes its part.
    writes: bool,
    /// Whether this rank writes what all parts have in common.
    writes_index: bool,
}

/// What a rank tells the others of its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RankStatement {
    /// Its numbers among replicas and among those that share layers, and how many there are of both.
    replica: (usize, usize),
    divider: (usize, usize),
    /// The same of those among which layers were divided, if they are others.
    other_divider: Option<(usize, usize)>,
    tensors: Vec<TensorStatement>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct TensorStatement {
    name: String,
    dtype: BurnDType,
    /// Of the whole tensor.
    whole: Vec<usize>,
    is_divided: bool,
    is_trained: bool,
    is_tied: bool,
}

/// What a rank saves of an optimizer's state besides slices, by the names of the whole model.
#[derive(Default, Serialize, Deserialize)]
struct Index {
    /// Tensors of the state: parameter, field and type.
    tensors: Vec<(String, String, BurnDType)>,
    scalars: Vec<(String, String, Scalar)>,
}

impl ShardedState {
    /// What the ranks of `group`, those of a whole mesh, have in `ddp` each. `tensor` is the group among which layers are divided, if
    /// there is one; the replicas are those of the `Ddp`. All ranks call it together.
    ///
    /// # Errors
    /// On every rank: if layers are divided, and `tensor` is another group or none; if ranks of the mesh are missing in `group`; if ranks that are no replicas of each other have a tensor of the same name that is neither divided nor
    /// [tied](StateNames::tied), or tensors of one name that do not fit each other. If the exchange fails.
    pub fn new<M: Module>(
        ddp: &Ddp<M>,
        group: &ProcessGroup,
        tensor: Option<&TensorGroup>,
        names: &StateNames<'_>,
    ) -> Result<Self> {
        let divider = tensor.map_or((0, 1), |tensor| (tensor.rank(), tensor.ranks()));
        let replica = (ddp.rank().index(), ddp.world_size().count());
        let spans = divided(ddp.model());
        let trained: HashSet<_> = ddp.parameters().iter().map(|parameter| parameter.id).collect();
        let mut own: Vec<Own> = Vec::with_capacity(ddp.state().len());
        let other_divider =
            parts(ddp.model()).values().map(|part| (part.rank, part.ranks)).find(|part| *part != divider);
        let tensors = Vec::with_capacity(own.capacity());
        let mut told = RankStatement { replica, divider, other_divider, tensors };
        for parameter in ddp.state() {
            let placed = Own::new(parameter, spans.get(&parameter.id).copied(), divider, names);
            told.tensors.push(TensorStatement {
                name: placed.name.clone(),
                dtype: placed.dtype,
                whole: placed.whole.clone(),
                is_divided: spans.contains_key(&parameter.id),
                is_trained: trained.contains(&parameter.id),
                is_tied: names.tied.contains(&placed.name),
            });
            own.push(placed);
        }
        let all = group.all_gather_object(&told)?;
        check_divider(&all)?;
        let whole = agreed(&all)?;
        let positions: HashMap<&str, usize> =
            whole.keys().enumerate().map(|(position, name)| (*name, position)).collect();
        let writers = writers(&all, &positions);
        check_writers(&all, &whole, &writers)?;
        let rank = group.rank();
        for (own, told) in own.iter_mut().zip(&told.tensors) {
            let part = if told.is_divided { divider.0 } else { 0 };
            let is_writer = |part: usize| writers.get(&(own.name.as_str(), part)) == Some(&rank.index());
            (own.writes, own.writes_index) = (is_writer(part), part == 0 && is_writer(0));
        }
        let entry = |(name, (_, tensor)): (&&str, &(usize, &TensorStatement))| {
            Entry::new(name, tensor.dtype, &tensor.whole)
        };
        let whole = whole.iter().map(entry).collect();
        Ok(Self { own, whole, group: group.clone() })
    }

    /// Adds this rank's part of the model and of the state of `optimizer` to a sharded checkpoint, under names that begin with `name`:
    /// every rank calls it in [`save_sharded`](phalanx::checkpoint::Checkpoints::save_sharded). Running statistics are those of the
    /// first replica. A process that has the whole model, in a `Ddp` of its own, may also call it in
    /// [`save`](phalanx::checkpoint::Checkpoints::save).
    ///
    /// # Errors
    /// If the model is not the one that this was made for, the state cannot be read, or has another shape than its parameter; in the middle
    /// of a step, where gradients of [`Ddp::backward_no_sync`] would be missing; if the group of the `Ddp` is a
    /// [`GroupHandle`](phalanx::GroupHandle) that leads to other ranks by now: these would not write what they leave to each other; or as
    /// [`Snapshot::slice`].
    pub fn save<M: Module>(
        &self,
        ddp: &Ddp<M>,
        optimizer: &ModuleOptimizer,
        snapshot: &mut Snapshot,
        name: &str,
    ) -> Result<()> {
        ddp.check_ranks()?;
        ddp.check_nothing_held()?;
        self.check_model(ddp)?;
        if self.group.rank().is_main() {
            snapshot.value(name, &self.whole)?;
        }
        ddp.settle_buffers();
        let mut saver = Saver { own: self.own.iter(), snapshot, name, outcome: Ok(()) };
        ddp.model().visit(&mut saver);
        saver.outcome?;
        // Of all tensors: one that is frozen by now may have moments.
        let state = OptimizerState::of(optimizer, ddp.state())?;
        state.check_types(optimizer, ddp.state())?;
        let OptimizerState { tensors, scalars, .. } = state;
        let mut index = Index::default();
        let of = |key: &Key| self.own.get(key.index).ok_or_else(|| unknown(key.index));
        for (key, layout, elements) in tensors {
            let own = of(&key)?;
            own.check(&key.field, &layout.shape)?;
            if own.writes_index {
                index.tensors.push((own.name.clone(), key.field.clone(), layout.dtype));
            }
            if own.writes {
                own.add(
                    snapshot,
                    &in_optimizer(name, &own.name, &key.field),
                    layout.dtype,
                    copy_of(&elements)?,
                )?;
            }
        }
        for (key, scalar) in scalars {
            let own = of(&key)?;
            if own.writes_index {
                index.scalars.push((own.name.clone(), key.field, scalar));
            }
        }
        snapshot.value(&format!("{}{}", index_prefix(name), self.group.rank()), &index)
    }

    /// Loads this rank's part of what was [saved](Self::save) under `name` on a mesh of any shape, also in one process. All ranks call it together: each
    /// waits until all have read their parts, 10 minutes at most, or the group's time-out if that is longer.
    ///
    /// # Errors
    /// On every rank, if one finds that it does not exist, cannot be read, or is that of another model or optimizer, or if the ranks load the checkpoints
    /// of different steps or runs: then nothing has changed anywhere.
    /// A checkpoint after a step above 0 without anything of an optimizer is that of another one, unless this one keeps nothing. If the exchange
    /// fails.
    pub fn load<M: Module>(
        &self,
        ddp: &mut Ddp<M>,
        optimizer: &mut ModuleOptimizer,
        saved: &Saved,
        name: &str,
    ) -> Result<()> {
        let _section = self.group.announce_section();
        let read = self.read(ddp, optimizer, saved, name);
        // If some ranks went on without their parts, the model would be made of two.
        let own = (saved.step(), saved.checksum());
        let told = read.as_ref().map(|_| own).map_err(ToString::to_string);
        let group = self.group.with_timeout(self.group.timeout().max(TIMEOUT));
        let all = group.in_call(Caller::ShardedStateLoad).all_gather_object(&told)?;
        let (loaded, elements) = read?;
        for (rank, told) in self.group.world_size().ranks().zip(all) {
            let other = told.map_err(|cause| {
                let cause =
                    format!("rank {rank} has not loaded its part of the state, so no rank has: {cause}");
                Error::aborted(cause).with_peer(rank)
            })?;
            if other != own {
                let (this, (step, _), (own, _)) = (self.group.rank(), other, own);
                let cause = if step == own {
                    format!("ranks {this} and {rank} load the states of two runs, both after step {step}")
                } else {
                    format!("rank {rank} loads the state of step {step}, and rank {this} that of step {own}")
                };
                return Err(Error::mismatch(cause)
                    .with_peer(rank)
                    .with_remedy("load the same checkpoint on every rank, as Checkpoints::newest gives it"));
            }
        }
        *optimizer = loaded;
        // Deferred updates of forward passes would overwrite the loaded values.
        ddp.settle_buffers();
        ddp.map(|model| model::loaded(model, Select::All, elements));
        Ok(())
    }

    /// The optimizer with this rank's part of the state, and the elements of this rank's tensors.
    fn read<'a, M: Module>(
        &self,
        ddp: &Ddp<M>,
        optimizer: &ModuleOptimizer,
        saved: &'a Saved,
        name: &str,
    ) -> Result<(ModuleOptimizer, Vec<Cow<'a, [u8]>>)> {
        self.check_model(ddp)?;
        model::compare(&self.whole, &saved.value::<Vec<Entry>>(name)?)?;
        let elements = self.own.iter().map(|own| own.read(saved, &in_model(name, &own.name), own.dtype));
        let elements = elements.collect::<Result<Vec<_>>>()?;
        model::check_tied(ddp.state(), ddp.parameters(), &elements)?;
        let (mut tensors, mut scalars) = (Fields::new(), Fields::new());
        for part in saved.part_names().filter(|part| part.starts_with(&index_prefix(name))) {
            let index: Index = saved.value(part)?;
            index.tensors.into_iter().for_each(|(name, field, dtype)| tensors.add(name, field, dtype));
            index.scalars.into_iter().for_each(|(name, field, scalar)| scalars.add(name, field, scalar));
        }
        let (mut state, mut seen) = (OptimizerState::empty(), HashSet::new());
        for (index, (own, parameter)) in self.own.iter().zip(ddp.state()).enumerate() {
            // One that stands in several places has the state of the first.
            if !seen.insert(parameter.id) {
                continue;
            }
            let key = |field: &String| Key { index, field: field.clone() };
            for (field, dtype) in tensors.of(&own.name) {
                let bytes = own.read(saved, &in_optimizer(name, &own.name, field), *dtype)?;
                let layout = Layout { dtype: *dtype, shape: own.shape.clone() };
                state.tensors.push((key(field), layout, Bytes::from_bytes_vec(bytes.into_owned())));
            }
            let numbers = scalars.of(&own.name);
            state.scalars.extend(numbers.iter().map(|(field, scalar)| (key(field), *scalar)));
            if !numbers.is_empty() {
                state.paths.push((index, parameter.name.clone()));
            }
        }
        // Another stage's parameters may have a state, and those of this one none.
        let begun = Begun::after(saved.step()).unless(!tensors.is_empty() || !scalars.is_empty());
        fit::check(optimizer, (ddp.model(), ddp.state()), &state.index(), begun)?;
        Ok((state.load(optimizer, ddp.state())?, elements))
    }

    /// An error unless this was made for the model of `ddp`.
    fn check_model<M: Module>(&self, ddp: &Ddp<M>) -> Result<()> {
        let state = ddp.state();
        let same = state.len() == self.own.len()
            && state
                .iter()
                .zip(&self.own)
                .all(|(tensor, own)| tensor.shape == own.shape && tensor.dtype == own.dtype);
        if !same {
            return Err(Error::invalid_argument(
                "the Ddp is not the one for which ShardedState::new was called",
            )
            .with_remedy("make a ShardedState for each model"));
        }
        Ok(())
    }
}

fn in_model(prefix: &str, name: &str) -> String {
    format!("{prefix}.model.{name}")
}

fn in_optimizer(prefix: &str, name: &str, field: &str) -> String {
    format!("{prefix}.optimizer.{name}.{field}")
}

/// What the names of all ranks' [`Index`]es begin with.
fn index_prefix(name: &str) -> String {
    format!("{name}.optimizer-")
}

/// Values by the name of a parameter and a field of its state.
struct Fields<T>(HashMap<String, Vec<(String, T)>>);

impl<T> Fields<T> {
    fn new() -> Self {
        Self(HashMap::new())
    }

    fn add(&mut self, name: String, field: String, value: T) {
        self.0.entry(name).or_default().push((field, value));
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn of(&self, name: &str) -> &[(String, T)] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

impl Own {
    fn new(
        parameter: &Parameter,
        span: Option<Span>,
        (rank, ranks): (usize, usize),
        names: &StateNames<'_>,
    ) -> Self {
        let Parameter { name, shape, dtype, .. } = parameter;
        let (mut whole, mut offsets) = (shape.clone(), vec![0; shape.len()]);
        if let Some(Span { dim, total }) = span {
            (whole[dim], offsets[dim]) = (total, part(total, ranks, rank).0);
        }
        let (name, shape) = ((names.whole)(name), shape.clone());
        Self { name, dtype: *dtype, whole, offsets, shape, writes: false, writes_index: false }
    }

    /// An error unless a field of the optimizer's state has an element for each of the parameter's.
    fn check(&self, field: &str, shape: &[usize]) -> Result<()> {
        if shape == self.shape {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "the optimizer keeps `{field}` of shape {shape:?} for `{}` of shape {:?}: its state cannot be divided",
            self.name, self.shape
        ))
        .with_remedy("take an optimizer that treats each element by itself, such as AdamW"))
    }

    fn add(&self, snapshot: &mut Snapshot, name: &str, dtype: BurnDType, elements: Vec<u8>) -> Result<()> {
        let dtype = tensor_bytes::dtype(dtype)?;
        if self.shape == self.whole {
            return snapshot.tensor_bytes(name, dtype, &self.whole, elements);
        }
        let place = (self.offsets.as_slice(), self.shape.as_slice());
        snapshot.slice_bytes(name, dtype, &self.whole, place, elements)
    }

    fn read<'a>(&self, saved: &'a Saved, name: &str, dtype: BurnDType) -> Result<Cow<'a, [u8]>> {
        let tensor = saved.tensor(name)?;
        if tensor.shape() != self.whole || tensor.dtype() != tensor_bytes::dtype(dtype)? {
            return Err(Error::mismatch(format!(
                "the state is that of another model: `{name}` is {} {:?} there, and {dtype:?} {:?} here",
                tensor.dtype(),
                tensor.shape(),
                self.whole
            ))
            .with_remedy("build the model as it was built when the state was saved"));
        }
        tensor.slice(&self.offsets, &self.shape)?.bytes()
    }
}

/// An error if a rank has divided layers, and names another group for those among which they are: its part would be taken for another one.
fn check_divider(all: &[RankStatement]) -> Result<()> {
    let other =
        |(rank, told): (usize, &RankStatement)| told.other_divider.map(|part| (rank, part, told.divider));
    let Some((rank, (part, parts), (number, ranks))) = all.iter().enumerate().find_map(other) else {
        return Ok(());
    };
    Err(Error::invalid_argument(format!(
        "rank {rank} has part {part} of {parts} of a divided layer, and in `tensor` it is number {number} of {ranks}"
    ))
    .with_remedy("give ShardedState::new the TensorGroup among whose ranks the layers are divided"))
}

/// The tensors of the whole model by name, each with the first rank that has it; an error if ranks contradict each other.
fn agreed(all: &[RankStatement]) -> Result<BTreeMap<&str, (usize, &TensorStatement)>> {
    let mut whole: BTreeMap<&str, (usize, &TensorStatement)> = BTreeMap::new();
    // Which rank of the first replica has which part.
    let mut parts: HashMap<(&str, usize), usize> = HashMap::new();
    let failed = |cause: String, rank: usize, remedy: &str| {
        Err(Error::mismatch(cause).with_peer(Rank::new(rank as u32)).with_remedy(remedy))
    };
    for (rank, told) in all.iter().enumerate() {
        if told.replica.1 != all[0].replica.1 || told.divider.1 != all[0].divider.1 {
            let of = |told: &RankStatement| {
                format!("{} replicas and {} ranks that share layers", told.replica.1, told.divider.1)
            };
            let cause = format!("rank 0 is one of {}, and rank {rank} of {}", of(&all[0]), of(told));
            return failed(cause, rank, "give every rank the groups of one mesh");
        }
        for tensor in &told.tensors {
            let name = tensor.name.as_str();
            let (first, there) = *whole.entry(name).or_insert((rank, tensor));
            if (there.dtype, &there.whole, there.is_divided)
                != (tensor.dtype, &tensor.whole, tensor.is_divided)
            {
                let of = |tensor: &TensorStatement| {
                    let divided = if tensor.is_divided { "(divided)" } else { "(not divided)" };
                    format!("{:?} {:?} {divided}", tensor.dtype, tensor.whole)
                };
                let cause =
                    format!("`{name}` is {} on rank {first}, and {} on rank {rank}", of(there), of(tensor));
                return failed(cause, rank, NAMES);
            }
            if told.replica.0 != 0 {
                continue;
            }
            match parts.insert((name, told.divider.0), rank) {
                Some(other) if other == rank => {
                    return failed(format!("two tensors of rank {rank} are `{name}`"), rank, NAMES);
                }
                Some(other) if !tensor.is_tied => {
                    let cause = format!(
                        "`{name}` is on ranks {other} and {rank}, which are no replicas of each other"
                    );
                    return failed(cause, rank, NAMES);
                }
                Some(_) | None => {}
            }
        }
    }
    Ok(whole)
}

/// The remedy if names are not those of the whole model.
const NAMES: &str = "let StateNames give each tensor its path in the whole model, name what stages share with `tied`, and give \
                     ShardedState::new the tensor group, if there is one";

/// Which rank writes which part of which tensor: replicas in turns, and of the others that have it the first.
fn writers<'a>(
    all: &'a [RankStatement],
    positions: &HashMap<&str, usize>,
) -> HashMap<(&'a str, usize), usize> {
    let mut writers = HashMap::new();
    for (rank, told) in all.iter().enumerate() {
        for tensor in &told.tensors {
            let position = positions.get(tensor.name.as_str()).copied().unwrap_or(0);
            // Replicas have buffers of their own.
            let turn = if tensor.is_trained { position % told.replica.1 } else { 0 };
            let part = told.divider.0;
            if told.replica.0 == turn && (tensor.is_divided || part == 0) {
                writers.entry((tensor.name.as_str(), part)).or_insert(rank);
            }
        }
    }
    writers
}

/// An error if nobody would write a part of a tensor of the `whole` model: its rank, or a replica of that, is not in the group.
fn check_writers(
    all: &[RankStatement],
    whole: &BTreeMap<&str, (usize, &TensorStatement)>,
    writers: &HashMap<(&str, usize), usize>,
) -> Result<()> {
    let is_unwritten = |(name, (first, tensor)): &(&&str, &(usize, &TensorStatement))| {
        let parts = if tensor.is_divided { all[*first].divider.1 } else { 1 };
        (0..parts).any(|part| !writers.contains_key(&(**name, part)))
    };
    whole.iter().find(is_unwritten).map_or(Ok(()), |(name, _)| {
        Err(Error::invalid_argument(format!(
            "no rank of the group would save `{name}`, or a part of it: some replicas, or some ranks that share layers, are not in the group"
        ))
        .with_remedy("give ShardedState::new the group of all ranks of the mesh"))
    })
}

/// Adds this rank's slices of the model to a checkpoint.
struct Saver<'a> {
    own: std::slice::Iter<'a, Own>,
    snapshot: &'a mut Snapshot,
    name: &'a str,
    outcome: Result<()>,
}

impl Saver<'_> {
    fn save(&mut self, elements: impl FnOnce() -> Result<Vec<u8>>) {
        let Some(own) = self.own.next().filter(|own| own.writes && self.outcome.is_ok()) else { return };
        let name = in_model(self.name, &own.name);
        self.outcome = elements().and_then(|elements| own.add(self.snapshot, &name, own.dtype, elements));
    }
}

impl ModuleVisitor for Saver<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.save(|| tensor_bytes::with_bytes(param.base(), |tensor| copy_of(tensor.bytes))?);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.save(|| copy_of(read_back::data(param.base())?.as_bytes()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.save(|| copy_of(read_back::data(param.base())?.as_bytes()));
    }
}
