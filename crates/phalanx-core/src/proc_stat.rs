//! A process of this host, as the kernel shows it in `/proc/PID/stat`.
//!
//! The crate procfs was weighed, and left out of the core. It opens two files for each process, where the launcher looks at all of a
//! machine's, and makes a list of all connections, where a store asks for a few (`store::tcp::peer_user`). It brings
//! three crates, and saves some 60 lines.

use std::fs;
use std::io;

use rustix::io::Errno;

/// `pid (name) state parent group ..`, with the processor time in the program and in the kernel as the 14th and 15th
/// field, and the start time as the 22nd. The name may contain anything, even brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcStat {
    pub pid: i32,
    /// A letter: `R` running, `T` stopped, `Z` ended, and so on.
    pub state: u8,
    pub parent: i32,
    pub group: i32,
    /// Processor time, in the kernel's ticks.
    pub worked: u64,
    /// The start time, in the kernel's ticks since boot.
    pub started: u64,
}

impl ProcStat {
    /// This process. None without a `/proc`.
    pub fn own() -> Option<Self> {
        Self::parse(&fs::read("/proc/self/stat").ok()?)
    }

    /// None if the line cannot be parsed. An error if the file cannot be read; see [`is_gone`].
    pub fn read(pid: i32) -> io::Result<Option<Self>> {
        fs::read(format!("/proc/{pid}/stat")).map(|line| Self::parse(&line))
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let name = line.iter().position(|byte| *byte == b'(')?;
        let after_name = line.iter().rposition(|byte| *byte == b')')? + 1;
        let pid = str::from_utf8(&line[..name]).ok()?.trim().parse().ok()?;
        let mut fields = str::from_utf8(line.get(after_name..)?).ok()?.split_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let (parent, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let mut time = |skipped| -> Option<u64> { fields.nth(skipped)?.parse().ok() };
        let worked = time(8)?.saturating_add(time(0)?);
        Some(Self { pid, state, parent, group, worked, started: time(6)? })
    }

    /// Whether it has ended, even if its parent has not yet read its exit status.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// Whether this error of [`ProcStat::read`] means that there is no such process. This includes one that ends while it is
/// read.
pub fn is_gone(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fields_are_found_behind_any_name() {
        let line = b"12 (a) b (c)) T 1 77 12 0 -1 4194304 96 0 0 0 5 2 0 0 20 0 1 0 4711 3133440";
        let stat = ProcStat { pid: 12, state: b'T', parent: 1, group: 77, worked: 7, started: 4711 };
        assert_eq!(ProcStat::parse(line), Some(stat));
        for bad in ["", "12 (sh", "12 (sh) Z 1 77 12 0 -1", "12 (sh) R 1 2 3"] {
            assert_eq!(ProcStat::parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn this_process_is_seen_and_one_that_is_not_there_is_gone() {
        let own = ProcStat::own().unwrap();
        let again = ProcStat::read(own.pid).unwrap().unwrap();
        assert_eq!((own.pid, own.started), (std::process::id().cast_signed(), again.started));
        assert!(!own.is_dead());
        assert!(is_gone(&ProcStat::read(i32::MAX).unwrap_err()));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ProcStat::parse(&line);
        }
    }
}
