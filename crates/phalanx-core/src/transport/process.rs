//! What the kernel shows about the processes of this host.

use std::sync::Mutex;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::health::liveness::ProcessState;
use crate::host;
use crate::proc_stat::{ProcStat, is_gone};
use crate::wire::control::ProcessId;

/// What has been found of this process: each new group asks for it up to four times, and the kernel takes 18 us to write what does not change.
static FOUND: Mutex<Option<ProcessId>> = Mutex::new(None);

/// This process, as others of its host can find it. None without a `/proc` of this process's own pid namespace.
pub fn own() -> Option<ProcessId> {
    let (pid, namespaces) = (std::process::id(), (host::namespace("pid")?, host::namespace("net")?));
    // Never waited for: in a forked process nobody may be left who releases it.
    let found = FOUND.try_lock().ok().and_then(|found| *found);
    if let Some(found) = still(found, pid, namespaces) {
        return Some(found);
    }
    let (boot, stat) = (host::boot_id()?, ProcStat::own()?);
    // A `/proc` of another namespace may be mounted here.
    let own =
        (stat.pid == pid.cast_signed()).then_some(ProcessId { boot, namespaces, pid, started: stat.started });
    if let Ok(mut found) = FOUND.try_lock() {
        *found = own;
    }
    own
}

/// What was `found` before, if it is of this process still: one that has been forked has what its parent found.
fn still(found: Option<ProcessId>, pid: u32, namespaces: (u64, u64)) -> Option<ProcessId> {
    found.filter(|found| (found.pid, found.namespaces) == (pid, namespaces))
}

/// What `own`, this process, can see of `peer`. Nothing if they are in different network namespaces: then the network
/// between them may be the cause of the silence.
pub fn state(own: Option<ProcessId>, peer: Option<ProcessId>) -> ProcessState {
    let (Some(own), Some(peer)) = (own, peer) else { return ProcessState::Unknown };
    if (own.boot, own.namespaces) != (peer.boot, peer.namespaces) {
        return ProcessState::Unknown;
    }
    match ProcStat::read(peer.pid.cast_signed()) {
        Ok(stat) => stat.map_or(ProcessState::Unknown, |stat| state_of(&stat, peer)),
        // A `/proc` that is mounted with `hidepid` does not show all processes.
        Err(error) if is_gone(&error) && !exists(peer.pid) => ProcessState::Gone,
        Err(_) => ProcessState::Unknown,
    }
}

/// Whether there is a process with this number, as signals find it: also another user's, and one that may not be traced.
fn exists(pid: u32) -> bool {
    Pid::from_raw(pid.cast_signed()).is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

/// Whether `own`, this process, may take the place of `peer` at once: `peer` is gone. One that cannot be seen, in another container or on
/// another host, may live, whatever the host's name is.
pub fn may_replace(own: Option<ProcessId>, peer: Option<ProcessId>) -> bool {
    match state(own, peer) {
        ProcessState::Gone => true,
        ProcessState::Stopped | ProcessState::Alive | ProcessState::Unknown => false,
    }
}

/// If a signal has stopped `peer`, as seen from `own`, this process: its processor time so far, which distinguishes
/// this stop from earlier ones. A debugger halts a process in another way.
pub(super) fn stop(own: Option<ProcessId>, peer: ProcessId) -> Option<u64> {
    let own = own?;
    if (own.boot, own.namespaces.0) != (peer.boot, peer.namespaces.0) {
        return None;
    }
    let stat = ProcStat::read(peer.pid.cast_signed()).ok()??;
    (is(&stat, peer) && stat.state == b'T').then_some(stat.worked)
}

fn is(stat: &ProcStat, peer: ProcessId) -> bool {
    (stat.pid.cast_unsigned(), stat.started) == (peer.pid, peer.started)
}

fn state_of(stat: &ProcStat, peer: ProcessId) -> ProcessState {
    match stat.state {
        // Another process has this number now.
        _ if !is(stat, peer) => ProcessState::Gone,
        b'T' | b't' => ProcessState::Stopped,
        b'R' | b'S' | b'D' => ProcessState::Alive,
        _ if stat.is_dead() => ProcessState::Gone,
        _ => ProcessState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_that_of_the_peer_or_of_nobody() {
        let peer = ProcessId { boot: 1, namespaces: (2, 3), pid: 12, started: 99 };
        let stat = |state, started| ProcStat { pid: 12, state, parent: 1, group: 12, worked: 7, started };
        for (state, expected) in [
            (b'T', ProcessState::Stopped),
            (b't', ProcessState::Stopped),
            (b'D', ProcessState::Alive),
            (b'Z', ProcessState::Gone),
        ] {
            assert_eq!(state_of(&stat(state, 99), peer), expected);
        }
        assert_eq!(state_of(&stat(b'R', 98), peer), ProcessState::Gone);
    }

    #[test]
    fn what_was_found_of_a_parent_is_not_taken() {
        let found = ProcessId { boot: 1, namespaces: (2, 3), pid: 12, started: 99 };
        assert_eq!(still(Some(found), 12, (2, 3)), Some(found));
        assert_eq!(still(Some(found), 13, (2, 3)), None);
        // The first process of a container may be forked by the first one of another.
        assert_eq!(still(Some(found), 12, (4, 3)), None);
        assert_eq!(still(Some(found), 12, (2, 4)), None);
        assert_eq!(still(None, 12, (2, 3)), None);
    }

    #[test]
    fn this_process_sees_that_it_is_alive() {
        let (own, again) = (own(), own());
        assert_eq!(own, again);
        assert!(own.is_some());
        assert_eq!(state(own, own), ProcessState::Alive);
        let elsewhere = own.map(|own| ProcessId { namespaces: (own.namespaces.0, 0), ..own });
        assert_eq!(state(own, elsewhere), ProcessState::Unknown);
        assert_eq!(state(own, None), ProcessState::Unknown);
        assert!(exists(std::process::id()) && !exists(i32::MAX.cast_unsigned()));
        let gone = own.map(|own| ProcessId { pid: i32::MAX.cast_unsigned(), ..own });
        assert_eq!(state(own, gone), ProcessState::Gone);
    }

    #[test]
    fn a_process_of_another_host_is_not_replaced() {
        let own = own();
        let changed = |change: fn(&mut ProcessId)| {
            own.map(|mut other| {
                change(&mut other);
                other
            })
        };
        // This process lives, the one that had its number before does not.
        assert!(!may_replace(own, own));
        assert!(may_replace(own, changed(|other| other.started += 1)));
        // Another container in the network of this one may live, and so may containers and hosts of other networks.
        assert!(!may_replace(own, changed(|other| other.namespaces.0 += 1)));
        assert!(!may_replace(own, changed(|other| other.namespaces.1 += 1)));
        assert!(!may_replace(own, changed(|other| other.namespaces = (7, 7))));
        assert!(!may_replace(own, changed(|other| other.boot += 1)));
        assert!(!may_replace(own, None) && !may_replace(None, own));
    }
}
