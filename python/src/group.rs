//! A process group, as the Python package uses it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use phalanx::rendezvous::{self, Rendezvous};
use phalanx::store::{PrefixStore, SharedStore, Store};
use phalanx::{Caller, Deadline, Error, GroupOptions, ProcessGroup, Rank, ReduceOp, WorldSize};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::clearing;
use crate::dtypes::{self, Meaning, Seen};
use crate::errors::raised;
use crate::interrupt;
use crate::lane::Lane;
use crate::memory::Memory;
use crate::messages::{Call, Content, Messages, OBJECTS_TAG, Place, unexpected_bytes};
use crate::store::{Connection, GivenUp, TorchStore};
use crate::work::{Pending, Work};

/// The ranks of a job, or some of them.
#[pyclass(frozen, weakref, module = "phalanx_torch._native")]
pub struct Group(Arc<Inner>);

struct Inner {
    /// None when it has been left.
    group: RwLock<Option<ProcessGroup>>,
    /// Why it had failed when it was left, or could not be left well.
    left_with: Mutex<Option<Error>>,
    collectives: Lane,
    messages: Messages,
    timeout: RwLock<Duration>,
    rank: Rank,
    world: WorldSize,
    /// A process that is forked from the group's has its memory, and none of its threads.
    process: u32,
    /// What distinguishes it from groups of the same ranks before it, on every rank; none in a world of one.
    meeting: Option<String>,
    /// How often a group of each name was made from this one.
    parts: Mutex<HashMap<String, u64>>,
    /// Leads to the store in which these meet.
    connection: Connection,
}

/// How long a store may take to remove keys, where it keeps to that.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a rank that leaves waits for messages that it has called for.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Sums of it and of any time that a clock of this machine gives have room.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// How an operation is called: its limit in seconds, if not the group's, and whether the caller waits for it.
pub type How = (Option<f64>, bool);

/// An operation of `torch.distributed.ReduceOp`, and its factor. One number more is `INTEGER_AVERAGE`, and to each of them `NARROW` times the
/// number of the program's type is added if the tensors are combined in a wider one (`dtypes::of_narrow`).
pub type Op = (u16, f64);

/// A sum of integers that `phalanx_torch` divides afterwards.
pub const INTEGER_AVERAGE: u16 = 64;

/// What the number of a narrow type is multiplied by.
pub const NARROW: u16 = 256;

/// How elements are combined, and the call of the program of which that is a part: ranks compare both.
#[derive(Clone, Copy)]
pub struct Reduction {
    pub op: ReduceOp,
    caller: Option<Caller>,
}

impl Group {
    /// Meets other ranks, in a store of PyTorch's if it can be `given_up`.
    fn join(
        py: Python<'_>,
        timeout: Duration,
        given_up: Option<&GivenUp>,
        meet: impl FnOnce() -> phalanx::Result<Rendezvous> + Send + 'static,
    ) -> PyResult<Self> {
        let make = move || {
            let mut options = GroupOptions::from_env()?;
            options.timeout = timeout;
            let met = meet()?;
            let number = met.group_number;
            let meeting = number.map(|number| format!("{:032x}", u128::from_le_bytes(number)));
            Ok((ProcessGroup::join(met, options)?, meeting))
        };
        let most_kept = unexpected_bytes().map_err(|error| raised(py, &error))?;
        let made = match given_up {
            Some(given_up) => clearing::apart(py, given_up, make)?,
            None => interrupt::apart(py, || (), make)?,
        };
        Self::new(py, timeout, Connection::default(), most_kept, made)
    }

    /// The group that has been `made`, with its meeting.
    fn new(
        py: Python<'_>,
        timeout: Duration,
        connection: Connection,
        most_kept: usize,
        made: phalanx::Result<(ProcessGroup, Option<String>)>,
    ) -> PyResult<Self> {
        let (group, meeting) = made.map_err(|error| raised(py, &error))?;
        let (rank, world) = (group.rank(), group.world_size());
        let worker = group.clone();
        Ok(Self(Arc::new(Inner {
            collectives: Lane::new(format!("phalanx-torch-{rank}"), move || worker.keep_apart()),
            messages: Messages::new(rank, world.count(), most_kept),
            timeout: RwLock::new(timeout),
            rank,
            world,
            process: std::process::id(),
            meeting,
            parts: Mutex::default(),
            connection,
            group: RwLock::new(Some(group)),
            left_with: Mutex::new(None),
        })))
    }

    /// The group, with the limit of one operation.
    pub fn open(&self, timeout: Option<f64>) -> PyResult<ProcessGroup> {
        let timeout = timeout.map_or(Ok(*self.0.timeout.read()), duration)?;
        if !self.0.is_here() {
            return Err(PyValueError::new_err(
                "this process group belongs to the process from which this one was forked; a process with a group of its \
                 own is started with the method \"spawn\"",
            ));
        }
        let group = self.0.group.read();
        let group = group.as_ref().map(|group| group.with_timeout(timeout));
        group.ok_or_else(|| PyValueError::new_err("this process group has been destroyed"))
    }

    /// Carries out a collective: now, if the caller waits for it, else on the group's worker.
    pub fn collective(
        &self,
        py: Python<'_>,
        (timeout, wait): How,
        operation: impl FnOnce(&ProcessGroup) -> phalanx::Result<()> + Send + 'static,
    ) -> PyResult<Option<Work>> {
        let group = self.open(timeout)?;
        self.0.collectives.refuse_in_handler().map_err(|error| raised(py, &error))?;
        let operation = move || {
            let _failing = FailingIfPanicked(&group);
            operation(&group).map(|()| None).inspect_err(|error| fail_without_memory(&group, error))
        };
        if wait {
            let outcome = interrupt::waiting(py, || self.0.collectives.run(operation));
            let outcome = outcome.inspect_err(|raised| self.interrupted(py, raised))?;
            return outcome.map(|_| None).map_err(|error| raised(py, &error));
        }
        let pending = Arc::new(Pending::default());
        let done = pending.clone();
        py.detach(|| self.0.collectives.submit(operation, move |outcome| done.complete(outcome)));
        Ok(Some(Work::new(pending)))
    }

    /// As `collective`, of one that moves elements that are `seen` so: ranks compare what they are.
    pub fn moving(
        &self,
        py: Python<'_>,
        how: How,
        seen: Seen,
        operation: impl FnOnce(&ProcessGroup) -> phalanx::Result<()> + Send + 'static,
    ) -> PyResult<Option<Work>> {
        self.in_call(py, how, seen.caller, operation)
    }

    /// As `collective`, of one that combines elements that are `seen` so.
    pub fn reduction(
        &self,
        py: Python<'_>,
        how: How,
        (reduction, seen): (Reduction, Seen),
        operation: impl FnOnce(&ProcessGroup) -> phalanx::Result<()> + Send + 'static,
    ) -> PyResult<Option<Work>> {
        self.in_call(py, how, reduction.caller.or(seen.caller), operation)
    }

    /// As `collective`, of one that is part of a call of the program's: ranks compare that.
    pub fn in_call(
        &self,
        py: Python<'_>,
        how: How,
        caller: Option<Caller>,
        operation: impl FnOnce(&ProcessGroup) -> phalanx::Result<()> + Send + 'static,
    ) -> PyResult<Option<Work>> {
        self.collective(py, how, move |group| match caller {
            None => operation(group),
            Some(caller) => operation(&group.in_call(caller)),
        })
    }

    /// Fails the group: a handler has `raised` while this rank waited in a call, which the other ranks cannot take for done.
    fn interrupted(&self, py: Python<'_>, raised: &PyErr) {
        let cause = interrupt::cause(py, raised);
        py.detach(|| self.0.abort(Error::aborted(cause)));
    }

    fn message(&self, (timeout, wait): How) -> PyResult<(Call, Work)> {
        let pending = Arc::new(Pending::default());
        let limit = timeout.map_or(Ok(*self.0.timeout.read()), duration)?;
        let call = Call { group: self.open(timeout)?, timeout: limit, wait, pending: pending.clone() };
        Ok((call, Work::new(pending)))
    }

    /// Sends a parcel of objects, and returns when it has been sent.
    pub fn send_parcel(&self, py: Python<'_>, parcel: Vec<u8>, to: Rank) -> PyResult<()> {
        let (call, work) = self.message((None, true))?;
        let content = Content::Parcel(parcel);
        let sent = interrupt::waiting(py, || self.0.messages.send(call, to, OBJECTS_TAG, content));
        sent.inspect_err(|raised| self.interrupted(py, raised))?;
        work.wait(py, None)?;
        Ok(())
    }

    /// An error of a receive for which there is no rank that could send.
    fn check_source(&self, from: Option<u32>) -> PyResult<()> {
        if from.is_none() && self.0.world.count() == 1 {
            return Err(PyValueError::new_err(
                "recv from any source: this group has one rank, and no rank sends to itself (start more ranks, or copy the data)",
            ));
        }
        Ok(())
    }

    /// Receives a parcel of objects from the rank `from`, or from any. Returns from which, and the parcel.
    pub fn recv_parcel(&self, py: Python<'_>, from: Option<Rank>) -> PyResult<(Rank, Vec<u8>)> {
        self.check_source(from.map(Rank::get))?;
        let (call, work) = self.message((None, true))?;
        let parcel = Arc::new(Mutex::new(Vec::new()));
        let place = Place::Parcel(parcel.clone());
        let received = interrupt::waiting(py, || self.0.messages.recv(call, from, OBJECTS_TAG, place));
        received.inspect_err(|raised| self.interrupted(py, raised))?;
        work.wait(py, None)?;
        let source = work.source().map(Rank::new).or(from);
        let source = source.ok_or_else(|| PyValueError::new_err("this message has come from no rank"))?;
        let parcel = std::mem::take(&mut *parcel.lock());
        Ok((source, parcel))
    }

    /// Checks the length of a list that has one entry for each.
    pub fn one_for_each(&self, what: &str, length: usize) -> PyResult<()> {
        if length == self.0.world.count() {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "{what}: a list of {length}, and the group has {} ranks",
            self.0.world
        )))
    }

    /// An error if the ranks cannot have equal parts of so many elements.
    pub fn has_equal_parts(&self, what: &str, elements: usize) -> PyResult<()> {
        if elements.is_multiple_of(self.0.world.count()) {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "{what}: {} ranks cannot have equal parts of {elements} elements",
            self.0.world
        )))
    }

    pub fn is_rank(&self, rank: u32) -> bool {
        self.0.rank.get() == rank
    }
}

impl Inner {
    /// Whether this is the process that joined the group, and not one that was forked from it.
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// Waits for what has been called, and leaves the group. An error if ranks have made different calls, which no call has returned.
    fn leave(&self) -> Result<(), Error> {
        self.end(ProcessGroup::leave).unwrap_or(Ok(()))
    }

    /// Waits for what has been called, and ends the group by `leave`; keeps why it has failed. None if it has been taken.
    fn end<T>(&self, leave: impl FnOnce(ProcessGroup) -> T) -> Option<T> {
        let group = self.take()?;
        // Its own handle to the failure would keep what the group leaves behind.
        let failure = group.watch();
        let left = leave(group);
        *self.left_with.lock() = failure();
        Some(left)
    }

    /// Waits for what has been called. The group is the caller's then, to be dropped; None if it has been taken.
    fn take(&self) -> Option<ProcessGroup> {
        if self.is_here() {
            self.collectives.close();
            if let Some(awaited) = self.messages.close_outbound(RECEIVE_TIMEOUT) {
                let cause = format!("rank {} has left the group while it waited for {awaited}", self.rank);
                self.abort(Error::aborted(cause));
            }
            self.messages.close();
            let mut group = self.group.write();
            if let Some(group) = &*group {
                *self.left_with.lock() = group.watched_failure();
            }
            return group.take();
        }
        None
    }

    fn abort(&self, error: Error) {
        // Not while the lock is held: whoever leaves the group needs it.
        let group = self.group.read().clone();
        if let Some(group) = group.filter(|_| self.is_here()) {
            group.abort(error);
        }
    }

    /// Ends the group for a handler that runs in a wait: takes no more calls, and fails those that have not ended. The thread that waits
    /// is the handler's own, so that nothing can be waited for here. Returns whether none was left, and the group can be left as usual.
    fn close_in_handler(&self) -> bool {
        self.collectives.close_later();
        self.messages.close_later();
        let is_idle = self.collectives.is_idle() && self.messages.is_idle();
        if !is_idle {
            let cause = "the program of this rank closed the group in a signal's handler, while calls waited";
            let remedy = "if these calls are to end, let the handler set a flag, and close the group between two calls";
            self.abort(Error::aborted(cause).with_remedy(remedy));
        }
        is_idle
    }
}

#[pymethods]
impl Group {
    /// Meets the other ranks in a `torch.distributed.Store`, which may have the keys of their earlier starts if it `is_kept`.
    #[staticmethod]
    #[pyo3(signature = (store, rank, world_size, timeout, is_kept = false))]
    fn in_store(
        py: Python<'_>,
        store: Py<PyAny>,
        rank: u32,
        world_size: u32,
        timeout: f64,
        is_kept: bool,
    ) -> PyResult<Self> {
        let timeout = duration(timeout)?;
        let given_up = GivenUp::default();
        let store: SharedStore = Arc::new(TorchStore::new(store, given_up.clone()));
        Self::join(py, timeout, Some(&given_up), move || {
            let world = WorldSize::new(world_size)?;
            let meet = if is_kept { rendezvous::from_kept_store } else { rendezvous::from_store };
            meet(store, world.rank(rank)?, world, timeout)
        })
    }

    /// Meets the other ranks at a URL; `env://` reads the launcher's variables.
    #[staticmethod]
    #[pyo3(signature = (url, rank, world_size, timeout))]
    fn at(
        py: Python<'_>,
        url: String,
        rank: Option<u32>,
        world_size: Option<u32>,
        timeout: f64,
    ) -> PyResult<Self> {
        let timeout = duration(timeout)?;
        Self::join(py, timeout, None, move || {
            let world = world_size.map(WorldSize::new).transpose()?;
            match (url.as_str(), rank, world) {
                ("env://", None, None) => rendezvous::from_env(timeout),
                _ => rendezvous::from_url(&url, rank.map(Rank::new), world, timeout),
            }
        })
    }

    /// Makes a group of these `ranks` of this one, in this order. They meet in `store`, the server of which is at `address` if that is
    /// a `TCPStore`; whatever else is in it, only members of groups that were made from this one find their keys. None if this group cannot
    /// be the source of others.
    fn part(
        &self,
        py: Python<'_>,
        store: Py<PyAny>,
        address: Option<String>,
        name: String,
        ranks: Vec<u32>,
        timeout: f64,
    ) -> PyResult<Option<Self>> {
        let timeout = duration(timeout)?;
        let Some(meeting) = &self.0.meeting else { return Ok(None) };
        let most_kept = unexpected_bytes().map_err(|error| raised(py, &error))?;
        let group = self.open(None)?;
        let number = {
            let mut parts = self.0.parts.lock();
            let next = parts.entry(name.clone()).or_default();
            *next += 1;
            *next - 1
        };
        let (prefix, name) = (format!("phalanx/part/{meeting}"), format!("{name}/{number}"));
        let meeting = format!("{meeting}/{name}");
        let ranks: Vec<Rank> = ranks.into_iter().map(Rank::new).collect();
        let given_up = GivenUp::default();
        let (connection, gives_up) = (self.0.connection.clone(), given_up.clone());
        // It takes longer to wake another thread than these ranks take to answer.
        let waits_here = address.is_some() && connection.is_made() && group.shares_memory_with(&ranks);
        let make = move || {
            let store = connection.store(address.as_deref(), store, gives_up);
            let store = Arc::new(PrefixStore::new(prefix, store));
            Ok((group.part(store, &name, &ranks, timeout)?, Some(meeting)))
        };
        let connection = self.0.connection.clone();
        let made = match waits_here {
            true => interrupt::waiting(py, make)?,
            false => clearing::apart(py, &given_up, make)?,
        };
        Self::new(py, timeout, connection, most_kept, made).map(Some)
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.get()
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.0.world.get()
    }

    #[getter]
    fn local_rank(&self) -> PyResult<u32> {
        Ok(self.open(None)?.local_rank())
    }

    /// `shm`, `tcp`, or None in a world of one.
    #[getter]
    fn transport(&self) -> PyResult<Option<String>> {
        Ok(self.open(None)?.transport().map(|kind| kind.to_string()))
    }

    /// Sets the limit of every operation that has none of its own, in seconds.
    fn set_timeout(&self, timeout: f64) -> PyResult<()> {
        *self.0.timeout.write() = duration(timeout)?;
        Ok(())
    }

    /// What distinguishes this group from those of the same ranks before it, on every rank; None in a world of one.
    #[getter]
    fn meeting(&self) -> Option<&str> {
        self.0.meeting.as_deref()
    }

    /// The cause of the group's failure, if it has failed, also when it has been left.
    fn failure<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        // Not a handle of its own, which would keep a group that is being left.
        let error = match &*self.0.group.read() {
            Some(group) => group.failure(),
            None => self.0.left_with.lock().clone(),
        }?;
        Some(raised(py, &error).into_value(py).into_bound(py).into_any())
    }

    /// Ends the group on every rank: what is called and what waits fails with `cause`.
    fn abort(&self, py: Python<'_>, cause: String) {
        py.detach(|| self.0.abort(Error::aborted(cause)));
    }

    /// Waits for what has been called, and leaves the group. If a handler raises meanwhile, what has been called fails. A handler
    /// that calls this while a call of this thread waits makes what has been called fail, and waits for nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if interrupt::is_in_handler() && self.0.is_here() && !py.detach(|| self.0.close_in_handler()) {
            return Ok(());
        }
        let inner = self.0.clone();
        let left = interrupt::apart(py, || (), move || inner.leave());
        left.inspect_err(|raised| self.interrupted(py, raised))?.map_err(|error| raised(py, &error))
    }

    /// As `close`, but waits at most `timeout` seconds, and then aborts the group with `cause`. For the end of the program,
    /// when Python starts no threads any more.
    fn close_within(&self, py: Python<'_>, timeout: f64, cause: String) -> PyResult<()> {
        let timeout = duration(timeout)?;
        interrupt::waiting(py, || {
            let (inner, left) = (self.0.clone(), Arc::new(Pending::default()));
            let done = left.clone();
            let leave = move || {
                // Standard error and the launcher get what there is to say.
                inner.end(drop);
                done.complete(Ok(None));
            };
            // Without a thread there is no time to wait.
            let leaves = std::thread::Builder::new().name("phalanx-leave".into()).spawn(leave).is_ok();
            if !leaves || left.wait(Instant::now().checked_add(timeout)).is_none() {
                self.0.abort(Error::aborted(cause));
                left.wait(Instant::now().checked_add(timeout));
            }
        })
        .inspect_err(|raised| self.interrupted(py, raised))
    }

    /// Begins to remove what `rank` and the others wrote to a store in which they have met by `in_store`, and to which nobody comes any more; and
    /// there these `others`, keys of the caller's.
    #[staticmethod]
    fn clear_meeting(store: Py<PyAny>, rank: u32, others: Vec<String>) {
        let given_up = GivenUp::default();
        let store: SharedStore = Arc::new(TorchStore::new(store, given_up.clone()));
        clearing::begin(given_up, move || {
            ProcessGroup::clear_meeting(store.clone(), Rank::new(rank));
            let others: Vec<&str> = others.iter().map(String::as_str).collect();
            // Not every store of a program removes keys. The group is connected, and needs none.
            let _ = store.delete_keys(&others, Deadline::after(CLEAR_TIMEOUT));
        });
    }

    /// Begins to remove what this rank wrote to connect the last parts that were made of this group, to which nobody comes any more.
    fn clear_parts(&self, py: Python<'_>) {
        py.detach(|| {
            let group = self.0.group.read().clone();
            if let Some(group) = group.filter(|_| self.0.is_here()) {
                clearing::begin(GivenUp::default(), group.clear_parts());
            }
        });
    }

    /// Whether it is this process's, and has not been left.
    fn is_open(&self) -> bool {
        self.0.is_here() && self.0.group.read().is_some()
    }

    /// Whether it is open in the process from which this one was forked.
    fn is_inherited(&self) -> bool {
        // Whoever held the lock when the process was forked does not release it here.
        !self.0.is_here() && self.0.group.try_read().is_none_or(|group| group.is_some())
    }

    fn barrier(&self, py: Python<'_>, how: How) -> PyResult<Option<Work>> {
        self.collective(py, how, ProcessGroup::barrier)
    }

    /// A barrier whose error names the ranks that have not come within `timeout` seconds.
    fn monitored_barrier(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = duration(timeout)?;
        self.collective(py, (None, true), move |group| group.monitored_barrier(timeout)).map(drop)
    }

    fn send(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, to: u32, tag: i64, how: How) -> PyResult<Work> {
        check_tag("send", tag)?;
        let memory = Memory::of(tensor, Meaning::Bytes, false)?;
        let (call, work) = self.message(how)?;
        let content = Content::Elements(memory);
        let sent = interrupt::waiting(py, || self.0.messages.send(call, Rank::new(to), tag, content));
        sent.inspect_err(|raised| self.interrupted(py, raised))?;
        Ok(work)
    }

    /// Receives from the rank `from`, or from any if that is None.
    fn recv(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        from: Option<u32>,
        tag: i64,
        how: How,
    ) -> PyResult<Work> {
        check_tag("recv", tag)?;
        self.check_source(from)?;
        let memory = Memory::of(tensor, Meaning::Bytes, true)?;
        let (call, work) = self.message(how)?;
        let place = Place::Elements(memory);
        let received = interrupt::waiting(py, || self.0.messages.recv(call, from.map(Rank::new), tag, place));
        received.inspect_err(|raised| self.interrupted(py, raised))?;
        Ok(work)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let group = self.group.get_mut().take();
        if self.process == std::process::id() {
            // What is in flight has handles of its own, and ends.
            self.collectives.close_later();
            self.messages.close_later();
        } else {
            // Its threads and connections are the parent's: they may neither be waited for nor said goodbye to.
            std::mem::forget((group, std::mem::take(&mut self.connection)));
        }
    }
}

/// Fails the group if this rank had no memory for what a call needs, and has not made it: the other ranks would wait for that, and take this rank's next
/// call for it.
fn fail_without_memory(group: &ProcessGroup, error: &Error) {
    if error.is_out_of_memory() && group.failure().is_none() {
        group.abort(error.clone());
    }
}

/// Fails the group if a call panics, for the same reason.
struct FailingIfPanicked<'a>(&'a ProcessGroup);

impl Drop for FailingIfPanicked<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort(Error::panicked("an operation panicked on this rank"));
        }
    }
}

/// An error of a tag that no message has, in gloo's words.
fn check_tag(what: &str, tag: i64) -> PyResult<()> {
    match tag {
        0.. => Ok(()),
        _ => Err(PyValueError::new_err(format!("{what}: Tag must be nonnegative; it is {tag}"))),
    }
}

/// A time-out in seconds. One that is too long for the clock, such as 1e19 or infinity, is thirty years, as in the core.
fn duration(seconds: f64) -> PyResult<Duration> {
    if seconds > LONGEST_TIMEOUT.as_secs_f64() {
        return Ok(LONGEST_TIMEOUT);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("a time-out of {seconds} s: {error}")))
}

impl Reduction {
    /// The one with PyTorch's number, or with `INTEGER_AVERAGE`.
    pub fn of((number, factor): Op) -> PyResult<Self> {
        let (narrow, number) = (number / NARROW, number % NARROW);
        let op = match number {
            0 | INTEGER_AVERAGE => ReduceOp::Sum,
            1 => ReduceOp::Avg,
            2 => ReduceOp::Product,
            3 => ReduceOp::Min,
            4 => ReduceOp::Max,
            5 => ReduceOp::BAnd,
            6 => ReduceOp::BOr,
            7 => ReduceOp::BXor,
            8 => ReduceOp::PreMulSum(factor),
            _ => return Err(PyValueError::new_err(format!("there is no reduce operation {number}"))),
        };
        Ok(Self { op, caller: dtypes::of_narrow(narrow, number == INTEGER_AVERAGE)? })
    }

    /// The one with PyTorch's number, unless it has a factor, which takes longer to read, or there is none.
    pub fn usual(number: u8) -> Option<Self> {
        let reduction = Self::of((number.into(), f64::NAN)).ok()?;
        (!matches!(reduction.op, ReduceOp::PreMulSum(_))).then_some(reduction)
    }

    /// What it means for elements.
    pub fn meaning(self) -> Meaning {
        match self.op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => Meaning::Sums,
            ReduceOp::Product
            | ReduceOp::Min
            | ReduceOp::Max
            | ReduceOp::BAnd
            | ReduceOp::BOr
            | ReduceOp::BXor => Meaning::Numbers,
        }
    }
}
