//! A record of events with their times, in Chrome's trace event format.
//!
//! Set `PHALANX_TRACE=step.json` and open the file in <https://ui.perfetto.dev> or `chrome://tracing`. It has all ranks
//! of the job. Each rank is a process there, with [tracks](Track) for steps, forward passes, backward passes, the
//! optimizer, the wait for gradients, communication, and each bucket. A restarted job adds to the same file.
//!
//! Time stamps are microseconds since 1970 by each host's clock. Ranks of one host have the same clock. If the clocks
//! of hosts differ, the ranks of a host are all shifted by the same time. Hosts without a shared disk write a file
//! each, with the ranks of that host. To merge them: `jq -s '{traceEvents: map(.traceEvents) | add}' a.json b.json`.

mod file;

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use self::file::Line;
use crate::notice::warn;
use crate::rank::Rank;

/// The variable that names the file.
pub const TRACE_VARIABLE: &str = "PHALANX_TRACE";

/// The most events that are kept of one rank. Later ones are counted and left out, and the file says how many.
const MAX_EVENTS: usize = 1 << 20;
/// How long [`Trace::flush`] pauses after it could not write the file: after the first failure, and at most. Each try
/// encodes all events that are kept.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Where a rank records its events. Clones share one record; a disabled trace costs one branch.
///
/// Events are added to the file when the last clone is dropped, and by [`flush`](Self::flush). A process that is
/// killed, or ends with `std::process::exit`, has written only what it flushed. A file that cannot be written causes a
/// warning, never an error: a trace must not end the training that it observes. Events that [`flush`](Self::flush)
/// could not write stay in memory and are tried again by a later flush, at first after 1 s, then less often, up to once
/// a minute; a flush before that does nothing. A rank keeps 1 Mi events in all, also in the rounds of an elastic job, and
/// the file says how many came later.
/// The drop of the last clone always tries; if it fails too, its warning says how many events are lost.
///
/// ```
/// use std::time::Instant;
/// use phalanx::trace::{Track, Trace};
///
/// let trace = Trace::disabled();
/// let start = Instant::now();
/// trace.complete(Track::Backward, "backward", start, Instant::now(), &[("step", 3u64.into())]);
/// assert!(!trace.is_enabled());
/// ```
#[derive(Clone, Default)]
pub struct Trace {
    record: Option<Arc<Record>>,
}

/// A row of a rank's events. Viewers show each as a thread of the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Track {
    /// From the first forward pass to the end of the optimizer's step.
    Step,
    /// Forward passes.
    Forward,
    /// Backward passes, and the wait for averages after them.
    Backward,
    /// The optimizer.
    Optimizer,
    /// Gathering of parameters from their owners.
    Parameters,
    /// Passes of micro-batches through stages of a pipeline, and the waits between them: its bubbles.
    Pipeline,
    /// Operations of the group, one after the other, and messages between ranks.
    Communication,
    /// A bucket of gradients: when it was ready and launched, and how long its averaging took.
    Bucket(u32),
    /// Rounds in which ranks agree on what is ready on all of them.
    Negotiation,
    /// A tensor with a name: its negotiation, and its operation.
    Tensor(u32),
}

impl Track {
    /// Names come after all buckets, of which there are never as many.
    const FIRST_OF_NAMES: u32 = 1 << 20;

    /// Its number among the threads of a rank, by which viewers order them.
    fn number(self) -> u32 {
        match self {
            Self::Step => 0,
            Self::Forward => 1,
            Self::Backward => 2,
            Self::Optimizer => 3,
            Self::Parameters => 4,
            Self::Pipeline => 5,
            Self::Communication => 6,
            Self::Bucket(index) => index.saturating_add(7).min(Self::FIRST_OF_NAMES - 1),
            Self::Negotiation => Self::FIRST_OF_NAMES,
            Self::Tensor(index) => index.saturating_add(Self::FIRST_OF_NAMES + 1),
        }
    }
}

impl fmt::Display for Track {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step => f.write_str("step"),
            Self::Forward => f.write_str("forward"),
            Self::Backward => f.write_str("backward"),
            Self::Optimizer => f.write_str("optimizer"),
            Self::Parameters => f.write_str("parameters"),
            Self::Pipeline => f.write_str("pipeline"),
            Self::Communication => f.write_str("communication"),
            Self::Bucket(index) => write!(f, "bucket {index}"),
            Self::Negotiation => f.write_str("negotiation"),
            Self::Tensor(index) => write!(f, "tensor {index}"),
        }
    }
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
    /// The process that writes, and not one that was forked from that, which has a copy of the events.
    process: u32,
    /// How many events have come since the beginning.
    noted: Arc<AtomicUsize>,
    log: Mutex<Log>,
}

/// The events that have not been written yet.
#[derive(Default)]
struct Log {
    events: Vec<Event>,
    /// How many have come since the beginning when there was no more room.
    left_out: u64,
    /// How many of these the file mentions.
    told: u64,
    /// Set while the file cannot be written.
    retry: Option<Retry>,
}

/// When to try again.
#[derive(Clone, Copy)]
struct Retry {
    at: Instant,
    /// How long the last pause was.
    pause: Duration,
}

struct Event {
    track: Track,
    name: Cow<'static, str>,
    at: Instant,
    /// `None` for an instant event.
    end: Option<Instant>,
    args: Vec<(&'static str, TraceValue)>,
}

impl Trace {
    /// A trace that records nothing.
    pub const fn disabled() -> Self {
        Self { record: None }
    }

    /// The trace that `PHALANX_TRACE` asks for; disabled if the variable is unset or empty. If this rank `begins` the
    /// job's trace, the file of an earlier job is removed.
    pub(crate) fn from_env(rank: Rank, begins: bool) -> Self {
        static BEGUN: AtomicBool = AtomicBool::new(false);
        /// Each round of an elastic job has a group, and its group a trace: if each had the whole limit, the file of a long job would fill the disk.
        static NOTED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);
        let trace = match std::env::var_os(TRACE_VARIABLE) {
            // A later group of the same process adds to the job's trace.
            Some(path) if !path.is_empty() && begins && !BEGUN.swap(true, Ordering::Relaxed) => {
                Self::to_file(path, rank)
            }
            Some(path) if !path.is_empty() => Self::onto_file(path, rank),
            _ => Self::disabled(),
        };
        trace.sharing(&NOTED)
    }

    /// Counts its events together with those of the others that share `noted`. Before it has a clone.
    fn sharing(mut self, noted: &Arc<AtomicUsize>) -> Self {
        if let Some(record) = self.record.as_mut().and_then(Arc::get_mut) {
            record.noted = Arc::clone(noted);
            let before = noted.load(Ordering::Relaxed).saturating_sub(record.limit) as u64;
            let log = record.log.get_mut();
            (log.left_out, log.told) = (before, before);
        }
        self
    }

    /// A trace in its own file: a file at `path` is removed, and the new one is made when the trace is written.
    pub fn to_file(path: impl Into<PathBuf>, rank: Rank) -> Self {
        let path = path.into();
        file::remove(&path).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "an earlier trace could not be removed");
        });
        Self::with_limit(path, rank, MAX_EVENTS)
    }

    /// A trace that is added to the events of other ranks at `path`.
    pub fn onto_file(path: impl Into<PathBuf>, rank: Rank) -> Self {
        Self::with_limit(path.into(), rank, MAX_EVENTS)
    }

    fn with_limit(path: PathBuf, rank: Rank, limit: usize) -> Self {
        let origin = (Instant::now(), SystemTime::now());
        let (process, noted, log) = (std::process::id(), Arc::default(), Mutex::default());
        Self { record: Some(Arc::new(Record { path, rank, origin, limit, process, noted, log })) }
    }

    /// Whether the trace is enabled. Call it before you compute costly names or arguments.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.record.is_some()
    }

    /// Records an event that took from `start` to `end`, on `track`. Within a track such events must nest, and must not
    /// overlap otherwise.
    #[inline]
    pub fn complete(
        &self,
        track: Track,
        name: impl Into<Cow<'static, str>>,
        start: Instant,
        end: Instant,
        args: &[(&'static str, TraceValue)],
    ) {
        if let Some(record) = &self.record {
            record.note(Event { track, name: name.into(), at: start, end: Some(end), args: args.to_vec() });
        }
    }

    /// Records an event `at` a moment, on `track`.
    #[inline]
    pub fn instant(
        &self,
        track: Track,
        name: impl Into<Cow<'static, str>>,
        at: Instant,
        args: &[(&'static str, TraceValue)],
    ) {
        if let Some(record) = &self.record {
            record.note(Event { track, name: name.into(), at, end: None, args: args.to_vec() });
        }
    }

    /// Adds the events since the last flush to the file. While the file cannot be written, most calls do nothing.
    pub fn flush(&self) {
        if let Some(record) = &self.record {
            record.flush(Instant::now());
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

impl Record {
    fn note(&self, event: Event) {
        let mut log = self.log.lock();
        let before = self.noted.fetch_add(1, Ordering::Relaxed);
        if before >= self.limit {
            log.left_out = (before - self.limit) as u64 + 1;
            return;
        }
        log.events.push(event);
    }

    /// Adds the pending events to the file, unless that has failed a short while ago.
    fn flush(&self, now: Instant) {
        let before = self.log.lock().retry;
        if before.is_some_and(|retry| now < retry.at) {
            return;
        }
        let started = Instant::now();
        let outcome = self.write(false);
        self.log.lock().retry = outcome.as_ref().err().map(|_| {
            let pause = before.map_or(PAUSES.0, |retry| (retry.pause * 2).min(PAUSES.1));
            Retry { at: now + started.elapsed() + pause, pause }
        });
        if let (None, Err(error)) = (before, outcome) {
            let path = self.path.display();
            warn(format_args!("the trace {path} cannot be written, and will be tried again: {error}"));
        }
    }

    /// Adds the pending events to the file. Those that could not be added stay.
    fn write(&self, is_last: bool) -> std::io::Result<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let (events, left_out) = {
            let mut log = self.log.lock();
            // Not with each flush: the file of a long job, whose trace is full, would grow for ever.
            let tells = log.left_out > log.told && (is_last || log.left_out >= log.told.saturating_mul(2));
            (std::mem::take(&mut log.events), tells.then_some(log.left_out))
        };
        if events.is_empty() && left_out.is_none() {
            return Ok(());
        }
        let outcome = self.lines(&events, left_out).and_then(|lines| file::append(&self.path, &lines));
        let mut log = self.log.lock();
        match &outcome {
            Ok(()) => log.told = left_out.unwrap_or(log.told),
            Err(_) => {
                // They have been counted: the limit includes them and those that came meanwhile.
                let newer = std::mem::replace(&mut log.events, events);
                log.events.extend(newer);
            }
        }
        outcome
    }

    /// Adds the pending events for the last time. Returns the warning if that fails.
    fn close(&self) -> Option<String> {
        let error = self.write(true).err()?;
        let log = self.log.lock();
        let (path, lost) = (self.path.display(), log.events.len() as u64 + log.left_out - log.told);
        Some(format!("the trace {path} could not be written, and {lost} events are lost: {error}"))
    }

    /// These events as lines of the file: first whose they are and on which tracks, then each event.
    fn lines(&self, events: &[Event], left_out: Option<u64>) -> std::io::Result<Vec<u8>> {
        let rank = self.rank.get();
        let mut tracks: Vec<Track> = events.iter().map(|event| event.track).collect();
        tracks.sort_unstable();
        tracks.dedup();
        let labels = left_out.map(|count| format!("{count} more events were left out"));
        let mut lines = vec![
            Line::Named { rank, what: "process_name", thread: 0, name: &format!("rank {rank}") }.encode()?,
            Line::Ordered { rank, what: "process_sort_index", thread: 0, index: rank }.encode()?,
        ];
        for track in tracks {
            let thread = track.number();
            lines.push(Line::Named { rank, what: "thread_name", thread, name: &track.to_string() }.encode()?);
            lines.push(Line::Ordered { rank, what: "thread_sort_index", thread, index: thread }.encode()?);
        }
        if let Some(labels) = &labels {
            lines.push(Line::Labelled { rank, labels }.encode()?);
        }
        for event in events {
            lines.push(Line::Event { rank, at: self.micros(event.at), event }.encode()?);
        }
        Ok(lines.join(&b",\n"[..]))
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
        self.close().into_iter().for_each(warn);
    }
}

#[cfg(test)]
mod tests;
