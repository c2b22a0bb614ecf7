//! What is left on the disk when a save is cut off: after each operation, with whatever part of it survived.
//!
//! A real save, of rank 0 alone or of two ranks together, is recorded, operation by operation. Each test then plays a part of the record onto a copy of what was
//! there before, as a crash would leave it, and looks for the newest checkpoint there with the real code.

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

/// How much of what was written to a file, but not synced, is on the disk.
#[derive(Clone, Copy, Debug)]
enum Data {
    All,
    Half,
    None,
    /// Its length is, its contents are not.
    Zeros,
}

/// Plays `op` onto `root`. An operation that depends on something that did not survive has no effect.
fn play(root: &Path, op: &Op, data: Data) {
    let _ = match op {
        Op::CreateFolder(path) => fs::create_dir(root.join(path)),
        Op::CreateFile(path) => File::create(root.join(path)).map(drop),
        Op::Write(path, bytes) => append(&root.join(path), bytes, data),
        Op::Rename(from, to) => fs::rename(root.join(from), root.join(to)),
        Op::RemoveFile(path) => fs::remove_file(root.join(path)),
        Op::RemoveFolder(path) => fs::remove_dir(root.join(path)),
        Op::SyncFile(_) | Op::SyncFolder(_) => Ok(()),
    };
}

fn append(path: &Path, bytes: &[u8], data: Data) -> io::Result<()> {
    let mut file = File::options().append(true).open(path)?;
    match data {
        Data::All => file.write_all(bytes),
        Data::Half => file.write_all(&bytes[..bytes.len() / 2]),
        Data::None => Ok(()),
        Data::Zeros => file.write_all(&vec![0; bytes.len()]),
    }
}

/// The folder in which `op` changes a name.
fn named_in(op: &Op) -> Option<&Path> {
    match op {
        Op::CreateFolder(path) | Op::CreateFile(path) | Op::RemoveFile(path) | Op::RemoveFolder(path) => {
            path.parent()
        }
        Op::Rename(_, to) => to.parent(),
        Op::Write(..) | Op::SyncFile(_) | Op::SyncFolder(_) => None,
    }
}

/// Whether `ops[index]` is sure to survive a loss of power after all of `ops`.
fn is_durable(ops: &[Op], index: usize) -> bool {
    ops[index..].iter().any(|later| match (&ops[index], later) {
        (Op::Write(path, _), Op::SyncFile(synced)) => path == synced,
        (op, Op::SyncFolder(synced)) => named_in(op) == Some(synced.as_path()),
        _ => false,
    })
}

/// The steps that may be found after `ops`: once the new name is on the disk, only the new one.
fn allowed(ops: &[Op]) -> &'static [u64] {
    let named = ops.iter().position(|op| matches!(op, Op::Rename(..)));
    match named {
        None => &[2],
        Some(rename) if is_durable(ops, rename) => &[3],
        Some(_) => &[2, 3],
    }
}

#[test]
fn a_killed_writer_leaves_a_whole_checkpoint_wherever_it_is() {
    SAVES.into_iter().for_each(|save| kill_anywhere(&record(save)));
}

fn kill_anywhere(ops: &[Op]) {
    assert!(ops.len() > 25, "{ops:?}");
    let mut found = BTreeSet::new();
    for end in 0..=ops.len() {
        let root = before();
        ops[..end].iter().for_each(|op| play(root.path(), op, Data::All));
        let (step, skipped) = assert_found(root.path(), allowed(&ops[..end]), &ops.get(end));
        // Nothing half done has the name of a checkpoint.
        assert_eq!(skipped, 0, "{:?}", ops.get(end));
        found.insert(step);
        assert_goes_on(root.path(), &ops.get(end));
    }
    assert_eq!(found, BTreeSet::from([2, 3]));
}

#[test]
fn a_write_that_is_cut_off_anywhere_is_no_checkpoint() {
    SAVES.into_iter().for_each(|save| cut_off_anywhere(&record(save)));
}

fn cut_off_anywhere(ops: &[Op]) {
    for (end, op) in ops.iter().enumerate() {
        let Op::Write(path, bytes) = op else { continue };
        for length in 0..bytes.len() {
            // Were it renamed all the same, as by a disk that lies about what it has synced, it is passed over.
            for renamed in [false, true] {
                let root = before();
                ops[..end].iter().for_each(|op| play(root.path(), op, Data::All));
                play(root.path(), &Op::Write(path.clone(), bytes[..length].to_vec()), Data::All);
                if renamed {
                    let named = ops.iter().find(|op| matches!(op, Op::Rename(..))).unwrap();
                    play(root.path(), named, Data::All);
                }
                let (_, skipped) = assert_found(root.path(), &[2], &(path, length));
                assert_eq!(skipped, usize::from(renamed), "{path:?} cut at {length}");
            }
        }
    }
}

/// Loses power after each of `ops`, in every way; how often that was, or what was lost.
fn lose_power(ops: &[Op]) -> Result<usize, String> {
    let mut crashes = 0;
    for end in 0..=ops.len() {
        let ops = &ops[..end];
        let pending: Vec<usize> =
            (0..end).filter(|index| named_in(&ops[*index]).is_some() && !is_durable(ops, *index)).collect();
        let unsynced = (0..end).any(|index| matches!(ops[index], Op::Write(..)) && !is_durable(ops, index));
        let data: &[Data] =
            if unsynced { &[Data::All, Data::Half, Data::None, Data::Zeros] } else { &[Data::All] };
        for kept in subsets(pending.len()) {
            for data in data {
                let root = before();
                for (index, op) in ops.iter().enumerate() {
                    let lost = pending.iter().position(|pending| *pending == index);
                    if lost.is_none_or(|place| kept & (1 << place) != 0) {
                        let data = if is_durable(ops, index) { Data::All } else { *data };
                        play(root.path(), op, data);
                    }
                }
                let (found, skipped) = newest::find(root.path()).map_err(|error| error.to_string())?;
                let found = found.ok_or_else(|| format!("nothing is left after {end}: {skipped:?}"))?;
                if !allowed(ops).contains(&found.step) || found.contents != saved(&found) {
                    return Err(format!("step {} is found after {end}: {skipped:?}", found.step));
                }
                crashes += 1;
            }
        }
    }
    Ok(crashes)
}

#[test]
fn a_loss_of_power_leaves_a_whole_checkpoint_whatever_the_disk_had_not_written() {
    for save in SAVES {
        let crashes = lose_power(&record(save)).unwrap();
        println!("{save:?}: {crashes} crashes");
        assert!(crashes > 500, "{crashes}");
    }
}

#[test]
fn every_sync_is_needed() {
    // Tensors, one part with contents, the manifest; the folder, and the one above it.
    assert_eq!(needed_syncs(&record(Save::Whole)), 5);
    // Tensors and a part of either rank.
    assert_eq!(needed_syncs(&record(Save::Sharded)), 7);
}

/// Leaves out each sync of what was written; how many that are, without any of which something would be lost.
fn needed_syncs(ops: &[Op]) -> usize {
    let is_written = |file: &PathBuf| ops.iter().any(|op| matches!(op, Op::Write(path, _) if path == file));
    let syncs = (0..ops.len()).filter(|index| match &ops[*index] {
        Op::SyncFile(file) => is_written(file),
        op => matches!(op, Op::SyncFolder(_)),
    });
    let mut left_out = 0;
    for index in syncs {
        let mut fewer = ops.to_vec();
        let sync = fewer.remove(index);
        assert!(lose_power(&fewer).is_err(), "nothing is lost without {sync:?}");
        left_out += 1;
    }
    left_out
}

/// Every choice among `count` operations; of many, those that keep or lose at most two.
fn subsets(count: usize) -> impl Iterator<Item = u32> {
    let few = move |kept: &u32| kept.count_ones() <= 2 || kept.count_ones() as usize + 2 >= count;
    (0..1u32 << count).filter(move |kept| count <= 6 || few(kept))
}

#[test]
fn a_full_disk_costs_the_new_checkpoint_at_most() {
    for (save, full_from) in
        SAVES.into_iter().flat_map(|save| (0..record(save).len()).map(move |from| (save, from)))
    {
        let root = before();
        let disk = TestDisk { full_from: Some(full_from), ..TestDisk::at(root.path()) };
        let folder = on(root.path(), disk.clone());
        let outcome = save.write(&folder, &disk, 3, 3);
        let steps: &[u64] = if outcome.is_ok() { &[3] } else { &[2, 3] };
        let _ = folder.rotate(1);
        assert_found(root.path(), steps, &disk.log.lock().last());
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::StorageFull);
            // The room that it took is free again.
            let names = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name());
            assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with(".writing")));
        }
        drop(folder);
        assert_goes_on(root.path(), &full_from);
    }
}

#[test]
fn any_damaged_bit_is_noticed_and_the_one_before_is_taken() {
    for save in SAVES {
        let root = before();
        save.write(&system(root.path()), &TestDisk::at(root.path()), 3, 3).unwrap();
        let noticed = damage(root.path(), &root.path().join("00000003-step-3"));
        assert!(noticed > 1000, "{noticed}");
        assert_found(root.path(), &[3], &"repaired");
    }
}

/// Damages each byte of the checkpoint in `folder`, and repairs it; how many that were.
fn damage(root: &Path, folder: &Path) -> usize {
    let mut noticed = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let whole = fs::read(&path).unwrap();
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1 << (place % 8);
            fs::write(&path, &damaged).unwrap();
            match newest::find(root) {
                Ok((found, skipped)) => {
                    assert_eq!((found.unwrap().step, skipped.len()), (2, 1), "byte {place} of {path:?}");
                }
                // The version alone cannot be told from a later one's.
                Err(error) => assert!(error.to_string().contains("version"), "{error}"),
            }
            noticed += 1;
        }
        fs::write(&path, &whole).unwrap();
    }
    noticed
}

#[test]
fn every_shard_is_a_file_that_other_programs_read() {
    let root = tempfile::tempdir().unwrap();
    Save::Sharded.write(&system(root.path()), &TestDisk::at(root.path()), 1, 7).unwrap();
    for rank in 0..2 {
        let bytes = fs::read(root.path().join("00000001-step-7").join(shard(rank, 2))).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let slice = theirs.tensor(&format!("weights[{rank}:{}, 0:50]", rank + 1)).unwrap();
        assert_eq!((slice.dtype(), slice.shape()), (safetensors::Dtype::F32, &[1, 50][..]));
        assert_eq!(slice.data(), bytemuck::cast_slice::<f32, u8>(&[7.0; 50]));
        assert_eq!(theirs.len(), if rank == 0 { 2 } else { 1 });
    }
}

#[test]
fn links_and_missing_files_are_no_part_of_a_checkpoint() {
    let root = before();
    let file = root.path().join("00000002-step-2/optimizer.part");
    fs::remove_file(&file).unwrap();
    let (found, skipped) = newest::find(root.path()).unwrap();
    assert_eq!(found.unwrap().step, 1);
    assert!(skipped[0].cause.contains("optimizer.part is missing"), "{skipped:?}");
    // The right bytes, but elsewhere.
    std::os::unix::fs::symlink(root.path().join("00000001-step-1/optimizer.part"), &file).unwrap();
    let error = newest::find(root.path()).unwrap_err();
    assert!(error.to_string().contains("optimizer.part") && error.remedy().is_some(), "{error}");
}

#[test]
fn a_checkpoint_on_a_disk_that_is_not_there_is_not_passed_over() {
    let root = before();
    let [here, there, gone] = ["00000002-step-2", "moved", "gone"].map(|name| root.path().join(name));
    fs::rename(&here, &there).unwrap();
    std::os::unix::fs::symlink(&there, &here).unwrap();
    assert_found(root.path(), &[2], &"behind a link");
    fs::rename(&there, gone).unwrap();
    let error = newest::find(root.path()).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("00000002-step-2: it is a link that leads nowhere"), "{said}");
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("move it away")), "{said}");
    fs::remove_file(&here).unwrap();
    assert_found(root.path(), &[1], &"without the link");
}

#[test]
fn when_all_are_damaged_each_is_named_and_none_is_replaced() {
    let root = before();
    fs::remove_file(root.path().join("00000002-step-2/optimizer.part")).unwrap();
    assert_found(root.path(), &[1], &"one is whole");
    let tensors = root.path().join("00000001-step-1/tensors.safetensors");
    File::options().write(true).open(tensors).unwrap().set_len(10).unwrap();
    let error = newest::find(root.path()).unwrap_err();
    let said = error.to_string();
    assert!(error.is_environment() && said.contains("all 2 checkpoints in "), "{said}");
    assert!(said.contains("00000002-step-2: optimizer.part is missing"), "{said}");
    assert!(said.contains("00000001-step-1: tensors.safetensors has 10 "), "{said}");
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("move these folders away")), "{said}");
    // Moved away, there is nothing to resume from.
    for folder in ["00000001-step-1", "00000002-step-2"] {
        fs::rename(root.path().join(folder), root.path().join(format!("damaged-{folder}"))).unwrap();
    }
    assert!(newest::find(root.path()).unwrap().0.is_none());
}

/// All names in a folder, in order.
fn names(folder: &Path) -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

#[test]
fn who_only_reads_needs_no_claim_and_writes_nothing() {
    let root = before();
    let training = system(root.path());
    let there = names(root.path());
    run(2, Fabric::InProcess, |group| {
        let saved = Checkpoints::read(root.path(), &group).unwrap().unwrap();
        assert_eq!(saved.step(), 2);
        let error = Checkpoints::read(root.path().join("none"), &group).unwrap_err();
        assert!(error.to_string().contains("cannot list the checkpoints in"), "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("is the path right")), "{error}");
    });
    assert_eq!(names(root.path()), there);
    training.write(3, 3, 4, &snapshot(3)).unwrap();
    let empty = tempfile::tempdir().unwrap();
    assert!(Checkpoints::read(empty.path(), &ProcessGroup::alone().unwrap()).unwrap().is_none());
    assert_eq!(names(empty.path()).len(), 0);
}

#[test]
fn a_checkpoint_that_another_job_removes_while_it_is_looked_for_is_no_damage() {
    let root = before();
    let training = system(root.path());
    fs::remove_file(root.path().join("00000002-step-2/manifest.json")).unwrap();
    training.write(3, 3, 4, &snapshot(3)).unwrap();
    let mut search = Search::new(root.path()).unwrap();
    training.write(4, 4, 4, &snapshot(4)).unwrap();
    training.rotate(1).unwrap();
    let found = search.next(Deadline::after(Duration::from_secs(60))).unwrap().unwrap();
    assert_eq!((found.step, search.skipped.len()), (4, 0));
    // What is damaged is said once, however often all is listed.
    fs::remove_file(root.path().join("00000004-step-4/manifest.json")).unwrap();
    training.write(5, 5, 4, &snapshot(5)).unwrap();
    fs::remove_file(root.path().join("00000005-step-5/manifest.json")).unwrap();
    let mut search = Search::new(root.path()).unwrap();
    fs::remove_dir_all(root.path().join("00000004-step-4")).unwrap();
    let error = search.next(Deadline::after(Duration::from_secs(60))).unwrap_err();
    assert!(error.to_string().contains("the only checkpoint in"), "{error}");
    assert_eq!(search.skipped.len(), 1);
}

#[test]
fn of_two_with_one_number_none_is_chosen() {
    let root = before();
    let moved = root.path().join("moved");
    fs::rename(root.path().join("00000002-step-2"), &moved).unwrap();
    // The number is free again, and the run goes on from the one before.
    system(root.path()).write(2, 7, 4, &snapshot(7)).unwrap();
    assert_found(root.path(), &[7], &"moved away");
    // Also where another program has written the number with fewer digits.
    for name in ["00000002-step-2", "2-step-2"] {
        let back = root.path().join(name);
        fs::rename(&moved, &back).unwrap();
        let error = newest::find(root.path()).unwrap_err();
        let said = error.to_string();
        assert!(error.is_environment() && said.contains("have the number 2, 00000002-step-"), "{said}");
        assert!(
            said.contains("00000002-step-7") && said.contains(name) && error.remedy().is_some(),
            "{said}"
        );
        fs::rename(&back, &moved).unwrap();
    }
    // Older ones may be two, as long as none of them is needed.
    fs::rename(&moved, root.path().join("00000002-step-2")).unwrap();
    system(root.path()).write(3, 8, 4, &snapshot(8)).unwrap();
    assert_found(root.path(), &[8], &"a newer one");
}

#[test]
fn a_manifest_longer_than_any_is_no_damage() {
    let root = before();
    let manifest = root.path().join("00000002-step-2/manifest.json");
    File::options().write(true).open(manifest).unwrap().set_len((64 << 20) + 1).unwrap();
    let error = newest::find(root.path()).unwrap_err();
    assert!(error.to_string().contains("manifest.json has 67108865 bytes"), "{error}");
}

#[test]
fn the_newest_whole_one_is_never_removed() {
    let root = before();
    let folder = system(root.path());
    // The newest by number is torn: the one before must stay.
    folder.write(3, 3, 4, &snapshot(3)).unwrap();
    fs::remove_file(root.path().join("00000003-step-3/manifest.json")).unwrap();
    folder.rotate(1).unwrap();
    assert_found(root.path(), &[2], &"after rotation");
    assert!(!root.path().join("00000001-step-1").exists());
}

#[test]
fn a_checkpoint_that_was_found_damaged_takes_no_good_one_s_place() {
    let root = before();
    let tensors = root.path().join("00000002-step-2/tensors.safetensors");
    let mut bytes = fs::read(&tensors).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&tensors, bytes).unwrap();
    let checkpoints = Checkpoints::open(root.path(), &ProcessGroup::alone().unwrap()).unwrap().keep(2);
    assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 1);
    for (step, left) in [(3, vec![3, 2, 1]), (4, vec![4, 3])] {
        checkpoints.save(step, |snapshot| snapshot.value("step", &step)).unwrap();
        checkpoints.finish().unwrap();
        let numbers: Vec<u64> = folder::list(root.path()).unwrap().iter().map(|entry| entry.number).collect();
        assert_eq!(numbers, left);
    }
}

#[test]
fn another_rank_s_error_is_the_cause_until_something_else_is_called() {
    let group = ProcessGroup::alone().unwrap();
    let cause = group.note_remote_error(Error::aborted("its disk is full").with_peer(Rank::new(1)));
    assert_eq!(group.remote_error().map(|told| told.to_string()), Some(cause.to_string()));
    group.barrier().unwrap();
    assert!(group.remote_error().is_none());
}

#[test]
fn the_others_wait_until_rank_0_has_opened_the_folder_whatever_the_group_s_time_out() {
    let root = tempfile::tempdir().unwrap();
    // Another job's: rank 0 waits whether it gives the folder back.
    let other = Claimant { job: Some("other".to_owned()), round: 1 };
    let _owner = Owner::claim(root.path(), &other, None).unwrap();
    run(2, Fabric::InProcess, |group| {
        let impatient = group.with_timeout(Duration::from_millis(100));
        let error = Checkpoints::open(root.path(), &impatient).unwrap_err();
        assert!(error.to_string().contains("another process writes checkpoints"), "{error}");
        assert!(group.failure().is_none());
    });
}

#[test]
fn the_others_wait_for_the_reading_anew_once_the_write_in_flight_has_ended() {
    let root = before();
    let (send, receive) = std::sync::mpsc::channel::<(ProcessGroup, u64)>();
    let (send, receive) = (Mutex::new(Some(send)), Mutex::new(receive));
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
        let saved = if group.rank().is_main() {
            checkpoints.newest_by(|path| {
                let (other, calls) = receive.lock().recv().unwrap();
                // The other rank has heard of the end of the write, said what is in its folder, and called something else.
                let deadline = Deadline::after(Duration::from_secs(60));
                while other.calls() < calls + 3 {
                    assert!(!deadline.has_passed(), "rank 1 waits for the first call still");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Search::new(path)
            })
        } else {
            send.lock().take().unwrap().send((group.clone(), group.calls())).unwrap();
            checkpoints.newest()
        };
        assert_eq!(saved.unwrap().unwrap().step(), 2);
    });
}

/// Memory that the thread that writes reads when it may.
struct Held(std::thread::ThreadId, Mutex<std::sync::mpsc::Receiver<()>>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        if std::thread::current().id() != self.0 {
            // An error says the same: nobody holds it any more.
            let _ = self.1.lock().recv();
        }
        &[0; 4]
    }
}

#[test]
fn a_state_is_not_copied_while_the_copy_of_the_one_before_is_written() {
    let (root, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(root.path(), &group).unwrap();
    let (release, held) = std::sync::mpsc::channel();
    let lent = Held(std::thread::current().id(), Mutex::new(held));
    checkpoints.save(1, |snapshot| snapshot.tensor_bytes("lent", DType::F32, &[1], lent)).unwrap();
    let checkpoints = checkpoints.with_timeout(Duration::from_millis(20));
    let error = checkpoints.save(2, |_| panic!("it was copied")).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("step 1 is still being written"), "{error}");
    drop(release);
    let checkpoints = checkpoints.with_timeout(Duration::from_secs(60));
    checkpoints.save(3, |snapshot| snapshot.value("step", &3)).unwrap();
    checkpoints.finish().unwrap();
    assert_eq!(folder::list(root.path()).unwrap().len(), 2);
}
