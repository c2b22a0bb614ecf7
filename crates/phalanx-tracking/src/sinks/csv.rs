//! `metrics.csv`.

use std::io;
use std::path::{Path, PathBuf};

use csv::WriterBuilder;

use super::append_file::AppendFile;
use super::{Sink, non_finite};
use crate::{Outcome, Record, Value};

const HEADER: &str = "step,time,tag,value\n";

/// `metrics.csv`: a line for each scalar, with step, time in seconds since 1970, tag and value. Other kinds of records are left out.
///
/// A column for each tag would have to know all tags before the first line; `pandas.read_csv(..).pivot_table(index="step",
/// columns="tag", values="value")` makes them. NaN and the infinities are `NaN`, `Infinity` and `-Infinity`. What a later attempt
/// supersedes goes to `superseded.csv`, below the same header.
pub struct Csv {
    file: AppendFile,
    directory: PathBuf,
}

impl Csv {
    /// In this directory.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let file = AppendFile::open_lines(directory.join("metrics.csv"))?;
        Ok(Self { file, directory: directory.to_owned() })
    }
}

impl Sink for Csv {
    fn name(&self) -> &str {
        "metrics.csv"
    }

    fn resume(&mut self, step: u64) -> io::Result<()> {
        self.file.retain_lines(&self.directory.join("superseded.csv"), HEADER.as_bytes(), |line| {
            let at = line.split(|byte| *byte == b',').next().and_then(|at| std::str::from_utf8(at).ok());
            line == HEADER.as_bytes() || at.and_then(|at| at.parse().ok()).is_some_and(|at: u64| at < step)
        })
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        let (Value::Scalar(value), Some(step)) = (&record.value, record.step) else { return Ok(()) };
        // It is asked for the first record of a flush alone.
        if self.file.is_empty()? {
            self.file.buffer().extend_from_slice(HEADER.as_bytes());
        }
        let value = if value.is_finite() { value.to_string() } else { non_finite(*value).to_owned() };
        // Tags are one line, so that every record is.
        let mut line = WriterBuilder::new().from_writer(self.file.buffer());
        line.write_record([&step.to_string(), &record.time.to_string(), &record.tag, &value])?;
        line.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn finish(&mut self, _outcome: &Outcome) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_superseded_stands_below_a_header_too() {
        let folder = tempfile::tempdir().unwrap();
        let mut sink = Csv::open(folder.path()).unwrap();
        for step in 0..3 {
            let value = Value::Scalar(0.5);
            sink.write(&Record { step: Some(step), time: 0.0, tag: "loss".to_owned(), value }).unwrap();
        }
        sink.flush().unwrap();
        for step in [2, 1] {
            sink.resume(step).unwrap();
        }
        let read = |name| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read("superseded.csv"), format!("{HEADER}2,0,loss,0.5\n1,0,loss,0.5\n"));
        assert_eq!(read("metrics.csv"), format!("{HEADER}0,0,loss,0.5\n"));
    }
}
