//! How a batch is made of its items.

use std::sync::Arc;

use parking_lot::Mutex;
use phalanx::Result;

use crate::settings::Collate;

/// How a batch is made of its items.
pub(crate) enum Collating<I, B> {
    /// Of the list of them, when all are read.
    All(Collate<I, B>),
    /// Of one after the other, when each is read.
    Each(Each<I, B>),
}

/// How a batch is made of one item after the other.
pub(crate) struct Each<I, B> {
    begin: Begin<B>,
    add: Add<I, B>,
    /// Empties a batch whose memory is used again; none if none is.
    clear: Option<Clear<B>>,
    /// Those that the loop has given back.
    used: Arc<Mutex<Vec<B>>>,
}

/// Makes a batch without items, for so many.
pub(crate) type Begin<B> = Arc<dyn Fn(usize) -> B + Send + Sync>;
/// Adds an item to a batch.
pub(crate) type Add<I, B> = Arc<dyn Fn(&mut B, I) -> Result<()> + Send + Sync>;
/// Takes all items out of a batch.
pub(crate) type Clear<B> = Arc<dyn Fn(&mut B) + Send + Sync>;

impl<I, B> Each<I, B> {
    pub fn new(begin: Begin<B>, add: Add<I, B>) -> Self {
        Self { begin, add, clear: None, used: Arc::default() }
    }

    /// Uses batches again, which `clear` empties.
    pub fn reuse(self, clear: Clear<B>) -> Self {
        Self { clear: Some(clear), ..self }
    }

    /// A batch without items, for so many: one that was given back, or a new one.
    pub fn begin(&self, items: usize) -> B {
        let Some(clear) = &self.clear else { return (self.begin)(items) };
        let used = self.used.lock().pop();
        match used {
            Some(mut batch) => {
                clear(&mut batch);
                batch
            }
            None => (self.begin)(items),
        }
    }

    pub fn add(&self, batch: &mut B, item: I) -> Result<()> {
        (self.add)(batch, item)
    }

    /// Keeps a batch of which the loop has no more need, unless there are `most` already.
    pub fn give_back(&self, batch: B, most: usize) {
        let mut used = self.used.lock();
        if self.clear.is_some() && used.len() < most {
            used.push(batch);
        }
    }
}

impl<I, B> Collating<I, B> {
    /// Whether batches are used again.
    pub fn is_reusing(&self) -> bool {
        matches!(self, Self::Each(Each { clear: Some(_), .. }))
    }
}

impl<I, B> Clone for Each<I, B> {
    fn clone(&self) -> Self {
        let Self { begin, add, clear, used } = self;
        Self { begin: begin.clone(), add: add.clone(), clear: clear.clone(), used: used.clone() }
    }
}

impl<I, B> Clone for Collating<I, B> {
    fn clone(&self) -> Self {
        match self {
            Self::All(collate) => Self::All(collate.clone()),
            Self::Each(each) => Self::Each(each.clone()),
        }
    }
}
