//! Opens the files of all readers.

use std::fs::{File, OpenOptions, metadata};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use phalanx::{Error, Result};
use rustix::fs::OFlags;

use super::io_error;

/// The file at `path`. A link in a folder that came from elsewhere may lead to a pipe, on which whoever opens it waits, or to a device
/// that has no end.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    // Before it is opened: to open a device may already do something, such as to start a watchdog.
    let about = metadata(path).map_err(|error| io_error(path, &error))?;
    if about.is_file() { open_regular(path) } else { Err(irregular(path)) }
}

/// Opens what is at `path`, and never waits. Looks at what it has opened: the file may have been replaced since somebody looked at the path.
fn open_regular(path: &Path) -> Result<File> {
    let failed = |error: io::Error| io_error(path, &error);
    // Without NONBLOCK, who opens a pipe waits for its writer. Of a regular file it changes nothing.
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_file() { Ok(file) } else { Err(irregular(path)) }
}

fn irregular(path: &Path) -> Error {
    Error::invalid_argument(format!("{} is no regular file", path.display()))
        .with_remedy("if it is a pipe, write what comes through it into a file; else leave it out")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pipe_that_replaces_a_file_is_refused_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = channel();
        // As if it had come between the look at the path and the call that opens it.
        std::thread::spawn(move || tell.send(open_regular(&pipe).unwrap_err().to_string()));
        let said = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(said.contains("pipe is no regular file"), "{said}");
        assert!(open_regular(folder.path()).unwrap_err().to_string().contains("no regular file"));
    }
}
