//! How buckets are averaged: the hook, and its state in checkpoints.

use std::collections::HashMap;

use phalanx::reducer::hooks::{self, BuiltInHook, CommHook, HookState};
use phalanx::reducer::{HookedReducer, verify_state_on};
use phalanx::{Caller, Communicator as _, Error, Result};

use super::Ddp;
use crate::nccl::{DeviceHook, Hook, OwnHook};
use crate::sink::{Deliveries, Sink};

impl Ddp {
    /// From the next step on, `hook` averages the buckets; see [the available hooks](phalanx::reducer::hooks). All
    /// ranks call it together, with the same settings. In a world of one it is not used.
    ///
    /// Over [NCCL](Self::with_nccl) it is [`AllReduce`](hooks::AllReduce); [`Compressed`](hooks::Compressed); [`PowerSgd`](hooks::PowerSgd), among devices
    /// of one model; or [`PostLocalSgd`](hooks::PostLocalSgd): they then work on the device. The ranks of a smaller group
    /// ([`PostLocalSgd::subgroup`](hooks::PostLocalSgd::subgroup)) make a communicator of their own in this call. A hook of your own is a
    /// [`DeviceHook`] there, for [`register_device_hook`](Self::register_device_hook).
    ///
    /// If a [`TrainState`](crate::TrainState) was loaded before, from a checkpoint or a commit with the state of a hook, `hook` continues
    /// from that. It must have the same settings; [`discard_hook_state`](Self::discard_hook_state) lets any hook begin anew.
    ///
    /// # Errors
    /// On every rank, if the hooks or the loaded states differ, or the loaded state is that of another hook, or a checkpoint was loaded that has none for this
    /// one. The group then ends.
    pub fn register_comm_hook(&mut self, hook: impl CommHook + 'static) -> Result<()> {
        let Some(sink) = &self.sink else {
            self.loaded_hook.mark_unused(&hook);
            return Ok(());
        };
        let built_in = hook.built_in();
        if built_in.is_none() && sink.is_on_device() {
            let cause = format!(
                "register_comm_hook({}): NCCL averages these gradients in the memory of the device",
                hook.describe()
            );
            return sink.call(|_| {
                Err(Error::invalid_argument(cause).with_remedy(
                    "write it as a DeviceHook, and register that by register_device_hook; or average in the host's memory, with Ddp::with_options",
                ))
            });
        }
        sink.call(|reducer| self.loaded_hook.register(reducer, Box::new(hook)))?;
        match (built_in, sink.on_device()) {
            // Each rank makes the factors orthonormal, which must give the same bits.
            (Some(BuiltInHook::PowerSgd(_)), _) => self.check_devices(),
            // All ranks have this hook, and so those of the smaller group come.
            (Some(BuiltInHook::PostLocalSgd(local)), Some(on_device)) => match local.process_group() {
                Some(group) => sink.call(|_| on_device.within(&group).map(drop)),
                None => Ok(()),
            },
            (Some(BuiltInHook::PostLocalSgd(_)), None)
            | (Some(BuiltInHook::AllReduce | BuiltInHook::Compressed(_)) | None, _) => Ok(()),
        }
    }

    /// From the next step on, `hook` says what is sent of each bucket, and makes averages of what comes back, on the device. All ranks call it
    /// together, with the same settings, and their devices are of one model: each computes the averages by itself. In a world of one it is not used.
    /// [`register_comm_hook`](Self::register_comm_hook) takes its place again. State that was loaded continues as there. A panic of the hook is an
    /// error of the step, on every rank.
    ///
    /// # Errors
    /// As [`register_comm_hook`](Self::register_comm_hook), and if gradients are averaged in the host's memory.
    #[doc(alias = "register_comm_hook")]
    pub fn register_device_hook(&mut self, hook: impl DeviceHook + 'static) -> Result<()> {
        let Some(sink) = &self.sink else {
            self.loaded_hook.mark_removed(Some(hook.describe()));
            return Ok(());
        };
        let Some(on_device) = sink.on_device() else {
            let cause = format!(
                "register_device_hook({}): these gradients are averaged in the host's memory",
                hook.describe()
            );
            return sink.call(|_| {
                Err(Error::invalid_argument(cause)
                    .with_remedy("make the Ddp by with_nccl, or register a CommHook by register_comm_hook"))
            });
        };
        sink.call(|reducer| {
            let own = OwnHook::new(on_device.clone(), Box::new(hook));
            let hook = Hook::own(on_device, Box::new(own))?;
            self.loaded_hook.register(reducer, Box::new(hook))
        })?;
        self.check_devices()
    }

    /// An error if the ranks' devices are of several models, where NCCL averages.
    fn check_devices(&self) -> Result<()> {
        let Some(sink) = &self.sink else { return Ok(()) };
        let Some(on_device) = sink.on_device() else { return Ok(()) };
        let group = self.group.in_call(Caller::DdpRegisterCommHook);
        sink.call(|_| verify_state_on(&group, &on_device.device_name()?, Vec::new(), &[]))
    }

    /// Drops the state of a communication hook that was loaded and that no hook has taken, so that training continues with another hook,
    /// or with none; lets a hook begin anew that the loaded checkpoint lacks; and lets training go on without one that was registered before a
    /// [`TrainState`](crate::TrainState) changed the group. All ranks call it together.
    pub fn discard_hook_state(&mut self) {
        self.loaded_hook.discard();
    }

    /// What the hook keeps between steps: also the loaded state of one that is not registered, or not used, because this is a world of
    /// one.
    pub(crate) fn hook_state(&self) -> Result<Option<HookState>> {
        self.loaded_hook.state(self.hooked())
    }

    /// The hook that is registered, or that was before the group changed.
    pub(crate) fn registered_hook(&self) -> Result<Option<String>> {
        self.loaded_hook.registered(self.hooked())
    }

    /// The same without what each rank has of its own.
    pub(crate) fn common_hook_state(&self) -> Result<Option<HookState>> {
        self.loaded_hook.common_state(self.hooked())
    }

    /// An error if the hook that is registered cannot continue from `state`. Nothing changes.
    pub(crate) fn check_hook(&self, state: Option<&HookState>) -> Result<()> {
        hooks::check_hook(self.hooked(), state)
    }

    /// Lets the hook continue from `state`, which [`check_hook`](Self::check_hook) has accepted, or the one that will be registered.
    pub(crate) fn load_hook(&mut self, state: Option<HookState>) -> Result<()> {
        self.loaded_hook.load(self.sink.as_deref().map(Sink::hooked), state)
    }

    /// A hook's `state`, in which parameters have their numbers among `names`, with the numbers of here: some may have been frozen or unfrozen since.
    pub(crate) fn renumbered(&self, state: HookState, names: &[String]) -> HookState {
        let here = self.parameter_names();
        if here == names {
            return state;
        }
        let places: HashMap<&str, usize> = here.into_iter().zip(0..).collect();
        state.renumbered(|number| places.get(names.get(number)?.as_str()).copied())
    }

    /// The same for the state that waits for a hook.
    pub(super) fn renumber_hook(&mut self, names: &[String]) -> Result<()> {
        if self.parameter_names() == names {
            return Ok(());
        }
        let state = self.loaded_hook.state::<Deliveries>(None)?;
        let state = state.map(|state| self.renumbered(state, names));
        self.loaded_hook.load::<Deliveries>(None, state)
    }

    /// The group is left: the hook that is registered next continues from what its hook keeps. After a failure the last commit has that, and a device may
    /// not give it.
    pub(super) fn keep_hook(&mut self) {
        let group = self.group.process_group();
        if group.is_none_or(|group| group.watched_failure().is_none()) {
            self.loaded_hook.keep(self.sink.as_deref().map(Sink::hooked));
        }
    }

    pub(super) fn hooked(&self) -> Option<&HookedReducer<Deliveries>> {
        self.sink.as_deref().map(Sink::hooked)
    }
}
