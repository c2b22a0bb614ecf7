//! `phalanx run --min-np`: who is replaced, what is said about it, and what is refused. The training itself is tested with
//! the library.

use crate::support::stand_in::Hosts;
use crate::support::{bare, output, output_with, phalanx, sorted_lines, text};

/// Place 1 fails in its first life; a folder remembers it. All others end when there is a file `end`.
const FAILS_ONCE: &str = "[ $LOCAL_RANK = 1 ] && mkdir \"$FOLDER/failed\" 2> /dev/null && exit 3
    until [ -e \"$FOLDER/end\" ]; do sleep 0.05; done; echo $PHALANX_ELASTIC $PHALANX_RESET_LIMIT";

#[test]
fn a_worker_that_fails_is_replaced_and_the_job_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(
        &["--nproc-per-node", "3", "--min-np", "2", "--max-restarts", "4", "--reset-limit", "7"],
        FAILS_ONCE,
    );
    command.env("FOLDER", folder.path());
    let end = || std::fs::write(folder.path().join("end"), "").unwrap();
    let output = output_with(command, "rank 1 is replaced", end);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(sorted_lines(&output.stdout), ["[0] 2:3 7", "[1] 2:3 7", "[2] 2:3 7"]);
    assert!(err.contains("rank 1 (pid") && err.contains("exit code 3"), "{err}");
    assert!(err.contains("rank 1 is replaced (1 of 4)") && !err.contains("The first failure"), "{err}");
}

#[test]
fn without_replacements_the_others_go_on_and_programs_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut command =
        phalanx(&["--nproc-per-node", "3", "--min-np", "2", "--log-format", "json"], FAILS_ONCE);
    command.env("FOLDER", folder.path());
    let end = || std::fs::write(folder.path().join("end"), "").unwrap();
    let output = output_with(command, "\"lost\"", end);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let events: Vec<serde_json::Value> =
        text(&output.stderr).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lost: Vec<_> = events.iter().filter(|event| event["event"] == "lost").collect();
    assert_eq!(lost.len(), 1);
    assert_eq!((&lost[0]["failure"]["rank"], &lost[0]["failure"]["exit_code"]), (&1.into(), &3.into()));
    assert!(lost[0]["replaced_in"].is_null());
    let ended = events.last().unwrap();
    assert_eq!((&ended["outcome"], &ended["replacements"]), (&"succeeded".into(), &0.into()));
}

#[test]
fn too_few_are_a_failure_and_the_first_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let script = "[ $LOCAL_RANK = 0 ] && exec sleep 60
        [ $LOCAL_RANK = 1 ] || until [ -e \"$FOLDER/end\" ]; do sleep 0.05; done; exit $((LOCAL_RANK + 3))";
    let mut command = phalanx(&["--nproc-per-node", "3", "--min-np", "2"], script);
    command.env("FOLDER", folder.path());
    let end = || std::fs::write(folder.path().join("end"), "").unwrap();
    let output = output_with(command, "rank 1 is not replaced", end);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    let err = text(&output.stderr);
    assert!(err.contains("rank 1 is not replaced; the others go on"), "{err}");
    assert!(err.split_once("The first failure").unwrap().1.contains("1 of 3"), "{err}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let refused = |options: &[&str], why: &str| {
        let output = output(phalanx(options, "true"));
        let err = text(&output.stderr);
        assert_eq!((output.status.code(), err.contains(why)), (Some(2), true), "{err}");
    };
    refused(&["--nproc-per-node", "2", "--min-np", "3"], "--min-np may be at most");
    refused(&["--min-np", "0"], "--min-np 0");
    refused(&["--reset-limit", "3"], "--min-np");
    let nodes = ["--min-np", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"];
    refused(&nodes, "-H host:slots");
    refused(&["--min-np", "1", "--max-np", "4"], "-H");
    refused(&["--min-np", "3", "-H", "localhost:2"], "at most 2");
    refused(&["--min-np", "2", "--max-np", "1", "-H", "localhost:4"], "at most 1");
    refused(&["--min-np", "2", "--max-np", "3", "-np", "4", "-H", "localhost:4"], "-np 4 is not between");
    refused(&["--host-discovery-script", "x"], "--min-np");
}

/// Not after ten minutes, the time that hosts may take to come.
#[test]
fn a_discovery_script_that_never_works_ends_the_job_with_what_it_says() {
    let mut command = bare();
    let script = "echo 'no such zone' >&2; exit 3";
    command.args(["--min-np", "1", "--host-discovery-script", script, "--", "true"]);
    let output = output(command);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("it ended with exit status: 3, and said: no such zone"), "{said}");
}

/// As where the machines are still to be made.
#[test]
fn a_discovery_script_that_prints_no_host_yet_is_asked_again() {
    let hosts = Hosts::new();
    hosts.name("");
    let mut command = hosts.discovered(&["--min-np", "1"]);
    command.args(["--", "sh", "-c", "echo up $RANK"]);
    let output = output_with(command, "prints no host yet", || hosts.name("far1:1"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(sorted_lines(&output.stdout), ["[0] up 0"]);
}
