//! The launcher's variables, what `phalanx::init` makes of them, and whether the store can be reached.

use std::env;
use std::time::{Duration, Instant};

use phalanx::env::{LaunchEnv, RendezvousEndpoint};
use phalanx::store::{Store, TcpStore, host_port};
use phalanx::{Credentials, Deadline, Result};

use super::finding::Report;

/// Each launcher, and its variables or their prefix.
const LAUNCHERS: [(&str, &[&str]); 12] = [
    ("env://", &["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]),
    ("torchrun", &["TORCHELASTIC_", "PET_"]),
    ("Phalanx", &["PHALANX_"]),
    ("Open MPI", &["OMPI_COMM_WORLD_"]),
    ("MVAPICH2", &["MV2_COMM_WORLD_"]),
    ("jsrun", &["JSM_NAMESPACE_"]),
    ("Flux", &["FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"]),
    ("PALS", &["PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_NODEID"]),
    ("PMI", &["PMI_RANK", "PMI_SIZE"]),
    ("PMIx", &["PMIX_RANK"]),
    ("Slurm", &["SLURM_"]),
    ("Horovod", &["HOROVOD_"]),
];
/// How long a store may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// This process's rank and world, according to the variables.
pub(super) struct Place(Result<Option<LaunchEnv>>);

impl Place {
    pub fn of_process() -> Self {
        Self(LaunchEnv::from_process())
    }

    fn env(&self) -> Option<&LaunchEnv> {
        self.0.as_ref().ok()?.as_ref()
    }

    pub fn world_size(&self) -> u32 {
        self.env().map_or(1, |env| env.world_size.get())
    }

    pub fn is_main(&self) -> bool {
        self.env().is_none_or(|env| env.rank.is_main())
    }

    /// The address of the launcher's store, if it serves one.
    pub fn store(&self) -> Option<String> {
        self.env().filter(|env| env.agent_store)?;
        self.meeting()
    }

    /// The address of the store at which the ranks meet, whoever serves it.
    pub fn meeting(&self) -> Option<String> {
        match &self.env()?.rendezvous {
            RendezvousEndpoint::Master { address, port }
            | RendezvousEndpoint::HostOfMpirun { address, port } => Some(host_port(address, *port)),
            RendezvousEndpoint::Url(url) => url.strip_prefix("tcp://").map(str::to_owned),
            _ => None,
        }
    }
}

pub(super) fn look(report: &mut Report, place: &Place) {
    // An empty one is not set: a launcher takes what does not concern its workers from them so.
    let set = env::vars_os().filter(|(_, value)| !value.is_empty());
    let names: Vec<String> = set.filter_map(|(name, _)| name.into_string().ok()).collect();
    let seen = seen(&names);
    report
        .note("variables", if seen.is_empty() { "no known launcher's".to_owned() } else { seen.join(", ") });
    if let Some(doubt) = place.0.as_ref().ok().and_then(|env| phalanx::env::doubt(env.as_ref())) {
        report.advise("launcher", doubt, "compare with what the launcher's manual says that it sets");
    }
    match &place.0 {
        Ok(None) => report.good("init", "a world of one"),
        Ok(Some(env)) => {
            let rendezvous = match &env.rendezvous {
                RendezvousEndpoint::Master { address, port } => format!("at {address}, port {port}"),
                RendezvousEndpoint::Url(url) => format!("at {url}"),
                RendezvousEndpoint::Pmi { .. } => {
                    "at an address that rank 0 tells through mpirun (PMI_FD)".to_owned()
                }
                RendezvousEndpoint::HostOfMpirun { address, port } => {
                    format!("at the host of mpirun, {address}, port {port}")
                }
                _ => "none, a world of one".to_owned(),
            };
            report.good("init", format!("rank {} of {}; rendezvous: {rendezvous}", env.rank, env.world_size));
        }
        Err(error) => {
            report.failed("init", error, "set what is missing, or unset what is left over");
        }
    }
}

/// How many variables are set of each launcher that has some.
fn seen(names: &[String]) -> Vec<String> {
    let is_of =
        |known: &str, name: &str| if known.ends_with('_') { name.starts_with(known) } else { name == known };
    let count =
        |known: &[&str]| names.iter().filter(|name| known.iter().any(|known| is_of(known, name))).count();
    let counts = LAUNCHERS.iter().map(|(launcher, known)| (launcher, count(known)));
    counts.filter(|(_, count)| *count > 0).map(|(launcher, count)| format!("{count} of {launcher}")).collect()
}

/// Connects to a store and times its answers.
pub(super) fn reach(report: &mut Report, address: &str) {
    match round_trip(address) {
        Ok(time) => report.good("store", format!("{address} answers in {} µs", time.as_micros())),
        Err(error) => {
            report.failed("store", &error, "is it there, and does a firewall let this host through?");
        }
    }
}

/// The shortest of several measurements.
fn round_trip(address: &str) -> Result<Duration> {
    let deadline = Deadline::after(TIMEOUT);
    let store = TcpStore::connect_with(address, &Credentials::from_env()?, deadline)?;
    let mut shortest = Duration::MAX;
    for _ in 0..10 {
        let start = Instant::now();
        store.num_keys(deadline)?;
        shortest = shortest.min(start.elapsed());
    }
    Ok(shortest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_known_by_their_variables() {
        let names = ["RANK", "RANKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PATH"];
        assert_eq!(seen(&names.map(str::to_owned)), ["1 of env://", "2 of Open MPI", "1 of PMI"]);
        // An operator of Kubernetes sets the options of torchrun.
        assert_eq!(seen(&["PET_NNODES", "PETS"].map(str::to_owned)), ["1 of torchrun"]);
        assert!(seen(&[]).is_empty());
    }
}
