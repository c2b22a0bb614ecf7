//! A barrier that reports which ranks are missing.

use super::{Domain, compare, encoded_call, watch};
use crate::deadline::{Deadline, Patience};
use crate::error::{Error, Result};
use crate::rank::{Rank, Sequence};
use crate::wire::frame::Call;

impl Domain {
    /// Two barriers. Rank 0 waits for the first until `deadline`. If ranks are missing, it does not enter the second,
    /// and tells all which are missing. The others wait until `patience`.
    pub(crate) fn monitored_barrier(
        &mut self,
        call: Call,
        sequence: Sequence,
        deadline: Deadline,
        patience: Deadline,
    ) -> Result<()> {
        let (members, rank, health, encoded) =
            (&*self.members, self.rank, &*self.health, encoded_call::encode(&call));
        for deadline in [if rank.is_main() { deadline } else { patience }, patience] {
            let patience = Patience::from(deadline);
            let mut watch = |missing: usize| watch(health, members[missing], &patience);
            let met = self.control_block.small(encoded, &[], &mut watch).and_then(|slots| {
                let check =
                    |index| compare(rank, call, sequence, members[index], &encoded, slots.call(index));
                (0..members.len()).try_for_each(check)
            });
            if met.as_ref().is_err_and(|error| error.is_timeout() && !health.has_failed()) {
                let missing: Vec<_> = self.control_block.missing().map(|index| members[index]).collect();
                return absent(&missing, members.len()).map_or(met, Err);
            }
            met?;
        }
        Ok(())
    }
}

/// The error for ranks that are missing; None if all have come by now.
pub(crate) fn absent(missing: &[Rank], world: usize) -> Option<Error> {
    const SHOWN: usize = 64;
    let first = *missing.first()?;
    let names: Vec<_> = missing.iter().take(SHOWN).map(Rank::to_string).collect();
    let (ranks, have) = if missing.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
    let more = missing.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let error = Error::timeout(format!(
        "{ranks} {}{more} of {world} {have} not reached the barrier in time",
        names.join(", ")
    ));
    let remedy = "are they stuck, or far behind, or have they taken another path through the program?";
    Some(error.with_peer(first).with_remedy(remedy))
}
