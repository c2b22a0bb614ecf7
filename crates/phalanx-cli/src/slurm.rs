//! A job of Slurm in which this command runs: its nodes are the job's.

use phalanx::launch::{Host, RemoteShell, SlurmAllocation};

use crate::processes::Processes;
use crate::run::Started;
use crate::run_options::Run;

/// The nodes of the Slurm job, if this command is in one and no option says where to run.
pub(crate) fn allocation(options: &Run) -> Result<Option<SlurmAllocation>, String> {
    let hosts = &options.hosts;
    let is_said = options.standalone
        || options.nodes.are_given()
        || hosts.hosts.is_some()
        || hosts.hostfile.is_some()
        || options.elastic.host_discovery_script.is_some();
    match is_said {
        true => Ok(None),
        false => SlurmAllocation::from_process().map_err(|error| error.to_string()),
    }
}

/// How the workers are started on the nodes of `job`, and what is said of it.
pub(crate) fn started(options: &Run, job: &SlurmAllocation) -> Result<(Started, Option<String>), String> {
    let is_here = job.is_this_machine();
    let here = if is_here { options.hosts.here()? } else { None };
    let given = match (options.nproc_per_node, here) {
        (Some(processes), _) => Some(processes),
        (None, Some(workers)) => {
            // The job starts without knowing its tasks: what cannot be read of them is no error here.
            let placed = job.hosts().ok().and_then(|hosts| hosts.place(None).ok());
            let tasks =
                placed.map(|placed| placed.hosts().iter().map(Host::slots).fold(0u32, u32::saturating_add));
            let note = tasks.and_then(|tasks| more_than_tasks(job.job(), workers.get(), tasks, job.source()));
            return Ok((Started::Here(workers), note));
        }
        (None, None) => Processes::from_other_variable()?,
    };
    match (is_here, given) {
        (true, Some(processes)) => return Ok((Started::Here(processes.count()?), None)),
        (true, None) => {}
        (false, _) => needs_nothing_else(options)?,
    }
    let hosts = match given {
        None => match options.hosts.num_proc {
            // The only node has all of them, as where this command runs on it.
            Some(all) if job.nodes() == 1 => job.hosts_with(all),
            _ => job.hosts(),
        },
        Some(Processes::Number(count)) => job.hosts_with(count.get()),
        Some(Processes::Cpu | Processes::Gpu | Processes::Auto) => {
            return Err(format!(
                "--nproc-per-node cpu, gpu and auto count what this machine has, which need not be what the nodes of the Slurm job {} have: give a \
                 number, or submit the job with --ntasks-per-node",
                job.job()
            ));
        }
    };
    let hosts = hosts.map_err(|error| error.to_string())?;
    let source = if given.is_some() { "--nproc-per-node" } else { job.source() };
    let placed = match options.elastic.min_np {
        // Workers may start on any node with free slots.
        Some(_) => hosts,
        None => hosts.place(options.hosts.num_proc).map_err(|error| {
            format!(
                "the Slurm job {}, {source}: {}. Submit it with --ntasks-per-node, or give --nproc-per-node",
                job.job(),
                error.cause()
            )
        })?,
    };
    let slots: Vec<u32> = placed.hosts().iter().map(Host::slots).collect();
    let note = describe(job.job(), &slots, source, job.is_this_machine());
    match slots[..] {
        [workers] if job.is_this_machine() => {
            let workers = phalanx::WorldSize::new(workers).map_err(|error| error.to_string())?;
            Ok((Started::Here(workers), Some(note)))
        }
        _ => Ok((Started::Hosts(placed, RemoteShell::srun()), Some(note))),
    }
}

/// What is said where `-np` asks for more workers than the job's only node has tasks: more nodes may have been meant.
fn more_than_tasks(job: &str, workers: u32, tasks: u32, source: &str) -> Option<String> {
    (workers > tasks).then(|| {
        let several = if tasks == 1 { "1 task".to_owned() } else { format!("{tasks} tasks") };
        format!(
            "Slurm job {job}: {workers} workers on its only node, for which it has {several} ({source}); if more nodes were meant, submit it with --nodes"
        )
    })
}

/// An error for options that would have no effect on the nodes of a Slurm job.
fn needs_nothing_else(options: &Run) -> Result<(), String> {
    let given = [
        (
            "--rdzv-backend",
            options.nodes.rdzv_backend.is_some(),
            "the launchers that srun starts meet at the first node",
        ),
        (
            "--local-addr",
            options.nodes.local_addr.is_some(),
            "it is one node's, and srun starts a launcher on each",
        ),
        ("--ssh-port", options.hosts.ssh_port.is_some(), "srun starts the launchers, and not ssh"),
        (
            "--ssh-identity-file",
            options.hosts.ssh_identity_file.is_some(),
            "srun starts the launchers, and not ssh",
        ),
    ];
    match given.iter().find(|(_, given, _)| *given) {
        Some((option, _, why)) => Err(format!(
            "{option} has no meaning on the nodes of a Slurm job: {why}. Leave it out, or name the nodes with -H, or with --nnodes and --master-addr"
        )),
        None => Ok(()),
    }
}

/// What is said of the job: `Slurm job 7: 3 workers on 2 nodes, 2 and 1 (SLURM_TASKS_PER_NODE), started by srun`.
fn describe(job: &str, slots: &[u32], source: &str, is_here: bool) -> String {
    let several = |count: u32, what: &str| {
        if count == 1 { format!("{count} {what}") } else { format!("{count} {what}s") }
    };
    let sum: u32 = slots.iter().fold(0, |sum, slots| sum.saturating_add(*slots));
    let workers = several(sum, "worker");
    if is_here {
        return format!("Slurm job {job}: {workers} on this node ({source})");
    }
    let first = slots.first().copied().unwrap_or_default();
    let (least, most) =
        slots.iter().fold((first, first), |(least, most), slots| (least.min(*slots), most.max(*slots)));
    let each = if least == most { format!("{least} on each") } else { format!("{least} to {most} on each") };
    let nodes = several(slots.len() as u32, "node");
    format!("Slurm job {job}: {workers} on {nodes}, {each} ({source}), started by srun")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(words: &[&str]) -> Run {
        match Cli::parse_from([&["phalanx", "run"], words, &["./train"]].concat()).command {
            Command::Run(run) => *run,
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_job_is_described_in_one_line() {
        assert_eq!(
            describe("7", &[2, 2, 1], "SLURM_TASKS_PER_NODE", false),
            "Slurm job 7: 5 workers on 3 nodes, 1 to 2 on each (SLURM_TASKS_PER_NODE), started by srun"
        );
        assert_eq!(
            describe("7", &[4], "--nproc-per-node", false),
            "Slurm job 7: 4 workers on 1 node, 4 on each (--nproc-per-node), started by srun"
        );
        assert_eq!(
            describe("7", &[1], "SLURM_NTASKS_PER_NODE", true),
            "Slurm job 7: 1 worker on this node (SLURM_NTASKS_PER_NODE)"
        );
    }

    #[test]
    fn more_workers_than_tasks_on_one_node_are_noted() {
        let note = more_than_tasks("7", 8, 4, "SLURM_TASKS_PER_NODE").unwrap();
        assert!(
            note.contains("8 workers on its only node")
                && note.contains("4 tasks")
                && note.ends_with("--nodes"),
            "{note}"
        );
        assert_eq!(more_than_tasks("7", 4, 4, "SLURM_TASKS_PER_NODE"), None);
    }

    #[test]
    fn options_without_meaning_are_named() {
        for (words, option) in [
            (&["--rdzv-backend", "c10d"][..], "--rdzv-backend"),
            (&["--ssh-port", "22"], "--ssh-port"),
            (&["--ssh-identity-file", "key"], "--ssh-identity-file"),
            (&["--local-addr", "node1"], "--local-addr"),
        ] {
            let error = needs_nothing_else(&parse(words)).unwrap_err();
            assert!(error.starts_with(option) && error.contains("--nnodes and --master-addr"), "{error}");
        }
        assert_eq!(needs_nothing_else(&parse(&["--max-restarts", "3", "--master-port", "7"])), Ok(()));
    }
}
