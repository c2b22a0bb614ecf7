//! The command `phalanx`: starts and watches the workers of a distributed job.
#![forbid(unsafe_code)]

mod bench;
mod cli;
mod doctor;
mod elastic;
mod hosts;
mod json;
mod node;
mod nodes;
mod output;
mod processes;
mod render;
mod report;
mod run;
mod status;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::Cli::parse().command {
        cli::Command::Run(options) => run::run(*options),
        cli::Command::Node(options) => node::run(&options),
        cli::Command::Keygen(options) => run::keygen(&options),
        cli::Command::Bench(options) => bench::run(*options),
        cli::Command::Plot(options) => bench::plot(&options),
        cli::Command::Doctor(options) => doctor::run(&options),
    }
}
