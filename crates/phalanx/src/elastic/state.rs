//! What outlives a change of the workers.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Parts;
use crate::error::Result;
use crate::group::ProcessGroup;

/// What all ranks have alike, and a new rank needs to take part: parameters, the optimizer's state, the place in the data.
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
    /// Saves all of it, in the same parts on every rank. Large parts should be parts of their own: what does not differ is
    /// not sent.
    ///
    /// # Errors
    /// Its own; they end the job on this rank.
    fn save(&self, parts: &mut Parts) -> Result<()>;

    /// Becomes what was saved, here or on another rank.
    ///
    /// # Errors
    /// Its own, such as parts that do not fit; they end the job on this rank.
    fn load(&mut self, parts: &Parts) -> Result<()>;

    /// Takes part in `group`, on all of whose ranks the state is the same by now: makes what is bound to a group and must be
    /// part of the state, such as a model that averages its gradients. Called before each call of the loop, and in it when a
    /// [step](super::Context::step) has [changed](super::Step::changed) the world, after [`leave`](Self::leave), unless the state
    /// has [followed](Self::follow). By default nothing.
    ///
    /// # Errors
    /// As those of the loop.
    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        let _ = group;
        Ok(())
    }

    /// A [step](super::Context::step) was done again in `group`: goes over to it if that can be done without a collective, since
    /// ranks may come to this a step apart. Gives whether it has; by default not. Then [`leave`](Self::leave) and
    /// [`enter`](Self::enter) are called when the world has changed, on all ranks behind the same step.
    ///
    /// # Errors
    /// Its own; they end the job on this rank.
    fn follow(&mut self, group: &ProcessGroup) -> Result<bool> {
        let _ = group;
        Ok(false)
    }

    /// Lets go of the group: the loop has ended. Called also if [`enter`](Self::enter) has failed. By default nothing.
    fn leave(&mut self) {}

    /// Makes alike what each rank has for itself until then, such as running statistics. Called on all ranks, before each
    /// commit: unlike [`save`](Self::save) it may call collectives of the group that it has entered. By default nothing.
    ///
    /// # Errors
    /// As those of the loop.
    fn agree(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Makes a state of whatever serde can write and read; it is one part, as postcard writes it.
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
        parts.serialize(PLAIN, &self.0)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.0 = parts.deserialize(PLAIN)?;
        Ok(())
    }
}
