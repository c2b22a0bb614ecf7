//! Tests of the example: against transformers, of files, of training on several ranks, and of the program itself.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

#[path = "../../../../crates/phalanx-core/tests/support/environment.rs"]
mod environment;
mod fixtures;
mod jobs;
mod pretrained;
mod training;
mod vectors;
mod weights;
