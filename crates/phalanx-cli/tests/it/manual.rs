//! What shells complete, and the manual pages.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::text;

fn phalanx(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_phalanx")).args(words).output().unwrap()
}

#[test]
fn shells_complete_subcommands_and_options() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = phalanx(&["completions", shell]);
        let script = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(script.contains("horovodrun") && script.contains("nproc-per-node"), "{shell}: {script}");
    }
    let output = phalanx(&["completions", "none"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("bash, elvish, fish"), "{}", text(&output.stderr));
}

#[test]
fn each_visible_subcommand_has_a_page_under_its_whole_name() {
    assert!(text(&phalanx(&["man"]).stdout).contains(".TH phalanx 1"));
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    let output = phalanx(&["man", pages.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(fs::read_to_string(pages.join("phalanx.1")).unwrap().contains("doctor"));
    let run = fs::read_to_string(pages.join("phalanx-run.1")).unwrap();
    assert!(run.contains(".TH phalanx-run 1") && run.contains("nproc"), "{run}");
    // What --help says of variables.
    assert!(run.contains("PET_NPROC_PER_NODE") && run.contains("PHALANX_GRACE_PERIOD"), "{run}");
    for (part, exists) in [("init", true), ("bench", true), ("node", false), ("help", false)] {
        assert_eq!(pages.join(format!("phalanx-{part}.1")).exists(), exists, "{part}");
    }
    fs::write(folder.path().join("file"), "").unwrap();
    let output = phalanx(&["man", folder.path().join("file").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot be made"), "{}", text(&output.stderr));
}

/// What prints and ends.
const PRINTS: [&[&str]; 5] =
    [&["completions", "bash"], &["man"], &["plan"], &["horovodrun", "--check-build"], &["doctor", "--json"]];

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for words in PRINTS {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        let output = command.args(words).stdout(full).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {err}");
        assert!(err.contains("the output cannot be written: No space left"), "{words:?}: {err}");
    }
}

#[test]
fn who_has_closed_the_pipe_gets_no_message() {
    for words in &PRINTS[..4] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        let output = command.args(*words).stdout(writer).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{words:?}");
    }
}

/// The pages in this folder.
fn pages_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"))
}

/// The long options of a command on a page, before the program that it starts.
fn options(command: &str, starts_a_program: bool) -> Vec<String> {
    let (mut found, mut before) = (Vec::new(), "");
    for word in command.split_whitespace() {
        let is_a_program =
            ["./", "target/", "python"].iter().any(|start| word.starts_with(start)) || word.ends_with(".py");
        let ends_the_options = !word.starts_with('-') && (is_a_program || !before.starts_with('-'));
        if word == "--" || (starts_a_program && ends_the_options) {
            break;
        }
        if word.starts_with("--") {
            let name = word.split(|letter: char| !letter.is_ascii_alphanumeric() && !"-_".contains(letter));
            found.extend(name.take(1).map(|name| name.replace('_', "-")));
        }
        before = word;
    }
    found
}

#[test]
fn the_commands_on_pages_have_options_that_there_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = [".", "docs", "docs/guide", "python"].map(|folder| root.join(folder));
    let mut pages: Vec<_> = folders.iter().flat_map(|folder| pages_in(folder)).collect();
    // It tells of earlier versions, too.
    pages.retain(|page| !page.ends_with("CHANGELOG.md"));
    let (mut checked, mut missing) = (0, Vec::new());
    for (part, starts_a_program) in [
        ("run", true),
        ("launch", true),
        ("horovodrun", true),
        ("keygen", false),
        ("certgen", false),
        ("doctor", false),
        ("plan", false),
        ("init", false),
    ] {
        let help = text(&phalanx(&[part, "--help"]).stdout);
        let known: BTreeSet<&str> =
            help.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-').collect();
        for page in &pages {
            let content = fs::read_to_string(page).unwrap().replace("\\\n", " ");
            for rest in content.split(&format!("phalanx {part} ")).skip(1) {
                let command = rest.split(['\n', '`', '#', '|']).next().unwrap();
                for option in options(command, starts_a_program) {
                    checked += 1;
                    if !known.contains(option.as_str()) {
                        missing.push(format!("{}: phalanx {part} {option}", page.display()));
                    }
                }
            }
        }
    }
    assert!(checked > 80, "{checked}");
    assert!(missing.is_empty(), "{missing:#?}");
}
