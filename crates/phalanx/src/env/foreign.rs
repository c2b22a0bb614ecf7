//! Ranks from the variables of launchers other than torchrun: pure.

use super::Variables;
use super::malformed;
use crate::error::Result;

/// The variable names of one launcher.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    node: Option<&'static str>,
}

/// In this order: if a job sees more than one, the first is the closest.
const LAUNCHERS: [Names; 4] = [
    // horovodrun.
    Names {
        rank: "HOROVOD_RANK",
        size: "HOROVOD_SIZE",
        local_rank: "HOROVOD_LOCAL_RANK",
        local_size: "HOROVOD_LOCAL_SIZE",
        node: Some("HOROVOD_CROSS_RANK"),
    },
    // Open MPI's mpirun. Its NODE_RANK is not the number of a node.
    Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        node: None,
    },
    // Hydra: MPICH's and Intel's mpirun.
    Names {
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        node: None,
    },
    // srun. A batch script sees SLURM_NTASKS too, but is not one of the tasks: only a step has a number of tasks.
    Names {
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "",
        node: Some("SLURM_NODEID"),
    },
];

/// A rank's position. Only rank and size are always known.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ForeignRank {
    pub rank: (&'static str, u32),
    pub world_size: (&'static str, u32),
    pub local_rank: Option<u32>,
    pub local_world_size: Option<u32>,
    pub node: Option<u32>,
}

/// The values of the first launcher that sets both rank and size.
pub(super) fn place<F: Fn(&str) -> Option<String>>(variables: &Variables<F>) -> Result<Option<ForeignRank>> {
    for names in &LAUNCHERS {
        let (Some(rank), Some(size)) =
            (variables.parse_optional(names.rank)?, variables.parse_optional(names.size)?)
        else {
            continue;
        };
        let node = match names.node {
            Some(name) => variables.parse_optional(name)?,
            None => None,
        };
        let local_world_size = match names.local_size {
            "" => tasks_on_node(variables, node)?,
            name => variables.parse_optional(name)?,
        };
        return Ok(Some(ForeignRank {
            rank: (names.rank, rank),
            world_size: (names.size, size),
            local_rank: variables.parse_optional(names.local_rank)?,
            local_world_size,
            node,
        }));
    }
    Ok(None)
}

/// A file at which all ranks of this job can meet by default, if there is one: Open MPI gives each job of one host a
/// folder.
pub(super) fn shared_file<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    place: &ForeignRank,
) -> Option<String> {
    let one_host = place.local_world_size == Some(place.world_size.1);
    let is_open_mpi = place.rank.0.starts_with("OMPI_");
    let folder = variables.text("PMIX_SERVER_TMPDIR")?;
    (one_host && is_open_mpi && folder.starts_with('/')).then(|| format!("file://{folder}/phalanx"))
}

/// Slurm's list of the number of tasks on each node.
fn tasks_on_node<F: Fn(&str) -> Option<String>>(
    variables: &Variables<F>,
    node: Option<u32>,
) -> Result<Option<u32>> {
    const NAME: &str = "SLURM_STEP_TASKS_PER_NODE";
    let (Some(list), Some(node)) = (variables.text(NAME), node) else { return Ok(None) };
    match nth_count(&list, node) {
        Some(count) => Ok(Some(count)),
        None => Err(malformed(NAME, &list, &format!("it does not say how many tasks node {node} has"))),
    }
}

/// The `node`-th number of a list such as `2(x3),1`, which means 2, 2, 2, 1.
fn nth_count(list: &str, node: u32) -> Option<u32> {
    let mut before = 0_u32;
    for entry in list.split(',') {
        let (count, times) = match entry.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        before = before.checked_add(times)?;
        if node < before {
            return count.trim().parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slurms_lists_are_read() {
        let counts = |list| (0..5).map(|node| nth_count(list, node)).collect::<Vec<_>>();
        assert_eq!(counts("2(x3),1"), [Some(2), Some(2), Some(2), Some(1), None]);
        assert_eq!(counts("4")[..2], [Some(4), None]);
        for bad in ["", "x", "2(x", "2(xy)", "(x9)"] {
            assert_eq!(nth_count(bad, 4), None, "{bad}");
        }
        assert_eq!(nth_count("1(x4294967295),1(x2)", u32::MAX), None);
    }
}
