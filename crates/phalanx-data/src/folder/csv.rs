//! Records of comma-separated values.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use csv::{ReaderBuilder, StringRecord};
use phalanx::Result;
use serde::de::DeserializeOwned;

use super::{MAX_RECORD, bad, io_error};
use crate::Dataset;
use crate::dataset::item;

const REMEDY: &str = "mend the record, or the type that it is read as; is a quote not closed?";

/// The records of a CSV file with a line of headers, which are the names of the type's fields. A record may have 64 MiB.
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
pub struct CsvDataset<T> {
    path: PathBuf,
    file: File,
    headers: StringRecord,
    delimiter: u8,
    /// Where each begins and ends, and its line.
    records: Vec<(u64, u64, u64)>,
    _type: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> CsvDataset<T> {
    /// The file at `path`. It is read through once, to find the records; 24 bytes of memory are kept for each.
    ///
    /// # Errors
    /// If it cannot be read, or a record is too long or has another number of fields than the headers.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::with_delimiter(path, b',')
    }

    /// [`open`](Self::open) for values that are separated by something else, such as `b'\t'`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn with_delimiter(path: impl AsRef<Path>, delimiter: u8) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let file = File::open(&path).map_err(|error| io_error(&path, &error))?;
        let allowance = Rc::new(Cell::new(MAX_RECORD));
        let source = Bounded { file: &file, allowance: allowance.clone() };
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(source);
        let failed = |line: u64, error: csv::Error| {
            let line = error.position().map_or(line, csv::Position::line);
            bad(&path, format_args!("line {line}"), error, REMEDY)
        };
        let headers = reader.headers().map_err(|error| failed(1, error))?.clone();
        let (mut records, mut record) = (Vec::new(), csv::ByteRecord::new());
        loop {
            allowance.set(MAX_RECORD);
            let before = reader.position().clone();
            if !reader.read_byte_record(&mut record).map_err(|error| failed(before.line(), error))? {
                break;
            }
            let place = record.position().unwrap_or(&before);
            let (start, line) = (place.byte(), place.line());
            records.push((start, reader.position().byte(), line));
        }
        Ok(Self { path, file, headers, delimiter, records, _type: PhantomData })
    }

    /// The names of the columns.
    pub fn headers(&self) -> impl Iterator<Item = &str> {
        self.headers.iter()
    }
}

impl<T: DeserializeOwned> Dataset for CsvDataset<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        let (start, end, line) = *item(&self.records, index)?;
        let mut bytes = vec![0; (end - start) as usize];
        self.file.read_exact_at(&mut bytes, start).map_err(|error| io_error(&self.path, &error))?;
        let mut reader =
            ReaderBuilder::new().delimiter(self.delimiter).has_headers(false).from_reader(&*bytes);
        let mut record = StringRecord::new();
        let read = reader.read_record(&mut record).and_then(|_| record.deserialize(Some(&self.headers)));
        read.map_err(|error| {
            let text = match error.kind() {
                csv::ErrorKind::Deserialize { err, .. } => err.to_string(),
                _ => error.to_string(),
            };
            bad(&self.path, format_args!("line {line}"), text, REMEDY)
        })
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
            None => return Err(io::Error::other("a record is longer than 64 MiB")),
        }
        Ok(read)
    }
}

impl<T> fmt::Debug for CsvDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CsvDataset({}, {} records)", self.path.display(), self.records.len())
    }
}
