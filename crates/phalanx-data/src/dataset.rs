//! Data sets of which each item can be read by its index.

use std::sync::Arc;

use phalanx::{Error, Result};

use crate::worker::mix;

/// A data set of which each item can be read by its index, from any thread. PyTorch's map-style `Dataset`.
///
/// ```
/// use phalanx_data::Dataset;
///
/// /// The squares of the numbers below 100.
/// struct Squares;
///
/// impl Dataset for Squares {
///     type Item = u64;
///
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn get(&self, index: usize) -> phalanx::Result<u64> {
///         Ok((index * index) as u64)
///     }
/// }
///
/// assert_eq!(Squares.get(7)?, 49);
/// assert_eq!(Squares.map(|square| Ok(square + 1)).get(7)?, 50);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub trait Dataset: Send + Sync {
    /// The type of an item: usually one sample.
    type Item;

    /// The number of items. It stays the same.
    fn len(&self) -> usize;

    /// The item at `index`, which is less than [`len`](Self::len).
    ///
    /// Errors and panics reach the training loop, with this index. Random choices in here draw from
    /// [`worker_info`](crate::worker_info)'s seeds.
    ///
    /// # Errors
    /// Its own, such as a file that cannot be read: `.map_err(phalanx::Error::other)`.
    fn get(&self, index: usize) -> Result<Self::Item>;

    /// Whether it has no item.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// By what it is told from a data set of other items, as far as that is known without reading them: ranks
    /// [compare](crate::DataLoader::check_ranks) it, and a [`Position`](crate::Position) keeps it, so it stays the same from run to run. By default the
    /// number of items. A [`Subset`]'s is made of its indices, too, and that of files of
    /// their names or lengths.
    fn fingerprint(&self) -> u64 {
        self.len() as u64
    }

    /// Changes each item when it is read, in the worker: decoding, augmentation.
    fn map<T, F: Fn(Self::Item) -> Result<T> + Send + Sync>(self, change: F) -> Map<Self, F>
    where
        Self: Sized,
    {
        Map { dataset: self, change }
    }

    /// The items at these `indices` alone, in this order.
    ///
    /// # Errors
    /// If an index lies outside the data set.
    #[doc(alias = "random_split")]
    fn subset(self, indices: impl Into<Vec<usize>>) -> Result<Subset<Self>>
    where
        Self: Sized,
    {
        let (indices, len) = (indices.into(), self.len());
        if let Some(index) = indices.iter().find(|index| **index >= len) {
            let cause = format!("a subset is to have item {index} of a data set of {len} items");
            return Err(Error::invalid_argument(cause)
                .with_remedy("give indices from 0 on that are below the length"));
        }
        Ok(Subset { dataset: self, indices })
    }
}

/// The result of [`Dataset::map`].
#[derive(Clone, Debug)]
pub struct Map<D, F> {
    dataset: D,
    change: F,
}

impl<D: Dataset, T, F: Fn(D::Item) -> Result<T> + Send + Sync> Dataset for Map<D, F> {
    type Item = T;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        (self.change)(self.dataset.get(index)?)
    }

    fn fingerprint(&self) -> u64 {
        self.dataset.fingerprint()
    }
}

/// The result of [`Dataset::subset`].
#[derive(Clone, Debug)]
pub struct Subset<D> {
    dataset: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Dataset for Subset<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        self.dataset.get(*item(&self.indices, index)?)
    }

    fn fingerprint(&self) -> u64 {
        let all = mix(&[self.dataset.fingerprint(), self.indices.len() as u64]);
        self.indices.iter().fold(all, |all, index| mix(&[all, *index as u64]))
    }
}

/// Items in memory, which are cloned when they are read.
///
/// A `Vec` itself is no data set: `vec.get(3)` and `vec.map(..)` would be the trait's where it is in scope.
///
/// ```
/// use phalanx_data::{Dataset, InMemory};
///
/// let items = InMemory::new(vec!["a", "b", "c"]);
/// assert_eq!((items.len(), items.get(1)?), (3, "b"));
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias("TensorDataset", "InMemDataset", "from_list"))]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InMemory<T> {
    items: Vec<T>,
}

impl<T> InMemory<T> {
    /// These items, in their order.
    pub fn new(items: Vec<T>) -> Self {
        Self { items }
    }

    /// The items.
    pub fn items(&self) -> &[T] {
        &self.items
    }
}

impl<T> From<Vec<T>> for InMemory<T> {
    fn from(items: Vec<T>) -> Self {
        Self { items }
    }
}

impl<T> FromIterator<T> for InMemory<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Self { items: items.into_iter().collect() }
    }
}

impl<T: Clone + Send + Sync> Dataset for InMemory<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.items.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        item(&self.items, index).cloned()
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        (**self).get(index)
    }

    fn fingerprint(&self) -> u64 {
        (**self).fingerprint()
    }
}

impl<D: Dataset + ?Sized> Dataset for Box<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        (**self).get(index)
    }

    fn fingerprint(&self) -> u64 {
        (**self).fingerprint()
    }
}

/// The element at `index`, or the error of an index that lies outside.
pub(crate) fn item<T>(items: &[T], index: usize) -> Result<&T> {
    items.get(index).ok_or_else(|| outside(index, items.len()))
}

pub(crate) fn outside(index: usize, len: usize) -> Error {
    Error::invalid_argument(format!("there is no item {index}: the data set has {len}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_sets_are_made_of_data_sets() {
        let letters: InMemory<char> = "abcdef".chars().collect();
        let some = letters.clone().subset([4, 0]).unwrap();
        assert_eq!((some.len(), some.get(0).unwrap(), some.get(1).unwrap()), (2, 'e', 'a'));
        let upper: Arc<dyn Dataset<Item = char>> =
            Arc::new(some.map(|letter| Ok(letter.to_ascii_uppercase())));
        assert_eq!((upper.len(), upper.get(0).unwrap(), upper.is_empty()), (2, 'E', false));
        let of = |indices: [usize; 2]| letters.clone().subset(indices).unwrap().fingerprint();
        assert!(of([4, 0]) == upper.fingerprint() && of([4, 0]) != of([0, 4]) && of([4, 0]) != of([4, 1]));
        for error in [upper.get(2).unwrap_err(), letters.subset([6]).unwrap_err()] {
            assert!(error.is_invalid_argument(), "{error}");
        }
    }

    /// With the trait in scope, and with another trait that has `map`, a list keeps its own methods.
    #[test]
    fn a_list_keeps_its_own_methods() {
        trait Module: Sized {
            fn map(self, add: u32) -> Self;
        }
        impl Module for Vec<u32> {
            fn map(self, add: u32) -> Self {
                self.iter().map(|one| one + add).collect()
            }
        }
        let list = vec![1, 2];
        assert_eq!((list.get(1), list.get(2)), (Some(&2), None));
        assert_eq!(list.map(1), [2, 3]);
    }
}
