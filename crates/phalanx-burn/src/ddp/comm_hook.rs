//! How buckets are averaged: the hook, and its state in checkpoints.

use burn::module::Module;
#[cfg(feature = "nccl")]
use phalanx::Caller;
use phalanx::Result;
use phalanx::reducer::HookedReducer;
#[cfg(feature = "nccl")]
use phalanx::reducer::hooks::BuiltInHook;
use phalanx::reducer::hooks::{self, CommHook, HookState};
#[cfg(feature = "nccl")]
use phalanx::reducer::verify_state_on;

use super::Ddp;
use crate::sink::{Deliveries, Sink};

impl<M: Module> Ddp<M> {
    /// From the next step on, `hook` averages the buckets; see [the available hooks](phalanx::reducer::hooks). All
    /// ranks call it together, with the same settings. In a world of one it is not used.
    ///
    /// Where NCCL averages, it is [`AllReduce`](hooks::AllReduce); [`Compressed`](hooks::Compressed); [`PowerSgd`](hooks::PowerSgd), among devices of one
    /// model; or [`PostLocalSgd`](hooks::PostLocalSgd) without a smaller group: they then work on the device. A hook of your own is refused.
    ///
    /// If a [`TrainState`](crate::TrainState) was loaded before, from a checkpoint or a commit with the state of a hook, `hook` goes on
    /// from that. It must have the same settings; [`discard_hook_state`](Self::discard_hook_state) lets any hook begin anew.
    ///
    /// # Errors
    /// On every rank, if the hooks differ, or the loaded state is that of another hook, or a checkpoint was loaded that has none for this
    /// one. The group then ends.
    pub fn register_comm_hook(&mut self, hook: impl CommHook + 'static) -> Result<()> {
        let built_in = hook.built_in();
        if built_in.is_none() {
            self.check_on_host(&format!("register_comm_hook({})", hook.describe()))?;
        }
        let Some(sink) = self.engine.sink() else { return Ok(()) };
        sink.call(|reducer| self.loaded_hook.register(reducer, Box::new(hook)))?;
        #[cfg(feature = "nccl")]
        if let Some(nccl) = self.engine.on_device()
            && matches!(built_in, Some(BuiltInHook::PowerSgd(_)))
        {
            // Each rank multiplies the factors, which must give the same bits.
            let group = self.group.in_call(Caller::DdpRegisterCommHook);
            return sink.call(|_| verify_state_on(&group, &nccl.device_name()?, Vec::new()));
        }
        Ok(())
    }

    /// Drops the state of a communication hook that was loaded and that no hook has taken, so that training goes on with another hook,
    /// or with none; and lets a hook begin anew that the loaded checkpoint lacks. All ranks call it together.
    pub fn discard_hook_state(&mut self) {
        self.loaded_hook.discard();
    }

    /// What the hook keeps between steps: also the loaded state of one that is not registered, or not used, because this is a world of
    /// one.
    pub(crate) fn hook_state(&self) -> Result<Option<HookState>> {
        self.loaded_hook.state(self.hooked())
    }

    /// An error if the hook that is registered cannot go on from `state`. Nothing changes.
    pub(crate) fn check_hook(&self, state: Option<&HookState>) -> Result<()> {
        hooks::check_hook(self.hooked(), state)
    }

    /// Lets the hook go on from `state`, which [`check_hook`](Self::check_hook) has accepted, or the one that will be registered.
    pub(crate) fn load_hook(&mut self, state: Option<HookState>) -> Result<()> {
        self.loaded_hook.load(self.engine.sink().map(Sink::hooked), state)
    }

    pub(super) fn hooked(&self) -> Option<&HookedReducer<Deliveries>> {
        self.engine.sink().map(Sink::hooked)
    }
}
