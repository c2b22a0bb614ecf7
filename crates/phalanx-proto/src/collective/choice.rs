//! Chooses the algorithm for a size. The choice depends only on values that are the same on every rank.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Plan, doubling, halving, ring, tree};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hash::fnv1a_32;
use crate::rank::Rank;
use crate::world_size::{MAX_WORLD_SIZE, WorldSize};

/// The sizes at which the algorithm changes, for worlds of different sizes.
///
/// They depend on the network, so they can be measured and configured: with `GroupOptions`, or
/// in a JSON file that `PHALANX_TUNING` names. All ranks must have the same: each frame carries a fingerprint of the
/// table, and ranks whose tables differ get an error that says so.
///
/// ```
/// use phalanx::Tuning;
/// let tuning = Tuning::from_json(r#"{"rows": [{"world_max": 65536, "doubling_max": 4096}]}"#)?;
/// assert_eq!(tuning.rows[0].doubling_max, 4096);
/// assert_eq!(Tuning::from_json(&tuning.to_json())?, tuning);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// By world size, ascending. A world uses the first row whose `world_max` is large enough; the last row covers all.
    pub rows: Vec<TuningRow>,
}

/// The sizes for one range of worlds, in bytes. A size that a file omits has its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuningRow {
    /// For worlds of up to this many ranks.
    pub world_max: u32,
    /// `all_reduce` of at most this uses recursive doubling.
    pub doubling_max: usize,
    /// Above that, `all_reduce` of at most this uses recursive halving and doubling; beyond, a ring.
    pub halving_max: usize,
    /// `broadcast` of at least this is scattered in chunks, which are then all-gathered in a ring; below, a binomial
    /// tree.
    pub broadcast_ring_min: usize,
    /// `reduce` of at least this is a ring reduce-scatter, whose chunks are then gathered; below, a binomial tree.
    pub reduce_ring_min: usize,
    /// `gather` and `scatter` of at most this for each rank use a binomial tree; above, each rank exchanges with the
    /// root.
    pub tree_max: usize,
    /// `all_gather` of at most this, in all ranks' elements together, takes the fewest rounds (Bruck); above, it is a ring.
    pub bruck_max: usize,
    /// Between hosts whose ranks share memory, `all_reduce` of at least this is divided into as many stripes as every
    /// host has ranks for; below, one leader of each host exchanges for all.
    pub stripes_min: usize,
    /// With elements of which type the sizes of a collective were measured, by its name, such as `f32` for `all_reduce`: a note for readers. Where elements
    /// are combined, other types may have other best sizes. What is not measured is not in it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub measured_with: BTreeMap<String, String>,
}

impl Default for TuningRow {
    fn default() -> Self {
        Self {
            world_max: MAX_WORLD_SIZE,
            doubling_max: 32 * 1024,
            halving_max: 128 * 1024,
            broadcast_ring_min: 512 * 1024,
            reduce_ring_min: 2 * 1024 * 1024,
            tree_max: 256,
            bruck_max: 128 * 1024,
            stripes_min: 64 * 1024,
            measured_with: BTreeMap::new(),
        }
    }
}

impl Default for Tuning {
    /// As measured over TCP on one host, with 2, 3, 4 and 8 ranks.
    fn default() -> Self {
        // Two ranks are done after one exchange. With a chunk each they need two, which is faster only for large
        // buffers.
        let pair = TuningRow {
            world_max: 2,
            doubling_max: 64 * 1024,
            halving_max: 64 * 1024,
            reduce_ring_min: usize::MAX,
            broadcast_ring_min: usize::MAX,
            ..TuningRow::default()
        };
        let three = TuningRow { world_max: 3, broadcast_ring_min: usize::MAX, ..TuningRow::default() };
        Self { rows: vec![pair, three, TuningRow::default()] }
    }
}

/// What makes a table.
const TABLE_REMEDY: &str = "`phalanx bench --tune FILE` writes one";

impl Tuning {
    /// Reads a table.
    ///
    /// # Errors
    /// If it is not such JSON, or its rows do not ascend to the largest world.
    pub fn from_json(text: &str) -> Result<Self> {
        let tuning: Self = serde_json::from_str(text).map_err(|error| {
            Error::invalid_argument("this is not a tuning table").with_source(error).with_remedy(TABLE_REMEDY)
        })?;
        tuning.check()?;
        Ok(tuning)
    }

    /// The table in the format that [`from_json`](Self::from_json) reads.
    pub fn to_json(&self) -> String {
        // Numbers in a list can always be written as JSON.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Checks that the rows ascend by `world_max`, and that the last one reaches [`MAX_WORLD_SIZE`].
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        let ascends = self.rows.is_sorted_by(|row, next| row.world_max < next.world_max);
        let reaches = self.rows.last().is_some_and(|row| row.world_max >= MAX_WORLD_SIZE);
        if ascends && reaches {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "the rows of a tuning table must ascend by world_max, and the last one reach {MAX_WORLD_SIZE}"
        ))
        .with_remedy(TABLE_REMEDY))
    }

    /// The row for `world`.
    #[doc(hidden)]
    pub fn choice(&self, world: WorldSize) -> Choice {
        let row = self.rows.iter().find(|row| row.world_max >= world.get()).cloned().unwrap_or_default();
        Choice { fingerprint: fingerprint(&row), row }
    }
}

/// The sizes for a group.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The sizes at which the algorithm changes.
    pub row: TuningRow,
    /// Differs if any size differs, except with negligible probability. Never 0.
    pub fingerprint: u32,
}

fn fingerprint(row: &TuningRow) -> u32 {
    let TuningRow {
        world_max: _,
        doubling_max,
        halving_max,
        broadcast_ring_min,
        reduce_ring_min,
        tree_max,
        bruck_max,
        stripes_min,
        measured_with: _,
    } = row;
    let sizes =
        [doubling_max, halving_max, broadcast_ring_min, reduce_ring_min, tree_max, bruck_max, stripes_min];
    fnv1a_32(sizes.into_iter().flat_map(|size| (*size as u64).to_le_bytes())).max(1)
}

/// For `fuzzing`: reads a table from a file.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some(tuning) = str::from_utf8(bytes).ok().and_then(|text| Tuning::from_json(text).ok()) else {
        return false;
    };
    assert!(Tuning::from_json(&tuning.to_json()).is_ok_and(|again| again == tuning));
    for world in [1, 2, 3, 5, MAX_WORLD_SIZE] {
        let Ok(world) = WorldSize::new(world) else { continue };
        let Choice { row, fingerprint } = tuning.choice(world);
        assert!(tuning.rows.contains(&row) && fingerprint != 0);
        if world.get() > 8 {
            continue;
        }
        // There is a plan for every size.
        for elements in [0, 1, 1000] {
            let _ = all_reduce(&row, Rank::MAIN, world, DType::F32, elements);
            let _ = broadcast(&row, Rank::MAIN, world, Rank::MAIN, DType::F32, elements);
        }
    }
    true
}

/// An all-reduce of `elements` in place.
pub fn all_reduce(row: &TuningRow, rank: Rank, world: WorldSize, dtype: DType, elements: usize) -> Plan {
    match elements * dtype.size() {
        bytes if bytes <= row.doubling_max => doubling::all_reduce(rank, world, elements),
        bytes if bytes <= row.halving_max => halving::all_reduce(rank, world, elements),
        _ => ring::all_reduce(rank, world, elements),
    }
}

/// A broadcast of `elements` from `root`.
pub fn broadcast(
    row: &TuningRow,
    rank: Rank,
    world: WorldSize,
    root: Rank,
    dtype: DType,
    elements: usize,
) -> Plan {
    if elements * dtype.size() >= row.broadcast_ring_min {
        tree::scatter_ring(rank, world, root, elements)
    } else {
        tree::binomial(rank, world, root, elements)
    }
}

/// A reduction of `elements` to `root`, in place.
pub fn reduce(
    row: &TuningRow,
    rank: Rank,
    world: WorldSize,
    root: Rank,
    dtype: DType,
    elements: usize,
) -> Plan {
    if elements * dtype.size() >= row.reduce_ring_min {
        tree::reduce_ring(rank, world, root, elements)
    } else {
        tree::reduce(rank, world, root, elements)
    }
}

/// Whether a gather and a scatter of `share` bytes for each rank use a tree. Otherwise each rank exchanges with the root.
pub fn goes_by_tree(row: &TuningRow, share: usize) -> bool {
    share <= row.tree_max
}

/// Whether an all-gather of `bytes` bytes of all ranks together goes in rounds that double. Otherwise it is a ring, which up to three ranks
/// has as few steps and copies nothing.
pub fn goes_in_rounds(row: &TuningRow, world: WorldSize, bytes: usize) -> bool {
    world.count() > 3 && bytes <= row.bruck_max
}

/// Whether a reduce-scatter of `bytes` bytes is an all-reduce of which each rank keeps its own part: that takes fewer rounds than a ring, of more
/// bytes. Up to three ranks a ring takes as few; up to seven, not more than halving and doubling.
pub fn reduces_whole(row: &TuningRow, world: WorldSize, bytes: usize) -> bool {
    match world.count() {
        ..=3 => false,
        4..=7 => bytes <= row.doubling_max,
        8.. => bytes <= row.doubling_max.max(row.halving_max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_takes_the_first_row_that_reaches_it() {
        let tuning = Tuning::default();
        let world = |size| WorldSize::new(size).unwrap();
        assert_eq!(tuning.choice(world(2)).row, tuning.rows[0]);
        assert_eq!(tuning.choice(world(3)).row, tuning.rows[1]);
        assert_eq!(tuning.choice(world(900)).row, tuning.rows[2]);
        assert_ne!(tuning.choice(world(2)).fingerprint, tuning.choice(world(3)).fingerprint);
    }

    #[test]
    fn rows_that_leave_one_algorithm_each_give_plans_that_differ_at_every_size() {
        use crate::collective::{
            Counts, all_gather_in_rounds, all_gather_v, gather, gather_tree, scatter, scatter_tree,
        };
        const MAX: usize = usize::MAX;
        let row = TuningRow::default;
        let all_reduces = [
            TuningRow { doubling_max: MAX, ..row() },
            TuningRow { doubling_max: 0, halving_max: MAX, ..row() },
            TuningRow { doubling_max: 0, halving_max: 0, ..row() },
        ];
        let broadcasts = [MAX, 0].map(|broadcast_ring_min| TuningRow { broadcast_ring_min, ..row() });
        let reduces = [MAX, 0].map(|reduce_ring_min| TuningRow { reduce_ring_min, ..row() });
        let gathers = [MAX, 0].map(|tree_max| TuningRow { tree_max, ..row() });
        let all_gathers = [MAX, 0].map(|bruck_max| TuningRow { bruck_max, ..row() });
        for world in [3, 4].map(|size| WorldSize::new(size).unwrap()) {
            // 4 B, 1 KiB, 64 KiB and 256 KiB.
            for elements in [1, 256, 16_384, 65_536] {
                let differ = |rows: &[TuningRow], plan: &dyn Fn(&TuningRow, Rank) -> Plan| {
                    let plan = |row| world.ranks().map(|rank| plan(row, rank)).collect::<Vec<_>>();
                    let plans: Vec<_> = rows.iter().map(plan).collect();
                    for (index, plan) in plans.iter().enumerate() {
                        assert!(!plans[..index].contains(plan), "{index} of {elements} in {world}: {plan:?}");
                    }
                };
                let (f32, root) = (DType::F32, Rank::MAIN);
                differ(&all_reduces, &|row, rank| all_reduce(row, rank, world, f32, elements));
                differ(&broadcasts, &|row, rank| broadcast(row, rank, world, root, f32, elements));
                differ(&reduces, &|row, rank| reduce(row, rank, world, root, f32, elements));
                differ(&gathers, &|row, rank| match goes_by_tree(row, elements * f32.size()) {
                    true => gather_tree(rank, world, root, elements),
                    false => gather(rank, world, root, elements),
                });
                differ(&gathers, &|row, rank| match goes_by_tree(row, elements * f32.size()) {
                    true => scatter_tree(rank, world, root, elements),
                    false => scatter(rank, world, root, elements),
                });
                if world.count() > 3 {
                    let counts = Counts::even(elements, world);
                    differ(&all_gathers, &|row, rank| match goes_in_rounds(row, world, counts.total()) {
                        true => all_gather_in_rounds(rank, world, &counts),
                        false => all_gather_v(rank, world, &counts),
                    });
                }
            }
        }
    }

    #[test]
    fn a_reduce_scatter_is_an_all_reduce_only_where_that_takes_fewer_rounds() {
        let row = TuningRow::default();
        let steps = |plan: Plan| plan.len();
        for size in 2..40 {
            let world = WorldSize::new(size).unwrap();
            for elements in [1, 8 << 10, 32 << 10, 64 << 10] {
                let whole = all_reduce(&row, Rank::MAIN, world, DType::F32, elements);
                let ring = ring::reduce_scatter(Rank::MAIN, world, elements);
                if reduces_whole(&row, world, 4 * elements) {
                    assert!(steps(whole) <= steps(ring), "{elements} in {world}");
                }
            }
            assert_eq!(reduces_whole(&row, world, 4), size > 3, "{world}");
        }
    }

    #[test]
    fn a_note_of_what_a_size_was_measured_with_is_kept_and_changes_no_choice() {
        let text = r#"{"rows": [{"world_max": 65536, "measured_with": {"all_reduce": "bf16"}}]}"#;
        let noted = Tuning::from_json(text).unwrap();
        assert_eq!(noted.rows[0].measured_with["all_reduce"], "bf16");
        assert_eq!(Tuning::from_json(&noted.to_json()).unwrap(), noted);
        let plain = Tuning { rows: vec![TuningRow::default()] };
        assert!(!plain.to_json().contains("measured_with"));
        let world = WorldSize::new(4).unwrap();
        assert_eq!(noted.choice(world).fingerprint, plain.choice(world).fingerprint);
    }

    #[test]
    fn a_table_with_a_gap_or_a_stranger_is_refused() {
        for text in [
            "[]",
            r#"{"rows": []}"#,
            r#"{"rows": [{"world_max": 8}]}"#,
            r#"{"rows": [{}, {"world_max": 8}]}"#,
            r#"{"rows": [{"doublin_max": 8}]}"#,
        ] {
            assert!(Tuning::from_json(text).unwrap_err().is_invalid_argument(), "{text}");
        }
        assert!(Tuning::default().check().is_ok());
    }
}
