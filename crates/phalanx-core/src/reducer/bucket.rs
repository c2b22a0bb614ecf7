//! A bucket's memory: filled by gradients, lent to the group, given back averaged.
//!
//! A communication hook averages every bucket, also in the default case, the plain all_reduce.
//!
//! Unless views are asked for, a bucket lends its memory to the averaged gradients, and uses it again when all of them
//! are dropped: allocating pages again costs time, and copies for all cost 6 % of an MLP's step. A program that still has some
//! in the next step keeps that memory, and the bucket takes other. So does Burn's Adam, whose moments can begin in the
//! first gradients.

use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use phalanx_proto::reducer::state::LOST_REMEDY;

use super::ParameterSpec;
use super::hooks::{CommHook, GradBucket, GradientPlace, Pending};
use super::plan::Plan;
use super::weights;
use crate::buffer::{Buffer, BufferKeeper, BufferPart};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::Communicator;
use crate::trace::{Trace, Track};

/// In so many steps a borrower may still have some of a bucket's memory when the next step begins. Then borrowers get copies: new memory
/// for the bucket in each step would cost more, and one gradient that is kept would keep a whole bucket. Optimizers keep
/// first gradients as the beginning of a moment.
const KEPT: u32 = 3;

/// One bucket. Its memory is taken when it is first filled; from then on it is used in every step, unless it is
/// [taken out](Self::take).
pub(crate) struct Bucket {
    memory: BucketMemory,
    /// How often the memory was still [lent](Self::lend) when it was needed again.
    kept: u32,
    dtype: DType,
    elements: usize,
    /// Whether the gradients lie elsewhere, and this has no memory for them.
    elsewhere: bool,
    gradients: Arc<[GradientPlace]>,
    counts: Option<Arc<[usize]>>,
    /// This rank's weight, which travels as one element more, behind the gradients.
    weight: Option<f64>,
    track: Track,
    ready: Option<Instant>,
    launched: Option<Instant>,
    done: Option<Instant>,
}

enum BucketMemory {
    None,
    Here(Buffer),
    /// Others have it; it is free when they have dropped all of it.
    Lent(BufferKeeper),
    InFlight(Pending),
    /// The operation that had the buffer failed, or the hook panicked.
    Lost,
}

impl Bucket {
    /// The bucket number `index` of `plan`.
    pub(crate) fn new(index: usize, plan: &Plan, parameters: &[ParameterSpec], elsewhere: bool) -> Self {
        let bucket = &plan.buckets[index];
        let place = |&parameter: &usize| {
            let place = plan.slices[parameter];
            let elements = place.offset..place.offset + place.elements;
            GradientPlace { parameter, shape: parameters[parameter].shape.clone(), elements }
        };
        Self {
            memory: BucketMemory::None,
            kept: 0,
            dtype: bucket.dtype,
            elements: bucket.elements,
            elsewhere,
            gradients: bucket.parameters.iter().map(place).collect(),
            counts: bucket.counts.clone(),
            weight: None,
            track: Track::Bucket(u32::try_from(index).unwrap_or(u32::MAX)),
            ready: None,
            launched: None,
            done: None,
        }
    }

    /// In the steps that follow it carries this rank's `weight`, or none.
    pub(crate) fn carry(&mut self, weight: Option<f64>) {
        self.weight = weight;
    }

    /// The average of all ranks' weights, when it is back.
    pub(crate) fn carried(&self) -> Option<f64> {
        self.weight.and(weights::read(self.bytes()?, self.dtype))
    }

    /// The elements that travel.
    fn travelling(&self) -> usize {
        self.elements + usize::from(self.weight.is_some())
    }

    /// The elements of its memory.
    fn len(&self) -> usize {
        if self.elsewhere { 0 } else { self.travelling() }
    }

    /// How it is sharded in this step: all ranks need the weights, so a bucket that carries them is not.
    fn shards(&self) -> Option<&Arc<[usize]>> {
        self.counts.as_ref().filter(|_| self.weight.is_none())
    }

    /// Its bytes; `None` while others have them, and before it is filled.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match &self.memory {
            BucketMemory::Here(buffer) => Some(buffer.as_bytes()),
            _ => None,
        }
    }

    /// Its bytes, to be filled. The memory is taken from `group`, if there is none.
    pub(crate) fn bytes_mut(&mut self, group: &dyn Communicator) -> Result<&mut [u8]> {
        self.buffer(group).map(Buffer::as_bytes_mut)
    }

    fn buffer(&mut self, group: &dyn Communicator) -> Result<&mut Buffer> {
        self.recall();
        let length = self.len();
        if let BucketMemory::Here(buffer) = &self.memory
            && buffer.len() != length
        {
            // A step with weights follows one without, or the other way round.
            self.memory = BucketMemory::None;
        }
        if let BucketMemory::None = self.memory {
            self.memory = BucketMemory::Here(match self.elsewhere {
                true => Buffer::try_zeroed(self.dtype, length)?,
                false => group.alloc(self.dtype, length)?,
            });
        }
        match &mut self.memory {
            BucketMemory::Here(buffer) => Ok(buffer),
            _ => Err(Error::aborted("the memory of a bucket of gradients is still in use")
                .with_remedy(LOST_REMEDY)),
        }
    }

    /// Divides the averages in it by `divisor`.
    pub(crate) fn divide(&mut self, group: &dyn Communicator, divisor: f64) -> Result<()> {
        weights::divide(self.buffer(group)?, divisor)
    }

    /// Takes the memory out: the next step takes other.
    pub(crate) fn take(&mut self) -> Option<Buffer> {
        match std::mem::replace(&mut self.memory, BucketMemory::None) {
            BucketMemory::Here(buffer) => Some(buffer),
            other => {
                self.memory = other;
                None
            }
        }
    }

    /// Gives the parts of its memory at `places` away, until all of them are dropped; nothing if it has none. If they often
    /// are not when the next step needs it, this gives copies.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn lend(&mut self, places: &[Range<usize>]) -> Result<Vec<BufferPart>> {
        if self.kept >= KEPT {
            let bytes = self.bytes().unwrap_or_default();
            let mut copies = Vec::with_capacity(places.len());
            for bytes in places.iter().filter_map(|place| bytes.get(place.clone())) {
                copies.extend(Buffer::try_from_slice(bytes)?.split(iter::once(0..bytes.len())));
            }
            return Ok(copies);
        }
        let Some(mut buffer) = self.take() else { return Ok(Vec::new()) };
        self.memory = BucketMemory::Lent(buffer.keeper());
        Ok(buffer.split(places.iter().cloned()))
    }

    /// Memory that was lent is this bucket's again if it is free; otherwise it is left to its borrower.
    fn recall(&mut self) {
        self.memory = match std::mem::replace(&mut self.memory, BucketMemory::None) {
            BucketMemory::Lent(keeper) => match keeper.reclaim() {
                Ok(buffer) => BucketMemory::Here(buffer),
                Err(_) => {
                    self.kept += 1;
                    BucketMemory::None
                }
            },
            other => other,
        };
    }

    /// Gives its memory back between steps, with what is in it.
    pub(crate) fn release(&mut self) {
        if let BucketMemory::Here(_) | BucketMemory::Lent(_) = self.memory {
            self.memory = BucketMemory::None;
        }
    }

    /// Keeps its memory when it goes, if it is here; see [`Buffer::keeper`].
    pub(crate) fn keeper(&mut self) -> Option<BufferKeeper> {
        match &mut self.memory {
            BucketMemory::Here(buffer) => Some(buffer.keeper()),
            _ => None,
        }
    }

    /// All its gradients are there.
    pub(crate) fn mark_ready(&mut self, trace: &Trace) {
        if trace.is_enabled() {
            self.ready = Some(Instant::now());
        }
    }

    /// Starts to average it over the ranks: bucket `index` of `count`, which may be averaged again if the step is kept.
    pub(crate) fn launch(
        &mut self,
        hook: &mut dyn CommHook,
        group: &dyn Communicator,
        (index, count): (usize, usize),
        keeps: bool,
    ) -> Result<()> {
        if group.trace().is_enabled() {
            self.launched = Some(Instant::now());
        }
        if let (Some(weight), BucketMemory::Here(buffer)) = (self.weight, &mut self.memory) {
            weights::write(buffer.as_bytes_mut(), self.dtype, weight);
        }
        let (gradients, counts) = (self.gradients.clone(), self.shards().cloned());
        self.send(|buffer| {
            let is_last = index + 1 == count;
            hook.start(group, GradBucket { index, is_last, buffer, gradients, keeps, counts })
        })
    }

    /// Starts to copy each rank's part of it to all others, if the bucket is sharded.
    pub(crate) fn gather(&mut self, group: &dyn Communicator) -> Result<()> {
        let Some(counts) = &self.counts else { return Ok(()) };
        let mut counts = counts.to_vec();
        if let Some(last) = counts.last_mut() {
            *last += self.len() - self.elements; // The weight's place, which then holds nothing.
        }
        // A rank that has no part in it has not filled it.
        self.bytes_mut(group)?;
        self.send(|buffer| group.all_gather_v_in_place_async(buffer, &counts).map(Pending::new))
    }

    fn send(&mut self, start: impl FnOnce(Buffer) -> Result<Pending>) -> Result<()> {
        match std::mem::replace(&mut self.memory, BucketMemory::Lost) {
            BucketMemory::Here(buffer) => self.memory = BucketMemory::InFlight(start(buffer)?),
            other => self.memory = other,
        }
        Ok(())
    }

    /// Notes the moment of completion, if it has come: asked between gradients, so that a trace shows more than the
    /// moment at which a thread waited.
    pub(crate) fn observe(&mut self) {
        if let BucketMemory::InFlight(pending) = &self.memory
            && self.done.is_none()
            && pending.is_completed()
        {
            self.done = Some(Instant::now());
        }
    }

    /// Waits for the operation in flight; gives whether the bucket is averaged and back.
    pub(crate) fn advance(&mut self, group: &dyn Communicator) -> Result<bool> {
        self.observe();
        match std::mem::replace(&mut self.memory, BucketMemory::Lost) {
            BucketMemory::InFlight(pending) => match pending.advance(group)? {
                Ok(buffer) if buffer.dtype() == self.dtype && buffer.len() == self.len() => {
                    self.memory = BucketMemory::Here(buffer);
                }
                Ok(buffer) => {
                    return Err(Error::invalid_argument(format!(
                        "the communication hook gave back {buffer:?} for a bucket of {} x {}",
                        self.len(),
                        self.dtype
                    ))
                    .with_remedy("let the hook give back a buffer of the bucket's type and length"));
                }
                Err(pending) => {
                    self.memory = BucketMemory::InFlight(pending);
                    return Ok(false);
                }
            },
            BucketMemory::Lost => {
                return Err(Error::aborted("the gradients of a bucket are lost").with_remedy(LOST_REMEDY));
            }
            other => self.memory = other,
        }
        Ok(true)
    }

    /// Writes the bucket's way through this step to the trace.
    pub(crate) fn note(&mut self, trace: &Trace, index: usize) {
        let (ready, launched, done) = (self.ready.take(), self.launched.take(), self.done.take());
        if !trace.is_enabled() {
            return;
        }
        let args = [
            ("bucket", index.into()),
            ("bytes", (self.travelling() * self.dtype.size()).into()),
            ("parameters", self.gradients.len().into()),
        ];
        if let Some(ready) = ready {
            trace.instant(self.track, "ready", ready, &args);
        }
        if let Some(launched) = launched {
            trace.instant(self.track, "launched", launched, &args);
            trace.complete(
                self.track,
                if self.shards().is_some() { "reduce_scatter" } else { "all_reduce" },
                launched,
                done.unwrap_or_else(Instant::now),
                &args,
            );
        }
    }
}
