//! What tests read back: event files, by declarations of their own, and lines.
#![allow(dead_code, clippy::unwrap_used, reason = "helpers of tests are tests, and not every test needs all")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use prost::Message;
use serde_json::Value as Json;

#[derive(Clone, PartialEq, Message)]
pub struct Event {
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(string, optional, tag = "3")]
    pub file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub session: Option<Session>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Session {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Value {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(float, optional, tag = "2")]
    pub scalar: Option<f32>,
    #[prost(message, optional, tag = "4")]
    pub image: Option<Image>,
    #[prost(message, optional, tag = "5")]
    pub histogram: Option<Histogram>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Image {
    #[prost(int32, tag = "1")]
    pub height: i32,
    #[prost(int32, tag = "2")]
    pub width: i32,
    #[prost(bytes = "vec", tag = "4")]
    pub png: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Histogram {
    #[prost(double, tag = "3")]
    pub num: f64,
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}

/// The event files of a run, in the order in which TensorBoard reads them.
pub fn event_files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.to_string_lossy().contains("events.out.tfevents.")).collect();
    files.sort();
    files
}

/// The events of a file, whose lengths and checksums are checked. Half a record at its end is passed over, as TensorBoard does.
pub fn events(path: &Path) -> Vec<Event> {
    let crc = |bytes: &[u8]| crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let file = std::fs::read(path).unwrap();
    let (mut rest, mut events) = (&file[..], Vec::new());
    while rest.len() >= 12 {
        let (head, body) = rest.split_at(12);
        assert_eq!(&head[8..], crc(&head[..8]), "the checksum of a length");
        let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
        let Some((record, tail)) = body.split_at_checked(length).filter(|(_, tail)| tail.len() >= 4) else {
            break;
        };
        let (sum, tail) = tail.split_at(4);
        assert_eq!(sum, crc(record), "the checksum of a record");
        events.push(Event::decode(record).unwrap());
        rest = tail;
    }
    assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
    events
}

/// The scalars that TensorBoard shows of a run, by tag: with each start of a session, what is behind it goes.
pub fn scalars(directory: &Path) -> BTreeMap<String, Vec<(i64, f32)>> {
    let mut shown = BTreeMap::<String, Vec<(i64, f32)>>::new();
    for event in event_files(directory).iter().flat_map(|path| events(path)) {
        if event.session.is_some_and(|session| session.status == 1) {
            shown.values_mut().for_each(|points| points.retain(|(step, _)| *step < event.step));
        }
        for value in event.summary.into_iter().flat_map(|summary| summary.value) {
            if let Some(scalar) = value.scalar {
                shown.entry(value.tag).or_default().push((event.step, scalar));
            }
        }
    }
    shown
}

/// The objects of a file of JSON lines; each line is whole.
pub fn json_lines(path: &Path) -> Vec<Json> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "half a line");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The steps of a tag in `metrics.jsonl`.
pub fn json_steps(directory: &Path, tag: &str) -> Vec<u64> {
    let lines = json_lines(&directory.join("metrics.jsonl"));
    lines.iter().filter(|line| line["tag"] == tag).map(|line| line["step"].as_u64().unwrap()).collect()
}

/// The steps of a tag in `metrics.csv`.
pub fn csv_steps(directory: &Path, tag: &str) -> Vec<u64> {
    let mut reader = csv::Reader::from_path(directory.join("metrics.csv")).unwrap();
    assert_eq!(reader.headers().unwrap(), vec!["step", "time", "tag", "value"]);
    let rows = reader.records().map(|row| row.unwrap());
    rows.filter(|row| &row[2] == tag).map(|row| row[0].parse().unwrap()).collect()
}
