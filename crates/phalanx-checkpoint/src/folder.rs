//! The folder of checkpoints: writing a checkpoint, removing old ones. [`names`] has their names, [`writes`](super::writes) the order in
//! which a checkpoint is written.
//!
//! ```text
//! runs/digits/
//!   00000011-step-1100/      a checkpoint
//!   00000012-step-1200/      a later one
//!     tensors.safetensors
//!     optimizer.part
//!     manifest.json          written last
//!   00000013-step-1250/      a sharded one
//!     rank-00000-of-00002.safetensors
//!     rank-00001-of-00002.safetensors    written by rank 1
//!     optimizer.part
//!     manifest.json
//!   .writing-00000014-by-00000002/     not there yet
//!   .removing-00000010-by-00000002/    on its way out
//!   .owner-00000002          the claim of the one process that writes here
//! ```
//!
//! The leading number counts all checkpoints that were ever written here: a job that goes back to an earlier step
//! writes later checkpoints of it. A checkpoint is renamed to its final name when everything in it is on the disk. Only
//! then is an old one renamed and removed.
//!
//! A process may be frozen at any point, lose its claim to another (see [`owner`](super::owner)), and go on with its
//! next operation. Incomplete folders, and those being removed, have the number of a claim in their names, so two
//! processes never write to the same folder. A process that claims the folder first moves aside the incomplete folders
//! of others, and then lists the checkpoints. So there are two cases for a late rename. Either it came before that:
//! then the checkpoint is complete and listed. Or its source has been moved, and it fails. A late removal only removes
//! checkpoints older than those that were complete by then.
//!
//! A checkpoint is valid once its folder is renamed. Everything in it is synced before, so a reader needs no rule to
//! tell what was finished; the manifest's checksums detect damage by disks. No folder is ever replaced, because a file
//! system cannot replace two names at once.

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::disk::Disk;
use super::files::looks_whole;
use super::manifest::{Checksum, FileEntry, MANIFEST, MAX_MANIFEST, Manifest, PART, TENSORS};
use super::names::{self, Leftover};
use super::owner::Owner;
use super::snapshot::Snapshot;
use super::writes::{Operation, Outcome, Role, WriteOrder};

/// Elements are written in pieces of this size, each read once for disk and checksum.
const PIECE: usize = 1 << 20;

/// The folder of checkpoints, for the process that writes.
#[derive(Debug)]
pub(super) struct Folder {
    pub path: PathBuf,
    pub disk: Box<dyn Disk>,
    /// This process's claim. A newer one may exist while a checkpoint is written.
    pub owner: Mutex<Owner>,
}

impl Folder {
    /// Writes `snapshot` as number `number`, or a later one if there is one of that number. When it returns `Ok`, the checkpoint survives a loss of power.
    pub fn write(&self, number: u64, step: u64, world_size: u32, snapshot: &Snapshot) -> io::Result<()> {
        let mut part = Part::new(number, (step, world_size), TENSORS.to_owned(), snapshot);
        carry_out(WriteOrder::new(Role::Alone, part.count()), |operation, _| {
            self.operate(&mut part, operation).map_err(|error| (Outcome::Failed, error))
        })
    }

    /// Does what the owner of the folder does by itself; nothing, if this takes other ranks.
    pub fn operate(&self, part: &mut Part<'_>, operation: Operation) -> io::Result<()> {
        if operation == Operation::MakeFolder {
            // First the remains of an earlier write, if that is possible.
            let _ = self.sweep();
        }
        if operation.is_owners() {
            let claim = self.check()?;
            if operation == Operation::MakeFolder {
                // Somebody may have copied a later one there since: the new one would count as older, and be removed.
                part.number = part.number.max(next_number(&self.path)?);
                part.begun = self.path.join(names::writing(part.number, claim));
            }
        }
        match operation {
            Operation::MakeFolder => self.disk.create_folder(&part.begun),
            Operation::WriteFile(number) => part.write(&*self.disk, number),
            Operation::WriteManifest => part.write_manifest(&*self.disk),
            Operation::SyncFolder => self.disk.sync_folder(&part.begun),
            Operation::Rename => {
                self.disk.rename(&part.begun, &self.path.join(names::complete(part.number, part.step)))
            }
            Operation::SyncParent => self.disk.sync_folder(&self.path),
            // On a full disk its space is needed. What cannot be removed now, or what another rank still adds to it, is
            // removed when the next checkpoint is begun, or the folder is opened.
            Operation::GiveUp if part.is_begun() => self.remove_tree(&part.begun),
            Operation::GiveUp
            | Operation::Announce
            | Operation::FindFolder
            | Operation::Gather
            | Operation::SeeFiles
            | Operation::Conclude => Ok(()),
        }
    }

    /// The number of this process's claim, unless another process has made a later one.
    fn check(&self) -> io::Result<u64> {
        let owner = self.owner.lock();
        owner.check().map(|()| owner.number())
    }

    /// [`rotate_but`](Self::rotate_but), if none is known to be damaged.
    #[cfg(test)]
    pub fn rotate(&self, keep: usize) -> io::Result<()> {
        self.rotate_but(keep, &[])
    }

    /// Removes checkpoints older than the newest `keep` ones that have all their files, and whose number is not among the `damaged`:
    /// lengths do not tell damage, and one that nobody can use must not take the place of one that was read. A link, such as to a
    /// checkpoint that was moved to another disk, is neither counted nor followed.
    pub fn rotate_but(&self, keep: usize, damaged: &[u64]) -> io::Result<()> {
        let (mut whole, mut outcome) = (0, Ok(()));
        for entry in list(&self.path)? {
            if !entry.path.symlink_metadata().is_ok_and(|about| about.is_dir()) {
                continue;
            }
            if whole == keep {
                outcome = outcome.and(self.remove(&entry));
            } else {
                whole += usize::from(!damaged.contains(&entry.number) && looks_whole(&entry.path));
            }
        }
        outcome
    }

    fn remove(&self, entry: &Entry) -> io::Result<()> {
        let by = self.check()?;
        // Renamed first, so that no reader finds a part of it.
        let removing = self.path.join(names::removing(entry.number, by));
        self.disk.rename(&entry.path, &removing)?;
        self.remove_tree(&removing)
    }

    /// Removes the remains of writers: of this process, which writes nothing now, and of processes that have died, or
    /// were frozen and have lost their claim. Returns why some could not be removed, all of which are moved aside: they take space,
    /// and do no harm. Somebody may have put a folder of their own into an old checkpoint.
    ///
    /// # Errors
    /// If it is not known whether all were moved aside.
    pub fn sweep(&self) -> io::Result<Option<io::Error>> {
        let (by, mut left_over) = (self.check()?, None);
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let left = match name.to_str().and_then(|name| names::leftover(name, by)) {
                Some(Leftover::MoveAside(aside)) => {
                    let aside = self.path.join(aside);
                    gone(self.disk.rename(&entry.path(), &aside))?;
                    aside
                }
                Some(Leftover::Remove) => entry.path(),
                None => continue,
            };
            left_over = left_over.or(self.remove_tree(&left).err());
        }
        Ok(left_over)
    }

    /// Removes a folder of files, or a link itself. Another process may do so at the same time.
    fn remove_tree(&self, folder: &Path) -> io::Result<()> {
        if folder.symlink_metadata().is_ok_and(|about| about.is_symlink()) {
            return gone(self.disk.remove_file(folder));
        }
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            gone(self.disk.remove_file(&entry?.path()))?;
        }
        gone(self.disk.remove_folder(folder))
    }
}

/// What one rank writes of a checkpoint: first its tensors, then each part in a file of its own.
pub(super) struct Part<'a> {
    number: u64,
    pub step: u64,
    world_size: u32,
    /// The folder in which it is written; empty until there is one.
    pub begun: PathBuf,
    tensors: String,
    snapshot: &'a Snapshot,
    parts: Vec<(&'a str, &'a [u8])>,
    /// What has been written.
    pub files: Vec<FileEntry>,
    /// That of all ranks; this rank's own if there is no other.
    pub manifest: Option<Manifest>,
}

impl<'a> Part<'a> {
    /// `tensors` is the name of the file for them.
    pub fn new(number: u64, (step, world_size): (u64, u32), tensors: String, snapshot: &'a Snapshot) -> Self {
        let parts = snapshot.parts.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        let (begun, files) = (PathBuf::new(), Vec::new());
        Self { number, step, world_size, begun, tensors, snapshot, parts, files, manifest: None }
    }

    /// How many files it has.
    pub fn count(&self) -> usize {
        1 + self.parts.len()
    }

    fn is_begun(&self) -> bool {
        !self.begun.as_os_str().is_empty()
    }

    /// The files that were written, the parts by name: with their suffix, the order of the names may differ.
    pub fn entries(&self) -> Vec<FileEntry> {
        let mut entries = self.files.clone();
        if let Some(parts) = entries.get_mut(1..) {
            parts.sort_by(|left, right| left.name.cmp(&right.name));
        }
        entries
    }

    /// Writes the file of this number.
    pub fn write(&mut self, disk: &dyn Disk, number: usize) -> io::Result<()> {
        let written = match number.checked_sub(1).and_then(|part| self.parts.get(part)) {
            Some((name, bytes)) => {
                write_file(disk, &self.begun, format!("{name}{PART}"), std::iter::once(*bytes))?
            }
            None => {
                let header = self.snapshot.header().map_err(io::Error::other)?;
                let sorted = self.snapshot.in_order();
                let elements = sorted.iter().map(|(_, tensor)| (*tensor.bytes).as_ref());
                let contents = std::iter::once(header.as_slice()).chain(elements);
                write_file(disk, &self.begun, self.tensors.clone(), contents)?
            }
        };
        self.files.push(written);
        Ok(())
    }

    fn write_manifest(&mut self, disk: &dyn Disk) -> io::Result<()> {
        let of_all = self.manifest.take();
        let own = || Manifest::new(self.step, self.world_size, self.entries());
        let bytes = of_all.unwrap_or_else(own).encode()?;
        if bytes.len() as u64 > MAX_MANIFEST {
            let length = bytes.len();
            return Err(io::Error::other(format!(
                "the manifest would take {length} bytes, and may take {MAX_MANIFEST}: cut fewer tensors into slices"
            )));
        }
        write_file(disk, &self.begun, MANIFEST.to_owned(), std::iter::once(bytes.as_slice())).map(drop)
    }
}

/// Does one operation after another. `operate` gets the failure so far. Returns the first error; or why the ranks could not gather
/// what they have written: an own failure may be a consequence, since the leader removes the folder then.
pub(super) fn carry_out<E>(
    mut write: WriteOrder,
    mut operate: impl FnMut(Operation, Option<&E>) -> Result<(), (Outcome, E)>,
) -> Result<(), E> {
    let mut failure = None;
    while let Some(operation) = write.next() {
        let outcome = match operate(operation, failure.as_ref()) {
            Ok(()) => Outcome::Done,
            Err((Outcome::Lost, error)) if operation == Operation::Gather => {
                failure = Some(error);
                Outcome::Lost
            }
            Err((outcome, error)) => {
                failure.get_or_insert(error);
                outcome
            }
        };
        write.done(outcome);
    }
    failure.map_or(Ok(()), Err)
}

fn write_file<'a>(
    disk: &dyn Disk,
    folder: &Path,
    name: String,
    contents: impl Iterator<Item = &'a [u8]>,
) -> io::Result<FileEntry> {
    let mut file = disk.create_file(&folder.join(&name))?;
    let (mut length, mut checksum) = (0, Checksum::default());
    for piece in contents.flat_map(|bytes| bytes.chunks(PIECE)) {
        disk.write(&mut file, piece)?;
        checksum.update(piece);
        length += piece.len() as u64;
    }
    disk.sync_file(&file)?;
    Ok(FileEntry { name, length, checksum: checksum.finish() })
}

/// Ignores an error that the file does not exist: another process has removed or renamed it.
fn gone(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

/// A folder with the name of a checkpoint.
#[derive(Debug)]
pub(super) struct Entry {
    pub number: u64,
    pub path: PathBuf,
}

/// All folders with the name of a checkpoint, the newest first.
pub(super) fn list(folder: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Some(number) = entry.file_name().to_str().and_then(names::checkpoint_number) {
            entries.push(Entry { number, path: entry.path() });
        }
    }
    entries.sort_by_key(|entry| Reverse(entry.number));
    Ok(entries)
}

/// The number of the next checkpoint.
pub(super) fn next_number(folder: &Path) -> io::Result<u64> {
    let next = list(folder)?.first().map_or(1, |newest| newest.number + 1);
    // Nobody would find a checkpoint of a larger number.
    match names::checkpoint_number(&names::complete(next, 0)) {
        Some(next) => Ok(next),
        None => Err(io::Error::other(format!("no checkpoint has a number after {}: move it away", next - 1))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::claims::Claimant;
    use super::super::disk::SystemDisk;
    use super::super::writer::Writer;
    use super::*;

    #[test]
    fn what_earlier_writes_have_left_goes_when_the_next_one_begins() {
        let root = tempfile::tempdir().unwrap();
        let claim = |own| Owner::claim(root.path(), &Claimant::default(), own).unwrap();
        let folder = Folder {
            path: root.path().to_owned(),
            disk: Box::new(SystemDisk),
            owner: Mutex::new(claim(None)),
        };
        let left = || {
            let entries = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name());
            entries.filter(|name| !name.to_string_lossy().starts_with(".owner")).collect::<Vec<_>>()
        };
        let nothing = Snapshot::default();
        let begin = |number| {
            let mut part = Part::new(number, (10 * number, 1), TENSORS.to_owned(), &nothing);
            folder.operate(&mut part, Operation::MakeFolder).unwrap();
            part
        };
        let mut part = begin(1);
        folder.operate(&mut part, Operation::GiveUp).unwrap();
        let begun = part.begun;
        // A rank that is slow adds its part after rank 0 has given up, or while it does.
        fs::create_dir(&begun).unwrap();
        fs::write(begun.join("rank-00001-of-00002.safetensors"), "late").unwrap();
        folder.write(2, 20, 1, &Snapshot::default()).unwrap();
        assert_eq!(left(), ["00000002-step-20"]);
        // The same process opens the folder anew in between.
        begin(3);
        let before = folder.owner.lock().number();
        *folder.owner.lock() = claim(Some(before));
        begin(4);
        assert_eq!(left().len(), 2, "{:?}", left());
        // A checkpoint that a later claim has begun is not touched.
        let later = root.path().join(names::writing(9, folder.owner.lock().number() + 1));
        fs::create_dir(&later).unwrap();
        folder.write(5, 50, 1, &Snapshot::default()).unwrap();
        assert!(later.is_dir() && left().len() == 3, "{:?}", left());
    }

    #[test]
    fn what_others_have_put_into_the_folder_is_not_removed_and_stops_nobody() {
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let claim = Owner::claim(root.path(), &Claimant::default(), None).unwrap();
        let folder =
            Folder { path: root.path().to_owned(), disk: Box::new(SystemDisk), owner: Mutex::new(claim) };
        let precious = elsewhere.path().join("precious");
        fs::write(&precious, "of somebody else").unwrap();
        // A checkpoint that was moved, and a link where a writer's remains could be.
        let moved = root.path().join(names::complete(1, 10));
        let remains = root.path().join(names::removing(7, 1));
        for link in [&moved, &remains] {
            std::os::unix::fs::symlink(elsewhere.path(), link).unwrap();
        }
        for number in 2..5 {
            folder.write(number, 10 * number, 1, &Snapshot::default()).unwrap();
            folder.rotate(1).unwrap();
        }
        let steps: Vec<u64> = list(root.path()).unwrap().iter().map(|entry| entry.number).collect();
        assert_eq!(steps, [4, 1]);
        assert!(precious.is_file() && moved.is_symlink() && !remains.is_symlink());
        // A folder within a checkpoint is not removed with it. The next writer begins all the same.
        let notes = root.path().join(names::complete(4, 40)).join("notes");
        fs::create_dir(&notes).unwrap();
        folder.write(5, 50, 1, &Snapshot::default()).unwrap();
        assert!(folder.rotate(1).is_err());
        drop(folder);
        let writer = Writer::open(root.path(), &Claimant::default()).unwrap();
        let kept = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().path().join("notes"));
        assert_eq!(kept.filter(|notes| notes.is_dir()).count(), 1);
        drop(writer);
    }

    #[test]
    fn a_checkpoint_that_was_copied_there_meanwhile_takes_no_place_of_those_that_follow() {
        let root = tempfile::tempdir().unwrap();
        let claim = Owner::claim(root.path(), &Claimant::default(), None).unwrap();
        let folder =
            Folder { path: root.path().to_owned(), disk: Box::new(SystemDisk), owner: Mutex::new(claim) };
        folder.write(1, 10, 1, &Snapshot::default()).unwrap();
        // From another run.
        folder.write(7, 70, 1, &Snapshot::default()).unwrap();
        for (number, step) in [(2, 20), (3, 30)] {
            folder.write(number, step, 1, &Snapshot::default()).unwrap();
            folder.rotate(1).unwrap();
        }
        let left: Vec<PathBuf> = list(root.path()).unwrap().into_iter().map(|entry| entry.path).collect();
        assert_eq!(left, [root.path().join(names::complete(9, 30))]);
    }

    #[test]
    fn a_checkpoint_that_nobody_would_find_is_not_begun() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(next_number(root.path()).unwrap(), 1);
        fs::create_dir(root.path().join(names::complete(u64::MAX / 2, 1))).unwrap();
        assert!(next_number(root.path()).unwrap_err().to_string().contains("move it away"));
    }

    #[test]
    fn the_error_is_a_rank_s_own_unless_it_may_follow_from_the_group_s() {
        for role in [Role::Leader, Role::Member] {
            for (lost, said) in [
                (Operation::Announce, if role == Role::Leader { "own" } else { "lost" }),
                (Operation::Gather, "lost"),
                (Operation::Conclude, "own"),
            ] {
                // The folder cannot be made, or is not to be seen, or a file cannot be written.
                let own = match (role, lost) {
                    (Role::Leader, Operation::Announce) => Operation::MakeFolder,
                    _ => Operation::WriteFile(0),
                };
                let outcome = carry_out(WriteOrder::new(role, 1), |operation, _| match operation {
                    now if now == lost => Err((Outcome::Lost, "lost")),
                    now if now == own => Err((Outcome::Failed, "own")),
                    _ => Ok(()),
                });
                assert_eq!(outcome, Err(said), "{role:?} {lost:?}");
            }
        }
    }
}
