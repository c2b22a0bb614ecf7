//! Finding the newest whole checkpoint, and giving it to every rank.
//!
//! Rank 0 reads and the others are sent what it read. Only the folder of the rank that writes is sure to hold the
//! checkpoints, all ranks are sure to go on from the same one, and a shared disk is read once and not by each rank.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::folder::{self, Unfit};
use super::saved::{Contents, Saved};
use super::tensors;
use crate::collective::ReduceOp;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::notice::warn;
use crate::rank::Rank;

/// How much of a file is sent in one call.
const PIECE: usize = 64 << 20;

/// A checkpoint that was passed over, because a crash or a damaged disk has left only a part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Skipped {
    /// Where it is.
    pub folder: PathBuf,
    /// What is wrong with it.
    pub cause: String,
}

/// What rank 0 has found.
#[derive(Debug)]
pub(super) struct Found {
    pub folder: PathBuf,
    pub step: u64,
    pub world_size: u32,
    pub contents: Contents,
}

/// The newest whole checkpoint in `folder`, and what was passed over for it.
pub(super) fn find(folder: &Path) -> Result<(Option<Found>, Vec<Skipped>)> {
    let entries =
        folder::list(folder).map_err(|error| unreadable(folder, "it cannot be listed", Some(error)))?;
    let mut skipped = Vec::new();
    for entry in entries {
        match read(&entry.path) {
            Ok(found) => return Ok((Some(found), skipped)),
            Err(Unfit::Unread(cause, source)) => return Err(unreadable(&entry.path, &cause, source)),
            Err(Unfit::Torn(cause)) => {
                let path = entry.path.display();
                warn(format_args!("the checkpoint {path} is not whole and is passed over: {cause}"));
                skipped.push(Skipped { folder: entry.path, cause });
            }
        }
    }
    if !skipped.is_empty() {
        let (many, folder) = (skipped.len(), folder.display());
        warn(format_args!(
            "none of the {many} checkpoints in {folder} is whole: there is nothing to go on from"
        ));
    }
    Ok((None, skipped))
}

fn unreadable(path: &Path, cause: &str, source: Option<io::Error>) -> Error {
    let cause = format!("cannot read the checkpoint {}: {cause}", path.display());
    let error = match source {
        Some(source) => Error::io(cause, source),
        None => Error::environment(cause),
    };
    error.with_remedy("put that right, or move it away if an older one will do")
}

fn read(folder: &Path) -> Result<Found, Unfit> {
    let manifest = folder::read_manifest(folder)?;
    let contents =
        manifest.files.iter().map(|file| Ok((file.name.clone(), folder::read_entry(folder, file)?)));
    let contents = contents.collect::<Result<Contents, Unfit>>()?;
    // The checksums are right: what it says was meant, by whoever wrote it.
    let tensors = contents.first().map(|(_, file)| tensors::index(file));
    if let Some(Err(cause)) = tensors {
        return Err(Unfit::Unread(cause, None));
    }
    let folder = folder.to_owned();
    Ok(Found { folder, step: manifest.step, world_size: manifest.world_size, contents })
}

/// What rank 0 tells the others.
#[derive(Serialize, Deserialize)]
struct Answer {
    skipped: Vec<Skipped>,
    found: Option<Announcement>,
}

/// A checkpoint without its contents.
#[derive(Serialize, Deserialize)]
struct Announcement {
    folder: PathBuf,
    step: u64,
    world_size: u32,
    files: Vec<(String, u64)>,
}

/// Gives every rank what rank 0 has found; the others bring `None`.
pub(super) fn share(
    group: &ProcessGroup,
    found: Option<Result<(Option<Found>, Vec<Skipped>)>>,
) -> Result<(Option<Saved>, Vec<Skipped>)> {
    let (own, outcome) = match found {
        Some(Ok((found, skipped))) => {
            let announcement = found.as_ref().map(Announcement::of);
            (found.map(|found| found.contents), Some(Ok(Answer { skipped, found: announcement })))
        }
        Some(Err(error)) => (None, Some(Err(error))),
        None => (None, None),
    };
    let Answer { skipped, found } = agree(group, outcome)?;
    let Some(Announcement { folder, step, world_size, files }) = found else { return Ok((None, skipped)) };
    let mut contents = receive(group, own, &files)?;
    for (_, bytes) in &mut contents {
        for piece in bytes.chunks_mut(PIECE) {
            group.broadcast(piece, Rank::MAIN)?;
        }
    }
    let saved = Saved::new(folder.clone(), (step, world_size), contents)
        .map_err(|cause| unreadable(&folder, &cause, None))?;
    Ok((Some(saved), skipped))
}

impl Announcement {
    fn of(found: &Found) -> Self {
        let Found { folder, step, world_size, contents } = found;
        let files = contents.iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64));
        Self { folder: folder.clone(), step: *step, world_size: *world_size, files: files.collect() }
    }
}

/// Gives every rank rank 0's value, or its error.
pub(super) fn agree<T>(group: &ProcessGroup, outcome: Option<Result<T>>) -> Result<T>
where
    T: Serialize + serde::de::DeserializeOwned,
{
    let own = outcome.as_ref().and_then(|outcome| outcome.as_ref().err().cloned());
    let told = outcome.map(|outcome| outcome.map_err(|error| (super::host(), error.full_cause())));
    let told: Result<T, (String, String)> = group.broadcast_object(told.as_ref(), Rank::MAIN)?;
    told.map_err(|(host, cause)| match own {
        Some(own) => own,
        None => group.told(Error::aborted(cause).at(Rank::MAIN, host).with_peer(Rank::MAIN)),
    })
}

/// Memory for the files: rank 0's, which are there, and the others', if all have enough.
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
            Err(group.told(Error::out_of_memory(cause).with_peer(Rank::new(rank))))
        }
    }
}

fn reserve((name, length): &(String, u64)) -> Result<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let room = usize::try_from(*length).is_ok_and(|length| bytes.try_reserve_exact(length).is_ok());
    if !room {
        return Err(Error::out_of_memory(format!(
            "no memory for the {length} bytes of the checkpoint's {name}"
        )));
    }
    bytes.resize(bytes.capacity().min(*length as usize), 0);
    Ok((name.clone(), bytes))
}
