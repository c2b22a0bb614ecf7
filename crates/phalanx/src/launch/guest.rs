//! A part of an elastic job whose workers meet on another machine, and are led from there.

use std::collections::VecDeque;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Which part, and where the workers meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) run_id: String,
    /// The store, which serves the whole job.
    pub(super) host: String,
    pub(super) port: u16,
    /// The number of the first worker here; the others follow.
    pub(super) first: u32,
    /// How many workers may take part, here and elsewhere.
    pub(super) most: u32,
    /// This node's place among the nodes, and how many there are.
    pub(super) node: u32,
    pub(super) nodes: u32,
}

/// What becomes of a place, by its number on this host, whose worker has failed; or of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Word {
    /// It gets another, now.
    Replace(u32),
    /// It stays empty.
    Vacate(u32),
    /// On some host a worker has ended well.
    Ending,
}

/// The part, and the words that come for it.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) part: Part,
    words: Arc<Words>,
}

#[derive(Debug)]
struct Words {
    queue: Mutex<VecDeque<Word>>,
    notice: PipeReader,
    wake: PipeWriter,
}

impl Guest {
    pub(super) fn new(part: Part) -> Result<Self> {
        let open = || {
            let (notice, wake) = io::pipe()?;
            // Neither end waits for the other: one byte that is there is as good as many.
            fcntl_setfl(&notice, fcntl_getfl(&notice)? | OFlags::NONBLOCK)?;
            fcntl_setfl(&wake, fcntl_getfl(&wake)? | OFlags::NONBLOCK)?;
            Ok(Words { queue: Mutex::default(), notice, wake })
        };
        let words = open()
            .map_err(|error: io::Error| Error::io("no pipe for the words of the job's command", error))?;
        Ok(Self { part, words: Arc::new(words) })
    }

    /// Says what becomes of a place.
    pub(super) fn say(&self, word: Word) {
        self.words.queue.lock().push_back(word);
        let _ = (&self.words.wake).write_all(&[0]);
    }

    /// Readable when something has been said.
    pub(super) fn notice(&self) -> BorrowedFd<'_> {
        self.words.notice.as_fd()
    }

    /// The next thing that was said.
    pub(super) fn hear(&self) -> Option<Word> {
        while matches!((&self.words.notice).read(&mut [0; 64]), Ok(1..)) {}
        self.words.queue.lock().pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_in_order_and_however_many_nobody_waits() {
        let part = Part {
            run_id: "x".to_owned(),
            host: "h".to_owned(),
            port: 1,
            first: 0,
            most: 1,
            node: 0,
            nodes: 1,
        };
        let guest = Guest::new(part).unwrap();
        assert_eq!(guest.hear(), None);
        // More than a pipe holds.
        (0..100_000).for_each(|place| guest.say(Word::Replace(place)));
        assert!((0..100_000).all(|place| guest.hear() == Some(Word::Replace(place))));
        assert_eq!(guest.hear(), None);
    }
}
