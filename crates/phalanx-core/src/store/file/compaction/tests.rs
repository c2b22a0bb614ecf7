//! Processes that die, sleep and come at every point of a compaction.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::super::FileStore;
use super::*;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::Store;

/// The length at which the stores of most tests are compacted.
const LENGTH: u64 = 2048;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn at_once() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

/// A folder with a store.
struct Place {
    folder: TempDir,
    path: PathBuf,
}

impl Place {
    /// The one that is to remove the store holds it.
    fn new() -> (Self, FileStore) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let owner = FileStore::create(&path).unwrap().compacted_at(LENGTH);
        (Self { folder, path }, owner)
    }

    fn open(&self) -> FileStore {
        FileStore::open(&self.path, soon()).unwrap().compacted_at(LENGTH)
    }

    /// As a process that is about to compact has it.
    fn locked(&self) -> Log {
        let mut log = open_at(&self.path).unwrap().unwrap();
        assert!(log.try_lock_newest(&self.path).unwrap());
        log
    }

    fn length(&self) -> u64 {
        std::fs::metadata(&self.path).unwrap().len()
    }

    fn generation(&self) -> u64 {
        open_at(&self.path).unwrap().unwrap().identity.generation
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.folder.path()).unwrap().count()
    }
}

/// Adds to "beat" until the path names another file.
fn fill(place: &Place, store: &FileStore) {
    let (before, limit) = (place.generation(), soon());
    while place.generation() == before {
        assert!(!limit.has_passed(), "the file has {} bytes, and is not compacted", place.length());
        store.add("beat", 1, limit).unwrap();
    }
}

fn number(store: &FileStore, key: &str) -> i64 {
    store.add(key, 0, soon()).unwrap()
}

#[test]
fn a_store_whose_values_are_replaced_for_ever_stays_short_and_nobody_loses_anything() {
    let (place, owner) = Place::new();
    owner.set("kept", &[7; 300], soon()).unwrap();
    thread::scope(|scope| {
        for writer in 0..4 {
            let (store, place) = (place.open(), &place);
            scope.spawn(move || {
                for beat in 1..=300 {
                    assert_eq!(store.add(&format!("beat/{writer}"), 1, soon()).unwrap(), beat);
                    store.add("all", 1, soon()).unwrap();
                    store.set(&format!("passing/{writer}"), b"", soon()).unwrap();
                    assert!(store.delete_key(&format!("passing/{writer}"), soon()).unwrap());
                    let length = place.length();
                    assert!(length < 2 * LENGTH + 4096, "{length} bytes");
                }
            });
        }
    });
    let newcomer = place.open();
    for store in [&owner, &newcomer] {
        assert_eq!(number(store, "all"), 1200);
        assert_eq!(store.get("kept", soon()).unwrap(), [7; 300]);
        assert_eq!(store.num_keys(soon()).unwrap(), 6);
        assert!(store.is_current());
    }
    assert!(place.generation() > 10 && place.files() == 1);
    drop(owner);
    assert_eq!(place.files(), 0);
}

#[test]
fn a_store_that_says_much_is_not_compacted_before_it_is_twice_as_long() {
    let (place, store) = Place::new();
    for key in 0..8 {
        store.set(&key.to_string(), &[key; 1024], soon()).unwrap();
    }
    assert_eq!(place.generation(), 0);
    for key in 0..8 {
        store.set(&key.to_string(), &[key + 1; 1024], soon()).unwrap();
    }
    store.set("0", &[9; 1024], soon()).unwrap();
    assert!(place.generation() > 0 && place.length() < 12 * 1024);
    let newcomer = place.open();
    let values = (0..8).map(|key: u8| newcomer.get(&key.to_string(), soon()).unwrap());
    assert!(values.zip([9, 2, 3, 4, 5, 6, 7, 8]).all(|(value, byte)| value == [byte; 1024]));
}

#[test]
fn who_dies_before_the_mark_has_changed_nothing() {
    let (place, owner) = Place::new();
    owner.set("kept", b"1", soon()).unwrap();
    let sleeper = place.open();
    for is_whole in [true, false] {
        let log = place.locked();
        let next = log.write_next(&place.path).unwrap();
        if !is_whole {
            std::fs::write(&next, b"PHX").unwrap();
        }
        drop(log);
        assert_eq!(place.files(), 2);
        owner.set("kept", b"2", soon()).unwrap();
        assert_eq!(sleeper.get("kept", soon()).unwrap(), b"2");
        // The next one replaces what was left.
        fill(&place, &place.open());
        assert_eq!(sleeper.get("kept", soon()).unwrap(), b"2");
        assert_eq!(place.files(), 1);
    }
    drop(place.locked().write_next(&place.path).unwrap());
    drop(owner);
    assert_eq!(place.files(), 0);
}

#[test]
fn whoever_comes_first_does_what_one_that_died_behind_the_mark_has_left() {
    let comers: [fn(&Place, &FileStore); 4] = [
        |_, store| store.set("came", b"", soon()).unwrap(),
        |_, store| assert!(store.check(&["kept"], soon()).unwrap()),
        |place, _| place.open().set("came", b"", soon()).unwrap(),
        |place, _| assert!(place.open().check(&["kept"], soon()).unwrap()),
    ];
    for (which, come) in comers.into_iter().enumerate() {
        let (place, owner) = Place::new();
        owner.set("kept", b"1", soon()).unwrap();
        let sleeper = place.open();
        let mut log = place.locked();
        log.write_next(&place.path).unwrap();
        log.write_mark().unwrap();
        drop(log);
        assert_eq!((place.generation(), place.files()), (0, 2));
        come(&place, &owner);
        assert_eq!((place.generation(), place.files()), (1, 1), "comer {which}");
        for store in [&owner, &sleeper] {
            assert!(store.is_current());
            assert_eq!(store.get("kept", soon()).unwrap(), b"1");
            assert_eq!(store.check(&["came"], soon()).unwrap(), which % 2 == 0);
        }
        drop(owner);
        assert_eq!(place.files(), 0);
    }
}

#[test]
fn an_owner_that_ends_removes_what_one_that_died_behind_the_mark_has_left() {
    let (place, owner) = Place::new();
    let mut log = place.locked();
    log.write_next(&place.path).unwrap();
    log.write_mark().unwrap();
    drop(log);
    drop(owner);
    assert_eq!(place.files(), 0);
}

#[test]
fn while_the_next_file_is_about_to_take_its_place_all_read_and_nobody_writes() {
    let (place, owner) = Place::new();
    owner.set("kept", b"1", soon()).unwrap();
    let other = place.open();
    let mut log = place.locked();
    log.write_next(&place.path).unwrap();
    log.write_mark().unwrap();
    // It is stopped here.
    for store in [&owner, &other, &place.open()] {
        assert_eq!(store.get("kept", soon()).unwrap(), b"1");
        let error = store.set("kept", b"2", at_once()).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("held the lock"), "{error}");
        assert!(store.is_current());
    }
    log.place_next(&place.path).unwrap();
    // It is stopped here, and still holds the lock of the old file.
    owner.set("kept", b"2", soon()).unwrap();
    assert_eq!(other.get("kept", soon()).unwrap(), b"2");
    drop(log);
    other.set("kept", b"3", soon()).unwrap();
    assert_eq!(owner.get("kept", soon()).unwrap(), b"3");
    assert_eq!((place.generation(), place.files()), (1, 1));
}

#[test]
fn who_sleeps_through_compactions_goes_on_in_the_newest_file() {
    let (place, owner) = Place::new();
    owner.set("removed", b"", soon()).unwrap();
    let (reader, writer) = (place.open(), place.open());
    assert!(reader.check(&["removed"], soon()).unwrap() && writer.check(&["removed"], soon()).unwrap());
    owner.delete_key("removed", soon()).unwrap();
    let waits = thread::scope(|scope| {
        // It looks again and again.
        let waits = scope.spawn(|| owner.get("last", soon()));
        let store = place.open();
        for round in 1..=3 {
            fill(&place, &store);
            assert_eq!(place.generation(), round);
        }
        store.set("last", b"3", soon()).unwrap();
        waits.join().unwrap()
    });
    assert_eq!(waits.unwrap(), b"3");
    assert!(!reader.check(&["removed"], soon()).unwrap());
    assert_eq!(writer.compare_set("last", b"3", b"4", soon()).unwrap(), b"4");
    assert_eq!(reader.get("last", soon()).unwrap(), b"4");
    assert!(reader.is_current() && writer.is_current() && owner.is_current());
}

#[test]
fn a_store_at_whose_place_is_another_one_is_named_and_leaves_that_alone() {
    let (place, owner) = Place::new();
    owner.set("beat", b"1", soon()).unwrap();
    let sleeper = place.open();
    fill(&place, &place.open());
    let other = FileStore::create(&place.path).unwrap();
    other.set("others", b"", soon()).unwrap();
    let of = |store: &FileStore| store.check(&["others"], soon());
    let error = of(&sleeper).unwrap_err().to_string();
    assert!(error.contains("another job uses the path"), "{error}");
    assert!(!owner.is_current() && !sleeper.is_current());
    // One that has gone on before goes on in its own file, which is not compacted any more.
    let late = place.open();
    let last = FileStore::create(&place.path).unwrap();
    for _ in 0..LENGTH {
        late.add("beat", 1, soon()).unwrap();
    }
    assert!(of(&late).unwrap() && !of(&last).unwrap());
    drop(owner);
    assert!(last.is_current() && place.files() == 1);
}

#[test]
fn a_newcomer_that_looks_whether_the_store_is_used_may_see_its_end() {
    let (place, owner) = Place::new();
    let silence = Duration::from_secs(5);
    let newcomer = thread::scope(|scope| {
        let newcomer = scope.spawn(|| FileStore::open_or_create(&place.path, silence, soon()).unwrap());
        while !newcomer.is_finished() {
            fill(&place, &owner);
        }
        newcomer.join().unwrap()
    });
    assert!(newcomer.is_current() && place.generation() > 0);
    assert_eq!(number(&newcomer, "beat"), number(&owner, "beat"));
}

#[test]
fn a_store_whose_folder_takes_no_new_file_goes_on() {
    let (place, owner) = Place::new();
    // It has the name of the next file, and is not removed as one.
    let next = owner.log.lock().next_path(&place.path).unwrap();
    std::fs::create_dir(&next).unwrap();
    for beat in 1..=1000 {
        assert_eq!(owner.add("beat", 1, soon()).unwrap(), beat);
    }
    assert!(place.generation() == 0 && place.length() > 4 * LENGTH);
    assert!(owner.log.lock().has_told);
    std::fs::remove_dir(&next).unwrap();
    fill(&place, &owner);
    assert_eq!(number(&place.open(), "beat"), number(&owner, "beat"));
}

#[test]
fn a_path_that_is_a_link_stays_one() {
    let (place, _owner) = Place::new();
    let link = place.folder.path().join("link");
    std::os::unix::fs::symlink(&place.path, &link).unwrap();
    let store = FileStore::open(&link, soon()).unwrap().compacted_at(LENGTH);
    fill(&place, &store);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(store.is_current() && place.files() == 2);
}

/// The path of the store, in a process that the test below has started.
const CHILD: &str = "PHALANX_TEST_STORE";

/// Adds to the key `id` for a minute, and says each sum.
fn beat(path: &str) -> Result<()> {
    let limit = soon();
    let store = FileStore::open(path, limit)?.compacted_at(LENGTH);
    let id = std::process::id().to_string();
    while !limit.has_passed() {
        println!("\nsum {}", store.add(&id, 1, limit)?);
    }
    Ok(())
}

/// What processes that are killed have said is in the store.
#[test]
fn processes_that_are_killed_leave_a_whole_store() {
    if let Ok(path) = std::env::var(CHILD) {
        return beat(&path).unwrap();
    }
    let (place, owner) = Place::new();
    let name = "store::file::compaction::tests::processes_that_are_killed_leave_a_whole_store";
    let start = || -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, &place.path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    for round in 0..6 {
        let mut children = [start(), start()];
        let mut lines = children.each_mut().map(|child| BufReader::new(child.stdout.take().unwrap()).lines());
        let mut sums = [0; 2];
        // They are killed at places that differ.
        for (sum, lines) in sums.iter_mut().zip(&mut lines) {
            while *sum < 100 + 37 * round {
                let line = lines.next().expect("it goes on").unwrap();
                *sum = line.strip_prefix("sum ").map_or(*sum, |said| said.parse().unwrap());
            }
        }
        children.iter_mut().for_each(|child| child.kill().unwrap());
        for ((child, lines), sum) in children.iter_mut().zip(lines).zip(sums) {
            child.wait().unwrap();
            let said = lines.map_while(io::Result::ok);
            let said = said.filter_map(|line| line.strip_prefix("sum ")?.parse::<i64>().ok());
            let (last, found) = (said.last().unwrap_or(sum), number(&owner, &child.id().to_string()));
            // The last change may be there without a word.
            assert!((last..=last + 1).contains(&found), "{found} of {last}");
        }
        assert_eq!(number(&place.open(), "none"), 0);
    }
    assert!(place.generation() > 3 && owner.is_current());
    drop(owner);
    assert_eq!(place.files(), 0);
}
