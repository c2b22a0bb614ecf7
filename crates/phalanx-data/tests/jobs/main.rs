//! Real processes: this program starts itself as what a test needs, so that it has a `main` of its own.
//! `cargo test -p phalanx-data --test jobs`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod elastic;
#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
mod lmdb;
#[cfg(target_env = "gnu")]
mod memory;

use libtest_mimic::Arguments;

fn main() {
    if let Some(role) = harness::role() {
        match role.as_str() {
            elastic::STEP | elastic::COMMIT => elastic::train(&role).unwrap(),
            #[cfg(target_env = "gnu")]
            memory::STACK => memory::stack(),
            _ => lmdb::play(&role),
        }
        return;
    }
    let all = harness::trials("lmdb", lmdb::TESTS).into_iter();
    let all = all.chain(harness::trials("elastic", elastic::TESTS));
    #[cfg(target_env = "gnu")]
    let all = all.chain(harness::trials("memory", memory::TESTS));
    libtest_mimic::run(&Arguments::from_args(), all.collect()).exit();
}
