//! Jobs over TLS, with the certificates that `phalanx certgen` makes.
#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use support::{bare, output, text};

fn certgen(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_phalanx")).arg("certgen").arg(folder).args(arguments).output().unwrap()
}

/// `--tls-ca` and so on for one host.
fn options(folder: &Path, host: &str) -> Vec<String> {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    [
        ("--tls-ca", "ca.pem".to_owned()),
        ("--tls-cert", format!("{host}.pem")),
        ("--tls-key", format!("{host}.key")),
    ]
    .into_iter()
    .flat_map(|(option, name)| [option.to_owned(), path(&name)])
    .collect()
}

/// Two ranks that check sums over TCP.
fn run(options: &[String], variables: &[(&str, &str)]) -> Output {
    let sums = [
        "bench",
        "all_reduce",
        "--transport",
        "tcp",
        "-b",
        "4",
        "-e",
        "256K",
        "-f",
        "256",
        "-n",
        "4",
        "-w",
        "2",
    ];
    let mut command = bare();
    command
        .args(["--nproc-per-node", "2"])
        .args(options)
        .args(["--", env!("CARGO_BIN_EXE_phalanx")])
        .args(sums)
        .envs(variables.iter().copied());
    output(command)
}

#[test]
fn a_job_runs_over_tls_with_what_certgen_makes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("tls");
    assert!(certgen(&["node0"], &folder).status.success());
    let ca = fs::read(folder.join("ca.pem")).unwrap();
    // The CA stays for the next host, which another machine may name as well.
    assert!(certgen(&["node1", "--days", "1"], &folder).status.success());
    assert_eq!(fs::read(folder.join("ca.pem")).unwrap(), ca);
    for secret in ["ca.key", "node0.key", "node1.key"] {
        let mode = fs::metadata(folder.join(secret)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{secret}");
    }
    for host in ["node0", "node1"] {
        let output = run(&options(&folder, host), &[]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    // What is there stays.
    let again = certgen(&["node0"], &folder);
    assert!(!again.status.success() && text(&again.stderr).contains("node0.key cannot be written"));
    assert!(!certgen(&["../node0"], &folder).status.success());
}

#[test]
fn a_ca_that_others_may_use_or_without_its_certificate_makes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert!(certgen(&["node0"], folder).status.success());
    let refused = |why: &str| {
        let output = certgen(&["node1"], folder);
        assert!(!output.status.success() && text(&output.stderr).contains(why), "{}", text(&output.stderr));
        assert!(!folder.join("node1.key").exists());
    };
    let key = folder.join("ca.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    refused("others may use it (mode 640)");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(folder.join("ca.pem")).unwrap();
    refused("ca.pem is missing");
}

#[test]
fn who_is_given_a_part_of_it_or_something_else_is_told() {
    let folder = tempfile::tempdir().unwrap();
    assert!(certgen(&["host"], folder.path()).status.success());
    let all = options(folder.path(), "host");
    let output = run(&all[..4], &[]);
    assert!(text(&output.stderr).contains("go together"), "{}", text(&output.stderr));
    let output = run(&[&all[..], &["--open-store".to_owned()]].concat(), &[]);
    assert!(text(&output.stderr).contains("--open-store"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(2));
    fs::set_permissions(folder.path().join("host.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let output = run(&all, &[]);
    assert!(text(&output.stderr).contains("others may use it"), "{}", text(&output.stderr));
    // Without the options nothing is read, also if a launcher around this one had them.
    let output = run(
        &[],
        &[
            ("PHALANX_TLS_CA", ""),
            ("PHALANX_TLS_CERT", ""),
            ("PHALANX_TLS_KEY", ""),
            ("PHALANX_JOB_KEY_FILE", ""),
        ],
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
}
