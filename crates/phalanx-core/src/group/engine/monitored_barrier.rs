//! A barrier that reports missing ranks.

use super::Engine;
use crate::collective::kernel::Kernel;
use crate::deadline::Deadline;
use crate::domain::absent;
use crate::error::Result;
use crate::rank::{Rank, Sequence};
use crate::transport::{Incoming, Outgoing};
use crate::wire::frame::Call;

impl Engine {
    /// Every rank reports to rank 0, which waits for each until `deadline` and then lets all go on, or tells them which
    /// ranks are missing. The others wait for its message until `others_deadline`. With shared memory each rank checks by
    /// itself.
    pub(in crate::group) fn monitored_barrier(
        &mut self,
        call: Call,
        deadline: Deadline,
        others_deadline: Deadline,
    ) -> Result<()> {
        let sequence = self.collectives.advance();
        self.health.waits.begin(sequence);
        self.check_health()?;
        self.health.calls(|calls| calls.begin(self.header(call, sequence)));
        let outcome = if let Some(domain) = self.domain.as_mut().filter(|domain| domain.is_world()) {
            domain.monitored_barrier(call, sequence, deadline, others_deadline)
        } else if self.rank.is_main() {
            self.wait_for_all(call, sequence, deadline, others_deadline)
        } else {
            self.token(call, sequence, Some(Rank::MAIN), None, others_deadline)
                .and_then(|()| self.token(call, sequence, None, Some(Rank::MAIN), others_deadline))
        };
        self.health.calls(|calls| calls.end());
        outcome.map_err(|error| self.health.fail_operation(error, call, sequence))
    }

    fn wait_for_all(
        &mut self,
        call: Call,
        sequence: Sequence,
        deadline: Deadline,
        others_deadline: Deadline,
    ) -> Result<()> {
        let mut missing = Vec::new();
        for rank in self.world.ranks().skip(1) {
            match self.token(call, sequence, None, Some(rank), deadline) {
                // Ranks that have come by now still count, including those after it.
                Err(error) if error.is_timeout() => missing.push(rank),
                outcome => outcome?,
            }
        }
        absent(&missing, self.world.count()).map_or(Ok(()), Err)?;
        for rank in self.world.ranks().skip(1) {
            self.token(call, sequence, Some(rank), None, others_deadline)?;
        }
        Ok(())
    }

    /// An empty message to a rank, or from one.
    fn token(
        &mut self,
        call: Call,
        sequence: Sequence,
        to: Option<Rank>,
        from: Option<Rank>,
        deadline: Deadline,
    ) -> Result<()> {
        let header = self.header(call, sequence);
        let send = to.map(|to| Outgoing { to, header, payload: &[] });
        let kernel = Kernel::replacing(call.dtype);
        let recv = from.map(|from| Incoming { from, expect: header, into: &mut [], kernel });
        self.transport.exchange(send, recv, deadline)
    }
}
