use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::*;

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn events<'a>(document: &'a Value, phase: &str) -> Vec<&'a Value> {
    document["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase).collect()
}

#[test]
fn the_last_clone_writes_events_lanes_and_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    let trace = Trace::to_file(&path, Rank::new(3));
    let start = Instant::now();
    let other = trace.clone();
    other.complete(Track::Backward, "backward", start, start + Duration::from_micros(1500), &[]);
    trace.instant(Track::Bucket(0), "ready", start, &[("bytes", 64usize.into()), ("why", "test".into())]);
    drop(other);
    assert!(!path.exists());
    drop(trace);

    let document = read(&path);
    let complete = events(&document, "X");
    assert_eq!(complete.len(), 1);
    assert_eq!(complete[0]["pid"], 3);
    assert!((complete[0]["dur"].as_f64().unwrap() - 1500.0).abs() < 1e-6);
    assert!(complete[0]["ts"].as_f64().unwrap() > 1.6e15);
    let instant = events(&document, "i");
    assert_eq!(instant[0]["args"], serde_json::json!({ "bytes": 64, "why": "test" }));
    let tracks = events(&document, "M");
    assert!(tracks.iter().any(|event| event["args"]["name"] == "rank 3"));
    let is_bucket = |event: &&Value| event["args"]["name"] == "bucket 0" && event["tid"] == instant[0]["tid"];
    assert!(tracks.iter().any(is_bucket));
}

#[test]
fn one_file_has_every_rank_with_every_lane() {
    const RANKS: u32 = 8;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    // An earlier job's.
    drop(noted(Trace::to_file(&path, Rank::new(99))));
    let first = Trace::to_file(&path, Rank::MAIN);
    std::thread::scope(|scope| {
        for rank in 1..RANKS {
            let path = &path;
            scope.spawn(move || {
                let trace = Trace::onto_file(path, Rank::new(rank));
                for _ in 0..20 {
                    noted(trace.clone()).flush();
                }
            });
        }
        drop(noted(first));
    });
    let document = read(&path);
    let named = |name: &str| -> BTreeSet<(u64, String)> {
        let named = events(&document, "M").into_iter().filter(|event| event["name"] == name);
        named.map(|event| (event["pid"].as_u64().unwrap(), event["args"]["name"].to_string())).collect()
    };
    let tracks = TRACKS.map(|track| format!("\"{track}\""));
    let of = |rank| tracks.iter().map(move |track| (u64::from(rank), track.clone()));
    assert_eq!(named("thread_name"), (0..RANKS).flat_map(of).collect());
    assert_eq!(
        named("process_name"),
        (0..RANKS).map(|rank| (rank.into(), format!("\"rank {rank}\""))).collect()
    );
    for rank in 0..RANKS {
        let times = if rank == 0 { 1 } else { 20 };
        let own = events(&document, "X").into_iter().filter(|event| event["pid"] == rank).count();
        assert_eq!(own, times * TRACKS.len(), "of rank {rank}: each event is there, once");
    }
}

const TRACKS: [Track; 7] = [
    Track::Step,
    Track::Forward,
    Track::Backward,
    Track::Optimizer,
    Track::Parameters,
    Track::Communication,
    Track::Bucket(1),
];

/// An event on each track.
fn noted(trace: Trace) -> Trace {
    let now = Instant::now();
    TRACKS.iter().for_each(|track| trace.complete(*track, track.to_string(), now, now, &[]));
    trace
}

#[test]
fn a_process_that_was_forked_does_not_write_the_events_of_its_parent_once_more() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    let mut trace = Trace::to_file(&path, Rank::MAIN);
    // Of no process.
    Arc::get_mut(trace.record.as_mut().unwrap()).unwrap().process = 0;
    drop(noted(trace));
    assert!(!path.exists());
}

#[test]
fn what_is_no_file_is_neither_removed_nor_written() {
    let folder = tempfile::tempdir().unwrap();
    // As with PHALANX_TRACE=/dev/null, which root can remove.
    let path = folder.path().join("step.json");
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    drop(noted(Trace::to_file(&path, Rank::MAIN)));
    assert!(path.is_symlink());
    let error = file::append(&path, b"{}").unwrap_err();
    assert!(error.to_string().contains("is not a trace"), "{error}");
}

#[test]
fn of_an_addition_that_was_cut_off_the_whole_lines_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    drop(noted(Trace::to_file(&path, Rank::MAIN)));
    let whole = fs::read(&path).unwrap();
    let lines_before = |end: usize| whole[..end].iter().filter(|byte| **byte == b'\n').count();
    for end in 0..whole.len() {
        fs::write(&path, &whole[..end]).unwrap();
        drop(noted(Trace::onto_file(&path, Rank::new(1))));
        let document = read(&path);
        let of = |rank: u64| {
            let all = document["traceEvents"].as_array().unwrap().iter();
            all.filter(|event| event["pid"] == rank).count()
        };
        let lines = of(1);
        // The first line is the document's beginning.
        assert!(of(0) >= lines_before(end).saturating_sub(1).min(lines), "cut off after {end} bytes");
        assert!(of(0) <= lines);
    }
}

#[test]
fn another_s_file_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    fs::File::create(&path).unwrap().write_all(b"{\"mine\": 1}\n").unwrap();
    drop(noted(Trace::onto_file(&path, Rank::MAIN)));
    drop(noted(Trace::to_file(&path, Rank::MAIN)));
    assert_eq!(fs::read(&path).unwrap(), b"{\"mine\": 1}\n");
}

#[test]
fn a_full_trace_says_what_it_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full.json");
    let trace = Trace::with_limit(path.clone(), Rank::MAIN, 2);
    for _ in 0..5 {
        trace.instant(Track::Step, "b", Instant::now(), &[]);
    }
    trace.flush();
    let document = read(&path);
    assert_eq!(events(&document, "i").len(), 2);
    let labels = |event: &&Value| event["args"]["labels"] == "3 more events were left out";
    assert_eq!(events(&document, "M").into_iter().filter(labels).count(), 1);
}

/// How many events were left out, as often as the file says it.
fn left_out(document: &Value) -> Vec<&str> {
    let labels = events(document, "M").into_iter().filter_map(|event| event["args"]["labels"].as_str());
    labels.filter_map(|text| text.split(' ').next()).collect()
}

#[test]
fn a_full_trace_does_not_grow_with_each_flush_and_says_at_last_all_that_it_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full.json");
    let trace = Trace::with_limit(path.clone(), Rank::MAIN, 2);
    let note = |count: u32| (0..count).for_each(|_| trace.instant(Track::Step, "b", Instant::now(), &[]));
    let size = || fs::metadata(&path).unwrap().len();
    for count in [3, 1] {
        note(count);
        trace.flush();
    }
    let before = size();
    note(1);
    trace.flush();
    assert_eq!(size(), before);
    drop(trace);
    assert_eq!(left_out(&read(&path)), ["1", "2", "3"]);
}

#[test]
fn the_traces_of_rounds_that_follow_each_other_keep_no_more_events_than_one() {
    let folder = tempfile::tempdir().unwrap();
    let (path, noted) = (folder.path().join("rounds.json"), Arc::default());
    for _ in 0..3 {
        let trace = Trace::with_limit(path.clone(), Rank::MAIN, 3).sharing(&noted);
        (0..2).for_each(|_| trace.instant(Track::Step, "b", Instant::now(), &[]));
    }
    let document = read(&path);
    assert_eq!(events(&document, "i").len(), 3);
    // Of all rounds together.
    assert_eq!(left_out(&document), ["1", "3"]);
}

#[test]
fn a_file_that_cannot_be_written_is_tried_less_and_less_often_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("not/yet/there/trace.json");
    let parent = path.parent().unwrap();
    let trace = Trace::with_limit(path.clone(), Rank::MAIN, 3);
    let record = trace.record.as_ref().unwrap();
    let note = |names: &[&'static str]| {
        names.iter().for_each(|name| trace.instant(Track::Step, *name, Instant::now(), &[]));
    };
    let pause = || record.log.lock().retry.map(|retry| retry.pause);
    let start = Instant::now();
    note(&["a", "b"]);
    record.flush(start);
    assert_eq!(pause(), Some(PAUSES.0));
    note(&["c", "d"]);
    // No try: it would succeed.
    fs::create_dir_all(parent).unwrap();
    record.flush(start + PAUSES.0 / 2);
    assert!(!path.exists());
    fs::remove_dir(parent).unwrap();
    let mut now = start;
    for tries in 1..9 {
        now += Duration::from_secs(100);
        record.flush(now);
        assert_eq!(pause(), Some(PAUSES.1.min(PAUSES.0 * (1 << tries))));
    }
    fs::create_dir_all(parent).unwrap();
    note(&["e"]);
    record.flush(now + Duration::from_secs(100));
    assert_eq!(pause(), None);
    let document = read(&path);
    let names: Vec<_> = events(&document, "i").into_iter().map(|event| event["name"].clone()).collect();
    assert_eq!(names, ["a", "b", "c"], "as many as may be kept, in their order");
    let labels = |event: &&Value| event["args"]["labels"] == "2 more events were left out";
    assert_eq!(events(&document, "M").into_iter().filter(labels).count(), 1);
    assert_eq!(record.close(), None);
}

#[test]
fn the_user_is_told_how_many_events_are_lost() {
    let trace = Trace::with_limit("/proc/no/such/folder/trace.json".into(), Rank::MAIN, 3);
    for _ in 0..5 {
        trace.instant(Track::Step, "b", Instant::now(), &[]);
    }
    // The last try is made whenever it is.
    trace.flush();
    let told = trace.record.as_ref().unwrap().close().unwrap();
    let expected = "the trace /proc/no/such/folder/trace.json could not be written, and 5 events are lost: ";
    assert!(told.starts_with(expected), "{told}");
}
