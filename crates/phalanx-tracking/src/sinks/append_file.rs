//! A file to which whole records are added, whatever happens.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use phalanx_sys::folder;
use phalanx_sys::open::unless_pipe;

use crate::named::Named;

/// In such pieces the end of a file is searched for the last line's.
const PIECE: u64 = 1 << 16;

pub(super) struct AppendFile {
    path: PathBuf,
    file: File,
    named: Named,
    buffer: Vec<u8>,
}

impl AppendFile {
    /// Opens the file, which is made if it is not there.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let file = open_to_append(&path)?;
        let named = Named::of(&path, &file);
        Ok(Self { path, file, named, buffer: Vec::new() })
    }

    /// Opens a file of lines. What stands behind the last whole one, because its writer was killed, is cut off.
    pub fn open_lines(path: PathBuf) -> io::Result<Self> {
        let mut opened = Self::open(path)?;
        let length = opened.length()?;
        let whole = end_of_lines(&mut opened.file, length)?;
        if whole < length {
            opened.file.set_len(whole)?;
        }
        Ok(opened)
    }

    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.buffer.is_empty() && self.length()? == 0)
    }

    /// Where the next record goes, until it is flushed.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Adds what is in the buffer, or nothing of it. The buffer is empty then, in any case.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let before = self.length();
        let outcome = self.file.write_all(&self.buffer);
        self.buffer.clear();
        // Else large pictures would keep their memory for good.
        self.buffer.shrink_to(1 << 20);
        if let (Err(_), Ok(before)) = (&outcome, before) {
            // Part of it may have found room. A device has no length, and nothing to cut.
            let _ = self.file.set_len(before);
        }
        outcome
    }

    /// An error if another file has its name by now.
    pub fn check_name(&self) -> io::Result<()> {
        self.named.check()
    }

    /// Moves the lines that are not to stay to the end of the file `aside`, or none of them. That file begins with `heading`.
    pub fn retain_lines(
        &mut self,
        aside: &Path,
        heading: &[u8],
        stays: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<()> {
        self.buffer.clear();
        self.check_name()?;
        let half_done = self.path.with_extension("tmp");
        let aside = Self::open_lines(aside.to_owned())?;
        let before = aside.length()?;
        let heading: &[u8] = if before == 0 { heading } else { &[] };
        match self.divide(&half_done, (&aside.file, heading), stays) {
            Ok(Some(kept)) => {
                self.named = Named::of(&self.path, &kept);
                self.file = kept;
            }
            nothing => {
                // Else each attempt would add them again, and take what a full disk has left.
                let _ = aside.file.set_len(before);
                let _ = std::fs::remove_file(&half_done);
                return nothing.map(drop);
            }
        }
        // Else what is added from here on could be lost with the new file, and the lines that have left be back.
        folder::sync(self.above())
    }

    /// Adds the lines that are not to stay to `aside`, behind `heading`, and puts the others, by way of the file
    /// `half_done`, in the place of all; the file of those. It was opened before: if it could not be opened afterwards,
    /// what is added would go to the file that it has replaced. If there are none that do not stay, nothing is replaced.
    fn divide(
        &self,
        half_done: &Path,
        (aside, heading): (&File, &[u8]),
        mut stays: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<Option<File>> {
        let file = open_to_append(half_done)?;
        file.set_len(0)?;
        let mut kept = BufWriter::new(file);
        let mut moved = BufWriter::new(aside);
        let mut lines = BufReader::new(unless_pipe(&self.path, File::options().read(true))?);
        let (mut line, mut has_moved) = (Vec::new(), false);
        while lines.read_until(b'\n', &mut line)? > 0 {
            if stays(&line) {
                kept.write_all(&line)?;
            } else {
                if !has_moved {
                    moved.write_all(heading)?;
                }
                moved.write_all(&line)?;
                has_moved = true;
            }
            line.clear();
        }
        let moved = moved.into_inner().map_err(io::IntoInnerError::into_error)?;
        let kept = kept.into_inner().map_err(io::IntoInnerError::into_error)?;
        if !has_moved {
            return Ok(None);
        }
        // A line that leaves the one file is in the other before, also after a loss of power.
        moved.sync_all()?;
        kept.sync_all()?;
        folder::sync(self.above())?;
        std::fs::rename(half_done, &self.path)?;
        Ok(Some(kept))
    }

    fn above(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

/// The file at `path`, to add to it and to read it.
fn open_to_append(path: &Path) -> io::Result<File> {
    unless_pipe(path, File::options().create(true).read(true).append(true))
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Where the last whole line ends.
fn end_of_lines(file: &mut File, length: u64) -> io::Result<u64> {
    let mut end = length;
    let mut piece = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(PIECE);
        file.seek(SeekFrom::Start(start))?;
        piece.clear();
        Read::by_ref(file).take(end - start).read_to_end(&mut piece)?;
        if let Some(place) = piece.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + place as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_at_the_end_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let long = "x".repeat(PIECE as usize + 7);
        for (left, expected) in [
            ("", ""),
            ("a\nb\n", "a\nb\n"),
            ("a\nhal", "a\n"),
            ("hal", ""),
            (&format!("a\n{long}"), "a\n"),
            (&long, ""),
        ] {
            std::fs::write(&path, left).unwrap();
            let mut file = AppendFile::open_lines(path.clone()).unwrap();
            file.buffer().extend_from_slice(b"c\n");
            file.flush().unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{expected}c\n"));
        }
    }

    #[test]
    fn lines_that_go_are_kept_aside() {
        let folder = tempfile::tempdir().unwrap();
        let [path, aside] = ["lines", "aside"].map(|name| folder.path().join(name));
        std::fs::write(&path, "1\n5\n2\n").unwrap();
        let mut file = AppendFile::open_lines(path.clone()).unwrap();
        for _ in 0..2 {
            file.retain_lines(&aside, &[], |line| line != b"5\n").unwrap();
        }
        file.buffer().extend_from_slice(b"3\n");
        file.flush().unwrap();
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        assert_eq!((read(&path), read(&aside)), ("1\n2\n3\n".to_owned(), "5\n".to_owned()));
        assert!(!folder.path().join("lines.tmp").exists());
    }

    #[test]
    fn lines_of_a_file_that_another_run_has_made_again_stay() {
        let folder = tempfile::tempdir().unwrap();
        let [path, aside] = ["lines", "aside"].map(|name| folder.path().join(name));
        std::fs::write(&path, "1\n").unwrap();
        let mut file = AppendFile::open_lines(path.clone()).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "2\n").unwrap();
        let error = file.retain_lines(&aside, &[], |_| false).unwrap_err().to_string();
        assert!(error.contains("was removed while this run was open"), "{error}");
        assert_eq!((std::fs::read_to_string(&path).unwrap(), aside.exists()), ("2\n".to_owned(), false));
    }

    #[test]
    fn an_attempt_that_fails_moves_no_line_and_half_a_line_aside_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let [path, aside, half_done] = ["lines", "aside", "lines.tmp"].map(|name| folder.path().join(name));
        std::fs::write(&path, "1\n5\n2\n").unwrap();
        std::fs::write(&aside, "4\n6").unwrap();
        let mut file = AppendFile::open_lines(path.clone()).unwrap();
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        for _ in 0..2 {
            let taken_away = |line: &[u8]| {
                let _ = std::fs::remove_file(&half_done);
                line != b"5\n"
            };
            file.retain_lines(&aside, &[], taken_away).unwrap_err();
            assert_eq!((read(&path), read(&aside)), ("1\n5\n2\n".to_owned(), "4\n".to_owned()));
        }
        file.retain_lines(&aside, &[], |line| line != b"5\n").unwrap();
        assert_eq!((read(&path), read(&aside)), ("1\n2\n".to_owned(), "4\n5\n".to_owned()));
    }
}
