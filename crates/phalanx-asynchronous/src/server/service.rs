//! The server's side: takes what workers ask, in one order for each shard, and keeps the replica.
//!
//! A shard's lock gives the order of its operations: an operation is applied and sent to the replica under the lock, and answered
//! when the replica has it. The replica applies operations by their numbers. So it has a prefix of the primary's operations, with
//! all that were answered. If the replica may lack one, the shard fails, or the answer says that there is no replica.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::floats::Floats;
use super::shard::{Op, Shard};
use super::{Place, ShardStatistics};
use crate::buffer::copy_of;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::rpc::{Answer, Bytes, Context, PendingCall, RpcBuilder, aside, caught, waiting};

pub(super) const STEP: &str = "step";
pub(super) const STATISTICS: &str = "statistics";
const REPLICATE: &str = "replicate";

/// What a worker asks of a shard.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request<'a> {
    pub shard: u32,
    /// The worker's number of the operation: it may come again, to another server.
    pub number: u64,
    pub ask: Ask<'a>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask<'a> {
    /// To become a worker. No worker begins its next step before this one has entered.
    Join,
    /// To begin after `clock` steps, the most that any server has answered to `Join`, with the parameters of `keys`.
    Enter {
        clock: u64,
        keys: Range<usize>,
    },
    Leave,
    Step {
        push: Option<(Range<usize>, Floats<'a>)>,
        advance: bool,
        pull: Option<Range<usize>>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply<T> {
    Done(T),
    /// This rank is a replica whose primary is alive, as far as it knows.
    NotServing,
}

/// The answer to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    pub staleness: u64,
    /// The steps that the worker has ended.
    pub clock: u64,
    /// The parameters, as [`Floats`] travel.
    pub values: Bytes,
    /// Whether the replica has all that this answers. If not, it must not be asked after this server.
    pub is_replicated: bool,
}

/// The shards of this rank, by number.
pub(super) struct Service(BTreeMap<u32, Mutex<Hosted>>);

/// A shard of this rank.
pub(super) struct Hosted {
    index: u32,
    shard: Shard,
    role: Role,
    /// The number of the next operation.
    next: u64,
    /// Workers that have ended a step and may not begin the next.
    parked: Vec<Parked>,
    /// Operations that came before one that has a smaller number, as a replica.
    early: BTreeMap<u64, (Op<'static>, Answer<()>)>,
    /// Why it takes no operations any more: it may differ from its replica, or from what its workers believe.
    failed: Option<Error>,
}

enum Role {
    /// Serves, and sends operations to a replica, if there is one.
    Primary(Option<Rank>),
    /// Takes operations from this primary.
    Replica(Rank),
}

struct Parked {
    worker: Rank,
    /// The worker's number of the operation.
    number: u64,
    staleness: u64,
    pull: Option<Range<usize>>,
    answer: Answer<Reply<Done>>,
}

/// Answers that are given when the replica has all operations before them.
#[derive(Default)]
struct Outcome {
    acks: Vec<(Rank, PendingCall<()>)>,
    answers: Vec<(Answer<Reply<Done>>, Result<Done>)>,
}

impl Hosted {
    /// Shard number `index`, which is at `place`, on the rank `own`.
    pub(super) fn new(index: u32, shard: Shard, place: &Place, own: Rank) -> Self {
        let role = match place.primary == own {
            true => Role::Primary(place.replica),
            false => Role::Replica(place.primary),
        };
        Self { index, shard, role, next: 0, parked: Vec::new(), early: BTreeMap::new(), failed: None }
    }

    /// Whether this rank serves the shard. If its primary is lost, it does from now on.
    fn serves(&mut self, context: &Context, outcome: &mut Outcome) -> bool {
        let Role::Replica(primary) = self.role else { return true };
        if !is_lost(context, primary) {
            return false;
        }
        self.role = Role::Primary(None);
        // Requests that follow a gap were never answered: their workers ask again.
        self.early.clear();
        let workers: Vec<Rank> = self.shard.clocks().workers().keys().copied().collect();
        for worker in workers {
            if is_lost(context, worker) {
                let _ = self.apply(context, Op::Leave(worker, None), outcome);
            }
        }
        true
    }

    /// Applies `op` and sends it to the replica. Then answers the workers that may go on.
    fn apply(&mut self, context: &Context, op: Op<'_>, outcome: &mut Outcome) -> Result<u64> {
        let applied = self.apply_and_forward(context, &op, outcome);
        if applied.is_ok() {
            self.let_go(context, outcome);
        }
        if let Some(error) = &self.failed {
            let waiting = self.parked.drain(..).map(|parked| (parked.answer, Err(error.clone())));
            outcome.answers.extend(waiting);
            return Err(error.clone());
        }
        applied
    }

    fn apply_and_forward(&mut self, context: &Context, op: &Op<'_>, outcome: &mut Outcome) -> Result<u64> {
        let staleness = self.change(op)?;
        self.forward(context, op, outcome)?;
        Ok(staleness)
    }

    /// Applies `op`. If the update rule panics, the parameters are undefined: the shard has failed.
    fn change(&mut self, op: &Op<'_>) -> Result<u64> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        caught("the update rule", || Ok(self.shard.apply(op))).unwrap_or_else(|error| Err(self.fail(error)))
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }

    /// Answers the waiting workers that may go on.
    fn let_go(&mut self, context: &Context, outcome: &mut Outcome) {
        let mut index = 0;
        while index < self.parked.len() {
            if !self.shard.clocks().workers().contains_key(&self.parked[index].worker) {
                let Parked { answer, worker, .. } = self.parked.swap_remove(index);
                let gone = Error::aborted(format!(
                    "rank {worker} has left the servers while it waited for other workers"
                ));
                outcome.answers.push((answer, Err(gone)));
            } else if self.shard.clocks().may_go(self.parked[index].worker) {
                let Parked { worker, staleness, pull, answer, .. } = self.parked.swap_remove(index);
                let shown = match &pull {
                    Some(keys) => self.apply_and_forward(context, &Op::Pull(worker, keys.clone()), outcome),
                    None => Ok(0),
                };
                let reply = shown.and_then(|_| self.reply(worker, staleness, pull.as_ref()));
                outcome.answers.push((answer, reply));
            } else {
                index += 1;
            }
        }
    }

    fn forward(&mut self, context: &Context, op: &Op<'_>, outcome: &mut Outcome) -> Result<()> {
        let number = self.next;
        self.next += 1;
        let Role::Primary(Some(replica)) = self.role else { return Ok(()) };
        match context.rpc().call_async(replica, REPLICATE, &(self.index, number, op)) {
            Ok(ack) => outcome.acks.push((replica, ack)),
            // From here on there is no replica, and workers are told.
            Err(_) if is_lost(context, replica) => self.role = Role::Primary(None),
            // It is alive but lacks this operation: it must not take over.
            Err(error) => return Err(self.fail(error)),
        }
        Ok(())
    }

    fn reply(&self, worker: Rank, staleness: u64, pull: Option<&Range<usize>>) -> Result<Done> {
        let values = pull.map(|keys| self.shard.parameters(keys)).transpose()?.unwrap_or_default();
        let values = copy_of(bytemuck::cast_slice::<f32, u8>(values))?.into();
        let clock = self.shard.clocks().workers().get(&worker).copied().unwrap_or(0);
        Ok(Done { staleness, clock, values, is_replicated: false })
    }
}

fn is_lost(context: &Context, rank: Rank) -> bool {
    context.rpc().failure(rank).is_ok_and(|failure| failure.is_some())
}

impl Outcome {
    /// Gives the answers, when the replica has what they are about.
    fn finish(self, context: &Context) {
        let mut failure = None;
        // A replica that acknowledges an operation has all operations before it, too.
        let mut is_replicated = !self.acks.is_empty();
        for (replica, ack) in self.acks {
            // A lost replica needs no operations. One that is late or differs must not be used.
            if let Err(error) = ack.wait() {
                is_replicated = false;
                if !is_lost(context, replica) {
                    failure.get_or_insert(error);
                }
            }
        }
        let mut answers = self.answers.into_iter().map(|(answer, done)| {
            let done = match &failure {
                Some(error) => Err(error.clone()),
                None => done.map(|done| Reply::Done(Done { is_replicated, ..done })),
            };
            move || answer.send(done)
        });
        // The last is that of the worker that has asked. No worker waits for the answer of another, which may be long, and its connection
        // slow.
        let own = answers.next_back();
        answers.for_each(|send| aside(context, send));
        if let Some(send) = own {
            send();
        }
    }
}

/// Locks a shard. The holder may wait for room on the way to the replica. So a handler that waits for the lock lets others run in
/// its place: among them are the operations that this rank gets as the replica of another shard.
fn turn(hosted: &Mutex<Hosted>) -> MutexGuard<'_, Hosted> {
    hosted.try_lock().unwrap_or_else(|| waiting(|| hosted.lock()))
}

impl Service {
    pub(super) fn new(shards: Vec<Hosted>) -> Arc<Self> {
        Arc::new(Self(shards.into_iter().map(|hosted| (hosted.index, Mutex::new(hosted))).collect()))
    }

    /// `builder` with the functions of this service.
    pub(super) fn functions(self: Arc<Self>, builder: RpcBuilder) -> RpcBuilder {
        let [steps, replica, statistics, lost] = std::array::from_fn(|_| self.clone());
        builder
            .deferred(STEP, move |context, request, answer| steps.step(context, request, answer))
            .deferred(REPLICATE, move |context, (shard, number, op), answer| {
                replica.replicate(context, shard, number, op, answer);
            })
            .handler(STATISTICS, move |context, shard| statistics.statistics(context, shard))
            .on_lost(move |context, _| lost.lost(context))
    }

    fn hosted(&self, context: &Context, shard: u32) -> Result<&Mutex<Hosted>> {
        self.0.get(&shard).ok_or_else(|| {
            Error::invalid_argument(format!("rank {} does not have shard {shard}", context.rpc().rank()))
        })
    }

    pub(super) fn step(&self, context: &Context, request: Request<'static>, answer: Answer<Reply<Done>>) {
        let hosted = match self.hosted(context, request.shard) {
            Ok(hosted) => hosted,
            Err(error) => return answer.send(Err(error)),
        };
        let mut outcome = Outcome::default();
        let mut hosted = turn(hosted);
        if !hosted.serves(context, &mut outcome) {
            drop(hosted);
            return answer.send(Ok(Reply::NotServing));
        }
        let (worker, number) = (context.caller(), request.number);
        // `lost` may have run before this handler: nobody would take away again a worker that joined now. Under the lock: if the
        // connection ends after this look, `lost` comes after this operation.
        if is_lost(context, worker) {
            drop(hosted);
            answer.send(Err(Error::aborted(format!("rank {worker} is lost"))));
            return outcome.finish(context);
        }
        // If it asks again, its earlier question has no reader. As all, it is answered without the lock: the connection may be slow.
        let earlier = |parked: &mut Parked| parked.worker == worker && parked.number <= number;
        outcome.answers.extend(hosted.parked.extract_if(.., earlier).map(|Parked { answer, .. }| {
            (answer, Err(Error::aborted(format!("rank {worker} has asked again before it was answered"))))
        }));
        let (op, pull, waits) = match request.ask {
            Ask::Join => (Op::Join(worker, number), None, false),
            Ask::Enter { clock, keys } => {
                (Op::Enter { worker, number, clock, keys: keys.clone() }, Some(keys), true)
            }
            Ask::Leave => (Op::Leave(worker, Some(number)), None, false),
            Ask::Step { push, advance, pull } => {
                (Op::Step { worker, number, push, advance, pull: pull.clone() }, pull, advance)
            }
        };
        match hosted.apply(context, op, &mut outcome) {
            Ok(staleness) if waits && !hosted.shard.clocks().may_go(worker) => {
                hosted.parked.push(Parked { worker, number, staleness, pull, answer });
            }
            Ok(staleness) => {
                let reply = hosted.reply(worker, staleness, pull.as_ref());
                outcome.answers.push((answer, reply));
            }
            Err(error) => outcome.answers.push((answer, Err(error))),
        }
        drop(hosted);
        outcome.finish(context);
    }

    fn replicate(&self, context: &Context, shard: u32, number: u64, op: Op<'static>, answer: Answer<()>) {
        let hosted = match self.hosted(context, shard) {
            Ok(hosted) => hosted,
            Err(error) => return answer.send(Err(error)),
        };
        let mut hosted = turn(hosted);
        if !matches!(hosted.role, Role::Replica(primary) if primary == context.caller()) {
            drop(hosted);
            return answer.send(Err(Error::aborted(format!("shard {shard} is served by its replica"))));
        }
        hosted.early.insert(number, (op, answer));
        let mut applied = Vec::new();
        loop {
            let next = hosted.next;
            let Some((op, answer)) = hosted.early.remove(&next) else { break };
            hosted.next += 1;
            // Its primary has carried it out: if this rank cannot, they differ.
            let changed = hosted.change(&op).map(drop).map_err(|error| hosted.fail(error));
            applied.push((answer, changed));
        }
        drop(hosted);
        applied.into_iter().for_each(|(answer, outcome)| answer.send(outcome));
    }

    fn statistics(&self, context: &Context, shard: u32) -> Result<Reply<ShardStatistics>> {
        let mut outcome = Outcome::default();
        let mut hosted = turn(self.hosted(context, shard)?);
        if !hosted.serves(context, &mut outcome) {
            return Ok(Reply::NotServing);
        }
        let statistics = ShardStatistics {
            server: context.rpc().rank(),
            keys: 0..hosted.shard.keys(),
            clocks: hosted.shard.clocks().workers().iter().map(|(worker, clock)| (*worker, *clock)).collect(),
            updates: hosted.shard.updates(),
            staleness: hosted.shard.record().clone(),
            is_replicated: matches!(hosted.role, Role::Primary(Some(_))),
        };
        drop(hosted);
        outcome.finish(context);
        Ok(Reply::Done(statistics))
    }

    /// The rank that `context` names is lost: no longer waits for it.
    fn lost(&self, context: &Context) {
        let gone = context.caller();
        for hosted in self.0.values() {
            let mut outcome = Outcome::default();
            let mut hosted = turn(hosted);
            match hosted.role {
                Role::Primary(Some(replica)) if replica == gone => hosted.role = Role::Primary(None),
                Role::Primary(_) => {}
                // The primary tells its replica; else the replica checks for lost workers when it takes over.
                Role::Replica(_) => continue,
            }
            let _ = hosted.apply(context, Op::Leave(gone, None), &mut outcome);
            drop(hosted);
            outcome.finish(context);
        }
    }
}
