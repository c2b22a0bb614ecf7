//! LMDB in one process.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use phalanx::testing::{Fabric, run};
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_data::lmdb::{LmdbDataset, LmdbWriter, keys_of};
use phalanx_data::{DataLoader, Dataset};
use proptest::prelude::*;

/// Item n: its number, and as many bytes behind it as `length` says.
fn item(n: usize, length: usize) -> Vec<u8> {
    let mut item = (n as u64).to_le_bytes().to_vec();
    item.resize(8 + length, n as u8);
    item
}

fn pack(folder: &Path, items: usize, length: impl Fn(usize) -> usize) -> PathBuf {
    let path = folder.join("packed");
    let mut writer = LmdbWriter::create(&path).unwrap();
    for n in 0..items {
        assert_eq!(writer.push(&item(n, length(n))).unwrap(), n);
    }
    assert_eq!(writer.finish().unwrap(), items);
    path
}

#[test]
fn items_come_back_from_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    // Small ones share pages, large ones have several.
    let length = |n: usize| if n.is_multiple_of(50) { 100_000 } else { n % 300 };
    let path = pack(folder.path(), 1000, length);
    let dataset = LmdbDataset::open(&path).unwrap();
    assert_eq!((dataset.len(), LmdbDataset::open(path.join("data.mdb")).unwrap().len()), (1000, 1000));
    for (workers, readahead) in [(0, true), (8, false)] {
        // Clones, and data sets that were opened anew, share one environment.
        let dataset = LmdbDataset::open(&path).unwrap().readahead(readahead);
        assert_eq!(dataset.clone().get(3).unwrap(), item(3, length(3)));
        let loader =
            DataLoader::builder(dataset).shuffle(true).batch_size(16).num_workers(workers).build().unwrap();
        let mut seen: Vec<Vec<u8>> = loader.iter().flat_map(Result::unwrap).collect();
        seen.sort_by_key(|item| u64::from_le_bytes(*item.first_chunk().unwrap()));
        assert!(seen.iter().enumerate().all(|(n, seen)| *seen == item(n, length(n))));
    }
    assert_eq!(dataset.read(7, <[u8]>::len).unwrap(), item(7, length(7)).len());
    assert!(dataset.get(1000).unwrap_err().to_string().contains("no item 1000"));
    // Where it is closed it can be removed, and packed anew.
    drop(dataset);
    fs::remove_dir_all(&path).unwrap();
    pack(folder.path(), 10, |_| 0);
    assert_eq!(LmdbDataset::open(&path).unwrap().get(9).unwrap(), item(9, 0));
}

/// With as many items, so that their number tells nothing.
#[test]
fn a_data_set_that_was_packed_anew_is_not_read_from_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = pack(folder.path(), 10, |_| 0);
    let old = LmdbDataset::open(&path).unwrap();
    assert_eq!(old.get(3).unwrap(), item(3, 0));
    fs::remove_dir_all(&path).unwrap();
    pack(folder.path(), 10, |_| 5);
    let new = LmdbDataset::open(&path).unwrap();
    for error in [new.get(3).map(drop).unwrap_err(), keys_of(&path).map(drop).unwrap_err()] {
        let text = error.to_string();
        assert!(text.contains("is another file by now") && text.contains("drop the data sets"), "{text}");
    }
    assert_eq!(old.get(4).unwrap(), item(4, 0));
    drop(old);
    assert_eq!(new.get(3).unwrap(), item(3, 5));
}

/// As Python's `lmdb.open(folder)`, whose writer asks there which pages are still read.
#[test]
fn who_reads_in_a_folder_locks_where_those_look_who_write_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = pack(folder.path(), 3, |_| 0);
    for opened in [path.clone(), path.join("data.mdb")] {
        let dataset = LmdbDataset::open(opened).unwrap();
        assert_eq!(dataset.get(1).unwrap(), item(1, 0));
        let mut names: Vec<_> =
            fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["data.mdb", "lock.mdb"]);
    }
    // A file by itself has them beside it.
    fs::copy(path.join("data.mdb"), folder.path().join("alone")).unwrap();
    assert_eq!(LmdbDataset::open(folder.path().join("alone")).unwrap().get(2).unwrap(), item(2, 0));
    assert!(folder.path().join("alone-lock").exists());
}

#[test]
fn opening_and_closing_at_the_same_moment_do_each_other_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = pack(folder.path(), 10, |_| 5);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..60 {
                    assert_eq!(LmdbDataset::open(&path).unwrap().get(n % 10).unwrap(), item(n % 10, 5));
                }
            });
        }
    });
}

#[test]
fn a_data_set_gets_its_name_when_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packed");
    let mut writer = LmdbWriter::create(&path).unwrap();
    writer.push(&[1; 100]).unwrap();
    assert!(!path.exists());
    drop(writer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left of it");
    pack(folder.path(), 1, |_| 0);
    let error = LmdbWriter::create(&path).unwrap_err();
    assert!(error.to_string().contains("is there already"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let mut small = LmdbWriter::with_max_bytes(folder.path().join("small"), 1 << 20).unwrap();
    let full = (0..40).find_map(|_| small.push(&[0; 1 << 20]).err()).unwrap();
    assert!(full.to_string().contains("max_bytes"), "{full}");
    // Items are written 16 MiB at a time. The one at which that failed was not added: whoever adds it again adds it once.
    assert_eq!(small.push(b"small").unwrap(), 15);
}

#[test]
fn a_packing_that_cannot_be_finished_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packed");
    let mut writer = LmdbWriter::create(&path).unwrap();
    writer.push(b"first").unwrap();
    // Another program's, since the packing has begun.
    fs::create_dir(&path).unwrap();
    fs::write(path.join("other"), "").unwrap();
    writer.finish().unwrap_err();
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(writer.finish().unwrap(), 1);
    assert_eq!(LmdbDataset::open(&path).unwrap().get(0).unwrap(), b"first");
    let error = writer.push(b"second").unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("was finished"), "{error}");
    // As of a program that calls it again to be sure.
    assert_eq!(writer.finish().unwrap(), 1);
    drop(writer);
    assert!(path.join("data.mdb").is_file());
}

#[test]
fn an_empty_data_set_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = LmdbDataset::open(pack(folder.path(), 0, |_| 0)).unwrap();
    assert!(dataset.is_empty() && dataset.get(0).is_err());
    assert_eq!(DataLoader::builder(dataset).build().unwrap().iter().count(), 0);
}

#[test]
fn keys_of_somebody_else_are_read_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = pack(folder.path(), 20, |_| 3);
    let keys = keys_of(&path).unwrap();
    assert_eq!(keys, (0..20_u64).map(|n| n.to_be_bytes().to_vec()).collect::<Vec<_>>());
    let some = LmdbDataset::with_keys(&path, [keys[7].clone(), keys[2].clone(), b"other".to_vec()]).unwrap();
    assert_eq!((some.len(), some.get(0).unwrap(), some.get(1).unwrap()), (3, item(7, 3), item(2, 3)));
    let error = some.get(2).unwrap_err().to_string();
    assert!(error.contains("no key other") && error.contains("keys_of"), "{error}");
    for (length, key) in [(0, String::new()), (512, "k".repeat(512))] {
        let error = LmdbDataset::with_keys(&path, ["some".to_owned(), key]).unwrap_err().to_string();
        assert!(error.contains(&format!("key 1 has {length} bytes")), "{error}");
    }
}

/// Six small numbers of 64 bits look as LMDB's record of a database does: one leaf page, five entries, a root.
#[test]
fn an_item_that_looks_like_a_database_is_an_item_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packed");
    let numbers = [0_u64, 0, 1, 0, 5, 1].map(u64::to_le_bytes).concat();
    let mut writer = LmdbWriter::create(&path).unwrap();
    (0..3).for_each(|index| assert_eq!(writer.push(&numbers).unwrap(), index));
    writer.finish().unwrap();
    let dataset = LmdbDataset::open(&path).unwrap();
    for index in 0..3 {
        assert_eq!(dataset.get(index).unwrap(), numbers);
    }
    let named = LmdbDataset::with_keys(&path, [[0_u8; 8]]).unwrap().database("\0".repeat(8));
    let error = named.unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
}

/// A pipe there would hold up whoever opens it.
#[test]
fn what_is_no_file_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/null", folder.path().join("data.mdb")).unwrap();
    let error = LmdbDataset::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("data.mdb is no regular file"), "{error}");
}

/// Reads all of it, if it can be opened; how it ends is said by the caller.
fn read_all(path: &Path) -> phalanx::Result<usize> {
    let dataset = LmdbDataset::open(path)?;
    (0..dataset.len()).try_fold(0, |bytes, index| {
        dataset.read(index, |item| bytes + item.iter().filter(|byte| **byte < 255).count())
    })
}

/// "A truncated LMDB": were such a file mapped, reading it would end this process with SIGBUS.
#[test]
fn a_truncated_lmdb_is_an_error_and_not_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = pack(folder.path(), 300, |n| 20 * n);
    let file = path.join("data.mdb");
    let whole = fs::metadata(&file).unwrap().len();
    assert!(read_all(&path).is_ok() && whole > 500_000);
    for left in [0, 1, 100, 152, 4096, 5000, 8191, 8192, 12_288, whole / 2, whole - 4096, whole - 1] {
        let copy = folder.path().join("copy");
        fs::copy(&file, &copy).unwrap();
        OpenOptions::new().write(true).open(&copy).unwrap().set_len(left).unwrap();
        for outcome in [
            read_all(&copy).map(drop),
            keys_of(&copy).map(drop),
            LmdbDataset::with_keys(&copy, ["k"]).map(drop),
        ] {
            let text = outcome.unwrap_err().to_string();
            assert!(
                text.contains("copy is no whole LMDB file") && text.contains("copy it again"),
                "{left}: {text}"
            );
        }
    }
    // Cut off between the look at its length and the first read.
    let dataset = LmdbDataset::open(&path).unwrap();
    OpenOptions::new().write(true).open(&file).unwrap().set_len(whole / 2).unwrap();
    assert!(dataset.get(299).unwrap_err().to_string().contains("cut off"));
}

/// Each rank has a copy; that of rank 1 is cut off, before or while they train.
#[test]
fn a_truncated_lmdb_is_a_clear_error_on_every_rank() {
    for while_they_train in [false, true] {
        let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
        let errors = run(3, Fabric::InProcess, |group: ProcessGroup| {
            let path = pack(folders[group.rank().index()].path(), 300, |n| 20 * n);
            let cut = || {
                let file = OpenOptions::new().write(true).open(path.join("data.mdb")).unwrap();
                file.set_len(100_000).unwrap();
            };
            let is_cut = group.rank().index() == 1;
            let train = || -> phalanx::Result<()> {
                if is_cut && !while_they_train {
                    cut();
                }
                let dataset = LmdbDataset::open(&path)?;
                if is_cut {
                    cut();
                }
                let loader =
                    DataLoader::builder(dataset).group(&group).batch_size(10).num_workers(1).build()?;
                for batch in &loader {
                    group.all_reduce(&mut [batch?.len() as f64], ReduceOp::Sum)?;
                }
                Ok(())
            };
            // As a program does that ends with its error.
            let error = train().inspect_err(|error| group.abort(error.clone())).unwrap_err();
            error.to_string()
        });
        let cause = if while_they_train { "cut off" } else { "is no whole LMDB file" };
        for (rank, error) in errors.iter().enumerate() {
            assert!(error.contains(cause), "rank {rank}, {cause}: {error}");
            assert!(
                rank == 1 || error.contains("rank 1"),
                "rank {rank} does not know whose file it is: {error}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the first two pages say, nothing is mapped that is not there.
    #[test]
    fn damaged_first_pages_are_errors(changes in prop::collection::vec((0..152_u64, any::<bool>(), any::<u8>()), 1..4)) {
        let folder = tempfile::tempdir().unwrap();
        let file = pack(folder.path(), 50, |_| 10).join("data.mdb");
        let bytes = OpenOptions::new().write(true).open(&file).unwrap();
        for (at, second, byte) in changes {
            // Not the roots of the trees, which may be any page.
            if !(48..136).contains(&at) {
                bytes.write_all_at(&[byte], at + if second { 4096 } else { 0 }).unwrap();
            }
        }
        let _ = read_all(&file);
    }
}

#[test]
fn what_is_no_lmdb_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "no LMDB ".repeat(10_000)).unwrap();
    assert!(LmdbDataset::open(&text).unwrap_err().to_string().contains("not LMDB's"));
    let absent = LmdbDataset::open(folder.path().join("absent")).unwrap_err();
    assert_eq!(absent.io_kind(), Some(std::io::ErrorKind::NotFound), "{absent}");
}
