//! A watchdog that ends process groups if this process is killed.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};

use rustix::process::{Pid, WaitOptions, waitpid};

/// A process that waits for this one to die and then kills the process groups it was told of.
///
/// The parent-death signal ends a worker, but not what the worker has started; and nothing that the launcher does in
/// its own code helps against SIGKILL. The guard holds one end of a pipe whose other end is this process. When the
/// kernel closes that end, it sends SIGKILL to each group on its list, and ends. It is a session of its own, so
/// that no terminal and no group signal reaches it, and holds no file but the pipe.
///
/// Dropping the guard ends it; what it [watches](Self::watch) then is killed. Nothing is, if all was
/// [released](Self::release) before.
#[derive(Debug)]
pub struct Guard {
    // An option only so that `drop` can close it before it waits for the process.
    orders: Option<io::PipeWriter>,
    pid: Pid,
}

impl Guard {
    /// Starts a guard that can watch up to `capacity` groups at a time.
    pub fn start(capacity: usize) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // Taken before the fork: the child must not allocate.
        let mut watched = vec![0_i32; capacity];
        // SAFETY: in the child, where only async-signal-safe calls are allowed because other threads may have held
        // locks, nothing runs but `stand_guard`, which keeps to them and never returns. In the parent, fork has no
        // requirement.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => stand_guard(reader.as_raw_fd(), &mut watched),
            pid => match Pid::from_raw(pid) {
                Some(pid) => Ok(Self { orders: Some(writer), pid }),
                None => Err(io::ErrorKind::InvalidData.into()),
            },
        }
    }

    /// The guard's process.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Puts the process group led by `leader` on the list.
    pub fn watch(&mut self, leader: Pid) -> io::Result<()> {
        self.order(leader.as_raw_nonzero().get())
    }

    /// Takes the process group led by `leader` off the list. Call it before the leader is reaped, so that its number
    /// cannot belong to somebody else yet.
    pub fn release(&mut self, leader: Pid) -> io::Result<()> {
        self.order(-leader.as_raw_nonzero().get())
    }

    fn order(&mut self, order: i32) -> io::Result<()> {
        match &mut self.orders {
            // Four bytes into a pipe are written whole or not at all.
            Some(orders) => orders.write_all(&order.to_ne_bytes()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.orders = None;
        while matches!(waitpid(Some(self.pid), WaitOptions::empty()), Err(rustix::io::Errno::INTR)) {}
    }
}

/// The whole life of the guard's process. Async-signal-safe: system calls on its own stack and on `watched`, which
/// exists since before the fork; no allocation, no lock, no panic.
fn stand_guard(orders: RawFd, watched: &mut [i32]) -> ! {
    detach(orders);
    loop {
        let mut bytes = [0_u8; 4];
        // SAFETY: `bytes` is writable and 4 bytes long.
        let read = unsafe { libc::read(orders, bytes.as_mut_ptr().cast(), bytes.len()) };
        match read {
            4 => {
                let order = i32::from_ne_bytes(bytes);
                let (from, to) = if order > 0 { (0, order) } else { (-order, 0) };
                if let Some(slot) = watched.iter_mut().find(|slot| **slot == from) {
                    *slot = to;
                }
            }
            -1 if interrupted() => {}
            // 0: nobody holds the other end any more.
            _ => break,
        }
    }
    for leader in watched.iter().filter(|leader| **leader > 1) {
        // SAFETY: `kill` takes plain numbers; a group that is gone gives an error that needs no care.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
    // SAFETY: `_exit` ends the process at once; no destructor or exit handler of the copied program runs.
    unsafe { libc::_exit(0) }
}

/// Cuts all ties to the terminal, the working directory, the files and the signals of the parent.
fn detach(keep: RawFd) {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises the set before `sigprocmask` reads it. The strings end with a zero byte and
    // live for ever. `setsid`, `chdir`, `prctl(PR_SET_NAME)` and `close` take no other memory of ours, and closing
    // descriptors is sound here because no Rust value of this process's copy will ever use or drop them.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        #[cfg(target_os = "linux")]
        libc::prctl(libc::PR_SET_NAME, c"phalanx-guard".as_ptr());
    }
    close_all_but(keep);
}

fn close_all_but(keep: RawFd) {
    #[cfg(target_os = "linux")]
    {
        let (below, above) = (keep - 1, keep + 1);
        // SAFETY: `close_range` takes plain numbers; see `detach` for why closing is sound.
        let closed = unsafe {
            (keep == 0 || libc::syscall(libc::SYS_close_range, 0, below, 0) == 0)
                && libc::syscall(libc::SYS_close_range, above, libc::c_uint::MAX, 0) == 0
        };
        if closed {
            return;
        }
    }
    // An older kernel: one by one, as far as descriptors usually go.
    for fd in (0..65_536).filter(|fd| *fd != keep) {
        // SAFETY: see `detach`.
        unsafe { libc::close(fd) };
    }
}

fn interrupted() -> bool {
    io::Error::last_os_error().raw_os_error() == Some(libc::EINTR)
}
