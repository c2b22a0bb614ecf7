//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../common/mod.rs"]
mod common;
mod device;
mod elastic;
mod equivalence;
mod nccl;
#[path = "../../../crates/phalanx-core/tests/support/watchdog.rs"]
mod watchdog;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use phalanx::WorldSize;
use phalanx::launch::{Event, Job, Report};

/// The variable that makes this program a worker: of which kind.
const ROLE: &str = "PHALANX_TEST_ROLE";
/// Where workers and the test leave files for each other.
const FOLDER: &str = "PHALANX_TEST_FOLDER";
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(240);

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        nccl::prepare();
        tch::set_num_threads(1);
        watchdog::abort_after(LIMIT);
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
    let tests = equivalence::TESTS.iter().map(|test| ("equivalence", test));
    let tests = tests.chain(elastic::TESTS.iter().map(|test| ("elastic", test)));
    let tests = tests.chain(device::TESTS.iter().map(|test| ("device", test)));
    let trial = |(file, &(name, test)): (&str, &(&str, fn()))| {
        Trial::test(format!("{file}::{name}"), move || {
            test();
            Ok(())
        })
    };
    let on_devices = device::ON_DEVICES.iter().map(|test| ("device", test));
    let on_devices = on_devices.chain(equivalence::OVER_NCCL.iter().map(|test| ("equivalence", test)));
    let on_devices = on_devices.chain(elastic::OVER_NCCL.iter().map(|test| ("elastic", test)));
    let on_devices = on_devices.chain(nccl::TESTS.iter().map(|test| ("nccl", test))).map(|test| {
        let needs = common::device() == tch::Device::Cpu;
        trial(test).with_kind("needs PHALANX_TEST_DEVICE=cuda").with_ignored_flag(needs)
    });
    let on_stand_in = nccl::ON_STAND_IN.iter().map(|test| {
        let needs =
            std::env::var_os("PHALANX_CUDA_LIBRARY").is_none() || common::device() == tch::Device::Cpu;
        trial(("nccl", test)).with_kind("needs the stand-in for NCCL").with_ignored_flag(needs)
    });
    let trials = tests.map(trial).chain(on_devices).chain(on_stand_in);
    // One after the other: each starts several processes.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials.collect()).exit()
}

/// A job of this program in a role.
fn job(role: &str, workers: u32, folder: &Path) -> Job {
    Job::new(std::env::current_exe().unwrap(), WorldSize::new(workers).unwrap())
        .variable(ROLE, role)
        .variable(FOLDER, folder.to_str().unwrap())
        .variable("OMP_NUM_THREADS", "1")
        .grace(Duration::from_secs(2))
}

/// Runs the job; gives up when it takes too long.
fn run(job: &Job, mut note: impl FnMut(&Event<'_>)) -> Report {
    let start = Instant::now();
    job.run(&mut |event: Event<'_>| {
        note(&event);
        match start.elapsed() < LIMIT {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    })
    .unwrap()
}
