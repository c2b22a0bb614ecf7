//! Calls between ranks, by the name of a function and with typed arguments.
//!
//! Each pair of ranks has a group of its own, so that a rank that dies ends the calls with it and no others. A thread for each
//! peer receives; the thread that calls or answers sends; handlers run in a pool.
//!
//! # Why there is no deadlock
//!
//! 1. *The thread that receives never waits*, for a handler, for room, or to send: a call has its place in the queue before it is
//!    sent ([`Window`](window)), and a caller waits for each answer. So what a rank sends is always received, even if
//!    both ranks of a pair send large messages at once. It waits for threads that have sent an answer and are about to end, and so for a
//!    peer that breaks this rule ([`Link::admit`](link::Link::admit)): it calls on, and does not receive the answers.
//! 2. *A call waits only for calls at its own depth, and for calls inside these.* A handler that calls is one deeper than the
//!    call that it serves, on whatever rank. Each depth has places of its own in the windows. At the last depth nothing may
//!    call, so calls there end; so do those around them, depth by depth. A -> B -> A -> B is no exception.
//! 3. *Handlers that wait for calls, or that send, leave their thread's place to others* ([`Pool`](pool)), so a call that has been
//!    admitted always finds a thread when those that run end. Deeper calls have a thread first, so that few wait at a time. There are
//!    never more threads than twice the places in the windows: for calls, and for answers on their way. A rank that receives slowly delays nobody else.
//!
//! A program can still cause a deadlock: with a handler that holds a lock during a call, that waits for a call that no rank has
//! made yet, or that calls from another thread, which counts as depth 0.
//!
//! The tests run this with one thread and two places.
//!
//! # Why a group for each pair
//!
//! A group fails as a whole, and asynchronous work is there to continue when one rank is gone. A group that loses its
//! members one by one would need degrees of failure in its health, its waits and its messages; a group of two has none.
//! The price is four threads and three descriptors for each peer.

mod call;
mod link;
mod objects;
mod payload;
mod pool;
mod registry;
mod remote;
mod serve;
mod spare;
mod window;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_sys::freed::keep_freed_memory;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::call::PendingCall;
use self::link::{Link, shut_down};
use self::objects::Objects;
pub use self::payload::Bytes;
use self::payload::Written;
use self::pool::Pool;
pub use self::registry::Answer;
pub(super) use self::registry::caught;
use self::registry::{Registry, deferred, method, object, plain};
pub use self::remote::{RemoteRef, Ticket};
use self::spare::Spare;
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::host;
use crate::random;
use crate::rank::Rank;
use crate::wire::rpc::{Head, Kind, ObjectId};
use crate::world_size::WorldSize;

/// How long a call waits for its answer by default, as in PyTorch.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long this rank waits at its end for its peers to notice it.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(5);

/// What a rank accepts from each other rank, at each depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Limits {
    calls: u32,
    bytes: u64,
}

/// Calls `wait` inside a handler, to wait for something that other handlers do. Meanwhile another handler may run in its place.
pub(super) fn waiting<R>(wait: impl FnOnce() -> R) -> R {
    Pool::waiting(wait)
}

/// Runs `job`, which makes no calls, in a thread of the handlers, as soon as one has a place.
pub(super) fn aside(context: &Context, job: impl FnOnce() + Send + 'static) {
    context.rpc.shared.pool.push(crate::wire::rpc::DEPTHS as u8 - 1, job);
}

type Lost = Box<dyn Fn(&Context, &Error) + Send + Sync>;

/// The functions of a rank, and its limits; see [`Rpc::builder`].
pub struct RpcBuilder {
    functions: Result<Registry>,
    lost: Vec<Lost>,
    threads: usize,
    limits: Limits,
    timeout: Duration,
    /// If there are some, the others are connected with these ranks, and not with each other.
    hubs: Option<Vec<Rank>>,
}

/// Calls between the ranks of a group, by the name of a function and with typed arguments.
///
/// Every rank says which functions others may call on it, and starts; then any rank calls any other, or itself.
/// Arguments and results are of any type that serde can write. Send long data as [`Bytes`], or in collectives.
///
/// ```
/// use phalanx::asynchronous::Rpc;
/// use phalanx::{ProcessGroup, Rank, WorldSize};
/// let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let rpc = Rpc::builder().handler("add", |_, (a, b): (i64, i64)| Ok(a + b)).start(&group)?;
///             let peer = Rank::new(1 - group.rank().get());
///             let sum: i64 = rpc.call(peer, "add", &(2i64, 3i64))?;
///             assert_eq!(sum, 5);
///             rpc.shutdown() // serves the other's calls until all are done
///         });
///     }
/// });
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Calls have connections of their own, as secret and authenticated as the group's, and do not meet its collectives or
/// messages. Each pair of ranks costs both of them four threads and three open files. Each rank keeps up to 64 MiB of the memory of
/// earlier arguments and results, for the next ones. A rank that dies ends the calls
/// with it at once, with an error that names it; all other ranks can continue calling each other.
///
/// Clones are handles to the same calls. When the last is dropped, calls that have not been answered end with an error
/// on both sides: end with [`shutdown`](Self::shutdown).
#[doc(alias("rpc_sync", "rpc_async", "init_rpc"))]
#[derive(Clone)]
pub struct Rpc {
    shared: Arc<Shared>,
    timeout: Duration,
    /// Ends the calls when the program's last handle is dropped. Handlers' handles have none.
    _guard: Option<Arc<Guard>>,
}

/// What a handler knows about the call that it serves.
#[derive(Debug)]
pub struct Context {
    rpc: Rpc,
    caller: Rank,
}

/// What callers, handlers and receiving threads of a rank share.
struct Shared {
    rank: Rank,
    world: WorldSize,
    /// A random number of rank 0's, which tells this start of calls from others.
    number: u64,
    functions: Registry,
    lost: Vec<Lost>,
    timeout: Duration,
    /// By rank.
    links: Vec<Link>,
    pool: Arc<Pool>,
    objects: Objects,
    /// The memory of earlier payloads.
    spare: Arc<Spare>,
    last_object: AtomicU64,
    receivers: Mutex<Vec<JoinHandle<()>>>,
    closed: AtomicBool,
}

struct Guard {
    shared: Arc<Shared>,
    /// The process that makes the calls, and not one that was forked from that.
    process: u32,
}

impl RpcBuilder {
    fn add(mut self, name: &str, function: registry::Function) -> Self {
        self.functions =
            self.functions.and_then(|mut registry| registry.add(name, function).map(|()| registry));
        self
    }

    /// Other ranks can call `function` as `name`. Its errors and panics are carried back to the caller.
    #[must_use]
    pub fn handler<A: DeserializeOwned, R: Serialize>(
        self,
        name: &str,
        function: impl Fn(&Context, A) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        self.add(name, plain(name, function))
    }

    /// As [`handler`](Self::handler), for a function that may answer later, from another thread or another handler. A
    /// call that waits for its answer needs no thread.
    #[doc(alias = "async_execution")]
    #[must_use]
    pub fn deferred<A: DeserializeOwned, R: Serialize>(
        self,
        name: &str,
        function: impl Fn(&Context, A, Answer<R>) + Send + Sync + 'static,
    ) -> Self {
        self.add(name, deferred(name, function))
    }

    /// [`Rpc::remote`] can call `function` as `name`. This rank keeps its result for the caller.
    #[must_use]
    pub fn object<A: DeserializeOwned, T: Send + Sync + 'static>(
        self,
        name: &str,
        function: impl Fn(&Context, A) -> Result<T> + Send + Sync + 'static,
    ) -> Self {
        self.add(name, object(name, function))
    }

    /// [`RemoteRef::call`] can call `function` as `name` on an object that this rank keeps. Calls on one object may run at
    /// the same time.
    #[must_use]
    pub fn method<T: Send + Sync + 'static, A: DeserializeOwned, R: Serialize>(
        self,
        name: &str,
        function: impl Fn(&Context, &T, A) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        self.add(name, method(name, function))
    }

    /// Calls `function` once for each other rank that dies or shuts down its calls while this one does not, with the reason.
    /// [`Context::caller`] is that rank. It does not wait for a handler's thread, so it may wake handlers that wait for that rank. A
    /// handler of a call that the rank has made before may run after it: one that notes the rank should look at [`Rpc::failure`].
    #[must_use]
    pub fn on_lost(mut self, function: impl Fn(&Context, &Error) + Send + Sync + 'static) -> Self {
        self.lost.push(Box::new(function));
        self
    }

    /// The number of handlers that run at once; 16 if it is not set, as in PyTorch. Those that wait for calls of their own are not
    /// counted, nor are those whose answer is being sent, nor functions of [`on_lost`](Self::on_lost). Threads are started when they
    /// are needed.
    #[doc(alias = "num_worker_threads")]
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// How many calls of each other rank this rank accepts at once, at each of four depths of nesting; 64 if it is not set.
    /// Further calls wait in the caller.
    #[must_use]
    pub fn calls_in_flight(self, calls: u32) -> Self {
        Self { limits: Limits { calls: calls.max(1), ..self.limits }, ..self }
    }

    /// How many bytes of arguments of each other rank this rank accepts at once, at each of four depths of nesting; 256 MiB if it
    /// is not set. Further calls wait in the caller. A single call may be longer.
    #[must_use]
    pub fn bytes_in_flight(self, bytes: u64) -> Self {
        Self { limits: Limits { bytes, ..self.limits }, ..self }
    }

    /// How long calls wait for their answers; 60 s if it is not set, and [`Duration::MAX`] without an end, which is 0 in PyTorch. See
    /// [`Rpc::with_timeout`].
    #[doc(alias = "rpc_timeout")]
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Connects all ranks with these alone, which every rank must name: calls between two others fail.
    #[must_use]
    pub(crate) fn around(self, hubs: &[Rank]) -> Self {
        Self { hubs: Some(hubs.to_vec()), ..self }
    }

    /// Connects this rank with all others of `group`. Every rank must call it, in the same order as its collectives. The
    /// functions of the ranks may differ.
    ///
    /// # Errors
    /// If two functions have the same name, or one has none or a name of more than 128 bytes. If the ranks cannot be
    /// connected, which ends `group` on every rank, or `group` fails.
    pub fn start(self, group: &ProcessGroup) -> Result<Rpc> {
        let Self { functions, lost, threads, limits, timeout, hubs } = self;
        let own = functions.and_then(|registry| Ok((registry.with_builtins()?, random::number()?)));
        let (rank, world) = (group.rank(), group.world_size());
        // A rank that cannot start tells the others, which would wait for it.
        let said = own.as_ref().ok().map(|(_, number)| (limits, *number));
        let theirs = group.in_call(Caller::RpcStart).all_gather_object(&said)?;
        let (functions, _) = own?;
        if let Some(other) = theirs.iter().position(Option::is_none) {
            return Err(Error::invalid_argument(format!("rank {other} could not start its remote calls"))
                .with_peer(Rank::new(other as u32))
                .with_remedy("see its own error"));
        }
        let (theirs, numbers): (Vec<Limits>, Vec<u64>) = theirs.into_iter().flatten().unzip();
        let number = numbers.first().copied().unwrap_or_default();
        let mut links = Vec::new();
        for (peer, theirs) in world.ranks().zip(theirs) {
            links.push(Link::new(peer, limits, theirs));
        }
        let is_hub = |rank| hubs.as_ref().is_none_or(|hubs| hubs.contains(&rank));
        let is_hub: Vec<bool> = world.ranks().map(is_hub).collect();
        let is_pair = |one: Rank, other: Rank| is_hub[one.index()] || is_hub[other.index()];
        for apart in links.iter().filter(|link| link.peer != rank && !is_pair(rank, link.peer)) {
            let cause = format!("rank {rank} and rank {} are not connected for remote calls", apart.peer);
            apart.fail(Error::invalid_argument(cause));
        }
        let above = |low: Rank| world.ranks().skip(low.index() + 1).map(move |high| [low, high]);
        let pairs = world.ranks().flat_map(above).filter(|[low, high]| is_pair(*low, *high));
        group.pairs_aside(pairs, Caller::RpcStart, |peer, pair| {
            // The other ranks wait for this one in pairs that come later, and would hear of nothing.
            let could_not = || format!("connect its remote calls with rank {peer}");
            let pair = pair.map_err(|error| group.fail_half_way(&could_not(), &error))?;
            links[peer.index()].join(pair);
            Ok(())
        })?;
        // Each call takes memory for what is written and read of it, and frees it.
        keep_freed_memory();
        let pool = Pool::new(threads, format!("phalanx-rpc-{rank}"))?;
        let shared = Arc::new(Shared {
            rank,
            world,
            number,
            functions,
            lost,
            timeout,
            links,
            pool,
            objects: Objects::default(),
            spare: Arc::default(),
            last_object: AtomicU64::new(0),
            receivers: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        let guard = Guard { shared: shared.clone(), process: std::process::id() };
        let rpc = Rpc { _guard: Some(Arc::new(guard)), shared, timeout };
        for peer in world.ranks().filter(|peer| *peer != rank) {
            rpc.shared.receive_from(peer)?;
        }
        Ok(rpc)
    }
}

impl std::fmt::Debug for RpcBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RpcBuilder({:?}, {} threads)", self.limits, self.threads)
    }
}

impl Rpc {
    /// What to start with: no functions, and limits as documented at each setting.
    pub fn builder() -> RpcBuilder {
        RpcBuilder {
            functions: Ok(Registry::default()),
            lost: Vec::new(),
            threads: 16,
            limits: Limits { calls: 64, bytes: 256 << 20 },
            timeout: TIMEOUT,
            hubs: None,
        }
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> WorldSize {
        self.shared.world
    }

    /// A handle whose calls wait for their answers as long as `timeout`. A message that is being sent is completed: a call
    /// with many bytes may return later than that, when it has been sent, or when the group's time-out has passed.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// Calls the function `name` on the rank `to`, and waits for its result.
    ///
    /// # Errors
    /// The function's own error, or its panic, with the rank and the name. If that rank has no such function, or arguments
    /// or result have other types there. If the answer does not come in time, or that rank dies or shuts down its calls. If
    /// calls are nested more than four deep. Arguments and result may take 256 MiB each.
    #[doc(alias = "rpc_sync")]
    pub fn call<A: Serialize + ?Sized, R: DeserializeOwned>(
        &self,
        to: Rank,
        name: &str,
        args: &A,
    ) -> Result<R> {
        self.call_async(to, name, args)?.wait()
    }

    /// Calls the function `name` on the rank `to`. Returns when the call has been sent; [`PendingCall::wait`] returns the
    /// result.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    #[doc(alias = "rpc_async")]
    pub fn call_async<A: Serialize + ?Sized, R: DeserializeOwned>(
        &self,
        to: Rank,
        name: &str,
        args: &A,
    ) -> Result<PendingCall<R>> {
        self.request(to, Kind::Call, name, ObjectId::NONE, args)
    }

    /// Breaks the connection with `peer`, as a network would, while both ranks are alive.
    #[cfg(test)]
    pub(super) fn sever(&self, peer: Rank) {
        if let Some(group) = self.shared.link(peer).ok().and_then(Link::group) {
            group.abort(Error::aborted("the connection is cut"));
        }
    }

    /// Keeps the connection with `peer` busy until the result is dropped, as a long message would.
    #[cfg(test)]
    pub(super) fn occupy(&self, peer: Rank) -> Result<parking_lot::MutexGuard<'_, ()>> {
        self.shared.link(peer).map(Link::turn)
    }

    /// What a handler gets of a call of `caller`, as if one had come; nobody reads its answer.
    #[cfg(test)]
    pub(super) fn called_by<R>(&self, caller: Rank) -> (Context, Answer<R>) {
        let pledge =
            registry::Pledge::new(&self.shared, caller, Head::plain(Kind::Call), "a test".to_owned());
        (self.shared.context(caller), Answer::new(pledge))
    }

    /// The failure of the connection with `peer`; none as long as it can be called.
    ///
    /// # Errors
    /// If `peer` is not a rank of the group.
    pub fn failure(&self, peer: Rank) -> Result<Option<Error>> {
        Ok(self.shared.link(peer)?.failure())
    }

    /// Ends the calls of all ranks: waits until this rank's calls are answered and the others make no more, and serves them
    /// meanwhile. Every rank must call it; a rank that only serves calls nothing else. It waits for the others as long as they
    /// call, but not for ranks that have died or [dropped](Rpc) their calls. The time-out of this handle applies to missing
    /// answers only.
    ///
    /// # Errors
    /// If calls of this rank, or of others to it, have no answer when that time-out has passed. The calls are ended in any case.
    pub fn shutdown(self) -> Result<()> {
        self.shared.finish(self.timeout).map_err(|error| self.shared.located(error, "Rpc::shutdown"))
    }

    /// The number of objects that this rank keeps for others; see [`RemoteRef`].
    pub fn objects(&self) -> usize {
        self.shared.objects.count()
    }

    fn request<A: Serialize + ?Sized, R>(
        &self,
        to: Rank,
        kind: Kind,
        name: &str,
        object: ObjectId,
        args: &A,
    ) -> Result<PendingCall<R>> {
        let deadline = Deadline::after(self.timeout);
        let described = || format!("rpc {name:?} on rank {to}");
        let work = self.shared.start_call(to, kind, name, object, args, deadline);
        let work = work.map_err(|error| self.shared.located(error, described()))?;
        Ok(PendingCall::new(self.shared.clone(), work, to, name, self.timeout, deadline))
    }
}

impl std::fmt::Debug for Rpc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rpc(rank {} of {})", self.rank(), self.world_size())
    }
}

impl Context {
    /// The rank that has called.
    pub fn caller(&self) -> Rank {
        self.caller
    }

    /// For calls from inside the handler, also to the rank that has called.
    pub fn rpc(&self) -> &Rpc {
        &self.rpc
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.shared.close();
        }
    }
}

impl Shared {
    fn link(&self, peer: Rank) -> Result<&Link> {
        self.world.rank(peer.get()).and_then(|peer| {
            self.links
                .get(peer.index())
                .ok_or_else(|| Error::invalid_argument(format!("rank {peer} has no calls")))
        })
    }

    /// `error` as this rank's, in `operation`.
    fn located(&self, error: Error, operation: impl Into<String>) -> Error {
        let error = if error.operation().is_none() { error.in_operation(operation, None) } else { error };
        if error.rank().is_none() { error.at(self.rank, host::name()) } else { error }
    }

    /// `error` of the handler `name`, which `caller` has called on this rank.
    fn named(&self, error: Error, name: &str, caller: Rank) -> Error {
        self.located(error, format!("rpc {name:?} called by rank {caller}"))
    }

    /// The program's handle has no guard: handlers do not keep the calls alive.
    fn handle(self: &Arc<Self>) -> Rpc {
        Rpc { shared: self.clone(), timeout: self.timeout, _guard: None }
    }

    fn context(self: &Arc<Self>, caller: Rank) -> Context {
        Context { rpc: self.handle(), caller }
    }

    /// Sends a request; the work ends with its answer.
    fn start_call<A: Serialize + ?Sized>(
        self: &Arc<Self>,
        to: Rank,
        kind: Kind,
        name: &str,
        object: ObjectId,
        args: &A,
        deadline: Deadline,
    ) -> Result<crate::group::Work> {
        use crate::wire::rpc::{DEPTHS, MAX_NAME, MAX_PAYLOAD};
        let link = self.link(to)?;
        let depth = Pool::depth_of_calls();
        if usize::from(depth) >= DEPTHS {
            return Err(Error::invalid_argument(format!("calls are nested more than {DEPTHS} deep"))
                .with_remedy("let handlers return instead of calling back again and again"));
        }
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Error::invalid_argument(format!("the name of a function has 1 to {MAX_NAME} bytes"))
                .with_remedy("call it by the name under which it was registered"));
        }
        let payload = Written::behind(name.as_bytes().to_vec(), args, "the arguments")?;
        if payload.len() > MAX_PAYLOAD {
            let cause = format!("the arguments take {} bytes; a call may take {MAX_PAYLOAD}", payload.len());
            return Err(
                Error::invalid_argument(cause).with_remedy("send them in several calls, or by collectives")
            );
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(shut_down());
        }
        let bytes = payload.len() as u64;
        let (call, work) = Pool::waiting(|| link.enter(depth, bytes, deadline))?;
        let head = Head { kind, depth, name: name.len() as u16, call, object, length: bytes };
        let sent = match to == self.rank {
            true => self.copy(&payload).and_then(|payload| self.accept(to, head, payload)),
            false => Pool::waiting(|| link.send(&head, &payload, deadline)),
        };
        match sent {
            Ok(()) => Ok(work),
            Err(error) => {
                link.withdraw(call);
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests;
