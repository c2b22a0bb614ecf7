//! The machine: kernel, processors, memory, limits.

use std::fs;
use std::io;
use std::num::NonZero;
use std::thread::available_parallelism;

use phalanx_sys::arena::memory_left_by_cgroups;
use phalanx_sys::process::ptrace_scope;
use phalanx_sys::processors::rereads_slowly;
use rustix::process::{Resource, Rlimit, getrlimit};

use super::finding::Report;

/// Descriptors that each other rank takes.
const PER_RANK: u64 = 3;
/// The descriptors of the program itself, the listeners and the threads.
const OWN: u64 = 32;
/// The smallest world that a machine should allow if the size of the world is not known.
const SMALL: u64 = 16;

/// Checks the machine, for a job of `world` ranks, or of an unknown number.
pub(super) fn look(report: &mut Report, world: u32) {
    let system = rustix::system::uname();
    report.good("phalanx", env!("CARGO_PKG_VERSION"));
    report.good("host", phalanx::host_name());
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    report.good("kernel", [system.sysname(), system.release(), system.machine()].map(text).join(" "));
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cores(report, available_parallelism().map(NonZero::get), &cpuinfo);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    memory(report, &meminfo, memory_left_by_cgroups());
    address_space(report);
    cross_memory(report, ptrace_scope().as_deref(), rereads_slowly());
    descriptors(report, world, getrlimit(Resource::Nofile));
}

fn cores(report: &mut Report, usable: io::Result<usize>, cpuinfo: &str) {
    let online = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    match usable {
        Ok(usable) if online == 0 => {
            report.note("cores", format!("{usable} usable; /proc/cpuinfo does not say of how many"));
        }
        Ok(usable) if usable < online => report.advise(
            "cores",
            format!("{usable} of {online} usable"),
            "the rest are kept from this process by its affinity (`taskset -p $$`) or its cgroup (cpu.max)",
        ),
        Ok(usable) => report.good("cores", format!("{usable}, all usable")),
        Err(error) => report.note("cores", format!("their number is not known: {error}")),
    }
}

/// The host's memory, and what the control groups leave of it.
fn memory(report: &mut Report, host: &str, left: Option<u64>) {
    let (Some(total), Some(free)) = (meminfo(host, "MemTotal"), meminfo(host, "MemAvailable")) else {
        return report.note("memory", "/proc/meminfo does not say");
    };
    let text = format!("{} of {} available", gib(free), gib(total));
    match left.filter(|left| *left < free) {
        Some(left) => report.advise(
            "memory",
            format!("{text}; the cgroup leaves {} of that", gib(left)),
            "buffers that ranks share count towards its limit: raise memory.max (in version 1 memory.limit_in_bytes) \
             of it, and of those above it, if a job is killed for memory",
        ),
        None => report.good("memory", text),
    }
}

/// The bytes that a line of /proc/meminfo says, in KiB.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn address_space(report: &mut Report) {
    match getrlimit(Resource::As).current {
        None => report.good("address space", "not limited"),
        Some(limit) => report.advise(
            "address space",
            format!("limited to {}", gib(limit)),
            "memory that ranks share is mapped sparsely, in large pieces, by each: `ulimit -v unlimited`",
        ),
    }
}

/// Whether ranks copy out of each other's processes. Where processors reread slowly they do not, whatever the kernel allows.
fn cross_memory(report: &mut Report, scope: Option<&str>, rereads_slowly: bool) {
    let text = match scope {
        _ if rereads_slowly => "not used on AMD's processors: data is copied twice",
        Some("0") => {
            "allowed between processes of one user: messages and what collectives only copy are copied once"
        }
        Some("1") => {
            "allowed to a process's ancestors, and by each rank to the other processes that its launcher has started (ptrace_scope 1): messages \
             and what collectives only copy are copied once. If the ranks of a host have different parents, such data is copied twice"
        }
        Some("2") => "allowed to CAP_SYS_PTRACE (ptrace_scope 2): without it data is copied twice",
        Some("3") => "forbidden (ptrace_scope 3): such data is copied twice",
        Some(_) | None => "not known: /proc/sys does not say; without it data is copied twice",
    };
    report.note("cross-memory copy", text);
}

fn descriptors(report: &mut Report, world: u32, Rlimit { current, maximum }: Rlimit) {
    let limit = current.unwrap_or(u64::MAX);
    let largest = largest_world(limit);
    let more = match maximum {
        Some(hard) if hard <= limit => String::new(),
        Some(hard) => format!("; `phalanx run` raises it if its job needs more, up to {hard}"),
        None if current.is_none() => String::new(),
        None => "; `phalanx run` raises it if its job needs more".to_owned(),
    };
    let text = format!("{limit}, for worlds of up to {largest} ranks ({PER_RANK} for each other rank){more}");
    let wanted = if world > 1 { u64::from(world) } else { SMALL };
    let remedy = "raise it: `ulimit -n 65536`, or LimitNOFILE of the service";
    match maximum.is_none_or(|hard| largest_world(hard) >= wanted) {
        _ if largest >= wanted => report.good("descriptors", text),
        true => report.advise("descriptors", text, format!("without `phalanx run`, {remedy}")),
        false => report.bad("descriptors", text, remedy),
    }
}

/// The largest world with so many descriptors in each process.
fn largest_world(limit: u64) -> u64 {
    (limit.saturating_sub(OWN) / PER_RANK).saturating_add(1).min(phalanx::MAX_WORLD_SIZE.into())
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Verdict;

    #[test]
    fn worlds_are_as_large_as_descriptors_allow() {
        assert_eq!([0, 32, 35, 1024].map(largest_world), [1, 1, 2, 331]);
        assert_eq!(largest_world(u64::MAX), 65_536);
    }

    #[test]
    fn a_soft_limit_of_descriptors_is_told_with_the_hard_one() {
        let told = |current, maximum| {
            let mut report = Report::new("here".to_owned());
            descriptors(&mut report, 1, Rlimit { current, maximum });
            report.findings.remove(0).text
        };
        let text = "1024, for worlds of up to 331 ranks (3 for each other rank)";
        assert_eq!(told(Some(1024), Some(1024)), text);
        let raised = format!("{text}; `phalanx run` raises it if its job needs more");
        assert_eq!(told(Some(1024), Some(4096)), format!("{raised}, up to 4096"));
        assert_eq!(told(Some(1024), None), raised);
        assert!(told(None, None).ends_with("(3 for each other rank)"));
        // Nothing fails in a job of `phalanx run` that raises it far enough.
        let verdict = |maximum| {
            let mut report = Report::new("here".to_owned());
            descriptors(&mut report, 1000, Rlimit { current: Some(1024), maximum });
            report.findings.remove(0).verdict
        };
        assert_eq!([None, Some(4096), Some(2048)].map(verdict), [Verdict::Note, Verdict::Note, Verdict::Bad]);
    }

    #[test]
    fn memory_that_a_cgroup_withholds_is_told() {
        let told = |left| {
            let mut report = Report::new("here".to_owned());
            memory(&mut report, "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n", left);
            report.findings.remove(0)
        };
        for enough in [None, Some(6 << 30), Some(u64::MAX)] {
            assert_eq!(
                (told(enough).text, told(enough).remedy),
                ("6.0 GiB of 8.0 GiB available".into(), None)
            );
        }
        let finding = told(Some(1 << 30));
        assert_eq!(finding.text, "6.0 GiB of 8.0 GiB available; the cgroup leaves 1.0 GiB of that");
        assert!(finding.remedy.unwrap().contains("memory.max"));
    }

    #[test]
    fn what_proc_does_not_say_is_not_known() {
        let cores_of = |usable, cpuinfo: &str| {
            let mut report = Report::new("here".to_owned());
            cores(&mut report, Ok(usable), cpuinfo);
            report.findings.remove(0).text
        };
        let two = "processor\t: 0\nmodel name\t: x\n\nprocessor\t: 1\n";
        assert_eq!(cores_of(2, two), "2, all usable");
        assert_eq!(cores_of(1, two), "1 of 2 usable");
        assert_eq!(cores_of(2, ""), "2 usable; /proc/cpuinfo does not say of how many");
        let copies = |scope| {
            let mut report = Report::new("here".to_owned());
            cross_memory(&mut report, scope, false);
            report.findings.remove(0).text
        };
        assert!(copies(Some("0")).starts_with("allowed between processes of one user"));
        assert!(copies(Some("1")).contains("its launcher has started (ptrace_scope 1)"));
        assert!(copies(Some("3")).starts_with("forbidden"));
        for unknown in [None, Some(""), Some("4")] {
            assert!(copies(unknown).starts_with("not known"), "{unknown:?}");
        }
    }

    #[test]
    fn memory_is_not_said_to_be_copied_once_where_no_rank_does_so() {
        for scope in [None, Some("0"), Some("1")] {
            let mut report = Report::new("here".to_owned());
            cross_memory(&mut report, scope, true);
            assert_eq!(report.findings.remove(0).text, "not used on AMD's processors: data is copied twice");
        }
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        let text = "MemTotal:        2048 kB\nMemFree: 3 kB\nMemTotalX: 1 kB\nOdd: x kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(2 << 20));
        assert_eq!(meminfo(text, "MemAvailable"), None);
        assert_eq!(meminfo(text, "Odd"), None);
    }
}
