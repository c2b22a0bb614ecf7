//! Files with secrets that only this user may read, and others of which a pipe in their place must not be waited for.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use phalanx_sys::open;

/// Why a file is refused.
pub(crate) enum Unfit {
    /// It cannot be read.
    Unreadable(io::Error),
    /// It is not a file of this user only: why, and the remedy, if there is a general one.
    Unsafe { why: String, remedy: Option<String> },
}

impl From<io::Error> for Unfit {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Reads a regular file that belongs to this user and that no other user may access. Of a longer file it reads
/// `longest` bytes and one more.
pub(crate) fn read(path: &Path, longest: usize) -> Result<Vec<u8>, Unfit> {
    let file = open::at_once(path, File::options().read(true), 0)?;
    let about = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    let (why, remedy) = if !about.is_file() {
        ("it is not a regular file".to_owned(), None)
    } else if about.uid() != user {
        let why = format!("it belongs to user {}, and this process to user {user}", about.uid());
        (why, Some("give each user a copy that only that user can read".to_owned()))
    } else if about.mode() & 0o077 != 0 {
        let why = format!("others may use it (mode {:o})", about.mode() & 0o777);
        (why, Some(format!("chmod 600 {}, and make a new key if others may have read it", path.display())))
    } else {
        let mut bytes = Vec::new();
        file.take(longest as u64 + 1).read_to_end(&mut bytes)?;
        return Ok(bytes);
    };
    Err(Unfit::Unsafe { why, remedy })
}

/// Reads a regular file, whoever may read it, if it has `longest` bytes at most. Of a pipe nobody may ever write the end.
pub(crate) fn read_regular(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let file = open::regular(path, File::options().read(true))?;
    let mut bytes = Vec::new();
    file.take(longest.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > longest {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is longer than {longest} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pipe_is_no_file_and_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let [file, pipe] = ["file", "pipe"].map(|name| folder.path().join(name));
        std::fs::write(&file, "1234").unwrap();
        assert_eq!(read_regular(&file, 4).unwrap(), b"1234");
        assert!(read_regular(&file, 3).unwrap_err().to_string().contains("longer than 3 bytes"));
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(read_regular(&pipe, 4).unwrap_err().to_string()));
        let said = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(said.contains("not a regular file"), "{said}");
    }
}
