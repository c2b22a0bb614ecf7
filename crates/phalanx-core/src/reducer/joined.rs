//! Whether all ranks still have the same replica after a `join` or in another group, and how a rank takes over what others have done.

use std::time::Instant;

use super::{Reducer, verify};
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::rank::Rank;

impl Reducer {
    /// Whether all ranks still have the same replica after the last [`join`](crate::join). After an uneven one a rank that took part to the end gives the
    /// others what it has ([`adopt`](Self::adopt)). The `join` of a model does that for this model alone: another one
    /// that trained in it would drift apart without an error. All ranks call it together; so does [`start`](Self::start).
    ///
    /// # Errors
    /// On every rank, and it ends the reducer: if an uneven `join` has ended since the last [`adopt`](Self::adopt), in which ranks made other numbers of
    /// steps. If the group is a [handle](crate::GroupHandle) that leads to another group by now, and the adapter has not called
    /// [`regrouped`](Self::regrouped).
    pub fn check_joined(&mut self) -> Result<()> {
        self.attempt(Self::compare_joined)
    }

    /// Whether the group is still the one whose ranks have compared their models. It communicates nothing, and ends nothing.
    ///
    /// # Errors
    /// If the group is a [handle](crate::GroupHandle) that leads to another one by now, and the adapter has not called [`regrouped`](Self::regrouped).
    pub fn check_group(&self) -> Result<()> {
        if self.binding.is_other(&*self.group) {
            return Err(Error::invalid_argument(
                "the GroupHandle leads to another group than when the reducer was made: the ranks of that group may have other models, or there is \
                 none to average with",
            )
            .with_remedy("make the Ddp after GroupHandle::rebind, or let a TrainState of this model change the group"));
        }
        Ok(())
    }

    pub(super) fn compare_joined(&mut self) -> Result<()> {
        self.check_group()?;
        let joins = self.group.uneven_joins();
        if std::mem::replace(&mut self.joins, joins) == joins {
            return Ok(());
        }
        let (least, most) = verify::extremes(&*self.group.in_call(Caller::Join), self.weights.steps)?;
        if least == most {
            return Ok(());
        }
        Err(Error::mismatch(format!(
            "a `join` has ended in which the ranks have made other numbers of steps with this model, {least} to {most} by now, and it was not the \
             `join` of this model: no rank has taken over the model of the one that made most, and replicas would drift apart"
        ))
        .with_remedy(
            "train one model in a `join`, by Ddp::join or TrainState::join; several models as one, with one Ddp; or give every rank as many batches",
        ))
    }

    /// Takes over how far rank `root` has come, after steps that this rank did not take part in: the buckets and what
    /// was learned of unused parameters. All ranks call it together, between steps.
    ///
    /// # Errors
    /// If the exchange fails, or `root` sends no order of these parameters. If optimizers have [differed](Self::stepped).
    pub fn adopt(&mut self, root: Rank) -> Result<()> {
        self.attempt(|reducer| {
            let group = reducer.group.in_call(Caller::Join);
            let progress = verify::share(&*group, root, &reducer.state.progress())?;
            let order = reducer.state.adopt(progress, root)?;
            // What the ranks with data have told has come: this exchange comes behind it.
            reducer.timer.receive(&*group, Instant::now())?;
            reducer.timer.restart();
            (reducer.weights.steps, reducer.joins) = (0, reducer.group.uneven_joins());
            reducer.hook.adopt(&*group, root)?;
            reducer.lay_out(order, &*group)
        })
    }
}
