//! A job of Slurm as the hosts of a [remote job](super::RemoteJob).

use std::net::IpAddr;

use phalanx_proto::launch::slurm::Allocation;

use super::here::is_here;
use super::hosts::HostList;
use super::protocol::Route;
use crate::env;
use crate::error::{Error, Result};
use crate::interfaces;

/// The nodes that Slurm has allocated to the job in which this process runs, and the number of tasks on each.
///
/// Pass [its hosts](Self::hosts) to a [`RemoteJob`](super::RemoteJob) whose shell is [`RemoteShell::srun`](super::RemoteShell::srun).
#[derive(Clone, Debug)]
pub struct SlurmAllocation(Allocation);

impl SlurmAllocation {
    /// Reads Slurm's variables in this process's environment. None where there is no Slurm job; in a task that `srun` has started,
    /// as on each node already; and in a worker of a launcher.
    ///
    /// # Errors
    /// If a variable cannot be understood that says which job and nodes these are, or the job is heterogeneous.
    pub fn from_process() -> Result<Option<Self>> {
        match env::variable("TORCHELASTIC_RUN_ID") {
            Some(_) => Ok(None),
            None => Ok(Allocation::read(env::variable)?.map(Self)),
        }
    }

    /// The Slurm job's number, `SLURM_JOB_ID`.
    pub fn job(&self) -> &str {
        &self.0.job
    }

    /// Where the numbers of tasks are from: a variable, or words in its place; nothing if they are not known.
    pub fn source(&self) -> &str {
        self.0.tasks.as_ref().map_or("", |tasks| tasks.source)
    }

    /// The nodes, each with as many slots as it has tasks.
    ///
    /// # Errors
    /// If Slurm's variables do not say how many tasks each node has, or contradict each other; if a node has more tasks than a world may have
    /// ranks, or a name that is no host's.
    pub fn hosts(&self) -> Result<HostList> {
        let tasks = self.0.tasks.as_ref().map_err(Error::clone)?;
        self.list(tasks.counts.iter().copied())
    }

    /// The nodes with `slots` slots each.
    ///
    /// # Errors
    /// If a node's name is no host's.
    pub fn hosts_with(&self, slots: u32) -> Result<HostList> {
        self.list(std::iter::repeat(slots))
    }

    /// The number of nodes.
    pub fn nodes(&self) -> usize {
        self.0.nodes.len()
    }

    /// Whether the job has one node, which is this machine.
    pub fn is_this_machine(&self) -> bool {
        match &self.0.nodes[..] {
            [node] => is_this_node(node) || is_here(node),
            _ => false,
        }
    }

    fn list(&self, slots: impl Iterator<Item = u32>) -> Result<HostList> {
        let entries: Vec<String> =
            self.0.nodes.iter().zip(slots).map(|(node, slots)| format!("{node}:{slots}")).collect();
        let named = |error: Error| {
            Error::environment(format!(
                "the nodes of the Slurm job {} cannot be used: {}",
                self.0.job,
                error.cause()
            ))
            .with_remedy("--nproc-per-node says how many workers each node is to have")
        };
        entries.join(",").parse().map_err(named)
    }
}

/// Whether Slurm's daemon has started this process on the node of this name, which may differ from the host's.
pub(super) fn is_this_node(name: &str) -> bool {
    env::variable("SLURMD_NODENAME").is_some_and(|own| own == name)
}

/// How this process's node is reached from the one where srun was called; none if srun has not started it.
pub(super) fn route() -> Option<Route> {
    let from: IpAddr = env::variable("SLURM_LAUNCH_NODE_IPADDR")?.trim().parse().ok()?;
    Some(Route { from, to: interfaces::way_to(from)? })
}
