//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
//! `cargo test -p phalanx-burn --test jobs -- elastic::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../common/mod.rs"]
mod common;
mod devices;
mod elastic;
#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
mod meshes;
#[cfg(feature = "nccl")]
mod nccl;
#[path = "../../../phalanx-core/tests/support/ranks.rs"]
mod ranks;
mod sharded;
mod stages;

use libtest_mimic::Arguments;

fn main() {
    match harness::role().as_deref() {
        Some("devices") => return devices::play(),
        #[cfg(feature = "nccl")]
        Some("nccl") => return nccl::play(),
        Some("elastic") => return elastic::play(),
        Some("stages") => return stages::play(),
        Some("sharded") => return sharded::play(),
        Some("meshes") => return meshes::play(),
        Some("launcher") => return meshes::launch(),
        Some(other) => panic!("no role {other}"),
        None => {}
    }
    // One after the other: each starts several processes.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    let files = [
        ("devices", devices::TESTS),
        ("elastic", elastic::TESTS),
        ("stages", stages::TESTS),
        ("sharded", sharded::TESTS),
        ("meshes", meshes::TESTS),
    ];
    let all = files.into_iter().flat_map(|(file, tests)| harness::trials(file, tests));
    #[cfg(feature = "nccl")]
    let all = all.chain(nccl::trials());
    let all = all.collect();
    libtest_mimic::run(&arguments, all).exit()
}
