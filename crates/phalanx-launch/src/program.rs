//! Why a program cannot be started, with what to do: pure but for what it reads of the file.
//!
//! The kernel has one error number for a program that is not there, for a script whose interpreter is not, and for a binary whose loader is
//! not. In an image or on a host that lacks something, which one it is is the answer, and the file's first bytes say it.

mod binary;

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use binary::{Binary, Fit};
use phalanx_sys::guard::Guard;
use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid, getgroups};

/// The most that is read of a file: its first line, or a binary's headers.
const HEAD: usize = 4096;
/// The most that is shown of `PATH`.
const SHOWN: usize = 300;

/// The program of a worker.
#[derive(Debug)]
pub(super) struct Program {
    name: PathBuf,
    /// Whether it is looked for in the folders of `PATH`.
    is_plain: bool,
    folders: OsString,
    /// The file, if there is one.
    path: Option<PathBuf>,
}

impl Program {
    /// The one that `command` starts.
    pub(super) fn of(command: &Command) -> Self {
        let set =
            command.get_envs().find(|(name, _)| *name == "PATH").map(|(_, value)| value.map(OsStr::to_owned));
        let folders = set.unwrap_or_else(|| std::env::var_os("PATH"));
        // Those of the C library, if there is no PATH.
        let folders = folders.unwrap_or_else(|| "/bin:/usr/bin".into());
        let name = PathBuf::from(command.get_program());
        let is_plain = !name.as_os_str().as_bytes().contains(&b'/');
        let path = if is_plain {
            // As the C library does: what this user cannot execute is passed over, unless there is no other.
            let there: Vec<PathBuf> = std::env::split_paths(&folders)
                .map(|folder| folder.join(&name))
                .filter(|path| path.is_file())
                .collect();
            let can_start = |path: &&PathBuf| access(path.as_path(), Access::EXEC_OK).is_ok();
            there.iter().find(can_start).or(there.first()).cloned()
        } else {
            Some(name.clone()).filter(|path| path.exists())
        };
        Self { name, is_plain, folders, path }
    }

    /// Starts `command`, which has `name` as its first argument, as a worker of `guard`.
    pub(super) fn start(&self, command: Command, name: &OsStr, guard: &Guard) -> io::Result<Child> {
        // No shell must read what the kernel does not take, and what is cut off must not end by a signal.
        if self.is_python_without_interpreter()
            && let Some(path) = &self.path
        {
            // The kernel may know such files (binfmt_misc).
            return guard.spawn_binary(command, path, name);
        }
        match self.doubtful_binary() {
            None => guard.spawn(command),
            Some((_, Fit::Damaged)) => Err(Errno::NOEXEC.into()),
            Some((path, Fit::Native | Fit::Foreign(_))) => guard.spawn_binary(command, path, name),
        }
    }

    /// The file, if it is empty, or a binary that is damaged or for another processor, which the system may emulate.
    fn doubtful_binary(&self) -> Option<(&Path, Fit)> {
        let path = self.path.as_deref()?;
        let head = Head::read(path).ok()?;
        let is_empty = head.length == 0;
        let fit =
            head.binary().map_or(if is_empty { Fit::Damaged } else { Fit::Native }, |binary| binary.fit());
        (fit != Fit::Native).then_some((path, fit))
    }

    /// Whether it is a Python program that does not say so in its first line: a shell would read it.
    fn is_python_without_interpreter(&self) -> bool {
        self.is_python()
            && self.path.as_deref().and_then(|path| Head::read(path).ok()).is_some_and(|head| {
                head.length > 0 && head.binary().is_none() && !head.bytes.starts_with(b"#!")
            })
    }

    /// By its name.
    fn is_python(&self) -> bool {
        self.name.extension().is_some_and(|extension| extension == "py")
    }

    /// What to do about `error`, of starting it.
    pub(super) fn remedy(&self, error: &io::Error) -> Option<String> {
        let is_not_taken = error.kind() == ErrorKind::PermissionDenied
            || error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error());
        if is_not_taken && self.is_python_without_interpreter() {
            return Some(format!(
                "it is a Python program, and its first line names no interpreter: give `python3 {}` as the program",
                self.name.display()
            ));
        }
        match (error.kind(), &self.path) {
            (ErrorKind::NotFound, None) => Some(self.not_there()),
            (ErrorKind::NotFound, Some(path)) => Some(Head::read(path).map_or_else(
                |error| format!("{} cannot be read: {error}", path.display()),
                |head| head.what_is_missing(),
            )),
            // The system says so of a name that is nowhere if it could not search a folder of PATH.
            (ErrorKind::PermissionDenied, None) if self.is_plain => {
                Some(format!("{}. Some of these folders this user cannot search", self.not_there()))
            }
            (ErrorKind::PermissionDenied, path) => Some(self.denied(path.as_deref())),
            (ErrorKind::NotADirectory, _) => {
                Some("a part of its path is a file, and no folder: is the path right?".to_owned())
            }
            (ErrorKind::ExecutableFileBusy, _) => {
                Some("it is being written: start the job when it is complete".to_owned())
            }
            (ErrorKind::BrokenPipe, _) => {
                Some("the process phalanx-guard, which starts workers, was killed".to_owned())
            }
            (_, Some(path)) if error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => {
                let head = Head::read(path).ok()?;
                let fit = head.binary().map(|binary| binary.fit().remedy());
                Some(fit.unwrap_or_else(|| "the file is empty: copy or build it again".to_owned()))
            }
            _ => None,
        }
    }

    fn not_there(&self) -> String {
        let name = self.name.display();
        if self.name.as_os_str().is_empty() {
            return "its name is empty: is a variable of the command line not set?".to_owned();
        }
        if let Ok(target) = std::fs::read_link(&self.name) {
            return format!("it is a link to {}, which is not there", target.display());
        }
        if self.is_plain && self.name.exists() && self.is_python() {
            return format!("there is one in this folder: give `python3 {name}` as the program");
        }
        if self.is_plain && self.name.exists() {
            return format!("there is one in this folder: write ./{name}");
        }
        if self.is_plain {
            let mut folders = self.folders.to_string_lossy().into_owned();
            if let Some((cut, _)) = folders.char_indices().nth(SHOWN) {
                folders.truncate(cut);
                folders.push_str("..");
            }
            return format!(
                "it is in no folder of PATH ({folders}) of this host, or of this container's image: install it there, or give its path"
            );
        }
        let place = match std::env::current_dir() {
            Ok(folder) if self.name.is_relative() => format!(", seen from {}", folder.display()),
            _ => String::new(),
        };
        format!("there is no such file on this host, or in this container's image{place}: is the path right?")
    }

    fn denied(&self, path: Option<&Path>) -> String {
        let shown = path.unwrap_or(&self.name).display();
        let user = geteuid().as_raw();
        let Some(status) = path.and_then(|path| path.metadata().ok()) else {
            return format!(
                "a folder above it cannot be searched by this user ({user}): `chmod a+x` that folder"
            );
        };
        if status.is_dir() {
            return "it is a folder".to_owned();
        }
        if status.mode() & 0o111 == 0 {
            return format!("is it executable? `chmod +x {shown}`");
        }
        if !may_execute(&status, user, &groups()) {
            return format!(
                "its mode is {:o} and its owner {}, so that this user ({user}) may not execute it: `chmod a+rx {shown}`",
                status.mode() & 0o7777,
                status.uid(),
            );
        }
        "its file system is mounted with noexec, or its interpreter is not executable: copy it to another one, or look at its first line"
            .to_owned()
    }
}

/// The groups of this process.
fn groups() -> Vec<u32> {
    let mut all = vec![getegid().as_raw()];
    all.extend(getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()));
    all
}

/// Whether the mode lets this user execute it. Root may if anybody may.
fn may_execute(status: &impl Owned, user: u32, groups: &[u32]) -> bool {
    let bit = match status.owned() {
        (mode, _, _) if user == 0 => return mode & 0o111 != 0,
        (_, owner, _) if owner == user => 0o100,
        (_, _, group) if groups.contains(&group) => 0o010,
        _ => 0o001,
    };
    status.owned().0 & bit != 0
}

/// Mode, owner and group.
trait Owned {
    fn owned(&self) -> (u32, u32, u32);
}

impl Owned for Metadata {
    fn owned(&self) -> (u32, u32, u32) {
        (self.mode(), self.uid(), self.gid())
    }
}

/// The beginning of a file.
#[derive(Debug)]
struct Head {
    bytes: Vec<u8>,
    length: u64,
    /// The interpreter that a binary names, which may be beyond the beginning.
    loader: Option<PathBuf>,
}

impl Head {
    fn read(path: &Path) -> io::Result<Self> {
        // Before it is opened: to open a pipe would wait for its writer.
        let status = path.metadata()?;
        if !status.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        let mut file = File::open(path)?;
        let mut bytes = Vec::new();
        file.by_ref().take(HEAD as u64).read_to_end(&mut bytes)?;
        let mut head = Self { bytes, length: status.len(), loader: None };
        if let Some((offset, length)) = head.binary().and_then(|binary| binary.loader()) {
            let mut name = vec![0; length.min(HEAD)];
            if file.read_exact_at(&mut name, offset).is_ok() {
                let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                head.loader = Some(OsStr::from_bytes(&name[..end]).into());
            }
        }
        Ok(head)
    }

    fn binary(&self) -> Option<Binary<'_>> {
        Binary::of(&self.bytes, self.length)
    }

    /// The file is there, and yet something is not.
    fn what_is_missing(&self) -> String {
        let not_there = |path: &dyn Display| {
            format!("{path}, which is not on this host, or not in this container's image")
        };
        if self.binary().is_some() {
            return self.loader.as_ref().map_or_else(
                || "the loader that it names is missing".to_owned(),
                |loader| {
                    format!(
                        "it is a binary for the loader {}: build it for the C library that is here, or take an image of the system on \
                         which it was built",
                        not_there(&loader.display())
                    )
                },
            );
        }
        let first = self.bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let Some(line) = first.strip_prefix(b"#!") else {
            return format!("without a first line `#!` it is a script for {}", not_there(&"/bin/sh"));
        };
        let line = String::from_utf8_lossy(line);
        if line.ends_with('\r') {
            return "its first line ends with a carriage return, as lines of Windows do, and the interpreter of that name is missing: write \
                    the script with line ends of Unix (`sed -i 's/\\r$//'`)"
                .to_owned();
        }
        let interpreter = line.split_whitespace().next().unwrap_or_default();
        format!(
            "the interpreter that its first line names is missing: {}: install it, or change the line",
            not_there(&interpreter)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{FileType, Mode};

    use super::*;

    impl Owned for (u32, u32, u32) {
        fn owned(&self) -> (u32, u32, u32) {
            *self
        }
    }

    #[test]
    fn the_first_that_can_be_started_of_the_folders_of_path_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (name, mode) in [("plain", 0o644), ("program", 0o755)] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join("train"), "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(path(name).join("train"), Permissions::from_mode(mode)).unwrap();
        }
        let found = |folders: &[&str]| {
            let mut command = Command::new("train");
            command.env("PATH", std::env::join_paths(folders.iter().map(|name| path(name))).unwrap());
            Program::of(&command).path
        };
        assert_eq!(found(&["plain", "program"]), Some(path("program").join("train")));
        assert_eq!(found(&["none", "plain"]), Some(path("plain").join("train")));
        assert_eq!(found(&["none"]), None);
        // To look at a pipe that nobody writes to does not wait for its writer.
        let pipe = path("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(Program::of(&Command::new(&pipe)).doubtful_binary().is_none());
    }

    #[test]
    fn a_mode_is_read_as_the_kernel_does() {
        let file = |mode| (mode, 7, 70);
        assert!(may_execute(&file(0o700), 7, &[]) && !may_execute(&file(0o700), 8, &[70]));
        assert!(may_execute(&file(0o710), 8, &[70]) && !may_execute(&file(0o701), 8, &[70]));
        assert!(may_execute(&file(0o701), 8, &[71]) && !may_execute(&file(0o711 & !0o100), 7, &[70]));
        assert!(may_execute(&file(0o001), 0, &[]) && !may_execute(&file(0o666), 0, &[]));
    }

    fn missing(content: &[u8]) -> String {
        Head { bytes: content.to_vec(), length: content.len() as u64, loader: None }.what_is_missing()
    }

    #[test]
    fn what_a_script_lacks_is_named() {
        assert!(missing(b"#!/opt/python3 -u\nprint()").contains("missing: /opt/python3, which"));
        assert!(missing(b"#! /opt/python3").contains("missing: /opt/python3, which"));
        assert!(missing(b"#!/bin/sh\r\necho\r\n").contains("carriage return"));
        assert!(missing(b"echo hello\n").contains("/bin/sh, which"));
    }
}
