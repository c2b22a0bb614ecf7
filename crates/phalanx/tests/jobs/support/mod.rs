//! The harness of tests whose program must be able to start itself as something else.

pub mod network;
pub mod world;

use libtest_mimic::{Arguments, Trial};

/// The variable that makes this program something else than the tests: a file and what it is to do, as in `elastic::train`.
pub const ROLE: &str = "PHALANX_TEST_ROLE";

/// Why a test is shown as ignored.
const PRIVILEGED: &str = "needs root: .ci/full";

/// Tests, named by their file as in an ordinary harness.
#[derive(Default)]
pub struct Tests(Vec<Trial>);

impl Tests {
    pub fn add(&mut self, file: &str, tests: &[(&str, fn())]) {
        self.0.extend(tests.iter().map(|test| trial(file, *test)));
    }

    /// Adds tests that need root and its tools: they are shown as ignored unless they are asked for, and fail where they are
    /// asked for and cannot run.
    pub fn add_privileged(&mut self, file: &str, tests: &[(&str, fn())]) {
        self.0.extend(
            tests.iter().map(|test| trial(file, *test).with_ignored_flag(true).with_kind(PRIVILEGED)),
        );
    }

    /// Runs them one after the other, as `cargo test` would: they start several processes each, and some promise how soon
    /// these end.
    pub fn run(self) -> ! {
        let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
        libtest_mimic::run(&arguments, self.0).exit()
    }
}

fn trial(file: &str, (name, test): (&str, fn())) -> Trial {
    Trial::test(format!("{file}::{name}"), move || {
        test();
        Ok(())
    })
}
