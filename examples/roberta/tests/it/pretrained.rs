//! A folder with a model that was trained before: its labels, its kind, and what does not fit.

use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::tensor::Device;
use phalanx::ProcessGroup;
use roberta::data::Dataset;
use roberta::loading::Loading;
use roberta::tasks::{Classification, Evaluation, ReadOptions, Task};
use roberta::train::evaluate;
use roberta::weights::{Head, Loaded};
use roberta::{Classifier, Config, Family, Inputs, weights};
use serde_json::{Value, json};

use crate::fixtures::{Corpus, Raw, Tensors, assert_close, reference};

const OPTIONS: ReadOptions =
    ReadOptions { max_tokens: 32, dropout: None, head: Head::Kept, allow_unused_tokens: false };

/// Texts, and a classifier with random weights whose labels have these names in this order.
fn corpus(labels: &[&str]) -> Corpus {
    let corpus = Corpus::new(20, 11);
    let model = Classifier::new(&corpus.config, labels.len(), &Device::flex());
    weights::save(&model, corpus.config.model_type, &corpus.path("model.safetensors")).unwrap();
    let labels: Vec<String> = labels.iter().map(|name| (*name).to_owned()).collect();
    let config = corpus.config.clone().with_labels("RobertaForSequenceClassification", &labels);
    fs::write(corpus.path("config.json"), serde_json::to_string(&config).unwrap()).unwrap();
    corpus
}

fn change(path: &Path, field: &str, value: Value) {
    let mut json: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    json[field] = value;
    fs::write(path, json.to_string()).unwrap();
}

fn read(corpus: &Corpus, options: ReadOptions) -> anyhow::Result<(Classification, Classifier, Loaded)> {
    let data = Dataset::read(corpus.folder.path())?;
    Classification::pretrained(corpus.folder.path(), options, data, &Device::flex().autodiff())
}

fn refused(corpus: &Corpus, options: ReadOptions) -> String {
    format!("{:#}", read(corpus, options).err().unwrap())
}

fn evaluated((task, model, _): (Classification, Classifier, Loaded)) -> Evaluation {
    let loading = Loading { batch_size: 4, num_workers: 0 };
    evaluate(&task.into(), &model, &ProcessGroup::alone().unwrap(), loading).unwrap()
}

#[test]
fn a_head_with_its_labels_in_another_order_is_right_as_often() {
    let corpus = corpus(&["ham", "spam"]);
    let (task, model, _) = read(&corpus, OPTIONS).unwrap();
    // What the model says without dropout, counted here by the labels' names.
    let model = model.valid();
    let (mut right, mut loss) = (0, 0.0);
    for example in &task.data.held_out {
        let text = task.text.encode(&example.text).unwrap();
        let inputs = Inputs::new([&text], &task.config, &Device::flex());
        let scores: Vec<f32> = model.forward(&inputs.unwrap()).into_data().iter().collect();
        let said = if scores[0] > scores[1] { "ham" } else { "spam" };
        right += usize::from(said == ["ham", "spam"][example.label]);
        let sum: f64 = scores.iter().map(|score| f64::from(*score).exp()).sum();
        loss -= (f64::from(scores[example.label]).exp() / sum).ln();
    }
    let count = task.data.held_out.len() as f64;
    assert!(2 * right != task.data.held_out.len(), "an odd number of texts tells both orders apart");

    // The same model as another program might have numbered its labels.
    let file = corpus.path("model.safetensors");
    let mut raw = Raw::read(&file);
    for name in ["classifier.out_proj.weight", "classifier.out_proj.bias"] {
        let bytes = raw.bytes_of(name);
        let half = bytes.len() / 2;
        bytes.rotate_left(half);
    }
    raw.write(&file);
    change(&corpus.path("config.json"), "id2label", json!({"0": "SPAM", "1": "HAM"}));
    change(&corpus.path("config.json"), "label2id", json!({"SPAM": 0, "HAM": 1}));
    let swapped = read(&corpus, OPTIONS).unwrap();
    assert_eq!(swapped.0.labels(), ["SPAM", "HAM"]);
    let saved = corpus.path("saved");
    fs::create_dir(&saved).unwrap();
    swapped.0.save(&swapped.1, &saved).unwrap();
    let found = evaluated(swapped);
    assert!((found.accuracy - right as f64 / count).abs() < 1e-9, "{found:?}, {right} of {count}");
    assert!((found.loss - loss / count).abs() < 1e-5, "{found:?}, {}", loss / count);

    // Written again, names and rows still belong together.
    let config: Value =
        serde_json::from_str(&fs::read_to_string(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["id2label"], json!({"0": "SPAM", "1": "HAM"}));
    assert_eq!(config["label2id"], json!({"SPAM": 0, "HAM": 1}));
    let (read, written) = (Tensors::read(&file), Tensors::read(&saved.join("model.safetensors")));
    assert_eq!(read.floats("classifier.out_proj.weight"), written.floats("classifier.out_proj.weight"));
}

#[test]
fn a_head_whose_labels_are_not_the_data_s_is_refused_with_both_lists_or_replaced() {
    let cases = [
        (json!({"0": "ham", "1": "eggs"}), "has the labels [ham, eggs], the data has [ham, spam]"),
        (
            json!({"0": "LABEL_0", "1": "LABEL_1"}),
            "[LABEL_0, LABEL_1], which say nothing, the data has [ham, spam]",
        ),
        (Value::Null, "[LABEL_0, LABEL_1], which say nothing"),
        (
            json!({"0": "a", "1": "b", "2": "c"}),
            "id2label names 3 labels, [a, b, c], and the classification head has 2 rows",
        ),
    ];
    for (names, expected) in cases {
        let corpus = corpus(&["ham", "spam"]);
        change(&corpus.path("config.json"), "id2label", names);
        change(&corpus.path("config.json"), "label2id", Value::Null);
        let error = refused(&corpus, OPTIONS);
        assert!(error.contains("config.json") && error.contains(expected), "{error}");
        let (task, _, loaded) = read(&corpus, ReadOptions { head: Head::New, ..OPTIONS }).unwrap();
        assert_eq!((task.labels(), loaded.new.len()), (&["ham".to_owned(), "spam".to_owned()][..], 4));
    }
}

#[test]
fn a_head_of_another_number_of_labels_is_refused_with_both_shapes_or_replaced() {
    let corpus = corpus(&["a", "b", "c"]);
    let error = refused(&corpus, OPTIONS);
    let expected = "has the shape [3, 16], and the 2 labels of the data, [ham, spam], need [2, 16]";
    assert!(error.contains("classifier.out_proj.weight in ") && error.contains(expected), "{error}");
    assert!(error.contains("--new-head"), "{error}");
    let (_, model, loaded) = read(&corpus, ReadOptions { head: Head::New, ..OPTIONS }).unwrap();
    assert_eq!(loaded.new.len(), 4);
    let case = Tensors::read(&reference("roberta-classifier").join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &corpus.config, &Device::flex().autodiff()).unwrap();
    assert_eq!(model.forward(&inputs).dims(), [3, 2], "three texts, two labels");
}

#[test]
fn a_head_of_another_kind_is_refused_or_replaced() {
    for (field, value) in [
        ("problem_type", json!("multi_label_classification")),
        ("problem_type", json!("regression")),
        ("architectures", json!(["RobertaForTokenClassification"])),
    ] {
        let corpus = corpus(&["ham", "spam"]);
        change(&corpus.path("config.json"), field, value);
        let error = refused(&corpus, OPTIONS);
        assert!(error.contains(field) && error.contains("--new-head"), "{error}");
        let (task, model, _) = read(&corpus, ReadOptions { head: Head::New, ..OPTIONS }).unwrap();
        let saved = corpus.path("saved");
        fs::create_dir(&saved).unwrap();
        task.save(&model, &saved).unwrap();
        let config: Value =
            serde_json::from_str(&fs::read_to_string(saved.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["problem_type"], "single_label_classification");
        assert_eq!(config["architectures"], json!(["RobertaForSequenceClassification"]));
    }
}

#[test]
fn files_of_a_folder_that_do_not_belong_together_are_named() {
    let corpus = corpus(&["ham", "spam"]);
    let path = |name: &str| corpus.path(name);
    let error = refused(&corpus, ReadOptions { max_tokens: 200, ..OPTIONS });
    assert!(
        error.contains("tokenizer.json does not fit the model: texts of 200 tokens (--max-tokens)"),
        "{error}"
    );

    let config = fs::read_to_string(path("config.json")).unwrap();
    change(&path("config.json"), "vocab_size", json!(1001));
    let error = refused(&corpus, OPTIONS);
    assert!(error.contains("and the model rows for 1001 (vocab_size)"), "{error}");
    let error = refused(&corpus, ReadOptions { allow_unused_tokens: true, ..OPTIONS });
    assert!(error.contains("word_embeddings.weight has the shape"), "{error}");
    fs::write(path("config.json"), &config).unwrap();

    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 1355256\n";
    for name in ["config.json", "tokenizer.json", "model.safetensors", "train.jsonl", "labels.json"] {
        let content = fs::read(path(name)).unwrap();
        fs::write(path(name), pointer).unwrap();
        let error = refused(&corpus, OPTIONS);
        assert!(error.contains(name) && error.contains("it is a Git LFS pointer"), "{error}");
        fs::remove_file(path(name)).unwrap();
        let error = refused(&corpus, OPTIONS);
        assert!(error.contains(&format!("{name}: there is no such file; the folder has")), "{error}");
        fs::write(path(name), content).unwrap();
    }
    read(&corpus, OPTIONS).unwrap();
    let data = Dataset::read(corpus.folder.path()).unwrap();
    let nowhere = Classification::pretrained(Path::new("roberta-base"), OPTIONS, data, &Device::flex());
    let error = nowhere.err().unwrap().to_string();
    assert!(
        error.contains("there is no folder roberta-base") && error.contains("nothing is downloaded"),
        "{error}"
    );
}

#[test]
fn xlm_roberta_is_computed_as_roberta_and_keeps_its_name() {
    let folder = reference("roberta-classifier");
    let mut json: Value =
        serde_json::from_str(&fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
    json["model_type"] = json!("xlm-roberta");
    let config = Config::parse(&json.to_string()).unwrap();
    let mut model = Classifier::new(&config, 3, &Device::flex());
    let loaded = weights::load(&mut model, Family::XlmRoberta, &folder.join("model.safetensors")).unwrap();
    assert_eq!(loaded, Loaded::default());
    // In transformers the class inherits all of RoBERTa's.
    let case = Tensors::read(&folder.join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &config, &Device::flex()).unwrap();
    let logits: Vec<f32> = model.forward(&inputs).into_data().iter().collect();
    assert_close("logits", &logits, &case.floats("logits"));

    let corpus = corpus(&["ham", "spam"]);
    change(&corpus.path("config.json"), "model_type", json!("xlm-roberta"));
    change(&corpus.path("config.json"), "architectures", json!(["XLMRobertaForSequenceClassification"]));
    let (task, model, _) = read(&corpus, OPTIONS).unwrap();
    let saved = corpus.path("saved");
    fs::create_dir(&saved).unwrap();
    task.save(&model, &saved).unwrap();
    let config: Value =
        serde_json::from_str(&fs::read_to_string(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "xlm-roberta");
    assert_eq!(config["architectures"], json!(["XLMRobertaForSequenceClassification"]));
}
