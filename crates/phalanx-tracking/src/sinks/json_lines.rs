//! `metrics.jsonl`.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use phalanx_sys::open;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::append_file::AppendFile;
use super::{Sink, non_finite};
use crate::{Histogram, Hyperparameter, Outcome, Picture, Record, Value};

/// The longest name of a picture's file, without its step.
const MAX_NAME: usize = 150;

/// `metrics.jsonl`, an object a line:
///
/// ```json
/// {"step":7,"time":1767225600.5,"tag":"loss","value":0.25}
/// {"step":7,"time":1767225600.5,"tag":"norm","value":"NaN"}
/// {"step":7,"time":1767225600.5,"tag":"weights","histogram":{"min":-1.0,"max":1.0,"limits":[...],"counts":[...], ...}}
/// {"step":7,"time":1767225600.5,"tag":"digits","picture":"media/digits-00000007.png"}
/// {"step":7,"time":1767225600.5,"tag":"note","text":"the rate was lowered"}
/// {"step":null,"time":1767225600.5,"tag":"hyperparameters","hyperparameters":{"rate":0.001}}
/// ```
///
/// JSON has no number for NaN and the infinities: they are the texts `NaN`, `Infinity` and `-Infinity`, which Python's `float`
/// and Rust's `parse` read. What a later attempt supersedes goes to `superseded.jsonl`.
pub struct JsonLines {
    file: AppendFile,
    directory: PathBuf,
}

#[derive(Serialize)]
struct Line<'a> {
    step: Option<u64>,
    time: f64,
    tag: &'a str,
    #[serde(flatten)]
    content: Content<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Content<'a> {
    Value(Json),
    Histogram(Json),
    Picture(String),
    Text(&'a str),
    Hyperparameters(serde_json::Map<String, Json>),
}

/// What is looked at when an attempt goes on.
#[derive(Deserialize)]
struct Step {
    step: Option<u64>,
}

impl JsonLines {
    /// In this directory.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let file = AppendFile::open_lines(directory.join("metrics.jsonl"))?;
        Ok(Self { file, directory: directory.to_owned() })
    }

    fn add(&mut self, record: &Record) -> io::Result<()> {
        let content = match &record.value {
            Value::Scalar(value) => Content::Value(number(*value)),
            Value::Histogram(histogram) => Content::Histogram(described(histogram)),
            Value::Picture(picture) => Content::Picture(self.save(record, picture)?),
            Value::Text(text) => Content::Text(text),
            Value::Hyperparameters(settings) => Content::Hyperparameters(
                settings.iter().map(|(name, setting)| (name.clone(), setting_of(setting))).collect(),
            ),
        };
        let line = Line { step: record.step, time: record.time, tag: &record.tag, content };
        serde_json::to_writer(self.file.buffer(), &line)?;
        self.file.buffer().push(b'\n');
        Ok(())
    }

    /// Writes a picture's file; gives its path within the directory.
    fn save(&self, record: &Record, picture: &Picture) -> io::Result<String> {
        let name = format!("media/{}-{:08}.png", file_name(&record.tag), record.step.unwrap_or_default());
        std::fs::create_dir_all(self.directory.join("media"))?;
        let path = self.directory.join(&name);
        let png = picture.png()?;
        let mut file = open::regular(&path, File::options().write(true).create(true).truncate(true))?;
        file.write_all(&png).inspect_err(|_| {
            // Half a picture is none.
            let _ = std::fs::remove_file(&path);
        })?;
        Ok(name)
    }
}

impl Sink for JsonLines {
    fn name(&self) -> &str {
        "metrics.jsonl"
    }

    fn resume(&mut self, step: u64) -> io::Result<()> {
        self.file.retain_lines(&self.directory.join("superseded.jsonl"), |line| {
            // What is no line of ours goes aside too.
            serde_json::from_slice(line).is_ok_and(|Step { step: at }| at.is_none_or(|at| at < step))
        })
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        self.add(record).inspect_err(|_| self.file.buffer().clear())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn finish(&mut self, _outcome: &Outcome) -> io::Result<()> {
        Ok(())
    }
}

fn number(value: f64) -> Json {
    serde_json::Number::from_f64(value).map_or_else(|| non_finite(value).into(), Json::Number)
}

fn described(histogram: &Histogram) -> Json {
    let Histogram { min, max, sum, sum_of_squares, limits, counts, non_finite } = histogram;
    serde_json::json!({
        "min": number(*min), "max": number(*max), "sum": number(*sum), "sum_of_squares": number(*sum_of_squares),
        "limits": limits, "counts": counts, "non_finite": non_finite,
    })
}

fn setting_of(setting: &Hyperparameter) -> Json {
    match setting {
        Hyperparameter::Number(value) => number(*value),
        Hyperparameter::Flag(flag) => (*flag).into(),
        Hyperparameter::Text(text) => text.as_str().into(),
    }
}

/// A tag as the name of a file: other letters than these as `%` and their codes.
fn file_name(tag: &str) -> String {
    let mut name = String::new();
    for byte in tag.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' => name.push(byte.into()),
            other => name.push_str(&format!("%{other:02x}")),
        }
    }
    if name.len() > MAX_NAME {
        let checksum = crc32c::crc32c(tag.as_bytes());
        name = format!("{}~{checksum:08x}", &name[..MAX_NAME]);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_make_file_names_that_stay_in_their_folder() {
        assert_eq!(file_name("valid/digits 7"), "valid%2fdigits%207");
        assert_eq!(file_name("../x"), "..%2fx");
        let [a, b] = ["a", "b"].map(|end| file_name(&format!("{}{end}", "ä".repeat(500))));
        assert!(a != b && a.len() < 200, "{a}");
    }
}
