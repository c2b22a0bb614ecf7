//! Workers' lines on this command's own streams.

use std::collections::HashMap;
use std::env;
use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::time::Duration;

use clap::ValueEnum;
use phalanx::Rank;
use phalanx::launch::{ElasticHosts, Event, Exit, Observer, Signal, Stream};

use crate::json;
use crate::output::Output;
use crate::status::Status;

/// Colours of ranks that can be read on both black and white.
const COLOURS: [&str; 6] = ["36", "33", "35", "32", "34", "31"];

/// What a first signal gets when the job is over and the launchers of other nodes do not know it yet.
const LINGERING: &str = "the job is over; this launcher waits until the launchers of other nodes have read how it has ended; another \
                         signal ends it at once";

/// Whether `stream` is a terminal on which colour is wanted.
pub(crate) fn wants_colour(stream: &impl IsTerminal) -> bool {
    let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !refused && stream.is_terminal() && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The format of this command's messages and the workers' lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Lines for users.
    Text,
    /// An object a line, for programs.
    Json,
}

/// A line of this command, before there is a [`Renderer`].
pub(crate) fn note(text: &str, format: Format) -> Vec<u8> {
    match format {
        Format::Text => format!("phalanx: {text}\n").into_bytes(),
        Format::Json => json::event(&Event::Warning { text }).map_or_else(Vec::new, |(_, line)| line),
    }
}

/// The user's prefix of each line, as in torchrun.
#[derive(Debug)]
pub(crate) struct Prefix {
    template: String,
    role: String,
}

impl Prefix {
    pub(crate) fn new(template: String, role: &str) -> Self {
        Self { template, role: role.to_owned() }
    }

    /// Replaces each known `${name}` and `$name`, and `$$` by `$`.
    fn of(&self, rank: Rank, local_rank: Option<u32>) -> String {
        let value = |name: &str| match name {
            "role_name" => Some(self.role.clone()),
            "rank" => Some(rank.to_string()),
            "local_rank" => local_rank.map(|rank| rank.to_string()),
            _ => None,
        };
        let (mut text, mut rest) = (String::new(), self.template.as_str());
        while let Some((before, after)) = rest.split_once('$') {
            text.push_str(before);
            let end = |name: &str| {
                name.find(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'))
                    .unwrap_or(name.len())
            };
            let (name, behind) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
                Some(braced) => braced,
                None => after.split_at(end(after)),
            };
            rest = match (after.strip_prefix('$'), value(name)) {
                (Some(behind), _) => {
                    text.push('$');
                    behind
                }
                (None, Some(value)) => {
                    text.push_str(&value);
                    behind
                }
                (None, None) => {
                    text.push('$');
                    after
                }
            };
        }
        text + rest
    }
}

/// Who gets a signal that ends all of a job.
const STILL_RUNNING: &str = "the job's processes that still run";

/// Shows the events of the workers.
#[derive(Debug)]
pub(crate) struct Renderer {
    output: Output,
    format: Format,
    /// The user's prefix.
    prefix: Option<Prefix>,
    /// The local rank of each worker that was started, by rank.
    local_ranks: HashMap<Rank, u32>,
    colour_out: bool,
    colour_err: bool,
    /// The prefix is as wide as the widest rank's, so that the lines of all ranks begin in one column.
    prefix_width: usize,
    status: Status,
    /// This node's rank among the nodes.
    node: u32,
    /// Has a worker failed, or been asked to end? Later ends are expected, and not shown.
    ending: bool,
}

impl Renderer {
    pub(crate) fn start(format: Format, prefix: Option<Prefix>) -> io::Result<Self> {
        Ok(Self {
            output: Output::start(format)?,
            format,
            prefix,
            local_ranks: HashMap::new(),
            colour_out: wants_colour(&io::stdout()),
            colour_err: wants_colour(&io::stderr()),
            prefix_width: 0,
            status: Status::default(),
            node: 0,
            ending: false,
        })
    }

    /// Whether the reader of standard output has closed it.
    pub(crate) fn reader_is_gone(&self) -> bool {
        self.output.reader_is_gone()
    }

    /// Prints `summary` on standard error, and waits, at most `timeout`, until everything has been shown.
    pub(crate) fn finish(self, summary: Vec<u8>, timeout: Duration) {
        self.output.push(Stream::Stderr, summary);
        self.output.finish(timeout);
    }

    fn line(&self, rank: Rank, stream: Stream, text: &[u8]) {
        let colour = match stream {
            Stream::Stdout => self.colour_out,
            Stream::Stderr => self.colour_err,
        };
        let prefix = match &self.prefix {
            Some(prefix) => prefix.of(rank, self.local_ranks.get(&rank).copied()),
            None => prefix(rank, self.prefix_width),
        };
        self.output.push(stream, compose(rank, &prefix, text, colour));
    }

    /// A line of this command.
    fn note(&self, text: &str) {
        let (on, off) = if self.colour_err { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        self.output.push(Stream::Stderr, format!("{on}phalanx:{off} {text}\n").into_bytes());
    }

    fn text(&mut self, event: Event<'_>) {
        if self.status.observe(&event) {
            self.output.status(self.status.to_string());
        }
        match event {
            Event::Line { rank, stream, text } => self.line(rank, stream, text),
            Event::Logging { host, folder } => {
                let host = host.map_or_else(String::new, |host| format!("{host}:"));
                self.note(&format!("logs are kept in {host}{}", folder.display()));
            }
            Event::Starting { restarts, max_restarts, world_size, node, .. } => {
                (self.ending, self.node) = (false, node);
                self.prefix_width = (world_size.get() - 1).to_string().len();
                if restarts > 0 {
                    self.note(&format!("restart {restarts} of {max_restarts}"));
                }
            }
            Event::Started { rank, local_rank, .. } => drop(self.local_ranks.insert(rank, local_rank)),
            Event::Exited { rank, pid, exit } if !exit.is_success() && !self.ending => {
                // Of a host that is lost the others go on.
                self.ending = exit != Exit::Lost;
                self.note(&format!("rank {rank} (pid {pid}): {exit}"));
            }
            Event::Lost { failure, replaced_in, replacements, max_replacements } => {
                // The others go on.
                self.ending = false;
                let rank = failure.rank;
                let count = match max_replacements {
                    ElasticHosts::NO_LIMIT => format!("{replacements} so far"),
                    limit => format!("{replacements} of {limit}"),
                };
                match replaced_in {
                    Some(wait) if wait.is_zero() => {
                        self.note(&format!("rank {rank} is replaced ({count})"));
                    }
                    Some(wait) => self
                        .note(&format!("rank {rank} is replaced in {:.0} s ({count})", wait.as_secs_f64())),
                    None => self.note(&format!("rank {rank} is not replaced; the others go on")),
                }
            }
            // If the reader has closed the pipe, it needs no more output.
            Event::Ending { .. } if self.reader_is_gone() => self.ending = true,
            Event::Ending { signal } => {
                self.ending = true;
                let again = if signal == Signal::INT { "; Ctrl-C again kills them" } else { "" };
                // SIGTERM also goes to what workers have left that have ended well.
                let whom = if signal == Signal::TERM { STILL_RUNNING } else { "the workers" };
                self.note(&format!("sent {signal} to {whom}{again}"));
            }
            Event::Killing => self.note(&format!("sent SIGKILL to {STILL_RUNNING}")),
            Event::Gathering { nodes: 0, .. } => self.note("connecting to the other nodes"),
            Event::Gathering { nodes, min_nodes, max_nodes } if min_nodes == max_nodes => {
                self.note(&format!("{nodes} of {max_nodes} nodes are there"));
            }
            Event::Gathering { nodes, min_nodes, max_nodes } => {
                self.note(&format!("{nodes} of {min_nodes} to {max_nodes} nodes are there"));
            }
            Event::Regrouping { left: Some(failure) } => self.note(&failure.to_string()),
            Event::Regrouping { left: None } => self.note("nodes have come: all workers are started again"),
            // Its end has been shown.
            Event::Restarting { failure } if failure.node == self.node && failure.message.is_none() => {}
            Event::Restarting { failure } => self.note(&failure.to_string()),
            Event::Lingering => self.note(LINGERING),
            Event::Warning { text } => self.note(&format!("warning: {text}")),
            // Normal ends, and those that were asked for. `Event` may get more variants.
            Event::Exited { .. } | _ => {}
        }
    }
}

impl Observer for Renderer {
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
        match self.format {
            Format::Text => self.text(event),
            Format::Json => {
                if let Some((stream, line)) = json::event(&event) {
                    self.output.push(stream, line);
                }
            }
        }
        if self.reader_is_gone() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn is_ready(&mut self) -> bool {
        !self.output.is_full()
    }
}

/// The prefix of each line of `rank`, wide enough for ranks of `width` digits.
fn prefix(rank: Rank, width: usize) -> String {
    format!("{:<1$} ", format!("[{rank}]"), width + 2)
}

/// A complete line, written at once.
fn compose(rank: Rank, prefix: &str, text: &[u8], colour: bool) -> Vec<u8> {
    let mut line = Vec::with_capacity(prefix.len() + text.len() + 1);
    if colour {
        let colour = COLOURS[rank.index() % COLOURS.len()];
        line.extend_from_slice(format!("\x1b[{colour}m{prefix}\x1b[0m").as_bytes());
    } else {
        line.extend_from_slice(prefix.as_bytes());
    }
    line.extend_from_slice(text);
    // A worker's own colours end with its line.
    if colour && text.contains(&b'\x1b') {
        line.extend_from_slice(b"\x1b[0m");
    }
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn composed(rank: u32, text: &[u8], colour: bool) -> Vec<u8> {
        compose(Rank::new(rank), &format!("[{rank}] "), text, colour)
    }

    #[test]
    fn bytes_pass_through_behind_the_prefix() {
        assert_eq!(composed(3, b"\xff\x00 raw", false), b"[3] \xff\x00 raw\n");
    }

    #[test]
    fn colour_is_that_of_the_rank_and_ends_with_the_line() {
        assert_eq!(composed(1, b"plain", true), b"\x1b[33m[1] \x1b[0mplain\n");
        assert_eq!(composed(7, b"\x1b[31mred", true), b"\x1b[33m[7] \x1b[0m\x1b[31mred\x1b[0m\n");
    }

    #[test]
    fn a_prefix_of_ones_own_is_torchruns_template() {
        let prefix = |template: &str| Prefix::new(template.to_owned(), "trainer").of(Rank::new(5), Some(1));
        assert_eq!(prefix("[${role_name}${local_rank}/${rank}]: "), "[trainer1/5]: ");
        assert_eq!(prefix("$rank> $$1 ${what} $"), "5> $1 ${what} $");
        assert_eq!(prefix(""), "");
    }

    #[test]
    fn prefixes_are_of_one_width() {
        assert_eq!((&*prefix(Rank::new(2), 2), &*prefix(Rank::new(10), 2)), ("[2]  ", "[10] "));
    }
}
