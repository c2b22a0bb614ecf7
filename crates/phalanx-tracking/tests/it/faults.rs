//! Disks that are full, sinks that hang: the training goes on.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx::ProcessGroup;
use phalanx::testing::{Fabric, run};
use phalanx_tracking::{Outcome, Run, RunOptions, RunState, RunStatus};

use crate::sinks::{Behaviour, Heard, Probe};
use crate::support::csv_steps;

fn alone(options: RunOptions) -> Run {
    Run::start(&ProcessGroup::alone().unwrap(), options.flush_interval(Duration::from_millis(1))).unwrap()
}

fn with(probe: &Probe, folder: &tempfile::TempDir) -> RunOptions {
    let probe = probe.clone();
    RunOptions::new(folder.path()).sink(|_| Ok(Box::new(probe)))
}

#[test]
fn a_full_disk_is_said_once_and_what_is_lost_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    // Writing there fails as on a disk without room.
    std::os::unix::fs::symlink("/dev/full", folder.path().join("metrics.jsonl")).unwrap();
    let run = alone(RunOptions::new(folder.path()).json_lines().csv());
    for step in 0..100 {
        run.log(step, "loss", 0.5);
        if step % 20 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let (told, report) = Heard::during(|| run.finish().unwrap());
    assert!(!report.is_complete());
    assert_eq!((report.recorded, report.dropped, report.sinks.len()), (100, 0, 1));
    let sink = &report.sinks[0];
    assert_eq!((sink.name.as_str(), sink.lost), ("metrics.jsonl", 100));
    assert!(sink.error.contains("No space left on device"), "{}", sink.error);
    assert!(told.contains("100 of them are lost to metrics.jsonl: No space left on device"), "{told}");
    assert_eq!(csv_steps(folder.path(), "loss"), (0..100).collect::<Vec<_>>(), "the other sink has all");
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    assert_eq!((status.state(), status.attempts()[0].sinks[0].lost), (RunState::Finished, 100));
}

/// As by a search that tries the next settings.
#[test]
fn a_process_alone_that_catches_a_panic_goes_on_with_its_group() {
    let (folder, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let attempt: std::thread::Result<()> = catch_unwind(AssertUnwindSafe(|| {
        let _run = Run::start(&group, RunOptions::new(folder.path()).csv()).unwrap();
        panic!("there is no such layer");
    }));
    assert!(attempt.is_err() && group.failure().is_none());
    assert_eq!(RunStatus::read(folder.path()).unwrap().unwrap().state(), RunState::Failed);
}

#[test]
fn ranks_wait_for_a_slow_disk_of_rank_0_whatever_the_group_s_time_out() {
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::InProcess, |group| {
        let slow = |_: &std::path::Path| {
            std::thread::sleep(Duration::from_secs(1));
            Err(std::io::Error::other("the disk is gone"))
        };
        let impatient = group.with_timeout(Duration::from_millis(100));
        let started = Run::start(&impatient, RunOptions::new(folder.path()).sink(slow));
        let error = started.map(drop).unwrap_err();
        assert!(error.to_string().contains("cannot be opened"), "{error}");
        assert!(group.failure().is_none());
    });
}

#[test]
fn a_disk_that_has_room_again_has_lost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let probe = Probe::new(Behaviour { failures: 2, ..Behaviour::default() });
    let run = alone(with(&probe, &folder));
    let mut step = 0;
    while probe.behaviour.lock().failures > 0 {
        run.log(step, "loss", 0.5);
        step += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = run.finish().unwrap();
    assert!(report.is_complete(), "{report}");
    assert_eq!((report.sinks.len(), report.sinks[0].lost), (1, 0), "its error is in the report");
    assert_eq!(probe.steps(), (0..step).collect::<Vec<_>>(), "each once, in order");
    assert_eq!(probe.behaviour.lock().outcome, Some(Outcome::Finished));
}

#[test]
fn what_was_flushed_is_written_and_a_sink_that_hangs_holds_it_up_no_longer_than_the_time_out() {
    let folder = tempfile::tempdir().unwrap();
    let own = RunOptions::new(folder.path()).csv().flush_interval(Duration::from_secs(600));
    let run = Run::start(&ProcessGroup::alone().unwrap(), own).unwrap();
    for step in 0..3 {
        run.log(step, "loss", 0.5);
        run.flush();
        assert_eq!(csv_steps(folder.path(), "loss"), (0..=step).collect::<Vec<_>>());
    }
    run.finish().unwrap();

    let folder = tempfile::tempdir().unwrap();
    let probe = Probe::new(Behaviour { blocked: true, ..Behaviour::default() });
    let run = alone(with(&probe, &folder).finish_timeout(Duration::from_millis(50)));
    run.log(1, "loss", 0.5);
    let (told, ()) = Heard::during(|| run.flush());
    assert!(told.contains("have not written everything within 0.05 s; the training goes on"), "{told}");
    probe.release();
    // The thread that writes may take longer than the time-out to wake.
    let begun = Instant::now();
    while probe.steps().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "what was released is not written");
        run.flush();
    }
    assert_eq!(probe.steps(), [1]);
    drop(run);
}

#[test]
fn a_writer_slower_than_the_training_holds_up_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let probe = Probe::new(Behaviour { blocked: true, ..Behaviour::default() });
    let run = alone(with(&probe, &folder).queue(10));
    let (told, ()) = Heard::during(|| (0..1000).for_each(|step| run.log(step, "loss", 0.5)));
    // The sink has let nothing through yet, and all calls have returned.
    assert_eq!(told.matches("the record's sinks are slower than the training").count(), 1, "{told}");
    probe.release();
    let (told, report) = Heard::during(|| run.finish().unwrap());
    assert!(report.dropped >= 900 && report.recorded + report.dropped == 1000, "{report}");
    assert_eq!(probe.steps().len() as u64, report.recorded);
    assert!(told.contains(&format!("{} more found no room in the queue", report.dropped)), "{told}");
}

#[test]
fn a_sink_that_hangs_ends_finish_with_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let probe = Probe::new(Behaviour { blocked: true, ..Behaviour::default() });
    let run = alone(with(&probe, &folder).finish_timeout(Duration::from_millis(50)));
    run.log(1, "loss", 0.5);
    let error = run.finish().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let error = error.to_string();
    assert!(error.contains("have not written everything within 0.05 s"), "{error}");
    assert!(error.contains("RunOptions::finish_timeout"), "{error}");
    probe.release();
}

#[test]
fn a_sink_that_panics_ends_neither_the_training_nor_the_other_sinks() {
    let folder = tempfile::tempdir().unwrap();
    let probe = Probe::new(Behaviour { panics: true, ..Behaviour::default() });
    let run = alone(with(&probe, &folder).csv());
    (0..5).for_each(|step| run.log(step, "loss", 0.5));
    let report = run.finish().unwrap();
    assert_eq!((report.sinks[0].lost, report.sinks[0].error.as_str()), (5, "it panicked: a bug in a sink"));
    let behaviour = probe.behaviour.lock();
    assert_eq!((behaviour.writes, &behaviour.outcome), (1, &None), "it is not called again");
    assert_eq!(csv_steps(folder.path(), "loss"), [0, 1, 2, 3, 4]);
}

#[test]
fn a_record_that_cannot_be_opened_is_everybody_s_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let errors = run(3, Fabric::InProcess, |group| {
        let error = Run::start(&group, RunOptions::new(file.join("run")).csv()).err().unwrap();
        assert!(group.failure().is_none(), "the group is sound");
        error.to_string()
    });
    assert!(
        errors.iter().all(|error| error.contains("run.json cannot be opened: Not a directory")),
        "{errors:?}"
    );
    assert!(errors[1].contains("rank 0 has not opened the record"), "{errors:?}");
}

/// As in an elastic job, whose next round has the same rank 0.
#[test]
fn a_record_that_was_opened_for_a_group_that_has_failed_can_be_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let rank_0_is_done = Barrier::new(2);
    let errors = run(2, Fabric::InProcess, |group| {
        let error = group.rank().is_main().then(|| {
            group.abort(phalanx::Error::other("a rank was killed"));
            Run::start(&group, RunOptions::new(folder.path()).csv()).err()
        });
        rank_0_is_done.wait();
        error.flatten().map(|error| error.to_string())
    });
    assert!(errors[0].as_ref().is_some_and(|error| error.contains("a rank was killed")), "{errors:?}");
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    assert_eq!(status.state(), RunState::Failed);
    assert!(status.cause().unwrap().contains("a rank was killed"), "{status:?}");
    alone(RunOptions::new(folder.path()).csv()).finish().unwrap();
}

#[test]
fn a_failed_group_marks_the_record_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let all_are_here = Barrier::new(2);
    run(2, Fabric::InProcess, |group| {
        let run = Run::start(&group, RunOptions::new(folder.path()).csv()).unwrap();
        // Else a rank that has not yet heard that the record is open hears of the failure instead.
        all_are_here.wait();
        if group.rank().is_main() {
            group.abort(phalanx::Error::other("the loss is NaN"));
        }
        drop(run);
    });
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    assert_eq!(status.state(), RunState::Failed);
    assert!(status.cause().unwrap().contains("the loss is NaN"), "{status:?}");
}
