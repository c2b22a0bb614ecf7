//! Ensures that one process writes to a folder of checkpoints: the one whose claim has the highest number.
//!
//! A claim is a file, `.owner-00000007`, that says which process made it. That process holds a lock on it as long as it
//! lives. A process that wants to write makes the next claim when [`claims`] says that it may. A file of each name is made
//! once (`O_EXCL`), so of two processes that follow the same claim one has to try again.
//!
//! The previous owner notices by looking for a higher number, before each step that changes what a reader sees.
//! [`folder`](super::folder) says why it does no harm to be frozen between that look and the step. It also looks whether the file of its own number
//! is the one that it made: in a folder that was removed and made again the numbers begin anew.
//!
//! The lock alone does not say who writes: a frozen process holds its lock for ever.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use phalanx_sys::folder;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::claims::{self, Claimant, Newest, Step};
use super::disk::room_or;
use super::files::open_file;
use super::names;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::notice::warn;

/// A process that has just been killed may hold its lock for another moment.
const TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// How long the names in a folder may be older than what is in it: a network file system keeps them for up to a minute. Longer than any wait for a
/// lock.
const STALE_TIMEOUT: Duration = Duration::from_secs(180);
/// The longest claim that is read.
const LONGEST: u64 = 1 << 16;

/// The contents of a claim's file.
#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    #[serde(flatten)]
    by: Claimant,
    host: String,
    /// Tells that host from others of the same name, as pods that take each other's place have it.
    #[serde(default)]
    host_id: String,
    process: u32,
}

/// The right to write to a folder, until it is dropped, its process ends, or another process takes over.
#[derive(Debug)]
pub(super) struct Owner {
    folder: PathBuf,
    number: u64,
    /// The claim that this one followed.
    follows: u64,
    /// Of its file; none where the file system says another one of the file's name than of the open file.
    identity: Option<Identity>,
    /// Locked. As long as it is open, no other file gets its identity.
    _file: File,
}

/// The device and the inode of a file.
type Identity = (u64, u64);

/// What was seen of the newest claim.
enum Seen {
    None,
    Own,
    Changed,
    /// Whether no process holds it, and its contents, if they are whole.
    Other(bool, Option<Claim>),
}

impl Owner {
    /// Claims `folder`. The claim `own` belongs to this process, and is followed in any case.
    pub fn claim(folder: &Path, by: &Claimant, own: Option<u64>) -> Result<Self> {
        let unusable = |error: io::Error| {
            let remedy = room_or(&error, "may rank 0 write there?");
            Error::io(format!("cannot claim {}", folder.display()), error).with_remedy(remedy)
        };
        let (began, stale, mut told) = (Instant::now(), Deadline::after(STALE_TIMEOUT), false);
        loop {
            if stale.has_passed() {
                return Err(outdated(folder));
            }
            let newest = newest(folder).map_err(unusable)?;
            let seen = match newest {
                0 => Seen::None,
                number if own == Some(number) => Seen::Own,
                number => look(folder, number).map_err(unusable)?,
            };
            let claim = match &seen {
                Seen::None => Newest::None,
                Seen::Own => Newest::Own,
                Seen::Changed => Newest::Changed,
                Seen::Other(free, claim) => {
                    Newest::Other { free: *free, by: claim.as_ref().map(|claim| &claim.by) }
                }
            };
            let (timeout, waited) = (patience(folder, &seen), began.elapsed());
            if timeout > TIMEOUT && waited >= TIMEOUT && !std::mem::replace(&mut told, true) {
                let (folder, seconds) = (folder.display(), timeout.as_secs());
                warn(format_args!(
                    "a process on another host holds {folder}: if that host was lost, the file system releases it within {seconds} s, for which \
                     this waits"
                ));
            }
            match (claims::step(by, claim, waited >= timeout), seen) {
                (Step::Make, _) => {
                    let made = Self::make(folder, newest, by, Deadline::after(TIMEOUT));
                    if let Some(owner) = made.map_err(unusable)? {
                        return Ok(owner);
                    }
                }
                (Step::Look | Step::Pause, _) => {}
                (Step::TakenOver, Seen::Other(_, Some(claim))) => return Err(taken_over(folder, &claim)),
                (Step::TakenOver | Step::Held, Seen::Other(_, claim)) => return Err(held(folder, claim)),
                (Step::TakenOver | Step::Held, _) => return Err(held(folder, None)),
            }
            std::thread::sleep(RETRY_DELAY);
        }
    }

    /// Makes the claim after `newest`, unless another process does.
    fn make(folder: &Path, follows: u64, by: &Claimant, deadline: Deadline) -> io::Result<Option<Self>> {
        let number = follows + 1;
        let path = file(folder, number);
        let file = match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            made => made?,
        };
        let made = Self::sign(folder, follows, by, (&path, file), deadline);
        if !matches!(made, Ok(Some(_))) {
            // Removed, since otherwise it would take the folder from its owner.
            let _ = fs::remove_file(&path);
        }
        made
    }

    /// Turns the new file at `path` into a claim, unless other processes have made later ones meanwhile.
    fn sign(
        folder: &Path,
        follows: u64,
        by: &Claimant,
        (path, mut file): (&Path, File),
        deadline: Deadline,
    ) -> io::Result<Option<Self>> {
        let number = follows + 1;
        // A process that checks the lock holds it for a moment.
        while !lock(path, &file, FlockOperation::NonBlockingLockExclusive)? {
            if deadline.has_passed() {
                let why = "another process has the new claim's file locked";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(RETRY_DELAY);
        }
        let (host, host_id, process) = (host::name(), host::id(), std::process::id());
        let claim = Claim { by: by.clone(), host, host_id, process };
        file.write_all(&serde_json::to_vec(&claim)?)?;
        let own = identity(&file.metadata()?);
        let identity = fs::symlink_metadata(path).is_ok_and(|named| identity(&named) == own).then_some(own);
        let owner = Self { folder: folder.to_owned(), number, follows, identity, _file: file };
        if newest(folder)? > number {
            // This process was frozen since it looked: others have made claims meanwhile, and removed the ones in
            // between.
            return Ok(None);
        }
        for old in claims(folder)?.into_iter().filter(|old| *old < number) {
            // Its process knows the higher number by now.
            let _ = fs::remove_file(self::file(folder, old));
        }
        Ok(Some(owner))
    }

    /// The number of the claim: while this process lives, no other process's claim has it.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether it directly follows the claim of this number.
    pub fn follows(&self, number: u64) -> bool {
        self.follows == number
    }

    /// Checks that this process is still the owner.
    pub fn check(&self) -> io::Result<()> {
        // Before the list: a later claim removes this one.
        let named = fs::symlink_metadata(file(&self.folder, self.number));
        claims::check(self.number, newest(&self.folder)?).map_err(io::Error::other)?;
        match (self.identity, named) {
            (None, _) => Ok(()),
            (Some(own), Ok(named)) if identity(&named) == own => Ok(()),
            (Some(_), Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            (Some(_), Ok(_) | Err(_)) => Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the folder is another one of this name, and another process has claimed it since",
            )),
        }
    }
}

fn identity(about: &Metadata) -> Identity {
    (about.dev(), about.ino())
}

/// How long the holder of the newest claim is waited for.
fn patience(folder: &Path, seen: &Seen) -> Duration {
    match seen {
        Seen::Other(false, Some(claim)) => folder::lock_timeout(folder, claim.host_id != host::id(), TIMEOUT),
        Seen::Other(..) | Seen::None | Seen::Own | Seen::Changed => TIMEOUT,
    }
}

fn file(folder: &Path, number: u64) -> PathBuf {
    folder.join(names::owner(number))
}

/// The numbers of all claims.
fn claims(folder: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder)? {
        numbers.extend(entry?.file_name().to_str().and_then(names::claim_number));
    }
    Ok(numbers)
}

/// The highest; 0 if there is none.
fn newest(folder: &Path) -> io::Result<u64> {
    Ok(claims(folder)?.into_iter().max().unwrap_or(0))
}

/// The claim of this number, of another process.
fn look(folder: &Path, number: u64) -> io::Result<Seen> {
    let path = file(folder, number);
    // In a folder that came from elsewhere it may be a pipe, on which whoever opens it waits.
    let file = match open_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Seen::Changed),
        opened => opened?,
    };
    let free = lock(&path, &file, FlockOperation::NonBlockingLockShared)?;
    let mut bytes = Vec::new();
    (&file).take(LONGEST).read_to_end(&mut bytes)?;
    Ok(Seen::Other(free, serde_json::from_slice(&bytes).ok()))
}

/// Takes a lock, unless another process holds it.
fn lock(path: &Path, file: &File, how: FlockOperation) -> io::Result<bool> {
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(error) if folder::has_no_locks(&error.into()) => {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                let path = path.display();
                warn(format_args!(
                    "a second job could write to {path} at the same time: its file system has no locks: {error}"
                ));
            });
            Ok(true)
        }
        Err(error) => Err(error.into()),
    }
}

fn held(folder: &Path, claim: Option<Claim>) -> Error {
    let who = claim
        .map_or_else(String::new, |Claim { host, process, .. }| format!(": process {process} on {host}"));
    Error::environment(format!("another process writes checkpoints to {}{who}", folder.display()))
        .with_remedy("give each job a folder of its own, and open it on all ranks with one group; or does an earlier run of this one still live?")
}

/// The claims that are listed are gone, or there are others that are not.
fn outdated(folder: &Path) -> Error {
    let seconds = STALE_TIMEOUT.as_secs();
    Error::environment(format!(
        "cannot claim {}: for {seconds} s it lists claims that are not there, or lacks those that are",
        folder.display()
    ))
    .with_remedy(
        "does its file system show each host what another one makes? Keep checkpoints on one that does",
    )
}

fn taken_over(folder: &Path, Claim { by, host, process, .. }: &Claim) -> Error {
    let (folder, round) = (folder.display(), by.round);
    Error::aborted(format!(
        "process {process} on {host} writes checkpoints to {folder}, in round {round} of the job: this rank was given up"
    ))
    .with_remedy("was this process stopped, or its host out of reach? The job goes on without it")
}

/// For `phalanx::fuzzing`: the name of a file in a folder of checkpoints, and, on the next lines, its
/// contents. Returns whether it is a claim.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let (name, said) = bytes.split_at(bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len()));
    let number = str::from_utf8(name).ok().and_then(names::claim_number);
    let claim: Option<Claim> = serde_json::from_slice(said).ok();
    let (Some(number), Some(claim)) = (number, claim) else { return false };
    // There is always a next one.
    assert!(number < u64::MAX - 1);
    assert!(!claim.by.is_before(&claim.by));
    assert!(taken_over(Path::new("folder"), &claim).is_aborted());
    assert!(held(Path::new("folder"), Some(claim)).is_environment());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(job: Option<&str>, round: u64) -> Claimant {
        Claimant { job: job.map(str::to_owned), round }
    }

    #[test]
    fn later_rounds_of_a_job_take_over_and_earlier_ones_do_not() {
        let root = tempfile::tempdir().unwrap();
        let first = Owner::claim(root.path(), &of(Some("a"), 3), None).unwrap();
        first.check().unwrap();
        let start = Instant::now();
        let second = Owner::claim(root.path(), &of(Some("a"), 5), None).unwrap();
        second.check().unwrap();
        assert!(first.check().unwrap_err().to_string().contains("has taken over"));
        let error = Owner::claim(root.path(), &of(Some("a"), 4), None).unwrap_err();
        assert!(error.is_aborted() && error.to_string().contains("in round 5"), "{error}");
        // None of these had to be waited for.
        assert!(start.elapsed() < TIMEOUT);
        // A new job, once this one has given it back, whatever the round.
        drop(second);
        let third = Owner::claim(root.path(), &of(Some("b"), 1), None).unwrap();
        assert_eq!((third.number(), claims(root.path()).unwrap()), (3, vec![3]));
    }

    #[test]
    fn a_folder_that_was_removed_and_made_again_belongs_to_who_has_claimed_it_since() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("runs");
        fs::create_dir(&folder).unwrap();
        let first = Owner::claim(&folder, &of(None, 0), None).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        let second = Owner::claim(&folder, &of(None, 0), None).unwrap();
        assert_eq!(first.number(), second.number());
        second.check().unwrap();
        let error = first.check().unwrap_err();
        assert!(error.to_string().contains("has claimed it since"), "{error}");
    }

    #[test]
    fn another_job_waits_and_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let first = Owner::claim(root.path(), &of(Some("a"), 3), None).unwrap();
        std::thread::scope(|scope| {
            for other in [of(Some("b"), 9), of(None, 9), of(Some("a"), 3)] {
                let root = root.path();
                scope.spawn(move || {
                    let error = Owner::claim(root, &other, None).unwrap_err();
                    let process = format!("process {}", std::process::id());
                    assert!(error.is_environment() && error.to_string().contains(&process), "{error}");
                });
            }
        });
        first.check().unwrap();
        // This process's own is followed all the same.
        let next = Owner::claim(root.path(), &of(Some("a"), 3), Some(first.number())).unwrap();
        assert!(next.follows(first.number()));
    }

    #[test]
    fn a_host_that_was_lost_is_waited_for_where_its_lock_outlives_it() {
        // By its name it may be this one: the pods of a job keep theirs wherever they run.
        let held = |host_id: String, free| {
            Seen::Other(free, Some(Claim { by: of(None, 0), host: host::name(), host_id, process: 1 }))
        };
        let other = || format!("not-{}", host::id());
        // No disk of this host has this folder.
        let network = Path::new("/proc");
        assert!(patience(network, &held(other(), false)) > TIMEOUT);
        assert!(patience(network, &held(other(), false)) < STALE_TIMEOUT);
        for seen in [held(host::id(), false), held(other(), true), Seen::Other(false, None), Seen::None] {
            assert_eq!(patience(network, &seen), TIMEOUT);
        }
    }

    #[test]
    fn a_claim_without_a_word_is_followed_when_its_maker_has_had_time() {
        let root = tempfile::tempdir().unwrap();
        File::create_new(file(root.path(), 7)).unwrap();
        let owner = Owner::claim(root.path(), &of(None, 0), None).unwrap();
        assert_eq!(owner.number(), 8);
    }

    #[test]
    fn a_pipe_in_the_place_of_a_claim_holds_nobody_up() {
        let root = tempfile::tempdir().unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, file(root.path(), 7), rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let path = root.path().to_owned();
        std::thread::spawn(move || tell.send(Owner::claim(&path, &of(None, 0), None).unwrap().number()));
        assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), 8);
    }

    #[test]
    fn a_file_that_is_named_almost_as_a_claim_holds_nobody_up() {
        let root = tempfile::tempdir().unwrap();
        File::create_new(root.path().join(".owner-7")).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let path = root.path().to_owned();
        std::thread::spawn(move || tell.send(Owner::claim(&path, &of(None, 0), None).unwrap().number()));
        assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), 1);
    }

    #[test]
    fn of_those_who_claim_at_once_one_is_the_owner() {
        let root = tempfile::tempdir().unwrap();
        let claimed: Vec<Owner> = std::thread::scope(|scope| {
            let claims = (1..=16u64).map(|round| {
                let root = root.path();
                scope.spawn(move || Owner::claim(root, &of(Some("a"), round), None).ok())
            });
            let claims: Vec<_> = claims.collect();
            claims.into_iter().filter_map(|claim| claim.join().unwrap()).collect()
        });
        let owners: Vec<u64> =
            claimed.iter().filter(|owner| owner.check().is_ok()).map(Owner::number).collect();
        assert_eq!(owners, [newest(root.path()).unwrap()]);
    }

    #[test]
    fn who_was_frozen_before_it_made_its_claim_makes_none() {
        let root = tempfile::tempdir().unwrap();
        let first = Owner::claim(root.path(), &of(Some("a"), 1), None).unwrap();
        let second = Owner::claim(root.path(), &of(Some("a"), 3), None).unwrap();
        let third = Owner::claim(root.path(), &of(Some("a"), 4), None).unwrap();
        // It looked when there was only the first; the second has gone.
        let late = Owner::make(root.path(), first.number(), &of(Some("a"), 2), Deadline::after(TIMEOUT));
        assert!(late.unwrap().is_none());
        assert_eq!(claims(root.path()).unwrap(), [third.number()]);
        third.check().unwrap();
        drop(second);
    }
}
