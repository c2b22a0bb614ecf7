//! The batches of one rank.

use anyhow::Result;
use burn::tensor::Device;

use crate::tasks::{Batch, Part, Task};

/// The examples at given indices, some at a time.
pub struct Batches<'a, T> {
    task: &'a T,
    part: Part,
    indices: Vec<usize>,
    size: usize,
    next: usize,
    device: Device,
}

impl<'a, T: Task> Batches<'a, T> {
    /// The examples of `part` at `indices`, `size` at a time; the last batch may be smaller.
    pub fn new(task: &'a T, part: Part, indices: Vec<usize>, size: usize, device: &Device) -> Self {
        Self { task, part, indices, size: size.max(1), next: 0, device: device.clone() }
    }

    /// Without the first `batches`, which were taken before.
    #[must_use]
    pub fn after(mut self, batches: usize) -> Self {
        self.next = batches.saturating_mul(self.size);
        self
    }
}

impl<T: Task> Iterator for Batches<'_, T> {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Result<Batch>> {
        let left = self.indices.get(self.next..).filter(|left| !left.is_empty())?;
        let chosen = &left[..self.size.min(left.len())];
        self.next += chosen.len();
        Some(self.task.batch(self.part, chosen, &self.device))
    }
}
