//! Opens files whose paths come from elsewhere, and waits for nobody who may never come. In the place of a file may be a pipe, on which whoever
//! opens it waits for its other end, or a device, to open which may already do something.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a file is waited for on which another process has a lease. The kernel takes a lease away after 45 s, unless
/// `fs.lease-break-time` says otherwise.
const LEASE_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Opens the regular file at `path` as `options` say, whose flags this sets.
///
/// # Errors
/// If it cannot be opened; of the kind [`ErrorKind::InvalidInput`] if it is not a regular file.
pub fn regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // Before it is opened: to open a device may already do something, such as to start a watchdog.
    match fs::metadata(path) {
        Ok(about) if !about.is_file() => Err(irregular()),
        // It may be made.
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        Ok(_) | Err(_) => regular_now(path, options),
    }
}

/// Looks at what it has opened: another file may have come there since somebody looked at the path.
fn regular_now(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = at_once(path, options, 0)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(irregular()) }
}

fn irregular() -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")
}

/// Opens what is at `path`, a file or a device, as `options` say, whose flags this sets.
///
/// # Errors
/// If it cannot be opened; of the kind [`ErrorKind::InvalidInput`] if it is a pipe or a socket.
pub fn unless_pipe(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let refused = || io::Error::new(ErrorKind::InvalidInput, "it is a pipe or a socket, and must be a file");
    match at_once(path, options, 0) {
        Ok(file) if file.metadata()?.file_type().is_fifo() => Err(refused()),
        // A pipe without a reader, or a socket.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Err(refused()),
        opened => opened,
    }
}

/// Opens what is at `path` as `options` and these `flags` say, which it sets. Of a pipe it does not wait for the other end.
///
/// # Errors
/// If it cannot be opened.
pub fn at_once(path: &Path, options: &mut OpenOptions, flags: i32) -> io::Result<File> {
    // Without NONBLOCK, who opens a pipe waits. Of a regular file it changes one thing: if another process has a lease on the file, as servers
    // of files have for their clients, the call asks for the lease, and fails instead of waiting for it.
    options.custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY | flags);
    let end = Instant::now() + LEASE_TIMEOUT;
    loop {
        match options.open(path) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && is_file(path) && Instant::now() < end => {
                sleep(RETRY_DELAY);
            }
            opened => return opened,
        }
    }
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|about| about.is_file())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
    use std::path::PathBuf;
    use std::sync::mpsc::channel;
    use std::thread;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// Longer than any wait here takes on a slow machine.
    const LIMIT: Duration = Duration::from_secs(60);
    /// The command of fcntl that says which signal tells of a lease that is to be given back.
    const SET_SIGNAL: i32 = 10;

    fn path_of(file: impl AsFd) -> PathBuf {
        format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()).into()
    }

    #[test]
    fn a_pipe_is_refused_and_holds_nobody_up() {
        let (reader, writer) = io::pipe().unwrap();
        let path = path_of(&reader);
        // Whoever opens it to read would wait for a writer.
        drop(writer);
        let (tell, told) = channel();
        let opens = thread::spawn(move || {
            // As if it had come between the look at the path and the call that opens it.
            tell.send(regular_now(&path, File::options().read(true)).unwrap_err()).unwrap();
            tell.send(regular(&path, File::options().read(true)).unwrap_err()).unwrap();
            tell.send(unless_pipe(&path, File::options().read(true)).unwrap_err()).unwrap();
            at_once(&path, File::options().read(true), 0).unwrap();
        });
        for expected in ["not a regular file", "not a regular file", "a pipe or a socket"] {
            let error = told.recv_timeout(LIMIT).unwrap();
            assert!(
                error.kind() == ErrorKind::InvalidInput && error.to_string().contains(expected),
                "{error}"
            );
        }
        opens.join().unwrap();
        drop(reader);
    }

    #[test]
    fn who_writes_to_a_pipe_without_a_reader_hears_that_it_is_one() {
        let (reader, writer) = io::pipe().unwrap();
        let path = path_of(&writer);
        drop(reader);
        let error = unless_pipe(&path, File::options().write(true)).unwrap_err();
        assert!(error.to_string().contains("a pipe or a socket"), "{error}");
    }

    #[test]
    fn devices_and_folders_are_no_regular_files_and_a_device_is_no_pipe() {
        for path in ["/dev/null", "/"] {
            let error = regular(Path::new(path), File::options().read(true)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path}: {error}");
        }
        unless_pipe(Path::new("/dev/null"), File::options().write(true)).unwrap();
        let absent = regular(Path::new("/no such folder/file"), File::options().read(true)).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_lease_on_a_file_is_waited_for() {
        let memory = memfd_create("phalanx-lease", MemfdFlags::CLOEXEC).unwrap();
        // Only of a file that was opened by its path the kernel counts who writes.
        let file = File::options().read(true).write(true).open(path_of(&memory)).unwrap();
        drop(memory);
        let lease = |command, argument| lease(file.as_fd(), command, argument);
        // By default a signal that ends the process.
        lease(SET_SIGNAL, libc::SIGWINCH).unwrap();
        lease(libc::F_SETLEASE, libc::F_WRLCK).unwrap();
        let (path, (tell, told)) = (path_of(&file), channel());
        let opens = thread::spawn(move || tell.send(regular(&path, File::options().read(true))).unwrap());
        // The other thread has been refused once when the kernel asks for the lease.
        while lease(libc::F_GETLEASE, 0).unwrap() == libc::F_WRLCK {
            sleep(Duration::from_millis(1));
        }
        lease(libc::F_SETLEASE, libc::F_UNLCK).unwrap();
        told.recv_timeout(LIMIT).unwrap().unwrap();
        opens.join().unwrap();
    }

    fn lease(file: BorrowedFd<'_>, command: i32, argument: i32) -> io::Result<i32> {
        // SAFETY: these commands take a number, and the descriptor is open as long as `file` is borrowed.
        let outcome = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
        if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) }
    }
}
