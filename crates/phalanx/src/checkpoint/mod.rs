//! Checkpoints: the state of a job on disk, from which a restarted job goes on.
//!
//! Every rank calls the same things in the same order; rank 0 alone writes, on a thread of its own, and what it reads it
//! gives to all. A checkpoint is there whole or not at all: whatever is killed when, and however full the disk, the
//! newest that was finished is found.
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
//! of its own, and `manifest.json` with all lengths and checksums (XXH3, 64 bits). The checksums find what a crash or a
//! disk has damaged, not what somebody has forged; but nothing in a forged checkpoint is executed, leads out of the
//! folder, or takes more memory than its files are long.

mod disk;
mod folder;
#[cfg(test)]
mod frozen;
mod manifest;
mod newest;
mod owner;
mod saved;
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
pub use self::newest::Skipped;
use self::owner::Claimant;
#[cfg(any(test, fuzzing))]
pub use self::owner::fuzz as fuzz_claim;
pub use self::saved::{Saved, SavedTensor};
pub use self::snapshot::Snapshot;
#[cfg(any(test, fuzzing))]
pub use self::tensors::fuzz as fuzz_tensors;
use self::writer::{Job, Writer};
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::elastic;
use crate::error::Result;
use crate::group::ProcessGroup;

/// How long a call waits for the write before it, unless [`Checkpoints::with_timeout`] says otherwise.
const TIMEOUT: Duration = Duration::from_secs(10 * 60);
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
    /// On rank 0.
    writer: Option<Writer>,
    skipped: Mutex<Vec<Skipped>>,
}

impl Checkpoints {
    /// Opens the folder at `path`, and makes it if need be; all ranks call this together. Only rank 0's folder counts, and
    /// what a writer that died has left half done there is removed.
    ///
    /// Opened again, by this process, it is the later one that saves, behind what was handed over before. In an
    /// [elastic](crate::elastic::run) job a later round takes the folder over from an earlier one, whose rank 0 may be frozen: when
    /// that one wakes, it finds out, and at most removes an old checkpoint that it was about to remove.
    ///
    /// # Errors
    /// On every rank, if rank 0 cannot write there, or a process of another job writes there. In an elastic job it ends rank 0
    /// alone: to the others it is that rank's failure.
    pub fn open(path: impl AsRef<Path>, group: &ProcessGroup) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let writer = group.rank().is_main().then(|| start(&path, group));
        let (writer, outcome) = match writer {
            Some(Ok(writer)) => (Some(writer), Some(Ok(()))),
            Some(Err(error)) => (None, Some(Err(error))),
            None => (None, None),
        };
        newest::agree(&group.in_call(Caller::CheckpointsOpen), outcome)?;
        Ok(Self {
            path,
            group: group.clone(),
            keep: KEEP,
            timeout: TIMEOUT,
            writer,
            skipped: Mutex::default(),
        })
    }

    /// How many checkpoints are kept, 3 by default and 1 at least: when a new one is whole, those before the `count` newest
    /// whole ones are removed. While it is written there is one more.
    pub fn keep(mut self, count: usize) -> Self {
        self.keep = NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
        self
    }

    /// How long [`save`](Self::save) and [`finish`](Self::finish) wait for the write in flight; 10 minutes by default.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The newest whole checkpoint, the same on every rank; all ranks call this together. Rank 0 reads it and sends it to
    /// the others, so they need not see the folder. What is not whole is passed over with a warning in the log, and named
    /// by [`skipped`](Self::skipped). The newest is the one that was written last, of whatever step.
    ///
    /// # Errors
    /// On every rank, if a checkpoint that may be whole cannot be read: access is denied, a later version of this crate has
    /// written it, or some rank has too little memory. And as [`ProcessGroup::broadcast`].
    pub fn newest(&self) -> Result<Option<Saved>> {
        // The one in flight is newer than what is there.
        let found = self.writer.as_ref().map(|writer| {
            writer.settle(Deadline::after(self.timeout))?;
            newest::find(&self.path)
        });
        let (saved, skipped) = newest::share(&self.group.in_call(Caller::CheckpointsNewest), found)?;
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
    /// written in that case too, so a program may report the failure and go on.
    ///
    /// # Errors
    /// What `fill` returns; then nothing is written. If the write before failed, and if it has not ended when the time-out
    /// passes; then, too, nothing is written.
    pub fn save(&self, step: u64, fill: impl FnOnce(&mut Snapshot) -> Result<()>) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let mut snapshot = Snapshot::default();
        fill(&mut snapshot)?;
        let world_size = self.group.world_size().get();
        let job = Job { step, world_size, keep: self.keep.get(), snapshot };
        writer.write(job, Deadline::after(self.timeout))
    }

    /// Waits until the last snapshot is on the disk. Without it the drop waits, at most 30 s, and a failure is only logged.
    ///
    /// # Errors
    /// If the last write failed, and nobody was told yet, or it has not ended when the time-out passes.
    pub fn finish(&self) -> Result<()> {
        self.writer.as_ref().map_or(Ok(()), |writer| writer.finish(Deadline::after(self.timeout)))
    }

    /// The folder, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        // The other workers wait for this one to form the next group, in which it goes on writing.
        if self.group.failure().is_some()
            && elastic::is_elastic()
            && let Some(writer) = &self.writer
        {
            writer.leave();
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
    Writer::open(path, &Claimant { job: elastic::job_name()?, round: group.epoch().0 })
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
