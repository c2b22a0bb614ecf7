//! Servers of parameters: workers push gradients and pull parameters, and need not wait for each other.
//!
//! [`shard`] is what one server has, a pure machine; `service` takes what workers ask and keeps a replica; `builder` starts
//! it all; this file is what workers call.

mod builder;
mod floats;
mod layout;
mod service;
mod shard;

use std::ops::Range;
use std::time::Duration;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::builder::ParameterServerBuilder;
use self::floats::Floats;
use self::layout::Layout;
use self::service::{Ask, Done, Reply, Request, STATISTICS, STEP};
pub use self::shard::{Compensation, DelayCompensation};
use super::optimizer::UpdateRule;
use super::rpc::{PendingCall, Rpc};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;

/// Pauses between two questions to a replica that has not taken over yet.
const RETRY_DELAY: Duration = Duration::from_millis(10);
/// How long a server may take to say for which workers it waits.
const EXPLANATION_TIMEOUT: Duration = Duration::from_secs(10);
/// The most workers that an error names.
const NAMED: usize = 8;

/// Parameters on server ranks. Workers pull them, push gradients, and continue as the [`Consistency`](super::Consistency) lets them.
///
/// The parameters are one vector of f32, divided into keys, such as tensors. Each server has neighbouring keys, and updates
/// them by its [`UpdateRule`]. A rank may be a worker, a server, or both. Every rank has a handle. It has connections with the servers,
/// each of which costs what one of an [`Rpc`](super::Rpc) does, and a server has them with all ranks.
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
///                 .start(&group, &mut parameters)?;
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
/// A worker that dies is waited for no longer. Under [`Bsp`](super::Consistency::Bsp) its gradients of a step that it has ended on a
/// server count there, those of a step that it has not ended do not, and those of the others always count. If the servers are
/// [replicated](ParameterServerBuilder::replicated), one may die: the next server has its parameters, its optimizer's state and its
/// workers' clocks, and no update that a worker has had an answer to is lost or applied twice. A server that has lost its replica
/// continues alone and says so with each answer: if it dies too, its workers get an error instead of older parameters. So they do
/// when an update rule panics.
///
/// If a [`step`](Self::step), [`push`](Self::push) or [`advance`](Self::advance) fails after it was sent, some servers may have
/// carried it out, and others not. If it were repeated, its gradients would count twice there. So this rank's next calls are refused,
/// with the cause, until it has [left](Self::leave). Then it may [`join`](Self::join) again, which begins the same step on all servers with
/// their parameters: the failed step counts where it was carried out. To leave it out, start new servers with the parameters of a checkpoint.
///
/// **Parameters are all that a program can save.** The moments, velocities and numbers of updates of a rule are on the servers alone, and begin anew where
/// a program [starts](ParameterServerBuilder::start) servers again.
pub struct ParameterServer {
    rpc: Rpc,
    layout: Layout,
    shards: Vec<Place>,
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
    /// The last number of this rank's operations.
    number: u64,
    /// The server of each shard.
    servers: Vec<Rank>,
    /// The replica, for when that one is lost. None if it has replaced the server already, or lacks operations that this rank has
    /// answers to.
    replicas: Vec<Option<Rank>>,
    /// Why a step of this rank has failed that some servers may have carried out, and others not.
    torn: Option<Error>,
}

impl State {
    /// An error if a step of this rank may be on some servers only.
    fn whole(&self) -> Result<()> {
        let Some(cause) = &self.torn else { return Ok(()) };
        let text = format!(
            "a step of this rank has failed, and some servers may have carried it out, and others not: {}",
            cause.clone().without_remedy()
        );
        Err(Error::aborted(text).with_remedy(
            "begin again from a checkpoint, or call ParameterServer::leave and then ParameterServer::join: the failed step then counts \
             where it was carried out",
        ))
    }
}

/// How stale gradients were when they were applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staleness {
    /// How many pushes had each staleness, the number of updates of the parameters since the worker pulled them (the most of
    /// all keys of a push); the last place counts all that were staler.
    pub histogram: Vec<u64>,
    /// The largest staleness.
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

    /// The mean staleness, in updates. Gradients beyond the histogram count as its last place. 0 if there was no gradient.
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
    /// Whether another server has a copy.
    pub is_replicated: bool,
}

impl ParameterServer {
    /// Of keys with these numbers of elements, updated by `rule`.
    pub fn builder(lengths: &[usize], rule: impl UpdateRule + 'static) -> ParameterServerBuilder {
        ParameterServerBuilder::new(lengths, rule)
    }

    /// A whole step: pushes the gradients of all keys, ends the step, waits until the next may begin, and pulls all
    /// parameters. One message to each server and back. Returns the staleness of the gradients, the most of all keys.
    ///
    /// # Errors
    /// If this rank is no worker, or the slices have not as many elements as the keys. If a server dies that has no replica, or
    /// the time-out passes before slower workers have come, which the error names. If an earlier step of this rank has [failed](ParameterServer#failures).
    pub fn step(&self, gradients: &[f32], parameters: &mut [f32]) -> Result<u64> {
        self.exchange(0..self.layout.keys(), Some(gradients), true, Some(parameters))
    }

    /// Adds the gradients of these keys to this step. Returns their staleness; under [`Bsp`](super::Consistency::Bsp) it is 0, and
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

    /// Makes this rank a worker, in the step of the slowest; the same on all servers. Waits until workers that are in
    /// the step before have ended it, and reads all parameters. If it is one already, it only reads.
    ///
    /// # Errors
    /// As [`step`](Self::step); then it is no worker.
    pub fn join(&self, parameters: &mut [f32]) -> Result<()> {
        self.fits(&(0..self.layout.keys()), parameters.len())?;
        let mut state = self.state.lock();
        state.whole()?;
        let entered = self.enter(&mut state, parameters);
        if entered.is_err() {
            // No worker may wait for one that only some servers know.
            let _ = self.ask_all(&mut state, |_| Ask::Leave);
        }
        entered
    }

    fn enter(&self, state: &mut State, parameters: &mut [f32]) -> Result<()> {
        // Workers are a step further on some servers than on others. From here on each server's slowest clock stands still.
        let clocks = self.ask_all(state, |_| Ask::Join)?;
        let clock = clocks.iter().map(|done| done.clock).max().unwrap_or(0);
        let entered = self.ask_all(state, |place| Ask::Enter { clock, keys: 0..place.keys.len() })?;
        for (shard, done) in self.used().zip(entered) {
            take(&done, &mut parameters[self.layout.place(&self.shards[shard].keys)?])?;
        }
        Ok(())
    }

    /// Ends this rank's part as a worker: the others no longer wait for it. Under [`Bsp`](super::Consistency::Bsp) gradients of a step
    /// that it has not ended are dropped, and those of a step that it has ended count when the others have ended it too. All servers
    /// are told, also if one fails.
    ///
    /// # Errors
    /// If a server dies that has no replica.
    pub fn leave(&self) -> Result<()> {
        let mut state = self.state.lock();
        self.ask_all(&mut state, |_| Ask::Leave)?;
        // No server waits for the rest of a failed step, or takes it.
        state.torn = None;
        Ok(())
    }

    /// What each server says about its shard, or the replica of one that was lost.
    ///
    /// # Errors
    /// If a server dies that has no replica.
    pub fn statistics(&self) -> Result<Vec<ShardStatistics>> {
        let mut state = self.state.lock();
        self.used()
            .map(|shard| {
                let statistics: ShardStatistics = self.settle(&mut state, shard, None, |server| {
                    self.rpc.call_async(server, STATISTICS, &(shard as u32))
                })?;
                let begin = self.shards[shard].keys.start;
                let keys = statistics.keys.start + begin..statistics.keys.end + begin;
                Ok(ShardStatistics { keys, ..statistics })
            })
            .collect()
    }

    /// Ends servers and workers. A server waits until all ranks have called it, however long others train, and serves them meanwhile; a
    /// rank that does not serve waits for the servers. A rank that only serves calls nothing else. Ranks that have died are not waited
    /// for. This rank [leaves](Self::leave) first.
    ///
    /// # Errors
    /// If operations have no answer when the time-out has passed.
    pub fn shutdown(self) -> Result<()> {
        // A server without a replica may have died: then there is nothing to leave.
        let _ = self.leave();
        self.rpc.with_timeout(self.timeout).shutdown()
    }

    /// The shards that have keys.
    fn used(&self) -> impl Iterator<Item = usize> {
        (0..self.shards.len()).filter(|shard| !self.shards[*shard].keys.is_empty())
    }

    /// Asks all servers, one after the other, also after an error. Returns the answers or the first error.
    fn ask_all(&self, state: &mut State, ask: impl Fn(&Place) -> Ask<'static>) -> Result<Vec<Done>> {
        state.number += 1;
        let number = state.number;
        let answers: Vec<Result<Done>> = self
            .used()
            .map(|shard| {
                let request = Request { shard: shard as u32, number, ask: ask(&self.shards[shard]) };
                self.done(state, &request, None)
            })
            .collect();
        answers.into_iter().collect()
    }

    /// Checks that these keys have `length` elements.
    fn fits(&self, keys: &Range<usize>, length: usize) -> Result<()> {
        let elements = self.layout.place(keys)?.len();
        match length == elements {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "keys {keys:?} have {elements} elements, and the slice has {length}"
            ))
            .with_remedy("give a slice of as many elements as these keys have together")),
        }
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
            self.fits(&keys, length)?;
        }
        let mut state = self.state.lock();
        state.whole()?;
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
            let push = gradients.map(|gradients| (local.clone(), Floats::Lent(&gradients[part.clone()])));
            let pull = parameters.is_some().then_some(local);
            let request = Request { shard: shard as u32, number, ask: Ask::Step { push, advance, pull } };
            let call = self.rpc.call_async(state.servers[shard], STEP, &request).ok();
            asked.push((request, part, call));
        }
        let changes = gradients.is_some() || advance;
        let (mut staleness, mut is_done, mut refused) = (0, false, None);
        for (request, part, call) in asked {
            let done = self.done(&mut state, &request, call).and_then(|done| {
                let target = parameters.as_deref_mut().map(|parameters| &mut parameters[part]);
                target.map_or(Ok(()), |target| take(&done, target)).map(|()| done)
            });
            match done {
                Ok(done) => (staleness, is_done) = (staleness.max(done.staleness), true),
                // A shard checks all that it is asked before it changes anything. What have the others done?
                Err(error) if error.is_invalid_argument() => {
                    refused.get_or_insert(error);
                }
                Err(error) => {
                    state.torn = changes.then(|| error.clone());
                    return Err(error);
                }
            }
        }
        let Some(error) = refused else { return Ok(staleness) };
        if changes && is_done {
            state.torn = Some(error.clone());
        }
        Err(error)
    }

    /// The outcome of `request`. `call` is the first attempt.
    fn done(
        &self,
        state: &mut State,
        request: &Request<'_>,
        call: Option<PendingCall<Reply<Done>>>,
    ) -> Result<Done> {
        let shard = request.shard as usize;
        let done: Done = self
            .settle(state, shard, call, |server| self.rpc.call_async(server, STEP, request))
            .map_err(|error| self.explained(error, state.servers[shard], request))?;
        if !done.is_replicated {
            state.replicas[shard] = None;
        }
        Ok(done)
    }

    /// `error`, or if `server` has not answered `request` in time because it waits for slower workers: which ones.
    fn explained(&self, error: Error, server: Rank, request: &Request<'_>) -> Error {
        let waits = match request.ask {
            Ask::Enter { .. } => true,
            Ask::Step { advance, .. } => advance,
            Ask::Join | Ask::Leave => false,
        };
        // A server may itself have waited too long, for its replica.
        let is_of_this_wait = error.rank() == Some(self.rpc.rank()) && error.peer() == Some(server);
        if !waits || !error.is_timeout() || !is_of_this_wait {
            return error;
        }
        let rpc = self.rpc.with_timeout(EXPLANATION_TIMEOUT);
        let Ok(Reply::Done(shard)) =
            rpc.call::<_, Reply<ShardStatistics>>(server, STATISTICS, &request.shard)
        else {
            return error;
        };
        let clock_of = |rank: Rank| shard.clocks.iter().find(|(worker, _)| *worker == rank);
        let slowest = shard.clocks.iter().map(|(_, clock)| *clock).min();
        let (Some((_, own)), Some(slowest)) = (clock_of(rpc.rank()), slowest) else { return error };
        let behind: Vec<Rank> =
            shard.clocks.iter().filter(|(_, clock)| *clock == slowest).map(|(worker, _)| *worker).collect();
        let Some(first) = behind.first().filter(|_| slowest < *own) else { return error };
        let named: Vec<String> = behind.iter().take(NAMED).map(Rank::to_string).collect();
        let more = if behind.len() > NAMED { ", .." } else { "" };
        let word = if behind.len() == 1 { "rank" } else { "ranks" };
        Error::timeout(format!(
            "{word} {}{more} did not end a step within {:.1} s: {slowest} steps were ended there, and {own} on this rank, which waits for them",
            named.join(", "),
            self.timeout.as_secs_f64()
        ))
        .with_peer(*first)
        .with_remedy(
            "does every worker call step or advance equally often? One that ends calls ParameterServer::leave; \
             ParameterServerBuilder::timeout gives slow ones more time",
        )
    }

    /// The answer of the server of `shard` that `ask` asks, or of its replica if it is lost. `call` is the first attempt.
    fn settle<T: DeserializeOwned>(
        &self,
        state: &mut State,
        shard: usize,
        mut call: Option<PendingCall<Reply<T>>>,
        ask: impl Fn(Rank) -> Result<PendingCall<Reply<T>>>,
    ) -> Result<T> {
        let deadline = Deadline::after(self.timeout);
        loop {
            let server = state.servers[shard];
            let outcome = match call.take() {
                Some(call) => call.wait(),
                None => ask(server).and_then(PendingCall::wait),
            };
            let error = match outcome {
                Ok(Reply::Done(done)) => return Ok(done),
                // The replica has not seen yet that the primary is lost.
                Ok(Reply::NotServing) => Error::timeout(format!(
                    "rank {server} has not taken over from rank {}, with which this rank has lost its connection",
                    self.shards[shard].primary
                )),
                Err(error) => {
                    if self.rpc.failure(server)?.is_none() {
                        return Err(error);
                    }
                    let Some(replica) = state.replicas[shard].take() else { return Err(error) };
                    state.servers[shard] = replica;
                    continue;
                }
            };
            if deadline.has_passed() {
                return Err(error);
            }
            std::thread::sleep(RETRY_DELAY);
        }
    }
}

/// Copies the parameters that a server has sent.
fn take(done: &Done, into: &mut [f32]) -> Result<()> {
    let (values, rest) = done.values.as_chunks::<4>();
    if values.len() != into.len() || !rest.is_empty() {
        return Err(Error::protocol(format!(
            "a server has sent {} bytes of parameters, which are not {} parameters of 4 bytes",
            done.values.len(),
            into.len()
        )));
    }
    into.iter_mut().zip(values).for_each(|(into, value)| *into = f32::from_le_bytes(*value));
    Ok(())
}

impl std::fmt::Debug for ParameterServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParameterServer({} keys on {} servers)", self.layout.keys(), self.shards.len())
    }
}

#[cfg(test)]
mod tests;
