//! `gather`, `scatter`, and `all_gather` of different lengths.

use super::arguments::same_type;
use super::blocking::out_of_place;
use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::collective::Counts;
use crate::collective::Memory;
use crate::dtype::Element;
use crate::error::Result;
use crate::rank::Rank;
use crate::wire::frame::{Call, Operation};

impl ProcessGroup {
    /// Gathers `input`, of the same length on every rank, on the root: rank r's elements are at r·len in its `output`.
    /// The other ranks' `output` is not used, and may be empty.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather), and if `root` is not a rank of this group.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let root = self.member(root)?;
        if self.rank() == root {
            self.check_length("gather", "output", output.len(), "input", input.len())?;
        }
        let output = if self.rank() == root { output } else { &mut [] };
        self.run(
            self.call_of::<T>(Operation::Gather, input.len()).rooted_at(root),
            out_of_place(input, output),
        )
    }

    /// As [`gather`](Self::gather); [`Work::wait`] returns a buffer with all ranks' elements on the root, and an empty
    /// one on the others.
    ///
    /// # Errors
    /// At once if the group has failed, `root` is not in it or there is too little memory; otherwise from [`Work::wait`].
    pub fn gather_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        let root = self.member(root)?;
        let (dtype, elements) = (buffer.dtype(), buffer.len());
        let whole = if self.rank() == root { elements * self.world_size().count() } else { 0 };
        let call = self.call(Operation::Gather, dtype, elements).rooted_at(root);
        self.start_out_of_place(call, buffer, Buffer::try_zeroed(dtype, whole)?)
    }

    /// Distributes the root's `input`: rank r gets the elements from r·len on in `output`, of the same length on every
    /// rank. The other ranks' `input` is not read, and may be empty.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), if `root` is not a rank of this group, and if the root's `input` is not
    /// `world_size` times as long as `output`.
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let root = self.member(root)?;
        if self.rank() == root {
            self.check_length("scatter", "input", input.len(), "output", output.len())?;
        }
        self.run(
            self.call_of::<T>(Operation::Scatter, output.len()).rooted_at(root),
            out_of_place(input, output),
        )
    }

    /// As [`scatter`](Self::scatter); [`Work::wait`] returns `output`, with this rank's elements.
    ///
    /// # Errors
    /// At once if the group has failed, `root` is not in it, the types differ, or the root's `input` is not
    /// `world_size` times as long as `output`; otherwise from [`Work::wait`].
    pub fn scatter_async(&self, input: Buffer, output: Buffer, root: Rank) -> Result<Work> {
        let root = self.member(root)?;
        let (dtype, elements) = (output.dtype(), output.len());
        if self.rank() == root {
            same_type("scatter", &input, &output)?;
            self.check_length("scatter", "input", input.len(), "output", elements)?;
        }
        let call = self.call(Operation::Scatter, dtype, elements).rooted_at(root);
        self.start_out_of_place(call, input, output)
    }

    /// Gathers inputs of different lengths from all ranks. All ranks know the lengths: rank r brings `counts[r]`
    /// elements. They are in `output` in the order of the ranks.
    ///
    /// ```
    /// let group = phalanx::ProcessGroup::alone()?;
    /// let mut words = [0u8; 3];
    /// group.all_gather_v(b"abc", &mut words, &[3])?; // one count for each rank
    /// assert_eq!(&words, b"abc");
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); if there is not one count for each rank, `input` does not have this rank's
    /// count, or `output` does not have the sum of all; and if the ranks' counts differ.
    #[doc(alias = "allgatherv")]
    pub fn all_gather_v<T: Element>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<()> {
        let counts = Counts::new(counts, self.world_size())?;
        self.check_all_gather_v(input.len(), output.len(), &counts)?;
        let (input, output) = (bytemuck::cast_slice(input), bytemuck::cast_slice_mut(output));
        let memory = Memory::OutOfPlaceV { input, output, sent: &counts, received: &counts };
        self.run(self.call_of::<T>(Operation::AllGatherV, counts.total()), memory)
    }

    /// As [`all_gather_v`](Self::all_gather_v); [`Work::wait`] returns a buffer with all ranks' elements.
    ///
    /// # Errors
    /// At once if the group has failed, the counts do not fit or there is too little memory; otherwise from [`Work::wait`].
    pub fn all_gather_v_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        let counts = Counts::new(counts, self.world_size())?;
        self.check_all_gather_v(buffer.len(), counts.total(), &counts)?;
        let output = Buffer::try_zeroed(buffer.dtype(), counts.total())?;
        let call = self.call(Operation::AllGatherV, buffer.dtype(), counts.total());
        self.start_out_of_place_v(call, buffer, output, (counts.clone(), counts))
    }

    /// As [`all_gather_v_async`](Self::all_gather_v_async), but each rank's elements are already at their place in
    /// `buffer`, in the order of the ranks. [`Work::wait`] returns the buffer, with all ranks' elements.
    ///
    /// # Errors
    /// As [`all_gather_v_async`](Self::all_gather_v_async).
    pub fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        let parts = self.counts_of("all_gather_v", &buffer, counts)?;
        let call = self.call(Operation::AllGatherVInPlace, buffer.dtype(), buffer.len());
        self.start_in_place_v(call.in_parts(counts.iter().copied()), buffer, parts)
    }

    pub(super) fn start_in_place_v(&self, call: Call, mut buffer: Buffer, counts: Counts) -> Result<Work> {
        self.start_with(call, move |engine, timeout| {
            let memory = Memory::InPlaceV { data: buffer.as_bytes_mut(), counts: &counts };
            engine.collective(call, memory, timeout)?;
            Ok(buffer)
        })
    }
}
