//! How much memory there is. An allocation of shared memory that is larger than that is not refused by the kernel, but
//! answered with the end of some process.

use std::fs::read_to_string;
use std::io;

use rustix::process::{Resource, getrlimit};

use crate::memfd;

/// Allocations below this are not asked about: they come often, and asking takes longer than a small one does.
const LARGE: usize = 1 << 20;

/// Of `bytes` of addresses, what the limits of this process let each of `arenas` take: half of all addresses together,
/// and no file beyond the largest.
pub(super) fn allowed(bytes: usize, arenas: usize) -> usize {
    let addresses = getrlimit(Resource::As).current.map(|limit| limit / 2 / arenas.max(1) as u64);
    let limits = addresses.into_iter().chain(memfd::size_limit());
    limits.fold(bytes, |least, limit| least.min(usize::try_from(limit).unwrap_or(usize::MAX)))
}

/// An error if `bytes` are more than the host, or this process's control group, has left.
pub(super) fn check(bytes: usize) -> io::Result<()> {
    match available().filter(|_| bytes >= LARGE) {
        Some(available) if available < bytes as u64 => Err(io::Error::other(format!(
            "{bytes} bytes are needed, and {available} bytes of memory are left"
        ))),
        _ => Ok(()),
    }
}

/// What is left, as far as it is known.
fn available() -> Option<u64> {
    let number = |path: &str| read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max");
    let group = limit.zip(number("/sys/fs/cgroup/memory.current"));
    let group = group.map(|(limit, current)| limit.saturating_sub(current));
    [group, of_host("MemAvailable:")].into_iter().flatten().min()
}

/// The memory of this host, in bytes, if the system says.
pub fn total() -> Option<u64> {
    of_host("MemTotal:")
}

fn of_host(name: &str) -> Option<u64> {
    let table = read_to_string("/proc/meminfo").ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim_end().parse().ok()?;
    kibibytes.checked_mul(1024)
}
