//! Real processes: this program starts itself as what a test needs, so that it has a `main` of its own.
//! `cargo test -p phalanx-data --test jobs`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod elastic;
mod lmdb;
#[cfg(target_env = "gnu")]
mod memory;
#[path = "../../../phalanx-core/tests/support/watchdog.rs"]
mod watchdog;

use libtest_mimic::{Arguments, Trial};

/// What this program is to be, if a test has started it.
pub const ROLE: &str = "PHALANX_TEST_ROLE";

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        match role.as_str() {
            elastic::STEP | elastic::COMMIT => elastic::train(&role).unwrap(),
            #[cfg(target_env = "gnu")]
            memory::STACK => memory::stack(),
            _ => lmdb::play(&role),
        }
        return;
    }
    let trials = |file: &'static str, tests: &'static [(&'static str, fn())]| {
        tests.iter().map(move |&(name, test)| {
            Trial::test(format!("{file}::{name}"), move || {
                test();
                Ok(())
            })
        })
    };
    let all = trials("lmdb", lmdb::TESTS).chain(trials("elastic", elastic::TESTS));
    #[cfg(target_env = "gnu")]
    let all = all.chain(trials("memory", memory::TESTS));
    libtest_mimic::run(&Arguments::from_args(), all.collect()).exit();
}
