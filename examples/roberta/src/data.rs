//! Labelled texts from a folder: `train.jsonl` and `held-out.jsonl`, with a line `{"text": "...", "label": 1}` for each text,
//! and `labels.json`, the names of the labels in their order. A label may be its name, too.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::{files, labels};

/// The longest line of a file, so that a damaged one is an error and not all of the memory.
const MAX_LINE: usize = 16 << 20;

/// A text and its label.
#[derive(Clone, Debug, PartialEq, Eq)]
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
        let labels: Vec<String> = serde_json::from_str(&files::read_text(&path)?)
            .with_context(|| format!("{} is no list of names", path.display()))?;
        ensure!(
            labels.len() > 1,
            "{} names {} labels: there must be two at least",
            path.display(),
            labels.len()
        );
        for (id, name) in labels.iter().enumerate() {
            ensure!(!labels[..id].contains(name), "{} names {name:?} twice", path.display());
        }
        let train = examples(&folder.join("train.jsonl"), &labels)?;
        let held_out = examples(&folder.join("held-out.jsonl"), &labels)?;
        Ok(Self { labels, train, held_out })
    }

    /// Keeps at most `train` and `held_out` examples of each.
    pub fn limited(mut self, train: Option<usize>, held_out: Option<usize>) -> Self {
        self.train.truncate(train.unwrap_or(usize::MAX));
        self.held_out.truncate(held_out.unwrap_or(usize::MAX));
        self
    }

    /// The same examples for a model whose labels have these names, in another order or other letters.
    ///
    /// # Errors
    /// If they are other labels.
    pub fn for_labels(mut self, names: Vec<String>) -> Result<Self> {
        let rows = labels::rows_of(&self.labels, &names)?;
        for example in self.train.iter_mut().chain(&mut self.held_out) {
            let label = example.label;
            example.label = *rows.get(label).with_context(|| format!("label {label} has no name"))?;
        }
        self.labels = names;
        Ok(self)
    }

    /// What is no error, and makes a result worth less than it looks: held-out texts that are learned from, labels that are not.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let first: HashMap<&str, usize> = self
            .train
            .iter()
            .enumerate()
            .rev()
            .map(|(place, example)| (example.text.as_str(), place))
            .collect();
        let known = |(place, example): (usize, &Example)| Some((place, *first.get(example.text.as_str())?));
        let known: Vec<(usize, usize)> = self.held_out.iter().enumerate().filter_map(known).collect();
        if let Some((held_out, train)) = known.first() {
            warnings.push(format!(
                "{} of {} held-out texts are training texts, too: the accuracy on them says little (held-out example {} is training \
                 example {})",
                known.len(),
                self.held_out.len(),
                held_out + 1,
                train + 1
            ));
        }
        let absent: Vec<String> = (0..self.labels.len())
            .filter(|label| self.train.iter().all(|example| example.label != *label))
            .map(|label| self.labels[label].clone())
            .collect();
        if !absent.is_empty() {
            warnings.push(format!("no training text has a label of {}", labels::list(&absent)));
        }
        warnings
    }
}

/// A line of a file.
#[derive(Deserialize)]
struct Line {
    text: String,
    label: Value,
    #[serde(default)]
    text_pair: Option<Value>,
}

fn examples(path: &Path, labels: &[String]) -> Result<Vec<Example>> {
    let (mut examples, mut line, mut reader) = (Vec::new(), Vec::new(), BufReader::new(files::open(path)?));
    let start = reader.fill_buf().with_context(|| format!("cannot read {}", path.display()))?;
    files::check_start(&start[..start.len().min(files::START)])
        .and_then(|()| files::check_encoding(start))
        .with_context(|| format!("{} cannot be used", path.display()))?;
    for number in 1_u64.. {
        let place = || format!("{}:{number}", path.display());
        line.clear();
        let length = Read::take(&mut reader, MAX_LINE as u64).read_until(b'\n', &mut line);
        if length.with_context(place)? == 0 {
            break;
        }
        ensure!(line.len() < MAX_LINE, "{}: the line is longer than {MAX_LINE} B", place());
        let blank = line.iter().all(u8::is_ascii_whitespace);
        examples.extend(if blank { None } else { Some(example(&line, labels).with_context(place)?) });
    }
    ensure!(!examples.is_empty(), "{} has no example", path.display());
    Ok(examples)
}

fn example(line: &[u8], labels: &[String]) -> Result<Example> {
    let Line { text, label, text_pair } = serde_json::from_slice(line).map_err(|error| {
        // The line that serde_json counts is always the first.
        let text = error.to_string();
        let cause = text.split(" at line ").next().unwrap_or(&text);
        let hint = if line.trim_ascii_end().contains(&b'\r') {
            ": lines end with \\n, not with \\r alone"
        } else {
            ""
        };
        anyhow!("the line is no example: column {}: {cause}{hint}", error.column())
    })?;
    ensure!(text_pair.is_none(), "text_pair: pairs of texts are not read");
    let last = labels.len() - 1;
    let label = match &label {
        Value::String(name) => labels.iter().position(|label| label == name).with_context(|| {
            format!("label {name:?} is none of those in labels.json, {}", labels::list(labels))
        })?,
        Value::Number(number) => number
            .as_u64()
            .and_then(|label| usize::try_from(label).ok())
            .filter(|label| *label <= last)
            .with_context(|| {
                let count = labels.len();
                format!(
                    "label {number} is out of range: labels.json names {count}, so labels are 0 to {last}"
                )
            })?,
        other => {
            bail!("label {other} is no label: it must be a number from 0 to {last}, or a name of labels.json")
        }
    };
    Ok(Example { text, label })
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
            (LABELS, LINES, "{\"text\": \"a\", \"label\": -1}", "held-out.jsonl:1: label -1 is out of range"),
            (
                LABELS,
                LINES,
                "{\"text\": \"a\", \"label\": 1.5}",
                "held-out.jsonl:1: label 1.5 is out of range",
            ),
            (
                LABELS,
                LINES,
                "\n{\"text\": \"a\", \"label\": \"eggs\"}",
                "held-out.jsonl:2: label \"eggs\" is none of those in labels.json, [ham, spam]",
            ),
            (LABELS, LINES, "{\"text\": \"a\", \"label\": null}", "held-out.jsonl:1: label null is no label"),
            (
                LABELS,
                LINES,
                "{\"text\": null, \"label\": 0}",
                "held-out.jsonl:1: the line is no example: column 13: invalid type: null",
            ),
            (LABELS, "hello", LINES, "train.jsonl:1: the line is no example"),
            (LABELS, "text,label\nhello,0\n", LINES, "train.jsonl:1: the line is no example"),
            (
                LABELS,
                &LINES.replace('\n', ""),
                LINES,
                "train.jsonl:1: the line is no example: column 30: trailing characters",
            ),
            (LABELS, &LINES.replace('\n', "\r"), LINES, "lines end with \\n, not with \\r alone"),
            (LABELS, &LINES[..LINES.len() - 4], LINES, "train.jsonl:2: the line is no example"),
            (
                LABELS,
                &format!("\u{FEFF}{LINES}"),
                LINES,
                "train.jsonl cannot be used: it is UTF-8 with a byte order mark",
            ),
            (
                LABELS,
                "{\"text\": \"a\", \"text_pair\": \"b\", \"label\": 0}",
                LINES,
                "train.jsonl:1: text_pair",
            ),
            (LABELS, "", LINES, "train.jsonl cannot be used: it is empty"),
            (LABELS, "\n\n", LINES, "train.jsonl has no example"),
            (
                LABELS,
                "version https://git-lfs.github.com/spec/v1\nsize 9\n",
                LINES,
                "train.jsonl cannot be used: it is a Git LFS pointer",
            ),
            ("[\"one\"]", LINES, LINES, "names 1 labels"),
            ("[\"ham\", \"spam\", \"ham\"]", LINES, LINES, "labels.json names \"ham\" twice"),
            ("{}", LINES, LINES, "labels.json is no list of names"),
        ];
        for (labels, train, held_out, expected) in cases {
            let error = format!("{:#}", read(labels, train, held_out).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn blank_lines_and_names_for_labels_are_read() {
        let lines =
            "\n{\"text\": \"hello\", \"label\": \"ham\"}\r\n\r\n{\"text\": \"buy\", \"label\": \"spam\"}\n\n";
        assert_eq!(read(LABELS, lines, LINES).unwrap().train, read(LABELS, LINES, LINES).unwrap().train);
    }

    #[test]
    fn labels_follow_their_names_into_the_order_of_a_model() {
        let data = read(LABELS, LINES, LINES).unwrap();
        let names = ["SPAM", "HAM"].map(str::to_owned).to_vec();
        let data = data.for_labels(names.clone()).unwrap();
        let labels: Vec<(&str, usize)> =
            data.train.iter().map(|example| (example.text.as_str(), example.label)).collect();
        assert_eq!(
            (labels, data.held_out[0].label, &data.labels),
            (vec![("hello", 1), ("buy", 0)], 1, &names)
        );
    }

    #[test]
    fn texts_that_are_on_both_sides_and_labels_that_are_on_neither_are_warned_of() {
        let two = read(LABELS, LINES, "{\"text\": \"new\", \"label\": 0}").unwrap();
        assert_eq!(two.warnings(), Vec::<String>::new());
        let held_out = "{\"text\": \"new\", \"label\": 0}\n{\"text\": \"buy\", \"label\": 1}";
        let warnings = read(r#"["ham", "spam", "eggs"]"#, LINES, held_out).unwrap().warnings();
        assert!(
            warnings[0].contains("1 of 2 held-out texts")
                && warnings[0].contains("held-out example 2 is training example 2"),
            "{warnings:?}"
        );
        assert!(warnings[1].contains("no training text has a label of [eggs]"), "{warnings:?}");
    }

    #[test]
    fn pieces_have_all_words_and_at_most_the_length_unless_a_word_is_longer() {
        let text = "one two  three\nfour incomprehensibilities five";
        let all: Vec<String> = pieces(text, 10).collect();
        assert_eq!(all, ["one two", "three", "four", "incomprehensibilities", "five"]);
        assert_eq!(pieces(" \n", 10).count(), 0);
    }
}
