//! A group of threads for the tests: the last thread to enter an operation does the work for all.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::group::{Communicator, Work};
use crate::rank::Rank;
use crate::trace::Trace;
use crate::world_size::WorldSize;

/// Completes one rank's part of an operation.
type Completer = Box<dyn FnOnce(Result<Buffer>) + Send>;

/// One rank's handle.
#[derive(Clone)]
pub(super) struct FakeGroup {
    rank: Rank,
    world: Arc<World>,
    log: Arc<Mutex<RankLog>>,
    trace: Trace,
    has_memory: bool,
}

/// What one rank did.
#[derive(Default)]
struct RankLog {
    calls: Vec<Call>,
    allocations: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    pub(super) elements: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    AllReduce(ReduceOp),
    Broadcast(Rank),
    ReduceScatter(ReduceOp),
    AllGather,
}

/// One rank's part in an operation.
struct Contribution {
    call: Call,
    buffer: Buffer,
    /// The bytes that this rank owns, if the buffer is sharded.
    own: Range<usize>,
    completer: Completer,
}

struct World {
    size: WorldSize,
    state: Mutex<WorldState>,
}

#[derive(Default)]
struct WorldState {
    open: BTreeMap<usize, BTreeMap<Rank, Contribution>>,
    failure: Option<Error>,
    /// The operation that fails.
    fault: Option<(usize, Error)>,
}

/// Runs `body` on every rank of a world, and gives what they return, in order.
pub(super) fn run<T: Send>(ranks: u32, body: impl Fn(Arc<FakeGroup>) -> T + Sync) -> Vec<T> {
    let groups = FakeGroup::world(ranks);
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| body(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

impl FakeGroup {
    pub(super) fn world(ranks: u32) -> Vec<Arc<Self>> {
        let world = Arc::new(World { size: WorldSize::new(ranks).unwrap(), state: Mutex::default() });
        world.size.ranks().map(|rank| Arc::new(Self::of(rank, world.clone(), Trace::disabled()))).collect()
    }

    pub(super) fn traced(self: &Arc<Self>, trace: Trace) -> Arc<Self> {
        Arc::new(Self::of(self.rank, self.world.clone(), trace))
    }

    fn of(rank: Rank, world: Arc<World>, trace: Trace) -> Self {
        Self { rank, world, log: Arc::default(), trace, has_memory: true }
    }

    /// The same rank, for whose collectives there is no memory.
    pub(super) fn without_memory(&self) -> Self {
        Self { has_memory: false, ..self.clone() }
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        self.log.lock().calls.clone()
    }

    pub(super) fn allocations(&self) -> usize {
        self.log.lock().allocations
    }

    /// Lets the operation after the next `skip` ones fail with `error`.
    pub(super) fn fail_after(&self, skip: usize, error: Error) {
        self.world.state.lock().fault = Some((self.calls().len() + skip, error));
    }

    /// This rank's bytes of `buffer`.
    fn own(&self, buffer: &Buffer, counts: &[usize]) -> Range<usize> {
        assert_eq!((counts.len(), counts.iter().sum()), (self.world.size.count(), buffer.len()));
        let size = buffer.dtype().size();
        let start = counts[..self.rank.index()].iter().sum::<usize>() * size;
        start..start + counts[self.rank.index()] * size
    }

    fn call(&self, kind: Kind, buffer: Buffer) -> Result<Work> {
        self.call_on(kind, buffer, 0..0)
    }

    fn call_on(&self, kind: Kind, buffer: Buffer, own: Range<usize>) -> Result<Work> {
        let call = Call { kind, dtype: buffer.dtype(), elements: buffer.len() };
        let sequence = {
            let mut log = self.log.lock();
            log.calls.push(call);
            log.calls.len() - 1
        };
        let mut state = self.world.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let (work, completer) = Work::pending();
        let parts = state.open.entry(sequence).or_default();
        let completer = Box::new(|outcome| completer.complete(outcome));
        parts.insert(self.rank, Contribution { call, buffer, own, completer });
        if parts.len() == self.world.size.count() {
            let parts = state.open.remove(&sequence).unwrap();
            let fault = state.fault.clone().filter(|(at, _)| *at == sequence);
            if let Some((_, error)) = fault {
                state.failure = Some(error.clone());
                parts.into_values().for_each(|part| (part.completer)(Err(error.clone())));
            } else {
                complete(parts);
            }
        }
        Ok(work)
    }
}

impl Communicator for FakeGroup {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> WorldSize {
        self.world.size
    }

    fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        self.log.lock().allocations += 1;
        match self.has_memory {
            true => Ok(Buffer::zeroed(dtype, elements)),
            false => Err(Error::out_of_memory("no memory in this test")),
        }
    }

    fn in_call(&self, _: Caller) -> Arc<dyn Communicator> {
        Arc::new(self.clone())
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        self.call(Kind::AllReduce(op), buffer)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.call(Kind::Broadcast(root), buffer)
    }

    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        let own = self.own(&buffer, counts);
        self.call_on(Kind::ReduceScatter(op), buffer, own)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        let own = self.own(&buffer, counts);
        self.call_on(Kind::AllGather, buffer, own)
    }

    fn abort(&self, cause: Error) {
        let mut state = self.world.state.lock();
        let cause = state.failure.get_or_insert(cause).clone();
        for part in std::mem::take(&mut state.open).into_values().flat_map(BTreeMap::into_values) {
            (part.completer)(Err(cause.clone()));
        }
    }

    fn failure(&self) -> Option<Error> {
        self.world.state.lock().failure.clone()
    }

    fn trace(&self) -> Trace {
        self.trace.clone()
    }
}

fn complete(parts: BTreeMap<Rank, Contribution>) {
    let calls: Vec<Call> = parts.values().map(|part| part.call).collect();
    let call = calls[0];
    let outcome = if calls.iter().any(|other| *other != call) {
        Err(Error::mismatch(format!("{calls:?}")))
    } else {
        let buffers = parts.values().map(|part| &part.buffer);
        Ok(match call.kind {
            Kind::Broadcast(root) => parts[&root].buffer.clone(),
            Kind::AllReduce(op) | Kind::ReduceScatter(op) => reduce(buffers.collect(), op, call.dtype),
            Kind::AllGather => {
                let mut gathered = parts[&Rank::MAIN].buffer.clone();
                for Contribution { own, buffer, .. } in parts.values() {
                    gathered.as_bytes_mut()[own.clone()].copy_from_slice(&buffer.as_bytes()[own.clone()]);
                }
                gathered
            }
        })
    };
    for Contribution { mut buffer, own, completer, .. } in parts.into_values() {
        completer(outcome.clone().map(|result| {
            if let Kind::ReduceScatter(_) = call.kind {
                // The parts of other ranks mean nothing here.
                buffer.as_bytes_mut().fill(0xff);
                buffer.as_bytes_mut()[own.clone()].copy_from_slice(&result.as_bytes()[own]);
            } else {
                buffer.as_bytes_mut().copy_from_slice(result.as_bytes());
            }
            buffer
        }));
    }
}

fn reduce(buffers: Vec<&Buffer>, op: ReduceOp, dtype: DType) -> Buffer {
    let count = buffers.len() as f64;
    match (op, dtype) {
        (ReduceOp::Avg, DType::F32) => fold::<f32>(&buffers, |a, b| a + b, |sum| sum / count as f32),
        (ReduceOp::Avg, DType::F64) => fold::<f64>(&buffers, |a, b| a + b, |sum| sum / count),
        (ReduceOp::Avg, DType::F16) => {
            fold::<f16>(&buffers, |a, b| a + b, |sum| f16::from_f64(sum.to_f64() / count))
        }
        (ReduceOp::Sum, DType::F64) => fold::<f64>(&buffers, |a, b| a + b, |sum| sum),
        (ReduceOp::Sum, DType::F16) => fold::<f16>(&buffers, |a, b| a + b, |sum| sum),
        (ReduceOp::Sum, DType::BF16) => fold::<bf16>(&buffers, |a, b| a + b, |sum| sum),
        (ReduceOp::Min, DType::I64) => fold::<i64>(&buffers, i64::min, |least| least),
        (ReduceOp::Max, DType::U8) => fold::<u8>(&buffers, u8::max, |most| most),
        other => panic!("the fake group does not know {other:?}"),
    }
}

fn fold<T: Element>(buffers: &[&Buffer], combine: impl Fn(T, T) -> T, end: impl Fn(T) -> T) -> Buffer {
    let slices: Vec<&[T]> = buffers.iter().map(|buffer| buffer.as_slice().unwrap()).collect();
    let result: Vec<T> = (0..slices[0].len())
        .map(|element| end(slices.iter().map(|slice| slice[element]).reduce(&combine).unwrap()))
        .collect();
    Buffer::from_slice(&result)
}
