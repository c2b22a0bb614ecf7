//! The thread that writes.
//!
//! A sink that fails gets the same records again, so that no sink keeps a list of its own.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx::{Result, panic_message, warn};
use serde::{Deserialize, Serialize};

use crate::queue::Queue;
use crate::state::StateFile;
use crate::{Outcome, Record, Sink, Value};

/// What a sink that fails may leave behind, to be written later: so many records.
const MAX_BACKLOG: usize = 100_000;
/// And so many bytes.
const MAX_BACKLOG_BYTES: usize = 32 << 20;
/// A sink that has failed is tried again after this time.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// What has become of the records.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Records that were given to the sinks.
    pub recorded: u64,
    /// Records that found no room in the queue, because the sinks were slower than the training; no sink has them.
    pub dropped: u64,
    /// Each sink that could not write something.
    pub sinks: Vec<SinkReport>,
}

/// What a sink could not write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SinkReport {
    /// The sink's name.
    pub name: String,
    /// How many records it lacks.
    pub lost: u64,
    /// Its first error.
    pub error: String,
}

impl Report {
    /// Whether everything that was logged is in every sink.
    pub fn is_complete(&self) -> bool {
        self.dropped == 0 && self.sinks.iter().all(|sink| sink.lost == 0)
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} records", self.recorded)?;
        if self.dropped > 0 {
            write!(f, "; {} more found no room in the queue: the sinks were too slow", self.dropped)?;
        }
        for sink in self.sinks.iter().filter(|sink| sink.lost > 0) {
            write!(f, "; {} of them are lost to {}: {}", sink.lost, sink.name, sink.error)?;
        }
        Ok(())
    }
}

/// Where a new attempt begins to supersede earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
    /// There is no earlier one.
    Nothing,
    /// At this step.
    At(u64),
    /// At the first step that is logged.
    AtFirstStep,
}

pub(crate) struct Writer {
    pub queue: Arc<Queue>,
    pub state: StateFile,
    pub outputs: Vec<Output>,
    pub resume: Resume,
    pub pause: Duration,
}

impl Writer {
    /// Writes until the run ends.
    pub fn run(mut self) -> (Report, Result<()>) {
        let (mut recorded, mut last_step, mut non_finite) = (0, None, HashSet::new());
        let outcome = loop {
            let batch = self.queue.take(self.pause);
            for record in batch.records {
                recorded += 1;
                last_step = last_step.max(record.step);
                if let (Resume::AtFirstStep, Some(step)) = (self.resume, record.step) {
                    self.resume = Resume::At(step);
                    self.supersede(step);
                }
                tell_non_finite(&record, &mut non_finite);
                let record = Arc::new(record);
                self.outputs.iter_mut().for_each(|output| output.take(&record));
            }
            let is_last = batch.outcome.is_some();
            self.outputs.iter_mut().for_each(|output| output.flush(is_last));
            self.queue.settle(batch.asked);
            if let Some(outcome) = batch.outcome {
                break outcome;
            }
        };
        let sinks = self.outputs.into_iter().filter_map(|output| output.end(&outcome)).collect();
        let report = Report { recorded, dropped: self.queue.dropped(), sinks };
        if let Some(attempt) = self.state.attempt() {
            attempt.last_step = last_step;
            attempt.dropped = report.dropped;
            attempt.sinks.clone_from(&report.sinks);
            attempt.resumed_at = match self.resume {
                Resume::At(step) => Some(step),
                Resume::Nothing | Resume::AtFirstStep => None,
            };
        }
        let ended = self.state.end(&outcome);
        (report, ended)
    }

    fn supersede(&mut self, step: u64) {
        self.outputs.iter_mut().for_each(|output| output.resume = Some(step));
    }
}

fn tell_non_finite(record: &Record, told: &mut HashSet<String>) {
    let Some((step, found)) = record.step.zip(non_finite(&record.value)) else { return };
    if told.insert(record.tag.clone()) {
        warn(format_args!("{} is {found} at step {step}; it will not be said again", record.tag));
    }
}

/// What is NaN or infinite in `value`.
fn non_finite(value: &Value) -> Option<String> {
    match value {
        Value::Scalar(value) if !value.is_finite() => Some(value.to_string()),
        Value::Histogram(histogram) if histogram.non_finite > 0 => Some(match histogram.count() {
            0 => format!(
                "nothing but NaN or infinite values, {} of them, and its histogram is empty",
                histogram.non_finite
            ),
            others => format!(
                "NaN or infinite in {} of {} values",
                histogram.non_finite,
                histogram.non_finite + others
            ),
        }),
        Value::Scalar(_) | Value::Histogram(_) => None,
        Value::Picture(_) | Value::Text(_) | Value::Hyperparameters(_) => None,
    }
}

/// A sink, and what it has not written yet.
pub(crate) struct Output {
    sink: Box<dyn Sink>,
    /// From which step on it is to supersede what it has from earlier attempts.
    resume: Option<u64>,
    backlog: VecDeque<Arc<Record>>,
    bytes: usize,
    lost: u64,
    error: Option<String>,
    retry_at: Option<Instant>,
    /// It has panicked: nothing more is asked of it.
    is_broken: bool,
}

impl Output {
    pub fn new(sink: Box<dyn Sink>, resume: Resume) -> Self {
        let resume = match resume {
            Resume::At(step) => Some(step),
            Resume::Nothing | Resume::AtFirstStep => None,
        };
        let backlog = VecDeque::new();
        Self { sink, resume, backlog, bytes: 0, lost: 0, error: None, retry_at: None, is_broken: false }
    }

    fn take(&mut self, record: &Arc<Record>) {
        let size = record.size();
        let has_room = self.backlog.len() < MAX_BACKLOG && self.bytes + size <= MAX_BACKLOG_BYTES;
        // Only what has failed before has a backlog that can be full.
        if self.is_broken || (self.retry_at.is_some() && !has_room) {
            self.lost += 1;
            return;
        }
        self.bytes += size;
        self.backlog.push_back(record.clone());
    }

    /// Lets the sink write what it has not.
    fn flush(&mut self, is_last: bool) {
        let now = Instant::now();
        let must_wait = self.retry_at.is_some_and(|at| now < at) && !is_last;
        if self.is_broken || must_wait || (self.backlog.is_empty() && self.resume.is_none()) {
            return;
        }
        let (sink, resume, backlog) = (&mut self.sink, self.resume, &self.backlog);
        let written = guarded(|| {
            if let Some(step) = resume {
                sink.resume(step)?;
            }
            backlog.iter().try_for_each(|record| sink.write(record))?;
            sink.flush()
        });
        match written {
            Ok(Ok(())) => {
                if self.retry_at.take().is_some() {
                    tracing::info!(
                        "{} writes again; nothing was lost that had room in memory",
                        self.sink.name()
                    );
                }
                (self.resume, self.bytes) = (None, 0);
                self.backlog.clear();
            }
            Ok(Err(error)) => {
                self.retry_at = Some(now + RETRY_DELAY);
                self.tell(&error.to_string(), "the training goes on, and it is tried again once a second");
            }
            Err(panic) => {
                (self.is_broken, self.lost) = (true, self.lost + self.backlog.len() as u64);
                self.backlog.clear();
                self.tell(&panic, "the training goes on without it");
            }
        }
    }

    /// Says the first error.
    fn tell(&mut self, error: &str, consequence: &str) {
        if self.error.is_none() {
            let name = self.sink.name();
            warn(format_args!("the record's sink {name} cannot write: {error}; {consequence}"));
            self.error = Some(error.to_owned());
        }
    }

    /// Closes the sink; what it lacks, if anything.
    fn end(mut self, outcome: &Outcome) -> Option<SinkReport> {
        if !self.is_broken {
            let sink = &mut self.sink;
            match guarded(|| sink.finish(outcome)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.tell(&error.to_string(), "it was being closed"),
                Err(panic) => self.tell(&panic, "it was being closed"),
            }
        }
        let lost = self.lost + self.backlog.len() as u64;
        self.error.map(|error| SinkReport { name: self.sink.name().to_owned(), lost, error })
    }
}

/// Sinks are others' code: a panic of one must not end the record.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> Result<io::Result<()>, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| format!("it panicked: {}", panic_message(&*panic)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Histogram;

    #[test]
    fn what_is_not_finite_is_said_and_counted() {
        let of = |values: &[f32]| non_finite(&Value::Histogram(Histogram::of(values)));
        assert_eq!(
            of(&[f32::NAN, f32::INFINITY]).unwrap(),
            "nothing but NaN or infinite values, 2 of them, and its histogram is empty"
        );
        assert_eq!(of(&[1.0, f32::NAN, 2.0]).unwrap(), "NaN or infinite in 1 of 3 values");
        assert_eq!(of(&[1.0, 2.0]), None);
        assert_eq!(non_finite(&Value::Scalar(f64::NAN)).unwrap(), "NaN");
        assert_eq!(non_finite(&Value::Scalar(0.5)), None);
    }
}
