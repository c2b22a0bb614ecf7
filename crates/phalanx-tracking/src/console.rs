//! The terminal of the job, which a progress bar and logs share.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, TermLike};
use parking_lot::Mutex;

/// How often a progress line is written where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(30);

/// Where a progress bar and logs are shown: they would tear each other's lines if each wrote for itself.
///
/// Give the same one to [`RunOptions::progress`](crate::RunOptions::progress) and [`logs::install`](crate::logs::install), and
/// write lines of one's own with [`println`](Self::println). Clones are the same terminal.
#[derive(Clone)]
pub struct Console {
    kind: Kind,
    lines_every: Duration,
}

#[derive(Clone)]
enum Kind {
    /// What can move its cursor: the bar stays in the last line.
    Terminal(MultiProgress),
    /// A pipe, a file: whole lines alone.
    Lines(Arc<Mutex<Box<dyn Write + Send>>>),
}

impl Console {
    /// Standard error: a terminal, or what gets whole lines alone.
    pub fn stderr() -> Self {
        match io::stderr().is_terminal() {
            true => Self::of(Kind::Terminal(MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))),
            false => Self::lines(io::stderr()),
        }
    }

    /// Something else that gets whole lines.
    pub fn lines(writer: impl Write + Send + 'static) -> Self {
        Self::of(Kind::Lines(Arc::new(Mutex::new(Box::new(writer)))))
    }

    /// Something else that can move its cursor.
    pub fn terminal(terminal: Box<dyn TermLike>) -> Self {
        let target = ProgressDrawTarget::term_like(terminal);
        Self::of(Kind::Terminal(MultiProgress::with_draw_target(target)))
    }

    fn of(kind: Kind) -> Self {
        Self { kind, lines_every: LINE_INTERVAL }
    }

    /// The same console, which gets a progress line this often if it is no terminal: each 30 s unless set.
    #[must_use]
    pub fn lines_every(self, interval: Duration) -> Self {
        Self { lines_every: interval, ..self }
    }

    /// Writes a line, above the progress bar if there is one. What cannot be written is lost.
    pub fn println(&self, line: &str) {
        match &self.kind {
            Kind::Terminal(bars) => {
                // Where no bar is drawn, it prints nothing.
                let _ = bars.println(line);
            }
            Kind::Lines(_) => {
                let _ = self.write_lines(format!("{line}\n").as_bytes());
            }
        }
    }

    /// Writes whole lines, above the progress bar if there is one.
    pub(crate) fn write_lines(&self, lines: &[u8]) -> io::Result<()> {
        match &self.kind {
            Kind::Terminal(bars) => {
                let lines = String::from_utf8_lossy(lines);
                bars.println(lines.trim_end_matches('\n'))
            }
            Kind::Lines(writer) => {
                let mut writer = writer.lock();
                writer.write_all(lines)?;
                writer.flush()
            }
        }
    }

    /// A bar in the last line, where there is a terminal.
    pub(crate) fn bar(&self, length: Option<u64>) -> Option<ProgressBar> {
        match &self.kind {
            Kind::Terminal(bars) => {
                Some(bars.add(length.map_or_else(ProgressBar::no_length, ProgressBar::new)))
            }
            Kind::Lines(_) => None,
        }
    }

    pub(crate) fn interval(&self) -> Duration {
        self.lines_every
    }

    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self.kind, Kind::Terminal(_))
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_terminal() { "Console(terminal)" } else { "Console(lines)" })
    }
}
