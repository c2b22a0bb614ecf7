//! `phalanx bench` and `phalanx plot` start `phalanx-bench`, a program of its own: this one runs jobs, and stays small.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;

const PROGRAM: &str = "phalanx-bench";

/// Time collectives, faults and starts, with the program phalanx-bench
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct Bench {
    /// What phalanx-bench is given; `--help` is its manual
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Draw what `phalanx bench --json` has measured, with the same program
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct Plot {
    /// What phalanx-bench is given; `--help` is its manual
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

impl Bench {
    /// Becomes `phalanx-bench ARGUMENTS`. Its help shows the name that the user has typed.
    pub(crate) fn run(&self) -> ExitCode {
        replace_by(Command::new(path()).arg0("phalanx bench").args(&self.arguments))
    }
}

impl Plot {
    /// Becomes `phalanx-bench plot ARGUMENTS`.
    pub(crate) fn run(&self) -> ExitCode {
        replace_by(Command::new(path()).arg0("phalanx").arg("plot").args(&self.arguments))
    }
}

/// The program beside this one, where `cargo install` puts it, or else whatever PATH has.
fn path() -> PathBuf {
    let beside = std::env::current_exe().map(|own| own.with_file_name(PROGRAM));
    beside.ok().filter(|path| path.exists()).unwrap_or_else(|| PROGRAM.into())
}

/// Ends this program in favour of `command`; comes back only if that fails.
fn replace_by(command: &mut Command) -> ExitCode {
    let error = command.exec();
    match error.kind() {
        ErrorKind::NotFound => {
            eprintln!(
                "phalanx: {PROGRAM} is neither beside this program nor in PATH; \
                 install it with: cargo install --path crates/phalanx-bench"
            );
            ExitCode::from(127)
        }
        _ => {
            eprintln!("phalanx: {} cannot be executed: {error}", command.get_program().to_string_lossy());
            ExitCode::from(126)
        }
    }
}
