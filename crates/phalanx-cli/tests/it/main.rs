//! The command as a user starts it: `cargo test -p phalanx-cli --test it -- nodes::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../support/mod.rs"]
mod support;

mod bench;
mod doctor;
mod elastic;
mod ends;
mod frozen;
mod hosts;
mod keys;
mod manual;
mod nodes;
mod programs;
mod rendezvous;
mod restarts;
mod run;
mod sshd;
mod tls;
