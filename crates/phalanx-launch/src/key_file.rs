//! The job's key, as the launcher passes it to its workers.
//!
//! So the key is in no argument and no variable of a process, and on no disk.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use phalanx_sys::memfd::anonymous;
use rustix::fs::{Mode, SealFlags, fchmod, fcntl_add_seals};

use crate::error::{Error, Result};
use crate::key::JobKey;

/// A file that only this user can open and that cannot be changed. It is memory of the launcher, which workers open
/// through `/proc`: it is never on a disk, it does not depend on descriptors that wrappers close, and it is gone when
/// the launcher ends, in any way.
#[derive(Debug)]
pub(super) struct KeyFile(File);

impl KeyFile {
    pub(super) fn new(key: &JobKey) -> Result<Self> {
        Self::write(key).map_err(|error| {
            Error::io("cannot make the file that passes the job's key to the workers", error)
        })
    }

    fn write(key: &JobKey) -> io::Result<Self> {
        let mut file = File::from(anonymous("phalanx-job-key")?);
        fchmod(&file, Mode::RUSR | Mode::WUSR)?;
        key.write_to(&mut file)?;
        fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(Self(file))
    }

    /// Where a worker finds it.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_worker_reads_it_and_cannot_change_it() {
        let key = JobKey::generate().unwrap();
        let lent = KeyFile::new(&key).unwrap();
        assert_eq!(JobKey::read(lent.path()).unwrap().bytes(), key.bytes());
        assert!(fs::write(lent.path(), "0".repeat(64)).is_err());
        assert_eq!(JobKey::read(lent.path()).unwrap().bytes(), key.bytes());
        let path = lent.path();
        drop(lent);
        assert!(JobKey::read(path).is_err());
    }
}
