//! What tests of loaders share.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx::{Rank, Result, WorldSize};
use phalanx_data::{Dataset, InMemory};

pub fn world(size: u32) -> WorldSize {
    WorldSize::new(size).unwrap()
}

pub fn shards(size: u32) -> impl Iterator<Item = (Rank, WorldSize)> {
    world(size).ranks().map(move |rank| (rank, world(size)))
}

/// The numbers below it.
pub fn numbers(len: usize) -> InMemory<usize> {
    (0..len).collect()
}

/// Does something with an index.
pub struct Function<F>(pub usize, pub F);

impl<T, F: Fn(usize) -> Result<T> + Send + Sync> Dataset for Function<F> {
    type Item = T;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> Result<T> {
        (self.1)(index)
    }
}

/// Counts threads, from when each has called [`enter`](Self::enter) to its end.
#[derive(Clone, Default)]
pub struct ThreadCount(Arc<AtomicUsize>);

struct Entered(ThreadCount);

impl Drop for Entered {
    fn drop(&mut self) {
        (self.0).0.fetch_sub(1, Ordering::SeqCst);
    }
}

thread_local! {
    static ENTERED: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
}

impl ThreadCount {
    /// Counts this thread until it has ended: the last thing that a thread does is to drop what is local to it.
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        ENTERED.with_borrow_mut(|entered| entered.push(Entered(self.clone())));
    }

    pub fn alive(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}
