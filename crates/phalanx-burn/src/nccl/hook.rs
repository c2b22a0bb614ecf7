//! What averages the buckets of a reducer, where NCCL does: which of the built-in hooks it is, or a hook of the program's.

use std::sync::Arc;

use burn::tensor::{DType as BurnDType, FloatDType, bf16, f16};
use parking_lot::Mutex;
use phalanx::reducer::broadcast_bytes;
use phalanx::reducer::hooks::{
    AveragedAmong, BuiltInHook, CommHook, GradBucket, GradientPlace, HookState, Pending, PostLocalSgd,
    PowerSgd, PowerSgdOptions,
};
use phalanx::{Communicator, DType, Error, Rank, Result};

use super::OnDevice;
use super::device_hook::{DeviceHook, Own};

/// The hook of a reducer whose gradients [`OnDevice`] averages.
pub(crate) struct Hook {
    on_device: Arc<OnDevice>,
    how: How,
}

impl Hook {
    pub fn new(on_device: Arc<OnDevice>) -> Self {
        Self { on_device, how: How::Whole }
    }

    /// With a hook of the program's.
    pub fn own(on_device: Arc<OnDevice>, hook: Box<dyn DeviceHook>) -> Self {
        on_device.approximate(None);
        let (description, is_stateless) = (hook.describe(), hook.is_stateless());
        let hook = Arc::new(Mutex::new(hook));
        Self { on_device, how: How::Own { hook, description, is_stateless } }
    }
}

/// What is sent of gradients of f32.
enum How {
    Whole,
    Rounded(DType),
    /// Products of thin matrices, as [`PowerSgd`] does.
    LowRank {
        options: PowerSgdOptions,
        description: String,
        step: u64,
    },
    /// Nothing of any type after the first steps, or what is averaged within a smaller group.
    Local(PostLocalSgd),
    /// Of any type, what the program's hook says.
    Own {
        hook: Own,
        description: String,
        is_stateless: bool,
    },
}

impl CommHook for Hook {
    fn describe(&self) -> String {
        match &self.how {
            How::Whole => "NCCL".into(),
            How::Rounded(dtype) => format!("compressed to {dtype}"),
            How::LowRank { description, .. } | How::Own { description, .. } => description.clone(),
            How::Local(local) => local.describe(),
        }
    }

    fn start(&mut self, _: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        let on_device = &self.on_device;
        let (rounded, subgroup) = match &mut self.how {
            How::Whole => (None, None),
            How::Rounded(dtype) => (Some(*dtype), None),
            How::LowRank { options, step, .. } => {
                let steps = *step;
                *step = step.saturating_add(u64::from(bucket.is_last));
                let is_matrix = |place: &GradientPlace| options.matrix(&place.shape).is_some();
                if options.compresses_at(steps)
                    && bucket.buffer.dtype() == DType::F32
                    && bucket.gradients.iter().any(is_matrix)
                {
                    return on_device.average_products(bucket, steps);
                }
                (None, None)
            }
            How::Local(local) => match local.averaged_among(bucket.is_last, &on_device.group)? {
                AveragedAmong::All => (None, None),
                AveragedAmong::Subgroup(group) => (None, Some(group)),
                AveragedAmong::Nobody => return on_device.leave(bucket),
            },
            How::Own { hook, .. } => return on_device.average_own(bucket, hook.clone()),
        };
        let nccl = match subgroup {
            Some(group) => on_device.within(&group)?,
            None => on_device.nccl.connect()?,
        };
        match (bucket.buffer.dtype(), rounded) {
            (DType::F32, Some(DType::F16)) => {
                on_device.average::<f16>(nccl, bucket, (BurnDType::F32, Some(FloatDType::F16)))
            }
            (DType::F32, Some(DType::BF16)) => {
                on_device.average::<bf16>(nccl, bucket, (BurnDType::F32, Some(FloatDType::BF16)))
            }
            (DType::F32, _) => on_device.average::<f32>(nccl, bucket, (BurnDType::F32, None)),
            (DType::F64, _) => on_device.average::<f64>(nccl, bucket, (BurnDType::F64, None)),
            (DType::F16, _) => on_device.average::<f16>(nccl, bucket, (BurnDType::F16, None)),
            (DType::BF16, _) => on_device.average::<bf16>(nccl, bucket, (BurnDType::BF16, None)),
            (other, _) => Err(Error::invalid_argument(format!("gradients of type {other} are not averaged"))),
        }
    }

    /// As that of the host: what PowerSGD keeps begins anew, and the step is the root's.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        let (step, options) = match &mut self.how {
            How::Whole | How::Rounded(_) => return Ok(()),
            How::LowRank { options, step, .. } => (step, *options),
            How::Local(local) => return local.adopt(group, root),
            How::Own { hook, .. } => return hook.lock().adopt(group, root),
        };
        let bytes = broadcast_bytes(group, root, &step.to_le_bytes(), size_of::<u64>())?;
        let bytes = bytes.as_bytes().try_into().map_err(|_| Error::protocol("a step is not a number"))?;
        *step = u64::from_le_bytes(bytes);
        self.on_device.approximate(Some(options));
        Ok(())
    }

    /// It waits for the device, and reads all factors and losses of PowerSGD.
    fn state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { step, .. } => self.on_device.low_rank(|low_rank| low_rank.state(*step, true)),
            How::Local(local) => local.state(),
            How::Own { hook, .. } => hook.lock().state(),
            How::Whole | How::Rounded(_) => Ok(HookState::default()),
        }
    }

    /// It leaves the losses of PowerSGD on the device.
    fn common_state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { step, .. } => self.on_device.low_rank(|low_rank| low_rank.state(*step, false)),
            How::Whole | How::Rounded(_) | How::Local(_) | How::Own { .. } => {
                self.state().map(HookState::without_own)
            }
        }
    }

    fn keeps_state(&self) -> Result<bool> {
        match &self.how {
            How::LowRank { .. } | How::Local(_) => Ok(true),
            How::Own { hook, .. } => hook.lock().keeps_state(),
            How::Whole | How::Rounded(_) => Ok(false),
        }
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        match &mut self.how {
            How::LowRank { step, .. } => {
                *step = state.get("step")?;
                self.on_device.low_rank(|low_rank| {
                    low_rank.load(&mut state);
                    Ok(())
                })
            }
            How::Local(local) => local.load(state),
            How::Own { hook, .. } => hook.lock().load(state),
            How::Whole | How::Rounded(_) => state.nothing(),
        }
    }

    // As the hooks in the processes' memory: a step is not done again, unless the program's own hook says that it may be.
    fn is_stateless(&self) -> bool {
        matches!(self.how, How::Whole | How::Own { is_stateless: true, .. })
    }

    fn act_as(&mut self, hook: BuiltInHook) -> Result<bool> {
        let (how, options) = match hook {
            BuiltInHook::AllReduce => (How::Whole, None),
            BuiltInHook::Compressed(dtype @ (DType::F16 | DType::BF16)) => (How::Rounded(dtype), None),
            BuiltInHook::Compressed(_) => return Ok(false),
            BuiltInHook::PowerSgd(options) => {
                let description = PowerSgd::new(options)?.describe();
                (How::LowRank { options, description, step: 0 }, Some(options))
            }
            BuiltInHook::PostLocalSgd(local) => (How::Local(local), None),
        };
        self.on_device.approximate(options);
        self.how = how;
        Ok(true)
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn averages_over_all(&self) -> bool {
        !matches!(&self.how, How::Local(local) if !local.averages_over_all())
    }

    fn makes_zeros(&self) -> bool {
        true
    }

    fn accepts_weights(&self) -> bool {
        matches!(self.how, How::Whole)
    }

    fn keeps_gradients(&self) -> bool {
        true
    }
}
