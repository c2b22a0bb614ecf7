//! The record of the last calls: what each rank has called, and how far it came. After a failure, the ranks' records beside each other show
//! which rank has not made a call, or another one.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use phalanx::env::LaunchEnv;
use phalanx::{Error, ProcessGroup, Sequence, warn};

/// The variable that names the file, of which each process writes one, with its rank at the end of the name.
const VARIABLE: &str = "PHALANX_NCCL_RECORD";
/// How many calls that are over are remembered.
pub(super) const REMEMBERED: usize = 64;

/// A call of a communicator, as [`Communicator::calls`](super::Communicator::calls) lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallRecord {
    /// Its number among the communicator's calls, the same on every rank.
    pub sequence: Sequence,
    /// What errors call it, such as `cuda all_reduce(sum, 1000 x f32)`.
    pub name: String,
    /// The time since it was made.
    pub age: Duration,
    /// How far it is.
    pub state: CallState,
}

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallState {
    /// NCCL has not queued it yet.
    InNccl,
    /// It is queued on the device. That includes a call that waits for other ranks.
    Queued,
    /// It was done when this time had passed, or a little earlier: that is when it was noticed.
    Done(Duration),
    /// It was not done in time, or waited for a rank that has left: the communicator has failed because of it.
    GivenUp,
}

impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, name, age, state } = self;
        write!(f, "{sequence} {name}: made {:.3} s before, ", age.as_secs_f64())?;
        match state {
            CallState::InNccl => f.write_str("not yet queued by NCCL"),
            CallState::Queued => f.write_str("queued, not done"),
            CallState::Done(after) => write!(f, "done after {:.3} s", after.as_secs_f64()),
            CallState::GivenUp => f.write_str("given up"),
        }
    }
}

impl CallState {
    pub(super) fn new(is_queued: bool, is_given_up: bool, ended: Option<Duration>) -> Self {
        match ended {
            Some(after) => Self::Done(after),
            None if is_given_up => Self::GivenUp,
            None if is_queued => Self::Queued,
            None => Self::InNccl,
        }
    }
}

/// This process's rank in `group`; of a group of some ranks also that in the first one, which is the one at the end of the file's name.
pub(super) fn place(group: &ProcessGroup) -> String {
    let (rank, world) = (group.rank(), group.world_size());
    let is_first = world.ranks().all(|rank| group.global_rank(rank).is_ok_and(|global| global == rank));
    match group.global_rank(rank) {
        Ok(global) if !is_first => format!("rank {global} (rank {rank} of {world} in a group of its own)"),
        Ok(_) | Err(_) => format!("rank {rank} of {world}"),
    }
}

/// Writes the record of a communicator that has failed to the file that the variable names, if it names one. On a thread of its own: a file
/// system may keep a write waiting, and the abort must not wait with it.
pub(super) fn dump(who: String, cause: &Error, calls: Vec<CallRecord>) -> Option<Receiver<()>> {
    let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
    let path = file_of(Path::new(&path));
    let text = text(&who, cause, &calls);
    let unwritten = format!("the record of {who} cannot be written to {}", path.display());
    let told = unwritten.clone();
    let (done, written) = mpsc::channel();
    let write = move || {
        if let Err(error) = append(&path, &text) {
            warn(format!("{told}: {error}"));
        }
        // If nobody waits any more, it is written all the same.
        let _ = done.send(());
    };
    if let Err(error) = std::thread::Builder::new().name("phalanx-nccl-record".into()).spawn(write) {
        warn(format!("{unwritten}: no thread can be started: {error}"));
        return None;
    }
    Some(written)
}

fn text(who: &str, cause: &Error, calls: &[CallRecord]) -> String {
    let mut lines = vec![format!("{who} has failed: {cause}")];
    lines.extend(calls.iter().map(CallRecord::to_string));
    lines.join("\n  ") + "\n"
}

/// The path with the rank in the job, or else the process's number, at its end.
fn file_of(path: &Path) -> PathBuf {
    let rank = LaunchEnv::from_process().ok().flatten().map(|environment| environment.rank.get());
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", rank.unwrap_or_else(std::process::id)));
    name.into()
}

/// A process may have several communicators: each adds what it has, in one write.
fn append(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(text.as_bytes())
}

/// Waits until the record is written, at most for `limit`.
pub(super) fn await_dump(written: Option<Receiver<()>>, limit: Duration) {
    if let Some(written) = written {
        // After the limit the file system is left to itself.
        let _ = written.recv_timeout(limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_for_each_call_how_far_it_came() {
        let call = |number: u64, state| CallRecord {
            sequence: Sequence(number),
            name: "cuda barrier".into(),
            age: Duration::from_millis(2500),
            state,
        };
        let second = Some(Duration::from_secs(1));
        let calls = [
            call(0, CallState::new(true, false, second)),
            call(1, CallState::new(true, true, None)),
            call(2, CallState::new(true, false, None)),
            call(3, CallState::new(false, false, None)),
        ];
        assert_eq!(
            text("rank 1 of 2", &Error::other("enough"), &calls),
            "rank 1 of 2 has failed: enough\n  \
             #0 cuda barrier: made 2.500 s before, done after 1.000 s\n  \
             #1 cuda barrier: made 2.500 s before, given up\n  \
             #2 cuda barrier: made 2.500 s before, queued, not done\n  \
             #3 cuda barrier: made 2.500 s before, not yet queued by NCCL\n"
        );
    }
}
