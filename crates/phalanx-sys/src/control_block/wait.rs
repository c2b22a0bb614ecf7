//! How a rank waits for another.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use crate::processors;
use crate::shared::Doorbell;

/// Polls before sleeping peers are woken, and after. A peer often finishes its next step within a microsecond. Each
/// poll takes the cache line from the peer that is about to write it, so there is a pause between two polls. If ranks
/// share processors, there is none: the other ranks can use that time. A rank that shares its own with the peer that it
/// waits for polls only before.
const LOOKS: u32 = 8;
const SPINS: u32 = 156;
/// The same without pauses, before and after.
const CROWDED_LOOKS: u32 = 64;
/// A rank that can go on without its peers polls this many times as often before it does so: a peer may work on a window for
/// ten microseconds.
const PATIENT: u32 = 4;
/// Rounds of polls in which the rank yields. If a peer shares this processor, it can continue meanwhile. If each rank
/// has a processor of its own, the thread that gets the processor may be this rank's own computation: then a yield takes long, and is the last.
/// There are so many, and without more ranks than processors further ones until [`PROMPT_LIMIT`] has passed.
const ROUNDS: u32 = 8;
const CROWDED_ROUNDS: u32 = 40;
/// To wake a thread that sleeps takes 40 us and more. Eight rounds take 150 us on one machine and 50 on another: there a rank slept while its peer copied
/// 1 MiB, and the call took 90 us in place of 50. Two rounds, after which a rank slept that a peer in Python let wait for 60 us, made the slowest percent
/// of small calls half as slow again.
const PROMPT_LIMIT: Duration = Duration::from_micros(200);
/// Yields in a round. Each may take some milliseconds. Between two rounds the rank calls `watch`.
const TURNS: u32 = 25;
/// If a yield takes longer than this, the peer will not answer soon: sleeping then returns earlier than yielding.
const YIELD_LIMIT: Duration = Duration::from_micros(100);
/// The longest sleep before `watch` is called again.
const SLEEP_LIMIT: Duration = Duration::from_millis(10);

/// A processor's number plus one, or 0 if it is not known.
pub(super) type Processor = u32;

/// How a rank waits for its peers.
pub(super) struct Waits {
    looks: u32,
    spins: u32,
    pauses: bool,
    rounds: u32,
    /// There are more ranks than processors.
    crowded: bool,
    /// The processor of the calling thread, if that affects how it waits.
    processor: fn() -> Processor,
}

impl Waits {
    /// For `ranks` ranks: they poll for a while if each can have a processor, and otherwise yield first.
    pub(super) fn new(ranks: usize) -> Self {
        if cfg!(loom) {
            // In a model one poll is as good as many: `until` polls once before it sleeps, and `a_few` polls at least
            // once.
            Self { looks: 0, spins: 0, pauses: false, rounds: 0, crowded: false, processor: unknown }
        } else if processors::suffice_for(ranks) {
            let (looks, spins, rounds) = (LOOKS, SPINS, ROUNDS);
            Self { looks, spins, pauses: true, rounds, crowded: false, processor: current }
        } else {
            let (looks, spins, rounds) = (CROWDED_LOOKS, CROWDED_LOOKS, CROWDED_ROUNDS);
            Self { looks, spins, pauses: false, rounds, crowded: true, processor: unknown }
        }
    }

    /// The processor of the calling thread. 0 also if it does not matter to peers.
    pub(super) fn processor(&self) -> Processor {
        (self.processor)()
    }

    /// Polls a few times whether it is `ready`.
    pub(super) fn a_few(&self, ready: impl Fn() -> bool) -> bool {
        self.look(self.looks.max(1), ready)
    }

    /// Polls for as long as a peer that keeps pace may need, and at least once. `peer` is as in [`until`](Self::until).
    pub(super) fn a_while(
        &self,
        ready: impl Fn() -> bool,
        peer: impl FnOnce() -> Processor,
        patience: &mut Patience,
    ) -> bool {
        let mut reached = ready();
        if !reached && !patience.is_late {
            reached = self.spin(PATIENT * self.spins, &ready, peer);
            // Ranks that share processors take turns.
            if !reached && self.crowded && patience.yields {
                let turns = take_turns(&ready);
                patience.yields = turns != Turns::Long;
                reached = turns == Turns::Ready;
            }
        }
        patience.is_late = !reached;
        reached
    }

    fn spin(&self, times: u32, ready: impl Fn() -> bool, peer: impl FnOnce() -> Processor) -> bool {
        // While this rank polls, a peer on the same processor cannot go on.
        !share_a_processor(self.processor(), peer) && self.look(times, ready)
    }

    fn look(&self, times: u32, ready: impl Fn() -> bool) -> bool {
        for _ in 0..times {
            if ready() {
                return true;
            }
            if self.pauses {
                spin_loop();
            }
        }
        false
    }

    /// Waits until `ready`, or until `watch` returns an error. `peer` is the processor on which the peer was last seen.
    pub(super) fn until<E>(
        &self,
        ready: impl Fn() -> bool,
        peer: impl FnOnce() -> Processor,
        doorbell: Doorbell<'_>,
        mut watch: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.spin(self.spins, &ready, peer) {
            return Ok(());
        }
        let mut rounds = 0..self.rounds;
        let began = Instant::now();
        let is_prompt = || self.rounds > 0 && !self.crowded && began.elapsed() < PROMPT_LIMIT;
        let mut yields = true;
        loop {
            // Called before the last poll: what a peer did before it left, or died, still counts.
            let verdict = watch();
            if ready() {
                return Ok(());
            }
            verdict?;
            yields = yields && (rounds.next().is_some() || is_prompt());
            if !yields {
                doorbell.sleep_unless(SLEEP_LIMIT, &ready);
                continue;
            }
            match take_turns(&ready) {
                Turns::Ready => return Ok(()),
                Turns::Long => yields = false,
                Turns::Over => {}
            }
        }
    }
}

/// How long a rank polls that can go on without its peers.
pub(super) struct Patience {
    /// A peer was late when this rank last polled. Until it has come, this rank polls once.
    is_late: bool,
    /// No yield has taken long: programs other than the ranks do not want this processor.
    yields: bool,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { is_late: false, yields: true }
    }

    /// That of a rank that polls once.
    pub(super) fn none() -> Self {
        Self { is_late: true, yields: false }
    }
}

/// How a round of yields ended.
#[derive(PartialEq)]
enum Turns {
    Ready,
    /// A yield took long.
    Long,
    Over,
}

/// Yields until `ready`, for a round.
fn take_turns(ready: impl Fn() -> bool) -> Turns {
    let mut before = Instant::now();
    for _ in 0..TURNS {
        yield_now();
        if ready() {
            return Turns::Ready;
        }
        let now = Instant::now();
        if now - before > YIELD_LIMIT {
            return Turns::Long;
        }
        before = now;
    }
    Turns::Over
}

/// Whether the peer is on this rank's processor, as far as that is known. The peer's is only read if this rank's is known.
fn share_a_processor(own: Processor, peer: impl FnOnce() -> Processor) -> bool {
    own != 0 && own == peer()
}

/// The processor of the calling thread.
fn current() -> Processor {
    // SAFETY: it has no arguments, and returns a number.
    #[cfg(all(target_os = "linux", not(miri)))]
    let number = unsafe { libc::sched_getcpu() };
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let number = -1;
    u32::try_from(number).map_or(0, |number| number + 1)
}

fn unknown() -> Processor {
    0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::sync::AtomicU32;
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_rank_asks_whether_to_go_on_before_it_lets_others_go_first_and_every_few_turns() {
        let (rung, sleeping) = (AtomicU32::new(0), AtomicU32::new(0));
        let doorbell = Doorbell::new(&rung, &sleeping);
        for (ranks, spins) in [(1, SPINS), (100_000, CROWDED_LOOKS)] {
            let (looks, asked) = (Cell::new(0), Cell::new(0));
            let outcome = Waits::new(ranks).until(
                || {
                    looks.set(looks.get() + 1);
                    false
                },
                || 0,
                doorbell,
                || {
                    let most = if asked.get() == 0 { spins } else { TURNS + 1 };
                    assert!(looks.replace(0) <= most);
                    asked.set(asked.get() + 1);
                    if asked.get() > CROWDED_ROUNDS { Err("enough") } else { Ok(()) }
                },
            );
            assert_eq!(outcome, Err("enough"));
        }
    }

    #[test]
    fn processors_are_one_only_if_they_are_known() {
        assert!(share_a_processor(2, || 2));
        assert!(!share_a_processor(2, || 1));
        assert!(!share_a_processor(2, || 0));
        assert!(!share_a_processor(0, || unreachable!("this rank's is not known")));
    }

    #[test]
    fn a_rank_beside_its_peer_lets_it_go_first() {
        let (rung, sleeping) = (AtomicU32::new(0), AtomicU32::new(0));
        let (mut waits, seven): (_, fn() -> Processor) = (Waits::new(1), || 7);
        for (processor, polls) in [(unknown as fn() -> Processor, SPINS), (seven, 0)] {
            waits.processor = processor;
            let looks = Cell::new(0);
            let ready = || {
                looks.set(looks.get() + 1);
                false
            };
            let outcome = waits.until(ready, || 7, Doorbell::new(&rung, &sleeping), || Err(looks.get()));
            assert_eq!(outcome, Err(polls));
        }
    }
}
