//! How much memory there is. An allocation of shared memory that is larger than that is not refused by the kernel, but
//! answered with the end of some process.

use std::fs::read_to_string;
use std::io;

use rustix::process::{Resource, getrlimit};

use super::cgroup;
use crate::memfd;

/// Allocations below this are not asked about: they come often, and asking takes longer than a small one does.
const LARGE: usize = 1 << 20;

/// The addresses of a process where no limit leaves it fewer.
const ADDRESSES: u64 = 1 << 47;

/// Of `bytes` of addresses, what each of `arenas` may take: no more than this process can spare for all of them, and no
/// file beyond the largest.
pub(super) fn allowed(bytes: usize, arenas: usize) -> usize {
    let limit = getrlimit(Resource::As).current.unwrap_or(ADDRESSES).min(ADDRESSES);
    let taken = field("/proc/self/status", "VmSize:").unwrap_or(0);
    let addresses = spare(limit, taken) / arenas.max(1) as u64;
    let limits = [addresses].into_iter().chain(memfd::size_limit());
    limits.fold(bytes, |least, limit| least.min(usize::try_from(limit).unwrap_or(usize::MAX)))
}

/// What may be taken at once where so much is `taken`. One half of all addresses is left to the program; of the other,
/// each takes a quarter of what those before it have left, so that there is some for all.
fn spare(limit: u64, taken: u64) -> u64 {
    (limit / 2).saturating_sub(taken) / 4
}

/// The size of this system's pages.
pub(super) fn page() -> usize {
    // SAFETY: it reads no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// An error if `bytes` are more than the host, or one of this process's control groups, has left.
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

/// What is left, as far as it is known.
fn available() -> Option<u64> {
    [cgroup::left(), field("/proc/meminfo", "MemAvailable:")].into_iter().flatten().min()
}

/// The memory of this host, in bytes, if the system says.
pub fn total() -> Option<u64> {
    field("/proc/meminfo", "MemTotal:")
}

/// A size in a table of the system's, in bytes.
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
