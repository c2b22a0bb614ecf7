//! From a communicator to a smaller one: `ncclCommShrink`.
//!
//! All ranks that remain call it, and nobody else. It needs a communicator that was not aborted and that does nothing; the watchdog stops it, and
//! keeps it for this. NCCL numbers the ranks that remain in their old order, so that the ranks of the new group must be in that order. Whether the
//! ranks can do it they find out in the exchange that they make for a new communicator anyway, and whether all of them have done it in another one:
//! if one rank has not, all make a communicator without the old one.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use phalanx::{Deadline, Error, ProcessGroup, Result};

use super::Communicator;
use super::init::Unused;
use super::shared::{Handle, SETTLE_TIMEOUT, Shared};
use crate::cuda::Pause;
use crate::nccl::{Config, IN_PROGRESS, SHRINK_ABORT, SUCCESS};

/// The longest time for it. A rank that fails in it is seen by the others when its connections end, or after this.
const SHRINK_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the calling thread looks for a failure meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// What a rank says of the communicator that it has: which one that is, and its rank in it.
pub(super) type Offer = (Vec<u8>, u32);

/// The old ranks that are not in the new group, if the ranks of the new group all have one communicator, of `ranks` ranks, in the order of that.
/// All ranks come to the same answer, but that a rank without an offer may have any number for `ranks`.
pub(super) fn excluded(offers: &[Option<Offer>], ranks: u32) -> Option<Vec<c_int>> {
    let (identity, _) = offers.first()?.as_ref()?;
    let mut kept = Vec::with_capacity(offers.len());
    for offer in offers {
        let (other, rank) = offer.as_ref()?;
        if other != identity || *rank >= ranks || kept.last().is_some_and(|last| last >= rank) {
            return None;
        }
        kept.push(*rank);
    }
    // NCCL refuses to leave out nobody.
    let excluded: Vec<c_int> =
        (0..ranks).filter(|rank| kept.binary_search(rank).is_err()).map(|rank| rank as c_int).collect();
    (!excluded.is_empty()).then_some(excluded)
}

impl Communicator {
    /// What this rank brings of it to the ranks of its next group; none if it cannot be shrunk. No call can be made with it afterwards.
    pub(super) fn offer(&self) -> Option<Offer> {
        let shared = &self.owner.shared;
        if !self.is_shrinkable() {
            return None;
        }
        if shared.failure().is_some() || shared.group.watched_failure().is_some() {
            shared.wake_watchdog();
        } else if Arc::strong_count(&self.owner) != 1 || !shared.retire() {
            return None; // Somebody may still make calls with it, or wait for one.
        }
        shared.await_kept().then(|| (self.owner.identity.clone(), self.rank().get()))
    }

    /// The identity of what is left of this communicator, if its rank `first` is the first that remains: that rank shrinks this one only once.
    pub(super) fn identity_of_shrunk(&self, first: u32) -> Vec<u8> {
        [self.owner.identity.as_slice(), &first.to_le_bytes()].concat()
    }

    /// It is not needed to shrink it.
    pub(super) fn release(&self) {
        self.owner.shared.release();
    }

    /// NCCL's communicator of the ranks of `group`, which are those of this one without those that are `excluded`.
    ///
    /// # Errors
    /// If NCCL refuses it or is late, or `group` fails. Then this communicator is released, which the others see.
    pub(super) fn shrink(
        &self,
        group: &ProcessGroup,
        excluded: Vec<c_int>,
        blocking: bool,
    ) -> Result<Unused> {
        let shared = self.owner.shared.clone();
        let deadline = Deadline::after(group.timeout().min(SHRINK_TIMEOUT));
        let (tell, told) = channel();
        let name = format!("phalanx-nccl-shrink-{}", group.rank());
        // It may wait for other ranks inside NCCL, as when ranks are connected.
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            // If nobody waits for it any more, what was made is ended.
            let _ = tell.send(shrink(&shared, excluded, blocking));
        });
        let outcome = spawned.map_err(Error::other).and_then(|_| {
            loop {
                match told.recv_timeout(LOOK_INTERVAL) {
                    Ok(outcome) => break outcome,
                    Err(RecvTimeoutError::Disconnected) => {
                        break Err(Error::aborted("the thread that shrinks the communicator has panicked"));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if let Some(cause) = group.failure() {
                    break Err(cause);
                }
                if deadline.has_passed() {
                    break Err(Error::timeout(
                        "ncclCommShrink: the ranks were not connected by NCCL in time",
                    ));
                }
            }
        });
        outcome.inspect_err(|_| self.release())
    }
}

/// Shrinks it, and waits until NCCL has done so, or it is not kept any more.
fn shrink(old: &Shared, mut excluded: Vec<c_int>, blocking: bool) -> Result<Unused> {
    let gone = || Error::aborted("the communicator that was to be shrunk has ended");
    let Some(shrink) = old.nccl.shrink else { return Err(gone()) };
    let device = old.stream.device();
    let unused = |raw| Unused::new(old.nccl.clone(), device.clone(), Handle(raw));
    let mut config = Config::new(blocking);
    // NCCL writes the new communicator there, beside its caller.
    let place = Box::new(AtomicPtr::default());
    let _bound = device.bind()?;
    let calling = old.calling.lock();
    let Some(raw) = old.kept() else { return Err(gone()) };
    let (list, count) = (excluded.as_mut_ptr(), excluded.len() as c_int);
    // SAFETY: it is alive and stopped, and aborted only some seconds after it is released if this thread holds `calling`. NCCL copies the list and
    // the configuration, and writes one pointer, whose memory stays until it has.
    let mut state = unsafe { shrink(raw, list, count, place.as_ptr(), &mut config, SHRINK_ABORT) };
    if state == SUCCESS {
        // NCCL returns it also while it works beside its caller, as all versions do if the old one is not blocking: its state says more.
        state = IN_PROGRESS;
    }
    let (mut function, mut pause) = ("ncclCommShrink", Pause::default());
    while state == IN_PROGRESS {
        pause.pause();
        // Before each look, as in `Shared::settle`.
        let Some(raw) = old.kept() else {
            drop(calling);
            // The abort ends what NCCL does for this, and waits for it.
            match old.await_ended(2 * SETTLE_TIMEOUT) {
                true => drop(unused(place.load(Ordering::Acquire))),
                false => _ = Box::leak(place),
            }
            return Err(gone());
        };
        // SAFETY: it is kept. Its state is that of the shrink.
        let code = unsafe { (old.nccl.ncclCommGetAsyncError)(raw, &mut state) };
        if code != SUCCESS {
            (function, state) = ("ncclCommGetAsyncError", code);
        }
    }
    let made = unused(place.load(Ordering::Acquire));
    if state != SUCCESS {
        let error = old.nccl.error(function, state);
        // The old one keeps the address of a flag of what could not be made, and writes there when it is aborted. So that is ended after it.
        drop(calling);
        old.release();
        if !old.await_ended(2 * SETTLE_TIMEOUT) {
            std::mem::forget(made);
        }
        return Err(error);
    }
    if made.is_none() {
        return Err(Error::other("ncclCommShrink has made no communicator"));
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(ranks: &[u32]) -> Vec<Option<Offer>> {
        ranks.iter().map(|rank| Some((vec![7], *rank))).collect()
    }

    #[test]
    fn those_that_are_not_in_the_new_group_are_left_out() {
        assert_eq!(excluded(&offers(&[0, 1, 2, 4, 5, 6, 7]), 8), Some(vec![3]));
        assert_eq!(excluded(&offers(&[2, 3]), 5), Some(vec![0, 1, 4]));
        assert_eq!(excluded(&offers(&[1]), 2), Some(vec![0]));
    }

    #[test]
    fn what_nccl_cannot_shrink_is_made_anew() {
        // Nobody leaves, another order, a rank twice, or one that was not there.
        for ranks in [&[0, 1, 2][..], &[1, 0], &[1, 1], &[0, 3], &[]] {
            assert_eq!(excluded(&offers(ranks), 3), None, "{ranks:?}");
        }
        // One that has no communicator, or another one.
        for other in [None, Some((vec![8], 1))] {
            assert_eq!(excluded(&[Some((vec![7], 0)), other.clone()], 3), None);
            assert_eq!(excluded(&[other, Some((vec![7], 2))], 3), None);
        }
    }
}
