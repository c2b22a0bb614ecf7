//! Which processes belong to a job: the workers' process groups, and whatever workers have put elsewhere, into sessions and
//! groups of its own.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

use phalanx_sys::guard::Tag;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid,
};

use super::job::random_name;
use crate::error::Result;

/// What a process of a job has in its environment: the tags of the jobs that it is of, one inside the other.
pub(super) const TAG_VARIABLE: &str = "PHALANX_JOB_TAG";
/// How often the ends of adopted processes are taken note of.
const REAP_EVERY: Duration = Duration::from_secs(60);

/// Knows the processes of one attempt again.
#[derive(Debug)]
pub(super) struct Members {
    tag: Tag,
    /// The workers that were started so far.
    started: u32,
    /// The guard, from which on all of the job was started.
    guard: Option<Stat>,
    /// Is this process the one to which what loses its parent belongs?
    adopts: bool,
    reap_at: Instant,
}

/// Those that run now.
#[derive(Debug, Default)]
pub(super) struct Running {
    in_groups: bool,
    /// Those in none of the groups.
    pub(super) strays: Vec<Stray>,
}

/// A process outside the workers' groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stray(Stat);

impl Running {
    pub(super) fn is_empty(&self) -> bool {
        !self.in_groups && self.strays.is_empty()
    }
}

impl Stray {
    pub(super) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.0.pid) else { return };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // Its number could belong to another process by now.
            Ok(process) if Stat::of(self.0.pid).is_some_and(|now| now.started == self.0.started) => {
                let _ = pidfd_send_signal(process, signal);
            }
            Err(rustix::io::Errno::NOSYS) => drop(kill_process(pid, signal)),
            Ok(_) | Err(_) => {}
        }
    }
}

impl Members {
    /// With `adopts`, processes of the job that lose their parent become children of this one.
    pub(super) fn new(adopts: bool) -> Result<Self> {
        let mut tag = Tag::default();
        // Two names of 16 digits each.
        for (digit, drawn) in tag.iter_mut().zip((random_name()? + &random_name()?).bytes()) {
            *digit = drawn;
        }
        // Who has other children cannot tell what they lose from what the job loses.
        let me = me();
        let adopts = adopts && Stat::all().all(|process| process.parent != me) && become_reaper();
        Ok(Self { tag, started: 0, guard: None, adopts, reap_at: Instant::now() + REAP_EVERY })
    }

    pub(super) fn tag(&self) -> &Tag {
        &self.tag
    }

    /// All of the job are started after this process.
    pub(super) fn begin_with(&mut self, guard: u32) {
        self.guard = i32::try_from(guard).ok().and_then(Stat::of);
    }

    /// The tag of the next worker: what it starts can be told from what others start.
    pub(super) fn next_tag(&mut self) -> String {
        self.started += 1;
        format!("{}.{}.", String::from_utf8_lossy(&self.tag), self.started)
    }

    /// When to [look](Self::look) at the latest.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.adopts.then_some(self.reap_at)
    }

    /// Takes note of the ends of processes that were adopted, now and then.
    pub(super) fn reap(&mut self, groups: &[Pid]) {
        if self.adopts && Instant::now() >= self.reap_at {
            self.look(groups);
            self.reap_at = Instant::now() + REAP_EVERY;
        }
    }

    /// What runs of the job. Zombies do not count: a worker that has ended is kept as one, so that its number, which is its
    /// group's, cannot become somebody else's.
    ///
    /// Where there is no `/proc`, nobody is seen.
    pub(super) fn look(&self, groups: &[Pid]) -> Running {
        let groups: HashSet<i32> = groups.iter().map(|leader| leader.as_raw_nonzero().get()).collect();
        let (me, guard) = (me(), self.guard.map_or(0, |guard| guard.pid));
        let processes: Vec<Stat> = Stat::all().filter(|process| process.pid != guard).collect();
        let adopted = |process: &Stat| self.adopts && process.parent == me;
        let mut ours: HashSet<i32> = HashSet::new();
        for process in &processes {
            if groups.contains(&process.group) || groups.contains(&process.pid) {
                ours.insert(process.pid);
            } else if adopted(process) {
                if process.is_dead {
                    reap(process.pid);
                }
                ours.insert(process.pid);
            }
        }
        self.add_tagged(&self.tag, &processes, &mut ours);
        let live = || processes.iter().filter(|process| !process.is_dead && ours.contains(&process.pid));
        Running {
            in_groups: live().any(|process| groups.contains(&process.group)),
            strays: live()
                .filter(|process| !groups.contains(&process.group))
                .map(|process| Stray(*process))
                .collect(),
        }
    }

    /// What runs of all that carries the tag of one worker, and of what that has started.
    pub(super) fn tagged(&self, tag: &str) -> Vec<Stray> {
        let processes: Vec<Stat> = Stat::all().collect();
        let mut ours = HashSet::new();
        self.add_tagged(tag.as_bytes(), &processes, &mut ours);
        let live = processes.iter().filter(|process| !process.is_dead && ours.contains(&process.pid));
        live.map(|process| Stray(*process)).collect()
    }

    /// Adds to `ours` who carries `tag`, and all children of those.
    fn add_tagged(&self, tag: &[u8], processes: &[Stat], ours: &mut HashSet<i32>) {
        add_children(processes, ours);
        let since = self.guard.map_or(0, |guard| guard.started);
        for process in processes {
            let may_be = !process.is_dead && process.started >= since && !ours.contains(&process.pid);
            if may_be && carries(process.pid, tag) {
                ours.insert(process.pid);
            }
        }
        add_children(processes, ours);
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        if self.adopts {
            self.look(&[]);
            #[cfg(target_os = "linux")]
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}

/// A line of `/proc/*/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    pid: i32,
    is_dead: bool,
    parent: i32,
    group: i32,
    /// In the kernel's ticks since its own start.
    started: u64,
}

impl Stat {
    fn all() -> impl Iterator<Item = Self> {
        let folders = fs::read_dir("/proc").into_iter().flatten().flatten();
        folders.filter_map(|folder| Self::of(folder.file_name().to_str()?.parse().ok()?))
    }

    fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// `pid (name) state parent group ..`. The name may hold anything, also brackets.
    fn parse(line: &[u8]) -> Option<Self> {
        let pid = str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?.parse().ok()?;
        let after_name = line.iter().rposition(|byte| *byte == b')')? + 1;
        let mut fields = str::from_utf8(&line[after_name..]).ok()?.split_whitespace();
        let is_dead = matches!(fields.next()?, "Z" | "X" | "x");
        let (parent, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let started = fields.nth(16)?.parse().ok()?;
        Some(Self { pid, is_dead, parent, group, started })
    }
}

/// Adds the children of those that are there, and theirs.
fn add_children(processes: &[Stat], ours: &mut HashSet<i32>) {
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

/// Does this process have `tag` in its environment? Of another user's nothing is known.
fn carries(pid: i32, tag: &[u8]) -> bool {
    /// More than the kernel lets a process have, with its usual limits.
    const MAX: u64 = 8 << 20;
    let mut environment = Vec::new();
    let read = fs::File::open(format!("/proc/{pid}/environ"))
        .and_then(|file| file.take(MAX).read_to_end(&mut environment));
    read.is_ok() && environment.windows(tag.len()).any(|part| part == tag)
}

fn me() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn reap(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Makes this process the one to which what loses its parent below it belongs; is it that now, because of this call?
#[cfg(target_os = "linux")]
fn become_reaper() -> bool {
    use rustix::process::{child_subreaper, getpid, set_child_subreaper};
    // A program that is one already does with its orphans what it does.
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
    fn a_process_is_read_behind_any_name() {
        let line = b"12 (a) b (c)) S 1 77 12 0 -1 4194304 95 0 0 0 0 0 0 0 20 0 1 0 4711 2588672 210";
        let expected = Stat { pid: 12, is_dead: false, parent: 1, group: 77, started: 4711 };
        assert_eq!(Stat::parse(line), Some(expected));
        assert_eq!(Stat::parse(b"12 (sh"), None);
        assert_eq!(Stat::parse(b"12 (sh) Z 1 77 12 0 -1"), None);
    }

    #[test]
    fn this_process_is_seen() {
        let members = Members::new(false).unwrap();
        let running = members.look(&[rustix::process::getpgrp()]);
        assert!(running.in_groups && !running.is_empty());
        let me = Stat::of(me()).unwrap();
        assert!(!me.is_dead && Stat::all().any(|process| process == me));
    }

    #[test]
    fn a_tag_is_found_in_another_session_and_told_from_its_neighbours() {
        let mut members = Members::new(false).unwrap();
        let (first, second) = (members.next_tag(), members.next_tag());
        let mut child = std::process::Command::new("setsid")
            .args(["-w", "sleep", "60"])
            .env(TAG_VARIABLE, &second)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while members.look(&[]).is_empty() {
            assert!(Instant::now() < deadline, "it was not seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(members.tagged(&first).is_empty() && !members.tagged(&second).is_empty());
        while !members.look(&[]).is_empty() {
            assert!(Instant::now() < deadline, "it was not killed");
            members.tagged(&second).iter().for_each(|stray| stray.signal(Signal::KILL));
        }
        child.wait().unwrap();
    }

    #[test]
    fn children_of_children_are_found_in_any_order() {
        let stat = |pid, parent| Stat { pid, is_dead: false, parent, group: pid, started: 0 };
        let mut ours = HashSet::from([4]);
        add_children(&[stat(2, 3), stat(3, 4), stat(5, 1)], &mut ours);
        assert_eq!(ours, HashSet::from([2, 3, 4]));
    }
}
