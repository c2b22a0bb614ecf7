//! What is told about each size: a row of the table, and a line of JSON.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use phalanx::{Error, Result};
use serde::Serialize;

use super::collectives::Collective;

/// One size's result.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Whose it is, as on its curve in a plot.
    pub(super) name: String,
    pub(super) collective: Collective,
    /// If it was not left to the library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) algorithm: Option<String>,
    pub(super) ranks: u32,
    pub(super) dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) op: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) root: Option<u32>,
    pub(super) bytes: usize,
    pub(super) count: usize,
    pub(super) time_us: f64,
    pub(super) min_us: f64,
    pub(super) p99_us: f64,
    pub(super) algbw_gbs: f64,
    pub(super) busbw_gbs: f64,
    pub(super) wrong: u64,
}

/// Where rows go, as they come.
pub(super) struct Report {
    table: bool,
    json: Option<Box<dyn Write>>,
}

impl Report {
    /// The table on standard output and, if a file is named, JSON in it; with `-` JSON in place of the table.
    pub(super) fn start(json: Option<&Path>, title: &str) -> Result<Self> {
        let (table, json): (_, Option<Box<dyn Write>>) = match json {
            None => (true, None),
            Some(path) if path == Path::new("-") => (false, Some(Box::new(io::stdout()))),
            Some(path) => {
                let file = File::create(path).map_err(|error| {
                    Error::invalid_argument(format!("--json {} cannot be written: {error}", path.display()))
                })?;
                (true, Some(Box::new(file)))
            }
        };
        let report = Self { table, json };
        report.line(&format!("# {title}"))?;
        report.line(&format!(
            "{:>10} {:>12} {:>11} {:>11} {:>11} {:>8} {:>8} {:>6}",
            "size", "count", "time", "min", "p99", "algbw", "busbw", "wrong"
        ))?;
        report.line(&format!(
            "{:>10} {:>12} {:>11} {:>11} {:>11} {:>8} {:>8}",
            "", "elements", "µs", "µs", "µs", "GB/s", "GB/s"
        ))?;
        Ok(report)
    }

    pub(super) fn row(&mut self, row: &Row) -> Result<()> {
        if let Some(json) = &mut self.json {
            let line = serde_json::to_string(row).map_err(|error| unwritten(&error.into()))?;
            writeln!(json, "{line}").and_then(|()| json.flush()).map_err(|error| unwritten(&error))?;
        }
        let Row { bytes, count, time_us, min_us, p99_us, algbw_gbs, busbw_gbs, wrong, .. } = row;
        let (size, algorithm) = (size(*bytes as f64), row.algorithm.as_deref().unwrap_or_default());
        self.line(&format!(
            "{size:>10} {count:>12} {time_us:>11.2} {min_us:>11.2} {p99_us:>11.2} {algbw_gbs:>8.3} {busbw_gbs:>8.3} \
             {wrong:>6}  {algorithm}"
        ))
    }

    fn line(&self, text: &str) -> Result<()> {
        if !self.table {
            return Ok(());
        }
        writeln!(io::stdout(), "{}", text.trim_end()).map_err(|error| unwritten(&error))
    }
}

fn unwritten(error: &io::Error) -> Error {
    Error::aborted(match error.kind() {
        ErrorKind::BrokenPipe => "nobody reads the results any more".to_owned(),
        _ => format!("the results cannot be written: {error}"),
    })
}

/// A number of bytes with its unit: 4 B, 64 KiB, 1.5 MiB.
pub(super) fn size(bytes: f64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];
    let (unit, shift) =
        units.into_iter().find(|(_, shift)| bytes >= f64::from(1 << shift)).unwrap_or(units[3]);
    let number = bytes / f64::from(1 << shift);
    if number.fract() == 0.0 { format!("{number} {unit}") } else { format!("{number:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        let sizes = [0.0, 4.0, 1023.0, 65536.0, 1572864.0, 4294967296.0].map(size);
        assert_eq!(sizes, ["0 B", "4 B", "1023 B", "64 KiB", "1.5 MiB", "4 GiB"]);
    }
}
