//! What is in the files.

use std::fs;

use phalanx::ProcessGroup;
use phalanx_tracking::{Picture, Run, RunOptions};
use serde_json::json;

use crate::sinks::Heard;
use crate::support::{csv_steps, event_files, events, json_lines, scalars};

#[test]
fn every_kind_of_record_is_in_every_file_that_takes_it() {
    let folder = tempfile::tempdir().unwrap();
    let options = RunOptions::new(folder.path()).tensorboard().json_lines().csv();
    let run = Run::start(&ProcessGroup::alone().unwrap(), options).unwrap();
    run.log_hyperparameters(&json!({"optimizer": {"rate": 0.5}, "amp": true, "name": "a,\"b\""})).unwrap();
    run.log(1, "loss", 0.25f32);
    run.log(1, "a, \"quoted\"\ntag", 3);
    run.log_histogram(1, "weights", &[-1.0f32, 0.0, 1.0, f32::INFINITY]);
    run.log_text(1, "note", "line 1\nline 2");
    run.log_picture(1, "valid/digit", || Picture::rgb(2, 1, vec![1, 2, 3, 4, 5, 6])).unwrap();
    assert!(run.log_picture(1, "torn", || Picture::rgb(2, 1, vec![1])).is_err());
    assert!(run.finish().unwrap().is_complete());

    let lines = json_lines(&folder.path().join("metrics.jsonl"));
    assert_eq!(lines.len(), 6);
    let settings = json!({"optimizer.rate": 0.5, "amp": true, "name": "a,\"b\""});
    assert_eq!((&lines[0]["hyperparameters"], lines[0]["step"].is_null()), (&settings, true));
    assert_eq!((&lines[1]["step"], &lines[1]["value"]), (&json!(1), &json!(0.25)));
    assert_eq!((&lines[2]["tag"], &lines[2]["value"]), (&json!("a, \"quoted\"_tag"), &json!(3.0)));
    let histogram = &lines[3]["histogram"];
    assert_eq!((&histogram["min"], &histogram["non_finite"]), (&json!(-1.0), &json!(1)));
    assert_eq!(lines[4]["text"], "line 1\nline 2");
    let picture = fs::read(folder.path().join(lines[5]["picture"].as_str().unwrap())).unwrap();
    assert_eq!(&picture[1..4], b"PNG");

    assert_eq!(csv_steps(folder.path(), "loss"), [1]);
    assert_eq!(csv_steps(folder.path(), "a, \"quoted\"_tag"), [1]);

    let values = events(&event_files(folder.path())[0]).into_iter().filter_map(|event| event.summary);
    let values: Vec<_> = values.flat_map(|summary| summary.value).collect();
    let tags: Vec<&str> = values.iter().map(|value| value.tag.as_str()).collect();
    let expected = [
        "_hparams_/session_start_info",
        "loss",
        "a, \"quoted\"_tag",
        "weights",
        "note",
        "valid/digit",
        "_hparams_/session_end_info",
    ];
    assert_eq!(tags, expected);
    let histogram = values[3].histogram.as_ref().unwrap();
    assert_eq!((histogram.num, histogram.bucket.iter().sum::<f64>()), (3.0, 3.0));
    assert_eq!(values[5].image.as_ref().unwrap().png, picture);
}

#[test]
fn nan_and_infinities_are_recorded_and_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let options = RunOptions::new(folder.path()).tensorboard().json_lines().csv();
    let values = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300];
    let (_, ()) = Heard::during(|| {
        let run = Run::start(&ProcessGroup::alone().unwrap(), options).unwrap();
        for (step, value) in (0..).zip(values) {
            run.log(step, "loss", value);
        }
        run.finish().unwrap();
    });
    let lines = json_lines(&folder.path().join("metrics.jsonl"));
    let written: Vec<_> = lines.iter().map(|line| line["value"].clone()).collect();
    assert_eq!(written, [json!("NaN"), json!("Infinity"), json!("-Infinity"), json!(1e300)]);
    let csv = fs::read_to_string(folder.path().join("metrics.csv")).unwrap();
    let written: Vec<f64> =
        csv.lines().skip(1).map(|line| line.rsplit(',').next().unwrap().parse().unwrap()).collect();
    assert!(written[0].is_nan() && written[1..] == values[1..], "{csv}");
    let shown = &scalars(folder.path())["loss"];
    assert!(shown[0].1.is_nan() && shown[1].1 == f32::INFINITY && shown[3].1 == f32::INFINITY, "{shown:?}");
}
