//! Data sets of files in common formats. Each needs a feature of its own.
//!
//! | | feature | items |
//! |---|---|---|
#![cfg_attr(
    feature = "safetensors",
    doc = "| [`SafetensorsDataset`] | `safetensors` | rows of the tensors of one file or of a folder |"
)]
#![cfg_attr(
    feature = "npy",
    doc = "| [`NpyDataset`] | `npy` | rows of the arrays of one `.npy` file or of a folder |"
)]
#![cfg_attr(feature = "csv", doc = "| [`CsvDataset`] | `csv` | records |")]
#![cfg_attr(feature = "json", doc = "| [`JsonLinesDataset`] | `json` | lines |")]
#![cfg_attr(
    feature = "image",
    doc = "| [`ImageFolder`] | `image` | pictures, with the folder that they are in as their class |"
)]
//!
//! They read a file's index when they are opened, and items when they are asked, at their places, from any thread. Errors name the
//! file, the line, row or tensor, and what to do. Nothing takes more memory than a limit says, whatever a file announces.
//! A file that was written anew since it was opened is an error of the item. Lines may be added to one of CSV or JSON lines: they come with the
//! next opening.

#[cfg(any(feature = "safetensors", feature = "npy"))]
mod array;
#[cfg(feature = "csv")]
mod csv;
#[cfg(feature = "image")]
mod images;
#[cfg(feature = "json")]
mod json;
#[cfg(feature = "npy")]
mod npy;
#[cfg(any(
    feature = "csv",
    feature = "image",
    feature = "json",
    feature = "lmdb",
    feature = "npy",
    feature = "safetensors"
))]
mod open;
#[cfg(any(feature = "csv", feature = "json"))]
mod record;
#[cfg(any(feature = "safetensors", feature = "npy"))]
mod rows;
#[cfg(feature = "safetensors")]
mod safetensors;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use phalanx::{Error, Result};

#[cfg(any(feature = "safetensors", feature = "npy"))]
pub use self::array::{Array, ArrayElement, ElementType};
#[cfg(feature = "csv")]
pub use self::csv::{CsvDataset, CsvOptions};
#[cfg(feature = "image")]
pub use self::images::{ImageFolder, ImageSample};
#[cfg(feature = "json")]
pub use self::json::JsonLinesDataset;
#[cfg(feature = "npy")]
pub use self::npy::NpyDataset;
#[cfg(any(
    feature = "csv",
    feature = "image",
    feature = "json",
    feature = "lmdb",
    feature = "npy",
    feature = "safetensors"
))]
pub(crate) use self::open::open_file;
#[cfg(feature = "safetensors")]
pub use self::safetensors::SafetensorsDataset;

/// The most bytes of a line, or record.
#[cfg(any(feature = "csv", feature = "json"))]
const MAX_RECORD: u64 = 64 << 20;
/// What is wrong with a file in which records or rows are not where they were found.
#[cfg(any(feature = "csv", feature = "json", feature = "npy", feature = "safetensors"))]
const CHANGED: &str = "the file was changed after it was opened";
#[cfg(any(feature = "csv", feature = "json", feature = "npy", feature = "safetensors"))]
const REOPEN: &str =
    "open it again; write new data under another name, and leave files as they are while they are read";
/// How deep folders may be in folders: links may lead back.
const MAX_DEPTH: usize = 32;

/// The system's error with the file.
pub(crate) fn io_error(path: &Path, error: &io::Error) -> Error {
    let copy = match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(error.kind(), error.to_string()),
    };
    let told = Error::io(path.display().to_string(), copy);
    match error.kind() {
        io::ErrorKind::NotFound => told.with_remedy("is the path right, and does every host see it?"),
        io::ErrorKind::PermissionDenied => told.with_remedy("may this user read it?"),
        _ => told,
    }
}

/// What is wrong with a part of a file, and what to do.
#[cfg(any(feature = "csv", feature = "image", feature = "json", feature = "npy", feature = "safetensors"))]
fn bad(path: &Path, place: impl std::fmt::Display, cause: impl std::fmt::Display, remedy: &str) -> Error {
    Error::invalid_argument(format!("{}, {place}: {cause}", path.display())).with_remedy(remedy)
}

/// The error of a text that is not UTF-8, in a file that begins with these bytes.
#[cfg(any(feature = "csv", feature = "json"))]
fn not_utf8(
    path: &Path,
    place: impl std::fmt::Display,
    beginning: &[u8],
    error: &dyn std::fmt::Display,
) -> Error {
    let cause = match beginning {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            "the file is UTF-16, as some editors and Excel write it".to_owned()
        }
        _ => format!("it is not UTF-8: {error}"),
    };
    bad(
        path,
        place,
        cause,
        "save the file as UTF-8, such as by `iconv -f UTF-16 -t UTF-8` or `-f WINDOWS-1252`",
    )
}

/// Runs what others have written, or is a part of `place` in the file: a panic in it is an error that names the file.
#[cfg(any(feature = "csv", feature = "image", feature = "json", feature = "npy", feature = "safetensors"))]
fn without_panic<T>(
    path: &Path,
    place: impl std::fmt::Display,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let cause = format_args!("what reads it panicked: {}", phalanx::panic_message(&*panic));
        Err(bad(path, place, cause, "is the file damaged? Copy it again, write it again, or remove it"))
    })
}

/// The files under `path` with one of these extensions, in the order of their names; or the file that it is. Entries whose names begin with
/// a dot are left out.
///
/// # Errors
/// If there are none, a folder cannot be listed, or a link leads nowhere.
pub fn files(path: impl AsRef<Path>, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let path = path.as_ref();
    let mut found = Vec::new();
    if fs::metadata(path).map_err(|error| io_error(path, &error))?.is_file() {
        found.push(path.to_owned());
    } else {
        list(path, extensions, 0, &mut found)?;
    }
    if found.is_empty() {
        let wanted = extensions.join(", ");
        return Err(Error::invalid_argument(format!("{} has no file that ends in {wanted}", path.display()))
            .with_remedy("is the path right?"));
    }
    Ok(found)
}

fn list(folder: &Path, extensions: &[&str], depth: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(Error::invalid_argument(format!("{} is too deep", folder.display()))
            .with_remedy("does a link lead back to a folder above it?"));
    }
    for (path, is_folder) in entries(folder)? {
        if is_folder {
            list(&path, extensions, depth + 1, found)?;
        } else if extension(&path).is_some_and(|own| extensions.contains(&own.as_str())) {
            found.push(path);
        }
    }
    Ok(())
}

/// The entries of a folder in the order of their names, and which of them are folders. Hidden entries are left out.
///
/// # Errors
/// If a link leads nowhere. It may lead to a folder that this host does not see: without that folder `ImageFolder` would have one class less, and
/// the later classes would have other numbers.
fn entries(folder: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let failed = |error: io::Error| io_error(folder, &error);
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let is_folder = match entry.file_type() {
            // Of what it leads to.
            Ok(kind) if kind.is_symlink() => fs::metadata(&path).map(|about| about.is_dir()),
            kind => kind.map(|kind| kind.is_dir()),
        };
        match is_folder {
            Ok(is_folder) => entries.push((path, is_folder)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::invalid_argument(format!("{} leads nowhere", path.display()))
                    .with_remedy(
                        "does every host see what the link leads to? If nothing is missing, remove the link",
                    ));
            }
            Err(error) => return Err(io_error(&path, &error)),
        }
    }
    entries.sort();
    Ok(entries)
}

fn extension(path: &Path) -> Option<String> {
    path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase)
}
