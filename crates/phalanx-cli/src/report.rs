//! The root cause, so that it stands out at the end.

use phalanx::launch::{Failure, NodeFailure, Report};

/// How many of the last lines of standard error are shown.
const LINES: usize = 10;
const RULE: &str = "────────────────────────────────────────────────────────────";

/// The worker that failed first, in a box that is open to the right: lines may have any length.
pub(crate) fn failure(failure: &Failure, report: &Report, colour: bool) -> Vec<u8> {
    let (red, bold, off) = if colour { ("\x1b[31m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
    let mut text = Vec::new();
    let mut row = |label: &str, value: &[u8]| {
        text.extend_from_slice(format!("{red}│{off} {label:<8}").as_bytes());
        text.extend_from_slice(value);
        text.extend_from_slice(off.as_bytes());
        text.push(b'\n');
    };
    let of = report.world_size.map_or_else(String::new, |world_size| format!(" of {world_size}"));
    row("rank", format!("{}{of}", failure.rank).as_bytes());
    let node = if report.nodes > 1 {
        format!(" (node {} of {})", failure.node, report.nodes)
    } else {
        String::new()
    };
    row("host", format!("{}{node}", failure.host).as_bytes());
    row("pid", format!("{}, after {:.1} s", failure.pid, failure.after.as_secs_f64()).as_bytes());
    row("ended", format!("{bold}{}", failure.exit).as_bytes());
    for (number, line) in failure.message.iter().flat_map(|message| message.lines()).enumerate() {
        row(if number == 0 { "error" } else { "" }, line.as_bytes());
    }
    if report.restarts > 0 {
        let s = if report.restarts == 1 { "" } else { "s" };
        row("after", format!("{} restart{s}", report.restarts).as_bytes());
    }
    if report.replacements > 0 {
        let s = if report.replacements == 1 { "" } else { "s" };
        row("after", format!("{} replacement{s}", report.replacements).as_bytes());
    }
    let skipped = failure.stderr.len().saturating_sub(LINES);
    for (number, line) in failure.stderr.iter().skip(skipped).enumerate() {
        row(if number == 0 { "stderr" } else { "" }, line);
    }
    boxed(&text, colour)
}

/// The node that was lost, in the same way.
pub(crate) fn node_failure(failure: &NodeFailure, colour: bool) -> Vec<u8> {
    let (red, off) = if colour { ("\x1b[31m", "\x1b[0m") } else { ("", "") };
    let node = failure.node.map_or_else(|| "without a place".to_owned(), |node| node.to_string());
    let mut text = Vec::new();
    for (label, value) in [("node", &node), ("host", &failure.host), ("ended", &failure.why)] {
        text.extend_from_slice(format!("{red}│{off} {label:<8}{value}\n").as_bytes());
    }
    boxed(&text, colour)
}

fn boxed(rows: &[u8], colour: bool) -> Vec<u8> {
    let (red, bold, off) = if colour { ("\x1b[31m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
    let mut text = format!("{red}╭─ {bold}The first failure{off}{red} {RULE}{off}\n").into_bytes();
    text.extend_from_slice(rows);
    text.extend_from_slice(format!("{red}╰────────────────────{RULE}{off}\n").as_bytes());
    text
}
