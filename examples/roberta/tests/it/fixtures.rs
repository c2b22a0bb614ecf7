//! What several tests need.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_store::{ModuleSnapshot, ModuleStore, SafetensorsStore, bridge};
use roberta::inputs::Encoded;
use roberta::text::train_byte_level;
use roberta::{Config, Family, weights};
use tokenizers::Tokenizer;

/// A folder of `reference`.
pub fn reference(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference/vectors").join(path)
}

/// The tensors of a file.
pub struct Tensors(BTreeMap<String, TensorData>);

impl Tensors {
    pub fn read(path: &Path) -> Self {
        let mut store = SafetensorsStore::from_file(path);
        let tensors = store.get_all_tensors().unwrap();
        Self(tensors.iter().map(|(name, tensor)| (name.clone(), bridge::to_data(tensor).unwrap())).collect())
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.0[name].iter().collect()
    }

    pub fn integers(&self, name: &str) -> Vec<i64> {
        self.0[name].iter().collect()
    }

    pub fn tensor(&self, name: &str, device: &Device) -> Tensor<1, Int> {
        let integers = self.integers(name);
        let count = integers.len();
        Tensor::from_data(TensorData::new(integers, [count]), device)
    }

    /// The padded rows `input_ids`, without their padding.
    pub fn texts(&self) -> Vec<Encoded> {
        let (tokens, lengths) = (self.integers("input_ids"), self.integers("lengths"));
        let types = if self.0.contains_key("token_type_ids") {
            self.integers("token_type_ids")
        } else {
            vec![0; tokens.len()]
        };
        let columns = tokens.len() / lengths.len();
        let row = |row: &[i64], length: &i64| row[..*length as usize].iter().map(|&id| id as u32).collect();
        let rows = tokens.chunks(columns).zip(types.chunks(columns)).zip(&lengths);
        rows.map(|((tokens, types), length)| Encoded {
            tokens: row(tokens, length),
            types: row(types, length),
        })
        .collect()
    }
}

/// A safetensors file in parts: the header, and the bytes of all tensors.
pub struct Raw {
    pub header: BTreeMap<String, serde_json::Value>,
    pub bytes: Vec<u8>,
}

impl Raw {
    /// The weights of a folder of `reference`.
    pub fn of(name: &str) -> Self {
        Self::read(&reference(name).join("model.safetensors"))
    }

    pub fn read(path: &Path) -> Self {
        let file = fs::read(path).unwrap();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&file[8..8 + length]).unwrap();
        Self { header, bytes: file[8 + length..].to_vec() }
    }

    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.header.keys().map(String::as_str).filter(|name| *name != "__metadata__")
    }

    pub fn rename(&mut self, from: &str, to: &str) {
        let tensor = self.header.remove(from).unwrap();
        self.header.insert(to.to_owned(), tensor);
    }

    fn place(&self, name: &str) -> std::ops::Range<usize> {
        let offset = |place: usize| self.header[name]["data_offsets"][place].as_u64().unwrap() as usize;
        offset(0)..offset(1)
    }

    pub fn bytes_of(&mut self, name: &str) -> &mut [u8] {
        let place = self.place(name);
        &mut self.bytes[place]
    }

    /// Adds a tensor with the bytes of another.
    pub fn repeat(&mut self, name: &str, other: &str, change: u8) {
        let mut bytes = self.bytes_of(other).to_vec();
        bytes[0] ^= change;
        self.put(name, self.header[other].clone(), &bytes);
    }

    /// Adds a tensor, or replaces it. `info` has its type and shape.
    pub fn put(&mut self, name: &str, mut info: serde_json::Value, bytes: &[u8]) {
        self.keep(|other| other != name);
        info["data_offsets"] = serde_json::json!([self.bytes.len(), self.bytes.len() + bytes.len()]);
        self.header.insert(name.to_owned(), info);
        self.bytes.extend(bytes);
    }

    /// Keeps some of the tensors.
    pub fn keep(&mut self, keep: impl Fn(&str) -> bool) {
        let names: Vec<String> = self.tensors().filter(|name| keep(name)).map(str::to_owned).collect();
        let mut kept = Self { header: BTreeMap::new(), bytes: Vec::new() };
        for name in names {
            let bytes = &self.bytes[self.place(&name)];
            let mut info = self.header[&name].clone();
            info["data_offsets"] = serde_json::json!([kept.bytes.len(), kept.bytes.len() + bytes.len()]);
            kept.bytes.extend(bytes);
            kept.header.insert(name, info);
        }
        *self = kept;
    }

    pub fn write(&self, path: &Path) -> PathBuf {
        let header = serde_json::to_vec(&self.header).unwrap();
        let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &self.bytes];
        fs::write(path, parts.concat()).unwrap();
        path.to_owned()
    }
}

/// Gradients, with the names and shapes that transformers gives them.
pub fn named<M: Module + ModuleSnapshot>(gradients: GradientsParams, model: &M, family: Family) -> Tensors {
    struct Replace(GradientsParams);
    impl ModuleMapper for Replace {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match self.0.remove::<D>(param.id) {
                Some(gradient) => Param::initialized(param.id, gradient),
                None => panic!("a parameter of shape {:?} has no gradient", param.val().dims()),
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gradients.safetensors");
    weights::save(&model.clone().map(&mut Replace(gradients)), family, &path).unwrap();
    Tensors::read(&path)
}

/// Panics if two rows of numbers differ by more than 1e-4 of the larger of 1 and the expected number.
pub fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let tolerance = 1e-4 * expected.abs().max(1.0);
        assert!((found - expected).abs() <= tolerance, "{what}[{place}]: {found}, expected {expected}");
    }
}

/// A folder with texts of two kinds, a tokenizer that has learned them, and a small model's size. Whoever knows the words
/// `win`, `money` and the like tells them apart.
pub struct Corpus {
    pub folder: tempfile::TempDir,
    pub config: Config,
}

impl Corpus {
    pub fn new(train: usize, held_out: usize) -> Self {
        Self::with_layers(train, held_out, 1)
    }

    /// Of a model of so many layers.
    pub fn with_layers(train: usize, held_out: usize, layers: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let words =
            [["meeting", "notes", "patch", "list", "kernel"], ["win", "money", "free", "offer", "credit"]];
        let text = |number: usize| {
            let label = number % 2;
            let word = |place: usize| match place % 2 {
                0 => words[label][(number / 2 + place * 7) % 5],
                _ => ["the", "about", "and", "your", "for"][(number * 3 + place) % 5],
            };
            let text: Vec<&str> = (0..4 + number % 5).map(word).collect();
            (text.join(" "), label)
        };
        let lines = |numbers: std::ops::Range<usize>| -> String {
            numbers
                .map(text)
                .map(|(text, label)| format!("{{\"text\": \"{text}\", \"label\": {label}}}\n"))
                .collect()
        };
        let path = |name: &str| folder.path().join(name);
        fs::write(path("labels.json"), r#"["ham", "spam"]"#).unwrap();
        fs::write(path("train.jsonl"), lines(0..train)).unwrap();
        fs::write(path("held-out.jsonl"), lines(train..train + held_out)).unwrap();
        let texts: Vec<String> = (0..train).map(|number| text(number).0).collect();
        train_byte_level(texts.iter().map(String::as_str), 300, &path("tokenizer.json")).unwrap();
        let json = include_str!("../../models/tiny-roberta/config.json");
        let mut json: serde_json::Value = serde_json::from_str(json).unwrap();
        // Few texts have fewer tokens.
        let tokens = Tokenizer::from_file(path("tokenizer.json")).unwrap().get_vocab_size(true);
        for (name, size) in [
            ("hidden_size", 16),
            ("intermediate_size", 32),
            ("num_hidden_layers", layers),
            ("vocab_size", tokens),
        ] {
            json[name] = size.into();
        }
        // So narrow a model needs larger weights to learn within a test.
        json["initializer_range"] = 0.2.into();
        fs::write(path("config.json"), json.to_string()).unwrap();
        Self { config: Config::read(&path("config.json")).unwrap(), folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// The lines of `metrics.jsonl`.
#[derive(Debug, PartialEq)]
pub struct Record(Vec<(String, u64, f64)>);

impl Record {
    /// The scalars of the record in a folder.
    pub fn read(folder: &Path) -> Self {
        let lines = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let scalar = |line: serde_json::Value| {
            Some((line["tag"].as_str()?.to_owned(), line["step"].as_u64()?, line["value"].as_f64()?))
        };
        Self(lines.filter_map(scalar).collect())
    }

    /// All that depends on the training alone, and not on the machine.
    pub fn of_the_training(self) -> Self {
        Self(self.0.into_iter().filter(|(tag, ..)| !tag.starts_with("system/")).collect())
    }

    pub fn values(&self, tag: &str) -> Vec<f64> {
        self.0.iter().filter(|(of, ..)| of == tag).map(|(.., value)| *value).collect()
    }

    pub fn steps(&self, tag: &str) -> Vec<u64> {
        self.0.iter().filter(|(of, ..)| of == tag).map(|(_, step, _)| *step).collect()
    }
}
