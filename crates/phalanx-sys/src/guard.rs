//! A watchdog that kills process groups if this process is killed.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::{Pid, WaitOptions, waitpid};

use crate::worker::prepare;

/// The orders that are not process numbers.
const DISMISS: i32 = 0;
const KILL: i32 = -1;

/// A process that waits for this one to die and then kills the process groups that it watches.
///
/// The parent-death signal ends a worker, but not what the worker has started; and nothing that the launcher does in
/// its own code helps against SIGKILL. The guard holds one end of a pipe whose other end is this process. When the
/// kernel closes that end, it sends SIGKILL to each group on its list, and ends. It is a session of its own, so
/// that no terminal and no group signal reaches it, and holds no file but the pipe.
///
/// Dropping the guard has the same effect, unless it was [dismissed](Self::dismiss).
#[derive(Debug)]
pub struct Guard {
    /// None once it has had its last order.
    orders: Option<io::PipeWriter>,
    pid: Pid,
}

impl Guard {
    /// Starts a guard that can watch up to `capacity` groups.
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

    /// Starts `command` as a worker, which
    ///
    /// - leads a process group of its own, so that it can be ended together with everything it starts;
    /// - is watched: it puts itself on the list before it executes anything, so that there is no moment at which this
    ///   process may die and leave something behind;
    /// - is killed by the kernel when its parent dies, however it dies (Linux);
    /// - begins with no signal blocked, and with the default reaction to those that end a process;
    /// - may write to the terminal, although its group is never the one in the foreground.
    ///
    /// The kernel takes the *thread* that starts the worker for its parent: start it from a thread that lives until the
    /// worker has ended. A set-user-ID program sheds the parent-death signal; being watched covers that.
    pub fn spawn(&self, mut command: Command) -> io::Result<Child> {
        let Some(orders) = &self.orders else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let orders = orders.as_raw_fd();
        // SAFETY: `put_on_the_list` makes async-signal-safe calls alone, as is required between fork and exec. The
        // descriptor is open whenever it runs: `self` is borrowed until `command`, which nobody else has, is dropped.
        unsafe { command.pre_exec(move || put_on_the_list(orders)) };
        // Behind the other, so that it has the last word on signals.
        prepare(&mut command).spawn()
    }

    /// Takes the group that `leader` leads off the list. Call it before the leader is reaped.
    pub fn forget(&self, leader: u32) {
        let order = i32::try_from(leader).ok().filter(|leader| *leader > 1);
        if let (Some(mut orders), Some(leader)) = (self.orders.as_ref(), order) {
            // A guard that is gone watches nobody.
            let _ = orders.write_all(&(-leader).to_ne_bytes());
        }
    }

    /// Ends the guard, and nothing else. Call it before the leaders of the groups are reaped: afterwards their numbers
    /// may belong to somebody else.
    pub fn dismiss(&mut self) {
        self.end(DISMISS);
    }

    /// An order, and not only a closed pipe: a child that this process has forked may hold the pipe open.
    fn end(&mut self, order: i32) {
        if let Some(mut orders) = self.orders.take() {
            // One that is gone needs no order.
            let _ = orders.write_all(&order.to_ne_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.end(KILL);
        while matches!(waitpid(Some(self.pid), WaitOptions::empty()), Err(rustix::io::Errno::INTR)) {}
    }
}

/// Sends the number of this process, which is about to be a worker. Async-signal-safe.
fn put_on_the_list(orders: RawFd) -> io::Result<()> {
    // SAFETY: SIG_IGN is a valid disposition for SIGPIPE, which would end this process if the guard had been killed;
    // `getpid` takes nothing; `write` gets readable bytes and their number, few enough to be written whole or not at all.
    let written = unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let order = libc::getpid().to_ne_bytes();
        libc::write(orders, order.as_ptr().cast(), order.len())
    };
    if written == 4 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
                match order {
                    // SAFETY: see the end of this function.
                    DISMISS => unsafe { libc::_exit(0) },
                    KILL => break,
                    _ => {}
                }
                // A negative number, below KILL, takes a group off the list.
                let (looked_for, new) = if order < KILL { (-order, 0) } else { (0, order) };
                if let Some(slot) = watched.iter_mut().find(|slot| **slot == looked_for) {
                    *slot = new;
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
