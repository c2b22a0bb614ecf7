//! The settings of heartbeats.

use std::time::Duration;

use crate::error::{Error, Result};

/// How often a rank sends a heartbeat, and how long it waits for those of the others.
///
/// A process that is killed closes its connections, which needs no heartbeat. A process that is frozen, or whose host
/// or cable is gone, does not.
///
/// Silence counts only while the listening rank is itself awake. If a process is on the same host, and the kernel shows
/// that it is running, it is slow, not frozen: the others wait for it ten times as long.
///
/// Ranks may have different settings: each rank tells the others its interval when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// How often this rank sends a heartbeat. Zero: never, and the others ignore its silence.
    pub interval: Duration,
    /// How late a heartbeat may be. A rank has failed if its heartbeat is later than this, and later than three of its
    /// own intervals. Zero: this rank ignores the others' silence, for example while a debugger stops them.
    pub timeout: Duration,
}

/// The largest interval and time-out.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Heartbeat {
    /// No heartbeats in either direction.
    pub const OFF: Self = Self { interval: Duration::ZERO, timeout: Duration::ZERO };

    /// The defaults, with `PHALANX_HEARTBEAT_INTERVAL` and `PHALANX_HEARTBEAT_TIMEOUT`, in seconds.
    pub(crate) fn from_env() -> Result<Self> {
        let default = Self::default();
        let interval = seconds("PHALANX_HEARTBEAT_INTERVAL")?.unwrap_or(default.interval);
        let timeout = seconds("PHALANX_HEARTBEAT_TIMEOUT")?;
        // A longer interval alone must not make the settings invalid.
        let timeout = timeout.unwrap_or_else(|| default.timeout.max(interval * 10));
        Ok(Self { interval, timeout })
    }

    pub(crate) fn check(self) -> Result<()> {
        let Self { interval, timeout } = self;
        if interval > LONGEST || timeout > LONGEST {
            return Err(Error::invalid_argument(format!(
                "heartbeats every {interval:?} with a time-out of {timeout:?}: neither may be longer than a day"
            ))
            .with_remedy("zero turns them off"));
        }
        if !timeout.is_zero() && timeout < interval * 2 {
            return Err(Error::invalid_argument(format!(
                "heartbeats every {interval:?} with a time-out of {timeout:?}: a single late heartbeat would count as a failure"
            ))
            .with_remedy("the time-out must be twice the interval at least; ten times is the default"));
        }
        Ok(())
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_millis(100), timeout: Duration::from_secs(1) }
    }
}

fn seconds(name: &str) -> Result<Option<Duration>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    if text.trim().is_empty() {
        return Ok(None);
    }
    let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match seconds.filter(|seconds| *seconds <= LONGEST) {
        Some(seconds) => Ok(Some(seconds)),
        None => Err(Error::environment(format!("{name}={text:?} is no number of seconds up to a day"))
            .with_remedy("0 turns it off; unset it for the default")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_out_leaves_room_for_a_late_heartbeat() {
        let heartbeat = |interval, timeout| Heartbeat {
            interval: Duration::from_millis(interval),
            timeout: Duration::from_millis(timeout),
        };
        for fine in
            [Heartbeat::default(), Heartbeat::OFF, heartbeat(0, 10), heartbeat(500, 0), heartbeat(5, 10)]
        {
            assert!(fine.check().is_ok(), "{fine:?}");
        }
        for bad in [heartbeat(6, 11), heartbeat(u64::MAX, 0), heartbeat(0, u64::MAX)] {
            assert!(bad.check().unwrap_err().is_invalid_argument(), "{bad:?}");
        }
    }
}
