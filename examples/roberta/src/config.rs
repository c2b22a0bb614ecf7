//! `config.json` of Hugging Face's `transformers`: which model, and how large.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::files;

/// No published model of these families is larger in any direction; a damaged file must not ask for terabytes.
const MAX_SIZE: usize = 1 << 20;

/// Models that differ in their positions, their heads and the names of their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Liu et al., *RoBERTa: A Robustly Optimized BERT Pretraining Approach*, 2019.
    Roberta,
    /// Conneau et al., *Unsupervised Cross-lingual Representation Learning at Scale*, 2019: RoBERTa with another tokenizer.
    XlmRoberta,
    /// Devlin et al., *BERT: Pre-training of Deep Bidirectional Transformers*, 2018.
    Bert,
}

impl Family {
    /// The names of `config.json`.
    const NAMES: [&str; 3] = ["roberta", "xlm-roberta", "bert"];

    /// Whether the model is built as RoBERTa.
    pub fn is_roberta(self) -> bool {
        match self {
            Self::Roberta | Self::XlmRoberta => true,
            Self::Bert => false,
        }
    }

    /// The class of `transformers` for a head, such as `RobertaForMaskedLM` for `MaskedLM`.
    pub fn class(self, head: &str) -> String {
        let family = match self {
            Self::Roberta => "Roberta",
            Self::XlmRoberta => "XLMRoberta",
            Self::Bert => "Bert",
        };
        format!("{family}For{head}")
    }
}

/// The function between the two layers of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    /// With the error function.
    #[serde(rename = "gelu")]
    Gelu,
    /// Its approximation with tanh.
    #[serde(rename = "gelu_new", alias = "gelu_pytorch_tanh")]
    GeluTanh,
}

/// The size of a model. Fields that are not used here are kept, and written again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    /// RoBERTa or BERT.
    pub model_type: Family,
    /// Rows of the token embedding.
    pub vocab_size: usize,
    /// Elements of a token's vector.
    pub hidden_size: usize,
    /// Layers of the encoder.
    pub num_hidden_layers: usize,
    /// Heads of each attention; they share `hidden_size` evenly.
    pub num_attention_heads: usize,
    /// Elements between the two layers of a feed-forward block.
    pub intermediate_size: usize,
    /// The function between them.
    pub hidden_act: Activation,
    /// Dropout behind embeddings, attention and feed-forward blocks.
    pub hidden_dropout_prob: f64,
    /// Dropout of attention's weights.
    pub attention_probs_dropout_prob: f64,
    /// Dropout of the classification head; `hidden_dropout_prob` if there is none.
    #[serde(default)]
    pub classifier_dropout: Option<f64>,
    /// Rows of the position embedding. RoBERTa uses those behind the padding index.
    pub max_position_embeddings: usize,
    /// Rows of the token type embedding.
    pub type_vocab_size: usize,
    /// Added to the variance in layer norms.
    #[serde(default = "default_epsilon")]
    pub layer_norm_eps: f64,
    /// The standard deviation of new weights.
    #[serde(default = "default_range")]
    pub initializer_range: f64,
    /// The padding token.
    #[serde(default)]
    pub pad_token_id: Option<usize>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn default_epsilon() -> f64 {
    1e-12
}

fn default_range() -> f64 {
    0.02
}

impl Config {
    /// Reads `config.json`.
    pub fn read(path: &Path) -> Result<Self> {
        let json = files::read_text(path)?;
        Self::parse(&json).with_context(|| format!("{} cannot be used", path.display()))
    }

    /// Understands the text of a `config.json`, and refuses what this model does not compute.
    pub fn parse(json: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(json)?;
        supported(&value, "model_type", &Family::NAMES)?;
        supported(&value, "hidden_act", &["gelu", "gelu_new", "gelu_pytorch_tanh"])?;
        check_numbers(&value)?;
        let config: Self = serde_json::from_value(value)?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
        ];
        for (name, size) in sizes {
            ensure!((1..=MAX_SIZE).contains(&size), "{name} is {size}: it must be from 1 to {MAX_SIZE}");
        }
        ensure!(
            self.hidden_size.is_multiple_of(self.num_attention_heads),
            "hidden_size {} cannot be divided among num_attention_heads {}",
            self.hidden_size,
            self.num_attention_heads
        );
        let dropouts = [
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
            ("classifier_dropout", self.classifier_dropout()),
        ];
        for (name, dropout) in dropouts {
            ensure!(
                (0.0..1.0).contains(&dropout),
                "{name} is {dropout}: it must be at least 0 and less than 1"
            );
        }
        for (name, number) in
            [("layer_norm_eps", self.layer_norm_eps), ("initializer_range", self.initializer_range)]
        {
            ensure!(number.is_finite() && number > 0.0, "{name} is {number}: it must be greater than 0");
        }
        ensure!(
            self.pad() < self.vocab_size,
            "pad_token_id {} is not in vocab_size {}",
            self.pad(),
            self.vocab_size
        );
        ensure!(
            self.max_tokens() > 0,
            "max_position_embeddings {} leaves no position behind the padding index {}",
            self.max_position_embeddings,
            self.pad()
        );
        self.check_others()
    }

    /// Fields that change what the model computes.
    fn check_others(&self) -> Result<()> {
        let allowed = [
            ("position_embedding_type", Value::from("absolute")),
            ("is_decoder", Value::from(false)),
            ("add_cross_attention", Value::from(false)),
            ("tie_word_embeddings", Value::from(true)),
        ];
        for (name, only) in allowed {
            if let Some(value) = self.other.get(name).filter(|value| !value.is_null() && **value != only) {
                bail!("{name} is {value}: only {only} is supported");
            }
        }
        let refused = [
            (
                "auto_map",
                "the model has code of its own, and what that computes is not known here; remove the field if the weights are \
                 those of an ordinary model",
            ),
            (
                "quantization_config",
                "the weights are quantized: let transformers dequantize and save the model first",
            ),
            ("pruned_heads", "a layer of fewer heads is not computed here"),
        ];
        for (name, why) in refused {
            let empty = |value: &Value| value.is_null() || value.as_object().is_some_and(Map::is_empty);
            if let Some(value) = self.other.get(name).filter(|value| !empty(value)) {
                bail!("{name} is {value}: {why}");
            }
        }
        Ok(())
    }

    /// The same model, which drops this share everywhere.
    ///
    /// # Errors
    /// If it is no share.
    pub fn with_dropout(mut self, dropout: f64) -> Result<Self> {
        ensure!(
            (0.0..1.0).contains(&dropout),
            "--dropout is {dropout}: it must be at least 0, and less than 1"
        );
        (self.hidden_dropout_prob, self.attention_probs_dropout_prob) = (dropout, dropout);
        self.classifier_dropout = Some(dropout);
        Ok(self)
    }

    /// Refuses a classification head that this example would take for one of another kind.
    ///
    /// # Errors
    /// If the head is trained for another loss (`problem_type`), or is not of a class for whole texts (`architectures`).
    pub fn check_head(&self) -> Result<()> {
        let remedy = "begin with a new head: --new-head";
        match self.other.get("problem_type") {
            None | Some(Value::Null) => {}
            Some(Value::String(kind)) if kind == SINGLE_LABEL => {}
            Some(kind) => {
                bail!("problem_type is {kind}, and here a text has one label, {SINGLE_LABEL:?}: {remedy}")
            }
        }
        let class = self.model_type.class("SequenceClassification");
        match self.other.get("architectures") {
            Some(Value::Array(classes)) if !classes.is_empty() => ensure!(
                classes.iter().any(|name| name == class.as_str()),
                "the head is that of {} (architectures), not of {class}: {remedy}",
                Value::from(classes.clone())
            ),
            None | Some(_) => {}
        }
        Ok(())
    }

    /// The padding token; RoBERTa's is 1, BERT's 0.
    pub fn pad(&self) -> usize {
        self.pad_token_id.unwrap_or(match self.model_type {
            Family::Roberta | Family::XlmRoberta => 1,
            Family::Bert => 0,
        })
    }

    /// The longest text, in tokens with the two at its ends.
    pub fn max_tokens(&self) -> usize {
        self.max_position_embeddings.saturating_sub(self.first_position())
    }

    /// The position of the first token. RoBERTa's padding tokens have the padding index as position, and the others those
    /// behind it.
    pub fn first_position(&self) -> usize {
        match self.model_type {
            Family::Roberta | Family::XlmRoberta => self.pad() + 1,
            Family::Bert => 0,
        }
    }

    /// Dropout of the classification head.
    pub fn classifier_dropout(&self) -> f64 {
        self.classifier_dropout.unwrap_or(self.hidden_dropout_prob)
    }

    /// The same for `class`, such as `RobertaForMaskedLM`, and the labels' names, as `transformers` reads them. Weights are written as
    /// f32, whatever the type of the file was.
    pub fn with_labels(mut self, class: &str, labels: &[String]) -> Self {
        self.other.insert("architectures".into(), Value::from(vec![class]));
        for name in ["dtype", "torch_dtype"] {
            if let Some(dtype) = self.other.get_mut(name) {
                *dtype = Value::from("float32");
            }
        }
        if !labels.is_empty() {
            // Older names of the number of labels, which would contradict the new ones.
            for name in ["num_labels", "_num_labels"] {
                self.other.remove(name);
            }
            self.other.insert("problem_type".into(), Value::from(SINGLE_LABEL));
            let names: Map<String, Value> = labels
                .iter()
                .enumerate()
                .map(|(id, name)| (id.to_string(), Value::from(name.as_str())))
                .collect();
            let ids: Map<String, Value> =
                labels.iter().enumerate().map(|(id, name)| (name.clone(), Value::from(id))).collect();
            self.other.insert("id2label".into(), Value::Object(names));
            self.other.insert("label2id".into(), Value::Object(ids));
        }
        self
    }
}

/// The one `problem_type` that is trained here.
const SINGLE_LABEL: &str = "single_label_classification";

/// Names a field that is no number; serde's error would not.
fn check_numbers(config: &Value) -> Result<()> {
    let wholes = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
    ];
    let numbers =
        ["hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range"];
    for name in wholes {
        if let Some(value) = config.get(name) {
            ensure!(value.is_u64(), "{name} is {value}: it must be a whole number");
        }
    }
    for name in numbers {
        if let Some(value) = config.get(name) {
            ensure!(value.is_number(), "{name} is {value}: it must be a number");
        }
    }
    for (name, is_right) in [
        ("pad_token_id", config["pad_token_id"].is_u64()),
        ("classifier_dropout", config["classifier_dropout"].is_number()),
    ] {
        let value = &config[name];
        ensure!(is_right || value.is_null(), "{name} is {value}: it must be a number, or null");
    }
    Ok(())
}

fn supported(config: &Value, name: &str, known: &[&str]) -> Result<()> {
    match config.get(name).filter(|value| !value.is_null()) {
        Some(value) if value.as_str().is_some_and(|value| known.contains(&value)) => Ok(()),
        Some(value) => bail!("{name} is {value}: supported are {}", known.join(", ")),
        None => bail!("{name} is missing: supported are {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const BASE: &str = include_str!("../models/tiny-roberta/config.json");

    fn with(name: &str, value: Value) -> Result<Config> {
        let mut json: Value = serde_json::from_str(BASE).unwrap();
        json[name] = value;
        Config::parse(&json.to_string())
    }

    #[test]
    fn what_the_model_does_not_compute_is_refused() {
        let cases = [
            (
                "model_type",
                Value::from("gpt2"),
                "model_type is \"gpt2\": supported are roberta, xlm-roberta, bert",
            ),
            ("model_type", Value::Null, "model_type is missing"),
            ("hidden_act", Value::from("relu"), "hidden_act is \"relu\""),
            ("hidden_size", Value::from(30), "hidden_size 30 cannot be divided among num_attention_heads 4"),
            ("hidden_size", Value::from(1_u64 << 40), "hidden_size is 1099511627776"),
            ("num_hidden_layers", Value::from(0), "num_hidden_layers is 0"),
            ("hidden_dropout_prob", Value::from(1.0), "hidden_dropout_prob is 1"),
            ("pad_token_id", Value::from(1_000_000), "pad_token_id 1000000 is not in vocab_size"),
            ("position_embedding_type", Value::from("relative_key"), "only \"absolute\" is supported"),
            ("is_decoder", Value::from(true), "is_decoder is true"),
            ("tie_word_embeddings", Value::from(false), "tie_word_embeddings is false"),
            ("hidden_act", Value::from(7), "hidden_act is 7: supported are gelu"),
            ("hidden_size", Value::from(128.0), "hidden_size is 128.0: it must be a whole number"),
            ("layer_norm_eps", Value::Null, "layer_norm_eps is null: it must be a number"),
            ("pad_token_id", Value::from("1"), "pad_token_id is \"1\": it must be a number"),
            (
                "auto_map",
                json!({"AutoModel": "modeling.Other"}),
                "auto_map is {\"AutoModel\":\"modeling.Other\"}",
            ),
            ("quantization_config", json!({"bits": 4}), "the weights are quantized"),
            ("pruned_heads", json!({"0": [1]}), "pruned_heads is {\"0\":[1]}"),
        ];
        for (name, value, expected) in cases {
            let error = with(name, value.clone()).expect_err(&format!("{name} {value}")).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn positions_begin_behind_the_padding_index() {
        let roberta = Config::parse(BASE).unwrap();
        assert_eq!((roberta.pad(), roberta.first_position()), (1, 2));
        assert_eq!(roberta.max_tokens(), roberta.max_position_embeddings - 2);
        let mut json: Value = serde_json::from_str(BASE).unwrap();
        json["model_type"] = "bert".into();
        json["pad_token_id"] = 0.into();
        let bert = Config::parse(&json.to_string()).unwrap();
        assert_eq!(
            (bert.pad(), bert.first_position(), bert.max_tokens()),
            (0, 0, bert.max_position_embeddings)
        );
    }

    #[test]
    fn unknown_fields_are_written_again() {
        let config = with("bos_token_id", Value::from(17)).unwrap();
        let again = serde_json::to_value(config.with_labels("RobertaForMaskedLM", &[])).unwrap();
        assert_eq!((&again["bos_token_id"], &again["hidden_act"]), (&Value::from(17), &Value::from("gelu")));
        assert_eq!(again["architectures"][0], "RobertaForMaskedLM");
    }

    #[test]
    fn what_is_written_says_what_the_weights_and_the_labels_are() {
        let mut config = with("torch_dtype", Value::from("float16")).unwrap();
        for (name, value) in [
            ("num_labels", json!(5)),
            ("problem_type", json!("regression")),
            ("id2label", json!({"0": "old"})),
            ("label2id", json!({"old": 0})),
        ] {
            config.other.insert(name.to_owned(), value);
        }
        let labels = ["ham".to_owned(), "spam".to_owned()];
        let again =
            serde_json::to_value(config.with_labels("RobertaForSequenceClassification", &labels)).unwrap();
        assert_eq!(again["id2label"], json!({"0": "ham", "1": "spam"}));
        assert_eq!(again["label2id"], json!({"ham": 0, "spam": 1}));
        assert_eq!(
            (&again["problem_type"], &again["torch_dtype"], again.get("num_labels")),
            (&json!("single_label_classification"), &json!("float32"), None)
        );
    }

    #[test]
    fn a_head_of_another_kind_is_not_taken_for_one_of_single_labels() {
        let check = |name, value| with(name, value).unwrap().check_head().map_err(|error| error.to_string());
        for kind in ["regression", "multi_label_classification"] {
            let error = check("problem_type", Value::from(kind)).unwrap_err();
            assert!(
                error.contains(&format!("problem_type is {kind:?}")) && error.contains("--new-head"),
                "{error}"
            );
        }
        let error = check("architectures", json!(["RobertaForTokenClassification"])).unwrap_err();
        assert!(error.contains("the head is that of [\"RobertaForTokenClassification\"]"), "{error}");
        check("architectures", json!(["RobertaForSequenceClassification"])).unwrap();
        check("architectures", Value::Null).unwrap();
    }

    #[test]
    fn xlm_roberta_is_roberta_by_another_name() {
        let config = with("model_type", Value::from("xlm-roberta")).unwrap();
        assert_eq!((config.model_type, config.pad(), config.first_position()), (Family::XlmRoberta, 1, 2));
        assert_eq!(config.model_type.class("MaskedLM"), "XLMRobertaForMaskedLM");
        assert_eq!(serde_json::to_value(config).unwrap()["model_type"], "xlm-roberta");
    }
}
