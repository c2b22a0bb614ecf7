//! How far a loop has come in its data.
//!
//! Every order is distributed place by place, so how many places all ranks together have got says everything, for any
//! world. It counts what the loop has got: what was loaded ahead is loaded again by whoever resumes. A sampler of one's
//! own therefore gives the order of all ranks, and the loader distributes it. `ElasticSampler` counts the places, also of
//! a `DistributedSampler`, whose indices it gives. For a sampler of one's own, whose places it does not shuffle, its seed is a digest of the
//! order: places of another order are other items. So are those of another data set, of which it keeps the fingerprint.

use phalanx::sampler::ElasticSampler;
use phalanx::{Error, Result};
use serde::{Deserialize, Serialize};

use super::order::Own;

/// How far a loop has come in its data: epoch, and samples of it that all ranks together have got. It depends neither on rank
/// nor on world size, so it is the same on every rank, and good for any number of them: a part of a checkpoint, or of an elastic
/// [`State`](phalanx::elastic::State).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Position {
    places: ElasticSampler,
    /// Of the data set.
    fingerprint: u64,
}

impl Position {
    pub(super) fn at(places: ElasticSampler, fingerprint: u64) -> Self {
        Self { places, fingerprint }
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.places.epoch()
    }

    /// How many samples of the epoch all ranks together have got.
    pub fn consumed(&self) -> usize {
        self.places.consumed()
    }

    /// This position for a loader that is at `own` in a data set with this `fingerprint`, if it is one of the same order and items.
    pub(super) fn for_loader(
        &self,
        own: &ElasticSampler,
        sampler: Option<&Own>,
        fingerprint: u64,
    ) -> Result<ElasticSampler> {
        let (mut saved, mut mine) = (self.places.clone(), own.clone());
        if let Some(sampler) = sampler {
            // Its length and its digest are those of the epoch.
            let indices = sampler.indices(saved.epoch());
            let digest = sampler.digest(&indices);
            mine = over(&mine, indices.len()).seed(digest);
            if saved.consumed() == 0 {
                // Saved before the pass began, it has those of the epoch before.
                saved = over(&saved, mine.samples()).seed(digest);
            } else if saved == any_order(&saved) {
                saved = saved.seed(digest);
            }
        }
        if saved.samples() != mine.samples() {
            return Err(Error::invalid_argument(format!(
                "the position was saved with {} samples in the epoch; now there are {}",
                saved.samples(),
                mine.samples()
            ))
            .with_remedy(
                "resume with the same data set and sampler, or begin with the next epoch: set_epoch",
            ));
        }
        let wanted = saved.clone();
        saved.set_epoch(0);
        mine.set_epoch(0);
        if saved != mine && sampler.is_some() && any_order(&saved) == any_order(&mine) {
            return Err(Error::invalid_argument(format!(
                "the position was saved in another order: the sampler gives the items of epoch {} in another one now",
                self.epoch()
            ))
            .with_remedy(
                "let the sampler give the same order for the same epoch in every run, or begin with the next epoch: set_epoch",
            ));
        }
        if saved != mine {
            let (there, here) = (saved.describe(), mine.describe());
            let cause = match there == here {
                true => "by another sampler".to_owned(),
                false => format!("of {there}; that of the loader is of {here}"),
            };
            return Err(Error::invalid_argument(format!("the position was saved in another order, {cause}"))
                .with_remedy("resume with the same options, or begin with the next epoch: set_epoch"));
        }
        // Before its first item an epoch may as well be one of other items.
        if wanted.consumed() > 0 && self.fingerprint != fingerprint {
            return Err(Error::invalid_argument(format!(
                "the position was saved within a pass over another data set: its fingerprint was {:016x} and is {fingerprint:016x}",
                self.fingerprint
            ))
            .with_remedy(
                "resume with the data set of then, or begin with the next epoch: set_epoch. If each rank has a data set of its own, save each rank's \
                 position",
            ));
        }
        Ok(wanted)
    }
}

/// The same place of any order of a sampler, as positions were that did not know it.
fn any_order(places: &ElasticSampler) -> ElasticSampler {
    places.clone().seed(0)
}

/// The same place of an order of `samples`, which stands for places only.
pub(super) fn over(places: &ElasticSampler, samples: usize) -> ElasticSampler {
    if places.samples() == samples {
        return places.clone();
    }
    places.with_samples(samples)
}
