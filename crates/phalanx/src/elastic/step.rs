//! Steps that are done again among the survivors.

use super::context::Ended;
use super::retry::{Course, Resumed};
use super::rounds::{Next, failure_of};
use super::{Context, State};
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::notice::warn;
use crate::rank::Rank;

/// What a [step](Context::step) has given, and whose part of it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step<T> {
    /// What the ranks have reduced together.
    pub value: T,
    /// The ranks whose part is missing, because they died before it was there: the ranks that the step's data were distributed
    /// by. For [`ElasticSampler::put_back`](crate::sampler::ElasticSampler::put_back).
    pub missing: Vec<Rank>,
    /// Is [`Context::group`] another than before? What is bound to a group has to follow. Ranks may hear of it a step apart:
    /// what calls collectives waits for [`changed`](Self::changed).
    pub regrouped: bool,
    /// Are [`Context::rank`] and [`Context::world_size`] others from here on?
    pub changed: bool,
}

impl<S: State> Context<'_, S> {
    /// Has `reduce` reduce a step's gradients over all ranks; if a death cuts that off, again, over the survivors alone, in a
    /// group that they have formed for it. So the step is not lost, and no rank goes back to the last commit.
    ///
    /// `reduce` is given the state and the group of now, calls the same collectives of that on every rank, at least one, and
    /// begins with the same gradients each time: those of this rank's data, which it must not overwrite, or must copy first. If
    /// that is lost, it ends the group ([`ProcessGroup::abort`]) before it returns the error, and all go back. Every rank calls it
    /// equally often between two commits. It costs one barrier more than `reduce`; where workers do not change, nothing.
    ///
    /// What the survivors do:
    ///
    /// - If all of them have the step's result, it counts, with the part of the dead. The same holds if one of them has
    ///   completed the step.
    /// - Else they reduce their own parts again; the dead rank's part is [missing](Step::missing).
    /// - If some cannot (they were not in a step, or have been replaced, or too few are left), all go back to the last commit:
    ///   this returns an error with [`is_regrouping`](Error::is_regrouping), which leads `?` to [`run`](super::run()), and the
    ///   loop is called anew. The same holds if a collective outside `reduce`, or a commit, was cut off; and if a survivor that
    ///   is ahead of another has called another collective since its last step.
    ///
    /// A survivor may have had its data of the next step already. So the data's world, [`rank`](Self::rank) and
    /// [`world_size`](Self::world_size), changes on all survivors behind the same step, which may be the one after this:
    /// [`Step::changed`] says when. Newcomers are taken in at the next commit.
    ///
    /// # Errors
    /// Those of `reduce` that are no peer's failure; those of [`run`](super::run()); and that of going back.
    pub fn step<T>(&mut self, mut reduce: impl FnMut(&mut S, &ProcessGroup) -> Result<T>) -> Result<Step<T>> {
        self.check_ended()?;
        if self.rounds.is_none() {
            let value = reduce(self.state, &self.group)?;
            return Ok(Step { value, missing: Vec::new(), regrouped: false, changed: false });
        }
        let round = self.round;
        self.course.begin(self.group.calls() != self.calls);
        loop {
            let (held, error) = match reduce(self.state, &self.group) {
                Ok(value) => {
                    self.course.reduced(self.round);
                    match self.group.in_call(Caller::ElasticStep).barrier() {
                        Ok(()) => {
                            let before = self.course;
                            self.course.done();
                            return self.conclude(value, before, round);
                        }
                        Err(error) => (Some(value), error),
                    }
                }
                Err(error) => (None, error),
            };
            let before = self.course;
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

    /// After `error`: meets the other survivors, if it was another's failure, and decides with them.
    fn go_on(&mut self, error: Error) -> Result<Resumed> {
        let cause = failure_of(&self.group).filter(|cause| cause.is_a_peers(self.group.rank()));
        let (Some(cause), Some(rounds)) = (cause, self.rounds.as_mut()) else { return Err(error) };
        if self.group.was_aborted() {
            // This rank, too, has failed in it. `run` meets the others, and has no step in its hands.
            return Err(Error::regrouping("a step was cut off that cannot be done again"));
        }
        tracing::warn!(round = self.round, %cause, "a step was cut off; this worker waits for the other survivors");
        rounds.leave(Some(&cause))?;
        let next = rounds.next(Some(self.course.position(self.snapshot.commits)))?;
        let Some((round, group)) = rounds.current() else { return Err(error) };
        (self.round, self.group) = (round, group);
        let Next::GoOn(plan) = next else {
            warn("the step cannot be done again; all workers go back to the last commit");
            self.ended = Some(Ended::GoneBack);
            return Err(Ended::GoneBack.error());
        };
        let resumed = self.course.resume(plan, round);
        tracing::info!(round, ?resumed, "the survivors go on with the step");
        Ok(resumed)
    }

    /// The step is done, which began in `round`; before its end, the course was that.
    fn conclude<T>(&mut self, value: T, before: Course, round: u64) -> Result<Step<T>> {
        let changed = self.course.data_round() != before.data_round();
        let missing = match self.rounds.as_ref() {
            Some(rounds) => {
                self.place = rounds.place(self.course.data_round())?;
                rounds.missing(before.data_round(), before.reduced_in())?
            }
            None => Vec::new(),
        };
        let regrouped = self.round != round;
        if regrouped {
            self.followed = self.state.follow(&self.group)?;
        }
        // What `enter` calls is no part of a step.
        self.calls = self.group.calls();
        if changed && !self.followed {
            // Here all survivors have the same state again, and may make what is bound to a group anew.
            self.state.leave();
            self.state.enter(&self.group)?;
        }
        Ok(Step { value, missing, regrouped, changed })
    }
}
