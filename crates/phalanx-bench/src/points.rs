//! What a plot needs of a measurement, as `--json` writes it and the scripts in bench/peers.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use phalanx::{Error, Result};
use serde::Deserialize;

use crate::collectives::Collective;
use crate::row::Row;

/// More curves than somebody can tell apart, and than the legend has room for.
const MAX_CURVES: usize = 100;

/// One size's time. Other fields of a line of JSON are not needed here.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Point {
    /// The curve to which it belongs.
    pub(crate) name: String,
    pub(crate) collective: Collective,
    pub(crate) ranks: u32,
    pub(crate) bytes: f64,
    pub(crate) time_us: f64,
    /// Whether it is what the hardware allows, and not a competitor.
    #[serde(default)]
    pub(crate) limit: bool,
}

impl Point {
    /// In bytes per second.
    pub(crate) fn bus_bandwidth(&self) -> f64 {
        self.bytes / (self.time_us * 1e-6) * self.collective.bus_factor(self.ranks)
    }
}

impl From<&Row> for Point {
    fn from(row: &Row) -> Self {
        Self {
            name: row.name.clone(),
            collective: row.collective,
            ranks: row.ranks,
            bytes: row.bytes as f64,
            time_us: row.time_us,
            limit: false,
        }
    }
}

/// The points of all files, a line of JSON each. A name that several of them have is that of several curves if they have times of the
/// same size, unless it is one of those that are measured `now`.
pub(crate) fn read(files: &[PathBuf], now: &[String]) -> Result<Vec<Point>> {
    let mut all = Vec::new();
    for file in files {
        let text = fs::read_to_string(file).map_err(|error| refused(file, &error.to_string()))?;
        all.push((file.as_path(), parse(&text).map_err(|cause| refused(file, &cause))?));
    }
    let points = apart(all, now);
    let names = points.iter().map(|point| &point.name).collect::<HashSet<_>>().len();
    if names > MAX_CURVES {
        let cause = format!("the files have {names} names, and a plot has at most {MAX_CURVES} curves");
        return Err(
            Error::invalid_argument(cause).with_remedy("give fewer files, or those of one measurement")
        );
    }
    Ok(points)
}

/// Names the points by their files, too, where those of several files would be one curve, with several times of one size.
fn apart(files: Vec<(&Path, Vec<Point>)>, now: &[String]) -> Vec<Point> {
    let mut first = HashMap::new();
    let mut several = HashSet::new();
    for (file, points) in &files {
        for Point { name, collective, ranks, bytes, .. } in points {
            let size = (name.clone(), collective.to_string(), *ranks, bytes.to_bits());
            if *first.entry(size).or_insert(*file) != *file && !now.contains(name) {
                several.insert(name.clone());
            }
        }
    }
    let mut all = Vec::new();
    for (file, points) in files {
        for mut point in points {
            if several.contains(&point.name) {
                point.name = format!("{} ({})", point.name, file.display());
            }
            all.push(point);
        }
    }
    all
}

/// Those of one collective and world, of which there must be some.
pub(crate) fn select(points: Vec<Point>, collective: Collective, ranks: u32) -> Result<Vec<Point>> {
    let cases = cases(&points);
    let chosen: Vec<_> =
        points.into_iter().filter(|point| (point.collective, point.ranks) == (collective, ranks)).collect();
    if chosen.is_empty() {
        let cause = format!("the files have no times of {collective} with {ranks} ranks");
        return Err(Error::invalid_argument(cause).with_remedy(format!("they have those of {cases}")));
    }
    Ok(chosen)
}

/// What has been measured, in words.
pub(crate) fn cases(points: &[Point]) -> String {
    let mut cases: Vec<_> =
        points.iter().map(|point| format!("{} with {} ranks", point.collective, point.ranks)).collect();
    cases.sort();
    cases.dedup();
    if cases.is_empty() { "nothing".to_owned() } else { cases.join(", ") }
}

fn parse(text: &str) -> Result<Vec<Point>, String> {
    serde_json::Deserializer::from_str(text)
        .into_iter::<Point>()
        .map(|point| match point {
            Ok(point) if !(point.bytes > 0.0 && point.time_us > 0.0) => Err(format!(
                "{} bytes in {} µs have no place on a logarithmic axis",
                point.bytes, point.time_us
            )),
            Ok(point) => Ok(point),
            Err(error) => {
                Err(format!("{error}; `phalanx bench --json FILE` and bench/peers/run.py write such files"))
            }
        })
        .collect()
}

fn refused(file: &Path, cause: &str) -> Error {
    Error::invalid_argument(format!("{} cannot be read: {cause}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        r#"{"name": "gloo", "collective": "all_reduce", "ranks": 4, "bytes": 1000, "time_us": 2.0}"#;

    #[test]
    fn lines_become_points_with_nccl_tests_bandwidth() {
        let points = parse(&format!("{LINE}\n{LINE}\n")).unwrap();
        assert_eq!(points.len(), 2);
        assert_eq!(points[0].bus_bandwidth(), 0.75e9);
    }

    #[test]
    fn one_name_in_several_files_is_several_curves() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["before.json", "after.json", "larger.json"].map(|name| folder.path().join(name));
        let names = |of: &[PathBuf], now: &[String]| -> Vec<String> {
            read(of, now).unwrap().into_iter().map(|point| point.name).collect()
        };
        fs::write(&files[0], LINE).unwrap();
        fs::write(&files[1], LINE.replace("2.0", "1.0") + "\n" + &LINE.replace("gloo", "mpi")).unwrap();
        fs::write(&files[2], LINE.replace("1000", "4000")).unwrap();
        let [before, after] = [0, 1].map(|number: usize| format!("gloo ({})", files[number].display()));
        assert_eq!(names(&files[..2], &[]), [before, after, "mpi".to_owned()]);
        // The sizes of one curve may have been measured one after another, and a curve that is measured now takes the place of both.
        assert_eq!(names(&[files[0].clone(), files[2].clone()], &[]), ["gloo", "gloo"]);
        assert_eq!(names(&files[..2], &["gloo".to_owned()]), ["gloo", "gloo", "mpi"]);
    }

    #[test]
    fn more_curves_than_a_plot_has_room_for_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("times.json");
        for (names, is_drawn) in [(MAX_CURVES, true), (MAX_CURVES + 1, false)] {
            let lines = (0..names).map(|number| LINE.replace("gloo", &format!("gloo {number}")) + "\n");
            fs::write(&file, lines.collect::<String>()).unwrap();
            assert_eq!(read(std::slice::from_ref(&file), &[]).is_ok(), is_drawn, "{names}");
        }
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        assert!(parse(&LINE.replace("2.0", "0")).unwrap_err().contains("logarithmic"));
        assert!(parse("{}").unwrap_err().contains("run.py"));
        let error = select(parse(LINE).unwrap(), Collective::Broadcast, 4).unwrap_err().to_string();
        assert!(
            error.contains("broadcast with 4 ranks") && error.contains("all_reduce with 4 ranks"),
            "{error}"
        );
    }
}
