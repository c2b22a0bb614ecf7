//! The benchmarks of Phalanx, apart from the command that runs jobs: collectives in the manner of nccl-tests, how soon faults are
//! known, how long a start takes, the sizes at which algorithms change, and plots of all that.
//!
//! It is a program: `cargo install --path crates/phalanx-bench` installs `phalanx-bench`, and where it is installed,
//! `phalanx bench` and `phalanx plot` start it. `phalanx bench --help` is its manual.
#![forbid(unsafe_code)]

mod collectives;
mod device;
mod faults;
mod measure;
mod options;
mod plot;
mod points;
mod report;
mod row;
mod rpc;
mod startup;
mod sweep;
mod tune;
mod values;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use phalanx::{Error, Result};

use self::options::{Cli, Other};

/// The program on this crate's page must compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the program, and prints its error, if there is one.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let name = if matches!(cli.other, Some(Other::Plot(_))) { "plot" } else { "bench" };
    match dispatch(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where nobody reads it the code says it alone.
            let _ = writeln!(io::stderr(), "phalanx {name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: Cli) -> Result<()> {
    match (cli.other, cli.collective) {
        (Some(Other::Faults(faults)), _) => faults.run(),
        (Some(Other::Startup(startup)), _) => startup.run(),
        (Some(Other::Rpc(rpc)), _) => rpc.run(),
        (Some(Other::Plot(plot)), _) => plot.run(),
        (None, Some(collective)) => collective.run(),
        (None, None) => Err(Error::invalid_argument("there is nothing to time").with_remedy("see `--help`")),
    }
}
