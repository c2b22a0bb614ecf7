//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
//! `cargo test -p phalanx-burn --test jobs -- elastic::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../common/mod.rs"]
mod common;
mod devices;
mod elastic;
mod meshes;
#[cfg(feature = "nccl")]
mod nccl;
mod sharded;
mod stages;
#[path = "../../../phalanx-core/tests/support/watchdog.rs"]
mod watchdog;
mod workers;

use libtest_mimic::{Arguments, Trial};

/// The variable that makes this program a worker: of which file.
const ROLE: &str = "PHALANX_TEST_ROLE";

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("devices") => return devices::play(),
        #[cfg(feature = "nccl")]
        Ok("nccl") => return nccl::play(),
        Ok("elastic") => return elastic::play(),
        Ok("stages") => return stages::play(),
        Ok("sharded") => return sharded::play(),
        Ok("meshes") => return meshes::play(),
        Ok("launcher") => return meshes::launch(),
        Ok(other) => panic!("no role {other}"),
        Err(_) => {}
    }
    let trials = |file: &'static str, tests: &[(&'static str, fn())]| -> Vec<Trial> {
        let trial = |&(name, test): &(&'static str, fn())| {
            Trial::test(format!("{file}::{name}"), move || {
                test();
                Ok(())
            })
        };
        tests.iter().map(trial).collect()
    };
    // One after the other: each starts several processes.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    let files = [
        ("devices", devices::TESTS),
        ("elastic", elastic::TESTS),
        ("stages", stages::TESTS),
        ("sharded", sharded::TESTS),
        ("meshes", meshes::TESTS),
    ];
    let all = files.into_iter().flat_map(|(file, tests)| trials(file, tests));
    #[cfg(feature = "nccl")]
    let all = all.chain(nccl::trials());
    let all = all.collect();
    libtest_mimic::run(&arguments, all).exit()
}
