//! The command `phalanx`: starts and watches the workers of a distributed job.
#![forbid(unsafe_code)]

mod bench;
#[cfg(feature = "tls")]
mod certgen;
mod cli;
mod doctor;
mod elastic;
mod horovodrun;
mod hosts;
mod init;
mod json;
mod launch;
mod manual;
mod node;
mod nodes;
mod output;
mod parse;
mod plan;
mod processes;
mod render;
mod report;
mod run;
mod run_options;
mod slurm;
mod status;
mod tls;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Output into a file that becomes too large is an error that is shown.
    let _ = phalanx_sys::signal::ignore_file_size_signal();
    let parsed = parse::parse(horovodrun::command_line(std::env::args_os()));
    match parsed.unwrap_or_else(|error| error.exit()).command {
        cli::Command::Run(options) => run::run(*options),
        cli::Command::Launch(options) => run::run(options.into_run()),
        cli::Command::Horovodrun(options) => horovodrun::run(*options),
        cli::Command::Node(options) => node::run(&options),
        cli::Command::Keygen(options) => run::keygen(&options),
        #[cfg(feature = "tls")]
        cli::Command::Certgen(options) => certgen::run(&options),
        cli::Command::Bench(arguments) => bench::run(&arguments),
        cli::Command::Plot(arguments) => bench::plot(&arguments),
        cli::Command::Plan(options) => plan::run(&options),
        cli::Command::Doctor(options) => doctor::run(&options),
        cli::Command::Init(options) => init::run(&options),
        cli::Command::Completions(options) => manual::completions(&options),
        cli::Command::Man(options) => manual::man(&options),
    }
}
