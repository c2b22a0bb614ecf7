//! What the strategy and a loader tell each other beside Burn's trait of loaders, which has no words for it and hides
//! their types. A loader is called on the training's thread, so what they say stands in variables of the thread.

use std::cell::Cell;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use phalanx::{Error, Result, WorldSize};

thread_local! {
    /// Among how many ranks the loader is divided that was asked for its items.
    static DIVIDED: Cell<WorldSize> = const { Cell::new(WorldSize::ONE) };
}

/// The number of items of `loader`, which the strategy is to divide.
///
/// # Errors
/// If it is divided already: each rank would get a part of its part.
pub(super) fn items<O>(loader: &Arc<dyn DataLoader<O>>, purpose: &str) -> Result<usize> {
    DIVIDED.set(WorldSize::ONE);
    let items = loader.num_items();
    let ranks = DIVIDED.get();
    if ranks == WorldSize::ONE {
        return Ok(items);
    }
    let cause =
        format!("the {purpose} loader is already divided among {ranks} ranks, and DdpStrategy divides it");
    Err(Error::invalid_argument(cause).with_remedy("leave out its `group`, `shard` or DistributedSampler"))
}

/// What a loader says that is asked for its items.
#[cfg(feature = "data")]
pub(crate) fn divided_among(ranks: WorldSize) {
    // A loader may be made of several.
    if ranks != WorldSize::ONE {
        DIVIDED.set(ranks);
    }
}
