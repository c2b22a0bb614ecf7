//! Where results go: a table on standard output, lines of JSON, or both.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use phalanx::{Error, Result};
use serde::Serialize;

/// A table, with `--json FILE` lines of JSON besides, with `--json` these alone.
pub(crate) struct Report {
    table: bool,
    json: Option<Box<dyn Write>>,
}

impl Report {
    /// Opens the file that `--json` names, if it names one.
    pub(crate) fn new(json: Option<&Path>) -> Result<Self> {
        let (table, json): (_, Option<Box<dyn Write>>) = match json {
            None => (true, None),
            Some(path) if path.as_os_str() == "-" => (false, Some(Box::new(io::stdout()))),
            Some(path) => {
                let file = File::create(path).map_err(|error| {
                    Error::invalid_argument(format!("--json {} cannot be written: {error}", path.display()))
                })?;
                (true, Some(Box::new(file)))
            }
        };
        Ok(Self { table, json })
    }

    /// A line of JSON, where JSON is wanted.
    pub(crate) fn json(&mut self, row: &impl Serialize) -> Result<()> {
        let Some(json) = &mut self.json else { return Ok(()) };
        let line = serde_json::to_string(row).map_err(|error| unwritten(error.into()))?;
        writeln!(json, "{line}").and_then(|()| json.flush()).map_err(unwritten)
    }

    /// A line of the table, where a table is wanted.
    pub(crate) fn line(&self, text: &str) -> Result<()> {
        if self.table { print(&format!("{}\n", text.trim_end())) } else { Ok(()) }
    }
}

/// Writes to standard output in one piece, so that lines of several processes do not mix.
pub(crate) fn print(text: &str) -> Result<()> {
    io::stdout().write_all(text.as_bytes()).map_err(unwritten)
}

fn unwritten(error: io::Error) -> Error {
    Error::aborted(match error.kind() {
        ErrorKind::BrokenPipe => "the reader of the results has closed the pipe".to_owned(),
        _ => format!("the results cannot be written: {error}"),
    })
}

/// A number of bytes with its unit: 4 B, 64 KiB, 1.5 MiB.
pub(crate) fn size(bytes: f64) -> String {
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
