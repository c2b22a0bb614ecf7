//! The nodes of a job whose driver runs on another machine and serves its store.

use std::os::fd::BorrowedFd;

use super::{AfterAttempt, AttemptEnd, Gathered, Nodes};
use crate::agent::{Agent, AgentConfig, Instruction};
use crate::attempts::Control;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::placement::Placement;
use crate::world_size::WorldSize;

/// It neither serves a store nor decides: the driver gets all events.
#[derive(Debug)]
pub(crate) struct AgentNode<'a> {
    job: &'a Job,
    agent: &'a Agent,
}

impl<'a> AgentNode<'a> {
    pub(crate) fn new(job: &'a Job, agent: &'a Agent) -> Self {
        Self { job, agent }
    }
}

impl Nodes for AgentNode<'_> {
    fn gather(&mut self, _control: &mut Control<'_>) -> Result<Gathered> {
        let AgentConfig { run_id, host, port, first, max_workers, node, nodes } = self.agent.config.clone();
        // Numbers have gaps if hosts have left.
        let last = first.saturating_add(self.job.workers.get());
        let world_size = WorldSize::new(max_workers.max(last))?;
        // All hosts have the driver's options, and so the same role.
        Ok(Gathered::Placed(Placement {
            restarts: 0,
            first_rank: first,
            world_size,
            first_role_rank: first,
            role_world_size: world_size.get(),
            node,
            nodes: nodes.max(node.saturating_add(1)),
            workers: Vec::new(),
            master_addr: host,
            master_port: port,
            run_id,
        }))
    }

    fn notice(&self) -> Option<BorrowedFd<'_>> {
        Some(self.agent.notice())
    }

    fn ask_for_end(&mut self) -> bool {
        false
    }

    fn tell(&mut self, _cause: &AttemptEnd) {}

    fn worker_lost(&mut self, _slot: u32, _process: u32) {}

    fn next_instruction(&mut self) -> Option<Instruction> {
        self.agent.receive()
    }

    fn give_up(&mut self, _error: &Error) {}

    fn after_attempt(&mut self, end: AttemptEnd, _control: &mut Control<'_>) -> Result<AfterAttempt> {
        Ok(AfterAttempt::Over(end.outcome()))
    }
}
