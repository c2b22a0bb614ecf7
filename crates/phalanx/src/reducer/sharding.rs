//! Sharded averages, as ZeRO needs them: a reduce_scatter gives each rank the averages of the parameters that it owns, and
//! an all_gather gives all ranks the parameters that the owners have updated.

use std::time::Instant;

use super::{Phase, Reducer};
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::group::Communicator;
use crate::rank::Rank;
use crate::trace::Lane;

impl Reducer {
    /// From the next step on only its owner gets a parameter's average: buckets are reduced and scattered, which moves half
    /// of what an all_reduce does. All ranks call it together, between steps. It discards the averages of the last step.
    ///
    /// Within a bucket the gradients then stand by owner. A [hook](Self::register_hook) other than the plain average
    /// averages whole buckets as before. Ranks that share memory get the same bits as without it, and so do two ranks;
    /// otherwise a large bucket's elements may be added up in another order.
    ///
    /// # Errors
    /// On every rank, if the ranks' owners differ, or there is not one for each parameter.
    pub fn shard(&mut self, owners: Vec<Rank>) -> Result<()> {
        self.check_failure()?;
        if self.replay.is_some() {
            self.check_repeatable(true, true)?;
        }
        if self.group.world_size().get() == 1 {
            return Ok(());
        }
        self.lay_out_for(owners).map_err(|error| self.fail(error))
    }

    fn lay_out_for(&mut self, owners: Vec<Rank>) -> Result<()> {
        if matches!(self.phase, Phase::Backward { .. }) {
            return Err(Error::invalid_argument("parameters cannot be sharded during a backward pass"));
        }
        let (count, world) = (self.parameters.len(), self.group.world_size());
        if owners.len() != count || owners.iter().any(|owner| owner.index() >= world.count()) {
            return Err(Error::invalid_argument(format!(
                "there are {} owners for {count} parameters, of which each needs one of {world} ranks",
                owners.len()
            )));
        }
        self.owners = Some(owners);
        self.phase = Phase::New;
        let group = self.group.in_call(Caller::ZeroNew);
        self.lay_out(self.order.clone(), &*group)
    }

    /// Is the average of the parameter at `index` this rank's?
    pub fn owns(&self, index: usize) -> bool {
        let owner = self.owners.as_ref().and_then(|owners| owners.get(index));
        owner.is_none_or(|owner| *owner == self.group.rank())
    }

    /// Exchanges parameters that each rank has updated for the parameters that it owns: [`parameter`](Self::parameter)
    /// then gives all. `give` calls what it gets with the elements of each parameter; of those that other ranks own none
    /// are looked at. All ranks call it together, after [`finish`](Self::finish); the averages are gone.
    ///
    /// They travel in the memory of the buckets.
    ///
    /// # Errors
    /// If nothing is sharded, a length is wrong, or the exchange fails.
    pub fn gather_parameters(
        &mut self,
        give: impl FnOnce(&mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        self.check_failure()?;
        if self.owners.is_none() || matches!(self.phase, Phase::Backward { .. }) {
            return Err(Error::invalid_argument(
                "parameters are gathered between steps, after they have been sharded",
            ));
        }
        self.gather(give).map_err(|error| self.fail(error))
    }

    fn gather(
        &mut self,
        give: impl FnOnce(&mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let begin = Instant::now();
        self.phase = Phase::New;
        give(&mut |index, bytes| self.put(index, bytes))?;
        let meter = self.meter.in_call(Caller::ZeroStep);
        self.buckets.iter_mut().try_for_each(|bucket| bucket.gather(&*meter))?;
        for (bucket, plan) in self.buckets.iter_mut().zip(&self.plan.buckets) {
            while !bucket.advance(&*meter, plan)? {}
        }
        self.phase = Phase::Gathered;
        self.trace.complete(Lane::Parameters, "all_gather", begin, Instant::now(), &[]);
        Ok(())
    }

    fn put(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        let Some(&place) = self.plan.places.get(index) else { return Err(self.no_such_parameter(index)) };
        if !self.owns(index) {
            return Ok(());
        }
        let range = place.bytes(self.plan.buckets[place.bucket].dtype);
        let memory = &mut self.buckets[place.bucket].bytes_mut(&*self.group)?[range];
        if memory.len() != bytes.len() {
            let cause = format!("parameter {index}, {}, came with {} B", self.parameters[index], bytes.len());
            return Err(Error::invalid_argument(cause));
        }
        memory.copy_from_slice(bytes);
        Ok(())
    }

    /// The elements of the parameter at `index`, from [`gather_parameters`](Self::gather_parameters) to the next
    /// [`start`](Self::start).
    pub fn parameter(&self, index: usize) -> Result<&[u8]> {
        self.check_failure()?;
        let place = self.plan.places.get(index).filter(|_| self.phase == Phase::Gathered);
        let bytes = place.and_then(|place| {
            let bucket = self.buckets.get(place.bucket)?;
            bucket.bytes()?.get(place.bytes(self.plan.buckets[place.bucket].dtype))
        });
        bytes.ok_or_else(|| Error::invalid_argument(format!("parameter {index} has not been gathered")))
    }
}
