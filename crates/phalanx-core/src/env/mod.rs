//! The launcher's variables, parsed once.
//!
//! The names are torchrun's, so that a program started by `torchrun`, by `phalanx run` or by a Kubernetes PyTorchJob
//! gets its rank in the same way. Read them with [`LaunchEnv::from_process`]; a launcher sets them for each worker
//! with [`WorkerEnv::variables`].
//!
//! If neither `RANK` nor `WORLD_SIZE` is set, the variables of another launcher are used:
//!
//! | Launcher | Variables |
//! |---|---|
//! | horovodrun | `HOROVOD_RANK`, `HOROVOD_SIZE`, `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE`, `HOROVOD_CROSS_RANK` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `.._SIZE`, `.._LOCAL_RANK`, `.._LOCAL_SIZE` |
//! | MVAPICH2 | `MV2_COMM_WORLD_RANK`, `.._SIZE`, `.._LOCAL_RANK`, `.._LOCAL_SIZE` |
//! | jsrun | `JSM_NAMESPACE_RANK`, `.._SIZE`, `.._LOCAL_RANK`, `.._LOCAL_SIZE` |
//! | Flux | `FLUX_TASK_RANK`, `FLUX_JOB_SIZE`, `FLUX_TASK_LOCAL_ID` |
//! | PALS | `PALS_RANKID`, `PALS_SIZE` or `PMI_SIZE`, `PALS_LOCAL_RANKID` or `PMI_LOCAL_RANK`, `PALS_LOCAL_SIZE` or `PMI_LOCAL_SIZE`, `PALS_NODEID` |
//! | MPICH, Intel MPI, Cray MPI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` or `PMI_LOCAL_RANK`, `MPI_LOCALNRANKS` or `PMI_LOCAL_SIZE` |
//! | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_NODEID`, `SLURM_STEP_TASKS_PER_NODE`, `SLURM_JOB_ID`, `SLURM_STEP_ID`, `SLURM_STEP_NODELIST` |
//!
//! A rank without a number of ranks, such as `PMIX_RANK` alone, is an error. A world of one warns if a variable looks like the rank of a
//! launcher that is not in the table.
//!
//! Some also say where ranks meet:
//!
//! * srun: at the step's first node, at a port that follows from the numbers of job and step.
//! * MPICH and Intel MPI: rank 0 tells the others its address through the launcher (`PMI_FD`).
//! * Open MPI: on one host in a file of the job's folder (`PMIX_SERVER_TMPDIR`); on several at the host on which mpirun runs, which
//!   `PMIX_NAMESPACE` (version 5) or `OMPI_MCA_orte_hnp_uri` (version 4) name. Rank 0 has to be there, and says so if it is not.
//!
//! `MASTER_ADDR` and `MASTER_PORT`, or `PHALANX_RENDEZVOUS` with `file:///a/shared/path` or `tcp://host:port`, go before these. Under
//! the others they have to be set.
//!
//! The job's key, if there is one, is in the file that `PHALANX_JOB_KEY_FILE` names: see [`JobKey`](crate::JobKey). Its
//! certificates, if there are any, are in the files that `PHALANX_TLS_CA`, `PHALANX_TLS_CERT` and `PHALANX_TLS_KEY`
//! name: see [`Tls`](crate::Tls).

mod foreign;
mod variables;
mod worker;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::net::IpAddr;

pub use self::worker::WorkerEnv;

use self::variables::{Variables, malformed};
use crate::error::{Error, Result};
use crate::host::unfit_host;
use crate::rank::{Generation, Rank};
use crate::world_size::WorldSize;

/// The variables that a world of several ranks needs.
const REQUIRED: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// The fewest and the most workers of an elastic job, as `MIN:MAX`.
#[doc(hidden)]
pub const ELASTIC: &str = "PHALANX_ELASTIC";

/// Where ranks meet, if it is not the master's address.
const RENDEZVOUS: &str = "PHALANX_RENDEZVOUS";

/// The values that a launcher has set for this worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// `RANK`.
    pub rank: Rank,
    /// `WORLD_SIZE`.
    pub world_size: WorldSize,
    /// `LOCAL_RANK`: the index among the workers of this host. Some launchers (Kubernetes) do not set it.
    pub local_rank: Option<u32>,
    /// `LOCAL_WORLD_SIZE`: the number of workers on this host, if known.
    pub local_world_size: Option<u32>,
    /// `GROUP_RANK`: the index of this host among the hosts, if known.
    pub group_rank: Option<u32>,
    /// Where the rendezvous of the ranks is (torchrun: the end point).
    pub rendezvous: RendezvousEndpoint,
    /// `PHALANX_BIND`: the address at which rank 0 listens, if it serves the store, instead of `MASTER_ADDR`. An
    /// unspecified address (`0.0.0.0`) opens the store to every network of the host: give the ranks a
    /// [key](crate::JobKey) then.
    pub bind: Option<IpAddr>,
    /// `TORCHELASTIC_RESTART_COUNT`: how often the job was restarted; 0 if unset.
    pub restart_count: Generation,
    /// `TORCHELASTIC_RUN_ID`: the job's name, if it has one.
    pub run_id: Option<String>,
    /// `TORCHELASTIC_USE_AGENT_STORE`: the launcher serves the store, so that every rank is a client.
    pub agent_store: bool,
}

/// Where the rendezvous of the ranks is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RendezvousEndpoint {
    /// At the store at `MASTER_ADDR` and `MASTER_PORT`.
    Master {
        /// The store's host.
        address: String,
        /// The store's port.
        port: u16,
    },
    /// At the URL in `PHALANX_RENDEZVOUS`: `tcp://host:port` or `file:///path`.
    Url(String),
    /// At an address that rank 0 tells the others through its launcher, the mpirun of MPICH or Intel MPI.
    Pmi {
        /// `PMI_FD`: the descriptor of the connection to the launcher.
        descriptor: i32,
        /// The launcher's name for this host.
        host: Option<String>,
        /// `MASTER_PORT`, or 0 for a free port.
        port: u16,
    },
    /// At the host on which Open MPI's mpirun runs: rank 0 has to be there.
    HostOfMpirun {
        /// That host.
        address: String,
        /// The port there: `MASTER_PORT`, or one that follows from the job's name.
        port: u16,
    },
    /// There is only one rank.
    NotNeeded,
}

/// The store of our launcher, whose restarts are counted for all its nodes. It names the store, because a worker of ours may start torchrun.
const NUMBERED_STARTS: &str = "PHALANX_LAUNCHER_STORE";

/// Whether the restart count names the start in the store at `place`: all ranks of one start have the same. It is not so under torchrun,
/// whose agents count each for itself.
pub(crate) fn has_numbered_starts(place: &RendezvousEndpoint) -> bool {
    let RendezvousEndpoint::Master { address, port } = place else { return false };
    variable(NUMBERED_STARTS).is_some_and(|named| named == store_name(address, *port))
}

fn store_name(address: &str, port: u16) -> String {
    format!("{address} {port}")
}

/// The interface whose address this process tells to others, if the user names one. As GLOO's, so that what is set for PyTorch holds.
#[doc(hidden)]
pub fn interface() -> Option<String> {
    let named = variable("GLOO_SOCKET_IFNAME")?;
    Some(named.trim().to_owned()).filter(|named| !named.is_empty())
}

/// Whether the job continues when workers die, so that generations count groups and not restarts.
#[doc(hidden)]
pub fn is_elastic() -> bool {
    std::env::var_os(ELASTIC).is_some_and(|workers| !workers.is_empty())
}

/// An error in a worker of an elastic job, whose environment does not contain ranks and world size: workers that waited
/// for a fixed world would wait for ever for one that has died.
pub(crate) fn refuse_fixed_world() -> Result<()> {
    if !is_elastic() {
        return Ok(());
    }
    Err(Error::environment(
        "this job is elastic: its workers come and go, so there is no fixed world to join",
    )
    .with_remedy("train inside phalanx::elastic::run, or start the program without --min-np"))
}

impl LaunchEnv {
    /// Reads this process's environment; `None` if no launcher has set anything.
    ///
    /// # Errors
    /// If the variables contradict each other, are incomplete, or are no numbers where numbers are needed: the error names the variable and what to set.
    pub fn from_process() -> Result<Option<Self>> {
        Self::from_lookup(variable)
    }

    /// Reads variables through `lookup`; `None` if no launcher has set any.
    ///
    /// ```
    /// use phalanx::env::LaunchEnv;
    /// let error = LaunchEnv::from_lookup(|name| (name == "RANK").then(|| "1".into())).unwrap_err();
    /// assert!(error.is_environment() && error.to_string().contains("WORLD_SIZE"));
    /// ```
    ///
    /// # Errors
    /// As [`from_process`](Self::from_process).
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let variables = Variables { lookup };
        let is_set = |names: &[&str]| names.iter().any(|name| variables.text(name).is_some());
        let (by_torchrun, by_hand) =
            (is_set(&["RANK", "WORLD_SIZE"]), is_set(&REQUIRED) || is_set(&["LOCAL_RANK"]));
        let place = if by_torchrun { None } else { foreign::place(&variables)? };
        let url = variables.text(RENDEZVOUS);
        if place.is_none() && !by_hand && url.is_none() {
            return Ok(None);
        }
        let agent_store = variables.flag("TORCHELASTIC_USE_AGENT_STORE")?;
        let rendezvous = match (&place, url) {
            (_, Some(url)) if !agent_store => {
                check_url(&url)?;
                Some(RendezvousEndpoint::Url(url))
            }
            (Some(place), _) if place.world_size.1 == 1 => Some(RendezvousEndpoint::NotNeeded),
            (Some(place), _) if variables.text("MASTER_ADDR").is_none() => {
                foreign::rendezvous(&variables, place)?
            }
            _ => None,
        };
        let required = match (&place, &rendezvous) {
            (Some(_), Some(_)) => &[],
            (Some(_), None) => &REQUIRED[2..],
            (None, Some(_)) => &REQUIRED[..2],
            (None, None) => &REQUIRED[..],
        };
        variables.require(required)?;
        let rendezvous = match rendezvous {
            Some(rendezvous) => rendezvous,
            None => {
                let address = variables.text("MASTER_ADDR").unwrap_or_default();
                if let Some(why) = unfit_host(&address) {
                    return Err(malformed("MASTER_ADDR", &address, why));
                }
                RendezvousEndpoint::Master { address, port: variables.parse("MASTER_PORT")? }
            }
        };
        let run_id =
            variables.text("TORCHELASTIC_RUN_ID").or_else(|| foreign::run_id(&variables, place.as_ref()?));
        let place = match place {
            Some(place) => place,
            None => foreign::ForeignRank {
                rank: ("RANK", variables.parse("RANK")?),
                world_size: ("WORLD_SIZE", variables.parse("WORLD_SIZE")?),
                local_rank: variables.parse_optional("LOCAL_RANK")?,
                local_world_size: variables.parse_optional("LOCAL_WORLD_SIZE")?,
                node: variables.parse_optional("GROUP_RANK")?,
            },
        };
        let refuse =
            |(name, value): (&str, u32), error: &Error| malformed(name, &value.to_string(), error.cause());
        let world_size =
            WorldSize::new(place.world_size.1).map_err(|error| refuse(place.world_size, &error))?;
        let rank = world_size.rank(place.rank.1).map_err(|error| refuse(place.rank, &error))?;
        check_local(place.local_rank, place.local_world_size, world_size)?;
        Ok(Some(Self {
            rank,
            world_size,
            local_rank: place.local_rank,
            local_world_size: place.local_world_size,
            group_rank: place.node,
            rendezvous,
            bind: variables.parse_optional("PHALANX_BIND")?,
            restart_count: Generation(variables.parse_optional("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0)),
            run_id,
            agent_store,
        }))
    }
}

/// Why this process, which is a world of one by what [`LaunchEnv::from_process`] has read, may be meant as one of several: its launcher
/// is not known here, or the variables contradict each other.
pub fn doubt(env: Option<&LaunchEnv>) -> Option<String> {
    doubt_of(env, &Variables { lookup: variable }, all_variables())
}

/// A variable that looks like the rank of a launcher which is not known here, if this process is not the first of it:
/// `SOME_LAUNCHERS_RANK=1`. For a process that no known launcher has started.
#[doc(hidden)]
pub fn unknown_launcher() -> Option<String> {
    let (name, rank) = foreign::unknown_rank(all_variables())?;
    Some(format!("{name}={rank}"))
}

/// The rank, and the number of ranks, that a launcher other than torchrun has given to this process, if it is one of several:
/// `SLURM_PROCID=1 and SLURM_STEP_NUM_TASKS=2`. None in a worker of torchrun's or ours, which may have been started several times.
pub fn other_launcher() -> Option<String> {
    other_launcher_in(&Variables { lookup: variable })
}

/// Whether torchrun, our launcher or another known one has started this process as one of several.
pub(crate) fn is_launched() -> bool {
    is_launched_in(&Variables { lookup: variable })
}

fn is_launched_in<F: Fn(&str) -> Option<String>>(variables: &Variables<F>) -> bool {
    variables.text("TORCHELASTIC_RUN_ID").is_some() || other_launcher_in(variables).is_some()
}

fn other_launcher_in<F: Fn(&str) -> Option<String>>(variables: &Variables<F>) -> Option<String> {
    if variables.text("TORCHELASTIC_RUN_ID").is_some() {
        return None;
    }
    let place = foreign::place(variables).ok().flatten().filter(|place| place.world_size.1 > 1)?;
    let ((rank_name, rank), (size_name, size)) = (place.rank, place.world_size);
    Some(format!("{rank_name}={rank} and {size_name}={size}"))
}

/// A variable of this process.
#[doc(hidden)]
pub fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn all_variables() -> impl Iterator<Item = (String, String)> {
    let text = |text: OsString| text.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}

fn doubt_of<F: Fn(&str) -> Option<String>>(
    env: Option<&LaunchEnv>,
    variables: &Variables<F>,
    all: impl Iterator<Item = (String, String)>,
) -> Option<String> {
    let Some(env) = env else {
        let (name, rank) = foreign::unknown_rank(all)?;
        return Some(format!(
            "{name}={rank} looks like a rank, but its launcher is not known: this process is a world of one. If it is one of several, set RANK, \
             WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; else unset {name}"
        ));
    };
    if env.world_size != WorldSize::ONE {
        return None;
    }
    let other = other_launcher_in(variables)?;
    Some(format!(
        "WORLD_SIZE=1 makes this process a world of one, but {other} say that it is one of several: unset RANK and WORLD_SIZE to take those"
    ))
}

fn check_url(url: &str) -> Result<()> {
    if url.starts_with("tcp://") || url.starts_with("file://") {
        return Ok(());
    }
    Err(malformed(RENDEZVOUS, url, "it is neither tcp://host:port nor file:///path"))
}

fn check_local(rank: Option<u32>, size: Option<u32>, world: WorldSize) -> Result<()> {
    if let Some(size) = size
        && !(1..=world.get()).contains(&size)
    {
        let why = format!("a host has at least one worker and at most WORLD_SIZE={world}");
        return Err(malformed("LOCAL_WORLD_SIZE", &size.to_string(), &why));
    }
    let size = size.unwrap_or(world.get());
    match rank {
        Some(rank) if rank >= size => {
            let why = format!("it must be below the number of workers on the host, {size}");
            Err(malformed("LOCAL_RANK", &rank.to_string(), &why))
        }
        Some(_) | None => Ok(()),
    }
}
