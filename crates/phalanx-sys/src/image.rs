//! A program that the kernel executes, or nobody.
//!
//! [`Command`] uses the C library's `execvp`. It gives a file that the kernel cannot execute to `/bin/sh`, as the first shells did: so a script
//! without a first line runs. But a program for another processor is then read as a script, and all that one is told is
//! `Syntax error: "(" unexpected`. `execve` has no such way out.

use std::ffi::{CString, OsStr, OsString, c_char};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::Command;

/// What `execve` takes. It is made before the fork, because a child may not allocate.
#[derive(Debug)]
pub(crate) struct Image {
    path: CString,
    arguments: Strings,
    environment: Strings,
}

impl Image {
    /// The program at `path` with `name` as its first argument, and with the other arguments and the environment of `command`.
    pub(crate) fn new(path: &Path, name: &OsStr, command: &Command) -> io::Result<Self> {
        let arguments = std::iter::once(name).chain(command.get_args()).map(terminated);
        let own = std::env::vars_os().filter(|(name, _)| command.get_envs().all(|(set, _)| set != name));
        let set = command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
        let environment = own.chain(set).map(|(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            terminated(&name)
        });
        Ok(Self {
            path: terminated(path.as_os_str())?,
            arguments: Strings::new(arguments.collect::<io::Result<_>>()?),
            environment: Strings::new(environment.collect::<io::Result<_>>()?),
        })
    }

    /// Becomes the program; returns only if that fails. Async-signal-safe.
    pub(crate) fn execute(&self) -> io::Error {
        // SAFETY: the path ends with a zero byte. Each array is of pointers to strings that end so, and ends with a null pointer;
        // all of them live as long as `self`.
        unsafe {
            libc::execve(
                self.path.as_ptr(),
                self.arguments.pointers.as_ptr(),
                self.environment.pointers.as_ptr(),
            )
        };
        io::Error::last_os_error()
    }
}

/// Strings, and an array of pointers to them that ends with a null pointer.
#[derive(Debug)]
struct Strings {
    pointers: Vec<*const c_char>,
    /// What the pointers lead to. Moving this moves no string.
    _owned: Vec<CString>,
}

impl Strings {
    fn new(owned: Vec<CString>) -> Self {
        let pointers = owned.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect();
        Self { pointers, _owned: owned }
    }
}

// SAFETY: the pointers lead to memory that this value owns and that nobody changes, from whichever thread.
unsafe impl Send for Strings {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Strings {}

fn terminated(text: &OsStr) -> io::Result<CString> {
    // As `Command` does.
    let zero = |_| io::Error::new(io::ErrorKind::InvalidInput, "nul byte found in provided data");
    CString::new(OsString::from(text).into_vec()).map_err(zero)
}
