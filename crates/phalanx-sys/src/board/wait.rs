//! How a rank waits for another.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::Duration;

use crate::shared::Doorbell;

/// Looks without a pause, then with one: what the peers do next is often done within a microsecond.
const LOOKS: u32 = 64;
const SPINS: u32 = 100;
/// Looks with a turn for others in between. A peer that shares this processor comes on with its part meanwhile; where
/// every rank has one, what may be waiting is this rank's own computation.
const YIELDS: u32 = 50;
const CROWDED_YIELDS: u32 = 1000;
/// A rank sleeps this long at most before it asks whether to go on.
const SLEEP: Duration = Duration::from_millis(10);

/// The waits of a rank among its peers.
pub(super) struct Waits {
    looks: u32,
    spins: u32,
    yields: u32,
}

impl Waits {
    /// Among `ranks`: they look for a while if each can have a processor, and else let the others go first.
    pub(super) fn new(ranks: usize) -> Self {
        if cfg!(loom) {
            // In a model one look says as much as many.
            Self { looks: 0, spins: 0, yields: 0 }
        } else if ranks <= processors() {
            Self { looks: LOOKS, spins: SPINS, yields: YIELDS }
        } else {
            Self { looks: LOOKS, spins: 0, yields: CROWDED_YIELDS }
        }
    }

    /// Waits until `ready`, or until `watch` finds that there is no use.
    pub(super) fn until<E>(
        &self,
        ready: impl Fn() -> bool,
        doorbell: Doorbell<'_>,
        mut watch: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        for look in 0..self.looks + self.spins {
            if ready() {
                return Ok(());
            }
            if look >= self.looks {
                spin_loop();
            }
        }
        for _ in 0..self.yields {
            yield_now();
            if ready() {
                return Ok(());
            }
        }
        loop {
            // Asked before the last look: what a peer did before it left, or died, still counts.
            let verdict = watch();
            if ready() {
                return Ok(());
            }
            verdict?;
            doorbell.sleep_unless(SLEEP, &ready);
        }
    }
}

/// The processors of this host. Not those that this process is bound to: a launcher binds each rank to its own.
fn processors() -> usize {
    // SAFETY: it reads no memory of ours.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(online).unwrap_or(1)
}
