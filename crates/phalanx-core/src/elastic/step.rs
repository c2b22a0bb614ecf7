//! Steps that the survivors of a failure replay.
//!
//! A step is a closure from the gradients to the averages. The borrow checker ensures that it can be called again, and
//! a loop may keep its gradients in any form. The alternative, that ranks which are ahead discard their work, costs a
//! backward pass, and every loop would have to undo half a step.
//!
//! The survivors wait for no new worker: with one all would have to go back to the commit. Replay is optional, because
//! the reduction has to be out of place, which costs a copy of the gradients.

use super::context::Ended;
use super::retry::{Resumed, StepProgress};
use super::rounds::{Next, failure_of};
use super::{Context, State};
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::notice::warn;
use crate::rank::Rank;

/// The result of a [step](Context::step), and which ranks' data it contains.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step<T> {
    /// The reduced value.
    pub value: T,
    /// The ranks whose data are missing, because they died before they were reduced. They are ranks of the world in
    /// which the step's data were distributed. For
    /// [`ElasticSampler::put_back`](crate::sampler::ElasticSampler::put_back).
    pub missing: Vec<Rank>,
    /// Whether [`Context::group`] has been replaced. Objects that are bound to a group must follow. Ranks may see this a
    /// step apart: anything that calls collectives must wait for [`changed`](Self::changed).
    pub regrouped: bool,
    /// Whether [`Context::rank`] and [`Context::world_size`] have changed, from here on.
    pub changed: bool,
}

impl<S: State> Context<'_, S> {
    /// Calls `reduce` to reduce a step's gradients over all ranks. If a death cuts that off, the survivors form a new
    /// group and call it again over themselves. So the step is not lost, and no rank goes back to the last commit.
    ///
    /// `reduce` gets the state and the current group. It must call the same collectives of that group on every rank, at
    /// least one. Each time it must begin with the same gradients, those of this rank's data: it must not overwrite
    /// them, or must copy them first. If they are lost, it ends the group ([`ProcessGroup::abort`]) before it returns
    /// the error, and all go back. Every rank calls it equally often between two commits. It costs one barrier more
    /// than `reduce`, and nothing if workers cannot change.
    ///
    /// What the survivors do:
    ///
    /// - If all of them have the step's result, it counts, with the dead rank's data. The same holds if one of them has
    ///   completed the step.
    /// - Otherwise they reduce their own data again; the dead rank's data are [missing](Step::missing).
    /// - If some cannot (they were not in a step, or have been replaced, or too few are left), all go back to the last
    ///   commit: this returns an error with [`is_regrouping`](Error::is_regrouping), which `?` passes to
    ///   [`run`](super::run()), and the loop is called again. The same holds if a collective outside `reduce`, or a
    ///   commit, was cut off; and if a survivor that is ahead of another has called another collective since its last
    ///   step.
    ///
    /// A survivor may already have its data of the next step. So the data's world, [`rank`](Self::rank) and
    /// [`world_size`](Self::world_size), changes on all survivors after the same step, which may be the one after this:
    /// [`Step::changed`] says when. New workers join at the next commit.
    ///
    /// # Errors
    /// Those of `reduce` that are not a peer's failure, those of [`run`](super::run()), and the error that leads back
    /// to the commit.
    pub fn step<T>(&mut self, mut reduce: impl FnMut(&mut S, &ProcessGroup) -> Result<T>) -> Result<Step<T>> {
        self.check_ended()?;
        if self.rounds.is_none() {
            let value = reduce(self.state, &self.group)?;
            return Ok(Step { value, missing: Vec::new(), regrouped: false, changed: false });
        }
        let round = self.round;
        self.progress.begin(self.group.calls() != self.calls);
        loop {
            let (held, error) = match reduce(self.state, &self.group) {
                Ok(value) => {
                    self.progress.reduced(self.round);
                    match self.group.in_call(Caller::ElasticStep).barrier() {
                        Ok(()) => {
                            let before = self.progress;
                            self.progress.done();
                            return self.conclude(value, before, round);
                        }
                        Err(error) => (Some(value), error),
                    }
                }
                Err(error) => (None, error),
            };
            let before = self.progress;
            if let (Resumed::Done, Some(value)) = (self.go_on(error)?, held) {
                return self.conclude(value, before, round);
            }
        }
    }

    /// [All-reduces](ProcessGroup::all_reduce) `data` in a [step](Self::step) of its own, and keeps a copy of `data` for it.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], op: ReduceOp) -> Result<Step<()>> {
        if self.rounds.is_none() {
            return self.step(|_, group| group.all_reduce(data, op));
        }
        let mut input = std::mem::take(&mut self.input);
        input.clear();
        let bytes: &[u8] = bytemuck::cast_slice(data);
        input.try_reserve(bytes.len()).map_err(|error| {
            Error::out_of_memory(format!("no memory to keep the {} bytes of a step", bytes.len()))
                .with_source(error)
                .with_remedy("start fewer workers on this host: each keeps what its step sends")
        })?;
        input.extend_from_slice(bytes);
        let mut replayed = false;
        let step = self.step(|_, group| {
            if std::mem::replace(&mut replayed, true) {
                bytemuck::cast_slice_mut(data).copy_from_slice(&input);
            }
            group.all_reduce(data, op)
        });
        self.input = input;
        step
    }

    /// After `error`: if it was another rank's failure, joins the other survivors and decides with them.
    fn go_on(&mut self, error: Error) -> Result<Resumed> {
        let cause = failure_of(&self.group).filter(|cause| cause.is_a_peers(self.group.rank()));
        let (Some(cause), Some(rounds)) = (cause, self.rounds.as_mut()) else { return Err(error) };
        if self.group.was_aborted() {
            // This rank, too, has failed in it. `run` forms the new group, without a step to replay.
            return Err(Error::regrouping("a step was cut off that cannot be done again"));
        }
        tracing::warn!(round = self.round, %cause, "a step was cut off; this worker waits for the other survivors");
        rounds.leave(Some(&cause))?;
        let next = rounds.next(Some(self.progress.position(self.snapshot.commits)))?;
        let Some((round, group)) = rounds.current() else { return Err(error) };
        (self.round, self.group) = (round, group);
        let Next::Resume(plan) = next else {
            warn("the step cannot be done again; all workers go back to the last commit");
            self.ended = Some(Ended::GoneBack);
            return Err(Ended::GoneBack.error());
        };
        let resumed = self.progress.resume(plan, round);
        tracing::info!(round, ?resumed, "the survivors go on with the step");
        Ok(resumed)
    }

    /// The step is complete. It began in `round`; `before` is the progress before its end.
    fn conclude<T>(&mut self, value: T, before: StepProgress, round: u64) -> Result<Step<T>> {
        let changed = self.progress.data_round() != before.data_round();
        let missing = match self.rounds.as_ref() {
            Some(rounds) => {
                self.data_rank = rounds.rank_in(self.progress.data_round())?;
                rounds.missing(before.data_round(), before.reduced_in())?
            }
            None => Vec::new(),
        };
        let regrouped = self.round != round;
        if regrouped {
            self.followed = self.state.follow(&self.group)?;
        }
        // The calls of `enter` are not a part of a step.
        self.calls = self.group.calls();
        if changed && !self.followed {
            // Here all survivors have the same state again, and may rebuild what is bound to a group.
            self.state.leave();
            self.state.enter(&self.group)?;
        }
        Ok(Step { value, missing, regrouped, changed })
    }
}
