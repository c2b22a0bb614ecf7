//! A child process that cannot outlive the one that started it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Dispositions that a worker must not inherit. Rust ignores SIGPIPE, and a shell ignores SIGINT and SIGQUIT in what
/// it starts with `&`. An ignored SIGHUP is left alone: that is how `nohup` works.
const RESET: [libc::c_int; 7] =
    [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGPIPE, libc::SIGCHLD, libc::SIGUSR1, libc::SIGUSR2];

/// Prepares `command` as [`Guard::spawn`](crate::guard::Guard::spawn) promises.
pub(crate) fn prepare(command: &mut Command) -> &mut Command {
    let parent = getpid();
    command.process_group(0);
    let in_child = move || {
        reset_signals()?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above; then no signal will come.
        if getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe calls are allowed.
    // It makes the system calls sigaction, sigprocmask, prctl and getppid, and builds errors from plain error numbers:
    // it takes no lock and no memory, and touches nothing but its captured process id.
    unsafe { command.pre_exec(in_child) }
}

/// The default reaction to the signals of [`RESET`], and no signal blocked. Async-signal-safe.
fn reset_signals() -> io::Result<()> {
    for signal in RESET {
        // SAFETY: SIG_DFL is a valid disposition for each of these signals, and `signal` may be called after fork.
        if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    // Otherwise, under `stty tostop`, its first line would stop it for ever.
    // SAFETY: SIG_IGN is a valid disposition for SIGTTOU.
    if unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set that it is given, which is writable and of the right type; after it,
    // `sigprocmask` reads an initialised set, and its third argument may be null.
    let result = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
