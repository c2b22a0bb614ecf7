//! A checkpoint that every rank writes a part of.
//!
//! In the user's call, the ranks compare what they have, by collectives of the user's group: who has which slices, and
//! how the previous write ended. The writing threads then agree through their own group, so that they do not interfere
//! with the program's calls. [`writes`](super::writes) has the order of what they do.
//!
//! Gaps and overlaps are errors of the call that makes them, on all ranks. The threads need a group of their own
//! because the order of the user's collectives is the program's. In it a rank's death is a failure of the group, and a
//! disk's error is a message.
//!
//! Rank 0 commits as it does alone, after all have synced their files, so readers need no new rule. The manifest's
//! slices are checked like input from outside. Elements are read by offset, so a rank reads only what it needs.

use std::collections::BTreeMap;
use std::hash::RandomState;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::disk::{Disk, SystemDisk};
use super::files::{self, Unfit};
use super::folder::{Folder, Part, carry_out};
use super::layout::{self, Proposed, TensorEntry};
use super::manifest::{FileEntry, Manifest, max_parts, shard};
use super::names;
use super::snapshot::Snapshot;
use super::writer::{Job, unwritten};
use super::writes::{Operation, Outcome, Role, WriteOrder};
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, Result};
use crate::group::{ProcessGroup, RemoteError};
use crate::host;
use crate::rank::Rank;

/// How long a shared file system may take, at most, to show on one host what another has made: NFS caches a folder for
/// up to a minute.
const VISIBILITY_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a rank looks: soon at first, then less often.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// So much of a name that is none is shown, in characters.
const LONGEST_SHOWN: usize = 100;

/// The remedy if ranks do not see the same files.
pub(super) const SHARE: &str = "put the folder on a disk that all ranks share, and give every rank its path there, or call `save` on all";

/// What connects the threads of all ranks in one write.
#[derive(Debug)]
pub(super) struct Together {
    /// The group of the threads.
    pub threads: ProcessGroup,
    /// On rank 0: the tensors and parts of all ranks.
    pub tensors: Vec<TensorEntry>,
}

/// What a rank contributes to the call that saves.
#[derive(Serialize, Deserialize)]
struct Proposal {
    step: u64,
    /// Its tensors and the names of its parts, or why it can save nothing.
    state: Result<(Vec<Proposed>, Vec<String>), RemoteError>,
    /// The failure of the previous write.
    before: Option<RemoteError>,
    /// Whether it has a working group for the threads.
    connected: bool,
}

/// Rank 0's decision.
#[derive(Serialize, Deserialize)]
struct Verdict {
    before: Option<RemoteError>,
    connected: bool,
}

/// Why nothing is written.
#[derive(Serialize, Deserialize)]
enum Refusal {
    /// A rank can save nothing.
    Rank(RemoteError),
    /// The contributions do not make a checkpoint.
    Together(String),
}

/// What all ranks have agreed on.
pub(super) struct Agreement {
    /// On rank 0: the tensors and parts of all ranks.
    pub tensors: Vec<TensorEntry>,
    /// The failure of the previous write, on any rank.
    pub before: Option<Error>,
    /// Whether every rank has a working group for the threads.
    pub connected: bool,
}

/// Compares the contributions of all ranks. `ready` is the failure of the previous write, or why no new write can
/// begin.
pub(super) fn agree(
    group: &ProcessGroup,
    step: u64,
    snapshot: &Result<Snapshot>,
    ready: Result<Option<Error>>,
    connected: bool,
) -> Result<Agreement> {
    let me = group.rank();
    let (before, state) = match (snapshot, ready) {
        (Ok(snapshot), Ok(before)) => {
            let tensors = snapshot.propose().map_err(Error::invalid_argument);
            (before, tensors.map(|tensors| (tensors, snapshot.parts.keys().cloned().collect())))
        }
        (Err(error), _) => (None, Err(error.clone())),
        (Ok(_), Err(error)) => (None, Err(error)),
    };
    let own = state.as_ref().err().cloned();
    let proposal = Proposal {
        step,
        state: state.map_err(|error| RemoteError::of(&error, me)),
        before: before.as_ref().map(|error| RemoteError::of(error, me)),
        connected,
    };
    let all = group.gather_object(&proposal, Rank::MAIN)?;
    let mut tensors = Vec::new();
    let verdict = all.map(|all| {
        let verdict = Verdict {
            before: all.iter().find_map(|proposal| proposal.before.clone()),
            connected: all.iter().all(|proposal| proposal.connected),
        };
        tensors = merged(step, all)?;
        Ok(verdict)
    });
    let verdict: Result<Verdict, Refusal> = group.broadcast_object(verdict.as_ref(), Rank::MAIN)?;
    match verdict {
        Ok(Verdict { before: told, connected }) => {
            Ok(Agreement { tensors, before: before.or_else(|| told.map(RemoteError::error)), connected })
        }
        Err(Refusal::Rank(told)) => Err(own.unwrap_or_else(|| told.error())),
        Err(Refusal::Together(cause)) => Err(Error::mismatch(cause).with_remedy(
            "let the ranks' slices make up each tensor once, and name it alike, in one type and shape",
        )),
    }
}

/// The tensors of all ranks, merged.
fn merged(step: u64, all: Vec<Proposal>) -> Result<Vec<TensorEntry>, Refusal> {
    let (mut tensors, mut parts, world_size) = (Vec::with_capacity(all.len()), BTreeMap::new(), all.len());
    for (rank, proposal) in (0..).zip(all) {
        let (slices, names) = proposal.state.map_err(Refusal::Rank)?;
        if proposal.step != step {
            let cause = format!("rank 0 saves step {step}, and rank {rank} step {}", proposal.step);
            return Err(Refusal::Together(cause));
        }
        for name in names {
            if let Some(other) = parts.insert(name.clone(), rank) {
                let cause = format!("the part {name:?} is saved twice: by rank {other}, and by rank {rank}");
                return Err(Refusal::Together(cause));
            }
        }
        tensors.push((rank, slices));
    }
    let most = max_parts(world_size);
    if parts.len() > most {
        let cause =
            format!("{world_size} ranks save {} parts, and their checkpoint may have {most}", parts.len());
        return Err(Refusal::Together(cause));
    }
    layout::merged(tensors.into_iter(), &RandomState::new()).map_err(Refusal::Together)
}

/// Writes checkpoint `number`, on rank 0, together with the other ranks.
pub(super) fn lead(folder: &Folder, number: u64, job: &Job, together: &Together) -> Result<()> {
    let threads = Threads::of(together);
    let failed = |error| unwritten(job.step, &folder.path, Rank::MAIN, error);
    let about = (job.step, job.world_size);
    let mut part = Part::new(number, about, shard(0, job.world_size), &job.snapshot);
    let mut gathered = Vec::new();
    carry_out(WriteOrder::new(Role::Leader, part.count()), |operation, failure: Option<&Error>| {
        match operation {
            Operation::Announce => {
                let name = failure.map_or_else(|| Ok(name(&part.begun)), |error| Err(error.clone()));
                threads.tell(Some(name)).map(drop)
            }
            Operation::Gather => {
                let own = failure.map_or_else(|| Ok(part.entries()), |error| Err(error.clone()));
                threads.gather(own).map(|files| gathered = files)
            }
            Operation::SeeFiles => {
                let manifest = manifest(about, &together.tensors, std::mem::take(&mut gathered))
                    .map_err(|cause| alone(failed(io::Error::other(cause))))?;
                let deadline = threads.visible();
                let mut files = manifest.files.iter();
                files
                    .try_for_each(|file| threads.see(&part.begun, file, deadline))
                    .map_err(|unseen| alone(unseen.at(Rank::MAIN, host::name())))?;
                part.manifest = Some(manifest);
                Ok(())
            }
            Operation::Conclude => threads.tell(Some(failure.map_or(Ok(()), |error| Err(error.clone())))),
            own => folder.operate(&mut part, own).map_err(|error| alone(failed(error))),
        }
    })
}

/// Writes this rank's part of the checkpoint that rank 0 writes at the same time. The folder is at `path` for this
/// rank. Only rank 0 changes the folder itself, since it checks that it still owns it.
pub(super) fn follow(path: &Path, job: &Job, together: &Together) -> Result<()> {
    let threads = Threads::of(together);
    let rank = together.threads.rank();
    let failed = |error| alone(unwritten(job.step, path, rank, error));
    let about = (job.step, job.world_size);
    let mut part = Part::new(0, about, shard(rank.get(), job.world_size), &job.snapshot);
    let mut name = String::new();
    carry_out(WriteOrder::new(Role::Member, part.count()), |operation, failure: Option<&Error>| {
        match operation {
            Operation::Announce => threads.tell(None).map(|told| name = told),
            Operation::FindFolder => {
                threads.begun(path, &name).map(|begun| part.begun = begun).map_err(alone)
            }
            Operation::WriteFile(number) => part.write(&SystemDisk, number).map_err(failed),
            // Rank 0 syncs what its own host has made: names that another host has made may have to be synced there.
            Operation::SyncFolder => SystemDisk.sync_folder(&part.begun).map_err(failed),
            Operation::Gather => {
                let own = failure.map_or_else(|| Ok(part.entries()), |error| Err(error.clone()));
                threads.gather(own).map(drop)
            }
            // Rank 0 knows the results of all, and sends the final one.
            Operation::Conclude => threads.tell(None),
            Operation::MakeFolder
            | Operation::SeeFiles
            | Operation::WriteManifest
            | Operation::Rename
            | Operation::SyncParent
            | Operation::GiveUp => Ok(()),
        }
    })
}

/// A failure of this rank in what it does by itself.
fn alone(error: Error) -> (Outcome, Error) {
    (Outcome::Failed, error)
}

fn name(begun: &Path) -> String {
    begun.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The manifest of the ranks' files, by rank, each rank's tensors first.
pub(super) fn manifest(
    (step, world_size): (u64, u32),
    tensors: &[TensorEntry],
    ranks: Vec<Vec<FileEntry>>,
) -> Result<Manifest, String> {
    let (mut files, mut parts) = (Vec::with_capacity(ranks.len()), Vec::new());
    for mut rank in ranks {
        parts.extend(rank.split_off(rank.len().min(1)));
        files.append(&mut rank);
    }
    parts.sort_by(|left, right| left.name.cmp(&right.name));
    files.extend(parts);
    let manifest = Manifest::sharded(step, world_size, files, tensors.to_vec());
    manifest.check(&RandomState::new()).map(|()| manifest)
}

/// The group of the writing threads. If this one ends before its part is done, the others notice.
struct Threads<'a>(&'a ProcessGroup);

impl<'a> Threads<'a> {
    fn of(together: &'a Together) -> Self {
        Self(&together.threads)
    }

    /// How long a rank waits to see what another has made: the others wait for it meanwhile, and must learn the result.
    fn visible(&self) -> Deadline {
        Deadline::after((self.0.timeout() / 2).min(VISIBILITY_TIMEOUT))
    }

    /// The folder that rank 0 has made, as soon as this rank sees it.
    fn begun(&self, path: &Path, name: &str) -> Result<PathBuf> {
        let (begun, rank) = (path.join(name), self.0.rank());
        // It comes from another process, and this one writes there.
        if !names::is_writing(name) {
            let name: String = name.chars().take(LONGEST_SHOWN).collect();
            let cause = format!(
                "rank 0 says that it writes the checkpoint in {name:?}, which is no name of its folder"
            );
            return Err(Error::malformed(cause).at(rank, host::name()));
        }
        match self.wait(path, self.visible(), || begun.is_dir().then_some(()).ok_or(())) {
            Ok(()) => Ok(begun),
            Err(()) => {
                let path = path.display();
                Err(Error::environment(format!(
                    "rank {rank} does not see {name}, which rank 0 has made, in {path}"
                ))
                .at(rank, host::name())
                .with_remedy(SHARE))
            }
        }
    }

    /// Makes sure that rank 0 sees the file that a rank has written.
    fn see(&self, begun: &Path, file: &FileEntry, deadline: Deadline) -> Result<()> {
        let seen = self.wait(begun, deadline, || files::open_entry(begun, file).map(drop));
        seen.map_err(|unfit| {
            let (cause, source) = match unfit {
                Unfit::Torn(cause) | Unfit::Late(cause) => (cause, None),
                Unfit::Unread(cause, source) => (cause, source),
            };
            let error = Error::environment(format!(
                "rank 0 does not see in {} what was written: {cause}",
                begun.display()
            ))
            .with_remedy(SHARE);
            source.into_iter().fold(error, Error::with_source)
        })
    }

    /// Repeats `attempt`, which looks into the folder `above`, until it succeeds; returns the last failure when the
    /// deadline passes, or the group has failed: then rank 0 may have removed what this rank looks for.
    fn wait<T, E>(
        &self,
        above: &Path,
        deadline: Deadline,
        mut attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut backoff = Backoff::new(PAUSES, deadline);
        loop {
            match attempt() {
                Err(_) if self.0.failure().is_none() && backoff.pause() => {
                    // A network file system reads the folder again when it is opened.
                    let _ = std::fs::read_dir(above).map(Iterator::count);
                }
                outcome => return outcome,
            }
        }
    }

    /// Gives every rank rank 0's result; the others pass `None`.
    fn tell<T: Serialize + DeserializeOwned>(
        &self,
        outcome: Option<Result<T>>,
    ) -> Result<T, (Outcome, Error)> {
        let own = outcome.as_ref().and_then(|outcome| outcome.as_ref().err().cloned());
        let told = outcome.map(|outcome| outcome.map_err(|error| RemoteError::of(&error, self.0.rank())));
        let told: Result<T, RemoteError> = self.heard(self.0.broadcast_object(told.as_ref(), Rank::MAIN))?;
        told.map_err(|told| alone(own.unwrap_or_else(|| told.error())))
    }

    /// Gives rank 0 what each rank has written, or the first error; the others get nothing.
    fn gather(&self, own: Result<Vec<FileEntry>>) -> Result<Vec<Vec<FileEntry>>, (Outcome, Error)> {
        let told = own.as_ref().map_err(|error| RemoteError::of(error, self.0.rank()));
        let told: Result<Vec<FileEntry>, RemoteError> = told.cloned();
        let all = self.heard(self.0.gather_object(&told, Rank::MAIN))?.unwrap_or_default();
        let all: Result<Vec<_>, RemoteError> = all.into_iter().collect();
        all.map_err(|told| alone(own.err().unwrap_or_else(|| told.error())))
    }

    /// An error of this rank alone ends the group, so that no rank waits for a message that will not come.
    fn heard<T>(&self, outcome: Result<T>) -> Result<T, (Outcome, Error)> {
        outcome.map_err(|error| {
            self.0.abort(error.clone());
            (Outcome::Lost, error)
        })
    }
}

impl Drop for Threads<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (rank, host) = (self.0.rank(), host::name());
            let cause = "the thread that writes this rank's part of a checkpoint has panicked";
            self.0.abort(Error::panicked(cause).at(rank, host).with_peer(rank));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_elsewhere_is_not_written_to() {
        let (root, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
        let (path, ours) = (root.path().join("checkpoints"), names::writing(1, 1));
        for folder in [path.join(&ours), root.path().join("other")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let threads = Threads(&group);
        assert_eq!(threads.begun(&path, &ours).unwrap(), path.join(&ours));
        for name in ["../other", "..", "", root.path().join("other").to_str().unwrap()] {
            let error = threads.begun(&path, name).unwrap_err();
            assert!(error.to_string().contains("no name of its folder"), "{error}");
        }
    }

    #[test]
    fn every_rank_may_save_as_many_parts_as_one() {
        let ranks = |world: usize, parts: usize| {
            let proposal = |rank: usize| Proposal {
                step: 1,
                state: Ok((vec![], (0..parts).map(|part| format!("part-{rank}-{part}")).collect())),
                before: None,
                connected: false,
            };
            merged(1, (0..world).map(proposal).collect())
        };
        assert!(ranks(1, 1000).is_ok() && ranks(1001, 1).is_ok() && ranks(3, 1000).is_ok());
        for (world, parts, said) in
            [(1, 1001, "1 ranks save 1001 parts"), (101, 1000, "101 ranks save 101000 parts")]
        {
            match ranks(world, parts) {
                Err(Refusal::Together(cause)) => assert!(cause.contains(said), "{cause}"),
                _ => panic!("{world} ranks save {parts} parts each"),
            }
        }
    }
}
