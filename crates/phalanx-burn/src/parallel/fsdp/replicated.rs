//! The gradients of shards, on their way to the other replicas.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::TensorData;
use parking_lot::Mutex;

use super::layout::FlatLayout;
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
    /// By unit: the number of its first piece among the parameters of the model.
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

    /// Takes the gradients of a unit's pieces from one use of the unit. With those of the last use, the average begins.
    pub fn take(&self, unit: &FlatLayout, pieces: &[TensorData]) {
        let FlatLayout { unit, dtype, .. } = *unit;
        // A unit of another model gets no gradient.
        let Some(&first) = self.parameters.get(&unit) else { return };
        let left = self.uses.lock().get_mut(&unit).map_or(0, |uses| {
            *uses = uses.saturating_sub(1);
            *uses
        });
        for (index, piece) in pieces.iter().enumerate() {
            let gradient = TensorBytes { dtype, bytes: piece.as_bytes() };
            if left == 0 {
                self.pass.ready(first + index, Access::Here(gradient));
            } else {
                self.pass.part(first + index, gradient);
            }
        }
    }
}
