//! Files of weights: written and read again, by older names, and damaged ones.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use roberta::weights::{Head, Loaded, Weights};
use roberta::{Classifier, Config, Family, Inputs, MaskedLm, weights};
use serde_json::json;

use crate::fixtures::{Raw, Tensors, assert_close, reference};

const CLASSIFIER: &str = "roberta-classifier";

fn config(name: &str) -> Config {
    Config::read(&reference(name).join("config.json")).unwrap()
}

fn classifier(name: &str) -> Classifier {
    Classifier::new(&config(name), 3, &Device::flex())
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
    let mut raw = Raw::of("bert-classifier");
    for name in raw.header.keys().cloned().collect::<Vec<_>>() {
        let old =
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        raw.rename(&name, old.strip_prefix("bert.").unwrap_or(&old));
    }
    let config = config("bert-classifier");
    let (mut plain, mut old) = (classifier("bert-classifier"), classifier("bert-classifier"));
    weights::load(&mut plain, Family::Bert, &reference("bert-classifier").join("model.safetensors")).unwrap();
    weights::load(&mut old, Family::Bert, &raw.write(&folder.path().join("changed.safetensors"))).unwrap();
    let case = Tensors::read(&reference("bert-classifier").join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &config, &Device::flex()).unwrap();
    assert_eq!(plain.forward(&inputs).into_data(), old.forward(&inputs).into_data());
}

/// Loads a file that was changed; gives the error, and checks that the model has not been.
fn refused(change: impl FnOnce(&mut Raw)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut raw = Raw::of(CLASSIFIER);
    change(&mut raw);
    refused_file(&raw.write(&folder.path().join("changed.safetensors")), Family::Roberta)
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
    let mut raw = Raw::of("roberta-masked-lm");
    raw.repeat("lm_head.decoder.weight", embedding, 0);
    raw.repeat("lm_head.decoder.bias", "lm_head.bias", 0);
    let mut model = MaskedLm::new(&config("roberta-masked-lm"), &Device::flex());
    let loaded =
        weights::load(&mut model, Family::Roberta, &raw.write(&folder.path().join("changed.safetensors")))
            .unwrap();
    assert_eq!(loaded.ignored, ["lm_head.decoder.bias", "lm_head.decoder.weight"]);
}

#[test]
fn a_file_that_is_cut_joined_or_of_another_kind_is_named_with_its_fault() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let file = fs::read(reference(CLASSIFIER).join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let refused = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        refused_file(&path, Family::Roberta)
    };
    let whole = file.len();
    for (length, needed) in [(7, 8), (100, header), (header, whole), (whole / 2, whole), (whole - 1, whole)] {
        let error = refused(&file[..length]);
        let expected = format!("it is cut off: it has {length} bytes, and its header asks for {needed}");
        assert!(
            error.contains("model.safetensors cannot be loaded: ") && error.contains(&expected),
            "{error}"
        );
    }
    let error = refused(&[&file[..], &file].concat());
    assert!(error.contains(&format!("{whole} bytes follow its last tensor")), "{error}");
    let mut damaged = file.clone();
    damaged[8] = b'x';
    let error = refused(&damaged);
    assert!(error.contains("its header is damaged, or it is no safetensors file"), "{error}");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 498818054\n";
    for (content, expected) in [
        (&b""[..], "it is empty"),
        (
            pointer.as_bytes(),
            "it is a Git LFS pointer in place of a file of 498818054 bytes: run `git lfs install` and `git lfs pull`",
        ),
        (b"PK\x03\x04 and more", "a zip archive, as torch.save writes it"),
        (b"\x93NUMPY and more", "it is no safetensors file, or its begin is damaged"),
    ] {
        let error = refused(content);
        assert!(
            error.contains("model.safetensors cannot be loaded: ") && error.contains(expected),
            "{error}"
        );
    }
    fs::remove_file(&path).unwrap();
    assert!(refused_file(&path, Family::Roberta).contains("model.safetensors: there is no such file"));
}

#[test]
fn elements_that_are_not_finite_are_named() {
    let name = "roberta.encoder.layer.1.output.dense.weight";
    for (place, value) in [(0, f32::NAN), (17, f32::INFINITY)] {
        let error = refused(|raw| raw.bytes_of(name)[4 * place..][..4].copy_from_slice(&value.to_le_bytes()));
        let expected = format!(
            "{name} has 1 of 384 elements that are not finite, the first is element {place}: {value}"
        );
        assert!(error.contains(&expected), "{error}");
    }
    // Beyond the largest f32.
    let error = refused(|raw| {
        let shape = raw.header["classifier.out_proj.bias"]["shape"].clone();
        let bytes = [1e300_f64, 0.0, 0.0].map(f64::to_le_bytes).concat();
        raw.put("classifier.out_proj.bias", json!({"dtype": "F64", "shape": shape}), &bytes);
    });
    assert!(error.contains("classifier.out_proj.bias has 1 of 3 elements that are not finite"), "{error}");
}

#[test]
fn other_types_of_floats_are_converted_and_others_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (config, path) = (config(CLASSIFIER), folder.path().join("bf16.safetensors"));
    let mut raw = Raw::of(CLASSIFIER);
    let tensors = Tensors::read(&reference(CLASSIFIER).join("model.safetensors"));
    // A bf16 is the upper half of an f32.
    let half = |value: f32| (value.to_bits() >> 16) as u16;
    for name in tensors.names() {
        let bytes: Vec<u8> =
            tensors.floats(name).into_iter().flat_map(|value| half(value).to_le_bytes()).collect();
        let shape = raw.header[name]["shape"].clone();
        raw.put(name, json!({"dtype": "BF16", "shape": shape}), &bytes);
    }
    let mut model = classifier(CLASSIFIER);
    weights::load(&mut model, Family::Roberta, &raw.write(&path)).unwrap();
    let again = folder.path().join("again.safetensors");
    weights::save(&model, config.model_type, &again).unwrap();
    let again = Tensors::read(&again);
    for name in tensors.names() {
        let expected: Vec<f32> = tensors
            .floats(name)
            .into_iter()
            .map(|value| f32::from_bits(u32::from(half(value)) << 16))
            .collect();
        assert_eq!(again.floats(name), expected, "{name}");
    }
    let name = "classifier.dense.bias";
    let error = refused(|raw| raw.put(name, json!({"dtype": "F8_E4M3", "shape": [16]}), &[0; 16]));
    assert!(error.contains(&format!("{name} has elements of type \"F8_E4M3\"")), "{error}");
    let error = refused(|raw| raw.put(name, json!({"dtype": "I32", "shape": [16]}), &[0; 64]));
    assert!(error.contains(&format!("{name} has elements of type I32, not floats")), "{error}");
}

#[test]
fn a_buffer_with_other_positions_is_refused() {
    let positions = |numbers: [i64; 20]| {
        move |raw: &mut Raw| {
            let bytes: Vec<u8> = numbers.into_iter().flat_map(i64::to_le_bytes).collect();
            raw.put("roberta.embeddings.position_ids", json!({"dtype": "I64", "shape": [1, 20]}), &bytes);
        }
    };
    let mut numbers: [i64; 20] = std::array::from_fn(|place| place as i64);
    let folder = tempfile::tempdir().unwrap();
    let mut raw = Raw::of(CLASSIFIER);
    positions(numbers)(&mut raw);
    let path = raw.write(&folder.path().join("changed.safetensors"));
    let loaded = weights::load(&mut classifier(CLASSIFIER), Family::Roberta, &path).unwrap();
    assert_eq!(loaded.ignored, ["roberta.embeddings.position_ids"]);
    numbers[3] = 4;
    let error = refused(positions(numbers));
    assert!(
        error.contains("roberta.embeddings.position_ids has other numbers than the numbers from 0 on"),
        "{error}"
    );
}

#[test]
fn all_that_is_missing_is_counted() {
    let error = refused(|raw| raw.header.retain(|name, _| !name.contains("layer.1.attention.self")));
    // The bytes are there still, so the file does not end where its header says.
    assert!(error.contains("cannot be loaded"), "{error}");
    let error = refused(|raw| {
        raw.rename("roberta.encoder.layer.1.attention.self.key.bias", "lm_head.bias");
        raw.rename("roberta.encoder.layer.1.attention.self.key.weight", "lm_head.dense.weight");
    });
    assert!(error.contains("self.key.bias is missing, and so are 1 more, such as"), "{error}");
}

#[test]
fn a_head_is_dropped_when_asked_to_and_kept_otherwise() {
    let file = reference(CLASSIFIER).join("model.safetensors");
    let weights = Weights::open(&file).unwrap();
    assert_eq!(weights.head(Family::Roberta), Some(("classifier.out_proj.weight", 3)));
    let mut five = Classifier::new(&config(CLASSIFIER), 5, &Device::flex());
    let error = format!("{:#}", weights.load(&mut five, Family::Roberta, Head::Kept).unwrap_err());
    assert!(
        error.contains("this model's has [5") && error.contains("--new-head begins with a new head"),
        "{error}"
    );

    let head = [
        "classifier.dense.bias",
        "classifier.dense.weight",
        "classifier.out_proj.bias",
        "classifier.out_proj.weight",
    ];
    let head = head.map(str::to_owned).to_vec();
    let folder = tempfile::tempdir().unwrap();
    let saved = |model: &Classifier| {
        let path = folder.path().join("saved.safetensors");
        weights::save(model, Family::Roberta, &path).unwrap();
        Tensors::read(&path)
    };
    let before = saved(&five);
    let loaded = weights.load(&mut five, Family::Roberta, Head::New).unwrap();
    assert_eq!(loaded, Loaded { new: head.clone(), ignored: head.clone() });
    let (after, of_file) = (saved(&five), Tensors::read(&file));
    for name in after.names() {
        let expected = if head.iter().any(|head| head == name) { &before } else { &of_file };
        assert_eq!(after.floats(name), expected.floats(name), "{name}");
    }
    // BERT's pooler is no part of it.
    let weights = Weights::open(&reference("bert-classifier").join("model.safetensors")).unwrap();
    let mut five = Classifier::new(&config("bert-classifier"), 5, &Device::flex());
    let loaded = weights.load(&mut five, Family::Bert, Head::New).unwrap();
    assert_eq!(loaded.new, ["classifier.bias", "classifier.weight"]);
}

/// The classifier of transformers' vectors in two files and an index.
fn shards(folder: &Path) -> (Raw, Raw, serde_json::Value) {
    let [mut first, mut second] = [Raw::of(CLASSIFIER), Raw::of(CLASSIFIER)];
    first.keep(|name| name < "roberta.encoder.layer.1");
    second.keep(|name| name >= "roberta.encoder.layer.1");
    let mut map = serde_json::Map::new();
    for (number, raw) in [(1, &first), (2, &second)] {
        let file = format!("model-0000{number}-of-00002.safetensors");
        raw.write(&folder.join(&file));
        assert!(raw.header.len() > 4);
        map.extend(raw.tensors().map(|name| (name.to_owned(), json!(file))));
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    write_index(folder, &index);
    (first, second, index)
}

fn write_index(folder: &Path, index: &serde_json::Value) {
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn a_model_in_several_files_is_that_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    shards(folder.path());
    let mut model = classifier(CLASSIFIER);
    let loaded = Weights::find(folder.path()).unwrap().load(&mut model, Family::Roberta, Head::Kept).unwrap();
    assert_eq!(loaded, Loaded::default());
    let case = Tensors::read(&reference(CLASSIFIER).join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &config(CLASSIFIER), &Device::flex()).unwrap();
    let logits = model.forward(&inputs).into_data().iter().collect::<Vec<f32>>();
    assert_close("logits", &logits, &case.floats("logits"));
    // One file counts before several. These may be of another model.
    std::os::unix::fs::symlink("nowhere", folder.path().join("model.safetensors")).unwrap();
    let error = format!("{:#}", Weights::find(folder.path()).err().unwrap());
    assert!(error.contains("model.safetensors: it is a link that leads nowhere"), "{error}");
}

#[test]
fn files_that_do_not_belong_to_their_index_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (first, mut second, index) = shards(folder);
    let [one, two] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let refused = || {
        let error = format!("{:#}", Weights::find(folder).err().unwrap());
        assert!(error.contains("model.safetensors.index.json cannot be loaded: "), "{error}");
        error
    };
    let bias = "classifier.dense.bias";
    let with = |file: Option<&str>| {
        let mut index = index.clone();
        match file {
            Some(file) => index["weight_map"][bias] = json!(file),
            None => drop(index["weight_map"].as_object_mut().unwrap().remove(bias)),
        }
        write_index(folder, &index);
        refused()
    };
    let error = with(Some(two));
    assert!(error.contains(&format!("{one} has {bias}, which the index says is in {two}")), "{error}");
    let error = with(None);
    assert!(error.contains(&format!("{one} has {bias}, which the index does not name")), "{error}");
    let error = with(Some("../other.safetensors"));
    assert!(
        error.contains("names \"../other.safetensors\": that is no safetensors file beside it"),
        "{error}"
    );
    let error = with(Some("pytorch_model-00001.bin"));
    assert!(error.contains("that is no safetensors file beside it"), "{error}");

    write_index(folder, &index);
    second.rename("roberta.encoder.layer.1.output.dense.bias", "lm_head.bias");
    second.write(&folder.join(two));
    let error = refused();
    assert!(error.contains(&format!("{two} has lm_head.bias, which the index does not name")), "{error}");
    second.keep(|name| name != "lm_head.bias");
    second.write(&folder.join(two));
    let error = refused();
    assert!(error.contains(&format!("{two} has no roberta.encoder.layer.1.output.dense.bias")), "{error}");
    let whole = fs::read(folder.join(one)).unwrap();
    fs::write(folder.join(one), &whole[..whole.len() - 1]).unwrap();
    let error = refused();
    assert!(error.contains(one) && error.contains("it is cut off"), "{error}");
    first.write(&folder.join(one));
    fs::remove_file(folder.join(two)).unwrap();
    let error = refused();
    assert!(error.contains(&format!("{two}: there is no such file")), "{error}");
    fs::write(folder.join("model.safetensors.index.json"), "{}").unwrap();
    assert!(refused().contains("it is no index of safetensors files: missing field `weight_map`"));
}

#[test]
fn weights_of_another_format_are_refused_with_how_to_convert_them() {
    for (file, expected) in [
        ("pytorch_model.bin", "from_pretrained(folder).save_pretrained(folder)"),
        ("pytorch_model.bin.index.json", "from_pretrained(folder).save_pretrained(folder)"),
        ("tf_model.h5", "from_tf=True"),
        ("adapter_model.safetensors", "merge_and_unload()"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(file), "x").unwrap();
        let error = format!("{:#}", Weights::find(folder.path()).err().unwrap());
        assert!(error.contains(&format!("has no model.safetensors, and {file} is not read")), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = format!("{:#}", Weights::find(folder.path()).err().unwrap());
    assert!(error.contains("model.safetensors: there is no such file; the folder is empty"), "{error}");
}
