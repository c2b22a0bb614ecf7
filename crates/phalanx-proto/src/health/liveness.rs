//! Detects silent ranks: pure. Times and events go in, verdicts come out.
//!
//! A frozen process closes no connection, and neither does a cut cable, so only their silence shows them. The receiver
//! judges it. It counts only time in which it was running itself, and asks the kernel about processes of its own host,
//! because an overloaded machine must not look like a dead one.
//!
//! Between hosts the time-out is that of a network, not of a process: TCP's pauses between attempts make a silence
//! longer than the outage was. A process that has ended closes its connections, also between hosts, so only one that is frozen or cut
//! off waits for the time-out.

use std::time::{Duration, Instant};

use super::heartbeat::Heartbeat;
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// How many times longer to wait for a process that is seen to run.
const RUNNING_FACTOR: u32 = 10;
/// A peer may be silent for at least this many of its own intervals, whatever the time-out.
const BEATS: u32 = 3;
/// In worlds of up to this many ranks, all listen to each other.
const ALL: usize = 32;
/// In worlds of more ranks than this, those of one host do not: they share its processors.
const ALL_NEAR: usize = 8;
/// Then ranks of one host that are at most so far apart, around the ring of its ranks, listen to each other.
const NEIGHBOURS: usize = 2;

/// The heartbeats of the other ranks, as received by one rank. Only its own clock counts.
#[derive(Debug)]
pub struct Liveness {
    /// The most time between two checks that counts: a rank that was asleep itself knows nothing about the others.
    step: Duration,
    looked: Option<Instant>,
    peers: Vec<Option<Peer>>,
}

#[derive(Debug)]
struct Peer {
    limit: Duration,
    /// How long this rank has listened without a heartbeat.
    silent: Duration,
    heard: Instant,
}

/// A peer that has been silent for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// The silent peer.
    pub peer: Rank,
    /// By the clock.
    pub lasted: Duration,
    /// Silent for so long that it counts as failed even if its process is running.
    pub hopeless: bool,
}

/// What the kernel shows about a silent process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// It is stopped, by a signal or a debugger.
    Stopped,
    /// It runs, or waits for something.
    Alive,
    /// It has ended.
    Gone,
    /// Not visible: it is on another host, or in another container.
    Unknown,
}

impl ProcessState {
    /// Whether the process is seen to exist.
    pub fn is_there(self) -> bool {
        match self {
            Self::Stopped | Self::Alive => true,
            Self::Gone | Self::Unknown => false,
        }
    }
}

impl Silence {
    /// Whether the peer has failed. A peer that is seen to be alive is only slow.
    pub fn is_failure(&self, state: ProcessState) -> bool {
        self.hopeless || state != ProcessState::Alive
    }
}

impl Liveness {
    /// `step` is the usual time between two checks.
    pub fn new(world: WorldSize, step: Duration) -> Self {
        let peers = world.ranks().map(|_| None).collect();
        Self { step: step * 2, looked: None, peers }
    }

    /// From now on `peer` sends a heartbeat every `interval`, as it says, and none may be later than `timeout`. If either is zero,
    /// its silence means nothing.
    pub fn begin(&mut self, peer: Rank, interval: Duration, timeout: Duration, now: Instant) {
        if timeout.is_zero() || interval.is_zero() {
            return;
        }
        // Its silence begins when an expected heartbeat does not come.
        let limit = timeout.max(interval.saturating_mul(BEATS)).saturating_add(interval);
        if let Some(place) = self.peers.get_mut(peer.index()) {
            *place = Some(Peer { limit, silent: Duration::ZERO, heard: now });
        }
    }

    /// A heartbeat of `peer` has arrived.
    pub fn heard(&mut self, peer: Rank, now: Instant) {
        if let Some(Some(peer)) = self.peers.get_mut(peer.index()) {
            (peer.silent, peer.heard) = (Duration::ZERO, now);
        }
    }

    /// `peer` has left, or is known to be gone.
    pub fn end(&mut self, peer: Rank) {
        if let Some(peer) = self.peers.get_mut(peer.index()) {
            *peer = None;
        }
    }

    /// Time has passed, and all heartbeats received in it have been reported. Returns the peers that were silent for
    /// too long.
    pub fn pass(&mut self, now: Instant) -> Vec<Silence> {
        let passed = self.looked.map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked));
        self.looked = Some(now);
        let listened = passed.min(self.step);
        let mut silences = Vec::new();
        for (index, peer) in self.peers.iter_mut().enumerate() {
            let Some(Peer { limit, silent, heard }) = peer else { continue };
            *silent = silent.saturating_add(listened);
            if *silent > *limit {
                let hopeless = *silent > limit.saturating_mul(RUNNING_FACTOR);
                let lasted = now.saturating_duration_since(*heard);
                silences.push(Silence { peer: Rank::new(index as u32), lasted, hopeless });
            }
        }
        silences
    }
}

impl Heartbeat {
    /// The interval of this rank's checks. None if it neither sends nor expects heartbeats.
    #[doc(hidden)]
    pub fn step(self) -> Option<Duration> {
        let steps = [self.interval, self.timeout / 5, self.network_timeout / 5];
        let steps = steps.into_iter().filter(|step| !step.is_zero());
        steps.min()
    }
}

/// To which ranks `rank` listens, and they to it; `near` says of each rank whether it is on the same host. In a large world, listening to
/// all would be too many packets for a host, and most of what its idle ranks cost. So each rank listens to its neighbours around the ring
/// of its host's ranks, and to those on other hosts whose distance is a power of two. Some of them are on other hosts, however many ranks
/// of one host are lost together, and a rank that hears nothing tells all. The number of neighbours does not grow with that of a host's
/// ranks, which share its processors.
pub fn listened_to(rank: Rank, near: &[bool]) -> Vec<bool> {
    let world = near.len();
    let around = |one: usize, other: usize, all: usize| {
        let distance = one.abs_diff(other);
        distance.min(all.saturating_sub(distance))
    };
    let of_host: Vec<usize> = (0..world).filter(|&peer| near[peer] || peer == rank.index()).collect();
    let place = |rank: usize| of_host.binary_search(&rank);
    let listens = |peer: usize| match (place(rank.index()), place(peer)) {
        (Ok(one), Ok(other)) => world <= ALL_NEAR || around(one, other, of_host.len()) <= NEIGHBOURS,
        _ => world <= ALL || are_powers_of_two_apart(rank.index(), peer, world),
    };
    (0..world).map(|peer| peer != rank.index() && listens(peer)).collect()
}

/// Whether two ranks are 1, 2, 4, .. places apart around the ring of a `world`, in one direction or the other.
pub(super) fn are_powers_of_two_apart(one: usize, other: usize, world: usize) -> bool {
    let distance = one.abs_diff(other);
    distance.is_power_of_two() || world.saturating_sub(distance).is_power_of_two()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(100);
    const TIMEOUT: Duration = Duration::from_secs(1);
    const A: Rank = Rank::new(1);
    const B: Rank = Rank::new(2);

    fn liveness(now: Instant) -> Liveness {
        let mut liveness = Liveness::new(WorldSize::new(3).unwrap(), INTERVAL);
        liveness.begin(A, INTERVAL, TIMEOUT, now);
        liveness.begin(B, INTERVAL, TIMEOUT, now);
        assert!(liveness.pass(now).is_empty());
        liveness
    }

    #[test]
    fn silence_is_found_soon_after_the_time_out_and_not_before() {
        let start = crate::some_time();
        let mut liveness = liveness(start);
        for step in 1..=11 {
            liveness.heard(B, start + INTERVAL * step);
            assert!(liveness.pass(start + INTERVAL * step).is_empty(), "{step}");
        }
        let late = liveness.pass(start + INTERVAL * 12);
        let expected = Silence { peer: A, lasted: INTERVAL * 12, hopeless: false };
        assert_eq!(late, [expected]);
        assert!(expected.is_failure(ProcessState::Stopped) && expected.is_failure(ProcessState::Unknown));
        assert!(!expected.is_failure(ProcessState::Alive));
        liveness.heard(A, start + INTERVAL * 13);
        assert!(liveness.pass(start + INTERVAL * 13).is_empty());
    }

    #[test]
    fn each_peer_has_its_own_time_out() {
        let start = crate::some_time();
        let mut liveness = liveness(start);
        liveness.begin(B, INTERVAL, TIMEOUT * 10, start);
        let mut found = [None, None];
        for step in 1..=110 {
            for silence in liveness.pass(start + INTERVAL * step) {
                found[usize::from(silence.peer == B)].get_or_insert(step);
            }
        }
        assert_eq!(found, [Some(12), Some(102)]);
    }

    #[test]
    fn who_is_alive_but_silent_for_ever_is_given_up_in_the_end() {
        let start = crate::some_time();
        let mut liveness = liveness(start);
        liveness.end(B);
        let hopeless =
            (1..).find(|step| liveness.pass(start + INTERVAL * *step).iter().any(|silence| silence.hopeless));
        assert_eq!(hopeless, Some(111));
    }

    #[test]
    fn who_has_slept_accuses_nobody() {
        let start = crate::some_time();
        let mut liveness = liveness(start);
        assert!(liveness.pass(start + TIMEOUT * 3600).is_empty());
        // Late each time: it takes longer, but ends.
        let found = (1..).find(|look| !liveness.pass(start + TIMEOUT * (3600 + look)).is_empty());
        assert_eq!(found, Some(5));
    }

    #[test]
    fn who_has_left_or_never_beats_is_not_missed() {
        let start = crate::some_time();
        let mut liveness = liveness(start);
        liveness.end(A);
        liveness.begin(A, INTERVAL, Duration::ZERO, start);
        liveness.begin(B, Duration::ZERO, TIMEOUT, start);
        liveness.end(B);
        assert!((1..1000).all(|step| liveness.pass(start + INTERVAL * step).is_empty()));
    }

    #[test]
    fn a_peer_is_judged_by_its_own_interval_too() {
        let start = crate::some_time();
        let mut liveness = liveness(start);
        liveness.end(B);
        liveness.begin(A, TIMEOUT, TIMEOUT, start);
        let found = (1..).find(|step| !liveness.pass(start + INTERVAL * *step).is_empty());
        assert_eq!(found, Some(41));
    }

    /// Who listens to whom, if each rank is on the host with this number.
    fn listeners(hosts: &[usize]) -> Vec<Vec<bool>> {
        let near = |rank: usize| hosts.iter().map(|host| *host == hosts[rank]).collect::<Vec<_>>();
        (0..hosts.len()).map(|rank| listened_to(Rank::new(rank as u32), &near(rank))).collect()
    }

    #[test]
    fn in_every_world_each_rank_is_listened_to_from_another_host() {
        for world in [2, 3, 9, 16, 17, 33, 64, 100, 1000] {
            for of_a_host in [1, 2, 4, 8, 16] {
                let hosts: Vec<usize> = (0..world).map(|rank| rank / of_a_host).collect();
                for (rank, listeners) in listeners(&hosts).iter().enumerate() {
                    let count = listeners.iter().filter(|listens| **listens).count();
                    // In a large world at most twice as many as the world size has binary digits.
                    assert!(
                        count <= (ALL - 1).max(2 * world.ilog2() as usize + 2),
                        "{count}: {rank} of {world}"
                    );
                    let mut elsewhere = (0..world).filter(|peer| hosts[*peer] != hosts[rank]);
                    assert!(world <= of_a_host || elsewhere.any(|peer| listeners[peer]), "{rank} of {world}");
                }
            }
        }
    }

    #[test]
    fn on_one_host_the_number_of_listeners_does_not_grow() {
        for world in [2, 3, 8, 9, 16, 32, 128, 1000] {
            for (rank, listeners) in listeners(&vec![0; world]).iter().enumerate() {
                let count = listeners.iter().filter(|listens| **listens).count();
                let expected = if world <= ALL_NEAR { world - 1 } else { 2 * NEIGHBOURS };
                assert_eq!(count, expected, "{rank} of {world}");
            }
        }
    }

    proptest! {
        /// However ranks are placed: two ranks listen to each other or neither does, and who is not alone on its host is listened to
        /// from there.
        #[test]
        fn wherever_ranks_are_their_hosts_watch_them(hosts in prop::collection::vec(0usize..5, 1..80)) {
            let listeners = listeners(&hosts);
            for rank in 0..hosts.len() {
                prop_assert!(!listeners[rank][rank]);
                let mut peers = (0..hosts.len()).filter(|peer| *peer != rank);
                prop_assert!(peers.clone().all(|peer| listeners[rank][peer] == listeners[peer][rank]));
                let is_alone = !peers.clone().any(|peer| hosts[peer] == hosts[rank]);
                prop_assert!(is_alone || peers.any(|peer| hosts[peer] == hosts[rank] && listeners[rank][peer]));
            }
        }
    }

    proptest! {
        /// However this rank is delayed: a peer whose heartbeats are there at each check is never reported, and a
        /// silent peer is reported after the permitted silence, counted while this rank is awake.
        #[test]
        fn only_silence_is_silence(pauses in prop::collection::vec(0u64..5000, 1..200)) {
            let mut now = crate::some_time();
            let mut liveness = liveness(now);
            let mut awake = Duration::ZERO;
            for pause in pauses {
                let pause = Duration::from_millis(pause);
                now += pause;
                awake += pause.min(INTERVAL * 2);
                liveness.heard(B, now);
                let accused: Vec<Rank> = liveness.pass(now).iter().map(|silence| silence.peer).collect();
                let expected: &[Rank] = if awake > TIMEOUT + INTERVAL { &[A] } else { &[] };
                prop_assert_eq!(accused, expected);
            }
        }
    }
}
