//! A user's files: an error says which file it is, what is there in place of what was expected, and what to do.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};

/// The most bytes of a JSON file that is read whole: the largest published tokenizers have 30 MB.
const MAX_TEXT: u64 = 1 << 30;
/// Bytes by which [`check_start`] tells formats apart.
pub const START: usize = 512;
/// How many names of a folder an error lists.
const MAX_LISTED: usize = 12;

/// Whether the folder has something of this name. A link that leads nowhere is something: the file behind it counts, and is not seen.
pub fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Opens a file.
///
/// # Errors
/// If it is not there or is no file. The error lists what the folder has instead.
pub fn open(path: &Path) -> Result<File> {
    let cannot = || format!("cannot read {}", path.display());
    let file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound if is_there(path) => anyhow!("it is a link that leads nowhere"),
        ErrorKind::NotFound => anyhow!("there is no such file{}", beside(path)),
        _ => error.into(),
    });
    let file = file.with_context(cannot)?;
    let metadata = file.metadata().with_context(cannot)?;
    ensure!(!metadata.is_dir(), "cannot read {}: it is a folder", path.display());
    Ok(file)
}

/// Reads a text file whole.
///
/// # Errors
/// If it cannot be read, is empty, is not UTF-8, or is something else that only has its name.
pub fn read_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    open(path)?
        .take(MAX_TEXT + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    text(bytes).with_context(|| format!("{} cannot be used", path.display()))
}

fn text(bytes: Vec<u8>) -> Result<String> {
    ensure!(bytes.len() as u64 <= MAX_TEXT, "it has more than {MAX_TEXT} bytes");
    check_start(&bytes[..bytes.len().min(START)])?;
    check_encoding(&bytes)?;
    String::from_utf8(bytes)
        .map_err(|error| anyhow!("it is not UTF-8: byte {} is wrong", error.utf8_error().valid_up_to()))
}

/// Refuses a text that begins with a byte order mark.
pub fn check_encoding(start: &[u8]) -> Result<()> {
    let mark = match start {
        [0xEF, 0xBB, 0xBF, ..] => "UTF-8 with a byte order mark",
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] => "UTF-16",
        _ => return Ok(()),
    };
    bail!("it is {mark}: save it as UTF-8 without a byte order mark")
}

/// Refuses a file that is empty, or begins as a file of another kind does. `start` has its first [`START`] bytes, or all.
pub fn check_start(start: &[u8]) -> Result<()> {
    ensure!(!start.is_empty(), "it is empty: a download or copy was cut off");
    if start.starts_with(b"version https://git-lfs.github.com/spec/") {
        let text = String::from_utf8_lossy(start);
        let size = text.lines().find_map(|line| line.strip_prefix("size ")).unwrap_or("an unknown number of");
        bail!(
            "it is a Git LFS pointer in place of a file of {size} bytes: run `git lfs install` and `git lfs pull` in the \
             repository that was cloned"
        );
    }
    let text = start.trim_ascii_start();
    let begins = |tag: &[u8]| text.get(..tag.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(tag));
    if [&b"<!doctype"[..], b"<html", b"<?xml"].into_iter().any(begins) {
        bail!("it is a web page, not the file: was a login or an error page saved? Download it again");
    }
    let kinds: [(&[u8], &str); 6] = [
        (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
        (b"\x80\x02", "a pickle, as older versions of torch.save write it"),
        (b"\x89HDF", "an HDF5 file of Keras"),
        (b"GGUF", "a GGUF file"),
        (b"\x1F\x8B", "compressed with gzip"),
        (b"PAR1", "a Parquet file"),
    ];
    match kinds.into_iter().find(|(magic, _)| start.starts_with(magic)) {
        Some((_, kind)) => bail!("it is {kind}"),
        None => Ok(()),
    }
}

/// What the folder of a missing file has, for an error.
fn beside(path: &Path) -> String {
    let Some(folder) = path.parent() else { return String::new() };
    if folder.as_os_str().is_empty() {
        return String::new();
    }
    let Ok(entries) = fs::read_dir(folder) else {
        return format!(", and no folder {}", folder.display());
    };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    match (names.is_empty(), more) {
        (true, _) => "; the folder is empty".to_owned(),
        (false, 0) => format!("; the folder has {}", names.join(", ")),
        (false, more) => format!("; the folder has {} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_has_the_name_of_a_file_is_called_by_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let said = || format!("{:#}", read_text(&path).unwrap_err());
        assert!(said().contains("config.json: there is no such file; the folder is empty"), "{}", said());
        fs::write(folder.path().join("vocab.txt"), "a").unwrap();
        assert!(said().ends_with("there is no such file; the folder has vocab.txt"), "{}", said());
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 498818054\n";
        let cases: [(&[u8], &str); 8] = [
            (b"", "it is empty"),
            (
                pointer.as_bytes(),
                "a Git LFS pointer in place of a file of 498818054 bytes: run `git lfs install`",
            ),
            (b"\n<!DOCTYPE html><html>", "it is a web page"),
            (b"PK\x03\x04..", "a zip archive"),
            (b"\x80\x02}q", "a pickle"),
            (b"\xEF\xBB\xBF{}", "UTF-8 with a byte order mark: save it as UTF-8 without"),
            (b"\xFF\xFE{\0", "it is UTF-16"),
            (b"{\"a\": \"\xE9\"}", "it is not UTF-8: byte 7 is wrong"),
        ];
        for (content, expected) in cases {
            fs::write(&path, content).unwrap();
            assert!(
                said().contains("config.json cannot be used: ") && said().contains(expected),
                "{}",
                said()
            );
        }
        let error = format!("{:#}", read_text(folder.path()).unwrap_err());
        assert!(error.ends_with("it is a folder"), "{error}");
        let error = format!("{:#}", read_text(Path::new("/nowhere/at/all.json")).unwrap_err());
        assert!(error.ends_with("there is no such file, and no folder /nowhere/at"), "{error}");
    }
}
