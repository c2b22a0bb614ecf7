//! The hook of gradients that lie [elsewhere](crate::reducer::Reducer::elsewhere): which of the built-in hooks it acts as, or a hook of the program's.

use std::sync::Arc;

use super::{
    AveragedAmong, BuiltInHook, CommHook, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd,
    PowerSgdOptions,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, ProcessGroup};
use crate::rank::Rank;
use crate::reducer::broadcast_bytes;

/// The memory in which the buckets of an [`ElsewhereHook`] lie, and what averages them there.
pub trait ElsewhereBuckets: Send + Sync + 'static {
    /// What averages them, for [descriptions](CommHook::describe).
    fn describe(&self) -> String;

    /// The ranks among which gradients are averaged.
    fn group(&self) -> &dyn Communicator;

    /// Starts to average `bucket`, of which that is sent.
    ///
    /// # Errors
    /// If it cannot be sent.
    fn average(self: &Arc<Self>, bucket: GradBucket, sent: Sent) -> Result<Pending>;

    /// From now on [`Sent::LowRank`] may be asked for, with these options, after so many steps; or, if none, no longer. Nothing of a hook before is
    /// kept, nor a smaller group.
    ///
    /// # Errors
    /// If these options are not possible there.
    fn approximate(&self, low_rank: Option<(PowerSgdOptions, u64)>) -> Result<()>;

    /// What PowerSGD keeps, after so many steps; `with_own` also what is of each rank.
    ///
    /// # Errors
    /// If it cannot be read.
    fn low_rank_state(&self, steps: u64, with_own: bool) -> Result<HookState>;

    /// PowerSGD goes on from `saved`, after so many steps.
    ///
    /// # Errors
    /// If it is the state of something else.
    fn load_low_rank(&self, saved: HookState, steps: u64) -> Result<()>;
}

/// What is sent of a bucket.
#[derive(Debug)]
pub enum Sent {
    /// All gradients, as they are.
    Whole,
    /// The same, among the ranks of a smaller group.
    Within(ProcessGroup),
    /// Gradients of f32, rounded to this type: f16 or bf16.
    Rounded(DType),
    /// Gradients of f32, of which one or more are matrices. These are sent as [`PowerSgd`] does it, after so many steps.
    LowRank(u64),
    /// Nothing: gradients stay what they are, and zeros take the place of those that are not there.
    Nothing,
}

/// Averages gradients where they lie, as that one of the built-in hooks that is registered would in the memory of processes; or as a hook of the program's.
pub struct ElsewhereHook<B> {
    buckets: Arc<B>,
    how: How,
}

enum How {
    Whole,
    Rounded(DType),
    LowRank { options: PowerSgdOptions, description: String, steps: u64 },
    Local(PostLocalSgd),
    Own(Box<dyn CommHook>),
}

impl<B: ElsewhereBuckets> ElsewhereHook<B> {
    /// It sends all gradients as they are.
    pub fn new(buckets: Arc<B>) -> Self {
        Self { buckets, how: How::Whole }
    }

    /// With a hook that the adapter has made of one of the program's.
    ///
    /// # Errors
    /// If what was sent before has failed.
    pub fn own(buckets: Arc<B>, hook: Box<dyn CommHook>) -> Result<Self> {
        buckets.approximate(None)?;
        Ok(Self { buckets, how: How::Own(hook) })
    }

    /// What is sent of `bucket`.
    fn sent(&mut self, bucket: &GradBucket) -> Result<Sent> {
        let is_f32 = bucket.buffer.dtype() == DType::F32;
        Ok(match &mut self.how {
            How::Rounded(to) if is_f32 => Sent::Rounded(*to),
            How::LowRank { options, steps, .. } => {
                let made = *steps;
                *steps = made.saturating_add(u64::from(bucket.is_last));
                let has_matrix =
                    || bucket.gradients.iter().any(|place| options.matrix(&place.shape).is_some());
                match is_f32 && options.compresses_at(made) && has_matrix() {
                    true => Sent::LowRank(made),
                    false => Sent::Whole,
                }
            }
            How::Local(local) => match local.averaged_among(bucket.is_last, self.buckets.group())? {
                AveragedAmong::All => Sent::Whole,
                AveragedAmong::Subgroup(group) => Sent::Within(group),
                AveragedAmong::Nobody => Sent::Nothing,
            },
            How::Whole | How::Rounded(_) | How::Own(_) => Sent::Whole,
        })
    }
}

impl<B: ElsewhereBuckets> CommHook for ElsewhereHook<B> {
    fn describe(&self) -> String {
        match &self.how {
            How::Whole => self.buckets.describe(),
            How::Rounded(dtype) => format!("compressed to {dtype}"),
            How::LowRank { description, .. } => description.clone(),
            How::Local(local) => local.describe(),
            How::Own(hook) => hook.describe(),
        }
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        if let How::Own(hook) = &mut self.how {
            return hook.start(group, bucket);
        }
        let sent = self.sent(&bucket)?;
        self.buckets.average(bucket, sent)
    }

    /// As that of the host: what PowerSGD keeps begins anew, and the number of steps is the root's.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        let (steps, options) = match &mut self.how {
            How::Whole | How::Rounded(_) => return Ok(()),
            How::LowRank { options, steps, .. } => (steps, *options),
            How::Local(local) => return local.adopt(group, root),
            How::Own(hook) => return hook.adopt(group, root),
        };
        let bytes = broadcast_bytes(group, root, &steps.to_le_bytes(), size_of::<u64>())?;
        let bytes = bytes.as_bytes().try_into().map_err(|_| Error::protocol("a step is not a number"))?;
        *steps = u64::from_le_bytes(bytes);
        self.buckets.approximate(Some((options, *steps)))
    }

    fn state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { steps, .. } => self.buckets.low_rank_state(*steps, true),
            How::Local(local) => local.state(),
            How::Own(hook) => hook.state(),
            How::Whole | How::Rounded(_) => Ok(HookState::default()),
        }
    }

    /// It leaves the losses of PowerSGD where they are.
    fn common_state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { steps, .. } => self.buckets.low_rank_state(*steps, false),
            How::Own(hook) => hook.common_state(),
            How::Whole | How::Rounded(_) | How::Local(_) => self.state().map(HookState::without_own),
        }
    }

    fn keeps_state(&self) -> Result<bool> {
        match &self.how {
            How::LowRank { .. } | How::Local(_) => Ok(true),
            How::Own(hook) => hook.keeps_state(),
            How::Whole | How::Rounded(_) => Ok(false),
        }
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        match &mut self.how {
            How::LowRank { steps, .. } => {
                *steps = state.get("step")?;
                self.buckets.load_low_rank(state, *steps)
            }
            How::Local(local) => local.load(state),
            How::Own(hook) => hook.load(state),
            How::Whole | How::Rounded(_) => state.nothing(),
        }
    }

    // As the hooks in the processes' memory: a step is not done again, unless the program's own hook says that it may be.
    fn is_stateless(&self) -> bool {
        match &self.how {
            How::Whole => true,
            How::Own(hook) => hook.is_stateless(),
            How::Rounded(_) | How::LowRank { .. } | How::Local(_) => false,
        }
    }

    fn act_as(&mut self, hook: BuiltInHook) -> Result<bool> {
        let (how, low_rank) = match hook {
            BuiltInHook::AllReduce => (How::Whole, None),
            BuiltInHook::Compressed(dtype @ (DType::F16 | DType::BF16)) => (How::Rounded(dtype), None),
            BuiltInHook::Compressed(_) => return Ok(false),
            BuiltInHook::PowerSgd(options) => {
                let description = PowerSgd::new(options)?.describe();
                (How::LowRank { options, description, steps: 0 }, Some((options, 0)))
            }
            BuiltInHook::PostLocalSgd(local) => (How::Local(local), None),
        };
        self.buckets.approximate(low_rank)?;
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
