//! Finds the processes of a job: the workers' process groups, and processes that workers have started in other sessions
//! and groups.
//!
//! A process group has a worker's children, but not those that have left it, and the launcher may have children of
//! other jobs. So all processes of a job carry its tag in their environment, which the processes that they start
//! inherit. The launcher and its guard look for the tag. `phalanx run`, which has no other children, also adopts
//! processes that have lost their parents.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use phalanx_sys::guard::{Tag, is_in_execve};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, pidfd_open, pidfd_send_signal,
    test_kill_process, waitid, waitpid,
};

use super::job::random_name;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::proc_stat::{ProcStat, is_gone};

/// The variable with the tags of the jobs to which a process belongs, for jobs within jobs.
pub(super) const TAG_VARIABLE: &str = "PHALANX_JOB_TAG";
/// How often adopted processes that have ended are reaped.
const REAP_INTERVAL: Duration = Duration::from_secs(1);
/// The pause between two looks for a worker's remaining processes. Both must find none.
const RECHECK_DELAY: Duration = Duration::from_millis(5);

/// Identifies the processes of one attempt.
#[derive(Debug)]
pub(super) struct JobProcesses {
    tag: Tag,
    /// The workers that were started so far.
    started: u32,
    /// The guard's process number, and its start time: all processes of the job were started later.
    guard: (i32, u64),
    /// Whether this process is the subreaper of the job.
    adopts: bool,
    /// The children that this process had before, if it reaps all others: as the subreaper, or as the first process of a container,
    /// which becomes the parent of every orphan there.
    earlier: Option<HashSet<i32>>,
    /// Whether `/proc` can be read here at all.
    has_proc: bool,
    reap_at: Instant,
}

/// The running ones.
#[derive(Debug, Default)]
pub(super) struct RunningProcesses {
    in_groups: bool,
    /// Those in none of the workers' groups.
    pub(super) strays: Vec<Stray>,
}

/// A process outside the workers' groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stray(ProcStat);

/// Process number and start time: no other process has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProcessId(i32, u64);

impl ProcessId {
    fn of(process: &ProcStat) -> Self {
        Self(process.pid, process.started)
    }
}

impl RunningProcesses {
    /// The strays with these identities, and those of their descendants that are strays too.
    pub(super) fn with_descendants(&self, roots: HashSet<ProcessId>) -> impl Iterator<Item = &Stray> {
        let processes: Vec<ProcStat> = self.strays.iter().map(|stray| stray.0).collect();
        let mut numbers = roots.iter().map(|root| root.0).collect();
        add_children(&processes, &mut numbers);
        self.strays.iter().filter(move |stray| numbers.contains(&stray.0.pid))
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.in_groups && self.strays.is_empty()
    }
}

impl Stray {
    pub(super) fn id(&self) -> ProcessId {
        ProcessId::of(&self.0)
    }

    pub(super) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.0.pid) else { return };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => {
                // Its number could belong to another process by now.
                let now = visible(self.0.pid).ok().flatten();
                if now.is_some_and(|now| now.started == self.0.started) {
                    let _ = pidfd_send_signal(process, signal);
                }
            }
            Err(Errno::NOSYS) => drop(kill_process(pid, signal)),
            Err(_) => {}
        }
    }
}

impl JobProcesses {
    /// With `subreaper`, this process becomes the parent of the job's orphans.
    pub(super) fn new(subreaper: bool) -> Result<Self> {
        let mut tag = Tag::default();
        // Two random numbers of 16 hexadecimal digits each.
        for (digit, drawn) in tag.iter_mut().zip((random_name()? + &random_name()?).bytes()) {
            *digit = drawn;
        }
        let me = me();
        let earlier = subreaper.then(|| children(me)).and_then(io::Result::ok);
        // A process with other children cannot tell their orphans from the job's.
        let adopts = earlier.as_ref().is_some_and(HashSet::is_empty) && become_reaper();
        let earlier = earlier.filter(|_| adopts || me == 1);
        let has_proc = !matches!(visible(me), Ok(None));
        let reap_at = Instant::now() + REAP_INTERVAL;
        Ok(Self { tag, started: 0, guard: (0, 0), adopts, earlier, has_proc, reap_at })
    }

    pub(super) fn tag(&self) -> &Tag {
        &self.tag
    }

    /// All processes of the job start after this one.
    pub(super) fn set_guard(&mut self, guard: u32) {
        let pid = i32::try_from(guard).unwrap_or(0);
        self.guard = (pid, visible(pid).ok().flatten().map_or(0, |guard| guard.started));
    }

    /// The tag of the next worker: it distinguishes what this worker starts from what others start.
    pub(super) fn next_tag(&mut self) -> String {
        self.started += 1;
        format!("{}.{}.", String::from_utf8_lossy(&self.tag), self.started)
    }

    /// When to [reap](Self::reap) at the latest.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.earlier.is_some().then_some(self.reap_at)
    }

    /// Reaps adopted processes that have ended, now and then. Workers, which lead `groups`, are not reaped here.
    pub(super) fn reap(&mut self, groups: &[Pid]) {
        if self.earlier.is_some() && Instant::now() >= self.reap_at {
            self.reap_all_but(&numbers(groups));
            self.reap_at = Instant::now() + REAP_INTERVAL;
        }
    }

    fn reap_all_but(&self, workers: &HashSet<i32>) {
        let Some(earlier) = &self.earlier else { return };
        let me = me();
        let dead = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // Usually one system call, instead of one for each process of the machine.
        if !matches!(waitid(WaitId::All, dead), Ok(Some(_))) {
            return;
        }
        for process in all().unwrap_or_default() {
            let is_kept = process.pid == self.guard.0
                || workers.contains(&process.pid)
                || earlier.contains(&process.pid);
            if process.is_dead() && process.parent == me && !is_kept {
                reap(process.pid);
            }
        }
    }

    /// The running processes of the job; None if `/proc` cannot be read now. Zombies do not count: a worker that has
    /// ended is kept as a zombie, so that its number, which is its group's, is not used again. Processes of other
    /// users, which this one may not signal, do not count either.
    ///
    /// If there was no `/proc` when the job began, no process is found.
    pub(super) fn running(&self, groups: &[Pid]) -> Option<RunningProcesses> {
        if !self.has_proc {
            return Some(RunningProcesses::default());
        }
        let groups = numbers(groups);
        let me = me();
        let processes = self.processes()?;
        let mut ours: HashSet<i32> = HashSet::new();
        for process in &processes {
            let is_of_group = groups.contains(&process.group) || groups.contains(&process.pid);
            if is_of_group || (self.adopts && is_adopted(process, me)) {
                ours.insert(process.pid);
            }
        }
        self.add_tagged(&self.tag, &processes, &mut ours);
        let (in_groups, strays): (Vec<ProcStat>, Vec<ProcStat>) =
            living(&processes, &ours).partition(|process| groups.contains(&process.group));
        Some(RunningProcesses {
            in_groups: !in_groups.is_empty(),
            strays: strays.into_iter().map(Stray).collect(),
        })
    }

    /// All processes of the machine, of this job or not, that are in none of these groups; None if `/proc` cannot be read
    /// now.
    pub(super) fn outside(&self, groups: &[Pid]) -> Option<HashSet<ProcessId>> {
        let groups = numbers(groups);
        let processes = self.processes()?;
        Some(processes.iter().filter(|process| !groups.contains(&process.group)).map(ProcessId::of).collect())
    }

    /// All processes of the machine; None if `/proc` cannot be read now.
    pub(super) fn everyone(&self) -> Option<HashSet<ProcessId>> {
        self.outside(&[])
    }

    /// Kills all processes with the tag of one worker, and their children, until two looks in a row have found none.
    pub(super) fn kill_tagged(&self, tag: &str, deadline: Deadline) {
        let mut empty = 0;
        while self.has_proc && empty < 2 && !deadline.has_passed() {
            let tagged = self.tagged(tag);
            empty = if tagged.as_ref().is_some_and(Vec::is_empty) { empty + 1 } else { 0 };
            tagged.iter().flatten().for_each(|stray| stray.signal(Signal::KILL));
            std::thread::sleep(RECHECK_DELAY);
        }
    }

    /// The running processes with the tag of one worker, and their children; None as for [`running`](Self::running).
    pub(super) fn tagged(&self, tag: &str) -> Option<Vec<Stray>> {
        let processes = self.processes()?;
        let mut ours = HashSet::new();
        self.add_tagged(tag.as_bytes(), &processes, &mut ours);
        Some(living(&processes, &ours).map(Stray).collect())
    }

    /// All but the guard.
    fn processes(&self) -> Option<Vec<ProcStat>> {
        let mut processes = all().ok()?;
        processes.retain(|process| process.pid != self.guard.0);
        Some(processes)
    }

    /// Adds to `ours` the processes that carry `tag`, and all their children.
    fn add_tagged(&self, tag: &[u8], processes: &[ProcStat], ours: &mut HashSet<i32>) {
        add_children(processes, ours);
        for process in processes {
            let may_be =
                !process.is_dead() && process.started >= self.guard.1 && !ours.contains(&process.pid);
            if may_be && carries(process.pid, tag) {
                ours.insert(process.pid);
            }
        }
        add_children(processes, ours);
    }
}

impl Drop for JobProcesses {
    fn drop(&mut self) {
        // The workers have been reaped.
        self.reap_all_but(&HashSet::new());
        if self.adopts {
            #[cfg(target_os = "linux")]
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}

/// All visible processes; an error unless this one is among them.
fn all() -> io::Result<Vec<ProcStat>> {
    let mut all = Vec::new();
    for folder in fs::read_dir("/proc")? {
        let number = folder?.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = number {
            all.extend(visible(pid)?);
        }
    }
    let me = me();
    if all.iter().any(|process| process.pid == me) { Ok(all) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// The processes whose parent is `me`.
fn children(me: i32) -> io::Result<HashSet<i32>> {
    Ok(all()?.iter().filter(|process| process.parent == me).map(|process| process.pid).collect())
}

/// None if there is no such process, or it may not be seen; an error if that is not known.
fn visible(pid: i32) -> io::Result<Option<ProcStat>> {
    ProcStat::read(pid).or_else(|error| match Errno::from_io_error(&error) {
        // Another user's, with the mount option `hidepid`.
        Some(Errno::ACCESS | Errno::PERM) => Ok(None),
        _ if is_gone(&error) => Ok(None),
        _ => Err(error),
    })
}

/// Those of `ours` that are alive and that this process may signal.
fn living<'a>(processes: &'a [ProcStat], ours: &'a HashSet<i32>) -> impl Iterator<Item = ProcStat> + 'a {
    let is_ours = |process: &&ProcStat| !process.is_dead() && ours.contains(&process.pid);
    processes.iter().filter(is_ours).filter(|process| may_signal(process.pid)).copied()
}

fn may_signal(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) != Err(Errno::PERM))
}

/// Whether this process was adopted by `me`, which is a subreaper. The first process of a container adopts all orphans there,
/// also of other programs: there only the tag counts.
fn is_adopted(process: &ProcStat, me: i32) -> bool {
    me != 1 && process.parent == me
}

fn numbers(groups: &[Pid]) -> HashSet<i32> {
    groups.iter().map(|leader| leader.as_raw_nonzero().get()).collect()
}

/// Adds the children of these processes, and theirs.
fn add_children(processes: &[ProcStat], ours: &mut HashSet<i32>) {
    loop {
        let before = ours.len();
        for process in processes {
            if ours.contains(&process.parent) {
                ours.insert(process.pid);
            }
        }
        if ours.len() == before {
            return;
        }
    }
}

/// Whether the process has `tag` in its environment. One in the middle of `execve` has none for a moment, which is long where the
/// processors are busy: it is looked at again.
fn carries(pid: i32, tag: &[u8]) -> bool {
    /// More than the kernel allows a process, with its usual limits.
    const MAX: u64 = 8 << 20;
    const LOOKS: u32 = 20;
    const LOOK_DELAY: Duration = Duration::from_millis(1);
    for _ in 0..LOOKS {
        let mut environment = Vec::new();
        let read = fs::File::open(format!("/proc/{pid}/environ"))
            .and_then(|file| file.take(MAX).read_to_end(&mut environment));
        if read.is_err() || !environment.is_empty() {
            return read.is_ok() && environment.windows(tag.len()).any(|part| part == tag);
        }
        if !fs::read(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_in_execve(&stat)) {
            return false;
        }
        std::thread::sleep(LOOK_DELAY);
    }
    false
}

fn me() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn reap(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Makes this process a subreaper; returns whether this call has made it one.
#[cfg(target_os = "linux")]
fn become_reaper() -> bool {
    use rustix::process::{child_subreaper, getpid, set_child_subreaper};
    // A program that is a subreaper already handles its orphans itself.
    child_subreaper() == Ok(None) && set_child_subreaper(Some(getpid())).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn become_reaper() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_seen() {
        let members = JobProcesses::new(false).unwrap();
        let running = members.running(&[rustix::process::getpgrp()]).unwrap();
        assert!(running.in_groups && !running.is_empty());
        assert!(all().unwrap().iter().any(|process| process.pid == me() && !process.is_dead()));
    }

    #[test]
    fn a_tag_is_found_in_another_session_and_told_from_its_neighbours() {
        let mut members = JobProcesses::new(false).unwrap();
        let (first, second) = (members.next_tag(), members.next_tag());
        let mut child = std::process::Command::new("setsid")
            .args(["-w", "sleep", "600"])
            .env(TAG_VARIABLE, &second)
            .spawn()
            .unwrap();
        // In the middle of `execve`, first of `setsid` and then of `sleep`, it has no environment.
        let deadline = Instant::now() + Duration::from_secs(60);
        let read = |file| fs::read(format!("/proc/{}/{file}", child.id())).unwrap();
        while !read("cmdline").starts_with(b"sleep") || read("environ").is_empty() {
            assert!(Instant::now() < deadline, "it was not executed");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!members.running(&[]).unwrap().is_empty());
        assert!(members.tagged(&first).unwrap().is_empty());
        members.kill_tagged(&first, Deadline::after(Duration::from_secs(60)));
        assert!(!members.tagged(&second).unwrap().is_empty());
        members.kill_tagged(&second, Deadline::after(Duration::from_secs(60)));
        assert!(members.running(&[]).unwrap().is_empty());
        child.wait().unwrap();
    }

    #[test]
    fn those_with_certain_identities_are_found_with_what_they_have_started() {
        let stat =
            |pid, parent, started| ProcStat { pid, state: b'S', parent, group: pid, worked: 0, started };
        let processes = [stat(3, 1, 10), stat(4, 3, 20), stat(5, 4, 30), stat(6, 1, 10)];
        let running = RunningProcesses { in_groups: false, strays: processes.map(Stray).into() };
        let found = |roots: &[ProcessId]| -> Vec<i32> {
            running.with_descendants(roots.iter().copied().collect()).map(|stray| stray.0.pid).collect()
        };
        assert_eq!(found(&[ProcessId(3, 10)]), [3, 4, 5]);
        assert_eq!(found(&[ProcessId(4, 20), ProcessId(6, 10)]), [4, 5, 6]);
        assert!(found(&[]).is_empty());
    }

    #[test]
    fn children_of_children_are_found_in_any_order() {
        let stat = |pid, parent| ProcStat { pid, state: b'S', parent, group: pid, worked: 0, started: 0 };
        let mut ours = HashSet::from([4]);
        add_children(&[stat(2, 3), stat(3, 4), stat(5, 1)], &mut ours);
        assert_eq!(ours, HashSet::from([2, 3, 4]));
    }

    #[test]
    fn the_guard_is_no_stray_even_if_nothing_else_is_known_of_it() {
        let mut members = JobProcesses::new(false).unwrap();
        let tag = members.next_tag();
        let mut child =
            std::process::Command::new("sleep").arg("60").env(TAG_VARIABLE, &tag).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while members.running(&[]).unwrap().is_empty() {
            assert!(Instant::now() < deadline, "it was not seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        members.guard = (i32::try_from(child.id()).unwrap(), 0);
        assert!(members.running(&[]).unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_first_process_of_a_container_knows_its_own_by_the_tag_alone() {
        let orphan = ProcStat { pid: 9, state: b'S', parent: 1, group: 9, worked: 0, started: 0 };
        assert!(!is_adopted(&orphan, 1));
        assert!(is_adopted(&ProcStat { parent: 7, ..orphan }, 7) && !is_adopted(&orphan, 7));
    }
}
