//! The server's side: takes what workers ask, in one order for each shard, and keeps the replica.
//!
//! A shard's lock is its order: an operation is applied and sent to the replica under it, and answered when the replica has it. The
//! replica applies operations by their numbers, so what it has is a prefix of what the primary has, and holds all that was
//! answered.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::floats::Floats;
use super::shard::{Op, Shard};
use super::{Place, ShardStatistics};
use crate::asynchronous::rpc::{Answer, Context, PendingCall, RpcBuilder, waiting};
use crate::error::{Error, Result};
use crate::rank::Rank;

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
    Join,
    Leave,
    Step { push: Option<(Range<usize>, Floats<'a>)>, advance: bool, pull: Option<Range<usize>> },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply<'a> {
    Done {
        staleness: u64,
        values: Floats<'a>,
    },
    /// This rank is a replica whose primary is alive, as far as it knows.
    NotServing,
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
}

enum Role {
    /// Serves, and sends operations to a replica, if there is one.
    Primary(Option<Rank>),
    /// Takes operations from this primary.
    Replica(Rank),
}

struct Parked {
    worker: Rank,
    staleness: u64,
    pull: Option<Range<usize>>,
    answer: Answer<Reply<'static>>,
}

/// Answers that are given when the replica has all operations before them.
#[derive(Default)]
struct Outcome {
    acks: Vec<(Rank, PendingCall<()>)>,
    answers: Vec<(Answer<Reply<'static>>, Result<Reply<'static>>)>,
}

impl Hosted {
    /// Shard number `index`, which is at `place`, on the rank `own`.
    pub(super) fn new(index: u32, shard: Shard, place: &Place, own: Rank) -> Self {
        let role = match place.primary == own {
            true => Role::Primary(place.replica),
            false => Role::Replica(place.primary),
        };
        Self { index, shard, role, next: 0, parked: Vec::new(), early: BTreeMap::new() }
    }

    /// Does this rank serve the shard? If its primary is lost, it does from now on.
    fn serves(&mut self, context: &Context, outcome: &mut Outcome) -> bool {
        let Role::Replica(primary) = self.role else { return true };
        if context.rpc().failure(primary).is_ok_and(|failure| failure.is_none()) {
            return false;
        }
        self.role = Role::Primary(None);
        // What follows a gap was never answered: its workers ask again.
        self.early.clear();
        let workers: Vec<Rank> = self.shard.clocks().workers().keys().copied().collect();
        for worker in workers {
            if context.rpc().failure(worker).is_ok_and(|failure| failure.is_some()) {
                let _ = self.apply(context, Op::Leave(worker), outcome);
            }
        }
        true
    }

    /// Applies `op` and sends it to the replica. Whoever may go on then gets an answer.
    fn apply(&mut self, context: &Context, op: Op<'_>, outcome: &mut Outcome) -> Result<u64> {
        let staleness = self.shard.apply(&op)?;
        self.forward(context, &op, outcome);
        let mut index = 0;
        while index < self.parked.len() {
            if !self.shard.clocks().workers().contains_key(&self.parked[index].worker) {
                let Parked { answer, worker, .. } = self.parked.swap_remove(index);
                let gone = Error::aborted(format!(
                    "rank {worker} has left the servers while it waited for other workers"
                ));
                outcome.answers.push((answer, Err(gone)));
            } else if self.shard.clocks().may_go(self.parked[index].worker) {
                let Parked { worker, staleness, pull, answer } = self.parked.swap_remove(index);
                if let Some(keys) = &pull {
                    let op = Op::Pull(worker, keys.clone());
                    self.shard.apply(&op)?;
                    self.forward(context, &op, outcome);
                }
                let reply = self.reply(staleness, pull.as_ref());
                outcome.answers.push((answer, reply));
            } else {
                index += 1;
            }
        }
        Ok(staleness)
    }

    fn forward(&mut self, context: &Context, op: &Op<'_>, outcome: &mut Outcome) {
        let number = self.next;
        self.next += 1;
        let Role::Primary(Some(replica)) = self.role else { return };
        match context.rpc().call_async(replica, REPLICATE, &(self.index, number, op)).ok() {
            Some(ack) => outcome.acks.push((replica, ack)),
            // It is lost: from here on there is no replica.
            None => self.role = Role::Primary(None),
        }
    }

    fn reply(&self, staleness: u64, pull: Option<&Range<usize>>) -> Result<Reply<'static>> {
        let values = pull.map(|keys| self.shard.parameters(keys).map(<[f32]>::to_vec)).transpose()?;
        Ok(Reply::Done { staleness, values: Floats(Cow::Owned(values.unwrap_or_default())) })
    }
}

impl Outcome {
    /// Gives the answers, when the replica has what they are about.
    fn finish(self, context: &Context) {
        let mut failure = None;
        for (replica, ack) in self.acks {
            // A replica that is lost needs nothing; one that is late, or differs, must not be counted on.
            if let Err(error) = ack.wait()
                && context.rpc().failure(replica).is_ok_and(|lost| lost.is_none())
            {
                failure.get_or_insert(error);
            }
        }
        for (answer, reply) in self.answers {
            answer.send(match &failure {
                Some(error) => Err(error.clone()),
                None => reply,
            });
        }
    }
}

/// The lock of a shard. Who holds it may wait for room on the way to the replica, so who waits for it leaves its place to others:
/// among them is what the replica of another shard, this rank, is asked.
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

    fn step(&self, context: &Context, request: Request<'static>, answer: Answer<Reply<'static>>) {
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
        let worker = context.caller();
        // If it asks again, its earlier question has no reader.
        hosted.parked.retain(|parked| parked.worker != worker);
        let (op, pull, advance) = match request.ask {
            Ask::Join => (Op::Join(worker), None, false),
            Ask::Leave => (Op::Leave(worker), None, false),
            Ask::Step { push, advance, pull } => {
                let op = Op::Step { worker, number: request.number, push, advance, pull: pull.clone() };
                (op, pull, advance)
            }
        };
        match hosted.apply(context, op, &mut outcome) {
            Ok(staleness) if advance && !hosted.shard.clocks().may_go(worker) => {
                hosted.parked.push(Parked { worker, staleness, pull, answer });
            }
            Ok(staleness) => {
                let reply = hosted.reply(staleness, pull.as_ref());
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
            applied.push((answer, hosted.shard.apply(&op).map(drop)));
        }
        drop(hosted);
        applied.into_iter().for_each(|(answer, outcome)| answer.send(outcome));
    }

    fn statistics(&self, context: &Context, shard: u32) -> Result<ShardStatistics> {
        let hosted = turn(self.hosted(context, shard)?);
        Ok(ShardStatistics {
            server: context.rpc().rank(),
            keys: 0..hosted.shard.keys(),
            clocks: hosted.shard.clocks().workers().iter().map(|(worker, clock)| (*worker, *clock)).collect(),
            updates: hosted.shard.updates(),
            staleness: hosted.shard.record().clone(),
            is_replicated: matches!(hosted.role, Role::Primary(Some(_))),
        })
    }

    /// The rank that `context` names is lost: nobody waits for it any more.
    fn lost(&self, context: &Context) {
        let gone = context.caller();
        for hosted in self.0.values() {
            let mut outcome = Outcome::default();
            let mut hosted = turn(hosted);
            match hosted.role {
                Role::Primary(Some(replica)) if replica == gone => hosted.role = Role::Primary(None),
                Role::Primary(_) => {}
                // Its primary tells it, or it looks itself when it takes over.
                Role::Replica(_) => continue,
            }
            let _ = hosted.apply(context, Op::Leave(gone), &mut outcome);
            drop(hosted);
            outcome.finish(context);
        }
    }
}
