//! Opens the files of all readers.

use std::fs::File;
use std::io;
use std::path::Path;

use phalanx::{Error, Result};

use super::io_error;

/// The file at `path`. A link in a folder that came from elsewhere may lead to a pipe, on which whoever opens it waits, or to a device
/// that has no end.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    phalanx_sys::open::regular(path, File::options().read(true)).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => irregular(path),
        _ => io_error(path, &error),
    })
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
    fn a_pipe_is_refused_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = channel();
        std::thread::spawn(move || tell.send(open_file(&pipe).unwrap_err().to_string()));
        let said = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(said.contains("pipe is no regular file"), "{said}");
        assert!(open_file(folder.path()).unwrap_err().to_string().contains("no regular file"));
    }
}
