//! A process that writes a checkpoint is frozen (SIGSTOP) before and after each of its operations. Another takes over, as rank 0
//! of a later round; then the first one goes on. This program starts itself as the one that is frozen.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

use super::TIMEOUT;
use super::claims::Claimant;
use super::disk::Disk;
use super::files;
use super::folder::{self, Folder};
use super::owner::Owner;
use super::tests::{TestDisk, assert_found, before, snapshot};
use crate::deadline::Deadline;

const FOLDER: &str = "PHALANX_TEST_FOLDER";
/// The operation, and whether it has been done when the process stops.
const MOMENT: &str = "PHALANX_TEST_MOMENT";

/// How the process ends that was frozen.
const SAVED: i32 = 40;
const GAVE_UP: i32 = 41;

/// Does something besides, before or after one operation.
struct Pausing {
    disk: TestDisk,
    at: (usize, bool),
    pause: Box<dyn Fn() + Send + Sync>,
    count: AtomicUsize,
}

impl fmt::Debug for Pausing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pausing at {:?}", self.at)
    }
}

impl Pausing {
    fn new(root: &Path, at: (usize, bool), pause: impl Fn() + Send + Sync + 'static) -> Self {
        Self { disk: TestDisk::at(root), at, pause: Box::new(pause), count: AtomicUsize::new(0) }
    }

    fn around<T>(&self, operation: impl FnOnce(&TestDisk) -> T) -> T {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let pause = |done| {
            if self.at == (number, done) {
                (self.pause)();
            }
        };
        pause(false);
        let outcome = operation(&self.disk);
        pause(true);
        outcome
    }
}

impl Disk for Pausing {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.around(|disk| disk.create_folder(path))
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        self.around(|disk| disk.create_file(path))
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        self.around(|disk| disk.write(file, bytes))
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        self.around(|disk| disk.sync_file(file))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.around(|disk| disk.sync_folder(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.around(|disk| disk.rename(from, to))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.around(|disk| disk.remove_file(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.around(|disk| disk.remove_folder(path))
    }
}

/// The folder, in the hands of rank 0 of this round.
fn claim(root: &Path, round: u64, disk: impl Disk) -> Folder {
    let by = Claimant { job: Some("job".to_owned()), round };
    let owner = Owner::claim(root, &by, None).unwrap();
    Folder { path: root.to_owned(), disk: Box::new(disk), owner: Mutex::new(owner) }
}

/// Saves `step`, as a writer does, keeping two.
fn save(folder: &Folder, step: u64) -> io::Result<()> {
    let number = folder::next_number(&folder.path)?;
    folder.write(number, step, 4, &snapshot(step))?;
    // A writer only warns of files that it cannot remove.
    let _ = folder.rotate(2);
    Ok(())
}

/// The process that is frozen; where nobody has started it as such, nothing.
#[test]
fn the_process_that_is_frozen() {
    let (Ok(root), Ok(moment)) = (std::env::var(FOLDER), std::env::var(MOMENT)) else { return };
    let (number, done) = moment.split_once(' ').unwrap();
    let at = (number.parse().unwrap(), done == "true");
    let stop = || {
        kill_process(getpid(), Signal::STOP).unwrap();
        // The signal may reach another thread first: this one does not go on before it is told to.
        io::stdin().read_exact(&mut [0]).unwrap();
    };
    let folder = claim(root.as_ref(), 1, Pausing::new(root.as_ref(), at, stop));
    let outcome = save(&folder, 3);
    std::process::exit(if outcome.is_ok() { SAVED } else { GAVE_UP });
}

/// Starts it, and waits until it is frozen; none if it has ended before.
fn frozen(root: &Path, number: usize, done: bool) -> Option<Child> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "frozen_tests::the_process_that_is_frozen", "--nocapture"])
        .env(FOLDER, root)
        .env(MOMENT, format!("{number} {done}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (_, status) = waitpid(Some(Pid::from_child(&child)), WaitOptions::UNTRACED).unwrap().unwrap();
    if status.stopped() {
        return Some(child);
    }
    assert_eq!(status.exit_status(), Some(SAVED));
    // It has been waited for.
    let _ = child.try_wait();
    None
}

/// Lets it go on. Returns whether it has saved what it was about to save.
fn thaw(mut child: Child) -> bool {
    kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
    child.stdin.take().unwrap().write_all(&[0]).unwrap();
    let code = child.wait().unwrap().code();
    assert!([Some(SAVED), Some(GAVE_UP)].contains(&code), "{code:?}");
    code == Some(SAVED)
}

/// Every folder with a checkpoint's name is a whole one.
fn assert_nothing_torn(root: &Path, what: &dyn fmt::Debug) {
    for entry in folder::list(root).unwrap() {
        let manifest = files::read_manifest(&entry.path);
        let files = manifest.and_then(|(manifest, _)| {
            manifest
                .files
                .iter()
                .map(|file| files::read_entry(&entry.path, file, Deadline::after(TIMEOUT)))
                .collect::<Result<Vec<_>, _>>()
        });
        assert!(files.is_ok(), "{:?} at {what:?}: {files:?}", entry.path);
    }
}

#[test]
fn a_writer_that_thaws_after_another_has_taken_over_changes_nothing() {
    /// At which operation of the other's save: the first, in the middle of its files, and none of them.
    const THAWS: [usize; 4] = [0, 2, 7, usize::MAX];
    let (mut late, mut early) = (0, 0);
    'moments: for number in 0.. {
        for (done, thaws) in [false, true].into_iter().flat_map(|done| THAWS.map(|thaws| (done, thaws))) {
            let what = (number, done, thaws);
            let root = before();
            let Some(child) = frozen(root.path(), number, done) else { break 'moments };
            let (child, outcome) = (Mutex::new(Some(child)), Arc::new(Mutex::new(None)));
            let saved = outcome.clone();
            let go_on = move || {
                if let Some(child) = child.lock().take() {
                    *saved.lock() = Some(thaw(child));
                }
            };
            // Not while it sweeps: that is a part of opening, and has its own count.
            let mut folder = claim(root.path(), 2, TestDisk::at(root.path()));
            folder.sweep().unwrap();
            let (found, skipped) = assert_found(root.path(), &[2, 3], &what);
            assert_eq!(skipped, 0, "{what:?}");
            if thaws == 0 {
                go_on();
                assert_found(root.path(), &[found], &what);
            }
            let go_on = Arc::new(go_on);
            let paused = go_on.clone();
            folder.disk = Box::new(Pausing::new(root.path(), (thaws, false), move || paused()));
            save(&folder, 4).unwrap();
            go_on();
            // It had either saved before, and that was seen, or it has given up.
            assert_eq!(*outcome.lock(), Some(found == 3), "{what:?}");
            assert_found(root.path(), &[4], &what);
            assert_nothing_torn(root.path(), &what);
            folder.sweep().unwrap();
            let names = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name());
            let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
            assert_eq!(left.len(), 1, "besides its claim: {left:?} at {what:?}");
            if found == 3 { late += 1 } else { early += 1 }
        }
    }
    println!("{early} moments before it had its name, {late} after");
    assert!(early > 80 && late > 40, "{early} before it had its name, {late} after");
}
