//! A scheduler's notice that the time of a job ends soon.

use phalanx_sys::signal::Catcher;
use rustix::process::Signal;

use crate::collective::ReduceOp;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;

/// Notes SIGUSR1, with which a scheduler announces the end of a job's time (Slurm: `--signal=USR1@300`), so that a training loop can write
/// a checkpoint and end by itself. `phalanx run` passes the signal on to all workers.
///
/// The signal comes to each rank in another step. [`agreed`](Self::agreed) is true in the same step on all of them:
///
/// ```no_run
/// # fn main() -> phalanx::Result<()> {
/// let mut notice = phalanx::EndNotice::new()?;
/// let group = phalanx::init()?;
/// for step in 0..100_000 {
///     // .. train ..
///     if notice.agreed(&group)? {
///         // .. write a checkpoint, from which the next start continues ..
///         break;
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// Make it before the group: without it the signal ends the process. Dropping it restores what the signal did before. A process has at
/// most one, and none while it is in `phalanx::spawn`.
#[derive(Debug)]
pub struct EndNotice {
    catcher: Catcher,
    has_come: bool,
}

impl EndNotice {
    /// Catches the signal from now on.
    ///
    /// # Errors
    /// If this process has one already, or the system does not allow it.
    pub fn new() -> Result<Self> {
        match Catcher::install(&[Signal::USR1.as_raw()]) {
            Ok(Some(catcher)) => Ok(Self { catcher, has_come: false }),
            Ok(None) => Err(Error::invalid_argument("this process catches signals already")
                .with_remedy("make one EndNotice, and pass it on; none within phalanx::spawn")),
            Err(error) => Err(Error::io("cannot catch SIGUSR1", error)),
        }
    }

    /// Whether the signal has come to this rank. It stays true.
    pub fn has_come(&mut self) -> bool {
        while self.catcher.read().is_some() {
            self.has_come = true;
        }
        self.has_come
    }

    /// Whether the signal has come to any rank of `group`. All its ranks call it in the same step, and get the same answer. It is one
    /// all-reduce of one number. Inside of [`join`](crate::join) ranks whose data have ended do not call it, and the ranks' calls differ, which
    /// is an error: there sum [`has_come`](Self::has_come) with the adapter, as Burn's `ddp.sum(f64::from(notice.has_come()))?`, among the ranks that
    /// still have data.
    ///
    /// # Errors
    /// As those of [`all_reduce`](ProcessGroup::all_reduce).
    pub fn agreed(&mut self, group: &ProcessGroup) -> Result<bool> {
        let mut has_come = [i32::from(self.has_come())];
        group.all_reduce(&mut has_come, ReduceOp::Max)?;
        Ok(has_come != [0])
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{getpid, kill_process};

    use super::*;

    /// Waits for other tests of this process that catch signals.
    fn notice() -> EndNotice {
        loop {
            match EndNotice::new() {
                Ok(notice) => return notice,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    #[test]
    fn the_signal_is_noted_and_ends_nothing() {
        let mut notice = notice();
        assert!(!notice.has_come());
        let error = EndNotice::new().unwrap_err();
        assert!(error.is_invalid_argument() && error.remedy().is_some(), "{error}");
        kill_process(getpid(), Signal::USR1).unwrap();
        // Another thread may take it, a moment later.
        let begun = std::time::Instant::now();
        while !notice.has_come() && begun.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        assert!(notice.has_come() && notice.has_come());
        drop(notice);
        assert!(!self::notice().has_come());
    }
}
