//! How a rank waits for another.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use crate::shared::Doorbell;

/// Polls before sleeping peers are woken, and after. A peer often finishes its next step within a microsecond. Each
/// poll takes the cache line from the peer that is about to write it, so there is a pause between two polls. If ranks
/// share processors, there is none: the other ranks can use that time.
const LOOKS: u32 = 8;
const SPINS: u32 = 156;
/// The same without pauses, before and after.
const CROWDED_LOOKS: u32 = 64;
/// Rounds of polls in which the rank yields. If a peer shares this processor, it can continue meanwhile. If each rank
/// has a processor of its own, the thread that gets the processor may be this rank's own computation.
const ROUNDS: u32 = 2;
const CROWDED_ROUNDS: u32 = 40;
/// Yields in a round. Each may take some milliseconds. Between two rounds the rank calls `watch`.
const TURNS: u32 = 25;
/// If a yield takes longer than this, the peer will not answer soon: sleeping then returns earlier than yielding.
const LONG: Duration = Duration::from_micros(100);
/// The longest sleep before `watch` is called again.
const SLEEP: Duration = Duration::from_millis(10);

/// How a rank waits for its peers.
pub(super) struct Waits {
    looks: u32,
    spins: u32,
    pauses: bool,
    rounds: u32,
}

impl Waits {
    /// For `ranks` ranks: they poll for a while if each can have a processor, and otherwise yield first.
    pub(super) fn new(ranks: usize) -> Self {
        if cfg!(loom) {
            // In a model one poll is as good as many: `until` polls once before it sleeps, and `a_few` polls at least
            // once.
            Self { looks: 0, spins: 0, pauses: false, rounds: 0 }
        } else if ranks <= processors() {
            Self { looks: LOOKS, spins: SPINS, pauses: true, rounds: ROUNDS }
        } else {
            Self { looks: CROWDED_LOOKS, spins: CROWDED_LOOKS, pauses: false, rounds: CROWDED_ROUNDS }
        }
    }

    /// Polls a few times whether it is `ready`.
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

    /// Waits until `ready`, or until `watch` returns an error.
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
            // Called before the last poll: what a peer did before it left, or died, still counts.
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

/// The number of this host's processors, not of those that this process is bound to: a launcher may bind each rank to
/// its own.
fn processors() -> usize {
    // SAFETY: it accesses no memory of this process.
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
