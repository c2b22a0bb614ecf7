//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
//! `cargo test -p phalanx-burn --test jobs -- elastic::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../common/mod.rs"]
mod common;
mod elastic;

use libtest_mimic::{Arguments, Trial};

/// The variable that makes this program a worker: of which file.
const ROLE: &str = "PHALANX_TEST_ROLE";

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("elastic") => return elastic::play(),
        Ok(other) => panic!("no role {other}"),
        Err(_) => {}
    }
    let trial = |&(name, test): &(&'static str, fn())| {
        Trial::test(format!("elastic::{name}"), move || {
            test();
            Ok(())
        })
    };
    // One after the other: each starts several processes.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, elastic::TESTS.iter().map(trial).collect()).exit()
}
