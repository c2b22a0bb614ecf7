//! A bucket's memory: filled by gradients, lent to the group, given back averaged.

use std::time::Instant;

use super::plan::BucketPlan;
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::error::Result;
use crate::group::{Communicator, Work};
use crate::trace::Trace;

/// The memory of one bucket, which is taken once and used in every step.
pub(crate) struct Bucket {
    memory: Memory,
    lane: String,
    ready: Option<Instant>,
    launched: Option<Instant>,
    done: Option<Instant>,
}

enum Memory {
    Here(Buffer),
    InFlight(Work),
    /// The operation that had the buffer failed.
    Lost,
}

impl Bucket {
    pub(crate) fn new(group: &dyn Communicator, index: usize, plan: &BucketPlan) -> Result<Self> {
        Ok(Self {
            memory: Memory::Here(group.alloc(plan.dtype, plan.elements)?),
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

    /// Its bytes, to be filled; `None` while the group has them.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Here(buffer) => Some(buffer.as_bytes_mut()),
            _ => None,
        }
    }

    /// All its gradients are there.
    pub(crate) fn mark_ready(&mut self, trace: &Trace) {
        if trace.is_enabled() {
            self.ready = Some(Instant::now());
        }
    }

    /// Starts to average it over the ranks.
    pub(crate) fn launch(&mut self, group: &dyn Communicator, trace: &Trace) -> Result<()> {
        if trace.is_enabled() {
            self.launched = Some(Instant::now());
        }
        match std::mem::replace(&mut self.memory, Memory::Lost) {
            Memory::Here(buffer) => {
                self.memory = Memory::InFlight(group.all_reduce_async(buffer, ReduceOp::Avg)?);
            }
            other => self.memory = other,
        }
        Ok(())
    }

    /// Notes the moment of completion, if it has come: asked between gradients, so that a trace shows more than the
    /// moment at which somebody waited.
    pub(crate) fn observe(&mut self) {
        if let Memory::InFlight(work) = &self.memory
            && self.done.is_none()
            && work.is_completed()
        {
            self.done = Some(Instant::now());
        }
    }

    /// Waits until it is averaged, and takes the memory back.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.observe();
        match std::mem::replace(&mut self.memory, Memory::Lost) {
            Memory::InFlight(work) => self.memory = Memory::Here(work.wait()?),
            other => self.memory = other,
        }
        Ok(())
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
                "all_reduce",
                launched,
                done.unwrap_or_else(Instant::now),
                &args,
            );
        }
    }
}
