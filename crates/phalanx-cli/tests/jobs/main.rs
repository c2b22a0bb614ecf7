//! Jobs whose workers are this program, so that it has a `main` of its own.
//! `cargo test -p phalanx-cli --test jobs -- checkpoints::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod checkpoints;
mod culprits;
mod elastic_hosts;
#[path = "../support/mod.rs"]
mod support;

use libtest_mimic::{Arguments, Trial};

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
    let trials = |file: &'static str, tests: &'static [(&str, fn())]| {
        tests.iter().map(move |&(name, test)| {
            Trial::test(format!("{file}::{name}"), move || {
                test();
                Ok(())
            })
        })
    };
    let privileged = trials("elastic_hosts", elastic_hosts::PRIVILEGED)
        .map(|test| test.with_ignored_flag(true).with_kind("needs root: .ci/full"));
    let all = trials("checkpoints", checkpoints::TESTS)
        .chain(trials("culprits", culprits::TESTS))
        .chain(trials("elastic_hosts", elastic_hosts::TESTS))
        .chain(privileged)
        .collect();
    libtest_mimic::run(&Arguments::from_args(), all).exit()
}
