//! What a store may hold in the place of a log, for fuzz targets.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::compaction::{BASE, IN_PARTS, STRIDE, state_key};
use super::{Log, Mac, Machine, Read, decode, encode, key};
use crate::deadline::Deadline;
use crate::store::{MemoryStore, SharedStore};

/// Nothing here waits.
const LIMIT: Duration = Duration::from_secs(20);

/// Reads a log that begins with `state`, unless that is empty, and goes on with `entries`. `check` sees the state before and
/// after each entry, and the first state twice.
///
/// Says whether all of it could be read, and at least one entry was.
pub fn read_all<'a, M>(
    mac: Mac,
    state: &[u8],
    entries: impl Iterator<Item = Option<&'a [u8]>>,
    check: impl Fn(&M, &M),
) -> bool
where
    M: Machine + PartialEq + fmt::Debug,
    M::Entry: PartialEq,
{
    let (store, deadline): (SharedStore, _) = (Arc::new(MemoryStore::new()), Deadline::after(LIMIT));
    // Its parts would be waited for.
    if state.first() == Some(&IN_PARTS) {
        return false;
    }
    if !state.is_empty() {
        let base = STRIDE.to_string();
        let written = store
            .set(BASE, base.as_bytes(), deadline)
            .and_then(|()| store.set(&state_key(STRIDE), state, deadline));
        assert!(written.is_ok());
    }
    let log = Log::<M>::new(Arc::clone(&store), mac);
    let Ok((mut state, mut index)) = log.begin(deadline) else { return false };
    check(&state, &state);
    let mut any = false;
    for bytes in entries {
        let Some(bytes) = bytes else { return false };
        assert!(store.set(&key(index), bytes, deadline).is_ok());
        let Ok(Read::Entry(entry)) = log.read(index, deadline) else { return false };
        let again = encode(M::VERSION, &entry).and_then(|bytes| decode(M::VERSION, &bytes, M::AUTHOR));
        assert!(again.is_ok_and(|again: M::Entry| again == entry));
        let before = state.clone();
        let _ = state.apply(entry);
        check(&before, &state);
        if let Some(compaction) = M::COMPACTION {
            // A later reader begins at this state.
            let again = (compaction.encode)(&state).and_then(|bytes| (compaction.decode)(&bytes));
            assert!(again.is_ok_and(|again| again == state));
        }
        index += 1;
        any = true;
    }
    any
}
