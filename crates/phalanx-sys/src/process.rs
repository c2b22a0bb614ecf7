//! Memory of another process of this host, which the kernel copies (`process_vm_readv`).
//!
//! It does so for processes of the same user, unless Yama, a sandbox or the process itself forbids it. By its number alone a process is not
//! known: it may have ended, and another one may have the number, or it may have become another program. So whoever copies looks afterwards
//! whether a random number is where the process has said: then what came before it is of that process, too.

use std::io;

/// Copies from `address` of process `pid`, and returns how much.
///
/// # Errors
/// If the kernel does not allow it, or if there is no such process or memory.
pub(crate) fn read(pid: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
    let address = usize::try_from(address).map_err(|_| unsupported())?;
    let pid = libc::pid_t::try_from(pid).map_err(|_| unsupported())?;
    // Miri has no other processes.
    if cfg!(miri) {
        return Err(unsupported());
    }
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: into.len() };
    // SAFETY: `local` is memory that is borrowed for this call, and any bytes are valid in it. `remote` is an address of another process,
    // or of this one, which the kernel checks and only reads.
    let copied = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}
