//! A guard process that kills everything this process has started, if this process is killed.

#[cfg(target_os = "linux")]
use std::ffi::CStr;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, setpgid, setsid, waitpid};

use crate::image::Image;
use crate::worker::prepare;

/// Orders other than process numbers.
const DISMISS: i32 = 0;
const KILL: i32 = -1;

/// A value that only the workers of one guard, and their children, have in their environment.
pub type Tag = [u8; 32];

/// A process that waits for this one to die and then kills everything its workers have started.
///
/// The parent-death signal ends a worker, but not the worker's children. And no code of the launcher itself helps
/// against SIGKILL. The guard holds one end of a pipe whose other end is this process. When the kernel closes that end,
/// the guard sends SIGKILL to each group on its list, then to each process that has the tag in its environment (Linux),
/// until there is none or some seconds have passed, and exits. It has a session of its own, so that no signal of a
/// terminal or group reaches it, and holds no file but the pipe.
///
/// Dropping the guard has the same effect, unless it was [dismissed](Self::dismiss).
#[derive(Debug)]
pub struct Guard {
    /// None after the last order.
    orders: Option<io::PipeWriter>,
    pid: Pid,
    is_reaped: bool,
    /// Whether it found no process left when it ended.
    is_certain: bool,
}

impl Guard {
    /// Starts a guard that can watch up to `capacity` groups. The caller must put `tag` into every worker's
    /// environment. The worker's children inherit it, whatever their group or session.
    pub fn start(capacity: usize, tag: &Tag) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // Allocated before the fork: the child must not allocate.
        let mut watched = vec![0_i32; capacity];
        // SAFETY: the child may make only async-signal-safe calls, because other threads may have held
        // locks. It runs only `run_guard`, which does that and never returns. In the parent, fork has no
        // requirement.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => run_guard(reader.as_raw_fd(), &mut watched, tag),
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
    /// - has no controlling terminal, so that none stops it: what asks for a password at `/dev/tty` gets an error (`ENXIO`), and lines are
    ///   written also under `stty tostop`. It stays in this process's session, by which PBS counts, limits, suspends and ends the
    ///   processes of a job;
    /// - is watched: it puts itself on the list before it executes the program, so that at no moment this
    ///   process can die and leave the worker behind;
    /// - is killed by the kernel when its parent dies, however it dies (Linux);
    /// - begins with no signal blocked, and with the default action for signals that end a process.
    ///
    /// For the kernel, the *thread* that starts the worker is the parent: start it from a thread that lives until the
    /// worker has ended. A set-user-ID program loses the parent-death signal; the guard still kills it.
    pub fn spawn(&self, command: Command) -> io::Result<Child> {
        self.start_worker(command, None)
    }

    /// As [`spawn`](Self::spawn), for a program that is a binary: nobody but the kernel may execute the file at `path`, in which `command` finds its
    /// program. `name` is what the program sees as its own. `spawn` has `/bin/sh` read a binary that the kernel does not take,
    /// such as one for another processor; here that is an error (`ENOEXEC`).
    pub fn spawn_binary(&self, command: Command, path: &Path, name: &OsStr) -> io::Result<Child> {
        let image = Image::new(path, name, &command)?;
        self.start_worker(command, Some(image))
    }

    fn start_worker(&self, mut command: Command, image: Option<Image>) -> io::Result<Child> {
        let Some(orders) = &self.orders else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let (mut number, note) = io::pipe()?;
        let (orders, noted) = (orders.as_raw_fd(), note.as_raw_fd());
        let in_child = move || {
            // First: the guard kills the groups on its list.
            lead_group()?;
            put_on_the_list(noted).and_then(|()| put_on_the_list(orders))
        };
        // SAFETY: `lead_group` and `put_on_the_list` make only async-signal-safe calls, as required between fork and exec. The
        // descriptors are open whenever it runs: `self` is borrowed, and `note` lives, until `command`, of which there
        // is no other handle, has been started for the only time.
        unsafe { command.pre_exec(in_child) };
        // After the closure above, so that it sets the signals last.
        let command = prepare(&mut command);
        if let Some(image) = image {
            // SAFETY: `execute` makes one async-signal-safe call, and builds an error from a plain error number.
            unsafe { command.pre_exec(move || Err(image.execute())) };
        }
        let spawned = command.spawn();
        drop(note);
        if spawned.is_err() {
            // The worker may have put itself on the list. Its number may now be free, or belong to another process.
            let mut bytes = [0; 4];
            if number.read_exact(&mut bytes).is_ok() {
                self.forget(u32::from_ne_bytes(bytes));
            }
        }
        spawned
    }

    /// Takes the group of `leader` off the list. Call it before the leader is reaped.
    pub fn forget(&self, leader: u32) {
        let order = i32::try_from(leader).ok().filter(|leader| *leader > 1);
        if let (Some(mut orders), Some(leader)) = (self.orders.as_ref(), order) {
            // If the guard is gone, it watches nothing.
            let _ = orders.write_all(&(-leader).to_ne_bytes());
        }
    }

    /// Ends the guard, and no other process. Call it before the leaders of the groups are reaped: afterwards their
    /// numbers may belong to other processes.
    pub fn dismiss(&mut self) {
        self.end(DISMISS);
    }

    /// Kills the watched processes, and waits until they are gone. Call it before the leaders are reaped.
    ///
    /// # Errors
    /// If processes may be left: one could not be checked or did not end, or the guard itself was killed.
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

    /// Sends an order, because closing the pipe may not be enough: a child that this process has forked may hold it
    /// open.
    fn end(&mut self, order: i32) {
        if let Some(mut orders) = self.orders.take() {
            // If the guard is gone, it needs no order.
            let _ = orders.write_all(&order.to_ne_bytes());
            // One that a signal has stopped would not follow it, and this process waits for its end.
            let _ = kill_process(self.pid, Signal::CONT);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Callers that need the result have called `kill` before.
        let _ = self.kill();
    }
}

/// Lets this process, which becomes a worker, lead a group without a terminal: in its session if it can give up its terminal alone, or else in
/// a session of its own. Async-signal-safe.
fn lead_group() -> io::Result<()> {
    let flags = libc::O_RDONLY | libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: the string ends with a zero byte and is static.
    let terminal = unsafe { libc::open(c"/dev/tty".as_ptr(), flags) };
    let has_none = if terminal < 0 {
        io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO)
    } else {
        // SAFETY: TIOCNOTTY has no argument, and nobody else has the descriptor, which is open.
        unsafe {
            let is_given_up = libc::ioctl(terminal, libc::TIOCNOTTY) == 0;
            libc::close(terminal);
            is_given_up
        }
    };
    if has_none {
        setpgid(None, None)?;
    } else {
        setsid()?;
    }
    Ok(())
}

/// Writes the number of this process, which becomes a worker. Async-signal-safe.
fn put_on_the_list(orders: RawFd) -> io::Result<()> {
    // SAFETY: SIG_IGN is a valid disposition for SIGPIPE, which would end this process if the guard had been killed;
    // `getpid` has no arguments; `write` gets readable bytes and their number, few enough to be written whole or not at
    // all.
    let written = unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let order = libc::getpid().to_ne_bytes();
        libc::write(orders, order.as_ptr().cast(), order.len())
    };
    if written == 4 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The guard's main function. Async-signal-safe: system calls on its own stack and on `watched`, which
/// was allocated before the fork; no allocation, no lock, no panic.
fn run_guard(orders: RawFd, watched: &mut [i32], tag: &Tag) -> ! {
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
            // 0: the other end is closed in all processes.
            _ => break,
        }
    }
    for leader in watched.iter().filter(|leader| **leader > 1) {
        // SAFETY: `kill` takes plain numbers; if the group is gone, the error can be ignored.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
    #[cfg(target_os = "linux")]
    let is_certain = sweep(tag, SWEEPS);
    #[cfg(not(target_os = "linux"))]
    let is_certain = {
        let _ = tag;
        true
    };
    // SAFETY: `_exit` ends the process at once, without destructors or exit handlers of the copied program.
    unsafe { libc::_exit(i32::from(!is_certain)) }
}

/// How often to search for processes: with the pauses, for some seconds.
#[cfg(target_os = "linux")]
const SWEEPS: u32 = 500;

/// Kills processes that carry `tag`, until there is none. Returns whether that succeeded. A process may fork during a
/// search, so two searches in a row must find none.
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

/// The result of a search for processes with the tag. A later variant outweighs an earlier one.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Nobody,
    /// One was found and killed.
    Somebody,
    /// A process could not be checked, for lack of descriptors or memory, or because it is in the middle of `execve`. It may be one.
    Unknown,
}

#[cfg(target_os = "linux")]
impl Found {
    /// From the error of the last call: none, if the process is gone or another user's, or if this system does not have
    /// the file.
    fn after_error() -> Self {
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH | libc::EACCES | libc::EPERM) => Self::Nobody,
            _ => Self::Unknown,
        }
    }
}

/// Kills the processes that carry `tag` now.
#[cfg(target_os = "linux")]
fn kill_tagged(tag: &Tag) -> Found {
    /// Bytes before the name in an entry: inode, offset, length and type.
    const NAME: usize = 19;
    let mut found = Found::Nobody;
    let Some(proc) = open_at(libc::AT_FDCWD, c"/proc", libc::O_DIRECTORY) else {
        return Found::after_error();
    };
    // Of u64, so that it is aligned like the entries.
    let mut entries = [0_u64; 512];
    loop {
        // SAFETY: the buffer is writable and has the length that is passed.
        let length = unsafe {
            libc::syscall(libc::SYS_getdents64, proc.0, entries.as_mut_ptr(), size_of_val(&entries))
        };
        let Ok(length) = usize::try_from(length) else { return Found::Unknown };
        if length == 0 {
            return found;
        }
        // SAFETY: any bytes are valid, and the slice is that of the array; it is not used after the next call.
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

/// Kills the process of this number, if it carries `tag`. Its open folder identifies the process: a later process of
/// the same number has another folder.
#[cfg(target_os = "linux")]
fn kill_if_tagged(proc: &Open, number: &CStr, tag: &Tag) -> Found {
    let Some(process) = open_at(proc.0, number, libc::O_DIRECTORY) else { return Found::after_error() };
    let Some(environment) = open_at(process.0, c"environ", 0) else { return Found::after_error() };
    match holds(&environment, tag) {
        Held::Tag => {}
        Held::Other => return Found::Nobody,
        Held::Nothing => return begins(&process),
        Held::Error(found) => return found,
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

/// What a process is that has an empty environment: unknown, if it is in the middle of `execve`.
#[cfg(target_os = "linux")]
fn begins(process: &Open) -> Found {
    /// A name has at most 64 bytes there, and each of the 50 numbers at most 20.
    const LINE: usize = 1200;
    let Some(file) = open_at(process.0, c"stat", 0) else { return Found::after_error() };
    let mut line = [0_u8; LINE];
    // SAFETY: `line` is writable and has the length that is passed.
    let read = unsafe { libc::read(file.0, line.as_mut_ptr().cast(), line.len()) };
    match usize::try_from(read).ok().and_then(|read| line.get(..read)) {
        Some(line) if is_in_execve(line) => Found::Unknown,
        Some(_) => Found::Nobody,
        None => Found::after_error(),
    }
}

/// Whether this `/proc/PID/stat`, of a process whose `environ` is empty, is that of one in the middle of `execve`: it has memory, and the
/// place of its environment in that is not known yet. (A thread of the kernel and a process that has ended have no memory.)
///
/// It makes no call that is not async-signal-safe.
pub fn is_in_execve(stat: &[u8]) -> bool {
    /// Counted from the state, the first field behind the name.
    const VSIZE: usize = 20;
    const ENV_END: usize = 48;
    let Some(name) = stat.iter().rposition(|byte| *byte == b')') else { return false };
    let mut fields = stat.get(name + 1..).unwrap_or_default().trim_ascii().split(|byte| *byte == b' ');
    let memory = fields.nth(VSIZE);
    let environment = fields.nth(ENV_END - VSIZE - 1);
    memory.is_some_and(|size| size != b"0") && environment == Some(b"0")
}

/// What a process has in its environment.
#[cfg(target_os = "linux")]
#[derive(Debug, PartialEq, Eq)]
enum Held {
    Tag,
    /// No tag.
    Other,
    Nothing,
    /// It could not be read.
    Error(Found),
}

/// Whether `tag` is somewhere in this file.
#[cfg(target_os = "linux")]
fn holds(file: &Open, tag: &Tag) -> Held {
    /// More than the kernel allows for a process's environment, with its usual limits.
    const MAX: usize = 8 << 20;
    let mut left = MAX;
    let mut buffer = [0_u8; 4096];
    // Bytes that may be the beginning of the tag are kept before those that are read next.
    let mut kept = 0;
    loop {
        let Some(free) = buffer.get_mut(kept..) else { return Held::Error(Found::Unknown) };
        // SAFETY: `free` is writable and has the length that is passed.
        let read = unsafe { libc::read(file.0, free.as_mut_ptr().cast(), free.len()) };
        let filled = match usize::try_from(read) {
            Ok(read) if read > 0 && read <= left => {
                left -= read;
                kept + read
            }
            Err(_) if interrupted() => continue,
            Err(_) => return Held::Error(Found::after_error()),
            // The end of the file, or more than an environment can have.
            Ok(_) if left == MAX => return Held::Nothing,
            Ok(_) => return Held::Other,
        };
        let Some(held) = buffer.get(..filled) else { return Held::Error(Found::Unknown) };
        if held.windows(tag.len()).any(|part| part == tag) {
            return Held::Tag;
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
        // SAFETY: this value is the only owner of the descriptor.
        unsafe { libc::close(self.0) };
    }
}

#[cfg(target_os = "linux")]
fn open_at(folder: RawFd, name: &CStr, flags: libc::c_int) -> Option<Open> {
    // SAFETY: `name` ends with a zero byte, and lives until after the call.
    let fd = unsafe { libc::openat(folder, name.as_ptr(), flags | libc::O_RDONLY | libc::O_CLOEXEC) };
    // Not `then_some`: it would drop an `Open` of a negative number, and its `close` would change `errno`.
    (fd >= 0).then(|| Open(fd))
}

/// Detaches from the terminal, the working directory, the files and the signals of the parent.
fn detach(keep: RawFd) {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises the set before `sigprocmask` reads it. The strings end with a zero byte and
    // are static. `setsid`, `chdir`, `prctl(PR_SET_NAME)` and `close` access no other memory. Closing
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
    // An older kernel: one by one, up to the usual limit.
    for fd in (0..65_536).filter(|fd| *fd != keep) {
        // SAFETY: see `detach`.
        unsafe { libc::close(fd) };
    }
}

fn interrupted() -> bool {
    io::Error::last_os_error().raw_os_error() == Some(libc::EINTR)
}

// Miri has neither `openat` nor `fork`.
#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_end_is_not_read_for_ever() {
        let zeros = open_at(libc::AT_FDCWD, c"/dev/zero", 0);
        let found = holds(&zeros.expect("it can be read"), b"phalanx-sys:no-process-has-this0");
        assert_eq!(found, Held::Other);
    }

    #[test]
    fn a_process_in_execve_has_memory_and_no_place_of_its_environment() {
        let line = |name: &str, state: &str, vsize: u64, end: u64| {
            let between = "0 ".repeat(27);
            format!("12 ({name}) {state} {}{vsize} {between}{end} 0\n", "7 ".repeat(19)).into_bytes()
        };
        assert!(is_in_execve(&line("sleep", "R", 139_264, 0)));
        assert!(is_in_execve(&line("a) R 1 (b", "D", 139_264, 0)));
        assert!(!is_in_execve(&line("env", "S", 3_133_440, 140_732_159_283_179)));
        assert!(!is_in_execve(&line("kthreadd", "S", 0, 0)), "a thread of the kernel");
        assert!(!is_in_execve(&line("sh", "Z", 0, 0)), "one that has ended");
        for none in ["", "12 (sh", "12 (sh) R 1 2 3"] {
            assert!(!is_in_execve(none.as_bytes()), "{none}");
        }
        assert!(!is_in_execve(&std::fs::read("/proc/self/stat").expect("it can be read")));
    }

    #[test]
    fn without_descriptors_it_is_not_known_that_nobody_is_left() {
        const TAG: &Tag = b"phalanx-sys:no-process-has-this1";
        // In a process of its own, so that no other test loses its files.
        // SAFETY: the child makes only async-signal-safe calls, as the guard does, and never returns.
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
