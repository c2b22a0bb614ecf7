//! What a trace shows of a step.

use std::path::Path;

use burn::optim::SgdConfig;
use phalanx::ProcessGroup;
use phalanx::join::JoinGroup;
use phalanx::reducer::ReducerOptions;
use phalanx::trace::Trace;
use phalanx_burn::Ddp;

use super::options;
use crate::common::{Mlp, Watched, is_in_memory, run, samples};

/// What the trace of this rank shows of so many passes of a model that has many buckets.
fn traced(group: ProcessGroup, folder: &Path, passes: usize) -> Vec<serde_json::Value> {
    let path = folder.join(format!("{}.json", group.rank()));
    let mut watched = Watched::new(group);
    watched.trace = Trace::to_file(&path, watched.group.rank());
    let reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
    let mut ddp =
        Ddp::with_options(Mlp::new(&[8; 13]), JoinGroup::new(watched.clone()), options(reducer)).unwrap();
    for _ in 0..passes {
        let loss = ddp.forward(|model| model.forward(samples(0, 4).0).powi_scalar(2).mean()).unwrap();
        ddp.backward(&loss).unwrap();
    }
    watched.trace.flush();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn buckets_are_on_their_way_before_the_last_gradient_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let events = traced(group, folder.path(), 2);
        let named = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
        let at = |event: &serde_json::Value| event["ts"].as_f64().unwrap();
        if is_in_memory() {
            assert!(named("copy begins").is_empty(), "gradients are taken from where they lie");
        }
        let backward = named("backward");
        assert_eq!(backward.len(), 2);
        for pass in backward {
            let (start, end) = (at(pass), at(pass) + pass["dur"].as_f64().unwrap());
            let within = |name: &str| {
                let times = named(name).into_iter().map(at).filter(|time| (start..=end).contains(time));
                times.collect::<Vec<_>>()
            };
            let (ready, launched) = (within("ready"), within("launched"));
            assert!(ready.len() == launched.len() && ready.len() >= 6, "{ready:?} {launched:?}");
            let before_the_last = launched.iter().filter(|time| **time <= ready[ready.len() - 1]).count();
            assert!(before_the_last >= launched.len() - 1, "{launched:?} {ready:?}");
        }
    });
}

/// Gradients on a device are copied in their order, while backward gives the device the work of the layers below; and the first bucket
/// is averaged while later copies are still to begin.
#[test]
#[cfg_attr(not(feature = "cube"), ignore = "needs a device besides Flex: .ci/full devices")]
fn gradients_are_copied_from_a_device_while_backward_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let events = traced(group, folder.path(), 1);
        // Which parameter's, and when.
        let copies = |name: &str| -> Vec<(i64, usize)> {
            let events = events.iter().enumerate().filter(|(_, event)| event["name"] == name);
            events.map(|(place, event)| (event["args"]["parameter"].as_i64().unwrap(), place)).collect()
        };
        let (begun, copied) = (copies("copy begins"), copies("copied"));
        assert_eq!(begun.len(), 24, "PHALANX_TEST_DEVICE names a device besides Flex");
        let order = |copies: &[(i64, usize)]| copies.iter().map(|(index, _)| *index).collect::<Vec<_>>();
        assert_eq!(order(&begun), order(&copied));
        for (later, copied) in begun[8..].iter().zip(&copied) {
            assert!(later.1 < copied.1, "{begun:?} {copied:?}");
        }
        for (copied, much_later) in copied.iter().zip(&begun[9..]) {
            assert!(copied.1 < much_later.1, "{copied:?} {begun:?}");
        }
        // Events of other tracks stand elsewhere in the file.
        let times = |name: &str| -> Vec<f64> {
            let named = events.iter().filter(|event| event["name"] == name);
            named.map(|event| event["ts"].as_f64().unwrap()).collect()
        };
        let (begun, launched) = (times("copy begins"), times("launched"));
        assert!(launched[0] < begun[begun.len() - 1], "{launched:?} {begun:?}");
    });
}

#[test]
fn a_trace_has_the_tracks_of_a_step_of_every_rank_in_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    run(2, |group| {
        let mut watched = Watched::new(group);
        watched.trace = Trace::onto_file(&path, watched.group.rank());
        let mut ddp = Ddp::new(Mlp::new(&[8; 3]), JoinGroup::new(watched.clone())).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..3 {
            let loss = ddp.forward(|model| model.forward(samples(0, 4).0).powi_scalar(2).mean()).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 1e-3, gradients).unwrap();
        }
    });
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let track = |rank: u32, name: &str| {
        let is_it = |event: &&serde_json::Value| {
            event["name"] == "thread_name" && event["pid"] == rank && event["args"]["name"] == name
        };
        events.iter().find(is_it).unwrap_or_else(|| panic!("rank {rank} has no track {name}"))["tid"].clone()
    };
    for rank in 0..2 {
        let spans = |name: &str| -> Vec<(f64, f64)> {
            let on_it = |event: &&serde_json::Value| {
                event["name"] == name && event["pid"] == rank && event["tid"] == track(rank, name)
            };
            let number = |value: &serde_json::Value| value.as_f64().unwrap();
            let span = |event: &serde_json::Value| {
                (number(&event["ts"]), number(&event["ts"]) + number(&event["dur"]))
            };
            events.iter().filter(on_it).map(span).collect()
        };
        let steps = spans("step");
        assert_eq!(steps.len(), 3);
        for part in ["forward", "backward", "optimizer"].map(spans) {
            assert_eq!(part.len(), 3);
            // A stamp has no more than the quarter of a microsecond that f64 leaves of a time since 1970.
            for ((begin, end), step) in part.iter().zip(&steps) {
                assert!(step.0 <= begin + 1.0 && *end <= step.1 + 1.0, "{step:?} {begin} {end}");
            }
        }
        track(rank, "bucket 0");
    }
}
