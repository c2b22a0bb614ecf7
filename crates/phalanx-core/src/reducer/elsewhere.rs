//! Gradients that do not lie in this process's memory, such as those on a device that averages them itself.
//!
//! The reducer still decides which bucket is launched when, since that order must be the same on all ranks. Its buckets are then lists of
//! parameters and have no memory: what averages the gradients on the device would have no use for a copy in the process.

use std::sync::Arc;

use super::hooks::CommHook;
use super::{ParameterSpec, Reducer, ReducerOptions};
use crate::error::{Error, Result};
use crate::group::Communicator;

impl Reducer {
    /// Like [`new`](Self::new), for gradients that lie elsewhere, where `hook` averages them: buckets take no memory. An adapter keeps the
    /// gradients and says with [`ready_elsewhere`](Self::ready_elsewhere) which are ready. When all of a bucket are, and it is its turn, `hook`
    /// gets an empty buffer, finds in [`GradBucket::gradients`](super::hooks::GradBucket::gradients) which gradients to average, and
    /// gives that buffer back when they are.
    ///
    /// What needs the bytes is an error: [`ready`](Self::ready), [`gradient`](Self::gradient) and their relatives,
    /// [`shard`](Self::shard) and [`register_hook`](Self::register_hook), but for what `hook` can [act as](CommHook::act_as) and hooks that work [there](CommHook::is_elsewhere); and, unless `hook` [keeps](CommHook::keeps_gradients) the
    /// gradients, [`keep_gradients`](Self::keep_gradients) and [`regrouped`](Self::regrouped).
    ///
    /// With [`find_unused_parameters`](ReducerOptions::find_unused_parameters) or [`static_graph`](ReducerOptions::static_graph) a bucket may have
    /// gradients that did not come: `hook` averages zeros in their place. [`has_average`](Self::has_average) says which no rank had.
    ///
    /// # Errors
    /// As [`new`](Self::new), also if ranks differ in the [description](CommHook::describe) of `hook`; and with these two options, if `hook`
    /// does not [make zeros](CommHook::makes_zeros).
    pub fn elsewhere(
        group: Arc<dyn Communicator>,
        parameters: Vec<ParameterSpec>,
        options: ReducerOptions,
        hook: Box<dyn CommHook>,
    ) -> Result<Self> {
        let reducer = Self::averaged_by(hook, true, group, parameters, options)?;
        // The ranks have compared their options: all get this error, or none.
        if reducer.accepts_unused() && !reducer.hook.makes_zeros() {
            return Err(Error::invalid_argument(format!(
                "find_unused_parameters or static_graph is set, and gradients are averaged where they lie, by {}: there is no memory in which a \
                 gradient that does not come could be zero",
                reducer.hook.describe()
            ))
            .with_remedy("use all parameters in every step, or average in the memory of the processes"));
        }
        Ok(reducer)
    }

    /// The gradient of the parameter at `index` is finished, where it lies; if it was the last that a bucket waited for, the averaging of
    /// that bucket begins.
    ///
    /// # Errors
    /// As [`ready`](Self::ready), and if gradients do not lie [elsewhere](Self::elsewhere).
    pub fn ready_elsewhere(&mut self, index: usize) -> Result<()> {
        if !self.elsewhere {
            let cause = "ready_elsewhere was called on a reducer whose buckets have memory";
            return Err(Error::invalid_argument(cause).with_remedy("call ready, with the gradient"));
        }
        self.accept(index, None, |_| Ok(()))
    }

    /// Whether any rank had a gradient for the parameter at `index`, from [`finish`](Self::finish) to the next [`start`](Self::start): if none
    /// had, it has no average.
    ///
    /// # Errors
    /// If there is no such parameter, or no average.
    pub fn has_average(&self, index: usize) -> Result<bool> {
        Ok(self.state.average(index)?.is_some())
    }

    /// An error of `call` if gradients lie [elsewhere](Self::elsewhere).
    pub(super) fn check_here(&self, call: &str) -> Result<()> {
        if !self.elsewhere {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{call}: gradients are averaged where they lie, by {}, and not in the memory of this process",
            self.hook.describe()
        ))
        .with_remedy("do without it, or average in the memory of the processes"))
    }
}
