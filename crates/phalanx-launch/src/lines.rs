//! Splits bytes into lines: pure.

use std::time::{Duration, Instant};

/// How often a line that is rewritten with carriage returns (a progress bar) is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Ends a piece of a line that is longer than the limit.
const CONTINUES: &[u8] = b" [the line goes on]";

/// Splits one stream into lines, in bounded memory.
#[derive(Debug)]
pub(super) struct Lines {
    limit: usize,
    line: Vec<u8>,
    /// Whether the last byte was a carriage return. If so, a line feed may follow, or the line is rewritten.
    returned: bool,
    progress_at: Option<Instant>,
}

impl Lines {
    /// Lines longer than `limit` bytes come in pieces of that length, or of up to three bytes less so that no character is cut, and a mark
    /// behind each piece but the last.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, line: Vec::new(), returned: false, progress_at: None }
    }

    /// Takes bytes, and reports each complete line without its end.
    pub(super) fn push(&mut self, mut bytes: &[u8], now: Instant, mut emit: impl FnMut(&[u8])) {
        while let Some(&first) = bytes.first() {
            if self.returned && first != b'\r' {
                self.returned = false;
                if first != b'\n' {
                    self.rewrite(now, &mut emit);
                }
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')).unwrap_or(bytes.len());
            self.extend(&bytes[..end], &mut emit);
            match bytes.get(end) {
                Some(b'\n') => {
                    emit(&self.line);
                    self.line.clear();
                }
                Some(_) => self.returned = true,
                None => {}
            }
            bytes = bytes.get(end + 1..).unwrap_or_default();
        }
    }

    /// The stream has ended: reports the rest as a line.
    pub(super) fn finish(&mut self, mut emit: impl FnMut(&[u8])) {
        self.returned = false;
        if !self.line.is_empty() {
            emit(&self.line);
            self.line.clear();
        }
    }

    /// The line is about to be rewritten; its state so far is reported if the last report is old enough.
    fn rewrite(&mut self, now: Instant, emit: &mut impl FnMut(&[u8])) {
        let due = self.progress_at.is_none_or(|at| now.saturating_duration_since(at) >= PROGRESS_INTERVAL);
        if due && !self.line.is_empty() {
            self.progress_at = Some(now);
            emit(&self.line);
        }
        self.line.clear();
    }

    fn extend(&mut self, mut bytes: &[u8], emit: &mut impl FnMut(&[u8])) {
        while self.line.len() + bytes.len() > self.limit {
            let (fits, rest) = bytes.split_at(self.limit - self.line.len());
            self.line.extend_from_slice(fits);
            let carried = self.line.split_off(character_end(&self.line, rest));
            self.line.extend_from_slice(CONTINUES);
            emit(&self.line);
            self.line = carried;
            bytes = rest;
        }
        self.line.extend_from_slice(bytes);
    }
}

/// How much of `piece`, which `rest` follows, ends with a whole character of UTF-8: all of it, unless `rest` begins within one. What is not
/// UTF-8 is cut anywhere.
pub(super) fn character_end(piece: &[u8], rest: &[u8]) -> usize {
    let is_within = |byte: &u8| byte & 0b1100_0000 == 0b1000_0000;
    let whole = piece.len();
    if !rest.first().is_some_and(is_within) {
        return whole;
    }
    let first = piece.iter().rev().take(3).position(|byte| !is_within(byte)).map(|back| whole - 1 - back);
    first.filter(|first| piece[*first] >= 0b1100_0000).unwrap_or(whole)
}

/// For `phalanx::fuzzing`: a worker's output, in pieces whose length is the first byte.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    const LIMIT: usize = 16;
    let Some((piece, bytes)) = bytes.split_first() else { return false };
    let (mut lines, mut shown) = (Lines::new(LIMIT), 0);
    let mut emit = |line: &[u8]| {
        let line = line.strip_suffix(CONTINUES).unwrap_or(line);
        assert!(line.len() <= LIMIT && !line.contains(&b'\n') && !line.contains(&b'\r'));
        shown += line.len();
    };
    bytes.chunks(usize::from(*piece).max(1)).for_each(|piece| lines.push(piece, Instant::now(), &mut emit));
    lines.finish(&mut emit);
    assert!(shown <= bytes.len());
    shown > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of `chunks`, the i-th of which comes at second i.
    fn lines(limit: usize, chunks: &[&str]) -> Vec<String> {
        let start = Instant::now();
        let mut lines = Lines::new(limit);
        let mut seen = Vec::new();
        let mut note = |line: &[u8]| seen.push(String::from_utf8_lossy(line).into_owned());
        for (second, chunk) in chunks.iter().enumerate() {
            lines.push(chunk.as_bytes(), start + Duration::from_secs(second as u64), &mut note);
        }
        lines.finish(&mut note);
        seen
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        assert_eq!(lines(99, &["one\ntw", "o\n", "\nthree"]), ["one", "two", "", "three"]);
        assert_eq!(lines(99, &["dos\r", "\nend\r\n"]), ["dos", "end"]);
    }

    #[test]
    fn long_lines_come_in_bounded_pieces() {
        let pieces = ["abcd [the line goes on]", "efgh [the line goes on]", "ij", "kl"];
        assert_eq!(lines(4, &["abcdefghij\nkl"]), pieces);
        assert_eq!(lines(4, &["abcd\n"]), ["abcd"]);
    }

    #[test]
    fn no_character_is_cut_where_a_line_is() {
        assert_eq!(lines(4, &["aéüx\n"]), ["aé [the line goes on]", "üx"]);
        assert_eq!(lines(4, &["ab", "c", "😀😀"]), ["abc [the line goes on]", "😀 [the line goes on]", "😀"]);
        // Of bytes that are no text, as many as there is room for.
        assert_eq!(character_end(&[b'a', 0x80, 0x80, 0x80], &[0x80]), 4);
        assert_eq!(character_end(b"abc", &[0x80]), 3);
        assert_eq!((character_end("é".as_bytes(), b"x"), character_end("é".as_bytes(), b"")), (2, 2));
    }

    #[test]
    fn of_a_progress_bar_one_state_a_second_and_the_last_is_shown() {
        assert_eq!(lines(99, &["\r1%\r2%\r3%\r4", "%\r5%\r6%\n", "done\n"]), ["1%", "4%", "6%", "done"]);
        assert_eq!(lines(99, &["10%\r", "\r\n"]), ["10%"]);
        assert_eq!(lines(99, &["\r\r\r"]), Vec::<String>::new());
    }
}
