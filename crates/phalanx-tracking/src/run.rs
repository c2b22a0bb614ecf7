//! The record of a training run, as the training sees it.

use std::collections::HashSet;
use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::env::LaunchEnv;
use phalanx::reducer::StepTime;
use phalanx::{Caller, Error, ProcessGroup, Rank, Result, warn};
use serde::Serialize;

use crate::options::RunOptions;
use crate::queue::Queue;
use crate::record;
use crate::state::{RunState, StateFile};
use crate::system::{Figures, Sampler};
use crate::writer::{Output, Report, Resume, Writer};
use crate::{Histogram, Picture, Record, Traffic, Value, now};

/// How long the other ranks wait until rank 0 has opened the record: a slow disk is no failure of the group.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The record of a training run.
///
/// Every rank has one and makes the same calls; rank 0 alone records. What only logs costs the other ranks a branch: nothing is
/// allocated, sent or opened there. [`log_mean`](Self::log_mean), [`log_means`](Self::log_means) and
/// [`log_system`](Self::log_system) are collectives: every rank calls them, at the same steps.
///
/// On rank 0 a call puts a record into a queue and returns. It never waits for a disk: where the queue is full, the record is
/// dropped and counted. A thread writes, and its errors are warnings, once for each sink: a record must not end the training that
/// it observes. [`finish`](Self::finish) says what was lost.
///
/// ```
/// use phalanx_tracking::{Run, RunOptions};
/// # let folder = tempfile::tempdir().unwrap();
/// # let directory = folder.path().join("run");
/// let group = phalanx::init()?;
/// let run = Run::start(&group, RunOptions::new(&directory).tensorboard().json_lines())?;
/// for step in 0..100u32 {
///     let loss = 1.0 / f64::from(step + 1); // of this rank's part of the batch
///     run.log_mean(step.into(), "loss", loss)?;
/// }
/// let report = run.finish()?;
/// assert!(report.is_complete());
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias("SummaryWriter", "wandb", "GeneralTracker"))]
pub struct Run {
    group: ProcessGroup,
    /// On rank 0 alone.
    recorder: Option<Recorder>,
    sampler: Mutex<Sampler>,
}

struct Recorder {
    queue: Arc<Queue>,
    /// Behind a lock so that several threads may log.
    ended: Mutex<Receiver<(Report, Result<()>)>>,
    finish_timeout: Duration,
    /// The tags of which a rank's value that is not finite was said.
    told: Mutex<HashSet<String>>,
}

/// How a run has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// [`Run::finish`] was called.
    Finished,
    /// It has failed, because of this.
    Failed(String),
    /// It was dropped without a word.
    Dropped,
}

impl Run {
    /// Opens the record on rank 0, on all ranks' behalf. A collective.
    ///
    /// If the directory has the record of a run that was not finished, because it failed, was killed or is being started again
    /// by its launcher, the run continues that record: see [`RunOptions::resume_at`]. If another process is writing the record, this
    /// waits for it, 10 s at most; if that process is on another host, and a network file system has the directory, 2 minutes: so long may the file
    /// system keep the lock of a host that was lost. The other ranks wait for rank 0 10 minutes, or for the group's time-out, if that is longer.
    ///
    /// From then on rank 0's process ignores SIGXFSZ, as [`ProcessGroup::join`] says.
    ///
    /// # Errors
    /// On every rank, if rank 0 cannot open the record or one of its sinks; if another process writes it; if it is of a run that
    /// was finished and no step to resume at is given.
    #[doc(alias = "init_trackers")]
    pub fn start(group: &ProcessGroup, options: RunOptions) -> Result<Self> {
        let _section = group.announce_section();
        let opened = group.rank().is_main().then(|| Recorder::open(group, options));
        let cause = opened.as_ref().map(|opened| opened.as_ref().err().map(ToString::to_string));
        let patient = group.with_timeout(group.timeout().max(OPEN_TIMEOUT)).in_call(Caller::RunStart);
        let told: Result<Option<String>> = patient.broadcast_object(cause.as_ref(), Rank::MAIN);
        let recorder = match (opened, told) {
            (Some(Ok(recorder)), Err(error)) => {
                // Else its thread would keep the record for as long as the process lives, also from the next round of an elastic job.
                if let Err(unwritten) = recorder.end(Outcome::Failed(error.to_string())) {
                    warn(unwritten);
                }
                return Err(error);
            }
            (Some(opened), _) => Some(opened?),
            (None, told) => match told? {
                None => None,
                Some(cause) => {
                    return Err(Error::aborted(format!("rank 0 has not opened the record: {cause}")));
                }
            },
        };
        Ok(Self { group: group.clone(), recorder, sampler: Mutex::new(Sampler::new()) })
    }

    /// Whether this is the rank that records. Call it before you compute values for the record alone.
    pub fn is_recording(&self) -> bool {
        self.recorder.is_some()
    }

    /// Records rank 0's `value`, which may be NaN or infinite: that is recorded too, and said once.
    #[doc(alias("add_scalar", "log_metric"))]
    pub fn log(&self, step: u64, tag: &str, value: impl Into<f64>) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Some(step), tag, Value::Scalar(value.into()));
        }
    }

    /// Records the distribution of rank 0's `values`. Those that are NaN or infinite are in no bin, and said once.
    #[doc(alias = "add_histogram")]
    pub fn log_histogram<T: Copy + Into<f64>>(&self, step: u64, tag: &str, values: &[T]) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Some(step), tag, Value::Histogram(Histogram::of(values)));
        }
    }

    /// Records a picture, which is made on rank 0 alone.
    ///
    /// # Errors
    /// Those of `picture`.
    #[doc(alias = "add_image")]
    pub fn log_picture(&self, step: u64, tag: &str, picture: impl FnOnce() -> Result<Picture>) -> Result<()> {
        if let Some(recorder) = &self.recorder {
            recorder.push(Some(step), tag, Value::Picture(picture()?));
        }
        Ok(())
    }

    /// Records rank 0's text; TensorBoard shows it as Markdown.
    #[doc(alias = "add_text")]
    pub fn log_text(&self, step: u64, tag: &str, text: &str) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Some(step), tag, Value::Text(text.to_owned()));
        }
    }

    /// Records the settings of the run: a struct or map that serde can write. Those of inner structs get names such as
    /// `optimizer.learning_rate`. An `Option` without a value is recorded as `none`. So are NaN and the infinities, which JSON
    /// does not have: record them as text.
    ///
    /// # Errors
    /// On every rank, if serde cannot write them.
    #[doc(alias("add_hparams", "wandb.config"))]
    pub fn log_hyperparameters(&self, settings: &impl Serialize) -> Result<()> {
        let settings = serde_json::to_value(settings).map_err(|error| {
            Error::invalid_argument("the hyperparameters cannot be written")
                .with_source(error)
                .with_remedy("give a struct, or a map whose keys are texts")
        })?;
        if let Some(recorder) = &self.recorder {
            let settings = record::hyperparameters(settings);
            recorder.push(None, "hyperparameters", Value::Hyperparameters(settings));
        }
        Ok(())
    }

    /// Records the mean of all ranks' `value`s, and gives it to every rank. A collective.
    ///
    /// # Errors
    /// Those of [`all_gather`](ProcessGroup::all_gather). On every rank, if the ranks log different tags, or log at different steps.
    pub fn log_mean(&self, step: u64, tag: &str, value: impl Into<f64>) -> Result<f64> {
        let means = self.log_means(step, 1.0, &[(tag, value.into())])?;
        Ok(means.first().copied().unwrap_or(f64::NAN))
    }

    /// Records the means of several values over all ranks, in which each rank counts by its `weight`, such as the number of its
    /// samples; gives the means to every rank. A collective: one message for all values.
    ///
    /// If no rank has a weight, the means are NaN. Which rank's value is NaN or infinite is said once for each tag.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let run = phalanx_tracking::Run::start(&phalanx::init()?, phalanx_tracking::RunOptions::new(folder.path()))?;
    /// # let (correct, samples, loss) = (9, 10, 0.5);
    /// let own = [("valid/accuracy", f64::from(correct) / f64::from(samples)), ("valid/loss", loss)];
    /// let means = run.log_means(7, samples.into(), &own)?;
    /// # assert_eq!(means, [0.9, 0.5]);
    /// # run.finish()?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`all_gather`](ProcessGroup::all_gather). On every rank, if the ranks log different tags, or log at different steps, or a weight is negative, NaN
    /// or infinite.
    pub fn log_means(&self, step: u64, weight: f64, values: &[(&str, f64)]) -> Result<Vec<f64>> {
        let mut hasher = DefaultHasher::new();
        values.iter().for_each(|(tag, _)| tag.hash(&mut hasher));
        let own: Vec<f64> = [f64::from_bits(hasher.finish()), f64::from_bits(step), weight]
            .into_iter()
            .chain(values.iter().map(|(_, value)| *value))
            .collect();
        let mut all = vec![0.0; own.len() * self.group.world_size().count()];
        self.group.in_call(Caller::RunLogMean).all_gather(&own, &mut all)?;
        let ranks: Vec<(&[f64], Rank)> = all.chunks(own.len()).zip(self.group.world_size().ranks()).collect();
        check(&ranks)?;
        let means = mean(&ranks);
        if let Some(recorder) = &self.recorder {
            for (place, ((tag, _), mean)) in values.iter().zip(&means).enumerate() {
                recorder.tell_culprit(step, tag, &ranks, VALUES + place);
                recorder.push(Some(step), tag, Value::Scalar(*mean));
            }
        }
        Ok(means)
    }

    /// Records what every rank uses of its machine, and what it has sent: processor time since the last such call (100 % is one
    /// processor), memory now and at its peak, and `traffic`. A collective: call it each hundred steps or so. The figures of a rank are recorded at the
    /// step that the rank gives.
    ///
    /// The tags are `system/cpu_percent/rank0`, `system/memory_bytes/rank0`, `system/peak_memory_bytes/rank0`,
    /// `system/bytes_sent/rank0` and `system/communication_hidden/rank0`, and so on for each rank; what is not known is left out.
    ///
    /// # Errors
    /// Those of [`gather_object`](ProcessGroup::gather_object).
    pub fn log_system(&self, step: u64, traffic: Traffic) -> Result<()> {
        let own = (step, self.sampler.lock().look(traffic));
        let all = self.group.in_call(Caller::RunLogSystem).gather_object(&own, Rank::MAIN)?;
        if let (Some(recorder), Some(all)) = (&self.recorder, all) {
            let all: Vec<(u64, Figures)> = all;
            for (rank, (step, figures)) in all.iter().enumerate() {
                for (name, value) in figures.named() {
                    recorder.push(Some(*step), &format!("system/{name}/rank{rank}"), Value::Scalar(value));
                }
            }
        }
        Ok(())
    }

    /// Records how long a step takes on each rank: `Ddp::step_times` of `phalanx-burn`, or
    /// [`Reducer::step_times`](phalanx::reducer::Reducer::step_times). No collective: rank 0 has the times of all ranks.
    ///
    /// The tags are `system/step_seconds/rank0`, what the rank itself takes, and `system/wait_seconds/rank0`, how long it then
    /// waits for others, and so on for each rank. Nothing is recorded until the ranks have told each other.
    pub fn log_step_times(&self, step: u64, times: &[StepTime]) {
        for (rank, time) in times.iter().enumerate() {
            self.log(step, &format!("system/step_seconds/rank{rank}"), time.own.as_secs_f64());
            self.log(step, &format!("system/wait_seconds/rank{rank}"), time.wait.as_secs_f64());
        }
    }

    /// Waits until everything that was logged so far is written: before a checkpoint, so that a process that is killed behind it
    /// leaves a record which is not behind the checkpoint. Other ranks return at once.
    ///
    /// It waits at most [`RunOptions::finish_timeout`], and says so then. What a sink cannot write, because its disk is full,
    /// stays with it, and is not waited for.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let options = phalanx_tracking::RunOptions::new(folder.path()).json_lines();
    /// # let run = phalanx_tracking::Run::start(&phalanx::init()?, options)?;
    /// run.log(7, "loss", 0.5);
    /// run.flush();
    /// assert!(std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap().contains("loss"));
    /// # run.finish()?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    #[doc(alias = "SummaryWriter.flush")]
    pub fn flush(&self) {
        let Some(recorder) = &self.recorder else { return };
        if !recorder.queue.wait_until_written(recorder.finish_timeout) {
            warn(format_args!(
                "the record's sinks have not written everything within {} s; the training goes on",
                recorder.finish_timeout.as_secs_f64()
            ));
        }
    }

    /// The run has succeeded: waits until everything is written, closes the record, and says what is in it. Other ranks
    /// return at once, with an empty report.
    ///
    /// # Errors
    /// If the sinks take longer than [`RunOptions::finish_timeout`]; if `run.json` cannot be written, which then says that
    /// the run has died. What a sink could not write is no error but in the report, and is said as a warning.
    #[doc(alias("wandb.finish", "end_training"))]
    pub fn finish(mut self) -> Result<Report> {
        match self.recorder.take() {
            Some(recorder) => recorder.end(Outcome::Finished),
            None => Ok(Report::default()),
        }
    }

    /// The run has failed: as [`finish`](Self::finish), but the record is marked as failed, because of `cause`.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn fail(mut self, cause: impl Display) -> Result<Report> {
        match self.recorder.take() {
            Some(recorder) => recorder.end(Outcome::Failed(cause.to_string())),
            None => Ok(Report::default()),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Some(recorder) = self.recorder.take() else { return };
        // Before it waits for a disk.
        self.group.note_panic();
        let outcome = if thread::panicking() {
            Outcome::Failed("rank 0 panicked".to_owned())
        } else if let Some(cause) = self.group.watched_failure() {
            Outcome::Failed(cause.to_string())
        } else {
            warn(
                "a run was dropped without finish() or fail(): what was logged is written, and the record is marked as \
                 dropped; call finish() when the training has ended",
            );
            Outcome::Dropped
        };
        if let Err(error) = recorder.end(outcome) {
            warn(error);
        }
    }
}

impl Recorder {
    fn open(group: &ProcessGroup, options: RunOptions) -> Result<Self> {
        let RunOptions { directory, sinks, resume_at, queue, flush_interval, finish_timeout } = options;
        let mut state = StateFile::take(&directory)?;
        let resume = match (state.earlier(), resume_at) {
            (_, Some(step)) => Resume::At(step),
            (None, None) => Resume::Nothing,
            (Some(RunState::Finished), None) => return Err(finished(&directory)),
            (Some(_), None) => Resume::AtFirstStep,
        };
        let open = |open: crate::options::OpenSink| {
            let sink = open(&directory).map_err(|error| {
                Error::aborted(format!("a sink of the record {} cannot be opened", directory.display()))
                    .with_source(error)
                    .with_remedy("remove what is in its way, take another directory, or leave this sink out")
            })?;
            Ok(Output::new(sink, resume))
        };
        let outputs = sinks.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        let launched = LaunchEnv::from_process().ok().flatten();
        state.begin(group.world_size().get(), launched.map_or(0, |launched| launched.restart_count.0))?;
        let queue = Arc::new(Queue::new(queue));
        let (send, ended) = channel();
        let writer = Writer { queue: queue.clone(), state, outputs, resume, pause: flush_interval };
        thread::Builder::new()
            .name("phalanx-record".to_owned())
            .spawn(move || {
                // Nobody listens if it has taken too long.
                let _ = send.send(writer.run());
            })
            .map_err(|error| {
                Error::not_started("the thread that writes the record was not started", error)
            })?;
        Ok(Self { queue, ended: Mutex::new(ended), finish_timeout, told: Mutex::default() })
    }

    fn push(&self, step: Option<u64>, tag: &str, value: Value) {
        let is_first_without_room =
            self.queue.push(Record { step, time: now(), tag: record::tag(tag), value });
        if is_first_without_room {
            warn(
                "the record's sinks are slower than the training: what finds no room in the queue is dropped, and counted; log \
                 less often, or give RunOptions::queue more room",
            );
        }
    }

    /// Names the first rank whose value spoils a mean; the writer says that the mean itself is not finite.
    fn tell_culprit(&self, step: u64, tag: &str, ranks: &[(&[f64], Rank)], place: usize) {
        let is_spoilt = |(values, _): &&(&[f64], Rank)| values[WEIGHT] > 0.0 && !values[place].is_finite();
        if let Some((values, rank)) = ranks.iter().find(is_spoilt)
            && self.told.lock().insert(tag.to_owned())
        {
            warn(format_args!(
                "{tag} is {} on rank {rank} at step {step}; it will not be said again",
                values[place]
            ));
        }
    }

    fn end(self, outcome: Outcome) -> Result<Report> {
        self.queue.close(outcome);
        let (report, state) =
            self.ended.into_inner().recv_timeout(self.finish_timeout).map_err(|error| match error {
                RecvTimeoutError::Timeout => Error::timeout(format!(
                    "the record's sinks have not written everything within {} s",
                    self.finish_timeout.as_secs_f64()
                ))
                .with_remedy("is the disk slow? Allow more time with RunOptions::finish_timeout"),
                RecvTimeoutError::Disconnected => {
                    Error::panicked("the thread that writes the record has panicked")
                }
            })?;
        if !report.is_complete() {
            warn(format_args!("the record is not complete: {report}"));
        }
        state.map(|()| report)
    }
}

fn finished(directory: &Path) -> Error {
    Error::invalid_argument(format!("{} has the record of a run that was finished", directory.display()))
        .with_remedy("take another directory, or say with RunOptions::resume_at at which step it goes on")
}

/// What a rank says in front of its values. First which tags they are and at which step, as bits, which the ranks compare.
const TAGS: usize = 0;
const STEP: usize = 1;
/// By how much it counts.
const WEIGHT: usize = 2;
/// From here on they are its values.
const VALUES: usize = 3;

/// Checks that all ranks log the same tags at the same step, with weights that can be added. All find the same.
fn check(ranks: &[(&[f64], Rank)]) -> Result<()> {
    for (values, rank) in ranks {
        let [own, first] = [*values, ranks[0].0].map(|values| [values[TAGS], values[STEP]].map(f64::to_bits));
        if own[TAGS] != first[TAGS] {
            return Err(Error::mismatch(format!("rank {rank} logs other tags than rank 0"))
                .with_remedy("log the same tags in the same order on every rank"));
        }
        if own[STEP] != first[STEP] {
            return Err(Error::mismatch(format!(
                "rank {rank} logs a mean at step {}, and rank 0 at step {}",
                own[STEP], first[STEP]
            ))
            .with_remedy("log it after the same step on every rank"));
        }
        if !(values[WEIGHT].is_finite() && values[WEIGHT] >= 0.0) {
            return Err(Error::invalid_argument(format!(
                "rank {rank} logs means with the weight {}",
                values[WEIGHT]
            ))
            .with_remedy("a weight is a number of samples: 0 or more"));
        }
    }
    Ok(())
}

/// The means of all ranks' values, added up by rank, so that all have the same bits.
fn mean(ranks: &[(&[f64], Rank)]) -> Vec<f64> {
    let total: f64 = ranks.iter().map(|(values, _)| values[WEIGHT]).sum();
    // What a rank without samples brings is not looked at: it may be 0 / 0.
    let counted = || ranks.iter().map(|(values, _)| values).filter(|values| values[WEIGHT] > 0.0);
    let places = VALUES..ranks.first().map_or(VALUES, |(values, _)| values.len());
    places.map(|place| counted().map(|values| values[WEIGHT] * values[place]).sum::<f64>() / total).collect()
}
