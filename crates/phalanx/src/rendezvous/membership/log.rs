//! A list in a store, to which many append and which all read in one order.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::mac::Mac;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::{SharedStore, Store};

/// Entry `n` is the value of `log/<n>`. Whoever writes it first, has written it: [`Store::compare_set`] on a key that is
/// not there.
pub(crate) struct Log {
    store: SharedStore,
    /// Entries before this one are there.
    end: u64,
}

impl Log {
    pub(crate) fn new(store: SharedStore) -> Self {
        Self { store, end: 0 }
    }

    /// Entries before `index` are known to be there, or to have been.
    pub(crate) fn skip_to(&mut self, index: u64) {
        self.end = self.end.max(index);
    }

    /// So many entries are known to be there, or to have been.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Appends `entry`, which must differ from every other one and not be empty, and gives its index.
    pub(crate) fn append(&mut self, entry: &[u8], deadline: Deadline) -> Result<u64> {
        self.append_signed(entry, &Mac::none(), deadline)
    }

    /// The same, under a mac.
    pub(crate) fn append_signed(&mut self, entry: &[u8], mac: &Mac, deadline: Deadline) -> Result<u64> {
        loop {
            let index = self.end;
            let signed = mac.sign(index, entry);
            let there = self.store.compare_set(&key(index), b"", &signed, deadline)?;
            self.end += 1;
            if there == signed {
                return Ok(index);
            }
        }
    }
}

/// Entry `index`; waits until it is there.
pub(crate) fn read(store: &dyn Store, index: u64, deadline: Deadline) -> Result<Vec<u8>> {
    store.get(&key(index), deadline)
}

/// An entry as bytes, behind its version: a reader of another one is told so instead of misreading it.
pub(crate) fn encode(version: u8, entry: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_extend(entry, vec![version])
        .map_err(|error| Error::protocol(format!("an entry of the log cannot be written: {error}")))
}

/// What `author` has encoded.
pub(crate) fn decode<T: DeserializeOwned>(version: u8, bytes: &[u8], author: &str) -> Result<T> {
    let unreadable = |why: String| {
        Error::protocol(format!("what {author} says cannot be read: {why}"))
            .with_remedy("start everything in a job with the same version of Phalanx")
    };
    match bytes.split_first() {
        Some((found, rest)) if *found == version => {
            postcard::from_bytes(rest).map_err(|error| unreadable(error.to_string()))
        }
        Some((found, _)) => Err(unreadable(format!("it is version {found}, not {version}"))),
        None => Err(unreadable("it is empty".to_owned())),
    }
}

/// Where entry `index` is.
pub(crate) fn key(index: u64) -> String {
    format!("log/{index}")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn those_who_append_at_once_get_one_order() {
        let store: SharedStore = Arc::new(MemoryStore::new());
        let deadline = Deadline::after(Duration::from_secs(20));
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let mut log = Log::new(Arc::clone(&store));
                scope.spawn(move || {
                    for number in 0..25_u8 {
                        log.append(&[1, writer, number], deadline).unwrap();
                    }
                });
            }
        });
        let mut next = [0; 4];
        for index in 0..100 {
            let entry = read(&*store, index, deadline).unwrap();
            assert_eq!(entry[2], next[entry[1] as usize]);
            next[entry[1] as usize] += 1;
        }
        assert!(!store.check(&["log/100"], deadline).unwrap());
    }
}
