//! The command line: its subcommands.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand};

use crate::bench::Arguments;
#[cfg(feature = "tls")]
use crate::certgen::Certgen;
use crate::doctor::Doctor;
use crate::horovodrun::Horovodrun;
use crate::init::Init;
use crate::launch::Launch;
use crate::manual::{Completions, Man};
use crate::node::Node;
use crate::plan::Plan;
use crate::run_options::Run;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Distributed data-parallel training: starts and watches the workers of a job.
#[derive(Debug, Parser)]
#[command(name = "phalanx", version, styles = STYLES, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "`phalanx run --help` is the launcher's manual.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Box<Run>),
    Launch(Box<Launch>),
    Horovodrun(Box<Horovodrun>),
    #[command(hide = true)]
    Node(Node),
    Keygen(Keygen),
    #[cfg(feature = "tls")]
    Certgen(Certgen),
    /// Time collectives, faults and starts (from `cargo install phalanx-bench`)
    #[command(disable_help_flag = true)]
    Bench(Arguments),
    /// Draw what `phalanx bench --json` has measured (from `cargo install phalanx-bench`)
    #[command(disable_help_flag = true)]
    Plot(Arguments),
    Plan(Plan),
    Doctor(Doctor),
    Init(Init),
    Completions(Completions),
    Man(Man),
}

/// Make a key for jobs on several machines
///
/// Copy it to each of them and start their launchers with `--job-key-file`. Anyone who can read it can join the job.
#[derive(Args, Debug)]
pub(crate) struct Keygen {
    /// The file to make; it must not exist yet. Only this user may read it
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

/// The longest time that an option may give, in seconds: some thirty years.
const MAX_SECONDS: f64 = 1e9;

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "it is not a number of seconds".to_owned())?;
    // NaN is in no range.
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        return Err(format!("give a number of seconds from 0 to {MAX_SECONDS}"));
    }
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_version_is_shown_under_the_command_s_name() {
        let version = format!("phalanx {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(Cli::command().render_version(), version);
    }

    #[test]
    fn options_that_torchrun_has_have_its_variables() {
        const OPTIONS: [&str; 20] = [
            "nnodes",
            "nproc-per-node",
            "node-rank",
            "master-addr",
            "master-port",
            "local-addr",
            "rdzv-backend",
            "rdzv-endpoint",
            "rdzv-id",
            "rdzv-conf",
            "standalone",
            "max-restarts",
            "monitor-interval",
            "role",
            "module",
            "no-python",
            "log-dir",
            "redirects",
            "tee",
            "local-ranks-filter",
        ];
        let command = Cli::command();
        for part in ["run", "launch"] {
            let part = command.find_subcommand(part).unwrap();
            for name in OPTIONS {
                let option = part.get_arguments().find(|option| option.get_long() == Some(name));
                let variable = option.and_then(|option| option.get_env()).and_then(|name| name.to_str());
                let expected = format!("PET_{}", name.to_uppercase().replace('-', "_"));
                assert_eq!(variable, Some(expected.as_str()), "--{name}");
            }
        }
    }

    #[test]
    fn times_are_seconds_within_limits() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["-1", "nan", "inf", "1e19"] {
            assert!(seconds(bad).unwrap_err().contains("from 0 to 1000000000"), "{bad}");
        }
        assert!(seconds("soon").is_err());
    }

    /// Calls `look` with each Markdown page below `folder`.
    fn pages(folder: &Path, look: &mut impl FnMut(&Path, &str)) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                pages(&path, look);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                look(&path, &std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn commands_of_the_pages_are_taken() {
        let (root, mut tried) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."), 0);
        let mut look = |page: &Path, text: &str| {
            for found in text.split("phalanx run ").skip(1) {
                // To the end of the line, or of the code. Two dots stand for more options.
                let command = found.split(['\n', '`', '#']).next().unwrap_or_default();
                let words: Vec<&str> = command.split_whitespace().filter(|word| *word != "..").collect();
                let is_program = |word: &&str| word.starts_with("./") || ["--", "python"].contains(word);
                if words.iter().any(is_program) && !command.contains('$') {
                    let parsed = Cli::try_parse_from(["phalanx", "run"].iter().chain(&words));
                    assert!(parsed.is_ok(), "{}: phalanx run {command}: {parsed:?}", page.display());
                    tried += 1;
                }
            }
        };
        for folder in ["docs", "python", "crates", "examples"] {
            pages(&root.join(folder), &mut look);
        }
        look(Path::new("README.md"), &std::fs::read_to_string(root.join("README.md")).unwrap());
        assert!(tried > 20, "the commands were not found: {tried}");
    }
}
