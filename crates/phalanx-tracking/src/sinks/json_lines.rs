//! `metrics.jsonl`.

use std::collections::HashMap;
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
/// The second picture of one tag at one step is `media/digits-00000007-2.png`, and so on.
///
/// JSON has no number for NaN and the infinities: they are the texts `NaN`, `Infinity` and `-Infinity`, which Python's `float`
/// and Rust's `parse` read. What a later attempt supersedes goes to `superseded.jsonl`.
pub struct JsonLines {
    file: AppendFile,
    directory: PathBuf,
    /// The last picture of each tag.
    pictures: HashMap<String, Numbered>,
    /// What the pictures since the last flush have replaced there: they come again after an error.
    replaced: Vec<(String, Option<Numbered>)>,
}

/// The step of a picture, and its number among those of one tag and step, from 1 on.
#[derive(Clone, Copy)]
struct Numbered {
    step: Option<u64>,
    number: u64,
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
        let (pictures, replaced) = Default::default();
        Ok(Self { file, directory: directory.to_owned(), pictures, replaced })
    }

    /// What has come since the last flush comes again.
    fn forget(&mut self) {
        self.file.buffer().clear();
        while let Some((tag, before)) = self.replaced.pop() {
            match before {
                Some(before) => self.pictures.insert(tag, before),
                None => self.pictures.remove(&tag),
            };
        }
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
    fn save(&mut self, record: &Record, picture: &Picture) -> io::Result<String> {
        self.file.check_name()?;
        let before = self.pictures.get(&record.tag).copied();
        let number = before.filter(|before| before.step == record.step).map_or(1, |before| before.number + 1);
        self.pictures.insert(record.tag.clone(), Numbered { step: record.step, number });
        self.replaced.push((record.tag.clone(), before));
        let number = if number == 1 { String::new() } else { format!("-{number}") };
        let (tag, step) = (file_name(&record.tag), record.step.unwrap_or_default());
        let name = format!("media/{tag}-{step:08}{number}.png");
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
        self.file.retain_lines(&self.directory.join("superseded.jsonl"), &[], |line| {
            // What is no line of ours goes aside too.
            serde_json::from_slice(line).is_ok_and(|Step { step: at }| at.is_none_or(|at| at < step))
        })
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        self.add(record).inspect_err(|_| self.forget())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush().inspect_err(|_| self.forget())?;
        self.replaced.clear();
        Ok(())
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
    fn pictures_of_one_tag_and_step_have_files_of_their_own_also_if_they_come_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut sink = JsonLines::open(folder.path()).unwrap();
        let record = |step, tag: &str| {
            let picture = Picture::gray(1, 1, vec![7]).unwrap();
            Record { step: Some(step), time: 0.0, tag: tag.to_owned(), value: Value::Picture(picture) }
        };
        for again in [true, false] {
            // Those of another tag may count something else, such as epochs.
            for (step, tag) in [(7, "digits"), (2, "letters"), (7, "digits")] {
                sink.write(&record(step, tag)).unwrap();
            }
            if again {
                sink.forget();
            }
        }
        sink.flush().unwrap();
        sink.write(&record(7, "digits")).unwrap();
        sink.write(&record(8, "digits")).unwrap();
        sink.flush().unwrap();
        let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
        let pictures: Vec<String> = lines.map(|line| line["picture"].as_str().unwrap().to_owned()).collect();
        let expected = ["digits-00000007", "letters-00000002", "digits-00000007-2", "digits-00000007-3"];
        let expected = expected.iter().chain(&["digits-00000008"]).map(|name| format!("media/{name}.png"));
        assert_eq!(pictures, expected.collect::<Vec<_>>());
        assert_eq!(std::fs::read_dir(folder.path().join("media")).unwrap().count(), 5);
    }

    #[test]
    fn pictures_of_a_run_whose_directory_was_made_again_take_no_other_s_place() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("run");
        let opened = || {
            std::fs::create_dir(&folder).unwrap();
            JsonLines::open(&folder).unwrap()
        };
        let record = |pixel| {
            let picture = Picture::gray(1, 1, vec![pixel]).unwrap();
            Record { step: Some(7), time: 0.0, tag: "digits".to_owned(), value: Value::Picture(picture) }
        };
        let mut first = opened();
        std::fs::remove_dir_all(&folder).unwrap();
        let mut second = opened();
        second.write(&record(1)).unwrap();
        let picture = || std::fs::read(folder.join("media/digits-00000007.png")).unwrap();
        let before = picture();
        let error = first.write(&record(2)).unwrap_err().to_string();
        assert!(error.contains("was removed while this run was open"), "{error}");
        assert_eq!(picture(), before);
    }

    #[test]
    fn tags_make_file_names_that_stay_in_their_folder() {
        assert_eq!(file_name("valid/digits 7"), "valid%2fdigits%207");
        assert_eq!(file_name("../x"), "..%2fx");
        let [a, b] = ["a", "b"].map(|end| file_name(&format!("{}{end}", "ä".repeat(500))));
        assert!(a != b && a.len() < 200, "{a}");
    }
}
