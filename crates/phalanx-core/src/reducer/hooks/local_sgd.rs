//! Ranks that train by themselves for a while.

use std::fmt;
use std::sync::Arc;

use super::{AllReduce, BuiltInHook, CommHook, GradBucket, HookState, Pending};
use crate::error::{Error, Result};
use crate::group::{Communicator, ProcessGroup};
use crate::rank::Rank;

/// Post-local SGD (Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, 2020): averages gradients as usual for
/// the first steps, and from then on not at all, or within a smaller group only.
///
/// From then on replicas drift apart, and the program must average the model every few steps, as
/// [`PeriodicModelAverager`](super::PeriodicModelAverager) does. PyTorch's `post_localSGD_hook`.
///
/// Where averages are [sharded](crate::reducer::Reducer::shard) it is refused: each parameter would be updated by the gradients of its owner alone.
#[doc(alias("post_localSGD_hook", "PostLocalSGDState"))]
#[derive(Clone)]
pub struct PostLocalSgd {
    start: u64,
    subgroup: Option<Arc<dyn Communicator>>,
    step: u64,
}

/// Among which ranks [`PostLocalSgd`] averages a bucket.
#[derive(Debug)]
pub enum AveragedAmong {
    /// Among all.
    All,
    /// Among those of the smaller group.
    Subgroup(ProcessGroup),
    /// Among nobody: it stays this rank's own.
    Nobody,
}

impl PostLocalSgd {
    /// Averages the gradients of the first `start` steps over all ranks.
    pub fn new(start: u64) -> Self {
        Self { start, subgroup: None, step: 0 }
    }

    /// Afterwards averages over `subgroup`, such as the ranks of one host, instead of not at all.
    ///
    /// All ranks of a smaller group give that group. When the hook is registered they compare which ranks are in it, and a difference is an error on
    /// every rank. What a [handle](crate::GroupHandle) leads to later is not compared.
    ///
    /// Over NCCL the ranks of `subgroup`, a [`ProcessGroup`] or a [handle](crate::GroupHandle) to one, have a communicator of their own. They
    /// make it when the hook is registered, and if the handle leads to another group, with their next bucket.
    ///
    /// In a [`join`](crate::join) ranks without data do not answer the calls of `subgroup`: when the first rank has none, it is an error.
    pub fn subgroup<C: Communicator + 'static>(mut self, subgroup: C) -> Self {
        self.subgroup = Some(Arc::new(subgroup));
        self
    }

    /// The smaller group, if there is one of processes.
    pub fn process_group(&self) -> Option<ProcessGroup> {
        self.subgroup.as_ref().and_then(|subgroup| subgroup.process_group())
    }

    /// Counts a bucket as [`start`](CommHook::start) does, and says among which ranks it is averaged, where gradients lie
    /// [elsewhere](crate::reducer::Reducer::elsewhere), in the memory of the ranks of `group`.
    ///
    /// # Errors
    /// If it is averaged within a smaller group that is not one of processes, or while some ranks have no data: these make no calls of it.
    pub fn averaged_among(&mut self, is_last: bool, group: &dyn Communicator) -> Result<AveragedAmong> {
        let is_local = self.is_local(is_last);
        if !is_local || self.subgroup.is_none() {
            return Ok(if is_local { AveragedAmong::Nobody } else { AveragedAmong::All });
        }
        self.check_active(group)?;
        let subgroup = self.process_group().ok_or_else(|| {
            Error::invalid_argument(format!("{self:?}: the smaller group is none of processes"))
                .with_remedy("give PostLocalSgd::subgroup a ProcessGroup")
        })?;
        Ok(AveragedAmong::Subgroup(subgroup))
    }

    /// An error if some ranks of `group` have no data: nobody answers for them in the smaller group.
    fn check_active(&self, group: &dyn Communicator) -> Result<()> {
        let (active, all) = (group.active_ranks(), group.world_size().count());
        if active == all {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{self:?}: {active} of {all} ranks have data, and the others do not make the calls of a smaller group"
        ))
        .with_remedy("give every rank as many batches, or leave out PostLocalSgd::subgroup"))
    }

    /// Whether this bucket's step is not averaged over all ranks.
    fn is_local(&mut self, is_last: bool) -> bool {
        let is_local = self.step >= self.start;
        // A saved number may be any.
        self.step = self.step.saturating_add(u64::from(is_last));
        is_local
    }
}

impl CommHook for PostLocalSgd {
    fn describe(&self) -> String {
        format!("local sgd after {} steps, in subgroups: {}", self.start, self.subgroup.is_some())
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        let is_local = self.is_local(bucket.is_last);
        match &self.subgroup {
            _ if !is_local => AllReduce.start(group, bucket),
            Some(subgroup) => {
                self.check_active(group)?;
                AllReduce.start(&**subgroup, bucket)
            }
            None => Ok(Pending::ready(bucket.buffer)),
        }
    }

    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        self.step = super::super::verify::share(group, root, &self.step)?;
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default().number("step", self.step))
    }

    fn keeps_state(&self) -> Result<bool> {
        Ok(true)
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        self.step = state.get("step")?;
        Ok(())
    }

    fn averages_over_all(&self) -> bool {
        // The step is the number of those that have begun.
        self.step <= self.start
    }

    fn built_in(&self) -> Option<BuiltInHook> {
        // What stands in for a smaller group has no way to gradients that lie elsewhere.
        let can_act = self.subgroup.is_none() || self.process_group().is_some();
        can_act.then(|| BuiltInHook::PostLocalSgd(self.clone()))
    }
}

impl fmt::Debug for PostLocalSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostLocalSgd({})", self.describe())
    }
}
