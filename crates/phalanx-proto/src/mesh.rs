//! Which rank has which coordinates: pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rank::Rank;

/// The most dimensions of a mesh.
const MAX_DIMENSIONS: usize = 8;

/// A named dimension, as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dimension {
    /// Its name, which no other dimension of the mesh has.
    pub name: String,
    /// How many ranks it has: at least 1.
    pub size: usize,
}

/// The ranks of a group in a grid. Neighbours in the last dimension have neighbouring places in `order`.
#[derive(Clone, Debug)]
pub struct Layout {
    dimensions: Vec<Dimension>,
    /// All ranks, host by host.
    order: Vec<Rank>,
    /// The host of each place in `order`, numbered as they come.
    hosts: Vec<usize>,
}

impl Layout {
    /// Places the ranks, of which `hosts` has each one's host. The hosts come in the order of their lowest ranks.
    pub fn new<H: PartialEq>(dimensions: Vec<Dimension>, hosts: &[H]) -> Result<Self> {
        check(&dimensions, hosts.len())?;
        let mut seen: Vec<&H> = Vec::new();
        let mut placed: Vec<(usize, Rank)> = Vec::with_capacity(hosts.len());
        for (rank, host) in hosts.iter().enumerate() {
            let number = seen.iter().position(|other| *other == host).unwrap_or_else(|| {
                seen.push(host);
                seen.len() - 1
            });
            placed.push((number, Rank::new(rank as u32)));
        }
        placed.sort_unstable();
        let (hosts, order) = placed.into_iter().unzip();
        Ok(Self { dimensions, order, hosts })
    }

    /// The dimensions, of which the last runs fastest.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    /// The number of the dimension called `name`.
    pub fn dimension(&self, name: &str) -> Result<usize> {
        self.dimensions.iter().position(|dimension| dimension.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.dimensions.iter().map(|dimension| dimension.name.as_str()).collect();
            Error::invalid_argument(format!("the mesh has no dimension {name:?}, but {}", names.join(", ")))
        })
    }

    /// The rank at a place, and the number of its host.
    pub fn at_place(&self, place: usize) -> (Rank, usize) {
        (self.order[place], self.hosts[place])
    }

    /// The place of a rank of the group.
    pub fn place(&self, rank: Rank) -> usize {
        // Every rank of the group has one: `new` has placed them all.
        self.order.iter().position(|other| *other == rank).unwrap_or_default()
    }

    /// The coordinates of a place, by dimension.
    pub fn coordinates(&self, mut place: usize) -> Vec<usize> {
        let mut coordinates: Vec<usize> = self
            .dimensions
            .iter()
            .rev()
            .map(|dimension| {
                let coordinate = place % dimension.size;
                place /= dimension.size;
                coordinate
            })
            .collect();
        coordinates.reverse();
        coordinates
    }

    /// The place that has these coordinates, each less than its dimension's size.
    pub fn place_at(&self, coordinates: &[usize]) -> usize {
        self.dimensions.iter().zip(coordinates).fold(0, |place, (dimension, at)| place * dimension.size + at)
    }

    /// Splits the places: those that differ in nothing but `along` have one color. The key is their order, in which the last of `along`
    /// runs fastest.
    pub fn split(&self, place: usize, along: &[usize]) -> (usize, usize) {
        let coordinates = self.coordinates(place);
        let number = |number, index: usize| number * self.dimensions[index].size + coordinates[index];
        let across = (0..coordinates.len()).filter(|index| !along.contains(index));
        (across.fold(0, number), along.iter().copied().fold(0, number))
    }

    /// On how many hosts the widest group of a dimension is.
    pub fn hosts_of_a_group(&self, dimension: usize) -> usize {
        let mut hosts: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for (place, host) in self.hosts.iter().enumerate() {
            let (color, _) = self.split(place, &[dimension]);
            hosts.entry(color).or_default().insert(*host);
        }
        hosts.values().map(BTreeSet::len).max().unwrap_or(1)
    }
}

fn check(dimensions: &[Dimension], world: usize) -> Result<()> {
    if dimensions.is_empty() || dimensions.len() > MAX_DIMENSIONS {
        return Err(Error::invalid_argument(format!(
            "a mesh has one to {MAX_DIMENSIONS} dimensions, not {}",
            dimensions.len()
        )));
    }
    for (index, Dimension { name, size }) in dimensions.iter().enumerate() {
        if name.is_empty() {
            return Err(Error::invalid_argument(format!("dimension {index} of the mesh has no name"))
                .with_remedy("give each a name, such as \"data\""));
        }
        if dimensions[..index].iter().any(|other| other.name == *name) {
            return Err(Error::invalid_argument(format!("two dimensions of the mesh are called {name:?}"))
                .with_remedy("give each a name of its own"));
        }
        if *size == 0 {
            return Err(Error::invalid_argument(format!("the dimension {name:?} has size 0"))
                .with_remedy("give a size from 1 on"));
        }
    }
    let product =
        dimensions.iter().try_fold(1usize, |product, dimension| product.checked_mul(dimension.size));
    if product == Some(world) {
        return Ok(());
    }
    let sizes: Vec<String> = dimensions.iter().map(|it| format!("{} {}", it.name, it.size)).collect();
    let product = product.map_or_else(|| "too many".to_owned(), |product| product.to_string());
    Err(Error::invalid_argument(format!(
        "a mesh of {} has {product} ranks, and the group has {world}",
        sizes.join(" x ")
    ))
    .with_remedy("make the product of the sizes the group's world size"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dimensions(sizes: &[usize]) -> Vec<Dimension> {
        sizes
            .iter()
            .enumerate()
            .map(|(index, size)| Dimension { name: format!("d{index}"), size: *size })
            .collect()
    }

    /// The places of the group that `place` belongs to, in their order.
    fn members(layout: &Layout, place: usize, along: &[usize]) -> Vec<usize> {
        let (color, _) = layout.split(place, along);
        let mut members: Vec<(usize, usize)> = (0..layout.order.len())
            .map(|other| (layout.split(other, along), other))
            .filter(|((other, _), _)| *other == color)
            .map(|((_, key), other)| (key, other))
            .collect();
        members.sort_unstable();
        members.into_iter().map(|(_, place)| place).collect()
    }

    proptest! {
        #[test]
        fn each_rank_has_coordinates_of_its_own_and_each_group_is_a_line(
            sizes in prop::collection::vec(1usize..5, 1..5),
            seed in any::<u64>(),
            hosts in 1usize..5,
        ) {
            let world: usize = sizes.iter().product();
            let host = |rank: usize| (seed.rotate_left(rank as u32 * 7) as usize) % hosts;
            let layout = Layout::new(dimensions(&sizes), &(0..world).map(host).collect::<Vec<_>>()).unwrap();
            let mut ranks: Vec<Rank> = (0..world).map(|place| layout.at_place(place).0).collect();
            ranks.sort_unstable();
            prop_assert!(ranks.iter().enumerate().all(|(index, rank)| rank.index() == index));
            for place in 0..world {
                let own = layout.coordinates(place);
                prop_assert_eq!(layout.place_at(&own), place);
                prop_assert_eq!(layout.place(layout.at_place(place).0), place);
                let of = |place: usize| host(layout.at_place(place).0.index());
                let again = (0..place).any(|other| of(other) == of(place));
                prop_assert!(place == 0 || again == (of(place - 1) == of(place)), "a host's ranks are apart");
                for along in 0..sizes.len() {
                    let line = members(&layout, place, &[along]);
                    prop_assert_eq!(line.len(), sizes[along]);
                    for (key, member) in line.iter().enumerate() {
                        let mut expected = own.clone();
                        expected[along] = key;
                        prop_assert_eq!(layout.coordinates(*member), expected);
                    }
                }
                let all: Vec<usize> = (0..sizes.len()).collect();
                prop_assert_eq!(members(&layout, place, &all), (0..world).collect::<Vec<_>>());
            }
        }

        #[test]
        fn groups_of_the_last_dimension_are_within_hosts_if_it_divides_them(
            hosts in 1usize..5, groups in 1usize..4, tensor in 1usize..5, seed in any::<u64>(),
        ) {
            // Ranks in any order on hosts of the same size.
            let each = groups * tensor;
            let mut of: Vec<usize> = (0..hosts * each).map(|rank| rank / each).collect();
            for index in (1..of.len()).rev() {
                of.swap(index, (seed.rotate_left(index as u32) % (index as u64 + 1)) as usize);
            }
            let layout = Layout::new(dimensions(&[hosts * groups, tensor]), &of).unwrap();
            prop_assert_eq!(layout.hosts_of_a_group(1), 1);
        }
    }

    #[test]
    fn ranks_that_come_host_by_host_keep_their_order() {
        let layout = Layout::new(dimensions(&[2, 3]), &["a", "a", "a", "b", "b", "b"]).unwrap();
        assert_eq!(layout.coordinates(layout.place(Rank::new(4))), [1, 1]);
        assert_eq!((layout.hosts_of_a_group(0), layout.hosts_of_a_group(1)), (2, 1));
        // A launcher that deals ranks out in turn.
        let layout = Layout::new(dimensions(&[2, 3]), &["a", "b", "a", "b", "a", "b"]).unwrap();
        let ranks: Vec<u32> = (0..6).map(|place| layout.at_place(place).0.get()).collect();
        assert_eq!(ranks, [0, 2, 4, 1, 3, 5]);
        assert_eq!(layout.hosts_of_a_group(1), 1);
    }

    /// Each group is looked at once: with a look at all ranks for each group it would not end today.
    #[test]
    fn hosts_are_counted_among_many_ranks_too() {
        let world = 1 << 16;
        let hosts: Vec<usize> = (0..world).map(|rank| rank / 1024).collect();
        let layout = Layout::new(dimensions(&[world, 1]), &hosts).unwrap();
        assert_eq!((layout.hosts_of_a_group(0), layout.hosts_of_a_group(1)), (64, 1));
    }

    #[test]
    fn what_is_no_mesh_is_refused_by_name() {
        let refused = |dimensions: &[(&str, usize)], cause: &str| {
            let dimensions =
                dimensions.iter().map(|(name, size)| Dimension { name: (*name).into(), size: *size });
            let error = Layout::new(dimensions.collect(), &["host"; 6]).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(cause), "{error}");
        };
        refused(&[], "a mesh has one to 8 dimensions, not 0");
        refused(&[("data", 2), ("", 3)], "dimension 1 of the mesh has no name");
        refused(&[("data", 2), ("data", 3)], "two dimensions of the mesh are called \"data\"");
        refused(&[("data", 6), ("tensor", 0)], "the dimension \"tensor\" has size 0");
        refused(
            &[("data", 2), ("tensor", 2)],
            "a mesh of data 2 x tensor 2 has 4 ranks, and the group has 6",
        );
        refused(&[("data", usize::MAX), ("tensor", 2)], "has too many ranks");
    }
}
