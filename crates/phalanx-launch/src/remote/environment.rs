//! Which variables are sent to other hosts.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::protocol::ToLauncher;
use crate::error::{Error, Result};

/// Variables that belong to a machine, a login or a terminal, and are not sent.
const NOT_FORWARDED: [&str; 30] = [
    "_",
    "COLUMNS",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "GPG_TTY",
    "HOME",
    "HOST",
    "HOSTNAME",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "KRB5CCNAME",
    "LINES",
    "LOGNAME",
    "MAIL",
    "NOTIFY_SOCKET",
    "OLDPWD",
    "PET_LOCAL_ADDR",
    "PHALANX_BIND",
    "PHALANX_HOST_ID",
    "PHALANX_RSH",
    "PWD",
    "SHELL",
    "SHLVL",
    "STY",
    "TERM",
    "USER",
    "WAYLAND_DISPLAY",
    "WINDOWID",
    "XAUTHORITY",
    "XPC_SERVICE_NAME",
];
const NOT_FORWARDED_PREFIXES: [&str; 7] =
    ["BASH_FUNC_", "LISTEN_", "SSH_", "SUDO_", "SYSTEMD_", "TMUX", "XDG_"];

/// Variables that srun would take for options, of which a launcher's step has its own, and those of this machine. The first
/// [`TOLD_TO_PROGRAMS`] describe the job, and programs read them.
pub(super) const NOT_FOR_SRUN: [&str; 39] = [
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_TASK",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TRES_PER_TASK",
    // From here on they are only kept from srun.
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_DIST_PLANESIZE",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_GPU_BIND",
    "SLURM_HINT",
    "SLURM_IMMEDIATE",
    "SLURM_LABELIO",
    "SLURM_MEM_BIND",
    "SLURM_MPI_TYPE",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_OPEN_MODE",
    "SLURM_OVERCOMMIT",
    "SLURM_RESV_PORTS",
    "SLURM_STDERRMODE",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SLURM_THREADS",
    "SLURM_THREADS_PER_CORE",
    "SLURM_WHOLE",
    "SRUN_CPUS_PER_TASK",
    "PET_LOCAL_ADDR",
    "PHALANX_BIND",
    "PHALANX_HOST_ID",
];
const TOLD_TO_PROGRAMS: usize = 9;

/// What a launcher gets first: the working directory and the environment of this command, unless srun passes it on.
pub(super) fn environment(is_by_srun: bool) -> Result<ToLauncher> {
    let folder = std::env::current_dir()
        .map_err(|error| Error::io("cannot find the current working directory", error))?;
    let all = std::env::vars_os();
    let variables = match is_by_srun {
        true => pairs(all.filter(|(name, _)| is_for_programs(name))),
        false => forwarded(all),
    };
    Ok(ToLauncher::Environment { folder: folder.into_os_string().into_vec(), variables })
}

fn is_for_programs(name: &OsStr) -> bool {
    NOT_FOR_SRUN.iter().take(TOLD_TO_PROGRAMS).any(|known| OsStr::new(known) == name)
}

/// The variables of `all` that are sent to other hosts.
fn forwarded(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<(Vec<u8>, Vec<u8>)> {
    pairs(all.filter(|(name, _)| is_forwarded(name)))
}

fn pairs(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<(Vec<u8>, Vec<u8>)> {
    variables.map(|(name, value)| (name.into_vec(), value.into_vec())).collect()
}

fn is_forwarded(name: &OsStr) -> bool {
    let name = name.as_bytes();
    !NOT_FORWARDED.iter().any(|other| other.as_bytes() == name)
        && !NOT_FORWARDED_PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_see_what_the_slurm_job_asks_for_and_srun_does_not() {
        let is = |name: &str| is_for_programs(OsStr::new(name));
        assert!(is("SLURM_CPUS_PER_TASK") && is("SLURM_TRES_PER_TASK") && is("SLURM_NTASKS_PER_NODE"));
        // srun sets these for the step, or they are this command's.
        assert!(!is("SLURM_NTASKS") && !is("SLURM_CPU_BIND") && !is("PHALANX_BIND") && !is("PATH"));
    }

    #[test]
    fn a_jobs_variables_go_and_a_logins_stay() {
        let all = [
            "PATH",
            "CUDA_VISIBLE_DEVICES",
            "PET_MAX_RESTARTS",
            "HOME",
            "SSH_AUTH_SOCK",
            "XDG_RUNTIME_DIR",
            "PWD",
            "PHALANX_HOST_ID",
        ]
        .map(|name| (OsString::from(name), OsString::from("x")));
        let names: Vec<_> = forwarded(all.into_iter()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, [&b"PATH"[..], b"CUDA_VISIBLE_DEVICES", b"PET_MAX_RESTARTS"]);
    }
}
