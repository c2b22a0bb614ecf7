//! What is found in a folder that is damaged, or that others change.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::*;
use crate::Skipped;

#[test]
fn a_folder_whose_path_is_not_utf_8_is_read_on_every_rank() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join(OsStr::from_bytes(b"l\xe4ufe"));
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(&path, &group).unwrap();
        checkpoints.save(1, |_| Ok(())).unwrap();
        checkpoints.finish().unwrap();
        if group.rank().is_main() {
            fs::create_dir(path.join("00000002-step-2")).unwrap();
        }
        let saved = checkpoints.newest().unwrap().unwrap();
        assert_eq!(saved.folder(), path.join("00000001-step-1"));
        let skipped = checkpoints.skipped();
        assert_eq!(skipped[0].folder, path.join("00000002-step-2"));
        // As text, for a program that shows it.
        let text = Skipped { folder: "runs/00000002-step-2".into(), ..skipped[0].clone() };
        let json = serde_json::to_string(&text).unwrap();
        assert!(json.contains(r#""runs/00000002-step-2""#), "{json}");
        assert_eq!(serde_json::from_str::<Skipped>(&json).unwrap(), text);
    });
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
