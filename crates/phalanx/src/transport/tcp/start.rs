//! What a start that fails on one rank tells the others: through the store, since connections are only being made.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::Place;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::control::{self, Control, Notice};

const KEY: &str = "mesh/failure";
/// How often a rank that waits for others looks whether one of them has failed.
const LOOK: Duration = Duration::from_millis(500);
/// How long the store may take to answer about that, also when the deadline has passed.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Tells the other ranks why this one cannot start. Gives what all see: the failure that was told first.
pub(super) fn report(place: &Place<'_>, host: &str, error: Error) -> Error {
    let error = match error.operation() {
        Some(_) => error,
        None => error.in_operation("joining the group", None),
    };
    let error = error.at(place.rank, host);
    let Ok(notice) = control::encode(&Control::Failure(Notice::of(&error))) else { return error };
    // Without the store the others find out by themselves, at their deadlines.
    let first = place.store.compare_set(KEY, b"", &notice, Deadline::after(LAST_WORD));
    match first {
        Ok(first) if first != notice => told(&first, host).unwrap_or(error),
        _ => error,
    }
}

/// An error if some rank has reported one, or if the store is gone, with which its host has died.
pub(super) fn check(place: &Place<'_>, host: &str) -> Result<()> {
    let deadline = Deadline::after(LAST_WORD);
    let failed = place.store.check(&[KEY], deadline).and_then(|failed| match failed {
        true => place.store.get(KEY, deadline).map(Some),
        false => Ok(None),
    });
    match failed {
        Ok(Some(notice)) => Err(told(&notice, host)
            .unwrap_or_else(|| Error::protocol("the store's word on the failed start cannot be read"))),
        // A store that is slow is asked again.
        Err(error) if !error.is_timeout() => Err(error),
        Ok(None) | Err(_) => Ok(()),
    }
}

fn told(notice: &[u8], host: &str) -> Option<Error> {
    match control::decode(notice) {
        // The notice names its origin; the host stands in for one that does not.
        Ok(Some((Control::Failure(notice), _))) => Some(notice.into_error(Rank::MAIN, host)),
        _ => None,
    }
}

/// Waits until each of the ranks has set its key, or one of them has failed.
pub(super) fn wait_for(
    place: &Place<'_>,
    host: &str,
    keys: &[(Rank, String)],
    deadline: Deadline,
) -> Result<()> {
    let names: Vec<&str> = keys.iter().map(|(_, key)| key.as_str()).collect();
    loop {
        match place.store.wait(&names, deadline.at_most(LOOK)) {
            Err(error) if error.is_timeout() => check(place, host)?,
            outcome => return outcome,
        }
        if deadline.has_passed() {
            let absent =
                |key: &str| matches!(place.store.check(&[key], Deadline::after(LAST_WORD)), Ok(false));
            let missing = keys.iter().find(|(_, key)| absent(key)).map(|(rank, _)| *rank);
            let error = match missing {
                Some(rank) => Error::timeout(format!("rank {rank} did not say where it listens in time"))
                    .with_peer(rank),
                None => Error::timeout("not all ranks said in time where they listen"),
            };
            return Err(error.with_remedy("is it alive? If it is only slow, raise the time-out"));
        }
    }
}

/// Waits until `finished` is closed at its other end, or some rank has failed.
pub(super) fn watch(place: &Place<'_>, host: &str, finished: &Receiver<()>) -> Result<()> {
    while finished.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        check(place, host)?;
    }
    Ok(())
}
