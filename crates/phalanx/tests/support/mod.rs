//! The harness of tests whose program must be able to start itself as something else.
#![allow(dead_code, reason = "not every test needs everything")]

pub mod network;
pub mod world;

use libtest_mimic::{Arguments, Trial};

/// Runs `tests` one after the other, as `cargo test` would: they start several processes each, and some promise how soon
/// these end.
pub fn run(tests: &[(&str, fn())]) -> ! {
    run_some(tests, &[])
}

/// The same, with `privileged` tests besides, which need root and its tools: they are shown as ignored unless they are asked
/// for, and fail where they are asked for and cannot run.
pub fn run_some(tests: &[(&str, fn())], privileged: &[(&str, fn())]) -> ! {
    let trial = |&(name, test): &(&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let privileged = privileged.iter().map(|test| trial(test).with_ignored_flag(true));
    let trials = tests.iter().map(trial).chain(privileged).collect();
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials).exit()
}
