//! What is left on the disk when a save is cut off: after each operation, with whatever part of it survived.
//!
//! A real save, of rank 0 alone or of two ranks together, is recorded, operation by operation. Each test then plays a part of the record onto a copy of what was
//! there before, as a crash would leave it, and looks for the newest checkpoint there with the real code.

mod crashes;
mod reading;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::RandomState;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;

use super::claims::Claimant;
use super::disk::{Disk, SystemDisk};
use super::folder::{self, Folder, Part, carry_out};
use super::manifest::shard;
use super::newest::{self, Found, Search};
use super::owner::Owner;
use super::saved::Contents;
use super::snapshot::Snapshot;
use super::writes::{Operation, Outcome, Role, WriteOrder};
use super::{Checkpoints, layout, sharded};
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::rank::Rank;
use phalanx_core::testing::{Fabric, run};

/// What was done, to paths below the folder of checkpoints.
#[derive(Clone, Debug)]
enum Op {
    CreateFolder(PathBuf),
    CreateFile(PathBuf),
    Write(PathBuf, Vec<u8>),
    SyncFile(PathBuf),
    SyncFolder(PathBuf),
    Rename(PathBuf, PathBuf),
    RemoveFile(PathBuf),
    RemoveFolder(PathBuf),
}

/// Notes what is done; lets one operation fail, and from then on all that need room.
#[derive(Clone, Debug, Default)]
pub(super) struct TestDisk {
    root: PathBuf,
    log: Arc<Mutex<Vec<Op>>>,
    /// The file that was made last: files are written one after the other.
    open: Arc<Mutex<PathBuf>>,
    full_from: Option<usize>,
}

impl TestDisk {
    pub(super) fn at(root: &Path) -> Self {
        Self { root: root.to_owned(), ..Self::default() }
    }

    fn note(&self, op: Op) -> io::Result<()> {
        let mut log = self.log.lock();
        let frees = matches!(op, Op::RemoveFile(_) | Op::RemoveFolder(_));
        let full = self.full_from.is_some_and(|from| log.len() >= from) && !frees;
        log.push(op);
        if full { Err(ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).unwrap().to_owned()
    }
}

impl Disk for TestDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.note(Op::CreateFolder(self.below(path)))?;
        SystemDisk.create_folder(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        *self.open.lock() = self.below(path);
        self.note(Op::CreateFile(self.below(path)))?;
        SystemDisk.create_file(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        let noted = self.note(Op::Write(self.open.lock().clone(), bytes.to_vec()));
        // A full disk takes what it has room for.
        let room = if noted.is_ok() { bytes.len() } else { bytes.len() / 2 };
        file.write_all(&bytes[..room])?;
        noted
    }

    fn sync_file(&self, _: &File) -> io::Result<()> {
        self.note(Op::SyncFile(self.open.lock().clone()))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.note(Op::SyncFolder(self.below(path)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.note(Op::Rename(self.below(from), self.below(to)))?;
        SystemDisk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.note(Op::RemoveFile(self.below(path)))?;
        SystemDisk.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.note(Op::RemoveFolder(self.below(path)))?;
        SystemDisk.remove_folder(path)
    }
}

/// The state after `step`.
pub(super) fn snapshot(step: u64) -> Snapshot {
    let mut snapshot = Snapshot::default();
    snapshot.tensor("weights", &[2, 50], &[step as f32; 100]).unwrap();
    snapshot.tensor("steps", &[], &[step as i64]).unwrap();
    snapshot.value("optimizer", &vec![step; 20]).unwrap();
    snapshot.part("empty", []).unwrap();
    snapshot
}

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug)]
enum Save {
    Whole,
    Sharded,
}

const SAVES: [Save; 2] = [Save::Whole, Save::Sharded];

impl Save {
    /// Writes the state after `step`; of a sharded one the other rank's part on the same disk.
    fn write(self, folder: &Folder, disk: &dyn Disk, number: u64, step: u64) -> io::Result<()> {
        match self {
            Self::Whole => folder.write(number, step, 4, &snapshot(step)),
            Self::Sharded => {
                let ranks = [half(step, 0), half(step, 1)];
                let proposed = (0..).zip(&ranks).map(|(rank, half)| (rank, half.propose().unwrap()));
                let tensors = layout::merged(proposed, &RandomState::new()).unwrap();
                let mut parts =
                    [0, 1].map(|rank| Part::new(number, (step, 2), shard(rank, 2), &ranks[rank as usize]));
                carry_out(WriteOrder::new(Role::Leader, parts[0].count()), |operation, _| {
                    let [own, other] = &mut parts;
                    let outcome = match operation {
                        Operation::Announce => {
                            other.begun = own.begun.clone();
                            Ok(())
                        }
                        Operation::Gather => (0..other.count()).try_for_each(|file| other.write(disk, file)),
                        Operation::SeeFiles => {
                            let files = vec![own.entries(), other.entries()];
                            own.manifest = Some(sharded::manifest((step, 2), &tensors, files).unwrap());
                            Ok(())
                        }
                        own_operation => folder.operate(own, own_operation),
                    };
                    outcome.map_err(|error| (Outcome::Failed, error))
                })
            }
        }
    }
}

/// What one of two ranks has of the state after `step`.
fn half(step: u64, rank: usize) -> Snapshot {
    let mut snapshot = Snapshot::default();
    snapshot.slice("weights", &[2, 50], &[rank, 0], &[1, 50], &[step as f32; 50]).unwrap();
    if rank == 0 {
        snapshot.tensor("steps", &[], &[step as i64]).unwrap();
        snapshot.part("empty", []).unwrap();
    }
    snapshot.value(&format!("random-{rank}"), &vec![step; 20]).unwrap();
    snapshot
}

/// A folder with checkpoints of the steps 1 and 2, made by nobody's crash.
pub(super) fn before() -> TempDir {
    // In memory where that can be: thousands of folders are made and removed.
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let folder = system(root.path());
    for step in [1, 2] {
        folder.write(step, step, 4, &snapshot(step)).unwrap();
    }
    root
}

/// The folder at `path`, on a disk that syncs nothing: that would take most of the time of these tests.
fn system(path: &Path) -> Folder {
    on(path, TestDisk::at(path))
}

/// The folder at `path`, claimed, on `disk`.
fn on(path: &Path, disk: impl Disk) -> Folder {
    let owner = Owner::claim(path, &Claimant::default(), None).unwrap();
    Folder { path: path.to_owned(), disk: Box::new(disk), owner: Mutex::new(owner) }
}

/// Saves step 3 over [`before`], keeping one checkpoint; gives what was done.
fn record(save: Save) -> Vec<Op> {
    let root = before();
    let disk = TestDisk::at(root.path());
    let folder = on(root.path(), disk.clone());
    save.write(&folder, &disk, 3, 3).unwrap();
    folder.rotate(1).unwrap();
    disk.log.lock().clone()
}

/// The newest checkpoint in `root`: of one of `steps`, and in every byte what was written.
pub(super) fn assert_found(root: &Path, steps: &[u64], what: &dyn std::fmt::Debug) -> (u64, usize) {
    let (found, skipped) = newest::find(root).unwrap();
    let found = found.unwrap_or_else(|| panic!("nothing is left: {what:?}, {skipped:?}"));
    assert!(steps.contains(&found.step), "step {} at {what:?}, {skipped:?}", found.step);
    assert_eq!(found.contents, saved(&found), "{what:?}");
    (found.step, skipped.len())
}

/// The files of a checkpoint like this one: of a sharded one the manifest, whose checksums say what is in the others.
fn saved(like: &Found) -> Contents {
    static SAVED: Mutex<BTreeMap<(bool, u64), Contents>> = Mutex::new(BTreeMap::new());
    let mut saved = SAVED.lock();
    let contents = saved.entry((like.is_sharded, like.step)).or_insert_with(|| {
        let root = tempfile::tempdir().unwrap();
        let save = if like.is_sharded { Save::Sharded } else { Save::Whole };
        save.write(&system(root.path()), &TestDisk::at(root.path()), 1, like.step).unwrap();
        let Found { contents, .. } = newest::find(root.path()).unwrap().0.unwrap();
        contents
    });
    contents.clone()
}

/// A crash must not stand in the way of the next run.
fn assert_goes_on(root: &Path, what: &dyn std::fmt::Debug) {
    let folder = system(root);
    folder.sweep().unwrap();
    let number = folder::next_number(root).unwrap();
    folder.write(number, 9, 4, &snapshot(9)).unwrap();
    folder.rotate(1).unwrap();
    assert_found(root, &[9], what);
    let left: Vec<_> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    // The checkpoint and the claim.
    assert_eq!(left.len(), 2, "{left:?} after {what:?}");
}
