//! A record of what happened when, in Chrome's trace event format.
//!
//! Set `PHALANX_TRACE=step.json` and open the file in `chrome://tracing` or <https://ui.perfetto.dev>. In a world of
//! more than one, each rank writes its own file: `step.rank0.json`, `step.rank1.json`, ... Time stamps are
//! microseconds since 1970, so that the files of several ranks lie on one time axis.

use std::borrow::Cow;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use crate::notice::warn;
use crate::rank::{Rank, WorldSize};

/// The variable that names the file.
pub const TRACE_VARIABLE: &str = "PHALANX_TRACE";

/// Events kept for one file. What comes later is counted and left out, and the file says so.
const MAX_EVENTS: usize = 1 << 20;

/// Where a rank notes its events. Clones share one record; a disabled trace costs one branch.
///
/// The file is written when the last clone is dropped, and by [`flush`](Self::flush). A process that is killed, or
/// ends with `std::process::exit`, writes only what it flushed. A file that cannot be written is a warning in the log,
/// never an error: a trace must not end the training that it observes.
///
/// ```
/// use std::time::Instant;
/// use phalanx::trace::Trace;
///
/// let trace = Trace::disabled();
/// let start = Instant::now();
/// trace.complete("backward", "backward", start, Instant::now(), &[("step", 3u64.into())]);
/// assert!(!trace.is_enabled());
/// ```
#[derive(Clone, Default)]
pub struct Trace {
    record: Option<Arc<Record>>,
}

/// The value of an event's argument.
#[derive(Clone, Debug, PartialEq)]
pub enum TraceValue {
    /// A count, a size, an index.
    Integer(i64),
    /// A measurement.
    Float(f64),
    /// A name.
    Text(Cow<'static, str>),
}

struct Record {
    path: PathBuf,
    rank: Rank,
    /// One moment on both clocks.
    origin: (Instant, SystemTime),
    limit: usize,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// Names of the lanes; an event holds an index into it, which is its `tid`.
    lanes: Vec<Cow<'static, str>>,
    events: Vec<Event>,
    left_out: u64,
}

struct Event {
    lane: usize,
    name: Cow<'static, str>,
    at: Instant,
    /// `None` for an instant event.
    end: Option<Instant>,
    args: Vec<(&'static str, TraceValue)>,
}

impl Trace {
    /// A trace that keeps nothing.
    pub const fn disabled() -> Self {
        Self { record: None }
    }

    /// The trace that `PHALANX_TRACE` asks for; disabled if the variable is unset or empty.
    pub fn from_env(rank: Rank, world_size: WorldSize) -> Self {
        match std::env::var_os(TRACE_VARIABLE) {
            Some(path) if !path.is_empty() => {
                Self::to_file(path_of_rank(Path::new(&path), rank, world_size), rank)
            }
            _ => Self::disabled(),
        }
    }

    /// A trace written to `path`. The file is made when the trace is written.
    pub fn to_file(path: impl Into<PathBuf>, rank: Rank) -> Self {
        Self::with_limit(path.into(), rank, MAX_EVENTS)
    }

    fn with_limit(path: PathBuf, rank: Rank, limit: usize) -> Self {
        let origin = (Instant::now(), SystemTime::now());
        Self { record: Some(Arc::new(Record { path, rank, origin, limit, log: Mutex::default() })) }
    }

    /// Is anything kept? Ask before computing costly names or arguments.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.record.is_some()
    }

    /// Notes something that took from `start` to `end`, on `lane`. Within a lane such events must nest, not cross.
    #[inline]
    pub fn complete(
        &self,
        lane: impl Into<Cow<'static, str>>,
        name: impl Into<Cow<'static, str>>,
        start: Instant,
        end: Instant,
        args: &[(&'static str, TraceValue)],
    ) {
        if let Some(record) = &self.record {
            record.note(lane.into(), name.into(), start, Some(end), args);
        }
    }

    /// Notes something that happened `at` a moment, on `lane`.
    #[inline]
    pub fn instant(
        &self,
        lane: impl Into<Cow<'static, str>>,
        name: impl Into<Cow<'static, str>>,
        at: Instant,
        args: &[(&'static str, TraceValue)],
    ) {
        if let Some(record) = &self.record {
            record.note(lane.into(), name.into(), at, None, args);
        }
    }

    /// Writes everything noted so far. Another write follows when the last clone is dropped.
    pub fn flush(&self) {
        if let Some(record) = &self.record {
            record.write();
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.record {
            Some(record) => write!(f, "Trace({})", record.path.display()),
            None => f.write_str("Trace(disabled)"),
        }
    }
}

macro_rules! integers {
    ($($type:ty),*) => {
        $(impl From<$type> for TraceValue {
            fn from(value: $type) -> Self {
                Self::Integer(i64::try_from(value).unwrap_or(i64::MAX))
            }
        })*
    };
}
integers!(i32, i64, u32, u64, usize);

impl From<f64> for TraceValue {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<&'static str> for TraceValue {
    fn from(value: &'static str) -> Self {
        Self::Text(value.into())
    }
}

impl From<String> for TraceValue {
    fn from(value: String) -> Self {
        Self::Text(value.into())
    }
}

/// `step.json` becomes `step.rank3.json` where several ranks write.
fn path_of_rank(path: &Path, rank: Rank, world_size: WorldSize) -> PathBuf {
    if world_size == WorldSize::ONE {
        return path.to_owned();
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".rank{rank}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

impl Record {
    fn note(
        &self,
        lane: Cow<'static, str>,
        name: Cow<'static, str>,
        at: Instant,
        end: Option<Instant>,
        args: &[(&'static str, TraceValue)],
    ) {
        let mut log = self.log.lock();
        if log.events.len() >= self.limit {
            log.left_out += 1;
            return;
        }
        let lane = log.lanes.iter().position(|known| *known == lane).unwrap_or_else(|| {
            log.lanes.push(lane);
            log.lanes.len() - 1
        });
        log.events.push(Event { lane, name, at, end, args: args.to_vec() });
    }

    fn write(&self) {
        if let Err(error) = self.try_write() {
            warn(format_args!("the trace {} could not be written: {error}", self.path.display()));
        }
    }

    /// Writes beside the file and renames, so that nobody ever reads half a trace.
    fn try_write(&self) -> io::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".part");
        let part = PathBuf::from(name);
        let log = self.log.lock();
        let mut out = BufWriter::new(File::create(&part)?);
        serde_json::to_writer(&mut out, &Document { record: self, log: &log })?;
        out.flush()?;
        fs::rename(&part, &self.path)
    }

    /// Microseconds since 1970.
    fn micros(&self, at: Instant) -> f64 {
        let (instant, system) = self.origin;
        let base = system.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let offset = match at.checked_duration_since(instant) {
            Some(after) => after.as_secs_f64(),
            None => -instant.duration_since(at).as_secs_f64(),
        };
        (base + offset) * 1e6
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.write();
    }
}

struct Document<'a> {
    record: &'a Record,
    log: &'a Log,
}

impl Serialize for Document<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("displayTimeUnit", "ms")?;
        map.serialize_entry("otherData", &serde_json::json!({ "events_left_out": self.log.left_out }))?;
        map.serialize_entry("traceEvents", &Events(self))?;
        map.end()
    }
}

struct Events<'a>(&'a Document<'a>);

impl Serialize for Events<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Document { record, log } = self.0;
        let rank = record.rank.get();
        let metadata = |name: &str, lane: usize, args: serde_json::Value| serde_json::json!({ "ph": "M", "pid": rank, "tid": lane, "name": name, "args": args });
        let mut seq = serializer.serialize_seq(None)?;
        let process = serde_json::json!({ "name": format!("rank {rank}") });
        seq.serialize_element(&metadata("process_name", 0, process))?;
        seq.serialize_element(&metadata("process_sort_index", 0, serde_json::json!({ "sort_index": rank })))?;
        for (index, lane) in log.lanes.iter().enumerate() {
            seq.serialize_element(&metadata("thread_name", index, serde_json::json!({ "name": lane })))?;
            let order = serde_json::json!({ "sort_index": index });
            seq.serialize_element(&metadata("thread_sort_index", index, order))?;
        }
        for event in &log.events {
            seq.serialize_element(&Line { record, event })?;
        }
        seq.end()
    }
}

struct Line<'a> {
    record: &'a Record,
    event: &'a Event,
}

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { record, event } = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("pid", &record.rank.get())?;
        map.serialize_entry("tid", &event.lane)?;
        map.serialize_entry("name", &event.name)?;
        map.serialize_entry("ts", &record.micros(event.at))?;
        match event.end {
            Some(end) => {
                map.serialize_entry("ph", "X")?;
                let micros = end.saturating_duration_since(event.at).as_secs_f64() * 1e6;
                map.serialize_entry("dur", &micros)?;
            }
            None => {
                map.serialize_entry("ph", "i")?;
                map.serialize_entry("s", "t")?;
            }
        }
        map.serialize_entry("args", &Args(&event.args))?;
        map.end()
    }
}

struct Args<'a>(&'a [(&'static str, TraceValue)]);

impl Serialize for Args<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl Serialize for TraceValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Integer(value) => serializer.serialize_i64(*value),
            Self::Float(value) => serializer.serialize_f64(*value),
            Self::Text(value) => serializer.serialize_str(value),
        }
    }
}

#[cfg(test)]
mod tests {
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
        other.complete("backward", "backward", start, start + Duration::from_micros(1500), &[]);
        trace.instant("bucket 0", "ready", start, &[("bytes", 64usize.into()), ("why", "test".into())]);
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
        let lanes = events(&document, "M");
        assert!(lanes.iter().any(|event| event["args"]["name"] == "rank 3"));
        assert!(
            lanes
                .iter()
                .any(|event| event["args"]["name"] == "bucket 0" && event["tid"] == instant[0]["tid"])
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no partial file stays");
    }

    #[test]
    fn a_full_trace_says_what_it_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("full.json");
        let trace = Trace::with_limit(path.clone(), Rank::MAIN, 2);
        for _ in 0..5 {
            trace.instant("a", "b", Instant::now(), &[]);
        }
        trace.flush();
        let document = read(&path);
        assert_eq!(document["otherData"]["events_left_out"], 3);
        assert_eq!(events(&document, "i").len(), 2);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_no_panic() {
        let trace = Trace::to_file("/proc/no/such/folder/trace.json", Rank::MAIN);
        trace.instant("a", "b", Instant::now(), &[]);
        trace.flush();
    }

    #[test]
    fn each_rank_has_its_own_file() {
        let world = WorldSize::new(2).unwrap();
        let of = |path: &str, world| path_of_rank(Path::new(path), Rank::new(1), world);
        assert_eq!(of("out/a.b.json", world), Path::new("out/a.b.rank1.json"));
        assert_eq!(of("trace", world), Path::new("trace.rank1"));
        assert_eq!(of("a.json", WorldSize::ONE), Path::new("a.json"));
    }
}
