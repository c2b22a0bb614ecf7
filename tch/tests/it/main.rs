//! All ranks are threads of this process.
#![allow(missing_docs, clippy::unwrap_used, reason = "helpers of tests are tests")]
#![forbid(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

mod ddp;
mod norm;
mod optimizer;
mod roberta;
mod soundness;
mod state;
mod ties;
mod unused;
mod weights;
