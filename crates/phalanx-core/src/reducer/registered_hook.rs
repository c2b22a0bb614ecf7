//! The communication hook of a reducer: its registration, which ranks compare, and what it keeps from step to step.

use super::Reducer;
use super::hooks::{BuiltInHook, CommHook, HookLabel, HookState};
use super::verify::{self, Contract};
use crate::caller::Caller;
use crate::error::{Error, Result};

impl Reducer {
    /// From the next step on `hook` averages the buckets; or, where gradients lie [elsewhere](Self::elsewhere), what averages them does there
    /// what the [built-in](CommHook::built_in) `hook` does, or `hook` itself if it works [there](CommHook::is_elsewhere). All ranks call it together.
    ///
    /// # Errors
    /// On every rank, if the ranks' hooks or their settings differ, or the ranks of a smaller group ([`PostLocalSgd::subgroup`](super::hooks::PostLocalSgd::subgroup));
    /// if `hook` cannot average gradients where they lie; if averages are [sharded](Self::shard), and `hook` does not always average over all ranks.
    pub fn register_hook(&mut self, hook: Box<dyn CommHook>) -> Result<()> {
        self.register_hook_from(hook, None)
    }

    /// As [`register_hook`](Self::register_hook), for a hook that is to continue from this state, which the ranks compare.
    pub(super) fn register_hook_from(
        &mut self,
        hook: Box<dyn CommHook>,
        state: Option<&HookState>,
    ) -> Result<()> {
        self.state.check_replayable(false, hook.is_stateless())?;
        let replaces = hook.is_elsewhere() == self.elsewhere;
        if !replaces && !self.elsewhere {
            return Err(Error::invalid_argument(format!(
                "register_hook({}): it averages gradients elsewhere, and they are in the memory of this process",
                hook.describe()
            ))
            .with_remedy("register it where gradients are averaged where they lie"));
        }
        if !replaces && !self.takes_over(&*hook)? {
            return self.check_here(&format!("register_hook({})", hook.describe()));
        }
        let loaded = state.map_or_else(|| HookState::default().digest(), HookState::digest);
        let description = vec![
            ("communication hook".to_owned(), hook.describe()),
            ("loaded state of the communication hook".to_owned(), loaded),
        ];
        let contract = Contract { parameters: Vec::new(), options: description, device: None, plan_hash: 0 };
        let group = self.group.in_call(Caller::DdpRegisterCommHook);
        let verified = verify::verify(&*group, &contract).and_then(|()| match hook.built_in() {
            // All ranks have this hook.
            Some(BuiltInHook::PostLocalSgd(local)) => {
                local.process_group().map_or(Ok(()), |part| verify::verify_parts(&*group, &part))
            }
            Some(BuiltInHook::AllReduce | BuiltInHook::Compressed(_) | BuiltInHook::PowerSgd(_)) | None => {
                Ok(())
            }
        });
        verified.map_err(|error| self.abort(error))?;
        self.is_hook_registered = !matches!(hook.built_in(), Some(BuiltInHook::AllReduce));
        if replaces {
            self.hook = hook;
        }
        self.check_shards().map_err(|error| self.abort(error))
    }

    /// Has what averages gradients elsewhere do what `hook` does; false if it cannot.
    fn takes_over(&mut self, hook: &dyn CommHook) -> Result<bool> {
        hook.built_in().map_or(Ok(false), |hook| self.hook.act_as(hook))
    }

    /// What the hook keeps from step to step, for a checkpoint.
    ///
    /// # Errors
    /// In a backward pass. If it [cannot be read](CommHook::state).
    pub fn hook_state(&self) -> Result<HookState> {
        self.read_hook(|hook| hook.state())
    }

    /// As [`hook_state`](Self::hook_state), [without](CommHook::common_state) what each rank has of its own.
    ///
    /// # Errors
    /// As [`hook_state`](Self::hook_state).
    pub fn common_hook_state(&self) -> Result<HookState> {
        self.read_hook(|hook| hook.common_state())
    }

    fn read_hook(&self, read: impl FnOnce(&dyn CommHook) -> Result<HookState>) -> Result<HookState> {
        self.between_steps()?;
        let state = read(&*self.hook)?;
        // One that keeps nothing so far is named, so that it can go back to that.
        let keeps_nothing = self.hook.is_stateless() && state.is_empty();
        Ok(if keeps_nothing { state } else { state.of(self.hook.describe()) })
    }

    /// What [`hook_state`](Self::hook_state) would say of itself. What the hook keeps is not read for it: that may be much, and on a device.
    pub(super) fn hook_label(&self) -> Result<HookLabel> {
        self.between_steps()?;
        let is_empty = !self.hook.keeps_state()?;
        let is_nameless = self.hook.is_stateless() && is_empty;
        Ok(HookLabel { hook: if is_nameless { String::new() } else { self.hook.describe() }, is_empty })
    }

    /// The hook that was registered, in words; none for [`AllReduce`](super::hooks::AllReduce), which each reducer does without one.
    pub(super) fn registered_hook(&self) -> Option<String> {
        self.is_hook_registered.then(|| self.hook.describe())
    }

    /// Lets the hook continue from the state of one with the same settings. All ranks call it together with the same state, apart from
    /// tensors of their own. An empty state is that of a hook that keeps none, or none so far; it takes a hook back to that.
    ///
    /// # Errors
    /// If it is the state of another hook, or of one with other settings; the hook is then unchanged. In a backward pass. What the hook has kept
    /// so far need not be readable: it is replaced.
    pub fn load_hook_state(&mut self, state: HookState) -> Result<()> {
        self.between_steps()?;
        let here = self.hook_label()?;
        if here.hook != state.hook() {
            if here.is_empty && state.is_empty() {
                return Ok(());
            }
            let saved = if state.hook().is_empty() { "none" } else { state.hook() };
            return Err(Error::mismatch(format!(
                "the saved state of the communication hook is that of {saved}, and the hook here is {}",
                self.hook.describe()
            )));
        }
        let count = self.parameters().len();
        if let Some(tensor) = state.tensors().iter().find(|tensor| tensor.parameter >= count) {
            return Err(Error::mismatch(format!(
                "the saved state of the communication hook is of parameter number {}, and there are {count}",
                tensor.parameter
            )));
        }
        self.hook.load(state)
    }

    fn between_steps(&self) -> Result<()> {
        if self.state.in_backward() {
            return Err(Error::invalid_argument(
                "the state of a communication hook is asked for in the middle of a step",
            )
            .with_remedy("save and load it between steps"));
        }
        Ok(())
    }
}
