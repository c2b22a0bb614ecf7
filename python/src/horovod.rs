//! Horovod's way: collectives by name, on the memory of tensors.

use parking_lot::{Mutex, RwLock};
use phalanx::{Caller, Error, INTERRUPT_INTERVAL, ProcessGroup, Rank};
use phalanx_horovod::{Handle as Flight, Op, Received, Reduction, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::collectives::is_integer;
use crate::dtypes::{self, Meaning};
use crate::errors::raised;
use crate::group::{INTEGER_AVERAGE, NARROW};
use crate::interrupt;
use crate::memory::Memory;

type Tensors<'py> = Vec<Bound<'py, PyAny>>;

impl phalanx_horovod::Memory for Memory {
    fn as_bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

/// The ranks that have met: a program may shut down and begin again, and they meet once.
#[pyclass(frozen, weakref, module = "phalanx_torch._native")]
pub struct Ranks {
    /// None when it has been left.
    group: Mutex<Option<ProcessGroup>>,
    process: u32,
}

#[pymethods]
impl Ranks {
    /// Meets the other ranks, as the launcher says.
    #[staticmethod]
    fn meet(py: Python<'_>) -> PyResult<Self> {
        let group = interrupt::apart(py, || (), phalanx::init)?.map_err(|error| raised(py, &error))?;
        Ok(Self { group: Mutex::new(Some(group)), process: std::process::id() })
    }

    /// Whether they can begin again: not after a failure, nor in a process that was forked from theirs.
    fn can_begin(&self) -> bool {
        self.here().is_some_and(|group| group.failure().is_none())
    }

    /// Whether they have met in the process from which this one was forked, and have not been left before.
    fn is_inherited(&self) -> bool {
        // Whoever held the lock when the process was forked does not release it here.
        !is_here(self.process) && self.group.try_lock().is_none_or(|group| group.is_some())
    }

    /// Says goodbye to them.
    fn leave(&self, py: Python<'_>) {
        if is_here(self.process) {
            py.detach(|| {
                // The lock is released before the others are waited for.
                let group = self.group.lock().take();
                drop(group);
            });
        }
    }
}

impl Ranks {
    fn here(&self) -> Option<ProcessGroup> {
        // The lock may have been held when this process was forked from theirs.
        is_here(self.process).then(|| self.group.lock().clone()).flatten()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if !is_here(self.process) {
            // Its threads and connections are the parent's: they may neither be waited for nor said goodbye to.
            std::mem::forget(self.group.get_mut().take());
        }
    }
}

/// Whether this is the process with this number, and not one that was forked from it.
fn is_here(process: u32) -> bool {
    process == std::process::id()
}

fn check_here(process: u32) -> PyResult<()> {
    match is_here(process) {
        true => Ok(()),
        false => Err(PyValueError::new_err(
            "hvd.init() was called in the process from which this one was forked; call it in this process, started with the \
             multiprocessing method \"spawn\"",
        )),
    }
}

/// A handle to the ranks of a job, or of a process set.
#[pyclass(frozen, module = "phalanx_torch._native")]
pub struct Horovod {
    inner: phalanx_horovod::Horovod,
    /// A forked process has none of its parent's threads.
    process: u32,
}

/// An operation. Threads may wait for it at the same time, and ask for it meanwhile.
#[pyclass(frozen, module = "phalanx_torch._native")]
pub struct Handle {
    /// None when the operation has ended and `outcome` has its result.
    in_flight: RwLock<Option<InFlight>>,
    /// Locked before `in_flight`, by threads for whom the operation has ended.
    outcome: Mutex<Option<Result<Outcome, Error>>>,
    process: u32,
}

enum InFlight {
    One(Flight<Tensor>),
    Many(Flight<Vec<Tensor>>),
    Exchange(Flight<Received>),
    Barrier(Flight<()>),
    Join(Flight<Rank>),
}

#[derive(Default)]
struct Outcome {
    tensors: Vec<Tensor>,
    splits: Vec<usize>,
    last: Option<u32>,
}

impl InFlight {
    fn wait_for(&self) -> bool {
        match self {
            Self::One(flight) => flight.wait_for(INTERRUPT_INTERVAL),
            Self::Many(flight) => flight.wait_for(INTERRUPT_INTERVAL),
            Self::Exchange(flight) => flight.wait_for(INTERRUPT_INTERVAL),
            Self::Barrier(flight) => flight.wait_for(INTERRUPT_INTERVAL),
            Self::Join(flight) => flight.wait_for(INTERRUPT_INTERVAL),
        }
    }

    fn poll(&self) -> bool {
        match self {
            Self::One(flight) => flight.poll(),
            Self::Many(flight) => flight.poll(),
            Self::Exchange(flight) => flight.poll(),
            Self::Barrier(flight) => flight.poll(),
            Self::Join(flight) => flight.poll(),
        }
    }

    fn finish(self) -> Result<Outcome, Error> {
        let of = |tensors| Outcome { tensors, ..Outcome::default() };
        match self {
            Self::One(flight) => flight.synchronize().map(|tensor| of(vec![tensor])),
            Self::Many(flight) => flight.synchronize().map(of),
            Self::Exchange(flight) => {
                let exchanged = flight.synchronize();
                exchanged.map(|Received { tensor, splits }| Outcome { splits, ..of(vec![tensor]) })
            }
            Self::Barrier(flight) => flight.synchronize().map(|()| Outcome::default()),
            Self::Join(flight) => {
                flight.synchronize().map(|last| Outcome { last: Some(last.get()), ..Outcome::default() })
            }
        }
    }
}

impl Handle {
    fn new(py: Python<'_>, in_flight: phalanx::Result<InFlight>) -> PyResult<Self> {
        let handle = |in_flight| Self {
            in_flight: RwLock::new(Some(in_flight)),
            outcome: Mutex::new(None),
            process: std::process::id(),
        };
        in_flight.map(handle).map_err(|error| raised(py, &error))
    }

    /// Waits for the end, and calls `read` with the outcome.
    fn outcome<R: Send>(&self, py: Python<'_>, read: impl FnOnce(&Outcome) -> R + Send) -> PyResult<R> {
        check_here(self.process)?;
        let outcome = interrupt::waiting(py, || {
            // No lock is held while signals' handlers run, which may ask for this handle.
            while !self.in_flight.read().as_ref().is_none_or(InFlight::wait_for) {
                interrupt::look()?;
            }
            let mut outcome = self.outcome.lock();
            if let Some(ended) = self.in_flight.write().take() {
                *outcome = Some(ended.finish());
            }
            match &*outcome {
                Some(Ok(outcome)) => Ok(read(outcome)),
                Some(Err(error)) => Err(error.clone()),
                None => Err(Error::aborted("the operation was lost")),
            }
        })?;
        outcome.map_err(|error| raised(py, &error))
    }
}

#[pymethods]
impl Handle {
    /// Waits for the end, and raises the operation's error.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.outcome(py, |_| ())
    }

    /// Whether it has ended.
    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        check_here(self.process)?;
        Ok(py.detach(|| self.in_flight.read().as_ref().is_none_or(InFlight::poll)))
    }

    /// The shapes of the results, after the end.
    fn shapes(&self, py: Python<'_>) -> PyResult<Vec<Vec<usize>>> {
        self.outcome(py, |outcome| outcome.tensors.iter().map(|tensor| tensor.shape().to_vec()).collect())
    }

    /// How many rows came from each rank, after the end of an alltoall.
    fn splits(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.outcome(py, |outcome| outcome.splits.clone())
    }

    /// The rank that joined last, after the end of a join.
    fn last(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        self.outcome(py, |outcome| outcome.last)
    }

    /// Copies the result with this index into `tensor`, which must have as many bytes.
    fn copy_to(&self, py: Python<'_>, index: usize, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut memory = Memory::of(tensor, Meaning::Bytes, true)?;
        let copied = self.outcome(py, |outcome| {
            let result = outcome.tensors.get(index).map(Tensor::as_bytes);
            let result = result.filter(|result| result.len() == memory.as_bytes().len())?;
            memory.as_bytes_mut().copy_from_slice(result);
            Some(())
        })?;
        copied.ok_or_else(|| PyValueError::new_err(format!("result {index} has not this size")))
    }
}

impl Horovod {
    fn new(inner: phalanx_horovod::Horovod) -> Self {
        Self { inner, process: std::process::id() }
    }

    fn is_here(&self) -> bool {
        is_here(self.process)
    }

    fn here(&self) -> PyResult<&phalanx_horovod::Horovod> {
        check_here(self.process).map(|()| &self.inner)
    }

    /// What is submitted under `name`. The other ranks are told why there is nothing, and do not wait for it.
    fn made<T>(&self, py: Python<'_>, name: &str, made: PyResult<T>) -> PyResult<T> {
        made.inspect_err(|error| self.refuse(py, name, error.to_string()))
    }

    fn start(
        &self,
        py: Python<'_>,
        start: impl FnOnce(&phalanx_horovod::Horovod) -> phalanx::Result<InFlight> + Send,
    ) -> PyResult<Handle> {
        let inner = self.here()?;
        Handle::new(py, py.detach(|| start(inner)))
    }
}

#[pymethods]
impl Horovod {
    /// Begins a job of `ranks`. Every one of them calls it.
    #[staticmethod]
    fn begin(py: Python<'_>, ranks: &Ranks) -> PyResult<Self> {
        let group = ranks.here().ok_or_else(|| PyValueError::new_err("these ranks have been left"))?;
        let inner = interrupt::apart(py, || (), move || phalanx_horovod::init_in(&group))?;
        inner.map(Self::new).map_err(|error| raised(py, &error))
    }

    /// Waits for this rank's thread, and leaves.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        if !self.is_here() {
            return Ok(());
        }
        let inner = self.inner.clone();
        interrupt::apart(py, || (), move || inner.shutdown())
    }

    /// Fails the job on all ranks with `cause`.
    fn abort(&self, py: Python<'_>, cause: String) {
        if self.is_here() {
            py.detach(|| self.inner.abort(Error::aborted(cause)));
        }
    }

    fn is_initialized(&self) -> bool {
        self.is_here() && self.inner.is_initialized()
    }

    fn rank(&self) -> u32 {
        self.inner.rank().get()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn local_rank(&self) -> u32 {
        self.inner.local_rank()
    }

    fn local_size(&self) -> u32 {
        self.inner.local_size()
    }

    fn cross_rank(&self) -> u32 {
        self.inner.cross_rank()
    }

    fn cross_size(&self) -> u32 {
        self.inner.cross_size()
    }

    fn is_homogeneous(&self) -> bool {
        self.inner.is_homogeneous()
    }

    /// A handle to some of the ranks; None on the others.
    fn add_process_set(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<Option<Self>> {
        let inner = self.here()?.clone();
        let ranks: Vec<Rank> = ranks.into_iter().map(Rank::new).collect();
        let set = interrupt::apart(py, || (), move || inner.add_process_set(&ranks))?;
        set.map(|set| set.map(Self::new)).map_err(|error| raised(py, &error))
    }

    /// Every rank of the set calls it, and waits for the others.
    fn leave_process_set(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.here()?.clone();
        let left = interrupt::apart(py, || (), move || inner.remove_process_set(Some(inner.clone())))?;
        left.map_err(|error| raised(py, &error))
    }

    fn start_timeline(&self, py: Python<'_>, path: String) -> PyResult<()> {
        let inner = self.here()?.clone();
        let started = interrupt::apart(py, || (), move || inner.start_timeline(path))?;
        started.map_err(|error| raised(py, &error))
    }

    fn stop_timeline(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.here()?;
        py.detach(|| inner.stop_timeline()).map_err(|error| raised(py, &error))
    }

    /// Combines the tensors where they are. `types` are the numbers of their types in the program, as `group::Op` has them: 0, if they
    /// have the type that is combined and no average of integers is made of the sum.
    fn allreduce(
        &self,
        py: Python<'_>,
        name: &str,
        tensors: Tensors<'_>,
        types: Vec<u16>,
        op: u8,
        factors: (f64, f64),
    ) -> PyResult<Handle> {
        let made = reduced((&tensors, types.as_slice()), (op, factors));
        let (tensors, reduction) = self.made(py, name, made)?;
        self.start(py, |hvd| hvd.grouped_allreduce_async(name, tensors, reduction).map(InFlight::Many))
    }

    fn allgather(&self, py: Python<'_>, name: &str, tensors: Tensors<'_>) -> PyResult<Handle> {
        let tensors = self.made(py, name, lent(&tensors, Meaning::Bytes, false))?;
        self.start(py, |hvd| hvd.grouped_allgather_async(name, tensors).map(InFlight::Many))
    }

    /// Overwrites the tensor of every rank but the root.
    fn broadcast(
        &self,
        py: Python<'_>,
        name: &str,
        tensor: &Bound<'_, PyAny>,
        root: u32,
    ) -> PyResult<Handle> {
        let tensor = self.made(py, name, lent_one(tensor, Meaning::Bytes, true))?;
        self.start(py, |hvd| hvd.broadcast_async(name, tensor, Rank::new(root)).map(InFlight::One))
    }

    fn alltoall(
        &self,
        py: Python<'_>,
        name: &str,
        tensor: &Bound<'_, PyAny>,
        splits: Option<Vec<usize>>,
    ) -> PyResult<Handle> {
        let tensor = self.made(py, name, lent_one(tensor, Meaning::Bytes, false))?;
        self.start(py, |hvd| hvd.alltoall_async(name, tensor, splits.as_deref()).map(InFlight::Exchange))
    }

    fn reducescatter(
        &self,
        py: Python<'_>,
        name: &str,
        tensors: Tensors<'_>,
        types: Vec<u16>,
        op: u8,
        factors: (f64, f64),
    ) -> PyResult<Handle> {
        let made = reduced((&tensors, types.as_slice()), (op, factors));
        let (tensors, reduction) = self.made(py, name, made)?;
        self.start(py, |hvd| hvd.grouped_reducescatter_async(name, tensors, reduction).map(InFlight::Many))
    }

    /// Tells the other ranks that this one has refused a call of its program.
    fn refuse(&self, py: Python<'_>, name: &str, cause: String) {
        if self.is_here() {
            py.detach(|| self.inner.refuse(name, &cause));
        }
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<Handle> {
        self.start(py, |hvd| hvd.barrier_async().map(InFlight::Barrier))
    }

    fn join(&self, py: Python<'_>) -> PyResult<Handle> {
        self.start(py, |hvd| hvd.join_async().map(InFlight::Join))
    }
}

impl Drop for Horovod {
    fn drop(&mut self) {
        if !self.is_here() {
            // Its threads and connections are the parent's: they may neither be waited for nor said goodbye to.
            std::mem::forget(self.inner.clone());
        }
    }
}

/// The operation with the number that Horovod's users know.
fn reduction(op: u8, (before, after): (f64, f64)) -> PyResult<Reduction> {
    let op = match op {
        0 => Op::Average,
        1 => Op::Sum,
        2 => Op::Adasum,
        3 => Op::Min,
        4 => Op::Max,
        5 => Op::Product,
        _ => return Err(PyValueError::new_err(format!("there is no reduce operation {op}"))),
    };
    Ok(Reduction::new(op).prescale(before).postscale(after))
}

/// What is submitted to be reduced. Factors of floats are applied where the tensors are, those of integers by `phalanx_torch`: ranks only compare
/// them.
fn reduced(
    (tensors, types): (&Tensors<'_>, &[u16]),
    (op, factors): (u8, (f64, f64)),
) -> PyResult<(Vec<Tensor>, Reduction)> {
    let reduction = reduction(op, factors)?;
    let mut tensors = lent(tensors, meaning(op), true)?;
    if types.len() != tensors.len() {
        return Err(PyValueError::new_err("each tensor has a number of its type"));
    }
    let has_factors = factors != (1.0, 1.0);
    for (tensor, number) in tensors.iter_mut().zip(types) {
        let scaled = (has_factors && is_integer(tensor.dtype())).then_some(Caller::ScaledIntegers);
        let narrow = dtypes::of_narrow(number / NARROW, number % NARROW == INTEGER_AVERAGE)?;
        narrow.or(scaled).into_iter().for_each(|caller| tensor.stand_for(caller));
    }
    Ok((tensors, reduction))
}

/// Complex numbers can be added up.
fn meaning(op: u8) -> Meaning {
    if op <= 1 { Meaning::Sums } else { Meaning::Numbers }
}

fn lent(tensors: &[Bound<'_, PyAny>], meaning: Meaning, written: bool) -> PyResult<Vec<Tensor>> {
    tensors.iter().map(|tensor| lent_one(tensor, meaning, written)).collect()
}

/// The tensor's memory. Elements that are several of those that collectives know have a dimension more, the last.
fn lent_one(tensor: &Bound<'_, PyAny>, meaning: Meaning, written: bool) -> PyResult<Tensor> {
    let py = tensor.py();
    let memory = Memory::of(tensor, meaning, written)?;
    let mut shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
    let itemsize: usize = tensor.getattr(intern!(py, "itemsize"))?.extract()?;
    if itemsize != memory.dtype().size() {
        shape.push(itemsize / memory.dtype().size());
    }
    let caller = memory.seen().caller;
    let mut lent = Tensor::from_memory(memory.dtype(), shape, memory).map_err(|error| raised(py, &error))?;
    caller.into_iter().for_each(|caller| lent.stand_for(caller));
    Ok(lent)
}
