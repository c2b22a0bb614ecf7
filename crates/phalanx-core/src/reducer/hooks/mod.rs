//! Communication hooks: how a bucket of gradients becomes the average over all ranks.
//!
//! | hook | bytes of a bucket of n floats | what it costs |
//! |---|---|---|
//! | [`AllReduce`], the default | 4n | |
//! | [`Compressed::f16`], [`Compressed::bf16`] | 2n | rounding to 11 or 8 significant bits |
//! | [`PowerSgd`] | 4·rank·(rows + columns) for each matrix | an approximation whose error is made up for in later steps |
//! | [`PostLocalSgd`] | 0 once it has begun | replicas that drift apart between averages of the model |
//!
//! A program can write its own [`CommHook`]: it takes a bucket, starts its communication, and returns it averaged:
//!
//! ```
//! use phalanx::reducer::hooks::{CommHook, GradBucket, HookState, Pending};
//! use phalanx::{Communicator, Rank, ReduceOp, Result};
//!
//! /// The sum over the ranks in place of the average.
//! struct Sum;
//!
//! impl CommHook for Sum {
//!     fn describe(&self) -> String {
//!         "sum".into()
//!     }
//!
//!     fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
//!         group.all_reduce_async(bucket.buffer, ReduceOp::Sum).map(Pending::new)
//!     }
//!
//!     fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
//!         Ok(()) // It has no state.
//!     }
//!
//!     fn state(&self) -> Result<HookState> {
//!         Ok(HookState::default())
//!     }
//!
//!     fn load(&mut self, state: HookState) -> Result<()> {
//!         state.nothing()
//!     }
//! }
//! ```

mod averager;
mod compressed;
mod elsewhere;
mod linear;
mod loaded;
mod local_sgd;
mod metered;
mod power_sgd;
mod spares;
mod state;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

pub use self::averager::{PeriodicModelAverager, Replica};
pub use self::compressed::Compressed;
pub use self::elsewhere::{ElsewhereBuckets, ElsewhereHook, Sent};
pub use self::loaded::{LoadedHook, absent_hook, check_hook};
pub use self::local_sgd::{AveragedAmong, PostLocalSgd};
pub(super) use self::metered::Metered;
pub use self::power_sgd::{LowRankMatrix, PowerSgd, PowerSgdOptions};
pub(super) use self::state::HookLabel;
pub use self::state::{HookState, HookTensor};
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::Result;
use crate::group::{Communicator, Work};
use crate::rank::Rank;

/// Averages buckets over the ranks. All ranks have the same hook, with the same settings.
pub trait CommHook: Send {
    /// Its name and settings, which are compared with rank 0's, and with those in a checkpoint: the same in all versions of a program, for
    /// the same settings.
    fn describe(&self) -> String;

    /// Starts to average `bucket`. Buckets come in the same order on every rank, while backward still runs.
    ///
    /// It must make the same calls on `group` on every rank, and must not wait for them here but in [`Pending::then`].
    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending>;

    /// Makes its state the same on all ranks: that of `root`, or a new one. Called on every rank when some have missed steps.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()>;

    /// What it keeps from step to step that later averages depend on, for a checkpoint; called between steps. Empty if nothing.
    ///
    /// # Errors
    /// If it cannot be read, as from a device that has failed. Then nothing is saved.
    fn state(&self) -> Result<HookState>;

    /// Its [`state`](Self::state) [without](HookState::without_own) what each rank has of its own, for the commits of an elastic job, which do not have
    /// that. A hook whose own tensors are large, or on a device, leaves them where they are. By default all is read.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    fn common_state(&self) -> Result<HookState> {
        self.state().map(HookState::without_own)
    }

    /// Whether there is anything in its [`state`](Self::state) now. That is asked when a state is loaded and when a hook is registered. A hook whose
    /// state is large, or on a device, answers without reading it. By default it is read.
    ///
    /// # Errors
    /// As [`state`](Self::state), if that is read.
    fn keeps_state(&self) -> Result<bool> {
        Ok(!self.state()?.is_empty())
    }

    /// Goes on from the [`state`](Self::state) of a hook with the same settings. If the number of ranks has changed since, or the state
    /// comes from the memory of an elastic job, there are no [own](HookState::own) tensors: those begin anew. An empty state is that of a
    /// hook that has made no step.
    ///
    /// # Errors
    /// If it is the state of another kind of hook.
    fn load(&mut self, state: HookState) -> Result<()>;

    /// Whether it keeps no state of a step or a group. If so, a step that a failure has cut off can be
    /// [replayed](super::Reducer::keep_gradients). False by default.
    fn is_stateless(&self) -> bool {
        false
    }

    /// Whether it can average [weighted steps](super::Reducer::start_weighted): the first bucket of f64, or else
    /// the first one, then has one element more, behind all gradients, with the rank's weight. It must be averaged to the precision of its type, and gradients, which are
    /// multiplied by weights that differ from step to step, as exactly as it. Where gradients lie [elsewhere](super::Reducer::elsewhere), no
    /// bucket has the weight. False by default.
    fn accepts_weights(&self) -> bool {
        false
    }

    /// Whether what it has given in the last step are averages over all ranks, which a `join` may [scale](super::Reducer::scale_in_step) to
    /// those over ranks that have data. In other steps ranks may have learning rates of their own ([`Reducer::stepped`](super::Reducer::stepped)). True by
    /// default.
    fn averages_over_all(&self) -> bool {
        true
    }

    /// Whether it averages zeros for a parameter that has no gradient on this rank, where gradients lie
    /// [elsewhere](super::Reducer::elsewhere). False by default.
    fn makes_zeros(&self) -> bool {
        false
    }

    /// Which of the hooks here it is, with its settings, if all that it does is what that does: where gradients lie
    /// [elsewhere](super::Reducer::elsewhere), what averages them does the same there. None by default.
    fn built_in(&self) -> Option<BuiltInHook> {
        None
    }

    /// Where gradients lie [elsewhere](super::Reducer::elsewhere): does what `hook` does from the next step on. False if it cannot, and then it
    /// changes nothing; so it is by default.
    ///
    /// # Errors
    /// If it could, but not with these settings, or not now.
    fn act_as(&mut self, hook: BuiltInHook) -> Result<bool> {
        let _ = hook;
        Ok(false)
    }

    /// Whether it averages gradients that lie [elsewhere](super::Reducer::elsewhere), where they lie. False by default.
    fn is_elsewhere(&self) -> bool {
        false
    }

    /// Where gradients lie [elsewhere](super::Reducer::elsewhere): whether it keeps those of a bucket that [says so](GradBucket::keeps), and
    /// averages what it has kept when the bucket comes again in the same step. It is [stateless](Self::is_stateless) then. False by default.
    fn keeps_gradients(&self) -> bool {
        false
    }
}

/// A hook that has a form for gradients that lie [elsewhere](super::Reducer::elsewhere), with its settings.
#[derive(Clone, Debug)]
#[doc(alias = "BuiltinCommHookType")]
pub enum BuiltInHook {
    /// [`AllReduce`].
    AllReduce,
    /// [`Compressed`], to this type.
    Compressed(DType),
    /// [`PowerSgd`].
    PowerSgd(PowerSgdOptions),
    /// [`PostLocalSgd`], without a smaller group or with one of processes.
    PostLocalSgd(PostLocalSgd),
}

/// A bucket with all its gradients.
#[derive(Debug)]
#[non_exhaustive]
pub struct GradBucket {
    /// Its number in this step, in the order of launching.
    pub index: usize,
    /// Whether it is the step's last.
    pub is_last: bool,
    /// The gradients, one after another. [`Pending`] gives it back, averaged.
    pub buffer: Buffer,
    /// Where in it each gradient lies.
    pub gradients: Arc<[GradientPlace]>,
    /// Whether it may come again in this step, with the same gradients, in [another group](super::Reducer::replay). If gradients lie
    /// [elsewhere](super::Reducer::elsewhere), the hook [keeps](CommHook::keeps_gradients) them. In a world of one no bucket comes.
    pub keeps: bool,
    /// How many elements are each rank's, one rank's behind the other's, if a rank needs no more than its own averages;
    /// see [`Reducer::shard`](super::Reducer::shard). A hook may average the others' too.
    pub counts: Option<Arc<[usize]>>,
}

/// Where a gradient lies in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradientPlace {
    /// The index of its parameter in the model.
    pub parameter: usize,
    /// The parameter's shape.
    pub shape: Vec<usize>,
    /// Its elements in the bucket.
    pub elements: Range<usize>,
}

/// A bucket that is being averaged: the operation in flight, and what is done when it ends.
#[derive(Debug)]
pub struct Pending(Stage);

type Then = Box<dyn FnOnce(Buffer, &dyn Communicator) -> Result<Pending> + Send>;

enum Stage {
    InFlight { work: Work, then: Option<Then> },
    Elsewhere { is_completed: IsCompleted, finish: Finish },
    Done(Buffer),
}

type IsCompleted = Box<dyn Fn() -> bool + Send>;
type Finish = Box<dyn FnOnce() -> Result<Pending> + Send>;

impl Pending {
    /// Done when `work` is; its buffer is the averaged bucket.
    pub fn new(work: Work) -> Self {
        Self(Stage::InFlight { work, then: None })
    }

    /// When `work` is done, `then` continues with its buffer: it ends with [`Pending::ready`], or starts another
    /// operation. It runs after backward, on the thread that waits for the gradients; the buckets take turns, in the
    /// same order on every rank.
    pub fn then(
        work: Work,
        then: impl FnOnce(Buffer, &dyn Communicator) -> Result<Self> + Send + 'static,
    ) -> Self {
        Self(Stage::InFlight { work, then: Some(Box::new(then)) })
    }

    /// Done when `is_completed` says so, of an operation that is none of the group's, such as one on a device. `finish` waits for it, with a
    /// deadline, and gives the bucket back; it runs after backward, on the thread that waits for the gradients.
    pub fn elsewhere(
        is_completed: impl Fn() -> bool + Send + 'static,
        finish: impl FnOnce() -> Result<Buffer> + Send + 'static,
    ) -> Self {
        Self::elsewhere_then(is_completed, move || finish().map(Self::ready))
    }

    /// Like [`elsewhere`](Self::elsewhere), where `then` continues as that of [`then`](Self::then): it ends with [`Pending::ready`], or starts another
    /// operation.
    pub fn elsewhere_then(
        is_completed: impl Fn() -> bool + Send + 'static,
        then: impl FnOnce() -> Result<Self> + Send + 'static,
    ) -> Self {
        Self(Stage::Elsewhere { is_completed: Box::new(is_completed), finish: Box::new(then) })
    }

    /// Done: `bucket` is averaged.
    pub fn ready(bucket: Buffer) -> Self {
        Self(Stage::Done(bucket))
    }

    /// Whether the operation in flight is done, or there was none.
    pub fn is_completed(&self) -> bool {
        match &self.0 {
            Stage::InFlight { work, .. } => work.is_completed(),
            Stage::Elsewhere { is_completed, .. } => is_completed(),
            Stage::Done(_) => true,
        }
    }

    /// Waits for the operation in flight and takes one step more: the bucket if it was the last, else what is left.
    pub(super) fn advance(self, group: &dyn Communicator) -> Result<std::result::Result<Buffer, Self>> {
        match self.0 {
            Stage::Done(bucket) => Ok(Ok(bucket)),
            Stage::Elsewhere { finish, .. } => Ok(finish()?.or_bucket()),
            Stage::InFlight { work, then: None } => work.wait().map(Ok),
            Stage::InFlight { work, then: Some(then) } => Ok(then(work.wait()?, group)?.or_bucket()),
        }
    }

    /// The bucket if it is done, else what is left.
    fn or_bucket(self) -> std::result::Result<Buffer, Self> {
        match self.0 {
            Stage::Done(bucket) => Ok(bucket),
            more => Err(Self(more)),
        }
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::InFlight { work, .. } => work.fmt(f),
            Self::Elsewhere { is_completed, .. } => write!(f, "Elsewhere(completed: {})", is_completed()),
            Self::Done(buffer) => buffer.fmt(f),
        }
    }
}

/// The average without compression, in the gradients' own type; if it is sharded, each rank gets only its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce;

impl CommHook for AllReduce {
    fn describe(&self) -> String {
        "all_reduce".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        let work = match &bucket.counts {
            Some(counts) => group.reduce_scatter_v_async(bucket.buffer, counts, ReduceOp::Avg),
            None => group.all_reduce_async(bucket.buffer, ReduceOp::Avg),
        };
        work.map(Pending::new)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }

    fn is_stateless(&self) -> bool {
        true
    }

    fn accepts_weights(&self) -> bool {
        true
    }

    fn built_in(&self) -> Option<BuiltInHook> {
        Some(BuiltInHook::AllReduce)
    }
}
