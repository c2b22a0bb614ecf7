//! Ranks with unequal amounts of data: a rank without data answers the others' collectives until all have finished.
//!
//! A collective hangs, or fails, when one rank has stopped calling it. Inside [`JoinGroup::join`] each collective is
//! announced before it is called. A rank whose part is over receives the announcements and calls the same collective
//! with neutral elements (zeros for a sum or an average), so the others do not wait for it. This is Horovod's `join`
//! and PyTorch's `Join`, but the code that takes part needs no support for it: all collectives called through the
//! [`JoinGroup`] are answered, be it from a gradient reducer or a synchronised batch norm.
//!
//! ```
//! use phalanx::join::{JoinGroup, JoinOptions};
//! use phalanx::{Buffer, Communicator, ProcessGroup, ReduceOp, WorldSize};
//!
//! let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
//! let sums = std::thread::scope(|scope| {
//!     let ranks = groups.into_iter().map(|group| scope.spawn(move || {
//!         let group = JoinGroup::new(group);
//!         let batches = 1 + group.rank().get(); // rank 1 has one batch more
//!         let outcome = group.join(JoinOptions::default(), || {
//!             let mut last = 0.0;
//!             for _ in 0..batches {
//!                 group.step()?;
//!                 let sum = group.all_reduce_async(Buffer::from_slice(&[1.0f32]), ReduceOp::Sum)?.wait()?;
//!                 last = sum.as_slice::<f32>()?[0];
//!             }
//!             Ok(last)
//!         })?;
//!         Ok(outcome.value)
//!     }));
//!     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<phalanx::Result<Vec<_>>>()
//! })?;
//! assert_eq!(sums, [2.0, 1.0]);
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! # Calls that are none of the group's
//!
//! Such calls are NCCL's, on memory of a device. The code that makes one first announces it with
//! [`announce_elsewhere`](JoinGroup::announce_elsewhere). On a rank without data, the [`Elsewhere`] that was given to
//! [`join_elsewhere`](JoinGroup::join_elsewhere) makes the call, at the same place among all announced calls. So all ranks make them in one order.
//! [`ComparedCalls`] says whether all ranks make the same call.
//!
//! # Cost
//!
//! A small all_reduce before each collective. Each [`step`](JoinGroup::step) waits for one. Outside `join` there is no
//! cost.

mod announcement;
mod elsewhere;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use self::announcement::{Announced, other_options, silence};
pub use self::elsewhere::{ComparedCalls, Comparison, Elsewhere, ElsewhereCall, ElsewhereOp};
use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, GroupHandle, ProcessGroup, WeakHandle, Work, forward_to_group};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// Options of [`JoinGroup::join`]. Names and defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JoinOptions {
    /// If true, gradients are divided by the number of all ranks, so that each sample weighs the same in every step; if
    /// false, by the number of ranks that still have data. The group itself always divides by all ranks: an adapter
    /// that divides by fewer corrects this with [`JoinGroup::average_scale`].
    pub divide_by_initial_world_size: bool,
    /// If true, the first rank without data ends `join` on every rank, with an error. If false, `join` continues until no
    /// rank has data.
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self { divide_by_initial_world_size: true, throw_on_early_termination: false }
    }
}

/// The result of [`JoinGroup::join`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Joined<T> {
    /// The value that the body returned.
    pub value: T,
    /// A rank that took part to the end; the same on every rank. If `uneven` is true, its state is the valid one.
    pub last: Rank,
    /// Whether some rank ended before another.
    pub uneven: bool,
}

/// A group whose ranks may end at different times. See the [module](self). Clones share their state.
#[doc(alias("Join", "Joinable"))]
#[derive(Clone)]
pub struct JoinGroup {
    group: GroupHandle,
    state: Arc<Mutex<JoinState>>,
}

#[derive(Default)]
struct JoinState {
    /// Set while this rank is inside the body of `join`.
    running: Option<JoinOptions>,
    /// How many announcements this rank has made in this `join`.
    announced: i64,
    /// Which ranks had data at the last announcement whose result was awaited; empty before.
    active: Vec<bool>,
    /// The error with which `throw_on_early_termination` ended the join.
    terminated: Option<Error>,
    /// What answers calls that are none of the group's, in this `join`.
    elsewhere: Option<Arc<dyn Elsewhere>>,
    /// How many have been uneven so far.
    uneven_joins: u64,
}

impl JoinGroup {
    /// Makes the collectives of `group` joinable. All ranks must call them through such a group.
    pub fn new<C: Communicator + 'static>(group: C) -> Self {
        Self::from(&GroupHandle::new(group))
    }

    /// Makes this group, and all its clones, use `group` from now on; see [`GroupHandle::rebind`].
    ///
    /// # Errors
    /// Inside [`join`](Self::join).
    pub fn rebind<C: Communicator + 'static>(&self, group: C) -> Result<()> {
        if self.state.lock().running.is_some() {
            return Err(Error::invalid_argument("the group cannot be replaced inside of `join`")
                .with_remedy("replace it before `join`, or when it has returned"));
        }
        self.group.rebind(group);
        Ok(())
    }

    /// As [`ProcessGroup::in_call`](crate::ProcessGroup::in_call).
    pub fn in_call(&self, caller: Caller) -> Self {
        Self { group: self.group.in_call(caller), state: self.state.clone() }
    }

    /// Runs `body`, and then answers the collectives of the ranks whose `body` still runs. All ranks call it together,
    /// and return together.
    ///
    /// # Errors
    /// If `body` fails. This ends the group, as a panic of it does, unless the error [`is_regrouping`](Error::is_regrouping), as that of an elastic
    /// job's [`commit`](crate::elastic::Context::commit). If a collective fails; if it is called inside itself; if the ranks' [`JoinOptions`] differ. With
    /// [`throw_on_early_termination`](JoinOptions::throw_on_early_termination), on every rank when the first has no
    /// data: the error names that rank, and the group remains usable.
    pub fn join<T>(&self, options: JoinOptions, body: impl FnOnce() -> Result<T>) -> Result<Joined<T>> {
        self.join_with(options, None, body)
    }

    /// Like [`join`](Self::join), where `elsewhere` makes calls that are none of the group's: without data this rank makes the others' by it.
    ///
    /// # Errors
    /// As [`join`](Self::join), and if `elsewhere` cannot make a call.
    pub fn join_elsewhere<T>(
        &self,
        options: JoinOptions,
        elsewhere: Arc<dyn Elsewhere>,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<Joined<T>> {
        self.join_with(options, Some(elsewhere), body)
    }

    fn join_with<T>(
        &self,
        options: JoinOptions,
        elsewhere: Option<Arc<dyn Elsewhere>>,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<Joined<T>> {
        {
            let mut state = self.state.lock();
            if state.running.is_some() {
                return Err(Error::invalid_argument("`join` was called inside `join`")
                    .with_remedy("call it once, around the whole loop: clones of this group share it"));
            }
            let (elsewhere, uneven_joins) = (elsewhere.clone(), state.uneven_joins);
            *state = JoinState { running: Some(options), elsewhere, uneven_joins, ..JoinState::default() };
        }
        let _panic = NotedPanic(self);
        let value = {
            let _end = End(&self.state);
            body()
        };
        let terminated = self.state.lock().terminated.take();
        if let Some(error) = terminated {
            return Err(error);
        }
        match value {
            Ok(value) => match self.shadow(options, elsewhere.as_deref()) {
                Ok(Shadowed::All(last, uneven)) => {
                    self.state.lock().uneven_joins += u64::from(uneven);
                    Ok(Joined { value, last, uneven })
                }
                // Every rank has this error, and the group goes on.
                Ok(Shadowed::Early(error)) => Err(error),
                Err(error) => Err(self.ended_by(error)),
            },
            Err(error) => Err(self.ended_by(error)),
        }
    }

    /// Begins a step, in which collectives will be called. Returns how many ranks have data for it.
    ///
    /// Outside `join` it does nothing, and returns the world size.
    ///
    /// # Errors
    /// If a rank has no data and `throw_on_early_termination` is set, or if the group has failed. On every rank, if ranks have called
    /// `join` with different [`JoinOptions`]: this ends the group.
    pub fn step(&self) -> Result<usize> {
        let Some(options) = self.running() else { return Ok(self.world_size().count()) };
        self.announce(Announced::Step(options))?.wait().and_then(|numbers| self.heard(&numbers))?;
        let mut state = self.state.lock();
        if options.throw_on_early_termination
            && let Some(error) = early(&state.active)
        {
            state.terminated = Some(error.clone());
            state.running = None;
            return Err(error);
        }
        Ok(count(&state.active, self.world_size()))
    }

    /// Inside [`join_elsewhere`](Self::join_elsewhere) ranks without data hear that `by` makes `call` next; outside of `join` nothing happens. It waits
    /// for nobody. It comes before the call, and where several announce, in the same order on every rank.
    ///
    /// # Errors
    /// If the running `join` does not [answer](Self::answers) the calls of `by`, or the group has failed.
    pub fn announce_elsewhere(&self, by: &dyn Elsewhere, call: ElsewhereCall) -> Result<()> {
        if self.running().is_none() {
            return Ok(());
        }
        if !self.answers(by) {
            return Err(unanswered());
        }
        // Its result is of no use here: a `Work` that is dropped still runs.
        self.announce(Announced::Elsewhere(call)).map(drop)
    }

    /// Whether ranks without data make the calls of `by` in the `join` that runs; so they do outside of any, where all have data.
    pub fn answers(&self, by: &dyn Elsewhere) -> bool {
        let address = |it: &dyn Elsewhere| std::ptr::from_ref(it).cast::<()>();
        let state = self.state.lock();
        let is_by = |it: &Arc<dyn Elsewhere>| std::ptr::eq(address(&**it), address(by));
        self.world_size() == WorldSize::ONE
            || state.running.is_none()
            || state.elsewhere.as_ref().is_some_and(is_by)
    }

    /// What averaged gradients are multiplied by: world size / active ranks if
    /// [`divide_by_initial_world_size`](JoinOptions::divide_by_initial_world_size) is false, else 1. Weighted gradients are divided by
    /// the sum of weights, whoever took part: 1.
    pub fn average_scale(&self, is_weighted: bool) -> f64 {
        match self.running() {
            Some(options) if !is_weighted && !options.divide_by_initial_world_size => self.active_scale(),
            Some(_) | None => 1.0,
        }
    }

    /// How many ranks had data at the last [`step`](Self::step); all, outside `join`.
    pub fn active_ranks(&self) -> usize {
        let state = self.state.lock();
        if state.running.is_some() {
            count(&state.active, self.world_size())
        } else {
            self.world_size().count()
        }
    }

    /// The options of the running `join`.
    pub fn running(&self) -> Option<JoinOptions> {
        let alone = self.world_size() == WorldSize::ONE;
        self.state.lock().running.filter(|_| !alone)
    }

    /// Whether every rank had data when the step began.
    fn all_have_data(&self) -> bool {
        let state = self.state.lock();
        !state.active.is_empty() && state.active.iter().all(|&active| active)
    }

    fn announce(&self, announced: Announced) -> Result<Work> {
        self.state.lock().announced += 1;
        self.exchange(announced.encode(self.group.caller, self.rank(), self.world_size()))
    }

    fn exchange(&self, numbers: Vec<i64>) -> Result<Work> {
        // Both announcing and answering ranks are inside `join`.
        let group = self.group.as_part_of(Some(Caller::Join));
        group.all_reduce_async(Buffer::from_slice(&numbers), ReduceOp::Max)
    }

    /// Stores which ranks have data, from an announcement.
    fn heard(&self, numbers: &Buffer) -> Result<()> {
        let (.., active) = Announced::decode(numbers.as_slice()?, self.world_size())?;
        self.state.lock().active = active;
        Ok(())
    }

    /// Ends the group with this rank's error: the others must not wait for what it will not do. That workers form a new group is no failure, and
    /// all ranks hear it in the same call.
    fn ended_by(&self, error: Error) -> Error {
        if !error.is_regrouping() {
            self.abort(error.clone());
        }
        error
    }

    /// Answers the others until no rank has data.
    fn shadow(&self, options: JoinOptions, elsewhere: Option<&dyn Elsewhere>) -> Result<Shadowed> {
        let world = self.world_size();
        if world == WorldSize::ONE {
            return Ok(Shadowed::All(Rank::MAIN, false));
        }
        loop {
            let numbers = self.exchange(silence(world))?.wait()?;
            let (announced, caller, active) = Announced::decode(numbers.as_slice()?, world)?;
            let group = self.group.as_part_of(caller);
            match announced {
                None => break,
                Some(Announced::Step(theirs)) => {
                    if theirs != options {
                        return Err(other_options());
                    }
                    if options.throw_on_early_termination
                        && let Some(error) = early(&active)
                    {
                        return Ok(Shadowed::Early(error));
                    }
                }
                // The results are not needed: a `Work` that is dropped still runs.
                Some(Announced::AllReduce { op, dtype, elements }) => {
                    drop(group.all_reduce_async(neutral(&group, op, dtype, elements)?, op)?);
                }
                Some(Announced::Broadcast { dtype, elements, root }) => {
                    let root = acting_root(root, &active);
                    drop(group.broadcast_async(group.alloc(dtype, elements)?, root)?);
                }
                Some(Announced::Elsewhere(call)) => elsewhere.ok_or_else(unanswered)?.answer(call)?,
            }
        }
        // The rank with the most announcements took part to the end.
        let mut counts = vec![0i64; world.count()];
        counts[self.rank().index()] = self.state.lock().announced;
        let counts = self.exchange(counts)?.wait()?;
        let counts = counts.as_slice::<i64>()?;
        let most = counts.iter().max();
        let last = world.ranks().find(|rank| counts.get(rank.index()) == most).unwrap_or(Rank::MAIN);
        Ok(Shadowed::All(last, counts.iter().any(|count| Some(count) != most)))
    }
}

/// How a rank without data has answered the others.
enum Shadowed {
    /// Until no rank had data: one that took part to the end, and whether some rank did not.
    All(Rank, bool),
    /// Until the next step, because of `throw_on_early_termination`.
    Early(Error),
}

impl Communicator for JoinGroup {
    forward_to_group!(self => self.group);

    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(self.in_call(caller))
    }

    fn active_ranks(&self) -> usize {
        self.active_ranks()
    }

    fn uneven_joins(&self) -> u64 {
        self.state.lock().uneven_joins
    }

    fn weak_handle(&self) -> Option<WeakHandle> {
        let (group, state) = (self.group.downgrade(), Arc::downgrade(&self.state));
        Some(Arc::new(move || -> Option<Arc<dyn Communicator>> {
            Some(Arc::new(Self { group: group()?, state: state.upgrade()? }))
        }))
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        if self.running().is_some() {
            // Not awaited: that would delay backward, and which ranks have data changes nothing here.
            drop(self.announce(Announced::AllReduce {
                op,
                dtype: buffer.dtype(),
                elements: buffer.len(),
            })?);
        }
        self.group.all_reduce_async(buffer, op)
    }

    /// If `root` has no data any more, the first rank that has data acts as root.
    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        if self.running().is_none() {
            return self.group.broadcast_async(buffer, root);
        }
        let announced = Announced::Broadcast { dtype: buffer.dtype(), elements: buffer.len(), root };
        self.announce(announced)?.wait().and_then(|numbers| self.heard(&numbers))?;
        let root = acting_root(root, &self.state.lock().active);
        self.group.broadcast_async(buffer, root)
    }

    /// While every rank has data, it is not announced, because no rank answers yet. Afterwards it is an all_reduce,
    /// which ranks without data can answer.
    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        if self.running().is_none() || self.all_have_data() {
            return self.group.reduce_scatter_v_async(buffer, counts, op);
        }
        self.all_reduce_async(buffer, op)
    }

    /// Fails if a rank has no data any more: no other rank could bring its part.
    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        if self.running().is_none() || self.all_have_data() {
            return self.group.all_gather_v_in_place_async(buffer, counts);
        }
        Err(Error::invalid_argument("an all_gather needs every rank, and some have no data left")
            .with_remedy("give every rank as many batches"))
    }
}

/// Over the same group as `handle`, which is then not [rebound](GroupHandle::rebind) inside [`join`](JoinGroup::join).
impl From<&GroupHandle> for JoinGroup {
    fn from(handle: &GroupHandle) -> Self {
        Self { group: handle.clone(), state: Arc::default() }
    }
}

impl From<&ProcessGroup> for JoinGroup {
    fn from(group: &ProcessGroup) -> Self {
        Self::new(group.clone())
    }
}

/// The same group: what uses either is joined together.
impl From<&JoinGroup> for JoinGroup {
    fn from(group: &JoinGroup) -> Self {
        group.clone()
    }
}

impl fmt::Debug for JoinGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinGroup(rank {} of {})", self.rank(), self.world_size())
    }
}

/// Ends the body of a `join`, also if it panics.
struct End<'a>(&'a Mutex<JoinState>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.running, state.elsewhere) = (None, None);
    }
}

/// Ends the group if this rank leaves a `join` by a panic, which a program may catch: the others wait for what it will not do.
struct NotedPanic<'a>(&'a JoinGroup);

impl Drop for NotedPanic<'_> {
    fn drop(&mut self) {
        if let Some(group) = self.0.process_group() {
            group.note_panic();
        }
    }
}

/// The error for calls that are none of the group's, and that nobody makes on ranks without data.
fn unanswered() -> Error {
    Error::invalid_argument(
        "the `join` that runs does not answer calls that are none of the group's, such as those of this model over NCCL",
    )
    .with_remedy("begin it with the join of the Ddp that makes them: one join answers the calls of one Ddp")
}

fn count(active: &[bool], world: WorldSize) -> usize {
    if active.is_empty() { world.count() } else { active.iter().filter(|&&active| active).count() }
}

/// The error that names the first rank without data.
fn early(active: &[bool]) -> Option<Error> {
    let rank = active.iter().position(|&active| !active)?;
    Some(
        Error::aborted(format!("rank {rank} has no data left, and others have"))
            .with_remedy("give every rank as many batches, or unset throw_on_early_termination"),
    )
}

/// The rank that sends a broadcast's data.
fn acting_root(root: Rank, active: &[bool]) -> Rank {
    if active.get(root.index()) == Some(&true) {
        return root;
    }
    let first = active.iter().position(|&active| active).and_then(|first| u32::try_from(first).ok());
    first.map_or(root, Rank::new)
}

/// Elements that do not change the result of the others.
fn neutral(group: &dyn Communicator, op: ReduceOp, dtype: DType, elements: usize) -> Result<Buffer> {
    let mut buffer = group.alloc(dtype, elements)?;
    if let Some(pattern) = neutral_element(op, dtype) {
        for element in buffer.as_bytes_mut().chunks_exact_mut(pattern.len()) {
            element.copy_from_slice(&pattern);
        }
    }
    Ok(buffer)
}

/// The bytes of the neutral element, unless it is zero.
fn neutral_element(op: ReduceOp, dtype: DType) -> Option<Vec<u8>> {
    use half::{bf16, f16};
    let pick = |one: &[u8], least: &[u8], most: &[u8]| match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) | ReduceOp::BOr | ReduceOp::BXor => None,
        ReduceOp::BAnd => Some(vec![0xff; one.len()]),
        ReduceOp::Product => Some(one.to_vec()),
        ReduceOp::Max => Some(least.to_vec()),
        ReduceOp::Min => Some(most.to_vec()),
    };
    macro_rules! of {
        ($one:expr, $least:expr, $most:expr) => {
            pick(&$one.to_le_bytes(), &$least.to_le_bytes(), &$most.to_le_bytes())
        };
    }
    match dtype {
        // A bool has only its lowest bit set, whatever the operation.
        DType::Bool => match op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BAnd => Some(vec![1]),
            ReduceOp::Sum
            | ReduceOp::Avg
            | ReduceOp::PreMulSum(_)
            | ReduceOp::Max
            | ReduceOp::BOr
            | ReduceOp::BXor => None,
        },
        DType::F32 => of!(1f32, f32::NEG_INFINITY, f32::INFINITY),
        DType::F64 => of!(1f64, f64::NEG_INFINITY, f64::INFINITY),
        DType::F16 => of!(f16::ONE, f16::NEG_INFINITY, f16::INFINITY),
        DType::BF16 => of!(bf16::ONE, bf16::NEG_INFINITY, bf16::INFINITY),
        DType::I32 => of!(1i32, i32::MIN, i32::MAX),
        DType::I64 => of!(1i64, i64::MIN, i64::MAX),
        DType::I8 => of!(1i8, i8::MIN, i8::MAX),
        DType::U8 => of!(1u8, u8::MIN, u8::MAX),
    }
}
