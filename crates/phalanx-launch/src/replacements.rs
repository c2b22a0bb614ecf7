//! Which workers of an elastic job are replaced, and when: pure.

use std::time::{Duration, Instant};

use super::exit::Exit;
use super::slot::{Slot, SlotState};

/// The slots of an elastic job's workers on this node.
#[derive(Debug)]
pub(super) struct Replacements {
    /// With fewer workers the job ends.
    min: usize,
    allowed: u32,
    used: u32,
    /// Whether the driver decides which workers are replaced.
    driver_decides: bool,
    slots: Vec<Slot>,
    /// How the last worker that failed in each slot ended.
    exits: Vec<Exit>,
}

/// What to do about the failure of a slot's worker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OnFailure {
    /// Replace it after this time.
    Replace { after: Duration },
    /// Do not replace it; the others go on.
    LeaveEmpty,
    /// End the job: too few are left.
    TooFew,
    /// Ask the driver.
    AskDriver,
}

impl Replacements {
    /// `workers` start now; with fewer than `min` the job ends.
    pub(super) fn new(workers: usize, min: usize, allowed: u32, now: Instant) -> Self {
        let (slots, exits) = (Slot::several(workers, now), vec![Exit::Lost; workers]);
        Self { min, allowed, used: 0, driver_decides: false, slots, exits }
    }

    /// The slots of an agent: `workers` start now, and the driver decides about replacements, and how many workers are too
    /// few.
    pub(super) fn of_agent(workers: usize, now: Instant) -> Self {
        Self { driver_decides: true, ..Self::new(workers, 0, 0, now) }
    }

    /// How often a worker has been replaced, or is about to be, and the limit.
    pub(super) fn count(&self) -> (u32, u32) {
        (self.used, self.allowed)
    }

    pub(super) fn ended_well(&mut self, worker: usize) {
        self.slots[worker].state = SlotState::Succeeded;
    }

    pub(super) fn failed(&mut self, worker: usize, exit: Exit, now: Instant) -> OnFailure {
        // The first worker that ends well does so after all have finished the work: no worker is started any more.
        let is_ending = self.slots.iter().any(|slot| slot.state == SlotState::Succeeded);
        self.exits[worker] = exit;
        let slot = &mut self.slots[worker];
        if self.driver_decides {
            slot.state = SlotState::Undecided;
            return OnFailure::AskDriver;
        }
        let pause = slot.fail(now).filter(|_| !is_ending && self.used < self.allowed);
        if let Some(after) = pause {
            self.used += 1;
            slot.state = SlotState::Restarting { at: now + after };
            return OnFailure::Replace { after };
        }
        let there = self.slots.iter().filter(|slot| slot.state != SlotState::Empty).count();
        if there < self.min { OnFailure::TooFew } else { OnFailure::LeaveEmpty }
    }

    /// The driver has decided to replace a slot's worker now.
    pub(super) fn replace(&mut self, worker: usize, now: Instant) {
        if let Some(slot) = self.slots.get_mut(worker).filter(|slot| slot.state == SlotState::Undecided) {
            slot.state = SlotState::Restarting { at: now };
        }
    }

    /// The driver has decided to leave a slot empty. Returns how its last worker ended.
    pub(super) fn leave_empty(&mut self, worker: usize) -> Option<Exit> {
        let slot = self.slots.get_mut(worker).filter(|slot| slot.state == SlotState::Undecided)?;
        slot.state = SlotState::Empty;
        Some(self.exits[worker])
    }

    /// A slot whose next worker is due; it counts as started.
    pub(super) fn due(&mut self, now: Instant) -> Option<usize> {
        self.slots.iter_mut().position(|slot| slot.start_if_due(now))
    }

    /// A slot's worker, which was due, could not be started yet. This is no failure of it.
    pub(super) fn put_off(&mut self, worker: usize, at: Instant) {
        if let Some(slot) = self.slots.get_mut(worker) {
            slot.state = SlotState::Restarting { at };
        }
    }

    /// When the next worker is due.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.slots.iter().filter_map(Slot::due_at).min()
    }

    /// The job ends: pending replacements will not be started. Returns their slots, with how the workers before them
    /// ended.
    pub(super) fn cancel(&mut self) -> Vec<(usize, Exit)> {
        let mut cancelled = Vec::new();
        for (worker, slot) in self.slots.iter_mut().enumerate() {
            if slot.due_at().is_some() || slot.state == SlotState::Undecided {
                self.used -= u32::from(!self.driver_decides);
                slot.state = SlotState::Empty;
                cancelled.push((worker, self.exits[worker]));
            }
        }
        cancelled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAD: Exit = Exit::Code(1);
    const AT_ONCE: OnFailure = OnFailure::Replace { after: Duration::ZERO };

    fn later(now: Instant, seconds: u64) -> Instant {
        now + Duration::from_secs(seconds)
    }

    #[test]
    fn one_that_has_lived_is_replaced_at_once_as_often_as_allowed() {
        let start = Instant::now();
        let mut replacements = Replacements::new(3, 2, 2, start);
        for seconds in [10, 20] {
            let now = later(start, seconds);
            assert_eq!(replacements.failed(1, BAD, now), AT_ONCE);
            assert_eq!((replacements.wake_at(), replacements.due(now)), (Some(now), Some(1)));
            assert_eq!((replacements.wake_at(), replacements.due(now)), (None, None));
        }
        assert_eq!(replacements.count(), (2, 2));
        assert_eq!(replacements.failed(1, BAD, later(start, 30)), OnFailure::LeaveEmpty);
        assert_eq!(replacements.failed(0, BAD, later(start, 31)), OnFailure::TooFew);
    }

    #[test]
    fn one_that_fails_at_once_again_and_again_is_given_up() {
        let mut now = Instant::now();
        let mut replacements = Replacements::new(2, 1, 100, now);
        for seconds in [0, 1, 2] {
            let after = Duration::from_secs(seconds);
            assert_eq!(replacements.failed(0, BAD, now), OnFailure::Replace { after });
            if seconds > 0 {
                assert_eq!(replacements.due(now), None);
            }
            now += after;
            assert_eq!(replacements.due(now), Some(0));
        }
        assert_eq!(replacements.failed(0, BAD, now), OnFailure::LeaveEmpty);
        // One that lives for a while between two failures is another matter.
        for _ in 0..10 {
            now += Duration::from_secs(2);
            assert_eq!(replacements.failed(1, BAD, now), AT_ONCE);
            assert_eq!(replacements.due(now), Some(1));
        }
    }

    #[test]
    fn one_for_which_there_is_no_room_yet_is_started_later_at_no_cost() {
        let start = Instant::now();
        let mut replacements = Replacements::new(2, 2, 1, start);
        let mut now = later(start, 10);
        assert_eq!(replacements.failed(1, BAD, now), AT_ONCE);
        for _ in 0..10 {
            assert_eq!(replacements.due(now), Some(1));
            let at = later(now, 1);
            replacements.put_off(1, at);
            assert_eq!((replacements.due(now), replacements.wake_at()), (None, Some(at)));
            now = at;
        }
        assert_eq!((replacements.due(now), replacements.count()), (Some(1), (1, 1)));
    }

    #[test]
    fn nobody_begins_when_one_has_ended_well_or_the_job_ends() {
        let now = Instant::now();
        let mut replacements = Replacements::new(3, 1, 5, now);
        assert_eq!(replacements.failed(2, BAD, later(now, 9)), AT_ONCE);
        assert_eq!(replacements.cancel(), [(2, BAD)]);
        assert_eq!((replacements.wake_at(), replacements.count().0), (None, 0));
        replacements.ended_well(0);
        assert_eq!(replacements.failed(1, BAD, later(now, 9)), OnFailure::LeaveEmpty);
    }

    #[test]
    fn where_it_is_decided_elsewhere_a_place_waits_for_the_word() {
        let now = Instant::now();
        let mut replacements = Replacements::of_agent(3, now);
        for worker in 0..3 {
            assert_eq!(replacements.failed(worker, BAD, now), OnFailure::AskDriver);
        }
        assert_eq!((replacements.wake_at(), replacements.due(now)), (None, None));
        replacements.replace(1, now);
        assert_eq!((replacements.due(now), replacements.due(now)), (Some(1), None));
        assert_eq!(
            (replacements.leave_empty(0), replacements.leave_empty(0), replacements.leave_empty(9)),
            (Some(BAD), None, None)
        );
        // An instruction that comes twice, or too late, starts no worker.
        replacements.replace(0, now);
        replacements.replace(1, now);
        assert_eq!((replacements.due(now), replacements.cancel()), (None, vec![(2, BAD)]));
    }
}
