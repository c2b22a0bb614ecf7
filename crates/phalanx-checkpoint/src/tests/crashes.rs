//! A record that is cut off: by a killed process, a loss of power, a full disk.

use super::*;

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
