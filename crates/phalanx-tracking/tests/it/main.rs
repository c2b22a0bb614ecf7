//! All ranks are threads of this process: `cargo test -p phalanx-tracking --test it -- traps::` runs one file.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

#[path = "../support/mod.rs"]
mod support;

mod faults;
mod files;
mod resume;
mod sinks;
mod terminal;
mod traps;
