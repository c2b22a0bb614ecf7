//! Files of weights: written and read again, by older names, and damaged ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use roberta::{Classifier, Config, Family, Inputs, MaskedLm, weights};

use crate::fixtures::{Tensors, reference};

const CLASSIFIER: &str = "roberta-classifier";

fn config(name: &str) -> Config {
    Config::read(&reference(name).join("config.json")).unwrap()
}

fn classifier(name: &str) -> Classifier {
    Classifier::new(&config(name), 3, &Device::flex())
}

/// A safetensors file in parts: the header, and the bytes of all tensors.
struct Raw {
    header: BTreeMap<String, serde_json::Value>,
    bytes: Vec<u8>,
}

impl Raw {
    fn read(name: &str) -> Self {
        let file = fs::read(reference(name).join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&file[8..8 + length]).unwrap();
        Self { header, bytes: file[8 + length..].to_vec() }
    }

    fn rename(&mut self, from: &str, to: &str) {
        let tensor = self.header.remove(from).unwrap();
        self.header.insert(to.to_owned(), tensor);
    }

    /// Adds a tensor with the bytes of another.
    fn repeat(&mut self, name: &str, other: &str, change: u8) {
        let mut tensor = self.header[other].clone();
        let offset = |place: usize| tensor["data_offsets"][place].as_u64().unwrap() as usize;
        let mut bytes = self.bytes[offset(0)..offset(1)].to_vec();
        bytes[0] ^= change;
        tensor["data_offsets"] = serde_json::json!([self.bytes.len(), self.bytes.len() + bytes.len()]);
        self.header.insert(name.to_owned(), tensor);
        self.bytes.extend(bytes);
    }

    fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("changed.safetensors");
        let header = serde_json::to_vec(&self.header).unwrap();
        let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &self.bytes];
        fs::write(&path, parts.concat()).unwrap();
        path
    }
}

#[test]
fn what_is_written_is_what_was_read_byte_for_byte_and_name_for_name() {
    let folder = tempfile::tempdir().unwrap();
    for (name, masked) in [
        ("roberta-masked-lm", true),
        (CLASSIFIER, false),
        ("bert-masked-lm", true),
        ("bert-classifier", false),
    ] {
        let config = config(name);
        let (from, to) = (reference(name).join("model.safetensors"), folder.path().join(name));
        if masked {
            let mut model = MaskedLm::new(&config, &Device::flex());
            weights::load(&mut model, config.model_type, &from).unwrap();
            weights::save(&model, config.model_type, &to).unwrap();
        } else {
            let mut model = classifier(name);
            weights::load(&mut model, config.model_type, &from).unwrap();
            weights::save(&model, config.model_type, &to).unwrap();
        }
        let (read, written) = (Tensors::read(&from), Tensors::read(&to));
        assert!(read.names().eq(written.names()), "{name}");
        for tensor in read.names() {
            assert_eq!(read.floats(tensor), written.floats(tensor), "{name}: {tensor}");
        }
    }
}

#[test]
fn a_classifier_begins_with_the_encoder_of_a_masked_language_model() {
    let mut model = classifier(CLASSIFIER);
    let file = reference("roberta-masked-lm").join("model.safetensors");
    let loaded = weights::load(&mut model, Family::Roberta, &file).unwrap();
    let new = [
        "classifier.dense.bias",
        "classifier.dense.weight",
        "classifier.out_proj.bias",
        "classifier.out_proj.weight",
    ];
    let mut found = loaded.new.clone();
    found.sort();
    assert_eq!(found, new);
    assert!(
        loaded.ignored.iter().all(|name| name.starts_with("lm_head.")) && loaded.ignored.len() == 5,
        "{loaded:?}"
    );
    let mut bert = classifier("bert-classifier");
    let file = reference("bert-masked-lm").join("model.safetensors");
    let loaded = weights::load(&mut bert, Family::Bert, &file).unwrap();
    assert_eq!(loaded.new.len(), 4, "{loaded:?}");
}

#[test]
fn older_names_and_files_of_the_encoder_alone_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut raw = Raw::read("bert-classifier");
    for name in raw.header.keys().cloned().collect::<Vec<_>>() {
        let old =
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        raw.rename(&name, old.strip_prefix("bert.").unwrap_or(&old));
    }
    let config = config("bert-classifier");
    let (mut plain, mut old) = (classifier("bert-classifier"), classifier("bert-classifier"));
    weights::load(&mut plain, Family::Bert, &reference("bert-classifier").join("model.safetensors")).unwrap();
    weights::load(&mut old, Family::Bert, &raw.write(folder.path())).unwrap();
    let case = Tensors::read(&reference("bert-classifier").join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &config, &Device::flex()).unwrap();
    assert_eq!(plain.forward(&inputs).into_data(), old.forward(&inputs).into_data());
}

/// Loads a file that was changed; gives the error, and checks that the model has not been.
fn refused(change: impl FnOnce(&mut Raw)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut raw = Raw::read(CLASSIFIER);
    change(&mut raw);
    refused_file(&raw.write(folder.path()), Family::Roberta)
}

fn refused_file(path: &Path, family: Family) -> String {
    let mut model = classifier(CLASSIFIER);
    let before = model.clone();
    let error = weights::load(&mut model, family, path).unwrap_err();
    let case = Tensors::read(&reference(CLASSIFIER).join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &config(CLASSIFIER), &Device::flex()).unwrap();
    assert_eq!(
        before.forward(&inputs).into_data(),
        model.forward(&inputs).into_data(),
        "the model has changed"
    );
    format!("{error:#}")
}

#[test]
fn a_wrong_shape_names_the_tensor_and_both_shapes() {
    let name = "roberta.encoder.layer.1.intermediate.dense.weight";
    let error = refused(|raw| raw.header.get_mut(name).unwrap()["shape"] = serde_json::json!([16, 24]));
    assert!(error.contains(&format!("{name} has the shape [16, 24], this model's has [24, 16]")), "{error}");

    let mut five = Classifier::new(&config(CLASSIFIER), 5, &Device::flex());
    let file = reference(CLASSIFIER).join("model.safetensors");
    let error = format!("{:#}", weights::load(&mut five, Family::Roberta, &file).unwrap_err());
    assert!(error.contains("classifier.out_proj.") && error.contains("this model's has [5"), "{error}");
}

#[test]
fn a_missing_or_unknown_tensor_is_named() {
    let name = "roberta.encoder.layer.0.attention.self.key.bias";
    let error = refused(|raw| raw.rename(name, "roberta.pooler.dense.bias"));
    assert!(error.ends_with(&format!("{name} is missing")), "{error}");
    let error = refused(|raw| raw.rename("classifier.dense.bias", "lm_head.bias"));
    assert!(
        error.contains("classifier.dense.bias is missing, though other tensors of classifier are there"),
        "{error}"
    );
    let error = refused(|raw| raw.repeat("roberta.encoder.layer.2.output.dense.bias", name, 0));
    assert!(
        error.contains("roberta.encoder.layer.2.output.dense.bias is not a tensor of this model"),
        "{error}"
    );
    let error = refused(|raw| raw.repeat("encoder.layer.0.attention.self.key.bias", name, 0));
    assert!(error.contains(&format!("{name} is there twice")), "{error}");
    let error = refused_file(&reference("bert-classifier").join("model.safetensors"), Family::Roberta);
    assert!(
        error.contains("is not a tensor of this model: does config.json belong to this file?"),
        "{error}"
    );
}

#[test]
fn a_decoder_of_its_own_is_refused_and_a_tied_one_read() {
    let embedding = "roberta.embeddings.word_embeddings.weight";
    let error = refused(|raw| raw.repeat("lm_head.decoder.weight", embedding, 1));
    assert!(
        error.contains("lm_head.decoder.weight is not roberta.embeddings.word_embeddings.weight"),
        "{error}"
    );

    let folder = tempfile::tempdir().unwrap();
    let mut raw = Raw::read("roberta-masked-lm");
    raw.repeat("lm_head.decoder.weight", embedding, 0);
    raw.repeat("lm_head.decoder.bias", "lm_head.bias", 0);
    let mut model = MaskedLm::new(&config("roberta-masked-lm"), &Device::flex());
    let loaded = weights::load(&mut model, Family::Roberta, &raw.write(folder.path())).unwrap();
    assert_eq!(loaded.ignored, ["lm_head.decoder.bias", "lm_head.decoder.weight"]);
}

#[test]
fn a_truncated_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let file = fs::read(reference(CLASSIFIER).join("model.safetensors")).unwrap();
    for length in [0, 7, 100, file.len() / 2, file.len() - 1] {
        fs::write(&path, &file[..length]).unwrap();
        let error = refused_file(&path, Family::Roberta);
        assert!(error.contains("model.safetensors cannot be loaded: "), "{error}");
    }
    fs::remove_file(&path).unwrap();
    assert!(refused_file(&path, Family::Roberta).contains("model.safetensors cannot be loaded"));
}
