//! The harness of tests whose program must be able to start itself as something else.

pub mod world;

use libtest_mimic::{Arguments, Trial};

/// Runs `tests` one after the other, as `cargo test` would: they start several processes each, and some promise how soon
/// these end.
pub fn run(tests: &[(&str, fn())]) -> ! {
    let trial = |&(name, test): &(&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, tests.iter().map(trial).collect()).exit()
}
