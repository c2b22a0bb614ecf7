//! All ranks are threads of this process: `cargo test -p phalanx --test it -- collectives::` runs one file.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

#[path = "../../../phalanx-core/tests/support/certificates.rs"]
mod certificates;

mod collectives;
mod documentation;
mod failures;
mod gather;
mod join;
mod local_updates;
mod main_process_first;
mod mesh;
mod modules;
mod objects;
mod order;
mod parameter_server;
mod point_to_point;
mod reducer;
mod roots;
mod rpc;
mod subgroups;
