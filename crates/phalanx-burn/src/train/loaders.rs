//! What the strategy and a loader tell each other beside Burn's trait of loaders, which has no words for it and hides
//! their types. A loader is called on the training's thread, so what they say stands in variables of the thread.

use std::cell::Cell;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};

thread_local! {
    /// The pass that begins.
    static BEGUN: Cell<Option<Begun>> = const { Cell::new(None) };
    /// Among how many ranks the loader is divided that was asked for its items.
    static DIVIDED: Cell<WorldSize> = const { Cell::new(WorldSize::ONE) };
    /// Among how many ranks `sampled` has divided the data set of the loader that was asked for its items.
    static SAMPLED: Cell<WorldSize> = const { Cell::new(WorldSize::ONE) };
}

/// What a loader is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Training,
    Validation,
}

/// The number of items of `loader`, which the strategy is to divide.
///
/// # Errors
/// If it is divided already: each rank would get a part of its part.
pub(super) fn items<O>(loader: &Arc<dyn DataLoader<O>>, purpose: Purpose) -> Result<usize> {
    DIVIDED.set(WorldSize::ONE);
    SAMPLED.set(WorldSize::ONE);
    let items = loader.num_items();
    let (divided, sampled) = (DIVIDED.get(), SAMPLED.get());
    let name = match purpose {
        Purpose::Training => "training",
        Purpose::Validation => "validation",
    };
    if divided != WorldSize::ONE {
        let cause =
            format!("the {name} loader is already divided among {divided} ranks, and DdpStrategy divides it");
        return Err(Error::invalid_argument(cause)
            .with_remedy("leave out its `group`, `shard` or DistributedSampler"));
    }
    if purpose == Purpose::Validation && sampled != WorldSize::ONE {
        let cause = format!(
            "the {name} loader reads what DdpStrategy::sampled has already divided among {sampled} ranks, and DdpStrategy divides it"
        );
        return Err(Error::invalid_argument(cause).with_remedy("give it the whole data set"));
    }
    Ok(items)
}

/// What a data set says that `sampled` made, when it is asked for its length.
pub(super) fn sampled_among(ranks: WorldSize) {
    // A data set may be made of several.
    if ranks != WorldSize::ONE {
        SAMPLED.set(ranks);
    }
}

/// What a loader says that is asked for its items.
#[cfg(feature = "data")]
pub(crate) fn divided_among(ranks: WorldSize) {
    // A loader may be made of several.
    if ranks != WorldSize::ONE {
        DIVIDED.set(ranks);
    }
}

/// A pass that the strategy begins.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "data"), allow(dead_code, reason = "other loaders cannot be told"))]
pub(crate) struct Begun {
    /// The trainer's.
    pub epoch: u64,
    pub rank: Rank,
    pub world: WorldSize,
}

/// The pass over `loader` in the trainer's `epoch`. Passes that a loader counts by itself are others: each slice has a
/// count of its own, and after a resume it begins again. And the loader of each rank is that of a world of one, so workers of all ranks would
/// have the same seeds.
pub(super) fn pass<'a, O>(
    loader: &'a Arc<dyn DataLoader<O>>,
    epoch: usize,
    group: &ProcessGroup,
) -> Box<dyn DataLoaderIterator<O> + 'a> {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            BEGUN.set(None);
        }
    }
    let _end = End;
    BEGUN.set(Some(Begun { epoch: epoch as u64, rank: group.rank(), world: group.world_size() }));
    loader.iter()
}

/// The pass that a loader begins, if the strategy has asked for it.
#[cfg(feature = "data")]
pub(crate) fn begun() -> Option<Begun> {
    BEGUN.get()
}
