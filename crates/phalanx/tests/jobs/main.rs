//! Real processes: this program starts itself as what a test needs, so that it has a `main` of its own.
//! `cargo test -p phalanx --test jobs -- spawn::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../../../phalanx-core/tests/support/certificates.rs"]
mod certificates;
#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
mod support;

mod checkpoint_faults;
mod checkpoints;
mod elastic;
mod faults;
mod frozen;
mod hostile;
mod parameter_server;
mod processes;
mod retry;
mod rpc;
mod sharded;
mod spawn;
mod strangers;
mod waits;

use support::Tests;

fn main() {
    if let Some(role) = harness::role() {
        return play(&role);
    }
    let mut tests = Tests::default();
    tests.add("strangers", strangers::TESTS);
    tests.add_privileged("strangers", strangers::PRIVILEGED);
    tests.add("checkpoint_faults", checkpoint_faults::TESTS);
    tests.add("checkpoints", checkpoints::TESTS);
    tests.add_privileged("checkpoints", checkpoints::PRIVILEGED);
    tests.add("elastic", elastic::TESTS);
    tests.add("faults", faults::TESTS);
    tests.add_privileged("faults", faults::PRIVILEGED);
    tests.add("frozen", frozen::TESTS);
    tests.add("hostile", hostile::TESTS);
    tests.add("parameter_server", parameter_server::TESTS);
    tests.add_privileged("parameter_server", parameter_server::PRIVILEGED);
    tests.add("processes", processes::TESTS);
    tests.add("retry", retry::TESTS);
    tests.add("rpc", rpc::TESTS);
    tests.add_privileged("rpc", rpc::PRIVILEGED);
    tests.add("sharded", sharded::TESTS);
    tests.add("spawn", spawn::TESTS);
    tests.add("waits", waits::TESTS);
    tests.run()
}

/// What this program does when a test has started it.
fn play(role: &str) {
    let (file, scenario) = role.split_once("::").unwrap();
    match file {
        "checkpoint_faults" => checkpoint_faults::play(scenario),
        "checkpoints" => checkpoints::play(scenario),
        "elastic" => elastic::play(scenario),
        "faults" => faults::play(scenario),
        "frozen" => frozen::play(scenario),
        "hostile" => hostile::play(scenario),
        "parameter_server" => parameter_server::play(scenario),
        "processes" => processes::play(scenario),
        "retry" => retry::play(scenario),
        "rpc" => rpc::play(scenario),
        "sharded" => sharded::play(scenario),
        "spawn" => spawn::play(scenario),
        "strangers" => strangers::play(scenario),
        "waits" => waits::play(scenario),
        other => panic!("no role {other}"),
    }
}
