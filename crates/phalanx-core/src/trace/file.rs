//! The file to which all ranks of a job add their events.
//!
//! Between two additions it is one valid JSON document, also if a process has been killed. An addition replaces the end
//! of the document, after the last event, and writes a new end. One rank adds at a time, under a lock of the file. If
//! an addition was cut off, its complete lines stay, which are one event each.
//!
//! So no process has to merge files, and it works under any launcher. tracing-chrome, a layer for `tracing`, was
//! weighed. It writes a file for each process. A track is a thread there, but most events here, such as a bucket or a
//! step, begin on one thread and end on another, or are known only when they are over. And it needs a global
//! subscriber, which the program should choose.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::{Event, TraceValue};

const BEGIN: &[u8] = b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
const END: &[u8] = b"\n]}\n";
/// The beginning of the file, which identifies a trace.
const MARK: &[u8] = b"{\"displayTimeUnit\":\"ms\",";
/// The last complete line begins within so many bytes before the end.
const TAIL: u64 = 1 << 20;
/// How long a rank waits while the file does not grow. A rank that is frozen while it adds must not hold up the others.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Removes a trace that an earlier job has left, but no other file.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let mut begin = Vec::new();
    match open(path, OpenOptions::new().read(true)) {
        Ok(file) => file.take(MARK.len() as u64).read_to_end(&mut begin)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !MARK.starts_with(&begin) {
        return Err(foreign());
    }
    std::fs::remove_file(path)
}

/// Opens a regular file. A device that has nothing to read looks like a trace that was cut off.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    phalanx_sys::open::regular(path, options).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => foreign(),
        _ => error,
    })
}

/// Adds `lines`, which commas separate, to the document at `path`.
pub(super) fn append(path: &Path, lines: &[u8]) -> io::Result<()> {
    let mut file = open(path, OpenOptions::new().read(true).write(true).create(true).truncate(false))?;
    lock(&file)?;
    let end = end_of_events(&mut file)?;
    let before: &[u8] = match end {
        0 => BEGIN,
        end if end == BEGIN.len() as u64 => b"",
        _ => b",\n",
    };
    replace_end(&mut file, end, |file| {
        file.write_all(before)?;
        file.write_all(lines)?;
        file.write_all(END)
    })
}

/// Replaces everything after `end`. If that fails, the file has the events before it: what will be added again must not
/// be there twice.
fn replace_end(file: &mut File, end: u64, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    let outcome = write(file);
    if outcome.is_err() {
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        if end > 0 {
            file.write_all(END)?;
        }
    }
    outcome
}

fn lock(file: &File) -> io::Result<()> {
    let (mut length, mut since) = (file.metadata()?.len(), Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if since.elapsed() < TIMEOUT => {
                std::thread::sleep(Duration::from_millis(2));
                let now = file.metadata()?.len();
                if now != length {
                    (length, since) = (now, Instant::now());
                }
            }
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "another process has held its lock for too long: is a rank stopped?",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a file of this name exists and is not a trace: name another")
}

/// The end of the last complete event.
fn end_of_events(file: &mut File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let mut begin = vec![0; BEGIN.len().min(length as usize)];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut begin)?;
    if !BEGIN.starts_with(&begin) {
        return Err(foreign());
    }
    if begin.len() < BEGIN.len() {
        return Ok(0);
    }
    let start = length.saturating_sub(TAIL).max(BEGIN.len() as u64);
    let mut tail = Vec::new();
    file.seek(SeekFrom::Start(start))?;
    file.take(TAIL).read_to_end(&mut tail)?;
    if tail.ends_with(END) {
        return Ok(start + (tail.len() - END.len()) as u64);
    }
    // The last addition was cut off: the end of a line is the end of an event, with a comma if more were to follow.
    match tail.iter().rposition(|byte| *byte == b'\n') {
        Some(line) => {
            let line = &tail[..line];
            Ok(start + line.strip_suffix(b",").unwrap_or(line).len() as u64)
        }
        None if start == BEGIN.len() as u64 => Ok(start),
        None => Err(foreign()),
    }
}

/// A line of the file.
pub(super) enum Line<'a> {
    Named { rank: u32, what: &'static str, thread: u32, name: &'a str },
    Ordered { rank: u32, what: &'static str, thread: u32, index: u32 },
    Labelled { rank: u32, labels: &'a str },
    Event { rank: u32, at: f64, event: &'a Event },
}

impl Line<'_> {
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec(self)?)
    }
}

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Named { rank, what, thread, name } => {
                metadata(&mut map, *rank, what, *thread, &serde_json::json!({ "name": name }))?;
            }
            Self::Ordered { rank, what, thread, index } => {
                metadata(&mut map, *rank, what, *thread, &serde_json::json!({ "sort_index": index }))?;
            }
            Self::Labelled { rank, labels } => {
                metadata(&mut map, *rank, "process_labels", 0, &serde_json::json!({ "labels": labels }))?;
            }
            Self::Event { rank, at, event } => {
                map.serialize_entry("pid", rank)?;
                map.serialize_entry("tid", &event.track.number())?;
                map.serialize_entry("name", &event.name)?;
                map.serialize_entry("ts", at)?;
                match event.end {
                    Some(end) => {
                        map.serialize_entry("ph", "X")?;
                        let micros = end.saturating_duration_since(event.at).as_secs_f64() * 1e6;
                        map.serialize_entry("dur", &micros)?;
                    }
                    None => {
                        map.serialize_entry("ph", "i")?;
                        map.serialize_entry("s", "t")?;
                    }
                }
                map.serialize_entry("args", &Args(&event.args))?;
            }
        }
        map.end()
    }
}

fn metadata<M: SerializeMap>(
    map: &mut M,
    rank: u32,
    name: &str,
    thread: u32,
    args: &serde_json::Value,
) -> Result<(), M::Error> {
    map.serialize_entry("ph", "M")?;
    map.serialize_entry("pid", &rank)?;
    map.serialize_entry("tid", &thread)?;
    map.serialize_entry("name", name)?;
    map.serialize_entry("args", args)
}

struct Args<'a>(&'a [(&'static str, TraceValue)]);

impl Serialize for Args<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl Serialize for TraceValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Integer(value) => serializer.serialize_i64(*value),
            Self::Float(value) => serializer.serialize_f64(*value),
            Self::Text(value) => serializer.serialize_str(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_addition_that_fails_leaves_the_file_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.json");
        append(&path, b"{\"name\":\"first\"},\n{\"name\":\"second\"}").unwrap();
        let before = std::fs::read(&path).unwrap();
        let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let end = end_of_events(&mut file).unwrap();
        let full = replace_end(&mut file, end, |file| {
            file.write_all(b",\n{\"name\":\"third\"},\n{\"na")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[test]
    fn a_pipe_in_its_place_is_refused_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("step.json");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(append(&pipe, b"{}").unwrap_err().to_string()));
        let said = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(said.contains("is not a trace"), "{said}");
    }
}
