//! Labelled texts from a folder: `train.jsonl` and `held-out.jsonl`, with a line `{"text": "...", "label": 1}` for each text,
//! and `labels.json`, the names of the labels in their order.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The longest line of a file, so that a damaged one is an error and not all of the memory.
const MAX_LINE: usize = 16 << 20;

/// A text and its label.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Example {
    /// The text.
    pub text: String,
    /// Its label, a place in the list of names.
    pub label: usize,
}

/// What to learn from, and what to measure on.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// The names of the labels.
    pub labels: Vec<String>,
    /// What is learned from.
    pub train: Vec<Example>,
    /// What is never learned from.
    pub held_out: Vec<Example>,
}

impl Dataset {
    /// Reads a folder.
    ///
    /// # Errors
    /// If a file cannot be read or has no example, a line is no example, or a label has no name; with file and line.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("labels.json");
        let names = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let labels: Vec<String> = serde_json::from_slice(&names)
            .with_context(|| format!("{} is no list of names", path.display()))?;
        ensure!(
            labels.len() > 1,
            "{} names {} labels: there must be two at least",
            path.display(),
            labels.len()
        );
        let train = examples(&folder.join("train.jsonl"), labels.len())?;
        let held_out = examples(&folder.join("held-out.jsonl"), labels.len())?;
        Ok(Self { labels, train, held_out })
    }

    /// Keeps at most `train` and `held_out` examples of each.
    pub fn limited(mut self, train: Option<usize>, held_out: Option<usize>) -> Self {
        self.train.truncate(train.unwrap_or(usize::MAX));
        self.held_out.truncate(held_out.unwrap_or(usize::MAX));
        self
    }
}

fn examples(path: &Path, labels: usize) -> Result<Vec<Example>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let (mut examples, mut line, mut reader) = (Vec::new(), Vec::new(), BufReader::new(file));
    for number in 1.. {
        let place = || format!("{}:{number}", path.display());
        line.clear();
        let length = std::io::Read::take(&mut reader, MAX_LINE as u64).read_until(b'\n', &mut line);
        if length.with_context(place)? == 0 {
            break;
        }
        ensure!(line.len() < MAX_LINE, "{}: the line is longer than {MAX_LINE} B", place());
        let example: Example =
            serde_json::from_slice(&line).with_context(|| format!("{}: the line is no example", place()))?;
        ensure!(
            example.label < labels,
            "{}: label {} is out of range: labels.json names {labels}, so labels are 0 to {}",
            place(),
            example.label,
            labels - 1
        );
        examples.push(example);
    }
    ensure!(!examples.is_empty(), "{} has no example", path.display());
    Ok(examples)
}

/// Cuts `text` at spaces into pieces of about `length` characters: a long text is more than one example of a language.
pub fn pieces(text: &str, length: usize) -> impl Iterator<Item = String> {
    let (mut pieces, mut piece, mut characters) = (Vec::new(), String::new(), 0);
    for word in text.split_whitespace() {
        let added = word.chars().count() + 1;
        if characters > 0 && characters + added > length {
            pieces.push(std::mem::take(&mut piece));
            characters = 0;
        }
        if characters > 0 {
            piece.push(' ');
        }
        piece.push_str(word);
        characters += added;
    }
    pieces.extend((characters > 0).then_some(piece));
    pieces.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(labels: &str, train: &str, held_out: &str) -> Result<Dataset> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in [("labels.json", labels), ("train.jsonl", train), ("held-out.jsonl", held_out)]
        {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        Dataset::read(folder.path())
    }

    const LABELS: &str = r#"["ham", "spam"]"#;
    const LINES: &str = "{\"text\": \"hello\", \"label\": 0}\n{\"text\": \"buy\", \"label\": 1}";

    #[test]
    fn examples_are_lines_and_errors_name_them() {
        let data = read(LABELS, LINES, LINES).unwrap();
        assert_eq!((data.train.len(), data.held_out[1].label, data.labels[1].as_str()), (2, 1, "spam"));
        assert_eq!(data.limited(Some(1), None).train.len(), 1);
        let cases = [
            (
                LABELS,
                "{\"text\": \"a\", \"label\": 0}\n{\"text\": \"b\", \"label\": 2}\n",
                LINES,
                "train.jsonl:2: label 2 is out of range: labels.json names 2, so labels are 0 to 1",
            ),
            (LABELS, LINES, "{\"text\": \"a\", \"label\": -1}", "held-out.jsonl:1: the line is no example"),
            (LABELS, "hello", LINES, "train.jsonl:1: the line is no example"),
            (LABELS, "", LINES, "train.jsonl has no example"),
            ("[\"one\"]", LINES, LINES, "names 1 labels"),
            ("{}", LINES, LINES, "labels.json is no list of names"),
        ];
        for (labels, train, held_out, expected) in cases {
            let error = format!("{:#}", read(labels, train, held_out).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn pieces_have_all_words_and_at_most_the_length_unless_a_word_is_longer() {
        let text = "one two  three\nfour incomprehensibilities five";
        let all: Vec<String> = pieces(text, 10).collect();
        assert_eq!(all, ["one two", "three", "four", "incomprehensibilities", "five"]);
        assert_eq!(pieces(" \n", 10).count(), 0);
    }
}
