//! Signals as bytes in a pipe.

// The crate signal-hook was weighed and left out: what it has caught stays caught, since `unregister` does not put the earlier
// disposition back. `spawn` runs inside a program whose own handlers must be as they were.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// The descriptor that the handler writes to; -1 before the first [`Catcher`].
static WRITE_END: AtomicI32 = AtomicI32::new(-1);
/// The process that catches. Its forked children run the same handler until they exec, and must not write.
static OWNER: AtomicI32 = AtomicI32::new(0);
static IN_USE: AtomicBool = AtomicBool::new(false);
/// The signals that are [not caught for ever](is_unheard), as bits.
static ENDING: AtomicU32 = AtomicU32::new(0);
/// Since when one of them has not been read, in milliseconds of the monotonic clock; 0 if none waits.
static UNREAD_SINCE: AtomicU64 = AtomicU64::new(0);
/// How long it may wait.
const UNREAD_LIMIT: Duration = Duration::from_secs(5);

/// Catches signals while it is alive: each is a byte to [read](Self::read), and none ends the process.
///
/// There is one exception. Who reads may be stuck in the kernel, on a disk that does not answer for instance. A SIGINT or SIGTERM that comes when
/// another one has not been read for 5 s ends the process, if it would have done so before.
///
/// Dropping it restores the earlier dispositions. Only one can be alive at a time.
#[derive(Debug)]
pub struct Catcher {
    pipe: &'static PipeReader,
    earlier: Vec<(libc::c_int, libc::sigaction)>,
}

impl Catcher {
    /// Catches `signals`. A SIGHUP that is ignored stays ignored, as `nohup` expects. `None` if another catcher of
    /// this process is alive.
    pub fn install(signals: &[i32]) -> io::Result<Option<Self>> {
        let pipe = pipe()?;
        if IN_USE.swap(true, Ordering::SeqCst) {
            return Ok(None);
        }
        let mut catcher = Self { pipe, earlier: Vec::with_capacity(signals.len()) };
        // Bytes that an earlier catcher did not read.
        while catcher.read().is_some() {}
        ENDING.store(0, Ordering::SeqCst);
        UNREAD_SINCE.store(0, Ordering::SeqCst);
        OWNER.store(std::process::id().cast_signed(), Ordering::SeqCst);
        for &signal in signals {
            let earlier = disposition(signal)?;
            if signal == libc::SIGHUP && earlier.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            set_handler(signal)?;
            if matches!(signal, libc::SIGINT | libc::SIGTERM) && earlier.sa_sigaction == libc::SIG_DFL {
                ENDING.fetch_or(1_u32 << signal, Ordering::SeqCst);
            }
            catcher.earlier.push((signal, earlier));
        }
        Ok(Some(catcher))
    }

    /// The next signal that has arrived, if any. Does not wait.
    pub fn read(&mut self) -> Option<i32> {
        let mut byte = [0];
        loop {
            match self.pipe.read(&mut byte) {
                Ok(1) => {
                    UNREAD_SINCE.store(0, Ordering::SeqCst);
                    return Some(byte[0].into());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return None,
            }
        }
    }

    /// Does what SIGTSTP does where nobody catches it: stops this process until SIGCONT comes, and then returns. The kernel stops
    /// neither the first process of a container nor one that no shell of its session could continue (an orphaned process group).
    pub fn stop(&self) -> io::Result<()> {
        // SAFETY: SIG_DFL is a valid disposition for SIGTSTP.
        if unsafe { libc::signal(libc::SIGTSTP, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raise` takes a plain number; the signal of this number ends no process.
        let raised = match unsafe { libc::raise(libc::SIGTSTP) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        set_handler(libc::SIGTSTP).and(raised)
    }
}

impl AsFd for Catcher {
    /// Readable when a signal has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

impl Drop for Catcher {
    fn drop(&mut self) {
        for (signal, earlier) in &self.earlier {
            // SAFETY: `earlier` is what sigaction itself returned for this signal.
            unsafe { libc::sigaction(*signal, earlier, std::ptr::null_mut()) };
        }
        IN_USE.store(false, Ordering::SeqCst);
    }
}

/// Makes sure that children can be waited for. If SIGCHLD is ignored, which a process inherits, the kernel
/// discards their exit status.
pub fn keep_exit_status_of_children() -> io::Result<()> {
    let current = disposition(libc::SIGCHLD)?;
    if current.sa_sigaction == libc::SIG_IGN || current.sa_flags & libc::SA_NOCLDWAIT != 0 {
        // SAFETY: SIG_DFL is a valid disposition for SIGCHLD.
        if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Lets writes that exceed the limit of a file's size (`ulimit -f`) fail with an error, as Python does. By default the kernel ends the
/// process with SIGXFSZ before it sees the error. Programs that this process starts inherit that. A handler of the program's own
/// stays.
pub fn ignore_file_size_signal() -> io::Result<()> {
    if disposition(libc::SIGXFSZ)?.sa_sigaction != libc::SIG_DFL {
        return Ok(());
    }
    // SAFETY: SIG_IGN is a valid disposition for SIGXFSZ.
    if unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The pipe between handler and catcher. It is never closed, so that a handler that runs late in some thread cannot
/// write to a descriptor that belongs to another file by then.
fn pipe() -> io::Result<&'static PipeReader> {
    static PIPE: OnceLock<(PipeReader, PipeWriter)> = OnceLock::new();
    if PIPE.get().is_none() {
        let (reader, writer) = io::pipe()?;
        for end in [reader.as_fd(), writer.as_fd()] {
            fcntl_setfl(end, fcntl_getfl(end)? | OFlags::NONBLOCK)?;
        }
        // If another thread was faster, this pipe is closed again, unused.
        let _ = PIPE.set((reader, writer));
    }
    let (reader, writer) = PIPE.get().ok_or(io::ErrorKind::NotFound)?;
    WRITE_END.store(writer.as_raw_fd(), Ordering::SeqCst);
    Ok(reader)
}

fn disposition(signal: libc::c_int) -> io::Result<libc::sigaction> {
    let mut current = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: with no new action, sigaction only writes to `current`, which is of the right type.
    if unsafe { libc::sigaction(signal, std::ptr::null(), current.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: sigaction succeeded, so it has written all of it.
    Ok(unsafe { current.assume_init() })
}

fn set_handler(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: all zeroes is a valid sigaction: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `on_signal` has the type that a handler without SA_SIGINFO must have, lives for ever, and calls only
    // async-signal-safe functions.
    if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_signal(signal: libc::c_int) {
    let byte = signal as u8;
    // SAFETY: getpid, signal, raise and write are async-signal-safe; `byte` is one readable byte; the descriptor is never closed, and
    // does not block. errno, which the interrupted code may be about to read, is restored.
    unsafe {
        if libc::getpid() != OWNER.load(Ordering::SeqCst) {
            return;
        }
        let errno = errno();
        let saved = *errno;
        if is_unheard(signal) {
            // It ends the process when this handler returns.
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        libc::write(WRITE_END.load(Ordering::SeqCst), (&raw const byte).cast(), 1);
        *errno = saved;
    }
}

/// Whether `signal` is to end the process, because nobody has read an earlier one for too long. Async-signal-safe.
fn is_unheard(signal: libc::c_int) -> bool {
    if ENDING.load(Ordering::SeqCst) & 1_u32.checked_shl(signal.cast_unsigned()).unwrap_or(0) == 0 {
        return false;
    }
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `clock_gettime` is async-signal-safe, and writes to `now`, which is of the right type.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let now = (now.tv_sec as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec as u64 / 1_000_000).max(1);
    match UNREAD_SINCE.compare_exchange(0, now, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => false,
        Err(since) => Duration::from_millis(now.saturating_sub(since)) >= UNREAD_LIMIT,
    }
}

/// The address of this thread's errno.
fn errno() -> *mut libc::c_int {
    // SAFETY: no arguments; returns a pointer that is valid while the thread lives.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::__errno_location()
    }
    // SAFETY: as above.
    #[cfg(not(target_os = "linux"))]
    unsafe {
        libc::__error()
    }
}
