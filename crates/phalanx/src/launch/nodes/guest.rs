//! A part of a job that is led from elsewhere, where its workers meet, too.

use std::os::fd::BorrowedFd;

use super::{AttemptEnd, Gathered, Nodes, Settled};
use crate::error::{Error, Result};
use crate::launch::attempts::Control;
use crate::launch::exit::Outcome;
use crate::launch::guest::{Guest, Instruction, Part};
use crate::launch::job::Job;
use crate::launch::placement::Placement;
use crate::rank::WorldSize;

/// It serves nothing, and decides nothing: whoever leads the job hears all that happens as events.
#[derive(Debug)]
pub(in crate::launch) struct Guesthood<'a> {
    job: &'a Job,
    guest: &'a Guest,
}

impl<'a> Guesthood<'a> {
    pub(in crate::launch) fn new(job: &'a Job, guest: &'a Guest) -> Self {
        Self { job, guest }
    }
}

impl Nodes for Guesthood<'_> {
    fn gather(&mut self, _control: &mut Control<'_>) -> Result<Gathered> {
        let Part { run_id, host, port, first, most, node, nodes } = self.guest.part.clone();
        // Numbers have gaps where hosts have gone.
        let last = first.saturating_add(self.job.workers().get());
        Ok(Gathered::Placed(Placement {
            restarts: 0,
            first_rank: first,
            world_size: WorldSize::new(most.max(last))?,
            node,
            nodes: nodes.max(node.saturating_add(1)),
            master_addr: host,
            master_port: port,
            run_id,
        }))
    }

    fn notice(&self) -> Option<BorrowedFd<'_>> {
        Some(self.guest.notice())
    }

    fn ask_for_end(&mut self) -> bool {
        false
    }

    fn tell(&mut self, _cause: &AttemptEnd) {}

    fn outlived(&mut self, _place: u32, _process: u32) {}

    fn next_instruction(&mut self) -> Option<Instruction> {
        self.guest.receive()
    }

    fn give_up(&mut self, _error: &Error) {}

    fn settle(&mut self, end: AttemptEnd, _control: &mut Control<'_>) -> Result<Settled> {
        Ok(Settled::Over(match end {
            AttemptEnd::Succeeded => Outcome::Succeeded,
            AttemptEnd::Failed(failure, _) => Outcome::Failed(failure),
            AttemptEnd::Interrupted(signal) => Outcome::Interrupted(signal),
            AttemptEnd::Stopped | AttemptEnd::Elsewhere => Outcome::Stopped,
        }))
    }
}
