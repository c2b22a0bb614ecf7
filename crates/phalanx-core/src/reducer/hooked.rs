//! A reducer that hooks of a backward pass reach.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parking_lot::Mutex;

use super::Reducer;
use crate::error::{Error, Result, panic_message};

/// A reducer behind a lock, for hooks that autograd calls, with what an adapter keeps for gradients on their way.
///
/// Backward cannot return an error: the reducer keeps it, and has ended the group with it, so that other ranks do not wait for
/// what this one cannot do. The calls after backward return it.
///
/// So it is with a panic, such as a communication hook's: autograd's code may not survive it, and the other ranks do not wait.
pub struct HookedReducer<S>(Mutex<(Reducer, S)>);

impl<S> HookedReducer<S> {
    /// `reducer`, and the adapter's `state`.
    pub fn new(reducer: Reducer, state: S) -> Self {
        Self(Mutex::new((reducer, state)))
    }

    /// As [`Reducer::check`].
    ///
    /// # Errors
    /// The failure of this or an earlier backward pass, if there was one.
    pub fn check(&self) -> Result<()> {
        self.0.lock().0.check()
    }

    /// Runs `step` unless something has failed before.
    ///
    /// # Errors
    /// The earlier failure. An error of `step`, or a panic, which ends the reducer and the group.
    pub fn attempt<T>(&self, step: impl FnOnce(&mut Reducer, &mut S) -> Result<T>) -> Result<T> {
        let (reducer, state) = &mut *self.0.lock();
        reducer.check()?;
        unless_panic(|| step(reducer, state)).unwrap_or_else(Err).map_err(|error| reducer.abort(error))
    }

    /// [`Reducer::finish`], and passes the averages to `look`.
    ///
    /// # Errors
    /// As [`Reducer::finish`], and those of `look`. A peer's failure ends the reducer only if it does not
    /// [keep](Reducer::keep_gradients) its gradients. An error of `look`, or a panic, always ends it.
    pub fn finish<T>(&self, look: impl FnOnce(&mut Reducer, &mut S) -> Result<T>) -> Result<T> {
        self.averaged(Reducer::finish, look)
    }

    /// As [`finish`](Self::finish), by [`Reducer::replay`].
    ///
    /// # Errors
    /// As [`Reducer::replay`], and those of `look`.
    pub fn replay<T>(&self, look: impl FnOnce(&mut Reducer, &mut S) -> Result<T>) -> Result<T> {
        self.averaged(Reducer::replay, look)
    }

    fn averaged<T>(
        &self,
        average: impl FnOnce(&mut Reducer) -> Result<()>,
        look: impl FnOnce(&mut Reducer, &mut S) -> Result<T>,
    ) -> Result<T> {
        let (reducer, state) = &mut *self.0.lock();
        unless_panic(|| average(reducer)).unwrap_or_else(|panic| Err(reducer.abort(panic)))?;
        unless_panic(|| look(reducer, state)).unwrap_or_else(Err).map_err(|error| reducer.abort(error))
    }

    /// Passes the reducer to `look`, also after a failure.
    ///
    /// # Errors
    /// Those of `look`, which end nothing. A panic ends the reducer and the group, since what it has left half done, such as a hook's state, must not
    /// be used.
    pub fn ask<T>(&self, look: impl FnOnce(&mut Reducer) -> Result<T>) -> Result<T> {
        let (reducer, _) = &mut *self.0.lock();
        unless_panic(|| look(reducer)).unwrap_or_else(|panic| Err(reducer.abort(panic)))
    }

    /// Passes the adapter's state to `look`, also after a failure.
    pub fn with_state<T>(&self, look: impl FnOnce(&mut S) -> T) -> T {
        look(&mut self.0.lock().1)
    }

    /// Passes the reducer to `look`, also after a failure.
    pub fn with_reducer<T>(&self, look: impl FnOnce(&mut Reducer) -> T) -> T {
        look(&mut self.0.lock().0)
    }
}

/// What `call` returns; or the error for its panic. The reducer ends then, and nobody uses what the panic has left half done.
fn unless_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<Result<T>> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| panicked(&*panic))
}

/// The error for a panic of a communicator's or a hook's, for adapters whose autograd it must not reach.
pub fn panicked(panic: &(dyn Any + Send)) -> Error {
    Error::aborted(format!("a panic in a communicator or a communication hook: {}", panic_message(panic)))
}
