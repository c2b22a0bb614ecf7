//! Real processes: this program starts itself as the workers, so that it has a `main` of its own.
//! `cargo test -p phalanx-tracking --test jobs -- killed` runs one test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "it is a test, though it has no harness")]

#[path = "../../../phalanx-core/tests/support/environment.rs"]
mod environment;
#[path = "../../../phalanx-core/tests/support/harness.rs"]
mod harness;
#[path = "../support/mod.rs"]
mod support;
mod workers;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Arguments;
use phalanx::WorldSize;
use phalanx::launch::{Event, Job, Outcome, Stream};
use phalanx_tracking::{RunState, RunStatus};

use crate::harness::{ROLE, run_job};
use crate::support::{csv_steps, event_files, events, json_lines, json_steps, scalars};
use crate::workers::{FOLDER, STEPS};

/// Nothing takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(120);

const TESTS: &[(&str, fn())] = &[
    ("progress_bars_and_logs_of_every_worker_at_once", one_bar_and_a_log_for_each_rank),
    ("a_killed_run_leaves_a_readable_record_and_goes_on_in_it", a_killed_run),
    ("workers_that_are_started_again_go_on_in_the_same_record", workers_are_started_again),
    ("a_survivor_goes_on_with_the_record_of_a_rank_0_that_has_died", a_survivor_goes_on),
    ("a_disk_that_is_full_is_said_once", a_disk_that_is_full),
    ("a_record_that_another_process_writes_is_refused", another_process_writes),
    ("a_file_that_becomes_too_large_does_not_end_the_training", a_file_that_becomes_too_large),
];
const PRIVILEGED: &[(&str, fn())] = &[("a_small_disk_fills_up_and_the_training_goes_on", a_small_disk)];

fn main() {
    if let Some(role) = harness::role() {
        return workers::play(&role);
    }
    let trial = |(name, test): &(&str, fn())| harness::trial(*name, *test);
    let privileged = PRIVILEGED.iter().map(trial);
    let privileged = privileged.map(|trial| trial.with_ignored_flag(true).with_kind("needs root: .ci/full"));
    libtest_mimic::run(&Arguments::from_args(), TESTS.iter().map(trial).chain(privileged).collect()).exit()
}

/// This program as `role`, alone.
fn program(role: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, role).env(FOLDER, folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A job of this program as `role`.
fn job(role: &str, folder: &Path, workers: u32) -> Job {
    let job = Job::new(std::env::current_exe().unwrap(), WorldSize::new(workers).unwrap());
    job.variable(ROLE, role).variable(FOLDER, folder).grace(Duration::from_secs(5))
}

/// Runs a job to its good end; gives what each rank has written to standard error.
fn succeed(job: Job, workers: usize) -> Vec<String> {
    let mut said = vec![String::new(); workers];
    let report = run_job(&job, LIMIT, |event| {
        if let Event::Line { rank, stream: Stream::Stderr, text } = event {
            said[rank.index()].push_str(&String::from_utf8_lossy(text));
            said[rank.index()].push('\n');
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?}\n{said:?}", report.outcome);
    said
}

/// The step that a worker says it has logged, of its next line.
fn next_step(lines: &mut BufReader<impl Read>) -> u64 {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    line.trim().parse().unwrap_or_else(|_| panic!("no step: {line:?}"))
}

/// Waits until `metrics.jsonl` has a line of this step.
fn await_step(folder: &Path, step: u64) {
    let began = Instant::now();
    let needle = format!("\"step\":{step},");
    while !fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default().contains(&needle) {
        assert!(began.elapsed() < LIMIT, "step {step} was not recorded");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn end(child: Child) -> Output {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// Every step once, in every format.
fn check_steps(folder: &Path, steps: u64) {
    let all: Vec<u64> = (0..steps).collect();
    assert_eq!(json_steps(folder, "loss"), all);
    assert_eq!(csv_steps(folder, "loss"), all);
    let shown: Vec<u64> = scalars(folder)["loss"].iter().map(|(step, _)| *step as u64).collect();
    assert_eq!(shown, all);
}

fn one_bar_and_a_log_for_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let said = succeed(job("logs", folder.path(), 3), 3);
    assert!(
        !said[1].contains("step") && !said[2].contains("step"),
        "one terminal, one rank that writes to it: {said:?}"
    );
    let steps: Vec<&str> = said[0].lines().filter(|line| line.starts_with("step ")).collect();
    // One at the start, and one at the end: what is no terminal gets a line now and then.
    assert!((1..=2).contains(&steps.len()), "{}", said[0]);
    let last = steps[steps.len() - 1];
    assert!(last.starts_with(&format!("step {STEPS}/{STEPS} (100 %)")), "{last}");
    assert!(last.contains("loss 1.000"), "the mean of 0, 1 and 2: {last}");
    let shown = |rank: u32| said[0].matches(&format!("rank {rank} at step ")).count() as u64;
    assert_eq!((shown(0), shown(1), shown(2)), (STEPS, 0, 0), "{}", said[0]);
    for rank in 0..3 {
        let log = fs::read_to_string(folder.path().join(format!("logs/rank-{rank}.log"))).unwrap();
        let own = log.lines().filter(|line| line.contains(&format!("rank {rank} at step "))).count() as u64;
        assert_eq!((own, log.matches(" at step ").count() as u64), (STEPS, STEPS), "{log}");
    }
}

fn a_killed_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = program("train", folder.path()).env(workers::SLOW, "1").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    while next_step(&mut lines) < 20 {}
    await_step(folder.path(), 10);
    assert_eq!(RunStatus::read(folder.path()).unwrap().unwrap().state(), RunState::Running);
    child.kill().unwrap();
    child.wait().unwrap();

    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    assert_eq!(status.state(), RunState::Failed);
    assert!(status.cause().unwrap().contains("it was killed"), "{status:?}");
    assert_eq!(status.attempts()[0].pid, child.id());
    // The record is whole, up to the last entry.
    assert!(events(&event_files(folder.path())[0]).len() > 10);
    let text = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let whole = text.rfind('\n').unwrap();
    assert!(text[..whole].lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));

    // As after a checkpoint of step 5.
    let child = program("train", folder.path()).env(workers::RESUME, "5").spawn().unwrap();
    end(child);
    check_steps(folder.path(), STEPS);
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    let [first, second] = status.attempts() else { panic!("{status:?}") };
    assert_eq!(
        (first.state, second.state, second.resumed_at),
        (RunState::Failed, RunState::Finished, Some(5))
    );
}

fn workers_are_started_again() {
    let folder = tempfile::tempdir().unwrap();
    succeed(job("restarted", folder.path(), 2).max_restarts(2), 2);
    check_steps(folder.path(), STEPS);
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    let attempts: Vec<_> = status
        .attempts()
        .iter()
        .map(|attempt| (attempt.restart_count, attempt.state, attempt.world_size))
        .collect();
    assert_eq!(attempts, [(0, RunState::Failed, 2), (1, RunState::Failed, 2), (2, RunState::Finished, 2)]);
}

fn a_survivor_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let one = WorldSize::new(1).unwrap();
    succeed(job("elastic", folder.path(), 2).min_workers(one), 2);
    check_steps(folder.path(), STEPS);
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    let [first, second] = status.attempts() else { panic!("{status:?}") };
    assert_eq!((first.state, first.world_size), (RunState::Failed, 2));
    assert_eq!((second.state, second.world_size), (RunState::Finished, 1));
    assert_ne!(first.pid, second.pid, "another process");
    let lines = json_lines(&folder.path().join("metrics.jsonl"));
    let pids: BTreeSet<_> = lines.iter().map(|line| line["value"].to_string()).collect();
    assert!(pids.len() > 1, "both have written");
}

fn a_disk_that_is_full() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.path().join("metrics.jsonl")).unwrap();
    let output = end(program("train", folder.path()).spawn().unwrap());
    let said = String::from_utf8(output.stderr).unwrap();
    let sink = "the record's sink metrics.jsonl cannot write: No space left on device";
    assert_eq!(said.matches(sink).count(), 1, "{said}");
    assert_eq!(said.matches(&format!("{STEPS} of them are lost to metrics.jsonl")).count(), 1, "{said}");
    assert_eq!(csv_steps(folder.path(), "loss"), (0..STEPS).collect::<Vec<_>>());
}

fn another_process_writes() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = program("train", folder.path()).env(workers::SLOW, "1").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    next_step(&mut lines);
    let refused = program("train", folder.path()).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success());
    assert!(said.contains(&format!("is being written by process {}", child.id())), "{said}");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The signal as users have it: this program's launcher has told this process to ignore it, and others inherit that.
fn a_file_that_becomes_too_large() {
    let folder = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "ulimit -f 8; exec env --default-signal=XFSZ \"$0\""])
        .arg(std::env::current_exe().unwrap());
    shell.env(ROLE, "alone").env(FOLDER, folder.path());
    let output = end(shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("metrics.jsonl cannot write: File too large"), "{said}");
    assert_eq!(RunStatus::read(folder.path()).unwrap().unwrap().state(), RunState::Finished);
}

/// A file system of 64 KiB in a mount namespace of its own fills up, and later has room again.
fn a_small_disk() {
    let folder = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=64k tmpfs \"$PHALANX_TEST_FOLDER\" && \"$@\" && \
                  cp -r \"$PHALANX_TEST_FOLDER/.\" \"$PHALANX_TEST_OUT\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(std::env::current_exe().unwrap());
    command.env(ROLE, "fill").env(FOLDER, folder.path()).env("PHALANX_TEST_OUT", out.path());
    let output = end(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.matches("cannot write: No space left on device").count(), 1, "{said}");
    assert!(!said.contains("is not complete"), "there was room again before the end: {said}");
    let steps: u64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    assert_eq!(json_steps(out.path(), "loss"), (0..steps).collect::<Vec<_>>(), "each once, and none torn");
    assert_eq!(RunStatus::read(out.path()).unwrap().unwrap().state(), RunState::Finished);
}
