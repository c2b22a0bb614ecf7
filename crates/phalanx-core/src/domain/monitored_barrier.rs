//! A barrier that reports which ranks are missing.

use super::{Domain, Peers};
use crate::deadline::{Deadline, Timeout};
use crate::error::{Error, Result};
use crate::rank::{Rank, Sequence};
use crate::wire::frame::Call;

impl Domain {
    /// Two barriers. Rank 0 waits for the first until `deadline`. If ranks are missing, it does not enter the second,
    /// and tells all which are missing. The others wait until `others_deadline`.
    pub(crate) fn monitored_barrier(
        &mut self,
        call: Call,
        sequence: Sequence,
        deadline: Deadline,
        others_deadline: Deadline,
    ) -> Result<()> {
        let Peers { rank, members, health } = &self.peers;
        for deadline in [if rank.is_main() { deadline } else { others_deadline }, others_deadline] {
            let timeout = Timeout::from(deadline);
            let call = self.peers.call(&call, sequence, &timeout);
            let slots = self
                .control_block
                .small(call.encoded, &[])
                .slots(&mut |missing, difference| call.watch(missing, difference));
            let outcome = slots.and_then(|slots| call.check(|index| slots.call(index)));
            if outcome.as_ref().is_err_and(|error| error.is_timeout() && !health.has_failed()) {
                let missing: Vec<_> = self.control_block.missing().map(|index| members[index]).collect();
                return absent(&missing, members.len()).map_or(outcome, Err);
            }
            outcome?;
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
