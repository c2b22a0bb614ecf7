//! The secret that the processes of one job share.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::random;
use crate::secret_file::{self, Unfit};

/// The variable that names the file with the job's key.
pub const VARIABLE: &str = "PHALANX_JOB_KEY_FILE";

const BYTES: usize = 32;
const DIGITS: usize = 2 * BYTES;
/// The longest content of a file: the digits, and a line ending of either kind.
const LONGEST: usize = DIGITS + 2;

/// 32 random bytes with which processes of one job authenticate each other.
///
/// Launchers make one for each job and pass it to their workers. For a job on several nodes, or without a launcher,
/// give every process a file with the same key:
///
/// ```
/// use phalanx::JobKey;
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("job.key");
/// JobKey::generate()?.write_new(&path)?; // readable by this user alone
/// let key = JobKey::read(&path)?;
/// assert_eq!(format!("{key:?}"), "JobKey(..)");
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone)]
pub struct JobKey([u8; BYTES]);

impl JobKey {
    /// A new key.
    ///
    /// # Errors
    /// If the system returns no random numbers.
    pub fn generate() -> Result<Self> {
        random::bytes().map(Self)
    }

    /// Reads a key: 64 hexadecimal digits, with or without a line ending.
    ///
    /// # Errors
    /// If `path` is not a regular file, belongs to another user, may be read or written by others, or holds anything
    /// else.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let refuse = |why: String| {
            Error::environment(format!("the job's key cannot be taken from {}: {why}", path.display()))
                .in_operation("reading the job's key", None)
        };
        let make_one = "make one with `phalanx keygen FILE`";
        let bytes = secret_file::read(path, LONGEST).map_err(|unfit| match unfit {
            Unfit::Unreadable(error) if is_lent(path) => refuse(error.to_string()).with_remedy(unreachable_launcher(&error)),
            Unfit::Unreadable(error) => refuse(error.to_string()).with_remedy(
                "is it the file that `phalanx keygen` made, and readable by this user? A worker reads the one that its \
                 launcher lends it, which is gone with the launcher",
            ),
            Unfit::Unsafe { why, remedy } => {
                refuse(why).with_remedy(remedy.unwrap_or_else(|| make_one.to_owned()))
            }
        })?;
        parse(&bytes).map(Self).ok_or_else(|| {
            refuse(format!("it does not hold {DIGITS} hexadecimal digits and nothing else"))
                .with_remedy(format!("{make_one} or `openssl rand -hex 32`"))
        })
    }

    /// Writes the key to a new file that only this user may read.
    ///
    /// # Errors
    /// If `path` already exists, or it cannot be written.
    pub fn write_new(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let written = file.and_then(|mut file| {
            self.write_to(&mut file).inspect_err(|_| {
                // A part of a key would be in the way of the next one.
                let _ = fs::remove_file(path);
            })
        });
        written.map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::AlreadyExists => "name a file that is not there yet",
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                    "make room there, or name a file on another disk"
                }
                _ => "name a file in a folder of this user's",
            };
            Error::io(format!("the job's key cannot be written to {}", path.display()), error)
                .with_remedy(remedy)
        })
    }

    pub fn write_to(&self, file: &mut File) -> io::Result<()> {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(file, "{digits}")
    }

    /// The key of this process's job, if `PHALANX_JOB_KEY_FILE` names a file.
    ///
    /// # Errors
    /// As those of [`read`](Self::read).
    pub fn from_env() -> Result<Option<Self>> {
        match std::env::var_os(VARIABLE) {
            Some(path) if !path.is_empty() => {
                Self::read(path).map(Some).map_err(|error| error.in_operation(VARIABLE, None))
            }
            _ => Ok(None),
        }
    }

    pub fn from_bytes(bytes: [u8; BYTES]) -> Self {
        Self(bytes)
    }

    pub fn bytes(&self) -> &[u8; BYTES] {
        &self.0
    }
}

/// Whether `path` is memory that a launcher lends its workers.
fn is_lent(path: &Path) -> bool {
    let parts: Vec<_> = path.iter().skip(1).filter_map(OsStr::to_str).collect();
    matches!(parts[..], ["proc", pid, "fd", _] if pid.parse::<u32>().is_ok())
}

/// What may stand between a worker and the memory of its launcher.
fn unreachable_launcher(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "a worker reads it from its launcher, whose memory the kernel closes to others if the launcher's file cannot be read \
             (mode 711: `chmod a+r` the phalanx command), or if the worker is of another user or user namespace; else give \
             --job-key-file"
        }
        _ => {
            "a worker reads it from its launcher, which has ended, or is not in this worker's /proc (mounted with hidepid, or of \
             another pid namespace, as in a container): give --job-key-file then"
        }
    }
}

/// Does not print the key.
impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

fn parse(bytes: &[u8]) -> Option<[u8; BYTES]> {
    let line = bytes.strip_suffix(b"\n").map_or(bytes, |line| line.strip_suffix(b"\r").unwrap_or(line));
    let digits: &[u8; DIGITS] = line.try_into().ok()?;
    let mut key = [0; BYTES];
    for (byte, digits) in key.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |place: usize| char::from(digits[place]).to_digit(16);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Some(key)
}

/// For `phalanx::fuzzing`: the content of a key file.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some(key) = parse(bytes) else { return false };
    let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(bytes.len() <= LONGEST && bytes.to_ascii_lowercase().starts_with(digits.as_bytes()));
    true
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn what_is_written_is_read_and_nobody_else_may() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let key = JobKey::generate().unwrap();
        key.write_new(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(JobKey::read(&path).unwrap().0, key.0);
        assert!(JobKey::generate().unwrap().0 != key.0);
        // An existing file is not changed.
        let error = key.write_new(&path).unwrap_err();
        assert!(error.to_string().contains("key") && error.remedy().is_some(), "{error}");
    }

    #[test]
    fn a_key_that_a_launcher_lends_and_cannot_be_reached_is_explained() {
        // No process has this number.
        let lent = Path::new("/proc/4294967295/fd/7");
        let error = JobKey::read(lent).unwrap_err();
        assert!(error.remedy().unwrap().contains("hidepid"), "{error}");
        assert!(
            is_lent(lent)
                && !is_lent(Path::new("/home/proc/1/fd/7"))
                && !is_lent(Path::new("/proc/self/fd/7"))
        );
        let refused = unreachable_launcher(&io::ErrorKind::PermissionDenied.into());
        assert!(refused.contains("711") && refused.contains("chmod a+r"), "{refused}");
    }

    #[test]
    fn a_lines_end_and_capitals_are_forgiven() {
        for text in ["aB".repeat(32), "aB".repeat(32) + "\n", "aB".repeat(32) + "\r\n"] {
            let (_folder, path) = file(&text, 0o400);
            assert_eq!(JobKey::read(&path).unwrap().0, [0xab; 32]);
        }
    }

    #[test]
    fn files_that_are_no_secret_are_refused_with_a_remedy() {
        let good = "ab".repeat(32);
        let long = "ab".repeat(33);
        for (text, mode, why) in [
            (good.as_str(), 0o640, "others may use it (mode 640)"),
            (&good, 0o604, "others may use it"),
            (&good, 0o620, "others may use it"),
            ("", 0o600, "64 hexadecimal digits"),
            (&good[1..], 0o600, "64 hexadecimal digits"),
            (&long, 0o600, "64 hexadecimal digits"),
            (&good.replace('b', "g"), 0o600, "64 hexadecimal digits"),
            (&format!("{good}\n\n"), 0o600, "64 hexadecimal digits"),
            (&format!(" {good}"), 0o600, "64 hexadecimal digits"),
        ] {
            let (_folder, path) = file(text, mode);
            let error = JobKey::read(&path).unwrap_err();
            assert!(error.is_environment() && error.to_string().contains(why), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()) && error.remedy().is_some());
            assert!(!error.to_string().contains("abab"), "{error}");
        }
        for (path, why) in
            [("/", "not a regular file"), ("/dev/null", "not a regular file"), ("/none", "No such")]
        {
            let error = JobKey::read(path).unwrap_err();
            assert!(error.to_string().contains(why) && error.remedy().is_some(), "{error}");
        }
    }
}
