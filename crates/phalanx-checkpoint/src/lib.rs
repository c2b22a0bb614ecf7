//! Checkpoints: the state of a job on disk, from which a restarted job resumes.
//!
//! Every rank makes the same calls in the same order. There are two ways to save. [`Checkpoints::save`] is for a state
//! that all ranks have: rank 0 alone writes it, on a thread, and sends all ranks what it reads.
//! [`Checkpoints::save_sharded`] is for a state that is divided among the ranks: each rank writes its part, and reads
//! the parts that it needs. A checkpoint is complete or not there at all. Even if processes are killed at any time, or
//! the disk is full, the newest complete checkpoint is found.
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
//! Each checkpoint is a folder: the tensors in `tensors.safetensors`, which many programs can read, each other part in
//! its own file, and `manifest.json` with all lengths and checksums (XXH3, 64 bits). In a sharded checkpoint the
//! tensors are in a file for each rank, such as `rank-00003-of-00008.safetensors`, where a slice has a name like
//! `weight[0:4, 0:8]`, and the manifest says which slices make up which tensor. The checksums detect damage by a crash
//! or a disk, but not forgery. Reading a forged checkpoint executes nothing, does not leave the folder, and takes no
//! more memory than its files have bytes.

#![forbid(unsafe_code)]

mod disk;
mod files;
mod folder;
#[cfg(test)]
mod frozen_tests;
mod newest;
mod owner;
mod saved;
mod sharded;
mod snapshot;
mod state;
#[cfg(test)]
mod tests;
pub mod training;
mod writer;

use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_core::{deadline, elastic, group, host, notice};
use phalanx_proto::checkpoint::claims::Claimant;
use phalanx_proto::checkpoint::{claims, layout, manifest, names, region, tensors, writes};
use phalanx_proto::{caller, collective, dtype, error, rank};

use self::disk::{Disk, SystemDisk};
use self::newest::Search;
pub use self::newest::Skipped;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use self::owner::fuzz as fuzz_claim;
pub use self::saved::{Saved, SavedTensor};
use self::sharded::Together;
pub use self::snapshot::Snapshot;
use self::writer::{Job, Writer};
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::{ProcessGroup, RemoteError};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use phalanx_proto::checkpoint::{manifest::fuzz as fuzz_manifest, tensors::fuzz as fuzz_tensors};

/// How long a call waits for the write before it, unless [`Checkpoints::with_timeout`] says otherwise.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// How much longer the other ranks wait for a rank's disk than that rank does: they must learn what has delayed it.
const REMOTE_DISK_GRACE: Duration = Duration::from_secs(30);
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
    /// The group of the writing threads, from the first sharded checkpoint on.
    threads: Mutex<Option<ProcessGroup>>,
    skipped: Mutex<Vec<Skipped>>,
    /// Whether this rank has warned that the group has failed.
    warned: AtomicBool,
}

impl Checkpoints {
    /// Opens the folder at `path`, and makes it if it does not exist. All ranks call this together. Only rank 0's
    /// folder is used, and the incomplete checkpoints of a writer that died are removed there. For
    /// [sharded](Self::save_sharded) checkpoints it must be the same folder on every rank.
    ///
    /// If this process opens the folder again, only the later `Checkpoints` can save; what was handed over before is
    /// written first. In an [elastic](crate::elastic::run) job a later round takes the folder over from an earlier one,
    /// whose rank 0 may be frozen. When that one wakes, it notices, and at most removes an old checkpoint that it was
    /// about to remove. The failure of a sharded write of an earlier `Checkpoints` is only logged as a warning: its
    /// ranks are not those of the new group.
    ///
    /// A process that writes a checkpoint ignores SIGXFSZ, as [`ProcessGroup::join`] says.
    ///
    /// The other ranks wait for rank 0's disk 10 minutes and 30 s, or for the group's time-out, if that is longer.
    ///
    /// # Errors
    /// On every rank, if rank 0 cannot write there, or a process of another job writes there. In an elastic job the
    /// error ends rank 0 alone: for the others it is that rank's failure.
    pub fn open(path: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let _section = group.announce_section();
        let is_main = group.rank().is_main();
        let writer = if is_main { start(&path, group) } else { Ok(Writer::member(&path, group.rank())) };
        let outcome = is_main.then(|| writer.as_ref().map(drop).map_err(Error::clone));
        newest::agree(&patient(group, TIMEOUT, Caller::CheckpointsOpen), outcome)?;
        Ok(Self {
            path,
            group: group.clone(),
            keep: KEEP,
            timeout: TIMEOUT,
            writer: writer?,
            threads: Mutex::default(),
            skipped: Mutex::default(),
            warned: AtomicBool::default(),
        })
    }

    /// The newest complete checkpoint in the folder at `path`, for a program that saves nothing there, such as an evaluation beside the training. All
    /// ranks call this together, and get the same one, as from [`newest`](Self::newest). Nothing is written or locked: the folder may be another job's,
    /// or one in which this program may only read. The elements of a [sharded](Self::save_sharded) checkpoint are read when they are asked for: let the job that writes
    /// [keep](Self::keep) so many that it does not remove this one before.
    ///
    /// ```
    /// use phalanx::checkpoint::Checkpoints;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path();
    /// # let group = phalanx::init()?;
    /// # let training = Checkpoints::open(path, &group)?;
    /// # training.save(100, |snapshot| snapshot.value("momentum", &0.5f32))?;
    /// # training.finish()?;
    ///
    /// let saved = Checkpoints::read(path, &group)?.expect("the training has saved one"); // path: "runs/digits"
    /// assert_eq!(saved.value::<f32>("momentum")?, 0.5);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`newest`](Self::newest), within 10 minutes for each checkpoint on each rank; and if there is no such folder.
    pub fn read(path: impl AsRef<Path>, group: &ProcessGroup) -> Result<Option<Saved>> {
        let path = path.as_ref();
        let _section = group.announce_section();
        let group = patient(group, TIMEOUT, Caller::CheckpointsRead);
        let search = group.rank().is_main().then(|| Search::new(path));
        newest::share(&group, path, search).map(|(saved, _)| saved)
    }

    /// How many checkpoints are kept: 3 by default, at least 1. When a new one is complete, those before the `count`
    /// newest complete ones are removed. One that [`newest`](Self::newest) has skipped does not count. During a write there is
    /// one more.
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
        self
    }

    /// How long a rank may be busy with its disk in one call; 10 minutes by default. It limits three waits.
    /// [`save`](Self::save), [`save_sharded`](Self::save_sharded), [`newest`](Self::newest) and
    /// [`finish`](Self::finish) wait so long for the write in progress. Ranks that write a sharded checkpoint wait so
    /// long for each other. And `newest`, after the first wait, may take so long on each rank to read or compare one
    /// checkpoint. In `save_sharded` and `newest` the other ranks wait 30 s longer, also if the group's time-out is
    /// shorter: a slow disk is an error of the call, and not a failure of the group. A longer time-out of the group
    /// stays in force.
    ///
    /// In [`save`](Self::save) rank 0 alone waits, and the others wait for it in their next collective, no longer than the group's time-out: the group fails
    /// then. So give the group a longer time-out than this one.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The newest complete checkpoint, the same on every rank. All ranks call this together. Rank 0 reads it and sends
    /// it to the others, so they need not see the folder. If another rank sees a later one at its path, that is a warning in the log. Of a sharded one rank 0 reads only the parts; the ranks share
    /// the work of comparing checksums of the tensors, and each rank reads the tensors that it asks for
    /// ([`SavedTensor`]). Incomplete checkpoints are skipped, with a warning in the log, and listed by
    /// [`skipped`](Self::skipped). The newest is the one that was written last, whatever its step.
    ///
    /// # Errors
    /// On every rank, if there are checkpoints and none is complete; the error names each, and what is wrong with it. A program that
    /// began anew there would in the end replace all that is left of its work. Move them away to begin anew.
    ///
    /// On every rank, if two checkpoints have the number of the newest, since one was copied or moved there from another run.
    ///
    /// On every rank also if a checkpoint that may be complete cannot be read: access is denied, a network file system fails, it is a link that leads nowhere, a later version of this
    /// crate has written it, or some rank has too little memory, does not see all files of a sharded one, or takes too
    /// long to read it. Also the errors of [`ProcessGroup::broadcast`].
    pub fn newest(&self) -> Result<Option<Saved>> {
        self.newest_by(Search::new)
    }

    fn newest_by(&self, search: impl FnOnce(&Path) -> Result<Search>) -> Result<Option<Saved>> {
        let _section = self.group.announce_section();
        let (group, is_main) = (self.patient(Caller::CheckpointsNewest), self.group.rank().is_main());
        // The write in progress is newer than what is there. The others wait for its end, and only then for the
        // reading.
        newest::agree(&group, is_main.then(|| self.writer.settle(Deadline::after(self.timeout))))?;
        newest::compare_folders(&group, &self.path)?;
        let (saved, skipped) = newest::share(&group, &self.path, is_main.then(|| search(&self.path)))?;
        *self.skipped.lock() = skipped;
        Ok(saved)
    }

    /// The checkpoints that the last [`newest`](Self::newest) has skipped, the newest first; the same on every rank.
    pub fn skipped(&self) -> Vec<Skipped> {
        self.skipped.lock().clone()
    }

    /// Saves the state after `step`. On rank 0 `fill` collects it, and a thread writes it while training continues. On
    /// the other ranks this does nothing: `fill` is not called, and must not call collectives.
    ///
    /// Only one write is in progress at a time: this waits for the previous one, and returns its failure. The new
    /// snapshot is written also in that case, so a program may report the failure and continue. The failure of a
    /// [sharded](Self::save_sharded) write is kept for the next call that every rank makes, `save_sharded` or
    /// [`finish`](Self::finish).
    ///
    /// # Errors
    /// What `fill` returns; then nothing is written. The failure of the previous write; then the snapshot is written
    /// all the same. If the previous write has not ended when the time-out passes; then `fill` is not called, and nothing is written. On the other
    /// ranks, from the second call after rank 0 of the group was lost; the first one warns.
    pub fn save(&self, step: u64, fill: impl FnOnce(&mut Snapshot) -> Result<()>) -> Result<()> {
        if !self.group.rank().is_main() {
            return self.check_main_saves(step);
        }
        let _section = self.group.announce_section();
        // Else there would be memory for two copies of the state, as long as the other one is written.
        self.writer.ready(Deadline::after(self.timeout))?;
        let mut snapshot = Snapshot::default();
        fill(&mut snapshot)?;
        snapshot.check_whole()?;
        let before = self.writer.write(self.job(step, snapshot, None), Deadline::after(self.timeout))?;
        before.map_or(Ok(()), |before| Err(self.note_remote_error(before)))
    }

    /// Whether rank 0 saves what this rank leaves to it. In an elastic job whose ranks go on in another group after a [step](elastic::Context::step), it may
    /// have been lost. At first that is a warning: a rank may know of the loss a step before `Step::changed` says that the checkpoints can be opened anew.
    fn check_main_saves(&self, step: u64) -> Result<()> {
        const REMEDY: &str = "open the checkpoints anew with the group of now: at the beginning of an elastic loop, and in it when `Step::changed` is true";
        let Some(cause) = self.group.watched_failure() else { return Ok(()) };
        let has_warned = self.warned.swap(true, Ordering::Relaxed);
        let Some(main) = cause.peer().filter(|peer| peer.is_main()) else {
            if !has_warned {
                notice::warn(format_args!(
                    "these checkpoints' group has failed ({cause}): whether its rank 0 still saves is not known to this rank; {REMEDY}"
                ));
            }
            return Ok(());
        };
        let unsaved = format!(
            "nobody saves the checkpoint of step {step}: rank 0 of these checkpoints' group was lost ({cause})"
        );
        if !has_warned {
            notice::warn(format_args!("{unsaved}; {REMEDY}"));
            return Ok(());
        }
        // The program is told.
        let _ = self.group.failure();
        Err(Error::aborted(unsaved).with_peer(main).with_remedy(REMEDY))
    }

    /// Saves a state after `step` of which each rank has a part. All ranks call this together. On every rank `fill`
    /// collects the rank's own part: whole tensors, [slices](Snapshot::slice) of tensors that are divided among ranks,
    /// and parts. It must not call collectives. A thread of each rank writes it to the rank's own file while training
    /// continues. When all are done, rank 0 completes the checkpoint, which any number of ranks may read.
    ///
    /// One rank, such as rank 0, saves the state that all ranks have in common. Names of tensors and parts belong to the
    /// checkpoint, not to a rank: if two ranks save the same part, or the same element of a tensor, that is an error.
    ///
    /// Every rank must see the folder: all on one host, or on a shared disk. The call is a collective, and waits for
    /// the slowest rank. As with [`save`](Self::save), only one write is in progress at a time: this waits for the
    /// previous one, and returns its failure on every rank, whichever rank failed. The new snapshot is written also in
    /// that case.
    ///
    /// The first call makes a [group](ProcessGroup::new_group) of all ranks, which their threads use beside the
    /// program.
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
    /// On every rank, and nothing is written: what `fill` returns on any rank, or that it panics there; if slices of a tensor overlap or leave
    /// gaps, which the error names with their ranks; if two ranks save a part of the same name, or they save different
    /// steps; and if the previous write has not ended on some rank when the time-out passes. On every rank, and the
    /// snapshot is written all the same: the failure of the previous write. Also the errors of
    /// [`ProcessGroup::gather_object`].
    #[doc(alias("async_save", "dcp.save", "ShardedTensor"))]
    pub fn save_sharded(&self, step: u64, fill: impl FnOnce(&mut Snapshot) -> Result<()>) -> Result<()> {
        let _section = self.group.announce_section();
        let mut snapshot = Snapshot::default();
        // On all ranks at the same time, whoever waits for a disk: it may take part in a call of theirs, as that of a `TrainState` does.
        let filled = catch_unwind(AssertUnwindSafe(|| fill(&mut snapshot)));
        let (filled, panic) = match filled {
            Ok(filled) => (filled, None),
            Err(panic) => (Err(RemoteError::of_panic(&*panic, self.group.rank()).error()), Some(panic)),
        };
        let snapshot = filled.map(|()| snapshot);
        let deadline = Deadline::after(self.timeout);
        let ready = match &snapshot {
            Ok(_) => self.writer.ready(deadline),
            Err(_) => Ok(None),
        };
        let mut threads = self.threads.lock();
        let group = self.patient(Caller::CheckpointsSaveSharded);
        let connected = threads.as_ref().is_some_and(|threads| threads.failure().is_none());
        let agreed = sharded::agree(&group, step, &snapshot, ready, connected);
        if let Some(panic) = panic {
            // The others have heard of it.
            resume_unwind(panic);
        }
        let agreed = agreed.map_err(|error| self.note_remote_error(error))?;
        let current = match threads.take().filter(|_| agreed.connected) {
            Some(current) => current,
            None => group.aside(Caller::CheckpointsSaveSharded, self.timeout)?,
        };
        *threads = Some(current.clone());
        let together = Together { threads: current.with_timeout(self.timeout), tensors: agreed.tensors };
        let job = self.job(step, snapshot?, Some(together));
        if let Err(error) = self.writer.write(job, deadline) {
            // The other ranks write, and would wait for this rank's part.
            current.abort(error.clone());
            return Err(error);
        }
        agreed.before.map_or(Ok(()), |before| Err(self.note_remote_error(before)))
    }

    fn patient(&self, caller: Caller) -> ProcessGroup {
        patient(&self.group, self.timeout, caller)
    }

    fn job(&self, step: u64, snapshot: Snapshot, together: Option<Together>) -> Job {
        let skipped = self.skipped.lock();
        let folders = skipped.iter().filter_map(|skipped| skipped.folder.file_name()?.to_str());
        let damaged = folders.filter_map(names::checkpoint_number).collect();
        drop(skipped);
        let world_size = self.group.world_size().get();
        Job { step, world_size, keep: self.keep.get(), damaged, snapshot, together }
    }

    /// An error that may come from another rank, as this rank returns it.
    fn note_remote_error(&self, error: Error) -> Error {
        match error.peer() {
            Some(peer) if peer != self.group.rank() && self.group.watched_failure().is_none() => {
                self.group.note_remote_error(error)
            }
            _ => error,
        }
    }

    /// Waits until the last snapshot is on the disk. If it was sharded, waits on every rank until all have written
    /// theirs. Without this call the drop waits, at most 30 s, and a failure is only logged.
    ///
    /// # Errors
    /// If the last write failed and no call has returned that yet, or it has not ended when the time-out passes. For a
    /// sharded write the result is the same on every rank.
    pub fn finish(&self) -> Result<()> {
        let _section = self.group.announce_section();
        self.writer.finish(Deadline::after(self.timeout)).map_err(|error| self.note_remote_error(error))
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
        // The other workers wait for this one to form the next group, in which the write goes on.
        if self.group.failure().is_some() && elastic::is_elastic() {
            self.writer.leave();
        } else if self.writer.is_writing() {
            // What follows waits for the disk.
            self.group.note_panic();
        }
    }
}

/// The group with a longer time-out, for a call in which a rank may wait so long for a disk: a slow disk is an error of the
/// call, not of the group.
fn patient(group: &ProcessGroup, timeout: Duration, caller: Caller) -> ProcessGroup {
    let timeout = group.timeout().max(timeout.saturating_add(REMOTE_DISK_GRACE));
    group.with_timeout(timeout).in_call(caller)
}

/// Makes the folder and those above it, so that they survive a loss of power.
fn make(path: &Path) -> io::Result<()> {
    let made: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(path)?;
    for folder in made {
        SystemDisk.sync_folder(folder.parent().unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

fn start(path: &Path, group: &ProcessGroup) -> Result<Writer> {
    make(path).map_err(|error| writer::unusable(path, error))?;
    Writer::open(path, &Claimant { job: elastic::job_name()?, round: group.generation().0 })
}

/// The program on this crate's page must run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
