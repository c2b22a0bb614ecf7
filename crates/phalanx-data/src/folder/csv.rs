//! Records of comma-separated values.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use csv::{ErrorKind, Position, ReaderBuilder, StringRecord};
use phalanx::{Error, Result};
use serde::de::DeserializeOwned;

use super::record::{Record, as_it_was};
use super::{MAX_RECORD, bad, io_error, not_utf8, open_file, without_panic};
use crate::Dataset;
use crate::dataset::item;
use crate::worker::mix;

const REMEDY: &str = "mend the record, or the type that it is read as; is a quote not closed?";
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The records of a CSV file. Its first line has the names of the type's fields, unless [`CsvOptions::headers`] says otherwise. A
/// record may have 64 MiB.
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::CsvDataset};
///
/// #[derive(serde::Deserialize)]
/// struct House {
///     rooms: u32,
///     price: f32,
/// }
///
/// let houses = CsvDataset::<House>::open("houses.csv")?;
/// println!("{} rooms for {}", houses.get(17)?.rooms, houses.get(17)?.price);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// A file is UTF-8, with or without a byte order mark; lines end with LF, CR LF or CR, and empty lines are no records, as in pandas.
/// Truth values are `true` and `false`: pandas writes `True` and `False`, which are an error for a `bool`. A file that was cut off
/// where a record ends looks like a whole one, and one that was cut off in the last field may; compare [`len`](Dataset::len) with what you
/// know.
pub struct CsvDataset<T> {
    path: PathBuf,
    file: File,
    /// None if the file has no line of them.
    headers: Option<StringRecord>,
    options: CsvOptions,
    records: Vec<Place>,
    _type: PhantomData<fn() -> T>,
}

/// Where a record begins and ends.
type Place = (u64, u64);

/// How a CSV file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvOptions {
    delimiter: u8,
    headers: bool,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self { delimiter: b',', headers: true }
    }
}

impl CsvOptions {
    /// Commas, and a line of headers.
    pub fn new() -> Self {
        Self::default()
    }

    /// The byte that separates values; `b','` by default.
    #[doc(alias = "sep")]
    pub fn delimiter(self, delimiter: u8) -> Self {
        Self { delimiter, ..self }
    }

    /// Whether the first line has the names of the columns; true by default. Without names a record is read by its order, as a tuple, a
    /// `Vec`, or the fields of a struct in theirs.
    #[doc(alias = "header")]
    pub fn headers(self, headers: bool) -> Self {
        Self { headers, ..self }
    }
}

impl<T: DeserializeOwned> CsvDataset<T> {
    /// The file at `path`. It is read through once, to find the records; 16 bytes of memory are kept for each.
    ///
    /// # Errors
    /// If it cannot be read, is empty, or is not UTF-8; if two columns have one name, other than an empty one; if a record is too long or has another number of
    /// fields than the headers; if the last quote is not closed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::with_options(path, CsvOptions::new())
    }

    /// [`open`](Self::open) for a file that is written otherwise.
    ///
    /// ```no_run
    /// use phalanx_data::folder::{CsvDataset, CsvOptions};
    ///
    /// // 5.1,3.5,1.4,0.2,setosa
    /// let irises = CsvDataset::<(f32, f32, f32, f32, String)>::with_options("iris.data", CsvOptions::new().headers(false))?;
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open), and if the delimiter is a quote or the end of a line. Without headers an empty file is no error: it has no records.
    pub fn with_options(path: impl AsRef<Path>, options: CsvOptions) -> Result<Self> {
        if matches!(options.delimiter, b'"' | b'\r' | b'\n') {
            // All of the file would be the headers.
            let delimiter = char::from(options.delimiter);
            return Err(Error::invalid_argument(format!(
                "{delimiter:?} cannot be the delimiter of a CSV file"
            ))
            .with_remedy("give the byte that separates them, such as b',' or b'\\t'"));
        }
        let path = path.as_ref().to_owned();
        let file = open_file(&path)?;
        let (headers, records) = without_panic(&path, "its records", || records(&path, &file, options))?;
        Ok(Self { path, file, headers, options, records, _type: PhantomData })
    }

    /// The names of the columns; none if the file has no line of them.
    pub fn headers(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().flatten()
    }
}

/// Reads the file through: its headers, and where records begin and end.
fn records(path: &Path, file: &File, options: CsvOptions) -> Result<(Option<StringRecord>, Vec<Place>)> {
    let allowance = Rc::new(Cell::new(MAX_RECORD));
    let source = Bounded { file, allowance: allowance.clone() };
    let mut reader = ReaderBuilder::new().delimiter(options.delimiter).has_headers(false).from_reader(source);
    let failed = |at: u64, error: csv::Error| unread(path, file, at, &error);
    let (mut headers, mut records, mut record) = (None, Vec::new(), csv::ByteRecord::new());
    loop {
        allowance.set(MAX_RECORD);
        let start = reader.position().byte();
        if !reader.read_byte_record(&mut record).map_err(|error| failed(start, error))? {
            break;
        }
        for (column, field) in record.iter().enumerate() {
            if let Err(error) = std::str::from_utf8(field) {
                let (line, place) = (line_of(path, file, start)?, column + 1);
                let place = format_args!("line {line}, field {place}");
                return Err(not_utf8(path, place, &record_bytes(path, file, 0, 4)?, &error));
            }
        }
        if options.headers && headers.is_none() {
            let names = StringRecord::from_byte_record_lossy(record.clone());
            // Spreadsheets write columns without a name behind those with one.
            let (mut seen, mut named) = (HashSet::new(), names.iter().filter(|name| !name.is_empty()));
            if let Some(twice) = named.find(|name| !seen.insert(name.to_owned())) {
                let cause = format_args!("two columns have the name {twice:?}");
                return Err(bad(path, "its headers", cause, "give each column a name of its own"));
            }
            headers = Some(names);
        } else {
            records.push((start, reader.position().byte()));
        }
    }
    if options.headers && headers.is_none() {
        return Err(bad(
            path,
            "its headers",
            "the file is empty",
            "copy it again, or write the line of headers",
        ));
    }
    // What stands behind an open quote is one field up to the end, also if the file was cut off there.
    let last = records.last().copied().unwrap_or((0, reader.position().byte()));
    let bytes = record_bytes(path, file, last.0, last.1 - last.0)?;
    if ends_in_quotes(&bytes, options.delimiter) {
        return Err(bad_line(path, file, last.0, "its last quote is not closed: is the file cut off?"));
    }
    Ok((headers, records))
}

/// Why no record was read behind this byte.
fn unread(path: &Path, file: &File, at: u64, error: &csv::Error) -> Error {
    let at = error.position().map_or(at, Position::byte);
    let cause = match error.kind() {
        ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("it has {len} fields, the first record has {expected_len}")
        }
        // The system's, and not that of a record that is too long.
        ErrorKind::Io(error) if error.raw_os_error().is_some() => return io_error(path, error),
        ErrorKind::Io(error) => error.to_string(),
        _ => error.to_string(),
    };
    bad_line(path, file, at, cause)
}

/// Whether a record ends before its quote is closed, by the rules of the reader: a quote is one at the beginning of a field, and two
/// within one are a character.
fn ends_in_quotes(record: &[u8], delimiter: u8) -> bool {
    enum At {
        Start,
        Plain,
        Quoted,
        QuoteInQuoted,
    }
    let record = record.strip_prefix(BYTE_ORDER_MARK).unwrap_or(record);
    let end = record.iter().fold(At::Start, |at, byte| match (at, *byte) {
        (At::Start, b'"') | (At::QuoteInQuoted, b'"') => At::Quoted,
        (At::Quoted, b'"') => At::QuoteInQuoted,
        (At::Quoted, _) => At::Quoted,
        (_, b'\n' | b'\r') => At::Start,
        (_, byte) if byte == delimiter => At::Start,
        (At::Start | At::Plain | At::QuoteInQuoted, _) => At::Plain,
    });
    matches!(end, At::Quoted)
}

fn record_bytes(path: &Path, file: &File, start: u64, length: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = Places { file, at: start }.take(length).read_to_end(&mut bytes);
    read.map_err(|error| io_error(path, &error))?;
    Ok(bytes)
}

fn bad_line(path: &Path, file: &File, at: u64, cause: impl Display) -> Error {
    match line_of(path, file, at) {
        Ok(line) => bad(path, format_args!("line {line}"), cause, REMEDY),
        Err(error) => error,
    }
}

/// The line of the record at this byte, counted as an editor does: empty lines count, and LF, CR LF and CR end one. Read from the file
/// again, because it is needed for errors alone.
fn line_of(path: &Path, file: &File, at: u64) -> Result<u64> {
    let mut bytes = BufReader::new(Places { file, at: 0 });
    let (mut line, mut place, mut after_return) = (1, 0, false);
    loop {
        let piece = bytes.fill_buf().map_err(|error| io_error(path, &error))?;
        if piece.is_empty() {
            return Ok(line);
        }
        for byte in piece {
            // Empty lines in front of a record are a part of it.
            if place >= at && !matches!(byte, b'\n' | b'\r') {
                return Ok(line);
            }
            line += u64::from(*byte == b'\r' || (*byte == b'\n' && !after_return));
            (place, after_return) = (place + 1, *byte == b'\r');
        }
        let length = piece.len();
        bytes.consume(length);
    }
}

impl<T: DeserializeOwned> Dataset for CsvDataset<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        let (start, end) = *item(&self.records, index)?;
        let place = (start, (end - start) as usize);
        let Record { before, bytes, behind } = Record::read(&self.path, &self.file, place, index)?;
        let ends_line = |byte: Option<u8>| matches!(byte, None | Some(b'\n' | b'\r'));
        let ends = ends_line(behind) || ends_line(bytes.last().copied());
        as_it_was(&self.path, index, ends_line(before) && ends)?;
        let mut reader =
            ReaderBuilder::new().delimiter(self.options.delimiter).has_headers(false).from_reader(&*bytes);
        let mut record = StringRecord::new();
        let read = || {
            let read = reader.read_record(&mut record);
            as_it_was(&self.path, index, reader.position().byte() == bytes.len() as u64)?;
            read.and_then(|_| record.deserialize(self.headers.as_ref())).map_err(|error| {
                let text = match error.kind() {
                    ErrorKind::Deserialize { err, .. } => self.described(err),
                    _ => error.to_string(),
                };
                bad_line(&self.path, &self.file, start, text)
            })
        };
        without_panic(&self.path, format_args!("item {index}"), read)
    }

    fn fingerprint(&self) -> u64 {
        self.records.iter().fold(0, |all, (start, end)| mix(&[all, *start, *end]))
    }
}

impl<T> CsvDataset<T> {
    /// What is wrong with a field, by its name or number.
    fn described(&self, error: &csv::DeserializeError) -> String {
        let kind = error.kind();
        let Some(field) = error.field() else { return kind.to_string() };
        let name = self.headers.as_ref().and_then(|headers| headers.get(field as usize));
        match name {
            Some(name) => format!("column {name:?}: {kind}"),
            None => format!("field {}: {kind}", field + 1),
        }
    }
}

/// Ends with an error when so much was read that no record ends in it.
struct Bounded<'a> {
    file: &'a File,
    allowance: Rc<Cell<u64>>,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = (&mut &*self.file).read(buffer)?;
        match self.allowance.get().checked_sub(read as u64) {
            Some(left) => self.allowance.set(left),
            None => {
                return Err(io::Error::other("a record is longer than 64 MiB: is a quote (\") not closed?"));
            }
        }
        Ok(read)
    }
}

/// A file from some place on, whoever else reads it.
struct Places<'a> {
    file: &'a File,
    at: u64,
}

impl Read for Places<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl<T> fmt::Debug for CsvDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CsvDataset({}, {} records)", self.path.display(), self.records.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_the_system_does_not_read_is_not_taken_for_a_bad_one() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let said = |error: io::Error| unread(file.path(), file.as_file(), 0, &csv::Error::from(error));
        // EIO, as of a disk that fails.
        let error = said(io::Error::from_raw_os_error(5));
        assert!(error.io_kind().is_some() && !error.to_string().contains("mend the record"), "{error}");
        let error = said(io::Error::other("a record is too long"));
        assert!(error.is_invalid_argument() && error.to_string().contains("mend the record"), "{error}");
    }

    #[test]
    fn a_quote_is_open_until_it_is_closed() {
        for (record, open) in [
            ("a,b\n", false),
            ("a,\"b", true),
            ("a,\"b\"\n", false),
            ("a,\"b\"\"", true),
            ("a,\"b\"\"\"", false),
            ("a,b\"c", false),
            ("\u{feff}\"a", true),
            ("\n\r\n\"a\n\"\"", true),
            ("a,\"b\"c\"", false),
            ("\"a\nb\",\"", true),
        ] {
            assert_eq!(ends_in_quotes(record.as_bytes(), b','), open, "{record:?}");
        }
    }
}
