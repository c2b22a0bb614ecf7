//! `--tune`: times each algorithm of a collective, and notes at which sizes one gives way to the next.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx::rendezvous::{self, KeepAlive, Rendezvous};
use phalanx::store::PrefixStore;
use phalanx::{DType, Error, GroupOptions, ProcessGroup, Result, TransportKind, Tuning, TuningRow};
use phalanx_sys::open;

use crate::collectives::Collective;

/// The longest table that is read.
const LONGEST: u64 = 16 << 20;

/// A collective's algorithms, from the one with the fewest steps to the one that sends least.
pub(crate) struct Algorithms {
    pub(crate) names: &'static [&'static str],
    /// Between each two of them.
    borders: &'static [Border],
}

/// The field of the table that ends the sizes of one algorithm, and its value for the sizes and so many ranks. The largest number
/// leaves the next algorithm no sizes, 0 leaves this one none.
struct Border {
    field: fn(&mut TuningRow) -> &mut usize,
    value: fn(&Sizes<'_>, usize) -> usize,
}

impl Algorithms {
    /// Changes `row` so that it leaves no choice but the algorithm `index`.
    fn force(&self, index: usize, row: &mut TuningRow) {
        for (border, Border { field, .. }) in self.borders.iter().enumerate() {
            *field(row) = if border < index { 0 } else { usize::MAX };
        }
    }
}

/// Those of `collective`; an error if it has one alone.
pub(crate) fn algorithms(collective: Collective) -> Result<Algorithms> {
    const LAST: fn(&Sizes<'_>, usize) -> usize = |sizes, _| sizes.last();
    const NEXT: fn(&Sizes<'_>, usize) -> usize = |sizes, _| sizes.next();
    const ALL_REDUCE: &[Border] = &[
        Border { field: |row| &mut row.doubling_max, value: LAST },
        Border { field: |row| &mut row.halving_max, value: LAST },
    ];
    const BROADCAST: &[Border] = &[Border { field: |row| &mut row.broadcast_ring_min, value: NEXT }];
    const REDUCE: &[Border] = &[Border { field: |row| &mut row.reduce_ring_min, value: NEXT }];
    const TREE: &[Border] =
        &[Border { field: |row| &mut row.tree_max, value: |sizes, ranks| sizes.last_measured() / ranks }];
    const ALL_GATHER: &[Border] =
        &[Border { field: |row| &mut row.bruck_max, value: |sizes, _| sizes.last_measured() }];
    let (names, borders): (&[_], _) = match collective {
        Collective::AllReduce => (&["doubling", "halving", "ring"], ALL_REDUCE),
        Collective::Broadcast => (&["tree", "ring"], BROADCAST),
        Collective::Reduce => (&["tree", "ring"], REDUCE),
        Collective::Gather | Collective::Scatter => (&["tree", "direct"], TREE),
        Collective::AllGather | Collective::AllGatherV => (&["bruck", "ring"], ALL_GATHER),
        Collective::ReduceScatter | Collective::AllReduceCoalesced => {
            let cause = format!("{collective} changes its algorithm at the sizes at which all_reduce does");
            return Err(Error::invalid_argument(cause).with_remedy("give --tune with `all_reduce`"));
        }
        Collective::AllToAll | Collective::AllToAllV => (&[], &[]),
        Collective::Barrier | Collective::SendRecv => (&[], &[]),
    };
    if names.is_empty() {
        return Err(Error::invalid_argument(format!("{collective} has one algorithm for all sizes"))
            .with_remedy("leave --tune away"));
    }
    Ok(Algorithms { names, borders })
}

/// A group for each algorithm, on the store of one world. What comes back second must outlive them.
pub(crate) fn groups(
    algorithms: &Algorithms,
    world: Rendezvous,
    options: &GroupOptions,
) -> Result<(Vec<ProcessGroup>, KeepAlive)> {
    let groups = algorithms.names.iter().enumerate().map(|(index, name)| {
        let mut options = options.clone();
        options.tuning.rows.iter_mut().for_each(|row| algorithms.force(index, row));
        let place = Rendezvous {
            store: Arc::new(PrefixStore::new(*name, world.store.clone())),
            credentials: world.credentials.clone(),
            // Each group draws its own.
            group_number: None,
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
pub(crate) fn has_a_choice(group: &ProcessGroup) -> Result<()> {
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
pub(crate) fn are_forced(groups: &[ProcessGroup], algorithms: &Algorithms) -> Result<()> {
    let rows = groups.iter().map(ProcessGroup::tuning_row).collect::<Result<Vec<_>>>()?;
    for (index, (row, name)) in rows.iter().zip(algorithms.names).enumerate() {
        let mut forced = row.clone();
        algorithms.force(index, &mut forced);
        if forced != *row || rows[..index].contains(row) {
            return Err(Error::aborted(format!(
                "the group for {name} chooses by a table that does not force it: {row:?}"
            )));
        }
    }
    Ok(())
}

/// An error if the table in `path` cannot be read, or not be written. It does not change it.
pub(crate) fn check_file(path: &Path) -> Result<()> {
    read(path)?;
    let (table, beside) = places(path)?;
    // It would be replaced all the same: that asks only for the right to its folder.
    match open::regular(&table, File::options().append(true)) {
        Ok(file) if file.metadata().is_ok_and(|about| about.permissions().readonly()) => {
            return Err(refused(path, &"nobody may write to it")
                .with_remedy("name another file, or `chmod +w` this one"));
        }
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(refused(path, &error)),
        Ok(_) | Err(_) => {}
    }
    let made = File::create(&beside).and_then(|_| fs::remove_file(&beside));
    made.map_err(|error| refused(path, &format!("a file beside it cannot be written: {error}")))
}

/// The table in `path`; the defaults, if there is none yet.
fn read(path: &Path) -> Result<Tuning> {
    let read = open::regular(path, File::options().read(true))
        .and_then(|file| io::read_to_string(file.take(LONGEST)));
    match read {
        Ok(text) => Tuning::from_json(&text).map_err(|error| {
            refused(path, &error.full_cause()).with_remedy("name another file, or remove this one")
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Tuning::default()),
        Err(error) => Err(refused(path, &error)),
    }
}

/// Where the table is, also if a link leads there, and where the next one is until it is whole. An error if the link leads nowhere.
fn places(path: &Path) -> Result<(PathBuf, PathBuf)> {
    let place = match fs::canonicalize(path) {
        Ok(place) => place,
        Err(_) if path.is_symlink() => {
            return Err(refused(path, &"this link leads to no file").with_remedy("name the file itself"));
        }
        Err(_) => path.to_owned(),
    };
    let mut beside = place.clone().into_os_string();
    beside.push(format!(".{}.new", std::process::id()));
    Ok((place, PathBuf::from(beside)))
}

/// Puts `table` in the place of the one in `path`. A run that ends in the middle leaves that as it was.
fn replace(path: &Path, table: &str) -> Result<()> {
    let (path, beside) = places(path)?;
    let write = || {
        let mut file = File::create(&beside)?;
        if let Ok(about) = fs::metadata(&path) {
            // Some file systems have none. The table, which took long to measure, is worth more.
            let _ = file.set_permissions(about.permissions());
        }
        file.write_all(table.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|error| {
        // What is left of it is of no use.
        let _ = fs::remove_file(&beside);
        refused(&path, &error)
    })?;
    fs::rename(&beside, &path).map_err(|error| {
        refused(&path, &error).with_remedy(format!("the new table is in {}: move it there", beside.display()))
    })
}

fn refused(path: &Path, cause: &dyn Display) -> Error {
    Error::invalid_argument(format!("--tune {}: {cause}", path.display()))
}

/// Notes in the table in `path`, for worlds of `world` ranks, what the times of the algorithms say, and the type with which they were measured. A table that is not
/// there yet begins with the defaults; what other worlds and collectives have in it stays.
pub(crate) fn write(
    path: &Path,
    algorithms: &Algorithms,
    (collective, dtype): (Collective, DType),
    world: u32,
    sizes: &[usize],
    times: &[Vec<f64>],
) -> Result<()> {
    let mut tuning = read(path)?;
    let row = row_of(&mut tuning, world);
    for (Border { field, value }, end) in algorithms.borders.iter().zip(crossovers(times)) {
        *field(row) = value(&Sizes { sizes, end }, world as usize);
    }
    row.measured_with.insert(collective.to_string(), dtype.to_string());
    replace(path, &(tuning.to_json() + "\n"))
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
    /// The last of them; without end, if no other algorithm has won at any size.
    fn last(&self) -> usize {
        let is_best_everywhere = self.end > 0 && self.end == self.sizes.len();
        if is_best_everywhere { usize::MAX } else { self.last_measured() }
    }

    /// The last of them, and never beyond what was measured: in a tree, and in rounds, each rank takes memory for the blocks of all.
    fn last_measured(&self) -> usize {
        self.end.checked_sub(1).map_or(0, |last| self.sizes[last])
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
    use std::collections::BTreeMap;

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
            Collective::AllGather,
        ] {
            let algorithms = algorithms(collective).unwrap();
            assert_eq!(algorithms.borders.len(), algorithms.names.len() - 1);
            let forced = |index| {
                let mut row = TuningRow::default();
                algorithms.force(index, &mut row);
                row
            };
            let rows: Vec<_> = (0..algorithms.names.len()).map(forced).collect();
            for (index, row) in rows.iter().enumerate() {
                assert!(!rows[..index].contains(row), "{collective}: {rows:?}");
            }
        }
    }

    #[test]
    fn groups_that_choose_by_the_usual_table_are_not_timed_as_different_algorithms() {
        let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
        let algorithms = algorithms(Collective::AllReduce).unwrap();
        assert!(are_forced(&groups, &algorithms).unwrap_err().to_string().contains("doubling"));
        let usual = |names| Algorithms { names, borders: &[] };
        assert!(are_forced(&groups[..1], &usual(&["usual"])).is_ok());
        let twice = are_forced(&groups, &usual(&["one", "the same"]));
        assert!(twice.unwrap_err().to_string().contains("the same"));
    }

    #[test]
    fn one_bad_measurement_moves_no_border() {
        let tree = vec![1.0, 2.0, 12.0, 8.0, 16.0, 32.0];
        let ring = vec![10.0, 10.0, 10.0, 10.0, 10.0, 10.0];
        assert_eq!(crossovers(&[tree, ring]), [4]);
    }

    #[test]
    fn a_table_is_replaced_as_a_whole_and_a_link_to_it_stays() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["tuning.json", "link.json"].map(|name| folder.path().join(name));
        fs::write(&path, Tuning::default().to_json()).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        // Who has it open reads the old one to its end: it is not written over.
        let mut old = File::open(&path).unwrap();
        let times = [vec![1.0, 9.0], vec![9.0; 2], vec![2.0; 2]];
        let what = (Collective::AllReduce, DType::F32);
        check_file(&link).unwrap();
        write(&link, &algorithms(what.0).unwrap(), what, 5, &[1024, 4096], &times).unwrap();
        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!(Tuning::from_json(&text).unwrap(), Tuning::default());
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(read(&path).unwrap().rows.iter().any(|row| row.world_max == 5));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside it");
    }

    #[test]
    fn a_table_that_nobody_may_write_and_a_link_that_leads_nowhere_are_refused_before_anything_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["tuning.json", "link.json"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let error = check_file(&link).unwrap_err();
        assert!(error.to_string().contains("leads to no file") && error.remedy().is_some(), "{error}");
        fs::write(&path, Tuning::default().to_json()).unwrap();
        check_file(&link).unwrap();
        let mut permissions = fs::metadata(&path).unwrap().permissions();
        permissions.set_readonly(true);
        fs::set_permissions(&path, permissions).unwrap();
        // Also for root, who could.
        assert!(check_file(&link).is_err() && check_file(&path).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside it");
    }

    #[test]
    fn a_table_that_cannot_be_read_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        let table = Tuning::default().to_json();
        let half = &table[..100];
        fs::write(&path, half).unwrap();
        let error = check_file(&path).unwrap_err();
        assert!(error.to_string().contains("not a tuning table") && error.remedy().is_some(), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), half);
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        assert!(check_file(&pipe).unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn a_row_is_for_its_world_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuning.json");
        let sizes = [1024, 4096, 16384];
        let times = [vec![1.0, 1.0, 9.0], vec![9.0; 3], vec![2.0; 3]];
        let note = |collective, times: &[Vec<f64>]| {
            let what = (collective, DType::BF16);
            write(&path, &algorithms(collective).unwrap(), what, 4, &sizes, times).unwrap();
        };
        note(Collective::AllReduce, &times);
        note(Collective::Gather, &[vec![1.0, 3.0, 3.0], vec![2.0; 3]]);
        note(Collective::Reduce, &[vec![1.0; 3], vec![2.0; 3]]);

        let tuning = Tuning::from_json(&fs::read_to_string(&path).unwrap()).unwrap();
        let rows: Vec<_> = tuning.rows.iter().filter(|row| row.world_max == 4).collect();
        let [row] = rows[..] else { panic!("{tuning:?}") };
        assert_eq!((row.doubling_max, row.halving_max, row.tree_max), (4096, 4096, 256));
        // Where it has won at each size, too.
        note(Collective::Scatter, &[vec![1.0; 3], vec![2.0; 3]]);
        let longest = read(&path).unwrap().rows.iter().find(|row| row.world_max == 4).unwrap().tree_max;
        assert_eq!(longest, 16384 / 4);
        assert_eq!(row.reduce_ring_min, usize::MAX);
        let noted = ["all_reduce", "gather", "reduce"].map(|name| (name.to_owned(), "bf16".to_owned()));
        assert_eq!(row.measured_with, BTreeMap::from(noted));
        let others = tuning.rows.iter().filter(|row| row.world_max != 4);
        assert!(others.eq(&Tuning::default().rows));
    }
}
