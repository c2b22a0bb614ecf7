//! Checks of the lengths and types of collectives' arguments.

use super::ProcessGroup;
use crate::buffer::Buffer;
use crate::collective::Counts;
use crate::error::{Error, Result};

impl ProcessGroup {
    pub(super) fn check_length(
        &self,
        operation: &str,
        whole: &str,
        length: usize,
        part: &str,
        share: usize,
    ) -> Result<()> {
        let world = self.world_size();
        if share.checked_mul(world.count()) == Some(length) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{operation}: with {world} ranks the {whole} must be {world} times as long as the {part}; it has \
             {length} elements, the {part} {share}"
        )))
    }

    pub(super) fn check_all_gather_v(&self, input: usize, output: usize, counts: &Counts) -> Result<()> {
        let own = counts.of(self.rank().index()).len();
        check_sum("all_gather_v", "input", input, "this rank's count is", own)?;
        check_sum("all_gather_v", "output", output, "the counts add up to", counts.total())
    }

    pub(super) fn counts_of(&self, operation: &str, buffer: &Buffer, counts: &[usize]) -> Result<Counts> {
        let counts = Counts::new(counts, self.world_size())?;
        check_sum(operation, "buffer", buffer.len(), "the counts add up to", counts.total())?;
        Ok(counts)
    }

    pub(super) fn check_all_to_all(&self, input: usize, output: usize) -> Result<()> {
        let share = input / self.world_size().count();
        self.check_length("all_to_all", "input", input, "part for each rank", share)?;
        check_sum("all_to_all", "output", output, "the input has", input)
    }

    pub(super) fn check_all_to_all_v(
        &self,
        (input, sent): (usize, &Counts),
        (output, received): (usize, &Counts),
    ) -> Result<()> {
        check_sum("all_to_all_v", "input", input, "the counts add up to", sent.total())?;
        check_sum("all_to_all_v", "output", output, "the counts add up to", received.total())?;
        let own = |counts: &Counts| counts.of(self.rank().index()).len();
        check_sum("all_to_all_v", "block for this rank itself", own(sent), "it expects", own(received))
    }
}

pub(super) fn check_sum(
    operation: &str,
    memory: &str,
    length: usize,
    wanted: &str,
    sum: usize,
) -> Result<()> {
    if length == sum {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("{operation}: the {memory} has {length} elements, {wanted} {sum}")))
}

pub(super) fn same_type(operation: &str, one: &Buffer, other: &Buffer) -> Result<()> {
    if one.dtype() == other.dtype() {
        return Ok(());
    }
    let cause = format!("{operation}: one buffer holds {}, another {}", one.dtype(), other.dtype());
    Err(Error::invalid_argument(cause).with_remedy("give buffers of one type to a call"))
}
