//! Which processes belong to a process group.

use std::fs;

use rustix::process::Pid;

/// Does any process of these groups still run? Zombies do not count: a worker that has ended is kept as one, so that
/// its number, which is its group's, cannot become somebody else's.
///
/// Where there is no `/proc`, nobody is seen.
pub(super) fn any_alive(groups: &[Pid]) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    processes
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit))
        .filter_map(|entry| fs::read(entry.path().join("stat")).ok())
        .filter_map(|stat| live_group(&stat))
        .any(|group| groups.iter().any(|leader| leader.as_raw_nonzero().get() == group))
}

/// The process group in a line of `/proc/*/stat`, unless the process is dead: `pid (name) state parent group ..`.
/// The name may hold anything, also brackets.
fn live_group(stat: &[u8]) -> Option<i32> {
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = str::from_utf8(&stat[after_name..]).ok()?.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_found_behind_any_name() {
        assert_eq!(live_group(b"12 (a) b (c)) S 1 77 12 0 -1"), Some(77));
        assert_eq!(live_group(b"12 (sh) Z 1 77 12 0 -1"), None);
        assert_eq!(live_group(b"12 (sh"), None);
    }

    #[test]
    fn this_process_is_alive() {
        assert!(any_alive(&[rustix::process::getpgrp()]));
    }
}
