//! How a batch is made of its items.

use std::sync::Arc;

use phalanx::Result;

use crate::settings::Collate;

/// How a batch is made of its items.
pub(crate) enum Collating<I, B> {
    /// Of the list of them, when all are read.
    All(Collate<I, B>),
    /// Of one after the other, when each is read.
    Each(Begin<B>, Add<I, B>),
}

/// Makes a batch without items, for so many.
pub(crate) type Begin<B> = Arc<dyn Fn(usize) -> B + Send + Sync>;
/// Adds an item to a batch.
pub(crate) type Add<I, B> = Arc<dyn Fn(&mut B, I) -> Result<()> + Send + Sync>;

impl<I, B> Clone for Collating<I, B> {
    fn clone(&self) -> Self {
        match self {
            Self::All(collate) => Self::All(collate.clone()),
            Self::Each(begin, add) => Self::Each(begin.clone(), add.clone()),
        }
    }
}
