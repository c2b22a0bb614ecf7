//! The communication hook of an adapter's `Ddp` over loads: a state may come before the hook that continues from it.

use super::{BuiltInHook, CommHook, HookLabel, HookState};
use crate::error::{Error, Result};
use crate::reducer::{HookedReducer, Reducer};

/// What an adapter's `Ddp` keeps of loaded states, until a hook takes it.
///
/// Each method gets the reducer, if there is one: a world of one has none, and uses no hook.
#[derive(Debug, Default)]
pub struct LoadedHook {
    /// The loaded state of a hook that is not registered yet.
    state: Option<HookState>,
    /// The hook of a checkpoint that was loaded without anything that it keeps, until one is registered. Empty if the checkpoint has no hook.
    absent: Option<String>,
    /// The hook that was registered before the group changed, if none was since.
    removed: Option<String>,
}

impl LoadedHook {
    /// Registers `hook`, which continues from the loaded state. All ranks call it together.
    ///
    /// # Errors
    /// As [`Reducer::register_hook`] and [`Reducer::load_hook_state`], and if a checkpoint was loaded that has no state for this hook. On every rank, if
    /// the loaded states differ.
    pub fn register(&mut self, reducer: &mut Reducer, hook: Box<dyn CommHook>) -> Result<()> {
        reducer.register_hook_from(hook, self.state.as_ref())?;
        let Self { state, absent, removed: _ } = std::mem::take(self);
        match (state, absent) {
            (Some(state), _) => reducer.load_hook_state(state).map_err(with_remedy),
            (None, Some(hook)) if hook.is_empty() => fits(&reducer.hook_label()?, None),
            (None, Some(hook)) => fits(&reducer.hook_label()?, Some(&HookState::default().of(hook))),
            (None, None) => Ok(()),
        }
    }

    /// Drops a loaded state that no hook has taken, lets a hook begin anew that the loaded checkpoint lacks, and lets training go on without one that was
    /// [removed](Self::mark_removed).
    pub fn discard(&mut self) {
        *self = Self::default();
    }

    /// A checkpoint was loaded without anything that a hook keeps. A hook that is registered from now on must keep nothing, or be `hook`, that of the
    /// checkpoint, which begins anew: it had kept nothing so far, or only what each of another number of ranks has of its own. Empty if the checkpoint has no
    /// hook.
    pub fn mark_absent(&mut self, hook: String) {
        self.absent = Some(hook);
    }

    /// What was given to [`mark_absent`](Self::mark_absent), if no hook was registered since.
    pub fn absent(&self) -> Option<&str> {
        self.absent.as_deref()
    }

    /// The group changes, which removes `hook`, if there is one: training in a larger group is an error until a hook is registered there.
    pub fn mark_removed(&mut self, hook: Option<String>) {
        self.removed = hook;
    }

    /// A world of one has no use for `hook`. As [`mark_removed`](Self::mark_removed), for when the group changes.
    pub fn mark_unused(&mut self, hook: &dyn CommHook) {
        let is_default = matches!(hook.built_in(), Some(BuiltInHook::AllReduce));
        self.mark_removed((!is_default).then(|| hook.describe()));
    }

    /// The hook that is registered, or that was before the group changed, in words; none for the one with which each reducer begins.
    ///
    /// # Errors
    /// If its description panics.
    pub fn registered<S>(&self, reducer: Option<&HookedReducer<S>>) -> Result<Option<String>> {
        let here = reducer.map(|reducer| reducer.ask(|reducer| Ok(reducer.registered_hook())));
        Ok(here.transpose()?.flatten().or_else(|| self.removed.clone()))
    }

    /// What the hook keeps between steps: also the loaded state of one that is not registered, or not used. Nothing if it never keeps
    /// anything; an empty state if it keeps nothing so far.
    ///
    /// # Errors
    /// As [`Reducer::hook_state`].
    pub fn state<S>(&self, reducer: Option<&HookedReducer<S>>) -> Result<Option<HookState>> {
        self.read(reducer, Reducer::hook_state)
    }

    /// As [`state`](Self::state), without what each rank has of its own, which is not read for it where the hook [can do so](CommHook::common_state).
    ///
    /// # Errors
    /// As [`state`](Self::state).
    pub fn common_state<S>(&self, reducer: Option<&HookedReducer<S>>) -> Result<Option<HookState>> {
        let state = self.read(reducer, Reducer::common_hook_state)?;
        Ok(state.map(HookState::without_own))
    }

    fn read<S>(
        &self,
        reducer: Option<&HookedReducer<S>>,
        read: fn(&Reducer) -> Result<HookState>,
    ) -> Result<Option<HookState>> {
        if let Some(state) = &self.state {
            return state.copied().map(Some);
        }
        let Some(reducer) = reducer else { return Ok(None) };
        let state = reducer.ask(|reducer| read(reducer))?;
        Ok(Some(state).filter(|state| !state.hook().is_empty()))
    }

    /// The reducer goes, between steps: the hook that is registered next continues from what its hook keeps, without what each rank has of its own. If that
    /// cannot be read, the next one begins anew.
    pub fn keep<S>(&mut self, reducer: Option<&HookedReducer<S>>) {
        if self.state.is_some() {
            return;
        }
        if let Ok(state) = self.common_state(reducer) {
            self.state = state.filter(|state| !state.is_empty());
        }
    }

    /// Lets the hook continue from `state`, which [`check_hook`] has accepted; or, if none that keeps a state is registered, the one that
    /// will be.
    ///
    /// # Errors
    /// As [`Reducer::load_hook_state`].
    pub fn load<S>(&mut self, reducer: Option<&HookedReducer<S>>, state: Option<HookState>) -> Result<()> {
        self.state = None;
        let Some(state) = state else { return Ok(()) };
        if let Some(reducer) = reducer
            && reducer.ask(|reducer| reducer.hook_label())?.hook == state.hook()
        {
            return reducer.ask(|reducer| reducer.load_hook_state(state));
        }
        // A hook that is registered later takes it; an empty state is what that begins with.
        self.state = Some(state).filter(|state| !state.is_empty());
        Ok(())
    }

    /// An error if training would continue without the hook whose state was loaded, or that was [removed](Self::mark_removed). In a world of one it does.
    ///
    /// # Errors
    /// If that state is still here, or no hook was registered since.
    pub fn check_taken<S>(&self, reducer: Option<&HookedReducer<S>>) -> Result<()> {
        if reducer.is_none() {
            return Ok(());
        }
        if let Some(state) = &self.state {
            return Err(with_remedy(Error::invalid_argument(format!(
                "the loaded state has that of the communication hook {}, and none is registered",
                state.hook()
            ))));
        }
        let Some(hook) = &self.removed else { return Ok(()) };
        Err(Error::invalid_argument(format!(
            "the communication hook {hook} was registered before the group changed, and none is registered in the group of now"
        ))
        .with_remedy(
            "register it after the calls that change the group, such as TrainState::with_group; to go on without it, call Ddp::discard_hook_state",
        ))
    }
}

/// An error if the hook that is registered cannot continue from `state`. Nothing changes. If none is here, one that is registered later
/// takes it.
///
/// # Errors
/// If the hook keeps anything, and it is the state of another one, or none. In a backward pass.
pub fn check_hook<S>(reducer: Option<&HookedReducer<S>>, state: Option<&HookState>) -> Result<()> {
    let Some(reducer) = reducer else { return Ok(()) };
    fits(&reducer.ask(|reducer| reducer.hook_label())?, state)
}

/// What [`LoadedHook::mark_absent`] gets after a checkpoint with this state of a hook was loaded; nothing if a hook goes on from that.
pub fn absent_hook(state: Option<&HookState>) -> Option<String> {
    state.is_none_or(HookState::is_empty).then(|| state.map_or("", HookState::hook).to_owned())
}

/// An error if the hook that is `here` cannot continue from what was `saved`. Two hooks that keep nothing, or nothing so far, have
/// nothing to continue from.
fn fits(here: &HookLabel, saved: Option<&HookState>) -> Result<()> {
    let is_same = saved.is_some_and(|saved| saved.hook() == here.hook);
    let is_nothing = here.is_empty && saved.is_none_or(HookState::is_empty);
    if here.hook.is_empty() || is_same || is_nothing {
        return Ok(());
    }
    let saved = saved.map_or("no communication hook", HookState::hook);
    Err(with_remedy(Error::mismatch(format!(
        "the saved state is that of {saved}, and the communication hook here is {}",
        here.hook
    ))))
}

fn with_remedy(error: Error) -> Error {
    error.with_remedy(
        "register the hook that was used when the state was saved; to begin with another hook, or with none, load first, call \
         Ddp::discard_hook_state, and register it then",
    )
}
