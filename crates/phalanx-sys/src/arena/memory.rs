//! How much memory there is. If an allocation of shared memory is too large, the kernel does not refuse it, but kills
//! some process later.

use std::fs::read_to_string;
use std::io;
use std::sync::OnceLock;

use rustix::process::{Resource, getrlimit};

use super::cgroup;
use crate::memfd;

/// Smaller allocations are not checked: they are frequent, and the check takes longer than a small allocation.
const LARGE: usize = 1 << 20;

/// The addresses of a process without a limit.
const ADDRESSES: u64 = 1 << 47;

/// How many bytes each of `arenas` may have, at most `bytes`: no more than this process can spare for all of them, and
/// no more than the largest file allowed.
pub(super) fn allowed(bytes: usize, arenas: usize) -> usize {
    let limit = getrlimit(Resource::As).current.unwrap_or(ADDRESSES).min(ADDRESSES);
    let taken = taken().unwrap_or(0);
    let addresses = spare(limit, taken) / arenas.max(1) as u64;
    let limits = [addresses].into_iter().chain(memfd::size_limit());
    limits.fold(bytes, |least, limit| least.min(usize::try_from(limit).unwrap_or(usize::MAX)))
}

/// How many bytes may be used at once when `taken` are in use. One half of all addresses is left to the program. Of the
/// other half, each caller gets a quarter of the rest, so that some is left for later ones.
fn spare(limit: u64, taken: u64) -> u64 {
    (limit / 2).saturating_sub(taken) / 4
}

/// The page size of this system.
pub(super) fn page() -> usize {
    // SAFETY: it accesses no memory of this process.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// An error if the host, or one of this process's control groups, has less than `bytes` left.
pub(super) fn check(bytes: usize) -> io::Result<()> {
    if bytes >= LARGE
        && let Some(available) = available()
        && available < bytes as u64
    {
        let cause = format!("{bytes} bytes are needed, and {available} bytes of memory are left");
        return Err(io::Error::other(cause));
    }
    Ok(())
}

/// The memory left, in bytes, if known: of the host, or of this process's control groups if they leave less.
pub fn available() -> Option<u64> {
    [cgroup::left(), field("/proc/meminfo", "MemAvailable:")].into_iter().flatten().min()
}

/// The memory of this host, in bytes, if known. It is read once: the table has much more than that.
pub fn total() -> Option<u64> {
    static TOTAL: OnceLock<Option<u64>> = OnceLock::new();
    *TOTAL.get_or_init(|| field("/proc/meminfo", "MemTotal:"))
}

/// The addresses that this process uses, in bytes.
fn taken() -> Option<u64> {
    let sizes = read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = sizes.split_whitespace().next()?.parse().ok()?;
    pages.checked_mul(page() as u64)
}

/// A size in one of the system's tables, in bytes.
fn field(path: &str, name: &str) -> Option<u64> {
    let table = read_to_string(path).ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim_end().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_are_those_of_the_other_table() {
        // Other tests take and give back some in between, and not each time.
        let sizes = || (taken().unwrap(), field("/proc/self/status", "VmSize:").unwrap());
        let is_near = |&(before, status): &(u64, u64)| before.abs_diff(status) < before / 2;
        let apart: Vec<_> = (0..100).map(|_| sizes()).take_while(|sizes| !is_near(sizes)).collect();
        assert!(apart.len() < 100, "{apart:?}");
    }

    #[test]
    fn any_number_of_groups_leaves_addresses_to_the_program_and_to_the_next_group() {
        let mut taken = 0;
        for _ in 0..40 {
            let next = spare(ADDRESSES, taken);
            assert!(next > 1 << 20);
            taken += next;
            assert!(taken <= ADDRESSES / 2);
        }
        assert_eq!(spare(1 << 30, 1 << 30), 0);
    }
}
