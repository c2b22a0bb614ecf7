//! The environment of what tests start. Tests may run in a worker of a launcher, such as an interactive step of Slurm: a program that has
//! the worker's variables takes itself for that rank.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "not every test needs everything")]

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The beginnings of variables that launchers set, ours among them.
const LAUNCHERS: &[&str] = &[
    "ALPS_",
    "FLUX_",
    "GLOO_",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "HOROVOD_",
    "JSM_",
    "KUBERNETES_",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "MPI_",
    "MV2_",
    "OMPI_",
    "PALS_",
    "PET_",
    "PHALANX_",
    "PMI",
    "RANK",
    "ROLE_",
    "SLURM",
    "TORCHELASTIC_",
    "WORLD_SIZE",
];
/// Of these, the beginnings of those that are for tests.
const TESTS: &[&str] = &["PHALANX_CUDA_LIBRARY", "PHALANX_NCCL_LIBRARY", "PHALANX_TEST_"];

/// `program`, in this process's environment without the variables of launchers.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for name in of_launchers() {
        command.env_remove(name);
    }
    command
}

/// Starts this program again, in this process, if it has variables of launchers: all that it starts then has none.
pub fn leave_launchers() {
    if !of_launchers().is_empty() {
        let mut again = command(std::env::current_exe().unwrap());
        panic!("{}", again.args(std::env::args_os().skip(1)).exec());
    }
}

fn of_launchers() -> Vec<OsString> {
    let begins = |name: &OsStr, beginnings: &[&str]| {
        let name = name.to_string_lossy();
        beginnings.iter().any(|beginning| name.starts_with(beginning))
    };
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| begins(name, LAUNCHERS) && !begins(name, TESTS)).collect()
}
