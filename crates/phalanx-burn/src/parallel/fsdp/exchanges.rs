//! The collectives of sharded units: gathers, some of which run ahead, and reduce_scatters in flight.
//!
//! The gradient of a shard is waited for in an operation just above its parameter, which Burn's order by depth runs
//! after all units: until then scatters run while units compute. Gathers run ahead by the order of the pass before.
//! Every rank decides alike, because all decisions follow from the calls so far.
//!
//! What was gathered and scattered is compared by a hash before each step, since equal sizes would let different units
//! pass for each other.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Weak};
use std::time::Instant;

use burn::module::ParamId;
use burn::tensor::Tensor;
use parking_lot::Mutex;
use phalanx::adapter::WeakGroup;
use phalanx::trace::{Trace, Track};
use phalanx::{Buffer, Caller, Error, ProcessGroup, ReduceOp, Result, Work, WorldSize};

use super::super::mixed;
use super::calls::{Call, Calls};
use super::collector::Collector;
use super::group::ShardingOptions;
use super::layout::FlatLayout;
use super::replicated::Replicated;
use crate::tensor_bytes;

/// Gradients that are being reduced and scattered while the next unit's are computed. More would only take memory.
const IN_FLIGHT: usize = 1;

/// By unit: which of its parameters have got a gradient.
pub(super) type Present = HashMap<usize, Vec<bool>>;

/// A forward pass, whose backward pass uses the same parameters, and a unit.
type Ahead = (u64, usize);

/// A unit, and this rank's shard at some time: its piece of each parameter.
pub(super) type Shard = (Arc<FlatLayout>, Vec<Tensor<1>>);

/// What all units of a [`ShardingGroup`](super::ShardingGroup) share on one rank.
pub(super) struct Exchanges {
    pub group: ProcessGroup,
    /// The ranks that have the same shards as this one: one, if there are no others.
    pub replicas: ProcessGroup,
    pub options: ShardingOptions,
    trace: Trace,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Lives as long as the model's `Fsdp`.
    owner: Weak<()>,
    /// By number.
    units: Vec<Arc<FlatLayout>>,
    /// The number of the unit of each piece.
    known: HashMap<ParamId, usize>,
    /// The forward pass that is under way.
    current: Option<Arc<ForwardPass>>,
    passes: u64,
    /// This rank's shards during that pass, for gathers that run ahead.
    shards: HashMap<usize, Vec<Tensor<1>>>,
    /// The numbers of the units in the order of the pass before.
    order: Vec<usize>,
    /// Whether the current pass has used them in that order so far.
    following: bool,
    /// Gathers of units that are not in use yet, with the pass that they are for.
    ahead: Vec<(Ahead, Held<Work>)>,
    scattering: VecDeque<Weak<Collector>>,
    /// Whether the backward pass that is under way, or the last, has the weight 0: its gradients, which may be NaN, count as zero.
    is_void: bool,
    /// By unit: which of its parameters have got a gradient in the backward pass that is under way, or the last.
    present: Present,
    /// The same, of passes whose gradients were added up since the last step.
    held: Present,
    calls: Calls,
    /// Those of them that replicas must share, because they average what was scattered.
    scatters: Calls,
    failure: Option<Error>,
    bytes: MemoryUse,
}

/// Memory that a rank takes for a moment, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct MemoryUse {
    parameters: usize,
    parameters_peak: usize,
    gradients: usize,
    gradients_peak: usize,
    communicated: u64,
}

/// The units of a forward pass, in the order in which it used them.
pub(super) struct ForwardPass {
    number: u64,
    units: Mutex<Vec<Shard>>,
    /// None if there are no others.
    replicated: Option<Arc<Replicated>>,
}

/// A unit's place in a forward pass.
#[derive(Clone)]
pub(super) struct Place {
    pass: Arc<ForwardPass>,
    position: usize,
}

impl Place {
    /// What averages the gradients of the pass over replicas.
    pub fn replicated(&self) -> Option<Arc<Replicated>> {
        self.pass.replicated.clone()
    }
}

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Parameters,
    Gradients,
}

/// Memory that is counted as long as this exists.
pub(super) struct Held<T> {
    pub value: T,
    pub counted: Counted,
}

/// A number of bytes in [`MemoryUse`].
pub(super) struct Counted {
    exchanges: Weak<Exchanges>,
    what: Use,
    bytes: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Some(exchanges) = self.exchanges.upgrade() else { return };
        let mut state = exchanges.state.lock();
        match self.what {
            Use::Parameters => state.bytes.parameters -= self.bytes,
            Use::Gradients => state.bytes.gradients -= self.bytes,
        }
    }
}

/// The exchanges as long as there are units, or what they were made with: a graph, which may never run backward, does not keep the groups.
#[derive(Clone)]
pub(super) struct WeakExchanges {
    exchanges: Weak<Exchanges>,
    groups: [WeakGroup; 2],
}

impl WeakExchanges {
    pub fn upgrade(&self) -> Result<Arc<Exchanges>> {
        self.exchanges.upgrade().ok_or_else(dropped)
    }

    /// As [`Exchanges::fail`], also if they are gone.
    pub fn fail(&self, error: Error) {
        match self.exchanges.upgrade() {
            Some(exchanges) => exchanges.fail(error),
            None => self.groups.iter().for_each(|group| group.abort_all(error.clone())),
        }
    }
}

/// The error of a graph that outlives the units with which it was computed.
pub(super) fn dropped() -> Error {
    Error::invalid_argument("a model of units was dropped before a backward pass through it")
        .with_remedy("keep the Fsdp until Fsdp::backward has returned")
}

impl Exchanges {
    pub fn downgrade(self: &Arc<Self>) -> WeakExchanges {
        let groups = [self.group.downgrade(), self.replicas.downgrade()];
        WeakExchanges { exchanges: Arc::downgrade(self), groups }
    }

    pub fn new(group: &ProcessGroup, replicas: &ProcessGroup, options: ShardingOptions) -> Arc<Self> {
        Arc::new(Self {
            group: group.in_call(Caller::Fsdp),
            replicas: replicas.in_call(Caller::Fsdp),
            options,
            trace: group.trace(),
            state: Mutex::default(),
        })
    }

    pub fn rank(&self) -> usize {
        self.group.rank().index()
    }

    pub fn ranks(&self) -> usize {
        self.group.world_size().count()
    }

    /// The number of the next unit.
    pub fn units(&self) -> usize {
        self.state.lock().units.len()
    }

    /// Adds a unit, whose pieces are the parameters `ids`.
    pub fn add_unit(&self, layout: Arc<FlatLayout>, ids: impl IntoIterator<Item = ParamId>) {
        let mut state = self.state.lock();
        state.known.extend(ids.into_iter().map(|id| (id, layout.unit)));
        state.units.push(layout);
    }

    /// The numbers of all units, by the parameters that are pieces of their shards.
    pub fn shards(&self) -> HashMap<ParamId, usize> {
        self.state.lock().known.clone()
    }

    pub fn unit(&self, number: usize) -> Option<Arc<FlatLayout>> {
        self.state.lock().units.get(number).cloned()
    }

    /// Keeps the first error, and ends all groups of this rank with it: other ranks would wait for this one, or average what it has not
    /// got.
    pub fn fail(&self, error: Error) {
        self.state.lock().failure.get_or_insert_with(|| error.clone());
        let groups = [&self.group, &self.replicas];
        // The one that failed knows its ranks by their numbers in the others.
        let first = groups.iter().find(|group| group.failure().is_some()).unwrap_or(&groups[0]);
        first.abort_all(error.clone());
        // A group that was made of other groups than the first one knows nothing of it yet, and not its ranks' numbers.
        let cause = || Error::aborted(error.to_string());
        groups.iter().filter(|group| group.failure().is_none()).for_each(|group| group.abort(cause()));
    }

    /// The first error of this rank, or of a group.
    pub fn check(&self) -> Result<()> {
        let own = self.state.lock().failure.clone();
        match own.or_else(|| self.group.failure()).or_else(|| self.replicas.failure()) {
            Some(error) => {
                self.fail(error.clone());
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// Begins a forward pass of a model that has these `shards`.
    pub fn begin(&self, shards: HashMap<usize, Vec<Tensor<1>>>, replicated: Option<Replicated>) {
        let mut state = self.state.lock();
        state.passes += 1;
        let replicated = replicated.map(Arc::new);
        let pass = ForwardPass { number: state.passes, units: Mutex::default(), replicated };
        state.current = Some(Arc::new(pass));
        state.following = true;
        let replaced = (mem::replace(&mut state.shards, shards), mem::take(&mut state.ahead));
        drop(state);
        drop(replaced);
    }

    /// Ends a forward pass. The next one is expected to use the same units.
    pub fn end(&self) {
        let mut state = self.state.lock();
        let pass = state.current.take();
        let used: Vec<usize> =
            pass.map_or(Vec::new(), |pass| pass.units.lock().iter().map(|(layout, _)| layout.unit).collect());
        if !used.is_empty() {
            state.order = used;
        }
        let over = (mem::take(&mut state.shards), mem::take(&mut state.ahead));
        drop(state);
        drop(over);
    }

    /// For a new `Fsdp`, which keeps what this gives. An error if another one has it: what their passes note of gradients would be mixed.
    pub fn own(&self) -> Result<Arc<()>> {
        let (owner, mut state) = (Arc::new(()), self.state.lock());
        if state.owner.strong_count() > 0 {
            return Err(Error::invalid_argument("another Fsdp has units of this ShardingGroup")
                .with_remedy("make a ShardingGroup for each model; Fsdp::into_model ends the first one"));
        }
        state.owner = Arc::downgrade(&owner);
        Ok(owner)
    }

    /// The order in which the first forward pass is expected to use units.
    pub fn expect(&self, order: Vec<usize>) {
        self.state.lock().order = order;
    }

    /// Begins a backward pass, if passes are weighted, of this `weight`: no parameter has got a gradient yet.
    pub fn begin_backward(&self, weight: Option<f64>) {
        let mut state = self.state.lock();
        state.present.clear();
        state.is_void = weight == Some(0.0);
    }

    /// Whether the gradients of the backward pass that is under way count as zero.
    pub fn is_void(&self) -> bool {
        self.state.lock().is_void
    }

    /// Notes that a parameter of a unit has got a gradient.
    pub fn has_gradient(&self, unit: &FlatLayout, index: usize) {
        let mut state = self.state.lock();
        let present = state.present.entry(unit.unit).or_insert_with(|| vec![false; unit.parameters.len()]);
        if let Some(present) = present.get_mut(index) {
            *present = true;
        }
    }

    /// Forgets what has got a gradient in passes that were added up.
    pub fn drop_held(&self) {
        self.state.lock().held.clear();
    }

    /// Keeps what has got a gradient for the next step, with what is kept already.
    fn hold_present(&self) {
        let mut state = self.state.lock();
        let State { present, held, .. } = &mut *state;
        for (unit, present) in present.drain() {
            match held.entry(unit) {
                Entry::Vacant(vacant) => {
                    vacant.insert(present);
                }
                Entry::Occupied(mut held) => {
                    held.get_mut().iter_mut().zip(present).for_each(|(held, present)| *held |= present);
                }
            }
        }
    }

    /// By unit of `order` and parameter: whether this rank has got no gradient since the last step.
    fn own_flags(&self, order: &[usize]) -> Vec<u8> {
        self.hold_present();
        let held = mem::take(&mut self.state.lock().held);
        let units = order.iter().filter_map(|&unit| self.unit(unit));
        let flags = units.flat_map(|unit| match held.get(&unit.unit) {
            Some(held) => held.clone(),
            None => vec![false; unit.parameters.len()],
        });
        flags.map(u8::from).collect()
    }

    /// Ends a backward pass: nothing that was gathered or scattered for it is used any more.
    pub fn end_backward(&self) {
        let mut state = self.state.lock();
        let over = (mem::take(&mut state.ahead), mem::take(&mut state.scattering));
        drop(state);
        drop(over);
    }

    /// Notes that the forward pass uses a unit.
    pub fn enter(&self, shard: &Shard) -> Place {
        let mut state = self.state.lock();
        let pass = state.current.clone().unwrap_or_else(|| {
            state.passes += 1;
            Arc::new(ForwardPass { number: state.passes, units: Mutex::default(), replicated: None })
        });
        let mut units = pass.units.lock();
        let position = units.len();
        units.push(shard.clone());
        drop(units);
        state.following &= state.order.get(position) == Some(&shard.0.unit);
        Place { pass, position }
    }

    /// A seed for what a unit draws at `place`: another one on every rank, also if the program has `drawn` the same number on all. A number of
    /// passes would begin anew in a process that goes on from a checkpoint.
    pub fn seed(&self, place: &Place, drawn: u64) -> u64 {
        let rank = self.replicas.rank().index() * self.ranks() + self.rank();
        mixed([self.options.seed, drawn, place.position as u64, rank as u64])
    }

    /// The units that the forward pass is expected to use after `place`.
    pub fn after(&self, place: &Place) -> Vec<Shard> {
        let state = self.state.lock();
        if !state.following {
            return Vec::new();
        }
        let next = state.order.iter().skip(place.position + 1).take(self.options.prefetch);
        next.filter_map(|&unit| Some((state.units.get(unit)?.clone(), state.shards.get(&unit)?.clone())))
            .collect()
    }

    /// The units that the backward pass uses after `place`.
    pub fn before(&self, place: &Place) -> Vec<Shard> {
        let units = place.pass.units.lock();
        units.iter().take(place.position).rev().take(self.options.prefetch).cloned().collect()
    }

    /// All parameters of a unit, in one buffer, for its `place`. Starts to gather those of `next` too, unless that has begun.
    pub fn gather(
        self: &Arc<Self>,
        (unit, shard): &Shard,
        place: Option<&Place>,
        next: Vec<Shard>,
    ) -> Result<Held<Buffer>> {
        // Passes are counted from 1.
        let pass = place.map_or(0, |place| place.pass.number);
        let found = {
            let mut state = self.state.lock();
            let place = state.ahead.iter().position(|(ahead, _)| *ahead == (pass, unit.unit));
            place.map(|place| state.ahead.remove(place).1)
        };
        let is_ahead = found.is_some();
        let Held { value: work, counted } = match found {
            Some(work) => work,
            None => self.start_gather(unit, shard)?,
        };
        for (unit, shard) in next {
            let ahead = (pass, unit.unit);
            let begun = self.state.lock().ahead.iter().any(|(other, _)| *other == ahead);
            if !begun {
                let work = self.start_gather(&unit, &shard)?;
                self.state.lock().ahead.push((ahead, work));
            }
        }
        let began = Instant::now();
        let value = work.wait()?;
        let of = [("unit", unit.unit.into()), ("ahead", usize::from(is_ahead).into())];
        self.trace.complete(Track::Parameters, "wait for parameters", began, Instant::now(), &of);
        Ok(Held { value, counted })
    }

    fn start_gather(self: &Arc<Self>, unit: &Arc<FlatLayout>, shard: &[Tensor<1>]) -> Result<Held<Work>> {
        let Held { value: mut buffer, counted } = self.alloc(unit, Use::Parameters)?;
        for (index, parameter) in unit.parameters.iter().enumerate() {
            let elements = unit.piece_elements(index, self.rank());
            let place = unit.piece_bytes(index, self.rank());
            let piece = shard.get(index).filter(|piece| piece.shape().num_elements() == elements);
            let target = buffer.as_bytes_mut().get_mut(place);
            let (Some(piece), Some(target)) = (piece, target) else {
                return Err(Error::invalid_argument(format!(
                    "the shard of `{}` in unit {} has another length than the {elements} elements with which it was made",
                    parameter.name, unit.unit
                ))
                .with_remedy("change the values of a FullySharded's parameters, and not their shapes"));
            };
            // A piece of nothing has a tensor of one element.
            tensor_bytes::with_bytes(piece.clone(), |piece| {
                target.copy_from_slice(&piece.bytes[..target.len()])
            })?;
        }
        self.note(Call::Gather(unit.unit as u32), unit.bytes());
        let value = self.group.all_gather_v_in_place_async(buffer, &unit.counts())?;
        Ok(Held { value, counted })
    }

    /// Zeros for all of a unit's elements.
    pub fn alloc(self: &Arc<Self>, unit: &FlatLayout, what: Use) -> Result<Held<Buffer>> {
        let value = self.group.alloc(unit.sent()?, unit.padded())?;
        let bytes = unit.bytes();
        let mut state = self.state.lock();
        let MemoryUse { parameters, parameters_peak, gradients, gradients_peak, .. } = &mut state.bytes;
        let (now, peak) = match what {
            Use::Parameters => (parameters, parameters_peak),
            Use::Gradients => (gradients, gradients_peak),
        };
        *now += bytes;
        *peak = (*peak).max(*now);
        drop(state);
        Ok(Held { value, counted: Counted { exchanges: Arc::downgrade(self), what, bytes } })
    }

    /// Notes a call of so many bytes, before it is made.
    pub fn note(&self, call: Call, bytes: usize) {
        let mut state = self.state.lock();
        state.bytes.communicated += bytes as u64;
        state.calls.add(call);
        if let Call::Scatter(_) = call {
            state.scatters.add(call);
        }
    }

    /// Notes that `collector`'s gradients are on their way, and waits for earlier ones if there are too many.
    pub fn scattering(&self, collector: &Arc<Collector>) -> Result<()> {
        let mut state = self.state.lock();
        state.scattering.push_back(Arc::downgrade(collector));
        let oldest = if state.scattering.len() > IN_FLIGHT { state.scattering.pop_front() } else { None };
        drop(state);
        oldest.and_then(|oldest| oldest.upgrade()).map_or(Ok(()), |oldest| oldest.settle())
    }

    /// Takes what has arrived of the gradients that are on their way, so that replicas begin to average it.
    pub fn advance(&self) -> Result<()> {
        if self.replicas.world_size() == WorldSize::ONE {
            return Ok(());
        }
        let oldest = self.state.lock().scattering.front().and_then(Weak::upgrade);
        oldest.filter(|oldest| oldest.has_arrived()).map_or(Ok(()), |oldest| oldest.settle())
    }

    /// An error on every rank unless all ranks have made the same calls, and none has failed. Replicas may gather what others do not, as
    /// one that evaluates the model. All ranks call it together.
    ///
    /// Gives, by unit of `order` and parameter, whether any rank of any replica has got a gradient since the last step. If none is asked
    /// for, what this rank has got is kept for the next call. If the step is weighted, `weight` is this rank's, and the sum of all ranks'
    /// is given too.
    pub fn agree(&self, order: Option<&[usize]>, mut weight: Option<f64>) -> Result<(Present, Option<f64>)> {
        self.check()?;
        let mut state = self.state.lock();
        let (calls, scatters) = (mem::take(&mut state.calls), mem::take(&mut state.scatters));
        drop(state);
        let mut flags = match order {
            Some(order) => self.own_flags(order),
            None => {
                self.hold_present();
                Vec::new()
            }
        };
        // First within the group: then its ranks ask their replicas alike.
        [(&self.group, calls), (&self.replicas, scatters)]
            .into_iter()
            .filter(|(group, _)| group.world_size() != WorldSize::ONE)
            .try_for_each(|(group, calls)| {
                let (are_equal, sum) = calls.compare(group, &flags, weight)?;
                weight = sum;
                if are_equal { Ok(()) } else { group.all_reduce(&mut flags, ReduceOp::Max) }
            })
            .inspect_err(|error| self.fail(error.clone()))?;
        let mut flags = flags.into_iter().map(|flag| flag != 0);
        let units = order.unwrap_or_default().iter().filter_map(|&unit| self.unit(unit));
        let present = units.map(|unit| (unit.unit, flags.by_ref().take(unit.parameters.len()).collect()));
        Ok((present.collect(), weight))
    }

    /// Records a part of a step.
    pub fn record(&self, track: Track, name: &'static str, began: Instant) {
        // The replicas' Ddp has recorded it, if there are others.
        if self.replicas.world_size() == WorldSize::ONE {
            self.trace.complete(track, name, began, Instant::now(), &[]);
        }
    }

    /// Runs what a unit computes, and records its time.
    pub fn traced<T>(&self, track: Track, unit: &FlatLayout, pass: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let output = pass();
        self.trace.complete(track, "unit", began, Instant::now(), &[("unit", unit.unit.into())]);
        output
    }

    /// The most bytes of whole parameters and of whole gradients that this rank has had at one time, and the bytes of all buffers that
    /// were sent, counted once for each operation.
    pub fn bytes(&self) -> (usize, usize, u64) {
        let bytes = self.state.lock().bytes;
        (bytes.parameters_peak, bytes.gradients_peak, bytes.communicated)
    }
}
