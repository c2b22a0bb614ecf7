//! A run that goes on after a failure: one record, and no step twice.

use std::fs;
use std::path::Path;

use phalanx::ProcessGroup;
use phalanx_tracking::{Run, RunOptions, RunState, RunStatus};

use crate::sinks::{Behaviour, Probe};
use crate::support::{csv_steps, event_files, json_lines, json_steps, scalars};

fn options(folder: &Path) -> RunOptions {
    RunOptions::new(folder).tensorboard().json_lines().csv()
}

fn start(options: RunOptions) -> phalanx::Result<Run> {
    Run::start(&ProcessGroup::alone()?, options)
}

fn log(run: &Run, steps: std::ops::Range<u64>, value: f64) {
    steps.for_each(|step| run.log(step, "loss", value));
}

/// Steps 0 to 9 of an attempt that fails.
fn fail(folder: &Path) {
    let run = start(options(folder)).unwrap();
    run.log_hyperparameters(&serde_json::json!({"rate": 0.5})).unwrap();
    log(&run, 0..10, 1.0);
    run.fail("a disk was lost").unwrap();
}

/// Every step once, those behind the place where it went on by the second attempt.
fn check(folder: &Path, resumed_at: u64, steps: u64) {
    let all: Vec<u64> = (0..steps).collect();
    assert_eq!((json_steps(folder, "loss"), csv_steps(folder, "loss")), (all.clone(), all.clone()));
    let shown = &scalars(folder)["loss"];
    let value = |step| if step < resumed_at { 1.0 } else { 2.0 };
    assert_eq!(*shown, all.iter().map(|step| (*step as i64, value(*step))).collect::<Vec<_>>());
    let lines = json_lines(&folder.join("metrics.jsonl"));
    let values =
        lines.iter().filter(|line| line["tag"] == "loss").map(|line| line["value"].as_f64().unwrap());
    assert!(values.zip(0..).all(|(written, step)| written == f64::from(value(step))));
    let superseded: Vec<_> =
        json_lines(&folder.join("superseded.jsonl")).iter().map(|line| line["step"].as_u64()).collect();
    assert_eq!(superseded, (resumed_at..10).map(Some).collect::<Vec<_>>(), "nothing is lost");
}

#[test]
fn a_failed_run_goes_on_at_the_first_step_that_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    fail(folder.path());
    let run = start(options(folder.path())).unwrap();
    log(&run, 6..20, 2.0);
    run.finish().unwrap();
    check(folder.path(), 6, 20);
    assert_eq!(event_files(folder.path()).len(), 2);
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    let [first, second] = status.attempts() else { panic!("{status:?}") };
    assert_eq!((first.state, first.cause.as_deref()), (RunState::Failed, Some("a disk was lost")));
    assert_eq!((second.state, second.resumed_at, second.last_step), (RunState::Finished, Some(6), Some(19)));
}

#[test]
fn a_run_goes_on_where_it_is_told_to_also_if_it_had_finished() {
    let folder = tempfile::tempdir().unwrap();
    let run = start(options(folder.path())).unwrap();
    log(&run, 0..10, 1.0);
    run.finish().unwrap();

    let error = start(options(folder.path())).err().unwrap();
    assert!(error.is_invalid_argument(), "{error}");
    assert!(error.to_string().contains("has the record of a run that was finished"), "{error}");
    assert!(error.to_string().contains("RunOptions::resume_at"), "{error}");
    assert_eq!(json_steps(folder.path(), "loss").len(), 10, "it was not touched");

    let run = start(options(folder.path()).resume_at(4)).unwrap();
    log(&run, 4..12, 2.0);
    run.finish().unwrap();
    check(folder.path(), 4, 12);
}

#[test]
fn what_a_kill_has_left_half_written_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    fail(folder.path());
    for name in ["metrics.jsonl", "metrics.csv"] {
        let path = folder.path().join(name);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 3]).unwrap();
    }
    let events = &event_files(folder.path())[0];
    let bytes = fs::read(events).unwrap();
    fs::write(events, &bytes[..bytes.len() - 3]).unwrap();
    let run = start(options(folder.path())).unwrap();
    log(&run, 9..12, 2.0);
    run.finish().unwrap();
    let all: Vec<u64> = (0..12).collect();
    assert_eq!((json_steps(folder.path(), "loss"), csv_steps(folder.path(), "loss")), (all.clone(), all));
    assert_eq!(scalars(folder.path())["loss"].len(), 12);
}

#[test]
fn a_sink_that_fails_hears_again_where_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    fail(folder.path());
    let probe = Probe::new(Behaviour { failures: 1, ..Behaviour::default() });
    let own = probe.clone();
    let run = start(RunOptions::new(folder.path()).sink(|_| Ok(Box::new(own))).resume_at(3)).unwrap();
    while probe.behaviour.lock().failures > 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    log(&run, 3..5, 2.0);
    run.finish().unwrap();
    assert_eq!(probe.behaviour.lock().resumed, [3, 3]);
    assert_eq!(probe.steps(), [3, 4]);
}
