//! The host manager of an elastic job decides which hosts take part, and which workers are replaced. It is pure: events and
//! the time go in, actions come out.
//!
//! ```text
//!               Launch                      up              Retire
//!   Waiting --------------> Active, starting ----> Active, up --------> Ending
//!      ^                          |                    |                   |
//!      |        cool-down         v                    v                   v
//!      +------------------------ lost --- lost, which costs a restart --- ended
//! ```

mod decide;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::launch::slot::{Slot, SlotState};

/// The limits that the user has set.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The smallest number of workers.
    pub min: u32,
    /// The largest number of workers.
    pub max: u32,
    /// How often a worker, or a host that has worked, may be started again. With [`NO_LIMIT`] the job ends when all workers have failed: no
    /// one holds the state then, and the next ones would begin anew and fail again, without an end.
    pub max_restarts: u32,
    /// How long a host is left out after a failure, the first time and at most.
    pub cool_down: (Duration, Duration),
    /// How long there may be too few workers, as long as hosts may come.
    pub timeout: Duration,
    /// Whether hosts may be added that are not listed yet.
    pub is_open: bool,
}

/// As [`Limits::max_restarts`]: any number of times.
pub const NO_LIMIT: u32 = u32::MAX;

/// So many hosts are remembered that are not listed, and do not run.
const MAX_REMEMBERED: usize = 1024;

/// The hosts of a job, by number; a host keeps its number as long as it is listed, runs, or is left out.
#[derive(Debug)]
pub struct HostManager {
    limits: Limits,
    hosts: Vec<Host>,
    used: u32,
    /// How many workers have ended with success.
    done: u32,
    /// Replacements that were decided and not started, because a worker had succeeded meanwhile; they count as
    /// successful.
    not_needed: u32,
    /// Whether any host has ever been up.
    begun: bool,
    /// Whether no worker is left that holds the state, in a job whose restarts have no limit.
    have_all_failed: bool,
    few_since: Option<Instant>,
    expected: Option<u32>,
    /// When the last decision was made.
    decided: Option<Instant>,
    is_over: bool,
}

#[derive(Debug)]
struct Host {
    name: String,
    /// Its [`host_key`].
    key: String,
    slots: u32,
    /// Whether it is listed now.
    is_listed: bool,
    state: HostState,
    /// The number of its first worker in its last start.
    first: Option<u32>,
    /// Its failures in a row.
    failures: u32,
}

#[derive(Debug)]
enum HostState {
    /// It may be started from this time on.
    Waiting { from: Instant },
    /// A launcher runs there or is being started. So many slots were listed; the world may have had room for fewer.
    Active { slots: Vec<Slot>, listed_slots: u32, up: Option<Instant> },
    /// Its launcher was told to end; it may be started again from this time on.
    Ending { from: Instant, count: u32 },
    /// It has failed, and no restart was left.
    GivenUp,
}

/// An action for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a launcher.
    Launch {
        /// The number of the host.
        host: usize,
        /// The number of its first worker; the others follow.
        first: u32,
        /// How many workers it starts, each in a slot.
        slots: u32,
    },
    /// Start another worker in this slot.
    Replace {
        /// The number of the host.
        host: usize,
        /// The slot on that host, from 0.
        slot: u32,
    },
    /// Leave this slot empty, though another worker was promised for it.
    LeaveEmpty {
        /// The number of the host.
        host: usize,
        /// The slot on that host, from 0.
        slot: u32,
    },
    /// End the workers of this host: it is listed with another number of slots, or not at all.
    Retire {
        /// The number of the host.
        host: usize,
        /// Whether the host is still listed.
        is_listed: bool,
    },
    /// Tell the workers how many there are.
    Expect {
        /// How many run, or will run soon.
        workers: u32,
    },
    /// End the job: too few workers are left, and no more have come in time.
    TooFew {
        /// How many are left, with those that have ended well or are not needed any more.
        there: u32,
    },
}

/// What a host's name has in common with its other spellings: capitals count in a user's name alone, and a dot may end a host's.
pub fn host_key(name: &str) -> String {
    let (user, address) = name.split_at(name.rfind('@').map_or(0, |at| at + 1));
    user.to_owned() + &address.trim_end_matches('.').to_ascii_lowercase()
}

/// What to do about the failure of a slot's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostDecision {
    /// Start another worker in the slot, after a while.
    Replace {
        /// How long the slot stays empty; may be zero.
        after: Duration,
    },
    /// Leave the slot empty.
    LeaveEmpty,
    /// Leave the slot empty, and start nothing on the whole host for a while.
    ExcludeHost {
        /// How long, from now.
        pause: Duration,
    },
}

impl Host {
    /// The slots of the running launcher.
    fn slots(&self) -> &[Slot] {
        match &self.state {
            HostState::Active { slots, .. } => slots,
            _ => &[],
        }
    }

    /// How many of its workers run or will run again.
    fn active(&self) -> u32 {
        self.slots().iter().filter(|slot| slot.is_running() || slot.due_at().is_some()).count() as u32
    }

    /// The numbers that its workers have.
    fn numbers(&self) -> std::ops::Range<u32> {
        let count = match &self.state {
            HostState::Active { slots, .. } => slots.len() as u32,
            HostState::Ending { count, .. } => *count,
            HostState::Waiting { .. } | HostState::GivenUp => 0,
        };
        let first = self.first.unwrap_or(0);
        first..first.saturating_add(count)
    }

    /// Whether its workers will run soon. After a failure, only when its launcher has answered again.
    fn is_expected(&self) -> bool {
        matches!(self.state, HostState::Active { up, .. } if up.is_some() || self.failures == 0)
    }
}

impl HostManager {
    /// A manager without hosts: [`list`](Self::list) adds them.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            hosts: Vec::new(),
            used: 0,
            done: 0,
            not_needed: 0,
            begun: false,
            have_all_failed: false,
            few_since: None,
            expected: None,
            decided: None,
            is_over: false,
        }
    }

    /// The list of hosts, each with its number of workers. A host that is left out stays so for the same time. It keeps its name when a later
    /// list spells that in another way.
    pub fn list<'a>(&mut self, hosts: impl IntoIterator<Item = (&'a str, u32)>, now: Instant) {
        // A list comes each second, and may be long: no host is looked for among all.
        let mut listed = BTreeMap::new();
        let mut names = Vec::new();
        for (name, slots) in hosts {
            if listed.insert(host_key(name), slots).is_none() {
                names.push(name);
            }
        }
        for host in &mut self.hosts {
            let slots = listed.remove(&host.key);
            (host.is_listed, host.slots) = (slots.is_some(), slots.unwrap_or(host.slots));
        }
        // A new host takes no place of one that is named later in the list.
        for name in names {
            if let Some(slots) = listed.remove(&host_key(name)) {
                self.add(name, slots, now);
            }
        }
        // A host that comes back later may be another machine.
        for host in self.hosts.iter_mut().filter(|host| !host.is_listed) {
            if matches!(host.state, HostState::GivenUp) {
                host.state = HostState::Waiting { from: now };
            }
        }
    }

    /// A host that has not been listed before, or not for long. Names that never come again, such as those that a cloud makes for each new
    /// machine, would fill the memory of a long job.
    fn add(&mut self, name: &str, slots: u32, now: Instant) {
        let host = Host {
            name: name.to_owned(),
            key: host_key(name),
            slots,
            is_listed: true,
            state: HostState::Waiting { from: now },
            first: None,
            failures: 0,
        };
        let is_forgotten = |host: &Host| {
            let is_idle = matches!(host.state, HostState::Waiting { from } if from <= now);
            is_idle && !host.is_listed
        };
        let is_full = self.hosts.len() >= MAX_REMEMBERED;
        match self.hosts.iter().position(is_forgotten).filter(|_| is_full) {
            Some(place) => self.hosts[place] = host,
            None => self.hosts.push(host),
        }
    }

    /// The name of a host, as it was listed. Panics if no host has this number.
    pub fn name(&self, host: usize) -> &str {
        &self.hosts[host].name
    }

    /// How often a worker or a host was started again, or is about to be, and the limit.
    pub fn restarts(&self) -> (u32, u32) {
        (self.used, self.limits.max_restarts)
    }

    /// Its launcher has answered, and its workers start.
    pub fn up(&mut self, host: usize, now: Instant) {
        if let HostState::Active { up: up @ None, slots, .. } = &mut self.hosts[host].state {
            *up = Some(now);
            // A worker may have failed before this message came.
            for slot in slots.iter_mut().filter(|slot| slot.is_running()) {
                slot.state = SlotState::Running { since: now };
            }
            self.begun = true;
        }
    }

    /// A worker has failed.
    pub fn failed(&mut self, host: usize, slot: u32, now: Instant) -> HostDecision {
        let enough_elsewhere = {
            let others = self.hosts.iter().enumerate().filter(|(index, _)| *index != host);
            others.map(|(_, other)| other.active()).sum::<u32>() >= self.limits.min
        };
        let HostState::Active { slots, .. } = &mut self.hosts[host].state else {
            return HostDecision::LeaveEmpty;
        };
        // A worker that does not run cannot fail, whatever a launcher reports.
        let running = slots.get_mut(slot as usize).filter(|slot| slot.is_running());
        let Some(running) = running else { return HostDecision::LeaveEmpty };
        let pause = running.fail(now);
        let may = self.may_restart(now);
        match pause {
            Some(after) if may => {
                if let HostState::Active { slots, .. } = &mut self.hosts[host].state
                    && let Some(slot) = slots.get_mut(slot as usize)
                {
                    slot.state = SlotState::Restarting { at: now + after };
                }
                self.used += 1;
                HostDecision::Replace { after }
            }
            // The other workers of this host end too. They hold the state, so there must be others elsewhere.
            None if may && enough_elsewhere => {
                self.used += 1;
                HostDecision::ExcludeHost { pause: self.exclude(host, now) }
            }
            _ => HostDecision::LeaveEmpty,
        }
    }

    /// A worker has ended well.
    pub fn done(&mut self, host: usize, slot: u32) {
        if let HostState::Active { slots, .. } = &mut self.hosts[host].state
            && let Some(slot) = slots.get_mut(slot as usize).filter(|slot| slot.is_running())
        {
            slot.state = SlotState::Succeeded;
            self.done += 1;
        }
    }

    /// Its launcher has ended without being told to, or could not be reached. Returns how long the host is left out;
    /// none if it is for good.
    pub fn lost(&mut self, host: usize, now: Instant) -> Option<Duration> {
        if let HostState::Ending { .. } = self.hosts[host].state {
            self.ended(host);
            return None;
        }
        let HostState::Active { up, .. } = self.hosts[host].state else { return None };
        self.forgive(host, now);
        if up.is_some() {
            self.hosts[host].state = HostState::GivenUp;
            if !self.may_restart(now) {
                return None;
            }
            self.used += 1;
        }
        let pause = self.pause(host);
        self.hosts[host].state = HostState::Waiting { from: now + pause };
        Some(pause)
    }

    /// Its launcher has ended as expected: it was told to, or no worker of it was left.
    pub fn ended(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        host.state = match host.state {
            HostState::Ending { from, .. } => HostState::Waiting { from },
            _ => HostState::GivenUp,
        };
    }

    /// Whether a worker has ended well. It does so only after all others have finished the work, so no further worker is
    /// started.
    pub fn is_ending(&self) -> bool {
        self.done > 0
    }

    /// Whether enough workers have ended well, if none is left.
    pub fn have_enough_succeeded(&self) -> bool {
        self.is_ending() && self.done + self.not_needed >= self.limits.min
    }

    /// Whether, at the last decision, enough workers ran or were about to.
    pub fn had_enough(&self) -> bool {
        self.decided.is_some() && self.few_since.is_none() && !self.is_over
    }

    /// Whether a worker, or a host, may be started again after a failure.
    fn may_restart(&mut self, now: Instant) -> bool {
        if self.is_ending() {
            return false;
        }
        self.have_all_failed |= self.limits.max_restarts == NO_LIMIT && !self.is_state_held(now);
        !self.have_all_failed && self.used < self.limits.max_restarts
    }

    /// Whether a worker runs that may hold the job's state. One of a host that was told to end may still do so.
    fn is_state_held(&self, now: Instant) -> bool {
        self.hosts.iter().any(|host| {
            if matches!(host.state, HostState::Ending { count: 1.., .. }) {
                return true;
            }
            let is_up = matches!(host.state, HostState::Active { up: Some(_), .. });
            host.slots().iter().any(|slot| (is_up || !slot.is_late) && slot.may_hold_state(now))
        })
    }

    /// Forgets the host's failures if it has worked for long since the last one: in a job of weeks they are no row.
    fn forgive(&mut self, host: usize, now: Instant) {
        let host = &mut self.hosts[host];
        if let HostState::Active { up: Some(since), .. } = host.state
            && now.saturating_duration_since(since) >= self.limits.cool_down.1
        {
            host.failures = 0;
        }
    }

    /// How long the host is left out after one more failure.
    fn pause(&mut self, host: usize) -> Duration {
        let host = &mut self.hosts[host];
        host.failures = host.failures.saturating_add(1);
        let (first, most) = self.limits.cool_down;
        let doubled = 2_u32.checked_pow(host.failures - 1).and_then(|times| first.checked_mul(times));
        doubled.unwrap_or(most).min(most)
    }

    /// Its workers are ended, and it may be started again later.
    fn exclude(&mut self, host: usize, now: Instant) -> Duration {
        self.forgive(host, now);
        let pause = self.pause(host);
        let count = self.hosts[host].slots().len() as u32;
        self.hosts[host].state = HostState::Ending { from: now + pause, count };
        pause
    }
}

#[cfg(test)]
mod tests;
