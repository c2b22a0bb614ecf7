//! Workers' lines on this command's own streams.

use std::env;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;

use phalanx::launch::{Event, Observer, Signal, Stream};
use phalanx::{Rank, WorldSize};

/// Colours of ranks: those that can be read on both black and white.
const COLOURS: [&str; 6] = ["36", "33", "35", "32", "34", "31"];

/// Is `stream` a terminal on which colour is wanted?
pub(crate) fn wants_colour(stream: &impl IsTerminal) -> bool {
    let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !refused && stream.is_terminal() && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Shows what happens to the workers.
#[derive(Debug)]
pub(crate) struct Renderer {
    out: Sink<io::Stdout>,
    err: Sink<io::Stderr>,
    prefixes: Vec<String>,
    line: Vec<u8>,
    /// Has a worker failed, or been asked to end? What ends after that is no news.
    ending: bool,
    reader_gone: bool,
    write_failed: bool,
}

#[derive(Debug)]
struct Sink<W> {
    writer: W,
    colour: bool,
}

impl Renderer {
    pub(crate) fn new(workers: WorldSize) -> Self {
        let (out, err) = (io::stdout(), io::stderr());
        // As wide as the widest, so that the lines of all ranks begin in one column.
        let width = (workers.get() - 1).to_string().len();
        Self {
            out: Sink { colour: wants_colour(&out), writer: out },
            err: Sink { colour: wants_colour(&err), writer: err },
            prefixes: workers
                .ranks()
                .map(|rank| format!("{:<1$} ", format!("[{rank}]"), width + 2))
                .collect(),
            line: Vec::new(),
            ending: false,
            reader_gone: false,
            write_failed: false,
        }
    }

    /// Has whoever read our standard output closed it?
    pub(crate) fn reader_is_gone(&self) -> bool {
        self.reader_gone
    }

    fn line(&mut self, rank: Rank, stream: Stream, text: &[u8]) -> ControlFlow<()> {
        let colour = match stream {
            Stream::Stdout => self.out.colour,
            Stream::Stderr => self.err.colour,
        };
        let prefix = self.prefixes.get(rank.index()).map_or("", String::as_str);
        compose(&mut self.line, rank, prefix, text, colour);
        let written = match stream {
            Stream::Stdout => self.out.writer.write_all(&self.line).and_then(|()| self.out.writer.flush()),
            Stream::Stderr => self.err.writer.write_all(&self.line),
        };
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe && stream == Stream::Stdout => {
                self.reader_gone = true;
                ControlFlow::Break(())
            }
            Err(error) => {
                // A full disk must not cost the training.
                if !std::mem::replace(&mut self.write_failed, true) {
                    self.note(&format!("the workers' output cannot be written and is lost: {error}"));
                }
                ControlFlow::Continue(())
            }
        }
    }

    /// A line of our own. If even standard error is gone, there is nobody to tell.
    fn note(&mut self, text: &str) {
        let (on, off) = if self.err.colour { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        let _ = writeln!(self.err.writer, "{on}phalanx:{off} {text}");
    }
}

impl Observer for Renderer {
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
        match event {
            Event::Line { rank, stream, text } => return self.line(rank, stream, text),
            Event::Exited { rank, pid, exit } if !exit.is_success() && !self.ending => {
                self.ending = true;
                self.note(&format!("rank {rank} (pid {pid}): {exit}"));
            }
            // Whoever closed the pipe has seen enough.
            Event::Ending { .. } if self.reader_gone => {}
            Event::Ending { signal } => {
                self.ending = true;
                let again = if signal == Signal::INT { "; Ctrl-C again kills them" } else { "" };
                self.note(&format!("sent {signal} to the workers{again}"));
            }
            Event::Killing => self.note("sent SIGKILL to the workers"),
            _ => {}
        }
        ControlFlow::Continue(())
    }
}

/// One whole line, to be written at once.
fn compose(line: &mut Vec<u8>, rank: Rank, prefix: &str, text: &[u8], colour: bool) {
    line.clear();
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn composed(rank: u32, text: &[u8], colour: bool) -> Vec<u8> {
        let mut line = vec![7; 3];
        compose(&mut line, Rank::new(rank), &format!("[{rank}] "), text, colour);
        line
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
    fn prefixes_are_of_one_width() {
        let renderer = Renderer::new(WorldSize::new(11).unwrap());
        assert_eq!((&*renderer.prefixes[2], &*renderer.prefixes[10]), ("[2]  ", "[10] "));
    }
}
