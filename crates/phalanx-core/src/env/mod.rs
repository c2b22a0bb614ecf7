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
//! | PALS | `PALS_RANKID`, `PMI_SIZE`, `PALS_LOCAL_RANKID`, `PALS_LOCAL_SIZE`, `PALS_NODEID` |
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

use std::ffi::OsString;
use std::net::IpAddr;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::rank::{Generation, Rank};
use crate::world_size::WorldSize;

/// The variables that a world of several ranks needs.
const REQUIRED: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// The fewest and the most workers of an elastic job, as `MIN:MAX`.
#[doc(hidden)]
pub const ELASTIC: &str = "PHALANX_ELASTIC";

/// Whether workers get Horovod's variables beside torchrun's. It is not always so: a program that unsets RANK and
/// WORLD_SIZE to be a world of one would still find those.
const HOROVODRUN: &str = "PHALANX_HOROVODRUN";

/// Where ranks meet, if it is not the master's address.
const RENDEZVOUS: &str = "PHALANX_RENDEZVOUS";

const REMEDY: &str = "start the program with `phalanx run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and \
                      MASTER_PORT for every rank, or none of them for a world of one; under mpirun set \
                      MASTER_ADDR and MASTER_PORT, or PHALANX_RENDEZVOUS=file:///a/shared/path";

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
    let named = std::env::var("GLOO_SOCKET_IFNAME").ok()?;
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
                let file = foreign::shared_file(&variables, place).map(RendezvousEndpoint::Url);
                let port = variables.parse_optional("MASTER_PORT")?;
                let step = foreign::slurm_step(&variables, place)?;
                let step = step.map(|step| RendezvousEndpoint::Master {
                    address: step.address,
                    port: port.unwrap_or(step.port),
                });
                let mpirun =
                    foreign::mpirun(&variables, place).map(|mpirun| RendezvousEndpoint::HostOfMpirun {
                        address: mpirun.address,
                        port: port.unwrap_or(mpirun.port),
                    });
                file.or(step).or(foreign::pmi(&variables, place, port)?).or(mpirun)
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
            None => RendezvousEndpoint::Master {
                address: variables.text("MASTER_ADDR").unwrap_or_default(),
                port: variables.parse("MASTER_PORT")?,
            },
        };
        let run_id = variables.text("TORCHELASTIC_RUN_ID").or_else(|| {
            let step = place.as_ref().map(|place| foreign::slurm_step(&variables, place));
            // What cannot be understood and is not needed is no error.
            let step = step.and_then(|step| Some(step.ok()??.id));
            step.or_else(|| Some(foreign::mpirun(&variables, place.as_ref()?)?.id))
        });
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
    let text = |text: OsString| text.to_string_lossy().into_owned();
    doubt_of(
        env,
        &Variables { lookup: variable },
        std::env::vars_os().map(|(name, value)| (text(name), text(value))),
    )
}

/// The rank, and the number of ranks, that a launcher other than torchrun has given to this process, if it is one of several:
/// `SLURM_PROCID=1 and SLURM_STEP_NUM_TASKS=2`. None in a worker of torchrun's or ours, which may have been started several times.
pub fn other_launcher() -> Option<String> {
    other_launcher_in(&Variables { lookup: variable })
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

/// The position that a launcher gives to one worker; the reverse of [`LaunchEnv`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEnv {
    /// The worker's rank in the world.
    pub rank: Rank,
    /// Its index among the workers of its host.
    pub local_rank: u32,
    /// The number of workers in all.
    pub world_size: WorldSize,
    /// The number of workers on its host.
    pub local_world_size: u32,
    /// Its host's index among the hosts.
    pub group_rank: u32,
    /// The number of hosts.
    pub group_world_size: u32,
    /// Its host's index among the hosts that have a worker with this local rank, and the number of these hosts.
    pub cross: (u32, u32),
    /// The role's name; torchrun's is `default`.
    pub role_name: String,
    /// The store's address.
    pub master_addr: String,
    /// The store's port.
    pub master_port: u16,
    /// How often the workers have been restarted.
    pub restart_count: Generation,
    /// How often they may be restarted.
    pub max_restarts: u32,
    /// The job's name.
    pub run_id: String,
    /// Whether the launcher serves the store.
    pub agent_store: bool,
}

impl WorkerEnv {
    /// The variables to set for this worker; Horovod's too, if the job was started by `phalanx horovodrun`. If a host has several workers, threads are limited to one for each, except
    /// if this process's environment already sets the limit. Python does not buffer its output, unless this process's environment
    /// says what it does.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        self.variables_given(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
    }

    fn variables_given(&self, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let agent_store = if self.agent_store { "True" } else { "False" };
        let mut variables = vec![
            ("RANK", self.rank.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", self.local_world_size.to_string()),
            ("GROUP_RANK", self.group_rank.to_string()),
            ("GROUP_WORLD_SIZE", self.group_world_size.to_string()),
            ("ROLE_RANK", self.rank.to_string()),
            ("ROLE_NAME", self.role_name.clone()),
            ("ROLE_WORLD_SIZE", self.world_size.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restart_count.0.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run_id.clone()),
            ("TORCHELASTIC_USE_AGENT_STORE", agent_store.to_owned()),
        ];
        if self.agent_store {
            variables.push((NUMBERED_STARTS, store_name(&self.master_addr, self.master_port)));
        }
        if is_set(HOROVODRUN) {
            variables.extend([
                ("HOROVOD_RANK", self.rank.to_string()),
                ("HOROVOD_SIZE", self.world_size.to_string()),
                ("HOROVOD_LOCAL_RANK", self.local_rank.to_string()),
                ("HOROVOD_LOCAL_SIZE", self.local_world_size.to_string()),
                ("HOROVOD_CROSS_RANK", self.cross.0.to_string()),
                ("HOROVOD_CROSS_SIZE", self.cross.1.to_string()),
            ]);
        }
        if self.local_world_size > 1 {
            let threads = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"].into_iter();
            variables.extend(threads.filter(|name| !is_set(name)).map(|name| (name, "1".to_owned())));
        }
        // Through a pipe Python would keep its lines back, and lose them if it is killed.
        variables
            .extend(Some("PYTHONUNBUFFERED").filter(|name| !is_set(name)).map(|name| (name, "1".to_owned())));
        variables
    }
}

/// Variables from a lookup; an empty one counts as unset.
struct Variables<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Checks that each of `names` has a value. The error names all that have none.
    fn require(&self, names: &[&str]) -> Result<()> {
        let lacking: Vec<String> = names
            .iter()
            .filter(|name| self.text(name).is_none())
            .map(|name| match (self.lookup)(name) {
                Some(_) => format!("{name} is empty"),
                None => format!("{name} is not set"),
            })
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        Err(Error::environment(lacking.join(", ")).with_remedy(REMEDY))
    }

    fn parse<T: FromStr>(&self, name: &str) -> Result<T>
    where
        T::Err: std::fmt::Display,
    {
        self.require(&[name])?;
        let text = self.text(name).unwrap_or_default();
        text.parse().map_err(|error: T::Err| malformed(name, &text, &error.to_string()))
    }

    fn parse_optional<T: FromStr>(&self, name: &str) -> Result<Option<T>>
    where
        T::Err: std::fmt::Display,
    {
        self.text(name).is_some().then(|| self.parse(name)).transpose()
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match self.text(name).as_deref() {
            None => Ok(false),
            Some(text) if ["1", "true"].iter().any(|yes| text.eq_ignore_ascii_case(yes)) => Ok(true),
            Some(text) if ["0", "false"].iter().any(|no| text.eq_ignore_ascii_case(no)) => Ok(false),
            Some(text) => Err(malformed(name, text, "it is neither True nor False")),
        }
    }
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

fn malformed(name: &str, value: &str, why: &str) -> Error {
    Error::environment(format!("{name}={value:?}: {why}"))
        .with_remedy(format!("correct {name}, or unset the launcher's variables for a world of one"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
        let map: HashMap<String, String> =
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        LaunchEnv::from_lookup(|name| map.get(name).cloned())
    }

    const FULL: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

    fn with(extra: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        FULL.iter()
            .copied()
            .filter(|(k, _)| extra.iter().all(|(e, _)| e != k))
            .chain(extra.iter().copied())
            .collect()
    }

    #[test]
    fn no_variables_is_a_world_of_one() {
        assert_eq!(parse(&[]).unwrap(), None);
    }

    #[test]
    fn the_four_variables_are_enough() {
        let env = parse(&FULL).unwrap().unwrap();
        assert_eq!((env.rank.get(), env.world_size.get()), (1, 2));
        assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address: "localhost".into(), port: 29500 });
        assert_eq!((env.local_rank, env.restart_count, env.agent_store), (None, Generation(0), false));
    }

    #[test]
    fn what_is_unset_or_empty_is_named() {
        for lone in FULL {
            let error = parse(&[lone]).unwrap_err();
            assert!(error.is_environment());
            for (name, _) in FULL.iter().filter(|(name, _)| *name != lone.0) {
                assert!(error.to_string().contains(&format!("{name} is not set")), "{error}");
            }
            let error = parse(&with(&[(lone.0, " ")])).unwrap_err();
            assert!(error.to_string().contains(&format!("{} is empty", lone.0)), "{error}");
            assert!(error.remedy().is_some());
        }
    }

    #[test]
    fn what_is_malformed_is_named() {
        let cases = [
            ("RANK", "two"),
            ("RANK", "2"),
            ("RANK", "-1"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "70000"),
            ("MASTER_PORT", "70000"),
            ("LOCAL_RANK", "x"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "x"),
            ("TORCHELASTIC_RESTART_COUNT", "x"),
            ("TORCHELASTIC_USE_AGENT_STORE", "maybe"),
            ("PHALANX_BIND", "eth0"),
            ("PHALANX_RENDEZVOUS", "etcd://x"),
        ];
        for (name, value) in cases {
            let error = parse(&with(&[(name, value)])).unwrap_err();
            assert!(
                error.is_environment() && error.to_string().contains(&format!("{name}={value:?}")),
                "{error}"
            );
        }
    }

    #[test]
    fn other_launchers_are_understood() {
        const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
        ];
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "5"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let hydra =
            [("PMI_RANK", "3"), ("PMI_SIZE", "5"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        let horovod = [
            ("HOROVOD_RANK", "3"),
            ("HOROVOD_SIZE", "5"),
            ("HOROVOD_LOCAL_RANK", "1"),
            ("HOROVOD_LOCAL_SIZE", "2"),
            ("HOROVOD_CROSS_RANK", "1"),
        ];
        let mvapich = [
            ("MV2_COMM_WORLD_RANK", "3"),
            ("MV2_COMM_WORLD_SIZE", "5"),
            ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
            ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let jsrun = [
            ("JSM_NAMESPACE_RANK", "3"),
            ("JSM_NAMESPACE_SIZE", "5"),
            ("JSM_NAMESPACE_LOCAL_RANK", "1"),
            ("JSM_NAMESPACE_LOCAL_SIZE", "2"),
            ("PMIX_RANK", "3"),
        ];
        let pals = [
            ("PALS_RANKID", "3"),
            ("PALS_NODEID", "1"),
            ("PALS_LOCAL_RANKID", "1"),
            ("PALS_LOCAL_SIZE", "2"),
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "5"),
        ];
        let cray = [("PMI_RANK", "3"), ("PMI_SIZE", "5"), ("PMI_LOCAL_RANK", "1"), ("PMI_LOCAL_SIZE", "2")];
        for (launcher, node) in [
            (&slurm[..], Some(1)),
            (&open_mpi, None),
            (&hydra, None),
            (&horovod, Some(1)),
            (&mvapich, None),
            (&jsrun, None),
            (&pals, Some(1)),
            (&cray, None),
        ] {
            let env = parse(&[launcher, &MASTER[..]].concat()).unwrap().unwrap();
            assert_eq!((env.rank.get(), env.world_size.get(), env.group_rank), (3, 5, node));
            assert_eq!((env.local_rank, env.local_world_size), (Some(1), Some(2)), "{launcher:?}");
            // Without a rendezvous, the error says what to set.
            let error = parse(launcher).unwrap_err();
            assert!(error.to_string().contains("MASTER_ADDR is not set"), "{error}");
            assert!(error.remedy().unwrap().contains("PHALANX_RENDEZVOUS"));
            let shared = ("PHALANX_RENDEZVOUS", "file:///shared/job7");
            let env = parse(&[launcher, &[shared]].concat()).unwrap().unwrap();
            assert_eq!(env.rendezvous, RendezvousEndpoint::Url(shared.1.into()));
            // torchrun's variables, if they are there, have priority.
            let env = parse(&[launcher, &FULL[..]].concat()).unwrap().unwrap();
            assert_eq!((env.rank.get(), env.world_size.get()), (1, 2));
        }
    }

    #[test]
    fn flux_says_no_number_of_ranks_on_a_host() {
        let flux = [("FLUX_TASK_RANK", "3"), ("FLUX_JOB_SIZE", "5"), ("FLUX_TASK_LOCAL_ID", "1")];
        let master = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        let env = parse(&[&flux[..], &master].concat()).unwrap().unwrap();
        assert_eq!((env.rank.get(), env.world_size.get()), (3, 5));
        assert_eq!((env.local_rank, env.local_world_size), (Some(1), None));
    }

    #[test]
    fn a_rank_without_a_size_is_no_world_of_one() {
        let lone =
            ["PMIX_RANK", "ALPS_APP_PE", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK"];
        for (name, rank) in lone.into_iter().flat_map(|name| [(name, "0"), (name, "3")]) {
            let error = parse(&[(name, rank)]).unwrap_err();
            assert!(
                error.is_environment() && error.to_string().contains(&format!("{name}={rank}")),
                "{error}"
            );
            assert!(error.remedy().unwrap().contains(&format!("RANK=${name}, WORLD_SIZE")), "{error}");
            // What the user then sets.
            assert_eq!(parse(&[&[(name, rank)], &FULL[..]].concat()).unwrap().unwrap().rank.get(), 1);
        }
        assert!(parse(&[("SLURM_PROCID", "1")]).is_err());
        // The size of another launcher counts.
        let slurm = [("PMIX_RANK", "0"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(parse(&slurm).unwrap().unwrap().rendezvous, RendezvousEndpoint::NotNeeded);
    }

    #[test]
    fn a_world_of_one_that_may_be_one_of_several_is_doubted() {
        let said = |pairs: &[(&str, &str)]| {
            let owned = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
                pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
            };
            let map = owned(pairs);
            let lookup = |name: &str| map.get(name).cloned();
            doubt_of(parse(pairs).unwrap().as_ref(), &Variables { lookup }, owned(pairs).into_iter())
        };
        assert!(said(&[("NEW_RANK", "2")]).unwrap().contains("NEW_RANK=2 looks like a rank"));
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[&[("NEW_RANK", "2")], &FULL[..]].concat()), None);
        let mut one = vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert_eq!(said(&one), None);
        one.extend([("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")]);
        assert!(said(&one).unwrap().contains("OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=4"));
        one.push(("TORCHELASTIC_RUN_ID", "sweep-2"));
        assert_eq!(said(&one), None);
    }

    #[test]
    fn tasks_of_srun_need_nothing_else() {
        let step = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
            ("SLURM_JOB_ID", "123"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "node[1-3]"),
        ];
        let env = parse(&step).unwrap().unwrap();
        let (address, port) = ("node1".to_owned(), 20_123);
        assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port });
        // Its own PMI (`--mpi=pmi2`) says the same in other names.
        let pmi = [("PMI_RANK", "3"), ("PMI_SIZE", "5")];
        assert_eq!(parse(&[&step[..], &pmi].concat()).unwrap().unwrap(), env);
        // Another step that has the same port by chance does not mix with this one.
        assert_eq!(env.run_id.as_deref(), Some("slurm-123.0.0"));
        let by_hand = [("MASTER_ADDR", "ib-node1"), ("MASTER_PORT", "7")];
        let env = parse(&[&step[..], &by_hand].concat()).unwrap().unwrap();
        let (address, port) = ("ib-node1".to_owned(), 7);
        assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port });
        assert_eq!(env.run_id.as_deref(), Some("slurm-123.0.0"));
        // A list that cannot be understood is an error only where it is needed.
        let odd = [("SLURM_STEP_NODELIST", "node[")];
        assert!(
            parse(&[&step[..], &odd].concat()).unwrap_err().to_string().contains("SLURM_STEP_NODELIST=node[")
        );
        assert!(parse(&[&step[..], &by_hand, &odd].concat()).is_ok());
        let env = parse(&[&step[..], &[("PHALANX_RENDEZVOUS", "file:///x")]].concat()).unwrap().unwrap();
        assert_eq!(env.rendezvous, RendezvousEndpoint::Url("file:///x".to_owned()));
        // All on one node.
        let one =
            [("SLURM_STEP_TASKS_PER_NODE", "5"), ("SLURM_NODEID", "0"), ("SLURM_STEP_NODELIST", "node1")];
        let env = parse(&[&step[..], &one].concat()).unwrap().unwrap();
        let (address, port) = ("127.0.0.1".to_owned(), 20_123);
        assert_eq!(env.rendezvous, RendezvousEndpoint::Master { address, port });
    }

    #[test]
    fn empty_variables_are_unset() {
        let empty: Vec<(&str, &str)> = REQUIRED
            .iter()
            .chain(&["LOCAL_RANK", "PMIX_RANK", "PHALANX_BIND"])
            .map(|name| (*name, ""))
            .collect();
        assert_eq!(parse(&empty).unwrap(), None);
    }

    #[test]
    fn a_batch_script_is_no_task() {
        assert_eq!(
            parse(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_NODEID", "0")]).unwrap(),
            None
        );
        let alone = parse(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]).unwrap().unwrap();
        assert_eq!(alone.rendezvous, RendezvousEndpoint::NotNeeded);
    }

    #[test]
    fn open_mpi_on_one_host_needs_no_address() {
        let job = |local_size| {
            [
                ("OMPI_COMM_WORLD_RANK", "0"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", local_size),
                ("PMIX_SERVER_TMPDIR", "/run/ompi.7"),
            ]
        };
        let env = parse(&job("2")).unwrap().unwrap();
        assert_eq!(env.rendezvous, RendezvousEndpoint::Url("file:///run/ompi.7/phalanx".into()));
        assert!(parse(&job("1")).is_err());
    }

    #[test]
    fn mpirun_on_several_hosts_says_where_ranks_meet() {
        let hydra = [
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "5"),
            ("MPI_LOCALRANKID", "1"),
            ("MPI_LOCALNRANKS", "2"),
            ("PMI_FD", "11"),
            ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "node2"),
        ];
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "5"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_SERVER_TMPDIR", "/tmp/prted.7"),
            ("PMIX_NAMESPACE", "prterun-login-28@1"),
        ];
        let met = |pairs: &[(&str, &str)], more: &[(&str, &str)]| {
            let env = parse(&[pairs, more].concat()).unwrap().unwrap();
            (env.rendezvous, env.run_id)
        };
        let pmi = |port| (RendezvousEndpoint::Pmi { descriptor: 11, host: Some("node2".into()), port }, None);
        assert_eq!(met(&hydra, &[]), pmi(0));
        assert_eq!(met(&hydra, &[("MASTER_PORT", "7")]), pmi(7));
        assert!(parse(&[&hydra[..], &[("PMI_FD", "none")]].concat()).is_err());
        let (RendezvousEndpoint::HostOfMpirun { address, port }, id) = met(&open_mpi, &[]) else {
            panic!("not at mpirun's host")
        };
        assert_eq!((address.as_str(), id.as_deref()), ("login", Some("mpirun-prterun-login-28@1")));
        assert!(port >= 20_000);
        let (rendezvous, _) = met(&open_mpi, &[("MASTER_PORT", "7")]);
        assert_eq!(rendezvous, RendezvousEndpoint::HostOfMpirun { address, port: 7 });
        // What is said goes before both.
        for pairs in [&hydra[..], &open_mpi] {
            let (rendezvous, _) = met(pairs, &[("MASTER_ADDR", "ib1"), ("MASTER_PORT", "7")]);
            assert_eq!(rendezvous, RendezvousEndpoint::Master { address: "ib1".into(), port: 7 });
            let (rendezvous, _) = met(pairs, &[("PHALANX_RENDEZVOUS", "file:///x")]);
            assert_eq!(rendezvous, RendezvousEndpoint::Url("file:///x".into()));
        }
    }

    #[test]
    fn what_the_launcher_serves_comes_before_a_url() {
        let extra = [
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("PHALANX_RENDEZVOUS", "tcp://h:1"),
            ("PHALANX_BIND", "0.0.0.0"),
        ];
        let env = parse(&with(&extra)).unwrap().unwrap();
        assert!(matches!(env.rendezvous, RendezvousEndpoint::Master { .. }));
        assert_eq!(env.bind, Some("0.0.0.0".parse().unwrap()));
    }

    #[test]
    fn what_a_launcher_sets_is_what_a_worker_reads() {
        let worker = WorkerEnv {
            rank: Rank::new(3),
            local_rank: 1,
            world_size: WorldSize::new(4).unwrap(),
            local_world_size: 2,
            group_rank: 1,
            group_world_size: 2,
            cross: (0, 1),
            role_name: "default".into(),
            master_addr: "10.0.0.1".into(),
            master_port: 29500,
            restart_count: Generation(2),
            max_restarts: 3,
            run_id: "job".into(),
            agent_store: true,
        };
        let variables = worker.variables_given(|name| name == "OMP_NUM_THREADS");
        assert_eq!(variables.len(), 18);
        assert!(variables.contains(&(NUMBERED_STARTS, "10.0.0.1 29500".to_owned())));
        let with_horovod = worker.variables_given(|name| name == HOROVODRUN);
        let value = |name| with_horovod.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        let names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"];
        assert_eq!(names.map(value), [Some("3"), Some("4"), Some("1"), Some("2")]);
        assert_eq!(["HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"].map(value), [Some("0"), Some("1")]);
        let pairs: Vec<(&str, &str)> = variables.iter().map(|(k, v)| (*k, v.as_str())).collect();
        assert!(pairs.contains(&("RAYON_NUM_THREADS", "1")) && pairs.contains(&("PYTHONUNBUFFERED", "1")));
        assert_eq!(worker.variables_given(|name| name == "PYTHONUNBUFFERED").len(), 18);
        let env = parse(&pairs).unwrap().unwrap();
        assert_eq!(
            (env.rank, env.world_size, env.restart_count),
            (worker.rank, worker.world_size, Generation(2))
        );
        assert_eq!((env.local_rank, env.local_world_size, env.group_rank), (Some(1), Some(2), Some(1)));
        assert_eq!((env.run_id.as_deref(), env.agent_store), (Some("job"), true));
    }
}
