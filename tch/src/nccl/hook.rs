//! What averages the buckets of a reducer, where NCCL does: which of the built-in hooks it is, or a hook of the program's.

use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use phalanx::reducer::broadcast_bytes;
use phalanx::reducer::hooks::{
    AveragedAmong, BuiltInHook, CommHook, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd,
    PowerSgdOptions,
};
use phalanx::{DType, Error, Rank, Result};
use tch::Kind;

use super::calls::Sent;
use super::device_hook::{DeviceHook, Own};
use super::{OnDevice, lock};

/// The hook of a reducer whose gradients [`OnDevice`] averages.
pub(crate) struct Hook {
    on_device: Arc<OnDevice>,
    how: How,
}

/// What is sent of gradients of f32.
enum How {
    Whole,
    Rounded(DType),
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

impl Hook {
    pub fn new(on_device: Arc<OnDevice>) -> Self {
        Self { on_device, how: How::Whole }
    }

    /// With a hook of the program's.
    pub fn own(on_device: Arc<OnDevice>, hook: Box<dyn DeviceHook>) -> Result<Self> {
        on_device.approximate(None)?;
        let (description, is_stateless) = (hook.describe(), hook.is_stateless());
        let hook = Arc::new(Mutex::new(hook));
        Ok(Self { on_device, how: How::Own { hook, description, is_stateless } })
    }

    /// How buckets of f32 are sent in this step, of which one `is_last`.
    fn sent(&mut self, is_last: bool) -> Result<Sent> {
        let on_device = &self.on_device;
        Ok(match &mut self.how {
            How::Whole => Sent::Whole,
            How::Rounded(DType::F16) => Sent::Rounded(Kind::Half),
            How::Rounded(_) => Sent::Rounded(Kind::BFloat16),
            How::LowRank { options, step, .. } => {
                let is_compressed = options.compresses_at(*step);
                *step = step.saturating_add(u64::from(is_last));
                if is_compressed { Sent::LowRank } else { Sent::Whole }
            }
            How::Local(local) => match local.averaged_among(is_last, &on_device.group)? {
                AveragedAmong::All => Sent::Whole,
                AveragedAmong::Subgroup(group) => Sent::Within(on_device.within(&group)?),
                AveragedAmong::Nobody => Sent::Nothing,
            },
            How::Own { .. } => Sent::Nothing,
        })
    }
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

    fn start(&mut self, _: &dyn phalanx::Communicator, bucket: GradBucket) -> Result<Pending> {
        if let How::Own { hook, .. } = &self.how {
            return self.on_device.average_own(bucket, hook.clone());
        }
        let (dtype, sent) = (bucket.buffer.dtype(), self.sent(bucket.is_last)?);
        let on_device = &self.on_device;
        let sent = match sent {
            Sent::Nothing => return on_device.average::<f32>(bucket, sent),
            Sent::Rounded(Kind::Half) if dtype == DType::F32 => {
                return on_device.average::<f16>(bucket, sent);
            }
            Sent::Rounded(_) if dtype == DType::F32 => return on_device.average::<bf16>(bucket, sent),
            Sent::Rounded(_) => Sent::Whole,
            Sent::LowRank if dtype != DType::F32 => Sent::Whole,
            Sent::LowRank | Sent::Whole | Sent::Within(_) => sent,
        };
        match dtype {
            DType::F32 => on_device.average::<f32>(bucket, sent),
            DType::F64 => on_device.average::<f64>(bucket, sent),
            DType::F16 => on_device.average::<f16>(bucket, sent),
            DType::BF16 => on_device.average::<bf16>(bucket, sent),
            other => Err(Error::invalid_argument(format!("gradients of type {other} are not averaged"))),
        }
    }

    /// As that of the host: what PowerSGD keeps begins anew, and the step is the root's.
    fn adopt(&mut self, group: &dyn phalanx::Communicator, root: Rank) -> Result<()> {
        let (step, options) = match &mut self.how {
            How::Whole | How::Rounded(_) => return Ok(()),
            How::LowRank { options, step, .. } => (step, *options),
            How::Local(local) => return local.adopt(group, root),
            How::Own { hook, .. } => return lock(hook).adopt(group, root),
        };
        let bytes = broadcast_bytes(group, root, &step.to_le_bytes(), size_of::<u64>())?;
        let bytes = bytes.as_bytes().try_into().map_err(|_| Error::protocol("a step is not a number"))?;
        *step = u64::from_le_bytes(bytes);
        self.on_device.approximate(Some((options, *step)))
    }

    /// It waits for the device, and reads all factors and losses of PowerSGD.
    fn state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { step, .. } => self.on_device.low_rank_state(*step, true),
            How::Local(local) => local.state(),
            How::Own { hook, .. } => {
                let state = lock(hook).state()?;
                // What was read is worth nothing after a call that has failed.
                self.on_device.check().map(|()| state)
            }
            How::Whole | How::Rounded(_) => Ok(HookState::default()),
        }
    }

    /// It leaves the losses of PowerSGD on the device.
    fn common_state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { step, .. } => self.on_device.low_rank_state(*step, false),
            How::Whole | How::Rounded(_) | How::Local(_) | How::Own { .. } => {
                self.state().map(HookState::without_own)
            }
        }
    }

    fn keeps_state(&self) -> Result<bool> {
        match &self.how {
            How::LowRank { .. } | How::Local(_) => Ok(true),
            How::Own { hook, .. } => lock(hook).keeps_state(),
            How::Whole | How::Rounded(_) => Ok(false),
        }
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        match &mut self.how {
            How::LowRank { step, .. } => {
                *step = state.get("step")?;
                self.on_device.load_low_rank(state, *step)
            }
            How::Local(local) => local.load(state),
            How::Own { hook, .. } => lock(hook).load(state),
            How::Whole | How::Rounded(_) => state.nothing(),
        }
    }

    // As the hooks in the host's memory: a step is not done again, unless the program's own hook says that it may be.
    fn is_stateless(&self) -> bool {
        matches!(self.how, How::Whole | How::Own { is_stateless: true, .. })
    }

    fn act_as(&mut self, hook: BuiltInHook) -> Result<bool> {
        let (how, low_rank) = match hook {
            BuiltInHook::AllReduce => (How::Whole, None),
            BuiltInHook::Compressed(dtype @ (DType::F16 | DType::BF16)) => (How::Rounded(dtype), None),
            BuiltInHook::Compressed(_) => return Ok(false),
            BuiltInHook::PowerSgd(options) => {
                if !options.has_warm_start() {
                    return Err(Error::invalid_argument(
                        "PowerSGD with warm_start(false) where NCCL averages: each step would wait for random factors of the host",
                    )
                    .with_remedy(
                        "leave warm_start on, or average in the host's memory, with Ddp::with_options",
                    ));
                }
                let description = PowerSgd::new(options)?.describe();
                (How::LowRank { options, description, step: 0 }, Some((options, 0)))
            }
            BuiltInHook::PostLocalSgd(local) => (How::Local(local), None),
        };
        self.on_device.approximate(low_rank)?;
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
