//! `phalanx bench` and `phalanx plot` start a program of their own.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::text;

/// The number of the signal.
const SIGPIPE: i32 = 13;

/// The command alone in a folder, with nothing else in PATH.
fn command(folder: &Path, arguments: &[&str]) -> Output {
    let phalanx = folder.join("phalanx");
    if !phalanx.exists() {
        place(Path::new(env!("CARGO_BIN_EXE_phalanx")), &phalanx);
    }
    Command::new(phalanx).args(arguments).env("PATH", folder.join("path")).output().unwrap()
}

/// A program that prints its arguments.
fn install(folder: &Path, mark: &str) {
    fs::create_dir_all(folder).unwrap();
    let source = folder.join("source");
    fs::write(&source, format!("#!/bin/sh\necho {mark} \"$@\"; exit 3\n")).unwrap();
    place(&source, &folder.join("phalanx-bench"));
}

/// Copies a program, in a process of its own: a file that this one has written may still be open in a process that another test
/// is starting, and then it cannot be executed ("text file busy").
fn place(source: &Path, program: &Path) {
    assert!(Command::new("install").args(["-m", "755"]).args([source, program]).status().unwrap().success());
}

#[test]
fn who_lacks_the_benchmarks_is_told_how_to_install_them() {
    let folder = tempfile::tempdir().unwrap();
    let help = command(folder.path(), &["--help"]);
    for subcommand in ["  bench ", "  plot "] {
        let help = text(&help.stdout);
        let line = help.lines().find(|line| line.starts_with(subcommand)).unwrap();
        assert!(line.contains("`cargo install phalanx-bench`"), "{line}");
    }
    for arguments in [&["bench", "all_reduce"][..], &["bench", "--help"], &["plot", "x.json", "-o", "x.png"]]
    {
        let output = command(folder.path(), arguments);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(127), "{err}");
        assert!(err.contains("cargo install --path crates/phalanx-bench"), "{err}");
    }
    // Where nobody reads there is no panic: the kernel ends whoever writes, or the code says it.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut unread = Command::new(folder.path().join("phalanx"));
    let unread = unread.arg("bench").env("PATH", folder.path().join("path")).stderr(writer).status().unwrap();
    assert!(unread.code() == Some(127) || unread.signal() == Some(SIGPIPE), "{unread}");
    let help = text(&command(folder.path(), &["--help"]).stdout);
    assert!(help.contains("\n  bench ") && help.contains("\n  plot "), "{help}");
}

#[test]
fn the_benchmarks_get_all_arguments_and_are_found_beside_the_command_first() {
    let folder = tempfile::tempdir().unwrap();
    let said = |arguments: &[&str]| {
        let output = command(folder.path(), arguments);
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    install(&folder.path().join("path"), "path");
    assert_eq!(said(&["bench", "all_reduce", "-b", "4"]), "path all_reduce -b 4\n");
    install(folder.path(), "beside");
    assert_eq!(said(&["bench", "--help"]), "beside --help\n");
    assert_eq!(said(&["bench", "faults", "-h", "--json=-"]), "beside faults -h --json=-\n");
    assert_eq!(said(&["plot", "a.json", "-o", "a.png"]), "beside plot a.json -o a.png\n");
}
