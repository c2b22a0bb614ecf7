//! The thread that writes checkpoints.
//!
//! On rank 0 a process has one thread for each folder, however often the folder is opened. In an elastic job each round
//! opens its checkpoints again, while the previous round's write may still be in progress. That is why the writers of a
//! process are in a table of the process: two threads for one folder would disturb each other like two processes. Each
//! other rank has one thread for each [`Checkpoints`](super::Checkpoints), from the first sharded checkpoint on.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::claims::Claimant;
use super::disk::{SystemDisk, room_or};
use super::folder::{self, Folder};
use super::owner::Owner;
use super::sharded::{self, Together};
use super::snapshot::Snapshot;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::notice::{warn, while_waiting};
use crate::rank::Rank;

/// How long a drop waits for the write in progress.
const DROP_TIMEOUT: Duration = Duration::from_secs(30);

/// A write for the thread.
#[derive(Debug)]
pub(super) struct Job {
    pub step: u64,
    pub world_size: u32,
    pub keep: usize,
    /// The numbers of checkpoints that are known to be damaged.
    pub damaged: Vec<u64>,
    pub snapshot: Snapshot,
    /// A sharded write, together with the other ranks; rank 0 alone, if this is none.
    pub together: Option<Together>,
}

/// The writers of this process, by device and inode of their folders. It is locked only to look one up, so that a
/// folder on a slow disk, or a wait for a claim, does not hold up writes to other folders.
static WRITERS: Mutex<BTreeMap<(u64, u64), Slot>> = Mutex::new(BTreeMap::new());

/// The writer of a folder; locked by the caller that opens it, until it exists.
type Slot = Arc<Mutex<Weak<Shared>>>;

/// Passes snapshots to a thread, one at a time.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    /// The number of this writer among those that have used the same thread.
    handle: u64,
    untold: Arc<Untold>,
}

/// The failure of the last sharded write of a [`Writer`], until a call has returned it. It belongs to the writer and
/// not to the thread: its ranks are those of the writer's group, and would be other ones in the group of a later
/// writer. Accessed only while the state of the thread is locked.
type Untold = Mutex<Option<Error>>;

#[derive(Debug)]
struct Shared {
    role: Role,
    rank: Rank,
    state: Mutex<State>,
    changed: Condvar,
}

/// The thread's right to write.
#[derive(Debug)]
enum Role {
    /// It writes to the folder as its owner. The claim is given back when the thread has ended, even if nothing waited
    /// for that.
    Owner(Folder),
    /// It adds its part to the owner's checkpoint in the folder at this path.
    Member(PathBuf),
}

impl Role {
    fn path(&self) -> &Path {
        match self {
            Self::Owner(folder) => &folder.path,
            Self::Member(path) => path,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// The number of the next checkpoint.
    number: u64,
    /// The writer that may pass snapshots: the last one.
    handle: u64,
    /// Passed, but not begun.
    next: Option<Handed>,
    /// The step of the write in progress, from when it is passed on.
    step: Option<u64>,
    /// The failure of the last write of rank 0 alone, until a call has returned it.
    failure: Option<Error>,
    /// The thread takes no more work.
    closed: bool,
    /// There is no thread.
    ended: bool,
}

/// A write, and the writer that has passed it.
#[derive(Debug)]
struct Handed {
    job: Job,
    handle: u64,
    untold: Weak<Untold>,
}

impl Writer {
    /// The writer of the folder at `path`, for the process `by`. If this process has one already, what was passed to it
    /// before is written first.
    pub fn open(path: &Path, by: &Claimant) -> Result<Self> {
        let unusable = |error| unusable(path, error);
        let about = path.metadata().map_err(unusable)?;
        let place = (about.dev(), about.ino());
        let slot = slot(place);
        let mut writer = slot.lock();
        let running = writer.upgrade();
        let mut own = None;
        if let Some(shared) = running
            && let Role::Owner(folder) = &shared.role
        {
            let mut owner = folder.owner.lock();
            let before = owner.number();
            // In a folder that was removed and made again, another process may have a claim of this number.
            let is_own = owner.check().is_ok();
            let claimed = Owner::claim(path, by, is_own.then_some(before))?;
            if is_own && claimed.follows(before) {
                *owner = claimed;
                drop(owner);
                return shared.hand_over().map_err(unusable);
            }
            // The thread has lost its claim to another process since, and ends by itself.
            own = Some(claimed);
        }
        let owner = match own {
            Some(owner) => owner,
            None => Owner::claim(path, by, None)?,
        };
        let folder = Folder { path: path.to_owned(), disk: Box::new(SystemDisk), owner: Mutex::new(owner) };
        if let Some(error) = folder.sweep().map_err(unusable)? {
            warn(format_args!(
                "remains of earlier checkpoints in {} were not removed, and take space: {error}",
                path.display()
            ));
        }
        let state =
            State { number: folder::next_number(path).map_err(unusable)?, ended: true, ..State::default() };
        let shared = Shared::new(Role::Owner(folder), Rank::MAIN, state);
        *writer = Arc::downgrade(&shared);
        shared.hand_over().map_err(unusable)
    }

    /// The writer of another rank than 0; its thread starts with the first job.
    pub fn member(path: &Path, rank: Rank) -> Self {
        let state = State { handle: 1, ended: true, ..State::default() };
        let shared = Shared::new(Role::Member(path.to_owned()), rank, state);
        Self { shared, handle: 1, untold: Arc::default() }
    }

    /// Waits until a snapshot can be passed; returns the failure of the previous write, and keeps it.
    pub fn ready(&self, deadline: Deadline) -> Result<Option<Error>> {
        let state = self.open_state(deadline)?;
        Ok(self.untold.lock().clone().or_else(|| state.failure.clone()))
    }

    /// Passes a snapshot once the previous write has ended, and returns that one's failure. The failure of a sharded
    /// write is kept for the next sharded one, or [`finish`](Self::finish), which every rank calls. After an error the
    /// snapshot was not passed.
    pub fn write(&self, job: Job, deadline: Deadline) -> Result<Option<Error>> {
        let mut state = self.open_state(deadline)?;
        if state.ended {
            let error = |error| Error::not_started("cannot start the thread that writes checkpoints", error);
            self.shared.start(&mut state).map_err(error)?;
        }
        let failure = if job.together.is_some() { self.tell(&mut state) } else { state.failure.take() };
        state.step = Some(job.step);
        state.next = Some(Handed { job, handle: self.handle, untold: Arc::downgrade(&self.untold) });
        self.shared.changed.notify_all();
        Ok(failure)
    }

    /// The failure that this call returns, that of a sharded write first.
    fn tell(&self, state: &mut State) -> Option<Error> {
        self.untold.lock().take().or_else(|| state.failure.take())
    }

    /// The state, once no write is in progress and a snapshot may be passed.
    fn open_state(&self, deadline: Deadline) -> Result<MutexGuard<'_, State>> {
        let mut state = self.idle(deadline)?;
        if state.handle != self.handle {
            return Err(Error::invalid_argument("these checkpoints have been opened anew since")
                .with_remedy("save through what the last `Checkpoints::open` has returned"));
        }
        if state.closed {
            let untold = self.untold.lock().clone().or_else(|| state.failure.take());
            return Err(untold.unwrap_or_else(|| panicked(self.shared.rank)));
        }
        Ok(state)
    }

    /// Waits until no write is in progress, and returns the failure of the last one.
    pub fn finish(&self, deadline: Deadline) -> Result<()> {
        let mut state = self.idle(deadline)?;
        self.tell(&mut state).map_or(Ok(()), Err)
    }

    /// Waits until no write is in progress; a failure is kept for the next call that saves or finishes.
    pub fn settle(&self, deadline: Deadline) -> Result<()> {
        self.idle(deadline).map(drop)
    }

    fn idle(&self, deadline: Deadline) -> Result<MutexGuard<'_, State>> {
        let Shared { role, rank, state, changed } = &*self.shared;
        let (mut state, folder) = (state.lock(), role.path());
        while let Some(step) = state.step {
            let written =
                || format!("the checkpoint of step {step} is still being written to {}", folder.display());
            // The other ranks report no wait for this one.
            let what = || format!("{}, and this rank waits for that", written());
            while_waiting(what, || {
                while state.step == Some(step)
                    && !changed.wait_until(&mut state, deadline.instant()).timed_out()
                {}
            });
            if deadline.has_passed() && state.step.is_some() {
                return Err(Error::timeout(written()).at(*rank, host::name()).with_remedy(
                    "save less often, write to a faster disk, or allow more time with `with_timeout`",
                ));
            }
        }
        Ok(state)
    }
}

impl Writer {
    /// Whether a write is in progress.
    pub fn is_writing(&self) -> bool {
        self.shared.state.lock().step.is_some()
    }

    /// Lets the thread finish its work, and waits for nothing.
    pub fn leave(&self) {
        let mut state = self.shared.state.lock();
        state.closed |= state.handle == self.handle;
        self.shared.changed.notify_all();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let is_last = |state: &State| state.handle == self.handle && (!state.closed || state.ended);
        let is_last = is_last(&self.shared.state.lock());
        let ended = if is_last { self.settle(Deadline::after(DROP_TIMEOUT)) } else { Ok(()) };
        self.leave();
        let mut state = self.shared.state.lock();
        let failure = if is_last { state.failure.take() } else { None };
        // From here on no call can return the thread's failure, so it logs a warning itself.
        let untold = std::mem::take(&mut self.untold).lock().take();
        drop(state);
        for error in [ended.err(), untold, failure].into_iter().flatten() {
            unheard(&error);
        }
    }
}

/// The slot of the folder with this device and inode. Removes the slots of writers that are gone, unless a caller is
/// about to use them: such a caller has taken the slot under the table's lock.
fn slot(place: (u64, u64)) -> Slot {
    let mut writers = WRITERS.lock();
    writers.retain(|_, slot| {
        Arc::strong_count(slot) > 1 || slot.try_lock().is_none_or(|writer| writer.strong_count() > 0)
    });
    Arc::clone(writers.entry(place).or_default())
}

impl Shared {
    fn new(role: Role, rank: Rank, state: State) -> Arc<Self> {
        Arc::new(Self { role, rank, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// A writer that replaces earlier ones, and a thread, if there is none.
    fn hand_over(self: Arc<Self>) -> io::Result<Writer> {
        let mut state = self.state.lock();
        state.handle += 1;
        state.closed = false;
        let handle = state.handle;
        if state.ended {
            self.start(&mut state)?;
        }
        drop(state);
        Ok(Writer { shared: self, handle, untold: Arc::default() })
    }

    fn start(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let worker = Arc::clone(self);
        Builder::new().name("phalanx-checkpoint".into()).spawn(move || worker.work())?;
        state.ended = false;
        Ok(())
    }

    fn work(&self) {
        while let Some((number, Handed { job, handle, untold })) = self.next() {
            let untold = job.together.is_some().then_some(untold);
            let mut end = End { shared: self, handle, untold, failure: Some(panicked(self.rank)) };
            end.failure = self.write(number, &job).err();
            // It releases its group before a caller can learn that the write has ended.
            drop(job);
        }
    }

    fn next(&self) -> Option<(u64, Handed)> {
        let mut state = self.state.lock();
        loop {
            if let Some(handed) = state.next.take() {
                state.number += 1;
                return Some((state.number - 1, handed));
            }
            if state.closed {
                state.ended = true;
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn write(&self, number: u64, job: &Job) -> Result<()> {
        let folder = match (&self.role, &job.together) {
            (Role::Owner(folder), None) => {
                let outcome = folder.write(number, job.step, job.world_size, &job.snapshot);
                outcome.map_err(|error| unwritten(job.step, &folder.path, self.rank, error))?;
                folder
            }
            (Role::Owner(folder), Some(together)) => {
                sharded::lead(folder, number, job, together)?;
                folder
            }
            (Role::Member(path), Some(together)) => return sharded::follow(path, job, together),
            (Role::Member(_), None) => {
                return Err(Error::invalid_argument("rank 0 alone writes what is not sharded"));
            }
        };
        if let Err(error) = folder.rotate_but(job.keep, &job.damaged) {
            // The checkpoint itself has been saved.
            warn(format_args!("old checkpoints in {} were not removed: {error}", folder.path.display()));
        }
        Ok(())
    }
}

/// Reports the end of a write to those who wait, also after a panic of the program's code that lends its memory.
struct End<'a> {
    shared: &'a Shared,
    /// The writer of this write.
    handle: u64,
    /// For a sharded write, where its failure is kept.
    untold: Option<Weak<Untold>>,
    failure: Option<Error>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.step = None;
        let failure = self.failure.take();
        let mut unheard_of = None;
        match &self.untold {
            None => state.failure = failure,
            Some(untold) => match untold.upgrade() {
                Some(untold) => *untold.lock() = failure,
                None => unheard_of = failure,
            },
        }
        state.ended = std::thread::panicking();
        // A later handle starts a new thread.
        state.closed |= state.ended && self.handle == state.handle;
        self.shared.changed.notify_all();
        drop(state);
        unheard_of.iter().for_each(unheard);
    }
}

pub(super) fn unusable(path: &Path, error: io::Error) -> Error {
    let remedy = room_or(&error, "may rank 0 make this folder, and write in it?");
    Error::io(format!("cannot keep checkpoints in {}", path.display()), error).with_remedy(remedy)
}

/// Why a rank could not write, or add its part to, the checkpoint of a step.
pub(super) fn unwritten(step: u64, path: &Path, rank: Rank, error: io::Error) -> Error {
    let cause = format!("cannot write the checkpoint of step {step} to {}", path.display());
    let remedy = remedy(&error);
    Error::io(cause, error).at(rank, host::name()).with_remedy(remedy)
}

/// Warns of a failure that no call can return any more.
fn unheard(error: &Error) {
    warn(format_args!("the last checkpoint was not written: {error}"));
}

fn panicked(rank: Rank) -> Error {
    Error::aborted("the thread that writes checkpoints has panicked")
        .at(rank, host::name())
        .with_remedy("standard error says where; open the checkpoints anew")
}

fn remedy(error: &io::Error) -> &'static str {
    use io::ErrorKind::{
        CrossesDevices, FileTooLarge, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem,
        StorageFull, Unsupported,
    };
    match error.kind() {
        StorageFull | QuotaExceeded => {
            "make room, or keep fewer with `keep`; while one is written there is one more. The older ones are as they were"
        }
        FileTooLarge => "is the size of files limited, by `ulimit -f`? The older ones are as they were",
        NotFound => "was the folder removed while the job ran?",
        PermissionDenied | ReadOnlyFilesystem => "may this rank write there?",
        CrossesDevices | Unsupported => {
            "does its file system rename folders? Keep checkpoints on one that does. The older ones are as they were"
        }
        _ => "the older ones are as they were",
    }
}

#[cfg(test)]
mod tests {
    use std::hash::RandomState;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::super::layout;
    use super::*;
    use crate::dtype::DType;
    use crate::group::ProcessGroup;

    fn of(job: &str) -> Claimant {
        Claimant { job: Some(job.to_owned()), round: 1 }
    }

    #[test]
    fn a_folder_that_is_waited_for_holds_up_no_other() {
        let held = tempfile::tempdir().unwrap();
        // Another job's, which does not give it back.
        let _owner = Owner::claim(held.path(), &of("other"), None).unwrap();
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let error = Writer::open(held.path(), &of("job")).unwrap_err();
                ended.store(true, Ordering::Relaxed);
                assert!(error.is_environment(), "{error}");
            });
            // The waiting thread has locked its own folder's slot: from before a free folder is opened until after.
            let about = held.path().metadata().unwrap();
            let waits = slot((about.dev(), about.ino()));
            loop {
                let free = tempfile::tempdir().unwrap();
                let before = waits.is_locked();
                Writer::open(free.path(), &of("job")).unwrap();
                if before && waits.is_locked() {
                    break;
                }
                assert!(!ended.load(Ordering::Relaxed), "no folder was opened while one was waited for");
            }
            waiter.join().unwrap();
        });
    }

    /// A job of rank 0 in a group of threads.
    fn job(step: u64, snapshot: Snapshot, threads: Option<&ProcessGroup>) -> Job {
        let tensors =
            || layout::merged([(0, snapshot.propose().unwrap())].into_iter(), &RandomState::new()).unwrap();
        let together = threads.map(|threads| Together { threads: threads.clone(), tensors: tensors() });
        Job { step, world_size: 1, keep: 3, damaged: Vec::new(), snapshot, together }
    }

    /// A group in which a rank of its round has died.
    fn broken() -> ProcessGroup {
        let group = ProcessGroup::alone().unwrap();
        group.abort(Error::aborted("rank 2 has died").with_peer(Rank::new(2)));
        group
    }

    /// Memory that the thread that writes reads when it may, and then panics.
    struct Held(thread::ThreadId, Mutex<mpsc::Receiver<()>>);

    impl AsRef<[u8]> for Held {
        fn as_ref(&self) -> &[u8] {
            if thread::current().id() != self.0 {
                self.1.lock().recv().unwrap();
                std::panic::resume_unwind(Box::new("the memory has gone"));
            }
            &[0; 4]
        }
    }

    #[test]
    fn a_sharded_failure_is_told_to_nobody_who_has_opened_the_folder_later() {
        let root = tempfile::tempdir().unwrap();
        let (open, soon) =
            (|| Writer::open(root.path(), &of("job")).unwrap(), || Deadline::after(DROP_TIMEOUT));
        // It has failed when the folder is opened anew.
        let first = open();
        first.write(job(1, Snapshot::default(), Some(&broken())), soon()).unwrap();
        assert_eq!(first.ready(soon()).unwrap().and_then(|error| error.peer()), Some(Rank::new(2)));
        let second = open();
        assert!(second.ready(soon()).unwrap().is_none());
        // It fails, by a panic even, after the folder was opened anew; whoever has handed it over is still told, or gone.
        let mut writers = vec![first, second];
        for gone in [false, true] {
            let group = ProcessGroup::alone().unwrap();
            let (release, held) = mpsc::channel();
            let mut snapshot = Snapshot::default();
            let lent = Held(thread::current().id(), Mutex::new(held));
            snapshot.tensor_bytes("lent", DType::F32, &[1], lent).unwrap();
            let before = writers.pop().unwrap();
            assert!(before.write(job(2, snapshot, Some(&group)), soon()).unwrap().is_none());
            let later = open();
            if gone {
                drop(before);
            } else {
                writers.push(before);
            }
            release.send(()).unwrap();
            assert!(later.ready(soon()).unwrap().is_none());
            assert!(later.write(job(3, Snapshot::default(), None), soon()).unwrap().is_none());
            later.finish(soon()).unwrap();
            writers.push(later);
        }
        assert_eq!(writers.len(), 3);
        let told = writers.iter().map(|writer| writer.finish(soon()).err().map(|error| error.to_string()));
        let told: Vec<_> = told.collect();
        assert!(told[0].as_ref().is_some_and(|said| said.contains("rank 2 has died")), "{told:?}");
        assert!(told[1].as_ref().is_some_and(|said| said.contains("panicked")), "{told:?}");
        assert_eq!(told[2], None);
        assert_eq!(folder::list(root.path()).unwrap().len(), 2);
    }

    #[test]
    fn rank_0_alone_is_not_told_of_a_sharded_failure() {
        let root = tempfile::tempdir().unwrap();
        let (writer, soon) =
            (Writer::open(root.path(), &of("job")).unwrap(), || Deadline::after(DROP_TIMEOUT));
        writer.write(job(1, Snapshot::default(), Some(&broken())), soon()).unwrap();
        assert!(writer.write(job(2, Snapshot::default(), None), soon()).unwrap().is_none());
        assert!(writer.write(job(3, Snapshot::default(), None), soon()).unwrap().is_none());
        let error = writer.finish(soon()).unwrap_err();
        assert_eq!(error.peer(), Some(Rank::new(2)), "{error}");
        writer.finish(soon()).unwrap();
    }

    #[test]
    fn one_folder_has_one_thread_whoever_opens_it_at_once() {
        let root = tempfile::tempdir().unwrap();
        let writers: Vec<Writer> = thread::scope(|scope| {
            let opening: Vec<_> =
                (0..8).map(|_| scope.spawn(|| Writer::open(root.path(), &of("job")).unwrap())).collect();
            opening.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        assert!(writers.iter().all(|writer| Arc::ptr_eq(&writer.shared, &writers[0].shared)));
        let mut handles: Vec<u64> = writers.iter().map(|writer| writer.handle).collect();
        handles.sort_unstable();
        assert_eq!(handles, [1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn folders_that_nobody_writes_to_are_forgotten() {
        let (root, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let place = |root: &tempfile::TempDir| {
            let about = root.path().metadata().unwrap();
            (about.dev(), about.ino())
        };
        let writer = Writer::open(root.path(), &of("job")).unwrap();
        slot(place(&other));
        assert!(WRITERS.lock().contains_key(&place(&root)));
        let shared = Arc::downgrade(&writer.shared);
        drop(writer);
        // Its thread ends by itself.
        let deadline = Deadline::after(DROP_TIMEOUT);
        while shared.strong_count() > 0 && !deadline.has_passed() {
            thread::yield_now();
        }
        slot(place(&other));
        assert!(!WRITERS.lock().contains_key(&place(&root)));
    }
}
