//! An agent: the launcher of one host of an elastic job, which takes its instructions from the job's driver.

use std::collections::VecDeque;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::poll::{drain, wake_pipe};

/// The workers of this agent, and the store of the whole job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AgentConfig {
    pub(super) run_id: String,
    /// The store, which serves the whole job.
    pub(super) host: String,
    pub(super) port: u16,
    /// The number of the first worker here; the others have the next numbers.
    pub(super) first: u32,
    /// The largest number of workers, on all hosts.
    pub(super) max_workers: u32,
    /// This node's rank among the nodes, and the number of nodes.
    pub(super) node: u32,
    pub(super) nodes: u32,
}

/// An instruction of the driver: what to do with the slot of a worker that has failed, by its number on this host, or
/// that the job ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Instruction {
    /// Start another worker in this slot, now.
    Replace(u32),
    /// Leave this slot empty.
    LeaveEmpty(u32),
    /// A worker on some host has ended with success.
    Ending,
}

/// The agent of this host, and the instructions of the driver for it.
#[derive(Clone, Debug)]
pub(super) struct Agent {
    pub(super) config: AgentConfig,
    instructions: Arc<InstructionQueue>,
}

#[derive(Debug)]
struct InstructionQueue {
    queue: Mutex<VecDeque<Instruction>>,
    notice: PipeReader,
    wake: PipeWriter,
}

impl Agent {
    pub(super) fn new(config: AgentConfig) -> Result<Self> {
        let (notice, wake) = wake_pipe().map_err(|error| {
            Error::io("cannot make a pipe for the instructions of the job's driver", error)
        })?;
        let instructions = InstructionQueue { queue: Mutex::default(), notice, wake };
        Ok(Self { config, instructions: Arc::new(instructions) })
    }

    /// Queues an instruction.
    pub(super) fn send(&self, instruction: Instruction) {
        self.instructions.queue.lock().push_back(instruction);
        let _ = (&self.instructions.wake).write_all(&[0]);
    }

    /// Readable when an instruction is queued.
    pub(super) fn notice(&self) -> BorrowedFd<'_> {
        self.instructions.notice.as_fd()
    }

    /// The next instruction, if there is one.
    pub(super) fn receive(&self) -> Option<Instruction> {
        drain(&self.instructions.notice);
        self.instructions.queue.lock().pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_keep_their_order_and_sending_never_blocks() {
        let config = AgentConfig {
            run_id: "x".to_owned(),
            host: "h".to_owned(),
            port: 1,
            first: 0,
            max_workers: 1,
            node: 0,
            nodes: 1,
        };
        let agent = Agent::new(config).unwrap();
        assert_eq!(agent.receive(), None);
        // More than a pipe holds.
        (0..100_000).for_each(|slot| agent.send(Instruction::Replace(slot)));
        assert!((0..100_000).all(|slot| agent.receive() == Some(Instruction::Replace(slot))));
        assert_eq!(agent.receive(), None);
    }
}
