//! Ranks that train by themselves for a while.

use std::sync::Arc;

use super::{AllReduce, BuiltInHook, CommHook, GradBucket, HookState, Pending};
use crate::error::Result;
use crate::group::Communicator;
use crate::rank::Rank;

/// Post-local SGD (Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, 2020): averages gradients as usual for
/// the first steps, and from then on not at all, or within a smaller group only.
///
/// From then on replicas drift apart, and the program must average the model every few steps, as
/// [`PeriodicModelAverager`](super::PeriodicModelAverager) does. PyTorch's `post_localSGD_hook`.
#[doc(alias = "post_localSGD_hook")]
pub struct PostLocalSgd {
    start: u64,
    subgroup: Option<Arc<dyn Communicator>>,
    step: u64,
}

impl PostLocalSgd {
    /// Averages the gradients of the first `start` steps over all ranks.
    pub fn new(start: u64) -> Self {
        Self { start, subgroup: None, step: 0 }
    }

    /// Afterwards averages over `subgroup`, such as the ranks of one host, instead of not at all.
    pub fn subgroup<C: Communicator + 'static>(mut self, subgroup: C) -> Self {
        self.subgroup = Some(Arc::new(subgroup));
        self
    }
}

impl CommHook for PostLocalSgd {
    fn describe(&self) -> String {
        format!("local sgd after {} steps, in subgroups: {}", self.start, self.subgroup.is_some())
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        let local = self.step >= self.start;
        // A saved number may be any.
        self.step = self.step.saturating_add(u64::from(bucket.is_last));
        match &self.subgroup {
            _ if !local => AllReduce.start(group, bucket),
            Some(subgroup) => AllReduce.start(&**subgroup, bucket),
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
        // A smaller group of the hosts has no way to gradients that lie elsewhere.
        self.subgroup.is_none().then_some(BuiltInHook::PostLocalSgd { start: self.start })
    }
}
