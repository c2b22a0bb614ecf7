//! Programs that cannot be started, as in an image that lacks them: the error names what is missing, with what to do, and the code is a shell's.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{bare, output, text, write_program};

/// Nothing has to be waited for.
const SOON: Duration = Duration::from_secs(10);

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>, mode: u32) {
        write_program(&self.path().join(name), content, mode);
    }

    fn run(&self, program: &str) -> Command {
        let mut command = bare();
        command.args(["--nproc-per-node", "2", "--", program, "argument"]).current_dir(self.path());
        command
    }

    /// `program` is not started, in two ranks, and this is said.
    fn refused(&self, program: &str, code: i32, words: &[&str]) {
        let begun = Instant::now();
        let output = output(self.run(program));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{program}: {said}");
        for word in words {
            assert!(said.contains(word), "{program}: {word:?} is missing in {said}");
        }
        assert!(begun.elapsed() < SOON, "{program}: {:?}", begun.elapsed());
    }
}

#[test]
fn a_program_that_is_not_there_is_named_with_where_it_was_looked_for() {
    let folder = Folder::new();
    folder.refused(
        "/no/such/program",
        127,
        &[
            "cannot start /no/such/program as rank 0",
            "no such file on this host, or in this container's image",
        ],
    );
    folder.refused("./train", 127, &["seen from", "is the path right?"]);
    folder.refused(
        "no-such-program",
        127,
        &["it is in no folder of PATH (", "install it there, or give its path"],
    );
    folder.refused("", 127, &["its name is empty"]);
    folder.file("train", "#!/bin/sh\n", 0o755);
    folder.refused("train", 127, &["write ./train"]);
    folder.refused("./train/x", 126, &["a part of its path is a file"]);
    symlink("/opt/train", folder.path().join("link")).unwrap();
    folder.refused("./link", 127, &["it is a link to /opt/train, which is not there"]);
}

#[test]
fn a_program_that_must_not_be_executed_is_named_with_why() {
    let folder = Folder::new();
    folder.file("train", "#!/bin/sh\n", 0o644);
    folder.refused("./train", 126, &["is it executable? `chmod +x ./train`"]);
    folder.refused("/", 126, &["it is a folder"]);
}

#[test]
fn the_interpreter_that_a_script_lacks_is_named() {
    let folder = Folder::new();
    folder.file("train.py", "#!/opt/venv/bin/python3 -u\nprint()\n", 0o755);
    folder.refused(
        "./train.py",
        127,
        &["is missing: /opt/venv/bin/python3, which is not on this host, or not in this container's image"],
    );
    folder.file("windows.sh", "#!/bin/sh\r\necho\r\n", 0o755);
    folder.refused("./windows.sh", 127, &["carriage return", "sed -i"]);
    folder.file("env.py", "#!/usr/bin/env no-such-python\n", 0o755);
    folder.refused(
        "./env.py",
        127,
        &[
            "no-such-python",
            "remedy  127 is a shell's code",
            "is not found on this host, or in this container's image",
        ],
    );
    // torchrun would start it with Python. A shell would take `import` for a program of that name.
    folder.file("script.py", "import sys\n", 0o644);
    folder.refused("script.py", 127, &["there is one in this folder: give `python3 script.py`"]);
    for mode in [0o644, 0o755] {
        folder.file("script.py", "import sys\n", mode);
        folder.refused(
            "./script.py",
            126,
            &["it is a Python program", "give `python3 ./script.py` as the program"],
        );
    }
    // As ever: without a first line it is one for the shell.
    folder.file("plain", "echo \"ran $1\"\n", 0o755);
    let ran = output(folder.run("./plain"));
    assert_eq!(
        (ran.status.code(), text(&ran.stdout).matches("ran argument").count()),
        (Some(0), 2),
        "{}",
        text(&ran.stderr)
    );
}

/// The command itself, with the bytes of `from` replaced by as many of `to`.
fn altered(from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = fs::read(env!("CARGO_BIN_EXE_phalanx")).unwrap();
    let places: Vec<usize> =
        bytes.windows(from.len()).enumerate().filter(|(_, part)| *part == from).map(|(at, _)| at).collect();
    assert!(!places.is_empty() && from.len() == to.len());
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    bytes
}

#[test]
fn a_binary_for_another_processor_or_cut_off_is_not_read_as_a_script() {
    let folder = Folder::new();
    let own = fs::read(env!("CARGO_BIN_EXE_phalanx")).unwrap();
    let (machine, name) = if cfg!(target_arch = "s390x") { (62_u16, "x86-64") } else { (22, "s390x") };
    let mut foreign = own[..8192].to_vec();
    foreign[18..20].copy_from_slice(&machine.to_ne_bytes());
    folder.file("foreign", foreign, 0o755);
    folder.refused(
        "./foreign",
        126,
        &[
            "cannot start ./foreign as rank 0",
            &format!("built for {name}, and this processor is"),
            "--platform",
        ],
    );
    for length in [100, 4096, 100_000] {
        folder.file("short", &own[..length], 0o755);
        folder.refused("./short", 126, &["the binary is cut off or damaged: copy or build it again"]);
    }
    // An interrupted copy: a shell would do nothing, and end well.
    folder.file("empty", "", 0o755);
    folder.refused("./empty", 126, &["the file is empty: copy or build it again"]);
}

#[test]
fn the_library_or_loader_that_a_binary_lacks_is_named() {
    let folder = Folder::new();
    folder.file("train", altered(b"libgcc_s.so.1\0", b"libgcc_x.so.1\0"), 0o755);
    folder.refused(
        "./train",
        127,
        &[
            "remedy  install the library libgcc_x.so.1 on this host, or in this container's image",
            "LD_LIBRARY_PATH",
        ],
    );
    let loader: &[u8] = if cfg!(target_arch = "aarch64") {
        b"/lib/ld-linux-aarch64.so.1\0"
    } else {
        b"/lib64/ld-linux-x86-64.so.2\0"
    };
    let mut other = b"/opt/musl".to_vec();
    other.resize(loader.len(), 0);
    folder.file("musl", altered(loader, &other), 0o755);
    folder.refused("./musl", 127, &["a binary for the loader /opt/musl, which is not on this host"]);
}
