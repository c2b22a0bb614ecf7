//! What the kernel shows of the processes of this host.

use std::fs;

use rustix::io::Errno;

use crate::health::liveness::Sight;
use crate::wire::control::ProcessId;

/// This process, as others of its host can find it; none where there is no `/proc` that counts as this process does.
pub(super) fn own() -> Option<ProcessId> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let boot = u128::from_str_radix(&boot.trim().replace('-', ""), 16).ok()?;
    let namespaces = (namespace("pid")?, namespace("net")?);
    let stat = Stat::parse(&fs::read("/proc/self/stat").ok()?)?;
    // A `/proc` of another namespace may be mounted here.
    let pid = std::process::id();
    (stat.pid == pid).then_some(ProcessId { boot, namespaces, pid, started: stat.started })
}

/// The number of this process's namespace of a `kind`.
fn namespace(kind: &str) -> Option<u64> {
    let link = fs::read_link(format!("/proc/self/ns/{kind}")).ok()?;
    link.to_str()?.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

/// What can be seen of `peer` from `own`, this process. Nothing if they have networks of their own: then what is silent
/// may be the way between them.
pub(super) fn look(own: Option<ProcessId>, peer: Option<ProcessId>) -> Sight {
    let (Some(own), Some(peer)) = (own, peer) else { return Sight::Nothing };
    if (own.boot, own.namespaces) != (peer.boot, peer.namespaces) {
        return Sight::Nothing;
    }
    match fs::read(format!("/proc/{}/stat", peer.pid)) {
        Ok(line) => Stat::parse(&line).map_or(Sight::Nothing, |stat| stat.sight(peer)),
        // The latter of one that ends while it is read.
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH)) => Sight::Gone,
        Err(_) => Sight::Nothing,
    }
}

/// If a signal has stopped `peer`, as seen from `own`, this process: how much it had worked by then, which tells this stop from
/// earlier ones. A debugger halts a process in another way.
pub(super) fn stop(own: Option<ProcessId>, peer: ProcessId) -> Option<u64> {
    let own = own?;
    if (own.boot, own.namespaces.0) != (peer.boot, peer.namespaces.0) {
        return None;
    }
    let stat = Stat::parse(&fs::read(format!("/proc/{}/stat", peer.pid)).ok()?)?;
    (stat.is(peer) && stat.state == b'T').then_some(stat.worked)
}

/// What is of use in a line of `/proc/*/stat`: `pid (name) state ..`, with the time at work as the 14th and 15th field, in
/// the program and in the kernel, and that of the start as the 22nd. The
/// name may hold anything, also brackets.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    pid: u32,
    state: u8,
    worked: u64,
    started: u64,
}

impl Stat {
    fn parse(line: &[u8]) -> Option<Self> {
        let name = line.iter().position(|byte| *byte == b'(')?;
        let after_name = line.iter().rposition(|byte| *byte == b')')? + 1;
        let pid = str::from_utf8(&line[..name]).ok()?.trim().parse().ok()?;
        let mut fields = str::from_utf8(&line[after_name..]).ok()?.split_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let mut number = |skipped| -> Option<u64> { fields.nth(skipped)?.parse().ok() };
        let worked = number(10)?.saturating_add(number(0)?);
        Some(Self { pid, state, worked, started: number(6)? })
    }

    fn is(&self, peer: ProcessId) -> bool {
        (self.pid, self.started) == (peer.pid, peer.started)
    }

    fn sight(&self, peer: ProcessId) -> Sight {
        match self.state {
            // The number has gone to another process.
            _ if !self.is(peer) => Sight::Gone,
            b'T' | b't' => Sight::Stopped,
            b'R' | b'S' | b'D' => Sight::Alive,
            b'Z' | b'X' => Sight::Gone,
            _ => Sight::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PEER: ProcessId = ProcessId { boot: 1, namespaces: (2, 3), pid: 12, started: 99 };

    fn sight(line: &str) -> Option<Sight> {
        Stat::parse(line.as_bytes()).map(|stat| stat.sight(PEER))
    }

    #[test]
    fn a_state_is_found_behind_any_name() {
        let line = |state: &str, started: u64| {
            format!("12 (a) b (c)) {state} 1 77 12 0 -1 4194304 96 0 0 0 5 2 0 0 20 0 1 0 {started} 3133440")
        };
        let stat = Stat::parse(line("T", 99).as_bytes());
        assert_eq!(stat, Some(Stat { pid: 12, state: b'T', worked: 7, started: 99 }));
        for (state, expected) in
            [("T", Sight::Stopped), ("t", Sight::Stopped), ("D", Sight::Alive), ("Z", Sight::Gone)]
        {
            assert_eq!(sight(&line(state, 99)), Some(expected), "{state}");
        }
        assert_eq!(sight(&line("R", 98)), Some(Sight::Gone));
        assert_eq!(sight("12 (sh) R 1 2 3"), None);
    }

    #[test]
    fn this_process_sees_that_it_is_alive() {
        let own = own();
        assert!(own.is_some());
        assert_eq!(look(own, own), Sight::Alive);
        let elsewhere = own.map(|own| ProcessId { namespaces: (own.namespaces.0, 0), ..own });
        assert_eq!(look(own, elsewhere), Sight::Nothing);
        assert_eq!(look(own, None), Sight::Nothing);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Stat::parse(&line);
        }
    }
}
