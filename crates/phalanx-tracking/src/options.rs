//! What a run is to record, and where.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::sinks::{Csv, JsonLines, Progress, TensorBoard};
use crate::{Console, Sink};

/// With less between two writes the thread that writes would never sleep.
const MIN_FLUSH_INTERVAL: Duration = Duration::from_millis(1);

/// Opens a sink in the run's directory.
pub(crate) type OpenSink = Box<dyn FnOnce(&Path) -> io::Result<Box<dyn Sink>> + Send>;

/// What [`Run::start`](crate::Run::start) is to record, and where. Sinks are opened on rank 0 alone.
#[must_use]
pub struct RunOptions {
    pub(crate) directory: PathBuf,
    pub(crate) sinks: Vec<OpenSink>,
    pub(crate) resume_at: Option<u64>,
    pub(crate) queue: usize,
    pub(crate) flush_interval: Duration,
    pub(crate) finish_timeout: Duration,
}

impl RunOptions {
    /// A record in `directory`, which is made if it is not there. It has no sinks yet.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            sinks: Vec::new(),
            resume_at: None,
            queue: 1 << 16,
            flush_interval: Duration::from_millis(200),
            finish_timeout: Duration::from_secs(30),
        }
    }

    /// Also writes event files for TensorBoard: `tensorboard --logdir` on the directory, or on the one above it.
    #[doc(alias = "SummaryWriter")]
    pub fn tensorboard(self) -> Self {
        self.sink(|directory| Ok(Box::new(TensorBoard::open(directory)?)))
    }

    /// Also writes `metrics.jsonl`, an object for each record, and pictures into `media/`.
    pub fn json_lines(self) -> Self {
        self.sink(|directory| Ok(Box::new(JsonLines::open(directory)?)))
    }

    /// Also writes `metrics.csv`, a line for each scalar: step, time, tag, value.
    pub fn csv(self) -> Self {
        self.sink(|directory| Ok(Box::new(Csv::open(directory)?)))
    }

    /// Also shows the one progress bar of the job on `console`: the step, of `steps` if they are known, and the newest scalars.
    /// What is not a terminal gets a plain line now and then.
    #[doc(alias("tqdm", "ProgressBar"))]
    pub fn progress(self, console: &Console, steps: Option<u64>) -> Self {
        let console = console.clone();
        self.sink(move |_| Ok(Box::new(Progress::new(console, steps))))
    }

    /// Also writes to a [sink](Sink) of one's own, which `open` makes from the run's directory, on rank 0 alone.
    pub fn sink(mut self, open: impl FnOnce(&Path) -> io::Result<Box<dyn Sink>> + Send + 'static) -> Self {
        self.sinks.push(Box::new(open));
        self
    }

    /// The training continues at `step`. What this attempt records replaces what earlier attempts recorded at that
    /// step and at later ones.
    ///
    /// Without this, the run continues a record whose last attempt was not finished, from the first step that is logged. A record
    /// that was finished is refused.
    #[doc(alias = "purge_step")]
    pub fn resume_at(mut self, step: u64) -> Self {
        self.resume_at = Some(step);
        self
    }

    /// How many records may wait for the sinks: 65,536 unless set. What is logged beyond them, or beyond 64 MiB, is dropped and
    /// counted: the training never waits.
    #[doc(alias = "max_queue")]
    pub fn queue(mut self, records: usize) -> Self {
        self.queue = records;
        self
    }

    /// The time between two writes of the sinks: 0.2 s unless set. Less than 1 ms counts as 1 ms. A process that is killed loses what it has recorded in this
    /// time.
    #[doc(alias = "flush_secs")]
    pub fn flush_interval(mut self, interval: Duration) -> Self {
        self.flush_interval = interval.max(MIN_FLUSH_INTERVAL);
        self
    }

    /// How long [`finish`](crate::Run::finish) and dropping wait for the sinks: 30 s unless set.
    pub fn finish_timeout(mut self, timeout: Duration) -> Self {
        self.finish_timeout = timeout;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_that_writes_sleeps_between_two_writes() {
        let of = |interval| RunOptions::new("run").flush_interval(interval).flush_interval;
        assert_eq!(of(Duration::ZERO), MIN_FLUSH_INTERVAL);
        assert_eq!(of(Duration::from_secs(2)), Duration::from_secs(2));
    }
}
