//! Process groups: a handle through which a rank takes part in collectives.

mod affinity;
mod all_to_all;
mod arguments;
mod asynchronous;
mod blocking;
mod communicator;
mod config;
mod connect;
mod connect_part;
mod engine;
mod failure;
mod family;
mod gather;
mod handle;
mod init;
mod main_process_first;
mod messages;
mod monitored_barrier;
mod objects;
mod point_to_point;
mod reduce;
mod remote_error;
mod sampler;
mod subgroup;
mod weak;
mod work;
mod work_queue;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use phalanx_sys::arena::Arena;

pub(crate) use self::affinity::LocalRank;
pub use self::communicator::Communicator;
pub(crate) use self::communicator::forward_to_group;
pub(crate) use self::config::{Backend, GroupConfig};
use self::connect::connect_in_process;
pub(crate) use self::connect::{Connected, keys_of};
#[cfg(any(test, feature = "testing"))]
pub(crate) use self::connect::{TransportOptions, connect};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub use self::connect_part::fuzz as fuzz_part;
use self::engine::Engine;
pub(crate) use self::handle::Binding;
pub use self::handle::GroupHandle;
pub use self::init::{GroupOptions, init};
use self::messages::Messages;
pub use self::point_to_point::P2pOp;
#[doc(hidden)]
pub use self::remote_error::RemoteError;
#[doc(hidden)]
pub use self::weak::{WeakGroup, WeakHandle};
#[doc(hidden)]
pub use self::work::Completer;
pub use self::work::Work;
use self::work_queue::WorkQueue;
pub use crate::wire::MAX_OBJECT_BYTES;
use parking_lot::Mutex;

use crate::buffer::{Buffer, MEMORY_REMEDY};
use crate::caller::Caller;
use crate::deadline::Timeout;
use crate::domain::Partition;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::rank::{Generation, Rank};
use crate::trace::Trace;
use crate::transport::TransportKind;
use crate::worker_error;
use crate::world_size::WorldSize;

/// The default time-out of an operation, the same as PyTorch's for groups on processors.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// A handle to a group of ranks. Clones are handles to the same group.
///
/// All ranks must call the same collectives, with the same sizes, in the same order. Every frame says which call it
/// belongs to: if ranks disagree, all of them get an error that shows both calls. Results have the same bits on
/// every rank, and on every run with the same world over the same transport.
///
/// After a failure the group refuses work: pending and later operations return the first cause. When the last handle
/// is dropped, the rank finishes its operations and sends a goodbye to the others.
///
/// | To | call |
/// |---|---|
/// | join a group | [`init`](fn@init), or [`join`](Self::join) with a rendezvous; [`alone`](Self::alone), [`in_process`](Self::in_process) without one |
/// | know this rank | [`rank`](Self::rank), [`world_size`](Self::world_size), [`local_rank`](Self::local_rank) |
/// | combine data of all ranks | [`all_reduce`](Self::all_reduce), [`reduce`](Self::reduce), [`reduce_scatter`](Self::reduce_scatter) |
/// | copy data between all ranks | [`broadcast`](Self::broadcast), [`all_gather`](Self::all_gather), [`gather`](Self::gather), [`scatter`](Self::scatter), [`all_to_all`](Self::all_to_all) |
/// | do the same while this thread continues | [`all_reduce_async`](Self::all_reduce_async) and the others in `_async`, which return a [`Work`] |
/// | exchange values that serde can write | [`broadcast_object`](Self::broadcast_object), [`all_gather_object`](Self::all_gather_object) |
/// | send a message to one rank | [`send`](Self::send), [`recv`](Self::recv), [`isend`](Self::isend), [`irecv`](Self::irecv) |
/// | wait for all ranks | [`barrier`](Self::barrier), [`monitored_barrier`](Self::monitored_barrier) |
/// | make groups of some ranks | [`new_group`](Self::new_group), [`split`](Self::split) |
/// | limit the time of an operation | [`with_timeout`](Self::with_timeout) |
/// | leave the group | [`close`](Self::close) together with all ranks, [`leave`](Self::leave) alone; [`abort`](Self::abort) ends it on all ranks, with an error |
///
/// ```
/// use phalanx::{ProcessGroup, ReduceOp, WorldSize};
/// let group = ProcessGroup::alone()?; // a world of one, which needs no launcher
/// let mut loss = [0.5f32];
/// group.all_reduce(&mut loss, ReduceOp::Avg)?;
/// assert_eq!(loss, [0.5]);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias("torch.distributed", "MPI_Comm", "Communicator"))]
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
    timeout: Duration,
    caller: Option<Caller>,
}

struct Inner {
    rank: Rank,
    world: WorldSize,
    health: Arc<Health>,
    trace: Trace,
    transport: Option<TransportKind>,
    arena: Option<Arc<Arena>>,
    /// Which ranks share memory.
    partition: Partition,
    /// Dropped first of the fields below: it finishes its operations while the health and the store still exist.
    queue: WorkQueue,
    /// Dropped after `queue`, for the same reason.
    messages: Messages,
    /// The number of sub-groups made of this group.
    children: Mutex<u64>,
    /// Another rank's error that a call has returned on this rank, with the number of calls at that time.
    remote_error: Mutex<Option<(u64, Error)>>,
    /// Whether this rank has called [`ProcessGroup::abort`].
    aborted: AtomicBool,
    /// Dropped last: it keeps the store alive.
    config: GroupConfig,
}

/// The fixed properties of a group.
pub(crate) struct Identity {
    pub rank: Rank,
    pub world: WorldSize,
    pub trace: Trace,
    pub config: GroupConfig,
}

impl ProcessGroup {
    /// A world of one.
    ///
    /// # Errors
    /// If the system refuses the group's thread.
    pub fn alone() -> Result<Self> {
        Self::alone_in(LocalRank { rank: 0, world_size: 1 }, Generation::default(), Trace::disabled())
    }

    /// The place among the ranks of the host is the launcher's: a rank that is left alone in an elastic job keeps its device.
    fn alone_in(local: LocalRank, generation: Generation, trace: Trace) -> Result<Self> {
        let (rank, world) = (Rank::MAIN, WorldSize::ONE);
        let connected = connect_in_process(world).pop();
        let connected = connected.ok_or_else(|| Error::invalid_argument("a world of one has one rank"))?;
        let config = GroupConfig::new(Backend::process(), local, generation);
        Self::new(Identity { rank, world, trace, config }, connected)
    }

    /// The groups of all ranks of one process, one for each thread that acts as a rank.
    ///
    /// ```
    /// use phalanx::{ProcessGroup, ReduceOp, WorldSize};
    /// let groups = ProcessGroup::in_process(WorldSize::new(3)?)?;
    /// let sums = std::thread::scope(|scope| {
    ///     let ranks = groups.into_iter().map(|group| scope.spawn(move || {
    ///         let mut data = [group.rank().get() as i64; 4];
    ///         group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data)
    ///     }));
    ///     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<_>, _>>()
    /// })?;
    /// assert_eq!(sums, [[3; 4]; 3]);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the system refuses a thread for each rank.
    pub fn in_process(world: WorldSize) -> Result<Vec<Self>> {
        Self::in_process_in(Generation::default(), world, &Trace::disabled())
    }

    fn in_process_in(generation: Generation, world: WorldSize, trace: &Trace) -> Result<Vec<Self>> {
        let backend = Backend::process();
        world
            .ranks()
            .zip(connect_in_process(world))
            .map(|(rank, connected)| {
                // Threads of one process, which may be tests: they are not bound to processors.
                let local = LocalRank { rank: rank.get(), world_size: 1 };
                let config = GroupConfig::new(backend.clone(), local, generation);
                Self::new(Identity { rank, world, trace: trace.clone(), config }, connected)
            })
            .collect()
    }

    pub(crate) fn new(identity: Identity, connected: Connected) -> Result<Self> {
        let Identity { rank, world, trace, config } = identity;
        let GroupConfig { local, generation, .. } = config;
        let Connected { transport, messages, kind, health, partition, domain } = connected;
        let arena = domain.as_ref().map(|domain| domain.arena().clone());
        let messages = Messages::new(rank, generation, messages, health.clone(), local, trace.clone());
        let shared = partition.clone();
        let engine = Engine::new(rank, world, generation, transport, (partition, domain), health.clone());
        let queue = WorkQueue::new(rank, engine, local);
        let inner = Inner {
            rank,
            world,
            health,
            trace,
            transport: kind,
            arena,
            partition: shared,
            queue,
            messages,
            children: Mutex::new(0),
            remote_error: Mutex::default(),
            aborted: AtomicBool::new(false),
            config,
        };
        let inner = Arc::new(inner);
        if inner.config.is_programs {
            inner.config.family.enter(&inner);
        }
        Ok(Self { inner, timeout: DEFAULT_TIMEOUT, caller: None })
    }

    /// Whether `other` is a handle to this group, and not to another one of the same ranks.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// This process's rank.
    #[doc(alias = "get_rank")]
    pub fn rank(&self) -> Rank {
        self.inner.rank
    }

    /// The number of ranks.
    #[doc(alias("get_world_size", "size"))]
    pub fn world_size(&self) -> WorldSize {
        self.inner.world
    }

    /// This process's index among the ranks of its host. It is often used to choose a device, so it is the same in
    /// every group.
    #[doc(alias("get_node_local_rank", "LOCAL_RANK"))]
    pub fn local_rank(&self) -> u32 {
        self.inner.config.local.rank
    }

    /// The transport of the data: shared memory if all ranks share it, else TCP, also if the ranks of each host share memory. None in a world of
    /// one, or between threads of one process.
    pub fn transport(&self) -> Option<TransportKind> {
        self.inner.transport
    }

    /// A handle to the same group whose operations have the time-out `timeout`.
    #[doc(alias = "set_timeout")]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// The time-out of its operations.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A handle to the same group whose collectives are parts of a user's call. Errors name that call, and if ranks
    /// make different ones, they get a mismatch. If this handle is already for a call, that call stays: it is what the
    /// user wrote.
    ///
    /// For adapters. Point-to-point messages and [`monitored_barrier`](Self::monitored_barrier) are always calls of
    /// their own.
    ///
    /// ```
    /// use phalanx::{Caller, ProcessGroup, ReduceOp};
    /// /// What a user calls; its errors read "rank 0 (host): Ddp::clip_grad_norm [all_reduce(sum, 1 x f64)] #7: ...".
    /// fn clip_grad_norm(group: &ProcessGroup, mut square: f64) -> phalanx::Result<f64> {
    ///     group.in_call(Caller::DdpClipGradNorm).all_reduce(std::slice::from_mut(&mut square), ReduceOp::Sum)?;
    ///     Ok(square.sqrt())
    /// }
    /// # assert_eq!(clip_grad_norm(&ProcessGroup::alone()?, 9.0)?, 3.0);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn in_call(&self, caller: Caller) -> Self {
        Self { caller: self.caller.or(Some(caller)), ..self.clone() }
    }

    /// What this rank knows of the group's end, also when it has left.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn health(&self) -> Arc<Health> {
        self.inner.health.clone()
    }

    /// The restart of the job (torchrun: the restart count), or the round of an elastic one, to which this group belongs: rank 0's count, on all
    /// ranks.
    #[doc(alias("restart_count", "TORCHELASTIC_RESTART_COUNT"))]
    pub fn generation(&self) -> Generation {
        self.inner.config.generation
    }

    /// How many calls this rank has made on this group or its sub-groups.
    #[doc(hidden)]
    pub fn calls(&self) -> u64 {
        self.inner.config.calls.load(Ordering::Relaxed)
    }

    /// Zeroed memory that the other ranks of this host reach, so that collectives combine it in place. If ranks
    /// share no memory, it is ordinary memory; also if this process has too few addresses for more that is shared, as under `ulimit -v`.
    ///
    /// Each buffer takes whole pages of 4 KiB. Dropping it frees them. A blocking call recognises such a buffer by
    /// its slice, if it is the whole slice.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        let Some(arena) = self.inner.arena.as_ref().filter(|_| elements > 0) else {
            return Buffer::try_zeroed(dtype, elements);
        };
        match arena.alloc(elements.saturating_mul(dtype.size())) {
            Ok(region) => Ok(Buffer::registered(dtype, region)),
            // There may be memory enough. Ranks may differ in what they lend.
            Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => {
                tracing::debug!(%error, "{elements} x {dtype} are in ordinary memory");
                Buffer::try_zeroed(dtype, elements)
            }
            Err(error) => Err(Error::out_of_memory(format!("no shared memory for {elements} x {dtype}"))
                .with_source(error)
                .with_remedy(MEMORY_REMEDY)),
        }
    }

    /// The recorder of this rank's events.
    pub fn trace(&self) -> Trace {
        self.inner.trace.clone()
    }

    fn operation_timeout(&self) -> Timeout {
        Timeout::new(self.timeout)
    }

    /// Restricts the calling thread to this rank's share of its host's processors, as the group's own workers are. For
    /// adapters with workers of their own.
    pub fn keep_apart(&self) {
        affinity::keep_apart(self.inner.config.local);
    }

    /// Checks that `rank` belongs to this group.
    fn member(&self, rank: Rank) -> Result<Rank> {
        self.inner.world.rank(rank.get())
    }

    /// Checks that `rank` is another rank of this group.
    fn peer(&self, rank: Rank) -> Result<Rank> {
        if rank == self.rank() {
            let cause = format!("rank {rank} cannot send to or receive from itself");
            return Err(Error::invalid_argument(cause).with_remedy("name another rank, or copy the data"));
        }
        self.member(rank)
    }

    /// Runs `operation` on the engine in its turn, in a call of the program.
    fn run_in_turn<R>(
        &self,
        timeout: &Timeout,
        operation: impl FnOnce(&mut Engine) -> Result<R>,
    ) -> Result<R> {
        let outcome = self.inner.queue.run(timeout, operation).flatten();
        outcome.inspect_err(|_| self.inner.health.note_returned())
    }

    /// Begins an operation. An error if the group has failed.
    fn begin(&self) -> Result<()> {
        self.inner.config.calls.fetch_add(1, Ordering::Relaxed);
        let Some(cause) = self.failure() else {
            if self.inner.config.is_programs {
                worker_error::goes_on();
            }
            return Ok(());
        };
        // A call of another group may have taken the note back.
        self.inner.health.blame(&cause);
        Err(match cause.remedy() {
            Some(_) => cause,
            None => cause.with_remedy("the group has failed; start a new one"),
        })
    }
}

impl Inner {
    /// Fails the group if this thread panics. A process that was forked from the rank's is not the rank.
    fn note_panic(&self) {
        if std::thread::panicking() && self.queue.is_own() {
            // With a goodbye the peers would assume a clean end.
            self.health.fail(Error::aborted(format!("rank {} panicked", self.rank)));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.note_panic();
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup(rank {} of {})", self.rank(), self.world_size())
    }
}
