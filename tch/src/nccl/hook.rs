//! What the buckets of a reducer send, where NCCL averages them.

use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use phalanx::reducer::hooks::{
    CommHook, ElsewhereBuckets, ElsewhereHook, GradBucket, HookState, Pending, PowerSgdOptions, Sent,
};
use phalanx::{Communicator, DType, Error, Rank, Result};
use tch::Kind;

use super::device_hook::{DeviceHook, Own};
use super::power_sgd::LowRank;
use super::{OnDevice, lock};

/// The hook of a reducer whose gradients [`OnDevice`] averages.
pub(crate) type Hook = ElsewhereHook<OnDevice>;

impl ElsewhereBuckets for OnDevice {
    fn describe(&self) -> String {
        "NCCL".into()
    }

    fn group(&self) -> &dyn Communicator {
        &self.group
    }

    fn average(self: &Arc<Self>, bucket: GradBucket, sent: Sent) -> Result<Pending> {
        match (bucket.buffer.dtype(), &sent) {
            (DType::F32, Sent::Rounded(DType::F16)) | (DType::F16, _) => self.average_by::<f16>(bucket, sent),
            (DType::F32, Sent::Rounded(_)) | (DType::BF16, _) => self.average_by::<bf16>(bucket, sent),
            (DType::F32, _) => self.average_by::<f32>(bucket, sent),
            (DType::F64, _) => self.average_by::<f64>(bucket, sent),
            (other, _) => Err(Error::invalid_argument(format!("gradients of type {other} are not averaged"))),
        }
    }

    fn approximate(&self, low_rank: Option<(PowerSgdOptions, u64)>) -> Result<()> {
        if low_rank.is_some_and(|(options, _)| !options.has_warm_start()) {
            return Err(Error::invalid_argument(
                "PowerSGD with warm_start(false) where NCCL averages: each step would wait for random factors of the host",
            )
            .with_remedy("leave warm_start on, or average in the host's memory, with Ddp::with_options"));
        }
        self.leave_subgroup()?;
        let state = &mut *lock(&self.state);
        let begin = |(options, steps)| LowRank::new(options, &state.parameters, steps);
        let low_rank = low_rank.map(begin).transpose()?;
        state.low_rank = low_rank;
        state.buckets.iter_mut().flatten().for_each(|bucket| {
            (bucket.low_rank, bucket.own) = (None, Vec::new());
        });
        // Another hook sends something else.
        self.compared.forget();
        Ok(())
    }

    /// It waits for the device, and reads all factors, and the losses if they are wanted.
    fn low_rank_state(&self, steps: u64, with_own: bool) -> Result<HookState> {
        let state = lock(&self.state);
        let read = state.low_rank.as_ref().map(|low_rank| low_rank.state(steps, with_own)).transpose()?;
        drop(state);
        // What was read is worth nothing after a call that has failed.
        self.check().map(|()| read.unwrap_or_default())
    }

    fn load_low_rank(&self, mut saved: HookState, steps: u64) -> Result<()> {
        let state = &mut *lock(&self.state);
        state.buckets.iter_mut().flatten().for_each(|bucket| bucket.low_rank = None);
        state.low_rank.as_mut().map_or(Ok(()), |low_rank| low_rank.load(&mut saved, steps))
    }
}

/// The type to which gradients are rounded.
pub(super) fn rounded(to: DType) -> Kind {
    if to == DType::F16 { Kind::Half } else { Kind::BFloat16 }
}

/// A hook of the program's, for the reducer.
pub(crate) struct OwnHook {
    on_device: Arc<OnDevice>,
    hook: Own,
    description: String,
    is_stateless: bool,
}

impl OwnHook {
    pub fn new(on_device: Arc<OnDevice>, hook: Box<dyn DeviceHook>) -> Self {
        let (description, is_stateless) = (hook.describe(), hook.is_stateless());
        Self { on_device, hook: Arc::new(Mutex::new(hook)), description, is_stateless }
    }
}

impl CommHook for OwnHook {
    fn describe(&self) -> String {
        self.description.clone()
    }

    fn start(&mut self, _: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        self.on_device.average_own(bucket, self.hook.clone())
    }

    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        lock(&self.hook).adopt(group, root)
    }

    fn state(&self) -> Result<HookState> {
        let state = lock(&self.hook).state()?;
        // What was read is worth nothing after a call that has failed.
        self.on_device.check().map(|()| state)
    }

    fn keeps_state(&self) -> Result<bool> {
        lock(&self.hook).keeps_state()
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        lock(&self.hook).load(state)
    }

    fn is_stateless(&self) -> bool {
        self.is_stateless
    }
}
