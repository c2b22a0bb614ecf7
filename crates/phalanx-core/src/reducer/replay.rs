//! Replay of a step: if a failure has cut off the averaging, another group averages the same gradients again.

use super::bucket::Bucket;
use super::{Reducer, buckets};
use crate::error::{Error, Result};
use crate::group::Binding;
use phalanx_proto::reducer::state::LOST_REMEDY;

impl Reducer {
    /// Keeps what is needed to average the gradients of the next step [again](Self::replay) in another group. For
    /// [elastic](crate::elastic::Context::step) jobs, and reducers whose group is a [`GroupHandle`](crate::GroupHandle).
    ///
    /// It takes memory for another copy of all gradients, and the time to make it. Each rank decides for itself. If gradients lie
    /// [elsewhere](Self::elsewhere), the hook has the copy ([`GradBucket::keeps`](super::hooks::GradBucket::keeps)).
    ///
    /// # Errors
    /// If the averages are [sharded](Self::shard), or the hook keeps something
    /// ([`CommHook::is_stateless`](super::hooks::CommHook::is_stateless)): they could not be made again.
    pub fn keep_gradients(&mut self) -> Result<()> {
        self.check_regroupable("keep_gradients")?;
        self.state.keep(self.hook.is_stateless())
    }

    /// Averages the gradients of the last step again, in the group that the reducer's [handle](crate::GroupHandle) leads to by
    /// now, whether [`finish`](Self::finish) has succeeded in the last one or not: all of its ranks have been in that group.
    ///
    /// If a group fails during backward, gradients are still taken, and `finish` returns the failure. After a replay the ranks
    /// exchange no [step times](Self::step_times) any more.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use phalanx::{elastic::{Context, Plain}, reducer::Reducer, GroupHandle, Result};
    /// # fn backward(_: &mut Reducer) -> Result<()> { Ok(()) }
    /// /// The reducer was made with `Arc::new(handle.clone())`.
    /// fn step(context: &mut Context<'_, Plain<u64>>, reducer: &mut Reducer, handle: &GroupHandle) -> Result<()> {
    ///     let mut first = true;
    ///     let step = context.step(|_, group| {
    ///         if std::mem::take(&mut first) {
    ///             reducer.keep_gradients()?;
    ///             reducer.start()?;
    ///             backward(reducer)?;
    ///             return reducer.finish();
    ///         }
    ///         handle.rebind(group.clone());
    ///         reducer.replay()
    ///     })?;
    ///     // The averages are there; others may have been cut off where this rank was not.
    ///     if step.regrouped {
    ///         handle.rebind(context.group().clone());
    ///         reducer.regrouped()?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`finish`](Self::finish); and if gradients are not [kept](Self::keep_gradients), or no step has come to its end.
    pub fn replay(&mut self) -> Result<()> {
        let launched = self.state.replay((self.group.rank(), self.group.world_size()))?;
        (self.trace, self.binding) = (self.group.trace(), Binding::of(&*self.group));
        self.timer.stop();
        self.restore(launched).map_err(|error| self.abort(error))?;
        self.send_weight().or_else(|error| self.cut_off(error))?;
        self.finish()
    }

    /// Goes on with the group that the reducer's [handle](crate::GroupHandle) leads to by now, of ranks that have been in the
    /// last one all along. Averages stay until the next [`start`](Self::start). Each rank calls it between two steps, when it
    /// learns of the group; ranks may [learn of it a step apart](crate::elastic::Step::regrouped), so it calls no collective.
    ///
    /// The ranks then exchange no [step times](Self::step_times) any more.
    ///
    /// # Errors
    /// During a backward pass, and if the averages are [sharded](Self::shard).
    pub fn regrouped(&mut self) -> Result<()> {
        self.check_regroupable("regrouped")?;
        self.state.regrouped((self.group.rank(), self.group.world_size()))?;
        (self.trace, self.binding) = (self.group.trace(), Binding::of(&*self.group));
        self.timer.stop();
        self.stale = true;
        Ok(())
    }

    /// An error of `call` if gradients lie elsewhere, where the hook cannot average them again.
    fn check_regroupable(&self, call: &str) -> Result<()> {
        if self.hook.keeps_gradients() { Ok(()) } else { self.check_here(call) }
    }

    /// Goes back to the end of backward, in memory of the group of now: buckets hold all gradients of this rank, those that
    /// were `launched` too, and no averages.
    fn restore(&mut self, launched: usize) -> Result<()> {
        let fresh = buckets(&self.state, self.elsewhere);
        let restored = fresh.into_iter().enumerate().map(|(index, mut bucket)| {
            let memory = bucket.bytes_mut(&*self.group)?;
            if self.elsewhere {
                return Ok(bucket); // The hook has its gradients.
            }
            let gradients = match index < launched {
                true => self.kept.get(index).map(Vec::as_slice),
                false => self.buckets.get(index).and_then(Bucket::bytes),
            };
            match gradients {
                Some(gradients) if memory.len() == gradients.len() => memory.copy_from_slice(gradients),
                _ => {
                    let cause = format!("the gradients of bucket {index} are lost");
                    return Err(Error::aborted(cause).with_remedy(LOST_REMEDY));
                }
            }
            Ok(bucket)
        });
        self.buckets = restored.collect::<Result<_>>()?;
        Ok(())
    }
}

/// Keeps the gradients of the bucket at `index`, which is launched next, in memory that is taken once.
pub(super) fn keep(kept: &mut Vec<Vec<u8>>, index: usize, gradients: &[u8]) -> Result<()> {
    if kept.len() <= index {
        kept.push(Vec::new());
    }
    let copy = &mut kept[index];
    copy.clear();
    copy.try_reserve_exact(gradients.len()).map_err(|error| {
        Error::out_of_memory(format!("no memory to keep {} bytes of gradients", gradients.len()))
            .with_source(error)
            .with_remedy(
                "start fewer workers on this host: each keeps a step's gradients, to be able to repeat it",
            )
    })?;
    copy.extend_from_slice(gradients);
    Ok(())
}

#[cfg(test)]
mod tests;
