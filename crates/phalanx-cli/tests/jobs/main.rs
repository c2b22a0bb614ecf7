//! Jobs whose workers are this program, so that it has a `main` of its own.
//! `cargo test -p phalanx-cli --test jobs -- checkpoints::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod checkpoints;
mod culprits;
mod elastic_hosts;
#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
#[path = "../support/mod.rs"]
mod support;

use libtest_mimic::Arguments;

/// The variable that makes this program a worker: of which file.
const ROLE: &str = "TEST_ROLE";

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("checkpoints") => return checkpoints::work(),
        Ok("culprits") => return culprits::work(),
        Ok("elastic_hosts") => return elastic_hosts::work(),
        Ok(other) => panic!("no role {other}"),
        Err(_) => {}
    }
    let privileged = harness::trials("elastic_hosts", elastic_hosts::PRIVILEGED)
        .into_iter()
        .map(|test| test.with_ignored_flag(true).with_kind("needs root: .ci/full"));
    let files = [
        ("checkpoints", checkpoints::TESTS),
        ("culprits", culprits::TESTS),
        ("elastic_hosts", elastic_hosts::TESTS),
    ];
    let all = files.into_iter().flat_map(|(file, tests)| harness::trials(file, tests)).chain(privileged);
    libtest_mimic::run(&Arguments::from_args(), all.collect()).exit()
}
