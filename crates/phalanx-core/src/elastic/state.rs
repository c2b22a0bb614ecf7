//! The state that survives a change of the workers.
//!
//! A state may belong to a group while the loop runs (`enter`, `leave`). Burn's modules are moved through each step, so
//! a `Ddp` owns its model. If it were made inside the loop while the model stays outside, each commit or each step
//! would need a copy of the model.
//!
//! What each rank has for itself between two steps is made equal in a call of its own (`agree`), and not inside `save`:
//! a collective that failed there would leave half a snapshot.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Parts;
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::wire::object;

/// What all ranks have in common and a new rank needs: parameters, the optimizer's state, the position in the data.
///
/// ```
/// use phalanx::elastic::{Parts, State};
///
/// struct Training {
///     weights: Vec<u8>,
///     epoch: u64,
/// }
///
/// impl State for Training {
///     fn save(&self, parts: &mut Parts) -> phalanx::Result<()> {
///         parts.put("weights", &self.weights)?;
///         parts.serialize("epoch", &self.epoch)
///     }
///
///     fn load(&mut self, parts: &Parts) -> phalanx::Result<()> {
///         parts.copy_to("weights", &mut self.weights)?;
///         self.epoch = parts.deserialize("epoch")?;
///         Ok(())
///     }
/// }
/// ```
pub trait State {
    /// Saves all of it, in the same parts on every rank. Save large values as separate parts: a part that does not
    /// differ is not sent.
    ///
    /// # Errors
    /// Its own; they end the job on this rank.
    fn save(&self, parts: &mut Parts) -> Result<()>;

    /// Takes over a saved state, from this rank or another.
    ///
    /// # Errors
    /// Its own, such as parts that do not fit; they end the job on this rank.
    fn load(&mut self, parts: &Parts) -> Result<()>;

    /// Joins `group`; the state is the same on all its ranks by now. Makes what is bound to a group and must be part of
    /// the state, such as a model that averages its gradients. Called before each call of the loop. Also called in the
    /// loop, after [`leave`](Self::leave), when a [step](super::Context::step) has [changed](super::Step::changed) the
    /// world, unless the state has [followed](Self::follow). The default does nothing.
    ///
    /// # Errors
    /// As those of the loop.
    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        let _ = group;
        Ok(())
    }

    /// A [step](super::Context::step) was replayed in `group`. Moves to it if that needs no collective, since ranks may
    /// call this a step apart. Returns whether it has moved; the default returns false. Then [`leave`](Self::leave) and
    /// [`enter`](Self::enter) are called when the world has changed, on all ranks after the same step.
    ///
    /// # Errors
    /// Its own; they end the job on this rank.
    fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        let _ = group;
        Ok(false)
    }

    /// Releases the group: the loop has ended. Called also if [`enter`](Self::enter) has failed. The default does
    /// nothing.
    fn leave(&mut self) {}

    /// Makes equal what each rank has for itself between commits, such as running statistics. Called on all ranks,
    /// before each commit: unlike [`save`](Self::save) it may call collectives of the group that it has entered. The
    /// default does nothing.
    ///
    /// # Errors
    /// As those of the loop.
    fn agree(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Makes a state of any type that serde can serialize; it is one part, encoded by postcard. Types that could be saved so, and not be loaded again, are
/// refused when [`run`](super::run()) begins: enums with serde's `tag` or `untagged`, and `serde_json::Value`.
///
/// ```
/// use phalanx::elastic::Plain;
/// let mut state = Plain((0_u64, vec![0.0_f32; 16])); // the step, and the weights
/// state.0.0 += 1;
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plain<T>(pub T);

const PLAIN: &str = "state";

impl<T: Serialize + DeserializeOwned> State for Plain<T> {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        // Once, before the first round: a state may be large.
        if parts.total_bytes() == 0 {
            object::check_readable(&self.0, "the state")?;
        }
        parts.serialize(PLAIN, &self.0)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.0 = parts.deserialize(PLAIN)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::super::snapshot::Snapshot;
    use super::*;

    #[test]
    fn a_state_that_could_not_be_loaded_again_is_refused_before_the_first_round() {
        #[derive(Serialize, Deserialize)]
        #[serde(untagged)]
        enum Phase {
            Steps(u64),
            Name(String),
        }

        for phase in [Phase::Steps(3), Phase::Name("warm-up".to_owned())] {
            let error = Snapshot::of(&Plain(phase)).unwrap_err();
            let is_told = error.to_string().contains("the state could be written, and not be loaded again");
            assert!(is_told && error.is_invalid_argument() && error.remedy().is_some(), "{error}");
        }
        Snapshot::of(&Plain((3_u64, "warm-up".to_owned()))).unwrap();
    }
}
