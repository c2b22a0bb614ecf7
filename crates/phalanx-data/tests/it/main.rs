//! Threads are enough for these: `cargo test -p phalanx-data --test it -- loader::` runs one file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod files;
mod folder;
mod lmdb;
mod loader;
mod lost;
mod pack;
mod resume;
mod stream;
mod support;
mod transforms;
