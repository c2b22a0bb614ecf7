//! What tests with a `main` of their own share: their program starts itself as the ranks of jobs.
#![allow(dead_code, reason = "not every test needs everything")]

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use phalanx::launch::{Event, Job, Report};

use crate::environment;

/// The variable that makes this program something else than the tests.
pub const ROLE: &str = "PHALANX_TEST_ROLE";

/// What this process is to be, if a test has started it.
pub fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok();
    if role.is_none() {
        environment::leave_launchers();
    }
    role
}

/// Tests, named by their file as in an ordinary harness.
pub fn trials(file: &str, tests: &[(&str, fn())]) -> Vec<Trial> {
    tests.iter().map(|(name, test)| trial(format!("{file}::{name}"), *test)).collect()
}

pub fn trial(name: impl Into<String>, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

/// Runs a job of this program's to its end. A job that takes longer than `limit` hangs, and is ended.
pub fn run_job(job: &Job, limit: Duration, mut note: impl FnMut(&Event<'_>)) -> Report {
    let start = Instant::now();
    job.run(&mut |event: Event<'_>| {
        note(&event);
        if start.elapsed() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })
    .unwrap()
}

/// Aborts this worker after `limit`, when its test gives up. A job whose workers wait for ever has no event at which its test could end it:
/// then it has one.
pub fn abort_after(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("this worker still runs after {limit:?}");
        std::process::abort();
    });
}
