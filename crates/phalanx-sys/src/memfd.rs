//! Anonymous files that processes of one host map together. They have no name on any file system. The kernel frees them
//! with the last process that maps them, however it ends.
//!
//! So nothing is left in `/dev/shm` when a process dies.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate,
    memfd_create,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Resource, getrlimit};

/// Bytes that are allocated in one call. A signal ends an allocation and undoes it, so a large one might never end
/// where signals are frequent, as under a profiler.
const PIECE: u64 = 1 << 20;

/// An empty file, which no process can run as a program: a host may refuse all others (`vm.memfd_noexec=2`). Linux before 6.3 knows
/// neither this nor that setting.
///
/// # Errors
/// If the system makes none, as for want of descriptors.
pub fn anonymous(name: &str) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => Ok(memfd_create(name, flags)?),
        made => Ok(made?),
    }
}

/// A file of `bytes`, none of them allocated yet. Its size is sealed.
pub(crate) fn create(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    // A larger file would get this process a signal.
    if size_limit().is_some_and(|limit| limit < bytes) {
        return Err(io::Error::other("the limit on the size of files (`ulimit -f`) is too low"));
    }
    let fd = anonymous(name)?;
    ftruncate(&fd, bytes)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// The largest file that this process may make, if there is a limit.
pub(crate) fn size_limit() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// Allocates memory for a part of the file: too little memory is an error now, and not a bus error later.
pub(crate) fn allocate(file: impl AsFd, start: u64, bytes: u64) -> io::Result<()> {
    for offset in (0..bytes).step_by(PIECE as usize) {
        let length = PIECE.min(bytes - offset);
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), start + offset, length))?;
    }
    Ok(())
}

/// Frees the memory of a part of the file. It then reads as zeros.
pub(crate) fn release(file: impl AsFd, start: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(retry_on_intr(|| fallocate(&file, flags, start, bytes))?)
}

/// The file that process `pid` of this host lends as `descriptor`. An error if it does not have this name and size.
pub(crate) fn open(name: &str, pid: u32, descriptor: i32, bytes: u64) -> io::Result<File> {
    let path = format!("/proc/{pid}/fd/{descriptor}");
    // In a container the number may be another process's, and the file of any kind. Opening a device may have
    // effects, so its name is checked first. If another file takes its place meanwhile, opening it must not block.
    if !std::fs::read_link(&path)?.to_string_lossy().contains(&format!("memfd:{name}")) {
        return Err(io::Error::other("it is not a segment"));
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    // A file that can shrink, or is too small, could lead to a bus error later.
    let sealed = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
    if !sealed || file.metadata()?.len() != bytes {
        return Err(io::Error::other("it is not a segment of this job"));
    }
    Ok(file)
}

// Miri has no anonymous files.
#[cfg(not(miri))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_a_program_where_the_kernel_can_tell() {
        let can_tell = memfd_create("asked", MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL).is_ok();
        let seals = fcntl_get_seals(create("made", 4096).unwrap()).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW));
        assert_eq!(seals.contains(SealFlags::EXEC), can_tell);
    }
}
