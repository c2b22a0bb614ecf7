//! The settings of heartbeats.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::world_size::WorldSize;

/// How often a rank sends a heartbeat, and how long it waits for those of the others.
///
/// A process that is killed closes its connections, which needs no heartbeat. A process that is frozen, or whose host
/// or cable is gone, does not.
///
/// Silence counts only while the listening rank is itself awake. If a process is on the same host, and the kernel shows
/// that it is running, it is slow, not frozen: the others wait for it ten times as long. Of a process on another host the kernel shows
/// nothing, and a network that loses packets is silent for twice as long as it is broken. So ranks on other hosts have a time-out of
/// their own.
///
/// Ranks may have different settings: each rank tells the others its interval when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// How often this rank sends a heartbeat: in groups of more than 32 ranks every 400 ms, if that is less often. Zero: never, and the
    /// others ignore its silence.
    pub interval: Duration,
    /// How late a heartbeat of a rank on the same host may be. A rank has failed if its heartbeat is later than this, and later than
    /// three of its own intervals. Zero: this rank ignores their silence, for example while a debugger stops them.
    pub timeout: Duration,
    /// The same for ranks on other hosts.
    pub network_timeout: Duration,
}

/// The largest interval and time-out.
const TIMEOUT_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// A group of more ranks is large.
const LARGE_GROUP: u32 = 32;
/// How often a rank of a large group sends a heartbeat, unless the interval is longer, or a time-out shorter than by default.
const LARGE_GROUP_INTERVAL: Duration = Duration::from_millis(400);
/// How many heartbeats of a process in a store may be missing at least.
const STORE_BEATS: u32 = 5;
/// How many more may be missing than fit into the time-out of ranks.
const AFTER_RANKS: u32 = 2;

impl Heartbeat {
    /// No heartbeats in either direction.
    pub const OFF: Self =
        Self { interval: Duration::ZERO, timeout: Duration::ZERO, network_timeout: Duration::ZERO };

    /// The defaults, with the variables `PHALANX_HEARTBEAT_INTERVAL`, `PHALANX_HEARTBEAT_TIMEOUT` and `PHALANX_NETWORK_TIMEOUT`, in seconds.
    #[doc(hidden)]
    pub fn from_variables(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let seconds = |name| seconds(name, lookup(name));
        let (interval, timeout) =
            (seconds("PHALANX_HEARTBEAT_INTERVAL")?, seconds("PHALANX_HEARTBEAT_TIMEOUT")?);
        Ok(Self::with(interval, timeout, seconds("PHALANX_NETWORK_TIMEOUT")?))
    }

    /// The defaults with what the user has set: a time-out for all ranks, wherever they are, and one for those on other hosts. Of the
    /// two, a zero turns both off, as for a debugger.
    fn with(
        interval: Option<Duration>,
        timeout: Option<Duration>,
        network_timeout: Option<Duration>,
    ) -> Self {
        let default = Self::default();
        let interval = interval.unwrap_or(default.interval);
        // A longer interval alone must not make the settings invalid.
        let timeout_or = |default: Duration| timeout.unwrap_or_else(|| default.max(interval * 10));
        Self {
            interval,
            timeout: timeout_or(default.timeout),
            network_timeout: network_timeout
                .filter(|_| timeout != Some(Duration::ZERO))
                .unwrap_or_else(|| timeout_or(default.network_timeout)),
        }
    }

    /// Those of a group of this size. In a large one the heartbeats of an idle host would take a noticeable part of its processors, so
    /// there are fewer.
    #[doc(hidden)]
    pub fn among(self, world: WorldSize) -> Self {
        let shortest =
            [self.timeout, self.network_timeout].into_iter().filter(|timeout| !timeout.is_zero()).min();
        match shortest {
            Some(timeout) if world.get() > LARGE_GROUP && !self.interval.is_zero() => {
                // Two looks of the thread that watches.
                let longer = LARGE_GROUP_INTERVAL.min(timeout * 2 / 5);
                Self { interval: self.interval.max(longer), ..self }
            }
            _ => self,
        }
    }

    /// Checks that no setting is longer than a day, and that each time-out is zero or at least two intervals.
    #[doc(hidden)]
    pub fn check(self) -> Result<()> {
        let Self { interval, timeout, network_timeout } = self;
        for timeout in [timeout, network_timeout] {
            if interval > TIMEOUT_LIMIT || timeout > TIMEOUT_LIMIT {
                return Err(Error::invalid_argument(format!(
                    "heartbeats every {interval:?} with a time-out of {timeout:?}: neither may be longer than a day"
                ))
                .with_remedy("zero turns them off"));
            }
            if !timeout.is_zero() && timeout < interval * 2 {
                return Err(Error::invalid_argument(format!(
                    "heartbeats every {interval:?} with a time-out of {timeout:?}: a single late heartbeat would count as a failure"
                ))
                .with_remedy(
                    "a time-out (PHALANX_HEARTBEAT_TIMEOUT, PHALANX_NETWORK_TIMEOUT) must be twice PHALANX_HEARTBEAT_INTERVAL at least; \
                     ten times is the default",
                ));
            }
        }
        Ok(())
    }

    /// How late a heartbeat of a rank may be that is on this host, or on another.
    #[doc(hidden)]
    pub fn timeout_of(self, is_within_host: bool) -> Duration {
        if is_within_host { self.timeout } else { self.network_timeout }
    }

    /// After what silence of the network a process on another host is given up, where that cannot be turned off.
    #[doc(hidden)]
    pub fn network_silence(self) -> Duration {
        match self.network_timeout {
            Duration::ZERO => Self::default().network_timeout,
            timeout => timeout,
        }
    }

    /// How many heartbeats may be missing of a process that sends one to a store in each `interval`: a launcher, or a worker of an
    /// elastic job. They may be later than those of a rank, whose peers know more of the reason, and so speak first.
    #[doc(hidden)]
    pub fn missing_in_store(self, interval: Duration, is_within_host: bool) -> u32 {
        let silence = if is_within_host { self.timeout } else { self.network_silence() };
        let beats = silence.as_nanos().div_ceil(interval.as_nanos().max(1));
        u32::try_from(beats).unwrap_or(u32::MAX).saturating_add(AFTER_RANKS).max(STORE_BEATS)
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(100),
            timeout: Duration::from_secs(1),
            network_timeout: Duration::from_secs(10),
        }
    }
}

/// The value of the variable `name`, in seconds.
fn seconds(name: &str, text: Option<String>) -> Result<Option<Duration>> {
    let Some(text) = text else { return Ok(None) };
    if text.trim().is_empty() {
        return Ok(None);
    }
    let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match seconds.filter(|seconds| *seconds <= TIMEOUT_LIMIT) {
        Some(seconds) => Ok(Some(seconds)),
        None => Err(Error::environment(format!("{name}={text:?} is no number of seconds up to a day"))
            .with_remedy("0 turns it off; unset it for the default")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(interval: u64, timeout: u64, network_timeout: u64) -> Heartbeat {
        let [interval, timeout, network_timeout] =
            [interval, timeout, network_timeout].map(Duration::from_millis);
        Heartbeat { interval, timeout, network_timeout }
    }

    #[test]
    fn a_time_out_leaves_room_for_a_late_heartbeat() {
        for fine in [
            Heartbeat::default(),
            Heartbeat::OFF,
            milliseconds(0, 10, 10),
            milliseconds(500, 0, 0),
            milliseconds(5, 10, 10),
        ] {
            assert!(fine.check().is_ok(), "{fine:?}");
        }
        for bad in [
            milliseconds(6, 11, 12),
            milliseconds(6, 12, 11),
            milliseconds(u64::MAX, 0, 0),
            milliseconds(0, u64::MAX, 0),
            milliseconds(0, 0, u64::MAX),
        ] {
            assert!(bad.check().unwrap_err().is_invalid_argument(), "{bad:?}");
        }
    }

    #[test]
    fn a_large_group_has_fewer_heartbeats_and_the_same_time_outs() {
        let among = |heartbeat: Heartbeat, ranks| heartbeat.among(WorldSize::new(ranks).unwrap());
        let default = Heartbeat::default();
        assert_eq!(among(default, 32), default);
        let fewer = among(default, 33);
        assert_eq!(fewer, Heartbeat { interval: Duration::from_millis(400), ..default });
        assert!(fewer.check().is_ok());
        // What the user has set stays, if it is longer, or turns them off. A time-out of one rank does not keep it silent for long.
        let slow = milliseconds(500, 1000, 10_000);
        assert_eq!(among(slow, 128), slow);
        assert_eq!(among(milliseconds(0, 1000, 1000), 128), milliseconds(0, 1000, 1000));
        assert_eq!(among(milliseconds(100, 0, 0), 128), milliseconds(100, 0, 0));
        assert_eq!(among(milliseconds(100, 0, 60_000), 128), milliseconds(400, 0, 60_000));
        assert_eq!(among(milliseconds(10, 50, 50), 128), milliseconds(20, 50, 50));
    }

    #[test]
    fn a_network_may_be_silent_for_longer_than_a_process_unless_the_user_says_otherwise() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(Heartbeat::with(None, None, None), milliseconds(100, 1000, 10_000));
        assert_eq!(Heartbeat::with(None, None, seconds(60)), milliseconds(100, 1000, 60_000));
        assert_eq!(Heartbeat::with(None, seconds(3), seconds(60)), milliseconds(100, 3000, 60_000));
        assert_eq!(Heartbeat::with(None, seconds(0), seconds(60)), milliseconds(100, 0, 0));
        assert_eq!(Heartbeat::with(None, seconds(15), None), milliseconds(100, 15_000, 15_000));
        assert_eq!(Heartbeat::with(None, seconds(0), None), milliseconds(100, 0, 0));
        assert_eq!(Heartbeat::with(seconds(1), None, None), milliseconds(1000, 10_000, 10_000));
        assert_eq!(Heartbeat::with(seconds(2), None, None), milliseconds(2000, 20_000, 20_000));
        let default = Heartbeat::default();
        assert_eq!([true, false].map(|near| default.timeout_of(near).as_secs()), [1, 10]);
    }

    fn from(variables: &[(&str, &str)]) -> Result<Heartbeat> {
        Heartbeat::from_variables(|name| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn each_variable_sets_what_its_name_says() {
        const NAMES: [&str; 3] =
            ["PHALANX_HEARTBEAT_INTERVAL", "PHALANX_HEARTBEAT_TIMEOUT", "PHALANX_NETWORK_TIMEOUT"];
        let [interval, timeout, network] = NAMES;
        assert_eq!(from(&[]).unwrap(), Heartbeat::default());
        assert_eq!(from(&[(interval, "0.25")]).unwrap(), milliseconds(250, 2500, 10_000));
        assert_eq!(from(&[(timeout, "3")]).unwrap(), milliseconds(100, 3000, 3000));
        assert_eq!(from(&[(network, " 60 ")]).unwrap(), milliseconds(100, 1000, 60_000));
        let all = [(interval, "0.5"), (timeout, "2"), (network, "20")];
        assert_eq!(from(&all).unwrap(), milliseconds(500, 2000, 20_000));
        for name in NAMES {
            // As one that is not set.
            assert_eq!(from(&[(name, " ")]).unwrap(), Heartbeat::default(), "{name}");
            for bad in ["-1", "soon", "nan", "86401"] {
                let error = from(&[(name, bad)]).unwrap_err();
                let says = error.to_string().starts_with(&format!("{name}={bad:?} is no number of seconds"));
                assert!(error.is_environment() && says, "{error}");
            }
        }
    }

    #[test]
    fn heartbeats_in_a_store_may_be_as_late_as_those_between_ranks() {
        let (second, default) = (Duration::from_secs(1), Heartbeat::default());
        assert_eq!([true, false].map(|near| default.missing_in_store(second, near)), [5, 12]);
        let of = |timeout| Heartbeat::with(None, Some(Duration::from_secs(timeout)), None);
        assert_eq!([true, false].map(|near| of(15).missing_in_store(second, near)), [17, 17]);
        assert_eq!([true, false].map(|near| of(2).missing_in_store(second, near)), [5, 5]);
        // A process that a debugger has stopped is a worker. A launcher that is silent is gone.
        assert_eq!([true, false].map(|near| of(0).missing_in_store(second, near)), [5, 12]);
        assert_eq!(default.missing_in_store(Duration::from_millis(1500), false), 9);
        assert_eq!(default.missing_in_store(Duration::ZERO, false), u32::MAX);
    }
}
