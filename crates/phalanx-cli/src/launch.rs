//! `phalanx launch`: `phalanx run` for programs that take their local rank as an option, as torch.distributed.launch starts them.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::run_options::Run;

const MANUAL: &str = "\
This is `phalanx run` with the habits of `python -m torch.distributed.launch`: each worker gets its local rank as an option, \
`--local-rank=N` as from PyTorch 2.0 on, right behind the program or the script. A program whose name ends in .py is started \
by `python3 -u`, of the virtual environment in which phalanx is installed if it is in one, or by the interpreter in PYTHON_EXEC. \
The options are those of `phalanx run`, whose manual (`phalanx run --help`) \
describes everything else.

Examples:
  phalanx launch --nproc_per_node 2 train.py --epochs 6
  phalanx launch --nproc-per-node 2 --local-rank-underscore train.py
  phalanx launch --nproc-per-node 4 -- ./target/release/train --epochs 6";

/// Start a program as torch.distributed.launch does: each worker gets the option --local-rank=N
#[derive(Args, Debug)]
#[command(after_long_help = MANUAL, after_help = "`--help` says more.")]
#[command(override_usage = "phalanx launch [OPTIONS] [--] <PROGRAM> [ARGUMENTS]...")]
pub(crate) struct Launch {
    /// Do not pass the local rank as an option: the program reads LOCAL_RANK
    #[arg(long, alias = "use_env")]
    use_env: bool,

    /// Pass the option as --local_rank=N, as PyTorch before 2.0 did
    #[arg(long, alias = "local_rank_underscore", conflicts_with = "use_env")]
    local_rank_underscore: bool,

    #[command(flatten)]
    run: Run,
}

impl Launch {
    /// The same for `phalanx run`.
    pub(crate) fn into_run(self) -> Run {
        let option = if self.local_rank_underscore { "--local_rank" } else { "--local-rank" };
        let mut run = self.run;
        let is_script = run.program.first().is_some_and(|program| is_python_script(program));
        if is_script && !run.module && !run.no_python {
            run.program.splice(0..0, [python(), "-u".into()]);
        }
        run.local_rank_option = (!self.use_env).then_some(option);
        run
    }
}

/// The interpreter for Python programs: that of PYTHON_EXEC, or of the environment in which this command is installed, as torchrun takes
/// its own, or else whatever PATH has.
pub(crate) fn python() -> OsString {
    let named = std::env::var_os("PYTHON_EXEC").filter(|python| !python.is_empty());
    let own = || std::env::current_exe().ok().and_then(|own| python_beside(&own));
    named.or_else(|| own().map(PathBuf::into_os_string)).unwrap_or_else(|| "python3".into())
}

/// The interpreter beside the program `own`, if they are in a virtual environment, or one of conda's. It need not be in PATH. One that
/// pipx, or `uv tool install`, has made for this command alone has none of the packages that programs need.
fn python_beside(own: &Path) -> Option<PathBuf> {
    let folder = own.parent()?;
    let environment = folder.parent()?;
    let has = |marks: [&str; 2]| marks.iter().any(|mark| environment.join(mark).exists());
    let is_of_programs = has(["pyvenv.cfg", "conda-meta"]) && !has(["pipx_metadata.json", "uv-receipt.toml"]);
    Some(folder.join("python3")).filter(|python| is_of_programs && python.exists())
}

fn is_python_script(program: &OsStr) -> bool {
    Path::new(program).extension().is_some_and(|extension| extension == "py")
}

/// An error if `command` is an interpreter that would read its program from standard input. Workers' is empty: they would do nothing, and end
/// well.
pub(crate) fn check_has_program(command: &[OsString]) -> Result<(), String> {
    let Some(interpreter) = command.first() else { return Ok(()) };
    let name = Path::new(interpreter).file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_dash = |word: Option<&OsString>| word.is_some_and(|word| word == "-");
    let reads = match name {
        "bash" | "dash" | "ksh" | "sh" | "zsh" => {
            // Before a script, a dash ends a shell's own options.
            let is_alone = command.len() == 2 && is_dash(command.get(1));
            is_alone || command.get(1).is_none_or(|word| word == "-s")
        }
        // Another program's name may begin so: python_train.
        _ => {
            let version = name.strip_prefix("python");
            let is_number = |version: &str| version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
            // Of these options some are answered without a program: -V, -h, -?, --version.
            let is_answered = |word: &OsString| {
                let word = word.to_string_lossy();
                word.starts_with("--") || word.starts_with('-') && word.contains(['V', 'h', '?'])
            };
            version.is_some_and(is_number)
                && match script_end(command) {
                    0 => !command.iter().skip(1).any(is_answered),
                    end => is_dash(command.get(end)),
                }
        }
    };
    match reads {
        true => Err(format!(
            "{} would read its program from standard input, which is empty for workers, and so do nothing: put the program into a file, or \
             give it with -c",
            interpreter.display()
        )),
        false => Ok(()),
    }
}

/// How many of a command's arguments, of which the first is the program, come before those of the script: an interpreter's own
/// options must not get the script's.
pub(crate) fn script_end(command: &[OsString]) -> usize {
    let name = command.first().and_then(|program| Path::new(program).file_name()).and_then(OsStr::to_str);
    if !name.is_some_and(|name| name.starts_with("python")) {
        return 0;
    }
    let mut words = command.iter().skip(1).enumerate();
    while let Some((index, word)) = words.next() {
        let letters = match word.to_str() {
            Some("--check-hash-based-pycs") => {
                words.next();
                continue;
            }
            Some(long) if long.starts_with("--") => continue,
            word => word.and_then(|word| word.strip_prefix('-')).unwrap_or_default(),
        };
        if letters.is_empty() {
            return index + 1;
        }
        // The first letter that takes a value ends the options of a word: what is left of the word is the value, or else the next word.
        let Some(at) = letters.find(['m', 'c', 'W', 'X']) else { continue };
        let (letter, value) = letters[at..].split_at(1);
        match (letter, value.is_empty()) {
            // What follows is the script's.
            ("m" | "c", is_next) => return index + 1 + usize::from(is_next),
            (_, true) => {
                words.next();
            }
            (_, false) => {}
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn launch(words: &str) -> Result<Run, String> {
        let words = ["phalanx", "launch"].into_iter().chain(words.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Launch(launch) => Ok(launch.into_run()),
            _ => Err("not launch".to_owned()),
        }
    }

    #[test]
    fn a_script_gets_the_option_and_python() {
        let run = launch("--nproc_per_node=2 train.py --lr 1").unwrap();
        assert_eq!(run.command_line()[1..], ["-u", "train.py", "--lr", "1"]);
        assert_eq!((run.local_rank_option, script_end(&run.command_line())), (Some("--local-rank"), 2));
        let run = launch("--local-rank-underscore ./train --lr 1").unwrap();
        assert_eq!(run.command_line(), ["./train", "--lr", "1"]);
        assert_eq!((run.local_rank_option, script_end(&run.command_line())), (Some("--local_rank"), 0));
        assert_eq!(launch("--use_env train.py").unwrap().local_rank_option, None);
        assert_eq!(launch("--no-python train.py").unwrap().command_line(), ["train.py"]);
        assert!(launch("--use-env --local-rank-underscore train.py").is_err());
        assert!(launch("--use-env").is_err());
    }

    #[test]
    fn an_interpreter_that_would_wait_for_its_program_in_vain_is_refused() {
        let check = |command: &str| {
            let words: Vec<OsString> = command.split_whitespace().map(OsString::from).collect();
            check_has_program(&words)
        };
        for nothing in [
            "python3",
            "python -u",
            "python3 -O -X dev",
            "/usr/bin/python3.13 -u - --lr 1",
            "bash",
            "sh -s x",
            "/bin/sh -",
        ] {
            assert!(check(nothing).unwrap_err().contains("standard input, which is empty"), "{nothing}");
        }
        for program in [
            "python3 train.py -",
            "python3 -m pkg -",
            "python3 --version",
            "python3 -VV",
            "python3 -u train.py",
            "sh train.sh",
            "bash - train.sh",
            "sh -c x",
            "./train -",
            "python_train",
        ] {
            assert_eq!(check(program), Ok(()), "{program}");
        }
    }

    #[test]
    fn a_command_in_a_virtual_environment_takes_the_interpreter_there() {
        let root = tempfile::tempdir().unwrap();
        let [bin, mark] = ["bin", "pyvenv.cfg"].map(|name| root.path().join(name));
        let (own, python) = (bin.join("phalanx"), bin.join("python3"));
        std::fs::create_dir(&bin).unwrap();
        std::fs::write(&python, "").unwrap();
        // As in /usr/bin: another environment may come before it in PATH.
        assert_eq!(python_beside(&own), None);
        std::fs::write(&mark, "").unwrap();
        assert_eq!(python_beside(&own), Some(python.clone()));
        // As of `pipx install` and `uv tool install`.
        for tool in ["pipx_metadata.json", "uv-receipt.toml"].map(|tool| root.path().join(tool)) {
            std::fs::write(&tool, "").unwrap();
            assert_eq!(python_beside(&own), None);
            std::fs::remove_file(&tool).unwrap();
        }
        assert_eq!(python_beside(&own), Some(python.clone()));
        std::fs::remove_file(&python).unwrap();
        assert_eq!(python_beside(&own), None);
    }

    #[test]
    fn an_interpreter_s_options_come_before_the_script() {
        let end = |command: &str| {
            let words: Vec<OsString> = command.split_whitespace().map(OsString::from).collect();
            script_end(&words)
        };
        assert_eq!(end("./train -m 3"), 0);
        assert_eq!(end("python train.py --lr 1"), 1);
        assert_eq!(end("/usr/bin/python3.13 -u -W ignore train.py -m x"), 4);
        assert_eq!(end("python3 -u -m pkg.train --lr 1"), 3);
        assert_eq!(end("python3 -mpkg.train"), 1);
        assert_eq!(end("python3 -Wignore -um pkg.train --lr 1"), 3);
        assert_eq!(end("python3 -X dev --check-hash-based-pycs never train.py x"), 5);
        assert_eq!(end("python3 - x"), 1);
        assert_eq!(end("python3"), 0);
    }
}
