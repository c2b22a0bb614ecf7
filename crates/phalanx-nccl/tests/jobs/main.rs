//! Ranks as real processes, on the stand-ins for libcuda and libnccl (tests/stand_in), which are no GPU; with `PHALANX_TEST_GPU=1` on the
//! real ones, and with `PHALANX_TEST_GPU=shared` all ranks on the first device. This program starts itself as the ranks, so that it has a `main` of its own.
//! `cargo test -p phalanx-nccl --test jobs -- faults::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod collectives;
mod devices;
#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
mod faults;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
mod init;
mod overlap;
#[path = "../../../phalanx-core/tests/support/ranks.rs"]
mod ranks;
mod shrink;
mod stand_in;
mod world;

use libtest_mimic::{Arguments, Trial};
use phalanx_nccl::Device;

/// A test: its name, how many devices it needs, and whether it needs the stand-in's faults.
pub type Test = (&'static str, u32, Needs, fn());

/// What a test needs besides devices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// That a process sees all of them.
    Devices,
    /// Faults that only the stand-in has.
    StandIn,
}

/// If set, the tests run on this machine's GPUs.
const REAL: &str = "PHALANX_TEST_GPU";

/// Whether the real libraries are wanted.
pub fn is_real() -> bool {
    std::env::var_os(REAL).is_some_and(|value| !value.is_empty())
}

/// Whether all ranks share one real device. NCCL takes them for ranks of different hosts, which talk over sockets.
pub fn is_shared() -> bool {
    std::env::var(REAL).is_ok_and(|value| value == "shared")
}

fn main() {
    if let Some(role) = harness::role() {
        return play(&role);
    }
    let folder = tempfile::tempdir().unwrap();
    let real = is_real();
    if !real {
        for (variable, library) in stand_in::build(folder.path()) {
            // SAFETY: no other thread has been started yet.
            unsafe { std::env::set_var(variable, library) };
        }
    }
    // A real driver that cannot be opened is a failure of every test, and no reason to leave them out.
    let devices = match real.then(|| Device::count().unwrap()) {
        Some(found) if !is_shared() => found,
        // As many as any test wants.
        Some(_) | None => 8,
    };
    let files = [
        ("collectives", collectives::TESTS),
        ("devices", devices::TESTS),
        ("faults", faults::TESTS),
        ("init", init::TESTS),
        ("overlap", overlap::TESTS),
        ("shrink", shrink::TESTS),
    ];
    let trials = files.into_iter().flat_map(|(file, tests)| {
        tests.iter().map(move |(name, ranks, needs, test)| {
            let reason = match needs {
                Needs::StandIn if real => " (needs the stand-in)".to_owned(),
                Needs::Devices if is_shared() => format!(" (needs {ranks} devices)"),
                _ if *ranks > devices => format!(" (needs {ranks} devices, this machine has {devices})"),
                _ => String::new(),
            };
            let test = *test;
            Trial::test(format!("{file}::{name}{reason}"), move || {
                test();
                Ok(())
            })
            .with_ignored_flag(!reason.is_empty())
        })
    });
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials.collect());
    drop(folder);
    conclusion.exit()
}

/// What this program does as a rank.
fn play(role: &str) {
    let outcome = match role.split_once("::").unwrap() {
        ("collectives", role) => collectives::play(role),
        ("devices", role) => devices::play(role),
        ("faults", role) => faults::play(role),
        ("init", role) => init::play(role),
        ("overlap", role) => overlap::play(role),
        ("shrink", role) => shrink::play(role),
        (file, _) => panic!("no file {file}"),
    };
    match outcome {
        Ok(()) => println!("done"),
        Err(error) => println!("{error}"),
    }
}
