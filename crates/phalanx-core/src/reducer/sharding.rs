//! Sharded averages, as ZeRO needs them: a reduce_scatter gives each rank the averages of the parameters that it owns, and
//! an all_gather gives all ranks the parameters that the owners have updated.
//!
//! Shards are whole parameters, not equal ranges of elements, so optimizers that look at a whole matrix stay correct.
//! Within a bucket gradients are ordered by owner. A reduce_scatter with counts then gives each rank its own, and the
//! all_gather works in the same memory: together they move the bytes of one all_reduce. The counts may be as unequal as
//! parameters are. Where ranks share memory the work is divided equally all the same; over TCP the largest count sets
//! the pace.
//!
//! Steps give the same bits as without shards if sums are added up in the same order. A ring of three or more ranks
//! adds up in an order that depends on the place in the bucket, and places differ, so there the results differ by
//! rounding.

use std::time::Instant;

use super::Reducer;
use super::hooks::BuiltInHook;
use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::trace::Track;

impl Reducer {
    /// From the next step on only its owner gets a parameter's average: buckets are reduced and scattered, which moves half
    /// of what an all_reduce does. All ranks call it together, between steps. It discards the averages of the last step.
    ///
    /// Within a bucket the gradients then stand by owner. A [hook](Self::register_hook) other than the plain average
    /// averages whole buckets as before. Ranks that share memory get the same bits as without it, and so do two ranks;
    /// otherwise a large bucket's elements may be added up in another order. In a [weighted step](Self::start_weighted) the
    /// bucket with the weights is averaged whole.
    ///
    /// # Errors
    /// On every rank, if the ranks' owners differ, or there is not one for each parameter; if the hook does not average over all ranks, or will
    /// not from some step on ([`PostLocalSgd`](super::hooks::PostLocalSgd)).
    pub fn shard(&mut self, owners: Vec<Rank>) -> Result<()> {
        self.check_here("shard")?;
        self.state.check_replayable(true, true)?;
        self.attempt(|reducer| match reducer.state.shard(owners)? {
            Some(order) => {
                let group = reducer.group.in_call(Caller::ZeroNew);
                reducer.lay_out(order, &*group)?;
                reducer.check_shards()
            }
            None => Ok(()),
        })
    }

    /// An error if averages are sharded, and the hook does not average over all ranks, or will not from some step on: a parameter would be updated by the
    /// gradients of its owner, and those of all other ranks would be lost. All ranks have the same hook.
    pub(super) fn check_shards(&self) -> Result<()> {
        let is_local = matches!(self.hook.built_in(), Some(BuiltInHook::PostLocalSgd(_)))
            || !self.hook.averages_over_all();
        if !self.state.is_sharded() || !is_local {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "averages are sharded, and the communication hook `{}` does not always average over all ranks: each parameter would be updated by \
             the gradients of its owner alone",
            self.hook.describe()
        ))
        .with_remedy("use an optimizer that is not sharded, or another hook"))
    }

    /// Whether the average of the parameter at `index` is this rank's.
    pub fn owns(&self, index: usize) -> bool {
        self.state.owns(index)
    }

    /// Exchanges parameters that each rank has updated for the parameters that it owns: [`parameter`](Self::parameter)
    /// then gives all. `give` calls what it gets with the elements of each parameter; of those that other ranks own none
    /// are looked at. All ranks call it together, after [`finish`](Self::finish); the averages are gone.
    ///
    /// They travel in the memory of the buckets.
    ///
    /// # Errors
    /// If nothing is sharded, a length is wrong, or the exchange fails. If the group is a [handle](crate::GroupHandle) that leads to another group by now.
    pub fn gather_parameters(
        &mut self,
        give: impl FnOnce(&mut dyn FnMut(usize, &[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let begin = Instant::now();
        self.state.begin_gather()?;
        self.attempt(|reducer| {
            reducer.check_group()?;
            give(&mut |index, bytes| reducer.put(index, bytes))?;
            let exchange = Instant::now();
            let meter = reducer.meters.plain.of(reducer.group.in_call(Caller::ZeroStep));
            reducer.buckets.iter_mut().try_for_each(|bucket| bucket.gather(&meter))?;
            for bucket in &mut reducer.buckets {
                while !bucket.advance(&meter)? {}
            }
            reducer.state.gathered();
            reducer.waited(exchange.elapsed());
            reducer.trace.complete(Track::Parameters, "all_gather", begin, Instant::now(), &[]);
            Ok(())
        })
    }

    fn put(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        let parameter = self.state.parameter(index)?;
        if !self.state.owns(index) {
            return Ok(());
        }
        if parameter.bytes() != bytes.len() {
            let (there, wanted) = (bytes.len(), parameter.bytes());
            let cause = format!("parameter {index}, {parameter}, came with {there} B, and has {wanted}");
            return Err(Error::invalid_argument(cause)
                .with_remedy("give the whole parameter, in the type with which the reducer was made"));
        }
        let (bucket, range) = self.state.slice_of(index);
        self.buckets[bucket].bytes_mut(&*self.group)?[range].copy_from_slice(bytes);
        Ok(())
    }

    /// The elements of the parameter at `index`, from [`gather_parameters`](Self::gather_parameters) to the next
    /// [`start`](Self::start).
    ///
    /// # Errors
    /// If it has not been gathered, and after a failure.
    pub fn parameter(&self, index: usize) -> Result<&[u8]> {
        self.check()?;
        let bytes = self.state.gathered_parameter(index).and_then(|slice| self.bytes(slice));
        bytes.ok_or_else(|| {
            Error::invalid_argument(format!("parameter {index} has not been gathered"))
                .with_remedy("call gather_parameters after the step, and read before the next start")
        })
    }
}
