//! Real processes: this program starts itself as what a test needs, so that it has a `main` of its own.
//! `cargo test -p phalanx-data --test jobs`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

mod lmdb;

use libtest_mimic::{Arguments, Trial};

/// What this program is to be, if a test has started it.
pub const ROLE: &str = "PHALANX_TEST_ROLE";

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        return lmdb::play(&role);
    }
    let trial = |(name, test): &(&str, fn())| {
        let test = *test;
        Trial::test(format!("lmdb::{name}"), move || {
            test();
            Ok(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), lmdb::TESTS.iter().map(trial).collect()).exit();
}
