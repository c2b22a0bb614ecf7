//! Folders on the disk: what file systems cannot do, and what is no failure therefore.
//!
//! Rust has no call that syncs a folder: `File::open` and `sync_all` is what it leaves to its users, and each of them would have to know which
//! errors are none. So all that rename a file to its name wait here.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, statfs};

/// How long the server of a network file system may keep the locks of a host that was lost: a lease of 90 s, unless it is told otherwise.
const LEASE_LIMIT: Duration = Duration::from_secs(120);

/// Returns when the names in `folder` survive a loss of power, if its file system can promise that. An empty path is the current folder.
///
/// Who may write in a folder may not always read it, and a folder that cannot be read cannot be synced by itself. Then this waits for all that
/// its file system has to write, which may take long.
///
/// # Errors
/// If there is no such folder, or the disk fails.
pub fn sync(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match File::open(folder) {
        Ok(opened) => where_it_can(opened.sync_all()),
        Err(error) => unread(folder, error, || sync_file_system(folder)),
    }
}

/// Whether this error of a lock says that the file system has no locks, as network file systems without their lock service do. Nobody can
/// tell then whether another process holds it.
pub fn has_no_locks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOLCK))
}

/// The name of the file system of `folder`, if it is of a kind that belongs to one host. None if a network may lie between, as with file systems
/// in user space, or nothing is known.
pub fn own_disk(folder: &Path) -> Option<&'static str> {
    // By the kernel's numbers.
    match u64::try_from(statfs(folder).ok()?.f_type).ok()? {
        0xef53 => Some("ext4"),
        0x5846_5342 => Some("xfs"),
        0x9123_683e => Some("btrfs"),
        0x0102_1994 => Some("tmpfs"),
        0x794c_7630 => Some("overlay"),
        0x2fc1_2fc1 => Some("zfs"),
        0x8584_58f6 => Some("ramfs"),
        0xf2f5_2010 => Some("f2fs"),
        _ => None,
    }
}

/// How long to wait for a lock of a file in `folder`: `usual`, which is enough for a process that is just ending; or longer, if the process that
/// holds it is on another host, which may have been lost, and a network lies between.
pub fn lock_timeout(folder: &Path, is_elsewhere: bool, usual: Duration) -> Duration {
    if is_elsewhere && own_disk(folder).is_none() { usual.max(LEASE_LIMIT) } else { usual }
}

/// Some file systems, such as those of networks and of user space, write names at once or never, and know no sync of a folder.
fn where_it_can(synced: io::Result<()>) -> io::Result<()> {
    match synced {
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        synced => synced,
    }
}

/// The folder could not be opened because of `error`.
fn unread(
    folder: &Path,
    error: io::Error,
    sync_file_system: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let is_there = || folder.metadata().is_ok_and(|about| about.is_dir());
    if error.kind() == io::ErrorKind::PermissionDenied && is_there() {
        return sync_file_system();
    }
    Err(error)
}

/// Syncs the file system of a folder in which this process may write.
fn sync_file_system(folder: &Path) -> io::Result<()> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(nameless) => Ok(rustix::fs::syncfs(nameless)?),
        // Where there are no files without a name, all file systems are synced. One of them may not answer.
        Err(_) => {
            rustix::fs::sync();
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_synced_in_any_folder() {
        let folder = std::env::temp_dir();
        sync(&folder).unwrap();
        sync(Path::new("")).unwrap();
        assert!(sync(&folder.join("phalanx-no-such-folder")).is_err());
    }

    #[test]
    fn a_file_system_that_cannot_sync_folders_is_no_failure_and_a_broken_disk_is_one() {
        let synced = |errno| where_it_can(Err(io::Error::from_raw_os_error(errno)));
        for errno in [libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP] {
            synced(errno).unwrap();
        }
        for errno in [libc::EIO, libc::ENOSPC] {
            assert_eq!(synced(errno).unwrap_err().raw_os_error(), Some(errno));
        }
        where_it_can(Ok(())).unwrap();
    }

    #[test]
    #[cfg(not(miri))]
    fn what_the_kernel_makes_up_is_no_disk_of_this_host_and_memory_is_one() {
        assert_eq!(own_disk(Path::new("/proc")), None);
        assert_eq!(own_disk(&std::env::temp_dir().join("phalanx-no-such-folder")), None);
        if Path::new("/dev/shm").is_dir() {
            assert!(own_disk(Path::new("/dev/shm")).is_some());
        }
        let waits =
            |folder: &str, is_elsewhere| lock_timeout(Path::new(folder), is_elsewhere, Duration::ZERO);
        assert_eq!((waits("/proc", true), waits("/proc", false)), (LEASE_LIMIT, Duration::ZERO));
        assert_eq!(waits("/dev/shm", true).is_zero(), Path::new("/dev/shm").is_dir());
    }

    #[test]
    fn a_lock_that_another_holds_is_no_lack_of_locks() {
        let lacks = |errno| has_no_locks(&io::Error::from_raw_os_error(errno));
        assert!(lacks(libc::ENOLCK) && lacks(libc::ENOSYS) && lacks(libc::EOPNOTSUPP));
        assert!(!lacks(libc::EWOULDBLOCK) && !lacks(libc::EACCES) && !lacks(libc::EINTR));
    }

    #[test]
    #[cfg(not(miri))]
    fn in_a_folder_that_may_not_be_read_all_is_synced() {
        let folder = std::env::temp_dir();
        let denied = || io::Error::from_raw_os_error(libc::EACCES);
        let mut calls = 0;
        let mut sync_all = || {
            calls += 1;
            Ok(())
        };
        unread(&folder, denied(), &mut sync_all).unwrap();
        assert!(unread(&folder.join("phalanx-no-such-folder"), denied(), &mut sync_all).is_err());
        assert!(unread(&folder, io::Error::from_raw_os_error(libc::EMFILE), &mut sync_all).is_err());
        assert_eq!(calls, 1);
        let broken = || Err(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(unread(&folder, denied(), broken).unwrap_err().raw_os_error(), Some(libc::EIO));
        sync_file_system(&folder).unwrap();
    }
}
