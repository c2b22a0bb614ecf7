//! How buckets are laid out: the order of gradients, what is taken over from another rank, and ZeRO's shards.

use serde::{Deserialize, Serialize};

use super::{FirstStep, Phase, ReducerState, UnusedParameters};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::reducer::plan::Plan;
use crate::world_size::WorldSize;

/// What a rank that has taken part in every step tells the others; see `Reducer::adopt`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Progress {
    order: Vec<usize>,
    arrival: Vec<usize>,
    first_step: FirstStep,
    used: Vec<bool>,
}

impl ReducerState {
    /// The buckets for gradients that come in this `order`, which another rank may have sent.
    pub fn plan_for(&self, order: &[usize]) -> Result<Plan> {
        if !is_permutation(order, self.parameters.len()) {
            let cause = "a rank sent an order of gradients that is no order of the parameters";
            return Err(Error::malformed(cause));
        }
        let plan = Plan::new(&self.parameters, order, &self.limits);
        Ok(match &self.owners {
            Some(owners) => plan.sharded(&self.parameters, owners, self.world),
            None => plan,
        })
    }

    /// The buckets are those of `plan`, for this `order`; gives whether they are others than before.
    pub fn set_plan(&mut self, order: Vec<usize>, plan: Plan) -> bool {
        // What is kept of the last step fits the last plan.
        (self.order, self.ended) = (order, false);
        let changed = plan != self.plan;
        self.plan = plan;
        changed
    }

    /// How far this rank has come, for one that takes over.
    pub fn progress(&self) -> Progress {
        let (order, arrival, used) = (self.order.clone(), self.arrival.clone(), self.used.clone());
        Progress { order, arrival, first_step: self.first_step, used }
    }

    /// Takes over how far another rank has come; gives the order that its buckets are made from.
    pub fn adopt(&mut self, progress: Progress, from: Rank) -> Result<Vec<usize>> {
        let Progress { order, arrival, first_step, used } = progress;
        let count = self.parameters.len();
        if used.len() != count || !(arrival.is_empty() || is_permutation(&arrival, count)) {
            return Err(Error::malformed(format!("rank {from} sent the progress of another model")));
        }
        let missed = self.first_step == FirstStep::Ahead && first_step != FirstStep::Ahead;
        if missed && self.unused_parameters == UnusedParameters::Learn {
            // This rank has seen no step: it must use the parameters that the others use, or report an error.
            self.unused = (0..count).filter(|&index| !used[index]).collect();
            self.unused_parameters = UnusedParameters::Known;
        }
        (self.arrival, self.first_step, self.used) = (arrival, first_step, used);
        Ok(order)
    }

    /// Shards averages by `owners`, one for each parameter; gives the order to build the buckets from anew. In a world of one
    /// there is nothing to shard.
    pub fn shard(&mut self, owners: Vec<Rank>) -> Result<Option<Vec<usize>>> {
        if self.world == WorldSize::ONE {
            return Ok(None);
        }
        if self.in_backward() {
            return Err(Error::invalid_argument("parameters cannot be sharded during a backward pass")
                .with_remedy("shard them between steps"));
        }
        let (count, world) = (self.parameters.len(), self.world);
        if owners.len() != count || owners.iter().any(|owner| owner.index() >= world.count()) {
            return Err(Error::invalid_argument(format!(
                "there are {} owners for {count} parameters, of which each needs one of {world} ranks",
                owners.len()
            ))
            .with_remedy("name a rank of the group for each parameter"));
        }
        self.owners = Some(owners);
        self.emptied();
        Ok(Some(self.order.clone()))
    }

    /// Whether each average is one rank's.
    pub fn is_sharded(&self) -> bool {
        self.owners.is_some()
    }

    /// Whether the average of the parameter at `index` is this rank's.
    pub fn owns(&self, index: usize) -> bool {
        let owner = self.owners.as_ref().and_then(|owners| owners.get(index));
        owner.is_none_or(|owner| *owner == self.rank)
    }

    /// Parameters take the place of averages.
    pub fn begin_gather(&mut self) -> Result<()> {
        self.check()?;
        if self.owners.is_none() || self.in_backward() {
            let cause = "there is nothing to gather: parameters are not sharded, or a step is under way";
            return Err(
                Error::invalid_argument(cause).with_remedy("shard them first, and gather between steps")
            );
        }
        self.emptied();
        Ok(())
    }

    /// All parameters are in their buckets.
    pub fn gathered(&mut self) {
        self.phase = Phase::Gathered;
    }
}

fn is_permutation(order: &[usize], count: usize) -> bool {
    let mut seen = vec![false; count];
    order.len() == count
        && order.iter().all(|&index| seen.get_mut(index).is_some_and(|seen| !std::mem::replace(seen, true)))
}
