//! Replay of a step: if a failure has cut off the averaging, another group averages the same gradients again.

use std::sync::Arc;
use std::time::Instant;

use super::bucket::Bucket;
use super::{Phase, Reducer, UnusedParameters};
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::group::Communicator;

/// The gradients of a step, kept so that they can be averaged again.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// This rank's gradients in each bucket that was launched in this step: averages take their place in the bucket.
    gradients: Vec<Vec<u8>>,
    launched: usize,
    /// Do buckets wait for the end of backward, because the group has failed?
    suspended: bool,
    /// The failure, until there is another group.
    cut_off: Option<Error>,
    /// Has this step tried to average all buckets?
    finished: bool,
    /// Are the parameters without a gradient known?
    pub(super) closed: bool,
    /// Has this step, the first of a static graph, shown which parameters are unused?
    pub(super) learned: bool,
}

impl Replay {
    /// Keeps the gradients of the bucket that is launched next.
    fn keep(&mut self, gradients: &[u8]) -> Result<()> {
        if self.gradients.len() <= self.launched {
            self.gradients.push(Vec::new());
        }
        let copy = &mut self.gradients[self.launched];
        copy.clear();
        copy.try_reserve_exact(gradients.len()).map_err(|error| {
            Error::out_of_memory(format!("no memory to keep {} bytes of gradients", gradients.len()))
                .with_source(error)
        })?;
        copy.extend_from_slice(gradients);
        self.launched += 1;
        Ok(())
    }

    /// Begins a new step.
    fn begin(&mut self) {
        *self = Self { gradients: std::mem::take(&mut self.gradients), ..Self::default() };
    }
}

impl Reducer {
    /// From the next step on, the gradients of a step whose averaging a failure has cut off can be averaged again, in another
    /// group: see [`finish_in`](Self::finish_in). For [elastic](crate::elastic::Context::step) jobs.
    ///
    /// It takes memory for another copy of all gradients, and the time to make it. Each rank decides for itself.
    ///
    /// # Errors
    /// If the averages are [sharded](Self::shard), or the hook keeps something
    /// ([`CommHook::is_stateless`](super::hooks::CommHook::is_stateless)): they could not be made again.
    pub fn keep_gradients(&mut self) -> Result<()> {
        self.check_failure()?;
        if matches!(self.phase, Phase::Backward { .. }) {
            return Err(Error::invalid_argument(
                "gradients are kept from the beginning of a backward pass on",
            ));
        }
        self.check_repeatable(self.owners.is_some(), self.hook.is_stateless())?;
        self.replay.get_or_insert_default();
        Ok(())
    }

    pub(super) fn check_repeatable(&self, sharded: bool, stateless: bool) -> Result<()> {
        match (sharded, stateless) {
            (false, true) => Ok(()),
            (true, _) => Err(Error::invalid_argument("sharded averages cannot be made again")
                .with_remedy("either keep gradients for another group, or shard the averages")),
            (false, false) => Err(Error::invalid_argument(
                "the communication hook keeps something of each step, which cannot be averaged again",
            )
            .with_remedy("use the plain average where gradients are kept for another group")),
        }
    }

    /// As [`finish`](Self::finish), the first time in a step. After that it averages the same gradients again in `group`,
    /// whether the first time has succeeded or not: all of its ranks have been in the group before.
    ///
    /// If that group fails during backward, gradients are still taken, and this returns the failure.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use phalanx::{elastic::{Context, Plain}, reducer::Reducer, Result};
    /// # fn backward(_: &mut Reducer) -> Result<()> { Ok(()) }
    /// # fn step(context: &mut Context<'_, Plain<u64>>, reducer: &mut Reducer) -> Result<()> {
    /// let mut first = true;
    /// let step = context.step(|_, group| {
    ///     if std::mem::take(&mut first) {
    ///         reducer.start()?;
    ///         backward(reducer)?;
    ///     }
    ///     reducer.finish_in(Arc::new(group.clone()))
    /// })?;
    /// // The averages are there; others may have been cut off where this rank was not.
    /// if step.regrouped {
    ///     reducer.rebind(Arc::new(context.group().clone()))?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`finish`](Self::finish); and if gradients are not [kept](Self::keep_gradients).
    pub fn finish_in(&mut self, group: Arc<dyn Communicator>) -> Result<()> {
        self.check_failure()?;
        let replay = self.replay.as_mut().ok_or_else(|| {
            Error::invalid_argument("the gradients of this step were not kept")
                .with_remedy("call keep_gradients before it")
        })?;
        if std::mem::replace(&mut replay.finished, true) {
            self.bind(group.clone());
            self.restore(&*group).map_err(|error| self.fail(error))?;
        }
        self.finish()
    }

    /// Goes on in another group, of ranks that have been in this one all along. Averages stay until the next
    /// [`start`](Self::start). All ranks of `group` call it between the same steps; it calls no collective.
    ///
    /// # Errors
    /// During a backward pass, and if the averages are [sharded](Self::shard).
    pub fn rebind(&mut self, group: Arc<dyn Communicator>) -> Result<()> {
        self.check_failure()?;
        if matches!(self.phase, Phase::Backward { .. }) {
            return Err(Error::invalid_argument(
                "a reducer goes to another group between steps, or with finish_in",
            ));
        }
        if self.owners.is_some() {
            return Err(Error::invalid_argument("sharded averages belong to one group")
                .with_remedy("make a new reducer"));
        }
        self.stale = true;
        self.bind(group);
        Ok(())
    }

    fn bind(&mut self, group: Arc<dyn Communicator>) {
        self.trace = group.trace();
        self.meter.rebind(group.clone());
        self.group = group;
    }

    /// Goes back to the end of backward, in memory of `group`: the buckets hold all gradients of this rank, and no averages.
    fn restore(&mut self, group: &dyn Communicator) -> Result<()> {
        let Some(replay) = &mut self.replay else { return Ok(()) };
        let mut buckets = Vec::with_capacity(self.buckets.len());
        for (index, old) in self.buckets.iter().enumerate() {
            let mut bucket = Bucket::new(index, &self.plan, &self.parameters);
            let launched = replay.gradients.get(index).filter(|_| index < replay.launched);
            let memory = bucket.bytes_mut(group)?;
            match launched.map(Vec::as_slice).or_else(|| old.bytes()) {
                Some(gradients) if memory.len() == gradients.len() => memory.copy_from_slice(gradients),
                _ => return Err(Error::aborted(format!("the gradients of bucket {index} are lost"))),
            }
            buckets.push(bucket);
        }
        self.buckets = buckets;
        (replay.launched, replay.suspended, replay.cut_off) = (0, true, None);
        if std::mem::take(&mut replay.learned)
            && let UnusedParameters::Static(unused) =
                std::mem::replace(&mut self.unused_parameters, UnusedParameters::StaticFirstStep)
        {
            // The other ranks may not have finished their first step.
            self.unused = unused;
        }
        self.phase = Phase::Backward { since: Instant::now() };
        Ok(())
    }

    /// Begins a new step, in memory of its own group.
    pub(super) fn begin_step(&mut self) {
        if std::mem::take(&mut self.stale) {
            self.buckets = super::buckets(&self.plan, &self.parameters);
        }
        if let Some(replay) = &mut self.replay {
            replay.begin();
        }
    }

    /// Launches `bucket`, if it does not have to wait for another group.
    pub(super) fn launch(&mut self, bucket: usize) -> Result<()> {
        if self.replay.as_ref().is_some_and(|replay| replay.suspended) {
            return Ok(());
        }
        self.launch_now(bucket).or_else(|error| self.suspend(error))
    }

    fn launch_now(&mut self, bucket: usize) -> Result<()> {
        if let (Some(replay), Some(gradients)) = (&mut self.replay, self.buckets[bucket].bytes()) {
            replay.keep(gradients)?;
        }
        let place = (bucket, self.plan.buckets.len());
        let meter = self.meter.in_call(Caller::DdpBackward);
        self.buckets[bucket].launch(&mut *self.hook, &*meter, place)
    }

    /// At the end of backward: launches the buckets that waited for another group, or returns the failure if there is none.
    pub(super) fn launch_suspended(&mut self) -> Result<()> {
        match &self.replay {
            Some(Replay { cut_off: Some(error), .. }) => return Err(error.clone()),
            Some(replay) if replay.suspended && self.group.world_size().get() > 1 => {}
            _ => return Ok(()),
        }
        (0..self.buckets.len()).try_for_each(|bucket| self.launch_now(bucket))
    }

    /// Lets buckets wait for another group, if gradients are kept and another rank has made this one fail. An error of this
    /// rank itself ends the group: the others would wait for it.
    pub(super) fn suspend(&mut self, error: Error) -> Result<()> {
        let rank = self.group.rank();
        let is_a_peers = self.group.failure().is_some_and(|cause| cause.is_a_peers(rank));
        match &mut self.replay {
            Some(replay) if is_a_peers => {
                replay.suspended = true;
                replay.cut_off = Some(error);
                Ok(())
            }
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
