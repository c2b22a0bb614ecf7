//! Lines that are JSON each.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use phalanx::Result;
use serde::de::DeserializeOwned;

use super::record::{Record, as_it_was};
use super::{MAX_RECORD, bad, io_error, not_utf8, open_file, without_panic};
use crate::Dataset;
use crate::dataset::item;
use crate::worker::mix;

/// The lines of a file, each of them a value in JSON; empty lines are none. A line may have 64 MiB.
///
/// A file is UTF-8, with or without a byte order mark. A number is the nearest one of its field's type, as in Python; as a
/// `serde_json::Value` an integer that no `u64` or `i64` holds becomes the nearest `f64`. `NaN` and `Infinity`, which Python writes, are no
/// JSON, and an error. A file that was cut off where a line ends looks like a whole one: compare [`len`](Dataset::len) with what you
/// know.
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::JsonLinesDataset};
///
/// #[derive(serde::Deserialize)]
/// struct Mail {
///     text: String,
///     label: String,
/// }
///
/// let mails = JsonLinesDataset::<Mail>::open("train.jsonl")?;
/// println!("{}: {}", mails.get(17)?.label, mails.get(17)?.text);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct JsonLinesDataset<T> {
    path: PathBuf,
    file: File,
    /// Where each begins and ends, and the line's number.
    lines: Vec<(u64, u32, u64)>,
    _type: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> JsonLinesDataset<T> {
    /// The file at `path`. It is read through once, to find the lines; 24 bytes of memory are kept for each.
    ///
    /// # Errors
    /// If it cannot be read, or a line is too long.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let file = open_file(&path)?;
        let lines = lines(&path, BufReader::with_capacity(1 << 16, &file))?;
        Ok(Self { path, file, lines, _type: PhantomData })
    }
}

/// Finds the lines that are not empty.
fn lines(path: &Path, mut reader: impl BufRead) -> Result<Vec<(u64, u32, u64)>> {
    let beginning = reader.fill_buf().map_err(|error| io_error(path, &error))?;
    if let [0xff, 0xfe, ..] | [0xfe, 0xff, ..] = beginning {
        return Err(not_utf8(path, "line 1", beginning, &"a byte order mark"));
    }
    // A byte order mark is no part of the first line.
    let mark = if beginning.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    reader.consume(mark);
    let (mut lines, mut number, mut start) = (Vec::new(), 1_u64, mark as u64);
    let (mut length, mut blank) = (0_u64, true);
    loop {
        let piece = reader.fill_buf().map_err(|error| io_error(path, &error))?;
        let end = piece.iter().position(|byte| *byte == b'\n');
        let (line, taken) = end.map_or((piece, piece.len()), |end| (&piece[..end], end + 1));
        blank &= line.iter().all(u8::is_ascii_whitespace);
        length += line.len() as u64;
        if length > MAX_RECORD {
            let remedy = "are there line breaks? A line may have 64 MiB";
            return Err(bad(path, format_args!("line {number}"), "it is too long", remedy));
        }
        let (over, at_end) = (end.is_some(), taken == 0);
        reader.consume(taken);
        if !over && !at_end {
            continue;
        }
        if !blank {
            lines.push((start, length as u32, number));
        }
        if at_end {
            return Ok(lines);
        }
        (number, start, length, blank) = (number + 1, start + length + 1, 0, true);
    }
}

impl<T: DeserializeOwned> Dataset for JsonLinesDataset<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.lines.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        let (start, length, number) = *item(&self.lines, index)?;
        let record = Record::read(&self.path, &self.file, (start, length as usize), index)?;
        let Record { before, bytes: line, behind } = record;
        // In front of the first may be a byte order mark.
        let is_line = matches!(before, None | Some(b'\n')) || (number == 1 && before == Some(0xbf));
        let ends = matches!(behind, None | Some(b'\n')) && !line.contains(&b'\n');
        as_it_was(&self.path, index, is_line && ends)?;
        let read = || {
            serde_json::from_slice(&line).map_err(|error| {
                // Its own line is always the first.
                let column = error.column();
                let place = format_args!("line {number}, column {column}");
                bad(&self.path, place, cause(&line, &error), "mend the line, or the type that it is read as")
            })
        };
        without_panic(&self.path, format_args!("line {number}"), read)
    }

    fn fingerprint(&self) -> u64 {
        self.lines.iter().fold(0, |all, (start, length, _)| mix(&[all, *start, u64::from(*length)]))
    }
}

fn cause(line: &[u8], error: &serde_json::Error) -> String {
    let text = error.to_string();
    let cause = text.split(" at line ").next().unwrap_or(&text).to_owned();
    let begins = |word: &[u8]| {
        let at = error.column().saturating_sub(1);
        error.is_syntax()
            && (at.saturating_sub(1)..=at).any(|at| line.get(at..).is_some_and(|rest| rest.starts_with(word)))
    };
    if begins(b"NaN") || begins(b"Infinity") {
        return format!("{cause}: NaN and Infinity are no JSON; write null, and read an Option");
    }
    if error.is_syntax() && line.contains(&b'\r') && line.trim_ascii().contains(&b'\r') {
        return format!("{cause}: lines end with LF or CR LF, not with CR alone");
    }
    cause
}

impl<T> fmt::Debug for JsonLinesDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JsonLinesDataset({}, {} lines)", self.path.display(), self.lines.len())
    }
}
