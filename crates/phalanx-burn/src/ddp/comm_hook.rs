//! How buckets are averaged: the hook, and its state in checkpoints.

use burn::module::Module;
use phalanx::reducer::hooks::{CommHook, HookState};
use phalanx::{Error, Result};

use super::Ddp;

impl<M: Module> Ddp<M> {
    /// From the next step on, `hook` averages the buckets; see [the available hooks](phalanx::reducer::hooks). All
    /// ranks call it together, with the same settings. In a world of one it is not used.
    ///
    /// If a [`TrainState`](crate::TrainState) was loaded before, from a checkpoint or a commit with the state of a hook, `hook` goes on
    /// from that. It must have the same settings; [`discard_hook_state`](Self::discard_hook_state) lets any hook begin anew.
    ///
    /// # Errors
    /// On every rank, if the hooks differ, or the loaded state is that of another hook, or a checkpoint was loaded that has none for this
    /// one. The group then ends.
    pub fn register_comm_hook(&mut self, hook: impl CommHook + 'static) -> Result<()> {
        self.check_on_host("register_comm_hook")?;
        let Some(sink) = self.engine.sink() else { return Ok(()) };
        sink.call(|reducer| reducer.register_hook(Box::new(hook)))?;
        let (state, is_expected) = (self.hook_state.take(), std::mem::take(&mut self.expects_hook));
        sink.call(|reducer| match state {
            Some(state) => reducer.load_hook_state(state).map_err(with_remedy),
            None if is_expected => fits(&reducer.hook_state()?, None),
            None => Ok(()),
        })
    }

    /// Drops the state of a communication hook that was loaded and that no hook has taken, so that training goes on with another hook,
    /// or with none; and lets a hook begin anew that the loaded checkpoint lacks. All ranks call it together.
    pub fn discard_hook_state(&mut self) {
        (self.hook_state, self.expects_hook) = (None, false);
    }

    /// A checkpoint without the state of a hook has been loaded: a hook that is registered from now on must keep none.
    pub(crate) fn expect_hook(&mut self) {
        self.expects_hook = true;
    }

    pub(crate) fn expects_hook(&self) -> bool {
        self.expects_hook
    }

    /// What the hook keeps between steps: also the loaded state of one that is not registered, or not used, because this is a world of
    /// one. Nothing if it never keeps anything; an empty state if it keeps nothing so far.
    pub(crate) fn hook_state(&self) -> Result<Option<HookState>> {
        if self.hook_state.is_some() {
            return Ok(self.hook_state.clone());
        }
        let Some(sink) = self.engine.sink() else { return Ok(None) };
        let state = sink.with_reducer(|reducer| reducer.hook_state())?;
        Ok(Some(state).filter(|state| !state.hook().is_empty()))
    }

    /// An error if the hook that is registered cannot go on from `state`. Nothing changes.
    pub(crate) fn check_hook(&self, state: Option<&HookState>) -> Result<()> {
        let here = match self.engine.sink() {
            Some(sink) => sink.with_reducer(|reducer| reducer.hook_state())?,
            None => HookState::default(),
        };
        fits(&here, state) // If no hook is here, one that is registered later takes it.
    }

    /// Lets the hook go on from `state`, which [`check_hook`](Self::check_hook) has accepted; or, if none that keeps a state is
    /// registered, the one that will be.
    pub(crate) fn load_hook(&mut self, state: Option<HookState>) -> Result<()> {
        self.hook_state = None;
        if let (Some(state), Some(sink)) = (&state, self.engine.sink())
            && sink.with_reducer(|reducer| reducer.hook_state())?.hook() == state.hook()
        {
            return sink.with_reducer(|reducer| reducer.load_hook_state(state.clone()));
        }
        // A hook that is registered later takes it; an empty state is what that begins with.
        self.hook_state = state.filter(|state| !state.is_empty());
        Ok(())
    }

    /// An error if training would go on without the hook whose state was loaded.
    pub(super) fn check_hook_state(&self) -> Result<()> {
        match (&self.hook_state, self.engine.sink()) {
            (Some(state), Some(_)) => {
                let cause = format!(
                    "the loaded state has that of the communication hook {}, and none is registered",
                    state.hook()
                );
                Err(with_remedy(Error::invalid_argument(cause)))
            }
            (None, _) | (_, None) => Ok(()),
        }
    }
}

/// An error if the hook whose state is `here` cannot go on from what was `saved`. Two hooks that keep nothing, or nothing so far, have
/// nothing to go on from.
fn fits(here: &HookState, saved: Option<&HookState>) -> Result<()> {
    let is_same = saved.is_some_and(|saved| saved.hook() == here.hook());
    let nothing = here.is_empty() && saved.is_none_or(HookState::is_empty);
    if here.hook().is_empty() || is_same || nothing {
        return Ok(());
    }
    let saved = saved.map_or("no communication hook", HookState::hook);
    Err(with_remedy(Error::mismatch(format!(
        "the saved state is that of {saved}, and the communication hook here is {}",
        here.hook()
    ))))
}

fn with_remedy(error: Error) -> Error {
    error.with_remedy(
        "register the hook that was used when the state was saved; to begin with another hook, or with none, load first, call \
         Ddp::discard_hook_state, and register it then",
    )
}
