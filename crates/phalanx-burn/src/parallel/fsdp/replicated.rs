//! The gradients of shards, on their way to the other replicas.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::hook::GradientSink;
use crate::sink::Pass;
use crate::tensor_bytes::{Access, TensorBytes};

/// Averages the gradients of one forward pass over the replicas, each when it is complete.
///
/// They do not come through the graph: there a gradient of a shard would have to be known when backward reaches the shard, which is before
/// the unit before it computes. So that unit would wait for the exchange of this one.
pub(super) struct Replicated {
    /// Lives as long as a collector of the forward pass.
    pass: Arc<Pass>,
    /// The number of each unit's shard among the parameters of the model.
    parameters: Arc<HashMap<usize, usize>>,
    /// How often the forward pass has used each unit without having got a gradient.
    uses: Mutex<HashMap<usize, usize>>,
}

impl Replicated {
    pub fn new(pass: Arc<Pass>, parameters: Arc<HashMap<usize, usize>>) -> Self {
        Self { pass, parameters, uses: Mutex::default() }
    }

    /// Notes that the forward pass uses a unit.
    pub fn expect(&self, unit: usize) {
        *self.uses.lock().entry(unit).or_default() += 1;
    }

    /// Takes the gradient of a unit's shard from one use of the unit. With that of the last use, the average begins.
    pub fn take(&self, unit: usize, gradient: TensorBytes<'_>) {
        // A unit of another model gets no gradient.
        let Some(&parameter) = self.parameters.get(&unit) else { return };
        let left = self.uses.lock().get_mut(&unit).map_or(0, |uses| {
            *uses = uses.saturating_sub(1);
            *uses
        });
        if left == 0 {
            self.pass.ready(parameter, Access::Here(gradient));
        } else {
            self.pass.part(parameter, gradient);
        }
    }
}
