//! Memory of another process of this host, which the kernel copies (`process_vm_readv`).
//!
//! It does so for processes of the same user, unless Yama, a sandbox or the process itself forbids it. By its number alone a process is not
//! known: it may have ended, and another one may have the number, or it may have become another program. So whoever copies looks whether a
//! random number is where the process has said, at the same time or afterwards: then what has come is of that process, too.
//!
//! # Yama
//!
//! Where `kernel.yama.ptrace_scope` is 1, as on Ubuntu, a process may copy out of those that descend from it, and out of no others. Ranks
//! descend from their launcher, and not from each other. But each process may name one more, which is then allowed to copy out of it
//! together with all that descends from that one (`PR_SET_PTRACER`). [`open_to_siblings`] names the parent, which is allowed to do so anyway.
//! So the ranks of one launcher copy out of each other, and no process that the launcher has not started. Other libraries allow it to all
//! processes of the user.
//!
//! The kernel keeps this through `execve` and forgets it when the parent ends; a process that is forked from this one does not have it. What
//! is named is never
//! * the host's init, the parent of orphans, from which all processes descend. In a container process 1 is usually the launcher, and what
//!   descends from it runs in the container. (A session's own init, which takes orphans too, cannot be told from a launcher. A rank has that
//!   one for a parent only if its launcher dies before the ranks have met.)
//! * an interactive shell, from which all descends that its user starts there. It gives each job a process group of its own. Launchers do so
//!   as well, so a parent of another group is named only if a launcher's variables are set.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{PTracer, Pid, getppid, set_ptracer};

/// The pid namespace of the host, which has this number in every kernel (`PROC_PID_INIT_INO`).
const HOSTS_PID_NAMESPACE: &str = "pid:[4026531836]";

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

/// The kernel's setting `kernel.yama.ptrace_scope`: 0 if it has no such setting, and none where /proc does not tell.
pub fn ptrace_scope() -> Option<String> {
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) => Some(scope.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Path::new("/proc/sys/kernel").is_dir().then(|| "0".to_owned())
        }
        Err(_) => None,
    }
}

/// Allows the processes that descend from this one's parent to copy out of this one, where `ptrace_scope` is 1, and returns the parent. None
/// if nothing is to be allowed, and from the second call on: whom the program itself names later stays, in place of the parent, and whom it
/// has named before does not. `is_launched` says whether a launcher has started this process.
///
/// # Errors
/// If the kernel has no memory, or the parent has just ended.
pub fn open_to_siblings(is_launched: bool) -> io::Result<Option<u32>> {
    /// The process that has done so. One that is forked from it has this value too, and has to do so itself.
    static OPENED: AtomicU32 = AtomicU32::new(0);
    // There is none in this process's pid namespace if another one has started it.
    let Some(parent) = getppid() else { return Ok(None) };
    let is_hosts_init = parent == Pid::INIT && !is_in_container();
    let may_be_named = is_launched || is_of_own_group(parent);
    if !opens(ptrace_scope().as_deref(), is_hosts_init, may_be_named) {
        return Ok(None);
    }
    let own = std::process::id();
    if OPENED.swap(own, Ordering::Relaxed) == own {
        return Ok(None);
    }
    set_ptracer(PTracer::ProcessID(parent))?;
    Ok(Some(parent.as_raw_nonzero().get().unsigned_abs()))
}

/// Whether a process names its parent.
fn opens(ptrace_scope: Option<&str>, is_hosts_init: bool, may_be_named: bool) -> bool {
    ptrace_scope == Some("1") && !is_hosts_init && may_be_named
}

/// Whether this process has another pid namespace than the host.
fn is_in_container() -> bool {
    fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() != HOSTS_PID_NAMESPACE)
}

/// Whether `parent` is in this process's group.
fn is_of_own_group(parent: Pid) -> bool {
    // rustix has no value for a group of another pid namespace, whose number is 0 here.
    // SAFETY: `getpgid` takes plain numbers.
    let (own, its) = unsafe { (libc::getpgid(0), libc::getpgid(parent.as_raw_nonzero().get())) };
    own > 0 && own == its
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_where_yama_asks_for_it_is_a_parent_named_and_never_the_hosts_init() {
        assert!(opens(Some("1"), false, true));
        for scope in [None, Some(""), Some("0"), Some("2"), Some("3")] {
            assert!(!opens(scope, false, true), "{scope:?}");
        }
        assert!(!opens(Some("1"), true, true), "the parent of an orphan");
        assert!(!opens(Some("1"), false, false), "a shell's job");
    }

    // Miri has no other processes.
    #[cfg(not(miri))]
    #[test]
    fn a_job_of_a_shell_is_of_another_group_than_the_shell() {
        use std::os::unix::process::CommandExt;
        use std::process::Command;

        let own = Pid::from_raw(std::process::id().cast_signed()).expect("a process");
        let is_of_its_group = |command: &mut Command| {
            let mut child = command.spawn().expect("it starts");
            let its = is_of_own_group(Pid::from_child(&child));
            child.kill().expect("it runs");
            child.wait().expect("it ends");
            its
        };
        assert!(is_of_own_group(own));
        assert!(is_of_its_group(Command::new("sleep").arg("60")));
        assert!(!is_of_its_group(Command::new("sleep").arg("60").process_group(0)));
    }
}
