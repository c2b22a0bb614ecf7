//! What people trip over who train in one process first and in many then.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx::reducer::StepTime;
use phalanx::testing::{Fabric, run};
use phalanx_tracking::{Picture, Run, RunOptions, RunState, RunStatus, Traffic};

use crate::sinks::Heard;
use crate::support::{event_files, events, json_lines, json_steps, scalars};

/// Every rank makes the same calls; there is one file, one picture, one of everything.
#[test]
fn tensorboard_and_pictures_written_by_all() {
    let folder = tempfile::tempdir().unwrap();
    let (drawn, opened) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let opened = std::sync::Arc::new(opened);
    run(3, Fabric::InProcess, |group| {
        let counter = opened.clone();
        let options = RunOptions::new(folder.path()).tensorboard().json_lines().sink(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(Box::new(crate::sinks::Probe::default()))
        });
        let run = Run::start(&group, options).unwrap();
        assert_eq!(run.is_recording(), group.rank().is_main());
        for step in 0..5 {
            run.log(step, "loss", group.rank().get() as f32);
            run.log_text(step, "note", "hello");
            run.log_histogram(step, "weights", &[1.0f32, 2.0]);
            let picture = || {
                drawn.fetch_add(1, Ordering::Relaxed);
                Picture::gray(2, 2, vec![0, 1, 2, 3])
            };
            run.log_picture(step, "digit", picture).unwrap();
        }
        let report = run.finish().unwrap();
        assert_eq!(report.recorded, if group.rank().is_main() { 20 } else { 0 });
    });
    assert_eq!((drawn.into_inner(), opened.load(Ordering::Relaxed)), (5, 1));
    assert_eq!(event_files(folder.path()).len(), 1);
    assert_eq!(scalars(folder.path())["loss"], [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0)]);
    assert_eq!(json_steps(folder.path(), "loss"), [0, 1, 2, 3, 4]);
    assert_eq!(fs::read_dir(folder.path().join("media")).unwrap().count(), 5);
    let images = events(&event_files(folder.path())[0]).into_iter();
    let images = images.filter_map(|event| event.summary?.value.into_iter().next()?.image);
    assert_eq!(
        images.filter(|image| (image.width, image.height, &image.png[1..4]) == (2, 2, b"PNG")).count(),
        5
    );
}

#[test]
fn wandb_finish_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let (told, ()) = Heard::during(|| {
        run_alone(folder.path(), |run| (0..3).for_each(|step| run.log(step, "loss", 0.5)));
    });
    assert_eq!(told.matches("a run was dropped without finish()").count(), 1, "{told}");
    assert_eq!(json_steps(folder.path(), "loss"), [0, 1, 2], "everything is written all the same");
    assert_eq!(scalars(folder.path())["loss"].len(), 3);
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    assert_eq!((status.state(), status.attempts()[0].last_step), (RunState::Dropped, Some(2)));
}

/// Runs `work` with a run that nobody finishes.
fn run_alone(folder: &std::path::Path, work: impl FnOnce(&Run)) {
    let group = phalanx::ProcessGroup::alone().unwrap();
    let run = Run::start(&group, RunOptions::new(folder).tensorboard().json_lines()).unwrap();
    work(&run);
}

#[test]
fn a_panic_marks_the_record_as_failed_and_leaves_it_readable() {
    let folder = tempfile::tempdir().unwrap();
    let (told, outcome) = Heard::during(|| {
        std::panic::catch_unwind(|| {
            run_alone(folder.path(), |run| {
                run.log(7, "loss", 0.5);
                panic!("out of range");
            });
        })
    });
    assert!(outcome.is_err() && !told.contains("finish()"), "a panic has been told already: {told}");
    assert_eq!((json_steps(folder.path(), "loss"), scalars(folder.path())["loss"].len()), (vec![7], 1));
    let status = RunStatus::read(folder.path()).unwrap().unwrap();
    assert_eq!((status.state(), status.cause()), (RunState::Failed, Some("rank 0 panicked")));
}

#[test]
fn the_loss_that_is_logged_is_that_of_all_ranks_and_not_of_rank_0() {
    for fabric in [Fabric::InProcess, Fabric::SharedMemory, Fabric::Tcp] {
        for world in [1, 2, 3] {
            let folder = tempfile::tempdir().unwrap();
            let means = run(world, fabric, |group| {
                let rank = f64::from(group.rank().get());
                let run = Run::start(&group, RunOptions::new(folder.path()).json_lines()).unwrap();
                let mean = run.log_mean(1, "loss", rank).unwrap();
                // The last rank has three samples, the first has none, of which it knows nothing.
                let weight = rank / f64::from(world);
                let value = if rank == 0.0 { f64::NAN } else { rank };
                let weighted = run.log_means(1, weight, &[("accuracy", value), ("norm", 2.0)]).unwrap();
                run.finish().unwrap();
                (mean, weighted)
            });
            let ranks = || (0..world).map(f64::from);
            let mean = ranks().sum::<f64>() / f64::from(world);
            for (own, weighted) in &means {
                assert_eq!(*own, mean);
                if world > 1 {
                    let expected = ranks().map(|rank| rank * rank).sum::<f64>() / ranks().sum::<f64>();
                    assert!((weighted[0] - expected).abs() < 1e-12 && (weighted[1] - 2.0).abs() < 1e-12);
                } else {
                    assert!(weighted.iter().all(|mean| mean.is_nan()), "nobody has a sample");
                }
            }
            let lines = json_lines(&folder.path().join("metrics.jsonl"));
            assert_eq!((lines.len(), lines[0]["value"].as_f64()), (3, Some(mean)));
        }
    }
}

#[test]
fn ranks_that_log_other_things_are_told_so_and_a_nan_names_its_rank() {
    let folder = tempfile::tempdir().unwrap();
    let (told, _) = Heard::during(|| {
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        run(3, Fabric::InProcess, |group| {
            let _heard = tracing::dispatcher::set_default(&dispatch);
            let rank = group.rank().get();
            let run = Run::start(&group, RunOptions::new(folder.path()).json_lines()).unwrap();
            for step in 0..3 {
                run.log_mean(step, "loss", if rank == 2 { f64::NAN } else { 1.0 }).unwrap();
            }
            let tag = if rank == 1 { "accuracy" } else { "loss" };
            let error = run.log_mean(3, tag, 1.0).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("rank 1 logs other tags"), "{error}");
            let error = run.log_mean(if rank == 2 { 4 } else { 3 }, "loss", 1.0).unwrap_err();
            let said = "rank 2 logs a mean at step 4, and rank 0 at step 3";
            assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
            let error = run.log_means(4, if rank == 2 { -1.0 } else { 1.0 }, &[("loss", 1.0)]).unwrap_err();
            assert!(error.to_string().contains("rank 2 logs means with the weight -1"), "{error}");
            run.finish().unwrap();
        });
    });
    assert_eq!(told.matches("loss is NaN on rank 2 at step 0").count(), 1, "{told}");
    let lines = json_lines(&folder.path().join("metrics.jsonl"));
    assert!(lines.len() == 3 && lines.iter().all(|line| line["value"] == "NaN"), "{lines:?}");
}

#[test]
fn the_figures_of_every_rank_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::InProcess, |group| {
        let run = Run::start(&group, RunOptions::new(folder.path()).json_lines()).unwrap();
        let bytes_sent = Some(100 + u64::from(group.rank().get()));
        // Ranks that count steps in other ways.
        let step = 5 + u64::from(group.rank().get());
        run.log_system(step, Traffic { bytes_sent, hidden: Some(0.75) }).unwrap();
        run.log_step_times(5, &[]);
        let time =
            |own, wait| StepTime { own: Duration::from_millis(own), wait: Duration::from_millis(wait) };
        run.log_step_times(6, &[time(250, 500), time(750, 0)]);
        run.finish().unwrap();
    });
    let lines = json_lines(&folder.path().join("metrics.jsonl"));
    let of =
        |tag: &str| lines.iter().find(|line| line["tag"] == tag).map(|line| line["value"].as_f64().unwrap());
    for (tag, seconds) in [("step_seconds", [0.25, 0.75]), ("wait_seconds", [0.5, 0.0])] {
        let recorded = [0, 1].map(|rank| of(&format!("system/{tag}/rank{rank}")).unwrap());
        assert_eq!(recorded, seconds, "{tag}");
    }
    for rank in ["rank0", "rank1"] {
        assert!(of(&format!("system/memory_bytes/{rank}")).unwrap() > 1e5);
        assert!(of(&format!("system/peak_memory_bytes/{rank}")).unwrap() > 1e5);
        assert_eq!(of(&format!("system/communication_hidden/{rank}")), Some(0.75));
    }
    assert_eq!((of("system/bytes_sent/rank0"), of("system/bytes_sent/rank1")), (Some(100.0), Some(101.0)));
    let steps = [0, 1].map(|rank| json_steps(folder.path(), &format!("system/bytes_sent/rank{rank}")));
    assert_eq!(steps, [[5], [6]]);
}
