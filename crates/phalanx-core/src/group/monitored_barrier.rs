//! A barrier that names the missing ranks.

use std::time::Duration;

use super::ProcessGroup;
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::Result;
use crate::wire::frame::{Call, Operation};

impl ProcessGroup {
    /// A [`barrier`](Self::barrier) that reports missing ranks: if not every rank has called it within `timeout` after
    /// rank 0 has, all ranks get an error that names every missing rank. Slower than a barrier: on one host it takes
    /// twice as long, else 2(w-1) messages at rank 0.
    ///
    /// If rank 0 itself is missing, the others report it after twice the time.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.begin()?;
        let call = Call::new(Operation::MonitoredBarrier, DType::U8, 0);
        self.run_in_turn(&self.operation_timeout(), |engine| {
            let (deadline, others_deadline) =
                (Deadline::after(timeout), Deadline::after(timeout.saturating_mul(2)));
            engine.monitored_barrier(call, deadline, others_deadline)
        })
    }
}
