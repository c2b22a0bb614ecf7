//! Descriptors, threads and memory of this process, so that a run of many faults shows a leak.

use std::fmt;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A thread that has lost its process's output may take a moment to end.
const THREAD_END_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resources {
    descriptors: usize,
    threads: usize,
}

impl Resources {
    pub(super) fn now() -> Self {
        let count = |folder| fs::read_dir(folder).map_or(0, Iterator::count);
        Self { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task") }
    }

    /// Says how many more there are now than then, if it stays so.
    pub(super) fn leaked(self) -> Option<String> {
        let deadline = Instant::now() + THREAD_END_TIMEOUT;
        loop {
            let now = Self::now();
            if now.descriptors <= self.descriptors && now.threads <= self.threads {
                return None;
            }
            if Instant::now() >= deadline {
                return Some(format!("left behind: {now}; before: {self}"));
            }
            sleep(Duration::from_millis(10));
        }
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} descriptors, {} threads", self.descriptors, self.threads)
    }
}

/// The memory of this process, in MiB.
pub(super) fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
