//! What the buckets of a reducer send, where NCCL averages them.

use std::sync::Arc;

use burn::tensor::{DType as BurnDType, FloatDType, bf16, f16};
use parking_lot::Mutex;
use phalanx::reducer::hooks::{
    CommHook, ElsewhereBuckets, ElsewhereHook, GradBucket, HookState, Pending, PowerSgdOptions, Sent,
};
use phalanx::{Communicator, DType, Rank, Result};

use super::device_hook::{DeviceHook, Own};
use super::power_sgd::LowRank;
use super::{OnDevice, element_type};

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
        let (nccl, compressed) = match sent {
            Sent::Nothing => return self.leave(bucket),
            Sent::LowRank(steps) => return self.average_products(bucket, steps),
            Sent::Within(group) => (self.within(&group)?, None),
            Sent::Rounded(to) => (self.nccl.connect()?, Some(to)),
            Sent::Whole => (self.nccl.connect()?, None),
        };
        let (own, f32) = (element_type(bucket.buffer.dtype())?, BurnDType::F32);
        match compressed {
            Some(DType::F16) => self.average_by::<f16>(nccl, bucket, (f32, Some(FloatDType::F16))),
            Some(_) => self.average_by::<bf16>(nccl, bucket, (f32, Some(FloatDType::BF16))),
            None => match own {
                BurnDType::F64 => self.average_by::<f64>(nccl, bucket, (own, None)),
                BurnDType::F16 => self.average_by::<f16>(nccl, bucket, (own, None)),
                BurnDType::BF16 => self.average_by::<bf16>(nccl, bucket, (own, None)),
                _ => self.average_by::<f32>(nccl, bucket, (f32, None)),
            },
        }
    }

    fn approximate(&self, low_rank: Option<(PowerSgdOptions, u64)>) -> Result<()> {
        let left = {
            let mut state = self.state.lock();
            state.low_rank = low_rank.map(|(options, _)| LowRank::new(options));
            state.subgroup.take()
        };
        drop(left); // The last handle waits for the end of its communicator.
        // Another hook sends something else.
        self.compared.forget();
        Ok(())
    }

    /// It waits for the device, and reads all factors, and the losses if they are wanted.
    fn low_rank_state(&self, steps: u64, with_own: bool) -> Result<HookState> {
        self.low_rank(|low_rank| low_rank.state(steps, with_own))
    }

    fn load_low_rank(&self, mut saved: HookState, _: u64) -> Result<()> {
        self.low_rank(|low_rank| {
            low_rank.load(&mut saved);
            Ok(())
        })
    }
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
        self.hook.lock().adopt(group, root)
    }

    fn state(&self) -> Result<HookState> {
        self.hook.lock().state()
    }

    fn keeps_state(&self) -> Result<bool> {
        self.hook.lock().keeps_state()
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        self.hook.lock().load(state)
    }

    fn is_stateless(&self) -> bool {
        self.is_stateless
    }
}
