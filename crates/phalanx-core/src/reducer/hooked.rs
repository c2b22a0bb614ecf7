//! A reducer that hooks of a backward pass reach.

use parking_lot::Mutex;

use super::Reducer;
use crate::error::Result;

/// A reducer behind a lock, for hooks that autograd calls, with what an adapter keeps for gradients on their way.
///
/// Backward cannot return an error: the reducer keeps it, and has ended the group with it, so that other ranks do not wait for
/// what this one cannot do. The calls after backward return it.
pub struct HookedReducer<S>(Mutex<(Reducer, S)>);

impl<S> HookedReducer<S> {
    /// `reducer`, and the adapter's `state`.
    pub fn new(reducer: Reducer, state: S) -> Self {
        Self(Mutex::new((reducer, state)))
    }

    /// The failure of this or an earlier backward pass, if there was one.
    pub fn check(&self) -> Result<()> {
        self.0.lock().0.check()
    }

    /// Runs `step` unless something has failed before. An error of `step` ends the reducer and the group.
    pub fn attempt<T>(&self, step: impl FnOnce(&mut Reducer, &mut S) -> Result<T>) -> Result<T> {
        let (reducer, state) = &mut *self.0.lock();
        reducer.check()?;
        step(reducer, state).map_err(|error| reducer.abort(error))
    }

    /// [`Reducer::finish`], and passes the averages to `look`. A peer's failure ends the reducer only if it does not
    /// [keep](Reducer::keep_gradients) its gradients, an error of `look` always.
    pub fn finish<T>(&self, look: impl FnOnce(&mut Reducer, &mut S) -> Result<T>) -> Result<T> {
        self.averaged(Reducer::finish, look)
    }

    /// As [`finish`](Self::finish), by [`Reducer::replay`].
    pub fn replay<T>(&self, look: impl FnOnce(&mut Reducer, &mut S) -> Result<T>) -> Result<T> {
        self.averaged(Reducer::replay, look)
    }

    fn averaged<T>(
        &self,
        average: impl FnOnce(&mut Reducer) -> Result<()>,
        look: impl FnOnce(&mut Reducer, &mut S) -> Result<T>,
    ) -> Result<T> {
        let (reducer, state) = &mut *self.0.lock();
        average(reducer)?;
        look(reducer, state).map_err(|error| reducer.abort(error))
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
