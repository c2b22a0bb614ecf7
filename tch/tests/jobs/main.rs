//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../common/mod.rs"]
mod common;
mod device;
mod elastic;
#[path = "../../../crates/phalanx-core/tests/support/environment.rs"]
mod environment;
mod equivalence;
#[path = "../../../crates/phalanx-core/tests/support/harness.rs"]
mod harness;
mod nccl;

use std::path::{Path, PathBuf};
use std::time::Duration;

use libtest_mimic::Arguments;
use phalanx::WorldSize;
use phalanx::launch::{Event, Job, Report};

/// Where workers and the test leave files for each other.
const FOLDER: &str = "PHALANX_TEST_FOLDER";
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(240);

fn main() {
    if let Some(role) = harness::role() {
        nccl::prepare();
        tch::set_num_threads(1);
        harness::abort_after(LIMIT);
        let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
        let outcome = match role.split_once(' ') {
            Some(("equivalence", case)) => equivalence::play(case, &folder),
            Some(("nccl", case)) => nccl::play(case),
            Some(("elastic", case)) => elastic::play(case, &folder),
            None if role == "device" => device::play(&folder),
            _ => panic!("no role {role}"),
        };
        if let Err(error) = outcome {
            eprintln!("{error}");
            std::process::exit(1);
        }
        return;
    }
    let tests = [("equivalence", equivalence::TESTS), ("elastic", elastic::TESTS), ("device", device::TESTS)];
    let tests = tests.into_iter().flat_map(|(file, tests)| harness::trials(file, tests));
    let on_devices = [
        ("device", device::ON_DEVICES),
        ("equivalence", equivalence::OVER_NCCL),
        ("elastic", elastic::OVER_NCCL),
        ("nccl", nccl::TESTS),
    ];
    let on_devices = on_devices.into_iter().flat_map(|(file, tests)| harness::trials(file, tests));
    let on_devices = on_devices.map(|trial| {
        let needs = common::device() == tch::Device::Cpu;
        trial.with_kind("needs PHALANX_TEST_DEVICE=cuda").with_ignored_flag(needs)
    });
    let on_stand_in = [("elastic", elastic::ON_STAND_IN), ("nccl", nccl::ON_STAND_IN)];
    let on_stand_in = on_stand_in.into_iter().flat_map(|(file, tests)| harness::trials(file, tests));
    let on_stand_in = on_stand_in.map(|trial| {
        let needs =
            std::env::var_os("PHALANX_CUDA_LIBRARY").is_none() || common::device() == tch::Device::Cpu;
        trial.with_kind("needs the stand-in for NCCL").with_ignored_flag(needs)
    });
    let trials = tests.chain(on_devices).chain(on_stand_in);
    // One after the other: each starts several processes.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials.collect()).exit()
}

/// A job of this program in a role.
fn job(role: &str, workers: u32, folder: &Path) -> Job {
    Job::new(std::env::current_exe().unwrap(), WorldSize::new(workers).unwrap())
        .variable(harness::ROLE, role)
        .variable(FOLDER, folder.to_str().unwrap())
        .variable("OMP_NUM_THREADS", "1")
        .grace(Duration::from_secs(2))
}

/// Runs the job; gives up when it takes too long.
fn run(job: &Job, note: impl FnMut(&Event<'_>)) -> Report {
    harness::run_job(job, LIMIT, note)
}
