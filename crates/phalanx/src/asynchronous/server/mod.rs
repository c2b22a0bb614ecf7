//! Servers of parameters: workers push gradients and pull parameters, and need not wait for each other.
//!
//! [`shard`] is what one server has, a pure machine; `service` takes what workers ask and keeps a replica; this file is what
//! workers call.

mod floats;
mod layout;
mod service;
mod shard;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::floats::Floats;
use self::layout::Layout;
use self::service::{Ask, Hosted, Reply, Request, STATISTICS, STEP, Service};
use self::shard::Shard;
pub use self::shard::{Compensation, DelayCompensation};
use super::clock::{Clocks, Consistency};
use super::optimizer::UpdateRule;
use super::rpc::{PendingCall, Rpc};
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::hash::fnv1a;
use crate::rank::Rank;

/// Pauses between two questions to a replica that has not taken over yet.
const PAUSE: Duration = Duration::from_millis(10);

/// How a [`ParameterServer`] is made; see [`ParameterServer::builder`].
pub struct ParameterServerBuilder {
    lengths: Vec<usize>,
    servers: Option<Vec<Rank>>,
    workers: Option<Vec<Rank>>,
    consistency: Consistency,
    rule: Arc<dyn UpdateRule>,
    compensation: Compensation,
    replicated: bool,
    timeout: Option<Duration>,
}

/// Parameters on server ranks. Workers pull them, push gradients, and go on as the [`Consistency`] lets them.
///
/// The parameters are one vector of f32, divided into keys, such as tensors. Each server has neighbouring keys, and updates
/// them by its [`UpdateRule`]. A rank may be a worker, a server, or both. Every rank has a handle.
///
/// ```
/// use phalanx::asynchronous::{Consistency, ParameterServer, Sgd};
/// use phalanx::{ProcessGroup, WorldSize};
/// let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let mut parameters = vec![1.0f32; 5];
///             let server = ParameterServer::builder(&[3, 2], Sgd::new(0.1))
///                 .consistency(Consistency::Ssp(4))
///                 .start(&group, &parameters)?;
///             for _ in 0..10 {
///                 let gradients: Vec<f32> = parameters.iter().map(|p| 0.5 * p).collect();
///                 let staleness = server.step(&gradients, &mut parameters)?;
///                 assert!(staleness <= 10);
///             }
///             server.shutdown()
///         });
///     }
/// });
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// # Failures
/// A worker that dies is waited for no longer, and a gradient of a step that it has not ended does not count under
/// [`Bsp`](Consistency::Bsp). If the servers are [replicated](ParameterServerBuilder::replicated), one may die: the next
/// server has its parameters, its optimizer's state and its workers' clocks, and no update that a worker has had an answer to
/// is lost or applied twice.
pub struct ParameterServer {
    rpc: Rpc,
    layout: Layout,
    shards: Vec<Place>,
    /// The last number of this rank's operations, and where to ask for each shard: the primary (false) or its replica.
    state: Mutex<State>,
    timeout: Duration,
}

/// Where a shard is.
#[derive(Clone, Debug)]
struct Place {
    keys: Range<usize>,
    primary: Rank,
    replica: Option<Rank>,
}

#[derive(Debug)]
struct State {
    number: u64,
    failed_over: Vec<bool>,
}

/// How stale gradients were when they were applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staleness {
    /// How many pushes had each staleness, the number of updates of the parameters since the worker pulled them (the most of
    /// all keys of a push); the last place counts all that were staler.
    pub histogram: Vec<u64>,
    /// The most that any was.
    pub largest: u64,
    /// The most steps that a worker was ahead of the slowest when it pushed.
    pub lead: u64,
}

impl Default for Staleness {
    fn default() -> Self {
        Self { histogram: vec![0; 65], largest: 0, lead: 0 }
    }
}

impl Staleness {
    fn add(&mut self, staleness: u64, lead: u64) {
        let place = usize::try_from(staleness).unwrap_or(usize::MAX).min(self.histogram.len() - 1);
        self.histogram[place] += 1;
        self.largest = self.largest.max(staleness);
        self.lead = self.lead.max(lead);
    }

    /// The mean; gradients beyond the histogram count as its last place. 0 if there was none.
    pub fn mean(&self) -> f64 {
        let pushes: u64 = self.histogram.iter().sum();
        let sum: f64 = self
            .histogram
            .iter()
            .enumerate()
            .map(|(staleness, count)| staleness as f64 * *count as f64)
            .sum();
        if pushes == 0 { 0.0 } else { sum / pushes as f64 }
    }
}

/// What a server says about its shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStatistics {
    /// The rank that serves it.
    pub server: Rank,
    /// The keys in it.
    pub keys: Range<usize>,
    /// The workers and the steps that each has ended.
    pub clocks: Vec<(Rank, u64)>,
    /// Updates of all its keys.
    pub updates: u64,
    /// The staleness of the gradients that were pushed.
    pub staleness: Staleness,
    /// Does another server have a copy?
    pub is_replicated: bool,
}

impl ParameterServerBuilder {
    /// The ranks that keep parameters; all ranks if it is not set.
    #[must_use]
    pub fn servers(self, servers: &[Rank]) -> Self {
        Self { servers: Some(servers.to_vec()), ..self }
    }

    /// The ranks that push gradients from the start on; all ranks if it is not set. Others may
    /// [join](ParameterServer::join) later.
    #[must_use]
    pub fn workers(self, workers: &[Rank]) -> Self {
        Self { workers: Some(workers.to_vec()), ..self }
    }

    /// How far workers may be apart; [`Bsp`](Consistency::Bsp) if it is not set.
    #[must_use]
    pub fn consistency(self, consistency: Consistency) -> Self {
        Self { consistency, ..self }
    }

    /// What stale gradients undergo; nothing if it is not set.
    #[must_use]
    pub fn compensation(self, compensation: Compensation) -> Self {
        Self { compensation, ..self }
    }

    /// Each server keeps a copy of the one before it, and a worker gets its answer when both have its update. Needs two
    /// servers. Pushes travel twice.
    #[must_use]
    pub fn replicated(self) -> Self {
        Self { replicated: true, ..self }
    }

    /// How long an operation waits, also for slower workers; the group's time-out if it is not set.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Starts servers and workers. Every rank of `group` must call it with the same settings, in the same order as its
    /// collectives. `parameters` are rank 0's on all ranks; those of the others only have to be as many.
    ///
    /// # Errors
    /// If the settings differ, or are impossible: no servers, a rank that is not in the group, a replica without a second
    /// server. If `parameters` are not as many as the keys have elements. If the group fails.
    pub fn start(self, group: &ProcessGroup, parameters: &[f32]) -> Result<ParameterServer> {
        let Self { lengths, servers, workers, consistency, rule, compensation, replicated, timeout } = self;
        let world = group.world_size();
        let all = || world.ranks().collect::<Vec<_>>();
        let (servers, workers) = (servers.unwrap_or_else(all), workers.unwrap_or_else(all));
        let layout = Layout::new(&lengths)?;
        let group = group.in_call(Caller::RpcStart);
        let own = (
            fnv1a(format!("{lengths:?}").bytes()),
            &servers,
            &workers,
            consistency,
            compensation,
            replicated,
        );
        let own = fnv1a(postcard::to_stdvec(&own).unwrap_or_default());
        let settings = group.all_gather_object(&own)?;
        if let Some(other) = settings.iter().position(|setting| *setting != settings[0]) {
            return Err(Error::mismatch(format!(
                "rank {other} has made its ParameterServer with other settings than rank 0"
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy(
                "every rank must name the same keys, servers, workers, consistency and compensation",
            ));
        }
        check(&servers, &workers, replicated, &|rank| world.rank(rank.get()).map(drop))?;
        if parameters.len() != layout.elements() {
            return Err(Error::invalid_argument(format!(
                "the keys have {} elements, and there are {} parameters",
                layout.elements(),
                parameters.len()
            )));
        }
        let mut initial = parameters.to_vec();
        group.broadcast(&mut initial, Rank::MAIN)?;
        let shards: Vec<Place> = layout
            .shards(servers.len())
            .into_iter()
            .enumerate()
            .map(|(index, keys)| Place {
                keys,
                primary: servers[index],
                replica: replicated.then(|| servers[(index + 1) % servers.len()]),
            })
            .collect();
        let mut hosted = Vec::new();
        for (index, place) in shards.iter().enumerate() {
            let is_here = place.primary == group.rank() || place.replica == Some(group.rank());
            if is_here && !place.keys.is_empty() {
                let part = initial[layout.place(&place.keys)?].to_vec();
                let clocks = Clocks::new(consistency, workers.iter().copied());
                let shard = Shard::new(layout.part(&place.keys)?, part, rule.clone(), compensation, clocks);
                hosted.push(Hosted::new(index as u32, shard, place, group.rank()));
            }
        }
        let timeout = timeout.unwrap_or(group.timeout());
        let rpc = Service::new(hosted).functions(Rpc::builder()).timeout(timeout).start(&group)?;
        let state = State { number: 0, failed_over: vec![false; shards.len()] };
        Ok(ParameterServer { rpc, layout, shards, state: Mutex::new(state), timeout })
    }
}

fn check(
    servers: &[Rank],
    workers: &[Rank],
    replicated: bool,
    known: &dyn Fn(Rank) -> Result<()>,
) -> Result<()> {
    let is_twice =
        |ranks: &[Rank]| ranks.iter().enumerate().any(|(index, rank)| ranks[..index].contains(rank));
    servers.iter().chain(workers).try_for_each(|rank| known(*rank))?;
    let wrong = match () {
        () if servers.is_empty() => "a parameter server needs at least one rank that serves",
        () if is_twice(servers) || is_twice(workers) => {
            "a rank is named twice among the servers or the workers"
        }
        () if replicated && servers.len() < 2 => "a replica needs a second server",
        () => return Ok(()),
    };
    Err(Error::invalid_argument(wrong))
}

impl std::fmt::Debug for ParameterServerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParameterServerBuilder({} keys, {:?})", self.lengths.len(), self.consistency)
    }
}

impl ParameterServer {
    /// Of keys with these numbers of elements, updated by `rule`.
    pub fn builder(lengths: &[usize], rule: impl UpdateRule + 'static) -> ParameterServerBuilder {
        ParameterServerBuilder {
            lengths: lengths.to_vec(),
            servers: None,
            workers: None,
            consistency: Consistency::Bsp,
            rule: Arc::new(rule),
            compensation: Compensation::default(),
            replicated: false,
            timeout: None,
        }
    }

    /// A whole step: pushes the gradients of all keys, ends the step, waits until the next may begin, and pulls all
    /// parameters. One message to each server and back. Returns the staleness of the gradients, the most of all keys.
    ///
    /// # Errors
    /// If this rank is no worker, or the slices have not as many elements as the keys. If a server dies that has no replica, or
    /// the time-out passes before slower workers have come.
    pub fn step(&self, gradients: &[f32], parameters: &mut [f32]) -> Result<u64> {
        self.exchange(0..self.layout.keys(), Some(gradients), true, Some(parameters))
    }

    /// Adds the gradients of these keys to this step. Returns their staleness; under [`Bsp`](Consistency::Bsp) it is 0, and
    /// they are applied when all workers have ended the step.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn push(&self, keys: Range<usize>, gradients: &[f32]) -> Result<u64> {
        self.exchange(keys, Some(gradients), false, None)
    }

    /// Reads the parameters of these keys.
    ///
    /// # Errors
    /// As [`step`](Self::step), but any rank may pull at any time.
    pub fn pull(&self, keys: Range<usize>, parameters: &mut [f32]) -> Result<()> {
        self.exchange(keys, None, false, Some(parameters)).map(drop)
    }

    /// Ends this worker's step, and waits until it may begin the next.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn advance(&self) -> Result<()> {
        self.exchange(0..self.layout.keys(), None, true, None).map(drop)
    }

    /// This rank is a worker from now on, in the step of the slowest. Nothing changes if it is one already.
    ///
    /// # Errors
    /// If a server dies that has no replica.
    pub fn join(&self) -> Result<()> {
        self.ask_all(|| Ask::Join)
    }

    /// This rank is no worker any more: nobody waits for it. Gradients of a step that it has not ended are dropped under
    /// [`Bsp`](Consistency::Bsp).
    ///
    /// # Errors
    /// If a server dies that has no replica.
    pub fn leave(&self) -> Result<()> {
        self.ask_all(|| Ask::Leave)
    }

    /// What each server says about its shard.
    ///
    /// # Errors
    /// If a server dies that has no replica.
    pub fn statistics(&self) -> Result<Vec<ShardStatistics>> {
        let state = self.state.lock();
        let used = (0..self.shards.len()).filter(|shard| !self.shards[*shard].keys.is_empty());
        used.map(|shard| {
            let statistics: ShardStatistics =
                self.rpc.call(self.server(&state, shard), STATISTICS, &(shard as u32))?;
            let begin = self.shards[shard].keys.start;
            let keys = statistics.keys.start + begin..statistics.keys.end + begin;
            Ok(ShardStatistics { keys, ..statistics })
        })
        .collect()
    }

    /// Ends servers and workers: waits until all ranks have called it, and serves them meanwhile. Nobody waits for ranks that
    /// have died. This rank [leaves](Self::leave) first.
    ///
    /// # Errors
    /// If the time-out passes first.
    pub fn shutdown(self) -> Result<()> {
        // A server without a replica may have died: then there is nothing to leave.
        let _ = self.leave();
        self.rpc.with_timeout(self.timeout).shutdown()
    }

    fn ask_all(&self, ask: impl Fn() -> Ask<'static>) -> Result<()> {
        let mut state = self.state.lock();
        state.number += 1;
        let number = state.number;
        for shard in (0..self.shards.len()).filter(|shard| !self.shards[*shard].keys.is_empty()) {
            let request = Request { shard: shard as u32, number, ask: ask() };
            self.settle(&mut state, &request, None)?;
        }
        Ok(())
    }

    /// Asks all servers of `keys` at once; all servers, if the step ends.
    fn exchange(
        &self,
        keys: Range<usize>,
        gradients: Option<&[f32]>,
        advance: bool,
        mut parameters: Option<&mut [f32]>,
    ) -> Result<u64> {
        let place = self.layout.place(&keys)?;
        for length in
            [gradients.map(<[f32]>::len), parameters.as_deref().map(<[f32]>::len)].into_iter().flatten()
        {
            if length != place.len() {
                return Err(Error::invalid_argument(format!(
                    "keys {keys:?} have {} elements, and the slice has {length}",
                    place.len()
                )));
            }
        }
        let mut state = self.state.lock();
        state.number += 1;
        let number = state.number;
        let mut asked = Vec::new();
        for (shard, held) in self.shards.iter().enumerate() {
            let own = keys.start.max(held.keys.start)..keys.end.min(held.keys.end);
            if own.start >= own.end {
                continue;
            }
            let whole = self.layout.place(&own)?;
            let part = whole.start - place.start..whole.end - place.start;
            let local = own.start - held.keys.start..own.end - held.keys.start;
            let push =
                gradients.map(|gradients| (local.clone(), Floats(Cow::Borrowed(&gradients[part.clone()]))));
            let pull = parameters.is_some().then_some(local);
            let request = Request { shard: shard as u32, number, ask: Ask::Step { push, advance, pull } };
            let call = self.call(&state, &request).ok();
            asked.push((request, part, call));
        }
        let mut staleness = 0;
        for (request, part, call) in asked {
            let (stale, values) = self.settle(&mut state, &request, call)?;
            staleness = staleness.max(stale);
            if let Some(parameters) = parameters.as_deref_mut() {
                let into = &mut parameters[part];
                if values.len() != into.len() {
                    return Err(Error::protocol(format!(
                        "a server has sent {} parameters, and {} were asked for",
                        values.len(),
                        into.len()
                    )));
                }
                into.copy_from_slice(&values);
            }
        }
        Ok(staleness)
    }

    fn server(&self, state: &State, shard: usize) -> Rank {
        let place = &self.shards[shard];
        place.replica.filter(|_| state.failed_over[shard]).unwrap_or(place.primary)
    }

    fn call(&self, state: &State, request: &Request<'_>) -> Result<PendingCall<Reply<'static>>> {
        self.rpc.call_async(self.server(state, request.shard as usize), STEP, request)
    }

    /// The answer to `request`, from the replica if the primary dies. `call` is the first attempt.
    fn settle(
        &self,
        state: &mut State,
        request: &Request<'_>,
        mut call: Option<PendingCall<Reply<'static>>>,
    ) -> Result<(u64, Vec<f32>)> {
        let shard = request.shard as usize;
        let deadline = Deadline::after(self.timeout);
        loop {
            let outcome = match call.take() {
                Some(call) => call.wait(),
                None => self.call(state, request).and_then(PendingCall::wait),
            };
            let place = &self.shards[shard];
            let error = match outcome {
                Ok(Reply::Done { staleness, values }) => return Ok((staleness, values.0.into_owned())),
                // The replica has not seen yet that the primary is lost.
                Ok(Reply::NotServing) => Error::timeout(format!(
                    "rank {} has not taken over from rank {}, with which this rank has lost its connection",
                    self.server(state, shard),
                    place.primary
                )),
                Err(error) => {
                    let is_lost = self.rpc.failure(self.server(state, shard))?.is_some();
                    if !is_lost || state.failed_over[shard] || place.replica.is_none() {
                        return Err(error);
                    }
                    state.failed_over[shard] = true;
                    continue;
                }
            };
            if deadline.has_passed() {
                return Err(error);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl std::fmt::Debug for ParameterServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParameterServer({} keys on {} servers)", self.layout.keys(), self.shards.len())
    }
}
