//! A child process that cannot outlive the process that started it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Dispositions that a worker must not inherit. Rust ignores SIGPIPE, and a shell ignores SIGINT and SIGQUIT in
/// programs that it starts with `&`. An ignored SIGHUP is kept, as `nohup` expects.
const RESET: [libc::c_int; 7] =
    [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGPIPE, libc::SIGCHLD, libc::SIGUSR1, libc::SIGUSR2];

/// Prepares `command` as [`Guard::spawn`](crate::guard::Guard::spawn) documents.
pub(crate) fn prepare(command: &mut Command) -> &mut Command {
    let parent = getpid();
    let in_child = move || {
        reset_signals()?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent died before the line above, there will be no signal.
        if getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe calls are allowed. It
    // makes the system calls sigaction, sigprocmask, prctl and getppid, and builds errors from plain error numbers. It
    // takes no lock, allocates no memory, and accesses only its captured process id.
    unsafe { command.pre_exec(in_child) }
}

/// Sets the default action for the signals of [`RESET`], and blocks no signal. Async-signal-safe.
fn reset_signals() -> io::Result<()> {
    for signal in RESET {
        // SAFETY: SIG_DFL is a valid disposition for each of these signals, and `signal` may be called after fork.
        if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set, which is writable and of the right type. Then
    // `sigprocmask` reads an initialised set, and its third argument may be null.
    let result = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
