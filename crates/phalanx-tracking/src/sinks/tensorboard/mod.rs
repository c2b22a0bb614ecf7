//! TensorBoard's event files.
//!
//! An event file is a list of [records](frame), each of which is a [message](messages): the format of TensorFlow's
//! `tf.summary` and of PyTorch's `SummaryWriter`.
//!
//! The messages are declared here in Rust, for prost. Other crates that write event files were weighed. tensorboard-rs
//! panics where a disk is full, in its thread and then in the caller's, and writes neither texts nor hyperparameters;
//! tboard needs protoc to be built; tfrecord has prost-build and an HTTP client among its build dependencies; and all
//! three ask for protobuf 2 or prost 0.12.

mod frame;
mod messages;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use prost::Message;

use self::messages::{
    Content, Event, HParams, HParamsContent, HistogramProto, Image, Metadata, PluginData, SessionEnd,
    SessionLog, SessionStart, Setting, SettingKind, Summary, SummaryValue, Tensor, TensorShape,
    TensorShapeDim, What,
};
use super::Sink;
use super::append_file::AppendFile;
use crate::{Histogram, Hyperparameter, Outcome, Picture, Record, Value, now};

/// The version of the format, which readers ask for before they honour a [`SessionLog`].
const FILE_VERSION: &str = "brain.Event:2";
/// What TensorFlow calls texts.
const DT_STRING: i32 = 7;
/// A session that begins anew, at a step: what files before it have from there on no longer counts.
const SESSION_START: i32 = 1;

/// Event files, which `tensorboard --logdir` shows. Each attempt writes one of its own, in the run's directory.
///
/// An attempt that goes on after another begins with a session's start at its first step: TensorBoard then leaves out what earlier
/// files have from that step on (`purge_step` in PyTorch's `SummaryWriter`). TensorBoard keeps scalars as f32. Hyperparameters
/// have their page, HPARAMS, where the run counts as running, succeeded or failed.
pub struct TensorBoard {
    file: AppendFile,
    has_hyperparameters: bool,
}

impl TensorBoard {
    /// A new file in this directory.
    ///
    /// # Errors
    /// If it cannot be made or written.
    pub fn open(directory: &Path) -> io::Result<Self> {
        // TensorBoard reads files by name, so a later one has a later second.
        let mut second = now() as u64;
        for entry in std::fs::read_dir(directory)? {
            let name = entry?.file_name();
            let written = name.to_str().and_then(|name| name.strip_prefix("events.out.tfevents."));
            let written = written.and_then(|rest| rest.split('.').next()?.parse::<u64>().ok());
            second = second.max(written.map_or(0, |written| written.saturating_add(1)));
        }
        let name =
            format!("events.out.tfevents.{second:010}.{}.{}.0", phalanx::host_name(), std::process::id());
        let mut sink = Self { file: AppendFile::open(directory.join(name))?, has_hyperparameters: false };
        sink.add(now(), 0, What::FileVersion(FILE_VERSION.to_owned()));
        sink.file.flush()?;
        Ok(sink)
    }

    fn add(&mut self, time: f64, step: u64, what: What) {
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event = Event { wall_time: time, step, what: Some(what) };
        frame::write(self.file.buffer(), &event.encode_to_vec());
    }

    fn add_value(&mut self, time: f64, step: u64, value: SummaryValue) {
        self.add(time, step, What::Summary(Summary { value: vec![value] }));
    }

    fn add_hyperparameters(&mut self, content: HParamsContent) {
        let tag = match content {
            HParamsContent::SessionStart(_) => "_hparams_/session_start_info",
            HParamsContent::SessionEnd(_) => "_hparams_/session_end_info",
        };
        let data = HParams { version: 0, content: Some(content) }.encode_to_vec();
        let metadata = Some(Metadata::of("hparams", data));
        self.add_value(now(), 0, SummaryValue { tag: tag.to_owned(), metadata, content: None });
    }
}

impl Sink for TensorBoard {
    fn name(&self) -> &str {
        "TensorBoard's event file"
    }

    fn resume(&mut self, step: u64) -> io::Result<()> {
        self.add(now(), step, What::SessionLog(SessionLog { status: SESSION_START }));
        Ok(())
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        let content = match &record.value {
            Value::Scalar(value) => Content::Simple(*value as f32),
            Value::Histogram(histogram) => Content::Histogram(bins(histogram)),
            Value::Picture(picture) => {
                Content::Image(image(picture).inspect_err(|_| self.file.buffer().clear())?)
            }
            Value::Text(text) => Content::Tensor(tensor(text)),
            Value::Hyperparameters(settings) => {
                self.has_hyperparameters = true;
                let hparams = settings.iter().map(|(name, value)| (name.clone(), setting(value)));
                self.add_hyperparameters(HParamsContent::SessionStart(SessionStart {
                    hparams: hparams.collect::<BTreeMap<_, _>>(),
                    start_time_secs: record.time,
                }));
                return Ok(());
            }
        };
        let is_text = matches!(content, Content::Tensor(_));
        let metadata = is_text.then(|| Metadata::of("text", Vec::new()));
        let value = SummaryValue { tag: record.tag.clone(), metadata, content: Some(content) };
        self.add_value(record.time, record.step.unwrap_or_default(), value);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn finish(&mut self, outcome: &Outcome) -> io::Result<()> {
        if self.has_hyperparameters {
            let status = match outcome {
                Outcome::Finished => SessionEnd::SUCCESS,
                Outcome::Failed(_) => SessionEnd::FAILURE,
                Outcome::Dropped => SessionEnd::UNKNOWN,
            };
            self.add_hyperparameters(HParamsContent::SessionEnd(SessionEnd { status, end_time_secs: now() }));
        }
        self.file.flush()
    }
}

fn bins(histogram: &Histogram) -> HistogramProto {
    HistogramProto {
        min: histogram.min,
        max: histogram.max,
        num: histogram.count() as f64,
        sum: histogram.sum,
        sum_squares: histogram.sum_of_squares,
        bucket_limit: histogram.limits.clone(),
        bucket: histogram.counts.iter().map(|count| *count as f64).collect(),
    }
}

fn image(picture: &Picture) -> io::Result<Image> {
    let size = |pixels: u32| i32::try_from(pixels).map_err(io::Error::other);
    Ok(Image {
        height: size(picture.height())?,
        width: size(picture.width())?,
        colorspace: picture.channels().into(),
        encoded_image_string: picture.png()?,
    })
}

fn tensor(text: &str) -> Tensor {
    let shape = TensorShape { dim: vec![TensorShapeDim { size: 1 }] };
    Tensor { dtype: DT_STRING, tensor_shape: Some(shape), string_val: vec![text.as_bytes().to_vec()] }
}

fn setting(value: &Hyperparameter) -> Setting {
    let kind = match value {
        Hyperparameter::Number(value) => SettingKind::Number(*value),
        Hyperparameter::Flag(flag) => SettingKind::Flag(*flag),
        Hyperparameter::Text(text) => SettingKind::Text(text.clone()),
    };
    Setting { kind: Some(kind) }
}

impl Metadata {
    fn of(plugin: &str, content: Vec<u8>) -> Self {
        Self { plugin_data: Some(PluginData { plugin_name: plugin.to_owned(), content }) }
    }
}
