//! Hosts that come, go and fail, and whoever leads them.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const FIRST_DELAY: Duration = Duration::from_secs(5);
const MAX_DELAY: Duration = Duration::from_secs(20);
const TIMEOUT: Duration = Duration::from_secs(600);

fn limits(min: u32, max: u32, max_restarts: u32) -> Limits {
    Limits { min, max, max_restarts, cool_down: (FIRST_DELAY, MAX_DELAY), timeout: TIMEOUT, is_open: false }
}

fn manager_of(limits: Limits, hosts: &[(&str, u32)], now: Instant) -> HostManager {
    let mut manager = HostManager::new(limits);
    manager.list(hosts.iter().copied(), now);
    manager
}

fn launch(host: usize, first: u32, slots: u32) -> Action {
    Action::Launch { host, first, slots }
}

fn expect(workers: u32) -> Action {
    Action::Expect { workers }
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn hosts_fill_the_world_in_order_and_one_that_waits_takes_the_place_of_one_that_is_lost() {
    let now = crate::some_time();
    let mut manager = manager_of(limits(1, 3, 9), &[("a", 2), ("b", 2), ("c", 1)], now);
    assert_eq!(manager.decide(now), [launch(0, 0, 2), launch(1, 2, 1), expect(3)]);
    (0..2).for_each(|host| manager.up(host, now));
    assert_eq!(manager.decide(now), []);
    assert_eq!(manager.lost(0, now), Some(FIRST_DELAY));
    // The third has room now, and takes the numbers that are free; it is counted on at once, as it has not failed yet.
    assert_eq!(manager.decide(now), [launch(2, 0, 1), expect(2)]);
    assert_eq!(manager.wake_at(), Some(now + FIRST_DELAY));
    // Of two numbers one is taken. It is not counted on before it is up.
    let now = now + FIRST_DELAY;
    assert_eq!(manager.decide(now), [launch(0, 1, 1)]);
    manager.up(0, now);
    assert_eq!(manager.decide(now), [expect(3)]);
    assert_eq!(manager.wake_at(), None);
}

/// If each looked at the numbers of all others for each number that might be free, this would take minutes.
#[test]
fn thousands_of_hosts_are_listed_and_launched() {
    const HOSTS: u32 = 4_000;
    let now = crate::some_time();
    let names: Vec<String> = (0..HOSTS).map(|host| format!("host-{host}")).collect();
    let hosts: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let mut manager = manager_of(limits(1, HOSTS, 9), &hosts, now);
    manager.list(hosts.iter().copied(), now);
    let actions = manager.decide(now);
    assert_eq!(actions.len(), HOSTS as usize + 1);
    assert_eq!((actions[7], actions[HOSTS as usize]), (launch(7, 7, 1), expect(HOSTS)));
    (0..HOSTS as usize).for_each(|host| manager.up(host, now));
    assert_eq!(manager.decide(now), []);
}

#[test]
fn a_host_that_a_later_list_spells_in_another_way_works_on() {
    let now = crate::some_time();
    let mut manager = manager_of(limits(1, 9, 9), &[("Node1.example", 1), ("me@node2", 1)], now);
    assert_eq!(manager.decide(now), [launch(0, 0, 1), launch(1, 1, 1), expect(2)]);
    (0..2).for_each(|host| manager.up(host, now));
    manager.list([("me@NODE2", 1), ("node1.Example.", 1)], now);
    assert_eq!((manager.decide(now), manager.name(0)), (vec![], "Node1.example"));
    // Users are told apart, and so are a short name and a full one: a host may have either without the other.
    manager.list([("me@node2", 1), ("node1.example", 1), ("Me@node2", 1), ("node1", 1)], now);
    assert_eq!(manager.decide(now), [launch(2, 2, 1), launch(3, 3, 1), expect(4)]);
}

#[test]
fn a_host_takes_the_lowest_numbers_of_which_enough_follow_each_other() {
    let now = crate::some_time();
    let mut manager = manager_of(limits(1, 9, 9), &[("a", 1), ("b", 2), ("c", 1), ("d", 2)], now);
    manager.decide(now);
    (0..4).for_each(|host| manager.up(host, now));
    // Of 0 to 5, 0 is free, and then 1 and 2 as well.
    manager.list([("b", 2), ("c", 1), ("d", 2)], now);
    assert_eq!(manager.decide(now)[0], Action::Retire { host: 0, is_listed: false });
    manager.ended(0);
    manager.list([("b", 2), ("c", 1), ("d", 2), ("e", 2)], now);
    assert_eq!(manager.decide(now)[0], launch(4, 6, 2));
    manager.list([("c", 1), ("d", 2), ("e", 2)], now);
    assert_eq!(manager.decide(now)[0], Action::Retire { host: 1, is_listed: false });
    manager.ended(1);
    manager.list([("c", 1), ("d", 2), ("e", 2), ("f", 3)], now);
    assert!(manager.decide(now).contains(&launch(5, 0, 3)));
}

#[test]
fn a_host_that_is_lost_costs_a_restart_and_is_left_out_longer_each_time() {
    let mut now = crate::some_time();
    let mut manager = manager_of(limits(1, 4, 4), &[("a", 2), ("b", 2)], now);
    manager.decide(now);
    (0..2).for_each(|host| manager.up(host, now));
    for pause in [5, 10, 20] {
        assert_eq!(manager.lost(1, now), Some(seconds(pause)));
        assert!(!manager.decide(now + seconds(pause) - seconds(1)).contains(&launch(1, 2, 2)));
        now += seconds(pause);
        assert!(manager.decide(now).contains(&launch(1, 2, 2)));
        manager.up(1, now);
    }
    assert_eq!(manager.restarts(), (3, 4));
    // To fail while it is tried again costs nothing; to have worked for long makes it good.
    assert_eq!(manager.lost(1, now + MAX_DELAY), Some(FIRST_DELAY));
    now += MAX_DELAY + FIRST_DELAY;
    manager.decide(now);
    assert_eq!((manager.lost(1, now), manager.restarts()), (Some(seconds(10)), (4, 4)));
    now += seconds(10);
    manager.decide(now);
    manager.up(1, now);
    assert_eq!(manager.lost(1, now), None);
    // It was not counted on yet.
    assert_eq!(manager.decide(now + TIMEOUT), []);
}

#[test]
fn a_worker_is_replaced_and_one_that_fails_again_and_again_takes_its_host_along() {
    let mut now = crate::some_time();
    let mut manager = manager_of(limits(2, 4, 9), &[("a", 2), ("b", 2)], now);
    manager.decide(now);
    (0..2).for_each(|host| manager.up(host, now));
    for pause in [0, 1, 2] {
        assert_eq!(manager.failed(1, 0, now), HostDecision::Replace { after: seconds(pause) });
        now += seconds(pause);
        assert!(manager.decide(now).contains(&Action::Replace { host: 1, slot: 0 }));
    }
    assert_eq!(manager.failed(1, 0, now), HostDecision::ExcludeHost { pause: FIRST_DELAY });
    assert_eq!(manager.decide(now), [expect(2)]);
    manager.ended(1);
    assert_eq!(manager.decide(now), []);
    assert_eq!(manager.decide(now + FIRST_DELAY), [launch(1, 2, 2)]);
}

#[test]
fn a_host_whose_workers_fail_again_after_weeks_is_not_left_out_for_longer() {
    let mut now = crate::some_time();
    let mut manager = manager_of(limits(2, 4, 99), &[("a", 2), ("b", 2)], now);
    manager.decide(now);
    (0..2).for_each(|host| manager.up(host, now));
    // The last time it had not worked for long.
    for (worked, pause) in [(0, 5), (7 * 24 * 3600, 5), (7 * 24 * 3600, 5), (1, 10)] {
        now += seconds(worked);
        let excluded = loop {
            match manager.failed(1, 0, now) {
                HostDecision::Replace { after } => now += after,
                excluded @ (HostDecision::LeaveEmpty | HostDecision::ExcludeHost { .. }) => break excluded,
            }
            assert!(manager.decide(now).contains(&Action::Replace { host: 1, slot: 0 }));
        };
        assert_eq!(excluded, HostDecision::ExcludeHost { pause: seconds(pause) });
        manager.ended(1);
        now += seconds(pause);
        assert!(manager.decide(now).contains(&launch(1, 2, 2)));
        manager.up(1, now);
    }
}

#[test]
fn restarts_without_a_limit_end_when_all_workers_have_failed() {
    let mut now = crate::some_time();
    let started = |now: Instant| {
        let mut manager = manager_of(limits(1, 3, NO_LIMIT), &[("a", 2), ("b", 1)], now);
        manager.decide(now);
        (0..2).for_each(|host| manager.up(host, now));
        assert_eq!(manager.decide(now), []);
        manager
    };
    // All fail at about the same time: a replacement that has just been started has no state.
    let mut manager = started(now);
    now += seconds(9);
    assert_eq!(manager.failed(0, 0, now), HostDecision::Replace { after: Duration::ZERO });
    assert_eq!(manager.decide(now), [Action::Replace { host: 0, slot: 0 }]);
    assert_eq!(manager.failed(0, 1, now), HostDecision::Replace { after: Duration::ZERO });
    assert_eq!(manager.failed(1, 0, now), HostDecision::LeaveEmpty);
    assert_eq!(manager.decide(now), [Action::TooFew { there: 2 }]);
    // Also when the last of them are lost with their host.
    let mut manager = started(now);
    now += seconds(9);
    assert_eq!(manager.lost(0, now), Some(FIRST_DELAY));
    assert_eq!(manager.lost(1, now), None);
    assert_eq!(manager.decide(now), [Action::TooFew { there: 0 }]);
    // As long as one goes on, the others are started again, however often.
    let mut manager = started(now);
    for _ in 0..1000 {
        now += seconds(9);
        assert_eq!(manager.failed(0, 1, now), HostDecision::Replace { after: Duration::ZERO });
        assert!(manager.decide(now).contains(&Action::Replace { host: 0, slot: 1 }));
    }
    // Who has come later has got the state meanwhile.
    now += seconds(9);
    assert_eq!(manager.failed(1, 0, now), HostDecision::Replace { after: Duration::ZERO });
    assert_eq!(manager.failed(0, 0, now), HostDecision::Replace { after: Duration::ZERO });
}

#[test]
fn the_only_host_keeps_its_other_workers_which_hold_the_state() {
    let mut now = crate::some_time();
    let mut manager = manager_of(limits(1, 2, 9), &[("a", 2)], now);
    manager.decide(now);
    manager.up(0, now);
    let mut fates = Vec::new();
    for _ in 0..4 {
        fates.push(manager.failed(0, 1, now));
        now += seconds(2);
        manager.decide(now);
    }
    let replaced = |after| HostDecision::Replace { after: seconds(after) };
    assert_eq!(fates, [replaced(0), replaced(1), replaced(2), HostDecision::LeaveEmpty]);
    assert_eq!(manager.failed(0, 1, now), HostDecision::LeaveEmpty);
}

#[test]
fn what_is_no_longer_named_is_retired_and_what_is_new_comes() {
    let now = crate::some_time();
    let open = Limits { is_open: true, ..limits(1, 9, 0) };
    let mut manager = manager_of(open, &[("a", 1)], now);
    assert_eq!(manager.decide(now), [launch(0, 0, 1), expect(1)]);
    manager.up(0, now);
    manager.list([("b", 2), ("a", 1)], now);
    assert_eq!(manager.decide(now), [launch(1, 1, 2), expect(3)]);
    manager.up(1, now);
    manager.list([("b", 3)], now);
    // Another number of slots is another start.
    assert_eq!(
        manager.decide(now),
        [
            Action::Retire { host: 0, is_listed: false },
            Action::Retire { host: 1, is_listed: true },
            expect(0)
        ]
    );
    manager.ended(0);
    manager.ended(1);
    assert_eq!(manager.decide(now), [launch(1, 1, 3), expect(3)]);
    assert_eq!(manager.restarts().0, 0);
}

#[test]
fn hosts_whose_names_never_come_again_are_forgotten() {
    let now = crate::some_time();
    let mut manager = manager_of(limits(1, 1, 9), &[("a", 1)], now);
    assert_eq!(manager.decide(now), [launch(0, 0, 1), expect(1)]);
    manager.up(0, now);
    for number in 0..3 * MAX_REMEMBERED {
        let name = format!("node{number}");
        manager.list([(name.as_str(), 1), ("a", 1), ("late", 1)], now);
    }
    assert_eq!(manager.hosts.len(), MAX_REMEMBERED);
    let place = |name: &str| manager.hosts.iter().position(|host| host.name == name && host.is_listed);
    assert_eq!((place("a"), place("late")), (Some(0), Some(2)));
    assert_eq!(manager.decide(now), []);
}

#[test]
fn too_few_end_the_job_at_once_if_nobody_can_come_and_else_in_time() {
    let start = crate::some_time();
    for (is_open, allowed) in [(false, 0), (false, 1), (true, 0)] {
        let limits = Limits { is_open, ..limits(3, 4, allowed) };
        let mut manager = manager_of(limits, &[("a", 2), ("b", 2)], start);
        manager.decide(start);
        (0..2).for_each(|host| manager.up(host, start));
        assert_eq!(manager.decide(start), []);
        manager.lost(1, start);
        let over = Action::TooFew { there: 2 };
        let actions = manager.decide(start);
        assert_eq!(actions.contains(&over), !is_open && allowed == 0, "{actions:?}");
        if is_open {
            assert_eq!(manager.wake_at(), Some(start + TIMEOUT));
            assert_eq!(manager.decide(start + TIMEOUT), [over]);
        }
    }
    // If none has ever answered, the reason is the same for all, and will be the next time.
    let mut manager = manager_of(limits(1, 2, 9), &[("a", 1), ("b", 1)], start);
    manager.decide(start);
    manager.lost(0, start);
    assert_eq!(manager.decide(start), [expect(1)]);
    manager.lost(1, start);
    assert_eq!(manager.decide(start), [expect(0), Action::TooFew { there: 0 }]);
    assert_eq!(manager.decide(start + TIMEOUT), []);
    // Machines that are still starting are tried again, and others may come.
    let open = Limits { is_open: true, ..limits(1, 2, 0) };
    let mut manager = manager_of(open, &[("a", 1)], start);
    manager.decide(start);
    assert_eq!(manager.lost(0, start), Some(FIRST_DELAY));
    assert_eq!(manager.decide(start), [expect(0)]);
    assert_eq!(manager.wake_at(), Some(start + FIRST_DELAY));
    assert_eq!(manager.decide(start + FIRST_DELAY)[..1], [launch(0, 0, 1)]);
}

/// However often a host is tried that fails again each time, before it has ever worked or after.
#[test]
fn tries_that_fail_do_not_begin_the_time_anew_in_which_workers_must_come() {
    let start = crate::some_time();
    for (is_open, has_worked) in [(true, false), (true, true), (false, true)] {
        let limits = Limits { is_open, ..limits(1, 2, 1) };
        let mut manager = manager_of(limits, &[("a", 1)], start);
        manager.decide(start);
        if has_worked {
            manager.up(0, start);
            manager.decide(start);
        }
        manager.lost(0, start);
        let (mut now, mut tries) = (start, 0);
        while !manager.decide(now).contains(&Action::TooFew { there: 0 }) {
            tries += u32::from(manager.lost(0, now).is_some());
            now = manager.wake_at().unwrap();
        }
        assert_eq!(now, start + TIMEOUT, "{is_open} {has_worked}");
        assert!(tries > 2, "{tries}");
    }
    // One that answers ends the wait.
    let mut manager = manager_of(limits(1, 2, 1), &[("a", 1)], start);
    manager.decide(start);
    manager.up(0, start);
    manager.lost(0, start);
    manager.decide(start);
    manager.decide(start + FIRST_DELAY);
    assert_eq!(manager.wake_at(), Some(start + TIMEOUT));
    manager.up(0, start + FIRST_DELAY);
    manager.decide(start + FIRST_DELAY);
    assert_eq!(manager.wake_at(), None);
}

#[test]
fn nobody_begins_when_one_has_ended_well() {
    let now = crate::some_time();
    let mut manager = manager_of(limits(2, 4, 9), &[("a", 2), ("b", 2)], now);
    manager.decide(now);
    (0..2).for_each(|host| manager.up(host, now));
    assert_eq!(manager.failed(1, 1, now), HostDecision::Replace { after: Duration::ZERO });
    manager.done(0, 1);
    assert!(!manager.have_enough_succeeded());
    assert_eq!(manager.failed(0, 0, now), HostDecision::LeaveEmpty);
    // The launcher waits for what becomes of the slot for which one was promised.
    assert_eq!(manager.decide(now), [Action::LeaveEmpty { host: 1, slot: 1 }]);
    assert_eq!(manager.decide(now), []);
    // Nobody is waited for by looking again and again.
    assert_eq!(manager.wake_at(), None);
    manager.list([("a", 2), ("c", 2)], now);
    assert_eq!(manager.decide(now), []);
    manager.done(1, 0);
    assert_eq!(manager.lost(1, now), None);
    manager.ended(0);
    assert_eq!(manager.decide(now + TIMEOUT), []);
    assert!(manager.is_ending() && manager.have_enough_succeeded());
}

#[test]
fn who_was_promised_when_one_ended_well_is_not_missed() {
    let now = crate::some_time();
    let mut manager = manager_of(limits(2, 2, 9), &[("a", 1), ("b", 1)], now);
    manager.decide(now);
    (0..2).for_each(|host| manager.up(host, now));
    assert_eq!(manager.failed(1, 0, now), HostDecision::Replace { after: Duration::ZERO });
    manager.done(0, 0);
    assert_eq!(manager.decide(now), [Action::LeaveEmpty { host: 1, slot: 0 }]);
    assert_eq!(manager.decide(now + TIMEOUT), []);
}

#[derive(Clone, Debug)]
enum Happens {
    Later(u64),
    Named(Vec<(u8, u32)>),
    Up(usize),
    Lost(usize),
    Ends(usize),
    Fails(usize, u32),
    Done(usize, u32),
}

fn happenings() -> impl Strategy<Value = Vec<Happens>> {
    let one = prop_oneof![
        4 => (0..30_u64).prop_map(Happens::Later),
        2 => proptest::collection::vec((0..5_u8, 1..4_u32), 0..5).prop_map(Happens::Named),
        4 => (0..5_usize).prop_map(Happens::Up),
        3 => (0..5_usize).prop_map(Happens::Lost),
        3 => (0..5_usize).prop_map(Happens::Ends),
        4 => (0..5_usize, 0..3_u32).prop_map(|(host, slot)| Happens::Fails(host, slot)),
        1 => (0..5_usize, 0..3_u32).prop_map(|(host, slot)| Happens::Done(host, slot)),
    ];
    proptest::collection::vec(one, 0..120)
}

/// Launchers as they are: each with the range of its numbers, and whether it was told to end.
#[derive(Default)]
struct World {
    up: BTreeMap<usize, (std::ops::Range<u32>, bool)>,
    left_out: BTreeMap<usize, Instant>,
    over: bool,
}

impl World {
    fn obey(&mut self, actions: Vec<Action>, manager: &HostManager, now: Instant) {
        for action in actions {
            assert!(!self.over, "{action:?} comes after the end");
            match action {
                Action::Launch { host, first, slots } => {
                    let numbers = first..first + slots;
                    assert!(slots > 0 && manager.hosts[host].is_listed && !manager.is_ending());
                    assert!(self.left_out.get(&host).is_none_or(|until| *until <= now));
                    let is_apart = |other: &std::ops::Range<u32>| {
                        numbers.end <= other.start || other.end <= numbers.start
                    };
                    assert!(self.up.values().all(|(other, _)| is_apart(other)));
                    assert!(self.up.insert(host, (numbers, false)).is_none(), "two launchers on one host");
                }
                Action::Replace { host, slot } => {
                    let (numbers, leaves) = &self.up[&host];
                    assert!(!leaves && slot < numbers.end - numbers.start);
                }
                Action::LeaveEmpty { host, slot } => {
                    let (numbers, leaves) = &self.up[&host];
                    assert!(!leaves && slot < numbers.end - numbers.start && manager.is_ending());
                }
                Action::Retire { host, .. } => self.up.get_mut(&host).unwrap().1 = true,
                Action::Expect { .. } => {}
                Action::TooFew { there } => {
                    assert!(there < manager.limits.min);
                    self.over = true;
                }
            }
        }
        let active: u32 = manager.hosts.iter().map(Host::active).sum();
        assert!(active <= manager.limits.max && manager.used <= manager.limits.max_restarts);
    }

    fn happen(&mut self, event: &Happens, manager: &mut HostManager, now: &mut Instant) {
        let name = |number: u8| ["a", "b", "c", "d", "e"][usize::from(number)];
        match *event {
            Happens::Later(time) => *now += seconds(time),
            Happens::Named(ref hosts) => {
                let mut hosts: Vec<_> = hosts.iter().map(|(host, slots)| (name(*host), *slots)).collect();
                hosts.dedup_by_key(|(name, _)| *name);
                manager.list(hosts, *now);
            }
            Happens::Up(host) if self.up.contains_key(&host) => manager.up(host, *now),
            Happens::Lost(host) if self.up.remove(&host).is_some() => {
                if let Some(pause) = manager.lost(host, *now) {
                    assert!((FIRST_DELAY..=MAX_DELAY).contains(&pause));
                    self.left_out.insert(host, *now + pause);
                }
            }
            Happens::Ends(host) if self.up.remove(&host).is_some() => manager.ended(host),
            Happens::Fails(host, slot) if self.up.get(&host).is_some_and(|(_, leaves)| !leaves) => {
                if let HostDecision::ExcludeHost { pause } = manager.failed(host, slot, *now) {
                    self.left_out.insert(host, *now + pause);
                    self.up.get_mut(&host).unwrap().1 = true;
                }
            }
            Happens::Done(host, slot) if self.up.get(&host).is_some_and(|(_, leaves)| !leaves) => {
                manager.done(host, slot);
            }
            _ => {}
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_limits_hold_and_the_job_comes_to_an_end_or_goes_on(
        min in 1..4_u32, more in 0..4_u32, allowed in 0..6_u32, is_open: bool, events in happenings(),
    ) {
        let limits = Limits { is_open, ..limits(min, min + more, allowed) };
        let (mut now, mut world) = (crate::some_time(), World::default());
        let mut manager = manager_of(limits, &[("a", 2), ("b", 1)], now);
        for event in &events {
            world.obey(manager.decide(now), &manager, now);
            world.happen(event, &mut manager, &mut now);
        }
        // From now on nothing fails, and whoever was told to end does.
        for _ in 0..20 {
            world.obey(manager.decide(now), &manager, now);
            let leaving: Vec<usize> = world.up.iter().filter(|(_, (_, leaves))| *leaves).map(|(host, _)| *host).collect();
            leaving.into_iter().for_each(|host| world.happen(&Happens::Ends(host), &mut manager, &mut now));
            (0..5).for_each(|host| world.happen(&Happens::Up(host), &mut manager, &mut now));
            now = manager.wake_at().unwrap_or(now + seconds(1)).max(now);
        }
        let active = manager.hosts.iter().map(Host::active).sum::<u32>() + manager.done;
        prop_assert!(world.over || active + manager.not_needed >= min, "{manager:?}");
        // No launcher waits for ever for what becomes of a slot.
        let promised = |slot: &Slot| slot.due_at().is_some();
        prop_assert!(!manager.is_ending() || world.over || !manager.hosts.iter().flat_map(Host::slots).any(promised), "{manager:?}");
        // Nobody is left out who is named, could come and has room.
        let waits = |host: &Host| host.is_listed && matches!(host.state, HostState::Waiting { .. });
        let room = active < limits.max && !world.over && !manager.is_ending();
        prop_assert!(!(room && manager.hosts.iter().any(waits)), "{manager:?}");
    }
}
