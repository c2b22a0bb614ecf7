//! `all_to_all`, of blocks of the same length and of different lengths.

use super::blocking::out_of_place;
use super::{ProcessGroup, Work};
use crate::buffer::Buffer;
use crate::collective::Counts;
use crate::collective::Memory;
use crate::dtype::Element;
use crate::error::Result;
use crate::wire::frame::Operation;

impl ProcessGroup {
    /// Exchanges blocks among all ranks: the r-th of `world_size` equal parts of `input` goes to rank r, and the r-th
    /// of `output` comes from rank r.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if `input` and `output` differ in length or cannot be divided evenly.
    #[doc(alias("alltoall", "all_to_all_single"))]
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.check_all_to_all(input.len(), output.len())?;
        self.run(self.call_of::<T>(Operation::AllToAll, input.len()), out_of_place(input, output))
    }

    /// As [`all_to_all`](Self::all_to_all); [`Work::wait`] returns a buffer with a block from each rank.
    ///
    /// # Errors
    /// At once if the group has failed, the buffer cannot be divided evenly or there is too little memory; otherwise from [`Work::wait`].
    pub fn all_to_all_async(&self, buffer: Buffer) -> Result<Work> {
        self.check_all_to_all(buffer.len(), buffer.len())?;
        let output = Buffer::try_zeroed(buffer.dtype(), buffer.len())?;
        let call = self.call(Operation::AllToAll, buffer.dtype(), buffer.len());
        self.start_out_of_place(call, buffer, output)
    }

    /// As [`all_to_all`](Self::all_to_all), with blocks of different lengths: `sent[r]` elements of `input` go to rank
    /// r, and `received[r]` elements of `output` come from rank r, in the order of the ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); if there is not one count for each rank, or the lengths of `input` and
    /// `output` are not the sums; and if a rank sends another number of elements than its peer expects.
    #[doc(alias = "alltoallv")]
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        sent: &[usize],
        output: &mut [T],
        received: &[usize],
    ) -> Result<()> {
        let world = self.world_size();
        let (sent, received) = (Counts::new(sent, world)?, Counts::new(received, world)?);
        self.check_all_to_all_v((input.len(), &sent), (output.len(), &received))?;
        let (input, output) = (bytemuck::cast_slice(input), bytemuck::cast_slice_mut(output));
        self.run(
            self.call_of::<T>(Operation::AllToAllV, 0),
            Memory::OutOfPlaceV { input, output, sent: &sent, received: &received },
        )
    }

    /// As [`all_to_all_v`](Self::all_to_all_v); [`Work::wait`] returns a buffer with a block from each rank.
    ///
    /// # Errors
    /// At once if the group has failed, the counts do not fit or there is too little memory; otherwise from [`Work::wait`].
    pub fn all_to_all_v_async(&self, buffer: Buffer, sent: &[usize], received: &[usize]) -> Result<Work> {
        let world = self.world_size();
        let (sent, received) = (Counts::new(sent, world)?, Counts::new(received, world)?);
        self.check_all_to_all_v((buffer.len(), &sent), (received.total(), &received))?;
        let output = Buffer::try_zeroed(buffer.dtype(), received.total())?;
        let call = self.call(Operation::AllToAllV, buffer.dtype(), 0);
        self.start_out_of_place_v(call, buffer, output, (sent, received))
    }
}
