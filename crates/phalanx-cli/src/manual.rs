//! `phalanx completions` and `phalanx man`: what shells and `man` know of the command, made from its command line.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::output::print;

const NAME: &str = "phalanx";

/// Print a script that completes this command's words in a shell
///
/// bash: `phalanx completions bash > ~/.local/share/bash-completion/completions/phalanx`. fish: `phalanx completions fish >
/// ~/.config/fish/completions/phalanx.fish`. zsh: `phalanx completions zsh > FOLDER/_phalanx`, with a FOLDER of $fpath. What follows
/// `phalanx bench` and `phalanx plot` belongs to another program, and only file names are completed there.
#[derive(Args, Debug)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Print this command's manual page, or write those of all its subcommands into a folder
///
/// `phalanx man ~/.local/share/man/man1` makes phalanx.1, phalanx-run.1 and so on; then `man phalanx-run` shows that page. The options of
/// `phalanx bench` and `phalanx plot` are those of another program: `phalanx bench --help`.
#[derive(Args, Debug)]
pub(crate) struct Man {
    /// The folder, which is made if it does not exist; without it the page phalanx.1 is printed
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub(crate) fn completions(options: &Completions) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Cli::command(), NAME, &mut script);
    end(print(&script))
}

pub(crate) fn man(options: &Man) -> ExitCode {
    end(match &options.folder {
        None => page(Cli::command()).and_then(|page| print(&page)),
        Some(folder) => write_pages(folder),
    })
}

fn write_pages(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| format!("{} cannot be made: {error}", folder.display()))?;
    let mut all = Cli::command().disable_help_subcommand(true);
    // Gives each subcommand its whole name.
    all.build();
    let parts: Vec<Command> = all.get_subcommands().filter(|part| !part.is_hide_set()).cloned().collect();
    parts.into_iter().chain([all]).try_for_each(|command| {
        let name = command.get_display_name().unwrap_or(NAME).to_owned();
        let file = folder.join(format!("{name}.1"));
        fs::write(&file, page(command)?)
            .map_err(|error| format!("{} cannot be written: {error}", file.display()))
    })
}

fn page(command: Command) -> Result<Vec<u8>, String> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).map_err(|error| error.to_string())?;
    Ok(page)
}

fn end(done: Result<(), String>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(io::stderr(), "phalanx: {message}");
            ExitCode::FAILURE
        }
    }
}
