//! How a rank waits for another.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use crate::shared::Doorbell;

/// Looks before the peers that sleep are woken, and after: what the peers do next is often done within a microsecond. Each look
/// takes the line from the peer that is about to write it, so there is a pause between two of them, unless ranks share
/// processors: then the time is better spent on the others' work.
const LOOKS: u32 = 8;
const SPINS: u32 = 156;
/// The same without pauses, before and after.
const CROWDED_LOOKS: u32 = 64;
/// Rounds of looks with a turn for others in between. A peer that shares this processor comes on with its part meanwhile;
/// where every rank has one, what may be waiting is this rank's own computation.
const ROUNDS: u32 = 2;
const CROWDED_ROUNDS: u32 = 40;
/// Turns in a round. Each may take others some milliseconds, and between two rounds the rank asks whether to go on.
const TURNS: u32 = 25;
/// A turn that takes others so long is no peer's quick answer: from there on, a rank that sleeps is back sooner.
const LONG: Duration = Duration::from_micros(100);
/// A rank sleeps this long at most before it asks whether to go on.
const SLEEP: Duration = Duration::from_millis(10);

/// The waits of a rank among its peers.
pub(super) struct Waits {
    looks: u32,
    spins: u32,
    pauses: bool,
    rounds: u32,
}

impl Waits {
    /// Among `ranks`: they look for a while if each can have a processor, and else let the others go first.
    pub(super) fn new(ranks: usize) -> Self {
        if cfg!(loom) {
            // In a model one look says as much as many: `until` takes one before it sleeps, and `a_few` one in any case.
            Self { looks: 0, spins: 0, pauses: false, rounds: 0 }
        } else if ranks <= processors() {
            Self { looks: LOOKS, spins: SPINS, pauses: true, rounds: ROUNDS }
        } else {
            Self { looks: CROWDED_LOOKS, spins: CROWDED_LOOKS, pauses: false, rounds: CROWDED_ROUNDS }
        }
    }

    /// Looks a few times whether it is `ready`.
    pub(super) fn a_few(&self, ready: impl Fn() -> bool) -> bool {
        self.look(self.looks.max(1), ready)
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

    /// Waits until `ready`, or until `watch` finds that there is no use.
    pub(super) fn until<E>(
        &self,
        ready: impl Fn() -> bool,
        doorbell: Doorbell<'_>,
        mut watch: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.look(self.spins, &ready) {
            return Ok(());
        }
        let mut rounds = 0..self.rounds;
        loop {
            // Asked before the last look: what a peer did before it left, or died, still counts.
            let verdict = watch();
            if ready() {
                return Ok(());
            }
            verdict?;
            if rounds.next().is_none() {
                doorbell.sleep_unless(SLEEP, &ready);
                continue;
            }
            let mut before = Instant::now();
            for _ in 0..TURNS {
                yield_now();
                if ready() {
                    return Ok(());
                }
                let now = Instant::now();
                if now - before > LONG {
                    rounds = 0..0;
                    break;
                }
                before = now;
            }
        }
    }
}

/// The number of processors of this host. Not those that this process is bound to: a launcher binds each rank to its own.
fn processors() -> usize {
    // SAFETY: it reads no memory of ours.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(online).unwrap_or(1)
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
}
