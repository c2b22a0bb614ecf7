//! A bucket's memory: filled by gradients, lent to the group, given back averaged.

use std::sync::Arc;
use std::time::Instant;

use super::ParameterSpec;
use super::hooks::{CommHook, GradBucket, GradientPlace, Pending};
use super::plan::{BucketPlan, Plan};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::group::Communicator;
use crate::trace::Trace;

/// The memory of one bucket, which is taken once and used in every step.
pub(crate) struct Bucket {
    memory: Memory,
    gradients: Arc<[GradientPlace]>,
    counts: Option<Arc<[usize]>>,
    lane: String,
    ready: Option<Instant>,
    launched: Option<Instant>,
    done: Option<Instant>,
}

enum Memory {
    /// Shared with whoever looks at the averages in place.
    Here(Arc<Buffer>),
    InFlight(Pending),
    /// The operation that had the buffer failed.
    Lost,
}

impl Bucket {
    /// The bucket number `index` of `plan`.
    pub(crate) fn new(
        group: &dyn Communicator,
        index: usize,
        plan: &Plan,
        parameters: &[ParameterSpec],
    ) -> Result<Self> {
        let bucket = &plan.buckets[index];
        let place = |&parameter: &usize| {
            let place = plan.places[parameter];
            let elements = place.offset..place.offset + place.elements;
            GradientPlace { parameter, shape: parameters[parameter].shape.clone(), elements }
        };
        Ok(Self {
            memory: Memory::Here(Arc::new(group.alloc(bucket.dtype, bucket.elements)?)),
            gradients: bucket.parameters.iter().map(place).collect(),
            counts: bucket.counts.clone(),
            lane: format!("bucket {index}"),
            ready: None,
            launched: None,
            done: None,
        })
    }

    /// Its bytes; `None` while the group has them.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match &self.memory {
            Memory::Here(buffer) => Some(buffer.as_bytes()),
            _ => None,
        }
    }

    /// Its memory, to be looked at for as long as one likes; `None` while the group has it.
    pub(crate) fn shared(&self) -> Option<&Arc<Buffer>> {
        match &self.memory {
            Memory::Here(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Its bytes, to be filled; `None` while the group has them, or somebody looks at them.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Here(buffer) => Arc::get_mut(buffer).map(Buffer::as_bytes_mut),
            _ => None,
        }
    }

    /// A new step begins: memory at which somebody still looks stays theirs.
    pub(crate) fn reclaim(&mut self, group: &dyn Communicator) -> Result<()> {
        if let Memory::Here(buffer) = &mut self.memory
            && Arc::get_mut(buffer).is_none()
        {
            *buffer = Arc::new(group.alloc(buffer.dtype(), buffer.len())?);
        }
        Ok(())
    }

    /// All its gradients are there.
    pub(crate) fn mark_ready(&mut self, trace: &Trace) {
        if trace.is_enabled() {
            self.ready = Some(Instant::now());
        }
    }

    /// Starts to average it over the ranks: bucket `index` of `count`.
    pub(crate) fn launch(
        &mut self,
        hook: &mut dyn CommHook,
        group: &dyn Communicator,
        (index, count): (usize, usize),
    ) -> Result<()> {
        if group.trace().is_enabled() {
            self.launched = Some(Instant::now());
        }
        let (gradients, counts) = (self.gradients.clone(), self.counts.clone());
        self.send(|buffer| {
            let is_last = index + 1 == count;
            hook.start(group, GradBucket { index, is_last, buffer, gradients, counts })
        })
    }

    /// Starts to copy each rank's part of it to all others, if it is dealt out.
    pub(crate) fn gather(&mut self, group: &dyn Communicator) -> Result<()> {
        let Some(counts) = self.counts.clone() else { return Ok(()) };
        self.send(|buffer| group.all_gather_v_in_place_async(buffer, &counts).map(Pending::new))
    }

    fn send(&mut self, start: impl FnOnce(Buffer) -> Result<Pending>) -> Result<()> {
        match std::mem::replace(&mut self.memory, Memory::Lost) {
            Memory::Here(buffer) => {
                let buffer = Arc::try_unwrap(buffer)
                    .map_err(|_| Error::aborted("the bucket's memory is still in use"))?;
                self.memory = Memory::InFlight(start(buffer)?);
            }
            other => self.memory = other,
        }
        Ok(())
    }

    /// Notes the moment of completion, if it has come: asked between gradients, so that a trace shows more than the
    /// moment at which somebody waited.
    pub(crate) fn observe(&mut self) {
        if let Memory::InFlight(pending) = &self.memory
            && self.done.is_none()
            && pending.is_completed()
        {
            self.done = Some(Instant::now());
        }
    }

    /// Waits for the operation in flight; gives whether the bucket, which `plan` describes, is averaged and back.
    pub(crate) fn advance(&mut self, group: &dyn Communicator, plan: &BucketPlan) -> Result<bool> {
        self.observe();
        match std::mem::replace(&mut self.memory, Memory::Lost) {
            Memory::InFlight(pending) => match pending.advance(group)? {
                Ok(buffer) if buffer.dtype() == plan.dtype && buffer.len() == plan.elements => {
                    self.memory = Memory::Here(Arc::new(buffer));
                }
                Ok(buffer) => {
                    return Err(Error::invalid_argument(format!(
                        "the communication hook gave back {buffer:?} for a bucket of {} x {}",
                        plan.elements, plan.dtype
                    )));
                }
                Err(pending) => {
                    self.memory = Memory::InFlight(pending);
                    return Ok(false);
                }
            },
            other => self.memory = other,
        }
        Ok(true)
    }

    /// Writes the bucket's way through this step to the trace.
    pub(crate) fn note(&mut self, trace: &Trace, index: usize, plan: &BucketPlan) {
        let (ready, launched, done) = (self.ready.take(), self.launched.take(), self.done.take());
        if !trace.is_enabled() {
            return;
        }
        let args = [
            ("bucket", index.into()),
            ("bytes", plan.bytes().into()),
            ("parameters", plan.parameters.len().into()),
        ];
        if let Some(ready) = ready {
            trace.instant(self.lane.clone(), "ready", ready, &args);
        }
        if let Some(launched) = launched {
            trace.instant(self.lane.clone(), "launched", launched, &args);
            trace.complete(
                self.lane.clone(),
                if self.counts.is_some() { "reduce_scatter" } else { "all_reduce" },
                launched,
                done.unwrap_or_else(Instant::now),
                &args,
            );
        }
    }
}
