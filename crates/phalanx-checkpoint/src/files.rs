//! Reads the files of a checkpoint, none of which it trusts: one may be missing, short, damaged, or something else than a file.

use std::fs::{self, File};
use std::hash::RandomState;
use std::io::{self, Read};
use std::path::Path;

use phalanx_sys::folder::own_disk;
use rustix::fs::OFlags;

use super::manifest::{Checksum, FileEntry, MANIFEST, MAX_MANIFEST, Manifest, Unreadable};
use crate::deadline::Deadline;
use crate::error::Error;

/// Files are read in pieces of this size.
const PIECE: usize = 1 << 20;

/// Why a checkpoint cannot be read.
#[derive(Debug)]
pub(super) enum Unfit {
    /// It is incomplete or damaged, so an older one is taken.
    Torn(String),
    /// It may be complete: taking an older one instead would lose it.
    Unread(String, Option<io::Error>),
    /// The time was up before all of it was read. It may be complete, too.
    Late(String),
}

impl Unfit {
    /// The system's error for `file` in `folder`.
    fn of(folder: &Path, file: &str, error: io::Error) -> Self {
        Self::on(own_disk(folder).is_some(), file, error)
    }

    /// The system's error for `file`. Its disk may be this host's own.
    fn on(own_disk: bool, file: &str, error: io::Error) -> Self {
        /// The error for data that a disk has lost. Behind a network the data may be whole, and the way to them be interrupted.
        const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
        match error.kind() {
            io::ErrorKind::NotFound => Self::Torn(format!("{file} is missing")),
            io::ErrorKind::UnexpectedEof => Self::Torn(format!("{file} is too short")),
            _ if own_disk && error.raw_os_error() == Some(EIO) => {
                Self::Torn(format!("{file} cannot be read: {error}"))
            }
            _ => Self::Unread(format!("{file} cannot be read"), Some(error)),
        }
    }
}

/// The error for [`Unfit::Late`].
pub(super) fn late(folder: &Path, cause: &str) -> Error {
    Error::timeout(format!("cannot read the checkpoint {}: {cause}", folder.display()))
        .with_remedy("allow more time with `Checkpoints::with_timeout`")
}

/// The manifest of the checkpoint in `folder`, and its bytes.
pub(super) fn read_manifest(folder: &Path) -> Result<(Manifest, Vec<u8>), Unfit> {
    let bytes = manifest_bytes(folder)?;
    match Manifest::decode(&bytes, &RandomState::new()) {
        Ok(manifest) => Ok((manifest, bytes)),
        Err(error @ Unreadable::Torn(_)) => Err(Unfit::Torn(error.to_string())),
        Err(error @ Unreadable::Later(_)) => Err(Unfit::Unread(error.to_string(), None)),
    }
}

/// The bytes of the manifest of the checkpoint in `folder`.
pub(super) fn manifest_bytes(folder: &Path) -> Result<Vec<u8>, Unfit> {
    // The disk to which it was moved may only not be mounted.
    if folder.is_symlink()
        && let Err(error) = fs::metadata(folder)
        && error.kind() == io::ErrorKind::NotFound
    {
        return Err(Unfit::Unread("it is a link that leads nowhere".to_owned(), Some(error)));
    }
    let (file, length) = open(folder, MANIFEST)?;
    if length > MAX_MANIFEST {
        // A crash does not make it longer, but a later version of this crate may write a longer one.
        let cause =
            format!("{MANIFEST} has {length} bytes, and {MAX_MANIFEST} are the most that are read here");
        return Err(Unfit::Unread(cause, None));
    }
    read(folder, file, MANIFEST, length)
}

/// The contents of the file of `entry` in `folder`, if it can be read by the deadline.
pub(super) fn read_entry(folder: &Path, entry: &FileEntry, deadline: Deadline) -> Result<Vec<u8>, Unfit> {
    let file = open_entry(folder, entry)?;
    let mut bytes = room(&entry.name, entry.length)?;
    compare(folder, file, entry, deadline, |piece| bytes.extend_from_slice(piece))?;
    Ok(bytes)
}

/// Checks that the `file` of `entry`, in the checkpoint in `folder`, has the right contents. It takes little memory, and stops at the
/// deadline.
pub(super) fn verify(folder: &Path, file: File, entry: &FileEntry, deadline: Deadline) -> Result<(), Unfit> {
    compare(folder, file, entry, deadline, |_| {})
}

/// Compares the checksum of `file` with that of `entry`, and passes each piece to `see`.
fn compare(
    folder: &Path,
    file: File,
    entry: &FileEntry,
    deadline: Deadline,
    mut see: impl FnMut(&[u8]),
) -> Result<(), Unfit> {
    let mut file = file.take(entry.length);
    let (mut piece, mut checksum) = (vec![0; PIECE], Checksum::default());
    loop {
        if deadline.has_passed() {
            return Err(Unfit::Late(format!("there was no time to read all of {}", entry.name)));
        }
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => {
                let piece = piece.get(..length).unwrap_or_default();
                checksum.update(piece);
                see(piece);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Unfit::of(folder, &entry.name, error)),
        }
    }
    if checksum.finish() == entry.checksum { Ok(()) } else { Err(damaged(entry)) }
}

fn damaged(entry: &FileEntry) -> Unfit {
    Unfit::Torn(format!("the checksum of {} is wrong", entry.name))
}

/// Whether the checkpoint has all files, with the right lengths. To resume from the newest checkpoint all its files are read;
/// to remove old ones this check is enough.
pub(super) fn looks_whole(folder: &Path) -> bool {
    let manifest = read_manifest(folder);
    manifest.is_ok_and(|(manifest, _)| manifest.files.iter().all(|entry| open_entry(folder, entry).is_ok()))
}

/// The file of `entry`, if it has the right length: no memory is allocated for missing bytes.
pub(super) fn open_entry(folder: &Path, entry: &FileEntry) -> Result<File, Unfit> {
    let (file, length) = open(folder, &entry.name)?;
    if length == entry.length {
        return Ok(file);
    }
    let cause = format!("{} has {length} bytes of {}", entry.name, entry.length);
    Err(Unfit::Torn(cause))
}

/// Opens a file and returns its length. It must be a regular file: a link may lead out of the folder, and a pipe may
/// never end.
fn open(folder: &Path, name: &str) -> Result<(File, u64), Unfit> {
    let file = open_file(&folder.join(name)).map_err(|error| Unfit::of(folder, name, error))?;
    let metadata = file.metadata().map_err(|error| Unfit::of(folder, name, error))?;
    if !metadata.is_file() {
        return Err(Unfit::Torn(format!("{name} is no file")));
    }
    Ok((file, metadata.len()))
}

/// Opens a file, but no link.
pub(super) fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    phalanx_sys::open::at_once(path, File::options().read(true), flags)
}

/// The contents of a file of `length` bytes.
fn read(folder: &Path, mut file: File, name: &str, length: u64) -> Result<Vec<u8>, Unfit> {
    let mut bytes = room(name, length)?;
    file.by_ref().take(length).read_to_end(&mut bytes).map_err(|error| Unfit::of(folder, name, error))?;
    match bytes.len() as u64 == length {
        true => Ok(bytes),
        false => Err(Unfit::Torn(format!("{name} is too short"))),
    }
}

/// Memory for the `length` bytes of a file.
fn room(name: &str, length: u64) -> Result<Vec<u8>, Unfit> {
    let mut bytes = Vec::new();
    match usize::try_from(length).is_ok_and(|length| bytes.try_reserve_exact(length).is_ok()) {
        true => Ok(bytes),
        false => Err(Unfit::Unread(format!("there is no memory for the {length} bytes of {name}"), None)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::manifest::checksum;
    use super::*;

    #[test]
    fn data_that_a_disk_has_lost_are_damage_and_those_behind_a_network_may_be_whole() {
        use rustix::io::Errno;
        let is_torn = |own_disk, errno: Errno| match Unfit::on(own_disk, "a.part", errno.into()) {
            Unfit::Torn(cause) => cause.contains("a.part"),
            Unfit::Unread(cause, error) => !(cause.contains("a.part") && error.is_some()),
            Unfit::Late(cause) => panic!("{cause}"),
        };
        assert!(is_torn(true, Errno::IO) && !is_torn(false, Errno::IO));
        for own_disk in [true, false] {
            assert!(is_torn(own_disk, Errno::NOENT));
            assert!(!is_torn(own_disk, Errno::ACCESS) && !is_torn(own_disk, Errno::STALE));
        }
    }

    #[test]
    fn a_file_that_takes_too_long_to_read_may_be_whole() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("a.part"), "abc").unwrap();
        let entry = FileEntry { name: "a.part".to_owned(), length: 3, checksum: checksum(b"abc") };
        let read = |deadline| read_entry(root.path(), &entry, deadline);
        assert_eq!(read(Deadline::after(Duration::from_secs(60))).unwrap(), b"abc");
        match read(Deadline::now()) {
            Err(Unfit::Late(cause)) => {
                assert!(cause.contains("a.part"), "{cause}");
                let error = late(root.path(), &cause);
                assert!(error.is_timeout() && error.remedy().unwrap().contains("with_timeout"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}
