//! What to do now, as a function of the time and past events.

use std::time::Instant;

use super::{Action, Host, HostManager, HostState};
use crate::launch::slot::{Slot, SlotState};

impl HostManager {
    /// What is to be done now.
    pub fn decide(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.is_over {
            return actions;
        }
        self.decided = Some(now);
        if self.is_ending() {
            self.leave_empty(&mut actions);
        } else if !self.have_all_failed {
            self.retire(now, &mut actions);
            self.replace(now, &mut actions);
            self.launch(now, &mut actions);
            let expected = self.expected_workers();
            if self.expected != Some(expected) {
                self.expected = Some(expected);
                actions.push(Action::Expect { workers: expected });
            }
        }
        if let Some(there) = self.too_few(now) {
            self.is_over = true;
            actions.push(Action::TooFew { there });
        }
        actions
    }

    /// When to decide again, if nothing has happened.
    pub fn wake_at(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let limits = self.few_since.map(|since| since + self.limits.timeout);
        let waiting = self.hosts.iter().filter_map(|host| match host.state {
            HostState::Waiting { from } if host.is_listed => Some(from),
            _ => None,
        });
        let slots = self.hosts.iter().flat_map(Host::slots).filter_map(Slot::due_at);
        // A host that has been due for a while waits for room in the world, or for an end, and not for a time.
        let due = |at: &Instant| self.decided.is_none_or(|decided| *at > decided);
        limits.into_iter().chain(waiting).chain(slots).filter(due).min()
    }

    /// Hosts that are no longer listed, or with another number of slots.
    fn retire(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for (index, host) in self.hosts.iter_mut().enumerate() {
            let HostState::Active { listed_slots, .. } = host.state else { continue };
            if !host.is_listed || listed_slots != host.slots {
                let count = host.slots().len() as u32;
                host.state = HostState::Ending { from: now, count };
                actions.push(Action::Retire { host: index, is_listed: host.is_listed });
            }
        }
    }

    fn replace(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for (index, host) in self.hosts.iter_mut().enumerate() {
            let HostState::Active { slots, .. } = &mut host.state else { continue };
            for (number, slot) in (0..).zip(slots) {
                if slot.start_if_due(now) {
                    actions.push(Action::Replace { host: index, slot: number });
                }
            }
        }
    }

    /// A worker has succeeded, so no replacement is started any more. The launcher waits for the decision about the slot.
    fn leave_empty(&mut self, actions: &mut Vec<Action>) {
        for (index, host) in self.hosts.iter_mut().enumerate() {
            let HostState::Active { slots, .. } = &mut host.state else { continue };
            for (number, slot) in (0..).zip(slots) {
                if slot.due_at().is_some() {
                    slot.state = SlotState::Empty;
                    self.not_needed += 1;
                    actions.push(Action::LeaveEmpty { host: index, slot: number });
                }
            }
        }
    }

    /// Hosts fill the world in order.
    fn launch(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let mut active: u32 = self.hosts.iter().map(Host::active).sum();
        for index in 0..self.hosts.len() {
            let host = &self.hosts[index];
            let is_due = matches!(host.state, HostState::Waiting { from } if from <= now);
            let workers = host.slots.min(self.limits.max.saturating_sub(active));
            if !host.is_listed || !is_due || workers == 0 {
                continue;
            }
            let first = self.free_numbers(index, workers);
            let host = &mut self.hosts[index];
            host.first = Some(first);
            let mut slots = Slot::several(workers as usize, now);
            slots.iter_mut().for_each(|slot| slot.is_late = self.begun);
            host.state = HostState::Active { slots, listed_slots: host.slots, up: None };
            active += workers;
            actions.push(Action::Launch { host: index, first, slots: workers });
        }
    }

    /// The first of `count` consecutive numbers that no other host's workers have: those of the last time, or the
    /// lowest.
    fn free_numbers(&self, host: usize, count: u32) -> u32 {
        let others = self.hosts.iter().enumerate().filter(|(index, _)| *index != host);
        let mut taken: Vec<_> =
            others.map(|(_, other)| other.numbers()).filter(|range| !range.is_empty()).collect();
        let is_free = |first: &u32| {
            let end = first.saturating_add(count);
            taken.iter().all(|range| end <= range.start || range.end <= *first)
        };
        if let Some(first) = self.hosts[host].first.filter(is_free) {
            return first;
        }
        taken.sort_unstable_by_key(|range| range.start);
        let mut first: u32 = 0;
        for range in taken {
            if first.saturating_add(count) <= range.start {
                break;
            }
            first = first.max(range.end);
        }
        first
    }

    /// How many workers run, or will run soon.
    fn expected_workers(&self) -> u32 {
        self.hosts.iter().filter(|host| host.is_expected()).map(Host::active).sum()
    }

    /// The number of workers, if it is too small and no more will come.
    fn too_few(&mut self, now: Instant) -> Option<u32> {
        let ended = self.done + self.not_needed;
        let active = self.hosts.iter().map(Host::active).sum::<u32>();
        if self.have_all_failed {
            return Some(active + ended);
        }
        if self.is_ending() {
            // Nobody is waited for.
            self.few_since = None;
            return (active + ended < self.limits.min).then_some(active + ended);
        }
        // A host that has failed, and is tried again, may fail again: each try would begin the time anew, and there would be no end of tries.
        let there = self.expected_workers() + ended;
        if there >= self.limits.min {
            self.few_since = None;
            return None;
        }
        let coming = self.hosts.iter().filter(|host| host.is_listed).map(|host| match host.state {
            HostState::Waiting { .. } | HostState::Ending { .. } => host.slots,
            HostState::Active { .. } if !host.is_expected() => host.active(),
            HostState::Active { .. } | HostState::GivenUp => 0,
        });
        let enough = coming.sum::<u32>().saturating_add(there) >= self.limits.min;
        // If none of them could start, the reason will be the same the next time. A host that was added may be a machine that is still starting.
        let is_settled = !self.limits.is_open && !self.hosts.is_empty();
        let hopeless = is_settled && !self.begun && self.hosts.iter().all(|host| host.failures > 0);
        if hopeless || !(enough || self.limits.is_open) {
            return Some(there);
        }
        let since = *self.few_since.get_or_insert(now);
        (now.saturating_duration_since(since) >= self.limits.timeout).then_some(there)
    }
}
