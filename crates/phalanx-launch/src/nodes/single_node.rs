//! A job on one node.
//!
//! The launcher serves the workers' store itself, so that it can tell them the port that it has bound: a port that is
//! chosen before it is bound may be taken by then.

use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;

use super::{AfterAttempt, AttemptEnd, Gathered, Nodes};
use crate::attempts::Control;
use crate::elastic::Publisher;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::job::Job;
use crate::placement::Placement;
use crate::shortage::Shortage;
use crate::store::TcpStoreServer;

/// The only node: it serves a new store for each attempt.
#[derive(Debug)]
pub(crate) struct SingleNode<'a> {
    job: &'a Job,
    run_id: String,
    restarts: u32,
    store: Option<TcpStoreServer>,
    /// The publisher of an elastic job, once there is an event to publish.
    publisher: Option<Publisher>,
}

impl<'a> SingleNode<'a> {
    pub(crate) fn new(job: &'a Job, run_id: String) -> Self {
        Self { job, run_id, restarts: 0, store: None, publisher: None }
    }
}

impl Nodes for SingleNode<'_> {
    fn gather(&mut self, control: &mut Control<'_>) -> Result<Gathered> {
        // The last store releases its port first: the next may need it.
        (self.store, self.publisher) = (None, None);
        let mut shortage = Shortage::new(self.restarts > 0);
        let served = shortage.wait_for(control, |control| self.job.serve_store(control.refused.refusals()));
        let store = match served? {
            ControlFlow::Continue(store) => self.store.insert(store),
            ControlFlow::Break(end) => return Ok(Gathered::Over(end.outcome())),
        };
        let address = store.local_addr();
        Ok(Gathered::Placed(Placement {
            restarts: self.restarts,
            first_rank: 0,
            world_size: self.job.workers,
            first_role_rank: 0,
            role_world_size: self.job.workers.get(),
            node: 0,
            nodes: 1,
            workers: vec![self.job.workers.get()],
            master_addr: self.job.master_name(address),
            master_port: address.port(),
            run_id: self.run_id.clone(),
        }))
    }

    fn notice(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn ask_for_end(&mut self) -> bool {
        false
    }

    fn tell(&mut self, _cause: &AttemptEnd) {}

    fn worker_lost(&mut self, slot: u32, process: u32) {
        let Some(store) = self.store.as_ref().map(TcpStoreServer::reachable_addr) else { return };
        if self.publisher.is_none() {
            self.publisher = Publisher::start(store, &self.job.credentials, &self.run_id).ok();
        }
        // Without a publisher the other workers must notice the end themselves.
        if let Some(publisher) = &self.publisher {
            publisher.exited(slot, process);
        }
    }

    fn give_up(&mut self, _error: &Error) {}

    fn after_attempt(&mut self, end: AttemptEnd, control: &mut Control<'_>) -> Result<AfterAttempt> {
        Ok(match end {
            AttemptEnd::Failed(failure, _) if self.restarts < self.job.restarts_allowed() => {
                self.restarts += 1;
                control.tell(Event::Restarting { failure: &failure });
                AfterAttempt::Restart
            }
            end => AfterAttempt::Over(end.outcome()),
        })
    }
}
