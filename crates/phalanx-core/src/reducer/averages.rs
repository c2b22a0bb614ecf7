//! The averaged gradients, from the end of a backward pass to the next step: read, lent, or taken out of the buckets.

use std::ops::Range;

use super::Reducer;
use super::bucket::Bucket;
use crate::buffer::{BufferKeeper, BufferPart};
use crate::error::Result;

impl Reducer {
    /// The averaged gradient of the parameter at `index`, from [`finish`](Self::finish) to the next
    /// [`start`](Self::start); `None` if no rank had a gradient for it, or it is another rank's.
    ///
    /// # Errors
    /// Before [`finish`](Self::finish), and after a failure; if there is no such parameter; if gradients lie [elsewhere](Self::elsewhere).
    pub fn gradient(&self, index: usize) -> Result<Option<&[u8]>> {
        self.check_here("gradient")?;
        Ok(self.state.average(index)?.and_then(|slice| self.bytes(slice)))
    }

    /// Takes the averaged gradients out of the buckets, without a copy: for each parameter what
    /// [`gradient`](Self::gradient) gives, in the bucket's own memory, for whoever gets it to write to and to free. The
    /// next step takes new memory when it needs it.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    pub fn take_gradients(&mut self) -> Result<Vec<Option<BufferPart>>> {
        self.hand_out(|bucket, places| Ok(bucket.take().map_or_else(Vec::new, |memory| memory.split(places))))
    }

    /// Like [`take_gradients`](Self::take_gradients), but a bucket uses its memory again when all gradients in it are
    /// dropped. If some are not when the next step needs it, that step takes new memory. After a bucket has done so three
    /// times, it gives copies.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient). If there is no memory for the copies, which ends the reducer.
    pub fn lend_gradients(&mut self) -> Result<Vec<Option<BufferPart>>> {
        self.hand_out(|bucket, places| bucket.lend(&places))
    }

    /// `parts` gives those of a bucket at the places of its gradients, or nothing.
    fn hand_out(
        &mut self,
        parts: impl Fn(&mut Bucket, Vec<Range<usize>>) -> Result<Vec<BufferPart>>,
    ) -> Result<Vec<Option<BufferPart>>> {
        self.check_here("take_gradients and lend_gradients")?;
        let present = (0..self.parameters().len()).map(|index| Ok(self.state.average(index)?.is_some()));
        let present = present.collect::<Result<Vec<_>>>()?;
        let mut gradients: Vec<Option<BufferPart>> = present.iter().map(|_| None).collect();
        for (bucket, plan) in self.buckets.iter_mut().zip(&self.state.plan().buckets) {
            let members = || plan.parameters.iter().copied().filter(|&member| present[member]);
            let places = members().map(|member| self.state.slice_of(member).1).collect();
            match parts(bucket, places) {
                Ok(parts) => members().zip(parts).for_each(|(member, part)| gradients[member] = Some(part)),
                // The other ranks have their averages, and would wait for this rank in the next step.
                Err(error) => return Err(self.abort(error)),
            }
        }
        self.state.emptied();
        Ok(gradients)
    }

    /// The averaged gradient of the parameter at `index`, as [`gradient`](Self::gradient) gives it, for a view that outlives
    /// the bucket: its bytes, and what keeps their memory, with its content and at its address. Steps go on to use the
    /// memory: a view is that of the parameter's gradient from step to step (PyTorch's `gradient_as_bucket_view`), and a
    /// gradient that backward has written there needs no copy in [`ready_with`](Self::ready_with). Nobody else uses the
    /// memory between steps, nor during backward until the parameter's gradient is reported.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient); if the group has no memory left.
    pub fn gradient_view(&mut self, index: usize) -> Result<Option<(&mut [u8], BufferKeeper)>> {
        self.check_here("gradient_view")?;
        let Some((bucket, range)) = self.state.average(index)? else { return Ok(None) };
        let Some(bucket) = self.buckets.get_mut(bucket) else { return Ok(None) };
        let Some(keeper) = bucket.keeper() else { return Ok(None) };
        Ok(bucket.bytes_mut(&*self.group)?.get_mut(range).map(|bytes| (bytes, keeper)))
    }

    /// Gives the buckets' memory back between steps, with what is in it: the next step takes new memory when it needs it.
    pub fn release(&mut self) {
        if !self.state.in_backward() {
            self.buckets.iter_mut().for_each(Bucket::release);
            self.state.emptied();
        }
    }
}
