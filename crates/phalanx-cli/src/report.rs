//! The root cause, in a box at the end of the output.

use std::io::{self, IsTerminal};

use phalanx::launch::{Exit, Failure, NodeFailure, Report};

/// How many of the last lines of standard error are shown.
const LINES: usize = 10;
/// The width of the box where lines may have any length.
const USUAL: usize = 80;
/// Before the text of a row: the box's edge, and the label.
const MARGIN: usize = 10;
/// A short line of standard error says little by itself: the error may contain it by chance.
const SHORT: usize = 8;

/// The box's style.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) colour: bool,
    /// The columns of the terminal, at which lines are wrapped; none where lines may have any length.
    pub(crate) width: Option<usize>,
}

impl Look {
    /// The style of standard error.
    pub(crate) fn of_stderr(colour: bool) -> Self {
        let stderr = io::stderr();
        let size = rustix::termios::tcgetwinsize(&stderr).ok().filter(|_| stderr.is_terminal());
        let width = size.map(|size| usize::from(size.ws_col)).filter(|width| *width > 2 * MARGIN);
        Self { colour, width }
    }

    fn paint(self, code: &'static str) -> &'static str {
        if self.colour { code } else { "" }
    }
}

/// The rows of a box without a right edge.
struct Rows {
    look: Look,
    text: Vec<u8>,
}

impl Rows {
    fn new(look: Look) -> Self {
        let mut rows = Self { look, text: Vec::new() };
        rows.rule("╭─ ", "The first failure");
        rows
    }

    fn end(mut self) -> Vec<u8> {
        self.rule("╰──", "");
        self.text
    }

    fn rule(&mut self, corner: &str, title: &str) {
        let (red, bold, off) =
            (self.look.paint("\x1b[31m"), self.look.paint("\x1b[1m"), self.look.paint("\x1b[0m"));
        let used = corner.chars().count() + title.chars().count();
        let title = if title.is_empty() { String::new() } else { format!("{bold}{title}{off}{red} ") };
        let spaces = usize::from(!title.is_empty());
        let line = "─".repeat(self.look.width.unwrap_or(USUAL).saturating_sub(used + spaces));
        self.text.extend_from_slice(format!("{red}{corner}{title}{line}{off}\n").as_bytes());
    }

    fn row(&mut self, label: &str, value: &str) {
        self.bytes(label, value.as_bytes(), "");
    }

    fn bytes(&mut self, label: &str, value: &[u8], style: &'static str) {
        let lines = match self.look.width {
            None => vec![value.to_vec()],
            Some(width) => fold(&String::from_utf8_lossy(value), width - MARGIN),
        };
        let (red, style, off) =
            (self.look.paint("\x1b[31m"), self.look.paint(style), self.look.paint("\x1b[0m"));
        for (number, line) in lines.iter().enumerate() {
            let label = if number == 0 { label } else { "" };
            self.text.extend_from_slice(format!("{red}│{off} {label:<8}{style}").as_bytes());
            self.text.extend_from_slice(line);
            self.text.extend_from_slice(off.as_bytes());
            self.text.push(b'\n');
        }
    }
}

/// The worker that failed first.
pub(crate) fn failure(failure: &Failure, report: &Report, look: Look) -> Vec<u8> {
    let mut rows = Rows::new(look);
    let of = report.world_size.map_or_else(String::new, |world_size| format!(" of {world_size}"));
    rows.row("rank", &format!("{}{of}", failure.rank));
    let node = if report.nodes > 1 {
        format!(" (node {} of {})", failure.node, report.nodes)
    } else {
        String::new()
    };
    rows.row("host", &format!("{}{node}", failure.host));
    rows.row("pid", &format!("{}, after {:.1} s", failure.pid, failure.after.as_secs_f64()));
    rows.bytes("ended", failure.exit.to_string().as_bytes(), "\x1b[1m");
    let message = failure.message.as_deref().unwrap_or_default();
    for (number, line) in message.lines().enumerate() {
        rows.row(if number == 0 { "error" } else { "" }, line);
    }
    let times = |count: u32, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    if report.restarts > 0 {
        rows.row("after", &times(report.restarts, "restart"));
    }
    if report.replacements > 0 {
        rows.row("after", &times(report.replacements, "replacement"));
    }
    for (number, line) in stderr(failure, message).enumerate() {
        rows.bytes(if number == 0 { "stderr" } else { "" }, line, "");
    }
    if let Some(remedy) = remedy(failure) {
        rows.row("remedy", &remedy);
    }
    rows.end()
}

/// What to do if the system's loader, a shell or `env` has found something missing: the program itself has not begun.
fn remedy(failure: &Failure) -> Option<String> {
    let Exit::Code(code) = failure.exit else { return None };
    if failure.message.is_some() {
        return None;
    }
    let lines = failure.stderr.iter().map(|line| String::from_utf8_lossy(line));
    lines.into_iter().find_map(|line| of_the_loader(code, &line)).or_else(|| {
        let what = match code {
            126 => "cannot be executed",
            127 => "is not found",
            _ => return None,
        };
        Some(format!("{code} is a shell's code: a command that it was to start {what} on this host, or in this container's image"))
    })
}

/// glibc's loader and musl's name what they lack.
fn of_the_loader(code: i32, line: &str) -> Option<String> {
    let glibc = || line.split_once("error while loading shared libraries: ")?.1.split_once(": cannot open");
    let musl = || line.strip_prefix("Error loading shared library ")?.split_once(": ");
    if code == 127
        && let Some((library, _)) = glibc().or_else(musl)
    {
        return Some(format!(
            "install the library {library} on this host, or in this container's image, or name its folder in LD_LIBRARY_PATH; `ldd` lists \
             all that the program needs"
        ));
    }
    let (_, version) = line.split_once(": version `GLIBC_")?;
    let (version, _) = version.split_once("' not found")?;
    Some(format!(
        "the program needs glibc {version}, and this host, or this container's image, has an earlier one: build it there, or take an image \
         of the system on which it was built"
    ))
}

/// The last lines of standard error that `message` does not repeat.
fn stderr<'a>(failure: &'a Failure, message: &'a str) -> impl Iterator<Item = &'a [u8]> {
    let lines: Vec<&[u8]> =
        failure.stderr.iter().map(Vec::as_slice).filter(|line| !repeats(line, message)).collect();
    let skipped = lines.len().saturating_sub(LINES);
    lines.into_iter().skip(skipped).skip_while(|line| line.trim_ascii().is_empty())
}

/// Does `line` repeat `message`? A panic's own output begins with the thread and ends with the place.
fn repeats(line: &[u8], message: &str) -> bool {
    let text = String::from_utf8_lossy(line);
    let text = text.trim();
    let own = text.find("panicked at ").map_or(text, |begin| &text[begin..]);
    let whole = message.lines().any(|line| line.trim() == text);
    let first = message.lines().next().unwrap_or_default();
    whole || own.len() >= SHORT && message.contains(own) || first.len() >= SHORT && text.contains(first)
}

/// The node that was lost, in the same way.
pub(crate) fn node_failure(failure: &NodeFailure, look: Look) -> Vec<u8> {
    let mut rows = Rows::new(look);
    let node = failure.node.map_or_else(|| "without a rank".to_owned(), |node| node.to_string());
    for (label, value) in [("node", &node), ("host", &failure.host), ("ended", &failure.why)] {
        rows.row(label, value);
    }
    rows.end()
}

/// `text` in lines of at most `width` characters, broken between words where possible. Characters that move a
/// terminal's cursor become spaces.
fn fold(text: &str, width: usize) -> Vec<Vec<u8>> {
    let plain = plain(text);
    let (mut lines, mut rest) = (Vec::new(), plain.trim_end());
    while let Some((limit, next)) = rest.char_indices().nth(width) {
        // A word that ends exactly at the end of the line fits.
        let end = rest[..limit + next.len_utf8()]
            .rfind(' ')
            .filter(|at| !rest[..*at].trim().is_empty())
            .unwrap_or(limit);
        lines.push(rest[..end].trim_end().as_bytes().to_vec());
        rest = rest[end..].trim_start();
    }
    lines.push(rest.as_bytes().to_vec());
    lines
}

/// Without colours and other escape sequences.
fn plain(text: &str) -> String {
    let (mut plain, mut letters) = (String::with_capacity(text.len()), text.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\x1b' => {
                if letters.next() == Some('[') {
                    letters.by_ref().find(|letter| ('@'..='~').contains(letter));
                }
            }
            _ if letter.is_control() => plain.push(' '),
            _ => plain.push(letter),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(text: &str, width: usize) -> Vec<String> {
        fold(text, width).into_iter().map(|line| String::from_utf8(line).unwrap()).collect()
    }

    #[test]
    fn long_lines_are_folded_between_words_or_where_they_must() {
        assert_eq!(folded("rank 1 died: it is gone", 12), ["rank 1 died:", "it is gone"]);
        assert_eq!(folded("abcdefghij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(folded("äöüß und so", 5), ["äöüß", "und", "so"]);
        assert_eq!(folded("", 5), [""]);
        assert_eq!(folded("\x1b[31mred\x1b[0m\tand\x07", 80), ["red and"]);
        assert_eq!(folded("ends here", 9), ["ends here"]);
    }

    #[test]
    fn what_the_error_says_is_not_said_again() {
        let message = "panicked at src/main.rs:3:4: assertion failed\n  left: 1\n right: 2";
        for line in ["thread 'main' (77) panicked at src/main.rs:3:4:", "assertion failed", "  left: 1"] {
            assert!(repeats(line.as_bytes(), message), "{line}");
        }
        for line in ["", "fail", "thread 'loader' panicked at src/data.rs:9:1:", "note: run with"] {
            assert!(!repeats(line.as_bytes(), message), "{line}");
        }
        assert!(repeats(b"rank 1: no data left", "no data left"));
        assert!(!repeats(b"anything", ""));
    }

    #[test]
    fn what_a_loader_lacks_is_named() {
        let library = |line: &str| {
            of_the_loader(127, line).is_some_and(|text| text.contains("the library libgomp.so.1 on"))
        };
        assert!(library(
            "train: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file or directory"
        ));
        assert!(library(
            "Error loading shared library libgomp.so.1: No such file or directory (needed by train)"
        ));
        let old =
            "train: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.39' not found (required by train)";
        assert!(of_the_loader(1, old).is_some_and(|text| text.contains("needs glibc 2.39,")));
        assert_eq!(of_the_loader(1, "error while loading the data: cannot open x"), None);
    }

    #[test]
    fn no_line_of_the_box_is_wider_than_the_terminal() {
        for width in [50, 80] {
            let mut rows = Rows::new(Look { colour: false, width: Some(width) });
            rows.row("error", &"one word after another ".repeat(9));
            let text = String::from_utf8(rows.end()).unwrap();
            assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
            assert!(text.lines().count() > 4, "{text}");
        }
    }
}
