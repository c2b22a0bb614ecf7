//! Which server has which keys. A key is a run of parameters, such as a tensor: what is updated together.

use std::ops::Range;

use crate::error::{Error, Result};

/// The places of keys in the vector of all parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Where each key begins, and where the last one ends.
    offsets: Vec<usize>,
}

impl Layout {
    /// Of keys with these numbers of elements.
    pub(super) fn new(lengths: &[usize]) -> Result<Self> {
        let mut offsets = vec![0usize];
        for length in lengths {
            let end = offsets.last().and_then(|begin| begin.checked_add(*length));
            offsets.push(end.ok_or_else(|| Error::invalid_argument("the keys have too many elements"))?);
        }
        Ok(Self { offsets })
    }

    pub(super) fn keys(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The number of elements.
    pub(super) fn elements(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// The most elements of a key.
    pub(super) fn longest(&self) -> usize {
        self.offsets.windows(2).map(|key| key[1] - key[0]).max().unwrap_or(0)
    }

    /// The elements of these keys.
    pub(super) fn place(&self, keys: &Range<usize>) -> Result<Range<usize>> {
        let ends = self.offsets.get(keys.start).zip(self.offsets.get(keys.end));
        match ends.filter(|_| keys.start <= keys.end) {
            Some((begin, end)) => Ok(*begin..*end),
            None => Err(Error::invalid_argument(format!(
                "there are {} keys, and {keys:?} are asked for",
                self.keys()
            ))
            .with_remedy(
                "count the keys from 0, in the order in which ParameterServer::builder got their lengths",
            )),
        }
    }

    /// The same keys without those before `keys` and after them.
    pub(super) fn part(&self, keys: &Range<usize>) -> Result<Self> {
        let begin = self.place(keys)?.start;
        Ok(Self {
            offsets: self.offsets[keys.start..=keys.end].iter().map(|offset| offset - begin).collect(),
        })
    }

    /// Divides the keys among `servers`: neighbours together, and about as many elements for each as keys allow.
    pub(super) fn shards(&self, servers: usize) -> Vec<Range<usize>> {
        let mut begin = 0;
        (1..=servers)
            .map(|server| {
                // In u128: elements times servers may be more than usize holds.
                let share = (self.elements() as u128 * server as u128 / servers.max(1) as u128) as usize;
                let end = match server == servers {
                    true => self.keys(),
                    false => self.nearest(share).max(begin),
                };
                std::mem::replace(&mut begin, end)..end
            })
            .collect()
    }

    /// The key that begins nearest to the element `place`.
    fn nearest(&self, place: usize) -> usize {
        let after = self.offsets.partition_point(|offset| *offset < place).min(self.keys());
        let before = after.saturating_sub(1);
        if place - self.offsets[before].min(place) <= self.offsets[after].saturating_sub(place) {
            before
        } else {
            after
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_have_places() {
        let layout = Layout::new(&[3, 0, 4]).unwrap();
        assert_eq!((layout.keys(), layout.elements(), layout.longest()), (3, 7, 4));
        assert_eq!(layout.place(&(1..3)).unwrap(), 3..7);
        assert_eq!(layout.part(&(1..3)).unwrap(), Layout::new(&[0, 4]).unwrap());
        assert!(layout.place(&(2..4)).is_err() && Layout::new(&[usize::MAX, 1]).is_err());
        assert_eq!(Layout::new(&[10; 4]).unwrap().shards(2), [0..2, 2..4]);
    }

    proptest! {
        #[test]
        fn every_key_has_one_server(lengths in prop::collection::vec(0usize..50, 0..30), servers in 1usize..6) {
            let layout = Layout::new(&lengths).unwrap();
            let shards = layout.shards(servers);
            prop_assert_eq!(shards.len(), servers);
            let keys: Vec<usize> = shards.iter().cloned().flatten().collect();
            prop_assert_eq!(keys, (0..lengths.len()).collect::<Vec<_>>());
            let (largest, even) = (lengths.iter().max().copied().unwrap_or(0), layout.elements() / servers);
            for shard in shards {
                prop_assert!(layout.place(&shard).unwrap().len() <= even + largest + 1);
            }
        }
    }
}
