//! Memory of another process of this host, which the kernel copies (`process_vm_readv`).
//!
//! It does so for processes of the same user, unless Yama, a sandbox or the process itself forbids it. By its number alone a process is not
//! known: it may have ended, and another one may have the number, or it may have become another program. So whoever copies looks whether a
//! random number is where the process has said, at the same time or afterwards: then what has come is of that process, too.

use std::io;

/// A place in another process, and how much is copied from it to where.
pub(crate) type Part<'a> = (u64, &'a mut [u8]);

/// Copies from `address` of process `pid`, and returns how much.
///
/// # Errors
/// If the kernel does not allow it, or if there is no such process or memory.
pub(crate) fn read(pid: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    read_parts(pid, [(address, into)])
}

/// The same for several parts, in their order. All that comes is of one process, even if it ends meanwhile and another one gets its number.
pub(crate) fn read_parts<const N: usize>(pid: u32, parts: [Part<'_>; N]) -> io::Result<usize> {
    let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
    let pid = libc::pid_t::try_from(pid).map_err(|_| unsupported())?;
    // Miri has no other processes.
    if cfg!(miri) {
        return Err(unsupported());
    }
    let nowhere = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let (mut local, mut remote) = ([nowhere; N], [nowhere; N]);
    for (index, (address, into)) in parts.into_iter().enumerate() {
        let address = usize::try_from(address).map_err(|_| unsupported())?;
        local[index] = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        remote[index] =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: into.len() };
    }
    let count = N as libc::c_ulong;
    // SAFETY: `local` is memory that is borrowed for this call, and any bytes are valid in it. `remote` are addresses of another process, or
    // of this one, which the kernel checks and only reads.
    let copied = unsafe { libc::process_vm_readv(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}
