//! Finds the newest complete checkpoint, and gives it to every rank.
//!
//! Rank 0 reads, and sends the others what it has read. There are three reasons: only the folder of the rank that
//! writes certainly holds the checkpoints; all ranks must resume from the same one; and a shared disk is read once
//! instead of by each rank.
//!
//! A sharded checkpoint may be larger than the memory of any rank. Rank 0 sends its manifest and parts. Every rank
//! checks that it sees the same manifest, and files of the right lengths; a rank that does not sees another folder,
//! which is an error on all. The files with tensors are divided among the ranks, and each rank compares the checksums
//! of its share. If one is wrong, all go on to the previous checkpoint.

use std::hash::RandomState;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::files::{self, Unfit};
use super::folder::{self, Entry};
use super::manifest::{FileEntry, MANIFEST, Manifest};
use super::saved::{Contents, Saved};
use super::sharded::SHARE;
use super::{REMOTE_DISK_GRACE, tensors};
use crate::collective::ReduceOp;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::{ProcessGroup, RemoteError};
use crate::host;
use crate::notice::warn;
use crate::rank::Rank;

/// How much of a file is sent in one call.
const PIECE: usize = 64 << 20;
/// Until a folder is listed again.
const LIST_DELAY: Duration = Duration::from_millis(20);

/// A checkpoint that was skipped, because a crash or a damaged disk has left only a part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Skipped {
    /// Where it is.
    #[serde(with = "path_bytes")]
    pub folder: PathBuf,
    /// The fault that was found.
    pub cause: String,
}

/// The result of rank 0's search.
#[derive(Debug)]
pub(super) struct Found {
    pub folder: PathBuf,
    pub step: u64,
    pub world_size: u32,
    /// Of the step and of the tensors.
    pub checksum: u64,
    /// All files. Of a sharded checkpoint only the manifest and the parts: its tensors exist, and have not been read.
    pub contents: Contents,
    pub is_sharded: bool,
}

/// Rank 0's search through a folder, from the newest checkpoint to the oldest.
#[derive(Debug)]
pub(super) struct Search {
    folder: PathBuf,
    entries: std::vec::IntoIter<Entry>,
    /// The skipped checkpoints.
    pub skipped: Vec<Skipped>,
}

impl Search {
    pub fn new(folder: &Path) -> Result<Self> {
        let entries = Vec::new().into_iter();
        let mut search = Self { folder: folder.to_owned(), entries, skipped: Vec::new() };
        search.list()?;
        Ok(search)
    }

    /// Begins with what is there now, without what was skipped.
    fn list(&mut self) -> Result<()> {
        let mut entries = folder::list(&self.folder).map_err(|error| {
            Error::io(format!("cannot list the checkpoints in {}", self.folder.display()), error)
                .with_remedy("is the path right, and may rank 0 read it?")
        })?;
        entries.retain(|entry| self.skipped.iter().all(|skipped| skipped.folder != entry.path));
        self.entries = entries.into_iter();
        Ok(())
    }

    /// The next checkpoint that is complete as far as rank 0 can tell, if it can be read by the deadline.
    ///
    /// # Errors
    /// Also if there are checkpoints, and none is complete: a job that began anew would replace what can still be saved of them. And if two have
    /// the number of the next one.
    pub fn next(&mut self, deadline: Deadline) -> Result<Option<Found>> {
        while let Some(entry) = self.entries.next() {
            let same = self.entries.as_slice().first().filter(|other| other.number == entry.number);
            if let Some(other) = same {
                return Err(ambiguous(&self.folder, &entry, other));
            }
            match read(&entry.path, deadline) {
                Ok(found) => return Ok(Some(found)),
                // The job that writes there has removed it since, and written later ones. A network file system may still list it for a while.
                Err(_) if is_gone(&entry.path) && !deadline.has_passed() => {
                    std::thread::sleep(LIST_DELAY);
                    self.list()?;
                }
                Err(Unfit::Unread(cause, source)) => return Err(unreadable(&entry.path, &cause, source)),
                Err(Unfit::Late(cause)) => return Err(files::late(&entry.path, &cause)),
                Err(Unfit::Torn(cause)) => self.pass_over(entry.path, cause),
            }
        }
        if !self.skipped.is_empty() {
            return Err(all_damaged(&self.folder, &self.skipped));
        }
        Ok(None)
    }

    fn pass_over(&mut self, folder: PathBuf, cause: String) {
        let path = folder.display();
        warn(format_args!("the checkpoint {path} is incomplete and is skipped: {cause}"));
        self.skipped.push(Skipped { folder, cause });
    }
}

fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The most damaged checkpoints that an error describes.
const MAX_NAMED: usize = 5;

/// Refuses to begin anew beside damaged checkpoints.
fn all_damaged(folder: &Path, skipped: &[Skipped]) -> Error {
    let named = skipped.iter().take(MAX_NAMED).map(|Skipped { folder, cause }| {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        format!("{name}: {cause}")
    });
    let mut named: Vec<String> = named.collect();
    if let Some(more) = skipped.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
        named.push(format!("and {more} more"));
    }
    let (many, folder) = (skipped.len(), folder.display());
    let count = if many == 1 { "the only checkpoint".to_owned() } else { format!("all {many} checkpoints") };
    Error::environment(format!(
        "{count} in {folder} cannot be used, and there is none to resume from: {}",
        named.join("; ")
    ))
    .with_remedy(
        "bring one back from a copy; to begin anew, move these folders away, or take another folder of checkpoints",
    )
}

/// Refuses to choose between two checkpoints. They were written by two runs: none writes a number again.
fn ambiguous(folder: &Path, one: &Entry, other: &Entry) -> Error {
    let name = |entry: &Entry| entry.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (number, folder, mut names) = (one.number, folder.display(), [name(one), name(other)]);
    names.sort();
    let [one, other] = names;
    Error::environment(format!(
        "two checkpoints in {folder} have the number {number}, {one} and {other}: which is the newer one is not known"
    ))
    .with_remedy("was a checkpoint of another run copied there, or moved back? Move away the one from which the job is not to resume")
}

fn unreadable(path: &Path, cause: &str, source: Option<io::Error>) -> Error {
    let cause = format!("cannot read the checkpoint {}: {cause}", path.display());
    let error = match source {
        Some(source) => Error::io(cause, source),
        None => Error::environment(cause),
    };
    error.with_remedy("repair it, or move it away to resume from an older one")
}

fn read(folder: &Path, deadline: Deadline) -> Result<Found, Unfit> {
    let (manifest, bytes) = files::read_manifest(folder)?;
    let is_sharded = manifest.tensors.is_some();
    let mut contents = Vec::new();
    if is_sharded {
        for file in manifest.tensor_files() {
            files::open_entry(folder, file)?;
        }
        contents.push((MANIFEST.to_owned(), bytes));
    }
    let files = if is_sharded { manifest.part_files() } else { &manifest.files };
    for file in files {
        contents.push((file.name.clone(), files::read_entry(folder, file, deadline)?));
    }
    // The checksums are right: its writer has written exactly this.
    let tensors = contents.first().filter(|_| !is_sharded).map(|(_, file)| tensors::index(file));
    if let Some(Err(cause)) = tensors {
        return Err(Unfit::Unread(cause, None));
    }
    let (folder, step, world_size) = (folder.to_owned(), manifest.step, manifest.world_size);
    Ok(Found { folder, step, world_size, checksum: manifest.tensors_checksum(), contents, is_sharded })
}

/// What rank 0 sends the others.
#[derive(Serialize, Deserialize)]
struct Answer {
    skipped: Vec<Skipped>,
    found: Option<Announcement>,
}

/// A checkpoint without its contents.
#[derive(Serialize, Deserialize)]
struct Announcement {
    #[serde(with = "path_bytes")]
    folder: PathBuf,
    step: u64,
    world_size: u32,
    checksum: u64,
    is_sharded: bool,
    files: Vec<(String, u64)>,
}

/// A path as ranks send it, in bytes: serde writes a path only if it is UTF-8. In formats for people it is text.
mod path_bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => path.serialize(serializer),
            false => path.as_os_str().as_bytes().serialize(serializer),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        match deserializer.is_human_readable() {
            true => PathBuf::deserialize(deserializer),
            false => Vec::deserialize(deserializer).map(|bytes| OsString::from_vec(bytes).into()),
        }
    }
}

/// The newest checkpoint that a rank sees at its path.
#[derive(Debug, Serialize, Deserialize)]
struct Seen {
    host: String,
    number: u64,
    name: String,
}

/// Warns if another rank has a later checkpoint at its `path` than rank 0, whose folder alone is used. It is on another disk then: in an
/// earlier start another host had rank 0.
pub(super) fn compare_folders(group: &ProcessGroup, path: &Path) -> Result<()> {
    // The others need not see the folder.
    let newest = folder::list(path).unwrap_or_default().into_iter().next();
    let own = newest.map(|Entry { number, path }| Seen {
        host: host::name(),
        number,
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    });
    let all: Option<Vec<Option<Seen>>> = group.gather_object(&own, Rank::MAIN)?;
    if let Some(later) = all.and_then(|all| later(&all)) {
        warn(format_args!("in {} {later}", path.display()));
    }
    Ok(())
}

/// Says who sees a later checkpoint than rank 0, and which.
fn later(all: &[Option<Seen>]) -> Option<String> {
    let (main, others) = all.split_first()?;
    let here = main.as_ref().map_or("none, so that the job begins anew".to_owned(), |seen| {
        format!("{}, from which the job goes on", seen.name)
    });
    let number = main.as_ref().map_or(0, |seen| seen.number);
    let others = (1..).zip(others).filter_map(|(rank, seen): (u32, _)| Some((rank, seen.as_ref()?)));
    let (rank, Seen { host, number: found, name }) = others.max_by_key(|(_, seen)| seen.number)?;
    (*found > number).then(|| {
        format!(
            "rank {rank} on {host} sees the checkpoint {name}, and rank 0 {here}: had another host rank 0 before? Put the \
             folder on a disk that all hosts share"
        )
    })
}

/// Gives every rank the newest complete checkpoint in the folder, which is at `path` for this rank, and the skipped
/// ones. Rank 0 passes its search; the others pass `None`.
pub(super) fn share(
    group: &ProcessGroup,
    path: &Path,
    search: Option<Result<Search>>,
) -> Result<(Option<Saved>, Vec<Skipped>)> {
    let (mut search, mut failure) = match search {
        Some(Ok(search)) => (Some(search), None),
        Some(Err(error)) => (None, Some(error)),
        None => (None, None),
    };
    loop {
        let found = match failure.take() {
            Some(error) => Some(Err(error)),
            None => search.as_mut().map(|search| search.next(search_deadline(group))),
        };
        let (own, outcome) = match found {
            Some(Ok(found)) => {
                let announcement = found.as_ref().map(Announcement::of);
                let skipped = search.as_ref().map(|search| search.skipped.clone()).unwrap_or_default();
                (found.map(|found| found.contents), Some(Ok(Answer { skipped, found: announcement })))
            }
            Some(Err(error)) => (None, Some(Err(error))),
            None => (None, None),
        };
        let Answer { skipped, found } = agree(group, outcome)?;
        let Some(found) = found else { return Ok((None, skipped)) };
        let mut contents = receive(group, own, &found.files)?;
        for (_, bytes) in &mut contents {
            for piece in bytes.chunks_mut(PIECE) {
                group.broadcast(piece, Rank::MAIN)?;
            }
        }
        let Announcement { folder, step, world_size, checksum, is_sharded, .. } = found;
        if !is_sharded {
            let saved = Saved::whole(folder.clone(), (step, world_size, checksum), contents);
            return Ok((Some(saved.map_err(|cause| unreadable(&folder, &cause, None))?), skipped));
        }
        // The folder's name is the same on all ranks, its path may not be.
        let place = path.join(folder.file_name().unwrap_or_default());
        let Some((_, sent)) = contents.first() else {
            return Err(unreadable(&folder, "its manifest was not sent", None));
        };
        let manifest = Manifest::decode(sent, &RandomState::new())
            .map_err(|error| unreadable(&folder, &error.to_string(), None))?;
        match verify(group, &place, &manifest, sent)? {
            None => return Ok((Some(Saved::sharded(folder, place, manifest, contents)), skipped)),
            Some(_) if is_gone(&folder) => {
                failure = search.as_mut().and_then(|search| search.list().err());
            }
            Some(cause) => {
                search.iter_mut().for_each(|search| search.pass_over(folder.clone(), cause.clone()))
            }
        }
    }
}

/// How long a rank may read. The others wait for its result, or for its time-out.
fn search_deadline(group: &ProcessGroup) -> Deadline {
    Deadline::after(group.timeout().saturating_sub(REMOTE_DISK_GRACE))
}

/// What a rank has found in its share of the files.
#[derive(Serialize, Deserialize)]
enum Finding {
    Whole,
    Torn(String),
    /// It may be complete, but this rank cannot read it.
    Unread {
        host: String,
        cause: String,
    },
    /// It may be complete: the time was up before this rank had read it.
    Late {
        host: String,
        cause: String,
    },
}

/// All ranks compare the checksums of a sharded checkpoint's tensors. Returns none, or why the checkpoint is damaged or that
/// it was removed, the same on every rank. Rank 0 has `sent` the manifest's bytes.
fn verify(group: &ProcessGroup, place: &Path, manifest: &Manifest, sent: &[u8]) -> Result<Option<String>> {
    let (rank, world) = (group.rank(), group.world_size().count());
    let deadline = search_deadline(group);
    let mut own = manifest.tensor_files().iter().skip(rank.index()).step_by(world);
    let verified = see(place, manifest, sent, rank)
        .and_then(|()| own.try_for_each(|file| verify_file(place, file, rank, deadline)));
    let finding = match verified {
        Ok(()) => Finding::Whole,
        Err(Unfit::Torn(cause)) => Finding::Torn(cause),
        Err(Unfit::Unread(cause, source)) => {
            let source = source.map_or_else(String::new, |source| format!(": {source}"));
            Finding::Unread { host: host::name(), cause: cause + &source }
        }
        Err(Unfit::Late(cause)) => Finding::Late { host: host::name(), cause },
    };
    let findings = group.all_gather_object(&finding)?;
    if findings.iter().any(|finding| !matches!(finding, Finding::Whole)) && is_removed(group, place)? {
        return Ok(Some("it was removed while it was read".to_owned()));
    }
    let mut torn = None;
    let told = |finder: Rank, host: String, error: Error| {
        let error = error.at(finder, host).with_peer(finder);
        if finder == rank { error } else { group.note_remote_error(error) }
    };
    for (finder, finding) in group.world_size().ranks().zip(findings) {
        match finding {
            Finding::Whole => {}
            Finding::Torn(cause) => torn = torn.or(Some(cause)),
            Finding::Unread { host, cause } => {
                let cause = format!("cannot read the checkpoint {}: {cause}", place.display());
                return Err(told(finder, host, Error::environment(cause).with_remedy(SHARE)));
            }
            Finding::Late { host, cause } => {
                return Err(told(finder, host, files::late(place, &cause)));
            }
        }
    }
    Ok(torn)
}

/// Whether the job that writes there has removed the checkpoint at `place` since rank 0 has read it, the same on every rank.
fn is_removed(group: &ProcessGroup, place: &Path) -> Result<bool> {
    let mut removed = [u8::from(group.rank().is_main() && is_gone(place))];
    group.broadcast(&mut removed, Rank::MAIN)?;
    Ok(removed == [1])
}

/// Checks that this rank sees the same files as rank 0, also those that others compare: the same manifest, and all files
/// with the right lengths. It may read from any of them.
fn see(place: &Path, manifest: &Manifest, sent: &[u8], rank: Rank) -> Result<(), Unfit> {
    if files::manifest_bytes(place).map_err(|unfit| unseen(unfit, rank))? != sent {
        return Err(unseen(Unfit::Torn(format!("{MANIFEST} is another")), rank));
    }
    let mut files = manifest.tensor_files().iter();
    files.try_for_each(|file| files::open_entry(place, file).map(drop)).map_err(|unfit| unseen(unfit, rank))
}

fn verify_file(place: &Path, file: &FileEntry, rank: Rank, deadline: Deadline) -> Result<(), Unfit> {
    let opened = files::open_entry(place, file).map_err(|unfit| unseen(unfit, rank));
    files::verify(place, opened?, file, deadline)
}

/// Rank 0 has seen all files with the right lengths: a rank that does not sees another folder.
fn unseen(unfit: Unfit, rank: Rank) -> Unfit {
    match unfit {
        Unfit::Torn(cause) => {
            Unfit::Unread(format!("rank {rank} does not see what rank 0 sees: {cause}"), None)
        }
        unread @ (Unfit::Unread(..) | Unfit::Late(_)) => unread,
    }
}

impl Announcement {
    fn of(found: &Found) -> Self {
        let Found { folder, step, world_size, checksum, contents, is_sharded } = found;
        let files = contents.iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64));
        Self {
            folder: folder.clone(),
            step: *step,
            world_size: *world_size,
            checksum: *checksum,
            is_sharded: *is_sharded,
            files: files.collect(),
        }
    }
}

/// Gives every rank rank 0's value or error.
pub(super) fn agree<T>(group: &ProcessGroup, outcome: Option<Result<T>>) -> Result<T>
where
    T: Serialize + serde::de::DeserializeOwned,
{
    let own = outcome.as_ref().and_then(|outcome| outcome.as_ref().err().cloned());
    let told = outcome.map(|outcome| outcome.map_err(|error| RemoteError::of(&error, Rank::MAIN)));
    let told: Result<T, RemoteError> = group.broadcast_object(told.as_ref(), Rank::MAIN)?;
    told.map_err(|told| match own {
        Some(own) => own,
        None => group.note_remote_error(told.error()),
    })
}

/// Each rank needs memory for all files that rank 0 sends.
const MEMORY_REMEDY: &str =
    "start fewer ranks on that host, or save with `save_sharded`, of which each rank reads its part";

/// Memory for the files: rank 0 has it already, and the call goes on only if all others have enough.
fn receive(group: &ProcessGroup, own: Option<Contents>, files: &[(String, u64)]) -> Result<Contents> {
    let memory = own.map_or_else(|| files.iter().map(reserve).collect(), Ok);
    let (rank, none) = (i64::from(group.rank().get()), i64::from(group.world_size().get()));
    let mut lacks = [if memory.is_ok() { none } else { rank }];
    group.all_reduce(&mut lacks, ReduceOp::Min)?;
    let memory = memory?;
    match u32::try_from(lacks[0]).ok().filter(|lacks| *lacks < group.world_size().get()) {
        None => Ok(memory),
        Some(rank) => {
            let cause = format!("rank {rank} has no memory for the checkpoint");
            let error = Error::out_of_memory(cause).with_peer(Rank::new(rank)).with_remedy(MEMORY_REMEDY);
            Err(group.note_remote_error(error))
        }
    }
}

fn reserve((name, length): &(String, u64)) -> Result<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let room = usize::try_from(*length).is_ok_and(|length| bytes.try_reserve_exact(length).is_ok());
    if !room {
        return Err(Error::out_of_memory(format!(
            "no memory for the {length} bytes of the checkpoint's {name}"
        ))
        .with_remedy(MEMORY_REMEDY));
    }
    bytes.resize(bytes.capacity().min(*length as usize), 0);
    Ok((name.clone(), bytes))
}

/// The newest complete checkpoint in `folder`, for a world of one, and those that were skipped.
#[cfg(test)]
pub(super) fn find(folder: &Path) -> Result<(Option<Found>, Vec<Skipped>)> {
    let mut search = Search::new(folder)?;
    let deadline = Deadline::after(super::TIMEOUT);
    while let Some(found) = search.next(deadline)? {
        let manifest = found
            .is_sharded
            .then(|| Manifest::decode(&found.contents[0].1, &RandomState::new()).ok())
            .flatten();
        let files = manifest.as_ref().map(Manifest::tensor_files).unwrap_or_default();
        let torn = files.iter().find_map(|file| verify_file(&found.folder, file, Rank::MAIN, deadline).err());
        match torn {
            None => return Ok((Some(found), search.skipped)),
            Some(Unfit::Torn(cause)) => search.pass_over(found.folder, cause),
            Some(Unfit::Unread(cause, source)) => return Err(unreadable(&found.folder, &cause, source)),
            Some(Unfit::Late(cause)) => return Err(files::late(&found.folder, &cause)),
        }
    }
    Ok((None, search.skipped))
}

#[cfg(test)]
mod tests {
    use phalanx_core::testing::{Fabric, run};

    use super::super::{Checkpoints, Snapshot, TIMEOUT, patient};
    use super::*;
    use crate::caller::Caller;

    #[test]
    fn a_sharded_checkpoint_that_another_job_removes_while_ranks_compare_it_is_looked_for_again() {
        let root = tempfile::tempdir().unwrap();
        run(2, Fabric::InProcess, |group| {
            let training = Checkpoints::open(root.path(), &group).unwrap();
            for step in [1, 2] {
                let own = [group.rank().get() as f32];
                let save =
                    |snapshot: &mut Snapshot| snapshot.slice("w", &[2], &[group.rank().index()], &[1], &own);
                training.save_sharded(step, save).unwrap();
            }
            training.finish().unwrap();
            let group = patient(&group, TIMEOUT, Caller::CheckpointsRead);
            if group.rank().is_main() {
                let search = Some(Search::new(root.path()));
                let (saved, skipped) = share(&group, root.path(), search).unwrap();
                assert_eq!((saved.unwrap().step(), skipped.len()), (1, 0));
                return;
            }
            // What `share` does, with the removal in between.
            let found = agree::<Answer>(&group, None).unwrap().found.unwrap();
            assert_eq!(found.step, 2);
            let mut contents = receive(&group, None, &found.files).unwrap();
            for (_, bytes) in &mut contents {
                group.broadcast(bytes, Rank::MAIN).unwrap();
            }
            std::fs::remove_dir_all(&found.folder).unwrap();
            let sent = &contents[0].1;
            let manifest = Manifest::decode(sent, &RandomState::new()).unwrap();
            let cause = verify(&group, &found.folder, &manifest, sent).unwrap();
            assert!(cause.is_some_and(|cause| cause.contains("was removed")));
            let (saved, skipped) = share(&group, root.path(), None).unwrap();
            assert_eq!((saved.unwrap().step(), skipped.len()), (1, 0));
        });
    }

    #[test]
    fn a_later_checkpoint_on_another_host_s_disk_is_said() {
        let seen = |host: &str, number| {
            let (host, name) = (host.to_owned(), format!("{number:08}-step-{number}"));
            Some(Seen { host, number, name })
        };
        for all in [
            vec![None],
            vec![None, None],
            vec![seen("a", 3), None],
            vec![seen("a", 3), seen("b", 3), seen("b", 2)],
        ] {
            assert_eq!(later(&all), None, "{all:?}");
        }
        let said = later(&[None, seen("b", 1), seen("c", 2)]).unwrap();
        assert!(
            said.starts_with("rank 2 on c sees the checkpoint 00000002-step-2, and rank 0 none, so that the job begins anew:"),
            "{said}"
        );
        let said = later(&[seen("a", 3), seen("b", 12)]).unwrap();
        assert!(said.contains("rank 0 00000003-step-3, from which the job goes on"), "{said}");
    }
}
