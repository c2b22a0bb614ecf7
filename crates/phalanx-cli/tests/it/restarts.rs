//! `phalanx run`: restarts, logs and the format of the output.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::Signal;

use crate::support::{LIMIT, SUM, SUMS, code, free_port, limit, output, phalanx, send, sorted_lines, text};

/// The one entry of `folder`.
fn only(folder: &Path) -> PathBuf {
    let entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.into_iter().next().unwrap()
}

#[test]
fn a_failure_starts_all_again_until_they_succeed() {
    // Rank 1 fails when rank 0 has said what it has to say.
    let folder = tempfile::tempdir().unwrap();
    let script = "life=$TORCHELASTIC_RESTART_COUNT; echo life $life of $TORCHELASTIC_MAX_RESTARTS; \
                  [ $RANK = 0 ] && { touch $life; exec sleep 0.2; }; \
                  until [ -e $life ]; do sleep 0.05; done; [ $life = 2 ]";
    let mut command = phalanx(&["--nproc-per-node", "2", "--max-restarts", "3"], script);
    command.current_dir(folder.path());
    let output = output(command);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines: Vec<String> =
        (0..2).flat_map(|rank| (0..3).map(move |life| format!("[{rank}] life {life} of 3"))).collect();
    assert_eq!(sorted_lines(&output.stdout), lines);
    let err = text(&output.stderr);
    assert!(err.contains("restart 2 of 3") && !err.contains("The first failure"), "{err}");
}

#[test]
fn restarts_run_out_and_the_last_life_says_why() {
    let script = "echo life $TORCHELASTIC_RESTART_COUNT >&2; exit $((3 + TORCHELASTIC_RESTART_COUNT))";
    let output = output(phalanx(&["--max-restarts", "1"], script));
    assert_eq!(output.status.code(), Some(4));
    let err = text(&output.stderr);
    let (_, report) = err.split_once("The first failure").unwrap();
    assert!(report.contains("life 1") && report.contains("1 restart") && !report.contains("life 0"), "{err}");
}

#[test]
fn a_signal_that_comes_before_a_restart_ends_the_job() {
    // Rank 0 fails when rank 1 is ready. That one is asked to end, says so, and goes on.
    let script = "life=$TORCHELASTIC_RESTART_COUNT; echo life $life; \
                  [ $RANK = 0 ] && { until [ -e ready ]; do sleep 0.05; done; exit 3; }; \
                  trap 'echo asked >&2' TERM; touch ready; while :; do sleep 0.05; done";
    let open = ["--nnodes", "1:2", "--local-addr", "localhost", "--rdzv-conf", "last_call_timeout=0.2"];
    let cases: [&[&str]; 2] = [&[], &open];
    for nodes in cases {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let options = ["--nproc-per-node", "2", "--max-restarts", "2", "--master-port", &port];
        let mut command = phalanx(&[&options[..], nodes].concat(), script);
        command.current_dir(folder.path());
        let mut launcher = command.spawn().unwrap();
        limit(&launcher);
        let mut err = BufReader::new(launcher.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("[1] asked") {
            assert!(err.read_line(&mut said).unwrap() > 0, "rank 1 was not asked to end: {said}");
        }
        send(&launcher, Signal::INT);
        err.read_to_string(&mut said).unwrap();
        let output = launcher.wait_with_output().unwrap();
        assert_eq!(code(output.status), Some(130), "{said}");
        assert_eq!(sorted_lines(&output.stdout), ["[0] life 0", "[1] life 0"], "{said}");
    }
}

#[test]
fn each_life_has_a_store_of_its_own() {
    // Nobody in the second life finds the first one's store, wherever it was; a port that was asked for stays.
    let script = "echo $MASTER_PORT; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let ports = |options: &[&str]| {
        let output = output(phalanx(&[options, &["--max-restarts", "1"]].concat(), script));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(ports(&[]).len(), 2);
    let port = free_port();
    assert_eq!(ports(&["--master-port", &port]), [format!("[0] {port}"), format!("[0] {port}")]);
}

#[test]
fn a_group_comes_together_in_each_life() {
    let script = format!("{SUM} && exit $((1 - TORCHELASTIC_RESTART_COUNT))");
    let output = output(phalanx(&["--nproc-per-node", "2", "--max-restarts", "1"], &script));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("restart 1 of 1"));
}

#[test]
fn a_rank_that_freezes_starts_all_again() {
    // Not before its connections stand: one that has not come is waited for.
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec {SUM}; {SUMS} & \
         [ $RANK = 1 ] && {{ until grep -qs phalanx-watch /proc/$!/task/*/comm; do sleep 0.05; done; \
         sleep 0.5; kill -STOP $!; }}; wait $!"
    );
    let started = Instant::now();
    let output = output(phalanx(&["--nproc-per-node", "4", "--max-restarts", "1"], &script));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    // By its heartbeats; or, on a busy machine, before the group was formed.
    let is_named = err.contains("its process is stopped") || err.contains("is frozen: its process ");
    assert!(err.contains("rank 1 (") && is_named, "{err}");
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
}

#[test]
fn logs_have_torchruns_layout() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 1 fails when rank 0 has ended.
    let script = r#"echo out $RANK; echo err $RANK >&2
        [ $RANK = 0 ] && touch "$FOLDER/0"
        [ $RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT = 1 ] || {
            until [ -e "$FOLDER/0" ]; do sleep 0.05; done
            echo '{"message": "torn"}' > $TORCHELASTIC_ERROR_FILE; exit 1; }"#;
    let logs = folder.path().join("logs");
    let options = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "job"];
    let options =
        [&options[..], &["--log-dir", logs.to_str().unwrap(), "--redirects", "1", "--tee", "1:2"]].concat();
    let mut command = phalanx(&options, script);
    command.env("FOLDER", folder.path());
    let output = output(command);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(output.stdout.is_empty());
    let err = text(&output.stderr);
    assert!(err.contains("[0] err 0") && err.contains("[1] err 1") && err.contains("torn"), "{err}");

    let job = only(&logs);
    assert!(
        job.file_name().unwrap().to_str().unwrap().starts_with("job_") && err.contains(job.to_str().unwrap())
    );
    let read = |path: &str| fs::read_to_string(job.join(path)).unwrap();
    for attempt in ["attempt_0", "attempt_1"] {
        assert_eq!(read(&format!("{attempt}/0/stdout.log")), "out 0\n");
        assert_eq!(read(&format!("{attempt}/1/stdout.log")), "out 1\n");
        assert_eq!(read(&format!("{attempt}/1/stderr.log")), "err 1\n");
        assert!(!job.join(attempt).join("0/stderr.log").exists());
    }
    assert_eq!(read("attempt_0/1/error.json"), "{\"message\": \"torn\"}\n");
    assert!(!job.join("attempt_1/1/error.json").exists());
}

#[test]
fn a_restart_whose_logs_cannot_be_made_shows_what_they_would_keep() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo life $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; \
                  job=$(echo logs/*); rm -r \"$job\" && touch \"$job\"; exit 3";
    let mut command = phalanx(&["--max-restarts", "1", "--log-dir", "logs", "--redirects", "3"], script);
    command.current_dir(folder.path());
    let output = output(command);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(text(&output.stdout), "[0] life 1\n", "{err}");
    assert!(err.contains("the output of rank 0 is not kept: cannot make "), "{err}");
}

#[test]
fn with_json_every_line_is_an_object() {
    let script = "echo 'a \"b\"'; echo why >&2; exit 3";
    let output = output(phalanx(&["--log-format", "json", "--max-restarts", "1"], script));
    assert_eq!(output.status.code(), Some(3));
    let parse = |bytes: &[u8]| -> Vec<serde_json::Value> {
        text(bytes).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let out = parse(&output.stdout);
    assert_eq!((out.len(), &out[0]["event"], &out[0]["text"]), (2, &"line".into(), &"a \"b\"".into()));
    let err = parse(&output.stderr);
    let events: Vec<&str> = err.iter().map(|object| object["event"].as_str().unwrap()).collect();
    for expected in ["starting", "started", "line", "exited", "restarting"] {
        assert!(events.contains(&expected), "{events:?}");
    }
    let last = err.last().unwrap();
    assert_eq!(
        (&last["event"], &last["exit_code"], &last["restarts"]),
        (&"ended".into(), &3.into(), &1.into())
    );
    assert_eq!((&last["failure"]["rank"], &last["failure"]["stderr"][0]), (&0.into(), &"why".into()));
}

#[test]
fn torchruns_other_options_and_variables_are_taken() {
    let mut command =
        phalanx(&["--no-python", "--monitor-interval=0.5"], "exit $((1 - TORCHELASTIC_RESTART_COUNT))");
    command.env("PET_MAX_RESTARTS", "1").env("PET_RDZV_ID", "x");
    assert_eq!(output(command).status.code(), Some(0));
}
