//! The program `phalanx-bench`, which `phalanx bench` and `phalanx plot` start.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    phalanx_bench::run()
}
