//! Jobs over TLS, with the certificates that `phalanx certgen` makes.
#![cfg(feature = "tls")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::stand_in::Hosts;
use crate::support::{SUM, bare, exit_code, output, text};

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

/// Two ranks that check a sum over TCP.
fn run(options: &[String], variables: &[(&str, &str)]) -> Output {
    let mut command = bare();
    command.args(["--nproc-per-node", "2"]).args(options).args(["--", "sh", "-c", SUM]);
    command.env("PHALANX_TRANSPORT", "tcp").envs(variables.iter().copied());
    output(command)
}

/// On every host where the command stands, as they are told of in the guide.
const ON_EVERY_HOST: [&str; 6] =
    ["--tls-ca", "tls/ca.pem", "--tls-cert", "tls/host.pem", "--tls-key", "tls/host.key"];

/// Hosts that have these.
fn hosts() -> Hosts {
    let hosts = Hosts::new();
    assert!(certgen(&["host"], &hosts.path().join("tls")).status.success());
    hosts
}

#[test]
fn a_job_that_one_command_starts_on_several_hosts_runs_over_tls() {
    let hosts = hosts();
    let mut command = hosts.run("localhost:1,far1:2,far2:1", &ON_EVERY_HOST);
    command.args(["--", "sh", "-c", SUM]).env("PHALANX_TRANSPORT", "tcp");
    let output = output(command);
    assert!(output.status.success(), "{}", text(&output.stderr));

    // Its store hears nobody without.
    let script = "echo $MASTER_PORT $PHALANX_TLS_CERT; while [ ! -e end ]; do sleep 0.02; done";
    let mut child = hosts.script("far1:1,far2:1", &ON_EVERY_HOST, script).spawn().unwrap();
    crate::support::limit(&child);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let (_, line) = line.trim().split_once("] ").unwrap();
    let (port, certificate) = line.split_once(' ').unwrap();
    assert!(certificate.ends_with("tls/host.pem"), "{certificate}");
    let mut plain = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    plain.write_all(b"PHXS\x01\0\0\0").unwrap();
    let mut answer = [0; 7];
    plain.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [21, 3, 3, 0, 2, 2, 70]);
    fs::write(hosts.path().join("end"), "").unwrap();
    assert_eq!(exit_code(&mut child), Some(0));
}

#[test]
fn a_host_whose_certificate_cannot_be_used_is_named() {
    let hosts = hosts();
    fs::remove_file(hosts.path().join("tls/host.pem")).unwrap();
    let output = output(hosts.script("far1:1,far2:1", &ON_EVERY_HOST, "true"));
    let err = text(&output.stderr);
    assert!(!output.status.success() && err.contains("host.pem cannot be used for TLS"), "{err}");
    assert!(err.contains("far1") || err.contains("far2"), "{err}");
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

/// As a pipe that another user has put there, which would be waited for, or a device without an end.
#[test]
fn what_is_no_file_in_the_place_of_a_ca_s_key_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::os::unix::fs::symlink("/dev/null", folder.join("ca.key")).unwrap();
    let output = certgen(&["node0"], folder);
    let err = text(&output.stderr);
    assert!(output.status.code() == Some(1) && err.contains("it is not a regular file"), "{err}");
    assert!(!folder.join("node0.key").exists());
}

/// Its owner has put the key elsewhere, as the guide says.
#[test]
fn a_ca_without_its_key_gets_no_other_key() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert!(certgen(&["node0"], folder).status.success());
    fs::remove_file(folder.join("ca.key")).unwrap();
    for _ in 0..2 {
        let output = certgen(&["node1"], folder);
        let err = text(&output.stderr);
        assert!(output.status.code() == Some(1) && err.contains("put the key back"), "{err}");
        assert!(!folder.join("ca.key").exists() && !folder.join("node1.pem").exists());
    }
}

#[test]
fn of_several_hosts_all_get_certificates_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert!(certgen(&["node1"], folder).status.success());
    for (hosts, why) in
        [(["node0", "node1"], "it exists already; leave out node1"), (["node0", "node0"], "named twice")]
    {
        let output = certgen(&hosts, folder);
        let err = text(&output.stderr);
        assert!(output.status.code() == Some(1) && err.contains(why), "{err}");
        assert!(!folder.join("node0.key").exists() && !folder.join("node0.pem").exists());
    }
}

/// A program with no room for a file of more than so many blocks of 512 bytes, as on a full disk.
fn with_room(blocks: u32, words: &[&str], folder: &Path) -> Output {
    let mut shell = Command::new("sh");
    let script = format!("ulimit -f {blocks}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_phalanx")]).args(words).current_dir(folder);
    shell.output().unwrap()
}

/// The next call must not find half a key, or a key without its certificate.
#[test]
fn what_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // A key is shorter than a block, and a certificate is longer.
    for (blocks, words, named) in [
        (0, &["certgen", "tls", "node0"][..], "tls/ca.key"),
        (1, &["certgen", "tls", "node0"], "tls/ca.pem"),
        (0, &["keygen", "key"], "key"),
    ] {
        let output = with_room(blocks, words, folder.path());
        let err = text(&output.stderr);
        assert!(output.status.code() == Some(1) && err.contains("File too large"), "{err}");
        assert!(err.contains(named), "{err}");
    }
    assert!(!folder.path().join("key").exists());
    let folder = folder.path().join("tls");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    // Of a CA that is there, nothing is removed.
    assert!(certgen(&["node0"], &folder).status.success());
    let output = with_room(1, &["certgen", "tls", "node1"], folder.parent().unwrap());
    let err = text(&output.stderr);
    assert!(output.status.code() == Some(1) && err.contains("tls/node1.pem"), "{err}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 4);
    assert!(certgen(&["node1"], &folder).status.success());
}

#[test]
fn a_host_with_the_name_of_the_ca_s_files_is_refused_by_it() {
    let folder = tempfile::tempdir().unwrap();
    let output = certgen(&["node0", "ca"], folder.path());
    let err = text(&output.stderr);
    assert!(output.status.code() == Some(1) && err.contains("ca is the name of the CA's own files"), "{err}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
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
