//! The comparison, short and with real ranks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

#[path = "../../../../crates/phalanx-core/tests/support/environment.rs"]
mod environment;

use crate::environment::command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_async_digits");

#[test]
fn who_does_not_wait_takes_more_steps_and_every_way_is_in_table_record_and_plot() {
    let folder = tempfile::tempdir().unwrap();
    let (json, plot) = (folder.path().join("async.json"), folder.path().join("async.png"));
    let output = command(PROGRAM)
        .args(["--ranks", "2", "--slow", "8", "--compute-ms", "40", "--batch-size", "8"])
        .args(["--seconds", "3", "--ways", "ddp,ssp4,asp,dc-asgd,local-sgd,diloco", "--every", "2"])
        .arg("--json")
        .arg(&json)
        .arg("--plot")
        .arg(&plot)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for name in ["Ddp", "SSP 4", "ASP", "DC-ASGD", "local SGD", "DiLoCo"] {
        assert!(text.contains(&format!("\n{name} ")), "{name} is not in {text}");
    }

    let lines = std::fs::read_to_string(json).unwrap();
    let outcomes: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |way: &str| outcomes.iter().find(|outcome| outcome["way"] == way).unwrap();
    // One rank sleeps 320 ms in each step, and the other 40 ms.
    let steps = |way: &str| [0, 1].map(|place| of(way)["steps"][place].as_u64().unwrap());
    assert_eq!(steps("ddp")[0], steps("ddp")[1], "{text}");
    assert_eq!(steps("local-sgd")[0], steps("local-sgd")[1], "{text}");
    assert!(steps("asp")[0] > steps("asp")[1], "{text}");
    let lead = |way: &str| of(way)["lead"].as_u64();
    assert!(lead("ssp4").is_some_and(|lead| (1..=4).contains(&lead)), "{lines}");
    assert_eq!(lead("ddp"), None, "{lines}");
    assert!(of("asp")["mean_staleness"].as_f64().is_some() && of("ddp")["mean_staleness"].is_null());
    for outcome in &outcomes {
        let accuracy = outcome["accuracy"].as_array().unwrap();
        let times: Vec<f64> = accuracy.iter().map(|point| point[0].as_f64().unwrap()).collect();
        assert!(times.len() > 2 && times.is_sorted() && *times.last().unwrap() >= 3.0, "{outcome}");
        assert!(outcome["images_per_second"].as_f64().unwrap() > 0.0, "{outcome}");
        assert!(accuracy.iter().all(|point| (0.0..=1.0).contains(&point[1].as_f64().unwrap())), "{outcome}");
    }
    assert_eq!(std::fs::read(plot).unwrap()[..4], *b"\x89PNG");
}

#[test]
fn the_encoder_is_trained_in_the_same_ways() {
    let output = command(PROGRAM)
        .args([
            "--model",
            "encoder",
            "--ranks",
            "2",
            "--compute-ms",
            "10",
            "--batch-size",
            "8",
            "--seconds",
            "1",
        ])
        .args(["--ways", "ddp,ssp4,local-sgd", "--every", "2"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for name in ["Ddp", "SSP 4", "local SGD"] {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
        let rate: f64 = line[name.len()..].split_whitespace().next().unwrap().parse().unwrap();
        assert!(rate > 0.0, "{text}");
    }
}

#[test]
fn a_training_that_diverges_is_named() {
    let output = command(PROGRAM)
        .args(["--ranks", "2", "--compute-ms", "10", "--batch-size", "8", "--seconds", "1.5"])
        .args(["--ways", "asp", "--lr", "1e12"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(" diverged "), "{text}");
}

#[test]
fn steps_without_images_are_refused() {
    let output = command(PROGRAM).args(["--batch-size", "0"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("--batch-size"), "{text}");
}

#[test]
fn times_that_no_clock_has_are_refused() {
    for (option, value) in [
        ("--seconds", "inf"),
        ("--seconds", "1e300"),
        ("--seconds", "NaN"),
        ("--slow", "1e300"),
        ("--compute-ms", "18446744073709551615"),
    ] {
        let output = command(PROGRAM).args([option, value]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(option), "{value}: {text}");
        assert!(!text.contains("panicked"), "{value}: {text}");
    }
}
