//! What Linux says about processes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// What a process holds.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Resident memory in MiB.
    pub memory: f64,
    pub threads: usize,
    pub descriptors: usize,
}

impl Held {
    /// None if the process is gone.
    pub fn by(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<usize>().ok()
        };
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
        Some(Self { memory: number("VmRSS:")? as f64 / 1024.0, threads: number("Threads:")?, descriptors })
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { memory, threads, descriptors } = self;
        write!(f, "{memory:.1} MiB, {threads} threads, {descriptors} descriptors")
    }
}

pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// The shared memory that has a name.
pub fn shared_memory() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The processes whose environment has `variable` set to `value`, this one apart.
pub fn processes_with(variable: &str, value: &Path) -> Vec<u32> {
    let wanted = format!("{variable}={}", value.display());
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id())
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes())
        })
        .collect()
}
