//! `phalanx bench` and `phalanx plot` start the separate program `phalanx-bench`, so that this one, which runs jobs,
//! stays small.
//!
//! `phalanx-bench` is looked for beside the command and in PATH, as cargo does with its subcommands. So the command links no
//! plotter, and `phalanx doctor` times its two processes itself.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;

const PROGRAM: &str = "phalanx-bench";

/// The arguments of `phalanx-bench`, whose `--help` is its manual.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    all: Vec<OsString>,
}

/// Becomes `phalanx-bench`, whose help shows the name that the user has typed.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    replace_by(Command::new(path()).arg0("phalanx bench").args(&arguments.all))
}

/// Becomes `phalanx-bench plot`.
pub(crate) fn plot(arguments: &Arguments) -> ExitCode {
    replace_by(Command::new(path()).arg0("phalanx").arg("plot").args(&arguments.all))
}

/// The program beside this one, where `cargo install` puts it, or else whatever PATH has.
fn path() -> PathBuf {
    let beside = std::env::current_exe().map(|own| own.with_file_name(PROGRAM));
    beside.ok().filter(|path| path.exists()).unwrap_or_else(|| PROGRAM.into())
}

/// Replaces this program with `command`; returns only if that fails.
fn replace_by(command: &mut Command) -> ExitCode {
    let error = command.exec();
    if error.kind() != ErrorKind::NotFound {
        let _ = writeln!(io::stderr(), "phalanx: {PROGRAM} cannot be executed: {error}");
        return ExitCode::from(126);
    }
    let _ = writeln!(
        io::stderr(),
        "phalanx: {PROGRAM} is neither beside this program nor in PATH; install it with `cargo install {PROGRAM}`, or from a checkout \
         with `cargo install --path crates/{PROGRAM}`"
    );
    ExitCode::from(127)
}
