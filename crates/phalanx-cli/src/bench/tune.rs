//! `--tune`: times each algorithm of a collective, and notes at which sizes one gives way to the next.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use phalanx::rendezvous::{self, KeepAlive, Rendezvous};
use phalanx::store::PrefixStore;
use phalanx::{Error, GroupOptions, ProcessGroup, Result, TransportKind, Tuning, TuningRow};

use super::collectives::Collective;

/// One way to carry out a collective, and the table that leaves no other.
pub(super) struct Algorithm {
    pub(super) name: &'static str,
    force: fn(&mut TuningRow),
}

/// Those of a collective, from the one with the fewest steps to the one that sends least.
pub(super) fn algorithms(collective: Collective) -> Result<&'static [Algorithm]> {
    macro_rules! forced {
        ($name:literal: $($field:ident = $value:expr),*) => {
            Algorithm { name: $name, force: |row| { $(row.$field = $value;)* } }
        };
    }
    Ok(match collective {
        Collective::AllReduce => {
            const {
                &[
                    forced!("doubling": doubling_max = usize::MAX),
                    forced!("halving": doubling_max = 0, halving_max = usize::MAX),
                    forced!("ring": doubling_max = 0, halving_max = 0),
                ]
            }
        }
        Collective::Broadcast => {
            const { &[forced!("tree": broadcast_ring_min = usize::MAX), forced!("ring": broadcast_ring_min = 0)] }
        }
        Collective::Reduce => {
            const { &[forced!("tree": reduce_ring_min = usize::MAX), forced!("ring": reduce_ring_min = 0)] }
        }
        Collective::Gather | Collective::Scatter => {
            const { &[forced!("tree": tree_max = usize::MAX), forced!("direct": tree_max = 0)] }
        }
        _ => {
            return Err(Error::invalid_argument(format!("{collective} has one algorithm for all sizes"))
                .with_remedy("leave --tune away"));
        }
    })
}

/// A group for each algorithm, on the store of one world. What comes back second must outlive them.
pub(super) fn groups(
    algorithms: &[Algorithm],
    world: Rendezvous,
    options: &GroupOptions,
) -> Result<(Vec<ProcessGroup>, KeepAlive)> {
    let groups = algorithms.iter().map(|algorithm| {
        let mut options = options.clone();
        for row in &mut options.tuning.rows {
            (algorithm.force)(row);
        }
        let place = Rendezvous {
            store: Arc::new(PrefixStore::new(algorithm.name, world.store.clone())),
            credentials: world.credentials.clone(),
            keep_alive: rendezvous::alone().keep_alive,
            ..world
        };
        ProcessGroup::join(place, options)
    });
    let groups = groups.collect::<Result<_>>()?;
    Ok((groups, world.keep_alive))
}

/// An error if the group does not choose by its table: where all ranks share memory, nothing is sent, and every row of the
/// table would be timed on the same path.
pub(super) fn has_a_choice(group: &ProcessGroup) -> Result<()> {
    match group.transport() {
        Some(TransportKind::Tcp) => Ok(()),
        Some(TransportKind::SharedMemory) => {
            Err(Error::invalid_argument("all ranks share memory, where no tuning table is used")
                .with_remedy("give `--transport tcp` to tune for a network, or leave --tune away"))
        }
        None => Err(Error::invalid_argument("a rank alone sends nothing, so there is nothing to tune")
            .with_remedy("give a larger --nproc-per-node, or leave --tune away")),
    }
}

/// An error if a group does not choose by what its algorithm forces, or two choose alike: the times of one algorithm would
/// be noted as another's.
pub(super) fn are_forced(groups: &[ProcessGroup], algorithms: &[Algorithm]) -> Result<()> {
    let rows = groups.iter().map(ProcessGroup::tuning_row).collect::<Result<Vec<_>>>()?;
    for (index, (row, algorithm)) in rows.iter().zip(algorithms).enumerate() {
        let mut forced = row.clone();
        (algorithm.force)(&mut forced);
        if forced != *row || rows[..index].contains(row) {
            let name = algorithm.name;
            return Err(Error::aborted(format!(
                "the group for {name} chooses by a table that does not force it: {row:?}"
            )));
        }
    }
    Ok(())
}

/// Notes in the table in `path`, for worlds of `world` ranks, what the times of the algorithms say. A table that is not
/// there yet begins with the defaults; what other worlds and collectives have in it stays.
pub(super) fn write(
    path: &Path,
    collective: Collective,
    world: u32,
    sizes: &[usize],
    times: &[Vec<f64>],
) -> Result<()> {
    let refused = |cause: String| Error::invalid_argument(format!("--tune {}: {cause}", path.display()));
    let mut tuning = match fs::read_to_string(path) {
        Ok(text) => Tuning::from_json(&text).map_err(|error| refused(error.to_string()))?,
        Err(error) if error.kind() == ErrorKind::NotFound => Tuning::default(),
        Err(error) => return Err(refused(error.to_string())),
    };
    let ends: Vec<_> = crossovers(times).into_iter().map(|end| Sizes { sizes, end }).collect();
    let row = row_of(&mut tuning, world);
    match (collective, ends.as_slice()) {
        (Collective::AllReduce, [doubling, halving]) => {
            (row.doubling_max, row.halving_max) = (doubling.last(1), halving.last(1));
        }
        (Collective::Broadcast, [tree]) => row.broadcast_ring_min = tree.next(),
        (Collective::Reduce, [tree]) => row.reduce_ring_min = tree.next(),
        (Collective::Gather | Collective::Scatter, [tree]) => row.tree_max = tree.last(world as usize),
        _ => {}
    }
    fs::write(path, tuning.to_json() + "\n").map_err(|error| refused(error.to_string()))
}

/// The row that holds for `world` and no larger one; if there is none, one like that which has held so far.
fn row_of(tuning: &mut Tuning, world: u32) -> &mut TuningRow {
    let at = tuning.rows.partition_point(|row| row.world_max < world);
    if tuning.rows.get(at).is_none_or(|row| row.world_max != world) {
        let like = tuning.rows.get(at).cloned().unwrap_or_default();
        tuning.rows.insert(at, TuningRow { world_max: world, ..like });
    }
    &mut tuning.rows[at]
}

/// The sizes below `end`, at which an algorithm is the best.
struct Sizes<'a> {
    sizes: &'a [usize],
    end: usize,
}

impl Sizes<'_> {
    /// The last of them, divided into so many shares; without end, if no other algorithm has won at any size.
    fn last(&self, shares: usize) -> usize {
        match self.end {
            0 => 0,
            end if end == self.sizes.len() => usize::MAX,
            end => self.sizes[end - 1] / shares,
        }
    }

    /// The first size at which another is better.
    fn next(&self) -> usize {
        self.sizes.get(self.end).copied().unwrap_or(usize::MAX)
    }
}

/// How many sizes belong to the first algorithm, to the first two, and so on, so that each has the sizes at which it is
/// best: the product of all times that are chosen is the least. One size that was measured badly moves no border far.
fn crossovers(times: &[Vec<f64>]) -> Vec<usize> {
    let Some((last, earlier)) = times.split_last() else { return Vec::new() };
    let cost = |times: &[f64]| times.iter().map(|time| time.ln()).sum::<f64>();
    let Some(first) = earlier.first() else { return Vec::new() };
    let sizes = last.len();
    // Two algorithms have one border, three have two: so few that all can be tried.
    let mut best = (f64::INFINITY, vec![0; earlier.len()]);
    for one in 0..=sizes {
        let candidates: Vec<Vec<usize>> = match earlier.len() {
            1 => vec![vec![one]],
            _ => (one..=sizes).map(|two| vec![one, two]).collect(),
        };
        for borders in candidates {
            let middle = earlier.get(1).map_or(0.0, |middle| cost(&middle[one..borders[1]]));
            let end = borders.last().copied().unwrap_or(one);
            let total = cost(&first[..one]) + middle + cost(&last[end..]);
            if total < best.0 {
                best = (total, borders);
            }
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use phalanx::WorldSize;

    use super::*;

    #[test]
    fn each_algorithm_gets_the_sizes_at_which_it_is_best() {
        let doubling = vec![1.0, 2.0, 4.0, 8.0, 16.0];
        let ring = vec![5.0, 5.0, 5.0, 6.0, 7.0];
        assert_eq!(crossovers(&[doubling.clone(), ring.clone()]), [3]);
        let halving = vec![3.0, 2.5, 3.0, 5.0, 9.0];
        assert_eq!(crossovers(&[doubling.clone(), halving, ring.clone()]), [2, 4]);
        assert_eq!(crossovers(&[doubling, vec![9.0; 5], ring]), [3, 3], "halving wins nowhere");
    }

    #[test]
    fn each_algorithm_has_a_table_of_its_own() {
        for collective in [
            Collective::AllReduce,
            Collective::Broadcast,
            Collective::Reduce,
            Collective::Gather,
            Collective::Scatter,
        ] {
            let forced = |algorithm: &Algorithm| {
                let mut row = TuningRow::default();
                (algorithm.force)(&mut row);
                row
            };
            let rows: Vec<_> = algorithms(collective).unwrap().iter().map(forced).collect();
            for (index, row) in rows.iter().enumerate() {
                assert!(!rows[..index].contains(row), "{collective}: {rows:?}");
            }
        }
    }

    #[test]
    fn groups_that_choose_by_the_usual_table_are_not_timed_as_different_algorithms() {
        let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
        let algorithms = algorithms(Collective::AllReduce).unwrap();
        assert!(are_forced(&groups, algorithms).unwrap_err().to_string().contains("doubling"));
        let usual = Algorithm { name: "usual", force: |_| {} };
        assert!(are_forced(&groups[..1], &[usual]).is_ok());
        let twice = [Algorithm { name: "one", force: |_| {} }, Algorithm { name: "the same", force: |_| {} }];
        assert!(are_forced(&groups, &twice).unwrap_err().to_string().contains("the same"));
    }

    #[test]
    fn one_bad_measurement_moves_no_border() {
        let tree = vec![1.0, 2.0, 12.0, 8.0, 16.0, 32.0];
        let ring = vec![10.0, 10.0, 10.0, 10.0, 10.0, 10.0];
        assert_eq!(crossovers(&[tree, ring]), [4]);
    }

    #[test]
    fn a_row_is_for_its_world_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        let sizes = [1024, 4096, 16384];
        let times = [vec![1.0, 1.0, 9.0], vec![9.0; 3], vec![2.0; 3]];
        write(&path, Collective::AllReduce, 4, &sizes, &times).unwrap();
        write(&path, Collective::Gather, 4, &sizes, &[vec![1.0, 3.0, 3.0], vec![2.0; 3]]).unwrap();
        write(&path, Collective::Reduce, 4, &sizes, &[vec![1.0; 3], vec![2.0; 3]]).unwrap();

        let tuning = Tuning::from_json(&fs::read_to_string(&path).unwrap()).unwrap();
        let rows: Vec<_> = tuning.rows.iter().filter(|row| row.world_max == 4).collect();
        let [row] = rows[..] else { panic!("{tuning:?}") };
        assert_eq!((row.doubling_max, row.halving_max, row.tree_max), (4096, 4096, 256));
        assert_eq!(row.reduce_ring_min, usize::MAX);
        let others = tuning.rows.iter().filter(|row| row.world_max != 4);
        assert!(others.eq(&Tuning::default().rows));
    }
}
