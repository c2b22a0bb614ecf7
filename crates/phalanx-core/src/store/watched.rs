//! A store for tests that look at each request, let it wait, or answer it with an error.

use std::cell::Cell;

use super::{MemoryStore, Store};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt::{self, INTERRUPT_INTERVAL};

/// What a [`Watched`] store is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// One operation.
    Simple,
    /// Changes, and then a wait for keys, in one request.
    SetAndGet,
}

/// A store in memory that calls a function before each request. If that fails, its error is the answer.
pub(crate) struct Watched<F> {
    store: MemoryStore,
    before: F,
}

impl<F: Fn(Request) -> Result<()> + Send + Sync> Watched<F> {
    pub fn new(before: F) -> Self {
        Self { store: MemoryStore::new(), before }
    }
}

/// A store that takes long for each request, makes the check of the program meanwhile, and fails.
pub(crate) fn checking() -> Watched<impl Fn(Request) -> Result<()> + Send + Sync> {
    Watched::new(|_| {
        interrupt::check()?;
        std::thread::sleep(2 * INTERRUPT_INTERVAL);
        interrupt::check()?;
        Err(Error::timeout("it is slow"))
    })
}

thread_local! {
    /// How far this thread is in a [`slow_beside_a_wait`].
    static PROGRESS: Cell<Progress> = const { Cell::new(Progress::None) };
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    None,
    Waits,
    Asks,
    IsInterrupted,
}

/// A check that fails once: while this thread asks [`slow_beside_a_wait`] something beside its first wait.
pub(crate) fn pressed_beside_a_wait() -> Result<()> {
    if PROGRESS.get() != Progress::Asks {
        return Ok(());
    }
    PROGRESS.set(Progress::IsInterrupted);
    Err(Error::aborted("somebody pressed Ctrl-C"))
}

/// A store that takes long for the first question that a thread asks beside a wait, and makes the check of the program meanwhile.
pub(crate) fn slow_beside_a_wait() -> Watched<impl Fn(Request) -> Result<()> + Send + Sync> {
    Watched::new(|request| {
        if request == Request::SetAndGet && PROGRESS.get() == Progress::None {
            PROGRESS.set(Progress::Waits);
        }
        if request == Request::Simple && PROGRESS.get() == Progress::Waits {
            PROGRESS.set(Progress::Asks);
            for _ in 0..100 {
                interrupt::check()?;
                std::thread::sleep(INTERRUPT_INTERVAL / 10);
            }
        }
        Ok(())
    })
}

macro_rules! pass_on {
    ($($call:ident($($name:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl<F: Fn(Request) -> Result<()> + Send + Sync> Store for Watched<F> {
            $(fn $call(&self, $($name: $kind,)* deadline: Deadline) -> Result<$result> {
                (self.before)(Request::Simple)?;
                self.store.$call($($name,)* deadline)
            })*

            fn set_and_get(
                &self,
                pairs: &[(&str, &[u8])],
                keys: &[&str],
                deadline: Deadline,
                go_on: &mut dyn FnMut() -> Result<()>,
            ) -> Result<Vec<Vec<u8>>> {
                (self.before)(Request::SetAndGet)?;
                self.store.set_and_get(pairs, keys, deadline, go_on)
            }

            fn compare_set_and_get(
                &self,
                changes: &[(&str, &[u8], &[u8])],
                keys: &[&str],
                deadline: Deadline,
                found: &mut dyn FnMut(&[Vec<u8>]) -> Result<()>,
                go_on: &mut dyn FnMut() -> Result<()>,
            ) -> Result<Vec<Vec<u8>>> {
                (self.before)(Request::SetAndGet)?;
                self.store.compare_set_and_get(changes, keys, deadline, found, go_on)
            }
        }
    };
}

pass_on! {
    set(key: &str, value: &[u8]) -> ();
    get(key: &str) -> Vec<u8>;
    wait(keys: &[&str]) -> ();
    check(keys: &[&str]) -> bool;
    add(key: &str, amount: i64) -> i64;
    compare_set(key: &str, expected: &[u8], desired: &[u8]) -> Vec<u8>;
    delete_key(key: &str) -> bool;
    num_keys() -> usize;
    append(key: &str, value: &[u8]) -> ();
    multi_get(keys: &[&str]) -> Vec<Vec<u8>>;
    multi_set(pairs: &[(&str, &[u8])]) -> ();
}
