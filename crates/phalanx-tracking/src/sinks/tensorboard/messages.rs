//! The parts that are written of TensorFlow's and TensorBoard's messages, by their names in `event.proto`, `summary.proto`,
//! `tensor.proto` and the plugin `hparams`.

use std::collections::BTreeMap;

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub what: Option<What>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
    #[prost(oneof = "Content", tags = "2, 4, 5, 8")]
    pub content: Option<Content>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Content {
    #[prost(float, tag = "2")]
    Simple(f32),
    #[prost(message, tag = "4")]
    Image(Image),
    #[prost(message, tag = "5")]
    Histogram(HistogramProto),
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(message, optional, tag = "1")]
    pub plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub plugin_name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub content: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Image {
    #[prost(int32, tag = "1")]
    pub height: i32,
    #[prost(int32, tag = "2")]
    pub width: i32,
    /// The number of channels.
    #[prost(int32, tag = "3")]
    pub colorspace: i32,
    #[prost(bytes = "vec", tag = "4")]
    pub encoded_image_string: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HistogramProto {
    #[prost(double, tag = "1")]
    pub min: f64,
    #[prost(double, tag = "2")]
    pub max: f64,
    #[prost(double, tag = "3")]
    pub num: f64,
    #[prost(double, tag = "4")]
    pub sum: f64,
    #[prost(double, tag = "5")]
    pub sum_squares: f64,
    #[prost(double, repeated, tag = "6")]
    pub bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub tensor_shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<TensorShapeDim>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShapeDim {
    #[prost(int64, tag = "1")]
    pub size: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HParams {
    #[prost(int32, tag = "1")]
    pub version: i32,
    #[prost(oneof = "HParamsContent", tags = "3, 4")]
    pub content: Option<HParamsContent>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum HParamsContent {
    #[prost(message, tag = "3")]
    SessionStart(SessionStart),
    #[prost(message, tag = "4")]
    SessionEnd(SessionEnd),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionStart {
    #[prost(btree_map = "string, message", tag = "1")]
    pub hparams: BTreeMap<String, Setting>,
    #[prost(double, tag = "5")]
    pub start_time_secs: f64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionEnd {
    #[prost(int32, tag = "1")]
    pub status: i32,
    #[prost(double, tag = "2")]
    pub end_time_secs: f64,
}

impl SessionEnd {
    pub const UNKNOWN: i32 = 0;
    pub const SUCCESS: i32 = 1;
    pub const FAILURE: i32 = 2;
}

/// `google.protobuf.Value`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Setting {
    #[prost(oneof = "SettingKind", tags = "2, 3, 4")]
    pub kind: Option<SettingKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum SettingKind {
    #[prost(double, tag = "2")]
    Number(f64),
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(bool, tag = "4")]
    Flag(bool),
}
