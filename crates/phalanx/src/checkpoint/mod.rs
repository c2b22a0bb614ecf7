//! Checkpoints: the state of a job on disk, from which a restarted job goes on.
//!
//! Every rank calls the same things in the same order. Of a state that all ranks have, rank 0 alone writes, on a thread of its
//! own, and what it reads it gives to all ([`Checkpoints::save`]); of a state that is spread over the ranks each writes its part,
//! and reads what it needs ([`Checkpoints::save_sharded`]). A checkpoint is there whole or not at all: whatever is killed when,
//! and however full the disk, the newest that was finished is found.
//!
//! ```
//! use phalanx::checkpoint::Checkpoints;
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("runs/digits");
//!
//! let group = phalanx::init()?;
//! let (mut step, mut weights, mut momentum) = (0, vec![0f32; 6], vec![0f32; 6]);
//! let checkpoints = Checkpoints::open(&path, &group)?.keep(3); // path: "runs/digits"
//! if let Some(saved) = checkpoints.newest()? {
//!     step = saved.step();
//!     saved.tensor("weights")?.copy_to(&mut weights)?;
//!     momentum = saved.value("momentum")?;
//! }
//! while step < 100 {
//!     step += 1; // ... train ...
//!     if step % 50 == 0 {
//!         checkpoints.save(step, |snapshot| {
//!             snapshot.tensor("weights", &[2, 3], &weights)?;
//!             snapshot.value("momentum", &momentum)
//!         })?;
//!     }
//! }
//! checkpoints.finish()?;
//! # assert_eq!(checkpoints.newest()?.unwrap().step(), 100);
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! Each checkpoint is a folder: the tensors in `tensors.safetensors`, which many programs read, each other part in a file
//! of its own, and `manifest.json` with all lengths and checksums (XXH3, 64 bits). Of a sharded one the tensors are in a file for
//! each rank, such as `rank-00003-of-00008.safetensors`, where a slice has the name `weight[0:4, 0:8]`, and the manifest says
//! which slices make up which tensor. The checksums find what a crash or a
//! disk has damaged, not what somebody has forged; but nothing in a forged checkpoint is executed, leads out of the
//! folder, or takes more memory than its files are long.

mod disk;
mod folder;
#[cfg(test)]
mod frozen;
mod layout;
mod manifest;
mod newest;
mod owner;
mod region;
mod saved;
mod sharded;
mod snapshot;
mod tensors;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

use self::disk::{Disk, SystemDisk};
#[cfg(any(test, fuzzing))]
pub use self::manifest::fuzz as fuzz_manifest;
use self::newest::Search;
pub use self::newest::Skipped;
use self::owner::Claimant;
#[cfg(any(test, fuzzing))]
pub use self::owner::fuzz as fuzz_claim;
pub use self::saved::{Saved, SavedTensor};
use self::sharded::Together;
pub use self::snapshot::Snapshot;
#[cfg(any(test, fuzzing))]
pub use self::tensors::fuzz as fuzz_tensors;
use self::writer::{Job, Writer};
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::elastic;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;

/// How long a call waits for the write before it, unless [`Checkpoints::with_timeout`] says otherwise.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// How much longer than a call waits for a disk the other ranks wait for that call: they hear what has kept it.
const MARGIN: Duration = Duration::from_secs(30);
/// How many checkpoints are kept, unless [`Checkpoints::keep`] says otherwise.
const KEEP: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);

/// A job's folder of checkpoints; see the [module](self).
#[doc(alias("torch.distributed.checkpoint", "save_state_dict"))]
#[derive(Debug)]
pub struct Checkpoints {
    path: PathBuf,
    group: ProcessGroup,
    keep: NonZeroUsize,
    timeout: Duration,
    writer: Writer,
    /// The group of the threads that write together, from the first sharded checkpoint on.
    threads: Mutex<Option<ProcessGroup>>,
    skipped: Mutex<Vec<Skipped>>,
}

impl Checkpoints {
    /// Opens the folder at `path`, and makes it if need be; all ranks call this together. Only rank 0's folder counts, and
    /// what a writer that died has left half done there is removed. For [sharded](Self::save_sharded) checkpoints it must be the
    /// same folder on every rank.
    ///
    /// Opened again, by this process, it is the later one that saves, behind what was handed over before. In an
    /// [elastic](crate::elastic::run) job a later round takes the folder over from an earlier one, whose rank 0 may be frozen: when
    /// that one wakes, it finds out, and at most removes an old checkpoint that it was about to remove. How a sharded write of an
    /// earlier one fails is a warning in the log: its ranks are not those of the new group.
    ///
    /// # Errors
    /// On every rank, if rank 0 cannot write there, or a process of another job writes there. In an elastic job it ends rank 0
    /// alone: to the others it is that rank's failure.
    pub fn open(path: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let is_main = group.rank().is_main();
        let writer = if is_main { start(&path, group) } else { Ok(Writer::member(&path, group.rank())) };
        let outcome = is_main.then(|| writer.as_ref().map(drop).map_err(Error::clone));
        newest::agree(&group.in_call(Caller::CheckpointsOpen), outcome)?;
        Ok(Self {
            path,
            group: group.clone(),
            keep: KEEP,
            timeout: TIMEOUT,
            writer: writer?,
            threads: Mutex::default(),
            skipped: Mutex::default(),
        })
    }

    /// How many checkpoints are kept, 3 by default and 1 at least: when a new one is whole, those before the `count` newest
    /// whole ones are removed. While it is written there is one more.
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
        self
    }

    /// How long a rank may be busy with its disk in one call; 10 minutes by default. It is the longest time that
    /// [`save`](Self::save), [`save_sharded`](Self::save_sharded), [`newest`](Self::newest) and [`finish`](Self::finish) wait for the
    /// write in flight; that ranks which write a sharded checkpoint wait for each other; and that `newest`, after the wait, takes
    /// to read or compare one checkpoint, on each rank. In `save_sharded` and `newest` the other ranks wait 30 s longer for it, also if
    /// the group's time-out is shorter: what has kept a rank is an error of the call, not a failure of the group. A group's time-out
    /// that is longer stays.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The newest whole checkpoint, the same on every rank; all ranks call this together. Rank 0 reads it and sends it to
    /// the others, so they need not see the folder. Of a sharded one it reads the parts alone; the ranks share the work of
    /// comparing checksums of the tensors, and each reads those that it asks for ([`SavedTensor`]). What is not whole is passed over
    /// with a warning in the log, and named by [`skipped`](Self::skipped). The newest is the one that was written last, of whatever step.
    ///
    /// # Errors
    /// On every rank, if a checkpoint that may be whole cannot be read: access is denied, a later version of this crate has
    /// written it, some rank has too little memory, does not see all files of a sharded one, or takes too long to
    /// read it. And as [`ProcessGroup::broadcast`].
    pub fn newest(&self) -> Result<Option<Saved>> {
        self.newest_by(Search::new)
    }

    fn newest_by(&self, search: impl FnOnce(&Path) -> Result<Search>) -> Result<Option<Saved>> {
        let (group, is_main) = (self.patient(Caller::CheckpointsNewest), self.group.rank().is_main());
        // The one in flight is newer than what is there. The others hear of its end, and from then on wait for what is read.
        newest::agree(&group, is_main.then(|| self.writer.settle(Deadline::after(self.timeout))))?;
        let (saved, skipped) = newest::share(&group, &self.path, is_main.then(|| search(&self.path)))?;
        *self.skipped.lock() = skipped;
        Ok(saved)
    }

    /// What the last [`newest`](Self::newest) has passed over, the newest first; the same on every rank.
    pub fn skipped(&self) -> Vec<Skipped> {
        self.skipped.lock().clone()
    }

    /// Saves the state after `step`. On rank 0 `fill` collects it, and a thread writes it while training goes on; on the
    /// other ranks this does nothing, and `fill` is not called: it must not call collectives.
    ///
    /// One write is in flight at a time: this waits for the one before, and returns its failure. The new snapshot is
    /// written in that case too, so a program may report the failure and go on. The failure of a
    /// [sharded](Self::save_sharded) one is kept for the next call that every rank makes, `save_sharded` or [`finish`](Self::finish).
    ///
    /// # Errors
    /// What `fill` returns; then nothing is written. If the write before failed, and if it has not ended when the time-out
    /// passes; then, too, nothing is written.
    pub fn save(&self, step: u64, fill: impl FnOnce(&mut Snapshot) -> Result<()>) -> Result<()> {
        if !self.group.rank().is_main() {
            return Ok(());
        }
        let mut snapshot = Snapshot::default();
        fill(&mut snapshot)?;
        snapshot.check_whole()?;
        let before = self.writer.write(self.job(step, snapshot, None), Deadline::after(self.timeout))?;
        before.map_or(Ok(()), |before| Err(self.told(before)))
    }

    /// Saves a state after `step` of which each rank has a part; all ranks call this together. On every rank `fill` collects the
    /// rank's own part: whole tensors, [slices](Snapshot::slice) of tensors that several ranks have together, and parts. It must
    /// not call collectives. A thread of each rank writes it while training goes on, to a file of the rank's own; when all have
    /// done so, rank 0 makes a checkpoint of it, which may be read by any number of ranks.
    ///
    /// What all ranks have alike is saved by one of them, such as rank 0. Names of tensors and parts are the checkpoint's, and
    /// not a rank's: two ranks that save the same part, or the same element of a tensor, are an error.
    ///
    /// Every rank must see the folder: on one host, or on a disk that all share. The call is a collective, and waits for the
    /// slowest rank to come to it. As with [`save`](Self::save) one write is in flight at a time: this waits for the one before, and
    /// returns its failure, on every rank, on whichever it was. The new snapshot is written in that case too.
    ///
    /// The first call makes a [group](ProcessGroup::new_group) of all ranks, through which their threads agree beside the program.
    ///
    /// ```
    /// use phalanx::checkpoint::Checkpoints;
    /// use phalanx::testing::{Fabric, run};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path();
    ///
    /// // Three ranks have the rows 0..4, 4..8 and 8..12 of a matrix.
    /// run(3, Fabric::InProcess, |group| {
    ///     let checkpoints = Checkpoints::open(path, &group).unwrap();
    ///     let row = 4 * group.rank().index();
    ///     let own: Vec<f32> = (row * 2..(row + 4) * 2).map(|element| element as f32).collect();
    ///     let saved = checkpoints.save_sharded(500, |snapshot| {
    ///         if group.rank().is_main() {
    ///             snapshot.value("epoch", &7)?;
    ///         }
    ///         snapshot.slice("moments", &[12, 2], &[row, 0], &[4, 2], &own)
    ///     });
    ///     saved.and_then(|()| checkpoints.finish()).unwrap();
    /// });
    /// // Of two, the second reads its half.
    /// run(2, Fabric::InProcess, |group| {
    ///     let saved = Checkpoints::open(path, &group).unwrap().newest().unwrap().unwrap();
    ///     assert_eq!(saved.value::<i32>("epoch").unwrap(), 7);
    ///     let row = 6 * group.rank().index();
    ///     let own = saved.tensor("moments").unwrap().slice(&[row, 0], &[6, 2]).unwrap().to_vec::<f32>().unwrap();
    ///     assert_eq!(own[0], 12.0 * group.rank().index() as f32);
    /// });
    /// ```
    ///
    /// # Errors
    /// On every rank, and nothing is written: what `fill` returns on any; if slices of a tensor overlap, or leave gaps, which the
    /// error names with their ranks; if two ranks save a part of the same name, or they save different steps; and if the write
    /// before has not ended on some rank when the time-out passes. On every rank, and this is written all the same: the failure
    /// of the write before. And as [`ProcessGroup::gather_object`].
    #[doc(alias("async_save", "dcp.save", "ShardedTensor"))]
    pub fn save_sharded(&self, step: u64, fill: impl FnOnce(&mut Snapshot) -> Result<()>) -> Result<()> {
        let mut snapshot = Snapshot::default();
        let snapshot = fill(&mut snapshot).map(|()| snapshot);
        let deadline = Deadline::after(self.timeout);
        let ready = match &snapshot {
            Ok(_) => self.writer.ready(deadline),
            Err(_) => Ok(None),
        };
        let mut threads = self.threads.lock();
        let group = self.patient(Caller::CheckpointsSaveSharded);
        let connected = threads.as_ref().is_some_and(|threads| threads.failure().is_none());
        let agreed =
            sharded::agree(&group, step, &snapshot, ready, connected).map_err(|error| self.told(error))?;
        let current = match threads.take().filter(|_| agreed.connected) {
            Some(current) => current,
            None => group.aside(Caller::CheckpointsSaveSharded, self.timeout)?,
        };
        *threads = Some(current.clone());
        let together = Together { threads: current.with_timeout(self.timeout), tensors: agreed.tensors };
        let job = self.job(step, snapshot?, Some(together));
        if let Err(error) = self.writer.write(job, deadline) {
            // The others write, and would wait for this rank's part.
            current.abort(error.clone());
            return Err(error);
        }
        agreed.before.map_or(Ok(()), |before| Err(self.told(before)))
    }

    /// The group in a call in which a rank may wait for a disk: a disk that is too slow is an error of the call, and not of the
    /// group.
    fn patient(&self, caller: Caller) -> ProcessGroup {
        let timeout = self.group.timeout().max(self.timeout.saturating_add(MARGIN));
        self.group.with_timeout(timeout).in_call(caller)
    }

    fn job(&self, step: u64, snapshot: Snapshot, together: Option<Together>) -> Job {
        Job { step, world_size: self.group.world_size().get(), keep: self.keep.get(), snapshot, together }
    }

    /// An error that may be another rank's, as this one returns it.
    fn told(&self, error: Error) -> Error {
        match error.peer() {
            Some(peer) if peer != self.group.rank() && self.group.failure().is_none() => {
                self.group.told(error)
            }
            _ => error,
        }
    }

    /// Waits until the last snapshot is on the disk; if it was sharded, on every rank until that of all is. Without it the drop
    /// waits, at most 30 s, and a failure is only logged.
    ///
    /// # Errors
    /// If the last write failed, and nobody was told yet, or it has not ended when the time-out passes. Of a sharded one, on every
    /// rank alike.
    pub fn finish(&self) -> Result<()> {
        self.writer.finish(Deadline::after(self.timeout)).map_err(|error| self.told(error))
    }

    /// The group whose ranks save and read together.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The folder, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        // The other workers wait for this one to form the next group, in which it goes on writing.
        if self.group.failure().is_some() && elastic::is_elastic() {
            self.writer.leave();
        }
    }
}

/// Makes the folder and those above it, so that they survive a loss of power.
fn make(path: &Path) -> io::Result<()> {
    let made: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(path)?;
    for folder in made {
        let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
        SystemDisk.sync_folder(above.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

fn start(path: &Path, group: &ProcessGroup) -> Result<Writer> {
    make(path).map_err(|error| writer::unusable(path, error))?;
    Writer::open(path, &Claimant { job: elastic::job_name()?, round: group.generation().0 })
}
