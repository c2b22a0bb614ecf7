//! The result of one size: a row of the table, and a line of JSON.

use std::fmt;

use serde::Serialize;

use crate::collectives::Collective;
use crate::report::size;

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// The name of its curve in a plot.
    pub(crate) name: String,
    pub(crate) collective: Collective,
    /// The algorithm, if `--tune` has forced one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) algorithm: Option<String>,
    pub(crate) ranks: u32,
    pub(crate) dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) op: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) root: Option<u32>,
    pub(crate) bytes: usize,
    /// Elements.
    pub(crate) count: usize,
    pub(crate) time_us: f64,
    pub(crate) min_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) algbw_gbs: f64,
    pub(crate) busbw_gbs: f64,
    /// Elements with wrong results, over all ranks; none if nothing was checked.
    pub(crate) wrong: Option<u64>,
}

/// Names and units of the table's columns.
pub(crate) const HEADING: [&str; 2] = [
    "      size        count        time         min         p99    algbw    busbw  wrong",
    "               elements          µs          µs          µs     GB/s     GB/s",
];

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { bytes, count, time_us, min_us, p99_us, algbw_gbs, busbw_gbs, wrong, .. } = self;
        let (size, algorithm) = (size(*bytes as f64), self.algorithm.as_deref().unwrap_or_default());
        let wrong = wrong.map_or_else(|| "-".to_owned(), |wrong| wrong.to_string());
        write!(
            f,
            "{size:>10} {count:>12} {time_us:>11.2} {min_us:>11.2} {p99_us:>11.2} {algbw_gbs:>8.3} {busbw_gbs:>8.3} \
             {wrong:>6}  {algorithm}"
        )
    }
}
