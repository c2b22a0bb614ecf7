//! Ranks from the variables of launchers other than torchrun: pure.

use phalanx_proto::launch::open_mpi::MpirunHost;
use phalanx_proto::launch::slurm::{self, StepMeeting};

use super::{RendezvousEndpoint, Variables, malformed};
use crate::error::{Error, Result};

/// The variable names of one launcher; of several for one value, the first that is set counts.
struct Names {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    node: Option<&'static str>,
}

/// In this order: if a job sees more than one, the first is the closest.
const LAUNCHERS: [Names; 8] = [
    // horovodrun.
    Names {
        rank: "HOROVOD_RANK",
        size: &["HOROVOD_SIZE"],
        local_rank: &["HOROVOD_LOCAL_RANK"],
        local_size: &["HOROVOD_LOCAL_SIZE"],
        node: Some("HOROVOD_CROSS_RANK"),
    },
    // Open MPI's mpirun. Its NODE_RANK is not the number of a node.
    Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        node: None,
    },
    // MVAPICH2's mpirun_rsh.
    Names {
        rank: "MV2_COMM_WORLD_RANK",
        size: &["MV2_COMM_WORLD_SIZE"],
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        node: None,
    },
    // IBM's jsrun.
    Names {
        rank: "JSM_NAMESPACE_RANK",
        size: &["JSM_NAMESPACE_SIZE"],
        local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
        local_size: &["JSM_NAMESPACE_LOCAL_SIZE"],
        node: None,
    },
    // Flux.
    Names {
        rank: "FLUX_TASK_RANK",
        size: &["FLUX_JOB_SIZE"],
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        local_size: &[],
        node: None,
    },
    // HPE's PALS, which says the size as PMI does.
    Names {
        rank: "PALS_RANKID",
        size: &["PALS_SIZE", "PMI_SIZE"],
        local_rank: &["PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"],
        local_size: &["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"],
        node: Some("PALS_NODEID"),
    },
    // Hydra: MPICH's and Intel's mpirun; Cray's has its own names for what is local.
    Names {
        rank: PMI_RANK,
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        node: None,
    },
    // srun. A batch script sees SLURM_NTASKS too, but is not one of the tasks: only a step has a number of tasks.
    Names {
        rank: SLURM_RANK,
        size: &[SLURM_SIZE],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        node: Some("SLURM_NODEID"),
    },
];
const PMI_RANK: &str = "PMI_RANK";
const SLURM_RANK: &str = "SLURM_PROCID";
const SLURM_SIZE: &str = "SLURM_STEP_NUM_TASKS";

/// Ranks of launchers that do not say how many ranks there are: PRRTE's and Slurm's PMIx, Cray's aprun.
const RANKS_ALONE: [&str; 2] = ["PMIX_RANK", "ALPS_APP_PE"];

/// A rank's position. Only rank and size are always known.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ForeignRank {
    pub rank: (&'static str, u32),
    pub world_size: (&'static str, u32),
    pub local_rank: Option<u32>,
    pub local_world_size: Option<u32>,
    pub node: Option<u32>,
}

/// The values of the first launcher that sets both rank and size. An error if launchers have set ranks, and none a size: such a
/// process is no world of one.
pub(super) fn place<F: Fn(&str) -> Option<String>>(variables: &Variables<F>) -> Result<Option<ForeignRank>> {
    for names in &LAUNCHERS {
        let (Some(rank), Some((size_name, size))) =
            (variables.parse_optional(names.rank)?, first(variables, names.size)?)
        else {
            continue;
        };
        // srun's own PMI gives its numbers under these names as well, and says less.
        let is_srun_s = names.rank == PMI_RANK
            && variables.parse_optional(SLURM_RANK)? == Some(rank)
            && variables.parse_optional(SLURM_SIZE)? == Some(size);
        if is_srun_s {
            continue;
        }
        let node = match names.node {
            Some(name) => variables.parse_optional(name)?,
            None => None,
        };
        let local_world_size = match names.rank {
            SLURM_RANK => tasks_on_node(variables, node)?,
            _ => first(variables, names.local_size)?.map(|(_, size)| size),
        };
        return Ok(Some(ForeignRank {
            rank: (names.rank, rank),
            world_size: (size_name, size),
            local_rank: first(variables, names.local_rank)?.map(|(_, rank)| rank),
            local_world_size,
            node,
        }));
    }
    for rank in LAUNCHERS.iter().map(|names| names.rank).chain(RANKS_ALONE) {
        match variables.parse_optional::<u32>(rank)? {
            // A batch script.
            Some(0) if rank == SLURM_RANK => {}
            Some(number) => return Err(without_size(rank, number)),
            None => {}
        }
    }
    Ok(None)
}

fn without_size(name: &str, rank: u32) -> Error {
    Error::environment(format!(
        "{name}={rank} says that a launcher started this process as one of several, and nothing says how many there are"
    ))
    .with_remedy(format!(
        "set RANK=${name}, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank, or start the program with `phalanx run`; unset \
         {name} for a world of one"
    ))
}

/// The first of `names` that is set, and its value.
fn first<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    names: &[&'static str],
) -> Result<Option<(&'static str, u32)>> {
    for name in names {
        if let Some(value) = variables.parse_optional(name)? {
            return Ok(Some((name, value)));
        }
    }
    Ok(None)
}

/// A variable that looks like the rank of a launcher that is not known here, above 0: its process may be one of several, and would be a
/// world of one.
pub(super) fn unknown_rank(variables: impl Iterator<Item = (String, String)>) -> Option<(String, u32)> {
    let is_rank = |name: &str| {
        let of_world = ["_RANK", "_RANKID", "_PROCID"].iter().any(|end| name.ends_with(end));
        let of_less = ["LOCAL", "NODE", "GROUP", "ROLE", "CROSS"].iter().any(|part| name.contains(part));
        of_world && !of_less
    };
    let ranks = variables
        .filter_map(|(name, value)| Some((is_rank(&name).then_some(name)?, value.trim().parse().ok()?)));
    ranks.filter(|(_, rank)| *rank > 0).min()
}

/// Where the ranks meet by default, if their launcher says so. `MASTER_PORT` goes before a port that follows from the job.
pub(super) fn rendezvous<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
) -> Result<Option<RendezvousEndpoint>> {
    let port = variables.parse_optional("MASTER_PORT")?;
    let file = shared_file(variables, place).map(RendezvousEndpoint::Url);
    let step = slurm_step(variables, place)?
        .map(|step| RendezvousEndpoint::Master { address: step.address, port: port.unwrap_or(step.port) });
    let mpirun = mpirun(variables, place).map(|mpirun| RendezvousEndpoint::HostOfMpirun {
        address: mpirun.address,
        port: port.unwrap_or(mpirun.port),
    });
    Ok(file.or(step).or(pmi(variables, place, port)?).or(mpirun))
}

/// The launcher's name for the job, if it has one.
pub(super) fn run_id<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
) -> Option<String> {
    // What cannot be understood and is not needed is no error.
    let step = slurm_step(variables, place).ok().flatten();
    step.map(|step| step.id).or_else(|| Some(mpirun(variables, place)?.id))
}

/// A file at which all ranks of this job can meet by default, if there is one: Open MPI gives each job of one host a
/// folder.
fn shared_file<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
) -> Option<String> {
    let one_host = place.local_world_size == Some(place.world_size.1);
    let is_open_mpi = place.rank.0.starts_with("OMPI_");
    let folder = variables.text("PMIX_SERVER_TMPDIR")?;
    (one_host && is_open_mpi && folder.starts_with('/')).then(|| format!("file://{folder}/phalanx"))
}

/// The connection to Hydra, over which rank 0 tells its address, if `place` is Hydra's.
fn pmi<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
    port: Option<u16>,
) -> Result<Option<RendezvousEndpoint>> {
    if place.rank.0 != PMI_RANK {
        return Ok(None);
    }
    let Some(descriptor) = variables.parse_optional("PMI_FD")? else { return Ok(None) };
    // MPICH 5, and MPICH 4 and Intel MPI.
    let host = variables.text("PMI_HOSTNAME").or_else(|| variables.text("MPIR_CVAR_CH3_INTERFACE_HOSTNAME"));
    Ok(Some(RendezvousEndpoint::Pmi { descriptor, host, port: port.unwrap_or(0) }))
}

/// The host of Open MPI's mpirun, if `place` is Open MPI's and its variables name the host.
fn mpirun<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
) -> Option<MpirunHost> {
    let is_open_mpi = place.rank.0.starts_with("OMPI_");
    is_open_mpi.then(|| MpirunHost::read(|name| variables.text(name))).flatten()
}

/// Where the tasks of the step meet that Slurm's `place` is in.
fn slurm_step<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
) -> Result<Option<StepMeeting>> {
    if place.rank.0 != SLURM_RANK {
        return Ok(None);
    }
    let is_on_one_node = place.local_world_size == Some(place.world_size.1);
    StepMeeting::read(|name| variables.text(name), is_on_one_node)
}

/// Slurm's list of the number of tasks on each node.
fn tasks_on_node<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    node: Option<u32>,
) -> Result<Option<u32>> {
    const NAME: &str = "SLURM_STEP_TASKS_PER_NODE";
    let (Some(list), Some(node)) = (variables.text(NAME), node) else { return Ok(None) };
    let counts = slurm::counts(&list).map_err(|cause| malformed(NAME, &list, &cause))?;
    match counts.get(node as usize) {
        Some(count) => Ok(Some(*count)),
        None => Err(malformed(NAME, &list, &format!("it does not say how many tasks node {node} has"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_unknown_launchers_are_seen() {
        let unknown = |pairs: &[(&str, &str)]| {
            unknown_rank(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
        };
        assert_eq!(unknown(&[("PATH", "1"), ("NEW_RANK", "3")]), Some(("NEW_RANK".to_owned(), 3)));
        assert_eq!(unknown(&[("ANOTHER_PROCID", " 1 ")]), Some(("ANOTHER_PROCID".to_owned(), 1)));
        for none in [
            ("NEW_RANK", "0"),
            ("NEW_RANK", "first"),
            ("NEW_LOCAL_RANK", "1"),
            ("PET_NODE_RANK", "1"),
            ("RANKS", "2"),
        ] {
            assert_eq!(unknown(&[none]), None, "{none:?}");
        }
    }
}
