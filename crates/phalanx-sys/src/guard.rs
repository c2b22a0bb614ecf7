//! A watchdog that kills all that this process has started, if it is killed itself.

#[cfg(target_os = "linux")]
use std::ffi::CStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::{Pid, WaitOptions, waitpid};

use crate::worker::prepare;

/// The orders that are not process numbers.
const DISMISS: i32 = 0;
const KILL: i32 = -1;

/// What the workers of one guard have in their environment, and nobody else.
pub type Tag = [u8; 32];

/// A process that waits for this one to die and then kills what its workers have started.
///
/// The parent-death signal ends a worker, but not what the worker has started; and nothing that the launcher does in
/// its own code helps against SIGKILL. The guard holds one end of a pipe whose other end is this process. When the
/// kernel closes that end, it sends SIGKILL to each group on its list, then to each process in whose environment it finds
/// the tag (Linux), until there is none or some seconds have passed, and ends. It is a session of its own, so that no terminal and no group signal
/// reaches it, and holds no file but the pipe.
///
/// Dropping the guard has the same effect, unless it was [dismissed](Self::dismiss).
#[derive(Debug)]
pub struct Guard {
    /// None once it has had its last order.
    orders: Option<io::PipeWriter>,
    pid: Pid,
    is_reaped: bool,
    /// Was nobody left when it ended?
    is_certain: bool,
}

impl Guard {
    /// Starts a guard that can watch up to `capacity` groups. The caller sees to it that every worker has `tag` somewhere in
    /// its environment: what a worker starts inherits it, in whichever group or session it is.
    pub fn start(capacity: usize, tag: &Tag) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // Taken before the fork: the child must not allocate.
        let mut watched = vec![0_i32; capacity];
        // SAFETY: in the child, where only async-signal-safe calls are allowed because other threads may have held
        // locks, nothing runs but `stand_guard`, which keeps to them and never returns. In the parent, fork has no
        // requirement.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => stand_guard(reader.as_raw_fd(), &mut watched, tag),
            pid => match Pid::from_raw(pid) {
                Some(pid) => Ok(Self { orders: Some(writer), pid, is_reaped: false, is_certain: true }),
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
        let (mut number, note) = io::pipe()?;
        let (orders, noted) = (orders.as_raw_fd(), note.as_raw_fd());
        // SAFETY: `put_on_the_list` makes async-signal-safe calls alone, as is required between fork and exec. The
        // descriptors are open whenever it runs: `self` is borrowed, and `note` lives, until `command`, which nobody else has,
        // has been started for the only time.
        unsafe { command.pre_exec(move || put_on_the_list(noted).and_then(|()| put_on_the_list(orders))) };
        // Behind the other, so that it has the last word on signals.
        let spawned = prepare(&mut command).spawn();
        drop(note);
        if spawned.is_err() {
            // It may have got as far as the list, and its number belongs to nobody now, or to a stranger.
            let mut bytes = [0; 4];
            if number.read_exact(&mut bytes).is_ok() {
                self.forget(u32::from_ne_bytes(bytes));
            }
        }
        spawned
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

    /// Kills what it watches, and waits until that is done. Call it, too, before the leaders are reaped.
    ///
    /// # Errors
    /// If it is not known that nobody is left: some process could not be looked at or did not go, or the guard itself was killed.
    pub fn kill(&mut self) -> io::Result<()> {
        self.end(KILL);
        while !self.is_reaped {
            match waitpid(Some(self.pid), WaitOptions::empty()) {
                Err(rustix::io::Errno::INTR) => continue,
                Ok(Some((_, status))) if status.exit_status() == Some(0) => {}
                _ => self.is_certain = false,
            }
            self.is_reaped = true;
        }
        match self.is_certain {
            true => Ok(()),
            false => Err(io::Error::other("processes that the workers have started may be left")),
        }
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
        // Who wants to know has asked before.
        let _ = self.kill();
    }
}

/// Writes the number of this process, which is about to be a worker. Async-signal-safe.
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
fn stand_guard(orders: RawFd, watched: &mut [i32], tag: &Tag) -> ! {
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
    #[cfg(target_os = "linux")]
    let is_certain = sweep(tag, SWEEPS);
    #[cfg(not(target_os = "linux"))]
    let is_certain = {
        let _ = tag;
        true
    };
    // SAFETY: `_exit` ends the process at once; no destructor or exit handler of the copied program runs.
    unsafe { libc::_exit(i32::from(!is_certain)) }
}

/// How often to look for what is left: with the pauses between, for some seconds.
#[cfg(target_os = "linux")]
const SWEEPS: u32 = 500;

/// Kills what carries `tag`, until there is nobody; is that so? A process may fork while it is looked for, so there must have
/// been nobody twice.
#[cfg(target_os = "linux")]
fn sweep(tag: &Tag, times: u32) -> bool {
    let (mut empty, pause) = (0, libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 });
    for _ in 0..times {
        empty = match kill_tagged(tag) {
            Found::Nobody => empty + 1,
            Found::Somebody | Found::Unknown => 0,
        };
        if empty == 2 {
            return true;
        }
        // SAFETY: the first pointer is to a timespec, the second may be null.
        unsafe { libc::nanosleep(&raw const pause, std::ptr::null_mut()) };
    }
    false
}

/// What a look for those with the tag has found; the later in this list outweighs the earlier.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Nobody,
    /// Who has been killed now.
    Somebody,
    /// Some process could not be looked at, for want of descriptors or memory: it may be one.
    Unknown,
}

#[cfg(target_os = "linux")]
impl Found {
    /// Of what the last call failed to look at: nobody, if it is gone or another user's, or if there is no such thing here.
    fn after_error() -> Self {
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH | libc::EACCES | libc::EPERM) => Self::Nobody,
            _ => Self::Unknown,
        }
    }
}

/// Kills what carries `tag` now.
#[cfg(target_os = "linux")]
fn kill_tagged(tag: &Tag) -> Found {
    /// Before the name in an entry: inode, offset, length and type.
    const NAME: usize = 19;
    let mut found = Found::Nobody;
    let Some(proc) = open_at(libc::AT_FDCWD, c"/proc", libc::O_DIRECTORY) else {
        return Found::after_error();
    };
    // Of numbers, so that it is aligned as entries are.
    let mut entries = [0_u64; 512];
    loop {
        // SAFETY: the buffer is writable, and as long as is said.
        let length = unsafe {
            libc::syscall(libc::SYS_getdents64, proc.0, entries.as_mut_ptr(), size_of_val(&entries))
        };
        let Ok(length) = usize::try_from(length) else { return Found::Unknown };
        if length == 0 {
            return found;
        }
        // SAFETY: any bytes are bytes, and the slice is that of the array; it is not used after the next call.
        let bytes = unsafe {
            std::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), length.min(size_of_val(&entries)))
        };
        let mut at = 0;
        while let Some([low, high]) = bytes.get(at + 16..at + 18) {
            let size = usize::from(u16::from_ne_bytes([*low, *high]));
            let name = bytes.get(at + NAME..at + size).and_then(|name| CStr::from_bytes_until_nul(name).ok());
            if let Some(name) = name.filter(|name| name.to_bytes().first().is_some_and(u8::is_ascii_digit)) {
                found = found.max(kill_if_tagged(&proc, name, tag));
            }
            if size == 0 {
                return found;
            }
            at += size;
        }
    }
}

/// Kills the process of this number, if it carries `tag`. Its folder stands for the process: a later one of the same number
/// has another.
#[cfg(target_os = "linux")]
fn kill_if_tagged(proc: &Open, number: &CStr, tag: &Tag) -> Found {
    let Some(process) = open_at(proc.0, number, libc::O_DIRECTORY) else { return Found::after_error() };
    let Some(environment) = open_at(process.0, c"environ", 0) else { return Found::after_error() };
    match holds(&environment, tag) {
        Found::Somebody => {}
        other => return other,
    }
    // SAFETY: plain numbers, and a null pointer where one is allowed.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.0,
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    // A kernel before 5.1.
    if sent != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        let pid = number
            .to_bytes()
            .iter()
            .fold(0_i32, |pid, digit| pid.wrapping_mul(10).wrapping_add(i32::from(digit.wrapping_sub(b'0'))));
        if pid > 1 {
            // SAFETY: `kill` takes plain numbers.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
    Found::Somebody
}

/// Is `tag` somewhere in this file?
#[cfg(target_os = "linux")]
fn holds(file: &Open, tag: &Tag) -> Found {
    /// More than the kernel lets a process have for its environment, with its usual limits.
    const MAX: usize = 8 << 20;
    let mut left = MAX;
    let mut buffer = [0_u8; 4096];
    // What may be the tag's begin stays before what is read next.
    let mut kept = 0;
    loop {
        let Some(free) = buffer.get_mut(kept..) else { return Found::Unknown };
        // SAFETY: `free` is writable, and as long as is said.
        let read = unsafe { libc::read(file.0, free.as_mut_ptr().cast(), free.len()) };
        let filled = match usize::try_from(read) {
            Ok(read) if read > 0 && read <= left => {
                left -= read;
                kept + read
            }
            Err(_) if interrupted() => continue,
            Err(_) => return Found::after_error(),
            // Its end, or more than it can be.
            Ok(_) => return Found::Nobody,
        };
        let Some(held) = buffer.get(..filled) else { return Found::Unknown };
        if held.windows(tag.len()).any(|part| part == tag) {
            return Found::Somebody;
        }
        kept = filled.min(tag.len() - 1);
        buffer.copy_within(filled - kept..filled, 0);
    }
}

/// A descriptor that is closed when it is dropped.
#[cfg(target_os = "linux")]
struct Open(RawFd);

#[cfg(target_os = "linux")]
impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: nobody else has this descriptor.
        unsafe { libc::close(self.0) };
    }
}

#[cfg(target_os = "linux")]
fn open_at(folder: RawFd, name: &CStr, flags: libc::c_int) -> Option<Open> {
    // SAFETY: `name` ends with a zero byte, and lives until after the call.
    let fd = unsafe { libc::openat(folder, name.as_ptr(), flags | libc::O_RDONLY | libc::O_CLOEXEC) };
    // Not `then_some`: an `Open` that is no file would be dropped, and its `close` change `errno`.
    (fd >= 0).then(|| Open(fd))
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_end_is_not_read_for_ever() {
        let zeros = open_at(libc::AT_FDCWD, c"/dev/zero", 0);
        let found = holds(&zeros.expect("it can be read"), b"phalanx-sys:no-process-has-this0");
        assert_eq!(found, Found::Nobody);
    }

    #[test]
    fn without_descriptors_it_is_not_known_that_nobody_is_left() {
        const TAG: &Tag = b"phalanx-sys:no-process-has-this1";
        // In a process of its own, which nobody else's files are taken from.
        // SAFETY: the child makes async-signal-safe calls alone, as the guard does, and never returns.
        match unsafe { libc::fork() } {
            0 => {
                let before = kill_tagged(TAG) == Found::Nobody && sweep(TAG, 2);
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                // SAFETY: the pointer is to an `rlimit`.
                let limited = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) } == 0;
                let after = kill_tagged(TAG) == Found::Unknown && !sweep(TAG, 3);
                // SAFETY: it ends the process at once.
                unsafe { libc::_exit(i32::from(!(before && limited && after))) }
            }
            pid => {
                let pid = Pid::from_raw(pid).expect("a child");
                let (_, status) =
                    waitpid(Some(pid), WaitOptions::empty()).expect("it ends").expect("it ends");
                assert_eq!(status.exit_status(), Some(0));
            }
        }
    }
}
